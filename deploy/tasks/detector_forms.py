"""Forms of detectors with a row per anchor, cell or query, in one output or several.

========================  ======================================================================
[1, 4+C, A]               boxes and a probability per class: YOLO v8, v9, v11
[1, A, 5+C]               boxes, objectness, classes: YOLO v5, v6, v7; relative to cells: YOLOX
[1, Q, 4+C]               relative boxes of queries: RT-DETR (Zhao et al. 2023)
[1, A, C + 4 (m + 1)]     probabilities, then distributions of distances: NanoDet
[1, 3 (5+C), H, W]        YOLO v3 to v7 before decoding, one output a level
[A, 4], [A, C]            boxes and scores in two outputs, or two a level, either transposed: SSD,
                          RetinaNet, DETR, PicoDet. A third output of one column multiplies the
                          scores: YuNet, FCOS. Boxes may have key points: BlazeFace, RetinaFace
========================  ======================================================================

A form needs no strides: rows with a score and four numbers are boxes if most detect nothing, and
their centres lie all over the picture.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deploy.tasks import thresholds
from deploy.tasks.detections import are_angles, make_masks
from deploy.tasks.detector import (
    ANCHOR_MAP,
    COLUMNS,
    MAP,
    ROWS,
    Columns,
    Layout,
    RowDecoder,
    RowLevel,
    find_grid,
    fits_stride,
    slice_columns,
    to_table,
)
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import Floats, activate, are_shares, correlate, image_size, sums_to_one
from deploy.tasks.slices import OutputSlice
from deploy.tensors import Array

_BOX = 4  # numbers of a box
_CENTRE_BOXES = ("pred_boxes", "dets")  # names of relative boxes by centre, of DETR's exporters


def find_detector(samples: FirstSamples, *, is_set: bool = False) -> RowDecoder | None:
    """Recognise rows of a detector; `is_set`: in any layout that fits, since a user says so."""
    return (
        _find_joined(samples, is_set=False)
        or _find_separate(samples, is_set=False)
        or _find_anchor_maps(samples)
        or (_find_separate(samples, is_set=True) if is_set else None)
        or (_find_joined(samples, is_set=True) if is_set else None)
    )


# --- boxes and scores in one output ---


def _find_joined(samples: FirstSamples, *, is_set: bool) -> RowDecoder | None:
    """Recognise boxes and scores in the rows of one output, if exactly one holds such."""
    decoders = []
    for name in samples.names:
        if _are_classes(samples.arrays(name)):
            continue
        for layout in _possible_layouts(samples.outputs[0][name].shape):
            decoder = _read_joined(name, layout, samples, is_set=is_set)
            if decoder is not None:
                decoders.append(decoder)
                break
    return decoders[0] if len(decoders) == 1 else None


def _possible_layouts(shape: tuple[int, ...]) -> list[Layout]:
    """Return the layouts in which an output may have a row per anchor: many more than columns."""
    if len(shape) not in (2, 3, 4) or (len(shape) > 2 and shape[0] != 1):
        return []
    if len(shape) == 4:
        return [MAP] if _are_anchors(shape[2] * shape[3], shape[1]) else []
    rows, columns = shape[-2:]
    layouts = []
    if _are_anchors(columns, rows):
        layouts.append(COLUMNS)
    if _are_anchors(rows, columns):
        layouts.append(ROWS)
    return layouts


def _are_anchors(row_count: int, column_count: int) -> bool:
    many = row_count >= thresholds.MIN_ROWS_PER_COLUMN * column_count
    return column_count > _BOX and (many or row_count >= thresholds.MIN_QUERIES)


def _read_joined(
    name: str, layout: Layout, samples: FirstSamples, *, is_set: bool
) -> RowDecoder | None:
    """Recognise the columns of an output: boxes, objectness, classes, and what comes after."""
    tables = _read_tables(name, layout, samples)
    sizes = [size for inputs in samples.inputs if (size := image_size(inputs)) is not None]
    if tables is None or len(sizes) != len(tables):
        return None
    rows = np.concatenate(tables)
    tolerance = thresholds.UNIT_TOLERANCE
    in_unit = (rows.min(axis=0) >= -tolerance) & (rows.max(axis=0) <= 1 + tolerance)
    decoder = _read_distributions(name, layout, rows, in_unit, samples)
    if decoder is not None:
        return decoder

    column_count = rows.shape[1]
    score_count = int(np.cumprod(in_unit[_BOX:]).sum())  # probabilities from column 4 on
    class_count = samples.declared.classes
    if class_count and score_count >= class_count:
        score_count = class_count + (column_count == _BOX + 1 + class_count)
    activation = ""
    if not score_count and is_set:
        score_count, activation = column_count - _BOX, "sigmoid"
    if not score_count:
        return None

    scores = activate(rows[:, _BOX : _BOX + score_count], activation)
    has_objectness = _has_objectness(scores, layout)
    best = scores.max(axis=1)
    if has_objectness:
        best = scores[:, 0] * scores[:, 1:].max(axis=1)
    if not is_set and not _mostly_empty(best):
        return None

    boxes = [table[:, :_BOX] for table in tables]
    coding = _find_coding(boxes, sizes, are_relative=bool(in_unit[:_BOX].all()))
    grid = None
    if coding is None and has_objectness:
        grid = find_grid(len(tables[0]), samples.picture_size)
        coding = "cell" if grid is not None and _are_cell_boxes(rows) else None
    if coding is None and not is_set:
        return None

    first_class = _BOX + has_objectness
    end = _BOX + score_count
    level = RowLevel(
        scores=Columns(name, layout, first_class, end),
        boxes=Columns(name, layout, 0, _BOX),
        gate=Columns(name, layout, _BOX, first_class) if has_objectness else None,
        extra=Columns(name, layout, end) if end < column_count else None,
        grid=grid,
    )
    columns = [Columns(name, layout, 0, _BOX), Columns(name, layout, _BOX, end)]
    if end < column_count:
        columns.append(Columns(name, layout, end, column_count))
    decoder = RowDecoder(
        levels=(level,),
        coding=coding or "",
        classes=end - first_class,
        activation=activation,
        gate_activation=activation,
        parts=slice_columns(columns),
    )
    return _read_extra(decoder, tables, samples, end)


def _read_tables(name: str, layout: Layout, samples: FirstSamples) -> list[Floats] | None:
    """Return the tables of all samples; None if they do not have one width, or are not finite."""
    tables = []
    for value in samples.arrays(name):
        table = to_table(value, layout)
        if table is None or not table.size or not np.isfinite(table).all():
            return None
        tables.append(table)
    return tables if len({table.shape[1] for table in tables}) == 1 else None


def _mostly_empty(best: Floats) -> bool:
    """Whether at least half of the rows detect nothing."""
    return bool(np.median(best) < thresholds.MAX_EMPTY_SCORE)


def _are_classes(values: Sequence[Array]) -> bool:
    """Whether values sum to 1 along a dimension, as classes of steps or of pixels do."""
    if values[0].ndim < 2:
        return False
    return any(all(sums_to_one(value, axis).all() for value in values) for axis in (1, -1, -2))


def _has_objectness(scores: Floats, layout: Layout) -> bool:
    """Whether the first column is an objectness: classes are arbitrary where there is no object.

    If the data do not show it, tables with the anchors first have it, as v5's and v7's do; those of
    queries, whose boxes are relative, have none.
    """
    if scores.shape[1] < 2:
        return False
    objectness = float(scores[:, 0].mean())
    best_class = float(scores[:, 1:].max(axis=1).mean())
    if best_class > thresholds.MAX_EMPTY_SCORE and objectness < best_class:
        return _mostly_empty(scores[:, 0])
    is_loud = max(best_class, objectness) > thresholds.MIN_QUIET_SCORE
    return layout == ROWS and is_loud and objectness >= best_class


def _find_coding(
    boxes: Sequence[Floats], sizes: Sequence[tuple[int, int]], *, are_relative: bool
) -> str | None:
    """Return "corners" or "centre" for boxes [A, 4] of each sample; None for neither.

    Their centres lie in the picture, all over it. `sizes`: (height, width) of each picture.
    """
    relative_boxes = []
    for sample_boxes, (height, width) in zip(boxes, sizes, strict=True):
        scale = np.ones(4) if are_relative else np.array([width, height, width, height])
        relative_boxes.append(sample_boxes / scale)
    rows = np.concatenate(relative_boxes)
    if _are_corners(rows):
        coding, centres = "corners", (rows[:, :2] + rows[:, 2:]) / 2
    elif _is_mostly(np.all(rows[:, 2:] >= 0, axis=1)):
        coding, centres = "centre", rows[:, :2]
    else:
        return None

    margin = thresholds.MAX_OUTSIDE_PICTURE
    is_inside = np.all((centres > -margin) & (centres < 1 + margin), axis=1)
    if is_inside.mean() < thresholds.MIN_INSIDE_SHARE:
        return None
    return coding if centres.std(axis=0).min() > thresholds.MIN_CENTRE_SPREAD else None


def _are_corners(rows: Floats) -> bool:
    """Whether the second corner is right of the first and below it, and moves with it."""
    if not _is_mostly(np.all(rows[:, 2:] >= rows[:, :2], axis=1)):
        return False
    return all(
        correlate(rows[:, k], rows[:, k + 2]) > thresholds.MIN_CORNER_CORRELATION for k in (0, 1)
    )


def _is_mostly(condition: np.ndarray) -> bool:
    return bool(np.mean(condition) >= thresholds.MIN_CODED_SHARE)


def _are_cell_boxes(rows: Floats) -> bool:
    """Whether boxes are relative to cells; logarithms of sizes have both signs."""
    is_small = np.abs(rows[:, :_BOX]).max(axis=1) < thresholds.MAX_CELL_OFFSET
    return _is_mostly(is_small) and rows[:, 2:_BOX].min() < 0


def _read_extra(
    decoder: RowDecoder, tables: Sequence[Floats], samples: FirstSamples, start: int
) -> RowDecoder:
    """Return the decoder with the columns from `start` on: mask weights, an angle or key points."""
    rows = np.concatenate(tables)
    extra, boxes = rows[:, start:], rows[:, :_BOX]
    width = extra.shape[1]
    if not width:
        return decoder
    maps = [name for name in samples.names if _are_prototypes(name, width, samples)]
    if len(maps) == 1:
        return replace(decoder, mask_maps=maps[0])
    if width == 1:
        has_angle = decoder.coding == "centre" and are_angles(extra)
        return replace(decoder, has_angle=has_angle)
    for numbers in (3, 2):
        if width % numbers == 0 and decoder.placed and _are_points(extra, boxes, numbers):
            return replace(decoder, point_numbers=numbers)
    return decoder


def _are_prototypes(name: str, count: int, samples: FirstSamples) -> bool:
    """Whether an output holds `count` prototype maps of masks, in every sample."""
    weights = np.zeros((1, count))
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=True):
        if value.shape[1:2] != (count,) or make_masks(weights, value, image_size(inputs)) is None:
            return False
    return True


def _are_points(extra: Floats, boxes: Floats, numbers: int) -> bool:
    """Whether columns are key points, which move with their boxes; a third number is visibility."""
    points = extra.reshape(len(extra), -1, numbers)
    if numbers == 3 and not are_shares(points[:, :, 2]):
        return False
    for axis, point in itertools.product((0, 1), range(points.shape[1])):
        if correlate(points[:, point, axis], boxes[:, axis]) <= thresholds.MIN_POINT_CORRELATION:
            return False
    return True


def _read_distributions(
    name: str, layout: Layout, rows: Floats, in_unit: np.ndarray, samples: FirstSamples
) -> RowDecoder | None:
    """Recognise classes, then distributions of distances from the cells of a grid: NanoDet."""
    class_count = int(np.cumprod(in_unit).sum())
    bins, remainder = divmod(rows.shape[1] - class_count, 4)
    if not class_count or remainder or bins < thresholds.MIN_BINS or in_unit[class_count:].any():
        return None
    grid = find_grid(len(rows) // len(samples.outputs), samples.picture_size)
    best = rows[:, :class_count].max(axis=1)
    if grid is None or rows[:, class_count:].min() >= 0 or not _mostly_empty(best):
        return None
    scores, distances = Columns(name, layout, 0, class_count), Columns(name, layout, class_count)
    level = RowLevel(scores=scores, boxes=distances, grid=grid)
    columns = [scores, replace(distances, stop=rows.shape[1])]
    return RowDecoder(
        levels=(level,),
        coding="distribution",
        classes=class_count,
        parts=slice_columns(columns),
    )


# --- boxes and scores in outputs of their own ---


class _Tables:
    """The outputs as tables: their layouts, and the rows of all samples."""

    def __init__(self, samples: FirstSamples) -> None:
        self.samples = samples
        self.layouts = _find_layouts(samples)
        self.rows: dict[str, Floats] = {}
        self.counts: dict[str, int] = {}  # rows of the first sample
        for name, layout in self.layouts.items():
            tables = _read_tables(name, layout, samples)
            if tables is not None and len(tables[0]) > 1:
                self.rows[name] = np.concatenate(tables)
                self.counts[name] = len(tables[0])

    def width(self, name: str) -> int:
        """Return the number of columns of an output."""
        return int(self.rows[name].shape[1])

    def columns(self, name: str, start: int = 0, stop: int | None = None) -> Columns:
        """Return columns of an output; all by default."""
        return Columns(name, self.layouts[name], start, stop)

    def groups(self) -> list[list[str]]:
        """Return the outputs with equally many anchors, which are of one level."""
        names_by_count: dict[int, list[str]] = {}
        for name, count in self.counts.items():
            names_by_count.setdefault(count, []).append(name)
        return [*names_by_count.values()]


def _find_layouts(samples: FirstSamples) -> dict[str, Layout]:
    """Return output -> its layout; the longer side of an output with four numbers is the anchors.

    Maps are rows of cells if there are as many as two levels have.
    """
    shapes = {name: samples.outputs[0][name].shape for name in samples.names}
    map_count = sum(len(shape) == 4 for shape in shapes.values())
    anchor_counts = set()
    for shape in shapes.values():
        if len(shape) == 3 and shape[0] == 1:
            anchor_counts.add(max(shape) if _BOX in shape[1:] else shape[1])
    layouts = {}
    for name, shape in shapes.items():
        if len(shape) == 4 and map_count >= 4:
            layouts[name] = MAP
        elif len(shape) == 3:
            is_transposed = shape[2] in anchor_counts and shape[1] < shape[2]
            layouts[name] = COLUMNS if is_transposed else ROWS
        elif len(shape) == 2:
            is_vector = shape[0] == 1 and shape[1] in anchor_counts
            layouts[name] = COLUMNS if is_vector else ROWS
    return layouts


def _find_separate(samples: FirstSamples, *, is_set: bool) -> RowDecoder | None:
    """Recognise outputs where every level has scores and boxes."""
    tables = _Tables(samples)
    groups = tables.groups()
    if is_set:
        groups = [names for names in groups if len(names) > 1]
    levels = []
    for names in groups:
        level = _pair_outputs(names, tables, is_set=is_set)
        if level is None:
            return None
        levels.append(level)
    anchor_count = sum(tables.counts[names[0]] for names in groups)
    gate_count = sum(level.gate is not None for level in levels)
    if not levels or gate_count not in (0, len(levels)):
        return None
    if anchor_count < thresholds.MIN_ANCHORS and not is_set:
        return None

    scores = [level.scores.output for level in levels]
    activation = _find_activation([tables.rows[name] for name in scores], samples, is_set=is_set)
    coding = _find_level_coding(levels, tables, is_set=is_set)
    if activation is None or coding is None:
        return None
    missing, background = activation
    if coding != "distribution" and any(tables.layouts[name] == MAP for name in scores):
        if background is not None or not _are_cells(samples):
            return None
        coding = ""
    gates = [level.gate.output for level in levels if level.gate is not None]
    are_raw_gates = not all(are_shares(tables.rows[name]) for name in gates)
    decoder = RowDecoder(
        levels=tuple(levels),
        coding=coding,
        classes=tables.width(scores[0]) - (background is not None),
        activation=missing,
        gate_activation="sigmoid" if are_raw_gates else "",
        background=background,
        point_numbers=2 if coding == "offset" and levels[0].extra else 0,
    )
    parts: dict[str, tuple[OutputSlice, ...]] = {}
    for names, level in zip(groups, levels, strict=True):
        parts |= _slice_level(names, level, decoder, samples)
    return replace(decoder, parts=parts)


def _are_cells(samples: FirstSamples) -> bool:
    """Whether all maps have the size of the picture over a stride, in every sample."""
    for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
        maps = [value for value in outputs.values() if value.ndim == 4]
        if not all(fits_stride(value.shape[2:], image_size(inputs)) for value in maps):
            return False
    return True


def _pair_outputs(names: Sequence[str], tables: _Tables, *, is_set: bool) -> RowLevel | None:
    """Choose the boxes, the scores and a gate among outputs with equally many anchors."""
    boxes, is_distribution = _find_boxes(names, tables)
    if is_set and len(boxes) != 1:  # the widest one
        boxes = sorted(names, key=lambda name: (are_shares(tables.rows[name]), -tables.width(name)))
        boxes = [name for name in boxes if tables.width(name) >= _BOX][:1]
    if len(boxes) != 1:
        return None
    (box_output,) = boxes
    grid = None
    if is_distribution:
        grid = find_grid(tables.counts[box_output], tables.samples.picture_size)

    candidates = [name for name in names if name != box_output]
    scores = [name for name in candidates if are_shares(tables.rows[name])]
    scores = scores or [name for name in candidates if tables.width(name) == 2] or candidates
    gates = [name for name in scores if tables.width(name) == 1]
    gate = None
    if len(scores) == 2 and gates:
        gate = tables.columns(gates[-1])
        scores = [name for name in scores if name != gate.output]
    if len(scores) != 1:
        return None

    has_points = not is_distribution and tables.width(box_output) > _BOX
    return RowLevel(
        scores=tables.columns(scores[0]),
        boxes=tables.columns(box_output, 0, None if is_distribution else _BOX),
        gate=gate,
        extra=tables.columns(box_output, _BOX) if has_points else None,
        grid=grid,
    )


def _find_boxes(names: Sequence[str], tables: _Tables) -> tuple[list[str], bool]:
    """Return the outputs that may be boxes, and whether they are distributions of distances."""
    boxes = []
    for name in names:
        if tables.width(name) == _BOX and not sums_to_one(tables.rows[name]).all():
            boxes.append(name)
    if len(boxes) > 1:  # one may be the scores of four classes
        boxes = [name for name in boxes if not _are_scores(tables.rows[name], tables.samples)]
    if boxes:
        return boxes, False

    distributions = []
    for name in names:
        has_bins = tables.width(name) % 4 == 0 and tables.width(name) >= 4 * thresholds.MIN_BINS
        if has_bins and not are_shares(tables.rows[name]):
            distributions.append(name)
    is_grid = find_grid(tables.counts[names[0]], tables.samples.picture_size) is not None
    with_points = _find_boxes_with_points(names, tables)
    if not distributions or not is_grid:
        return with_points, False
    if with_points:  # logits of a distribution give no sizes in pixels
        (scores,) = (name for name in names if name not in with_points)
        side = _min_box_side(tables.rows[with_points[0]], tables.rows[scores])
        if side > thresholds.MIN_PIXEL_SIDE:
            return with_points, False
    return distributions, True


def _find_boxes_with_points(names: Sequence[str], tables: _Tables) -> list[str]:
    """Return the output of boxes with key points, if the only other one is a score per anchor."""
    wide = [name for name in names if tables.width(name) > _BOX]
    boxes = [name for name in wide if tables.width(name) % 2 == 0]
    scores = [name for name in names if name not in boxes]
    if len(boxes) != 1 or len(scores) != 1 or tables.width(scores[0]) != 1:
        return []
    if not tables.samples.of_pictures:
        return []
    return boxes if _rarely_detect(tables.rows[scores[0]]) else []


def _rarely_detect(rows: Floats) -> bool:
    """Whether nearly all rows, of probabilities or logits, detect nothing."""
    limit = thresholds.MAX_EMPTY_SCORE if are_shares(rows) else 0.0
    return bool(np.mean(rows.max(axis=1) < limit) >= thresholds.MIN_EMPTY_SHARE)


def _are_scores(rows: Floats, samples: FirstSamples) -> bool:
    """Whether rows are scores of classes, or logits of a Softmax that is sure of its background."""
    if _rarely_detect(rows):
        return True
    mean_best = activate(rows, "softmax").max(axis=1).mean()
    is_sure = mean_best > thresholds.MIN_BACKGROUND_SHARE
    return bool(is_sure and _find_activation([rows], samples, is_set=False))


def _find_activation(
    levels: Sequence[Floats], samples: FirstSamples, *, is_set: bool
) -> tuple[str, int | None] | None:
    """Return (missing activation, class of the background); None if the values fit neither."""
    if len({rows.shape[1] for rows in levels}) != 1:
        return None
    rows = np.concatenate(levels)
    last = rows.shape[1] - 1
    wins = np.bincount(rows.argmax(axis=1), minlength=last + 1)
    winner = int(wins.argmax())
    is_clear = wins.max() >= thresholds.MIN_BACKGROUND_SHARE * wins.sum()
    is_background = last > 0 and winner in (0, last) and bool(is_clear)
    if are_shares(rows):
        if last == 0 or not sums_to_one(rows).all():
            return "", None
        if is_background:
            return "", winner
        return ("", last) if is_set or samples.declared.task == "boxes" else None

    # a Softmax has one more class, the background, and a Sigmoid none
    if samples.declared.classes and samples.declared.classes in (last, last + 1):
        if samples.declared.classes == last + 1:
            return "sigmoid", None
        return "softmax", 0 if winner == 0 and is_background else last
    best = rows.max(axis=1)
    if np.mean(best < 0) >= thresholds.MIN_EMPTY_SHARE:
        return "sigmoid", None
    if is_background:
        return "softmax", winner
    if not is_set and samples.declared.task != "boxes":
        return None
    if last == 0 or np.median(best) < 0:
        return "sigmoid", None
    return "softmax", last


def _find_level_coding(levels: Sequence[RowLevel], tables: _Tables, *, is_set: bool) -> str | None:
    """Return the coding of the boxes, as in `RowDecoder`; None if they are none."""
    box_outputs = [level.boxes.output for level in levels if level.boxes is not None]
    grid_count = sum(level.grid is not None for level in levels)
    if grid_count:
        return "distribution" if grid_count == len(levels) else None
    rows = np.concatenate([tables.rows[name][:, :_BOX] for name in box_outputs])
    if any(level.extra is not None for level in levels):
        scores = np.concatenate([tables.rows[level.scores.output] for level in levels])
        is_sized = scores.shape[1] == 1 and _min_box_side(rows, scores) > 1
        return "offset" if is_sized and not is_set else ""
    if box_outputs[0] in _CENTRE_BOXES:
        return "centre"
    if _are_corners(rows):
        return "corners"
    if len(levels) > 1:
        return ""

    tolerance = thresholds.MAX_OUTSIDE_PICTURE
    are_relative = rows.min() >= -tolerance and rows.max() <= 1 + tolerance
    if are_relative:
        return "centre"
    sizes = [size for inputs in tables.samples.inputs if (size := image_size(inputs)) is not None]
    if len(sizes) != len(tables.samples.inputs):
        return ""
    boxes = np.split(rows, len(sizes)) if len(rows) % len(sizes) == 0 else []
    coding = _find_coding(boxes, sizes, are_relative=are_relative) if boxes else None
    return "centre" if coding == "centre" else ""


def _min_box_side(boxes: Floats, scores: Floats) -> float:
    """Return the least width or height of the boxes [A, 4 ...] with the highest scores."""
    min_score = np.quantile(scores[:, 0], 1 - thresholds.DETECTION_SHARE)
    return float(boxes[scores[:, 0] >= min_score, 2:4].min())


def _slice_level(
    names: Sequence[str], level: RowLevel, decoder: RowDecoder, samples: FirstSamples
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of a level's outputs; boxes are weighted by the scores of their rows.

    The scores or the gate, whichever has the lower mean, are the weight: the other one may be
    arbitrary without an object.
    """
    start, stop = 0, 0  # the columns of the classes, without the background; 0, 0 for all
    if decoder.background is not None:
        start = 1 if decoder.background == 0 else 0
        stop = start + decoder.classes
    weights = [_weight_slice(level.scores, decoder.activation, samples, start, stop)]
    if level.gate is not None:
        weights.append(_weight_slice(level.gate, decoder.gate_activation, samples))
    means = []
    for weight in weights:
        best = [weight.best_scores(outputs).mean() for outputs in samples.outputs]
        means.append(float(np.mean(best)))
    weight = weights[int(np.argmin(means))]
    score_outputs = [part.output for part in weights]
    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for name in names:
        at = None if name in score_outputs else weight
        slices[name] = (OutputSlice(output=name, at=at),)
    return slices


