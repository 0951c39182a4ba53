"""Networks whose quantized tensors are where a plan wants them, one for each kind of them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deploy.errors import ModelError
from deploy.fx.fakequant import FakeQuant
from deploy.fx.source import load_module
from tests.torch_shapes import detector, make

__all__ = ["detector"]


class Residual(nn.Module):
    """A ResNet in small: a stem with a pool, a block, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.stem(x))))
        x = F.relu(x + self.conv2(F.relu(self.bn(self.conv1(x)))))
        return self.head(torch.flatten(self.mean(x), 1))


class Mobile(nn.Module):
    """A block of MobileNetV3: Hard-Swish, depthwise, squeeze and excite, a float first Conv."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 16, 3, 2, 1), nn.Hardswish()
        self.expand = nn.Conv2d(16, 32, 1)
        self.deep = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project = nn.Conv2d(32, 16, 1)
        self.drop, self.hidden, self.head = nn.Dropout(0.2), nn.Linear(16, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = self.act(self.stem(x))
        y = self.act(self.deep(self.act(self.expand(x))))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(self.mean(y)))))
        x = x + self.project(y)
        return self.head(self.drop(self.act(self.hidden(x.mean((2, 3))))))


class Attention(nn.Module):
    """A ViT in small: patches, a transformer's layer, a classifier."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=True, norm_first=True, activation="gelu"
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.layer(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x)[:, 0])


class Pooled(nn.Module):
    """Padding, average pooling, transposed convolution, pixel shuffle, flattening."""

    def __init__(self):
        super().__init__()
        self.pad, self.stem = nn.ZeroPad2d(1), nn.Conv2d(3, 16, 5)
        self.up, self.mean = nn.ConvTranspose2d(16, 8, 2, 2), nn.AvgPool2d(2)
        self.mirrored = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.deep = nn.Conv2d(8, 8, 3)
        self.shuffle, self.small = nn.PixelShuffle(2), nn.Conv2d(2, 8, 2, 2)
        self.head = nn.Linear(8 * 24 * 24, 10)

    def forward(self, x):
        x = F.leaky_relu(self.stem(self.pad(x)), 0.1)
        x = self.mirrored(self.mean(F.relu6(self.up(x))))
        x = self.deep(F.pad(x, (1, 1, 1, 1)))[:, :, 3:-3, 3:-3]
        return self.head(torch.flatten(F.max_pool2d(self.small(self.shuffle(x)), 1), 1))


class Joined(nn.Module):
    """A Concat of what an int8 layer makes and of what none makes, read by a layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.join = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 8, 3)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.head(F.relu(self.join(torch.cat([F.relu(self.stem(x)), torch.exp(-x)], 1))))


class Parameters(nn.Module):
    """Matrices that are no layer's, a class token and positions, as ViTs have them."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.mix, self.gate = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
        self.head = nn.Parameter(torch.randn(5, 16))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = F.relu(F.linear(x, self.mix)) * F.linear(x, self.gate).tanh()
        return F.linear(x[:, 0], self.head)


class Causal(nn.Module):
    """Tokens that attend to those before them."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16)
        self.mixed, self.head = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x):
        x = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        parts = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.mixed(x).chunk(3, -1)]
        x = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(x.transpose(1, 2).flatten(2))


KINDS = (Residual, Mobile, Attention, Pooled, Causal, Parameters, Joined)
residual, mobile, attention, pooled, causal, parameters, joined = (
    partial(make, kind) for kind in KINDS
)


def observers_of(prepared):
    """Return tensor name -> its `FakeQuant`, in the model's order."""
    return {quant.name: quant for quant in prepared.modules() if isinstance(quant, FakeQuant)}


def real_model(name):
    """Return a model of `benchmarks/`, `file.py:factory`; skip where it cannot be fetched."""
    try:
        return load_module(f"{Path(__file__).parent.parent / 'benchmarks' / name}")
    except ModelError as error:
        if "FetchError" in str(error):
            pytest.skip(f"the model cannot be fetched: {error}")
        raise
