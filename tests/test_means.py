"""Means over a picture run in the integer kernel of the pool that they are."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from deploy.cli import cli


def net(*, keepdims: int, axes=(2, 3), opset: int = 17) -> onnx.ModelProto:
    """x -> Conv -> r -> mean m: of a squeeze-excite where it keeps its axes, else before a Gemm."""
    rng = np.random.default_rng(7)
    held = {
        "w": rng.normal(scale=0.3, size=(16, 16, 3, 3)).astype(np.float32),
        "v": rng.normal(scale=0.5, size=(16, 16, 1, 1)).astype(np.float32),
        "g": rng.normal(size=(16, 10)).astype(np.float32),
        "b": rng.normal(size=10).astype(np.float32),
        "axes": np.array(axes, np.int64),
    }
    where = {"axes": list(axes)} if opset < 18 else {}
    reads = ["r"] if opset < 18 else ["r", "axes"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("ReduceMean", reads, ["m"], name="mean", keepdims=keepdims, **where),
    ]
    if keepdims:
        nodes += [
            helper.make_node("Conv", ["m", "v"], ["e"], name="excite"),
            helper.make_node("Sigmoid", ["e"], ["s"], name="sigmoid"),
            helper.make_node("Mul", ["r", "s"], ["p"], name="scale"),
            helper.make_node("Conv", ["p", "w"], ["y"], name="last", pads=[1] * 4),
        ]
    else:
        nodes.append(helper.make_node("Gemm", ["m", "g", "b"], ["y"], name="last"))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, name) for name, v in held.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def built(model: onnx.ModelProto, folder: Path, *words: str) -> tuple[Path, dict[str, str]]:
    """The engine that the command writes, and what it says of the mean."""
    onnx.save(model, folder / "net.onnx")
    x = np.random.default_rng(8).normal(size=(8, 16, 12, 12)).astype(np.float32)
    np.save(folder / "x.npy", x)
    given = ["build", str(folder / "net.onnx"), "--images", str(folder / "x.npy"), "--accept"]
    given += ["--out", str(folder / "out"), "--duration", "0", "--effort", "0", *words]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    (target,) = json.loads((folder / "out/report.json").read_text())["targets"]
    (mean,) = (node for node in target["nodes"] if node["name"] == "mean")
    return folder / "out/net.int8.onnx", mean


def sqnr(engine: Path, folder: Path) -> float:
    x = np.load(folder / "x.npy")
    want, got = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (folder / "net.onnx", engine)
    )
    assert want.shape == got.shape
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


FORMS = {
    "squeeze-excite": {"keepdims": 1},
    "axes from the end": {"keepdims": 1, "axes": (-1, -2)},
    "axes in an input": {"keepdims": 1, "opset": 18},
    "flat": {"keepdims": 0},
    "flat, axes in an input": {"keepdims": 0, "axes": (-2, -1), "opset": 18},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_over_a_picture_is_an_integer_pool(form, tmp_path, kernels):
    engine, mean = built(net(**FORMS[form]), tmp_path)
    assert mean["precision"] == "uint8"
    found = kernels(engine)
    assert found.count("QLinearGlobalAveragePool") == 1
    assert not {"ReduceMean", "GlobalAveragePool", "Conv", "Gemm"} & set(found)
    assert (found.count("QuantizeLinear"), found.count("DequantizeLinear")) == (
        1,
        "flat" not in form,
    )
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_mean_that_stays_float_is_a_float_pool(keepdims, tmp_path, kernels):
    engine, mean = built(net(keepdims=keepdims), tmp_path, "--keep-float", "mean")
    assert mean["reason"] == "kept float as asked"
    found = kernels(engine)
    assert found.count("GlobalAveragePool") == 1 and "ReduceMean" not in found
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("axes", [(1,), (1, 2, 3), (3,)])
def test_a_mean_over_other_axes_is_no_pool(axes, tmp_path, kernels):
    model = net(keepdims=1, axes=axes)
    graph = model.graph
    del graph.node[3:]
    graph.node.append(helper.make_node("Add", ["r", "m"], ["p"], name="add"))
    graph.node.append(helper.make_node("Conv", ["p", "w"], ["y"], name="last", pads=[1] * 4))
    engine, mean = built(model, tmp_path)
    assert mean["reason"] == "it is the mean over other axes than a picture's"
    assert "ReduceMean" in kernels(engine) and sqnr(engine, tmp_path) > 25
