"""Sections of the report, each a function that yields them from the findings.

Samples where the float model and an engine differ, with boxes drawn over the picture::

    FP32                      int8
    +------------------+      +------------------+
    |  [====]  kept    |      |  [====]  kept    |      kept: a solid line in both
    |  [- - ]  lost    |      |          [....]  |      lost: dashed, in FP32's picture
    +------------------+      +------------new---+      new:  dotted, in the engine's

Each picture is in the page once, however many engines are drawn over it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from deploy.report import charts, figures, tables
from deploy.report.blocks import (
    Block,
    Bullets,
    Cell,
    Drawing,
    Facts,
    Heading,
    Paragraph,
    Section,
    Table,
    breakable,
)
from deploy.report.figures import DEVIATION_HEADS, encodable, engine_layers_text
from deploy.report.model import Findings
from deploy.report.page import BOX, LONG
from deploy.report.parts import TrialRow
from deploy.report.previews import BoxRow, ClassRow, DrawnBox, DrawnBoxes, Raster, ViewRow
from deploy.report.report_rows import float_groups, worst_first, worst_rows, worst_weights
from deploy.report.tables import target_suffix

Sections = Iterator[Section]

_MOST = 10  # worst layers shown
_MOST_OF_EACH = 5  # of each target, if there are several
_RANGE_WORDS = (
    "Thin line: values seen. Bar: range kept by the scale. Tick: zero."
    " Each drawing has its own scale."
)
_TRIAL_TEXT = (
    "Bar: SQNR of the worst part, beside the best of all; a higher one is nearer to FP32. Line"
    " below it: the time, beside the longest."
)
_WEIGHT_WORDS = (
    "Largest |w| of each output channel: the least, the median and the largest of them, the ratio"
    " of the largest to the least, and the channel that lies lowest. Used: of the grid's steps, by"
    " the lowest channel; few where all share one scale, all where each has its own and no bias"
    " wants a wider one. Dead channels, below a millionth of the largest, are in no other figure."
)
_HISTOGRAM_WORDS = (
    "Bars: how often values were seen, by the logarithm. Dashed: the ends of the range that is"
    " kept; bars of another colour lie beyond, and count as clipped where a reader looks. Marks on"
    " top: what other searches find in the same histogram. Each drawing has its own scales."
)


def _engines(report: Findings) -> Sections:
    lines = tables.engine_lines(report)
    if lines:
        curves = [
            Drawing(figure, charts.LATENCY_CAPTION)
            for on_device in (False, True)  # on separate axes
            if (figure := charts.latency_figure(report.engines, on_device=on_device))
        ]
        heads = ["", *(engine.label for engine in report.engines), ""]
        rows = [[line.label, *line.cells, line.change] for line in lines]
        yield Section("Engines", (*curves, Table(heads, rows, "engines")), folded=False)


def _batches(report: Findings) -> Sections:
    heads, rows = charts.sweep_table(report.engines)
    if rows:
        figure = charts.sweep_figure(report.engines)
        words = "Items a second, the batch over p50; the larger point is the best."
        chart = [Drawing(figure, words)] if figure else []
        yield Section("Batches", (*chart, Table(heads, rows)), folded=False)


def _kernels(report: Findings) -> Sections:
    """Yield kernels by kind, then every kernel of each engine."""
    timed = tables.timed_engines(report.engines)
    heads, kinds = tables.kind_table(timed)
    blocks: list[Block] = [Table(heads, kinds)] if kinds else []
    for engine in timed:
        kernels = Table(tables.KERNEL_HEADS, tables.kernel_rows(engine), "words")
        blocks += [Heading(engine.label), kernels]
    if blocks:
        yield Section("Kernels", blocks, max(len(engine.kernels) for engine in timed))


def _accuracy(report: Findings) -> Sections:
    compared = [(e.label, e.accuracy) for e in report.engines if e.accuracy]
    if not compared:
        return
    over = " and ".join(dict.fromkeys(figures.count(a.samples, "sample") for _, a in compared))
    blocks: list[Block] = [Paragraph(f"Over {over}, against the float model.", note=True)]
    notes = [f"{label}: {text}" for label, one in compared for text in tables.accuracy_notes(one)]
    slices = [
        [label, *tables.accuracy_row(part.label, part)]
        for label, one in compared
        for part in (one.parts if tables.has_slices(one) else ())
    ]
    outputs = [
        [label, *tables.accuracy_row(output.name, output)]
        for label, one in compared
        for output in one.outputs
    ]
    blocks += [Bullets(notes)] if notes else []
    blocks += [Table(["engine", "part", *tables.ACCURACY_HEADS], slices)] if slices else []
    blocks += [Table(["engine", "output", *tables.ACCURACY_HEADS], outputs)]
    yield Section("Accuracy", blocks, folded=False)


def _worst(report: Findings) -> Sections:
    """Yield the inner tensors that lose most on each target."""
    alone = len(report.targets) == 1
    rows, bars = [], []
    for target in report.targets:
        ranges = {row.name: row for row in target.tensors}
        for layer in worst_rows(target.layers, _MOST if alone else _MOST_OF_EACH):
            held = ranges.get(layer.name)
            bars.append(charts.range_bar(held) if held else "")
            clipped = figures.percent(held.clipped if held else None)
            rows.append([*tables.layer_row(layer), clipped, *([] if alone else [target.name])])
    if rows:
        heads = [*tables.LAYER_HEADS, "clipped", *([] if alone else ["on"])]
        table = Table(heads, rows, "tensors", ("range", bars, _RANGE_WORDS))
        yield Section("Worst layers", (table,), folded=False)


def _histograms(report: Findings) -> Sections:
    """Yield the histograms of each target's worst tensors, the worst first."""
    for target in report.targets:
        drawn = [
            charts.histogram_figure(row, row.histogram)
            for row in worst_first(target.tensors)
            if row.histogram is not None
        ]
        if drawn:
            body = (
                f'<p class="sub">{_HISTOGRAM_WORDS}</p>\n<div class="drawn">{"".join(drawn)}</div>'
            )
            title = f"Histograms{target_suffix(report, target.name)}"
            yield Section(title, (Drawing(body),), len(drawn))


