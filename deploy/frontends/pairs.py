"""Read Q/DQ pairs: their grids, and the inputs and weights that they belong to.

::

    x --> Q --> DQ --[moves]--> Conv <--[Cast, Transpose]-- DQ <-- int8 w      or Q <-- float w
          scale, zero point                                 scale per channel

`spread_ranges` passes ranges on over nodes whose output values are all input values::

    x (range) --> MaxPool --> y              y gets it
    x ----------> MaxPool --> y (range)      x gets it, if nothing else reads x

MaxPool of quantized values equals the quantized MaxPool, so either side may have the pair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from calibrators.scales import Scale
from deploy.errors import ModelError
from deploy.frontends.affine import weight_groups
from deploy.frontends.checks import to_array
from deploy.graph.index import (
    Graph,
    all_nodes,
    attributes,
    channel_axis,
    describe_node,
    optional_input,
)
from deploy.graph.placement import CUTS, MOVES, keeps_range

Q, DQ = "QuantizeLinear", "DequantizeLinear"
_HALF = 128  # difference of a uint8 code and the int8 code for the same value
VALUE_KEEPING = MOVES | {"MaxPool", "Cast"}  # every value of their output is a value of their input

_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "ConvInteger", "MatMulInteger", "DynamicQuant")


def refuse_integer_operators(model: onnx.ModelProto) -> None:
    """Refuse operators that compute on integers.

    Raises:
        ModelError: names the first such node.
    """
    for node in all_nodes(model.graph):
        if node.op_type.startswith(_INTEGER_OPS):
            raise ModelError(
                "a quantized model must be in the Q/DQ form, got the integer operator"
                f" {describe_node(node)}; export it with QuantizeLinear and"
                " DequantizeLinear (onnxruntime: QuantFormat.QDQ), or give the float model"
            )


class UnfitError(Exception):
    """A pair does not fit the request; the message says why."""


@dataclass(frozen=True, slots=True)
class PairGrid:
    """An integer grid: scales and zero points, each of size 1 or one per channel.

    Attributes:
        scale: float32, above 0.
        zero: zero points as int64, in the range of `dtype`.
        dtype: the stored type, such as "uint8".
        min_code: smallest integer of `dtype`.
        max_code: largest integer of `dtype`.
    """

    scale: NDArray[np.float32]
    zero: NDArray[np.int64]
    dtype: str
    min_code: int
    max_code: int

    @property
    def is_per_tensor(self) -> bool:
        """Whether there is one scale and one zero point."""
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def is_8_bit(self) -> bool:
        """Whether a code has 8 bits."""
        return self.dtype in ("int8", "uint8")

    @property
    def int8_zero(self) -> NDArray[np.int64]:
        """The zero points for int8 codes, of an 8-bit grid."""
        return self.zero - _HALF if self.dtype == "uint8" else self.zero

    def equals(self, other: PairGrid) -> bool:
        """Return whether another grid has bit-identical scales and the same zero points."""
        if self.dtype != other.dtype or self.scale.tobytes() != other.scale.tobytes():
            return False
        return self.zero.tobytes() == other.zero.tobytes()  # of shape [] or [1]


PairGrids = Mapping[str, tuple[PairGrid, ...]]  # tensor of the float model -> grids of its pairs


def find_pair_grid(node: onnx.NodeProto, graph: Graph) -> PairGrid | None:
    """Return scale and zero point of a QuantizeLinear or DequantizeLinear; None if not constant."""
    try:
        return read_pair_grid(node, graph)
    except UnfitError:
        return None


def read_pair_grid(node: onnx.NodeProto, graph: Graph) -> PairGrid:
    """Return scale and zero point of a QuantizeLinear or DequantizeLinear.

    Raises:
        UnfitError: it is computed, not above 0 and finite, or not of an integer type.
    """
    constant = graph.constants.get(optional_input(node, 1))
    if constant is None:
        raise UnfitError("its scale is computed")
    scale = to_array(constant).astype(np.float32)
    if not (np.isfinite(scale) & (scale > 0)).all() or not scale.size:
        raise UnfitError("a scale is not above 0 and finite")
    zero = _zero_points(node, graph, scale)
    return PairGrid(scale, zero.astype(np.int64), str(zero.dtype), *_code_limits(zero.dtype))


def input_grid(node: onnx.NodeProto, graph: Graph, position: int = 0) -> PairGrid:
    """Return scale and zero point of the Q/DQ pair on one input of a layer.

    Between the pair and the layer there may be nodes that keep values, such as a MaxPool.

    Args:
        node: the layer.
        graph: index of the model.
        position: which input, counted from 0.

    Raises:
        UnfitError: the input has no pair with a single scale.
    """
    dequantizer, _ = _find_dequantizer(node.input[position], graph, VALUE_KEEPING)
    if dequantizer is None:
        raise UnfitError("no QuantizeLinear and DequantizeLinear stand on its input")
    quantizer = graph.find_producer(dequantizer.input[0], Q)
    if quantizer is None:  # the DequantizeLinear reads stored integers
        raise UnfitError("its input is no activation")
    grid = read_pair_grid(dequantizer, graph)
    if not grid.is_per_tensor:
        raise UnfitError("its input has a scale a channel")
    if not read_pair_grid(quantizer, graph).equals(grid):
        raise UnfitError("the two scales on its input differ")
    return grid


def weight_grid(node: onnx.NodeProto, graph: Graph) -> tuple[PairGrid, NDArray[np.float32]]:
    """Return the grid of a layer's weight, and the scales of the layer's output channels.

    The grid holds scales, zero points and integer type as the DequantizeLinear has them.

    Returns:
        (grid, scales), the scales float32 [C_out], or [1] for one scale of all channels. They are
        those of the grid, which a ConvTranspose repeats for each of its groups.

    Raises:
        UnfitError: the weight is not quantized, or not in a supported form.
    """
    dequantizer, permutation = _find_dequantizer(node.input[1], graph, {"Cast", "Transpose"})
    if dequantizer is None:
        raise UnfitError("its weight is not quantized")
    # the model stores the integers, or floats from which a QuantizeLinear computes them
    stored_name = dequantizer.input[0]
    quantizer = graph.find_producer(stored_name, Q)
    if quantizer is not None:
        stored_name = quantizer.input[0]
    if stored_name not in graph.constants:
        raise UnfitError("its weight is computed")
    grid = read_pair_grid(dequantizer, graph)
    if grid.scale.size == 1:
        return grid, grid.scale.reshape(1)

    # several scales: their axis must be that of the layer's output channels
    stored_shape = tuple(graph.constants[stored_name].dims)
    rank = len(stored_shape)
    scale_axis = int(attributes(dequantizer).get("axis", 1))  # of the stored weight
    if not -rank <= scale_axis < rank or grid.scale.shape != (stored_shape[scale_axis],):
        raise UnfitError("its weight has several scales a channel")

    # the layer may read the stored weight transposed: its axis i is the stored axis stored_axes[i]
    stored_axes = permutation or list(range(rank))
    if sorted(stored_axes) != list(range(rank)):
        raise UnfitError("its weight is turned in a way that does not fit it")
    if stored_axes.index(scale_axis % rank) != channel_axis(node, rank):
        raise UnfitError("its weight has no scale by output channel")
    # a ConvTranspose has a weight [C_in, C_out / groups, ...], whose scales serve each group; any
    # other layer counts as one group. The attribute `group` may be wrong: it cannot exceed C_in
    groups = weight_groups(node)
    if not 1 <= groups <= stored_shape[stored_axes[0]]:
        raise UnfitError("its weight does not fit its number of groups")
    return grid, np.tile(grid.scale, groups)


def _find_dequantizer(
    tensor: str, graph: Graph, skipped_types: Collection[str]
) -> tuple[onnx.NodeProto | None, list[int]]:
    """Return the DequantizeLinear from which a tensor comes, and how its output was transposed.

    Args:
        tensor: name of the tensor.
        graph: index of the model.
        skipped_types: types of the nodes that may stand between the DequantizeLinear and `tensor`.

    Returns:
        (node, permutation); (None, []) without such a node, or if several nodes transpose; the
        permutation is empty if no node transposes.
    """
    permutation: list[int] = []
    node = graph.producer.get(tensor)
    while node is not None and node.op_type in skipped_types:
        if node.op_type == "Transpose":
            if permutation:
                return None, []
            permutation = attributes(node).get("perm", [1, 0])  # the default of a matrix
        node = graph.producer.get(node.input[0])
    if node is None or node.op_type != DQ:
        return None, []
    return node, permutation


def _code_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and largest integer of a type."""
    match = re.fullmatch(r"(u?)int(\d+)", str(dtype))  # numpy knows no int4, ml_dtypes does
    if match is None:
        raise UnfitError(f"it is quantized to {dtype}")
    count = 2 ** int(match[2])
    if match[1]:
        return 0, count - 1
    return -count // 2, count // 2 - 1


