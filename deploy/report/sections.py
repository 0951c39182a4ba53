"""Sections of the page: trials, worst layers, coverage, ranges, weights, pictures, examples.

Trials of a search, side by side::

    |##############------|   bar: SQNR of the worst output slice, relative to the best
    |____________        |   line: time, relative to the longest

Weights by channel::

    |  | |      || |         largest |w| of each channel, logarithmic, relative to the
    |||| |||..|||||||..|     largest of the weight

Samples where the float model and an engine differ, with boxes drawn over the picture::

    FP32                      int8
    +------------------+      +------------------+
    |  [====]  kept    |      |  [====]  kept    |      kept: a solid line in both
    |  [- - ]  lost    |      |          [....]  |      lost: dashed, in FP32's picture
    +------------------+      +------------new---+      new:  dotted, in the engine's

Each picture is in the page once, however many engines are drawn over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from urllib.parse import quote

from deploy.report import figures, page
from deploy.report.charts import drawing, range_bar
from deploy.report.figures import DEVIATION_HEADS, encodable, engine_layers_words
from deploy.report.model import Findings
from deploy.report.page import BOX, LONG, Section, breakable
from deploy.report.parts import TargetPart, TrialRow, WeightRow
from deploy.report.previews import BoxRow, ClassRow, DrawnBox, DrawnBoxes, Raster, ViewRow
from deploy.report.report_rows import float_groups, worst_first, worst_rows, worst_weights
from deploy.report.tables import (
    TRIAL_HEADS,
    WEIGHT_HEADS,
    built_targets,
    coverage,
    plan_name,
    quantized_operators,
    search_words,
    target_suffix,
    trial_row,
    weight_row,
)

_TRIAL_WIDTH, _TRIAL_HEIGHT = 120, 16
_TRIAL_TEXT = (
    "Bar: SQNR of the worst part, beside the best of all; a higher one is nearer to FP32. Line"
    " below it: the time, beside the longest."
)


def trials(tried: Sequence[TrialRow]) -> str:
    """Return a table of the trials, with the one that was built in another colour."""
    best = max((t.sqnr_db for t in tried if math.isfinite(t.sqnr_db)), default=0.0)
    longest = max((t.time for t in tried if math.isfinite(t.time)), default=0.0)
    rows = []
    for trial in tried:
        *cells, what = map(page.breakable, trial_row(trial))
        rows.append([what, _bar(trial, best, longest), *cells])
    heads = [TRIAL_HEADS[-1], "side by side", *TRIAL_HEADS[:-1]]
    return f'<p class="sub">{_TRIAL_TEXT}</p>' + page.raw_table(heads, rows, "tensors")


def _bar(trial: TrialRow, best: float, longest: float) -> str:
    """Draw SQNR and time of one trial; exact has full length, below 0 dB or NaN none."""
    label = f"{trial.what}: {figures.decibels(trial.sqnr_db)}, time {trial.time:.2f} of FP32"
    body = "".join(
        f'<rect class="{kind}" width="{_TRIAL_WIDTH * _trial_share(value, most):.1f}" y="{y}"'
        f' height="{high}"/>'
        for kind, value, most, y, high in (
            ("kept" if trial.taken else "tried", trial.sqnr_db, best, 2, 8),
            ("time", trial.time, longest, 12, 2),
        )
    )
    return drawing(_TRIAL_WIDTH, _TRIAL_HEIGHT, label, body, "bar")


def _trial_share(value: float, most: float) -> float:
    if value == math.inf:
        return 1.0
    return max(value / most, 0.0) if most > 0 and not math.isnan(value) else 0.0


_MOST = 10  # worst layers shown
_MOST_OF_EACH = 5  # of each target, if there are several


def worst(report: Findings) -> Iterator[Section]:
    """Yield the inner tensors that lose most on each target."""
    with_layers = [target for target in report.targets if target.layers]
    alone = len(report.targets) == 1
    rows = []
    for target in with_layers:
        ranges = {row.name: row for row in target.tensors}
        for layer in worst_rows(target.layers, _MOST if alone else _MOST_OF_EACH):
            held = ranges.get(layer.name)
            cells = [
                page.breakable(layer.name),
                range_bar(held) if held else "",
                escape(figures.decibels(layer.sqnr_db)),
                escape(figures.cosine(layer.cosine_mean)),
                escape(figures.percent(held.clipped) if held else figures.NONE),
            ]
            rows.append(cells if alone else [*cells, escape(target.name)])
    if rows:
        heads = ["tensor", "range", "SQNR", "cosine", "clipped", *([] if alone else ["on"])]
        html = f'<p class="sub">{_RANGE_WORDS}</p>{page.raw_table(heads, rows, "tensors")}'
        yield Section(title="Worst layers", html=html, folded=False)


_RANGE_WORDS = (
    "Thin line: values seen. Bar: range kept by the scale. Tick: zero."
    " Each drawing has its own scale."
)


def search(report: Findings) -> Iterator[Section]:
    """Yield the trials of each target's search, with a link to the plan file."""
    name = plan_name(report)
    link = f'<a href="{escape(quote(encodable(name)))}">{escape(name)}</a>'
    for target in report.targets:
        if target.search is not None:
            own = target_suffix(report, target.name, " for ")
            kept = f" It is kept in {link}." if name else ""
            html = f"<p>Built: {escape(search_words(target.search))}.{kept}</p>"
            tried = target.search.tried
            html += trials(tried) if tried else ""
            yield Section(title=f"Search{own}", html=html, rows=len(tried))


