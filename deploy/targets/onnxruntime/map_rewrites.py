"""Rewrites of maps for ONNX Runtime's kernels: nearest upsampling and gates that stay float.

Nearest upsampling of int8 tensors by integer factors becomes copies of rows and pixels. ONNX
Runtime's Resize looks up every int8 value alone, in one thread; a pixel's channels, which lie
together as the int8 Convs want them, are copied as one block::

    q [n, c, h, w] -> Transpose -> Unsqueeze [n, h, 1, w, 1, c] -> Tile [n, h, s, w, s, c]
                   -> Reshape [n, h s, w s, c] -> Transpose -> [n, c, h s, w s]

It works on the integers themselves, since a Resize keeps their scale (1 x 96 x 80 x 80 doubled:
156 us in place of 2067 us in one thread).

Gates that stay float become operators that ONNX Runtime computes inside the layer before them. A
Hard-Swish written out between two Convs is four kernels and two changes of layout, where its own
operator costs nothing (`deploy.graph.gates` has y = factor * gain * clip(..) + offset)::

    Conv -> Add 3, Clip 0..6, Mul, Div 6      -->  Conv -> HardSwish       one kernel
    x * clip(g + 3, 0, 6) / 6                 -->  g -> HardSigmoid -> Mul
    .. * 0.9 + 0.1                            -->  .. -> BatchNormalization, which has the layout of
                                                   a Conv, as Mul and Add of a number have not

Source: ONNX operators Resize-13 (coordinate_transformation_mode, nearest_mode), HardSigmoid-6,
HardSwish-14 and BatchNormalization-14.
"""

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import drop_dead, rebuild, set_opset
from deploy.graph.gates import Gate
from deploy.graph.index import Graph, attributes, opset_of
from deploy.graph.placement import resize_mode
from deploy.targets.onnxruntime.conv_rewrites import ReplacementNodes, RewriteContext

_HALF = ("half_pixel", "pytorch_half_pixel")  # an input pixel lies in the middle of its copies


