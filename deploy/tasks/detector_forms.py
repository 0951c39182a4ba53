"""Forms of detectors with a row per anchor, cell or query, in one output or several.

========================  ======================================================================
[1, 4+C, A]               boxes and a probability per class: YOLO v8, v9, v11
[1, A, 5+C]               boxes, objectness, classes: YOLO v5, v6, v7; relative to cells: YOLOX
[1, Q, 4+C]               relative boxes of queries: RT-DETR (Zhao et al. 2023)
[1, A, C + 4 (m + 1)]     probabilities, then distributions of distances: NanoDet
[1, 3 (5+C), H, W]        YOLO v3 to v7 before decoding, one output a level
[A, 4], [A, C]            boxes and scores in two outputs, or two a level, either transposed: SSD,
                          RetinaNet, DETR, PicoDet. A third output of one column multiplies the
                          scores: YuNet, FCOS
========================  ======================================================================

Each form is a function that proposes, by shapes and units, which columns of which outputs are
scores, boxes and an objectness. `_confirm` then decides by the values, for all forms alike: rows
with a score and four numbers are boxes if most detect nothing, and their centres lie all over the
picture. So no form needs strides.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    read_levels,
)
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import Floats, activate, are_shares, correlate, image_size, sums_to_one
from deploy.tasks.slices import OutputSlice

_BOX = 4  # numbers of a box
_CENTRE_BOXES = ("pred_boxes", "dets")  # names of relative boxes by centre, of DETR's exporters
Levels = tuple[RowLevel, ...]


def find_detector(samples: FirstSamples, *, is_set: bool = False) -> RowDecoder | None:
    """Recognise rows of a detector; `is_set`: in any layout that fits, since a user says so.

    A form that several outputs have is none: they may be levels.
    """
    attempts = [(propose, False) for propose in FORMS]
    if is_set:
        attempts += [(propose, True) for propose in reversed(FORMS)]
    for propose, is_lenient in attempts:
        decoders: dict[str, RowDecoder] = {}
        for levels in propose(samples, is_lenient):
            output = levels[0].scores.output
            decoder = None
            if output not in decoders:
                decoder = _confirm(levels, samples, is_set=is_lenient)
            if decoder is not None:
                decoders[output] = decoder
        if len(decoders) == 1:
            return decoders.popitem()[1]
    return None


def _read_rows(columns: Sequence[Columns | None], samples: FirstSamples) -> Floats | None:
    """Return the rows of all samples and levels; None without such columns, or of NaN or Inf."""
    tables: list[Floats] = []
    for outputs in samples.outputs:
        table = read_levels(columns, outputs)
        if table is None or (tables and table.shape[1] != tables[0].shape[1]):
            return None
        tables.append(table)
    rows = np.concatenate(tables)
    return rows if rows.size and np.isfinite(rows).all() else None


# --- what shapes and units propose ---


def _propose_joined(samples: FirstSamples, is_set: bool) -> Iterator[Levels]:
    """Propose columns of one output: boxes, an objectness, classes, and what comes after."""
    for name in samples.names:
        values = samples.arrays(name)
        if values[0].ndim > 1 and any(_are_classes(values, axis) for axis in (1, -1, -2)):
            continue
        for layout in _possible_layouts(values[0].shape):
            rows = _read_rows([Columns(name, layout)], samples)
            if rows is None:
                continue
            yield from _propose_distributions(name, layout, rows, samples)
            level = _split_columns(name, layout, rows, samples, is_set=is_set)
            if level is not None:
                yield (level,)


def _are_classes(values: Sequence[np.ndarray], axis: int) -> bool:
    """Whether values sum to 1 along a dimension, as classes of steps or of pixels do."""
    return all(sums_to_one(value, axis).all() for value in values)


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
    are_many = row_count >= thresholds.MIN_ROWS_PER_COLUMN * column_count
    return column_count > _BOX and (are_many or row_count >= thresholds.MIN_QUERIES)


def _count_leading_shares(rows: Floats) -> int:
    """Return the number of columns, from the first on, whose values lie from 0 to 1."""
    return next((k for k, column in enumerate(rows.T) if not are_shares(column)), rows.shape[1])


def _propose_distributions(
    name: str, layout: Layout, rows: Floats, samples: FirstSamples
) -> Iterator[Levels]:
    """Propose classes, then distributions of distances from the cells of a grid."""
    class_count = _count_leading_shares(rows)
    grid = find_grid(len(rows) // len(samples.outputs), samples.picture_size)
    if class_count and grid is not None and _are_bins(rows[:, class_count:]):
        scores, bins = Columns(name, layout, 0, class_count), Columns(name, layout, class_count)
        yield (RowLevel(scores=scores, boxes=bins, grid=grid),)


def _are_bins(rows: Floats) -> bool:
    """Whether columns may be logits of four distributions."""
    bin_count, remainder = divmod(rows.shape[1], 4)
    return bin_count >= thresholds.MIN_BINS and not remainder and rows.min() < 0


def _split_columns(
    name: str, layout: Layout, rows: Floats, samples: FirstSamples, *, is_set: bool
) -> RowLevel | None:
    """Return boxes, an objectness, classes and what comes after; None without probabilities."""
    column_count = rows.shape[1]
    score_count = _count_leading_shares(rows[:, _BOX:])
    class_count = samples.declared.classes
    if class_count and score_count >= class_count:
        score_count = class_count + (column_count == _BOX + 1 + class_count)
    if not score_count and is_set:
        score_count = column_count - _BOX
    if not score_count:
        return None

    end = _BOX + score_count
    has_objectness = _has_objectness(_to_probabilities(rows[:, _BOX:end]), layout)
    first_class = _BOX + has_objectness
    return RowLevel(
        scores=Columns(name, layout, first_class, end),
        boxes=Columns(name, layout, 0, _BOX),
        gate=Columns(name, layout, _BOX, first_class) if has_objectness else None,
        extra=Columns(name, layout, end) if end < column_count else None,
        grid=find_grid(len(rows) // len(samples.outputs), samples.picture_size),
    )


def _to_probabilities(rows: Floats) -> Floats:
    return activate(rows, _missing_sigmoid(rows))


def _missing_sigmoid(rows: Floats) -> str:
    return "" if are_shares(rows) else "sigmoid"


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
        return _are_mostly_empty(scores[:, 0])
    is_loud = max(best_class, objectness) > thresholds.MIN_QUIET_SCORE
    return layout == ROWS and is_loud and objectness >= best_class


def _are_mostly_empty(best_scores: Floats) -> bool:
    """Whether at least half of the rows detect nothing."""
    return bool(np.median(best_scores) < thresholds.MAX_EMPTY_SCORE)


@dataclass(frozen=True, slots=True, eq=False)
class _RowTable:
    """An output as a table.

    Attributes:
        columns: all its columns.
        rows: their values in all samples.
        count: number of rows of the first sample.
    """

    columns: Columns
    rows: Floats
    count: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.rows.shape[1])


def _propose_separate(samples: FirstSamples, is_set: bool) -> Iterator[Levels]:
    """Propose outputs of scores and boxes, of all levels or of each, which has its row count."""
    tables_by_count: dict[int, list[_RowTable]] = {}
    for name, layout in _find_layouts(samples).items():
        columns = Columns(name, layout)
        rows = _read_rows([columns], samples)
        first_table = columns.of(samples.outputs[0])
        if rows is not None and first_table is not None and len(first_table) > 1:
            table = _RowTable(columns, rows, len(first_table))
            tables_by_count.setdefault(table.count, []).append(table)

    levels = []
    for tables in tables_by_count.values():
        if is_set and len(tables) == 1:
            continue
        level = _pair_tables(tables, samples, is_set=is_set)
        if level is None:
            return
        levels.append(level)
    row_count = sum(tables_by_count)
    gate_count = sum(level.gate is not None for level in levels)
    if gate_count in (0, len(levels)) and (is_set or row_count >= thresholds.MIN_ANCHORS):
        yield from [tuple(levels)] if levels else []


def _find_layouts(samples: FirstSamples) -> dict[str, Layout]:
    """Return output -> its layout; the longer side of an output with four numbers is the anchors.

    Maps are rows of cells if there are as many as two levels have, of the picture's strides.
    """
    shapes = {name: samples.outputs[0][name].shape for name in samples.names}
    maps = [name for name, shape in shapes.items() if len(shape) == 4]
    are_levels = len(maps) >= 4 and all(_fit_strides(name, samples) for name in maps)
    row_counts = set()
    for shape in shapes.values():
        if len(shape) == 3 and shape[0] == 1:
            row_counts.add(max(shape) if _BOX in shape[1:] else shape[1])
    layouts = {}
    for name, shape in shapes.items():
        if len(shape) == 4 and are_levels:
            layouts[name] = MAP
        elif len(shape) in (2, 3):
            is_transposed = shape[-1] in row_counts and shape[-2] < shape[-1]
            layouts[name] = COLUMNS if is_transposed else ROWS
    return layouts


def _fit_strides(name: str, samples: FirstSamples) -> bool:
    """Whether a map has the size of the picture over a stride, in every sample."""
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=True):
        if not fits_stride(value.shape[2:4], image_size(inputs)):
            return False
    return True


def _pair_tables(
    tables: Sequence[_RowTable], samples: FirstSamples, *, is_set: bool
) -> RowLevel | None:
    """Choose the boxes, the scores and a gate among outputs with equally many rows."""
    grid = find_grid(tables[0].count, samples.picture_size)
    boxes = [table for table in tables if table.width == _BOX]
    boxes = [table for table in boxes if not sums_to_one(table.rows).all()]
    if len(boxes) > 1:  # one may be the scores of four classes
        named = [table for table in boxes if table.columns.output in _CENTRE_BOXES]
        boxes = named or [table for table in boxes if not _are_scores(table.rows)]
    if not boxes and grid is not None:
        boxes = [table for table in tables if _are_bins(table.rows)]
    if is_set and len(boxes) != 1:  # the widest one
        wide = [table for table in tables if table.width >= _BOX]
        boxes = sorted(wide, key=lambda table: (are_shares(table.rows), -table.width))[:1]
    if len(boxes) != 1:
        return None

    others = [table for table in tables if table is not boxes[0]]
    scores = [table for table in others if are_shares(table.rows)]
    scores = scores or [table for table in others if table.width == 2] or others
    gates = [table for table in scores if table.width == 1]
    gate = gates[-1] if len(scores) == 2 and gates else None
    scores = [table for table in scores if table is not gate]
    if len(scores) != 1:
        return None
    points = [table for table in others if table not in (scores[0], gate)]
    return RowLevel(
        scores=scores[0].columns,
        boxes=boxes[0].columns,
        gate=None if gate is None else gate.columns,
        extra=points[0].columns if points else None,
        grid=grid,
    )


def _are_scores(rows: Floats) -> bool:
    """Whether four columns are scores of classes, not boxes: few rows have a high one."""
    if are_shares(rows):
        return bool(np.mean(rows.max(axis=1) < thresholds.MAX_EMPTY_SCORE) > 0.5)
    return _find_raw_activation(rows) is not None


def _propose_anchor_maps(samples: FirstSamples, is_set: bool) -> Iterator[Levels]:
    """Propose levels of YOLO v3 to v7 with several anchors per cell, if every output is one."""
    levels = []
    for name in samples.every:
        rows = _read_rows([Columns(name, ANCHOR_MAP)], samples)
        if rows is None or rows.shape[1] <= _BOX + 1 or not _fit_strides(name, samples):
            return
        # no other column is near 0 nearly everywhere
        probabilities = _to_probabilities(rows)
        objectness, box_median = probabilities[:, _BOX], np.median(probabilities[:, :_BOX])
        if not objectness.mean() < thresholds.MAX_EMPTY_SCORE < box_median:
            return
        scores = Columns(name, ANCHOR_MAP, _BOX + 1, rows.shape[1])
        levels.append(RowLevel(scores=scores, gate=Columns(name, ANCHOR_MAP, _BOX, _BOX + 1)))
    if len(levels) > 1:
        yield tuple(levels)


# Tried in this order; what a user sets, in the reverse order
FORMS = (_propose_joined, _propose_separate, _propose_anchor_maps)


# --- what values confirm ---


def _confirm(levels: Levels, samples: FirstSamples, *, is_set: bool) -> RowDecoder | None:
    """Return the decoder of proposed columns; None if the values are no scores and boxes.

    If it `is_set` that they are, rows may all detect something, and boxes may have any coding.
    """
    score_rows = _read_rows([level.scores for level in levels], samples)
    if score_rows is None:
        return None
    is_separate = levels[0].boxes is not None and levels[0].boxes.output != levels[0].scores.output
    activation: str | None = _missing_sigmoid(score_rows)
    background = None
    if is_separate:
        activation, background = _find_activation(score_rows, samples, is_set=is_set)
    if activation is None:
        return None
    gate_rows = _read_rows([level.gate for level in levels], samples)
    decoder = RowDecoder(
        levels=levels,
        classes=score_rows.shape[1] - (background is not None),
        activation=activation,
        gate_activation="" if gate_rows is None else _missing_sigmoid(gate_rows),
        background=background,
    )
    best = []
    for outputs in samples.outputs:
        scores = decoder.scores(outputs)
        if scores is None:
            return None
        best.append(scores.max(axis=1))
    if not is_set and not _are_mostly_empty(np.concatenate(best)):
        return None
    if levels[0].boxes is None:
        return decoder

    decoder = replace(decoder, coding=_find_coding(levels, samples))
    if not (decoder.coding or is_separate or is_set):
        return None
    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for level in levels:
        if is_separate:
            slices |= _slice_level(level, decoder, samples)
        else:
            slices |= _slice_columns(level, samples)
    return _read_extra(replace(decoder, parts=slices), samples)


def _find_activation(
    rows: Floats, samples: FirstSamples, *, is_set: bool
) -> tuple[str | None, int | None]:
    """Return (missing activation, class of the background); (None, None) if there is neither."""
    last = rows.shape[1] - 1
    if are_shares(rows):
        if last == 0 or not sums_to_one(rows).all():
            return "", None
        background = _find_background(rows)
        if background is None and is_set:
            background = last
        return ("", background) if background is not None else (None, None)

    # a Softmax has one more class, the background, and a Sigmoid none
    if samples.declared.classes == last + 1:
        return "sigmoid", None
    found = _find_raw_activation(rows)
    if last and samples.declared.classes == last:
        background = None if found is None else found[1]
        return "softmax", last if background is None else background
    if found is not None:
        return found
    if not is_set:
        return None, None
    is_sigmoid = last == 0 or np.median(rows.max(axis=1)) < 0
    return ("sigmoid", None) if is_sigmoid else ("softmax", last)


def _find_raw_activation(rows: Floats) -> tuple[str, int | None] | None:
    """Return (missing activation, class of the background) if nearly all rows detect nothing."""
    if np.mean(rows.max(axis=1) < 0) >= thresholds.MIN_EMPTY_SHARE:
        return "sigmoid", None
    background = _find_background(rows)
    return None if background is None else ("softmax", background)


def _find_background(rows: Floats) -> int | None:
    """Return the first or the last class if it is the best of most rows; else None."""
    wins = np.bincount(rows.argmax(axis=1), minlength=rows.shape[1])
    winner = int(wins.argmax())
    is_clear = wins[winner] >= thresholds.MIN_BACKGROUND_SHARE * len(rows)
    return winner if is_clear and len(wins) > 1 and winner in (0, len(wins) - 1) else None


def _find_coding(levels: Levels, samples: FirstSamples) -> str:
    """Return the coding of the boxes, as in `RowDecoder`; "" if they cannot be decoded.

    Centres of boxes lie in the picture, all over it.
    """
    box_columns = [level.boxes for level in levels]
    rows = _read_rows(box_columns, samples)
    if rows is None:
        return ""
    if rows.shape[1] > _BOX:
        has_grids = all(level.grid is not None for level in levels)
        return "distribution" if has_grids and _are_bins(rows) else ""
    if box_columns[0] is not None and box_columns[0].output in _CENTRE_BOXES:
        return "centre"

    places = _find_places(box_columns, rows, samples)
    if places is not None:
        low, high = places[:, :2], places[:, 2:]
        if _are_corners(low, high) and _are_all_over((low + high) / 2):
            return "corners"
        if len(levels) == 1 and _are_mostly(high >= 0) and _are_all_over(low):
            return "centre"

    # logarithms of sizes relative to cells have both signs
    are_small = _are_mostly(np.abs(rows) < thresholds.MAX_CELL_OFFSET)
    has_cells = levels[0].gate is not None and levels[0].grid is not None and len(levels) == 1
    return "cell" if has_cells and are_small and rows[:, 2:].min() < 0 else ""


def _find_places(
    box_columns: Sequence[Columns | None], rows: Floats, samples: FirstSamples
) -> Floats | None:
    """Return boxes relative to the picture; None for pixels of a picture of unknown size."""
    tolerance = thresholds.MAX_OUTSIDE_PICTURE
    if rows.min() >= -tolerance and rows.max() <= 1 + tolerance:
        return rows
    places = []
    for inputs, outputs in zip(samples.inputs, samples.outputs, strict=True):
        boxes, size = read_levels(box_columns, outputs), image_size(inputs)
        if boxes is None or size is None:
            return None
        height, width = size
        places.append(boxes / (width, height, width, height))
    return np.concatenate(places)


def _are_all_over(centres: Floats) -> bool:
    """Whether relative centres of boxes lie in the picture, and everywhere in it."""
    margin = thresholds.MAX_OUTSIDE_PICTURE
    is_inside = np.all((centres > -margin) & (centres < 1 + margin), axis=1)
    is_spread = centres.std(axis=0).min() > thresholds.MIN_CENTRE_SPREAD
    return bool(is_spread and is_inside.mean() >= thresholds.MIN_INSIDE_SHARE)


def _are_corners(low: Floats, high: Floats) -> bool:
    """Whether the second corner is right of the first and below it, and moves with it."""
    correlations = [correlate(low[:, axis], high[:, axis]) for axis in (0, 1)]
    return _are_mostly(high >= low) and min(correlations) > thresholds.MIN_CORNER_CORRELATION


def _are_mostly(conditions: NDArray[np.bool_]) -> bool:
    """Whether nearly all rows [A, n] meet all conditions."""
    return bool(conditions.all(axis=1).mean() >= thresholds.MIN_CODED_SHARE)


def _read_extra(decoder: RowDecoder, samples: FirstSamples) -> RowDecoder:
    """Return the decoder with its further columns: mask weights, an angle or key points."""
    extra = _read_rows([level.extra for level in decoder.levels], samples)
    boxes = _read_rows([level.boxes for level in decoder.levels], samples)
    if extra is None or boxes is None:
        return decoder
    width = extra.shape[1]
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


# --- slices whose noise is measured ---


def _slice_columns(level: RowLevel, samples: FirstSamples) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of an output with boxes, scores and further columns."""
    name, axis = level.scores.output, -1 if level.scores.layout == ROWS else 1
    parts = [part for part in (level.boxes, level.gate or level.scores, level.extra) if part]
    starts = sorted(part.start for part in parts)
    stops = [*starts[1:], samples.outputs[0][name].shape[axis]]
    slices = []
    for start, stop in zip(starts, stops, strict=True):
        slices.append(OutputSlice(output=name, axis=axis, start=start, stop=stop))
    return {name: tuple(slices)}


