"""The cache that TensorRT wrote on this GPU, kept with what it was made from.

TensorRT itself checks nothing but the version and the calibrator in the first line; a retrained
model or other images go unnoticed. Here the fingerprint stands beside the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import stamped


def fitting(path: Path, fingerprint: Mapping[str, Any]) -> bytes | None:
    """The cache's bytes where it was made from exactly this, and nothing was changed since."""
    return stamped.fitting(path, {"fingerprint": fingerprint})


def keep(path: Path, data: bytes, fingerprint: Mapping[str, Any]) -> Path:
    """Write the cache, then its fingerprint.

    Raises:
        ExportError: the folder is not writable.
    """
    return stamped.keep(path, data, {"fingerprint": fingerprint})
