"""Some samples from all over a feed, as a feed of their own: those that engines are judged by.

::

    feed    0 1 2 3 4 5 6 7 8 9 ...     each with a key
    part    0   2 3   5 6   8   ...     the same keys, whichever others turn out to be bad
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from deploy.feed.samples import Feed
from deploy.feed.source import Sample
from deploy.feed.stream import Stream
from deploy.feed.strewn import some
from deploy.tensors import Array


class Part:
    """At most so many images of a feed; of a model with a fixed batch the first batches of it."""

    labels: Sequence[int] | None = None

    def __init__(self, feed: Feed, most: int) -> None:
        """Args: feed: the whole; most: images."""
        self._feed = feed
        self._most = most
        self._given: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def labelled(self) -> bool:
        """Whether the whole feed has labels; the part has none, since it judges by FP32's word."""
        return self._feed.labels is not None

    @property
    def keys(self) -> tuple[int, ...]:
        """Of its samples in the feed, as far as it is known which are bad."""
        return self._feed.spread_keys(-(-self._most // self._feed.batch))

    @property
    def count(self) -> int:
        """How many images it holds; the feed's last batch may be filled up with others."""
        return min(len(self) * self._feed.batch, self._feed.count)

    @property
    def names(self) -> Sequence[str]:
        """One name per image."""
        whole = self._feed.names
        if self._feed.batch > 1:
            return whole[: self.count]
        place = {key: at for at, key in enumerate(self._feed.spread_keys(self._feed.count))}
        return tuple(whole[place[key]] for key in self._given or self.keys)

    @property
    def decodes(self) -> int:
        """How many images of the whole feed were read, so far."""
        return self._feed.decodes

    @property
    def one_size(self) -> bool:
        """As of the whole feed."""
        return self._feed.one_size

    def samples(self) -> Stream[Sample]:
        """A stream of them, in the feed's order."""
        return Stream(self._walk)

    def spread(self, most: int) -> Iterator[Sample]:
        """At most so many, from all over it."""
        return (sample for _, sample in self.spread_with_keys(most))

    def spread_with_keys(
        self, most: int, *, without: Collection[int] = ()
    ) -> Iterator[tuple[int, Sample]]:
        """(key, sample) of at most so many, from all over it; those without are not read."""
        chosen = some(self.keys, most)
        return self._feed.keyed([key for key in chosen if key not in without])

    def first(self, most: int) -> Sequence[Sample]:
        """The first of the whole feed."""
        return self._feed.first(most)

    def picture(self, sample: Mapping[str, Array]) -> Array | None:
        """What the model sees of one sample, uint8 [H, W, 3]; None where it is no picture."""
        return self._feed.picture(sample)

    def key(self, number: int) -> int:
        """Key of sample `number`, from 1, of the latest walk over `samples`."""
        return self._given[number - 1]

    def _walk(self) -> Iterator[Sample]:
        self._given = []
        for key, sample in self._feed.keyed(self.keys):
            self._given.append(key)
            yield sample
