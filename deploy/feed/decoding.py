"""Decode image files with OpenCV, and capture the warnings of its decoders.

Decoding is OpenCV's `imdecode` of the complete file: 8 bits per channel (of 16 bits the upper 8,
unless all are requested), alpha dropped, a PNM scaled by its largest value, grey repeated to three
channels if color is needed, EXIF orientation applied, the first frame of an animation.

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

Several threads decode at once, and a warning cannot be attributed to one of them. If one of damage
appears, every thread that was decoding then decodes its image again while no other thread does.
"""

import ctypes
import os
import re
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.feed import headers
from deploy.feed.images import printable_name
from deploy.tensors import Array

MAX_PIXELS = 1 << 28  # of an image: 768 MB when decoded
_MAX_OUTPUT_BYTES = 1 << 24  # that are read of what decoders printed during a capture
_UNBUFFERED = 2  # _IONBF of the C library
# libjpeg's warnings on pixels, not those on a profile, a revision or a color transform
_DAMAGE_WARNING = re.compile(
    r"Corrupt JPEG data(?!: bad ICC)|Premature end of JPEG|Inconsistent progression"
)
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def decode_image(data: bytes, name: str, *, grey: bool, deep: bool = False) -> Array:
    """Decode a file's bytes to uint8 [H, W, 3] BGR, or [H, W, 1] grey.

    Args:
        data: the file's bytes.
        name: of the image in messages.
        grey: decode to one channel.
        deep: keep all bits of a 16-bit image, as uint16; else the upper 8.

    Raises:
        FeedError: the image is damaged, in a format that OpenCV does not read, or too large.
    """
    title = f"image {printable_name(name)}"
    _check_header(data, title)

    cv2 = opencv()
    flag = cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR
    # value of white in a PNM that OpenCV decodes without scaling it; None for other files
    unscaled_white = headers.read_unscaled_white(data)
    # all 16 bits, if they are requested, or to be scaled below
    if (deep or unscaled_white) and headers.read_bit_depth(data) == 16:
        flag |= cv2.IMREAD_ANYDEPTH
    pixels, warnings = _decode_and_capture(headers.without_tiff_alpha(data), flag)
    damage_warnings = list(filter(_DAMAGE_WARNING.search, warnings))
    if damage_warnings:
        raise FeedError(
            f"{title} is damaged ({len(data)} bytes), its decoder says: {damage_warnings[0]}"
        )
    if pixels is None or not pixels.size:
        reason = ": ".join(["damaged, or not of 8 or 16 bits a channel", *warnings[-1:]])
        raise FeedError(f"{title} cannot be decoded ({len(data)} bytes, {reason})")
    if unscaled_white is not None:
        pixels = _scale_to_white(pixels, unscaled_white, keep_depth=deep)
    with_channels: Array = pixels.reshape(pixels.shape[0], pixels.shape[1], -1)
    return with_channels


def _check_header(data: bytes, title: str) -> None:
    """Refuse an image that is too large or visibly damaged, before it is decoded."""
    size = headers.read_image_size(data)
    if size is not None and size[0] * size[1] > MAX_PIXELS:
        raise FeedError(
            f"{title} must have at most {MAX_PIXELS:,} pixels, got {size[0]}x{size[1]}; give a"
            " smaller copy of it"
        )
    damage = _find_damage(data)
    if damage is None and size is None:
        damage = "damaged or of an unknown format"
    if damage is not None:
        raise FeedError(f"{title} cannot be decoded ({len(data)} bytes, {damage})")


def _scale_to_white(pixels: Array, white: int, *, keep_depth: bool) -> Array:
    """Return integer pixels scaled so that `white` becomes the largest value of their dtype.

    `keep_depth`: return uint16 as it is; else its upper 8 bits.
    """
    largest = np.iinfo(pixels.dtype).max
    scaled: Array = np.rint(np.minimum(pixels, white) / white * largest).astype(pixels.dtype)
    if scaled.dtype == np.uint16 and not keep_depth:
        return (scaled >> 8).astype(np.uint8)
    return scaled


def _find_damage(data: bytes) -> str | None:
    """Return why a PNG or JPEG is damaged, as far as its decoder would not report it."""
    if data.startswith(_PNG_MAGIC):
        return _find_png_damage(data)
    if data.startswith(b"\xff\xd8"):
        return headers.find_jpeg_damage(data)
    return None


def _find_png_damage(data: bytes) -> str | None:
    """Return why a PNG is damaged, by its chunks; libpng reports damage on stderr only."""
    offset = len(_PNG_MAGIC)
    view = memoryview(data)
    # a chunk is the length of its data (4 bytes), its type (4), the data, and a checksum (4)
    while offset + 12 <= len(data):
        end = offset + 12 + int.from_bytes(view[offset : offset + 4], "big")
        if end > len(data):
            break
        checksum = int.from_bytes(view[end - 4 : end], "big")
        if zlib.crc32(view[offset + 4 : end - 4]) != checksum:
            return "damaged: a checksum does not fit"
        if data[offset + 4 : offset + 8] == b"IEND":
            return None
        offset = end
    return "cut short"


def _decode_and_capture(data: bytes, flag: int) -> tuple[Array | None, list[str]]:
    """Return (pixels, None if OpenCV refuses the data; lines that its decoder printed).

    The lines may be those of another thread's image, unless they tell of damage: then the image is
    decoded again while no other thread decodes.
    """
    with capture_decoder_output(exclusive=False) as lines:
        pixels = _decode_with_opencv(data, flag)
    may_be_damaged = pixels is None or any(map(_DAMAGE_WARNING.search, lines))
    if lines and may_be_damaged:
        with capture_decoder_output() as lines:
            pixels = _decode_with_opencv(data, flag)
    return pixels, lines


