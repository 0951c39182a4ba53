"""Find image files, read lists of them, decode them, and capture the decoder's warnings.

Decoding is OpenCV's `imdecode` of the complete file: 8 bits per channel (of 16 bits the upper 8,
unless all are asked for), alpha dropped, grey repeated to three channels if color is needed, EXIF
orientation applied, the first frame of an animation.

A damaged image is refused even if a decoder returns pixels. PNG has checksums, and libjpeg warns
about a damaged JPEG. WebP has neither: libwebp refuses truncated data, other damage is invisible.

libjpeg decodes damaged images as well as it can and reports the damage on stderr only; OpenCV does
not pass it on. libjpeg and libpng write to the C library's variable `stderr`, whereas all else
(Python, the runtimes, subprocesses) writes to file descriptor 2. So while an image is decoded, the
variable points to a temporary file without a name::

    libjpeg, libpng --fprintf--> stderr ---> temporary file --> warnings
    everybody else  --write----> descriptor 2 --> the screen, as before

The descriptor is never touched, so other output is neither lost nor late, whenever the process
ends. Without such a variable (not glibc, not macOS) images are decoded without the warnings.

Several threads decode at once, and a warning cannot be attributed to one of them. If one appears,
every thread that was decoding then decodes its image again alone.
"""

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
from deploy.feed.file_list import FileList, ImageFile
from deploy.feed.headers import read_image_size
from deploy.files.reading import read_bytes
from deploy.tensors import Array

T = TypeVar("T")
_MOST = 1 << 16  # bytes read of a decoder's output


@contextmanager
def capture_decoder_output() -> Iterator[list[str]]:
    """Capture the lines that decoders print in the body; the list is filled at the end.

    Other threads that decode wait until the body ends.
    """
    capture = _stderr_capture()
    if capture is None:
        yield []
        return
    with capture.during(alone=True) as words:
        yield words.lines


def call_and_capture(decode: Callable[[], T]) -> tuple[T, list[str]]:
    """Call `decode` and return its result and the lines that it printed.

    Other threads may decode meanwhile. If lines appeared that may be theirs, `decode` is called
    again, alone.
    """
    capture = _stderr_capture()
    if capture is None:
        return decode(), []
    with capture.during(alone=False) as words:
        result = decode()
    if words.lines and not words.was_alone:
        with capture.during(alone=True) as words:
            result = decode()
    return result, words.lines


@dataclass(slots=True)
class _CapturedLines:
    lines: list[str] = field(default_factory=list)
    was_alone: bool = False  # whether no other thread was decoding


class _StderrCapture:
    """Redirects the C library's stderr to a temporary file while threads decode."""

    def __init__(self, stderr: ctypes.c_void_p, stream: int, handle: int) -> None:
        self._stderr, self._stream, self._handle = stderr, stream, handle
        self._original: int | None = None
        self._changed = threading.Condition()
        self._inside = 0  # threads decoding now
        self._entered = 0  # threads that ever entered
        self._alone = 0  # threads that decode alone or wait to do so

    @contextmanager
    def during(self, *, alone: bool) -> Iterator[_CapturedLines]:
        """Capture, if `alone` while no other thread decodes; the lines are there at the end."""
        words = _CapturedLines()
        with self._changed:
            self._alone += alone
            self._changed.wait_for(lambda: not (self._inside if alone else self._alone))
            begun = self._enter()
            number, first = self._entered, self._inside == 1
        try:
            yield words
        finally:
            with self._changed:
                self._alone -= alone
                words.was_alone = first and self._entered == number
                words.lines += self._leave(begun)

    def _enter(self) -> int:
        """Start capturing; return the size of the file so far."""
        self._inside += 1
        self._entered += 1
        if self._inside == 1:
            self._original, self._stderr.value = self._stderr.value, self._stream
        return os.fstat(self._handle).st_size

    def _leave(self, begun: int) -> list[str]:
        """Return the lines since `begun`; the last thread restores the C library's stderr."""
        self._inside -= 1
        if not self._inside:
            self._stderr.value = self._original
        size = os.fstat(self._handle).st_size
        output = os.pread(self._handle, min(size - begun, _MOST), begun) if size > begun else b""
        if not self._inside and size:
            os.ftruncate(self._handle, 0)
        self._changed.notify_all()
        text = output.decode("ascii", "backslashreplace")
        shown = ("".join(c for c in line if c.isprintable()).strip() for line in text.splitlines())
        return [line for line in shown if line]


