"""A quantized model in place of a calibration: nothing is observed, its own ranges stand.

::

    LoadedModel.trained --> TrainedRanges --> targets, as after a calibration
    images, or samples that are made up --> what is built is tried, and with images measured
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.grids import Grid
from deploy.calibration.calibrated import Calibrated
from deploy.calibration.choices import Choices
from deploy.calibration.found import Found, Trouble
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference import Judges
from deploy.calibration.subject import Subject
from deploy.errors import ConfigError
from deploy.graph.placement import WEIGHTED
from deploy.method import Method
from deploy.metrics.bench_inputs import random_feeds

if TYPE_CHECKING:
    import onnx

    from deploy.feed.opening import FeedSource
    from deploy.feed.samples import Feed
    from deploy.frontends import LoadedModel
    from deploy.frontends.trained import Trained
    from deploy.tensors import Array

MADE_UP = "random numbers"
_TRIED = 2  # of these
_UNMEASURED = (
    "No images were given: neither accuracy nor speed was measured, and what a target tries is"
    " tried on made-up samples; --images measures both."
)
_TAKEN_OUT = (
    "FP32 is the float model that was taken out of {}, whose weights are multiples of their scales;"
    " --float names the one that it was made from."
)
_STORED = (
    "FP32 is the float model that {} stands for, whose weights alone are stored as integers; speed"
    " and size are told beside it."
)
_WIDENED = (
    "FP32 is the float32 model that {} stands for, which computes in float16; speed and size are"
    " told beside it."
)


class TrainedRanges(Ranges):
    """The ranges of a model's own pairs; no search changes them."""

    def __init__(self, trained: Trained, subject: Subject) -> None:
        known = Found(scales=trained.scales, troubles={})
        super().__init__(Observed({}), subject.method, subject.reaches, trusted=known)
        self.trained = trained

    def choosing(self, choices: Choices) -> Ranges:
        """The same, whatever is chosen."""
        return self

    @property
    def chosen_by(self) -> str:
        """What chose the ranges, as the report shows it."""
        return f"the scales of {self.trained.name}"

    def of(self, observations: Iterable[Observation], *, symmetric: Grid | None = None) -> Found:
        """The ranges there are; a tensor without a pair has none."""
        scales = self.trained.scales
        missing = (o.tensor for o in observations if o.tensor not in scales)
        without = Trouble(f"has no pair in {Path(self.trained.name).name}", unknown=True)
        return Found(scales=scales, troubles=dict.fromkeys(missing, without))


def subject_of(loaded: LoadedModel, feed: Feed, trt_version: str | None) -> Subject:
    """What a target looks at; the model as it was given is not read again."""
    return Subject(
        loaded=loaded,
        samples=len(feed),
        batch=feed.batch,
        filled=feed.filled,
        method=Method.of(),
        trt_version=trt_version,
    )


def taken(
    trained: Trained,
    subject: Subject,
    feed: Feed,
    judges: Judges,
    images: str,
    failed: Mapping[str, str],
) -> Calibrated:
    """The ranges of the pairs as a calibration that cost nothing."""
    return Calibrated(
        subject=subject,
        images=images,
        feed=feed,
        ranges=TrainedRanges(trained, subject),
        judges=judges,
        wanted={},
        failed=failed,
        observed_now=(),
        reused=False,
        reason="the model is quantized already, and its pairs say every range",
        seconds=0.0,
        runs={},
    )


def made_up(loaded: LoadedModel) -> list[dict[str, Array]]:
    """Samples where there are no images: nothing is judged on them.

    Raises:
        ConfigError: a dimension that is open.
    """
    return random_feeds(loaded.inputs, count=_TRIED)


def choices_of(trained: Trained, loaded: LoadedModel) -> Choices:
    """The layers that compute in float in the Q/DQ model stay so on every target."""
    layers = {node.name for node in loaded.model.graph.node if node.op_type in WEIGHTED}
    name = Path(trained.name).name
    floats = {n: f"float in {name}: {why}" for n, why in trained.floats.items() if n in layers}
    return Choices(float_nodes=floats)


def reference_of(
    loaded: LoadedModel,
    other: str | Path | onnx.ModelProto | None,
    images: FeedSource | None,
) -> tuple[LoadedModel, tuple[str, ...]]:
    """The float model that engines are judged beside, and what is to be said of it.

    Args:
        loaded: the model that is built.
        other: the float model of a Q/DQ model, where it is named.
        images: what is judged on; None where nothing is.

    Raises:
        ConfigError: images are missing, or a float model is named that has no use or does not fit.
    """
    from deploy.frontends import load

    if loaded.trained is None:
        if images is None:
            raise ConfigError(
                f"a float model is calibrated on images, got none for {loaded.name}; give --images"
            )
        if other is not None:
            raise ConfigError(
                f"--float is what a Q/DQ model is judged beside, got it for {loaded.name}, which is"
                " a float model itself; leave it away"
            )
        return loaded, tuple(_otherwise(loaded))
    if images is None:
        if other is not None:
            raise ConfigError(
                "--float is judged beside on images, which were not given; give --images too, or"
                " leave it away"
            )
        return loaded, (_UNMEASURED,)
    if other is None:
        return loaded, (_TAKEN_OUT.format(Path(loaded.trained.name).name),)
    found = load(other)
    for what, ours, theirs in (
        ("inputs", loaded.inputs, found.inputs),
        ("outputs", loaded.outputs, found.outputs),
    ):
        wanted, got = (", ".join(spec.name for spec in each) for each in (ours, theirs))
        if wanted != got:
            raise ConfigError(
                f"--float must have the {what} of the Q/DQ model, {wanted}, got {got} in"
                f" {found.source or found.name}; name the model that it was made from"
            )
    return found, (f"FP32 is {found.source or found.name}.",)


def _otherwise(loaded: LoadedModel) -> Iterator[str]:
    """What FP32 is, where it is not what the file holds."""
    if loaded.restored:
        yield _STORED.format(loaded.name)
    if loaded.widened:
        yield _WIDENED.format(loaded.name)


def refuse_calibrating(trained: Trained, asked: Sequence[str]) -> None:
    """Refuse what would change how a model is calibrated that needs no calibration.

    Args:
        trained: the model.
        asked: options that were given, in words.

    Raises:
        ConfigError: there are some.
    """
    if asked:
        raise ConfigError(
            f"{trained.name} is quantized already, and its own scales are taken, got"
            f" {' and '.join(asked)}; leave {'it' if len(asked) == 1 else 'them'} away, or give the"
            " float model"
        )
