"""Read files that anybody may have written: the only place where bytes of files come in.

A file is read only if it is a regular file (reading a pipe blocks, a device is endless) and within
a budget of bytes::

    read_bytes, read_text      an entire file
    open_regular_file          a file to be read in pieces
    read_json, from_json       values of JSON, up to `MAX_NESTING` brackets deep
    read_yaml, from_yaml       mappings, lists and texts of YAML
    convert                    values of JSON or TOML as a dataclass, checked by its fields' types
    refuse_irregular           for a library that opens a file by its path
    refuse_no_path             an empty text, or https:// and the like, in place of a path

A refusal is one sentence, raised as the caller's error class. A file that is read is an input of
the run (`deploy.files.guard`). `deploy.files.archives` reads zip archives and .npy arrays.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import IO, Any, TypeVar

from deploy.errors import Calib8Error, ConfigError
from deploy.files.guard import add_input_file

FilePath = str | os.PathLike[str]
ErrorClass = type[Calib8Error]
T = TypeVar("T")

MAX_BYTES = 16 << 30  # of a file that is read at once
MAX_TEXT_BYTES = 64 << 20  # of a text file
MAX_NESTING = 64  # depth of brackets in JSON
# of a YAML text, also its characters: a thousand class names take 30 KB, and 256 KB take seconds
_MAX_YAML_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20  # per read: Python allocates the size requested

_TO_SQUARE_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NEITHER_QUOTE_NOR_BRACKET = bytes(code for code in range(256) if code not in b'"[]{}')


def read_bytes(
    path: FilePath,
    *,
    what: str,
    error: ErrorClass,
    max_bytes: int = MAX_BYTES,
    rewritable: bool = False,
) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: of the file.
        what: the file must be, such as "a plan".
        error: class of the error to raise.
        max_bytes: maximum size.
        rewritable: the run may write the file again, such as its cache: it is not an input.

    Raises:
        error: no such file, not a regular file, too large, or unreadable.
    """
    with open_regular_file(
        path, what=what, error=error, max_bytes=max_bytes, rewritable=rewritable
    ) as file:
        size = os.fstat(file.fileno()).st_size
        # all of it, if the system tells its size; it may grow, even beyond the budget, meanwhile
        data = file.read(min(size, max_bytes) + 1)
        while len(data) <= max_bytes:
            chunk = file.read(_CHUNK_BYTES)
            if not chunk:
                return data
            data += chunk
    raise error(_too_large(path, what, len(data), max_bytes))


def read_text(
    path: FilePath,
    *,
    what: str,
    error: ErrorClass,
    max_bytes: int = MAX_TEXT_BYTES,
    rewritable: bool = False,
) -> str:
    """Return the text of a regular file in UTF-8, with or without a byte order mark.

    The arguments are those of `read_bytes`.

    Raises:
        error: see `read_bytes`; or the bytes are not UTF-8.
    """
    data = read_bytes(path, what=what, error=error, max_bytes=max_bytes, rewritable=rewritable)
    return _decode_utf8(data, f"{os.fspath(path)} must be {what}", error)


@contextmanager
def open_regular_file(
    path: FilePath,
    *,
    what: str,
    error: ErrorClass,
    max_bytes: int | None = None,
    rewritable: bool = False,
) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; an OSError in the body becomes `error`.

    The file is remembered as an input of the run, which the run must not write over.

    Args:
        path: of the file.
        what: the file must be, such as "a plan".
        error: class of the error to raise.
        max_bytes: maximum size; None for any.
        rewritable: the run may write the file again, such as its cache: it is not an input.

    Raises:
        error: see `read_bytes`.
    """
    with open(_open_descriptor(path, what, error), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise error(_too_large(path, what, size, max_bytes))
        if not rewritable:
            add_input_file(os.fspath(path))
        try:
            yield file
        except OSError as cause:
            raise error(_unreadable(path, what, cause)) from cause


def read_package_text(package: str, name: str) -> str:
    """Return the text of a file that calib8 ships inside a package."""
    return (resources.files(package) / name).read_text("utf-8")


def read_json(
    path: FilePath,
    *,
    what: str,
    error: ErrorClass,
    max_bytes: int = MAX_TEXT_BYTES,
    rewritable: bool = False,
) -> Any:
    """Return the value of a JSON file; the arguments are those of `read_bytes`.

    Raises:
        error: see `read_text`; or no JSON, or nested deeper than `MAX_NESTING`.
    """
    text = read_text(path, what=what, error=error, max_bytes=max_bytes, rewritable=rewritable)
    return from_json(text, rule=f"{os.fspath(path)} must be {what}", error=error)


def from_json(
    text: str | bytes,
    *,
    rule: str,
    error: ErrorClass,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON; bytes are UTF-8.
        rule: beginning of the error message: what the text must be.
        error: class of the error to raise.
        pairs: function that makes an object of its [(key, value), ...]; None for a dict.
        constant: function that makes a value of the text "NaN", "Infinity" or "-Infinity"; None for
            a float.

    Raises:
        error: no JSON, or nested deeper than `MAX_NESTING`.
    """
    import json

    if isinstance(text, bytes):
        text = _decode_utf8(text, rule, error)
    if is_too_nested(text):
        raise error(f"{rule}, got JSON with over {MAX_NESTING} nested brackets; write it flat")
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as cause:
        reason = f"{cause.msg} at line {cause.lineno}"
    except ValueError as cause:  # an integer with thousands of digits
        reason = str(cause)
    raise error(f"{rule}, got invalid JSON: {reason}; write it again")


