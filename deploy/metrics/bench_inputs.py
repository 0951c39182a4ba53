"""Inputs for latency measurements: random tensors that fit the session's specs, or real images."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from shlex import quote

import numpy as np

from deploy.errors import CacheError, ConfigError
from deploy.files import manifest
from deploy.files.reading import format_bytes
from deploy.machine import memory_bytes
from deploy.tensors import Array, TensorSpec

Shapes = Mapping[str, Sequence[int]]

FEED_COUNT = 4  # number of different inputs, used in turn


def random_feeds(
    inputs: Sequence[TensorSpec],
    *,
    shapes: Shapes | None = None,
    batch: int | None = None,
    count: int = FEED_COUNT,
    seed: int = 0,
) -> list[dict[str, Array]]:
    """Return `count` seeded inputs: normal floats, 0 or 1 for integers and bools.

    An open first dimension becomes a batch of 1; other open dimensions need `shapes`.

    `shapes`: input name -> dimensions, for inputs with open dimensions. `batch`: first dimension of
    every input; None leaves it as it is.
    """
    shapes = shapes or {}
    unknown = sorted(set(shapes) - {spec.name for spec in inputs})
    if unknown:
        names = ", ".join(spec.name for spec in inputs)
        raise ConfigError(f"--shape must name an input of the model ({names}), got {unknown[0]!r}")
    sizes = {spec.name: _shape(spec, shapes.get(spec.name)) for spec in inputs}
    if batch is not None:
        refuse_fixed_batch(inputs)
        sizes = {name: _of_batch(name, dims, batch) for name, dims in sizes.items()}
    needed = count * 4 * sum(map(prod, sizes.values()))
    memory = memory_bytes()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"random inputs must fit into the memory, got {format_bytes(needed)} of them and a"
            f" machine of {format_bytes(memory)}; give a smaller --shape or --batch"
        )
    random = np.random.default_rng(seed)
    return [
        {spec.name: _values(spec, sizes[spec.name], random) for spec in inputs}
        for _ in range(count)
    ]


def stack_samples(samples: Sequence[Mapping[str, Array]], batch: int) -> list[dict[str, Array]]:
    """Return `FEED_COUNT` inputs of `batch` rows each, from samples of batch 1 used in turn.

    Raises:
        ConfigError: samples of different sizes.
    """
    feeds = []
    for start in range(0, FEED_COUNT * batch, batch):
        rows = [samples[index % len(samples)] for index in range(start, start + batch)]
        for name in rows[0]:
            if len({one[name].shape for one in rows}) > 1:
                raise ConfigError(
                    f"images of a batch must have one size, got several for {name!r}; give --size,"
                    " or leave --batch out"
                )
        feeds.append({name: np.concatenate([one[name] for one in rows]) for name in rows[0]})
    return feeds


def refuse_fixed_batch(inputs: Iterable[TensorSpec]) -> None:
    """Check that all inputs leave their first dimension open."""
    for spec in inputs:
        if not spec.shape or isinstance(spec.shape[0], int):
            raise ConfigError(
                "a model must leave the first dimension of its inputs open to be measured at"
                f" several batches, got {_words(spec)} for {spec.name!r}; export it with a dynamic"
                " batch, or leave --batch out"
            )


def read_calibration_shapes(
    paths: Iterable[Path], inputs: Iterable[TensorSpec]
) -> dict[str, tuple[int, ...]]:
    """Return calibration shapes of open inputs, read from the manifest next to one of `paths`."""
    for path in paths:
        try:
            stored = manifest.read_manifest(path.parent)
        except CacheError:
            continue
        if path.name in stored.files:
            known = stored.shapes
            return {s.name: known[s.name] for s in inputs if _open(s) and _fits(s, known)}
    return {}


def _open(spec: TensorSpec) -> bool:
    """Whether a dimension other than the batch is open."""
    return not all(isinstance(dim, int) for dim in spec.shape[1:])


def _fits(spec: TensorSpec, shapes: Shapes) -> bool:
    given = shapes.get(spec.name, ())
    return len(given) == len(spec.shape) and all(
        not isinstance(own, int) or own == dim for own, dim in zip(spec.shape, given, strict=True)
    )


def _of_batch(name: str, dims: tuple[int, ...], batch: int) -> tuple[int, ...]:
    if dims[0] != 1:
        raise ConfigError(
            f"--batch gives the first dimension of every input, got --shape"
            f" {name}:{'x'.join(map(str, dims))}; write 1 there, or leave --batch out"
        )
    return (batch, *dims[1:])


def _shape(spec: TensorSpec, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is not None:
        if not _fits(spec, {spec.name: given}) or any(dim < 1 for dim in given):
            got = "x".join(map(str, given))
            raise ConfigError(f"input {spec.name!r} has shape {_words(spec)}, got --shape {got}")
        return tuple(given)
    dims = tuple(
        1 if axis == 0 and not isinstance(d, int) else d for axis, d in enumerate(spec.shape)
    )
    if not all(isinstance(dim, int) for dim in dims):
        example = "x".join(
            "1" if i == 0 else "224" if not isinstance(d, int) else str(d)
            for i, d in enumerate(spec.shape)
        )
        raise ConfigError(
            f"every dimension of an input but the batch must be known, got {_words(spec)}"
            f" for {spec.name!r}; give it, e.g. --shape {quote(f'{spec.name}:{example}')}"
        )
    return tuple(int(dim) for dim in dims if isinstance(dim, int))


def _words(spec: TensorSpec) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in spec.shape)}]"


def _values(spec: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if np.issubdtype(dtype, np.floating):
        return random.standard_normal(shape, np.float32).astype(dtype)
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return random.integers(0, 2, shape).astype(dtype)
    raise ConfigError(f"input {spec.name!r} must be of numbers to be made up, got {spec.dtype}")
