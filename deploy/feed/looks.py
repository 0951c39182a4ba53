"""Pictures of the samples that somebody watches, kept as they go by and dropped with the interest.

What is worth a look is known when a pass is over, and its samples are gone by then. So whoever
counts tells after each sample which of them may still be asked for: a few, whatever the feed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from deploy.feed.denormalise import small
from deploy.metrics.rows import batch_length, split
from deploy.tensors import Array, Samples

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
