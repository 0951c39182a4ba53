"""One command on a machine with an NVIDIA GPU: is TensorRT with our calibrators what we say it is?

    python -m benchmarks.gpu_check [--model MODEL --images PATH] [--out FOLDER]

With each calibrator that this TensorRT has (four from 8.5 to 10.16, none in 11) it lets TensorRT
calibrate on the GPU, in float32, holds TensorRT's cache against the one made here on the CPU, entry
by entry, builds the engine again from the cache, and compares its outputs with ONNX Runtime's. The
Q/DQ model is built too, and float32 and float16 engines to measure by. What fails is said in its
row, and all else is still measured. Ends with a table, also as FOLDER/gpu_check.md and .json. Exit
code 1 where something is not as it should be, 77 where there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from calibrators.tensorrt import CLASSES, calibrator
from deploy.calibration import trt_cache
from deploy.calibration.observation import full_batches
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.trt_cache import CalibrationCache
from deploy.errors import SdkMissingError
from deploy.feed.feed import open_feed
from deploy.feed.samples import Feed
from deploy.files import atomic
from deploy.frontends import LoadedModel, load
from deploy.method import Method
from deploy.metrics.latency import Latency, measure
from deploy.pipeline import calibrate
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import builder, sdk
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine, profiles_for
from deploy.targets.tensorrt.cache_tools import cache_to_qdq
from deploy.targets.tensorrt.cuda import CudaMemory
from deploy.targets.tensorrt.sdk import gpu, missing_tensors, sort_missing
from deploy.targets.tensorrt.session import TensorrtSession, describe_device
from deploy.tensors import Array, Session

ROOT = Path(__file__).parents[1]
# TensorRT's calibrator -> our search for the same cache; the first entropy calibrator has none.
SEARCHES = {"entropy2": "entropy-tensorrt", "minmax": "minmax", "legacy": "legacy"}
COSINE = 0.98  # mean, of an int8 engine's outputs to the float model's; single images are noisier
EQUAL = 1e-5  # relative: a few ulp, from another order of summation
# Relative, of entropy2's and minmax's scales. A GPU sums in another order than a CPU; that moves a
# maximum by ulps, and now and then a value to the next bin, so that single entries say little.
MEDIAN = 1e-3
JUDGED = ("entropy2", "minmax")
GRAPH = "Q/DQ, CUDA graph"


@dataclass(frozen=True)
class Case:
    """The model under check and its calibration batches."""

    path: Path
    loaded: LoadedModel
    feed: Feed
    batch: int

    def batches(self) -> Iterator[dict[str, Array]]:
        """Whole batches only, as TensorRT calibrates with one shape."""
        return full_batches(self.feed.samples(), self.batch // self.feed.batch)

    def settings(self, batch: int, **options: Any) -> BuilderSettings:
        """Settings whose profile is tuned for `batch`."""
        sample = next(iter(self.feed.samples()))
        shapes = {spec.name: spec.shape for spec in self.loaded.inputs}
        fed = {n: (batch, *a.shape[1:]) for n, a in sample.items()}
        return BuilderSettings(profiles=profiles_for(shapes, fed, most_batch=self.batch), **options)


@dataclass
class Finding:
    """What was found of one engine.

    Attributes:
        name: of the engine.
        entries: scales that both caches have.
        equal: those of them that are equal but for rounding.
        median: of their relative differences.
        worst: the tensor that differs most, and by how much.
        only_theirs, only_ours: names in but one of the caches.
        cosine: mean, of every output of every sample to ONNX Runtime's in float.
        worst_cosine: the least of them.
        same_top1: share of samples with the same greatest value of the first output.
        harmful: tensors without a scale that cost an int8 layer.
        wrong: what is not as it should be, in sentences.
        latency: measured with the other engines in turn.
    """

    name: str
    entries: int | None = None
    equal: int | None = None
    median: float | None = None
    worst: str = ""
    only_theirs: list[str] = field(default_factory=list)
    only_ours: list[str] = field(default_factory=list)
    cosine: float | None = None
    worst_cosine: float | None = None
    same_top1: float | None = None
    harmful: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    latency: Latency | None = None


Maker = Callable[[Finding], bytes]


def main(arguments: list[str] | None = None) -> int:
    """Run the check; gives the exit code."""
    options = _options(arguments)
    try:
        here = sdk.find_sdk()
    except SdkMissingError as error:
        print(f"nothing to check on: {error}")
        return 77
    loaded = load(options.model, fold_batchnorm=False)
    feed = open_feed(options.images, loaded.inputs, limit=options.limit)
    fixed = isinstance(loaded.inputs[0].shape[0], int)
    case = Case(options.model, loaded, feed, feed.batch if fixed else options.batch_size)
    title = f"{machine(here)}; {options.model.name}, {feed.count} images"
    print(title)
    options.out.mkdir(parents=True, exist_ok=True)
    findings = check(case, makers(case, here, options.out), options.out)
    print(table(findings))
    atomic.write_text(options.out / "gpu_check.md", f"{title}\n\n{table(findings)}\n")
    document = {"machine": title, "engines": [_json(finding) for finding in findings]}
    atomic.write_text(options.out / "gpu_check.json", json.dumps(document, indent=1) + "\n")
    return 1 if any(finding.wrong for finding in findings) else 0


def machine(here: sdk.Sdk) -> str:
    """TensorRT, GPU and driver, and what TensorRT does without."""
    text = describe_device(here, gpu(0)).words
    return f"{text}, no tactics of {', '.join(here.stand_ins)}" if here.stand_ins else text


def makers(case: Case, here: sdk.Sdk, out: Path) -> dict[str, Maker]:
    """Name of an engine -> how it is built, for all that this TensorRT can build."""
    plain = case.settings(1, int8=False, fp16=False)
    made: dict[str, Maker] = {"fp32": partial(_float_engine, case, plain)}
    if here.calibrators:
        made["fp16"] = partial(_float_engine, case, replace(plain, fp16=True))
        made |= {name: partial(calibrated_by, case, name) for name in CLASSES}
    version = _plain(here.version) if here.calibrators else "10.3.0"
    return made | {"Q/DQ": partial(_explicit, case, version, out)}


def check(case: Case, making: Mapping[str, Maker], out: Path) -> list[Finding]:
    """Build, run and time every engine; what fails is said, and the others go on."""
    findings = {name: Finding(name) for name in (*making, GRAPH)}
    sessions: dict[str, Session] = {}
    for name, make in making.items():
        path = out / f"{name.replace('/', '')}.engine"
        path.unlink(missing_ok=True)  # of an earlier check
        with _noted(findings[name]):
            atomic.write_bytes(path, make(findings[name]))
            sessions[name] = TensorrtSession.open(path)
            print(f"{name}: built", flush=True)  # TensorRT may yet end the process in a later one
    with _noted(findings[GRAPH]):
        sessions[GRAPH] = TensorrtSession.open(out / "QDQ.engine", cuda_graph=True)
    _compare(case, findings, sessions)
    timing = Finding("latency")
    with _noted(timing):
        _time(case, findings, sessions)
    return [*findings.values(), *([timing] if timing.wrong else [])]


def _time(case: Case, findings: Mapping[str, Finding], sessions: Mapping[str, Session]) -> None:
    """Time the engines that could run, in turns."""
    fine = {name: sessions[name] for name in sessions if findings[name].cosine is not None}
    feeds = [dict(sample) for sample in islice(case.feed.samples(), 8)]
    for name, latency in (measure(fine, feeds) if fine else {}).items():
        findings[name].latency = latency


@contextmanager
def _noted(finding: Finding) -> Iterator[None]:
    """Whatever breaks one engine is written down, so that the others are still seen."""
    try:
        yield
    except Exception as error:
        finding.wrong.append(f"{type(error).__name__}: {error}")


def _float_engine(case: Case, settings: BuilderSettings, finding: Finding) -> bytes:
    return build_engine(case.path, settings).plan


def _explicit(case: Case, version: str, out: Path, finding: Finding) -> bytes:
    """The engine of the Q/DQ model with our scales."""
    reference = _ours(case, version, SEARCHES["entropy2"])
    quantized, _ = cache_to_qdq(case.path, reference)
    path = atomic.write_bytes(out / "check.qdq.onnx", quantized.SerializeToString())
    return build_engine(path, case.settings(1)).plan


def calibrated_by(case: Case, algorithm: str, finding: Finding) -> bytes:
    """Let TensorRT calibrate; hold its cache against ours; build again from its cache."""
    shapes = {name: array.shape for name, array in next(case.batches()).items()}
    count = sum(1 for _ in case.batches())
    live = calibrator(
        algorithm, case.batches(), batches=count, shapes=shapes, memory=CudaMemory(gpu())
    )
    cache = builder.calibrate(case.path, case.settings(case.batch), live)
    theirs = trt_cache.parse(cache, origin=f"TensorRT's {algorithm} cache")
    if algorithm in SEARCHES:
        with _noted(finding):
            version = theirs.header.version or _plain(sdk.find_sdk().version)
            _hold(finding, theirs, _ours(case, version, SEARCHES[algorithm]))
    # Again from the cache, with no data at all: TensorRT must not ask for a batch.
    again = calibrator(
        algorithm, (), batches=count, shapes=shapes, memory=CudaMemory(gpu()), known=cache
    )
    engine = build_engine(case.path, case.settings(1), calibrator=again)
    judged = sort_missing(missing_tensors(engine.log), load(case.path).model)
    finding.harmful = [item.tensor for item in judged if item.harmful]
    return engine.plan


def _ours(case: Case, version: str, method: str) -> CalibrationCache:
    """The cache that we make on the CPU of the images in TensorRT's whole batches."""
    whole = (len(case.feed) * case.feed.batch // case.batch) * case.batch // case.feed.batch
    first = {"batch_size": case.batch} if method == "entropy-tensorrt" else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ours.cache"
        calibrate(
            case.path,
            list(islice(case.feed.samples(), whole)),
            targets=["tensorrt"],
            method=Method.of(method, first),
            cache=CachePolicy(path=path, trt_version=version),
        )
        return trt_cache.parse(path.read_bytes(), origin="our cache")


def _hold(finding: Finding, theirs: CalibrationCache, ours: CalibrationCache) -> None:
    """Compare entry by entry; constants, which only TensorRT lists, are in `only_theirs`."""
    a, b = theirs.scales(), ours.scales()
    finding.only_theirs = [name for name in a if name not in b]
    finding.only_ours = [name for name in b if name not in a]
    off = {n: _difference(float(a[n]), float(b[n])) for n in a if n in b}
    _print(finding, theirs, ours, off)
    if finding.only_ours:
        count, some = len(finding.only_ours), finding.only_ours[:3]
        finding.wrong.append(f"{count} of our names are not TensorRT's: {some}")
    finding.equal, finding.entries = sum(v <= EQUAL for v in off.values()), len(off)
    if not off:
        finding.wrong.append("no name is in both caches")
        return
    finding.median, worst = statistics.median(off.values()), max(off, key=lambda n: off[n])
    finding.worst = f"{off[worst]:.3%} {worst}"
    if finding.name in JUDGED and finding.median > MEDIAN:
        finding.wrong.append(
            f"the median scale is {finding.median:.3%} off, {MEDIAN:.1%} is allowed"
        )


def _difference(theirs: float, ours: float) -> float:
    """Relative; equal values differ by nothing, zero and infinity included."""
    if theirs == ours:
        return 0.0
    return abs(ours / theirs - 1) if theirs and np.isfinite(theirs) else float("inf")


def _print(
    finding: Finding, theirs: CalibrationCache, ours: CalibrationCache, off: Mapping[str, float]
) -> None:
    """Every entry that differs, and the names that only one cache has."""
    a, b = theirs.scales(), ours.scales()
    print(f"\n{finding.name}: {theirs.header.text}; TensorRT's scale, ours, difference, tensor")
    for name, difference in off.items():
        if difference > EQUAL:
            print(f"  {float(a[name]):.8g} {float(b[name]):.8g} {difference:9.4%}  {name}")
    print(f"  only TensorRT's: {finding.only_theirs}")
    print(f"  only ours: {finding.only_ours}")


def _compare(case: Case, findings: Mapping[str, Finding], sessions: Mapping[str, Session]) -> None:
    """Outputs against ONNX Runtime's in float."""
    reference = OrtSession.open(case.path, threads=4)
    samples = [dict(sample) for sample in islice(case.feed.samples(), 256)]
    wanted = [reference.run(sample) for sample in samples]
    for name, session in sessions.items():
        with _noted(findings[name]):
            _near(findings[name], wanted, [session.run(sample) for sample in samples])


def _near(
    finding: Finding, wanted: Sequence[Mapping[str, Array]], got: Sequence[Mapping[str, Array]]
) -> None:
    """Enter how near the outputs are, one mapping a sample."""
    pairs = list(zip(wanted, got, strict=True))
    found = [_cosine(w[name], g[name]) for w, g in pairs for name in w]
    finding.cosine, finding.worst_cosine = float(np.mean(found)), float(np.min(found))
    first = next(iter(wanted[0]))
    if wanted[0][first].ndim == 2:
        same = [w[first].argmax(1) == g[first].argmax(1) for w, g in pairs]
        finding.same_top1 = float(np.concatenate(same).mean())
    if not finding.cosine >= COSINE:  # NaN is wrong too
        finding.wrong.append(f"the outputs' mean cosine is {finding.cosine:.4f}")


def _cosine(a: Array, b: Array) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-30))


