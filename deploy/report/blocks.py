"""Blocks of a report: plain values that become HTML on the page and Markdown in the text.

::

    a function of the findings -> Section(title, blocks) -> page: open or folded, with contents
                                                         -> Markdown: without drawings

A section that is open has the main results; the browser's own search finds folded ones too.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from deploy.report.figures import encodable

PRINTED = 25  # rows of a table on paper, at most

_NOTE = '<p class="sub">'
_FEW = 8  # names shown unfolded in a cell
_RUN = 20  # letters without a break before a name may be broken anywhere
_PIECE = re.compile(rf".{{1,{_RUN}}}?(?:[/._:,;\-]+|$)|.{{1,{_RUN}}}", re.DOTALL)
_MARKS = re.compile(r"[\\`*_\[\]|<>#]")  # marks of Markdown and HTML
_ENTITIES = {"<": "&lt;", ">": "&gt;"}

Cell = str | tuple[str, ...]  # a text, or names that the page folds if there are many


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence; `link` is a file next to the report, named at its end; `note` is small print."""

    text: str
    link: str = ""
    note: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences; `kind` is its class in the page."""

    sentences: Sequence[str]
    kind: str = "notes"


@dataclass(frozen=True, slots=True)
class Facts:
    """A list of terms and their values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whose first column has the names."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # one cell per column
    kind: str = "figures"  # class of the table in the page
    # a second column on the page: its head, the drawings as SVG, and their legend
    drawn: tuple[str, Sequence[str], str] | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """HTML or SVG for the page only, as a figure if it has a caption."""

    body: str
    caption: str = ""


Block = Paragraph | Heading | Bullets | Facts | Table | Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report."""

    title: str
    blocks: Sequence[Block]
    rows: int = 0  # number of rows or sentences, shown in the page's heading; 0 shows nothing
    folded: bool = True  # whether the page shows it closed until the reader opens it

    @property
    def heading(self) -> str:
        """The title with the number of rows."""
        return f"{self.title} ({self.rows})" if self.rows else self.title


def block_html(block: Block) -> str:
    """Return a block as HTML; its texts are escaped."""
    match block:
        case Paragraph(text, link, note):
            after = f' <a href="{escape(_url(link))}">{escape(link)}</a>.' if link else ""
            return f"{_NOTE if note else '<p>'}{escape(text)}{after}</p>"
        case Heading(text):
            return f"<h3>{escape(text)}</h3>"
        case Bullets(sentences, kind):
            items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
            return f'<ul class="{kind}">{items}</ul>'
        case Facts(pairs):
            rows = (f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in pairs)
            return f"<dl>{''.join(rows)}</dl>"
        case Table():
            return _table(block)
        case Drawing(body, caption):
            words = f"<figcaption>{escape(caption)}</figcaption>"
            return f"<figure>{body}{words}</figure>" if caption else body


def block_markdown(block: Block) -> str:
    """Return a block as Markdown; "" for a drawing."""
    match block:
        case Paragraph(text, link):
            after = f" [{escape_markdown(link)}]({_url(link)})." if link else ""
            return escape_markdown(text) + after
        case Heading(text):
            return f"### {escape_markdown(text)}"
        case Bullets(sentences):
            return "\n".join(f"- {escape_markdown(text)}" for text in sentences)
        case Facts(pairs):
            return "\n".join(f"- {escape_markdown(f'{key}: {value}')}" for key, value in pairs)
        case Table(heads, rows):
            lines = (heads, ["---"] * len(heads), *rows)
            cells = ([escape_markdown(_text(cell)) for cell in line] for line in lines)
            return "\n".join(f"| {' | '.join(line)} |" for line in cells)
        case Drawing():
            return ""


def sections_html(sections: Sequence[Section]) -> Iterator[str]:
    """Yield every section as HTML."""
    for anchor, section in _anchored(sections):
        head = f'<h2 id="{anchor}">{escape(section.heading)}</h2>'
        body = "\n".join(map(block_html, section.blocks))
        if section.folded:
            yield f"<details>\n<summary>{head}</summary>\n{body}\n</details>"
        else:
            yield f"<section>\n{head}\n{body}\n</section>"


def sections_markdown(sections: Iterable[Section]) -> Iterator[str]:
    """Yield every section as Markdown, without those that are all drawings."""
    for section in sections:
        body = [text for text in map(block_markdown, section.blocks) if text]
        yield from (f"## {escape_markdown(section.title)}", *body) if body else ()


def table_of_contents(sections: Sequence[Section]) -> str:
    """Return links to every section; "" for fewer than three."""
    if len(sections) < 3:
        return ""
    links = "".join(
        f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
        for anchor, section in _anchored(sections)
    )
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _anchored(sections: Sequence[Section]) -> Iterator[tuple[str, Section]]:
    """Yield each section with a unique id made of its title."""
    used: set[str] = set()
    for section in sections:
        plain = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        names = (f"{plain}-{number}" if number else plain for number in range(len(sections)))
        anchor = next(name for name in names if name not in used)
        used.add(anchor)
        yield anchor, section


def breakable(text: str) -> str:
    """Return escaped text that may be broken after slashes and dots, and inside long runs."""
    return " ".join(
        "<wbr>".join(map(escape, _PIECE.findall(word))) if len(word) > _RUN else escape(word)
        for word in text.split(" ")
    )


def _table(table: Table) -> str:
    """Return a table; each cell has its column's name, for rows as cards on a narrow screen."""
    heads, rows, legend = list(table.heads), [list(map(_cell, row)) for row in table.rows], ""
    if table.drawn is not None:
        head, drawings, words = table.drawn
        heads.insert(1, head)
        for row, drawing in zip(rows, drawings, strict=True):
            row.insert(1, drawing)
        legend = block_html(Paragraph(words, note=True)) if words else ""
    top = "".join(f'<th scope="col">{breakable(text)}</th>' for text in heads)
    body = "\n".join(f"<tr>{''.join(_with_heads(heads, row))}</tr>" for row in rows)
    return (
        f'{legend}<div class="scroll"><table class="{table.kind}"><thead><tr>{top}</tr></thead>'
        f"\n<tbody>{body}</tbody></table></div>{_unprinted(len(rows))}"
    )


def _cell(cell: Cell) -> str:
    text = breakable(_text(cell))
    if isinstance(cell, str) or len(cell) <= _FEW:
        return text
    return f"<details><summary>{len(cell)} nodes</summary>{text}</details>"


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else ", ".join(cell)


def _with_heads(heads: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for head, cell in zip(heads, row, strict=True):
        head_attribute = f' data-head="{escape(head)}"' if head and cell else ""
        yield f"<td{head_attribute}>{cell}</td>"


def _unprinted(rows: int) -> str:
    """Return the note below a long table on paper."""
    if rows <= PRINTED:
        return ""
    return f'<p class="unprinted">and <span>{rows - PRINTED}</span> more rows, not printed</p>'


def escape_markdown(text: str) -> str:
    """Escape what Markdown or HTML would interpret: tensor names may hold anything."""
    return _MARKS.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), " ".join(text.split()))


def _url(name: str) -> str:
    """Return a link target for a file next to the report."""
    return quote(encodable(name))
