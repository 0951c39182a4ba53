"""Arrays from files or Python iterables, split into samples.

An item of an iterable holds one array per input: an array, a tensor, a tuple with labels, or a
mapping. Items are recognized by duck typing, so no framework is imported: whatever numpy converts
to an array is one, also a torch tensor that requires a gradient.

Each array is matched to the model's input of its name. For an input of rank r, the array may have

* rank r, a batch: sample i is ``a[i:i+1]`` (also if the input's own batch is fixed);
* rank r + 1, samples stacked with their batch dimension: sample i is ``a[i]``, of any batch;
* rank r - 1, one sample without a batch dimension;
* rank r with a first dimension that is no batch (a state [2, N, 64]): one sample.

What a first dimension is, `deploy.feed.batch_axis` says.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any, Protocol

import numpy as np

from deploy.errors import FeedError
from deploy.feed.batch_axis import has_open_first, rows_of_run, without_batch
from deploy.feed.file_list import RawSample, SampleChangedError, sample_digest
from deploy.feed.preprocess import describe
from deploy.feed.temporary_arrays import Item, ItemStore
from deploy.tensors import Array, FirstAxis, TensorSpec

Specs = Sequence[TensorSpec]
_MAX_IGNORED_NAMES = 5  # values of an item that a note names


LABEL_KEYS = ("labels", "label", "targets", "target", "y")  # names of class numbers beside inputs


@dataclass(frozen=True, slots=True)
class MatchedItem:
    """An item of an iterable.

    Attributes:
        arrays: the inputs.
        unused_names: of the values that belong to no input, such as "value 2"; the first few.
        label: the value among these that may be labels; None without one.
        label_name: its name.
    """

    arrays: Item
    unused_names: tuple[str, ...] = ()
    label: object = None
    label_name: str = ""


def match_inputs(value: object, specs: Specs, item_name: str) -> MatchedItem:
    """Return the inputs in an item of an iterable, and the names of everything else it holds.

    ::

        array                       the only input
        (array, ...), [array, ...]  the inputs in order; a single further element may be labels
        ({name: array}, ...)        a mapping, as below; likewise
        {name: array, ...}          the inputs by name; a value of `LABEL_KEYS` may be labels

    Raises:
        FeedError: the item is none of these, or a tuple in which the inputs are ambiguous.
    """
    if isinstance(value, tuple | list) and not _is_nested_numbers(value):
        return _match_tuple(value, specs, item_name)
    if isinstance(value, Mapping):
        return _match_mapping(value, specs, item_name)
    return MatchedItem(arrays_by_input({"": as_array(value, item_name)}, specs, item_name))


def _match_tuple(value: Sequence[Any], specs: Specs, item_name: str) -> MatchedItem:
    """Return the inputs by position."""
    if value and isinstance(value[0], Mapping):
        matched = _match_mapping(value[0], specs, item_name)
        if len(value) == 1:
            return matched
        mapping_names = matched.unused_names
        return _with_unused_elements(matched.arrays, value[1:], 2, mapping_names)

    kind = f"{type(value).__name__} of {len(value)}"
    if len(value) < len(specs):
        raise FeedError(
            f"{item_name} must hold the inputs {[spec.name for spec in specs]}, got a {kind}; give"
            " a dict of arrays by input name"
        )
    arrays = [as_array(element, item_name) for element in value[: len(specs)]]
    unused_elements = value[len(specs) :]
    # a list of samples is no tuple of inputs and labels; labels may all be numbers
    shape = arrays[0].shape
    looks_like_samples = any(_shape(element) == shape for element in unused_elements)
    if len(shape) > 1 and looks_like_samples:
        raise FeedError(
            f"{item_name} must distinguish its inputs from its other values, got a {kind} with"
            f" several of the shape {list(shape)}; give one array per sample, or a dict of arrays"
            " by input name"
        )
    item = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
    return _with_unused_elements(item, unused_elements, len(specs) + 1)


def _with_unused_elements(
    arrays: Item, elements: Sequence[object], first_number: int, names: tuple[str, ...] = ()
) -> MatchedItem:
    """Return an item with the elements after its inputs; `names`: of other unused values."""
    count = min(len(elements), _MAX_IGNORED_NAMES)
    numbers = range(first_number, first_number + count)
    element_names = tuple(f"value {number}" for number in numbers)
    if len(elements) != 1:
        return MatchedItem(arrays, (*names, *element_names))
    return MatchedItem(arrays, (*names, *element_names), elements[0], element_names[0])


def _match_mapping(value: Mapping[Any, Any], specs: Specs, item_name: str) -> MatchedItem:
    input_names = [spec.name for spec in specs]
    if any(name not in value for name in input_names):
        raise FeedError(
            f"{item_name} must name the inputs {input_names}, got {sorted(map(str, value))};"
            " name its arrays as the model does"
        )
    item = {name: as_array(value[name], item_name) for name in input_names}
    unused_names = [repr(str(name)) for name in value if name not in input_names]
    label_keys = [key for key in LABEL_KEYS if key in value and key not in input_names]
    shown_names = tuple(unused_names[:_MAX_IGNORED_NAMES])
    if not label_keys:
        return MatchedItem(item, shown_names)
    return MatchedItem(item, shown_names, value[label_keys[0]], repr(label_keys[0]))


def read_item_labels(value: object, count: int) -> list[int] | None:
    """Return the labels of an item of `count` samples; None if the value holds no labels.

    Labels are whole numbers from 0, one a sample: an array [count], or a number for one sample.
    """
    try:
        array = as_array(value, "the labels")
    except FeedError:
        return None
    is_labels = array.dtype.kind in "iu" and array.ndim <= 1 and array.size == count
    if not is_labels or (array < 0).any():
        return None
    return [int(label) for label in array.flat]


class _UnusedValues:
    """The values of items that belong to no input: labels if all items have some, or ignored."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._label_names: dict[str, None] = {}
        self._labels: list[int] = []
        self._is_labelled = True  # until an item has no labels

    def add(self, matched: MatchedItem, sample_count: int) -> None:
        """Add the values of an item."""
        self._names |= dict.fromkeys(matched.unused_names)
        labels = read_item_labels(matched.label, sample_count)
        if labels is None:
            self._is_labelled = False
        else:
            self._labels += labels
            self._label_names[matched.label_name] = None

    def labels(self, sample_count: int) -> tuple[int, ...] | None:
        """Return the labels of all samples; None if they are not one for each."""
        self._is_labelled &= len(self._labels) == sample_count
        return tuple(self._labels) if self._is_labelled else None

    def notes(self, input_count: int) -> Iterator[str]:
        """Yield which values are labels and which are ignored."""
        ignored_names = self._names
        if self._is_labelled and self._label_names:
            yield f"labels: {' or '.join(self._label_names)} of each item"
            ignored_names = {name: None for name in self._names if name not in self._label_names}
        if ignored_names:
            inputs = "one input" if input_count == 1 else f"{input_count} inputs"
            yield (
                f"ignored: {', '.join(ignored_names)} of each item, since the model has {inputs};"
                " labels are whole numbers, one a sample, or go into labels= (--labels)"
            )


