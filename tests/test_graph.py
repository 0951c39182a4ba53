"""The index and edits of an ONNX graph, and which nodes run in int8."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from calib8 import build
from calibrators.percentile import minmax
from calibrators.scales import Scale
from deploy.errors import ConfigError, ExportError, ModelError
from deploy.frontends import load
from deploy.graph import edit
from deploy.graph.edit import _find_stem, rename_added
from deploy.graph.index import CachedGraph, Graph, attributes, match_nodes, match_patterns
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import ModelAnalysis, Plan, analyse, never_negative
from deploy.targets import TARGETS
from deploy.targets.onnxruntime import qdq
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.tuning.prices import group_units
from deploy.tuning.search_options import Tuning
from tests.models import as_float32, make_model, make_node, make_value, parse_nodes, run_net

LAYER = "Conv <pads = [1, 1, 1, 1]>"
POOL = "m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)"


def make(nodes, weights, *, shape=(1, 4, 8, 8), opset=13):
    """A model x -> y of ONNX's text; a tuple of sizes stands for random weights."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=w) if isinstance(w, tuple) else w for n, w in weights.items()}
    given = ({"x": shape}, {"y": None}, as_float32(weights))
    return onnx.shape_inference.infer_shapes(make_model(parse_nodes(nodes), *given, opset=opset))


def decided(plan: Plan) -> dict[str, str]:
    return {d.node: d.reason for d in plan.decisions}


def paired(model, placement=ONNXRUNTIME) -> list[str]:
    return [pair.tensor for pair in analyse(model, placement).pairs]


CONV = {"w": (4, 4, 3, 3), "b": (4,)}
THIN = {"w": (8, 3, 3, 3), "b": (8,), "v": (4, 8, 3, 3)}


def test_the_pair_goes_behind_the_relu_and_not_between():
    model = make(f"c = {LAYER}(x, w, b) y = Relu(c)", CONV)
    plan = analyse(model, ONNXRUNTIME)
    assert all(d.int8 for d in plan.decisions)
    assert paired(model) == ["x", "y"]
    assert [(w.name, w.axis, w.bias) for w in plan.weights] == [("w", 0, "b")]
    assert paired(model, TENSORRT) == ["x"]


def test_a_relu_whose_input_has_another_reader_is_no_tail():
    model = make(f"c = {LAYER}(x, w, b) r = Relu(c) y = Add(c, r)", CONV)
    assert paired(model) == ["x", "c"]
    assert "not run in int8" in decided(analyse(model, ONNXRUNTIME))["Relu_r"]


@pytest.mark.parametrize(("low", "end"), [(-1, "c"), (0, "y")])
def test_a_clip_that_does_not_end_at_zero_is_no_tail(low, end):
    nodes = f"c = {LAYER}(x, w, b) y = Clip(c, lo, hi)"
    assert paired(make(nodes, {**CONV, "lo": low, "hi": 1})) == ["x", end]


def test_glue_runs_in_int8_only_between_int8():
    nodes = f"c = {LAYER}(x, w, b) a = Add(x, c) d = {LAYER}(a, w, b) y = Add(d, x)"
    plan = analyse(make(nodes, CONV), ONNXRUNTIME)
    assert [one.reason for one in plan.decisions] == ["", "", "", "nothing after it runs in int8"]


def test_a_thin_first_conv_is_faster_in_float_on_a_cpu():
    nodes = f"c = {LAYER}(x, w, b) r = Relu(c) y = {LAYER}(r, v)"
    model = make(nodes, THIN, shape=(1, 3, 8, 8))
    assert "only 27 products" in decided(analyse(model, ONNXRUNTIME))["Conv_c"]
    assert paired(model) == ["r", "y"]
    assert (
        paired(model, replace(ONNXRUNTIME, min_products=0))[0] == paired(model, TENSORRT)[0] == "x"
    )


