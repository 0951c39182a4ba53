"""TensorRT's built-in int8 calibrators (8.5 to 10.16), with data conversion and error checks.

TensorRT runs the network and searches the scales itself; a calibrator only supplies batches and a
cache. Three properties of TensorRT need care:

* It prints an exception in a callback and treats it as the end of the data. It is stored here, and
  `check` raises it after the build.
* A feed that ends early still gives scales. `check` compares the batches taken with those promised.
* `get_batch` must return exactly one device address per name; TensorRT reads beyond a shorter list.

::

    feed --dict of arrays--> get_batch --copy--> DeviceMemory --addresses--> TensorRT
                                                    ^ CudaMemory on a GPU, plain host buffers in
                                                      tests

Sources: NVIDIA/TensorRT include/NvInfer.h (IInt8Calibrator and its four subclasses) and
python/src/infer/pyInt8.cpp, where the bindings swallow exceptions and copy the address list.

numpy has no bfloat16 and float8: they are float32 on the host and converted to their bits for the
device. Source of E4M3 (float8 of TensorRT and ONNX): Micikevicius et al., FP8 formats for deep
learning, arXiv 2209.05433, section 3; it has no infinity, and one NaN per sign.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.grids import BFLOAT16, FP8, fp8_codes, fp8_values, round_to_grid
from calibrators.percentile import QUANTILE

Array = NDArray[Any]

BITS = {"bfloat16": "uint16", "float8": "uint8"}  # types that numpy lacks -> type of their bits
# Name of the search -> TensorRT's class; name of the search -> algorithm in a cache's first line.
CLASSES = {
    "entropy2": "IInt8EntropyCalibrator2",
    "entropy": "IInt8EntropyCalibrator",
    "minmax": "IInt8MinMaxCalibrator",
    "legacy": "IInt8LegacyCalibrator",
}
ALGORITHMS = {
    "entropy2": "EntropyCalibration2",
    "entropy": "EntropyCalibration",
    "minmax": "MinMaxCalibration",
    "legacy": "LegacyCalibration",
}
_REFUSED = (
    "TensorRT must take the known cache, but refused it and asked for batches, of which there are"
    " none; its first line must name this version and calibrator"
)


def host_type(dtype: str) -> str:
    """Return the numpy type that holds values of a TensorRT type."""
    return "float32" if dtype in BITS else dtype


def to_device(array: Array, dtype: str) -> Array:
    """Convert an array of any shape to the device format of a type, C-contiguous.

    The type may be narrower than the array's, if all numbers fit; their digits may be rounded off.
    Integers become floats, but floats never become integers. float8 and bfloat16 take any numbers;
    those beyond the range of float8 become its largest.

    Args:
        array: the numbers.
        dtype: name of a numpy type, or "bfloat16" or "float8", whose bits are returned as integers.

    Raises:
        ValueError: a number does not fit, or is of a kind that is not converted. The message
            completes a sentence after "must be": "int8 from -128 to 127, got 300".
    """
    if dtype == "bfloat16":  # the upper half of a float32
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            rounded = round_to_grid(np.asarray(array, np.float32, order="C"), BFLOAT16)
        return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype == "float8":
        grid_values = round_to_grid(np.asarray(array, np.float32, order="C"), FP8)
        return fp8_codes(np.clip(grid_values, FP8.qmin, FP8.qmax))
    target_type = np.dtype(dtype)
    if array.dtype == target_type:
        return np.asarray(array, order="C")
    if target_type.kind in "iu" and array.dtype.kind in "iu":  # both are integers
        limits = np.iinfo(target_type)
        for value in (array.min(initial=0), array.max(initial=0)):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{dtype} from {limits.min} to {limits.max}, got {value}")
    elif not np.can_cast(array.dtype, target_type, "same_kind"):
        raise ValueError(f"{dtype}, got {array.dtype}")
    with np.errstate(over="ignore"):
        converted = np.asarray(array, target_type, order="C")
    if target_type.kind == "f":  # a number beyond its range became infinite
        overflows = array[np.isinf(converted) & np.isfinite(array)]
        if overflows.size:
            limit = np.finfo(target_type).max
            raise ValueError(f"{dtype} up to {limit:g}, got {overflows.flat[0]:g}")
    return converted


def from_device(bits: Array, dtype: str) -> Array:
    """Convert an array from the device format of `dtype` (inverse of `to_device`) to a copy."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8":
        return fp8_values(bits)
    return bits.copy()


