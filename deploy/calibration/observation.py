"""`Observation`: which statistic of which tensor of which variant of the model.

The one value in the middle. A target says which observations it needs; one pass fills them; one
store keeps them; each is judged by itself when a cache is used again::

    OnnxRuntime   (folded,               tensor, histogram)
    TensorRT      (folded,               tensor, histogram)  or, by TensorRT's own rule,
                  (as its parser reads,  tensor, histogram of the first batch's range)
    Ascend        (weights fake-quantized, tensor, ifmr or hfmg histogram)

Samples one by one -> the whole batches of one shape that TensorRT's calibrators take.

TensorRT calibrates with the profile's OPT shape alone, so a smaller last batch cannot be fed. One
rule everywhere, on the GPU, on the CPU and in C++: what does not fill a batch is left out, and how
much that is is said.

What a target looks at before anything is observed: the model, its forms, the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrators.statistics import HistogramOf, Recorder, Statistic
from deploy.errors import ConfigError
from deploy.graph.bounds import Reach, reaches
from deploy.method import Method
from deploy.tensors import Array

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel


Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of the model that is run.

    Attributes:
        key: names the form with everything it depends on beside the model itself; equal keys are
            equal models.
        make: gives the model from what `needs` found; called only where it must be run.
        needs: observations of other variants, of the first samples, that it is made from; these
            may need others in their turn.
    """

    key: str
    make: Callable[[Observed], onnx.ModelProto] = field(compare=False, repr=False)
    needs: tuple[Observation, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """A statistic of a tensor of a variant.

    Attributes:
        whose: the layer that wants it, for an error; "" names the tensor alone.
    """

    variant: Variant
    tensor: str
    statistic: Statistic
    whose: str = field(default="", compare=False)

    @property
    def key(self) -> Key:
        """What names it in a store."""
        return self.variant.key, self.tensor, self.statistic.key

    @property
    def by_order(self) -> bool:
        """Whether the same samples in another order would give other numbers."""
        return self.statistic.ordered or self.statistic.samples is not None

    @property
    def lead(self) -> Observation | None:
        """What must be known of the first samples before this can begin."""
        lead = self.statistic.lead
        return None if lead is None else Observation(self.variant, self.tensor, lead, self.whose)


class Observed(Mapping[Key, Recorder]):
    """Observation key -> what was recorded, in the order of the observations."""

    def __init__(self, recorders: Mapping[Key, Recorder]) -> None:
        self._recorders = dict(recorders)

    def __getitem__(self, key: Key) -> Recorder:
        return self._recorders[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._recorders)

    def __len__(self) -> int:
        return len(self._recorders)

    def of(self, observation: Observation) -> Recorder:
        """The recorder of one observation."""
        return self._recorders[observation.key]

    def missing(self, wanted: Iterable[Observation]) -> tuple[Observation, ...]:
        """Those that are not here, each once."""
        return tuple(dict.fromkeys(o for o in wanted if o.key not in self._recorders))

    def and_also(self, other: Mapping[Key, Recorder]) -> Observed:
        """Both; what `other` holds wins."""
        return Observed({**self._recorders, **other})


def each_once(wanted: Mapping[str, Iterable[Observation]]) -> tuple[Observation, ...]:
    """What all targets want."""
    return tuple(dict.fromkeys(o for own in wanted.values() for o in own))


def with_needs(
    wanted: Iterable[Observation], known: Mapping[Key, Recorder] | None = None
) -> tuple[Observation, ...]:
    """The observations with all that their variants are made from, each once, needs first.

    Of what is known nothing is needed any more.
    """
    before = known or {}
    found: dict[Observation, None] = {}

    def add(observation: Observation) -> None:
        if observation in found:
            return
        for need in () if observation.key in before else observation.variant.needs:
            add(need)
        found[observation] = None

    for observation in wanted:
        add(observation)
    return tuple(found)


def whole_batches(
    samples: Iterable[Mapping[str, Array]], samples_a_batch: int
) -> Iterator[dict[str, Array]]:
    """Join every `samples_a_batch` samples along their first axis; leave out the rest."""
    group: list[Mapping[str, Array]] = []
    for sample in samples:
        group.append(sample)
        if len(group) == samples_a_batch:
            yield {name: _joined([s[name] for s in group]) for name in group[0]}
            group = []


def _joined(arrays: list[Array]) -> Array:
    """A scalar has no axis, and is the batch's as it is.

    Raises:
        ConfigError: arrays of several shapes.
    """
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ConfigError(
            f"TensorRT calibrates on batches of one shape, got samples of {shapes[0]} and"
            f" {shapes[1]}; give all images one size, or a batch of 1"
        )
    return arrays[0] if len(arrays) == 1 or arrays[0].ndim == 0 else np.concatenate(arrays)


def whole(samples: int, samples_a_batch: int, *, filled: int = 0) -> int:
    """How many of the samples stand in whole batches.

    Args:
        samples: of the feed.
        samples_a_batch: that make a batch.
        filled: of the samples, those at the end that a model's fixed batch filled up.

    Raises:
        ConfigError: none.
    """
    there = samples - filled
    if there < samples_a_batch:
        raise ConfigError(
            f"TensorRT calibrates in whole batches, got {there} samples for batches of"
            f" {samples_a_batch}; give more images or a smaller batch"
        )
    return there - there % samples_a_batch


def left_out(samples: int, samples_a_batch: int, *, filled: int = 0) -> tuple[str, ...]:
    """The sentence that says how many samples are left out, where some are."""
    seen = whole(samples, samples_a_batch, filled=filled)
    if seen == samples:
        return ()
    return (
        f"TensorRT calibrates in whole batches, of {samples_a_batch} samples here: the last"
        f" {samples - seen} of {samples} samples fill none and were left out",
    )


FOLDED = "folded"  # key of the cleaned model, BatchNormalizations folded into their Convs


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model about to be calibrated.

    Attributes:
        loaded: the cleaned model.
        samples: how many the feed gives.
        batch: images in each of them.
        filled: how many of them, at the end, hold images again to fill that batch.
        method: the search that the user chose.
        float_nodes: names of the nodes that the user keeps in float.
        trt_version: TensorRT that is to read the calibration cache, "X.Y.Z"; None for no wish.
        given: the model as the user gave it: a path, or a model in memory; None where only the
            cleaned one is at hand.
        repairs: what changed the cleaned model's weights since it was read.
    """

    loaded: LoadedModel
    samples: int
    batch: int = 1
    filled: int = 0
    method: Method = field(default_factory=Method.of)
    float_nodes: tuple[str, ...] = ()
    trt_version: str | None = None
    given: str | Path | onnx.ModelProto | None = field(default=None, repr=False)
    repairs: tuple[str, ...] = ()

    @property
    def model(self) -> onnx.ModelProto:
        """The cleaned model."""
        return self.loaded.model

    @property
    def identities(self) -> Mapping[str, str]:
        """What the model is known by, as in a fingerprint; no file is a repaired one."""
        known = self.loaded.identities
        return {"graph": known["graph"]} if self.repairs else known

    @property
    def source(self) -> Path | None:
        """The file it came from."""
        return self.loaded.source

    @cached_property
    def unfolded(self) -> LoadedModel:
        """The model with its BatchNormalizations as they stand in the file.

        Raises:
            ConfigError: it was given in memory, already cleaned; or repaired since.
            ModelError: its file changed since it was loaded.
        """
        if self.repairs:
            raise ConfigError(
                "what reads the model as its file has it sees no repair of its weights, got repair"
                f" {', '.join(self.repairs)}; leave it away, or take another method or"
                " configuration"
            )
        from deploy.frontends import load
        from deploy.frontends.base import refuse_other

        if self.given is None:
            raise ConfigError(
                "the model must be an ONNX file to be read as its exporter wrote it, got one that"
                " was traced or cleaned in memory; write it with calib8 export first"
            )
        found = load(self.given, fold_batchnorm=False)
        refuse_other(self.loaded, found.stamp == self.loaded.stamp)
        return found

    @cached_property
    def original(self) -> onnx.ModelProto | None:
        """The graph as the file has it, external data left there; None where no file is at hand.

        Raises:
            ModelError: the file changed since it was loaded.
        """
        from deploy.frontends.base import graph_of

        if not isinstance(self.given, str | Path):
            return self.given
        path = Path(self.given)
        return graph_of(path, self.loaded) if path.suffix.lower() == ".onnx" else None

    @property
    def statistic(self) -> HistogramOf:
        """What the method searches, a first batch and whole batches counted in samples.

        Raises:
            ConfigError: the samples fill no batch.
        """
        wanted = self.method.statistic
        if not wanted.first:
            return wanted
        first = -(-wanted.first // self.batch)
        seen = whole(self.samples, first, filled=self.filled)
        return replace(wanted, first=first, most=seen if seen < self.samples else 0)

    @cached_property
    def reaches(self) -> dict[str, Reach]:
        """Tensor -> how far its readers tell its values apart."""
        return reaches(self.model)

    def histograms(self, tensors: Iterable[str]) -> tuple[Observation, ...]:
        """The method's statistic of tensors of the cleaned model."""
        variant = Variant(FOLDED, self._folded)
        return tuple(Observation(variant, name, self.statistic) for name in tensors)

    def _folded(self, _: Observed) -> onnx.ModelProto:
        return self.model
