"""Sequences: a class per step (`STEPS`), such as voice activity, or text by CTC (`TEXT`).

Raw scores of steps are compared by value, unless `--task steps` says what they are.

The blank of a text is the first or the last symbol, and stands between symbols. Texts are decoded
greedily: repeats merged, blanks dropped. If blanks only follow the last symbol in every sample,
each step is the slot of a symbol, as in number plates, and repeats stay.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.tasks.evaluation_task import EvaluationTask, Form, TaskFigure, TaskTally
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.indices import PlaceTask
from deploy.tasks.rows import (
    Arrays,
    Outputs,
    activate,
    are_probabilities_or_logs,
    is_floating,
    is_vector,
)
from deploy.tasks.thresholds import (
    MAX_SYMBOL_STEPS,
    MAX_WORD_STEPS,
    MIN_BLANK_SHARE,
    MIN_CONFIDENCE,
    MIN_COUNT,
    MIN_SYMBOLS,
)
from deploy.tensors import Array


def _read_steps(value: Array, axis: int) -> Array | None:
    """Return the scores of one sample as [T, C]; None for other shapes.

    `axis`: dimension of the classes, 1 or -1 of [1, T, C], [T, 1, C] or [1, C, T]. Maps of a height
    of 1 are read as these.
    """
    has_steps = value.ndim == 3 or (value.ndim == 4 and value.shape[2] == 1)
    if not has_steps or not value.size:
        return None
    steps = np.moveaxis(value, axis, -1)
    if not is_vector(steps[..., 0]):  # several samples
        return None
    return steps.reshape(-1, steps.shape[-1])


def _read_step_samples(samples: Arrays, axis: int) -> list[Array]:
    """Return the steps [T, C] of each sample, or [] if they are no steps of the same classes.

    `samples`: an output's arrays for the first few samples. `axis`: dimension of the classes.
    """
    tables = []
    for value in samples:
        steps = _read_steps(value, axis) if is_floating(value) else None
        if steps is None or len(steps) < MIN_COUNT or steps.shape[1] < 2:
            return []
        tables.append(steps)
    has_equal_classes = len({steps.shape[1] for steps in tables}) == 1
    return tables if has_equal_classes else []


@dataclass(frozen=True, slots=True)
class Steps(PlaceTask):
    """Classes of steps."""

    name = "steps"
    reads = "{0.classes} classes a step"
    figure_name = "steps alike"
    agreement = "steps of FP32's class"


STEPS = Form(
    shape="[N, T, C] or [N, C, T]",
    values="for each step, probabilities of C classes that sum to 1, or their logarithms",
    figure="steps of the same class",
    source="voice activity, taggers",
)


def fit_steps(name: str, samples: FirstSamples) -> Steps | None:
    """Return the steps of an output that the user or the file says to hold such; else None.

    A Sigmoid at the end of the graph makes independent probabilities, which are no classes.
    """
    values = samples.arrays(name)
    is_independent = samples.declared.ends.get(name) == "sigmoid" or all(map(is_vector, values))
    if values[0].ndim != 3 or is_independent:
        return None
    axis = _find_class_axis(values) or -1
    return Steps(name, values[0].shape[axis], axis)


def find_steps(samples: FirstSamples) -> Steps | None:
    """Return the first output with a class for each step of a sequence, else None.

    The output holds the probabilities of the classes. Others, such as the length of the event that
    begins at a step, are compared by value.
    """
    for name, values in samples.float_outputs.items():
        axis = _find_class_axis(values)
        if axis is not None:
            return Steps(name, values[0].shape[axis], axis)
    return None


def _find_class_axis(samples: Arrays) -> int | None:
    """Return the axis of probabilities of classes, 1 or -1; None if neither or both fit."""
    axes = []
    for axis in (1, -1):
        tables = _read_step_samples(samples, axis)
        if tables and all(map(are_probabilities_or_logs, tables)):
            axes.append(axis)
    if len(axes) != 1:
        return None
    return axes[0]


@dataclass(slots=True)
class _TextTally(TaskTally["Text"]):
    """Counts equal texts, FP32's symbols and edits."""

    symbols: int = 0
    edits: int = 0

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        reference_text = self.task.decode(reference[self.task.output]) or []
        text = self.task.decode(candidate[self.task.output])
        self.total += 1
        self.kept += int(text == reference_text)
        self.symbols += len(reference_text)
        self.edits += edit_distance(reference_text, text or [])

    def result(self) -> TaskFigure | None:
        if not self.symbols:
            return None
        edits = f"{self.edits} edit{'s' * (self.edits != 1)}"
        text = f"texts as FP32's, {edits} in {self.symbols} symbols"
        return self.share("texts alike", text)


@dataclass(frozen=True, slots=True)
class Text(EvaluationTask):
    """One text per sample.

    Attributes:
        output: name of the output.
        symbols: number of symbols with the blank.
        blank: number of the blank.
        axis: dimension of the symbols, 1 or -1.
        merged: whether repeated symbols are merged.
    """

    output: str
    symbols: int
    blank: int
    axis: int = -1
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
        best_symbols = steps.argmax(axis=1).tolist()
        if self.merged:
            best_symbols = [symbol for symbol, _ in itertools.groupby(best_symbols)]
        return [symbol for symbol in best_symbols if symbol != self.blank]


