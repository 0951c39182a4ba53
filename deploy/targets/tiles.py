"""ConvTransposes of int8 tensors that make tiles, as a Conv of one pixel and copies.

ONNX Runtime has no integer kernel of a ConvTranspose. Where each pixel becomes a tile
(`deploy.graph.tiles`) a Conv makes the tile's pixels as channels, and what is moved are its
integers, a row of a tile at a time, all channels together as the int8 Convs around want them::

    w [c, m, k, l] -> [k l m, c, 1, 1]        a scale of a channel stands k l times
    Conv -> Relu -> Q -> Transpose, Reshape [n, h, w, k, l m] -> Transpose [n, h, k, w, l m]
                      -> Reshape [n, h k, w l, m], Transpose -> [n, m, h k, w l]

Every stored value is that of the pair of a ConvTranspose in float, but for its rounding.

Source: ONNX operators Conv-11, ConvTranspose-11, QuantizeLinear-13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.graph.edit import copied, drop_dead, replace_nodes
from deploy.graph.index import Graph
from deploy.graph.tiles import Tile, tile_of

_CONSTANTS = ("", "weight", "bias")  # inputs of a Conv
TILES = "/tiles"  # behind the name of a tensor: the same, a tile's pixels as channels, rows first


def with_tiles(model: onnx.ModelProto, like: Graph) -> onnx.ModelProto:
    """A copy with a Conv and copies in place of every ConvTranspose between pairs that makes tiles.

    Args:
        model: with pairs; given back as it is where it has none of these.
        like: the model without pairs, which knows sizes.
    """
    if not any(node.op_type == "ConvTranspose" for node in model.graph.node):
        return model
    model = copied(model)
    graph = Graph(model)
    instead: dict[str, list[onnx.NodeProto]] = {}
    known: list[onnx.ValueInfoProto] = []
    for node in graph.nodes:
        quantize = _quantized_by(graph, node)
        weight = _stored(graph, node, 1)
        tile = tile_of(node, weight.dims) if weight is not None else None
        if quantize is None or weight is None or tile is None:
            continue
        own = _Tiled(graph, node, tile, int(weight.dims[1]))
        instead[node.name] = own.layer(quantize)
        sizes = like.shapes.get(node.output[0].removesuffix("/float"))
        instead[quantize.name] = [quantize, *own.moves(quantize, sizes or (None,) * 4)]
        model.graph.initializer.extend(own.constants)
        known.append(own.said)
    if instead:
        replace_nodes(model.graph, [n for old in graph.nodes for n in instead.get(old.name, [old])])
        drop_dead(model.graph)
        model.graph.value_info.extend(known)
    return model


def tiled(array: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """What a ConvTranspose has for its channels, for those of the Conv in its place.

    Args:
        array: a weight [c, m, k, l], values [m], or one value for all.
        tile: rows and columns.
    """
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0).reshape(-1, len(array), 1, 1)
    return np.tile(array, tile[0] * tile[1]) if array.ndim else array


def _quantized_by(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The QuantizeLinear behind a ConvTranspose and its tail, where all of it is between pairs."""
    if node.op_type != "ConvTranspose":
        return None
    source, after = graph.producer.get(node.input[0]), graph.only_reader(graph.tail(node))
    if source is None or source.op_type != "DequantizeLinear":
        return None
    if any(_stored(graph, node, place) is None for place in _constants(node)):
        return None
    return after if after is not None and after.op_type == "QuantizeLinear" else None


def _constants(node: onnx.NodeProto) -> list[int]:
    """Places of the weight and, where there is one, the bias among a node's inputs."""
    return [place for place, name in enumerate(node.input) if place and name]


def _stored(graph: Graph, node: onnx.NodeProto, place: int) -> onnx.TensorProto | None:
    """The integers behind a DequantizeLinear that a node reads."""
    maker = graph.producer.get(node.input[place]) if len(node.input) > place else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    return graph.initializers.get(maker.input[0])


class _Tiled:
    """The nodes in place of one ConvTranspose, and the constants that they read."""

    def __init__(self, graph: Graph, node: onnx.NodeProto, tile: Tile, channels: int) -> None:
        self.graph, self.node, self.tile, self.channels = graph, node, tile, channels
        self.name = node.name
        self.constants: list[onnx.TensorProto] = []
        # without its rank the Convs behind would not be turned
        self.said = helper.make_tensor_value_info(
            f"{self.name}/rows", onnx.TensorProto.UINT8, [None, None, None, channels]
        )

    def layer(self, quantize: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The Conv and what it reads; its tail and the QuantizeLinear are told to read tiles."""
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
            self._constant(f"{_CONSTANTS[place]}{end}", tiled(array, self.tile))
            for end, array in zip(("/quantized", "/scale", "/zero_point"), arrays, strict=True)
        ]
        node = helper.make_node("DequantizeLinear", names, [what], name=f"{what}/DQ")
        if arrays[1].ndim:
            node.attribute.append(helper.make_attribute("axis", 0))
        return node

    def moves(
        self, quantize: onnx.NodeProto, sizes: Sequence[int | str | None]
    ) -> list[onnx.NodeProto]:
        """What is behind the QuantizeLinear, which is told to make tiles."""
        whole = str(quantize.output[0])
        made = quantize.output[0] = f"{whole}{TILES}"
        down, across = self.tile
        apart = self._numbers("apart", [0, 0, 0, down, across * self.channels])
        shape, reshaped = self._shape(made, sizes)
        return [
            self._node("Transpose", [made], "turned", perm=[0, 2, 3, 1]),
            self._node("Reshape", [f"{self.name}/turned", apart], "cut"),
            self._node("Transpose", [f"{self.name}/cut"], "moved", perm=[0, 1, 3, 2, 4]),
            *shape,
            self._node("Reshape", [f"{self.name}/moved", reshaped], "rows"),
            helper.make_node(
                "Transpose",
                [f"{self.name}/rows"],
                [whole],
                name=f"{self.name}/whole",
                perm=[0, 3, 1, 2],
            ),
        ]

    def _shape(
        self, made: str, sizes: Sequence[int | str | None]
    ) -> tuple[list[onnx.NodeProto], str]:
        """What makes the shape of the rows, and its name: a constant where sizes are known."""
        height, width = sizes[2:]
        if isinstance(height, int) and isinstance(width, int):
            return [], self._numbers("shape", [-1, height, width, self.channels])
        order = self._numbers("order", [0, 2, 3])
        times = self._numbers("times", [1, *self.tile])
        channels = self._numbers("channels", [self.channels])
        concat = self._node("Concat", [f"{self.name}/larger", channels], "shape")
        concat.attribute.append(helper.make_attribute("axis", 0))
        nodes = [
            self._node("Shape", [made], "sizes"),
            self._node("Gather", [f"{self.name}/sizes", order], "ordered"),
            self._node("Mul", [f"{self.name}/ordered", times], "larger"),
            concat,
        ]
        return nodes, f"{self.name}/shape"

    def _node(
        self, op_type: str, inputs: Sequence[str], what: str, perm: Sequence[int] = ()
    ) -> onnx.NodeProto:
        name = f"{self.name}/{what}"
        node = helper.make_node(op_type, inputs, [name], name=name)
        if perm:
            node.attribute.append(helper.make_attribute("perm", perm))
        return node

    def _numbers(self, what: str, values: Sequence[int]) -> str:
        return self._constant(what, np.array(values, np.int64))

    def _constant(self, what: str, array: NDArray[Any]) -> str:
        name = f"{self.name}/{what}"
        self.constants.append(numpy_helper.from_array(array.copy(), name))
        return name
