"""What a task is: outputs recognised by their form, and a figure of two models' outputs.

The few samples to look at: those where two models differ most, and one where they agree.

Numbers and boxes are kept, no arrays of the model, and of a few samples only: memory stays flat.

Outputs that the next call is fed: states of a recurrent network, caches of a stream.

Outputs that say again what another one says: scores and their Softmax, a class and its scores.

Classifiers often give both, as those of scikit-learn do (the class, and what each class has) and
many of text and sound (raw scores, and their Softmax). Each form of a task knows one of them, and
the other is no reason against it.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.parts import Part
from deploy.metrics.rows import Outputs
from deploy.metrics.tasks.detections import Detections
from deploy.tensors import Array

MOST = 4  # samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxExample:
    """One sample's boxes of both models above a threshold, in pixels of the model's input.

    Attributes:
        number: of the sample, from 0.
        size: (height, width) of the model's input.
        threshold: of the score.
        kept: boxes of FP32 that the candidate finds too.
        found: the candidate's own boxes for them, in the same order.
        lost: boxes of FP32 alone.
        new: boxes of the candidate alone.
    """

    number: int
    size: tuple[int, int]
    threshold: float
    kept: Detections
    found: Detections
    lost: Detections
    new: Detections


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassExample:
    """One sample that the two models give to different classes.

    Attributes:
        number: of the sample, from 0.
        output: which tells the class.
        reference, candidate: class and its value of FP32 and of the candidate.
    """

    number: int
    output: str
    reference: tuple[int, float]
    candidate: tuple[int, float]


Example = BoxExample | ClassExample
E = TypeVar("E", bound=Example)


@dataclass(slots=True)
class Foremost(Generic[E]):
    """Of all samples that are offered, at most `MOST` that differ most and as many that agree."""

    differing: list[tuple[float, int, E]] = field(default_factory=list)
    agreeing: list[tuple[float, int, E]] = field(default_factory=list)

    def offer(self, example: E, *, differs: float, says: float) -> None:
        """Look at a sample: how much the models differ in it, and how much FP32 says at all."""
        if differs > 0:
            _insert(self.differing, (-differs, example.number, example))
        elif says > 0:
            _insert(self.agreeing, (-says, example.number, example))

    @property
    def numbers(self) -> frozenset[int]:
        """Of the samples that are kept."""
        return frozenset(number for _, number, _ in (*self.differing, *self.agreeing))

    def result(self) -> tuple[E, ...]:
        """Those that differ, the most first, and at least one that agrees where there is one."""
        room = MOST - 1 if self.agreeing else MOST
        first = self.differing[:room]
        rest = self.agreeing[: MOST - len(first)]
        return tuple(example for _, _, example in [*first, *rest])


def _insert(row: list[tuple[float, int, E]], entry: tuple[float, int, E]) -> None:
    bisect.insort(row, entry, key=lambda one: one[:2])
    del row[MOST:]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """How much of what the float model says the candidate says too.

    Attributes:
        task: what the outputs are: "boxes", "classes", ...
        figure: what is counted, such as "boxes kept".
        value: more is better; a share that is 1 where both say the same, but of a user's metric.
        reference: what the float model itself reaches.
        count: the figure in a few characters, such as "84 of 88".
        words: the counts, as a person would say them.
        samples: samples it was counted over.
        form: how the outputs were read, in words.
        beside: outputs that it tells nothing of.
    """

    task: str
    figure: str
    value: float
    words: str
    count: str
    samples: int
    reference: float = 1.0
    form: str = ""
    beside: tuple[str, ...] = ()

    @property
    def lost(self) -> float:
        """What the candidate lacks; of a figure above 1, such as percent, as a share of it."""
        return (self.reference - self.value) / max(1.0, abs(self.reference))


def kept_figure(
    task: str, counts: Sequence[int], *, above: str, samples: int, form: str
) -> TaskFigure:
    """Dice's figure of things that are found: boxes, labels.

    Args:
        task: what is found, in the plural.
        counts: FP32's, the candidate's, both's.
        above: what a thing counts from, in words.
        samples: samples it was counted over.
        form: how the outputs were read, in words.
    """
    own, others, kept = counts
    return TaskFigure(
        task=task,
        figure=f"{task} kept",
        value=2 * kept / (own + others),
        count=f"{kept} of {own}",
        words=f"{kept} of {own} {task} of FP32 kept, {others - kept} new ({above})",
        samples=samples,
        form=form,
    )


def classes_figure(
    same: int, samples: int, among: str, *, compared: int, form: str, beside: tuple[str, ...] = ()
) -> TaskFigure:
    """The share of best classes that stayed.

    Args:
        same: how many did.
        samples: samples they were counted over.
        among: how many are among the best few, in words; "" where there are not more.
        compared: how many classes of FP32 there were.
        form: how the outputs were read, in words.
        beside: as of `TaskFigure`.
    """
    return TaskFigure(
        task="classes",
        figure="top-1 agreement",
        value=same / compared,
        count=f"{same} of {compared}",
        words=f"{same} of {compared} best classes as FP32's{among and f', {among}'}",
        samples=samples,
        form=form,
        beside=beside,
    )


class Tally(Protocol):
    """A running comparison in flat memory."""

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one sample: arrays with a batch of 1 (or none)."""
        ...

    def result(self) -> TaskFigure | None:
        """The figure; None where the float model said nothing to be compared with."""
        ...


