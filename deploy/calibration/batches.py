"""Samples one by one -> the whole batches of one shape that TensorRT's calibrators take.

TensorRT calibrates with the profile's OPT shape alone, so a smaller last batch cannot be fed. One
rule everywhere, on the GPU, on the CPU and in C++: what does not fill a batch is left out, and how
much that is is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from deploy.errors import ConfigError
from deploy.tensors import Array


def whole_batches(
    samples: Iterable[Mapping[str, Array]], samples_a_batch: int
) -> Iterator[dict[str, Array]]:
    """Join every `samples_a_batch` samples along their first axis; leave out the rest."""
    group: list[Mapping[str, Array]] = []
    for sample in samples:
        group.append(sample)
        if len(group) == samples_a_batch:
            yield {name: _joined([s[name] for s in group]) for name in group[0]}
            group = []


def _joined(arrays: list[Array]) -> Array:
    """A scalar has no axis, and is the batch's as it is.

    Raises:
        ConfigError: arrays of several shapes.
    """
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ConfigError(
            f"TensorRT calibrates on batches of one shape, got samples of {shapes[0]} and"
            f" {shapes[1]}; give all images one size, or a batch of 1"
        )
    return arrays[0] if len(arrays) == 1 or arrays[0].ndim == 0 else np.concatenate(arrays)


def whole(samples: int, samples_a_batch: int, *, filled: int = 0) -> int:
    """How many of the samples stand in whole batches.

    Args:
        samples: of the feed.
        samples_a_batch: that make a batch.
        filled: of the samples, those at the end that a model's fixed batch filled up.

    Raises:
        ConfigError: none.
    """
    there = samples - filled
    if there < samples_a_batch:
        raise ConfigError(
            f"TensorRT calibrates in whole batches, got {there} samples for batches of"
            f" {samples_a_batch}; give more images or a smaller batch"
        )
    return there - there % samples_a_batch


def left_out(samples: int, samples_a_batch: int, *, filled: int = 0) -> tuple[str, ...]:
    """The sentence that says how many samples are left out, where some are."""
    seen = whole(samples, samples_a_batch, filled=filled)
    if seen == samples:
        return ()
    return (
        f"TensorRT calibrates in whole batches, of {samples_a_batch} samples here: the last"
        f" {samples - seen} of {samples} samples fill none and were left out",
    )
