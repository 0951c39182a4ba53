import json
import sys

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.analysis.benchmark import bench, model_size
from deploy.cli import cli
from deploy.errors import BackendError, ConfigError
from deploy.metrics.bench_inputs import random_feeds
from deploy.tensors import TensorSpec


def save(path, shape=("n", 3), op="Relu", name="x"):
    x = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([helper.make_node(op, [name], ["y"])], "g", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def test_two_models_side_by_side(tmp_path):
    a, b = save(tmp_path / "a.onnx"), save(tmp_path / "b.onnx", op="Neg")
    report = bench(b, against=a, threads=1, warmup_ms=0, duration_s=0)
    first, second = report.engines
    assert (first.label, second.label) == ("a.onnx", "b.onnx")
    assert first.reference and not second.reference
    assert first.latency.queries == second.latency.queries == 10
    assert first.size_bytes == a.stat().st_size and first.threads == 1 and first.load_ms > 0


def test_models_of_one_name_in_two_folders_keep_apart(tmp_path):
    (tmp_path / "other").mkdir()
    a, b = save(tmp_path / "a.onnx"), save(tmp_path / "other" / "a.onnx")
    report = bench(b, against=a, threads=1, warmup_ms=0, duration_s=0)
    assert [engine.label for engine in report.engines] == [str(a), str(b)]
    with pytest.raises(ConfigError, match="another model"):
        bench(a, against=a)


def test_models_with_other_inputs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="same inputs"):
        bench(save(tmp_path / "a.onnx"), against=save(tmp_path / "b.onnx", name="z"), threads=1)


def test_random_inputs_are_the_same_for_the_same_seed():
    specs = [TensorSpec("x", "float16", ("n", 3)), TensorSpec("i", "int64", (2,))]
    left, right, other = (random_feeds(specs, seed=seed) for seed in (1, 1, 2))
    assert left[0]["x"].shape == (1, 3) and left[0]["x"].dtype == np.float16
    assert set(left[0]["i"].tolist()) <= {0, 1} and left[0]["i"].dtype == np.int64
    assert all(np.array_equal(p["x"], q["x"]) for p, q in zip(left, right, strict=True))
    assert not np.array_equal(left[0]["x"], other[0]["x"])
    assert not np.array_equal(left[0]["x"], left[1]["x"])


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [({}, "--shape x:1x3x224x224"), ({"z": (1,)}, "must name an input"),
     ({"x": (1, 3, 8)}, "got --shape 1x3x8"), ({"x": (1, 4, 8, 8)}, "got --shape 1x4x8x8"),
     ({"x": (1, 3, 0, 8)}, "got --shape 1x3x0x8")],
)  # fmt: skip
def test_open_dimensions_need_a_shape_that_fits(shapes, rule):
    spec = TensorSpec("x", "float32", ("n", 3, None, "w"))
    with pytest.raises(ConfigError, match=rule):
        random_feeds([spec], shapes=shapes)
    assert random_feeds([spec], shapes={"x": (2, 3, 8, 9)})[0]["x"].shape == (2, 3, 8, 9)


def test_inputs_of_text_are_refused():
    with pytest.raises(ConfigError, match="must be of numbers"):
        random_feeds([TensorSpec("s", "str", (1,))])


def test_the_size_of_a_model_counts_its_external_data(tmp_path):
    path = save(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1000, np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert model_size(path) == path.stat().st_size + 4000


def test_the_command_prints_and_writes_json_and_html(tmp_path):
    a, b = save(tmp_path / "a.onnx", ("n", 3, "h")), save(tmp_path / "b.onnx", ("n", 3, "h"))
    options = ["--warmup", "0", "--duration", "0", "--threads", "1", "--shape", "x:1x3x5"]
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    result = CliRunner().invoke(cli, ["bench", str(b), "--against", str(a), *options, *files])
    assert result.exit_code == 0, result.output
    assert "Latency p50" in result.output and "Machine" in result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["engines"][1]["latency"]["queries"] == 10
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("shape", ["x", "x:", "x:1xtwo", ":1x2", "x:-1"])
def test_a_shape_that_cannot_be_read_is_a_usage_error(shape, tmp_path):
    result = CliRunner().invoke(cli, ["bench", str(save(tmp_path / "a.onnx")), "--shape", shape])
    assert result.exit_code == 2 and "name:1x3x224x224" in result.output


def two_outputs(path, op="Neg"):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in "yz"]
    nodes = [helper.make_node("Abs", ["x"], ["y"]), helper.make_node(op, ["y"], ["z"])]
    graph = helper.make_graph(nodes, "g", [x], ends)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.fixture
