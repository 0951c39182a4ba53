"""Fine histograms of any statistic as a few bars of one width; every count is kept.

A histogram with mirrored bins (`calibrators.histogram`) is gathered outwards from a bar around 0,
so that no bin is cut and none is wider than another::

    bins     |..|..|..|..|..|..|..|..|.0.|..|..|..|..|..|..|..|..|
    bars     '-------' '-------' '---------' '-------' '-------'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr_streaming import IfmrHistogram
from calibrators.histogram import Histogram
from deploy.report.parts import HistogramPart

if TYPE_CHECKING:
    from calibrators.statistics import Recorder

MOST = 64  # bars of a histogram


def histogram_part(recorder: Recorder) -> HistogramPart | None:
    """What was recorded, in at most `MOST` bars; None where it was no histogram, or nothing."""
    if isinstance(recorder, Histogram):
        return _mirrored(recorder.counts, recorder.full_range)
    if isinstance(recorder, HfmgHistogram) and recorder.counts is not None:
        return _even(recorder.counts, float(recorder.lo), float(recorder.hi))
    if isinstance(recorder, IfmrHistogram):
        kept = recorder.kept
        return _mirrored(recorder.counts, recorder.full_range) if kept is None else _values(kept)
    return None


def _mirrored(counts: NDArray[np.int64], full_range: float) -> HistogramPart | None:
    """[2 * B + 1] counts, B bins of full_range / B a side and that around 0 between them."""
    half = counts.size // 2
    occupied = np.flatnonzero(counts)
    if not occupied.size:
        return None
    if not full_range:
        return _alone(0.0, int(counts.sum()))
    bins = np.arange(-half, half + 1)
    bins[[0, -1]] = 1 - half, half - 1  # |x| == R alone, which lies at the last bin's edge
    span = int(occupied[-1] - occupied[0]) + 1
    each = -(-span // (2 * (MOST - 2)))  # bins of half a bar
    bars = np.sign(bins) * ((np.abs(bins) + each) // (2 * each))
    first, last = int(bars[occupied[0]]), int(bars[occupied[-1]])
    summed = np.bincount(bars - bars[0], counts, bars[-1] - bars[0] + 1).astype(np.int64)
    width = 2 * each * full_range / half
    shown = summed[first - bars[0] : last - bars[0] + 1]
    return HistogramPart(start=(first - 0.5) * width, width=width, counts=_plain(shown))


def _even(counts: NDArray[np.int32], lo: float, hi: float) -> HistogramPart | None:
    """Counts of bins that divide [lo, hi] evenly."""
    if not counts.any():
        return None
    if lo == hi:
        return _alone(lo, int(counts.sum()))
    each = -(-counts.size // MOST)
    padded = np.pad(counts.astype(np.int64), (0, -counts.size % each))
    width = (hi - lo) / counts.size * each
    return HistogramPart(start=lo, width=width, counts=_plain(padded.reshape(-1, each).sum(axis=1)))


def _values(kept: NDArray[np.float32]) -> HistogramPart | None:
    """The data themselves."""
    if not kept.size:
        return None
    lo, hi = float(kept.min()), float(kept.max())
    if lo == hi:
        return _alone(lo, kept.size)
    counts, _ = np.histogram(kept.astype(np.float64), bins=MOST, range=(lo, hi))
    return HistogramPart(start=lo, width=(hi - lo) / MOST, counts=_plain(counts))


def _alone(value: float, count: int) -> HistogramPart:
    return HistogramPart(start=value, width=0.0, counts=(count,))


def _plain(counts: NDArray[np.integer]) -> tuple[int, ...]:
    return tuple(counts.tolist())
