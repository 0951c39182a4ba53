"""`Cuda` on top of pycuda: contexts are pushed and popped, since a leftover one aborts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError
from deploy.targets.tensorrt.cuda import REFUSED, WAY_OUT, CudaStream, format_cuda_version
from deploy.tensors import Array


def count_gpus() -> int:
    """Return the number of GPUs.

    Raises:
        ImportError, OSError: pycuda or the driver is missing.
        SdkMissingError: CUDA does not start, or has no GPU.
    """
    import pycuda.driver as cuda

    try:
        cuda.init()
        gpus = int(cuda.Device.count())
    except cuda.Error as error:
        raise SdkMissingError(str(error)) from error
    if gpus == 0:
        raise SdkMissingError("no GPU")
    return gpus


class _Pycuda:
    """One GPU; see `Cuda` for the methods."""

    def __init__(self, number: int) -> None:
        import pycuda.driver as cuda

        self._cuda = cuda
        device = cuda.Device(number)
        major, minor = device.compute_capability()
        self.name = f"{device.name()} sm_{major}{minor}"
        self.newest = format_cuda_version(cuda.get_driver_version())
        self._context = device.retain_primary_context()
        self._allocations: dict[int, Any] = {}  # address -> pycuda's object

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
        allocation = self._cuda.mem_alloc(max(size, 1))
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def free(self, address: int) -> None:
        with self.current():
            self._allocations.pop(address).free()

    def pinned(self, shape: Sequence[int], dtype: str) -> Array:
        """`pagelocked_empty`, which supports neither scalars nor empty arrays."""
        flat: Array = self._cuda.pagelocked_empty((max(prod(shape), 1),), np.dtype(dtype))
        return flat[: prod(shape)].reshape(tuple(shape))

    def copy_in(self, address: int, array: Array) -> None:
        self._cuda.memcpy_htod(self._allocations[address], array)

    def copy_in_later(self, address: int, array: Array, stream: CudaStream) -> None:
        self._cuda.memcpy_htod_async(self._allocations[address], array, stream.own)

    def copy_out_later(self, array: Array, address: int, stream: CudaStream) -> None:
        self._cuda.memcpy_dtoh_async(array, self._allocations[address], stream.own)

    def stream(self) -> CudaStream:
        own = self._cuda.Stream()
        return CudaStream(int(own.handle), own)

    def wait(self, stream: CudaStream) -> None:
        stream.own.synchronize()

    def event(self) -> Any:
        return self._cuda.Event()

    def record(self, event: Any, stream: CudaStream) -> None:
        event.record(stream.own)

    def between_ms(self, first: Any, last: Any) -> float:
        return float(first.time_till(last))


open_gpu = _Pycuda
