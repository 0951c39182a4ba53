"""Sequences: a class per step (voice activity, taggers), or text by CTC.

`find_steps`: [N, T, C] or [N, C, T] probabilities of a class per step, or their logarithms (raw
scores are compared by value, unless `--task steps` says what they are). Or independent
probabilities [N, T], [N, T, 1] or [N, T, K], such as the keys of a piano, and a single one [N, 1],
such as a wake word: they count by their side of 0.5. Several outputs may each have scores of the
same steps, such as the diacritics of a letter, or notes and their onsets.

`find_text`: CTC (Graves et al. 2006), a symbol or the blank per step, [N, T, C] or [T, N, C]; of
pictures also [N, C, T], and of a height of 1, [N, C, 1, T] or [N, T, 1, C]. The blank is the first
or the last symbol, and stands between symbols. Texts are decoded greedily: repeats merged, blanks
dropped. If blanks only follow the last symbol in every sample, each step is the slot of a symbol,
as in number plates, and repeats stay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.tasks import thresholds
from deploy.tasks.evaluation_task import EvaluationTask, TaskFigure, TaskTally
from deploy.tasks.first_samples import FirstSamples, find_states
from deploy.tasks.rows import (
    Outputs,
    activate,
    are_probabilities_or_logs,
    are_shares,
    is_floating,
    sums_to_one,
)
from deploy.tensors import Array


@dataclass(slots=True)
class _StepTally(TaskTally["Steps"]):
    """Counts steps by class and output: FP32's and equal ones; and the worst sample."""

    worst_share: float = 1.0
    reference_counts: list[NDArray[np.int64]] = field(init=False)
    equal_counts: list[NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        self.reference_counts = [np.zeros(count, np.int64) for count in self.task.classes]
        self.equal_counts = [np.zeros(count, np.int64) for count in self.task.classes]

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        sample_count = sample_equal = 0
        for index, name in enumerate(self.task.outputs):
            no_class = self.task.classes[index]
            reference_classes = self.task.step_classes(reference[name], no_class)
            classes = self.task.step_classes(candidate[name], no_class)
            if classes.shape != reference_classes.shape:
                classes = np.full_like(reference_classes, no_class)
            is_valid = reference_classes < no_class
            is_equal = is_valid & (reference_classes == classes)
            self.reference_counts[index] += _count(reference_classes[is_valid], no_class)
            self.equal_counts[index] += _count(reference_classes[is_equal], no_class)
            sample_count += int(is_valid.sum())
            sample_equal += int(is_equal.sum())
        if sample_count:
            self.worst_share = min(self.worst_share, sample_equal / sample_count)

    def result(self) -> TaskFigure | None:
        """Return the share of equal steps.

        If FP32 gives nearly all steps to one class, such as silence, a constant candidate would
        have most of them: then only steps that either model gives to another class count. None if
        FP32 gives all of them to one class.
        """
        total = sum(int(counts.sum()) for counts in self.reference_counts)
        equal = sum(int(counts.sum()) for counts in self.equal_counts)
        usual_classes = [int(counts.argmax()) for counts in self.reference_counts]
        usual_total = sum(int(counts.max()) for counts in self.reference_counts)
        if usual_total == total:
            return None

        text = f"{equal} of {total} {self.task.agreement}"
        name, share, count = "steps alike", equal / total, f"{equal} of {total}"
        if usual_total > thresholds.MAX_USUAL_SHARE * total:
            usual_equal = 0
            for counts, usual_class in zip(self.equal_counts, usual_classes, strict=True):
                usual_equal += int(counts[usual_class])
            others, others_equal = total - usual_equal, equal - usual_equal
            name, share = "steps alike but the usual", others_equal / others
            count = f"{others_equal} of {others}"
            usual = _name_classes(usual_classes)
            text += f", {count} of those that are not in both models of {usual}"
        if total > self.samples:
            text += f", {100 * self.worst_share:.1f} % in the worst sample"
        return self.figure(name, share, count, text)


def _count(classes: NDArray[np.int64], class_count: int) -> NDArray[np.int64]:
    return np.bincount(classes, minlength=class_count)


def _name_classes(classes: Sequence[int]) -> str:
    """Return the most frequent class, or that of each output, as text."""
    if len(set(classes)) == 1:
        return f"the usual class {classes[0]}"
    return f"their output's usual class, {', '.join(map(str, classes))}"


@dataclass(frozen=True, slots=True)
class Steps(EvaluationTask):
    """Classes of steps.

    Attributes:
        outputs: names of the outputs.
        classes: number of classes of each; 2 for independent probabilities, the sides of 0.5.
        axis: dimension of the classes, 1 or 2; None for independent probabilities.
        raw: whether these are logits, before the Sigmoid.
    """

    outputs: tuple[str, ...]
    classes: tuple[int, ...]
    axis: int | None
    raw: bool = False
    name = "steps"
    tally_type = _StepTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        names = ", ".join(self.outputs)
        if self.axis is None:
            scores = "raw scores" if self.raw else "probabilities"
            return f"{names}: {scores} of steps or labels, each its own"
        return f"{names}: {', '.join(map(str, self.classes))} classes a step"

    @property
    def agreement(self) -> str:
        """What the two models are compared by, as text."""
        if self.axis is not None:
            return "steps of FP32's class"
        return "scores on FP32's side of 0" if self.raw else "probabilities on FP32's side of 0.5"

    def step_classes(self, value: Array, class_count: int) -> NDArray[np.int64]:
        """Return the class of each step; `class_count` for a step of NaN.

        Empty for another form.
        """
        if self.axis is None:
            values = value.reshape(-1)
            sides = (values > (0 if self.raw else 0.5)).astype(np.int64)
            return np.where(np.isnan(values), class_count, sides)
        steps = _to_steps(value, self.axis)
        if steps is None or steps.shape[1] != class_count:
            return np.zeros(0, np.int64)
        best = np.asarray(steps.argmax(axis=1), np.int64)
        best[np.isnan(steps).any(axis=1)] = class_count
        return best


def fit_steps(name: str, samples: FirstSamples) -> Steps | None:
    """Return the steps of an output that the user or the file says to hold such."""
    values = samples.arrays(name)
    flat_values = np.concatenate([value.reshape(-1) for value in values])
    raw = not are_shares(flat_values)
    is_independent = samples.declared.ends.get(name) == "sigmoid" or all(map(_is_vector, values))
    if is_independent or values[0].ndim != 3:
        return Steps((name,), (2,), None, raw) if values[0].ndim in (1, 2, 3) else None
    axis = _find_class_axis(values) or 2
    return Steps((name,), (values[0].shape[axis],), axis)


def find_steps(samples: FirstSamples) -> Steps | None:
    """Recognise outputs of steps; others may be states, or numbers of a sample."""
    states = find_states(samples)
    values_by_name = {}
    for name in samples.names:
        values = samples.arrays(name)
        if name not in states and all(map(is_floating, values)):
            values_by_name[name] = values

    probabilities = [
        name for name, values in values_by_name.items() if _are_probabilities(name, values, samples)
    ]
    others = [values for name, values in values_by_name.items() if name not in probabilities]
    if probabilities and all(map(_are_vectors, others)):
        return Steps(tuple(probabilities), (2,) * len(probabilities), None)

    axes = {name: _find_class_axis(values) for name, values in values_by_name.items()}
    names = [name for name, axis in axes.items() if axis is not None]
    if not names or len({axes[name] for name in names}) > 1:
        return _find_slow_symbols(samples)
    axis = axes[names[0]]
    assert axis is not None
    counts = [value.shape[3 - axis] for value in values_by_name[names[0]]]
    if any(_have_steps(values_by_name[name], counts) for name in axes if name not in names):
        return None  # places of what is found at each step
    if any([value.shape[3 - axis] for value in values_by_name[name]] != counts for name in names):
        return None
    classes = tuple(values_by_name[name][0].shape[axis] for name in names)
    return Steps(tuple(names), classes, axis)


def _have_steps(samples: Sequence[Array], counts: Sequence[int]) -> bool:
    """Whether an output has as many steps, in every sample."""
    return all(
        value.ndim <= 3 and count in value.shape
        for value, count in zip(samples, counts, strict=True)
    )


def _are_vectors(samples: Sequence[Array]) -> bool:
    return all(map(_is_vector, samples))


def _is_vector(value: Array) -> bool:
    return value.size == max(value.shape, default=1)


def _find_slow_symbols(samples: FirstSamples) -> Steps | None:
    """Return steps with a blank whose symbols last too long for text."""
    text, _ = _find_symbols(samples) or (None, 0.0)
    if text is None or samples.outputs[0][text.output].ndim != 3:
        return None
    return Steps((text.output,), (text.symbols,), 1 if text.first else 2)


def _are_probabilities(name: str, samples: Sequence[Array], first_samples: FirstSamples) -> bool:
    """Whether an output holds independent probabilities, mostly decided, on both sides of 0.5.

    Of pictures only [N, T] and [N, 1] count: others may be maps. An operator at the end, if known,
    must be a Sigmoid.
    """
    if first_samples.declared.ends.get(name, "sigmoid") != "sigmoid":
        return False
    rank = min(value.ndim for value in samples)
    values = np.concatenate([value.reshape(-1) for value in samples])
    if not are_shares(values) or not values.min() < 0.5 < values.max():
        return False
    if all(value.size == 1 for value in samples):
        has_both_ends = values.min() < 0.1 and values.max() > 0.9
        is_decided = np.mean((values < 0.1) | (values > 0.9)) >= 0.5
        return samples[0].ndim > 0 and bool(has_both_ends and is_decided)
    if any(value.size < thresholds.MIN_TRACK_STEPS for value in samples):
        return False
    if first_samples.of_pictures and not _are_vectors(samples):
        return False
    for axis in range(min(rank, 3)):
        if all(sums_to_one(value, axis).all() for value in samples):
            return False  # a Softmax, of which one class is chosen
    if any(_is_reconstruction(*pair) for pair in zip(samples, first_samples.inputs, strict=True)):
        return False
    if _are_vectors(samples):
        for other_name in first_samples.names:
            other_output = first_samples.outputs[0][other_name]
            if other_name != name and other_output.size == samples[0].size:
                return False  # one number a step beside another: a class and its confidence
        undecided_share = np.mean((values > 0.1) & (values < 0.9))
        is_mostly_yes = undecided_share < np.mean(values >= 0.9)
        return bool(is_mostly_yes and undecided_share < thresholds.MAX_BETWEEN_SHARE)
    undecided_share = np.mean((values > 0.3) & (values < 0.7))
    positive_share = np.mean(values > 0.5)
    return bool(
        undecided_share < thresholds.MAX_UNDECIDED_SHARE
        and positive_share < thresholds.MAX_BETWEEN_SHARE
    )


def _is_reconstruction(value: Array, inputs: Outputs) -> bool:
    """Whether an output has the shape of an input, as an autoencoder's has."""
    return any(source.shape == value.shape and source.size > 1 for source in inputs.values())


def _find_class_axis(samples: Sequence[Array]) -> int | None:
    """Return the axis of probabilities of classes, 1 or 2; None if neither or both fit."""
    axes = [axis for axis in (1, 2) if _are_class_probabilities(samples, axis)]
    return axes[0] if len(axes) == 1 else None


def _are_class_probabilities(samples: Sequence[Array], axis: int) -> bool:
    """Whether all samples are enough steps of probabilities of as many classes along `axis`."""
    for value in samples:
        steps = _to_steps(value, axis)
        if steps is None or len(steps) < thresholds.MIN_STEPS or steps.shape[1] < 2:
            return False
        if not are_probabilities_or_logs(steps):
            return False
    return len({value.shape[axis] for value in samples}) == 1


def _to_steps(value: Array, axis: int) -> Array | None:
    """Return [1, T, C], [T, 1, C] or [1, C, T] as [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size:
        return None
    if axis == 1:
        return value[0].T if value.shape[0] == 1 else None
    return value.reshape(-1, value.shape[2]) if 1 in value.shape[:2] else None


@dataclass(slots=True)
class _TextTally(TaskTally["Text"]):
    """Counts equal texts, FP32's symbols and edits."""

    equal: int = 0
    symbols: int = 0
    edits: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_text = self._decode(reference[self.task.output]) or []
        text = self._decode(candidate[self.task.output])
        self.equal += int(text == reference_text)
        self.symbols += len(reference_text)
        self.edits += edit_distance(reference_text, text or [])

    def _decode(self, value: Array) -> list[int] | None:
        """Return the text of one sample; None for another shape."""
        steps = _to_symbol_steps(value, first=self.task.first)
        return None if steps is None else self.task.decode(steps)

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
        merged: whether repeated symbols are merged.
        first: whether the scores of a step are the first dimension, not the last.
    """

    output: str
    symbols: int
    blank: int
    merged: bool = True
    first: bool = False
    name = "text"
    tally_type = _TextTally

    @property
    def form(self) -> str:
        """How the output is interpreted."""
        slots = "" if self.merged else ", one a slot"
        return f"{self.output}: text of {self.symbols - 1} symbols, blank {self.blank}{slots}"

    def decode(self, steps: Array) -> list[int]:
        """Return the text of scores [T, C]: the best symbol of each step, blanks dropped."""
        best = steps.argmax(axis=1)
        if self.merged:
            best = best[np.concatenate([[True], best[1:] != best[:-1]])]
        return [int(symbol) for symbol in best if symbol != self.blank]


def find_text(samples: FirstSamples) -> Text | None:
    """Recognise text if the only output is such a sequence."""
    text, symbol_steps = _find_symbols(samples) or (None, 0.0)
    return text if symbol_steps <= thresholds.MAX_SYMBOL_STEPS else None


def fit_text(name: str, samples: FirstSamples) -> Text | None:
    """Return the text of an output that the user or the file says to hold such."""
    for first in (False, True):
        steps = [_to_symbol_steps(value, first=first) for value in samples.arrays(name)]
        tables = [table for table in steps if table is not None]
        if len(tables) == len(steps) and len({table.shape[1] for table in tables}) == 1:
            symbol_count = tables[0].shape[1]
            best = np.concatenate([table.argmax(axis=1) for table in tables])
            is_last = np.mean(best == symbol_count - 1) > np.mean(best == 0)
            return Text(name, symbol_count, symbol_count - 1 if is_last else 0, first=first)
    return None


def _find_symbols(samples: FirstSamples) -> tuple[Text, float] | None:
    """Return the text, and the mean number of steps of a symbol, if steps have a blank."""
    if len(samples.names) != 1:
        return None
    (name,) = samples.names
    for first in (False, True) if samples.of_pictures else (False,):
        steps = []
        for value in samples.arrays(name):
            sample_steps = _to_symbol_steps(value, first=first)
            if sample_steps is None:
                break
            steps.append(sample_steps)
        if len(steps) == len(samples.outputs):
            symbols = _read_symbols(name, steps, samples, first=first)
            if symbols is not None:
                return symbols
    return None


def _read_symbols(
    name: str, samples: Sequence[Array], first_samples: FirstSamples, *, first: bool
) -> tuple[Text, float] | None:
    symbol_count = samples[0].shape[1]
    if any(steps.shape[1] != symbol_count for steps in samples):
        return None
    are_raw = not all(map(are_probabilities_or_logs, samples))
    if are_raw and _is_signal(symbol_count, first_samples):
        return None
    if are_raw and not all(map(_are_raw_scores, samples)):
        return None
    best = [np.asarray(steps.argmax(axis=1), np.int64) for steps in samples]
    counts = _count(np.concatenate(best), symbol_count)
    blank = int(counts.argmax())
    is_rare = counts[blank] < thresholds.MIN_BLANK_SHARE * counts.sum()
    if blank not in (0, symbol_count - 1) or is_rare or np.count_nonzero(counts) < 2:
        return None
    word_steps, symbol_steps = _mean_runs(best, blank)
    if word_steps > thresholds.MAX_WORD_STEPS or _has_input_per_step(samples, first_samples):
        return None
    merged = not all(_ends_with_blanks(classes == blank) for classes in best)
    return Text(name, symbol_count, blank, merged, first), symbol_steps


def _to_symbol_steps(value: Array, *, first: bool) -> Array | None:
    """Return [1, T, C], [T, 1, C] or [1, T, 1, C] as [T, C]; None for other shapes.

    `first`: C is before T.
    """
    sides = [side for side in value.shape if side != 1]
    if value.ndim not in (3, 4) or len(sides) != 2 or (value.ndim == 4 and value.shape[1] == 1):
        return None
    if not is_floating(value):
        return None
    steps = value.reshape(sides).T if first else value.reshape(sides)
    is_long = len(steps) >= thresholds.MIN_STEPS and steps.shape[1] >= thresholds.MIN_SYMBOLS
    return steps if is_long else None


def _are_raw_scores(steps: Array) -> bool:
    """Whether steps may be raw scores: of both signs, and sure of their symbol."""
    has_both_signs = (steps.min(axis=1) < 0).all() and (steps.max(axis=1) > 0).all()
    confidence = activate(steps.astype(np.float64), "softmax").max(axis=1).mean()
    return bool(has_both_signs and confidence > thresholds.MIN_CONFIDENCE)


def _is_signal(length: int, samples: FirstSamples) -> bool:
    """Whether an output has the length of an input signal [N, C, L], or a whole part of it."""
    for value in samples.inputs[0].values():
        stride, remainder = divmod(value.shape[-1] if value.ndim == 3 else 0, length)
        if not remainder and 1 <= stride <= thresholds.MAX_SIGNAL_STRIDE:
            return True
    return False


def _mean_runs(samples: Sequence[NDArray[np.int64]], blank: int) -> tuple[float, float]:
    """Return the mean length of runs of symbols between blanks, and of runs of one symbol."""
    best = np.concatenate([np.array([blank, *classes]) for classes in samples])
    is_symbol, is_change = best[1:] != blank, best[1:] != best[:-1]
    run_count = int((is_symbol & is_change).sum())
    word_count = int((is_symbol & (best[:-1] == blank)).sum())
    symbol_count = int(is_symbol.sum())
    return symbol_count / max(word_count, 1), symbol_count / max(run_count, 1)


def _has_input_per_step(samples: Sequence[Array], first_samples: FirstSamples) -> bool:
    """Whether there is an input vector per step, or tokens are an input.

    CTC has fewer steps than its input, which is a picture or sound.
    """
    if any(map(_is_tokens, _all_inputs(first_samples))):
        return True
    for steps, inputs in zip(samples, first_samples.inputs, strict=True):
        shapes = [value.shape for value in inputs.values() if value.ndim == 3]
        if not any(shape[:2] == (1, len(steps)) or shape[2] == steps.shape[1] for shape in shapes):
            return False
    return True


def _all_inputs(samples: FirstSamples) -> Iterator[Array]:
    for inputs in samples.inputs:
        yield from inputs.values()


def _is_tokens(value: Array) -> bool:
    is_whole = value.dtype in (np.int32, np.int64)
    return is_whole and value.ndim <= 3 and value.size >= thresholds.MIN_STEPS


def _ends_with_blanks(is_blank: NDArray[np.bool_]) -> bool:
    """Whether no symbol follows a blank."""
    return bool((is_blank[1:] >= is_blank[:-1]).all())


def edit_distance(text: Sequence[int], other: Sequence[int]) -> int:
    """Return the Levenshtein distance (Levenshtein 1965)."""
    row = list(range(len(other) + 1))
    for i, symbol in enumerate(text, 1):
        diagonal, row[0] = row[0], i
        for j, other_symbol in enumerate(other, 1):
            substitution = diagonal + (symbol != other_symbol)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]
