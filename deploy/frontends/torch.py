"""PyTorch models, given as `file.py:factory`. Torch is imported only when one is loaded."""

from __future__ import annotations

import re

from deploy.errors import ConfigError

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


def is_torch_spec(source: str) -> bool:
    """Whether `source` reads as `file.py:factory`."""
    path, _, name = source.rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def parse_shape(text: str) -> tuple[int, ...]:
    """`1x3x224x224` -> (1, 3, 224, 224).

    Raises:
        ConfigError: not positive integers joined by x.
    """
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f"an input shape is like 1x3x224x224, got {text!r}")
    return tuple(int(size) for size in text.split("x"))