def nodes(report: Findings) -> Iterator[Section]:
    """Yield the coverage of each target, and why other nodes stay float."""
    targets = built_targets(report)
    if not targets:
        return
    alone = len(report.targets) == 1
    html = [
        _covered_alone(targets[0]) if alone else _covered(targets),
        _float(targets, alone=alone),
    ]
    yield Section(title="Nodes", html="\n".join(filter(None, html)))


def _covered_alone(target: TargetPart) -> str:
    operators = quantized_operators(target)
    words = f"<p>{escape(coverage(target) + (': ' + operators if operators else ''))}.</p>"
    return words + (f"<p>Options: {escape(target.typed)}.</p>" if target.typed else "")


def _covered(targets: Sequence[TargetPart]) -> str:
    rows = ([t.name, coverage(t), quantized_operators(t), t.method, t.typed] for t in targets)
    return page.table(["target", "nodes", "operators", "ranges by", "options"], rows, "words")


def _float(targets: Sequence[TargetPart], *, alone: bool) -> str:
    """Return a table of the reasons for float nodes, each reason once, with its nodes."""
    heads = ["float operator", "nodes", "why it stays float"]
    rows = []
    for group in float_groups(targets):
        where = group.places
        names = "<br>".join(page.nodes(names) for names, _ in where)
        on = "<br>".join(escape(", ".join(on)) for _, on in where)
        cells = [page.breakable(group.op), names, page.breakable(group.reason)]
        rows.append([*cells, *([] if alone else [on])])
    return page.raw_table(heads if alone else [*heads, "on"], rows, "words") if rows else ""


def engine_layers(report: Findings) -> Iterator[Section]:
    """Yield the comparison of each engine's layers with its plan."""
    for engine in report.engines:
        words = engine_layers_words(engine.ran) if engine.ran else ""
        if engine.ran and words:
            rows = engine.ran.otherwise
            html = f"<p>{escape(words)}.</p>"
            html += page.table(DEVIATION_HEADS, rows, "words") if rows else ""
            title = f"In the engine of {engine.target}"
            yield Section(title=title, html=html, rows=len(rows))


def tensors(report: Findings) -> Iterator[Section]:
    """Yield the ranges in each target's files, the worst first."""
    shown = [target for target in report.targets if target.tensors]
    for number, target in enumerate(shown):
        own = target_suffix(report, target.name)
        words = "" if number else f'<p class="sub">{_RANGE_WORDS}</p>'
        html = words + _ranges(target)
        yield Section(title=f"Tensors{own}", html=html, rows=len(target.tensors))


