"""Which layers lose most in int8, found by halving groups of layers.

Each group runs alone in int8, with all else in float, and the noisy ones are split::

    1..64   8 groups:  0.1  0.02  0.3  0.01 ...        the worst group is halved first
    17..24             |--- 0.28 | 0.02 ---|
    17..20             | 0.001 | 0.28 |                 until it is one layer, or quiet

Noise of groups adds up, so the sum predicts the loss of a split. Groups are measured on few samples
and interact, so the sum is scaled to the loss of one split that was measured. A group that cannot
run alone is left out; its loss shows in the trials of splits.

The noisy layers are much the same for all targets and range methods. So for another target or
method only the noisiest groups are measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

from deploy.tuning.probe import Noise

QUIET_LOSS = 0.03  # about 30 dB: a model that loses less needs no layer in float
_QUIET_GROUP_LOSS = QUIET_LOSS / 2  # a group that loses less is not halved: four add up to 0.03
_SATURATED_LOSS = 0.3  # about 10 dB: from here on noise no longer adds up
_MAX_SCALE = 16.0  # limit of the factor between measured and summed power
# measured over summed power: above it, layers are noisy that were quiet for another target
_MAX_UNEXPLAINED_RATIO = 2.0

Group = tuple[str, ...]
NoiseMeter = Callable[[Sequence[Group]], list[Noise | None]]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Noise of groups of layers, each alone in int8.

    Attributes:
        groups: group of layers -> its noise.
        scale: factor from the summed noise power to the measured one.
    """

    groups: Mapping[Group, Noise]
    scale: float = 1.0

    def loss_by_layer(self) -> dict[str, float]:
        """Return layer -> loss of the worst output slice that it adds to that of all others."""
        total = self.predict()
        losses = {}
        for group, noise in self.groups.items():
            loss = noise.scaled(self.scale).marginal_loss(total) / len(group)
            losses.update(dict.fromkeys(group, loss))
        return losses

    def predict(self, in_float: Collection[str] = ()) -> Noise:
        """Return the expected noise with these layers in float and all others in int8."""
        total = Noise({})
        for group, noise in self.groups.items():
            int8_share = sum(layer not in in_float for layer in group) / len(group)
            total = total.combined_with(noise.scaled(int8_share * self.scale))
        return total

    def scaled_to(self, in_float: Collection[str], measured: Noise) -> Sensitivity:
        """Return a copy that predicts the measured loss of a split with these layers in float.

        Where the loss is large, noise does not add up, so the scale stays as it is.
        """
        predicted_noise = self.predict(in_float)
        if not (
            0 < predicted_noise.worst < _SATURATED_LOSS and 0 < measured.worst < _SATURATED_LOSS
        ):
            return self
        factor = min(max(_power_ratio(measured, predicted_noise), 1 / _MAX_SCALE), _MAX_SCALE)
        return replace(self, scale=self.scale * factor)


def measure_sensitivity(
    groups: Sequence[Group], measure: NoiseMeter, *, max_trials: int
) -> Sensitivity:
    """Return the noise of groups of layers, the noisiest ones divided down to single layers.

    Noise is the error of the model's outputs if a group alone is in int8. The noisiest group is
    halved and its halves are measured, again and again, as long as trials are left.

    Args:
        groups: to begin with, in the model's order.
        measure: groups -> noise of each with all else in float; None where it cannot run.
        max_trials: groups to measure at most.
    """
    noise_by_group = _measure_runnable(groups, measure)
    _halve_noisiest(noise_by_group, measure, max_trials - len(groups))
    return Sensitivity(noise_by_group)


