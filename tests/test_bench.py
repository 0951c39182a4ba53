"""`calib8 bench` beyond two latencies: batches, kernels, shapes of the build, streams."""

import json
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.metrics.kernels import Kernel, kernels_of
from deploy.metrics.latency import FEW, measure
from deploy.report import Report, to_html, to_markdown, to_screen
from deploy.report.parts import BatchRow, EngineRow

QUICK = ("--duration", 0, "--warmup", 0, "--threads", 1)


def saved(path, nodes, shape=("n", 3)):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def relu(path, shape=("n", 3)):
    return saved(path, [helper.make_node("Relu", ["x"], ["y"], name="r")], shape)


@pytest.fixture
def told(run, tmp_path):
    """(words of bench) -> its engines as JSON, and the screen."""

    def call(*words):
        path = tmp_path / "r.json"
        code, out, err = run("bench", *words, *QUICK, "--json", path)
        assert code == 0, err
        return json.loads(path.read_text())["engines"], out

    return call


@pytest.fixture
def refused(run):
    def call(*words):
        code, _, err = run("bench", *words, *QUICK)
        assert code == 1
        return err

    return call


@pytest.fixture
def shapes_run(monkeypatch):
    """Shapes of every feed that was measured."""
    seen = []

    def watched(sessions, feeds, **rest):
        seen.append([{name: array.shape for name, array in feed.items()} for feed in feeds])
        return measure(sessions, feeds, **rest)

    monkeypatch.setattr("deploy.analysis.benchmark.measure", watched)
    return seen


# ---- batches --------------------------------------------------------------------------------


def test_each_batch_is_measured_and_the_smallest_is_the_headline(told, tmp_path, shapes_run):
    a, b = relu(tmp_path / "a.onnx"), relu(tmp_path / "b.onnx")
    (first, second), out = told(b, "--against", a, "--batch", "4,1,2,4")
    assert [[row["batch"] for row in engine["sweep"]] for engine in (first, second)] == [
        [1, 2, 4]
    ] * 2
    assert [feeds[0]["x"] for feeds in shapes_run] == [(1, 3), (2, 3), (4, 3)]
    assert first["latency"] == first["sweep"][0]["latency"]
    for row in first["sweep"]:
        p50 = row["latency"]["host"]["p50"]
        assert row["items_qps"] == pytest.approx(1e3 * row["batch"] / p50)
    assert re.search(r"^Batch +1 +1$", out, re.MULTILINE)
    assert re.search(
        r"^Batches +a.onnx +b.onnx +batch$|^Batches +a.onnx  b.onnx", out, re.MULTILINE
    )
    assert out.count("best: ") == 2


def test_images_are_stacked_to_a_batch_in_turn(told, tmp_path, shapes_run):
    held = tmp_path / "held.npz"
    np.savez(held, x=np.arange(9, dtype=np.float32).reshape(3, 3))
    told(relu(tmp_path / "a.onnx"), "--images", held, "--batch", "1,5")
    assert [feeds[0]["x"] for feeds in shapes_run] == [(1, 3), (5, 3)]


def test_images_of_several_sizes_are_no_batch(refused, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for width in (3, 4):
        np.save(folder / f"{width}.npy", np.zeros((1, width), np.float32))
    a = relu(tmp_path / "a.onnx", ("n", "w"))
    assert "must have one size" in refused(a, "--images", folder, "--batch", "2")


def test_a_model_that_fixes_its_batch_is_refused_a_sweep(refused, tmp_path):
    said = refused(relu(tmp_path / "a.onnx", (1, 3)), "--batch", "1,2")
    assert "first dimension" in said and "got [1, 3] for 'x'" in said
    both = relu(tmp_path / "b.onnx"), "--against", tmp_path / "a.onnx"
    assert "got [1, 3] for 'x'" in refused(*both, "--batch", "1")


def test_a_batch_that_the_model_cannot_run_is_named(refused, tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=[1, 3]),
        helper.make_node("Reshape", ["x", "s"], ["y"]),
    ]
    assert "with a batch of 2: " in refused(saved(tmp_path / "a.onnx", nodes), "--batch", "1,2")


