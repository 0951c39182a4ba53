"""Models whose inner tensors can be read.

Inner tensors in the layout in which ONNX Runtime computes them.

On many CPUs ONNX Runtime computes convolutions on blocks of channels (NCHWc). What is to be seen
from outside is put in order again by a `ReorderOutput`, which costs as much as counting it::

    Conv --> [N, C/16, H, W, 16] --> Conv --> ...
                   |
                   '--> ReorderOutput --> [N, C, H, W]     an ordinary tap
                   |
                   '--------------------> all of it        a blocked tap

A statistic without an order does not care where a value stands. So the model is saved as ONNX
Runtime would run it, every `ReorderOutput` that nothing reads but a tap is taken out, and what
remains is run as it is. Channels that do not fill their last block keep theirs: leaving out what
fills it costs more than putting the tensor in order. Where there is no such operator, the taps are
ordinary ones; the values are the same.

A model's outputs in memory that is used again, where samples have one shape.

What a run gives is otherwise asked of the system, and given back, at every sample: for a small
network that takes as long as a third of its inference, and memory is in pieces afterwards.

::

    sample 1   [1, 3, 224, 224]    an ordinary run; shapes of the outputs are known now
    sample 2   [1, 3, 224, 224]    memory for them is taken
    sample 3   [1, 3, 224, 224]    the same memory
    sample 4   [1, 3, 224, 448]    an ordinary run; the memory is let go

Who reads a variant's tensors, and how a sample goes through it.

::

    sample --> tap of a variant --> tensor --> histogram --.
                               |--> tensor --> histogram --+-- counted together
                               |--> tensor --> another recorder
                               '--> tensor --> waits for its turn: the order shows in it
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram, Located, Refused, Together
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import FOLDED, Observation, Observed
from deploy.calibration.sample_checks import Peaks, largest
from deploy.errors import BackendError
from deploy.feed.parallel import Sample
from deploy.files.reading import read_bytes
from deploy.graph.edit import replace, replace_nodes, with_outputs
from deploy.graph.index import attributes, users
from deploy.machine import trim_memory
from deploy.runtimes.ort import Bound, OrtSession
from deploy.tensors import Array

_DOMAIN = "com.microsoft.nchwc"


@dataclass(frozen=True, slots=True)
class Tapped:
    """A model that is open, with inner tensors among its outputs.

    Attributes:
        session: what is run.
        blocked: tensor -> the output that holds its values in blocks, of those that do so.
    """

    session: OrtSession
    blocked: Mapping[str, str]


def tapped(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    *,
    in_any_order: Collection[str] = (),
    threads: int | None = 1,
) -> Tapped:
    """Open a model with these tensors as outputs.

    Args:
        model: as it is calibrated.
        tensors: that nodes of it make.
        in_any_order: those of which only the values matter, not where they stand; the model's own
            outputs come as they are.
        threads: threads inside one operator.

    Raises:
        BackendError: ONNX Runtime cannot load the model.
    """
    whole = with_outputs(model, tensors)
    wanted = set(in_any_order).difference(o.name for o in model.graph.output)
    if wanted and _may_block(model):
        try:
            return _blocked(whole, wanted, threads)
        except (BackendError, OSError):  # no room for a file, or a form that it cannot read again
            pass
    return Tapped(OrtSession.open(whole, threads=threads, spin=False), {})


def _may_block(model: onnx.ModelProto) -> bool:
    """Whether it is worth a look: blocks begin at convolutions."""
    return any(node.op_type == "Conv" for node in model.graph.node)


def _blocked(model: onnx.ModelProto, wanted: Collection[str], threads: int | None) -> Tapped:
    with tempfile.TemporaryDirectory(prefix="calib8-", ignore_cleanup_errors=True) as folder:
        saved = Path(folder) / "model.onnx"
        session = OrtSession.open(model, threads=threads, spin=False, saved=saved)
        form = onnx.ModelProto.FromString(
            read_bytes(saved, what="a model", error=BackendError, own=True)
        )
        found = unordered(form.graph, wanted)
        if not found:
            return Tapped(session, {})
        del session
        saved.write_bytes(form.SerializeToString())
        return Tapped(OrtSession.open(saved, threads=threads, optimize=False, spin=False), found)


def unordered(graph: onnx.GraphProto, wanted: Collection[str]) -> dict[str, str]:
    """Let the wanted outputs of an optimized graph stay in blocks where they fill them.

    Returns:
        tensor -> the output that has its values, of those that do.
    """
    read = users(graph)
    found = {
        node.output[0]: node.input[0]
        for node in graph.node
        if (node.domain, node.op_type) == (_DOMAIN, "ReorderOutput")
        and node.output[0] in wanted
        and read[node.output[0]] == 1  # as an output of the graph
        and int(attributes(node)["channels"]) % block_size() == 0
    }
    replace_nodes(graph, (n for n in graph.node if n.output[0] not in found))
    outputs = [ValueInfoProto(name=found[o.name]) if o.name in found else o for o in graph.output]
    replace(graph.output, outputs)
    return found


@cache
def block_size() -> int:
    """How many channels ONNX Runtime puts side by side on this CPU, seen from what it does.

    Raises:
        BackendError: it has no blocks here.
    """
    channels = 64
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 1, 2])
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    graph = helper.make_graph([reorder], "blocks", [x], [ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    pairs = np.arange(2 * channels, dtype=np.float32).reshape(1, channels, 1, 2)
    y = OrtSession.open(model, threads=1, spin=False).run({"x": pairs})["y"].reshape(-1)
    return int(np.flatnonzero(y == 1)[0])  # the second place of the first channel


MOST_BYTES = 1 << 26  # of more outputs the memory is let go after each sample

Form = dict[str, tuple[tuple[int, ...], np.dtype]]


class Again:
    """Runs of one session in one thread.

    Attributes:
        lasting: whether what `run` gave lies where it will lie the next time.
    """

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self._fed: Form | None = None
        self._made: Form = {}
        self._bound: Bound | None = None
        self.lasting = False
        self._able = True
        self._trimmed = False

    def run(self, sample: Sample) -> Mapping[str, Array]:
        """The outputs; where they are lasting, only until the next run, whose they are then.

        Raises:
            BackendError: as `OrtSession.run`.
        """
        if not (self._able and _form(sample) == self._fed):
            return self._ordinary(sample)
        try:
            if self._bound is None:
                self._give_back()
                self._bound = self._session.bound(self._made)
            self._bound.run(sample)
        except BackendError:  # an output whose shape follows from values, not from shapes
            self._able = False
            return self._ordinary(sample)
        self.lasting = True
        return self._bound.outputs

    def _give_back(self) -> None:
        """What the first run took; once, since shapes may change at every other sample."""
        if not self._trimmed:
            trim_memory()
        self._trimmed = True

    def _ordinary(self, sample: Sample) -> Mapping[str, Array]:
        self._bound, self.lasting, self._fed = None, False, None
        values = self._session.run(sample)
        if sum(x.nbytes for x in values.values()) <= MOST_BYTES:
            self._fed, self._made = _form(sample), _form(values)
        return values


def _form(arrays: Mapping[str, Array]) -> Form:
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        tensors: list[str],
        *,
        threads: int | None = 1,
        in_any_order: Collection[str] = (),
    ) -> None:
        inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in inputs]
        self._made = [name for name in tensors if name not in inputs]
        self._open = tapped(model, self._made, threads=threads, in_any_order=in_any_order)

    def run(
        self, sample: Sample, keep: Callable[[Sample], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value, or its values in any order.

        `keep` gets the model's own outputs, and may get more.
        """
        try:
            values = self._open.session.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:  # let go of each tensor once it is counted
            yield name, values.pop(self._open.blocked.get(name, name))

    def reading(self, tensors: Sequence[str]) -> Reading:
        """What reads these of the tensors, sample after sample, in one thread."""
        return Reading(self._open, tensors, fed=self._fed)


