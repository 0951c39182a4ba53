"""Latencies of models, and bench."""

import itertools
import json
import math
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from deploy.analysis.benchmark import bench, model_size
from deploy.errors import BackendError, ConfigError
from deploy.metrics.bench_inputs import random_feeds
from deploy.metrics.kernels import KernelTime, time_kernels
from deploy.metrics.latency import FEW, DeviceTimes, Timing, measure, percentile
from deploy.report import Report, to_html, to_markdown, to_screen
from deploy.report.parts import BatchRow, EngineRow
from deploy.runtimes import ort
from deploy.runtimes.ort import OrtSession
from deploy.tensors import TensorSpec
from tests.models import as_float32, build_net, make_model, save_net

QUICK = ("--duration", 0, "--warm-up", 0, "--threads", 1)


def saved(path, nodes="y = Relu (x)", *, shape=("n", 3), x="x", outputs="y"):
    shapes = {x: shape}, dict.fromkeys(outputs, shape)
    return save_net(make_model(nodes, *shapes, opset=17, ir=9), path)


@pytest.fixture
def a(tmp_path):
    return saved(tmp_path / "a.onnx")


@pytest.fixture
def told(run, tmp_path):
    """(words of bench) -> its engines as JSON, and the screen."""

    def call(*words):
        out = run.ok("bench", *words, *QUICK, "--json", tmp_path / "r.json")
        return json.loads((tmp_path / "r.json").read_text())["engines"], out

    return call


@pytest.fixture
def refused(run):
    return lambda *words: run.fails("bench", *words, *QUICK)


@pytest.fixture
def shapes_run(monkeypatch):
    """Shapes of x in the first feed of everything that was measured."""
    seen = []

    def watched(sessions, feeds, **rest):
        seen.append(feeds[0]["x"].shape)
        return measure(sessions, feeds, **rest)

    monkeypatch.setattr("deploy.analysis.benchmark.measure", watched)
    return seen


def test_each_batch_is_measured_and_the_smallest_is_the_headline(told, a, tmp_path, shapes_run):
    engines, out = told(saved(tmp_path / "b.onnx"), "--against", a, "--batch", "4,1,2,4")
    assert [[row["batch"] for row in engine["sweep"]] for engine in engines] == [[1, 2, 4]] * 2
    assert shapes_run == [(1, 3), (2, 3), (4, 3)]
    first = engines[0]
    assert first["latency"] == first["sweep"][0]["latency"]
    for row in first["sweep"]:
        assert row["items_qps"] == pytest.approx(1e3 * row["batch"] / row["latency"]["host"]["p50"])
    assert re.search(r"^Batch +1 +1$", out, re.MULTILINE)
    assert re.search(r"^Batches +a.onnx( +b.onnx +batch$|  b.onnx)", out, re.MULTILINE)
    assert out.count("best: ") == 2


def test_images_are_stacked_to_a_batch_in_turn(told, a, held, shapes_run):
    told(a, "--images", held, "--batch", "1,8")
    assert shapes_run == [(1, 3), (8, 3)]


def test_a_batch_that_the_model_does_not_take_is_refused(refused, a, tmp_path, wording):
    fixed = saved(tmp_path / "fixed.onnx", shape=(1, 3))
    said = refused(fixed, "--batch", "1,2")
    assert "first dimension" in said
    assert "got [1, 3] for 'x'" in said
    assert "got [1, 3] for 'x'" in refused(a, "--against", fixed, "--batch", "1")
    nodes = "s = Constant <value_ints = [1, 3]> () y = Reshape (x, s)"
    model = saved(tmp_path / "b.onnx", nodes)
    wording.check(refused(model, "--batch", "1,2"))


