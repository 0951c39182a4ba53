"""Depthwise int8 Convs with as many channels as ONNX Runtime's kernels take at a time.

They take 16; with any other number the whole layer takes twice as long, and four times where it is
no multiple of 8 either (AVX512-VNNI, 5x5 over 28x28: 240 channels 155 us, 232 of them 301). So
channels that are all zero are put behind the others, from the layers that make them to those that
read them, whose weights for them are 0: every other value keeps its bits::

    Conv [88, 24, 1, 1] -> Relu -> depthwise Conv [88, 1, 3, 3] -> Relu -> Conv [24, 88, 1, 1]
    Conv [96, 24, 1, 1] -> Relu -> depthwise Conv [96, 1, 3, 3] -> Relu -> Conv [24, 96, 1, 1]

Whatever treats each channel by itself may stand between: a squeeze-and-excite, too. It is done
where the depthwise layers win half as much again as all of it loses, counted in products.

Source: ONNX operators Conv-11, QuantizeLinear-13, DequantizeLinear-13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from deploy.graph.edit import drop_unread, rename_reads
from deploy.graph.index import Graph, attributes
from deploy.graph.width import WIDE, wide_for

_AT_ONCE = 16
_SLOW = {0: 1.0, 8: 1.0}  # what a product costs more than in a kernel of 16 channels, by the rest
_SLOWEST = 3.0
_DENSE = {True: 1 / 6, False: 1 / 2}  # and one of a dense layer, in int8 and in float
_WINS = 1.5  # times what it costs
# each channel by itself, finite where it is 0
_ALONE = frozenset(
    {
        *("Relu", "Clip", "LeakyRelu", "Elu", "Selu", "HardSwish", "HardSigmoid", "Sigmoid"),
        *("Tanh", "Softplus", "Softsign", "Erf", "Gelu", "Abs", "Neg", "Identity"),
        *("GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool"),
        *("QuantizeLinear", "DequantizeLinear"),
    }
)
_PAIRS = frozenset({"Add", "Sub", "Mul", "Sum", "Min", "Max"})
_OUT, _IN, _BOTH = "out", "in", "both"  # ends of a Conv that get wider


class _Stuck(Exception):
    """A node that cannot have more channels."""


@dataclass(slots=True)
class _Region:
    """What gets wider together.

    Attributes:
        tensors: names.
        convs: name of a Conv -> itself and its ends.
    """

    tensors: set[str] = field(default_factory=set)
    convs: dict[str, tuple[onnx.NodeProto, set[str]]] = field(default_factory=dict)


def write_wide(model: onnx.ModelProto, like: Graph) -> None:
    """Give depthwise int8 Convs a multiple of 16 channels where that pays, in place.

    Args:
        model: with pairs; every node has a name of its own.
        like: the model without pairs, which knows sizes.
    """
    slow = [node for node in model.graph.node if node.op_type == "Conv" and _rest(node)]
    if not slow:
        return
    graph = Graph(model)
    done: set[str] = set()
    for node in slow:
        weight = integers_of(graph, node)
        if weight is None or node.name in done or list(weight.dims[:2]) != [_groups(node), 1]:
            continue
        try:
            region = _region(graph, node)
        except _Stuck:
            continue
        done |= set(region.convs)
        if _pays(graph, like, region, _groups(node)):
            _widen(model, graph, region, _groups(node))
    drop_unread(model.graph)


def _groups(node: onnx.NodeProto) -> int:
    return int(attributes(node).get("group", 1))


def _rest(node: onnx.NodeProto) -> int:
    """Channels beyond the last 16 of what may be a depthwise Conv."""
    groups = _groups(node)
    return groups % _AT_ONCE if groups > 1 else 0


def integers_of(graph: Graph, node: onnx.NodeProto, place: int = 1) -> onnx.TensorProto | None:
    """What a Conv's weight or bias is dequantized from, for it alone."""
    maker = graph.producer.get(node.input[place])
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    held = graph.initializers.get(maker.input[0])
    return held if graph.only_reader(maker.output[0]) is not None else None


def _constant(graph: Graph, node: onnx.NodeProto, place: int) -> onnx.TensorProto | None:
    """A Conv's weight or bias, dequantized or float."""
    return graph.initializers.get(node.input[place]) or integers_of(graph, node, place)


def _region(graph: Graph, depthwise: onnx.NodeProto) -> _Region:
    """All that has to get wider with a depthwise Conv.

    Raises:
        _Stuck: it would reach an output, or a node that mixes channels and is no Conv.
    """
    found, channels = _Region(), _groups(depthwise)
    waiting = [str(depthwise.input[0])]
    while waiting:
        tensor = waiting.pop()
        if tensor in found.tensors:
            continue
        found.tensors.add(tensor)
        maker = graph.producer.get(tensor)
        if maker is None or tensor in graph.outputs or tensor in graph.captured:
            raise _Stuck
        for node in (maker, *graph.readers.get(tensor, [])):
            waiting += _reached(graph, node, tensor, channels, found)
    return found


