"""Sample checks: outliers among the calibration samples; stop rule and agreement of halves.

An outlier is a sample far above all others, which can spoil every range::

    largest |x| of each sample, one tensor     9800  1.3  1.2  1.2  1.1 ...
                                               |---| more than 8 times the next: an outlier

A range that covers it costs all other samples three or more of int8's eight bits; a range that
clips it is wrong for it. In the benchmarks no sample exceeds twice the next, so ordinary
feeds get no warning. Only the few largest samples of each tensor are stored, by number:
memory is constant, and the result does not depend on the number of threads.

`StabilityRule` and `HalvesAgreement` are plain values; `deploy.calibration.stability` computes
them.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ConfigError, counted, list_first

OUTLIER_RATIO = 8.0  # ratio to the next largest sample: three bits
STABLE_SHARE = 0.2  # the range of all samples is then off by a tenth: less than 1 dB of a step
_MIN_SAMPLES = 5  # with fewer, "all others" means little
_SAMPLES_PER_OUTLIER = 20  # at most one of so many samples is an outlier, but always one may be
_STORED_PEAKS = 9  # largest samples stored per tensor: at most 8 outliers and the next
_MAX_LISTED = 3  # entries that a sentence lists
_TENSORS_PER_EXCEPTION = 20  # one of so many tensors may differ

TensorKey = tuple[str, str]  # variant, tensor
PeakRow = tuple[str, str, int, tuple[tuple[float, int], ...]]
"""Variant, tensor, number of samples, (|x|, position of the sample in the feed) of the largest."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A sample that stands out in a tensor.

    Attributes:
        variant, tensor: the tensor.
        digests: sha256 (hex) of each of the sample's images or rows.
        ratio: ratio of its largest |x| to that of the largest other sample.
    """

    variant: str
    tensor: str
    digests: tuple[str, ...]
    ratio: float


def largest_magnitude(value: NDArray[np.floating]) -> float:
    """Return the largest |x| of an array of any shape, in real units; 0 if it is empty."""
    if not value.size:
        return 0.0
    return max(float(value.max()), -float(value.min()))


class Peaks:
    """The largest samples of every tensor, in one pass or a slice of it."""

    def __init__(self) -> None:
        # tensor -> heap of (|x|, -number of the sample); of equal |x|, the first samples stay
        self._largest: dict[TensorKey, list[tuple[float, int]]] = {}
        self._sample_counts: Counter[TensorKey] = Counter()

    def add(self, key: TensorKey, number: int, amax: float) -> None:
        """Add the largest |x| of a tensor in sample `number`; ignores Inf, reported elsewhere."""
        if math.isfinite(amax):
            self._sample_counts[key] += 1
            self._push(key, (amax, -number))

    def merge(self, other: Peaks) -> None:
        """Add the peaks of another slice of the pass."""
        self._sample_counts += other._sample_counts
        for key, peaks in other._largest.items():
            for peak in peaks:
                self._push(key, peak)

    def rows(self, positions: Sequence[int]) -> list[PeakRow]:
        """Return one `PeakRow` per tensor.

        Args:
            positions: position of each sample in the feed, by number; the first number is 1.
        """
        rows = []
        for key, peaks in sorted(self._largest.items()):
            # a sample is stored by its number, times -1
            largest = sorted(
                (amax, positions[-negative_number - 1]) for amax, negative_number in peaks
            )
            rows.append((*key, self._sample_counts[key], tuple(largest)))
        return rows

    def add_rows(self, rows: Iterable[PeakRow], positions: Sequence[int]) -> None:
        """Add the `rows` of other peaks.

        Args:
            rows: of samples that have one of the positions each.
            positions: position of each sample in the feed, ascending, by its number here, which
                begins with 1.
        """
        for variant, tensor, sample_count, largest in rows:
            key = (variant, tensor)
            self._sample_counts[key] += sample_count
            for amax, position in largest:
                sample_number = bisect.bisect_right(positions, position)
                self._push(key, (amax, -sample_number))

    def _push(self, key: TensorKey, peak: tuple[float, int]) -> None:
        """Store a peak if it is among the largest of its tensor; `peak`: (|x|, -number)."""
        peaks = self._largest.setdefault(key, [])
        if len(peaks) < _STORED_PEAKS:
            heapq.heappush(peaks, peak)
        else:
            heapq.heappushpop(peaks, peak)

    def outliers(self, digests_of_sample: Callable[[int], tuple[str, ...]]) -> Iterator[Outlier]:
        """Yield the samples that stand out, tensor by tensor.

        Sorted by the largest |x| of the tensor in each, the first few samples stand out if the next
        one is less than an eighth of them.

        `digests_of_sample`: number of a sample -> sha256 (hex) of each of its images or rows.
        """
        for key in sorted(self._largest):
            sample_count = self._sample_counts[key]
            if sample_count < _MIN_SAMPLES:
                continue
            variant, tensor = key
            peaks = sorted(self._largest[key], reverse=True)  # (|x|, -number of the sample)
            # at most a twentieth of all samples, or one; and at least one of the stored peaks must
            # be left, with which the outliers are compared
            max_outliers = min(max(1, sample_count // _SAMPLES_PER_OUTLIER), len(peaks) - 1)
            for outlier_count in range(max_outliers, 0, -1):  # as many as possible
                smallest_outlier_amax, _ = peaks[outlier_count - 1]
                next_amax, _ = peaks[outlier_count]
                if 0 < OUTLIER_RATIO * next_amax < smallest_outlier_amax:
                    for amax, negative_number in peaks[:outlier_count]:
                        digests = digests_of_sample(-negative_number)
                        yield Outlier(variant, tensor, digests, amax / next_amax)
                    break


def describe_outliers(outliers: Iterable[Outlier], names: Mapping[str, str]) -> str:
    """Return one sentence for the report, worst sample first.

    Args:
        outliers: samples that stand out, each in one tensor; a sample may be there several times.
        names: sha256 (hex) of an image or row -> its name.
    """
    # digests of a sample's images, which identify it -> its outliers, one for each tensor, by ratio
    outliers_by_digests: dict[tuple[str, ...], list[Outlier]] = {}
    for outlier in sorted(outliers, key=lambda outlier: (-outlier.ratio, outlier.digests)):
        outliers_by_digests.setdefault(outlier.digests, []).append(outlier)

    clauses = []
    for digests, sample_outliers in outliers_by_digests.items():
        worst_outlier = sample_outliers[0]
        clause = (
            f"largest |x| in {worst_outlier.tensor!r} {worst_outlier.ratio:,.0f} times the others'"
        )
        if len(sample_outliers) > 1:
            clause += f", far off in {counted(len(sample_outliers) - 1, 'other tensor')} too"
        clauses.append(f"{_sample_name(digests, names)} ({clause})")
    return (
        "calibration samples that stand far above the others cost them int8 steps:"
        f" {list_first(clauses, _MAX_LISTED)}; check these samples, or leave them out"
    )


def _sample_name(digests: tuple[str, ...], names: Mapping[str, str]) -> str:
    image_names = dict.fromkeys(names[digest] for digest in digests if digest in names)
    return " with ".join(image_names) or "a sample"


@dataclass(frozen=True, slots=True)
class StabilityRule:
    """Rule that ends the observation; stored in a cache to say how its samples were chosen.

    Attributes:
        within: share of the range by which two halves may differ.
        method: label of the search whose ranges are compared.

    Raises:
        ConfigError: the share is not between 0 and 1.
    """

    within: float
    method: str

    def __post_init__(self) -> None:
        if not 0 < self.within < 1:
            raise ConfigError(
                "stable ranges differ by a share of the range, over 0 and below 1, got"
                f" {self.within:g}; give a share such as {STABLE_SHARE:g}"
            )

    def __str__(self) -> str:
        """Return the rule as text."""
        return f"until halves of the samples agreed within {_percent(self.within)} by {self.method}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesAgreement:
    """Agreement of the ranges of two halves of the samples.

    Attributes:
        samples: number of samples in both halves.
        within: share of a range by which they may differ.
        tensors: number of tensors whose ranges are compared.
        differences: tensor -> difference as a share of its range, for tensors that differ by
            `within` or more, largest first.
        stopped: whether `--until-stable` ended the calibration before the last sample.
    """

    samples: int
    within: float
    tensors: int
    differences: Mapping[str, float] = field(default_factory=dict)
    stopped: bool = False

    @property
    def is_enough(self) -> bool:
        """Whether all but a twentieth of the tensors, rounded, agree."""
        max_differing = (self.tensors + _TENSORS_PER_EXCEPTION // 2) // _TENSORS_PER_EXCEPTION
        return len(self.differences) <= max_differing

    @property
    def sentence(self) -> str:
        """The agreement in one sentence, with advice if more samples would help.

        Such as "2 of 60 ranges differ by 20 % or more between the halves of 64 samples: ...", where
        20 % is `within`, 60 is `tensors`, and 64 is `samples`.
        """
        difference_count = len(self.differences)
        verb = "differs" if 1 in (difference_count, self.tensors) else "differ"
        sentence = (
            f"{difference_count or 'none'} of {counted(self.tensors, 'range')} {verb} by"
            f" {_percent(self.within)} or more between the halves of {self.samples} samples"
        )
        if self.differences:
            clauses = [f"{name} by {_percent(share)}" for name, share in self.differences.items()]
            sentence += f": {list_first(clauses, _MAX_LISTED)}"
        if self.stopped:
            sentence += "; the ranges agreed twice in a row, so no more were used"
        elif not self.is_enough:
            sentence += "; calibrate with more images"
        return sentence


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
