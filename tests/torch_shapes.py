"""Small networks of the shapes that zoos have, written without them; modules in few words."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


def module(forward, **parts):
    """Return a module in eval mode that has these parts and, as its method, `forward`."""
    network = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(network, name, part)
    return network.eval()


def with_statistics(model):
    """Give every norm statistics of its own, so that folding it changes the weights."""
    with torch.no_grad():
        for layer in model.modules():
            if getattr(layer, "running_var", None) is not None:
                layer.running_mean.uniform_(-0.3, 0.3)
                layer.running_var.uniform_(0.5, 1.5)
                layer.weight.uniform_(0.7, 1.3)
                layer.bias.uniform_(-0.3, 0.3)
    return model.eval()


class ConvAct(nn.Module):
    """Conv, BatchNorm, SiLU, as detectors have them."""

    def __init__(self, in_channels, out_channels, size=1, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cv1, self.cv2 = ConvAct(width, width, 3), ConvAct(width, width, 3)

    def forward(self, x):
        return x + self.cv2(self.cv1(x))


class C2f(nn.Module):
    """YOLOv8's block: the halves of a map, and each bottleneck's output beside them."""

    def __init__(self, width):
        super().__init__()
        self.cv1 = ConvAct(width, width)
        self.cv2 = ConvAct(3 * width // 2, width)
        self.m = nn.ModuleList([Bottleneck(width // 2)])

    def forward(self, x):
        parts = list(self.cv1(x).chunk(2, 1))
        parts.extend(block(parts[-1]) for block in self.m)
        return self.cv2(torch.cat(parts, 1))


class Detector(nn.Module):
    """YOLOv8 in small: two scales; in eval mode (boxes and scores, the raw maps)."""

    strides = (4, 8)

    def __init__(self, classes=3):
        super().__init__()
        self.stem = ConvAct(3, 8, 3, 2)
        self.down = nn.ModuleList([ConvAct(8, 16, 3, 2), ConvAct(16, 16, 3, 2)])
        self.blocks = nn.ModuleList([C2f(16), C2f(16)])
        self.pool, self.up = nn.MaxPool2d(5, 1, 2), nn.Upsample(scale_factor=2)
        self.neck = C2f(32)
        self.heads = nn.ModuleList([nn.Conv2d(32, 4 + classes, 1), nn.Conv2d(16, 4 + classes, 1)])

    def forward(self, x, *args, **kwargs):
        x, maps = self.stem(x), []
        for down, block in zip(self.down, self.blocks, strict=True):
            x = block(down(x))
            maps.append(x)
        maps[0] = self.neck(torch.cat([maps[0], self.up(self.pool(maps[1]))], 1))
        raw = [head(feature_map) for head, feature_map in zip(self.heads, maps, strict=True)]
        if self.training:
            return raw
        flat = [
            feature_map.view(feature_map.shape[0], feature_map.shape[1], -1) for feature_map in raw
        ]
        boxes, scores = torch.cat(flat, 2).split((4, raw[0].shape[1] - 4), 1)
        return torch.cat([boxes * self.steps(raw), scores.sigmoid()], 1), raw

    def steps(self, raw):
        sizes = [feature_map.shape[2] * feature_map.shape[3] for feature_map in raw]
        return torch.cat(
            [torch.full((n,), float(s)) for n, s in zip(sizes, self.strides, strict=True)]
        )


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's: the norm called as a function, then its activation."""

    def __init__(self, width, act=nn.ReLU):
        super().__init__(width)
        self.drop, self.act = nn.Identity(), act(inplace=True)

    def forward(self, x):
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return self.act(self.drop(x))


class Inverted(nn.Module):
    """A block of EfficientNet-Lite as timm writes it."""

    def __init__(self, width):
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(width, 24, 1, bias=False), BatchNormAct2d(24, nn.ReLU6)
        self.deep = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False)
        self.bn2 = BatchNormAct2d(24, nn.ReLU6)
        self.project, self.bn3 = nn.Conv2d(24, width, 1, bias=False), BatchNormAct2d(width, Plain)

    def forward(self, x):
        return self.bn3(self.project(self.bn2(self.deep(self.bn1(self.expand(x)))))) + x


class Plain(nn.Identity):
    """An activation that is none."""


class RepVGG(nn.Module):
    """Three branches of one map, added."""

    def __init__(self, width, stride=1):
        super().__init__()
        self.identity = nn.BatchNorm2d(width) if stride == 1 else None
        self.kxk, self.pointwise = (
            nn.Sequential(
                nn.Conv2d(width, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width)
            )
            for size in (3, 1)
        )
        self.act = nn.ReLU()

    def forward(self, x):
        out = 0 if self.identity is None else self.identity(x)
        out += self.kxk(x)
        return self.act(out + self.pointwise(x))


class DetrFrozenBatchNorm2d(nn.Module):
    """Hugging Face's, with the arithmetic of torchvision's: four buffers, and no eps."""

    def __init__(self, width):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(width) + 0.5)

    def forward(self, x):
        weight, bias, mean, variance = (
            tensor.reshape(1, -1, 1, 1)
            for tensor in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Attention(nn.Module):
    """A block of a ViT, with a class token and torch's own attention."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.rand(1, 1, 16))
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        n = x.shape[0]
        x = self.patches(x).reshape(n, 16, -1).permute(0, 2, 1)
        x = torch.cat([self.token.expand(n, -1, -1), x], 1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(self.norm2(x)))[:, 0])


class ConvNeXt(nn.Module):
    """Depthwise convolution, LayerNorm, channels last, a learned scale."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.deep = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gamma = nn.Parameter(torch.full((16, 1, 1), 0.1))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return self.head((x + self.gamma * y).mean((2, 3)))


class Ssd(nn.Module):
    """Two maps, two heads each, a dict out."""

    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.ModuleList([ConvAct(3, 8, 3, 4), ConvAct(8, 8, 3, 2)])
        self.boxes = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
        self.scores = nn.ModuleList([nn.Conv2d(8, 2 * classes, 3, padding=1) for _ in range(2)])

    def forward(self, x):
        maps = []
        for block in self.body:
            x = block(x)
            maps.append(x)
        return {
            "boxes": self.joined(self.boxes, maps, 4),
            "scores": self.joined(self.scores, maps, 3),
        }

    def joined(self, heads, maps, columns):
        flat = []
        for x in (head(feature_map) for head, feature_map in zip(heads, maps, strict=True)):
            n, _, h, w = x.shape
            x = x.view(n, -1, columns, h, w).permute(0, 3, 4, 1, 2)
            flat.append(x.reshape(n, -1, columns))
        return torch.cat(flat, 1)


def spellings():
    """Every spelling of a norm after and beside a layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, bias=False),
        BatchNormAct2d(8),
        Inverted(8),
        RepVGG(8),
        RepVGG(8, 2),
        nn.Conv2d(8, 8, 1),
        DetrFrozenBatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 2, groups=2),
        nn.ConvTranspose2d(6, 6, 2, groups=3),
        nn.SyncBatchNorm(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
    )


def make(kind):
    """Return a model of the kind, the same every time, its norms with statistics."""
    torch.manual_seed(0)
    return with_statistics(kind())


detector, norms, attention, convnext, ssd = (
    partial(make, kind) for kind in (Detector, spellings, Attention, ConvNeXt, Ssd)
)