def as_array(value: object, item_name: str) -> Array:
    """Convert a value to an array of numbers.

    Raises:
        FeedError: numpy makes no array of numbers of it.
    """
    kind = type(value).__name__
    try:
        if hasattr(value, "detach"):  # a torch tensor, perhaps of a GPU
            value = value.detach().cpu()
        array: Array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{item_name} must be an array, got {kind}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(
            f"{item_name} must be an array of numbers, a tuple that begins with them, or a dict of"
            f" them by input name, got {kind}"
        )
    return array


def _is_nested_numbers(value: Sequence[Any]) -> bool:
    """Return whether a list is nested down to plain numbers, as from JSON or datasets."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _shape(value: object) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    if shape is None:
        return None
    return tuple(shape)


def arrays_by_input(arrays: dict[str, Array], specs: Specs, item_name: str) -> Item:
    """Return arrays by input name; a single array belongs to the only input, whatever its name."""
    input_names = [spec.name for spec in specs]
    if len(input_names) == 1 and len(arrays) == 1:
        return dict(zip(input_names, arrays.values(), strict=True))
    if set(arrays) != set(input_names):
        got = "one array" if "" in arrays else sorted(arrays)
        raise FeedError(
            f"{item_name} must hold exactly the inputs {input_names}, got {got};"
            " write numpy.savez with one array per input"
        )
    return arrays


class ItemSequence(Protocol):
    """Random access to items, each of one or more samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


