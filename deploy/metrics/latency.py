"""Latency of one inference: warm-up, interleaved runs, trtexec's metrics.

Two engines measured one after the other see different machines: turbo clocks drop, other processes
start. So every round runs each session once, in alternating order, and the noise hits all alike::

    round     0      1      2      3
            A  B   B  A   A  B   B  A   ...

Each letter is two runs, of which the second is timed: the first finds the caches full of the other
engine's weights, which does not happen to an engine that is deployed alone.

Defaults, metric names and the percentile rule are those of `trtexec` (TensorRT 10, "Performance
summary"): 200 ms of warm-up, 3 s of measuring, at least 10 iterations; percentiles 90, 95, 99.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError
from deploy.tensors import Array, Session
from deploy.terminal import timed_phase

UNSTABLE_PERCENT = 2.5  # trtexec's limit for the coefficient of variance
MIN_GAIN = 1.05  # speed-up from which an int8 engine is worth its loss
_STRETCHES = 10  # of the runs, whose ratios give the interval of a speed-up
_TICK_MS = 1e-6  # a coarse clock may measure 0
MIN_RUNS_FOR_P95 = 20  # with fewer iterations even p95 is the slowest one

Feeds = Sequence[Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """One inference on an accelerator, in ms; trtexec's latency is h2d + compute + d2h."""

    h2d_ms: float
    compute_ms: float
    d2h_ms: float
    enqueue_ms: float


@runtime_checkable
class DeviceSession(Protocol):
    """A `Session` that times the stages of its last run with the device's own clock."""

    def device_times(self) -> DeviceTimes:
        """Return the times of the last `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One metric over all measured iterations, in ms (cv in percent)."""

    min: float
    max: float
    mean: float
    median: float
    p50: float
    p90: float
    p95: float
    p99: float
    cv_percent: float

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Summarize at least one sample, one per iteration."""
        values = np.sort(np.asarray(samples_ms, np.float64))
        mean = float(values.mean())
        return cls(
            min=float(values[0]),
            max=float(values[-1]),
            mean=mean,
            median=float(np.median(values)),
            p50=percentile(values, 50),
            p90=percentile(values, 90),
            p95=percentile(values, 95),
            p99=percentile(values, 99),
            cv_percent=100 * float(values.std()) / mean if mean > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latency figures of one session."""

    queries: int  # measured iterations, without warm-up
    warmup_queries: int
    total_host_walltime_s: float  # sum of this session's own iterations by the host's clock
    throughput_qps: float  # queries / total host walltime
    latency: Timing  # h2d + compute + d2h if the session times its device, else the host's time
    host: Timing  # time of `run` by the host's clock
    # enqueue, h2d, gpu_compute, d2h: None unless the session times its device
    enqueue: Timing | None = None
    h2d: Timing | None = None
    gpu_compute: Timing | None = None
    d2h: Timing | None = None
    samples_ms: tuple[float, ...] = ()  # latency of every measured iteration, in order
    warnings: tuple[str, ...] = ()

    def to_json(self, *, samples: bool = False) -> dict[str, object]:
        """Return plain JSON types; `samples` adds the latency of every iteration."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        data["warnings"] = list(self.warnings)
        data["samples_ms"] = list(self.samples_ms)
        if not samples:
            del data["samples_ms"]
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """How many times as fast an engine is as another."""

    ratio: float  # p50 over p50
    low: float  # of its interval, which also holds the ratio of the fastest runs
    high: float

    @property
    def text(self) -> str:
        """Ratio and interval: "1.41x (1.38 to 1.45)"."""
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"

    @property
    def is_noisy(self) -> bool:
        """Whether it may be a loss as well as a gain of 5 % or more."""
        return self.low <= 1 and self.high >= MIN_GAIN


def speed_up(rival: Latency, own: Latency) -> SpeedUp:
    """Compare the latency of two sessions that were measured together.

    The runs are divided into ten stretches of time, each with the ratio of its medians; the
    interval is that of the median of these ratios, without the outermost two (98 %). Where
    one engine's runs wait more often for other programs, the fastest runs tell another ratio.
    """
    ratio = max(rival.latency.p50, _TICK_MS) / max(own.latency.p50, _TICK_MS)
    stretches = min(_STRETCHES, len(rival.samples_ms), len(own.samples_ms))
    medians = [
        [float(np.median(part)) for part in np.array_split(one.samples_ms, stretches)]
        for one in ((rival, own) if stretches else ())
    ]
    ratios = sorted(max(a, _TICK_MS) / max(b, _TICK_MS) for a, b in zip(*medians, strict=True))
    inner = ratios[1:-1] if len(ratios) == _STRETCHES else ratios
    fastest = max(rival.latency.min, _TICK_MS) / max(own.latency.min, _TICK_MS)
    every = (ratio, fastest, *inner)
    return SpeedUp(ratio=ratio, low=min(every), high=max(every))


def percentile(ordered_ms: NDArray[np.float64], percent: int) -> float:
    """Return trtexec's percentile of ascending samples: drop the floor((1 - p) * n) slowest.

    Counted in integers, so that 10 % of 10 samples is 1 and not 0.999.
    """
    n = len(ordered_ms)
    return float(ordered_ms[max(n - 1 - (100 - percent) * n // 100, 0)])


def measure(
    sessions: Mapping[str, Session],
    feeds: Feeds,
    *,
    warmup_ms: float = 200,
    duration_s: float = 3,
    min_iterations: int = 10,
) -> dict[str, Latency]:
    """Time sessions in interleaved runs on the same inputs.

    Args:
        sessions: label -> session; all must accept the feeds.
        feeds: inputs, used in turn.
        warmup_ms: warm-up time per session; at least one run.
        duration_s: measuring time, per session on average.
        min_iterations: minimum of measured runs of each session.

    Returns:
        label -> `Latency`, in the order of `sessions`.

    Raises:
        ConfigError: no session, no feed, a negative time or no iteration.
        BackendError: a session refused a feed.
    """
    _check(sessions, feeds, warmup_ms, duration_s, min_iterations)
    warmup, clock = _InterleavedTimer(sessions, feeds), _InterleavedTimer(sessions, feeds)
    warm_s, counted_s = len(sessions) * warmup_ms / 1000, len(sessions) * duration_s
    with timed_phase("latency", warm_s + counted_s):
        warmup.turn(seconds=warm_s, rounds=1)
    with timed_phase("latency", max(counted_s, min_iterations * warmup.round_s)):
        clock.turn(seconds=counted_s, rounds=min_iterations)
    return {
        label: _latency(clock.host_ms[label], clock.device[label], len(warmup.host_ms[label]))
        for label in sessions
    }


class _InterleavedTimer:
    """Runs all sessions in rounds and stores every time."""

    def __init__(self, sessions: Mapping[str, Session], feeds: Feeds) -> None:
        self.sessions = sessions
        self.feeds = feeds
        self.host_ms: dict[str, list[float]] = {label: [] for label in sessions}
        self.device: dict[str, list[DeviceTimes]] = {label: [] for label in sessions}

    def turn(self, *, seconds: float, rounds: int) -> None:
        """Run rounds until both `seconds` and `rounds` are reached."""
        order = list(self.sessions)
        for index in _rounds(seconds, rounds):
            feed = self.feeds[index % len(self.feeds)]
            for label in order if index % 2 == 0 else reversed(order):
                self._time(label, feed)

    @property
    def round_s(self) -> float:
        """Median duration of the rounds so far, each session's untimed run included."""
        runs = 2 if len(self.sessions) > 1 else 1
        return runs * sum(map(statistics.median, self.host_ms.values())) / 1e3

    def _time(self, label: str, feed: Mapping[str, Array]) -> None:
        session = self.sessions[label]
        if len(self.sessions) > 1:
            session.run(feed)  # untimed: refills caches, wakes this session's threads
        start = time.perf_counter()
        session.run(feed)
        self.host_ms[label].append((time.perf_counter() - start) * 1e3)
        if isinstance(session, DeviceSession):
            self.device[label].append(session.device_times())


