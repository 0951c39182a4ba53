"""Pictures of a report: samples of the calibration data, and samples where two models differ.

Only the HTML page shows pictures; JSON contains names, counts and how the pictures were prepared.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.feed.decoding import opencv
from deploy.feed.images import printable_name
from deploy.feed.pixels import describe_display
from deploy.feed.preprocess import Preprocess
from deploy.feed.preview import Preview
from deploy.tasks.detections import Detections
from deploy.tasks.evaluation_task import BoxExample, ClassExample, Example
from deploy.tensors import Array

_QUALITY = 85  # JPEG quality


@dataclass(frozen=True, slots=True)
class Raster:
    """An encoded picture."""

    kind: str  # "png" or "jpeg"
    data: bytes  # bytes of the file
    # width, height: in pixels
    width: int
    height: int

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode('ascii')}"


def raster(picture: Array) -> Raster:
    """Encode RGB uint8 [h, w, 3] as PNG or JPEG, whichever is smaller; deterministic."""
    cv2 = opencv()
    bgr = np.ascontiguousarray(picture[:, :, ::-1])
    encoded = {
        "png": cv2.imencode(".png", bgr)[1].tobytes(),
        "jpeg": cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes(),
    }
    kind = min(encoded, key=lambda one: len(encoded[one]))
    return Raster(kind, encoded[kind], width=picture.shape[1], height=picture.shape[0])


DRAWN = {"drawn": True}  # metadata of fields for the page only: JSON leaves them out


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRow:
    """One sample: its original picture, if it had one, and the model's input.

    Attributes:
        model_input, original: as pictures; no original without a file of pixels.
        model_input_size, original_size: (height, width) in pixels, before downscaling.
    """

    name: str
    model_input: Raster
    model_input_size: tuple[int, int]
    original: Raster | None = None
    original_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesPart:
    """Pictures of a few samples: how they were prepared, their names, and the pictures."""

    how: str
    samples: tuple[str, ...]
    views: tuple[ViewRow, ...] = field(default=(), metadata=DRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBox:
    """A box relative to the picture (x1 y1 x2 y2), its class by name or number, and its score."""

    corners: tuple[float, float, float, float]
    kind: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBoxes:
    """Boxes of the float model and an engine in one sample, and the picture below them."""

    number: int  # index of the sample, from 0
    picture: Raster
    size: tuple[int, int]  # (height, width) of the model's input
    matched_fp32: tuple[DrawnBox, ...] = ()  # boxes of the float model that the engine finds too
    matched_engine: tuple[DrawnBox, ...] = ()  # the engine's boxes that match them
    # lost, new: boxes of the float model only, and of the engine only
    lost: tuple[DrawnBox, ...] = ()
    new: tuple[DrawnBox, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRow:
    """One sample: number of boxes above a score threshold that are kept, lost and new."""

    sample: str
    threshold: float
    kept: int
    lost: int
    new: int
    boxes: DrawnBoxes | None = field(default=None, metadata=DRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One sample of another class in an engine: class and score of both models."""

    sample: str
    output: str
    fp32: int
    fp32_value: float
    engine: int
    engine_value: float
    picture: Raster | None = field(default=None, metadata=DRAWN)


def pictures_part(views: Iterable[Preview], how: Preprocess | None) -> PicturesPart | None:
    """Return the pictures of samples; None without any."""
    rows = tuple(
        ViewRow(
            name=printable_name(view.name),
            model_input=raster(view.input_image),
            model_input_size=view.input_size,
            original=None if view.source_image is None else raster(view.source_image),
            original_size=view.source_size,
        )
        for view in views
    )
    if not rows:
        return None
    return PicturesPart(
        how=describe_display(how), samples=tuple(row.name for row in rows), views=rows
    )


def box_rows(
    examples: Sequence[Example], looks: Mapping[int, tuple[str, Array]], names: Mapping[int, str]
) -> tuple[BoxRow, ...]:
    """Return rows of the box examples whose picture is available.

    `looks`: index of a sample -> its name and picture, uint8 [h, w, 3]. `names`: class -> name.
    """
    pictured = (one for one in examples if isinstance(one, BoxExample) and one.number in looks)
    return tuple(_box_row(one, *looks[one.number], names) for one in pictured)


def class_rows(
    examples: Sequence[Example], looks: Mapping[int, tuple[str, Array]]
) -> tuple[ClassRow, ...]:
    """Return rows of the examples whose class changes and whose picture is available."""
    return tuple(
        ClassRow(
            sample=printable_name(looks[one.number][0]),
            output=one.output,
            fp32=one.reference[0],
            fp32_value=one.reference[1],
            engine=one.candidate[0],
            engine_value=one.candidate[1],
            picture=raster(looks[one.number][1]),
        )
        for one in examples
        if isinstance(one, ClassExample) and one.number in looks
    )


def _box_row(example: BoxExample, name: str, picture: Array, names: Mapping[int, str]) -> BoxRow:
    drawn = DrawnBoxes(
        number=example.number,
        picture=raster(picture),
        size=example.size,
        matched_fp32=_boxes(example.kept, example.size, names),
        matched_engine=_boxes(example.found, example.size, names),
        lost=_boxes(example.lost, example.size, names),
        new=_boxes(example.new, example.size, names),
    )
    return BoxRow(
        sample=printable_name(name),
        threshold=example.threshold,
        kept=len(drawn.matched_fp32),
        lost=len(drawn.lost),
        new=len(drawn.new),
        boxes=drawn,
    )


def _boxes(
    detections: Detections, size: tuple[int, int], names: Mapping[int, str]
) -> tuple[DrawnBox, ...]:
    height, width = size
    return tuple(
        DrawnBox(
            corners=(x1 / width, y1 / height, x2 / width, y2 / height),
            kind=names.get(int(kind), str(int(kind))),
            score=float(score),
        )
        for (x1, y1, x2, y2), kind, score in zip(
            detections.boxes.tolist(), detections.classes, detections.scores, strict=True
        )
    )
