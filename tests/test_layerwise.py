import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.graph.plan import Decision
from deploy.metrics.layerwise import shared_tensors
from deploy.pipeline.judge import LAYER_SAMPLES, InnerTensors
from deploy.targets.base import Built

STEP = 0.25
IN_INT8 = Decision("relu", "Relu", "int8")


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


def test_a_tensor_is_compared_with_what_the_next_layer_reads(tmp_path):
    assert shared_tensors(model(quantized=False), model(quantized=True)) == {"a": "a_dq"}
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    float_model, int8_model = model(quantized=False), model(quantized=True)
    built = Built(target="int8", runnable=tmp_path / "q.onnx", decisions=(IN_INT8,))
    onnx.save(int8_model, built.runnable)
    loaded = load(float_model)
    inside = InnerTensors(loaded, [built], {"int8": None}, len(x))
    for row, sample in zip(x, open_feed([x], loaded.inputs).first(4), strict=True):
        said = inside.look(sample)
        assert said is not None and np.array_equal(said["y"][0], -np.maximum(row, 0))
    ((found,),) = inside.layers.values()
    a = np.maximum(x, 0).astype(np.float64)
    steps = np.rint(a / STEP) * STEP
    assert found.name == "a"
    assert found.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((a - steps) ** 2).sum()))
    assert [o.name for o in int8_model.graph.output] == ["y"]  # tapped copies only


def test_models_that_share_no_tensor_have_no_figures():
    assert shared_tensors(model(quantized=True), model(quantized=False)) == {}


def test_a_few_samples_all_over_the_feed_are_looked_into(tmp_path):
    built = Built(target="int8", runnable=tmp_path / "q.onnx", decisions=(IN_INT8,))
    onnx.save(model(quantized=True), built.runnable)
    loaded = load(model(quantized=False))
    places = {n: sorted(InnerTensors(loaded, [built], {}, n).places) for n in (1, 3, 100)}
    assert places[1] == [1] and places[3] == [1, 2, 3]
    assert places[100] == [1, 26, 51, 76] and LAYER_SAMPLES == 4
