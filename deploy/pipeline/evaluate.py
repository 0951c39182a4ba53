"""Evaluate the built engines: compare each with the float model, in one pass.

Each engine runs every evaluation sample once, in sessions of one thread that run in parallel; the
float model runs only the samples whose outputs the calibration did not store::

    sample            1    2    3    4    5 ...      spread over the feed
    float outputs     stored, or run
    engines           run  run  run  run  run

The inner tensors of both models are compared beforehand, on a few of these samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.calibration.reference_outputs import (
    EngineOutputs,
    ReferenceOutputs,
    open_single_thread,
)
from deploy.errors import BackendError, ModelError
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.pixels import shrink_image
from deploy.feed.sample_reader import SampleCache
from deploy.feed.samples import Feed
from deploy.feed.states import OwnStates
from deploy.frontends import LoadedModel
from deploy.frontends.base import model_digest
from deploy.frontends.onnx_reader import read_model
from deploy.graph.edit import (
    append_outputs,
    copy_with_outputs,
)
from deploy.graph.tensor_pairs import pair_quantized_tensors
from deploy.metrics.accuracy import Accuracy, Comparison, TensorComparison
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.output_form import count_form_batches, derive_form, derive_from_first
from deploy.metrics.precision import GroundTruth
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildResult
from deploy.tasks import Metric
from deploy.tasks.evaluation_task import Example
from deploy.tasks.rows import batch_length, split_batch
from deploy.tensors import Array, Session
from deploy.terminal import phase

EvaluationFeed = Feed | EvaluationSubset
# engine that can be opened here -> its session. None stands for a session in several threads: the
# evaluation, which runs samples in parallel, opens the file again, in a single one
EngineSessions = Mapping[str, Session | None]
Pictures = Mapping[int, tuple[str, Array]]  # sample number -> name, image uint8 [h, w, 3] RGB

LAYER_SAMPLES = 4  # samples on which all inner tensors of both models are compared
CALIBRATION_SAMPLES = 100  # calibration images to evaluate on, without evaluation images
_PICTURE_SIDE = 256  # pixels of the longer side of an example; boxes are drawn on the image


@dataclass(frozen=True, slots=True)
class InnerTensors:
    """Inner tensors of each engine, compared with the float model's on a few samples.

    Attributes:
        layers: target -> figures of its tensors.
        sample_count: number of samples that were compared.
    """

    layers: Mapping[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    sample_count: int = 0


def compare_inner_tensors(
    loaded: LoadedModel,
    results: Sequence[BuildResult],
    engine_sessions: EngineSessions,
    samples: Iterable[Sample],
) -> InnerTensors:
    """Compare the inner tensors of each target's runnable file with the float model's.

    The runnable file is a model for ONNX Runtime that computes what the engine computes. It is run
    in place of the engine, whose inner tensors cannot be read. One sample is in memory at a time.

    Args:
        loaded: the float model.
        results: results whose runnable file is compared.
        engine_sessions: engines that can be opened here; they are not run. The runnable file of a
            target that ONNX Runtime does not run stands in for its engine, see
            `open_single_thread`.
        samples: the samples to compare on.
    """
    opened_targets: dict[str, tuple[Session, TensorComparison]] = {}
    for result in results:
        is_quantized = any(decision.quantized for decision in result.decisions)
        if result.runnable is not None and is_quantized:
            # ONNX Runtime's engine has its session, or None; a device's engine has another session
            engine = engine_sessions.get(result.target)
            is_on_device = engine is not None and not isinstance(engine, OrtSession)
            is_stand_in = is_on_device or result.target not in engine_sessions
            try:
                session_and_comparison = _open_with_inner_tensors(
                    loaded, result, stand_in=is_stand_in
                )
            except (BackendError, ModelError):  # `find_candidates` reports it
                continue
            if session_and_comparison is not None:  # else the models share no inner tensor
                opened_targets[result.target] = session_and_comparison
    if not opened_targets:
        return InnerTensors()

    # tensors of the float model that a target has too; the dict is an ordered set
    shared_tensors: dict[str, None] = {}
    for _, comparison in opened_targets.values():
        shared_tensors |= dict.fromkeys(comparison.pairs)
    float_session = open_single_thread(copy_with_outputs(loaded.model, shared_tensors))
    sample_count = 0
    for sample in samples:
        float_tensors = float_session.run(sample)
        for target, (session, comparison) in list(opened_targets.items()):
            try:
                comparison.add(sample, float_tensors, session.run(sample))
            except BackendError:  # the run of the engine itself reports it
                del opened_targets[target]
        sample_count += 1
    layers = {target: comparison.result() for target, (_, comparison) in opened_targets.items()}
    return InnerTensors(layers, sample_count)


def _open_with_inner_tensors(
    loaded: LoadedModel, result: BuildResult, *, stand_in: bool
) -> tuple[Session, TensorComparison] | None:
    """Return (session of a target's runnable file, comparison of its tensors with the float ones).

    The tensors that both models have are outputs of the session. None if there are none.

    Args:
        loaded: the float model.
        result: files of the target.
        stand_in: whether the file stands in for an engine of another runtime.
    """
    assert result.runnable is not None
    model = read_model(result.runnable)
    # tensor of the float model -> the same in the runnable file, after rounding
    quantized_by_float_name = pair_quantized_tensors(loaded.model, model)
    if not quantized_by_float_name:  # a fake-quant model has no DequantizeLinear
        return None
    append_outputs(model, quantized_by_float_name.values())
    session = open_single_thread(model, stand_in=stand_in)
    return session, TensorComparison(quantized_by_float_name, loaded.declaration.batch_inputs)


def find_candidates(
    results: Sequence[BuildResult], engine_sessions: EngineSessions
) -> tuple[dict[str, Session], dict[str, str]]:
    """Return (name -> session to evaluate, target -> the error of a file that cannot be opened).

    A target is evaluated by its engine. If the engine cannot be opened here, its runnable file
    stands in, a model for ONNX Runtime that computes the same numbers; targets without one are left
    out. Baselines, float engines that were built for a target, are evaluated if they have a
    session.

    Args:
        results: files of each target.
        engine_sessions: the engines that can be opened here. One without a session is opened again,
            in one thread.
    """
    candidates = {}
    failures = {}
    for result in results:
        session = engine_sessions.get(result.target)
        if session is not None:
            candidates[result.target] = session
            continue

        # a file is opened: the runnable one, which is also the engine's if ONNX Runtime runs it
        can_open_engine = result.target in engine_sessions
        path = result.runnable
        if path is None and can_open_engine:
            path = result.engine
        if path is None:
            continue
        try:
            candidates[result.target] = open_single_thread(path, stand_in=not can_open_engine)
        except (BackendError, ModelError) as error:
            failures[result.target] = str(error)

    for result in results:
        for name in result.baselines:
            session = engine_sessions.get(name)
            if session is not None:
                candidates[name] = session
    return candidates, failures


def find_stored_outputs(
    results: Sequence[BuildResult],
    candidates: Mapping[str, Session],
    engine_outputs: Mapping[str, EngineOutputs],
) -> dict[str, SampleCache]:
    """Return target -> outputs that its search stored, if it ran the model that is evaluated now.

    They are stored by sample key. The session of a target to evaluate is called its candidate.

    Args:
        results: files of each target.
        candidates: name -> session to evaluate. The search ran ONNX Runtime, so sessions of other
            runtimes give other numbers.
        engine_outputs: target -> outputs of the int8 model that its search chose.
    """
    stored_outputs = {}
    for result in results:
        outputs = engine_outputs.get(result.target)
        runs_in_ort = isinstance(candidates.get(result.target), OrtSession)
        if outputs is None or result.runnable is None or not runs_in_ort:
            continue
        if model_digest(read_model(result.runnable)) == outputs.digest:
            stored_outputs[result.target] = outputs.by_key
    return stored_outputs


def compare_sessions(
    reference: Session, candidate: Session, feed: Feed, metric: Metric | None = None
) -> Accuracy:
    """Run two sessions over all samples, one after the other; return the candidate's accuracy.

    If the model feeds itself states, the candidate gets those that it computed itself.
    """
    own_states = OwnStates(feed.states, drops_ended=True)
    with phase("accuracy", len(feed), "samples") as show_progress, feed.samples() as samples:
        output_form, reference_pairs = derive_from_first(
            ((sample, reference.run(sample)) for sample in samples), metric
        )
        comparison = Comparison(output_form)
        for number, (sample, reference_outputs) in enumerate(reference_pairs, 1):
            sequence = feed.sequence_of(feed.sample_key(number)) if feed.states else 0
            outputs = own_states.run(candidate, sample, sequence)
            comparison.add(sample, reference_outputs, outputs, count=feed.unpadded_count)
            show_progress()
    return comparison.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The samples that the engines are evaluated on, and how.

    Attributes:
        feed: the samples.
        labels: class of each sample, or the objects on it.
        find_key: number of a sample in a pass, from 1 -> its key among stored outputs.
        metric: what the user set to evaluate by.
    """

    feed: EvaluationFeed
    labels: Sequence[int] | GroundTruth | None
    find_key: Callable[[int], int] = int
    metric: Metric


class _Labels(Sequence[int]):
    """Labels of a feed's good images; bad images show only while they are read."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed.labels or ())

    def __getitem__(self, index: Any) -> Any:
        return (self._feed.labels or ())[index]


def choose_evaluation(
    calibration: EvaluationSubset,
    evaluation: Feed | None,
    objects: GroundTruth | None,
    metric: Metric,
) -> Evaluation:
    """Return the samples to evaluate on: evaluation samples, or without any those of calibration.

    Args:
        calibration: the calibration samples, whose labels are not used.
        evaluation: evaluation samples, which may have labels; None without.
        objects: annotated objects on the evaluation samples, in place of labels; None without.
        metric: what the user set to evaluate by.
    """
    if evaluation is None:
        # calibration stored the float model's outputs, under the keys that `sample_key` returns
        return Evaluation(
            feed=calibration, labels=None, find_key=calibration.sample_key, metric=metric
        )
    labels: Sequence[int] | GroundTruth | None = objects
    if objects is None and evaluation.labels is not None:
        # no copy of the labels: a bad image, which is skipped later, takes its label with it
        labels = _Labels(evaluation)
    return Evaluation(feed=evaluation, labels=labels, metric=metric)


@dataclass(slots=True)
class EvaluationResult:
    """Result of the evaluation pass.

    Attributes:
        accuracy: candidate -> its accuracy.
        failures: candidate -> why it cannot be run.
        reference_runs: number of inferences of the float model.
        engine_runs: candidate -> number of its inferences.
        examples: candidate -> samples worth showing.
        pictures: sample number -> name and picture of each example, uint8 [h, w, 3].
    """

    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Example, ...]] = field(default_factory=dict)
    pictures: Pictures = field(default_factory=dict)


def evaluate(
    reference: ReferenceOutputs,
    candidates: Mapping[str, Session],
    evaluation: Evaluation,
    *,
    stored_outputs: Mapping[str, SampleCache],
    threads: int,
) -> EvaluationResult:
    """Run all candidates over the evaluation samples, and compare with the float model.

    Args:
        reference: outputs of the float model.
        candidates: name -> session that is evaluated.
        evaluation: the samples, and how they are compared.
        stored_outputs: candidate -> its outputs that are known already, by sample key.
        threads: samples that run in parallel.
    """
    if not candidates:
        return EvaluationResult()
    earlier_runs = reference.runs
    evaluation_pass = _EvaluationPass(reference, candidates, evaluation, stored_outputs)
    feed = evaluation.feed
    with phase("accuracy", len(feed), "samples") as show_progress, feed.samples() as samples:

        def compare(_number: int, outputs: _SampleOutputs) -> None:
            """Compare the outputs of the next sample, and count it as done."""
            evaluation_pass.compare(outputs)
            show_progress()

        if feed.states:
            threads = 1  # each sample needs the states that the one before it left
        run_in_order(samples, evaluation_pass.run, compare, threads=threads)
    result = evaluation_pass.finish()
    result.reference_runs = reference.runs - earlier_runs
    return result


@dataclass(slots=True)
class _SampleOutputs:
    """One sample's outputs: the float model's and each candidate's.

    Attributes:
        key: of the sample among stored outputs.
        sample: the inputs.
        sequence: number of the sequence that the sample is a step of.
        reference: the float model's outputs.
        candidates: the outputs of each candidate.
        run_names: the candidates that were run for them; the outputs of others were stored.
    """

    key: int
    sample: Sample
    sequence: int
    reference: Mapping[str, Array]
    candidates: dict[str, Mapping[str, Array]] = field(default_factory=dict)
    run_names: list[str] = field(default_factory=list)


class _EvaluationPass:
    """The running state of `evaluate`: the figures of each candidate."""

    def __init__(
        self,
        reference: ReferenceOutputs,
        candidates: Mapping[str, Session],
        evaluation: Evaluation,
        stored_outputs: Mapping[str, SampleCache],
    ) -> None:
        """Start with no samples; the arguments are those of `evaluate`."""
        self._reference = reference
        self._candidates = candidates
        self._evaluation = evaluation
        self._stored_outputs = stored_outputs
        self._result = EvaluationResult()
        # a recurrent model hands states on from sample to sample: each candidate gets its own. One
        # sequence follows the other, so states of one that has ended are dropped
        states = evaluation.feed.states
        self._own_states = {name: OwnStates(states, drops_ended=True) for name in candidates}
        # inputs whose rows are samples: each row may be an image that the report shows
        batch_inputs = evaluation.metric.declared.batch_inputs
        self._images = CandidateImages(evaluation.feed, batch_inputs)
        # the first samples wait until they are enough to show the form of the outputs, which every
        # comparison needs
        self._waiting_outputs: list[_SampleOutputs] = []
        self._comparisons: dict[str, Comparison] = {}

    def run(self, _worker: int, number: int, sample: Sample) -> _SampleOutputs:
        """Run the float model, and the candidates in ONNX Runtime, on one sample.

        Called by several threads. `number`: of the sample in the pass, from 1.
        """
        key = self._evaluation.find_key(number)
        reference_outputs = self._reference.get(key, sample)
        feed = self._evaluation.feed
        sequence = feed.sequence_of(feed.sample_key(number)) if feed.states else 0
        outputs = _SampleOutputs(key, sample, sequence, reference_outputs)
        self._run_candidates(outputs, on_device=False)
        return outputs

    def compare(self, outputs: _SampleOutputs) -> None:
        """Compare a sample's outputs of all candidates with the float model's.

        Candidates on a device are run here, those in ONNX Runtime by `run`: one thread calls this,
        in the order of the samples, and a device runs one inference at a time.
        """
        self._run_candidates(outputs, on_device=True)
        self._result.engine_runs.update(outputs.run_names)
        self._waiting_outputs.append(outputs)
        if self._comparisons or self._can_recognise_form():
            self._compare_waiting()

    def _can_recognise_form(self) -> bool:
        """Whether enough samples wait to recognise what their outputs mean, such as boxes."""
        first = self._waiting_outputs[0]
        metric = self._evaluation.metric
        return len(self._waiting_outputs) >= count_form_batches(
            first.sample, first.reference, metric
        )

    def _compare_waiting(self) -> None:
        """Compare the samples that wait; of the first ones, recognise the form of the outputs."""
        waiting_outputs = self._waiting_outputs
        self._waiting_outputs = []
        if not self._comparisons:
            output_form = derive_form(
                [outputs.reference for outputs in waiting_outputs],
                inputs=[outputs.sample for outputs in waiting_outputs],
                metric=self._evaluation.metric,
            )
            labels = self._evaluation.labels
            self._comparisons = {
                name: Comparison(output_form, labels=labels) for name in self._candidates
            }
        for outputs in waiting_outputs:
            self._compare_sample(outputs)

    def _compare_sample(self, outputs: _SampleOutputs) -> None:
        """Add a sample to every comparison, and store its image if a report may show it."""
        # number of all images; rows beyond it fill the last batch up, and are not compared
        image_count = self._evaluation.feed.unpadded_count
        for name, comparison in self._comparisons.items():
            if name in outputs.candidates:  # else it failed
                comparison.add(
                    outputs.sample,
                    outputs.reference,
                    outputs.candidates[name],
                    count=image_count,
                )

        # numbers of the samples so far that a report may show: where an engine differs most
        possible_examples: set[int] = set()
        for comparison in self._comparisons.values():
            possible_examples.update(example.number for example in comparison.shown())
        self._images.add(outputs.sample, possible_examples)

    def _run_candidates(self, outputs: _SampleOutputs, *, on_device: bool) -> None:
        """Run the candidates on devices, or those in ONNX Runtime, unless they have failed.

        Outputs that the search of a target has stored are taken without a run.
        """
        for name, session in self._candidates.items():
            is_on_device = not isinstance(session, OrtSession)
            if is_on_device != on_device or name in self._result.failures:
                continue
            stored_outputs = self._stored_outputs.get(name)
            known_outputs = None if stored_outputs is None else stored_outputs.get(outputs.key)
            if known_outputs is not None:
                outputs.candidates[name] = known_outputs
                continue
            try:
                outputs.candidates[name] = self._own_states[name].run(
                    session, outputs.sample, outputs.sequence
                )
            except BackendError as error:
                self._result.failures[name] = str(error)
            else:
                outputs.run_names.append(name)

    def finish(self) -> EvaluationResult:
        """Return the figures of the candidates that did not fail, and their examples."""
        if self._waiting_outputs:  # fewer samples than are wanted to recognise the form
            self._compare_waiting()
        result = self._result
        example_numbers: set[int] = set()
        for name, comparison in self._comparisons.items():
            if name not in result.failures:
                result.accuracy[name] = comparison.result()
                result.examples[name] = comparison.shown()
                example_numbers.update(example.number for example in result.examples[name])
        result.pictures = self._images.select(example_numbers)
        return result


class CandidateImages:
    """Images of the samples that a report may show.

    Which samples are worth showing is known only after the pass, when they are gone. So the caller
    passes after each sample the numbers of those that may be, and all other images are dropped.
    """

    def __init__(self, feed: EvaluationFeed, batch_inputs: Collection[str] | None = None) -> None:
        """Start with no images.

        Args:
            feed: the samples.
            batch_inputs: inputs each of whose rows is one sample; None for the first input.
        """
        self._feed = feed
        self._batch_inputs = batch_inputs
        self._sample_count = 0
        self._stored: dict[int, Array] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, sample: Mapping[str, Array], example_numbers: Collection[int]) -> None:
        """Add the pass's next sample or batch; drop images that are not needed any more.

        `example_numbers`: numbers, from 0, of the samples whose images may be shown.
        """
        batch = batch_length(sample, self._batch_inputs)
        first_number = self._sample_count
        self._sample_count += batch
        for number in self._stored.keys() - example_numbers:
            del self._stored[number]
        example_rows = [row for row in range(batch) if first_number + row in example_numbers]
        if not example_rows:
            return

        samples = split_batch(sample, batch)
        for row in example_rows:
            image = self._feed.to_image(samples[row])
            if image is not None:
                self._stored[first_number + row] = shrink_image(image, _PICTURE_SIDE)

    def select(self, numbers: Iterable[int]) -> Pictures:
        """Return sample number -> (name, image uint8 [h, w, 3] RGB)."""
        names = self._feed.names
        stored_numbers = sorted(self._stored.keys() & numbers)
        return {number: (names[number], self._stored[number]) for number in stored_numbers}
