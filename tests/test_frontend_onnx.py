"""Loading ONNX: what is cleaned, that values and names stay, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.errors import ModelError, QuantizedError
from deploy.frontends import FRONTENDS, fold, load
from deploy.frontends.affine import fold_affine
from deploy.frontends.onnx_reader import parse_model
from deploy.frontends.shapes import infer_shapes, without_values
from deploy.graph.index import Graph, all_nodes
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse
from deploy.pipeline import float_reference
from deploy.pipeline.float_reference import read_float_model
from deploy.runtimes.ort import OrtSession
from tests.models import make_model, make_node, make_value, parse_nodes, run_command, save_net


def floats(name, *shape):
    rng = np.random.default_rng(list(name.encode()))
    return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def model_of(nodes, weights=(), *, inputs=None, outputs=None, **versions):
    inputs = inputs or [make_value("x", ["n", 3, 8, 8])]
    outputs = outputs or [make_value(nodes[-1].output[0], None)]
    return make_model(nodes, inputs, outputs, weights, **versions)


def norm(name, source, target, channels, **attributes):
    """A BatchNormalization node and its four parameters."""
    variance = np.random.default_rng(7).uniform(0.2, 2, channels).astype(np.float32)
    weights = [floats(f"{name}_{p}", channels) for p in ("gamma", "beta", "mean")]
    weights.append(numpy_helper.from_array(variance, f"{name}_var"))
    names = [source, *(w.name for w in weights)]
    return make_node("BatchNormalization", names, [target], name=name, **attributes), weights


def run(model, x):
    """Return the first output, by nodes that are run as they stand."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def types(model):
    return [node.op_type for node in model.graph.node]


def check_same(model, tolerance=1e-5):
    """Load the model, which must compute what the file computes; return what is loaded."""
    sides = model.graph.input[0].type.tensor_type.shape.dim
    x = np.random.default_rng(1).normal(size=[side.dim_value or 2 for side in sides])
    x, loaded = x.astype(np.float32), load(model)
    outputs, expected = run(loaded.model, x), run(model, x)
    np.testing.assert_allclose(outputs, expected, rtol=tolerance, atol=tolerance)
    return loaded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "grouped", "Gemm", "GemmT"])
def test_batchnorm_folds_into_its_layer(kind, bias):
    if kind.startswith("Gemm"):
        weight = floats("w", 6, 4) if kind == "GemmT" else floats("w", 4, 6)
        attributes = {"transB": int(kind == "GemmT"), "alpha": 0.5, "beta": 2.0}
        op, inputs = "Gemm", [make_value("x", ["n", 4])]
    else:
        inputs = [make_value("x", ["n", 4, 6, 6])]
        attributes = {"group": 2} if kind != "Conv" else {}
        op = "Conv" if kind in ("Conv", "grouped") else "ConvTranspose"
        sides = {"Conv": (6, 4, 3, 3), "grouped": (6, 2, 3, 3)}
        weight = floats("w", *sides.get(kind, (4, 3, 3, 3)))
    weights = [weight, floats("b", 6)] if bias else [weight]
    layer = make_node(op, ["x", *(w.name for w in weights)], "c", **attributes)
    bn, parameters = norm("bn", "c", "y", 6, epsilon=1e-3)
    model = model_of([layer, bn], [*weights, *parameters], inputs=inputs)
    loaded = check_same(model)
    assert types(loaded.model) == [op]
    assert loaded.model.graph.node[0].output[0] == "y"
    assert any("Folded 1 BatchNormalization" in note for note in loaded.notes)
    assert "BatchNormalization" in types(load(model, fold_batchnorm=False).model)


def test_batchnorm_of_shared_input_stays():
    conv = make_node("Conv", "x w", "c")
    bn, parameters = norm("bn", "c", "y", 4)
    weights = [floats("w", 4, 3, 1, 1), *parameters]
    two_users = model_of([conv, bn, make_node("Add", "c y", "z")], weights)
    is_output = model_of([conv, bn], weights, outputs=[make_value(n, None) for n in ("c", "y")])
    for model in (two_users, is_output):
        loaded = load(model)
        assert "BatchNormalization" in types(loaded.model)
        assert any("Left 1 BatchNormalization" in note for note in loaded.notes)


