"""From what the pipeline found to a `Report`, and the report to its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    ModelPart,
    NodeRow,
    Report,
    tensor_rows,
    to_html,
    to_json,
    to_markdown,
)
from deploy.targets.base import Built
from deploy.tensors import TensorSpec

if TYPE_CHECKING:
    from deploy.measure import Figures
    from deploy.pipeline import Calibrated


def write_report(
    calibrated: Calibrated, built: Sequence[Built], figures: Figures, folder: Path
) -> Report:
    """Gather the report and write it as report.json, report.md and report.html."""
    report = gather(calibrated, built, figures, folder)
    text = json.dumps(to_json(report), indent=1, allow_nan=False)
    atomic.write_text(folder / "report.json", text + "\n")
    atomic.write_text(folder / "report.md", to_markdown(report))
    atomic.write_text(folder / "report.html", to_html(report))
    return report


def gather(
    calibrated: Calibrated, built: Sequence[Built], figures: Figures, folder: Path
) -> Report:
    """Everything that was found, as one value."""
    loaded, feed = calibrated.loaded, calibrated.feed
    manifest = feed.manifest()
    files = {role: path for result in built for role, path in result.files.items()}
    if calibrated.cache is not None:
        files["calibration cache"] = calibrated.cache
    rows = [FileRow(role=r, path=str(p), size_bytes=p.stat().st_size) for r, p in files.items()]
    rows.append(FileRow(role="report", path=str(folder / "report.html")))
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
        calibration=_calibration(calibrated),
        nodes=tuple(
            NodeRow(name=d.node, op=d.op_type, int8=d.int8, reason=d.reason)
            for d in (built[0].decisions if built else ())
        ),
        tensors=tensor_rows(
            calibrated.found.scales,
            clipped=_clipped(calibrated),
            layers=figures.layers,
        ),
        engines=figures.engines,
        layers=figures.layers,
        machine=this_machine(),
        files=tuple(rows),
        notes=(*feed.notes, *_troubles(calibrated), *figures.notes),
    )


def _calibration(calibrated: Calibrated) -> CalibrationPart:
    return CalibrationPart(
        method=calibrated.method.label,
        reused=calibrated.reused,
        reason=calibrated.reason,
        seconds=None if calibrated.reused else calibrated.seconds,
        cache=str(calibrated.cache) if calibrated.cache else None,
    )


def _troubles(calibrated: Calibrated) -> list[str]:
    """Tensors without a scale; their nodes stay float."""
    found = calibrated.found.reasons
    return [f"no scale for {name}: it {why}; its nodes stay float" for name, why in found.items()]


def _clipped(calibrated: Calibrated) -> dict[str, float]:
    """Share of each tensor's values outside its clip range, to a bin."""
    if calibrated.ranges.trusted is not None:
        return {}
    scales = calibrated.found.scales
    histograms = {o.tensor: calibrated.ranges.histogram(o) for o in calibrated.searched}
    return {name: clipped_share(histograms[name], scale) for name, scale in scales.items()}


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
