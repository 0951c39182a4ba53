"""Where a model computes: on the CPU, on a GPU, or on torch's meta device, where nothing is.

Without what torch.export and its exporter write on stderr: notes, warnings, and whole graphs.

What goes wrong arrives as an exception, which becomes a sentence.

The state of every generator that a training may draw from, as tensors and plain values.
"""

from __future__ import annotations

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


@contextmanager
def quiet() -> Iterator[None]:
    """Until the block ends, nothing that this thread logs, warns of or prints on stderr shows."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's loggers have handlers and levels of their own
    try:
        with warnings.catch_warnings(), redirect_stderr(_Elsewhere()):
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logging.disable(before)


class _Elsewhere:
    """Stderr for all threads but the one that made this: progress is told by another."""

    def __init__(self) -> None:
        self._hushed, self._stream = threading.get_ident(), sys.stderr

    def write(self, text: str) -> int:
        """Nothing, or what stderr does."""
        return len(text) if threading.get_ident() == self._hushed else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        """All else of stderr."""
        return getattr(self._stream, name)


State = dict[str, Any]


def state() -> State:
    """Of torch on the CPU and on every GPU, of numpy and of Python."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (a user's own)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [
            str(name),
            torch.from_numpy(np.array(key, np.int64)),
            position,
            has_gauss,
            cached,
        ],
        "python": [version, torch.tensor(words), gauss],
    }


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Torch's generators begin at a seed until the block ends, and go on where they were."""
    cpu = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        for device, one in enumerate(gpus):
            torch.cuda.set_rng_state(one, device)


def restore(saved: State) -> None:
    """Go on from `state()`; GPUs that are not here are left out.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: it is none.
    """
    torch.set_rng_state(saved["torch"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, one in enumerate(saved["cuda"][:here]):
        torch.cuda.set_rng_state(one, device)
    name, key, position, has_gauss, cached = saved["numpy"]
    words = key.numpy().astype(np.uint32)
    np.random.set_state((name, words, position, has_gauss, cached))  # noqa: NPY002
    version, held, gauss = saved["python"]
    random.setstate((version, tuple(held.tolist()), gauss))
