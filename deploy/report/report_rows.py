"""Rows of a report: histograms and clip ranges of tensors, float nodes, weights; worst first.

Histograms are summed into a few bars of equal width without losing counts. One with mirrored bins
(`calibrators.histogram`) is summed outwards from a bar around 0, so that no bin is split::

    bins     |..|..|..|..|..|..|..|..|.0.|..|..|..|..|..|..|..|..|
    bars     '-------' '-------' '---------' '-------' '-------'

Float nodes are grouped by operator and reason: first those that would cost most in int8, last shape
arithmetic.

Weights are rated by how much their channels differ. With a scale per channel that costs nothing;
with one for all, a channel whose largest |w| is 1 % of the weight's uses about one step of the
grid.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.hfmg import HfmgHistogram
from calibrators.amct.ifmr import IfmrHistogram
from calibrators.grids import FP8, GRIDS, Grid
from calibrators.histogram import Histogram
from calibrators.scales import Scale
from calibrators.statistics import Recorder
from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.observation import Observation
from deploy.graph.bounds import UNLIMITED, RangeLimits
from deploy.method import Choices, Method, comparable_methods
from deploy.metrics.output_errors import OutputAccuracy
from deploy.report.parts import (
    HistogramPart,
    RangeRow,
    TargetPart,
    TensorRow,
    WeightRow,
    tensor_rows,
)
from deploy.targets.base import BuildResult
from deploy.targets.stored_weights import StoredWeight
from deploy.tuning.plan_file import NOISE, TIME, reason_kind, reason_sqnr_db

MAX_BARS = 64  # bars of a histogram


def histogram_part(recorder: Recorder) -> HistogramPart | None:
    """Return a recorder's histogram in at most `MAX_BARS` bars; None if it has none or is empty."""
    if isinstance(recorder, Histogram):
        return _mirrored(recorder.counts, recorder.full_range)
    if isinstance(recorder, HfmgHistogram) and recorder.counts is not None:
        return _even(recorder.counts, float(recorder.lo), float(recorder.hi))
    if isinstance(recorder, IfmrHistogram):
        kept = recorder.kept
        return _mirrored(recorder.counts, recorder.full_range) if kept is None else _values(kept)
    return None


