"""The bundled Fashion-MNIST network in PyTorch with its trained weights, and its training data.

`benchmarks/fashion.py:make`, for any `calib8` command that takes a model in PyTorch. Input
[N, 1, 28, 28] float32, (pixel / 255 - 0.5) / 0.5; output [N, 10] logits. The weights are those of
`datasets/fashion/fashion_bn.onnx`. Training images come from Debian's dataset-fashion-mnist.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "datasets" / "fashion"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Conv and BatchNorm."""
    padding = size // 2
    layer = nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.a = nn.Sequential(*conv(inputs, outputs, 3, stride), nn.ReLU())
        self.b = nn.Sequential(*conv(outputs, outputs, 3))
        self.d = nn.Sequential(*conv(inputs, outputs, 1, stride)) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""
        return torch.relu(self.b(self.a(x)) + self.d(x))


class Separable(nn.Module):
    """A depthwise and a pointwise convolution around a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.w = nn.Sequential(*conv(channels, channels, 3, groups=channels), nn.ReLU())
        self.p = nn.Sequential(*conv(channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, channels, H, W] -> the same."""
        return torch.relu(x + self.p(self.w(x)))


class Fashion(nn.Module):
    """The bundled network, 57,690 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv(1, 16, 3, 2), nn.ReLU())
        self.r1 = Residual(16, 16)
        self.r2 = Residual(16, 32, 2)
        self.r3 = Separable(32)
        self.r4 = Residual(32, 48, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(48, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[N, 1, 28, 28] -> [N, 10] logits."""
        x = self.r4(self.r3(self.r2(self.r1(self.stem(image)))))
        return self.fc(torch.flatten(self.pool(x), 1))


def make() -> nn.Module:
    """The trained network, in eval mode."""
    graph = onnx.load(FOLDER / "fashion_bn.onnx").graph
    state = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    for node in graph.node:  # the exporter wrote equal tensors once
        if node.op_type == "Identity":
            state[node.output[0]] = state[node.input[0]]
    model = Fashion()
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in missing), missing
    return model.eval()


def bundled() -> tuple[torch.Tensor, torch.Tensor]:
    """The 400 images and labels of `datasets/fashion/eval.txt`, normalized."""
    import cv2

    rows = [line.split() for line in (FOLDER / "eval.txt").read_text().splitlines()]
    pixels = [cv2.imread(str(FOLDER / path), cv2.IMREAD_GRAYSCALE) for path, _ in rows]
    labels = torch.tensor([int(label) for _, label in rows])
    return normalized(np.stack(pixels)[:, None]), labels


def images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized images [N, 1, 28, 28] and labels [N] of "train" or "t10k", from Debian's files."""
    with gzip.open(DEBIAN / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(DEBIAN / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return normalized(pixels), torch.from_numpy(labels.astype(np.int64))


def normalized(pixels: np.ndarray) -> torch.Tensor:
    """Bytes -> float32 in [-1, 1]."""
    return torch.from_numpy((pixels.astype(np.float32) / 255 - 0.5) / 0.5)


def shuffled(
    x: torch.Tensor, y: torch.Tensor, epoch: int, *, size: int = 128, shift: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one epoch in an order of its own, each image moved and perhaps mirrored."""
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(x), generator=generator)
    for i in range(0, len(x) - size + 1, size):
        picked = x[order[i : i + size]]
        dx, dy = torch.randint(-shift, shift + 1, (2,), generator=generator).tolist()
        picked = torch.roll(picked, (dx, dy), (2, 3))
        if torch.rand((), generator=generator) < 0.5:
            picked = picked.flip(3)
        yield picked, y[order[i : i + size]]


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Top-1, 0 to 1."""
    with torch.no_grad():
        hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in
                   zip(x.split(500), y.split(500), strict=True))  # fmt: skip
    return hits / len(y)