TEXT = Form(
    shape="[N, T, C] or [T, N, C]; if the input is a picture also [N, C, T] or [N, C, 1, T]",
    values="at each step, scores of 11 or more symbols, the first or last of them a blank",
    figure="share of equal texts; edit distance",
    source="CTC (Graves et al. 2006)",
)


def fit_text(name: str, samples: FirstSamples) -> Text | None:
    """Return the text of an output that the user or the file says to hold such; else None."""
    return next((text for text, _ in _propose_texts(name, samples)), None)


def _propose_texts(name: str, samples: FirstSamples) -> Iterator[tuple[Text, list[Array]]]:
    """Yield (text, scores of its symbols [T, C] in each sample) for each axis of symbols that fits.

    An output has steps along one axis and symbols along the other. The blank is the first or the
    last symbol, whichever is more frequent.
    """
    for axis in (-1, 1):
        tables = _read_step_samples(samples.arrays(name), axis)
        if not tables or tables[0].shape[1] < MIN_SYMBOLS:
            continue
        symbol_count = tables[0].shape[1]
        best_symbols = np.concatenate([steps.argmax(axis=1) for steps in tables])
        is_blank_last = np.mean(best_symbols == symbol_count - 1) > np.mean(best_symbols == 0)
        blank = symbol_count - 1 if is_blank_last else 0
        # only CTC's text has blanks between symbols; there equal steps in a row are one symbol
        is_ctc = any(_has_symbol_after_blank(steps, blank) for steps in tables)
        yield Text(name, symbol_count, blank, axis, merged=is_ctc), tables


def find_text(samples: FirstSamples) -> Text | None:
    """Return the text of the only output, if that is scores of symbols with a blank; else None."""
    if len(samples.names) != 1:
        return None
    for text, tables in _propose_texts(samples.names[0], samples):
        # only networks of pictures give symbols before steps, [N, C, T]
        if text.axis == 1 and not samples.has_pictures:
            continue
        if _has_input_per_step(tables, samples) or not all(map(_are_symbol_scores, tables)):
            continue
        if _is_blank(text.blank, tables):
            return text
    return None


def _has_symbol_after_blank(steps: Array, blank: int) -> bool:
    """Whether a symbol follows a blank in one sample, [T, C], as CTC separates symbols.

    Without CTC each step is the slot of a symbol, and blanks only fill the last slots.
    """
    is_blank = steps.argmax(axis=1) == blank
    return bool((is_blank[:-1] & ~is_blank[1:]).any())


def _is_blank(blank: int, tables: Arrays) -> bool:
    """Whether a symbol is CTC's blank: frequent, and any other symbol lasts only a few steps.

    From one blank to the next there are few steps, too.

    `tables`: scores of the symbols at each step, [T, C], of each sample.
    """
    best_symbols = [steps.argmax(axis=1) for steps in tables]
    # the steps of all samples one after the other, with a blank before each sample
    symbols = np.concatenate([np.insert(sample, 0, blank) for sample in best_symbols])
    previous_symbols = symbols[:-1]
    current_symbols = symbols[1:]
    is_not_blank = current_symbols != blank
    # a run is the steps of one symbol, a word the steps from one blank to the next
    run_count = int((is_not_blank & (current_symbols != previous_symbols)).sum())
    word_count = int((is_not_blank & (previous_symbols == blank)).sum())
    max_step_count = min(MAX_SYMBOL_STEPS * run_count, MAX_WORD_STEPS * word_count)
    blank_share = np.mean(np.concatenate(best_symbols) == blank)
    is_frequent = MIN_BLANK_SHARE <= blank_share < 1
    return bool(is_frequent and is_not_blank.sum() <= max_step_count)


def _are_symbol_scores(steps: Array) -> bool:
    """Whether steps are probabilities, or raw scores of both signs, sure of their symbol."""
    if are_probabilities_or_logs(steps):
        return True
    has_both_signs = (steps.min(axis=1) < 0).all() and (steps.max(axis=1) > 0).all()
    confidence = activate(steps.astype(np.float64), "softmax").max(axis=1).mean()
    return bool(has_both_signs and confidence > MIN_CONFIDENCE)


def _has_input_per_step(tables: Arrays, samples: FirstSamples) -> bool:
    """Whether an input is tokens, or has T steps or C values a step, as the scores have.

    Then the scores are not CTC's: it has fewer steps than its input, which is a picture or sound.

    `tables`: scores of the C symbols at each of T steps, [T, C], of each sample.
    """
    step_count, symbol_count = tables[0].shape
    for value in samples.inputs[0].values():
        if value.ndim > 3:
            continue
        are_tokens = value.dtype.kind in "iu" and value.size >= MIN_COUNT
        if are_tokens or step_count in value.shape[1:2] or symbol_count in value.shape[2:]:
            return True
    return False


def edit_distance(text: Sequence[int], other_text: Sequence[int]) -> int:
    """Return the fewest symbols to insert, delete or replace (Levenshtein 1965)."""
    other_symbols = np.array(other_text)
    lengths = np.arange(len(other_text) + 1)
    distances = lengths  # from the symbols of `text` so far to the first 0, 1, ... of the other's
    for symbol in text:
        replaced_distances = distances[:-1] + (other_symbols != symbol)
        distances = distances + 1  # the symbol is deleted
        distances[1:] = np.minimum(distances[1:], replaced_distances)
        # or it stands before any number of symbols that are inserted
        distances = np.minimum.accumulate(distances - lengths) + lengths
    return int(distances[-1])
