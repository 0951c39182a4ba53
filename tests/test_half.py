"""float16 models, and sizes that are not known: what is loaded, built, and fed."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.errors import ModelError
from deploy.frontends import load

F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT
ENGINES = {
    "onnxruntime": ["net.int8.onnx"],
    "tensorrt": ["net.tensorrt.onnx", "net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx"],
    "ascend": ["net_fake_quant_model.onnx"],
}


def half(name, *shape):
    rng = np.random.default_rng(len(name) + sum(shape))
    return numpy_helper.from_array(rng.normal(scale=0.3, size=shape).astype(np.float16), name)


def node(op, reads, made, **given):
    return helper.make_node(op, reads.split(), [made], name=f"{op}_{made}", **given)


def network(kind) -> onnx.ModelProto:
    """Conv, Relu, Conv, Mul, Sigmoid in float16: all of it, or the inside of a float32 model."""
    inner = [
        node("Conv", "h w1 b1", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("Conv", "r w2 b2", "d", pads=[1, 1, 1, 1]),
        node("Max", "d floor", "m"),
    ]
    if kind == "whole":
        inner[0].input[0] = "x"
        nodes, outside = [*inner, node("Sigmoid", "m", "y")], F16
    else:
        nodes = [node("Cast", "x", "h", to=F16), *inner]
        nodes, outside = [*nodes, node("Cast", "m", "f", to=F32), node("Sigmoid", "f", "y")], F32
    graph = helper.make_graph(
        nodes,
        "half",
        [helper.make_tensor_value_info("x", outside, ["n", 8, 12, 12])],
        [helper.make_tensor_value_info("y", outside, ["n", 4, 12, 12])],
        [half("w1", 8, 8, 3, 3), half("b1", 8), half("w2", 4, 8, 3, 3), half("b2", 4),
         numpy_helper.from_array(np.float16(-1.5), "floor")],
        value_info=[helper.make_tensor_value_info("c", F16, ["n", 8, 12, 12])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def run(model, x):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if not isinstance(model, onnx.ModelProto) else model.SerializeToString()
    return ort.InferenceSession(source, options).run(None, {"x": x})[0]


@pytest.mark.parametrize("kind", ["whole", "mixed"])
@pytest.mark.parametrize("target", ENGINES)
def test_a_float16_model_is_built_for_every_target(kind, target, tmp_path):
    model = network(kind)
    onnx.save(model, tmp_path / "net.onnx")
    dtype = np.float16 if kind == "whole" else np.float32
    x = np.random.default_rng(1).normal(size=(6, 8, 12, 12)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    given = ["build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--duration", 0]
    given += ["--target", target, "--out", tmp_path / "out"]
    given += ["--soc", "Ascend310P3"] if target == "ascend" else []
    done = CliRunner().invoke(cli, [str(word) for word in given])
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "computes in float16" in told
    want = run(model, x)
    for name in ENGINES[target]:
        got = run(tmp_path / "out" / name, x)
        assert got.dtype == want.dtype == dtype
        assert np.abs(got.astype(float) - want).max() < 0.12


@pytest.mark.parametrize("kind", ["whole", "mixed"])
def test_what_is_computed_stays_within_float16(kind):
    loaded = load(network(kind))
    assert "float16" in loaded.notes[0] and loaded.widened
    dtype = "float16" if kind == "whole" else "float32"
    assert [spec.dtype for spec in (*loaded.inputs, *loaded.outputs)] == [dtype] * 2
    x = np.random.default_rng(2).normal(size=(2, 8, 12, 12)).astype(dtype)
    got, want = run(loaded.model, x), run(network(kind), x)
    assert np.abs(got.astype(float) - want).max() < 2e-3


def test_weights_keep_their_values_and_idle_casts_go():
    loaded = load(network("mixed"))
    held = {t.name: numpy_helper.to_array(t) for t in loaded.model.graph.initializer}
    for tensor in network("mixed").graph.initializer:
        given = numpy_helper.to_array(tensor)
        assert held[tensor.name].dtype == np.float32 and (held[tensor.name] == given).all()
    assert "Cast" not in [n.op_type for n in loaded.model.graph.node]


def test_casts_inside_an_if_compute_in_float32_too():
    branch = helper.make_graph(
        [node("Add", "d one", "z")], "b", [], [helper.make_tensor_value_info("z", F16, None)],
        [numpy_helper.from_array(np.float16(1), "one")],
    )  # fmt: skip
    model = network("whole")
    model.graph.node[3].CopyFrom(
        helper.make_node("If", ["yes"], ["m"], then_branch=branch, else_branch=branch)
    )
    model.graph.initializer.append(numpy_helper.from_array(np.bool_(True), "yes"))
    x = np.random.default_rng(3).normal(size=(1, 8, 12, 12)).astype(np.float16)
    got, want = run(load(model).model, x), run(model, x)
    assert np.abs(got.astype(float) - want).max() < 2e-3


def test_images_feed_a_float16_input(pictures, tmp_path):
    model = network("whole")
    weight = next(t for t in model.graph.initializer if t.name == "w1")
    weight.CopyFrom(half("w1", 8, 3, 3, 3))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(model, tmp_path / "net.onnx")
    given = ["build", str(tmp_path / "net.onnx"), "--images", str(pictures), "--duration", "0"]
    done = CliRunner().invoke(cli, [*given, "--out", str(tmp_path / "out"), "--preprocess", "unit"])
    assert done.exit_code == 0, done.output
    assert "float16" in (tmp_path / "out/report.md").read_text()


# ---------------------------------------------------------------- sizes that are not known


def flattened(size) -> onnx.ModelProto:
    """Conv, Flatten and a MatMul of 256 rows, for 8x8; shape inference multiplies the sizes."""
    weights = [
        numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w"),
        numpy_helper.from_array(np.eye(256, 5, dtype=np.float32), "k"),
    ]
    graph = helper.make_graph(
        [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Flatten", "c", "f"),
         node("MatMul", "f k", "y")],
        "open",
        [helper.make_tensor_value_info("x", F32, [size, 3, size, size])],
        [helper.make_tensor_value_info("y", F32, [size, 5])],
        weights,
        value_info=[helper.make_tensor_value_info("c", F32, [size, 4, size, size])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)


def test_a_size_below_0_is_an_open_one_as_in_onnxruntime(tmp_path):
    onnx.save(flattened(-1), tmp_path / "net.onnx")
    x = np.random.default_rng(4).normal(size=(4, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = ["build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--duration", 0]
    given += ["--target", "onnxruntime,tensorrt", "--out", tmp_path / "out"]
    done = CliRunner().invoke(cli, [str(word) for word in given])
    assert done.exit_code == 0, done.output
    got, want = run(tmp_path / "out/net.int8.onnx", x), run(tmp_path / "net.onnx", x)
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    assert load(tmp_path / "net.onnx").inputs[0].shape == (None, 3, None, None)


def test_a_size_of_0_is_one_as_in_onnxruntime():
    with pytest.raises(ModelError, match="Incompatible dimensions"):
        load(flattened(0))
