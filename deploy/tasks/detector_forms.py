"""Forms of detectors with a row per anchor, cell or query, in one output or several.

Each form (`PROPOSALS`) is a function that proposes, by shapes and units, which columns of which
outputs are scores, boxes and an objectness. `_confirm` then decides by the values, for all forms
alike: rows with a score and four numbers are boxes if most detect nothing, and their centres lie
all over the picture. So no form needs strides.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from deploy.tasks.detections import are_angles, are_relative, make_masks
from deploy.tasks.detector import (
    ANCHOR_MAP,
    CENTRE_OUTPUTS,
    CODINGS,
    COLUMNS,
    LAYOUT_DIMENSIONS,
    MAP,
    ROWS,
    BoxRows,
    Columns,
    Layout,
    OtherShapeError,
    RowDecoder,
    find_strides,
    fits_stride,
    read_columns,
)
from deploy.tasks.evaluation_task import Form
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import (
    Arrays,
    Floats,
    ImageSize,
    activate,
    are_in_unit_range,
    correlate,
    image_size,
    missing_sigmoid,
    sums_to_one,
)
from deploy.tasks.slices import OutputSlice, SlicesByOutput
from deploy.tasks.thresholds import (
    DISTRIBUTION_BINS,
    MAX_EMPTY_SCORE,
    MIN_ANCHORS,
    MIN_BACKGROUND_SHARE,
    MIN_POINT_CORRELATION,
    MIN_QUERIES,
    MIN_QUIET_SCORE,
    MIN_ROWS_PER_COLUMN,
    UNIT_TOLERANCE,
)
from deploy.tensors import Array

_BOX_WIDTH = 4  # columns of a box in most codings


@dataclass(frozen=True, slots=True, eq=False)
class _RowTable:
    """An output as a table: a row for each candidate of a box, a column for each of its numbers.

    Attributes:
        columns: all its columns.
        rows: their values in all samples, [A, n].
        row_count: number of rows of the first sample.
        strides: those of the levels whose cells the rows may be; empty without.
    """

    columns: Columns
    rows: Array
    row_count: int
    strides: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.rows.shape[1])

    def select_columns(self, start: int, stop: int) -> tuple[Columns, ...]:
        """Return the columns from start to stop, as those of one level; empty if there are none."""
        if start < stop:
            return (replace(self.columns, start=start, stop=stop),)
        return ()


def find_detector(samples: FirstSamples) -> RowDecoder | None:
    """Return the decoder of a detector's outputs; None if no form of `PROPOSALS` is certain.

    A form proposes which columns are boxes and scores, and `_confirm` decides. Several decoders of
    one form are the levels of one detector if each output of the model is one of them; else the
    next form is tried. A single decoder may leave other outputs unread. If the user or the model's
    file says that the outputs are boxes, any layout that fits is taken, though the values leave
    doubt (`FirstSamples.are_known_boxes`).
    """
    tables = [*_read_tables(samples)]
    for propose in PROPOSALS:
        decoders: dict[str, RowDecoder] = {}  # output of the scores -> its decoder
        for proposed_decoder in propose(tables, samples):
            decoder = _confirm(proposed_decoder, samples)
            if decoder is not None:
                decoders.setdefault(decoder.scores[0].output, decoder)
        if len(decoders) == 1:
            return decoders.popitem()[1]
        if len(decoders) == len(samples.output_names):
            joined_decoder = _join_levels([*decoders.values()])
            if joined_decoder is not None:
                return _confirm(joined_decoder, samples)
    return None


def _read_tables(samples: FirstSamples) -> Iterator[_RowTable]:
    """Yield each output as a table of rows, once for every layout that its shape allows.

    Outputs with NaN or Inf are left out, and maps whose sides are not the picture's sides divided
    by a stride, as those of a detector's levels are.
    """
    picture_size = samples.picture_size
    for name, layout in itertools.product(samples.names, LAYOUT_DIMENSIONS):
        map_sides = samples.outputs[0][name].shape[2:4]
        if layout in (MAP, ANCHOR_MAP) and not fits_stride(map_sides, picture_size):
            continue
        columns = Columns(name, layout)
        try:
            tables = [columns.of(outputs) for outputs in samples.outputs]
        except OtherShapeError:  # the output cannot have this layout
            continue
        column_counts = {table.shape[1] for table in tables}
        if len(column_counts) > 1:  # the samples differ
            continue
        rows = np.concatenate(tables)  # of all samples
        row_count = len(tables[0])  # of one sample
        if np.isfinite(rows).all():
            yield _RowTable(columns, rows, row_count, find_strides(row_count, picture_size))


def _read_rows(levels: Sequence[Columns], samples: FirstSamples) -> Floats:
    """Return the columns of all levels and samples, below each other, [rows, n].

    Raises:
        OtherShapeError: levels differ in their number of columns.
    """
    return np.concatenate([read_columns(levels, outputs) for outputs in samples.outputs])


# --- what shapes and units propose ---


def _propose_joined(tables: Sequence[_RowTable], samples: FirstSamples) -> Iterator[RowDecoder]:
    """Yield decoders of one output that holds boxes, classes and perhaps more, as its shape allows.

    `tables`: each output as rows (anchors, cells or queries) and columns, in every layout.
    """
    # if all outputs are maps, each of another size, they are the raw levels of one detector
    map_sizes = {table.row_count for table in tables if table.columns.layout == MAP}
    has_levels = len(map_sizes) > 1 and len(map_sizes) == len(samples.output_names)
    for table in tables:
        if has_levels and table.columns.layout == MAP:
            yield from _split_raw_columns(table)
        # anchors are many more than the columns; the queries of a DETR may be fewer
        min_count = min(MIN_ROWS_PER_COLUMN * table.width, MIN_QUERIES)
        if table.columns.layout == ANCHOR_MAP or table.row_count < min_count:
            continue
        # classes of steps or of pixels sum to 1, a detector's rows do not
        values = samples.arrays(table.columns.output)
        if table.width > _BOX_WIDTH and not any(_are_classes(values, axis) for axis in (1, -1, -2)):
            # either order of columns, which `_confirm` accepts or refuses by their values
            yield from _split_nanodet_columns(table)
            yield from _split_yolo_columns(table, samples)


def _are_classes(values: Arrays, axis: int) -> bool:
    """Whether values sum to 1 along a dimension, as classes of steps or of pixels do."""
    return all(sums_to_one(value, axis).all() for value in values)


def _split_nanodet_columns(table: _RowTable) -> Iterator[RowDecoder]:
    """Propose NanoDet's columns: classes | distributions of a box's distances from its cell."""
    classes_end = _count_probabilities(table, 0)
    if _have_wide_coding(table, classes_end):
        yield RowDecoder(
            scores=table.select_columns(0, classes_end),
            box_columns=table.select_columns(classes_end, table.width),
            strides=table.strides,
        )


def _split_yolo_columns(table: _RowTable, samples: FirstSamples) -> Iterator[RowDecoder]:
    """Propose YOLO's columns: box | objectness, if any | classes | others, such as key points.

    An objectness is the probability that there is any object. Scores are probabilities; they may be
    raw, too, if the user or the file says that the outputs are boxes.

    `table`: an output as rows [anchors, columns].
    """
    # so many columns are the objectness, if any, and the classes
    score_count = _count_probabilities(table, _BOX_WIDTH)
    if not score_count and samples.are_known_boxes:
        score_count = table.width - _BOX_WIDTH
    if not score_count:
        return
    scores_end = _BOX_WIDTH + score_count
    class_count = samples.declared.classes
    if class_count and score_count >= class_count:
        # the file tells the number of classes; what remains are further columns. Only outputs
        # [1, anchors, columns] have an objectness
        has_objectness = table.columns.layout == ROWS and score_count > class_count
        scores_end = _BOX_WIDTH + int(has_objectness) + class_count
    else:
        scores = _to_probabilities(table.rows[:, _BOX_WIDTH:scores_end])
        has_objectness = _has_objectness(scores, table.columns.layout)
    first_class = _BOX_WIDTH + int(has_objectness)
    yield RowDecoder(
        scores=table.select_columns(first_class, scores_end),
        box_columns=table.select_columns(0, _BOX_WIDTH),
        gates=table.select_columns(_BOX_WIDTH, first_class),  # the objectness, if there is one
        shape_columns=table.select_columns(scores_end, table.width),  # the others
        strides=table.strides,
    )


def _split_raw_columns(table: _RowTable) -> Iterator[RowDecoder]:
    """Propose the raw map of a level of YOLO v8: distributions of a box's distances | classes."""
    for bin_count in DISTRIBUTION_BINS:
        boxes_end = 4 * bin_count
        if boxes_end < table.width:
            yield RowDecoder(
                scores=table.select_columns(boxes_end, table.width),
                box_columns=table.select_columns(0, boxes_end),
                strides=table.strides,
            )


