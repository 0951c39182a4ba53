"""Devices, silenced output and random state of torch."""

import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import nn

from deploy.errors import ConfigError, ModelError, SdkMissingError, first_line

CPU = torch.device("cpu")


def find_device(text: str | torch.device) -> torch.device:
    """Return the torch device named `cpu`, `cuda`, `cuda:1`, `meta`, or any other torch supports.

    Raises:
        ConfigError: torch has no such device.
        SdkMissingError: it is not available on this machine.
    """
    try:
        device = torch.device(text)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"a device is cpu, cuda, cuda:1 or meta, got {text!r}") from error
    try:
        torch.empty(1, device=device)
    except Exception as error:  # the error class depends on the device
        raise SdkMissingError(
            f"a model computes on a device of this machine, and torch has no {text} here"
            f" ({first_line(error)}); give --device cpu, or install a build of torch for it"
        ) from error
    return device


def refuse_meta(device: torch.device, what: str) -> None:
    """Raise `ConfigError` for the meta device, if `what` needs values."""
    if device.type == "meta":
        raise ConfigError(f"{what} needs values, and the meta device holds none; give another one")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return CPU


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, in place.

    Raises:
        ModelError: it has no values to move, as on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and device.type != "meta":
            raise ModelError(
                f"weights must have values, and '{name}' is on the meta device, which holds none;"
                " make the model on the CPU"
            )
    return model.to(device)


def move_tensors(value: Any, device: torch.device) -> Any:
    """Move tensors, also in tuples, lists and dicts, to a device; other values are unchanged."""
    return map_tensors(value, lambda tensor: tensor.to(device))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to tensors, also in tuples, lists and dicts; other values are unchanged."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change) for item in value]
        if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
            return type(value)(*items)
        return type(value)(items)
    return value


class DeviceAdapter(nn.Module):
    """Wraps a model so that it takes inputs from any device and returns outputs there.

    For user code that was written for the CPU, such as `Task.evaluate`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        """Return the model's outputs on the device of the first tensor input."""
        output = self.model(*move_tensors(inputs, device_of(self.model)))
        for value in inputs:
            if isinstance(value, torch.Tensor):
                return move_tensors(output, value.device)
        return output


@contextmanager
def quiet() -> Iterator[None]:
    """Hide this thread's logging, warnings and stderr inside the `with` block."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's loggers have handlers and levels of their own
    try:
        with warnings.catch_warnings(), redirect_stderr(_ThreadStderr()):
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logging.disable(disabled_level)


class _ThreadStderr:
    """Stderr that drops what the creating thread writes; another thread shows the progress."""

    def __init__(self) -> None:
        self._silenced = threading.get_ident()
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        if threading.get_ident() == self._silenced:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


State = dict[str, Any]


def random_state() -> State:
    """Return the random state of torch (CPU and every GPU), numpy and Python."""
    version, python_words, gauss = random.getstate()
    name, numpy_words, *numpy_position = np.random.get_state()  # noqa: NPY002 (a user's own)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "numpy": [str(name), torch.from_numpy(np.array(numpy_words, np.int64)), *numpy_position],
        "python": [version, torch.tensor(python_words), gauss],
    }


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Seed torch's generators inside the `with` block and restore them afterwards."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


def restore_random_state(saved: State) -> None:
    """Restore a random state from `random_state`; missing GPUs are ignored.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: `saved` is not such a state.
    """
    torch.set_rng_state(saved["torch"])
    gpu_states = saved["cuda"][: torch.cuda.device_count()]
    for device, gpu_state in enumerate(gpu_states):
        torch.cuda.set_rng_state(gpu_state, device)
    name, numpy_words, *numpy_position = saved["numpy"]
    numpy_state = (name, numpy_words.numpy().astype(np.uint32), *numpy_position)
    np.random.set_state(numpy_state)  # noqa: NPY002
    version, python_words, gauss = saved["python"]
    random.setstate((version, tuple(python_words.tolist()), gauss))
