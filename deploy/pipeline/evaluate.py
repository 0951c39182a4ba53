"""Evaluate the built engines: compare each with the float model, in one pass.

Each engine runs every evaluation sample once, in sessions of one thread that run in parallel; the
float model runs only the samples whose outputs the calibration did not store::

    sample            1    2    3    4    5 ...      spread over the feed
    float outputs     stored, or run
    engines           run  run  run  run  run
    inner tensors     of both, for a few of them     the float model's outputs come with these
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import numpy as np
import onnx

from deploy.calibration.observation import CalibrationSubject
from deploy.calibration.reference_outputs import EvaluationSet, ReferenceOutputs
from deploy.errors import BackendError, ModelError
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.pixels import shrink_image
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel
from deploy.frontends.base import read_model_file
from deploy.frontends.onnx_reader import parse_model
from deploy.graph.edit import (
    copy_message,
    copy_with_outputs,
    drop_initializer_inputs,
    name_nodes,
    replace_nodes,
)
from deploy.graph.index import all_nodes
from deploy.metrics.accuracy import Accuracy, Comparison, TensorComparison
from deploy.metrics.layerwise import shared_tensors
from deploy.metrics.output_errors import OutputAccuracy, sqnr_db
from deploy.metrics.precision import GroundTruth
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildResult
from deploy.tasks import Metric
from deploy.tasks.evaluation_task import Example
from deploy.tasks.rows import batch_length, split_batch
from deploy.tensors import Array, Session
from deploy.terminal import phase

LAYER_SAMPLES = 4  # samples on which all inner tensors of both models are compared
_ALIKE_DB, _ALIKE_HALF_DB = 40.0, 25.0  # least SQNR of a cleaned model; of a float16 one in float32
_PICKS = frozenset(
    ("ArgMax", "ArgMin", "Ceil", "Floor", "NonMaxSuppression", "NonZero", "Round", "TopK", "Unique")
)
CALIBRATION_SAMPLES = 100  # calibration images to evaluate on, without evaluation images


def open_single_thread(model: Path | bytes | onnx.ModelProto, *, stand_in: bool = False) -> Session:
    """Open a session of one thread without spinning; samples run in parallel instead.

    `stand_in`: the model is in another runtime's form, and is computed as written.
    """
    if stand_in and not isinstance(model, bytes) and _truncates_float16():
        model = _quantized_in_float32(model)
    return OrtSession.open(
        model, threads=1, spin=False, reuse_memory=True, int8_kernels=not stand_in
    )


def _truncates_float16() -> bool:
    """Return whether this ONNX Runtime's QuantizeLinear rounds float16 values towards zero."""
    import onnxruntime

    major, minor = map(int, onnxruntime.__version__.split(".")[:2])
    return (major, minor) < (1, 30)


def _quantized_in_float32(model: Path | onnx.ModelProto) -> Path | onnx.ModelProto:
    """Cast float16 values before they are quantized."""
    seen = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
    half = {t.name for t in seen.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16}
    if not any(n.op_type == "QuantizeLinear" and n.input[1] in half for n in seen.graph.node):
        return model
    wide = onnx.load(model) if isinstance(model, Path) else copy_message(model)
    nodes: list[onnx.NodeProto] = []
    for node in wide.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[1] in half:
            for at, name in enumerate(node.input[:2]):
                node.input[at] = f"{node.output[0]}/{name}/float32"
                to = onnx.TensorProto.FLOAT
                nodes.append(onnx.helper.make_node("Cast", [name], [node.input[at]], to=to))
        nodes.append(node)
    replace_nodes(wide.graph, nodes)
    return wide


