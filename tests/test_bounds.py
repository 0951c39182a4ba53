"""Bounds that readers set on a tensor, and ranges that are extrapolated behind logits."""

import math

import numpy as np
import onnxruntime as ort
import pytest

from calibrators.entropy import entropy
from calibrators.histogram import Histogram
from calibrators.mse import mse
from deploy.graph.bounds import find_bounds, find_range_limits
from tests.models import as_float32, build_net, make_model, run_net, set_domain


def sigmoid(t):
    return 1 / (1 + np.exp(-t))


@pytest.mark.parametrize(
    ("nodes", "function", "span"),
    [
        ("y = Sigmoid (t)", sigmoid, 1),
        ("y = Tanh (t)", np.tanh, 2),
        ("s = Sigmoid (t) y = Mul (t, s)", lambda t: t * sigmoid(t), 0.278),
        ("y = Gelu (t)", lambda t: 0.5 * t * (1 + np.vectorize(math.erf)(t / math.sqrt(2))), 0.170),
    ],
)
def test_bounds_lose_under_half_a_step(nodes, function, span):
    t = np.linspace(-40, 40, 8001)
    low, high = find_bounds(model(nodes))["t"]
    assert 0 < np.abs(function(t) - function(np.clip(t, low, high))).max() < 0.5 * span / 255


NUMBERS = {
    "three": 3,
    "zero": 0,
    "six": 6,
    "one": 1,
    "two": 2,
    "half": 0.5,
    "down": -2,
    "root": math.sqrt(2),
    "shape": 4,
}


def model(nodes):
    """These nodes behind an Abs of x."""
    shape = {"x": [4]}, {"y": [4]}
    return make_model(f"t = Abs (x) {nodes}", *shape, as_float32(NUMBERS), opset=14)


ERF_AND_ONE = "d = Div (t, root) e = Erf (d) a = Add (e, one)"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a = Add (t, three) c = Clip (a, zero, six) m = Mul (t, c) y = Div (m, six)", (-3, None)),
        ("y = HardSwish (t)", (-3, None)),
        ("y = Relu (t)", (0, None)),
        ("y = Clip (t, zero, six)", (0, 6)),
        ("s = HardSigmoid (t) y = Mul (t, s)", (-2.5, None)),
        ("y = HardSigmoid <alpha = 0.25> (t)", (-2, 2)),
        ("y = Sigmoid (t)", (-8, 8)),
        ("y = Tanh (t)", (-4, 4)),
        ("s = Sigmoid (t) y = Mul (t, s)", (-10, None)),
        ("h = Mul (t, half) s = Sigmoid (h) y = Mul (t, s)", (-20, None)),
        ("s = Sigmoid (t) y = Pow (s, two)", (-8, 8)),
        ("s = Sigmoid (t) y = Pow (s, one)", (-8, 8)),
        (f"{ERF_AND_ONE} m = Mul (t, a) y = Mul (m, half)", (-3 * math.sqrt(2), None)),
        (f"{ERF_AND_ONE} h = Mul (t, half) y = Mul (h, a)", (-3 * math.sqrt(2), None)),
        ("m = Mul (t, two) a = Add (m, six) y = Sigmoid (a)", (-7, 1)),
        ("m = Sub (t, three) a = Div (m, down) y = Sigmoid (a)", (-13, 19)),
        ("r = Relu (t) y = Sigmoid (r)", (0, 8)),
        (
            "r = Reshape (t, shape) c = Concat <axis = 0> (r, r) m = Transpose (c) y = Sigmoid (m)",
            (-8, 8),
        ),
        ("a, b, c = Split (t) k = Sigmoid (a) l = Tanh (b) y = Concat <axis = 0> (k, l)", (-8, 8)),
    ],
)
def test_bounds_of_known_readers(nodes, expected):
    low, high = expected
    bounds = (low, math.inf if high is None else high)
    assert find_bounds(model(nodes))["t"] == pytest.approx(bounds)


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Sigmoid (t) y = Log (s)",
        "s = Sigmoid (t) r = Reshape (s, shape) y = Div (x, r)",
        "s = Sigmoid (t) y = Pow (s, half)",
        "y = Softmax (t)",
        "s = Sigmoid (x) y = Mul (t, s)",
        "a, b = Split (t) y = Sigmoid (a) z = Sin (b)",
        "y = Reshape (t, shape) s = Sigmoid (y)",
        "m = AveragePool (t) y = Sigmoid (m)",
        "r = Relu (t) y = Add (t, r)",
        "y = Add (t, t)",
        "y = Neg (t) r = Relu (y)",  # leaves the model
    ],
)
def test_other_readers_set_no_bound(nodes):
    assert not find_bounds(model(nodes)).keys() & {"t", "y"}


