"""The repair of the float model's weights that lowers the error of its int8 form: `adaround`.

It works on every target, since all are built from the same float model, and is kept only where it
measurably helps, layer by layer::

    model -> observe -> adaround -> files
                        (the ranges stay)

By default it is tried wherever there is a search: it costs a few calibrations and no inference
time.
"""

from collections.abc import Iterable

from deploy.errors import ConfigError, did_you_mean
from deploy.graph.index import as_names

NONE = "none"
ROUNDING = "adaround"
TITLE = "adaptive rounding"  # its name in sentences


def has_rounding(names: str | Iterable[str]) -> bool:
    """Whether names of repairs, in comma lists, hold `ROUNDING`: the other one is `none`.

    Raises:
        ConfigError: an unknown name, or `none` beside another.
    """
    requested = [name.strip() for text in as_names(names) for name in text.split(",")]
    if NONE in requested and len(requested) > 1:
        text = ", ".join(requested)
        raise ConfigError(f"{NONE} must be the only repair, got {text}; leave it out")
    for name in requested:
        if name not in (ROUNDING, NONE):
            advice = did_you_mean(name, (ROUNDING, NONE), f"{NONE} tries none")
            raise ConfigError(f"a repair is {ROUNDING}, got {name!r}; {advice}")
    return ROUNDING in requested