class InnerTensors:
    """Compares inner tensors of both models on a few samples, one sample in memory at a time.

    Attributes:
        places: numbers, from 1, of the samples that are compared.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        built: Sequence[BuildResult],
        engines: Mapping[str, Session | None],
        samples: int,
        *,
        speaks: bool = True,
    ) -> None:
        """Open both models with all shared tensors as outputs.

        `engines`: target whose engine can be opened here -> its session if a device runs it, None
        if ONNX Runtime does.
        `speaks`: whether engines are compared with `loaded` itself, without repairs.
        """
        self.samples = 0
        self._speaks = speaks
        self._looking = threading.Lock()
        self._taps: dict[str, Session] = {}
        self._figures: dict[str, TensorComparison] = {}
        for result in built:
            if result.runnable is not None and any(d.quantized for d in result.decisions):
                self._tap(loaded, result, stand_in=result.target not in engines)
        self.places: frozenset[int] = frozenset()
        if self._taps:
            tensors = dict.fromkeys(t for one in self._figures.values() for t in one.pairs)
            self._reference = open_single_thread(copy_with_outputs(loaded.model, tensors))
            run = {spec.name for spec in self._reference.outputs}  # no sequences
            self._names = [spec.name for spec in loaded.outputs if spec.name in run]
            few = min(LAYER_SAMPLES, samples)
            self.places = frozenset(1 + at * samples // few for at in range(few))

    def _tap(self, loaded: LoadedModel, result: BuildResult, *, stand_in: bool) -> None:
        assert result.runnable is not None
        model = onnx.load(result.runnable)
        shared = shared_tensors(loaded.model, model)
        if shared:  # a fake-quant model has no DequantizeLinear
            tapped = copy_with_outputs(model, shared.values())
            self._taps[result.target] = open_single_thread(tapped, stand_in=stand_in)
            self._figures[result.target] = TensorComparison(shared)

    def look(self, sample: Sample) -> Mapping[str, Array] | None:
        """Compare the tensors of one sample.

        Returns the float model's outputs, so that it need not run again; None if engines are
        compared with another model.
        """
        with self._looking:
            left = self._reference.run(sample)
            for name, tap in list(self._taps.items()):
                try:
                    self._figures[name].add(sample, left, tap.run(sample))
                except BackendError:  # the engine itself reports the error
                    del self._taps[name], self._figures[name]
            self.samples += 1
        return {name: left[name] for name in self._names} if self._speaks else None

    @property
    def layers(self) -> dict[str, tuple[OutputAccuracy, ...]]:
        """Target -> figures of its inner tensors."""
        return {name: one.result() for name, one in self._figures.items() if self.samples}


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is evaluated for a target: its engine, or a model that stands in for it.

    Attributes:
        alone: whether the session takes one sample at a time, as a device does.
    """

    session: Session
    alone: bool


def find_candidates(
    built: Sequence[BuildResult],
    engines: Mapping[str, Session | None],
    opened: Mapping[str, Session],
    failed: dict[str, str],
) -> dict[str, Candidate]:
    """Return target -> what can be run of it here; add to `failed` why others cannot.

    `opened`: target -> session of its runnable file, if it is open already, in one thread.
    """
    found = {}
    for result in built:
        engine = engines.get(result.target)
        if engine is not None:
            found[result.target] = Candidate(engine, alone=True)
            continue
        stand_in = result.target not in engines
        path = result.runnable if stand_in else result.runnable or result.engine
        if path is None:
            continue
        try:
            session = opened.get(result.target) or open_single_thread(path, stand_in=stand_in)
            found[result.target] = Candidate(session, alone=False)
        except BackendError as error:
            failed[result.target] = str(error)
    return found


@dataclass(slots=True)
class EvaluationResult:
    """Result of the evaluation pass.

    Attributes:
        looks: sample number -> name and picture of each example, uint8 [h, w, 3].
    """

    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reference_runs: int = 0
    engine_runs: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Example, ...]] = field(default_factory=dict)
    looks: Mapping[int, tuple[str, Array]] = field(default_factory=dict)


@dataclass(slots=True)
class _Ran:
    """One sample's outputs: the float model's and each candidate's."""

    sample: Sample
    reference: Mapping[str, Array]
    outputs: dict[str, Mapping[str, Array]] = field(default_factory=dict)