def _weight_slice(
    columns: Columns, activation: str, samples: FirstSamples, start: int = 0, stop: int = 0
) -> OutputSlice:
    """Return the slice of scores; without an axis if the output has one number a row."""
    axis: int | None = -1 if columns.layout == ROWS else 1
    if samples.outputs[0][columns.output].ndim == 2 and columns.layout == COLUMNS:
        axis = None
    return OutputSlice(
        output=columns.output, axis=axis, start=start, stop=stop, activation=activation
    )


# --- levels before decoding ---


def _find_anchor_maps(samples: FirstSamples) -> RowDecoder | None:
    """Recognise levels of YOLO v3 to v7 with several anchors per cell, if every output is one."""
    if len(samples.names) < 2 or len(samples.names) != len(samples.every):
        return None
    rows_by_name = {}
    for name in samples.names:
        tables = _read_tables(name, ANCHOR_MAP, samples)
        if tables is None or tables[0].shape[1] <= _BOX + 1:
            return None
        for value, inputs in zip(samples.arrays(name), samples.inputs, strict=True):
            if not fits_stride(value.shape[2:4], image_size(inputs)):
                return None
        rows_by_name[name] = np.concatenate(tables)
    widths = {rows.shape[1] for rows in rows_by_name.values()}
    if len(widths) != 1:
        return None

    (width,) = widths
    for activation in ("sigmoid", ""):
        if not all(_has_empty_objectness(rows, activation) for rows in rows_by_name.values()):
            continue
        levels = []
        for name in rows_by_name:
            scores = Columns(name, ANCHOR_MAP, _BOX + 1, width)
            gate = Columns(name, ANCHOR_MAP, _BOX, _BOX + 1)
            levels.append(RowLevel(scores=scores, gate=gate))
        return RowDecoder(
            levels=tuple(levels),
            coding="",
            classes=width - _BOX - 1,
            activation=activation,
            gate_activation=activation,
        )
    return None


def _has_empty_objectness(rows: Floats, activation: str) -> bool:
    """Whether objectness is near 0 nearly everywhere, as no other column is."""
    if activation:
        limit = float(np.log(thresholds.MAX_EMPTY_SCORE))
        box_median = float(np.median(rows[:, :_BOX]))  # box logits are centred at 0
        return bool(rows[:, _BOX].mean() < limit < box_median)
    return are_shares(rows) and bool(rows[:, _BOX].mean() < thresholds.MAX_EMPTY_SCORE)
