"""Arrays as a feed, whether of files or of Python iterables, cut into samples.

Every array is read against the model's input of its name. Where the input has rank r, the array
may be

* rank r, a batch: sample i is ``a[i:i+1]`` (also where the input's own batch is fixed);
* rank r + 1, samples stacked with their batch dimension: sample i is ``a[i]``;
* rank r - 1, one sample without a batch dimension (iterables only);
* rank r with a first dimension that is no batch (a state [2, N, 64]): taken whole.

What a loader gives -> the model's inputs: arrays, tensors, tuples with labels, mappings.

By duck typing, so that no framework is needed: whatever numpy makes an array of is one, a torch
tensor that has a gradient too.

Arrays in a file without a name, which is gone with the process.

What is there is known by who wrote it, so that there is no header to read: numpy parses those as
Python, and Python 3.11 fails at that by chance where several threads do (python/cpython#106905).
"""

from __future__ import annotations

import bisect
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from deploy.errors import FeedError
from deploy.feed.listing import Changed, Raw, sample_digest
from deploy.feed.preprocess import describe
from deploy.tensors import Array, TensorSpec

Specs = Sequence[TensorSpec]
Item = dict[str, Array]
_MOST_NAMED = 5


def inputs_of(value: object, specs: Specs, where: str) -> tuple[Item, list[str]]:
    """The inputs in an item of a loader, and what else it holds, in words.

    ::

        array                       the only input
        (array, ...), [array, ...]  the inputs in their order, then what is left out
        ({name: array}, ...)        the mapping, then what is left out
        {name: array, ...}          the inputs by name; other names are left out

    Raises:
        FeedError: it is none of these, or a tuple of which nobody can tell what is an input.
    """
    if isinstance(value, tuple | list) and not _is_numbers(value):
        return _of_tuple(value, specs, where)
    if isinstance(value, Mapping):
        return _of_mapping(value, specs, where)
    return by_name({"": as_array(value, where)}, specs, where), []


def _of_tuple(value: Sequence[Any], specs: Specs, where: str) -> tuple[Item, list[str]]:
    if value and isinstance(value[0], Mapping):
        item, left = _of_mapping(value[0], specs, where)
        return item, left + _numbered(value[1:], 1)
    if len(value) < len(specs):
        raise FeedError(
            f"{where} must hold the inputs {[s.name for s in specs]}, got a"
            f" {type(value).__name__} of {len(value)}; give a dict of arrays by input name"
        )
    arrays = [as_array(one, where) for one in value[: len(specs)]]
    rest = value[len(specs) :]
    twins = [one for one in rest if np.shape(arrays[0])[-2:] and _shape(one) == arrays[0].shape]
    if twins and arrays[0].ndim > 1:
        raise FeedError(
            f"{where} must tell its inputs from what is beside them, got a {type(value).__name__}"
            f" of {len(value)} with several of the shape {list(arrays[0].shape)}; give one array a"
            " sample, or a dict of arrays by input name"
        )
    return {s.name: a for s, a in zip(specs, arrays, strict=True)}, _numbered(rest, len(specs))


def _numbered(rest: Sequence[object], first: int) -> list[str]:
    return [f"number {place}" for place, _ in enumerate(rest[:_MOST_NAMED], first + 1)]


def _of_mapping(value: Mapping[Any, Any], specs: Specs, where: str) -> tuple[Item, list[str]]:
    wanted = [s.name for s in specs]
    missing = [name for name in wanted if name not in value]
    if missing:
        raise FeedError(
            f"{where} must name the inputs {wanted}, got {sorted(map(str, value))};"
            " name its arrays as the model does"
        )
    left = [repr(str(name)) for name in value if name not in wanted]
    return {name: as_array(value[name], where) for name in wanted}, left[:_MOST_NAMED]


