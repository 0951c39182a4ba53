"""Basic types: arrays, tensor specs, and the protocol of sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A graph input or output.

    Attributes:
        name: name of the tensor.
        dtype: numpy dtype name.
        shape: dimensions: an int, a str (symbolic) or None (unknown).
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class HasOutputs(Protocol):
    """Anything with specs of its outputs."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the model's order."""


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
