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


def boxes_kept(_: Path) -> Score:
    """Share of the float model's boxes, of a YOLOv8 output, that are found again."""
    from box_scores import kept, yolo_boxes

    def score(own: list[Sample], reference: list[Sample]) -> float:
        found, every = kept(yolo_boxes(own), yolo_boxes(reference))
        return found / max(1, every)

    return score


def same_heat(output: str, channel: int, limit: float) -> Callable[[Path], Score]:
    """Intersection over union of one channel of a map, above a limit, with the float model's."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        pairs = [
            (a[output][:, channel] > limit, b[output][:, channel] > limit)
            for a, b in zip(own, reference, strict=True)
        ]
        union = sum(int((a | b).sum()) for a, b in pairs)
        return sum(int((a & b).sum()) for a, b in pairs) / max(1, union)

    return lambda _: score


def same_text(_: Path) -> Score:
    """Share of samples whose [T, N, symbols] scores, the last symbol the blank, read alike."""

    def read(scores: NDArray[Any]) -> tuple[int, ...]:
        best, blank = scores[:, 0].argmax(axis=1).tolist(), scores.shape[2] - 1
        steps = zip(best, [blank, *best[:-1]], strict=True)
        return tuple(now for now, before in steps if now not in (blank, before))

    def score(own: list[Sample], reference: list[Sample]) -> float:
        pairs = zip(own, reference, strict=True)
        return float(np.mean([read(first(a)) == read(first(b)) for a, b in pairs]))

    return score


def same_cuts(_: Path) -> Score:
    """Share of texts that are cut at the same letters: a probability above a half cuts."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        pairs = zip(own, reference, strict=True)
        return float(np.mean([((first(a) > 0.5) == (first(b) > 0.5)).all() for a, b in pairs]))

    return score


def nearest(output: str, *, among_own: bool) -> Callable[[Path], Score]:
    """Share of samples whose embedding has the neighbour that the float model's has.

    Args:
        output: the embedding's name.
        among_own: neighbours are sought among the model's own embeddings of the other samples;
            else among the float model's of all, where each should find its own.
    """

    def unit(samples: list[Sample]) -> NDArray[np.float64]:
        rows = np.stack([sample[output].astype(np.float64).reshape(-1) for sample in samples])
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))

    def score(own: list[Sample], reference: list[Sample]) -> float:
        mine, theirs = unit(own), unit(reference)
        if not among_own:
            return float(np.mean((mine @ theirs.T).argmax(axis=1) == np.arange(len(own))))
        alike, wanted = mine @ mine.T, theirs @ theirs.T
        for table in (alike, wanted):
            np.fill_diagonal(table, -np.inf)
        return float(np.mean(alike.argmax(axis=1) == wanted.argmax(axis=1)))

    return lambda _: score


def cosine_to_float(*, worst: bool) -> Callable[[Path], Score]:
    """Cosine of the first output with the float model's: the mean over samples, or the worst."""

    def score(own: list[Sample], reference: list[Sample]) -> float:
        found = []
        for a, b in zip(own, reference, strict=True):
            x, y = first(a).astype(np.float64).ravel(), first(b).astype(np.float64).ravel()
            found.append(float(x @ y / math.sqrt((x @ x) * (y @ y))))
        return min(found) if worst else float(np.mean(found))

    return lambda _: score


def worst_part_db(own: Sequence[Sample], reference: Sequence[Sample]) -> tuple[float, str]:
    """The lowest SQNR in dB of any part of any float output, and that part's name."""
    parts = [
        (_sqnr_db(own, reference, name, axis, rows), label)
        for name, value in reference[0].items()
        if np.issubdtype(value.dtype, np.floating)
        for label, axis, rows in _parts(name, [sample[name] for sample in reference])
    ]
    return min(parts, key=lambda part: part[0])


def _parts(
    name: str, values: Sequence[NDArray[Any]]
) -> list[tuple[str, int, NDArray[np.int64] | None]]:
    """One output, or two parts of it: rows whose ranges lie more than ten times apart.

    A detector's table [1, 4 + classes, boxes] holds pixels and probabilities: the rows of its
    shorter axis, sorted by their largest value, part at the widest gap between neighbours.
    """
    shape = values[0].shape
    whole = [(name, 0, None)]
    if len(shape) != 3 or min(shape[1:]) < 2 or min(shape[1:]) > 512:
        return whole
    axis = 1 if shape[1] <= shape[2] else 2
    if any(v.shape[axis] != shape[axis] for v in values):
        return whole
    tops = np.max([np.abs(v).max(axis=(0, 3 - axis)) for v in values], axis=0)
    order = np.argsort(tops)
    ratios = tops[order[1:]] / np.maximum(tops[order[:-1]], 1e-30)
    at = int(ratios.argmax()) + 1
    if ratios[at - 1] <= 10 or tops[order[at - 1]] == 0:
        return whole
    low, high = np.sort(order[:at]), np.sort(order[at:])
    return [(f"{name}[{rows[0]}..{rows[-1]}]", axis, rows) for rows in (low, high)]


def _sqnr_db(
    own: Sequence[Sample],
    reference: Sequence[Sample],
    name: str,
    axis: int,
    rows: NDArray[np.int64] | None,
) -> float:
    """Over all samples; -inf where one is not finite or the shapes differ."""
    signal = noise = 0.0
    for a, b in zip(own, reference, strict=True):
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        if x.shape != y.shape or not np.isfinite(x).all():
            return -math.inf
        if rows is not None:
            x, y = x.take(rows, axis), y.take(rows, axis)
        signal += float((y**2).sum())
        noise += float(((x - y) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


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
