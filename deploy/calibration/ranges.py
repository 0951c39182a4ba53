"""Clip ranges: search them in observed statistics, each observation once, or read a foreign cache.

`RangeSet` holds the ranges of a model's tensors, and why some tensors have none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calibrators.grids import Grid
from calibrators.histogram import Histogram
from calibrators.scales import Scale, Scales
from calibrators.statistics import find_trouble, search_scale
from deploy.calibration import trt_cache
from deploy.calibration.observation import FOLDED, Key, Observation, ObservedStatistics
from deploy.calibration.store import read_cache_file
from deploy.errors import CacheError, counted
from deploy.graph.bounds import RangeLimits
from deploy.method import Choices, Method
from deploy.terminal import phase

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class NoScaleReason:
    """Why a tensor has no scale.

    Attributes:
        text: predicate of a sentence whose subject is the tensor's name.
        is_infinite: whether infinity is the reason; TensorRT's cache then says `inf`, else `0`.
        is_unobserved: whether the tensor was not observed, so that TensorRT's cache omits it.
    """

    text: str
    is_infinite: bool = False
    is_unobserved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSet:
    """Clip ranges of tensors, and why others have none.

    Attributes:
        scales: tensor -> its range.
        unusable: tensor without a range -> the reason.
    """

    scales: Scales
    unusable: Mapping[str, NoScaleReason]

    @property
    def symmetric(self) -> dict[str, np.float32]:
        """Tensor -> amax / 127 as in TensorRT's cache; 0 or infinite if it has no scale."""
        symmetric_scales = {name: scale.symmetric for name, scale in self.scales.items()}
        for name, reason in self.unusable.items():
            if not reason.is_unobserved:
                symmetric_scales[name] = np.float32(np.inf if reason.is_infinite else 0)
        return symmetric_scales

    @property
    def reasons(self) -> dict[str, str]:
        """Tensor -> why it has no scale, as text."""
        return {name: reason.text for name, reason in self.unusable.items()}


def read_foreign_ranges(
    path: Path,
    tensors: tuple[str, ...],
    non_negative: frozenset[str],
    float16_tensors: Mapping[str, str],
) -> RangeSet:
    """Return the ranges in a cache that another program wrote, such as TensorRT.

    Such a cache has one scale for each tensor, whose range is -127 to 127 times the scale.

    Args:
        path: the cache file.
        tensors: tensors of the model that need a range.
        non_negative: tensors that cannot be negative, whose range starts at 0.
        float16_tensors: input or output of the user's file -> its tensor in float32.

    Raises:
        CacheError: the file is not such a cache, or has no usable entry for this model.
    """
    cache = trt_cache.parse(read_cache_file(path), origin=str(path))
    flaws = cache.flaws()  # tensor -> why its scale is unusable, such as "inf"
    cached_scales = cache.scales()
    for end, tensor in float16_tensors.items():
        if end in cached_scales and end not in flaws:
            cached_scales.setdefault(tensor, cached_scales[end])
    scales = {}
    for name, cached_scale in cached_scales.items():
        if name not in flaws:
            amax = float(cached_scale) * 127
            low = 0.0 if name in non_negative else -amax
            scales[name] = Scale(
                lo=low,
                hi=amax,
                amax=amax,
                observed_min=low,
                observed_max=amax,
                method=f"cache-{cache.header.algorithm}",
            )
    if scales.keys().isdisjoint(tensors):
        raise CacheError(
            f"a trusted cache must know the model's tensors, {path} has a usable scale for none of"
            f" the {len(tensors)} wanted (such as {', '.join(tensors[:2])}); it is another model's"
        )

    absent = NoScaleReason(f"has no entry in {path.name}")
    unusable = {name: absent for name in tensors if name not in scales}
    for name, flaw in flaws.items():  # these have an entry: their reason is replaced
        tensor = float16_tensors.get(name, name)
        if tensor not in scales:
            text = f"has a {flaw} scale in {path.name}"
            unusable[tensor] = NoScaleReason(text, is_infinite=flaw == "inf")
    return RangeSet(scales=scales, unusable=unusable)


