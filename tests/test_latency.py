"""Latency: sessions are measured in turn; percentiles, throughput and device times."""

import gc
import itertools
import math
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import BackendError, ConfigError
from deploy.metrics.latency import DeviceTimes, Timing, measure, percentile, speed_up
from deploy.runtimes import ort
from deploy.runtimes.ort import OrtSession
from deploy.tensors import TensorSpec
from tests.models import make_model

QUICK_OPTIONS = ("--duration", 0, "--warm-up", 0, "--threads", 1)


FEEDS = [{"x": np.zeros(1, np.float32)}, {"x": np.ones(1, np.float32)}]


class Recorder:
    """A session that records its name and the value of every input."""

    inputs = outputs = (TensorSpec("x", "float32", (1,)),)

    def __init__(self, name, log=None, seconds=0.0):
        self.name = name
        self.log = [] if log is None else log
        self.seconds = seconds

    def run(self, feed):
        self.log.append((self.name, float(feed["x"][0])))
        time.sleep(self.seconds)
        return dict(feed)


def measure_session(session, **options):
    return measure({session.name: session}, FEEDS, warmup_ms=0, duration_s=0, **options)[
        session.name
    ]


class Device(Recorder):
    def device_times(self):
        return DeviceTimes(h2d_ms=1.0, compute_ms=4.0, d2h_ms=2.0, enqueue_ms=3.5)


@pytest.mark.parametrize(
    ("n", "percent", "index"),
    [
        (10, 90, 8),
        (10, 99, 9),
        (100, 99, 98),
        (1, 99, 0),
        (1000, 95, 949),
        (11, 50, 5),
        (4, 50, 1),
    ],
)
def test_percentile_counts_like_trtexec(n, percent, index):
    assert percentile(np.arange(n, dtype=np.float64), percent) == index


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60))
def test_percentiles_rise_between_the_extremes(samples):
    t = Timing.of(samples)
    assert t.min <= t.p50 <= t.p90 <= t.p95 <= t.p99 <= t.max
    assert t.min <= t.median <= t.max
    assert t.mean == pytest.approx(np.mean(samples))


def test_sessions_alternate_on_equal_inputs(clock):
    log = []
    sessions = {name: Recorder(name, log) for name in "ab"}
    latency_by_session = measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=4)
    runs = log[1::2]  # behind one that is not timed, of the same session and input
    assert log[::2] == runs
    assert "".join(name for name, _ in runs) == "ab" + "abbaabba"  # warm-up, then four rounds
    assert [value for _, value in runs[2:]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(latency_by_session) == ["a", "b"]
    assert latency_by_session["a"].queries == 4
    assert latency_by_session["a"].warmup_queries == 1
    assert len(latency_by_session["a"].samples_ms) == 4
    single_session = Recorder("a")  # is timed in every run
    assert measure_session(single_session, min_iterations=4).queries == 4
    assert len(single_session.log) == 1 + 4


@pytest.mark.parametrize("names", ["ab", "a"])
def test_progress_estimates_the_minimum_runs(names, monkeypatch):
    phases = []

    def record_phase(name, seconds):
        phases.append((name, seconds))
        return nullcontext()

    monkeypatch.setattr("deploy.metrics.latency.timed_phase", record_phase)
    sessions = {name: Recorder(name, [], seconds=0.01) for name in names}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=5)
    assert [phase_name for phase_name, _ in phases] == ["latency", "latency"]
    assert phases[0][1] == 0
    assert phases[1][1] >= 5 * len(names) * 0.01


def test_session_stops_spinning_after_a_run(monkeypatch):
    entries = []
    options = onnxruntime.SessionOptions
    add_entry = options.add_session_config_entry

    def record_entry(self, key, value):
        entries.append((key, value))
        return add_entry(self, key, value)

    monkeypatch.setattr(options, "add_session_config_entry", record_entry)
    OrtSession.open(make_model([("Relu", "x", "y")], {"x": [1]}, {"y": [1]}, opset=17))
    assert ("session.force_spinning_stop", "1") in entries


