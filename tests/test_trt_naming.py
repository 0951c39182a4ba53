"""Which tensors a TensorRT cache lists, held against caches that TensorRT wrote."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy.calibration.trt_cache import parse
from deploy.frontends import load
from deploy.targets.tensorrt.naming import CAFFE, ONNX, cache_tensors, likely_parser, trt_tensors

SHARED = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt"
NEEDS_SHARED = pytest.mark.skipif(not SHARED.exists(), reason=f"no golden files at {SHARED}")


def model_of(
    nodes: list[onnx.NodeProto], shape: list[int], name: str = "x", **weights: np.ndarray
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
    outputs = [helper.make_empty_tensor_value_info(nodes[-1].output[0])]
    constants = [numpy_helper.from_array(array, key) for key, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    made.producer_name = "test"
    return onnx.shape_inference.infer_shapes(made)


def vgg16() -> onnx.ModelProto:
    """The layers of torchvision's VGG16, four channels wide, with the names of torch's exporter."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}
    names = iter(["input.1", *map(str, range(33, 71))])
    last, channels = next(names), 3

    def add(op: str, **attributes: object) -> None:
        nonlocal last
        out = next(names)
        extra = [f"w{out}", f"b{out}"] if op in ("Conv", "Gemm") else []
        nodes.append(helper.make_node(op, [last, *extra], [out], f"{op}_{out}", **attributes))
        last = out

    for depth in (2, 2, 3, 3, 3):
        for _ in range(depth):
            add("Conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            weights[f"w{last}"] = np.ones((4, channels, 3, 3), np.float32)
            weights[f"b{last}"] = np.ones(4, np.float32)
            channels = 4
            add("Relu")
        add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    add("AveragePool", kernel_shape=[1, 1])
    add("Flatten")
    for layer in range(3):
        add("Gemm", transB=1)
        weights[f"w{last}"] = np.ones((4, 4), np.float32)
        weights[f"b{last}"] = np.ones(4, np.float32)
        if layer < 2:
            add("Relu")
    return model_of(nodes, [1, 3, 32, 32], "input.1", **weights)


@NEEDS_SHARED
def test_vgg16_by_the_onnx_parser_of_7_2_has_the_names_tensorrt_wrote() -> None:
    path = SHARED / "caches" / "model_convert_7201_entropy2.cache"
    real = parse(path.read_bytes(), origin=path.name)
    wanted = cache_tensors(vgg16(), version="7.2.1")
    assert [t.name for t in wanted] == [entry.name for entry in real.entries]
    scales = real.scales()
    for tensor in wanted:  # a pool's entry is its input's, in TensorRT's file as in ours
        if tensor.shares is not None:
            assert scales[tensor.name] == scales[tensor.shares]


@NEEDS_SHARED
def test_lenet_by_the_caffe_parser_has_the_names_tensorrt_wrote() -> None:
    path = SHARED / "lenet" / "lenet.onnx"
    real = parse((SHARED / "lenet" / "table.cache").read_bytes(), origin="table.cache")
    original = onnx.load(path)
    assert likely_parser(original, "7.2.2") == CAFFE
    assert likely_parser(original, "8.5.3") == ONNX
    model = load(path, fold_batchnorm=False).model
    wanted = cache_tensors(model, version="7.2.2", original=original)
    assert [t.name for t in wanted] == [entry.name for entry in real.entries]


def gemm_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Identity", ["x"], ["same"], "/same"),
        helper.make_node("Gemm", ["same", "w", "b"], ["y"], "/cls/cls.0/Gemm"),
        helper.make_node("Relu", ["y"], ["z"], "/relu"),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    return model_of(nodes, [1, 4], **weights)


def test_from_10_on_a_gemm_shows_what_it_gives_before_its_bias() -> None:
    original = gemm_model()
    model = load(original, fold_batchnorm=False).model
    wanted = cache_tensors(model, version="10.3.0", original=original)
    names = [t.name for t in wanted]
    assert names == ["x", "same", "/cls/cls.0/Gemm_output", "y", "z"]
    assert wanted[1].source == "x"


def test_a_cast_to_the_type_that_is_there_shows_the_scale_of_what_it_casts() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["same"], "/cast", to=1),
        helper.make_node("Relu", ["same"], ["z"], "/relu"),
    ]
    original = model_of(nodes, [1, 4])
    model = load(original, fold_batchnorm=False).model
    wanted = cache_tensors(model, version="10.3.0", original=original)
    assert [(t.name, t.source) for t in wanted] == [("x", "x"), ("same", "x"), ("z", "z")]


MODELS = Path(os.environ.get("CALIB8_MODELS") or Path.home() / ".cache" / "calib8-models")
YOLO = MODELS / "nudenet-3.4.2" / "nudenet" / "320n.onnx"


@NEEDS_SHARED
@pytest.mark.skipif(not YOLO.exists(), reason=f"no {YOLO.name}; benchmarks/fetch_models.py")
@pytest.mark.parametrize("stem", ["yolov8n_101401", "yolov8_selahattinsina_101401"])
def test_yolov8n_has_the_names_that_tensorrt_10_14_wrote(stem: str) -> None:
    """Another YOLOv8n than the caches' own: the layers before the head are the same."""
    real = parse((SHARED / "caches" / f"{stem}_entropy2.cache").read_bytes(), origin=stem)
    original = onnx.load(YOLO)
    model = load(original, fold_batchnorm=False).model
    wanted = cache_tensors(model, version="10.14.1", original=original)

    def body(names: list[str]) -> set[str]:
        return {name for name in names if name.startswith("/model.") and "/model.22" not in name}

    scales = real.scales()
    assert body(list(scales)) == body([t.name for t in wanted])
    assert len(body(list(scales))) > 150
    assert "/model.22/dfl/Softmax_output" in {t.name for t in wanted} & set(scales)
    pools = [t for t in wanted if t.shares in scales and t.name in scales]
    assert pools
    assert all(scales[t.name] == scales[str(t.shares)] for t in pools)


def test_from_8_4_to_9_the_inside_of_a_gemm_is_left_out() -> None:
    original = gemm_model()
    model = load(original, fold_batchnorm=False).model
    wanted = cache_tensors(model, version="8.5.3", original=original)
    assert [t.name for t in wanted] == ["x", "same", "y", "z"]


def test_layers_are_not_counted_past_an_operator_of_unknown_layers() -> None:
    nodes = [
        helper.make_node("Softplus", ["x"], ["h"], "/h"),
        helper.make_node("Gemm", ["h", "w", "b"], ["y"], "/fc"),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    wanted = cache_tensors(model_of(nodes, [1, 4], **weights), version="7.2.1")
    assert [t.name for t in wanted] == ["x", "h", "y"]


def test_batchnorm_is_not_folded_and_indices_are_not_listed() -> None:
    channel = np.ones(4, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/conv", kernel_shape=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"], "/bn"),
        helper.make_node("Relu", ["n"], ["r"], "/relu"),
        helper.make_node("ArgMax", ["r"], ["i"], "/argmax", axis=1),
    ]
    weights = {"w": np.ones((4, 3, 1, 1), np.float32), "s": channel, "o": channel}
    weights |= {"m": channel, "v": channel}
    model = load(model_of(nodes, [1, 3, 2, 2], **weights), fold_batchnorm=False).model
    assert trt_tensors(model) == ["x", "c", "n", "r"]