@pytest.mark.parametrize(
    "activation", ["r = Relu(c)", "r = HardSwish(c)", "s = Sigmoid(c) r = Mul(c, s)"]
)
def test_a_thin_first_conv_before_a_max_pool_is_not_left_float(activation):
    int8, alone = (
        decided(analyse(make(nodes, THIN, shape=(1, 3, 8, 8), opset=14), ONNXRUNTIME))
        for last in (f"{LAYER}(m, v)", "Sin(m)")
        for nodes in [f"c = {LAYER}(x, w, b) {activation} {POOL} y = {last}"]
    )
    assert set(int8.values()) == {""}
    assert "only 27 products" in alone["Conv_c"]


def test_silu_and_an_add_of_one_number_run_in_int8_and_one_of_many_does_not():
    nodes = (
        f"c = {LAYER}(x, w, b) s = Sigmoid(c) m = Mul(c, s) d = {LAYER}(m, w, b)"
        f"e = Add(d, three) y = {LAYER}(e, w, b)"
    )
    many, one = (make(nodes, {**CONV, "three": three}) for three in ((1, 4, 1, 1), 3))
    floats = {d.node: d.reason for d in analyse(many, ONNXRUNTIME).decisions if not d.int8}
    assert floats == {"Add_e": "one of its operands is constant"}
    assert paired(many) == ["x", "c", "s", "m", "d", "e", "y"]
    plan = analyse(one, ONNXRUNTIME)
    assert all(d.int8 for d in plan.decisions)
    assert plan.int8_scalars == ("Add_e",)
    plan = analyse(one, TENSORRT)
    assert "constant" in decided(plan)["Add_e"]
    assert plan.int8_scalars == ()


def test_tensorrt_quantizes_the_skip_branch_of_a_residual_add():
    model = make(f"c = {LAYER}(x, w, b) a = Add(c, x) y = {LAYER}(a, w, b)", CONV)
    pairs = {p.tensor: p.consumers for p in analyse(model, TENSORRT).pairs}
    assert pairs == {"x": ("Conv_c", "Add_a"), "a": ("Conv_y",)}


def test_moving_nodes_share_the_scale_of_what_they_move():
    nodes = f"c = {LAYER}(x, w, b) r = Relu(c) {POOL} f = Flatten(m) y = Gemm(f, g)"
    plan = analyse(make(nodes, {**CONV, "g": (64, 10)}), ONNXRUNTIME)
    assert dict(plan.scale_owners) == {"m": "r", "f": "r"}
    assert plan.activations == ("x", "r")
    assert [(w.name, w.axis) for w in plan.weights] == [("w", 0), ("g", 1)]


@pytest.mark.parametrize(
    ("node", "weights", "reason"),
    [
        ("y = Conv(x, x)", {}, "its weights are not constant"),
        ("y = Gemm <alpha = 2.0> (x, g)", {"g": (8, 3)}, "alpha or beta"),
        ("y = MatMul(g, x)", {"g": (8, 8)}, "first factor"),
        ("y = Sin(x)", {}, "Sin is not run in int8 on onnxruntime"),
    ],
)
def test_what_stays_float_says_why(node, weights, reason):
    shape = (8, 8) if "Gemm" in node else (1, 4, 8, 8)
    plan = analyse(make(node, weights, shape=shape), ONNXRUNTIME)
    assert reason in plan.decisions[0].reason
    assert plan.pairs == ()
    assert plan.weights == ()


def test_a_tensor_without_a_scale_makes_its_nodes_float():
    model = make(f"c = {LAYER}(x, w, b) y = {LAYER}(c, w, b)", CONV)
    plan = analyse(model, ONNXRUNTIME, float_tensors={"y": "was 0 in every sample"})
    assert decided(plan) == {"Conv_c": "", "Conv_y": "y was 0 in every sample"}
    kept = analyse(model, ONNXRUNTIME, float_nodes=["Conv_c"])
    assert decided(kept)["Conv_c"] == "kept float as asked"


