"""Which TensorRT reads what is written: models lowered for it, lines and headers of its version."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.trt_cache import parse
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt import sdk

F32 = TensorProto.FLOAT


def node(op, reads, made, **given):
    return helper.make_node(op, reads.split(","), made.split(), name=f"/{op}_{made[0]}", **given)


def newest(*, smooth=False) -> onnx.ModelProto:
    """Convs with what came with opset 17 to 20 between them; `smooth`: what only 18 has, too."""
    rng = np.random.default_rng(2)
    held = {
        "w1": rng.normal(scale=0.3, size=(8, 3, 3, 3)).astype(np.float32),
        "w2": rng.normal(scale=0.3, size=(4, 4, 3, 3)).astype(np.float32),
        "s": np.linspace(0.5, 1.5, 16, dtype=np.float32),
        "b": np.linspace(-1, 1, 16, dtype=np.float32),
        "axes": np.array([2, 3], np.int64),
        "scales": np.array([1, 1, 0.5, 0.5], np.float32),
        "fc": rng.normal(size=(4, 5)).astype(np.float32),
    }
    nodes = [
        node("Conv", "x,w1", "c", pads=[1, 1, 1, 1]),
        node("Gelu", "c", "g"),
        node("Split", "g", "h i", axis=1, num_outputs=2),
        node("Add", "h,i", "a"),
        node("LayerNormalization", "a,s,b", "n"),
        node("Conv", "n,w2", "d", pads=[1, 1, 1, 1]),
        node("Resize", "d,,scales", "r", mode="linear", antialias=1)
        if smooth
        else node("HardSwish", "d", "r"),
        node("ReduceMean", "r,axes", "m", keepdims=0),
        node("MatMul", "m,fc", "y"),
    ]
    graph = helper.make_graph(
        nodes,
        "newest",
        [helper.make_tensor_value_info("x", F32, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", F32, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture
def build(run, pictures, tmp_path, monkeypatch):
    """(model, words) -> the folder built, its notes; TensorRT of `here` on the machine."""
    monkeypatch.setattr(sdk, "cache_reader", lambda: None)

    def call(model, *words, out="out"):
        onnx.save(model, tmp_path / "net.onnx")
        code, _, err = run(
            "build", tmp_path / "net.onnx", "--images", pictures, "--size", "16x16", "--target",
            "tensorrt", "--effort", 0, "--duration", 0, "--out", tmp_path / out, *words,
        )  # fmt: skip
        assert code == 0, err
        (told,) = json.loads((tmp_path / out / "report.json").read_text())["targets"]
        return tmp_path / out, " / ".join(told["notes"])

    return call


def opset(path) -> int:
    return onnx.load(path).opset_import[0].version


def test_models_are_written_as_the_asked_version_reads_them(build):
    out, notes = build(newest(), "--trt-version", "8.5.3")
    x = {"x": np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)}
    want = OrtSession.open(newest()).run(x)["y"]
    for name, most in (("net.tensorrt.onnx", 1e-4), ("net.tensorrt.qdq.onnx", 0.2)):
        model = onnx.load(out / name)
        onnx.checker.check_model(model, full_check=True)
        assert model.opset_import[0].version == 17 and model.ir_version == 8
        ops = {n.op_type for n in model.graph.node}
        assert not ops & {"Gelu", "LayerNormalization"} and {"Erf", "HardSwish"} <= ops
        reduced = [n for n in model.graph.node if n.op_type == "ReduceMean"]
        assert all(len(n.input) == 1 for n in reduced)
        got = OrtSession.open(model).run(x)["y"]
        assert np.abs(got - want).max() <= most * np.abs(want).max()
    assert (
        "for TensorRT 8.5.3 the model is written in opset 17, got 20: 1 Gelu, 1 LayerNorm" in notes
    )
    assert "with TensorRT 8.5.3: trtexec --onnx=net.tensorrt.onnx" in notes
    assert "with any TensorRT from 8.5 to 10: trtexec --onnx=net.tensorrt.qdq.onnx" in notes
    assert opset(out / "net.tensorrt.typed.onnx") == 20  # the first with typed networks reads it


def test_the_cache_names_tensors_of_the_model_that_is_read(build):
    out, _ = build(newest(), "--trt-version", "8.6.1")
    cache = parse((out / "net.tensorrt.cache").read_bytes(), origin="made")
    model = onnx.load(out / "net.tensorrt.onnx")
    ops = {n.op_type for n in model.graph.node}
    assert "LayerNormalization" in ops and "Gelu" not in ops  # 8.6 reads it, 8.5 does not
    made = {name for n in model.graph.node for name in n.output} | {"x"}
    assert {"x", "c", "g", "h", "i", "a", "n", "d", "r", "m", "y"} == set(cache.scales()) <= made
    old, _ = build(newest(), "--trt-version", "10.3.0", out="old")
    assert opset(old / "net.tensorrt.onnx") == 20
    known = parse((old / "net.tensorrt.cache").read_bytes(), origin="made")
    assert known.scales() == cache.scales()


def test_a_version_is_not_told_to_read_what_it_cannot(build):
    out, notes = build(newest(smooth=True), "--trt-version", "8.5.3")
    assert "Resize '/Resize_r', which has none here: it has the attribute antialias" in notes
    assert (
        "TensorRT 8.5.3 cannot read net.tensorrt.onnx: it reads opset 17 at most, got 20" in notes
    )
    assert (
        "with TensorRT 10: trtexec --onnx=net.tensorrt.qdq.onnx" in notes and "calib=" not in notes
    )
    assert "cache)" not in (out / "net_trtexec.sh").read_text()
    assert opset(out / "net.tensorrt.onnx") == 20


def test_an_operator_that_the_parser_lacks_is_told(build):
    model = newest()
    model.graph.node.append(node("Unique", "m", "u"))
    model.graph.output.append(helper.make_tensor_value_info("u", F32, ["k"]))
    _, notes = build(model, "--trt-version", "10.3.0")
    assert "TensorRT 10.3.0 cannot read net.tensorrt.onnx: it does not read Unique" in notes
    assert "with TensorRT 10 from 10.15 on: trtexec --onnx=net.tensorrt.qdq.onnx" in notes


def test_files_are_for_an_older_tensorrt_that_builds_here_too(build, monkeypatch):
    monkeypatch.setattr(sdk, "cache_reader", lambda: "8.6.1")
    out, notes = build(newest(), "--trt-version", "10.3.0")
    assert opset(out / "net.tensorrt.onnx") == 17 and "for TensorRT 8.6.1" in notes


@pytest.mark.slow
def test_the_header_follows_the_installed_tensorrt_on_reuse_too(build, monkeypatch):
    def headers(*words):
        out, _ = build(newest(), *words)
        names = ("net.cache", "net.tensorrt.cache")
        return {parse((out / n).read_bytes(), origin=n).header.version for n in names}

    assert headers() == {"10.3.0"}
    monkeypatch.setattr("deploy.pipeline.observing.observe", None)  # nothing is calibrated again
    monkeypatch.setattr(sdk, "cache_reader", lambda: "8.6.1")
    assert headers() == {"8.6.1"}
    assert headers("--trt-version", "9.2.0") == {"9.2.0"}
    assert headers() == {"8.6.1"}
    monkeypatch.setattr(sdk, "cache_reader", lambda: None)
    assert headers() == {"8.6.1"}  # as the cache that is used again


def test_a_cache_taken_out_of_a_model_is_for_the_installed_tensorrt_too(
    build, run, tmp_path, monkeypatch
):
    out, _ = build(newest(), "--trt-version", "10.3.0")

    def header(*words):
        made = tmp_path / "plain.onnx", tmp_path / "plain.cache"
        code, _, err = run("cache", "from-qdq", out / "net.tensorrt.qdq.onnx", "-o", *made, *words)
        assert code == 0, err
        return parse(made[1].read_bytes(), origin="made").header.version

    assert header() == "10.3.0"
    monkeypatch.setattr(sdk, "cache_reader", lambda: "8.6.1")
    assert header() == "8.6.1" and header("--trt-version", "9.2.0") == "9.2.0"
