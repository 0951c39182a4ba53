"""CPU time of one whole `build --duration 0` beside ONNX Runtime's quantizer, on the same images.

    python benchmarks/build_beside_ort.py [--models yolov8n resnet-18 ppocr-v4-det] [--images 200]

Both read the same arrays, one .npz a sample, with two threads, in turns, each in a process of its
own; what counts is user and system time of the process with its start. The quantizer is
`quantize_static` (Q/DQ, MinMax, per channel) with its own default operators and the preparation
that it asks for. It neither judges what it made nor searches, so `--effort 0` is the like of it.
Its environment is made by pip once (peers.py). PP-OCR's pages are drawn, which needs Pillow, and
are a third as many. Only ratios are worth comparing between machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import checkouts  # noqa: E402
import peers  # noqa: E402
from cases import cases  # noqa: E402
from mobile_nets import resnet18, written  # noqa: E402
from model_feeds import pages, photos  # noqa: E402

from deploy.feed.feed import open_feed  # noqa: E402
from deploy.feed.preprocess import Preprocess, find_preset  # noqa: E402
from deploy.frontends import load  # noqa: E402

THREADS = 2
EFFORTS = (0, 1)  # none, and the default
PEER = "ort-all"
PER_PAGE = 3  # a page of 640 x 640 takes as long as several photos


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model and how many images of which kind it is calibrated with."""

    path: Callable[[], Path]
    preprocess: Preprocess | None
    images: Callable[[Path, int], Sequence[Path]]


def some_photos(_: Path, count: int) -> Sequence[Path]:
    """Photos of the ai-benchmark wheel."""
    return photos("classification", "enhancement", "segmentation")[:count]


def some_pages(folder: Path, count: int) -> Sequence[Path]:
    """Drawn pages of text, in `folder`."""
    return pages(count // PER_PAGE, 1)(folder)


def models() -> Mapping[str, Model]:
    """Name -> model; ResNet-18 has random weights, which cost what trained ones do."""
    known = cases()
    yolo, det = known["yolov8n-nudenet"], known["ppocr-v4-det"]
    return {
        "yolov8n": Model(path=yolo.model, preprocess=yolo.preprocess, images=some_photos),
        "resnet-18": Model(
            path=written(resnet18), preprocess=find_preset("imagenet"), images=some_photos
        ),
        "ppocr-v4-det": Model(path=det.model, preprocess=det.preprocess, images=some_pages),
    }


def fed(model: Model, count: int, folder: Path) -> tuple[Path, int]:
    """The samples, written; and how many they are."""
    loaded = load(model.path())
    paths = [str(path) for path in model.images(folder, count)]
    feed = open_feed(paths, loaded.inputs, preprocess=model.preprocess)
    with feed.samples() as samples:
        return peers.write_samples(samples, folder / "samples"), len(feed)


def built(model: Path, samples: Path, effort: int, folder: Path) -> tuple[float, Mapping[str, Any]]:
    """CPU seconds of a build, and the work that its report counts.

    Raises:
        SystemExit: calib8 failed; with its last line.
    """
    out = folder / f"effort-{effort}"
    words = ["build", str(model), "--images", str(samples), "--out", str(out), "--accept"]
    words += ["--duration", "0", "--threads", str(THREADS), "--effort", str(effort), "--refresh"]
    run = checkouts.calib8(checkouts.OWN, words, folder)
    if run.code:
        sys.exit(f"calib8 {' '.join(words)}: {run.last_line}")
    return run.cpu_s, json.loads((out / "report.json").read_text())["work"]


def row(name: str, model: Model, count: int, rounds: int, efforts: Iterable[int]) -> str:
    """One line of the table: median CPU seconds, and ratios to the quantizer's."""
    with tempfile.TemporaryDirectory(prefix="calib8-beside-") as place:
        folder = Path(place)
        samples, number = fed(model, count, folder)
        taken: dict[int | str, list[float]] = {PEER: [], **{effort: [] for effort in efforts}}
        work: Mapping[str, Any] = {}
        for _ in range(rounds):
            made = peers.quantize(PEER, model.path(), samples, folder / PEER, peers.environments())
            if made.engine is None:
                sys.exit(f"{name}: ONNX Runtime's quantizer failed: {made.says}")
            taken[PEER].append(made.cpu_s)
            for effort in efforts:
                cpu_s, work = built(model.path(), samples, effort, folder)
                taken[effort].append(cpu_s)
    peer = statistics.median(taken[PEER])
    cells = [name, str(number), f"{peer:.1f} s"]
    for effort in efforts:
        own = statistics.median(taken[effort])
        cells += [f"{own:.1f} s", f"{own / peer:.2f}x"]
    runs = [sum(work["calibration_runs"].values()), work["reference_runs"]]
    return f"| {' | '.join([*cells, *map(str, runs), *map(str, work['engine_runs'].values())])} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = models()
    parser.add_argument("--models", nargs="*", choices=known, default=list(known))
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--efforts", nargs="*", type=int, default=list(EFFORTS))
    asked = parser.parse_args()
    heads = ["model", "images", "ORT's quantizer"]
    heads += [word for effort in asked.efforts for word in (f"--effort {effort}", "ratio")]
    heads += ["observed", "float runs to judge", "int8 runs to judge"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    for name in asked.models:
        print(row(name, known[name], asked.images, asked.rounds, asked.efforts), flush=True)
    print(f"\nCPU seconds, {THREADS} threads, median of {asked.rounds} rounds in turns")


if __name__ == "__main__":
    main()
