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
from itertools import chain
from typing import Any, TypeVar

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
from deploy.metrics.output_errors import OutputAccuracy, sqnr_sort_key
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
from deploy.tuning.reasons import NOISE, TIME, reason_kind, reason_sqnr_db

MAX_BARS = 64  # of a histogram


def histogram_part(recorder: Recorder) -> HistogramPart | None:
    """Return a recorder's histogram in at most `MAX_BARS`; None if it has none or is empty."""
    if isinstance(recorder, Histogram):
        return _mirrored_histogram(recorder.counts, recorder.full_range)
    if isinstance(recorder, HfmgHistogram) and recorder.counts is not None:
        return _even_histogram(recorder.counts, float(recorder.lo), float(recorder.hi))
    if isinstance(recorder, IfmrHistogram):
        stored_values = recorder.stored_values
        if stored_values is None:
            return _mirrored_histogram(recorder.counts, recorder.full_range)
        return _histogram_of_values(stored_values)
    return None


def _mirrored_histogram(counts: NDArray[np.int64], full_range: float) -> HistogramPart | None:
    """Return the bars of a histogram whose bins mirror each other; None if it is empty.

    A bar is the sum of several bins. Bins and bars are numbered from the one around 0, which is
    number 0; those of negative values have negative numbers.

    Args:
        counts: [2 B + 1], of B bins on each side and one around 0.
        full_range: R, the magnitude at which the last bins end; 0 if all values are 0.
    """
    bins_per_side = counts.size // 2  # B
    occupied_bins = np.flatnonzero(counts)
    if not occupied_bins.size:
        return None
    if not full_range:
        return _single_bar(0.0, int(counts.sum()))

    bin_numbers = np.arange(-bins_per_side, bins_per_side + 1)
    # the outermost bins hold only |x| == R, the outer edge of their neighbours: they join these
    bin_numbers[0] = 1 - bins_per_side
    bin_numbers[-1] = bins_per_side - 1

    # the middle of bar number 0 is at 0, and a bar has an even number of bins. The first and the
    # last bar may hold few bins, so the bars between them must have room for all occupied bins
    occupied_span = int(occupied_bins[-1] - occupied_bins[0]) + 1
    bins_per_half_bar = -(-occupied_span // (2 * (MAX_BARS - 2)))  # rounded up
    bins_per_bar = 2 * bins_per_half_bar
    bar_distances = (np.abs(bin_numbers) + bins_per_half_bar) // bins_per_bar
    bar_numbers = (np.sign(bin_numbers) * bar_distances)[occupied_bins]

    first_bar = int(bar_numbers[0])
    sums = np.bincount(bar_numbers - first_bar, counts[occupied_bins]).astype(np.int64)
    width = bins_per_bar * full_range / bins_per_side
    return HistogramPart(start=(first_bar - 0.5) * width, width=width, counts=tuple(sums.tolist()))


def _even_histogram(counts: NDArray[np.integer[Any]], lo: float, hi: float) -> HistogramPart | None:
    """Return bars of a histogram whose bins divide [lo, hi] evenly; None if it is empty."""
    if not counts.any():
        return None
    if lo == hi:
        return _single_bar(lo, int(counts.sum()))

    bins_per_bar = -(-counts.size // MAX_BARS)  # rounded up
    padded = np.pad(counts.astype(np.int64), (0, -counts.size % bins_per_bar))
    sums = padded.reshape(-1, bins_per_bar).sum(axis=1)
    width = (hi - lo) / counts.size * bins_per_bar
    return HistogramPart(start=lo, width=width, counts=tuple(sums.tolist()))


def _histogram_of_values(values: NDArray[np.float32]) -> HistogramPart | None:
    """Return bars of stored values, between their extremes; None without values."""
    if not values.size:
        return None
    lo = float(values.min())
    hi = float(values.max())
    counts, _ = np.histogram(values.astype(np.float64), bins=MAX_BARS, range=(lo, hi))
    return _even_histogram(counts, lo, hi)


def _single_bar(value: float, count: int) -> HistogramPart:
    """Return the histogram of `count` equal values."""
    return HistogramPart(start=value, width=0.0, counts=(count,))


Row = TypeVar("Row", TensorRow, OutputAccuracy)


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Sort by ascending SQNR, NaN first, None last; equal ones keep their order."""
    return sorted(rows, key=lambda row: _sqnr_order(row.sqnr_db))


def worst_rows(rows: Sequence[Row], limit: int) -> list[Row]:
    """Return the `limit` worst rows without those that are exact or not measured."""
    return [row for row in worst_first(rows)[:limit] if row.sqnr_db not in (None, math.inf)]


def _sqnr_order(sqnr_db: float | None) -> tuple[bool, float]:
    """Return what rows are sorted by: those whose SQNR was not measured come last."""
    if sqnr_db is None:
        return True, 0.0
    return False, sqnr_sort_key(sqnr_db)


MAX_HISTOGRAMS = 24  # tensors of a target whose histogram is drawn
_QUICK_METHODS = ("minmax", "percentile", "entropy")  # at most 10 ms a tensor; mse and lp take 50


def clip_rows(
    calibration: CalibrationResult, result: BuildResult, layers: Sequence[OutputAccuracy]
) -> tuple[TensorRow, ...]:
    """Return a row for each range of a target, the `MAX_HISTOGRAMS` worst with their histogram.

    The worst have the largest error, and of those without a measured error the most clipped values.
    A range that a tensor inherits from another one, as a pool's output does, has neither a clipped
    share nor a histogram; nor has one whose statistic of the values is not stored.

    Args:
        calibration: the calibration.
        result: the target's files and ranges.
        layers: inner tensors whose error was measured.
    """
    source_by_tensor = {}
    clipped_by_tensor = {}
    for observation, recorder in _range_sources(calibration, result):
        tensor = observation.tensor
        source_by_tensor[tensor] = observation, recorder
        if isinstance(recorder, Histogram):
            limits = calibration.subject.range_limits.get(tensor, UNLIMITED)
            clipped_by_tensor[tensor] = clipped_share(recorder, result.ranges[tensor], limits)

    rows = tensor_rows(result.ranges, clipped=clipped_by_tensor, layers=layers)
    rows_with_source = [row for row in rows if row.name in source_by_tensor]
    # `worst_first` sorts by the error, and leaves rows of equal or no error in this order
    rows_with_source.sort(key=lambda row: row.clipped or 0, reverse=True)
    grids = _grids(result)
    histograms: dict[str, HistogramPart] = {}
    for row in worst_first(rows_with_source)[:MAX_HISTOGRAMS]:
        observation, recorder = source_by_tensor[row.name]
        part = histogram_part(recorder)
        if part is not None:
            ranges = _other_ranges(row, observation, calibration, grids)
            histograms[row.name] = replace(part, others=tuple(ranges))
    return tuple(replace(row, histogram=histograms.get(row.name)) for row in rows)


def clipped_share(histogram: Histogram, scale: Scale, read_range: RangeLimits) -> float:
    """Return the share (0 to 1) of values in bins completely outside the scale's range.

    The range always holds 0, which every grid can represent.

    Args:
        histogram: of a tensor.
        scale: its scale.
        read_range: values that its readers distinguish; clipping others, as below 0 before a Relu,
            is no loss.
    """
    edges = histogram.edges()  # ascending, one more than bins
    bin_starts = edges[:-1]
    bin_ends = edges[1:]
    is_outside = (bin_ends < min(scale.lo, 0)) | (bin_starts > max(scale.hi, 0))
    is_read = (bin_ends > read_range.floor) & (bin_starts < read_range.ceiling)
    counts = histogram.signed()  # of the bins, from the most negative values on
    clipped_count = float(counts[is_outside & is_read].sum())
    return clipped_count / max(histogram.total, 1)


def _range_sources(
    calibration: CalibrationResult, result: BuildResult
) -> Iterator[tuple[Observation, Recorder]]:
    """Yield the observed tensors whose range was found on their own values.

    The range of a pool's output, for instance, comes from the values of its input: it is left out.

    Yields:
        (observation: the tensor and the statistic, recorder: the statistic of its values).
    """
    for observation in calibration.observations_by_target.get(result.target, ()):
        recorder = calibration.ranges.observed.get(observation.key)
        scale = result.ranges.get(observation.tensor)
        if recorder is None or scale is None:
            continue
        own_extremes = getattr(recorder, "extremes", None)  # not every statistic has them
        if isinstance(recorder, Histogram):
            own_extremes = recorder.minimum, recorder.maximum
        # a scale has the extremes of the values that its range was found on
        if own_extremes == (scale.observed_min, scale.observed_max):
            yield observation, recorder


def _other_ranges(
    row: TensorRow,
    observation: Observation,
    calibration: CalibrationResult,
    grids: Mapping[str, Grid],
) -> Iterator[RangeRow]:
    """Yield the ranges that other methods give one tensor, for comparison.

    Only methods that search the recorded statistic can be asked. A slow one is left out unless its
    range is cached from an earlier search. A symmetric method searches a threshold for one grid:
    fp8 if the target has fp8 nodes, else int8.

    Args:
        row: the tensor, with the method that found its range.
        observation: the tensor, and the statistic that was recorded of it.
        calibration: the calibration.
        grids: grids of the target's quantized nodes, by name.
    """
    threshold_grid = grids.get(FP8.name)  # None stands for int8
    is_symmetric = any(grid.symmetric for grid in grids.values())
    # methods that search the default method's statistic, and TensorRT's, which searches its own
    for method in (*comparable_methods(Method.of()), Method.of("entropy")):
        if method.statistic != observation.statistic:
            continue
        if threshold_grid is not None and method.is_int8_only:
            continue
        ranges = calibration.ranges.with_choices(Choices(method=method))
        scale = ranges.cached_scale(observation, symmetric=threshold_grid)
        if scale is None and method.name in _QUICK_METHODS:
            range_set = ranges.find([observation], symmetric=threshold_grid)
            scale = range_set.scales.get(observation.tensor)
        if scale is None or scale.method == row.method:
            continue
        if is_symmetric:
            yield RangeRow(method=scale.method, lo=-scale.amax, hi=scale.amax)
        else:
            yield RangeRow(method=scale.method, lo=scale.lo, hi=scale.hi)


def _grids(result: BuildResult) -> dict[str, Grid]:
    """Return the grids of the target's quantized nodes."""
    names = {decision.precision for decision in result.decisions if decision.quantized}
    return {name: GRIDS[name] for name in sorted(names & set(GRIDS))}


# Operators of shape arithmetic.
_ON_SHAPES = frozenset(
    (
        "Shape",
        "Size",
        "Gather",
        "Unsqueeze",
        "Squeeze",
        "Cast",
        "Range",
        "Expand",
        "Constant",
        "ConstantOfShape",
    )
)
_KIND_ORDER = {NOISE: 0, TIME: 1}  # all other kinds of reasons come after these
# "token_ids is not float32": nodes of such a reason are one group, whatever the tensor
_NO_FLOAT = " is not float32"
_ANY_NO_FLOAT = f"a tensor of it{_NO_FLOAT}"


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """Float nodes that share an operator and a reason, on one or several targets.

    Attributes:
        op, precision, reason: of each node.
        nodes: target -> names of its nodes.
    """

    op: str
    precision: str
    reason: str
    nodes: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct nodes of all targets."""
        return tuple(dict.fromkeys(chain.from_iterable(self.nodes.values())))

    @property
    def nodes_and_targets(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """(nodes, targets): targets with the same float nodes share an entry."""
        targets_by_nodes: dict[tuple[str, ...], list[str]] = {}
        for target, names in self.nodes.items():
            targets_by_nodes.setdefault(names, []).append(target)
        return tuple((names, tuple(targets)) for names, targets in targets_by_nodes.items())


def float_groups(targets: Sequence[TargetPart]) -> tuple[FloatGroup, ...]:
    """Group float nodes of all targets by operator and reason.

    First come the nodes that would lose most in int8, then those that would be slower in int8, then
    the largest groups; shape arithmetic comes last.
    """
    # (operator, precision, reason) -> target -> names of nodes
    names_by_group: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for target in targets:
        for node in target.nodes:
            if node.quantized:
                continue
            reason = node.reason
            if reason.endswith(_NO_FLOAT):  # one group, whichever tensor the reason names
                reason = _ANY_NO_FLOAT
            names_by_target = names_by_group.setdefault((node.op, node.precision, reason), {})
            names_by_target.setdefault(target.name, []).append(node.name)

    groups = []
    for (op, precision, reason), names_by_target in names_by_group.items():
        nodes = {target: tuple(names) for target, names in names_by_target.items()}
        groups.append(FloatGroup(op, precision, reason, nodes))
    return tuple(sorted(groups, key=_float_rank))


def _float_rank(group: FloatGroup) -> tuple[int, float, bool, int]:
    """Return what groups are sorted by; see `float_groups`."""
    kind_order = _KIND_ORDER.get(reason_kind(group.reason), len(_KIND_ORDER))
    is_trivial = group.op in _ON_SHAPES or group.reason == _ANY_NO_FLOAT
    return kind_order, reason_sqnr_db(group.reason), is_trivial, -len(group.names)


_DEAD_RATIO = 1e-6  # largest |w| of a dead channel, relative to the weight's
_LISTED_CHANNELS = 3  # worst channels listed per weight


def worst_weights(rows: Iterable[WeightRow]) -> list[WeightRow]:
    """Sort by the grid share of the weight's worst channel, then by the channels' ratio."""
    return sorted(rows, key=lambda row: (row.used, -row.ratio))


def weight_row(weight: StoredWeight) -> WeightRow:
    """Return the figures of a weight's channels; dead channels, nearly all 0, are only counted.

    `weight.amax` is the largest |w| of each output channel, `weight.used` the share of the grid
    that it reaches, both [channels].
    """
    amax = weight.amax
    live_channels = np.flatnonzero(amax > _DEAD_RATIO * amax.max())
    # without a live channel the figures are those of one that is 0
    live_amax = amax[live_channels] if live_channels.size else np.zeros(1)
    live_used = weight.used[live_channels] if live_channels.size else np.zeros(1)
    smallest = float(live_amax.min())
    largest = float(live_amax.max())
    worst_channels: list[int] = []
    if largest > smallest:  # channels that are all equal have no worst one
        by_used_then_amax = np.lexsort((live_amax, live_used))  # the last key sorts first
        worst_channels = live_channels[by_used_then_amax[:_LISTED_CHANNELS]].tolist()
    return WeightRow(
        node=weight.node,
        op=weight.op,
        channels=amax.size,
        scales=weight.scales.size,
        least=smallest,
        median=float(np.median(live_amax)),
        largest=largest,
        ratio=largest / smallest if smallest else 1.0,
        used=float(live_used.min()),
        dead=amax.size - live_channels.size,
        worst=tuple(worst_channels),
    )
