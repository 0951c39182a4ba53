"""Time of every kernel of a model on this machine, by the node that it came from.

ONNX Runtime's own profile of a few runs: the least time of each kernel, since whatever disturbs a
run makes it longer. An optimizer that fuses nodes keeps the name of one of them, or of its output,
with something before or behind it::

    Conv "/c1", Relu "/r1"   -->  kernel "/r1_output_0_nchwc"   (the tensor's name)
    the same in int8         -->  kernel "/c1_token_19"         (the node's name)
    what it put in between   -->  kernel "ReorderOutput_token_3"

so a kernel belongs to the node whose name, or whose output's, is the longest at its beginning.
Of a Conv and what is computed inside it that is the last node. Its time is the Conv's, whatever
becomes of the node behind it: a LeakyRelu inside a float Conv stays float where nothing after it
is int8.

How long a whole model takes, timed alone: the quickest of a few runs.

Sessions that are open beside each other disturb one another, since the idle threads of one wait for
work without sleeping; and of several runs the quickest is the one that nothing else disturbed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.graph.placement import WEIGHTED
from deploy.runtimes.ort import OrtSession, kernel_events, profiled
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array


PAIRS = frozenset({"QuantizeLinear", "DequantizeLinear"})


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Least time of each kernel of a model, in microseconds.

    Attributes:
        nodes: node of the model -> time of what it became; 0 for what was folded away.
        rest: time of kernels that belong to no node.
    """

    nodes: Mapping[str, float]
    rest: float

    @property
    def total(self) -> float:
        """One inference, without what lies between its kernels."""
        return sum(self.nodes.values()) + self.rest


def quicker(one: KernelTimes, other: KernelTimes) -> KernelTimes:
    """The lesser of two times of each kernel of one model."""
    nodes = {name: min(time, other.nodes[name]) for name, time in one.nodes.items()}
    return KernelTimes(nodes, min(one.rest, other.rest))


def kernel_times(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    made_from: onnx.ModelProto,
    runs: int,
    seconds: float = 0.0,
) -> KernelTimes:
    """Run a model a few times under ONNX Runtime's profiler.

    Args:
        model: as it would be deployed.
        made_from: the float model, whose nodes the time is counted to; pairs count themselves.
        feeds: inputs, used in turn.
        runs: how often it is run at least, after two runs that do not count; with one thread,
            since what several take depends on who else wants the cores.
        seconds: a small model is run again until so many are over.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    with tempfile.TemporaryDirectory(prefix="calib8-") as folder:
        trace = profiled(model, feeds, runs=runs + 2, folder=Path(folder), seconds=seconds)
        events = list(kernel_events(trace))
    pairs = [node.name for node in model.graph.node if node.op_type in PAIRS]
    layers = {name for name, kind, _ in events if kind.removeprefix("Fused") in WEIGHTED}
    return attributed(_least(events, skip=2), made_from, pairs, layers=layers)


def _least(events: Iterable[tuple[str, str, float]], *, skip: int) -> dict[str, float]:
    """Kernel -> least microseconds, its first runs left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, _, taken in events:
        found[name].append(taken)
    return {name: min(times[skip:] or times) for name, times in found.items()}


def attributed(
    kernels: Mapping[str, float],
    model: onnx.ModelProto,
    others: Iterable[str] = (),
    *,
    layers: Collection[str] = (),
) -> KernelTimes:
    """Kernels -> nodes of a model, or other names, by the longest one at a kernel's beginning.

    Args:
        kernels: name -> time.
        model: whose nodes they came from.
        others: names that count themselves.
        layers: kernels that multiply with weights, whatever else they compute.
    """
    known = {name: node.name for node in model.graph.node for name in (*node.output, node.name)}
    known |= {name: name for name in others}
    known.pop("", None)
    nodes = dict.fromkeys(known.values(), 0.0)
    rest = 0.0
    of = {kernel: known.get(_known(kernel, known) or "") for kernel in kernels}
    maker = {name: node for node in model.graph.node for name in node.output}
    ends = {node.name: node for node in model.graph.node if node.op_type not in WEIGHTED}
    for kernel, seconds in kernels.items():
        name = of[kernel]
        if name in ends and kernel in layers:
            name = _layer_inside(ends[name], maker, {*of.values()}) or name
        if name is None:
            rest += seconds
        else:
            nodes[name] += seconds
    return KernelTimes(nodes, rest)


def _layer_inside(
    end: onnx.NodeProto, maker: Mapping[str, onnx.NodeProto], ran: Collection[str | None]
) -> str | None:
    """The one layer that the kernel of a node holds: back from it, past nodes without a kernel."""
    found: set[str] = set()
    passed, waiting = {end.name}, [end]
    for node in waiting:
        for before in (maker[name] for name in node.input if name in maker):
            if before.name in ran:
                continue
            if before.op_type in WEIGHTED:
                found.add(before.name)
            elif before.name not in passed:
                passed.add(before.name)
                waiting.append(before)
    return found.pop() if len(found) == 1 else None


def _known(kernel: str, known: Mapping[str, str]) -> str | None:
    """The longest known name that the kernel's begins with, whole words only."""
    name = kernel.removeprefix("fused ")
    while name:
        if name in known:
            return name
        cut = max(name.rfind(mark) for mark in "_/")
        name = name[:cut] if cut > 0 else ""
    return None


_WARM = 1
_RUNS = 4  # at least
_SECONDS = 0.15  # at least
_ROUNDS, _MOST_ROUNDS = 4, 12  # over all models: what disturbs the machine for a second
_CALM = 3  # rounds in which no model was quicker than before: the machine was at its best
_PATIENCE = 60.0  # seconds; runs that are so long outlast what disturbs the machine for a moment
_FEWEST = 2  # rounds of models that are slower than that
_QUICKER = 0.98  # of the time before; less is the clock's own noise


def quickest_of(
    models: Sequence[onnx.ModelProto], feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> list[float]:
    """`quickest_ms` of each model, in turn, for as long as another round is quicker.

    On a machine that others use too, a few rounds may all be disturbed, one model's more than
    another's; then a split would be chosen by its neighbours. Where a minute has passed, two rounds
    are enough: a machine that is never calm would take ten minutes for a model of a second.
    """
    best, calm, began = [math.inf] * len(models), 0, time.perf_counter()
    with phase("timing splits", _ROUNDS * len(models), "runs", about=True) as step:
        for done in range(_MOST_ROUNDS):
            late = time.perf_counter() - began > _PATIENCE
            if done >= (_FEWEST if late else _ROUNDS) and (late or calm >= _CALM):
                break
            taken = []
            for model in models:
                taken.append(quickest_ms(model, feeds, threads=threads))
                step()
            quicker = any(new < _QUICKER * old for new, old in zip(taken, best, strict=True))
            calm = 0 if quicker else calm + 1
            best = list(map(min, best, taken))
    return best


def quickest_ms(
    model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> float:
    """Milliseconds of one inference, as it would be deployed.

    Args:
        model: float or int8.
        feeds: inputs, used in turn.
        threads: threads inside one operator.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    session = OrtSession.open(model, threads=threads)
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < _WARM + _RUNS or time.perf_counter() - began < _SECONDS:
        start = time.perf_counter()
        session.run(feeds[runs % len(feeds)])
        taken = time.perf_counter() - start
        if runs >= _WARM:
            best = min(best, taken)
        runs += 1
    return best * 1e3
