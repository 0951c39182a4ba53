"""What calibrating costs beside plain inference of the same images, and what was to be reached.

    python benchmarks/calibration_cost.py [--rounds 3] [--only WORD ...]

Photos of the ai-benchmark wheel; calibration_task.py is one task in a process of its own. Every
ratio is of one round: plain FP32 inference and what stands beside it take turns, and the median
over the rounds is told, with the least and the largest. CPU is user and system time; setting up is
in it, loading the model file is not. EfficientNet-Lite0 must have been exported once by
export_efficientnet.py. Only ratios are worth comparing between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkouts
from benchmarks.fetch_models import cache_folder, fetch

MAIN = "EfficientNet-Lite0"
OTHERS = {"ResNet-18": 60, "YOLOv8n": 60, "PP-OCRv4 det": 16, "PP-OCR v2 cls": 200}
QUANTIZED = {"YOLOv8n": 40, "ResNet-18": 40, "PP-OCRv4 det": 16}
DIFFERENT = 50  # photos that memory is measured with: other photos take other memory
TASK = Path(__file__).with_name("calibration_task.py")


def photos(count: int, different: int | None = None) -> list[Path]:
    """`count` photos of the wheel, in order; from the first again where the different ones end."""
    root = fetch("ai-benchmark", "0.1.2")
    every = [*sorted(root.rglob("*.jpg")), *sorted(root.rglob("*.png"))]
    return list(islice(cycle(every[:different]), count))


def image_list(count: int, different: int | None = None) -> Path:
    """A list file of the photos."""
    path = cache_folder() / f"photos-{count}-of-{different or 'all'}.txt"
    path.write_text("".join(f"{p}\n" for p in photos(count, different)))
    return path


def task(
    name: str,
    model: str,
    images: int,
    *,
    threads: int = 1,
    different: int | None = None,
    decoded: bool = True,
    counting: str = "",
) -> dict[str, float]:
    """Figures of one task in a process of its own."""
    words = [sys.executable, str(TASK), name, model, str(image_list(images, different))]
    words += ["--threads", str(threads), *(["--decoded"] if decoded else [])]
    environment = {**os.environ, **({"CALIB8_COUNTING": counting} if counting else {})}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def build_cpu(model: str, images: int) -> float:
    """CPU seconds of `calib8 build --duration 0`, its start included."""
    from benchmarks.calibration_task import MODELS

    chosen = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        words = ["build", str(chosen.path()), "--images", str(image_list(images)), *chosen.words]
        words += ["--duration", "0", "--threads", "1", "--out", "out"]
        run = checkouts.calib8(checkouts.OWN, words, Path(folder))
    if run.code:
        sys.exit(f"calib8 {' '.join(words)}: {run.last_line}")
    return run.cpu_s


@dataclass(frozen=True)
class Row:
    """A line of the table: what is measured, what it must reach, and a round of it."""

    what: str
    least: str
    goal: str
    once: Callable[[], Mapping[str, float]]  # figure -> ratio
    form: str = "{:.2f}x"
    rounds: int | None = None  # None: as many as were asked for


def beside_plain(
    figures: tuple[str, ...],
    model: str,
    images: int,
    *,
    threads: int = 1,
    decoded: bool = True,
    counting: str = "",
) -> dict[str, float]:
    """Ratios of observing to plain inference."""
    base = task("plain", model, images, threads=threads, decoded=decoded)
    own = task("observe", model, images, threads=threads, decoded=decoded, counting=counting)
    return {figure: own[figure] / base[figure] for figure in figures}


def beside_quantizer(model: str, images: int) -> dict[str, float]:
    """Ratio of a build's CPU time to the quantizer's."""
    return {
        "cpu": build_cpu(model, images) / task("quantizer", model, images, decoded=False)["cpu"]
    }


def memory(images: int) -> dict[str, float]:
    """Peak memory in MB, with decoding, two threads; the same photos again and again."""
    found = task("observe", MAIN, images, threads=2, different=DIFFERENT, decoded=False)
    return {"MB": found["rss_mb"]}


def table() -> Iterator[Row]:
    """What the issue of this work asked for."""
    main = partial(beside_plain, model=MAIN, images=200)
    yield Row("CPU, decoded beforehand", "1.9x", "1.5x", partial(main, ("cpu",)))
    yield Row(
        "the same, counted without the kernel",
        "2.5x",
        "2.2x",
        partial(main, ("cpu",), counting="opencv"),
    )
    yield Row("wall on 2 cores", "2.0x", "1.6x", partial(main, ("wall",), threads=2))
    for figure, threads in (("cpu", 1), ("wall", 2)):
        once = partial(main, (figure,), threads=threads, decoded=False)
        yield Row(f"with decoding, {threads} threads", "1.5x", "1.3x", once, rounds=2)
    for name, images in OTHERS.items():
        once = partial(beside_plain, ("cpu",), name, images)
        yield Row(f"{name}, CPU", "2.2x", "", once, rounds=2)
    for images in (DIFFERENT, 2000):
        once = partial(memory, images)
        yield Row(f"peak memory, {images} images", "350 MB", "", once, "{:.1f} MB", rounds=3)
    for name, images in QUANTIZED.items():
        once = partial(beside_quantizer, name, images)
        yield Row(f"{name}, build / quantizer, CPU", "1.0x", "", once, rounds=1)


def told(row: Row, rounds: int) -> str:
    """One line of the table, measured now."""
    taken = [row.once() for _ in range(row.rounds or rounds)]
    got = []
    for figure in taken[0]:
        values = sorted(one[figure] for one in taken)
        middle, low, high = (
            row.form.format(v) for v in (statistics.median(values), values[0], values[-1])
        )
        spread = f" ({low} to {high})" if len(values) > 1 else ""
        got.append(f"{figure} {middle}{spread}")
    return f"| {row.what} | {', '.join(got)} | {row.least} | {row.goal} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[""], help="words of the lines to measure")
    asked = parser.parse_args()
    print(
        "| beside plain inference | have | at least | goal |\n| --- | --- | --- | --- |", flush=True
    )
    for row in table():
        if any(word in row.what for word in asked.only):
            print(told(row, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
