"""The three trained face-detection networks of MTCNN: `benchmarks/mtcnn.py:pnet`, `rnet`, `onet`.

The wheel of facenet-pytorch is fetched and unzipped; of its code only the file of the networks is
loaded, since the rest wants torchvision. Inputs [N, 3, H, W] for pnet (any H, W >= 12), 24x24 for
rnet, 48x48 for onet, float32 (pixel - 127.5) / 128; outputs boxes, (landmarks,) probabilities.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch
from fetch_models import fetch
from torch import nn


def pnet() -> nn.Module:
    """The proposal network, fully convolutional."""
    return _network("PNet", "pnet")


def rnet() -> nn.Module:
    """The refinement network, for 24x24."""
    return _network("RNet", "rnet")


def onet() -> nn.Module:
    """The output network, for 48x48."""
    return _network("ONet", "onet")


def _network(name: str, weights: str) -> nn.Module:
    home = fetch("facenet-pytorch", "2.6.0") / "facenet_pytorch"
    model: nn.Module = getattr(_networks_file(home / "models" / "mtcnn.py"), name)(pretrained=False)
    path = home / "data" / f"{weights}.pt"
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


def _networks_file(path: object) -> ModuleType:
    """Import mtcnn.py alone, with an empty module where its image functions would be."""
    spec = importlib.util.spec_from_file_location("calib8_facenet.mtcnn", str(path))
    assert spec is not None and spec.loader is not None
    images = ModuleType("calib8_facenet.utils.detect_face")
    images.detect_face = images.extract_face = None  # type: ignore[attr-defined]
    names = ["calib8_facenet", "calib8_facenet.utils", images.__name__]
    for name in names:
        sys.modules[name] = images if name == images.__name__ else ModuleType(name)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in names:
            del sys.modules[name]
    return module
