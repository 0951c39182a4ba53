"""Reference outputs: the float model's outputs for the evaluation samples, computed once.

::

    observing        1 2 3 4 5 6 7 ...     every sample is run, and its inner tensors counted
    stored           o     o     o         outputs of the evaluation samples, on disk
    search, repairs, accuracy  <-- read these; a missing one is computed, then stored

So memory use does not depend on the outputs' size or the number of samples.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.parallel import Sample
from deploy.feed.sample_reader import SampleCache
from deploy.feed.samples import Feed
from deploy.frontends.onnx_reader import read_model
from deploy.graph.edit import copy_message, make_node, replace_nodes
from deploy.graph.index import ONNX_DOMAINS, PROTOBUF, RANDOM, all_nodes
from deploy.runtimes.ort import OrtSession
from deploy.tasks.rows import Outputs
from deploy.tensors import Array, Session

MOST_BYTES = 1 << 30  # on disk; outputs beyond this are computed again
_MAX_NOISE_SHARE = 1e-6  # noise / signal, 60 dB: largest difference after a repair of a float model
_NUMERIC_KINDS = "biuf"  # kinds of arrays that are stored; text has no noise
_REPEATED_SAMPLES = 8  # run twice: random numbers may give the same class in some


class ReferenceOutputs:
    """Outputs of one float model for the samples of one feed, by sample key.

    Attributes:
        runs: number of inferences for samples whose outputs were not stored.
    """

    def __init__(
        self,
        open_session: Callable[[], Session],
        names: Sequence[str],
        keys: Collection[int] = (),
        *,
        session: Session | None = None,
    ) -> None:
        """Start with nothing stored.

        Args:
            open_session: opens the float model; called when it must be run.
            names: names of its outputs.
            keys: keys of the samples whose outputs are to be stored. Those of other samples are
                computed each time.
            session: an open session of the float model, if there is one already.
        """
        self.runs = 0
        self._open = open_session
        self._names = tuple(names)
        self._cache = SampleCache(frozenset(keys), max_bytes=MOST_BYTES)
        self._session = session
        self._lock = threading.Lock()

    def add(self, key: int, values: Outputs) -> None:
        """Store the outputs of a sample, if it is one of those whose outputs are to be stored.

        If an output is missing or holds text, nothing is stored, so that `get` runs the model.

        Args:
            key: key of the sample.
            values: name -> array of a run; tensors that are not outputs are ignored.
        """
        outputs: dict[str, Array] = {}
        for name in self._names:
            value = values.get(name)
            if value is None or value.dtype.kind not in _NUMERIC_KINDS:
                return
            outputs[name] = value
        self._cache.add(key, outputs)  # which ignores the keys of other samples

    def __contains__(self, key: object) -> bool:
        """Whether a sample's outputs are stored."""
        return key in self._cache

    def get(self, key: int, sample: Sample) -> Outputs:
        """Return a sample's outputs; thread-safe.

        Raises:
            BackendError: ONNX Runtime refused the model or the sample.
        """
        stored = self._cache.get(key)
        if stored is not None:
            return stored
        values = self.recompute(sample)
        with self._lock:
            self.runs += 1
        self.add(key, values)
        return values

    def recompute(self, sample: Sample) -> Outputs:
        """Return a sample's outputs, computed whatever is stored."""
        return self._open_session().run(sample)

    def close_session(self) -> None:
        """Free the session, which has the float model's weights; a later run opens another."""
        with self._lock:
            self._session = None

    def _open_session(self) -> Session:
        with self._lock, PROTOBUF:
            if self._session is None:
                self._session = self._open()
            return self._session


def open_single_thread(model: Path | bytes | onnx.ModelProto, *, stand_in: bool = False) -> Session:
    """Open a session of ONNX Runtime in one thread, without spinning; samples run in parallel.

    `stand_in`: whether the model stands for an engine of another runtime. Its Q/DQ pairs are then
    computed as they are written, without int8 kernels.
    """
    if stand_in and not isinstance(model, bytes):
        model = _with_float32_quantizers(model)
    return OrtSession.open(
        model, threads=1, spin=False, reuse_memory=True, int8_kernels=not stand_in
    )


