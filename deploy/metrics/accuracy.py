"""How far an engine's outputs are from the reference's, in one pass and flat memory.

Over all samples of an output, with r the reference and c the candidate, in float64::

    SQNR dB = 10 log10(sum r^2 / sum (r - c)^2)       cosine = <r, c> / (|r| |c|), per sample

NaN and Inf are never averaged away: an output that holds one, or whose shape differs, has no
SQNR, cosine or error (NaN), and `problems` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError, FeedError
from deploy.tensors import Array, Session

_BLOCK = 1 << 13  # values of a row that are summed at a time; for more, BLAS wakes its threads


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAccuracy:
    """One output (or inner tensor) of the candidate against the reference's.

    Attributes:
        sqnr_db: signal to quantization noise; inf where both are equal, NaN where not finite.
        cosine_mean, cosine_min: cosine of each sample's values, over the samples.
        max_abs_error: largest absolute difference of any element, in the tensor's own unit.
        not_finite: samples with NaN or Inf in the reference, in the candidate.
        other_shape: samples whose shapes differ (e.g. another number of detections).
    """

    name: str
    sqnr_db: float
    cosine_mean: float
    cosine_min: float
    max_abs_error: float
    not_finite: tuple[int, int] = (0, 0)
    other_shape: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What `compare` found.

    Attributes:
        samples: samples compared (rows of the batches, not batches).
        outputs: one entry per output, in the reference's order.
        top1_reference, top1_candidate: share of samples whose largest output is the label's.
        top1_agreement: share of samples where both have the same largest output.
        problems: NaN, Inf and differing shapes, in sentences; empty where all is well.
    """

    samples: int
    outputs: tuple[OutputAccuracy, ...]
    top1_reference: float | None = None
    top1_candidate: float | None = None
    top1_agreement: float | None = None
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; numbers JSON has no word for become "inf" or "nan"."""
        return {
            "samples": self.samples,
            "outputs": [_output_json(output) for output in self.outputs],
            "top1_reference": self.top1_reference,
            "top1_candidate": self.top1_candidate,
            "top1_agreement": self.top1_agreement,
            "problems": list(self.problems),
        }


def compare(
    reference: Session,
    candidate: Session,
    samples: Iterable[Mapping[str, Array]],
    *,
    labels: Sequence[int] | None = None,
    count: int | None = None,
) -> Accuracy:
    """Run both sessions on the same samples and compare every output.

    Args:
        reference: the float model.
        candidate: the engine; its outputs must have the reference's names.
        samples: feeds of one batch each, read once; a batch is as long as its first input.
        labels: the class of each sample in order, 0 the first class.
        count: how many samples there are, where the last batch was filled up with others.

    Raises:
        ConfigError: outputs whose names differ.
        FeedError: no sample, or labels that do not fit the samples or the classes.
        BackendError: a session refused a sample.
    """
    comparison = Comparison(reference, candidate, labels=labels)
    for feed in samples:
        comparison.add(feed, reference.run(feed), candidate.run(feed), count=count)
    return comparison.result()


class Comparison:
    """Figures of one candidate against the reference, batch by batch, in flat memory."""

    def __init__(
        self,
        reference: Session,
        candidate: Session,
        *,
        labels: Sequence[int] | None = None,
    ) -> None:
        """Args as `compare`.

        Raises:
            ConfigError: outputs whose names differ.
        """
        self._names = _common_outputs(reference, candidate)
        self._errors = {name: _Error(name) for name in self._names}
        self._top1 = _Top1(labels)

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
        batch = _batch_length(feed)
        left = {name: reference[name] for name in self._names}
        right = {name: candidate[name] for name in self._names}
        if count is not None and self._top1.samples + batch > count:
            kept = count - self._top1.samples
            left, right = (_first(outputs, kept, batch) for outputs in (left, right))
            batch = kept
        for name, error in self._errors.items():
            error.add(left[name], right[name], batch)
        self._top1.add(left[self._names[0]], right[self._names[0]], batch)

    def result(self) -> Accuracy:
        """The figures.

        Raises:
            FeedError: no sample, or labels that do not fit.
        """
        if self._top1.samples == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        return self._top1.result(tuple(error.result() for error in self._errors.values()))


class TensorComparison:
    """Figures of pairs of tensors, reference's name -> candidate's, batch by batch."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        """Raises ConfigError where there is no pair."""
        if not pairs:
            raise ConfigError("a comparison of tensors needs at least one pair of names, got none")
        self._pairs = dict(pairs)
        self._errors = {name: _Error(name) for name in pairs}
        self._seen = 0

    def add(
        self,
        feed: Mapping[str, Array],
        reference: Mapping[str, Array],
        candidate: Mapping[str, Array],
    ) -> None:
        """Add one batch's tensors."""
        batch = _batch_length(feed)
        for name, other in self._pairs.items():
            self._errors[name].add(reference[name], candidate[other], batch)
        self._seen += batch

    def result(self) -> tuple[OutputAccuracy, ...]:
        """The figures.

        Raises:
            FeedError: no sample.
        """
        if self._seen == 0:
            raise FeedError("a comparison needs at least one sample, got none")
        return tuple(error.result() for error in self._errors.values())


