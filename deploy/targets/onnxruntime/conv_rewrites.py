"""Rewrites of int8 Convs for ONNX Runtime's kernels: stems, depthwise Convs, ConvTransposes.

**Stems** get a fourth channel. The kernel gathers each window a row at a time, and rows of 3, 6, 9
or 15 bytes take longer than those of 12 or 20 (3x3 over 224x224 to 32 channels: 357 us, 246 with
the fourth). The picture gets channels of real zeros, for which the weights are 0::

    Q -> DQ -> Conv [32, 3, 3, 3]      Q -> Pad -> DQ -> Conv [32, 4, 3, 3]

Wider rows gain nothing, nor does a window of one pixel; few output channels are not worth the Pad,
and a Conv over one axis (sound) is slower with it. Without VNNI the products with zeros cost more
than they gain where there are many of them (`KERNELS`).

**Depthwise Convs** get a multiple of 16 channels, which the kernel takes at a time. With any other
number the layer takes up to three times as long (5x5 over 28x28: 240 channels 77 us, 232 of them
240; without VNNI 162 and 238). Channels of zeros are appended from the layers that make them to
those that read them, whose weights for them are 0::

    Conv [88, 24, 1, 1] -> Relu -> depthwise Conv [88, 1, 3, 3] -> Relu -> Conv [24, 88, 1, 1]
    Conv [96, 24, 1, 1] -> Relu -> depthwise Conv [96, 1, 3, 3] -> Relu -> Conv [24, 96, 1, 1]

Operators that treat each channel alone may stand between, and a squeeze-and-excite too. It is done
where the depthwise layers gain half as much again as all layers lose, counted in products.

**ConvTransposes** without overlap, for which there is no integer kernel, become a Conv of one
pixel. Each pixel becomes a tile (`deploy.graph.refusal`): the Conv makes the tile's pixels as
channels, and the integers are moved a row of a tile at a time::

    w [c, m, k, l] -> [k l m, c, 1, 1]        a scale of a channel stands k l times
    Conv -> Relu -> Q -> Transpose, Reshape [n, h, w, k, l m] -> Transpose [n, h, k, w, l m]
                      -> Reshape [n, h k, w l, m], Transpose -> [n, m, h k, w l]

Stems and depthwise Convs keep every bit of the other values; a ConvTranspose keeps its values but
for their rounding.

Source: ONNX operators Conv-11, ConvTranspose-11, Pad-13, QuantizeLinear-13, DequantizeLinear-13.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.graph.edit import copy_message, drop_dead, drop_unread, rename_tensors, replace_nodes
from deploy.graph.gates import Gate
from deploy.graph.index import PADDED_SUFFIX, Graph, attributes, padded_name
from deploy.graph.refusal import Tile, tile_shape

_AT_ONCE = 16
_WINS = 1.5  # the gain must be this many times the cost
# operators on each channel alone, finite at 0
_ALONE = frozenset(
    {
        *("Relu", "Clip", "LeakyRelu", "Elu", "Selu", "HardSwish", "HardSigmoid", "Sigmoid"),
        *("Tanh", "Softplus", "Softsign", "Erf", "Gelu", "Abs", "Neg", "Identity"),
        *("GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool"),
        *("QuantizeLinear", "DequantizeLinear"),
    }
)
_PAIRS = frozenset({"Add", "Sub", "Mul", "Sum", "Min", "Max"})
_OUT, _IN, _BOTH = "out", "in", "both"  # ends of a Conv that get more channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvKernels:
    """What decides between forms of an int8 Conv on a kind of CPU.

    Times are those of a product, in depthwise products of a multiple of 16 channels.
    """

    zeros: float  # most products with zeros that a stem gets for an output pixel
    eight: float  # extra time of a depthwise product with 8 channels beyond a multiple of 16
    uneven: float  # and with any other number beyond
    int8: float  # time in a dense layer
    float32: float


# `benchmarks/int8_kernels.py` on an EPYC 9005 with ONNX Runtime 1.32 (one thread), `avx2` with the
# wider instructions hidden from it. Other kinds of CPU take `avx2`, which gains least.
KERNELS = {
    "vnni": ConvKernels(zeros=math.inf, eight=1.8, uneven=2.4, int8=1 / 8, float32=1 / 3),
    "avx2": ConvKernels(zeros=576, eight=0.5, uneven=0.8, int8=1 / 5, float32=1 / 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteContext:
    """What the rewrites of one model know.

    Attributes:
        like: the model without pairs, with shapes.
        float_nodes: names of the nodes that stay float.
        float_gates: gates of `like` that stay float.
        is_kept: whether the model is a Q/DQ model that the user gave, kept as it is.
        kernels: those of the CPU that runs it.
    """

    like: Graph
    float_nodes: frozenset[str] = frozenset()
    float_gates: tuple[Gate, ...] = ()
    is_kept: bool = False
    kernels: ConvKernels = KERNELS["avx2"]


class _Stuck(Exception):
    """A node that cannot have more channels."""


@dataclass(slots=True)
class _Region:
    """Names of tensors, and Convs by name with their ends, that get more channels together."""

    tensors: set[str] = field(default_factory=set)
    convs: dict[str, tuple[onnx.NodeProto, set[str]]] = field(default_factory=dict)


def widen_depthwise(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give depthwise int8 Convs a multiple of 16 channels where that pays."""
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
        if _pays(graph, context, region, _groups(node)):
            _widen(model, graph, region, _groups(node))
    drop_unread(model.graph)


