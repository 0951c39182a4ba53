"""Which layers bring the noise: each group alone in int8, the noisy ones halved again and again.

::

    1..64   8 groups:  0.1  0.02  0.3  0.01 ...        the worst group is halved first
    17..24             |--- 0.28 | 0.02 ---|
    17..20             | 0.001 | 0.28 |                 until it is one layer, or next to quiet

What a group loses alone adds up with the others', so the sum tells what a choice would lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.tuning.probe import Noise

_QUIET = 0.03  # of the worst part, about 30 dB: a group that loses less is not halved

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Groups of layers and what each loses alone in int8.

    Attributes:
        groups: group of units -> its noise; together all layers, in the model's order.
    """

    groups: dict[Group, Noise]

    @property
    def shares(self) -> dict[str, float]:
        """Unit -> what it loses of the worst part, on top of all others."""
        whole = self.without(frozenset())
        return {
            unit: noise.weighed(whole) / len(group)
            for group, noise in self.groups.items()
            for unit in group
        }

    def without(self, units: frozenset[str]) -> Noise:
        """What is to be expected with these units in float."""
        total = Noise({})
        for group, noise in self.groups.items():
            left = sum(unit not in units for unit in group) / len(group)
            total = total.plus(noise.times(left))
        return total


def sensitivity(
    layers: Sequence[str],
    alone: Callable[[Sequence[Group]], list[Noise]],
    *,
    groups: int,
    most: int,
) -> Sensitivity:
    """Find the noisy layers.

    Args:
        layers: units that hold weights, in the model's order.
        alone: groups -> what each loses with nothing else in int8.
        groups: how many to begin with.
        most: groups to try in all, at most.
    """
    size = max(1, -(-len(layers) // groups))
    first = [tuple(layers[at : at + size]) for at in range(0, len(layers), size)]
    known = dict(zip(first, alone(first), strict=True))
    tried = len(first)
    while tried + 2 <= most and (group := _to_halve(known)) is not None:
        middle = (len(group) + 1) // 2
        halves = [group[:middle], group[middle:]]
        del known[group]
        known |= dict(zip(halves, alone(halves), strict=True))
        tried += 2
    place = {layer: number for number, layer in enumerate(layers)}
    return Sensitivity(dict(sorted(known.items(), key=lambda entry: place[entry[0][0]])))


def _to_halve(known: dict[Group, Noise]) -> Group | None:
    """The noisiest group of several layers, unless it matters little."""
    several = [group for group in known if len(group) > 1]
    worst = max(several, key=lambda group: known[group].worst, default=None)
    return worst if worst is not None and known[worst].worst > _QUIET else None
