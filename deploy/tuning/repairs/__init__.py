"""Repairs: changes of the float model's weights and biases that lower the error of its int8 form.

Each repair is an option. It works on every target, since all are built from the same float model,
and is kept only where it measurably helps: by the model's outputs on a few samples, or layer by
layer where each layer can be measured. `REPAIRS` lists them in the order in which they are tried::

    model -> observe -> adaround, bias -> files
                        (the ranges stay)

By default `adaround` is tried wherever there is a search: it costs a few calibrations and no
inference time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.errors import ConfigError, did_you_mean
from deploy.graph.index import as_names
from deploy.tuning.repairs.base import RepairFunction
from deploy.tuning.repairs.bias import correct_biases
from deploy.tuning.repairs.output_rounding import round_weights

ALL, NONE = "all", "none"
ROUNDING = "adaround"
DEFAULT = (ROUNDING,)


@dataclass(frozen=True, slots=True)
class Repair:
    """One repair.

    Attributes:
        title: its name in sentences.
        apply: returns the repaired build request, after calibration.
    """

    title: str
    apply: RepairFunction


REPAIRS: dict[str, Repair] = {
    ROUNDING: Repair("adaptive rounding", round_weights),
    "bias": Repair("bias correction", correct_biases),
}


def parse_repairs(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse repair names: comma lists, `all` or `none`; return them in the order of `REPAIRS`."""
    requested = [name.strip() for text in as_names(names) for name in text.split(",")]
    if NONE in requested and len(requested) > 1:
        text = ", ".join(requested)
        raise ConfigError(f"{NONE} must be the only repair, got {text}; leave it out")
    accepted = (*REPAIRS, ALL, NONE)
    for name in requested:
        if name not in accepted:
            advice = did_you_mean(name, accepted, f"{ALL} tries each of them")
            raise ConfigError(f"a repair is one of {', '.join(REPAIRS)}, got {name!r}; {advice}")
    return tuple(name for name in REPAIRS if name in requested or ALL in requested)
