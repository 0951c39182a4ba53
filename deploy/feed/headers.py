"""How large a picture says it is, read from its first bytes: known before anything is decoded.

A picture of one colour takes next to nothing on disk and everything in memory. PNG, JPEG, WebP,
BMP, TIFF, GIF, PNM, JPEG 2000 and AVIF are read here, whatever the file is called; for another kind
OpenCV's own limit holds, of 2**30 pixels.

The structure of a JPEG: its segments, and what libjpeg decodes without a word of complaint.

A hole of zeros in the coded data, as a failing disk or a broken download leaves it, mostly throws
the decoder off and libjpeg says so. But where the file has the standard Huffman tables, zeros are
the code of a small coefficient (``00`` of luma is "no zeros before it, one bit"), so that they
decode to as many odd blocks as were there, and all that follows is in its place again. No picture
holds that many: 64 bytes would be two blocks and more in which every coefficient is -1.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

_HOLE = bytes(64)
_FIRST_SCAN = 20  # bytes that any file has before its first scan
_START_OF_SCAN, _END, _TABLES = 0xDA, 0xD9, 0xC4
_SEQUENTIAL = (0xC0, 0xC1)  # Huffman-coded frames that are not progressive
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
_END_OF_BLOCK = 0x00


def segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(marker, where it stands, body) of every segment up to the first scan's, given last.

    A body that is cut short is shorter than it says.
    """
    at = 2
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0xFF, 0x00):  # padding, or bytes that are no marker
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


def fault(data: bytes) -> str | None:
    """Why a JPEG is no whole one although it may decode; None where nothing is seen.

    Some OpenCVs fill what is missing behind the last byte with grey, unsaid.
    """
    scan = data.rfind(b"\xff\xda")
    if data.rfind(b"\xff\xd9") <= scan or scan < 0:
        return "cut short"
    if data.find(_HOLE, _FIRST_SCAN) >= 0 and _holed(data):
        return "damaged: a hole of zeros in its coded data"
    return None


def _holed(data: bytes) -> bool:
    """Whether zeros lie where they decode to coefficients in some block of every group of blocks.

    The code of all zeros is the first in a Huffman table. Only of a file with one scan, of all
    components: a flat component in a scan of its own may well be zeros.
    """
    first: dict[int, int] = {}
    sequential = False
    for marker, at, body in segments(data):
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
    """(number, symbol of the code of zeros) of every table of AC coefficients in a segment."""
    at = 0
    while at + 17 < len(body):
        if body[at] >> 4 == 1:
            yield body[at] & 15, body[at + 17]
        at += 17 + sum(body[at + 1 : at + 17])


Sides = tuple[int, int]

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF of every coding
_PNM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")


def sides(data: bytes) -> Sides | None:
    """(width, height) of a picture in pixels; None where its header does not tell."""
    try:
        for sign, read in _KINDS:
            if data.startswith(sign):
                return read(data)
        return _boxed(data) if data[4:8] == b"ftyp" else None
    except (struct.error, IndexError):  # cut short: the decoder says so
        return None


def _png(data: bytes) -> Sides | None:
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> Sides | None:
    for marker, _, body in segments(data):
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


def _gif(data: bytes) -> Sides | None:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _tiff(data: bytes) -> Sides | None:
    """The first directory's tags 256 and 257; of a BigTIFF too."""
    order = "<" if data.startswith(b"II") else ">"
    big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    (at,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", data, 8 if big else 4)
    (count,) = struct.unpack_from(f"{order}{'Q' if big else 'H'}", data, at)
    first, length, value = (at + 8, 20, 12) if big else (at + 2, 12, 8)
    found: dict[int, int] = {}
    for place in range(min(count, 4096)):
        tag, kind = struct.unpack_from(f"{order}HH", data, first + place * length)
        if tag in (256, 257):
            form = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            found[tag] = struct.unpack_from(f"{order}{form}", data, first + place * length + value)[
                0
            ]
    return (found[256], found[257]) if len(found) == 2 else None


def _pnm(data: bytes) -> Sides | None:
    match = _PNM.match(data[:4096])
    return (int(match[1]), int(match[2])) if match else None


def _boxed(data: bytes) -> Sides | None:
    """JPEG 2000 and AVIF: the box that tells is one of the first."""
    for name, skip, order in ((b"ihdr", 4, -1), (b"ispe", 8, 1)):
        at = data.find(name, 0, 1 << 16)
        if at >= 0:
            width, height = struct.unpack_from(">II", data, at + skip)[::order]
            return width, height
    return None


def _codestream(data: bytes) -> Sides | None:
    right, lower, left, upper = struct.unpack_from(">IIII", data, 8)
    return right - left, lower - upper


_KINDS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"RIFF", _webp),
    (b"BM", _bmp),
    (b"GIF8", _gif),
    (b"II*\0", _tiff),
    (b"MM\0*", _tiff),
    (b"II+\0", _tiff),
    (b"MM\0+", _tiff),
    (b"\0\0\0\x0cjP  ", _boxed),
    (b"\xff\x4f\xff\x51", _codestream),
    *((b"P%d" % kind, _pnm) for kind in range(1, 7)),
)
