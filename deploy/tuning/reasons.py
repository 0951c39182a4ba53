"""Why each node stays float, in a sentence for the report and the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.tuning.prices import Prices
    from deploy.tuning.search_options import Trial
    from deploy.tuning.sensitivity import Sensitivity
    from deploy.tuning.units import Units

_SHARE = 0.02  # of all noise: less is not why a layer is float
_NOTHING_DB = 60.0  # nor is what leaves more, whatever its share

# why a node is float
NOISE, TIME, CONSEQUENCE, WHOLE, RULE = "noise", "time", "consequence", "whole", "rule"
_NOISY, _SLOWER = "alone in ", "slower in int8"
NO_SUMS: Mapping[str, str] = MappingProxyType({})
BETWEEN = "to and fro would cost more than it wins"
NOT_FASTER = "int8 as a whole is not faster, or not by enough"
NOT_USABLE = "no split of the model in int8 is usable"
_DECIBEL = re.compile(r"leaves (-?(?:[0-9.]+|inf)) dB of")


def reasons(
    best: Trial,
    units: Units,
    prices: Prices,
    found: Sensitivity | None,
    word: str,
    refused: Collection[str] = (),
    *,
    sums: Mapping[str, str] = NO_SUMS,
    otherwise: str = BETWEEN,
) -> dict[str, str]:
    """Node in float -> why, in the model's order.

    Args:
        best: what was chosen.
        units: of the model.
        prices: of them.
        found: what groups lose alone.
        word: what a node would run in else.
        refused: units that cannot.
        sums: Adds that stay float for what they lose in all -> that in words.
        otherwise: what is said of units that are in float for the sake of others.
    """
    said = {
        unit: f"it cannot be run in {word}"
        if unit in refused
        else sums.get(unit) or _noise(unit, found, word) or _time(unit, prices) or otherwise
        for unit in units.members
        if unit in best.in_float
    }
    return {node: said[unit] for unit in said for node in units.members[unit]}


def kind(reason: str) -> str:
    """NOISE, TIME, CONSEQUENCE or WHOLE where the search said it; RULE for all other reasons."""
    if reason.startswith(_NOISY):
        return NOISE
    if reason.startswith(_SLOWER):
        return TIME
    if reason in (NOT_FASTER, NOT_USABLE):
        return WHOLE
    return CONSEQUENCE if reason == BETWEEN else RULE


def remaining(reason: str) -> float:
    """SQNR in dB that a reason by noise tells of; inf where it tells none."""
    said = _DECIBEL.search(reason)
    try:
        return float(said[1]) if said else math.inf
    except ValueError:  # a hand has edited the plan
        return math.inf


def _noise(unit: str, found: Sensitivity | None, word: str) -> str:
    """What the unit, or its group, loses alone."""
    if found is None:
        return ""
    total = sum(noise.worst for noise in found.groups.values())
    for group, noise in found.groups.items():
        if unit in group and noise.worst > _SHARE * total and noise.db < _NOTHING_DB:
            whose = "it" if len(group) == 1 else f"its group of {len(group)} layers"
            left = round(noise.db, 1) + 0.0  # never -0.0
            return f"{_NOISY}{word} {whose} leaves {left:.1f} dB of {noise.part}"
    return ""


def _time(unit: str, prices: Prices) -> str:
    int8, float32 = prices.units[unit]
    if not prices.measured or int8 <= float32:
        return ""
    return f"{_SLOWER}: {int8:.0f} us, {float32:.0f} us in float"