@dataclass(slots=True)
class _Error:
    """Running sums of one output: O(1) memory, whatever the number of samples."""

    name: str
    signal: float = 0.0
    noise: float = 0.0
    cosine_sum: float = 0.0
    cosine_min: float = math.inf
    samples: int = 0
    max_abs: float = 0.0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    other_shape: int = 0

    def add(self, reference: Array, candidate: Array, batch: int) -> None:
        left, right = np.asarray(reference), np.asarray(candidate)
        if left.shape != right.shape:
            self.other_shape += batch
            return
        if left.size == 0:  # nothing detected in this sample, by both
            return
        for one, other in zip(_rows(left, batch), _rows(right, batch), strict=True):
            self._add_row(one, other)

    def _add_row(self, left: Array, right: Array) -> None:
        sums = _Sums.of(left, right)
        if not sums.finite:
            self.not_finite[0] += not np.isfinite(left).all()
            self.not_finite[1] += not np.isfinite(right).all()
            if not (np.isfinite(left).all() and np.isfinite(right).all()):
                return
        self.signal += sums.left
        self.noise += sums.difference
        self.max_abs = max(self.max_abs, sums.largest)
        self.cosine_sum += sums.cosine
        self.cosine_min = min(self.cosine_min, sums.cosine)
        self.samples += 1

    def result(self) -> OutputAccuracy:
        broken = any(self.not_finite) or self.other_shape > 0 or self.samples == 0
        return OutputAccuracy(
            name=self.name,
            sqnr_db=math.nan if broken else sqnr_db(self.signal, self.noise),
            cosine_mean=math.nan if broken else self.cosine_sum / self.samples,
            cosine_min=math.nan if broken else self.cosine_min,
            max_abs_error=math.nan if broken else self.max_abs,
            not_finite=(self.not_finite[0], self.not_finite[1]),
            other_shape=self.other_shape,
        )


