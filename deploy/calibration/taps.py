"""Taps: run a model variant with its inner tensors as outputs, and record them.

Each sample runs through a session per variant, whose tensors go to recorders::

    sample --> tap of a variant --> tensor --> histogram --.
                               |--> tensor --> histogram --+-- counted together
                               |--> tensor --> another recorder
                               '--> tensor --> waits for its turn: its statistic depends on order

**Blocked layout.** On many CPUs ONNX Runtime computes convolutions on blocks of channels (NCHWc).
A `ReorderOutput` restores NCHW for graph outputs, which costs as much as counting the tensor::

    Conv --> [N, C/16, H, W, 16] --> Conv --> ...
                   |
                   '--> ReorderOutput --> [N, C, H, W]     an ordinary tap
                   |
                   '--------------------> all of it        a blocked tap

Most statistics do not depend on the position of a value. So the optimized model is saved, every
`ReorderOutput` that only a tap reads is removed, and the rest runs without further optimization.
Tensors with a partly filled last block keep theirs: dropping the padding costs more than the
reorder. Without this operator the taps are ordinary ones; the values are the same.

**Reused output buffers.** Allocating and freeing the outputs of every sample takes as long as a
third of a small network's inference and fragments memory. While the shapes stay the same, the
buffers are reused::

    sample 1   [1, 3, 224, 224]    an ordinary run, which shows the shapes of the outputs
    sample 2   [1, 3, 224, 224]    allocates the buffers
    sample 3   [1, 3, 224, 224]    the same buffers
    sample 4   [1, 3, 224, 448]    an ordinary run; the buffers are freed
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from calibrators.errors import CalibrationError
from calibrators.histogram import ArrayRefused, Histogram, HistogramGroup, LocatedArrays
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import FOLDED, Observation, ObservedStatistics
from deploy.calibration.sample_checks import Peaks, largest_magnitude
from deploy.errors import BackendError
from deploy.feed.parallel import Sample
from deploy.files.reading import read_bytes
from deploy.graph.edit import copy_with_outputs, replace_field, replace_nodes
from deploy.graph.index import attributes, count_reads
from deploy.machine import trim_memory
from deploy.runtimes.ort import BoundSession, OrtSession
from deploy.tensors import Array

_DOMAIN = "com.microsoft.nchwc"
MOST_BYTES = 1 << 26  # larger outputs are freed after each sample
ArrayForms = dict[str, tuple[tuple[int, ...], np.dtype]]
OutputCallback = Callable[[int, Sample], None]
Waiting = tuple[Observation, NDArray[np.float32]]


def _open_tapped(
    model: onnx.ModelProto, tensors: Sequence[str], in_any_order: Collection[str]
) -> tuple[OrtSession, dict[str, str]]:
    """Return a session with these tensors as outputs, and `Tap.blocked`."""
    exposed = copy_with_outputs(model, tensors)
    wanted = set(in_any_order).difference(o.name for o in model.graph.output)
    if wanted and any(node.op_type == "Conv" for node in model.graph.node):  # only it makes blocks
        # the disk may be full, or the saved model not be reloaded
        with suppress(BackendError, OSError):
            return _open_blocked(exposed, wanted)
    return OrtSession.open(exposed, threads=1, spin=False), {}


def _open_blocked(
    model: onnx.ModelProto, wanted: Collection[str]
) -> tuple[OrtSession, dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="calib8-", ignore_cleanup_errors=True) as folder:
        saved = Path(folder) / "model.onnx"
        session = OrtSession.open(model, threads=1, spin=False, save_to=saved)
        optimized = onnx.ModelProto.FromString(
            read_bytes(saved, what="a model", error=BackendError, rewritable=True)
        )
        blocked = expose_blocked(optimized.graph, wanted)
        if blocked:
            del session
            saved.write_bytes(optimized.SerializeToString())
            session = OrtSession.open(saved, threads=1, optimize=False, spin=False)
        return session, blocked


def expose_blocked(graph: onnx.GraphProto, wanted: Collection[str]) -> dict[str, str]:
    """Remove the reorder of wanted outputs of an optimized graph whose channels fill all blocks.

    Returns:
        tensor -> the output that now holds its values in blocks.
    """
    read = count_reads(graph)
    blocked = {
        node.output[0]: node.input[0]
        for node in graph.node
        if (node.domain, node.op_type) == (_DOMAIN, "ReorderOutput")
        and node.output[0] in wanted
        and read[node.output[0]] == 1  # as an output of the graph
        and int(attributes(node)["channels"]) % block_size() == 0
    }
    replace_nodes(graph, (n for n in graph.node if n.output[0] not in blocked))
    replace_field(
        graph.output,
        (ValueInfoProto(name=blocked[o.name]) if o.name in blocked else o for o in graph.output),
    )
    return blocked


@cache
def block_size() -> int:
    """Measure how many channels ONNX Runtime puts in one block on this CPU.

    Raises:
        BackendError: it has no blocked layout here.
    """
    channels = 64
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 1, 2])
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    graph = helper.make_graph([reorder], "blocks", [x], [ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    pairs = np.arange(2 * channels, dtype=np.float32).reshape(1, channels, 1, 2)
    y = OrtSession.open(model, threads=1, spin=False).run({"x": pairs})["y"].reshape(-1)
    return int(np.flatnonzero(y == 1)[0])  # position of the first channel's second value


class BufferedSession:
    """Runs one session in one thread, with reused output buffers if shapes allow it.

    Attributes:
        lasting: whether the outputs of the last run lie in buffers that the next run reuses.
    """

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._fed: ArrayForms | None = None
        self._made: ArrayForms = {}
        self._bound: BoundSession | None = None
        self.lasting = False
        self._able = True
        self._trimmed = False

    def run(self, sample: Sample) -> Mapping[str, Array]:
        """Run a sample; return the outputs. If `lasting`, the next run overwrites them."""
        if not (self._able and _form(sample) == self._fed):
            return self._ordinary(sample)
        try:
            if self._bound is None:
                if not self._trimmed:  # the memory of the first run; shapes may change often
                    trim_memory()
                self._trimmed = True
                self._bound = self._session.bind_outputs(self._made)
            self._bound.run(sample)
        except BackendError:  # the shape of an output depends on values
            self._able = False
            return self._ordinary(sample)
        self.lasting = True
        return self._bound.outputs

    def _ordinary(self, sample: Sample) -> Mapping[str, Array]:
        self._bound, self.lasting, self._fed = None, False, None
        values = self._session.run(sample)
        if sum(x.nbytes for x in values.values()) <= MOST_BYTES:
            self._fed, self._made = _form(sample), _form(values)
        return values


def _form(arrays: Mapping[str, Array]) -> ArrayForms:
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}


class Tap:
    """A session with inner tensors of a model as outputs.

    Attributes:
        blocked: tensor -> output that holds its values in NCHWc, of the tensors in that layout.
        fed: tensors that are inputs of the model.
    """

    def __init__(
        self, model: onnx.ModelProto, tensors: Sequence[str], *, in_any_order: Collection[str] = ()
    ) -> None:
        """Open the model.

        `in_any_order`: tensors whose values may come in any order; graph outputs never do.
        """
        inputs = {i.name for i in model.graph.input}
        self.fed = [name for name in tensors if name in inputs]
        self._made = [name for name in tensors if name not in inputs]
        self.session, self.blocked = _open_tapped(model, self._made, in_any_order)

    def run(
        self, sample: Sample, keep: Callable[[Sample], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; yield each tensor's name and its value, possibly in any order.

        `keep` is called with the model's outputs, and possibly more.
        """
        try:
            values = self.session.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        for name in self.fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:  # frees each tensor once it is counted
            yield name, values.pop(self.blocked.get(name, name))


