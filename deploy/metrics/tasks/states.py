"""Outputs that the next call is fed: states of a recurrent network, caches of a stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from deploy.metrics.tasks.task import Seen
from deploy.tensors import Array

_PICTURE = 4  # dimensions
_CHANNELS = (1, 3, 4)


def carried(seen: Seen) -> dict[str, str]:
    """Such outputs -> the inputs that take them; none where nothing else is fed or said."""
    found: dict[str, str] = {}
    for name in seen.names:
        source = next(_sources(name, seen, set(found.values())), None)
        if source is not None:
            found[name] = source
    inputs = {name for fed in seen.inputs for name in fed}
    alone = len(found) == len(seen.every) or len(found) == len(inputs)
    return {} if alone else found


def without(seen: Seen, states: Collection[str]) -> Seen:
    """The same without these outputs."""
    rows = [{name: one[name] for name in one if name not in states} for one in seen.outputs]
    return Seen(seen.inputs, rows)


def _sources(name: str, seen: Seen, taken: set[str]) -> Iterator[str]:
    """Inputs of the same form in every sample: several values each, and no picture."""
    for source in seen.inputs[0] if seen.inputs else ():
        pairs = zip(seen.arrays(name), seen.inputs, strict=False)
        if source not in taken and all(_takes(fed.get(source), value) for value, fed in pairs):
            yield source


def _takes(fed: Array | None, value: Array) -> bool:
    if fed is None or fed.shape != value.shape or fed.dtype != value.dtype:
        return False
    picture = value.ndim == _PICTURE and {value.shape[1], value.shape[3]} & set(_CHANNELS)
    return bool(np.issubdtype(value.dtype, np.floating) and value.size > 1 and not picture)
