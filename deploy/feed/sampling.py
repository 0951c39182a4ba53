"""Which samples of a source are fed, in which order, and which of them turned out bad.

::

    source   0 1 2 3 4 5 6 7 8      indices
    chosen   0   2   4   6   8      every second of them; the order may be another one
    place    0   1   2   3   4      of each in the whole, of which a shard has some
    skipped          4              known once it was read
    good     0   2       6   8
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from deploy.feed.share import Share
from deploy.feed.strewn import strewn


class Chosen:
    """Indices of samples in their order.

    Attributes:
        indices: all of them, skipped ones too.
        skipped: index -> why it was left out; complete after a pass.
        share: what part of a whole they are; None for all of it.
    """

    def __init__(
        self, indices: Sequence[int], share: Share | None, skipped: Mapping[int, str]
    ) -> None:
        self.indices = self._given = _held(indices)  # in their order, and as a pass gave them
        self.skipped = dict(skipped)
        self.share = share

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def count(self) -> int:
        """How many are fed; known bad ones are not counted."""
        return len(self.indices) - len(self.skipped)

    def good(self) -> Iterator[int]:
        """Those that are not known to be bad, when it is their turn."""
        return (index for index in self.indices if index not in self.skipped)

    def placed(self) -> Iterator[tuple[int, int]]:
        """(place in the whole, index) of every one."""
        return zip(self._whole(), self.indices, strict=True)

    @property
    def places(self) -> Sequence[int]:
        """Places in the whole of the good ones."""
        if not self.skipped:
            return self._whole()
        return _held(place for place, index in self.placed() if index not in self.skipped)

    def _whole(self) -> range:
        return range(len(self.indices)) if self.share is None else self.share.places

    @property
    def skipped_places(self) -> dict[int, str]:
        """Place in the whole -> why the sample there was left out."""
        bad = ((place, index) for place, index in self.placed() if index in self.skipped)
        return {place: self.skipped[index] for place, index in bad}

    def skip_places(self, skipped: Mapping[int, str]) -> None:
        """Leave out what lies at some places of the whole."""
        at = dict(self.placed())
        self.skipped |= {at[place]: why for place, why in skipped.items()}

    def of(self, share: Share) -> Sequence[int]:
        """Indices of a share of them."""
        return self.indices[share.places.start : share.places.stop : share.places.step]

    def reached(self, number: int) -> int:
        """How many lie up to the good one of this number, from 1, skipped ones too."""
        numbered = enumerate(self.indices, 1)
        good = (place for place, index in numbered if index not in self.skipped)
        return next(islice(good, number - 1, None))

    def numbered(self, number: int) -> int:
        """Index of the good one of this number, from 1."""
        if not self.skipped:
            return self.indices[number - 1]
        return next(islice(self.good(), number - 1, None))

    def skipped_before(self, read: int) -> dict[int, str]:
        """`skipped_places` of the first so many alone."""
        placed = islice(self.placed(), read)
        return {p: why for p, index in placed if (why := self.skipped.get(index)) is not None}

    def as_given(self, first: int, stop: int) -> Iterator[int]:
        """Good ones from place `first` to `stop` of a pass, whatever `keep` left of them since."""
        good = (index for index in self._given if index not in self.skipped)
        return islice(good, first, stop)

    def scatter(self) -> None:
        """Be in an order in which the first so many are from all over."""
        self.indices = self._given = _held(strewn(self.indices))

    def keep(self, count: int) -> None:
        """Be the first so many alone, in the order of their source."""
        self.indices = _held(sorted(self.indices[:count]))
        left = set(self.indices)
        self.skipped = {index: why for index, why in self.skipped.items() if index in left}


def _held(indices: Iterable[int]) -> Sequence[int]:
    """Indices in as little memory as they take."""
    return indices if isinstance(indices, range) else array("q", indices)


__all__ = ["Chosen"]
