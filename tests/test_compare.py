import json
import sys

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.analysis.comparison import compare
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.graph.edit import cut


def save(path, nodes, *, out="y", weights=(), x="x"):
    value = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["n", 4])
    end = helper.make_tensor_value_info(out, TensorProto.FLOAT, ["n", 4])
    made = [helper.make_node(op, ins.split(), outs.split(), name=f"{op}:{outs}")
            for op, ins, outs in nodes]  # fmt: skip
    constants = [numpy_helper.from_array(np.asarray(v), name) for name, v in dict(weights).items()]
    graph = helper.make_graph(made, "g", [value], [end], constants)
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


ONE = {"one": np.float32(1)}
CHAIN = [("Relu", "x", "a"), ("Mul", "a one", "b"), ("Add", "b one", "c"), ("Neg", "c", "y")]


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 4)).astype(np.float32))
    return path


def run(*words):
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def told(result):
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_the_first_tensor_that_parts_is_told_by_its_node(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a two", "b"), *CHAIN[2:]],
             weights=ONE | {"two": np.float32(2)})  # fmt: skip
    said = run(a, b, "--images", images).stdout
    assert "They part at 'b', made by Mul 'Mul:b': 0.0 dB" in said
    assert said.index("outputs") < said.index("  y  (Neg Neg:y)")
    assert [row["tensor"] for row in told(run(a, b, "--images", images, "--json", "-"))["layers"]] \
        == ["a", "b", "c"]  # fmt: skip


def test_models_that_agree_are_said_not_to_part(tmp_path, images):
    a, b = (save(tmp_path / f"{name}.onnx", CHAIN, weights=ONE) for name in "ab")
    found = told(run(a, b, "--images", images, "--json", "-"))
    assert found["parts_at"] is None and found["samples"] == 6
    assert all(row["sqnr_db"] == "inf" for row in found["layers"] + found["outputs"])
    assert "do not part" in run(a, b, "--images", images).stdout


SCALE = {"s": np.float32(0.1), "z": np.uint8(128)}


@pytest.mark.parametrize(
    ("made", "read"), [("a", "a_dq"), ("a/float", "a")], ids=["pair behind", "pair before"]
)
def test_of_a_quantized_tensor_the_value_counts_that_is_read(tmp_path, images, made, read):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    pair = [("QuantizeLinear", f"{made} s z", "q"), ("DequantizeLinear", "q s z", read)]
    nodes = [("Relu", "x", made), *pair, ("Mul", f"{read} one", "b"), *CHAIN[2:]]
    b = save(tmp_path / "b.onnx", nodes, weights=ONE | SCALE)
    found = told(run(a, b, "--images", images, "--json", "-"))
    first = found["layers"][0]
    assert first["tensor"] == "a" and 15 < first["sqnr_db"] < 60
    back = told(run(b, a, "--images", images, "--json", "-"))["layers"][0]
    assert (back["operator"], back["node"]) == ("Relu", f"Relu:{made}")


def test_the_limit_and_the_number_of_images_are_the_users(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a near", "b"), *CHAIN[2:]],
             weights=ONE | {"near": np.float32(1.01)})  # fmt: skip
    words = (a, b, "--images", images, "--json", "-")
    assert told(run(*words))["parts_at"] is None
    found = told(run(*words, "--min-sqnr", 50, "--limit", 2))
    assert found["parts_at"] == "b" and found["samples"] == 2 and found["min_sqnr_db"] == 50


def test_json_goes_to_a_file_beside_the_table(tmp_path, images):
    a, b = (save(tmp_path / f"{name}.onnx", CHAIN, weights=ONE) for name in "ab")
    result = run(a, b, "--images", images, "--json", tmp_path / "found.json")
    assert "outputs" in result.stdout
    assert json.loads((tmp_path / "found.json").read_text())["looked"] == [4, 4]


def test_another_shape_or_nan_parts(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a nan", "b"), *CHAIN[2:]],
             weights=ONE | {"nan": np.float32(np.nan)})  # fmt: skip
    assert told(run(a, b, "--images", images, "--json", "-"))["parts_at"] == "b"


def test_what_holds_no_value_or_is_a_constant_does_not_part(tmp_path, images):
    none = {"from": np.array([0]), "to": np.array([0])}
    nodes = [*CHAIN, ("Slice", "a from to", "nothing")]
    a, b = (save(tmp_path / f"{name}.onnx", nodes, weights=ONE | none) for name in "ab")
    for number, other in enumerate((a, b)):
        model = onnx.load(other)
        value = numpy_helper.from_array(np.float32(number), "v")
        model.graph.node.append(helper.make_node("Constant", [], ["k"], value=value))
        onnx.save(model, other)
    found = told(run(a, b, "--images", images, "--json", "-"))
    assert found["parts_at"] is None
    assert [row["tensor"] for row in found["layers"]] == ["a", "b", "c"]


