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
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from deploy.errors import FeedError, first_line
from deploy.feed.arrays import (
    LABEL_KEYS,
    ArraySource,
    SampleCounter,
    add_missing_batch,
    arrays_by_input,
    count_samples,
)
from deploy.feed.batch_axis import Specs
from deploy.feed.file_list import FileList, ImageFile, Labels
from deploy.feed.images import printable_name, suffix_of
from deploy.feed.preprocess import describe
from deploy.feed.temporary_arrays import Item
from deploy.files.archives import check_archive, read_array_header
from deploy.files.guard import add_input_file
from deploy.files.reading import open_regular_file, refuse_irregular
from deploy.tensors import Array

SUFFIXES = frozenset((".bin", ".npy", ".npz", ".raw"))
_MAX_ENTRIES = 1 << 12  # arrays in an .npz file: one per input
_COPY_CHUNK_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its names


def is_array_file(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a file of arrays."""
    return suffix_of(path) in SUFFIXES


def is_raw_file(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of values without a header."""
    return suffix_of(path) in (".bin", ".raw")


def open_array_files(files: FileList, specs: Specs, title: str, *, skip_bad: bool) -> ArraySource:
    """Return the samples of files that each hold all inputs, or of one folder per input.

    Args:
        files: the files; the label of one applies to all its samples.
        specs: the model's inputs, or what raw files hold.
        title: of all files in messages.
        skip_bad: count a file with an error as one sample; reading it then raises the error.

    Raises:
        FeedError: a file does not fit the inputs, unless `skip_bad`; the folders hold different
            file names; or there are no samples.
    """
    folders = {name.partition("/")[0] for name in files.names if "/" in name}
    is_folder_per_input = len(specs) > 1 and folders == {spec.name for spec in specs}
    if is_folder_per_input and files.labels is None:
        return _open_subfolders(files, specs, title, skip_bad=skip_bad)
    item_paths = [_paths_by_input(file, specs) for file in files]
    source = _open_items(item_paths, files.names, specs, title, skip_bad=skip_bad)
    if files.labels is None:
        return source
    sample_counts = np.diff(source.item_ends, prepend=0)  # of each file
    labels = np.repeat(files.labels, sample_counts).tolist()
    return replace(source, labels=tuple(labels))


def _paths_by_input(file: ImageFile, specs: Specs) -> Mapping[str, Path]:
    """Return input name -> its file; or "" -> the file of all inputs.

    `file`: a line of a list, which names one file, or one for each input, separated by spaces. Its
    `name` is the complete line, and its `path` the list's folder with this name, so in the second
    case no path of a file.
    """
    names = file.name.split()
    if len(names) == 1 or file.path.exists():  # a single file may have spaces in its name
        return {"": file.path}
    if len(names) != len(specs):
        raise FeedError(
            f"{printable_name(file.name)} must name one file of all inputs or one for each of"
            f" {[spec.name for spec in specs]}, got {len(names)}"
        )
    folder = Path(str(file.path).removesuffix(file.name))  # of the list
    return {spec.name: folder / name for spec, name in zip(specs, names, strict=True)}


def _open_subfolders(files: FileList, specs: Specs, title: str, *, skip_bad: bool) -> ArraySource:
    """Return the samples in one folder per input; files of one name, suffix aside, form an item.

    Raises:
        FeedError: an input has no file of a name that another one has, or two of them.
    """
    # a.npy of input x and a.bin of input y: {"a": {"x": x/a.npy, "y": y/a.bin}}
    paths_by_stem: dict[str, dict[str, Path]] = {}
    for file in files:
        input_name, _, name = file.name.partition("/")
        if name:  # else it lies beside the folders
            stem = os.path.splitext(name)[0]
            path_by_input = paths_by_stem.setdefault(stem, {})
            if input_name in path_by_input:
                earlier_name = printable_name(path_by_input[input_name].name)
                raise FeedError(
                    f"every input's folder in {title} must have one file of a name, suffix aside,"
                    f" got {earlier_name} and {printable_name(file.path.name)} in"
                    f" {printable_name(input_name)}; remove one"
                )
            path_by_input[input_name] = file.path
    stems = sorted(paths_by_stem, key=os.fsencode)

    for spec in specs:
        missing_stems = [stem for stem in stems if spec.name not in paths_by_stem[stem]]
        if missing_stems:
            raise FeedError(
                f"every input's folder in {title} must have files of the same names, got"
                f" {len(missing_stems)} missing in {printable_name(spec.name)}, the first"
                f" {printable_name(missing_stems[0])}; add them"
            )
    items = [paths_by_stem[stem] for stem in stems]
    return _open_items(items, stems, specs, title, skip_bad=skip_bad)


class FileItems:
    """Items in files, each read when needed. The last one stays open: it may hold many samples."""

    def __init__(self, paths: Sequence[Mapping[str, Path]], specs: Specs) -> None:
        """Open no file yet.

        Args:
            paths: per item, input name -> its file, or "" -> the file of all inputs.
            specs: the arrays of a sample.
        """
        self._paths = paths
        self._specs = specs
        self._read_last = lru_cache(maxsize=1)(self._read)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int, /) -> Item:
        return self._read_last(index)

    def _read(self, index: int) -> Item:
        item, _ = _read_item(self._paths[index], self._specs)
        return item


