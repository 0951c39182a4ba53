"""The page's pictures of the feed: each sample as it was given, beside it as the model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deploy.report.figures import encodable
from deploy.report.look_style import BOX
from deploy.report.markup import breakable
from deploy.report.model import Findings
from deploy.report.previews import ViewRow
from deploy.report.raster import Raster
from deploy.report.section import Section


def views(report: Findings) -> Iterator[Section]:
    """The section; none without pictures."""
    part = report.feed.pictures if report.feed else None
    if part is None or not part.views:
        return
    both = any(row.given is not None for row in part.views)
    left = "Left the file, right " if both else ""
    words = left + part.how if both else _capital(part.how)
    shown = f'<div class="views">{"".join(map(_view, part.views))}</div>'
    html = f'<p class="sub">{escape(words)}.</p>{shown}'
    yield Section(title="What the model sees", html=html, folded=False)


def _view(row: ViewRow) -> str:
    name = encodable(row.name)
    given = "" if row.given is None else image(row.given, escape(f"{name}, the file"))
    fed = image(row.fed, escape(f"{name}, as fed"))
    sizes = _size(row.fed_size)
    if row.given_size is not None:
        sizes = f"{_size(row.given_size)} fed as {sizes}"
    return f"<div>{given}{fed}<p>{breakable(name)}<br>{sizes}</p></div>"


def image(picture: Raster, words: str) -> str:
    """A picture; `words`, which stand for it, are HTML already."""
    tiny = ' class="tiny"' if max(picture.width, picture.height) < BOX else ""
    return f'<img{tiny} src="{picture.uri}" alt="{words}">'


def _size(size: tuple[int, int]) -> str:
    """(height, width) as pictures' sizes are told."""
    return f"{size[0]}x{size[1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
