"""Which outputs hold a class for each step, from their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deploy.metrics.whole import are_shares_or_logarithms
from deploy.tensors import Array

_STEPS = 4  # a sample, at least
_LONG = 8  # steps of probabilities, at least: fewer are labels
_FEW = 32  # numbers that no embedding makes do with
_SURE = 0.8  # mean share of the best class, of few raw scores
_RATHER = 0.6  # the same of several outputs whose mean hardly changes
_STEADY = 0.25  # what the mean of a step's raw scores varies by, of what its scores do
_HEADS = 0.5  # the same of several outputs, which all have to be such scores
_CLEAR = 0.9  # share of steps that are as scores are
_USUAL = 0.75  # of steps in one class: a dimension of a feature that is always large, maybe
_BETWEEN = 0.25  # share of probabilities between 0.1 and 0.9, at most
_UNDECIDED = 0.05  # share of probabilities between 0.3 and 0.7, at most, in several outputs
_ON = 0.25  # share of them above 0.5, at most
_APART = 5.0  # distance of the two sides of raw scores, in their own deviations
_RAW = 40.0  # beyond it raw scores are another unit

Floats = NDArray[np.float64]


def layout_of(samples: Sequence[Array], *, raw: bool) -> int | None:
    """The one axis of classes, 1 or 2; None where neither or both may be.

    Args:
        samples: of one output, with a batch of 1.
        raw: raw scores may be classes too.
    """
    for fits in (_all_shares, _all_raw) if raw else (_all_shares,):
        axes = [axis for axis in (1, 2) if _fits(samples, axis, fits)]
        if axes:
            return axes[0] if len(axes) == 1 else None
    return None


def are_heads(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, C] scores of classes of the same steps.

    As of marks that a letter may bear, one kind an output. Shares or raw: since each of them has to
    be sure of its best class, the mean of raw scores may vary more than that of one output alone.
    """
    if len(outputs) < 2 or any(one.ndim != 3 or len(one) != 1 for own in outputs for one in own):
        return False
    if any(len({one.shape[1] for one in same}) != 1 for same in zip(*outputs, strict=True)):
        return False
    return all(_fits(own, 2, _all_shares) or _fits(own, 2, _all_sure) for own in outputs)


def laid_out(value: Array, axis: int) -> Array | None:
    """[1, T, C], [T, 1, C] or [1, C, T] -> [T, C]; None for other shapes."""
    if value.ndim != 3 or not value.size or 1 not in value.shape[: 2 if axis == 2 else 1]:
        return None
    return value[0].T if axis == 1 else value.reshape(-1, value.shape[2])