def test_never_negative_follows_pools_and_reshapes():
    nodes = "r = Relu(x) p = GlobalAveragePool(r) f = Flatten(p) y = Neg(f)"
    assert never_negative(make(nodes, {})) == {"r", "p", "f"}


each_placement = pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)


@each_placement
def test_a_decision_carries_the_grid_of_its_placement(placement):
    model = make(f"c = {LAYER}(x, w, b) r = Relu(c) y = Erf(r)", CONV)
    decisions, grid = analyse(model, placement).decisions, placement.grid.name
    assert [d.precision for d in decisions] == [grid, grid, "float32"]
    assert all(d.int8 == d.quantized == (not d.reason) for d in decisions)


def tensor(name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(2, np.float32), name)


def value(name: str) -> onnx.ValueInfoProto:
    return make_value(name, [2])


@pytest.fixture
def model() -> onnx.ModelProto:
    """Two Adds, an If whose branch captures `inner`, a Constant node, and a weight nobody reads."""
    branch = helper.make_graph([make_node("Add", "b inner", "then")], "branch", [], [value("then")])
    nodes = [
        make_node("Constant", "", "five", value=tensor("")),
        make_node("Add", "x w", "a"),
        make_node("Add", "a a", "b", name="mine"),
        make_node("If", "cond", "y", then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x"), make_value("cond", [], TensorProto.BOOL), value("w")],
        [value("y")],
        [tensor("w"), tensor("inner"), tensor("idle")],
        value_info=[value("a")],
    )
    return helper.make_model(graph)


def test_edits_that_give_a_model_leave_theirs_alone(model):
    before = model.SerializeToString(deterministic=True)
    copy = edit.copy_message(model)
    del copy.graph.node[:]
    tapped = edit.copy_with_outputs(model, ["a", "y", "a"])
    assert [output.name for output in tapped.graph.output] == ["y", "a"]
    assert model.SerializeToString(deterministic=True) == before


def test_a_field_can_be_replaced_by_parts_of_itself(model):
    graph = model.graph
    edit.replace_nodes(graph, reversed(graph.node))
    assert [node.op_type for node in graph.node] == ["If", "Add", "Add", "Constant"]
    edit.update_tensors(graph.initializer, {"w": tensor("w"), "new": tensor("new")})
    assert [t.name for t in graph.initializer] == ["w", "inner", "idle", "new"]


def test_what_only_a_subgraph_reads_is_kept_and_what_nobody_reads_is_not(model):
    graph = model.graph
    edit.drop_unread(graph)
    assert [t.name for t in graph.initializer] == ["w", "inner"]
    edit.rebuild(graph, [node for node in graph.node if node.op_type == "If"])
    assert [t.name for t in graph.initializer] == ["inner"]
    assert not graph.value_info
    assert [i.name for i in graph.input] == ["x", "cond", "w"]


def test_weights_leave_the_list_of_inputs(model):
    assert [edit.drop_initializer_inputs(model.graph) for _ in range(2)] == [1, 0]
    assert [i.name for i in model.graph.input] == ["x", "cond"]


def test_the_two_rules_for_names(model):
    other = edit.copy_message(model)
    assert edit.name_nodes(model.graph) == edit.name_nodes_by_index(other.graph) == 3
    names = [[node.name for node in m.graph.node] for m in (model, other)]
    assert names[0] == ["Constant_five", "Add_a", "mine", "If_y"]
    assert names[1] == ["Constant_0", "Add_1", "mine", "If_3"]


def test_the_index_knows_constants_readers_and_what_is_fed(model):
    graph = Graph(model)
    assert graph.inputs == ["x", "cond"]
    assert graph.outputs == {"y"}
    assert set(graph.initializers) == {"w", "inner", "idle"}
    assert set(graph.constants) == {"w", "inner", "idle", "five"}
    assert [node.name for node in graph.readers["a"]] == ["mine"]
    assert graph.captured == {"b", "inner"}
    own = {"group": 2, "pads": [1, 1]}
    assert attributes(make_node("Conv", "x w", "y", **own)) == own


def test_nodes_that_stay_are_the_same_and_new_ones_come_between_them(model):
    graph = model.graph
    constant, first, second, branches = graph.node
    new = make_node("Neg", "a", "n")
    edit.replace_nodes(graph, [first, new, branches, constant])
    assert [node.op_type for node in graph.node] == ["Add", "Neg", "If", "Constant"]
    assert graph.node[0] is first
    assert graph.node[1] == new
    assert graph.node[1] is not new
    assert second.name == "mine"
    assert second not in list(graph.node)


def test_a_copy_can_leave_constants_out_and_is_the_same_but_for_them(model):
    model.metadata_props.add(key="made by", value="a test")
    model.doc_string = "with notes"
    assert edit.copy_without_initializers(model, ()) == model
    copy, wanted = edit.copy_without_initializers(model, {"w", "idle"}), edit.copy_message(model)
    del wanted.graph.initializer[2], wanted.graph.initializer[0]
    one, other = (m.SerializeToString(deterministic=True) for m in (copy, wanted))
    assert one == other


def test_an_index_of_what_nobody_changes_says_what_any_index_says(model):
    still, graph = CachedGraph(model), Graph(model)
    for node in (*model.graph.node, *model.graph.node):
        assert still.data_inputs(node) == graph.data_inputs(node)
        assert still.tail(node) == graph.tail(node)
    for number in range(50):  # nodes of no graph, each where the one before it lay
        node = make_node("Add", f"in{number} w", f"out{number}")
        assert still.data_inputs(node) == [f"in{number}"]
        assert still.tail(node) == f"out{number}"


@pytest.fixture(scope="module")
def calibrated(histograms, small_cnn):
    model = load(small_cnn).model
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    tensors = {t for p in (ONNXRUNTIME, TENSORRT) for t in analyse(model, p).activations}
    found = histograms(model, sorted(tensors), samples)
    return model, {name: minmax(histogram) for name, histogram in found.items()}, samples


@pytest.fixture(scope="module")
def quantized(calibrated):
    """(model, its scales, its plan for ONNX Runtime, what is written of these)."""
    model, scales, _ = calibrated
    plan = analyse(model, ONNXRUNTIME)
    return model, scales, plan, write_qdq(model, plan, scales)


def constants(model) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@each_placement
def test_the_quantized_model_is_valid_and_close(calibrated, placement):
    model, scales, samples = calibrated
    before = model.SerializeToString(deterministic=True)
    quantized = write_qdq(model, analyse(model, placement), scales)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(quantized, full_check=True)
    want, got = (
        np.concatenate([run_net(one, s["x"])[0] for s in samples]) for one in (model, quantized)
    )
    noise = ((want - got) ** 2).sum() / (want**2).sum()
    assert 0 < noise < 10 ** (-25 / 10)


@each_placement
def test_weights_that_were_stored_before_are_not_rounded_again(calibrated, placement, monkeypatch):
    model, scales, _ = calibrated
    wider = {
        name: replace(scales[name], lo=2 * scales[name].lo, hi=2 * scales[name].hi)
        for name in scales
    }
    plan, known = analyse(model, placement), {}

    def once(key, make):
        if key not in known:
            known[key] = make()
        return known[key]

    write_qdq(model, plan, scales, memoize=once)
    plain = [write_qdq(model, plan, one).SerializeToString() for one in (scales, wider)]
    monkeypatch.delattr(qdq, "quantize_weight")
    for one, wanted in zip((scales, wider), plain, strict=True):
        assert write_qdq(model, plan, one, memoize=once).SerializeToString() == wanted


@pytest.mark.parametrize("float_nodes", [(), ("Conv_c2",)])
def test_a_model_that_was_read_before_is_written_the_same(calibrated, float_nodes):
    model, scales, _ = calibrated
    read = ModelAnalysis(model)
    for kept in ((), float_nodes, ()):
        calls = ({"analysis": each} for each in (read, None))
        one, other = (analyse(model, ONNXRUNTIME, float_nodes=kept, **call) for call in calls)
        assert one == other
        written = [write_qdq(model, plan, scales).SerializeToString() for plan in (one, other)]
        assert written[0] == written[1]


def test_a_weight_that_a_float_node_reads_too_stays_where_it_was(calibrated):
    model, scales, _ = calibrated
    shared = edit.copy_message(model)
    weight = next(n for n in shared.graph.node if n.op_type == "Conv").input[1]
    place = list(constants(shared)).index(weight)
    shared.graph.node.append(make_node("Neg", [weight], "beside", name="beside"))
    shared.graph.output.append(onnx.ValueInfoProto(name="beside"))
    held = constants(write_qdq(shared, analyse(shared, ONNXRUNTIME), scales))
    assert list(held).index(weight) <= place
    assert f"{weight}/quantized" in held
    assert held[weight].dtype == np.float32


def test_weights_are_int8_and_no_float_copy_is_left(quantized):
    model, *_, written = quantized
    held = constants(written)
    assert not [name for name, v in held.items() if v.dtype == np.float32 and v.size > 64]
    kinds = {value.dtype for name, value in held.items() if name.endswith("/quantized")}
    assert kinds == {np.dtype(np.int8), np.dtype(np.int32)}
    assert len(written.SerializeToString()) < len(model.SerializeToString()) / 2


def test_onnxruntime_fuses_every_layer_into_its_int8_kernels(quantized, kernels):
    kinds = set(kernels(quantized[-1]))
    assert {"QLinearConv", "QLinearAdd", "QGemm"} <= kinds
    assert not kinds & {"Conv", "FusedConv", "Gemm", "Add", "Relu"}


def test_names_of_outputs_and_inner_tensors_stay_and_a_missing_scale_is_named(quantized):
    model, scales, plan, written = quantized
    assert [o.name for o in written.graph.output] == [o.name for o in model.graph.output]
    made = {name for n in written.graph.node for name in n.output}
    assert {p.tensor for p in plan.pairs} - {"x"} <= made
    with pytest.raises(ExportError, match=r"1 have none \(x\)"):
        write_qdq(model, plan, {n: s for n, s in scales.items() if n != "x"})


def test_a_bias_beyond_int32_widens_its_weight_scale(small_cnn):
    model = load(small_cnn).model
    weight = constants(model)["w1"].copy()
    weight[0] = 1e-9
    changed = {"w1": weight, "b1": np.full(8, 3.0, np.float32)}
    made = {name: numpy_helper.from_array(value, name) for name, value in changed.items()}
    edit.update_tensors(model.graph.initializer, made)
    plan = analyse(model, ONNXRUNTIME)
    one = Scale(lo=-1, hi=1, amax=1, observed_min=-1, observed_max=1, method="minmax")
    ints = constants(write_qdq(model, plan, dict.fromkeys(plan.activations, one)))
    (name,) = [n for n in ints if n.startswith("b1/") and n.endswith("/quantized")]
    scale = ints[name.replace("/quantized", "/scale")]
    assert np.allclose(ints[name].astype(np.float64) * scale, 3.0, rtol=2e-5)


def test_seven_bit_weights_for_cpus_that_saturate(quantized):
    model, scales, plan, _ = quantized
    for value in constants(write_qdq(model, plan, scales, weight_bits=7)).values():
        if value.dtype == np.int8 and value.ndim:
            assert np.abs(value.astype(int)).max() <= 63


def test_tensorrt_pairs_are_symmetric_with_zero_point_0(calibrated):
    model, scales, _ = calibrated
    plan = analyse(model, TENSORRT)
    written = write_qdq(model, plan, scales)
    held = constants(written)
    pairs = [n for n in written.graph.node if n.op_type == "QuantizeLinear"]
    assert pairs
    for node in pairs:
        tensor = node.name.removesuffix("/Q")
        assert held[node.input[2]] == 0
        assert held[node.input[2]].dtype == np.int8
        assert held[node.input[1]] == scales[plan.scale_owners.get(tensor, tensor)].symmetric
    assert not [value for value in held.values() if value.dtype == np.int32]


CONSTANTS = {"three": 3.0, "zero": 0.0, "six": 6.0}
WEIGHT = np.full((16, 16, 3, 3), 0.01)


def units(*nodes, target="onnxruntime", keep=(), outputs="y"):
    """Units of a model x -> outputs of (op, inputs, output[, attributes])."""
    weights = {i.split()[1]: WEIGHT for op, i, *_ in nodes if op == "Conv"}
    nodes = [make_node(op, i, [o], name=f"/{o}", **dict(*a)) for op, i, o, *a in nodes]
    inputs, outputs = {"x": [1, 16, 8, 8]}, dict.fromkeys(outputs.split())
    model = make_model(nodes, inputs, outputs, as_float32(CONSTANTS | weights), opset=17)
    cleaned = load(model).model
    return group_units(cleaned, TARGETS[target]().plan(cleaned, keep).decisions)


def conv(source, output):
    return "Conv", f"{source} w_{output}", output, {"pads": [1, 1, 1, 1]}


C1, RELU, SWISH = conv("x", "c1"), ("Relu", "c1", "r1"), ("HardSwish", "c1", "h")
SILU = [C1, ("Sigmoid", "c1", "s"), ("Mul", "c1 s", "m"), conv("m", "y")]
OTHER_GATE = [C1, conv("x", "c2"), ("Sigmoid", "c2", "s"), ("Mul", "c1 s", "m"), conv("m", "y")]
WRITTEN_OUT = [
    C1,
    ("Add", "c1 three", "a"),
    ("Clip", "a zero six", "b"),
    ("Mul", "c1 b", "m"),
    ("Div", "m six", "d"),
    conv("d", "y"),
]
EXCITE = [C1, conv("c1", "c2"), ("HardSigmoid", "c2", "s"), *OTHER_GATE[3:]]


@pytest.mark.parametrize(
    ("nodes", "given", "members"),
    [
        ([C1, RELU, conv("r1", "y")], {}, ["c1 r1", "y"]),  # a layer and its tail
        ([C1, RELU, conv("r1", "y")], {"outputs": "y c1"}, ["c1", "y"]),  # others look behind it
        ([C1, RELU, conv("r1", "y")], {"target": "ascend"}, ["c1", "y"]),  # float there
        (SILU, {}, ["c1", "s m", "y"]),  # with its gate, and apart from the layer
        (OTHER_GATE, {}, ["c1", "c2", "s", "m", "y"]),
        (EXCITE, {}, ["c1", "c2 s m", "y"]),  # of the layer that makes the gate
        (WRITTEN_OUT, {}, ["c1 a b m d", "y"]),
        ([C1, SWISH, conv("h", "y")], {}, ["c1 h", "y"]),
        ([C1, SWISH, conv("h", "y")], {"outputs": "y c1"}, ["c1", "h", "y"]),
        ([C1, SWISH, conv("h", "c2"), ("Add", "c1 c2", "y")], {}, ["c1", "h", "c2"]),
    ],
)
def test_a_unit_is_a_layer_with_what_it_makes_for_it_alone(nodes, given, members):
    wanted = [tuple(f"/{node}" for node in unit.split()) for unit in members]
    found = units(*nodes, **given)
    assert found.members == {unit[0]: unit for unit in wanted}
    assert set(found.layers) == {f"/{o}" for op, _, o, *_ in nodes if op == "Conv"}


def test_borders_are_edges_inlets_and_outlets():
    assert units(*SILU).edges == (("/c1", "/s", "c1"), ("/s", "/y", "m"))
    found = units(
        C1,
        ("Exp", "c1", "e"),
        conv("e", "c2"),
        conv("c1", "c3"),
        ("Add", "c2 c3", "s"),
        conv("s", "y"),
    )
    edges = {("/c1", "/c3", "c1"), ("/c2", "/s", "c2"), ("/c3", "/s", "c3"), ("/s", "/y", "s")}
    assert set(found.edges) == edges
    assert set(found.inlets) == {("/c1", "x"), ("/c2", "e")}
    assert set(found.outlets) == {("/c1", "c1"), ("/y", "y")}
    assert set(found.tensors) == {"c1", "c2", "c3", "s", "x", "e", "y"}
    assert set(found.shared_tensors(["/c2"])) == {"c2", "e"}
    assert found.layers == ("/c1", "/c2", "/c3", "/y")
    assert found.nodes(["/c3", "/s"]) == ("/c3", "/s")


def test_what_is_float_anyway_is_in_no_unit():
    found = units(C1, conv("c1", "c2"), conv("c2", "y"), keep=("/c2",))
    assert list(found.members) == ["/c1", "/y"]
    assert found.outlets == (("/c1", "c1"), ("/y", "y"))
    assert ("/y", "c2") in found.inlets


NAMES = st.lists(
    st.text(st.sampled_from("abc/[]*?!.@:#op0"), min_size=1, max_size=8), min_size=1, unique=True
)


NODES = {
    "/b/conv": "Conv",
    "/a/conv": "Conv",
    "/a/act": "Sigmoid",
    "conv0": "Conv",
    "conv[0]": "Gemm",
    "": "Sigmoid",
    "op:Conv": "Relu",
    "@home": "Relu",
}
NET = make_model([(op, "x", "y", {"name": name}) for name, op in NODES.items()], {}, {})


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((), ()),
        (("/a/act", "/b/conv"), ("/b/conv", "/a/act")),  # the model's order
        (("/a/*",), ("/a/conv", "/a/act")),
        (("/a/*", "/*/conv"), ("/b/conv", "/a/conv", "/a/act")),
        (("/?/act",), ("/a/act",)),
        (("op:Sigmoid",), ("/a/act",)),
        (("op:Sig*", "op:Gemm"), ("/a/act", "conv[0]")),
        (("conv[0]",), ("conv[0]",)),  # a name before its reading as a pattern
        (("conv[01]",), ("conv0",)),
        (("conv[[]*",), ("conv[0]",)),
        (("op:Conv",), ("op:Conv",)),
        (("@home",), ("@home",)),
    ],
)
def test_names_patterns_and_types(patterns, found):
    assert match_nodes(NET, patterns) == found


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("/a/cnov", "did you mean '/a/conv'?"),
        ("/model.22/*", "inspect --all"),
        ("op:Sigmoit", "did you mean 'op:Sigmoid'?"),
        ("OP:Sigmoid", "got 'OP:Sigmoid'"),
        ("op:conv", "did you mean 'op:Conv'?"),
        ("", "got ''"),
        ("@nowhere.txt", "must be a text file"),
        ("@", "must be a text file"),
        ("@\0", "must be a text file"),
    ],
)
def test_what_means_nothing_is_an_error(pattern, said):
    with pytest.raises(ConfigError) as caught:
        match_nodes(NET, ["/a/act", pattern])
    assert said in str(caught.value)