def test_stopped_runs_refuse_until_continued(monkeypatch):
    model = make_model([("Relu", "x", "y")], {"x": [1]}, {"y": [1]}, opset=17)
    feed = {"x": np.ones(1, np.float32)}
    session = OrtSession.open(model)
    load = onnxruntime.InferenceSession
    bound = ort.BoundSession(session, {"y": ((1,), np.dtype(np.float32))})

    def stop_and_load(*args, **options):
        ort.stop_runs(math.inf)
        return load(*args, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", stop_and_load)
    try:
        for work in (OrtSession.open, lambda _: session.run(feed), lambda _: bound.run(feed)):
            with pytest.raises(KeyboardInterrupt):
                work(model)
    finally:
        ort.continue_runs()
    session.run(feed)
    assert not ort.stop_runs(-math.inf)  # a signal before that
    ort.abandon_runs()
    with pytest.raises(BackendError, match="terminate"):
        bound.run(feed)
    monkeypatch.undo()
    OrtSession.open(model).run(feed)


def test_throughput_counts_only_the_session_time():
    sessions = {"slow": Recorder("slow", seconds=0.004), "fast": Recorder("fast")}
    slow = measure(sessions, FEEDS, warmup_ms=0, duration_s=0)["slow"]
    assert slow.queries == 10
    assert slow.throughput_qps == pytest.approx(10 / slow.total_host_walltime_s)
    assert slow.total_host_walltime_s == pytest.approx(sum(slow.samples_ms) / 1e3)
    assert slow.latency.min >= 4


def test_device_session_reports_device_times(monkeypatch):
    ticks = (n / 1000 for n in itertools.count())  # each look at the clock is a millisecond later
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), thread_time=lambda: 0.0)
    monkeypatch.setattr("deploy.metrics.latency.time", clock)
    latency = measure_session(Device("gpu"))
    assert latency.latency.mean == 7.0
    assert latency.gpu_compute.median == 4.0
    assert latency.host.mean == pytest.approx(1)
    assert latency.samples_ms == (7.0,) * 10
    assert latency.to_json()["h2d"]["mean"] == 1.0
    latency = measure_session(Recorder("cpu"))
    assert latency.gpu_compute is None
    assert "gpu_compute" not in latency.to_json()


