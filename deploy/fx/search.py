"""The searches of `calibrators` on the grids of PyTorch models: what to observe, what it becomes.

They are those of `calib8 build`, on the same statistics, so that the same values give the same
scale and zero point to the bit::

    tensor --> statistic (calibrators.statistics) --> search (calibrators.searches) --> range
           --> calibrators.grids: scale and zero point on the target's grid, of its bits

Where `build` does not follow a method but finds a target's ranges itself, that is the default here
too: AMCT's IFMR for ascend, of activations that come from rounded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from calibrators.amct.ifmr import IfmrParams
from calibrators.amct.ifmr_streaming import IfmrHistogram, ifmr_streaming
from calibrators.amct.recorders import IfmrOf
from calibrators.grids import Grid, affine_params, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.statistics import Recorder, Statistic, searched
from deploy.errors import ConfigError
from deploy.graph.reach import Reach
from deploy.method import Method
from deploy.targets import Target, named
from deploy.targets.tensorrt.as_parsed import AS_PARSED

OnGrid = tuple[np.float32, int]


class Search(Protocol):
    """A way from the statistics of a tensor to its scale and zero point."""

    @property
    def label(self) -> str:
        """Its name with its parameters, as `build` reports it."""
        ...

    @property
    def statistic(self) -> Statistic:
        """What is to be observed of every tensor."""
        ...

    @property
    def rounded_weights(self) -> bool:
        """Whether it is to see what layers with rounded weights make."""
        ...

    def check(self, grid: Grid) -> None:
        """Refuse a grid that it is not defined for."""
        ...

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point) of a tensor that was observed, within its reach as a build has it."""
        ...


def search_for(target: str | Target, method: Method | str | None = None) -> Search:
    """The search of a target's ranges.

    Args:
        target: of `deploy.targets`, or its name.
        method: of `calibrators.searches`, as "mse" or "percentile 99.9"; None for what `build`
            takes for the target.

    Raises:
        ConfigError: there is no such target or method.
    """
    chosen = named(target) if isinstance(target, str) else target
    if method is None:
        return Ifmr() if chosen.own_method else BY_DEFAULT
    asked = Method.labelled(method) if isinstance(method, str) else method
    whole = chosen.name == "tensorrt" and asked.name in AS_PARSED  # as in the file, cut nowhere
    return ByMethod(asked, bounded=not whole)


@dataclass(frozen=True, slots=True)
class ByMethod:
    """A row of `calibrators.searches.SEARCHES`.

    Attributes:
        method: the row, with its parameters.
        bounded: whether a range keeps to what its readers tell apart.
    """

    method: Method
    bounded: bool = True

    @property
    def label(self) -> str:
        """Name and parameters."""
        return self.method.label

    @property
    def statistic(self) -> Statistic:
        """Of the row."""
        return self.method.statistic

    @property
    def rounded_weights(self) -> bool:
        """No: as in `build`."""
        return False

    def check(self, grid: Grid) -> None:
        """Refuse other bits than 8 where the row is defined for these alone.

        Raises:
            ConfigError: they are other.
        """
        if self.method.integer and grid.bits != 8:
            raise ConfigError(
                f"the method {self.method.name} is defined for 8 bits, got {grid.bits}; take mse,"
                " lp, percentile or minmax"
            )

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point); of a tensor that was always 0, scale 1."""
        assert isinstance(recorder, Histogram)
        if recorder.amax == 0:
            return on_grid(0.0, 0.0, grid)
        kinds = {"symmetric": grid} if grid.symmetric else {"affine": grid}
        search = self.method.search(**kinds)
        found = searched(recorder, search, reach if self.bounded else None)
        ends = (-found.amax, found.amax) if grid.symmetric else (found.lo, found.hi)
        return on_grid(*ends, grid)


BY_DEFAULT: Search = ByMethod(Method.of())


@dataclass(frozen=True, slots=True)
class Ifmr:
    """AMCT's search of activations with its own defaults."""

    @property
    def label(self) -> str:
        """As AMCT names it."""
        return "AMCT's IFMR"

    @property
    def statistic(self) -> Statistic:
        """Of flat memory."""
        return IfmrOf()

    @property
    def rounded_weights(self) -> bool:
        """AMCT calibrates after it has rounded the weights."""
        return True

    def check(self, grid: Grid) -> None:
        """It takes any grid."""

    def on(self, recorder: Recorder, grid: Grid, reach: Reach | None = None) -> OnGrid:
        """(scale, zero_point); of a tensor that is next to 0 throughout, scale 1.

        AMCT knows no reach.
        """
        assert isinstance(recorder, IfmrHistogram)
        params = IfmrParams(bits=grid.bits, with_offset=not grid.symmetric)
        found = ifmr_streaming(recorder, params)
        return found.scale, found.offset


def widest(found: Sequence[OnGrid], grid: Grid) -> OnGrid:
    """(scale, zero_point) of a range that holds those of several tensors."""
    if len(found) == 1:
        return found[0]
    if grid.symmetric:
        return max(scale for scale, _ in found), 0
    lows = [(grid.qmin - zero) * float(scale) for scale, zero in found]
    highs = [(grid.qmax - zero) * float(scale) for scale, zero in found]
    return on_grid(min(lows), max(highs), grid)


def on_grid(lo: float, hi: float, grid: Grid) -> OnGrid:
    """(scale, zero_point) of a clip range on a grid, as `build` has them; scale 1 of no width."""
    if not grid.symmetric:
        return affine_params(lo, hi, grid)
    scale = symmetric_scale(max(-lo, hi), grid)
    return (scale if scale > 0 else np.float32(1.0)), 0
