import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.errors import BackendError
from deploy.runtimes.ort import OrtSession


def model(op="Relu", shape=("n", 3), dtype=TensorProto.FLOAT, **attributes):
    x = helper.make_tensor_value_info("x", dtype, shape)
    y = helper.make_tensor_value_info("y", dtype, shape)
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "g", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


def test_a_session_knows_its_inputs_and_runs(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    for source in (path, str(path), path.read_bytes()):
        session = OrtSession.open(source, threads=1, optimize=False)
        (spec,) = session.inputs
        assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", ("n", 3))
        y = session.run({"x": np.array([[-1, 0, 2]], np.float32)})["y"]
        assert y.tolist() == [[0, 0, 2]]
    assert session.threads == 1


@pytest.mark.parametrize(
    ("element", "numpy_name"),
    [(TensorProto.DOUBLE, "float64"), (TensorProto.FLOAT16, "float16"), (TensorProto.INT8, "int8"),
     (TensorProto.STRING, "str"), (TensorProto.BOOL, "bool")],
)  # fmt: skip
def test_element_types_have_numpys_names(element, numpy_name):
    session = OrtSession.open(model("Identity", dtype=element).SerializeToString(), threads=1)
    assert session.inputs[0].dtype == session.outputs[0].dtype == numpy_name


@pytest.mark.parametrize(
    "feed",
    [{}, {"z": np.zeros((1, 3), np.float32)}, {"x": np.zeros((1, 3), np.int32)},
     {"x": np.zeros((1, 4), np.float32)}, {"x": np.zeros(3, np.float32)}],
)  # fmt: skip
def test_a_wrong_feed_is_one_sentence(feed):
    session = OrtSession.open(model().SerializeToString(), threads=1)
    with pytest.raises(BackendError, match="could not run the model") as caught:
        session.run(feed)
    assert "\n" not in str(caught.value)


def test_files_it_cannot_load_are_one_sentence(tmp_path, capfd):
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    onnx.save(model("NoSuchOperator"), tmp_path / "custom.onnx")
    for name in ("text.onnx", "empty.onnx", "custom.onnx", "missing.onnx", "."):
        with pytest.raises(BackendError, match="must be a model") as caught:
            OrtSession.open(tmp_path / name, threads=1)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_no_threads_are_refused():
    with pytest.raises(BackendError, match="threads must be 1 or more"):
        OrtSession.open(model().SerializeToString(), threads=0)


def two_branches(outputs):
    """Two Convs that make two channels of each, added: ONNX Runtime makes one kernel of them."""
    rng = np.random.default_rng(0)
    sizes = {"v": (16, 1, 7, 7), "w": (16, 1, 3, 3), "u": (8, 16, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], name="large", pads=[3] * 4, group=8),
        helper.make_node("Conv", ["x", "w"], ["b"], name="small", pads=[1] * 4, group=8),
        helper.make_node("Add", ["a", "b"], ["s"], name="sum"),
        helper.make_node("Conv", ["s", "u"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 16, 16])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(rng.normal(size=size).astype(np.float32), name)
            for name, size in sizes.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_an_output_that_the_optimizer_loses_is_there(capfd):
    """ONNX Runtime 1.32 does not load it: `a` is an output, and part of the joined kernel."""
    x = np.random.default_rng(1).normal(size=(1, 8, 16, 16)).astype(np.float32)
    plain = OrtSession.open(two_branches(["y", "a"]), threads=1, optimize=False).run({"x": x})
    found = OrtSession.open(two_branches(["y", "a"]), threads=1).run({"x": x})
    assert {"y", "a"} == set(found)
    assert all(np.allclose(found[name], plain[name], atol=1e-4) for name in found)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("outputs", [["y"], ["y", "a"]])
def test_such_a_model_is_searched_and_built(outputs, tmp_path, capfd):
    onnx.save(two_branches(outputs), tmp_path / "net.onnx")
    x = np.random.default_rng(1).normal(size=(10, 8, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ["build", str(tmp_path / "net.onnx"), "--images", str(tmp_path / "x.npy"), "--accept"]
    words += ["--out", str(tmp_path / "out"), "--duration", "0", "--quiet"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0 and "nothing was searched" not in done.output, done.output
    assert "[[onnxruntime.tried]]" in (tmp_path / "out/net.plan.toml").read_text()
    assert "EP Error" not in "".join(capfd.readouterr())
