"""The first run on an NVIDIA GPU: builds, checks and times what users get, as a table for the docs.

    python -m benchmarks.gpu_check [--model MODEL --images PATH] [--preprocess PRESET]
                                   [--mean X] [--std X] [--only ROW,...] [--out FOLDER]

Rows: TensorRT's FP32 and FP16; what `calib8 build` makes (int8 and FP8 typed; up to TensorRT 10 by
the cache), also by `trtexec` from the script of the build, where it is on the PATH; int8 with the
search, whose splits are timed on the GPU; and, up to 10, `--calibrator` with each of TensorRT's
own, its cache held against ours entry by entry. Each row is a try of its own: what fails is one
sentence. FOLDER/gpu_check.md has the table from the first row on: a build takes up to a minute.
Exit code 1 if a row failed or is not as it should be, 77 where there is no GPU to check on.
"""

import argparse
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from calib8 import build
from calibrators.tensorrt import CLASSES
from deploy.calibration.trt_cache import CalibrationCache
from deploy.errors import BackendError, SdkMissingError, first_line
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.files import atomic
from deploy.frontends import load
from deploy.method import Method
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.latency import measure
from deploy.metrics.output_form import derive_form
from deploy.report.parts import SplitRow
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine
from deploy.targets.tensorrt.cache_tools import compare_caches, read_cache
from deploy.targets.tensorrt.cuda import open_gpu
from deploy.targets.tensorrt.float_types import narrow_float_part
from deploy.targets.tensorrt.profiles import profiles_for
from deploy.targets.tensorrt.session import TensorrtSession, describe_device
from deploy.targets.tensorrt.target import TensorRT
from deploy.targets.tensorrt.trtexec import features_of
from deploy.tensors import Session
from deploy.tuning.search_options import Tuning