@runtime_checkable
class Showing(Protocol):
    """A tally that keeps a few samples to be looked at."""

    @property
    def watched(self) -> frozenset[int]:
        """Numbers, from 0, of the samples that may still be among those to be shown."""
        ...

    def shown(self) -> tuple[Example, ...]:
        """The samples, those where both models differ most first."""
        ...


class Task(Protocol):
    """A recognised task: a frozen value."""

    @property
    def name(self) -> str:
        """What the outputs are, in one word."""
        ...

    @property
    def form(self) -> str:
        """How the outputs are read, in words."""
        ...

    @property
    def parts(self) -> Mapping[str, tuple[Part, ...]]:
        """Output -> its parts, where the task knows them better than the data.

        An output without any is not to be compared value by value, as a list of detections
        whose order changes.
        """
        ...

    def tally(self) -> Tally:
        """A new comparison."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """The float model's first samples, which a task is recognised from.

    Attributes:
        inputs: one mapping a sample, with a batch of 1.
        outputs: the same, floating-point and integer outputs alike.
    """

    inputs: Sequence[Outputs]
    outputs: Sequence[Outputs] = field(default_factory=tuple)

    def arrays(self, name: str) -> list[Array]:
        """One output over the samples."""
        return [one[name] for one in self.outputs]

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that hold values in every sample."""
        return tuple(n for n in self.every if all(np.size(one[n]) for one in self.outputs))

    @property
    def every(self) -> tuple[str, ...]:
        """Outputs that every sample has, if only as an empty list."""
        first = self.outputs[0] if self.outputs else {}
        return tuple(name for name in first if all(name in one for one in self.outputs))


_PICTURE = 4  # dimensions
_CHANNELS = (1, 3, 4)


def carried(seen: Seen) -> dict[str, str]:
    """Such outputs -> the inputs that take them; none where nothing else is fed or said."""
    found: dict[str, str] = {}
    for name in seen.names:
        source = next(_sources(name, seen, set(found.values())), None)
        if source is not None:
            found[name] = source
    inputs = {name for fed in seen.inputs for name in fed}
    alone = len(found) == len(seen.every) or len(found) == len(inputs)
    return {} if alone else found


def without(seen: Seen, states: Collection[str]) -> Seen:
    """The same without these outputs."""
    rows = [{name: one[name] for name in one if name not in states} for one in seen.outputs]
    return Seen(seen.inputs, rows)


def _sources(name: str, seen: Seen, taken: set[str]) -> Iterator[str]:
    """Inputs of the same form in every sample: several values each, and no picture."""
    for source in seen.inputs[0] if seen.inputs else ():
        pairs = zip(seen.arrays(name), seen.inputs, strict=False)
        if source not in taken and all(_takes(fed.get(source), value) for value, fed in pairs):
            yield source


