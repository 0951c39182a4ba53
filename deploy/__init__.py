"""calib8: calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere.

>>> from deploy import build, calibrate, bench
>>> report = build("model.onnx", "photos/", targets=["onnxruntime"], out="build/")

The three functions are imported when first used, so that `import deploy` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deploy.benchmark import bench as bench
    from deploy.pipeline import build as build
    from deploy.pipeline import calibrate as calibrate

_FACE = {"bench": "deploy.benchmark", "build": "deploy.pipeline", "calibrate": "deploy.pipeline"}

__all__ = ["__version__", "bench", "build", "calibrate"]


def __getattr__(name: str) -> object:
    if name not in _FACE:
        raise AttributeError(f"module 'deploy' has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
