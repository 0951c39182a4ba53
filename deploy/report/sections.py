"""Sections of the report, each a function that yields them from the findings.

Samples where the float model and an engine differ, with boxes drawn over the picture::

    FP32                      int8
    +------------------+      +------------------+
    |  [====]  kept    |      |  [====]  kept    |      kept: a solid line in both
    |  [- - ]  lost    |      |          [....]  |      lost: dashed, in FP32's picture
    +------------------+      +------------new---+      new:  dotted, in the engine's

Each picture is in the page once, however many engines are drawn over it.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from html import escape
from itertools import islice
from pathlib import PurePath

from deploy.errors import counted
from deploy.files.manifest import RECORDS
from deploy.report import charts, figures, tables
from deploy.report.blocks import (
    Block,
    Bullets,
    Cell,
    Drawing,
    Paragraph,
    Section,
    Table,
    breakable,
)
from deploy.report.figures import encodable, engine_layers_text
from deploy.report.model import Findings
from deploy.report.page import DRAWING_PX, PICTURE_PX
from deploy.report.parts import TensorRow
from deploy.report.previews import BoxPicture, BoxRow, ClassRow, Raster, ViewRow
from deploy.report.report_rows import float_groups, worst_first, worst_rows
from deploy.report.tables import target_suffix
from deploy.tasks.detections import Detections
from deploy.tuning.reasons import NOISE, NOISE_NOTE, reason_kind

Sections = Iterator[Section]

_MAX_LAYERS = 10  # worst layers shown
_MAX_LAYERS_OF_TARGET = 5  # if there are several targets
_MAX_BOXES = 100  # of a kind in one drawing, the best by score
_LABEL_HEIGHT = 12  # in px, of a box's class and score

_FRONT_TEXT = (
    "Each number is a split that --split builds without a search: time across, FP32's is 1, and"
    " SQNR of the worst part up, where FP32 is exact."
)
_BOX_TEXT = (
    "Where both differ most, over what the model sees; class and score at each box, from a score of"
    " {:g}. Green and solid: in both; red and dashed: lost, in FP32 alone; yellow and dotted: new,"
    " in the engine alone."
)


def _engines(report: Findings) -> Sections:
    """Yield the distribution of latency, and the engines side by side."""
    lines = tables.engine_lines(report)
    if not lines:
        return

    blocks: list[Block] = []
    for on_device in (False, True):  # times of two clocks, each on an axis of its own
        figure = charts.latency_figure(report.engines, on_device=on_device)
        if figure:
            engines = [engine for engine in report.engines if engine.on_device == on_device]
            caption = charts.LATENCY_CAPTION.format(tables.time_name(engines))
            blocks.append(Drawing(figure, caption))
    heads = ["", *(engine.label for engine in report.engines), ""]
    rows = [[line.label, *line.cells, line.change] for line in lines]
    blocks.append(Table(heads, rows, "engines"))
    yield Section("Engines", blocks, folded=False)


def _batches(report: Findings) -> Sections:
    """Yield p50 and throughput by batch."""
    heads, rows = charts.sweep_table(report.engines)
    if rows:
        yield Section("Batches", (Table(heads, rows),), folded=False)


def _kernels(report: Findings) -> Sections:
    """Yield the kernels by kind, then every kernel of each engine."""
    engines = tables.timed_engines(report.engines)
    heads, kind_rows = tables.kind_table(engines)
    if kind_rows:
        yield Section("Kernels by kind", (Table(heads, kind_rows),), rows=len(kind_rows))
    for engine in engines:
        rows = tables.kernel_rows(engine)
        table = Table(tables.KERNEL_HEADS, rows, "words")
        yield Section(f"Kernels of {engine.label}", (table,), rows=len(rows))


def _accuracy(report: Findings) -> Sections:
    """Yield the task's figure of each engine, and the errors of its output slices and outputs."""
    sample_counts = []
    notes = []
    slice_rows = []
    output_rows = []
    for engine in report.engines:
        accuracy = engine.accuracy
        if accuracy is None:
            continue
        sample_counts.append(counted(accuracy.samples, "sample"))
        notes += [f"{engine.label}: {text}" for text in tables.accuracy_notes(accuracy)]
        if tables.has_slices(accuracy):
            for part in accuracy.parts:
                slice_rows.append([engine.label, *tables.accuracy_row(part.label, part)])
        for output in accuracy.outputs:
            output_rows.append([engine.label, *tables.accuracy_row(output.name, output)])
    if not sample_counts:
        return

    samples = " and ".join(dict.fromkeys(sample_counts))
    blocks: list[Block] = [Paragraph(f"Over {samples}, against the float model.", note=True)]
    if notes:
        blocks.append(Bullets(notes))
    if slice_rows:
        blocks.append(Table(["engine", "part", *tables.ACCURACY_HEADS], slice_rows))
    blocks.append(Table(["engine", "output", *tables.ACCURACY_HEADS], output_rows))
    yield Section("Accuracy", blocks, folded=False)


