"""Nearest upsampling of int8 tensors by integer factors becomes copies of rows and pixels.

ONNX Runtime's Resize looks up every int8 value alone, in one thread; a pixel's channels, which lie
together as the int8 Convs want them, are copied as one block::

    q [n, c, h, w] -> Transpose -> Unsqueeze [n, h, 1, w, 1, c] -> Tile [n, h, s, w, s, c]
                   -> Reshape [n, h s, w s, c] -> Transpose -> [n, c, h s, w s]

It works on the integers themselves, since a Resize keeps their scale (1 x 96 x 80 x 80 doubled:
156 us in place of 2067 us in one thread).

Source: ONNX operator Resize-13 (coordinate_transformation_mode, nearest_mode).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.graph.edit import drop_dead, make_node, replace_nodes
from deploy.graph.index import Graph, Nodes, Shape, attributes, optional_input
from deploy.graph.placement import resize_mode
from deploy.targets.onnxruntime.rewrite_base import (
    ReplacementNodes,
    RewriteContext,
    replaced_nodes,
)


def write_upsampling(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Replace each Resize between Q/DQ pairs that only repeats pixels by nodes that copy them.

    They copy the integers, so that the DequantizeLinear before the Resize and the QuantizeLinear
    after it are gone too.

    Left alone: a Resize that interpolates or shifts pixels, one of unknown rank, and one whose
    pairs differ, since the integers would change.
    """
    graph = Graph(model)
    replacements = {}  # name of a node -> the nodes in its place
    for node in graph.nodes:
        if node.op_type != "Resize":
            continue
        sizes = context.float_graph.shapes.get(node.input[0])
        if sizes is None or len(sizes) != 4:  # no [N, C, H, W]
            continue
        factors = _repeat_factors(graph, node)  # None if it does not only repeat pixels
        integers = _integers_around(graph, node)  # None if it is not between equal pairs
        if factors is None or integers is None:
            continue
        source, output = integers
        copies = _PixelCopies(node.name, factors, sizes)
        replacements[node.name] = copies.write(source, output)
        (quantize,) = graph.readers[node.output[0]]
        replacements[quantize.name] = []  # the copies make its output
        channels = sizes[1] if isinstance(sizes[1], int) else None  # None if it is unknown
        copies.add_constants_to(model.graph, channels)
    if replacements:
        replace_nodes(model.graph, replaced_nodes(model, replacements))
        drop_dead(model.graph)  # DequantizeLinears that only the Resize read


def _repeat_factors(graph: Graph, node: onnx.NodeProto) -> tuple[int, int] | None:
    """Return (rows, columns) by which a Resize repeats pixels; None if it does something else."""
    attrs = attributes(node)
    if resize_mode(node) != "nearest" or attrs.get("axes"):
        return None
    scales = graph.initializers.get(optional_input(node, 2))
    if scales is None or scales.dims != [4]:  # the output's size is given or computed instead
        return None
    # factors of batch, channels, rows and columns
    factors = numpy_helper.to_array(scales).tolist()
    are_integers = all(factor == int(factor) >= 1 for factor in factors)
    if not are_integers or factors[:2] != [1, 1] or not _repeats_pixels(attrs, factors):
        return None
    return int(factors[2]), int(factors[3])


def _repeats_pixels(attrs: Mapping[str, bytes], factors: Sequence[float]) -> bool:
    """Whether a Resize with these attributes makes output pixel i of input pixel i // factor."""
    coordinates = attrs.get("coordinate_transformation_mode", b"half_pixel").decode()
    rounding = attrs.get("nearest_mode", b"round_prefer_floor").decode()
    # an input pixel lies in the middle of its copies
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        return rounding.startswith("round")
    if coordinates != "asymmetric":
        return False
    # output pixel i lies at i / factor; with factor 2, round_prefer_floor rounds its halves down
    return rounding == "floor" or (rounding == "round_prefer_floor" and max(factors) <= 2)


def _integers_around(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    """Return the integers from which a node's input is dequantized, and those made of its output.

    None if either is missing, or if their scales or zero points differ.
    """
    dequantize = graph.find_producer(node.input[0], "DequantizeLinear")
    quantize = graph.only_reader(node.output[0], "QuantizeLinear")
    if dequantize is None or quantize is None:
        return None
    params = [graph.scalar(name) for name in dequantize.input[1:]]  # scale and zero point
    if None in params or params != [graph.scalar(name) for name in quantize.input[1:]]:
        return None
    return dequantize.input[0], quantize.output[0]


class _PixelCopies(ReplacementNodes):
    """The nodes in place of one Resize, and their constants."""

    def __init__(self, name: str, factors: tuple[int, int], sizes: Shape) -> None:
        super().__init__(name)
        self.row_factor, self.column_factor = factors
        self.sizes = sizes

    def write(self, source: str, output: str) -> Nodes:
        """Return the nodes that copy each pixel of an int8 tensor r times down and c times right.

        In turn, they make tensors of these shapes ::

            [N, C, H, W]              source
            [N, H, W, C]              channels last
            [N, H, 1, W, 1, C]        a new axis behind the rows, and behind the columns
            [N, H, r, W, c, C]        each pixel r x c times
            [N, H r, W c, C]          rows of pixels
            [N, C, H r, W c]          channels first
        """
        shape, shape_nodes = self._write_shape(source)
        axes = self.add_constant("axes", [2, 4])
        repeats = self.add_constant("often", [1, 1, self.row_factor, 1, self.column_factor, 1])
        # `make_named_node` gives a node and its output the same name, NAME/suffix, whose suffix is
        # the third argument; so the name of a node is that of the tensor that the next one reads
        channels_last = self.make_named_node("Transpose", [source], "turned", perm=[0, 2, 3, 1])
        spread = self.make_named_node("Unsqueeze", [channels_last.name, axes], "apart")
        repeated = self.make_named_node("Tile", [spread.name, repeats], "repeated")
        pixels = self.make_named_node("Reshape", [repeated.name, shape], "rows")
        channels_first = make_node("Transpose", [pixels.name], output, self.name, perm=[0, 3, 1, 2])
        return [channels_last, spread, repeated, *shape_nodes, pixels, channels_first]

    def _write_shape(self, source: str) -> tuple[str, Nodes]:
        """Return (name of the shape [N, H r, W c, C], the nodes that compute it).

        It is a constant without nodes if the sizes are known.
        """
        factors = [1, self.row_factor, self.column_factor, 1]
        _, channels, height, width = self.sizes
        if isinstance(channels, int) and isinstance(height, int) and isinstance(width, int):
            return self.add_constant("shape", np.array([-1, height, width, channels]) * factors), []
        return self.scaled_shape(source, [0, 2, 3, 1], factors)
