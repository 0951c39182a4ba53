"""Samples of batch 1 -> arrays of the batch that a model fixes; the last one is filled up.

::

    a b c | d e f | g + a b      of a batch of 3
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.reader import Reader
from deploy.feed.sampling import Chosen
from deploy.feed.source import Sample


def batches(
    reader: Reader, chosen: Chosen, batch: int, without: range = range(0)
) -> Iterator[Sample]:
    """Samples whose first dimension is `batch`; `without`: places of those that are left out."""
    only = _but(chosen, batch, without) if without else None
    if batch == 1:
        yield from (sample for _, sample in reader.walk(chosen, only=only))
        return
    group: list[Sample] = []
    for _, sample in reader.walk(chosen, only=only):
        group.append(sample)
        if len(group) == batch:
            yield _joined(group)
            group = []
    if group:
        good, missing = list(chosen.good()), batch - len(group)
        yield _joined(group + [reader.read(good[i % len(good)]) for i in range(missing)])


def filled(count: int, batch: int) -> str:
    """What the user should know of the last batch; empty where so many samples fill it."""
    if not (filler := -count % batch):
        return ""
    some = f"first {filler} samples" if filler > 1 else "first sample"
    if filler > count:
        some = f"{count} samples that there are" if count > 1 else "only sample"
    return (
        f"the model's batch is {batch}: the last one was filled with the {some} again"
        f"{' and again' if filler > count else ''}"
    )


def refuse_batches(batch: int) -> None:
    """Refuse shards of a model that fixes a batch.

    Raises:
        ConfigError: it does.
    """
    if batch > 1:
        raise ConfigError(
            "shards are of single samples, got a model with a fixed batch of"
            f" {batch}; export it with a batch that is open"
        )


def _but(chosen: Chosen, batch: int, without: range) -> frozenset[int]:
    """All but the images or rows of some samples."""
    left_out = list(chosen.good())[without.start * batch : without.stop * batch]
    return frozenset(chosen.indices).difference(left_out)


def _joined(group: list[Sample]) -> Sample:
    joined: Sample = {}
    for name, first in group[0].items():
        shapes = {s[name].shape for s in group}
        if len(shapes) > 1:
            raise FeedError(
                f"samples of one batch must have one shape, got {sorted(shapes)} for {name!r};"
                " export the model with an open batch, or give all one size"
            )
        joined[name] = first if not first.shape else np.concatenate([s[name] for s in group])
    return joined


__all__ = ["batches", "filled", "refuse_batches"]
