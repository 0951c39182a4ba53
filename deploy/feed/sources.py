"""Sources of samples: image files, the frames of a video, or samples sent by another machine.

A video is read frame after frame; reading a frame before the current one restarts the file. So a
pass decodes the file once and holds one frame in memory.

The displayed size of an image mostly comes from its first bytes. The sides in the header are those
of the stored pixels; if the EXIF orientation rotates the image, decoding swaps them. The image is
decoded if its first bytes leave that open.

Samples go to another machine as file bytes (images) or as arrays (all others).
"""

import os
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from deploy.errors import FeedError
from deploy.feed import images
from deploy.feed.decoding import capture_decoder_output, decode_image, opencv
from deploy.feed.file_list import (
    UNREADABLE,
    FileList,
    ImageFile,
    RawSample,
    bytes_digest,
    sample_digest,
)
from deploy.feed.headers import jpeg_segments, read_bit_depth, read_image_size
from deploy.feed.pixels import preprocess_image
from deploy.feed.preprocess import INTEGER_DTYPES, Preprocess, Size, describe, with_image_size
from deploy.files.reading import open_regular_file
from deploy.tensors import Array, TensorSpec

Sample = dict[str, Array]


class SampleSource(Protocol):
    """Random access to samples of batch 1 and to their names."""

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One class number per sample; None without labels."""

    def __len__(self) -> int: ...

    def sample_name(self, index: int) -> str:
        """Return the sample's name."""

    def title(self, index: int) -> str:
        """Return the sample's name for messages."""

    def load(self, index: int) -> RawSample:
        """Read the sample without decoding it."""


SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_video(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a video."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


class VideoSource:
    """The frames of a video for one input.

    Attributes:
        frames_per_second: frames per second; 1 if the file does not say.

    Raises:
        FeedError: OpenCV cannot read the file, or it has no frame.
    """

    labels: tuple[int, ...] | None = None

    def __init__(self, path: Path, spec: TensorSpec, how: Preprocess) -> None:
        self._path, self._spec, self._how = path, spec, how
        self._lock = threading.Lock()
        self._capture = _open_capture(path)
        self._next = 0
        cv2 = opencv()
        self._count = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.frames_per_second = max(round(self._capture.get(cv2.CAP_PROP_FPS) or 1), 1)
        if self._count < 1:
            raise FeedError(
                f"video {images.printable_name(str(path))} must say how many frames it has, got"
                " none; encode it again, or give its frames as images"
            )

    def __len__(self) -> int:
        return self._count

    def sample_name(self, index: int) -> str:
        """Return the file's name and the frame's number, from 0."""
        return f"{self._path.name}#{index}"

    def title(self, index: int) -> str:
        """Return the frame's name for messages."""
        return f"frame {index} of video {images.printable_name(self._path.name)}"

    def load(self, index: int) -> RawSample:
        """Return a frame's pixels, hashed, and the function that preprocesses them.

        Raises:
            FeedError: the frame cannot be decoded.
        """
        pixels = self._frame(index)
        digest = sample_digest({"": pixels})
        return RawSample(
            digest, lambda: {self._spec.name: self._preprocessed(pixels)}, lambda: pixels
        )

    def _preprocessed(self, pixels: Array) -> Array:
        cv2 = opencv()
        grey = self._how.color == "grey"
        shown = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)[:, :, None] if grey else pixels
        return preprocess_image(shown, self._how).astype(self._spec.dtype, copy=False)

    def _frame(self, index: int) -> Array:
        with self._lock:
            if index < self._next:
                self._capture = _open_capture(self._path)  # captures the decoder's output itself
                self._next = 0
            with capture_decoder_output() as lines:
                while self._next < index and self._capture.grab():
                    self._next += 1
                there, pixels = self._capture.read() if self._next == index else (False, None)
                self._next += 1 if there else 0
        if not there or pixels is None or pixels.dtype != np.uint8:
            why = f", its decoder says: {lines[-1]}" if lines else ""
            raise FeedError(
                f"{self.title(index)} cannot be decoded, though the file claims {self._count}"
                f" frames{why}"
            )
        frame: Array = pixels
        return frame


