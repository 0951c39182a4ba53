"""Shapes of what is fed, over all samples.

A network of text or sound takes any length; its engine takes those that it was built for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from deploy.graph.index import dims, fed_inputs
from deploy.targets.base import BuildRequest
from deploy.terminal import phase

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Fed = tuple[tuple[str, Shape], ...]  # the shapes of one sample, by input


@dataclass(frozen=True, slots=True)
class Span:
    """Shapes of the inputs.

    Attributes:
        least: the smallest size of every dimension.
        usual: those of the sample that half of all are no larger than.
        most: the largest size of every dimension.
        largest: those of the largest sample.
    """

    least: Shapes
    usual: Shapes
    most: Shapes
    largest: Shapes

    @property
    def varies(self) -> bool:
        """Whether samples are of several shapes."""
        return self.least != self.most


def span_of(request: BuildRequest) -> Span:
    """Of the samples that calibrate, which are read once more where they may differ in size."""
    key = "span", id(request.feed)  # kept with the feed of this id
    return request.ranges.once(key, lambda: (request.feed, _span(Counter(_shapes(request)))))[1]


def _shapes(request: BuildRequest) -> Iterator[Fed]:
    """Of each sample; of the first alone where all are known to be alike."""
    inputs = (dims(value) or () for value in fed_inputs(request.model.graph))
    fixed = all(isinstance(size, int) and size > 0 for shape in inputs for size in shape[1:])
    feed = request.feed
    samples = feed.first(1) if fixed or feed.one_size else feed.samples()
    with phase("sizes of the samples", len(feed), "samples") as step:
        for sample in samples:
            yield tuple((name, tuple(map(int, array.shape))) for name, array in sample.items())
            step()


def _span(seen: Mapping[Fed, int]) -> Span:
    """Of shapes and how many samples have them: there are few, however many samples there are."""
    ranked = sorted(seen, key=_numbers)
    no_larger = [*accumulate(seen[fed] for fed in ranked)]
    half = (no_larger[-1] + 1) // 2
    every: dict[str, list[Shape]] = {}
    for name, shape in (one for fed in ranked for one in fed):
        every.setdefault(name, []).append(shape)
    sides = {name: [*zip(*shapes, strict=True)] for name, shapes in every.items()}
    return Span(
        least={name: tuple(map(min, sizes)) for name, sizes in sides.items()},
        usual=dict(ranked[bisect_left(no_larger, half)]),
        most={name: tuple(map(max, sizes)) for name, sizes in sides.items()},
        largest=dict(ranked[-1]),
    )


def _numbers(fed: Fed) -> tuple[int, Fed]:
    """By all values together; the shapes tell those of one size apart, in whatever order."""
    return sum(math.prod(shape) for _, shape in fed), fed
