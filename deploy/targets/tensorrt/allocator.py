"""Memory for outputs whose shape depends on values: TensorRT asks for it while it runs.

Source: NVIDIA/TensorRT include/NvInferRuntime.h (IOutputAllocator): the shape is told before
`execute_async_v3` returns. From 10 on the call with a stream is asked first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.targets.tensorrt.cuda import Buffer, Cuda
from deploy.targets.tensorrt.tensor_types import dims

if TYPE_CHECKING:
    import tensorrt as trt


class Growing:
    """What an allocator of one output does when TensorRT calls.

    Attributes:
        buffer: the memory in force; None before the first run.
        shape: of the last run.
        error: what went wrong in a call, which TensorRT swallows.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.buffer: Buffer | None = None
        self.shape: tuple[int, ...] = ()
        self.error: BaseException | None = None

    def reallocate_output(
        self, tensor_name: str, memory: int | None, size: int, alignment: int
    ) -> int:
        """Address of at least `size` bytes; 0 where there are none."""
        try:
            if self.buffer is None or self.buffer.size < size:
                self.buffer = Buffer(self._cuda, size)
            return self.buffer.address
        except BaseException as error:
            self.error = error
            return 0

    def reallocate_output_async(
        self, tensor_name: str, memory: int | None, size: int, alignment: int, stream: int
    ) -> int:
        """The same: CUDA's own allocation waits for what uses the old memory."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: trt.Dims) -> None:
        """Keep the shape of this run."""
        self.shape = dims(shape)


def growing(cuda: Cuda) -> Growing:
    """An allocator for `IExecutionContext.set_output_allocator`; to be kept as long as that."""
    import tensorrt as trt

    class Allocator(Growing, trt.IOutputAllocator):
        def __init__(self, cuda: Cuda) -> None:
            trt.IOutputAllocator.__init__(self)
            Growing.__init__(self, cuda)

    return Allocator(cuda)
