"""Which placement of Q/DQ pairs is faster on an NVIDIA GPU.

    python -m benchmarks.gpu_placement [--out FOLDER] [--only NET,...] [--duration S]

Makes, on any machine, one small net of random weights a question, and its Q/DQ models by calib8,
each with another option; NVIDIA's ModelOpt makes one more where it is installed. On a GPU each
model is then built as int8 and fp16 for batch 1, 8 and 32, and the models of a net are timed in
turns. FOLDER/gpu_placement.md has the table from the first net on: the time of each model, and its
speed beside the default. Without a GPU the models are left for a machine that has one, and the exit
code is 77.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calib8 import TensorRT, build
from deploy.errors import BackendError, SdkMissingError, first_line
from deploy.files import atomic
from deploy.frontends import load
from deploy.metrics.latency import measure
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine
from deploy.targets.tensorrt.cuda import open_gpu
from deploy.targets.tensorrt.profiles import profiles_for
from deploy.targets.tensorrt.session import TensorrtSession, describe_device
from deploy.tensors import Session

BATCHES = (1, 8, 32)
SAMPLES = 4  # random ones: speed does not depend on the ranges
DEFAULT, MODELOPT = "calib8", "ModelOpt"
HEAD = "| net | model | batch | p50 ms | speed of calib8 |\n|---|---|---|---|---|"


class Net:
    """A net under construction.

    Attributes:
        model: the finished net, with the last tensor as its output.
    """

    def __init__(self, channels: int, size: int) -> None:
        """Start with an input of these channels and sides, batch open."""
        self.tensor, self.channels = "x", channels
        self._input = helper.make_tensor_value_info("x", 1, ["batch", channels, size, size])
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        """Add a node that reads these tensors, or the last one; return its output."""
        self.tensor = f"{op.lower()}{len(self._nodes)}"
        node = helper.make_node(op, inputs or [self.tensor], [self.tensor], **attributes)
        node.name = self.tensor
        self._nodes.append(node)
        return self.tensor

    def layer(self, op: str, channels: int, window: int = 3, **attributes: object) -> str:
        """Add a layer with random weights and a Relu behind it."""
        group = int(str(attributes.get("group", 1)))
        shape: tuple[int, ...] = (channels, self.channels // group, window, window)
        if op == "ConvTranspose":
            shape = (self.channels, channels, window, window)
        if op == "Gemm":
            shape = (self.channels, channels)
        weight = self._rng.normal(size=shape).astype(np.float32) / np.sqrt(self.channels * window)
        name = f"w{len(self._nodes)}"
        self._weights.append(numpy_helper.from_array(weight.astype(np.float32), name))
        self.add(op, self.tensor, name, **attributes)
        self.channels = channels
        return self.tensor if op == "Gemm" else self.add("Relu", self.tensor)

    @property
    def model(self) -> onnx.ModelProto:
        """The net as an ONNX model of opset 17."""
        output = helper.make_tensor_value_info(self.tensor, 1, None)
        graph = helper.make_graph(self._nodes, "net", [self._input], [output], self._weights)
        opset = helper.make_opsetid("", 17)
        return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def gemm_net() -> onnx.ModelProto:
    """A classifier whose Gemms have most of the weights."""
    net = Net(64, 28)
    net.layer("Conv", 256, pads=[1] * 4, strides=[2, 2])
    net.add("GlobalAveragePool", net.tensor)
    net.add("Flatten", net.tensor)
    net.layer("Gemm", 4096)
    net.layer("Gemm", 4096)
    net.layer("Gemm", 1000)
    return net.model


def depthwise_net() -> onnx.ModelProto:
    """Three blocks of MobileNet: a depthwise Conv between two pointwise ones."""
    net = Net(32, 56)
    for _ in range(3):
        net.layer("Conv", 192, window=1)
        net.layer("Conv", 192, pads=[1] * 4, group=192)
        net.layer("Conv", 32, window=1)
    return net.model


def residual_net() -> onnx.ModelProto:
    """Four blocks of ResNet: two Convs beside a skip branch with a Conv of its own."""
    net = Net(64, 56)
    for _ in range(4):
        start = net.tensor
        skip = net.layer("Conv", 64, window=1)
        net.tensor = start
        net.layer("Conv", 64, pads=[1] * 4)
        net.layer("Conv", 64, pads=[1] * 4)
        net.add("Add", net.tensor, skip)
        net.add("Relu", net.tensor)
    return net.model


def concat_net() -> onnx.ModelProto:
    """A Conv and a Softmax, which is float, that meet in a Concat, twice."""
    net = Net(64, 56)
    for _ in range(2):
        start = net.tensor
        attention = net.add("Softmax", start, axis=1)
        net.tensor = start
        branch = net.layer("Conv", 64, pads=[1] * 4)
        net.add("Concat", branch, attention, axis=1)
        net.channels = 128
        net.layer("Conv", 64, pads=[1] * 4)
    return net.model


def deconv_net() -> onnx.ModelProto:
    """A decoder: ConvTransposes with a Relu, and Convs."""
    net = Net(128, 28)
    net.layer("ConvTranspose", 64, window=2, strides=[2, 2])
    net.layer("Conv", 64, pads=[1] * 4)
    net.layer("ConvTranspose", 32, window=2, strides=[2, 2])
    net.layer("Conv", 32, pads=[1] * 4)
    return net.model


@dataclass(frozen=True)
class Question:
    """A net, and the options that are tried on it beside the default."""

    make: Callable[[], onnx.ModelProto]
    options: Mapping[str, tuple[TensorRT, tuple[str, ...]]] = field(default_factory=dict)


def _keep_float(*patterns: str) -> tuple[TensorRT, tuple[str, ...]]:
    return TensorRT(form="qdq"), patterns


QUESTIONS = {
    "gemm": Question(gemm_net, {"Gemms in float": _keep_float("op:Gemm")}),
    "depthwise": Question(
        depthwise_net, {"depthwise Convs in float": _keep_float("conv2", "conv8", "conv14")}
    ),
    "residual": Question(residual_net, {"no pair on the skip branch": _keep_float("op:Add")}),
    "concat": Question(
        concat_net,
        {
            "--float-behind-concat": (TensorRT(form="qdq", float_behind_concat=True), ()),
        },
    ),
    "deconv": Question(
        deconv_net, {"--pair-behind-deconv": (TensorRT(form="qdq", pair_behind_deconv=True), ())}
    ),
}


def make_models(name: str, question: Question, out: Path) -> dict[str, Path]:
    """Write the Q/DQ models of a net; return the name of the option -> model."""
    path = atomic.write_bytes(out / f"{name}.onnx", question.make().SerializeToString())
    (spec,) = load(path).inputs
    shape = [SAMPLES, *(int(str(side)) for side in spec.shape[1:])]
    arrays = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    options = {DEFAULT: (TensorRT(form="qdq"), ()), **question.options}
    models = {}
    for number, (title, (target, float_nodes)) in enumerate(options.items()):
        folder = out / f"{name}-{number}"
        build(
            path,
            arrays,
            targets=[target],
            float_nodes=list(float_nodes),
            out=folder,
            effort=0,
            duration_s=0,
        )
        models[title] = folder / f"{name}.tensorrt.qdq.onnx"
    if find_spec("modelopt"):
        models[MODELOPT] = _quantize_by_modelopt(path, arrays)
    return models


def _quantize_by_modelopt(path: Path, arrays: np.ndarray) -> Path:
    """Return the Q/DQ model that NVIDIA's ModelOpt makes."""
    from modelopt.onnx.quantization import quantize

    output = path.with_name(f"{path.stem}.modelopt.onnx")
    calibration_data = {"x": arrays}
    quantize(str(path), calibration_data=calibration_data, output_path=str(output))
    return output


