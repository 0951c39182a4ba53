"""Lines of a screen: a label in the margin, its text or a table beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 98
MARGIN = 14


def entry(label: str, text: str) -> Iterator[str]:
    """A label in the margin and its text, wrapped under itself."""
    wrapped = textwrap.wrap(
        text, WIDTH - MARGIN, break_long_words=False, break_on_hyphens=False
    ) or [""]
    for number, line in enumerate(wrapped):
        yield f"{'' if number else label:<{MARGIN}}{line}"


def columns(label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A label and a table beside it, the last column to the left and as wide as it is.

    Columns that are empty in every row are left out; nothing comes of no rows.
    """
    if not rows:
        return
    filled = [c for c in range(len(heads)) if any(row[c] for row in rows)]
    shown = [[row[c] for c in filled] for row in (heads, *rows)]
    widths = [max(len(row[c]) for row in shown) for c in range(len(filled) - 1)]
    for number, row in enumerate(shown):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        yield f"{'' if number else label:<{MARGIN}}{'  '.join([*cells, row[-1]])}"
