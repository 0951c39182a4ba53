"""Embeddings: one vector per sample, compared by cosine and nearest neighbour.

Recognised are [N, D] of unit length in each sample, which no classifier's scores have, or of
numbers symmetric about zero, none of which stands out as a best class does; or a picture's
features, means of channels after an activation: hardly below zero, and a multiple of 16 of them.
The vectors of the first 64 samples are stored; each one's nearest neighbour among them should be
the float model's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure, TaskTally
from deploy.tasks.rows import Floats, Outputs, is_floating
from deploy.tensors import Array

_LONG = 32  # numbers of an embedding, at least
_CHANNELS = 16  # network widths are multiples of it, ImageNet's 1000 classes are not
_BELOW = -0.375  # minimum of HardSwish, the lowest of the activations
_SHARE = 1.01  # upper limit of a probability, with rounding
_ALIKE = 1e-2  # deviation of a normalised vector's length from 1, at most
_SPREAD = 2  # L1 norm of a unit vector, at least: less may be probabilities of a few classes
_POINTS = 3  # coordinates of a point, at most
_IN_ORDER = 0.5  # correlation of a vector's numbers with those of the points before, at most
_KEPT = 64  # vectors stored
_ENOUGH = 8  # vectors needed for a nearest-neighbour figure


@dataclass(slots=True)
class _EmbeddingTally(TaskTally["Embeddings"]):
    """Mean cosine of all samples, and the first vectors."""

    cosines: float = 0.0
    kept: list[tuple[Floats, Floats]] = field(default_factory=list)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        left = _unit(reference[self.task.output])
        right = _unit(candidate[self.task.output])
        if right.shape != left.shape or not np.isfinite(right).all():
            right = np.zeros_like(left)
        self.cosines += float(left @ right)
        if len(self.kept) < _KEPT:
            self.kept.append((left, right))

    def result(self) -> TaskFigure | None:
        if not self.samples:
            return None
        cosine = self.cosines / self.samples
        stored = len(self.kept)
        words, figure, value = f"mean cosine {cosine:.4f}", "mean cosine", cosine
        count = f"{cosine:.4f}"
        if stored >= _ENOUGH:
            own, other = (_nearest(np.stack(rows)) for rows in zip(*self.kept, strict=True))
            alike = int((own == other).sum())
            figure, value = "neighbours alike", alike / stored
            count = f"{alike} of {stored}"
            words = f"{count} nearest neighbours as FP32's, {words}"
        return self.figure(figure, value, count, words)


@dataclass(frozen=True, slots=True)
class Embeddings(EvaluationTask):
    """One embedding per sample."""

    output: str
    length: int
    name = "embeddings"
    reads = "embeddings of {0.length} numbers"
    tally_type = _EmbeddingTally


def find_embeddings(first_samples: FirstSamples) -> Embeddings | None:
    """Recognise one output of vectors; other outputs may be vectors of tokens."""
    first = first_samples.outputs[0]
    floating = [
        name for name in first_samples.names if np.issubdtype(first[name].dtype, np.floating)
    ]
    names = [name for name in floating if first[name].ndim != 3]
    if len(names) != 1:
        return None
    (name,) = names
    if any(first[other].shape[2] != first[name].size for other in floating if other != name):
        return None
    samples = first_samples.arrays(name)
    if not all(map(_is_vector, samples)) or len({one.size for one in samples}) != 1:
        return None
    vectors = [one.astype(np.float64).reshape(-1) for one in samples]
    if _are_points(vectors):
        return None
    features = first_samples.of_pictures and are_features(samples)
    if features or all(map(of_unit_length, vectors)) or all(map(_about_zero, vectors)):
        return Embeddings(name, samples[0].size)
    return None


def are_features(samples: Sequence[Array]) -> bool:
    """Whether they are means of channels after an activation; a classifier's logits go lower.

    Logits after a ReLU, as SqueezeNet's, do not, but their number is that of the classes.
    """
    values = np.stack([one.reshape(-1) for one in samples]).astype(np.float64)
    wide = values.shape[1] >= _LONG and values.shape[1] % _CHANNELS == 0
    return bool(wide and values.min() >= _BELOW and values.max(axis=1).min() > _SHARE)


def of_unit_length(vector: Floats) -> bool:
    """Whether a vector was normalised to L2 length 1, and is not a few probabilities."""
    alike = abs(float(np.linalg.norm(vector)) - 1) < _ALIKE
    return alike and float(np.abs(vector).sum()) > _SPREAD


def _is_vector(value: Array) -> bool:
    """Whether it is one finite vector: [1, D], with more dimensions of 1 or none."""
    long = value.size >= _LONG and max(value.shape, default=0) == value.size
    return long and is_floating(value)


def _are_points(vectors: Sequence[Floats]) -> bool:
    """Whether numbers correlate with those 1 to 3 before them, as points in order do."""
    if any(one.std() == 0 for one in vectors):
        return False
    along = [
        np.mean([np.corrcoef(one[step:], one[:-step])[0, 1] for one in vectors])
        for step in range(1, _POINTS + 1)
    ]
    return bool(max(along) > _IN_ORDER)


def _about_zero(vector: Floats) -> bool:
    spread = float(vector.std())
    high, low = float(vector.max()), float(-vector.min())
    usual = 1.5 * math.sqrt(2 * math.log(len(vector)))
    return (
        abs(float(vector.mean())) < 0.25 * spread
        and max(high, low) < usual * spread
        and max(high, low) < 1.6 * min(high, low)
    )


def _unit(value: Array) -> Floats:
    vector = value.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return vector / max(float(np.linalg.norm(vector)), 1e-30)


def _nearest(rows: Floats) -> NDArray[np.int64]:
    """Return the index of each row's nearest other row by cosine."""
    near = rows @ rows.T
    np.fill_diagonal(near, -np.inf)
    return np.asarray(near.argmax(axis=1), np.int64)
