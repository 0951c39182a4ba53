"""The rows of a target's ranges: what each clips of what was seen, and how the worst ones look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from calibrators.grids import FP8, GRIDS, Grid
from calibrators.histogram import Histogram
from calibrators.scales import Scale
from deploy.calibration.choices import Choices
from deploy.graph.reach import EVERYWHERE, Reach
from deploy.method import Method, comparable
from deploy.report.bars import histogram_part
from deploy.report.parts import RangeRow, TensorRow, tensor_rows
from deploy.report.worst import worst_first

if TYPE_CHECKING:
    from calibrators.statistics import Recorder
    from deploy.calibration.calibrated import Calibrated
    from deploy.calibration.observation import Observation
    from deploy.metrics.output_errors import OutputAccuracy
    from deploy.targets.base import Built

WORST = 24  # tensors of a target that are drawn
_QUICK = ("minmax", "percentile", "entropy")  # 10 ms a tensor or less; mse and lp take 50


def clip_rows(
    calibrated: Calibrated, built: Built, layers: Sequence[OutputAccuracy]
) -> tuple[TensorRow, ...]:
    """The rows of a target's ranges, the `WORST` of them with their histogram.

    A range that is another tensor's, as of a pool's output, or was found on nothing that is kept
    has neither a share nor a histogram.
    """
    seen = dict(_seen(calibrated, built))
    reaches = calibrated.subject.reaches
    clipped = {
        name: clipped_share(recorder, built.ranges[name], reaches.get(name, EVERYWHERE))
        for name, (_, recorder) in seen.items()
        if isinstance(recorder, Histogram)
    }
    rows = tensor_rows(built.ranges, clipped=clipped, layers=layers)
    losing = sorted((row for row in rows if row.name in seen), key=lambda row: -(row.clipped or 0))
    drawn = {row.name for row in worst_first(losing)[:WORST]}
    return tuple(
        _drawn(row, *seen[row.name], calibrated, built) if row.name in drawn else row
        for row in rows
    )


def clipped_share(histogram: Histogram, scale: Scale, seen: Reach = EVERYWHERE) -> float:
    """Share of the values in bins that lie wholly outside [lo, hi]; 0 to 1.

    Args:
        histogram: of the tensor.
        scale: its range.
        seen: where its readers look; values outside, as below 0 before a Relu, are not lost.
    """
    edges, counts = histogram.edges(), histogram.signed()
    outside = (edges[1:] <= scale.lo) | (edges[:-1] >= scale.hi)
    outside &= (edges[1:] > seen.floor) & (edges[:-1] < seen.ceiling)
    outside &= (edges[1:] < min(scale.lo, 0)) | (edges[:-1] > max(scale.hi, 0))
    return float(np.sum(counts[outside])) / max(histogram.total, 1)


def _seen(
    calibrated: Calibrated, built: Built
) -> Iterator[tuple[str, tuple[Observation, Recorder]]]:
    """Tensor -> what its range was found on."""
    observed = calibrated.ranges.observed
    for observation in calibrated.wanted.get(built.target, ()):
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
    calibrated: Calibrated,
    built: Built,
) -> TensorRow:
    part = histogram_part(recorder)
    if part is None:
        return row
    others = _others(row, observation, calibrated, _grids(built))
    return replace(row, histogram=replace(part, others=tuple(others)))


def _others(
    row: TensorRow, observation: Observation, calibrated: Calibrated, grids: Mapping[str, Grid]
) -> Iterator[RangeRow]:
    """What the searches of the same histogram find, but for the one that stands.

    Those that take long are told where they were asked for, as when the best one was looked for.
    """
    symmetric = any(grid.symmetric for grid in grids.values())
    for method in (*comparable(Method.of()), Method.of("entropy")):
        if method.statistic != observation.statistic or (FP8.name in grids and method.integer):
            continue
        ranges, grid = calibrated.ranges.choosing(Choices(method=method)), grids.get(FP8.name)
        scale = ranges.known(observation, symmetric=grid)
        if scale is None and method.name in _QUICK:
            scale = ranges.of([observation], symmetric=grid).scales.get(observation.tensor)
        if scale is not None and scale.method != row.method:
            ends = (-scale.amax, scale.amax) if symmetric else (scale.lo, scale.hi)
            yield RangeRow(method=scale.method, lo=ends[0], hi=ends[1])


def _grids(built: Built) -> dict[str, Grid]:
    """What its nodes run on where they left float."""
    names = {d.precision for d in built.decisions if d.quantized} & set(GRIDS)
    return {name: GRIDS[name] for name in sorted(names)}