FASHION = Path(__file__).parents[1] / "datasets" / "fashion"
# TensorRT's calibrator -> our search for the same cache; the first entropy calibrator has none.
SEARCHES = {"entropy2": "entropy-tensorrt", "minmax": "minmax", "legacy": "legacy"}
COSINE = 0.98  # mean over the samples, of an engine's outputs to the float model's
EQUAL = 1e-5  # relative: a few ulp, from another order of summation
# Relative, of entropy2's and minmax's scales. A GPU sums in another order than a CPU; that moves a
# maximum by ulps, and now and then a value to the next bin, so that single entries say little.
MEDIAN = 1e-3
FP16, TYPED, GRAPH = "FP16", "int8 typed", "int8 typed in a CUDA graph"
SPLITS = "int8 by timed splits"
Maker = Callable[["Finding"], bytes]
HEAD = """\
| engine | p50 ms | speed of FP16 | trtexec ms | cosine | worst | same class | scales beside ours |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """The model under check, its images in whole batches, and the folder of all results."""

    path: Path
    images: str
    preprocess: PreprocessRequest
    batch: int
    out: Path
    feed: Feed
    title: str

    def store(self, findings: Sequence["Finding"]) -> None:
        """Write the table of the findings so far."""
        atomic.write_text(self.out / "gpu_check.md", f"{self.title}\n\n{table(findings)}\n")


@dataclass
class Finding:
    """A row: our p50, trtexec's median, outputs against ONNX Runtime's in float, scales, faults."""

    name: str
    ms: float | None = None
    trtexec_ms: float | None = None
    accuracy: Accuracy | None = None
    scales: str = ""
    wrong: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=FASHION / "fashion.onnx")
    parser.add_argument("--images", default=str(FASHION / "calib"))
    parser.add_argument("--preprocess", help="a preset, as of calib8 build")
    parser.add_argument("--mean", type=float, default=0.5, help="of the demo's classifier: 0.5")
    parser.add_argument("--std", type=float, default=0.5, help="of the demo's classifier: 0.5")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only", default="", help="names of rows, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    given = parser.parse_args(arguments)
    try:
        here = sdk.find_sdk()
    except SdkMissingError as error:
        print(f"nothing to check on: {error}")
        return 77
    inputs = load(given.model, fold_batchnorm=False).inputs
    batch = inputs[0].shape[0] if isinstance(inputs[0].shape[0], int) else given.batch_size
    preprocess: PreprocessRequest = given.preprocess
    if preprocess is None:
        preprocess = {"mean": (given.mean,), "std": (given.std,)}
    images_given = open_feed(given.images, inputs, preprocess=preprocess, limit=given.limit).count
    image_count = images_given // batch * batch  # whole batches, as TensorRT calibrates
    feed = open_feed(given.images, inputs, preprocess=preprocess, limit=image_count)
    device = describe_device(here, open_gpu(0)).description
    title = f"{device}; {given.model.name}, {image_count} images"
    case = Case(given.model, given.images, preprocess, batch, given.out, feed, title)
    making = makers(case, here)
    only = given.only.split(",") if given.only else making
    if unknown := {*only} - {*making}:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(making)}")
    findings = check(case, {name: making[name] for name in only})
    print(title, table(findings), sep="\n\n")
    return 1 if any(finding.wrong for finding in findings) else 0


def makers(case: Case, here: sdk.Sdk) -> dict[str, Maker]:
    """Return name -> how the engine is made, for all that this TensorRT is for."""
    features = features_of(here.release)
    made: dict[str, Maker] = {
        "FP32": partial(_float_engine, case, fp16=False, typed=False),
        FP16: partial(_float_engine, case, fp16=True, typed=features.typed),
    }
    line = "11" if not here.calibrators else "typed" if features.typed else "qdq"
    shipped = [(TYPED if features.typed else "int8 QDQ", TensorRT(form="qdq"), line)]
    shipped += [("FP8 typed", TensorRT(precision="fp8"), line)] if features.fp8 else []
    shipped += [("int8 by the cache", TensorRT(form="cache"), "cache")] if here.calibrators else []
    for name, target, line in shipped:
        made[name] = partial(_built, case, target, None)
        if shutil.which("trtexec"):
            made[f"{name} by trtexec"] = partial(_by_trtexec, case, name, line)
    made[SPLITS] = partial(_built, case, TensorRT(form="qdq"), None, effort=1)
    return made | {n: partial(_calibrated, case, n) for n in CLASSES if here.calibrators}


def check(case: Case, making: Mapping[str, Maker]) -> list[Finding]:
    """Make, run and time every engine; what fails is said, and the others go on."""
    findings = {name: Finding(name) for name in (*making, *([GRAPH] if TYPED in making else []))}
    reference, samples = OrtSession.open(case.path, threads=4), [*case.feed.spread_samples(256)]
    wanted = [reference.run(sample) for sample in samples]
    form = derive_form(wanted, inputs=samples)
    sessions: dict[str, Session] = {}
    for name, finding in findings.items():
        path = case.out / f"{TYPED if name == GRAPH else name}.engine"
        with _noted(finding):
            if name != GRAPH:
                path.unlink(missing_ok=True)  # of an earlier check
                atomic.write_bytes(path, making[name](finding))
            session = TensorrtSession.open(path, cuda_graph=name == GRAPH)
            comparison = Comparison(form)
            for sample, outputs in zip(samples, wanted, strict=True):
                comparison.add(sample, outputs, session.run(sample))
            finding.accuracy, sessions[name] = comparison.result(), session
            finding.wrong += finding.accuracy.problems
            least = min(output.cosine_mean for output in finding.accuracy.outputs)
            if not least >= COSINE:  # NaN is wrong too
                finding.wrong.append(f"the mean cosine is {least:.4f}, {COSINE} is demanded")
        # TensorRT may yet end the process in a later one
        case.store([one for one in findings.values() if one.accuracy or one.wrong])
    timing = Finding("time")
    with _noted(timing):
        for name, latency in (measure(sessions, samples[:8]) if sessions else {}).items():
            findings[name].ms = latency.latency.p50
    found = [*findings.values(), *([timing] if timing.wrong else [])]
    case.store(found)
    return found


@contextmanager
def _noted(finding: Finding) -> Iterator[None]:
    """Write down whatever breaks one engine, so that the others are still seen."""
    try:
        yield
    except Exception as error:
        finding.wrong.append(f"{type(error).__name__}: {first_line(error)}")


def _float_engine(case: Case, finding: Finding, *, fp16: bool, typed: bool) -> bytes:
    """Build a float engine; `typed`: FP16 from a float16 model, not by a builder flag."""
    loaded, path, (sample,) = load(case.path), case.path, case.feed.first_samples(1)
    shapes, fed = {i.name: i.shape for i in loaded.inputs}, {n: a.shape for n, a in sample.items()}
    profiles = profiles_for(shapes, fed, max_batch=case.batch)
    if typed:
        narrow, _ = narrow_float_part(loaded.model, "fp16", {})
        path = atomic.write_bytes(case.out / "fp16.onnx", narrow.SerializeToString())
    settings = BuilderSettings(int8=False, fp16=fp16, typed=typed, profiles=profiles)
    return build_engine(path, settings).plan


def _built(
    case: Case, target: TensorRT, method: Method | None, finding: Finding, effort: int = 0
) -> bytes:
    """Return the engine of `calib8 build`; with an effort its splits must be timed on this GPU."""
    folder, how = case.out / finding.name, {"limit": case.feed.count, "method": method}
    duration_s = 1 if effort > 0 else 0  # a build that times nothing predicts its splits' times
    tuning = Tuning(effort=effort, fresh=True)
    how |= {"targets": [target], "duration_s": duration_s, "tuning": tuning}
    report = build(case.path, case.images, preprocess=case.preprocess, out=folder, **how)
    print(*(n for n in report.targets[0].notes if n.startswith("TensorRT has no scale")), sep="\n")
    if not (engine := folder / f"{case.path.stem}.engine").exists():
        raise BackendError(report.targets[0].error or "; ".join(report.targets[0].notes))
    search = report.targets[0].search
    if search is not None:
        hold_split_times(finding, search.front)
    return engine.read_bytes()


def _by_trtexec(case: Case, name: str, line: str, finding: Finding) -> bytes:
    """Return the engine of trtexec by a line of the build's script; note trtexec's own time."""
    folder = shutil.copytree(case.out / name, case.out / finding.name, dirs_exist_ok=True)
    engine = folder / f"{case.path.stem}.engine"
    engine.unlink(missing_ok=True)
    command = ["sh", str(folder / f"{case.path.stem}_trtexec.sh"), line]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = re.findall(r".*\[E\] *(.*)", done.stdout + done.stderr)
        raise BackendError(f"trtexec ended with {done.returncode}: {' | '.join(errors[:2])}")
    found = re.search(r"\] Latency: .*median = ([\d.]+) ms", done.stdout)
    finding.trtexec_ms = float(found[1]) if found else None
    return engine.read_bytes()


def _calibrated(case: Case, name: str, finding: Finding) -> bytes:
    """Let TensorRT calibrate, and hold its cache against ours."""
    options = {"batch_size": case.batch} if name == "entropy2" else None
    method = Method.of(SEARCHES[name], options) if name in SEARCHES else None
    target = TensorRT(form="cache", calibrator=name, max_batch=case.batch)
    engine, stem = _built(case, target, method, finding), case.out / name / case.path.stem
    if method is not None:
        hold(finding, *(read_cache(Path(f"{stem}.{one}.cache")) for one in ("gpu", "tensorrt")))
    return engine


def hold_split_times(finding: Finding, front: Sequence[SplitRow]) -> None:
    """Print the splits of a search, and note if the one that was built was not timed."""
    for split in front:
        source = "timed" if split.is_timed else "predicted"
        layers = f"{split.float_layers} of {split.layers} layers in float"
        print(f"{finding.name}: {layers}, {split.time:.3f} of FP32's time ({source})")
        if split.taken and not split.is_timed:
            finding.wrong.append(f"the split that was built was not timed: {layers}")


def hold(finding: Finding, theirs: CalibrationCache, ours: CalibrationCache) -> None:
    """Compare entry by entry, and print what differs; only TensorRT lists constants."""
    both, differences = theirs.scales().keys() & ours.scales(), compare_caches(theirs, ours)
    print(f"{finding.name}: scales of TensorRT (first) and ours (second)", *differences, sep="\n  ")
    off = {d.name: abs(d.ratio - 1) if d.ratio else math.inf for d in differences if d.name in both}
    off |= dict.fromkeys(both - off.keys(), 0.0)
    if strange := [d.name for d in differences if d.first is None]:
        finding.wrong.append(f"{len(strange)} of our names are not TensorRT's: {strange[:3]}")
    if not off:
        raise BackendError("no name is in both caches")
    median, worst = statistics.median(off.values()), max(off, key=lambda name: off[name])
    equal = sum(v <= EQUAL for v in off.values())
    finding.scales = f"{equal} of {len(off)} equal, median {median:.4%}, {off[worst]:.3%} {worst}"
    if finding.name in ("entropy2", "minmax") and median > MEDIAN:
        finding.wrong.append(f"the median scale is {median:.3%} off, {MEDIAN:.1%} is allowed")


def table(findings: Sequence[Finding]) -> str:
    """Return the Markdown table, and what is wrong below it."""
    base, lines = next((f.ms for f in findings if f.name == FP16), None), [HEAD]
    for f in findings:
        output = f.accuracy.outputs[0] if f.accuracy else None
        figures = [(f.ms, ".4f"), (base and f.ms and base / f.ms, ".2f"), (f.trtexec_ms, ".4f")]
        figures += [(output and output.cosine_mean, ".5f"), (output and output.cosine_min, ".5f")]
        figures += [(f.accuracy and f.accuracy.top1_agreement, ".2%")]
        cells = ("" if value is None else format(value, form) for value, form in figures)
        lines.append(f"| {' | '.join([f.name, *cells, f.scales])} |")
    wrong = [f"- {f.name}: {text}" for f in findings for text in f.wrong]
    return "\n".join([*lines, "", *(wrong or ["Everything is as it should be."])])


if __name__ == "__main__":
    sys.exit(main())
