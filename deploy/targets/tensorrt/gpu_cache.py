"""The cache that TensorRT wrote on this GPU, kept with what it was made from.

TensorRT itself checks nothing but the version and the calibrator in the first line; a retrained
model or other images go unnoticed. Here the fingerprint stands beside the cache, written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import atomic


def fitting(path: Path, fingerprint: Mapping[str, Any]) -> bytes | None:
    """The cache's bytes where it was made from exactly this, and nothing was changed since."""
    try:
        data = path.read_bytes()
        note = json.loads(_note(path).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return data if note == _document(data, fingerprint) else None


def keep(path: Path, data: bytes, fingerprint: Mapping[str, Any]) -> Path:
    """Write the cache, then its fingerprint.

    Raises:
        ExportError: the folder is not writable.
    """
    atomic.write_bytes(path, data)
    document = json.dumps(_document(data, fingerprint), indent=1, sort_keys=True)
    atomic.write_text(_note(path), document + "\n")
    return path


def _document(data: bytes, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(fingerprint))
    return {"fingerprint": plain, "sha256": hashlib.sha256(data).hexdigest()}


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")