@dataclass(eq=False, repr=False)
class Ranges:
    """Clip ranges that one method finds in observed statistics; searched on demand and cached.

    Attributes:
        observed: statistics in which ranges are searched.
        method: the search for tensors without a method of their own.
        range_limits: tensor of the cleaned model -> limits of its range.
        trusted: ranges of a foreign cache, which replace any search.
    """

    observed: ObservedStatistics
    method: Method
    range_limits: Mapping[str, RangeLimits]
    trusted: RangeSet | None = None
    _method_by_tensor: Mapping[str, Method] = field(init=False, default_factory=dict)
    # the ranges found so far, by observation, label of the method, and grid
    _scales: dict[tuple[Key, str, Grid | None], Scale] = field(init=False, default_factory=dict)
    _results: dict[Hashable, tuple[object, Any]] = field(init=False, default_factory=dict)

    def with_choices(self, choices: Choices) -> Ranges:
        """Return ranges of the same observations under other methods; the results are shared."""
        method = choices.method or self.method
        ranges = Ranges(self.observed, method, self.range_limits, trusted=self.trusted)
        ranges._method_by_tensor = choices.methods
        ranges._scales = self._scales
        return ranges

    @property
    def chosen_by(self) -> str:
        """Name of the methods that chose the ranges, for the report."""
        if self.trusted is not None:
            return "the trusted cache"
        labels = [method.label for method in self._method_by_tensor.values()]  # one a tensor
        other_labels = [label for label in labels if label != self.method.label]
        if not other_labels:
            return self.method.label
        names = " or ".join(sorted(set(other_labels)))
        return f"{self.method.label} ({names} for {counted(len(other_labels), 'tensor')})"

    def compute_once(
        self, key: Hashable, compute: Callable[[], Result], *, of: object = None
    ) -> Result:
        """Return `compute()`, called once per key and object for all trial builds.

        Args:
            key: what is computed.
            compute: computes it.
            of: object that the result depends on, such as a model; None if on none.
        """
        full_key = key, id(of)
        if full_key not in self._results:
            # `of` is stored too: as long as it lives, no other object gets its id
            self._results[full_key] = of, compute()
        result: Result = self._results[full_key][1]
        return result

    def find(
        self, observations: Iterable[Observation], *, symmetric_grid: Grid | None = None
    ) -> RangeSet:
        """Search the ranges of observed tensors; return them, and why some tensors have none.

        Args:
            observations: tensors, each with the statistic that was recorded of it.
            symmetric_grid: grid that the symmetric ranges are for; None for int8.
        """
        if self.trusted is not None:  # ranges of a user's cache, used as they are
            return self.trusted
        scales = {}
        unusable = {}
        observations = list(observations)
        with phase("ranges", len(observations), "tensors") as show_progress:
            for observation in observations:
                histogram = self.histogram(observation)
                trouble = find_trouble(histogram)  # why the values have no range, such as all 0
                if trouble is None:
                    scales[observation.tensor] = self._scale(observation, histogram, symmetric_grid)
                else:
                    reason = NoScaleReason(trouble, is_infinite=bool(histogram.infinite))
                    unusable[observation.tensor] = reason
                show_progress()
        return RangeSet(scales=scales, unusable=unusable)

    def cached_scale(
        self, observation: Observation, *, symmetric_grid: Grid | None
    ) -> Scale | None:
        """Return the range of one tensor if it is cached; never searches."""
        key = observation.key, self._method_of(observation).label, symmetric_grid
        return self._scales.get(key)

    def histogram(self, observation: Observation) -> Histogram:
        """Return the histogram that was recorded for an observation."""
        recorder = self.observed.recorder(observation)
        assert isinstance(recorder, Histogram), observation.statistic.key
        return recorder

    def _method_of(self, observation: Observation) -> Method:
        return self._method_by_tensor.get(observation.tensor, self.method)

    def _scale(
        self, observation: Observation, histogram: Histogram, symmetric_grid: Grid | None
    ) -> Scale:
        """Return the range of a tensor, searched unless it is cached."""
        cached = self.cached_scale(observation, symmetric_grid=symmetric_grid)
        if cached is not None:
            return cached
        method = self._method_of(observation)
        limits = None
        if observation.variant.key == FOLDED:
            limits = self.range_limits.get(observation.tensor)
        scale = search_scale(histogram, method.search(symmetric_grid), limits)
        self._scales[observation.key, method.label, symmetric_grid] = scale
        return scale
