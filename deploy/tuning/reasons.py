"""Why each node stays float, in a sentence for the report and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.tuning.prices import Prices
    from deploy.tuning.search import Trial
    from deploy.tuning.sensitivity import Sensitivity
    from deploy.tuning.units import Units

_SHARE = 0.02  # of all noise: less is not why a layer is float


def reasons(best: Trial, units: Units, prices: Prices, found: Sensitivity | None) -> dict[str, str]:
    """Node in float -> why, in the model's order."""
    said = {
        unit: _noise(unit, found)
        or _time(unit, prices)
        or "to and fro would cost more than it wins"
        for unit in units.members
        if unit in best.in_float
    }
    return {node: said[unit] for unit in said for node in units.members[unit]}


def _noise(unit: str, found: Sensitivity | None) -> str:
    """What the unit, or its group, loses alone."""
    if found is None:
        return ""
    total = sum(noise.worst for noise in found.groups.values())
    for group, noise in found.groups.items():
        if unit in group and noise.worst > _SHARE * total:
            whose = "it" if len(group) == 1 else f"its group of {len(group)} layers"
            left = round(noise.db, 1) + 0.0  # never -0.0
            return f"alone in int8 {whose} leaves {left:.1f} dB of {noise.part}"
    return ""


def _time(unit: str, prices: Prices) -> str:
    int8, float32 = prices.units[unit]
    if not prices.measured or int8 <= float32:
        return ""
    return f"slower in int8: {int8:.0f} us, {float32:.0f} us in float"
