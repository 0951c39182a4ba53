"""Sources of samples: image files, the frames of a video, or samples sent by another machine.

A video is read frame after frame; reading a frame before the current one restarts the file. So a
pass decodes the file once and holds one frame in memory.

The displayed size of an image mostly comes from its first bytes. The sides in the header are those
of the stored pixels; if the EXIF orientation rotates the image, decoding swaps them. The image is
decoded if its first bytes leave that open.

Samples go to another machine as file bytes (images) or as arrays (all others).
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from deploy.errors import FeedError, counted
from deploy.feed import headers, images
from deploy.feed.decoding import capture_decoder_output, decode_image, opencv
from deploy.feed.file_list import (
    UNREADABLE,
    FileList,
    ImageFile,
    Labels,
    RawSample,
    sample_digest,
)
from deploy.feed.pixels import image_size, preprocess_image
from deploy.feed.preprocess import INTEGER_DTYPES, Preprocess, Size, describe, with_image_size
from deploy.files.reading import open_regular_file
from deploy.tensors import Array, TensorSpec

Sample = dict[str, Array]

DEFAULT_MAX_PIXELS = 50_000_000  # of a calibration image: 150 MB when decoded
_LARGE_PIXELS = 25_000_000  # an image of more is decoded while no other thread decodes such a one
_LARGE_IMAGE = threading.Lock()


class SampleSource(Protocol):
    """Random access to samples of batch 1 and to their names."""

    @property
    def labels(self) -> Labels:
        """One class number per sample; None without labels."""

    def __len__(self) -> int: ...

    def sample_name(self, index: int) -> str:
        """Return the sample's name; `printable_name` of it is for messages."""

    def load(self, index: int) -> RawSample:
        """Read the sample without decoding it."""


