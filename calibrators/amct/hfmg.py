"""HFMG: AMCT's histogram search for activations, which cuts bins at the ends for the least L2 loss.

::

    counts   .  :  |  #  #  #  |  :  .  .        every candidate is a run of bins [left, right];
             ^left ->             <- right^      each step cuts the side that gives up more bins
             0                          n-1      for the next 1/100000 of the data

    loss of [left, right]: integral of (x - centre of its code)^2 over the histogram's density;
    bins outside the run count with the code at the edge.

The statistic is one int32 histogram per tensor over all batches. Its range is that of the first
batch, then the union of all ranges with old bins redistributed, so that the result depends on the
batches, as in AMCT.

Source: hicann/amct, graph_based custom_op/hfmg; measured on AMCT's own outputs.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import FLT_EPSILON, ascend_clip_range, ascend_scale_offset, check_values
from calibrators.amct.ifmr import AscendScale
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.statistics import Arrays

NBINS = (1024, 2048, 4096, 8192)
_MARGIN = 1e-3  # bound of the float32 rounding error of AMCT's loss

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HfmgParams:
    """Parameters of the search, with AMCT's defaults."""

    bits: int = 8  # 4, 8 or 16
    with_offset: bool = True  # whether the grid is affine, else symmetric


class HfmgHistogram:
    """AMCT's histogram of one tensor over its calibration batches.

    `together`: samples per batch; those of an incomplete batch are held.

    Attributes:
        counts: [nbins] int32; None before the first batch.
        lo, hi: range in real units, float32.

    Raises:
        CalibrationError: another number of bins than in `NBINS`.
    """

    def __init__(self, nbins: int = 4096, *, together: int = 1) -> None:
        if nbins not in NBINS:
            raise CalibrationError(f"HFMG needs {list(NBINS)} bins, got {nbins}")
        self.nbins = nbins
        self.together = together
        self._waiting: list[Float32Array] = []
        self.counts: NDArray[np.int32] | None = None
        self.lo = self.hi = np.float32(0)

    def observe(self, x: NDArray[np.floating]) -> None:
        """Add one sample of any shape, float32 or float16; a refused one changes nothing.

        Raises:
            CalibrationError: wrong dtype, empty, NaN or Inf.
        """
        data = check_values(x, "activation").reshape(-1)
        if self.together == 1:
            self._add(data)
            return
        self._waiting.append(data.copy())
        if len(self._waiting) == self.together:
            self.end()

    def end(self) -> None:
        """Count the held samples as a batch; the last one may be smaller, as in AMCT.

        Raises:
            CalibrationError: the range does not fit float32.
        """
        if self._waiting:
            self._add(np.concatenate(self._waiting))
            self._waiting.clear()

    def _add(self, data: Float32Array) -> None:
        """Count one batch on its range, joined with the range of the earlier batches."""
        lo, hi = np.float32(data.min()), np.float32(data.max())
        if self.counts is None:
            self.counts, self.lo, self.hi = histc(data, self.nbins, lo, hi), lo, hi
            return
        low, high = min(lo, self.lo), max(hi, self.hi)
        old = self.counts
        if not (_close(low, self.lo) and _close(high, self.hi)):
            old = redistribute(old, (self.lo, self.hi), (low, high))
        self.counts = (old + histc(data, self.nbins, low, high)).astype(np.int32)
        self.lo, self.hi = low, high

    @property
    def extremes(self) -> tuple[float, float]:
        """Least and greatest value, in real units."""
        return float(self.lo), float(self.hi)

    @property
    def dead(self) -> bool:
        """Whether every value was zero."""
        return bool(self.lo == self.hi == 0)

    def to_arrays(self) -> Arrays:
        """Return plain 1-D arrays for `calibrators.amct.recorders.HfmgOf.restore`."""
        counts = np.zeros(0, np.int32) if self.counts is None else self.counts
        return {"counts": counts, "reals": np.array([self.lo, self.hi], np.float64)}