def test_images_of_several_sizes_or_shapes_with_a_batch_are_no_batch(
    refused, told, tmp_path, wording
):
    (folder := tmp_path / "rows").mkdir()
    for width in (3, 4):
        np.save(folder / f"{width}.npy", np.zeros((1, width), np.float32))
    model = saved(tmp_path / "a.onnx", shape=("n", "w"))
    wording.check(refused(model, "--images", folder, "--batch", "2"))
    assert "write 1 there" in refused(model, "--batch", "2", "--shape", "x:4x5")
    assert told(model, "--batch", "2", "--shape", "x:1x5")[0][0]["sweep"][0]["batch"] == 2


BATCHES = ["0", "1,,2", "two", "-1", "1,65537", ""]
SHAPES = ["x", "x:", "x:1xtwo", ":1x2", "x:-1"]


@pytest.mark.parametrize(
    ("option", "value", "form"),
    [
        *(("--batch", value, "such as 1,2,4,8") for value in BATCHES),
        *(("--shape", value, "name:1x3x224x224") for value in SHAPES),
    ],
)
def test_what_is_no_batch_or_shape_is_a_usage_error(run, a, option, value, form):
    code, _, err = run("bench", a, option, value)
    assert code == 2
    assert form in err


def swept(label, *rates):
    found = measure({"x": Still()}, [{}], warmup_ms=0, duration_s=0)["x"]
    rows = [BatchRow(batch=2**n, items_qps=r, latency=found) for n, r in enumerate(rates)]
    return EngineRow(label=label, latency=rows[0].latency, sweep=tuple(rows))


class Still:
    inputs = outputs = ()
    threads = 1

    def run(self, feed):
        return {}


def test_every_form_has_the_batches_and_marks_the_best_of_each():
    report = Report(engines=(swept("a<b", 100, 300, 200), swept("c", 50, 60, 70)))
    screen = to_screen(report)
    page = to_html(report)
    text = to_markdown(report)
    for form in (screen, page, text):
        assert form.count("best: ") == 2
    assert "## Batches" in text
    assert "Batches</h2>" in page
    (figure,) = re.findall(r"<svg[^>]*><title>Throughput by batch.*?</svg>", page, re.DOTALL)
    assert figure.count("<circle") == 6
    assert figure.count('r="6"') == 2
    assert "a&lt;b, batch 2: 300 /s" in figure
    assert "a<b" not in figure
    names = [float(y) for y in re.findall(r'<text class="name[^>]* y="([\d.]+)"', figure)]
    assert len(names) == 2
    assert names[1] - names[0] >= 15  # none over another
    page = to_html(Report(engines=(swept("a", 100),)))  # one batch alone is not drawn
    assert "Throughput by batch" not in page
    assert "best: " in page


def test_a_profile_tells_every_kernel_the_slowest_first(told, small_cnn):
    (engine,), out = told(small_cnn, "--profile")
    times = [kernel["ms"] for kernel in engine["kernels"]]
    assert times == sorted(times, reverse=True)
    assert {"Conv", "Gemm", "MaxPool"} <= {kernel["kind"] for kernel in engine["kernels"]}
    assert re.search(r"^Kernels +time +share +kind +kernel$", out, re.M)


def test_a_profile_of_two_models_is_by_kind(told, a, tmp_path):
    _, out = told(saved(tmp_path / "b.onnx", "y = Neg (x)"), "--against", a, "--profile")
    assert re.search(r"^Kernels +a.onnx +b.onnx +kind$", out, re.MULTILINE)
    assert re.search(r"ms in 1 +-  Relu$", out, re.M)
    assert re.search(r"- .*ms in 1  Neg$", out, re.M)


def test_a_body_is_told_and_what_runs_it_is_not_told_twice(told, tmp_path):
    nodes = """
        s = ReduceSum <keepdims = 0> (x) c = Cast <to = 9> (s)
        y = If <then_branch = relu () => (float[n, 3] o) { o = Relu (x) },
                else_branch = neg () => (float[n, 3] o) { o = Neg (x) }> (c)
    """
    kernels = told(saved(tmp_path / "a.onnx", nodes), "--profile")[0][0]["kernels"]
    kinds = {kernel["kind"] for kernel in kernels}
    assert "If" not in kinds
    assert kinds & {"Relu", "Neg"}