def test_shared_weight_is_scaled_once():
    convs = [make_node("Conv", "x w", [out]) for out in ("c", "d")]
    bn, parameters = norm("bn", "c", "y", 4)
    add = make_node("Add", "d y", "z")
    model = model_of([*convs, bn, add], [floats("w", 4, 3, 1, 1), *parameters])
    assert types(check_same(model).model) == ["Conv", "Conv", "Add"]


PER_CHANNEL = np.random.default_rng(7).uniform(0.5, 2, (1, 4, 1, 1)).astype(np.float32)
PER_COLUMN = np.random.default_rng(8).uniform(0.5, 2, 8).astype(np.float32)


@pytest.mark.parametrize("layer", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    ("op", "constant", "folds"),
    [
        ("Mul", np.float32(0.7), True),
        ("Mul", PER_CHANNEL, True),
        ("Div", PER_CHANNEL, True),
        ("Add", PER_CHANNEL[0], True),
        ("Sub", np.float32([[0.3]]), True),
        ("Add", PER_COLUMN, False),
        ("Mul", PER_CHANNEL[None], False),
        ("Div", np.float32(0), False),
    ],
)
def test_only_constants_per_channel_fold(layer, op, constant, folds):
    nodes = [make_node(layer, "x w", "c"), make_node(op, "c k", "y")]
    inputs = [make_value("x", ["n", 4, 8, 8])]
    weights = [floats("w", 4, 4, 1, 1), numpy_helper.from_array(np.asarray(constant), "k")]
    loaded = check_same(model_of(nodes, weights, inputs=inputs))
    assert types(loaded.model) == ([layer] if folds else [layer, op])


def test_scales_and_shifts_fold_in_order():
    bn, parameters = norm("bn", "c", "b", 4)
    nodes = [
        make_node("Conv", "x w", "c"),
        bn,
        make_node("Mul", "two b", "m"),
        make_node("Add", "m two", "a"),
        make_node("Sub", "two a", "y"),
    ]
    model = model_of(nodes, [floats("w", 4, 3, 3, 3), floats("two", 1), *parameters])
    loaded = check_same(model)
    assert types(loaded.model) == ["Conv", "Sub"]
    assert loaded.model.graph.node[0].output[0] == "a"


MOVES = {
    "channels last": [("Transpose", {"perm": [0, 2, 3, 1]}, None)],
    "a side of one taken out": [("Squeeze", {}, [-1])],
    "put back elsewhere": [("Squeeze", {}, [3]), ("Unsqueeze", {}, [0, -1])],
    "turned after that": [("Squeeze", {}, [3]), ("Transpose", {"perm": [0, 2, 1]}, None)],
}


@pytest.mark.parametrize(
    ("moves", "shape", "folds"),
    [
        ("channels last", (4,), True),
        ("channels last", (1, 1, 1, 4), True),
        ("channels last", (8, 1, 1), False),  # along another axis
        ("a side of one taken out", (4, 1), True),
        ("a side of one taken out", (8,), False),
        ("put back elsewhere", (4, 1, 1), True),
        ("turned after that", (4,), True),
    ],
)
@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_constants_fold_through_moving_nodes(moves, shape, folds, op):
    nodes, weights = [make_node("Conv", "x w", "c")], [floats("w", 4, 3, 1, 8)]
    for number, (kind, attributes, axes) in enumerate(MOVES[moves]):
        reads = [nodes[-1].output[0], *([f"axes{number}"] if axes else [])]
        weights += [ints(f"axes{number}", *axes)] if axes else []
        nodes.append(make_node(kind, reads, f"m{number}", **attributes))
    nodes.append(make_node(op, [nodes[-1].output[0], "k"], "a"))
    nodes.append(make_node("Relu", "a", "y"))
    loaded = check_same(model_of(nodes, [*weights, floats("k", *shape)]))
    assert (op in types(loaded.model)) is not folds
    tensors = {name for node in loaded.model.graph.node for name in node.output}
    assert "a" in tensors
    assert ("c" in tensors) is not folds  # no old name for what is other than it was


def test_shared_moves_are_not_folded_through():
    text = "c = Conv (x, w) t = Transpose <perm = [0, 2, 3, 1]> (c)"
    nodes = parse_nodes(f"{text} a = Add (t, k) y = Mul (a, t)")
    loaded = load(model_of(nodes, [floats("w", 4, 3, 1, 1), floats("k", 4)]))
    assert types(loaded.model) == ["Conv", "Transpose", "Add", "Mul"]


