"""Calibration cache files: write and read observed statistics with their fingerprint.

A cache is three files::

    model.cache         TensorRT's text format: amax / 127 of every tensor
    model.cache.npz     every observation, so that another method or target needs no run
    model.cache.json    fingerprint, names of the observations, sha256 of the two files above

They appear together (`deploy.files.staging`). If one of them is changed, the digests in the JSON,
which include its own, no longer match.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from calibrators.errors import CalibrationError
from calibrators.statistics import Arrays
from deploy.calibration.fingerprint import Fingerprint, open_archive, pack_arrays, unpack_arrays
from deploy.calibration.observation import Key, Observation, ObservedStatistics
from deploy.calibration.sample_checks import Outlier, StabilityRule
from deploy.errors import CacheError, ConfigError
from deploy.files import atomic
from deploy.files.guard import refuse_output
from deploy.files.manifest import is_marked, sha256
from deploy.files.reading import from_json, read_bytes

SCHEMA = 5  # of the JSON, which C++ writes and reads too
_WHAT = "a file of a calibration"
_MARK = "the fingerprint of a calibration"
# what damaged archives and arrays raise; RuntimeError: encrypted, or an unknown compression
BROKEN = (
    ValueError, TypeError, LookupError, OSError, EOFError, MemoryError, RuntimeError,
    ArithmeticError, zipfile.BadZipFile, zlib.error, CalibrationError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        observed: the statistics.
        fingerprint: what they were made from.
        outliers: samples that stand out.
        stop_rule: rule that ended the observation; None if the samples were chosen beforehand.
    """

    observed: ObservedStatistics
    fingerprint: Fingerprint
    outliers: tuple[Outlier, ...] = ()
    stop_rule: StabilityRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStatistics:
    """Observations in an archive, whose arrays are not parsed yet.

    Attributes:
        keys: the observations, in the order of the archive.
        archive: the file that holds it.
        packed: the archive of the arrays.
    """

    keys: tuple[Key, ...]
    archive: Path
    packed: bytes

    def observed(self, observations: Iterable[Observation]) -> ObservedStatistics:
        """Return the statistics of the given observations that are stored; others are left out.

        Raises:
            CacheError: the arrays of one are broken.
        """
        index_by_key = self._index_by_key()
        observed = ObservedStatistics()
        with self._open() as archive:
            for observation in observations:
                key = observation.key
                if key in index_by_key and key not in observed:  # stored, and not unpacked yet
                    arrays = unpack_arrays(archive, index_by_key[key])
                    observed[key] = observation.statistic.restore(arrays)
        return observed

    def read_arrays(self, keys: Iterable[Key]) -> dict[Key, Arrays]:
        """Return the arrays of some observations, to be written to another cache.

        Raises:
            CacheError: the arrays of one are broken.
        """
        index_by_key = self._index_by_key()
        with self._open() as archive:
            return {key: unpack_arrays(archive, index_by_key[key]) for key in keys}

    def _index_by_key(self) -> dict[Key, int]:
        return {key: index for index, key in enumerate(self.keys)}

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        """Open the archive of the arrays; an error of damaged ones in the body is a CacheError."""
        try:
            with open_archive(self.packed, self.archive) as archive:
                yield archive
        except BROKEN as error:
            raise CacheError(f"{self.archive} does not hold statistics: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCalibration(StoredStatistics):
    """The three files as read: complete and consistent.

    Attributes:
        cache_text: the cache in TensorRT's format.
        fingerprint, outliers, stop_rule: as in `Calibration`.
        path: the file of the text.
    """

    cache_text: bytes
    fingerprint: Fingerprint
    outliers: tuple[Outlier, ...]
    stop_rule: StabilityRule | None
    path: Path
    _document: bytes

    @property
    def count(self) -> int:
        """Number of images; 0 if the cache does not say."""
        count = self.fingerprint.images.get("count")
        if not isinstance(count, int):
            return 0
        return count


@dataclass(frozen=True, slots=True)
class _Digests:
    cache: str
    statistics: str
    this: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """The JSON of a cache, in the form that this version reads."""

    schema: Literal[5]
    fingerprint: Any
    observations: tuple[Key, ...]
    outliers: tuple[tuple[str, str, tuple[str, ...], float], ...]
    sha256: _Digests
    until: StabilityRule | None = None


def sidecars(path: Path) -> tuple[Path, Path]:
    """Return the paths of the JSON and of the statistics of a cache."""
    return path.with_name(path.name + ".json"), path.with_name(path.name + ".npz")


def cache_files(path: Path) -> tuple[Path, ...]:
    """Return the paths of the three files of a cache."""
    return path, *sidecars(path)


def copy_stored(stored: StoredCalibration, path: Path) -> None:
    """Write the three files as they were read."""
    _write(path, stored.cache_text, stored.packed, stored._document)


def _write(path: Path, text: bytes, packed: bytes, document: bytes) -> None:
    json_path, npz_path = sidecars(path)
    atomic.write_bytes(npz_path, packed)
    atomic.write_bytes(path, text)
    atomic.write_bytes(json_path, document)


def save_calibration(
    calibration: Calibration,
    path: Path,
    *,
    cache_text: bytes,
    retained: Mapping[Key, Arrays] | None = None,
) -> None:
    """Write the three files of a calibration: TensorRT's text, the statistics, the fingerprint.

    Args:
        calibration: what was observed, and from what.
        path: path of the text; the other two files lie beside it (`sidecars`).
        cache_text: bytes of the text.
        retained: key of an observation (variant, tensor, statistic) -> its arrays, of observations
            that the previous cache had and this run did not make.
    """
    arrays_by_key = dict(retained or {})
    for key, recorder in calibration.observed.items():
        arrays_by_key[key] = recorder.to_arrays()
    # the least recently used first; a recorder that no file can hold gives no arrays
    stored_keys = [key for key in _sort_by_use(arrays_by_key, calibration) if arrays_by_key[key]]
    packed = pack_arrays([arrays_by_key[key] for key in stored_keys])
    stored_tensors = {(variant, tensor) for variant, tensor, _ in stored_keys}
    outliers = [
        outlier
        for outlier in calibration.outliers
        if (outlier.variant, outlier.tensor) in stored_tensors
    ]

    document = _make_document(cache_text, calibration.fingerprint)
    document["observations"] = stored_keys
    document["outliers"] = [astuple(outlier) for outlier in outliers]
    document["sha256"]["statistics"] = sha256(packed)
    if calibration.stop_rule is not None:
        document["until"] = asdict(calibration.stop_rule)
    _write(path, cache_text, packed, seal_json(document))


def write_note_without_statistics(
    path: Path, text: bytes, fingerprint: Fingerprint, float32_layers: Mapping[str, str]
) -> Path:
    """Write the JSON beside a cache that has no statistics, such as one that TensorRT wrote.

    Return its path.

    Args:
        path: path of the cache.
        text: content of the cache.
        fingerprint: what the calibration depended on.
        float32_layers: node -> its output tensor, of nodes that overflow float16; only C++ reads
            it.
    """
    document = _make_document(text, fingerprint)
    if float32_layers:
        document["float32_layers"] = float32_layers
    json_path, _ = sidecars(path)
    return atomic.write_bytes(json_path, seal_json(document))


def _make_document(text: bytes, fingerprint: Fingerprint) -> dict[str, Any]:
    """Return the JSON beside a cache without statistics, not sealed yet."""
    return {
        "schema": SCHEMA,
        "fingerprint": fingerprint.to_json(),
        "observations": [],
        "outliers": [],
        "sha256": {"cache": sha256(text), "statistics": ""},
    }


def seal_json(document: Mapping[str, Any]) -> bytes:
    """Return the JSON's text with its own sha256, computed with that digest left empty."""
    unsealed = {**document, "sha256": {**document["sha256"], "this": ""}}
    text = (json.dumps(unsealed, indent=1, sort_keys=True) + "\n").encode()
    return text.replace(_seal(""), _seal(sha256(text)))


def _seal(digest: str) -> bytes:
    return f'"this": "{digest}"'.encode()


def _is_intact(data: bytes, document: Mapping[str, Any]) -> bool:
    """Whether the JSON is unchanged since it was written."""
    digest = str(document["sha256"]["this"])
    seal = _seal(digest)
    return data.count(seal) == 1 and digest == sha256(data.replace(seal, _seal("")))


def refuse_foreign_cache(path: Path, *, force: bool) -> None:
    """Refuse to write a cache over files that calib8 did not write, before anything is run.

    Args:
        path: path of the cache; two other files lie beside it.
        force: whether such files may be replaced.

    Raises:
        ExportError: it is an input of this run, a folder or a device.
        CacheError: calib8 did not write it.
    """
    refuse_output(path)  # a folder such as "/" has no files beside it
    for sidecar in sidecars(path):
        refuse_output(sidecar)
    existing = [file for file in cache_files(path) if file.exists() and file.stat().st_size]
    if force or not existing:
        return
    json_path, npz_path = sidecars(path)
    # calib8 marks both files; one mark is enough, since a crash may leave only one file
    is_own_cache = is_marked(json_path, "fingerprint") or is_marked(npz_path, "statistics")
    if not is_own_cache:
        raise CacheError(
            f"a cache must not replace what calib8 did not write, got {existing[0]}; name another"
            " file, take it as it is with --trust-cache, or replace it with --force"
        )


def _sort_by_use(keys: Iterable[Key], calibration: Calibration) -> list[Key]:
    """Return the keys sorted by variant, least recently used variants first."""
    used_variants = sorted({variant for variant, _, _ in calibration.observed})
    # not used by this run: in the order of the cache before it, so the oldest come first
    older_variants = dict.fromkeys(
        variant for variant, _, _ in keys if variant not in used_variants
    )
    ranks = {variant: rank for rank, variant in enumerate((*older_variants, *used_variants))}
    return sorted(keys, key=lambda key: (ranks[key[0]], key))


def load_calibration(path: Path) -> StoredCalibration:
    """Read the three files of a calibration: TensorRT's text, the fingerprint and the statistics.

    Args:
        path: path of the text; beside it lie PATH.json, the fingerprint with the digests of the
            other two, and PATH.npz, the statistics.

    Raises:
        CacheError: a file is missing, broken, or does not belong to the others.
    """
    json_path, npz_path = sidecars(path)
    document_bytes = read_cache_file(json_path)
    document = _parse_document(document_bytes, json_path)
    cache_text, fingerprint = _read_text_and_fingerprint(path, document)
    statistics_digest = document.sha256.statistics
    if not statistics_digest:  # there are none if another program made the cache, such as TensorRT
        raise CacheError(
            f"{path} was made by {fingerprint.by} and has no statistics next to it (--trust-cache"
            " uses it as it is)"
        )
    statistics_bytes = read_cache_file(npz_path)
    if sha256(statistics_bytes) != statistics_digest:
        raise CacheError(f"{npz_path} was changed after {json_path.name} was written")
    return StoredCalibration(
        cache_text=cache_text,
        fingerprint=fingerprint,
        keys=document.observations,  # (variant, tensor, statistic) of each
        outliers=tuple(Outlier(*row) for row in document.outliers),
        stop_rule=document.until,
        path=path,
        archive=npz_path,
        packed=statistics_bytes,
        _document=document_bytes,
    )


def read_cache_text(path: Path) -> tuple[bytes, Fingerprint]:
    """Return (text of a cache, its fingerprint), whichever program made it.

    Raises:
        CacheError: a file is missing, broken, or does not belong to the other.
    """
    json_path = sidecars(path)[0]
    return _read_text_and_fingerprint(path, _parse_document(read_cache_file(json_path), json_path))


def _read_text_and_fingerprint(path: Path, document: _Document) -> tuple[bytes, Fingerprint]:
    """Return the text of a cache and its fingerprint, if the text is that of the document."""
    text = read_cache_file(path)
    if sha256(text) != document.sha256.cache:
        raise CacheError(f"{path} was changed after {sidecars(path)[0].name} was written")
    return text, Fingerprint.from_json(document.fingerprint)


def _parse_document(data: bytes, path: Path) -> _Document:
    """Return the JSON of a cache, if it is unchanged; `path` names it in errors."""
    json_values = from_json(data, rule=f"{path} must be {_MARK}", error=CacheError)
    try:
        document = msgspec.convert(json_values, _Document)
    except (ValueError, ConfigError) as error:
        raise CacheError(
            f"{path} is not a fingerprint that this version of calib8 reads: {error}"
        ) from error
    if not _is_intact(data, json_values):
        raise CacheError(f"{path} was changed after it was written")
    return document


def read_cache_file(path: Path) -> bytes:
    """Return the bytes of one of the files."""
    return read_bytes(path, what=_WHAT, error=CacheError, rewritable=True)