def write_upsampling(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write each Resize between pairs that only repeats pixels as copies."""
    like = context.like
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
        known.append(own.rows(sizes[1] if isinstance(sizes[1], int) else None))
    if instead:
        rebuild(model.graph, [n for old in graph.nodes for n in instead.get(old.name, [old])])
        drop_dead(model.graph)  # DequantizeLinears that only the Resize read
        model.graph.value_info.extend(known)


def _any_between_pairs(model: onnx.ModelProto) -> bool:
    """Whether a Resize reads a DequantizeLinear; a quick check, as most models have none."""
    turned: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            turned.add(node.output[0])
        elif node.op_type == "Resize" and node.input[0] in turned:
            return True
    return False


def _factors(graph: Graph, like: Graph, node: onnx.NodeProto) -> tuple[int, ...]:
    """(rows, columns) by which a Resize repeats pixels; () if it does something else."""
    if node.op_type != "Resize" or len(like.shapes.get(node.input[0]) or ()) != 4:
        return ()
    given = attributes(node)
    if resize_mode(node) != "nearest" or given.get("axes"):
        return ()
    names = [*node.input, "", ""]
    scales = graph.initializers.get(names[2])
    if scales is None or scales.dims != [4]:
        return ()
    found = numpy_helper.to_array(scales).tolist()
    whole = all(one == int(one) >= 1 for one in found) and found[:2] == [1, 1]
    return tuple(map(int, found[2:])) if whole and _repeats(given, found) else ()


def _repeats(given: dict[str, bytes], factors: Sequence[float]) -> bool:
    """Whether output i is input i // factor."""
    where = given.get("coordinate_transformation_mode", b"half_pixel").decode()
    rounded = given.get("nearest_mode", b"round_prefer_floor").decode()
    if where in _HALF:
        return rounded.startswith("round")
    down = rounded == "floor" or (rounded == "round_prefer_floor" and max(factors) <= 2)
    return where == "asymmetric" and down


def _ends(graph: Graph, node: onnx.NodeProto) -> tuple[str, str] | None:
    """The int8 tensors before and after a node, where both have the same scale and zero point."""
    before, after = graph.producer.get(node.input[0]), graph.only_reader(node.output[0])
    if before is None or after is None:
        return None
    if (before.op_type, after.op_type) != ("DequantizeLinear", "QuantizeLinear"):
        return None
    if _grid(graph, before) is None or _grid(graph, before) != _grid(graph, after):
        return None
    return str(before.input[0]), str(after.output[0])


def _grid(graph: Graph, node: onnx.NodeProto) -> list[list[float]] | None:
    """Scale and zero point; None unless they are constants."""
    held = [graph.initializers.get(name) for name in node.input[1:]]
    arrays = [numpy_helper.to_array(one).reshape(-1) for one in held if one is not None]
    return [array.tolist() for array in arrays] if len(arrays) == len(held) else None


class _Repeated(ReplacementNodes):
    """The nodes in place of one Resize, their constants and the shape they need."""

    def __init__(
        self, name: str, factors: tuple[int, ...], sizes: Sequence[int | str | None]
    ) -> None:
        super().__init__(name)
        (self.down, self.across), self.sizes = factors, sizes

    def nodes(self, source: str, output: str) -> list[onnx.NodeProto]:
        down, across = self.down, self.across
        shape, reshaped = self._shape(source)
        one = self.constant("axes", [2, 4])
        often = self.constant("often", [1, 1, down, 1, across, 1])
        return [
            self.make("Transpose", [source], "turned", perm=[0, 2, 3, 1]),
            self.make("Unsqueeze", [f"{self.name}/turned", one], "apart"),
            self.make("Tile", [f"{self.name}/apart", often], "repeated"),
            *shape,
            self.make("Reshape", [f"{self.name}/repeated", reshaped], "rows"),
            helper.make_node(
                "Transpose", [f"{self.name}/rows"], [output], name=self.name, perm=[0, 3, 1, 2]
            ),
        ]

    def _shape(self, source: str) -> tuple[list[onnx.NodeProto], str]:
        """(nodes that compute the shape of the rows, its name); no nodes if sizes are known."""
        _, channels, height, width = self.sizes
        if isinstance(channels, int) and isinstance(height, int) and isinstance(width, int):
            rows = [-1, height * self.down, width * self.across, channels]
            return [], self.constant("shape", rows)
        order = self.constant("order", [0, 2, 3, 1])
        times = self.constant("times", [1, self.down, self.across, 1])
        made = [
            self.make("Shape", [source], "sizes"),
            self.make("Gather", [f"{self.name}/sizes", order], "ordered"),
            self.make("Mul", [f"{self.name}/ordered", times], "shape"),
        ]
        return made, f"{self.name}/shape"


_OPSET = 14  # the first with HardSwish; since 13 no operator means another thing
_EQUAL = 1e-6


def fuse_gates(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write the gates that stay float with fewer operators."""
    gates = context.float_gates
    nodes = {node.name: node for node in model.graph.node} if gates else {}
    instead: dict[str, list[onnx.NodeProto]] = {}
    for gate in gates:
        own = [nodes[name] for name in gate.nodes]
        fused = _Fused(gate, own, _channels(context.like, gate))
        written = fused.nodes()
        if len(written) < len(own):
            instead |= {name: [] for name in gate.nodes} | {gate.name: written}
            model.graph.initializer.extend(fused.constants)
    if not instead:
        return
    rebuild(model.graph, [n for old in model.graph.node for n in instead.get(old.name, [old])])
    if opset_of(model) < _OPSET:
        set_opset(model, _OPSET)


class _Fused(ReplacementNodes):
    """The new nodes of one gate, and their constants."""

    def __init__(self, gate: Gate, own: Sequence[onnx.NodeProto], channels: int) -> None:
        super().__init__(gate.name)
        self.gate, self.channels = gate, channels
        read = {n.removesuffix("/dequantized"): n for node in own for n in node.input}
        self.source, self.factor = read[gate.source], read[gate.factor]
        self.output = str(own[-1].output[0])
        self.scale = gate.gain * gate.top
        self.affine = gate.offset != 0 or not math.isclose(self.scale, 1.0, rel_tol=_EQUAL)

    def nodes(self) -> list[onnx.NodeProto]:
        if not self.affine:
            return self._gated(self.gate.name, self.output)
        gated = f"{self.gate.name}/gated"
        return [*self._gated(gated, gated), *self._scaled(gated)]

    def _gated(self, name: str, output: str) -> list[onnx.NodeProto]:
        """The gate without gain and offset."""
        gate = self.gate
        alpha, beta = 1 / gate.top, gate.shift / gate.top
        swish = math.isclose(alpha, 1 / 6, rel_tol=_EQUAL) and math.isclose(beta, 0.5)
        if swish and gate.source == gate.factor:
            return [helper.make_node("HardSwish", [self.source], [output], name=name)]
        opened = self.make("HardSigmoid", [self.source], "open", alpha=alpha, beta=beta)
        inputs = [self.factor, opened.output[0]]
        return [opened, helper.make_node("Mul", inputs, [output], name=name)]

    def _scaled(self, gated: str) -> list[onnx.NodeProto]:
        scale, shift = np.float32(self.scale), np.float32(self.gate.offset)
        name = self.gate.name
        if not self.channels:
            product = self.make("Mul", [gated, self.constant("scale", scale)], "product")
            inputs = [product.output[0], self.constant("shift", shift)]
            return [product, helper.make_node("Add", inputs, [self.output], name=name)]
        every = np.ones(self.channels, np.float32)
        inputs = [
            self.constant("scale", every * scale),
            self.constant("shift", every * shift),
            self.constant("mean", every * 0),
            self.constant("variance", every),
        ]
        node = helper.make_node(
            "BatchNormalization", [gated, *inputs], [self.output], name=name, epsilon=0.0
        )
        return [node]


def _channels(like: Graph, gate: Gate) -> int:
    """Channels of a gate's output if it is a picture of known size, else 0."""
    sizes = like.shapes.get(gate.output) or ()
    channels = sizes[1] if len(sizes) > 3 else None
    return channels if isinstance(channels, int) else 0
