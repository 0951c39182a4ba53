"""Models at an older operator set: the same numbers, and a sentence where that cannot be."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ExportError
from deploy.graph.lowering import lowered
from deploy.runtimes.ort import OrtSession

F32 = TensorProto.FLOAT
IMAGE = (1, 4, 6, 8)


def net(op, *constants, opset, shape=IMAGE, outputs=1, kind=F32, given=None):
    """One node on x; each constant an array, "" for none, or the name of another tensor."""
    held = {f"k{at}": np.asarray(c) for at, c in enumerate(constants) if not isinstance(c, str)}
    reads = [c if isinstance(c, str) else f"k{at}" for at, c in enumerate(constants)]
    made = [f"y{at}" for at in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *reads], made, name="one", **given or {})],
        "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [onnx.ValueInfoProto(name=name) for name in made],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def same(model, opset, *, without=(), tolerance=1e-5):
    """Lower, let ONNX and ONNX Runtime judge, and give the operators."""
    got = lowered(model, opset=opset, without=without).model
    onnx.checker.check_model(got, full_check=True)
    (entry,) = got.opset_import
    assert entry.version == opset
    (spec,) = OrtSession.open(model, threads=1).inputs
    x = np.random.default_rng(3).normal(size=spec.shape).astype(spec.dtype) * 3
    old = OrtSession.open(model, threads=1, optimize=False).run({"x": x})
    new = OrtSession.open(got, threads=1, optimize=False).run({"x": x})
    assert list(old) == list(new)
    for name, value in old.items():
        np.testing.assert_allclose(new[name], value, rtol=tolerance, atol=tolerance)
    assert got.graph.node[-1].name == "one"
    return [node.op_type for node in got.graph.node]


I64 = np.int64
F = np.float32
KERNEL = np.random.default_rng(5).normal(size=(3, 4, 3, 3)).astype(F)
GRID = np.random.default_rng(6).uniform(-1, 1, (1, 3, 3, 2)).astype(F)
CASES = {
    **{
        f"Reduce{kind}": (net(f"Reduce{kind}", I64([2, 3]), opset=18), 17, [f"Reduce{kind}"])
        for kind in ["L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
    },
    "all axes": (net("ReduceMean", opset=18), 17, ["ReduceMean"]),
    "no axis": (
        net("ReduceMean", I64([]), opset=18, given={"noop_with_empty_axes": 1}), 17, ["Identity"]
    ),
    "a Reduce with types of 20": (net("ReduceMax", I64([1]), opset=20), 18, ["ReduceMax"]),
    "equal parts": (
        net("Split", opset=18, outputs=2, given={"axis": 1, "num_outputs": 2}), 17, ["Split"]
    ),
    "unequal parts": (
        net("Split", opset=18, outputs=3, given={"axis": 3, "num_outputs": 3}), 17,
        ["Constant", "Split"],
    ),
    "Pad of some axes": (
        net("Pad", I64([1, 2, 0, 3]), F(0.5), I64([3, -2]), opset=19), 17, ["Constant", "Pad"]
    ),
    "Pad": (net("Pad", I64([0, 0, 1, 1] * 2), opset=21), 13, ["Pad"]),
    "Resize by scales of some axes": (
        net("Resize", "", F([2, 3]), opset=18, given={"axes": [2, 3]}), 17, ["Constant", "Resize"]
    ),
    "Resize to sizes of some axes": (
        net("Resize", "", "", I64([9, 9]), opset=19, given={"axes": [-1, 2], "mode": "linear"}),
        13, ["Constant", "Resize"],
    ),
    "ScatterElements": (
        net(
            "ScatterElements", I64([[[[0]]]]), F([[[[1]]]]), opset=18, given={"reduction": "add"}
        ),
        17, ["ScatterElements"],
    ),
    "Cast": (net("Cast", opset=19, given={"to": TensorProto.INT32, "saturate": 1}), 13, ["Cast"]),
    "AveragePool": (
        net("AveragePool", opset=22, given={"kernel_shape": [2, 2], "dilations": [1, 1]}), 17,
        ["AveragePool"],
    ),
    "Conv": (net("Conv", KERNEL, opset=22), 13, ["Conv"]),
    "BatchNormalization": (
        net("BatchNormalization", *[F([1, 2, 3, 4])] * 4, opset=15), 13, ["BatchNormalization"]
    ),
    "Reshape": (
        net("Reshape", I64([0, -1]), opset=21, given={"allowzero": 0}), 13, ["Reshape"]
    ),
    "Reshape with a 0 that may stand": (
        net("Reshape", I64([1, -1]), opset=14, given={"allowzero": 1}), 13, ["Reshape"]
    ),
    "GridSample": (
        net("GridSample", GRID, opset=20, given={"mode": "cubic"}), 16, ["GridSample"],
    ),
    "HardSwish": (net("HardSwish", opset=14), 13, ["HardSigmoid", "Mul"]),
    "Mish": (net("Mish", opset=18), 17, ["Softplus", "Tanh", "Mul"]),
    "Swish": (net("Swish", opset=24), 17, ["Sigmoid", "Mul"]),
    "Gelu": (
        net("Gelu", opset=20), 17,
        ["Constant", "Div", "Erf", "Constant", "Add", "Mul", "Constant", "Mul"],
    ),
    "CastLike": (
        net("CastLike", np.int32(1), opset=19), 13, ["Cast"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_an_operator_computes_in_an_older_opset_what_it_computed(what):
    model, opset, wanted = CASES[what]
    assert same(model, opset) == wanted


@pytest.mark.parametrize("axis", [-1, -2, 3, 1])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_norms_over_the_last_axes(rng, op, axis):
    shape = IMAGE[axis:]
    constants = [rng.normal(size=shape).astype(F) for _ in range(2 if op[0] == "L" else 1)]
    model = net(op, *constants, opset=24, given={"axis": axis, "epsilon": 1e-3})
    made = same(model, 17 if op[0] == "R" else 13, tolerance=1e-4)
    assert "ReduceMean" in made and op not in made
    assert made[-1] == ("Add" if op[0] == "L" else "Mul")


def test_a_norm_that_the_parser_does_not_read_although_the_opset_has_it():
    model = net("LayerNormalization", F([1] * 8), opset=17)
    assert lowered(model, opset=17).model is model
    for opset in (17, 20):  # axes of the ReduceMean in an attribute, and in an input
        own = net("LayerNormalization", F([1, 2] * 4), opset=opset)
        assert "Pow" in same(own, opset, without={"LayerNormalization"}, tolerance=1e-4)


def test_groups_with_a_scale_for_each_channel(rng):
    scale, bias = rng.normal(size=(2, 4)).astype(F)
    model = net("GroupNormalization", scale, bias, opset=21, given={"num_groups": 2})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", F32, IMAGE))
    for opset in (17, 20):  # in 20 the same node would mean a scale for each group
        assert "InstanceNormalization" in same(model, opset, tolerance=1e-4)


def test_gelu_by_tanh():
    made = same(net("Gelu", opset=20, given={"approximate": "tanh"}), 17)
    assert "Tanh" in made and "Erf" not in made


REFUSED = {
    "axes that are computed": (
        net("ReduceMean", "x", opset=18, kind=TensorProto.INT64, shape=[2]), "axes are not constant"
    ),
    "an attribute that matters": (
        net("Resize", "", F([1, 1, 0.5, 0.5]), opset=18, given={"antialias": 1, "mode": "linear"}),
        "attribute antialias",
    ),
    "a word that is new": (net("Pad", I64([0] * 8), opset=19, given={"mode": "wrap"}), "wraps"),
    "dilations": (
        net("AveragePool", opset=19, given={"kernel_shape": [2, 2], "dilations": [2, 2]}),
        "attribute dilations",
    ),
    "an operator that is new": (
        net("BitwiseNot", opset=18, kind=TensorProto.INT32), "no other operators are known"
    ),
    "another meaning": (net("DFT", opset=20, shape=[1, 4, 2]), "no other operators are known"),
    "a type that is new": (
        net("ReduceMax", I64([1]), opset=20, kind=TensorProto.BOOL), "must have a form in opset 17"
    ),
    "the largest of several": (
        net(
            "ScatterElements", I64([[[[0]]]]), F([[[[1]]]]), opset=18, given={"reduction": "max"}
        ),
        "its reduction is the largest or smallest",
    ),
    "a size that is open": (
        net("Split", opset=18, outputs=2, shape=["n", 4], given={"num_outputs": 2}), "not known"
    ),
    "an opset of the future": (net("Relu", opset=26), "between opset 13 and 25, got 26 for 17"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_one_sentence(what):
    model, said = REFUSED[what]
    before = model.SerializeToString()
    with pytest.raises(ExportError, match=said) as told:
        lowered(model, opset=17)
    node = model.graph.node[0]
    assert node.op_type in str(told.value) or "opset" in str(told.value)
    assert str(told.value).count("\n") == 0 and model.SerializeToString() == before


@settings(max_examples=25)
@given(
    axes=st.sets(st.integers(-4, 3), max_size=3).filter(
        lambda s: len({a % 4 for a in s}) == len(s)
    ),
    keep=st.booleans(),
)
def test_a_reduction_over_any_axes(axes, keep):
    model = net("ReduceSumSquare", I64(sorted(axes)), opset=18, given={"keepdims": int(keep)})
    same(model, 17, tolerance=1e-4)


@settings(max_examples=25)
@given(size=st.integers(2, 9), count=st.integers(1, 4))
def test_any_number_of_parts(size, count):
    if -(-size // count) * (count - 1) < size:  # else the last part would be empty
        model = net("Split", opset=18, outputs=count, shape=[2, size], given={"axis": -1,
                    "num_outputs": count})  # fmt: skip
        same(model, 17)


@settings(max_examples=25)
@given(
    pads=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    axes=st.permutations(range(-4, 0)).map(lambda order: order[:2]),
    mode=st.sampled_from(["constant", "edge", "reflect"]),
)
def test_pads_of_any_axes(pads, axes, mode):
    shape = [3, 4, 5, 6]
    same(net("Pad", I64(pads), "", I64(axes), opset=18, shape=shape, given={"mode": mode}), 17)


# ---------------------------------------------------------------- whole models


def test_nodes_of_bodies_are_lowered_too_each_with_its_own_constants():
    def body(axis):
        return helper.make_graph(
            [helper.make_node("ReduceMean", ["x", "axes"], ["m"], name="inside")], "body", [],
            [helper.make_tensor_value_info("m", F32, None)],
            [numpy_helper.from_array(I64([axis]), "axes")],
        )  # fmt: skip

    for yes in (True, False):
        model = net("Relu", opset=18)
        model.graph.node[0].name = "first"
        model.graph.initializer.append(numpy_helper.from_array(np.bool_(yes), "yes"))
        branches = {"then_branch": body(1), "else_branch": body(2)}
        model.graph.node.append(helper.make_node("If", ["yes"], ["z"], name="one", **branches))
        model.graph.output.append(helper.make_tensor_value_info("z", F32, [1, None, None, 8]))
        assert same(model, 17) == ["Relu", "If"]


def test_what_onnx_does_not_know_is_kept_and_the_nodes_behind_it_are_lowered():
    model = net("Relu", opset=20)
    model.graph.node[0].output[0] = "r"
    made = helper.make_node("Own", ["r"], ["p"], domain="TRT", name="plugin", some=3)
    old = helper.make_node("EfficientNMS_TRT", ["p"], ["q"], name="nms")
    last = helper.make_node("ReduceMean", ["q", "axes"], ["y0"], name="one")
    model.graph.node.extend([made, old, last])
    model.opset_import.append(helper.make_opsetid("TRT", 1))
    model.graph.initializer.append(numpy_helper.from_array(I64([1]), "axes"))
    got = lowered(model, opset=17)
    assert [n for n in got.model.graph.node][1:3] == [made, old]
    assert list(got.model.graph.node[3].input) == ["q"] and got.rewritten == {"ReduceMean": 1}


def test_the_count_and_the_version_of_the_file_are_told():
    model = net("Mish", opset=21)
    got = lowered(model, opset=17)
    assert got.rewritten == {"Mish": 1} and got.model.ir_version == 8 and model.ir_version == 10
    assert lowered(model, opset=21).model is model and not lowered(model, opset=22).rewritten
