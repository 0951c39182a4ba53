"""Weight rounding by output error: each weight up or down so that the layer's output errs least.

Rounding to nearest makes each weight's own error small. What a layer gives errs by the sum of them,
weighted by its inputs, and there errors can cancel::

    |(q - w) X|^2  =  (q - w) H (q - w)^T         H = X X^T of the inputs, [K, K]

This is AdaRound's problem (a quadratic one over up or down for each weight). It is solved here by
coordinate descent from rounding to nearest: each weight in turn takes the side that lowers the
error, until none moves. No step can raise the error, so the result is never worse than nearest on
the inputs it was made from.

Sources: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020),
equation 13; Zhang et al., "COMQ: A Backpropagation-Free Algorithm for Post-Training Quantization"
(2024), for coordinate descent in place of gradients.

What a layer's weights are multiplied with: patches of its input, at some places of its output.

::

    Conv input [N, C, H, W]  -->  P places of the output  -->  [groups, C of a group * taps, P]
    matrix product  [..., K] -->  P rows                  -->  [1, K, P]

A transposed convolution is read from its output too: a place of it gets, by each tap, one value of
the input, or none where the stride has no input for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import INT8, Grid, rounded
from calibrators.kernel import kernel

FloatArray = NDArray[np.float64]

_TILE = 64  # products of 64 x 64 x 64: for more, BLAS wakes its threads, and sums in their order
# Of H's mean diagonal: what a few inputs did not show is not taken for zero. On other inputs of
# YOLOv8n and EfficientNet-Lite0 0.2 leaves 0.28 and 0.50 of the squared error, 0.01 0.30 and 0.55.
_DAMP = 0.2


def gram(inputs: NDArray[np.floating]) -> FloatArray:
    """Inputs [G, K, P] of G groups, K values of P patches -> X X^T / P of each group, [G, K, K].

    The result does not depend on the number of threads.
    """
    x = np.asarray(inputs, np.float32)
    total = products_of(x, x.swapaxes(1, 2).copy(), mirrored=True)
    total /= max(inputs.shape[2], 1)
    return total


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is the caller's to look at
def products_of(left: NDArray[Any], right: NDArray[Any], *, mirrored: bool = False) -> FloatArray:
    """[G, M, K] times [G, K, N] -> [G, M, N] in float64, for any number of threads the same.

    Blocks of 64 x 64 x 64 are multiplied in the arrays' own type and summed in float64; where the
    product is its own mirror image, those above the diagonal stand for those below.
    """
    groups, rows, inner = left.shape
    columns = right.shape[2]
    total = np.zeros((groups, rows, columns))
    step = max(_TILE, _TILE**3 // (min(rows, _TILE) * min(columns, _TILE)))
    for a in range(0, rows, _TILE):
        strip = slice(a if mirrored else 0, None)
        for k in range(0, inner, step):  # the strip of sums stays in cache meanwhile
            part = slice(k, k + step)
            block = left[:, a : a + _TILE, part]
            _add_blocks(total[:, a : a + _TILE, strip], block, right[:, part, strip])
    for a in range(0, rows, _TILE) if mirrored else ():
        above = total[:, a : a + _TILE, a + _TILE :]
        total[:, a + _TILE :, a : a + _TILE] = above.swapaxes(1, 2)
    return total


def _add_blocks(strip: FloatArray, block: NDArray[Any], right: NDArray[Any]) -> None:
    """Add a block times all blocks beside it, the whole ones of these in one call."""
    groups, inner, columns = right.shape
    many = columns // _TILE
    whole = many * _TILE
    if many:
        tiles = right[:, :, :whole].reshape(groups, inner, many, _TILE).swapaxes(1, 2)
        parted = strip[:, :, :whole].reshape(*strip.shape[:2], many, _TILE)  # a view
        parted += (block[:, None] @ tiles).swapaxes(1, 2)
    if whole < columns:
        strip[:, :, whole:] += block @ right[:, :, whole:]


def output_error(steps: FloatArray, integers: FloatArray, products: FloatArray) -> FloatArray:
    """(q - w) H (q - w)^T of every row: [G, C, K] twice and [G, K, K] -> [G, C], in steps."""
    apart = integers - steps
    return np.asarray((products_of(apart, products) * apart).sum(axis=2))


def rounded_by_output(
    steps: FloatArray,
    products: FloatArray,
    *,
    fixed: NDArray[np.bool_],
    sweeps: int = 4,
    grid: Grid = INT8,
) -> FloatArray:
    """Weights in steps -> stored values of least output error, each w rounded down or up.

    Args:
        steps: weight / scale, [G, C, K]: groups, output channels, values of an input patch.
        products: `gram` of the inputs, [G, K, K].
        fixed: weights that keep their nearest, such as the extremes that give the scale.
        sweeps: at most how often every weight is gone through.
        grid: that stores them: whole numbers, or those of a float type.

    Returns:
        [G, C, K], each entry the grid's value below or above its weight.

    Raises:
        CalibrationError: shapes that do not fit, or values that are not finite.
    """
    if steps.ndim != 3 or products.shape != (steps.shape[0], steps.shape[2], steps.shape[2]):
        raise CalibrationError(
            "weights [G, C, K] need products [G, K, K], got"
            f" {list(steps.shape)} and {list(products.shape)}"
        )
    if not (np.isfinite(steps).all() and np.isfinite(products).all()):
        raise CalibrationError("weights and products must be finite, got NaN or Inf")
    own = np.einsum("gkk->gk", products)
    damp = _DAMP * own.mean(axis=1)
    integers, low, high = (
        np.ascontiguousarray(rounded(steps, grid, to), np.float64)
        for to in (np.rint, np.floor, np.ceil)
    )
    apart = integers - steps
    slope = np.ascontiguousarray(products_of(apart, products) + damp[:, None, None] * apart)
    found = kernel()
    if found is not None:
        _swept(found.round_rows, sweeps, (low, high), integers, slope, products, damp, fixed)
        return integers
    for _ in range(sweeps):
        if not _sweep((low, high), integers, slope, products, damp, fixed):
            break
    return integers


def _swept(
    round_rows: Callable[..., int],
    sweeps: int,
    ends: tuple[FloatArray, FloatArray],
    integers: FloatArray,
    slope: FloatArray,
    products: FloatArray,
    damp: FloatArray,
    fixed: NDArray[np.bool_],
) -> None:
    """All sweeps by the C kernel, group by group, in place; ends and both others lie row by row."""
    _, rows, columns = integers.shape
    low, high = ends
    own = np.ascontiguousarray(products, np.float64)
    held = np.ascontiguousarray(fixed).view(np.uint8)
    for group, damped in enumerate(damp):
        arrays = (low[group], high[group], integers[group], slope[group], own[group])
        places = (array.ctypes.data for array in arrays)
        round_rows(rows, columns, sweeps, *places, float(damped), held[group].ctypes.data)


def _sweep(
    ends: tuple[FloatArray, FloatArray],
    integers: FloatArray,
    slope: FloatArray,
    products: FloatArray,
    damp: FloatArray,
    fixed: NDArray[np.bool_],
) -> int:
    """Every weight once, in place; counts those that moved. `slope` is (q - w) (H + damp)."""
    low, high = ends
    moved = 0
    for k in range(integers.shape[2]):
        other = low[:, :, k] + high[:, :, k] - integers[:, :, k]
        step = other - integers[:, :, k]
        change = 2 * step * slope[:, :, k] + step * step * (products[:, k, k] + damp)[:, None]
        group, row = np.nonzero((change < 0) & ~fixed[:, :, k])
        if not group.size:
            continue
        by = step[group, row]
        integers[group, row, k] = other[group, row]
        slope[group, row] += by[:, None] * products[group, k]
        slope[group, row, k] += by * damp[group]
        moved += int(group.size)
    return moved


Float32Array = NDArray[np.float32]
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


def patches(value: NDArray[Any], window: Window | None, number: int, most: int) -> Float32Array:
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


def _values(value: NDArray[Any], batch: IntArray, at: Sequence[IntArray]) -> Float32Array:
    """Values of all channels at these places, [P, C] in float32; zeros outside the input."""
    ends = value.shape[2:]
    inside = np.ones(len(batch), bool)
    for place, end in zip(at, ends, strict=True):
        inside &= (place >= 0) & (place < end)
    near = [np.clip(place, 0, end - 1) for place, end in zip(at, ends, strict=True)]
    found = np.asarray(np.moveaxis(value, 1, -1)[(batch, *near)], np.float32)
    found[~inside] = 0
    return found
