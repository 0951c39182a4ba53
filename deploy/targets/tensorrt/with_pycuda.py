"""`Cuda` by pycuda, whose contexts are pushed and popped: it aborts on one that is left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError
from deploy.targets.tensorrt.cuda import REFUSED, WAY_OUT, Stream, version_words
from deploy.tensors import Array


def count() -> int:
    """How many GPUs there are.

    Raises:
        ImportError, OSError: pycuda or the driver is missing.
        SdkMissingError: CUDA does not start, or has no GPU.
    """
    import pycuda.driver as cuda

    try:
        cuda.init()
        found = int(cuda.Device.count())
    except cuda.Error as error:
        raise SdkMissingError(str(error)) from error
    if found == 0:
        raise SdkMissingError("no GPU")
    return found


class Pycuda:
    """One GPU; the meaning of each method stands at `Cuda`."""

    def __init__(self, number: int) -> None:
        import pycuda.driver as cuda

        self._cuda = cuda
        device = cuda.Device(number)
        major, minor = device.compute_capability()
        self.name = f"{device.name()} sm_{major}{minor}"
        self.newest = version_words(cuda.get_driver_version())
        self._context = device.retain_primary_context()
        self._held: dict[int, Any] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Push the primary context."""
        self._context.push()
        try:
            yield
        except self._cuda.Error as error:
            raise BackendError(f"{REFUSED}: {error}; {WAY_OUT}") from error
        finally:
            self._context.pop()

    def allocate(self, size: int) -> int:
        """`mem_alloc`."""
        made = self._cuda.mem_alloc(max(size, 1))
        self._held[int(made)] = made
        return int(made)

    def free(self, address: int) -> None:
        """Let go of what `mem_alloc` made."""
        with self.current():
            self._held.pop(address).free()

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """`pagelocked_empty`, which knows no scalars and no empty arrays."""
        flat: Array = self._cuda.pagelocked_empty((max(prod(shape), 1),), np.dtype(dtype))
        return flat[: prod(shape)].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        """`memcpy_htod`."""
        self._cuda.memcpy_htod(self._held[address], array)

    def copy_in_later(self, address: int, array: Array, stream: Stream) -> None:
        """`memcpy_htod_async`."""
        self._cuda.memcpy_htod_async(self._held[address], array, stream.own)

    def copy_out_later(self, array: Array, address: int, stream: Stream) -> None:
        """`memcpy_dtoh_async`."""
        self._cuda.memcpy_dtoh_async(array, self._held[address], stream.own)

    def stream(self) -> Stream:
        """A stream of pycuda's, with its handle."""
        made = self._cuda.Stream()
        return Stream(int(made.handle), made)

    def wait(self, stream: Stream) -> None:
        """`Stream.synchronize`."""
        stream.own.synchronize()

    def event(self) -> Any:
        """An event of pycuda's."""
        return self._cuda.Event()

    def record(self, event: Any, stream: Stream) -> None:
        """`Event.record`."""
        event.record(stream.own)

    def between_ms(self, first: Any, last: Any) -> float:
        """`Event.time_till`."""
        return float(first.time_till(last))
