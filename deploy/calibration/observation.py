"""Observations: (model variant, tensor, statistic); the model to calibrate; full batches.

A target lists the observations it needs, one pass records them, one store keeps them, and each is
checked separately when a cache is reused::

    OnnxRuntime   (folded,               tensor, histogram)
    TensorRT      (folded,               tensor, histogram)  or, by TensorRT's own rule,
                  (as its parser reads,  tensor, histogram of the first batch's range)
    Ascend        (weights fake-quantized, tensor, ifmr or hfmg histogram)

`CalibrationSubject` is the model to calibrate with its forms and method, before anything is
observed.

TensorRT calibrates with the profile's OPT shape only, so a smaller last batch cannot be used. The
rule is the same on GPU, CPU and in C++: samples that do not fill a batch are left out, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import onnx

from calibrators.statistics import HistogramOf, Recorder, Statistic
from deploy.errors import ConfigError
from deploy.feed.arrays import concatenate_samples
from deploy.feed.temporary_arrays import Shape
from deploy.frontends import LoadedModel, load
from deploy.frontends.base import read_uncleaned_model, refuse_changed_model
from deploy.frontends.shapes import without_values
from deploy.graph.bounds import RangeLimits, find_range_limits
from deploy.method import Method
from deploy.tensors import Array

Key = tuple[str, str, str]
FOLDED = "folded"  # key of the cleaned model, BatchNormalizations folded into their Convs


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of the model that is run.

    Attributes:
        key: name of the form and of all it depends on except the model; equal keys mean equal
            models.
        make: builds the model from the results of `needs`; called only if it must be run.
        needs: observations of other variants, on the first samples, that `make` takes; they may
            have needs too.
    """

    key: str
    make: Callable[[ObservedStatistics], onnx.ModelProto] = field(compare=False, repr=False)
    needs: tuple[Observation, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """A statistic of a tensor of a variant.

    Attributes:
        variant: the form of the model that is run.
        tensor: name of the tensor in it.
        statistic: what is recorded of its values.
        layer: layer that needs it, for error messages; "" to name the tensor only.
    """

    variant: Variant
    tensor: str
    statistic: Statistic
    layer: str = field(default="", compare=False)

    @property
    def key(self) -> Key:
        """Key of the observation in a store."""
        return self.variant.key, self.tensor, self.statistic.key

    @property
    def is_order_dependent(self) -> bool:
        """Whether the result depends on the order of the samples."""
        return self.statistic.ordered or self.statistic.samples is not None

    @property
    def lead(self) -> Observation | None:
        """Observation of the first samples that this one needs before it starts, or None."""
        lead = self.statistic.lead
        if lead is None:
            return None
        return Observation(self.variant, self.tensor, lead, self.layer)


class ObservedStatistics(dict[Key, Recorder]):
    """Observation key -> recorder with its statistics, in the order of the observations."""

    def recorder(self, observation: Observation) -> Recorder:
        """Return the recorder of one observation."""
        return self[observation.key]

    def select(self, observations: Iterable[Observation]) -> ObservedStatistics:
        """Return the statistics of some observations, in their order."""
        return ObservedStatistics(
            {observation.key: self[observation.key] for observation in observations}
        )

    def missing(self, observations: Iterable[Observation]) -> tuple[Observation, ...]:
        """Return the observations that are not in here, without duplicates."""
        return tuple(
            dict.fromkeys(
                observation for observation in observations if observation.key not in self
            )
        )

    def merged_with(self, other: Mapping[Key, Recorder]) -> ObservedStatistics:
        """Return the union; `other` takes precedence."""
        return ObservedStatistics({**self, **other})


def unique_observations(
    observations_by_target: Mapping[str, Iterable[Observation]],
) -> tuple[Observation, ...]:
    """Return the observations of all targets without duplicates."""
    return tuple(dict.fromkeys(chain.from_iterable(observations_by_target.values())))


def group_by_variant(observations: Iterable[Observation]) -> dict[Variant, list[Observation]]:
    """Return variant -> its observations, both in order of first use."""
    observations_by_variant: dict[Variant, list[Observation]] = {}
    for observation in observations:
        observations_by_variant.setdefault(observation.variant, []).append(observation)
    return observations_by_variant


def order_dependent_keys(observations: Iterable[Observation]) -> list[str]:
    """Return the keys of the statistics that depend on the order of the samples."""
    return list(
        dict.fromkeys(
            observation.statistic.key
            for observation in observations
            if observation.is_order_dependent
        )
    )


def with_needs(
    observations: Iterable[Observation], observed: Mapping[Key, Recorder] | None = None
) -> tuple[Observation, ...]:
    """Return the observations and all that their variants need, without duplicates, needs first.

    A variant is a form of the model. It may be built from statistics of other observations, its
    needs, whose variants may have needs too.

    Args:
        observations: what is wanted.
        observed: observation key -> its statistics, of those that exist already. Their variants are
            not run again, so their needs are not added.
    """
    ordered_observations: dict[Observation, None] = {}

    def add(observation: Observation) -> None:
        if observation in ordered_observations:
            return
        if not observed or observation.key not in observed:
            for need in observation.variant.needs:
                add(need)
        ordered_observations[observation] = None

    for observation in observations:
        add(observation)
    return tuple(ordered_observations)


def full_batches(
    samples: Iterable[Mapping[str, Array]], samples_a_batch: int
) -> Iterator[dict[str, Array]]:
    """Yield batches of `samples_a_batch` samples joined along axis 0; drop an incomplete one."""
    group: list[Mapping[str, Array]] = []
    for sample in samples:
        group.append(sample)
        if len(group) == samples_a_batch:
            yield concatenate_samples(group, _explain_shapes)
            group = []


def _explain_shapes(_: str, shapes: Sequence[Shape]) -> ConfigError:
    return ConfigError(
        f"TensorRT calibrates on batches of one shape, got samples of {shapes[0]} and"
        f" {shapes[1]}; give all images one size, or a batch of 1"
    )


def count_in_full_batches(
    sample_count: int, samples_a_batch: int, *, padded_sample_count: int = 0
) -> int:
    """Return how many samples are in full batches.

    `padded_sample_count`: number of samples at the end with repeated images, which fill the model's
    fixed batch.
    """
    unpadded_count = sample_count - padded_sample_count
    if unpadded_count < samples_a_batch:
        raise ConfigError(
            f"TensorRT calibrates in whole batches, got {unpadded_count} samples for batches of"
            f" {samples_a_batch}; give more images or a smaller batch"
        )
    return unpadded_count - unpadded_count % samples_a_batch


def note_left_out(
    sample_count: int, samples_a_batch: int, *, padded_sample_count: int = 0
) -> tuple[str, ...]:
    """Return a note on how many samples are left out; empty if none are."""
    used_count = count_in_full_batches(
        sample_count, samples_a_batch, padded_sample_count=padded_sample_count
    )
    if used_count == sample_count:
        return ()
    return (
        f"TensorRT calibrates in whole batches, of {samples_a_batch} samples here: the last"
        f" {sample_count - used_count} of {sample_count} samples fill none and were left out",
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationSubject:
    """A model to calibrate.

    Attributes:
        loaded: the cleaned model.
        sample_count: number of samples of the feed.
        batch: images per sample.
        padded_sample_count: number of samples at the end with repeated images, to fill that batch.
        method: the search for ranges.
        float_nodes: nodes that stay in float.
        trt_version: TensorRT version "X.Y.Z" that will read the calibration cache; None for any.
        user_model: the model from the user: a path, or a model in memory; None if only the cleaned
            model is available.
        task: name of the outputs' task that the user set.
    """

    loaded: LoadedModel
    sample_count: int
    batch: int = 1
    padded_sample_count: int = 0
    method: Method = field(default_factory=Method.of)
    float_nodes: tuple[str, ...] = ()
    trt_version: str | None = None
    user_model: str | Path | onnx.ModelProto | None = field(default=None, repr=False)
    task: str = ""

    @property
    def model(self) -> onnx.ModelProto:
        """The cleaned model."""
        return self.loaded.model

    @property
    def identities(self) -> Mapping[str, str]:
        """Identities for a fingerprint."""
        return self.loaded.identities

    @cached_property
    def unfolded(self) -> LoadedModel:
        """The user's model, loaded again, with BatchNormalizations as nodes of their own.

        The cleaned model has them folded into the Convs before them.

        Raises:
            ConfigError: the user's model is not at hand, only the cleaned one.
            ModelError: the file changed since it was loaded.
        """
        if self.user_model is None:
            raise ConfigError(
                "the model must be an ONNX file to be read as its exporter wrote it, got one that"
                " was traced or cleaned in memory; write it with calib8 export first"
            )
        unfolded = load(self.user_model, fold_batchnorm=False)
        refuse_changed_model(
            self.loaded, has_changed=unfolded.file_digests != self.loaded.file_digests
        )
        return unfolded

    @cached_property
    def original(self) -> onnx.ModelProto | None:
        """`read_original()`, read once; large weights of a file have a shape and no values."""
        original = self.read_original()
        if original is None or original is self.user_model:
            return original
        return without_values(original) or original

    def read_original(self) -> onnx.ModelProto | None:
        """Return the graph as in the file, without external data; None if there is no ONNX file.

        Raises:
            ModelError: the file changed since it was loaded.
        """
        return read_uncleaned_model(self.user_model, self.loaded)

    @property
    def statistic(self) -> HistogramOf:
        """Statistic that the method searches, its batches counted in samples.

        Raises:
            ConfigError: the samples fill no batch.
        """
        statistic = self.method.statistic  # its `first_batch` is a number of images
        if not statistic.first_batch:
            return statistic
        samples_a_batch = -(-statistic.first_batch // self.batch)  # a sample is `batch` images
        used_count = count_in_full_batches(
            self.sample_count, samples_a_batch, padded_sample_count=self.padded_sample_count
        )
        limit = used_count if used_count < self.sample_count else None  # None: all samples
        return replace(statistic, first_batch=samples_a_batch, samples=limit)

    @cached_property
    def range_limits(self) -> dict[str, RangeLimits]:
        """Tensor -> limits of its range that its readers set."""
        return find_range_limits(self.model)

    def histogram_observations(self, tensors: Iterable[str]) -> tuple[Observation, ...]:
        """Return observations of the method's statistic for tensors of the cleaned model."""
        variant = Variant(FOLDED, lambda _: self.model)
        statistic = self.statistic
        return tuple(Observation(variant, name, statistic) for name in tensors)
