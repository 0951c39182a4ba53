"""Calibration result: ranges with their model and feed; or the ranges of a quantized model.

A Q/DQ model needs no calibration: nothing is observed, its own scales are used::

    LoadedModel.trained --> TrainedRanges --> targets, as after a calibration
    images, or random samples --> the built models are run, and with images also measured
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import onnx

from calibrators.grids import Grid
from deploy.calibration.observation import (
    CalibrationSubject,
    Observation,
    ObservedStatistics,
    unique_observations,
)
from deploy.calibration.ranges import NoScaleReason, Ranges, RangeSet
from deploy.calibration.reference_outputs import EvaluationSet
from deploy.calibration.reuse import NO_CACHE
from deploy.calibration.sample_checks import HalvesAgreement, Peaks
from deploy.errors import ConfigError, counted
from deploy.feed.feed import FeedSource, preprocessing_notes
from deploy.feed.samples import Feed
from deploy.frontends import LoadedModel, load
from deploy.frontends.base import QdqCalibration
from deploy.graph.placement import WEIGHTED
from deploy.method import Choices, Method
from deploy.tensors import TensorSpec
from deploy.terminal import PrintedResult, join_visible

_UNMEASURED_NOTE = (
    "No images were given: neither accuracy nor speed was measured, and trial builds"
    " ran on random samples; --images measures both."
)
_EXTRACTED_NOTE = (
    "FP32 is the float model extracted from {}, whose weights are multiples of their scales;"
    " --float names the one that it was made from."
)
_INTEGER_WEIGHTS_NOTE = (
    "FP32 is the float model that {} stands for, whose weights alone are stored as integers; speed"
    " and size are reported next to it."
)
_FLOAT16_NOTE = (
    "FP32 is the float32 model that {} stands for, which computes in float16; speed and size are"
    " reported next to it."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CalibrationResult(PrintedResult):
    """A calibration with its model and feed, and how it was obtained.

    Attributes:
        subject: the model to calibrate.
        images: source of the images, for the report.
        feed: the images.
        ranges: the ranges, searched on demand.
        evaluation_set: the evaluation samples, with the float model's outputs.
        observations_by_target: target -> observations it needs.
        failures: target -> why it cannot be built, as a sentence.
        observed_now: the observations that were made, not read from the cache.
        reused: whether all observations were read from the cache.
        reason: why the cache was used or not.
        seconds: duration.
        runs: variant of the model -> number of inferences.
        notes: notes for the report.
        doubts: signs that the images differ from the model's training data.
        warnings: unobserved parts of the model and suspicious ranges.
        has_random_outputs: whether the float model itself gives other outputs at each run.
        cache: path of the cache; None if nothing is stored.
        peaks: the largest samples of every tensor that was observed now.
        checkpoint: checkpoint of the run; the caller removes it once the result is stored.
        resumed: notes on the checkpoint from which the run went on.
        agreement: how far halves of the samples agree; None if no observation shows it.
    """

    subject: CalibrationSubject
    images: str
    feed: Feed
    ranges: Ranges
    evaluation_set: EvaluationSet = field(repr=False)
    observations_by_target: Mapping[str, tuple[Observation, ...]]
    failures: Mapping[str, str]
    observed_now: tuple[Observation, ...]
    reused: bool
    reason: str
    seconds: float
    runs: Mapping[str, int]
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    has_random_outputs: bool = False
    cache: Path | None = None
    peaks: Peaks = field(default_factory=Peaks, repr=False)
    checkpoint: Path | None = None
    resumed: tuple[str, ...] = ()
    agreement: HalvesAgreement | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.subject.loaded

    @property
    def method(self) -> Method:
        """The search that the user chose."""
        return self.subject.method

    @property
    def range_set(self) -> RangeSet:
        """Ranges of every tensor that a target searches with the method.

        There are none for a shard whose samples were all skipped.
        """
        return self.ranges.find(self.searched if self.feed.count else ())

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Observations of all targets, without duplicates."""
        return unique_observations(self.observations_by_target)

    @property
    def searched(self) -> tuple[Observation, ...]:
        """Observations that the method searches, without duplicates."""
        statistic = self.subject.statistic
        return tuple(
            observation for observation in self.observations if observation.statistic == statistic
        )

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; a range is [lowest, highest] in real units."""
        range_set = self.range_set
        observation_counts = {
            target: len(observations)
            for target, observations in self.observations_by_target.items()
        }
        ranges = {
            tensor: [float(scale.lo), float(scale.hi)] for tensor, scale in range_set.scales.items()
        }
        # `images`: the source as text; `resumed`: notes on the checkpoint from which the run went
        # on; `runs`: variant of the model -> number of inferences
        return {
            "schema": "calib8-calibration/1",
            "cache": None if self.cache is None else str(self.cache),
            "images": {"source": self.images, "count": self.feed.count},
            "method": self.method.label,
            "reused": self.reused,
            "reason": self.reason,
            "seconds": self.seconds,
            "targets": observation_counts,
            "failed": dict(self.failures),
            "ranges": ranges,
            "without_range": dict(range_set.reasons),
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "work": {"decodes": self.feed.decodes, "calibration_runs": dict(self.runs)},
            "notes": [*self.doubts, *self.warnings, *self.resumed, *self.notes, *self.feed.notes],
        }

    def to_screen(self, *, file: Path | None = None, everything: bool = False) -> str:
        """Return what was observed, how ranges are searched, and notes.

        Args:
            file: the file that was written; None for the cache, if there is one.
            everything: also the cost: how many images were read, and how often the model ran.
        """
        lines = [
            self._describe_file(file or self.cache),
            f"{counted(len(self.ranges.observed), 'statistic')} of tensors from"
            f" {counted(self.feed.count, 'image')}",
        ]
        searched = set(self.searched)  # observations in which the user's method searches ranges
        for target, observations in self.observations_by_target.items():
            has_searched = bool(searched.intersection(observations))
            search = f", searched by {self.method.label}" if has_searched else ""
            lines.append(f"  {target}: {len(observations)}{search}")
        if self.agreement is not None:
            lines.append(self.agreement.sentence)
        if everything:
            lines.append(self.cost)
        for tensor, predicate in self.range_set.reasons.items():
            lines.append(f"no scale for {tensor}: it {predicate}")  # "it was 0 in every sample"
        # sentences; `resumed` has those on the checkpoint from which the run went on
        lines += [*self.doubts, *self.warnings, *self.resumed, *self.notes]
        return join_visible([*lines, *preprocessing_notes(self.feed)])

    def _describe_file(self, path: Path | None) -> str:
        """Return which file was written or reused, and why, as "m.cache: reused (the reason)".

        `path`: the file; None if nothing was written: then the model's name stands in its place.
        """
        if path is None:
            path = Path(self.loaded.name)
            action = f"observed in {self.seconds:.1f} s"
        elif self.reused:
            action = "reused"
        else:
            action = f"written in {self.seconds:.1f} s"
        share = self.feed.share
        if share is not None:  # such as "shard 2/4 of 100 samples"
            reason = f"shard {share} of {counted(share.count, 'sample')}"
        elif self.reason.endswith(NO_CACHE):  # the first calibration needs no reason
            return f"{path}: {action}"
        else:
            reason = self.reason
        return f"{path}: {action} ({reason})"

    @property
    def cost(self) -> str:
        """Work as text: "decoded 8 images, ran 8 inferences of the model folded"."""
        runs = [
            f"{counted(count, 'inference')} of the model {variant}"
            for variant, count in self.runs.items()
        ]
        images = counted(self.feed.decodes, "image")
        return f"decoded {images}, ran {', '.join(runs) or 'no inference'}"


class QdqModelRanges(Ranges):
    """The ranges of a model's own Q/DQ pairs, which no search changes."""

    def __init__(self, trained: QdqCalibration, subject: CalibrationSubject) -> None:
        ranges = RangeSet(scales=trained.scales, unusable={})
        super().__init__(ObservedStatistics(), subject.method, subject.range_limits, trusted=ranges)
        self.trained = trained

    def with_choices(self, choices: Choices) -> Ranges:
        """Return these ranges: choices do not change them."""
        return self

    @property
    def chosen_by(self) -> str:
        """Source of the ranges, for the report."""
        return f"the scales of {self.trained.name}"

    def find(
        self, observations: Iterable[Observation], *, symmetric_grid: Grid | None = None
    ) -> RangeSet:
        """Return the ranges of the pairs; a tensor without a pair has none."""
        scales = self.trained.scales
        text = f"has no pair in {Path(self.trained.name).name}"
        reason = NoScaleReason(text, is_unobserved=True)
        tensors_without_pair = [
            observation.tensor for observation in observations if observation.tensor not in scales
        ]
        return RangeSet(scales=scales, unusable=dict.fromkeys(tensors_without_pair, reason))