def as_array(value: object, where: str) -> Array:
    """Whatever numpy makes an array of numbers of.

    Raises:
        FeedError: it makes none.
    """
    try:
        plain = value.detach().cpu() if hasattr(value, "detach") else value
        array: Array = np.asarray(plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{where} must be an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(
            f"{where} must be an array of numbers, a tuple that begins with them, or a dict of them"
            f" by input name, got {type(value).__name__}"
        )
    return array


def _is_numbers(value: Sequence[Any]) -> bool:
    """Whether lists are nested down to plain numbers, as JSON and datasets give them."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _shape(value: object) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def by_name(arrays: dict[str, Array], specs: Specs, where: str) -> Item:
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array is, and what it is."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Scratch:
    """Arrays by their places; several threads may write and read."""

    def __init__(self, prefix: str) -> None:
        """Make the file; its name begins with this while it has one.

        Raises:
            OSError: there is no room for it.
        """
        # without a buffer, in which what a full disk did not take would stand before every read
        self._file: FileIO = tempfile.TemporaryFile(prefix=prefix, buffering=0)  # noqa: SIM115
        self._using = threading.Lock()
        weakref.finalize(self, _close, self._file)

    def add(self, array: Array) -> Place:
        """Write one behind all others.

        Raises:
            OSError: the disk is full.
            ValueError: it holds Python objects.
        """
        values = np.ascontiguousarray(array)
        if values.dtype.hasobject:
            raise ValueError("it holds Python objects")
        left = memoryview(values.reshape(-1).view(np.uint8).data)
        with self._using:
            place = Place(self._file.seek(0, 2), values.dtype, np.shape(array))
            while left:
                left = left[self._file.write(left) :]
        return place

    def get(self, place: Place) -> Array:
        """What was written there; it may be written to."""
        found = np.empty(place.shape, place.dtype)
        left = memoryview(found.reshape(-1).view(np.uint8).data)
        with self._using:
            self._file.seek(place.start)
            while left and (read := self._file.readinto(left)):
                left = left[read:]
        if left:
            raise OSError("a temporary file must hold what was written to it, got less")
        return found


def _close(file: FileIO) -> None:
    """Let it go."""
    with suppress(OSError):
        file.close()


_MOST_ENTRIES = 1 << 12  # arrays of an .npz file: one an input
LABEL_KEYS = ("labels", "label", "y")


class Items(Protocol):
    """Random access to items, each of one or more samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


@dataclass(frozen=True)
class ArraySource:
    """Samples over items: sample -> (item, row).

    Attributes:
        specs: the model's inputs.
        items: arrays by input.
        ends: of each item, the samples up to its last.
        name: of all of it, in messages.
        labels: of the samples.
        notes: what the user should know.
        called: of each item, where items have names.
    """

    specs: tuple[TensorSpec, ...]
    items: Items
    ends: tuple[int, ...]
    name: str
    labels: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    called: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages."""
        if not self.called:
            return f"sample {index} of {self.name}"
        where, row = self._place(index)
        alone = self.ends[where] - index + row == 1
        return self.called[where] if alone else f"sample {row} of {self.called[where]}"

    def told(self, index: int) -> str:
        """The same; in the middle of a sentence."""
        return self.sample_name(index)

    def load(self, index: int) -> Raw:
        """Arrays with a batch dimension of 1 by input name, copied and hashed.

        Raises:
            FeedError: (when decoding) they hold NaN or Inf.
        """
        where, row = self._place(index)
        item = self.items[where]
        if self.called and rows(item, self.specs, self.called[where]) <= row:
            raise Changed(
                f"{self.called[where]} changed while calib8 ran; leave it alone meanwhile"
            )
        sample = {s.name: _row(item[s.name], s, row, self.specs) for s in self.specs}
        return Raw(sample_digest(sample), lambda: _finite(sample, self.sample_name(index)))

    def _place(self, index: int) -> tuple[int, int]:
        """The item that a sample is in, and its row there."""
        where = bisect.bisect_right(self.ends, index)
        return where, index - (self.ends[where - 1] if where else 0)


def from_iterable(
    source: Iterable[object], specs: tuple[TensorSpec, ...], *, name: str = "the iterable"
) -> ArraySource:
    """Items of one or more samples each: arrays, tuples that begin with them, mappings by name.

    A list or a tuple is used as it is. Anything else is read once, one item at a time, into a
    temporary file (it is needed twice: for its digest and for the run). What an item holds beside
    the inputs, such as labels, is left out, and said. `name` is that of all of it in messages.

    Raises:
        FeedError: an item that does not fit the inputs, or none at all.
    """
    counts: list[int] = []
    spooled = not isinstance(source, list | tuple)
    spool = _Spool() if spooled else None
    kept: list[Item] = []
    beside: dict[str, None] = {}
    for index, value in enumerate(source):
        where = f"item {index} of {name}"
        arrays, left = inputs_of(value, specs, where)
        beside |= dict.fromkeys(left)
        item = {s.name: _with_batch(arrays[s.name], s) for s in specs}
        counts.append(rows(item, specs, where))
        if spool is not None:
            spool.append(item)
        else:
            kept.append(item)
    if not sum(counts):
        raise FeedError(f"{name} must give samples, got none")
    notes = [f"left out of the items, as no input has it: {', '.join(beside)}"] if beside else []
    if spooled:
        notes.append(f"{name} was read once into a temporary file ({sum(counts)} samples)")
    items: Items = spool if spool is not None else kept
    return ArraySource(specs, items, tuple(accumulate(counts)), name, None, tuple(notes))


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
        # whoever reads it in a row tells the way out
        raise FeedError(f"{where} holds {bad} NaN or Inf values for the input {name!r}")


def _with_batch(array: Array, spec: TensorSpec) -> Array:
    return array[None] if spec.shape and array.ndim == len(spec.shape) - 1 else array


class _Spool:
    """Items in a temporary file that goes with the object; several threads may read."""

    def __init__(self) -> None:
        self._scratch = Scratch("calib8-feed-")
        self._places: list[dict[str, Place]] = []

    def append(self, item: Item) -> None:
        try:
            places = {name: self._scratch.add(array) for name, array in item.items()}
        except OSError as error:
            raise FeedError(
                f"the iterable must fit into a temporary file, got: {error.strerror or error}; free"
                " some of the disk, or set TMPDIR to another"
            ) from error
        self._places.append(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int, /) -> Item:
        return {name: self._scratch.get(place) for name, place in self._places[index].items()}

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))
