"""Choose samples of a source: all, spread evenly, or every N-th; with shards.

::

    source   0 1 2 3 4 5 6 7 8      indices
    chosen   0   2   4   6   8      every second sample; the order may differ
    position 0   1   2   3   4      in the complete list, of which a shard has some
    skipped          4              known once the sample was read
    good     0   2       6   8

A shard takes every n-th of the chosen samples, so that several machines share the work::

    chosen    0 1 2 3 4 5 6      1/3: 0 3 6      2/3: 1 4      3/3: 2 5

"Spread evenly" is a low-discrepancy order (`sampling_order`), which does not fall in step with a
pattern of the data::

    feed     |----------|----------|----------|----------|
    2                 x                  x                   one per half, anywhere in it
    4                 x      x           x           x       one per quarter, with the same two

Every second sample of a dataset that alternates between classes, left and right images, or images
and their mirror images, would be of one kind. So the position within each stretch is
pseudo-random, by a fixed rule. The first n are spread over the whole dataset for every n, and
contain the first m for m < n: a run that stops after 32 samples has read what `--limit 32` chooses.

Source: B. Burley, "Practical Hash-based Owen Scrambling", Journal of Computer Graphics Techniques
9-4 (2020), for van der Corput's sequence; its hash with N. Vegdahl's constants.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from numbers import Integral
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError, FeedError, check_whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A shard of a feed.

    Attributes:
        number: of the shard, from 1.
        of: number of shards.
        count: samples of all shards together.
        names: sha256 (hex) of all sample names in order, without their folders. It shows that all
            shards use the same list, although each decodes only its own samples.
    """

    number: int
    of: int
    count: int
    names: str

    @property
    def positions(self) -> range:
        """Positions of this shard's samples in the complete list."""
        return range(self.number - 1, self.count, self.of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def create_share(shard: tuple[int, int], count: int, names_digest: str) -> Share:
    """Return one of several equal parts of a feed, the shards, for one of several machines.

    Args:
        shard: (its number from 1, number of shards).
        count: samples of all shards together.
        names_digest: of the names of all samples, by which shards of different feeds are noticed.

    Raises:
        FeedError: there are more shards than samples.
    """
    number, shard_count = shard
    if shard_count > count:
        raise FeedError(
            f"every shard must have a sample, got {shard_count} shards of {count}; use fewer of"
            " them"
        )
    return Share(number=number, of=shard_count, count=count, names=names_digest)


def digest_names(names: Iterable[str]) -> str:
    """Return the digest of the samples' names, see `Share`."""
    digest = hashlib.sha256()
    separator = ""
    for name in names:  # not joined: their text takes more memory than the digests of all samples
        digest.update(f"{separator}{PurePath(name).name}".encode(errors="surrogateescape"))
        separator = "\n"
    return digest.hexdigest()


_SEED = 0x9E3779B9
_BITS = 32


@lru_cache(maxsize=8)
def sampling_order(count: int) -> NDArray[np.int64]:
    """Return all positions below `count` in low-discrepancy order; read-only, since cached."""
    steps = np.arange(1 << (2 * count).bit_length(), dtype=np.uint32)  # enough for all positions
    # the scrambled sequence of van der Corput, as fractions of 2**32
    fractions = _reverse_bits(_scramble(steps)).astype(np.uint64)
    positions = (fractions * count) >> _BITS
    # each position where it comes first
    _, first_steps = np.unique(positions, return_index=True)
    return np.asarray(positions[np.sort(first_steps)][:count], np.int64)


def spread_evenly(items: Sequence[int], max_items: int) -> list[int]:
    """Return at most `max_items` items, spread evenly, in their own order."""
    positions = np.sort(sampling_order(len(items))[:max_items])
    return [items[position] for position in positions]


def _scramble(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Flip each of 32 bits depending on the bits below it, so that halves stay together.

    Sums and products keep their lower 32 bits, as in C.
    """
    x = x ^ (x * 0x3D20ADEA)
    x = (x + _SEED) * ((_SEED >> 16) | 1)
    x = x ^ (x * 0x05526C56)
    return x ^ (x * 0x53A22864)


def _reverse_bits(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Reverse the order of 32 bits."""
    lowest_bit_first = np.unpackbits(x.astype("<u4").view(np.uint8), bitorder="little")
    return np.packbits(lowest_bit_first).view(">u4").astype(np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice among the samples of a source.

    Attributes:
        limit: maximum number of samples, spread evenly over the source; the first ones of a source
            without a length, such as a generator. None for no maximum.
        every: use every N-th sample only, from the first on; None for the default of the source:
            each, or one frame per second of a video.
        shard: (its number i from 1, number of shards n): use every n-th chosen sample, from the
            i-th on; None for all.

    Raises:
        ConfigError: a number below 1, or an invalid shard.
    """

    limit: int | None = None
    every: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "every"):
            value = getattr(self, name)
            if value is not None:
                check_whole_number(name, value, 1, "; leave it out to use all")
        shard: Any = self.shard  # of any type, if the user makes the choice in Python
        match shard:
            case None:
                return
            case [Integral(), Integral()]:
                is_shard = 1 <= shard[0] <= shard[1]
                shown_shard = f"{shard[0]}/{shard[1]}"
            case _:
                is_shard = False
                shown_shard = repr(shard)
        if not is_shard:
            raise ConfigError(f"a shard is i/n with i from 1 to n, such as 2/3, got {shown_shard}")

    @property
    def required_samples(self) -> int | None:
        """Number of first samples that suffice for a source of unknown length; None for all."""
        if self.limit is None:
            return None
        return (self.limit - 1) * (self.every or 1) + 1

    def choose(self, count: int, *, default_every: int = 1) -> tuple[Sequence[int], list[str]]:
        """Return (indices of the chosen samples among `count`, ascending; notes for the user).

        They are those of all shards together.

        Args:
            count: samples of the source.
            default_every: the source's default for `every`.
        """
        every = self.every or default_every
        indices: Sequence[int] = range(0, count, every)
        notes = []
        if every > 1:
            notes.append(f"one of every {every} of {count} samples is used")
        if self.limit is not None and self.limit < len(indices):
            notes.append(f"{self.limit} of {len(indices)} samples are used, spread evenly over all")
            indices = spread_evenly(indices, self.limit)
        return indices, notes


Limit = int | Choice | None
"""What the functions that open a feed accept: a maximum number of samples, or a choice."""


def to_choice(limit: Limit) -> Choice:
    """Return a limit as a `Choice`.

    Raises:
        ConfigError: see `Choice`.
    """
    if isinstance(limit, Choice):
        return limit
    return Choice(limit=limit)


class ChosenSamples:
    """Indices of the chosen samples in their order.

    Attributes:
        indices: of all chosen samples, skipped ones included.
        skip_reasons: index -> why the sample was skipped; complete after a pass.
        share: the shard that they are; None if there are no shards.
    """

    def __init__(
        self, indices: Sequence[int], share: Share | None, skipped: Mapping[int, str]
    ) -> None:
        self.indices = _compact(indices)
        self._last_pass = self.indices  # stays when `keep_first` drops samples
        self.skip_reasons = dict(skipped)
        self.share = share
        self._counts_so_far = 0, 0  # of good samples and of entries, where `count_entries` left off

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def count(self) -> int:
        """Number of samples that are fed; known bad ones do not count."""
        return len(self.indices) - len(self.skip_reasons)

    def refuse_all_bad(self) -> None:
        """Raise `FeedError` if all samples were skipped."""
        if not self.count:
            raise FeedError(
                f"at least one sample must be good, all {len(self)} were skipped:"
                f" {next(iter(self.skip_reasons.values()))}"
            )

    def good_indices(self) -> Iterator[int]:
        """Yield the indices of samples that are not known to be bad by then."""
        return self._good(self.indices)

    def _good(self, indices: Iterable[int]) -> Iterator[int]:
        return (index for index in indices if index not in self.skip_reasons)

    def iterate_positions(self) -> Iterator[tuple[int, int]]:
        """Yield (position in the complete list, index) of every sample."""
        return zip(self._all_positions(), self.indices, strict=True)

    def _all_positions(self) -> range:
        if self.share is None:
            return range(len(self.indices))
        return self.share.positions

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the good samples in the complete list."""
        if not self.skip_reasons:
            return self._all_positions()
        return _compact(
            position
            for position, index in self.iterate_positions()
            if index not in self.skip_reasons
        )

    def skipped_by_position(self, count: int | None = None) -> dict[int, str]:
        """Return position in the complete list -> why the sample there was skipped.

        `count`: consider only so many first samples; None for all.
        """
        pairs = islice(self.iterate_positions(), count)
        return {pos: self.skip_reasons[index] for pos, index in pairs if index in self.skip_reasons}

    def skip_positions(self, skipped: Mapping[int, str]) -> None:
        """Skip the samples at these positions of the complete list."""
        positions = self._all_positions()
        self.skip_entries({positions.index(position): skipped[position] for position in skipped})

    def skip_entries(self, skipped: Mapping[int, str]) -> None:
        """Skip the samples with these numbers, from 0, among the chosen ones."""
        for entry, reason in skipped.items():
            self.skip(self.indices[entry], reason)

    def skip(self, index: int, reason: str) -> None:
        """Skip the sample with this index in the source."""
        self.skip_reasons[index] = reason
        self._counts_so_far = 0, 0

    def indices_of(self, share: Share) -> Sequence[int]:
        """Return the indices of a share of the samples."""
        return self.indices[share.number - 1 : share.count : share.of]

    def count_entries(self, number: int) -> int:
        """Return the number of chosen samples, good and bad, up to and including a good one.

        A pass asks for one good sample after another, so a count goes on where the last one ended;
        for an earlier sample it starts again.

        `number`: of the good sample among the good ones, from 1.
        """
        if not self.skip_reasons:
            return number
        good_count, entry_count = self._counts_so_far
        if good_count >= number:
            good_count = 0
            entry_count = 0
        while good_count < number:
            if self.indices[entry_count] not in self.skip_reasons:
                good_count += 1
            entry_count += 1
        self._counts_so_far = good_count, entry_count
        return entry_count

    def last_pass_indices(self, start: int, stop: int) -> Iterator[int]:
        """Yield good samples start..stop of the last pass, also those dropped since."""
        return islice(self._good(self._last_pass), start, stop)

    def use_sampling_order(self) -> None:
        """Change to low-discrepancy order: the first n samples are spread over the source."""
        order = sampling_order(len(self.indices))
        self.indices = self._last_pass = _compact(self.indices[position] for position in order)
        self._counts_so_far = 0, 0

    def keep_first(self, count: int) -> None:
        """Drop all but the first `count` samples, and restore the order of the source."""
        self.indices = _compact(sorted(self.indices[:count]))
        for index in self.skip_reasons.keys() - self.indices:
            del self.skip_reasons[index]
        self._counts_so_far = 0, 0


def _compact(indices: Iterable[int]) -> Sequence[int]:
    """Store indices in 8 bytes each."""
    if isinstance(indices, range):
        return indices
    return array("q", indices)


FIRST_CHECK = 8  # samples before the first check


def next_check(drawn: int) -> int:
    """Return the number of samples at the next check: 8, 16, 32 and so on."""
    if not drawn:
        return FIRST_CHECK
    return 2 * drawn
