"""Basic types: arrays, tensor specs, and the protocol of sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A graph input or output.

    Attributes:
        name: name of the tensor.
        dtype: numpy dtype name.
        shape: dimensions: an int, a str (symbolic) or None (unknown).
        has_batch: whether each row of an input, along its first dimension, is one sample; None if
            that is not decided (`deploy.feed.batch_axis`).
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    has_batch: bool | None = field(default=None, compare=False)

    def zeros(self) -> Array:
        """Return zeros of the tensor's dtype and shape; open dimensions get the size 1."""
        sizes = [size if isinstance(size, int) else 1 for size in self.shape]
        return np.zeros(sizes, self.dtype)


def fits(sizes: Sequence[int], expected_shape: Sequence[int | str | None]) -> bool:
    """Return whether sizes are as many as those of a shape, and equal those that it fixes."""
    if len(sizes) != len(expected_shape):
        return False
    pairs = zip(sizes, expected_shape, strict=True)
    return all(size == expected for size, expected in pairs if isinstance(expected, int))


class Session(Protocol):
    """A loaded engine, ready to run."""

    @property
    def threads(self) -> int:
        """Host threads of one inference."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the engine's order."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the engine's order."""

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run one inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: the runtime refused the inputs.
        """
