"""Calibration fingerprint: inputs and programs of a calibration; statistics archive; versions.

The fingerprint has two halves, which C++ (cpp/include/calib8/fingerprint.hpp) reads and writes the
same way::

    made from   model, images, preprocessing, decoder     compared
    made by     calib8 or TensorRT, version, method       reported

In the first half, everything except the *order* of the images decides whether the statistics are
still valid; the order matters to order-dependent statistics only. In the second half, *rule* and
*method* define the search, which can be repeated on calib8's statistics without running the model,
and *numbers* are the versions of calib8's own arithmetic, which concern such statistics only.

The arrays of recorders are stored in one archive: equal arrays give equal bytes.
"""

from __future__ import annotations

import io
import operator
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calibrators.statistics import FORMAT, Arrays
from deploy.errors import CacheError
from deploy.feed.decoding import opencv
from deploy.feed.pixels import decoder_digests
from deploy.files import archives
from deploy.version import __version__

CALIB8, TENSORRT = "calib8", "TensorRT"  # programs that make calibrations

_NOUN_BY_PART = {
    "model": "the model (weights or graph)",
    "images": "the images",
    "order": "the order of the images",
    "preprocess": "the preprocessing",
    "decoder": "the decoder",
    "rule": "the range rule",
    "numbers": "a version",
    "method": "the method",
}
_MADE_FROM = ("model", "images", "order", "preprocess", "decoder")
_MADE_BY = ("program", "rule", "method", "numbers", "versions")
_LIBRARY = "library"  # field of the decoder's name; the other fields describe its pixels
_DIGEST_LENGTH = 64  # of a sha256 in hex
_MAX_SHOWN_LENGTH = 40  # of a value that a message shows
_MAX_UNPACKED_BYTES = 4 << 30  # bytes of all statistics; 10,000 histograms are 160 MB
EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed time of archive members, so that equal data is equal bytes
# Increment one when a change of code gives other numbers for the same model and images.
FRONTEND_VERSION = 1  # names or values of the cleaned model
SEARCHES_VERSION = 1  # scales from the same statistics
DECODING_VERSION = 1  # samples from the same files and preprocessing; C++ uses the same number


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Origin of a calibration, as plain JSON values.

    Attributes:
        model: identities of the model; one equal identity is enough: "graph", sha256 of its
            computation (`deploy.frontends.base`); "file", sha256 of its file, with "weights",
            sha256 of its external data, if any (`deploy.frontends.onnx_reader.FileDigests`).
        images: {"count", "sha256", ...} of the feed, independent of order and names.
        order: sha256 of the images' digests in feed order.
        preprocess: preprocessing of the images, by field; {} for arrays.
        decoder: decoder of the image files, by `decoder_identity`; {} for arrays.
        program: CALIB8, or TENSORRT if it calibrated on a GPU.
        rule: "histogram", or the rule by which batches decide a range.
        method: search and its parameters, or TensorRT's calibrator as in a cache's first line.
        numbers: versions of calib8's arithmetic; {} if TensorRT calibrated.
        versions: versions of the programs that computed it.
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
        """Return plain JSON types."""
        parts = asdict(self)
        made_by = {part: parts.pop(part) for part in _MADE_BY}
        return {"made_from": parts, "made_by": made_by}

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Invert `to_json`.

        Raises:
            CacheError: parts are missing or of a wrong type.
        """
        with suppress(KeyError, ValueError):
            halves = msgspec.convert(data, dict[str, dict[str, Any]])
            return msgspec.convert({**halves["made_from"], **halves["made_by"]}, cls)
        raise CacheError(
            f"a fingerprint needs the parts {', '.join(_MADE_FROM)} of what it was made from and"
            f" {', '.join(_MADE_BY)} of who made it"
        )

    def changes_since(self, old: Fingerprint) -> dict[str, str]:
        """Return part -> how it changed since `old`, as a clause; {} if nothing changed.

        A part is a field such as `images`. Two models or decoders may count as equal although their
        fields differ, so these have their own functions to compare them.
        """
        changes: dict[str, str] = {}
        for part, noun in _NOUN_BY_PART.items():
            old_part = getattr(old, part)
            new_part = getattr(self, part)
            are_equal = _EQUALITY_BY_PART.get(part, operator.eq)
            if are_equal(old_part, new_part):
                continue
            changes[part] = f"{noun} changed"
            if part != "model":
                detail = _describe_difference(old_part, new_part)
            elif _is_same_file(old_part, new_part):  # whose weights are in another file
                detail = "its external data"
            else:
                detail = ""  # its identities are digests, which tell the user nothing
            if detail:
                changes[part] += f" ({detail})"
        return changes

    @property
    def by(self) -> str:
        """Its program and method: "calib8 0.1.0 by mse", "TensorRT 8.6.1 by MinMaxCalibration"."""
        version = self.versions.get(self.program.lower(), "")
        return " ".join(filter(None, (self.program, str(version), "by", self.method)))


def _is_same_file(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    return "file" in old and old["file"] == new.get("file")


def _is_same_model(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether one identity is equal: the graph's, or that of the files."""
    if "graph" in old and old["graph"] == new.get("graph"):
        return True
    return _is_same_file(old, new) and old.get("weights") == new.get("weights")


