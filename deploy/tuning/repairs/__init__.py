"""Repairs: changes of the float model's weights and biases that lower the error of its int8 form.

Each repair is an option. It works on every target, since all are built from the same float model,
and is kept only where it measurably helps: by the model's outputs on a few samples, or layer by
layer where each layer can be measured. `REPAIRS` lists them in the order in which they are tried::

    model -> equalize -> observe -> adaround, bias -> files
             (the ranges change)    (the ranges stay)

By default `adaround` is tried wherever there is a search: it costs a few calibrations and no
inference time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.errors import ConfigError, did_you_mean
from deploy.graph.index import as_names
from deploy.tuning.repairs.base import LayerwiseRepair, ModelRepair, RepairResult, RequestRepair
from deploy.tuning.repairs.bias import correct_biases
from deploy.tuning.repairs.equalize import equalize
from deploy.tuning.repairs.output_rounding import round_weights

ALL, NONE = "all", "none"
ROUNDING = "adaround"
DEFAULT = (ROUNDING,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One repair; exactly one of `model_repair`, `request_repair` and `layer_repair` is set."""

    title: str
    model_repair: ModelRepair | None = None  # changes the model before calibration
    # changes the build request after calibration; kept or not by the error of the outputs
    request_repair: RequestRepair | None = None
    layer_repair: LayerwiseRepair | None = None  # likewise, but decides layer by layer by itself


REPAIRS: dict[str, Repair] = {
    "equalize": Repair(title="cross-layer equalization", model_repair=equalize),
    ROUNDING: Repair(title="weight rounding by output error", layer_repair=round_weights),
    "bias": Repair(title="bias correction", request_repair=correct_biases),
}


def parse_repairs(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse repair names: comma lists, `all` or `none`; return them in the order of `REPAIRS`."""
    given = [word.strip() for one in as_names(names) for word in one.split(",")]
    if NONE in given and len(given) > 1:
        raise ConfigError(f"{NONE} must be the only repair, got {', '.join(given)}; leave it out")
    for word in given:
        if word not in (ALL, NONE) and word not in REPAIRS:
            near = did_you_mean(word, (*REPAIRS, ALL, NONE), f"{ALL} tries each of them")
            raise ConfigError(f"a repair is one of {', '.join(REPAIRS)}, got {word!r}; {near}")
    return tuple(name for name in REPAIRS if name in given or ALL in given)


__all__ = [
    "ALL", "DEFAULT", "NONE", "REPAIRS", "ROUNDING", "Repair", "RepairResult", "parse_repairs",
]  # fmt: skip
