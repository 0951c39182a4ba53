"""`Calibrated`: a calibration with the model and feed it is for, and how it came about.

A quantized model in place of a calibration: nothing is observed, its own ranges stand.

::

    LoadedModel.trained --> TrainedRanges --> targets, as after a calibration
    images, or samples that are made up --> what is built is tried, and with images measured
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.grids import Grid
from deploy.calibration.observation import Observation, Observed, Subject, each_once
from deploy.calibration.ranges import Found, Ranges, Trouble
from deploy.calibration.reference import Judges
from deploy.calibration.sample_checks import Agreement, Peaks
from deploy.errors import ConfigError
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel
from deploy.graph.placement import WEIGHTED
from deploy.method import Choices, Method
from deploy.metrics.bench_inputs import random_feeds

if TYPE_CHECKING:
    import onnx

    from deploy.feed.feed import FeedSource
    from deploy.frontends.base import Trained
    from deploy.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A calibration with the model and feed it is for, and how it came about.

    Attributes:
        subject: the model, its forms, the method.
        images: where the images came from, in words.
        feed: the calibration images.
        ranges: what was observed, and the clip ranges found in it.
        wanted: target -> what it wants observed.
        failed: target -> why it cannot be built for, as a sentence.
        observed_now: the observations for which the model was run.
        reused: whether nothing had to be run.
        reason: why it was reused, or why not, in one sentence.
        seconds: of observing and searching.
        runs: variant of the model -> inferences.
        notes: what the reader of the cache should know.
        doubts: what tells that the images are not what the model learned from.
        warnings: what is no part of the model that was observed; what is odd about the ranges.
        cache: where it is kept.
        repairs: what was tried on the model before it was observed, in sentences.
        peaks: the largest samples of every tensor that was observed now.
        checkpoint: what the run would have gone on from; whoever keeps what was found removes it.
        resumed: from where it went on, or why it did not, in sentences.
        judges: samples that judge what is built, with the float model's outputs.
        agreement: how far halves of the samples agree; None where nothing was observed that tells
            it.
    """

    subject: Subject
    images: str
    feed: Feed
    ranges: Ranges
    judges: Judges = field(repr=False)
    wanted: Mapping[str, tuple[Observation, ...]]
    failed: Mapping[str, str]
    observed_now: tuple[Observation, ...]
    reused: bool
    reason: str
    seconds: float
    runs: Mapping[str, int]
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cache: Path | None = None
    repairs: tuple[str, ...] = ()
    peaks: Peaks = field(default_factory=Peaks, repr=False)
    checkpoint: Path | None = None
    resumed: tuple[str, ...] = ()
    agreement: Agreement | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.subject.loaded

    @property
    def method(self) -> Method:
        """The search that the user chose."""
        return self.subject.method

    @property
    def found(self) -> Found:
        """What the method found, of every tensor that some target searches by it."""
        return self.ranges.of(self.searched)

    @property
    def observations(self) -> tuple[Observation, ...]:
        """What all targets want, each observation once."""
        return each_once(self.wanted)

    @property
    def searched(self) -> tuple[Observation, ...]:
        """The observations that the method searches, each once."""
        statistic = self.subject.statistic
        return tuple(o for o in self.observations if o.statistic == statistic)

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; a range is [lowest, highest] in real units."""
        scales = self.found.scales
        return {
            "cache": None if self.cache is None else str(self.cache),
            "images": {"source": self.images, "count": self.feed.count},
            "method": self.method.label,
            "reused": self.reused,
            "reason": self.reason,
            "seconds": self.seconds,
            "targets": {name: len(own) for name, own in self.wanted.items()},
            "failed": dict(self.failed),
            "ranges": {name: [float(one.lo), float(one.hi)] for name, one in scales.items()},
            "without_range": dict(self.found.reasons),
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "work": {"decodes": self.feed.decodes, "calibration_runs": dict(self.runs)},
            "notes": [*self.doubts, *self.warnings, *self.resumed, *self.notes, *self.feed.notes],
        }

    @property
    def cost(self) -> str:
        """What was counted, in words: "decoded 8 images, ran 8 inferences of the model folded"."""
        words = (f"{count} inferences of the model {form}" for form, count in self.runs.items())
        ran = ", ".join(words) or "no inference"
        return f"decoded {self.feed.decodes} images, ran {ran}"


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
