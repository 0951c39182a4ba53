"""AMCT's weight algorithms: Ascend grid, ARQ scales, DMQ balancer, KL scales for AdaRound.

All arithmetic is in float32. Source: hicann/amct, measured on AMCT's outputs.

**Grid**: signed, with an offset that is added before rounding and thus is a zero_point. A symmetric
scale divides by 2^(bits-1) if the extreme is negative, so that the lowest code is reached, and by
2^(bits-1) - 1 if it is positive::

    extreme  -1.0   scale 1.0 / 128     codes -128 ......... 0 ......... 127
    extreme  +1.0   scale 1.0 / 127     codes -127 ......... 0 ......... 127

Source: calculate_scale_offset, process_scale, cast_fp16_precision and cast_to_s19.

**ARQ**: weight scales per output channel or per tensor. The extreme of each row decides the scale
and, by its sign, the denominator::

    row extremes   -0.9 .... 0.5          |-0.9| > |0.5|  ->  scale = 0.9 / 128
                   -0.2 .... 0.7          |-0.2| < |0.7|  ->  scale = 0.7 / 127

Source: graph_based custom_op/arq.

**DMQ balancer**: moves range from activations to weights by a factor per input channel::

    activation channel c  / factor_c  -->  AscendQuant
    weight     channel c  * factor_c           factor = act_max^s / weight_max^(1 - s)

Source: graph_based custom_op/dmq_balancer.

**KL scale** of a weight for AdaRound: the clip range of a channel's histogram with the least KL
divergence. The histogram is cut by the same number of bins at both ends, 0 to 19 of 512; the counts
cut off are added to the end bins, and the rest is merged into 255 levels and spread out again::

    -|w|max ................. 0 ................. |w|max      512 bins, p
           [++...............................++]              cut by i bins a side
           [####....####....####....####....####]             255 levels of about 2 bins, q
                                                              least KL(p, q) wins
                                                              scale = (|w|max - i bins) / 128

Source: graph_based ada_round/kl_divergence; compared with it in torch.
"""

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import (
    Float32Array,
    Float64Array,
    Int8Array,
    Int32Array,
    RealArray,
    Value,
    check_scale,
    checked_axis,
)

RealValues = RealArray | np.float32  # of many ranges, or of one
FLT_EPSILON = np.float32(2.0**-23)
_HISTOGRAM_BINS = 512
_MAX_CUTS = 20  # cuts that the search of a KL scale tries, from 0 bins a side
_EMPTY_BIN_COUNT = 0.0001  # count of an empty bin
_MAX_WEIGHT = 1e35  # twice 512 times this is near the float32 maximum


def ascend_range(bits: int) -> tuple[int, int]:
    """Return (qmin, qmax) of a signed Ascend grid: (-128, 127) for 8 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def ascend_denominator(hi: RealValues, lo: RealValues, bits: int) -> Int32Array:
    """Return the code of the symmetric grid's extreme: 128 if |lo| > |hi|, else 127 (8 bits)."""
    _, qmax = ascend_range(bits)
    is_extreme_negative = np.abs(hi) < np.abs(lo)
    return np.asarray(qmax + is_extreme_negative, np.int32)


def replace_tiny_scales(scale: RealArray) -> Float32Array:
    """Return float32 scales, 1 in place of those below FLT_EPSILON, as AMCT does.

    Such a scale is that of a tensor that is practically zero.
    """
    return np.where(scale < FLT_EPSILON, np.float32(1.0), scale).astype(np.float32)


