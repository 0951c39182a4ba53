"""Runs trial models of one target on a few samples and measures their noise.

The noise of an output slice in one sample is its relative power: sum of squared errors over sum of
squares of the float model's output. 10 dB of SQNR are 0.1, and while it is small, the noise of two
layers adds up. The loss of a sample is 1 - exp(-amplitude of the noise), at most 1, so that the
sample with the largest signal does not dominate. A sample with less signal than average is measured
relative to the average: where a detector sees nothing, a score of 0.02 instead of 0.01 is no loss,
but where it sees something, 0.2 instead of 0.3 is. The loss of a slice is the sum over the samples,
divided by their signal::

    signal  1.0  0.1  0.9  0.1    worth 2.2 samples: two photos hold something
    loss    0.1  0    0.1  0      0.09, not 0.05: there is nothing to lose in the others

Lists of detections whose length varies have no slices to compare value by value. Their loss is that
of the task's figure, expressed as the noise power of one sample with that loss.

Models that end in ArgMax, TopK or NonMaxSuppression are compared by the tensors that these pick
from. Class numbers hardly change with noise, until they do, so on a few samples they do not rank
the layers::

    ... -> Gemm -> logits -> ArgMax -> Cast -> class        compared: logits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np
import onnx
from onnx import helper

from deploy.errors import BackendError, Calib8Error, ConfigError
from deploy.graph.edit import copy_with_outputs
from deploy.graph.index import PROTOBUF, all_outputs, names_of
from deploy.method import Choices
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.output_form import OutputForm
from deploy.runtimes.ort import OrtSession, breaks_int8_kernels
from deploy.targets.base import BuildRequest
from deploy.tasks.rows import Floats, Outputs
from deploy.tasks.slices import OutputSlice
from deploy.tuning.float_activations import FloatActivations
from deploy.tuning.slice_signals import (
    SliceValues,
    apply_temperature,
    find_temperatures,
    mean_powers,
    noise_powers,
    signal_shares,
    slice_powers,
    strongest_samples,
)

# sample, outputs of the float model
ReferenceSample = tuple[Outputs, Outputs]
DETECTION_LIST = "what is found"
_NO_LOSS = 1e-12  # 120 dB: smaller losses count as none
_MAX_TASK_LOSS = 0.99  # a larger one would not rank the layers
# operator that picks values, or their places -> indices of the inputs that it picks from
_PICKED_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ArgMax": (0,),
    "TopK": (0,),
    "NonMaxSuppression": (0, 1),
    "NonZero": (),
}
_GATHERING = ("Gather", "GatherElements", "GatherND")


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative noise power of every output slice in every sample.

    Attributes:
        powers_by_slice: slice -> [samples] noise power over signal power.
        signal_shares: slice -> share of the samples in which the float model's output has a
            signal; 1 if missing.
        accuracy: accuracy on the same samples; None for a sum, or where it was not asked for.
    """

    powers_by_slice: Mapping[str, Floats]
    signal_shares: Mapping[str, float] = field(default_factory=dict)
    accuracy: Accuracy | None = None

    @property
    def loss_by_slice(self) -> Mapping[str, float]:
        """Loss of each slice: 0 for none, 1 for all."""
        losses = {}
        for name, powers in self.powers_by_slice.items():
            losses[name] = min(_mean_loss(powers) / self.signal_shares.get(name, 1.0), 1.0)
        return losses

    @property
    def worst_slice_label(self) -> str:
        """Label of the slice of greatest loss; "" without slices."""
        losses = self.loss_by_slice
        return max(losses, key=lambda name: losses[name], default="")

    @property
    def worst(self) -> float:
        """Loss of the worst slice, 0 to 1."""
        return max(self.loss_by_slice.values(), default=0.0)

    @property
    def mean(self) -> float:
        """Mean loss of the slices, which still ranks trials whose worst slice is all lost."""
        losses = self.loss_by_slice.values()
        return sum(losses) / max(len(losses), 1)

    @property
    def db(self) -> float:
        """`worst` as the SQNR in dB that has this loss in every sample."""
        amplitude = -math.log1p(-min(self.worst, 1 - _NO_LOSS))
        return -20 * math.log10(max(amplitude, 1e-6))

    def combined_with(self, other: Noise) -> Noise:
        """Return the sum of two independent sources of noise."""
        total = dict(self.powers_by_slice)
        for name, powers in other.powers_by_slice.items():
            total[name] = total.get(name, 0.0) + powers
        return Noise(total, {**self.signal_shares, **other.signal_shares})

    def scaled(self, share: float) -> Noise:
        """Return a share of the power."""
        powers = {name: share * powers for name, powers in self.powers_by_slice.items()}
        return Noise(powers, self.signal_shares)

    def marginal_loss(self, background: Noise) -> float:
        """Return the loss that this small power adds to the worst slice, on top of `background`."""
        losses = []
        for name, powers in self.powers_by_slice.items():
            amplitude = np.sqrt(np.maximum(background.powers_by_slice[name], 1e-6))
            slope = np.exp(-amplitude) / (2 * amplitude)  # derivative of the loss by the power
            losses.append(float((slope * powers).mean()) / self.signal_shares.get(name, 1.0))
        return max(losses, default=0.0)