def concat_model(kinds, *, axis=1, affine="bn", has_transpose=False):
    """Convs (or what `kinds` says) of x side by side, and an affine node behind their Concat."""
    nodes, weights, ends = [], [], []
    for number, kind in enumerate(kinds):
        weights += [floats(f"w{number}", *((4, 3) if kind == "Conv" else (3, 4)), 1, 1)]
        reads = ["x"] if kind == "MaxPool" else ["x", f"w{number}"]
        attributes = {"kernel_shape": [1, 1]} if kind == "MaxPool" else {}
        nodes.append(make_node(kind, reads, f"c{number}", name=f"n{number}", **attributes))
        ends.append(f"c{number}")
        if has_transpose:
            ends[-1] = f"t{number}"
            nodes.append(make_node("Transpose", f"c{number}", [ends[-1]], perm=[0, 2, 3, 1]))
    nodes.append(make_node("Concat", ends, "joined", name="concat", axis=axis))
    channels = 4
    if axis == 1:
        channels = 4 * len(kinds) - kinds.count("MaxPool")  # a MaxPool of x has three
    if affine == "bn":
        bn, parameters = norm("bn", "joined", "a", channels)
        nodes, weights = [*nodes, bn], [*weights, *parameters]
    else:
        nodes.append(make_node("Mul", "joined k", "a"))
        weights.append(floats("k", *((4 * len(kinds),) if has_transpose else (channels, 1, 1))))
    return model_of([*nodes, make_node("Relu", "a", "y")], weights)


@pytest.mark.parametrize(
    ("kinds", "options", "folds"),
    [
        (["Conv", "Conv"], {}, True),  # YOLOv5's BottleneckCSP, MixNet
        (["Conv", "ConvTranspose", "Conv"], {}, True),
        (["Conv", "Conv"], {"affine": "Mul"}, True),
        (["Conv", "Conv"], {"affine": "Mul", "has_transpose": True, "axis": -1}, True),
        (["Conv", "MaxPool"], {}, False),  # the half that has no weights would stay as it was
        (["Conv", "Conv"], {"axis": 2}, False),  # one below the other: both have all channels
    ],
)
def test_constants_fold_through_a_concat(kinds, options, folds):
    loaded = check_same(concat_model(kinds, **options))
    assert bool(set(types(loaded.model)) & {"BatchNormalization", "Mul"}) is not folds
    tensors = {name for node in loaded.model.graph.node for name in node.output}
    assert "a" in tensors
    old_names = {"c0", "t0", "joined"} & tensors  # no old name for what is other than it was
    assert bool(old_names) is not folds


def test_concat_of_shared_layer_keeps_batchnorm():
    model = concat_model(["Conv", "Conv"])
    model.graph.output.append(make_value("c1", None))
    assert "BatchNormalization" in types(load(model).model)


def test_two_nodes_fold_through_a_concat():
    model = concat_model(["Conv", "Conv"])
    del model.graph.node[-1]
    model.graph.node.append(make_node("Add", "a k", "y"))
    model.graph.initializer.append(floats("k", 8, 1, 1))
    assert types(check_same(model).model) == ["Conv", "Conv", "Concat"]


def test_excluded_node_is_not_folded():
    nodes, weights = [], [floats("w", 4, 3, 1, 1), floats("v", 4, 3, 1, 1)]
    for word, weight in (("one", "w"), ("two", "v")):
        bn, parameters = norm(f"bn_{word}", f"c_{word}", f"y_{word}", 4)
        nodes += [make_node("Conv", ["x", weight], f"c_{word}"), bn]
        weights += parameters
    model = model_of([*nodes, make_node("Add", "y_one y_two", "y")], weights)
    assert fold_affine(model.graph, excluded=["bn_one"]) == {"BatchNormalization": 1}
    assert types(model) == ["Conv", "BatchNormalization", "Conv", "Add"]
    assert {node.domain for node in model.graph.node} == {""}


def test_batchnorm_of_negative_variance_stays():
    conv = make_node("Conv", "x w", "c")
    bn, parameters = norm("bn", "c", "y", 4)
    parameters[3].CopyFrom(numpy_helper.from_array(np.full(4, -1, np.float32), "bn_var"))
    loaded = load(model_of([conv, bn], [floats("w", 4, 3, 1, 1), *parameters]))
    assert types(loaded.model) == ["Conv", "BatchNormalization"]


