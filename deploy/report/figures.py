"""Numbers as people read them; "-" where there is none, "failed" where a target failed."""

from __future__ import annotations

import math
from collections.abc import Iterable

NONE = "-"
FAILED = "failed"


def milliseconds(value: float | None) -> str:
    """Three significant digits at least: 0.123 ms, 12.3 ms, 1234 ms."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g} ms"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f} ms"


def size(value: int | None) -> str:
    """Bytes in binary units: 223 KiB."""
    if value is None:
        return NONE
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def decibels(value: float | None) -> str:
    """One decimal; "exact" for no noise at all, "NaN" where it could not be told."""
    if value is None:
        return NONE
    if value == math.inf:
        return "exact"
    return "NaN" if math.isnan(value) else f"{value:.1f} dB"


def cosine(value: float | None) -> str:
    """Five decimals, since good engines differ in the fourth."""
    if value is None:
        return NONE
    return "NaN" if math.isnan(value) else f"{value:.5f}"


def percent(value: float | None) -> str:
    """A share of 0 to 1 as percent, two decimals."""
    return NONE if value is None else f"{100 * value:.2f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.2f} points"


def rate(value: float | None) -> str:
    """Inferences a second."""
    return NONE if value is None else f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"


def real(value: float) -> str:
    """A value of a tensor, four significant digits."""
    return f"{value:.4g}"


def ratio(value: float) -> str:
    """A factor: 2.13x."""
    return f"{value:.2f}x"


def sized(smaller: float) -> tuple[str, str]:
    """2.00x, "smaller"; or where a file grew, by how much it is larger; nothing for the same."""
    if ratio(smaller) == ratio(1):
        return "", ""
    return (ratio(smaller), "smaller") if smaller > 1 else (ratio(1 / smaller), "larger")


def count(number: int, noun: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def encodable(text: str) -> str:
    """Text that UTF-8 can hold: a file name of other bytes reaches Python as lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def least(values: Iterable[float]) -> float:
    """The least of several, NaN where any is NaN (which `min` would lose by its order)."""
    found = tuple(values)
    return math.nan if any(map(math.isnan, found)) else min(found, default=math.nan)