def test_a_shape_that_says_a_batch_beside_the_batches_is_refused(refused, told, tmp_path):
    a = relu(tmp_path / "a.onnx", ("n", "w"))
    assert "write 1 there" in refused(a, "--batch", "2", "--shape", "x:4x5")
    assert told(a, "--batch", "2", "--shape", "x:1x5")[0][0]["sweep"][0]["batch"] == 2


@pytest.mark.parametrize("batch", ["0", "1,,2", "two", "-1", "1,65537", ""])
def test_what_is_no_batch_is_a_usage_error(run, tmp_path, batch):
    code, _, err = run("bench", relu(tmp_path / "a.onnx"), "--batch", batch)
    assert code == 2 and "such as 1,2,4,8" in err


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
    screen, page, text = to_screen(report), to_html(report), to_markdown(report)
    for form in (screen, page, text):
        assert form.count("best: ") == 2
    assert "## Batches" in text and "Batches</h2>" in page
    (figure,) = re.findall(r"<svg[^>]*><title>Throughput by batch.*?</svg>", page, re.DOTALL)
    assert figure.count("<circle") == 6 and figure.count('r="6"') == 2
    assert "a&lt;b, batch 2: 300 /s" in figure and "a<b" not in figure
    names = [float(y) for y in re.findall(r'<text class="name[^>]* y="([\d.]+)"', figure)]
    assert len(names) == 2 and names[1] - names[0] >= 15  # none over another


def test_one_batch_alone_is_not_drawn():
    report = Report(engines=(swept("a", 100),))
    assert "Throughput by batch" not in to_html(report) and "best: " in to_html(report)


# ---- kernels --------------------------------------------------------------------------------


def test_a_profile_tells_every_kernel_the_slowest_first(told, small_cnn):
    (engine,), out = told(small_cnn, "--profile")
    times = [kernel["ms"] for kernel in engine["kernels"]]
    assert times == sorted(times, reverse=True)
    assert {"Conv", "Gemm", "MaxPool"} <= {kernel["kind"] for kernel in engine["kernels"]}
    assert re.search(r"^Kernels +time +share +kind +kernel$", out, re.M)


def test_a_profile_of_two_models_is_by_kind(told, tmp_path):
    a = relu(tmp_path / "a.onnx")
    b = saved(tmp_path / "b.onnx", [helper.make_node("Neg", ["x"], ["y"])])
    _, out = told(b, "--against", a, "--profile")
    assert re.search(r"^Kernels +a.onnx +b.onnx +kind$", out, re.MULTILINE)
    assert re.search(r"ms in 1 +-  Relu$", out, re.M) and re.search(r"- .*ms in 1  Neg$", out, re.M)


def test_a_body_is_told_and_what_runs_it_is_not_told_twice(told, tmp_path):
    inner = helper.make_tensor_value_info("o", TensorProto.FLOAT, ["n", 3])
    body = [
        helper.make_graph([helper.make_node(op, ["x"], ["o"])], op, [], [inner])
        for op in ("Relu", "Neg")
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=body[0], else_branch=body[1]),
    ]
    kernels = told(saved(tmp_path / "a.onnx", nodes), "--profile")[0][0]["kernels"]
    kinds = {kernel["kind"] for kernel in kernels}
    assert "If" not in kinds and kinds & {"Relu", "Neg"}


def test_a_kernel_takes_the_p50_of_its_runs_times_how_often_it_runs():
    class Told(Still):
        def layer_times(self, feeds, runs):
            for run in range(runs):
                early = 100 if run < 2 else run
                yield "once", "A", early
                yield from [("twice", "B", early / 2)] * 2

    found = kernels_of("x", Told(), [{}], again=Told, duration_ms=0, p50_ms=1)
    assert found == (Kernel(name="once", kind="A", ms=6.0), Kernel(name="twice", kind="B", ms=6.0))


