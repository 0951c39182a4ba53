"""Pictures of a report: samples of the calibration data, and samples where two models differ.

Only the HTML page shows pictures; JSON contains names, counts and how the pictures were prepared.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.feed.decoding import opencv
from deploy.feed.images import printable_name
from deploy.feed.pixels import Preview, describe_display
from deploy.feed.preprocess import Preprocess
from deploy.tasks.evaluation_task import BoxExample, Example
from deploy.tasks.thresholds import BOX_SCORE
from deploy.tensors import Array

_JPEG_QUALITY = 85  # of 100


@dataclass(frozen=True, slots=True)
class Raster:
    """An encoded picture.

    Attributes:
        kind: "png" or "jpeg".
        data: bytes of the file.
        width, height: in pixels.
    """

    kind: str
    data: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode('ascii')}"


def raster(picture: Array) -> Raster:
    """Encode RGB uint8 [h, w, 3] as PNG or JPEG, whichever is smaller; deterministic."""
    cv2 = opencv()
    bgr = np.ascontiguousarray(picture[:, :, ::-1])  # OpenCV's order of colors
    png = cv2.imencode(".png", bgr)[1].tobytes()
    jpeg = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes()
    height, width = picture.shape[:2]
    if len(png) <= len(jpeg):
        return Raster("png", png, width, height)
    return Raster("jpeg", jpeg, width, height)


PAGE_ONLY = {"page_only": True}  # metadata of fields that JSON leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRow:
    """One sample: its original picture, if it had one, and the model's input.

    Attributes:
        name: of the sample.
        input_image, source_image: the model's input, and the original as a picture.
        input_size, source_size: (height, width) in pixels, before downscaling.
    """

    name: str
    input_image: Raster
    input_size: tuple[int, int]
    source_image: Raster | None = None
    source_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesPart:
    """Pictures of a few samples.

    Attributes:
        how: how the samples were prepared, as text.
        samples: their names.
        views: the pictures; not in JSON.
    """

    how: str
    samples: tuple[str, ...]
    views: tuple[ViewRow, ...] = field(default=(), metadata=PAGE_ONLY)


class BoxPicture:
    """A sample with the boxes of the float model and of an engine.

    It is no dataclass, since `deploy.report.documents.read_report` reads every field of those.

    Attributes:
        picture: the sample.
        example: the boxes, in pixels of the model's input.
        class_names: class -> name; classes without one have their number.
    """

    def __init__(
        self, picture: Raster, example: BoxExample, class_names: Mapping[int, str]
    ) -> None:
        self.picture = picture
        self.example = example
        self.class_names = class_names


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRow:
    """One sample's boxes in the float model and in an engine.

    Attributes:
        sample: name of the sample.
        threshold: score above which boxes count.
        kept: number of boxes that both models find.
        lost: number of boxes of the float model only.
        new: number of boxes of the engine only.
        boxes: the picture with the boxes themselves; not in JSON.
    """

    sample: str
    threshold: float
    kept: int
    lost: int
    new: int
    boxes: BoxPicture | None = field(default=None, metadata=PAGE_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One sample of another class in an engine.

    Attributes:
        sample: name of the sample.
        output: name of the output.
        fp32: class that the float model gives.
        fp32_value: score of this class in the float model.
        engine: class that the engine gives.
        engine_value: score of this class in the engine.
        picture: the sample; not in JSON.
    """

    sample: str
    output: str
    fp32: int
    fp32_value: float
    engine: int
    engine_value: float
    picture: Raster | None = field(default=None, metadata=PAGE_ONLY)


def pictures_part(
    previews: Iterable[Preview], preprocess: Preprocess | None
) -> PicturesPart | None:
    """Return the pictures of samples; None without any.

    Args:
        previews: of each sample, the model's input as a picture, and the original if there is one.
        preprocess: how the samples became inputs; None if unknown.
    """
    rows = []
    for preview in previews:
        source = preview.source_image
        row = ViewRow(
            name=printable_name(preview.name),
            input_image=raster(preview.input_image),
            input_size=preview.input_size,
            source_image=None if source is None else raster(source),
            source_size=preview.source_size,
        )
        rows.append(row)
    if not rows:
        return None
    names = tuple(row.name for row in rows)
    return PicturesPart(how=describe_display(preprocess), samples=names, views=tuple(rows))


def example_rows(
    examples: Sequence[Example],
    pictures: Mapping[int, tuple[str, Array]],
    class_names: Mapping[int, str],
) -> tuple[tuple[BoxRow, ...], tuple[ClassRow, ...]]:
    """Return (rows of samples with other boxes, rows of samples with another class).

    Args:
        examples: samples where the models differ.
        pictures: index of a sample -> its name and picture, uint8 [h, w, 3]; samples without one
            are left out.
        class_names: class -> name, for the boxes.
    """
    box_rows = []
    class_rows = []
    for example in examples:
        if example.number not in pictures:
            continue
        name, image = pictures[example.number]
        sample = printable_name(name)
        picture = raster(image)
        if isinstance(example, BoxExample):
            box_row = BoxRow(
                sample=sample,
                threshold=BOX_SCORE,
                kept=len(example.kept.scores),
                lost=len(example.lost.scores),
                new=len(example.new.scores),
                boxes=BoxPicture(picture, example, class_names),
            )
            box_rows.append(box_row)
        else:
            float_class, float_score = example.reference
            engine_class, engine_score = example.candidate
            class_row = ClassRow(
                sample=sample,
                output=example.output,
                fp32=float_class,
                fp32_value=float_score,
                engine=engine_class,
                engine_value=engine_score,
                picture=picture,
            )
            class_rows.append(class_row)
    return tuple(box_rows), tuple(class_rows)
