"""What one Q/DQ pair of a model says, whoever wrote it: its grid, and whose input or weight it is.

::

    x --> Q --> DQ --[moves]--> Conv <--[Cast, Transpose]-- DQ <-- int8 w      or Q <-- float w
          scale, zero point                                 scale a channel

Ranges handed on where a node gives the values that it reads, and no others.

::

    x (range) --> MaxPool --> y              y gets it
    x ----------> MaxPool --> y (range)      x gets it, if nothing else reads x

A MaxPool of quantized values is the quantized MaxPool, so that it is all one where the pair stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.frontends.checks import to_array
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import CUTS, MOVES, keeps_range

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from calibrators.scales import Scale


Q, DQ = "QuantizeLinear", "DequantizeLinear"
_HALF = 128  # a uint8 code stands for the int8 code so far below
KEEPING = MOVES | {"MaxPool", "Cast"}  # give values that they read, and no others


class UnfitError(Exception):
    """Why a pair does not say what is asked of it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of integers: scale and zero points, each of size 1 or one a channel.

    Attributes:
        scale: float32, above 0.
        zero: int64, in the type that is stored.
        dtype: its name, such as "uint8".
        least, most: its codes.
    """

    scale: NDArray[np.float32]
    zero: NDArray[np.int64]
    dtype: str
    least: int
    most: int

    @property
    def single(self) -> bool:
        """Whether there is one scale and one zero point."""
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def bits8(self) -> bool:
        """Whether a code has 8 bits."""
        return self.dtype in ("int8", "uint8")

    @property
    def offset(self) -> NDArray[np.int64]:
        """The zero points in int8, of a grid of 8 bits."""
        return self.zero - (_HALF if self.dtype == "uint8" else 0)

    def same(self, other: Grid) -> bool:
        """Whether another grid has these scales to the bit, and these zero points."""
        alike = self.scale.tobytes() == other.scale.tobytes() and self.dtype == other.dtype
        return alike and self.zero.tolist() == other.zero.tolist()


def grid_of(node: onnx.NodeProto, index: Graph) -> Grid | None:
    """The grid of a QuantizeLinear or DequantizeLinear; None where it is not a constant one."""
    try:
        return sound_grid(node, index)
    except UnfitError:
        return None


def sound_grid(node: onnx.NodeProto, index: Graph) -> Grid:
    """The grid of a QuantizeLinear or DequantizeLinear.

    Raises:
        UnfitError: it is computed, not above 0 and finite, or of a type without integers.
    """
    if len(node.input) < 2 or node.input[1] not in index.constants:
        raise UnfitError("its scale is computed")
    scale = to_array(index.constants[node.input[1]]).astype(np.float32)
    if not (np.isfinite(scale) & (scale > 0)).all() or not scale.size:
        raise UnfitError("a scale is not above 0 and finite")
    zero = _zero(node, index, scale)
    limits = _codes(zero.dtype)
    if limits is None:
        raise UnfitError(f"it is quantized to {zero.dtype}")
    return Grid(scale, zero.astype(np.int64), str(zero.dtype), *limits)


def input_grid(node: onnx.NodeProto, index: Graph, place: int = 0) -> Grid:
    """The grid of what a layer reads as its input of this place.

    Raises:
        UnfitError: no pair of one scale stands there.
    """
    read = _behind(node.input[place], index, KEEPING)[0]
    if read is None or read.op_type != DQ:
        raise UnfitError("no QuantizeLinear and DequantizeLinear stand on its input")
    quantizer = index.producer.get(read.input[0])
    if quantizer is None or quantizer.op_type != Q:
        raise UnfitError("its input is no activation")
    grid = sound_grid(read, index)
    if not grid.single:
        raise UnfitError("its input has a scale a channel")
    if not sound_grid(quantizer, index).same(grid):
        raise UnfitError("the two scales on its input differ")
    return grid


def weight_grid(node: onnx.NodeProto, index: Graph) -> tuple[Grid, NDArray[np.float32]]:
    """The grid of a layer's weight; its scales, float32 [C_out] by output channel or [1].

    Raises:
        UnfitError: it is not quantized, or not so.
    """
    read, turned = _behind(node.input[1], index, frozenset({"Cast", "Transpose"}))
    if read is None or read.op_type != DQ:
        raise UnfitError("its weight is not quantized")
    source = read.input[0]
    quantizer = index.producer.get(source)
    if quantizer is not None and quantizer.op_type == Q:
        source = quantizer.input[0]
    if source not in index.constants:
        raise UnfitError("its weight is computed")
    grid = sound_grid(read, index)
    if grid.scale.size == 1:
        return grid, grid.scale.reshape(1)
    dims = list(index.constants[source].dims)
    axis = int(attributes(read).get("axis", 1)) % max(len(dims), 1)
    if grid.scale.ndim != 1 or axis >= len(dims) or dims[axis] != grid.scale.size:
        raise UnfitError("its weight has several scales a channel")
    if turned and sorted(turned) != list(range(len(dims))):
        raise UnfitError("its weight is turned in a way that does not fit it")
    if (turned.index(axis) if turned else axis) != _channels(node, len(dims)):
        raise UnfitError("its weight has no scale by output channel")
    group = int(attributes(node).get("group", 1)) if node.op_type == "ConvTranspose" else 1
    return grid, np.tile(grid.scale, max(group, 1))


def _channels(node: onnx.NodeProto, rank: int) -> int:
    """The axis of a weight of so many dimensions that its output channels run along."""
    if node.op_type == "MatMul":
        return rank - 1
    if node.op_type == "Gemm":
        return 0 if attributes(node).get("transB", 0) else 1
    return 0 if node.op_type == "Conv" else 1


def _behind(
    tensor: str, index: Graph, passing: frozenset[str]
) -> tuple[onnx.NodeProto | None, tuple[int, ...]]:
    """What makes a tensor, before nodes that pass values on, and the one permutation of these."""
    turned: tuple[int, ...] = ()
    node = index.producer.get(tensor)
    while node is not None and node.op_type in passing:
        if node.op_type == "Transpose":
            if turned:
                return None, ()
            turned = tuple(attributes(node).get("perm", (1, 0)))
        node = index.producer.get(node.input[0])
    return node, turned


def _codes(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """The least and the largest integer of a type; None of one that holds no integers."""
    found = re.fullmatch(r"(u?)int(\d+)", str(dtype))  # numpy knows no int4, ml_dtypes does
    if found is None:
        return None
    bits = int(found[2])
    return (0, 2**bits - 1) if found[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _zero(node: onnx.NodeProto, index: Graph, scale: NDArray[np.float32]) -> NDArray[Any]:
    """Zero points in the type that is stored."""
    from onnx import helper

    if len(node.input) > 2 and node.input[2]:
        if node.input[2] not in index.constants:
            raise UnfitError("its zero point is computed")
        return to_array(index.constants[node.input[2]])
    stored = index.constants.get(node.input[0])
    if node.op_type == DQ and stored is not None:
        return np.zeros(scale.shape, to_array(stored).dtype)
    quantizer = node if node.op_type == Q else index.producer.get(node.input[0])
    if quantizer is not None and quantizer is not node:
        return _zero(quantizer, index, scale)
    kind = attributes(node).get("output_dtype", 0) or 2  # onnx's default is uint8
    return np.zeros(scale.shape, helper.tensor_dtype_to_np_dtype(kind))


_KEEPING = MOVES | CUTS | {"MaxPool", "Resize", "Cast"}  # a float16 model is cast at its ends


def spread(graph: Graph, scales: Mapping[str, Scale]) -> dict[str, Scale]:
    """The ranges with those of tensors that nodes between only hand on."""
    known = dict(scales)
    moves = [n for n in graph.nodes if n.op_type in _KEEPING and n.input and n.output]
    between = [node for node in moves if keeps_range(graph, node)]
    for node in reversed(between):
        source, made = node.input[0], node.output[0]
        if made in known and source not in known and graph.only_reader(source) is not None:
            known[source] = known[made]
    for node in between:
        if node.input[0] in known:
            known.setdefault(node.output[0], known[node.input[0]])
    return known
