"""The float model's first samples, from which its task is recognised; outputs that repeat others.

Classifiers of scikit-learn, text and sound often output both scores and their Softmax or ArgMax;
each recogniser expects only one of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deploy.tasks.declarations import Declaration
from deploy.tasks.rows import Floats, Outputs, image_size, is_floating
from deploy.tensors import Array

_PICTURE = 4  # dimensions of a picture
_CHANNELS = frozenset((1, 3, 4))
_TOLERANCE = 1e-4  # between two computations of a probability in float16 or float32


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The float model's first samples, from which a task is recognised.

    Attributes:
        inputs: one mapping per sample, with a batch of 1.
        outputs: the same for floating-point and integer outputs.
        declared: what the model's file declares.
    """

    inputs: Sequence[Outputs]
    outputs: Sequence[Outputs] = field(default_factory=tuple)
    declared: Declaration = field(default_factory=Declaration)

    def arrays(self, name: str) -> list[Array]:
        """Return one output's array of every sample."""
        return [sample[name] for sample in self.outputs]

    @property
    def of_pictures(self) -> bool:
        """Whether a sample has a picture among its inputs."""
        return any(image_size(sample) is not None for sample in self.inputs)

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """Size that the pictures of all samples have; None if they differ."""
        sizes = {image_size(sample) for sample in self.inputs}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that have values in every sample."""
        return tuple(name for name in self.every if all(map(np.size, self.arrays(name))))

    @property
    def every(self) -> tuple[str, ...]:
        """Outputs that every sample has, possibly empty."""
        first = self.outputs[0] if self.outputs else {}
        return tuple(name for name in first if all(name in sample for sample in self.outputs))


def drop_outputs(samples: FirstSamples, names: Collection[str]) -> FirstSamples:
    """Return the samples without these outputs."""
    outputs = []
    for sample in samples.outputs:
        outputs.append({name: sample[name] for name in sample if name not in names})
    return replace(samples, outputs=outputs)


def find_states(samples: FirstSamples) -> dict[str, str]:
    """Return state outputs -> their inputs; none if there are no other outputs or inputs."""
    input_by_state: dict[str, str] = {}
    input_names = samples.inputs[0] if samples.inputs else {}
    for name in samples.names:
        for source in input_names:
            if source not in input_by_state.values() and _is_state(name, source, samples):
                input_by_state[name] = source
                break
    has_other_outputs = len(input_by_state) < len(samples.every)
    has_other_inputs = len(input_by_state) < len(input_names)
    return input_by_state if has_other_outputs and has_other_inputs else {}


def _is_state(name: str, source: str, samples: FirstSamples) -> bool:
    """Whether an output has an input's shape and type in every sample; no scalars, no pictures."""
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=False):
        fed = inputs.get(source)
        if fed is None or fed.shape != value.shape or fed.dtype != value.dtype:
            return False
        if not np.issubdtype(value.dtype, np.floating) or value.size < 2:
            return False
        if value.ndim == _PICTURE and {value.shape[1], value.shape[3]} & _CHANNELS:
            return False
    return True


def find_logits(samples: FirstSamples) -> frozenset[str]:
    """Return outputs of raw scores whose Softmax, LogSoftmax or Sigmoid is another output.

    The other one of each pair is used: its values are known to be probabilities.
    """
    names = [name for name in samples.names if all(map(is_floating, samples.arrays(name)))]
    logits: set[str] = set()
    for raw in names:
        for name in names:
            is_distinct = name != raw and name not in logits
            if is_distinct and _are_activated(samples.arrays(raw), samples.arrays(name)):
                logits.add(raw)
    return frozenset(logits)


def _are_activated(raw: Sequence[Array], activated: Sequence[Array]) -> bool:
    """Whether outputs are the same Softmax, LogSoftmax or Sigmoid of `raw` in every sample."""
    pairs = [*zip(raw, activated, strict=True)]
    for scores, value in pairs:
        # a constant would match any other constant
        if scores.shape != value.shape or scores.size < 2 or np.ptp(value) == 0:
            return False
    if all(_is_close(_sigmoid(scores), value) for scores, value in pairs):
        return True
    for axis, size in enumerate(raw[0].shape):
        if size < 2:
            continue
        logarithms = [_log_softmax(scores, axis) for scores in raw]
        if all(map(_is_close, logarithms, activated)):
            return True
        if all(map(_is_close, map(np.exp, logarithms), activated)):
            return True
    return False


def _sigmoid(scores: Array) -> Floats:
    exact = np.clip(scores.astype(np.float64), -700, 700)
    return np.asarray(1 / (1 + np.exp(-exact)))


def _log_softmax(scores: Array, axis: int) -> Floats:
    shifted = scores.astype(np.float64)
    shifted -= shifted.max(axis=axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))


def _is_close(computed: Floats, value: Array) -> bool:
    exact = value.astype(np.float64)
    tolerance = _TOLERANCE * np.maximum(1, np.abs(exact))
    return bool((np.abs(computed - exact) <= tolerance).all())


def find_argmax_outputs(samples: FirstSamples) -> dict[str, str]:
    """Return ArgMax output -> the output of its scores, the first of several."""
    arrays: Mapping[str, list[Array]] = {name: samples.arrays(name) for name in samples.names}
    scores_by_argmax: dict[str, str] = {}
    for name, indices in arrays.items():
        if not all(np.issubdtype(value.dtype, np.integer) for value in indices):
            continue
        for scores, values in arrays.items():
            if all(map(is_floating, values)) and _are_argmax(indices, values):
                scores_by_argmax.setdefault(name, scores)
    return scores_by_argmax


def _are_argmax(indices: Sequence[Array], scores: Sequence[Array]) -> bool:
    """Whether these are the ArgMax of `scores` along one axis, which may be kept as 1."""
    for axis in range(min(value.ndim for value in scores)):
        pairs = zip(indices, scores, strict=True)
        if all(_is_argmax(index, value, axis) for index, value in pairs):
            return True
    return False


def _is_argmax(indices: Array, scores: Array, axis: int) -> bool:
    if scores.shape[axis] < 2 or indices.size * scores.shape[axis] != scores.size:
        return False
    best = scores.argmax(axis=axis, keepdims=True)
    if indices.shape not in (best.shape, best.squeeze(axis).shape):
        return False
    return bool(np.array_equal(indices.reshape(-1), best.reshape(-1)))
