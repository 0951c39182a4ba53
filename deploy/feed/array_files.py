"""Files of arrays: .npy, .npz, and .bin or .raw without a header; folders and lists of them.

A file holds one or more samples of every input. For a model with several inputs, a folder may also
hold one subfolder per input; files of the same name belong together::

    arrays/0001.npz        arrays/image/0001.npy     samples.txt:
    arrays/0002.npz        arrays/image/0002.npy       0001.npy 3         (a label)
    ...                    arrays/state/0001.npy       0002.npy s2.npy    (a file per input)

Opening a folder reads the headers only; a file is read when its sample is needed.
"""

import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from deploy.errors import FeedError, first_line
from deploy.feed.arrays import (
    ArraySource,
    Item,
    arrays_by_input,
    conversion_notes,
    count_samples,
    has_batch_dimension,
)
from deploy.feed.file_list import ImageFile
from deploy.feed.images import printable_name
from deploy.feed.preprocess import describe
from deploy.files.archives import (
    HEADER_LOCK,
    check_archive,
    read_array_header,
)
from deploy.files.guard import (
    add_input_file,
)
from deploy.files.reading import (
    format_bytes,
    open_regular_file,
    refuse_irregular,
)
from deploy.tensors import Array, TensorSpec

SUFFIXES = frozenset((".bin", ".npy", ".npz", ".raw"))
LABEL_KEYS = ("labels", "label", "y")
_MOST_ENTRIES = 1 << 12  # arrays in an .npz file: one per input

Specs = tuple[TensorSpec, ...]