def test_a_file_holds_one_a_line(tmp_path):
    listed = tmp_path / "float.txt"
    listed.write_text("# the head\r\n\r\n  op:Sigmoid  \n/b/*\nconv[0]\n")
    assert match_nodes(NET, [f"@{listed}"]) == ("/b/conv", "/a/act", "conv[0]")
    listed.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least one"):
        match_nodes(NET, [f"@{listed}"])
    listed.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="text file"):
        match_nodes(NET, [f"@{listed}"])


@given(NAMES, st.data())
def test_every_name_means_itself_alone(names, data):
    known = [(name, "Conv") for name in names]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    assert match_patterns(known, sorted(chosen)) == tuple(name for name in names if name in chosen)


@given(NAMES, st.text(st.sampled_from("abc/*?[]!0"), min_size=1, max_size=6))
def test_a_pattern_means_what_a_shell_means_in_the_models_order(names, pattern):
    known = [(name, "Conv") for name in names]
    expected = tuple(n for n in names if fnmatchcase(n, pattern))
    if pattern in names:
        assert match_patterns(known, [pattern]) == (pattern,)
    elif expected:
        assert match_patterns(known, [pattern]) == expected
        assert match_patterns(known, [*expected, pattern]) == expected
    else:
        with pytest.raises(ConfigError):
            match_patterns(known, [pattern])


