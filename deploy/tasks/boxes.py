"""Boxes: how many of the float model's detections the candidate reproduces.

Boxes match by class and IoU > 0.5, after non-maximum suppression per class in both models. The
figure is the share of FP32's boxes that are kept; new boxes are counted beside it.

Lists are boxes that the model has suppressed itself (`LISTS`). They are sorted by score, so equal
rows of two models are different boxes: only the column of scores is compared by value, and nothing
if the length of the list varies. Other detectors: `detector_forms`.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deploy.tasks.detections import (
    Detections,
    are_relative,
    match_detections,
    scale_to_pixels,
    suppress_overlaps,
)
from deploy.tasks.detector import (
    CODINGS,
    LIST,
    NUMBER_PER_BOX,
    Columns,
    OtherShapeError,
    RowDecoder,
    holds_in_most_rows,
)
from deploy.tasks.detector_forms import find_detector, read_extra, slice_detector
from deploy.tasks.evaluation_task import (
    BoxExample,
    EvaluationTask,
    Form,
    TaskFigure,
    TaskTally,
)
from deploy.tasks.first_samples import FirstSamples
from deploy.tasks.rows import ImageSize, Outputs, image_size
from deploy.tasks.slices import OutputSlice, SlicesByOutput
from deploy.tasks.thresholds import (
    BOX_SCORE,
    MIN_LIST_ROWS,
    UNIT_TOLERANCE,
)
from deploy.tensors import Array

_USUAL_COLUMNS = 0, 4, 5  # of the first corner, the score and the class
# numbers of a row -> these columns; of longer rows, the usual ones
_ROW_COLUMNS = {
    6: (_USUAL_COLUMNS, (0, 5, 4), (2, 1, 0)),
    7: ((1, 6, 5), (1, 5, 6), (3, 2, 1), _USUAL_COLUMNS),  # three with the number of the image
}
_MIN_WIDTH = 6  # numbers of a row of corners, a score and a class
# names of boxes in TensorFlow's Object Detection API, and in its TFLite files
_ROWS_FIRST_OUTPUTS = "detection_boxes", "TFLite_Detection_PostProcess"

LISTS = Form(
    shape="one list [K, 5 or more]; or boxes [K, 4], scores [K] and perhaps classes [K]",
    values="corners, score and class number of each box, after non-maximum suppression; other"
    " values of the same row, such as key points, are compared too",
    figure="boxes of the same class with an IoU over 0.5",
    source="YOLO v10, TensorRT's NMS, Paddle, SSD's DetectionOutput, MMDetection",
)


def find_box_list(samples: FirstSamples) -> RowDecoder | None:
    """Return the decoder of a list of boxes in one, two or three outputs; None if there is none.

    If two decoders read the same outputs, such as with score and class swapped, neither is taken.
    """
    decoders = [decoder for decoder in _propose_lists(samples) if _is_list(decoder, samples)]
    readings = Counter(decoder.list_outputs for decoder in decoders)
    for decoder in decoders:
        if readings[decoder.list_outputs] == 1:
            decoder = replace(decoder, has_rows_first=_has_rows_first(decoder, samples))
            return read_extra(decoder, samples)
    return None


def _has_rows_first(decoder: RowDecoder, samples: FirstSamples) -> bool:
    """Whether the corners of a list are y1 x1 y2 x2, relative to the picture, as TensorFlow's."""
    (corners,) = decoder.box_columns
    if not corners.output.startswith(_ROWS_FIRST_OUTPUTS):
        return False
    return all(map(are_relative, samples.arrays(corners.output)))


def _propose_lists(samples: FirstSamples) -> Iterator[RowDecoder]:
    """Yield a decoder for each way to read the outputs as a list of boxes, by their shapes alone.

    A list has a row of four corner coordinates, a score and perhaps a class number for each of K
    boxes. Lists in several outputs come before those in one.
    """
    shapes = {name: samples.outputs[0][name].shape for name in samples.output_names}
    table_shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    for name, shape in table_shapes.items():
        yield from _propose_several_outputs(name, shape[-1], shapes)
    for name, shape in table_shapes.items():
        if np.prod(shape[:-2]) == 1:  # one list a sample
            yield from _propose_one_output(name, shape[-1])


def _propose_several_outputs(
    box_output: str, width: int, output_names: Collection[str]
) -> Iterator[RowDecoder]:
    """Yield lists whose class numbers, and perhaps scores, have a separate output [.., K].

    Any output may hold the class numbers, and any the scores: `_is_list` tells which do. The lists
    that are yielded last have no class numbers.

    `width`: columns of `box_output`: 4 for boxes alone, 5 for boxes and scores; others are no list.
    """
    corners = Columns(box_output, LIST, 0, 4)
    number_columns = [Columns(name, NUMBER_PER_BOX) for name in output_names]
    if width == 4:
        score_columns = number_columns
    elif width == 5:
        score_columns = [Columns(box_output, LIST, 4, 5)]
    else:
        return
    for class_columns in (*number_columns, None):
        for scores in score_columns:
            yield _list_decoder(corners, scores, class_columns)