def time_models(
    net: Path, models: Mapping[str, Path], duration_s: float
) -> Iterator[tuple[str, int, float | str]]:
    """Yield (model, batch, p50 in ms, or why there is none) of each engine."""
    (spec,) = load(net).inputs
    for batch in BATCHES:
        shape = (batch, *(int(str(side)) for side in spec.shape[1:]))
        profiles = profiles_for({spec.name: spec.shape}, {spec.name: shape}, max_batch=batch)
        settings = BuilderSettings(profiles=profiles)
        sessions: dict[str, Session] = {}
        for title, path in models.items():
            engine = path.with_name(f"{path.stem}-{batch}.engine")
            try:
                atomic.write_bytes(engine, build_engine(path, settings).plan)
                sessions[title] = TensorrtSession.open(engine)
            except BackendError as error:
                yield title, batch, first_line(error)
        if not sessions:
            continue
        feed = {spec.name: np.zeros(shape, np.float32)}
        for title, latency in measure(sessions, [feed], duration_s=duration_s).items():
            yield title, batch, latency.latency.p50


def table(rows: Sequence[tuple[str, str, int, float | str]]) -> str:
    """Return the Markdown table; `rows`: net, model, batch, p50 in ms or why there is none."""
    default_ms = {(net, batch): ms for net, title, batch, ms in rows if title == DEFAULT}
    lines = [HEAD]
    for net, title, batch, ms in sorted(rows, key=lambda row: (row[0], row[2], row[1] != DEFAULT)):
        base, cells = default_ms.get((net, batch)), [str(ms), ""]
        if isinstance(ms, float):
            cells = [f"{ms:.4f}", f"{base / ms:.2f}" if isinstance(base, float) else ""]
        lines.append(f"| {net} | {title} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Make the models, and time them where there is a GPU; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_placement"))
    parser.add_argument("--only", default=",".join(QUESTIONS), help="nets, with commas between")
    parser.add_argument("--duration", type=float, default=3, help="seconds a model and batch")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := {*names} - {*QUESTIONS}:
        parser.error(f"no net is called {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")

    models = {name: make_models(name, QUESTIONS[name], options.out) for name in names}
    try:
        device = describe_device(sdk.find_sdk(), open_gpu(0)).description
    except SdkMissingError as error:
        print(f"the models are in {options.out}; nothing to time them on: {error}")
        return 77
    rows: list[tuple[str, str, int, float | str]] = []
    for name in names:
        net = options.out / f"{name}.onnx"
        for title, batch, ms in time_models(net, models[name], options.duration):
            rows.append((name, title, batch, ms))
            text = f"{device}; int8 and fp16\n\n{table(rows)}\n"
            atomic.write_text(options.out / "gpu_placement.md", text)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
