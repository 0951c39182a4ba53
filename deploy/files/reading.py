"""Read files that anybody may have written: the only place where bytes of files come in.

A file is read only if it is a regular file (reading a pipe blocks, a device is endless) and within
a budget of bytes::

    read_bytes, read_text      an entire file
    open_regular_file          a file to be read in pieces
    read_json, from_json       values of JSON, up to `MOST_NESTING` brackets deep
    convert                    values of JSON or TOML as a dataclass, checked by its fields' types
    refuse_irregular           for a library that opens a file by its path
    check_archive, array_header, read_array     zip archives and .npy arrays

A refusal is one sentence, raised as the caller's error class. A few kilobytes of a zip archive may
claim terabytes, and an array's header more values than there are bytes: archives and arrays are
judged by their headers before anything is unpacked.

A run (a command, or a call of `calibrate` or `build`) remembers the files that it reads, its
inputs, and `deploy.files.atomic` refuses to overwrite them::

    with guard_inputs():
        add_input_file(model)  # remembered by device and inode, so another name does not hide it,
                               # while it exists: a new file may get the inode of a deleted one
        add_output(page, ok)   # the user named it; `ok` raises if the file there is not calib8's
        refuse_output(output)  # ExportError: it is an input, a folder, a device, or that page
        refuse_unwritable(output)  # ExportError: its folder takes no file

Outside of a run nothing is remembered: one run may write what another one reads.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import resources
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from deploy.errors import Calib8Error, ExportError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_Inode = tuple[int, int]


class _FileInodes:
    """The files of a dataset, possibly very many: two numbers per file."""

    def __init__(self, count: int, path: Callable[[int], Path]) -> None:
        self._devices, self._inodes = array("Q"), array("Q")
        self._path = path
        for index in range(count):
            state = _state(path(index))
            self._devices.append(0 if state is None else state.st_dev)
            self._inodes.append(0 if state is None else state.st_ino)

    def paths(self, inode: _Inode) -> Iterator[Path]:
        for index, number in enumerate(self._inodes):
            if number == inode[1] and self._devices[index] == inode[0]:
                yield self._path(index)


@dataclass(frozen=True, slots=True)
class _Inputs:
    files: dict[_Inode, str] = field(default_factory=dict)  # -> path
    file_lists: list[_FileInodes] = field(default_factory=list)
    outputs: dict[str, Callable[[], None]] = field(default_factory=dict)  # named by the user

    def copy(self) -> _Inputs:
        return _Inputs(dict(self.files), list(self.file_lists), self.outputs)

    def paths(self, inode: _Inode) -> Iterator[Path | str]:
        if inode in self.files:
            yield self.files[inode]
        for one in self.file_lists:
            yield from one.paths(inode)


_INPUTS: ContextVar[_Inputs | None] = ContextVar("_READ", default=None)


@contextmanager
def guard_inputs() -> Iterator[None]:
    """Remember inputs until the end of the body; an enclosing run shares its inputs and these."""
    around = _INPUTS.get()
    inputs = _Inputs() if around is None else around.copy()
    token = _INPUTS.set(inputs)
    try:
        yield
    finally:
        _INPUTS.reset(token)
        if around is not None:
            around.files.update(inputs.files)
            around.file_lists[:] = inputs.file_lists


def add_input_file(path: Path | str) -> None:
    """Remember a file as an input of this run; ignore a path that does not exist."""
    inputs = _INPUTS.get()
    if inputs is not None and (state := _state(path)) is not None:
        inputs.files[state.st_dev, state.st_ino] = os.fspath(path)


def add_input_files(count: int, path: Callable[[int], Path]) -> None:
    """Remember many files as inputs of this run.

    Args:
        count: number of files.
        path: number of a file, from 0 -> its path; called again when something is written.
    """
    inputs = _INPUTS.get()
    if inputs is not None:
        inputs.file_lists.append(_FileInodes(count, path))


def add_output(path: Path | str, check: Callable[[], None]) -> None:
    """Remember a file that the user named as an output of this run.

    `check`: raises if the file that is there must stay; called now and before it is replaced.

    Raises:
        ExportError: see `refuse_output` and `refuse_unwritable`.
    """
    refuse_output(path)
    refuse_unwritable(path)
    if (inputs := _INPUTS.get()) is not None:
        inputs.outputs[_place(path)] = check
    check()


def refuse_output(path: Path | str, *, named: bool = False) -> None:
    """Refuse to write over an input, a folder, a device, or another output that the user named.

    `named`: it may be such an output, and is judged by its `check` (`add_output`).

    Raises:
        ExportError: `path` is one of these.
    """
    check = (_INPUTS.get() or _Inputs()).outputs.get(_place(path))
    if check is not None and not named:
        raise ExportError(f"each output must have a path of its own, got {path} twice; change one")
    state = _state(path)
    if state is None:
        return
    # directly in /dev; /dev/stdout may lead to a plain file
    in_dev = os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"
    if not stat.S_ISREG(state.st_mode) or in_dev:
        kind = "a folder" if stat.S_ISDIR(state.st_mode) else "a device"
        raise ExportError(f"{path} must be a file to write to, got {kind}; give another path")
    if _is_input((state.st_dev, state.st_ino)):
        raise ExportError(
            f"an output must not be an input, got {path}, which this run reads; give another path"
        )
    if check is not None:
        check()


def refuse_unwritable(path: Path | str) -> None:
    """Refuse an output that cannot be written, before a run is spent on it.

    Raises:
        ExportError: the folder that it is in, or would be made in, takes no new file.
    """
    there = next(p for p in Path(os.path.abspath(path)).parents if os.path.lexists(p))
    if not os.access(f"{there}/.", os.W_OK | os.X_OK):
        raise ExportError(
            f"{path} must be in a folder that can be written to, got {there}; give another path"
        )


def _place(path: Path | str) -> str:
    """Return a file's name in its real folder: what a rename replaces."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _is_input(inode: _Inode) -> bool:
    """Return whether an input still has this inode; a new file may reuse a deleted input's."""
    states = map(_state, (_INPUTS.get() or _Inputs()).paths(inode))
    return any(state and (state.st_dev, state.st_ino) == inode for state in states)


