"""ConvTransposes without overlap, for which there is no integer kernel, become a Conv of one pixel.

Each pixel becomes a tile (`deploy.graph.refusal`): the Conv makes the tile's pixels as channels,
and the integers are moved a row of a tile at a time::

    w [c, m, k, l] -> [k l m, c, 1, 1]        a scale of a channel stands k l times
    Conv -> Relu -> Q -> Transpose, Reshape [n, h, w, k, l m] -> Transpose [n, h, k, w, l m]
                      -> Reshape [n, h k, w l, m], Transpose -> [n, m, h k, w l]

The values keep all but their rounding.

Source: ONNX operators Conv-11, ConvTranspose-11, QuantizeLinear-13 and DequantizeLinear-13.
"""

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.graph.edit import drop_dead, make_node, replace_nodes
from deploy.graph.index import Graph, Nodes, Shape
from deploy.graph.refusal import Tile, tile_shape
from deploy.targets.onnxruntime.rewrite_base import (
    BIAS,
    WEIGHT,
    ReplacementNodes,
    RewriteContext,
    find_stored_integers,
    replaced_nodes,
    weight_and_bias_positions,
)
from deploy.tensors import Array

TILES = "/tiles"  # suffix of a tensor whose tiles' pixels lie as channels, rows first
_CONSTANT_NAMES = {WEIGHT: "weight", BIAS: "bias"}


def write_tiles(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Replace each ConvTranspose between Q/DQ pairs by a Conv and nodes that move pixels, in place.

    Where windows do not overlap, each input pixel makes a tile of output pixels. A 1x1 Conv
    computes the tile's pixels as channels, and Reshapes and Transposes put them in place.

    Left alone: ConvTransposes whose windows overlap, have gaps or are cropped, and those that stay
    float.
    """
    graph = Graph(model)
    replacements = {}  # name of a node -> the nodes in its place
    for node in graph.nodes:
        quantize = _find_output_quantize(graph, node)  # None for other nodes, or if it stays float
        weight = find_stored_integers(graph, node, WEIGHT)
        if quantize is None or weight is None:
            continue
        tile = tile_shape(node, weight.dims)  # (rows, columns); None if windows overlap or the like
        if tile is None:
            continue
        channels = weight.dims[1]  # of the output; the constants have the same number
        tiled_layer = _TiledLayer(graph, node, tile, channels)
        replacements[node.name] = tiled_layer.write_layer(quantize)
        float_output = node.output[0].removesuffix("/float")  # its name in the float model
        output_shape = context.float_graph.shapes.get(float_output) or (None,) * 4
        # pixels are moved after the QuantizeLinear, as bytes
        moves = tiled_layer.write_moves(quantize, output_shape)
        replacements[quantize.name] = [quantize, *moves]
        tiled_layer.add_constants_to(model.graph, channels)
    if replacements:
        replace_nodes(model.graph, replaced_nodes(model, replacements))
        drop_dead(model.graph)


def _find_output_quantize(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the QuantizeLinear after a ConvTranspose and its activation, if all is quantized."""
    if node.op_type != "ConvTranspose":
        return None
    if graph.find_producer(node.input[0], "DequantizeLinear") is None:
        return None
    if any(
        find_stored_integers(graph, node, index) is None
        for index in weight_and_bias_positions(node)
    ):
        return None
    return graph.only_reader(graph.fused_output(node), "QuantizeLinear")


def tiled(array: Array, tile: Tile) -> Array:
    """Return a constant of a ConvTranspose in the form that the Conv in its place needs.

    The Conv has an output channel for each pixel of a tile and each channel m: [k l m, c, 1, 1].

    Args:
        array: a weight [c, m, k, l], values [m] of the channels, or one value for all.
        tile: rows k and columns l of a tile.
    """
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0).reshape(-1, len(array), 1, 1)
    return array if array.ndim == 0 else np.tile(array, tile[0] * tile[1])