def _notes(report: Findings) -> Sections:
    if report.warnings:
        yield Section("Notes", (Bullets(report.warnings),), len(report.warnings))


def _setup(report: Findings) -> Sections:
    facts: list[tuple[str, str]] = []
    apart: Sequence[Sequence[str]] = ()
    if report.calibration:
        part = report.calibration
        facts.append(("Calibration", tables.calibration_text(report)))
        if part.agreement:
            facts.append(("Ranges", part.agreement.words))
            apart = [
                [name, figures.percent(share)] for name, share in part.agreement.differences.items()
            ]
        facts += [("Observed", tables.group_text(group)) for group in part.groups]
        facts += [("Cache", part.cache)] if part.cache else []
    if report.feed:
        samples = figures.count(report.feed.samples, "sample")
        facts.append(("Feed", f"{samples} from {report.feed.source}"))
        facts += [(k, str(v)) for k, v in report.feed.preprocess.items() if v is not None]
        facts += [("Skipped", text) for text in report.feed.skipped]
    facts += [(step, f"{seconds:.1f} s") for step, seconds in report.seconds.items()]
    if facts:
        halves = [Table(["tensor", "halves differ by"], apart)] if apart else []
        yield Section("Calibration", (Facts(facts), *halves))


def _search(report: Findings) -> Sections:
    """Yield the trials of each target's search, with a link to the plan file."""
    plan = tables.plan_path(report)
    for target in report.targets:
        if target.search is not None:
            kept = " It is kept in" if plan else ""
            built = Paragraph(f"Built: {tables.search_text(target.search)}.{kept}", link=plan)
            tried = target.search.tried
            blocks = (built, trials(tried)) if tried else (built,)
            title = f"Search{target_suffix(report, target.name, ' for ')}"
            yield Section(title, blocks, len(tried))


