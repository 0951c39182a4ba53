"""The page's pictures of the feed: each sample as it was given, beside it as the model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deploy.report.figures import encodable
from deploy.report.raster import Raster
from deploy.report.shown import PicturesPart, ViewRow

_BOX = 160  # pixels of the square that every picture is shown in

PICTURE_STYLE = f"""
.views {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.views > div {{ break-inside: avoid; max-width: 100%; }}
.views p {{ margin: .2rem 0 0; font-size: .84rem; color: var(--soft); overflow-wrap: anywhere;
  max-width: {2 * _BOX + 8}px; }}
.views img {{ width: {_BOX}px; height: {_BOX}px; max-width: calc(50% - 4px); object-fit: contain;
  vertical-align: top; background: var(--card); }}
.views img + img {{ margin-left: 8px; }}
.views .tiny {{ image-rendering: pixelated; }}
"""


def views(part: PicturesPart | None) -> Iterator[str]:
    """The section; nothing without pictures."""
    if part is None:
        return
    both = any(row.given is not None for row in part.rows)
    left = "Left the file, right " if both else ""
    yield "<h2>What the model sees</h2>"
    yield f'<p class="sub">{escape(left + part.how if both else _capital(part.how))}.</p>'
    yield f'<div class="views">{"".join(map(_view, part.rows))}</div>'


def _view(row: ViewRow) -> str:
    name = escape(encodable(row.name))
    given = "" if row.given is None else image(row.given, f"{name}, the file")
    sizes = _size(row.fed_size)
    if row.given_size is not None:
        sizes = f"{_size(row.given_size)} fed as {sizes}"
    return f"<div>{given}{image(row.fed, f'{name}, as fed')}<p>{name}<br>{sizes}</p></div>"


def image(picture: Raster, words: str) -> str:
    """A picture; `words`, which stand for it, are HTML already."""
    tiny = ' class="tiny"' if max(picture.width, picture.height) < _BOX else ""
    return f'<img{tiny} src="{picture.uri}" alt="{words}">'


def _size(size: tuple[int, int]) -> str:
    """(height, width) as pictures' sizes are told."""
    return f"{size[0]}x{size[1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
