"""Basic types: arrays, tensor specs, and the protocols of sessions and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of a graph input or output.

    A dimension is an int, a str (symbolic) or None (unknown).
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class HasOutputs(Protocol):
    """Anything with specs of its outputs."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the model's order."""
        ...


class Session(Protocol):
    """A loaded engine, ready to run."""

    @property
    def threads(self) -> int:
        """Host threads of one inference."""
        ...

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the engine's order."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the engine's order."""
        ...

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run one inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: the runtime refused the inputs.
        """
        ...


class Samples(Protocol):
    """Calibration data as targets see it; each sample is {input name: array}."""

    def __len__(self) -> int: ...

    @property
    def count(self) -> int:
        """Number of images or array rows; the last sample of a fixed batch may repeat some."""
        ...

    @property
    def labels(self) -> Sequence[int] | None:
        """One class number per image, without known bad ones; None without labels."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """One name per image or row, without known bad ones."""
        ...

    @property
    def decodes(self) -> int:
        """Number of images or rows read for a run so far."""
        ...

    @property
    def one_size(self) -> bool:
        """Whether all samples are known to have one shape before they are read."""
        ...

    def samples(self) -> Any:
        """Return an iterator over the samples; may be called any number of times."""
        ...

    def first(self, most: int) -> Sequence[Mapping[str, Array]]:
        """Return the first samples, at most `most`; they are cached."""
        ...

    def picture(self, sample: Mapping[str, Array]) -> Array | None:
        """Return the model's view of one sample, uint8 [H, W, 3]; None if it is no image."""
        ...

    def spread(self, most: int) -> Any:
        """Return an iterator over at most `most` samples, spread evenly."""
        ...