def _count_probabilities(table: _RowTable, start: int) -> int:
    """Return how many columns, counted from `start` up to the first other, hold probabilities."""
    columns = table.rows[:, start:].T
    return sum(1 for _ in itertools.takewhile(are_in_unit_range, columns))


def _to_probabilities(rows: Array) -> Array:
    """Return scores as probabilities: through a Sigmoid if they leave 0 to 1."""
    return activate(rows, missing_sigmoid(rows))


def _has_objectness(scores: Array, layout: Layout) -> bool:
    """Whether the first column of scores is an objectness, and not a class.

    An objectness says whether a row holds any object. Where it holds none, the objectness is near 0
    and the classes are arbitrary.

    Args:
        scores: probabilities [rows, n].
        layout: of the output.
    """
    if scores.shape[1] < 2:
        return False
    if scores[:, 0].min() >= 1 - UNIT_TOLERANCE:
        return True  # YOLO v6 has none, and writes 1 in its place
    best_others = scores[:, 1:].max(axis=1)
    first_mean = scores[:, 0].mean()
    best_other_mean = best_others.mean()
    if first_mean < best_other_mean:
        # an objectness is low in the rows without an object, most of them; the classes are high
        # even there
        return bool(best_other_mean > MAX_EMPTY_SCORE) and _are_mostly_empty(scores[:, 0])

    # only YOLO v5 and v7 have an objectness that is the highest column. Their outputs are rows;
    # YOLO v8 has transposed ones, without an objectness
    if layout != ROWS or first_mean <= MIN_QUIET_SCORE:
        return False
    # where an objectness is high, some class is high too; where a class is high, as the first of a
    # model that has no objectness, the other classes are low
    return float(np.average(best_others, weights=scores[:, 0])) > MAX_EMPTY_SCORE


