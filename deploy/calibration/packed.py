"""The arrays of recorders in one archive: equal arrays, equal bytes."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from calibrators.statistics import Arrays
from deploy import archives
from deploy.errors import CacheError

_MOST_UNPACKED = 4 << 30  # bytes of all statistics; 10,000 histograms are 160 MB
EPOCH = (1980, 1, 1, 0, 0, 0)  # no times in an archive


def archive_of(data: bytes, path: Path) -> zipfile.ZipFile:
    """An archive of statistics, that unpacks to no more than these may be.

    Raises:
        CacheError: it would be more.
        BadZipFile: it is none.
    """
    file = io.BytesIO(data)
    archives.check_archive(file, path, what="statistics", error=CacheError, most=_MOST_UNPACKED)
    return zipfile.ZipFile(file)


def pack(listed: list[Arrays]) -> bytes:
    """An .npz of the arrays `<place>.<field>`; quick compression, no times in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for place, arrays in enumerate(listed):
            for field, array in sorted(arrays.items()):
                data = io.BytesIO()
                np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
                member = zipfile.ZipInfo(f"{place}.{field}.npy", EPOCH)
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, data.getvalue(), compresslevel=1)
    return buffer.getvalue()


def unpack(archive: zipfile.ZipFile, place: int) -> Arrays:
    """The arrays of one observation.

    Raises:
        KeyError, ValueError, BadZipFile: it is not such an archive.
    """
    found = {}
    for name in _members(archive, place):
        with archive.open(name) as stream:
            room = archive.getinfo(name).file_size
            found[name.split(".")[1]] = archives.read_array(stream, room)
    return found


def _members(archive: zipfile.ZipFile, place: int) -> Iterator[str]:
    start = f"{place}."
    return (name for name in archive.namelist() if name.startswith(start))
