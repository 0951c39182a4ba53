"""Where a model computes: on the CPU, on a GPU, or on torch's meta device, where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deploy.errors import ConfigError, SdkMissingError, first_line

CPU = torch.device("cpu")


def find_device(text: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, `meta` or another that torch knows -> the device.

    Raises:
        ConfigError: torch knows no such device.
        SdkMissingError: it is not on this machine.
    """
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"a device is cpu, cuda, cuda:1 or meta, got {text!r}") from error
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each device says in its own way that it is not here
        raise SdkMissingError(
            f"a model computes on a device of this machine, and torch has no {text} here"
            f" ({first_line(error)}); give --device cpu, or install a build of torch for it"
        ) from error
    return device


def refuse_meta(device: torch.device, what: str) -> None:
    """Raise `ConfigError` where values are needed and the device has none."""
    if device.type == "meta":
        raise ConfigError(f"{what} needs values, and the meta device holds none; give another one")


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU where it has none."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else CPU


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, also within tuples, lists and dicts, on a device; all else as it is."""
    return mapped(value, lambda tensor: tensor.to(device))


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Tensors, also within tuples, lists and dicts, changed; all else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change) for item in value]
        # a named tuple takes its fields one by one
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Reached(nn.Module):
    """A model that takes inputs from any device and gives its outputs there.

    For code of the user's that was written for the CPU, such as `Task.evaluate`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        """The model's outputs, on the device of the first input that is a tensor."""
        homes = [value.device for value in inputs if isinstance(value, torch.Tensor)]
        output = self.model(*moved(inputs, device_of(self.model)))
        return moved(output, homes[0]) if homes else output
