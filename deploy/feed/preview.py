"""A few samples of a feed as pictures: what was given, and what the model is fed of it.

They are made as the samples go by, so that nothing is decoded for them again; two small pictures a
sample are kept, and no more.

Pictures of the samples that somebody watches, kept as they go by and dropped with the interest.

What is worth a look is known when a pass is over, and its samples are gone by then. So whoever
counts tells after each sample which of them may still be asked for: a few, whatever the feed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deploy.errors import FeedError
from deploy.feed.listing import Raw
from deploy.feed.pixels import picture_in, small
from deploy.feed.preprocess import Preprocess
from deploy.metrics.rows import batch_length, split
from deploy.tensors import Array, Samples

SHOWN = 4  # samples of a feed that a report shows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """One sample.

    Attributes:
        name: of the file, or of the sample.
        fed: what the model is fed, uint8 [h, w, 3], red, green, blue, no side over `SIDE`.
        given: the picture before it was preprocessed, likewise; None where there was none.
        size: (height, width) in pixels of `fed` before it was made smaller.
        given_size: of `given`.
    """

    name: str
    fed: Array
    given: Array | None
    size: tuple[int, int]
    given_size: tuple[int, int] | None = None


class Views:
    """The pictures of samples that are asked for."""

    def __init__(self, how: Preprocess | None, wanted: Collection[int] = ()) -> None:
        """Args: how: the feed's preprocessing; wanted: indices of the samples."""
        self.wanted = frozenset(wanted)
        self._how = how
        self._found: dict[int, View | None] = {}

    @property
    def missing(self) -> frozenset[int]:
        """Samples that have not gone by."""
        return self.wanted - self._found.keys()

    def add(self, index: int, name: str, raw: Raw, sample: Mapping[str, Array]) -> None:
        """A sample that goes by."""
        if index not in self.wanted or index in self._found:
            return
        self._found[index] = None
        fed = picture_in(sample, self._how)
        if fed is not None:
            given = _given(raw)
            self._found[index] = View(
                name=name,
                fed=small(fed),
                given=None if given is None else small(given),
                size=(fed.shape[0], fed.shape[1]),
                given_size=None if given is None else (given.shape[0], given.shape[1]),
            )

    def found(self) -> list[View]:
        """Those that are pictures, in the feed's order."""
        return [view for _, view in sorted(self._found.items()) if view is not None]


def _given(raw: Raw) -> Array | None:
    """The picture itself, red, green, blue; what can be fed but not be shown has none."""
    try:
        pixels = None if raw.picture is None else raw.picture()
    except FeedError:
        return None
    return None if pixels is None else pixels[:, :, ::-1]


_SIDE = 256  # pixels of the longer side: boxes are drawn over it


class Looks:
    """The pictures that are watched."""

    def __init__(self, feed: Samples) -> None:
        """Args: feed: where the samples come from."""
        self._feed = feed
        self._seen = 0
        self._found: dict[int, Array] = {}

    def __len__(self) -> int:
        """How many pictures are kept."""
        return len(self._found)

    def add(self, sample: Mapping[str, Array], watched: Collection[int]) -> None:
        """The next sample of the pass, and the numbers that are watched now."""
        batch = batch_length(sample)
        start, self._seen = self._seen, self._seen + batch
        self._found = {n: picture for n, picture in self._found.items() if n in watched}
        wanted = [number for number in range(start, start + batch) if number in watched]
        rows = split(sample, batch) if wanted else []
        for number in wanted:
            picture = self._feed.picture(rows[number - start])
            if picture is not None:
                self._found[number] = small(picture, _SIDE)

    def of(self, numbers: Iterable[int]) -> dict[int, tuple[str, Array]]:
        """Number -> name of the sample and its picture, uint8 [h, w, 3], red, green, blue."""
        names = self._feed.names
        wanted = sorted(set(numbers) & self._found.keys())
        return {number: (names[number], self._found[number]) for number in wanted}