def trials(tried: Sequence[TrialRow]) -> Table:
    """Return a table of the trials, with the one that was built in another colour."""
    best = max((t.sqnr_db for t in tried if math.isfinite(t.sqnr_db)), default=0.0)
    longest = max((t.time for t in tried if math.isfinite(t.time)), default=0.0)
    bars = [charts.trial_bar(trial, best, longest) for trial in tried]
    rows = [tables.trial_row(trial) for trial in tried]
    return Table(tables.TRIAL_HEADS, rows, "tensors", ("side by side", bars, _TRIAL_TEXT))


def _nodes(report: Findings) -> Sections:
    """Yield the coverage of each target, and why other nodes stay float."""
    targets = tables.built_targets(report)
    if not targets:
        return
    heads = ["target", "nodes", "operators", "ranges by", "options"]
    rows = [
        [t.name, tables.coverage(t), tables.quantized_operators(t), t.method, t.options_text]
        for t in targets
    ]
    blocks: list[Block] = [Table(heads, rows, "words")]
    floats: list[list[Cell]] = [
        [group.op, names, group.reason, *([", ".join(on)] if len(report.targets) > 1 else [])]
        for group in float_groups(targets)
        for names, on in group.nodes_and_targets
    ]
    if floats:
        heads = ["float operator", "nodes", "why it stays float", "on"][: len(floats[0])]
        blocks.append(Table(heads, floats, "words"))
    yield Section("Nodes", blocks)


def _engine_layers(report: Findings) -> Sections:
    """Yield the comparison of each engine's layers with its plan."""
    for engine in report.engines:
        words = engine_layers_text(engine.ran) if engine.ran else ""
        if engine.ran and words:
            rows = engine.ran.deviation_rows
            table = [Table(DEVIATION_HEADS, rows, "words")] if rows else []
            title = f"In the engine of {engine.target}"
            yield Section(title, (Paragraph(f"{words}."), *table), len(rows))


def tensors(report: Findings) -> Sections:
    """Yield the ranges in each target's files, the worst first."""
    heads = ["tensor", "SQNR", "clipped", "min", "max", "low", "high", "amax", "method"]
    for target in report.targets:
        if target.tensors:
            shown = worst_first(target.tensors)
            rows = [
                [
                    row.name,
                    figures.decibels(row.sqnr_db),
                    figures.percent(row.clipped),
                    *map(figures.real, (row.observed_min, row.observed_max)),
                    *map(figures.real, (row.lo, row.hi, row.amax)),
                    row.method,
                ]
                for row in shown
            ]
            bars = ("range", [charts.range_bar(row) for row in shown], _RANGE_WORDS)
            title = f"Tensors{target_suffix(report, target.name)}"
            yield Section(title, (Table(heads, rows, "tensors", bars),), len(rows))


def _layers(report: Findings) -> Sections:
    """Yield a target's inner tensors, the worst first, unless its table of ranges has them all."""
    for target in report.targets:
        shown = {row.name for row in target.tensors}
        if not shown.issuperset(row.name for row in target.layers):
            rows = [tables.layer_row(row) for row in worst_first(target.layers)]
            title = f"Inner tensors{target_suffix(report, target.name)}"
            yield Section(title, (Table(tables.LAYER_HEADS, rows),), len(rows))


def _weights(report: Findings) -> Sections:
    """Yield the weights of each target, the worst first."""
    for target in report.targets:
        if target.weights:
            shown = worst_weights(target.weights)
            rows = [tables.weight_row(row) for row in shown]
            strips = ("by channel", [charts.weight_strip(row) for row in shown], "")
            table = Table(tables.WEIGHT_HEADS, rows, "tensors", strips)
            title = f"Weights{target_suffix(report, target.name)}"
            yield Section(title, (Paragraph(_WEIGHT_WORDS, note=True), table), len(rows))


