"""Pieces of the HTML page: tables, lists, folds. What takes text escapes it.

The page's Content-Security-Policy allows its own sheet and script alone: no `style` attribute and
no `onclick` would work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.report.style import PRINTED
from deploy.report.verdict import Verdict

_MARKS = {GOOD: "good", FLOAT: "float", DOUBTFUL: "doubtful", UNUSABLE: "unusable"}
_FEW = 8  # names that a cell shows unfolded
_RUN = 20  # letters that stand in one piece before a name may be broken anywhere
_PIECE = re.compile(rf".{{1,{_RUN}}}?(?:[/._:,;\-]+|$)|.{{1,{_RUN}}}", re.DOTALL)


def bullets(sentences: Iterable[str], kind: str) -> str:
    """A list of sentences."""
    items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    return f'<ul class="{kind}">{items}</ul>'


def verdicts(judged: Iterable[tuple[str, Verdict]]) -> str:
    """One line an engine: the level as a mark, its label, the reasons."""
    rows = "".join(
        f'<p class="verdict {_MARKS[one.level]}"><b>{escape(one.level)}</b>'
        f" {escape(label)}: {escape('; '.join(one.reasons))}</p>"
        for label, one in judged
    )
    return f'<div class="verdicts">{rows}</div>'


def breakable(text: str) -> str:
    """A word that a line may break after its slashes and dots, and in runs that have none."""
    return " ".join(
        "<wbr>".join(map(escape, _PIECE.findall(word))) if len(word) > _RUN else escape(word)
        for word in text.split(" ")
    )


def nodes(names: Sequence[str]) -> str:
    """Names of nodes in a cell, folded where they are many."""
    text = breakable(", ".join(names))
    if len(names) <= _FEW:
        return text
    return f"<details><summary>{len(names)} nodes</summary>{text}</details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Words and what they are."""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in pairs)
    return f"<dl>{rows}</dl>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "figures") -> str:
    """A table of text."""
    return raw_table(heads, ([breakable(cell) for cell in row] for row in rows), kind)


def raw_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; the heads are escaped here.

    Every cell says its column, since a narrow screen shows a row as a card without heads. On paper
    a long one is cut.
    """
    head = "".join(f'<th scope="col">{breakable(text)}</th>' for text in heads)
    lines = [f"<tr>{''.join(_cells(heads, row))}</tr>" for row in rows]
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>{_unprinted(len(lines))}"
    )


def _cells(heads: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for head, cell in zip(heads, row, strict=True):
        says = f' data-head="{escape(head)}"' if head and cell else ""
        yield f"<td{says}>{cell}</td>"


def _unprinted(rows: int) -> str:
    """What stands under a long table on paper."""
    if rows <= PRINTED:
        return ""
    return f'<p class="unprinted">and <span>{rows - PRINTED}</span> more rows, not printed</p>'
