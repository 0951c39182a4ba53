"""Samples one by one -> the whole batches of one shape that TensorRT's calibrators take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from deploy.tensors import Array


def whole_batches(
    samples: Iterable[Mapping[str, Array]], samples_a_batch: int
) -> Iterator[dict[str, Array]]:
    """Join every `samples_a_batch` samples along their first axis; an incomplete rest is left out.

    TensorRT calibrates with the profile's OPT shape alone, so a smaller last batch cannot be fed.
    """
    group: list[Mapping[str, Array]] = []
    for sample in samples:
        group.append(sample)
        if len(group) == samples_a_batch:
            yield {name: np.concatenate([s[name] for s in group]) for name in group[0]}
            group = []
