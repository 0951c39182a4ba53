"""How large a picture is as it is shown, mostly by its first bytes alone.

A header's sides are those of the pixels; a camera that was held upright says in the EXIF that they
are to be turned, and decoding does so. Where the first bytes do not tell for sure it is decoded.
"""

from __future__ import annotations

import struct

from deploy.errors import FeedError
from deploy.feed import images
from deploy.feed.headers import sides
from deploy.feed.jpeg import segments
from deploy.feed.listing import Picture
from deploy.feed.preprocess import Size

_FIRST = 1 << 18  # bytes: of an EXIF with a thumbnail, and what stands behind it
_APP1, _ORIENTATION, _UPRIGHT = 0xE1, 274, 4  # up to 4: mirrored or upside down at most
_MOST_TAGS = 4096


def shown_size(picture: Picture) -> Size | None:
    """(height, width) of a picture on disk, as it is decoded; None of one that cannot be."""
    try:
        with picture.path.open("rb") as file:
            first = file.read(_FIRST)
        found, turned = sides(first), _turned(first)
        if found is None or turned is None:
            pixels = images.decode(images.read(picture), picture.name, grey=True)
            return pixels.shape[0], pixels.shape[1]
    except (OSError, ValueError, FeedError):
        return None  # whoever feeds it tells why
    return found if turned else (found[1], found[0])


def _turned(first: bytes) -> bool | None:
    """Whether a picture is turned on its side; None where its first bytes do not tell."""
    if not first.startswith(b"\xff\xd8"):
        tiff = first.startswith((b"II", b"MM"))
        return None if tiff or b"Exif" in first or b"eXIf" in first or b"EXIF" in first else False
    exif = (body for marker, _, body in segments(first) if marker == _APP1)
    found = next((body[6:] for body in exif if body.startswith(b"Exif\0\0")), b"")
    try:
        return bool(found) and _orientation(found) > _UPRIGHT
    except struct.error:
        return None


def _orientation(tiff: bytes) -> int:
    """Tag 274 of the first directory; 1, upright, where it is not there."""
    order = "<" if tiff.startswith(b"II") else ">"
    (at,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, at)
    for place in range(min(count, _MOST_TAGS)):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, at + 2 + 12 * place)
        if tag == _ORIENTATION:
            return int(value)
    return 1
