"""What samples are read from: pictures, arrays, a video's frames, or what another machine sent."""

from __future__ import annotations

from typing import Protocol

from deploy.feed.manifest import Raw
from deploy.tensors import Array

Sample = dict[str, Array]


class Source(Protocol):
    """Random access to samples of batch 1, and how they are called."""

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One class number per sample; None where none are given."""
        ...

    def __len__(self) -> int: ...

    def sample_name(self, index: int) -> str:
        """Its name."""
        ...

    def told(self, index: int) -> str:
        """What it is called in a message."""
        ...

    def load(self, index: int) -> Raw:
        """What was read."""
        ...
