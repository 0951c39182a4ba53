"""TensorRT's own calibrators (8.5 to 10.16), fed and watched.

TensorRT runs the network and searches the scales itself; a calibrator only hands over batches and
a cache. Three habits of TensorRT make that treacherous, and are answered here:

* An exception in a callback is printed and taken for "no more data". It is kept, and `check`
  raises it once the build is over.
* A feed that ends early gives scales like any other. `check` compares batches taken and promised.
* `get_batch` must give exactly one device address a name; fewer are read beyond the end.

::

    feed --dict of arrays--> get_batch --copy--> DeviceMemory --addresses--> TensorRT
                                                    ^ CudaMemory on a GPU, plain host buffers in
                                                      tests

Sources: NVIDIA/TensorRT include/NvInfer.h (IInt8Calibrator and its four subclasses) and
python/src/infer/pyInt8.cpp, where the bindings swallow exceptions and copy the address list.

numpy arrays <-> what lies in a GPU's memory, in TensorRT's types.

numpy has no bfloat16 and no float8: those are float32 here, and their bits there.

Source of E4M3 (float8 of TensorRT and ONNX): Micikevicius et al., FP8 formats for deep learning,
arXiv 2209.05433, section 3; it has no infinity, and one NaN a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError

Array = NDArray[Any]

BITS = {"bfloat16": "uint16", "float8": "uint8"}  # types that numpy lacks, and whose bits it holds
_SIGN8 = 1 << 7
_NAN8 = _SIGN8 - 1


def host_type(dtype: str) -> str:
    """The numpy type that stands for one of TensorRT's."""
    return "float32" if dtype in BITS else dtype


def stored(array: Array, dtype: str) -> Array:
    """An array of any shape, C-contiguous, as the device reads it as `dtype`.

    Numbers become narrower where every one fits; float8 takes its largest for what is larger.

    Raises:
        ValueError: one does not fit, or `array` is of another kind; as the end of a sentence.
    """
    if dtype == "bfloat16":
        return _to_bfloat16(np.asarray(array, np.float32, order="C"))
    if dtype == "float8":
        return _to_float8(np.asarray(array, np.float32, order="C"))
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return np.asarray(array, order="C")
    if wanted.kind in "iu" and array.dtype.kind in "iu":
        limits = np.iinfo(wanted)
        for value in (array.min(initial=0), array.max(initial=0)):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{dtype} from {limits.min} to {limits.max}, got {value}")
    elif not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ValueError(f"{dtype}, got {array.dtype}")
    with np.errstate(over="ignore"):
        made = np.asarray(array, wanted, order="C")
    if wanted.kind == "f" and np.any(lost := np.isinf(made) & np.isfinite(array)):
        raise ValueError(f"{dtype} up to {np.finfo(wanted).max:g}, got {array[lost].flat[0]:g}")
    return made


def loaded(bits: Array, dtype: str) -> Array:
    """Inverse of `stored`: what the device wrote as `dtype`, in numpy's type for it; a copy."""
    if dtype == "bfloat16":
        wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return _float8()[bits] if dtype == "float8" else bits.copy()


def _to_bfloat16(values: Array) -> Array:
    """float32 -> its upper 16 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + even) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _to_float8(values: Array) -> Array:
    """float32 -> E4M3, rounded to nearest, ties to even; beyond 448 it is 448."""
    steps = _float8()[:_NAN8]
    middles = (steps[:-1] + steps[1:]) / 2
    sizes = np.abs(values)
    below = np.searchsorted(middles, sizes, side="left")
    tie = (below < middles.size) & (sizes == middles[np.minimum(below, middles.size - 1)])
    codes = below + (tie & (below % 2 == 1))
    signs = np.where(np.signbit(values), _SIGN8, 0)
    return np.where(np.isnan(values), _NAN8, codes | signs).astype(np.uint8)


@cache
def _float8() -> Array:
    """float32 of every E4M3 code: 4 bits of exponent, 3 of mantissa, bias 7."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    sizes = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    sizes[[_NAN8, _NAN8 | _SIGN8]] = np.nan
    return np.where(codes & _SIGN8, -sizes, sizes).astype(np.float32)


# Name of the search -> TensorRT's class, and the word of a cache's first line.
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


