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
from deploy.errors import CacheError
from deploy.graph.bounds import RangeLimits
from deploy.method import Choices, Method
from deploy.terminal import phase

Made = TypeVar("Made")


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
    """Clip ranges of tensors, and why others have none."""

    scales: Scales
    unusable: Mapping[str, NoScaleReason]

    @property
    def symmetric(self) -> dict[str, np.float32]:
        """Tensor -> amax / 127 as in TensorRT's cache; 0 or infinite if it has no scale."""
        usable = {name: scale.symmetric for name, scale in self.scales.items()}
        unusable = {
            name: np.float32(np.inf if trouble.is_infinite else 0)
            for name, trouble in self.unusable.items()
            if not trouble.is_unobserved
        }
        return {**usable, **unusable}

    @property
    def reasons(self) -> dict[str, str]:
        """Tensor -> why it has no scale, as text."""
        return {name: trouble.text for name, trouble in self.unusable.items()}


def read_foreign_ranges(
    path: Path, wanted: tuple[str, ...], non_negative: frozenset[str]
) -> RangeSet:
    """Read the ranges of a cache without a fingerprint: symmetric, amax = 127 * scale.

    `non_negative`: tensors that cannot be negative, whose range starts at 0.

    Raises:
        CacheError: the file is not such a cache, or has no usable entry for this model.
    """
    cache = trt_cache.parse(read_cache_file(path), origin=str(path))
    flaws = cache.flaws()
    scales = {
        name: _symmetric(float(scale) * 127, name in non_negative, cache.header.algorithm)
        for name, scale in cache.scales().items()
        if name not in flaws
    }
    if not scales.keys() & set(wanted):
        raise CacheError(
            f"a trusted cache must know the model's tensors, {path} has a usable scale for none of"
            f" the {len(wanted)} wanted (such as {', '.join(wanted[:2])}); it is another model's"
        )
    unusable = {n: NoScaleReason(f"has no entry in {path.name}") for n in wanted if n not in scales}
    unusable |= {
        name: NoScaleReason(f"has a {flaw} scale in {path.name}", is_infinite=flaw == "infinite")
        for name, flaw in flaws.items()
    }
    return RangeSet(scales=scales, unusable=unusable)


def _symmetric(amax: float, non_negative: bool, algorithm: str) -> Scale:
    low = 0.0 if non_negative else -amax
    return Scale(
        lo=low, hi=amax, amax=amax, observed_min=low, observed_max=amax, method=f"cache-{algorithm}"
    )


@dataclass(eq=False, repr=False)
class Ranges:
    """Clip ranges that one method finds in observed statistics; searched on demand and cached.

    Attributes:
        range_limits: tensor of the cleaned model -> limits of its range.
        trusted: ranges of a foreign cache, which replace any search.
    """

    observed: ObservedStatistics
    method: Method
    range_limits: Mapping[str, RangeLimits]
    trusted: RangeSet | None = None
    _own: Mapping[str, Method] = field(init=False, default_factory=dict)
    _found: dict[tuple[Key, str, Grid | None], Scale] = field(init=False, default_factory=dict)
    _made: dict[Hashable, tuple[object, Any]] = field(init=False, default_factory=dict)

    def with_choices(self, choices: Choices) -> Ranges:
        """Return ranges of the same observations under other methods; the results are shared."""
        chosen = Ranges(
            self.observed, choices.method or self.method, self.range_limits, trusted=self.trusted
        )
        chosen._own, chosen._found = choices.methods, self._found
        return chosen

    @property
    def chosen_by(self) -> str:
        """Name of the methods that chose the ranges, for the report."""
        if self.trusted is not None:
            return "the trusted cache"
        others = {t: m.label for t, m in self._own.items() if m.label != self.method.label}
        if not others:
            return self.method.label
        names = " or ".join(sorted(set(others.values())))
        some = "1 tensor" if len(others) == 1 else f"{len(others)} tensors"
        return f"{self.method.label} ({names} for {some})"

    def compute_once(self, key: Hashable, make: Callable[[], Made], *, of: object = None) -> Made:
        """Return `make()`, computed once per key and object for all trial builds."""
        place = key, id(of)
        if place not in self._made:
            self._made[place] = of, make()  # holds `of`, so that no other object gets its id
        made: Made = self._made[place][1]
        return made

    def find(
        self, observations: Iterable[Observation], *, symmetric: Grid | None = None
    ) -> RangeSet:
        """Return the ranges of observed tensors, and why others have none.

        `symmetric`: grid that the thresholds are for; None for int8.
        """
        if self.trusted is not None:
            return self.trusted
        scales, unusable = {}, {}
        listed = list(observations)
        with phase("ranges", len(listed), "tensors") as step:
            for observation in listed:
                histogram = self.histogram(observation)
                why = find_trouble(histogram)
                if why is None:
                    scales[observation.tensor] = self._scale(observation, histogram, symmetric)
                else:
                    unusable[observation.tensor] = NoScaleReason(
                        why, is_infinite=bool(histogram.infinite)
                    )
                step()
        return RangeSet(scales=scales, unusable=unusable)

    def cached_scale(
        self, observation: Observation, *, symmetric: Grid | None = None
    ) -> Scale | None:
        """Return the range of one tensor if it is cached; never searches."""
        method = self._own.get(observation.tensor, self.method)
        return self._found.get((observation.key, method.label, symmetric))

    def histogram(self, observation: Observation) -> Histogram:
        """Return the histogram that was recorded for an observation."""
        recorder = self.observed.recorder(observation)
        assert isinstance(recorder, Histogram), observation.statistic.key
        return recorder

    def _scale(
        self, observation: Observation, histogram: Histogram, symmetric: Grid | None
    ) -> Scale:
        method = self._own.get(observation.tensor, self.method)
        key = observation.key, method.label, symmetric
        if key not in self._found:
            folded = observation.variant.key == FOLDED
            reach = self.range_limits.get(observation.tensor) if folded else None
            self._found[key] = search_scale(histogram, method.search(symmetric), reach)
        return self._found[key]