def _open_capture(path: Path) -> Any:
    cv2 = opencv()
    with open_regular_file(path, what="a video", error=FeedError) as file, capture_decoder_output():
        # not by its name: OpenCV crashes on bytes that are not UTF-8, and takes %d for a pattern
        capture = cv2.VideoCapture(f"/dev/fd/{file.fileno()}")
    if not capture.isOpened():
        raise FeedError(
            f"video {images.printable_name(str(path))} cannot be read by this OpenCV; encode it"
            " again, or give its frames as images"
        )
    return capture


_FIRST = 1 << 18  # bytes: enough for an EXIF with a thumbnail and the header after it
_APP1, _ORIENTATION, _TURNED = 0xE1, 274, range(5, 9)  # orientations that swap the sides
_MOST_TAGS = 4096


def decoded_size(picture: ImageFile) -> Size | None:
    """Return (height, width) of an image file as decoded; None if it cannot be decoded."""
    try:
        with picture.path.open("rb") as file:
            first = file.read(_FIRST)
        size, is_rotated = read_image_size(first), _is_rotated(first)
        if size is None or is_rotated is None:
            pixels = decode_image(images.read_image_file(picture), picture.name, grey=True)
            return pixels.shape[0], pixels.shape[1]
    except (OSError, ValueError, FeedError):
        return None  # reading the sample will report the error
    return size if is_rotated else (size[1], size[0])


def _is_rotated(first: bytes) -> bool | None:
    """Return whether decoding swaps width and height; None if the first bytes leave it open."""
    if not first.startswith(b"\xff\xd8"):
        tiff = first.startswith((b"II", b"MM"))
        return None if tiff or b"Exif" in first or b"eXIf" in first or b"EXIF" in first else False
    exif = (body for marker, _, body in jpeg_segments(first) if marker == _APP1)
    exif_body = next((body[6:] for body in exif if body.startswith(b"Exif\0\0")), b"")
    try:
        return bool(exif_body) and _orientation(exif_body) in _TURNED
    except struct.error:
        return None


def _orientation(tiff: bytes) -> int:
    """Return the first directory's tag 274; 1 (upright) without it."""
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
    """Image files for one input."""

    files: FileList
    spec: TensorSpec
    preprocess: Preprocess
    of_16_bits: set[int] = field(default_factory=set, init=False)  # indices, of those decoded

    @property
    def _deep(self) -> bool:
        """Whether all 16 bits are fed."""
        return self.preprocess.deep and self.spec.dtype != "uint8"

    @property
    def note(self) -> str:
        """A note on images of 16 bits; "" without any."""
        count = len(self.of_16_bits)
        if not count:
            return ""
        if self._deep:
            return f"{count} images have 16 bits a channel, so their pixels go from 0 to 65535"
        return (
            f"{count} images have 16 bits a channel and are cut to the upper 8; grey images keep"
            " all if their scale is not 1/255, such as --scale 1 or 0.0000152590"
        )

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One label per image, or None."""
        return self.files.labels

    def __len__(self) -> int:
        return len(self.files)

    def sample_name(self, index: int) -> str:
        """Return the file's name."""
        return self.files.name(index)

    def size(self, index: int) -> Size | None:
        """Return (height, width) of the image as decoded; None if it cannot be decoded."""
        return decoded_size(self.files[index])

    def title(self, index: int) -> str:
        """Return the image's name for messages."""
        return f"image {images.printable_name(self.files.name(index))}"

    def load(self, index: int) -> RawSample:
        """Return the file's bytes, hashed, and the function that decodes and preprocesses them.

        Raises:
            FeedError: the file cannot be read; (when decoding) it is not a complete image.
        """
        return self.raw(index, self.read(index))

    def read(self, index: int) -> bytes:
        """Return the file's bytes.

        Raises:
            FeedError: the file cannot be read.
        """
        return images.read_image_file(self.files[index])

    def raw(self, index: int, data: bytes) -> RawSample:
        """Return the same as `load` for bytes that were read before."""
        return RawSample(
            bytes_digest(data),
            lambda: self._decoded(index, data),
            lambda: decode_image(data, self.files.name(index), grey=False),
        )

    def _decoded(self, index: int, data: bytes) -> dict[str, Array]:
        grey = self.preprocess.color == "grey"
        pixels = decode_image(data, self.files.name(index), grey=grey, deep=self._deep)
        if read_bit_depth(data) == 16:
            self.of_16_bits.add(index)
        how = with_image_size(
            self.preprocess, (pixels.shape[0], pixels.shape[1]), self.title(index)
        )
        values = preprocess_image(pixels, how).astype(self.spec.dtype, copy=False)
        return {self.spec.name: values}