def _slice_level(
    level: RowLevel, decoder: RowDecoder, samples: FirstSamples
) -> dict[str, tuple[OutputSlice, ...]]:
    """Return the slices of outputs of scores and boxes; boxes are weighted by their rows' scores.

    The scores or the gate, whichever has the lower mean, are the weight: the other one may be
    arbitrary without an object.
    """
    start, stop = 0, 0  # the columns of the classes, without the background; 0, 0 for all
    if decoder.background is not None:
        start = 1 if decoder.background == 0 else 0
        stop = start + decoder.classes
    weights = [_slice_scores(level.scores, samples, decoder.activation, start, stop)]
    if level.gate is not None:
        weights.append(_slice_scores(level.gate, samples, decoder.gate_activation))
    means = []
    for weight in weights:
        means.append(np.mean([weight.best_scores(outputs).mean() for outputs in samples.outputs]))
    best_weight = weights[int(np.argmin(means))]

    slices: dict[str, tuple[OutputSlice, ...]] = {}
    for weight in weights:
        slices[weight.output] = (OutputSlice(output=weight.output),)
    for part in (level.boxes, level.extra):
        if part is not None:
            slices[part.output] = (OutputSlice(output=part.output, at=best_weight),)
    return slices


def _slice_scores(
    columns: Columns, samples: FirstSamples, activation: str, start: int = 0, stop: int = 0
) -> OutputSlice:
    """Return the slice of scores; without an axis if the output has one number a row."""
    axis: int | None = -1 if columns.layout == ROWS else 1
    if samples.outputs[0][columns.output].ndim == 2 and columns.layout == COLUMNS:
        axis = None
    return OutputSlice(
        output=columns.output, axis=axis, start=start, stop=stop, activation=activation
    )
