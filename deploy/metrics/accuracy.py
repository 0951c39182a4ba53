"""How far an engine's outputs are from the reference's, in one pass and flat memory.

Each output as a whole (`deploy.metrics.running` has the formulas), its parts, and what it is for:
`deploy.metrics.truth`. NaN and Inf are never averaged away: `problems` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError, FeedError
from deploy.graph.width import of_own_channels
from deploy.metrics.changes import Changes
from deploy.metrics.form import Form
from deploy.metrics.precision import GroundTruth, MeanPrecision
from deploy.metrics.rows import batch_length
from deploy.metrics.running import OutputAccuracy, RunningError, cosine, output_json, sqnr_db
from deploy.metrics.tasks import Metric, TaskFigure
from deploy.metrics.tasks.examples import Example
from deploy.metrics.truth import PartAccuracy, Truth, part_json, task_json
from deploy.metrics.values import are_ranked, are_values
from deploy.tensors import Array, Session, Speaking, TensorSpec

_ENOUGH = 8  # samples to tell a regression's values, or ranked ones, from scores
_OF_CLASSES = ("", "classes")  # tasks whose largest output may be a class


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What `compare` found.

    Attributes:
        samples: samples compared (rows of the batches, not batches).
        outputs: one entry per output, in the reference's order.
        top1_reference, top1_candidate: share of samples whose largest output is the label's.
        top1_agreement: share of samples where both have the same largest output; without labels
            None of a regression's values, of such as TopK has ranked, and where the task is another
            than classes.
        problems: NaN, Inf and differing shapes, in sentences; empty where all is well.
        doubts: outputs that are an input but for a change that is lost, in sentences.
        classes: classes of the first output, where it holds a score for each.
        favourite: share of the samples that the reference gives to its most frequent class.
        reading: how the outputs were read, or that their form does not tell.
        parts: one entry per part of an output, the worst (least SQNR) first.
        precision: mean average precision of both, where annotated objects were given.
        task: how much of what the reference says the candidate says; None where the outputs'
            form does not tell what they are for, or the reference said next to nothing.
    """

    samples: int
    outputs: tuple[OutputAccuracy, ...]
    top1_reference: float | None = None
    top1_candidate: float | None = None
    top1_agreement: float | None = None
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    classes: int | None = None
    favourite: float | None = None
    parts: tuple[PartAccuracy, ...] = ()
    task: TaskFigure | None = None
    precision: MeanPrecision | None = None
    reading: str = ""

    @property
    def worst(self) -> PartAccuracy | None:
        """The part that lost most; the output itself where it is one part."""
        return self.parts[0] if self.parts else None

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; numbers JSON has no word for become "inf" or "nan"."""
        return {
            "samples": self.samples,
            "outputs": [output_json(output) for output in self.outputs],
            "top1_reference": self.top1_reference,
            "top1_candidate": self.top1_candidate,
            "top1_agreement": self.top1_agreement,
            "classes": self.classes,
            "favourite": self.favourite,
            "problems": list(self.problems),
            "reading": self.reading,
            "parts": [part_json(part) for part in self.parts],
            "task": None if self.task is None else task_json(self.task),
            "precision": None if self.precision is None else asdict(self.precision),
        }


def compare(
    reference: Session,
    candidate: Session,
    samples: Iterable[Mapping[str, Array]],
    *,
    labels: Sequence[int] | None = None,
    count: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Run both sessions on the same samples and compare every output.

    Args:
        reference: the float model.
        candidate: the engine; its outputs must have the reference's names.
        samples: feeds of one batch each, read once; a batch is as long as its first input.
        labels: the class of each sample in order, 0 the first class.
        count: how many samples there are, where the last batch was filled up with others.
        progress: called after every feed.

    Raises:
        ConfigError: outputs whose names differ.
        FeedError: no sample, or labels that do not fit the samples or the classes.
        BackendError: a session refused a sample.
    """
    comparison = Comparison(reference, candidate, labels=labels)
    for feed in samples:
        comparison.add(feed, reference.run(feed), candidate.run(feed), count=count)
        progress()
    return comparison.result()


