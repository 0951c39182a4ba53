"""`calib8/manifest.json` lists a build's files with their sha256, and what they were made from.

It is published with these files (`deploy.files.staging`). Files of earlier builds in the same
folder, for another model or target, are listed separately.

Single files outside of a build have a note next to them (`write_made_from`, `read_if_made_from`)::

    model.engine         the file, written first
    model.engine.json    the note, written last: what the file was made from, and its sha256

Without a note, or with a note on other bytes, the file counts as missing. So a crash between the
two, a copy of only one, or a manual edit is never taken for a valid file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import CacheError, ExportError
from deploy.files import atomic, guard, reading
from deploy.files.reading import convert, read_bytes, read_json
from deploy.version import __version__

if TYPE_CHECKING:
    import onnx

_convert = partial(convert, rule="it must be what a build is", error=CacheError)


def sha256(data: bytes) -> str:
    """Return the sha256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


_DIGEST_KEY = "engine_sha256"  # key of a note for the sha256 of its file, an engine; as in C++


def note_path(path: Path) -> Path:
    """Return the path of a file's note."""
    return path.with_name(f"{path.name}.json")


def write_made_from(path: Path, data: bytes, made_from: Mapping[str, Any]) -> Path:
    """Write a file, then the note of what it was made from; return the file's path.

    `made_from`: everything it depends on, as plain JSON.

    Raises:
        ExportError: the folder is not writable.
    """
    atomic.write_bytes(path, data)
    atomic.write_text(note_path(path), _note_text(data, made_from))
    return path


