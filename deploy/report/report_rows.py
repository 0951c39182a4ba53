"""Rows of a report: histograms and clip ranges of tensors, float nodes; worst first.

Histograms are summed into a few bars of equal width without losing counts.

Float nodes are grouped by operator and reason: first those that would cost most in int8, last shape
arithmetic.
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
from calibrators.histogram import Histogram, close_range
from calibrators.scales import Scale
from calibrators.statistics import Recorder
from deploy.calibration.calibration_result import CalibrationResult
from deploy.graph.bounds import UNLIMITED, RangeLimits
from deploy.metrics.output_errors import OutputAccuracy, sqnr_sort_key
from deploy.report.parts import (
    HistogramPart,
    TargetPart,
    TensorRow,
    tensor_rows,
)
from deploy.targets.base import BuildResult
from deploy.tuning.reasons import NOISE, TIME, reason_kind, reason_sqnr_db

MAX_BARS = 64  # of a histogram


def histogram_part(recorder: Recorder) -> HistogramPart | None:
    """Return a recorder's histogram in at most `MAX_BARS`; None if it has none or is empty."""
    if isinstance(recorder, Histogram):
        return _sum_bins(recorder.signed(), recorder.edges())
    if isinstance(recorder, HfmgHistogram) and recorder.counts is not None:
        edges = np.linspace(*recorder.extremes, recorder.counts.size + 1)
        return _sum_bins(recorder.counts, edges)
    if not isinstance(recorder, IfmrHistogram):
        return None
    if recorder.stored_values is not None:  # few values are not counted in bins yet
        return _sum_bins(*np.histogram(recorder.stored_values.astype(np.float64), MAX_BARS))
    # bins as those of `Histogram`, but finer: equal ones on both sides of 0, and one around it
    bins_per_side = recorder.counts.size // 2
    indices = np.concatenate([np.arange(-bins_per_side, 0), np.arange(1, bins_per_side + 1)])
    edges = indices * (recorder.full_range / bins_per_side)
    return _sum_bins(close_range(recorder.counts)[1:-1], edges)


def _sum_bins(
    counts: NDArray[np.integer[Any]], edges: NDArray[np.floating[Any]]
) -> HistogramPart | None:
    """Return a histogram whose bins are summed into a few bars; None if it is empty.

    Args:
        counts: [n], of each bin.
        edges: [n + 1], of the bins, ascending.
    """
    occupied_bins = np.flatnonzero(counts)
    if not occupied_bins.size:
        return None
    start = float(edges[occupied_bins[0]])
    end = float(edges[occupied_bins[-1] + 1])
    if start == end:  # of equal values
        return HistogramPart(start=start, width=0.0, counts=(int(counts.sum()),))

    # bars begin at edges of bins, so that none is split but the bin around 0, which may be wider
    bin_width = float(edges[1] - edges[0])
    bins_in_span = round((end - start) / bin_width)
    bins_per_bar = -(-bins_in_span // MAX_BARS)  # rounded up
    bar_count = -(-bins_in_span // bins_per_bar)
    width = bins_per_bar * bin_width
    middles = (edges[:-1] + edges[1:]) / 2
    sums, _ = np.histogram(middles, bar_count, (start, start + bar_count * width), weights=counts)
    return HistogramPart(start=start, width=width, counts=tuple(sums.astype(np.int64).tolist()))


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
    recorder_by_tensor = {}
    clipped_by_tensor = {}
    for tensor, recorder in _range_sources(calibration, result):
        recorder_by_tensor[tensor] = recorder
        if isinstance(recorder, Histogram):
            limits = calibration.subject.range_limits.get(tensor, UNLIMITED)
            clipped_by_tensor[tensor] = clipped_share(recorder, result.ranges[tensor], limits)

    rows = tensor_rows(result.ranges, clipped=clipped_by_tensor, layers=layers)
    rows_with_source = [row for row in rows if row.name in recorder_by_tensor]
    # `worst_first` sorts by the error, and leaves rows of equal or no error in this order
    rows_with_source.sort(key=lambda row: row.clipped or 0, reverse=True)
    histograms = {}
    for row in worst_first(rows_with_source)[:MAX_HISTOGRAMS]:
        histograms[row.name] = histogram_part(recorder_by_tensor[row.name])
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
) -> Iterator[tuple[str, Recorder]]:
    """Yield (tensor, statistic of its values) if its range was found on its own values.

    The range of a pool's output, for instance, comes from the values of its input: it is left out.
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
            yield observation.tensor, recorder


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
