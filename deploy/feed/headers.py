"""Read size, rotation and damage of an image from the file's bytes, before decoding.

The size matters because an image of one color is tiny on disk and huge in memory. `read_image_size`
reads PNG, JPEG, WebP, BMP, TIFF, GIF, PNM, JPEG 2000 and AVIF, whatever the file's suffix, since a
GIF from the web may be called .jpg; no other format is decoded.

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
from functools import partial

_HOLE = bytes(64)
_MIN_SCAN_OFFSET = 20  # bytes before the first scan of any file
_APP1, _START_OF_SCAN, _END_OF_IMAGE, _HUFFMAN_TABLES = 0xE1, 0xDA, 0xD9, 0xC4  # JPEG markers
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # Huffman-coded frames that are not progressive
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MARKERS_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_END_OF_BLOCK = 0x00


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (marker, offset, body) of every segment up to and including the first scan's.

    The body of a truncated segment is shorter than the segment's length field.
    """
    offset = 2  # after the marker of a JPEG's beginning
    while offset + 4 <= len(data):
        marker = data[offset + 1]
        # no marker begins here: other data, or FF that fills up to one, or FF 00 of coded data
        if data[offset] != 0xFF or marker in (0xFF, 0x00):
            offset += 1
        elif marker in _MARKERS_WITHOUT_LENGTH:
            offset += 2
        else:
            end = offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
            yield marker, offset, data[offset + 4 : end]
            if marker in (_START_OF_SCAN, _END_OF_IMAGE):
                return
            offset = end


def find_jpeg_damage(data: bytes) -> str | None:
    """Return why a JPEG is damaged although it may decode; None if no damage is visible.

    Some OpenCV builds fill missing data at the end with grey and do not say so.
    """
    last_scan = data.rfind(b"\xff\xda")
    if last_scan < 0 or data.rfind(b"\xff\xd9") <= last_scan:
        return "cut short"
    if data.find(_HOLE, _MIN_SCAN_OFFSET) >= 0 and _has_zero_hole(data):
        return "damaged: a hole of zeros in its coded data"
    return None


def _has_zero_hole(data: bytes) -> bool:
    """Return whether a JPEG's coded data has a hole of zero bytes that cannot be real image data.

    The first code of a Huffman table consists of zero bits. If it means "end of block", real data
    may hold many zeros in a flat area; if it means a coefficient, real data never holds so many.

    False for a progressive JPEG and one of several scans: there a scan may consist of zeros.
    """
    # number of a Huffman table for AC coefficients -> symbol whose code has zero bits only
    zero_symbol_by_table: dict[int, int] = {}
    is_sequential = False  # whether the image is Huffman-coded and not progressive
    for marker, marker_offset, body in jpeg_segments(data):
        if marker in _SEQUENTIAL_FRAMES:
            is_sequential = True
        elif marker == _HUFFMAN_TABLES:
            zero_symbol_by_table.update(_zero_symbols(body))
        elif marker == _START_OF_SCAN and body:
            end_of_image = data.find(b"\xff\xd9", marker_offset)
            coded_data = data[marker_offset + 2 : end_of_image]
            has_other_scans = b"\xff\xda" in coded_data
            if not is_sequential or has_other_scans or _HOLE not in coded_data:
                return False
            # the number of components; for each its id in a byte, its DC and AC table in 4 bits
            component_count = body[0]
            table_pairs = body[2 : 2 + 2 * component_count : 2]
            # a table that is missing shows nothing, like one that begins with "end of block"
            symbols = [zero_symbol_by_table.get(pair & 15, _END_OF_BLOCK) for pair in table_pairs]
            return any(symbol != _END_OF_BLOCK for symbol in symbols)
    return False


