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
from deploy.report.look_style import LONG
from deploy.report.markup import breakable
from deploy.report.model import Findings
from deploy.report.pictures import image
from deploy.report.previews import Box, Boxes, BoxRow, ClassRow
from deploy.report.section import Section

_MOST = 100  # boxes of a kind in one drawing, the best by score


def examples(report: Findings) -> Iterator[Section]:
    """The sections, one an engine that has such samples; boxes of the first stand open."""
    standing: set[int] = set()  # samples whose picture the page has already
    for engine in report.engines:
        boxes = [row for row in engine.boxes if row.boxes is not None]
        changed = [row for row in engine.changed if row.picture is not None]
        if boxes:
            folded = bool(standing)
            title = f"Boxes of FP32 and {engine.label}"
            yield Section(title=title, html=_pairs(boxes, engine.label, standing), folded=folded)
        if changed:
            shown = "".join(_changed(row, engine.label) for row in changed)
            title = f"Samples of another class in {engine.label}"
            yield Section(title=title, html=f'<div class="views">{shown}</div>')


def _pairs(rows: Sequence[BoxRow], label: str, standing: set[int]) -> str:
    """All drawings of one engine; `standing` gets the samples whose picture the page has then."""
    pairs = []
    for row in rows:
        if row.boxes is not None:
            pairs.append(_pair(row, row.boxes, label, drawn=row.boxes.number in standing))
            standing.add(row.boxes.number)
    words = _BOX_WORDS.format(rows[0].threshold)
    return f'<p class="sub">{words}</p><div class="pairs">{"".join(pairs)}</div>'


_BOX_WORDS = (
    "Where both differ most, over what the model sees; class and score at each box, from a score of"
    " {:g}. Green and solid: in both; red and dashed: lost, in FP32 alone; yellow and dotted: new,"
    " in the engine alone."
)


def _pair(row: BoxRow, boxes: Boxes, label: str, *, drawn: bool) -> str:
    """FP32's boxes and the engine's, side by side."""
    own = [(boxes.kept, "kept"), (boxes.lost, "lost")]
    others = [(boxes.found, "kept"), (boxes.new, "new")]
    name = escape(encodable(row.sample))
    engine = escape(encodable(label))
    return (
        f'<div class="beside">{_drawing(boxes, own, f"FP32, {name}", drawn=drawn)}'
        f"{_drawing(boxes, others, f'{engine}, {name}', drawn=True)}"
        f"<p>{breakable(encodable(row.sample))}: {escape(_counts(row))}</p></div>"
    )


def _counts(row: BoxRow) -> str:
    words = f"{row.kept} of {row.kept + row.lost} boxes kept, {row.new} new"
    if max(row.kept, row.lost, row.new) > _MOST:
        words += f"; the best {_MOST} of a kind are drawn"
    return words


def _drawing(
    row: Boxes, groups: Sequence[tuple[Sequence[Box], str]], title: str, *, drawn: bool
) -> str:
    """Boxes over the picture, which is named where it stands first and used from there on."""
    scale = LONG / max(row.size)
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
    words = (
        f"{row.output}: FP32 class {row.fp32} ({row.fp32_value:.3g}),"
        f" {label} class {row.engine} ({row.engine_value:.3g})"
    )
    name = encodable(row.sample)
    picture = "" if row.picture is None else image(row.picture, escape(name))
    return f"<div>{picture}<p>{breakable(name)}<br>{escape(encodable(words))}</p></div>"