def _open_items(
    paths: Sequence[Mapping[str, Path]],
    item_names: Sequence[str],
    specs: Specs,
    name: str,
    *,
    skip_bad: bool,
) -> ArraySource:
    """Return the samples of several items, of which only the headers are read now.

    Args:
        paths: per item, input name -> its file, or "" -> the file of all inputs.
        item_names: names of the items in messages.
        specs: the model's inputs, or what raw files hold.
        name: of the source in messages.
        skip_bad: count an item with an error as one sample; its reading will raise the error.

    Raises:
        FeedError: a file does not fit the inputs, unless `skip_bad`; or there are no samples.
    """
    counter = SampleCounter(specs)
    labels: list[int] = []
    for item_paths in paths:
        file_names = " and ".join(printable_name(path.name) for path in item_paths.values())
        try:
            item, item_labels = _read_item(item_paths, specs)  # its arrays are mapped, not read
            counter.add(item, file_names)
        except FeedError:
            if not skip_bad:
                raise
            counter.add_unread()
        else:
            labels += item_labels or ()

    total = counter.total
    if not total:
        raise FeedError(f"{name} must hold samples, got none")
    return ArraySource(
        specs=counter.specs,
        items=FileItems(paths, counter.specs),
        item_ends=counter.item_ends,
        batch=counter.batch,
        name=name,
        labels=tuple(labels) if len(labels) == total else None,  # only if every sample has one
        item_names=tuple(map(printable_name, item_names)),
    )


def _read_item(paths: Mapping[str, Path], specs: Specs) -> tuple[Item, Labels]:
    """Read the file of all inputs, or one file per input; return (arrays by input, labels).

    `paths`: input name -> its file, or "" -> the file of all inputs, which alone may have labels.
    """
    for path in paths.values():
        add_input_file(path)
    if "" in paths:
        return read_arrays(paths[""], specs)
    item: Item = {}
    for spec in specs:  # a file for each input
        arrays, _ = read_arrays(paths[spec.name], (spec,))
        item |= arrays
    return item, None