def test_a_kernel_takes_the_p50_of_its_runs_times_how_often_it_runs():
    class Told(Still):
        def layer_times(self, feeds, runs):
            for run in range(runs):
                early = 100 if run < 2 else run
                yield "once", "A", early
                yield from [("twice", "B", early / 2)] * 2

    found = time_kernels("x", Told(), [{}], again=Told, duration_ms=0, p50_ms=1)
    assert [(k.name, k.kind, k.ms) for k in found] == [("once", "A", 6.0), ("twice", "B", 6.0)]


def test_a_runtime_without_kernel_times_is_refused_first(refused, a, openvino):
    assert "leave --profile out" in refused(a, "--runtime", "openvino", "--profile")


def test_kernels_without_a_kind_are_told_one_by_one():
    kernels = tuple(KernelTime(name=f"k{n}", kind="", ms=12.0 - n) for n in range(12))
    rows = tuple(EngineRow(label=label, kernels=kernels) for label in ("a", "b"))
    screen = to_screen(Report(engines=rows))
    assert screen.count("k0") == 2
    assert "2 more kernels of 3.8 %" in screen
    page = to_html(Report(engines=rows))
    assert len(re.findall(r"<td[^>]*>k11</td>", page)) == 2
    assert "by kind" not in page
    assert "\n### b\n" in to_markdown(Report(engines=rows))