def _with_float32_quantizers(model: Path | onnx.ModelProto) -> Path | onnx.ModelProto:
    """Return a model whose QuantizeLinear nodes of float16 values compute in float32.

    The results are equal, and ONNX Runtime's kernel for float32 is about 20 times as fast. Before
    1.30 the one for float16 also rounds towards zero instead of to the nearest. A model without
    such nodes is returned itself.
    """
    copy = read_model(model) if isinstance(model, Path) else copy_message(model)
    float16_constants = {
        tensor.name
        for tensor in copy.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT16
    }

    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        # the inputs are the values, their scale and the zero point. The first two have one type,
        # and the scale is a constant, which shows it
        if node.op_type == "QuantizeLinear" and node.input[1] in float16_constants:
            # ONNX Runtime computes most float16 nodes in float32, and drops its cast to float16
            # behind them if a cast to float32 follows at once. The Identity keeps that rounding
            rounded = f"{node.output[0]}/float16"
            nodes.append(make_node("Identity", [node.input[0]], rounded))
            for index, name in enumerate((rounded, node.input[1])):
                node.input[index] = f"{node.output[0]}/{name}/float32"
                cast = make_node("Cast", [name], node.input[index], to=onnx.TensorProto.FLOAT)
                nodes.append(cast)
        nodes.append(node)
    if len(nodes) == len(copy.graph.node):
        return model
    replace_nodes(copy.graph, nodes)
    return copy


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """Outputs of an int8 model that a search ran, so that the evaluation need not run it again.

    Attributes:
        digest: `model_digest` of the int8 model.
        by_key: its outputs, by sample key; of some evaluation samples.
    """

    digest: str
    by_key: SampleCache


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The evaluation samples and the outputs of models for them.

    Attributes:
        subset: the evaluation samples.
        reference_outputs: runs the float model, and keeps its outputs by sample key.
        engine_outputs: target -> outputs of the int8 model that its search chose.
    """

    subset: EvaluationSubset
    reference_outputs: ReferenceOutputs
    engine_outputs: dict[str, EngineOutputs] = field(default_factory=dict)

    def samples_with_outputs(self, limit: int) -> Iterator[tuple[Sample, Outputs]]:
        """Yield (sample, its float outputs) of at most `limit` samples, spread over all."""
        for key, sample in self.subset.spread_with_keys(limit):
            yield sample, self.reference_outputs.get(key, sample)


def make_evaluation_set(feed: Feed, model: onnx.ModelProto, max_images: int) -> EvaluationSet:
    """Return the evaluation samples of a feed, with a float model's outputs.

    Nothing is read or run before it is used.
    """
    subset = EvaluationSubset(feed, max_images)
    names = [value.name for value in model.graph.output]
    open_session = partial(OrtSession.open, model, threads=1, spin=False)
    return EvaluationSet(subset, ReferenceOutputs(open_session, names, subset.keys))


def find_random_outputs(model: onnx.ModelProto, evaluation_set: EvaluationSet) -> str:
    """Return a sentence on outputs that differ between two runs of the float model; "" if none.

    Only a model that draws random numbers, or has operators that ONNX does not define, is run
    again: on 8 samples at most, until the outputs of one differ.
    """
    if not any(map(_may_draw_numbers, all_nodes(model.graph))):
        return ""
    reference_outputs = evaluation_set.reference_outputs
    for sample, stored_outputs in evaluation_set.samples_with_outputs(_REPEATED_SAMPLES):
        # a new session starts with the same random numbers as the one that calibrated, so its first
        # run may repeat the stored outputs: only the second one counts
        reference_outputs.recompute(sample)
        new_outputs = reference_outputs.recompute(sample)
        random_names = [
            name
            for name in stored_outputs
            if not _is_equal_output(name, stored_outputs, new_outputs)
        ]
        if random_names:
            return (
                f"the float model itself gives another {', '.join(random_names)} at each run: it"
                " draws random numbers, which every figure of accuracy includes"
            )
    return ""


def _may_draw_numbers(node: onnx.NodeProto) -> bool:
    return node.op_type in RANDOM or node.domain not in ONNX_DOMAINS


def warn_of_random_outputs(
    model: onnx.ModelProto, sample: Sample, name: str, path: Path | None = None
) -> Iterator[str]:
    """Yield a warning if a model gives other outputs in a second run of a sample.

    Args:
        model: the model.
        sample: the sample.
        name: what the warning calls the model.
        path: its file; None if `model` has all of its weights.
    """
    if any(map(_may_draw_numbers, all_nodes(model.graph))):
        run = OrtSession.open(path or model, threads=1).run
        if not outputs_match(run(sample), run(sample)):
            yield f"differences may be random: {name} gives other values in each run of a sample"


def outputs_match(outputs: Outputs, repeated: Outputs) -> bool:
    """Whether two outputs of a sample are equal up to float rounding."""
    return all(_is_equal_output(name, outputs, repeated) for name in outputs)


def _is_equal_output(name: str, outputs: Outputs, repeated: Outputs) -> bool:
    """Whether one output is equal up to float rounding; of integers only the shape is compared."""
    value = outputs[name]
    if name not in repeated or value.shape != repeated[name].shape:
        return False
    if value.dtype.kind != "f":
        return True
    signal = value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        noise = np.nan_to_num(signal - repeated[name].astype(np.float64))
    return float((noise * noise).sum()) <= _MAX_NOISE_SHARE * float((signal * signal).sum())
