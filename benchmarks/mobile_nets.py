"""ShuffleNet v2 x0.5, MobileNetV3-small and ResNet-18 as torchvision exports them, random weights.

Only their speed is of interest, or their graph, which the weights do not change, so PyTorch is not
needed: the graphs are written operator by operator, batch norms folded (arXiv:1807.11164, table 5;
arXiv:1905.02244, table 2; arXiv:1512.03385, table 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from fetch_models import cache_folder
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class _Graph:
    """Nodes and weights so far; every method adds one operator and gives its output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> list[str]:
        names = [f"{kind.lower()}_{len(self.nodes)}_{number}" for number in range(outputs)]
        node = helper.make_node(kind, inputs, names, name=f"{kind}_{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return names

    def constant(self, value: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def normal(self, shape: Sequence[int]) -> str:
        spread = np.sqrt(2 / np.prod(shape[1:]))
        return self.constant(self.random.normal(0, spread, shape).astype(np.float32))

    def conv(
        self, x: str, shape: tuple[int, int, int], *, stride: int = 1, depthwise: bool = False
    ) -> str:
        """`shape`: channels in and out, kernel."""
        before, after, kernel = shape
        weight = self.normal((after, 1 if depthwise else before, kernel, kernel))
        bias = self.constant(self.random.normal(0, 0.05, after).astype(np.float32))
        return self.add(
            "Conv",
            x,
            weight,
            bias,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=before if depthwise else 1,
        )[0]

    def gemm(self, x: str, before: int, after: int) -> str:
        bias = self.constant(np.zeros(after, np.float32))
        return self.add("Gemm", x, self.normal((after, before)), bias, transB=1)[0]

    def model(self, output: str, name: str) -> onnx.ModelProto:
        last = self.nodes[-1]
        last.output[0] = "output"
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 224, 224])],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1000])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = 9
        onnx.checker.check_model(model)
        return model


def shufflenet_v2_half() -> onnx.ModelProto:
    """ShuffleNet v2 x0.5."""
    g = _Graph()
    x = g.add("Relu", g.conv("input", (3, 24, 3), stride=2))[0]
    x = g.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])[0]
    before, side = 24, 56
    for repeats, after in ((4, 48), (8, 96), (4, 192)):
        side //= 2
        for number in range(repeats):
            x = _shuffle_unit(g, x, before if number == 0 else after, after, side, number == 0)
        before = after
    x = g.add("Relu", g.conv(x, (192, 1024, 1)))[0]
    x = g.add("ReduceMean", x, axes=[2, 3], keepdims=0)[0]
    return g.model(g.gemm(x, 1024, 1000), "shufflenet_v2_x0_5")


def _shuffle_unit(g: _Graph, x: str, before: int, after: int, side: int, down: bool) -> str:
    """One unit; its two halves change places at the end by channels."""
    half = after // 2
    stride = 2 if down else 1
    if down:
        left = g.conv(x, (before, before, 3), stride=2, depthwise=True)
        left = g.add("Relu", g.conv(left, (before, half, 1)))[0]
        right, inside = x, before
    else:
        left, right = g.add("Split", x, outputs=2, axis=1)
        inside = half
    right = g.add("Relu", g.conv(right, (inside, half, 1)))[0]
    right = g.conv(right, (half, half, 3), stride=stride, depthwise=True)
    right = g.add("Relu", g.conv(right, (half, half, 1)))[0]
    x = g.add("Concat", left, right, axis=1)[0]
    x = g.add("Reshape", x, g.constant(np.array([1, 2, half, side, side])))[0]
    x = g.add("Transpose", x, perm=[0, 2, 1, 3, 4])[0]
    return g.add("Reshape", x, g.constant(np.array([1, after, side, side])))[0]


# in, kernel, inside, out, squeeze-excite, hard-swish, stride
_ROWS = (
    (16, 3, 16, 16, True, False, 2),
    (16, 3, 72, 24, False, False, 2),
    (24, 3, 88, 24, False, False, 1),
    (24, 5, 96, 40, True, True, 2),
    (40, 5, 240, 40, True, True, 1),
    (40, 5, 240, 40, True, True, 1),
    (40, 5, 120, 48, True, True, 1),
    (48, 5, 144, 48, True, True, 1),
    (48, 5, 288, 96, True, True, 2),
    (96, 5, 576, 96, True, True, 1),
    (96, 5, 576, 96, True, True, 1),
)


def mobilenet_v3_small() -> onnx.ModelProto:
    """MobileNetV3-small."""
    g = _Graph()
    x = g.add("HardSwish", g.conv("input", (3, 16, 3), stride=2))[0]
    for before, kernel, inside, after, squeeze, swish, stride in _ROWS:
        act, start = "HardSwish" if swish else "Relu", x
        if inside != before:
            x = g.add(act, g.conv(x, (before, inside, 1)))[0]
        x = g.conv(x, (inside, inside, kernel), stride=stride, depthwise=True)
        x = g.add(act, x)[0]
        if squeeze:
            x = _squeezed(g, x, inside)
        x = g.conv(x, (inside, after, 1))
        if stride == 1 and before == after:
            x = g.add("Add", x, start)[0]
    x = g.add("HardSwish", g.conv(x, (96, 576, 1)))[0]
    x = g.add("Flatten", g.add("GlobalAveragePool", x)[0])[0]
    x = g.add("HardSwish", g.gemm(x, 576, 1024))[0]
    return g.model(g.gemm(x, 1024, 1000), "mobilenet_v3_small")


def _squeezed(g: _Graph, x: str, channels: int) -> str:
    """Squeeze and excite: every channel times a gate made from the means of all."""
    few = max(8, int(channels / 4 + 4) // 8 * 8)
    few += 8 if few < 0.9 * channels / 4 else 0
    gate = g.add("GlobalAveragePool", x)[0]
    gate = g.add("Relu", g.conv(gate, (channels, few, 1)))[0]
    gate = g.add("HardSigmoid", g.conv(gate, (few, channels, 1)), alpha=1 / 6, beta=0.5)[0]
    return g.add("Mul", gate, x)[0]


def resnet18() -> onnx.ModelProto:
    """ResNet-18."""
    g = _Graph()
    x = g.add("Relu", g.conv("input", (3, 64, 7), stride=2))[0]
    x = g.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])[0]
    before = 64
    for after in (64, 128, 256, 512):
        for stride in (1 if after == before else 2, 1):
            skip = x if stride == 1 else g.conv(x, (before, after, 1), stride=stride)
            x = g.add("Relu", g.conv(x, (before, after, 3), stride=stride))[0]
            x = g.add("Relu", g.add("Add", g.conv(x, (after, after, 3)), skip)[0])[0]
            before = after
    x = g.add("Flatten", g.add("GlobalAveragePool", x)[0])[0]
    return g.model(g.gemm(x, 512, 1000), "resnet18")


def written(make: Callable[[], onnx.ModelProto]) -> Callable[[], Path]:
    """The model as a file in the cache."""

    def write() -> Path:
        path = cache_folder() / f"{make.__name__}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(make(), path)
        return path

    return write