def test_computed_pads_become_one_constant():
    nodes = parse_nodes(f"""
        four = Constant <value_ints = [4]> ()
        zeros = ConstantOfShape <value = int64[1] {{0}}> (four)
        given = Constant <value = int64[4] {{0, 1, 0, 1}}> ()
        all = Concat <axis = 0> (given, zeros) pairs = Reshape (all, shape)
        back = Slice (pairs, minus, end, axis, minus)
        turned = Transpose <perm = [1, 0]> (back) flat = Reshape (turned, minus)
        pads = Cast <to = {TensorProto.INT64}> (flat) y = Pad <mode = "constant"> (x, pads)
    """)
    weights = [ints("shape", -1, 2), ints("end", -(2**62)), ints("axis", 0), ints("minus", -1)]
    loaded = check_same(model_of(nodes, weights), 0)
    assert types(loaded.model) == ["Pad"]
    assert "Folded 9 constant nodes." in loaded.notes


@pytest.mark.parametrize(
    ("size", "loaded_size", "operators"),
    [
        (1, 1, ["Reshape"]),
        ("n", "n", ["Shape", "Reshape"]),
        (0, None, ["Shape", "Reshape"]),  # the exporter did not know it
    ],
)
def test_only_static_shapes_become_constants(size, loaded_size, operators):
    nodes = [make_node("Shape", "x", "s"), make_node("Reshape", "x s", "y")]
    loaded = load(model_of(nodes, inputs=[make_value("x", [size, 3, 8, 8])]))
    assert types(loaded.model) == operators
    assert loaded.inputs[0].shape == (loaded_size, 3, 8, 8)


def test_local_functions_are_inlined():
    body = [make_node("Mul", "a a", "m"), make_node("Relu", "m", "b")]
    opsets = [helper.make_opsetid("", 13)]
    function = helper.make_function("own", "Squared", ["a"], ["b"], body, opsets)
    nodes = [make_node("Squared", "x", "c", domain="own"), make_node("Neg", "c", "y")]
    model = model_of(nodes, domains=["own"])
    model.functions.append(function)
    loaded = check_same(model, 0)
    assert types(loaded.model) == ["Mul", "Relu", "Neg"]
    assert loaded.notes == ("Inlined 1 function.",)


def test_contrib_operator_is_left_in_float():
    node = make_node("Gelu", "x", "y", domain="com.microsoft")
    (note,) = load(model_of([node], domains=["com.microsoft"])).notes
    assert note == "Left in float: 1 com.microsoft.Gelu (not of the standard operator set)."


@pytest.mark.parametrize("imported", [[("", 13)], [("ai.onnx", 13)], [("", 13), ("ai.onnx", 13)]])
def test_standard_domain_gets_its_short_name(imported):
    model = model_of([make_node("Neg", "x", "y", domain="ai.onnx")])
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*entry) for entry in imported)
    loaded = load(model).model
    assert [node.domain for node in loaded.graph.node] == [""]
    assert [(entry.domain, entry.version) for entry in loaded.opset_import] == [("", 13)]


def test_random_and_huge_constants_stay_nodes():
    nodes = parse_nodes(
        "big = ConstantOfShape (shape) m = ReduceMax <keepdims = 0> (big)"
        "r = RandomUniform <shape = [1]> () s = Add (m, r) y = Add (x, s)"
    )
    operators = types(load(model_of(nodes, [ints("shape", 2**40)])).model)
    assert operators[0] == "ConstantOfShape"
    assert "RandomUniform" in operators


@pytest.mark.parametrize(
    ("nodes", "operators"),
    [
        ("t = Expand (one, sizes) y = Add (x, t)", ["Expand", "Add"]),
        ("t = Cast <to = 1> (bytes) y = Add (x, t)", ["Cast", "Add"]),
        ("v = Expand (one, sizes) y = Conv (x, v)", ["Expand", "Conv"]),
        ("v = Cast <to = 1> (bytes) y = Conv (x, v)", ["Conv"]),  # int8 is smaller
        ("v = Mul (w, one) y = Conv (x, v)", ["Conv"]),  # as large as what it replaces
        ("v = Transpose <perm = [1, 0, 2, 3]> (w) c = Conv (x, v) y = Add (c, w)", ["Conv", "Add"]),
        ("t = Expand (one, few) y = Add (x, t)", ["Add"]),
    ],
)
def test_constant_larger_than_its_node_stays(nodes, operators):
    weights = [ints("sizes", 32, 32, 3, 3), ints("few", 1, 32, 3, 3), floats("one", 1)]
    weights.append(numpy_helper.from_array(np.ones((32, 32, 3, 3), np.int8), "bytes"))
    weights.append(floats("w", 32, 32, 3, 3))
    inputs = [make_value("x", [32, 32, 3, 3])]
    loaded = check_same(model_of(parse_nodes(nodes), weights, inputs=inputs), 1e-3)
    assert types(loaded.model) == operators
    plan = analyse(loaded.model, ONNXRUNTIME)
    assert not {"t", "v"}.intersection(plan.activations)


