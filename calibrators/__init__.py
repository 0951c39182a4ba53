"""Tensors in, scales out: numpy (and OpenCV's histogram or a C kernel), no graph, no files.

The names are imported when first used, so that reaching `calibrators.errors` costs nothing.
"""

from __future__ import annotations

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
