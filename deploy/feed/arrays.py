"""Arrays from files or Python iterables, split into samples.

An item of an iterable holds one array per input: an array, a tensor, a tuple with labels, or a
mapping. Items are recognized by duck typing, so no framework is imported: whatever numpy converts
to an array is one, also a torch tensor that requires a gradient.

Each array is matched to the model's input of its name. For an input of rank r, the array may have

* rank r, a batch: sample i is ``a[i:i+1]`` (also if the input's own batch is fixed);
* rank r + 1, samples stacked with their batch dimension: sample i is ``a[i]``, of any batch;
* rank r - 1, one sample without a batch dimension (iterables only);
* rank r with a first dimension that is no batch (a state [2, N, 64]): one sample.

`TemporaryArrays` stores arrays in a temporary file without a name. It keeps their dtypes and shapes
in memory, so the file has no headers: numpy parses headers as Python code, and Python 3.11
sometimes fails at that in several threads (python/cpython#106905).
"""

import bisect
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from deploy.errors import FeedError
from deploy.feed.file_list import RawSample, SampleChangedError, sample_digest
from deploy.feed.preprocess import describe
from deploy.tensors import Array, TensorSpec

Specs = Sequence[TensorSpec]
Item = dict[str, Array]
_MOST_NAMED = 5


def match_inputs(value: object, specs: Specs, where: str) -> tuple[Item, list[str]]:
    """Return the inputs in an item of an iterable, and the names of everything else it holds.

    ::

        array                       the only input
        (array, ...), [array, ...]  the inputs in order; further elements are ignored
        ({name: array}, ...)        a mapping, as below; further elements are ignored
        {name: array, ...}          the inputs by name; other names are ignored

    Raises:
        FeedError: the item is none of these, or a tuple in which the inputs are ambiguous.
    """
    if isinstance(value, tuple | list) and not _is_numbers(value):
        return _inputs_of_tuple(value, specs, where)
    if isinstance(value, Mapping):
        return _inputs_of_mapping(value, specs, where)
    return arrays_by_input({"": as_array(value, where)}, specs, where), []


def _inputs_of_tuple(value: Sequence[Any], specs: Specs, where: str) -> tuple[Item, list[str]]:
    if value and isinstance(value[0], Mapping):
        item, extra = _inputs_of_mapping(value[0], specs, where)
        return item, extra + _numbered(value[1:], 1)
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
            f"{where} must distinguish its inputs from its other values, got a"
            f" {type(value).__name__} of {len(value)} with several of the shape"
            f" {list(arrays[0].shape)}; give one array per sample, or a dict of arrays by input"
            " name"
        )
    return {s.name: a for s, a in zip(specs, arrays, strict=True)}, _numbered(rest, len(specs))


def _numbered(rest: Sequence[object], first: int) -> list[str]:
    return [f"number {place}" for place, _ in enumerate(rest[:_MOST_NAMED], first + 1)]


def _inputs_of_mapping(
    value: Mapping[Any, Any], specs: Specs, where: str
) -> tuple[Item, list[str]]:
    wanted = [s.name for s in specs]
    missing = [name for name in wanted if name not in value]
    if missing:
        raise FeedError(
            f"{where} must name the inputs {wanted}, got {sorted(map(str, value))};"
            " name its arrays as the model does"
        )
    extra = [repr(str(name)) for name in value if name not in wanted]
    return {name: as_array(value[name], where) for name in wanted}, extra[:_MOST_NAMED]


