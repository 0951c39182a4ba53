"""Fold nodes that scale and shift each channel into the layer before them, in float64.

These are BatchNormalization, and Mul, Div, Add and Sub with one constant per channel or a single
one, as Paddle exports have after Conv, ConvTranspose and Gemm:

    (conv(x, W) + b) * s + t  =  conv(x, W s) + (b s + t)     for each output channel
    BatchNormalization: s = gamma / sqrt(var + epsilon), t = beta - mean s

The layer then produces the folded node's output, under its name. Between the two there may be nodes
that only move values, or a Concat of several layers, each of which takes its own channels::

    Conv [N, C, 1, T] -- Squeeze(2) [N, C, T] -- Add [C, 1]             Conv1D of Keras
    Conv [N, C, H, W] -- Transpose(0, 2, 3, 1) [N, H, W, C] -- Add [C]  an NHWC model
    Conv, Conv -- Concat [N, C + D, H, W] -- BatchNormalization         YOLOv5's CSP, MixNet

The last of these nodes then produces the folded output; tensors before it, whose values changed,
get new names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from deploy.frontends.checks import to_array
from deploy.graph.edit import claim_name, replace_nodes, unique_name
from deploy.graph.index import attributes, count_reads

MOVES = frozenset({"Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class MovedLayer:
    """A layer, and the moves between it and a tensor.

    Attributes:
        layer: produces the input of the first move.
    """

    layer: onnx.NodeProto
    moves: tuple[onnx.NodeProto, ...] = ()

    def axis(self, rank: int, constants: Mapping[str, onnx.TensorProto]) -> tuple[int, int] | None:
        """Return (axis of the channels, rank) after the moves; None if unknown.

        Args:
            rank: of the layer's output, whose channels are on axis 1.
            constants: hold the axes of Squeeze and Unsqueeze.
        """
        axes: list[int | None] = list(range(rank))
        for node in self.moves:
            new_axes = _axes_after(node, axes, constants)
            if new_axes is None:
                return None
            axes = new_axes
        return (axes.index(1), len(axes)) if 1 in axes else None


@dataclass(frozen=True, slots=True)
class JoinedLayers:
    """One layer, or several whose channels a Concat joins, with their moves.

    Attributes:
        parts: in the order of their channels.
        concat: None for one layer.
    """

    parts: tuple[MovedLayer, ...]
    concat: onnx.NodeProto | None = None

    @property
    def nodes(self) -> tuple[onnx.NodeProto, ...]:
        """All nodes; the last one produces the tensor."""
        nodes = (node for part in self.parts for node in (part.layer, *part.moves))
        return (*nodes, *(() if self.concat is None else (self.concat,)))

    def links(self) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto, int]]:
        """Yield (node, the node that reads it, at which input) for all nodes but the last."""
        for number, part in enumerate(self.parts):
            chain = (part.layer, *part.moves)
            yield from ((node, after, 0) for node, after in zip(chain, part.moves, strict=False))
            if self.concat is not None:
                yield chain[-1], self.concat, number

    def axis(
        self, ranks: Sequence[int], constants: Mapping[str, onnx.TensorProto]
    ) -> tuple[int, int] | None:
        """Return `MovedLayer.axis`; None also if the Concat is along another axis."""
        places = {part.axis(rank, constants) for part, rank in zip(self.parts, ranks, strict=True)}
        place = places.pop()
        if places or place is None or self.concat is None:
            return None if places else place
        axis, rank = place
        return place if attributes(self.concat).get("axis") in (axis, axis - rank) else None


def find_source_layers(
    tensor: str,
    makers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, int],
    layers: Sequence[str],
) -> JoinedLayers | None:
    """Return the layers, of these types, that produce a tensor: one, or all inputs of a Concat."""
    producer = makers.get(tensor)
    concat = producer if producer is not None and producer.op_type == "Concat" else None
    if concat is not None and readers[tensor] != 1:
        return None
    parts = []
    for end in (tensor,) if concat is None else concat.input:
        # the layer, directly or behind moves with one reader each
        moves: list[onnx.NodeProto] = []
        node = makers.get(end)
        while node is not None and readers[node.output[0]] == 1 and node.op_type in MOVES:
            moves.insert(0, node)
            node = makers.get(node.input[0])
        if node is None or node.op_type not in layers or readers[node.output[0]] != 1:
            return None
        parts.append(MovedLayer(node, tuple(moves)))
    return JoinedLayers(tuple(parts), concat) if parts else None


def _axes_after(
    node: onnx.NodeProto, axes: list[int | None], constants: Mapping[str, onnx.TensorProto]
) -> list[int | None] | None:
    """Return which of the layer's axes each axis is after a move; None for an inserted axis."""
    if node.op_type == "Transpose":
        order = attributes(node).get("perm", range(len(axes))[::-1])
        fits = sorted(order) == list(range(len(axes)))
        return [axes[place] for place in order] if fits else None
    wanted_axes = _axes_of(node, constants)
    if wanted_axes is None:
        return None
    rank = len(axes) + (len(wanted_axes) if node.op_type == "Unsqueeze" else 0)
    if not all(-rank <= place < rank for place in wanted_axes):
        return None
    places = {place % rank for place in wanted_axes}
    if node.op_type == "Squeeze":
        return [axis for place, axis in enumerate(axes) if place not in places]
    left = iter(axes)
    return [None if place in places else next(left, None) for place in range(rank)]