def _worst_layers(report: Findings) -> Sections:
    """Yield the inner tensors that lose most on each target, with the range of each."""
    heads = [*tables.LAYER_HEADS, "clipped"]
    max_layers = _MAX_LAYERS
    has_several_targets = len(report.targets) > 1
    if has_several_targets:
        heads.append("on")
        max_layers = _MAX_LAYERS_OF_TARGET
    rows = []
    bars = []
    for target in report.targets:
        range_by_tensor = {row.name: row for row in target.tensors}
        for layer in worst_rows(target.layers, max_layers):
            clipped = None
            bar = ""
            tensor_range = range_by_tensor.get(layer.name)
            if tensor_range is not None:
                clipped = tensor_range.clipped
                bar = charts.range_bar(tensor_range)
            # without the cells of an `accuracy_row` that have no head here
            accuracy_cells = tables.accuracy_row(layer.name, layer)[: len(tables.LAYER_HEADS)]
            cells = [*accuracy_cells, figures.percent(clipped)]
            if has_several_targets:
                cells.append(target.name)
            rows.append(cells)
            bars.append(bar)
    if rows:
        table = Table(heads, rows, "tensors", bars)
        yield Section("Worst layers", (table,), folded=False)


def _notes(report: Findings) -> Sections:
    """Yield all notes and alerts."""
    if report.warnings:
        yield Section("Notes", (Bullets(report.warnings),), rows=len(report.warnings))


def _calibration(report: Findings) -> Sections:
    """Yield how the ranges were found, and from which data."""
    facts = list(_calibration_facts(report))
    if not facts:
        return
    blocks: list[Block] = [Bullets(facts)]
    agreement = report.calibration.agreement if report.calibration else None
    if agreement and agreement.differences:
        rows = [(name, figures.percent(share)) for name, share in agreement.differences.items()]
        blocks.append(Table(["tensor", "halves differ by"], rows))
    yield Section("Calibration", blocks)


def _calibration_facts(report: Findings) -> Iterator[str]:
    """Yield what is known of the calibration and its data, each as "term: value"."""
    if calibration := report.calibration:
        yield f"Calibration: {tables.calibration_text(report)}"
        if calibration.agreement:
            yield f"Ranges: {calibration.agreement.sentence}"
        for group in calibration.groups:
            yield f"Observed: {tables.group_text(group)}"
        if calibration.cache:
            yield f"Cache: {calibration.cache}"
    if feed := report.feed:
        yield f"Feed: {counted(feed.samples, 'sample')} from {feed.source}"
        for name, value in feed.preprocess.items():
            if value is not None:
                yield f"{name}: {value}"
        for text in feed.skipped:
            yield f"Skipped: {text}"
        for text in feed.evaluation_skipped:
            yield f"Skipped evaluation image: {text}"


def _search(report: Findings) -> Sections:
    """Yield the front of each target's search, and the path of the plan file."""
    plan = tables.path_of(report.files, tables.PLAN)
    for target in report.targets:
        search = target.search
        if search is None:
            continue
        text = f"Built: {tables.search_text(search)}."
        if plan:
            text += f" It is kept in {RECORDS}/{PurePath(plan).name}."  # beside the report
        blocks: list[Block] = [Paragraph(text)]
        if search.front:
            figure = charts.front_figure(search.front)
            if figure:
                blocks.append(Drawing(figure, _FRONT_TEXT))
            rows = list(map(tables.split_row, search.front))
            blocks.append(Table(tables.FRONT_HEADS, rows, "front"))
        title = f"Splits{target_suffix(report, target.name, ' for ')}"
        yield Section(title, blocks, rows=len(search.front), folded=len(search.front) < 2)


