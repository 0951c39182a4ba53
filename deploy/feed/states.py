"""States that a model feeds itself: an output of each step is an input of the next step.

::

    x0, zeros --> step --> y0, s1        the start of a sequence
    x1, s1    --> step --> y1, s2        its next step, and so on

The samples lack the state inputs. `SequenceSource` adds the float model's states, so that ranges
are those of use. Where an engine is compared with the float model, `OwnStates` feeds it the states
that it computed itself, so that errors which add up from step to step are measured.

A file or an item of several rows is one sequence. Where each holds one row, all samples in their
order are one sequence, and so are the frames of a video.
"""

import bisect
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from deploy.errors import ConfigError, FeedError, counted
from deploy.feed.arrays import ArraySource
from deploy.feed.batch_axis import Specs
from deploy.feed.file_list import Labels, RawSample
from deploy.feed.preprocess import describe
from deploy.feed.sampling import Choice, spread_evenly
from deploy.feed.sources import Sample, SampleSource
from deploy.tensors import Array, Session, TensorSpec, fits

States = Mapping[str, str]  # state input -> the output that the next step gets there
StepFunction = Callable[[Sample], Mapping[str, Array]]

# words by which exporters tell a state's input from its output: past_key, h_out, r1i
_SIDES = re.compile(
    r"(?<![a-z])(input|output|in|out|past|present|prev|previous|next|new|old|cur|current|init"
    r"|initial)(?![a-z])"
)
_LAST_LETTER = re.compile(r"(?<=[a-z0-9])[ion0]$")


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """How a model feeds itself.

    Attributes:
        inputs: all inputs of the model.
        outputs: names of its outputs.
        states: state input -> the output that the next step gets there.
        run: runs the float model on one step.
        is_set_by_user: whether the user named the states; else they hold only for samples without
            them.
    """

    inputs: Specs
    outputs: tuple[str, ...]
    states: States
    run: StepFunction
    is_set_by_user: bool = False

    def with_states(self, states: States) -> "Recurrence":
        """Return the recurrence with the states that the user named, in place of its own.

        Args:
            states: state input -> the output that the next step gets there.

        Raises:
            ConfigError: no such input or output, or no other input.
        """
        names = {spec.name for spec in self.inputs}
        for state, output in states.items():
            if state not in names or output not in self.outputs:
                raise ConfigError(
                    f"a state is an input and the output that it takes, got {state}={output} for"
                    f" the inputs {sorted(names)} and the outputs {sorted(self.outputs)}"
                )
        if names == set(states):
            raise ConfigError(
                f"an input must remain for the samples, got all of them as states: {sorted(states)}"
            )
        return replace(self, states=dict(states), is_set_by_user=True)

    @property
    def data_inputs(self) -> Specs:
        """The inputs that are no states."""
        return tuple(spec for spec in self.inputs if spec.name not in self.states)

    def describe(self, sequence_count: int) -> str:
        """Return which states are carried, for the report."""
        pairs = ", ".join(f"{state} is {output}" for state, output in self.states.items())
        return f"{counted(sequence_count, 'sequence')}, in which {pairs} of the step before"


