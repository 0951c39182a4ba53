"""Outputs of a detector as tables, one row an anchor, whichever way they lie."""

from __future__ import annotations

import numpy as np

from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.detections import Floats
from deploy.metrics.tasks.grid import STRIDES
from deploy.metrics.tasks.task import Seen
from deploy.tensors import Array

_LARGEST = 1 << 16  # cells of a level


def laid(outputs: Outputs, *, maps: bool, turned: frozenset[str]) -> dict[str, Array]:
    """Anchors as rows in all outputs."""
    rows = _unrolled(outputs) if maps else dict(outputs)
    own = {name: rows[name].swapaxes(1, 2) for name in turned if rows[name].ndim == 3}
    return {**rows, **own}


def turned_of(seen: Seen) -> frozenset[str]:
    """Outputs [1, C, A] beside boxes [1, A, 4] or [1, 4, A]."""
    shapes = {name: seen.outputs[0][name].shape for name in seen.names}
    flat = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[0] == 1}
    lengths = {max(shape) for shape in flat.values() if 4 in shape[1:]}
    return frozenset(n for n, (_, rows, last) in flat.items() if last in lengths and rows < last)


def are_cells(seen: Seen) -> bool:
    """Whether all maps are of the cells of strides, in every sample."""
    return all(
        size is not None
        and value.shape[2:] in [(-(-size[0] // s), -(-size[1] // s)) for s in STRIDES]
        for one, size in zip(seen.outputs, map(image_size, seen.inputs), strict=True)
        for value in one.values()
        if value.ndim == 4
    )


def _unrolled(outputs: Outputs) -> dict[str, Array]:
    """Maps [1, C, H, W] of no great size become [1, H W, C]; the rest stays as it is."""
    return {
        name: value.reshape(*value.shape[:2], value.shape[2] * value.shape[3]).transpose(0, 2, 1)
        if value.ndim == 4 and len(value) == 1 and value.shape[2] * value.shape[3] <= _LARGEST
        else value
        for name, value in outputs.items()
    }


def table(value: Array) -> Floats | None:
    """[1, A, C] or [A, C] -> [A, C]; None for other shapes."""
    if value.ndim not in (2, 3) or not np.issubdtype(value.dtype, np.floating):
        return None
    if value.ndim == 3 and len(value) != 1:
        return None
    return value.reshape(value.shape[-2:]).astype(np.float64)
