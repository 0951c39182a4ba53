"""Arrays in numpy's format and archives of them, judged by their headers before they are unpacked.

A few kilobytes of a zip archive may tell of terabytes, and an array's header of more values than
there are bytes: neither is believed.
"""

from __future__ import annotations

import os
import threading
import tokenize
import warnings
import zipfile
from math import prod
from typing import IO, TYPE_CHECKING, Any

from deploy.errors import Calib8Error
from deploy.files.reading import Place, size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Header = tuple[tuple[int, ...], bool, np.dtype[Any]]

# numpy parses headers as Python, and Python 3.11 fails at that by chance where several threads do:
# one switches to the other inside (python/cpython#106905)
HEADERS = threading.Lock()
MOST_ENTRIES = 1 << 20
MOST_UNPACKED = 16 << 30  # bytes of all entries
_MOST_LISTING = 128 << 20  # bytes of the table of contents


def check_archive(
    file: IO[bytes],
    path: Place,
    *,
    what: str,
    error: type[Calib8Error],
    entries: int = MOST_ENTRIES,
    most: int = MOST_UNPACKED,
) -> None:
    """Refuse an archive that would unpack to more than a budget, before anything is unpacked.

    What an entry's header tells is what `zipfile` unpacks of it at most.

    Args:
        file: the archive, which is left at its beginning.
        path: that it is called by.
        what: it must be, such as "an .npz file".
        error: class of what is raised.
        entries: how many it may have.
        most: bytes of all of them unpacked.

    Raises:
        error: more entries or bytes.
        BadZipFile: no zip archive.
    """
    rule = f"{os.fspath(path)} must be {what} of at most {entries:,} entries and {size(most)}"
    if (listing := _listing_bytes(file)) > _MOST_LISTING:
        raise error(f"{rule}, got {size(listing)} of names alone; write several smaller ones")
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        whole = sum(entry.file_size for entry in listed)
    file.seek(0)
    if len(listed) > entries or whole > most:
        raise error(
            f"{rule} unpacked, got {len(listed):,} and {size(whole)}; write several smaller ones"
        )


def array_header(stream: IO[bytes], room: int) -> Header:
    """(shape, Fortran order, dtype) of an .npy file; its values are next in the stream.

    Args:
        stream: at the beginning of the .npy file.
        room: bytes that the file has, at most.

    Raises:
        ValueError: not numpy's format, Python objects, or more values than bytes.
    """
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
            warnings.simplefilter("ignore")  # of headers that are read in numpy's older way
            shape, fortran, dtype = read_header(stream)
    except (tokenize.TokenError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(side < 0 for side in shape) or prod(shape) * dtype.itemsize > room:
        raise ValueError(f"its header tells of {dtype} {list(shape)}, which is more than is there")
    return shape, fortran, dtype


def read_array(stream: IO[bytes], room: int) -> NDArray[Any]:
    """An array of an .npy file; see `array_header`."""
    import numpy as np

    shape, fortran, dtype = array_header(stream, room)
    data = bytearray(stream.read(prod(shape) * dtype.itemsize))
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array.reshape(shape, order="F" if fortran else "C")


def _listing_bytes(file: IO[bytes]) -> int:
    """Bytes of a zip archive's table of contents, as its end tells; 0 where it has none."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(max(0, whole - (1 << 17)))  # an end, its comment and zip64's own end
    tail = file.read()
    file.seek(0)
    found = 0
    for sign, at, width in ((b"PK\x05\x06", 12, 4), (b"PK\x06\x06", 40, 8)):
        place = tail.rfind(sign)
        told = int.from_bytes(tail[place + at : place + at + width], "little")
        if place >= 0 and told != 0xFFFFFFFF:
            found = max(found, told)
    return min(found, whole)
