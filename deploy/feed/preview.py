"""Previews: small images of samples, made during a pass so that nothing is decoded twice.

`Previews` keeps two small images, before and after preprocessing, of samples chosen in advance.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deploy.errors import FeedError
from deploy.feed.file_list import RawSample
from deploy.feed.pixels import find_image, shrink_image
from deploy.feed.preprocess import Preprocess
from deploy.tensors import Array

PREVIEW_COUNT = 4  # samples of a feed that a report shows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """Preview of one sample.

    Attributes:
        name: of the file or sample.
        input_image: the model's input, uint8 [h, w, 3] RGB, no side longer than `PREVIEW_SIDE`.
        source_image: the image before preprocessing, likewise; None without one.
        input_size: (height, width) of `input_image` in pixels before it was shrunk.
        source_size: of `source_image`.
    """

    name: str
    input_image: Array
    source_image: Array | None
    input_size: tuple[int, int]
    source_size: tuple[int, int] | None = None


class Previews:
    """Previews of chosen samples."""

    def __init__(self, preprocess: Preprocess | None, indices: Collection[int] = ()) -> None:
        """Args: preprocess: the feed's; indices: of the samples to show."""
        self.indices = frozenset(indices)
        self._preprocess = preprocess
        self._stored: dict[int, Preview | None] = {}

    @property
    def missing(self) -> frozenset[int]:
        """Chosen samples that were not added yet."""
        return self.indices - self._stored.keys()

    def add(self, index: int, name: str, raw: RawSample, sample: Mapping[str, Array]) -> None:
        """Store a preview of the sample if it was chosen."""
        if index not in self.indices or index in self._stored:
            return
        self._stored[index] = None
        input_image = find_image(sample, self._preprocess)
        if input_image is None:
            return
        source_size = None
        source_image = _decode_source_image(raw)
        if source_image is not None:
            source_size = source_image.shape[0], source_image.shape[1]
            source_image = shrink_image(source_image)
        self._stored[index] = Preview(
            name=name,
            input_image=shrink_image(input_image),
            source_image=source_image,
            input_size=(input_image.shape[0], input_image.shape[1]),
            source_size=source_size,
        )

    def in_order(self) -> list[Preview]:
        """Return the previews of samples that are images, in feed order."""
        return [preview for _, preview in sorted(self._stored.items()) if preview is not None]


def _decode_source_image(raw: RawSample) -> Array | None:
    """Return the image before preprocessing as RGB; None without one."""
    if raw.decode_source is None:
        return None
    try:
        return raw.decode_source()[:, :, ::-1]
    except FeedError:
        return None