class _Top1:
    """Counts whose largest output is right, and where both agree."""

    def __init__(self, labels: Sequence[int] | None) -> None:
        self.labels = labels
        self.samples = self.right_reference = self.right_candidate = self.agreed = 0
        self.classes = True  # until an output turns out to hold no classes

    def add(self, reference: Array, candidate: Array, batch: int) -> None:
        start, self.samples = self.samples, self.samples + batch
        left, right = _classes(reference, batch), _classes(candidate, batch)
        if left is None or right is None or reference.shape != candidate.shape:
            self.classes = False
            return
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

    def result(self, outputs: tuple[OutputAccuracy, ...]) -> Accuracy:
        labelled = self.labels is not None
        if self.labels is not None:
            self._check_labels(self.labels)
        share = self.samples if self.classes else 0
        return Accuracy(
            samples=self.samples,
            outputs=outputs,
            top1_reference=self.right_reference / share if labelled else None,
            top1_candidate=self.right_candidate / share if labelled else None,
            top1_agreement=self.agreed / share if share else None,
            problems=tuple(_problems(outputs, self.samples)),
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


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf for noise on a signal of zeros."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine(left: Array, right: Array) -> float:
    """Cosine of two tensors of one size, in float64; 1 if both are zero, 0 if only one is."""
    return _Sums.of(np.asarray(left).reshape(-1), np.asarray(right).reshape(-1)).cosine


@dataclass(frozen=True, slots=True)
class _Sums:
    """Products of two rows, summed in float64: each with itself, with the other, the difference."""

    left: float
    right: float
    product: float
    difference: float
    largest: float

    @classmethod
    def of(cls, left: Array, right: Array) -> _Sums:
        """A block of both at a time, while it is in a core's cache."""
        sums, largest = np.zeros(4), 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, left.size, _BLOCK):
                one = left[start : start + _BLOCK].astype(np.float64)
                other = right[start : start + _BLOCK].astype(np.float64)
                apart = one - other
                sums += (one @ one, other @ other, one @ other, apart @ apart)
                largest = max(largest, float(np.abs(apart, out=apart).max()))
        left_sum, right_sum, product, difference = (float(total) for total in sums)
        return cls(left_sum, right_sum, product, difference, largest)

    @property
    def finite(self) -> bool:
        """Whether neither row held NaN or Inf, nor overflowed."""
        return math.isfinite(self.left + self.right + self.difference)

    @property
    def cosine(self) -> float:
        """1 if both are zero, 0 if only one is."""
        norms = math.sqrt(self.left) * math.sqrt(self.right)
        if norms == 0:
            return float(self.left == self.right)
        return min(max(self.product / norms, -1.0), 1.0)


def _problems(outputs: Iterable[OutputAccuracy], samples: int) -> Iterator[str]:
    for output in outputs:
        for count, whose in zip(output.not_finite, ("reference", "int8 engine"), strict=True):
            if count:
                yield (
                    f"output {output.name!r} of the {whose} holds NaN or Inf"
                    f" in {count} of {samples} samples"
                )
        if output.other_shape:
            yield (
                f"output {output.name!r} has another shape in the int8 engine"
                f" in {output.other_shape} of {samples} samples"
            )


def _common_outputs(reference: Session, candidate: Session) -> list[str]:
    names = [spec.name for spec in reference.outputs if spec.dtype != "str"]
    others = {spec.name for spec in candidate.outputs}
    if not names or set(names) - others:
        raise ConfigError(
            f"both models must have the same outputs, got {names} and {sorted(others)};"
            " compare an engine with the model it was built from"
        )
    return names


def _batch_length(feed: Mapping[str, Array]) -> int:
    first = next(iter(feed.values()), None)
    return int(first.shape[0]) if first is not None and np.ndim(first) else 1


def _first(outputs: Mapping[str, Array], rows: int, batch: int) -> dict[str, Array]:
    """The first rows of every output that is made row by row."""
    return {
        name: value[:rows] if np.ndim(value) and value.shape[0] == batch else value
        for name, value in outputs.items()
    }


def _rows(value: Array, batch: int) -> Array:
    """[N, ...] -> [N, values]; one row where the first dimension is not the batch."""
    rows = batch if value.ndim > 0 and value.shape[0] == batch else 1
    return value.reshape(rows, -1)


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
    scores = output.reshape(batch, -1)
    best = np.asarray(scores.argmax(axis=1), np.int64)
    best[np.isnan(scores.astype(np.float64)).any(axis=1)] = -1
    return best


def _output_json(output: OutputAccuracy) -> dict[str, object]:
    return {
        "name": output.name,
        "sqnr_db": _number(output.sqnr_db),
        "cosine_mean": _number(output.cosine_mean),
        "cosine_min": _number(output.cosine_min),
        "max_abs_error": _number(output.max_abs_error),
        "not_finite": list(output.not_finite),
        "other_shape": output.other_shape,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
