"""A folder, a list or a single picture as the source of a feed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import FeedError
from deploy.feed import images
from deploy.feed.listing import Listing, Picture
from deploy.feed.manifest import Raw, bytes_digest
from deploy.feed.pixels import apply
from deploy.feed.preprocess import WHOLE, Preprocess, Size, describe, sized
from deploy.feed.shown import shown_size
from deploy.tensors import Array, TensorSpec


@dataclass(frozen=True)
class ImageSource:
    """Pictures of one input."""

    pictures: Listing
    spec: TensorSpec
    how: Preprocess

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One per picture, or None."""
        return self.pictures.labels

    def __len__(self) -> int:
        return len(self.pictures)

    def sample_name(self, index: int) -> str:
        """The file's name."""
        return self.pictures.name(index)

    def size(self, index: int) -> Size | None:
        """(height, width) of the picture as it is decoded; None of one that cannot be."""
        return shown_size(self.pictures[index])

    def told(self, index: int) -> str:
        """What the picture is called in a message."""
        return f"image {images.shown(self.pictures.name(index))}"

    def load(self, index: int) -> Raw:
        """The file's bytes, hashed, and what decodes, preprocesses and casts them.

        Raises:
            FeedError: the file cannot be read; (when decoding) it is no whole picture.
        """
        return self.raw(index, self.read(index))

    def read(self, index: int) -> bytes:
        """The file's bytes.

        Raises:
            FeedError: it cannot be read.
        """
        return images.read(self.pictures[index])

    def raw(self, index: int, data: bytes) -> Raw:
        """The same of bytes that were read before."""
        return Raw(
            bytes_digest(data),
            lambda: self._decoded(index, data),
            lambda: images.decode(data, self.pictures.name(index), grey=False),
        )

    def _decoded(self, index: int, data: bytes) -> dict[str, Array]:
        grey = self.how.color == "grey"
        pixels = images.decode(data, self.pictures.name(index), grey=grey)
        how = sized(self.how, (pixels.shape[0], pixels.shape[1]), self.told(index))
        return {self.spec.name: _cast(apply(pixels, how), self.spec.dtype)}


def check_present(pictures: Iterable[Picture], count: int, where: str) -> None:
    """Refuse a list of which files are missing.

    Raises:
        FeedError: some are; the first few are named.
    """
    missing = [one.name for one in pictures if not _exists(one.path)]
    if missing:
        raise FeedError(
            f"every image must exist, {len(missing)} of {count} in"
            f" {where} do not: {images.summary(missing)}; paths are relative to"
            " the list file; correct them, or skip bad ones (--skip-bad)"
        )


def check_dtype(spec: TensorSpec, how: Preprocess) -> None:
    """Refuse an input of numbers that pictures do not become.

    Raises:
        FeedError: it is neither float32 nor float16, nor of integers with pixels as they are.
    """
    whole = how.scale == 1 and set(how.mean) == {0.0} and set(how.std) == {1.0}
    pads_whole = all(0 <= p <= 255 and float(p).is_integer() for p in how.pad)
    if spec.dtype in ("float32", "float16") or (spec.dtype in WHOLE and whole and pads_whole):
        return
    remedy = (
        "use the preset 'raw' (scale 1, no mean, std 1)"
        if spec.dtype in WHOLE
        else "feed it arrays from an .npy file"
    )
    raise FeedError(f"images become float32 or float16, the input is {describe(spec)}; {remedy}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _cast(array: Array, dtype: str) -> Array:
    return array if dtype == "float32" else array.astype(dtype)
