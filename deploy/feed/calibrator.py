"""Read a user's TensorRT calibrator as calibration data, without TensorRT and without a GPU.

::

    old.py:make --> calibrator --get_batch(names)--> [address, ...] --read--> {input: array}
                        ^ imports deploy.standins' modules                 one or more samples each

TensorRT reads the size of an input at each address, whatever lies there. Here the memory must have
been allocated by the script. If the last batch holds fewer samples than `get_batch_size`, only the
copied ones are read, whereas TensorRT reads the previous batch's samples after them again.

The script runs once, when the source is opened; its arrays go to a temporary file.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from deploy.errors import FeedError, counted
from deploy.feed.arrays import ArraySource
from deploy.feed.batch_axis import Specs, samples_per_run
from deploy.feed.loaders import open_iterable
from deploy.feed.preprocess import describe
from deploy.feed.temporary_arrays import Item, Shape
from deploy.files import usercode
from deploy.standins.install import CalibrationAlgoType, shared_stand_ins
from deploy.standins.memory import AddressWindow, Memory, address_of
from deploy.tensors import Array, TensorSpec

# dtype of an input -> dtype of 4 bytes that TensorRT calibrates it with, if that is another one.
# Source: NVIDIA/TensorRT tools/Polygraphy/polygraphy/backend/trt/calibrator.py, which supplies all
# float inputs as float32.
_TENSORRT_DTYPES = {"int64": "int32", "float16": "float32"}
_NO_BATCH = "; get_batch returned no batch at all: check the script's image folder and batch size"
_NUMBER_DTYPES = frozenset(np.dtype(code).name for code in "?bhiqBHIQefd")


class CalibratorBatches:
    """Converts the batches of a script from addresses to arrays."""

    def __init__(self, script_title: str, memory: Memory, specs: Specs, batch_size: int) -> None:
        """Start before the first batch.

        Args:
            script_title: name of the script in messages.
            memory: what the script allocated and copied.
            specs: the model's inputs.
            batch_size: samples per batch that `get_batch_size` of the script declares.
        """
        self._script_title = script_title
        self._memory = memory
        self._specs = specs
        self._declared_batch_size = batch_size
        # many scripts declare 1 sample, and copy as many as the model takes
        self._expected_batch_size = samples_per_run(specs) if batch_size == 1 else batch_size
        self._batch_count = 0  # batches before the current one
        self._must_be_last = False  # whether no batch may follow the current one
        self._size_by_short_batch: dict[int, int] = {}  # number of the batch -> its samples

    @property
    def batch_title(self) -> str:
        """Name of the current batch in messages."""
        return f"batch {self._batch_count}"

    @property
    def notes(self) -> list[str]:
        """Notes on batches of fewer samples than `get_batch_size`."""
        if not self._size_by_short_batch:
            return []
        first_size, *_ = self._size_by_short_batch.values()
        return [
            f"{self._script_title} copied fewer than {self._expected_batch_size} samples for"
            f" {len(self._size_by_short_batch)} of its {counted(self._batch_count, 'batch')}"
            f" ({first_size} for the first of them): only those are used, whereas"
            " TensorRT would read old samples after them again"
        ]

    def read_batch(self, pointers: Sequence[object]) -> Item:
        """Return the current batch as arrays by input, and go on to the next batch.

        A batch is refused if the one before it was accepted only as the last one.

        Args:
            pointers: what get_batch returned: for each input, an address or a pointer object.

        Raises:
            FeedError: an address is not the script's, or holds too few or too many bytes.
        """
        if self._must_be_last:
            raise FeedError(
                f"only the last batch of {self._script_title} may hold fewer samples than"
                f" get_batch_size gives, {self._expected_batch_size}, got {self.batch_title} after"
                f" such a batch; copy complete batches, of the dtype of {describe(self._specs[0])}"
            )
        item: Item = {}
        for spec, pointer in zip(self._specs, pointers, strict=True):
            item[spec.name] = self._read_samples(spec, pointer)  # may set `_must_be_last`
        self._batch_count += 1
        return item

    def _read_samples(self, spec: TensorSpec, pointer: object) -> Array:
        """Return the samples of one input that lie at an address, in the input's dtype.

        Args:
            spec: the input.
            pointer: an address or a pointer object.

        Returns:
            An array [samples, ...]; or [...], one sample, if the input has no batch dimension.

        Raises:
            FeedError: see `read_batch`.
        """
        address, window = self._find_window(spec, pointer)
        # the dtype comes first: it is the memory's, or that in which the bytes there are a complete
        # batch. Then the bytes of a sample show how many samples there are
        expected_count = self._expected_batch_size if spec.has_batch else 1
        sample_shape = self._find_sample_shape(spec, window)
        sample_size = prod(sample_shape)
        dtype = np.dtype(self._find_dtype(spec, window, expected_count * sample_size))
        sample_bytes = dtype.itemsize * sample_size
        count = self._count_samples(spec, window, expected_count, sample_bytes)
        data = self._memory.read(address, count * sample_bytes).view(dtype)
        shape = (count, *sample_shape) if spec.has_batch else sample_shape
        return data.reshape(shape).astype(spec.dtype, copy=False)

    def _find_window(self, spec: TensorSpec, pointer: object) -> tuple[int, AddressWindow]:
        """Return (address of a pointer, what the script allocated and copied from there on).

        Raises:
            FeedError: it is no pointer, or not to memory of the script.
        """
        address = _address(pointer)
        window = None if address is None else self._memory.find_window(address)
        if address is not None and window is not None:
            return address, window
        got = type(pointer).__name__ if address is None else f"address {address:#x}"
        raise FeedError(
            f"get_batch of {self._script_title} must give addresses of memory that was allocated by"
            f" pycuda, cuda-python, libcudart or torch and not freed, got {got} for the input"
            f" {spec.name!r} in {self.batch_title}"
        )

    def _find_sample_shape(self, spec: TensorSpec, window: AddressWindow) -> Shape:
        """Return the shape of one sample, without batch; open sizes are those of the copied array.

        `window`: the memory that the calibrator copied its batch to. Its `shape` is that of the
        array, if the memory tells it.
        """
        sizes = list(spec.shape)
        if window.shape and len(window.shape) == len(sizes):
            for axis, copied_size in enumerate(window.shape):
                if not isinstance(sizes[axis], int):
                    sizes[axis] = copied_size
        if spec.has_batch:
            sizes = sizes[1:]
        # open sizes are names or None; a sample with a size of 0 would have no values
        shape = tuple(size for size in sizes if isinstance(size, int) and size)
        if len(shape) < len(sizes):
            raise FeedError(
                f"a calibrator tells the batch and no other size, so all other dimensions of the"
                f" input must be fixed, got {describe(spec)}; give a model with fixed sizes"
            )
        return shape

    def _find_dtype(self, spec: TensorSpec, window: AddressWindow, value_count: int) -> str:
        """Return the dtype of the values in memory: the input's, or the one TensorRT reads for it.

        Args:
            spec: the input.
            window: the memory from the address on.
            value_count: values that a batch of the expected number of samples holds.
        """
        if spec.dtype not in _NUMBER_DTYPES:
            raise FeedError(
                f"a calibrator hands over plain numbers, got the input {describe(spec)}; feed"
                " arrays by --images"
            )
        # a dtype of 4 bytes; None if TensorRT reads the input's own
        tensorrt_dtype = _TENSORRT_DTYPES.get(spec.dtype)
        if window.dtype is None:  # bytes from an address: only their number shows the dtype
            if tensorrt_dtype and window.readable_bytes == 4 * value_count:
                return tensorrt_dtype
            return spec.dtype
        if window.dtype not in (spec.dtype, tensorrt_dtype):
            raise FeedError(
                f"get_batch of {self._script_title} must copy the dtype of the input"
                f" {describe(spec)}, got {window.dtype} in {self.batch_title}; convert it with"
                f" .astype('{spec.dtype}')"
            )
        return window.dtype

    def _count_samples(
        self,
        spec: TensorSpec,
        window: AddressWindow,
        expected_count: int,
        sample_bytes: int,
    ) -> int:
        """Return how many samples of one input a batch holds at an address.

        They are `expected_count`, unless the bytes that were copied there are another whole number
        of samples which `_accept_other_count` accepts.

        Args:
            spec: the input.
            window: the memory from the address on.
            expected_count: samples of a complete batch.
            sample_bytes: size of one sample.

        Raises:
            FeedError: the bytes are no whole samples, or too many or too few of them.
        """
        readable_bytes = window.readable_bytes
        expected_bytes = expected_count * sample_bytes
        if readable_bytes == expected_bytes:
            return expected_count
        is_copied = window.copied is not None
        if not is_copied and readable_bytes > expected_bytes:
            return expected_count  # nothing tells how much of a larger allocation is used

        copied_count, remaining_bytes = divmod(readable_bytes, sample_bytes)
        if is_copied and spec.has_batch and not remaining_bytes:
            is_accepted = self._accept_other_count(
                copied_count,
                is_larger=copied_count > expected_count,
                has_known_dtype=window.dtype is not None,
            )
            if is_accepted:
                return copied_count
        kind = "copied" if is_copied else "an allocation of"
        raise FeedError(
            f"{self.batch_title} of {self._script_title} must hold"
            f" {counted(expected_count, 'sample')} (get_batch_size) of the input {describe(spec)},"
            f" {expected_bytes} bytes, got {kind} {readable_bytes} bytes; make get_batch_size, the"
            " allocation, the dtype and the copied bytes agree"
        )

    def _accept_other_count(self, count: int, *, is_larger: bool, has_known_dtype: bool) -> bool:
        """Return whether a batch of another size than expected is accepted; record a smaller one.

        A larger batch is accepted if the dtype of its values is known and get_batch_size says 1.

        A smaller batch is accepted if the dtype of its values is known. If it is not known, they
        may have fewer bytes than the input's values, and then every batch looks too small. So such
        a batch is accepted only after a complete one, and as the last one.

        Args:
            count: samples that the copied bytes make, in the input's dtype.
            is_larger: whether they are more than expected.
            has_known_dtype: whether the dtype of the copied bytes is known.
        """
        if is_larger:
            return has_known_dtype and self._declared_batch_size == 1
        if not has_known_dtype:
            if self._batch_count == 0:  # no complete batch came before
                return False
            self._must_be_last = True
        self._size_by_short_batch[self._batch_count] = count
        return True


def _address(pointer: object) -> int | None:
    """Return the address of a pointer object; None for any other object."""
    try:
        return address_of(pointer)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several values
        return None


T = TypeVar("T")
_ALGORITHM_NAMES = {
    CalibrationAlgoType.ENTROPY_CALIBRATION_2: "entropy2",
    CalibrationAlgoType.ENTROPY_CALIBRATION: "entropy",
    CalibrationAlgoType.MINMAX_CALIBRATION: "minmax",
    CalibrationAlgoType.LEGACY_CALIBRATION: "legacy",
}


class CalibratorScript:
    """The calibrator that `file.py:function` returns.

    Attributes:
        algorithm: of its base class: "entropy2", "entropy", "minmax" or "legacy"; else None.
        quantile: a legacy calibrator's `get_quantile`; else None.
        batch_size: samples per batch, its `get_batch_size`.
        notes: for the user, besides those from reading the batches.
    """

    def __init__(self, spec: str) -> None:
        """Import the file and create the calibrator; no batch is read yet.

        `spec`: `file.py:function`; the function takes no arguments and returns the calibrator.

        Raises:
            ConfigError: no such file or function.
            FeedError: the user's code failed, or returned no calibrator.
        """
        self.spec = spec
        self.notes: tuple[str, ...] = ()
        self._stand_ins = shared_stand_ins()  # modules in place of tensorrt and CUDA's packages
        with self._stand_ins.installed():
            self._create = usercode.load_function(
                spec, what="a calibrator", form="file.py:function", error=FeedError
            )
        self._calibrator = self._call(self._create)
        self._was_read = False  # whether its batches were read, which it gives only once
        for method in ("get_batch_size", "get_batch"):
            if not callable(self._attribute(method)):
                raise FeedError(
                    f"{self} must have get_batch_size and get_batch, got a"
                    f" {type(self._calibrator).__name__} without {method}; return the calibrator"
                )
        self.batch_size = self._read_batch_size()
        algorithm = self._call_method("get_algorithm")
        is_algorithm = isinstance(algorithm, CalibrationAlgoType)
        self.algorithm = _ALGORITHM_NAMES.get(algorithm) if is_algorithm else None
        # TensorRT calls get_quantile of legacy calibrators only
        self.quantile = self._read_quantile() if self.algorithm == "legacy" else None

    def __str__(self) -> str:
        return f"the calibrator {self.spec}"

    def source(self, specs: Specs, limit: int | None) -> ArraySource:
        """Read the samples, at most `limit` of them; None for all.

        A calibrator gives its batches only once, so a second call creates it again.

        Raises:
            FeedError: the user's code failed, or its arrays do not fit the inputs; or it does not
                end, and there is no limit.
        """
        if self._was_read:
            self._calibrator = self._call(self._create)
        self._was_read = True
        batches = CalibratorBatches(str(self), self._stand_ins.memory, specs, self.batch_size)
        items = iter(lambda: self._next_item(batches, specs), None)
        with self._stand_ins.lock:  # all scripts share the memory: one is read at a time
            source = open_iterable(
                items, specs, name=str(self), has_end=False, limit=limit, remedy=_NO_BATCH
            )
        return replace(source, notes=(*self.notes, *batches.notes, *source.notes))

    def _call(self, function: Callable[..., T], *args: object) -> T:
        """Return what a function of the user's code returns.

        Raises:
            FeedError: the code failed, or an allocation or a copy in it was invalid, even if the
                code caught that error.
        """
        errors_as_feed_error = usercode.wrap_user_errors(str(self), error=FeedError)
        with errors_as_feed_error, self._stand_ins.installed():
            result = function(*args)
            if self._stand_ins.memory.fault is not None:
                raise self._stand_ins.memory.fault
        return result

    def _attribute(self, name: str) -> Any:
        return self._call(getattr, self._calibrator, name, None)

    def _call_method(self, name: str) -> Any:
        """Return what a method of the calibrator returns; None if it has no such method."""
        method = self._attribute(name)
        if method is None:
            return None
        return self._call(method)

    def _read_batch_size(self) -> int:
        """Return what get_batch_size gives."""
        size = self._call(self._calibrator.get_batch_size)
        try:
            count = operator.index(size)
        except TypeError:
            count = 0
        if count < 1:
            raise FeedError(f"get_batch_size of {self} must give 1 or more, got {size!r:.60}")
        return count

    def _read_quantile(self) -> float | None:
        """Return what a legacy calibrator's get_quantile gives; None without that method."""
        value = self._call_method("get_quantile")
        if value is None:
            return None
        if not isinstance(value, float | int) or not 0.5 < value <= 1:
            raise FeedError(
                f"get_quantile of {self} must be over 0.5 and at most 1, got {value!r:.60}"
            )
        return float(value)

    def _next_item(self, batches: CalibratorBatches, specs: Specs) -> Item | None:
        """Return the next batch of the script as arrays by input; None at its end.

        The script copies its batch to the memory of stand-ins for CUDA, from which it is read.

        Raises:
            FeedError: get_batch failed, or gave another number of addresses.
        """
        self._stand_ins.memory.start_batch()
        input_names = [spec.name for spec in specs]
        pointers = self._call(self._get_pointers, input_names)
        is_sequence = isinstance(pointers, list | tuple | np.ndarray)
        got = len(pointers) if is_sequence else type(pointers).__name__  # for the message, too
        if pointers is None or got == 0:  # None and an empty list end the data, as in TensorRT
            return None
        if got != len(specs):
            raise FeedError(
                f"get_batch of {self} must give one address for each of {input_names},"
                f" got {got} in {batches.batch_title}"
            )
        return batches.read_batch(list(pointers))

    def _get_pointers(self, names: list[str]) -> Any:
        try:
            return self._calibrator.get_batch(names)
        except StopIteration:  # the end; TensorRT takes any exception for it
            return None