def _are_mostly_empty(best_scores: Array) -> bool:
    """Whether at least half of the rows detect nothing."""
    return bool(np.median(best_scores) < MAX_EMPTY_SCORE)


def _propose_separate(tables: Sequence[_RowTable], samples: FirstSamples) -> Iterator[RowDecoder]:
    """Propose outputs of scores and of boxes that have the same number of rows.

    A detector of several levels has a pair of outputs for each level, which differ in their number
    of rows. All levels are proposed as one decoder.
    """
    # number of rows -> output -> its table
    tables_by_row_count: defaultdict[int, dict[str, _RowTable]] = defaultdict(dict)
    for table in tables:
        # anchor maps hold boxes and scores in one output; a single row is no list of candidates
        if table.row_count > 1 and table.columns.layout != ANCHOR_MAP:
            tables_by_row_count[table.row_count].setdefault(table.columns.output, table)

    levels: list[RowDecoder] = []
    paired_outputs: set[str] = set()
    # an output [1, a, b] was read as a table of a rows and as one of b rows: the larger number is
    # that of the anchors, so it is tried first
    for _, table_by_output in sorted(tables_by_row_count.items(), reverse=True):
        level = _pair_tables([*table_by_output.values()], are_known_boxes=samples.are_known_boxes)
        if level is not None and paired_outputs.isdisjoint(table_by_output):
            levels.append(level)
            paired_outputs |= {*table_by_output}
    # in the order of the outputs
    levels.sort(key=lambda level: samples.names.index(level.scores[0].output))
    joined_decoder = _join_levels(levels)
    if joined_decoder is not None:
        yield joined_decoder


