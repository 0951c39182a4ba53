"""`Found`: ranges of a model's tensors, and why some have none; also those of a foreign cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrators.scales import Scale, Scales
from deploy.calibration import trt_cache
from deploy.calibration.store import read
from deploy.errors import CacheError


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a tensor has no scale.

    Attributes:
        why: the end of a sentence that begins with the tensor.
        infinite: whether infinity is the reason; TensorRT's cache then says `inf`, else `0`.
        unknown: whether nothing is known of it, so that TensorRT's cache leaves it out.
    """

    why: str
    infinite: bool = False
    unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Ranges of tensors, and why others have none.

    Attributes:
        scales: tensor -> clip range.
        troubles: tensor -> why it has no scale.
    """

    scales: Scales
    troubles: Mapping[str, Trouble]

    @property
    def symmetric(self) -> dict[str, np.float32]:
        """Tensor -> amax / 127, as TensorRT's cache has it: 0 or infinite where in trouble."""
        known = {name: scale.symmetric for name, scale in self.scales.items()}
        told = {name: one for name, one in self.troubles.items() if not one.unknown}
        without = {n: np.float32(np.inf if t.infinite else 0) for n, t in told.items()}
        return {**known, **without}

    @property
    def reasons(self) -> dict[str, str]:
        """Tensor -> why it has no scale, in words."""
        return {name: trouble.why for name, trouble in self.troubles.items()}


def of_foreign(path: Path, wanted: tuple[str, ...], non_negative: frozenset[str]) -> Found:
    """A cache without a fingerprint, taken as it is: symmetric ranges of amax = 127 * scale.

    Args:
        path: TensorRT's text format, from any tool.
        wanted: tensors that need a scale.
        non_negative: tensors that cannot be negative, whose range starts at 0.

    Raises:
        CacheError: the file is not such a cache, or holds no usable entry for this model.
    """
    cache = trt_cache.parse(read(path), origin=str(path))
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
    troubles = {n: Trouble(f"has no entry in {path.name}") for n in wanted if n not in scales}
    troubles |= {
        name: Trouble(f"has a {flaw} scale in {path.name}", infinite=flaw == "infinite")
        for name, flaw in flaws.items()
    }
    return Found(scales=Scales(scales), troubles=troubles)


def _symmetric(amax: float, non_negative: bool, algorithm: str) -> Scale:
    low = 0.0 if non_negative else -amax
    return Scale(
        lo=low, hi=amax, amax=amax, observed_min=low, observed_max=amax, method=f"cache-{algorithm}"
    )
