"""Arrays from files or Python iterables, split into samples.

Each array is matched to the model's input of its name. For an input of rank r, the array may have

* rank r, a batch: sample i is ``a[i:i+1]`` (also if the input's own batch is fixed);
* rank r + 1, samples stacked with their batch dimension: sample i is ``a[i]``, of any batch;
* rank r - 1, one sample without a batch dimension;
* rank r with a first dimension that is no batch (a state [2, N, 64]): one sample.

What a first dimension is, `deploy.feed.batch_axis` says.
"""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from deploy.errors import Calib8Error, FeedError
from deploy.feed.batch_axis import Specs, has_open_first, samples_per_run, without_batch
from deploy.feed.file_list import Labels, RawSample, SampleChangedError, sample_digest
from deploy.feed.preprocess import describe
from deploy.feed.temporary_arrays import Item, Shape
from deploy.tensors import Array, TensorSpec, fits

LABEL_KEYS = ("labels", "label", "targets", "target", "y")  # names of class numbers beside inputs


def as_array(value: object, item_name: str) -> Array:
    """Convert a value to an array of numbers.

    Raises:
        FeedError: numpy makes no array of numbers of it.
    """
    type_name = type(value).__name__
    try:
        if hasattr(value, "detach"):  # a torch tensor, perhaps of a GPU
            tensor: Any = value.detach().cpu()
            # numpy has no bfloat16
            value = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
        array: Array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FeedError(f"{item_name} must be an array, got {type_name}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise FeedError(
            f"{item_name} must be an array of numbers, a tuple that begins with them, or a dict of"
            f" them by input name, got {type_name} ({array.dtype.name}); put paths into a list"
        )
    return array


def arrays_by_input(arrays: dict[str, Array], specs: Specs, item_name: str) -> Item:
    """Return arrays by the names of the inputs.

    If there is one array and one input, the array belongs to it, whatever its name.

    `arrays`: name -> array; the name "" stands for an array without a name, from a .npy file.

    Raises:
        FeedError: the arrays have other names than the inputs.
    """
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
        batch: samples of one run.
        name: of the source in messages.
        labels: one class number per sample; None without labels.
        notes: for the user.
        item_names: names of the items; empty if they have none.
    """

    specs: Specs
    items: ItemSequence
    item_ends: tuple[int, ...]
    batch: int
    name: str
    labels: Labels = None
    notes: tuple[str, ...] = ()
    item_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.item_ends[-1] if self.item_ends else 0

    @property
    def has_uneven_items(self) -> bool:
        """Whether items hold rows in different numbers, which may be one sample each."""
        if not any(map(has_open_first, self.specs)):
            return False
        counts = np.diff(self.item_ends, prepend=0)
        return len(set(counts[:-1])) > 1 or bool(counts[-1] > counts[0])  # the last may be shorter

    def sample_name(self, index: int) -> str:
        """Return the sample's name for messages."""
        if not self.item_names:
            return f"sample {index} of {self.name}"
        item_index, row = self._locate(index)
        item_name = self.item_names[item_index]
        item_start = index - row
        if self.item_ends[item_index] - item_start == 1:  # its only sample
            return item_name
        return f"sample {row} of {item_name}"

    def load(self, index: int) -> RawSample:
        """Return a sample, copied and hashed; its `decode` gives arrays [1, ...] by input name.

        Raises:
            SampleChangedError: its file has fewer samples now.
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
        sample = {spec.name: _take_sample(item[spec.name], spec, row) for spec in self.specs}

        def decode() -> Item:
            _refuse_non_finite(sample, self.sample_name(index))
            return sample

        return RawSample(sample_digest(sample), decode)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the item of a sample and its row there."""
        item_index = bisect.bisect_right(self.item_ends, index)
        item_start = self.item_ends[item_index - 1] if item_index else 0
        return item_index, index - item_start


