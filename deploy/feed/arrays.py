"""Arrays as a feed: .npy and .npz files and Python iterables, cut into samples.

Every array is read against the model's input of its name. Where the input has rank r, the array
may be

* rank r, a batch: sample i is ``a[i:i+1]`` (also where the input's own batch is fixed);
* rank r + 1, samples stacked with their batch dimension: sample i is ``a[i]``;
* rank r - 1, one sample without a batch dimension (iterables only);
* rank r with a first dimension that is no batch (a state [2, N, 64]): taken whole.
"""

from __future__ import annotations

import bisect
import shutil
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from deploy.archives import array_header, check_archive
from deploy.errors import FeedError, first_line
from deploy.feed.images import shown
from deploy.feed.manifest import Raw, sample_digest
from deploy.feed.preprocess import describe
from deploy.reading import opened, size
from deploy.tensors import Array, TensorSpec

Item = dict[str, Array]
_MOST_ENTRIES = 1 << 12  # arrays of an .npz file: one an input
LABEL_KEYS = ("labels", "label", "y")


class Items(Protocol):
    """Random access to items, each of one or more samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


@dataclass(frozen=True)
class ArraySource:
    """Samples over items: sample -> (item, row)."""

    specs: tuple[TensorSpec, ...]
    items: Items
    ends: tuple[int, ...]
    name: str
    labels: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages."""
        return f"sample {index} of {self.name}"

    def told(self, index: int) -> str:
        """The same; in the middle of a sentence."""
        return self.sample_name(index)

    def load(self, index: int) -> Raw:
        """Arrays with a batch dimension of 1 by input name, copied and hashed.

        Raises:
            FeedError: (when decoding) they hold NaN or Inf.
        """
        where = bisect.bisect_right(self.ends, index)
        row = index - (self.ends[where - 1] if where else 0)
        item = self.items[where]
        sample = {s.name: _row(item[s.name], s, row, self.specs) for s in self.specs}
        return Raw(sample_digest(sample), lambda: _finite(sample, self.sample_name(index)))


def from_file(path: Path, specs: tuple[TensorSpec, ...]) -> ArraySource:
    """An .npy (one input) or .npz (inputs by name) file; memory-mapped where not compressed.

    Raises:
        FeedError: the file is damaged, holds objects, or does not fit the inputs.
    """
    notes: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's about headers written by Python 2
            single = path.suffix.lower() == ".npy"
            arrays = {"": _load_npy(path)} if single else _load_npz(path, notes)
    except FeedError:
        raise
    except Exception as e:  # on hostile bytes numpy and zipfile raise a dozen kinds of error
        raise FeedError(
            f"{shown(str(path))} cannot be read as plain numpy arrays: {first_line(e)};"
            " write it with numpy.save or numpy.savez"
        ) from e
    labels = _take_labels(arrays, specs)
    item = _by_name(arrays, specs, shown(path.name))
    count = rows(item, specs, shown(path.name))
    if labels is not None and len(labels) != count:
        raise FeedError(
            f"{shown(path.name)} must have one label per sample, got {len(labels)} for {count}"
        )
    if not count:
        raise FeedError(f"{shown(path.name)} must hold samples, got none")
    return ArraySource(specs, [item], (count,), shown(path.name), labels, tuple(notes))


def from_iterable(
    source: Iterable[object], specs: tuple[TensorSpec, ...], *, name: str = "the iterable"
) -> ArraySource:
    """Arrays, or name -> array mappings, of one or more samples each; `name` is its in messages.

    A list, a tuple or an array is used as it is. Anything else is read once, one item at a time,
    into a temporary file (it is needed twice: for its digest and for the run).

    Raises:
        FeedError: an item that does not fit the inputs, or none at all.
    """
    if isinstance(source, np.ndarray):
        source = [source]
    counts: list[int] = []
    spooled = not isinstance(source, list | tuple)
    spool = _Spool() if spooled else None
    kept: list[Item] = []
    for index, value in enumerate(source):
        item = _item(value, specs, f"item {index} of {name}")
        counts.append(rows(item, specs, f"item {index} of {name}"))
        if spool is not None:
            spool.append(item)
        else:
            kept.append(item)
    if not sum(counts):
        raise FeedError(f"{name} must give samples, got none")
    notes = (
        (f"{name} was read once into a temporary file ({sum(counts)} samples)",) if spooled else ()
    )
    items: Items = spool if spool is not None else kept
    return ArraySource(specs, items, tuple(accumulate(counts)), name, None, notes)


