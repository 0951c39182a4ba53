"""What AdaRound looks at, as statistics: a layer's inputs and outputs at some places.

The same places of both, drawn by the number of the sample. They are kept only until the layer is
rounded; a store gets what it was rounded to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.adaround import AdaParams
from calibrators.amct.arq import checked
from calibrators.errors import CalibrationError
from calibrators.patches import Window, patches, places
from calibrators.statistics import Arrays, Recorder, Statistic, numbers

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Common to both.

    Attributes:
        samples: how many are looked at.
        most: places of a sample.
    """

    samples: int
    most: int

    @property
    def ordered(self) -> bool:
        """Places are drawn by the number of the sample."""
        return True

    @property
    def lead(self) -> Statistic | None:
        """Nothing."""
        return None

    @property
    def _where(self) -> str:
        return f"up to {self.most} places of the first {self.samples} batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsOf(_Places):
    """What the float layer gives there; never stored.

    Attributes:
        last: the output channels are the last axis, else the second.
    """

    last: bool

    @property
    def key(self) -> str:
        """The places, and where channels are."""
        return f"outputs at {self._where}{', channels last' if self.last else ''}"

    def recorder(self, lead: Recorder | None) -> Targets:
        """Nothing seen yet."""
        return Targets(self.most, last=self.last)

    def restore(self, arrays: Arrays) -> Targets:
        """Refuse: they are too many for a cache.

        Raises:
            CalibrationError: always.
        """
        raise CalibrationError("outputs that are kept are not stored")


class Targets:
    """Outputs of a layer at some places."""

    def __init__(self, most: int, *, last: bool) -> None:
        self.share = 1.0  # AMCT sums the squares along axis 1, whatever that is, and takes means
        self._most, self._last, self._number = most, last, 0
        self._kept: list[FloatArray] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Keep places of a sample, [N, C, ...] or [..., C]."""
        value = checked(x, "output of a layer that AdaRound rounds")
        self._number += 1
        if self._last and value.ndim > 2:
            self.share = value.shape[1] / value.shape[-1]
        wide = value if self._last else np.moveaxis(value, 1, -1)
        rows = wide.reshape(-1, wide.shape[-1])
        self._kept.append(rows[places(self._number, len(rows), self._most)].copy())

    def taken(self) -> FloatArray:
        """All of them, [P, C]; they are not kept any longer."""
        kept, self._kept = self._kept, []
        return np.concatenate(kept)

    def to_arrays(self) -> Arrays:
        """Nothing: see `TargetsOf.restore`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedOf(_Places):
    """What the weights are rounded to; until then the layer's inputs.

    Attributes:
        window: of a convolution; None for a matrix product.
        shape: of the integers, groups, output channels of a group, values of a patch.
        scales: how many the weight has.
        params: of the search.
    """

    window: Window | None
    shape: tuple[int, int, int]
    scales: int
    params: AdaParams

    @property
    def key(self) -> str:
        """The places and the parameters."""
        found = self.params
        first, last = found.beta_range
        return (
            f"AdaRound by {self._where}, {found.num_iteration} iterations, reg_param"
            f" {found.reg_param}, beta {first} to {last}, warm_start {found.warm_start}"
        )

    def recorder(self, lead: Recorder | None) -> Rounded:
        """Nothing seen yet."""
        return Rounded(self.window, self.most)

    def restore(self, arrays: Arrays) -> Rounded:
        """What was found.

        Raises:
            CalibrationError: another number of integers or scales.
        """
        made = Rounded(None, 0)
        errors, _ = numbers(arrays, 2, 0)
        integers, scale = arrays["integers"], arrays["scale"]
        if integers.shape != (np.prod(self.shape),) or scale.shape != (self.scales,):
            raise CalibrationError("stored integers must be as many as the weights and are not")
        found = np.array(integers, np.int8).reshape(self.shape)
        made.keep(found, np.array(scale, np.float32), (errors[0], errors[1]))
        return made


class Rounded:
    """A layer's inputs at some places, then the integers that they led to.

    Attributes:
        integers: of the weight, int8 [G, M, K]; None until they are found.
        scale: their scales, float32 [C] or [1].
        errors: the output's mean squared error, by the nearest integers and by these.
    """

    def __init__(self, window: Window | None, most: int) -> None:
        self.integers: NDArray[np.int8] | None = None
        self.scale: FloatArray = np.zeros(0, np.float32)
        self.errors = (0.0, 0.0)
        self._window, self._most, self._number = window, most, 0
        self._kept: list[FloatArray] = []

    def observe(self, x: NDArray[np.floating]) -> None:
        """Keep the patches of some places of a sample."""
        value = checked(x, "input of a layer that AdaRound rounds")
        self._number += 1
        self._kept.append(patches(value, self._window, self._number, self._most))

    def taken(self) -> FloatArray:
        """All of them, [P, G, K]; they are not kept any longer."""
        kept, self._kept = self._kept, []
        return np.ascontiguousarray(np.concatenate(kept, axis=2).transpose(2, 0, 1))

    def keep(
        self, integers: NDArray[np.int8], scale: FloatArray, errors: tuple[float, float]
    ) -> None:
        """Take what was found."""
        self.integers, self.scale, self.errors = integers, scale, errors

    def to_arrays(self) -> Arrays:
        """What was found; nothing before."""
        if self.integers is None:
            return {}
        return {
            "integers": self.integers.reshape(-1),
            "scale": self.scale,
            "reals": np.array(self.errors, np.float64),
            "wholes": np.zeros(0, np.int64),
        }