def add_missing_batch(array: Array, spec: TensorSpec) -> Array:
    """Add the batch dimension to a single sample that lacks it and fits otherwise."""
    if not spec.shape or array.ndim != len(spec.shape) - 1:
        return array
    return array[None] if fits(array.shape, spec.shape[1:]) else array


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
    """Counts the samples of items, and finds whether each item is one sample.

    The rows of an item, along the first dimension of its arrays, are as a rule one sample each.
    All rows of an item together are one sample if its inputs differ in their number of rows: a map
    [1, 8, H, W] has 6 regions [6, 4]. This holds for all items or for none, and may show only after
    several of them.

    Attributes:
        inputs: the inputs as the model alone shows them.
        row_ends: 0, and for each item the number of rows up to its end.
        items_are_samples: whether each item is one sample, by the items so far.
    """

    inputs: Specs
    row_ends: list[int] = field(default_factory=lambda: [0])
    items_are_samples: bool = False
    _is_stacked: bool | None = None  # whether the first item that could be read is stacked

    def add(self, item: Item, item_name: str) -> int:
        """Record an item; return its number of samples, by what the items so far show.

        That is its number of rows, or 1 if `items_are_samples`, which this item may set.

        Args:
            item: arrays by input.
            item_name: of the item, for messages.

        Raises:
            FeedError: a dtype, rank or dimension does not fit the input, or the counts differ.
        """
        row_counts: dict[str, int] = {}  # input -> its number of rows; not of inputs without rows
        is_stacked = False  # whether an array has one dimension more than its input
        for spec in self.inputs:
            array = item[spec.name]
            _check_array(array, spec, item_name)
            has_extra_dimension = array.ndim > len(spec.shape)
            is_stacked |= has_extra_dimension
            if has_extra_dimension or spec.has_batch:
                row_counts[spec.name] = array.shape[0]

        if len(set(row_counts.values())) > 1:  # the item is one sample, or an error
            # rows are samples if they are stacked, or if the first dimensions of the inputs have
            # one name, such as "batch"
            rows_are_samples = is_stacked or self._have_one_name(row_counts)
            has_input_shapes = all(fits(item[spec.name].shape, spec.shape) for spec in self.inputs)
            if rows_are_samples or not has_input_shapes:
                counts_text = ", ".join(f"{name}: {count}" for name, count in row_counts.items())
                raise FeedError(
                    f"all inputs of {item_name} must have equally many samples, got {counts_text}"
                )
            self.items_are_samples = True

        if self._is_stacked is None:  # the first item stands for all
            self._is_stacked = is_stacked
        row_count = max(row_counts.values(), default=1)
        self.row_ends.append(self.row_ends[-1] + row_count)
        return 1 if self.items_are_samples else row_count

    def add_unread(self) -> None:
        """Count an item that could not be read as one sample."""
        self.row_ends.append(self.row_ends[-1] + 1)

    def _have_one_name(self, input_names: Collection[str]) -> bool:
        """Whether the first dimensions of these inputs have the same name, such as "batch"."""
        first_dimensions = {spec.shape[0] for spec in self.inputs if spec.name in input_names}
        return len(first_dimensions) == 1 and None not in first_dimensions

    @property
    def specs(self) -> Specs:
        """The inputs, as model and items show them."""
        return without_batch(self.inputs) if self.items_are_samples else self.inputs

    @property
    def batch(self) -> int:
        """Samples of one run: 1 if stacked, with their own batch, else what the model fixes."""
        return 1 if self._is_stacked else samples_per_run(self.specs)

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.row_ends) - 1 if self.items_are_samples else self.row_ends[-1]

    @property
    def item_ends(self) -> tuple[int, ...]:
        """For each item, the number of samples up to its end."""
        if self.items_are_samples:
            return tuple(range(1, len(self.row_ends)))
        return tuple(self.row_ends[1:])


