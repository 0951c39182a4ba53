"""Which layers bring the noise: each group alone in int8, the noisy ones halved again and again.

::

    1..64   8 groups:  0.1  0.02  0.3  0.01 ...        the worst group is halved first
    17..24             |--- 0.28 | 0.02 ---|
    17..20             | 0.001 | 0.28 |                 until it is one layer, or next to quiet

What a group loses alone adds up with the others', so the sum tells what a choice would lose. They
lose it on the samples that say most, and not each for itself; so the sum is scaled to what one
choice was seen to lose whole. A group that cannot be run alone tells nothing and is left out; whole
splits show what it loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from deploy.tuning.probe import Noise

_QUIET = 0.03  # of the worst part, about 30 dB: a group that loses less is not halved

_MUCH = 0.3  # of the worst part, about 10 dB
_FARTHEST = 16.0  # times the power that is seen may be another than the sum

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Groups of layers and what each loses alone in int8.

    Attributes:
        groups: group of units -> its noise, in the model's order; together all layers but those
            that could not be run alone.
        scale: of the power that they sum up to.
    """

    groups: dict[Group, Noise]
    scale: float = 1.0

    @property
    def shares(self) -> dict[str, float]:
        """Unit -> what it loses of the worst part, on top of all others."""
        whole = self.without(frozenset())
        return {
            unit: noise.times(self.scale).weighed(whole) / len(group)
            for group, noise in self.groups.items()
            for unit in group
        }

    def without(self, units: frozenset[str]) -> Noise:
        """What is to be expected with these units in float."""
        total = Noise({})
        for group, noise in self.groups.items():
            left = sum(unit not in units for unit in group) / len(group)
            total = total.plus(noise.times(left * self.scale))
        return total

    def scaled(self, units: frozenset[str], seen: Noise) -> Sensitivity:
        """The same, so that with these units in float it expects what was seen to be lost.

        Where much is lost, noises do not add up, and what is seen tells nothing of splits that lose
        little: the sum stands.
        """
        expected, lost = self.without(units).worst, seen.worst
        if not (0 < expected < _MUCH and 0 < lost < _MUCH):
            return self
        power = (math.log1p(-lost) / math.log1p(-expected)) ** 2
        return replace(self, scale=self.scale * min(max(power, 1 / _FARTHEST), _FARTHEST))


def sensitivity(
    layers: Sequence[str],
    alone: Callable[[Sequence[Group]], list[Noise | None]],
    *,
    groups: int,
    most: int,
) -> Sensitivity:
    """Find the noisy layers.

    Args:
        layers: units that hold weights, in the model's order.
        alone: groups -> what each loses with nothing else in int8; None where it cannot be run.
        groups: how many to begin with.
        most: groups to try in all, at most.
    """
    first = groups_of(layers, groups)
    known = _that_ran(first, alone(first))
    tried, kept = len(first), set[Group]()
    while tried + 2 <= most and (group := _to_halve(known, kept)) is not None:
        both = halves(group)
        found = _that_ran(both, alone(both))
        tried += 2
        if len(found) < len(both):
            kept.add(group)  # more is known of it as a whole
        else:
            del known[group]
            known |= found
    place = {layer: number for number, layer in enumerate(layers)}
    return Sensitivity(dict(sorted(known.items(), key=lambda entry: place[entry[0][0]])))


def groups_of(layers: Sequence[str], most: int) -> list[Group]:
    """Layers in at most so many groups of neighbours, as large as each other."""
    size = max(1, -(-len(layers) // most))
    return [tuple(layers[at : at + size]) for at in range(0, len(layers), size)]


def halves(group: Group) -> list[Group]:
    """The two halves of a group; none of a single layer."""
    middle = (len(group) + 1) // 2
    return [group[:middle], group[middle:]] if len(group) > 1 else []


def _that_ran(groups: Sequence[Group], noises: Sequence[Noise | None]) -> dict[Group, Noise]:
    return {g: noise for g, noise in zip(groups, noises, strict=True) if noise is not None}


def _to_halve(known: dict[Group, Noise], kept: Collection[Group]) -> Group | None:
    """The noisiest group of several layers, unless it matters little; none of those kept whole."""
    several = [group for group in known if len(group) > 1 and group not in kept]
    worst = max(several, key=lambda group: known[group].worst, default=None)
    return worst if worst is not None and known[worst].worst > _QUIET else None
