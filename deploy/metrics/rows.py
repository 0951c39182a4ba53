"""One sample at a time out of a batch's arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deploy.tensors import Array

Outputs = Mapping[str, Array]


def batch_length(feed: Outputs) -> int:
    """Samples in a feed: as many as its first input is long."""
    first = next(iter(feed.values()), None)
    return int(first.shape[0]) if first is not None and np.ndim(first) else 1


def split(arrays: Outputs, batch: int) -> list[dict[str, Array]]:
    """Arrays of a batch as arrays of one sample each, with a batch of 1.

    The batch is the first dimension, or the second of sequences [T, N, C]; what has it nowhere is
    left out, but of a batch of 1, which is one sample as it stands.
    """
    if batch == 1:
        return [{name: np.asarray(value) for name, value in arrays.items()}]
    found: list[dict[str, Array]] = [{} for _ in range(batch)]
    for name, value in arrays.items():
        axis = next((a for a in (0, 1) if value.ndim > 2 * a and value.shape[a] == batch), None)
        for row, own in enumerate(found if axis is not None else ()):
            own[name] = value[row : row + 1] if axis == 0 else value[:, row : row + 1]
    return found


def image_size(feed: Outputs) -> tuple[int, int] | None:
    """(height, width) in pixels of the first input that is a picture; None without one."""
    for value in feed.values():
        if value.ndim == 4:
            last = value.shape[3] in (1, 3, 4) and value.shape[1] not in (1, 3, 4)
            height, width = value.shape[1:3] if last else value.shape[2:4]
            return int(height), int(width)
    return None
