"""Rows of a report: clip ranges of tensors, and float nodes; worst first.

Float nodes are grouped by operator and reason: first those that would cost most in int8, last shape
arithmetic.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from calibrators.histogram import Histogram
from calibrators.scales import Scale
from deploy.calibration.calibration_result import CalibrationResult
from deploy.graph.bounds import UNLIMITED, RangeLimits
from deploy.metrics.output_errors import OutputAccuracy, sqnr_sort_key
from deploy.report.parts import TargetPart, TensorRow
from deploy.targets.base import BuildResult
from deploy.tuning.reasons import NOISE, TIME, reason_kind, reason_sqnr_db

Row = TypeVar("Row", TensorRow, OutputAccuracy)


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Sort by ascending SQNR, NaN first, None last; equal ones keep their order."""
    return sorted(rows, key=_sqnr_order)


def worst_rows(rows: Sequence[Row], limit: int) -> list[Row]:
    """Return the `limit` worst rows without those that are exact or not measured."""
    return [row for row in worst_first(rows)[:limit] if row.sqnr_db not in (None, math.inf)]


def _sqnr_order(row: TensorRow | OutputAccuracy) -> tuple[bool, float]:
    """Return what rows are sorted by: those whose SQNR was not measured come last."""
    if row.sqnr_db is None:
        return True, 0.0
    return False, sqnr_sort_key(row.sqnr_db)


def tensor_rows(
    calibration: CalibrationResult, result: BuildResult, layers: Sequence[OutputAccuracy]
) -> tuple[TensorRow, ...]:
    """Return a row for each range of a target, with the share of values that it clips.

    Clipping loses nothing of values that no reader tells apart, such as those below 0 before a
    Relu: these do not count. The share is unknown for a range that comes from another tensor, such
    as that of a pool's output, and for a tensor whose histogram is not stored.

    Args:
        calibration: the calibration.
        result: the target's files and ranges.
        layers: inner tensors whose error was measured.
    """
    clipped_by_tensor = {}
    for tensor, histogram in _range_sources(calibration, result):
        read_range = calibration.subject.range_limits.get(tensor, UNLIMITED)
        clipped_by_tensor[tensor] = clipped_share(histogram, result.ranges[tensor], read_range)
    sqnr_by_tensor = {layer.name: layer.sqnr_db for layer in layers}
    return tuple(
        tensor_row(name, scale, clipped_by_tensor.get(name), sqnr_by_tensor.get(name))
        for name, scale in result.ranges.items()
    )


def tensor_row(
    name: str, scale: Scale, clipped: float | None = None, sqnr_db: float | None = None
) -> TensorRow:
    """Return the row of a tensor's range.

    Args:
        name: of the tensor.
        scale: its range, and how that was found.
        clipped: share of its values that the range clips, 0 to 1; None if unknown.
        sqnr_db: SQNR of its values in the int8 model; None if not measured.
    """
    return TensorRow(
        name=name,
        observed_min=scale.observed_min,
        observed_max=scale.observed_max,
        lo=scale.lo,
        hi=scale.hi,
        amax=scale.amax,
        method=scale.method,
        clipped=clipped,
        sqnr_db=sqnr_db,
    )


def clipped_share(histogram: Histogram, scale: Scale, read_range: RangeLimits) -> float:
    """Return the share (0 to 1) of values in bins completely outside the scale's range.

    The range always holds 0, which every grid can represent.

    Args:
        histogram: of a tensor.
        scale: its scale.
        read_range: limits of the values that its readers tell apart. Clipping beyond them is no
            loss, such as below 0 before a Relu.
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
) -> Iterator[tuple[str, Histogram]]:
    """Yield (tensor, histogram of its values) for each range that was found on the tensor's values.

    The range of a pool's output, for instance, comes from the values of its input: it is left out.
    """
    for observation in calibration.observations_by_target.get(result.target, ()):
        histogram = calibration.ranges.observed.get(observation.key)
        scale = result.ranges.get(observation.tensor)
        if not isinstance(histogram, Histogram) or scale is None:
            continue
        # a scale has the extremes of the values that its range was found on
        own_extremes = (histogram.minimum, histogram.maximum)
        if own_extremes == (scale.observed_min, scale.observed_max):
            yield observation.tensor, histogram


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
_NOT_FLOAT32 = " is not float32"
_ANY_NOT_FLOAT32 = f"a tensor of it{_NOT_FLOAT32}"


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """Float nodes that share an operator and a reason, on one or several targets.

    Attributes:
        op, reason: of each node.
        nodes: target -> names of its nodes.
    """

    op: str
    reason: str
    nodes: Mapping[str, tuple[str, ...]]

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
            if reason.endswith(_NOT_FLOAT32):  # it names a tensor: one group for all of them
                reason = _ANY_NOT_FLOAT32
            names_by_target = names_by_group.setdefault((node.op, node.precision, reason), {})
            names_by_target.setdefault(target.name, []).append(node.name)

    groups = []
    for (op, _, reason), names_by_target in names_by_group.items():
        nodes = {target: tuple(names) for target, names in names_by_target.items()}
        groups.append(FloatGroup(op, reason, nodes))
    return tuple(sorted(groups, key=_float_rank))


def _float_rank(group: FloatGroup) -> tuple[int, float, bool, int]:
    """Return what groups are sorted by; see `float_groups`."""
    kind_order = _KIND_ORDER.get(reason_kind(group.reason), len(_KIND_ORDER))
    is_trivial = group.op in _ON_SHAPES or group.reason == _ANY_NOT_FLOAT32
    names = set(chain.from_iterable(group.nodes.values()))  # of the nodes on any target
    return kind_order, reason_sqnr_db(group.reason), is_trivial, -len(names)