@pytest.mark.parametrize(
    ("nodes", "op_type"),
    [
        ("y = Clip (t, zero, six)", "Clip"),
        ("y = Sigmoid (t)", "Sigmoid"),
        ("m = Reshape (t, shape) y = Sigmoid (m)", "Reshape"),
        ("c = HardSigmoid (t) y = Mul (t, c)", "HardSigmoid"),
        (f"{ERF_AND_ONE} y = Mul (t, a)", "Erf"),
    ],
)
def test_custom_domain_sets_no_bound(nodes, op_type):
    net = model(nodes)
    assert "t" in find_bounds(net)
    set_domain(net, op_type)
    assert "t" not in find_bounds(net)


def test_gelu_of_onnxruntime_has_its_floor():
    net = model("y = Gelu (t)")
    set_domain(net, "Gelu", "com.microsoft")
    assert find_bounds(net)["t"] == (-4, math.inf)


def test_clamped_histogram_equals_clamped_values():
    x = np.random.default_rng(1).normal(scale=5, size=20_000).astype(np.float32)
    h, want = Histogram(), Histogram()
    h.observe(x)
    want.observe(np.append(np.clip(x, -3, 4), np.float32(h.full_range)))  # the same range
    got = h.clamped(-3, 4)
    want.counts[-1] -= 1
    assert got.counts.tolist() == want.counts.tolist()
    assert (got.minimum, got.maximum, got.total) == (-3, 4, x.size)
    assert mse(got).lo >= -3
    assert mse(h).lo < -3
    assert h.clamped(-100, 100).counts.tolist() == h.counts.tolist()
    for outside in ((1e3, 2e3), (-2e3, -1e3)):  # no value lies between the two
        assert entropy(h.clamped(*outside)) == entropy(h)
        assert mse(h.clamped(*outside)) == mse(h)


def test_long_tailed_logits_keep_their_scores(tmp_path):
    """Logits of -1274 to 1: their range on 255 steps would make every score 0.5."""
    nodes = """
        c = Conv (x, w, b) r = Reshape (c, to)
        s = Slice (r, zero, half, two) u = Slice (r, half, end, two)
        k = Concat <axis = 2> (u, s) y = Sigmoid (k)
    """
    constants = {
        "w": np.float32([[2, -1.5, 0.5], [1, 1, 1]]).reshape(2, 3, 1, 1),
        "b": np.float32([-1, -1274]),
        "to": np.int64([0, 2, 256]),
    }
    constants |= {"zero": [0], "half": [128], "end": [256], "two": [2]}
    model = make_model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 2, 256]}, constants, opset=14)
    x = np.random.default_rng(3).random((8, 3, 16, 16)).astype(np.float32)
    out = build_net(model, x, tmp_path, "--int8-stem")
    for image in x:
        want, got = (run_net(network, image[None])[0] for network in (model, out / "net.int8.onnx"))
        assert np.abs(want - got).max() < 0.1 < 0.3 < np.ptp(want[0, 0])


CONSTANTS = as_float32({"two": 2, "w": np.ones((4, 4, 1, 1))})


