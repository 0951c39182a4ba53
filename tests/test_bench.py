"""The command bench: batches, kernels, shapes, streams and two models."""

import json
import re
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from deploy.analysis.benchmark import bench, model_size
from deploy.errors import ConfigError
from deploy.feed.bench_inputs import random_feeds
from deploy.metrics.kernels import KernelTime, time_kernels
from deploy.metrics.latency import MIN_RUNS_FOR_P95, measure
from deploy.report import Report, to_html, to_markdown, to_screen
from deploy.report.parts import BatchRow, EngineRow
from deploy.tensors import TensorSpec
from tests.models import as_float32, build_net, make_model, save_fixed_batch, save_net

QUICK_OPTIONS = ("--duration", 0, "--warm-up", 0, "--threads", 1)


def save_model(path, nodes="y = Relu (x)", *, shape=("n", 3), x="x", outputs="y"):
    shapes = {x: shape}, dict.fromkeys(outputs, shape)
    return save_net(make_model(nodes, *shapes, opset=17, ir=9), path)


@pytest.fixture
def model_a(tmp_path):
    return save_model(tmp_path / "a.onnx")


@pytest.fixture
def bench_json(run, tmp_path):
    """(*arguments of bench) -> its engines as JSON, and what it prints."""

    def call(*arguments):
        out = run.ok("bench", *arguments, *QUICK_OPTIONS, "--json", tmp_path / "r.json")
        return json.loads((tmp_path / "r.json").read_text())["engines"], out

    return call


@pytest.fixture
def refusal_of(run):
    return lambda *arguments: run.fails("bench", *arguments, *QUICK_OPTIONS)


@pytest.fixture
def measured_shapes(monkeypatch):
    """Shapes of x in the first feed of everything that was measured."""
    shapes = []

    def measure_and_record(sessions, feeds, **options):
        shapes.append(feeds[0]["x"].shape)
        return measure(sessions, feeds, **options)

    monkeypatch.setattr("deploy.analysis.benchmark.measure", measure_and_record)
    return shapes


def test_every_batch_is_measured(bench_json, model_a, tmp_path, measured_shapes):
    engines, out = bench_json(
        save_model(tmp_path / "b.onnx"), "--against", model_a, "--batch", "4,1,2,4"
    )
    for engine in engines:
        assert [row["batch"] for row in engine["sweep"]] == [1, 2, 4]
    assert measured_shapes == [(1, 3), (2, 3), (4, 3)]
    first_engine = engines[0]
    assert first_engine["latency"] == first_engine["sweep"][0]["latency"]
    for row in first_engine["sweep"]:
        assert row["items_qps"] == pytest.approx(
            1e3 * row["batch"] / row["latency"]["latency"]["p50"]
        )
    assert re.search(r"^Batch +1 +1$", out, re.MULTILINE)
    assert re.search(r"^Batches +a.onnx( +b.onnx +batch$|  b.onnx)", out, re.MULTILINE)
    assert out.count("best: ") == 2


def test_images_are_stacked_to_batches(bench_json, model_a, sample_file, measured_shapes):
    bench_json(model_a, "--images", sample_file, "--batch", "1,8")
    assert measured_shapes == [(1, 3), (8, 3)]


def test_batch_of_fixed_model_is_refused(refusal_of, model_a, tmp_path, wording):
    fixed = save_model(tmp_path / "fixed.onnx", shape=(1, 3))
    message = refusal_of(fixed, "--batch", "1,2")
    assert "first dimension" in message
    assert "got [1, 3] for 'x'" in message
    assert "got [1, 3] for 'x'" in refusal_of(model_a, "--against", fixed, "--batch", "1")
    nodes = "s = Constant <value_ints = [1, 3]> () y = Reshape (x, s)"
    model = save_model(tmp_path / "b.onnx", nodes)
    wording.check(refusal_of(model, "--batch", "1,2"))


