"""The searches among which `calib8 ascend auto` chooses, a layer each.

All are settings of AMCT's own configuration, which says afterwards what was chosen, and all are
found in one pass over the images. Those of DMQ balance the channels of a layer's input with its
weight's, for one operator more in front of it; a layer that cannot be balanced has no such search.
Each may go with AdaRound, which `deploy.targets.ascend.rounder` tries on a few layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deploy.calibration.observation import Observation, Observed
from deploy.calibration.subject import Subject
from deploy.targets.ascend.amct_calibration import RecordPlan
from deploy.targets.ascend.config_types import Activation, LayerConfig, QuantConfig
from deploy.targets.ascend.record import LayerRecord
from deploy.targets.ascend.target import Ascend

Records = Mapping[str, LayerRecord]

CONFIGURED = "as configured"
_OTHERS: dict[str, Callable[[Activation], Activation]] = {
    "nothing clipped": lambda found: replace(found, search_range=(1.0, 1.3)),
    "percentile 0.9999": lambda found: replace(found, max_percentile=0.9999, min_percentile=0.9999),
    "hfmg": lambda found: replace(Activation(), act_algo="hfmg", asymmetric=found.asymmetric),
}
_BALANCED_OVER = 32  # samples, which are held while they are run twice
_BALANCED = {f"dmq {strength}": strength for strength in (0.2, 0.5, 0.8)}
_ROUNDED = ", AdaRound"
ITERATIONS = 4000  # of AdaRound; AMCT's 10000 gain little more for their time


@dataclass(frozen=True, kw_only=True)
class Choosing(Ascend):
    """The Ascend target, observing what every one of these searches needs."""

    def demand(self, subject: Subject) -> tuple[Observation, ...]:
        """As `Ascend.demand`, for all of `plans`."""
        wanted = (o for plan in plans(self, subject).values() for o in plan.observations)
        return tuple({o.key: o for o in wanted}.values())


def plans(target: Ascend, subject: Subject) -> dict[str, RecordPlan]:
    """Name of a search -> the plan by which every layer is searched so.

    Where nothing else was observed, or the user has a configuration, that alone says how.
    """
    own = target.record_plan(subject)
    if target.config is not None or not isinstance(target, Choosing):
        return {CONFIGURED: own}
    return {CONFIGURED: own, **{name: _plan(own, name) for name in (*_OTHERS, *_BALANCED)}}


def is_balanced(search: str) -> bool:
    """Whether a search balances channels by DMQ."""
    return search.removesuffix(_ROUNDED) in _BALANCED


def is_rounded(search: str) -> bool:
    """Whether a search goes with AdaRound."""
    return search.endswith(_ROUNDED)


def with_adaround(search: str) -> str:
    """The same search of ranges and factors, the weights rounded by AdaRound."""
    return search if is_rounded(search) else search + _ROUNDED


def balanced_over(plan: RecordPlan) -> int:
    """Samples on which DMQ's channels are measured: AMCT's first batch, if that is not one."""
    return plan.together if plan.together > 1 else min(plan.samples, _BALANCED_OVER)


def recorded(found: Mapping[str, RecordPlan], observed: Observed) -> dict[str, Records]:
    """Name of a search -> records of all layers; of DMQ's, of those that it changes."""
    records = {name: plan.record(observed).records for name, plan in found.items()}
    return {
        name: {
            layer: record
            for layer, record in own.items()
            if not is_balanced(name) or (record.factors.size and (record.factors != 1).any())
        }
        for name, own in records.items()
    }


def config_of(config: QuantConfig, chosen: Mapping[str, str]) -> QuantConfig:
    """The config in which each layer of `chosen` is searched as it says, and no other enabled."""
    layers = {
        name: _layer(one, chosen[name]) if name in chosen else replace(one, quant_enable=False)
        for name, one in config.layers.items()
    }
    tensors = (
        replace(one, activation=_activation(one.activation, chosen[one.key]))
        for one in config.tensors
        if one.key in chosen
    )
    return replace(config, layers=layers, tensors=tuple(tensors))


def _plan(own: RecordPlan, name: str) -> RecordPlan:
    weighted = [layer.name for layer in own.layers.values() if layer.weight]
    chosen = dict.fromkeys(own.layers, CONFIGURED) | dict.fromkeys(
        weighted if is_balanced(name) else own.layers, name
    )
    config = config_of(own.config, chosen)
    return replace(own, config=config, balanced_over=balanced_over(own), lenient=True)


def _layer(one: LayerConfig, name: str) -> LayerConfig:
    if is_rounded(name):
        weight = replace(one.weight, wts_algo="ada_quantize", num_iteration=ITERATIONS)
        return _layer(replace(one, weight=weight), name.removesuffix(_ROUNDED))
    if is_balanced(name):
        return replace(one, dmq_balancer_param=_BALANCED[name])
    return replace(one, activation=_activation(one.activation, name))


def _activation(one: Activation, name: str) -> Activation:
    return one if name == CONFIGURED else _OTHERS[name](one)
