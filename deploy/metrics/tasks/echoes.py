"""Outputs that say again what another one says: scores and their Softmax, a class and its scores.

Classifiers often give both, as those of scikit-learn do (the class, and what each class has) and
many of text and sound (raw scores, and their Softmax). Each form of a task knows one of them, and
the other is no reason against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.tasks.task import Seen
from deploy.tensors import Array

_CLOSE = 1e-4  # two ways to the same share, in float16 or float32

Floats = NDArray[np.float64]


def unrolled(seen: Seen) -> frozenset[str]:
    """Outputs of raw scores whose Softmax, its logarithm or Sigmoid another output is.

    What is left of each pair is what training made sure of: shares, or their logarithms.
    """
    names = [name for name in seen.names if all(map(_is_floating, seen.arrays(name)))]
    found: set[str] = set()
    for raw in names:
        others = (name for name in names if name != raw and name not in found)
        if any(_goes_over(seen.arrays(raw), seen.arrays(name)) for name in others):
            found.add(raw)
    return frozenset(found)


def best_of(seen: Seen) -> dict[str, str]:
    """Outputs that are the place of the best of another's scores -> that other output."""
    found: dict[str, str] = {}
    for name in seen.names:
        places = seen.arrays(name)
        if all(np.issubdtype(one.dtype, np.integer) for one in places):
            scores = (
                other
                for other in seen.names
                if all(map(_is_floating, seen.arrays(other)))
                and _are_places(places, seen.arrays(other))
            )
            source = next(scores, None)
            if source is not None:
                found[name] = source
    return found


def _is_floating(value: Array) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating) and value.size)


def _goes_over(raw: Sequence[Array], others: Sequence[Array]) -> bool:
    """Whether the others are the same function of raw scores, in every sample."""
    pairs = list(zip(raw, others, strict=True))
    if any(one.shape != other.shape or one.size < 2 for one, other in pairs):
        return False
    if not all(np.isfinite(one).all() for pair in pairs for one in pair):
        return False
    axes = (axis for axis, size in enumerate(raw[0].shape) if size > 1)
    ways: list[str | int] = ["sigmoid", *axes]
    return any(all(_fits(one, other, way) for one, other in pairs) for way in ways)


def _fits(raw: Array, other: Array, way: str | int) -> bool:
    values, wanted = raw.astype(np.float64), other.astype(np.float64)
    if np.ptp(wanted) == 0:  # what never changes is like anything else that does not
        return False
    if way == "sigmoid":
        made = 1 / (1 + np.exp(-np.clip(values, -700, 700)))
        return _near(made, wanted)
    logarithms = _log_softmax(values, int(way))
    return _near(np.exp(logarithms), wanted) or _near(logarithms, wanted)


def _log_softmax(values: Floats, axis: int) -> Floats:
    moved = values - values.max(axis=axis, keepdims=True)
    return np.asarray(moved - np.log(np.exp(moved).sum(axis=axis, keepdims=True)))


def _near(made: Floats, wanted: Floats) -> bool:
    """Alike but for rounding."""
    return bool((np.abs(made - wanted) <= _CLOSE * np.maximum(1, np.abs(wanted))).all())


def _are_places(places: Sequence[Array], scores: Sequence[Array]) -> bool:
    """Whether each is the ArgMax along one axis, with or without that axis."""
    pairs = list(zip(places, scores, strict=True))
    axes = range(min(one.ndim for one in scores))
    return any(all(_best_along(one, other, axis) for one, other in pairs) for axis in axes)


def _best_along(places: Array, scores: Array, axis: int) -> bool:
    if scores.shape[axis] < 2 or places.size * scores.shape[axis] != scores.size:
        return False
    best = scores.argmax(axis=axis)
    shapes = best.shape, (*best.shape[:axis], 1, *best.shape[axis:])
    return places.shape in shapes and bool(np.array_equal(places.reshape(-1), best.reshape(-1)))
