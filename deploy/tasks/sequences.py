"""Sequences: a class per step (`STEPS`), such as voice activity, or text by CTC (`TEXT`).

Raw scores of steps are compared by value, unless `--task steps` says what they are. Independent
probabilities, such as the beginnings of words or a wake word, count by their side of 0.5.

The blank of a text is the first or the last symbol, and stands between symbols. Texts are decoded
greedily: repeats merged, blanks dropped. If blanks only follow the last symbol in every sample,
each step is the slot of a symbol, as in number plates, and repeats stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.tasks.evaluation_task import EvaluationTask, Form, TaskFigure, TaskTally
from deploy.tasks.first_samples import FirstSamples, drop_outputs, find_states
from deploy.tasks.indices import NO_CLASS, PlaceCounts
from deploy.tasks.rows import (
    Arrays,
    Integers,
    Outputs,
    activate,
    are_between,
    are_probabilities_or_logs,
    are_shares,
    is_floating,
    is_vector,
    sums_to_one,
)
from deploy.tasks.thresholds import (
    HIGH,
    LOW,
    MAX_BETWEEN_SHARE,
    MAX_SYMBOL_STEPS,
    MAX_WORD_STEPS,
    MIN_BLANK_SHARE,
    MIN_CONFIDENCE,
    MIN_COUNT,
    MIN_ORDERED,
    MIN_SYMBOLS,
)
from deploy.tensors import Array


def _read_steps(value: Array, axis: int) -> Array | None:
    """Return the scores of one sample as [T, C]; None for other shapes.

    `axis`: dimension of the classes, 1 or 2 of [1, T, C], [T, 1, C] or [1, C, T]. Maps of a height
    of 1 are read as these.
    """
    if value.ndim == 4 and value.shape[2] == 1:
        value = value[:, :, 0]
    if value.ndim != 3 or not value.size:
        return None
    steps = np.moveaxis(value, axis, 2)
    if 1 not in steps.shape[:2]:
        return None
    return steps.reshape(-1, steps.shape[2])


def _read_step_samples(samples: Arrays, axis: int) -> list[Array]:
    """Return the steps of all samples; none if one has none, or another number of classes."""
    tables = []
    for value in samples:
        steps = _read_steps(value, axis) if is_floating(value) else None
        if steps is None or len(steps) < MIN_COUNT or steps.shape[1] < 2:
            return []
        tables.append(steps)
    has_equal_classes = len({steps.shape[1] for steps in tables}) == 1
    if has_equal_classes:
        return tables
    return []


@dataclass(slots=True)
class _StepTally(TaskTally["Steps"]):
    """Counts steps by class, and remembers the worst sample."""

    steps: PlaceCounts = field(default_factory=PlaceCounts)
    worst_share: float = 1.0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        classes = self.task.read_classes(reference[self.task.output])
        equal, total = self.steps.add(classes, self.task.read_classes(candidate[self.task.output]))
        if total:
            self.worst_share = min(self.worst_share, equal / total)

    def result(self) -> TaskFigure | None:
        """Return the share of equal steps; None if FP32 gives all of them to one class."""
        counted = self.steps.without_usual()
        if counted is None:
            return None
        total = self.steps.reference.total()
        name, count = "steps alike", f"{self.steps.equal.total()} of {total}"
        text = f"{count} {self.task.agreement}"
        if counted.usual_class is not None:
            name, count = "steps alike but the usual", f"{counted.equal} of {counted.total}"
            usual_text = f"the usual class {counted.usual_class}"
            text += f", {count} of those that are not in both models of {usual_text}"
        if total > self.samples:
            text += f", {100 * self.worst_share:.1f} % in the worst sample"
        return self.figure(name, counted.equal / counted.total, count, text)


@dataclass(frozen=True, slots=True)
class Steps(EvaluationTask):
    """Classes of steps.

    Attributes:
        output: name of the output.
        classes: number of classes; 2 for independent probabilities, the sides of 0.5.
        axis: dimension of the classes, 1 or 2; None for independent probabilities.
        raw: whether these are logits, before the Sigmoid.
    """

    output: str
    classes: int
    axis: int | None
    raw: bool = False
    name = "steps"
    tally_type = _StepTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        if self.axis is None:
            scores = "raw scores" if self.raw else "probabilities"
            return f"{self.output}: {scores} of steps or labels, each its own"
        return f"{self.output}: {self.classes} classes a step"

    @property
    def agreement(self) -> str:
        """What the two models are compared by, as text."""
        if self.axis is not None:
            return "steps of FP32's class"
        if self.raw:
            return "scores on FP32's side of 0"
        return "probabilities on FP32's side of 0.5"

    def read_classes(self, value: Array) -> Integers:
        """Return the class of each step of one sample; none for another shape."""
        if self.axis is None:
            scores = value.reshape(-1)
            sides = (scores > (0 if self.raw else 0.5)).astype(np.int64)
            return np.where(np.isnan(scores), NO_CLASS, sides)
        steps = _read_steps(value, self.axis)
        if steps is None or steps.shape[1] != self.classes:
            return np.zeros(0, np.int64)
        best_classes = np.asarray(steps.argmax(axis=1), np.int64)
        best_classes[np.isnan(steps).any(axis=1)] = NO_CLASS
        return best_classes


STEPS = Form(
    shape="[N, T, C] or [N, C, T]; [N, T] or [N, 1]",
    values="probabilities of a class for each step, or their logarithms; or independent"
    " probabilities",
    figure="steps of the same class, or on the same side of 0.5; of several outputs the first",
    source="voice activity, taggers, wake words",
)


def fit_steps(name: str, samples: FirstSamples) -> Steps | None:
    """Return the steps of an output that the user or the file says to hold such."""
    values = samples.arrays(name)
    is_independent = samples.declared.ends.get(name) == "sigmoid" or all(map(is_vector, values))
    if is_independent or values[0].ndim != 3:
        raw = not all(map(are_shares, values))
        if values[0].ndim not in (1, 2, 3):
            return None
        return Steps(name, 2, None, raw)
    axis = _find_class_axis(values) or 2
    return Steps(name, values[0].shape[axis], axis)


def find_steps(samples: FirstSamples) -> Steps | None:
    """Recognise the first output of steps; others may be such, states, or numbers of a sample."""
    states = find_states(samples)
    values_by_name = drop_outputs(samples, states).floats
    decisions = [name for name in values_by_name if _are_decisions(name, samples)]
    if decisions and all(all(map(is_vector, values)) for values in values_by_name.values()):
        return Steps(decisions[0], 2, None)

    axis_by_name = {}
    for name, values in values_by_name.items():
        axis = _find_class_axis(values)
        if axis is not None:
            axis_by_name[name] = axis
    if not axis_by_name:
        return None
    first_name, axis = next(iter(axis_by_name.items()))
    tables = _read_step_samples(values_by_name[first_name], axis)
    for name in values_by_name.keys() - axis_by_name.keys():
        if all(map(_has_steps, values_by_name[name], tables)):
            return None  # numbers of what is found at each step
    return Steps(first_name, tables[0].shape[1], axis)


def _has_steps(value: Array, steps: Array) -> bool:
    """Whether an output has as many steps."""
    return value.ndim <= 3 and len(steps) in value.shape


def _are_decisions(name: str, samples: FirstSamples) -> bool:
    """Whether an output is independent probabilities, mostly decided, to both sides.

    An operator at the end, if known, must be a Sigmoid. Scores that sum to 1 are those of classes,
    and an output in the shape of an input may be an autoencoder's.
    """
    values = samples.arrays(name)
    if samples.declared.ends.get(name, "sigmoid") != "sigmoid" or not values[0].ndim:
        return False
    shares = np.concatenate([value.reshape(-1) for value in values])
    if not all(map(is_vector, values)) or not are_shares(shares):
        return False
    is_single = all(value.size == 1 for value in values)
    if not is_single:
        if any(value.size < MIN_ORDERED for value in values):
            return False
        if all(sums_to_one(value.reshape(-1)).all() for value in values):
            return False
        for value, inputs in zip(values, samples.inputs, strict=True):
            if any(source.shape == value.shape for source in inputs.values()):
                return False
    max_share = 0.5 if is_single else MAX_BETWEEN_SHARE
    has_both_ends = bool(shares.min() < LOW and shares.max() > HIGH)
    return has_both_ends and are_between(shares).mean() <= max_share


def _find_class_axis(samples: Arrays) -> int | None:
    """Return the axis of probabilities of classes, 1 or 2; None if neither or both fit."""
    axes = []
    for axis in (1, 2):
        tables = _read_step_samples(samples, axis)
        if tables and all(map(are_probabilities_or_logs, tables)):
            axes.append(axis)
    if len(axes) != 1:
        return None
    return axes[0]


@dataclass(slots=True)
class _TextTally(TaskTally["Text"]):
    """Counts equal texts, FP32's symbols and edits."""

    equal: int = 0
    symbols: int = 0
    edits: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_text = self.task.decode(reference[self.task.output]) or []
        text = self.task.decode(candidate[self.task.output])
        self.equal += int(text == reference_text)
        self.symbols += len(reference_text)
        self.edits += edit_distance(reference_text, text or [])

    def result(self) -> TaskFigure | None:
        if not self.symbols:
            return None
        edits = f"{self.edits} edit{'s' * (self.edits != 1)}"
        text = f"texts as FP32's, {edits} in {self.symbols} symbols"
        return self.share("texts alike", self.equal, self.samples, text)