def as_array(value: object, where: str) -> Array:
    """Convert a value to an array of numbers.

    Raises:
        FeedError: numpy makes no array of numbers of it.
    """
    try:
        tensor = value.detach().cpu() if hasattr(value, "detach") else value
        array: Array = np.asarray(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{where} must be an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(
            f"{where} must be an array of numbers, a tuple that begins with them, or a dict of them"
            f" by input name, got {type(value).__name__}"
        )
    return array


def _is_numbers(value: Sequence[Any]) -> bool:
    """Return whether a list is nested down to plain numbers, as from JSON or datasets."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _shape(value: object) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def arrays_by_input(arrays: dict[str, Array], specs: Specs, where: str) -> Item:
    """Return arrays by input name; a single array belongs to the only input, whatever its name."""
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
class ArrayLocation:
    """Location, dtype and shape of an array in a `TemporaryArrays`."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class TemporaryArrays:
    """Temporary store of arrays in a file; several threads may write and read."""

    def __init__(self, prefix: str) -> None:
        """Create the file, with a name that starts with `prefix` until it is unlinked.

        Raises:
            OSError: the disk is full.
        """
        # unbuffered: a buffer would retry data that a full disk refused before every read
        self._file: FileIO = tempfile.TemporaryFile(prefix=prefix, buffering=0)  # noqa: SIM115
        self._using = threading.Lock()
        weakref.finalize(self, _close, self._file)

    def add(self, array: Array) -> ArrayLocation:
        """Append an array.

        Raises:
            OSError: the disk is full.
            ValueError: the array holds Python objects.
        """
        values = np.ascontiguousarray(array)
        if values.dtype.hasobject:
            raise ValueError("it holds Python objects")
        left = memoryview(values.reshape(-1).view(np.uint8).data)
        with self._using:
            place = ArrayLocation(self._file.seek(0, 2), values.dtype, np.shape(array))
            while left:
                left = left[self._file.write(left) :]
        return place

    def get(self, place: ArrayLocation) -> Array:
        """Return the array at `place` as a new, writable array."""
        array = np.empty(place.shape, place.dtype)
        left = memoryview(array.reshape(-1).view(np.uint8).data)
        with self._using:
            self._file.seek(place.start)
            while left and (read := self._file.readinto(left)):
                left = left[read:]
        if left:
            raise OSError("a temporary file must hold what was written to it, got less")
        return array


def _close(file: FileIO) -> None:
    with suppress(OSError):
        file.close()


class ItemSequence(Protocol):
    """Random access to items, each of one or more samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


@dataclass(frozen=True)
class ArraySource:
    """Samples in items: sample index -> (item, row).

    Attributes:
        item_ends: per item, the number of samples up to its end.
        item_names: names of the items; empty if they have none.
        convert: converts a sample of raw files to the input; None for arrays that fit as they are.
    """

    specs: tuple[TensorSpec, ...]
    items: ItemSequence
    item_ends: tuple[int, ...]
    name: str
    labels: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    item_names: tuple[str, ...] = ()
    convert: Callable[[Item], Item] | None = None

    def __len__(self) -> int:
        return self.item_ends[-1] if self.item_ends else 0

    @property
    def batch(self) -> int:
        """Samples of one run: 1 if each is of the input's rank, else what the model fixes."""
        batch = fixed_batch(self.specs)
        ranks = {} if batch == 1 else {name: one.ndim for name, one in self.items[0].items()}
        return 1 if any(ranks.get(s.name, 0) > len(s.shape) for s in self.specs) else batch

    def sample_name(self, index: int) -> str:
        """Return the sample's name for messages."""
        if not self.item_names:
            return f"sample {index} of {self.name}"
        where, row = self._place(index)
        alone = self.item_ends[where] - index + row == 1
        return self.item_names[where] if alone else f"sample {row} of {self.item_names[where]}"

    def title(self, index: int) -> str:
        """Return the sample's name for messages, in the middle of a sentence."""
        return self.sample_name(index)

    def load(self, index: int) -> RawSample:
        """Return arrays with a batch dimension of 1 by input name, copied and hashed.

        Raises:
            FeedError: (when decoding) the arrays hold NaN or Inf.
        """
        where, row = self._place(index)
        item = self.items[where]
        if self.item_names and count_samples(item, self.specs, self.item_names[where]) <= row:
            raise SampleChangedError(
                f"{self.item_names[where]} changed while calib8 ran; do not change it during a run"
            )
        sample = {s.name: _row(item[s.name], s, row, self.specs) for s in self.specs}
        make = self.convert or (lambda finite: finite)
        return RawSample(
            sample_digest(sample), lambda: make(_finite(sample, self.sample_name(index)))
        )

    def _place(self, index: int) -> tuple[int, int]:
        """Return the item of a sample and its row there."""
        where = bisect.bisect_right(self.item_ends, index)
        return where, index - (self.item_ends[where - 1] if where else 0)


MOST_SAMPLES = 100_000  # of something without a length, unless the user sets a limit


def open_iterable(
    source: Iterable[object],
    specs: tuple[TensorSpec, ...],
    *,
    name: str = "the iterable",
    ends: bool = True,
    limit: int | None = None,
) -> ArraySource:
    """Open an iterable of items with one or more samples each.

    An item is an array, a tuple that begins with arrays, or a mapping by input name. A list or a
    tuple is used directly. Anything else is read once, one item at a time, into a temporary file,
    since samples are needed twice: for their digest and for the run. Values that belong to no
    input, such as labels, are ignored; a note lists them.

    `ends` says whether it is known to end, as what has a length does; else it is read up to the
    first `limit` samples.

    Raises:
        FeedError: an item does not fit the inputs, there are no samples, or no end of them.
    """
    counts: list[int] = []
    is_stored = not isinstance(source, list | tuple)
    store = _ItemStore() if is_stored else None
    items_read: list[Item] = []
    ignored: dict[str, None] = {}
    converted: dict[str, None] = {}
    most = None if ends else limit
    total, first = 0, ""
    for index, value in enumerate(source):
        where = f"item {index} of {name}"
        arrays, extra = match_inputs(value, specs, where)
        ignored |= dict.fromkeys(extra)
        alone = {s.name for s in specs if s.shape and arrays[s.name].ndim == len(s.shape) - 1}
        item = {n: array[None] if n in alone else array for n, array in arrays.items()}
        count = count_samples(item, specs, where)
        converted |= dict.fromkeys(conversion_notes(item, specs))
        counts.append(count if most is None else min(count, most - total))
        total += counts[-1]
        if store is not None:
            store.append(item)
        else:
            items_read.append(item)
        if total == most:
            first = "the first "
            break
        if most is None and not ends and total > MOST_SAMPLES:
            raise FeedError(
                f"{name} must end, got {total:,} samples and no end; set a maximum number of"
                " samples (--limit), and the first ones are used"
            )
    if not total:
        raise FeedError(f"{name} must give samples, got none")
    notes = list(converted)
    if ignored:
        notes.append(f"left out of the items, as no input has it: {', '.join(ignored)}")
    if is_stored:
        notes.append(f"{name} was read once into a temporary file ({first}{total} samples)")
    items: ItemSequence = store if store is not None else items_read
    return ArraySource(specs, items, tuple(accumulate(counts)), name, None, tuple(notes))


def fixed_batch(specs: Sequence[TensorSpec]) -> int:
    """Return the batch size that all inputs fix in their first of several dimensions, else 1.

    An input [3, H, W] is an image without a batch dimension, no batch of 3.
    """
    firsts = {1 if _is_image(s.shape) else s.shape[0] for s in specs if len(s.shape) > 1}
    only = firsts.pop() if len(firsts) == 1 else None
    return only if isinstance(only, int) and only > 0 else 1


def _is_image(shape: tuple[int | str | None, ...]) -> bool:
    sides = shape[1:]
    return shape[0] == 3 and len(sides) == 2 and all(isinstance(d, int) and d > 3 for d in sides)


def count_samples(item: Item, specs: tuple[TensorSpec, ...], where: str) -> int:
    """Return the number of samples in an item.

    Raises:
        FeedError: a dtype, rank or dimension does not fit the input, or the counts differ.
    """
    counts: dict[str, int] = {}
    for spec in specs:
        array = item[spec.name]
        _check_array(array, spec, specs, where)
        if array.ndim > len(spec.shape) or has_batch_dimension(spec, specs):
            counts[spec.name] = array.shape[0]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {n}" for name, n in counts.items())
        raise FeedError(f"all inputs of {where} must have equally many samples, got {listed}")
    return next(iter(counts.values()), 1)


def has_batch_dimension(spec: TensorSpec, specs: Sequence[TensorSpec]) -> bool:
    """Return whether the first dimension of the input is a batch."""
    if not spec.shape:
        return False
    first = spec.shape[0]
    return not isinstance(first, int) or first == 1 or first == fixed_batch(specs)


def _row(array: Array, spec: TensorSpec, row: int, specs: tuple[TensorSpec, ...]) -> Array:
    if array.ndim > len(spec.shape):
        values = _native_copy(array[row]).reshape(array.shape[1:])
    elif has_batch_dimension(spec, specs):
        values = _native_copy(array[row : row + 1])
    else:
        values = _native_copy(array).reshape(array.shape)
    return fit_array(values, spec)


def _native_copy(array: Array) -> Array:
    """Copy to native byte and C order, so that later changes of the source do no harm."""
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def fit_array(array: Array, spec: TensorSpec) -> Array:
    """Convert a sample that `count_samples` accepted to the input's dtype and order of axes.

    Raises:
        FeedError: an integer is out of the input's range.
    """
    order = _turn(array.shape, spec)
    turned = array if order is None else np.ascontiguousarray(array.transpose(order))
    with np.errstate(over="ignore"):  # infinite values are refused later
        values = turned.astype(spec.dtype, copy=False)
    if values is not turned and values.dtype.kind == "i" and not np.array_equal(values, turned):
        raise FeedError(f"integers must fit the input {describe(spec)}, got {turned.dtype} beyond")
    return values


def conversion_notes(item: Item, specs: Sequence[TensorSpec]) -> list[str]:
    """Return a note for each input whose arrays need a conversion, see `fit_array`."""
    notes = []
    for spec in specs:
        array = item[spec.name]
        if array.dtype.name != spec.dtype:
            notes.append(f"arrays of {spec.name} are converted from {array.dtype} to {spec.dtype}")
        if order := _turn(array.shape[-len(spec.shape) :], spec):
            notes.append(f"arrays of {spec.name} are turned by .transpose{order} to fit the input")
    return notes


def _check_array(array: Array, spec: TensorSpec, specs: tuple[TensorSpec, ...], where: str) -> None:
    got = f"{array.dtype} {list(array.shape)}"
    if not _is_convertible(array.dtype, np.dtype(spec.dtype)):
        hint = "; pixels of 0..255 must be preprocessed first" if array.dtype == np.uint8 else ""
        raise FeedError(
            f"{where} must have the dtype of the input {describe(spec)}, got {got};"
            f" convert it with .astype('{spec.dtype}'){hint}"
        )
    rank, batch = len(spec.shape), has_batch_dimension(spec, specs)
    stacked = array.ndim == rank + 1
    dims = array.shape[1:] if stacked else array.shape
    fits = len(dims) == rank and all(
        not isinstance(want, int) or got == want or (at == 0 and batch and not stacked)
        for at, (got, want) in enumerate(zip(dims, spec.shape, strict=True))
    )
    if not fits and _turn(dims, spec) is None:
        raise FeedError(
            f"{where} must fit the input {describe(spec)}, got {got}; give one array of this shape"
            " per sample, or a batch of them"
        )


def _is_convertible(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Return whether values of one dtype stand for the same values of another."""
    same = have.kind == want.kind
    return (same and have.kind in "fi") or (same and np.can_cast(have, want))


def _turn(dims: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the axes that turn [N, H, W, C] into [N, C, H, W] or back; None to leave them.

    Only a channel that is fixed and smaller than both sides tells the two orders apart.
    """
    wanted = spec.shape
    if len(dims) != 4 or len(wanted) != 4:
        return None
    for at, source, order in ((1, 3, (0, 3, 1, 2)), (3, 1, (0, 2, 3, 1))):
        turned = [dims[axis] for axis in order]
        sides = [side for axis, side in enumerate(dims) if axis not in (0, source)]
        fits = all(
            not isinstance(w, int) or t == w for t, w in zip(turned[1:], wanted[1:], strict=True)
        )
        if fits and dims[at] != wanted[at] == dims[source] < min(sides):
            return order
    return None


def _finite(sample: dict[str, Array], where: str) -> dict[str, Array]:
    for name, array in sample.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            # the caller that reads all samples adds the remedy
            raise FeedError(f"{where} holds {bad} NaN or Inf values for the input {name!r}")
    return sample


class _ItemStore:
    """Items in a temporary file that is removed with the object; several threads may read."""

    def __init__(self) -> None:
        self._scratch = TemporaryArrays("calib8-feed-")
        self._places: list[dict[str, ArrayLocation]] = []

    def append(self, item: Item) -> None:
        try:
            places = {name: self._scratch.add(array) for name, array in item.items()}
        except OSError as error:
            raise FeedError(
                f"the iterable must fit into a temporary file, got: {error.strerror or error}; free"
                " some disk space, or set TMPDIR to another disk"
            ) from error
        self._places.append(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int, /) -> Item:
        return {name: self._scratch.get(place) for name, place in self._places[index].items()}