def _mirrored(counts: NDArray[np.int64], full_range: float) -> HistogramPart | None:
    """Sum [2 B + 1] counts: B bins of full_range / B on each side, and one around 0."""
    half = counts.size // 2
    occupied = np.flatnonzero(counts)
    if not occupied.size:
        return None
    if not full_range:
        return _single(0.0, int(counts.sum()))
    bins = np.arange(-half, half + 1)
    bins[[0, -1]] = 1 - half, half - 1  # only |x| == R, which lies at the last bin's edge
    span = int(occupied[-1] - occupied[0]) + 1
    each = -(-span // (2 * (MAX_BARS - 2)))  # bins per half bar
    bars = np.sign(bins) * ((np.abs(bins) + each) // (2 * each))
    first, last = int(bars[occupied[0]]), int(bars[occupied[-1]])
    summed = np.bincount(bars - bars[0], counts, bars[-1] - bars[0] + 1).astype(np.int64)
    width = 2 * each * full_range / half
    shown = summed[first - bars[0] : last - bars[0] + 1]
    return HistogramPart(start=(first - 0.5) * width, width=width, counts=_plain(shown))


def _even(counts: NDArray[np.int32], lo: float, hi: float) -> HistogramPart | None:
    """Sum counts of bins that divide [lo, hi] evenly."""
    if not counts.any():
        return None
    if lo == hi:
        return _single(lo, int(counts.sum()))
    each = -(-counts.size // MAX_BARS)
    padded = np.pad(counts.astype(np.int64), (0, -counts.size % each))
    width = (hi - lo) / counts.size * each
    return HistogramPart(start=lo, width=width, counts=_plain(padded.reshape(-1, each).sum(axis=1)))


def _values(kept: NDArray[np.float32]) -> HistogramPart | None:
    """Make a histogram of stored values."""
    if not kept.size:
        return None
    lo, hi = float(kept.min()), float(kept.max())
    if lo == hi:
        return _single(lo, kept.size)
    counts, _ = np.histogram(kept.astype(np.float64), bins=MAX_BARS, range=(lo, hi))
    return HistogramPart(start=lo, width=(hi - lo) / MAX_BARS, counts=_plain(counts))


def _single(value: float, count: int) -> HistogramPart:
    return HistogramPart(start=value, width=0.0, counts=(count,))


def _plain(counts: NDArray[np.integer]) -> tuple[int, ...]:
    return tuple(counts.tolist())


Row = TypeVar("Row", TensorRow, OutputAccuracy)


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Sort by ascending SQNR, NaN first, None last; equal ones keep their order."""
    return sorted(rows, key=lambda row: _rank(row.sqnr_db))


def worst_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """Return the `most` worst rows without those that are exact or not measured."""
    return [row for row in worst_first(rows)[:most] if row.sqnr_db not in (None, math.inf)]


def _rank(decibels: float | None) -> tuple[bool, float]:
    if decibels is None:
        return True, 0.0
    return False, -math.inf if math.isnan(decibels) else decibels


MAX_HISTOGRAMS = 24  # tensors of a target whose histogram is drawn
_QUICK = ("minmax", "percentile", "entropy")  # at most 10 ms a tensor; mse and lp take 50


def clip_rows(
    calibrated: CalibrationResult, built: BuildResult, layers: Sequence[OutputAccuracy]
) -> tuple[TensorRow, ...]:
    """Return rows of a target's ranges, the `MAX_HISTOGRAMS` of them with their histogram.

    A range inherited from another tensor, such as a pool's output, or found on a statistic that is
    not stored, has neither a clipped share nor a histogram.
    """
    recorders = dict(_recorders(calibrated, built))
    reaches = calibrated.subject.range_limits
    clipped = {
        name: clipped_share(recorder, built.ranges[name], reaches.get(name, UNLIMITED))
        for name, (_, recorder) in recorders.items()
        if isinstance(recorder, Histogram)
    }
    rows = tensor_rows(built.ranges, clipped=clipped, layers=layers)
    losing = sorted(
        (row for row in rows if row.name in recorders), key=lambda row: -(row.clipped or 0)
    )
    drawn = {row.name for row in worst_first(losing)[:MAX_HISTOGRAMS]}
    return tuple(
        _drawn(row, *recorders[row.name], calibrated, built) if row.name in drawn else row
        for row in rows
    )


def clipped_share(histogram: Histogram, scale: Scale, seen: RangeLimits = UNLIMITED) -> float:
    """Return the share (0 to 1) of values in bins completely outside [lo, hi].

    `seen`: values that its readers distinguish; clipping others, as below 0 before a Relu, is no
    loss.
    """
    edges, counts = histogram.edges(), histogram.signed()
    outside = (edges[1:] <= scale.lo) | (edges[:-1] >= scale.hi)
    outside &= (edges[1:] > seen.floor) & (edges[:-1] < seen.ceiling)
    outside &= (edges[1:] < min(scale.lo, 0)) | (edges[:-1] > max(scale.hi, 0))
    return float(np.sum(counts[outside])) / max(histogram.total, 1)


def _recorders(
    calibrated: CalibrationResult, built: BuildResult
) -> Iterator[tuple[str, tuple[Observation, Recorder]]]:
    """Yield (tensor, (observation, recorder)) of the ranges found on a stored statistic."""
    observed = calibrated.ranges.observed
    for observation in calibrated.observations_by_target.get(built.target, ()):
        recorder = observed.get(observation.key)
        scale = built.ranges.get(observation.tensor)
        if recorder is None or scale is None:
            continue
        if _extremes(recorder) == (scale.observed_min, scale.observed_max):
            yield observation.tensor, (observation, recorder)


def _extremes(recorder: Recorder) -> tuple[float, float] | None:
    if isinstance(recorder, Histogram):
        return recorder.minimum, recorder.maximum
    return getattr(recorder, "extremes", None)


def _drawn(
    row: TensorRow,
    observation: Observation,
    recorder: Recorder,
    calibrated: CalibrationResult,
    built: BuildResult,
) -> TensorRow:
    part = histogram_part(recorder)
    if part is None:
        return row
    others = _others(row, observation, calibrated, _grids(built))
    return replace(row, histogram=replace(part, others=tuple(others)))


def _others(
    row: TensorRow,
    observation: Observation,
    calibrated: CalibrationResult,
    grids: Mapping[str, Grid],
) -> Iterator[RangeRow]:
    """Yield the ranges that other methods find on the same histogram.

    Slow methods are included only if they were computed anyway.
    """
    symmetric = any(grid.symmetric for grid in grids.values())
    for method in (*comparable_methods(Method.of()), Method.of("entropy")):
        if method.statistic != observation.statistic or (FP8.name in grids and method.integer):
            continue
        ranges, grid = calibrated.ranges.with_choices(Choices(method=method)), grids.get(FP8.name)
        scale = ranges.cached_scale(observation, symmetric=grid)
        if scale is None and method.name in _QUICK:
            scale = ranges.find([observation], symmetric=grid).scales.get(observation.tensor)
        if scale is not None and scale.method != row.method:
            ends = (-scale.amax, scale.amax) if symmetric else (scale.lo, scale.hi)
            yield RangeRow(method=scale.method, lo=ends[0], hi=ends[1])


def _grids(built: BuildResult) -> dict[str, Grid]:
    """Return the grids of the target's quantized nodes."""
    names = {d.precision for d in built.decisions if d.quantized} & set(GRIDS)
    return {name: GRIDS[name] for name in sorted(names)}


# Operators of shape arithmetic.
_ON_SHAPES = frozenset(("Shape", "Size", "Gather", "Unsqueeze", "Squeeze", "Cast", "Range",
                        "Expand", "Constant", "ConstantOfShape"))  # fmt: skip
_NO_FLOAT = " is not float32"  # ending of a reason that names a tensor
_ANY_NO_FLOAT = f"a tensor of it{_NO_FLOAT}"


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """Float nodes that share an operator and a reason, on one or several targets."""

    op: str
    precision: str
    reason: str
    nodes: Mapping[str, tuple[str, ...]]  # target -> names of its nodes

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct nodes of all targets."""
        return tuple(dict.fromkeys(name for names in self.nodes.values() for name in names))

    @property
    def nodes_and_targets(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """(nodes, targets): targets with the same float nodes share an entry."""
        targets_of: dict[tuple[str, ...], list[str]] = {}
        for target, names in self.nodes.items():
            targets_of.setdefault(names, []).append(target)
        return tuple((names, tuple(targets)) for names, targets in targets_of.items())


def float_groups(targets: Sequence[TargetPart]) -> tuple[FloatGroup, ...]:
    """Group float nodes of all targets by operator and reason.

    Order: those that would lose most in int8, those that would be slower in it, the largest groups;
    shape arithmetic comes last.
    """
    groups: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for target in targets:
        for node in target.nodes:
            if not node.quantized:
                reason = _ANY_NO_FLOAT if node.reason.endswith(_NO_FLOAT) else node.reason
                places = groups.setdefault((node.op, node.precision, reason), {})
                places.setdefault(target.name, []).append(node.name)
    float_nodes = [
        FloatGroup(*key, {target: tuple(names) for target, names in places.items()})
        for key, places in groups.items()
    ]
    return tuple(sorted(float_nodes, key=_float_rank))


def _float_rank(group: FloatGroup) -> tuple[int, float, bool, int]:
    why = reason_kind(group.reason)
    trivial = group.op in _ON_SHAPES or group.reason == _ANY_NO_FLOAT
    order = 0 if why == NOISE else 1 if why == TIME else 2
    return order, reason_sqnr_db(group.reason), trivial, -len(group.names)


MAX_STRIPS = 6  # weights of a target whose channels are drawn
_MOST = 96  # bars of a strip
_DEAD = 1e-6  # largest |w| of a dead channel, relative to the weight's
_NAMED = 3  # worst channels listed per weight


def weight_rows(weights: Sequence[StoredWeight]) -> tuple[WeightRow, ...]:
    """Return one row per weight in the model's order; the `MAX_STRIPS` worst with their strip."""
    rows = [_row(one) for one in weights]
    worst = sorted(range(len(rows)), key=lambda place: _worst(rows[place]))[:MAX_STRIPS]
    for place in worst:
        rows[place] = replace(rows[place], strip=_strip(weights[place].amax))
    return tuple(rows)


def worst_weights(rows: Iterable[WeightRow]) -> list[WeightRow]:
    """Sort by the grid share of the weight's worst channel, then by the channels' ratio."""
    return sorted(rows, key=_worst)


def _worst(row: WeightRow) -> tuple[float, float]:
    return row.used, -row.ratio


def _row(weight: StoredWeight) -> WeightRow:
    amax, used = weight.amax, weight.used
    places = np.flatnonzero(amax > _DEAD * amax.max())
    live = amax[places] if places.size else np.zeros(1)
    least, largest = float(live.min()), float(live.max())
    order = places[np.lexsort((amax[places], used[places]))]
    return WeightRow(
        node=weight.node,
        op=weight.op,
        channels=amax.size,
        scales=weight.scales.size,
        least=least,
        median=float(np.median(live)),
        largest=largest,
        ratio=largest / least if least else 1.0,
        used=float(used[places].min()) if places.size else 0.0,
        dead=amax.size - places.size,
        worst=tuple(order[:_NAMED].tolist()) if largest > least else (),
    )


def _strip(amax: NDArray[np.float64]) -> tuple[float, ...]:
    """Return at most `_MOST` heights of four digits: the least of each run of channels."""
    run = -(-amax.size // _MOST)
    runs = (amax[start : start + run].min() for start in range(0, amax.size, run))
    return tuple(float(f"{value:.4g}") for value in runs)