def _axes_of(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> list[int] | None:
    """Return the axes of a Squeeze or Unsqueeze, an attribute before opset 13."""
    if len(node.input) < 2:
        axes = attributes(node).get("axes")
        return None if axes is None else list(axes)
    array = to_array(constants[node.input[1]]) if node.input[1] in constants else None
    return None if array is None else [int(place) for place in array.reshape(-1)]


if TYPE_CHECKING:
    Affine = tuple[NDArray[np.float64], NDArray[np.float64]]  # [C] scale, [C] shift

_INTO = ("Conv", "ConvTranspose", "Gemm")
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
NORM = "BatchNormalization"


def fold_affine(graph: onnx.GraphProto, *, excluded: Collection[str] = ()) -> Counter[str]:
    """Fold all nodes that can be folded exactly, in place; return their numbers by type.

    A node stays if its input is not the output of a layer (or several joined layers) with constant
    weights, or if that input has other readers.

    Args:
        graph: with unique node names if `excluded` is given.
        excluded: names of nodes that are not folded.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    counts = count_reads(graph)
    makers = {name: node for node in graph.node for name in node.output if name}
    remaining: list[onnx.NodeProto] = []
    folded: Counter[str] = Counter()
    taken, fresh = {*weights, *counts, *makers}, set[str]()
    for node in graph.node:
        source = "" if node.name in excluded else _varying_input(node, weights)
        joined = find_source_layers(source, makers, counts, _INTO)
        if joined is None or not _fold(graph, weights, counts, joined, node):
            remaining.append(node)
            continue
        folded[node.op_type] += 1
        _rename(joined, node.output[0], counts, taken, fresh)
        makers |= {name: one for one in joined.nodes for name in one.output}
    if folded:
        replace_nodes(graph, remaining)
    return folded


def _varying_input(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> str:
    """Return the tensor that an affine node scales and shifts; "" for any other node."""
    if node.domain not in ("", "ai.onnx"):
        return ""
    if node.op_type == NORM:
        return str(node.input[0])
    if node.op_type not in _ARITHMETIC or len(node.input) != 2:
        return ""
    first, second = (str(name) for name in node.input)
    if second in weights:
        return first
    return second if first in weights and node.op_type in ("Mul", "Add") else ""


def _fold(
    graph: onnx.GraphProto,
    weights: dict[str, onnx.TensorProto],
    counts: dict[str, int],
    joined: JoinedLayers,
    node: onnx.NodeProto,
) -> bool:
    """Fold a node into one or several layers if that is exact; return whether it was folded."""
    layers = [part.layer for part in joined.parts]
    constants = [_constant(weights, layer.input[1]) for layer in layers]
    arrays = [array for array in constants if array is not None]
    biases = [_constant(weights, one.input[2]) if _has_bias(one) else None for one in layers]
    known = [
        bias is not None or not _has_bias(one) for one, bias in zip(layers, biases, strict=True)
    ]
    if len(arrays) < len(layers) or not all(known):
        return False
    # A negative variance or a huge gamma gives NaN or Inf: the layers then stay unchanged.
    with np.errstate(all="ignore"):
        place = joined.axis([array.ndim for array in arrays], weights)
        channels = [_channels(*one) for one in zip(layers, arrays, strict=True)]
        affine = place and all(channels) and _affine(node, weights, sum(channels), *place)
        if not affine:
            return False
        own = zip(*(np.split(values, np.cumsum(channels)[:-1]) for values in affine), strict=True)
        folded = [_fold_layer(*one) for one in zip(layers, arrays, biases, own, strict=True)]
    fresh = [pair for pair in folded if pair is not None]
    if len(fresh) < len(layers):
        return False
    for layer, (weight, bias) in zip(layers, fresh, strict=True):
        _set(graph, weights, counts, layer, 1, weight, layer.input[1])
        new_name = unique_name(f"{node.output[0]}_bias", weights)
        bias_name = layer.input[2] if _has_bias(layer) else new_name
        _set(graph, weights, counts, layer, 2, bias, bias_name)
        for attribute in layer.attribute:
            if attribute.name == "beta":  # of a Gemm: the new bias includes it
                attribute.f = 1.0
    return True


def _fold_layer(
    layer: onnx.NodeProto, weight: NDArray[Any], bias: NDArray[Any] | None, affine: Affine
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the layer's new weight and bias; None if they do not fit or are not finite."""
    moved = _folded_bias(layer, bias, *affine)
    if moved is None:
        return None
    fresh = (
        _scaled_weight(layer, weight, affine[0]).astype(weight.dtype),
        moved.astype(weight.dtype),
    )
    return fresh if all(np.isfinite(array).all() for array in fresh) else None


def _rename(
    joined: JoinedLayers, last: str, counts: dict[str, int], taken: set[str], fresh: set[str]
) -> None:
    """Give the last node's output the folded node's name, and tensors before it new names.

    New names are added to `counts` (of readers) and `taken`; those in `fresh`, from earlier calls,
    stay.
    """
    for node, after, place in joined.links():
        if node.output[0] not in fresh:
            name = claim_name(f"{node.output[0]}_folded", taken)
            counts[name] = 1
            fresh.add(name)
            node.output[0] = after.input[place] = name
    joined.nodes[-1].output[0] = last


def _affine(
    node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], channels: int, axis: int, rank: int
) -> Affine | None:
    """Return scale and shift per channel of a tensor of `rank` with channels on `axis`."""
    if node.op_type == NORM:
        return _norm_affine(node, weights, channels) if axis == 1 else None
    array = _constant(weights, next(n for n in reversed(node.input) if n in weights))
    values = None if array is None else _per_channel(array.astype(np.float64), channels, axis, rank)
    if values is None:
        return None
    one, zero = np.ones(channels), np.zeros(channels)
    return {
        "Mul": (values, zero),
        "Div": (1 / values, zero),
        "Add": (one, values),
        "Sub": (one, -values),
    }[node.op_type]


