"""Repairs: changes of the float model's constants after which its int8 form is nearer to it.

Each is an option, works on every target since all are built from the same float model, and is kept
only where it measurably helps: by the outputs on a few samples, or layer by layer where each layer
can tell. `REPAIRS` is the table of them, in the order they are tried::

    model -> equalize -> observe -> ranges, adaround, bias -> files
             (the ranges change)    (the ranges stay)

Where nothing is said, `adaround` is tried wherever a search is: it costs a few calibrations and no
time of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.errors import ConfigError, did_you_mean
from deploy.tuning.repairs.base import After, Before, ByLayers, Tried
from deploy.tuning.repairs.bias import choose_ranges, correct_biases
from deploy.tuning.repairs.equalize import equalize
from deploy.tuning.repairs.output_rounding import round_weights

ALL, NONE = "all", "none"
ROUNDING = "adaround"
DEFAULT = (ROUNDING,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One repair.

    Attributes:
        words: what it is called in a report.
        before: changes a model before anything is observed.
        after: changes what a target is built from, the ranges known; the outputs judge it.
        by_layers: the same, judged by itself, layer by layer; one of the three is there.
    """

    words: str
    before: Before | None = None
    after: After | None = None
    by_layers: ByLayers | None = None


REPAIRS: dict[str, Repair] = {
    "equalize": Repair(words="cross-layer equalization", before=equalize),
    "ranges": Repair(words="ranges by output error", after=choose_ranges),
    ROUNDING: Repair(words="weight rounding by output error", by_layers=round_weights),
    "bias": Repair(words="bias correction", after=correct_biases),
}


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The repairs of these names, which may be comma lists, `all` or `none`, in their order.

    Raises:
        ConfigError: a name that is not in the table, or `none` beside one that is.
    """
    asked = [word.strip() for name in names for word in name.split(",")]
    if NONE in asked and len(asked) > 1:
        raise ConfigError(f"{NONE} stands alone, got repairs {', '.join(asked)}; leave it away")
    for word in asked:
        if word not in (ALL, NONE) and word not in REPAIRS:
            near = did_you_mean(word, (*REPAIRS, ALL, NONE), f"{ALL} tries each of them")
            raise ConfigError(f"a repair is one of {', '.join(REPAIRS)}, got {word!r}; {near}")
    return tuple(name for name in REPAIRS if name in asked or ALL in asked)


__all__ = ["ALL", "DEFAULT", "NONE", "REPAIRS", "ROUNDING", "Repair", "Tried", "chosen"]