def test_large_weights_are_joined(monkeypatch):
    monkeypatch.setattr(fold, "_MAX_RESULT", 1 << 12)  # as large as one of them
    nodes = parse_nodes("v = Concat <axis = 0> (a, b) y = Conv (x, v)")
    weights = [floats(name, 16, 32, 3, 3) for name in "ab"]
    model = model_of(nodes, weights, inputs=[make_value("x", [1, 32, 3, 3])])
    assert types(check_same(model, 1e-3).model) == ["Conv"]


def test_adapter_that_was_not_merged_is_part_of_its_weight():
    """As LoRA leaves it: weight + a product of two small matrices."""
    nodes = parse_nodes("p = MatMul (a, b) v = Add (w, p) y = MatMul (x, v)")
    weights = [floats("w", 768, 768), floats("a", 768, 8), floats("b", 8, 768)]
    loaded = check_same(model_of(nodes, weights, inputs=[make_value("x", [1, 768])]), 1e-3)
    assert types(loaded.model) == ["MatMul"]


def test_casts_without_effect_are_removed():
    f32, i64 = {"to": TensorProto.FLOAT}, {"to": TensorProto.INT64}
    nodes = [
        make_node("Cast", "x", "x1", **f32),
        make_node("Conv", "x1 w", "c"),
        make_node("Cast", "c", "c1", **f32),
        make_node("Cast", "c1", "c2", **f32),
        make_node("Mul", "c2 two", "m"),
        make_node("Cast", "m", "i", **i64),
        make_node("Cast", "i", "f", **f32),
        make_node("Cast", "f", "y", **f32),  # an output's name stays
    ]
    loaded = check_same(model_of(nodes, [floats("w", 4, 3, 1, 1), floats("two", 1)]), 0)
    assert types(loaded.model) == ["Conv", "Cast", "Cast", "Cast"]
    assert any("3 casts" in note for note in loaded.notes)


def test_identity_and_dropout_are_removed():
    nodes = parse_nodes(
        "w2 = Identity (w) c = Conv (x, w2) c2 = Identity (c) c3 = Dropout (c2)"
        "r = Relu (c3) y = Identity (r)"
    )
    loaded = check_same(model_of(nodes, [floats("w", 4, 3, 1, 1)]), 0)
    assert types(loaded.model) == ["Conv", "Relu", "Identity"]
    assert [o.name for o in loaded.outputs] == ["y"]


def if_model(then, otherwise, source, *nodes, shape, **versions):
    """An If of two nodes that read `source`, behind the nodes `before`."""
    bodies = [
        helper.make_graph([make_node(op, source, [name])], name, [], [make_value(name, None)])
        for op, name in ((then, "t"), (otherwise, "e"))
    ]
    choose = make_node("If", "flag", "y", then_branch=bodies[0], else_branch=bodies[1])
    inputs = [make_value("x", shape), make_value("flag", [], TensorProto.BOOL)]
    return model_of([*nodes, choose], inputs=inputs, **versions)


def test_tensor_of_a_subgraph_is_renamed():
    nodes = make_node("Abs", "x", "a"), make_node("Identity", "a", "c")
    loaded = load(if_model("Relu", "Neg", "c", *nodes, shape=["n", 3]))
    assert types(loaded.model) == ["Abs", "If"]
    assert any(note == "Left in float: 1 If (with all nodes inside)." for note in loaded.notes)
    assert [i.dtype for i in loaded.inputs] == ["float32", "bool"]
    assert loaded.inputs[0].shape == ("n", 3)


def test_dead_nodes_and_weights_are_removed():
    nodes = [make_node("Neg", "x", "dead"), make_node("Relu", "x", "y")]
    loaded = load(model_of(nodes, [floats("unread", 5)]))
    assert types(loaded.model) == ["Relu"]
    assert not loaded.model.graph.initializer


