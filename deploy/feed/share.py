"""One shard's share of the samples: which ones of the whole, and what the whole is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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


def share_of(shard: tuple[int, int], names: Sequence[str]) -> Share:
    """The share of a shard in the samples of these names.

    Raises:
        FeedError: there are more shards than samples.
    """
    number, of = shard
    if of > len(names):
        raise FeedError(
            f"every shard must have a sample, got {of} shards of {len(names)}; use fewer of them"
        )
    listed = "\n".join(PurePath(name).name for name in names)
    digest = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
    return Share(number=number, of=of, count=len(names), names=digest)
