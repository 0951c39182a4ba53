"""`Calibration`: scales with the statistics and the fingerprint they come from; kept in files.

Beside each other stand::

    model.cache         TensorRT's own text format: amax / 127 of every tensor
    model.cache.npz     the statistics, so that another method needs no second run
    model.cache.json    fingerprint, full scales, and the sha256 of the two files above

Each is written atomically, the JSON last. Whatever a crash or a second build leaves, either the
three belong together or the digests say that they do not.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrators.errors import CalibrationError
from calibrators.scales import Scale, Scales
from calibrators.statistics import Statistics
from deploy import atomic
from deploy.calibration import trt_cache
from deploy.calibration.fingerprint import Fingerprint
from deploy.errors import CacheError

SCHEMA = 1
DEFAULT_TRT_VERSION = "8.5.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The outcome of a calibration.

    Attributes:
        scales: tensor -> clip range.
        troubles: tensor -> why it has no scale.
        fingerprint: what this was made from; None for a foreign cache that the user trusts.
        statistics: the histograms; None where only the scales are at hand.
    """

    scales: Scales
    troubles: Mapping[str, str]
    fingerprint: Fingerprint | None
    statistics: Statistics | None

    def covers(self, tensors: tuple[str, ...]) -> bool:
        """Whether every tensor has a scale or a reason to have none."""
        return all(name in self.scales or name in self.troubles for name in tensors)


def sidecars(path: Path) -> tuple[Path, Path]:
    """Paths of the JSON and the statistics that belong to a cache."""
    return path.with_name(path.name + ".json"), path.with_name(path.name + ".npz")


def save(
    calibration: Calibration,
    path: Path,
    *,
    trt_version: str = DEFAULT_TRT_VERSION,
    text: bytes | None = None,
) -> None:
    """Write the three files; `text` is the cache's where it is not `cache_text`.

    Raises:
        ExportError: the folder is not writable.
        CacheError: a tensor name that TensorRT's text cannot hold.
    """
    if calibration.fingerprint is None or calibration.statistics is None:
        raise CacheError("only a calibration with its fingerprint and statistics can be saved")
    json_path, npz_path = sidecars(path)
    if text is None:
        text = cache_text(calibration, trt_version=trt_version)
    packed = _pack(calibration.statistics)
    document = {
        "schema": SCHEMA,
        "fingerprint": calibration.fingerprint.to_json(),
        "scales": calibration.scales.to_json(),
        "troubles": dict(calibration.troubles),
        "sha256": {"cache": _sha256(text), "statistics": _sha256(packed)},
    }
    atomic.write_bytes(npz_path, packed)
    atomic.write_bytes(path, text)
    atomic.write_text(json_path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def cache_text(calibration: Calibration, *, trt_version: str) -> bytes:
    """The calibration as TensorRT's cache; a tensor that was always zero gets TensorRT's `0`."""
    algorithm = trt_cache.MINMAX if _is_minmax(calibration.scales) else trt_cache.ENTROPY2
    entries = {name: scale.symmetric for name, scale in calibration.scales.items()}
    for name, why in calibration.troubles.items():
        entries[name] = np.float32(np.inf if "infinite" in why else 0)
    return trt_cache.dump(trt_cache.from_scales(entries, version=trt_version, algorithm=algorithm))


def load(path: Path, *, with_statistics: bool = True) -> Calibration:
    """Read the three files of a calibration.

    Raises:
        CacheError: a file is missing, broken, or not of the same writing as the others.
    """
    json_path, npz_path = sidecars(path)
    document = _document(json_path)
    text = read(path)
    if _sha256(text) != document["sha256"]["cache"]:
        raise CacheError(f"{path} was changed after {json_path.name} was written")
    statistics = None
    if with_statistics:
        packed = read(npz_path)
        if _sha256(packed) != document["sha256"]["statistics"]:
            raise CacheError(f"{npz_path} was changed after {json_path.name} was written")
        statistics = _unpack(packed, npz_path)
    try:
        scales = Scales.from_json(document["scales"])
    except CalibrationError as error:
        raise CacheError(f"{json_path}: {error}") from error
    return Calibration(
        scales=scales,
        troubles={str(k): str(v) for k, v in document["troubles"].items()},
        fingerprint=Fingerprint.from_json(document["fingerprint"]),
        statistics=statistics,
    )


def trusted(path: Path, wanted: tuple[str, ...], non_negative: frozenset[str]) -> Calibration:
    """A cache without a fingerprint, taken as it is: symmetric ranges of amax = 127 * scale.

    Args:
        path: TensorRT's text format, from any tool.
        wanted: tensors that need a scale.
        non_negative: tensors that cannot be negative, whose range starts at 0.

    Raises:
        CacheError: the file is not such a cache, or holds no usable entry for this model.
    """
    cache = trt_cache.parse(read(path), origin=str(path))
    flaws = cache.flaws()
    scales = {
        name: _symmetric(float(scale) * 127, name in non_negative, cache.header.algorithm)
        for name, scale in cache.scales().items()
        if name not in flaws
    }
    if not scales.keys() & set(wanted):
        raise CacheError(
            f"a trusted cache must know the model's tensors, {path} has a usable scale for none of"
            f" the {len(wanted)} wanted (such as {', '.join(wanted[:2])}); it is another model's"
        )
    troubles = {n: f"has no entry in {path.name}" for n in wanted if n not in scales}
    troubles |= {name: f"has a {flaw} scale in {path.name}" for name, flaw in flaws.items()}
    return Calibration(scales=Scales(scales), troubles=troubles, fingerprint=None, statistics=None)


def _symmetric(amax: float, non_negative: bool, algorithm: str) -> Scale:
    low = 0.0 if non_negative else -amax
    return Scale(
        lo=low, hi=amax, amax=amax, observed_min=low, observed_max=amax, method=f"cache-{algorithm}"
    )


def _is_minmax(scales: Scales) -> bool:
    return all(scale.method == "minmax" for scale in scales.values())


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read(path))
        complete = (
            document["schema"] == SCHEMA
            and isinstance(document["troubles"], dict)
            and {"fingerprint", "scales"} <= set(document)
            and {"cache", "statistics"} <= set(document["sha256"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        complete = False
    if not complete:
        raise CacheError(f"{path} is not a fingerprint that this version of calib8 reads")
    return dict(document)


def read(path: Path) -> bytes:
    """Bytes of one of the files.

    Raises:
        CacheError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error


def _pack(statistics: Statistics) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **statistics.to_arrays())  # type: ignore[arg-type]
    return buffer.getvalue()


def _unpack(packed: bytes, path: Path) -> Statistics:
    try:
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            return Statistics.from_arrays(dict(arrays))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, CalibrationError) as error:
        raise CacheError(f"{path} does not hold statistics: {error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
