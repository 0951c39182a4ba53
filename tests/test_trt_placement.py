"""Where TensorRT's Q/DQ pairs stand around residual Adds."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends import load
from deploy.graph.plan import ONNXRUNTIME, TENSORRT, analyse


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], name=output, **attributes)


def silu(tensor, out):
    return [node("Sigmoid", tensor, f"{out}_s"), node("Mul", f"{tensor} {out}_s", out)]


def conv(tensor, out, weight="w"):
    return node("Conv", f"{tensor} {weight}", out, pads=[1, 1, 1, 1])


def net(nodes, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(4, 4, 3, 3)), "w2": rng.normal(size=(4, 8, 3, 3)),
               "g": rng.normal(size=(5, 4))}  # fmt: skip
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items() if n in used],
    )
    path = tmp_path / "net.onnx"
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return load(path).model


def placed(model, placement=TENSORRT, **options):
    plan = analyse(model, placement, **options)
    why = {d.node: d.reason for d in plan.decisions}
    return why, {p.tensor: p.consumers for p in plan.pairs}


BOTTLENECK = [
    conv("x", "a"), *silu("a", "as"), conv("as", "b"), *silu("b", "bs"), conv("bs", "c"),
    *silu("c", "cs"), node("Add", "as cs", "sum"),
]  # fmt: skip


@pytest.mark.parametrize(
    "after",
    [
        [conv("sum", "y")],
        [node("Concat", "as sum", "cat", axis=1), conv("cat", "y", "w2")],
        [node("MaxPool", "sum", "p", kernel_shape=[2, 2]), conv("p", "y")],
        [node("GlobalAveragePool", "sum", "p"), node("Flatten", "p", "f"),
         node("Gemm", "f g", "y", transB=1)],
    ],
    ids=["Conv", "Concat", "MaxPool", "the last pool"],
)  # fmt: skip
def test_a_residual_add_behind_silu_gets_a_pair_on_its_skip_branch_alone(after, tmp_path):
    why, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert why["sum"] == "" and "cs" not in pairs
    assert pairs["as"] == ("b", "sum")  # one pair for the convolution and the Add


def test_an_add_that_nobody_wants_in_int8_stays_float(tmp_path):
    why, pairs = placed(net([*BOTTLENECK, node("Softmax", "sum", "y")], tmp_path))
    assert why["sum"] == "nothing after it runs in int8" and pairs["as"] == ("b",)
    ends = [node("Exp", "c", "e"), node("Add", "as e", "sum"), conv("sum", "y")]
    why, _ = placed(net([*BOTTLENECK[:-3], *ends], tmp_path))
    assert why["sum"] == "an input of it is not int8"


def test_an_add_is_float_where_the_branch_is_kept_so(tmp_path):
    model = net([*BOTTLENECK, conv("sum", "y")], tmp_path)
    why, pairs = placed(model, float_nodes=["c"])
    assert why["sum"] == "an input of it is not int8" and pairs["as"] == ("b",)


def test_only_tensorrt_sees_through_float_nodes(tmp_path):
    assert not ONNXRUNTIME.passes
    assert TENSORRT.passes > {"Sigmoid", "Mul", "Concat", "GlobalAveragePool"}