def _machine(report: Findings) -> Sections:
    if report.machine:
        machine = report.machine
        facts = [
            ("CPU", f"{machine.cpu}, {figures.count(machine.cores, 'core')}"),
            ("int8 instructions", ", ".join(machine.int8) or "none found"),
            *(("Device", device.description) for device in machine.devices),
            ("System", machine.os),
            ("Versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())),
        ]
        yield Section("Machine", (Facts(facts),))


def _files(report: Findings) -> Sections:
    rows = [[file.path, file.role, figures.size(file.size_bytes)] for file in report.written]
    if rows:
        yield Section("Files", (Table(["file", "what it is", "size"], rows, "words"),), len(rows))


def _work(report: Findings) -> Sections:
    if report.work:
        yield Section("Work", (Bullets([*tables.work_texts(report.work)]),))


def _views(report: Findings) -> Iterator[Section]:
    """Yield pictures of the calibration data, original and model input; none without pictures."""
    part = report.feed.pictures if report.feed else None
    if part is None or not part.views:
        return
    both = any(row.original is not None for row in part.views)
    left = "Left the file, right " if both else ""
    words = left + part.how if both else part.how[:1].upper() + part.how[1:]
    shown = f'<div class="views">{"".join(map(_view, part.views))}</div>'
    blocks = (Drawing(f'<p class="sub">{escape(words)}.</p>{shown}'),)
    yield Section("What the model sees", blocks, folded=False)


def _view(row: ViewRow) -> str:
    name = encodable(row.name)
    given = "" if row.original is None else image(row.original, escape(f"{name}, the file"))
    fed = image(row.model_input, escape(f"{name}, as fed"))
    sizes = _size(row.model_input_size)
    if row.original_size is not None:
        sizes = f"{_size(row.original_size)} fed as {sizes}"
    return f"<div>{given}{fed}<p>{breakable(name)}<br>{sizes}</p></div>"


def image(picture: Raster, words: str) -> str:
    """Return a picture; `words`, its alternative text, must be HTML."""
    tiny = ' class="tiny"' if max(picture.width, picture.height) < BOX else ""
    return f'<img{tiny} src="{picture.uri}" alt="{words}">'


def _size(size: tuple[int, int]) -> str:
    """Format (height, width) as "HxW"."""
    return f"{size[0]}x{size[1]}"


_MOST_DRAWN = 100  # boxes of a kind in one drawing, the best by score


def _examples(report: Findings) -> Iterator[Section]:
    """Yield a section per engine with such samples; the first one's boxes are unfolded."""
    in_page: set[int] = set()  # samples whose picture is in the page already
    for engine in report.engines:
        boxes = [row for row in engine.boxes if row.boxes is not None]
        changed = [row for row in engine.changed if row.picture is not None]
        if boxes:
            folded = bool(in_page)
            drawn = Drawing(_pairs(boxes, engine.label, in_page))
            yield Section(f"Boxes of FP32 and {engine.label}", (drawn,), folded=folded)
        if changed:
            shown = "".join(_changed(row, engine.label) for row in changed)
            drawn = Drawing(f'<div class="views">{shown}</div>')
            yield Section(f"Samples of another class in {engine.label}", (drawn,))


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
    fp32_boxes = [(boxes.matched_fp32, "kept"), (boxes.lost, "lost")]
    engine_boxes = [(boxes.matched_engine, "kept"), (boxes.new, "new")]
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
        f'<text x="{x:.1f}" y="{y:.1f}">{escape(encodable(box.kind))} {box.score:.2f}</text>'
    )


def _changed(row: ClassRow, label: str) -> str:
    words = (
        f"{row.output}: FP32 class {row.fp32} ({row.fp32_value:.3g}),"
        f" {label} class {row.engine} ({row.engine_value:.3g})"
    )
    name = encodable(row.sample)
    picture = "" if row.picture is None else image(row.picture, escape(name))
    return f"<div>{picture}<p>{breakable(name)}<br>{escape(encodable(words))}</p></div>"


# In the order of the report. A new section is a function that yields it, and its entry here.
SECTIONS: tuple[Callable[[Findings], Sections], ...] = (
    _engines, _batches, _kernels, _accuracy, _examples, _worst, _histograms, _views, _notes, _setup,
    _search, _nodes, _engine_layers, tensors, _layers, _weights, _machine, _files, _work,
)  # fmt: skip
