"""Latency of one inference: warm-up, interleaved runs, trtexec's metrics.

Two engines measured one after the other see different machines: turbo clocks drop, other processes
start. So every round runs each session once, in alternating order, and the noise hits all alike::

    round     0      1      2      3
            A  B   B  A   A  B   B  A   ...

Each letter is two runs, of which the second is timed: the first finds the caches full of the other
engine's weights, which does not happen to an engine that is deployed alone. To a run of 15 ms that
makes a difference of 1 %, so long runs are all timed.

The clock depends on where the sessions run::

    on an accelerator        its own events: h2d + compute + d2h
    in the calling thread    CPU time of that thread, if all sessions without an accelerator do so
    in several threads       wall-clock time

CPU time does not count the time in which other programs had the core. On a busy machine the ratio
of the same two engines, measured five times, was 0.70 to 0.94 in wall-clock time, and 0.79 to 0.91
in CPU time.

Defaults, metric names and the percentile rule are those of `trtexec` (TensorRT 10, "Performance
summary"): 200 ms of warm-up, 3 s of measuring, at least 10 iterations; percentiles 90, 95, 99.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from deploy.errors import ConfigError
from deploy.metrics import DURATION_S
from deploy.tasks.rows import Outputs
from deploy.tensors import Session
from deploy.terminal import timed_phase

MIN_GAIN = 1.05  # speed-up from which an int8 engine is worth its loss
MIN_RUNS_FOR_P95 = 20  # with fewer iterations even p95 is the slowest one
_MAX_CV_PERCENT = 2.5  # trtexec's limit for the coefficient of variance
_STRETCHES = 10  # of the runs, whose ratios give the interval of a speed-up
_SETTLED_RATIO = 1.1  # high over low of an interval that longer measuring would hardly change
_MIN_SETTLED_SHARE = 1 / 6  # of the duration, for which sessions run at least
_LONG_RUN_MS = 10  # a run of this time takes about as long with caches that hold other weights
_TICK_MS = 1e-6  # a coarse clock may measure 0
_HAS_THREAD_CLOCK = os.name == "posix"  # Windows counts CPU time in ticks of 15.6 ms

Feeds = Sequence[Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """One inference on an accelerator, in ms; trtexec's latency is h2d + compute + d2h.

    Attributes:
        h2d_ms: copying the inputs to the device.
        compute_ms: computing on the device.
        d2h_ms: copying the outputs to the host.
        enqueue_ms: the host's time to start the computation.
    """

    h2d_ms: float
    compute_ms: float
    d2h_ms: float
    enqueue_ms: float


@runtime_checkable
class DeviceSession(Protocol):
    """A `Session` that times the stages of its last run with the device's own clock."""

    def device_times(self) -> DeviceTimes:
        """Return the times of the last `run`."""


