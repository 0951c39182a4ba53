"""A shard's file: the statistics of its samples, and of which whole they are a part.

::

    photos.2-of-3.shard         one archive, written at once
        shard.json              what it was made from, digests and peaks of its samples, sha256
        statistics.npz          every observation, as a cache keeps them

A checkpoint (`deploy.calibration.checkpoint`) is such a file of a shard, or of a whole, that is
observed in part: it says how many samples are counted.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrators.errors import CalibrationError
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.observation import Key, Observation, Observed
from deploy.calibration.packed import EPOCH, archive_of, pack, unpack
from deploy.calibration.sample_checks import Row
from deploy.errors import CacheError
from deploy.feed.share import Share
from deploy.files.reading import from_json, read_bytes
from deploy.inputs import refuse
from deploy.stamped import sha256

SCHEMA = "calib8-shard/1"
_WHAT = "a shard of a calibration, as calib8 calibrate --shard writes it"
_DOCUMENT, _STATISTICS = "shard.json", "statistics.npz"
_BROKEN = (
    ValueError,
    TypeError,
    LookupError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    ArithmeticError,
    zipfile.BadZipFile,
    zlib.error,
    CalibrationError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard as it is kept.

    Attributes:
        share: which samples of which whole.
        made_from: what it was made from; its images are those of the whole, without digests.
        digests: sha256 (hex) of its images or rows in their order, of those that were skipped
            too; of a checkpoint, of those that its samples came of.
        skipped: place in the whole -> why the sample there was left out.
        peaks: as `deploy.calibration.sample_checks.Peaks.rows`.
        keys: the observations that are kept.
        path: where it was read.
        counted: samples of a checkpoint; None of a whole shard.
    """

    share: Share
    made_from: Fingerprint
    digests: tuple[str, ...]
    skipped: Mapping[int, str]
    peaks: list[Row]
    keys: tuple[Key, ...]
    path: Path
    counted: int | None
    _packed: bytes

    def observed(self, wanted: Iterable[Observation]) -> Observed:
        """Those of the wanted observations that are kept.

        Raises:
            CacheError: the arrays of one are broken.
        """
        places = {key: place for place, key in enumerate(self.keys)}
        found = {o.key: o.statistic for o in wanted if o.key in places}
        try:
            with archive_of(self._packed, self.path) as archive:
                return Observed(
                    {k: one.restore(unpack(archive, places[k])) for k, one in found.items()}
                )
        except _BROKEN as error:
            raise CacheError(f"{self.path} does not hold statistics: {error}") from error


def to_bytes(
    *,
    share: Share,
    made_from: Fingerprint,
    digests: Iterable[str],
    skipped: Mapping[int, str],
    peaks: list[Row],
    observed: Observed,
    counted: int | None = None,
) -> bytes:
    """The bytes of the file of a shard, or of a checkpoint; see `Shard`."""
    packed = pack([recorder.to_arrays() for recorder in observed.values()])
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "share": asdict(share),
        "made_from": made_from.to_json(),
        "digests": list(digests),
        "skipped": {str(place): why for place, why in sorted(skipped.items())},
        "peaks": peaks,
        "observations": [list(key) for key in observed],
        "statistics": sha256(packed),
    }
    if counted is not None:
        document["counted"] = counted
    document["sha256"] = _digest(document)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_DOCUMENT, EPOCH), text.encode())
        archive.writestr(zipfile.ZipInfo(_STATISTICS, EPOCH), packed)
    return buffer.getvalue()


def load(path: Path, *, what: str = _WHAT) -> Shard:
    """Read a shard.

    Args:
        path: of the file.
        what: it must be, for an error.

    Raises:
        CacheError: it is none, it is broken, or it was changed after it was written.
    """
    return of_bytes(read_bytes(path, what=what, error=CacheError, own=True), path, what=what)


def of_bytes(raw: bytes, path: Path, *, what: str = _WHAT) -> Shard:
    """A shard of its file's bytes; the path is what an error calls it.

    Raises:
        CacheError: they are none, broken, or were changed.
    """
    rule = f"{path} must be {what}"
    try:
        with archive_of(raw, path) as archive:
            text, packed = archive.read(_DOCUMENT), archive.read(_STATISTICS)
    except _BROKEN as error:
        raise CacheError(f"{rule}, got no such archive: {error}") from error
    document = from_json(text, rule=rule, error=CacheError)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise CacheError(f"{rule}, got another form; make it anew with this version of calib8")
    if document.get("sha256") != _digest(document) or document.get("statistics") != sha256(packed):
        raise CacheError(f"{path} was changed after it was written; make it anew")
    try:
        return _shard(document, path, packed)
    except _BROKEN as error:
        raise CacheError(f"{rule}, got parts that do not fit: {error}") from error


def refuse_foreign(path: Path, *, force: bool) -> None:
    """Refuse a place for a shard where something else stands, before anything is run.

    Raises:
        ExportError: it is an input of this run, a folder or a device.
        CacheError: calib8 did not write it.
    """
    refuse(path)
    if force or not path.exists() or not path.stat().st_size:
        return
    try:
        load(path)
    except CacheError:
        raise CacheError(
            f"a shard must not replace what calib8 did not write, got {path}; name another file,"
            " or replace it with --force"
        ) from None


def _shard(document: dict[str, Any], path: Path, packed: bytes) -> Shard:
    share = Share(**document["share"])
    made_from = Fingerprint.from_json(document["made_from"])
    if not {"kind", "batch", "skip_bad", "count", "names"} <= set(made_from.images):
        raise ValueError("it does not tell what images it is of")
    skipped = {int(place): str(why) for place, why in document["skipped"].items()}
    counted, read = document.get("counted"), len(document["digests"])
    counted = None if counted is None else int(counted)
    if read > len(share.places) or (counted is None and read < len(share.places)):
        raise ValueError(f"{read} digests of {len(share.places)} samples")
    own = set(share.places[:read])
    good = own - set(skipped)
    if not set(skipped) <= own or (counted is not None and not 0 < counted <= len(good)):
        raise ValueError(f"{counted} samples of {len(good)} good ones")
    return Shard(
        share=share,
        made_from=made_from,
        digests=tuple(map(str, document["digests"])),
        skipped=skipped,
        peaks=[_row(row, good) for row in document["peaks"]],
        keys=tuple((str(a), str(b), str(c)) for a, b, c in document["observations"]),
        path=path,
        counted=counted,
        _packed=packed,
    )


def _row(row: Any, good: set[int]) -> Row:
    variant, tensor, seen, listed = row
    largest = tuple((float(amax), int(place)) for amax, place in listed)
    if any(place not in good for _, place in largest):
        raise ValueError("peaks of samples that are not its own")
    return str(variant), str(tensor), int(seen), largest


def _digest(document: Mapping[str, Any]) -> str:
    """Sha256 of all that the JSON says but for this digest."""
    others = {name: one for name, one in document.items() if name != "sha256"}
    return sha256(json.dumps(others, sort_keys=True).encode())
