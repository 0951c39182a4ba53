"""Pad and Slice between int8 layers run on integers in ONNX Runtime."""

import numpy as np
import onnx
import pytest

from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse
from tests.models import build_net, make_model, parse_nodes, run_net

INT8 = "net.int8.onnx"
PADS = {"pads": [1, 1, 1, 1]}


def pad_net(middle, constants):
    """x -> Conv -> t, of which zero is not the lowest value -> the nodes -> y -> Conv -> out."""
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(scale=0.3, size=(8, 8, 3, 3)), "b": rng.normal(size=8)}
    tensors = {n: np.asarray(v, np.float32) for n, v in weights.items()} | constants
    ends = (("Conv", "x w b", "t", PADS), ("Conv", "y w b", "out", PADS))
    nodes = [ends[0], *parse_nodes(middle), ends[1]]
    return make_model(nodes, {"x": ["n", 8, 12, 12]}, {"out": ["n", 8, None, None]}, tensors)


SPATIAL = {"p": np.int64([0, 0, 0, 0, 0, 0, 1, 1]), "zero": np.float32(0)}


CUT = {"one": np.int64([1]), "nine": np.int64([9]), "two": np.int64([2])}


SKIP = {
    "p": np.int64([0, 4, 0, 0, 0, 4, 0, 0]),
    "v": np.ones((8, 16, 1, 1), np.float32) / 8,
    "u": np.ones((16, 8, 1, 1), np.float32) / 8,
}


MODELS = {
    "before a conv": ("y = Pad(t, p, zero)", SPATIAL),
    "without a value": ("y = Pad(t, p)", SPATIAL),
    "on a skip branch": ("s = Pad(t, p) c = Conv(t, u) a = Add(c, s) y = Conv(a, v)", SKIP),
    "slice": ("y = Slice(t, one, nine, two)", CUT),
}


@pytest.mark.parametrize("kind", MODELS)
def test_pad_between_int8_runs_on_integers(kind, tmp_path, kernels):
    model = pad_net(*MODELS[kind])
    x = np.random.default_rng(6).normal(size=(6, 8, 12, 12)).astype(np.float32)
    engine = onnx.load(build_net(model, x, tmp_path) / INT8)
    types = kernels(engine)
    assert types.count("Slice" if kind == "slice" else "Pad") == 1
    assert (types.count("QuantizeLinear"), types.count("DequantizeLinear")) == (1, 1)
    expected, outputs = (run_net(net, x, ["out"])[0] for net in (model, engine))
    assert 10 * np.log10((expected**2).sum() / ((expected - outputs) ** 2).sum()) > 30


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        ('y = Pad <mode = "reflect"> (t, p)', SPATIAL),
        ("y = Pad(t, p, one)", {**SPATIAL, "one": np.float32(1)}),
    ],
)
def test_pad_of_other_values_stays_float(node, constants):
    plan = analyse(load(pad_net(node, constants)).model, ONNXRUNTIME)
    (pad,) = [d for d in plan.decisions if d.op_type == "Pad"]
    assert "pads with a value" in pad.reason
    assert plan.int8_pads == ()
