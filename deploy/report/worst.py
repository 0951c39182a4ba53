"""Rows by what they lose: the worst first, and last those that nothing is known of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Judged(Protocol):
    """Anything of which a signal's distance to its noise may be known."""

    @property
    def sqnr_db(self) -> float | None:
        """In dB; NaN where it could not be told, None where it was not measured."""
        ...


Row = TypeVar("Row", bound=Judged)


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """By SQNR, NaN before all; those alike stay in the model's order."""
    return sorted(rows, key=lambda row: _rank(row.sqnr_db))


def first(rows: Sequence[Row], most: int) -> list[Row]:
    """The worst of them, without those that lose nothing."""
    return [row for row in worst_first(rows)[:most] if row.sqnr_db not in (None, math.inf)]


def _rank(decibels: float | None) -> tuple[bool, float]:
    if decibels is None:
        return True, 0.0
    return False, -math.inf if math.isnan(decibels) else decibels