def range_limits(nodes, outputs="y"):
    """Return the range limits of the tensors of these nodes behind an Abs of x."""
    ends = {"x": [1, 4, 4, 4]}, dict.fromkeys(outputs)
    return find_range_limits(make_model(f"t = Abs (x) {nodes}", *ends, CONSTANTS, opset=17))


def followed(nodes, outputs="y"):
    limits = range_limits(nodes, outputs)
    return {name for name, limit in limits.items() if limit.extrapolation_limit > 0}


def test_extrapolation_follows_logits_backward():
    nodes = """
        b = Neg (x) c = Flatten (t) d = Flatten (b) e = Concat <axis = 1> (c, d)
        f, g = Split <num_outputs = 2> (e) h = Transpose (f) y = Sigmoid (h) z = Exp (g)
    """
    assert followed(nodes, "yz") == set("tbcdefh")


def test_followed_tensor_keeps_its_bounds():
    assert range_limits("y = Sigmoid (t)")["t"] == (-8, 8, 8)
    assert range_limits("y = Sigmoid (t)", "yt")["t"] == (-math.inf, math.inf, 8)


@pytest.mark.parametrize(
    ("nodes", "scores"),
    [
        # scores may be scaled and multiplied by scores
        ("s = Sigmoid (t) y = Mul (s, two)", True),
        ("s = Sigmoid (t) r = Sigmoid (x) u = Transpose (r) y = Mul (s, u)", True),
        ("s = Sigmoid (t) y = Mul (s, s)", True),
        ("s = Sigmoid (t) y = ReduceMax (s)", True),
        # gates, and what layers read on from, are none
        ("s = Sigmoid (t) y = Mul (t, s)", False),
        ("s = Sigmoid (t) y = Mul (s, x)", False),
        ("s = Sigmoid (t) u = Transpose (s) y = Mul (u, x)", False),
        ("s = Sigmoid (t) y = Conv (s, w)", False),
        ("s = Sigmoid (t) n = Neg (s) y = Conv (n, w)", False),
        ("y = Tanh (t)", False),
        ("y = Softmax (t)", False),
        ("m = Mul (t, two) y = Exp (m)", False),
    ],
)
def test_only_scores_are_followed(nodes, scores):
    result = followed(nodes)
    assert "t" in result if scores else not result


def pictures_of(count, rng):
    """[count, 3, 24, 24] float32: a bright blue on which redness thins out evenly."""
    result = np.zeros((count, 3, 24, 24), np.float32)
    result[:, 0] = np.minimum(rng.exponential(0.055, (count, 24, 24)), 1)
    result[:, 2] = 1
    return result


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_higher_scores_than_calibrated_survive(tmp_path, method):
    """No place of 40 pictures is surer than 0.6; a redder one comes later."""
    weight = np.zeros((16, 3, 3, 3))
    weight[:, 0, 1, 1] = 24  # the logit of a place is 24 times its redness, less 16
    nodes = "c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Sigmoid (c)"
    weights = as_float32({"w": weight, "b": np.full(16, -16)})
    model = make_model(nodes, {"x": [1, 3, 24, 24]}, {"y": [1, 16, 24, 24]}, weights, opset=17)
    rng = np.random.default_rng(5)
    pictures = pictures_of(40, rng)
    out = build_net(model, pictures, tmp_path, "--int8-stem", "--effort", 0, "--method", method)
    float_session, int8_session = map(
        ort.InferenceSession, (tmp_path / "net.onnx", out / "net.int8.onnx")
    )
    red = pictures_of(1, rng)
    red[0, 0, 12, 12] = 18.5 / 24  # a logit of 2.5
    want, got = (
        session.run(None, {"x": red})[0][0, 0, 12, 12] for session in (float_session, int8_session)
    )
    sure = max(float_session.run(None, {"x": session[None]})[0].max() for session in pictures)
    assert sure < 0.6 < 0.9 < want
    assert got == pytest.approx(want, abs=0.03)