def _join_levels(levels: Sequence[RowDecoder]) -> RowDecoder | None:
    """Return one decoder of the columns of all levels; None if only some levels have a gate.

    A level is a resolution of the detector's rows, such as 80 x 80 cells. A gate is a column that
    multiplies the scores, such as an objectness; a level has one at most.

    `levels`: the decoder of each level alone.
    """
    joined_fields: dict[str, Any] = {}
    for name in ("scores", "box_columns", "gates", "shape_columns", "strides"):
        columns = [getattr(level, name) for level in levels]
        joined_fields[name] = (*itertools.chain.from_iterable(columns),)
        # columns or strides of only some levels say nothing
        if name in ("shape_columns", "strides") and not all(columns):
            joined_fields[name] = ()
    gate_count = len(joined_fields["gates"])
    if not levels or gate_count not in (0, len(levels)):
        return None
    return RowDecoder(**joined_fields)


def _pair_tables(tables: Sequence[_RowTable], *, are_known_boxes: bool) -> RowDecoder | None:
    """Return the decoder of outputs with a row per candidate: which are boxes, scores, a gate.

    A gate is an output of one column that multiplies the scores, such as an objectness. None if no
    output may be boxes, or not exactly one may be scores.

    Args:
        tables: outputs with equally many rows.
        are_known_boxes: whether the user or the file says that the model detects boxes: outputs of
            any number of columns may then be boxes of an unknown coding.
    """
    # boxes are four numbers, or more of a coding that is recognised; else several boxes a row
    box_tables = [
        table for table in tables if table.width == _BOX_WIDTH or _have_wide_coding(table)
    ]
    if not box_tables:
        box_tables = [
            table for table in tables if _may_be_anchors(table, are_known_boxes=are_known_boxes)
        ]
    if not box_tables:
        return None
    boxes = min(box_tables, key=_box_order)  # the likeliest

    other_tables = [table for table in tables if table is not boxes]
    score_tables = [table for table in other_tables if are_in_unit_range(table.rows)]
    if not score_tables:  # raw scores: two columns are those of an object and of the background
        two_column_tables = [table for table in other_tables if table.width == 2]
        score_tables = two_column_tables or other_tables
    if not score_tables:
        return None
    # of two outputs that may be scores, one of a single column is the gate; it is sorted last
    score_table, *gate_tables = sorted(score_tables, key=lambda table: table.width == 1)
    gate_widths = [table.width for table in gate_tables]
    if gate_widths not in ([], [1]):  # two outputs of scores, or two gates
        return None
    # what is left may be key points or masks; a decoder carries one such output
    further_columns = [table.columns for table in other_tables if table not in score_tables]
    return RowDecoder(
        scores=(score_table.columns,),
        box_columns=boxes.select_columns(0, boxes.width),
        gates=tuple(table.columns for table in gate_tables),
        shape_columns=tuple(further_columns[:1]),
        strides=boxes.strides,
    )


def _may_be_anchors(table: _RowTable, *, are_known_boxes: bool) -> bool:
    """Whether rows may be the boxes of several anchors of a cell, or of an unknown coding."""
    has_anchors = table.columns.layout == MAP and table.width % _BOX_WIDTH == 0
    return table.width > _BOX_WIDTH and (are_known_boxes or has_anchors)


