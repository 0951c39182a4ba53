"""Pieces of the HTML page: tables, lists, folds. What takes text escapes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from deploy.report.verdict import DOUBTFUL, FLOAT, GOOD, UNUSABLE, Verdict

_MARKS = {GOOD: "good", FLOAT: "float", DOUBTFUL: "doubtful", UNUSABLE: "unusable"}
_MANY = 40  # rows above which a table can be folded
_FEW = 8  # names that a cell shows unfolded


def bullets(sentences: Iterable[str], kind: str) -> str:
    """A list of sentences."""
    items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
    return f'<ul class="{kind}">{items}</ul>'


def verdicts(judged: Iterable[tuple[str, Verdict]]) -> str:
    """One line an engine: its label, the level as a mark, the reasons."""
    rows = "".join(
        f'<p class="verdict {_MARKS[one.level]}"><b>{escape(one.level)}</b>'
        f" {escape(label)}: {escape('; '.join(one.reasons))}</p>"
        for label, one in judged
    )
    return f'<div class="verdicts">{rows}</div>'


def nodes(names: Sequence[str]) -> str:
    """Names of nodes in a cell, folded where they are many."""
    text = escape(", ".join(names))
    if len(names) <= _FEW:
        return text
    return f"<details><summary>{len(names)} nodes</summary>{text}</details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Words and what they are."""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in pairs)
    return f"<dl>{rows}</dl>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "figures") -> str:
    """A table of text."""
    return raw_table(heads, ([escape(cell) for cell in row] for row in rows), kind)


def raw_table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; the heads are escaped here."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def foldable(html: str, rows: int) -> str:
    """A table that can be folded where it has many rows."""
    if rows <= _MANY:
        return html
    return f"<details open><summary>{rows} rows</summary>{html}</details>"
