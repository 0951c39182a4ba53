"""`Statistics`: the histograms of all tensors of a run, as one mergeable, storable value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import BINS, Histogram
from calibrators.scales import Scale, Scales

FORMAT = 1  # of `to_arrays`; part of every fingerprint
_FIELDS = ("names", "counts", "base", "full_range", "minimum", "maximum", "total", "infinite")


class Statistics(Mapping[str, Histogram]):
    """Tensor name -> `Histogram`, in a fixed order of names."""

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self._histograms = dict(histograms)

    @classmethod
    def empty(cls, names: list[str], bases: Mapping[str, float] | None = None) -> Statistics:
        """Empty histograms for `names`; with `bases`, TensorRT's range rule (see Histogram)."""
        return cls({n: Histogram(base=bases[n] if bases is not None else None) for n in names})

    def __getitem__(self, name: str) -> Histogram:
        return self._histograms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._histograms)

    def __len__(self) -> int:
        return len(self._histograms)

    def merge(self, other: Statistics) -> None:
        """Add what `other` saw of the same tensors; exact, in any order.

        Raises:
            CalibrationError: the two are not of the same tensors.
        """
        if list(self) != list(other):
            raise CalibrationError("statistics merge only when they are of the same tensors")
        for name, histogram in self.items():
            histogram.merge(other[name])

    def scales(
        self,
        search: Callable[[Histogram], Scale],
        bounds: Mapping[str, tuple[float, float]] | None = None,
    ) -> Scales:
        """Search every tensor that has a scale: seen, finite, not always zero.

        Args:
            search: such as `calibrators.mse.mse`.
            bounds: tensor -> (floor, ceiling) beyond which its readers see no difference.
        """
        known = bounds or {}
        sound = {name: h for name, h in self.items() if trouble(h) is None}
        return Scales({n: _searched(h, search, known.get(n)) for n, h in sound.items()})

    def troubles(self) -> dict[str, str]:
        """Tensor name -> why it gets no scale, as the end of a sentence."""
        found = {name: trouble(histogram) for name, histogram in self.items()}
        return {name: why for name, why in found.items() if why is not None}

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Plain arrays, none of dtype object, that `from_arrays` turns back."""
        hs = list(self._histograms.values())
        return {
            "names": np.array(list(self), dtype=np.str_),
            "counts": np.array([h.counts for h in hs], np.int64).reshape(len(hs), 2 * BINS + 1),
            "base": np.array([h.base or 0.0 for h in hs], np.float64),
            "full_range": np.array([h.full_range for h in hs], np.float64),
            "minimum": np.array([h.minimum for h in hs], np.float64),
            "maximum": np.array([h.maximum for h in hs], np.float64),
            "total": np.array([h.total for h in hs], np.int64),
            "infinite": np.array([h.infinite for h in hs], np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Statistics:
        """Inverse of `to_arrays`.

        Raises:
            CalibrationError: arrays missing, of another shape, or at odds with each other.
        """
        if any(field not in arrays for field in _FIELDS):
            raise CalibrationError(f"stored statistics need the arrays {', '.join(_FIELDS)}")
        names = [str(name) for name in arrays["names"]]
        shapes = {field: arrays[field].shape for field in _FIELDS[2:]}
        if arrays["counts"].shape != (len(names), 2 * BINS + 1) or any(
            shape != (len(names),) for shape in shapes.values()
        ):
            raise CalibrationError("stored statistics have arrays of the wrong shape")
        return cls({name: _restore(arrays, row) for row, name in enumerate(names)})


def trouble(histogram: Histogram) -> str | None:
    """Why a tensor gets no scale, or None where it does."""
    if histogram.infinite:
        return f"held {histogram.infinite} infinite values"
    if histogram.total == 0:
        return "was empty in every sample"
    if histogram.amax == 0:
        return "was 0 in every sample"
    return None


def _searched(
    histogram: Histogram, search: Callable[[Histogram], Scale], bounds: tuple[float, float] | None
) -> Scale:
    if bounds is None:
        return search(histogram)
    scale = search(histogram.clamped(*bounds))
    return replace(scale, observed_min=histogram.minimum, observed_max=histogram.maximum)


def _restore(arrays: Mapping[str, NDArray[np.generic]], row: int) -> Histogram:
    histogram = Histogram(base=float(arrays["base"][row]))
    histogram.counts = np.array(arrays["counts"][row], np.int64)
    histogram.full_range = float(arrays["full_range"][row])
    histogram.minimum = float(arrays["minimum"][row])
    histogram.maximum = float(arrays["maximum"][row])
    histogram.total = int(arrays["total"][row])
    histogram.infinite = int(arrays["infinite"][row])
    if histogram.counts.min() < 0 or histogram.counts.sum() != histogram.total:
        raise CalibrationError("stored statistics have counts that do not add up to their total")
    return histogram


@dataclass(frozen=True, slots=True)
class HistogramOf:
    """A histogram of every tensor: order-independent, or by TensorRT's range rule.

    Attributes:
        first: samples whose largest |x| starts the range; 0 for the order-independent range.
    """

    first: int = 0