def _rounds(seconds: float, rounds: int) -> Iterator[int]:
    """Yield 0, 1, 2, ... until `seconds` have passed and `rounds` values were yielded."""
    start = time.perf_counter()
    index = 0
    while index < rounds or time.perf_counter() - start < seconds:
        yield index
        index += 1


def _latency(host_ms: list[float], device: list[DeviceTimes], warmup_queries: int) -> Latency:
    seconds = sum(host_ms) / 1e3
    # from the first byte sent to the last byte received
    samples = [one.h2d_ms + one.compute_ms + one.d2h_ms for one in device] or host_ms
    timing = Timing.of(samples)
    return Latency(
        queries=len(samples),
        warmup_queries=warmup_queries,
        total_host_walltime_s=seconds,
        throughput_qps=len(samples) / seconds if seconds > 0 else float("inf"),
        latency=timing,
        host=Timing.of(host_ms),
        enqueue=_stage(times.enqueue_ms for times in device),
        h2d=_stage(times.h2d_ms for times in device),
        gpu_compute=_stage(times.compute_ms for times in device),
        d2h=_stage(times.d2h_ms for times in device),
        samples_ms=tuple(samples),
        warnings=tuple(_warnings(len(samples), timing, device)),
    )


def _stage(times_ms: Iterable[float]) -> Timing | None:
    samples_ms = list(times_ms)
    return Timing.of(samples_ms) if samples_ms else None


def _warnings(iterations: int, timing: Timing, device: list[DeviceTimes]) -> Iterator[str]:
    """Warn of a short measurement; then trtexec's warnings, under trtexec's conditions."""
    if iterations < MIN_RUNS_FOR_P95:
        yield (
            f"measured over only {iterations} iteration{'s' if iterations > 1 else ''}, so p95 and"
            " p99 are the slowest one; measure for longer"
        )

    if timing.cv_percent > UNSTABLE_PERCENT:
        yield f"unstable latency, its coefficient of variance is over {UNSTABLE_PERCENT} %"
    if not device:
        return
    median = {
        stage: float(np.median([getattr(times, stage) for times in device]))
        for stage in ("enqueue_ms", "h2d_ms", "compute_ms", "d2h_ms")
    }
    if median["enqueue_ms"] > 0.8 * median["compute_ms"]:
        yield "the host's enqueue time is over 0.8 of the compute time: a CUDA graph may help"
    for stage in ("h2d_ms", "d2h_ms"):
        if median[stage] >= median["compute_ms"]:
            yield f"copying ({stage[:3]}) takes as long as computing or longer"


def _check(
    sessions: Mapping[str, Session],
    feeds: Feeds,
    warmup_ms: float,
    duration_s: float,
    min_iterations: int,
) -> None:
    if not sessions or not feeds:
        raise ConfigError(
            f"measuring needs a session and an input, got {len(sessions)} and {len(feeds)}"
        )
    if not (warmup_ms >= 0 and duration_s >= 0 and min_iterations >= 1):
        raise ConfigError(
            "measuring needs warm-up and duration of 0 or more and at least 1 iteration,"
            f" got {warmup_ms} ms, {duration_s} s, {min_iterations}"
        )
