"""AMCT's weight scale for AdaRound: the clip of a channel's histogram of least KL divergence.

The histogram is cut by the same number of bins at both ends, 0 to 19 of 512; what is cut off joins
the end bins, and the rest is merged into 255 levels and spread out again::

    -|w|max ................. 0 ................. |w|max      512 bins, p
           [++...............................++]              cut by i bins a side
           [####....####....####....####....####]             255 levels of about 2 bins, q
                                                              least KL(p, q) wins
                                                              scale = (|w|max - i bins) / 128

Source: hicann/amct, graph_based ada_round/kl_divergence; compared with it in torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import checked
from calibrators.amct.grid import ascend_guard, ascend_range
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array

_BINS, _CUTS = 512, 20
_LOW, _HIGH = ascend_range(8)
_LEVELS = _HIGH - _LOW  # as many as steps lie between the codes
_EMPTY = 0.0001  # what an empty bin counts as
_MOST = 1e35  # times two and 512, the end of float32

FloatArray = NDArray[np.float64]


def kl_scale(weight: NDArray[np.floating], *, channel_wise: bool = True) -> Float32Array:
    """Weight [C_out, ...], float32 or float16 -> scale, [C_out] or [1].

    Raises:
        CalibrationError: wrong dtype, NaN or Inf, no elements, or values near float32's end.
    """
    rows = checked(weight, "weight").reshape(weight.shape[0] if channel_wise else 1, -1)
    most = np.abs(rows).max(axis=1)
    if most.max() > _MOST:
        raise CalibrationError(
            f"weights that AdaRound rounds must be at most {_MOST:.1g}, got {most.max():.3g}"
        )
    scales = np.ones(len(rows), np.float32)  # of a channel of zeros
    held = most > 0
    if held.any():
        scales[held] = _scales(_histograms(rows[held], most[held]), most[held])
    return ascend_guard(scales)


def _histograms(rows: Float32Array, most: Float32Array) -> FloatArray:
    """Counts over [-most, most] of every row, [C, 512], as torch.histc makes them."""
    end = most[:, None]
    places = ((rows + end) * np.float32(_BINS) / (end + end)).astype(np.int64)
    places = np.minimum(places, _BINS - 1) + _BINS * np.arange(len(rows))[:, None]
    counts = np.bincount(places.reshape(-1), minlength=_BINS * len(rows))
    return counts.reshape(len(rows), _BINS).astype(np.float64)


def _scales(counts: FloatArray, most: Float32Array) -> Float32Array:
    """The scale of least divergence, the least cut first among equals."""
    width = (most + most) / np.float32(_BINS)
    best = np.full(len(counts), np.inf)
    found = np.ones(len(counts), np.float32)
    for cut in range(_CUTS):
        divergence = _divergence(*_levelled(counts, cut))
        better = divergence < best
        best[better] = divergence[better]
        scale = (most - np.float32(cut) * width) / np.float32(-_LOW)
        found[better] = scale[better]
    return found


def _levelled(counts: FloatArray, cut: int) -> tuple[FloatArray, FloatArray]:
    """(p, q) of a cut: the counts that are left, and what 255 levels make of them."""
    p = counts[:, cut : _BINS - cut].copy()
    p[:, 0] += counts[:, :cut].sum(axis=1)
    p[:, -1] += counts[:, _BINS - cut :].sum(axis=1)
    wide = p.shape[1] / _LEVELS
    starts = np.ceil(np.arange(_LEVELS) * wide).astype(np.int64)
    sums = np.add.reduceat(p, starts, axis=1)
    filled = np.add.reduceat((p != 0).astype(np.float64), starts, axis=1)
    level = np.repeat(np.arange(_LEVELS), np.diff(starts, append=p.shape[1]))
    means = sums / np.maximum(filled, 1)
    return p, np.where(p != 0, means[:, level], 0.0)


def _divergence(p: FloatArray, q: FloatArray) -> FloatArray:
    """KL(p, q) of every row, empty bins counted as a little."""
    p, q = _filled(p), _filled(q)
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    return np.asarray((p * np.log(p / q)).sum(axis=1))


def _filled(counts: FloatArray) -> FloatArray:
    empty = counts == 0
    none = empty.sum(axis=1, keepdims=True)
    more = _EMPTY * none / (counts.shape[1] - none)
    return np.where(empty, _EMPTY, counts + more)