class Reading:
    """Tensors of one sample after the other, in memory that is used again where it can be."""

    def __init__(self, opened: Tapped, tensors: Sequence[str], *, fed: Collection[str]) -> None:
        self._tensors = tuple(tensors)
        self._blocked = opened.blocked
        self._fed = frozenset(fed)
        self._again = Again(opened.session)
        self._located: Located | None = None
        self._moving: list[int] = []

    def run(self, sample: Sample, keep: Callable[[Sample], None] | None = None) -> Located:
        """Run one sample; gives each tensor's values in any order, until the next run.

        `keep` is as in `Tap.run`.
        """
        before, self._located = self._located, None
        if not self._again.lasting:
            before = None  # whose memory the run may have
        try:
            values = self._again.run(sample)
        except BackendError as error:
            raise _could_not(error) from error
        if keep is not None:
            keep(values)
        if before is None or not self._again.lasting:
            before = Located(self._values(name, sample, values) for name in self._tensors)
            self._moving = [k for k, name in enumerate(self._tensors) if self._moves(name, values)]
        else:
            for k in self._moving:
                before.put(k, self._values(self._tensors[k], sample, values))
        self._located = before
        return before

    def _values(
        self, name: str, sample: Sample, values: Mapping[str, Array]
    ) -> NDArray[np.float32]:
        if name in self._fed:
            return np.asarray(sample[name], np.float32)
        return values[self._blocked.get(name, name)]

    def _moves(self, name: str, values: Mapping[str, Array]) -> bool:
        """Whether the values must be fetched anew after each run."""
        return name in self._fed or values[self._blocked.get(name, name)].dtype != np.float32