def _is_same_decoder(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two decoders give the same pixels: by digests of test images, or by name."""
    if not old or not new:  # arrays are not decoded; a change of kind shows in the images
        return True
    common_fields = old.keys() & new.keys() - {_LIBRARY}
    has_digests = len(common_fields) > 1  # beside the version of calib8's own decoding
    if not has_digests and old.get(_LIBRARY) != new.get(_LIBRARY):
        return False
    return all(old[name] == new[name] for name in common_fields)


_EQUALITY_BY_PART = {"model": _is_same_model, "decoder": _is_same_decoder}


def _describe_difference(old: object, new: object) -> str:
    """Return how two values of a part of the fingerprint differ, for the user.

    Two strings give "old -> new". Two mappings give "field old -> new" of each field that differs,
    or only "field" if a value is long. Digests and other types, which tell a user nothing, give "".
    """
    if isinstance(old, str) and isinstance(new, str):
        if len(old) == _DIGEST_LENGTH:
            return ""
        return f"{old} -> {new}"
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return ""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        old_value = old.get(key)
        new_value = new.get(key)
        if old_value == new_value:
            continue
        if max(len(str(old_value)), len(str(new_value))) <= _MAX_SHOWN_LENGTH:
            changes.append(f"{key} {old_value} -> {new_value}")
        else:
            changes.append(key)
    return ", ".join(changes)


def open_archive(data: bytes, path: Path) -> zipfile.ZipFile:
    """Open an archive of statistics after a check of its unpacked size.

    Raises:
        CacheError: it would unpack to too many bytes.
        BadZipFile: it is not an archive.
    """
    file = io.BytesIO(data)
    archives.check_archive(
        file, path, what="statistics", error=CacheError, max_bytes=_MAX_UNPACKED_BYTES
    )
    return zipfile.ZipFile(file)


def pack_arrays(arrays_by_index: list[Arrays]) -> bytes:
    """Return the bytes of an .npz with the arrays `<index>.<field>`; fast compression, no times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index, arrays in enumerate(arrays_by_index):
            for field, array in sorted(arrays.items()):
                data = io.BytesIO()
                np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
                member = zipfile.ZipInfo(f"{index}.{field}.npy", EPOCH)
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, data.getvalue(), compresslevel=1)
    return buffer.getvalue()


def unpack_arrays(archive: zipfile.ZipFile, index: int) -> Arrays:
    """Return the arrays of the observation with this index.

    Raises:
        KeyError, ValueError, BadZipFile: it is not such an archive.
    """
    arrays = {}
    for name in archive.namelist():
        if name.startswith(f"{index}."):
            size = archive.getinfo(name).file_size
            with archive.open(name) as stream:
                arrays[name.split(".")[1]] = archives.read_array(stream, size)
    return arrays


def feed_versions(kind: str) -> dict[str, str | int]:
    """Return all versions that affect a calibration on "arrays", or on any kind of images."""
    versions: dict[str, str | int] = {"onnxruntime": _onnxruntime_version()}
    versions |= arithmetic_versions()
    if kind != "arrays":
        versions |= {"opencv": _opencv_version(), "decoding": DECODING_VERSION}
    return versions


def arithmetic_versions() -> dict[str, int]:
    """Return the versions of the stored statistics' format and of calib8's arithmetic."""
    return {"statistics": FORMAT, "frontend": FRONTEND_VERSION, "searches": SEARCHES_VERSION}


def program_versions() -> dict[str, str]:
    """Return the versions of the programs that compute activations and ranges."""
    return {"calib8": __version__, "onnxruntime": _onnxruntime_version()}


def decoder_identity(kind: str) -> dict[str, str | int]:
    """Return the decoder of image files; {} for "arrays".

    Besides the library's name it holds digests of decoded and resized test images, so that another
    library or version with the same pixels counts as the same decoder.
    """
    if kind == "arrays":
        return {}
    return {
        "decoding": DECODING_VERSION,
        "library": f"OpenCV {_opencv_version()}",
        **decoder_digests(),
    }


def _onnxruntime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _opencv_version() -> str:
    return str(opencv().__version__)
