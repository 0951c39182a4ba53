"""PyTorch on the CPU for a script that puts its batches on the GPU.

While the mode is on, a device of CUDA is the CPU, and the address that `data_ptr` gives is known to
the memory. It hears every function of PyTorch that is called by Python in this thread.

Source: torch.overrides.TorchFunctionMode; torch.utils._device has the same for another device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deploy.standins.memory import Copied, Memory


class OnHost(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """CUDA's device is the CPU."""

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
        """Run one function, with its devices turned to the CPU."""
        if func is torch.Tensor.cuda:
            return args[0].clone()
        placed = [_placed(value) for value in args]
        found = func(*placed, **{k: _placed(v) for k, v in (kwargs or {}).items()})
        if func is torch.Tensor.data_ptr:
            self._lend(found, args[0])
        return found

    def _lend(self, address: int, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * size
        holds = None
        if tensor.is_contiguous():
            kind = str(tensor.dtype).removeprefix("torch.")
            holds = Copied(0, tensor.numel() * size, kind, tuple(tensor.shape))
        self._memory.lend(address, room, tensor, holds)


def _placed(value: Any) -> Any:
    """A device of CUDA as the CPU, anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