def test_an_output_that_is_an_input_is_a_row(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    model = onnx.load(a)
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, a)
    found = told(run(a, a, "--images", images, "--json", "-"))
    assert [row["tensor"] for row in found["outputs"]] == ["y", "x"]


def refused(*words):
    result = run(*words)
    assert isinstance(result.exception, Calib8Error), result.output
    return str(result.exception)


def test_outputs_that_one_model_gives_alone_are_told(tmp_path, images):
    """Without them nobody knows whether the models part."""
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [*CHAIN[:3], ("Abs", "c", "z")], weights=ONE, out="z")
    said = run(a, b, "--images", images).stdout
    assert "not compared: 'y'" in said
    assert "not compared: 'z'" in said
    assert "not compared" not in run(a, a, "--images", images).stdout


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    other = save(tmp_path / "o.onnx", [("Relu", "x", "z")], out="z")
    fed = save(tmp_path / "f.onnx", [("Relu", "w", "y")], x="w")
    (tmp_path / "no.onnx").write_text("text")
    assert "two models or two runtimes" in refused(a, "--images", images)
    assert "tensors of the same names" in refused(a, other, "--images", images)
    said = refused(a, fed, "--images", images)
    assert "got x (float32) and w (float32)" in said
    doubled = onnx.load(a)
    doubled.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    doubled.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    doubled.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float64(1), "one"))
    onnx.save(doubled, tmp_path / "d.onnx")
    said = refused(a, tmp_path / "d.onnx", "--images", images)
    assert "got x (float32) and x (float64)" in said
    assert "must be an ONNX" in refused(a, tmp_path / "no.onnx", "--images", images)
    assert "must be an ONNX" in refused(tmp_path / "gone.onnx", a, "--images", images)
    assert "goes with --runtime openvino" in refused(a, a, "--images", images, "--every")


@pytest.mark.slow
def test_the_node_is_found_where_another_runtime_parts(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    found = told(run(a, "--images", images, "--runtime", "openvino", "--json", "-"))
    assert found["parts_at"] == "c" and found["cut"]
    assert found["looked"][0] < found["looked"][1] == 4
    words = (a, "--images", images, "--runtime", "openvino", "--every")
    assert "4 of 4" in run(*words, "--json", tmp_path / "found.json").stdout
    every = json.loads((tmp_path / "found.json").read_text())
    assert every["looked"] == [4, 4] and every["layers"][1]["sqnr_db"] == "inf"


@pytest.mark.slow
def test_what_closed_dimensions_change_is_told(tmp_path, images, openvino):
    words = ("--images", images, "--runtime", "openvino", "--json", "-")
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    (note,) = told(run(a, *words))["notes"]
    assert "open dimensions closed" in note
    model = onnx.load(a)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, a)
    assert told(run(a, *words))["notes"] == []


def test_runtimes_whose_outputs_agree_are_not_cut(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Relu", "x", "a"), ("Neg", "a", "y")])
    found = told(run(a, "--images", images, "--runtime", "openvino", "--json", "-"))
    assert found["parts_at"] is None and found["looked"] == [1, 2]


@pytest.mark.slow
def test_a_runtime_that_crashes_on_a_cut_is_a_note(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Erf", "x", "a"), ("Add", "a a", "b"), ("Neg", "b", "y")])
    found = told(run(a, "--images", images, "--runtime", "openvino", "--every", "--json", "-"))
    assert found["parts_at"] == "b"
    _, note = found["notes"]
    assert "'a' could not be compared" in note and "status 11" in note


def test_a_runtime_that_refuses_the_model_says_why(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Cosh", "x", "y")])
    said = refused(a, "--images", images, "--runtime", "openvino")
    assert "got: Operation Cosh is not supported" in said


def test_a_missing_runtime_says_how_to_get_it(tmp_path, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    assert "calib8[openvino]" in refused(a, "--images", images, "--runtime", "openvino")


def test_the_real_openvino_agrees_on_a_plain_model(tmp_path, images):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    assert compare(a, None, images, runtime="openvino", every=True).parts_at is None


def test_a_cut_holds_what_its_tensor_needs_and_no_more(tmp_path):
    model = onnx.load(save(tmp_path / "a.onnx", CHAIN, weights=ONE))
    short = cut(model, "b")
    assert [node.op_type for node in short.graph.node] == ["Relu", "Mul"]
    assert [value.name for value in short.graph.output] == ["b"]
    assert len(model.graph.node) == 4