def _state(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


FilePath = str | os.PathLike[str]
T = TypeVar("T")

MOST_BYTES = 16 << 30  # of a file that is read at once
MOST_TEXT = 64 << 20  # of a text file
MOST_NESTING = 64  # depth of brackets in JSON
_PIECE = 1 << 20  # bytes per read: Python allocates the size requested

_ONE_BRACKET_KIND = bytes.maketrans(b"{}", b"[]")
_OTHER_BYTES = bytes(code for code in range(256) if code not in b'"[]{}')


def read_bytes(
    path: FilePath,
    *,
    what: str,
    error: type[Calib8Error],
    most: int = MOST_BYTES,
    own: bool = False,
) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: of the file.
        what: the file must be, such as "a plan".
        error: class of the error to raise.
        most: maximum size in bytes.
        own: the run may write the file again, such as its cache: it is not an input.

    Raises:
        error: no such file, not a regular file, too large, or unreadable.
    """
    with open_regular_file(path, what=what, error=error, most=most, own=own) as file:
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
        while len(data) <= most and (more := file.read(_PIECE)):  # it grew, or reports no size
            data += more
    if len(data) > most:
        raise error(_too_large(path, what, len(data), most))
    return data


def read_text(
    path: FilePath, *, what: str, error: type[Calib8Error], most: int = MOST_TEXT, own: bool = False
) -> str:
    """Return the text of a regular file in UTF-8, with or without a byte order mark.

    Raises:
        error: see `read_bytes`; or the bytes are not UTF-8.
    """
    data = read_bytes(path, what=what, error=error, most=most, own=own)
    return _decoded(data, f"{os.fspath(path)} must be {what}", error)


@contextmanager
def open_regular_file(
    path: FilePath,
    *,
    what: str,
    error: type[Calib8Error],
    most: int | None = None,
    own: bool = False,
) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; an OSError in the body becomes `error`.

    Raises:
        error: see `read_bytes`.
    """
    with open(_descriptor(path, what, error), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise error(_too_large(path, what, size, most))
        if not own:
            add_input_file(os.fspath(path))
        try:
            yield file
        except OSError as refused:
            raise error(_refused(path, what, refused)) from refused


def read_package_text(package: str, name: str) -> str:
    """Return the text of a file that calib8 ships inside a package."""
    return (resources.files(package) / name).read_text("utf-8")


def read_json(
    path: FilePath, *, what: str, error: type[Calib8Error], most: int = MOST_TEXT, own: bool = False
) -> Any:
    """Return the value of a JSON file.

    Raises:
        error: see `read_text`; or no JSON, or nested deeper than `MOST_NESTING`.
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
    """Return the value of a JSON text.

    Args:
        text: JSON; bytes are UTF-8.
        rule: beginning of the error message: what the text must be.
        error: class of the error to raise.
        pairs: makes an object of its keys and values; None makes a dict.
        constant: makes a value of NaN, Infinity or -Infinity; None makes a float.

    Raises:
        error: no JSON, or nested deeper than `MOST_NESTING`.
    """
    import json

    if isinstance(text, bytes):
        text = _decoded(text, rule, error)
    if is_too_nested(text):
        raise error(f"{rule}, got JSON with over {MOST_NESTING} nested brackets; write it flat")
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as wrong:
        reason = f"{wrong.msg} at line {wrong.lineno}"
    except ValueError as wrong:  # an integer with thousands of digits
        reason = str(wrong)
    raise error(f"{rule}, got invalid JSON: {reason}; write it again")


def convert(
    held: Any,
    kind: type[T],
    *,
    rule: str,
    error: type[Calib8Error],
    way_out: str = "write it again",
    strict: bool = True,
) -> T:
    """Return values of JSON or TOML as `kind`, such as a dataclass; unknown keys are ignored.

    Args:
        held: the values.
        kind: their type, by whose fields every value is checked.
        rule: beginning of the error message: what they must be.
        error: class of the error to raise.
        way_out: end of the error message.
        strict: False takes a text such as "nan" for a number too.

    Raises:
        error: names the first value of another type, and its place.
    """
    import msgspec

    try:
        return msgspec.convert(held, kind, strict=strict, str_keys=True)
    except ValueError as wrong:  # also a key that is not Unicode
        raise error(f"{rule}, got: {wrong}; {way_out}") from wrong


def is_too_nested(text: str) -> bool:
    """Return whether a JSON text is nested deeper than `MOST_NESTING`, without recursion."""
    data = text.encode("utf-8", "surrogatepass").replace(b"\\\\", b"").replace(b'\\"', b"")
    left = re.sub(rb'"[^"]*"', b"", data.translate(_ONE_BRACKET_KIND, _OTHER_BYTES))
    for _ in range(MOST_NESTING):  # each round removes the innermost pairs
        left = left.replace(b"[]", b"")
    return b"[]" in left or left.count(b"[") > MOST_NESTING


def _decoded(data: bytes, rule: str, error: type[Calib8Error]) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise error(f"{rule} in UTF-8, got other bytes; save it as UTF-8") from wrong


def refuse_irregular(path: FilePath, *, what: str, error: type[Calib8Error]) -> None:
    """Raise unless `path` is a regular file; remember it as an input.

    Raises:
        error: no such file, or not a regular file.
    """
    os.close(_descriptor(path, what, error))
    add_input_file(os.fspath(path))


def is_text(path: FilePath) -> bool:
    """Return whether a path's bytes are UTF-8, as libraries in C++ expect it."""
    try:
        return os.fsencode(path) == str(path).encode("utf-8")
    except UnicodeError:
        return False


def _descriptor(path: FilePath, what: str, error: type[Calib8Error]) -> int:
    """Open a file; check its kind before and after, since opening a pipe blocks."""
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
    """Return what a path is instead of a regular file; empty for a regular file."""
    if stat.S_ISREG(state.st_mode):
        return ""
    return "a folder" if stat.S_ISDIR(state.st_mode) else "a device or pipe"


def _refused(path: FilePath, what: str, refused: OSError | ValueError) -> str:
    if isinstance(refused, FileNotFoundError):
        return f"{os.fspath(path)} must be {what}, got nothing there; check the path"
    reason = getattr(refused, "strerror", None) or str(refused)
    return (
        f"{os.fspath(path)} must be {what} that can be read, got: {reason}; check its permissions"
    )


def _too_large(path: FilePath, what: str, got: int, most: int) -> str:
    return (
        f"{os.fspath(path)} must be {what} of at most {format_bytes(most)}, got"
        f" {format_bytes(got)}; check that it is the right file"
    )


def format_bytes(count: int) -> str:
    """Return a number of bytes in binary units: 223 KiB."""
    amount = float(count)
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"


if TYPE_CHECKING:
    Header = tuple[tuple[int, ...], bool, np.dtype[Any]]

# numpy parses headers as Python code, and Python 3.11 sometimes fails at that in several threads
# (python/cpython#106905)
HEADERS = threading.Lock()
MOST_ENTRIES = 1 << 20
MOST_UNPACKED = 16 << 30  # bytes of all entries
_MOST_LISTING = 128 << 20  # bytes of an archive's table of contents


def check_archive(
    file: IO[bytes],
    path: FilePath,
    *,
    what: str,
    error: type[Calib8Error],
    entries: int = MOST_ENTRIES,
    most: int = MOST_UNPACKED,
) -> None:
    """Refuse an archive that would unpack to more than a budget, before anything is unpacked.

    `zipfile` unpacks at most the size in an entry's header.

    Args:
        file: the archive; it is left at its beginning.
        path: its name in messages.
        what: the file must be, such as "an .npz file".
        error: class of the error to raise.
        entries: maximum number of entries.
        most: maximum size of all entries unpacked, in bytes.

    Raises:
        error: too many entries or bytes.
        BadZipFile: no zip archive.
    """
    import zipfile

    rule = (
        f"{os.fspath(path)} must be {what} of at most {entries:,} entries and {format_bytes(most)}"
    )
    if (listing := _listing_bytes(file)) > _MOST_LISTING:
        raise error(
            f"{rule}, got {format_bytes(listing)} of names alone; write several smaller ones"
        )
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        total = sum(entry.file_size for entry in listed)
    file.seek(0)
    if len(listed) > entries or total > most:
        raise error(
            f"{rule} unpacked, got {len(listed):,} and {format_bytes(total)}; write several"
            " smaller ones"
        )


def array_header(stream: IO[bytes], room: int) -> Header:
    """Read (shape, Fortran order, dtype) of an .npy file; the values follow in the stream.

    Args:
        stream: at the beginning of the .npy file.
        room: upper bound of the file's size in bytes.

    Raises:
        ValueError: not numpy's format, Python objects, or more values than bytes.
    """
    import tokenize
    import warnings

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
            warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
            shape, fortran, dtype = read_header(stream)
    except (tokenize.TokenError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(side < 0 for side in shape) or prod(shape) * dtype.itemsize > room:
        raise ValueError(f"its header claims {dtype} {list(shape)}, which is more than is there")
    return shape, fortran, dtype


def read_array(stream: IO[bytes], room: int) -> NDArray[Any]:
    """Read an array of an .npy file; see `array_header`."""
    import numpy as np

    shape, fortran, dtype = array_header(stream, room)
    data = bytearray(stream.read(prod(shape) * dtype.itemsize))
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array.reshape(shape, order="F" if fortran else "C")


def _listing_bytes(file: IO[bytes]) -> int:
    """Return the size of a zip archive's table of contents in bytes; 0 without one."""
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - (1 << 17)))  # the end record, its comment and zip64's end record
    tail = file.read()
    file.seek(0)
    listing = 0
    for magic, at, width in ((b"PK\x05\x06", 12, 4), (b"PK\x06\x06", 40, 8)):
        start = tail.rfind(magic)
        field_value = int.from_bytes(tail[start + at : start + at + width], "little")
        if start >= 0 and field_value != 0xFFFFFFFF:
            listing = max(listing, field_value)
    return min(listing, file_size)
