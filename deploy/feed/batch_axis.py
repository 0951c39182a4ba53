"""What the first dimension of a model's inputs is: decided once, for data, figures and files.

::

    ROWS      images [N, 3, H, W]  ->  scores [N, 10]        each row is one sample
    PARTS     cameras [6, 3, H, W] ->  scores [1, 10]        6 rows make one sample
    CONTENT   pillars [P, 8, 6]    ->  map [1, 3, H, W]      a dimension like any other

The model's shapes decide where they can (`mark_first_axes`), two runs where they cannot
(`may_lack_batch`), and the user's `--batch-axis` everywhere. What the model leaves open, the
samples may show: items whose inputs differ in their number of rows are complete samples, and so
are items of exactly as many rows as one sample has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from deploy.errors import ConfigError
from deploy.tensors import FirstAxis, TensorSpec

AUTO, FIRST, NONE = "auto", "0", "none"
CHOICES = (AUTO, FIRST, NONE)


def mark_first_axes(
    inputs: Sequence[TensorSpec], outputs: Iterable[TensorSpec] = (), choice: str = AUTO
) -> tuple[TensorSpec, ...]:
    """Return the inputs with what their first dimension is.

    Args:
        inputs: all inputs of the model.
        outputs: its outputs; without them a batch is assumed.
        choice: `AUTO`, `FIRST` (the first dimension is the batch) or `NONE` (there is no batch).

    Raises:
        ConfigError: another choice.
    """
    if choice not in CHOICES:
        raise ConfigError(
            f"the batch axis must be {', '.join(CHOICES[:-1])} or {NONE}, got {choice!r}"
        )
    size = _common_size(inputs)
    has_batch = choice != NONE
    if choice == AUTO:
        has_batch = not _is_graph(inputs)
        if size > 1:
            has_batch = all(_may_carry(output.shape, size) for output in outputs)

    marked = []
    for spec in inputs:
        first_axis = FirstAxis.CONTENT
        if spec.shape and (not isinstance(spec.shape[0], int) or spec.shape[0] in (1, size)):
            if has_batch:
                first_axis = FirstAxis.ROWS
            elif size > 1:
                first_axis = FirstAxis.PARTS
        marked.append(replace(spec, first_axis=first_axis))
    return tuple(marked)


def without_batch(inputs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model whose items are complete samples."""
    return tuple(replace(spec, first_axis=FirstAxis.CONTENT) for spec in inputs)


def _common_size(inputs: Iterable[TensorSpec]) -> int:
    """Return the batch that all inputs fix in their first of several dimensions, else 1.

    An input [3, H, W] is an image without a batch dimension, no batch of 3.
    """
    sizes: set[int | str | None] = set()
    for spec in inputs:
        if _is_image_shape(spec.shape):
            sizes.add(1)
        elif len(spec.shape) > 1:
            sizes.add(spec.shape[0])
    return _single_size(sizes)


def _single_size(sizes: set[int | str | None]) -> int:
    if len(sizes) != 1:
        return 1
    (size,) = sizes
    return size if isinstance(size, int) and size > 0 else 1


def _is_image_shape(shape: tuple[int | str | None, ...]) -> bool:
    if len(shape) != 3 or shape[0] != 3:
        return False
    return all(isinstance(side, int) and side > 3 for side in shape[1:])


def _may_carry(shape: tuple[int | str | None, ...], size: int) -> bool:
    """Whether an output may hold so many samples: in its first dimension, or as [T, N, C]."""
    if not shape:  # a scalar, or of unknown rank
        return True
    batch_sizes = shape[:2] if len(shape) > 2 else shape[:1]
    return any(not isinstance(batch, int) or batch == size for batch in batch_sizes)


def _is_graph(inputs: Sequence[TensorSpec]) -> bool:
    """Whether inputs are those of a graph network, whose nodes are no batch.

    They hold edges, integers [2, E], or an adjacency matrix [N, N] beside nodes [N, ...].
    """
    open_sizes = {id(spec): spec.shape[0] for spec in inputs if has_open_first(spec)}
    for spec in inputs:
        if len(spec.shape) != 2 or isinstance(spec.shape[1], int):
            continue
        other_sizes = [size for key, size in open_sizes.items() if key != id(spec)]
        is_integer = spec.dtype in ("int32", "int64")
        if is_integer and spec.shape[0] == 2 and other_sizes:
            return True
        is_square = spec.shape[0] == spec.shape[1] is not None
        if is_square and not is_integer and spec.shape[0] in other_sizes:
            return True
    return False


def has_open_first(spec: TensorSpec) -> bool:
    """Whether the first dimension of an input is open."""
    return bool(spec.shape) and not isinstance(spec.shape[0], int)


def may_lack_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether open first dimensions may be no batch, which a run must decide.

    That is so if no output has one, as where the points of a cloud give one row; and for inputs
    [N, C] or [N, M, C] whose other sizes are fixed, which are points as often as a batch.
    """
    open_inputs = list(filter(has_open_first, inputs))
    if not open_inputs:
        return False
    known_shapes = [output.shape for output in outputs if output.shape]
    if known_shapes and not any(_may_carry(shape, 0) for shape in known_shapes):
        return True
    return all(_may_be_points(spec.shape) for spec in open_inputs)


def _may_be_points(shape: tuple[int | str | None, ...]) -> bool:
    return len(shape) in (2, 3) and all(isinstance(size, int) for size in shape[1:])


def rows_of_run(inputs: Iterable[TensorSpec]) -> int:
    """Return how many rows the model fixes in each run; 1 if it fixes none."""
    sizes = set()
    for spec in inputs:
        if spec.first_axis is not FirstAxis.CONTENT and len(spec.shape) > 1:
            sizes.add(spec.shape[0])
    return _single_size(sizes)


def batch_inputs(inputs: Iterable[TensorSpec]) -> frozenset[str]:
    """Return the inputs each of whose rows is one sample."""
    return frozenset(spec.name for spec in inputs if spec.first_axis is FirstAxis.ROWS)


def describe_samples(inputs: Sequence[TensorSpec]) -> str:
    """Return what one sample is, for the report; "" if it is plain, a row of a batch."""
    parts = [spec.name for spec in inputs if spec.first_axis is FirstAxis.PARTS]
    if parts:
        return f"{rows_of_run(inputs)} of them together are one input of the model"
    open_names = [
        spec.name
        for spec in inputs
        if spec.first_axis is FirstAxis.CONTENT and (has_open_first(spec) or spec.shape[:1] == (1,))
    ]
    return f"all rows of {', '.join(open_names)} are one sample" if open_names else ""