def test_a_runtime_that_tells_no_kernels_is_refused_before_anything_is_timed(
    refused, tmp_path, openvino
):
    said = refused(relu(tmp_path / "a.onnx"), "--runtime", "openvino", "--profile")
    assert "leave --profile away" in said


def test_kernels_without_a_kind_are_told_one_by_one():
    kernels = tuple(Kernel(name=f"k{n}", kind="", ms=12.0 - n) for n in range(12))
    rows = tuple(EngineRow(label=label, kernels=kernels) for label in ("a", "b"))
    screen = to_screen(Report(engines=rows))
    assert screen.count("k0") == 2 and "2 more kernels of 3.8 %" in screen
    page = to_html(Report(engines=rows))
    assert len(re.findall(r"<td[^>]*>k11</td>", page)) == 2 and "by kind" not in page
    assert "## Kernels of b" in to_markdown(Report(engines=rows))


# ---- shapes of the build --------------------------------------------------------------------


@pytest.fixture
def built(run, tmp_path):
    """A build of a model whose height and width are open, calibrated at 12x20."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.normal(0, 0.3, (4, rows, 3, 3)).astype(np.float32), name)
        for name, rows in (("w", 3), ("v", 4))
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, "h2", "w2"]),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="c"),
        helper.make_node("Conv", ["c", "v"], ["y"], name="d"),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = tmp_path / "det.onnx"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), model)
    np.save(tmp_path / "x.npy", rng.normal(0, 1, (4, 3, 12, 20)).astype(np.float32))
    words = ("--images", tmp_path / "x.npy", "--out", tmp_path / "b")
    code, _, err = run("build", model, *words, "--effort", 0, "--duration", 0)
    assert code == 0, err
    return tmp_path / "b" / "det.int8.onnx"


def test_open_shapes_are_those_that_the_build_calibrated_with(told, built, tmp_path, shapes_run):
    _, out = told(built, "--against", tmp_path / "det.onnx")
    assert shapes_run[-1][0] == {"x": (1, 3, 12, 20)}
    assert "1x3x12x20" in " ".join(out.split())
    told(tmp_path / "det.onnx", "--against", built, "--batch", "2")
    assert shapes_run[-1][0] == {"x": (2, 3, 12, 20)}


def test_a_shape_that_is_given_stands_before_that_of_the_build(told, built, shapes_run):
    _, out = told(built, "--shape", "x:1x3x8x9")
    assert shapes_run[-1][0] == {"x": (1, 3, 8, 9)} and "as the build" not in out


def test_a_manifest_that_tells_no_shape_that_fits_is_passed_over(refused, built):
    path = built.parent / "manifest.json"
    document = json.loads(path.read_text())
    assert document["made_from"]["shapes"] == {"x": [1, 3, 12, 20]}
    broken = [[1, 3, 0, 8], [1, 4, 8, 8], [True, 3, 8, 8], [1, 3, 8], 5]
    for shapes in (None, [], *({"x": dims} for dims in broken)):
        document["made_from"]["shapes"] = shapes
        path.write_text(json.dumps(document))
        assert "give it, e.g. --shape" in refused(built)


def test_a_file_that_no_build_made_has_no_shapes(refused, built):
    stranger = built.with_name("other.onnx")
    stranger.write_bytes(built.read_bytes())
    assert "give it, e.g. --shape" in refused(stranger)


# ---- streams and time -----------------------------------------------------------------------


def test_streams_of_onnx_models_share_the_cores(run, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.analysis.benchmark.usable_cores", lambda: 6)
    words = ("bench", relu(tmp_path / "a.onnx"), "--streams", 3, "--duration", 0, "--warmup", 0)
    assert "3 streams at once, 2 threads" in run(*words)[1]
    assert "3 streams at once, 1 thread" in run(*words, "--threads", 1)[1]


def test_a_measurement_that_was_too_short_says_so(told, tmp_path):
    assert "10 iterations alone" in told(relu(tmp_path / "a.onnx"))[1]
    found = measure({"x": Still()}, [{}], warmup_ms=0, duration_s=0, min_iterations=FEW)["x"]
    assert not any("iterations alone" in text for text in found.warnings)
