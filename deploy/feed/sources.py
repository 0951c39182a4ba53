"""What samples are read from: pictures, arrays, a video's frames, or what another machine sent.

A video as the source of a feed: frames in their order, decoded when asked for.

Frames are read one after the other; one that lies before the last begins from the start. So a pass
decodes the file once, and no more than one frame is in memory.

How large a picture is as it is shown, mostly by its first bytes alone.

A header's sides are those of the pixels; a camera that was held upright says in the EXIF that they
are to be turned, and decoding does so. Where the first bytes do not tell for sure it is decoded.

A folder, a list or a single picture as the source of a feed.

Samples on their way to another machine: pictures as their files' bytes, others as arrays.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from deploy.errors import FeedError
from deploy.feed import images
from deploy.feed.headers import segments, sides
from deploy.feed.images import overheard
from deploy.feed.listing import UNREADABLE, Listing, Picture, Raw, bytes_digest, sample_digest
from deploy.feed.pixels import apply
from deploy.feed.preprocess import WHOLE, Preprocess, Size, describe, sized
from deploy.files.reading import refuse_irregular
from deploy.tensors import Array, TensorSpec

Sample = dict[str, Array]


class Source(Protocol):
    """Random access to samples of batch 1, and how they are called."""

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One class number per sample; None where none are given."""
        ...

    def __len__(self) -> int: ...

    def sample_name(self, index: int) -> str:
        """Its name."""
        ...

    def told(self, index: int) -> str:
        """What it is called in a message."""
        ...

    def load(self, index: int) -> Raw:
        """What was read."""
        ...


SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_video(path: Path | str) -> bool:
    """Whether the suffix, in any case, is one that is read as a video."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


class VideoSource:
    """The frames of a video for one input.

    Attributes:
        labels: none.
        a_second: frames in one second; 1 where the file does not say.

    Raises:
        FeedError: OpenCV cannot read the file, or it has no frame.
    """

    labels: tuple[int, ...] | None = None

    def __init__(self, path: Path, spec: TensorSpec, how: Preprocess) -> None:
        refuse_irregular(path, what="a video", error=FeedError)
        self._path, self._spec, self._how = path, spec, how
        self._lock = threading.Lock()
        self._capture = _opened(path)
        self._next = 0
        cv2 = images.opencv()
        self._count = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.a_second = max(round(self._capture.get(cv2.CAP_PROP_FPS) or 1), 1)
        if self._count < 1:
            raise FeedError(
                f"video {images.shown(str(path))} must say how many frames it has, got none;"
                " write it anew, or give its frames as images"
            )

    def __len__(self) -> int:
        return self._count

    def sample_name(self, index: int) -> str:
        """The file's name and the frame's number, from 0."""
        return f"{self._path.name}#{index}"

    def told(self, index: int) -> str:
        """What the frame is called in a message."""
        return f"frame {index} of video {images.shown(self._path.name)}"

    def load(self, index: int) -> Raw:
        """A frame's pixels, hashed, and what preprocesses them.

        Raises:
            FeedError: the frame cannot be decoded.
        """
        pixels = self._frame(index)
        digest = sample_digest({"": pixels})
        return Raw(digest, lambda: {self._spec.name: self._made(pixels)}, lambda: pixels)

    def _made(self, pixels: Array) -> Array:
        cv2 = images.opencv()
        grey = self._how.color == "grey"
        shown = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)[:, :, None] if grey else pixels
        return apply(shown, self._how).astype(self._spec.dtype, copy=False)

    def _frame(self, index: int) -> Array:
        with self._lock, overheard() as said:
            if index < self._next:
                self._capture = _opened(self._path)
                self._next = 0
            while self._next < index and self._capture.grab():
                self._next += 1
            there, pixels = self._capture.read() if self._next == index else (False, None)
            self._next += 1 if there else 0
        if not there or pixels is None or pixels.dtype != np.uint8:
            why = f", its decoder says: {said[-1]}" if said else ""
            raise FeedError(
                f"{self.told(index)} cannot be decoded, though the file tells of {self._count}"
                f" frames{why}"
            )
        found: Array = pixels
        return found


def _opened(path: Path) -> Any:
    cv2 = images.opencv()
    with overheard():
        capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        raise FeedError(
            f"video {images.shown(str(path))} cannot be read by this OpenCV; write it anew, or"
            " give its frames as images"
        )
    return capture


_FIRST = 1 << 18  # bytes: of an EXIF with a thumbnail, and what stands behind it
_APP1, _ORIENTATION, _UPRIGHT = 0xE1, 274, 4  # up to 4: mirrored or upside down at most
_MOST_TAGS = 4096


def shown_size(picture: Picture) -> Size | None:
    """(height, width) of a picture on disk, as it is decoded; None of one that cannot be."""
    try:
        with picture.path.open("rb") as file:
            first = file.read(_FIRST)
        found, turned = sides(first), _turned(first)
        if found is None or turned is None:
            pixels = images.decode(images.read(picture), picture.name, grey=True)
            return pixels.shape[0], pixels.shape[1]
    except (OSError, ValueError, FeedError):
        return None  # whoever feeds it tells why
    return found if turned else (found[1], found[0])


def _turned(first: bytes) -> bool | None:
    """Whether a picture is turned on its side; None where its first bytes do not tell."""
    if not first.startswith(b"\xff\xd8"):
        tiff = first.startswith((b"II", b"MM"))
        return None if tiff or b"Exif" in first or b"eXIf" in first or b"EXIF" in first else False
    exif = (body for marker, _, body in segments(first) if marker == _APP1)
    found = next((body[6:] for body in exif if body.startswith(b"Exif\0\0")), b"")
    try:
        return bool(found) and _orientation(found) > _UPRIGHT
    except struct.error:
        return None


def _orientation(tiff: bytes) -> int:
    """Tag 274 of the first directory; 1, upright, where it is not there."""
    order = "<" if tiff.startswith(b"II") else ">"
    (at,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, at)
    for place in range(min(count, _MOST_TAGS)):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, at + 2 + 12 * place)
        if tag == _ORIENTATION:
            return int(value)
    return 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One sample.

    Attributes:
        name: of it.
        told: what it is called in a message.
        digest: as it was read; 32 bytes.
        held: bytes of a picture's file; or arrays by input; or why there are none.
    """

    name: str
    told: str
    digest: bytes
    held: bytes | dict[str, Array] | str

    @property
    def weight(self) -> int:
        """Bytes that are sent, about."""
        if isinstance(self.held, dict):
            return sum(array.nbytes for array in self.held.values())
        return len(self.held)


