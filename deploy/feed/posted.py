"""Samples on their way to another machine: pictures as their files' bytes, others as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from deploy.errors import FeedError
from deploy.feed.listing import Listing
from deploy.feed.manifest import UNREADABLE, Raw
from deploy.feed.pictures import ImageSource
from deploy.feed.preprocess import Preprocess
from deploy.feed.source import Source
from deploy.tensors import Array, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One sample.

    Attributes:
        name: of it.
        told: what it is called in a message.
        digest: as it was read; 32 bytes.
        held: bytes of a picture's file; or arrays by input; or why there are none.
    """

    name: str
    told: str
    digest: bytes
    held: bytes | dict[str, Array] | str

    @property
    def weight(self) -> int:
        """Bytes that are sent, about."""
        if isinstance(self.held, dict):
            return sum(array.nbytes for array in self.held.values())
        return len(self.held)


def posted(source: Source, indices: Iterable[int]) -> list[Posted]:
    """Samples of a source, read now; a bad one is sent as what is wrong with it."""
    return [_posted(source, index) for index in indices]


def _posted(source: Source, index: int) -> Posted:
    digest: bytes = UNREADABLE
    held: bytes | dict[str, Array] | str
    try:
        if isinstance(source, ImageSource):
            held = source.read(index)
        else:
            raw = source.load(index)
            digest, held = raw.digest, raw.decode()
    except FeedError as error:
        held = str(error)
    return Posted(name=source.sample_name(index), told=source.told(index), digest=digest, held=held)


class PostedSource:
    """The samples that came, as the source of a feed.

    Attributes:
        labels: none.
    """

    labels: tuple[int, ...] | None = None

    def __init__(
        self, samples: Sequence[Posted], specs: Sequence[TensorSpec], how: Preprocess | None
    ) -> None:
        """Take them.

        Args:
            samples: in the feed's order.
            specs: the model's inputs.
            how: the complete preprocessing; None where none are pictures.
        """
        self._samples = samples
        named = Listing("", (one.name for one in samples))
        self._pictures = None if how is None else ImageSource(named, specs[0], how)

    def __len__(self) -> int:
        return len(self._samples)

    def sample_name(self, index: int) -> str:
        """As where it came from."""
        return self._samples[index].name

    def told(self, index: int) -> str:
        """As where it came from."""
        return self._samples[index].told

    def load(self, index: int) -> Raw:
        """What was sent.

        Raises:
            FeedError: it could not be read there; (when decoding) it is no whole sample.
        """
        one = self._samples[index]
        held = one.held
        if isinstance(held, bytes):
            assert self._pictures is not None
            return self._pictures.raw(index, held)
        if isinstance(held, dict):
            return Raw(one.digest, lambda: dict(held))
        if one.digest == UNREADABLE:
            _refuse(held)
        return Raw(one.digest, lambda: _refuse(held))


def _refuse(why: str) -> NoReturn:
    raise FeedError(why)
