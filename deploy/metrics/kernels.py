"""Kernels and layers of an engine, and their times, as reported by its runtime.

ONNX Runtime writes a profile of its kernels; sessions of other runtimes may time their layers
themselves (`TimesLayers`). Profiling slows the engine down, so the reported latency is always
measured in another run.

A runtime that builds for a device chooses the type that each layer computes in; a Q/DQ model or a
calibration cache only requests types.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from deploy.errors import ConfigError
from deploy.machine import AcceleratorInfo
from deploy.metrics.latency import Feeds, percentile
from deploy.runtimes.ort import OrtSession, profile_kernels
from deploy.tensors import Session
from deploy.terminal import phase

_WARMUP_RUNS = 2  # not counted
_MIN_RUNS, _MAX_RUNS = 10, 100  # that are counted
# Control-flow ops: their time includes that of the kernels inside, which are events too.
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A kernel or layer of an engine.

    Attributes:
        name: the runtime's name; of fused nodes often the name of one of them.
        kind: operation type, in the runtime's terms; "" if unknown.
        ms: p50 of its time per inference.
    """

    name: str
    kind: str
    ms: float


@runtime_checkable
class TimesLayers(Protocol):
    """A `Session` that times its layers one by one."""

    def layer_times(self, feeds: Feeds, runs: int) -> Iterable[tuple[str, str, float]]:
        """Yield (layer, kind, ms) for each execution of a layer over `runs` inferences.

        Timing hooks stay active, so do not measure the session's latency afterwards.
        """


@phase("kernels")
def time_kernels(
    path: Path,
    session: Session,
    feeds: Feeds,
    *,
    open_session: Callable[[], Session],
    duration_ms: float,
    p50_ms: float,
) -> tuple[KernelTime, ...]:
    """Return the kernels of an engine, the slowest first.

    Args:
        path: the engine's file.
        session: a session of that engine that passes `refuse_untimed`; its runtime and number of
            threads are used.
        feeds: inputs, used in turn.
        open_session: opens another session of the engine: profiling slows one down for good.
        duration_ms: approximate time to measure; at least 10 and at most 100 runs, after warm-up
            runs that are not counted.
        p50_ms: p50 latency of one inference.

    Raises:
        BackendError: the runtime refused the engine or an input.
    """
    fitting_runs = duration_ms / max(p50_ms, 1e-3)
    runs = round(min(max(fitting_runs, _MIN_RUNS), _MAX_RUNS)) + _WARMUP_RUNS
    if isinstance(session, OrtSession):  # ONNX Runtime profiles in a session that it opens itself
        executions = []
        for name, kind, us in profile_kernels(path, feeds, runs=runs, threads=session.threads):
            executions.append((name, kind, us / 1e3))
        return _summarize(executions, runs)

    profiled_session = open_session()
    assert isinstance(profiled_session, TimesLayers)
    return _summarize(profiled_session.layer_times(feeds, runs), runs)


def refuse_untimed(path: Path, session: Session) -> None:
    """Check that the session's runtime can time kernels or layers.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(session, OrtSession | TimesLayers):
        raise ConfigError(
            "a profile is of ONNX Runtime's kernels or of TensorRT's layers, got another runtime"
            f" for {path}; leave --profile out"
        )


def _summarize(executions: Iterable[tuple[str, str, float]], runs: int) -> tuple[KernelTime, ...]:
    """Return a `KernelTime` for each (name, kind), the slowest first.

    Args:
        executions: (name, kind, ms) of each execution of a kernel, in order.
        runs: number of inferences, warm-up included.
    """
    times_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, ms in executions:
        if kind not in _CONTROL_FLOW:
            times_ms[name, kind].append(ms)
    kernels = []
    for (name, kind), kernel_ms in times_ms.items():
        p50_ms = _p50_per_inference(kernel_ms, runs)
        kernels.append(KernelTime(name=name, kind=kind, ms=p50_ms))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.ms))


def _p50_per_inference(times_ms: Sequence[float], runs: int) -> float:
    """Return the time of a kernel in one inference, in which it may run several times.

    That is p50 of its executions, without those of the warm-up, times their number in an inference.
    """
    executions_per_run = max(len(times_ms) // runs, 1)
    # a kernel inside an If may have run in warm-up only
    counted_ms = times_ms[_WARMUP_RUNS * executions_per_run :] or times_ms
    return executions_per_run * percentile(sorted(counted_ms), 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        name: the runtime's name.
        kind: operation type, in the runtime's terms.
        precision: dtype of its first input, which it computes in, such as "int8" or "float16"; ""
            if unknown.
        nodes: names of the model's nodes that it runs, as far as known.
        block: "DLA" or "Myelin" for a block that another compiler made of many nodes, whose types
            the engine does not tell.
        end_nodes: first and last node of a block, if only these are known.
        reformat: whether it only changes the type or layout of a tensor for the next layer.
    """

    name: str
    kind: str = ""
    precision: str = ""
    nodes: tuple[str, ...] = ()
    block: str = ""
    end_nodes: tuple[str, str] | None = None
    reformat: bool = False


@runtime_checkable
class ReportsLayers(Protocol):
    """A `Session` of an engine that was built for a device."""

    @property
    def device(self) -> AcceleratorInfo:
        """The device it runs on."""

    def layers(self) -> tuple[EngineLayer, ...]:
        """Return the engine's layers in execution order; empty if the engine has no such data."""


def find_devices(sessions: Mapping[str, Session]) -> tuple[AcceleratorInfo, ...]:
    """Return the accelerators that the sessions run on, each once."""
    devices = [s.device for s in sessions.values() if isinstance(s, ReportsLayers)]
    return tuple(dict.fromkeys(devices))  # unlike a set, a dict keeps their order


def read_engine_layers(session: Session | None) -> tuple[EngineLayer, ...]:
    """Return the layers of a device engine; empty for ONNX Runtime or no session."""
    return session.layers() if isinstance(session, ReportsLayers) else ()