def posted(source: Source, indices: Iterable[int]) -> list[Posted]:
    """Samples of a source, read now; a bad one is sent as what is wrong with it."""
    return [_posted(source, index) for index in indices]


def _posted(source: Source, index: int) -> Posted:
    digest: bytes = UNREADABLE
    held: bytes | dict[str, Array] | str
    try:
        if isinstance(source, ImageSource):
            held = source.read(index)
        else:
            raw = source.load(index)
            digest, held = raw.digest, raw.decode()
    except FeedError as error:
        held = str(error)
    return Posted(name=source.sample_name(index), told=source.told(index), digest=digest, held=held)


class PostedSource:
    """The samples that came, as the source of a feed.

    Attributes:
        labels: none.
    """

    labels: tuple[int, ...] | None = None

    def __init__(
        self, samples: Sequence[Posted], specs: Sequence[TensorSpec], how: Preprocess | None
    ) -> None:
        """Take them.

        Args:
            samples: in the feed's order.
            specs: the model's inputs.
            how: the complete preprocessing; None where none are pictures.
        """
        self._samples = samples
        named = Listing("", (one.name for one in samples))
        self._pictures = None if how is None else ImageSource(named, specs[0], how)

    def __len__(self) -> int:
        return len(self._samples)

    def sample_name(self, index: int) -> str:
        """As where it came from."""
        return self._samples[index].name

    def told(self, index: int) -> str:
        """As where it came from."""
        return self._samples[index].told

    def load(self, index: int) -> Raw:
        """What was sent.

        Raises:
            FeedError: it could not be read there; (when decoding) it is no whole sample.
        """
        one = self._samples[index]
        held = one.held
        if isinstance(held, bytes):
            assert self._pictures is not None
            return self._pictures.raw(index, held)
        if isinstance(held, dict):
            return Raw(one.digest, lambda: dict(held))
        if one.digest == UNREADABLE:
            _refuse(held)
        return Raw(one.digest, lambda: _refuse(held))


def _refuse(why: str) -> NoReturn:
    raise FeedError(why)
