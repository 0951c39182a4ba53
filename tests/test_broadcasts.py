"""Factors of a few channels are repeated along a row before the integer kernel multiplies them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli

GATES = {
    "sigmoid": [("Sigmoid", "e", "s", {}), ("Mul", "r s", "p", {})],
    "factors first": [("Sigmoid", "e", "s", {}), ("Mul", "s r", "p", {})],
    "hard sigmoid": [("HardSigmoid", "e", "s", {}), ("Mul", "r s", "p", {})],
    "read by two": [
        ("Sigmoid", "e", "s", {}), ("Mul", "r s", "q", {}), ("Conv", "s v", "t", {}),
        ("Mul", "q t", "p", {}),
    ],
}  # fmt: skip


def net(gate: str, *, channels: int = 16, size: int | str = 12, last: str = "Conv"):
    """x -> Conv -> r, which a squeeze-excite multiplies to p before the last Conv."""
    rng = np.random.default_rng(7)
    held = {
        "w": rng.normal(scale=0.3, size=(channels, channels, 3, 3)),
        "v": rng.normal(scale=0.5, size=(channels, channels, 1, 1)),
    }
    ends = [("Conv", "p w", "y", {"pads": [1] * 4})] if last == "Conv" else [(last, "p", "y", {})]
    nodes = [
        ("Conv", "x w", "c", {"pads": [1] * 4}), ("Relu", "c", "r", {}),
        ("GlobalAveragePool", "r", "m", {}), ("Conv", "m v", "e", {}),
        *GATES[gate], *ends,
    ]  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node(op, i.split(), [o], name=f"{op}_{o}", **given)
            for op, i, o, given in nodes
        ],
        "excited",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v.astype(np.float32), name) for name, v in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def built(model: onnx.ModelProto, folder: Path, *words: str) -> onnx.ModelProto:
    """The engine that the command writes."""
    channels = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    onnx.save(model, folder / "net.onnx")
    x = np.random.default_rng(8).normal(size=(8, channels, 12, 12)).astype(np.float32)
    np.save(folder / "x.npy", x)
    given = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    given += ["--out", str(folder / "out"), "--duration", "0", "--effort", "0", *words]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    return onnx.load(folder / "out/net.int8.onnx")


def ran(engine: onnx.ModelProto, folder: Path) -> np.ndarray:
    session = ort.InferenceSession(engine.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.load(folder / "x.npy")})[0]


def plain(engine: onnx.ModelProto) -> onnx.ModelProto:
    """The engine without its Tiles."""
    out = onnx.ModelProto()
    out.CopyFrom(engine)
    for node in out.graph.node:
        if node.op_type == "Tile":
            node.op_type = "Identity"
            del node.input[1]
    return out


@pytest.mark.parametrize("gate", GATES)
def test_the_factors_are_a_row_and_all_values_keep_their_bits(gate, tmp_path, kernels):
    engine = built(net(gate), tmp_path)
    rows = [node for node in engine.graph.node if node.op_type == "Tile"]
    constants = {t.name: numpy_helper.to_array(t).tolist() for t in engine.graph.initializer}
    assert [constants[node.input[1]] for node in rows] == [[1, 1, 1, 12]]
    np.testing.assert_array_equal(ran(engine, tmp_path), ran(plain(engine), tmp_path))
    found = kernels(engine)
    assert "Mul" not in found and found.count("Tile") == 1
    others = [[k for k in one if k != "Tile"] for one in (found, kernels(plain(engine)))]
    assert sorted(others[0]) == sorted(others[1])  # nothing else has come of it


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"channels": 80}, ()),
        ({"size": "s"}, ()),  # nobody knows how wide
        ({"last": "Sin"}, ()),
        ({}, ("--keep-float", "Mul_p")),
    ],
    ids=["many channels", "any width", "float behind", "float"],
)
def test_others_are_multiplied_as_they_are(given, words, tmp_path):
    engine = built(net("sigmoid", **given), tmp_path, *words)
    assert "Tile" not in {node.op_type for node in engine.graph.node}
