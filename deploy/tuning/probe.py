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

Models that end in ArgMax or TopK are compared by the scores that these read. Class numbers hardly
change with noise, until they do, so on a few samples they do not rank the layers::

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
from numpy.typing import NDArray
from onnx import helper

from deploy.errors import Calib8Error, ConfigError
from deploy.graph.edit import copy_with_outputs
from deploy.graph.index import PROTOBUF
from deploy.method import Choices
from deploy.metrics.accuracy import Accuracy, Comparison, StoredOutputs
from deploy.metrics.output_form import OutputForm, derive_form
from deploy.runtimes.ort import OrtSession, holds_fp8
from deploy.targets.base import BuildRequest
from deploy.tasks import Metric
from deploy.tasks.rows import Outputs
from deploy.tensors import Array
from deploy.tuning.float_activations import FloatActivations, downstream_model
from deploy.tuning.search_samples import (
    apply_temperature,
    find_temperatures,
    finite_sum_of_squares,
    rank_by_signal,
    slice_signals,
    sum_of_squares,
)

Powers = NDArray[np.float64]  # [samples]
# sample, outputs of the float model
ReferenceSample = tuple[Mapping[str, "Array"], Mapping[str, "Array"]]
DETECTION_LIST = "what is found"
_FULL_SIGNAL = 0.25  # share of the mean power, half the amplitude: a sample with more counts fully
_NO_LOSS = 1e-12  # 120 dB: smaller losses count as none
_MOST_LOST = 0.99  # loss of the task: a larger one would not rank the layers
_SHOWN = 0.25  # share of the loss of all samples: fewer of them must lose as much
_ALL_NOISE = 1e6  # -60 dB, a loss of all: NaN, another shape
_RANKING = ("ArgMax", "TopK")
_MOVING = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative noise power of every output slice in every sample."""

    slice_powers: Mapping[str, Powers]  # slice -> [samples] noise power over signal power
    # slice -> share of the samples in which the float model's output has a signal; 1 if missing
    signal_shares: Mapping[str, float] = field(default_factory=dict)
    # accuracy on the same samples; None for a sum, or where it was not asked for
    accuracy: Accuracy | None = None

    @property
    def slice_losses(self) -> Mapping[str, float]:
        """Loss of each slice: 0 for none, 1 for all."""
        return {
            name: min(_loss(powers) / self.signal_shares.get(name, 1.0), 1.0)
            for name, powers in self.slice_powers.items()
        }

    @property
    def worst_slice(self) -> str:
        """The slice of greatest loss."""
        losses = self.slice_losses
        return max(losses, key=lambda name: losses[name], default="")

    @property
    def worst(self) -> float:
        """Loss of the worst slice, 0 to 1."""
        return max(self.slice_losses.values(), default=0.0)

    @property
    def mean(self) -> float:
        """Mean loss of the slices, which still ranks trials whose worst slice is all lost."""
        losses = self.slice_losses.values()
        return sum(losses) / len(losses) if losses else 0.0

    @property
    def db(self) -> float:
        """`worst` as the SQNR in dB that has this loss in every sample."""
        return -20 * math.log10(max(-math.log1p(-min(self.worst, 1 - _NO_LOSS)), 1e-6))

    def combined_with(self, other: Noise) -> Noise:
        """Return the sum of two independent sources of noise."""
        names = {**self.slice_powers, **other.slice_powers}
        nothing = np.zeros(1)
        parts = {
            n: self.slice_powers.get(n, nothing) + other.slice_powers.get(n, nothing) for n in names
        }
        return Noise(parts, {**self.signal_shares, **other.signal_shares})

    def scaled(self, share: float) -> Noise:
        """Return a share of the power."""
        return Noise(
            {name: share * powers for name, powers in self.slice_powers.items()}, self.signal_shares
        )

    def marginal_loss(self, background: Noise) -> float:
        """Return the loss that this small power adds to the worst slice, on top of `background`."""
        losses = (
            float((_slope(background.slice_powers[name]) * powers).mean())
            / self.signal_shares.get(name, 1.0)
            for name, powers in self.slice_powers.items()
        )
        return max(losses, default=0.0)


def _loss(powers: Powers) -> float:
    """Return the mean over the samples of 1 - exp(-amplitude)."""
    return float((1 - np.exp(-np.sqrt(powers))).mean())


def _slope(powers: Powers) -> Powers:
    """Return the derivative of a sample's loss by its power."""
    amplitude = np.sqrt(np.maximum(powers, 1e-6))
    return np.asarray(np.exp(-amplitude) / (2 * amplitude))


