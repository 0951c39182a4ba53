from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import Plan, analyse, never_negative


def make(nodes, weights, *, inputs=("x",), outputs=("y",), shape=(1, 4, 8, 8), opset=13):
    """A model of float tensors from nodes given as (op, inputs, outputs, attributes)."""
    rng = np.random.default_rng(0)
    built = [
        helper.make_node(op, list(i), list(o), name=f"{op}_{k}", **attributes)
        for k, (op, i, o, attributes) in enumerate(nodes)
    ]
    graph = helper.make_graph(
        built,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in inputs],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [
            numpy_helper.from_array(
                w if isinstance(w, np.ndarray) else rng.normal(size=w).astype(np.float32), n
            )
            for n, w in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def decided(plan: Plan) -> dict[str, str]:
    return {d.node: d.reason for d in plan.decisions}


CONV = {"w": (4, 4, 3, 3), "b": (4,)}
PADS = {"pads": [1, 1, 1, 1]}


def test_the_pair_goes_behind_the_relu_and_not_between():
    model = make([("Conv", "xwb", ["c"], PADS), ("Relu", "c", "y", {})], CONV)
    plan = analyse(model, ONNXRUNTIME)
    assert [p.tensor for p in plan.pairs] == ["x", "y"]
    assert all(d.int8 for d in plan.decisions)
    assert [(w.name, w.axis, w.bias) for w in plan.weights] == [("w", 0, "b")]
    assert [p.tensor for p in analyse(model, TENSORRT).pairs] == ["x"]


def test_a_relu_whose_input_has_another_reader_is_no_tail():
    nodes = [("Conv", "xwb", ["c"], PADS), ("Relu", "c", "r", {}), ("Add", "cr", "y", {})]
    plan = analyse(make(nodes, CONV), ONNXRUNTIME)
    assert [p.tensor for p in plan.pairs] == ["x", "c"]
    assert "not run in int8" in decided(plan)["Relu_1"]


def test_a_clip_that_does_not_end_at_zero_is_no_tail():
    nodes = [("Conv", "xwb", ["c"], PADS), ("Clip", ["c", "lo", "hi"], "y", {})]
    weights = {**CONV, "lo": np.array(-1, np.float32), "hi": np.array(1, np.float32)}
    assert [p.tensor for p in analyse(make(nodes, weights), ONNXRUNTIME).pairs] == ["x", "c"]
    weights["lo"] = np.array(0, np.float32)
    assert [p.tensor for p in analyse(make(nodes, weights), ONNXRUNTIME).pairs] == ["x", "y"]


def test_glue_runs_in_int8_only_between_int8():
    nodes = [
        ("Conv", "xwb", ["c"], PADS),
        ("Add", "xc", "a", {}),
        ("Conv", "awb", ["d"], PADS),
        ("Add", "dx", "y", {}),
    ]
    plan = analyse(make(nodes, CONV), ONNXRUNTIME)
    assert decided(plan) == {
        "Conv_0": "", "Add_1": "", "Conv_2": "", "Add_3": "nothing after it runs in int8",
    }  # fmt: skip


def test_a_thin_first_conv_is_faster_in_float_on_a_cpu():
    nodes = [("Conv", "xwb", ["c"], PADS), ("Relu", "c", "r", {}), ("Conv", ["r", "v"], "y", PADS)]
    weights = {"w": (8, 3, 3, 3), "b": (8,), "v": (4, 8, 3, 3)}
    model = make(nodes, weights, shape=(1, 3, 8, 8))
    plan = analyse(model, ONNXRUNTIME)
    assert "only 27 products" in decided(plan)["Conv_0"]
    assert [p.tensor for p in plan.pairs] == ["r", "y"]
    assert analyse(model, replace(ONNXRUNTIME, thin=0)).pairs[0].tensor == "x"
    assert analyse(model, TENSORRT).pairs[0].tensor == "x"


@pytest.mark.parametrize("activation", ["Relu", "HardSwish", "SiLU"])
def test_a_thin_first_conv_before_a_max_pool_is_not_left_float(activation):
    act = {
        "Relu": [("Relu", "c", "r", {})],
        "HardSwish": [("HardSwish", "c", "r", {})],
        "SiLU": [("Sigmoid", "c", "s", {}), ("Mul", "cs", "r", {})],
    }[activation]
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        ("Conv", "xwb", ["c"], PADS), *act, ("MaxPool", "r", "m", pool),
        ("Conv", ["m", "v"], "y", PADS),
    ]  # fmt: skip
    weights = {"w": (8, 3, 3, 3), "b": (8,), "v": (4, 8, 3, 3)}
    plan = analyse(make(nodes, weights, shape=(1, 3, 8, 8), opset=14), ONNXRUNTIME)
    assert set(decided(plan).values()) == {""}
    nodes[-1] = ("Sin", "m", "y", {})
    plan = analyse(make(nodes, weights, shape=(1, 3, 8, 8), opset=14), ONNXRUNTIME)
    assert "only 27 products" in decided(plan)["Conv_0"]