def _per_channel(
    values: NDArray[np.float64], channels: int, axis: int, rank: int
) -> NDArray[np.float64] | None:
    """Return [C] of a constant that broadcasts along `axis` only; None for any other shape."""
    if values.ndim > rank:
        return None
    shape = (1,) * (rank - values.ndim) + values.shape
    if values.size != 1 and shape != (*[1] * axis, channels, *[1] * (rank - axis - 1)):
        return None
    return np.broadcast_to(values.reshape(-1), (channels,))


def _norm_affine(
    norm: onnx.NodeProto, weights: dict[str, onnx.TensorProto], channels: int
) -> Affine | None:
    """Return scale and shift of an inference BatchNormalization with constant parameters."""
    attrs = attributes(norm)
    one_output = len([o for o in norm.output if o]) <= 1
    if attrs.get("training_mode", 0) or not one_output or len(norm.input) != 5:
        return None
    arrays = [a for name in norm.input[1:] if (a := _constant(weights, name)) is not None]
    if len(arrays) < 4 or any(a.shape != (channels,) for a in arrays):
        return None
    gamma, beta, mean, variance = (a.astype(np.float64) for a in arrays)
    scale = gamma / np.sqrt(variance + attrs.get("epsilon", 1e-5))
    return scale, beta - mean * scale