def _check_array(array: Array, spec: TensorSpec, item_name: str) -> None:
    """Refuse an array that does not fit an input.

    Args:
        array: one sample, a batch, or samples stacked with their batch dimension.
        spec: the input.
        item_name: of the item with the array, for messages.

    Raises:
        FeedError: another dtype, rank or size; the message says what to do.
    """
    got = f"{array.dtype} {list(array.shape)}"
    if not _is_convertible(array.dtype, np.dtype(spec.dtype)):
        message = (
            f"{item_name} must have the dtype of the input {describe(spec)}, got {got};"
            f" convert it with .astype('{spec.dtype}')"
        )
        if array.dtype == np.uint8:
            message += "; pixels of 0..255 must be preprocessed first"
        raise FeedError(message)

    # an input [1, 3, 8, 8] takes stacked samples [N, 1, 3, 8, 8], or, if its first dimension is a
    # batch, samples [N, 3, 8, 8]; else only an array of its own shape
    shape = array.shape
    expected_shape = list(spec.shape)
    if array.ndim == len(spec.shape) + 1:
        shape = shape[1:]  # of one of the stacked samples
    elif spec.has_batch:
        expected_shape[0] = None  # any number N
    if not fits(shape, expected_shape):
        remedy = _find_remedy(shape, spec)
        raise FeedError(f"{item_name} must fit the input {describe(spec)}, got {got}; {remedy}")


def _is_convertible(dtype: np.dtype[Any], input_dtype: np.dtype[Any]) -> bool:
    """Return whether values of one dtype stand for the same values of another."""
    if dtype.kind != input_dtype.kind:
        return False
    return dtype.kind in "fi" or np.can_cast(dtype, input_dtype)


def _take_sample(array: Array, spec: TensorSpec, row: int) -> Array:
    """Return one sample of an array that `count_samples` accepted, with the input's rank."""
    if array.ndim > len(spec.shape):
        view = array[row, ...]
    elif spec.has_batch:
        view = array[row : row + 1]
    else:
        view = array
    # copied to native byte and C order, so that later changes of the source do no harm
    values = np.array(view, array.dtype.newbyteorder("="), order="C")
    return fit_array(values, spec)


def concatenate_samples(
    samples: Sequence[Mapping[str, Array]],
    explain: Callable[[str, Sequence[Shape]], Calib8Error],
) -> Item:
    """Return samples joined along axis 0; an input without axes, a scalar, is that of the first.

    `explain`: (name of an input, its shapes in the samples, which differ) -> the error to raise.
    """
    batch = {}
    for name, first_array in samples[0].items():
        arrays = [sample[name] for sample in samples]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise explain(name, shapes)
        batch[name] = first_array
        if len(arrays) > 1 and first_array.ndim > 0:
            batch[name] = np.concatenate(arrays)
    return batch


def fit_array(array: Array, spec: TensorSpec) -> Array:
    """Convert a sample that `count_samples` accepted to the input's dtype.

    Raises:
        FeedError: an integer is out of the input's range.
    """
    with np.errstate(over="ignore"):  # infinite values are refused later
        values = array.astype(spec.dtype, copy=False)
    if values.dtype.kind == "i" and not np.array_equal(values, array):
        raise FeedError(f"integers must fit the input {describe(spec)}, got {array.dtype} beyond")
    return values


_AXIS_ORDERS = ((0, 3, 1, 2), (0, 2, 3, 1))  # move the channels to the front, and to the end


def _find_remedy(shape: Sequence[int], spec: TensorSpec) -> str:
    """Return what to do with an array of this shape, which does not fit the input."""
    for axis_order in _AXIS_ORDERS:
        if len(shape) == 4 and fits([shape[axis] for axis in axis_order[1:]], spec.shape[1:]):
            return f"turn it with .transpose{axis_order}"
    return "give one array of this shape per sample, or a batch of them"


def _refuse_non_finite(sample: Item, sample_name: str) -> None:
    """Raise `FeedError` for NaN and infinite values."""
    for name, array in sample.items():
        count = int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0
        if count:
            # the caller that reads all samples adds the remedy
            raise FeedError(f"{sample_name} holds {count} NaN or Inf values for the input {name!r}")
