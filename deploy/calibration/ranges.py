"""Searching: what was observed -> clip ranges, each observation once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from calibrators.grids import Grid
from calibrators.histogram import Histogram
from calibrators.scales import Scale, Scales
from calibrators.statistics import searched, trouble
from deploy.calibration.choices import Choices
from deploy.calibration.found import Found, Trouble
from deploy.calibration.observation import Key, Observation, Observed
from deploy.calibration.subject import FOLDED
from deploy.graph.reach import Reach
from deploy.method import Method
from deploy.progress import phase

Made = TypeVar("Made")


class Ranges:
    """The clip ranges that one search finds in what was observed; found when asked for, once.

    Attributes:
        observed: the statistics.
        method: the search, with its parameters.
        reaches: tensor of the cleaned model -> how far its readers tell values apart.
        trusted: ranges of a foreign cache, which stand for all.
    """

    def __init__(
        self,
        observed: Observed,
        method: Method,
        reaches: Mapping[str, Reach],
        *,
        trusted: Found | None = None,
    ) -> None:
        self.observed = observed
        self.method = method
        self.reaches = reaches
        self.trusted = trusted
        self._own: Mapping[str, Method] = {}
        self._found: dict[tuple[Key, str, Grid | None], Scale] = {}
        self._made: dict[Hashable, Any] = {}

    def choosing(self, choices: Choices) -> Ranges:
        """The same observations, searched as was chosen; what is found is kept for all."""
        chosen = Ranges(
            self.observed, choices.method or self.method, self.reaches, trusted=self.trusted
        )
        chosen._own, chosen._found = choices.methods, self._found
        return chosen

    @property
    def chosen_by(self) -> str:
        """What chose the ranges, as the report shows it."""
        if self.trusted is not None:
            return "the trusted cache"
        others = {t: m.label for t, m in self._own.items() if m.label != self.method.label}
        if not others:
            return self.method.label
        names = " or ".join(sorted(set(others.values())))
        some = "1 tensor" if len(others) == 1 else f"{len(others)} tensors"
        return f"{self.method.label} ({names} for {some})"

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a target makes of the observations, made once however many builds are tried."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def of(self, observations: Iterable[Observation], *, symmetric: Grid | None = None) -> Found:
        """Ranges of observed tensors, by tensor, and why others have none.

        Args:
            observations: of the tensors.
            symmetric: grid that the thresholds are for; None for int8.
        """
        if self.trusted is not None:
            return self.trusted
        scales, troubles = {}, {}
        listed = list(observations)
        with phase("ranges", len(listed), "tensors") as step:
            for observation in listed:
                histogram = self.histogram(observation)
                why = trouble(histogram)
                if why is None:
                    scales[observation.tensor] = self._scale(observation, histogram, symmetric)
                else:
                    troubles[observation.tensor] = Trouble(why, infinite=bool(histogram.infinite))
                step()
        return Found(scales=Scales(scales), troubles=troubles)

    def known(self, observation: Observation, *, symmetric: Grid | None = None) -> Scale | None:
        """The range of one tensor if it was found before; nothing is searched."""
        method = self._own.get(observation.tensor, self.method)
        return self._found.get((observation.key, method.label, symmetric))

    def histogram(self, observation: Observation) -> Histogram:
        """What was observed, where it is a histogram."""
        recorder = self.observed.of(observation)
        assert isinstance(recorder, Histogram), observation.statistic.key
        return recorder

    def _scale(
        self, observation: Observation, histogram: Histogram, symmetric: Grid | None
    ) -> Scale:
        method = self._own.get(observation.tensor, self.method)
        key = observation.key, method.label, symmetric
        if key not in self._found:
            folded = observation.variant.key == FOLDED
            reach = self.reaches.get(observation.tensor) if folded else None
            self._found[key] = searched(histogram, method.search(symmetric), reach)
        return self._found[key]
