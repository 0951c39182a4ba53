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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import (
    INT8,
    Float32Array,
    Float64Array,
    Grid,
    Int64Array,
    RealArray,
    round_to_grid,
)
from calibrators.kernel import CountingKernel, kernel

_SWEEPS = 2  # visits of each weight; a third one would change one weight in a hundred
_BLOCK_SIZE = 64  # BLAS uses threads for larger products than 64^3, which changes the sums
# Damping, as a share of H's mean diagonal, against overfitting to few inputs. On other inputs of
# YOLOv8n and EfficientNet-Lite0 0.2 leaves 0.28 and 0.50 of the squared error, 0.01 0.30 and 0.55.
_DAMPING = 0.2


def gram(inputs: RealArray) -> Float64Array:
    """Return X X^T / P of each group, [G, K, K], from G groups of P patches of K values [G, K, P].

    The result does not depend on the number of threads.
    """
    x = np.asarray(inputs, np.float32)
    total = block_products(x, x.swapaxes(1, 2).copy(), symmetric=True)
    total /= max(inputs.shape[2], 1)
    return total


@np.errstate(over="ignore", invalid="ignore")  # callers check for values that are not finite
def block_products(
    left: NDArray[Any], right: NDArray[Any], *, symmetric: bool = False
) -> Float64Array:
    """Multiply matrices so that the result does not depend on the number of threads.

    Blocks of 64 x 64 x 64 are multiplied in the arrays' dtype and summed in float64.

    Args:
        left: G matrices, [G, M, K].
        right: G matrices, [G, K, N].
        symmetric: whether the products will be symmetric, as those of X and X^T are. Then only the
            blocks on and above the diagonal are computed, and copied to those below.

    Returns:
        The products, float64 [G, M, N].
    """
    groups, rows, inner = left.shape
    columns = right.shape[2]
    total = np.zeros((groups, rows, columns))
    # blocks of few rows or columns are longer along K, so that each has 64^3 products all the same
    block_area = min(rows, _BLOCK_SIZE) * min(columns, _BLOCK_SIZE)
    depth_step = max(_BLOCK_SIZE, _BLOCK_SIZE**3 // block_area)
    for start in range(0, rows, _BLOCK_SIZE):
        block_rows = slice(start, start + _BLOCK_SIZE)
        strip_columns = slice(start if symmetric else 0, None)  # from the diagonal on, or all
        # a view of 64 rows of the result, which stay in the CPU's cache in the inner loop
        strip = total[:, block_rows, strip_columns]
        for depth_start in range(0, inner, depth_step):
            depth = slice(depth_start, depth_start + depth_step)
            _add_blocks(strip, left[:, block_rows, depth], right[:, depth, strip_columns])
    if symmetric:
        for start in range(0, rows, _BLOCK_SIZE):
            end = start + _BLOCK_SIZE
            above = total[:, start:end, end:]
            total[:, end:, start:end] = above.swapaxes(1, 2)
    return total


def _add_blocks(strip: Float64Array, left_block: NDArray[Any], right: NDArray[Any]) -> None:
    """Add the product of `left_block` and `right` to `strip`, in blocks of 64 columns.

    All B blocks of 64 columns are multiplied in one call, the columns that remain in another.

    Args:
        strip: [G, M, N]; changed in place.
        left_block: [G, M, K], a few rows of the left matrices.
        right: [G, K, N].
    """
    groups, inner, columns = right.shape
    block_count = columns // _BLOCK_SIZE
    full_columns = block_count * _BLOCK_SIZE
    if block_count:
        right_blocks = right[:, :, :full_columns].reshape(groups, inner, block_count, _BLOCK_SIZE)
        sums = strip[:, :, :full_columns]
        sums = sums.reshape(*strip.shape[:2], block_count, _BLOCK_SIZE)  # a view, [G, M, B, 64]
        products = left_block[:, None] @ right_blocks.swapaxes(1, 2)  # [G, B, M, 64]
        sums += products.swapaxes(1, 2)
    if full_columns < columns:
        strip[:, :, full_columns:] += left_block @ right[:, :, full_columns:]


def round_by_output(
    steps: Float64Array,
    products: Float64Array,
    *,
    fixed: NDArray[np.bool_],
    grid: Grid = INT8,
) -> Float64Array:
    """Round the weights of a layer, each up or down, for the least error of the layer's output.

    Starting from rounding to nearest, each weight in turn takes the side with the lower error; all
    are visited twice.

    Args:
        steps: weight / scale, [G, C, K]: groups, output channels of each, values of an input patch.
        products: mean products of every two values of an input patch, [G, K, K] (`gram`).
        fixed: mask of weights to round to nearest, such as the extremes that set the scale,
            [G, C, K].
        grid: grid of the rounded weights.

    Returns:
        [G, C, K], each entry the grid's value below or above its weight.

    Raises:
        CalibrationError: values are not finite.
    """
    if not (np.isfinite(steps).all() and np.isfinite(products).all()):
        raise CalibrationError("weights and products must be finite, got NaN or Inf")
    # added to the diagonal of `products`, so that few inputs do not decide everything
    damping = _DAMPING * np.einsum("gkk->gk", products).mean(axis=1)
    # float64 whatever the steps are: the kernel reads the memory of these arrays as float64
    integers = np.ascontiguousarray(round_to_grid(steps, grid), np.float64)
    low = np.ascontiguousarray(round_to_grid(steps, grid, np.floor), np.float64)
    high = np.ascontiguousarray(round_to_grid(steps, grid, np.ceil), np.float64)
    error = integers - steps
    # half the derivative of the output error by each integer; `_sweep` keeps it up to date
    slope = np.ascontiguousarray(block_products(error, products) + damping[:, None, None] * error)
    _sweep(low, high, integers, slope, products, damping, fixed)  # changes integers
    return integers


def _sweep(
    low: Float64Array,
    high: Float64Array,
    integers: Float64Array,
    slope: Float64Array,
    products: Float64Array,
    damping: Float64Array,
    fixed: NDArray[np.bool_],
) -> None:
    """Move each weight to its other integer, above or below, if that lowers the error.

    The K weights of a channel are visited one after the other, up to `_SWEEPS` times or until none
    changes; channels are independent. With w and q, the weights of a channel and their integers,
    the error is (q - w) (H + damping I) (q - w)^T, where H = X X^T of the inputs X. If integer k
    changes by s, the error changes by ``2 s slope + s^2 (H_kk + damping)``.

    Args:
        low: the integer below each weight, [G, C, K].
        high: the integer above each weight, [G, C, K].
        integers: q, the rounded weights, [G, C, K]; changed in place.
        slope: half the derivative of the error by q, (q - w) (H + damping I); kept up to date.
        products: H of each group, [G, K, K].
        damping: of each group, [G].
        fixed: weights that do not change, [G, C, K].

    All arrays but `products` and `fixed` are C-contiguous.
    """
    c_kernel = kernel()
    if c_kernel is not None:
        products = np.ascontiguousarray(products, np.float64)
        fixed = np.ascontiguousarray(fixed)
        _sweep_in_c(c_kernel, (low, high, integers, slope, products, fixed), damping)
        return

    for _ in range(_SWEEPS):
        has_changed = False
        for k in range(integers.shape[2]):  # of all groups and channels at once
            other_integer = low[:, :, k] + high[:, :, k] - integers[:, :, k]
            step = other_integer - integers[:, :, k]
            curvature = (products[:, k, k] + damping)[:, None]
            error_change = 2 * step * slope[:, :, k] + step * step * curvature
            groups, channels = np.nonzero((error_change < 0) & ~fixed[:, :, k])  # weights to move
            if not groups.size:
                continue
            weight_step = step[groups, channels]
            integers[groups, channels, k] = other_integer[groups, channels]
            slope[groups, channels] += weight_step[:, None] * products[groups, k]
            slope[groups, channels, k] += weight_step * damping[groups]
            has_changed = True
        if not has_changed:
            break


def _sweep_in_c(
    c_kernel: CountingKernel, arrays: Sequence[NDArray[Any]], damping: Float64Array
) -> None:
    """Move each weight to its other integer, if that lowers the output error, by the C kernel.

    The C function calib8_round takes one group of the layer at a time, and changes the arrays.

    Args:
        c_kernel: the C kernel.
        arrays: the arguments of `_sweep` of these names, all C-contiguous, whose first axis is the
            group: low, high, integers, slope, products, fixed.
        damping: damping of each group, [G].
    """
    _, rows, columns = arrays[0].shape
    # the addresses of a group are computed, since views would be slow: a depthwise layer has a
    # group for each channel
    starts = [array.ctypes.data for array in arrays]
    group_bytes = [array.strides[0] for array in arrays]
    for g, group_damping in enumerate(damping.tolist()):
        *addresses, fixed_address = [
            start + g * size for start, size in zip(starts, group_bytes, strict=True)
        ]
        c_kernel.round_rows(rows, columns, _SWEEPS, *addresses, group_damping, fixed_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWindow:
    """Window of a convolution; each tuple has one value per axis.

    Attributes:
        kernel, strides, dilations, group: as in ONNX.
        pads: at the start of every axis, then at the end of every axis; unused if `auto_pad` is
            set.
        auto_pad: as in ONNX.
        transposed: whether it is a ConvTranspose, which needs explicit pads.
        output_padding: of a ConvTranspose; empty for none.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    auto_pad: str = "NOTSET"
    group: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def spans(self) -> list[int]:
        """Extent of the window along each axis, dilation included."""
        return [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]

    def paddings(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (start, end) padding of each axis for an input of these sizes."""
        rank = len(self.kernel)
        if self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            return [
                _same_padding(size, span, stride, upper=self.auto_pad == "SAME_UPPER")
                for size, span, stride in zip(sizes, self.spans, self.strides, strict=True)
            ]
        if self.auto_pad == "VALID":
            return [(0, 0)] * rank
        return list(zip(self.pads[:rank], self.pads[rank:], strict=True))

    def output_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the output sizes for an input of these sizes."""
        output_padding = self.output_padding or (0,) * len(sizes)
        paddings = self.paddings(sizes)
        spans = self.spans  # extents of the window, dilation included
        output_sizes = []
        for axis, size in enumerate(sizes):
            stride = self.strides[axis]
            padding = sum(paddings[axis])
            if self.transposed:
                output_size = stride * (size - 1) + output_padding[axis] + spans[axis] - padding
            else:
                output_size = max((size + padding - spans[axis]) // stride + 1, 0)
            output_sizes.append(output_size)
        return output_sizes


def sample_positions(seed: int, count: int, max_count: int) -> Int64Array:
    """Return at most `max_count` of `count` positions, sampled uniformly."""
    if count <= max_count:
        return np.arange(count, dtype=np.int64)
    positions = np.random.default_rng(seed).choice(count, max_count, replace=False)
    return np.sort(positions).astype(np.int64)


def extract_patches(
    value: NDArray[Any], window: ConvWindow | None, seed: int, max_count: int
) -> Float32Array:
    """Return P patches of a layer's input at sampled output positions, float32 [groups, K, P].

    A patch holds the K input values from which a group computes its outputs at one position.

    Args:
        value: the input, [N, C, ...] of a convolution, [..., K] of a matrix product.
        window: window of a convolution; None for a matrix product, whose patches are rows.
        seed: seed of the sampled positions.
        max_count: largest number of patches.
    """
    if window is None:
        rows = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
        row_numbers = sample_positions(seed, len(rows), max_count)
        return np.ascontiguousarray(rows[row_numbers].T)[None]

    sizes = value.shape[2:]
    paddings = window.paddings(sizes)
    shape = (len(value), *window.output_sizes(sizes))
    positions = sample_positions(seed, math.prod(shape), max_count)
    batch, *output_positions = np.unravel_index(positions, shape)
    values_by_tap = []
    for tap in np.ndindex(window.kernel):  # each position in the window, such as (0, 2)
        input_positions = []  # on each axis, where the tap reads for every output position
        for axis, axis_positions in enumerate(output_positions):
            tap_offset = tap[axis] * window.dilations[axis] - paddings[axis][0]
            input_positions.append(_tap_positions(window, axis, axis_positions, tap_offset))
        values_by_tap.append(_read_values(value, batch, input_positions))
    patches = np.stack(values_by_tap, axis=2)  # [P, C, taps]
    patches = patches.reshape(len(positions), window.group, -1)  # [P, groups, K]
    return np.ascontiguousarray(patches.transpose(1, 2, 0))


def _same_padding(size: int, span: int, stride: int, *, upper: bool) -> tuple[int, int]:
    """Return ONNX's SAME padding (start, end); `upper`: the end gets the odd value."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    small = total // 2
    large = total - small
    return (small, large) if upper else (large, small)


def _tap_positions(window: ConvWindow, axis: int, positions: Int64Array, start: int) -> Int64Array:
    """Return where a tap reads on one axis for these output positions; -1 if it reads nothing.

    `start`: position of the tap in the window, less the padding.
    """
    stride = window.strides[axis]
    if not window.transposed:
        return positions * stride + start
    strided = positions - start
    return np.where(strided % stride == 0, strided // stride, -1)


def _read_values(
    value: NDArray[Any], batch: Int64Array, positions: Sequence[Int64Array]
) -> Float32Array:
    """Return the values of all channels at these positions, float32 [P, C]; 0 outside the input."""
    is_inside = np.ones(len(batch), bool)
    clipped_positions = []
    for axis_positions, size in zip(positions, value.shape[2:], strict=True):
        is_inside &= (axis_positions >= 0) & (axis_positions < size)
        clipped_positions.append(np.clip(axis_positions, 0, size - 1))
    values = np.asarray(np.moveaxis(value, 1, -1)[(batch, *clipped_positions)], np.float32)
    values[~is_inside] = 0
    return values