def read_if_made_from(path: Path, made_from: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of a file if it is unchanged and was made from `made_from`; else None."""
    what = "a file with a note beside it"
    with suppress(CacheError):  # the file or its note cannot be read
        data = read_bytes(path, what=what, error=CacheError, rewritable=True)
        note = read_json(note_path(path), what="its note", error=CacheError, rewritable=True)
        if note == json.loads(_note_text(data, made_from)):
            return data
    return None


def _note_text(data: bytes, made_from: Mapping[str, Any]) -> str:
    """Return the note of a file with these bytes, as JSON."""
    return json.dumps({**made_from, _DIGEST_KEY: sha256(data)}, indent=1, sort_keys=True) + "\n"


RECORDS = "calib8"  # subfolder of what the next build reuses: cache, plan, manifest
MANIFEST_NAME = f"{RECORDS}/manifest.json"
SETTINGS = "calib8.toml"  # the options of a build
REPORT_JSON = "report.json"
PAGES = (REPORT_JSON, "report.md", "report.html")  # reports of a build
SCHEMA = "calib8-manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a build.

    Attributes:
        made_from: model, images, shapes, targets, versions, as plain JSON.
        files: name -> sha256 of every file of the build.
        earlier: the same for earlier builds whose files still exist.
    """

    made_from: Mapping[str, Any]
    files: Mapping[str, str]
    earlier: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input -> dimensions used for calibration; {} if the build did not store them."""
        with suppress(CacheError):
            shapes = _convert(self.made_from.get("shapes"), dict[str, tuple[int, ...]])
            return {name: dims for name, dims in shapes.items() if min(dims, default=1) > 0}
        return {}

    @property
    def cache(self) -> tuple[Path, str] | None:
        """(path, sha256) of a calibration cache outside the folder; None without one."""
        with suppress(CacheError, KeyError):
            cache = _convert(self.made_from.get("cache"), dict[str, str])
            return Path(cache["path"]), cache["sha256"]
        return None


def external_cache_entry(cache: Path) -> dict[str, str]:
    """Return the entry of `made_from` for a calibration cache outside the build's folder."""
    return {"path": str(cache.resolve()), "sha256": _digest_file(cache)}


def write_manifest(
    stage_folder: Path, folder: Path, names: list[str], made_from: Mapping[str, Any]
) -> Path:
    """Write the manifest of a build, a JSON file in `stage_folder`, and return its path.

    It lists the files of the build with their digests, and those of earlier builds in the folder.

    Args:
        stage_folder: temporary folder with the files of the build.
        folder: where they will be published.
        names: names of these files, relative to the folder.
        made_from: model, samples, options and versions, as plain JSON.

    Raises:
        ExportError: the folder is not writable.
    """
    digest_by_name = {name: _digest_file(stage_folder / name) for name in names}
    earlier = {}  # files of earlier builds that are still there
    for name, digest in _files_in_manifest(folder).items():
        is_replaced = name == MANIFEST_NAME or name in digest_by_name
        if not is_replaced and (folder / name).is_file():
            earlier[name] = digest
    document = {
        "schema": SCHEMA,
        "made_from": made_from,
        "files": digest_by_name,
        "earlier": earlier,
    }
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    path = stage_folder / MANIFEST_NAME
    path.parent.mkdir(exist_ok=True)  # the subfolder of records
    return atomic.write_text(path, text)


def is_build_name(name: str) -> bool:
    """Whether `name` is that of a file in a build's folder or in its subfolder of records."""
    file_name = name.removeprefix(f"{RECORDS}/")
    return file_name not in ("", "..") and Path(file_name).name == file_name


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a build's folder.

    Raises:
        CacheError: there is none, or this version cannot read it.
    """
    path = folder / MANIFEST_NAME  # in a subfolder
    if not path.exists():  # older versions wrote it into the folder itself
        path = folder / path.name
    # a file that cannot be read, or has other values, counts as that of another program, below.
    # It is `rewritable`, since a build writes its manifest over the one that it has read
    with suppress(CacheError):
        document = read_json(path, what="what a build is", error=CacheError, rewritable=True)
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            return _convert(document, Manifest)
    got = "another file of that name" if path.exists() else "none"
    raise CacheError(
        f"{folder} must hold the {MANIFEST_NAME} of a build, got {got}; build into it with"
        " `calib8 build --out`"
    )


def find_changed_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return name -> "is missing" or "was changed ..." for each such file of a build."""
    problems = {}
    for name, digest in manifest.files.items():
        path = folder / name
        if not is_build_name(name) or not path.is_file():
            problems[name] = "is missing"
        elif _digest_file(path) != digest:
            problems[name] = "was changed after it was written"
    return problems


def cache_changed(path: Path, digest: str) -> bool:
    """Return whether a cache outside the folder was changed; False if it is missing."""
    return path.is_file() and _digest_file(path) != digest


def build_folders(out: Path) -> tuple[Path, Path]:
    """Return the folders, absolute, that hold the files of a build into `out`."""
    return out.resolve(), out.resolve() / RECORDS


def is_of_build(path: Path) -> bool:
    """Whether the manifest of a build lists the file at `path`."""
    folder = path.parent.resolve()
    build_folder = folder.parent if folder.name == RECORDS else folder
    name_in_build = (folder / path.name).relative_to(build_folder).as_posix()
    return name_in_build in _files_in_manifest(build_folder)


def refuse_foreign(folder: Path, names: list[str], *, force: bool | None) -> None:
    """Refuse to overwrite files that calib8 did not write, or other outputs of this run.

    Args:
        folder: where the files will be published.
        names: of the files to write. Those that the folder's manifest lists may be replaced.
        force: whether files that calib8 did not write are replaced too; None, which is no as well,
            if the command has no --force that the message could name.

    Raises:
        ExportError: names the first such file; or the folder cannot be written to.
    """
    guard.refuse_unwritable(folder / RECORDS)  # `folder` must take this subfolder, and files
    for name in names:
        guard.refuse_output(folder / name)
    known_names = _files_in_manifest(folder)
    other_paths = (folder / name for name in names if name not in known_names)
    foreign_file = next(filter(Path.exists, other_paths), None)
    if foreign_file is not None and not force:
        way_out = "remove it" if force is None else "replace it with --force"
        raise ExportError(
            f"a build must not replace what calib8 did not write, got {foreign_file}; give"
            f" another --out, or {way_out}"
        )


# Kind of file that is written where the user says -> how one by calib8 begins. Caches and AMCT's
# configurations have no place for a mark: any in the form that calib8 writes counts. TensorRT
# itself judges a timing cache (`deploy.targets.tensorrt.builder`), here it must not be text.
MARKS = {
    "JSON file": rb'[\[\s]*{\s*"schema": "calib8-',
    "page": rb'<!doctype html>.{,80}<meta name="generator" content="calib8',
    "model": rb"\x08.\x12\x06calib8",  # ONNX
    "cache": rb"(TRT-\d{4,6}-\w+|0[0-9a-f]{32})\r?\n[^\n]+: [0-9A-Fa-f]{1,8}\s",
    "configuration": rb'{\s*"version": ?1,\s*"batch_num": ?\d',
    "fingerprint": rb'{\s*"fingerprint": ?{',
    "statistics": rb"PK\x03\x04.{26}\d+\.[A-Za-z_]+\.npy",
    "shard": rb"PK\x03\x04.{26}shard\.json",
    "timing cache": rb".*\x00",
}
_MARK_BYTES = 4096  # bytes at either end of a file, where its mark is


def name_output(path: Path, kind: str, *, force: bool | None = None) -> None:
    """Remember a file that the user named as an output, of a kind in `MARKS`.

    `force`: overwrite any file but an input; None where the command has no --force.

    Raises:
        ExportError: calib8 did not write the file that is there, or as another output or input.
    """
    guard.add_output(path, partial(_refuse_unmarked, path, kind, force))


def is_marked(path: Path, kind: str) -> bool:
    """Return whether a file is empty, or its first and last bytes show that calib8 wrote it.

    `kind`: what calib8 would have written there, a key of `MARKS`.
    """
    with (
        suppress(ExportError),  # it cannot be read
        reading.open_regular_file(
            path, what="an output", error=ExportError, rewritable=True
        ) as file,
    ):
        first_bytes = file.read(_MARK_BYTES)
        if not first_bytes:
            return True
        # go to the last bytes; in a short file, only to those that were not read yet
        last_offset = os.fstat(file.fileno()).st_size - _MARK_BYTES
        file.seek(max(last_offset, len(first_bytes)))
        both_ends = first_bytes + file.read(_MARK_BYTES)
        return re.match(MARKS[kind], both_ends, re.DOTALL) is not None
    return False


def _refuse_unmarked(path: Path, kind: str, force: bool | None) -> None:
    """Raise `ExportError` unless the file at `path` is of this kind and by calib8, or none."""
    if force:
        return
    is_foreign = path.exists() and not is_marked(path, kind)
    if is_foreign or is_of_build(path):
        way_out = "remove it" if force is None else "replace it with --force"
        raise ExportError(
            f"an output may replace only a {kind} that calib8 wrote, and none of a build, got"
            f" {path}; give another path, or {way_out}"
        )


def write_model(path: Path, model: onnx.ModelProto) -> None:
    """Write an ONNX model with calib8 as its producer; deterministic (`atomic.write_bytes`)."""
    model.producer_name = "calib8"
    model.producer_version = __version__
    atomic.write_bytes(path, model.SerializeToString(deterministic=True))


def _files_in_manifest(folder: Path) -> dict[str, str]:
    """Return name -> sha256 of all files in a folder's manifest, earlier builds included."""
    try:
        manifest = read_manifest(folder)
    except CacheError:
        return {}
    return {**manifest.earlier, **manifest.files, MANIFEST_NAME: ""}


def _digest_file(path: Path) -> str:
    return sha256(read_bytes(path, what="a file of a build", error=CacheError, rewritable=True))