def keep_float_layers(trained: QdqCalibration, loaded: LoadedModel) -> Choices:
    """Return choices that keep the float layers of a Q/DQ model in float on every target."""
    name = Path(trained.name).name
    float_nodes = {}
    for node in loaded.model.graph.node:
        reason = trained.float_reasons.get(node.name)
        if reason is not None and node.op_type in WEIGHTED:
            float_nodes[node.name] = f"float in {name}: {reason}"
    return Choices(float_nodes=float_nodes)


def find_reference_model(
    loaded: LoadedModel,
    float_model: str | Path | onnx.ModelProto | None,
    images: FeedSource | None,
) -> tuple[LoadedModel, tuple[str, ...]]:
    """Return the float model that int8 is compared with, and notes on it for the report.

    A float model is compared with itself. A Q/DQ model, which is quantized already, is compared
    with the user's float model, or else with the float model extracted from it.

    Args:
        loaded: the model to build from; of a Q/DQ model, the float model extracted from it.
        float_model: the user's float model, from which a Q/DQ model was made; None if not given.
        images: the calibration images; None if not given, which only a Q/DQ model allows.

    Raises:
        ConfigError: the arguments do not fit together, or the models have other inputs or outputs.
    """
    if loaded.qdq is None:  # a float model
        if images is None:
            raise ConfigError(
                f"a float model is calibrated on images, got none for {loaded.name}; give --images"
            )
        if float_model is not None:
            raise ConfigError(
                f"--float names the float reference of a Q/DQ model, got it for {loaded.name},"
                " which is a float model itself; leave it out"
            )
        notes = []
        if loaded.had_integer_weights:
            notes.append(_INTEGER_WEIGHTS_NOTE.format(loaded.name))
        if loaded.was_float16:
            notes.append(_FLOAT16_NOTE.format(loaded.name))
        return loaded, tuple(notes)

    # a Q/DQ model
    if images is None:
        if float_model is not None:
            raise ConfigError(
                "--float needs images to compare on, got none; give --images too, or leave it out"
            )
        return loaded, (_UNMEASURED_NOTE,)
    if float_model is None:
        return loaded, (_EXTRACTED_NOTE.format(Path(loaded.qdq.name).name),)

    reference = load(float_model)
    reference_name = str(reference.source or reference.name)
    _refuse_other_names("inputs", loaded.inputs, reference.inputs, reference_name)
    _refuse_other_names("outputs", loaded.outputs, reference.outputs, reference_name)
    return reference, (f"FP32 is {reference_name}.",)


def _refuse_other_names(
    kind: str, specs: Sequence[TensorSpec], reference_specs: Sequence[TensorSpec], reference: str
) -> None:
    """Refuse a float reference whose "inputs" or "outputs" have other names than the model's."""
    expected = ", ".join(spec.name for spec in specs)
    actual = ", ".join(spec.name for spec in reference_specs)
    if expected != actual:
        raise ConfigError(
            f"--float must have the {kind} of the Q/DQ model, {expected}, got {actual} in"
            f" {reference}; name the model that it was made from"
        )


def refuse_calibration_options(trained: QdqCalibration, options: Sequence[str]) -> None:
    """Refuse calibration options for a model that is already quantized."""
    if options:
        pronoun = "it" if len(options) == 1 else "them"
        raise ConfigError(
            f"{trained.name} is quantized already, and its own scales are used, got"
            f" {' and '.join(options)}; leave {pronoun} out, or give the float model"
        )
