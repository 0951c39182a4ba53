"""`Method`: a search for scales (a row of `calibrators.searches`) with its parameters.

`Choices`: decisions for one target besides the user's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrators.searches import (
    COMPARABLE,
    DEFAULT_METHOD,
    SEARCHES,
    Params,
    RangeSearch,
    parameters,
    searches_with,
)
from deploy.errors import CalibrationError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from calibrators.grids import Grid
    from calibrators.histogram import Histogram
    from calibrators.scales import Scale
    from calibrators.statistics import HistogramOf


@dataclass(frozen=True, slots=True)
class Method:
    """A search with its parameters; create it with `Method.of("percentile", {"percent": 99.9})`.

    Attributes:
        name: name of a search in SEARCHES.
        params: parameters of this search, of its own class.

    Raises:
        ConfigError: there is no such search, or the parameters belong to another search.
    """

    name: str
    params: Params

    def __post_init__(self) -> None:
        params_type = _find_search(self.name).params
        if type(self.params) is not params_type:
            raise ConfigError(
                f"the method {self.name} takes {params_type.__name__},"
                f" got {type(self.params).__name__}"
            )

    @classmethod
    def of(
        cls, name: str = DEFAULT_METHOD, parameters: Mapping[str, object] | None = None
    ) -> Method:
        """Return the method of this name with these parameters; others have their defaults.

        Args:
            name: a row of SEARCHES.
            parameters: parameter -> value; None counts as not given.

        Raises:
            ConfigError: no such search, a parameter that it does not have, or an invalid value.
        """
        search = _find_search(name)
        values: dict[str, Any] = {}
        for parameter, value in (parameters or {}).items():
            if value is not None:
                _check_parameter(parameter, name)
                values[parameter] = value
        try:
            return cls(name, search.params(**values))
        except CalibrationError as error:
            raise ConfigError(str(error)) from None

    @property
    def label(self) -> str:
        """Name and parameters, as in the fingerprint and the report."""
        return f"{self.name} {self.params.label()}".rstrip()

    @classmethod
    def from_label(cls, label: str) -> Method:
        """Return the method of a label; parameters missing in it have their defaults."""
        name, *texts = label.split() or [""]  # an empty label has an empty name
        parameters = _find_search(name).params.names()
        if len(texts) > len(parameters):
            raise ConfigError(
                f"the method {name} takes {len(parameters)} parameters, got {label!r}; leave out"
                " the others"
            )
        values = map(_parse_number, texts)
        return cls.of(name, dict(zip(parameters, values, strict=False)))

    @property
    def statistic(self) -> HistogramOf:
        """The statistic to observe for every tensor."""
        return self.params.statistic()

    @property
    def is_int8_only(self) -> bool:
        """Whether the method is defined for int8 only."""
        return SEARCHES[self.name].integer

    def search(
        self, symmetric: Grid | None = None, affine: Grid | None = None
    ) -> Callable[[Histogram], Scale]:
        """Return the function that computes a tensor's scale from its histogram.

        Args:
            symmetric: the grid of integers without zero point, for the scale's `amax`; None for
                int8.
            affine: the grid with a zero point, for the scale's `lo` and `hi`; None for uint8.
        """
        row = SEARCHES[self.name]
        params = self.params
        grids = (symmetric, affine) if row.by_grid else ()
        return lambda histogram: row.function(histogram, params, *grids)


def comparable_methods(method: Method) -> list[Method]:
    """Return the methods to compare a method with, itself first; alone if it is not comparable."""
    methods = [Method.of(name, parameters) for name, parameters in COMPARABLE]
    if method not in methods:
        return [method]
    methods.remove(method)
    return [method, *methods]


def _parse_number(text: str) -> int | float:
    """Return the number that a text in a method's label stands for."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ConfigError(
            f"a parameter after a method's name must be a number, got {text!r}"
        ) from None


def _find_search(name: str) -> RangeSearch:
    """Return the row of SEARCHES with this name; ConfigError if there is none."""
    if name not in SEARCHES:
        remedy = did_you_mean(name, SEARCHES, "the default is " + DEFAULT_METHOD)
        raise ConfigError(f"a method is one of {', '.join(SEARCHES)}, got {name!r}; {remedy}")
    return SEARCHES[name]


def _check_parameter(parameter: str, name: str) -> None:
    """Refuse a parameter that the method of this name does not have."""
    methods = searches_with(parameter)
    if name in methods:
        return
    if not methods:
        remedy = did_you_mean(parameter, parameters(), f"there are {', '.join(parameters())}")
        raise ConfigError(f"a parameter belongs to a method, got {parameter!r}; {remedy}")
    flag = f"--{parameter.replace('_', '-')}"
    raise ConfigError(
        f"{flag} belongs to --method {' or '.join(methods)}, got --method {name}; leave it out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Which nodes stay float and which search sets which range, for one target.

    They do not affect observation: any choice is built from the same calibration.

    Attributes:
        float_nodes: node of the cleaned model -> why it stays float.
        method: the search for every tensor; None is the calibration's own.
        methods: tensor -> its own search.
        rounded: whether weights are rounded by output error; None if no plan decides it.
        searches: layer -> which of the target's own searches calibrates it, for a target that has
            several.
    """

    float_nodes: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    rounded: bool | None = None
    searches: Mapping[str, str] = field(default_factory=dict)


NO_CHOICES = Choices()
