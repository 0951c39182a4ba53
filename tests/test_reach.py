import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.graph.bounds import reaches


def model(nodes, outputs="y", **constants):
    graph = helper.make_graph(
        [helper.make_node(op, list(i), list(o), **a) for op, i, o, a in nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 4, 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def followed(nodes, outputs="y", **constants):
    found = reaches(model(nodes, outputs, **constants))
    return {name for name, reach in found.items() if reach.followed > 0}


NUMBERS = {"two": np.float32(2), "one": np.float32(1)}
WEIGHT = {"w": np.ones((4, 4, 1, 1), np.float32)}


def test_logits_are_followed_to_what_made_them():
    nodes = [
        ("Abs", "x", "a", {}), ("Neg", "x", "b", {}),
        ("Flatten", "a", "c", {}), ("Flatten", "b", "d", {}),
        ("Concat", "cd", "e", {"axis": 1}), ("Split", "e", "fg", {"num_outputs": 2}),
        ("Transpose", "f", "h", {}), ("Sigmoid", "h", "y", {}), ("Exp", "g", "z", {}),
    ]  # fmt: skip
    assert followed(nodes, "yz") == set("abcdefh")


def test_a_followed_tensor_keeps_its_bounds():
    found = reaches(model([("Abs", "x", "t", {}), ("Sigmoid", "t", "y", {})]))
    assert found["t"] == (-8, 8, 8)
    beside = reaches(model([("Abs", "x", "t", {}), ("Sigmoid", "t", "y", {})], "yt"))
    assert beside["t"] == (-math.inf, math.inf, 8)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", ["s", "two"], "y", {})],
        [
            ("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}),
            ("Sigmoid", "x", "r", {}), ("Transpose", "r", "u", {}), ("Mul", "su", "y", {}),
        ],
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "ss", "y", {})],
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("ReduceMax", "s", "y", {})],
    ],
)  # fmt: skip
def test_scores_may_be_scaled_and_multiplied_by_scores(nodes):
    assert "t" in followed(nodes, **NUMBERS)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "ts", "y", {})],
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Mul", "sx", "y", {})],
        [
            ("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}),
            ("Transpose", "s", "u", {}), ("Mul", "ux", "y", {}),
        ],
        [("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Conv", "sw", "y", {})],
        [
            ("Abs", "x", "t", {}), ("Sigmoid", "t", "s", {}), ("Neg", "s", "n", {}),
            ("Conv", "nw", "y", {}),
        ],
        [("Abs", "x", "t", {}), ("Tanh", "t", "y", {})],
        [("Abs", "x", "t", {}), ("Softmax", "t", "y", {})],
        [("Abs", "x", "t", {}), ("Mul", ["t", "two"], "m", {}), ("Exp", "m", "y", {})],
    ],
)  # fmt: skip
def test_gates_and_what_layers_read_on_from_are_not_scores(nodes):
    assert not followed(nodes, **NUMBERS, **WEIGHT)


def spotted(path):
    """A detector of red spots: the logit of a place is 24 times its redness, less 16."""
    weight = np.zeros((16, 3, 3, 3), np.float32)
    weight[:, 0, 1, 1] = 24
    nodes = [("Conv", ["x", "w", "b"], ["c"], {"pads": [1] * 4}), ("Sigmoid", ["c"], ["y"], {})]
    graph = helper.make_graph(
        [helper.make_node(op, i, o, **a) for op, i, o, a in nodes],
        "spots",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 24, 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 24, 24])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.full(16, -16, np.float32), "b"),
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def pictures_of(count, rng):
    """[count, 3, 24, 24] float32: a bright blue on which redness thins out evenly."""
    found = np.zeros((count, 3, 24, 24), np.float32)
    found[:, 0] = np.minimum(rng.exponential(0.055, (count, 24, 24)), 1)
    found[:, 2] = 1
    return found


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_scores_that_no_image_held_are_not_cut_off(tmp_path, run, method):
    """No place of 40 pictures is surer than 0.6; a redder one comes later."""
    spotted(tmp_path / "net.onnx")
    rng = np.random.default_rng(5)
    few = pictures_of(40, rng)
    np.save(tmp_path / "x.npy", few)
    code, _, error = run(
        *(
            "build",
            tmp_path / "net.onnx",
            "--images",
            tmp_path / "x.npy",
            "--int8-stem",
            "--effort",
            0,
        ),
        *("--duration", 0, "--out", tmp_path / "out", "--method", method),
    )
    assert code == 0, error
    whole, small = (
        ort.InferenceSession(path)
        for path in (tmp_path / "net.onnx", tmp_path / "out/net.int8.onnx")
    )
    red = pictures_of(1, rng)
    red[0, 0, 12, 12] = 18.5 / 24  # a logit of 2.5
    want, got = (one.run(None, {"x": red})[0][0, 0, 12, 12] for one in (whole, small))
    sure = max(whole.run(None, {"x": one[None]})[0].max() for one in few)
    assert sure < 0.6 < 0.9 < want and got == pytest.approx(want, abs=0.03)
