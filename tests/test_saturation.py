import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from calibrators.histogram import Histogram
from calibrators.mse import mse
from deploy.cli import cli
from deploy.graph.bounds import bounds


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


@pytest.mark.parametrize(
    ("nodes", "function", "span"),
    [
        ([("Abs", "x", "t", {}), ("Sigmoid", "t", "y", {})], sigmoid, 1),
        ([("Abs", "x", "t", {}), ("Tanh", "t", "y", {})], np.tanh, 2),
        (
            [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "ts", "y", {})],
            lambda t: t * sigmoid(t),
            0.278,
        ),
        (
            [("Abs", "x", "t", {}), ("Gelu", "t", "y", {})],
            lambda t: 0.5 * t * (1 + np.vectorize(math.erf)(t / math.sqrt(2))),
            0.170,
        ),
    ],
)
def test_what_is_lost_beyond_a_bound_is_less_than_half_a_step_of_8_bits(nodes, function, span):
    t = np.linspace(-40, 40, 8001)
    low, high = bounds(model(nodes))["t"]
    lost = np.abs(function(t) - function(np.clip(t, low, high))).max()
    assert 0 < lost < 0.5 * span / 255


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
GELU = [
    ("Abs", "x", "t", {}), ("Div", ["t", "root"], "d", {}), ("Erf", "d", "e", {}),
    ("Add", ["e", "one"], "a", {}), ("Mul", "ta", "m", {}), ("Mul", ["m", "half"], "y", {}),
]  # fmt: skip
HALVED_FIRST = [
    *GELU[:4], ("Mul", ["t", "half"], "h", {}), ("Mul", "ha", "y", {}),
]  # fmt: skip
SILU = (-10, math.inf)
NUMBERS = {
    "three": 3, "zero": 0, "six": 6, "one": 1, "two": 2, "half": 0.5, "down": -2,
    "root": math.sqrt(2), "shape": 4,
}  # fmt: skip


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
        ([("Abs", "x", "t", {}), ("Sigmoid", "t", "y", {})], (-8, 8)),
        ([("Abs", "x", "t", {}), ("Tanh", "t", "y", {})], (-4, 4)),
        ([("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "ts", "y", {})], SILU),
        (
            [
                ("Abs", "x", "t", {}),
                ("Mul", ["t", "half"], "h", {}),
                ("Sigmoid", "h", "s", {}),
                ("Mul", "ts", "y", {}),
            ],
            (-20, math.inf),
        ),
        (
            [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Pow", ["s", "two"], "y", {})],
            (-8, 8),
        ),
        (
            [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Pow", ["s", "one"], "y", {})],
            (-8, 8),
        ),
        (GELU, (-3 * math.sqrt(2), math.inf)),
        (HALVED_FIRST, (-3 * math.sqrt(2), math.inf)),
        (
            [
                ("Abs", "x", "t", {}),
                ("Mul", ["t", "two"], "m", {}),
                ("Add", ["m", "six"], "a", {}),
                ("Sigmoid", "a", "y", {}),
            ],
            (-7, 1),
        ),
        (
            [
                ("Abs", "x", "t", {}),
                ("Sub", ["t", "three"], "m", {}),
                ("Div", ["m", "down"], "a", {}),
                ("Sigmoid", "a", "y", {}),
            ],
            (-13, 19),
        ),
        ([("Abs", "x", "t", {}), ("Relu", "t", "r", {}), ("Sigmoid", "r", "y", {})], (0, 8)),
        (
            [
                ("Abs", "x", "t", {}),
                ("Reshape", ["t", "shape"], "r", {}),
                ("Concat", "rr", "c", {"axis": 0}),
                ("Transpose", "c", "m", {}),
                ("Sigmoid", "m", "y", {}),
            ],
            (-8, 8),
        ),
        (
            [
                ("Abs", "x", "t", {}),
                ("Split", "t", "abc", {}),
                ("Sigmoid", "a", "k", {}),
                ("Tanh", "b", "l", {}),
                ("Concat", "kl", "y", {"axis": 0}),
            ],
            (-8, 8),
        ),
    ],
)
def test_known_readers(nodes, expected):
    assert bounds(model(nodes, NUMBERS))["t"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Log", "s", "y", {})],
        [
            ("Abs", "x", "t", {}),
            ("Sigmoid", "t", "s", {}),
            ("Reshape", ["s", "shape"], "r", {}),
            ("Div", "xr", "y", {}),
        ],
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Pow", ["s", "half"], "y", {})],
        [("Abs", "x", "t", {}), ("Softmax", "t", "y", {})],
        [("Abs", "x", "t", {}), ("Sigmoid", "x", "s", {}), ("Mul", "ts", "y", {})],
        [
            ("Abs", "x", "t", {}),
            ("Split", "t", "ab", {}),
            ("Sigmoid", "a", "y", {}),
            ("Sin", "b", "z", {}),
        ],
        [("Abs", "x", "t", {}), ("Reshape", ["t", "shape"], "y", {}), ("Sigmoid", "y", "s", {})],
        [("Abs", "x", "t", {}), ("AveragePool", "t", "m", {}), ("Sigmoid", "m", "y", {})],
        [("Abs", "x", "t", {}), ("Relu", "t", "r", {}), ("Add", "tr", "y", {})],
        [("Abs", "x", "t", {}), ("Add", "tt", "y", {})],
        [("Abs", "x", "y", {}), ("Relu", "y", "r", {})],  # leaves the model
    ],
)
def test_any_other_reader_keeps_every_value(nodes):
    assert not bounds(model(nodes, NUMBERS)).keys() & {"t", "y"}


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


def test_scores_of_logits_with_a_long_tail_stay_right(tmp_path):
    """Logits of -1274 to 1: their range on 255 steps would make every score 0.5."""
    weight = np.float32([[2, -1.5, 0.5], [1, 1, 1]]).reshape(2, 3, 1, 1)
    nodes = [
        ("Conv", ["x", "w", "b"], ["c"], {}),
        ("Reshape", ["c", "to"], ["r"], {}),
        ("Slice", ["r", "zero", "half", "two"], ["s"], {}),
        ("Slice", ["r", "half", "end", "two"], ["u"], {}),
        ("Concat", ["u", "s"], ["k"], {"axis": 2}),
        ("Sigmoid", ["k"], ["y"], {}),
    ]
    constants = {
        "w": weight, "b": np.float32([-1, -1274]),
        "to": np.int64([0, 2, 256]), "zero": np.int64([0]),
        "half": np.int64([128]), "end": np.int64([256]), "two": np.int64([2]),
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node(op, i, o, **a) for op, i, o, a in nodes],
        "scores",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 256])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    opset = [helper.make_opsetid("", 14)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "net.onnx")
    x = np.random.default_rng(3).random((8, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = ["build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--duration", 0]
    given += ["--int8-stem", "--out", tmp_path / "out"]
    done = CliRunner().invoke(cli, [str(word) for word in given])
    assert done.exit_code == 0, done.output
    for image in x:
        want, got = (
            ort.InferenceSession(path).run(None, {"x": image[None]})[0]
            for path in (tmp_path / "net.onnx", tmp_path / "out/net.int8.onnx")
        )
        assert np.abs(want - got).max() < 0.1 < 0.3 < np.ptp(want[0, 0])
