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

PRINTED = 25  # rows of a table on paper, at most

_MAX_UNFOLDED_NAMES = 8  # in a cell
_MAX_RUN = 20  # letters without a break before a name may be broken anywhere
_PIECE = re.compile(rf".{{1,{_MAX_RUN}}}?(?:[/._:,;\-]+|$)|.{{1,{_MAX_RUN}}}", re.DOTALL)
# marks of Markdown and HTML, without those that format nothing: _ inside a word, < before a number
_MARKS = re.compile(r"[\\`*\[\]|#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|<(?=[A-Za-z/!?])|^>")
_RANGE_LEGEND = (
    "Thin line: values seen. Bar: range kept by the scale. Tick: zero."
    " Each drawing has its own scale."
)
_ENTITIES = {"<": "&lt;", ">": "&gt;"}

Cell = str | tuple[str, ...]  # a text, or names that the page folds if there are many


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence.

    Attributes:
        text: the sentence.
        note: whether it is small print.
    """

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences.

    Attributes:
        sentences: one per item.
        kind: class of the list in the page.
    """

    sentences: Sequence[str]
    kind: str = "notes"


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whose first column has the names.

    Attributes:
        heads: name of each column.
        rows: one cell per column.
        kind: class of the table in the page.
        range_bars: SVG of each row's range ("" for none), a second column on the page, next to the
            names; () without.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: str = "figures"
    range_bars: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Drawing:
    """HTML or SVG for the page only, as a figure if it has a caption.

    Attributes:
        body: HTML or SVG, already escaped.
        caption: plain text; "" for none.
    """

    body: str
    caption: str = ""


Block = Paragraph | Bullets | Table | Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report.

    Attributes:
        title: plain text.
        blocks: contents, in order.
        rows: number of rows or sentences, shown in the page's heading; 0 shows nothing.
        folded: whether the page shows it closed until the reader opens it.
    """

    title: str
    blocks: Sequence[Block]
    rows: int = 0
    folded: bool = True


def block_html(block: Block) -> str:
    """Return a block as HTML; all texts are escaped, drawings are HTML already."""
    match block:
        case Paragraph(text, note):
            start = '<p class="sub">' if note else "<p>"
            return f"{start}{escape(text)}</p>"
        case Bullets(sentences, kind):
            items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
            return f'<ul class="{kind}">{items}</ul>'
        case Table():
            return _table_html(block)
        case Drawing(body, ""):
            return body
        case Drawing(body, caption):
            return f"<figure>{body}<figcaption>{escape(caption)}</figcaption></figure>"


def block_markdown(block: Block) -> str:
    """Return a block as Markdown; "" for a drawing."""
    match block:
        case Paragraph(text):
            return escape_markdown(text)
        case Bullets(sentences):
            return "\n".join(f"- {escape_markdown(text)}" for text in sentences)
        case Table(heads, rows):
            rule = ["---"] * len(heads)  # the line between heads and rows
            return "\n".join(map(_row_markdown, (heads, rule, *rows)))
        case Drawing():
            return ""


def _row_markdown(row: Sequence[Cell]) -> str:
    """Return the row of a table as a line of Markdown."""
    return f"| {' | '.join(escape_markdown(cell_text(cell)) for cell in row)} |"


def sections_html(sections: Iterable[Section]) -> Iterator[str]:
    """Yield every section as HTML."""
    for number, section in enumerate(sections, 1):
        heading = f"{section.title} ({section.rows})" if section.rows else section.title
        head = f'<h2 id="section-{number}">{escape(heading)}</h2>'
        body = "\n".join(map(block_html, section.blocks))
        if section.folded:
            yield f"<details>\n<summary>{head}</summary>\n{body}\n</details>"
        else:
            yield f"<section>\n{head}\n{body}\n</section>"


def sections_markdown(sections: Iterable[Section]) -> Iterator[str]:
    """Yield every section as Markdown, without those that are all drawings."""
    for section in sections:
        if body := "\n\n".join(filter(None, map(block_markdown, section.blocks))):
            yield f"## {escape_markdown(section.title)}\n\n{body}"


def table_of_contents(sections: Sequence[Section]) -> str:
    """Return links to every section, whose ids are those of `sections_html`."""
    links = ""
    for number, section in enumerate(sections, 1):
        links += f'<li><a href="#section-{number}">{escape(section.title)}</a></li>'
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def breakable(text: str) -> str:
    """Return escaped text that may be broken after slashes and dots, and inside long runs."""
    return " ".join(map(_breakable_word, text.split(" ")))


def _breakable_word(word: str) -> str:
    """Return a word with a place to break after each piece of at most `_MAX_RUN` letters."""
    pieces = _PIECE.findall(word) if len(word) > _MAX_RUN else [word]
    return "<wbr>".join(map(escape, pieces))


def _table_html(table: Table) -> str:
    """Return a table as HTML.

    Each cell has its column's name, since a narrow screen shows rows as cards without heads.
    """
    heads = list(table.heads)
    legend = ""
    rows = [list(map(_cell_content, row)) for row in table.rows]
    if table.range_bars:  # they follow the names, which are the first column
        heads.insert(1, "range")
        for row, range_bar in zip(rows, table.range_bars, strict=True):
            row.insert(1, range_bar)
        legend = block_html(Paragraph(_RANGE_LEGEND, note=True))

    head_row = "".join(f'<th scope="col">{breakable(head)}</th>' for head in heads)
    row_elements = []
    for row in rows:
        cells = "".join(map(_cell_element, heads, row))
        row_elements.append(f"<tr>{cells}</tr>")
    body = "\n".join(row_elements)
    return (
        f'{legend}<div class="scroll"><table class="{table.kind}">'
        f"<thead><tr>{head_row}</tr></thead>"
        f"\n<tbody>{body}</tbody></table></div>{_unprinted_rows_note(len(rows))}"
    )


def _cell_content(cell: Cell) -> str:
    """Return what a cell shows as HTML; many names are folded under their number."""
    text = breakable(cell_text(cell))
    if isinstance(cell, str) or len(cell) <= _MAX_UNFOLDED_NAMES:
        return text
    return f"<details><summary>{len(cell)} nodes</summary>{text}</details>"


def cell_text(cell: Cell) -> str:
    """Return a cell as plain text; several names with commas."""
    return cell if isinstance(cell, str) else ", ".join(cell)


def _cell_element(head: str, content: str) -> str:
    """Return the element of a cell, with the name of its column as an attribute."""
    attribute = f' data-head="{escape(head)}"' if head and content else ""
    return f"<td{attribute}>{content}</td>"


def _unprinted_rows_note(row_count: int) -> str:
    """Return the note below a table on paper, which has its first rows; "" if it has all."""
    if row_count <= PRINTED:
        return ""
    return f'<p class="unprinted">and <span>{row_count - PRINTED}</span> more rows, not printed</p>'


def escape_markdown(text: str) -> str:
    """Escape what Markdown or HTML would interpret: tensor names may hold anything."""
    return _MARKS.sub(_escaped_mark, " ".join(text.split()))


def _escaped_mark(mark: re.Match[str]) -> str:
    """Return a mark of Markdown or HTML as it is written to be shown."""
    return _ENTITIES.get(mark[0], f"\\{mark[0]}")