@runtime_checkable
class HostSession(Protocol):
    """A `Session` that knows whether it computes in the thread that calls `run`."""

    @property
    def runs_in_calling_thread(self) -> bool:
        """Whether no other thread computes a part of an inference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One metric over all measured iterations.

    Attributes:
        min: fastest iteration, in ms.
        max: slowest iteration, in ms.
        mean: mean in ms.
        median: median in ms; of an even number of iterations the mean of the two middle ones.
        p50: trtexec's median in ms; of an even number of iterations the lower middle one.
        p90: 90th percentile in ms.
        p95: 95th percentile in ms.
        p99: 99th percentile in ms.
        cv_percent: coefficient of variation, in percent.
    """

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
        values = sorted(samples_ms)
        mean = float(np.mean(values))
        return cls(
            min=values[0],
            max=values[-1],
            mean=mean,
            # of an even number of values the mean of the two middle ones; p50 is the lower one
            median=statistics.median(values),
            p50=percentile(values, 50),
            p90=percentile(values, 90),
            p95=percentile(values, 95),
            p99=percentile(values, 99),
            cv_percent=100 * float(np.std(values)) / mean if mean > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latency figures of one session.

    Attributes:
        queries: number of measured iterations, without warm-up.
        warmup_queries: number of warm-up iterations.
        total_host_walltime_s: sum of this session's own iterations by the host's clock.
        throughput_qps: queries / total host walltime.
        latency: h2d + compute + d2h if the session times its device, CPU time with `is_cpu_time`,
            else the host's time.
        host: wall-clock time of `run` by the host's clock.
        enqueue: the host's time to start a computation; None without a device's times.
        h2d: copying the inputs to the device; None without a device's times.
        gpu_compute: computing on the device; None without a device's times.
        d2h: copying the outputs to the host; None without a device's times.
        is_cpu_time: whether `latency` and `samples_ms` are CPU time of the thread that ran the
            session, which does not count the time of other programs.
        samples_ms: latency of every measured iteration, in order.
        warnings: sentences on doubtful figures.
    """

    queries: int
    warmup_queries: int
    total_host_walltime_s: float
    throughput_qps: float
    latency: Timing
    host: Timing
    enqueue: Timing | None = None
    h2d: Timing | None = None
    gpu_compute: Timing | None = None
    d2h: Timing | None = None
    is_cpu_time: bool = False
    samples_ms: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def run_time(self) -> Timing:
        """Time of `run`, a device's queues included: CPU time with `is_cpu_time`, else `host`."""
        if self.is_cpu_time:
            return self.latency
        return self.host

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain JSON types, without the latency of every iteration."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        data["warnings"] = list(self.warnings)
        del data["samples_ms"]
        if not self.is_cpu_time:  # only a measurement in CPU time has the key
            del data["is_cpu_time"]
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Speed of an engine relative to another.

    Attributes:
        ratio: p50 over p50.
        low: lower end of the interval, which also holds the ratio of the fastest runs.
        high: upper end of the interval.
    """

    ratio: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Ratio and interval: "1.41x (1.38 to 1.45)"."""
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"

    @property
    def is_noisy(self) -> bool:
        """Whether it may be a loss as well as a gain of 5 % or more."""
        return self.low <= 1 and self.high >= MIN_GAIN


def speed_up(rival: Latency, engine: Latency) -> SpeedUp:
    """Compare the latency of two sessions that were measured together.

    The runs are divided into ten stretches of time, each with the ratio of its medians; the
    interval is that of the median of these ratios, without the outermost two (98 %). It also holds
    the ratio of the fastest runs, which differs if one engine's runs wait for other programs more
    often.
    """
    ratio = _ratio(rival.latency.p50, engine.latency.p50)
    fastest_ratio = _ratio(rival.latency.min, engine.latency.min)
    ratios = (ratio, fastest_ratio, *_stretch_ratios(rival.samples_ms, engine.samples_ms))
    return SpeedUp(ratio=ratio, low=min(ratios), high=max(ratios))


def _ratio(rival_ms: float, engine_ms: float) -> float:
    """Return how many times as fast the engine is; a time of 0 counts as one tick of the clock."""
    return float(max(rival_ms, _TICK_MS) / max(engine_ms, _TICK_MS))


def _stretch_ratios(rival_ms: Sequence[float], engine_ms: Sequence[float]) -> list[float]:
    """Return how many times as fast the engine is as its rival, in ten stretches, ascending.

    A stretch is a tenth of the iterations, in order; its ratio is that of the medians. The ratios
    show how far the speed-up varies with the load of the machine. The lowest and the highest are
    left out as outliers. Of fewer than ten iterations each is a stretch, and all ratios count.
    """
    stretch_count = min(_STRETCHES, len(rival_ms), len(engine_ms))
    if stretch_count == 0:
        return []
    rival_medians = map(np.median, np.array_split(rival_ms, stretch_count))
    engine_medians = map(np.median, np.array_split(engine_ms, stretch_count))
    ratios = sorted(map(_ratio, rival_medians, engine_medians))
    return ratios if stretch_count < _STRETCHES else ratios[1:-1]


def percentile(ordered_ms: Sequence[float], percent: int) -> float:
    """Return trtexec's percentile: the slowest sample after the floor((1 - p) * n) slowest.

    `ordered_ms`: n samples, ascending. The number is counted in integers, so that 10 % of 10
    samples is 1 and not 0.999.
    """
    n = len(ordered_ms)
    dropped_count = (100 - percent) * n // 100
    return ordered_ms[max(n - 1 - dropped_count, 0)]


def measure(
    sessions: Mapping[str, Session],
    feeds: Feeds,
    *,
    warmup_ms: float = 200,
    duration_s: float = DURATION_S,
    min_iterations: int = 10,
    until_settled: bool = False,
) -> dict[str, Latency]:
    """Time sessions in interleaved runs on the same inputs.

    Args:
        sessions: label -> session, one or more; all must accept the feeds.
        feeds: one or more inputs, used in turn.
        warmup_ms: warm-up time per session; at least one run.
        duration_s: measuring time, per session on average.
        min_iterations: minimum of measured runs of each session, 1 or more.
        until_settled: whether to stop before the time is up, once every session's speed-up over the
            first hardly varies (`_SETTLED_RATIO`).

    Returns:
        label -> `Latency`, in the order of `sessions`.

    Raises:
        ConfigError: a negative or infinite time.
        BackendError: a session refused a feed.
    """
    if not (0 <= warmup_ms < math.inf and 0 <= duration_s < math.inf):
        raise ConfigError(
            "measuring needs warm-up and duration of 0 or more,"
            f" got {warmup_ms} ms and {duration_s} s"
        )

    warmup_s = len(sessions) * warmup_ms / 1000
    measured_s = len(sessions) * duration_s
    with timed_phase("latency", warmup_s + measured_s):  # progress tells the time left of both
        warmup_runs = _run_rounds(sessions, feeds, seconds=warmup_s, rounds=1)

    earliest_end_s = math.inf
    if until_settled:
        earliest_end_s = _MIN_SETTLED_SHARE * measured_s
    with timed_phase("latency", max(measured_s, min_iterations * _round_s(warmup_runs))):
        measured_runs = _run_rounds(
            sessions,
            feeds,
            seconds=measured_s,
            rounds=min_iterations,
            earliest_end_s=earliest_end_s,
        )
    return {
        label: timed_session.summarize(len(warmup_runs[label].host_ms))
        for label, timed_session in measured_runs.items()
    }


def _can_use_thread_clock(sessions: Iterable[Session]) -> bool:
    """Whether CPU time of the calling thread measures all sessions that do not time their device.

    One clock must serve for all of them. If one session computes in other threads, the calling
    thread's clock would not show that work, so none is timed by it.
    """
    for session in sessions:
        if isinstance(session, DeviceSession):
            continue
        if not isinstance(session, HostSession) or not session.runs_in_calling_thread:
            return False
    return _HAS_THREAD_CLOCK


@dataclass(frozen=True, slots=True)
class _TimedSession:
    """A session, and the times of its iterations in order.

    Attributes:
        session: the session.
        uses_cpu_time: whether its latency is CPU time of the calling thread, if it does not time
            its device; else wall-clock time.
        latency_ms: time of each iteration by the clock of its latency.
        host_ms: wall-clock time of `run`.
        device_times: stages on the device; empty if the session does not time them.
    """

    session: Session
    uses_cpu_time: bool
    latency_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    device_times: list[DeviceTimes] = field(default_factory=list)

    def is_long(self) -> bool:
        """Whether its last run was long; False before the first."""
        return bool(self.latency_ms) and self.latency_ms[-1] > _LONG_RUN_MS

    def run(self, feed: Outputs) -> None:
        """Run the session once and store its times."""
        start = time.perf_counter()
        cpu_start = time.thread_time()
        self.session.run(feed)
        cpu_end = time.thread_time()
        end = time.perf_counter()
        host_ms = (end - start) * 1e3
        self.host_ms.append(host_ms)
        if isinstance(self.session, DeviceSession):
            stages = self.session.device_times()
            self.device_times.append(stages)
            # from the first byte sent to the last byte received
            self.latency_ms.append(stages.h2d_ms + stages.compute_ms + stages.d2h_ms)
        elif self.uses_cpu_time:  # leaves out the time in which other programs had the core
            self.latency_ms.append((cpu_end - cpu_start) * 1e3)
        else:
            self.latency_ms.append(host_ms)

    def summarize(self, warmup_queries: int) -> Latency:
        """Return the latency figures; `warmup_queries`: number of warm-up iterations."""
        iterations = len(self.host_ms)
        seconds = sum(self.host_ms) / 1e3
        timing = Timing.of(self.latency_ms)
        return Latency(
            queries=iterations,
            warmup_queries=warmup_queries,
            total_host_walltime_s=seconds,
            throughput_qps=iterations / seconds if seconds > 0 else float("inf"),
            latency=timing,
            host=Timing.of(self.host_ms),
            enqueue=self._stage("enqueue_ms"),
            h2d=self._stage("h2d_ms"),
            gpu_compute=self._stage("compute_ms"),
            d2h=self._stage("d2h_ms"),
            is_cpu_time=self.uses_cpu_time and not self.device_times,
            samples_ms=tuple(self.latency_ms),
            warnings=tuple(self._warnings(timing)),
        )

    def _stage(self, name: str) -> Timing | None:
        """Return the figures of one stage of the device, by its field of `DeviceTimes`, or None."""
        if not self.device_times:
            return None
        return Timing.of([getattr(times, name) for times in self.device_times])

    def _warnings(self, timing: Timing) -> Iterator[str]:
        """Warn of a short measurement, and of an unstable one by trtexec's limit."""
        iterations = len(self.host_ms)
        if iterations < MIN_RUNS_FOR_P95:
            yield (
                f"measured over only {iterations} iteration{'s' if iterations > 1 else ''}, so p95"
                " and p99 are the slowest one; measure for longer"
            )
        if timing.cv_percent > _MAX_CV_PERCENT:
            yield f"unstable latency, its coefficient of variance is over {_MAX_CV_PERCENT} %"


def _run_rounds(
    sessions: Mapping[str, Session],
    feeds: Feeds,
    *,
    seconds: float,
    rounds: int,
    earliest_end_s: float = math.inf,
) -> dict[str, _TimedSession]:
    """Run rounds, one inference of each session, until the time and the number are reached.

    Args:
        sessions: label -> session.
        feeds: inputs, used in turn.
        seconds: least duration of all rounds.
        rounds: least number of rounds.
        earliest_end_s: from this many seconds on the rounds may end sooner than `seconds` and
            `rounds` say: once longer measuring would hardly change the speed-ups.

    Returns:
        label -> the session with its times.
    """
    uses_cpu_time = _can_use_thread_clock(sessions.values())
    timed_sessions = {
        label: _TimedSession(session, uses_cpu_time) for label, session in sessions.items()
    }
    running_order = [*timed_sessions.values()]
    start = time.perf_counter()
    round_count = 0
    while round_count < rounds or time.perf_counter() - start < seconds:
        feed = feeds[round_count % len(feeds)]
        for timed_session in running_order:
            if len(sessions) > 1 and not timed_session.is_long():
                timed_session.session.run(feed)  # untimed: refills caches, wakes its threads
            timed_session.run(feed)
        if time.perf_counter() - start >= earliest_end_s and _is_settled(timed_sessions):
            break
        round_count += 1
        running_order.reverse()  # no session always runs first
    return timed_sessions


def _is_settled(timed_sessions: Mapping[str, _TimedSession]) -> bool:
    """Whether enough rounds ran, and no session's speed-up over the first changes any more."""
    first_latency_ms, *other_latencies_ms = [
        session.latency_ms for session in timed_sessions.values()
    ]
    if len(first_latency_ms) < MIN_RUNS_FOR_P95 or not other_latencies_ms:
        return False
    for latency_ms in other_latencies_ms:
        ratios = _stretch_ratios(first_latency_ms, latency_ms)
        if ratios[-1] > _SETTLED_RATIO * ratios[0]:
            return False
    return True


def _round_s(timed_sessions: Mapping[str, _TimedSession]) -> float:
    """Median duration in seconds of the timed runs of a round so far."""
    medians_ms = [statistics.median(session.host_ms) for session in timed_sessions.values()]
    return sum(medians_ms) / 1e3