def histc(data: Float32Array, nbins: int, lo: np.float32, hi: np.float32) -> NDArray[np.int32]:
    """Count as torch.histc in float32: bin trunc((x - lo) / (hi - lo) * nbins), hi in the last."""
    with np.errstate(over="ignore", invalid="ignore"):
        if lo == hi:
            lo, hi = np.float32(lo - np.float32(1)), np.float32(hi + np.float32(1))
        position = (data - lo) / np.float32(hi - lo) * np.float32(nbins)
    if not np.isfinite(position).all():
        raise CalibrationError(
            f"the range of an activation must fit float32, got [{lo}, {hi}];"
            " leave this layer in float"
        )
    index = np.minimum(position.astype(np.int32), nbins - 1)
    return np.bincount(index, minlength=nbins).astype(np.int32)


def redistribute(
    counts: NDArray[np.int32],
    old: tuple[np.float32, np.float32],
    new: tuple[np.float32, np.float32],
) -> NDArray[np.int32]:
    """Redistribute counts on the range `old` to as many bins on the wider range `new`.

    A bin that crosses an edge is split in two by length, with the first share truncated.
    """
    n = counts.size
    lo, width = float(new[0]), (float(new[1]) - float(new[0])) / n
    old_width = (float(old[1]) - float(old[0])) / n
    lower = float(old[0]) + old_width * np.arange(n)
    upper = lower + old_width
    first = np.clip((lower - lo) // width, 0, n - 1).astype(np.int64)
    second = np.clip((upper - lo) // width, 0, n - 1).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (lo + (first + 1) * width - lower) / old_width
    inside = first == second
    to_first = np.where(inside, counts, (counts * np.where(inside, 1.0, share)).astype(np.int64))
    out = np.zeros(n, np.int64)
    np.add.at(out, first, to_first)
    np.add.at(out, second, counts - to_first)
    return out.astype(np.int32)


def candidate_runs(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the candidate runs of bins, [K, 2] (left, right) inclusive, from the outside in."""
    n = counts.size
    before = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
    step = max(math.ceil(before[-1] / 100000), 1)
    left, right, narrowest = 0, n - 1, math.ceil(n / 4)
    runs = []
    while right - left > narrowest:
        a = min(bisect_left(before, before[left] + step), right)
        b = max(bisect_right(before, before[right + 1] - step) - 2, a)
        if right - b >= a - left:
            right = b
        else:
            left = a
        runs.append((left, right))
    return np.array(runs, np.int64).reshape(-1, 2)


def hfmg(histogram: HfmgHistogram, params: HfmgParams | None = None) -> AscendScale:
    """Return scale and offset from the histogram of all batches; held samples are the last one.

    Raises:
        CalibrationError: no batch was observed, or a scale is not finite.
    """
    params = params or HfmgParams()
    histogram.end()
    if histogram.counts is None:
        raise CalibrationError("HFMG needs at least one calibration batch, got none")
    counts, lo, hi = histogram.counts, histogram.lo, histogram.hi
    runs = candidate_runs(counts)
    width = np.float32(np.float32(hi - lo) / np.float32(counts.size))
    losses = _losses(counts, runs, width, params.bits)
    best = int(np.argmin(losses))
    left, right = (np.float32(v) for v in runs[best])
    clip_lo, clip_hi = lo + left * width, lo + (right + np.float32(1)) * width
    scale, offset = ascend_scale_offset(
        np.asarray(clip_hi), np.asarray(clip_lo), with_offset=params.with_offset, bits=params.bits
    )
    clip_min, clip_max = ascend_clip_range(np.float32(scale), int(offset), params.bits)
    return AscendScale(
        scale=np.float32(scale),
        offset=int(offset),
        clip_min=clip_min,
        clip_max=clip_max,
        candidate=best,
        losses=losses,
    )


def _losses(
    counts: NDArray[np.int32], runs: NDArray[np.int64], width: np.float32, bits: int
) -> Float64Array:
    """Return the L2 loss of each run: AMCT's float32 value if it may be best, else float64."""
    span = float(width) * counts.size
    if bits > 8 or span**3 * float(counts.sum()) > 1e36 * max(float(width), 1e-30):
        return np.array([_loss32(counts, left, right, width, bits) for left, right in runs])
    losses: Float64Array = _fast_losses(counts, runs, bits) * float(width) ** 2
    steps = width * (runs[:, 1] - runs[:, 0] + 1).astype(np.float32) / np.float32(2**bits)
    losses[steps < FLT_EPSILON] = 0.0
    close = np.flatnonzero(losses <= losses.min() * (1 + _MARGIN))
    losses[close] = [_loss32(counts, left, right, width, bits) for left, right in runs[close]]
    return losses


def _fast_losses(counts: NDArray[np.int32], runs: NDArray[np.int64], bits: int) -> Float64Array:
    """Return the L2 losses, [K] float64, in units of the squared bin width.

    With c the centre of the last code, t_k the boundaries between codes and d their spacing, the
    loss is ``integral (x - c)^2 - 2 d sum_k G(t_k)``, where G is the integral of the cumulative
    count. G is quadratic within a bin, so a table and one look-up per boundary give it.
    """
    n = counts.size
    number = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    area = np.concatenate(([0.0], np.cumsum(number[:-1] + counts / 2)))
    middle = np.arange(n) + 0.5
    total, first = number[-1], float(np.dot(counts, middle))
    second = float(np.dot(counts, middle**2 + 1 / 12))
    start, codes = runs[:, 0].astype(np.float64), 2**bits
    spacing = (runs[:, 1] - runs[:, 0] + 1) / codes
    centre = runs[:, 1] + 1 - spacing / 2
    grown = np.empty(len(runs))
    half = counts / 2.0
    for part in np.array_split(np.arange(len(runs)), max(1, len(runs) // 64)):
        at = start[part, None] + spacing[part, None] * np.arange(1, codes)
        bin_ = at.astype(np.int32)
        at -= bin_
        grown[part] = ((half[bin_] * at + number[bin_]) * at + area[bin_]).sum(axis=1)
    losses: Float64Array = second - 2 * centre * first + centre**2 * total - 2 * spacing * grown
    return losses


def _loss32(
    counts: NDArray[np.int32], left: int, right: int, width: np.float32, bits: int
) -> np.float32:
    """Return AMCT's loss of one run: float32, bin by bin, each over the codes it overlaps."""
    one, half = np.float32(1), np.float32(0.5)
    step = np.float32(width * np.float32(right - left + 1) / np.float32(2**bits))
    if step < FLT_EPSILON:
        return np.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):
        density = counts.astype(np.float32) / width
        begin = np.arange(-left, counts.size - left).astype(np.float32) * width
        end = np.arange(1 - left, counts.size + 1 - left).astype(np.float32) * width
        first = np.clip(np.floor(begin / step), 0, 2**bits - 1).astype(np.float32)
        last = np.clip(np.floor(end / step), 0, 2**bits - 1).astype(np.float32)
        centre, middle = first * step + step * half, step * half
        from_left = begin - centre
        same = first == last
        until = np.where(same, end - centre, middle)
        loss = _cubes(from_left, until, density)
        more = (last - first - one) * _cubes(-middle, middle, density)
        more += _cubes(-middle, end - last * step - middle, density)
        return np.float32(np.sum(loss + np.where(same, np.float32(0), more), dtype=np.float32))


def _cubes(
    low: Float32Array | np.float32, high: Float32Array | np.float32, density: Float32Array
) -> Float32Array:
    """Return the integral of x^2 * density from low to high."""
    cubes = (high * high * high - low * low * low) / np.float32(3) * density
    return np.asarray(cubes, np.float32)


def _close(a: np.float32, b: np.float32) -> bool:
    return math.isclose(float(a), float(b), abs_tol=float(FLT_EPSILON))
