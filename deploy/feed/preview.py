"""Previews: small images of samples, made during a pass so that nothing is decoded twice.

`Previews` keeps two small images, before and after preprocessing, of samples chosen in advance.

`CandidateImages` keeps an image of each sample that is a candidate for a report. Which samples are
worth showing is known only after the pass, when they are gone; so after each sample the caller
passes the current candidates, and images of all others are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deploy.errors import FeedError
from deploy.feed.file_list import RawSample
from deploy.feed.pixels import find_image, shrink_image
from deploy.feed.preprocess import Preprocess
from deploy.metrics.rows import batch_length, split_batch
from deploy.tensors import Array, Samples

PREVIEW_COUNT = 4  # samples of a feed that a report shows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """Preview of one sample.

    Attributes:
        name: of the file or sample.
        fed: the model's input, uint8 [h, w, 3] RGB, no side longer than `SIDE`.
        given: the image before preprocessing, likewise; None without one.
        size: (height, width) of `fed` in pixels before it was shrunk.
        given_size: of `given`.
    """

    name: str
    fed: Array
    given: Array | None
    size: tuple[int, int]
    given_size: tuple[int, int] | None = None


class Previews:
    """Previews of chosen samples."""

    def __init__(self, how: Preprocess | None, wanted: Collection[int] = ()) -> None:
        """Args: how: the feed's preprocessing; wanted: indices of the samples."""
        self.wanted = frozenset(wanted)
        self._how = how
        self._stored: dict[int, Preview | None] = {}

    @property
    def missing(self) -> frozenset[int]:
        """Chosen samples that were not added yet."""
        return self.wanted - self._stored.keys()

    def add(self, index: int, name: str, raw: RawSample, sample: Mapping[str, Array]) -> None:
        """Store a preview of the sample if it was chosen."""
        if index not in self.wanted or index in self._stored:
            return
        self._stored[index] = None
        fed = find_image(sample, self._how)
        if fed is not None:
            given = _image_before(raw)
            self._stored[index] = Preview(
                name=name,
                fed=shrink_image(fed),
                given=None if given is None else shrink_image(given),
                size=(fed.shape[0], fed.shape[1]),
                given_size=None if given is None else (given.shape[0], given.shape[1]),
            )

    def found(self) -> list[Preview]:
        """Return the previews of samples that are images, in feed order."""
        return [view for _, view in sorted(self._stored.items()) if view is not None]


def _image_before(raw: RawSample) -> Array | None:
    """Return the image before preprocessing as RGB; None without one."""
    try:
        pixels = None if raw.picture is None else raw.picture()
    except FeedError:
        return None
    return None if pixels is None else pixels[:, :, ::-1]


_SIDE = 256  # pixels of the longer side; boxes are drawn on the image


class CandidateImages:
    """Images of the current candidate samples."""

    def __init__(self, feed: Samples) -> None:
        self._feed = feed
        self._sample_count = 0
        self._stored: dict[int, Array] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, sample: Mapping[str, Array], watched: Collection[int]) -> None:
        """Add the pass's next sample; drop images of samples that `watched` no longer has."""
        batch = batch_length(sample)
        start, self._sample_count = self._sample_count, self._sample_count + batch
        self._stored = {n: picture for n, picture in self._stored.items() if n in watched}
        wanted = [number for number in range(start, start + batch) if number in watched]
        rows = split_batch(sample, batch) if wanted else []
        for number in wanted:
            picture = self._feed.picture(rows[number - start])
            if picture is not None:
                self._stored[number] = shrink_image(picture, _SIDE)

    def of(self, numbers: Iterable[int]) -> dict[int, tuple[str, Array]]:
        """Return sample number -> (name, image uint8 [h, w, 3] RGB)."""
        names = self._feed.names
        wanted = sorted(set(numbers) & self._stored.keys())
        return {number: (names[number], self._stored[number]) for number in wanted}