def evaluate(
    reference: ReferenceOutputs,
    candidates: Mapping[str, Candidate],
    over: Evaluation,
    inside: InnerTensors,
    *,
    threads: int,
) -> EvaluationResult:
    """Run all candidates over the evaluation samples, and compare with the float model."""
    found = EvaluationResult()
    if not candidates:
        return found
    before = reference.runs
    figures = {
        name: Comparison(reference, one.session, labels=over.labels, metric=over.metric)
        for name, one in candidates.items()
    }

    def attempt(name: str, sample: Sample, ran: _Ran) -> None:
        if name in found.failed:
            return
        try:
            ran.outputs[name] = candidates[name].session.run(sample)
        except BackendError as error:
            found.failed[name] = str(error)

    def work(_: int, number: int, sample: Sample) -> _Ran:
        inner = inside.look(sample) if number in inside.places else None
        ran = _Ran(sample, inner or reference.get(over.key(number), sample))
        for name, one in candidates.items():
            if not one.alone:
                attempt(name, sample, ran)
        return ran

    looks = CandidateImages(over.feed)

    def take(_: int, ran: _Ran) -> None:
        for name, one in candidates.items():
            if one.alone:
                attempt(name, ran.sample, ran)
            if name in ran.outputs:
                found.engine_runs[name] += 1
                figures[name].add(ran.sample, ran.reference, ran.outputs[name], count=over.count)
        looks.add(ran.sample, {n for figure in figures.values() for n in figure.watched})
        step()

    most = over.samples
    with phase("accuracy", most, "samples") as step, over.feed.samples() as samples:
        run_in_order(itertools.islice(samples, most), work, take, threads=threads)
    found.reference_runs = reference.runs - before + inside.samples
    for name, figure in figures.items():
        if name not in found.failed:
            found.accuracy[name] = figure.result()
            found.examples[name] = figure.shown()
    found.looks = looks.of(one.number for own in found.examples.values() for one in own)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the engines are evaluated on.

    Attributes:
        samples: number of samples to use, at most.
        labels: class of each sample, or the objects on it.
        key: number of a sample in a pass, from 1 -> its key among stored outputs.
    """

    feed: Feed | EvaluationSubset
    samples: int
    most: int
    labels: Sequence[int] | GroundTruth | None
    key: Callable[[int], int] = int
    metric: Metric | None = None

    @property
    def count(self) -> int | None:
        """Number of good images so far, if the last batch may repeat some to be full; else None."""
        count = self.feed.unpadded_count
        return None if count is None else min(self.most, count)


class _Labels(Sequence[int]):
    """Labels of a feed's good images; bad images show only while they are read."""

    def __init__(self, feed: Feed | EvaluationSubset) -> None:
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed.labels or ())

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return (self._feed.labels or ())[place]


def evaluation_of(
    part: EvaluationSubset,
    evaluation: Feed | EvaluationSubset | None,
    labels: Sequence[int] | GroundTruth | None,
    metric: Metric | None = None,
) -> Evaluation:
    """The evaluation samples; without them part of the calibration samples, without labels."""
    if evaluation is None:
        return Evaluation(
            feed=part, samples=len(part), most=part.count, labels=None, key=part.key, metric=metric
        )
    known: Sequence[int] | GroundTruth | None = labels
    if labels is None and evaluation.labels is not None:
        known = _Labels(evaluation)
    return Evaluation(
        feed=evaluation, samples=len(evaluation), most=evaluation.count, labels=known, metric=metric
    )


def check_cleaned_model(subject: CalibrationSubject, judges: EvaluationSet) -> str:
    """Compare the cleaned model with the given one on one sample, so that no step changed it.

    Returns:
        A warning where they differ and a node picks among values, which rounding may change too;
        "" if they are alike, or if ONNX Runtime cannot run the given model.
    """
    loaded, given = subject.loaded, subject.user_model
    if loaded.qdq is not None or loaded.had_integer_weights or loaded.cut_off is not None:
        return ""
    try:
        data = float_file(loaded) if given is None or isinstance(given, str | Path) else given
        session = OrtSession.open(data, threads=1, spin=False)
        worst = min(_differences(session, judges), default=(math.inf, ""))
    except BackendError:  # FP32 itself is not run as it was given either
        return ""
    if worst[0] >= (_ALIKE_HALF_DB if loaded.was_float16 else _ALIKE_DB):
        return ""
    said = (
        f"the model must compute what the given one does after {loaded.name} was cleaned, got"
        f" {worst[0]:.1f} dB in {worst[1]}; what was done: {' '.join(loaded.notes)}"
    )
    if any(node.op_type in _PICKS for node in all_nodes(loaded.model.graph)):
        return said
    raise ModelError(f"{said} Export the model again, with opset 13 or newer")


