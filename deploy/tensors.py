"""Basic types: arrays, tensor specs, and the protocol of sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Dimensions = Sequence[int | str | None]  # a str is symbolic, None unknown


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


def fits(sizes: Sequence[int], expected_shape: Dimensions) -> bool:
    """Return whether sizes are as many as those of a shape, and equal those that it fixes."""
    if len(sizes) != len(expected_shape):
        return False
    pairs = zip(sizes, expected_shape, strict=True)
    return all(size == expected for size, expected in pairs if isinstance(expected, int))


def describe_inputs(specs: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> str:
    """Return names and types of the inputs, in alphabetical order, to compare them as text.

    An input also has its shape if the other model's input of that name has another fixed dimension.
    """
    other_by_name = {other.name: other for other in others}
    texts = []
    for spec in specs:
        other = other_by_name.get(spec.name, spec)
        text = f"{spec.name} ({spec.dtype})"
        # ONNX Runtime gives an unknown shape as one without dimensions
        if spec.shape and other.shape and not _overlap(spec.shape, other.shape):
            text = f"{spec.name} ({spec.dtype} {list(spec.shape)})"
        texts.append(text)
    return ", ".join(sorted(texts))


def _overlap(shape: Dimensions, other: Dimensions) -> bool:
    """Return whether some array fits both shapes."""
    return len(shape) == len(other) and all(
        size == other_size or not (isinstance(size, int) and isinstance(other_size, int))
        for size, other_size in zip(shape, other, strict=True)
    )


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
