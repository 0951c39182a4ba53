"""Channels that are all zero behind a tensor's own: what it is called then, and how to lose them.

`deploy.targets.onnxruntime.conv_rewrites` adds them. Whoever holds such a model against another one asks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deploy.tensors import Array

WIDE = "/wide"  # behind the name of a tensor: the same, with more channels, which are zero


def wide_for(name: str, node: str) -> str:
    """What a tensor is called that got wider for one node alone."""
    return f"{name}/{node}{WIDE}"


def with_zeros(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """An array as large as this along every axis."""
    ends = [(0, size - own) for size, own in zip(sizes, values.shape, strict=True)]
    return np.pad(values, ends)


def of_own_channels(name: str, values: Array, like: Array) -> Array:
    """Values [N, C + more, ...] of a tensor of that name, without what `like` [N, C, ...] lacks."""
    if name.endswith(WIDE) and values.ndim == like.ndim > 1:
        return values[:, : like.shape[1]]
    return values
