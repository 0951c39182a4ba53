"""Embeddings: one vector per sample, compared by cosine and nearest neighbour.

Recognised are [N, D] of unit length in each sample, which no classifier's scores have, or of
numbers symmetric about zero, none of which stands out as a best class does; or a picture's
features, means of channels after an activation: hardly below zero, and a multiple of 16 of them.
The vectors of the first 64 samples are stored; each one's nearest neighbour among them should be
the float model's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deploy.tasks.evaluation_task import EvaluationTask, FirstSamples, TaskFigure, TaskTally
from deploy.tasks.rows import Floats, Outputs, is_floating
from deploy.tensors import Array

_MIN_LENGTH = 32  # numbers of an embedding, at least
_WIDTH_FACTOR = 16  # network widths are multiples of it, ImageNet's 1000 classes are not
_MIN_ACTIVATION = -0.375  # minimum of HardSwish, the lowest of the activations
_MAX_PROBABILITY = 1.01  # upper limit of a probability, with rounding
_MAX_LENGTH_DEVIATION = 1e-2  # deviation of a normalised vector's length from 1, at most
_MIN_L1_NORM = 2  # L1 norm of a unit vector, at least: less may be probabilities of a few classes
_MAX_COORDINATES = 3  # coordinates of a point, at most
_MAX_ORDER = 0.5  # correlation of a vector's numbers with those of the points before, at most
_MAX_VECTORS = 64  # vectors stored
_MIN_NEIGHBOUR_VECTORS = 8  # vectors needed for a nearest-neighbour figure


@dataclass(slots=True)
class _EmbeddingTally(TaskTally["Embeddings"]):
    """Mean cosine of all samples, and the first vectors."""

    cosines: float = 0.0
    vectors: list[tuple[Floats, Floats]] = field(default_factory=list)

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_vector = _normalize(reference[self.task.output])
        vector = _normalize(candidate[self.task.output])
        if vector.shape != reference_vector.shape or not np.isfinite(vector).all():
            vector = np.zeros_like(reference_vector)
        self.cosines += float(reference_vector @ vector)
        if len(self.vectors) < _MAX_VECTORS:
            self.vectors.append((reference_vector, vector))

    def result(self) -> TaskFigure | None:
        if not self.samples:
            return None
        cosine = self.cosines / self.samples
        text = f"mean cosine {cosine:.4f}"
        vector_count = len(self.vectors)
        if vector_count < _MIN_NEIGHBOUR_VECTORS:
            return self.figure("mean cosine", cosine, f"{cosine:.4f}", text)

        references, candidates = zip(*self.vectors, strict=True)
        reference_neighbours = _find_nearest(np.stack(references))
        neighbours = _find_nearest(np.stack(candidates))
        equal = int((reference_neighbours == neighbours).sum())
        count = f"{equal} of {vector_count}"
        text = f"{count} nearest neighbours as FP32's, {text}"
        figure = self.figure("neighbours alike", equal / vector_count, count, text)
        return replace(figure, kept=equal, counted=vector_count)


@dataclass(frozen=True, slots=True)
class Embeddings(EvaluationTask):
    """One embedding per sample.

    Attributes:
        output: name of the output.
        length: numbers of an embedding.
    """

    output: str
    length: int
    name = "embeddings"
    reads = "embeddings of {0.length} numbers"
    tally_type = _EmbeddingTally


def find_embeddings(first_samples: FirstSamples) -> Embeddings | None:
    """Recognise one output of vectors; other outputs may be vectors of tokens."""
    outputs = first_samples.outputs[0]
    names, token_lengths = [], []
    for name in first_samples.names:
        if not np.issubdtype(outputs[name].dtype, np.floating):
            continue
        if outputs[name].ndim == 3:
            token_lengths.append(outputs[name].shape[2])
        else:
            names.append(name)
    if len(names) != 1:
        return None
    (name,) = names
    if any(length != outputs[name].size for length in token_lengths):
        return None
    samples = first_samples.arrays(name)
    if not all(map(_is_vector, samples)) or len({value.size for value in samples}) != 1:
        return None
    vectors = [value.astype(np.float64).reshape(-1) for value in samples]
    if _are_points(vectors):
        return None
    features = first_samples.of_pictures and are_features(samples)
    if features or all(map(of_unit_length, vectors)) or all(map(_is_about_zero, vectors)):
        return Embeddings(name, samples[0].size)
    return None


def are_features(samples: Sequence[Array]) -> bool:
    """Whether they are means of channels after an activation; a classifier's logits go lower.

    Logits after a ReLU, as SqueezeNet's, do not, but their number is that of the classes.
    """
    values = np.stack([value.reshape(-1) for value in samples]).astype(np.float64)
    is_feature_count = values.shape[1] >= _MIN_LENGTH and values.shape[1] % _WIDTH_FACTOR == 0
    return bool(
        is_feature_count
        and values.min() >= _MIN_ACTIVATION
        and values.max(axis=1).min() > _MAX_PROBABILITY
    )


def of_unit_length(vector: Floats) -> bool:
    """Whether a vector was normalised to L2 length 1, and is not a few probabilities."""
    has_unit_length = abs(float(np.linalg.norm(vector)) - 1) < _MAX_LENGTH_DEVIATION
    return has_unit_length and float(np.abs(vector).sum()) > _MIN_L1_NORM


def _is_vector(value: Array) -> bool:
    """Whether it is one finite vector: [1, D], with more dimensions of 1 or none."""
    is_long_vector = value.size >= _MIN_LENGTH and max(value.shape, default=0) == value.size
    return is_long_vector and is_floating(value)


def _are_points(vectors: Sequence[Floats]) -> bool:
    """Whether numbers correlate with those 1 to 3 before them, as points in order do."""
    if any(vector.std() == 0 for vector in vectors):
        return False
    mean_correlations = []
    for step in range(1, _MAX_COORDINATES + 1):
        correlations = [np.corrcoef(vector[step:], vector[:-step])[0, 1] for vector in vectors]
        mean_correlations.append(np.mean(correlations))
    return bool(max(mean_correlations) > _MAX_ORDER)


def _is_about_zero(vector: Floats) -> bool:
    """Whether numbers are spread about 0 as normal ones, to both sides alike."""
    spread = float(vector.std())
    high, low = float(vector.max()), float(-vector.min())
    is_centred = abs(float(vector.mean())) < 0.25 * spread
    is_symmetric = max(high, low) < 1.6 * min(high, low)
    max_deviations = 1.5 * math.sqrt(2 * math.log(len(vector)))  # of normal numbers
    return is_centred and is_symmetric and max(high, low) < max_deviations * spread


def _normalize(value: Array) -> Floats:
    vector = value.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return vector / max(float(np.linalg.norm(vector)), 1e-30)


def _find_nearest(rows: Floats) -> NDArray[np.int64]:
    """Return the index of each row's nearest other row by cosine."""
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(axis=1), np.int64)
