"""What the rewrites for ONNX Runtime's kernels share: scope, kernel times, new nodes, constants.

A rewrite that decides node by node is a `deploy.graph.rewrite.RewriteRule` over a `RewriteScope`:
pattern (which nodes), check (why not here), rewrite (what stands instead). Rewrites of several
nodes at a time have the same three parts as functions, in this order.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import make_node
from deploy.graph.gates import Gate
from deploy.graph.index import Graph, Nodes, by_name, optional_input, padded_name
from deploy.graph.rewrite import RewriteRule, apply_rule
from deploy.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvKernels:
    """Measured times that decide between forms of an int8 Conv on a kind of CPU.

    A time is that of a product, in depthwise products of a multiple of 16 channels.

    Attributes:
        max_zero_products: most products with zeros that a stem gets for an output pixel.
        eight_extra: extra time of a depthwise product with 8 channels beyond a multiple of 16.
        uneven_extra: extra time with any other number of channels beyond.
        int8: time of a product in a dense int8 layer.
        float32: time of a product in a dense float32 layer.
    """

    max_zero_products: float
    eight_extra: float
    uneven_extra: float
    int8: float
    float32: float


# `benchmarks/int8_kernels.py` on an EPYC 9005 with ONNX Runtime 1.32 (one thread), `avx2` with the
# wider instructions hidden from it. Other kinds of CPU take `avx2`, which gains least.
KERNELS = {
    "vnni": ConvKernels(
        max_zero_products=math.inf, eight_extra=1.8, uneven_extra=2.4, int8=1 / 8, float32=1 / 3
    ),
    "avx2": ConvKernels(
        max_zero_products=576, eight_extra=0.5, uneven_extra=0.8, int8=1 / 5, float32=1 / 3
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteContext:
    """What the rewrites of one model know.

    Attributes:
        float_graph: the model without pairs, with shapes.
        float_nodes: names of the nodes that stay float.
        float_gates: gates of `float_graph` that stay float.
        has_given_pairs: whether the model is a Q/DQ model that the user gave, kept as it is.
        kernels: kernel times of the CPU that runs the model.
    """

    float_graph: Graph
    float_nodes: frozenset[str] = frozenset()
    float_gates: tuple[Gate, ...] = ()
    has_given_pairs: bool = False
    kernels: ConvKernels = KERNELS["avx2"]


@dataclass(frozen=True)
class RewriteScope:
    """What a rule knows besides the node.

    Attributes:
        model: the model with pairs, whose constants a rewrite may extend.
        context: its float form, which nodes stay float, and the CPU.
    """

    model: onnx.ModelProto
    context: RewriteContext

    @cached_property
    def graph(self) -> Graph:
        """Index of the model, as it was before the rule."""
        return Graph(self.model)

    @cached_property
    def float_node_by_name(self) -> dict[str, onnx.NodeProto]:
        """Name -> node of the float model."""
        return by_name(self.context.float_graph.nodes)

    def add_constant(self, name: str, values: Array) -> str:
        """Add an initializer; return its name."""
        self.model.graph.initializer.append(numpy_helper.from_array(values, name))
        return name


def apply_to_model(
    rule: RewriteRule[RewriteScope], model: onnx.ModelProto, context: RewriteContext
) -> bool:
    """Apply a rule to a model with Q/DQ pairs, in place; return whether it changed anything."""
    return apply_rule(model.graph, rule, RewriteScope(model, context)) > 0


class ReplacementNodes:
    """The nodes in place of one node, named after it, and their constants."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.constants: list[onnx.TensorProto] = []

    def make_named_node(
        self, op_type: str, inputs: Sequence[str], suffix: str, **attributes: Any
    ) -> onnx.NodeProto:
        """Return a node whose name, and that of its only output, is NAME/suffix."""
        name = f"{self.name}/{suffix}"
        return make_node(op_type, inputs, name, name, **attributes)

    def add_constant(self, suffix: str, values: Sequence[int] | Array | np.float32) -> str:
        """Add a constant, int64 numbers or an array as it is; return its name, NAME/suffix."""
        name = f"{self.name}/{suffix}"
        self.constants.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name

    def add_constants_to(self, graph: onnx.GraphProto, channels: int | None) -> None:
        """Add the constants to a graph, and the type of NAME/rows, uint8 [N, H, W, C].

        ONNX Runtime changes the layout of the Convs downstream only if it knows this rank.

        `channels`: C; None if it is unknown.
        """
        graph.initializer.extend(self.constants)
        sizes = [None, None, None, channels]
        graph.value_info.append(
            helper.make_tensor_value_info(f"{self.name}/rows", onnx.TensorProto.UINT8, sizes)
        )

    def scaled_shape(
        self, source: str, order: Sequence[int], factors: Sequence[int], channels: int | None = None
    ) -> tuple[str, Nodes]:
        """Return nodes that compute a Reshape's shape when the model runs, and the shape's name.

        The shape has the sizes of another tensor, in another order, each times a factor.

        Args:
            source: the other tensor.
            order: its axes in the order of the shape, such as [0, 2, 3].
            factors: factor of each of these sizes.
            channels: a last size, to be appended as it is; None to append none.

        Returns:
            (name of the shape, nodes that compute it).
        """
        sizes = self.make_named_node("Shape", [source], "sizes")
        ordered = self.make_named_node(
            "Gather", [sizes.name, self.add_constant("order", order)], "ordered"
        )
        operands = [ordered.name, self.add_constant("times", factors)]
        if channels is None:
            shape_nodes = [self.make_named_node("Mul", operands, "shape")]
        else:
            larger = self.make_named_node("Mul", operands, "larger")
            parts = [larger.name, self.add_constant("channels", [channels])]
            shape_nodes = [larger, self.make_named_node("Concat", parts, "shape", axis=0)]
        return shape_nodes[-1].name, [sizes, ordered, *shape_nodes]