def _propose_one_output(name: str, width: int) -> Iterator[RowDecoder]:
    """Yield lists whose boxes, scores and class numbers are columns of one output [.., K, width].

    In longer rows, key points or weights of masks come after the class. A rotated box is its centre
    and size; the angle comes after the class.
    """
    if width < _MIN_WIDTH:
        return
    # each order of the columns that rows of this width may have
    for first_corner, score_column, class_column in _ROW_COLUMNS.get(width, (_USUAL_COLUMNS,)):
        decoder = _list_decoder(
            Columns(name, LIST, first_corner, first_corner + 4),
            Columns(name, LIST, score_column, score_column + 1),
            Columns(name, LIST, class_column, class_column + 1),
        )
        if width > _MIN_WIDTH and first_corner == 0:
            # seven numbers are a rotated box, its score, its class and its angle
            coding = "centre" if width == 7 else "corners"
            shape_columns = (Columns(name, LIST, _MIN_WIDTH),)
            decoder = replace(decoder, coding=coding, shape_columns=shape_columns)
        yield decoder


def _list_decoder(corners: Columns, scores: Columns, classes: Columns | None) -> RowDecoder:
    """Return the decoder of a list by its columns; `classes`: of the class numbers, if any."""
    return RowDecoder(
        scores=(scores,),
        box_columns=(corners,),
        class_columns=() if classes is None else (classes,),
        coding="corners",
        is_list=True,
    )


def _is_list(decoder: RowDecoder, samples: FirstSamples) -> bool:
    """Whether a proposed list is one: ordered corners, scores of 0 to 1 and whole class numbers.

    Without class numbers the scores must also fall from row to row.
    """
    try:
        tables = [decoder.read_list(outputs) for outputs in samples.outputs]
    except OtherShapeError:
        return False
    rows = np.concatenate(tables)  # columns: four of the corners, score, class number
    if not decoder.class_columns:
        has_falling_scores = all((np.diff(table[:, 4]) <= 0).all() for table in tables)
        # one row a sample cannot show that scores fall
        if not has_falling_scores or len(rows) <= len(tables):
            return False
    # pooled features [N, C] have one row a sample; a channel that is always 0 looks like class 0
    if decoder.shape_columns and all(len(table) == 1 for table in tables):
        return False
    if not np.isfinite(rows).all():
        return False
    rows = rows[rows[:, 4] > 0]  # lists of fixed length end in rows without a box, of score 0
    if len(rows) < MIN_LIST_ROWS:
        return False

    is_whole = np.all(rows == rows.round(), axis=0)  # which columns are whole numbers
    if decoder.coding == "centre" and is_whole[0]:
        # seven columns were taken for a rotated box by centre, but this is the number of the image
        return False
    # whole numbers would be classes, and no scores
    has_scores = rows[:, 4].max() <= 1 + UNIT_TOLERANCE and not is_whole[4]
    has_classes = rows[:, 5].min() >= 0 and is_whole[5]
    # the second argument, cells, is not read: no list has a coding that counts from cells
    corners = CODINGS[decoder.coding].decode(rows[:, :4], rows)
    # the second corner is right of the first and below it
    are_ordered = holds_in_most_rows(corners[:, 2:] >= corners[:, :2])
    return bool(has_scores and has_classes and are_ordered)


def _slice_list(decoder: RowDecoder, samples: FirstSamples) -> SlicesByOutput:
    """Return output -> its slices that are compared by value, for a list of boxes.

    An output with () is not compared; one that is left out is compared as it is. The scores of the
    boxes are compared if all samples have lists of equal length. Boxes and classes are not: rows
    are sorted by score, so row 3 of two models may be two objects. Nor are other outputs with a row
    for each box, such as masks, and the number of boxes.
    """
    box_counts = [len(decoder.read_list(outputs)) for outputs in samples.outputs]
    # (): no slice is compared; the scores get theirs at the end
    slices: SlicesByOutput = dict.fromkeys(decoder.list_outputs, ())
    for name in samples.output_names:
        values = samples.arrays(name)
        is_box_count = all(map(_is_number_of_boxes, values, box_counts))
        if is_box_count or _has_row_per_box(values, box_counts):
            slices[name] = ()

    (scores,) = decoder.scores
    arrays = samples.arrays(scores.output)
    if len({value.shape for value in arrays}) > 1:  # lists of unequal length
        return slices
    if scores.layout == NUMBER_PER_BOX:  # the scores are an output of their own
        slices[scores.output] = (OutputSlice(scores.output),)
    elif arrays[0].ndim > 2:  # they are a column of [1, K, R]
        stop = scores.start + 1
        column = OutputSlice(scores.output, axis=-1, start=scores.start, stop=stop)
        slices[scores.output] = (column,)
    # a column of [K, R] stays (): without a batch axis, K boxes look like a batch of K samples
    return slices


