"""Which nodes of a graph run in int8, and where its pairs stand."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import Plan, analyse, never_negative
from tests.models import as_float32, make_model, parse_nodes, set_domain

LAYER = "Conv <pads = [1, 1, 1, 1]>"


POOL = "m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)"


def make(nodes, weights, *, shape=(1, 4, 8, 8), opset=13):
    """A model x -> y of ONNX's text; a tuple of sizes stands for random weights."""
    rng = np.random.default_rng(0)
    random_weights = {n: rng.normal(size=w) for n, w in weights.items() if isinstance(w, tuple)}
    weights = weights | random_weights
    arguments = ({"x": shape}, {"y": None}, as_float32(weights))
    return onnx.shape_inference.infer_shapes(
        make_model(parse_nodes(nodes), *arguments, opset=opset)
    )


def reason_by_node(plan: Plan) -> dict[str, str]:
    return {d.node: d.reason for d in plan.decisions}


def paired_tensors(model, placement=ONNXRUNTIME) -> list[str]:
    return [pair.tensor for pair in analyse(model, placement).pairs]


CONV = {"w": (4, 4, 3, 3), "b": (4,)}


THIN = {"w": (8, 3, 3, 3), "b": (8,), "v": (4, 8, 3, 3)}


def test_pair_stands_behind_the_relu():
    model = make(f"c = {LAYER}(x, w, b) y = Relu(c)", CONV)
    plan = analyse(model, ONNXRUNTIME)
    assert all(d.quantized for d in plan.decisions)
    assert paired_tensors(model) == ["x", "y"]
    assert [(w.name, w.axis, w.bias) for w in plan.weights] == [("w", 0, "b")]
    assert paired_tensors(model, TENSORRT) == ["x"]


def test_relu_of_shared_input_stays_float():
    model = make(f"c = {LAYER}(x, w, b) r = Relu(c) y = Add(c, r)", CONV)
    assert paired_tensors(model) == ["x", "c"]
    assert "not run in" in reason_by_node(analyse(model, ONNXRUNTIME))["Relu_r"]


@pytest.mark.parametrize(("low", "end"), [(-1, "c"), (0, "y")])
def test_clip_tail_must_begin_at_zero(low, end):
    nodes = f"c = {LAYER}(x, w, b) y = Clip(c, lo, hi)"
    assert paired_tensors(make(nodes, {**CONV, "lo": low, "hi": 1})) == ["x", end]


def test_add_needs_int8_before_and_after():
    nodes = f"c = {LAYER}(x, w, b) a = Add(x, c) d = {LAYER}(a, w, b) y = Add(d, x)"
    plan = analyse(make(nodes, CONV), ONNXRUNTIME)
    *int8_reasons, last_reason = (decision.reason for decision in plan.decisions)
    assert int8_reasons == ["", "", ""]
    assert "nothing after it" in last_reason


def test_thin_first_conv_stays_float():
    nodes = f"c = {LAYER}(x, w, b) r = Relu(c) y = {LAYER}(r, v)"
    model = make(nodes, THIN, shape=(1, 3, 8, 8))
    assert "only 27 multiplications" in reason_by_node(analyse(model, ONNXRUNTIME))["Conv_c"]
    assert paired_tensors(model) == ["r", "y"]
    assert (
        paired_tensors(model, replace(ONNXRUNTIME, min_products=0))[0]
        == paired_tensors(model, TENSORRT)[0]
        == "x"
    )


@pytest.mark.parametrize(
    "activation", ["r = Relu(c)", "r = HardSwish(c)", "s = Sigmoid(c) r = Mul(c, s)"]
)
def test_thin_conv_before_maxpool_is_int8(activation):
    reasons = []
    for reader in (f"{LAYER}(m, v)", "Sin(m)"):
        nodes = f"c = {LAYER}(x, w, b) {activation} {POOL} y = {reader}"
        model = make(nodes, THIN, shape=(1, 3, 8, 8), opset=14)
        reasons.append(reason_by_node(analyse(model, ONNXRUNTIME)))
    before_conv, before_float = reasons
    assert set(before_conv.values()) == {""}
    assert "27 multiplications" in before_float["Conv_c"]


def test_int8_add_takes_only_one_number():
    nodes = (
        f"c = {LAYER}(x, w, b) s = Sigmoid(c) m = Mul(c, s) d = {LAYER}(m, w, b)"
        f"e = Add(d, three) y = {LAYER}(e, w, b)"
    )
    channel_model = make(nodes, {**CONV, "three": (1, 4, 1, 1)})
    scalar_model = make(nodes, {**CONV, "three": 3})
    decisions = analyse(channel_model, ONNXRUNTIME).decisions
    float_reasons = {d.node: d.reason for d in decisions if not d.quantized}
    assert list(float_reasons) == ["Add_e"]
    assert "operands is constant" in float_reasons["Add_e"]
    assert paired_tensors(channel_model) == ["x", "c", "s", "m", "d", "e", "y"]
    plan = analyse(scalar_model, ONNXRUNTIME)
    assert all(d.quantized for d in plan.decisions)
    assert plan.int8_scalars == ("Add_e",)
    plan = analyse(scalar_model, TENSORRT)
    assert "constant" in reason_by_node(plan)["Add_e"]
    assert plan.int8_scalars == ()


def test_tensorrt_quantizes_the_skip_branch():
    model = make(f"c = {LAYER}(x, w, b) a = Add(c, x) y = {LAYER}(a, w, b)", CONV)
    pairs = {p.tensor: p.consumers for p in analyse(model, TENSORRT).pairs}
    assert pairs == {"x": ("Conv_c", "Add_a"), "a": ("Conv_y",)}


def test_moving_nodes_share_their_input_scale():
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
def test_float_nodes_have_a_reason(node, weights, reason):
    shape = (8, 8) if "Gemm" in node else (1, 4, 8, 8)
    plan = analyse(make(node, weights, shape=shape), ONNXRUNTIME)
    assert reason in plan.decisions[0].reason
    assert plan.pairs == ()
    assert plan.weights == ()


def test_missing_scale_makes_nodes_float():
    model = make(f"c = {LAYER}(x, w, b) y = {LAYER}(c, w, b)", CONV)
    plan = analyse(model, ONNXRUNTIME, float_tensors={"y": "was 0 in every sample"})
    assert reason_by_node(plan) == {"Conv_c": "", "Conv_y": "y was 0 in every sample"}
    plan = analyse(model, ONNXRUNTIME, float_nodes=["Conv_c"])
    assert reason_by_node(plan)["Conv_c"].startswith("kept float")


def test_never_negative_follows_pools_and_reshapes():
    nodes = "r = Relu(x) p = GlobalAveragePool(r) f = Flatten(p) y = Neg(f)"
    assert never_negative(make(nodes, {})) == {"r", "p", "f"}


def test_custom_relu_may_be_negative():
    model = make("r = Relu (x) p = MaxPool (r) y = Relu (p)", {})
    set_domain(model, "Relu")
    assert not never_negative(model)


each_placement = pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)


@each_placement
def test_decisions_name_the_placement_grid(placement):
    model = make(f"c = {LAYER}(x, w, b) r = Relu(c) y = Erf(r)", CONV)
    decisions, grid = analyse(model, placement).decisions, placement.grid.name
    assert [d.precision for d in decisions] == [grid, grid, "float32"]
    assert all(d.quantized == (not d.reason) for d in decisions)
