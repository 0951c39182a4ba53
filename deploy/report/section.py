"""The page's sections: a heading each, open or folded, under a list of contents.

::

    Speed          open: what a user came for        Contents, made of the headings
    Tensors (23)   folded: everything else, found by the browser's own search all the same
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading, plain text.
        html: what stands under it.
        rows: how many rows or sentences it has, said beside the title; 0 says nothing.
        folded: whether it is closed until the reader opens it.
    """

    title: str
    html: str
    rows: int = 0
    folded: bool = True

    @property
    def heading(self) -> str:
        """The title and how much there is."""
        return f"{self.title} ({self.rows})" if self.rows else self.title


def contents(sections: Sequence[Section]) -> str:
    """Links to every section; "" where there are too few to be lost among."""
    if len(sections) < 3:
        return ""
    links = "".join(
        f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
        for anchor, section in _anchored(sections)
    )
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def written(sections: Sequence[Section]) -> Iterator[str]:
    """Every section as HTML."""
    for anchor, section in _anchored(sections):
        head = f'<h2 id="{anchor}">{escape(section.heading)}</h2>'
        if section.folded:
            yield f"<details>\n<summary>{head}</summary>\n{section.html}\n</details>"
        else:
            yield f"<section>\n{head}\n{section.html}\n</section>"


def _anchored(sections: Sequence[Section]) -> Iterator[tuple[str, Section]]:
    """Each with an id of its own, made of its title."""
    used: set[str] = set()
    for section in sections:
        plain = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        names = (f"{plain}-{number}" if number else plain for number in range(len(sections)))
        anchor = next(name for name in names if name not in used)
        used.add(anchor)
        yield anchor, section