def _box_order(table: _RowTable) -> tuple[bool, bool, int]:
    """Return a sort key: the lowest of several outputs of four columns is the boxes.

    Names that exporters give to boxes come first, then outputs that do not look like scores of four
    classes, then the narrowest.
    """
    is_named = table.columns.output in CENTRE_OUTPUTS
    return not is_named, _are_scores(table.rows), table.width


def _have_wide_coding(table: _RowTable, start: int = 0) -> bool:
    """Whether the columns from `start` on are boxes by a coding of more than four numbers.

    Such as distributions: the codings of four numbers need more than these columns to be
    recognised.
    """
    boxes = BoxRows(
        output=table.columns.output,
        numbers=table.rows[:, start:],
        has_cells=bool(table.strides),
    )
    return any(coding.fits(boxes) for coding in CODINGS.values())


def _are_scores(rows: Array) -> bool:
    """Whether four columns are scores of four classes, and not boxes: in few rows one is high."""
    if are_in_unit_range(rows):
        return bool(sums_to_one(rows).all()) or _are_mostly_empty(rows.max(axis=1))
    return _find_activation(rows) is not None


def _propose_anchor_maps(
    tables: Sequence[_RowTable], samples: FirstSamples
) -> Iterator[RowDecoder]:
    """Propose raw maps of YOLO v3 to v7, with several anchors per cell, if all outputs are such.

    Their columns are x y w h, an objectness (the probability of any object), and the classes. The
    objectness is proposed as a gate, which multiplies the scores of the classes.
    """
    levels = []  # each output as a decoder of its own; `find_detector` joins them
    for table in tables:
        if table.columns.layout != ANCHOR_MAP or table.width <= _BOX_WIDTH + 1:
            continue
        # an objectness is near 0 nearly everywhere, the numbers of boxes are not
        probabilities = _to_probabilities(table.rows)
        mean_objectness = probabilities[:, _BOX_WIDTH].mean()
        box_median = np.median(probabilities[:, :_BOX_WIDTH])
        if mean_objectness < MAX_EMPTY_SCORE < box_median:
            scores = table.select_columns(_BOX_WIDTH + 1, table.width)
            levels.append(
                RowDecoder(scores=scores, gates=table.select_columns(_BOX_WIDTH, _BOX_WIDTH + 1))
            )
    if len(levels) > 1 and len(levels) == len(samples.output_names):
        yield from levels


_FIGURE = "boxes of the same class, with an IoU over 0.5 and matching key points and masks"

# what proposes columns -> the form; tried in this order
PROPOSALS: dict[Callable[..., Iterator[RowDecoder]], Form] = {
    _propose_separate: Form(
        shape="boxes [N, A, 4 or more] and scores [N, A, C], or transposed; one pair, or one per"
        " stride",
        values="boxes; scores, most of them near 0; perhaps an objectness as third output",
        figure=_FIGURE,
        source="SSD, RetinaNet, DETR (Carion et al. 2020), PicoDet, YuNet, FCOS",
    ),
    _propose_anchor_maps: Form(
        shape="[N, 3 (5 + C), H, W] or [N, 3, H, W, 5 + C] per stride (3 anchors)",
        values="boxes before decoding, an objectness, class scores",
        figure="cells with the same class",
        source="YOLO v3 to v7",
    ),
    _propose_joined: Form(
        shape="one output: [N, 4 + C, A], [N, A, 5 + C] or [N, A, C + 4 b] with b logits per side;"
        " or one per stride: [N, 4 b + C, H, W]",
        values="boxes and scores, perhaps an objectness, key points, an angle or mask coefficients",
        figure=_FIGURE,
        source="YOLO v5 to v11, YOLOX (Ge et al. 2021), RT-DETR (Zhao et al. 2023), NanoDet, YOLACT"
        " (Bolya et al. 2019)",
    ),
}


