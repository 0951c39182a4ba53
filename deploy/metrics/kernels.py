"""What each kernel or layer of an engine takes, as its own runtime tells.

ONNX Runtime writes a profile of its kernels; another runtime's session may time its layers itself.
Both disturb what they measure, so such a run is never the one whose latency is told.

What an engine is made of once its runtime has built it, as that runtime tells.

A runtime that builds for a device fuses nodes into layers and chooses the type that each computes
in; what a Q/DQ model or a calibration cache asks for is only a wish.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from deploy.errors import ConfigError
from deploy.machine import Device
from deploy.metrics.latency import Feeds, percentile
from deploy.runtimes.ort import OrtSession, kernel_events, profiled
from deploy.tensors import Session
from deploy.terminal import phase

_WARMUP = 2  # runs that do not count
_BODIES = frozenset(
    {"If", "Loop", "Scan"}
)  # whose kernels are told beside them, and would be twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel or layer of an engine.

    Attributes:
        name: as the runtime calls it; of fused nodes often one of theirs.
        kind: what it does, in the runtime's word; "" where that is not told.
        ms: p50 of its runs, in one inference.
    """

    name: str
    kind: str
    ms: float


@runtime_checkable
class TimesLayers(Protocol):
    """A `Session` that times its layers one by one."""

    def layer_times(self, feeds: Feeds, runs: int) -> Iterable[tuple[str, str, float]]:
        """(layer, its kind, ms) of every time that a layer ran, over so many inferences.

        The session is not to be timed afterwards.
        """
        ...


@phase("kernels")
def kernels_of(
    path: Path,
    session: Session,
    feeds: Feeds,
    *,
    again: Callable[[], Session],
    duration_ms: float,
    p50_ms: float,
) -> tuple[Kernel, ...]:
    """The kernels of an engine, that which takes longest first.

    Args:
        path: of the engine.
        session: of the same; it tells the runtime and the threads.
        feeds: inputs, used in turn.
        again: opens another, to be disturbed.
        duration_ms: for about so long, but for 10 runs at the least and 100 at the most.
        p50_ms: of one inference.

    Raises:
        ConfigError: the runtime does not tell.
        BackendError: it refused the engine or an input.
    """
    runs = round(min(max(duration_ms / max(p50_ms, 1e-3), 10), 100))
    if isinstance(session, OrtSession):
        return _ranked(_traced(path, feeds, runs, session.threads), runs)
    refuse_untimed(path, session)
    other = again()
    assert isinstance(other, TimesLayers)
    return _ranked(other.layer_times(feeds, runs + _WARMUP), runs)


def refuse_untimed(path: Path, session: Session) -> None:
    """Refuse a session of a runtime that does not time its layers.

    Raises:
        ConfigError: it is one.
    """
    if not isinstance(session, OrtSession | TimesLayers):
        raise ConfigError(
            "a profile is of ONNX Runtime's kernels or of TensorRT's layers, got another runtime"
            f" for {path}; leave --profile away"
        )


def _traced(path: Path, feeds: Feeds, runs: int, threads: int) -> list[tuple[str, str, float]]:
    with tempfile.TemporaryDirectory(prefix="calib8-") as folder:
        trace = profiled(path, feeds, runs=runs + _WARMUP, folder=Path(folder), threads=threads)
        return [(name, kind, taken / 1e3) for name, kind, taken in kernel_events(trace)]


def _ranked(events: Iterable[tuple[str, str, float]], runs: int) -> tuple[Kernel, ...]:
    """Times of each kernel to its p50, the longest first; of several runs in one, their sum."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, taken in events:
        if kind not in _BODIES:
            found[name, kind].append(taken)
    kernels = (
        Kernel(name=name, kind=kind, ms=_p50(taken, runs)) for (name, kind), taken in found.items()
    )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.ms))


def _p50(taken: Sequence[float], runs: int) -> float:
    """P50 of the runs that count, times how often the kernel runs in one inference."""
    each = max(len(taken) // (runs + _WARMUP), 1)
    counted = np.sort(np.asarray(taken[_WARMUP * each :] or taken, np.float64))
    return each * percentile(counted, 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanLayer:
    """One layer of an engine.

    Attributes:
        name: as the runtime calls it.
        kind: what it does, in the runtime's word.
        precision: type of what it reads first, which is what it computes in: "int8", "float16";
            "" where that is not told.
        nodes: the model's nodes that it runs, as far as they are told.
        reformat: whether it only changes type or layout of a tensor, for the next one to read.
    """

    name: str
    kind: str = ""
    precision: str = ""
    nodes: tuple[str, ...] = ()
    reformat: bool = False


@runtime_checkable
class OnDevice(Protocol):
    """A `Session` of an engine that was built for a device."""

    @property
    def device(self) -> Device:
        """What it runs on."""
        ...

    def layers(self) -> tuple[RanLayer, ...]:
        """The engine's layers in their order; none where the engine does not tell."""
        ...


def devices_of(sessions: Mapping[str, Session]) -> tuple[Device, ...]:
    """The accelerators that sessions run on, each once."""
    found = (one.device for one in sessions.values() if isinstance(one, OnDevice))
    return tuple(dict.fromkeys(found))


def layers_of(session: Session | None) -> tuple[RanLayer, ...]:
    """What an engine tells of its layers; nothing where ONNX Runtime runs it, or none does."""
    return session.layers() if isinstance(session, OnDevice) else ()
