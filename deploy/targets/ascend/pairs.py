"""What the Q/DQ pairs of a model say of its layers, as Ascend can take it over.

Ascend adds its offset where ONNX adds the zero point: an int8 zero point is the offset, of a uint8
one 128 is taken away. Weights keep the integers that they have, so that their zero point must be 0
(or 128 in uint8). What does not fit is told by its reason, and the layer stays float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deploy.frontends.pairs import Grid, UnfitError, input_grid, weight_grid
from deploy.graph.index import Graph
from deploy.targets.ascend.layers import TYPES

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the pairs say of a layer.

    Attributes:
        scale_d, offset_d: of its input.
        scale_w: of its weight, float32 [C_out] or [1]; [1] of 1 for a pool.
    """

    scale_d: np.float32
    offset_d: int
    scale_w: NDArray[np.float32]


def taken_over(index: Graph) -> tuple[dict[str, Taken], dict[str, str]]:
    """Layers by name whose pairs Ascend can take over, and why it cannot those of others.

    Args:
        index: of a Q/DQ model, each node with a name of its own.
    """
    taken, why = {}, {}
    for node in index.nodes:
        if node.op_type not in TYPES:
            continue
        try:
            taken[node.name] = _taken(node, index)
        except UnfitError as error:
            why[node.name] = str(error)
    return taken, why


def _taken(node: onnx.NodeProto, index: Graph) -> Taken:
    grid = _in_int8(input_grid(node, index))
    return Taken(
        scale_d=np.float32(grid.scale.reshape(-1)[0]),
        offset_d=int(grid.offset.reshape(-1)[0]),
        scale_w=np.ones(1, np.float32) if node.op_type == "AveragePool" else _weight(node, index),
    )


def _weight(node: onnx.NodeProto, index: Graph) -> NDArray[np.float32]:
    """Scales of a layer's weight, by output channel where there are several."""
    grid, scales = weight_grid(node, index)
    if _in_int8(grid).offset.any():
        raise UnfitError("its weight has a zero point, and Ascend's have none")
    return scales


def _in_int8(grid: Grid) -> Grid:
    """The grid, if it is one of 8 bits."""
    if not grid.bits8:
        raise UnfitError(f"it is quantized to {grid.dtype}, and Ascend's layers to int8")
    return grid
