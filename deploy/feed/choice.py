"""Which samples of a source are fed: all, some spread evenly, every n-th, or some by lot.

Of those that are chosen a shard takes its own, so that several machines share the work::

    chosen    0 1 2 3 4 5 6      1/3: 0 3 6      2/3: 1 4      3/3: 2 5
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.errors import ConfigError
from deploy.feed.strewn import some


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