def fixed_batch(specs: Sequence[TensorSpec]) -> int:
    """The batch B that every input fixes in its first dimension, else 1."""
    firsts = {s.shape[0] for s in specs if s.shape}
    only = firsts.pop() if len(firsts) == 1 else None
    return only if isinstance(only, int) and only > 0 else 1


def rows(item: Item, specs: tuple[TensorSpec, ...], where: str) -> int:
    """How many samples an item holds.

    Raises:
        FeedError: a dtype, rank or dimension that is not the input's, or counts that differ.
    """
    counts: dict[str, int] = {}
    for spec in specs:
        array = item[spec.name]
        _check_array(array, spec, specs, where)
        if array.ndim > len(spec.shape) or is_batch(spec, specs):
            counts[spec.name] = array.shape[0]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {n}" for name, n in counts.items())
        raise FeedError(f"all inputs of {where} must have as many samples, got {listed}")
    return next(iter(counts.values()), 1)


def is_batch(spec: TensorSpec, specs: Sequence[TensorSpec]) -> bool:
    """Whether the first dimension of the input is a batch."""
    if not spec.shape:
        return False
    first = spec.shape[0]
    return not isinstance(first, int) or first == 1 or first == fixed_batch(specs)


def _row(array: Array, spec: TensorSpec, row: int, specs: tuple[TensorSpec, ...]) -> Array:
    if array.ndim > len(spec.shape):
        return _plain(array[row]).reshape(array.shape[1:])
    if is_batch(spec, specs):
        return _plain(array[row : row + 1])
    return _plain(array).reshape(array.shape)


def _plain(array: Array) -> Array:
    """The same values in this machine's byte order, one after the other.

    A copy: what a file or the caller's own array holds may be another thing a moment later.
    """
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _check_array(array: Array, spec: TensorSpec, specs: tuple[TensorSpec, ...], where: str) -> None:
    got = f"{array.dtype} {list(array.shape)}"
    if array.dtype.name != spec.dtype:
        hint = "; pixels of 0..255 must be preprocessed first" if array.dtype == np.uint8 else ""
        raise FeedError(
            f"{where} must have the dtype of the input {describe(spec)}, got {got};"
            f" convert it with .astype('{spec.dtype}'){hint}"
        )
    rank, batch = len(spec.shape), is_batch(spec, specs)
    stacked = array.ndim == rank + 1
    dims = array.shape[1:] if stacked else array.shape
    fits = len(dims) == rank and all(
        not isinstance(want, int) or got == want or (at == 0 and batch and not stacked)
        for at, (got, want) in enumerate(zip(dims, spec.shape, strict=True))
    )
    if not fits:
        raise FeedError(
            f"{where} must fit the input {describe(spec)}, got {got}{_transpose_hint(dims, spec)}"
        )


def _transpose_hint(dims: tuple[int, ...], spec: TensorSpec) -> str:
    if len(dims) == len(spec.shape) == 4:
        for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
            turned = [dims[a] for a in order]
            if all(
                not isinstance(w, int) or t == w
                for t, w in zip(turned[1:], spec.shape[1:], strict=True)
            ):
                return f"; turn it with .transpose{order}"
    return "; give one array of this shape per sample, or a batch of them"


def _finite(sample: dict[str, Array], where: str) -> dict[str, Array]:
    for name, array in sample.items():
        _check_finite(array, name, where)
    return sample


def _check_finite(array: Array, name: str, where: str) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise FeedError(
            f"{where} holds {bad} NaN or Inf values for the input {name!r}; correct the data or"
            " skip bad samples"
        )


def _item(value: object, specs: tuple[TensorSpec, ...], where: str) -> Item:
    if isinstance(value, Mapping):
        arrays = {str(k): _asarray(v, where) for k, v in value.items()}
        missing = [s.name for s in specs if s.name not in arrays]
        if missing or len(arrays) != len(specs):
            raise FeedError(
                f"{where} must name exactly the inputs {[s.name for s in specs]},"
                f" got {sorted(arrays)}"
            )
    elif isinstance(value, tuple | list):
        raise FeedError(
            f"{where} must be an array or a dict of arrays by input name, got a"
            f" {type(value).__name__} of {len(value)}; where a loader gives (images, labels), pass"
            " (images for images, labels in loader)"
        )
    else:
        arrays = _by_name({"": _asarray(value, where)}, specs, where)
    return {s.name: _with_batch(arrays[s.name], s) for s in specs}


def _with_batch(array: Array, spec: TensorSpec) -> Array:
    return array[None] if spec.shape and array.ndim == len(spec.shape) - 1 else array


def _asarray(value: object, where: str) -> Array:
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{where} must be an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(f"{where} must be an array of numbers, got {type(value).__name__}")
    return array