class Comparison:
    """Figures of one candidate against the reference, batch by batch, in flat memory."""

    def __init__(
        self,
        reference: Speaking,
        candidate: Speaking,
        *,
        labels: Sequence[int] | GroundTruth | None = None,
        form: Form | None = None,
        metric: Metric | None = None,
    ) -> None:
        """Args as `compare`.

        Args beyond those:
            form: parts and task of the outputs; None finds them from the first samples.
            labels: or the objects that detectors are to find.
            metric: the user's figure, in the task's place; the labels of classes are for it then.

        Raises:
            ConfigError: outputs whose names differ.
        """
        self._names = _common_outputs(reference, candidate)
        self._errors = {name: RunningError(name) for name in self._names}
        objects = labels if isinstance(labels, GroundTruth) else None
        classes = None if isinstance(labels, GroundTruth) else labels
        self._top1 = _Top1(classes if metric is None else None)
        self._changes = Changes()
        self._truth = Truth(form, metric=metric, labels=classes, objects=objects)

    def add(
        self,
        feed: Mapping[str, Array],
        reference: Mapping[str, Array],
        candidate: Mapping[str, Array],
        *,
        count: int | None = None,
    ) -> None:
        """Add one batch's outputs; `count` as in `compare`.

        Raises:
            FeedError: labels that do not fit the samples or the classes.
        """
        batch = batch_length(feed)
        inputs: Mapping[str, Array] = feed
        left = {name: reference[name] for name in self._names}
        right = {name: candidate[name] for name in self._names}
        if count is not None and self._top1.samples + batch > count:
            kept = count - self._top1.samples
            inputs, left, right = (_first(arrays, kept, batch) for arrays in (feed, left, right))
            batch = kept
        for name, error in self._errors.items():
            error.add(left[name], right[name], batch)
        self._top1.add(left[self._names[0]], right[self._names[0]], batch)
        self._changes.add(inputs, left, right)
        self._truth.add(inputs, left, right, batch)

    @property
    def watched(self) -> frozenset[int]:
        """Numbers, from 0, of samples whose pictures may be asked for in the end."""
        return self._truth.watched

    def shown(self) -> tuple[Example, ...]:
        """A few samples where both models differ most, the most first."""
        return self._truth.shown()

    def result(self) -> Accuracy:
        """The figures.

        Raises:
            FeedError: no sample, or labels that do not fit.
        """
        if self._top1.samples == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        outputs = tuple(error.result() for error in self._errors.values())
        found = self._top1.result(outputs, kind=self._truth.kind)
        return replace(
            found,
            parts=self._truth.parts(outputs),
            task=self._truth.task(),
            precision=self._truth.precision(),
            reading=self._truth.reading(),
            problems=tuple(_problems(outputs, found.samples, self._truth.lists)),
            doubts=tuple(self._changes.lost()),
        )


@dataclass(frozen=True, slots=True)
class Said:
    """Outputs that were kept, in the place of the session that gave them."""

    values: Mapping[str, Array]

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, as of these values."""
        kinds = {
            name: "str" if v.dtype.kind in "OSU" else v.dtype.name
            for name, v in self.values.items()
        }
        return [TensorSpec(name, kinds[name], v.shape) for name, v in self.values.items()]


class TensorComparison:
    """Figures of pairs of tensors, batch by batch.

    Attributes:
        pairs: reference's name -> candidate's.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        """Raises ConfigError where there is no pair."""
        if not pairs:
            raise ConfigError("a comparison of tensors needs at least one pair of names, got none")
        self.pairs = dict(pairs)
        self._errors = {name: RunningError(name) for name in pairs}
        self._seen = 0

    def add(
        self,
        feed: Mapping[str, Array],
        reference: Mapping[str, Array],
        candidate: Mapping[str, Array],
    ) -> None:
        """Add one batch's tensors."""
        batch = batch_length(feed)
        for name, other in self.pairs.items():
            left, right = reference[name], candidate[other]
            left, right = of_own_channels(name, left, right), of_own_channels(other, right, left)
            self._errors[name].add(left, right, batch)
        self._seen += batch

    def result(self) -> tuple[OutputAccuracy, ...]:
        """The figures.

        Raises:
            FeedError: no sample.
        """
        if self._seen == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        return tuple(error.result() for error in self._errors.values())


