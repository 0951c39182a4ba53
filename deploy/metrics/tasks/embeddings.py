"""Embeddings: one vector a sample, whose neighbours matter.

[N, D] of unit length in each sample, which the scores of no classifier have, or of numbers that lie
about zero alike on both sides, none of which stands out as the best class does. Or a picture's
features, the mean of each channel behind an activation: hardly below zero, and as many as channels
are, which come in sixteens. The vectors of the first 64 samples are kept; each one's nearest
neighbour among them should be the float model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs, image_size
from deploy.metrics.tasks.task import Seen, TaskFigure
from deploy.tensors import Array

_LONG = 32  # numbers of an embedding, at least
_CHANNELS = 16  # that a network's width is a multiple of, and the 1000 of ImageNet are not
_BELOW = -0.375  # the least that an activation gives: HardSwish's
_SHARE = 1.01  # what no probability is above
_ALIKE = 1e-2  # lengths that normalising made alike
_SPREAD = 2  # absolute sum of a vector of length 1: of less it is a few classes' shares
_POINTS = 3  # numbers that a point has, at most
_IN_ORDER = 0.5  # correlation of a vector's numbers with those of the points before
_KEPT = 64  # vectors in memory
_ENOUGH = 8  # vectors that have neighbours worth the name


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector a sample."""

    output: str
    length: int
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    name: str = "embeddings"

    @property
    def form(self) -> str:
        """How the output is read."""
        return f"{self.output}: embeddings of {self.length} numbers"

    def tally(self) -> EmbeddingTally:
        """A new comparison."""
        return EmbeddingTally(self)


def find_embeddings(seen: Seen) -> Embeddings | None:
    """The task, where one output is such a vector, and the others at most its tokens' vectors."""
    first = seen.outputs[0]
    floating = [name for name in seen.names if np.issubdtype(first[name].dtype, np.floating)]
    names = [name for name in floating if first[name].ndim != 3]
    if len(names) != 1:
        return None
    (name,) = names
    if any(first[other].shape[2] != first[name].size for other in floating if other != name):
        return None
    samples = seen.arrays(name)
    if not all(map(_is_vector, samples)) or len({one.size for one in samples}) != 1:
        return None
    vectors = [one.astype(np.float64).reshape(-1) for one in samples]
    if _are_points(vectors):
        return None
    pictures = any(image_size(fed) is not None for fed in seen.inputs)
    features = pictures and are_features(samples)
    if features or all(map(of_unit_length, vectors)) or all(map(_about_zero, vectors)):
        return Embeddings(name, samples[0].size)
    return None


def are_features(samples: Sequence[Array]) -> bool:
    """Whether they are means of channels behind an activation; a classifier's raw scores go below.

    Those behind a ReLU, as SqueezeNet's, do not, but there are as many as classes.
    """
    values = np.stack([one.reshape(-1) for one in samples]).astype(np.float64)
    wide = values.shape[1] >= _LONG and values.shape[1] % _CHANNELS == 0
    return bool(wide and values.min() >= _BELOW and values.max(axis=1).min() > _SHARE)


def of_unit_length(vector: NDArray[np.float64]) -> bool:
    """Whether it was normalised to a length of 1, by the sum of squares and not as shares are."""
    alike = abs(float(np.linalg.norm(vector)) - 1) < _ALIKE
    return alike and float(np.abs(vector).sum()) > _SPREAD


def _is_vector(value: Array) -> bool:
    """[1, D], with more dimensions of 1 or none."""
    long = value.size >= _LONG and max(value.shape, default=0) == value.size
    return bool(long and np.issubdtype(value.dtype, np.floating) and np.isfinite(value).all())


def _are_points(vectors: Sequence[NDArray[np.float64]]) -> bool:
    """Whether each number is like the one, two or three before it: x, y, z of points in order."""
    if any(one.std() == 0 for one in vectors):
        return False
    along = [
        np.mean([np.corrcoef(one[step:], one[:-step])[0, 1] for one in vectors])
        for step in range(1, _POINTS + 1)
    ]
    return bool(max(along) > _IN_ORDER)


def _about_zero(vector: NDArray[np.float64]) -> bool:
    spread = float(vector.std())
    high, low = float(vector.max()), float(-vector.min())
    usual = 1.5 * math.sqrt(2 * math.log(len(vector)))
    return (
        abs(float(vector.mean())) < 0.25 * spread
        and max(high, low) < usual * spread
        and max(high, low) < 1.6 * min(high, low)
    )


@dataclass(slots=True)
class EmbeddingTally:
    """Mean cosine of all samples, and the first vectors."""

    task: Embeddings
    samples: int = 0
    cosines: float = 0.0
    kept: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=list)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample; a candidate of NaN or of another length is at cosine 0."""
        self.samples += 1
        left = _unit(reference[self.task.output])
        right = _unit(candidate[self.task.output])
        if right.shape != left.shape or not np.isfinite(right).all():
            right = np.zeros_like(left)
        self.cosines += float(left @ right)
        if len(self.kept) < _KEPT:
            self.kept.append((left, right))

    def result(self) -> TaskFigure | None:
        """The share of neighbours alike where there are samples enough; else the mean cosine."""
        if not self.samples:
            return None
        cosine = self.cosines / self.samples
        kept = len(self.kept)
        words, figure, value = f"mean cosine {cosine:.4f}", "mean cosine", cosine
        count = f"{cosine:.4f}"
        if kept >= _ENOUGH:
            own, others = (_nearest(np.stack(rows)) for rows in zip(*self.kept, strict=True))
            alike = int((own == others).sum())
            figure, value = "neighbours alike", alike / kept
            count = f"{alike} of {kept}"
            words = f"{count} nearest neighbours as FP32's, {words}"
        return TaskFigure(
            task="embeddings",
            figure=figure,
            value=value,
            count=count,
            words=words,
            samples=self.samples,
            form=self.task.form,
        )


def _unit(value: Array) -> NDArray[np.float64]:
    vector = value.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return vector / max(float(np.linalg.norm(vector)), 1e-30)


def _nearest(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Each row's nearest other row by cosine."""
    near = rows @ rows.T
    np.fill_diagonal(near, -np.inf)
    return np.asarray(near.argmax(axis=1), np.int64)