def read_yaml(path: FilePath, *, what: str, error: ErrorClass) -> Any:
    """Return the value of a YAML file, see `from_yaml`; the arguments are those of `read_bytes`.

    Raises:
        error: see `read_text` and `from_yaml`.
    """
    text = read_text(path, what=what, error=error, max_bytes=_MAX_YAML_BYTES)
    return from_yaml(text, rule=f"{os.fspath(path)} must be {what}", error=error)


def from_yaml(text: str, *, rule: str, error: ErrorClass) -> Any:
    """Return the value of a YAML text: mappings, lists and texts, whatever its tags say.

    Numbers and booleans stay texts, since "no" and 010 are names too. No tag makes an object.

    Args:
        text: YAML.
        rule: beginning of the error message: what the text must be.
        error: class of the error to raise.

    Raises:
        error: no YAML, or nested too deep.
    """
    import yaml

    if len(text) > _MAX_YAML_BYTES:  # of its characters, each of one byte or more
        raise error(f"{rule} of at most {format_bytes(_MAX_YAML_BYTES)}, got more; shorten it")
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        reason = getattr(cause, "problem", None) or "a character that is not text"
        if mark is not None:
            reason += f" at line {mark.line + 1}"
    except RecursionError:
        reason = "too many nested values"
    except (ValueError, OverflowError):  # numbers in directives and escapes
        reason = "a number that is too large"
    raise error(f"{rule}, got invalid YAML: {reason}; write it again")


def convert(
    values: Any,
    kind: type[T],
    *,
    rule: str,
    error: ErrorClass,
    way_out: str = "write it again",
    strict: bool = True,
) -> T:
    """Return values of JSON, TOML or YAML as `kind`, such as a dataclass; unknown keys are ignored.

    Args:
        values: lists, dicts, texts and numbers.
        kind: what they become; each value must have the type of its field.
        rule: beginning of the error message: what they must be.
        error: class of the error to raise.
        way_out: end of the error message.
        strict: False takes a text such as "nan" for a number too.

    Raises:
        error: names the first value of another type, and its place.
    """
    import msgspec

    try:
        return msgspec.convert(values, kind, strict=strict, str_keys=True)
    except ValueError as cause:  # also a key that is not Unicode
        raise error(f"{rule}, got: {cause}; {way_out}") from cause


def is_too_nested(text: str) -> bool:
    """Return whether a JSON text is nested deeper than `MAX_NESTING`, without recursion."""
    # strings are removed, since brackets in them do not count: first what is escaped in them
    data = text.encode("utf-8", "surrogatepass").replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes_and_brackets = data.translate(_TO_SQUARE_BRACKETS, _NEITHER_QUOTE_NOR_BRACKET)
    brackets = re.sub(rb'"[^"]*"', b"", quotes_and_brackets)
    for _ in range(MAX_NESTING):  # each round removes the innermost pairs
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets or brackets.count(b"[") > MAX_NESTING


def _decode_utf8(data: bytes, rule: str, error: ErrorClass) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{rule} in UTF-8, got other bytes; save it as UTF-8") from cause


def refuse_irregular(path: FilePath, *, what: str, error: ErrorClass) -> None:
    """Raise unless `path` is a regular file; remember it as an input.

    Raises:
        error: no such file, or not a regular file.
    """
    os.close(_open_descriptor(path, what, error))
    add_input_file(os.fspath(path))


def refuse_no_path(path: object) -> None:
    """Refuse a text that is no path: an empty one, or the address of a page or a stream.

    Raises:
        ConfigError: `path` is "", which would be the current folder, or begins like https://.
    """
    if path == "":
        raise ConfigError("a path must not be empty; name a file or a folder")
    if isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise ConfigError(
            f"a path must be of a file or a folder, got the address {path}; download it, or record"
            " a stream as a video, and give that file"
        )


def is_utf8_path(path: FilePath) -> bool:
    """Return whether a path's bytes are UTF-8, as libraries in C++ expect it."""
    try:
        return os.fsencode(path) == str(path).encode("utf-8")
    except UnicodeError:
        return False


def _open_descriptor(path: FilePath, what: str, error: ErrorClass) -> int:
    """Return the descriptor of a regular file, opened for reading.

    Raises:
        error: no such file, not a regular file, or it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    except (OSError, ValueError) as cause:
        raise error(_unreadable(path, what, cause)) from cause
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or pipe"
        raise error(f"{os.fspath(path)} must be {what}, got {kind}; name a regular file")
    return descriptor


def _unreadable(path: FilePath, what: str, cause: OSError | ValueError) -> str:
    rule = f"{os.fspath(path)} must be {what}"
    if isinstance(cause, FileNotFoundError):
        return f"{rule}, got nothing there; check the path"
    reason = getattr(cause, "strerror", None) or str(cause)
    return f"{rule} that can be read, got: {reason}; check its permissions"


def _too_large(path: FilePath, what: str, size: int, max_bytes: int) -> str:
    return (
        f"{os.fspath(path)} must be {what} of at most {format_bytes(max_bytes)}, got"
        f" {format_bytes(size)}; check that it is the right file"
    )


def format_bytes(count: int) -> str:
    """Return a number of bytes in binary units: 223 KiB."""
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    amount = count / 1024**power
    unit = ("B", "KiB", "MiB", "GiB")[power]
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