def _reached(
    graph: Graph, node: onnx.NodeProto, tensor: str, channels: int, found: _Region
) -> Iterable[str]:
    """The tensors that have to be as wide as one that a node reads or makes."""
    if node.op_type == "Conv":
        ends = _ends(graph, node, tensor, channels)
        found.convs.setdefault(node.name, (node, set()))[1].update(ends)
        return [node.input[0], node.output[0]] if _BOTH in ends else []
    own = [name for name in (*node.input, *node.output) if name]
    if node.op_type == "ReduceMean" and _over_places(graph, node):
        own = [node.input[0], node.output[0]]
    elif node.op_type not in _ALONE | _PAIRS or len(node.output) > 1:
        raise _Stuck
    wide = [name for name in own if not _is_number(graph, name)]
    if any(name in graph.constants for name in wide):
        raise _Stuck
    return wide


def _is_number(graph: Graph, name: str) -> bool:
    """Whether a tensor is one constant value, dequantized or as it is."""
    if graph.number(name) is not None:
        return True
    maker = graph.producer.get(name)
    dequantized = maker is not None and maker.op_type == "DequantizeLinear"
    return dequantized and graph.number(maker.input[0]) is not None  # type: ignore[union-attr]


def _over_places(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean leaves every channel, and as many axes."""
    given = attributes(node)
    axes = list(given.get("axes", []))
    if not axes and len(node.input) > 1 and node.input[1] in graph.constants:
        axes = numpy_helper.to_array(graph.constants[node.input[1]]).tolist()
    alone = bool(axes) and (min(axes) > 1 or axes == [-1])
    return bool(alone and given.get("keepdims", 1))


def _ends(graph: Graph, node: onnx.NodeProto, tensor: str, channels: int) -> set[str]:
    """Which ends of a Conv a tensor is."""
    held = [
        _constant(graph, node, place) for place, name in enumerate(node.input) if place and name
    ]
    if None in held or not held:
        raise _Stuck
    outer, inner = held[0].dims[:2]  # type: ignore[union-attr]
    if _groups(node) == outer == channels and inner == 1:
        return {_BOTH}
    ends = {_IN} if tensor == node.input[0] else set()
    ends |= {_OUT} if tensor == node.output[0] else set()
    sizes = {_IN: inner, _OUT: outer}
    if not ends or _groups(node) != 1 or any(sizes[end] != channels for end in ends):
        raise _Stuck
    return ends


def _pays(graph: Graph, like: Graph, region: _Region, channels: int) -> bool:
    """Whether the depthwise Convs win enough."""
    more = -channels % _AT_ONCE
    won = lost = 0.0
    places = {node.name: _places(like.shapes.get(node.output[0])) for node in like.nodes}
    for node, ends in region.convs.values():
        weight = _constant(graph, node, 1)
        assert weight is not None
        int8 = integers_of(graph, node) is not None
        products = np.prod(weight.dims) / channels * places.get(node.name, 1)
        if _BOTH in ends:
            won += int8 * products * channels * _SLOW.get(channels % _AT_ONCE, _SLOWEST)
            lost += products * more
        else:
            lost += len(ends) * products * more * _DENSE[int8]
    return bool(won > _WINS * lost)


def _places(shape: tuple[int | str | None, ...] | None) -> int:
    """Places of a map of known size; 1 else."""
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    return int(np.prod(sizes)) if shape and len(sizes) == len(shape) - 2 else 1


def _widen(model: onnx.ModelProto, graph: Graph, region: _Region, channels: int) -> None:
    """More channels for everything in a region."""
    more = -channels % _AT_ONCE
    for node, ends in region.convs.values():
        axes = [axis for axis, end in enumerate((_OUT, _IN)) if ends & {end, _BOTH}]
        axes = [0] if _BOTH in ends else axes
        wider(model, graph, node, 1, axes, more)
        if len(node.input) > 2 and node.input[2] and 0 in axes:
            wider(model, graph, node, 2, [0], more)
        if _BOTH in ends:
            (group,) = (one for one in node.attribute if one.name == "group")
            group.i = channels + more
    new = {tensor: f"{tensor}{WIDE}" for tensor in region.tensors}
    rename_reads(graph.nodes, new)
    for node in graph.nodes:
        for place, name in enumerate(node.output):
            node.output[place] = new.get(name, name)
    known = [value for value in model.graph.value_info if value.name in new]
    for value in known:
        model.graph.value_info.remove(value)


def wider(
    model: onnx.ModelProto, graph: Graph, node: onnx.NodeProto, place: int, axes: list[int], by: int
) -> None:
    """More of a Conv's weight or bias: zeros, whose scales are those of the last channel."""

    def added(name: str, along: Sequence[int], mode: Literal["constant", "edge"]) -> str:
        values: NDArray[Any] = numpy_helper.to_array(graph.initializers[name])
        ends = [(0, by if axis in along else 0) for axis in range(values.ndim)]
        tensor = numpy_helper.from_array(np.pad(values, ends, mode), wide_for(name, node.name))
        model.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = tensor
        return tensor.name

    if node.input[place] in graph.initializers:
        node.input[place] = added(node.input[place], axes, "constant")
        return
    maker = graph.producer[node.input[place]]
    maker.input[0] = added(maker.input[0], axes, "constant")
    for number, name in enumerate(maker.input):
        if number and 0 in axes and math.prod(graph.initializers[name].dims) > 1:
            maker.input[number] = added(name, [0], "edge")
