"""Check the headers of zip archives and .npy arrays before anything is unpacked.

A few kilobytes of a zip archive may claim terabytes, and an array's header more values than there
are bytes.
"""

from __future__ import annotations

import os
import threading
from math import prod
from typing import IO, TYPE_CHECKING, Any

from deploy.files.reading import ErrorClass, FilePath, format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    ArrayHeader = tuple[tuple[int, ...], bool, np.dtype[Any]]

# numpy parses headers as Python code, and Python 3.11 sometimes fails at that in several threads
# (python/cpython#106905)
_HEADER_LOCK = threading.Lock()
_MAX_ENTRIES = 1 << 20
_MAX_UNPACKED_BYTES = 16 << 30  # of all entries


def check_archive(
    file: IO[bytes],
    path: FilePath,
    *,
    what: str,
    error: ErrorClass,
    max_entries: int = _MAX_ENTRIES,
    max_bytes: int = _MAX_UNPACKED_BYTES,
) -> None:
    """Refuse a zip archive that would unpack to more than a budget, before anything is unpacked.

    The entries' headers state the unpacked sizes. They can be trusted: `zipfile` unpacks no more.

    Args:
        file: the archive; it is left at its beginning.
        path: its name in messages.
        what: the file must be, such as "an .npz file".
        error: class of the error to raise.
        max_entries: maximum number of entries.
        max_bytes: maximum size of all entries unpacked.

    Raises:
        error: too many entries or bytes.
        BadZipFile: no zip archive.
    """
    import zipfile

    budget = f"{max_entries:,} entries and {format_bytes(max_bytes)}"
    rule = f"{os.fspath(path)} must be {what} of at most {budget}"
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    file.seek(0)
    total = sum(entry.file_size for entry in entries)
    if len(entries) > max_entries or total > max_bytes:
        raise error(
            f"{rule} unpacked, got {len(entries):,} and {format_bytes(total)}; write several"
            " smaller ones"
        )


def read_array_header(stream: IO[bytes], max_bytes: int) -> ArrayHeader:
    """Return (shape, whether in Fortran order, dtype) of an .npy file.

    Afterwards the stream is at the values.

    Args:
        stream: at the beginning of the .npy file.
        max_bytes: upper bound of the file's size.

    Raises:
        ValueError: not numpy's format, Python objects, or more values than bytes.
    """
    import tokenize
    import warnings

    from numpy.lib import format as npy_format

    # version -> reader; version 3 differs from 2 only for arrays of named fields
    header_readers = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
        (3, 0): npy_format.read_array_header_2_0,
    }
    version = npy_format.read_magic(stream)
    if version not in header_readers:
        raise ValueError(f"numpy format {version} is not known")
    try:
        with _HEADER_LOCK, warnings.catch_warnings():  # one thread at a time, see `_HEADER_LOCK`
            warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
            shape, is_fortran, dtype = header_readers[version](stream)
    except (tokenize.TokenError, OverflowError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error

    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(side < 0 for side in shape) or prod(shape) * dtype.itemsize > max_bytes:
        raise ValueError(f"its header claims {dtype} {list(shape)}, which is more than is there")
    return shape, is_fortran, dtype


def read_array(stream: IO[bytes], max_bytes: int) -> NDArray[Any]:
    """Read an array of an .npy file; see `read_array_header`."""
    import numpy as np

    shape, is_fortran, dtype = read_array_header(stream, max_bytes)
    data = bytearray(stream.read(prod(shape) * dtype.itemsize))
    array: NDArray[Any] = np.frombuffer(data, dtype)
    return array.reshape(shape, order="F" if is_fortran else "C")
