"""Inputs for latency measurements: random tensors that fit the session's specs, or real images."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from math import prod
from pathlib import Path
from shlex import quote

import numpy as np

from deploy.errors import CacheError, ConfigError
from deploy.feed.arrays import concatenate_samples
from deploy.feed.preprocess import format_size, shape_text
from deploy.feed.temporary_arrays import Shape
from deploy.files import manifest
from deploy.files.reading import format_bytes
from deploy.machine import memory_bytes
from deploy.tasks.rows import Outputs
from deploy.tensors import Array, TensorSpec, fits

Shapes = Mapping[str, Sequence[int]]

FEED_COUNT = 4  # number of different inputs, used in turn
_EXAMPLE_SIZE = 224  # of an open dimension in the example of a message
_VALUE_BYTES = 4  # of a number of a random input: float32


def random_feeds(
    inputs: Sequence[TensorSpec],
    *,
    shapes: Shapes | None = None,
    batch: int | None = None,
    count: int = FEED_COUNT,
    seed: int = 0,
) -> list[dict[str, Array]]:
    """Return `count` random feeds: normal floats, 0 or 1 for integers and bools.

    An open first dimension becomes a batch of 1; other open dimensions need `shapes`.

    Args:
        inputs: specs of the inputs.
        shapes: input name -> dimensions, for inputs with open dimensions.
        batch: first dimension of every input, which must be open; None leaves it as it is.
        count: number of feeds.
        seed: seed of the values.

    Raises:
        ConfigError: a shape that does not fit, or is missing; an input whose type has no numbers;
            feeds that do not fit into the memory.
    """
    shapes = shapes or {}
    input_names = [spec.name for spec in inputs]
    for name in shapes:
        if name not in input_names:
            raise ConfigError(
                f"--shape must name an input of the model ({', '.join(input_names)}), got {name!r}"
            )
    input_shapes = [_choose_shape(spec, shapes.get(spec.name), batch) for spec in inputs]

    needed_bytes = count * _VALUE_BYTES * sum(map(prod, input_shapes))
    memory = memory_bytes()
    if memory is not None and needed_bytes > memory:
        raise ConfigError(
            f"random inputs must fit into the memory, got {format_bytes(needed_bytes)} of them and"
            f" a machine of {format_bytes(memory)}; give a smaller --shape or --batch"
        )

    rng = np.random.default_rng(seed)
    feeds = []
    for _ in range(count):
        specs_and_shapes = zip(inputs, input_shapes, strict=True)
        feeds.append(
            {spec.name: _draw_values(spec, shape, rng) for spec, shape in specs_and_shapes}
        )
    return feeds


def stack_samples(samples: Sequence[Outputs], batch: int) -> list[dict[str, Array]]:
    """Return `FEED_COUNT` feeds of `batch` rows each.

    `samples`: inputs of one row each, which are used in turn, again from the first if they are few.

    Raises:
        ConfigError: samples of different sizes.
    """
    feeds = []
    endless_samples = cycle(samples)
    for _ in range(FEED_COUNT):
        rows = list(islice(endless_samples, batch))
        feeds.append(concatenate_samples(rows, _explain_shapes))
    return feeds


def _explain_shapes(name: str, _: Sequence[Shape]) -> ConfigError:
    return ConfigError(
        f"images of a batch must have one size, got several for {name!r}; give --size,"
        " or leave --batch out"
    )


def refuse_fixed_batch(inputs: Iterable[TensorSpec]) -> None:
    """Check that all inputs leave their first dimension open."""
    for spec in inputs:
        if not spec.shape or isinstance(spec.shape[0], int):
            raise ConfigError(
                "a model must leave the first dimension of its inputs open to be measured at"
                f" several batches, got {shape_text(spec)} for {spec.name!r}; export it with a"
                " dynamic batch, or leave --batch out"
            )


def read_calibration_shapes(
    paths: Iterable[Path], inputs: Iterable[TensorSpec]
) -> dict[str, Shape]:
    """Return input -> the shape it was calibrated with, for inputs with open dimensions.

    Engines are timed on inputs of that shape if the user gives none. The shape stands in the
    manifest of the build that wrote an engine, next to the engine's file. If no engine has a
    manifest, the result is empty.

    Args:
        paths: files of the engines; the first with a manifest counts.
        inputs: specs of their inputs.
    """
    for path in paths:
        try:
            build = manifest.read_manifest(path.parent)
        except CacheError:  # no build wrote it
            continue
        if path.name not in build.files:
            continue
        fitting_shapes = {}
        for spec in inputs:
            shape = build.shapes.get(spec.name, ())  # () does not fit
            if _has_open_dimension(spec) and fits(shape, spec.shape):
                fitting_shapes[spec.name] = shape
        return fitting_shapes
    return {}


def _has_open_dimension(spec: TensorSpec) -> bool:
    """Whether a dimension other than the batch is open."""
    return not all(isinstance(dimension, int) for dimension in spec.shape[1:])


def _choose_shape(spec: TensorSpec, user_shape: Sequence[int] | None, batch: int | None) -> Shape:
    """Return the user's shape of an input, else the input's own, whose open batch becomes 1.

    Args:
        spec: the input.
        user_shape: the shape that the user gives; None for none.
        batch: replaces the first dimension, which must be 1; None leaves it as it is.

    Raises:
        ConfigError: the user's shape does not fit, or is missing for an open dimension.
    """
    # the input's own shape; if dimensions beside the batch are open, it is only an example of one
    shape = []
    for axis, dimension in enumerate(spec.shape):
        if not isinstance(dimension, int):
            dimension = 1 if axis == 0 else _EXAMPLE_SIZE
        shape.append(dimension)
    if user_shape is not None:
        if not fits(user_shape, spec.shape) or min(user_shape, default=1) < 1:
            raise ConfigError(
                f"input {spec.name!r} has shape {shape_text(spec)}, got --shape"
                f" {format_size(user_shape)}"
            )
        shape = [*user_shape]
    elif _has_open_dimension(spec):
        example = quote(f"{spec.name}:{format_size(shape)}")
        raise ConfigError(
            "every dimension of an input but the batch must be known, got"
            f" {shape_text(spec)} for {spec.name!r}; give it, e.g. --shape {example}"
        )
    if batch is None:
        return tuple(shape)
    # an input has a first dimension here: `refuse_fixed_batch` refused --batch for a scalar
    if shape[0] != 1:
        raise ConfigError(
            f"--batch gives the first dimension of every input, got --shape"
            f" {spec.name}:{format_size(shape)}; write 1 there, or leave --batch out"
        )
    return (batch, *shape[1:])


def _draw_values(spec: TensorSpec, shape: Shape, rng: np.random.Generator) -> Array:
    """Return random values: normal floats, 0 or 1 for integers and bools.

    Args:
        spec: the input, with its dtype.
        shape: shape of the array.
        rng: source of the values.

    Raises:
        ConfigError: an input of text, or of a type without numbers.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:  # numpy has no such type, such as a sequence
        dtype = np.dtype(object)
    if np.issubdtype(dtype, np.floating):
        return rng.standard_normal(shape, np.float32).astype(dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    raise ConfigError(f"input {spec.name!r} must be of numbers to be made up, got {spec.dtype}")