def _differences(session: OrtSession, judges: EvaluationSet) -> Iterator[tuple[float, str]]:
    """Yield (dB, name) of each float output of the first sample."""
    for sample, ours in judges.samples_with_outputs(1):
        fed = {spec.name: sample[spec.name].astype(spec.dtype) for spec in session.inputs}
        theirs = session.run(fed)
        for name, value in theirs.items():
            own = ours.get(name)
            if value.dtype.kind == "f" and own is not None and own.shape == value.shape:
                wanted = np.nan_to_num(value.astype(np.float64))
                noise = np.nan_to_num(own.astype(np.float64)) - wanted
                yield sqnr_db(float(np.vdot(wanted, wanted)), float(np.vdot(noise, noise))), name


def float_file(loaded: LoadedModel) -> bytes:
    """The user's file in a form that ONNX Runtime loads and optimizes; see `float_model`.

    Raises:
        ModelError: the file changed since.
    """
    data = read_model_file(loaded)
    if not loaded.has_shared_names and not loaded.fed_weights:
        return data
    given = parse_model(data, str(loaded.source))
    if loaded.has_shared_names:
        name_nodes(given.graph)
    if loaded.fed_weights:
        drop_initializer_inputs(given.graph)
    return bytes(given.SerializeToString())


def float_model(loaded: LoadedModel) -> bytes:
    """The user's file as it was loaded, so that int8 is compared with what the user runs today.

    Nodes that share a name are renamed, which ONNX Runtime requires, and weights are removed from
    the list of inputs: ONNX Runtime does not optimize weights that may be fed, and int8 would look
    better than it is.

    Other models are replaced by the float32 model that was loaded: a float16 file (the CPU casts
    around each node), a file with unknown operators (the part before them), a Q/DQ model, and a
    model whose weights are stored as integers.

    Raises:
        ModelError: the file changed since.
    """
    taken = loaded.qdq is not None or loaded.had_integer_weights
    if loaded.was_float16 or loaded.cut_off is not None or taken:
        return bytes(loaded.model.SerializeToString())
    return float_file(loaded)


_SIDE = 256  # pixels of the longer side; boxes are drawn on the image


class CandidateImages:
    """Images of the samples that are candidates for a report.

    Which samples are worth showing is known only after the pass, when they are gone; so after each
    sample the caller passes the current candidates, and images of all others are dropped.
    """

    def __init__(self, feed: Feed | EvaluationSubset) -> None:
        self._feed = feed
        self._sample_count = 0
        self._stored: dict[int, Array] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, sample: Mapping[str, Array], watched: Collection[int]) -> None:
        """Add the pass's next sample; drop images of samples that `watched` no longer has."""
        batch = batch_length(sample)
        start, self._sample_count = self._sample_count, self._sample_count + batch
        self._stored = {n: picture for n, picture in self._stored.items() if n in watched}
        wanted = [number for number in range(start, start + batch) if number in watched]
        rows = split_batch(sample, batch) if wanted else []
        for number in wanted:
            picture = self._feed.picture(rows[number - start])
            if picture is not None:
                self._stored[number] = shrink_image(picture, _SIDE)

    def of(self, numbers: Iterable[int]) -> dict[int, tuple[str, Array]]:
        """Return sample number -> (name, image uint8 [h, w, 3] RGB)."""
        names = self._feed.names
        wanted = sorted(set(numbers) & self._stored.keys())
        return {number: (names[number], self._stored[number]) for number in wanted}
