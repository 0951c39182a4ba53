"""Where TensorRT's Q/DQ pairs stand: around Adds, pools, Concats and transposed convolutions."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ConfigError
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.pipeline import build
from deploy.runtimes.ort import OrtSession
from deploy.targets import TensorRT
from deploy.tuning.search_options import Tuning


def node(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], name=output, **attributes)


def silu(tensor, out):
    return [node("Sigmoid", tensor, f"{out}_s"), node("Mul", f"{tensor} {out}_s", out)]


def conv(tensor, out, weight="w"):
    return node("Conv", f"{tensor} {weight}", out, pads=[1, 1, 1, 1])


def net(nodes, tmp_path):
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(4, 4, 3, 3)), "w2": rng.normal(size=(4, 8, 3, 3)),
               "g": rng.normal(size=(5, 4)), "t": rng.normal(size=(4, 4, 2, 2)),
               "m": rng.normal(size=(8, 8)), "bias": rng.normal(size=8),
               "shape": np.array([4, 8, 8])}  # fmt: skip
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(a if n == "shape" else a.astype(np.float32), n)
            for n, a in weights.items()
            if n in used
        ],
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
        [node("MaxPool", "sum", "p", kernel_shape=[2, 2]), conv("p", "y")],
        [node("GlobalAveragePool", "sum", "p"), node("Flatten", "p", "f"),
         node("Gemm", "f g", "y", transB=1)],
    ],
    ids=["Conv", "MaxPool", "the last pool"],
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


def test_a_concat_takes_its_inputs_from_the_pairs_there_are(tmp_path):
    after = [node("Concat", "as sum", "cat", axis=1), conv("cat", "y", "w2")]
    why, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert why["sum"] == "" and pairs["as"] == ("b", "sum", "cat") and pairs["cat"] == ("y",)
    after[1:] = [
        conv("cat", "k", "w2"),
        node("Exp", "cat", "e"),
        node("Concat", "k e", "y", axis=1),
    ]
    _, pairs = placed(net([*BOTTLENECK, *after], tmp_path))
    assert pairs["as"] == ("b", "sum")  # a float node reads the Concat, and gets float values


def vit(ends):
    """A linear layer beside a residual stream, behind a norm, as in a transformer: [N, T, 8]."""
    return [
        node("Reshape", "x shape", "s"), node("MatMul", "s m", "p"), node("Exp", "p", "stream"),
        node("ReduceMean", "stream", "mean", axes=[-1]), node("Sub", "stream mean", "centred"),
        node("Mul", "centred bias", "scaled"), node("Add", "scaled bias", "normed"),
        node("MatMul", "normed m", "q"), node("Add", "q bias", "qb"),
        node("Mul", "bias qb", "qs"), node("Add", "qs stream", "sum"), *ends,
    ]  # fmt: skip


def test_the_residual_adds_of_a_transformer_get_a_pair_on_the_stream(tmp_path):
    norm = [node("ReduceMean", "sum", "mean2", axes=[-1]), node("Sub", "sum mean2", "centred2"),
            node("Mul", "centred2 bias", "scaled2"), node("Add", "scaled2 bias", "normed2"),
            node("MatMul", "normed2 m", "y")]  # fmt: skip
    why, pairs = placed(net(vit(norm), tmp_path))
    assert why["sum"] == "" and pairs["stream"] == ("sum",) and "qs" not in pairs
    assert "picture" in why["mean"] and "picture" in why["mean2"]
    why, pairs = placed(net(vit([node("Softmax", "sum", "y")]), tmp_path))
    assert why["sum"] == "nothing after it runs in int8" and "stream" not in pairs


GEMM = [node("Flatten", "p", "f"), node("Gemm", "f g", "y", transB=1)]


@pytest.mark.parametrize(
    "pool",
    [
        node("GlobalAveragePool", "as", "p"),
        node("AveragePool", "as", "p", kernel_shape=[8, 8]),
        node("MaxPool", "as", "p", kernel_shape=[8, 8]),
        node("ReduceMean", "as", "p", axes=[2, 3]),
        node("ReduceMean", "as", "p", axes=[-1, -2]),
    ],
    ids=["global", "average", "max", "mean", "mean from behind"],
)
def test_a_pool_between_int8_nodes_reads_and_writes_int8(pool, tmp_path):
    why, pairs = placed(net([conv("x", "a"), *silu("a", "as"), pool, *GEMM], tmp_path))
    assert why["p"] == "" and pairs["as"] == ("p",) and pairs["f"] == ("y",)


def test_a_pool_is_float_between_float_nodes_and_beside_them(tmp_path):
    start = [conv("x", "a"), *silu("a", "as")]
    pool = node("GlobalAveragePool", "as", "p")
    why, pairs = placed(net([*start, pool, node("Softmax", "p", "y")], tmp_path))
    assert why["p"] == "nothing after it runs in int8" and "as" not in pairs
    float_made = [node("Exp", "as", "e"), node("MaxPool", "e", "p", kernel_shape=[8, 8])]
    why, _ = placed(net([*start, *float_made, *GEMM], tmp_path))
    assert why["p"] == "an input of it is not int8"
    gate = [pool, conv("p", "c"), node("Sigmoid", "c", "s"), node("Mul", "as s", "y")]
    why, pairs = placed(net([*start, *gate], tmp_path))
    assert why["p"] == "its input is read in float too" and "as" not in pairs
    rows = node("ReduceMean", "as", "p", axes=[1, 3])
    why, _ = placed(net([*start, rows, node("Tanh", "p", "y")], tmp_path))
    assert why["p"] == "it is the mean over other axes than a picture's"


def test_what_reads_a_concat_of_float_tensors_stays_float_where_that_is_asked(tmp_path):
    asked = TensorRT(float_behind_concat=True).placement
    made = [conv("x", "a"), conv("a", "b"), node("Concat", "a b", "cat", axis=1)]
    why, _ = placed(net([*made, conv("cat", "y", "w2")], tmp_path), asked)
    assert why["y"] == ""
    made[1:] = [node("Exp", "a", "e"), node("Concat", "a e", "cat", axis=1),
                node("MaxPool", "cat", "p", kernel_shape=[2, 2])]  # fmt: skip
    model = net([*made, conv("p", "y", "w2")], tmp_path)
    why, pairs = placed(model, asked)
    assert why["y"] == "it reads a Concat of what is not int8" and set(pairs) == {"x"}
    assert placed(model)[0]["y"] == ""


def test_a_transposed_convolution_can_have_a_pair_before_its_activation(tmp_path):
    deconv = node("ConvTranspose", "a t", "d", strides=[2, 2])
    model = net([conv("x", "a"), deconv, node("Relu", "d", "r"), conv("r", "y")], tmp_path)
    assert set(placed(model)[1]) == {"x", "a", "r"}
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    target = TensorRT(pair_behind_deconv=True, rest="fp32")
    build(model, samples, out=tmp_path / "out", targets=[target], duration_s=0,
          tuning=Tuning(effort=0))  # fmt: skip
    (written,) = (tmp_path / "out").glob("*.qdq.onnx")
    readers = {name: n.op_type for n in onnx.load(written).graph.node for name in n.input}
    assert readers["d"] == "QuantizeLinear" and readers["d/dequantized"] == "Relu"
    found = OrtSession.open(written).run(samples[0])["y"]
    exact = OrtSession.open(tmp_path / "net.onnx").run(samples[0])["y"]
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99


def test_the_placements_options_want_the_qdq_model():
    for word in ("float_behind_concat", "pair_behind_deconv"):
        with pytest.raises(ConfigError, match="placed in the Q/DQ model, got engine form cache"):
            TensorRT(form="cache", **{word: True})
    with pytest.raises(ConfigError, match="no pair in fp8"):
        TensorRT(precision="fp8", pair_behind_deconv=True)