def _decode_with_opencv(data: bytes, flag: int) -> Array | None:
    """Return the pixels, or None if OpenCV refuses the data; `flag` is OpenCV's IMREAD_..."""
    cv2 = opencv()
    try:
        pixels: Array | None = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    except (cv2.error, MemoryError):
        return None
    return pixels


def opencv() -> Any:
    """Return the cv2 module, set to one thread and no messages on stderr.

    It runs without Intel's IPP, whose cubic resize rounds every 30th pixel differently: so the
    pixels are equal for every OpenCV from 4.6 to 5.0, built with IPP or without.
    """
    cv2 = _import_quiet_opencv()
    cv2.ipp.setUseIPP(False)  # applies to the calling thread only
    return cv2


@lru_cache(maxsize=1)
def _import_quiet_opencv() -> Any:
    """Return the cv2 module, set to one thread and no messages."""
    import cv2

    cv2.setNumThreads(1)
    if hasattr(cv2, "setLogLevel"):  # OpenCV 4
        cv2.setLogLevel(0)  # silent; OpenCV 4 has no constant for it
    else:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2


def capture_decoder_output(*, exclusive: bool = True) -> AbstractContextManager[list[str]]:
    """Capture the lines that decoders print in the body; the list is filled at the end.

    `exclusive`: other threads that decode wait until the body ends; else the lines may be theirs.
    """
    capture = _stderr_capture()
    if capture is None:
        return nullcontext([])
    return capture.capture(exclusive=exclusive)


class _StderrCapture:
    """Redirects the C library's stderr to a temporary file while threads decode."""

    def __init__(
        self, stderr_variable: ctypes.c_void_p, file_stream: int, file_descriptor: int
    ) -> None:
        self._stderr_variable = stderr_variable
        self._file_stream = file_stream
        self._file_descriptor = file_descriptor
        self._original_stream: int | None = None
        self._capture_ended = threading.Condition()  # its lock guards all the other attributes
        self._active_count = 0  # captures that have begun and not ended, each in its thread
        self._exclusive_count = 0  # captures that exclude other threads or wait to do so

    @contextmanager
    def capture(self, *, exclusive: bool) -> Iterator[list[str]]:
        """Capture the lines that decoders print on stderr in the body; they are there at its end.

        `exclusive`: wait until no other thread decodes, and let none begin before the end of the
        body; else other threads decode too, and their lines are captured as well.
        """
        lines: list[str] = []
        with self._capture_ended:
            if exclusive:
                self._exclusive_count += 1  # already while it waits
                self._capture_ended.wait_for(lambda: not self._active_count)
            else:  # those that wait to be exclusive go first
                self._capture_ended.wait_for(lambda: not self._exclusive_count)
            self._active_count += 1  # until `_end_capture`
            if self._active_count == 1:  # the first one: let stderr lead to the temporary file
                self._original_stream = self._stderr_variable.value
                self._stderr_variable.value = self._file_stream
            size_before = os.fstat(self._file_descriptor).st_size
        try:
            yield lines
        finally:
            with self._capture_ended:
                if exclusive:
                    self._exclusive_count -= 1
                lines += self._end_capture(size_before)

    def _end_capture(self, size_before: int) -> list[str]:
        """End a capture; return the lines printed since it began. The caller holds the lock.

        The last capture to end restores the C library's stderr, and empties the temporary file.

        `size_before`: bytes in the temporary file when the capture began.
        """
        self._active_count -= 1
        if not self._active_count:
            self._stderr_variable.value = self._original_stream
        size = os.fstat(self._file_descriptor).st_size
        # the file may be shorter now: a forked process shares it, and may have emptied it
        count = min(max(size - size_before, 0), _MAX_OUTPUT_BYTES)
        output = os.pread(self._file_descriptor, count, size_before)
        if not self._active_count and size:
            os.ftruncate(self._file_descriptor, 0)
        self._capture_ended.notify_all()
        return _printable_lines(output.decode("ascii", "backslashreplace"))


def _printable_lines(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        printable = "".join(filter(str.isprintable, line)).strip()
        if printable:
            lines.append(printable)
    return lines


@lru_cache(maxsize=1)
def _stderr_capture() -> _StderrCapture | None:
    """Return the process's capture of decoder output; None where it is not possible.

    The decoders print to the stream in the C library's variable `stderr`. A stream of a temporary
    file is opened to take its place. It is never closed, since a thread may still write to it.
    """
    try:
        library = ctypes.CDLL(None)
        # the name of the variable in the library
        if sys.platform == "darwin":
            name = "__stderrp"
        elif sys.platform == "linux" and hasattr(library, "gnu_get_libc_version"):
            name = "stderr"
        else:  # musl's variable cannot be changed
            return None
        stderr = ctypes.c_void_p.in_dll(library, name)
        descriptor = _open_unnamed_file()
        library.fdopen.restype = ctypes.c_void_p
        stream = library.fdopen(os.dup(descriptor), b"a")  # "a": append
        # without a buffer, so that the file has each line as soon as it is printed
        library.setvbuf(ctypes.c_void_p(stream), None, _UNBUFFERED, ctypes.c_size_t(0))
    except (OSError, ValueError, AttributeError):
        return None
    if not stream:
        return None
    return _StderrCapture(stderr, stream, descriptor)


def _open_unnamed_file() -> int:
    """Create a file, in memory if possible, so that a full disk loses no warning."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("calib8-words")
    with tempfile.TemporaryFile(prefix="calib8-") as file:
        return os.dup(file.fileno())
