import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ConfigError
from deploy.metrics.layerwise import compare_layers, shared_tensors

STEP = 0.25


def model(*, quantized: bool) -> onnx.ModelProto:
    """x -> Relu -> a -> Neg -> y; quantized puts Q/DQ behind `a`."""
    relu, neg = helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])
    nodes, initializers = [relu, neg], []
    if quantized:
        q = helper.make_node("QuantizeLinear", ["a", "s", "z"], ["a_q"])
        dq = helper.make_node("DequantizeLinear", ["a_q", "s", "z"], ["a_dq"])
        nodes = [relu, q, dq, helper.make_node("Neg", ["a_dq"], ["y"])]
        initializers = [
            numpy_helper.from_array(np.array(STEP, np.float32), "s"),
            numpy_helper.from_array(np.array(0, np.uint8), "z"),
        ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 3))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 3))
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


def test_a_tensor_is_compared_with_what_the_next_layer_reads():
    assert shared_tensors(model(quantized=False), model(quantized=True)) == {"a": "a_dq"}
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    float_model, int8_model = model(quantized=False), model(quantized=True)
    (found,) = compare_layers(float_model, int8_model, [{"x": x}], threads=1)
    a = np.maximum(x, 0).astype(np.float64)
    steps = np.rint(a / STEP) * STEP
    assert found.name == "a"
    assert found.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((a - steps) ** 2).sum()))
    assert [o.name for o in int8_model.graph.output] == ["y"]  # tapped copies only


def test_models_that_share_no_tensor_are_refused():
    with pytest.raises(ConfigError, match="at least one pair"):
        compare_layers(model(quantized=True), model(quantized=False), [], threads=1)