def _nodes(report: Findings) -> Sections:
    """Yield the coverage of each target, and why other nodes stay float."""
    targets = tables.built_targets(report)
    if not targets:
        return

    rows = []
    for target in targets:
        coverage = tables.coverage(target)
        operators = tables.quantized_operators(target)
        rows.append((target.name, coverage, operators, target.method, target.options_text))
    blocks: list[Block] = [
        Table(["target", "nodes", "operators", "ranges by", "options"], rows, "words")
    ]

    has_several_targets = len(report.targets) > 1  # with those that could not be built
    float_heads = ["float operator", "nodes", "why it stays float"]
    if has_several_targets:
        float_heads.append("on")
    float_rows: list[list[Cell]] = []
    groups = float_groups(targets)
    for group in groups:
        # targets on which the same nodes stay float share a row
        for node_names, target_names in group.nodes_and_targets:
            cells: list[Cell] = [group.op, node_names, group.reason]
            if has_several_targets:
                cells.append(", ".join(target_names))
            float_rows.append(cells)
    if float_rows:
        blocks.append(Table(float_heads, float_rows, "words"))
    if any(reason_kind(group.reason) == NOISE for group in groups):
        blocks.append(Paragraph(f"{NOISE_NOTE}."))
    yield Section("Nodes", blocks)


def _engine_layers(report: Findings) -> Sections:
    """Yield the comparison of each engine's layers with its plan."""
    for engine in report.engines:
        if engine.ran is None:
            continue
        text = engine_layers_text(engine.ran)
        if text:
            rows = list(map(astuple, (*engine.ran.lost, *engine.ran.gained)))
            blocks: list[Block] = [Paragraph(f"{text}.")]
            if rows:
                heads = ["node", "operator", "planned in", "runs in"]
                blocks.append(Table(heads, rows, "words"))
            yield Section(f"In the engine of {engine.target}", blocks, rows=len(rows))


_TENSOR_HEADS = ("tensor", "SQNR", "clipped", "min", "max", "low", "high", "amax", "method")


def tensor_sections(report: Findings) -> Sections:
    """Yield the ranges in each target's files, the worst first."""
    for target in report.targets:
        if target.tensors:
            tensors = worst_first(target.tensors)
            rows = list(map(_tensor_row, tensors))
            bars = list(map(charts.range_bar, tensors))
            title = f"Tensors{target_suffix(report, target.name)}"
            yield Section(title, (Table(_TENSOR_HEADS, rows, "tensors", bars),), rows=len(rows))


def _tensor_row(row: TensorRow) -> list[str]:
    """Return a tensor's range under `_TENSOR_HEADS`."""
    ends = (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)
    return [
        row.name,
        figures.decibels(row.sqnr_db),
        figures.percent(row.clipped),
        *map(figures.real, ends),
        row.method,
    ]


def _machine(report: Findings) -> Sections:
    """Yield the machine that ran it, with the versions of its packages."""
    if machine := report.machine:
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        facts = [
            f"CPU: {machine.cpu_text}",
            f"int8 instructions: {', '.join(machine.int8) or 'none found'}",
            *(f"Device: {device}" for device in report.device_texts),
            f"System: {machine.os}",
            f"Versions: {versions}",
        ]
        yield Section("Machine", (Bullets(facts),))


def _files(report: Findings) -> Sections:
    """Yield the files that were written."""
    rows = [(file.path, file.role, figures.size(file.size_bytes)) for file in report.written]
    if rows:
        yield Section(
            "Files", (Table(["file", "what it is", "size"], rows, "words"),), rows=len(rows)
        )


def _work(report: Findings) -> Sections:
    """Yield the cost of the run in inferences and decoded images."""
    if report.work:
        yield Section("Work", (Bullets([*tables.work_texts(report.work)]),))


