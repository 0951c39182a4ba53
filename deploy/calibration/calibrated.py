"""`Calibrated`: a calibration with the model and feed it is for, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.calibration.found import Found
from deploy.calibration.observation import Observation, each_once
from deploy.calibration.ranges import Ranges
from deploy.calibration.reference import Judges
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.subject import Subject
from deploy.calibration.until import Agreement
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel
from deploy.method import Method


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