@lru_cache(maxsize=1)
def _stderr_capture() -> _StderrCapture | None:
    """Create the capture once; its stream is never closed, since a thread may still write to it."""
    name = {"linux": "stderr", "darwin": "__stderrp"}.get(sys.platform)
    try:
        library = ctypes.CDLL(None)
        if name is None or (name == "stderr" and not hasattr(library, "gnu_get_libc_version")):
            return None  # constant in musl
        stderr = ctypes.c_void_p.in_dll(library, name)
        handle = _open_unnamed_file()
        library.fdopen.restype = ctypes.c_void_p
        stream = library.fdopen(os.dup(handle), b"a")
        unbuffered = 2
        library.setvbuf(ctypes.c_void_p(stream), None, unbuffered, ctypes.c_size_t(0))
    except (OSError, ValueError, AttributeError):
        return None
    return _StderrCapture(stderr, stream, handle) if stream else None


def _open_unnamed_file() -> int:
    """Create a file, in memory if possible, so that a full disk loses no warning."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("calib8-words")
    with tempfile.TemporaryFile(prefix="calib8-") as file:
        return os.dup(file.fileno())


SUFFIXES = frozenset(
    (".bmp", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
# Image formats that not every build of OpenCV reads.
_OTHERS = frozenset((
    ".arw", ".avif", ".cr2", ".cr3", ".dng", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jp2",
    ".jxl", ".nef", ".orf", ".psd", ".raf", ".rw2", ".tga",
))  # fmt: skip
LARGEST_FILE = 1 << 30  # bytes
LARGEST_PICTURE = 1 << 28  # pixels: 768 MB when decoded
_LARGEST_LIST = 256 << 20
_KINDS = "a folder of images, a UTF-8 list of them, an image, an .npy or an .npz file"
# libjpeg's warnings on pixels, not those on a profile, a revision or a color transform.
_DAMAGE = re.compile(
    r"Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG|Inconsistent progression"
)
_PNG = b"\x89PNG\r\n\x1a\n"


def printable_name(name: str) -> str:
    """Return a file name for a message: one line, printable whatever its bytes."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_image(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a supported image format."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def is_unsupported_image(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of an unsupported image format."""
    return os.path.splitext(path)[1].lower() in _OTHERS


def join_suffixes(names: Iterable[str]) -> str:
    """Return the suffixes of some files, sorted and comma-separated."""
    return ", ".join(sorted({os.path.splitext(name)[1].lower() for name in names}))


def walk_files(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Return the relative paths of the wanted files in a folder tree, sorted by their bytes.

    Hidden files and folders (with a leading dot) are skipped; links to folders are not followed.

    Raises:
        FeedError: a folder cannot be read.
    """
    paths: list[str] = []
    for root, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(root, folder)
        names = (name for name in files if not name.startswith(".") and wanted(name))
        paths += [name if inside == "." else f"{inside}/{name}" for name in names]
    return sorted(paths, key=os.fsencode)


def read_list(path: Path) -> FileList:
    """Read a list file: one "path" or "path label" per line, paths relative to the list's folder.

    A line may name one file per input, separated by spaces, as RKNN's dataset.txt does.

    UTF-8 with or without a byte order mark, LF or CRLF; empty lines and lines starting with
    ``#`` are skipped; paths may contain spaces. A line that is itself the path of a file has no
    label.

    Raises:
        FeedError: not a text file, no line, or labels that are missing or not whole numbers.
    """
    pictures = FileList(path.parent)
    unlabelled, first = 0, 0
    for number, line in _lines(path):
        name, label = _parse_line(path, number, line)
        pictures.add(name, label)
        if label is None:
            unlabelled, first = unlabelled + 1, first or number
    if not pictures:
        raise FeedError(
            f"{printable_name(str(path))} must list images, got no line; write one path per line"
        )
    if 0 < unlabelled < len(pictures):
        raise FeedError(
            f"every line of {printable_name(str(path))} or none must have a label, got {unlabelled}"
            f" of {len(pictures)} without, the first on line {first}; add them or remove all labels"
        )
    return pictures


def read_image_file(picture: ImageFile) -> bytes:
    """Return the bytes of an image file.

    Raises:
        FeedError: the file is missing, unreadable, empty or too large.
    """
    try:
        state = picture.path.stat()
        if not stat.S_ISREG(state.st_mode):  # reading a pipe would block forever
            raise FeedError(
                f"image {printable_name(picture.name)} cannot be read: it is no regular file"
            )
        if state.st_size > LARGEST_FILE:
            raise FeedError(
                f"image {printable_name(picture.name)} must be of at most {LARGEST_FILE >> 30} GB,"
                f" got {state.st_size / 2**30:.1f} GB"
            )
        data = picture.path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FeedError(f"image {printable_name(picture.name)} cannot be read: {reason}") from error
    if not data:
        raise FeedError(f"image {printable_name(picture.name)} is an empty file")
    return data


def decode_image(data: bytes, name: str, *, grey: bool, deep: bool = False) -> Array:
    """Decode a file's bytes to uint8 [H, W, 3] BGR, or [H, W, 1] grey.

    `deep` keeps all bits of a 16-bit image, as uint16.

    Raises:
        FeedError: the image is damaged, in a format that OpenCV does not read, or too large.
    """
    size = read_image_size(data)
    if size is not None and size[0] * size[1] > LARGEST_PICTURE:
        raise FeedError(
            f"image {printable_name(name)} must have at most {LARGEST_PICTURE:,} pixels, got"
            f" {size[0]}x{size[1]}; give a smaller copy of it"
        )
    fault = _fault(data)
    if fault is None:
        pixels, warnings = _decoded(data, grey, deep and headers.read_bit_depth(data) == 16)
        if (damage := next(filter(_DAMAGE.search, warnings), None)) is not None:
            raise FeedError(
                f"image {printable_name(name)} is damaged ({len(data)} bytes), its decoder says:"
                f" {damage}"
            )
        if pixels is not None and pixels.size:
            out: Array = pixels.reshape(pixels.shape[0], pixels.shape[1], -1)
            return out
        fault = ": ".join(("damaged or of an unknown format", *warnings[-1:]))
    raise FeedError(f"image {printable_name(name)} cannot be decoded ({len(data)} bytes, {fault})")


def _decoded(data: bytes, grey: bool, deep: bool) -> tuple[Array | None, list[str]]:
    cv2 = opencv()
    flag = cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR
    flag |= cv2.IMREAD_ANYDEPTH if deep else 0

    def imdecode() -> Array | None:
        try:
            pixels: Array | None = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
        except (cv2.error, MemoryError):
            return None
        return pixels

    return call_and_capture(imdecode)


def opencv() -> Any:
    """Return the cv2 module, set to one thread and no messages on stderr.

    It runs without Intel's IPP, whose cubic resize rounds every 30th pixel differently: so the
    pixels are equal for every OpenCV from 4.6 to 5.0, built with IPP or without.
    """
    cv2 = _quiet_opencv()
    cv2.ipp.setUseIPP(False)  # applies to the calling thread only
    return cv2


@lru_cache(maxsize=1)
def _quiet_opencv() -> Any:
    import cv2

    cv2.setNumThreads(1)
    if hasattr(cv2, "setLogLevel"):  # OpenCV 4
        cv2.setLogLevel(0)  # silent; OpenCV 4 has no constant for it
    else:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2


def summarize_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable_name, names[:most])) + more


