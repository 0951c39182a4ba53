"""Nearest upsampling of int8 tensors by whole factors, as repeated rows and pixels.

ONNX Runtime's Resize looks up every value of an int8 tensor alone, in one thread; repeating a
pixel's channels, which lie together as the int8 Convs around want them, is a copy::

    q [n, c, h, w] -> Transpose -> Unsqueeze [n, h, 1, w, 1, c] -> Tile [n, h, s, w, s, c]
                   -> Reshape [n, h s, w s, c] -> Transpose -> [n, c, h s, w s]

of the integers themselves, since a Resize keeps their scale (1 x 96 x 80 x 80 doubled on
AVX512-VNNI: 156 us for 2067 us in one thread).

Source: ONNX operator Resize-13, coordinate_transformation_mode and nearest_mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import drop_dead, rebuild
from deploy.graph.flow import resized_by
from deploy.graph.index import Graph, attributes

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