def test_images_of_several_sizes_cannot_batch(refusal_of, bench_json, tmp_path, wording):
    (folder := tmp_path / "rows").mkdir()
    for width in (3, 4):
        np.save(folder / f"{width}.npy", np.zeros((1, width), np.float32))
    model = save_model(tmp_path / "a.onnx", shape=("n", "w"))
    wording.check(refusal_of(model, "--images", folder, "--batch", "2"))
    assert "write 1 there" in refusal_of(model, "--batch", "2", "--shape", "x:4x5")
    assert bench_json(model, "--batch", "2", "--shape", "x:1x5")[0][0]["sweep"][0]["batch"] == 2


BATCHES = ["0", "1,,2", "two", "-1", "1,65537", ""]
SHAPES = ["x", "x:", "x:1xtwo", ":1x2", "x:-1"]


@pytest.mark.parametrize(
    ("option", "value", "form"),
    [
        *(("--batch", value, "such as 1,2,4,8") for value in BATCHES),
        *(("--shape", value, "name:1x3x224x224") for value in SHAPES),
    ],
)
def test_wrong_batch_or_shape_is_refused(run, model_a, option, value, form):
    code, _, err = run("bench", model_a, option, value)
    assert code == 2
    assert form in err


def swept_row(label, *rates):
    latency = measure({"x": IdleSession()}, [{}], warmup_ms=0, duration_s=0)["x"]
    rows = [BatchRow(batch=2**n, items_qps=r, latency=latency) for n, r in enumerate(rates)]
    return EngineRow(label=label, latency=rows[0].latency, sweep=tuple(rows))


class IdleSession:
    inputs = outputs = ()
    threads = 1

    def run(self, feed):
        return {}


def test_every_report_marks_the_best_batch():
    report = Report(engines=(swept_row("a<b", 100, 300, 200), swept_row("c", 50, 60, 70)))
    screen = to_screen(report)
    page = to_html(report)
    text = to_markdown(report)
    for form in (screen, page, text):
        assert form.count("best: ") == 2
    assert "## Batches" in text
    assert "Batches</h2>" in page
    assert "a&lt;b" in page
    assert "a<b" not in page


def test_profile_lists_slowest_kernels_first(bench_json, small_cnn):
    (engine,), out = bench_json(small_cnn, "--profile")
    times = [kernel["ms"] for kernel in engine["kernels"]]
    assert times == sorted(times, reverse=True)
    assert {"Conv", "Gemm", "MaxPool"} <= {kernel["kind"] for kernel in engine["kernels"]}
    assert re.search(r"^Kernels +time +share +kind +kernel$", out, re.M)


def test_profile_of_two_models_groups_kinds(bench_json, model_a, tmp_path):
    _, out = bench_json(
        save_model(tmp_path / "b.onnx", "y = Neg (x)"), "--against", model_a, "--profile"
    )
    assert re.search(r"^Kernels +a.onnx +b.onnx +kind$", out, re.MULTILINE)
    assert re.search(r"ms in 1 +-  Relu$", out, re.M)
    assert re.search(r"- .*ms in 1  Neg$", out, re.M)


def test_profile_counts_branches_only_once(bench_json, tmp_path):
    nodes = """
        s = ReduceSum <keepdims = 0> (x) c = Cast <to = 9> (s)
        y = If <then_branch = relu () => (float[n, 3] o) { o = Relu (x) },
                else_branch = neg () => (float[n, 3] o) { o = Neg (x) }> (c)
    """
    kernels = bench_json(save_model(tmp_path / "a.onnx", nodes), "--profile")[0][0]["kernels"]
    kinds = {kernel["kind"] for kernel in kernels}
    assert "If" not in kinds
    assert kinds & {"Relu", "Neg"}


def test_kernel_time_is_p50_times_runs():
    class LayeredSession(IdleSession):
        def layer_times(self, feeds, runs):
            for run in range(runs):
                ms = 100 if run < 2 else run
                yield "once", "A", ms
                yield from [("twice", "B", ms / 2)] * 2

    kernels = time_kernels(
        "x", LayeredSession(), [{}], open_session=LayeredSession, duration_ms=0, p50_ms=1
    )
    assert [(k.name, k.kind, k.ms) for k in kernels] == [("once", "A", 6.0), ("twice", "B", 6.0)]