def replaced_nodes(
    model: onnx.ModelProto, replacements: Mapping[str, Sequence[onnx.NodeProto]]
) -> Nodes:
    """Return a model's nodes; those named in `replacements` are replaced by their new nodes."""
    nodes: Nodes = []
    for node in model.graph.node:
        nodes += replacements.get(node.name, [node])
    return nodes


WEIGHT, BIAS = 1, 2  # input positions of a Conv


def weight_and_bias_positions(node: onnx.NodeProto) -> list[int]:
    """Return the input positions of a Conv's weight and, if there is one, its bias."""
    return [position for position, name in enumerate(node.input) if position and name]


def find_stored_integers(
    graph: Graph, node: onnx.NodeProto, position: int
) -> onnx.TensorProto | None:
    """Return the integers that a node reads through a DequantizeLinear, or None."""
    dequantize = graph.find_producer(optional_input(node, position), "DequantizeLinear")
    return None if dequantize is None else graph.initializers.get(dequantize.input[0])


def find_unshared_integers(
    graph: Graph, node: onnx.NodeProto, position: int = WEIGHT
) -> onnx.TensorProto | None:
    """Return the integers of a Conv's weight or bias, if no other node reads them."""
    integers = find_stored_integers(graph, node, position)
    return integers if graph.only_reader(node.input[position]) is not None else None


def append_zero_channels(
    model: onnx.ModelProto,
    graph: Graph,
    node: onnx.NodeProto,
    position: int,
    axes: Collection[int],
    count: int,
) -> None:
    """Append zeros to a Conv's weight or bias, in place, float or read through a DequantizeLinear.

    The node then reads a padded copy of the constant. If integers get more output channels, their
    scales and zero points, one for each channel, are padded too, with the last value.

    Args:
        model: gets the new constants.
        graph: its index, to which they are added too.
        node: the Conv.
        position: `WEIGHT` or `BIAS`.
        axes: axes of the constant that get longer.
        count: number of zeros appended to each axis.
    """

    def pad(name: str, padded_axes: Collection[int], mode: Literal["constant", "edge"]) -> str:
        """Add a copy of a constant with `count` more zeros or last values; return its name."""
        values = numpy_helper.to_array(graph.initializers[name])
        widths = np.zeros((values.ndim, 2), np.int64)  # added [before, after] on each axis
        widths[list(padded_axes), 1] = count
        tensor = numpy_helper.from_array(np.pad(values, widths, mode), padded_name(name, node.name))
        model.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = tensor
        return tensor.name

    constant = node.input[position]
    if constant in graph.initializers:  # float
        node.input[position] = pad(constant, axes, "constant")
        return
    dequantize = graph.producer[constant]
    integers, *params = dequantize.input  # scale and zero point
    # the integer 0 is 0.0: zero points of weights and biases are 0
    dequantize.input[0] = pad(integers, axes, "constant")
    has_more_outputs = 0 in axes
    if has_more_outputs:
        for index, param in enumerate(params, start=1):
            is_per_channel = math.prod(graph.initializers[param].dims) > 1
            if is_per_channel:
                dequantize.input[index] = pad(param, [0], "edge")
