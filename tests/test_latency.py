"""Latency: sessions are measured in turn; percentiles, throughput and device times."""

import itertools
import math
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import BackendError, ConfigError
from deploy.metrics.latency import DeviceTimes, Timing, measure, percentile
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


def test_sessions_alternate_on_equal_inputs():
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


@pytest.mark.parametrize(("names", "runs"), [("ab", 2), ("a", 1)])
def test_progress_estimates_the_minimum_runs(names, runs, monkeypatch):
    phases = []

    def record_phase(name, seconds):
        phases.append((name, seconds))
        return nullcontext()

    monkeypatch.setattr("deploy.metrics.latency.timed_phase", record_phase)
    sessions = {name: Recorder(name, [], seconds=0.01) for name in names}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=5)
    assert [phase_name for phase_name, _ in phases] == ["latency", "latency"]
    assert phases[0][1] == 0
    assert phases[1][1] >= 5 * runs * len(names) * 0.01


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
    bound = session.bind_outputs({"y": ((1,), np.dtype(np.float32))})

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
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("deploy.metrics.latency.time", clock)
    latency = measure_session(Device("gpu"))
    assert latency.latency.mean == 7.0
    assert latency.gpu_compute.median == 4.0
    assert latency.host.mean == pytest.approx(1)
    assert any("CUDA graph" in text for text in latency.warnings)
    data = latency.to_json(samples=True)
    assert data["h2d"]["mean"] == 1.0
    assert data["samples_ms"] == [7.0] * 10
    assert "samples_ms" not in latency.to_json()
    latency = measure_session(Recorder("cpu"))
    assert latency.gpu_compute is None
    assert "gpu_compute" not in latency.to_json()


def test_uneven_device_times_are_warned():
    class Uneven(Device):
        def device_times(self):
            ms = 10.0 if len(self.log) % 2 else 1.0
            return DeviceTimes(h2d_ms=0, compute_ms=ms, d2h_ms=0, enqueue_ms=0)

    assert any("unstable" in text for text in measure_session(Uneven("u")).warnings)


@pytest.mark.parametrize(
    ("names", "feeds", "options"),
    [
        ("", FEEDS, {}),
        ("a", [], {}),
        ("a", FEEDS, {"duration_s": -1}),
        ("a", FEEDS, {"warmup_ms": float("nan")}),
        ("a", FEEDS, {"min_iterations": 0}),
    ],
)
def test_nothing_to_measure_is_refused(names, feeds, options):
    with pytest.raises(ConfigError, match="measuring needs"):
        measure({name: Recorder(name) for name in names}, feeds, **options)