def test_nodes_are_sorted_and_cycles_refused():
    a, b = make_node("Relu", "x", "a"), make_node("Neg", "a", "y")
    outputs = [make_value("y", None)]
    assert types(load(model_of([b, a], outputs=outputs)).model) == ["Relu", "Neg"]
    loop = make_node("Add", "x y", "a")
    with pytest.raises(ModelError, match="cycle"):
        load(model_of([loop, b], outputs=outputs))


def test_graph_without_a_name_is_loaded():
    model = make_model("y = Relu (x)", {"x": [2]}, {"y": [2]})
    model.graph.name = ""
    assert load(model).name == "model"


def test_node_names_are_made_unique():
    nodes = [
        make_node("Relu", "x", "a"),
        make_node("Relu", "a", "b", name="same"),
        make_node("Relu", "b", "c", name="same"),
    ]
    names = [node.name for node in load(model_of(nodes)).model.graph.node]
    assert names == ["Relu_a", "same", "same_1"]


@pytest.mark.parametrize("opset", [7, 9, 11, 12])
def test_old_opsets_are_lifted(opset):
    nodes = parse_nodes("c = Conv (x, w) s = Softmax (c) y = Unsqueeze <axes = [0]> (s)")
    inputs = [make_value("x", [2, 3, 8, 8]), make_value("w", [4, 3, 1, 1])]
    model = model_of(nodes, [floats("w", 4, 3, 1, 1)], inputs=inputs, opset=opset, ir=3)
    loaded = check_same(model, 1e-7)
    assert loaded.model.opset_import[0].version == 13
    assert [i.name for i in loaded.inputs] == ["x"]
    assert {"c", "s", "y"} <= {o for n in loaded.model.graph.node for o in n.output}
    assert any(note.startswith(f"Lifted from opset {opset} to 13") for note in loaded.notes)


def small():
    return model_of([make_node("Conv", "x w b", "y")], [floats("w", 4, 3, 3, 3), floats("b", 4)])


def test_graph_is_refused_as_no_model():
    with pytest.raises(ModelError, match="GraphProto"):
        load(small().graph)


ROOT = Path(__file__).parent.parent


