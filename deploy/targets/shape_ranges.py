"""Input shape ranges over the calibration samples.

A text or audio model accepts any length; its engine accepts only the shapes it was built for.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


def is_static(size: int | str | None) -> bool:
    """Whether a dimension of an input has a fixed size."""
    return isinstance(size, int) and size > 0


def sample_shape_range(request: BuildRequest) -> ShapeRange:
    """Return the shapes of the calibration samples; read them again if sizes may differ."""
    return request.ranges.compute_once(
        "span", lambda: _shape_range(_sample_shapes(request)), of=request.feed
    )


def _sample_shapes(request: BuildRequest) -> Iterator[SampleShapes]:
    """Yield the shapes of each sample, or of the first one only if all are known to be equal."""
    # the model's input sizes, without the batch, which is the same in all samples
    input_sizes: list[int | str | None] = []
    for value in runtime_inputs(request.model.graph):
        shape = dims(value) or ()
        input_sizes += shape[1:] if value.name in request.batch_inputs else shape
    feed = request.feed
    have_equal_shapes = feed.has_fixed_size or all(map(is_static, input_sizes))
    samples = feed.first_samples(1) if have_equal_shapes else feed.samples()
    with phase("sizes of the samples", len(feed), "samples") as count_sample:
        for sample in samples:
            yield tuple((name, tuple(map(int, array.shape))) for name, array in sample.items())
            count_sample()


def _shape_range(shapes_of_samples: Iterable[SampleShapes]) -> ShapeRange:
    """Return the smallest and largest sizes of all samples, and the median and largest sample."""
    # shapes -> number of samples with them, so that memory grows with the shapes, not the samples
    sample_counts = Counter(shapes_of_samples)
    ordered_shapes = sorted(sample_counts, key=_value_count)  # by number of values, ascending
    # the loop leaves the shapes of the middle sample in `median_shapes`
    samples_to_median = (sample_counts.total() + 1) // 2
    for median_shapes in ordered_shapes:
        samples_to_median -= sample_counts[median_shapes]
        if samples_to_median <= 0:
            break

    shapes_by_input: dict[str, list[Shape]] = {}
    for sample_shapes in ordered_shapes:
        for name, shape in sample_shapes:
            shapes_by_input.setdefault(name, []).append(shape)
    min_sizes = {}
    max_sizes = {}
    for name, shapes in shapes_by_input.items():
        sizes_by_axis = list(zip(*shapes, strict=True))  # for each axis its size in all shapes
        min_sizes[name] = tuple(map(min, sizes_by_axis))
        max_sizes[name] = tuple(map(max, sizes_by_axis))
    return ShapeRange(
        min_sizes=min_sizes,
        median_sample=dict(median_shapes),
        max_sizes=max_sizes,
        largest_sample=dict(ordered_shapes[-1]),
    )


def _value_count(sample_shapes: SampleShapes) -> tuple[int, SampleShapes]:
    """Sort key: number of values of a sample, then its shapes, so that the order is fixed."""
    return sum(math.prod(shape) for _, shape in sample_shapes), sample_shapes