def _groups(node: onnx.NodeProto) -> int:
    return int(attributes(node).get("group", 1))


def _rest(node: onnx.NodeProto) -> int:
    """Channels beyond the last multiple of 16 of what may be a depthwise Conv."""
    groups = _groups(node)
    return groups % _AT_ONCE if groups > 1 else 0


def _stored(graph: Graph, node: onnx.NodeProto, place: int) -> onnx.TensorProto | None:
    """The integers behind a DequantizeLinear that a node reads."""
    maker = graph.producer.get(node.input[place]) if len(node.input) > place else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    return graph.initializers.get(maker.input[0])


def integers_of(graph: Graph, node: onnx.NodeProto, place: int = 1) -> onnx.TensorProto | None:
    """The integers of a Conv's weight or bias, if no other node reads them."""
    held = _stored(graph, node, place)
    return held if graph.only_reader(node.input[place]) is not None else None


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
    if graph.scalar(name) is not None:
        return True
    maker = graph.producer.get(name)
    if maker is None or maker.op_type != "DequantizeLinear":
        return False
    return graph.scalar(maker.input[0]) is not None


def _over_places(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean leaves every channel, and as many axes."""
    given = attributes(node)
    axes = list(given.get("axes", []))
    if not axes and len(node.input) > 1 and node.input[1] in graph.constants:
        axes = numpy_helper.to_array(graph.constants[node.input[1]]).tolist()
    alone = bool(axes) and (min(axes) > 1 or axes == [-1])
    return bool(alone and given.get("keepdims", 1))


def _ends(graph: Graph, node: onnx.NodeProto, tensor: str, channels: int) -> set[str]:
    """Which ends of a Conv a tensor is, as a set of _IN, _OUT and _BOTH."""
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


def _pays(graph: Graph, context: RewriteContext, region: _Region, channels: int) -> bool:
    """Whether the depthwise Convs gain enough."""
    more, like, kernels = -channels % _AT_ONCE, context.like, context.kernels
    slow = kernels.eight if channels % _AT_ONCE == 8 else kernels.uneven
    won = lost = 0.0
    places = {node.name: _places(like.shapes.get(node.output[0])) for node in like.nodes}
    for node, ends in region.convs.values():
        weight = _constant(graph, node, 1)
        assert weight is not None
        int8 = integers_of(graph, node) is not None
        products = np.prod(weight.dims) / channels * places.get(node.name, 1)
        if _BOTH in ends:
            won += int8 * products * channels * slow
            lost += products * more
        else:
            lost += len(ends) * products * more * (kernels.int8 if int8 else kernels.float32)
    return bool(won > _WINS * lost)


def _places(shape: tuple[int | str | None, ...] | None) -> int:
    """Pixels of a map of known size, else 1."""
    sizes = [size for size in (shape or ())[2:] if isinstance(size, int)]
    return int(np.prod(sizes)) if shape and len(sizes) == len(shape) - 2 else 1


def _widen(model: onnx.ModelProto, graph: Graph, region: _Region, channels: int) -> None:
    """Append the channels to everything in a region."""
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
    new = {tensor: f"{tensor}{PADDED_SUFFIX}" for tensor in region.tensors}
    rename_tensors(graph.nodes, new)
    known = [value for value in model.graph.value_info if value.name in new]
    for value in known:
        model.graph.value_info.remove(value)


def wider(
    model: onnx.ModelProto, graph: Graph, node: onnx.NodeProto, place: int, axes: list[int], by: int
) -> None:
    """Append zeros to a Conv's weight or bias; their scales are those of the last channel."""

    def added(name: str, along: Sequence[int], mode: Literal["constant", "edge"]) -> str:
        values: NDArray[Any] = numpy_helper.to_array(graph.initializers[name])
        ends = [(0, by if axis in along else 0) for axis in range(values.ndim)]
        tensor = numpy_helper.from_array(np.pad(values, ends, mode), padded_name(name, node.name))
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


_STEM_CHANNELS = 4
_LEAST = 16  # output channels
_WIDEST = 5  # columns of a window


def pad_stems(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give the int8 Convs of fewer than four channels four, where that is faster."""
    like, most = context.like, context.kernels.zeros
    stems = {
        node.name for node in like.nodes if node.op_type == "Conv" and _gains(like, node, most)
    }
    graph = Graph(model) if stems else like
    before: dict[str, list[onnx.NodeProto]] = {}
    for node in (node for node in graph.nodes if node.name in stems):
        weight, pair = integers_of(graph, node), graph.producer.get(node.input[0])
        if weight is None or pair is None or pair.op_type != "DequantizeLinear":
            continue
        if all(graph.scalar(name) is not None for name in pair.input[1:]):
            more = _STEM_CHANNELS - weight.dims[1]
            wider(model, graph, node, 1, [1], more)
            before[node.name] = _padded(model, node, pair, len(weight.dims), more)
    if before:
        nodes = [n for old in graph.nodes for n in (*before.get(old.name, []), old)]
        replace_nodes(model.graph, nodes)
        drop_dead(model.graph)  # the pairs that nobody reads any more


def _gains(graph: Graph, node: onnx.NodeProto, most: float) -> bool:
    """Whether a Conv over pictures gains by a fourth channel of at most so many products."""
    weight = graph.initializers.get(node.input[1])
    if weight is None or attributes(node).get("group", 1) != 1:
        return False
    outer, inner, *window = weight.dims
    places, more = math.prod(window), _STEM_CHANNELS - inner
    if len(window) < 2 or places < 2 or window[-1] > _WIDEST:
        return False
    return bool(more > 0 and outer >= _LEAST and more * places * outer <= most)


def _padded(
    model: onnx.ModelProto, node: onnx.NodeProto, pair: onnx.NodeProto, rank: int, more: int
) -> list[onnx.NodeProto]:
    """Pad and DequantizeLinear before a Conv, which reads them from now on."""
    source = pair.input[0]
    name = padded_name(source, node.name)  # a node may be called as a tensor that gets wider
    ends = np.zeros(2 * rank, np.int64)
    ends[rank + 1] = more
    model.graph.initializer.append(numpy_helper.from_array(ends, f"{name}/pads"))
    pad = helper.make_node("Pad", [source, f"{name}/pads", pair.input[2]], [name], name=name)
    node.input[0] = f"{name}/dequantized"
    read = helper.make_node(
        "DequantizeLinear", [name, *pair.input[1:]], [node.input[0]], name=f"{name}/DQ"
    )
    return [pad, read]


_CONSTANTS = ("", "weight", "bias")  # inputs of a Conv
TILES = "/tiles"  # suffix of a tensor whose tiles' pixels lie as channels, rows first


def with_tiles(model: onnx.ModelProto, context: RewriteContext) -> onnx.ModelProto:
    """A copy with a Conv and copies in place of each ConvTranspose between pairs without overlap.

    A model without such layers is returned as it is.
    """
    like = context.like
    if not any(node.op_type == "ConvTranspose" for node in model.graph.node):
        return model
    model = copy_message(model)
    graph = Graph(model)
    instead: dict[str, list[onnx.NodeProto]] = {}
    known: list[onnx.ValueInfoProto] = []
    for node in graph.nodes:
        quantize = _quantized_by(graph, node)
        weight = _stored(graph, node, 1)
        tile = tile_shape(node, weight.dims) if weight is not None else None
        if quantize is None or weight is None or tile is None:
            continue
        own = _Tiled(graph, node, tile, int(weight.dims[1]))
        instead[node.name] = own.layer(quantize)
        sizes = like.shapes.get(node.output[0].removesuffix("/float"))
        instead[quantize.name] = [quantize, *own.moves(quantize, sizes or (None,) * 4)]
        model.graph.initializer.extend(own.constants)
        known.append(own.rows(own.channels))
    if instead:
        replace_nodes(model.graph, [n for old in graph.nodes for n in instead.get(old.name, [old])])
        drop_dead(model.graph)
        model.graph.value_info.extend(known)
    return model


def tiled(array: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """Repeat what a ConvTranspose has for each channel for the channels of its Conv.

    Args:
        array: a weight [c, m, k, l], values [m], or one value for all.
        tile: rows and columns.
    """
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0).reshape(-1, len(array), 1, 1)
    return np.tile(array, tile[0] * tile[1]) if array.ndim else array


def _quantized_by(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The QuantizeLinear after a ConvTranspose and its tail, if all of it is between pairs."""
    if node.op_type != "ConvTranspose":
        return None
    source, after = graph.producer.get(node.input[0]), graph.only_reader(graph.tail(node))
    if source is None or source.op_type != "DequantizeLinear":
        return None
    if any(_stored(graph, node, place) is None for place in _constants(node)):
        return None
    return after if after is not None and after.op_type == "QuantizeLinear" else None


def _constants(node: onnx.NodeProto) -> list[int]:
    """Input positions of the weight and, if there is one, the bias."""
    return [place for place, name in enumerate(node.input) if place and name]


class ReplacementNodes:
    """The nodes in place of one node, named after it, and their constants."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.constants: list[onnx.TensorProto] = []

    def make(self, op_type: str, inputs: Sequence[str], what: str, **given: Any) -> onnx.NodeProto:
        """A node with one output; both are called `what`."""
        name = f"{self.name}/{what}"
        return helper.make_node(op_type, inputs, [name], name=name, **given)

    def constant(self, what: str, values: Sequence[int] | NDArray[Any] | np.float32) -> str:
        """The name of a new constant: int64 numbers, or an array as it is."""
        name = f"{self.name}/{what}"
        self.constants.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name

    def rows(self, channels: int | None) -> onnx.ValueInfoProto:
        """The rank of `rows`, which ONNX Runtime must know to change the next Convs' layout."""
        sizes = [None, None, None, channels]
        return helper.make_tensor_value_info(f"{self.name}/rows", onnx.TensorProto.UINT8, sizes)


class _Tiled(ReplacementNodes):
    """The nodes in place of one ConvTranspose, and their constants."""

    def __init__(self, graph: Graph, node: onnx.NodeProto, tile: Tile, channels: int) -> None:
        self.graph, self.node, self.tile, self.channels = graph, node, tile, channels
        super().__init__(node.name)

    def layer(self, quantize: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The Conv and its constants; its tail and the QuantizeLinear now read the tiles."""
        held = [self._constant_of(place) for place in _constants(self.node)]
        inputs = [self.node.input[0], *(node.output[0] for node in held)]
        made = [self.node.output[0]]
        if quantize.input[0] != made[0]:
            made.append(quantize.input[0])
        for tensor in made:
            (reader,) = self.graph.readers[tensor]
            reader.input[0] = f"{tensor}{TILES}"
        for tensor in made[1:]:
            self.graph.producer[tensor].output[0] = f"{tensor}{TILES}"
        return [*held, helper.make_node("Conv", inputs, [f"{made[0]}{TILES}"], name=self.name)]

    def _constant_of(self, place: int) -> onnx.NodeProto:
        """The DequantizeLinear of the weight, or the bias, of the Conv."""
        old = self.graph.producer[self.node.input[place]]
        arrays = [numpy_helper.to_array(self.graph.initializers[name]) for name in old.input]
        what = f"{self.name}/{_CONSTANTS[place]}"
        names = [
            self.constant(f"{_CONSTANTS[place]}{end}", tiled(array, self.tile))
            for end, array in zip(("/quantized", "/scale", "/zero_point"), arrays, strict=True)
        ]
        node = helper.make_node("DequantizeLinear", names, [what], name=f"{what}/DQ")
        if arrays[1].ndim:
            node.attribute.append(helper.make_attribute("axis", 0))
        return node

    def moves(
        self, quantize: onnx.NodeProto, sizes: Sequence[int | str | None]
    ) -> list[onnx.NodeProto]:
        """The nodes after the QuantizeLinear, which makes tiles from now on."""
        whole = str(quantize.output[0])
        made = quantize.output[0] = f"{whole}{TILES}"
        down, across = self.tile
        apart = self.constant("apart", [0, 0, 0, down, across * self.channels])
        shape, reshaped = self._shape(made, sizes)
        return [
            self.make("Transpose", [made], "turned", perm=[0, 2, 3, 1]),
            self.make("Reshape", [f"{self.name}/turned", apart], "cut"),
            self.make("Transpose", [f"{self.name}/cut"], "moved", perm=[0, 1, 3, 2, 4]),
            *shape,
            self.make("Reshape", [f"{self.name}/moved", reshaped], "rows"),
            helper.make_node(
                "Transpose", [f"{self.name}/rows"], [whole], f"{self.name}/whole", perm=[0, 3, 1, 2]
            ),
        ]

    def _shape(
        self, made: str, sizes: Sequence[int | str | None]
    ) -> tuple[list[onnx.NodeProto], str]:
        """(nodes that compute the shape of the rows, its name); no nodes if sizes are known."""
        height, width = sizes[2:]
        if isinstance(height, int) and isinstance(width, int):
            return [], self.constant("shape", [-1, height, width, self.channels])
        order = self.constant("order", [0, 2, 3])
        times = self.constant("times", [1, *self.tile])
        channels = self.constant("channels", [self.channels])
        nodes = [
            self.make("Shape", [made], "sizes"),
            self.make("Gather", [f"{self.name}/sizes", order], "ordered"),
            self.make("Mul", [f"{self.name}/ordered", times], "larger"),
            self.make("Concat", [f"{self.name}/larger", channels], "shape", axis=0),
        ]
        return nodes, f"{self.name}/shape"
