"""What of a run can be looked at: pictures of the feed, and samples where two models differ.

Only the page shows pictures; JSON has names and counts, and how the pictures came about.

A small picture inside the report: PNG or JPEG, whichever takes fewer bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.feed.images import opencv, shown
from deploy.feed.pixels import how_shown
from deploy.feed.preprocess import Preprocess
from deploy.feed.preview import View
from deploy.metrics.tasks.detections import Detections
from deploy.metrics.tasks.task import BoxExample, ClassExample, Example
from deploy.tensors import Array

_QUALITY = 85  # of JPEG


@dataclass(frozen=True, slots=True)
class Raster:
    """An encoded picture.

    Attributes:
        kind: "png" or "jpeg".
        data: the file's bytes.
        width, height: in pixels.
    """

    kind: str
    data: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        """As an address that holds the picture itself."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode('ascii')}"


def raster(picture: Array) -> Raster:
    """Encode uint8 [h, w, 3], red, green, blue; the same bytes for the same picture and OpenCV."""
    cv2 = opencv()
    turned = np.ascontiguousarray(picture[:, :, ::-1])
    made = {
        "png": cv2.imencode(".png", turned)[1].tobytes(),
        "jpeg": cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes(),
    }
    kind = min(made, key=lambda one: len(made[one]))
    return Raster(kind, made[kind], width=picture.shape[1], height=picture.shape[0])


DRAWN = {"drawn": True}  # mark of a field that the page alone shows: JSON leaves it out


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRow:
    """One sample of the feed: as it was given, where that was a picture, and as it is fed.

    Attributes:
        name: of the sample.
        fed, given: the pictures.
        fed_size, given_size: (height, width) in pixels, before they were made small.
    """

    name: str
    fed: Raster
    fed_size: tuple[int, int]
    given: Raster | None = None
    given_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesPart:
    """A few samples of the feed: how their pictures came about, their names, and themselves."""

    how: str
    samples: tuple[str, ...]
    views: tuple[ViewRow, ...] = field(default=(), metadata=DRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box in shares of the picture (x1 y1 x2 y2), its class and score."""

    corners: tuple[float, float, float, float]
    kind: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """One sample's boxes of the float model and of an engine, and what they are drawn over.

    Attributes:
        number: of the sample, from 0.
        picture: as the model sees it.
        size: (height, width) of the model's input.
        kept: boxes of the float model that the engine finds too.
        found: the engine's own boxes for them.
        lost, new: boxes of the float model alone, and of the engine alone.
    """

    number: int
    picture: Raster
    size: tuple[int, int]
    kept: tuple[Box, ...] = ()
    found: tuple[Box, ...] = ()
    lost: tuple[Box, ...] = ()
    new: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRow:
    """One sample: how many boxes above a threshold of the score are kept, lost and new."""

    sample: str
    threshold: float
    kept: int
    lost: int
    new: int
    boxes: Boxes | None = field(default=None, metadata=DRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One sample that an engine gives to another class: class and value of both models."""

    sample: str
    output: str
    fp32: int
    fp32_value: float
    engine: int
    engine_value: float
    picture: Raster | None = field(default=None, metadata=DRAWN)


def pictures_part(views: Iterable[View], how: Preprocess | None) -> PicturesPart | None:
    """A part of the feed's pictures; None without any."""
    rows = tuple(
        ViewRow(
            name=shown(view.name),
            fed=raster(view.fed),
            fed_size=view.size,
            given=None if view.given is None else raster(view.given),
            given_size=view.given_size,
        )
        for view in views
    )
    if not rows:
        return None
    return PicturesPart(how=how_shown(how), samples=tuple(row.name for row in rows), views=rows)


def box_rows(
    examples: Sequence[Example], looks: Mapping[int, tuple[str, Array]]
) -> tuple[BoxRow, ...]:
    """Rows of those examples of boxes whose picture is known.

    Args:
        examples: of one engine.
        looks: number of a sample -> its name and picture, uint8 [h, w, 3].
    """
    known = (one for one in examples if isinstance(one, BoxExample) and one.number in looks)
    return tuple(_box_row(one, *looks[one.number]) for one in known)


def class_rows(
    examples: Sequence[Example], looks: Mapping[int, tuple[str, Array]]
) -> tuple[ClassRow, ...]:
    """The same of samples that change their class."""
    return tuple(
        ClassRow(
            sample=shown(looks[one.number][0]),
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


def _box_row(example: BoxExample, name: str, picture: Array) -> BoxRow:
    drawn = Boxes(
        number=example.number,
        picture=raster(picture),
        size=example.size,
        kept=_boxes(example.kept, example.size),
        found=_boxes(example.found, example.size),
        lost=_boxes(example.lost, example.size),
        new=_boxes(example.new, example.size),
    )
    return BoxRow(
        sample=shown(name),
        threshold=example.threshold,
        kept=len(drawn.kept),
        lost=len(drawn.lost),
        new=len(drawn.new),
        boxes=drawn,
    )


def _boxes(found: Detections, size: tuple[int, int]) -> tuple[Box, ...]:
    height, width = size
    return tuple(
        Box(
            corners=(x1 / width, y1 / height, x2 / width, y2 / height),
            kind=int(kind),
            score=float(score),
        )
        for (x1, y1, x2, y2), kind, score in zip(
            found.boxes.tolist(), found.classes, found.scores, strict=True
        )
    )