def _could_not(error: BackendError) -> BackendError:
    return BackendError(f"could not run a sample: {error}")


Keep = Callable[[int, Sample], None]
Waiting = tuple[Observation, NDArray[np.float32]]


class Held:
    """The recorders of a variant's tensors, of a part of the pass."""

    def __init__(self, line: Line, part: Mapping[Observation, Recorder]) -> None:
        self._counted = line.counted
        self._others = [(o, part.get(o)) for o in line.others]
        found = [part[o] for o in line.counted]
        self._together = Together([one for one in found if isinstance(one, Histogram)])

    def count(self, number: int, located: Located) -> None:
        """Record what histograms of all samples see.

        Raises:
            CalibrationError: as `record`.
        """
        try:
            self._together.observe(located)
        except Refused as error:
            raise told_of(error, self._counted[error.place], number) from error

    def others(self, number: int, values: Mapping[str, Array]) -> list[Waiting]:
        """Record what else has no order, and give what has.

        Raises:
            CalibrationError: as `record`.
        """
        waiting = []
        for observation, recorder in self._others:
            if not reaches(observation.statistic.samples, number):
                continue
            value = values[observation.tensor]
            if recorder is None:
                waiting.append((observation, value))
            else:
                record(recorder, observation, number, value)
        return waiting

    def latest(self) -> Iterable[float]:
        """Largest |x| that each histogram saw in the last sample: it had to find it anyway."""
        return [one.latest for one in self._together.histograms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A variant in the pass.

    Attributes:
        key: the variant's.
        tap: its session.
        counted: who reads its tensors by a histogram of all samples in any order.
        others: who else reads them.
        limit: how many samples it is run on.
    """

    key: str
    tap: Tap
    counted: Sequence[Observation]
    others: Sequence[Observation]
    limit: int | None

    def reading(self) -> Reading:
        """What a worker runs its samples by."""
        return self.tap.reading([o.tensor for o in self.counted])

    def run(
        self,
        reading: Reading,
        held: Held,
        peaks: Peaks | None,
        number: int,
        sample: Sample,
        keep: Keep | None,
    ) -> list[Waiting]:
        """Run one sample, record what has no order, and give what has."""
        kept = None if keep is None or self.key != FOLDED else partial(keep, number)
        if not self.others:
            held.count(number, reading.run(sample, kept))
            values: Mapping[str, Array] = {}
        else:  # which may hold on to an array
            values = dict(self.tap.run(sample, kept))
            held.count(number, Located(values[o.tensor] for o in self.counted))
        waiting = held.others(number, values)
        if peaks is not None:
            self._tell(peaks, number, held, values)
        return waiting

    def _tell(self, peaks: Peaks, number: int, held: Held, values: Mapping[str, Array]) -> None:
        seen = {o.tensor: amax for o, amax in zip(self.counted, held.latest(), strict=True)}
        seen |= {name: largest(value) for name, value in values.items() if name not in seen}
        for name, amax in seen.items():
            peaks.add((self.key, name), number, amax)


def lines_of(observations: Sequence[Observation], known: Observed) -> list[Line]:
    """One line for each variant, in the order in which they are first wanted."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        ordered = {o.tensor for o in own if o.statistic.ordered}
        tensors = list(dict.fromkeys(o.tensor for o in own))
        loose = [name for name in tensors if name not in ordered]
        counted = [o for o in own if o.statistic == HistogramOf()]
        line = Line(
            key=variant.key,
            tap=Tap(variant.make(known), tensors, in_any_order=loose),
            counted=counted,
            others=[o for o in own if o not in counted],
            limit=limit_of(own),
        )
        lines.append(line)
    return lines


def limit_of(observations: Iterable[Observation]) -> int | None:
    """How many samples the observations look at; None for all."""
    most = [o.statistic.samples for o in observations]
    return None if None in most else max((n for n in most if n is not None), default=None)


def reaches(limit: int | None, number: int) -> bool:
    """Whether the sample of this number, from 1, is looked at."""
    return limit is None or number <= limit


def record(
    recorder: Recorder, observation: Observation, number: int, value: NDArray[np.float32]
) -> None:
    """Record a tensor's values of one sample.

    Raises:
        CalibrationError: the recorder refuses them, such as for NaN; tensor and sample are named.
    """
    try:
        recorder.observe(value)
    except CalibrationError as error:
        raise told_of(error, observation, number) from error


def told_of(error: CalibrationError, observation: Observation, number: int) -> CalibrationError:
    """The error with the tensor and the sample that it is of."""
    return told(error, observation, f"tensor {observation.tensor} of sample {number}")


def told(error: CalibrationError, observation: Observation, what: str) -> CalibrationError:
    """The error with what it is of, and the way out."""
    if observation.whose:
        return CalibrationError(
            f"layer {observation.whose!r}: {what}: {error} (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{what}: {error}; check the model's weights and the preprocessing")