def _halve_noisiest(
    noise_by_group: dict[Group, Noise], measure: NoiseMeter, max_trials: int
) -> None:
    """Replace the noisiest group by its halves, again and again, as long as trials are left.

    It ends sooner if all groups that can be halved are quiet.
    """
    for _ in range(max_trials // 2):
        noisy_groups = []
        for group, noise in noise_by_group.items():
            if len(group) > 1 and noise.worst > _QUIET_GROUP_LOSS:
                noisy_groups.append(group)
        if not noisy_groups:
            break
        noisiest = max(noisy_groups, key=lambda group: noise_by_group[group].worst)
        middle = (len(noisiest) + 1) // 2
        halves = [noisiest[:middle], noisiest[middle:]]
        del noise_by_group[noisiest]
        noise_by_group |= _measure_runnable(halves, measure)


def adapt_sensitivity(
    prior: Sensitivity,
    layers: Sequence[str],
    measure: NoiseMeter,
    *,
    first_count: int,
    max_trials: int,
    int8_noise: Noise,
) -> Sensitivity:
    """Return the noise of groups of layers for another target or range method than before.

    The groups that were noisiest before are measured, and layers that were in no group before. The
    noise of each other group is expected to be that of before, times the median change of the
    measured ones. Then the noisiest are halved.

    If the expected noise of all groups adds up to less than half of `int8_noise`, layers are noisy
    now that were quiet before, so the other groups are measured too.

    Args:
        prior: of another target or method, on the same samples.
        layers: of this target, in the model's order.
        measure: groups -> noise of each with all else in float; None where it cannot run.
        first_count: number of groups of `prior` to measure.
        max_trials: groups to measure at most, unless the other groups are measured too.
        int8_noise: noise with all layers in int8.
    """
    new_groups, prior_noise_by_group = _regroup(prior, layers)
    noisiest_first = sorted(
        prior_noise_by_group, key=lambda group: -prior_noise_by_group[group].worst
    )
    first_groups = [*new_groups, *noisiest_first[:first_count]]
    other_groups = noisiest_first[first_count:]
    noise_by_group = _measure_runnable(first_groups, measure)

    # of groups that were measured before and now: noise now over noise before
    power_ratios = []
    for group in noise_by_group.keys() & prior_noise_by_group.keys():
        power_ratios.append(_power_ratio(noise_by_group[group], prior_noise_by_group[group]))
    median_ratio = median(power_ratios) if power_ratios else 1.0
    other_noises = {
        group: prior_noise_by_group[group].scaled(median_ratio) for group in other_groups
    }
    expected_noise = Sensitivity({**noise_by_group, **other_noises}).predict()
    if _power_ratio(int8_noise, expected_noise) > _MAX_UNEXPLAINED_RATIO:
        other_noises = _measure_runnable(other_groups, measure)
    noise_by_group |= other_noises

    _halve_noisiest(noise_by_group, measure, max_trials - len(first_groups))
    return Sensitivity(noise_by_group)


def _regroup(prior: Sensitivity, layers: Sequence[str]) -> tuple[list[Group], dict[Group, Noise]]:
    """Return (groups of layers that were not measured before, other groups -> their noise before).

    A group is neighbours that all were in one group of `prior`, or in none. Of a group of `prior`
    that has lost layers, each remaining layer takes an equal part of the noise.

    `layers`: of another target than `prior`, which may have other layers in int8.
    """
    prior_group_by_layer = {layer: group for group in prior.groups for layer in group}
    new_groups = []
    prior_noise_by_group = {}
    for prior_group, members in groupby(layers, key=prior_group_by_layer.get):
        group = tuple(members)
        if prior_group is None:
            new_groups.append(group)
        else:
            layer_share = len(group) / len(prior_group)
            prior_noise_by_group[group] = prior.groups[prior_group].scaled(layer_share)
    return new_groups, prior_noise_by_group


def split_into_groups(layers: Sequence[str], max_groups: int) -> list[Group]:
    """Split layers into at most `max_groups` groups of neighbours of equal size."""
    size = max(1, math.ceil(len(layers) / max_groups))
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]


def _measure_runnable(groups: Sequence[Group], measure: NoiseMeter) -> dict[Group, Noise]:
    """Return the noise of the groups that can run alone in int8."""
    noise_by_group = {}
    for group, noise in zip(groups, measure(groups), strict=True):
        if noise is not None:
            noise_by_group[group] = noise
    return noise_by_group


def _power_ratio(noise: Noise, reference: Noise) -> float:
    """Return the ratio of two noise powers in their worst slices."""
    return math.pow(10, (reference.db - noise.db) / 10)
