"""The file of `--labels`."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.errors import FeedError
from deploy.inputs import is_read
from deploy.metrics.coco import Annotations, read_coco

_DIGITS = 9  # of a class number, at most


def read_labels(path: Path) -> tuple[int, ...] | Annotations:
    """Annotations of a COCO json, or one class number a line, the last word of the line.

    Empty lines are left out.

    Raises:
        FeedError: the file cannot be read, or a line does not end in a whole number >= 0.
    """
    is_read(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe is waited for, a device endless
        raise FeedError(f"labels are read from a file, got {path}, which is no regular file")
    if path.suffix.lower() == ".json":
        return read_coco(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FeedError(f"labels are read from a text file, {path} cannot be: {error}") from error
    words = [(number, line.split()[-1]) for number, line in enumerate(lines, 1) if line.strip()]
    for number, word in words:
        if not word.isdecimal() or len(word) > _DIGITS:
            raise FeedError(
                f"a label is a class number, line {number} of {path} ends in {word[:40]!r}"
            )
    return tuple(int(word) for _, word in words)