class TapReader:
    """Reads some of a tap's tensors in one thread, with reused buffers if possible."""

    def __init__(self, tap: Tap, tensors: Sequence[str]) -> None:
        self._tensors = tuple(tensors)
        self._tap = tap
        self._again = BufferedSession(tap.session)
        self._located: LocatedArrays | None = None
        self._moving: list[int] = []

    def run(self, sample: Sample, keep: Callable[[Sample], None] | None = None) -> LocatedArrays:
        """Run one sample; return each tensor's values in any order, valid until the next run.

        `keep` is as in `Tap.run`.
        """
        before, self._located = self._located, None
        if not self._again.lasting:
            before = None  # its memory may be freed
        try:
            values = self._again.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        if before is None or not self._again.lasting:
            before = LocatedArrays(self._values(name, sample, values) for name in self._tensors)
            self._moving = [k for k, name in enumerate(self._tensors) if self._moves(name, values)]
        else:
            for k in self._moving:
                before.put(k, self._values(self._tensors[k], sample, values))
        self._located = before
        return before

    def _values(
        self, name: str, sample: Sample, values: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        if name in self._tap.fed:
            return np.asarray(sample[name], np.float32)
        return values[self._tap.blocked.get(name, name)]

    def _moves(self, name: str, values: Mapping[str, Array]) -> bool:
        """Whether the array must be fetched again after each run."""
        made = self._tap.blocked.get(name, name)
        return name in self._tap.fed or values[made].dtype != np.float32


def _could_not(error: BackendError) -> BackendError:
    return BackendError(f"could not run a sample: {error}")


class VariantRecorders:
    """The recorders of a variant's tensors in one slice of the pass."""

    def __init__(self, line: VariantRunner, part: Mapping[Observation, Recorder]) -> None:
        self._counted = line.counted
        self._others = [(o, part.get(o)) for o in line.others]
        recorders = [part[o] for o in line.counted]
        self._together = HistogramGroup([one for one in recorders if isinstance(one, Histogram)])

    def count(self, number: int, located: LocatedArrays) -> None:
        """Record the tensors whose histograms count all samples."""
        try:
            self._together.observe(located)
        except ArrayRefused as error:
            raise name_tensor_and_sample(error, self._counted[error.place], number) from error

    def others(self, number: int, values: Mapping[str, Array]) -> list[Waiting]:
        """Record the other order-free statistics; return the values that must wait their turn."""
        waiting = []
        for observation, recorder in self._others:
            if not is_within_limit(observation.statistic.samples, number):
                continue
            value = values[observation.tensor]
            if recorder is None:
                waiting.append((observation, value))
            else:
                record(recorder, observation, number, value)
        return waiting

    def latest(self) -> Iterable[float]:
        """Largest |x| of each counted tensor in the last sample, which the histogram knows."""
        return [one.latest for one in self._together.histograms]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRunner:
    """A model variant in the pass.

    Attributes:
        counted: observations by a histogram of all samples in any order.
        limit: number of samples to run; None for all.
    """

    key: str
    tap: Tap
    counted: Sequence[Observation]
    others: Sequence[Observation]
    limit: int | None

    def reading(self) -> TapReader:
        """Return the reader of a worker thread."""
        return TapReader(self.tap, [o.tensor for o in self.counted])

    def run(
        self,
        reading: TapReader,
        held: VariantRecorders,
        peaks: Peaks | None,
        number: int,
        sample: Sample,
        keep: OutputCallback | None,
    ) -> list[Waiting]:
        """Run one sample, record order-free statistics, return the values that must wait."""
        callback = None if keep is None or self.key != FOLDED else partial(keep, number)
        if not self.others:
            held.count(number, reading.run(sample, callback))
            values: Mapping[str, Array] = {}
        else:  # these may keep an array, so it must not lie in a reused buffer
            values = dict(self.tap.run(sample, callback))
            held.count(number, LocatedArrays(values[o.tensor] for o in self.counted))
        waiting = held.others(number, values)
        if peaks is None:
            return waiting
        amaxes = {o.tensor: amax for o, amax in zip(self.counted, held.latest(), strict=True)}
        others = {name: value for name, value in values.items() if name not in amaxes}
        amaxes |= {name: largest_magnitude(value) for name, value in others.items()}
        for name, amax in amaxes.items():
            peaks.add((self.key, name), number, amax)
        return waiting


def make_runners(
    observations: Sequence[Observation], known: ObservedStatistics
) -> list[VariantRunner]:
    """Return one `VariantRunner` for each variant, in order of first use."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        ordered = {o.tensor for o in own if o.statistic.ordered}
        tensors = list(dict.fromkeys(o.tensor for o in own))
        loose = [name for name in tensors if name not in ordered]
        counted = [o for o in own if o.statistic == HistogramOf()]
        line = VariantRunner(
            key=variant.key,
            tap=Tap(variant.make(known), tensors, in_any_order=loose),
            counted=counted,
            others=[o for o in own if o not in counted],
            limit=sample_limit(own),
        )
        lines.append(line)
    return lines


def sample_limit(observations: Iterable[Observation]) -> int | None:
    """Return how many samples the observations need; None for all."""
    limits = [o.statistic.samples for o in observations]
    return None if None in limits else max((n for n in limits if n is not None), default=None)


def is_within_limit(limit: int | None, number: int) -> bool:
    """Whether a limit includes the sample of this number, counted from 1."""
    return limit is None or number <= limit


def record(
    recorder: Recorder, observation: Observation, number: int, value: NDArray[np.float32]
) -> None:
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
    """Return the error with the name of the tensor and the sample's number, told from 0."""
    where = f"tensor {observation.tensor} of sample {number - 1}"
    return explain_error(error, observation, where)


def explain_error(error: CalibrationError, observation: Observation, what: str) -> CalibrationError:
    """Return the error with its subject `what`, and what to do about it."""
    if observation.layer:
        return CalibrationError(
            f"layer {observation.layer!r}: {what}: {error} (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{what}: {error}; check the model's weights and the preprocessing")
