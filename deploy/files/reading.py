"""Reading what anybody may have written: the one door through which bytes of files come in.

A file is read only where it is a regular one (a pipe would be waited for, a device is endless) and
within a budget of bytes::

    read_bytes, read_text      a whole file
    opened                     a file to be read in pieces
    read_json, from_json       values of JSON, nested no deeper than brackets should be
    refuse_irregular           for a library that opens a file by its path

Every refusal is one sentence of the error class that the caller names, and every file is
remembered as an input of the run, over which nothing is written (`deploy.inputs`). Archives are
in `deploy.archives`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from deploy.errors import Calib8Error
from deploy.inputs import is_read

Place = str | os.PathLike[str]

MOST_BYTES = 16 << 30  # of any file that is read as a whole
MOST_TEXT = 64 << 20  # of one that is text
MOST_NESTING = 64  # brackets of JSON within each other
_PIECE = 1 << 20  # asked for at a time: Python reserves what is asked for

_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NEITHER = bytes(code for code in range(256) if code not in b'"[]{}')


def read_bytes(
    path: Place, *, what: str, error: type[Calib8Error], most: int = MOST_BYTES, own: bool = False
) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        what: it must be, such as "a plan".
        error: class of what is raised.
        most: bytes that it may have.
        own: it is a file that the run may write again, such as its cache.

    Raises:
        error: nothing there, no regular file, larger than that, or unreadable.
    """
    with opened(path, what=what, error=error, most=most, own=own) as file:
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
        while len(data) <= most and (more := file.read(_PIECE)):  # it grew, or tells no size
            data += more
    if len(data) > most:
        raise error(_too_large(path, what, len(data), most))
    return data


def read_text(
    path: Place, *, what: str, error: type[Calib8Error], most: int = MOST_TEXT, own: bool = False
) -> str:
    """The text of a regular file in UTF-8, with or without a byte order mark.

    Raises:
        error: as `read_bytes`, or other bytes than UTF-8.
    """
    data = read_bytes(path, what=what, error=error, most=most, own=own)
    return _decoded(data, f"{os.fspath(path)} must be {what}", error)


@contextmanager
def opened(
    path: Place,
    *,
    what: str,
    error: type[Calib8Error],
    most: int | None = None,
    own: bool = False,
) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; what the system refuses meanwhile becomes `error` too.

    Raises:
        error: as `read_bytes`.
    """
    with open(_descriptor(path, what, error), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise error(_too_large(path, what, size, most))
        if not own:
            is_read(os.fspath(path))
        try:
            yield file
        except OSError as refused:
            raise error(_refused(path, what, refused)) from refused


def read_json(
    path: Place, *, what: str, error: type[Calib8Error], most: int = MOST_TEXT, own: bool = False
) -> Any:
    """The value of a JSON file.

    Raises:
        error: as `read_text`; no JSON, or nested deeper than `MOST_NESTING`.
    """
    text = read_text(path, what=what, error=error, most=most, own=own)
    return from_json(text, rule=f"{os.fspath(path)} must be {what}", error=error)


def from_json(
    text: str | bytes,
    *,
    rule: str,
    error: type[Calib8Error],
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text.

    Args:
        text: the JSON, bytes in UTF-8.
        rule: that it must obey, as the sentence begins.
        error: class of what is raised.
        pairs: makes an object of its keys and values; None a dict.
        constant: makes a value of NaN, Infinity or -Infinity; None a float.

    Raises:
        error: no JSON, or nested deeper than `MOST_NESTING`.
    """
    if isinstance(text, bytes):
        text = _decoded(text, rule, error)
    if nested(text):
        raise error(
            f"{rule}, got JSON of over {MOST_NESTING} brackets in each other; write it flat"
        )
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as wrong:
        said = f"{wrong.msg} at line {wrong.lineno}"
    except ValueError as wrong:  # a whole number of thousands of digits
        said = str(wrong)
    raise error(f"{rule}, got no sound JSON: {said}; write it again")


def nested(text: str, most: int = MOST_NESTING) -> bool:
    """Whether brackets of a JSON text lie deeper than that, found without any recursion."""
    data = text.encode("utf-8", "surrogatepass").replace(b"\\\\", b"").replace(b'\\"', b"")
    left = re.sub(rb'"[^"]*"', b"", data.translate(_ONE_KIND, _NEITHER))
    for _ in range(most):  # each round takes the innermost pairs away
        left = left.replace(b"[]", b"")
    return b"[]" in left or left.count(b"[") > most


def _decoded(data: bytes, rule: str, error: type[Calib8Error]) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise error(f"{rule} in UTF-8, got other bytes; save it as UTF-8") from wrong


def refuse_irregular(path: Place, *, what: str, error: type[Calib8Error]) -> None:
    """Refuse what is no regular file, and remember an input.

    Raises:
        error: nothing there, or no regular file.
    """
    os.close(_descriptor(path, what, error))
    is_read(os.fspath(path))


def is_text(path: Place) -> bool:
    """Whether a path's bytes are its text in UTF-8, as libraries in C++ take it."""
    try:
        return os.fsencode(path) == str(path).encode("utf-8")
    except UnicodeError:
        return False


def _descriptor(path: Place, what: str, error: type[Calib8Error]) -> int:
    """The open file; looked at before and after, since to open a pipe is to wait for it."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        kind = _kind(os.stat(path))
        descriptor = -1 if kind else os.open(path, flags)
        if descriptor >= 0 and (kind := _kind(os.fstat(descriptor))):
            os.close(descriptor)
    except (OSError, ValueError) as refused:
        raise error(_refused(path, what, refused)) from refused
    if kind:
        raise error(f"{os.fspath(path)} must be {what}, got {kind}; name a regular file")
    return descriptor


def _kind(state: os.stat_result) -> str:
    """What there is in place of a regular file; empty for one."""
    if stat.S_ISREG(state.st_mode):
        return ""
    return "a folder" if stat.S_ISDIR(state.st_mode) else "a device or pipe"


def _refused(path: Place, what: str, refused: OSError | ValueError) -> str:
    if isinstance(refused, FileNotFoundError):
        return f"{os.fspath(path)} must be {what}, got nothing there; check the path"
    said = getattr(refused, "strerror", None) or str(refused)
    return f"{os.fspath(path)} must be {what} that can be read, got: {said}; check its permissions"


def _too_large(path: Place, what: str, got: int, most: int) -> str:
    return (
        f"{os.fspath(path)} must be {what} of at most {size(most)}, got {size(got)}; check that it"
        " is the right file"
    )


def size(count: int) -> str:
    """Bytes as people read them, for a sentence."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.4g} GiB"
