"""Detectors that give a list of boxes, as many as they find: the search goes by what they find."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.tuning.plan_file import read_plan

SIDE, ANCHORS = 32, 20


@pytest.fixture(scope="module")
def listing(tmp_path_factory):
    """A detector whose boxes above 0.3 are a list; what its layer `bad` reads int8 spoils."""
    made = np.random.default_rng(4)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    spread = np.array([1, 1, 1, 1, 4, 4]).reshape(6, 1, 1, 1)
    rows, columns = (one.reshape(-1)[:ANCHORS] for one in np.mgrid[0:5, 0:5] * 6.0)
    floats = {
        "w0": made.normal(size=(8, 3, 3, 3)) * 0.3, "size": size,
        "w1": made.normal(size=(3, 8, 1, 1)) * 0.5 / size, "least": np.float32(0.3),
        "w2": made.normal(size=(6, 3, 8, 8)) * spread * 0.12, "b2": [0, 0, 0, 0, -2, -2],
        "w3": made.normal(size=(6, 3, 16, 16)) * spread * 0.06,
        "places": np.stack([columns, rows, columns + 9, rows + 9])[None],
    }  # fmt: skip
    floats["w1"][:, 0] = 0
    wholes = {"flat": [1, 6, -1], "cut": [4, 2], "zero": [0], "both": [0, 1]}
    nodes = [
        ("Conv", "x w0", "a", {"pads": [1] * 4}), ("Tanh", "a", "t", {}),
        ("Mul", "t size", "m", {}), ("Conv", "m w1", "bad", {}), ("Relu", "bad", "r", {}),
        ("Conv", "r w2 b2", "c8", {"strides": [8, 8]}),
        ("Conv", "r w3 b2", "c16", {"strides": [16, 16]}),
        ("Reshape", "c8 flat", "r8", {}), ("Reshape", "c16 flat", "r16", {}),
        ("Concat", "r8 r16", "all", {"axis": 2}), ("Split", "all cut", "moves logits", {"axis": 1}),
        ("Add", "moves places", "boxes", {}), ("Sigmoid", "logits", "scores", {}),
        ("ReduceMax", "scores", "best", {"axes": [1]}), ("ArgMax", "scores", "kind", {"axis": 1}),
        ("Cast", "kind", "class", {"to": 1}), ("Concat", "boxes best class", "rows", {"axis": 1}),
        ("Transpose", "rows", "turned", {"perm": [0, 2, 1]}), ("Squeeze", "turned zero", "own", {}),
        ("Squeeze", "best both", "sure", {}), ("Greater", "sure least", "keep", {}),
        ("Compress", "own keep", "y", {"axis": 0}),
    ]  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node(op, i.split(), o.split(), name=o.split()[0], **a)
            for op, i, o, a in nodes
        ],
        "listing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["found", 6])],
        [
            *(numpy_helper.from_array(np.float32(v), k) for k, v in floats.items()),
            *(numpy_helper.from_array(np.array(v, np.int64), k) for k, v in wholes.items()),
        ],
    )
    path = tmp_path_factory.mktemp("listing") / "net.onnx"
    imports = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    np.save(path.with_suffix(".npy"), made.uniform(0, 1, (24, 3, SIDE, SIDE)).astype(np.float32))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_the_layer_that_loses_what_is_found_is_kept_float(target, listing, run, tmp_path):
    words = ("--images", listing.with_suffix(".npy"), "--duration", 0, "--target", target)
    found = {}
    for effort in (0, 1):
        out = tmp_path / str(effort)
        code, said, err = run("build", listing, *words, "--effort", effort, "--out", out)
        assert code == (0 if effort else 3), err or said
        found[effort] = json.loads((out / "report.json").read_text())["engines"][1]["accuracy"]
    assert found[0]["reading"] == "y: a list of boxes, scores and classes"
    assert found[0]["task"]["value"] < 0.5 and found[1]["task"]["value"] > 0.95
    plan = read_plan(tmp_path / "1" / "net.plan.toml").targets[target]
    assert "bad" in plan.choices.float_nodes and "c8" not in plan.choices.float_nodes
    assert "boxes of FP32 kept" in plan.settled
    assert "of what is found" in plan.choices.float_nodes["bad"]


def test_a_figure_of_ones_own_tells_what_a_list_loses(listing, run, tmp_path):
    """It is content with anything, so nothing is kept in float for its sake."""
    (tmp_path / "own.py").write_text("def content(fp32, int8, label):\n    return 1.0\n")
    words = ("--images", listing.with_suffix(".npy"), "--duration", 0, "--out", tmp_path / "o")
    own = f"{tmp_path / 'own.py'}:content"
    code, said, err = run("build", listing, *words, "--metric", own)
    assert code == 0, err or said
    plan = read_plan(tmp_path / "o" / "net.plan.toml").targets["onnxruntime"]
    assert "bad" not in plan.choices.float_nodes
