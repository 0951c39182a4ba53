"""Models whose weights alone are stored as integers: float models, which are calibrated as such."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli
from deploy.errors import QuantizedError
from deploy.frontends import load

X = np.random.default_rng(1).normal(size=(24, 16, 8, 8)).astype(np.float32)


def stored(how: str) -> onnx.ModelProto:
    """Two Convs, whose weights [16, 16, 3, 3] have a scale, one a channel, or one a block."""
    rng = np.random.default_rng(0)
    nodes, held = [], {}
    for place in "ab":
        integers = rng.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
        shape = {"channel": (16,), "block": (16, 4, 3, 3)}.get(how, ())
        scale = rng.uniform(0.5e-3, 2e-3, shape).astype(np.float32)
        held |= {f"{place}_q": integers, f"{place}_s": scale}
        held[f"{place}_z"] = np.full(shape, 3 if how == "tensor" else 0, np.int8)
        blocks = {"axis": 1, "block_size": 4}  # one scale is no block to ONNX Runtime
        given = {"channel": {"axis": 0}, "block": blocks, "scalar blocks": blocks}.get(how, {})
        names = [f"{place}_q", f"{place}_s", f"{place}_z"]
        nodes.append(helper.make_node("DequantizeLinear", names, [f"{place}_w"], place, **given))
    pads = {"pads": [1, 1, 1, 1]}
    nodes += [
        helper.make_node("Conv", ["x", "a_w"], ["c"], name="first", **pads),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "b_w"], ["y"], name="second", **pads),
    ]
    graph = helper.make_graph(
        nodes,
        "stored",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    opset = [helper.make_opsetid("", 21 if "block" in how else 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def ran(model: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()  # optimized, integers of weights may be multiplied first
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
def test_integers_become_the_float_weights_that_they_stand_for(how):
    loaded = load(stored(how))
    assert {node.op_type for node in loaded.model.graph.node} == {"Conv", "Relu"}
    assert "Took 2 weights that are stored as integers as float ones." in loaded.notes
    assert ran(loaded.model).tobytes() == ran(stored(how)).tobytes()


def test_float_weights_that_were_left_as_inputs_are_none():
    model = stored("channel")
    for place in "ab":
        left = helper.make_tensor_value_info(f"{place}_float", TensorProto.FLOAT, [16, 16, 3, 3])
        model.graph.input.append(left)
    assert [spec.name for spec in load(model).inputs] == ["x"]


@pytest.mark.parametrize("how", ["channel", "scalar blocks"])
def test_such_a_model_is_calibrated_and_built_in_int8(how, tmp_path):
    onnx.save(stored(how), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", X)
    words = ["build", str(tmp_path / "net.onnx"), "--images", str(tmp_path / "x.npy"), "--accept"]
    words += ["--out", str(tmp_path / "out"), "--duration", "0", "--effort", "0"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert "calibrated anew" in done.output and "quantized already" not in done.output
    told = " ".join(done.output.split())
    assert "FP32 is the float model that net stands for" in told
    built = onnx.load(tmp_path / "out" / "net.int8.onnx")
    convs = [node for node in built.graph.node if node.op_type == "Conv"]
    made = {name: node for node in built.graph.node for name in node.output}
    assert [made[node.input[0]].op_type for node in convs] == ["DequantizeLinear"] * 2


def test_images_are_asked_for_as_of_a_float_model(tmp_path):
    onnx.save(stored("channel"), tmp_path / "net.onnx")
    done = CliRunner().invoke(cli, ["build", str(tmp_path / "net.onnx")])
    assert done.exit_code != 0 and "--images" in done.output


def spoiled(kind: str) -> onnx.ModelProto:
    model = stored("channel")
    if kind == "quantizes":
        scale = numpy_helper.from_array(np.float32(0.1), "s")
        zero = numpy_helper.from_array(np.uint8(0), "z")
        model.graph.initializer.extend([scale, zero])
        pair = [
            helper.make_node("QuantizeLinear", ["r", "s", "z"], ["r_q"], name="q"),
            helper.make_node("DequantizeLinear", ["r_q", "s", "z"], ["r_dq"], name="dq"),
        ]
        last = model.graph.node.pop()
        last.input[0] = "r_dq"
        model.graph.node.extend([*pair, last])
    elif kind == "fed":
        model.graph.input.append(helper.make_tensor_value_info("a_q", TensorProto.INT8, None))
        del model.graph.initializer[0]
    else:
        del model.graph.initializer[1]
        model.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "a_s"))
    return model


@pytest.mark.parametrize("kind", ["quantizes", "fed", "does not fit"])
def test_others_are_quantized_models_as_before(kind):
    with pytest.raises(QuantizedError, match="quantized already"):
        load(spoiled(kind))