def _views(report: Findings) -> Sections:
    """Yield pictures of some samples: the file, and what the model is fed; none for other data."""
    part = report.feed.pictures if report.feed else None
    if part is None or not part.views:
        return

    # `how` says what the pictures of the inputs show
    if any(row.source_image is not None for row in part.views):
        text = f"Left the file, right {part.how}"
    else:
        text = part.how[:1].upper() + part.how[1:]
    views = f'<div class="views">{"".join(map(_view, part.views))}</div>'
    blocks = (Drawing(f'<p class="sub">{escape(text)}.</p>{views}'),)
    yield Section("What the model sees", blocks, folded=False)


def _view(row: ViewRow) -> str:
    """Return one sample as HTML: the picture in its file, the model's input, and both sizes."""
    name = encodable(row.name)
    pictures = ""
    sizes = _size_text(row.input_size)
    if row.source_image is not None:
        pictures = image(row.source_image, f"{name}, the file")
    if row.source_size is not None:
        sizes = f"{_size_text(row.source_size)} fed as {sizes}"
    pictures += image(row.input_image, f"{name}, as fed")
    return f"<div>{pictures}<p>{breakable(name)}<br>{sizes}</p></div>"


def image(picture: Raster, description: str) -> str:
    """Return a picture with a plain text as its alternative."""
    is_tiny = max(picture.width, picture.height) < PICTURE_PX
    kind = ' class="tiny"' if is_tiny else ""
    return f'<img{kind} src="{picture.uri}" alt="{escape(description)}">'


def _size_text(size: tuple[int, int]) -> str:
    """Format (height, width) as "HxW"."""
    return f"{size[0]}x{size[1]}"


def _examples(report: Findings) -> Sections:
    """Yield the samples in which each engine differs most from FP32: their boxes or classes.

    Only the boxes of the first engine that has any are unfolded.
    """
    samples_in_page: set[int] = set()  # indices of samples whose picture is in the page already
    for engine in report.engines:
        drawings = ""
        is_folded = bool(samples_in_page)  # an engine above has boxes
        for box_row in engine.boxes:
            box_picture = box_row.boxes  # None in a report that was read from its JSON
            if box_picture is not None:
                number = box_picture.example.number
                is_in_page = number in samples_in_page
                drawings += _box_pair(box_row, box_picture, engine.label, is_in_page=is_in_page)
                samples_in_page.add(number)
        if drawings:
            text = _BOX_TEXT.format(engine.boxes[0].threshold)
            body = f'<p class="sub">{text}</p><div class="pairs">{drawings}</div>'
            title = f"Boxes of FP32 and {engine.label}"
            yield Section(title, (Drawing(body),), folded=is_folded)

        pictures = ""
        for changed_row in engine.changed:
            if changed_row.picture is not None:
                pictures += _changed_class(changed_row, changed_row.picture, engine.label)
        if pictures:
            drawing = Drawing(f'<div class="views">{pictures}</div>')
            yield Section(f"Samples of another class in {engine.label}", (drawing,))


def _box_pair(row: BoxRow, box_picture: BoxPicture, label: str, *, is_in_page: bool) -> str:
    """Return FP32's boxes and the engine's over one sample, side by side, as HTML.

    Args:
        row: the sample's name, and how many boxes are kept, lost and new.
        box_picture: the sample, with the boxes of FP32 and of the engine.
        label: name of the engine.
        is_in_page: whether the page has the picture already; then it is referred to by its id.
    """
    name = encodable(row.sample)
    example = box_picture.example
    fp32_body = _picture_reference(box_picture) if is_in_page else _picture_definition(box_picture)
    fp32_body += _boxes(box_picture, example.kept, "kept")
    fp32_body += _boxes(box_picture, example.lost, "lost")
    engine_body = _picture_reference(box_picture)  # FP32's drawing has defined it
    engine_body += _boxes(box_picture, example.found, "kept")  # its boxes that match FP32's
    engine_body += _boxes(box_picture, example.new, "new")

    text = f"{row.kept} of {counted(row.kept + row.lost, 'box')} kept, {row.new} new"
    if max(row.kept, row.lost, row.new) > _MAX_BOXES:
        text += f"; the best {_MAX_BOXES} of a kind are drawn"
    return (
        f'<div class="beside">{_box_drawing(box_picture, fp32_body, f"FP32, {name}")}'
        + _box_drawing(box_picture, engine_body, f"{encodable(label)}, {name}")
        + f"<p>{breakable(name)}: {escape(text)}</p></div>"
    )