def held(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 3)).astype(np.float32))
    return path


def bench_cli(*words):
    words = ("bench", *words, "--duration", 0, "--warmup", 0, "--threads", 1)
    return CliRunner().invoke(cli, [str(word) for word in words])


def told(result):
    assert isinstance(result.exception, ConfigError | BackendError), result.output
    return str(result.exception)


def test_images_are_what_is_run_and_tell_how_far_two_models_are_apart(tmp_path, held):
    a, b = two_outputs(tmp_path / "a.onnx"), two_outputs(tmp_path / "b.onnx", op="Relu")
    words = (b, "--against", a, "--images", held, "--json", tmp_path / "r.json")
    result = bench_cli(*words, "--limit", 4)
    assert result.exit_code == 0, result.exception
    first, second = json.loads((tmp_path / "r.json").read_text())["engines"]
    assert "accuracy" not in first
    assert second["accuracy"]["samples"] == 4
    assert [o["sqnr_db"] for o in second["accuracy"]["outputs"]] == [
        "inf",
        pytest.approx(-6.02, 1e-3),
    ]
    assert "output 'z': -6.0 dB" in " ".join(result.stdout.split())


def test_one_model_on_images_is_timed_alone(tmp_path, held):
    result = bench_cli(two_outputs(tmp_path / "a.onnx"), "--images", held)
    assert result.exit_code == 0 and "SQNR" not in result.stdout


def test_options_that_images_leave_no_room_for_are_refused(tmp_path, held):
    a = save(tmp_path / "a.onnx")
    assert "--seed shapes random inputs" in told(bench_cli(a, "--images", held, "--seed", 1))
    assert "--limit goes with --images" in told(bench_cli(a, "--limit", 1))
    assert "--size goes with --images" in told(bench_cli(a, "--size", "4x4"))


def test_openvino_is_measured_beside_onnx_runtime(tmp_path, held, openvino):
    a = two_outputs(tmp_path / "a.onnx")
    words = (a, "--runtime", "openvino", "--json", tmp_path / "r.json")
    assert bench_cli(*words, "--images", held).exit_code == 0
    first, second = json.loads((tmp_path / "r.json").read_text())["engines"]
    assert (first["label"], second["label"]) == ("a.onnx in ONNX Runtime", "a.onnx in OpenVINO")
    assert first["reference"] and first["latency"]["queries"] == second["latency"]["queries"]
    assert [o["sqnr_db"] for o in second["accuracy"]["outputs"]] == ["inf", "inf"]
    assert bench_cli(*words).exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text())["engines"][1].get("accuracy") is None


def test_what_openvino_does_not_run_is_refused(tmp_path, openvino):
    a, b = save(tmp_path / "a.onnx"), save(tmp_path / "b.onnx", op="Neg")
    assert "take one engine" in told(bench_cli(a, "--against", b, "--runtime", "openvino"))
    said = told(bench_cli(tmp_path / "a.plan", "--runtime", "openvino"))
    assert "OpenVINO reads ONNX models" in said
    bad = save(tmp_path / "c.onnx", op="Cosh")
    assert "Operation Cosh is not supported" in told(bench_cli(bad, "--runtime", "openvino"))


def test_openvino_that_is_missing_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    said = told(bench_cli(save(tmp_path / "a.onnx"), "--runtime", "openvino"))
    assert "calib8[openvino]" in said


def test_the_real_openvino_computes_the_same(tmp_path, held):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    report = bench(
        two_outputs(tmp_path / "a.onnx"), runtime="openvino", images=held, duration_s=0, threads=1
    )
    assert all(o.sqnr_db > 100 for o in report.engines[1].accuracy.outputs)