def read_arrays(path: Path, specs: Specs) -> tuple[Item, Labels]:
    """Return (the arrays of one file by input name, one class number per sample or None).

    Args:
        path: of an .npy or .npz file, or one of raw values.
        specs: the inputs that it holds.

    Raises:
        FeedError: the file is damaged, holds objects, does not fit the inputs, or has labels but
            not one for each sample.
    """
    suffix = suffix_of(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
            if suffix == ".npz":
                arrays = _load_npz(path)
            elif suffix == ".npy":  # "" stands for an array without a name
                arrays = {"": _load_npy(path)}
            else:
                arrays = {"": _load_raw(path, specs)}
    except FeedError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds on malformed bytes
        raise FeedError(
            f"{printable_name(path)} cannot be read as plain numpy arrays:"
            f" {first_line(error)}; write it with numpy.save or numpy.savez"
        ) from error

    name = printable_name(path.name)
    labels = _take_labels(arrays, specs)  # removed from the arrays: the others are inputs
    input_arrays = arrays_by_input(arrays, specs, name)
    for spec in specs:
        # the file of a single sample may lack the batch dimension, whose rows are samples
        if spec.has_batch:
            input_arrays[spec.name] = add_missing_batch(input_arrays[spec.name], spec)
    if labels is not None:
        count = count_samples(input_arrays, specs, name)
        if len(labels) != count:
            raise FeedError(f"{name} must have one label per sample, got {len(labels)} for {count}")
    return input_arrays, labels


def _take_labels(arrays: dict[str, Array], specs: Specs) -> Labels:
    """Remove the class numbers from the arrays of a file and return them; None without any.

    They are a vector, or a number for a single sample, called "labels", "y" or the like.
    """
    input_names = [spec.name for spec in specs]
    for key in LABEL_KEYS:
        is_input = key in input_names
        if is_input or key not in arrays or arrays[key].ndim > 1:
            continue
        labels = np.atleast_1d(arrays.pop(key))
        if labels.dtype.kind not in "iu" or (labels < 0).any():
            # a negative number, or the dtype of other values
            got = labels.min() if labels.dtype.kind == "i" else labels.dtype
            raise FeedError(
                f"{key!r} must be whole numbers from 0, got {got};"
                " number the classes in the order of the model's outputs, and leave out samples"
                " without a class"
            )
        return tuple(map(int, labels))
    return None


def _load_raw(path: Path, specs: Specs) -> Array:
    """Return the samples of a file without a header, memory-mapped: [samples, ...].

    The file holds the values of one input, samples in its shape and dtype one after the other.
    """
    name = printable_name(path.name)
    if len(specs) != 1:
        raise FeedError(
            f"{name} holds the values of one input, the model has {len(specs)}; put one subfolder"
            " per input, named as the input, into the folder"
        )
    (spec,) = specs
    # without the first dimension, if it counts samples: a file holds any number of them
    expected_shape = spec.shape[1:] if spec.has_batch else spec.shape
    sample_shape = tuple(size for size in expected_shape if isinstance(size, int))
    if len(sample_shape) != len(expected_shape):
        raise FeedError(
            f"{name} has no header, so the input must state its shape, got {describe(spec)}; give"
            " it (--raw-shape), or write .npy files, which store theirs"
        )

    refuse_irregular(path, what="a file of values", error=FeedError)  # numpy opens it, below
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    sample_bytes = prod(sample_shape) * dtype.itemsize  # a model's fixed sizes are 1 or more
    file_bytes = path.stat().st_size
    if not file_bytes or file_bytes % sample_bytes:
        raise FeedError(
            f"{name} must hold complete samples of the input {describe(spec)},"
            f" {sample_bytes:,} bytes each, got {file_bytes:,} bytes; check its shape and dtype"
            " (--raw-shape, --raw-dtype)"
        )
    shape = (file_bytes // sample_bytes, *sample_shape)
    return np.memmap(path, dtype, mode="r", shape=shape)


def _load_npy(path: Path) -> Array:
    """Memory-map an .npy file."""
    with open_regular_file(path, what="an .npy file", error=FeedError) as file:
        return _map_array(file, os.fstat(file.fileno()).st_size)


def _load_npz(path: Path) -> dict[str, Array]:
    """Return the arrays by name, memory-mapped; compressed ones are unpacked for that."""
    arrays: dict[str, Array] = {}
    with open_regular_file(path, what="an .npz file", error=FeedError) as file:
        check_archive(file, path, what="an .npz file", error=FeedError, max_entries=_MAX_ENTRIES)
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type == zipfile.ZIP_STORED:
                    array = _map_entry(file, entry)
                else:
                    with archive.open(entry) as stream:
                        array = _unpack(stream, entry.file_size)
                arrays[entry.filename.removesuffix(".npy")] = array
    return arrays


def _unpack(stream: IO[bytes], max_bytes: int) -> Array:
    """Unpack a compressed entry into a temporary file without a name, and map it."""
    with tempfile.TemporaryFile(prefix="calib8-feed-") as file:
        shutil.copyfileobj(stream, file, _COPY_CHUNK_BYTES)
        file.seek(0)
        return _map_array(file, max_bytes)


def _map_entry(file: IO[bytes], entry: zipfile.ZipInfo) -> Array:
    """Memory-map an uncompressed entry of the archive `file`.

    Its .npy bytes follow the entry's local header, whose two last fields are the sizes of the name
    and of the extra field behind it.
    """
    file.seek(entry.header_offset)
    local_header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", local_header, 26)
    file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
    return _map_array(file, entry.file_size)


def _map_array(file: IO[bytes], max_bytes: int) -> Array:
    """Memory-map the array whose .npy bytes begin at the position of a file.

    Args:
        file: an open file of the system, which may be closed afterwards.
        max_bytes: upper bound of the size of its .npy bytes.

    Raises:
        ValueError: see `read_array_header`; or the file ends before.
    """
    shape, is_fortran, dtype = read_array_header(file, max_bytes)
    if 0 in shape:  # nothing to map
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")