def _ranges(target: TargetPart) -> str:
    heads = ["tensor", "range", "SQNR", "clipped", "min", "max", "low", "high", "amax", "method"]
    rows = []
    for row in worst_first(target.tensors):
        numbers = (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)
        cells = [figures.decibels(row.sqnr_db), figures.percent(row.clipped)]
        cells += [*map(figures.real, numbers), row.method]
        rows.append([page.breakable(row.name), range_bar(row), *map(page.breakable, cells)])
    return page.raw_table(heads, rows, "tensors")


def layers(report: Findings) -> Iterator[Section]:
    """Yield a target's inner tensors, the worst first, unless its table of ranges has them all."""
    for target in report.targets:
        shown = {row.name for row in target.tensors}
        if not shown.issuperset(row.name for row in target.layers):
            own = target_suffix(report, target.name)
            rows = [
                [row.name, figures.decibels(row.sqnr_db), figures.cosine(row.cosine_mean)]
                for row in worst_first(target.layers)
            ]
            html = page.table(["tensor", "SQNR", "cosine"], rows)
            yield Section(title=f"Inner tensors{own}", html=html, rows=len(rows))


_WIDTH, _HEIGHT = 120, 26
_DECADES = 4  # range of a strip's logarithmic scale, below the largest
_WORDS = (
    "Largest |w| of each output channel: the least, the median and the largest of them, the ratio"
    " of the largest to the least, and the channel that lies lowest. Used: of the grid's steps, by"
    " the lowest channel; few where all share one scale, all where each has its own and no bias"
    " wants a wider one. Dead channels, below a millionth of the largest, are in no other figure."
)


def weights(report: Findings) -> Iterator[Section]:
    """Yield the weights of each target, the worst first."""
    shown = [target for target in report.targets if target.weights]
    for number, target in enumerate(shown):
        own = target_suffix(report, target.name)
        words = "" if number else f'<p class="sub">{escape(_WORDS)}</p>'
        rows = []
        for row in worst_weights(target.weights):
            name, *cells = map(page.breakable, weight_row(row))
            rows.append([name, strip(row), *cells])
        heads = [WEIGHT_HEADS[0], "by channel", *WEIGHT_HEADS[1:]]
        html = words + page.raw_table(heads, rows, "tensors")
        yield Section(title=f"Weights{own}", html=html, rows=len(rows))


def strip(row: WeightRow) -> str:
    """Draw a weight's channels as bars on a logarithmic scale; "" if not in the row."""
    if not row.strip or not row.largest > 0:
        return ""
    step = _WIDTH / len(row.strip)
    path = "".join(
        f"M{place * step:.1f},{_HEIGHT}v-{_HEIGHT * _share(value, row.largest):.1f}"
        f"h{max(step - 0.4, 0.6):.1f}V{_HEIGHT}z"
        for place, value in enumerate(row.strip)
    )
    ends = f"{figures.real(row.least)} to {figures.real(row.largest)}"
    runs = "" if len(row.strip) == row.channels else "; each bar is the least of a run of channels"
    label = f"{row.node}: largest |w| of {row.channels} channels, {ends}{runs}"
    return drawing(_WIDTH, _HEIGHT, label, f'<path class="kept" d="{path}"/>', "bar")


def _share(value: float, largest: float) -> float:
    """Return a value's height, 0 to 1, on the logarithmic scale."""
    return max(1 + math.log10(value / largest) / _DECADES, 0.02) if value > 0 else 0.0


def views(report: Findings) -> Iterator[Section]:
    """Yield pictures of the calibration data, original and model input; none without pictures."""
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
    """Return a picture; `words`, its alternative text, must be HTML."""
    tiny = ' class="tiny"' if max(picture.width, picture.height) < BOX else ""
    return f'<img{tiny} src="{picture.uri}" alt="{words}">'