def _zero_points(node: onnx.NodeProto, graph: Graph, scale: NDArray[np.float32]) -> NDArray[Any]:
    """Return the zero points of a Q or DQ node, in the type of its codes; zeros if it has none.

    `scale`: of the node; zeros have its shape.
    """
    name = optional_input(node, 2)
    if name:
        if name not in graph.constants:
            raise UnfitError("its zero point is computed")
        return to_array(graph.constants[name])

    # without a zero point, the type is that of the codes which a DequantizeLinear reads: stored
    # integers, or the output of a QuantizeLinear, which may name its type in an attribute
    if node.op_type == DQ:
        codes = graph.constants.get(node.input[0])
        if codes is not None:
            return np.zeros(scale.shape, to_array(codes).dtype)
        quantizer = graph.find_producer(node.input[0], Q)
        if quantizer is not None:
            return np.zeros(scale.shape, _zero_points(quantizer, graph, scale).dtype)
        return np.zeros(scale.shape, np.uint8)  # other integers, whose type is not looked up
    elem_type = attributes(node).get("output_dtype", 0) or onnx.TensorProto.UINT8  # ONNX's default
    if elem_type not in helper.get_all_tensor_dtypes():
        raise UnfitError(f"ONNX has no type {elem_type}, its output_dtype")
    return np.zeros(scale.shape, helper.tensor_dtype_to_np_dtype(elem_type))


# float16 models have casts at their ends
_RANGE_KEEPING = MOVES | CUTS | {"MaxPool", "Resize", "Cast"}


def spread_ranges(graph: Graph, ranges: Mapping[str, Scale]) -> dict[str, Scale]:
    """Return the ranges, and those of further tensors that range-keeping nodes connect with them.

    `ranges`: tensor -> the `Scale` that holds its range.
    """
    all_ranges = dict(ranges)
    ends = [  # input and output of each node that keeps a range
        (node.input[0], node.output[0])
        for node in graph.nodes
        if node.op_type in _RANGE_KEEPING and keeps_range(graph, node)
    ]
    for source, output in reversed(ends):
        # The pair behind the output clips what this node reads, not what another reader of the
        # source would read. So a source with several readers does not get the range.
        if output in all_ranges and graph.only_reader(source) is not None:
            all_ranges.setdefault(source, all_ranges[output])
    for source, output in ends:
        if source in all_ranges:
            all_ranges.setdefault(output, all_ranges[source])
    return all_ranges