@dataclass(frozen=True)
class ArraySource:
    """Samples in items: sample index -> (item, row).

    Attributes:
        specs: the arrays of a sample: the model's inputs, or the values of raw files.
        items: arrays by input, each of one or more samples.
        item_ends: per item, the number of samples up to its end.
        name: of the source in messages.
        labels: one class number per sample; None without labels.
        notes: for the user.
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
        """Samples of one run: 1 if the samples have their own batch, else what the model fixes."""
        batch = rows_of_run(self.specs)
        if batch == 1:
            return 1
        first_item = self.items[0]
        for spec in self.specs:
            if first_item[spec.name].ndim > len(spec.shape):  # stacked, with their own batch
                return 1
        return batch

    @property
    def has_uneven_items(self) -> bool:
        """Whether items hold rows in different numbers, which may be one sample each."""
        if not any(map(has_open_first, self.specs)):
            return False
        pairs = zip((0, *self.item_ends), self.item_ends, strict=False)
        counts = [end - start for start, end in pairs]
        return len(set(counts[:-1])) > 1 or counts[-1] > counts[0]  # the last may be shorter

    def sample_name(self, index: int) -> str:
        """Return the sample's name for messages."""
        if not self.item_names:
            return f"sample {index} of {self.name}"
        item_index, row = self._locate(index)
        item_name = self.item_names[item_index]
        sample_count = self.item_ends[item_index] - index + row
        if sample_count == 1:
            return item_name
        return f"sample {row} of {item_name}"

    def title(self, index: int) -> str:
        """Return the sample's name for messages, in the middle of a sentence."""
        return self.sample_name(index)

    def load(self, index: int) -> RawSample:
        """Return arrays with a batch dimension of 1 by input name, copied and hashed.

        Raises:
            FeedError: (when decoding) the arrays hold NaN or Inf.
        """
        item_index, row = self._locate(index)
        item = self.items[item_index]
        if self.item_names:  # files, which may have changed
            item_name = self.item_names[item_index]
            if count_samples(item, self.specs, item_name) <= row:
                raise SampleChangedError(
                    f"{item_name} changed while calib8 ran; do not change it during a run"
                )
        sample = {spec.name: _row(item[spec.name], spec, row) for spec in self.specs}

        def decode() -> Item:
            _refuse_non_finite(sample, self.sample_name(index))
            if self.convert is None:
                return sample
            return self.convert(sample)

        return RawSample(sample_digest(sample), decode)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the item of a sample and its row there."""
        item_index = bisect.bisect_right(self.item_ends, index)
        item_start = self.item_ends[item_index - 1] if item_index else 0
        return item_index, index - item_start


MAX_SAMPLES = 100_000  # of an iterable without a length, unless the user sets a limit


def open_iterable(
    source: Iterable[object],
    specs: tuple[TensorSpec, ...],
    *,
    name: str = "the iterable",
    has_end: bool = True,
    limit: int | None = None,
) -> ArraySource:
    """Open an iterable of items with one or more samples each.

    An item is an array, a tuple that begins with arrays, or a mapping by input name. A list or a
    tuple is used directly. Anything else is read once, one item at a time, into a temporary file,
    since samples are needed twice: for their digest and for the run. Whole numbers beside the
    inputs are labels, see `match_inputs`; other values are ignored, and a note lists them.

    Args:
        source: the items.
        specs: the model's inputs.
        name: of the source in messages.
        has_end: whether it is known to end, as an object with a length does.
        limit: maximum number of samples if it is not known to end.

    Raises:
        FeedError: an item does not fit the inputs, there are no samples, or no end of them.
    """
    is_in_memory = isinstance(source, list | tuple)
    items: list[Item] | ItemStore = [] if is_in_memory else ItemStore()
    counter = SampleCounter(specs)
    unused_values = _UnusedValues()
    notes: dict[str, None] = {}
    max_samples = None if has_end else limit
    is_cut = False
    for index, value in enumerate(source):
        item_name = f"item {index} of {name}"
        matched = match_inputs(value, specs, item_name)
        item = {spec.name: _with_batch(matched.arrays[spec.name], spec) for spec in specs}
        unused_values.add(matched, counter.add(item, item_name))
        is_cut = max_samples is not None and counter.total >= max_samples
        items.append(item)
        notes |= dict.fromkeys(conversion_notes(item, specs))
        if is_cut:
            break
        if max_samples is None and not has_end and counter.total > MAX_SAMPLES:
            raise FeedError(
                f"{name} must end, got {counter.total:,} samples and no end; set a maximum number"
                " of samples (--limit), and the first ones are used"
            )

    item_ends = counter.item_ends
    if is_cut and max_samples is not None:
        item_ends = (*item_ends[:-1], max_samples)
    total = item_ends[-1] if item_ends else 0
    if not total:
        raise FeedError(f"{name} must give samples, got none")
    labels = unused_values.labels(counter.total)
    all_notes = [*notes, *unused_values.notes(len(specs))]
    if not is_in_memory:
        count = f"{'the first ' if is_cut else ''}{total}"
        all_notes.append(f"{name} was read once into a temporary file ({count} samples)")
    return ArraySource(
        counter.specs,
        items,
        item_ends,
        name,
        labels=None if labels is None else labels[:total],
        notes=tuple(all_notes),
    )


def _with_batch(array: Array, spec: TensorSpec) -> Array:
    """Add the batch dimension to a single sample that lacks it."""
    if spec.shape and array.ndim == len(spec.shape) - 1:
        return array[None]
    return array


def count_samples(item: Item, specs: Specs, item_name: str) -> int:
    """Return the number of samples in an item.

    Raises:
        FeedError: a dtype, rank or dimension does not fit the input, or the counts differ.
    """
    counter = SampleCounter(specs)
    counter.add(item, item_name)
    return counter.total


@dataclass(slots=True)
class SampleCounter:
    """The number of samples in each item, and whether every item is one complete sample.

    Items are complete if the inputs of one differ in their number of rows, as a map [1, 8, H, W]
    and its 6 regions [6, 4] do; or if each item holds just the rows that make one sample.

    Attributes:
        inputs: the inputs as the model alone shows them.
        row_counts: rows of each item.
    """

    inputs: Specs
    row_counts: list[int] = field(default_factory=list)
    _has_unequal_rows: bool = False
    _has_other_size: bool = False

    def add(self, item: Item, item_name: str) -> int:
        """Return the number of samples in an item, as far as the items up to it show.

        Raises:
            FeedError: a dtype, rank or dimension does not fit the input, or the counts differ.
        """
        rows: dict[str, int] = {}
        is_stacked = False
        for spec in self.inputs:
            array = item[spec.name]
            _check_array(array, spec, item_name)
            is_stacked |= array.ndim > len(spec.shape)
            if array.ndim > len(spec.shape) or has_rows(spec):
                rows[spec.name] = array.shape[0]

        distinct_counts = set(rows.values())
        if len(distinct_counts) > 1:
            fits = (_fits(item[spec.name].shape, spec.shape) for spec in self.inputs)
            if is_stacked or not all(fits):
                got = ", ".join(f"{name}: {count}" for name, count in rows.items())
                raise FeedError(
                    f"all inputs of {item_name} must have equally many samples, got {got}"
                )
            self._has_unequal_rows = True
        count = max(distinct_counts, default=1)
        self._has_other_size |= is_stacked or count != rows_of_run(self.inputs)
        self.row_counts.append(count)
        return 1 if self.is_complete else count

    def add_unreadable(self) -> None:
        """Count an item that cannot be read as one sample; reading it will report the error."""
        self.row_counts.append(1)

    @property
    def is_complete(self) -> bool:
        """Whether every item is one complete sample."""
        has_parts = any(spec.first_axis is FirstAxis.PARTS for spec in self.inputs)
        return self._has_unequal_rows or (has_parts and not self._has_other_size)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs, as model and items show them."""
        return without_batch(self.inputs) if self.is_complete else tuple(self.inputs)

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.row_counts) if self.is_complete else sum(self.row_counts)

    @property
    def item_ends(self) -> tuple[int, ...]:
        """For each item, the number of samples up to its end."""
        counts = repeat(1, len(self.row_counts)) if self.is_complete else self.row_counts
        return tuple(accumulate(counts))