class DeviceMemory(Protocol):
    """Buffers that TensorRT reads its batches from, one a network input."""

    def put(self, name: str, array: Array) -> int:
        """Copy a C-contiguous array to the buffer of `name`; give the buffer's address."""
        ...

    def free(self) -> None:
        """Release every buffer."""
        ...


class HostMemory:
    """Buffers in host memory: what a machine without a GPU can offer, and all a test needs."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def put(self, name: str, array: Array) -> int:
        """Copy `array`; give the address of the copy."""
        self._buffers[name] = np.array(array, order="C", copy=True)
        return int(self._buffers[name].ctypes.data)

    def free(self) -> None:
        """Drop every buffer."""
        self._buffers.clear()


class Callbacks:
    """What all four calibrators do when TensorRT calls; mixed in before TensorRT's own class.

    Args:
        feed: batches, input name -> array.
        batches: how many batches the feed promises.
        shapes: input name -> the shape that TensorRT calibrates with (the profile's OPT shape).
        memory: where TensorRT reads the batches.
        known: the bytes of a cache that fits, or None to calibrate.
        keep: takes a new cache as soon as TensorRT has it, which is long before the engine is.
    """

    def __init__(
        self,
        feed: Iterable[Mapping[str, Array]],
        *,
        batches: int,
        shapes: Mapping[str, Sequence[int]],
        memory: DeviceMemory,
        known: bytes | None = None,
        keep: Callable[[bytes], object] | None = None,
    ) -> None:
        self._feed: Iterator[Mapping[str, Array]] = iter(feed)
        self._memory = memory
        self._known = known
        self._keep = keep
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._types: dict[str, str] = {}
        self.promised = batches
        self.asked = 0
        self.taken = 0
        self.written: bytes | None = None
        self.error: BaseException | None = None

    def expect(self, types: Mapping[str, str]) -> None:
        """Types of the network's inputs; as long as they are not told, float32 and int32."""
        self._types = dict(types)

    def get_batch_size(self) -> int:
        """1: with explicit batch dimensions the batch is part of the shape."""
        return 1

    def get_batch(self, names: list[str]) -> list[int]:
        """Addresses of the next batch, in the order of `names`; empty at the end or on error."""
        self.asked += 1
        try:
            return self._next_addresses(names)
        except BaseException as error:  # TensorRT would swallow it: keep it for `check`
            self.error = self.error or error
            return []

    def read_calibration_cache(self) -> Any:
        """The known cache, or None to calibrate anew. TensorRT asks more than once."""
        return self._known

    def write_calibration_cache(self, cache: Any) -> None:
        """Keep a copy: the memory is TensorRT's and is gone after the call."""
        try:
            self.written = bytes(cache)
            if self._keep is not None and self.error is None and not self.trouble():
                self._keep(self.written)
        except BaseException as error:
            self.error = self.error or error

    def check(self) -> bytes:
        """After the build: the cache in force, known or new.

        Raises:
            CalibrationError: TensorRT took fewer batches than promised, or wrote no cache.
            BaseException: whatever a callback raised while TensorRT was building.
        """
        if self.error is not None:
            raise self.error
        wrong = self.trouble()
        if wrong:
            raise CalibrationError(wrong)
        return self.written or self._known or b""

    def trouble(self) -> str:
        """What went wrong between TensorRT and this calibrator, in one sentence; "" if nothing."""
        if self._known is not None and self.taken == 0:
            return _REFUSED if self.asked else ""
        if self.taken != self.promised:
            return (
                f"TensorRT must see every batch, got {self.taken} of {self.promised};"
                " its scales are not usable"
            )
        return "" if self.written else f"TensorRT took {self.taken} batches but wrote no cache"

    def _next_addresses(self, names: list[str]) -> list[int]:
        batch = next(self._feed, None) if self.taken < self.promised else None
        if batch is None:
            return []
        addresses = [self._memory.put(name, self._checked(name, batch)) for name in names]
        self.taken += 1
        return addresses

    def _checked(self, name: str, batch: Mapping[str, Array]) -> Array:
        if name not in batch:
            raise CalibrationError(
                f"batch {self.taken} must hold every network input, got {sorted(batch)}"
                f" without {name!r}"
            )
        array = np.asarray(batch[name], order="C")
        wanted = self.shapes.get(name)
        if wanted is not None and array.shape != wanted:
            raise CalibrationError(
                f"TensorRT calibrates {name!r} with the profile's OPT shape {list(wanted)} only,"
                f" got {list(array.shape)} in batch {self.taken}; give both the same shape"
            )
        read = self._read(name, array)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CalibrationError(
                f"a calibration batch must be finite, got NaN or Inf in {name!r} of batch"
                f" {self.taken}"
            )
        return read

    def _read(self, name: str, array: Array) -> Array:
        """An array as TensorRT calibrates with.

        float32 also where the network's own input is narrower, whole numbers in its own type where
        they fit. Source: Polygraphy's calibrator, which gives floating inputs as float32 alone.
        """
        plain = "int32" if array.dtype == np.int32 else "float32"
        own = self._types.get(name, plain)
        if name not in self._types and array.dtype != plain:
            raise CalibrationError(
                f"TensorRT reads calibration batches as float32 (indices as int32), got"
                f" {array.dtype} for {name!r} in batch {self.taken}"
            )
        try:
            return stored(array, "float32" if "float" in own else own)
        except ValueError as error:
            raise CalibrationError(
                f"TensorRT reads {name!r} as {error} in batch {self.taken}"
            ) from None


def calibrator(
    algorithm: str,
    feed: Iterable[Mapping[str, Array]],
    *,
    batches: int,
    shapes: Mapping[str, Sequence[int]],
    memory: DeviceMemory,
    known: bytes | None = None,
    keep: Callable[[bytes], object] | None = None,
    quantile: float = 0.999999,
    cutoff: float = 1.0,
) -> Callbacks:
    """A calibrator for `IBuilderConfig.int8_calibrator`; keep it alive until the build is over.

    The arguments are those of `Callbacks`; `quantile` and `cutoff` count for "legacy" only.

    Raises:
        CalibrationError: no such algorithm, or this TensorRT has no calibrators (11 and later).
    """
    import tensorrt as trt

    if algorithm not in CLASSES:
        raise CalibrationError(f"TensorRT's calibrators are {sorted(CLASSES)}, got {algorithm!r}")
    if not hasattr(trt, CLASSES[algorithm]):
        raise CalibrationError(
            f"TensorRT {trt.__version__} has no {CLASSES[algorithm]} (calibrators ended with"
            " 10.16); build from the Q/DQ model instead"
        )
    made: Callbacks = _subclass(algorithm, quantile=quantile, cutoff=cutoff)(
        feed, batches=batches, shapes=shapes, memory=memory, known=known, keep=keep
    )
    return made


def _subclass(algorithm: str, *, quantile: float, cutoff: float) -> type[Callbacks]:
    """The calibrator class for `algorithm`.

    Each calls TensorRT's `__init__` itself: without that the first callback is a segfault.
    """
    import tensorrt as trt

    made: type[Callbacks]
    if algorithm == "entropy2":

        class Entropy2(Callbacks, trt.IInt8EntropyCalibrator2):
            def __init__(self, *args: Any, **options: Any) -> None:
                trt.IInt8EntropyCalibrator2.__init__(self)
                Callbacks.__init__(self, *args, **options)

        made = Entropy2
    elif algorithm == "entropy":

        class Entropy(Callbacks, trt.IInt8EntropyCalibrator):
            def __init__(self, *args: Any, **options: Any) -> None:
                trt.IInt8EntropyCalibrator.__init__(self)
                Callbacks.__init__(self, *args, **options)

        made = Entropy
    elif algorithm == "minmax":

        class MinMax(Callbacks, trt.IInt8MinMaxCalibrator):
            def __init__(self, *args: Any, **options: Any) -> None:
                trt.IInt8MinMaxCalibrator.__init__(self)
                Callbacks.__init__(self, *args, **options)

        made = MinMax
    else:

        class Legacy(Callbacks, trt.IInt8LegacyCalibrator):
            def __init__(self, *args: Any, **options: Any) -> None:
                trt.IInt8LegacyCalibrator.__init__(self)
                Callbacks.__init__(self, *args, **options)

            def get_quantile(self) -> float:
                return quantile

            def get_regression_cutoff(self) -> float:
                return cutoff

            def read_histogram_cache(self, length: int) -> None:
                return None

            def write_histogram_cache(self, pointer: Any, length: int) -> None:
                return None

        made = Legacy
    return made
