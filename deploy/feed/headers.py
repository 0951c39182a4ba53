"""Read the size of an image and the damage of a JPEG from the file's bytes, before decoding.

The size matters because an image of one color is tiny on disk and huge in memory. `read_image_size`
reads PNG, JPEG, WebP, BMP, TIFF, GIF, PNM, JPEG 2000 and AVIF, whatever the file's suffix; for
other formats OpenCV's own limit of 2**30 pixels applies.

`find_jpeg_damage` finds JPEG damage that libjpeg decodes without a warning. A hole of zeros in the
coded data, left by a failing disk or a broken download, mostly makes the decoder fail with a
warning. But with the standard Huffman tables, zeros are the code of a small coefficient (``00`` of
luma is "no zeros before it, one bit"): they decode to as many wrong blocks as were there, and all
data after them is in place again. No real image holds 64 zero bytes: that would be more than two
blocks in which every coefficient is -1.
"""

import re
import struct
from collections.abc import Callable, Iterator

_HOLE = bytes(64)
_FIRST_SCAN = 20  # bytes before the first scan of any file
_START_OF_SCAN, _END, _TABLES = 0xDA, 0xD9, 0xC4
_SEQUENTIAL = (0xC0, 0xC1)  # Huffman-coded frames that are not progressive
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
_END_OF_BLOCK = 0x00


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (marker, offset, body) of every segment up to and including the first scan's.

    The body of a truncated segment is shorter than the segment's length field.
    """
    at = 2
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0xFF, 0x00):  # padding, or no marker
            at += 1
            continue
        if marker in _BARE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, at, data[at + 4 : at + 2 + length]
        if marker in (_START_OF_SCAN, _END):
            return
        at += 2 + length


def find_jpeg_damage(data: bytes) -> str | None:
    """Return why a JPEG is damaged although it may decode; None if no damage is visible.

    Some OpenCV builds fill missing data at the end with grey and do not say so.
    """
    scan = data.rfind(b"\xff\xda")
    if data.rfind(b"\xff\xd9") <= scan or scan < 0:
        return "cut short"
    if data.find(_HOLE, _FIRST_SCAN) >= 0 and _has_zero_hole(data):
        return "damaged: a hole of zeros in its coded data"
    return None


def _has_zero_hole(data: bytes) -> bool:
    """Return whether a hole of zeros decodes to coefficients in every group of blocks.

    The code of all zeros is the first one of a Huffman table. Only files with a single scan of all
    components count: a flat component in a separate scan may consist of zeros.
    """
    first: dict[int, int] = {}
    sequential = False
    for marker, at, body in jpeg_segments(data):
        sequential = sequential or marker in _SEQUENTIAL
        if marker == _TABLES:
            first.update(_first_symbols(body))
        if marker == _START_OF_SCAN and body:
            coded = data[at + 2 : data.find(b"\xff\xd9", at)]
            used = [body[2 + 2 * place] & 15 for place in range(min(body[0], (len(body) - 1) // 2))]
            values = any(first.get(table, _END_OF_BLOCK) != _END_OF_BLOCK for table in used)
            return sequential and values and _HOLE in coded and b"\xff\xda" not in coded
    return False


def _first_symbols(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (number, symbol of the all-zeros code) of every AC table in a segment."""
    at = 0
    while at + 17 < len(body):
        if body[at] >> 4 == 1:
            yield body[at] & 15, body[at + 17]
        at += 17 + sum(body[at + 1 : at + 17])


Sides = tuple[int, int]

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # start-of-frame markers
_TIFF_BITS = 258  # tag of the bits per channel
_PNM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")


def read_image_size(data: bytes) -> Sides | None:
    """Return (width, height) of an image in pixels; None if its header does not tell."""
    try:
        for magic, read in _KINDS:
            if data.startswith(magic):
                return read(data)
        return _jp2_or_avif(data) if data[4:8] == b"ftyp" else None
    except (struct.error, IndexError):  # cut short: the decoder will report it
        return None


