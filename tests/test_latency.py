import itertools
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from deploy.errors import ConfigError
from deploy.metrics.latency import DeviceTimes, Timing, measure, percentile
from deploy.runtimes.ort import OrtSession
from deploy.tensors import TensorSpec

FEEDS = [{"x": np.zeros(1, np.float32)}, {"x": np.ones(1, np.float32)}]


class Recorder:
    """A session that only writes down who ran with what."""

    inputs = outputs = (TensorSpec("x", "float32", (1,)),)

    def __init__(self, name, log, seconds=0.0):
        self.name, self.log, self.seconds = name, log, seconds

    def run(self, feed):
        self.log.append((self.name, float(feed["x"][0])))
        time.sleep(self.seconds)
        return dict(feed)


class Device(Recorder):
    def device_times(self):
        return DeviceTimes(h2d_ms=1.0, compute_ms=4.0, d2h_ms=2.0, enqueue_ms=3.5)


@pytest.mark.parametrize(
    ("n", "percent", "index"),
    [(10, 90, 8), (10, 99, 9), (100, 99, 98), (1, 99, 0), (1000, 95, 949), (11, 50, 5), (4, 50, 1)],
)
def test_a_percentile_leaves_out_the_floor_of_the_slowest(n, percent, index):
    assert percentile(np.arange(n, dtype=np.float64), percent) == index


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60))
def test_percentiles_rise_between_the_extremes(samples):
    t = Timing.of(samples)
    assert t.min <= t.p50 <= t.p90 <= t.p95 <= t.p99 <= t.max
    assert t.min <= t.median <= t.max
    assert t.mean == pytest.approx(np.mean(samples))


def test_sessions_run_in_turning_order_on_the_same_inputs():
    log = []
    sessions = {name: Recorder(name, log) for name in "ab"}
    found = measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=4)
    runs = log[1::2]  # behind one that is not timed, of the same session and input
    assert log[::2] == runs
    assert "".join(name for name, _ in runs) == "ab" + "abbaabba"  # warm-up, then four rounds
    assert [value for _, value in runs[2:]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(found) == ["a", "b"]
    assert found["a"].queries == 4 and found["a"].warmup_queries == 1
    assert len(found["a"].samples_ms) == 4


def test_one_session_alone_is_timed_in_every_run():
    log = []
    found = measure({"a": Recorder("a", log)}, FEEDS, warmup_ms=0, duration_s=0, min_iterations=4)
    assert len(log) == 1 + 4 and found["a"].queries == 4


@pytest.mark.parametrize(("names", "runs"), [("ab", 2), ("a", 1)])
def test_what_is_told_to_be_left_is_what_the_least_number_of_runs_takes(names, runs, monkeypatch):
    told = []
    monkeypatch.setattr(
        "deploy.metrics.latency.lasting",
        lambda what, seconds: told.append((what, seconds)) or nullcontext(),
    )
    sessions = {name: Recorder(name, [], seconds=0.01) for name in names}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=5)
    assert [what for what, _ in told] == ["latency", "latency"]
    assert told[0][1] == 0 and told[1][1] >= 5 * runs * len(names) * 0.01


def test_a_run_waits_for_no_other_sessions_threads(monkeypatch):
    entries = []
    add = onnxruntime.SessionOptions.add_session_config_entry
    monkeypatch.setattr(
        onnxruntime.SessionOptions,
        "add_session_config_entry",
        lambda self, *entry: (entries.append(entry), add(self, *entry)),
    )
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    OrtSession.open(model)
    assert ("session.force_spinning_stop", "1") in entries


def test_throughput_is_queries_over_a_sessions_own_time():
    log = []
    sessions = {"slow": Recorder("slow", log, 0.004), "fast": Recorder("fast", log)}
    found = measure(sessions, FEEDS, warmup_ms=0, duration_s=0)
    slow = found["slow"]
    assert slow.queries == 10
    assert slow.throughput_qps == pytest.approx(10 / slow.total_host_walltime_s)
    assert slow.total_host_walltime_s == pytest.approx(sum(slow.samples_ms) / 1e3)
    assert slow.latency.min >= 4


def test_a_device_session_is_timed_by_its_device(monkeypatch):
    ticks = (n / 1000 for n in itertools.count())  # each look at the clock is a millisecond later
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("deploy.metrics.latency.time", clock)
    found = measure({"gpu": Device("gpu", [])}, FEEDS, warmup_ms=0, duration_s=0)["gpu"]
    assert found.latency.mean == 7.0 and found.gpu_compute.median == 4.0
    assert found.host.mean == pytest.approx(1)
    assert any("CUDA graph" in text for text in found.warnings)
    data = found.to_json(samples=True)
    assert data["h2d"]["mean"] == 1.0 and data["samples_ms"] == [7.0] * 10
    assert "samples_ms" not in found.to_json()


def test_a_host_session_has_no_device_stages():
    found = measure({"cpu": Recorder("cpu", [])}, FEEDS, warmup_ms=0, duration_s=0)["cpu"]
    assert found.gpu_compute is None and "gpu_compute" not in found.to_json()


def test_a_spread_over_trtexecs_limit_is_said():
    class Uneven(Device):
        def device_times(self):
            ms = 10.0 if len(self.log) % 2 else 1.0
            return DeviceTimes(h2d_ms=0, compute_ms=ms, d2h_ms=0, enqueue_ms=0)

    found = measure({"u": Uneven("u", [])}, FEEDS, warmup_ms=0, duration_s=0)["u"]
    assert any("unstable" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("names", "feeds", "options"),
    [("", FEEDS, {}), ("a", [], {}), ("a", FEEDS, {"duration_s": -1}),
     ("a", FEEDS, {"warmup_ms": float("nan")}), ("a", FEEDS, {"min_iterations": 0})],
)  # fmt: skip
def test_nothing_to_measure_is_refused(names, feeds, options):
    with pytest.raises(ConfigError, match="measuring needs"):
        measure({name: Recorder(name, []) for name in names}, feeds, **options)
