"""Samples in an order in which the first 8, 16, 32 ... are each spread evenly over all.

::

    --limit 2     0               8               of 16
    --limit 4     0       4       8       12      what 2 took, and the middles
    order         0 8 | 4 12 | 2 6 10 14 | 1 3 5 7 9 11 13 15      from 2 on, here

The first n = 8, 16, 32 ... are those that `--limit n` takes, so one who stops there has them.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST = 8  # samples of the first point


def following(drawn: int) -> int:
    """The point after so many samples: 8, and then twice as many each."""
    return 2 * drawn if drawn else FIRST


def scattered(items: Sequence[int]) -> list[int]:
    """All items in that order."""
    count, many = len(items), FIRST
    order: dict[int, None] = {}
    while many < count:
        order |= dict.fromkeys(place * count // many for place in range(many))
        many *= 2
    return [items[place] for place in (order | dict.fromkeys(range(count)))]
