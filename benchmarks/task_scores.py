"""Task figures of a model: from its outputs and the float model's, one sample after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from model_feeds import Sample, paddle
from numpy.typing import NDArray

# outputs of each evaluation sample, and the float model's -> a figure
Score = Callable[[list[Sample], list[Sample]], float]


def first(outputs: Sample) -> NDArray[Any]:
    return next(iter(outputs.values()))


def top1(truth: Callable[[], Sequence[int]]) -> Callable[[Path], Score]:
    """Share of samples whose largest score is that of their class."""

    def score(own: list[Sample], _: list[Sample]) -> float:
        found = [int(first(outputs).argmax()) for outputs in own]
        return float(np.mean([a == b for a, b in zip(found, truth(), strict=True)]))

    return lambda _: score


def same_class(_: Path) -> Score:
    """Share of samples with the float model's class."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        pairs = zip(own, reference, strict=True)
        return float(np.mean([first(a).argmax() == first(b).argmax() for a, b in pairs]))

    return score


def psnr(_: Path) -> Score:
    """PSNR in dB to the float model's picture of 0..1."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        errors = [np.mean((first(a) - first(b)) ** 2) for a, b in zip(own, reference, strict=True)]
        mean = float(np.mean(errors))
        return 10 * math.log10(1 / mean) if mean else math.inf

    return score


def same_mask(_: Path) -> Score:
    """Intersection over union of the text maps at 0.3 with the float model's."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        pairs = [(first(a) > 0.3, first(b) > 0.3) for a, b in zip(own, reference, strict=True)]
        union = sum(int((a | b).sum()) for a, b in pairs)
        return sum(int((a & b).sum()) for a, b in pairs) / max(1, union)

    return score


def exact_match(seed: int, count: int) -> Callable[[Path], Score]:
    """Share of rendered lines that are read without any mistake, spaces left out."""
    import onnx
    from rendered_text import characters_of, draw_lines, spelled

    def prepare(folder: Path) -> Score:
        truth = draw_lines(folder / f"lines-{seed}", count, seed=seed)[1]
        model = onnx.load(paddle("ch_PP-OCRv4_rec_infer.onnx")())
        metadata = {pair.key: pair.value for pair in model.metadata_props}
        letters = characters_of(metadata["character"])

        def score(own: list[Sample], _: list[Sample]) -> float:
            read = [spelled(first(outputs)[0], letters).replace(" ", "") for outputs in own]
            pairs = zip(read, truth, strict=True)
            return float(np.mean([a == b.replace(" ", "") for a, b in pairs]))

        return score

    return prepare
