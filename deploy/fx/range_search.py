"""Range searches of activations: those of `calib8 build`, on the same statistics.

Equal values give bit-equal scales and zero points::

    tensor --> statistic (calibrators.statistics) --> search (calibrators.searches) --> range
           --> calibrators.grids: scale and zero point on the target's grid, of its bits

A target with its own range search in `build` has it here too: AMCT's IFMR for ascend, on
activations of layers with rounded weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from calibrators.amct.ifmr import IfmrHistogram, IfmrParams, ifmr_streaming
from calibrators.amct.recorders import IfmrOf
from calibrators.grids import Grid, affine_params, symmetric_scale
from calibrators.histogram import Histogram
from calibrators.statistics import Recorder, Statistic, search_scale
from deploy.errors import ConfigError
from deploy.graph.bounds import RangeLimits
from deploy.method import Method
from deploy.targets import Target, make_targets
from deploy.targets.tensorrt.cache_contents import UNFOLDED_METHODS

ScaleAndZero = tuple[np.float32, int]  # (scale, zero_point)


@dataclass(frozen=True, slots=True)
class MethodSearch:
    """A search of `calibrators.searches.SEARCHES`.

    Attributes:
        method: the search and its parameters.
        bounded: whether ranges are clipped to where their readers saturate.
        rounded_weights: whether weights are rounded while data is recorded; not, as in `build`.
    """

    method: Method
    bounded: bool = True
    rounded_weights: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Name and parameters."""
        return self.method.label

    @property
    def statistic(self) -> Statistic:
        """Statistic of the method."""
        return self.method.statistic

    def check(self, grid: Grid) -> None:
        """Raise `ConfigError` if the method is defined for 8 bits only and the grid has others."""
        if self.method.is_int8_only and grid.bits != 8:
            raise ConfigError(
                f"the method {self.method.name} is defined for 8 bits, got {grid.bits}; take mse,"
                " lp, percentile or minmax"
            )

    def find_scale(
        self, recorder: Recorder, grid: Grid, limits: RangeLimits | None
    ) -> ScaleAndZero:
        """Return (scale, zero_point); scale 1 for a tensor that was always 0."""
        assert isinstance(recorder, Histogram)
        if recorder.amax == 0:
            return scale_on_grid(0.0, 0.0, grid)
        # a search finds a symmetric range, +-amax, and one with a zero point, lo to hi
        search = self.method.search(symmetric=grid, affine=grid)
        clip = search_scale(recorder, search, limits if self.bounded else None)
        ends = (-clip.amax, clip.amax) if grid.symmetric else (clip.lo, clip.hi)
        return scale_on_grid(*ends, grid)


class IfmrSearch:
    """AMCT's IFMR search of activation ranges, with AMCT's defaults.

    Attributes:
        rounded_weights: whether weights are rounded while data is recorded.
        label: name of the search.
        statistic: its statistic, of constant memory.
    """

    rounded_weights = True  # AMCT rounds the weights before it calibrates
    label = "AMCT's IFMR"
    statistic = IfmrOf()

    def check(self, grid: Grid) -> None:
        """Accept any grid."""

    def find_scale(
        self, recorder: Recorder, grid: Grid, limits: RangeLimits | None
    ) -> ScaleAndZero:
        """Return (scale, zero_point); scale 1 for a tensor near 0. `limits` is ignored."""
        assert isinstance(recorder, IfmrHistogram)
        params = IfmrParams(bits=grid.bits, with_offset=not grid.symmetric)
        result = ifmr_streaming(recorder, params)
        return result.scale, result.offset


ActivationSearch = MethodSearch | IfmrSearch


DEFAULT_SEARCH: ActivationSearch = MethodSearch(Method.of())


def resolve_target(target: str | Target) -> Target:
    """Return the target of this name with default options; a target object is returned unchanged.

    Raises:
        ConfigError: there is no target of this name.
    """
    return make_targets([target])[0]


def search_for(target: str | Target, method: Method | str | None = None) -> ActivationSearch:
    """Return the search that finds activation ranges for a target, as `build` does.

    `target`: a target of `deploy.targets`, or its name. `method`: a method of
    `calibrators.searches`, such as "mse" or "percentile 99.9"; None for the default of `build` for
    the target, which is AMCT's IFMR for ascend.

    Raises:
        ConfigError: there is no such target or method.
    """
    target = resolve_target(target)
    if method is None:
        # ascend is the only target with a method of its own
        return IfmrSearch() if target.own_method else DEFAULT_SEARCH
    if not isinstance(method, Method):
        method = Method.from_label(str(method))
    # A bounded search ends a range where all readers saturate, such as at 6 before a ReLU6.
    # TensorRT's own calibrators look at the values alone, and so do the methods that imitate them.
    # These are called "unfolded" after the model that they observe in `build`.
    imitates_tensorrt = target.name == "tensorrt" and method.name in UNFOLDED_METHODS
    return MethodSearch(method, bounded=not imitates_tensorrt)


def widest_range(params: Sequence[ScaleAndZero], grid: Grid) -> ScaleAndZero:
    """Return (scale, zero_point) of the smallest range that contains all those of `params`."""
    if len(params) == 1:
        return params[0]
    if grid.symmetric:
        return max(scale for scale, _ in params), 0
    ends = [representable_range(grid, *scale_and_zero) for scale_and_zero in params]
    lows, highs = zip(*ends, strict=True)
    return scale_on_grid(min(lows), max(highs), grid)


def representable_range(grid: Grid, scale: np.float32, zero_point: int) -> tuple[float, float]:
    """Return the real values of the grid's least and greatest integer."""
    step = float(scale)
    return (grid.qmin - zero_point) * step, (grid.qmax - zero_point) * step


def scale_on_grid(lo: float, hi: float, grid: Grid) -> ScaleAndZero:
    """Return (scale, zero_point) of a clip range, as in `build`; scale 1 for an empty range."""
    if not grid.symmetric:
        return affine_params(lo, hi, grid)
    scale = symmetric_scale(max(-lo, hi), grid)
    return (scale if scale > 0 else np.float32(1.0)), 0