def _has_row_per_box(values: Sequence[Array], box_counts: Sequence[int]) -> bool:
    """Whether an output, [K, ..] or [1, K, ..], has a row for each of the K boxes of all samples.

    If all samples have equally many boxes, a side of a matrix may be as long by chance: then only
    an output of three or more dimensions has rows.

    Args:
        values: the output of each sample.
        box_counts: the number of boxes of each sample.
    """
    if values[0].ndim <= 2 and len(set(box_counts)) == 1:
        return False
    return all(count in value.shape[:2] for value, count in zip(values, box_counts, strict=True))


def _is_number_of_boxes(value: Array, count: int) -> bool:
    """Whether an output is how many of `count` rows are boxes."""
    return value.size == 1 and value.item() in range(count + 1)


_PICTURE_DIMENSIONS = 4  # as of feature maps


@dataclass(slots=True)
class BoxTally(TaskTally["BoxDetection"]):
    """Counts boxes with a score above `BOX_SCORE`, and stores samples to show."""

    def _add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Match the boxes of one sample, count them, and offer them to show."""
        decoder = self.task.decoder
        reference_boxes = suppress_overlaps(decoder.boxes(inputs, reference).above(BOX_SCORE))
        candidate_boxes = suppress_overlaps(decoder.boxes(inputs, candidate).above(BOX_SCORE))
        pairs = match_detections(reference_boxes, candidate_boxes)
        self.total += len(reference_boxes.scores)
        self.kept += len(pairs)
        self.new += len(candidate_boxes.scores) - len(pairs)
        # boxes of no coding are squares without a place in the picture: nothing to show
        size = image_size(inputs) if decoder.coding else None
        if size is not None:
            self._offer_example(pairs, reference_boxes, candidate_boxes, size)

    def _offer_example(
        self,
        pairs: Sequence[tuple[int, int]],
        reference: Detections,
        candidate: Detections,
        size: ImageSize,
    ) -> None:
        """Offer the boxes of the sample that was counted last, to be shown over its picture.

        Args:
            pairs: indices of the boxes that match, of the reference and of the candidate.
            reference: FP32's boxes.
            candidate: the candidate's boxes.
            size: (height, width) of the picture in pixels.
        """
        # indices of boxes: the matching ones of both models, and the others of each
        kept_indices, found_indices = np.array(pairs, np.int64).reshape(-1, 2).T
        lost_indices = np.setdiff1d(np.arange(len(reference.scores)), kept_indices)
        new_indices = np.setdiff1d(np.arange(len(candidate.scores)), found_indices)
        reference = scale_to_pixels(reference, size)
        candidate = scale_to_pixels(candidate, size)
        example = BoxExample(
            number=self.samples - 1,  # `add` has counted this sample already
            size=size,
            kept=reference.at(kept_indices),
            found=candidate.at(found_indices),
            lost=reference.at(lost_indices),
            new=candidate.at(new_indices),
        )
        difference = len(lost_indices) + len(new_indices)
        self.offer(example, difference=difference, predictions=len(reference.scores))

    def result(self) -> TaskFigure | None:
        """Return the share of FP32's boxes that are kept; None if it has none."""
        if not self.total:
            return None
        text = f"boxes of FP32 kept, {self.new} new (score above {BOX_SCORE:g})"
        return replace(self.share("boxes kept", text), found=self.total)


@dataclass(frozen=True, slots=True)
class BoxDetection(EvaluationTask):
    """Object detection.

    Attributes:
        decoder: reads the boxes of a model's outputs.
    """

    decoder: RowDecoder
    name = "boxes"
    tally_type = BoxTally

    @property
    def covered(self) -> tuple[str, ...]:
        """The outputs that the decoder reads."""
        return self.decoder.outputs

    @property
    def form(self) -> str:
        """How the outputs are interpreted."""
        return self.decoder.form

    @property
    def lists(self) -> frozenset[str]:
        """The outputs of lists of boxes, and those with a row for each box."""
        unsliced_outputs = (name for name, slices in self.parts.items() if not slices)
        return frozenset((*self.decoder.list_outputs, *unsliced_outputs))


def fit_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Return the boxes of outputs that the user or the file says to hold such; else None."""
    return _find_rows(replace(samples, are_known_boxes=True))


def find_boxes(samples: FirstSamples) -> BoxDetection | None:
    """Return the boxes of outputs whose form is certain: a list, or rows of a detector; else None.

    Inputs of text or sound are excluded: the scores of a token or frame may be four numbers, too.
    """
    ranks = [value.ndim for inputs in samples.inputs for value in inputs.values()]
    if ranks and max(ranks) < _PICTURE_DIMENSIONS:
        return None
    decoder = find_box_list(samples)
    if decoder is not None:
        return BoxDetection(decoder, parts=_slice_list(decoder, samples))
    return _find_rows(samples)


def _find_rows(samples: FirstSamples) -> BoxDetection | None:
    """Return the boxes of a detector with a row per anchor, cell or query; else None."""
    decoder = find_detector(samples)
    if decoder is None:
        return None
    return BoxDetection(decoder, parts=slice_detector(decoder, samples))
