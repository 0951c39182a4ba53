"""`manifest.json`: which files are one build, what they were made from, and whether they still are.

It appears with the files that it names (`deploy.files.staging`). Files of earlier builds in the
same folder, of another model or target, stay named apart.

A file and, beside it, a note of what it was made from and of its sha256.

::

    model.engine         the file, written first
    model.engine.json    the note, written last: without it, or where it tells of other bytes, the
                         file counts as not there

So a crash between the two, a copy of only one, or an edit by hand never passes for the real thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import CacheError, ExportError
from deploy.files import atomic
from deploy.files.reading import read_bytes, read_json


def sha256(data: bytes) -> str:
    """Sha256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def note_of(path: Path) -> Path:
    """Where the note of a file stands."""
    return path.with_name(f"{path.name}.json")


def keep(path: Path, data: bytes, made_from: Mapping[str, Any], *, digest: str = "sha256") -> Path:
    """Write the file, then its note.

    Args:
        path: of the file.
        data: its bytes.
        made_from: all that it depends on, as plain JSON.
        digest: the note's key for the sha256 of the file, which `made_from` lacks.

    Raises:
        ExportError: the folder is not writable.
    """
    atomic.write_bytes(path, data)
    note = json.dumps({**made_from, digest: sha256(data)}, indent=1, sort_keys=True)
    atomic.write_text(note_of(path), note + "\n")
    return path


def read_stamped(path: Path, *, digest: str = "sha256") -> tuple[bytes, dict[str, Any]]:
    """(bytes of the file, what it was made from).

    Raises:
        CacheError: one of the two cannot be read, or the note tells of another file.
    """
    data = read_bytes(path, what="a file with a note beside it", error=CacheError, own=True)
    what = f"the note of {path.name}"
    note = read_json(note_of(path), what=what, error=CacheError, own=True)
    if not isinstance(note, dict) or note.pop(digest, None) != sha256(data):
        raise CacheError(
            f"{path} must be as it was written, got other bytes than {note_of(path).name} tells of;"
            " make it again"
        )
    return data, note


def fitting(path: Path, made_from: Mapping[str, Any], *, digest: str = "sha256") -> bytes | None:
    """The file's bytes where it was made from exactly this, and nothing was changed since."""
    try:
        data, note = read_stamped(path, digest=digest)
    except CacheError:
        return None
    return data if note == json.loads(json.dumps(made_from)) else None


NAME = "manifest.json"
SETTINGS = "calib8.toml"  # the options of a build
PAGES = ("report.json", "report.md", "report.html")  # of a build
SCHEMA = "calib8-manifest/1"
_MISSING, _CHANGED = "is missing", "was changed after it was written"
_OURS = "calib8-"  # begins the schema of a report and of a manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a build is.

    Attributes:
        made_from: model, images, shapes, targets, versions, as plain JSON.
        files: name -> sha256 of every file of the build.
        earlier: the same of builds before, whose files are still there.
    """

    made_from: Mapping[str, Any]
    files: Mapping[str, str]
    earlier: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input -> dimensions that it was calibrated with; {} of a build that did not note them."""
        noted = self.made_from.get("shapes")
        listed = noted.items() if isinstance(noted, dict) else ()
        return {
            str(name): tuple(dims)
            for name, dims in listed
            if isinstance(dims, list) and all(type(dim) is int and dim > 0 for dim in dims)
        }

    @property
    def cache(self) -> tuple[Path, str] | None:
        """The calibration cache outside the folder, and its sha256; None where there is none."""
        noted = self.made_from.get("cache")
        told = (noted.get("path"), noted.get("sha256")) if isinstance(noted, dict) else (None, None)
        path, digest = told
        return (Path(path), digest) if isinstance(path, str) and isinstance(digest, str) else None


def outside(cache: Path) -> dict[str, str]:
    """A calibration cache that a build does not hold, as `made_from` tells of it."""
    return {"path": str(cache.resolve()), "sha256": _digest(cache)}


def write(inside: Path, folder: Path, names: list[str], made_from: Mapping[str, Any]) -> Path:
    """Write the manifest of the files in `inside` that are to be published in `folder`.

    Raises:
        ExportError: the folder is not writable.
    """
    files = {name: _digest(inside / name) for name in names}
    before = _known(folder)
    gone = {NAME, *files}  # replaced by this build
    earlier = {n: d for n, d in before.items() if n not in gone and (folder / n).is_file()}
    document = {"schema": SCHEMA, "made_from": made_from, "files": files, "earlier": earlier}
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    return atomic.write_text(inside / NAME, text)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CacheError: there is none, or it is not one that this version reads.
    """
    path = folder / NAME
    document = _json(path)
    tables = ("made_from", "files", "earlier")
    if document.get("schema") != SCHEMA or not all(_table(document.get(key)) for key in tables):
        got = "another file of that name" if path.exists() else "none"
        raise CacheError(
            f"{folder} must hold the {NAME} of a build, got {got}; build into it with"
            " `calib8 build --out`"
        )
    return Manifest(**{key: document[key] for key in tables})


def changed(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Name -> what is wrong with it, of the files of a build that are not as they were written."""
    found = {}
    for name, digest in manifest.files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            found[name] = _MISSING
        elif _digest(path) != digest:
            found[name] = _CHANGED
    return found


def cache_changed(path: Path, digest: str) -> bool:
    """Whether a cache outside the folder is another now; a folder that was moved has none."""
    return path.is_file() and _digest(path) != digest


def refuse_foreign(folder: Path, names: list[str]) -> None:
    """Refuse to publish over files that no build of calib8 wrote there.

    Raises:
        ExportError: one of these.
    """
    there = [name for name in names if (folder / name).exists()]
    if not there:
        return
    known = {*_known(folder), *_reported(folder)}
    foreign = next((name for name in there if name not in known), None)
    if foreign is not None:
        raise ExportError(
            f"a build must not replace what calib8 did not write, got {folder / foreign}; give"
            " another --out, or replace it with --force"
        )


def _known(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files that the manifest of a folder tells of, of any build."""
    try:
        there = read_manifest(folder)
    except CacheError:
        return {}
    return {**there.earlier, **there.files, NAME: ""}


def _reported(folder: Path) -> set[str]:
    """Names in the report of a build that was made before there were manifests."""
    document = _json(folder / PAGES[0])
    if not str(document.get("schema")).startswith(_OURS):
        return set()
    parts = [document, *_rows(document.get("targets"))]
    rows = [row for part in parts for row in _rows(part.get("files"))]
    names = {Path(str(row.get("path"))).name for row in rows}
    sidecars = {f"{name}{ending}" for name in names for ending in (".json", ".npz")}
    return names | sidecars | {*PAGES}


def _rows(value: object) -> list[dict[str, Any]]:
    listed = value if isinstance(value, list) else []
    return [row for row in listed if isinstance(row, dict)]


def _table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none."""
    try:
        document = read_json(path, what="what a build is", error=CacheError, own=True)
    except CacheError:
        return {}
    return document if isinstance(document, dict) else {}


def _digest(path: Path) -> str:
    return sha256(read_bytes(path, what="a file of a build", error=CacheError, own=True))
