"""Time of models on this machine: of each kernel by the node it came from, and of whole inferences.

Kernel times are the least of a few runs of ONNX Runtime's own profile, since a disturbance only
makes a run longer. An optimizer that fuses nodes names the kernel after one of them, or after its
output, with something before or after it::

    Conv "/c1", Relu "/r1"   -->  kernel "/r1_output_0_nchwc"   (the tensor's name)
    the same in int8         -->  kernel "/c1_token_19"         (the node's name)
    inserted by it           -->  kernel "ReorderOutput_token_3"

so a kernel belongs to the node with the longest name, or output name, that its name starts with.
For a Conv with nodes fused into it that is the last node. The time is counted to the Conv: a
LeakyRelu fused into a float Conv stays float where nothing after it is int8.

Models are timed one at a time, since the idle threads of another open session spin and disturb it.
"""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from deploy.graph.placement import WEIGHTED
from deploy.runtimes.ort import OrtSession, profile_kernels
from deploy.tensors import Array
from deploy.terminal import phase

PAIRS = frozenset({"QuantizeLinear", "DequantizeLinear"})

_WARM = 1  # runs that do not count
_RUNS = 4  # at least
_SECONDS = 0.15  # at least
_ROUNDS, _MOST_ROUNDS = 4, 8  # over all models, so that a disturbance hits only one round of each
_CALM = 3  # rounds without a quicker time, after which the machine was at its best
_PATIENCE = 15.0  # seconds; runs this long average out short disturbances
_FEWEST = 2  # rounds of models slower than that
_MIN_TIME_GAIN = 0.02  # share of float's time that int8 must save for time to decide
_QUICKER = 0.98  # of the time before; a smaller gain is clock noise


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Least time of each kernel of a model, in microseconds."""

    # node of the model -> time of its kernel; 0 for a node that was folded away
    nodes: Mapping[str, float]
    unattributed: float  # time of kernels that belong to no node

    @property
    def total(self) -> float:
        """Time of all kernels of one inference."""
        return sum(self.nodes.values()) + self.unattributed


def least_kernel_times(one: KernelTimes, other: KernelTimes) -> KernelTimes:
    """Return the lesser of two times of each kernel of one model."""
    nodes = {name: min(time, other.nodes[name]) for name, time in one.nodes.items()}
    return KernelTimes(nodes, min(one.unattributed, other.unattributed))


def kernel_times(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    float_model: onnx.ModelProto,
    runs: int,
    seconds: float = 0.0,
) -> KernelTimes:
    """Run a model a few times under ONNX Runtime's profiler, with one thread.

    With several threads the times would depend on other processes.

    `float_model`: the float model, to whose nodes the time is counted; Q/DQ nodes count for
    themselves. `runs`: least number of runs, after two that do not count. `seconds`: least time; a
    small model runs more often.
    """
    events = profile_kernels(model, feeds, runs=runs + 2, seconds=seconds)
    pairs = [node.name for node in model.graph.node if node.op_type in PAIRS]
    layers = {name for name, kind, _ in events if kind.removeprefix("Fused") in WEIGHTED}
    return attribute_kernels(_least(events, skip=2), float_model, pairs, layers=layers)


def _least(events: Iterable[tuple[str, str, float]], *, skip: int) -> dict[str, float]:
    """Return the least microseconds of each kernel, without its first `skip` runs."""
    times_of: dict[str, list[float]] = defaultdict(list)
    for name, _, taken in events:
        times_of[name].append(taken)
    return {name: min(times[skip:] or times) for name, times in times_of.items()}


def attribute_kernels(
    kernels: Mapping[str, float],
    model: onnx.ModelProto,
    others: Iterable[str] = (),
    *,
    layers: Collection[str] = (),
) -> KernelTimes:
    """Count kernel times to nodes of a model, or to other names, by the longest name prefix.

    `others`: further names that count for themselves. `layers`: kernels that multiply with
    weights, whatever else they compute.
    """
    names = {name: node.name for node in model.graph.node for name in (*node.output, node.name)}
    names |= {name: name for name in others}
    names.pop("", None)
    nodes = dict.fromkeys(names.values(), 0.0)
    rest = 0.0
    owners = {kernel: names.get(_longest_name(kernel, names) or "") for kernel in kernels}
    maker = {name: node for node in model.graph.node for name in node.output}
    ends = {node.name: node for node in model.graph.node if node.op_type not in WEIGHTED}
    for kernel, seconds in kernels.items():
        name = owners[kernel]
        if name in ends and kernel in layers:
            name = _layer_inside(ends[name], maker, {*owners.values()}) or name
        if name is None:
            rest += seconds
        else:
            nodes[name] += seconds
    return KernelTimes(nodes, rest)


def _layer_inside(
    end: onnx.NodeProto, maker: Mapping[str, onnx.NodeProto], with_kernel: Collection[str | None]
) -> str | None:
    """Return the one layer inside a node's kernel, upstream past nodes without a kernel."""
    layers: set[str] = set()
    passed, waiting = {end.name}, [end]
    for node in waiting:
        for before in (maker[name] for name in node.input if name in maker):
            if before.name in with_kernel:
                continue
            if before.op_type in WEIGHTED:
                layers.add(before.name)
            elif before.name not in passed:
                passed.add(before.name)
                waiting.append(before)
    return layers.pop() if len(layers) == 1 else None


def _longest_name(kernel: str, names: Mapping[str, str]) -> str | None:
    """Return the longest known name that a kernel's name starts with, whole words only."""
    name = kernel.removeprefix("fused ")
    while name:
        if name in names:
            return name
        cut = max(name.rfind(mark) for mark in "_/")
        name = name[:cut] if cut > 0 else ""
    return None


@dataclass(frozen=True, slots=True)
class ModelTime:
    """The quickest inference of a model."""

    ms: float
    spread: float  # of two halves of the rounds, how much the slower one is slower, as a share


def time_models(
    models: Sequence[onnx.ModelProto], feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> list[ModelTime]:
    """Return the time of each model, over rounds that repeat while one gets quicker.

    On a shared machine a few rounds may all be disturbed, one model's more than another's, and the
    choice of a split would depend on that. After 15 s two rounds are enough: a search should not
    take much longer than calibrating, also on a machine that is never calm.
    """
    best, calm, began = [math.inf] * len(models), 0, time.perf_counter()
    rounds: list[list[float]] = []
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
            rounds.append(taken)
    return [ModelTime(min(own), _spread(own)) for own in zip(*rounds, strict=True)]


def _spread(rounds: Sequence[float]) -> float:
    """Return by what share the best of every other round is slower than that of the rest."""
    halves = min(rounds[::2]), min(rounds[1::2])
    return max(halves) / min(halves) - 1


def quickest_ms(
    model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> float:
    """Return the milliseconds of the quickest inference.

    `model`: float or int8 model.
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


def int8_is_faster(
    int8: onnx.ModelProto,
    float32: onnx.ModelProto,
    samples: Sequence[Mapping[str, Array]],
    *,
    threads: int,
) -> bool:
    """Whether int8 is faster here by more than times of the same model differ."""
    int8_time, float_time = time_models([int8, float32], samples, threads=threads)
    gain = 1 - int8_time.ms / float_time.ms
    return gain > max(_MIN_TIME_GAIN, int8_time.spread, float_time.spread)