def ascend_scale_offset(
    hi: RealValues, lo: RealValues, *, with_offset: bool, bits: int = 8
) -> tuple[Float32Array, Int32Array]:
    """Return (scale float32, offset int32) of clip ranges [lo, hi] in real units, elementwise.

    Args:
        hi: upper ends, any shape; converted to float32.
        lo: lower ends, same shape.
        with_offset: whether the grid is affine: the range is widened to include 0, and the offset
            is the code of 0. Else it is symmetric with offset 0.
        bits: width of the signed grid.

    Raises:
        CalibrationError: a scale, its inverse or an offset is not finite.
    """
    hi = np.asarray(hi, np.float32)
    lo = np.asarray(lo, np.float32)
    qmin, _ = ascend_range(bits)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if with_offset:
            hi = np.maximum(hi, np.float32(0))
            lo = np.minimum(lo, np.float32(0))
            raw_scale = (hi - lo) / np.float32(2**bits - 1)
            offset = np.float32(qmin) - lo / raw_scale
            # a tensor that is practically zero, whose scale becomes 1
            offset = np.where(raw_scale < FLT_EPSILON, np.float32(qmin), offset)
        else:
            denominator = ascend_denominator(hi, lo, bits).astype(np.float32)
            raw_scale = np.maximum(np.abs(hi), np.abs(lo)) / denominator
            offset = np.zeros_like(raw_scale)
        scale = replace_tiny_scales(raw_scale)
        is_valid = np.isfinite(scale) & np.isfinite(np.float32(1) / scale) & np.isfinite(offset)

    if not is_valid.all():
        invalid_scales = np.ravel(scale)[~np.ravel(is_valid)]
        largest_end = np.maximum(np.abs(hi), np.abs(lo)).max()
        raise CalibrationError(
            "an Ascend scale and its inverse must be finite and not zero,"
            f" got scale {invalid_scales[:3]} for a range up to {largest_end}; leave this layer in"
            " float"
        )
    return scale, np.rint(offset).astype(np.int32)


def ascend_quantize(x: RealArray, scale: Float32Array, *, bits: int) -> Float32Array:
    """Return clip(rne(x / scale)) on the signed grid, as float32.

    Raises:
        CalibrationError: a scale is not finite and positive.
    """
    check_scale(scale)
    qmin, qmax = ascend_range(bits)
    steps = np.asarray(x, np.float32) / scale + np.float32(0)  # -0 becomes 0
    return np.asarray(np.clip(np.rint(steps), qmin, qmax), np.float32)


def ascend_clip_range(scale: np.float32, offset: int, bits: int) -> tuple[float, float]:
    """Return the range (lo, hi) in real units of a signed grid, computed in float32."""
    qmin, qmax = ascend_range(bits)
    lo = -np.float32(offset - qmin) * scale
    hi = np.float32(qmax - offset) * scale
    return float(lo), float(hi)


def ascend_half(scale: np.float32) -> np.float32:
    """Round a float32 scale to float16; beyond its normal range, square the rounded root."""
    value = float(scale)
    if 2.0**-14 <= value <= 65504.0:
        return np.float32(np.float16(value))
    root = np.float32(np.float16(np.sqrt(value)))
    return root * root


def ascend_s19(scales: Float32Array) -> Float32Array:
    """Truncate float32 scales of any shape to 10 mantissa bits, as Nano chips read them."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def arq(weight: RealArray, *, bits: int = 8, channel_wise: bool = True) -> Float32Array:
    """Return the scale of a weight, [C_out] or [1]; its offset is 0, as the hardware requires.

    Args:
        weight: [C_out, ...], float32 or float16 (see `channels_first` for ConvTranspose).
        bits: 4, 6, 7 or 8.
        channel_wise: one scale per output channel, else one per tensor.

    Raises:
        CalibrationError: wrong dtype, NaN or Inf, no elements, or a scale that is not finite.
    """
    row_count = weight.shape[0] if channel_wise else 1
    rows = check_values(weight, "weight").reshape(row_count, -1)
    highs = rows.max(axis=1)
    scale, _ = ascend_scale_offset(highs, rows.min(axis=1), with_offset=False, bits=bits)
    return scale


def arq_integers(weight: RealArray, scale: Float32Array, *, bits: int = 8) -> Int8Array:
    """Quantize a weight [C_out, ...] to int8 of the same shape: clip(rne(w / scale)).

    `bits`: 8 or fewer.

    Raises:
        CalibrationError: a scale is not finite and positive.
    """
    return ascend_quantize(weight, by_row(scale, weight.ndim), bits=bits).astype(np.int8)


def arq_fake_quantize(weight: RealArray, scale: Float32Array, *, bits: int = 8) -> RealArray:
    """Quantize and dequantize a weight [C_out, ...], in the weight's dtype."""
    step = by_row(scale, weight.ndim)
    integers = ascend_quantize(weight, step, bits=bits)
    return (integers * step).astype(weight.dtype)


def by_row(scale: Float32Array, rank: int) -> Float32Array:
    """Return scales [C_out] or [1] in a shape that broadcasts over a weight [C_out, ...]."""
    return scale.reshape(-1, *[1] * (rank - 1))


