"""Weight rounding by output error: round each weight up or down to minimize the layer's error.

Rounding to nearest minimizes the error of each weight. The error of a layer's output is their sum,
weighted by the inputs, so that errors can cancel::

    |(q - w) X|^2  =  (q - w) H (q - w)^T         H = X X^T of the inputs, [K, K]

This is AdaRound's problem, a quadratic one over up or down for each weight. It is solved here by
coordinate descent from rounding to nearest: each weight in turn takes the side with the lower
error, until none changes. No step raises the error, so on the same inputs the result is never
worse than rounding to nearest.

Sources: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (ICML 2020),
equation 13; Zhang et al., "COMQ: A Backpropagation-Free Algorithm for Post-Training Quantization"
(2024), for coordinate descent instead of gradients.

The inputs are patches at sampled positions of the output (`extract_patches`)::

    Conv input [N, C, H, W]  -->  P positions of the output  -->  [groups, C of a group * taps, P]
    matrix product  [..., K] -->  P rows                     -->  [1, K, P]

For a transposed convolution too: each tap of an output position reads one input value, or none if
the stride skips it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import INT8, Float32Array, Grid, round_to_grid
from calibrators.kernel import kernel

FloatArray = NDArray[np.float64]

_TILE = 64  # products of 64 x 64 x 64: for larger ones BLAS uses threads, which changes the sums
# Damping, as a share of H's mean diagonal, against overfitting to few inputs. On other inputs of
# YOLOv8n and EfficientNet-Lite0 0.2 leaves 0.28 and 0.50 of the squared error, 0.01 0.30 and 0.55.
_DAMP = 0.2
IntArray = NDArray[np.int64]


def gram(inputs: NDArray[np.floating]) -> FloatArray:
    """Return X X^T / P of each group, [G, K, K], from G groups of P patches of K values [G, K, P].

    The result does not depend on the number of threads.
    """
    x = np.asarray(inputs, np.float32)
    total = block_products(x, x.swapaxes(1, 2).copy(), mirrored=True)
    total /= max(inputs.shape[2], 1)
    return total


@np.errstate(over="ignore", invalid="ignore")  # callers check for values that are not finite
def block_products(
    left: NDArray[Any], right: NDArray[Any], *, mirrored: bool = False
) -> FloatArray:
    """Multiply [G, M, K] by [G, K, N] to float64 [G, M, N], independent of the thread count.

    Blocks of 64 x 64 x 64 are multiplied in the arrays' dtype and summed in float64. If the product
    is symmetric (`mirrored`), blocks below the diagonal are copied from those above.
    """
    groups, rows, inner = left.shape
    columns = right.shape[2]
    total = np.zeros((groups, rows, columns))
    step = max(_TILE, _TILE**3 // (min(rows, _TILE) * min(columns, _TILE)))
    for a in range(0, rows, _TILE):
        strip = slice(a if mirrored else 0, None)
        for k in range(0, inner, step):  # so that the strip of sums stays in cache
            depth = slice(k, k + step)
            block = left[:, a : a + _TILE, depth]
            _add_blocks(total[:, a : a + _TILE, strip], block, right[:, depth, strip])
    for a in range(0, rows, _TILE) if mirrored else ():
        above = total[:, a : a + _TILE, a + _TILE :]
        total[:, a + _TILE :, a : a + _TILE] = above.swapaxes(1, 2)
    return total


def _add_blocks(strip: FloatArray, block: NDArray[Any], right: NDArray[Any]) -> None:
    """Add the products of a block and all blocks of `right`, all full blocks in one call."""
    groups, inner, columns = right.shape
    count = columns // _TILE
    full = count * _TILE
    if count:
        tiles = right[:, :, :full].reshape(groups, inner, count, _TILE).swapaxes(1, 2)
        sums = strip[:, :, :full].reshape(*strip.shape[:2], count, _TILE)  # a view
        sums += (block[:, None] @ tiles).swapaxes(1, 2)
    if full < columns:
        strip[:, :, full:] += block @ right[:, :, full:]


def round_by_output(
    steps: FloatArray,
    products: FloatArray,
    *,
    fixed: NDArray[np.bool_],
    sweeps: int = 4,
    grid: Grid = INT8,
) -> FloatArray:
    """Round each weight up or down for the least output error.

    `steps`: weight / scale, [G, C, K]: groups, output channels, values of an input patch.
    `products`: `gram` of the inputs, [G, K, K]. `fixed`: mask of weights to round to nearest, such
    as the extremes that set the scale.

    Returns:
        [G, C, K], each entry the grid's value below or above its weight.

    Raises:
        CalibrationError: shapes do not match, or values are not finite.
    """
    if steps.ndim != 3 or products.shape != (steps.shape[0], steps.shape[2], steps.shape[2]):
        raise CalibrationError(
            "weights [G, C, K] need products [G, K, K], got"
            f" {list(steps.shape)} and {list(products.shape)}"
        )
    if not (np.isfinite(steps).all() and np.isfinite(products).all()):
        raise CalibrationError("weights and products must be finite, got NaN or Inf")
    damp = _DAMP * np.einsum("gkk->gk", products).mean(axis=1)
    integers, low, high = (
        np.ascontiguousarray(round_to_grid(steps, grid, to), np.float64)
        for to in (np.rint, np.floor, np.ceil)
    )
    error = integers - steps
    slope = np.ascontiguousarray(block_products(error, products) + damp[:, None, None] * error)
    _sweep(sweeps, (low, high), integers, slope, products, damp, fixed)
    return integers


def _sweep(
    sweeps: int,
    ends: tuple[FloatArray, FloatArray],
    integers: FloatArray,
    slope: FloatArray,
    products: FloatArray,
    damp: FloatArray,
    fixed: NDArray[np.bool_],
) -> None:
    """Visit every weight, in place, until none changes. `slope` is (q - w) (H + damp).

    All arrays but `products` and `fixed` are C-contiguous. The C kernel takes a group at a time.
    """
    low, high = ends
    _, rows, columns = integers.shape
    in_c = kernel()
    if in_c is not None:
        own = np.ascontiguousarray(products, np.float64)
        held = np.ascontiguousarray(fixed).view(np.uint8)
        for g, damped in enumerate(damp):
            arrays = (low[g], high[g], integers[g], slope[g], own[g])
            addresses = (array.ctypes.data for array in arrays)
            mask = held[g].ctypes.data
            in_c.round_rows(rows, columns, sweeps, *addresses, float(damped), mask)
        return
    for _ in range(sweeps):
        moved = False
        for k in range(columns):
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
            moved = True
        if not moved:
            break


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWindow:
    """Window of a convolution; each tuple has one value per axis."""

    # kernel, strides, dilations: as in ONNX
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    # at the start of every axis, then at the end of every axis; unused if `auto` is set
    pads: tuple[int, ...]
    auto: str = "NOTSET"
    group: int = 1
    transposed: bool = False  # whether it is a ConvTranspose, which needs explicit pads
    more: tuple[int, ...] = ()  # output_padding of a ConvTranspose

    @property
    def spans(self) -> list[int]:
        """Extent of the window along each axis, dilation included."""
        return [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]

    def around(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (start, end) padding of each axis for an input of these sizes."""
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
        """Return the output sizes for an input of these sizes."""
        pads, out = self.around(sizes), []
        for axis, (size, span, stride) in enumerate(
            zip(sizes, self.spans, self.strides, strict=True)
        ):
            if self.transposed:
                more = self.more[axis] if self.more else 0
                out.append(stride * (size - 1) + more + span - sum(pads[axis]))
            else:
                out.append(max((size + sum(pads[axis]) - span) // stride + 1, 0))
        return out


def sample_positions(number: int, count: int, most: int) -> IntArray:
    """Return at most `most` of `count` positions, sampled uniformly with `number` as the seed."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    drawn = np.random.default_rng(number).choice(count, most, replace=False)
    return np.sort(drawn).astype(np.int64)


def extract_patches(
    value: NDArray[Any], window: ConvWindow | None, number: int, most: int
) -> Float32Array:
    """Return at most `most` patches of one input, float32 [groups, K, P].

    `value`: the input, [N, C, ...] of a convolution, [..., K] of a matrix product. `window`: window
    of a convolution; None for a matrix product.
    """
    if window is None:
        rows = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
        return np.ascontiguousarray(rows[sample_positions(number, len(rows), most)].T)[None]
    shape = (len(value), *window.outputs(value.shape[2:]))
    chosen = sample_positions(number, math.prod(shape), most)
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
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    less = total // 2
    return (less, total - less) if upper else (total - less, less)


def _reached(window: ConvWindow, axis: int, spot: IntArray, before: int, tap: int) -> IntArray:
    """Return where a tap reads on one axis for these output positions; -1 if it reads nothing."""
    stride, moved = window.strides[axis], tap * window.dilations[axis]
    if not window.transposed:
        return spot * stride - before + moved
    at = spot + before - moved
    return np.where(at % stride == 0, at // stride, -1)


def _values(value: NDArray[Any], batch: IntArray, at: Sequence[IntArray]) -> Float32Array:
    """Return the values of all channels at these positions, float32 [P, C]; 0 outside the input."""
    ends = value.shape[2:]
    inside = np.ones(len(batch), bool)
    for place, end in zip(at, ends, strict=True):
        inside &= (place >= 0) & (place < end)
    near = [np.clip(place, 0, end - 1) for place, end in zip(at, ends, strict=True)]
    values = np.asarray(np.moveaxis(value, 1, -1)[(batch, *near)], np.float32)
    values[~inside] = 0
    return values