COLLIDING = {
    "a scale": ("Mul(f, k)", {"k": "r/scale"}),
    "a weight's integers": ("Conv(f, w3)", {"w3": "w2/quantized"}),
    "an activation's integers": ("Relu(f)", {"f": "r/quantized"}),
    "what Ascend runs": ("Relu(f)", {"d": "Conv_d.quant.exec.1.out"}),
    "an output": ("Relu(f)", {"y": "r/dequantized"}),
    "a pair that is gone": ("Conv(f, w3, e)", {"f": "gone/dequantized", "d": "none/float"}),
}


@pytest.mark.parametrize("case", COLLIDING)
def test_a_name_like_one_that_is_added_changes_no_figure(case, tmp_path):
    expression, names = COLLIDING[case]
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 1, 3, 3), "w2": (4, 4, 1, 1), "w3": (4, 4, 1, 1), "e": (4,)}
    arrays = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    text = "c = Conv(x, w) r = Relu(c) d = Conv(r, w2) f = Relu(d) g = "
    text += f"{expression} y = Relu(g)"
    arrays |= {"k": np.array(0.004)}
    arrays = {name: array for name, array in arrays.items() if name in text}
    plain = make_model(text, {"x": [1, 1, 8, 8]}, {"y": None}, as_float32(arrays))
    given = onnx.ModelProto.FromString(plain.SerializeToString())
    for value in (*given.graph.initializer, *given.graph.output):
        value.name = names.get(value.name, value.name)
    for node in given.graph.node:
        for own in (node.input, node.output):
            own[:] = [names.get(name, name) for name in own]
    samples = rng.normal(size=(4, 1, 1, 8, 8)).astype(np.float32)
    figures = []
    for model in (plain, given):
        report = build(
            model,
            [{"x": one} for one in samples],
            targets=["onnxruntime", "tensorrt", "ascend"],
            out=tmp_path / str(len(figures)),
            duration_s=0,
            tuning=Tuning(effort=0),
        )
        assert not report.failed
        engines = [engine for engine in report.engines if engine.verdict is not None]
        figures.append([engine.accuracy.outputs[0].sqnr_db for engine in engines])
    assert figures[0] == figures[1]
    assert len(figures[0]) == 3


def test_inputs_and_outputs_keep_their_names_or_are_refused():
    with pytest.raises(ModelError, match="'x/scale' beside 'x'"):
        rename_added(make_model([("Relu", "x", "x/scale")], {"x": [1]}, {"x/scale": [1]}).graph)


def test_every_word_behind_a_name_that_is_added_is_known():
    """Read from the code: f"{name}/word" and f"{name}.word" in what writes models."""
    pattern = re.compile(r'f"\{[^"{}]+\}((?:[/.][A-Za-z_]+\d*(?:\{[a-z]+\})?)+)"')
    found = {}
    for folder in ("targets", "graph"):
        for path in (Path(qdq.__file__).parents[2] / folder).rglob("*.py"):
            for text in pattern.findall(path.read_text()):
                found[re.sub(r"\{[a-z]+\}", "", text)] = path.name
    names = {"x", *(f"x{text}" for text in found)}
    unknown = {text: where for text, where in found.items() if not _find_stem(f"x{text}", names)}
    files = {".engine", ".gpu.cache", ".om", ".tensorrt", ".weight"}
    assert {t: w for t, w in unknown.items() if t not in files} == {}
    assert len(found) > 60
