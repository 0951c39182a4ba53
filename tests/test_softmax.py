"""Softmax over channels: what is written for it, and that not a bit of it changes."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.graph.index import Graph
from deploy.targets.onnxruntime.conv_rewrites import RewriteContext
from deploy.targets.onnxruntime.rewrites import write_softmax

IN_A_ROW = [((2, 3, 4, 5), 1), ((2, 3, 4, 5), -3), ((2, 3, 4, 5), 0), ((1, 2, 3, 4, 5), 2)]
AS_IT_IS = [((2, 3, 4, 5), 2), ((2, 3, 4, 5), -1), ((2, 3, 4), 1), ((2, 3), 0)]


def net(shape, axis, kind="Softmax", declared=None) -> onnx.ModelProto:
    given = {} if axis is None else {"axis": axis}
    node = helper.make_node(kind, ["x"], ["y"], name="soft", **given)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, declared or shape) for n in "xy"]
    graph = helper.make_graph([node], "softmax", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def ran(model: onnx.ModelProto, x: np.ndarray) -> bytes:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].tobytes()


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opened", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(("shape", "axis"), IN_A_ROW)
def test_one_with_several_axes_behind_its_own_goes_over_one_row(shape, axis, opened, kind):
    plain = net(shape, axis, kind, [f"d{n}" for n in range(len(shape))] if opened else None)
    written = onnx.ModelProto.FromString(plain.SerializeToString())
    write_softmax(written, RewriteContext(like=Graph(plain)))
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == ["Shape", "Reshape", kind, "Reshape"]
    x = np.random.default_rng(0).normal(0, 5, shape).astype(np.float32)
    assert ran(written, x) == ran(plain, x)


@pytest.mark.parametrize(("shape", "axis"), [*AS_IT_IS, ((2, 3, 4, 5), None)])
def test_others_stay_as_they_are(shape, axis):
    plain = net(shape, axis)
    written = onnx.ModelProto.FromString(plain.SerializeToString())
    write_softmax(written, RewriteContext(like=Graph(plain)))
    assert written == plain


@pytest.mark.parametrize("effort", ["0", "1"])
def test_what_is_built_has_the_quick_form_between_int8_layers(effort, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"v": rng.normal(size=(16, 8, 3, 3)), "w": rng.normal(size=(16, 16, 3, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["t"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Softmax", ["t"], ["s"], name="soft", axis=1),
        helper.make_node("Conv", ["s", "w"], ["y"], name="last", pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "softmax",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(v), n) for n, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    x = rng.normal(size=(8, 8, 6, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ["build", str(tmp_path / "net.onnx"), "--images", str(tmp_path / "x.npy"), "--accept"]
    words += ["--out", str(tmp_path / "out"), "--duration", "0", "--effort", effort]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "out").glob("net.*.onnx")
    engine = onnx.load(path)
    kinds = [node.op_type for node in engine.graph.node]
    assert kinds.count("Softmax") == 1 and kinds.count("Reshape") == 2
    wanted, found = (np.frombuffer(ran(one, x[:1]), np.float32) for one in (model, engine))
    assert np.corrcoef(wanted, found)[0, 1] > 0.99