def table(findings: list[Finding]) -> str:
    """Markdown: one line an engine, latency in ms."""
    head = (
        "| engine | scales equal to ours | median | worst | cosine | worst | same top-1"
        " | harmful missing scales | p50 | p99 | H2D | compute | D2H | enqueue | queries/s |"
    )
    lines = [head, "|---|" + "---|" * 14]
    for f in findings:
        equal = "" if f.equal is None else f"{f.equal} of {f.entries}"
        cells = [f.name, equal, _figure(f.median, ".4%"), f.worst]
        cells += [_figure(f.cosine, ".5f"), _figure(f.worst_cosine, ".5f")]
        cells += [_figure(f.same_top1, ".2%"), str(len(f.harmful)), *_times(f.latency)]
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [f"- {f.name}: {text}" for f in findings for text in f.wrong]
    return "\n".join([*lines, "", *(wrong or ["Everything is as it should be."])])


def _times(latency: Latency | None) -> list[str]:
    """The last seven cells of a row."""
    if latency is None:
        return [""] * 7
    stages = (latency.h2d, latency.gpu_compute, latency.d2h, latency.enqueue)
    return [
        *(f"{value:.4f}" for value in (latency.latency.p50, latency.latency.p99)),
        *(_figure(stage.p50 if stage is not None else None, ".4f") for stage in stages),
        f"{latency.throughput_qps:.0f}",
    ]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _json(finding: Finding) -> dict[str, Any]:
    latency = finding.latency.to_json() if finding.latency is not None else None
    return asdict(replace(finding, latency=None)) | {"latency": latency}


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