def has_rows(spec: TensorSpec) -> bool:
    """Return whether the first dimension of the input counts rows, of any number in an array."""
    return spec.first_axis in (FirstAxis.ROWS, FirstAxis.PARTS)


def _check_array(array: Array, spec: TensorSpec, item_name: str) -> None:
    got = f"{array.dtype} {list(array.shape)}"
    if not _is_convertible(array.dtype, np.dtype(spec.dtype)):
        message = (
            f"{item_name} must have the dtype of the input {describe(spec)}, got {got};"
            f" convert it with .astype('{spec.dtype}')"
        )
        if array.dtype == np.uint8:
            message += "; pixels of 0..255 must be preprocessed first"
        raise FeedError(message)

    expected_shape = list(spec.shape)
    sizes = array.shape
    if array.ndim == len(spec.shape) + 1:  # stacked samples with their batch dimension
        sizes = sizes[1:]
    elif has_rows(spec):
        expected_shape[0] = None  # any number of samples
    if not _fits(sizes, expected_shape) and _find_axis_order(sizes, spec) is None:
        raise FeedError(
            f"{item_name} must fit the input {describe(spec)}, got {got}; give one array of this"
            " shape per sample, or a batch of them"
        )


def _is_convertible(dtype: np.dtype[Any], input_dtype: np.dtype[Any]) -> bool:
    """Return whether values of one dtype stand for the same values of another."""
    if dtype.kind != input_dtype.kind:
        return False
    return dtype.kind in "fi" or np.can_cast(dtype, input_dtype)