class Clock:
    """Stands in for the module `time`; sessions move it on."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0

    def perf_counter(self):
        return self.wall_s

    def thread_time(self):
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("deploy.metrics.latency.time", clock)
    monkeypatch.setattr("deploy.metrics.latency._HAS_THREAD_CLOCK", True)
    return clock


class SingleThread(Recorder):
    """Computes for `cpu_ms` in the calling thread; every second run waits for other programs."""

    runs_in_calling_thread = True

    def __init__(self, name, clock, cpu_ms, waiting_ms=0.0):
        super().__init__(name)
        self.clock = clock
        self.cpu_ms = cpu_ms
        self.waiting_ms = waiting_ms

    def run(self, feed):
        self.clock.cpu_s += self.cpu_ms / 1e3
        self.clock.wall_s += self.cpu_ms / 1e3
        if len(self.log) % 2:
            self.clock.wall_s += self.waiting_ms / 1e3
        return super().run(feed)


class SlowingDown(SingleThread):
    """Takes longer in every run."""

    def run(self, feed):
        self.cpu_ms *= 1.02
        return super().run(feed)


def test_calling_thread_is_timed_in_cpu_time(clock):
    int8 = SingleThread("int8", clock, cpu_ms=2, waiting_ms=30)
    fp32 = SingleThread("fp32", clock, cpu_ms=3)
    latencies = measure({"int8": int8, "fp32": fp32}, FEEDS, warmup_ms=0, duration_s=0)
    latency = latencies["int8"]
    assert latency.is_cpu_time
    assert latency.latency.p50 == pytest.approx(2)
    assert latency.samples_ms == pytest.approx([2.0] * 10)
    assert latency.run_time == latency.latency
    assert latency.host.p50 == pytest.approx(32)
    assert latency.total_host_walltime_s == pytest.approx(0.32)
    assert latency.to_json()["is_cpu_time"] is True
    speed = speed_up(latencies["fp32"], latency)
    assert (speed.ratio, speed.low, speed.high) == pytest.approx((1.5, 1.5, 1.5))


def test_long_runs_are_all_timed_but_the_first(clock):
    sessions = {name: SingleThread(name, clock, cpu_ms=20) for name in ("fp32", "int8")}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=5)
    for session in sessions.values():
        assert len(session.log) == 2 + 1 + 5  # warm-up; one that is not timed, and five that are


def test_settled_speed_up_ends_measuring_early(clock):
    sessions = {"fp32": SingleThread("fp32", clock, 3), "int8": SingleThread("int8", clock, 2)}
    latencies = measure(sessions, FEEDS, warmup_ms=0, duration_s=0.3, until_settled=True)
    # a sixth of 0.6 s would be 10 rounds of 10 ms; 20 are enough for a p95
    assert latencies["int8"].queries == 20
    complete = measure(sessions, FEEDS, warmup_ms=0, duration_s=0.3)
    assert complete["int8"].queries == 60


def test_unsettled_speed_up_is_measured_to_the_end(clock):
    sessions = {"fp32": SingleThread("fp32", clock, 3), "int8": SlowingDown("int8", clock, 2)}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0.3, until_settled=True)
    assert clock.cpu_s >= 0.6


@pytest.mark.parametrize("knows_its_threads", [True, False])
def test_one_session_with_threads_puts_all_on_the_wall_clock(clock, knows_its_threads):
    single = SingleThread("single", clock, cpu_ms=2, waiting_ms=6)
    other = Recorder("other")
    if knows_its_threads:
        other.runs_in_calling_thread = False
    latency = measure({"single": single, "other": other}, FEEDS, warmup_ms=0, duration_s=0)
    assert latency["single"].latency.p50 == pytest.approx(8)
    for session_latency in latency.values():
        assert not session_latency.is_cpu_time
        assert session_latency.latency == session_latency.host == session_latency.run_time
        assert "is_cpu_time" not in session_latency.to_json()


def test_wall_clock_without_a_precise_thread_clock(clock, monkeypatch):
    monkeypatch.setattr("deploy.metrics.latency._HAS_THREAD_CLOCK", False)
    latency = measure_session(SingleThread("cpu", clock, cpu_ms=2, waiting_ms=1))
    assert not latency.is_cpu_time
    assert latency.latency.mean == pytest.approx(2.5)


def test_device_keeps_its_own_clock_beside_cpu_time(clock):
    sessions = {"cpu": SingleThread("cpu", clock, cpu_ms=2), "gpu": Device("gpu")}
    latency = measure(sessions, FEEDS, warmup_ms=0, duration_s=0)
    assert latency["cpu"].is_cpu_time
    assert not latency["gpu"].is_cpu_time
    assert latency["gpu"].latency.mean == 7.0
    assert latency["gpu"].run_time == latency["gpu"].host


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux")
def test_session_of_one_thread_starts_no_other():
    """So the CPU time of the calling thread is that of the inference."""
    model = make_model([("Relu", "x", "y")], {"x": [4]}, {"y": [4]}, opset=17)
    gc.collect()  # other tests' sessions, whose threads would end meanwhile
    thread_count = count_threads()
    single = OrtSession.open(model, threads=1)
    single.run({"x": np.ones(4, np.float32)})
    assert count_threads() == thread_count
    double = OrtSession.open(model, threads=2)
    assert count_threads() > thread_count
    assert single.runs_in_calling_thread
    assert not double.runs_in_calling_thread


def count_threads():
    return len(list(Path("/proc/self/task").iterdir()))


def test_uneven_device_times_are_warned():
    class Uneven(Device):
        def device_times(self):
            ms = 10.0 if len(self.log) % 2 else 1.0
            return DeviceTimes(h2d_ms=0, compute_ms=ms, d2h_ms=0, enqueue_ms=0)

    assert any("unstable" in text for text in measure_session(Uneven("u")).warnings)


@pytest.mark.parametrize(
    "options", [{"duration_s": -1}, {"duration_s": float("inf")}, {"warmup_ms": float("nan")}]
)
def test_times_that_cannot_be_measured_are_refused(options):
    with pytest.raises(ConfigError, match="measuring needs"):
        measure({"a": Recorder("a")}, FEEDS, **options)