def test_profile_needs_a_profiling_runtime(refusal_of, model_a, openvino):
    assert "leave --profile out" in refusal_of(model_a, "--runtime", "openvino", "--profile")


def test_kernels_without_kind_are_listed_singly():
    kernels = tuple(KernelTime(name=f"k{n}", kind="", ms=12.0 - n) for n in range(12))
    rows = tuple(EngineRow(label=label, kernels=kernels) for label in ("a", "b"))
    screen = to_screen(Report(engines=rows))
    assert screen.count("k0") == 2
    assert "2 more kernels of 3.8 %" in screen
    page = to_html(Report(engines=rows))
    assert len(re.findall(r"<td[^>]*>k11</td>", page)) == 2
    assert "by kind" not in page
    assert "\n## Kernels of b\n" in to_markdown(Report(engines=rows))


@pytest.fixture
def int8_engine(tmp_path):
    """A build of a model whose height and width are open, calibrated at 12x20."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, (4, n, 3, 3)) for name, n in (("w", 3), ("v", 4))}
    ends = {"x": ["n", 3, "h", "w"]}, {"y": ["n", 4, "h2", "w2"]}
    nodes = "c = Conv (x, w) y = Conv (c, v)"
    model = make_model(nodes, *ends, as_float32(weights), opset=17, ir=9)
    out = build_net(model, rng.normal(0, 1, (4, 3, 12, 20)), tmp_path, "--effort", 0)
    return out / "net.int8.onnx"


def test_open_shapes_come_from_the_build(bench_json, int8_engine, tmp_path, measured_shapes):
    _, out = bench_json(int8_engine, "--against", tmp_path / "net.onnx")
    assert measured_shapes[-1] == (1, 3, 12, 20)
    assert "1x3x12x20" in " ".join(out.split())
    bench_json(tmp_path / "net.onnx", "--against", int8_engine, "--batch", "2")
    assert measured_shapes[-1] == (2, 3, 12, 20)
    _, out = bench_json(int8_engine, "--shape", "x:1x3x8x9")  # what is given stands before it
    assert measured_shapes[-1] == (1, 3, 8, 9)
    assert "as the build" not in out


def test_manifest_without_matching_shape_is_ignored(refusal_of, int8_engine, wording):
    path = int8_engine.parent / "calib8/manifest.json"
    document = json.loads(path.read_text())
    assert document["made_from"]["shapes"] == {"x": [1, 3, 12, 20]}
    foreign_engine = int8_engine.with_name("other.onnx")  # which no build made
    foreign_engine.write_bytes(int8_engine.read_bytes())
    wording.check(refusal_of(foreign_engine))
    broken = [[1, 3, 0, 8], [1, 4, 8, 8], [True, 3, 8, 8], [1, 3, 8], 5]
    for shapes in (None, [], *({"x": dims} for dims in broken)):
        document["made_from"]["shapes"] = shapes
        path.write_text(json.dumps(document))
        wording.check(refusal_of(int8_engine))


def test_short_measurement_warns_and_omits_percentiles(bench_json, model_a):
    assert "10 iterations, so p95" in bench_json(model_a)[1]
    for runs, shown in (
        (MIN_RUNS_FOR_P95 - 1, []),
        (MIN_RUNS_FOR_P95, ["p95"]),
        (99, ["p95"]),
        (100, ["p95", "p99"]),
    ):
        latency = measure(
            {"x": IdleSession()}, [{}], warmup_ms=0, duration_s=0, min_iterations=runs
        )["x"]
        assert any("iterations, so p95" in text for text in latency.warnings) == (
            runs < MIN_RUNS_FOR_P95
        )
        table = to_markdown(Report(engines=(EngineRow(label="x", latency=latency),)))
        assert re.findall(r"Latency (p9[59])", table) == shown


def test_two_models_are_measured_together(model_a, tmp_path):
    model_b = save_model(tmp_path / "b.onnx", "y = Neg (x)")
    baseline, candidate = bench(
        model_b, against=model_a, threads=1, warmup_ms=0, duration_s=0
    ).engines
    assert (baseline.label, candidate.label) == ("a.onnx", "b.onnx")
    assert baseline.reference
    assert not candidate.reference
    assert baseline.latency.queries == candidate.latency.queries == 10
    assert baseline.size_bytes == model_a.stat().st_size
    assert baseline.threads == 1
    assert baseline.load_ms > 0


def test_models_of_equal_name_show_paths(model_a, tmp_path):
    (tmp_path / "other").mkdir()
    model_b = save_model(tmp_path / "other" / "a.onnx")
    report = bench(model_b, against=model_a, threads=1, warmup_ms=0, duration_s=0)
    assert [engine.label for engine in report.engines] == [str(model_a), str(model_b)]
    with pytest.raises(ConfigError, match="another model"):
        bench(model_a, against=model_a)
    wide = save_fixed_batch(model_a, tmp_path / "wide.onnx", batch=2)
    with pytest.raises(ConfigError, match=r"same inputs, got x \(float32 \[1.*\[2"):
        bench(wide, against=save_fixed_batch(model_a, tmp_path / "c.onnx", batch=1), threads=1)
    with pytest.raises(ConfigError, match="same inputs"):
        bench(model_a, against=save_model(tmp_path / "b.onnx", "y = Relu (z)", x="z"), threads=1)


def test_random_inputs_follow_the_seed():
    specs = [TensorSpec("x", "float16", ("n", 3)), TensorSpec("i", "int64", (2,))]
    first_feeds, same_feeds, other_feeds = (random_feeds(specs, seed=seed) for seed in (1, 1, 2))
    assert first_feeds[0]["x"].shape == (1, 3)
    assert first_feeds[0]["x"].dtype == np.float16
    assert set(first_feeds[0]["i"].tolist()) <= {0, 1}
    assert first_feeds[0]["i"].dtype == np.int64
    assert all(np.array_equal(p["x"], q["x"]) for p, q in zip(first_feeds, same_feeds, strict=True))
    assert not np.array_equal(first_feeds[0]["x"], other_feeds[0]["x"])
    assert not np.array_equal(first_feeds[0]["x"], first_feeds[1]["x"])


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
def test_open_dimensions_need_a_matching_shape(shapes, rule, wording):
    spec = TensorSpec("x", "float32", ("n", 3, None, "w"))
    with pytest.raises(ConfigError, match=rule):
        random_feeds([spec], shapes=shapes)
    assert random_feeds([spec], shapes={"x": (2, 3, 8, 9)})[0]["x"].shape == (2, 3, 8, 9)
    with pytest.raises(ConfigError) as refusal:
        random_feeds([TensorSpec("s", "str", (1,))])
    wording.check(refusal.value)


def test_model_size_counts_external_data(model_a):
    model = onnx.load(model_a)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1000, np.float32), "w"))
    onnx.save(model, model_a, save_as_external_data=True, location="m.data", size_threshold=0)
    model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
    model.graph.initializer[1].external_data[0].value = "./m.data"  # it lies in the same file
    model_a.write_bytes(model.SerializeToString())
    assert model_size(model_a) == model_a.stat().st_size + 4000


def test_bench_writes_screen_json_and_html(bench_json, tmp_path):
    model_a, model_b = (save_model(tmp_path / f"{name}.onnx", shape=("n", 3, "h")) for name in "ab")
    options = ("--shape", "x:1x3x5", "--html", tmp_path / "r.html")
    (_, second), out = bench_json(model_b, "--against", model_a, *options)
    assert "CPU time p50" in out  # of one thread
    assert second["latency"]["is_cpu_time"]
    assert "Machine" in out
    assert second["latency"]["queries"] == 10
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def two_outputs(path, op="Neg"):
    return save_model(path, f"y = Abs (x) z = {op} (y)", outputs="yz")


@pytest.fixture
def sample_file(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 3)).astype(np.float32))
    return path


def test_images_compare_outputs_of_two_models(bench_json, tmp_path, sample_file):
    model_a, model_b = two_outputs(tmp_path / "a.onnx"), two_outputs(tmp_path / "b.onnx", op="Relu")
    (reference, second), out = bench_json(
        model_b, "--against", model_a, "--images", sample_file, "--limit", 4
    )
    assert "accuracy" not in reference
    assert second["accuracy"]["samples"] == 4
    sqnr = [output["sqnr_db"] for output in second["accuracy"]["outputs"]]
    assert sqnr == ["inf", pytest.approx(-6.02, 1e-3)]
    assert "output 'z': -6.0 dB" in " ".join(out.split())
    assert "SQNR" not in bench_json(model_a, "--images", sample_file)[1]  # one model is timed alone
    (_, second), _ = bench_json(
        model_b, "--against", model_a, "--images", sample_file, "--task", "none"
    )
    assert second["accuracy"]["why"] == "no task, as set by --task"


def test_random_engine_is_named(bench_json, model_a, tmp_path, sample_file):
    folder = tmp_path / "b"
    folder.mkdir()
    model_b = save_model(folder / model_a.name, "r = RandomNormalLike (x) y = Add (r, x)")
    out = bench_json(model_b, "--against", model_a, "--images", sample_file)[1]
    assert f"random: {model_b} gives" in " ".join(out.split())


def test_random_engine_is_named_once(bench_json, tmp_path, sample_file, openvino):
    model = save_model(tmp_path / "r.onnx", "r = RandomNormalLike (x) y = Add (r, x)")
    out = " ".join(bench_json(model, "--runtime", "openvino", "--images", sample_file)[1].split())
    assert "random: r.onnx in ONNX Runtime gives" in out
    assert "random: r.onnx in OpenVINO" not in out


def test_skipped_images_are_counted(bench_json, model_a, tmp_path):
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "a.npy", np.ones((1, 3), np.float32))
    (folder / "b.npy").write_bytes(b"no array")
    assert "1 skipped" in bench_json(model_a, "--images", folder, "--skip-bad")[1]


def test_options_against_images_are_refused(refusal_of, model_a, sample_file, wording):
    wording.check(refusal_of(model_a, "--images", sample_file, "--seed", 1))
    wording.check(refusal_of(model_a, "--limit", 1))
    wording.check(refusal_of(model_a, "--images", sample_file, "--task", "steps"))
    wording.check(refusal_of(model_a, "--size", "4x4"))


def test_openvino_is_measured_beside_onnxruntime(bench_json, tmp_path, sample_file, openvino):
    options = (two_outputs(tmp_path / "a.onnx"), "--runtime", "openvino")
    (onnxruntime_engine, second), _ = bench_json(*options, "--images", sample_file)
    assert (onnxruntime_engine["label"], second["label"]) == (
        "a.onnx in ONNX Runtime",
        "a.onnx in OpenVINO",
    )
    assert onnxruntime_engine["reference"]
    assert onnxruntime_engine["latency"]["queries"] == second["latency"]["queries"]
    assert [o["sqnr_db"] for o in second["accuracy"]["outputs"]] == ["inf", "inf"]
    assert bench_json(*options)[0][1].get("accuracy") is None


def test_openvino_refuses_other_engines(refusal_of, model_a, tmp_path, openvino, wording):
    options = ("--runtime", "openvino")
    model_b = save_model(tmp_path / "b.onnx", "y = Neg (x)")
    bad = save_model(tmp_path / "c.onnx", "y = Cosh (x)")
    assert "take one engine" in refusal_of(model_a, "--against", model_b, *options)
    (tmp_path / "a.plan").touch()
    wording.check(refusal_of(tmp_path / "a.plan", *options))
    wording.check(refusal_of(bad, *options))


def test_missing_openvino_names_its_extra(refusal_of, model_a, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "'.[openvino]'" in refusal_of(model_a, "--runtime", "openvino")


def test_real_openvino_computes_the_same(tmp_path, sample_file):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    model = two_outputs(tmp_path / "a.onnx")
    report = bench(model, runtime="openvino", images=sample_file, duration_s=0, threads=1)
    assert all(o.sqnr_db > 100 for o in report.engines[1].accuracy.outputs)
