"""A file and, beside it, a note of what it was made from and of its sha256.

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
from pathlib import Path
from typing import Any

from deploy.errors import CacheError
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


def read(path: Path, *, digest: str = "sha256") -> tuple[bytes, dict[str, Any]]:
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
        data, note = read(path, digest=digest)
    except CacheError:
        return None
    return data if note == json.loads(json.dumps(made_from)) else None
