"""First Convs of pictures: a fourth channel of zeros in int8, and which of them are in int8."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.graph.placement import ONNXRUNTIME
from deploy.graph.plan import analyse

SIDE = 16


def net(inner: int, outer: int, *, window: int = 3, stride: int = 1, twice: bool = False):
    """A stem, a layer behind it and, where asked for, another one that reads the input."""
    rng = np.random.default_rng(0)
    pads = {"pads": [window // 2] * 4, "strides": [stride] * 2}
    shapes = {"w": (outer, inner, window, window), "v": (8, outer, 3, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="stem", **pads),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "v"], ["y"], name="last", pads=[1, 1, 1, 1]),
    ]
    ends = ["y"]
    if twice:
        shapes["u"] = (8, inner, 1, 1)
        nodes.append(helper.make_node("Conv", ["x", "u"], ["z"], name="beside"))
        ends.append("z")
    weights = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "stem",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", inner, SIDE, SIDE])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ends],
        [numpy_helper.from_array(np.float32(v), n) for n, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def built(model: onnx.ModelProto, folder: Path, *words: str) -> onnx.ModelProto:
    folder.mkdir()
    onnx.save(model, folder / "net.onnx")
    inner = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.random.default_rng(1).normal(size=(16, inner, SIDE, SIDE)).astype(np.float32)
    np.save(folder / "x.npy", x)
    given = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    given += ["--out", str(folder / "out"), "--duration", "0", "--effort", "0", *words]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    found = onnx.load(folder / "out" / "net.int8.onnx")
    onnx.checker.check_model(found, full_check=True)
    return found


def seen(model: onnx.ModelProto) -> int:
    """Channels that the stem reads."""
    held = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    (stem,) = (node for node in model.graph.node if node.name == "stem")
    weight = made.get(stem.input[1])
    return held[weight.input[0] if weight is not None else stem.input[1]][1]


def ran(model: onnx.ModelProto) -> list[bytes]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inner = session.get_inputs()[0].shape[1]
    x = np.random.default_rng(2).normal(size=(2, inner, SIDE, SIDE)).astype(np.float32)
    return [value.tobytes() for value in session.run(None, {"x": x})]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("inner", "outer", "window"), [(3, 32, 3), (1, 32, 3), (2, 24, 5)])
def test_a_picture_in_int8_gets_four_channels(inner, outer, window, twice, tmp_path, monkeypatch):
    model = net(inner, outer, window=window, twice=twice)
    found = built(model, tmp_path / "four")
    assert seen(found) == 4 and [n.op_type for n in found.graph.node].count("Pad") == 1
    monkeypatch.setattr("deploy.targets.onnxruntime.conv_rewrites._LEAST", 1000)
    plain = built(model, tmp_path / "plain")
    assert seen(plain) == inner
    assert ran(found) == ran(plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inner": 4, "outer": 32}, ()),  # has them
        ({"inner": 3, "outer": 32, "window": 1}, ("--int8-stem",)),  # gathers nothing
        ({"inner": 3, "outer": 8}, ("--int8-stem",)),  # a small layer
        ({"inner": 3, "outer": 32}, ("--keep-float", "stem")),
    ],
)
def test_others_stay_as_they_are(given, words, tmp_path):
    found = built(net(**given), tmp_path / "net", *words)
    assert seen(found) == given["inner"] and "Pad" not in [n.op_type for n in found.graph.node]


def test_a_layer_may_be_called_as_what_it_makes(tmp_path):
    """As tf2onnx calls them: the picture's new channels and the layer's own have two names."""
    rng = np.random.default_rng(0)
    shapes = {"w": (24, 3, 3, 3), "d": (24, 1, 3, 3), "v": (8, 24, 1, 1)}
    own = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["stem"], name="stem", **own),
        helper.make_node("Clip", ["stem", "least", "most"], ["six"], name="six"),
        helper.make_node("Conv", ["six", "d"], ["deep"], name="deep", group=24, **own),
        helper.make_node("Conv", ["deep", "v"], ["y"], name="y"),
    ]
    weights = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    weights |= {"least": np.array(0.0), "most": np.array(6.0)}
    graph = helper.make_graph(
        nodes,
        "stem",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(v), n) for n, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    found = built(model, tmp_path / "net")
    assert seen(found) == 4 and "stem/wide" in [name for n in found.graph.node for name in n.output]


@pytest.mark.parametrize(
    ("inner", "outer", "stride", "in_float"),
    [
        (3, 32, 1, False),
        (3, 24, 1, False),
        (3, 16, 1, True),
        (3, 24, 2, False),
        (3, 16, 2, True),
        (1, 32, 1, False),
        (1, 32, 2, True),
    ],
)
def test_a_first_conv_of_many_values_is_in_int8(inner, outer, stride, in_float):
    plan = analyse(net(inner, outer, stride=stride), ONNXRUNTIME)
    (stem,) = (one for one in plan.decisions if one.node == "stem")
    assert (f"only {9 * inner} products" in stem.reason) is in_float
    every = analyse(net(inner, outer, stride=stride), replace(ONNXRUNTIME, thin=0))
    assert not any(one.reason for one in every.decisions)