SUFFIXES = frozenset((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_video(path: Path | str) -> bool:
    """Return whether the suffix, in any case, is that of a video."""
    return images.suffix_of(path) in SUFFIXES


class VideoSource:
    """The frames of a video for one input.

    Attributes:
        frames_per_second: frames per second; 1 if the file does not say.

    Raises:
        FeedError: OpenCV cannot read the file, or it has no frame.
    """

    labels: Labels = None

    def __init__(self, path: Path, spec: TensorSpec, preprocess: Preprocess) -> None:
        self._path = path
        self._spec = spec
        self._preprocess = preprocess
        self._lock = threading.Lock()
        self._video = _open_video(path)
        self._next_frame = 0  # index of the frame that is read next
        cv2 = opencv()
        self._count = int(self._video.get(cv2.CAP_PROP_FRAME_COUNT))
        self.frames_per_second = max(round(self._video.get(cv2.CAP_PROP_FPS) or 1), 1)
        if self._count < 1:
            raise FeedError(
                f"video {images.printable_name(path)} must say how many frames it has, got"
                " none; encode it again, or give its frames as images"
            )

    def __len__(self) -> int:
        return self._count

    def sample_name(self, index: int) -> str:
        """Return the file's name and the frame's number, from 0."""
        return f"{self._path.name}#{index}"

    def load(self, index: int) -> RawSample:
        """Return a frame's pixels, hashed, and the function that preprocesses them.

        Raises:
            FeedError: the frame cannot be decoded.
        """
        pixels = self._read_frame(index)
        digest = sample_digest({"": pixels})
        return RawSample(digest, lambda: self._preprocess_frame(pixels), lambda: pixels)

    def _preprocess_frame(self, pixels: Array) -> Sample:
        if self._preprocess.color == "grey":
            cv2 = opencv()
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)[:, :, None]
        return {self._spec.name: preprocess_image(pixels, self._preprocess, self._spec.dtype)}

    def _read_frame(self, index: int) -> Array:
        """Return a frame's pixels, uint8 [H, W, 3] BGR.

        Frames between the last one read and this one are skipped; for an earlier one the file is
        read from its beginning again.

        Raises:
            FeedError: it cannot be decoded.
        """
        pixels: Array | None = None
        with self._lock:
            if index < self._next_frame:
                # before `capture_decoder_output` below: `_open_video` calls it too, and would wait
                # for the end of this one
                self._video = _open_video(self._path)
                self._next_frame = 0
            with capture_decoder_output() as decoder_lines:
                while self._next_frame < index and self._video.grab():  # skips a frame
                    self._next_frame += 1
                if self._next_frame == index:
                    was_read, pixels = self._video.read()
                    if was_read:
                        self._next_frame += 1
        if pixels is None or pixels.dtype != np.uint8:
            message = (
                f"frame {images.printable_name(self.sample_name(index))} cannot be decoded, though"
                f" the file claims {counted(self._count, 'frame')}"
            )
            if decoder_lines:
                message += f", its decoder says: {decoder_lines[-1]}"
            raise FeedError(message)
        return pixels


def _open_video(path: Path) -> Any:
    """Return OpenCV's capture of a video file.

    Raises:
        FeedError: OpenCV cannot read it.
    """
    cv2 = opencv()
    with open_regular_file(path, what="a video", error=FeedError) as file, capture_decoder_output():
        # not by its name: OpenCV crashes on bytes that are not UTF-8, and takes %d for a pattern.
        # It opens the file anew, so `file` may be closed
        video = cv2.VideoCapture(f"/dev/fd/{file.fileno()}")
    if not video.isOpened():
        raise FeedError(
            f"video {images.printable_name(path)} cannot be read by this OpenCV; encode it"
            " again, or give its frames as images"
        )
    return video


_HEADER_BYTES = 1 << 18  # enough for an EXIF with a thumbnail and the header after it


def decoded_size(file: ImageFile) -> Size | None:
    """Return (height, width) of an image file as decoded; None if it cannot be decoded."""
    try:
        with file.path.open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
        stored_size = headers.read_image_size(header)  # (width, height)
        is_rotated = headers.is_rotated(header)
        if stored_size is None or is_rotated is None:  # the header does not tell
            pixels = decode_image(images.read_image_file(file), file.name, grey=True)
            return image_size(pixels)
    except (OSError, ValueError, FeedError):
        return None  # reading the sample will report the error
    width, height = stored_size
    if is_rotated:
        return width, height
    return height, width


@dataclass(frozen=True)
class ImageSource:
    """Image files for one input.

    Attributes:
        files: the images.
        spec: the input.
        preprocess: resolved.
        max_pixels: pixels that an image may have.
        of_16_bits: indices of the images of 16 bits a channel among those decoded so far.
    """

    files: FileList
    spec: TensorSpec
    preprocess: Preprocess
    max_pixels: int = DEFAULT_MAX_PIXELS
    of_16_bits: set[int] = field(default_factory=set, init=False)

    @property
    def _feeds_16_bits(self) -> bool:
        return self.preprocess.deep and self.spec.dtype != "uint8"

    @property
    def note(self) -> str:
        """A note on images of 16 bits; "" without any."""
        count = len(self.of_16_bits)
        if not count:
            return ""
        has, its, is_ = ("has", "its", "is") if count == 1 else ("have", "their", "are")
        images_text = f"{counted(count, 'image')} {has} 16 bits a channel"
        if self._feeds_16_bits:
            return f"{images_text}, so {its} pixels go from 0 to 65535"
        return (
            f"{images_text} and {is_} cut to the upper 8; grey images keep all if their scale is"
            " not 1/255, such as --scale 1 or 0.0000152590"
        )

    @property
    def labels(self) -> Labels:
        """One label per image, or None."""
        return self.files.labels

    def __len__(self) -> int:
        return len(self.files)

    def sample_name(self, index: int) -> str:
        """Return the file's name."""
        return self.files.names[index]

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
            hashlib.sha256(data).digest(),
            lambda: self._preprocess(index, data),
            lambda: self._decode_preview(index, data),
        )

    def _decode_preview(self, index: int, data: bytes) -> Array:
        with self._limit_large(index, data):
            return decode_image(data, self.files.names[index], grey=False)

    def _limit_large(self, index: int, data: bytes) -> AbstractContextManager[object]:
        """Return the context to decode an image in: a lock, if it is large, that one thread holds.

        Raises:
            FeedError: the image has more than `max_pixels`.
        """
        width, height = headers.read_image_size(data) or (0, 0)
        if width * height > self.max_pixels:
            raise FeedError(
                f"{images.printable_name(self.files.names[index])} must have at most"
                f" {self.max_pixels:,} pixels, got {width}x{height}; give a smaller copy of it, or"
                " raise --max-pixels"
            )
        return _LARGE_IMAGE if width * height > _LARGE_PIXELS else nullcontext()

    def _preprocess(self, index: int, data: bytes) -> Sample:
        """Decode an image from the file's bytes and convert it to the input."""
        grey = self.preprocess.color == "grey"
        name = self.files.names[index]
        with self._limit_large(index, data):
            pixels = decode_image(data, name, grey=grey, deep=self._feeds_16_bits)
            if headers.read_bit_depth(data) == 16:
                self.of_16_bits.add(index)
            title = images.printable_name(name)
            preprocess = with_image_size(self.preprocess, image_size(pixels), title)
            return {self.spec.name: preprocess_image(pixels, preprocess, self.spec.dtype)}