def find_states(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> States:
    """Return the states of a model: input -> the output that the next step gets there.

    They are recognised by names and shapes: h and hn, r1i and r1o, past_k and present_k. There are
    none if no other input, or no other output, would remain. An input with the shape of images is
    never taken for a state, since an output of its name and shape is mostly the improved image; the
    user may name it as a state.
    """
    # a stem is a name without "in", "out", "past" and the like
    output_by_stem = {_stem(output.name): output for output in outputs}
    stem_counts = Counter(_stem(spec.name) for spec in (*inputs, *outputs))
    states = {}
    for spec in inputs:
        stem = _stem(spec.name)
        output = output_by_stem.get(stem)
        is_only_pair = bool(stem) and stem_counts[stem] == 2
        if output is None or not is_only_pair or _is_picture(spec):
            continue
        is_float = spec.dtype == output.dtype and spec.dtype.startswith("float")
        if is_float and _may_have_equal_shapes(spec, output):
            states[spec.name] = output.name
    has_others = len(states) < min(len(inputs), len(outputs))
    return states if has_others else {}


def _is_picture(spec: TensorSpec) -> bool:
    """Whether an input has the shape of images: 1, 3 or 4 channels, first or last."""
    return len(spec.shape) == 4 and not {1, 3, 4}.isdisjoint((spec.shape[1], spec.shape[3]))


def _stem(name: str) -> str:
    """Return a name without the words and letters that tell inputs from outputs.

    "past_key_0" and "present.key.0" give "key0", "r1i" and "r1o" give "r1".
    """
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    stem = _SIDES.sub("", words).replace(" ", "")
    return _LAST_LETTER.sub("", stem)


def _may_have_equal_shapes(spec: TensorSpec, output: TensorSpec) -> bool:
    """Whether an input and an output may have one shape; that of an output may be unknown, ()."""
    if not spec.shape or len(output.shape) not in (0, len(spec.shape)):
        return False
    for size, output_size in zip(spec.shape, output.shape, strict=False):
        are_fixed = isinstance(size, int) and isinstance(output_size, int)
        if are_fixed and size != output_size:
            return False
    return True


class SequenceSource:
    """The steps of sequences, with the states that the float model had before each.

    Reading a step before the current one restarts its sequence, as with a video.
    """

    def __init__(self, source: SampleSource, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self._source = source
        self._lock = threading.Lock()
        self._next_step = 0  # the step that `_states` are for
        self._states: dict[str, Array] = {}  # empty at the start of a sequence
        # if each file of several rows is one sequence: number of steps up to the end of each; () if
        # all steps are one sequence
        self._sequence_ends: tuple[int, ...] = ()
        if isinstance(source, ArraySource) and len(source) > len(source.item_ends):
            self._sequence_ends = source.item_ends

    @property
    def labels(self) -> Labels:
        """One class number per step; None without labels."""
        return self._source.labels

    def __len__(self) -> int:
        return len(self._source)

    def sample_name(self, index: int) -> str:
        """Return the step's name."""
        return self._source.sample_name(index)

    def sequence_of(self, index: int) -> int:
        """Return the number of the sequence that a step is in, from 0."""
        return bisect.bisect_right(self._sequence_ends, index)

    def load(self, index: int) -> RawSample:
        """Return a step; its digest does not depend on the states."""
        raw_sample = self._source.load(index)
        return RawSample(
            raw_sample.digest, lambda: self._add_states(index, raw_sample), raw_sample.decode_source
        )

    def _add_states(self, index: int, raw_sample: RawSample) -> Sample:
        """Return a step with its states; steps between the last one and it are run first."""
        with self._lock:
            sequence = self.sequence_of(index)
            start = self._sequence_ends[sequence - 1] if sequence else 0
            if not start < self._next_step <= index:  # another sequence, or an earlier step
                self._next_step = start
                self._states = {}
            for earlier_index in range(self._next_step, index):
                # a bad step is left out: the states go on after it
                with suppress(FeedError):
                    self._run_step(earlier_index, self._source.load(earlier_index))
            return self._run_step(index, raw_sample)

    def _run_step(self, index: int, raw_sample: RawSample) -> Sample:
        """Return the inputs of a step, the states included, and compute the states of the next one.

        `_states` must hold the states of this step: {} at the start of a sequence.

        `raw_sample`: the step as in the source. It has no states, or only those that a sequence
        starts with are used.
        """
        loaded_inputs = raw_sample.decode()
        sample: Sample = {}
        for spec in self.recurrence.inputs:
            if spec.name in self._states:
                sample[spec.name] = self._states[spec.name]
            elif spec.name in loaded_inputs:
                sample[spec.name] = _check_single_row(spec, loaded_inputs[spec.name])
            else:  # a state at the start of a sequence is 0
                sample[spec.name] = spec.zeros()
        outputs = self.recurrence.run(sample)
        self._states = next_states(self.recurrence.states, outputs)
        for spec in self.recurrence.inputs:
            if spec.name in self._states:
                _check_state(spec, self._states[spec.name], self.recurrence.states[spec.name])
        self._next_step = index + 1
        return sample


def _check_single_row(spec: TensorSpec, array: Array) -> Array:
    """Return an input of a step.

    Raises:
        FeedError: it holds several rows of a batch.
    """
    if spec.has_batch and array.shape[0] != 1:
        raise FeedError(
            f"a step of a sequence must be one row, got {array.shape[0]} for {spec.name}; give one"
            " array [T, ...] for each sequence"
        )
    return array


def _check_state(spec: TensorSpec, state: Array, output: str) -> None:
    """Refuse an output that the next step cannot take as the input `spec`."""
    if state.dtype != spec.dtype or not fits(state.shape, spec.shape):
        raise ConfigError(
            f"the input {describe(spec)} must take the output {output} of the step before, got"
            f" {state.dtype} {list(state.shape)}; name another output for it"
        )


def next_states(states: States, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the state inputs of the next step, copied: a session may reuse its outputs."""
    return {state: np.array(outputs[output]) for state, output in states.items()}


class OwnStates:
    """Runs an engine on steps in order, with the states that it computed itself."""

    def __init__(self, states: States, *, drops_ended: bool = False) -> None:
        """Start before the first step.

        Args:
            states: of the model; empty for a model without, which is run as it is.
            drops_ended: whether the states of earlier sequences are dropped when one begins, since
                each has ended then.
        """
        self._output_by_state = states
        self._drops_ended = drops_ended
        # number of a sequence -> state input of its next step -> array
        self._states_by_sequence: dict[int, dict[str, Array]] = {}

    def run(
        self, session: Session, sample: Mapping[str, Array], sequence: int
    ) -> Mapping[str, Array]:
        """Return the outputs of an engine for a step, fed its own states of the step before.

        Args:
            session: the engine.
            sample: all inputs of the step; the states in it, which are the float model's, are fed
                only at the start of a sequence.
            sequence: number of the sequence that the step is in.

        Raises:
            BackendError: the runtime refused the step.
        """
        own_states = self._states_by_sequence.get(sequence, {})  # none at its start
        outputs = session.run({**sample, **own_states})
        if self._output_by_state:
            if self._drops_ended and not own_states:
                self._states_by_sequence.clear()
            self._states_by_sequence[sequence] = next_states(self._output_by_state, outputs)
        return outputs


def spread_steps(
    steps: Sequence[int], sequence_of: Callable[[int], int], max_steps: int
) -> list[int]:
    """Return at most `max_steps` steps: the first ones of sequences that are spread evenly.

    Args:
        steps: samples, by index: each is one step of a model that feeds itself its states.
        sequence_of: returns the number of the sequence that a step belongs to.
        max_steps: largest number of steps.
    """
    if len(steps) <= max_steps:
        return list(steps)
    steps_by_sequence: dict[int, list[int]] = {}
    for step in steps:
        steps_by_sequence.setdefault(sequence_of(step), []).append(step)
    # how many sequences have `max_steps` steps, if each has the mean length; rounded up
    sequence_count = math.ceil(max_steps * len(steps_by_sequence) / len(steps))
    chosen_steps: list[int] = []
    for sequence in spread_evenly(list(steps_by_sequence), sequence_count):
        chosen_steps += steps_by_sequence[sequence][: max_steps // sequence_count]
    return chosen_steps


def choose_steps(choice: Choice, source: SequenceSource) -> tuple[Sequence[int], list[str]]:
    """Return the indices of the chosen steps of sequences, and notes for the user.

    Raises:
        ConfigError: a choice that would leave out steps in between.
    """
    stride = None if choice.every == 1 else choice.every  # 1 leaves out no step
    unsuitable_options = {"--stride": stride, "--shard": choice.shard}
    for flag, value in unsuitable_options.items():
        if value is not None:
            raise ConfigError(
                f"each step of a sequence needs the one before, got {flag} for a model that feeds"
                f" itself {', '.join(source.recurrence.states)}; use --limit, which takes the first"
                " steps of sequences"
            )
    every_step = range(len(source))
    if choice.limit is None or choice.limit >= len(source):
        return every_step, []
    predicate = "are used, the first ones of sequences"
    if choice.limit == 1:
        predicate = "is used, the first one of a sequence"
    note = f"{choice.limit} of {len(source)} steps {predicate}"
    return spread_steps(every_step, source.sequence_of, choice.limit), [note]
