"""From what the pipeline found to a `Report`, and the report to its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrators.histogram import Histogram
from calibrators.scales import Scale
from deploy import atomic
from deploy.machine import this_machine
from deploy.report import (
    CalibrationPart,
    FeedPart,
    FileRow,
    GroupRow,
    ModelPart,
    Report,
    TargetPart,
    WorkPart,
    node_rows,
    tensor_rows,
    to_html,
    to_json,
    to_markdown,
)
from deploy.targets.base import Built
from deploy.tensors import TensorSpec

if TYPE_CHECKING:
    from deploy.measure import Figures
    from deploy.metrics.accuracy import OutputAccuracy
    from deploy.pipeline import Calibrated


def write_report(
    calibrated: Calibrated,
    built: Sequence[Built],
    figures: Figures,
    folder: Path,
    *,
    groups: Sequence[GroupRow] = (),
    work: WorkPart | None = None,
) -> Report:
    """Gather the report and write it as report.json, report.md and report.html."""
    report = gather(calibrated, built, figures, folder, groups=groups, work=work)
    text = json.dumps(to_json(report), indent=1, allow_nan=False)
    atomic.write_text(folder / "report.json", text + "\n")
    atomic.write_text(folder / "report.md", to_markdown(report))
    atomic.write_text(folder / "report.html", to_html(report))
    return report


def gather(
    calibrated: Calibrated,
    built: Sequence[Built],
    figures: Figures,
    folder: Path,
    *,
    groups: Sequence[GroupRow] = (),
    work: WorkPart | None = None,
) -> Report:
    """Everything that was found, as one value.

    Args:
        calibrated: the calibration.
        built: what each target made, or why it failed.
        figures: what was measured.
        folder: where the report is written.
        groups: what was observed, and which of it was reused.
        work: what the run cost.
    """
    loaded, feed = calibrated.loaded, calibrated.feed
    manifest = feed.manifest()
    cache = {} if calibrated.cache is None else {"calibration cache": calibrated.cache}
    report_page = FileRow(role="report", path=str(folder / "report.html"))
    return Report(
        title=f"calib8: {loaded.name} in int8 for {', '.join(r.target for r in built)}",
        model=ModelPart(
            path=str(loaded.source or loaded.name),
            opset=_opset(calibrated),
            nodes=len(loaded.model.graph.node),
            inputs=tuple(_words(spec) for spec in loaded.inputs),
            outputs=tuple(_words(spec) for spec in loaded.outputs),
            notes=loaded.notes,
        ),
        feed=FeedPart(
            source=calibrated.images,
            samples=feed.count,
            preprocess=manifest.get("preprocess") or {},
            skipped=feed.skipped,
            digest=manifest.get("sha256"),
        ),
        calibration=_calibration(calibrated, built, groups),
        targets=tuple(_target(calibrated, r, _layers(built, figures, r)) for r in built),
        engines=figures.engines,
        machine=this_machine(),
        files=(*_files(cache), report_page),
        work=work,
        notes=(*feed.notes, *_troubles(calibrated), *figures.notes),
    )


def _calibration(
    calibrated: Calibrated, built: Sequence[Built], groups: Sequence[GroupRow]
) -> CalibrationPart:
    asked = calibrated.method.label
    used = {result.method for result in built if result.method}
    return CalibrationPart(
        method=asked if asked in used or not used else "",
        reused=calibrated.reused,
        reason=calibrated.reason,
        seconds=None if calibrated.reused else calibrated.seconds,
        cache=str(calibrated.cache) if calibrated.cache else None,
        groups=tuple(groups),
    )


def _target(calibrated: Calibrated, built: Built, layers: tuple[OutputAccuracy, ...]) -> TargetPart:
    return TargetPart(
        name=built.target,
        method=built.method,
        reused=calibrated.reused and not built.error,
        nodes=node_rows(built.decisions),
        tensors=tensor_rows(
            built.ranges, clipped=_clipped(calibrated, built.ranges), layers=layers
        ),
        layers=layers,
        files=_files(built.files),
        notes=built.notes,
        error=built.error,
    )


def _layers(built: Sequence[Built], figures: Figures, one: Built) -> tuple[OutputAccuracy, ...]:
    """Figures of inner tensors; they are of the first target that ONNX Runtime can run."""
    judged = next((result for result in built if result.runnable is not None), None)
    return figures.layers if one is judged else ()


def _files(files: Mapping[str, Path]) -> tuple[FileRow, ...]:
    return tuple(
        FileRow(role=role, path=str(path), size_bytes=path.stat().st_size)
        for role, path in files.items()
    )


def _troubles(calibrated: Calibrated) -> list[str]:
    """Tensors without a scale; their nodes stay float."""
    found = calibrated.calibration.troubles
    return [f"no scale for {name}: it {why}; its nodes stay float" for name, why in found.items()]


def _clipped(calibrated: Calibrated, ranges: Mapping[str, Scale]) -> dict[str, float]:
    """Share of each tensor's values outside its clip range, to a bin.

    Left out where the range was found on other values than the kept statistics are of, as where a
    target runs a variant of the model: their extremes differ.
    """
    statistics: Mapping[str, Histogram] = calibrated.calibration.statistics or {}
    return {
        name: clipped_share(statistics[name], scale)
        for name, scale in ranges.items()
        if name in statistics and statistics[name].minimum == scale.observed_min
        if statistics[name].maximum == scale.observed_max
    }


def clipped_share(histogram: Histogram, scale: Scale) -> float:
    """Share of the values in bins that lie wholly outside [lo, hi]; 0 to 1."""
    edges, counts = histogram.edges(), histogram.signed()
    outside = (edges[1:] <= scale.lo) | (edges[:-1] >= scale.hi)
    outside &= (edges[1:] < min(scale.lo, 0)) | (edges[:-1] > max(scale.hi, 0))
    return float(np.sum(counts[outside])) / max(histogram.total, 1)


def _opset(calibrated: Calibrated) -> int | None:
    imports = calibrated.loaded.model.opset_import
    return next((o.version for o in imports if o.domain in ("", "ai.onnx")), None)


def _words(spec: TensorSpec) -> str:
    shape = ",".join("?" if d is None else str(d) for d in spec.shape)
    return f"{spec.name} {spec.dtype} [{shape}]"
