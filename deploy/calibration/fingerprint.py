"""What a calibration was made from and who made it, so that a stale one is told part by part.

Two halves, which C++ (cpp/include/calib8/fingerprint.hpp) reads and writes alike::

    made from   model, images, preprocessing, decoder     compared
    made by     calib8 or TensorRT, version, method       told

Of the first half the *observation* (all but the order) decides whether the statistics still hold;
the *order* of the images does for those statistics alone that show it. Of the second half the
*search* (rule, method) says what is looked for, which may be found again in calib8's own
statistics without running the model, and the *numbers* are those of calib8's own arithmetic, which
hold for such statistics alone.

The arrays of recorders in one archive: equal arrays, equal bytes.

Versions that a calibration depends on, and those of the programs that took part.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrators.statistics import FORMAT, Arrays
from deploy.errors import CacheError
from deploy.files import reading
from deploy.version import __version__

CALIB8, TENSORRT = "calib8", "TensorRT"  # who makes calibrations

_NAMES = {
    "model": "the model (weights or graph)",
    "images": "the images",
    "order": "the order of the images",
    "preprocess": "the preprocessing",
    "decoder": "the decoder",
    "rule": "the range rule",
    "numbers": "a version",
    "method": "the method",
}
_FROM = ("model", "images", "order", "preprocess", "decoder")
_BY = ("program", "rule", "method", "numbers", "versions")
_TEXTS = frozenset(("order", "program", "rule", "method"))
_TOLD = "library"  # of the decoder: its name, where the rest says what it makes of pictures
_OLD = ("images", "method", "model", "order", "preprocess", "rule", "versions")  # until schema 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Parts of a calibration's origin, as plain JSON values.

    Attributes:
        model: the model's identities, any of which suffices: "graph", sha256 of what it computes
            (`deploy.frontends.base`); "file", sha256 of its file, with "weights", that of its
            external data, where it has any (`deploy.frontends.reader.Stamp`).
        images: {"count", "sha256", ...} of the feed, whatever the order and the names.
        order: sha256 of the images' digests in their order.
        preprocess: what was done to the images, field by field; {} for arrays.
        decoder: what made samples of files (`deploy.calibration.fingerprint`); {} for arrays.
        program: CALIB8, or TENSORRT where it calibrated on a GPU.
        rule: "histogram", or the rule by which batches decide a range.
        method: search and its parameters; a calibrator of TensorRT as a cache's first line has it.
        numbers: calib8's own arithmetic; {} where it is TensorRT's.
        versions: of the programs that took part.
    """

    model: Mapping[str, str]
    images: Mapping[str, Any]
    order: str
    preprocess: Mapping[str, Any]
    decoder: Mapping[str, Any]
    program: str
    rule: str
    method: str
    numbers: Mapping[str, Any]
    versions: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""

        def half(parts: tuple[str, ...]) -> dict[str, Any]:
            held = {part: getattr(self, part) for part in parts}
            return {k: one if isinstance(one, str) else dict(one) for k, one in held.items()}

        return {"made_from": half(_FROM), "made_by": half(_BY)}

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Inverse of `to_json`; reads the form of schema 4 too.

        Raises:
            CacheError: missing or mistyped parts.
        """
        parts = {**_half(data, "made_from"), **_half(data, "made_by")} or _of_schema_4(data)
        wanted = {*_FROM, *_BY}
        sound = set(parts) == wanted and all(
            isinstance(parts[key], str if key in _TEXTS else dict) for key in wanted
        )
        if not sound or not all(isinstance(one, str) for one in parts["model"].values()):
            raise CacheError(
                f"a fingerprint needs the parts {', '.join(_FROM)} of what it was made from and"
                f" {', '.join(_BY)} of who made it"
            )
        return cls(**parts)

    def changes_since(self, old: Fingerprint) -> dict[str, str]:
        """Part -> what changed from `old` to this one, as a sentence's end; {} if nothing did."""
        changed: dict[str, str] = {}
        for part, noun in _NAMES.items():
            before, now = getattr(old, part), getattr(self, part)
            if _SAME.get(part, _equal)(before, now):
                continue
            detail = _weights(before, now) if part == "model" else _difference(before, now)
            changed[part] = f"{noun} changed{f' ({detail})' if detail else ''}"
        return changed

    @property
    def by(self) -> str:
        """Who made it: "calib8 0.1.0 by mse", "TensorRT 8.6.1 by EntropyCalibration2"."""
        version = self.versions.get(self.program.lower(), "")
        return " ".join(word for word in (self.program, str(version), "by", self.method) if word)


def _half(data: object, name: str) -> dict[str, Any]:
    half = data.get(name) if isinstance(data, dict) else None
    return half if isinstance(half, dict) else {}


