"""When samples are looked at while they are observed: after 8, 16, 32 ... of them."""

from __future__ import annotations

FIRST = 8  # samples of the first point


def following(drawn: int) -> int:
    """The point after so many samples: 8, and then twice as many each."""
    return 2 * drawn if drawn else FIRST