class _TiledLayer(ReplacementNodes):
    """The nodes in place of one ConvTranspose, and their constants."""

    def __init__(self, graph: Graph, node: onnx.NodeProto, tile: Tile, channels: int) -> None:
        super().__init__(node.name)
        self.graph = graph
        self.node = node
        self.tile = tile
        self.channels = channels

    def write_layer(self, quantize: onnx.NodeProto) -> Nodes:
        """Return the Conv in the ConvTranspose's place, and the DequantizeLinears of its constants.

        The Conv's channels at an input pixel are the output pixels of its tile. The nodes after
        it, an activation and `quantize`, are changed in place: they read and make such channels.
        """
        constants = [self._write_constant(index) for index in weight_and_bias_positions(self.node)]
        inputs = [self.node.input[0], *(constant.output[0] for constant in constants)]
        output = self.node.output[0]
        conv = make_node("Conv", inputs, f"{output}{TILES}", self.name)
        tail_output = quantize.input[0]  # output of the activation, or of the layer itself
        self._let_reader_read_tiles(output)
        if tail_output != output:  # there is an activation
            self._let_reader_read_tiles(tail_output)
            self.graph.producer[tail_output].output[0] = f"{tail_output}{TILES}"
        return [*constants, conv]

    def _let_reader_read_tiles(self, tensor: str) -> None:
        """Let the only reader of a tensor read the tensor of tiles in its place."""
        (reader,) = self.graph.readers[tensor]
        reader.input[0] = f"{tensor}{TILES}"

    def _write_constant(self, position: int) -> onnx.NodeProto:
        """Return the DequantizeLinear of the Conv's weight, or bias."""
        dequantize = self.graph.producer[self.node.input[position]]
        constant_name = _CONSTANT_NAMES[position]
        names = []
        suffixes = ("quantized", "scale", "zero_point")
        for name, suffix in zip(dequantize.input, suffixes, strict=True):
            array = numpy_helper.to_array(self.graph.initializers[name])
            names.append(self.add_constant(f"{constant_name}/{suffix}", tiled(array, self.tile)))
        output = f"{self.name}/{constant_name}"
        axis = 0 if self.graph.initializers[dequantize.input[1]].dims else None
        return make_node("DequantizeLinear", names, output, f"{output}/DQ", axis=axis)

    def write_moves(self, quantize: onnx.NodeProto, sizes: Shape) -> Nodes:
        """Return the nodes that put the pixels of the tiles in place, after the QuantizeLinear.

        A tile is the r x c output pixels that an input pixel makes. The output of `quantize` is
        renamed, in place, and the nodes make the tensor of its old name, in these steps ::

            [N, r c M, H, W]      tiles of r x c pixels of M channels, as channels
            [N, H, W, r c M]      channels last
            [N, H, W, r, c M]     channels cut into rows of a tile
            [N, H, r, W, c M]     pixels of a row side by side
            [N, H r, W c, M]      rows
            [N, M, H r, W c]      channels first

        `sizes`: shape of the ConvTranspose's output; None for an unknown size.
        """
        output = quantize.output[0]
        tiles = f"{output}{TILES}"
        quantize.output[0] = tiles
        rows, columns = self.tile  # r and c
        cut_shape = self.add_constant("apart", [0, 0, 0, rows, columns * self.channels])
        _, _, height, width = sizes  # H r and W c
        shape_nodes: Nodes = []
        if isinstance(height, int) and isinstance(width, int):
            row_shape = self.add_constant("shape", [-1, height, width, self.channels])
        else:  # [N, H r, W c, M] is computed when the model runs
            factors = [1, rows, columns]
            row_shape, shape_nodes = self.scaled_shape(tiles, [0, 2, 3], factors, self.channels)

        # `make_named_node` gives a node and its output the same name, NAME/suffix, whose suffix is
        # the third argument; so the name of a node is that of the tensor that the next one reads
        channels_last = self.make_named_node("Transpose", [tiles], "turned", perm=[0, 2, 3, 1])
        cut_tiles = self.make_named_node("Reshape", [channels_last.name, cut_shape], "cut")
        tile_rows = self.make_named_node(
            "Transpose", [cut_tiles.name], "moved", perm=[0, 1, 3, 2, 4]
        )
        pixels = self.make_named_node("Reshape", [tile_rows.name, row_shape], "rows")
        name = f"{self.name}/whole"
        channels_first = make_node("Transpose", [pixels.name], output, name, perm=[0, 3, 1, 2])
        return [channels_last, cut_tiles, tile_rows, *shape_nodes, pixels, channels_first]
