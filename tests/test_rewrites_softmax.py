"""A Softmax with axes behind its own is reshaped in ONNX Runtime's int8 models."""

import numpy as np
import onnx
import pytest

from deploy.graph.edit import copy_message
from deploy.graph.index import Graph
from deploy.targets.onnxruntime.rewrite_base import RewriteContext
from deploy.targets.onnxruntime.rewrites import write_softmax
from tests.models import as_float32, build_net, make_model, run_net

PADS = {"pads": [1, 1, 1, 1]}


RESHAPED_AXES = [((2, 3, 4, 5), 1), ((2, 3, 4, 5), -3), ((2, 3, 4, 5), 0), ((1, 2, 3, 4, 5), 2)]


UNCHANGED_AXES = [((2, 3, 4, 5), 2), ((2, 3, 4, 5), -1), ((2, 3, 4), 1), ((2, 3), 0)]


def softmax_net(shape, axis, kind="Softmax") -> onnx.ModelProto:
    node = (kind, "x", "y", {} if axis is None else {"axis": axis})
    return make_model([node], {"x": shape}, {"y": shape})


def rewrite_softmax(plain: onnx.ModelProto) -> onnx.ModelProto:
    written = copy_message(plain)
    write_softmax(written, RewriteContext(float_graph=Graph(plain)))
    return written


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opened", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(("shape", "axis"), RESHAPED_AXES)
def test_softmax_with_later_axes_is_reshaped(shape, axis, opened, kind):
    sizes = [f"d{n}" for n in range(len(shape))] if opened else shape
    plain = softmax_net(sizes, axis, kind)
    written = rewrite_softmax(plain)
    onnx.checker.check_model(written, full_check=True)
    assert [n.op_type for n in written.graph.node] == ["Shape", "Reshape", kind, "Reshape"]
    x = np.random.default_rng(0).normal(0, 5, shape).astype(np.float32)
    outputs, expected = (run_net(model, x)[0].tobytes() for model in (written, plain))
    assert outputs == expected


@pytest.mark.parametrize(("shape", "axis"), [*UNCHANGED_AXES, ((2, 3, 4, 5), None)])
def test_other_softmax_is_unchanged(shape, axis):
    plain = softmax_net(shape, axis)
    assert rewrite_softmax(plain) == plain


@pytest.mark.parametrize("effort", ["0", "1"])
def test_built_softmax_is_reshaped(effort, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"v": rng.normal(size=(16, 8, 3, 3)), "w": rng.normal(size=(16, 16, 3, 3))}
    nodes = [("Conv", "x v", "t", PADS), ("Softmax", "t", "s", {"axis": 1})]
    nodes.append(("Conv", "s w", "y", PADS))
    model = make_model(nodes, {"x": ["n", 8, "h", "w"]}, {"y": None}, as_float32(weights))
    x = rng.normal(size=(8, 8, 6, 5)).astype(np.float32)
    (path,) = build_net(model, x, tmp_path, "--effort", effort, "--accept").glob("net.*.onnx")
    engine = onnx.load(path)
    kinds = [node.op_type for node in engine.graph.node]
    assert kinds.count("Softmax") == 1
    assert kinds.count("Reshape") == 2
    expected, outputs = (run_net(net, x[:1])[0].ravel() for net in (model, engine))
    assert np.corrcoef(expected, outputs)[0, 1] > 0.99