def is_array_file(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a file of arrays."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def is_raw_file(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of values without a header."""
    return os.path.splitext(path)[1].lower() in (".bin", ".raw")


def open_array_file(path: Path, specs: Specs) -> ArraySource:
    """Open one file of arrays; memory-map it unless it is compressed.

    Raises:
        FeedError: the file is damaged, holds objects, or does not fit the inputs.
    """
    contents = read_arrays(path, specs)
    count = count_samples(contents.item, specs, printable_name(path.name))
    if not count:
        raise FeedError(f"{printable_name(path.name)} must hold samples, got none")
    return ArraySource(
        specs,
        [contents.item],
        (count,),
        printable_name(path.name),
        contents.labels,
        (*contents.notes, *conversion_notes(contents.item, specs)),
    )


@dataclass(slots=True)
class ArrayFileContents:
    """Contents of a file of arrays."""

    item: Item
    labels: tuple[int, ...] | None = None
    notes: list[str] = field(default_factory=list)


def read_arrays(path: Path, specs: Specs) -> ArrayFileContents:
    """Read the arrays of one file, by input name.

    Raises:
        FeedError: the file is damaged, holds objects, or does not fit the inputs.
    """
    notes: list[str] = []
    kind = path.suffix.lower()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
            if kind == ".npz":
                arrays = _load_npz(path, notes)
            else:
                arrays = {"": _load_npy(path) if kind == ".npy" else _load_raw(path, specs)}
    except FeedError:
        raise
    except Exception as e:  # numpy and zipfile raise a dozen kinds of error on malformed bytes
        raise FeedError(
            f"{printable_name(str(path))} cannot be read as plain numpy arrays: {first_line(e)};"
            " write it with numpy.save or numpy.savez"
        ) from e
    labels = _take_labels(arrays, specs)
    item = arrays_by_input(arrays, specs, printable_name(path.name))
    if labels is not None and len(labels) != (
        count := count_samples(item, specs, printable_name(path.name))
    ):
        raise FeedError(
            f"{printable_name(path.name)} must have one label per sample, got {len(labels)} for"
            f" {count}"
        )
    return ArrayFileContents(item, labels, notes)


def open_array_files(
    files: Sequence[ImageFile], specs: Specs, name: str, *, skip_bad: bool
) -> ArraySource:
    """Open files that each hold all inputs; a file's label applies to all its samples.

    Raises:
        FeedError: a file does not fit the inputs; with `skip_bad` only when the file is read.
    """
    parts = [_parts_of_line(one, specs) for one in files]
    source = _open_items(parts, [one.name for one in files], specs, name, skip_bad=skip_bad)
    given = [one.label for one in files]
    if None in given:
        return source
    ends = (0, *source.item_ends)
    counts = [end - start for start, end in pairwise(ends)]
    labels = tuple(int(v or 0) for v, n in zip(given, counts, strict=True) for _ in range(n))
    return replace(source, labels=labels)


def _parts_of_line(one: ImageFile, specs: Specs) -> Mapping[str, Path]:
    """Return the files of an item: one of all inputs, or one per input on a line of a list."""
    names = one.name.split()
    if len(names) == 1 or one.path.exists():
        return {"": one.path}
    if len(names) != len(specs):
        raise FeedError(
            f"{printable_name(one.name)} must name one file of all inputs or one for each of"
            f" {[spec.name for spec in specs]}, got {len(names)}"
        )
    folder = Path(str(one.path).removesuffix(one.name))
    return {spec.name: folder / name for spec, name in zip(specs, names, strict=True)}


def open_array_folder(
    folder: Path, files: Sequence[ImageFile], specs: Specs, *, skip_bad: bool
) -> ArraySource:
    """Open the files of arrays in a folder, or in one subfolder per input.

    Raises:
        FeedError: a file does not fit the inputs, or the subfolders hold different file names.
    """
    title = printable_name(folder.name or str(folder))
    tops = {one.name.partition("/")[0] for one in files if "/" in one.name}
    if len(specs) > 1 and tops == {spec.name for spec in specs}:
        return _from_subfolders(files, specs, title, skip_bad=skip_bad)
    return open_array_files(files, specs, title, skip_bad=skip_bad)


def _from_subfolders(
    files: Sequence[ImageFile], specs: Specs, title: str, *, skip_bad: bool
) -> ArraySource:
    """Open one folder per input; files of the same name form one item."""
    by_input: dict[str, dict[str, Path]] = {spec.name: {} for spec in specs}
    for one in files:
        top, _, rest = one.name.partition("/")
        if top in by_input and rest:
            by_input[top][os.path.splitext(rest)[0]] = one.path
    stems = sorted(set.union(*(set(by_stem) for by_stem in by_input.values())), key=os.fsencode)
    for top, by_stem in by_input.items():
        missing = [stem for stem in stems if stem not in by_stem]
        if missing:
            raise FeedError(
                f"every input's folder in {title} must have files of the same names, got"
                f" {len(missing)} missing in {printable_name(top)}, the first"
                f" {printable_name(missing[0])}; add them"
            )
    parts = [{top: by_stem[stem] for top, by_stem in by_input.items()} for stem in stems]
    return _open_items(parts, stems, specs, title, skip_bad=skip_bad)


def _open_items(
    parts: Sequence[Mapping[str, Path]],
    called: Sequence[str],
    specs: Specs,
    name: str,
    *,
    skip_bad: bool,
) -> ArraySource:
    counts, notes, labels = [], set[str](), list[int]()
    for part in parts:
        try:
            contents = _read_item(part, specs)
            count = count_samples(
                contents.item, specs, " and ".join(printable_name(p.name) for p in part.values())
            )
        except FeedError:
            if not skip_bad:
                raise
            contents, count = ArrayFileContents({}), 1  # reading the item will report the error
        else:
            notes |= set(conversion_notes(contents.item, specs))
        counts.append(count)
        labels += contents.labels or ()
        notes |= {"compressed .npz files are unpacked into temporary files" for _ in contents.notes}
    if not sum(counts):
        raise FeedError(f"{name} must hold samples, got none")
    return ArraySource(
        specs,
        FileItems(tuple(parts), specs),
        tuple(accumulate(counts)),
        name,
        tuple(labels) if len(labels) == sum(counts) else None,
        tuple(sorted(notes)),
        item_names=tuple(map(printable_name, called)),
    )


@dataclass(frozen=True)
class FileItems:
    """Items in files, each read when needed.

    Attributes:
        parts: per item, input name -> its file, or "" -> the file of all inputs.
    """

    parts: tuple[Mapping[str, Path], ...]
    specs: Specs

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int, /) -> Item:
        return _read_item(self.parts[index], self.specs).item


def _read_item(part: Mapping[str, Path], specs: Specs) -> ArrayFileContents:
    for path in part.values():
        add_input_file(path)
    if "" in part:
        return read_arrays(part[""], specs)
    each = {spec.name: read_arrays(part[spec.name], (spec,)) for spec in specs}
    notes = [note for one in each.values() for note in one.notes]
    return ArrayFileContents({name: one.item[name] for name, one in each.items()}, notes=notes)


