"""Reading what anybody may have written: the one door through which bytes of files come in.

A file is read only where it is a regular one (a pipe would be waited for, a device is endless) and
within a budget of bytes::

    read_bytes, read_text      a whole file
    opened                     a file to be read in pieces
    read_json, from_json       values of JSON, nested no deeper than brackets should be
    refuse_irregular           for a library that opens a file by its path

Every refusal is one sentence of the error class that the caller names, and every file is
remembered as an input of the run, over which nothing is written (`deploy.files.reading`). Archives
are in `deploy.files.reading`.

Files that a run reads, which it must never write.

A run (a command, or a call of `calibrate` or `build`) guards its inputs: what reads a model,
images, labels, weights or a configuration says so, and `deploy.files.atomic` writes over none of
them::

    with guarded():
        is_read(model)        # remembered by device and inode, so that no other name hides it,
                              # as long as it is there: a new file may get the inode of a lost one
        refuse(output)        # ExportError: it is an input, a folder, or a device

Outside of a run nothing is remembered: what one run reads another may write.

Arrays in numpy's format and archives of them, judged by their headers before they are unpacked.

A few kilobytes of a zip archive may tell of terabytes, and an array's header of more values than
there are bytes: neither is believed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import tokenize
import warnings
import zipfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from deploy.errors import Calib8Error, ExportError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_Inode = tuple[int, int]


class _Many:
    """The files of a feed, of which there may be very many: two numbers of each."""

    def __init__(self, count: int, path: Callable[[int], Path]) -> None:
        self._devices, self._inodes = array("Q"), array("Q")
        self._path = path
        for index in range(count):
            found = _state(path(index))
            self._devices.append(0 if found is None else found.st_dev)
            self._inodes.append(0 if found is None else found.st_ino)

    def paths(self, inode: _Inode) -> Iterator[Path]:
        """Where a file of this inode was."""
        for index, number in enumerate(self._inodes):
            if number == inode[1] and self._devices[index] == inode[0]:
                yield self._path(index)


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read so far."""

    alone: dict[_Inode, str] = field(default_factory=dict)  # -> path
    many: list[_Many] = field(default_factory=list)

    def copy(self) -> _Read:
        return _Read(dict(self.alone), list(self.many))

    def paths(self, inode: _Inode) -> Iterator[Path | str]:
        """Where an input of this inode was."""
        if inode in self.alone:
            yield self.alone[inode]
        for one in self.many:
            yield from one.paths(inode)


_READ: ContextVar[_Read | None] = ContextVar("_READ", default=None)


@contextmanager
def guarded() -> Iterator[None]:
    """Remember inputs until the end; those of a run around this one too, and for it."""
    around = _READ.get()
    own = _Read() if around is None else around.copy()
    token = _READ.set(own)
    try:
        yield
    finally:
        _READ.reset(token)
        if around is not None:
            around.alone.update(own.alone)
            around.many[:] = own.many


def is_read(path: Path | str) -> None:
    """Remember a file as an input of this run; what does not exist is none."""
    read = _READ.get()
    if read is not None and (found := _state(path)) is not None:
        read.alone[found.st_dev, found.st_ino] = os.fspath(path)


def are_read(count: int, path: Callable[[int], Path]) -> None:
    """Remember so many files as inputs of this run.

    Args:
        count: how many there are.
        path: number of a file, from 0 -> its path; asked for again when something is written.
    """
    read = _READ.get()
    if read is not None:
        read.many.append(_Many(count, path))


def refuse(path: Path | str) -> None:
    """Refuse to write where an input, a folder or a device is.

    Raises:
        ExportError: one of these.
    """
    found = _state(path)
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode) or _stands_in_dev(path):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device"
        raise ExportError(f"{path} must be a file to write to, got {kind}; give another path")
    if _still_read((found.st_dev, found.st_ino)):
        raise ExportError(
            f"an output must not be an input, got {path}, which this run reads; give another path"
        )


def _still_read(inode: _Inode) -> bool:
    """Whether it is an input, and not a file that another run made since in place of a lost one."""
    states = map(_state, (_READ.get() or _Read()).paths(inode))
    return any(found and (found.st_dev, found.st_ino) == inode for found in states)


def _stands_in_dev(path: Path | str) -> bool:
    """Whether it is of /dev itself, as /dev/stdout, which may lead to a plain file."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"


def _state(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


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


if TYPE_CHECKING:
    pass
    pass

    Header = tuple[tuple[int, ...], bool, np.dtype[Any]]

# numpy parses headers as Python, and Python 3.11 fails at that by chance where several threads do:
# one switches to the other inside (python/cpython#106905)
HEADERS = threading.Lock()
MOST_ENTRIES = 1 << 20
MOST_UNPACKED = 16 << 30  # bytes of all entries
_MOST_LISTING = 128 << 20  # bytes of the table of contents


def check_archive(
    file: IO[bytes],
    path: Place,
    *,
    what: str,
    error: type[Calib8Error],
    entries: int = MOST_ENTRIES,
    most: int = MOST_UNPACKED,
) -> None:
    """Refuse an archive that would unpack to more than a budget, before anything is unpacked.

    What an entry's header tells is what `zipfile` unpacks of it at most.

    Args:
        file: the archive, which is left at its beginning.
        path: that it is called by.
        what: it must be, such as "an .npz file".
        error: class of what is raised.
        entries: how many it may have.
        most: bytes of all of them unpacked.

    Raises:
        error: more entries or bytes.
        BadZipFile: no zip archive.
    """
    rule = f"{os.fspath(path)} must be {what} of at most {entries:,} entries and {size(most)}"
    if (listing := _listing_bytes(file)) > _MOST_LISTING:
        raise error(f"{rule}, got {size(listing)} of names alone; write several smaller ones")
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        whole = sum(entry.file_size for entry in listed)
    file.seek(0)
    if len(listed) > entries or whole > most:
        raise error(
            f"{rule} unpacked, got {len(listed):,} and {size(whole)}; write several smaller ones"
        )


def array_header(stream: IO[bytes], room: int) -> Header:
    """(shape, Fortran order, dtype) of an .npy file; its values are next in the stream.

    Args:
        stream: at the beginning of the .npy file.
        room: bytes that the file has, at most.

    Raises:
        ValueError: not numpy's format, Python objects, or more values than bytes.
    """
    import numpy as np

    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"numpy format {version} is not known")
    try:
        with HEADERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that are read in numpy's older way
            shape, fortran, dtype = read_header(stream)
    except (tokenize.TokenError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(side < 0 for side in shape) or prod(shape) * dtype.itemsize > room:
        raise ValueError(f"its header tells of {dtype} {list(shape)}, which is more than is there")
    return shape, fortran, dtype


def read_array(stream: IO[bytes], room: int) -> NDArray[Any]:
    """An array of an .npy file; see `array_header`."""
    import numpy as np

    shape, fortran, dtype = array_header(stream, room)
    data = bytearray(stream.read(prod(shape) * dtype.itemsize))
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array.reshape(shape, order="F" if fortran else "C")


def _listing_bytes(file: IO[bytes]) -> int:
    """Bytes of a zip archive's table of contents, as its end tells; 0 where it has none."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(max(0, whole - (1 << 17)))  # an end, its comment and zip64's own end
    tail = file.read()
    file.seek(0)
    found = 0
    for sign, at, width in ((b"PK\x05\x06", 12, 4), (b"PK\x06\x06", 40, 8)):
        place = tail.rfind(sign)
        told = int.from_bytes(tail[place + at : place + at + width], "little")
        if place >= 0 and told != 0xFFFFFFFF:
            found = max(found, told)
    return min(found, whole)