def test_silu_and_an_add_of_one_number_run_in_int8_and_one_of_many_does_not():
    nodes = [
        ("Conv", "xwb", ["c"], PADS),
        ("Sigmoid", "c", "s", {}),
        ("Mul", "cs", "m", {}),
        ("Conv", "mwb", ["d"], PADS),
        ("Add", ["d", "three"], "e", {}),
        ("Conv", "ewb", ["y"], PADS),
    ]
    plan = analyse(make(nodes, {**CONV, "three": (1, 4, 1, 1)}), ONNXRUNTIME)
    floats = {d.node: d.reason for d in plan.decisions if not d.int8}
    assert floats == {"Add_4": "one of its operands is constant"}
    assert [p.tensor for p in plan.pairs] == ["x", "c", "s", "m", "d", "e", "y"]
    one = make(nodes, {**CONV, "three": np.array(3, np.float32)})
    plan = analyse(one, ONNXRUNTIME)
    assert all(d.int8 for d in plan.decisions) and plan.numbers == ("Add_4",)
    plan = analyse(one, TENSORRT)
    assert "constant" in decided(plan)["Add_4"] and plan.numbers == ()


def test_tensorrt_quantizes_the_skip_branch_of_a_residual_add():
    nodes = [("Conv", "xwb", ["c"], PADS), ("Add", "cx", "a", {}), ("Conv", "awb", ["y"], PADS)]
    pairs = {p.tensor: p.consumers for p in analyse(make(nodes, CONV), TENSORRT).pairs}
    assert pairs == {"x": ("Conv_0", "Add_1"), "a": ("Conv_2",)}


def test_moving_nodes_share_the_scale_of_what_they_move():
    nodes = [
        ("Conv", "xwb", ["c"], PADS),
        ("Relu", "c", "r", {}),
        ("MaxPool", "r", "m", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Flatten", "m", "f", {}),
        ("Gemm", ["f", "g"], "y", {}),
    ]
    plan = analyse(make(nodes, {**CONV, "g": (64, 10)}), ONNXRUNTIME)
    assert dict(plan.owners) == {"m": "r", "f": "r"}
    assert plan.activations == ("x", "r")
    assert [(w.name, w.axis) for w in plan.weights] == [("w", 0), ("g", 1)]


@pytest.mark.parametrize(
    ("nodes", "weights", "reason"),
    [
        ([("Conv", ["x", "x"], "y", {})], {}, "its weights are not constant"),
        ([("Gemm", ["x", "g"], "y", {"alpha": 2.0})], {"g": (8, 3)}, "alpha or beta"),
        ([("MatMul", ["g", "x"], "y", {})], {"g": (8, 8)}, "first factor"),
        ([("Sin", "x", "y", {})], {}, "Sin is not run in int8 on onnxruntime"),
    ],
)
def test_what_stays_float_says_why(nodes, weights, reason):
    shape = (8, 8) if nodes[0][0] == "Gemm" else (1, 4, 8, 8)
    plan = analyse(make(nodes, weights, shape=shape), ONNXRUNTIME)
    assert reason in plan.decisions[0].reason
    assert plan.pairs == () and plan.weights == ()


def test_a_tensor_without_a_scale_makes_its_nodes_float():
    model = make([("Conv", "xwb", ["c"], PADS), ("Conv", "cwb", ["y"], PADS)], CONV)
    plan = analyse(model, ONNXRUNTIME, float_tensors={"y": "was 0 in every sample"})
    assert decided(plan) == {"Conv_0": "", "Conv_1": "y was 0 in every sample"}
    kept = analyse(model, ONNXRUNTIME, float_nodes=["Conv_0"])
    assert decided(kept)["Conv_0"] == "kept float as asked"


def test_never_negative_follows_pools_and_reshapes():
    nodes = [
        ("Relu", "x", "r", {}),
        ("GlobalAveragePool", "r", "p", {}),
        ("Flatten", "p", "f", {}),
        ("Neg", "f", "y", {}),
    ]
    assert never_negative(make(nodes, {})) == {"r", "p", "f"}


@pytest.mark.parametrize("placement", [ONNXRUNTIME, TENSORRT], ids=lambda p: p.name)
def test_a_decision_carries_the_grid_of_its_placement(placement):
    nodes = [("Conv", "xwb", ["c"], PADS), ("Relu", "c", "r", {}), ("Erf", "r", "y", {})]
    decisions = analyse(make(nodes, CONV), placement).decisions
    grid = placement.grid.name
    assert [d.precision for d in decisions] == [grid, grid, "float32"]
    assert all(d.int8 == d.quantized == (not d.reason) for d in decisions)
