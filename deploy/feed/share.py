"""One shard's share of the samples: which ones of the whole, and what the whole is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from deploy.errors import FeedError


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