def _drawing_size(box_picture: BoxPicture) -> tuple[float, float]:
    """Return width and height of a drawing in px."""
    height, width = box_picture.example.size
    scale = DRAWING_PX / max(height, width)
    return width * scale, height * scale


def _box_drawing(box_picture: BoxPicture, body: str, title: str) -> str:
    """Return one picture with its boxes as SVG; `body`: its elements."""
    width, height = _drawing_size(box_picture)
    return (
        f'<svg class="boxes" viewBox="0 0 {width:.1f} {height:.1f}" role="img">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _picture_definition(box_picture: BoxPicture) -> str:
    """Return the picture at its first use in the page."""
    width, height = _drawing_size(box_picture)
    return (
        f'<image id="look-{box_picture.example.number}" width="{width:.1f}" height="{height:.1f}"'
        f' preserveAspectRatio="none" href="{box_picture.picture.uri}"/>'
    )


def _picture_reference(box_picture: BoxPicture) -> str:
    """Return a reference to the picture that is in the page already."""
    return f'<use href="#look-{box_picture.example.number}"/>'


def _boxes(box_picture: BoxPicture, detections: Detections, line_style: str) -> str:
    """Draw boxes, each with its class and score, cut off at the edges of the drawing.

    Args:
        box_picture: the sample.
        detections: those of its boxes to draw.
        line_style: class of the lines in the page's style: "kept", "lost" or "new".
    """
    width, height = _drawing_size(box_picture)  # in px, as all numbers here
    input_height, input_width = box_picture.example.size  # in pixels
    # corners as shares of the input's sides
    shares = detections.boxes / (input_width, input_height, input_width, input_height)
    boxes = zip(
        shares.tolist(), detections.classes.tolist(), detections.scores.tolist(), strict=True
    )
    body = ""
    for (left, top, right, bottom), class_number, score in islice(boxes, _MAX_BOXES):
        x1 = _clamp(left * width, width)
        x2 = _clamp(right * width, width)
        y1 = _clamp(top * height, height)
        y2 = _clamp(bottom * height, height)
        label_start = f'<text x="{x1 + 2:.1f}"'  # it begins at the left edge of its box
        if x1 > width / 2:  # the drawing would cut a long name off: it ends at the right edge
            label_start = f'<text class="end" x="{x2 - 2:.1f}"'
        text_y = y1 - 3
        if y1 <= _LABEL_HEIGHT:  # no room above the box
            text_y = y1 + _LABEL_HEIGHT - 1
        class_name = box_picture.class_names.get(class_number, str(class_number))
        body += (
            f'<rect class="{line_style}" x="{x1:.1f}" y="{y1:.1f}" width="{max(x2 - x1, 0):.1f}"'
            f' height="{max(y2 - y1, 0):.1f}"/>{label_start} y="{text_y:.1f}">'
            f"{escape(encodable(class_name))} {score:.2f}</text>"
        )
    return body


def _clamp(position: float, length: float) -> float:
    """Return a position, moved into the drawing if it lies outside 0 to `length`."""
    return min(max(position, 0.0), length)


def _changed_class(row: ClassRow, picture: Raster, label: str) -> str:
    """Return a sample of another class in an engine as HTML; `label`: name of the engine."""
    name = encodable(row.sample)
    text = (
        f"{row.output}: FP32 class {row.fp32} ({row.fp32_value:.3g}),"
        f" {label} class {row.engine} ({row.engine_value:.3g})"
    )
    caption = f"{breakable(name)}<br>{escape(encodable(text))}"
    return f"<div>{image(picture, name)}<p>{caption}</p></div>"


# In the order of the report. A new section is a function that yields it, and its entry here.
SECTIONS: tuple[Callable[[Findings], Sections], ...] = (
    _engines,
    _search,
    _batches,
    _kernels,
    _accuracy,
    _examples,
    _worst_layers,
    _views,
    _notes,
    _calibration,
    _nodes,
    _engine_layers,
    tensor_sections,
    _machine,
    _files,
    _work,
)
