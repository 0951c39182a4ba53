"""Activations of the float model that trials of a search start from."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from deploy.runtimes.ort import OrtSession
from deploy.tuning import float_activations
from deploy.tuning.float_activations import FloatActivations, find_border_tensors
from tests.models import make_model, make_node

SAMPLES = [{"x": x} for x in np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)]


def chain(shape=(1, 4)):
    """x -> a -> b -> c -> y, and a is added once more before y."""
    weights = np.random.default_rng(2).normal(size=(3, 4, 4)).astype(np.float32)
    nodes = [
        make_node("MatMul", "x w0", "a", name="A"),
        make_node("MatMul", "a w1", "b", name="B"),
        make_node("MatMul", "b w2", "c", name="C"),
        make_node("Add", "c a", "y", name="D"),
    ]
    constants = {f"w{index}": weight for index, weight in enumerate(weights)}
    return make_model(nodes, {"x": shape}, {"y": shape}, constants, opset=17)


def rounded(model, *nodes):
    """The model with a Round before these nodes."""
    rounded_model = onnx.ModelProto()
    rounded_model.CopyFrom(model)
    del rounded_model.graph.node[:]
    for node in model.graph.node:
        if node.name in nodes:
            inner = f"{node.input[0]}/rounded"
            rounded_model.graph.node.append(make_node("Round", [node.input[0]], [inner]))
            node = make_node(node.op_type, [inner, *node.input[1:]], node.output)
        rounded_model.graph.node.append(node)
    return rounded_model


def run_on(model, feed):
    return OrtSession.open(model, threads=1).run(feed)["y"]


@pytest.fixture
def activations():
    return FloatActivations(chain(), [["B"], ["C"]], SAMPLES)


def test_border_tensors_cross_the_change():
    assert find_border_tensors(chain(), ["C"]) == ["b", "a"]
    assert find_border_tensors(chain(), ["B"]) == ["a"]
    assert find_border_tensors(chain(), ["A"]) == []  # the model's own input is no border


@pytest.mark.parametrize("changed, node_count", [("B", 4), ("C", 3), ("A", 5)])
def test_downstream_model_equals_the_full_model(activations, changed, node_count):
    trial = rounded(chain(), changed)
    short = activations.shorten(trial)
    assert len(short.graph.node) == node_count
    names = [value.name for value in short.graph.input]
    for sample, values in zip(SAMPLES, activations.values_by_sample, strict=True):
        downstream_feed = {name: {**sample, **values}[name] for name in names}
        np.testing.assert_allclose(
            run_on(short, downstream_feed), run_on(trial, sample), rtol=1e-5, atol=1e-6
        )


def test_same_nodes_need_equal_constants(activations):
    short = activations.shorten(chain())
    assert [node.name for node in short.graph.node] == ["C", "D"]  # where nothing changed
    trial = rounded(chain(), "C")
    assert {"a", "b"} <= activations.unchanged_tensors(trial)
    assert "c" not in activations.unchanged_tensors(trial)
    trial.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros((4, 4), np.float32), "w1"))
    assert "a" in activations.unchanged_tensors(trial)
    assert "b" not in activations.unchanged_tensors(trial)


def test_node_with_omitted_output_is_unchanged():
    nodes = [
        make_node("RNN", "x w w", ["", "a"], name="A", hidden_size=4),
        make_node("RNN", "a w w", ["", "b"], name="B", hidden_size=4),
        make_node("Relu", "b", "y", name="C"),
    ]
    shape = (1, 1, 4)
    weights = {"w": np.ones((1, 4, 4), np.float32)}
    model = make_model(nodes, {"x": shape}, {"y": shape}, weights, opset=17)
    activations = FloatActivations(model, [["C"]], [{"x": np.ones(shape, np.float32)}])
    assert {"a", "b"} <= activations.unchanged_tensors(model)


def test_kept_activations_are_bounded(monkeypatch):
    monkeypatch.setattr(float_activations, "_MAX_BYTES", 4 * 4 * len(SAMPLES))
    activations = FloatActivations(chain(), [["B"], ["C"]], SAMPLES)
    assert [list(values) for values in activations.values_by_sample] == [["a"], ["a"]]


def test_cached_activations_serve_all_sample_sizes():
    samples = [{"x": np.full((1, steps, 4), steps, np.float32)} for steps in (3, 5, 3)]
    model = chain([1, "T", 4])
    activations = FloatActivations(model, [["B"]], samples)
    trial = rounded(model, "B")
    short = activations.shorten(trial)
    (value,) = short.graph.input
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [1, 0, 4]
    for sample, values in zip(samples, activations.values_by_sample, strict=True):
        np.testing.assert_allclose(run_on(short, values), run_on(trial, sample), rtol=1e-5)