def are_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is a probability of its own: near 0 or 1, and not always of one side."""
    if any(one.size < _LONG or one.size != np.prod(one.shape[-2:]) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    high, between = float(np.mean(values >= 0.9)), float(np.mean((values > 0.1) & (values < 0.9)))
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    return bool(within and between < min(_BETWEEN, high) and values.min() < 0.5)


def are_switches(samples: Sequence[Array]) -> bool:
    """Whether the one value of a sample is a probability: near 0 or 1, and each in some sample."""
    if any(one.size != 1 or one.ndim < 2 for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    high, low = values > 0.9, values < 0.1
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    return bool(within and (high | low).all() and high.any() and low.any())


def are_decisions(outputs: Sequence[Sequence[Array]]) -> bool:
    """Whether several outputs are [1, T, K] probabilities of as many steps, few of them above 0.5.

    As of notes and their beginnings: where nothing sounds, these may be well above 0.
    """
    if len(outputs) < 2 or any(one.ndim != 3 or len(one) != 1 for own in outputs for one in own):
        return False
    for sample in zip(*outputs, strict=True):
        if len({one.shape[1] for one in sample}) != 1 or sample[0].shape[1] < _LONG:
            return False
    return all(map(_decide, outputs))


def _decide(samples: Sequence[Array]) -> bool:
    values = np.concatenate([one.reshape(-1) for one in samples])
    within = values.min() >= -1e-6 and values.max() <= 1 + 1e-6
    undecided = np.mean((values > 0.3) & (values < 0.7))
    return bool(within and undecided < _UNDECIDED and 0 < np.mean(values > 0.5) < _ON)


def are_raw_tracks(samples: Sequence[Array]) -> bool:
    """Whether each value is the raw score of a step: some on each side of 0, and far from it."""
    if any(one.size < _LONG or one.size != max(one.shape) for one in samples):
        return False
    values = np.concatenate([one.reshape(-1) for one in samples]).astype(np.float64)
    on, off = values[values > 0], values[values <= 0]
    if values.min() >= 0:  # a Sigmoid's, which is 0 to the runtime where it is next to it
        return False
    if min(on.size, off.size) < 2 * len(samples) or np.abs(values).max() > _RAW:
        return False
    inner = math.sqrt((on.size * on.var() + off.size * off.var()) / values.size)
    return bool(on.mean() - off.mean() > _APART * inner)


def _fits(samples: Sequence[Array], axis: int, fits: Callable[[Sequence[Floats]], bool]) -> bool:
    laid = [laid_out(one, axis) for one in samples]
    known = [one.astype(np.float64) for one in laid if one is not None]
    if len(known) != len(laid) or len({one.shape[1] for one in known}) != 1:
        return False
    if any(len(one) < _STEPS or one.shape[1] < 2 for one in known):
        return False
    return fits(known)


def _all_shares(samples: Sequence[Floats]) -> bool:
    return all(map(are_shares_or_logarithms, samples))


def _all_raw(samples: Sequence[Floats]) -> bool:
    """Whether they are raw scores of classes, not the features or the values of a regression."""
    steps = np.concatenate(samples)
    counts = np.bincount(steps.argmax(axis=1))
    if np.count_nonzero(counts) < 2 or not _about_zero(steps):
        return False
    if steps.shape[1] < _FEW:
        return best_share(steps) > _SURE
    clear = float(np.mean(_stand_out(steps)))
    return bool(clear > _CLEAR and counts.max() < _USUAL * counts.sum())


def _all_sure(samples: Sequence[Floats]) -> bool:
    """Whether they are raw scores as a Softmax takes them.

    Their mean hardly changes, or steps are sure of their class and it changes little.
    """
    steps = np.concatenate(samples)
    several = np.count_nonzero(np.bincount(steps.argmax(axis=1))) > 1
    sure = best_share(steps)
    steady = (sure > _SURE and _about_zero(steps, _HEADS)) or (
        sure > _RATHER and _about_zero(steps)
    )
    return bool(several and steady)


def best_share(steps: Floats) -> float:
    """Mean share of the best class of each row of raw scores, behind a Softmax."""
    power = np.exp(steps - steps.max(axis=1, keepdims=True))
    return float(np.mean(1 / power.sum(axis=1)))


def _about_zero(steps: Floats, steady: float = _STEADY) -> bool:
    """Whether steps differ in their scores, not in their mean: training moves one up, others down.

    The values of a spectrum all rise with its loudness, and coordinates with the place.
    """
    signs = (steps.min(axis=1) < 0) & (steps.max(axis=1) > 0)
    spread = float(np.mean(steps.std(axis=1)))
    return bool(signs.mean() > _CLEAR and steps.mean(axis=1).std() < steady * spread)


def _stand_out(steps: Floats) -> NDArray[np.bool_]:
    """Where the best is further off than the best of so many normal numbers, and the worst."""
    mean = steps.mean(axis=1)
    high, low = steps.max(axis=1) - mean, mean - steps.min(axis=1)
    usual = math.sqrt(2 * math.log(steps.shape[1])) * steps.std(axis=1)
    return np.asarray((high > 1.15 * usual) & (high > 1.2 * low))
