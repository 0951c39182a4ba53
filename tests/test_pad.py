"""Pad and Slice between int8: what runs on the integers, and that zeros stay zeros."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse

PADS = {"pads": [1, 1, 1, 1]}


def network(middle, constants):
    """x -> Conv -> t, of which zero is not the lowest value -> the nodes -> y -> Conv -> out."""
    rng = np.random.default_rng(5)
    weights = {"w": rng.normal(scale=0.3, size=(8, 8, 3, 3)), "b": rng.normal(size=8)}
    held = {n: np.asarray(v, np.float32) for n, v in weights.items()} | constants
    nodes = [("Conv", "x w b", "t", PADS), *middle, ("Conv", "y w b", "out", PADS)]
    graph = helper.make_graph(
        [
            helper.make_node(op, reads.split(), [made], name=f"{op}_{made}", **given)
            for op, reads, made, given in nodes
        ],
        "padded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 12, 12])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 8, None, None])],
        [numpy_helper.from_array(v, n) for n, v in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


SPATIAL = {"p": np.int64([0, 0, 0, 0, 0, 0, 1, 1]), "zero": np.float32(0)}
CUT = {"one": np.int64([1]), "nine": np.int64([9]), "two": np.int64([2])}
SKIP = {"p": np.int64([0, 4, 0, 0, 0, 4, 0, 0]), "v": np.ones((8, 16, 1, 1), np.float32) / 8,
        "u": np.ones((16, 8, 1, 1), np.float32) / 8}  # fmt: skip
MODELS = {
    "before a conv": ([("Pad", "t p zero", "y", {})], SPATIAL, "Pad"),
    "without a value": ([("Pad", "t p", "y", {})], SPATIAL, "Pad"),
    "on a skip branch": (
        [("Pad", "t p", "s", {}), ("Conv", "t u", "c", {}), ("Add", "c s", "a", {}),
         ("Conv", "a v", "y", {})], SKIP, "Pad",
    ),
    "slice": ([("Slice", "t one nine two", "y", {})], CUT, "Slice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_between_int8_it_runs_on_integers(kind, tmp_path, kernels):
    middle, constants, op = MODELS[kind]
    model = network(middle, constants)
    onnx.save(model, tmp_path / "net.onnx")
    x = np.random.default_rng(6).normal(size=(6, 8, 12, 12)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = ["build", tmp_path / "net.onnx", "--images", tmp_path / "x.npy", "--duration", 0]
    done = CliRunner().invoke(cli, [str(word) for word in [*given, "--out", tmp_path / "out"]])
    assert done.exit_code == 0, done.output
    engine = ort.InferenceSession(tmp_path / "out/net.int8.onnx")
    found = kernels(tmp_path / "out/net.int8.onnx")
    assert found.count(op) == 1
    assert (found.count("QuantizeLinear"), found.count("DequantizeLinear")) == (1, 1)
    want = ort.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})[0]
    got = engine.run(None, {"x": x})[0]
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 30


@pytest.mark.parametrize(
    ("node", "constants"),
    [
        (("Pad", "t p", "y", {"mode": "reflect"}), SPATIAL),
        (("Pad", "t p one", "y", {}), {**SPATIAL, "one": np.float32(1)}),
    ],
)
def test_a_pad_with_anything_but_zeros_stays_float(node, constants):
    plan = analyse(load(network([node], constants)).model, ONNXRUNTIME)
    (pad,) = [d for d in plan.decisions if d.op_type == "Pad"]
    assert pad.reason == "it pads with something else than 0" and plan.pads == ()