class DeviceMemory(Protocol):
    """Buffers from which TensorRT reads batches, one per network input."""

    def put(self, name: str, array: Array) -> int:
        """Copy a C-contiguous array to the buffer of `name`; return the buffer's address."""


class HostMemory:
    """Buffers in host memory, for tests and machines without a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def put(self, name: str, array: Array) -> int:
        """Copy `array`; return the address of the copy."""
        self._buffers[name] = np.array(array, order="C")
        return self._buffers[name].ctypes.data


class Callbacks:
    """Callbacks of all four calibrators; a mixin that precedes TensorRT's class.

    Attributes:
        shapes: input name -> shape that TensorRT calibrates with (the profile's OPT shape).
        batches: number of batches of the feed.
        requests: number of times that TensorRT asked for a batch.
        batches_taken: number of batches that it got.
        written: bytes of the cache that TensorRT wrote; None before.
        error: first exception of a callback; None if there is none.
    """

    def __init__(
        self,
        feed: Iterable[Mapping[str, Array]],
        *,
        batches: int,
        shapes: Mapping[str, Sequence[int]],
        memory: DeviceMemory,
        cache: bytes | None = None,
        store: Callable[[bytes], object] | None = None,
    ) -> None:
        """Start before the first batch.

        Args:
            feed: batches, input name -> array.
            batches: number of batches of the feed.
            shapes: input name -> shape that TensorRT calibrates with (the profile's OPT shape).
            memory: buffers from which TensorRT reads the batches; of this calibrator only.
            cache: bytes of a cache that fits, or None to calibrate.
            store: called with a new cache as soon as TensorRT writes it, long before the engine is
                done; None to keep it only in `written`.
        """
        self._feed = iter(feed)
        self._memory = memory
        self._cache = cache
        self._store = store
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._types: dict[str, str] = {}  # input -> type; empty until `expect`
        self.batches = batches
        self.requests = 0
        self.batches_taken = 0
        self.written: bytes | None = None
        self.error: BaseException | None = None

    def expect(self, types: Mapping[str, str]) -> None:
        """Set the types of the network's inputs, before the first batch."""
        self._types = dict(types)

    def get_batch_size(self) -> int:
        """Return 1: with explicit batch dimensions the batch is part of the shape."""
        return 1

    def get_batch(self, names: list[str]) -> list[int]:
        """Return the addresses of the next batch in order of `names`; [] at the end or on error."""
        self.requests += 1
        try:
            return self._next_addresses(names)
        except BaseException as error:  # TensorRT would swallow it; `check` raises it
            self.error = self.error or error
            return []

    def read_calibration_cache(self) -> Any:
        """Return the known cache, or None to calibrate. TensorRT calls this more than once."""
        return self._cache

    def write_calibration_cache(self, cache: Any) -> None:
        """Store a copy: TensorRT frees the memory after the call."""
        try:
            self.written = bytes(cache)
            if self._store is not None and self.error is None and not self.trouble():
                self._store(self.written)
        except BaseException as error:
            self.error = self.error or error

    def check(self) -> bytes:
        """Return the cache used, known or new; call this after the build.

        Raises:
            CalibrationError: TensorRT took fewer batches than promised, or wrote no cache.
            BaseException: an exception of a callback during the build.
        """
        if self.error is not None:
            raise self.error
        if trouble := self.trouble():
            raise CalibrationError(trouble)
        return self.written or self._cache or b""

    def trouble(self) -> str:
        """Return what went wrong during calibration, in one sentence; "" if nothing did."""
        if self._cache is not None and self.batches_taken == 0:
            return _REFUSED if self.requests else ""
        if self.batches_taken != self.batches:
            return (
                f"TensorRT must see every batch, got {self.batches_taken} of {self.batches};"
                " its scales are not usable"
            )
        if not self.written:
            return f"TensorRT took {self.batches_taken} batches but wrote no cache"
        return ""

    def _next_addresses(self, names: list[str]) -> list[int]:
        """Copy the next batch to the device; return its addresses, or [] if there is none."""
        if self.batches_taken == self.batches:
            return []
        batch = next(self._feed, None)
        if batch is None:
            return []
        addresses = [self._memory.put(name, self._checked_array(name, batch)) for name in names]
        self.batches_taken += 1
        return addresses

    def _checked_array(self, name: str, batch: Mapping[str, Array]) -> Array:
        """Return the array of one input of a batch as TensorRT reads it.

        Args:
            name: name of the input.
            batch: input -> array.

        Raises:
            CalibrationError: another shape or type than TensorRT calibrates with, NaN or Inf.
        """
        array = np.asarray(batch[name], order="C")
        shape = self.shapes[name]
        if array.shape != shape:
            raise CalibrationError(
                f"TensorRT calibrates {name!r} with the profile's OPT shape {list(shape)} only,"
                f" got {list(array.shape)} in batch {self.batches_taken}; give both the same shape"
            )
        converted = self._convert_input(name, array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CalibrationError(
                f"a calibration batch must be finite, got NaN or Inf in {name!r} of batch"
                f" {self.batches_taken}"
            )
        return converted

    def _convert_input(self, name: str, array: Array) -> Array:
        """Convert an array to the type that TensorRT calibrates with.

        It is float32 for every float input, also narrower ones, and the input's type for
        integers.

        Source: Polygraphy's calibrator, which supplies float inputs as float32 only.
        """
        input_type = self._types[name]
        try:
            return to_device(array, "float32" if "float" in input_type else input_type)
        except ValueError as error:  # such as "int8 from -128 to 127, got 300"
            raise CalibrationError(
                f"TensorRT reads {name!r} as {error} in batch {self.batches_taken}"
            ) from None


def calibrator_class(algorithm: str) -> type[Callbacks]:
    """Return a class of calibrators for TensorRT's `IBuilderConfig.int8_calibrator`.

    It derives from `Callbacks`, which feeds the batches, and from TensorRT's class of the
    algorithm. A calibrator must stay alive until the build ends.

    `algorithm`: a key of `CLASSES`, such as "entropy2".

    Raises:
        CalibrationError: an unknown algorithm, or this TensorRT has no calibrators (11 and later).
    """
    import tensorrt as trt

    if algorithm not in CLASSES:
        raise CalibrationError(f"TensorRT's calibrators are {sorted(CLASSES)}, got {algorithm!r}")
    base: Any = getattr(trt, CLASSES[algorithm], None)
    if base is None:
        raise CalibrationError(
            f"TensorRT {trt.__version__} has no {CLASSES[algorithm]} (calibrators ended with"
            " 10.16); build from the Q/DQ model instead"
        )

    class Calibrator(Callbacks, base):
        def __init__(self, *args: Any, **options: Any) -> None:
            base.__init__(self)  # explicitly, otherwise the first callback segfaults
            Callbacks.__init__(self, *args, **options)

    if algorithm != "legacy":
        return Calibrator

    # the legacy calibrator of TensorRT needs four methods more
    class LegacyCalibrator(Calibrator):
        def get_quantile(self) -> float:
            return QUANTILE

        def get_regression_cutoff(self) -> float:
            return 1.0

        def read_histogram_cache(self, length: int) -> None:
            return None  # there is none, so TensorRT counts the histograms

        def write_histogram_cache(self, pointer: Any, length: int) -> None:
            return None  # it is not kept

    return LegacyCalibrator
