"""Pictures on disk: finding them, reading a list of them, decoding one.

Decoding is OpenCV's `imdecode` of the whole file: 8 bits per channel (16-bit pictures keep their
upper byte), alpha dropped, grey repeated to three channels where colour is asked for, EXIF
orientation applied, the first picture of an animation.

A damaged picture is no picture, even where a decoder makes one of it. PNG has checksums; of a JPEG
libjpeg tells what is amiss. WebP has neither: libwebp refuses data that end too early, and of other
damage inside nobody can tell.

What a decoder says beside its pixels: the lines that libjpeg and libpng print on stderr.

libjpeg decodes damaged pictures as well as it can and tells of it in a line on stderr alone; OpenCV
passes nothing on. These libraries write to the C library's `stderr`, a variable, while all else
(Python, the runtimes, programs that are started) writes to file descriptor 2. So for the moment of
decoding the variable is pointed at a file without a name::

    libjpeg, libpng --fprintf--> stderr ---> nameless file --> the decoder's words
    everybody else  --write----> descriptor 2 --> the screen, as ever

The descriptor is never touched: nothing of others is lost or late, whenever the process ends. Where
the C library has no such variable (not glibc, not macOS) decoding goes on without the words.

Several threads decode at once. Words that fall meanwhile are nobody's in particular: whoever was
decoding does it again by itself, and has them, or not.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from deploy.errors import FeedError
from deploy.feed import headers
from deploy.feed.headers import sides
from deploy.feed.listing import Listing, Picture
from deploy.files.reading import read_bytes
from deploy.tensors import Array

T = TypeVar("T")
_MOST = 1 << 16  # bytes that are read of what a decoder says


@contextmanager
def overheard() -> Iterator[list[str]]:
    """The lines that decoders print meanwhile, in a list that is filled at the end.

    One decoder is heard at a time; another thread's waits.
    """
    ear = _ear()
    if ear is None:
        yield []
        return
    with ear.alone() as lines:
        yield lines


def heard(decode: Callable[[], T]) -> tuple[T, list[str]]:
    """What a function gives, and the lines that it printed; others may decode meanwhile.

    It is called a second time, alone, where words fell that may be its own.
    """
    ear = _ear()
    if ear is None:
        return decode(), []
    with ear.among() as words:
        found = decode()
    if words.own or not words.lines:
        return found, words.lines
    with ear.alone() as lines:
        found = decode()
    return found, lines


@dataclass(slots=True)
class _Words:
    """What was said while somebody listened, and whether nobody else was there."""

    lines: list[str] = field(default_factory=list)
    own: bool = False


class _Ear:
    """A nameless file that takes the place of the C library's stderr, again and again."""

    def __init__(self, stderr: ctypes.c_void_p, stream: int, handle: int) -> None:
        self._stderr, self._stream, self._handle = stderr, stream, handle
        self._own: int | None = None
        self._turn = threading.Condition()
        self._inside = 0  # who decode now
        self._entered = 0  # who ever did
        self._alone = 0  # who wait to be alone, or are

    @contextmanager
    def among(self) -> Iterator[_Words]:
        """Listen, others too."""
        with self._turn:
            self._turn.wait_for(lambda: not self._alone)
            begun = self._enter()
            number, first = self._entered, self._inside == 1
        words = _Words()
        try:
            yield words
        finally:
            with self._turn:
                words.own = first and self._entered == number
                words.lines = self._leave(begun)

    @contextmanager
    def alone(self) -> Iterator[list[str]]:
        """Listen, while nobody else decodes; the lines are there at the end."""
        with self._turn:
            self._alone += 1
            self._turn.wait_for(lambda: not self._inside)
            begun = self._enter()
        lines: list[str] = []
        try:
            yield lines
        finally:
            with self._turn:
                self._alone -= 1
                lines += self._leave(begun)

    def _enter(self) -> int:
        """Listen from here on; gives what was written before."""
        self._inside += 1
        self._entered += 1
        if self._inside == 1:
            self._own, self._stderr.value = self._stderr.value, self._stream
        return os.fstat(self._handle).st_size

    def _leave(self, begun: int) -> list[str]:
        """What was said since; the last one puts the C library's stderr back."""
        self._inside -= 1
        if not self._inside:
            self._stderr.value = self._own
        size = os.fstat(self._handle).st_size
        said = os.pread(self._handle, min(size - begun, _MOST), begun) if size > begun else b""
        if not self._inside and size:
            os.ftruncate(self._handle, 0)
        self._turn.notify_all()
        text = said.decode("ascii", "backslashreplace")
        shown = ("".join(c for c in line if c.isprintable()).strip() for line in text.splitlines())
        return [line for line in shown if line]


