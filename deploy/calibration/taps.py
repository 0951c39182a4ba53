"""Taps: run a model variant with its inner tensors as outputs, and record them.

Each sample runs through a session per variant, whose tensors go to recorders::

    sample --> tap of a variant --> tensor --> histogram --.
                               |--> tensor --> histogram --+-- counted together
                               |--> tensor --> another recorder
                               '--> tensor --> waits for its turn: its statistic depends on order

**Reused output buffers.** Allocating and freeing the outputs of every sample takes as long as a
third of a small network's inference and fragments memory. While the shapes stay the same, the
buffers are reused::

    sample 1   [1, 3, 224, 224]    an ordinary run, which shows the shapes of the outputs
    sample 2   [1, 3, 224, 224]    allocates the buffers
    sample 3   [1, 3, 224, 224]    the same buffers
    sample 4   [1, 3, 224, 448]    an ordinary run; the buffers are freed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.histogram import ArrayRefused, Histogram, HistogramGroup
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import (
    FOLDED,
    Observation,
    ObservedStatistics,
    group_by_variant,
)
from deploy.calibration.sample_checks import Peaks, largest_magnitude
from deploy.errors import BackendError
from deploy.feed.parallel import Sample
from deploy.feed.temporary_arrays import Shape
from deploy.graph.edit import copy_with_outputs
from deploy.machine import trim_memory
from deploy.runtimes.ort import BoundSession, OrtSession
from deploy.tasks.rows import Outputs
from deploy.tensors import Array

MOST_BYTES = 1 << 26  # larger outputs are freed after each sample
ArrayForms = dict[str, tuple[Shape, np.dtype]]
OutputCallback = Callable[[int, Sample], None]
Waiting = tuple[Observation, Float32Array]
"""An order-dependent observation, and the value that it records in its turn."""


class BufferedSession:
    """Runs one session in one thread, with reused output buffers if shapes allow it."""

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._input_forms: ArrayForms | None = None  # of the last run; None if it cannot be bound
        self._output_forms: ArrayForms = {}
        self._bound: BoundSession | None = None
        self._can_bind = True
        self._is_trimmed = False

    def run(self, sample: Sample) -> Outputs:
        """Run a sample; return the outputs, valid until the next run, which may overwrite them.

        Once two samples in a row have the same shapes and dtypes, the session writes its outputs
        into buffers that are used again for each sample.
        """
        has_same_shapes = _forms(sample) == self._input_forms  # as the sample before
        if not self._can_bind or not has_same_shapes:
            return self._run_unbound(sample)  # drops the buffers and remembers the new shapes
        try:
            if self._bound is None:
                if not self._is_trimmed:
                    trim_memory()  # of the runs without buffers; once, since it takes time
                self._is_trimmed = True
                self._bound = BoundSession(self._session, self._output_forms)
            self._bound.run(sample)
        except BackendError:  # such as an output whose shape depends on the sample's values
            self._can_bind = False
            return self._run_unbound(sample)
        return self._bound.outputs

    def _run_unbound(self, sample: Sample) -> Outputs:
        """Run a sample without buffers; remember the shapes if its outputs may be buffered next."""
        self._bound = None
        self._input_forms = None
        values = self._session.run(sample)
        if sum(value.nbytes for value in values.values()) <= MOST_BYTES:
            self._input_forms = _forms(sample)
            self._output_forms = _forms(values)
        return values


def _forms(arrays: Mapping[str, Array]) -> ArrayForms:
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}


class Tap:
    """A session with inner tensors of a model as outputs.

    Attributes:
        inputs: names of the model's inputs.
        session: the session.
    """

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[str]) -> None:
        """Open the model; `tensors`: names of its tensors that `run` returns."""
        self._tensors = tuple(tensors)
        self.inputs = {value.name for value in model.graph.input}
        computed = [name for name in tensors if name not in self.inputs]
        self.session = OrtSession.open(copy_with_outputs(model, computed), threads=1, spin=False)

    def run(self, sample: Sample) -> dict[str, Float32Array]:
        """Run one sample; return tensor -> its values."""
        return self.select(sample, self.session.run(sample))

    def select(self, sample: Sample, outputs: Outputs) -> dict[str, Float32Array]:
        """Return tensor -> its values, from a sample and the session's outputs for it."""
        values = {}
        for name in self._tensors:
            if name in self.inputs:
                values[name] = np.asarray(sample[name], np.float32)
            else:
                values[name] = outputs[name]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRunner:
    """Runs one form of the model in the pass over the samples.

    Attributes:
        key: name of the form of the model (variant).
        tap: session whose outputs are the observed tensors.
        histogram_observations: those by a histogram of all samples in any order.
        other_observations: those by other statistics.
        limit: number of samples to run; None for all.
    """

    key: str
    tap: Tap
    histogram_observations: Sequence[Observation]
    other_observations: Sequence[Observation]
    limit: int | None

    def run(
        self,
        session: BufferedSession,
        recorders: VariantRecorders,
        peaks: Peaks,
        sample_number: int,
        sample: Sample,
        on_outputs: OutputCallback | None,
    ) -> list[Waiting]:
        """Run one sample; record its values in the statistics that do not depend on the order.

        Args:
            session: the session of the tap, with the output buffers of this thread.
            recorders: this variant's recorders of those statistics; no other thread uses them now.
            peaks: receives the largest |x| of each tensor.
            sample_number: counted from 1.
            sample: input -> array.
            on_outputs: called with (sample number, outputs of the session: those of the model, and
                possibly observed tensors), if this variant is the cleaned model itself.

        Returns:
            The values of order-dependent statistics, for the caller to record in sample order.
        """
        try:
            outputs = session.run(sample)
        except BackendError as error:
            raise BackendError(f"could not run a sample: {error}") from error
        if on_outputs is not None and self.key == FOLDED:
            on_outputs(sample_number, outputs)

        values = self.tap.select(sample, outputs)  # tensor -> array, valid until the next run
        histogram_values = [
            values[observation.tensor] for observation in self.histogram_observations
        ]
        recorders.count_in_histograms(sample_number, histogram_values)
        waiting = recorders.record_others(sample_number, values)
        # after the histograms have counted: each has found its tensor's largest |x| by the way
        self._add_peaks(peaks, sample_number, recorders.group.histograms, values)
        return waiting

    def _add_peaks(
        self,
        peaks: Peaks,
        sample_number: int,
        histograms: Sequence[Histogram],
        values: Mapping[str, Array],
    ) -> None:
        """Add the largest |x| of each tensor: as its histogram counted it, or of its values."""
        counted_tensors = set()
        for observation, histogram in zip(self.histogram_observations, histograms, strict=True):
            counted_tensors.add(observation.tensor)
            peaks.add((self.key, observation.tensor), sample_number, histogram.batch_amax)
        for name, value in values.items():
            if name not in counted_tensors:
                peaks.add((self.key, name), sample_number, largest_magnitude(value))


