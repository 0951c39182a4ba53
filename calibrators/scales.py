"""Clip ranges of tensors: `Scale` and `Scales`, the interface between searches and writers.

A `Scale` holds clip ranges in real units, independent of the target. The writer of a target turns
them into stored integers with a grid of `calibrators.grids`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np

from calibrators.errors import CalibrationError
from calibrators.grids import Grid, affine_params, symmetric_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The clip range of one activation tensor, in real units."""

    # lo, hi: clip range for an affine grid; lo <= hi, both finite
    lo: float
    hi: float
    amax: float  # threshold for a symmetric grid, >= 0; 0 for a tensor that is always zero
    # observed_min, observed_max: extremes of the data, unclipped
    observed_min: float
    observed_max: float
    method: str

    def __post_init__(self) -> None:
        numbers = (self.lo, self.hi, self.amax, self.observed_min, self.observed_max)
        if not all(math.isfinite(v) for v in numbers) or self.lo > self.hi or self.amax < 0:
            raise CalibrationError(
                "a scale needs finite lo <= hi and amax >= 0,"
                f" got lo={self.lo} hi={self.hi} amax={self.amax}"
            )

    @property
    def symmetric(self) -> np.float32:
        """Float32 scale of the symmetric int8 grid: amax / 127."""
        return symmetric_scale(self.amax)

    def on(self, grid: Grid) -> tuple[np.float32, int]:
        """Return (scale, zero_point) of this range on `grid`."""
        if grid.symmetric:
            return symmetric_scale(self.amax, grid), 0
        return affine_params(self.lo, self.hi, grid)


class Scales(Mapping[str, Scale]):
    """Tensor name -> `Scale`, in the model's order. Immutable; JSON in and out."""

    def __init__(self, entries: Mapping[str, Scale]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Scale:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def to_json(self) -> dict[str, dict[str, float | str]]:
        """Return plain JSON types; floats round-trip exactly."""
        return {name: asdict(scale) for name, scale in self._entries.items()}

    @classmethod
    def from_json(cls, data: object) -> Scales:
        """Invert `to_json`.

        Raises:
            CalibrationError: a field is missing or of a wrong type.
        """
        if not isinstance(data, dict):
            raise CalibrationError(f"scales must be a JSON object, got {type(data).__name__}")
        return cls({str(name): _scale_from_json(name, entry) for name, entry in data.items()})


def _scale_from_json(name: str, entry: object) -> Scale:
    wanted = {f.name for f in fields(Scale)}
    if not isinstance(entry, dict) or set(entry) != wanted:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise CalibrationError(f"the scale of {name!r} needs exactly {sorted(wanted)}, got {got}")
    numbers = {key: value for key, value in entry.items() if key != "method"}
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers.values()):
        raise CalibrationError(f"the scale of {name!r} holds a value that is not a number")
    return Scale(**{k: float(v) for k, v in numbers.items()}, method=str(entry["method"]))
