"""Inner tensors of a float and an int8 model: which are pairs, and how a build compares them."""

import numpy as np
import onnx
import pytest

from deploy.calibration.reference_outputs import open_single_thread
from deploy.feed.feed import open_feed
from deploy.frontends import load
from deploy.graph.plan import Decision
from deploy.graph.tensor_pairs import pair_quantized_tensors, pair_tensors_by_name
from deploy.pipeline import evaluate
from deploy.pipeline.evaluate import LAYER_SAMPLES, compare_inner_tensors
from deploy.targets.base import BuildResult
from tests.models import make_model

STEP = 0.25
SHAPE = ("n", 3)


def float_model():
    return make_model("a = Relu (x) y = Neg (a)", {"x": SHAPE}, {"y": SHAPE}, {}, opset=17, ir=9)


def int8_model():
    """The float model with a Q/DQ pair after `a`."""
    nodes = """
    a = Relu (x)
    a_q = QuantizeLinear (a, s, z)
    a_dq = DequantizeLinear (a_q, s, z)
    y = Neg (a_dq)
    """
    weights = {"s": np.float32(STEP), "z": np.uint8(0)}
    return make_model(nodes, {"x": SHAPE}, {"y": SHAPE}, weights, opset=17, ir=9)


@pytest.fixture
def built(tmp_path):
    """The int8 model as the result of a build."""
    path = tmp_path / "q.onnx"
    onnx.save(int8_model(), path)
    decisions = (Decision("relu", "Relu", "int8"),)
    return BuildResult(target="int8", runnable=path, decisions=decisions)


def test_quantized_tensor_pairs_with_its_dequantized_form():
    assert pair_quantized_tensors(float_model(), int8_model()) == {"a": "a_dq"}
    assert pair_quantized_tensors(int8_model(), float_model()) == {}


def test_pairs_by_name_work_both_ways():
    assert pair_tensors_by_name(float_model(), int8_model()) == {"a": "a_dq", "y": "y"}
    assert pair_tensors_by_name(int8_model(), float_model()) == {"a_dq": "a", "y": "y"}


@pytest.fixture
def compare_on(built):
    """A call that compares both models on an input's rows; returns the float model, too."""

    def compare(x):
        loaded = load(float_model())
        samples = open_feed([x], loaded.inputs).spread_samples(LAYER_SAMPLES)
        return loaded, compare_inner_tensors(loaded, [built], {"int8": None}, samples)

    return compare


def test_inner_tensor_is_compared_as_readers_see_it(compare_on):
    x = np.random.default_rng(0).standard_normal((LAYER_SAMPLES, 3)).astype(np.float32)
    _, inner_tensors = compare_on(x)
    ((layer,),) = inner_tensors.layers.values()
    values = np.maximum(x, 0).astype(np.float64)
    errors = values - np.rint(values / STEP) * STEP
    assert layer.name == "a"
    assert layer.sqnr_db == pytest.approx(10 * np.log10((values**2).sum() / (errors**2).sum()))


def test_built_file_is_not_changed_by_the_comparison(built, compare_on):
    """Only copies get the inner tensors as outputs."""
    loaded, _ = compare_on(np.ones((2, 3), np.float32))
    assert [output.name for output in onnx.load(built.runnable).graph.output] == ["y"]
    assert [output.name for output in loaded.model.graph.output] == ["y"]


@pytest.mark.parametrize(
    ("engine_sessions", "is_stand_in"),
    [({}, True), ({"int8": None}, False), ({"int8": object()}, True)],
    ids=["not here", "ONNX Runtime", "on a device"],
)
def test_file_of_another_runtime_stands_in(built, monkeypatch, engine_sessions, is_stand_in):
    """Only ONNX Runtime's own engine has its int8 kernels."""
    opened = []

    def open_session(model, *, stand_in=False):
        opened.append(stand_in)
        return open_single_thread(model, stand_in=stand_in)

    monkeypatch.setattr(evaluate, "open_single_thread", open_session)
    loaded = load(float_model())
    samples = open_feed([np.ones((1, 3), np.float32)], loaded.inputs).spread_samples(1)
    compare_inner_tensors(loaded, [built], engine_sessions, samples)
    assert opened == [is_stand_in, False]  # of the target's file, and of the float model


@pytest.mark.parametrize(("sample_count", "compared_count"), [(1, 1), (3, 3), (9, 4)])
def test_few_samples_are_compared(compare_on, sample_count, compared_count):
    _, inner_tensors = compare_on(np.ones((sample_count, 3), np.float32))
    assert inner_tensors.sample_count == compared_count
