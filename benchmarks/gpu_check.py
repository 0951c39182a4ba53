"""One command on a machine with an NVIDIA GPU: is TensorRT with our calibrators what we say it is?

    python -m benchmarks.gpu_check [--model MODEL --images PATH] [--out FOLDER]

With each calibrator that this TensorRT has (four from 8.5 to 10.16, none in 11) it lets TensorRT
calibrate on the GPU, holds TensorRT's cache against the one made here on the CPU, entry by entry,
builds the engine again from the cache, and compares its outputs with ONNX Runtime's. The Q/DQ model
is built too. Ends with a latency table, also as FOLDER/gpu_check.md and .json. Exit code 1 where
something is not as it should be, 77 where there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from deploy.targets.tensorrt.calibrate import calibrate

from calibrators.tensorrt import CLASSES, CudaMemory, calibrator
from deploy import atomic
from deploy.calibration import trt_cache
from deploy.calibration.trt_cache import CalibrationCache
from deploy.errors import SdkMissingError
from deploy.feed.feed import Feed, open_feed
from deploy.frontends import LoadedModel, load
from deploy.metrics.latency import Latency, measure
from deploy.ort import OrtSession
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.batches import whole_batches
from deploy.targets.tensorrt.builder import Engine, Settings, build_engine, profiles_for
from deploy.targets.tensorrt.cache_tools import cache_to_qdq, original_of
from deploy.targets.tensorrt.log import missing_tensors, sort_missing
from deploy.targets.tensorrt.session import TensorrtSession
from deploy.tensors import Array

ROOT = Path(__file__).parents[1]
# TensorRT's calibrator -> our search for the same cache; the first entropy calibrator has none.
SEARCHES = {"entropy2": "entropy", "minmax": "minmax", "legacy": "legacy"}
WORST_COSINE = 0.98  # of an int8 engine's outputs to the float model's
EQUAL = 1e-5  # relative: a few ulp, from another order of summation
AGREEMENT = 0.9  # share of entropy2's and minmax's entries that must be equal


@dataclass(frozen=True)
class Case:
    """The model under check and its calibration batches."""

    path: Path
    loaded: LoadedModel
    feed: Feed
    batch: int

    def batches(self) -> Iterator[dict[str, Array]]:
        """Whole batches only, as TensorRT calibrates with one shape."""
        return whole_batches(self.feed.samples(), self.batch // self.feed.batch)

    def settings(self, batch: int, **options: Any) -> Settings:
        """Settings whose profile is tuned for `batch`."""
        sample = next(iter(self.feed.samples()))
        shapes = {spec.name: spec.shape for spec in self.loaded.inputs}
        fed = {n: (batch, *a.shape[1:]) for n, a in sample.items()}
        return Settings(profiles=profiles_for(shapes, fed, most_batch=self.batch), **options)


@dataclass
class Finding:
    """What was found of one engine."""

    name: str
    equal: int | None = None
    entries: int | None = None
    worst: str = ""
    cosine: float = 0.0
    harmful: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    latency: Latency | None = None


def main(arguments: list[str] | None = None) -> int:
    """Run the check; gives the exit code."""
    options = _options(arguments)
    try:
        here = sdk.find()
    except SdkMissingError as error:
        print(f"nothing to check on: {error}")
        return 77
    loaded = load(options.model, fold_batchnorm=False)
    feed = open_feed(options.images, loaded.inputs, limit=options.limit)
    fixed = isinstance(loaded.inputs[0].shape[0], int)
    case = Case(options.model, loaded, feed, feed.batch if fixed else options.batch_size)
    print(f"TensorRT {here.version} on {here.gpu}: {options.model.name}, {feed.count} images")
    options.out.mkdir(parents=True, exist_ok=True)
    findings, sessions = check(case, here, options.out)
    print(table(findings))
    report = f"TensorRT {here.version}, {here.gpu}, {options.model.name}\n\n{table(findings)}\n"
    atomic.write_text(options.out / "gpu_check.md", report)
    latencies = {f.name: f.latency.to_json() for f in findings if f.latency is not None}
    atomic.write_text(options.out / "gpu_check.json", json.dumps(latencies, indent=1) + "\n")
    del sessions
    return 1 if any(finding.wrong for finding in findings) else 0


def check(case: Case, here: sdk.Sdk, out: Path) -> tuple[list[Finding], dict[str, TensorrtSession]]:
    """Every engine that this TensorRT can build from the case."""
    findings: list[Finding] = []
    engines: dict[str, Engine] = {}
    reference = calibrate(
        case.loaded.model,
        case.feed.samples,
        version=_plain(here.version) if here.calibrators else "10.3.0",
        batch_size=case.batch // case.feed.batch,
        original=original_of(case.path),
        parser="onnx",
    ).cache
    if here.calibrators:
        for algorithm in CLASSES:
            finding, engines[algorithm] = calibrated_by(case, algorithm)
            findings.append(finding)
        engines["fp16"] = build_engine(case.path, case.settings(1, int8=False))
        findings.append(Finding("fp16"))
    quantized, _ = cache_to_qdq(case.path, reference)
    qdq = atomic.write_bytes(out / "check.qdq.onnx", quantized.SerializeToString())
    engines["Q/DQ"] = build_engine(qdq, case.settings(1))
    findings.append(Finding("Q/DQ"))
    sessions = {}
    for name, engine in engines.items():
        path = atomic.write_bytes(out / f"{name.replace('/', '')}.engine", engine.plan)
        sessions[name] = TensorrtSession.open(path)
    sessions["Q/DQ, CUDA graph"] = TensorrtSession.open(out / "QDQ.engine", cuda_graph=True)
    findings.append(Finding("Q/DQ, CUDA graph"))
    _compare(case, findings, sessions)
    return findings, sessions


def calibrated_by(case: Case, algorithm: str) -> tuple[Finding, Engine]:
    """Let TensorRT calibrate; hold its cache against ours; build again from its cache."""
    shapes = {name: array.shape for name, array in next(case.batches()).items()}
    count = sum(1 for _ in case.batches())
    first = calibrator(algorithm, case.batches(), batches=count, shapes=shapes, memory=CudaMemory())
    built = build_engine(case.path, case.settings(case.batch), calibrator=first)
    assert built.cache is not None
    theirs = trt_cache.parse(built.cache, origin=f"TensorRT's {algorithm} cache")
    finding = Finding(algorithm, entries=len(theirs.entries))
    if algorithm in SEARCHES:
        _hold(finding, theirs, _ours(case, theirs, SEARCHES[algorithm]))
    judged = sort_missing(missing_tensors(built.log), load(case.path).model)
    finding.harmful = [item.tensor for item in judged if item.harmful]
    # Again from the cache, with no data at all: TensorRT must not ask for a batch.
    second = calibrator(
        algorithm, (), batches=count, shapes=shapes, memory=CudaMemory(), known=built.cache
    )
    return finding, build_engine(case.path, case.settings(1), calibrator=second)


def _ours(case: Case, theirs: CalibrationCache, method: str) -> CalibrationCache:
    whole = (len(case.feed) * case.feed.batch // case.batch) * case.batch // case.feed.batch
    return calibrate(
        case.loaded.model,
        lambda: islice(case.feed.samples(), whole),
        version=theirs.header.version or _plain(sdk.find().version),
        method=method,
        batch_size=case.batch // case.feed.batch,
        original=original_of(case.path),
        parser="onnx",
    ).cache


def _hold(finding: Finding, theirs: CalibrationCache, ours: CalibrationCache) -> None:
    """Compare entry by entry; constants, which only TensorRT lists, are left out."""
    a, b = theirs.scales(), ours.scales()
    lacking = [name for name in b if name not in a]
    if lacking:
        finding.wrong.append(f"{len(lacking)} of our names are not TensorRT's: {lacking[:3]}")
    both = [name for name in a if name in b]
    off = {n: abs(float(b[n]) / float(a[n]) - 1) if a[n] else float(b[n] != 0) for n in both}
    finding.equal, finding.entries = sum(v <= EQUAL for v in off.values()), len(both)
    if off:
        name = max(off, key=lambda n: off[n])
        finding.worst = f"{name} {off[name]:.2%}"
    print(f"\n{finding.name}: {theirs.header.text}")
    for name in both:
        if off[name] > EQUAL:
            print(f"  {float(a[name]):.8g} {float(b[name]):.8g} {off[name]:9.4%}  {name}")
    if finding.name != "legacy" and finding.equal < AGREEMENT * len(both):
        finding.wrong.append(f"only {finding.equal} of {len(both)} scales are TensorRT's")


def _compare(case: Case, findings: list[Finding], sessions: Mapping[str, TensorrtSession]) -> None:
    """Outputs against ONNX Runtime's, then latency side by side."""
    reference = OrtSession.open(case.path, threads=4)
    samples = [dict(sample) for sample in islice(case.feed.samples(), 32)]
    wanted = [reference.run(sample) for sample in samples]
    for finding in findings:
        got = [sessions[finding.name].run(sample) for sample in samples]
        finding.cosine = min(
            _cosine(w[name], g[name]) for w, g in zip(wanted, got, strict=True) for name in w
        )
        if finding.cosine < WORST_COSINE:
            finding.wrong.append(f"an output's cosine is {finding.cosine:.4f}")
    latencies = measure(dict(sessions), samples[:8])
    for finding in findings:
        finding.latency = latencies[finding.name]


