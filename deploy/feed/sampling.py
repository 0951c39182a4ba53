"""Which samples of a source are fed: all, some spread evenly, every n-th, or some by lot.

Of those that are chosen a shard takes its own, so that several machines share the work::

    chosen    0 1 2 3 4 5 6      1/3: 0 3 6      2/3: 1 4      3/3: 2 5

One shard's share of the samples: which ones of the whole, and what the whole is.

Which samples are taken where not all are: from all over the feed, in step with nothing in it.

::

    feed     |----------|----------|----------|----------|
    2                 x                  x                   one a half, anywhere in it
    4                 x      x           x           x       one a quarter, the same two among them

Every second sample of a feed whose classes take turns, of left and right pictures, of pictures and
their mirror images, would be of one kind. So the place within each stretch is drawn, by a fixed
rule. The first n are spread over all of it for every n, and hold the first m of fewer: who stops
at 32 has seen what `--limit 32` takes.

Source: B. Burley, "Practical Hash-based Owen Scrambling", Journal of Computer Graphics Techniques
9-4 (2020), of van der Corput's sequence; its hash with N. Vegdahl's constants.

Which samples of a source are fed, in which order, and which of them turned out bad.

::

    source   0 1 2 3 4 5 6 7 8      indices
    chosen   0   2   4   6   8      every second of them; the order may be another one
    place    0   1   2   3   4      of each in the whole, of which a shard has some
    skipped          4              known once it was read
    good     0   2       6   8

When samples are looked at while they are observed: after 8, 16, 32 ... of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError, FeedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A shard of a feed.

    Attributes:
        number: of the shard, from 1.
        of: how many shards there are.
        count: samples of the whole feed.
        names: sha256 (hex) of the names of all of them in their order, without their folders: it
            tells that all shards look at one list, though each decodes its own part alone.
    """

    number: int
    of: int
    count: int
    names: str

    @property
    def places(self) -> range:
        """Places of its samples in the whole feed."""
        return range(self.number - 1, self.count, self.of)

    def __str__(self) -> str:
        """As the user gave it."""
        return f"{self.number}/{self.of}"


def share_of(shard: tuple[int, int], count: int, names: str) -> Share:
    """The share of a shard.

    Args:
        shard: its number from 1, of how many.
        count: samples of the whole.
        names: as `Share` has them.

    Raises:
        FeedError: there are more shards than samples.
    """
    number, of = shard
    if of > count:
        raise FeedError(
            f"every shard must have a sample, got {of} shards of {count}; use fewer of them"
        )
    return Share(number=number, of=of, count=count, names=names)


def names_digest(names: Iterable[str]) -> str:
    """Digest of the names of samples, as `Share` has it."""
    digest = hashlib.sha256()
    for number, name in enumerate(names):
        text = PurePath(name).name if not number else "\n" + PurePath(name).name
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()


_SEED = 0x9E3779B9
_BITS = 32


@lru_cache(maxsize=8)
def order(count: int) -> NDArray[np.int64]:
    """All places below `count`, in the order in which they are taken; not to be written to."""
    steps = np.arange(1 << (2 * count).bit_length(), dtype=np.uint64)  # every place is met
    places = (_reversed(_scrambled(steps)) * np.uint64(count)) >> np.uint64(_BITS)
    _, first = np.unique(places, return_index=True)
    return np.asarray(places[np.sort(first)][:count], np.int64)


def strewn(items: Sequence[int]) -> list[int]:
    """All items in that order."""
    return [items[place] for place in order(len(items))]


def some(items: Sequence[int], most: int) -> list[int]:
    """At most so many of them, from all over, in their own order."""
    return [items[place] for place in np.sort(order(len(items))[:most])]


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit turned or not by what is below it: 32 bits, so that two of one half stay in one."""
    x = _low(x ^ (x * np.uint64(0x3D20ADEA)))
    x = _low(x + np.uint64(_SEED))
    x = _low(x * np.uint64((_SEED >> 16) | 1))
    x = _low(x ^ (x * np.uint64(0x05526C56)))
    return _low(x ^ (x * np.uint64(0x53A22864)))


def _low(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return x & np.uint64((1 << _BITS) - 1)


def _reversed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first of 32 bits as the last."""
    out = np.zeros_like(x)
    for bit in range(_BITS):
        out |= ((x >> np.uint64(bit)) & np.uint64(1)) << np.uint64(_BITS - 1 - bit)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice among the samples of a source.

    Attributes:
        most: use at most so many, spread evenly over all.
        sample: use so many at most, drawn by lot.
        seed: of the lot; the same seed draws the same places.
        every: of all, look at every so-manieth only, from the first on; None for each, of a video
            for one a second.
        shard: (its number from 1, of how many): of what is chosen, use every so-manieth from there.

    Raises:
        ConfigError: a number below 1, both `most` and `sample`, or a shard that is none of them.
    """

    most: int | None = None
    sample: int | None = None
    seed: int = 0
    every: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("limit", self.most), ("sample", self.sample), ("every", self.every)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"{name} must be 1 or more, got {value}; leave it away to use all"
                )
        if self.most is not None and self.sample is not None:
            raise ConfigError(
                f"samples are spread evenly or drawn by lot, got limit {self.most} and sample"
                f" {self.sample}; leave one of them away"
            )
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ConfigError(
                "a shard is i/n with i from 1 to n, such as 2/3, got"
                f" {self.shard[0]}/{self.shard[1]}"
            )

    def of(self, count: int, *, usual: int = 1) -> tuple[Sequence[int], list[str]]:
        """Places among `count` samples, rising, of all shards; and what the user should know.

        Args:
            count: samples of the source.
            usual: `every` of this source, where the user says nothing.
        """
        every = self.every or usual
        left: Sequence[int] = range(0, count, every)
        notes = [f"every {_nth(every)} of {count} samples is looked at"] if every > 1 else []
        if self.most is not None and self.most < len(left):
            notes.append(f"{self.most} of {len(left)} samples are used, spread evenly over all")
            left = some(left, self.most)
        if self.sample is not None and self.sample < len(left):
            notes.append(
                f"{self.sample} of {len(left)} samples are used, drawn by lot (seed {self.seed})"
            )
            left = sorted(sorted(left, key=self._lot)[: self.sample])
        return left, notes

    def _lot(self, place: int) -> bytes:
        """By a digest, so that no library's generator ever changes what is drawn."""
        return hashlib.sha256(f"{self.seed}:{place}".encode()).digest()


Limit = int | Choice | None
"""What the functions that open a feed take: a number of samples, or a choice."""


def choice_of(limit: Limit) -> Choice:
    """A limit as a choice.

    Raises:
        ConfigError: as `Choice`.
    """
    return limit if isinstance(limit, Choice) else Choice(most=limit)


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


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


FIRST = 8  # samples of the first point


def following(drawn: int) -> int:
    """The point after so many samples: 8, and then twice as many each."""
    return 2 * drawn if drawn else FIRST