def _mean_loss(powers: Floats) -> float:
    """Return the mean over the samples of 1 - exp(-amplitude)."""
    return float((1 - np.exp(-np.sqrt(powers))).mean())


@dataclass(frozen=True, slots=True)
class _TrialSamples:
    """Samples of trials.

    Attributes:
        samples: inputs, with stored inner tensors if there are any, and float outputs.
        float_slices: for each sample the values of every slice of the float model's outputs.
        float_powers: sum of squares of every one of these slices, [samples, slices].
        activations: stored tensors of the float model, from which isolated trials start; None where
            the entire trial model runs.
    """

    samples: Sequence[ReferenceSample]
    float_slices: Sequence[SliceValues]
    float_powers: Floats
    activations: FloatActivations | None = None


@dataclass(slots=True)
class Prober:
    """Runs trials, each choice once.

    The noise of a trial that cannot be built or run is None, and its error is stored.

    Attributes:
        build_trial: builds the trial model of a request.
        request: build request; its choices are replaced in each trial.
        samples: samples with the float model's outputs.
        form: slices and task of the outputs, and the user's metric.
        runs_here: whether ONNX Runtime's int8 kernels run the trials.
        isolated_sample_count: number of samples for isolated trials, which have a few layers in
            int8 and all others in float.
        isolated_indices: indices of these samples; None until they are selected.
        measures_accuracy: whether to measure the accuracy of trials too.
        progress: called after each trial.
        count_samples: called with the number of samples that are run.
        trial_count: number of trials.
        errors: errors of trials that could not run, in the order of the trials.
    """

    build_trial: Callable[[BuildRequest], onnx.ModelProto]
    request: BuildRequest
    samples: Sequence[ReferenceSample]
    form: OutputForm
    runs_here: bool
    isolated_sample_count: int
    isolated_indices: Sequence[int] | None = None
    measures_accuracy: bool = False
    progress: Callable[[], None] = lambda: None
    count_samples: Callable[[int], None] = lambda _: None
    trial_count: int = 0
    errors: list[Calib8Error] = field(default_factory=list)
    _temperatures: Mapping[OutputSlice, tuple[float, int]] = field(init=False)
    # power of every output slice of the float model at its mean amplitude over the samples
    _mean_powers: Floats = field(init=False)
    _samples: _TrialSamples = field(init=False)
    # made for the first isolated trial
    _isolated_samples: _TrialSamples | None = None
    _noise_by_key: dict[object, Noise | None] = field(default_factory=dict)  # None: it cannot run
    _metric_lock: Lock = field(default_factory=Lock)  # a user's metric need not be thread-safe
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        """Bring the float model's outputs into the form in which noise is measured."""
        self._temperatures = find_temperatures(
            self.form, [float_outputs for _, float_outputs in self.samples]
        )
        float_slices = [
            self._slice_values(outputs, inputs, outputs) for inputs, outputs in self.samples
        ]
        float_powers = slice_powers(float_slices)
        self._mean_powers = mean_powers(float_powers)
        self._samples = _TrialSamples(self.samples, float_slices, float_powers)

    def noises(self, trials: Sequence[Choices]) -> list[Noise | None]:
        """Return the noise of several trials, run in parallel; None for one that could not run."""
        return self._run(trials, self._samples)

    def isolated_noises(
        self, trials: Sequence[Choices], int8_nodes: Sequence[Sequence[str]]
    ) -> list[Noise | None]:
        """Return the noise of a few layers alone, on a few samples (`_select_isolated_samples`).

        Only the nodes downstream of the int8 nodes run, from stored values of the float model.

        Args:
            trials: choices that keep everything else in float.
            int8_nodes: names of the nodes of each trial.
        """
        if self._isolated_samples is None:
            try:
                self._isolated_samples = self._store_activations(int8_nodes)
            except Calib8Error as error:  # then no isolated trial can run
                self.trial_count += len(trials)
                self.errors += [error] * len(trials)
                return [None] * len(trials)
        return self._run(trials, self._isolated_samples)

    def _store_activations(self, int8_nodes: Sequence[Sequence[str]]) -> _TrialSamples:
        """Return the samples of isolated trials, with inner tensors of the float model as inputs.

        An isolated trial has a few layers in int8 and starts from these tensors.

        Raises:
            BackendError: the float model cannot run with these tensors as outputs.
        """
        if self.isolated_indices is None:
            self.isolated_indices = self._select_isolated_samples()
        indices = self.isolated_indices
        self.count_samples(len(indices))
        samples = [self._samples.samples[index] for index in indices]
        float_slices = [self._samples.float_slices[index] for index in indices]
        float_powers = self._samples.float_powers[indices]
        inputs = [sample for sample, _ in samples]
        activations = FloatActivations(self.request.model, int8_nodes, inputs)
        extended_samples = []
        for (sample, outputs), values in zip(samples, activations.values_by_sample, strict=True):
            extended_samples.append(({**sample, **values}, outputs))
        return _TrialSamples(extended_samples, float_slices, float_powers, activations)

    def _select_isolated_samples(self) -> list[int]:
        """Return the indices of the samples for isolated trials (a few layers in int8), in order.

        Half are those with the strongest outputs of the float model. The other half are those with
        the most noise in the worst slice of the first trial: noise may be in samples of one class,
        or where the float model sees small objects.
        """
        float_slices = self._samples.float_slices
        count = self.isolated_sample_count
        # in the order of the trials, so the first one is that of the first trial that could run
        measured_noises = (noise for noise in self._noise_by_key.values() if noise is not None)
        first_noise = next(measured_noises, Noise({}))
        noise_by_sample = first_noise.powers_by_slice.get(
            first_noise.worst_slice_label, np.zeros(0)
        )
        if noise_by_sample.size != len(float_slices):  # no trial ran, or there are no slices
            return strongest_samples(self.form, float_slices, count)
        strongest_indices = strongest_samples(self.form, float_slices, count // 2)
        noisiest_first = map(int, np.argsort(-noise_by_sample, kind="stable"))
        noisiest_indices = [index for index in noisiest_first if index not in strongest_indices]
        return sorted([*strongest_indices, *noisiest_indices[: count - len(strongest_indices)]])

    def _run(self, trials: Sequence[Choices], samples: _TrialSamples) -> list[Noise | None]:
        """Return the noise of trials, None for those that failed; equal trials run once."""
        # isolated trials have other samples, so the noise of equal choices is another there
        is_isolated = samples.activations is not None
        keys = [(is_isolated, choices_key(choices)) for choices in trials]
        new_trials = dict(zip(keys, trials, strict=True))
        for key in new_trials.keys() & self._noise_by_key.keys():
            del new_trials[key]
        self.trial_count += len(new_trials)
        self.count_samples(len(new_trials) * len(samples.samples))
        with ThreadPoolExecutor(self.request.threads) as pool:
            try:
                results = list(pool.map(partial(self._attempt, samples), new_trials.values()))
            except BaseException:  # Ctrl-C reaches only this thread
                self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for key, result in zip(new_trials, results, strict=True):
            if isinstance(result, Calib8Error):
                self.errors.append(result)
                self._noise_by_key[key] = None
            else:
                self._noise_by_key[key] = result
        return [self._noise_by_key[key] for key in keys]

    def _attempt(self, samples: _TrialSamples, choices: Choices) -> Noise | Calib8Error:
        """Return the noise of one trial, or why it could not be built or run."""
        try:
            return self._measure(self._open(choices, samples), samples)
        except Calib8Error as error:
            return error
        finally:
            self.progress()

    def _open(self, choices: Choices, samples: _TrialSamples) -> OrtSession:
        """Build and open a trial model, or its part downstream of stored activations.

        protobuf's messages must not be used by several threads, so models are built one at a time.

        Raises:
            Calib8Error: the model cannot be built or opened.
        """
        with PROTOBUF:
            model = self.build_trial(self.request.with_added_choices(choices))
            if samples.activations is not None:
                model = samples.activations.shorten(model)
            # a target that does not run here is imitated in float: ONNX Runtime then computes each
            # pair of QuantizeLinear and DequantizeLinear as written, without its int8 kernels
            int8_kernels = self.runs_here and not breaks_int8_kernels(model)
            data = model.SerializeToString()
            del model  # its weights need not be in memory while it runs
        return OrtSession.open(
            data, threads=1, spin=False, reuse_memory=True, int8_kernels=int8_kernels
        )

    def _measure(self, session: OrtSession, trial_samples: _TrialSamples) -> Noise:
        """Run a trial model on the samples; return its noise against the float model's outputs.

        Noise is the power of the error of each output slice in each sample, relative to that of the
        float model's slice (the signal). A sample may hold more tensors than the model reads.

        Raises:
            BackendError: ONNX Runtime refused a sample, or the search was interrupted.
        """
        # an output of variable length, such as a list of detections, has no slices (`parts`): its
        # noise is the loss of the task alone
        is_detection_list = not self.form.parts and self.form.task is not None
        comparison = None  # only the noise of slices is measured
        if is_detection_list or self.measures_accuracy:
            comparison = Comparison(self.form)
        input_names = [spec.name for spec in session.inputs]
        # in a sample with less signal than average, noise is relative to the average
        signal_powers = np.maximum(trial_samples.float_powers, self._mean_powers)
        relative_powers = []  # of the noise, for each sample a list with a number for each slice
        for index, (inputs, float_outputs) in enumerate(trial_samples.samples):
            if self._is_stopped:  # by Ctrl-C
                raise BackendError("the search was interrupted")
            outputs = session.run({name: inputs[name] for name in input_names})
            if comparison is not None:
                try:
                    with self._metric_lock:
                        comparison.add(inputs, float_outputs, outputs)
                except ConfigError:  # the user's metric fails, which counts as a loss of all
                    comparison = None
            slices = self._slice_values(outputs, inputs, float_outputs)
            float_slices = trial_samples.float_slices[index]
            relative_powers.append(noise_powers(float_slices, slices, signal_powers[index]))

        accuracy = None if comparison is None else comparison.result()
        if is_detection_list:
            return Noise({DETECTION_LIST: _task_power(accuracy)}, accuracy=accuracy)
        labels = [part.label for part in self.form.parts]
        shares = signal_shares(trial_samples.float_powers, self._mean_powers).tolist()
        return Noise(
            powers_by_slice=dict(zip(labels, np.array(relative_powers).T, strict=True)),
            signal_shares=dict(zip(labels, shares, strict=True)),
            accuracy=accuracy,
        )

    def _slice_values(self, outputs: Outputs, inputs: Outputs, reference: Outputs) -> SliceValues:
        """Return the values of every slice, as they are measured.

        `reference`: the float model's outputs on the same inputs.
        """
        slices = []
        for part in self.form.parts:
            values = self.form.slice_values(part, outputs, inputs, reference)
            if part in self._temperatures and values.ndim > 1:
                values = apply_temperature(values, *self._temperatures[part])
            slices.append(values)
        return slices


def _task_power(accuracy: Accuracy | None) -> Floats:
    """Return the noise power, [1], of a sample that loses as much as the task does.

    That of `_MAX_TASK_LOSS` if there is no accuracy, since the user's metric failed.
    """
    loss = 1.0 if accuracy is None else 0.0
    if accuracy is not None and accuracy.task is not None:
        loss = max(accuracy.task.lost, 0.0)
    return np.array([math.log1p(-min(loss, _MAX_TASK_LOSS)) ** 2])


def choices_key(choices: Choices) -> object:
    """Return what is equal for equal choices, whatever their reasons."""
    method = choices.method.label if choices.method else ""
    methods = frozenset((tensor, method.label) for tensor, method in choices.methods.items())
    searches = frozenset(choices.searches.items())
    return frozenset(choices.float_nodes), method, methods, choices.rounded, searches


def find_pick_sources(model: onnx.ModelProto) -> dict[tuple[str, int], str]:
    """Return (node, index of its input) -> the tensor there, which the outputs are picked from.

    The node is one that picks, such as a TopK. In this model the tensors are `scores`, at input 0
    of the TopK, and `boxes`, at input 0 of the GatherElements::

        scores -> TopK -> values ---------------------------> Concat -> output
                       -> places -> GatherElements(boxes) ----^

    Picked outputs hardly show noise: it swaps rows of a TopK, and leaves a class number as it is
    until another class wins. Each value that they are picked from shows its own noise.

    Empty if an output is not picked, or only in part.
    """
    # tensors that do not depend on the values of the inputs; "" is an input that is left out
    constant_tensors = names_of(model.graph.initializer) | {""}
    picked_tensors: set[str] = set()  # computed from nothing but picked values or their places
    sources: dict[tuple[str, int], str] = {}
    for node in model.graph.node:
        # such as a GatherElements of the boxes at the places from a TopK
        gathers_at_picks = node.op_type in _GATHERING and node.input[1] in picked_tensors
        if node.op_type in _PICKED_INPUTS or gathers_at_picks:
            for index in _PICKED_INPUTS.get(node.op_type, (0,)):  # 0: the data of a Gather
                if node.input[index] not in picked_tensors | constant_tensors:
                    sources[node.name, index] = node.input[index]
            picked_tensors.update(node.output)
        elif node.op_type in ("Shape", "Size") or constant_tensors.issuperset(node.input):
            constant_tensors.update(node.output)
        elif not set(node.input).difference(picked_tensors, constant_tensors):
            picked_tensors.update(node.output)
    return sources if picked_tensors >= names_of(model.graph.output) else {}


def replace_by_sources(
    model: onnx.ModelProto,
    sources: Iterable[str],
    samples: Sequence[ReferenceSample],
    *,
    keep_outputs: bool,
    threads: int,
) -> list[ReferenceSample]:
    """Return samples whose outputs are the tensors that the float model picks its outputs from.

    Args:
        model: the float model.
        sources: names of these tensors (`find_pick_sources`).
        samples: samples with the model's own outputs.
        keep_outputs: whether the samples keep these too.
        threads: of one inference.
    """
    names = list(dict.fromkeys(sources))
    session = OrtSession.open(copy_with_outputs(model, names), threads=threads, spin=False)
    replaced_samples: list[ReferenceSample] = []
    for inputs, outputs in samples:
        values = session.run(inputs)
        source_values = {name: values[name] for name in names}
        if keep_outputs:
            source_values = {**outputs, **source_values}
        replaced_samples.append((inputs, source_values))
    return replaced_samples


def add_source_outputs(
    model: onnx.ModelProto, sources: Mapping[tuple[str, int], str]
) -> onnx.ModelProto:
    """Return a copy of a trial model that also outputs what its outputs are picked from.

    These tensors have the names that they have in the float model, so that both can be compared.

    Args:
        model: the trial model.
        sources: (node, index of its input) -> tensor of the float model (`find_pick_sources`).
    """
    # the new outputs have the float model's names, whatever the trial calls the tensors
    extended_model = copy_with_outputs(model, sources.values())
    graph = extended_model.graph
    made_tensors = all_outputs(graph.node)
    for node in list(graph.node):
        for index, trial_name in enumerate(node.input):
            float_name = sources.get((node.name, index))
            if float_name is not None and float_name not in made_tensors:
                rename_node = helper.make_node(
                    "Identity", [trial_name], [float_name], name=f"{float_name}/compared"
                )
                graph.node.append(rename_node)
                made_tensors.add(float_name)
    return extended_model
