"""What a layer's weights are multiplied with: patches of its input, at some places of its output.

::

    Conv input [N, C, H, W]  -->  P places of the output  -->  [groups, C of a group * taps, P]
    matrix product  [..., K] -->  P rows                  -->  [1, K, P]

A transposed convolution is read from its output too: a place of it gets, by each tap, one value of
the input, or none where the stride has no input for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How a convolution goes over its input; each tuple has a value an axis.

    Attributes:
        kernel, strides, dilations: as in ONNX.
        pads: before every axis, then behind every axis; not looked at where `auto` says them.
        auto: ONNX's auto_pad.
        group: groups of channels.
        transposed: a ConvTranspose; its pads are given.
        more: what a ConvTranspose's output is longer by (output_padding).
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    auto: str = "NOTSET"
    group: int = 1
    transposed: bool = False
    more: tuple[int, ...] = ()

    @property
    def spans(self) -> list[int]:
        """Values of an axis from the first tap to the last."""
        return [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]

    def around(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(before, behind) of each axis of an input of these sizes."""
        rank = len(self.kernel)
        if self.auto in ("SAME_UPPER", "SAME_LOWER"):
            return [
                _same(size, span, stride, upper=self.auto == "SAME_UPPER")
                for size, span, stride in zip(sizes, self.spans, self.strides, strict=True)
            ]
        if self.auto == "VALID":
            return [(0, 0)] * rank
        return list(zip(self.pads[:rank], self.pads[rank:], strict=True))

    def outputs(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of the output of an input of these sizes."""
        pads, found = self.around(sizes), []
        for axis, (size, span, stride) in enumerate(
            zip(sizes, self.spans, self.strides, strict=True)
        ):
            if self.transposed:
                more = self.more[axis] if self.more else 0
                found.append(stride * (size - 1) + more + span - sum(pads[axis]))
            else:
                found.append(max((size + sum(pads[axis]) - span) // stride + 1, 0))
        return found


def places(number: int, count: int, most: int) -> IntArray:
    """At most `most` of `count` places, drawn evenly by a number, the same in every run."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    drawn = np.random.default_rng(number).choice(count, most, replace=False)
    return np.sort(drawn).astype(np.int64)


def patches(value: NDArray[Any], window: Window | None, number: int, most: int) -> FloatArray:
    """At most `most` patches of one input, float32 [groups, K, P].

    Args:
        value: the input, [N, C, ...] of a convolution, [..., K] of a matrix product.
        window: of a convolution; None for a matrix product.
        number: of the sample, which draws the places.
        most: patches.
    """
    if window is None:
        rows = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
        return np.ascontiguousarray(rows[places(number, len(rows), most)].T)[None]
    shape = (len(value), *window.outputs(value.shape[2:]))
    chosen = places(number, math.prod(shape), most)
    batch, *spots = np.unravel_index(chosen, shape)
    pads = window.around(value.shape[2:])
    taps = []
    for offsets in product(*(range(k) for k in window.kernel)):
        at = [
            _reached(window, axis, spot, pads[axis][0], offsets[axis])
            for axis, spot in enumerate(spots)
        ]
        taps.append(_values(value, batch, at))
    rows = np.stack(taps, axis=2)  # [P, C, taps]
    return np.ascontiguousarray(rows.reshape(len(chosen), window.group, -1).transpose(1, 2, 0))


def _same(size: int, span: int, stride: int, *, upper: bool) -> tuple[int, int]:
    whole = max((-(-size // stride) - 1) * stride + span - size, 0)
    less = whole // 2
    return (less, whole - less) if upper else (whole - less, less)


def _reached(window: Window, axis: int, spot: IntArray, before: int, tap: int) -> IntArray:
    """Where a tap reads on one axis for these places of the output; -1 where it reads nothing."""
    stride, moved = window.strides[axis], tap * window.dilations[axis]
    if not window.transposed:
        return spot * stride - before + moved
    at = spot + before - moved
    return np.where(at % stride == 0, at // stride, -1)


def _values(value: NDArray[Any], batch: IntArray, at: Sequence[IntArray]) -> FloatArray:
    """Values of all channels at these places, [P, C] in float32; zeros outside the input."""
    ends = value.shape[2:]
    inside = np.ones(len(batch), bool)
    for place, end in zip(at, ends, strict=True):
        inside &= (place >= 0) & (place < end)
    near = [np.clip(place, 0, end - 1) for place, end in zip(at, ends, strict=True)]
    found = np.asarray(np.moveaxis(value, 1, -1)[(batch, *near)], np.float32)
    found[~inside] = 0
    return found