# --- what values confirm ---


def _confirm(proposed: RowDecoder, samples: FirstSamples) -> RowDecoder | None:
    """Return a proposed decoder with its activations and coding; None if its values do not fit.

    They fit if the scores of most rows detect nothing, and the boxes have a coding of `CODINGS`.
    Gates are columns that multiply the scores, such as an objectness. If the user or the file says
    that the outputs are boxes, rows may all detect something, and boxes may have an unknown coding.

    `proposed`: columns of scores, boxes, gates and others, without activations or a coding.
    """
    try:
        decoder = _with_activations(proposed, samples)
    except OtherShapeError:  # its levels differ in their number of classes
        return None
    if decoder is None:
        return None
    if not samples.are_known_boxes and not _detects_little(decoder, samples):
        return None
    if not decoder.box_columns:
        return decoder

    decoder = replace(decoder, coding=_find_coding(decoder, samples))
    # boxes in an output with scores may be any numbers, unless a coding fits them
    has_boxes = samples.are_known_boxes or decoder.coding or _are_separate(decoder)
    return read_extra(decoder, samples) if has_boxes else None


def _with_activations(proposed: RowDecoder, samples: FirstSamples) -> RowDecoder | None:
    """Return a proposed decoder with its number of classes and the activations of its scores.

    An activation is the Sigmoid or Softmax that the model's outputs still lack to be probabilities.
    None if no activation fits the scores.

    `proposed`: columns of scores, boxes and gates (columns that multiply the scores).
    """
    score_rows = _read_rows(proposed.scores, samples)
    activation: _Activation | None
    if _are_separate(proposed):
        activation = _find_activation(
            score_rows, samples.declared.classes, are_known_boxes=samples.are_known_boxes
        )
    else:  # scores in one output with boxes never have a Softmax, nor a class for the background
        activation = _Activation(missing_sigmoid(score_rows))
    if activation is None:
        return None

    gate_activation = ""
    if proposed.gates:
        gate_activation = missing_sigmoid(_read_rows(proposed.gates, samples))
    return replace(
        proposed,
        class_count=score_rows.shape[1] - (activation.background is not None),
        activation=activation.missing,
        gate_activation=gate_activation,
        background=activation.background,
    )


def _detects_little(decoder: RowDecoder, samples: FirstSamples) -> bool:
    """Whether there are many rows, most of which detect nothing."""
    best_scores = [decoder.read_scores(outputs).max(axis=1) for outputs in samples.outputs]
    has_anchors = len(best_scores[0]) >= MIN_ANCHORS
    return has_anchors and _are_mostly_empty(np.concatenate(best_scores))


def _are_separate(decoder: RowDecoder) -> bool:
    """Whether boxes are in other outputs than the scores."""
    score_outputs = {columns.output for columns in decoder.scores}
    return any(columns.output not in score_outputs for columns in decoder.box_columns)


class _Activation(NamedTuple):
    """How scores become probabilities.

    Attributes:
        missing: activation to apply: "sigmoid" or "softmax"; "" for probabilities.
        background: column of the background, a class for rows that detect nothing, which a Softmax
            needs; None without.
    """

    missing: str
    background: int | None = None