def test_digest_ignores_the_file_layout(tmp_path):
    model = small()
    digest = load(model).digest
    inside_path, outside_path = tmp_path / "inside.onnx", tmp_path / "outside.onnx"
    onnx.save(model, inside_path)
    onnx.save(small(), outside_path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").is_file()
    assert load(inside_path).digest == load(str(outside_path)).digest == digest
    retyped = small()
    values = numpy_helper.to_array(retyped.graph.initializer[0]).ravel().tolist()
    retyped.graph.initializer[0].ClearField("raw_data")
    retyped.graph.initializer[0].float_data.extend(values)
    retyped.graph.node[0].name = "called"
    retyped.doc_string = "doc"
    retyped.producer_name = "someone"
    assert load(retyped).digest == digest
    changed = small()
    weight = numpy_helper.to_array(changed.graph.initializer[0]).copy()
    weight[0, 0, 0, 0] = np.nextafter(weight[0, 0, 0, 0], np.float32(9))
    changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    assert load(changed).digest != digest
    padded = small()
    padded.graph.node[0].attribute.append(helper.make_attribute("pads", [1, 1, 1, 1]))
    assert load(padded).digest != digest


@pytest.mark.slow
def test_loading_is_equal_in_another_process(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(small(), path)
    loaded_bytes = load(path).model.SerializeToString(deterministic=True)
    code = (
        "import sys, hashlib; from deploy.frontends import load;"
        "m = load(sys.argv[1]).model.SerializeToString(deterministic=True);"
        "sys.stdout.buffer.write(m)"
    )
    process = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True)
    assert process.stdout == loaded_bytes


def test_loading_twice_changes_nothing_more():
    model = small()
    model_bytes = model.SerializeToString(deterministic=True)
    loaded = load(model)
    assert model.SerializeToString(deterministic=True) == model_bytes
    assert (loaded.source, loaded.name) == (None, "net")
    loaded_bytes = loaded.model.SerializeToString(deterministic=True)
    twice = load(loaded.model)
    assert twice.model.SerializeToString(deterministic=True) == loaded_bytes
    assert not twice.notes


@pytest.mark.slow
def test_importing_the_frontends_imports_no_runtime():
    code = "import sys, deploy.frontends; print({'onnxruntime', 'torch'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout.strip() == "set()", process.stderr


def test_frontends_map_suffixes_to_loaders():
    assert all(suffix.startswith(".") and callable(f) for suffix, f in FRONTENDS.items())
    assert not any(True for _ in all_nodes(onnx.GraphProto()))


@pytest.mark.parametrize("min_size", [0, 1 << 40])
def test_shapes_need_no_large_weights(min_size, small_cnn, monkeypatch):
    model = onnx.load(small_cnn)
    expected_model = onnx.shape_inference.infer_shapes(onnx.load(small_cnn), data_prop=True)
    monkeypatch.setattr("deploy.frontends.shapes._MAX_SMALL_WEIGHT", min_size)
    assert (without_values(model) is None) == (min_size > 0)
    inferred, expected = (
        m.SerializeToString(deterministic=True) for m in (infer_shapes(model), expected_model)
    )
    assert inferred == expected


@pytest.fixture
def listing(small_cnn, tmp_path):
    """small_cnn with its weights among the inputs, as PyTorch wrote them into IR 4."""
    return save_with_listed_weights(4, small_cnn, tmp_path / "listing.onnx")


def save_with_listed_weights(version, source, path):
    model = onnx.load(source)
    model.ir_version = version
    weights = model.graph.initializer
    model.graph.input.extend(
        make_value(weight.name, weight.dims, weight.data_type) for weight in weights
    )
    return save_net(model, path)


def open_session(model):
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def test_timed_float_model_has_constant_weights(listing):
    session_of_file = open_session(listing.read_bytes())
    assert len(session_of_file.get_overridable_initializers()) == load(listing).fed_weights == 8
    timed_session = open_session(read_float_model(load(listing)))
    assert [spec.name for spec in timed_session.get_inputs()] == ["x"]
    assert not timed_session.get_overridable_initializers()
    x = X[:2, :3].repeat(2, axis=2).repeat(2, axis=3)
    assert np.allclose(
        timed_session.run(None, {"x": x})[0], session_of_file.run(None, {"x": x})[0], atol=1e-5
    )


def test_weights_listed_in_ir_3_stay(small_cnn, tmp_path):
    path = save_with_listed_weights(3, small_cnn, tmp_path / "old.onnx")
    assert not open_session(path.read_bytes()).get_overridable_initializers()
    assert load(path).fed_weights == 0
    assert read_float_model(load(path)) == path.read_bytes()


def test_timed_float_model_has_unique_names(listing):
    model = onnx.load(listing)
    for node in model.graph.node:
        node.name = "one"
    onnx.save(model, listing)
    names = [node.name for node in parse_model(read_float_model(load(listing)), "it").graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_report_notes_weights_among_inputs(listing, small_cnn, pictures, tmp_path):
    def notes(model):
        options = ("--out", tmp_path / "out", "--duration", 0.001, "--effort", 0)
        run_command("build", model, "--images", pictures, *options)
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        return [note for note in report["notes"] if "weights" in note]

    (weight_note,) = notes(listing)
    assert "8 weights" in weight_note
    assert "FP32" in weight_note
    assert "constants" in weight_note
    assert notes(small_cnn) == []


X = np.random.default_rng(1).normal(size=(24, 16, 8, 8)).astype(np.float32)


def stored_integers(scale_kind: str) -> onnx.ModelProto:
    """Two Convs, whose weights [16, 16, 3, 3] have a scale, one a channel, or one a block."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {}
    for layer in "ab":
        integers = rng.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
        has_blocks = scale_kind in ("block", "short block")
        shape = (16, 4, 3, 3) if has_blocks else {"channel": (16,)}.get(scale_kind, ())
        scale = rng.uniform(0.5e-3, 2e-3, shape).astype(np.float32)
        weights |= {f"{layer}_q": integers, f"{layer}_s": scale}
        weights[f"{layer}_z"] = np.full(shape, 3 if scale_kind == "tensor" else 0, np.int8)
        # of 5 weights, the last block has 1
        blocks = {"axis": 1, "block_size": 5 if scale_kind == "short block" else 4}
        attributes = blocks if "block" in scale_kind else {}
        if scale_kind == "channel":
            attributes = {"axis": 0}
        names = [f"{layer}_q", f"{layer}_s", f"{layer}_z"]
        nodes.append(make_node("DequantizeLinear", names, f"{layer}_w", layer, **attributes))
    pads = {"pads": [1, 1, 1, 1]}
    nodes += [("Conv", "x a_w", "c", pads), ("Relu", "c", "r"), ("Conv", "r b_w", "y", pads)]
    opset = 21 if "block" in scale_kind else 13
    return make_model(nodes, {"x": ["n", 16, 8, 8]}, {"y": None}, weights, opset=opset, ir=10)


@pytest.mark.parametrize("scale_kind", ["tensor", "channel", "block", "short block"])
def test_stored_integers_become_float_weights(scale_kind):
    loaded = load(stored_integers(scale_kind))
    assert {node.op_type for node in loaded.model.graph.node} == {"Conv", "Relu"}
    assert "Converted 2 weights from stored integers to float." in loaded.notes
    assert run(loaded.model, X).tobytes() == run(stored_integers(scale_kind), X).tobytes()


def test_unread_float_weights_are_no_inputs():
    model = stored_integers("channel")
    for layer in "ab":
        model.graph.input.append(make_value(f"{layer}_float", [16, 16, 3, 3]))
    assert [spec.name for spec in load(model).inputs] == ["x"]


@pytest.mark.parametrize("scale_kind", ["tensor", "channel"])
def test_model_of_stored_integers_is_built(scale_kind, tmp_path):
    onnx.save(stored_integers(scale_kind), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", X)
    options = ("--out", tmp_path / "out", "--duration", 0, "--effort", 0, "--accept")
    printed = run_command("build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", *options)
    assert "calibrated" in printed
    assert "quantized already" not in printed
    notes = json.loads((tmp_path / "out" / "report.json").read_text())["notes"]
    assert any("FP32 is" in note and "net" in note for note in notes)
    built = onnx.load(tmp_path / "out" / "net.int8.onnx")
    convs = [node for node in built.graph.node if node.op_type == "Conv"]
    producer = {name: node for node in built.graph.node for name in node.output}
    assert [producer[node.input[0]].op_type for node in convs] == ["DequantizeLinear"] * 2


def test_model_of_stored_integers_needs_images(tmp_path):
    onnx.save(stored_integers("channel"), tmp_path / "net.onnx")
    result = CliRunner().invoke(cli, ["build", str(tmp_path / "net.onnx")])
    assert result.exit_code != 0
    assert "--images" in result.output


def quantized_model(kind: str) -> onnx.ModelProto:
    model = stored_integers("channel")
    if kind == "quantizes":
        model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "s"))
        last_node = model.graph.node.pop()
        last_node.input[0] = "r_dq"
        quantize = make_node("QuantizeLinear", "r s", "r_q", name="q")
        back = make_node("DequantizeLinear", "r_q s", "r_dq", name="dq")
        model.graph.node.extend([quantize, back, last_node])
    elif kind == "fed":
        model.graph.input.append(make_value("a_q", None, TensorProto.INT8))
        del model.graph.initializer[0]
    else:
        del model.graph.initializer[1]
        model.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "a_s"))
    return model


@pytest.mark.parametrize("kind", ["quantizes", "fed", "does not fit"])
def test_quantized_models_are_refused(kind):
    with pytest.raises(QuantizedError, match="quantized already"):
        load(quantized_model(kind))


@pytest.mark.parametrize("block_size", [-1, 3, 1 << 40, 1 << 62])
def test_blocks_that_do_not_fit_are_refused(block_size):
    model = stored_integers("block")
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "block_size":
            attribute.i = block_size
    with pytest.raises(QuantizedError, match="quantized already"):
        load(model)


@pytest.mark.parametrize(("op", "is_alike"), [("Sigmoid", True), ("Neg", False)])
def test_rounding_near_zero_is_no_difference(op, is_alike, monkeypatch):
    """A detector's map of a picture without objects: 1e-6 at most, as exact as values up to 1."""
    nodes = [make_node(op, ["x"], ["s"]), make_node("Transpose", ["s"], ["y"])]
    model = model_of(nodes, inputs=[make_value("x", [1, 4])], opset=13)
    x = np.float32([[-14, -15, -16, -80]]) if op == "Sigmoid" else np.float32([[1e-6, 0, 0, 0]])
    value = run(model, x)
    sample, outputs = {"x": x}, {"y": value + np.float32(5e-7)}
    evaluation_set = SimpleNamespace(samples_with_outputs=lambda count: [(sample, outputs)])
    session = OrtSession.open(model, threads=1)
    ((db, name),) = float_reference._compare_outputs(session, evaluation_set, Graph(model))
    assert name == "y" and (db > 100) == is_alike
