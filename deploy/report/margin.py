"""Lines of a screen: a label in the margin, its text beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

WIDTH = 98
MARGIN = 14


def entry(label: str, text: str) -> Iterator[str]:
    """A label in the margin and its text, wrapped under itself."""
    wrapped = textwrap.wrap(
        text, WIDTH - MARGIN, break_long_words=False, break_on_hyphens=False
    ) or [""]
    for number, line in enumerate(wrapped):
        yield f"{'' if number else label:<{MARGIN}}{line}"
