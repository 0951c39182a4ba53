"""Input shape ranges over the calibration samples.

A text or audio model accepts any length; its engine accepts only the shapes it was built for.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from deploy.graph.index import dims, runtime_inputs
from deploy.targets.base import BuildRequest
from deploy.terminal import phase

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
SampleShapes = tuple[tuple[str, Shape], ...]  # (input, shape) pairs of one sample


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Input shapes over all samples, by input name.

    Attributes:
        min_sizes: the smallest size of every dimension.
        median_sample: shapes of the median sample, ordered by number of values.
        max_sizes: the largest size of every dimension.
        largest_sample: shapes of the sample with the most values.
    """

    min_sizes: Shapes
    median_sample: Shapes
    max_sizes: Shapes
    largest_sample: Shapes

    @property
    def varies(self) -> bool:
        """Whether the samples differ in shape."""
        return self.min_sizes != self.max_sizes


def sample_shape_range(request: BuildRequest) -> ShapeRange:
    """Return the shapes of the calibration samples; read them again if sizes may differ."""
    return request.ranges.compute_once(
        "span", lambda: _span(Counter(_shapes(request))), of=request.feed
    )


def _shapes(request: BuildRequest) -> Iterator[SampleShapes]:
    """Yield the shapes of each sample, or of the first one only if all are known to be equal."""
    inputs = (dims(value) or () for value in runtime_inputs(request.model.graph))
    fixed = all(isinstance(size, int) and size > 0 for shape in inputs for size in shape[1:])
    feed = request.feed
    samples = feed.first_samples(1) if fixed or feed.has_fixed_size else feed.samples()
    with phase("sizes of the samples", len(feed), "samples") as step:
        for sample in samples:
            yield tuple((name, tuple(map(int, array.shape))) for name, array in sample.items())
            step()


def _span(counts: Mapping[SampleShapes, int]) -> ShapeRange:
    """Return the span of these shapes; `counts` is the number of samples of each."""
    ranked = sorted(counts, key=_numbers)
    cumulative = [*accumulate(counts[fed] for fed in ranked)]
    half = (cumulative[-1] + 1) // 2
    by_input: dict[str, list[Shape]] = {}
    for name, shape in (pair for fed in ranked for pair in fed):
        by_input.setdefault(name, []).append(shape)
    sides = {name: [*zip(*shapes, strict=True)] for name, shapes in by_input.items()}
    return ShapeRange(
        min_sizes={name: tuple(map(min, sizes)) for name, sizes in sides.items()},
        median_sample=dict(ranked[bisect_left(cumulative, half)]),
        max_sizes={name: tuple(map(max, sizes)) for name, sizes in sides.items()},
        largest_sample=dict(ranked[-1]),
    )


def _numbers(fed: SampleShapes) -> tuple[int, SampleShapes]:
    """Sort key: number of values of a sample, then its shapes, so that the order is fixed."""
    return sum(math.prod(shape) for _, shape in fed), fed
