"""A mean over a picture is one pool in ONNX Runtime's int8 models."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.graph.edit import drop_unread
from tests.models import as_float32, build_net, make_model, parse_nodes, read_target, run_net

PADS = {"pads": [1, 1, 1, 1]}


INT8 = "net.int8.onnx"


def mean_net(*, keepdims: int, axes=(2, 3), opset: int = 17, reader: str = "") -> onnx.ModelProto:
    """x -> Conv -> r -> mean m: of a squeeze-excite where it keeps its axes, else before a Gemm."""
    rng = np.random.default_rng(7)
    weight_arrays = {
        "w": rng.normal(scale=0.3, size=(16, 16, 3, 3)),
        "v": rng.normal(scale=0.5, size=(16, 16, 1, 1)),
        "g": rng.normal(size=(16, 10)),
        "b": rng.normal(size=10),
    }
    axes_attribute = {"axes": list(axes)} if opset < 18 else {}
    mean = (
        "ReduceMean",
        "r" if opset < 18 else "r axes",
        "m",
        {"keepdims": keepdims, **axes_attribute},
    )
    last_layer = "y = Conv <pads = [1, 1, 1, 1]> (p, w)"
    excite = f"e = Conv(m, v) s = Sigmoid(e) p = Mul(r, s) {last_layer}"
    if reader:
        reader = f"{reader} {last_layer}"
    elif keepdims:
        reader = excite
    else:
        reader = "y = Gemm(m, g, b)"
    nodes = [("Conv", "x w", "c", PADS), ("Relu", "c", "r"), mean, *parse_nodes(reader)]
    weights = as_float32(weight_arrays) | {"axes": np.array(axes, np.int64)}
    model = make_model(nodes, {"x": ["n", 16, 12, 12]}, {"y": None}, weights, opset=opset)
    drop_unread(model.graph)
    return model


def build_mean(model: onnx.ModelProto, folder: Path, *options: str) -> tuple[Path, dict[str, str]]:
    """The engine that the command writes, and what it says of the mean."""
    x = np.random.default_rng(8).normal(size=(8, 16, 12, 12))
    out = build_net(model, x, folder, "--effort", 0, "--accept", *options)
    (mean,) = (node for node in read_target(out)["nodes"] if node["op"] == "ReduceMean")
    return out / INT8, mean


def sqnr(engine: Path, folder: Path) -> float:
    x = np.load(folder / "x.npy")
    expected, outputs = (run_net(path, x)[0] for path in (folder / "net.onnx", engine))
    assert expected.shape == outputs.shape
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - outputs).sum()))


MEANS = {
    "squeeze-excite": {"keepdims": 1},
    "axes from the end": {"keepdims": 1, "axes": (-1, -2)},
    "axes in an input": {"keepdims": 1, "opset": 18},
    "flat": {"keepdims": 0},
    "flat, axes in an input": {"keepdims": 0, "axes": (-2, -1), "opset": 18},
}


@pytest.mark.parametrize("form", MEANS)
def test_mean_over_picture_is_integer_pool(form, tmp_path, kernels):
    engine, mean = build_mean(mean_net(**MEANS[form]), tmp_path)
    assert mean["precision"] == "uint8"
    types = kernels(engine)
    assert types.count("QLinearGlobalAveragePool") == 1
    assert not {"ReduceMean", "GlobalAveragePool", "Conv", "Gemm"} & set(types)
    assert types.count("QuantizeLinear") == 1
    assert types.count("DequantizeLinear") == ("flat" not in form)
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("keepdims", [0, 1])
def test_float_mean_is_a_float_pool(keepdims, tmp_path, kernels, wording):
    options = ("--keep-float", "op:ReduceMean")
    engine, mean = build_mean(mean_net(keepdims=keepdims), tmp_path, *options)
    wording.check(mean["reason"])
    types = kernels(engine)
    assert types.count("GlobalAveragePool") == 1
    assert "ReduceMean" not in types
    assert sqnr(engine, tmp_path) > 25


@pytest.mark.parametrize("axes", [(1,), (1, 2, 3), (3,)])
def test_mean_over_other_axes_stays(axes, tmp_path, kernels):
    engine, mean = build_mean(mean_net(keepdims=1, axes=axes, reader="p = Add(r, m)"), tmp_path)
    assert "mean over other axes" in mean["reason"]
    assert "ReduceMean" in kernels(engine)
    assert sqnr(engine, tmp_path) > 25