def _of_schema_4(data: object) -> dict[str, Any]:
    """Parts of the form that knew no halves; {} where it is none."""
    if not isinstance(data, dict) or set(data) != set(_OLD):
        return {}
    versions, model = data["versions"], data["model"]
    if not isinstance(versions, dict) or not isinstance(model, str):
        return {}
    parts = {key: data[key] for key in ("images", "order", "preprocess", "rule", "method")}
    numbers = {k: versions[k] for k in ("frontend", "searches", "statistics") if k in versions}
    decoder = {k: versions[k] for k in ("decoding",) if k in versions}
    if "opencv" in versions:
        decoder[_TOLD] = f"OpenCV {versions['opencv']}"
    theirs = {k: one for k, one in versions.items() if k not in (*numbers, "decoding", "opencv")}
    own = {"program": CALIB8, "numbers": numbers, "versions": theirs}
    return {**parts, **own, "model": {"graph": model}, "decoder": decoder}


def _equal(before: object, now: object) -> bool:
    return before == now


def _same_model(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether one identity is the same: the graph's, or that of the files."""
    if "graph" in before and before["graph"] == now.get("graph"):
        return True
    file = "file" in before and before["file"] == now.get("file")
    return file and before.get("weights") == now.get("weights")


def _weights(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is known of a change of the model."""
    return "its external data" if "file" in before and before["file"] == now.get("file") else ""


def _same_decoder(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two decoders make the same of pictures: by what they made of some, or by name."""
    if not before or not now:  # of arrays nothing is decoded, and the images say so
        return True
    common = before.keys() & now.keys() - {_TOLD}
    known = len(common) > 1 or before.get(_TOLD) == now.get(_TOLD)
    return known and all(before[key] == now[key] for key in common)


_SAME = {"model": _same_model, "decoder": _same_decoder}


def _difference(before: object, now: object) -> str:
    """The fields that differ, short; digests are only said to differ."""
    if isinstance(before, str) and isinstance(now, str):
        return "" if len(before) == 64 else f"{before} -> {now}"
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return ""
    fields = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    words = []
    for key in sorted(fields):
        old, new = before.get(key), now.get(key)
        short = all(len(str(value)) <= 40 for value in (old, new))
        words.append(f"{key} {old} -> {new}" if short else key)
    return ", ".join(words)


_MOST_UNPACKED = 4 << 30  # bytes of all statistics; 10,000 histograms are 160 MB
EPOCH = (1980, 1, 1, 0, 0, 0)  # no times in an archive


def archive_of(data: bytes, path: Path) -> zipfile.ZipFile:
    """An archive of statistics, that unpacks to no more than these may be.

    Raises:
        CacheError: it would be more.
        BadZipFile: it is none.
    """
    file = io.BytesIO(data)
    reading.check_archive(file, path, what="statistics", error=CacheError, most=_MOST_UNPACKED)
    return zipfile.ZipFile(file)


def pack(listed: list[Arrays]) -> bytes:
    """An .npz of the arrays `<place>.<field>`; quick compression, no times in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for place, arrays in enumerate(listed):
            for field, array in sorted(arrays.items()):
                data = io.BytesIO()
                np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
                member = zipfile.ZipInfo(f"{place}.{field}.npy", EPOCH)
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, data.getvalue(), compresslevel=1)
    return buffer.getvalue()


def unpack(archive: zipfile.ZipFile, place: int) -> Arrays:
    """The arrays of one observation.

    Raises:
        KeyError, ValueError, BadZipFile: it is not such an archive.
    """
    found = {}
    for name in _members(archive, place):
        with archive.open(name) as stream:
            room = archive.getinfo(name).file_size
            found[name.split(".")[1]] = reading.read_array(stream, room)
    return found


def _members(archive: zipfile.ZipFile, place: int) -> Iterator[str]:
    start = f"{place}."
    return (name for name in archive.namelist() if name.startswith(start))


# Raise one where a change of code gives other numbers for the same model and images.
FRONTEND = 1  # names or values of the cleaned model
SEARCHES = 1  # scales from the same statistics
DECODING = 1  # samples from the same files and preprocessing; C++ has the same number


def of_feed(kind: str) -> dict[str, str | int]:
    """All that takes part in a calibration on "arrays", or on pictures of any kind."""
    found: dict[str, str | int] = {"onnxruntime": _onnxruntime(), **numbers()}
    return found if kind == "arrays" else {**found, "opencv": _opencv(), "decoding": DECODING}


def numbers() -> dict[str, int]:
    """In which form the statistics are kept, and which arithmetic of calib8 made them."""
    return {"statistics": FORMAT, "frontend": FRONTEND, "searches": SEARCHES}


def programs() -> dict[str, str]:
    """What computed the activations and the ranges."""
    return {"calib8": __version__, "onnxruntime": _onnxruntime()}


def decoder(kind: str) -> dict[str, str | int]:
    """What makes samples of files; {} for "arrays", of which nothing has to.

    Its library's name tells; the digests say what it makes of pictures of each form, and how it
    resizes, so that another library, or version, that gives the same pixels is the same decoder.
    """
    if kind == "arrays":
        return {}
    from deploy.feed.pixels import digests

    return {"decoding": DECODING, "library": f"OpenCV {_opencv()}", **digests()}


def _onnxruntime() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _opencv() -> str:
    from deploy.feed.images import opencv

    return str(opencv().__version__)