def channels_first(weight: NDArray[Value], group: int) -> NDArray[Value]:
    """Reorder a ConvTranspose weight [C_in, C_out / group, ...] to [C_out, C_in / group, ...].

    A second call reorders it back.
    """
    c_in, c_out, *kernel = weight.shape
    split = weight.reshape(group, c_in // group, c_out, *kernel)
    return np.swapaxes(split, 1, 2).reshape(group * c_out, c_in // group, *kernel)


def check_values(x: NDArray[np.generic], role: str) -> Float32Array:
    """Return values as float32, after the checks that AMCT makes.

    Args:
        x: values of any shape.
        role: what they are, for errors, such as "weight".

    Raises:
        CalibrationError: not float32 or float16, empty, or NaN or Inf.
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float16):
        raise CalibrationError(
            f"AMCT quantizes a float32 or float16 {role}, got {x.dtype}; cast it first"
        )
    if x.size == 0:
        raise CalibrationError(f"the {role} to be quantized must not be empty, got {x.shape}")
    if not (np.isfinite(x.min()) and np.isfinite(x.max())):  # NaN shows in both
        invalid_count = int((~np.isfinite(x)).sum())
        raise CalibrationError(
            f"the {role} to be quantized must be finite, got {invalid_count} NaN or Inf values of"
            f" {x.size}"
        )
    return x.astype(np.float32, copy=False)


def channel_max(x: RealArray, axis: int) -> Float32Array:
    """Return the largest |x| of each channel along `axis`, float32 [C].

    Raises:
        CalibrationError: wrong dtype, empty, NaN or Inf, or no such axis.
    """
    data = np.abs(check_values(x, "tensor"))
    channel_axis = checked_axis(axis, data.ndim)
    reduced_axes = tuple(a for a in range(data.ndim) if a != channel_axis)
    return np.asarray(data.max(axis=reduced_axes), np.float32)


def weight_channel_max(weight: RealArray, group: int = 1) -> Float32Array:
    """Return the largest |w| per input channel [C_in] of a weight [C_out, C_in / group, ...]."""
    c_out, c_in = check_values(weight, "weight").shape[:2]
    split = np.abs(weight).reshape(group, c_out // group, c_in, -1)
    return np.asarray(split.max(axis=(1, 3)).reshape(-1), np.float32)


def balance_factors(
    act_max: Float32Array, weight_max: Float32Array, *, strength: float = 0.5
) -> Float32Array:
    """Return the factors of AMCT's DMQ balancer for the input channels, float32 [C].

    Activations are divided by their channel's factor and weights multiplied by it, so that the
    weights take over some of the activations' range. A channel whose activations and weights are
    all zero has factor 1. If only one of the two is zero, the factor raises the other one to the
    maximum of its tensor after balancing.

    Args:
        act_max: largest |activation| of each channel, from `channel_max`.
        weight_max: largest |weight| of each channel, from `weight_channel_max`.
        strength: share of the range that moves to the weights, 0.2 to 0.8: the factor is
            act_max^strength / weight_max^(1 - strength).

    Raises:
        CalibrationError: a factor outside (FLT_EPSILON, 1 / FLT_EPSILON).
    """
    has_no_activation = act_max < FLT_EPSILON
    has_no_weight = weight_max < FLT_EPSILON
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # replaced or refused below
        factor = act_max ** np.float32(strength) / weight_max ** np.float32(1 - strength)
        factor = np.where(has_no_activation | has_no_weight, np.float32(1), factor)
        # factors that raise a channel to the maximum of the balanced weights, or activations
        raising_weight = (weight_max * factor).max() / weight_max
        raising_activation = act_max / (act_max / factor).max()
    factor = np.where(has_no_activation & ~has_no_weight, raising_weight, factor)
    factor = np.where(has_no_weight & ~has_no_activation, raising_activation, factor)
    if not ((factor > FLT_EPSILON) & (factor < np.float32(1) / FLT_EPSILON)).all():
        raise CalibrationError(
            "DMQ factors must be within float32's epsilon and its inverse, got"
            f" {factor.min()} to {factor.max()}; leave dmq_balancer off for this layer"
        )
    return factor


_MIN_CODE, _MAX_CODE = ascend_range(8)
_LEVELS = _MAX_CODE - _MIN_CODE  # number of steps between the codes


def kl_scale(weight: RealArray, *, channel_wise: bool = True) -> Float32Array:
    """Return the scales that AMCT's AdaRound rounds a weight with: [C_out], or [1] for the tensor.

    Of 20 scales, each is that whose quantized histogram has the least KL divergence from the
    histogram of the weight.

    Args:
        weight: [C_out, ...], float32 or float16.
        channel_wise: whether each output channel has a scale.

    Raises:
        CalibrationError: wrong dtype, NaN or Inf, no elements, or values near float32's maximum.
    """
    row_count = weight.shape[0] if channel_wise else 1
    rows = check_values(weight, "weight").reshape(row_count, -1)
    amax = np.abs(rows).max(axis=1)
    if amax.max() > _MAX_WEIGHT:
        raise CalibrationError(
            f"weights that AdaRound rounds must be at most {_MAX_WEIGHT:.1g}, got {amax.max():.3g}"
        )
    scales = np.ones(len(rows), np.float32)  # a channel of zeros has scale 1
    is_nonzero = amax > 0
    nonzero_amax = amax[is_nonzero]
    histograms = _histograms(rows[is_nonzero], nonzero_amax)
    scales[is_nonzero] = _best_scales(histograms, nonzero_amax)
    return replace_tiny_scales(scales)  # 1 for a channel that is practically zero


def _histograms(rows: Float32Array, amax: Float32Array) -> Float64Array:
    """Return the counts over [-amax, amax] of every row, [C, 512], as in torch.histc."""
    end = amax[:, None]
    row_count = len(rows)
    positions = (rows + end) * np.float32(_HISTOGRAM_BINS) / (end + end)
    bins = np.minimum(positions.astype(np.int64), _HISTOGRAM_BINS - 1)
    bins += _HISTOGRAM_BINS * np.arange(row_count)[:, None]  # all rows are counted at once
    counts = np.bincount(bins.reshape(-1), minlength=_HISTOGRAM_BINS * row_count)
    return counts.reshape(row_count, _HISTOGRAM_BINS).astype(np.float64)


def _best_scales(counts: Float64Array, amax: Float32Array) -> Float32Array:
    """Return the scales of least divergence, with the smallest cut on ties."""
    divergences = []
    for cut in range(_MAX_CUTS):
        p, q = _cut_and_level(counts, cut)
        divergences.append(_divergence(p, q))
    best_cuts = np.argmin(divergences, axis=0).astype(np.float32)
    width = (amax + amax) / np.float32(_HISTOGRAM_BINS)
    return np.asarray((amax - best_cuts * width) / np.float32(-_MIN_CODE), np.float32)


def _cut_and_level(counts: Float64Array, cut: int) -> tuple[Float64Array, Float64Array]:
    """Return the histograms p that a cut leaves, and q, the same in 255 levels: [C, bins] each.

    The cut of the least KL divergence of p and q decides the scale. A level joins about two bins.
    In q, each of them has the mean of those that are not empty; empty bins stay empty, as in
    TensorRT's entropy calibration.

    Args:
        counts: histograms of the channels, float64 [C, 512].
        cut: number of bins that are cut off at either end; their counts go to the end bins.
    """
    p = counts[:, cut : _HISTOGRAM_BINS - cut].copy()
    p[:, 0] += counts[:, :cut].sum(axis=1)
    p[:, -1] += counts[:, _HISTOGRAM_BINS - cut :].sum(axis=1)

    bins_per_level = p.shape[1] / _LEVELS
    level_starts = np.ceil(np.arange(_LEVELS) * bins_per_level).astype(np.int64)  # first bins
    level_by_bin = np.repeat(np.arange(_LEVELS), np.diff(level_starts, append=p.shape[1]))
    level_sums = np.add.reduceat(p, level_starts, axis=1)
    occupied_counts = np.add.reduceat((p != 0).astype(np.float64), level_starts, axis=1)
    level_means = level_sums / np.maximum(occupied_counts, 1)
    q = np.where(p != 0, level_means[:, level_by_bin], 0.0)
    return p, q


def _divergence(p: Float64Array, q: Float64Array) -> Float64Array:
    """Return KL(p, q) of every row, with a small count in empty bins."""
    p = _fill_empty_bins(p)
    q = _fill_empty_bins(q)
    p = p / p.sum(axis=1, keepdims=True)
    q = q / q.sum(axis=1, keepdims=True)
    return np.asarray((p * np.log(p / q)).sum(axis=1))


def _fill_empty_bins(counts: Float64Array) -> Float64Array:
    """Give empty bins a small count, and spread the same amount over the others, as AMCT does."""
    is_empty = counts == 0
    empty_bins = is_empty.sum(axis=1, keepdims=True)
    correction = _EMPTY_BIN_COUNT * empty_bins / (counts.shape[1] - empty_bins)
    return np.where(is_empty, _EMPTY_BIN_COUNT, counts + correction)