def _find_activation(
    rows: Floats, class_count: int = 0, *, are_known_boxes: bool = False
) -> _Activation | None:
    """Return how the scores of a detector become probabilities; None if that is unknown.

    The scores are in outputs without boxes, so they may have a Softmax, and then a column of the
    background: no object.

    Args:
        rows: scores [rows, n].
        class_count: number of classes that the file declares; 0 if unknown.
        are_known_boxes: whether the user or the file says that the model detects boxes.
    """
    column_count = rows.shape[1]  # classes, perhaps with the background
    if column_count == 1:
        return _Activation(missing_sigmoid(rows))
    is_background_declared = class_count == column_count - 1

    # independent scores are those of a Sigmoid; a Softmax makes scores that sum to 1
    if are_in_unit_range(rows):  # probabilities already: nothing is missing
        missing_activation = ""
        is_independent = not sums_to_one(rows).all()
    else:
        # all scores of most rows are below 0: by a Sigmoid these rows have no class, whereas a
        # Softmax gives every row a class
        has_empty_rows = np.median(rows.max(axis=1)) < 0
        is_sigmoid = class_count == column_count  # a Softmax would need one column more
        is_independent = is_sigmoid or (has_empty_rows and not is_background_declared)
        missing_activation = "sigmoid" if is_independent else "softmax"
    if is_independent:
        return _Activation(missing_activation)

    # a Softmax needs a background for the rows without an object
    background = _find_background(rows)
    if background is None and (are_known_boxes or is_background_declared):
        background = column_count - 1  # where DETR and most others have it
    return None if background is None else _Activation(missing_activation, background)


def _find_background(rows: Array) -> int | None:
    """Return the class that wins nearly all rows, if it is the first or the last one; else None.

    `rows`: scores of two or more classes.
    """
    wins = np.bincount(rows.argmax(axis=1), minlength=rows.shape[1])
    winner = int(wins.argmax())
    is_clear = wins[winner] >= MIN_BACKGROUND_SHARE * len(rows)
    if is_clear and winner in (0, len(wins) - 1):
        return winner
    return None


def _find_coding(decoder: RowDecoder, samples: FirstSamples) -> str:
    """Return the coding of the boxes, of `CODINGS`; "" if they cannot be decoded."""
    numbers = _read_rows(decoder.box_columns, samples)
    boxes = BoxRows(
        output=decoder.box_columns[0].output,
        numbers=numbers,
        relative_boxes=_to_relative(numbers, samples.picture_size),
        has_levels=len(decoder.box_columns) > 1,
        has_cells=bool(decoder.strides),
        has_gates=bool(decoder.gates),
    )
    return next((name for name, coding in CODINGS.items() if coding.fits(boxes)), "")


def _to_relative(numbers: Floats, size: ImageSize | None) -> Floats | None:
    """Return boxes [n, 4] relative to the picture, from pixels or unchanged.

    None if there are other than four numbers a box, or the size of the picture is unknown.

    `size`: (height, width) of the picture in pixels, if all samples have the same.
    """
    if numbers.shape[1] != _BOX_WIDTH:
        return None
    if are_relative(numbers):
        return numbers
    if size is None:
        return None
    return np.asarray(numbers / np.tile(size[::-1], 2))  # width, height, width, height


def read_extra(decoder: RowDecoder, samples: FirstSamples) -> RowDecoder:
    """Return the decoder with the meaning of its further columns, which are no boxes or scores.

    They are weights of masks if another output holds as many prototype maps; the angle of a box if
    there is a single column of angles; or key points that move with their boxes. If none of these
    fits, the decoder is returned as it is.
    """
    if not decoder.shape_columns:
        return decoder
    extra_columns = _read_rows(decoder.shape_columns, samples)
    boxes = _read_rows(decoder.box_columns, samples)
    width = extra_columns.shape[1]
    map_outputs = [name for name in samples.names if _are_prototypes(name, width, samples)]
    if len(map_outputs) == 1:
        return replace(decoder, mask_maps=map_outputs[0])
    if width == 1:
        has_angle = decoder.coding == "centre" and are_angles(extra_columns)
        return replace(decoder, has_angle=has_angle)
    if not decoder.coding:  # which columns are x and y of a box is not known
        return decoder
    for point_width in (3, 2):  # a key point is x, y and perhaps a visibility
        if width % point_width == 0 and _are_points(extra_columns, boxes, point_width):
            return replace(decoder, point_width=point_width)
    return decoder