def _channels(layer: onnx.NodeProto, weight: NDArray[Any]) -> int:
    """Return a layer's number of output channels; 0 for a weight of an impossible shape."""
    attrs = attributes(layer)
    if weight.ndim < 2:
        return 0
    if layer.op_type == "ConvTranspose":  # [I, O/group, ...]
        group = int(attrs.get("group", 1))
        return 0 if group < 1 or weight.shape[0] % group else int(weight.shape[1]) * group
    transposed = layer.op_type == "Gemm" and not attrs.get("transB", 0)  # [K, N]
    return int(weight.shape[1 if transposed else 0])


def _constant(weights: dict[str, onnx.TensorProto], name: str) -> NDArray[Any] | None:
    """Return the array of a float constant; None for anything else."""
    array = to_array(weights[name]) if name in weights else None
    return array if array is not None and array.dtype in (np.float32, np.float64) else None


def _has_bias(layer: onnx.NodeProto) -> bool:
    return len(layer.input) > 2 and bool(layer.input[2])


def _scaled_weight(
    layer: onnx.NodeProto, weight: NDArray[Any], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weight scaled per output channel; `scale` [C_out] is that of `_channels`."""
    attrs = attributes(layer)
    if layer.op_type == "Conv":  # [O, I/group, ...]
        return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    if layer.op_type == "Gemm":  # [N, K] with transB, else [K, N]
        return weight * (scale[:, None] if attrs.get("transB", 0) else scale)
    group = attrs.get("group", 1)  # ConvTranspose: [I, O/group, ...], channel = group first
    grouped = weight.reshape(group, -1, *weight.shape[1:])
    by_group = scale.reshape(group, 1, -1, *[1] * (weight.ndim - 2))
    return np.asarray(grouped * by_group, np.float64).reshape(weight.shape)


def _folded_bias(
    layer: onnx.NodeProto,
    bias: NDArray[Any] | None,
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> NDArray[np.float64] | None:
    """Return the folded layer's [C] bias; None unless the old one has one value per channel."""
    if bias is None:
        return shift
    if layer.op_type == "Gemm":
        bias = bias.astype(np.float64) * attributes(layer).get("beta", 1.0)
        bias = np.broadcast_to(bias.reshape(-1), shift.shape) if bias.size == 1 else bias
        bias = bias.reshape(-1) if bias.ndim == 2 and bias.shape[0] == 1 else bias
    return bias * scale + shift if bias.shape == shift.shape else None


def _set(
    graph: onnx.GraphProto,
    weights: dict[str, onnx.TensorProto],
    counts: dict[str, int],
    layer: onnx.NodeProto,
    position: int,
    array: NDArray[Any],
    name: str,
) -> None:
    """Set an input of the layer to `array`; a tensor with other readers keeps its values."""
    if counts[name] != 1 or name not in weights:
        name = unique_name(name, {*weights, *counts})
        weights[name] = graph.initializer.add()
    weights[name].CopyFrom(numpy_helper.from_array(array, name))
    counts[name] = 1
    while len(layer.input) <= position:
        layer.input.append("")
    layer.input[position] = name
