"""What of a run can be looked at: pictures of the feed, and samples where two models differ.

Only the page shows pictures; JSON has their names and counts, and how they came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.feed.denormalise import how_shown
from deploy.feed.images import shown
from deploy.feed.preprocess import Preprocess
from deploy.feed.views import View
from deploy.metrics.tasks.detections import Detections
from deploy.metrics.tasks.examples import BoxExample, Example
from deploy.report.raster import Raster, raster
from deploy.tensors import Array


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
    """A few samples of the feed; `how` says how the fed ones came about."""

    how: str
    rows: tuple[ViewRow, ...]

    def to_json(self) -> dict[str, object]:
        """Names, and how their pictures came about."""
        return {"how": self.how, "samples": [row.name for row in self.rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box in shares of the picture (x1 y1 x2 y2), its class and score."""

    corners: tuple[float, float, float, float]
    kind: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRow:
    """One sample's boxes of the float model and of an engine.

    Attributes:
        name, number: of the sample; numbers are from 0.
        picture: as the model sees it.
        size: (height, width) of the model's input.
        threshold: of the score.
        kept: boxes of the float model that the engine finds too.
        found: the engine's own boxes for them.
        lost, new: boxes of the float model alone, and of the engine alone.
    """

    name: str
    number: int
    picture: Raster
    size: tuple[int, int]
    threshold: float
    kept: tuple[Box, ...] = ()
    found: tuple[Box, ...] = ()
    lost: tuple[Box, ...] = ()
    new: tuple[Box, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The counts."""
        counts = {"kept": len(self.kept), "lost": len(self.lost), "new": len(self.new)}
        return {"sample": self.name, "threshold": self.threshold, **counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """One sample that an engine gives to another class: (class, value) of both models."""

    name: str
    number: int
    picture: Raster
    output: str
    reference: tuple[int, float]
    candidate: tuple[int, float]

    def to_json(self) -> dict[str, object]:
        """Both classes."""
        own, other = self.reference[0], self.candidate[0]
        return {"sample": self.name, "output": self.output, "fp32": own, "engine": other}


ExampleRow = BoxRow | ClassRow


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
    return PicturesPart(how=how_shown(how), rows=rows) if rows else None


def example_rows(
    examples: Sequence[Example], looks: Mapping[int, tuple[str, Array]]
) -> tuple[ExampleRow, ...]:
    """Rows of those examples whose picture is known.

    Args:
        examples: of one engine.
        looks: number of a sample -> its name and picture, uint8 [h, w, 3].
    """
    return tuple(_row(one, *looks[one.number]) for one in examples if one.number in looks)


def _row(example: Example, name: str, picture: Array) -> ExampleRow:
    own = raster(picture)
    if not isinstance(example, BoxExample):
        return ClassRow(
            name=shown(name),
            number=example.number,
            picture=own,
            output=example.output,
            reference=example.reference,
            candidate=example.candidate,
        )
    return BoxRow(
        name=shown(name),
        number=example.number,
        picture=own,
        size=example.size,
        threshold=example.threshold,
        kept=_boxes(example.kept, example.size),
        found=_boxes(example.found, example.size),
        lost=_boxes(example.lost, example.size),
        new=_boxes(example.new, example.size),
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