@lru_cache(maxsize=1)
def _ear() -> _Ear | None:
    """Made once; the stream is never closed, since a thread may be about to write to it."""
    name = {"linux": "stderr", "darwin": "__stderrp"}.get(sys.platform)
    try:
        library = ctypes.CDLL(None)
        if name is None or (name == "stderr" and not hasattr(library, "gnu_get_libc_version")):
            return None  # musl's is a constant
        stderr = ctypes.c_void_p.in_dll(library, name)
        handle = _nameless()
        library.fdopen.restype = ctypes.c_void_p
        stream = library.fdopen(os.dup(handle), b"a")
        unbuffered = 2
        library.setvbuf(ctypes.c_void_p(stream), None, unbuffered, ctypes.c_size_t(0))
    except (OSError, ValueError, AttributeError):
        return None
    return _Ear(stderr, stream, handle) if stream else None


def _nameless() -> int:
    """A file in memory where the system has such, so that a full disk swallows no word."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("calib8-words")
    with tempfile.TemporaryFile(prefix="calib8-") as file:
        return os.dup(file.fileno())


SUFFIXES = frozenset(
    (".bmp", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
# Pictures that not every OpenCV reads.
_OTHERS = frozenset((
    ".arw", ".avif", ".cr2", ".cr3", ".dng", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jp2",
    ".jxl", ".nef", ".orf", ".psd", ".raf", ".rw2", ".tga",
))  # fmt: skip
LARGEST_FILE = 1 << 30  # bytes
LARGEST_PICTURE = 1 << 28  # pixels, which take 768 MB when decoded
_LARGEST_LIST = 256 << 20
_KINDS = "a folder of images, a UTF-8 list of them, an image, an .npy or an .npz file"
# What libjpeg says of pixels; of a profile, a revision or a colour transform it says other things.
_DAMAGE = re.compile(
    r"Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG|Inconsistent progression"
)
_PNG = b"\x89PNG\r\n\x1a\n"


def shown(name: str) -> str:
    """A file name fit for a message: one line, printable whatever its bytes."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_image(path: Path | str) -> bool:
    """Whether the suffix, in any case, is one that is read as a picture."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def is_other(path: Path | str) -> bool:
    """Whether the suffix, in any case, is of a picture that is not read."""
    return os.path.splitext(path)[1].lower() in _OTHERS


def kinds(names: Iterable[str]) -> str:
    """The suffixes of some files, in words."""
    return ", ".join(sorted({os.path.splitext(name)[1].lower() for name in names}))


def walked(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Relative paths of the wanted files below a folder, sorted by their bytes.

    Hidden files and folders (a leading dot) are passed over; links to folders are not followed.

    Raises:
        FeedError: a folder that cannot be read.
    """
    found: list[str] = []
    for root, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(root, folder)
        kept = (name for name in files if not name.startswith(".") and wanted(name))
        found += [name if inside == "." else f"{inside}/{name}" for name in kept]
    return sorted(found, key=os.fsencode)


def read_list(path: Path) -> Listing:
    """A list file: one "path" or "path label" a line, paths relative to the list's folder.

    UTF-8 with or without a byte order mark, LF or CRLF; empty lines and lines starting with
    ``#`` are passed over; paths may hold spaces. A line that is a file as a whole has no label.

    Raises:
        FeedError: not a text file, no line, or labels that are missing or not whole numbers.
    """
    pictures = Listing(path.parent)
    unlabelled, first = 0, 0
    for number, line in _lines(path):
        name, label = _parse_line(path, number, line)
        pictures.add(name, label)
        if label is None:
            unlabelled, first = unlabelled + 1, first or number
    if not pictures:
        raise FeedError(f"{shown(str(path))} must list images, got no line; write one path a line")
    if 0 < unlabelled < len(pictures):
        raise FeedError(
            f"every line of {shown(str(path))} or none must have a label, got"
            f" {unlabelled} of {len(pictures)} without, the first on line {first};"
            " add them or remove all labels"
        )
    return pictures


def read(picture: Picture) -> bytes:
    """The whole file.

    Raises:
        FeedError: it is missing, unreadable, empty or too large.
    """
    try:
        state = picture.path.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe would be waited for, forever
            raise FeedError(f"image {shown(picture.name)} cannot be read: it is no regular file")
        if state.st_size > LARGEST_FILE:
            raise FeedError(
                f"image {shown(picture.name)} must be of at most {LARGEST_FILE >> 30} GB, got"
                f" {state.st_size / 2**30:.1f} GB"
            )
        data = picture.path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FeedError(f"image {shown(picture.name)} cannot be read: {reason}") from error
    if not data:
        raise FeedError(f"image {shown(picture.name)} is an empty file")
    return data


