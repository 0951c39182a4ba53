"""A video as the source of a feed: frames in their order, decoded when asked for.

Frames are read one after the other; one that lies before the last begins from the start. So a pass
decodes the file once, and no more than one frame is in memory.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from deploy.errors import FeedError
from deploy.feed import images
from deploy.feed.manifest import Raw, sample_digest
from deploy.feed.pixels import apply
from deploy.feed.preprocess import Preprocess
from deploy.feed.words import overheard
from deploy.files.reading import refuse_irregular
from deploy.tensors import Array, TensorSpec

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
