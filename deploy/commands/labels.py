"""The file of `--labels`."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import FeedError
from deploy.feed.evaluation import BY_FOLDER
from deploy.files.reading import read_text
from deploy.metrics.coco import Annotations, read_coco

_DIGITS = 9  # of a class number, at most


def read_labels(path: Path) -> tuple[int, ...] | Annotations | str:
    """Annotations of a COCO json, or one class number a line, the last word of the line.

    Empty lines are left out. The word "folders" is no file: it labels images by their folders.

    Raises:
        FeedError: the file cannot be read, or a line does not end in a whole number >= 0.
    """
    if str(path) == BY_FOLDER:
        return BY_FOLDER
    if path.suffix.lower() == ".json":
        return read_coco(path)
    lines = read_text(path, what="a text file of labels", error=FeedError).splitlines()
    words = [(number, line.split()[-1]) for number, line in enumerate(lines, 1) if line.strip()]
    for number, word in words:
        if not word.isdecimal() or len(word) > _DIGITS:
            raise FeedError(
                f"a label is a class number, line {number} of {path} ends in {word[:40]!r}; number"
                " the classes from 0, as the model's outputs are"
            )
    return tuple(int(word) for _, word in words)
