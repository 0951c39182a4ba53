"""ConvTransposes whose windows lie side by side: each pixel becomes a tile of k x l pixels.

Then nothing is summed over pixels, and the layer is a Conv of one pixel that makes the tile's
pixels as channels, which are put in their places::

    x [n, c, h, w] -> ConvTranspose, window = stride -> [n, m, h k, w l]
                   -> Conv 1x1 -> [n, k l m, h, w]   -> moved
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.graph.index import attributes

if TYPE_CHECKING:
    import onnx

Tile = tuple[int, int]


def tile_of(node: onnx.NodeProto, sizes: Sequence[int]) -> Tile | None:
    """Rows and columns of the tile that a ConvTranspose makes of a pixel.

    Args:
        node: the node.
        sizes: of its weight, [c, m / groups, k, l].

    Returns:
        None where windows overlap, lie apart or are cut off, and of what is no ConvTranspose of
        pictures.
    """
    if node.op_type != "ConvTranspose" or len(sizes) != 4:
        return None
    given = attributes(node)
    rows, columns = sizes[2:]
    beside = list(given.get("strides", [1, 1])) == [rows, columns] != [1, 1]
    whole = not any((*given.get("pads", ()), *given.get("output_padding", ())))
    dense = all(step == 1 for step in given.get("dilations", ()))
    told = given.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in given
    plain = given.get("group", 1) == 1 and not told
    return (int(rows), int(columns)) if beside and whole and dense and plain else None