@pytest.fixture
def built(tmp_path):
    """A build of a model whose height and width are open, calibrated at 12x20."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, (4, n, 3, 3)) for name, n in (("w", 3), ("v", 4))}
    ends = {"x": ["n", 3, "h", "w"]}, {"y": ["n", 4, "h2", "w2"]}
    nodes = "c = Conv (x, w) y = Conv (c, v)"
    model = make_model(nodes, *ends, as_float32(weights), opset=17, ir=9)
    out = build_net(model, rng.normal(0, 1, (4, 3, 12, 20)), tmp_path, "--effort", 0)
    return out / "net.int8.onnx"


def test_open_shapes_are_those_that_the_build_calibrated_with(told, built, tmp_path, shapes_run):
    _, out = told(built, "--against", tmp_path / "net.onnx")
    assert shapes_run[-1] == (1, 3, 12, 20)
    assert "1x3x12x20" in " ".join(out.split())
    told(tmp_path / "net.onnx", "--against", built, "--batch", "2")
    assert shapes_run[-1] == (2, 3, 12, 20)
    _, out = told(built, "--shape", "x:1x3x8x9")  # what is given stands before it
    assert shapes_run[-1] == (1, 3, 8, 9)
    assert "as the build" not in out


def test_a_manifest_that_tells_no_shape_that_fits_is_passed_over(refused, built, wording):
    path = built.parent / "calib8/manifest.json"
    document = json.loads(path.read_text())
    assert document["made_from"]["shapes"] == {"x": [1, 3, 12, 20]}
    stranger = built.with_name("other.onnx")  # which no build made
    stranger.write_bytes(built.read_bytes())
    wording.check(refused(stranger))
    broken = [[1, 3, 0, 8], [1, 4, 8, 8], [True, 3, 8, 8], [1, 3, 8], 5]
    for shapes in (None, [], *({"x": dims} for dims in broken)):
        document["made_from"]["shapes"] = shapes
        path.write_text(json.dumps(document))
        wording.check(refused(built))


def test_streams_of_onnx_models_share_the_cores(run, a, monkeypatch):
    monkeypatch.setattr("deploy.analysis.benchmark.usable_cores", lambda: 6)
    words = ("bench", a, "--streams", 3, "--duration", 0, "--warm-up", 0)
    assert "3 streams at once, 2 threads" in run(*words)[1]
    assert "3 streams at once, 1 thread" in run(*words, "--threads", 1)[1]


def test_a_measurement_that_was_too_short_says_so(told, a):
    assert "10 iterations, so p95" in told(a)[1]
    for runs, shown in ((FEW - 1, []), (FEW, ["p95"]), (99, ["p95"]), (100, ["p95", "p99"])):
        found = measure({"x": Still()}, [{}], warmup_ms=0, duration_s=0, min_iterations=runs)["x"]
        assert any("iterations, so p95" in text for text in found.warnings) == (runs < FEW)
        table = to_markdown(Report(engines=(EngineRow(label="x", latency=found),)))
        assert re.findall(r"Latency (p9[59])", table) == shown


def test_two_models_side_by_side(a, tmp_path):
    b = saved(tmp_path / "b.onnx", "y = Neg (x)")
    first, second = bench(b, against=a, threads=1, warmup_ms=0, duration_s=0).engines
    assert (first.label, second.label) == ("a.onnx", "b.onnx")
    assert first.reference
    assert not second.reference
    assert first.latency.queries == second.latency.queries == 10
    assert first.size_bytes == a.stat().st_size
    assert first.threads == 1
    assert first.load_ms > 0


def test_models_of_one_name_in_two_folders_keep_apart(a, tmp_path):
    (tmp_path / "other").mkdir()
    b = saved(tmp_path / "other" / "a.onnx")
    report = bench(b, against=a, threads=1, warmup_ms=0, duration_s=0)
    assert [engine.label for engine in report.engines] == [str(a), str(b)]
    with pytest.raises(ConfigError, match="another model"):
        bench(a, against=a)
    with pytest.raises(ConfigError, match="same inputs"):
        bench(a, against=saved(tmp_path / "b.onnx", "y = Relu (z)", x="z"), threads=1)


def test_random_inputs_are_the_same_for_the_same_seed():
    specs = [TensorSpec("x", "float16", ("n", 3)), TensorSpec("i", "int64", (2,))]
    left, right, other = (random_feeds(specs, seed=seed) for seed in (1, 1, 2))
    assert left[0]["x"].shape == (1, 3)
    assert left[0]["x"].dtype == np.float16
    assert set(left[0]["i"].tolist()) <= {0, 1}
    assert left[0]["i"].dtype == np.int64
    assert all(np.array_equal(p["x"], q["x"]) for p, q in zip(left, right, strict=True))
    assert not np.array_equal(left[0]["x"], other[0]["x"])
    assert not np.array_equal(left[0]["x"], left[1]["x"])


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        ({}, "--shape x:1x3x224x224"),
        ({"z": (1,)}, "must name an input"),
        ({"x": (1, 3, 8)}, "got --shape 1x3x8"),
        ({"x": (1, 4, 8, 8)}, "got --shape 1x4x8x8"),
        ({"x": (1, 3, 0, 8)}, "got --shape 1x3x0x8"),
    ],
)
def test_open_dimensions_need_a_shape_that_fits(shapes, rule, wording):
    spec = TensorSpec("x", "float32", ("n", 3, None, "w"))
    with pytest.raises(ConfigError, match=rule):
        random_feeds([spec], shapes=shapes)
    assert random_feeds([spec], shapes={"x": (2, 3, 8, 9)})[0]["x"].shape == (2, 3, 8, 9)
    with pytest.raises(ConfigError) as refusal:
        random_feeds([TensorSpec("s", "str", (1,))])
    wording.check(refusal.value)


def test_the_size_of_a_model_counts_its_external_data(a):
    model = onnx.load(a)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1000, np.float32), "w"))
    onnx.save(model, a, save_as_external_data=True, location="m.data", size_threshold=0)
    assert model_size(a) == a.stat().st_size + 4000


def test_the_command_prints_and_writes_json_and_html(told, tmp_path):
    a, b = (saved(tmp_path / f"{name}.onnx", shape=("n", 3, "h")) for name in "ab")
    words = ("--shape", "x:1x3x5", "--html", tmp_path / "r.html")
    (_, second), out = told(b, "--against", a, *words)
    assert "Latency p50" in out
    assert "Machine" in out
    assert second["latency"]["queries"] == 10
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def two_outputs(path, op="Neg"):
    return saved(path, f"y = Abs (x) z = {op} (y)", outputs="yz")


@pytest.fixture
def held(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 3)).astype(np.float32))
    return path


def test_images_are_what_is_run_and_tell_how_far_two_models_are_apart(told, tmp_path, held):
    a, b = two_outputs(tmp_path / "a.onnx"), two_outputs(tmp_path / "b.onnx", op="Relu")
    (first, second), out = told(b, "--against", a, "--images", held, "--limit", 4)
    assert "accuracy" not in first
    assert second["accuracy"]["samples"] == 4
    sqnr = [output["sqnr_db"] for output in second["accuracy"]["outputs"]]
    assert sqnr == ["inf", pytest.approx(-6.02, 1e-3)]
    assert "output 'z': -6.0 dB" in " ".join(out.split())
    assert "SQNR" not in told(a, "--images", held)[1]  # one model is timed alone
    (_, second), _ = told(b, "--against", a, "--images", held, "--task", "none")
    assert second["accuracy"]["why"] == "no task, as set by --task"


def test_options_that_images_leave_no_room_for_are_refused(refused, a, held, wording):
    wording.check(refused(a, "--images", held, "--seed", 1))
    wording.check(refused(a, "--limit", 1))
    wording.check(refused(a, "--images", held, "--task", "steps"))
    wording.check(refused(a, "--size", "4x4"))


def test_openvino_is_measured_beside_onnx_runtime(told, tmp_path, held, openvino):
    words = (two_outputs(tmp_path / "a.onnx"), "--runtime", "openvino")
    (first, second), _ = told(*words, "--images", held)
    assert (first["label"], second["label"]) == ("a.onnx in ONNX Runtime", "a.onnx in OpenVINO")
    assert first["reference"]
    assert first["latency"]["queries"] == second["latency"]["queries"]
    assert [o["sqnr_db"] for o in second["accuracy"]["outputs"]] == ["inf", "inf"]
    assert told(*words)[0][1].get("accuracy") is None


def test_what_openvino_does_not_run_is_refused(refused, a, tmp_path, openvino, wording):
    words = ("--runtime", "openvino")
    b, bad = saved(tmp_path / "b.onnx", "y = Neg (x)"), saved(tmp_path / "c.onnx", "y = Cosh (x)")
    assert "take one engine" in refused(a, "--against", b, *words)
    (tmp_path / "a.plan").touch()
    wording.check(refused(tmp_path / "a.plan", *words))
    wording.check(refused(bad, *words))


def test_the_real_openvino_computes_the_same(tmp_path, held):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    model = two_outputs(tmp_path / "a.onnx")
    report = bench(model, runtime="openvino", images=held, duration_s=0, threads=1)
    assert all(o.sqnr_db > 100 for o in report.engines[1].accuracy.outputs)


FEEDS = [{"x": np.zeros(1, np.float32)}, {"x": np.ones(1, np.float32)}]


class Recorder:
    """A session that only writes down who ran with what."""

    inputs = outputs = (TensorSpec("x", "float32", (1,)),)

    def __init__(self, name, log=None, seconds=0.0):
        self.name = name
        self.log = [] if log is None else log
        self.seconds = seconds

    def run(self, feed):
        self.log.append((self.name, float(feed["x"][0])))
        time.sleep(self.seconds)
        return dict(feed)


def measured(session, **how):
    return measure({session.name: session}, FEEDS, warmup_ms=0, duration_s=0, **how)[session.name]


class Device(Recorder):
    def device_times(self):
        return DeviceTimes(h2d_ms=1.0, compute_ms=4.0, d2h_ms=2.0, enqueue_ms=3.5)


@pytest.mark.parametrize(("n", "percent", "index"), [
    (10, 90, 8), (10, 99, 9), (100, 99, 98), (1, 99, 0), (1000, 95, 949), (11, 50, 5), (4, 50, 1),
])  # fmt: skip
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
    assert found["a"].queries == 4
    assert found["a"].warmup_queries == 1
    assert len(found["a"].samples_ms) == 4
    alone = Recorder("a")  # is timed in every run
    assert measured(alone, min_iterations=4).queries == 4
    assert len(alone.log) == 1 + 4


@pytest.mark.parametrize(("names", "runs"), [("ab", 2), ("a", 1)])
def test_what_is_told_to_be_left_is_what_the_least_number_of_runs_takes(names, runs, monkeypatch):
    told = []
    phase = "deploy.metrics.latency.timed_phase"
    monkeypatch.setattr(phase, lambda *given: told.append(given) or nullcontext())
    sessions = {name: Recorder(name, [], seconds=0.01) for name in names}
    measure(sessions, FEEDS, warmup_ms=0, duration_s=0, min_iterations=5)
    assert [what for what, _ in told] == ["latency", "latency"]
    assert told[0][1] == 0
    assert told[1][1] >= 5 * runs * len(names) * 0.01


def test_a_run_waits_for_no_other_sessions_threads(monkeypatch):
    entries = []
    options = onnxruntime.SessionOptions
    name = "add_session_config_entry"
    add = getattr(options, name)
    monkeypatch.setattr(options, name, lambda own, *pair: entries.append(pair) or add(own, *pair))
    OrtSession.open(make_model([("Relu", "x", "y")], {"x": [1]}, {"y": [1]}, opset=17))
    assert ("session.force_spinning_stop", "1") in entries


def test_runs_and_loading_are_stopped_until_they_may_continue(monkeypatch):
    model = make_model([("Relu", "x", "y")], {"x": [1]}, {"y": [1]}, opset=17)
    feed = {"x": np.ones(1, np.float32)}
    session = OrtSession.open(model)
    load = onnxruntime.InferenceSession
    bound = session.bind_outputs({"y": ((1,), np.dtype(np.float32))})
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *a, **k: (ort.stop_runs(math.inf), load(*a, **k))
    )
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


def test_throughput_is_queries_over_a_sessions_own_time():
    sessions = {"slow": Recorder("slow", seconds=0.004), "fast": Recorder("fast")}
    slow = measure(sessions, FEEDS, warmup_ms=0, duration_s=0)["slow"]
    assert slow.queries == 10
    assert slow.throughput_qps == pytest.approx(10 / slow.total_host_walltime_s)
    assert slow.total_host_walltime_s == pytest.approx(sum(slow.samples_ms) / 1e3)
    assert slow.latency.min >= 4


def test_a_device_session_is_timed_by_its_device(monkeypatch):
    ticks = (n / 1000 for n in itertools.count())  # each look at the clock is a millisecond later
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("deploy.metrics.latency.time", clock)
    found = measured(Device("gpu"))
    assert found.latency.mean == 7.0
    assert found.gpu_compute.median == 4.0
    assert found.host.mean == pytest.approx(1)
    assert any("CUDA graph" in text for text in found.warnings)
    data = found.to_json(samples=True)
    assert data["h2d"]["mean"] == 1.0
    assert data["samples_ms"] == [7.0] * 10
    assert "samples_ms" not in found.to_json()
    found = measured(Recorder("cpu"))
    assert found.gpu_compute is None
    assert "gpu_compute" not in found.to_json()


def test_a_spread_over_trtexecs_limit_is_said():
    class Uneven(Device):
        def device_times(self):
            ms = 10.0 if len(self.log) % 2 else 1.0
            return DeviceTimes(h2d_ms=0, compute_ms=ms, d2h_ms=0, enqueue_ms=0)

    assert any("unstable" in text for text in measured(Uneven("u")).warnings)


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
