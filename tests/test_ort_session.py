import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploy.errors import BackendError
from deploy.ort import OrtSession


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
