"""Searching: what was observed -> clip ranges, each observation once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from calibrators.histogram import Histogram
from calibrators.scales import Scale, Scales
from calibrators.statistics import searched, trouble
from deploy.calibration.observation import Key, Observation, Observed
from deploy.calibration.search import Method
from deploy.calibration.store import Found, Trouble
from deploy.calibration.subject import FOLDED
from deploy.graph.saturation import Bounds


class Ranges:
    """The clip ranges that one search finds in what was observed; found when asked for, once.

    Attributes:
        observed: the statistics.
        method: the search, with its parameters.
        bounds: tensor of the cleaned model -> beyond what its readers see no difference.
        trusted: ranges of a foreign cache, which stand for all.
    """

    def __init__(
        self,
        observed: Observed,
        method: Method,
        bounds: Mapping[str, Bounds],
        *,
        trusted: Found | None = None,
    ) -> None:
        self.observed = observed
        self.method = method
        self.bounds = bounds
        self.trusted = trusted
        self._found: dict[Key, Scale] = {}

    @property
    def chosen_by(self) -> str:
        """What chose the ranges, as the report shows it."""
        return "the trusted cache" if self.trusted is not None else self.method.label

    def of(self, observations: Iterable[Observation]) -> Found:
        """Ranges of observed tensors, by tensor, and why others have none."""
        if self.trusted is not None:
            return self.trusted
        scales, troubles = {}, {}
        for observation in observations:
            histogram = self.histogram(observation)
            why = trouble(histogram)
            if why is None:
                scales[observation.tensor] = self._scale(observation, histogram)
            else:
                troubles[observation.tensor] = Trouble(why, infinite=bool(histogram.infinite))
        return Found(scales=Scales(scales), troubles=troubles)

    def histogram(self, observation: Observation) -> Histogram:
        """What was observed, where it is a histogram."""
        recorder = self.observed.of(observation)
        assert isinstance(recorder, Histogram), observation.statistic.key
        return recorder

    def _scale(self, observation: Observation, histogram: Histogram) -> Scale:
        if observation.key not in self._found:
            folded = observation.variant.key == FOLDED
            limits = self.bounds.get(observation.tensor) if folded else None
            self._found[observation.key] = searched(histogram, self.method.search, limits)
        return self._found[observation.key]
