"""Which samples are taken where not all are: from all over the feed, in step with nothing in it.

::

    feed     |----------|----------|----------|----------|
    2                 x                  x                   one a half, anywhere in it
    4                 x      x           x           x       one a quarter, the same two among them

Every second sample of a feed whose classes take turns, of left and right pictures, of pictures and
their mirror images, would be of one kind. So the place within each stretch is drawn, by a fixed
rule. The first n are spread over all of it for every n, and hold the first m of fewer: who stops
at 32 has seen what `--limit 32` takes.

Source: B. Burley, "Practical Hash-based Owen Scrambling", Journal of Computer Graphics Techniques
9-4 (2020), of van der Corput's sequence; its hash with N. Vegdahl's constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_SEED = 0x9E3779B9
_BITS = 32


@lru_cache(maxsize=8)
def order(count: int) -> NDArray[np.int64]:
    """All places below `count`, in the order in which they are taken; not to be written to."""
    steps = np.arange(1 << (2 * count).bit_length(), dtype=np.uint64)  # every place is met
    places = (_reversed(_scrambled(steps)) * np.uint64(count)) >> np.uint64(_BITS)
    _, first = np.unique(places, return_index=True)
    return np.asarray(places[np.sort(first)][:count], np.int64)


def strewn(items: Sequence[int]) -> list[int]:
    """All items in that order."""
    return [items[place] for place in order(len(items))]


def some(items: Sequence[int], most: int) -> list[int]:
    """At most so many of them, from all over, in their own order."""
    return [items[place] for place in np.sort(order(len(items))[:most])]


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit turned or not by what is below it: 32 bits, so that two of one half stay in one."""
    x = _low(x ^ (x * np.uint64(0x3D20ADEA)))
    x = _low(x + np.uint64(_SEED))
    x = _low(x * np.uint64((_SEED >> 16) | 1))
    x = _low(x ^ (x * np.uint64(0x05526C56)))
    return _low(x ^ (x * np.uint64(0x53A22864)))


def _low(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return x & np.uint64((1 << _BITS) - 1)


def _reversed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first of 32 bits as the last."""
    out = np.zeros_like(x)
    for bit in range(_BITS):
        out |= ((x >> np.uint64(bit)) & np.uint64(1)) << np.uint64(_BITS - 1 - bit)
    return out
