"""Calibration numerics: from tensors to scales with numpy, and OpenCV or a C kernel for counting.

This package knows no graphs and no files. Names are imported on first use, so that importing
`calibrators.errors` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibrators.histogram import Histogram as Histogram
    from calibrators.scales import Scale as Scale
    from calibrators.scales import Scales as Scales
    from calibrators.searches import SEARCHES as SEARCHES

_FACE = {
    "Histogram": "calibrators.histogram",
    "Scale": "calibrators.scales",
    "Scales": "calibrators.scales",
    "SEARCHES": "calibrators.searches",
}

__all__ = ["SEARCHES", "Histogram", "Scale", "Scales"]


def __getattr__(name: str) -> object:
    if name not in _FACE:
        raise AttributeError(f"module 'calibrators' has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