class _Top1:
    """Counts whose largest output is right, and where both agree."""

    def __init__(self, labels: Sequence[int] | None) -> None:
        self.labels = labels
        self.samples = self.right_reference = self.right_candidate = self.agreed = 0
        self.classes = True  # until an output turns out to hold no classes
        self.count: int | None = None
        self.given: Counter[int] = Counter()  # class -> samples the reference gives to it
        self.values = True  # until a sample is no regression's
        self.ranked = True  # until a sample's best is not its first

    def add(self, reference: Array, candidate: Array, batch: int) -> None:
        start, self.samples = self.samples, self.samples + batch
        left, right = _classes(reference, batch), _classes(candidate, batch)
        if left is None or right is None or reference.shape != candidate.shape:
            self.classes = False
            return
        self.count = _class_count(reference, batch)
        self.given.update(left.tolist())
        self.values = self.values and are_values(reference, batch)
        self.ranked = self.ranked and are_ranked(reference, batch)
        # -1 marks a sample with NaN, which neither agrees with anything nor is right.
        self.agreed += int(((left == right) & (left >= 0)).sum())
        if self.labels is not None:
            wanted = self._wanted(start, batch, _class_count(reference, batch))
            self.right_reference += int((left == wanted).sum())
            self.right_candidate += int((right == wanted).sum())

    def _wanted(self, start: int, batch: int, classes: int | None) -> NDArray[np.int64]:
        assert self.labels is not None
        wanted = np.asarray(self.labels[start : start + batch], np.int64)
        if len(wanted) != batch:
            raise FeedError(
                f"there must be one label a sample, got {len(self.labels)} labels"
                f" for {start + batch} samples or more"
            )
        wrong = wanted[(wanted < 0) | (wanted >= (classes or np.iinfo(np.int64).max))]
        if wrong.size:
            raise FeedError(
                f"labels must be 0 to {(classes or 0) - 1} for the model's {classes} classes,"
                f" got {wrong[0]}; labels that start at 1 must be lowered by one"
            )
        return wanted

    def result(self, outputs: tuple[OutputAccuracy, ...], *, kind: str) -> Accuracy:
        labelled = self.labels is not None
        if self.labels is not None:
            self._check_labels(self.labels)
        others = not kind and (self.values or self.ranked) and self.samples >= _ENOUGH
        told = labelled or (kind in _OF_CLASSES and not others)
        share = self.samples if self.classes and told else 0
        # an embedding that points one way in all samples is as doubtful as one class in all
        alike = share or (self.samples if self.classes and kind == "embeddings" else 0)
        return Accuracy(
            samples=self.samples,
            outputs=outputs,
            top1_reference=self.right_reference / share if labelled else None,
            top1_candidate=self.right_candidate / share if labelled else None,
            top1_agreement=self.agreed / share if share else None,
            classes=self.count if alike else None,
            favourite=self.given.most_common(1)[0][1] / alike if alike else None,
        )

    def _check_labels(self, labels: Sequence[int]) -> None:
        if len(labels) != self.samples:
            raise FeedError(
                f"there must be one label a sample, got {len(labels)} labels"
                f" for {self.samples} samples"
            )
        if not self.classes:
            raise FeedError(
                "labels need a first output of one score a class, [N, classes];"
                " this model's has another shape, so leave the labels out"
            )


def _problems(
    outputs: Iterable[OutputAccuracy], samples: int, lists: frozenset[str]
) -> Iterator[str]:
    """Sentences; the length of `lists` may differ."""
    for output in outputs:
        for count, whose in zip(output.not_finite, ("reference", "int8 engine"), strict=True):
            if count:
                yield (
                    f"output {output.name!r} of the {whose} holds NaN or Inf"
                    f" in {count} of {samples} samples"
                )
        if output.other_shape and output.name not in lists:
            yield (
                f"output {output.name!r} has another shape in the int8 engine"
                f" in {output.other_shape} of {samples} samples"
            )


def _common_outputs(reference: Speaking, candidate: Speaking) -> list[str]:
    names = [spec.name for spec in reference.outputs if spec.dtype != "str"]
    others = {spec.name for spec in candidate.outputs}
    if not names or set(names) - others:
        raise ConfigError(
            f"both models must have the same outputs, got {names} and {sorted(others)};"
            " compare an engine with the model it was built from"
        )
    return names


def _first(outputs: Mapping[str, Array], rows: int, batch: int) -> dict[str, Array]:
    """The first rows of every output that is made row by row."""
    return {
        name: value[:rows] if np.ndim(value) and value.shape[0] == batch else value
        for name, value in outputs.items()
    }


def _class_count(output: Array, batch: int) -> int | None:
    """Classes of a score output; None for an output that holds the class itself."""
    return None if output.size == batch else output.size // batch


def _classes(output: Array, batch: int) -> NDArray[np.int64] | None:
    """[N, C] scores (trailing 1s allowed) or [N] integer classes -> [N]; None for other shapes."""
    if output.ndim == 0 or output.shape[0] != batch:
        return None
    if output.size == batch and np.issubdtype(output.dtype, np.integer):
        return np.asarray(output.reshape(batch), np.int64)
    if output.ndim < 2 or output.shape[1] < 2 or output.size != batch * output.shape[1]:
        return None
    if output.dtype.kind not in "fiu" or (output.dtype.kind != "f" and output.dtype.itemsize > 1):
        return None  # flags, places or numbers of classes; scores in integers have one byte
    scores = output.reshape(batch, -1)
    best = np.asarray(scores.argmax(axis=1), np.int64)
    best[np.isnan(scores.astype(np.float64)).any(axis=1)] = -1
    return best


__all__ = [
    "Accuracy",
    "Comparison",
    "OutputAccuracy",
    "PartAccuracy",
    "TensorComparison",
    "compare",
    "cosine",
    "sqnr_db",
]
