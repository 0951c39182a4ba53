"""PyTorch on the CPU for scripts that put their batches on the GPU.

While the mode is active, CUDA devices become the CPU, and addresses from `data_ptr` are registered
in the memory. It intercepts every function of PyTorch that Python calls in this thread.

Source: torch.overrides.TorchFunctionMode; torch.utils._device does the same for another device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deploy.standins.memory import BlockCopy, Memory


class CudaOnCpu(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Runs functions for CUDA devices on the CPU."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, any function of PyTorch, with the CPU for CUDA devices in its arguments.

        The address that `data_ptr` returns is registered in the memory.
        """
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0].clone()  # as with CUDA, a copy in other memory
        cpu_args = map(_on_cpu, args)
        cpu_kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        result = func(*cpu_args, **cpu_kwargs)
        if func is torch.Tensor.data_ptr:
            self._register(result, args[0])
        return result

    def _register(self, address: int, tensor: torch.Tensor) -> None:
        """Register a tensor whose address was read: its data, and the room up to the storage end.

        The data of a tensor that is not contiguous is unknown, since its bytes are not in order.
        """
        value_size = tensor.element_size()
        room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * value_size
        content = None
        if tensor.is_contiguous():
            dtype = str(tensor.dtype).removeprefix("torch.")
            content = BlockCopy(0, tensor.nbytes, dtype, tuple(tensor.shape))
        self._memory.lend(address, room, tensor, content)


def _on_cpu(value: Any) -> Any:
    """Return the CPU for a CUDA device, anything else unchanged."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