def decode(data: bytes, name: str, *, grey: bool) -> Array:
    """File bytes -> uint8 [H, W, 3] BGR, or [H, W, 1] grey.

    Raises:
        FeedError: the bytes are no whole picture that OpenCV can read, or one too large.
    """
    _check_size(data, name)
    fault = _fault(data)
    if fault is None:
        pixels, said = _decoded(data, grey)
        if (damage := next(filter(_DAMAGE.search, said), None)) is not None:
            raise FeedError(
                f"image {shown(name)} is damaged ({len(data)} bytes), its decoder says: {damage}"
            )
        if pixels is not None and pixels.size:
            out: Array = pixels.reshape(pixels.shape[0], pixels.shape[1], -1)
            return out
        fault = ": ".join(("damaged or of an unknown kind", *said[-1:]))
    raise FeedError(f"image {shown(name)} cannot be decoded ({len(data)} bytes, {fault})")


def _check_size(data: bytes, name: str) -> None:
    found = sides(data)
    if found is not None and found[0] * found[1] > LARGEST_PICTURE:
        raise FeedError(
            f"image {shown(name)} must have at most {LARGEST_PICTURE:,} pixels, got"
            f" {found[0]}x{found[1]}; give a smaller copy of it"
        )


def _decoded(data: bytes, grey: bool) -> tuple[Array | None, list[str]]:
    """What OpenCV makes of the bytes, and what the decoder behind it said."""
    cv2 = opencv()
    flag = cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR

    def pixels() -> Array | None:
        try:
            found: Array | None = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
        except (cv2.error, MemoryError):
            return None
        return found

    return heard(pixels)


def opencv() -> Any:
    """The cv2 module with one thread of its own and no messages on stderr.

    Without Intel's IPP, whose cubic resize rounds otherwise on every 30th pixel: the pixels are
    then those of every OpenCV from 4.6 to 5.0, with IPP built in or not.
    """
    cv2 = _quiet_opencv()
    cv2.ipp.setUseIPP(False)  # a setting of the calling thread only
    return cv2


@lru_cache(maxsize=1)
def _quiet_opencv() -> Any:
    import cv2

    cv2.setNumThreads(1)
    if hasattr(cv2, "setLogLevel"):  # OpenCV 4
        cv2.setLogLevel(0)  # silent, for which it has no name there
    else:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2


def summary(names: Sequence[str], most: int = 5) -> str:
    """The first few names and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shown, names[:most])) + more


def _unreadable(error: OSError) -> None:
    raise FeedError(
        f"folder {shown(str(error.filename))} cannot be read: {error.strerror}; make it readable"
    ) from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    data = read_bytes(path, what=_KINDS, error=FeedError, most=_LARGEST_LIST)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_a_list(path) from error
    if "\0" in text:
        raise _not_a_list(path)
    number, at = 0, 0
    while at <= len(text):  # one after the other: all of them at once take more than the text
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        number, line, at = number + 1, text[at:end].strip(), end + 1
        if line and not line.startswith("#"):
            yield number, line


def _not_a_list(path: Path) -> FeedError:
    return FeedError(
        f"{shown(str(path))} must be {_KINDS}, got a file that is none of these; check the path"
    )


def _parse_line(listing: Path, number: int, line: str) -> tuple[str, int | None]:
    folder = listing.parent
    parts = line.rsplit(None, 1)
    if len(parts) == 1 or _is_file(folder / line):
        return line, None
    name, token = parts
    if re.fullmatch(r"\d{1,9}", token, re.ASCII):
        return name, int(token)
    if _is_file(folder / name):
        raise FeedError(
            f"a label must be a whole number from 0, got {token!r} on line {number} of"
            f" {shown(str(listing))}; number the classes as the model's outputs are"
        )
    return line, None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _fault(data: bytes) -> str | None:
    if data.startswith(_PNG):
        return _png_fault(data)
    return headers.fault(data) if data.startswith(b"\xff\xd8") else None


def _png_fault(data: bytes) -> str | None:
    """What is wrong with the chunks of a PNG; checked here since libpng prints to stderr."""
    at, view = len(_PNG), memoryview(data)
    while at + 12 <= len(data):
        length = int.from_bytes(view[at : at + 4], "big")
        end = at + 12 + length
        if end > len(data):
            return "cut short"
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return "damaged: a checksum does not fit"
        if data[at + 4 : at + 8] == b"IEND":
            return None
        at = end
    return "cut short"
