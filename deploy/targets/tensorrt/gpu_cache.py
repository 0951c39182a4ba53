"""The cache that TensorRT wrote on this GPU, kept with what it was made from.

TensorRT itself checks nothing but the version and the calibrator in the first line; a retrained
model or other images go unnoticed. Here the fingerprint stands beside the cache, in the form that
`calib8-build` of C++ reads and writes too.
"""

from __future__ import annotations

from pathlib import Path

from deploy.calibration import store
from deploy.calibration.fingerprint import Fingerprint
from deploy.errors import CacheError
from deploy.files import atomic, staging


def fitting(path: Path, fingerprint: Fingerprint) -> bytes | None:
    """The cache's bytes where it was made from exactly this, and nothing was changed since.

    Where it is not there, that of a build which failed behind its calibration.
    """
    found = (_known(place, fingerprint) for place in (path, staging.kept(path)))
    return next((text for text in found if text is not None), None)


def _known(path: Path, fingerprint: Fingerprint) -> bytes | None:
    try:
        text, known = store.text_of(path)
    except CacheError:
        return None
    return text if known == fingerprint else None


def keep(path: Path, data: bytes, fingerprint: Fingerprint) -> Path:
    """Write the cache, then its fingerprint.

    Raises:
        ExportError: the folder is not writable.
    """
    atomic.write_bytes(path, data)
    atomic.write_bytes(store.sidecars(path)[0], store.without_statistics(data, fingerprint))
    return path