def read_bit_depth(data: bytes) -> int:
    """Return the bits of a channel as a PNG, TIFF or PNM states them; 8 for other files."""
    try:
        if data.startswith(b"\x89PNG"):
            return data[24]
        if data.startswith((b"II", b"MM")):
            return _tiff_tags(data).get(_TIFF_BITS, 8)
        match = _PNM.match(data[:4096])
        largest = match and re.match(rb"(?:#[^\n]*\n|\s)*(\d{1,9})\s", data[match.end() :][:4096])
        return 16 if data[1:2] in b"2356" and largest and int(largest[1]) > 255 else 8
    except (struct.error, IndexError):
        return 8


def _at(form: str, offset: int) -> Callable[[bytes], Sides]:
    """Return a reader of (width, height) that stand side by side."""

    def read(data: bytes) -> Sides:
        width, height = struct.unpack_from(form, data, offset)
        return width, height

    return read


def _jpeg(data: bytes) -> Sides | None:
    for marker, _, body in jpeg_segments(data):
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", body, 1)
            return width, height
    return None


def _webp(data: bytes) -> Sides | None:
    kind = data[12:16] if data[8:12] == b"WEBP" else b""
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    return None


def _bmp(data: bytes) -> Sides | None:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return width, height
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)


def _tiff(data: bytes) -> Sides | None:
    tags = _tiff_tags(data)
    return (tags[256], tags[257]) if 256 in tags and 257 in tags else None


def _tiff_tags(data: bytes) -> dict[int, int]:
    """Read width, height and bits of the first directory, also of a BigTIFF."""
    order = "<" if data.startswith(b"II") else ">"
    big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    (at,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", data, 8 if big else 4)
    (count,) = struct.unpack_from(f"{order}{'Q' if big else 'H'}", data, at)
    first, length, value = (at + 8, 20, 12) if big else (at + 2, 12, 8)
    tags: dict[int, int] = {}
    for place in range(min(count, 4096)):
        tag, kind = struct.unpack_from(f"{order}HH", data, first + place * length)
        if tag in (256, 257, _TIFF_BITS):
            form = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            at_value = first + place * length + value
            word = f"{order}{'Q' if big else 'I'}"
            (values,) = struct.unpack_from(word, data, at_value - value + 4)
            if tag == _TIFF_BITS and 2 * values > length - value:  # too many to stand here
                (at_value,) = struct.unpack_from(word, data, at_value)
            tags[tag] = struct.unpack_from(f"{order}{form}", data, at_value)[0]
    return tags


def _pnm(data: bytes) -> Sides | None:
    match = _PNM.match(data[:4096])
    return (int(match[1]), int(match[2])) if match else None


def _jp2_or_avif(data: bytes) -> Sides | None:
    """Search the first 64 KB of a JPEG 2000 or AVIF for the box with the size."""
    for name, skip, order in ((b"ihdr", 4, -1), (b"ispe", 8, 1)):
        at = data.find(name, 0, 1 << 16)
        if at >= 0:
            width, height = struct.unpack_from(">II", data, at + skip)[::order]
            return width, height
    return None


def _jp2_codestream(data: bytes) -> Sides | None:
    right, lower, left, upper = struct.unpack_from(">IIII", data, 8)
    return right - left, lower - upper


_KINDS = (
    (b"\x89PNG\r\n\x1a\n", _at(">II", 16)),
    (b"\xff\xd8", _jpeg),
    (b"RIFF", _webp),
    (b"BM", _bmp),
    (b"GIF8", _at("<HH", 6)),
    (b"II*\0", _tiff),
    (b"MM\0*", _tiff),
    (b"II+\0", _tiff),
    (b"MM\0+", _tiff),
    (b"\0\0\0\x0cjP  ", _jp2_or_avif),
    (b"\xff\x4f\xff\x51", _jp2_codestream),
    *((b"P%d" % kind, _pnm) for kind in range(1, 7)),
)