@dataclass(frozen=True, slots=True)
class Text(EvaluationTask):
    """One text per sample.

    Attributes:
        output: name of the output.
        symbols: number of symbols with the blank.
        blank: number of the blank.
        axis: dimension of the symbols, 1 or 2.
        merged: whether repeated symbols are merged.
    """

    output: str
    symbols: int
    blank: int
    axis: int = 2
    merged: bool = True
    name = "text"
    tally_type = _TextTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        slots = "" if self.merged else ", one a slot"
        return f"{self.output}: text of {self.symbols - 1} symbols, blank {self.blank}{slots}"

    def decode(self, value: Array) -> list[int] | None:
        """Return the text of one sample, without blanks; None for another shape."""
        steps = _read_steps(value, self.axis)
        if steps is None or steps.shape[1] != self.symbols:
            return None
        best = steps.argmax(axis=1)
        if self.merged:
            best = best[np.concatenate([[True], best[1:] != best[:-1]])]
        return [int(symbol) for symbol in best if symbol != self.blank]


TEXT = Form(
    shape="[N, T, C] or [T, N, C], of pictures also [N, C, T] or [N, C, 1, T]",
    values="scores of 11 symbols or more, the blank first or last; or one symbol per slot",
    figure="equal texts, edits",
    source="CTC (Graves et al. 2006)",
)


