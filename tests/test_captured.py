"""Tensors that an If or a Loop reads inside its bodies: ONNX Runtime may not find their pairs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.frontends import load
from deploy.graph.placement import ONNXRUNTIME, TENSORRT
from deploy.graph.plan import analyse

FLOATS = TensorProto.FLOAT


def branch(op, reads, name):
    node = helper.make_node(op, [reads], [name], name=f"/{name}")
    ends = [helper.make_tensor_value_info(name, FLOATS, None)]
    return helper.make_graph([node], name, [], ends)


def choice(condition, reads, makes):
    """An If of two nodes that read what is made outside."""
    return helper.make_node(
        "If", [condition], [makes], name=f"/{makes}",
        then_branch=branch("Transpose", reads, f"{makes}_then"),
        else_branch=branch("Neg", reads, f"{makes}_else"),
    )  # fmt: skip


def model_of(*between, ends="r2"):
    """Conv, Relu, Conv, Relu, `between`, and an If that reads what `ends` names; `c` chooses."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.normal(size=(8, 8, 3, 3)).astype(np.float32), name)
        for name in ("w1", "w2")
    ]
    read, layers = "x", []
    for n in "12":
        layers.append(helper.make_node("Conv", [read, f"w{n}"], [f"c{n}"], f"/c{n}", pads=[1] * 4))
        layers.append(helper.make_node("Relu", [f"c{n}"], [f"r{n}"], f"/r{n}"))
        read = f"r{n}"
    one = [numpy_helper.from_array(np.array(True), "always")]
    inputs = [
        helper.make_tensor_value_info("x", FLOATS, [1, 8, 8, 8]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    nodes = [*layers, *between, choice("c", ends, "y")]
    outputs = [helper.make_tensor_value_info("y", FLOATS, None)]
    graph = helper.make_graph(nodes, "net", inputs, outputs, [*weights, *one])
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


MOVED = model_of(helper.make_node("Transpose", ["r2"], ["t"], "/t"), ends="t")
CHOSEN = model_of(choice("always", "r2", "t"), ends="t")  # its one branch takes its place
PLAIN = model_of()
COMPUTED = model_of(helper.make_node("Exp", ["r2"], ["t"], "/t"), ends="t")


@pytest.mark.parametrize(
    ("model", "float_"), [(MOVED, True), (CHOSEN, True), (PLAIN, False), (COMPUTED, False)]
)
def test_what_is_moved_before_a_body_reads_it_has_no_pair(model, float_, tmp_path):
    onnx.save(model, tmp_path / "net.onnx")
    loaded = load(tmp_path / "net.onnx").model
    plan = analyse(loaded, ONNXRUNTIME)
    why = {one.node: one.reason for one in plan.decisions}
    assert why["/c1"] == ""
    assert ("ends ONNX Runtime's process" in why["/c2"]) == float_
    assert ("r2" not in plan.activations) == float_
    assert not {one.reason for one in analyse(loaded, TENSORRT).decisions if one.node == "/c2"} - {
        ""
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", [MOVED, CHOSEN, PLAIN], ids=["moved", "chosen", "plain"])
def test_a_build_of_a_model_with_bodies_leaves_an_engine_that_runs(model, rng, tmp_path):
    onnx.save(model, tmp_path / "net.onnx")
    x = rng.normal(size=(4, 1, 8, 8, 8)).astype(np.float32)
    for number, sample in enumerate(x):
        np.savez(tmp_path / f"{number}.npz", x=sample, c=np.array(number % 2 == 0))
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path / str(n)}.npz\n" for n in range(4)))
    words = ("build", tmp_path / "net.onnx", "--images", tmp_path / "list.txt", "--duration", "0")
    done = subprocess.run(  # an assertion of the runtime would end the tests with it
        [sys.executable, "-m", "deploy", *map(str, words), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "net.int8.onnx").exists()