def _are_prototypes(name: str, count: int, samples: FirstSamples) -> bool:
    """Whether an output holds `count` prototype maps of masks, in every sample."""
    weights = np.zeros((1, count))
    for value, inputs in zip(samples.arrays(name), samples.inputs, strict=True):
        if make_masks(weights, value, image_size(inputs)) is None:
            return False
    return True


def _are_points(extra: Floats, boxes: Floats, point_width: int) -> bool:
    """Whether columns are key points: each moves with its box, and a third number is a visibility.

    Args:
        extra: the columns of K points, [rows, K point_width].
        boxes: numbers of the boxes [rows, k], x and y first.
        point_width: numbers per key point, 2 or 3.
    """
    points = extra.reshape(len(extra), -1, point_width)
    if point_width == 3 and not are_in_unit_range(points[:, :, 2]):
        return False
    for axis, point in itertools.product((0, 1), range(points.shape[1])):
        if correlate(points[:, point, axis], boxes[:, axis]) <= MIN_POINT_CORRELATION:
            return False
    return True


# --- slices whose noise is measured ---


def slice_detector(decoder: RowDecoder, samples: FirstSamples) -> SlicesByOutput:
    """Return output -> the slices whose errors are measured; empty if boxes are not decoded.

    An output that holds both boxes and scores has a slice for its boxes, one for its scores, and
    one for the columns after them, such as key points. If boxes and scores are separate outputs,
    the boxes are weighted by the scores of the same rows, since boxes without an object are
    arbitrary.
    """
    if not decoder.box_columns:
        return {}
    if _are_separate(decoder):
        return _slice_separate_outputs(decoder, samples)

    slices: SlicesByOutput = {}
    # the slice of the scores begins at the objectness (a gate) if there is one, else at the classes
    for boxes, scores in zip(decoder.box_columns, decoder.gates or decoder.scores, strict=True):
        name = scores.output
        axis = -1 if scores.layout == ROWS else 1
        starts = {columns.start for columns in (boxes, scores, *decoder.shape_columns)}
        column_count = samples.outputs[0][name].shape[axis]
        slices[name] = ()
        for start, stop in itertools.pairwise(sorted([*starts, column_count])):
            slices[name] += (OutputSlice(name, axis, start, stop),)
    return slices


def _slice_separate_outputs(decoder: RowDecoder, samples: FirstSamples) -> SlicesByOutput:
    """Return output -> its slice, the complete output; boxes and key points with their weights."""
    slices: SlicesByOutput = {}
    for columns in (*decoder.scores, *decoder.gates):
        slices[columns.output] = (OutputSlice(columns.output),)
    weights = [*_slice_weights(decoder, samples)]
    for columns_of_levels in (decoder.box_columns, decoder.shape_columns):
        for columns, weight in zip(columns_of_levels, weights, strict=False):
            slices[columns.output] = (OutputSlice(columns.output, cell_scores=weight),)
    return slices


def _slice_weights(decoder: RowDecoder, samples: FirstSamples) -> Iterator[OutputSlice]:
    """Yield, for each level, the slice that weights its boxes: it says which hold an object.

    It holds the gates that multiply the scores, such as an objectness; without gates the scores of
    the classes, without the background.
    """
    levels = decoder.scores
    activation = decoder.activation
    start = stop = 0  # columns of the slice; a stop of 0 stands for all from `start` on
    if decoder.gates:
        levels = decoder.gates
        activation = decoder.gate_activation
    elif decoder.background is not None:  # the first column or the last one
        start = int(decoder.background == 0)
        stop = start + (decoder.class_count or 0)
    for columns in levels:
        axis: int | None = -1 if columns.layout == ROWS else 1
        if samples.outputs[0][columns.output].ndim == 2 and columns.layout == COLUMNS:
            axis = None  # [1, A] has one number a row, and no axis of columns
        yield OutputSlice(columns.output, axis=axis, start=start, stop=stop, activation=activation)