def fit_text(name: str, samples: FirstSamples) -> Text | None:
    """Return the text of an output that the user or the file says to hold such."""
    for axis in (2, 1):
        tables = _read_step_samples(samples.arrays(name), axis)
        if tables and tables[0].shape[1] >= MIN_SYMBOLS:
            symbols = tables[0].shape[1]
            best = np.concatenate([steps.argmax(axis=1) for steps in tables])
            is_last = np.mean(best == symbols - 1) > np.mean(best == 0)
            return Text(name, symbols, symbols - 1 if is_last else 0, axis)
    return None


def find_text(samples: FirstSamples) -> Text | None:
    """Recognise text if the only output is such a sequence."""
    if len(samples.names) != 1:
        return None
    (name,) = samples.names
    for axis in (2, 1) if samples.of_pictures else (2,):
        tables = _read_step_samples(samples.arrays(name), axis)
        if tables and not _has_input_per_step(tables, samples):
            blank = _find_blank(tables)
            if blank is not None:
                is_blank = [steps.argmax(axis=1) == blank for steps in tables]
                # blanks after the last symbol alone fill the slots that a sample leaves
                merged = any((flags[1:] < flags[:-1]).any() for flags in is_blank)
                return Text(name, tables[0].shape[1], blank, axis, merged)
    return None


def _find_blank(samples: Arrays) -> int | None:
    """Return the blank of scores [T, C] per sample, the most frequent symbol; None for no text."""
    symbol_count = samples[0].shape[1]
    if symbol_count < MIN_SYMBOLS or not all(map(_are_symbol_scores, samples)):
        return None
    best = [np.asarray(steps.argmax(axis=1), np.int64) for steps in samples]
    counts = np.bincount(np.concatenate(best), minlength=symbol_count)
    blank = int(counts.argmax())
    is_frequent = MIN_BLANK_SHARE * counts.sum() <= counts[blank] < counts.sum()
    is_at_end = blank in (0, symbol_count - 1)
    # each sample begins as if after a blank
    symbols = np.concatenate([np.array([blank, *classes]) for classes in best])
    if is_frequent and is_at_end and _have_short_runs(symbols, blank):
        return blank
    return None


def _have_short_runs(symbols: Integers, blank: int) -> bool:
    """Whether few steps on average lie between blanks, and fewer have one symbol in a row."""
    is_symbol, is_change = symbols[1:] != blank, symbols[1:] != symbols[:-1]
    step_count = int(is_symbol.sum())
    run_count = int((is_symbol & is_change).sum())
    word_count = int((is_symbol & (symbols[:-1] == blank)).sum())
    are_short_words = step_count <= MAX_WORD_STEPS * word_count
    return are_short_words and step_count <= MAX_SYMBOL_STEPS * run_count


def _are_symbol_scores(steps: Array) -> bool:
    """Whether steps are probabilities, or raw scores of both signs, sure of their symbol."""
    if are_probabilities_or_logs(steps):
        return True
    has_both_signs = (steps.min(axis=1) < 0).all() and (steps.max(axis=1) > 0).all()
    confidence = activate(steps.astype(np.float64), "softmax").max(axis=1).mean()
    return bool(has_both_signs and confidence > MIN_CONFIDENCE)


def _has_input_per_step(samples: Arrays, first_samples: FirstSamples) -> bool:
    """Whether tokens are an input, or an input has a vector per step, or as many values as symbols.

    CTC has fewer steps than its input, which is a picture or sound.
    """
    for steps, inputs in zip(samples, first_samples.inputs, strict=True):
        has_vectors = False
        for value in inputs.values():
            is_whole = value.dtype in (np.int32, np.int64)
            if is_whole and value.ndim <= 3 and value.size >= MIN_COUNT:
                return True
            if value.ndim == 3:
                is_of_steps = value.shape[:2] == (1, len(steps))
                has_vectors |= is_of_steps or value.shape[2] == steps.shape[1]
        if not has_vectors:
            return False
    return True


def edit_distance(text: Sequence[int], other_text: Sequence[int]) -> int:
    """Return the Levenshtein distance (Levenshtein 1965)."""
    row = list(range(len(other_text) + 1))
    for i, symbol in enumerate(text, 1):
        diagonal, row[0] = row[0], i
        for j, other_symbol in enumerate(other_text, 1):
            substitution = diagonal + (symbol != other_symbol)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]