def _size(size: tuple[int, int]) -> str:
    """Format (height, width) as "HxW"."""
    return f"{size[0]}x{size[1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


_MOST_DRAWN = 100  # boxes of a kind in one drawing, the best by score


def examples(report: Findings) -> Iterator[Section]:
    """Yield a section per engine with such samples; the first one's boxes are unfolded."""
    in_page: set[int] = set()  # samples whose picture is in the page already
    for engine in report.engines:
        boxes = [row for row in engine.boxes if row.boxes is not None]
        changed = [row for row in engine.changed if row.picture is not None]
        if boxes:
            folded = bool(in_page)
            title = f"Boxes of FP32 and {engine.label}"
            yield Section(title=title, html=_pairs(boxes, engine.label, in_page), folded=folded)
        if changed:
            shown = "".join(_changed(row, engine.label) for row in changed)
            title = f"Samples of another class in {engine.label}"
            yield Section(title=title, html=f'<div class="views">{shown}</div>')


def _pairs(rows: Sequence[BoxRow], label: str, in_page: set[int]) -> str:
    """Return all drawings of one engine; adds its samples to `in_page`."""
    pairs = []
    for row in rows:
        if row.boxes is not None:
            pairs.append(_pair(row, row.boxes, label, drawn=row.boxes.number in in_page))
            in_page.add(row.boxes.number)
    words = _BOX_WORDS.format(rows[0].threshold)
    return f'<p class="sub">{words}</p><div class="pairs">{"".join(pairs)}</div>'


_BOX_WORDS = (
    "Where both differ most, over what the model sees; class and score at each box, from a score of"
    " {:g}. Green and solid: in both; red and dashed: lost, in FP32 alone; yellow and dotted: new,"
    " in the engine alone."
)


def _pair(row: BoxRow, boxes: DrawnBoxes, label: str, *, drawn: bool) -> str:
    """Return FP32's boxes and the engine's, side by side."""
    fp32_boxes = [(boxes.kept, "kept"), (boxes.lost, "lost")]
    engine_boxes = [(boxes.found, "kept"), (boxes.new, "new")]
    name = escape(encodable(row.sample))
    engine = escape(encodable(label))
    return (
        f'<div class="beside">{_drawing(boxes, fp32_boxes, f"FP32, {name}", drawn=drawn)}'
        f"{_drawing(boxes, engine_boxes, f'{engine}, {name}', drawn=True)}"
        f"<p>{breakable(encodable(row.sample))}: {escape(_counts(row))}</p></div>"
    )


def _counts(row: BoxRow) -> str:
    words = f"{row.kept} of {row.kept + row.lost} boxes kept, {row.new} new"
    if max(row.kept, row.lost, row.new) > _MOST_DRAWN:
        words += f"; the best {_MOST_DRAWN} of a kind are drawn"
    return words


def _drawing(
    row: DrawnBoxes, groups: Sequence[tuple[Sequence[DrawnBox], str]], title: str, *, drawn: bool
) -> str:
    """Draw boxes over the picture, which is defined at its first use and referenced later."""
    scale = LONG / max(row.size)
    width, height = row.size[1] * scale, row.size[0] * scale
    under = f'<use href="#look-{row.number}"/>'
    if not drawn:
        under = (
            f'<image id="look-{row.number}" width="{width:.1f}" height="{height:.1f}"'
            f' preserveAspectRatio="none" href="{row.picture.uri}"/>'
        )
    over = "".join(
        _box(one, kind, width, height) for own, kind in groups for one in own[:_MOST_DRAWN]
    )
    return (
        f'<svg class="boxes" viewBox="0 0 {width:.1f} {height:.1f}" role="img">'
        f"<title>{title}</title>{under}{over}</svg>"
    )


def _box(box: DrawnBox, kind: str, width: float, height: float) -> str:
    """Draw a rectangle, with its class and score kept inside the drawing."""
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