def check_present(files: Iterable[ImageFile], count: int, source_name: str) -> None:
    """Raise if image files are missing.

    Raises:
        FeedError: names the first few missing files.
    """
    missing_names = [file.name for file in files if not os.path.exists(file.path)]
    if not missing_names:
        return
    raise FeedError(
        f"every image must exist, {len(missing_names)} of {count} in {source_name} do not:"
        f" {images.summarize_names(missing_names)}; a line of a list is a path, relative to the"
        " list, with or without a class number; correct the paths or links, or skip bad ones"
        " (--skip-bad)"
    )


def check_dtype(spec: TensorSpec, preprocess: Preprocess) -> None:
    """Refuse a dtype that images cannot be converted to.

    Raises:
        FeedError: the dtype is neither float32 nor float16, nor an integer type fed with raw
            pixels (scale 1, mean 0, std 1).
    """
    if spec.dtype in ("float32", "float16"):
        return
    if spec.dtype in INTEGER_DTYPES and _keeps_integers(preprocess):
        return
    raise FeedError(
        f"images become float32 or float16, the input is {describe(spec)}; use the preset 'raw'"
        f" (scale 1, no mean, std 1) for {' or '.join(INTEGER_DTYPES)}, or feed arrays"
    )


def _keeps_integers(preprocess: Preprocess) -> bool:
    """Return whether all pixels of an input are whole numbers of 0 to 255."""
    if preprocess.scale != 1 or set(preprocess.mean) != {0.0} or set(preprocess.std) != {1.0}:
        return False
    return all(0 <= value <= 255 and value.is_integer() for value in preprocess.pad)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSample:
    """One sample to be sent to another machine.

    Attributes:
        name: of the sample.
        digest: of arrays as read, 32 bytes; `UNREADABLE` if they could not be read, and for images.
        content: the bytes of an image file; or arrays by input; or the reason why there are none.
    """

    name: str
    digest: bytes
    content: bytes | Sample | str

    @property
    def byte_count(self) -> int:
        """Approximate number of bytes to send."""
        if isinstance(self.content, dict):
            return sum(array.nbytes for array in self.content.values())
        return len(self.content)


def read_remote_samples(source: SampleSource, indices: Iterable[int]) -> list[RemoteSample]:
    """Return samples to be sent to another machine: images as file bytes, all others as arrays.

    The content of a sample that cannot be read or decoded is the reason, as text.
    """
    samples = []
    for index in indices:
        digest: bytes = UNREADABLE  # stays so for an image, and if reading fails
        content: bytes | Sample | str
        try:
            if isinstance(source, ImageSource):  # the other machine computes the digest
                content = source.read(index)
            else:
                raw_sample = source.load(index)
                digest = raw_sample.digest
                content = raw_sample.decode()
        except FeedError as error:
            content = str(error)
        name = source.sample_name(index)
        samples.append(RemoteSample(name=name, digest=digest, content=content))
    return samples


class RemoteSource:
    """Samples received from another machine.

    `preprocess`: how image files become inputs; None if the samples are arrays.
    """

    labels: Labels = None

    def __init__(
        self,
        samples: Sequence[RemoteSample],
        specs: Sequence[TensorSpec],
        preprocess: Preprocess | None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self._samples = samples
        self._images: ImageSource | None = None
        if preprocess is not None:
            files = FileList("", (sample.name for sample in samples))
            self._images = ImageSource(files, specs[0], preprocess, max_pixels)

    def __len__(self) -> int:
        return len(self._samples)

    def sample_name(self, index: int) -> str:
        """Return the name on the sending machine."""
        return self._samples[index].name

    def load(self, index: int) -> RawSample:
        """Return the sample as sent: bytes of an image file, arrays, or the reason for an error.

        Raises:
            FeedError: the sending machine could not read it. Decoding raises it if the sending
                machine read the arrays and refused them.
        """
        sample = self._samples[index]
        content = sample.content
        if isinstance(content, bytes):
            assert self._images is not None  # image files are sent only with their preprocessing
            return self._images.raw(index, content)
        if isinstance(content, dict):
            return RawSample(sample.digest, lambda: dict(content))

        def refuse() -> NoReturn:
            raise FeedError(content)  # the reason why there is no content

        if sample.digest == UNREADABLE:
            refuse()
        return RawSample(sample.digest, refuse)
