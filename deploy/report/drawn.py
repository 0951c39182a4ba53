"""The page's samples where the float model and an engine differ: boxes drawn, classes told.

::

    FP32                      int8
    +------------------+      +------------------+
    |  [====]  kept    |      |  [====]  kept    |      kept: a solid line in both
    |  [- - ]  lost    |      |          [....]  |      lost: dashed, in FP32's picture
    +------------------+      +------------new---+      new:  dotted, in the engine's

A picture stands once in the page, whichever engines are drawn over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from deploy.report.figures import encodable
from deploy.report.parts import EngineRow
from deploy.report.pictures import image
from deploy.report.shown import Box, BoxRow, ClassRow

_LONG = 300  # units of a drawing's longer side, about as many pixels on a screen
_MOST = 100  # boxes of a kind in one drawing, the best by score

DRAWN_STYLE = f"""
.drawn {{ display: flex; flex-wrap: wrap; gap: .5rem; margin: 0 0 1.2rem; break-inside: avoid; }}
.drawn svg {{ width: {_LONG}px; max-width: 100%; height: auto; }}
.drawn p {{ flex-basis: 100%; margin: 0; font-size: .84rem; color: var(--soft);
  overflow-wrap: anywhere; }}
svg.boxes rect {{ fill: none; stroke-width: 2; }}
svg.boxes text {{ font-size: 10px; fill: #fff; paint-order: stroke; stroke: #000;
  stroke-width: 2.5px; }}
svg.boxes .kept {{ stroke: #2fd6a5; fill-opacity: 1; }}
svg.boxes .lost {{ stroke: #ff4d4d; stroke-dasharray: 7 4; }}
svg.boxes .new {{ stroke: #ffb020; stroke-dasharray: 2 3; }}
"""


def examples(engines: Sequence[EngineRow]) -> Iterator[str]:
    """The sections, one an engine that has examples."""
    standing: set[int] = set()  # samples whose picture the page has already
    for engine in engines:
        boxes = [row for row in engine.examples if isinstance(row, BoxRow)]
        changed = [row for row in engine.examples if isinstance(row, ClassRow)]
        if boxes:
            yield f"<h2>Boxes of FP32 and {escape(encodable(engine.label))}</h2>"
            yield f'<p class="sub">{_BOX_WORDS.format(boxes[0].threshold)}</p>'
            for row in boxes:
                yield _pair(row, engine.label, drawn=row.number in standing)
                standing.add(row.number)
        if changed:
            label = escape(encodable(engine.label))
            yield f"<h2>Samples of another class in {label}</h2>"
            yield f'<div class="views">{"".join(_changed(row, label) for row in changed)}</div>'


_BOX_WORDS = (
    "Where both differ most, over what the model sees; class and score at each box, from a score of"
    " {:g}. Green and solid: in both; red and dashed: lost, in FP32 alone; yellow and dotted: new,"
    " in the engine alone."
)


def _pair(row: BoxRow, label: str, *, drawn: bool) -> str:
    """FP32's boxes and the engine's, side by side."""
    own = [(row.kept, "kept"), (row.lost, "lost")]
    others = [(row.found, "kept"), (row.new, "new")]
    name = escape(encodable(row.name))
    engine = escape(encodable(label))
    return (
        f'<div class="drawn">{_drawing(row, own, f"FP32, {name}", drawn=drawn)}'
        f"{_drawing(row, others, f'{engine}, {name}', drawn=True)}"
        f"<p>{name}: {escape(_counts(row))}</p></div>"
    )


def _counts(row: BoxRow) -> str:
    found = len(row.kept) + len(row.lost)
    words = f"{len(row.kept)} of {found} boxes kept, {len(row.new)} new"
    if max(len(row.kept), len(row.lost), len(row.new)) > _MOST:
        words += f"; the best {_MOST} of a kind are drawn"
    return words


def _drawing(
    row: BoxRow, groups: Sequence[tuple[Sequence[Box], str]], title: str, *, drawn: bool
) -> str:
    """Boxes over the picture, which is named where it stands first and used from there on."""
    scale = _LONG / max(row.size)
    width, height = row.size[1] * scale, row.size[0] * scale
    under = f'<use href="#look-{row.number}"/>'
    if not drawn:
        under = (
            f'<image id="look-{row.number}" width="{width:.1f}" height="{height:.1f}"'
            f' preserveAspectRatio="none" href="{row.picture.uri}"/>'
        )
    over = "".join(_box(one, kind, width, height) for own, kind in groups for one in own[:_MOST])
    return (
        f'<svg class="boxes" viewBox="0 0 {width:.1f} {height:.1f}" role="img">'
        f"<title>{title}</title>{under}{over}</svg>"
    )


def _box(box: Box, kind: str, width: float, height: float) -> str:
    """A rectangle, and its class and score where they can be read inside the drawing."""
    x1, x2 = (min(max(x * width, 0.0), width) for x in box.corners[::2])
    y1, y2 = (min(max(y * height, 0.0), height) for y in box.corners[1::2])
    x = min(x1 + 2, width - 34)
    y = y1 - 3 if y1 > 12 else y1 + 11
    return (
        f'<rect class="{kind}" x="{x1:.1f}" y="{y1:.1f}" width="{max(x2 - x1, 0):.1f}"'
        f' height="{max(y2 - y1, 0):.1f}"/>'
        f'<text x="{x:.1f}" y="{y:.1f}">{box.kind} {box.score:.2f}</text>'
    )


def _changed(row: ClassRow, label: str) -> str:
    name, output = escape(encodable(row.name)), escape(encodable(row.output))
    (own, sure), (other, less) = row.reference, row.candidate
    return (
        f"<div>{image(row.picture, name)}<p>{name}<br>{output}: FP32 class {own} ({sure:.3g}),"
        f" {label} class {other} ({less:.3g})</p></div>"
    )