def _unreadable(error: OSError) -> None:
    raise FeedError(
        f"folder {printable_name(str(error.filename))} cannot be read: {error.strerror}; make it"
        " readable"
    ) from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    data = read_bytes(path, what=_KINDS, error=FeedError, max_bytes=_LARGEST_LIST)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_a_list(path) from error
    if "\0" in text:
        raise _not_a_list(path)
    number, at = 0, 0
    while at <= len(text):  # one at a time: all lines at once take more memory than the text
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        number, line, at = number + 1, text[at:end].strip(), end + 1
        if line and not line.startswith("#"):
            yield number, line


def _not_a_list(path: Path) -> FeedError:
    return FeedError(
        f"{printable_name(str(path))} must be {_KINDS}, got a file that is none of these; check"
        " the path"
    )


def _parse_line(listing: Path, number: int, line: str) -> tuple[str, int | None]:
    folder = listing.parent
    parts = line.rsplit(None, 1)
    if len(parts) == 1 or os.path.isfile(folder / line):
        return line, None
    name, token = parts
    if re.fullmatch(r"\d{1,9}", token, re.ASCII):
        return name, int(token)
    if os.path.isfile(folder / name) and not os.path.isfile(folder / token):
        raise FeedError(
            f"a label must be a whole number from 0, got {token!r} on line {number} of"
            f" {printable_name(str(listing))}; number the classes in the order of the model's"
            " outputs"
        )
    return line, None


def _fault(data: bytes) -> str | None:
    if data.startswith(_PNG):
        # check the chunks here, since libpng reports damage on stderr only
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
    return headers.find_jpeg_damage(data) if data.startswith(b"\xff\xd8") else None