def _cosine(a: Array, b: Array) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-30))


def table(findings: list[Finding]) -> str:
    """Markdown: one line an engine, latency in ms."""
    head = (
        "| engine | scales equal to ours | worst | worst cosine | harmful missing scales"
        " | p50 | p99 | H2D | compute | D2H | enqueue | queries/s |"
    )
    lines = [head, "|---|" + "---|" * 11]
    for f in findings:
        equal = "" if f.equal is None else f"{f.equal} of {f.entries}"
        cells = [f.name, equal, f.worst, f"{f.cosine:.5f}", str(len(f.harmful))]
        if f.latency is not None:
            stages = (f.latency.h2d, f.latency.gpu_compute, f.latency.d2h, f.latency.enqueue)
            cells += [f"{f.latency.latency.p50:.4f}", f"{f.latency.latency.p99:.4f}"]
            cells += [f"{s.p50:.4f}" if s is not None else "" for s in stages]
            cells.append(f"{f.latency.throughput_qps:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [f"- {f.name}: {text}" for f in findings for text in f.wrong]
    return "\n".join([*lines, "", *(wrong or ["Everything is as it should be."])])


def _plain(version: str) -> str:
    return ".".join(version.split(".")[:3])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    fashion = ROOT / "datasets" / "fashion"
    parser.add_argument("--model", type=Path, default=fashion / "fashion.onnx")
    parser.add_argument("--images", default=str(fashion / "calib"))
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
