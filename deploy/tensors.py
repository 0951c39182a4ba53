"""The ground: an array, what an input looks like, a session that runs, samples to run on."""

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


class Speaking(Protocol):
    """What has outputs of known names."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the model's order."""
        ...


class Session(Protocol):
    """An engine that is loaded and ready to run."""

    @property
    def threads(self) -> int:
        """Host threads that an inference takes."""
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
        """One inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: the runtime refused the feed.
        """
        ...


class Samples(Protocol):
    """A feed as backends see it: iterate as often as needed, one sample {input: array} a time."""

    def __len__(self) -> int: ...

    @property
    def count(self) -> int:
        """Images, or rows of arrays; the last sample of a fixed batch may be filled with others."""
        ...

    @property
    def labels(self) -> Sequence[int] | None:
        """One class number per good image, as far as it is known which are bad; None without."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """One name per image or row, as far as it is known which are bad."""
        ...

    @property
    def decodes(self) -> int:
        """How many images or rows were read to be run, so far."""
        ...

    @property
    def one_size(self) -> bool:
        """Whether all samples have one shape, as is known before they are read."""
        ...

    def samples(self) -> Any:
        """An iterator over samples."""
        ...

    def first(self, most: int) -> Sequence[Mapping[str, Array]]:
        """The first few samples, at most so many; they are kept, so that asking costs nothing."""
        ...

    def picture(self, sample: Mapping[str, Array]) -> Array | None:
        """What the model sees of one sample, uint8 [H, W, 3]; None where it is no picture."""
        ...

    def spread(self, most: int) -> Any:
        """An iterator over samples from all over the feed, at most so many."""
        ...