def _takes(fed: Array | None, value: Array) -> bool:
    if fed is None or fed.shape != value.shape or fed.dtype != value.dtype:
        return False
    picture = value.ndim == _PICTURE and {value.shape[1], value.shape[3]} & set(_CHANNELS)
    return bool(np.issubdtype(value.dtype, np.floating) and value.size > 1 and not picture)


_CLOSE = 1e-4  # two ways to the same share, in float16 or float32

Floats = NDArray[np.float64]


def unrolled(seen: Seen) -> frozenset[str]:
    """Outputs of raw scores whose Softmax, its logarithm or Sigmoid another output is.

    What is left of each pair is what training made sure of: shares, or their logarithms.
    """
    names = [name for name in seen.names if all(map(_is_floating, seen.arrays(name)))]
    found: set[str] = set()
    for raw in names:
        others = (name for name in names if name != raw and name not in found)
        if any(_goes_over(seen.arrays(raw), seen.arrays(name)) for name in others):
            found.add(raw)
    return frozenset(found)


def best_of(seen: Seen) -> dict[str, str]:
    """Outputs that are the place of the best of another's scores -> that other output."""
    found: dict[str, str] = {}
    for name in seen.names:
        places = seen.arrays(name)
        if all(np.issubdtype(one.dtype, np.integer) for one in places):
            scores = (
                other
                for other in seen.names
                if all(map(_is_floating, seen.arrays(other)))
                and _are_places(places, seen.arrays(other))
            )
            source = next(scores, None)
            if source is not None:
                found[name] = source
    return found


def _is_floating(value: Array) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating) and value.size)


def _goes_over(raw: Sequence[Array], others: Sequence[Array]) -> bool:
    """Whether the others are the same function of raw scores, in every sample."""
    pairs = list(zip(raw, others, strict=True))
    if any(one.shape != other.shape or one.size < 2 for one, other in pairs):
        return False
    if not all(np.isfinite(one).all() for pair in pairs for one in pair):
        return False
    axes = (axis for axis, size in enumerate(raw[0].shape) if size > 1)
    ways: list[str | int] = ["sigmoid", *axes]
    return any(all(_fits(one, other, way) for one, other in pairs) for way in ways)


def _fits(raw: Array, other: Array, way: str | int) -> bool:
    values, wanted = raw.astype(np.float64), other.astype(np.float64)
    if np.ptp(wanted) == 0:  # what never changes is like anything else that does not
        return False
    if way == "sigmoid":
        made = 1 / (1 + np.exp(-np.clip(values, -700, 700)))
        return _near(made, wanted)
    logarithms = _log_softmax(values, int(way))
    return _near(np.exp(logarithms), wanted) or _near(logarithms, wanted)


def _log_softmax(values: Floats, axis: int) -> Floats:
    moved = values - values.max(axis=axis, keepdims=True)
    return np.asarray(moved - np.log(np.exp(moved).sum(axis=axis, keepdims=True)))


def _near(made: Floats, wanted: Floats) -> bool:
    """Alike but for rounding."""
    return bool((np.abs(made - wanted) <= _CLOSE * np.maximum(1, np.abs(wanted))).all())


def _are_places(places: Sequence[Array], scores: Sequence[Array]) -> bool:
    """Whether each is the ArgMax along one axis, with or without that axis."""
    pairs = list(zip(places, scores, strict=True))
    axes = range(min(one.ndim for one in scores))
    return any(all(_best_along(one, other, axis) for one, other in pairs) for axis in axes)


def _best_along(places: Array, scores: Array, axis: int) -> bool:
    if scores.shape[axis] < 2 or places.size * scores.shape[axis] != scores.size:
        return False
    best = scores.argmax(axis=axis)
    shapes = best.shape, (*best.shape[:axis], 1, *best.shape[axis:])
    return places.shape in shapes and bool(np.array_equal(places.reshape(-1), best.reshape(-1)))
