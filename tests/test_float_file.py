"""The file of a model that stays in float: cleaned, but never much larger than the one given."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.tuning import timing

LONG = 256


def spectrum(path, *behind):
    """Sound -> a spectrum by a table of cosines, which the model makes of two vectors.

    Args:
        path: of the file.
        behind: nodes that make y of same, in place of a Relu.
    """
    nodes = [
        helper.make_node("Mul", ["times", "tones"], ["angles"], name="angles"),
        helper.make_node("Cos", ["angles"], ["table"], name="table"),
        helper.make_node("MatMul", ["x", "table"], ["s"], name="product"),
        helper.make_node("Identity", ["s"], ["same"], name="same"),
        *(behind or (helper.make_node("Relu", ["same"], ["y"], name="relu"),)),
    ]
    weights = {
        "three": np.float32(3),
        "zero": np.float32(0),
        "six": np.float32(6),
        "times": np.arange(LONG, dtype=np.float32)[:, None],
        "tones": np.linspace(0, 0.1, LONG, dtype=np.float32)[None],
    }
    graph = helper.make_graph(
        nodes,
        "spectrum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", LONG])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", LONG])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = helper.make_opsetid("", 13)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


@pytest.fixture
def build(run, tmp_path, monkeypatch):
    """(model) -> the float file that is written, and the screen; int8 is slower than float."""

    def quickest(ran, feeds, *, threads):
        return 30.0 if any(node.op_type == "QuantizeLinear" for node in ran.graph.node) else 10.0

    monkeypatch.setattr(timing, "quickest_ms", quickest)

    def call(model):
        rows = np.random.default_rng(3).normal(size=(8, LONG)).astype(np.float32)
        np.save(tmp_path / "x.npy", rows)
        words = ("build", model, "--images", tmp_path / "x.npy", "--out", tmp_path / "o")
        code, out, error = run(*words, "--duration", 0.01)
        assert code == 0, error
        (written,) = (tmp_path / "o").glob("*.float.onnx")
        return written, " ".join(out.split())

    return call


def test_a_model_that_computes_its_tables_stays_as_small_as_it_is(build, tmp_path):
    model = spectrum(tmp_path / "spectrum.onnx")
    written, said = build(model)
    assert written.read_bytes() == model.read_bytes()
    assert "float engine is the file that was given" in said


def test_one_whose_gates_are_made_one_kernel_is_written_with_them(build, tmp_path):
    gate = (
        helper.make_node("Add", ["same", "three"], ["moved"], name="moved"),
        helper.make_node("Clip", ["moved", "zero", "six"], ["cut"], name="cut"),
        helper.make_node("Mul", ["same", "cut"], ["gated"], name="gated"),
        helper.make_node("Div", ["gated", "six"], ["y"], name="sixth"),
    )
    written, said = build(spectrum(tmp_path / "spectrum.onnx", *gate))
    assert "Clip" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said


def share_names(model):
    for node in model.graph.node:
        node.name = "same"


def list_weights(model):
    model.graph.input.add(name="tones").type.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, [1, LONG])
    )


@pytest.mark.parametrize("change", [share_names, list_weights])
def test_one_that_onnxruntime_runs_otherwise_is_cleaned(build, tmp_path, change):
    """It loads no nodes that share a name, and computes slower with weights that are inputs."""
    model = onnx.load(spectrum(tmp_path / "spectrum.onnx"))
    change(model)
    onnx.save(model, tmp_path / "spectrum.onnx")
    written, said = build(tmp_path / "spectrum.onnx")
    assert "Cos" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said


def test_one_that_cleaning_makes_no_larger_is_cleaned(build, tmp_path):
    model = onnx.load(spectrum(tmp_path / "spectrum.onnx"))
    table = np.cos(np.outer(np.arange(LONG), np.linspace(0, 0.1, LONG))).astype(np.float32)
    del model.graph.node[:2], model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "spectrum.onnx")
    written, said = build(tmp_path / "spectrum.onnx")
    assert "Identity" not in {node.op_type for node in onnx.load(written).graph.node}
    assert "file that was given" not in said
