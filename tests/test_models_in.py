"""Models of other types through the command: whole numbers as inputs, integers inside."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.runtimes.ort import OrtSession

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def attention() -> onnx.ModelProto:
    """One layer of attention over input_ids and attention_mask, int64 as exporters write them."""
    rng = np.random.default_rng(0)
    held = {
        "table": rng.normal(scale=0.5, size=(50, 16)), "wq": rng.normal(size=(16, 16)) / 4,
        "wk": rng.normal(size=(16, 16)) / 4, "wo": rng.normal(size=(16, 5)) / 4,
        "s": np.ones(16), "b": np.zeros(16), "one": np.array(1), "far": np.array(-1e4),
    }  # fmt: skip
    constants = {name: np.asarray(value, np.float32) for name, value in held.items()}
    constants["at"] = np.array([1], np.int64)
    steps = [
        ("Gather", "table input_ids", "e"), ("LayerNormalization", "e s b", "n"),
        ("MatMul", "n wq", "q"), ("MatMul", "n wk", "k"), ("Transpose", "k", "t"),
        ("MatMul", "q t", "a"), ("Cast", "attention_mask", "f"), ("Sub", "one f", "i"),
        ("Mul", "i far", "j"), ("Unsqueeze", "j at", "m"), ("Add", "a m", "masked"),
        ("Softmax", "masked", "p"), ("MatMul", "p n", "o"), ("MatMul", "o wo", "y"),
    ]  # fmt: skip
    given = {"Transpose": {"perm": [0, 2, 1]}, "Cast": {"to": F32}, "Softmax": {"axis": -1}}
    graph = helper.make_graph(
        [
            helper.make_node(op, reads.split(), [made], name=f"/{made}", **given.get(op, {}))
            for op, reads, made in steps
        ],
        "attention",
        [helper.make_tensor_value_info(n, I64, ["b", 12]) for n in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("y", F32, ["b", 12, 5])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def sentences(tmp_path):
    rng = np.random.default_rng(1)
    mask = np.ones((12, 12), np.int64)
    mask[::2, 8:] = 0
    np.savez(tmp_path / "ids.npz", input_ids=rng.integers(0, 50, (12, 12)), attention_mask=mask)
    onnx.save(attention(), tmp_path / "net.onnx")
    return tmp_path


def test_whole_numbers_are_fed_and_every_file_takes_them(run, sentences):
    out = sentences / "out"
    code, _, err = run(
        "build", sentences / "net.onnx", "--images", sentences / "ids.npz", "--target",
        "tensorrt,onnxruntime", "--effort", 0, "--duration", 0, "--out", out,
        "--trt-version", "8.5.3",
    )  # fmt: skip
    assert code == 0, err
    fed = dict(np.load(sentences / "ids.npz"))
    want = OrtSession.open(attention()).run(fed)["y"]
    endings = ("tensorrt.onnx", "tensorrt.qdq.onnx", "tensorrt.typed.onnx", "int8.onnx")
    for ending in endings:
        session = OrtSession.open(out / f"net.{ending}", int8_kernels=ending == "int8.onnx")
        assert [s.dtype for s in session.inputs] == ["int64", "int64"]
        got = session.run(fed)["y"]
        assert np.abs(got - want).max() < (1e-4 if ending == endings[0] else 0.3)
    cache = (out / "net.tensorrt.cache").read_text()
    assert "\ne: " in cache and "input_ids" not in cache
    (told, _) = json.loads((out / "report.json").read_text())["targets"]
    assert any("1 LayerNormalization" in n for n in told["notes"])
    assert any("--shapes=input_ids:1x12,attention_mask:1x12" in n for n in told["notes"])


@pytest.mark.parametrize("command", ["calibrate", "check"])
def test_a_model_that_is_quantized_already_is_one_sentence(
    run, small_cnn, pictures, command, tmp_path
):
    given = [small_cnn, "--images", pictures, "--size", "16x16"]
    out = tmp_path / "out"
    code, _, err = run("build", *given, "--effort", 0, "--duration", 0, "--out", out)
    assert code == 0, err
    given[0] = out / "small_cnn.int8.onnx"
    cache = out / "small_cnn.cache"
    words = {
        "calibrate": ["calibrate", *given, "-o", tmp_path / "again.cache"],
        "check": ["cache", "check", cache, "--model", given[0]],
    }
    code, _, err = run(*words[command])
    assert code == 1 and "(DequantizeLinear '" in err
    assert "give the model it was made from" in err
