"""Means over all places of a picture, written as the GlobalAveragePool that they are.

Exporters write what squeezes a picture, in a squeeze-excite or before the last layer, as a
ReduceMean over the last two axes. ONNX Runtime has an integer kernel of the pool alone, and a
float one that reads the layout of its Convs::

    x -> ReduceMean [2, 3] -> m               x -> GlobalAveragePool -> m
    the same without keepdims                 x -> GlobalAveragePool -> Q -> DQ -> Reshape -> m

The pair is that of m, where m has one, so that the Reshape moves integers.

Source: ONNX operators ReduceMean-18 and GlobalAveragePool-1.

Averages that ONNX Runtime's integer kernel counts otherwise, written so that it does not.

With ceil_mode the last windows may reach beyond the padding. count_include_pad counts the padding,
but not what is beyond it; the integer kernel counts that too (ONNX Runtime 1.32; windows of 3 in
steps of 2: 15.5 dB). Without padding there is nothing to count, and what is there is counted
rightly. With some, the average stays float.

Source: ONNX operator AveragePool-11, ceil_mode and count_include_pad.

Factors of a few channels, repeated along a row, as ONNX Runtime's integer kernel wants them.

It multiplies pixel by pixel what has a factor a channel, since its Convs keep the channels of a
pixel together; with few channels it does little else than begin anew. A row of factors makes it
begin once a row (16 channels of 56 x 56: 47 us, 18 with the Tile); all values keep their bits::

    Q -> DQ [n, c, 1, 1]             -> Mul        Q -> Tile -> DQ [n, c, 1, w] -> Mul
    Q -> DQ [n, c, h, w] ------------^             Q -> DQ [n, c, h, w] -----------^

Source: onnxruntime 1.32, qlinear_binary_op.cc and element_wise_ops.h (BroadcastLooper).

Nearest upsampling of int8 tensors by whole factors, as repeated rows and pixels.

ONNX Runtime's Resize looks up every value of an int8 tensor alone, in one thread; repeating a
pixel's channels, which lie together as the int8 Convs around want them, is a copy::

    q [n, c, h, w] -> Transpose -> Unsqueeze [n, h, 1, w, 1, c] -> Tile [n, h, s, w, s, c]
                   -> Reshape [n, h s, w s, c] -> Transpose -> [n, c, h s, w s]

of the integers themselves, since a Resize keeps their scale (1 x 96 x 80 x 80 doubled on
AVX512-VNNI: 156 us for 2067 us in one thread).

Source: ONNX operator Resize-13, coordinate_transformation_mode and nearest_mode.

Softmax across the channels of a map, written over a map whose places lie in one row.

ONNX Runtime turns the axis to the end and back: value by value, in one thread, where more than one
axis is behind it, and in blocks where only one is. Reshapes move nothing: all bits are the same::

    x [n, c, h, w] -> Reshape [n, c, h w] -> Softmax -> Reshape [n, c, h, w]

(The head of a YOLOv8, 1 x 16 x 4 x 2100: 0.15 ms for 1.08 ms, of 9 ms in all.)

Source: ONNX operators Softmax-13 and Reshape-13, in whose shape 0 is "as it was".

What stays float between two pairs, kept apart from them.

ONNX Runtime makes one integer kernel of an operator between pairs, whoever wanted it in float. A
Sum of one tensor is a copy, past which it moves no pair::

    DQ -> Softmax -> Q              an integer kernel
    DQ -> Sum -> Softmax -> Q       a float one

The integer one may differ (an AveragePool that counts its padding, with ceil_mode: 15.5 dB), and
may be slower: a Softmax of 12 x 128 x 128 takes 0.54 ms of a core, apart 0.14.

Source: onnxruntime 1.32, qdq_selector_action_transformer.cc and qdq_propagation.cc.

Gates that stay float, as operators that ONNX Runtime computes inside the layer before them.

A Hard-Swish written out between two Convs is four kernels and two changes of layout, where its own
operator costs nothing (see `deploy.graph.placement` for y = factor * gain * clip(..) + offset)::

    Conv -> Add 3, Clip 0..6, Mul, Div 6      -->  Conv -> HardSwish       one kernel
    x * clip(g + 3, 0, 6) / 6                 -->  g -> HardSigmoid -> Mul
    .. * 0.9 + 0.1                            -->  .. -> BatchNormalization, which has the layout of
                                                   a Conv, as Mul and Add of a number have not

Source: ONNX operators HardSigmoid-6, HardSwish-14 and BatchNormalization-14.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.frontends.checks import opset_of
from deploy.frontends.lift import set_opset
from deploy.graph.edit import drop_dead, rebuild, replace_nodes
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import Gate, counts_beyond, is_pool, resized_by

_FLAT = "calib8/flat"  # 0 is "as it was"


def write_means(model: onnx.ModelProto, like: Graph) -> None:
    """Put a GlobalAveragePool in place of every ReduceMean over a picture, in place.

    Args:
        model: with pairs or without.
        like: the model without pairs, which knows ranks.
    """
    means = {n.name for n in like.nodes if n.op_type == "ReduceMean" and is_pool(like, n)}
    if not means:
        return
    pairs = {n.input[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes += _pool(node, pairs.get(node.output[0])) if node.name in means else [node]
    if any(_FLAT in node.input for node in nodes):
        flat = numpy_helper.from_array(np.array([0, -1], np.int64), _FLAT)
        model.graph.initializer.append(flat)
    rebuild(model.graph, nodes)


def _pool(mean: onnx.NodeProto, quantize: onnx.NodeProto | None) -> list[onnx.NodeProto]:
    """The nodes in place of one ReduceMean, whose name the pool keeps."""
    source, output, name = mean.input[0], mean.output[0], mean.name
    if attributes(mean).get("keepdims", 1):
        return [helper.make_node("GlobalAveragePool", [source], [output], name=name)]
    made = f"{output}/pooled"
    nodes = [helper.make_node("GlobalAveragePool", [source], [made], name=name)]
    if quantize is not None:
        integers, parameters = f"{made}/quantized", quantize.input[1:]
        nodes += [
            helper.make_node("QuantizeLinear", [made, *parameters], [integers], name=f"{made}/Q"),
            helper.make_node(
                "DequantizeLinear", [integers, *parameters], [f"{made}/read"], name=f"{made}/DQ"
            ),
        ]
        made = f"{made}/read"
    return [*nodes, helper.make_node("Reshape", [made, _FLAT], [output], name=f"{name}/flat")]


def write_averages(model: onnx.ModelProto) -> None:
    """Let an AveragePool without padding count none, in place."""
    for node in model.graph.node:
        if counts_beyond(node) and not any(attributes(node).get("pads", [])):
            left = [one for one in node.attribute if one.name != "count_include_pad"]
            del node.attribute[:]
            node.attribute.extend(left)


_FEW = 64  # channels, of which a pixel's are multiplied no faster than it is begun


def write_broadcasts(model: onnx.ModelProto, like: Graph, gates: Iterable[Gate]) -> None:
    """Repeat the few factors of every int8 Mul along the rows of what it multiplies, in place.

    Args:
        model: with pairs; its Muls have the names that they have in the model without.
        like: the model without pairs, which knows shapes.
        gates: those in int8, of which no more than the last node is left, a Mul by the factor.
    """
    widths = _widths(like, gates)
    if not widths:
        return
    graph = Graph(model)
    before: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        place, width = widths.get(node.name, (0, 0))
        if width and node.op_type == "Mul" and _is_int8(graph, node):
            before[node.name] = _repeated(model, graph.producer[node.input[place]], node, width)
            node.input[place] = before[node.name][-1].output[0]
    if before:
        nodes = [n for old in model.graph.node for n in (*before.get(old.name, []), old)]
        replace_nodes(model.graph, nodes)
        drop_dead(model.graph)  # what dequantized the factors, where nobody else reads that


def _widths(like: Graph, gates: Iterable[Gate]) -> dict[str, tuple[int, int]]:
    """Mul -> which of its inputs has a factor a channel, of a few, and how wide the other is."""
    pairs = {node.name: tuple(node.input) for node in like.nodes if node.op_type == "Mul"}
    pairs |= {gate.name: (gate.factor, gate.source) for gate in gates}
    found = {}
    for name, both in pairs.items():
        for place in (0, 1):
            width = _width(like.shapes, both[1 - place], both[place])
            if width:
                found[name] = place, width
    return found


def _width(
    shapes: Mapping[str, tuple[int | str | None, ...] | None], picture: str, factors: str
) -> int:
    """How wide a picture is that factors multiply; 0 where they are not a few channels'."""
    wide, few = shapes.get(picture) or (), shapes.get(factors) or ()
    if len(wide) != 4 or len(few) != 4 or few[2:] != (1, 1) or few[:2] != wide[:2]:
        return 0
    channels, high, width = (size if isinstance(size, int) else 0 for size in wide[1:])
    return width if 0 < channels <= _FEW and min(high, width) > 1 else 0


