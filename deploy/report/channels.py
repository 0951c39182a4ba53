"""Stored weights as rows of a report: how far apart their channels lie, and what that costs.

With one scale a channel nothing is lost by channels that lie apart; with one scale for all, a
channel whose largest |w| is a hundredth of the weight's has one step of the grid to live on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.report.parts import WeightRow

if TYPE_CHECKING:
    from deploy.targets.stored import StoredWeight

STRIPS = 6  # weights of a target whose channels are drawn
_MOST = 96  # bars of a strip
_DEAD = 1e-6  # of the weight's largest |w|
_NAMED = 3  # channels of a weight that are named


def weight_rows(weights: Sequence[StoredWeight]) -> tuple[WeightRow, ...]:
    """One row a weight, in the model's order; the `STRIPS` worst with what is drawn of them."""
    rows = [_row(one) for one in weights]
    worst = sorted(range(len(rows)), key=lambda place: _worst(rows[place]))[:STRIPS]
    for place in worst:
        rows[place] = replace(rows[place], strip=_strip(weights[place].amax))
    return tuple(rows)


def worst_weights(rows: Iterable[WeightRow]) -> list[WeightRow]:
    """First those whose channel uses least of its grid, then whose channels lie furthest apart."""
    return sorted(rows, key=_worst)


def _worst(row: WeightRow) -> tuple[float, float]:
    return row.used, -row.ratio


def _row(weight: StoredWeight) -> WeightRow:
    amax, used = weight.amax, weight.used
    places = np.flatnonzero(amax > _DEAD * amax.max())
    live = amax[places] if places.size else np.zeros(1)
    least, largest = float(live.min()), float(live.max())
    order = places[np.lexsort((amax[places], used[places]))]
    return WeightRow(
        node=weight.node,
        op=weight.op,
        channels=amax.size,
        scales=weight.scales.size,
        least=least,
        median=float(np.median(live)),
        largest=largest,
        ratio=largest / least if least else 1.0,
        used=float(used[places].min()) if places.size else 0.0,
        dead=amax.size - places.size,
        worst=tuple(order[:_NAMED].tolist()) if largest > least else (),
    )


def _strip(amax: NDArray[np.float64]) -> tuple[float, ...]:
    """At most `_MOST` heights, of four digits: the least of each run of channels."""
    each = -(-amax.size // _MOST)
    runs = (amax[start : start + each].min() for start in range(0, amax.size, each))
    return tuple(float(f"{value:.4g}") for value in runs)
