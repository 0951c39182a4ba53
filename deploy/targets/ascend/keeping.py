"""Layers whose IFMR clips nothing: the one choice beside AMCT's default that calib8 tries.

IFMR tries ratios of the observed maximum (its percentile of 0.999999) and takes the one of least
squared error, which clips what is rare in the images that calibrate::

    ratio   0.7 ------ 1.0 ------ 1.3      AMCT's default search_range
                       1.0 ------ 1.3      nothing is clipped

A range that begins at 1 is an ordinary setting of AMCT's configuration, where it is written too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.errors import ConfigError
from deploy.targets.ascend.amct_calibration import Recorded, RecordPlan

if TYPE_CHECKING:
    from deploy.calibration.choices import Choices
    from deploy.method import Method
    from deploy.targets.ascend.config_types import QuantConfig

KEEPING = "minmax"
_WHOLE = (1.0, 1.3)


def kept_layers(plan: RecordPlan, choices: Choices) -> frozenset[str]:
    """The layers for which the choices want no clipping.

    Raises:
        ConfigError: a method that is neither that nor AMCT's own.
    """
    for method in filter(None, (choices.method, *choices.methods.values())):
        _check(method)
    entries = plan.config.entries()
    return frozenset(
        name
        for name, layer in plan.layers.items()
        if (choices.methods.get(layer.input) or choices.method) is not None
        and entries[name].activation.act_algo == "ifmr"
    )


def _check(method: Method) -> None:
    if method.name != KEEPING:
        raise ConfigError(
            f"a plan for ascend takes the method {KEEPING} or none, got {method.label!r}; delete"
            " the line, or the file to have it made anew"
        )


def keeping(config: QuantConfig, layers: Collection[str]) -> QuantConfig:
    """The config in which IFMR clips nothing in these layers."""
    changed = {
        name: replace(one, activation=replace(one.activation, search_range=_WHOLE))
        if name in layers
        else one
        for name, one in config.layers.items()
    }
    tensors = (
        replace(one, activation=replace(one.activation, search_range=_WHOLE))
        if one.key in layers
        else one
        for one in config.tensors
    )
    return replace(config, layers=changed, tensors=tuple(tensors))


def keeping_plan(plan: RecordPlan) -> RecordPlan:
    """The plan with no clipping in any layer; what it wants observed is the same."""
    return replace(plan, config=keeping(plan.config, plan.layers))


def mixed(plan: RecordPlan, own: Recorded, kept: Recorded, layers: Collection[str]) -> Recorded:
    """Records as the plan gives them, and in these layers those without clipping."""
    read = (*plan.activations.items(), *plan.seconds.items())
    tensors = {observation.tensor for name, observation in read if name in layers}
    return replace(
        own,
        records={n: (kept if n in layers else own).records[n] for n in own.records},
        ranges={t: (kept if t in tensors else own).ranges[t] for t in own.ranges},
    )
