"""What a model changes of its input, where what it gives is that input but for a little.

A watermark, a denoised or a sharpened picture is the picture itself plus what was changed, and one
of super resolution is what any program makes of it at that size, plus what was added. To give
the input back as it is would be good by the output's SQNR, though nothing of the model is left::

    input given back, dB     10 log10(sum r^2 / sum (r - x)^2)          where it is good, then
    left of the change, dB   10 log10(sum (r - x)^2 / sum (r - c)^2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.metrics.output_errors import sqnr_db
from deploy.metrics.resized import resized
from deploy.metrics.rows import Outputs
from deploy.tensors import Array

_PICTURE = 4  # dimensions at least: states of recurrent layers have fewer
GIVEN_BACK_DB = 15.0  # what the verdict calls good
ROUNDING_DB = 60.0  # a change that is less is none
LEFT_DB = 5.0  # less of the change is mostly noise


@dataclass(slots=True)
class Changes:
    """Running sums of every output that has the shape of an input, or several times its size.

    Attributes:
        sums: (output, input) -> squares of the output, of the change and of the noise.
        apart: pairs of which a sample had other shapes.
        larger: pairs whose output is larger than the input.
    """

    sums: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    apart: set[tuple[str, str]] = field(default_factory=set)
    larger: set[tuple[str, str]] = field(default_factory=set)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one batch."""
        for name, left in reference.items():
            for source, fed in inputs.items():
                shown = fed if _alike(left, fed) else resized(left, fed)
                if shown is not None and candidate[name].shape == left.shape:
                    self._count((name, source), shown, left, candidate[name])
                    if shown is not fed:
                        self.larger.add((name, source))
                else:
                    self.apart.add((name, source))

    def _count(self, pair: tuple[str, str], fed: Array, left: Array, right: Array) -> None:
        own = left.astype(np.float64)
        found = (own, own - fed, own - right)
        before = self.sums.get(pair, [0.0, 0.0, 0.0])
        self.sums[pair] = [a + float(np.vdot(b, b)) for a, b in zip(before, found, strict=True)]

    def lost(self) -> Iterator[str]:
        """A sentence on each output of which next to nothing of the change is left."""
        for (name, source), (signal, change, noise) in self.sums.items():
            if (name, source) in self.apart or not np.isfinite(signal + change + noise):
                continue
            given_back, left = sqnr_db(signal, change), sqnr_db(change, noise)
            if change > 0 and given_back >= GIVEN_BACK_DB and left < LEFT_DB:
                how = "resized" if (name, source) in self.larger else "given back as it is"
                yield (
                    f"{left:.1f} dB are left of what the model changes of {source} in {name}:"
                    f" {source} itself, {how}, would have {given_back:.1f} dB"
                )


def given_back(samples: Sequence[Array], fed: Sequence[Outputs]) -> str:
    """The input that an output gives back but for a small change in all samples; "" for none."""
    for name in fed[0] if fed else ():
        pairs = [(one, inputs[name]) for one, inputs in zip(samples, fed, strict=False)]
        if all(_alike(*pair) for pair in pairs):
            signal, change = (
                sum(float(np.square(one, dtype=np.float64).sum()) for one in values)
                for values in ([one for one, _ in pairs], [less(*pair) for pair in pairs])
            )
            if change > 0 and GIVEN_BACK_DB <= sqnr_db(signal, change) <= ROUNDING_DB:
                return name
    return ""


def less(value: Array, fed: Array) -> Array:
    """What was changed of an input; a value of another shape as it is."""
    return np.subtract(value, fed, dtype=np.float32) if value.shape == fed.shape else value


def _alike(value: Array, fed: Array) -> bool:
    floating = all(np.issubdtype(one.dtype, np.floating) for one in (value, fed))
    return floating and value.ndim >= _PICTURE and value.shape == fed.shape
