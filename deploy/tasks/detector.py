"""Decoder of detectors with a row of numbers per anchor, cell or query, or per box of a list.

Scores and boxes may share an output, or have one each, or one each per level. Lists are boxes that
the model has suppressed itself, with a class number each.

How the numbers of a row are a box is its coding (`CODINGS`). Boxes of no coding are not decoded: a
detection is then matched by its row and class.

Columns after the boxes may be key points (x, y or x, y, visibility), weights of prototype masks in
another output (YOLACT, Bolya et al. 2019), or an angle.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deploy.errors import counted
from deploy.tasks.detections import (
    NO_DETECTIONS,
    BoxPoints,
    BoxShapes,
    Detections,
    anchor_squares,
    find_rotated_ends,
    make_masks,
)
from deploy.tasks.rows import (
    Flags,
    Floats,
    ImageSize,
    Integers,
    Outputs,
    activate,
    correlate,
    image_size,
)
from deploy.tasks.thresholds import (
    DISTRIBUTION_BINS,
    MAX_CELL_OFFSET,
    MAX_OUTSIDE_PICTURE,
    MIN_BOX_SCORE,
    MIN_CENTRE_SPREAD,
    MIN_CODED_SHARE,
    MIN_CORNER_CORRELATION,
    MIN_INSIDE_SHARE,
)
from deploy.tensors import Array

Layout = str  # one of these
ROWS = "rows"  # [1, A, R], [A, R], or [1, A, 1, R] as YOLOv4's boxes
COLUMNS = "columns"  # [1, R, A]; [1, A] of one column
MAP = "map"  # [1, R, H, W]
ANCHOR_MAP = "anchor map"  # [1, 3 R, H, W] or [1, k, H, W, R]
LIST = "list"  # [.., K, R]
NUMBER_PER_BOX = "list numbers"  # [.., K]: a list in an output of one number a box
# dimensions of outputs with a row per anchor
LAYOUT_DIMENSIONS = {ROWS: (2, 3, 4), COLUMNS: (2, 3), MAP: (4,), ANCHOR_MAP: (4, 5)}
ANCHORS_PER_CELL = 3  # of an anchor map whose shape does not show it: YOLO v3 to v7
ROWS_FIRST = [1, 0, 3, 2]  # columns of x1 y1 x2 y2 in corners y1 x1 y2 x2
MAX_LOG_SIDE = 10.0  # logarithm of a side in cells; larger ones would overflow
STRIDES = (4, 8, 16, 32, 64, 128)  # pixels from cell to cell of a detector's levels


class OtherShapeError(Exception):
    """An output does not have the shape that a decoder needs."""


def to_table(value: Array | None, layout: Layout) -> Array:
    """Return an output as [anchors, columns], as a view where that is possible.

    Args:
        value: the output of one sample; None if the model does not give it.
        layout: which dimensions are the A anchors and the R columns. `ROWS`: [1, A, R], [A, R] or
            [1, A, 1, R]. `COLUMNS`: [1, R, A], or [1, A] of one column. `MAP`: [1, R, H, W].
            `ANCHOR_MAP`: [1, 3 R, H, W] or [1, k, H, W, R]. Of a list of K boxes, `LIST`:
            [.., K, R]; `NUMBER_PER_BOX`: [.., K].

    Raises:
        OtherShapeError: the output does not have the layout.
    """
    if value is None:
        raise OtherShapeError
    if layout == NUMBER_PER_BOX:
        return value.reshape(-1, 1)
    if layout == LIST and value.ndim > 1:
        return value.reshape(-1, value.shape[-1])

    has_dimensions = value.ndim in LAYOUT_DIMENSIONS.get(layout, ())
    if not has_dimensions or not value.size or value.dtype.kind != "f":
        raise OtherShapeError
    # [1, A, 1, R] are rows, other arrays of four dimensions are maps
    is_map = layout == ROWS and value.ndim == 4 and value.shape[2] > 1
    # [A, R] has no dimension of samples; in the others, that is the first one
    has_sample_axis = layout != ROWS or value.ndim != 2
    if is_map or (has_sample_axis and len(value) != 1):
        raise OtherShapeError
    if layout in (COLUMNS, MAP):
        columns = np.atleast_2d(value[0])
        return columns.reshape(len(columns), -1).T
    if layout == ANCHOR_MAP and value.ndim == 4:
        if value.shape[1] % ANCHORS_PER_CELL:
            raise OtherShapeError
        # [1, 3 R, H, W] -> [3, H, W, R]
        value = np.moveaxis(value.reshape(ANCHORS_PER_CELL, -1, *value.shape[2:]), 1, 3)
    return value.reshape(-1, value.shape[-1])


def count_cells(size: ImageSize, stride: int) -> ImageSize:
    """Return (rows, columns) of the cells over a picture, incomplete ones at its edge included.

    Args:
        size: (height, width) of the picture in pixels.
        stride: pixels from cell to cell.
    """
    height, width = size
    return math.ceil(height / stride), math.ceil(width / stride)


def list_cells(strides: Sequence[int], size: ImageSize) -> Floats:
    """Return column, row, and stride in pixels of each cell over a picture, level by level, [A, 3].

    Args:
        strides: pixels from cell to cell, per level.
        size: (height, width) of the picture in pixels.
    """
    levels = []
    for stride in strides:
        rows, columns = np.indices(count_cells(size, stride)).reshape(2, -1)
        levels.append(np.stack([columns, rows, np.full(len(rows), stride)], axis=1))
    return np.concatenate(levels).astype(np.float64)


def find_strides(count: int, size: ImageSize | None) -> tuple[int, ...]:
    """Return the strides of the levels whose cells over a picture are as many as a detector's rows.

    The levels have adjacent strides, such as 8, 16 and 32 pixels; incomplete cells at the picture's
    edge count. Of several that fit, the most levels are returned; the tuple is empty if none fit.

    Args:
        count: number of rows.
        size: (height, width) of the picture in pixels; None if it is unknown.
    """
    if size is None:
        return ()
    fitting_strides: list[tuple[int, ...]] = [()]
    for start, stop in itertools.combinations(range(len(STRIDES) + 1), 2):
        strides = STRIDES[start:stop]
        if sum(math.prod(count_cells(size, stride)) for stride in strides) == count:
            fitting_strides.append(strides)
    return max(fitting_strides, key=len)


def fits_stride(sides: tuple[int, ...], size: ImageSize | None) -> bool:
    """Whether (rows, columns) of a map are those of the picture divided by a stride, rounded up."""
    if size is None:
        return False
    return any(sides == count_cells(size, stride) for stride in STRIDES)


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of an output's table.

    Attributes:
        output: name of the output.
        layout: how the output becomes a table.
        start, stop: the columns, half open; stop None for all from start on.
    """

    output: str
    layout: Layout
    start: int = 0
    stop: int | None = None

    def of(self, outputs: Outputs) -> Array:
        """Return the columns [A, n] of one sample."""
        table = to_table(outputs.get(self.output), self.layout)
        if table.shape[1] < (self.stop or self.start):
            raise OtherShapeError
        return table[:, self.start : self.stop]


