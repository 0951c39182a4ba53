import math

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibrators.histogram import Histogram
from calibrators.mse import mse
from deploy.graph.saturation import bounds


def model(nodes, constants=()):
    graph = helper.make_graph(
        [helper.make_node(op, list(i), list(o), **a) for op, i, o, a in nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [numpy_helper.from_array(np.float32(v), n) for n, v in dict(constants).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


WRITTEN_OUT = [
    ("Abs", "x", "t", {}), ("Add", ["t", "three"], "a", {}),
    ("Clip", ["a", "zero", "six"], "c", {}), ("Mul", "tc", "m", {}), ("Div", ["m", "six"], "y", {}),
]  # fmt: skip
NUMBERS = {"three": 3, "zero": 0, "six": 6}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (WRITTEN_OUT, (-3, math.inf)),
        ([("Abs", "x", "t", {}), ("HardSwish", "t", "y", {})], (-3, math.inf)),
        ([("Abs", "x", "t", {}), ("Relu", "t", "y", {})], (0, math.inf)),
        ([("Abs", "x", "t", {}), ("Clip", ["t", "zero", "six"], "y", {})], (0, 6)),
        (
            [("Abs", "x", "t", {}), ("HardSigmoid", "t", "s", {}), ("Mul", "ts", "y", {})],
            (-2.5, math.inf),
        ),
        ([("Abs", "x", "t", {}), ("HardSigmoid", "t", "y", {"alpha": 0.25})], (-2, 2)),
    ],
)
def test_known_readers(nodes, expected):
    assert bounds(model(nodes, NUMBERS))["t"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "ts", "y", {})],
        [("Abs", "x", "t", {}), ("Relu", "t", "r", {}), ("Add", "tr", "y", {})],
        [("Abs", "x", "t", {}), ("Add", "tt", "y", {})],
        [("Abs", "x", "y", {}), ("Relu", "y", "r", {})],  # leaves the model
    ],
)
def test_any_other_reader_keeps_every_value(nodes):
    assert not bounds(model(nodes)).keys() & {"t", "y"}


def test_a_clamped_histogram_is_that_of_clamped_values():
    x = np.random.default_rng(1).normal(scale=5, size=20_000).astype(np.float32)
    h, want = Histogram(), Histogram()
    h.observe(x)
    want.observe(np.append(np.clip(x, -3, 4), np.float32(h.full_range)))  # the same range
    got = h.clamped(-3, 4)
    want.counts[-1] -= 1
    assert got.counts.tolist() == want.counts.tolist()
    assert (got.minimum, got.maximum, got.total) == (-3, 4, x.size)
    assert mse(got).lo >= -3 and mse(h).lo < -3
    assert h.clamped(-100, 100).counts.tolist() == h.counts.tolist()
