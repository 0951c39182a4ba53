"""Whether the first dimension of a model's inputs is a batch: decided once, for data and files.

::

    images [N, 3, H, W]  ->  scores [N, 10]        a batch: each row is one sample
    cameras [6, 3, H, W] ->  scores [1, 10]        no batch: all rows are one sample
    pillars [P, 8, 6]    ->  map [1, 3, H, W]      no batch

The model's shapes decide where they can (`mark_batch_axes`), two runs where they cannot
(`may_lack_batch`), and the user's `--batch-axis` everywhere. What the model leaves open, the
samples may show: items whose inputs differ in their number of rows are complete samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from deploy.errors import ConfigError
from deploy.tensors import TensorSpec

Specs = tuple[TensorSpec, ...]  # of the inputs of a model
Dimension = int | str | None  # a fixed size; or open, with a name or without one

AUTO, FIRST, NONE = "auto", "0", "none"
CHOICES = (AUTO, FIRST, NONE)


def mark_batch_axes(
    inputs: Sequence[TensorSpec], outputs: Iterable[TensorSpec] = (), choice: str = AUTO
) -> Specs:
    """Return the inputs with their `has_batch` set: whether their first dimension is a batch.

    Args:
        inputs: all inputs of the model.
        outputs: its outputs; without them, a first dimension that all inputs share is a batch.
        choice: `AUTO`, `FIRST` (the first dimension is the batch) or `NONE` (there is no batch).

    Raises:
        ConfigError: another choice.
    """
    if choice not in CHOICES:
        raise ConfigError(
            f"the batch axis must be {', '.join(CHOICES[:-1])} or {NONE}, got {choice!r}"
        )
    row_count = _find_common_rows(inputs)  # 1 if they fix none
    rows_are_samples = choice == FIRST
    if choice == AUTO:  # yes, unless an output has another fixed number of rows
        rows_are_samples = row_count == 1 or all(
            _may_hold_samples(output.shape, row_count) for output in outputs
        )
    # an input with another fixed number of rows, such as a state [2, N, 64], has no batch in front
    return tuple(
        replace(spec, has_batch=rows_are_samples and _has_common_rows(spec, row_count))
        for spec in inputs
    )


def without_batch(inputs: Iterable[TensorSpec]) -> Specs:
    """Return the inputs with a first dimension like any other: each item is a complete sample."""
    return tuple(replace(spec, has_batch=False) for spec in inputs)


def _has_common_rows(spec: TensorSpec, row_count: int) -> bool:
    """Whether an input has the rows that all inputs have: an open number, 1, or `row_count`."""
    return has_open_first(spec) or spec.shape[:1] in ((1,), (row_count,))


def _find_common_rows(inputs: Iterable[TensorSpec]) -> int:
    """Return the number of rows, the size of the first dimension, if all inputs fix one; else 1.

    Inputs of one dimension do not count. An input [3, H, W] is an image without a batch dimension:
    it has no 3 rows.
    """
    first_sizes: set[Dimension] = set()
    for spec in inputs:
        if _is_image_shape(spec.shape):
            first_sizes.add(1)
        elif len(spec.shape) > 1:
            first_sizes.add(spec.shape[0])
    return _single_size(first_sizes)


def _single_size(sizes: set[Dimension]) -> int:
    """Return the only one of these sizes if it is fixed; 1 for several, or for an open one."""
    if len(sizes) != 1:
        return 1
    (size,) = sizes
    return size if isinstance(size, int) and size > 0 else 1


def _is_image_shape(shape: tuple[Dimension, ...]) -> bool:
    """Whether a shape is [3, H, W] with both sides fixed."""
    if len(shape) != 3 or shape[0] != 3:
        return False
    return all(isinstance(side, int) and side > 3 for side in shape[1:])


def _may_hold_samples(shape: tuple[Dimension, ...], sample_count: int) -> bool:
    """Whether an output of this shape may hold `sample_count` samples.

    They are rows of its first dimension, or of the second of a sequence [T, N, C].
    """
    if not shape:  # a scalar, or of unknown rank
        return True
    batch_sizes = shape[:2] if len(shape) > 2 else shape[:1]
    return any(not isinstance(size, int) or size == sample_count for size in batch_sizes)


def has_open_first(spec: TensorSpec) -> bool:
    """Whether the first dimension of an input is open."""
    return bool(spec.shape) and not isinstance(spec.shape[0], int)


def may_lack_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether open first dimensions may be no batch, which two runs of the model must decide.

    That is so in two cases. No output has an open dimension that could count samples: then all
    points of a cloud, for example, may give one row. Or all open inputs are [N, C] or [N, M, C]
    with a fixed C and M: these are points as often as a batch.
    """
    open_inputs = list(filter(has_open_first, inputs))
    if not open_inputs:
        return False
    known_shapes = [output.shape for output in outputs if output.shape]
    # an output can hold 0 samples only by an open dimension: a fixed one is never 0
    if known_shapes and not any(_may_hold_samples(shape, 0) for shape in known_shapes):
        return True
    return all(_may_be_points(spec.shape) for spec in open_inputs)


def _may_be_points(shape: tuple[Dimension, ...]) -> bool:
    """Whether a shape with an open first dimension is [N, C] or [N, M, C] and fixed otherwise."""
    return len(shape) in (2, 3) and all(isinstance(size, int) for size in shape[1:])


def samples_per_run(inputs: Iterable[TensorSpec]) -> int:
    """Return how many samples the model fixes in each run; 1 if it fixes no number."""
    batched_inputs = (spec for spec in inputs if spec.has_batch)
    return _single_size({spec.shape[0] for spec in batched_inputs if len(spec.shape) > 1})


def batch_inputs(inputs: Iterable[TensorSpec]) -> frozenset[str]:
    """Return the names of the inputs each of whose rows is one sample."""
    return frozenset(spec.name for spec in inputs if spec.has_batch)


def describe_samples(inputs: Sequence[TensorSpec]) -> str:
    """Return what one sample is, for the report; "" if it is plain, a row of a batch."""
    if batch_inputs(inputs):
        return ""
    row_count = _find_common_rows(inputs)  # 1 if they fix none
    names = [spec.name for spec in inputs if _has_common_rows(spec, row_count)]
    return f"all rows of {', '.join(names)} are one sample" if names else ""
