"""The structure of a JPEG: its segments, and what libjpeg decodes without a word of complaint.

A hole of zeros in the coded data, as a failing disk or a broken download leaves it, mostly throws
the decoder off and libjpeg says so. But where the file has the standard Huffman tables, zeros are
the code of a small coefficient (``00`` of luma is "no zeros before it, one bit"), so that they
decode to as many odd blocks as were there, and all that follows is in its place again. No picture
holds that many: 64 bytes would be two blocks and more in which every coefficient is -1.
"""

from __future__ import annotations

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