def check_present(pictures: Iterable[ImageFile], count: int, where: str) -> None:
    """Raise if image files are missing.

    Raises:
        FeedError: names the first few missing files.
    """
    missing = [one.name for one in pictures if not os.path.exists(one.path)]
    if missing:
        raise FeedError(
            f"every image must exist, {len(missing)} of {count} in"
            f" {where} do not: {images.summarize_names(missing)}; paths in a list"
            " are relative to it; correct the paths or links, or skip bad ones (--skip-bad)"
        )


def check_dtype(spec: TensorSpec, how: Preprocess) -> None:
    """Refuse a dtype that images cannot be converted to.

    Raises:
        FeedError: the dtype is neither float32 nor float16, nor an integer type fed with raw
            pixels (scale 1, mean 0, std 1).
    """
    whole = how.scale == 1 and set(how.mean) == {0.0} and set(how.std) == {1.0}
    pads_whole = all(0 <= p <= 255 and float(p).is_integer() for p in how.pad)
    if spec.dtype in ("float32", "float16") or (
        spec.dtype in INTEGER_DTYPES and whole and pads_whole
    ):
        return
    remedy = (
        "use the preset 'raw' (scale 1, no mean, std 1)"
        if spec.dtype in INTEGER_DTYPES
        else "feed it arrays from an .npy file"
    )
    raise FeedError(f"images become float32 or float16, the input is {describe(spec)}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSample:
    """One sample to be sent to another machine.

    Attributes:
        title: its name in messages.
        digest: of the sample as read; 32 bytes.
        content: the bytes of an image file; or arrays by input; or the reason why there are none.
    """

    name: str
    title: str
    digest: bytes
    content: bytes | dict[str, Array] | str

    @property
    def byte_count(self) -> int:
        """Approximate number of bytes to send."""
        if isinstance(self.content, dict):
            return sum(array.nbytes for array in self.content.values())
        return len(self.content)


def read_remote_samples(source: SampleSource, indices: Iterable[int]) -> list[RemoteSample]:
    """Read samples of a source now; a bad one is replaced by the reason why it is bad."""
    samples = []
    for index in indices:
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
        name, told = source.sample_name(index), source.title(index)
        samples.append(RemoteSample(name=name, title=told, digest=digest, content=held))
    return samples


class RemoteSource:
    """Samples received from another machine."""

    labels: tuple[int, ...] | None = None

    def __init__(
        self, samples: Sequence[RemoteSample], specs: Sequence[TensorSpec], how: Preprocess | None
    ) -> None:
        self._samples = samples
        named = FileList("", (one.name for one in samples))
        self._pictures = None if how is None else ImageSource(named, specs[0], how)

    def __len__(self) -> int:
        return len(self._samples)

    def sample_name(self, index: int) -> str:
        """Return the name on the sending machine."""
        return self._samples[index].name

    def title(self, index: int) -> str:
        """Return the name for messages on the sending machine."""
        return self._samples[index].title

    def load(self, index: int) -> RawSample:
        """Return the sample as sent.

        Raises:
            FeedError: the sending machine could not read it; (when decoding) it is not complete.
        """
        one = self._samples[index]
        held = one.content
        if isinstance(held, bytes):
            assert self._pictures is not None
            return self._pictures.raw(index, held)
        if isinstance(held, dict):
            return RawSample(one.digest, lambda: dict(held))
        if one.digest == UNREADABLE:
            _refuse(held)
        return RawSample(one.digest, lambda: _refuse(held))


def _refuse(why: str) -> NoReturn:
    raise FeedError(why)