def _zero_symbols(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (number, symbol of the code of zeros only) of every AC table in a segment.

    A table is its class (1 for AC) and number in one byte, 16 counts of codes by their length, and
    the symbols of all codes.
    """
    offset = 0
    while offset + 17 < len(body):
        if body[offset] >> 4 == 1:
            yield body[offset] & 15, body[offset + 17]
        offset += 17 + sum(body[offset + 1 : offset + 17])


WidthHeight = tuple[int, int]

# of TIFF and EXIF; the last one says what the channels after the colors are
_WIDTH_TAG, _HEIGHT_TAG, _BITS_TAG, _ORIENTATION_TAG, _EXTRA_TAG = 256, 257, 258, 274, 338
_READ_TAGS = (_WIDTH_TAG, _HEIGHT_TAG, _BITS_TAG, _ORIENTATION_TAG, _EXTRA_TAG)
_UNASSOCIATED_ALPHA = 2  # an alpha that the colors are not multiplied by
_FORMAT_BY_TIFF_TYPE = {3: "H", 4: "I", 16: "Q"}
_BIG_TIFF = 43
_MAX_TIFF_TAGS = 4096
_SWAPPING_ORIENTATIONS = range(5, 9)
_PNM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")
_PNM_MAXIMUM = re.compile(rb"(?:#[^\n]*\n|\s)*(\d{1,9})\s")
_MAX_PNM_HEADER = 4096  # bytes up to the size, and from there to the largest value
_MAX_BOX_OFFSET = 1 << 16  # bytes of a JPEG 2000 or AVIF before the box with the size


def read_image_size(data: bytes) -> WidthHeight | None:
    """Return (width, height) of an image in pixels; None if its header does not tell."""
    try:
        for magic, read_size in _SIZE_READERS:
            if data.startswith(magic):
                return read_size(data)
        if data[4:8] == b"ftyp":
            return _read_box_size(data)
        return None
    except (struct.error, IndexError):  # cut short: the decoder will report it
        return None


def read_bit_depth(data: bytes) -> int:
    """Return the bits of a channel as a PNG, TIFF or PNM states them; 8 for other files."""
    try:
        if data.startswith(b"\x89PNG"):
            return data[24]
        if data.startswith((b"II", b"MM")):
            return _read_tiff_tags(data).get(_BITS_TAG, 8)
    except (struct.error, IndexError):
        return 8
    return 16 if _read_pnm_white(data) > 255 else 8


def read_unscaled_white(data: bytes) -> int | None:
    """Return the value of white in a PNM that OpenCV decodes without scaling it; else None."""
    white = _read_pnm_white(data)
    is_scaled_text = data.startswith((b"P2", b"P3")) and white < 255
    return None if white in (0, 255, 65535) or is_scaled_text else white


def _read_pnm_white(data: bytes) -> int:
    """Return the largest value of a PGM or PPM, which is white; 255 for other files."""
    header = _PNM.match(data[:_MAX_PNM_HEADER])
    if header is None or data[1:2] in b"14":  # P1 and P4 are bitmaps, without a largest value
        return 255
    largest_value = _PNM_MAXIMUM.match(data[header.end() : header.end() + _MAX_PNM_HEADER])
    return int(largest_value[1]) if largest_value else 255


def without_tiff_alpha(data: bytes) -> bytes:
    """Return a TIFF whose alpha is declared as a channel of no meaning; other files as they are.

    libtiff, and so OpenCV, would multiply the colors of 8 bits by it.
    """
    if not data.startswith((b"II", b"MM")):
        return data
    try:
        for tag, value, offset in _tiff_values(data):
            if tag == _EXTRA_TAG and value == _UNASSOCIATED_ALPHA:
                return data[:offset] + bytes(2) + data[offset + 2 :]
    except struct.error:  # cut short: the decoder will report it
        pass
    return data


def is_rotated(data: bytes) -> bool | None:
    """Return whether decoding swaps width and height; None if these bytes leave it open."""
    if not data.startswith(b"\xff\xd8"):  # no JPEG: only the decoder knows what it does with EXIF
        is_tiff = data.startswith((b"II", b"MM"))
        return None if is_tiff or re.search(b"exif", data, re.IGNORECASE) else False
    for marker, _, body in jpeg_segments(data):
        if marker == _APP1 and body.startswith(b"Exif\0\0"):
            try:
                orientation = _read_tiff_tags(body[6:]).get(_ORIENTATION_TAG)
            except struct.error:
                return None
            return orientation in _SWAPPING_ORIENTATIONS
    return False


def _unpack_size(layout: str, offset: int, data: bytes) -> WidthHeight:
    """Return the two numbers at an offset; `layout` is that of `struct`."""
    width, height = struct.unpack_from(layout, data, offset)
    return width, height


def _read_jpeg_size(data: bytes) -> WidthHeight | None:
    for marker, _, body in jpeg_segments(data):
        if marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", body, 1)
            return width, height
    return None


def _read_webp_size(data: bytes) -> WidthHeight | None:
    """Read the size by the first chunk: lossy, lossless (two fields of 14 bits) or extended."""
    chunk = data[8:16]
    if chunk == b"WEBPVP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if chunk == b"WEBPVP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"WEBPVP8X":
        width = int.from_bytes(data[24:27], "little")
        height = int.from_bytes(data[27:30], "little")
        return width + 1, height + 1
    return None


def _read_bmp_size(data: bytes) -> WidthHeight:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    return abs(width), abs(height)  # a negative height stores the rows from the top


def _read_tiff_size(data: bytes) -> WidthHeight | None:
    value_by_tag = _read_tiff_tags(data)
    if not {_WIDTH_TAG, _HEIGHT_TAG} <= value_by_tag.keys():
        return None
    return value_by_tag[_WIDTH_TAG], value_by_tag[_HEIGHT_TAG]


def _read_tiff_tags(data: bytes) -> dict[int, int]:
    """Return tag -> first value, for the tags of `_tiff_values` in a TIFF or EXIF.

    Raises:
        struct.error: the data ends before.
    """
    value_by_tag: dict[int, int] = {}
    for tag, value, _ in _tiff_values(data):
        value_by_tag.setdefault(tag, value)  # of a tag that comes twice, decoders take the first
    return value_by_tag


def _tiff_values(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (tag, first value, its offset) for `_READ_TAGS` in a TIFF or EXIF.

    They stand in the file's first directory: the number of entries, and entries of four fields::

        TIFF     tag 2 bytes, type 2, number of values 4, value or its offset 4
        BigTIFF  tag 2 bytes, type 2, number of values 8, value or its offset 8

    Raises:
        struct.error: the data ends before.
    """
    read_integer = partial(_read_tiff_integer, data)  # by a format, a letter of `struct`
    # the third and fourth field of an entry, and all offsets, have one format
    field_format = "I"
    field_bytes = 4
    entry_count_format = "H"
    if read_integer("H", 2) == _BIG_TIFF:
        field_format = "Q"
        field_bytes = 8
        entry_count_format = "Q"
    directory_offset = read_integer(field_format, field_bytes)  # it follows the magic number
    entry_count = min(read_integer(entry_count_format, directory_offset), _MAX_TIFF_TAGS)
    first_entry_offset = directory_offset + struct.calcsize(entry_count_format)

    for number in range(entry_count):
        entry_offset = first_entry_offset + number * (4 + 2 * field_bytes)
        tag = read_integer("H", entry_offset)
        if tag not in _READ_TAGS:
            continue
        value_type = read_integer("H", entry_offset + 2)
        value_count = read_integer(field_format, entry_offset + 4)
        value_offset = entry_offset + 4 + field_bytes
        if tag in (_BITS_TAG, _EXTRA_TAG) and 2 * value_count > field_bytes:
            # values of 2 bytes, one a channel, too many for the entry, which has their offset
            value_offset = read_integer(field_format, value_offset)
        value_format = _FORMAT_BY_TIFF_TYPE.get(value_type, "I")
        if tag == _ORIENTATION_TAG:  # decoders take it for 2 bytes, whatever its type
            value_format = "H"
        yield tag, read_integer(value_format, value_offset), value_offset


def _read_tiff_integer(data: bytes, number_format: str, offset: int) -> int:
    """Return the integer at an offset of a TIFF or EXIF, in the file's byte order.

    Raises:
        struct.error: the data ends before, however large the offset is.
    """
    byte_order = "<" if data.startswith(b"II") else ">"
    (value,) = struct.unpack_from(byte_order + number_format, data, min(offset, len(data)))
    return int(value)


def _read_pnm_size(data: bytes) -> WidthHeight | None:
    match = _PNM.match(data[:_MAX_PNM_HEADER])
    if match is None:
        return None
    return int(match[1]), int(match[2])


def _read_box_size(data: bytes) -> WidthHeight | None:
    """Search the beginning of a JPEG 2000 or AVIF for the box with the size."""
    box = data.find(b"ihdr", 0, _MAX_BOX_OFFSET)
    if box >= 0:
        height, width = _unpack_size(">II", box + 4, data)
        return width, height
    box = data.find(b"ispe", 0, _MAX_BOX_OFFSET)
    if box < 0:
        return None
    return _unpack_size(">II", box + 8, data)


# first bytes, one or several forms -> function that reads the size
_SIZE_READERS: tuple[tuple[bytes | tuple[bytes, ...], Callable[[bytes], WidthHeight | None]], ...]
_SIZE_READERS = (
    (b"\x89PNG\r\n\x1a\n", partial(_unpack_size, ">II", 16)),
    (b"\xff\xd8", _read_jpeg_size),
    (b"RIFF", _read_webp_size),
    (b"BM", _read_bmp_size),
    (b"GIF8", partial(_unpack_size, "<HH", 6)),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), _read_tiff_size),
    (b"\0\0\0\x0cjP  ", _read_box_size),
    ((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), _read_pnm_size),
)