def _by_name(arrays: dict[str, Array], specs: tuple[TensorSpec, ...], where: str) -> Item:
    """Arrays by input name; a single array is the single input's, whatever its name."""
    wanted = [s.name for s in specs]
    if len(wanted) == 1 and len(arrays) == 1:
        return {wanted[0]: next(iter(arrays.values()))}
    if set(arrays) != set(wanted):
        got = sorted(arrays) if "" not in arrays else "one array"
        raise FeedError(
            f"{where} must hold exactly the inputs {wanted}, got {got};"
            " write numpy.savez with one array per input"
        )
    return arrays


def _take_labels(arrays: dict[str, Array], specs: tuple[TensorSpec, ...]) -> tuple[int, ...] | None:
    inputs = {s.name for s in specs}
    for key in LABEL_KEYS:
        found = arrays.get(key)
        if found is not None and key not in inputs and found.ndim == 1:
            del arrays[key]
            if found.dtype.kind not in "iu" or (found.size and found.min() < 0):
                raise FeedError(
                    f"{key!r} must be whole numbers from 0, got {found.dtype}; number the classes"
                    " as the model's outputs are"
                )
            return tuple(int(v) for v in found)
    return None


def _load_npy(path: Path) -> Array:
    array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an .npz archive under the name .npy")
    return array


def _load_npz(path: Path, notes: list[str]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    compressed = []
    with opened(path, what="an .npz file", error=FeedError) as raw:
        check_archive(raw, path, what="an .npz file", error=FeedError, entries=_MOST_ENTRIES)
        with zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                if info.compress_type == zipfile.ZIP_STORED:
                    arrays[key] = _map_entry(path, raw, info)
                else:
                    compressed.append(info)
            _refuse_without_room(compressed, path)
            for info in compressed:
                with archive.open(info) as stream:
                    arrays[info.filename.removesuffix(".npy")] = _unpacked(stream, info.file_size)
    if compressed:
        notes.append(f"{shown(path.name)} is compressed and was unpacked into temporary files")
    return arrays


def _refuse_without_room(entries: Sequence[zipfile.ZipInfo], path: Path) -> None:
    """Refuse what no disk here has room for, before anything is unpacked."""
    needed = sum(info.file_size for info in entries)
    folder = tempfile.gettempdir()
    if needed > (free := shutil.disk_usage(folder).free):
        raise FeedError(
            f"{shown(str(path))} needs {size(needed)} of room in {folder} to be unpacked, got"
            f" {size(free)}; write it with numpy.savez, which needs none"
        )


def _unpacked(stream: IO[bytes], room: int) -> Array:
    """An entry that is compressed, as an array in a file without a name, not in memory."""
    shape, fortran, dtype = array_header(stream, room)
    if 0 in shape or not shape:
        return np.frombuffer(stream.read(dtype.itemsize * prod(shape)), dtype).reshape(shape)
    with tempfile.TemporaryFile(prefix="calib8-feed-") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
        file.flush()
        return np.memmap(file, dtype, "r", 0, shape, "F" if fortran else "C")


def _map_entry(path: Path, raw: IO[bytes], info: zipfile.ZipInfo) -> Array:
    """Memory-map an uncompressed entry; its data begins after the local header."""
    raw.seek(info.header_offset)
    header = raw.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("a local header is damaged")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    raw.seek(info.header_offset + 30 + names)
    shape, fortran, dtype = array_header(raw, info.file_size)
    if 0 in shape or not shape:
        return np.fromfile(raw, dtype, count=int(np.prod(shape))).reshape(shape)
    return np.memmap(path, dtype, "r", raw.tell(), shape, "F" if fortran else "C")


class _Spool:
    """Items in a temporary file that goes with the object; several threads may read."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="calib8-feed-")  # noqa: SIM115
        self._offsets: list[dict[str, int]] = []
        self._lock = threading.Lock()

    def append(self, item: Item) -> None:
        offsets = {}
        try:
            for name, array in item.items():
                offsets[name] = self._file.tell()
                np.lib.format.write_array(self._file, array, allow_pickle=False)
        except OSError as error:
            raise FeedError(
                f"the iterable must fit into a temporary file, got: {error.strerror or error}; free"
                " some of the disk, or set TMPDIR to another"
            ) from error
        self._offsets.append(offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Item:
        return {name: self._load(at) for name, at in self._offsets[index].items()}

    def _load(self, at: int) -> Array:
        with self._lock:
            self._file.seek(at)
            array: Array = np.lib.format.read_array(self._file, allow_pickle=False)
        return array

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    def __del__(self) -> None:
        self._file.close()
