"""Make the demo again: train a small residual CNN on Fashion-MNIST, export it, write the images.

    apt-get install dataset-fashion-mnist
    pip install torch onnx onnxscript opencv-python-headless
    python datasets/make_fashion.py --out fashion

Takes about four minutes on one core and reaches about 90.6 % on the 10,000 test images. Training
sums floats in an order that depends on the machine, so another machine's weights, and its
accuracy in the first decimal, differ from the bundled ones; the pixels are the same.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SOURCE = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
EPOCHS, BATCH, PEAK_RATE = 4, 128, 0.15
CALIBRATION_IMAGES, EVALUATION_IMAGES = 100, 400


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps or halves the map, and its BatchNorm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.a = nn.Sequential(*conv(inputs, outputs, 3, stride), nn.ReLU())
        self.b = nn.Sequential(*conv(outputs, outputs, 3))
        same = inputs == outputs and stride == 1
        self.d = nn.Identity() if same else nn.Sequential(*conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""
        return functional.relu(self.b(self.a(x)) + self.d(x))


class Separable(nn.Module):
    """A depthwise 3x3, a pointwise 1x1 and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.w = nn.Sequential(*conv(channels, channels, 3, groups=channels), nn.ReLU())
        self.p = nn.Sequential(*conv(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] -> the same."""
        return functional.relu(x + self.p(self.w(x)))


class FashionNet(nn.Module):
    """[N, 1, 28, 28] in -1..1 -> [N, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv(1, 16, 3, 2), nn.ReLU())
        self.r1 = Residual(16, 16)
        self.r2 = Residual(16, 32, 2)
        self.r3 = Separable(32)
        self.r4 = Residual(32, 48, 2)
        self.fc = nn.Linear(48, 10)

    def forward(self, image: Tensor) -> Tensor:
        """One pass."""
        x = self.r4(self.r3(self.r2(self.r1(self.stem(image)))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def read(name: str, offset: int) -> np.ndarray:
    """Bytes of an IDX file after its header."""
    return np.frombuffer(gzip.decompress((SOURCE / f"{name}.gz").read_bytes()), np.uint8)[offset:]


def split(prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """[N, 28, 28] uint8 images and [N] uint8 labels."""
    images = read(f"{prefix}-images-idx3-ubyte", 16).reshape(-1, 28, 28)
    return images, read(f"{prefix}-labels-idx1-ubyte", 8)


def normalize(images: np.ndarray) -> Tensor:
    """Uint8 -> (pixel / 255 - 0.5) / 0.5, with a channel dimension."""
    return (torch.from_numpy(images.astype(np.float32))[:, None] / 255 - 0.5) / 0.5


def augment(x: Tensor, shift: bool) -> Tensor:
    """Flip each image with probability 1/2 and, if asked, shift the batch by up to 2 pixels."""
    flip = torch.rand(len(x)) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    if not shift:
        return x
    top, left = (int(v) for v in torch.randint(0, 5, (2,)))
    padded = functional.pad(x, (2, 2, 2, 2), value=-1.0)
    return padded[:, :, top : top + 28, left : left + 28]


def train(images: Tensor, labels: Tensor) -> FashionNet:
    """SGD with Nesterov momentum, one-cycle rate; the last epoch sees unshifted images."""
    model = FashionNet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = EPOCHS * (len(images) // BATCH)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.02)
    for epoch in range(EPOCHS):
        model.train()
        for index in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            loss = loss_of(model(augment(images[index], epoch < EPOCHS - 1)), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: last loss {loss.item():.3f}", flush=True)
    return model.eval()


def accuracy(model: FashionNet, images: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is the label's."""
    with torch.no_grad():
        best = torch.cat([model(part).argmax(1) for part in images.split(500)])
    return float((best == labels).float().mean())


def export(model: FashionNet, path: Path, *, fold: bool) -> None:
    """Write ONNX opset 13 with an open batch; `fold` takes BatchNorm into the convolutions."""
    mode = torch.onnx.TrainingMode.EVAL if fold else torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, 28, 28),),
        path,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        opset_version=13,
        training=mode,
        do_constant_folding=fold,
        dynamo=False,
    )


def write_images(folder: Path, name: str, images: np.ndarray, labels: np.ndarray | None) -> None:
    """PNG files, and a list of them with labels where given."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for index, image in enumerate(images):
        file = f"{name}/{index:04d}.png"
        cv2.imwrite(str(folder / file), image)
        lines.append(file if labels is None else f"{file} {labels[index]}")
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Train, export, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fashion"), help="folder to write")
    out = parser.parse_args().out
    torch.manual_seed(0)
    (images, labels), (tests, test_labels) = split("train"), split("t10k")
    write_images(out, "calib", images[:CALIBRATION_IMAGES], None)
    write_images(out, "eval", tests[:EVALUATION_IMAGES], test_labels)
    model = train(normalize(images), torch.from_numpy(labels.astype(np.int64)))
    truth = torch.from_numpy(test_labels.astype(np.int64))
    print(f"top-1 on the {len(tests)} test images: {accuracy(model, normalize(tests), truth):.4f}")
    export(model, out / "fashion.onnx", fold=True)
    export(model, out / "fashion_bn.onnx", fold=False)


if __name__ == "__main__":
    main()