class VariantRecorders:
    """The recorders of a variant's tensors in one slice of the pass.

    Attributes:
        group: histograms of the tensors that are counted together.
    """

    def __init__(self, runner: VariantRunner, recorders: Mapping[Observation, Recorder]) -> None:
        self._histogram_observations = runner.histogram_observations
        # (observation, its recorder; None if its values must be recorded in the order of samples)
        self._other_recorders = [
            (observation, recorders.get(observation)) for observation in runner.other_observations
        ]
        histograms = []
        for observation in runner.histogram_observations:
            histogram = recorders[observation]
            assert isinstance(histogram, Histogram), observation.statistic.key
            histograms.append(histogram)
        self.group = HistogramGroup(histograms)

    def count_in_histograms(self, number: int, values: Sequence[Float32Array]) -> None:
        """Record the values of the tensors whose histograms count all samples."""
        try:
            self.group.observe(values)
        except ArrayRefused as error:
            observation = self._histogram_observations[error.index]
            raise name_tensor_and_sample(error, observation, number) from error

    def record_others(self, number: int, values: Mapping[str, Array]) -> list[Waiting]:
        """Record the other order-free statistics; return the values that must wait their turn."""
        waiting = []
        for observation, recorder in self._other_recorders:
            if not is_within_limit(observation.statistic.samples, number):
                continue
            value = values[observation.tensor]
            if recorder is None:
                waiting.append((observation, value.copy()))  # the next run may overwrite it
            else:
                record(recorder, observation, number, value)
        return waiting


def make_runners(
    observations: Sequence[Observation], observed: ObservedStatistics
) -> list[VariantRunner]:
    """Return one `VariantRunner` for each variant (form of the model), in order of first use.

    The observations of a variant are split in two: usual histograms, which one call counts for all
    tensors together, and other statistics, which are recorded one by one.

    Args:
        observations: what the pass records.
        observed: statistics from which the variants are made.
    """
    usual_histogram = HistogramOf()  # of all samples in any order
    runners = []
    for variant, variant_observations in group_by_variant(observations).items():
        tensors = list(dict.fromkeys(observation.tensor for observation in variant_observations))
        histogram_observations = [
            observation
            for observation in variant_observations
            if observation.statistic == usual_histogram
        ]
        other_observations = [
            observation
            for observation in variant_observations
            if observation.statistic != usual_histogram
        ]
        runner = VariantRunner(
            key=variant.key,
            tap=Tap(variant.make(observed), tensors),
            histogram_observations=histogram_observations,
            other_observations=other_observations,
            limit=sample_limit(variant_observations),
        )
        runners.append(runner)
    return runners


def sample_limit(observations: Iterable[Observation]) -> int | None:
    """Return how many samples the observations need; None for all."""
    limit = 0
    for observation in observations:
        samples = observation.statistic.samples
        if samples is None:
            return None
        limit = max(limit, samples)
    return limit


def is_within_limit(limit: int | None, number: int) -> bool:
    """Whether a limit includes the sample of this number, counted from 1."""
    return limit is None or number <= limit


def record(recorder: Recorder, observation: Observation, number: int, value: Float32Array) -> None:
    """Record a tensor's values of one sample, if it has any.

    Raises:
        CalibrationError: the recorder refuses them, such as NaN; names tensor and sample.
    """
    try:
        if value.size:
            recorder.observe(value)
    except CalibrationError as error:
        raise name_tensor_and_sample(error, observation, number) from error


def name_tensor_and_sample(
    error: CalibrationError, observation: Observation, number: int
) -> CalibrationError:
    """Return the error with the name of the tensor and the sample's number, counted from 0."""
    subject = f"tensor {observation.tensor} of sample {number - 1}"
    return explain_error(error, observation, subject)


def explain_error(
    error: CalibrationError, observation: Observation, subject: str
) -> CalibrationError:
    """Return the error with its subject, such as a tensor, and what to do about it."""
    if observation.layer:
        return CalibrationError(
            f"layer {observation.layer!r}: {subject}: {error}"
            " (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{subject}: {error}; check the model's weights and the preprocessing")