def read_columns(
    levels: Sequence[Columns], outputs: Outputs, row_count: int | None = None
) -> Floats:
    """Return one table [A, n] of a sample: the columns of its levels, the rows level after level.

    `row_count`: number of rows A that they must have; None for any.

    Raises:
        OtherShapeError: an output has another shape, or levels have different widths.
    """
    tables = [columns.of(outputs) for columns in levels]
    fits_row_count = row_count in (None, sum(map(len, tables)))
    if not fits_row_count or len({table.shape[1] for table in tables}) != 1:
        raise OtherShapeError
    return np.concatenate(tables, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecoder:
    """Decoder of a detector with a row per anchor, cell or query.

    Attributes:
        scores: columns of the classes, of each level.
        box_columns: columns of the boxes, of each level; empty if they are not decoded.
        gates: columns that multiply the scores, such as an objectness; empty without.
        shape_columns: columns of key points, mask weights or an angle; empty without.
        class_columns: column of the class numbers of a list; empty without.
        is_list: whether the model has suppressed the boxes itself.
        has_rows_first: whether a list's corners are y1 x1 y2 x2.
        strides: pixels from cell to cell, per level; empty if rows are not one cell each.
        coding: how the boxes are coded; "" if they are not decoded.
        class_count: number of classes, without the background; None for a list, which does not
            show it.
        activation: missing activation of the scores: "", "sigmoid" or "softmax".
        gate_activation: the same of the gates.
        background: class of the background, which is left out; None without.
        point_width: numbers per key point of the shape columns, 2 or 3; 0 without.
        mask_maps: output of the masks' prototypes; "" without.
        has_angle: whether the shape column is an angle.
    """

    scores: tuple[Columns, ...]
    box_columns: tuple[Columns, ...] = ()
    gates: tuple[Columns, ...] = ()
    shape_columns: tuple[Columns, ...] = ()
    class_columns: tuple[Columns, ...] = ()
    is_list: bool = False
    has_rows_first: bool = False
    strides: tuple[int, ...] = ()
    coding: str = ""
    class_count: int | None = None
    activation: str = ""
    gate_activation: str = ""
    background: int | None = None
    point_width: int = 0
    mask_maps: str = ""
    has_angle: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """All outputs that it reads."""
        all_columns = self.box_columns + self.scores + self.class_columns + self.gates
        names = [columns.output for columns in all_columns + self.shape_columns]
        if self.mask_maps:
            names.append(self.mask_maps)
        return tuple(dict.fromkeys(names))

    @property
    def list_outputs(self) -> tuple[str, ...]:
        """Outputs of a list, without prototypes of masks; none of other detectors."""
        if not self.is_list:
            return ()
        return tuple(name for name in self.outputs if name != self.mask_maps)

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        extras = ""
        if self.has_angle:
            extras += ", an angle"
        if self.mask_maps:
            extras += ", a mask"
        if self.point_width:
            extras += ", key points"
        if self.is_list:
            return f"{', '.join(self.list_outputs)}: a list of boxes, scores and classes{extras}"
        names = dict.fromkeys(columns.output for columns in self.scores)
        objectness = "objectness and " if self.gates else ""
        scores = self.activation or "scores"
        classes = counted(self.class_count or 0, "class")
        boxes = f"boxes by {self.coding}" if self.coding else "boxes matched by anchor"
        text = f"{', '.join(names)}: {objectness}{scores} of {classes}, {boxes}"
        return text + extras

    def boxes(self, inputs: Outputs, outputs: Outputs) -> Detections:
        """Return the boxes of one sample, of all levels; none for outputs of other shapes.

        Args:
            inputs: of the sample, for the size of the picture.
            outputs: of the sample.
        """
        try:
            scores, classes = self._read_best(outputs)
            # few rows are likely objects: only these are decoded
            rows = np.flatnonzero(scores > MIN_BOX_SCORE)
            if self.coding:
                corners, shapes = self._decode(rows, len(scores), image_size(inputs), outputs)
            else:  # a square for each row, so that the boxes of both models are matched by row
                corners, shapes = anchor_squares(rows), None
        except OtherShapeError:
            return NO_DETECTIONS
        return Detections.of(corners, scores[rows], classes[rows], shapes)

    def _read_best(self, outputs: Outputs) -> tuple[Floats, Integers]:
        """Return the score and the class of each row, [A]; NaN for a row with any score of NaN.

        Raises:
            OtherShapeError: an output has another shape.
        """
        if self.is_list:
            table = self.read_list(outputs)
            # int8 may give NaN or Inf, which no class number is
            classes = np.nan_to_num(table[:, 5], nan=-1, posinf=-1, neginf=-1)
            return table[:, 4], classes.round().astype(np.int64)
        scores = self.read_scores(outputs)
        return scores.max(axis=1), scores.argmax(axis=1)

    def read_list(self, outputs: Outputs) -> Floats:
        """Return box, score and class number of a list, [K, 6]; class 0 if it has no classes.

        Raises:
            OtherShapeError: an output has another shape.
        """
        boxes = self._read_boxes(outputs)
        scores = read_columns(self.scores, outputs, len(boxes))
        classes = np.zeros((len(boxes), 1))
        if self.class_columns:
            classes = read_columns(self.class_columns, outputs, len(boxes))
        return np.concatenate([boxes, scores, classes], axis=1)

    def _read_boxes(self, outputs: Outputs, row_count: int | None = None) -> Floats:
        """Return the numbers of the boxes of all rows; the corners of a list as x1 y1 x2 y2."""
        boxes = read_columns(self.box_columns, outputs, row_count)
        return boxes[:, ROWS_FIRST] if self.has_rows_first else boxes

    def read_scores(self, outputs: Outputs) -> Floats:
        """Return the probabilities [anchors of all levels, classes] of a sample, no background.

        Gates are multiplied in: columns such as an objectness, the probability of any object.

        Raises:
            OtherShapeError: an output has another shape.
        """
        scores = read_columns(self.scores, outputs)
        # `class_count` is None for a list only, whose scores `read_list` reads
        if scores.shape[1] - (self.background is not None) != self.class_count:
            raise OtherShapeError
        scores = activate(scores, self.activation)
        if self.background is not None:
            scores = np.delete(scores, self.background, axis=1)
        if not self.gates:
            return scores
        gates = read_columns(self.gates, outputs, row_count=len(scores))
        return scores * activate(gates, self.gate_activation)

    def _decode(
        self, rows: Integers, row_count: int, size: ImageSize | None, outputs: Outputs
    ) -> tuple[Floats, BoxShapes | None]:
        """Return the corners of some rows, and their masks or key points; a row is one box.

        Args:
            rows: indices of the rows to decode.
            row_count: number of all rows.
            size: (height, width) of the picture in pixels; None if it is unknown.
            outputs: of the sample.

        Raises:
            OtherShapeError: an output has another shape, or the coding counts from cells and the
                size of the picture is unknown.
        """
        encoded_boxes = self._read_boxes(outputs, row_count)[rows]
        coding = CODINGS[self.coding]
        # column, row and stride of each row's cell; codings without cells do not read them
        cells = np.zeros((row_count, 3))
        if coding.uses_cells:
            if size is None:  # cells cannot be placed
                raise OtherShapeError
            cells = list_cells(self.strides, size)
            if len(cells) != row_count:
                raise OtherShapeError
        shapes = None
        if self.shape_columns:
            shape_numbers = read_columns(self.shape_columns, outputs, row_count)[rows]
            shapes = self._read_shapes(encoded_boxes, shape_numbers, size, outputs)
        return coding.decode(encoded_boxes, cells[rows]), shapes

    def _read_shapes(
        self, boxes: Floats, numbers: Floats, size: ImageSize | None, outputs: Outputs
    ) -> BoxShapes | None:
        """Return the masks, the ends of rotated boxes, or the key points of some rows.

        None if the shape columns have no known meaning.

        Args:
            boxes: numbers of these rows' boxes, [n, 4].
            numbers: their shape columns, [n, k].
            size: (height, width) of the picture in pixels; None if it is unknown.
            outputs: of the sample.

        Raises:
            OtherShapeError: an output has another shape.
        """
        if self.mask_maps:
            masks = make_masks(numbers, outputs.get(self.mask_maps), size)
            if masks is None:
                raise OtherShapeError
            return masks
        if self.has_angle:
            return BoxPoints(find_rotated_ends(boxes, numbers[:, 0]))
        if not self.point_width:
            return None
        if numbers.shape[1] % self.point_width:
            raise OtherShapeError
        point_count = numbers.shape[1] // self.point_width
        return BoxPoints(numbers.reshape(len(numbers), point_count, self.point_width))


# --- codings of boxes ---

CENTRE_OUTPUTS = ("pred_boxes", "dets")  # names of relative boxes by centre, of DETR's exporters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxRows:
    """Numbers of the boxes of the first samples, which show how these are coded.

    Attributes:
        output: name of the output, the first one of several levels.
        numbers: the numbers of a box in each row, [n, k].
        relative_boxes: four numbers relative to the picture, [n, 4]; None if its size is unknown,
            or there are more.
        has_levels: whether the rows are those of several outputs.
        has_cells: whether each row is a cell of a known grid.
        has_gates: whether other columns multiply the scores.
    """

    output: str
    numbers: Floats
    relative_boxes: Floats | None = None
    has_levels: bool = False
    has_cells: bool = False
    has_gates: bool = False


class BoxCoding(NamedTuple):
    """How the numbers of a row are a box; a row of docs/forms.md.

    Boxes are looked for in a separate output; in an output with the scores, boxes of four numbers
    before the scores, and all others after them. Any other order needs a layout in `PROPOSALS` of
    `detector_forms` too. The program `X_run.py` draws the boxes of a coding that has a row in
    `_CORNER_LINES` of `deploy/targets/onnxruntime/run_script.py`.

    Attributes:
        numbers: what they are, as text.
        source: models or papers that have it, as text.
        fits: whether numbers have this coding.
        decode: numbers [n, k] and cells [n, 3] (column, row, stride) -> corners [n, 4].
        uses_cells: whether numbers are relative to the cell of their row.
    """

    numbers: str
    source: str
    fits: Callable[[BoxRows], bool]
    decode: Callable[[Floats, Floats], Floats]
    uses_cells: bool = False


def are_distributions(boxes: BoxRows) -> bool:
    """Whether numbers may be logits of four distributions over the distances from a cell."""
    has_bins = boxes.numbers.shape[1] in [4 * bin_count for bin_count in DISTRIBUTION_BINS]
    return boxes.has_cells and has_bins and boxes.numbers.min() < 0


def decode_distances(numbers: Floats, cells: Floats) -> Floats:
    """Return corners of distributions [n, 4 (m + 1)] of the distances from cells [n, 3]."""
    bins = numbers.reshape(len(numbers), 4, numbers.shape[1] // 4)
    with np.errstate(invalid="ignore"):
        # left, top, right, bottom
        distances = activate(bins, "softmax") @ np.arange(bins.shape[2])
    middles = cells[:, :2] + 0.5
    strides = cells[:, 2:]
    corners = [middles - distances[:, :2], middles + distances[:, 2:]]
    return np.concatenate(corners, axis=1) * strides


def are_corners(boxes: BoxRows) -> bool:
    """Whether the second corner is right of the first and below it, and moves with it."""
    if boxes.relative_boxes is None or boxes.output in CENTRE_OUTPUTS:
        return False
    low = boxes.relative_boxes[:, :2]
    high = boxes.relative_boxes[:, 2:]
    correlation = min(correlate(low[:, axis], high[:, axis]) for axis in (0, 1))
    moves_together = correlation > MIN_CORNER_CORRELATION
    are_ordered = holds_in_most_rows(high >= low)
    return moves_together and are_ordered and _are_all_over((low + high) / 2)


def are_centres(boxes: BoxRows) -> bool:
    """Whether numbers are centres all over the picture, and sizes."""
    if boxes.output in CENTRE_OUTPUTS:
        return bool(boxes.numbers.shape[1] == 4)
    if boxes.relative_boxes is None or boxes.has_levels:
        return False
    centres = boxes.relative_boxes[:, :2]
    sizes = boxes.relative_boxes[:, 2:]
    return holds_in_most_rows(sizes >= 0) and _are_all_over(centres)


def to_corners(boxes: Floats) -> Floats:
    """Convert boxes [n, 4] from centre and size (cx cy w h) to corners (x1 y1 x2 y2)."""
    half = boxes[:, 2:4] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def are_offsets(boxes: BoxRows) -> bool:
    """Whether numbers are small offsets from a cell, and logarithms of sizes, of both signs."""
    if boxes.has_levels or not boxes.has_cells or not boxes.has_gates:
        return False
    are_small = holds_in_most_rows(np.abs(boxes.numbers) < MAX_CELL_OFFSET)
    return boxes.numbers.shape[1] == 4 and are_small and boxes.numbers[:, 2:].min() < 0


def decode_offsets(numbers: Floats, cells: Floats) -> Floats:
    """Return corners of YOLOX's boxes [n, 4] in cells [n, 3]."""
    sides = np.exp(np.minimum(numbers[:, 2:4], MAX_LOG_SIDE))
    centred_boxes = np.concatenate([numbers[:, :2] + cells[:, :2], sides], axis=1)
    return to_corners(centred_boxes) * cells[:, 2:]


def _are_all_over(centres: Floats) -> bool:
    """Whether relative centres of boxes lie in the picture, and everywhere in it."""
    margin = MAX_OUTSIDE_PICTURE
    is_inside = np.all((centres > -margin) & (centres < 1 + margin), axis=1)
    is_spread = centres.std(axis=0).min() > MIN_CENTRE_SPREAD
    return bool(is_spread and is_inside.mean() >= MIN_INSIDE_SHARE)


def holds_in_most_rows(conditions: Flags) -> bool:
    """Whether nearly all rows [n, k] meet all conditions."""
    return bool(conditions.all(axis=1).mean() >= MIN_CODED_SHARE)


# name of a coding -> the coding; the first that fits is taken
CODINGS = {
    "distribution": BoxCoding(
        "b logits per side of the box: their Softmax weights the distances 0, 1, ... b - 1 from the"
        " cell, in strides",
        "Generalized Focal Loss (Li et al. 2020): PicoDet, NanoDet, YOLO v6 and v8 before decoding",
        are_distributions,
        decode_distances,
        uses_cells=True,
    ),
    "corners": BoxCoding(
        "x1 y1 x2 y2, in pixels or relative to the picture",
        "SSD, RetinaNet, YOLO v10",
        are_corners,
        lambda numbers, cells: numbers,
    ),
    "centre": BoxCoding(
        "cx cy w h, in pixels or relative to the picture",
        "YOLO v5 to v11, DETR",
        are_centres,
        lambda numbers, cells: to_corners(numbers),
    ),
    "cell": BoxCoding(
        "x y w h in strides: the centre is at x + column, y + row; the size is exp(w), exp(h)",
        "YOLOX (Ge et al. 2021)",
        are_offsets,
        decode_offsets,
        uses_cells=True,
    ),
}