def _is_int8(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node stands between pairs, and a Conv reads what it makes."""
    after = graph.only_reader(node.output[0])
    if after is None or after.op_type != "QuantizeLinear":
        return False
    for name in node.input:
        if name not in graph.producer or graph.producer[name].op_type != "DequantizeLinear":
            return False
    read = [
        reader
        for back in graph.readers.get(after.output[0], [])
        for reader in graph.readers.get(back.output[0], [])
    ]
    return any(reader.op_type == "Conv" for reader in read)


def _repeated(
    model: onnx.ModelProto, dequantize: onnx.NodeProto, node: onnx.NodeProto, width: int
) -> list[onnx.NodeProto]:
    """The Tile of the integers of the factors, and what reads it."""
    name, often = f"{node.name}/row", f"calib8/row/{width}"
    if often not in {tensor.name for tensor in model.graph.initializer}:
        times = np.array([1, 1, 1, width], np.int64)
        model.graph.initializer.append(numpy_helper.from_array(times, often))
    integers, scale, zero = dequantize.input
    return [
        helper.make_node("Tile", [integers, often], [f"{name}/quantized"], name=f"{name}/Tile"),
        helper.make_node(
            "DequantizeLinear", [f"{name}/quantized", scale, zero], [name], name=f"{name}/DQ"
        ),
    ]


_HALF = ("half_pixel", "pytorch_half_pixel")  # a value lies in the middle of its copies


def write_upsampling(model: onnx.ModelProto, like: Graph) -> None:
    """Put copies in place of every Resize between pairs that only repeats, in place.

    Args:
        model: with pairs, opset 13 or later.
        like: the model without pairs, which knows sizes.
    """
    if not _any_between_pairs(model):
        return
    graph = Graph(model)
    instead: dict[str, list[onnx.NodeProto]] = {}
    known: list[onnx.ValueInfoProto] = []
    for node in graph.nodes:
        factors = _factors(graph, like, node)
        ends = _ends(graph, node) if factors else None
        if ends is None:
            continue
        sizes = like.shapes[node.input[0]] or ()
        own = _Repeated(node.name, factors, sizes)
        instead[node.name] = own.nodes(*ends)
        instead[graph.readers[node.output[0]][0].name] = []
        model.graph.initializer.extend(own.constants)
        known.append(own.said)
    if instead:
        rebuild(model.graph, [n for old in graph.nodes for n in instead.get(old.name, [old])])
        drop_dead(model.graph)  # what turned into float for the Resize alone
        model.graph.value_info.extend(known)


def _any_between_pairs(model: onnx.ModelProto) -> bool:
    """Whether a Resize reads what came out of integers; without an index, as most have none."""
    turned: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            turned.add(node.output[0])
        elif node.op_type == "Resize" and node.input[0] in turned:
            return True
    return False


def _factors(graph: Graph, like: Graph, node: onnx.NodeProto) -> tuple[int, ...]:
    """How often a Resize repeats rows and columns; () where it does something else."""
    if node.op_type != "Resize" or len(like.shapes.get(node.input[0]) or ()) != 4:
        return ()
    given = attributes(node)
    if resized_by(node) != "nearest" or given.get("axes"):
        return ()
    names = [*node.input, "", ""]
    scales = graph.initializers.get(names[2])
    if scales is None or scales.dims != [4]:
        return ()
    found = numpy_helper.to_array(scales).tolist()
    whole = all(one == int(one) >= 1 for one in found) and found[:2] == [1, 1]
    return tuple(map(int, found[2:])) if whole and _repeats(given, found) else ()


def _repeats(given: dict[str, bytes], factors: Sequence[float]) -> bool:
    """Whether the value at i comes from i // factor."""
    where = given.get("coordinate_transformation_mode", b"half_pixel").decode()
    rounded = given.get("nearest_mode", b"round_prefer_floor").decode()
    if where in _HALF:
        return rounded.startswith("round")
    down = rounded == "floor" or (rounded == "round_prefer_floor" and max(factors) <= 2)
    return where == "asymmetric" and down


def _ends(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    """The integers before and behind a node, where both are on one grid."""
    before, after = graph.producer.get(node.input[0]), graph.only_reader(node.output[0])
    if before is None or after is None:
        return None
    if (before.op_type, after.op_type) != ("DequantizeLinear", "QuantizeLinear"):
        return None
    if _grid(graph, before) is None or _grid(graph, before) != _grid(graph, after):
        return None
    return str(before.input[0]), str(after.output[0])


def _grid(graph: Graph, node: onnx.NodeProto) -> list[list[float]] | None:
    """The numbers of scale and zero point; None where they are no constants."""
    held = [graph.initializers.get(name) for name in node.input[1:]]
    arrays = [numpy_helper.to_array(one).reshape(-1) for one in held if one is not None]
    return [array.tolist() for array in arrays] if len(arrays) == len(held) else None


class _Repeated:
    """The nodes in place of one Resize, the constants that they read, and what they make."""

    def __init__(
        self, name: str, factors: tuple[int, ...], sizes: Sequence[int | str | None]
    ) -> None:
        self.name, (self.down, self.across), self.sizes = name, factors, sizes
        self.constants: list[onnx.TensorProto] = []
        channels = sizes[1] if isinstance(sizes[1], int) else None
        # without its rank the Convs behind would not be turned
        self.said = helper.make_tensor_value_info(
            f"{name}/rows", onnx.TensorProto.UINT8, [None, None, None, channels]
        )

    def nodes(self, source: str, output: str) -> list[onnx.NodeProto]:
        """In their order."""
        down, across = self.down, self.across
        shape, reshaped = self._shape(source)
        one = self._constant("axes", [2, 4])
        often = self._constant("often", [1, 1, down, 1, across, 1])
        return [
            self._node("Transpose", [source], "turned", perm=[0, 2, 3, 1]),
            self._node("Unsqueeze", [f"{self.name}/turned", one], "apart"),
            self._node("Tile", [f"{self.name}/apart", often], "repeated"),
            *shape,
            self._node("Reshape", [f"{self.name}/repeated", reshaped], "rows"),
            helper.make_node(
                "Transpose", [f"{self.name}/rows"], [output], name=self.name, perm=[0, 3, 1, 2]
            ),
        ]

    def _shape(self, source: str) -> tuple[list[onnx.NodeProto], str]:
        """What makes the shape of the rows, and its name: a constant where sizes are known."""
        _, channels, height, width = self.sizes
        if isinstance(channels, int) and isinstance(height, int) and isinstance(width, int):
            rows = [-1, height * self.down, width * self.across, channels]
            return [], self._constant("shape", rows)
        order = self._constant("order", [0, 2, 3, 1])
        times = self._constant("times", [1, self.down, self.across, 1])
        made = [
            self._node("Shape", [source], "sizes"),
            self._node("Gather", [f"{self.name}/sizes", order], "ordered"),
            self._node("Mul", [f"{self.name}/ordered", times], "shape"),
        ]
        return made, f"{self.name}/shape"

    def _node(
        self, op_type: str, inputs: Sequence[str], what: str, perm: Sequence[int] | None = None
    ) -> onnx.NodeProto:
        name = f"{self.name}/{what}"
        node = helper.make_node(op_type, inputs, [name], name=name)
        if perm is not None:
            node.attribute.append(helper.make_attribute("perm", perm))
        return node

    def _constant(self, what: str, values: Sequence[int]) -> str:
        name = f"{self.name}/{what}"
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name


_KINDS = frozenset({"Softmax", "LogSoftmax"})


def write_softmax(model: onnx.ModelProto, like: Graph) -> None:
    """Put the quick form in place of every Softmax with several axes behind its own, in place.

    Args:
        model: opset 13 or later.
        like: the model without pairs, which knows ranks.
    """
    ranks = {
        node.name: len(like.shapes.get(node.output[0]) or ())
        for node in like.nodes
        if node.op_type in _KINDS
    }
    instead = {
        node.name: _in_a_row(model, node, axis)
        for node in model.graph.node
        if node.op_type in _KINDS and (axis := _axis(node, ranks.get(node.name, 0))) is not None
    }
    if instead:
        rebuild(model.graph, [n for old in model.graph.node for n in instead.get(old.name, [old])])


def _axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis, counted from the front; None where at most one is behind it, or nobody knows."""
    axis = int(attributes(node).get("axis", -1))
    axis += rank if axis < 0 else 0
    return axis if 0 <= axis < rank - 2 else None


def _in_a_row(model: onnx.ModelProto, node: onnx.NodeProto, axis: int) -> list[onnx.NodeProto]:
    """The nodes in place of one Softmax, which keeps its name; their constant is added."""
    source, output, name = node.input[0], node.output[0], node.name
    row = f"{output}/shape_in_a_row"
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([0] * (axis + 1) + [-1], np.int64), row)
    )

    def made(op_type: str, inputs: Sequence[str], what: str) -> onnx.NodeProto:
        return helper.make_node(op_type, inputs, [f"{output}/{what}"], name=f"{name}/{what}")

    softmax = helper.make_node(
        node.op_type, [f"{output}/in_a_row"], [f"{output}/of_a_row"], name=name, axis=axis
    )
    back = helper.make_node(
        "Reshape", [f"{output}/of_a_row", f"{output}/sizes"], [output], name=f"{name}/as_it_was"
    )
    return [
        made("Shape", [source], "sizes"),
        made("Reshape", [source, row], "in_a_row"),
        softmax,
        back,
    ]


# Operators with an integer kernel that ONNX Runtime puts in by itself
_FUSED = frozenset(
    {"Add", "Mul", "Concat", "Where", "Sigmoid", "LeakyRelu", "Softmax", "MatMul"}
    | {"AveragePool", "GlobalAveragePool"}
)
# Operators past which it moves a pair
_PASSED = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "MaxPool"}
)


def keep_apart(model: onnx.ModelProto, float_nodes: Collection[str]) -> None:
    """Put a Sum before every node that is to stay float and would not, in place.

    Args:
        model: with pairs.
        float_nodes: names of the nodes that were left in float.
    """
    if not any(node.op_type in _FUSED and node.name in float_nodes for node in model.graph.node):
        return
    graph = Graph(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        if node.name in float_nodes and _fused(graph, node):
            nodes.append(_copy(node))
        nodes.append(node)
    if len(nodes) > len(graph.nodes):
        replace_nodes(model.graph, nodes)


def _fused(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime would run a node on integers."""
    if node.op_type not in _FUSED or not all(_read(graph, tensor) for tensor in _data(node)):
        return False
    return node.op_type == "MatMul" or _written(graph, node.output[0])


def _data(node: onnx.NodeProto) -> list[str]:
    """What a node reads, without a condition."""
    return list(node.input)[node.op_type == "Where" :]


def _read(graph: Graph, tensor: str) -> bool:
    """Whether a tensor comes from a DequantizeLinear."""
    maker = graph.producer.get(tensor)
    while maker is not None and maker.op_type in _PASSED:
        maker = graph.producer.get(maker.input[0])
    return maker is not None and maker.op_type == "DequantizeLinear"


def _written(graph: Graph, tensor: str) -> bool:
    """Whether a tensor goes to a QuantizeLinear."""
    return any(
        node.op_type == "QuantizeLinear"
        or (node.op_type in _PASSED and _written(graph, node.output[0]))
        for node in graph.readers.get(tensor, ())
    )


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """What a node reads from now on: the same values, not from a DequantizeLinear."""
    at = len(node.input) - len(_data(node))
    source, apart = node.input[at], f"{node.output[0]}/apart"
    node.input[at] = apart
    return helper.make_node("Sum", [source], [apart], name=f"{node.name}/apart")


_OPSET = 14  # the first with HardSwish; since 13 no operator means another thing
_EQUAL = 1e-6


def fuse_gates(model: onnx.ModelProto, gates: Iterable[Gate], like: Graph) -> None:
    """Write gates that stay float anew, in place.

    Args:
        model: with pairs or without, opset 13 or later.
        gates: of the model without pairs.
        like: that model.
    """
    anew = list(gates)
    nodes = {node.name: node for node in model.graph.node} if anew else {}
    instead: dict[str, list[onnx.NodeProto]] = {}
    for gate in anew:
        own = [nodes[name] for name in gate.nodes]
        fused = _Fused(gate, own, _channels(like, gate))
        written = fused.nodes()
        if len(written) < len(own):
            instead |= {name: [] for name in gate.nodes} | {gate.name: written}
            model.graph.initializer.extend(fused.constants)
    if not instead:
        return
    rebuild(model.graph, [n for old in model.graph.node for n in instead.get(old.name, [old])])
    if opset_of(model) < _OPSET:
        set_opset(model, _OPSET)


class _Fused:
    """The new nodes of one gate, and the constants that they read."""

    def __init__(self, gate: Gate, own: Sequence[onnx.NodeProto], channels: int) -> None:
        self.gate, self.channels = gate, channels
        self.constants: list[onnx.TensorProto] = []
        read = {n.removesuffix("/dequantized"): n for node in own for n in node.input}
        self.source, self.factor = read[gate.source], read[gate.factor]
        self.output = str(own[-1].output[0])
        self.scale = gate.gain * gate.top
        self.affine = gate.offset != 0 or not math.isclose(self.scale, 1.0, rel_tol=_EQUAL)

    def nodes(self) -> list[onnx.NodeProto]:
        """In their order."""
        if not self.affine:
            return self._gated(self.gate.name, self.output)
        gated = f"{self.gate.name}/gated"
        return [*self._gated(gated, gated), *self._scaled(gated)]

    def _gated(self, name: str, output: str) -> list[onnx.NodeProto]:
        """Without gain and offset."""
        gate = self.gate
        alpha, beta = 1 / gate.top, gate.shift / gate.top
        swish = math.isclose(alpha, 1 / 6, rel_tol=_EQUAL) and math.isclose(beta, 0.5)
        if swish and gate.source == gate.factor:
            return [helper.make_node("HardSwish", [self.source], [output], name=name)]
        open_ = f"{gate.name}/open"
        return [
            helper.make_node(
                "HardSigmoid", [self.source], [open_], name=open_, alpha=alpha, beta=beta
            ),
            helper.make_node("Mul", [self.factor, open_], [output], name=name),
        ]

    def _scaled(self, gated: str) -> list[onnx.NodeProto]:
        """Gain and offset, behind the rest."""
        scale, shift = np.float32(self.scale), np.float32(self.gate.offset)
        name = self.gate.name
        if not self.channels:
            product = f"{name}/product"
            times, plus = self._constant("scale", scale), self._constant("shift", shift)
            return [
                helper.make_node("Mul", [gated, times], [product], name=product),
                helper.make_node("Add", [product, plus], [self.output], name=name),
            ]
        every = np.ones(self.channels, np.float32)
        inputs = [
            self._constant("scale", every * scale),
            self._constant("shift", every * shift),
            self._constant("mean", every * 0),
            self._constant("variance", every),
        ]
        node = helper.make_node(
            "BatchNormalization", [gated, *inputs], [self.output], name=name, epsilon=0.0
        )
        return [node]

    def _constant(self, what: str, array: NDArray[np.float32] | np.float32) -> str:
        name = f"{self.gate.name}/{what}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name


def _channels(like: Graph, gate: Gate) -> int:
    """Of what a gate makes, where that is a picture of so many; else 0."""
    sizes = like.shapes.get(gate.output) or ()
    channels = sizes[1] if len(sizes) > 3 else None
    return channels if isinstance(channels, int) else 0
