"""One task of calibration_cost.py, in a process of its own: its CPU time and memory are its alone.

    python benchmarks/calibration_task.py TASK MODEL IMAGES [--threads 1] [--decoded]

TASK is plain (FP32 inference of every image), observe (the pass, and minmax's ranges) or quantizer
(ONNX Runtime's quantize_static, MinMax, per channel). What is printed is a line of JSON: seconds of
wall and CPU, and peak memory in MB. With --decoded the images are decoded beforehand, which is in
no time.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fetch_models import cache_folder, fetch
from deploy.calibration.observation import CalibrationSubject
from deploy.calibration.one_pass import observe
from deploy.calibration.ranges import Ranges
from deploy.feed.feed import open_feed
from deploy.feed.preprocess import Preprocess, find_preset
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel, load
from deploy.method import Method
from deploy.runtimes.ort import OrtSession
from deploy.targets import OnnxRuntime

Samples = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and how photos become its inputs.

    Attributes:
        words: the same for calib8's command line.
    """

    path: Callable[[], Path]
    preprocess: Preprocess
    words: tuple[str, ...]


def _rapid(file: str) -> Callable[[], Path]:
    return lambda: fetch("rapidocr-onnxruntime", "1.4.4") / "rapidocr_onnxruntime/models" / file


def _of(path: Callable[[], Path], name: str, side: int | None = None) -> Model:
    words: tuple[str, ...] = ("--preprocess", name)
    if side is None:
        return Model(path=path, preprocess=find_preset(name), words=words)
    sized = replace(find_preset(name), size=(side, side))
    return Model(path=path, preprocess=sized, words=(*words, "--size", f"{side}x{side}"))


MODELS: Mapping[str, Model] = {
    "EfficientNet-Lite0": _of(
        lambda: cache_folder() / "efficientnet-lite0.onnx", "efficientnet-lite"
    ),
    "ResNet-18": _of(lambda: cache_folder() / "resnet18.onnx", "imagenet"),
    "YOLOv8n": _of(lambda: fetch("nudenet", "3.4.2") / "nudenet/320n.onnx", "yolo", 320),
    "PP-OCRv4 det": _of(_rapid("ch_PP-OCRv4_det_infer.onnx"), "ppocr-det", 640),
    "PP-OCR v2 cls": _of(_rapid("ch_ppocr_mobile_v2.0_cls_infer.onnx"), "ppocr-cls"),
}


def plain(loaded: LoadedModel, samples: Samples, threads: int) -> None:
    """FP32 inference, one image after the other."""
    session = OrtSession.open(loaded.model.SerializeToString(), threads=threads)
    for sample in samples:
        session.run(sample)


def observed(loaded: LoadedModel, samples: Samples, threads: int) -> None:
    """What calibrating for ONNX Runtime does: the pass; minmax's search costs nothing."""
    subject = CalibrationSubject(loaded=loaded, sample_count=0, method=Method.of("minmax"))
    wanted = OnnxRuntime().demand(subject)
    seen = observe(wanted, samples, threads=threads)
    Ranges(seen, subject.method, subject.range_limits).find(wanted)


def quantized(loaded: LoadedModel, samples: Samples, threads: int) -> None:
    """What ONNX Runtime's own quantizer does."""
    from onnxruntime.quantization import QuantType, quantize_static

    with tempfile.TemporaryDirectory() as folder:
        quantize_static(
            loaded.model,
            Path(folder) / "int8.onnx",
            _Reader(samples),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


class _Reader:
    """The samples as the quantizer asks for them."""

    def __init__(self, samples: Samples) -> None:
        self._left = iter(samples)

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._left, None)


TASKS = {"plain": plain, "observe": observed, "quantizer": quantized}


@contextmanager
def _samples(feed: Feed, decoded: bool) -> Iterator[Samples]:
    with feed.samples() as samples:
        yield [dict(sample) for sample in samples] if decoded else samples


def measured(
    task: str, name: str, images: Path, *, threads: int, decoded: bool
) -> dict[str, float]:
    """Seconds and peak memory of one task in this process."""
    model = MODELS[name]
    loaded = load(model.path())
    feed = open_feed(images, loaded.inputs, preprocess=model.preprocess)
    with _samples(feed, decoded) as samples:
        wall, cpu = time.perf_counter(), _cpu()
        TASKS[task](loaded, samples, threads)
        return {
            "wall": time.perf_counter() - wall,
            "cpu": _cpu() - cpu,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("images", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoded", action="store_true")
    asked = parser.parse_args()
    found = measured(
        asked.task, asked.model, asked.images, threads=asked.threads, decoded=asked.decoded
    )
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