def _fits(sizes: Sequence[int], expected_shape: Sequence[int | str | None]) -> bool:
    """Return whether sizes equal those of a shape where it fixes them."""
    if len(sizes) != len(expected_shape):
        return False
    pairs = zip(sizes, expected_shape, strict=True)
    return all(not isinstance(expected, int) or size == expected for size, expected in pairs)


def _row(array: Array, spec: TensorSpec, row: int) -> Array:
    """Return a sample of an array that `count_samples` accepted."""
    if array.ndim > len(spec.shape):
        values = _native_copy(array[row]).reshape(array.shape[1:])
    elif has_rows(spec):
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
    axis_order = _find_axis_order(array.shape, spec)
    if axis_order is not None:
        array = np.ascontiguousarray(array.transpose(axis_order))
    with np.errstate(over="ignore"):  # infinite values are refused later
        values = array.astype(spec.dtype, copy=False)
    is_integer_cast = values is not array and values.dtype.kind == "i"
    if is_integer_cast and not np.array_equal(values, array):
        raise FeedError(f"integers must fit the input {describe(spec)}, got {array.dtype} beyond")
    return values


def conversion_notes(item: Item, specs: Specs) -> list[str]:
    """Return a note for each input whose arrays need a conversion, see `fit_array`."""
    notes = []
    for spec in specs:
        array = item[spec.name]
        if array.dtype.name != spec.dtype:
            notes.append(f"arrays of {spec.name} are converted from {array.dtype} to {spec.dtype}")
        axis_order = _find_axis_order(array.shape[-len(spec.shape) :], spec)
        if axis_order is not None:
            notes.append(
                f"arrays of {spec.name} are turned by .transpose{axis_order} to fit the input"
            )
    return notes


# axis of the channel in the input and in the array, and the order of axes that moves it
_AXIS_ORDERS = ((1, 3, (0, 3, 1, 2)), (3, 1, (0, 2, 3, 1)))


def _find_axis_order(sizes: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the axes that turn [N, H, W, C] into [N, C, H, W] or back; None to leave them.

    Only a channel that is fixed and smaller than both sides tells the two orders apart.
    """
    if len(sizes) != 4 or len(spec.shape) != 4:
        return None
    for input_axis, array_axis, axis_order in _AXIS_ORDERS:
        channels = spec.shape[input_axis]
        if sizes[array_axis] != channels or sizes[input_axis] == channels:
            continue
        sides = [sizes[axis] for axis in (1, 2, 3) if axis != array_axis]
        reordered = [sizes[axis] for axis in axis_order]
        if sizes[array_axis] < min(sides) and _fits(reordered[1:], spec.shape[1:]):
            return axis_order
    return None


def _refuse_non_finite(sample: Item, sample_name: str) -> None:
    for name, array in sample.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            # the caller that reads all samples adds the remedy
            raise FeedError(f"{sample_name} holds {count} NaN or Inf values for the input {name!r}")
