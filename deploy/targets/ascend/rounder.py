"""AdaRound on a few layers, in a search that has measured what each of them loses.

::

    layers that lose most, that AdaRound can round, not too large --> integers, one after the other

The models that are looked at have all layers of the search in int8 weights, so that a build with
the final configuration looks at the same. Ranges and DMQ's factors of a layer stay as they were;
only its weights and their scales are others, so that no other layer needs a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from deploy.calibration.observation import Observed
from deploy.calibration.observe import observe
from deploy.graph.index import Graph
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.quant_layer import quantize_fitting
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.variants import (
    Records,
    balanced_over,
    config_of,
    is_rounded,
    with_adaround,
)
from deploy.targets.ascend.weight_rounding import open_layers

if TYPE_CHECKING:
    from deploy.feed.samples import Feed

_MOST = 6  # layers
_WEIGHTS = 2**20  # of them together: some 3 minutes of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounder:
    """What AdaRound needs of a calibration.

    Attributes:
        plan: the layers, as configured.
        observed: what was observed for the searches.
        calibration: the images that were observed; the first of them are looked at.
        threads: samples that run beside each other; the result does not depend on it.
    """

    plan: RecordPlan
    observed: Observed
    calibration: Feed
    threads: int

    def able(self, names: Iterable[str]) -> list[str]:
        """The first layers that it can round, and that keep the time to a few minutes."""
        found: list[str] = []
        room = _WEIGHTS
        for name, size in self._sizes(names):
            if size <= room and len(found) < _MOST:
                found.append(name)
                room -= size
        return found

    def _sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Those that AMCT rounds, and how many weights each has."""
        index, open_ = Graph(self.plan.model), set(open_layers(self.plan.model))
        for name in names:
            layer = self.plan.layers[name]
            if layer.adaptive and name not in open_:
                yield name, prod(index.constants[layer.weight].dims)

    def rounded(
        self, chosen: Mapping[str, str], records: Records, names: Iterable[str]
    ) -> dict[str, LayerRecord]:
        """Layer -> its record with AdaRound's integers, of those that the hardware takes.

        Args:
            chosen: layer in int8 -> its search.
            records: of these layers.
            names: layers to round, of `able`.

        Raises:
            CalibrationError: weights or outputs that are too large.
        """
        plan = self._plan({**chosen, **{name: with_adaround(chosen[name]) for name in names}})
        wanted = [step.inputs for step in plan.adaround.values()]
        with self.calibration.samples() as samples:
            seen = observe(wanted, samples, known=self.observed, threads=self.threads)
        made = {
            name: replace(records[name], scale_w=one.scale, rounded=one.integers)
            for name, one in plan.rounded(self.observed.and_also(seen)).items()
        }
        fitting, _ = quantize_fitting(plan.model, plan.graph, made)
        return {name: made[name] for name in fitting}

    def _plan(self, chosen: Mapping[str, str]) -> RecordPlan:
        assert any(map(is_rounded, chosen.values()))
        return replace(
            self.plan,
            config=config_of(self.plan.config, chosen),
            balanced_over=balanced_over(self.plan),
            lenient=True,
        )
