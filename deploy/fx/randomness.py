"""The state of every generator that a training may draw from, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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
