"""What calibrating costs beside plain inference of the same images, and what the engine wins.

    python benchmarks/calibration_cost.py [--images 200] [--rounds 3]

EfficientNet-Lite0, photos of the ai-benchmark wheel, two threads. Every figure of a row comes from
one run: plain FP32 inference and the calibrations take turns, each in a process of its own, so
that CPU time and peak memory are theirs alone. Both decode the same files. Only ratios are meant
to be compared between machines.

The decoding is in every time, since a user pays for it in both; the last table leaves it out.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.fetch_models import cache_folder, fetch

METHODS = ("minmax", "entropy", "percentile", "mse")
PEER = "ORT minmax"  # onnxruntime.quantization.quantize_static, per channel, uint8 activations
THREADS = 2


def photos(count: int) -> list[Path]:
    """The first `count` photos of the wheel, in order."""
    found = sorted(fetch("ai-benchmark", "0.1.2").rglob("*.jpg"))
    found += sorted(fetch("ai-benchmark", "0.1.2").rglob("*.png"))
    return found[:count]


def image_list(count: int) -> Path:
    """A list file of the photos."""
    path = cache_folder() / f"photos-{count}.txt"
    path.write_text("".join(f"{p}\n" for p in photos(count)))
    return path


def one(task: str, images: Path, *, decoded: bool) -> dict[str, float]:
    """Run one task in this process: seconds of wall and CPU, and peak memory in MB.

    With `decoded`, the photos are decoded before the clock starts.
    """
    from deploy.calibration.observe import observe
    from deploy.calibration.ranges import Ranges
    from deploy.calibration.search import Method
    from deploy.calibration.subject import Subject
    from deploy.feed.feed import open_feed
    from deploy.feed.presets import preset
    from deploy.frontends import load
    from deploy.targets import OnnxRuntime

    loaded = load(cache_folder() / "efficientnet-lite0.onnx")
    feed = open_feed(images, loaded.inputs, preprocess=preset("efficientnet-lite"))
    samples = list(feed.samples()) if decoded else None
    start, cpu = time.perf_counter(), _cpu()
    if task == "plain":
        from deploy.ort import OrtSession

        session = OrtSession.open(loaded.model.SerializeToString(), threads=THREADS)
        for sample in samples or feed.samples():
            session.run(sample)
    elif task == PEER:
        quantize_with_onnxruntime(feed, cache_folder() / "efficientnet-lite0.ort.onnx")
    else:
        subject = Subject(loaded=loaded, samples=len(feed), method=Method.of(task))
        wanted = OnnxRuntime().demand(subject)
        observed = observe(wanted, samples or feed.samples(), threads=THREADS)
        Ranges(observed, subject.method, subject.bounds).of(wanted)
    return {
        "wall": time.perf_counter() - start,
        "cpu": _cpu() - cpu,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def quantize_with_onnxruntime(feed: object, out: Path) -> None:
    """The same work by ONNX Runtime's own quantizer."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples = iter(feed.samples())  # type: ignore[attr-defined]

        def get_next(self) -> dict | None:
            return next(self.samples, None)

    quantize_static(
        cache_folder() / "efficientnet-lite0.onnx",
        out,
        Reader(),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def apart(task: str, images: Path, *, decoded: bool = False) -> dict[str, float]:
    """`one` in a process of its own."""
    words = [sys.executable, __file__, "--one", task, "--list", str(images)]
    words += ["--decoded"] if decoded else []
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cost(images: int, rounds: int, tasks: tuple[str, ...], *, decoded: bool = False) -> None:
    """Print the ratios of every task to plain inference, the median over `rounds`."""
    listed = image_list(images)
    runs: dict[str, list[dict[str, float]]] = {task: [] for task in ("plain", *tasks)}
    for _ in range(rounds):
        for task in runs:
            runs[task].append(apart(task, listed, decoded=decoded))
    how = ", decoded beforehand" if decoded else ""
    print(f"\n{images} photos{how}, {THREADS} threads, median of {rounds} rounds")
    print(f"{'':12}{'wall':>8}{'ratio':>8}{'CPU':>8}{'ratio':>8}{'peak RSS':>10}")
    for task, taken in runs.items():
        walls = [r["wall"] / p["wall"] for r, p in zip(taken, runs["plain"], strict=True)]
        cpus = [r["cpu"] / p["cpu"] for r, p in zip(taken, runs["plain"], strict=True)]
        print(
            f"{task:12}{statistics.median(r['wall'] for r in taken):7.2f}s"
            f"{statistics.median(walls):7.2f}x"
            f"{statistics.median(r['cpu'] for r in taken):7.2f}s"
            f"{statistics.median(cpus):7.2f}x{max(r['rss_mb'] for r in taken):7.0f} MB"
        )


def growth() -> None:
    """Print the peak memory of 50 and of 200 images."""
    few, many = (apart("entropy", image_list(n))["rss_mb"] for n in (50, 200))
    print(f"\npeak RSS with entropy: {few:.0f} MB for 50 images, {many:.0f} MB for 200")


def engines(images: int) -> None:
    """Print each method's engine: cosine of the logits, top-1 of 20 labelled photos, speed-up."""
    from deploy import build
    from deploy.feed.presets import preset

    labelled = cache_folder() / "labelled.txt"
    data = fetch("foolbox", "3.3.4") / "foolbox" / "data"
    lines = [f"{p} {p.stem.rsplit('_', 1)[1]}" for p in sorted(data.glob("imagenet_*.jpg"))]
    labelled.write_text("\n".join(lines) + "\n")
    print(f"\n{'':12}{'cosine':>9}{'worst':>9}{'SQNR':>9}{'top-1':>9}{'FP32':>8}{'speed-up':>10}")
    peer = cache_folder() / "efficientnet-lite0.ort.onnx"
    if peer.exists():
        _peer_row(peer, labelled)
    for method in METHODS:
        report = build(
            cache_folder() / "efficientnet-lite0.onnx",
            image_list(images),
            preprocess=preset("efficientnet-lite"),
            method=method,
            eval_images=labelled,
            out=cache_folder() / "build",
            threads=THREADS,
        )
        plain, int8 = report.engines
        assert plain.latency and int8.latency and int8.accuracy
        out = int8.accuracy.outputs[0]
        print(
            f"{method:12}{out.cosine_mean:9.4f}{out.cosine_min:9.4f}{out.sqnr_db:6.1f} dB"
            f"{int8.accuracy.top1_candidate or 0:9.2f}{int8.accuracy.top1_reference or 0:8.2f}"
            f"{plain.latency.latency.median / int8.latency.latency.median:9.2f}x"
        )


def _peer_row(engine: Path, labelled: Path) -> None:
    """The engine of ONNX Runtime's own quantizer, judged and timed in the same way."""
    from deploy.feed.feed import open_feed
    from deploy.feed.presets import preset
    from deploy.metrics.accuracy import compare
    from deploy.metrics.latency import measure
    from deploy.ort import OrtSession

    plain = OrtSession.open(cache_folder() / "efficientnet-lite0.onnx", threads=THREADS)
    int8 = OrtSession.open(engine, threads=THREADS)
    feed = open_feed(labelled, plain.inputs, preprocess=preset("efficientnet-lite"))
    found = compare(plain, int8, feed.samples(), labels=feed.labels)
    times = measure({"plain": plain, "int8": int8}, list(feed.samples())[:8])
    out = found.outputs[0]
    print(
        f"{PEER:12}{out.cosine_mean:9.4f}{out.cosine_min:9.4f}{out.sqnr_db:6.1f} dB"
        f"{found.top1_candidate or 0:9.2f}{found.top1_reference or 0:8.2f}"
        f"{times['plain'].latency.median / times['int8'].latency.median:9.2f}x"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--list", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        print()
        print(json.dumps(one(words.one, words.list, decoded=words.decoded)))
        return
    cost(words.images, words.rounds, (*METHODS, PEER))
    growth()
    engines(words.images)
    cost(words.images, words.rounds, ("minmax", "entropy"), decoded=True)


if __name__ == "__main__":
    main()