def _load_raw(path: Path, specs: Specs) -> Array:
    """Map values without a header: samples of the input's dtype and shape, one after the other."""
    if len(specs) != 1:
        raise FeedError(
            f"{printable_name(path.name)} holds the values of one input, the model has"
            f" {len(specs)}; put one subfolder per input, named as the input, into the folder"
        )
    (spec,) = specs
    sizes = spec.shape[1:] if has_batch_dimension(spec, specs) else spec.shape
    inner = tuple(d for d in sizes if isinstance(d, int))
    if len(inner) != len(sizes):
        raise FeedError(
            f"{printable_name(path.name)} has no header, so the input must state its shape, got"
            f" {describe(spec)}; give it (--raw-shape), or write .npy files, which store theirs"
        )
    refuse_irregular(path, what="a file of values", error=FeedError)
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    sample_bytes, got = prod(inner) * dtype.itemsize, path.stat().st_size
    if not got or got % sample_bytes:
        raise FeedError(
            f"{printable_name(path.name)} must hold complete samples of the input {describe(spec)},"
            f" {sample_bytes:,} bytes each, got {got:,} bytes; check its shape and dtype"
            " (--raw-shape, --raw-dtype)"
        )
    return np.memmap(path, dtype, "r", 0, (got // sample_bytes, *inner))


def _load_npy(path: Path) -> Array:
    refuse_irregular(path, what="an .npy file", error=FeedError)
    with HEADER_LOCK:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an .npz archive under the name .npy")
    return array


def _load_npz(path: Path, notes: list[str]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    compressed = []
    with open_regular_file(path, what="an .npz file", error=FeedError) as raw:
        check_archive(raw, path, what="an .npz file", error=FeedError, max_entries=_MOST_ENTRIES)
        with zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                if info.compress_type == zipfile.ZIP_STORED:
                    arrays[key] = _map_entry(path, raw, info)
                else:
                    compressed.append(info)
            needed = sum(info.file_size for info in compressed)
            folder = tempfile.gettempdir()
            if needed > (free := shutil.disk_usage(folder).free):
                raise FeedError(
                    f"{printable_name(str(path))} needs {format_bytes(needed)} of room in {folder}"
                    f" to be unpacked, got {format_bytes(free)}; write it with numpy.savez, which"
                    " needs no unpacking"
                )
            for info in compressed:
                with archive.open(info) as stream:
                    arrays[info.filename.removesuffix(".npy")] = _unpacked(stream, info.file_size)
    if compressed:
        notes.append(
            f"{printable_name(path.name)} is compressed and was unpacked into temporary files"
        )
    return arrays


def _unpacked(stream: IO[bytes], room: int) -> Array:
    """Unpack a compressed entry into a temporary file without a name, and map it."""
    shape, fortran, dtype = read_array_header(stream, room)
    if 0 in shape or not shape:
        return np.frombuffer(stream.read(dtype.itemsize * prod(shape)), dtype).reshape(shape)
    with tempfile.TemporaryFile(prefix="calib8-feed-") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
        file.flush()
        return np.memmap(file, dtype, "r", 0, shape, "F" if fortran else "C")


def _map_entry(path: Path, raw: IO[bytes], info: zipfile.ZipInfo) -> Array:
    """Memory-map an uncompressed entry; its data starts after the local header."""
    raw.seek(info.header_offset)
    header = raw.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("a local header is damaged")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    raw.seek(info.header_offset + 30 + names)
    shape, fortran, dtype = read_array_header(raw, info.file_size)
    if 0 in shape or not shape:
        return np.fromfile(raw, dtype, count=int(np.prod(shape))).reshape(shape)
    return np.memmap(path, dtype, "r", raw.tell(), shape, "F" if fortran else "C")


def _take_labels(arrays: dict[str, Array], specs: Specs) -> tuple[int, ...] | None:
    inputs = {s.name for s in specs}
    for key in LABEL_KEYS:
        labels = arrays.get(key)
        if labels is not None and key not in inputs and labels.ndim == 1:
            del arrays[key]
            if labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
                got = labels.min() if labels.dtype.kind == "i" else labels.dtype
                raise FeedError(
                    f"{key!r} must be whole numbers from 0, got {got}; number the classes in the"
                    " order of the model's outputs, and leave out samples without a class"
                )
            return tuple(int(v) for v in labels)
    return None