class Prober:
    """Runs trials, each choice once.

    The noise of a trial that cannot be built or run is None, and its error is stored.

    Args:
        trial: builds the trial model of a request.
        request: build request; its choices are replaced in each trial.
        heard: samples with the float model's outputs.
        form: slices and task of the outputs; None derives them from the samples.
        runs_here: whether ONNX Runtime's int8 kernels run the trials.
        threads: trials that run in parallel.
        few: number of samples for trials of a few layers; None for all.
        by_task: whether to measure the task or the metric too, which a limit of loss needs.
        metric: the user's metric or task.
        progress: called after each trial.
        ran: called with the number of samples that are run.

    Attributes:
        errors: errors of trials that could not run, in the order of the trials.
        metric_error: error of the user's metric, if it failed.
    """

    def __init__(
        self,
        trial: Callable[[BuildRequest], onnx.ModelProto],
        request: BuildRequest,
        samples: Sequence[ReferenceSample],
        *,
        form: OutputForm | None = None,
        runs_here: bool,
        threads: int,
        isolated_sample_count: int | None = None,
        by_task: bool = True,
        metric: Metric | None = None,
        progress: Callable[[], None] = lambda: None,
        count_samples: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._count_samples = count_samples
        self._progress = progress
        self._trial = trial
        self._request = request
        self._samples = list(samples)
        self._runs_here = runs_here
        self._threads = threads
        self._isolated_sample_count = (
            len(self._samples) if isolated_sample_count is None else isolated_sample_count
        )
        self._by_task = by_task
        self._metric = metric
        self._metric_lock = Lock()  # a user's metric need not be thread-safe
        self._noise_by_key: dict[object, Noise | None] = {}
        fed, outputs = zip(*samples, strict=True)
        self._form = form or derive_form(outputs, inputs=fed, metric=metric)
        self._temperatures = find_temperatures(self._form, outputs)
        self._mean_powers = mean_powers(self._form, self._slices(self._samples))
        self._float_activations: FloatActivations | Calib8Error | None = None
        self._stopped = False
        self.trial_count = 0
        self.errors: list[Calib8Error] = []
        self.metric_error: ConfigError | None = None

    def noises(self, trials: Iterable[Choices]) -> list[Noise | None]:
        """Return the noise of several trials, run in parallel; None for one that could not run."""

        def noise_of(choices: Choices) -> Noise:
            return self._measure(self._opened(choices), self._samples, judged=self._by_task)

        return self._run([(one, choices_key(one)) for one in trials], noise_of, len(self._samples))

    def isolated_noises(
        self, trials: Sequence[Choices], int8_nodes: Sequence[Sequence[str]]
    ) -> list[Noise | None]:
        """Return the noise of a few layers alone, on a few samples (`_few`).

        Only the nodes downstream of the int8 nodes run, from stored values of the float model.

        `trials`: choices that keep everything else in float. `int8_nodes`: those of each trial.
        """
        if self._float_activations is None:
            self._count_samples(self._isolated_sample_count)
            heard = [self._samples[place] for place in self._few()]
            try:
                self._float_activations = FloatActivations(self._request.model, int8_nodes, heard)
            except Calib8Error as error:
                self._float_activations = error
        work = partial(self._noise_alone, self._float_activations)
        return self._run(
            [(one, ("alone", choices_key(one))) for one in trials],
            work,
            self._isolated_sample_count,
        )

    def _few(self) -> list[int]:
        """Return the samples of greatest signal; of greatest noise if these lose next to nothing.

        The noise is the first trial's, which may be in the samples of one class alone.
        """
        chosen = strongest_samples(
            self._form, self._slices(self._samples), self._isolated_sample_count
        )
        noise = next((one for one in self._noise_by_key.values() if one is not None), Noise({}))
        powers = noise.slice_powers.get(noise.worst_slice, np.zeros(0))
        if powers.size == len(self._samples) and _loss(powers[chosen]) < _SHOWN * _loss(powers):
            chosen = sorted(
                map(int, np.argsort(-powers, kind="stable")[: self._isolated_sample_count])
            )
        return chosen

    def _run(
        self,
        trials: Sequence[tuple[Choices, object]],
        work: Callable[[Choices], Noise],
        samples: int,
    ) -> list[Noise | None]:
        new = {key: choices for choices, key in trials if key not in self._noise_by_key}
        self.trial_count += len(new)
        self._count_samples(len(new) * samples)
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                results = [*pool.map(partial(self._attempt, work), new.values())]
            except BaseException:  # Ctrl-C reaches only this thread
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.errors += [result for result in results if isinstance(result, Calib8Error)]
        noises = [result if isinstance(result, Noise) else None for result in results]
        self._noise_by_key |= dict(zip(new, noises, strict=True))
        return [self._noise_by_key[key] for _, key in trials]

    def _noise_alone(self, stored: FloatActivations | Calib8Error, choices: Choices) -> Noise:
        if isinstance(stored, Calib8Error):
            raise stored

        def downstream(model: onnx.ModelProto) -> onnx.ModelProto:
            return downstream_model(model, stored.unchanged_tensors(model), stored.values)

        heard = [
            ({**sample, **values}, wanted)
            for (sample, wanted), values in zip(stored.samples, stored.values, strict=True)
        ]
        return self._measure(self._opened(choices, downstream), heard, judged=False)

    def _attempt(self, work: Callable[[Choices], Noise], choices: Choices) -> Noise | Calib8Error:
        try:
            return work(choices)
        except Calib8Error as error:
            return error
        finally:
            self._progress()

    def _opened(
        self,
        choices: Choices,
        cut: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda model: model,
    ) -> OrtSession:
        """Open a trial model.

        protobuf's messages must not be used by several threads, so models are built one at a time.
        """
        with PROTOBUF:
            model = cut(self._trial(self._request.with_added_choices(choices)))
            kernels = self._runs_here and not holds_fp8(model)
            data = model.SerializeToString()
            del model
        return OrtSession.open(data, threads=1, spin=False, reuse_memory=True, int8_kernels=kernels)

    def _measure(
        self, session: OrtSession, heard: Sequence[ReferenceSample], *, judged: bool
    ) -> Noise:
        """Return the noise of a model on samples, which may hold more tensors than it reads."""
        inputs = [spec.name for spec in session.inputs]
        listed = not self._form.parts and self._form.task is not None
        figures = None
        if judged or listed:
            known = StoredOutputs(heard[0][1])
            figures = Comparison(known, session, form=self._form, metric=self._metric)
        powers = []
        for sample, wanted in heard:
            if self._stopped:
                break
            found = session.run({name: sample[name] for name in inputs})
            if figures is not None:
                figures = self._add_to(figures, sample, wanted, found)
            pair = self._told(wanted, sample, wanted), self._told(found, sample, wanted)
            powers.append(noise_powers(self._form, *pair, self._mean_powers))
        accuracy = figures.result() if figures is not None else None
        if listed:
            return Noise({DETECTION_LIST: _task_power(accuracy)}, accuracy=accuracy)
        labels = [part.label for part in self._form.parts]
        shares = signal_shares(self._form, self._slices(heard), self._mean_powers)
        return Noise(
            dict(zip(labels, np.array(powers).T, strict=True)),
            dict(zip(labels, shares, strict=True)),
            accuracy=accuracy,
        )

    def _slices(self, heard: Sequence[ReferenceSample]) -> list[Mapping[str, Array]]:
        """Return the float model's outputs in the form in which slices are measured."""
        return [self._told(wanted, sample, wanted) for sample, wanted in heard]

    def _told(self, outputs: Outputs, sample: Outputs, wanted: Outputs) -> Outputs:
        """Return outputs in the form in which slices are measured; `wanted`: the float model's."""
        told = self._form.told(outputs, sample, wanted)
        softmax = {n: how for n, how in self._temperatures.items() if told[n].ndim > 1}
        return {**told, **{n: apply_temperature(told[n], *how) for n, how in softmax.items()}}

    def _add_to(
        self,
        figures: Comparison,
        sample: Mapping[str, Array],
        wanted: Mapping[str, Array],
        found: Mapping[str, Array],
    ) -> Comparison | None:
        """Add one sample to the comparison; return None, a loss of all, if the metric fails."""
        if self._metric is None or self._metric.function is None:
            figures.add(sample, wanted, found)
            return figures
        with self._metric_lock:
            try:
                figures.add(sample, wanted, found)
            except ConfigError as error:
                self.metric_error = self.metric_error or error
                return None
        return figures


def _task_power(accuracy: Accuracy | None) -> Powers:
    """Return the power with the loss of the task; that of `_MOST` where the metric failed."""
    lost = 1.0 if accuracy is None else 0.0
    if accuracy is not None and accuracy.task is not None:
        lost = max(accuracy.task.lost, 0.0)
    return np.array([math.log1p(-min(lost, _MOST_LOST)) ** 2])


def strongest_samples(
    form: OutputForm, outputs: Sequence[Mapping[str, Array]], most: int
) -> list[int]:
    """Return the indices of the samples of greatest signal, each slice normalized, in order."""
    return sorted(map(int, rank_by_signal(slice_signals(form, outputs))[:most]))


def mean_powers(form: OutputForm, outputs: Sequence[Mapping[str, Array]]) -> list[float]:
    """Return every slice's power at the mean amplitude of the samples; 0 where it is not finite."""
    powers = []
    for part in form.parts:
        sizes = [math.sqrt(sum_of_squares(part.of(one[part.output]))) for one in outputs]
        mean = sum(sizes) / max(len(sizes), 1)
        powers.append(mean * mean if math.isfinite(mean) else 0.0)
    return powers


def signal_shares(
    form: OutputForm, outputs: Sequence[Mapping[str, Array]], usual: Sequence[float]
) -> list[float]:
    """Return every slice's share of the samples with at least half the mean amplitude.

    A sample with less counts by its power. A slice without signal in any sample gets 1.
    """
    result = []
    for part, power in zip(form.parts, usual, strict=True):
        powers = [finite_sum_of_squares(part.of(one[part.output])) for one in outputs]
        shares = [min(own / (_FULL_SIGNAL * power), 1.0) if power else 1.0 for own in powers]
        result.append(sum(shares) / max(len(shares), 1) or 1.0)
    return result


def noise_powers(
    form: OutputForm,
    wanted: Mapping[str, Array],
    found: Mapping[str, Array],
    usual: Sequence[float],
) -> list[float]:
    """Return the relative noise power of every slice in one sample."""
    return [
        _power(part.of(wanted[part.output]), part.of(found[part.output]), least)
        for part, least in zip(form.parts, usual, strict=True)
    ]


def _power(wanted: Array, found: Array, usual: float) -> float:
    if wanted.shape != found.shape:
        return _ALL_NOISE
    signal = np.asarray(wanted, np.float64)
    power, noise = sum_of_squares(signal), sum_of_squares(signal - np.asarray(found, np.float64))
    if not (math.isfinite(power) and math.isfinite(noise)):
        return _ALL_NOISE
    if power == usual == 0:
        return 0.0 if noise == 0 else _ALL_NOISE
    return min(noise / max(power, usual), _ALL_NOISE)


def choices_key(choices: Choices) -> object:
    """Return what is equal for equal choices, whatever their reasons."""
    methods = tuple(sorted((tensor, m.label) for tensor, m in choices.methods.items()))
    method = choices.method.label if choices.method else ""
    searches = tuple(sorted(choices.searches.items()))
    return frozenset(choices.float_nodes), method, methods, choices.rounded, searches


def find_ranked_scores(model: onnx.ModelProto) -> dict[str, str]:
    """Return {output of ArgMax or TopK: the scores that it reads}.

    Empty if the model has other outputs too, since boxes are in the order of their scores.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    scores = {}
    for output in model.graph.output:
        node = makers.get(output.name)
        while node is not None and node.op_type in _MOVING:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in _RANKING:
            scores[output.name] = node.input[0]
    return scores if len(scores) == len(model.graph.output) else {}


def replace_by_scores(
    model: onnx.ModelProto, samples: Sequence[ReferenceSample], *, keep_outputs: bool, threads: int
) -> list[ReferenceSample]:
    """Replace the float model's ranked outputs by the scores that they are made of."""
    ends = find_ranked_scores(model)
    scores = list(dict.fromkeys(ends.values()))
    session = OrtSession.open(copy_with_outputs(model, scores), threads=threads, spin=False)
    result: list[ReferenceSample] = []
    for sample, outputs in samples:
        kept = {name: value for name, value in outputs.items() if keep_outputs or name not in ends}
        made = session.run(sample)
        result.append((sample, {**kept, **{name: made[name] for name in scores}}))
    return result


def add_score_outputs(model: onnx.ModelProto, ends: Mapping[str, str]) -> onnx.ModelProto:
    """Return a trial model with the scores as outputs too, under the float model's names.

    `ends`: outputs and scores of the float model, as found by `find_ranked_scores`.
    """
    extended = copy_with_outputs(model, ends.values())
    graph = extended.graph
    names = {name for node in graph.node for name in node.output}
    for output, own in find_ranked_scores(model).items():
        name = ends.get(output, own)
        if name not in names:  # the trial has it under another name
            graph.node.append(helper.make_node("Identity", [own], [name], name=f"{name}/told"))
            names.add(name)
    return extended
