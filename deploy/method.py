"""`Method`: a row of `calibrators.searches` with its parameters, chosen by their words.

`Choices`: what was settled for one target beyond what the user asked for.
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
    Search,
    parameters,
    takers,
)
from deploy.errors import CalibrationError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from calibrators.grids import Grid
    from calibrators.histogram import Histogram
    from calibrators.scales import Scale
    from calibrators.statistics import HistogramOf


@dataclass(frozen=True, slots=True)
class Method:
    """A search with its parameters; `Method.of("percentile", {"percent": 99.9})` makes one.

    Attributes:
        name: a row of SEARCHES.
        params: of the type that the row names.

    Raises:
        ConfigError: there is no such row, or the parameters are another row's.
    """

    name: str
    params: Params

    def __post_init__(self) -> None:
        kind = _known(self.name).params
        if type(self.params) is not kind:
            raise ConfigError(
                f"the method {self.name} takes {kind.__name__}, got {type(self.params).__name__}"
            )

    @classmethod
    def of(cls, name: str = DEFAULT_METHOD, given: Mapping[str, object] | None = None) -> Method:
        """The method of this name with the parameters that were given, the others by default.

        Args:
            name: a row of SEARCHES.
            given: parameter -> value; None counts as not given.

        Raises:
            ConfigError: no such search, a parameter that it does not have, or a value that breaks
                the parameter's rule.
        """
        search = _known(name)
        values: dict[str, Any] = {}
        for parameter, value in (given or {}).items():
            if value is not None:
                _check_taken(parameter, name)
                values[parameter] = value
        try:
            return cls(name, search.params(**values))
        except CalibrationError as error:
            raise ConfigError(str(error)) from None

    @property
    def label(self) -> str:
        """Name and parameters, as the fingerprint and the report show them."""
        return f"{self.name} {self.params.label()}".rstrip()

    @classmethod
    def labelled(cls, label: str) -> Method:
        """The method of a label; parameters that it leaves out are the defaults.

        Raises:
            ConfigError: as `of`, or a parameter that is no number.
        """
        name, *values = label.split() or [""]
        parameters = _known(name).params.names()
        if len(values) > len(parameters):
            raise ConfigError(
                f"the method {name} takes {len(parameters)} parameters, got {label!r}; leave away"
                " what follows them"
            )
        return cls.of(name, dict(zip(parameters, map(_number, values), strict=False)))

    @property
    def statistic(self) -> HistogramOf:
        """What is to be observed of every tensor."""
        return SEARCHES[self.name].statistic(self.params)

    @property
    def integer(self) -> bool:
        """Whether it is defined for int8 alone."""
        return SEARCHES[self.name].integer

    def search(
        self, symmetric: Grid | None = None, affine: Grid | None = None
    ) -> Callable[[Histogram], Scale]:
        """What makes of a tensor's statistics its scale.

        Args:
            symmetric: grid that its `amax` is for, None for int8.
            affine: grid that its `lo` and `hi` are for, None for uint8.
        """
        row, params = SEARCHES[self.name], self.params
        by_grid = row.by_grid
        if by_grid is None or (symmetric is None and affine is None):
            return lambda histogram: row.function(histogram, params)
        return lambda histogram: by_grid(histogram, params, symmetric, affine)


def comparable(method: Method) -> list[Method]:
    """A method, and the others that are tried beside it; alone where it is none of them."""
    known = [Method.of(name, given) for name, given in COMPARABLE]
    return [method, *(one for one in known if one != method)] if method in known else [method]


def _number(word: str) -> int | float:
    try:
        return int(word) if word.isdecimal() else float(word)
    except ValueError:
        raise ConfigError(
            f"a parameter behind a method's name must be a number, got {word!r}"
        ) from None


def _known(name: str) -> Search[Any]:
    if name not in SEARCHES:
        near = did_you_mean(name, SEARCHES, "the default is " + DEFAULT_METHOD)
        raise ConfigError(f"a method is one of {', '.join(SEARCHES)}, got {name!r}; {near}")
    return SEARCHES[name]


def _check_taken(parameter: str, name: str) -> None:
    able = takers(parameter)
    if name in able:
        return
    flag = f"--{parameter.replace('_', '-')}"
    if not able:
        near = did_you_mean(parameter, parameters(), f"there are {', '.join(parameters())}")
        raise ConfigError(f"a parameter belongs to a method, got {parameter!r}; {near}")
    raise ConfigError(
        f"{flag} belongs to --method {' or '.join(able)}, got --method {name}; leave it away"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Which nodes stay float and which search finds which range, for one target.

    They change no observation: any choice is built from the same calibration.

    Attributes:
        float_nodes: node of the cleaned model -> why it stays float.
        method: the search of every tensor; None is the calibration's own.
        methods: tensor -> a search of its own.
        rounded: whether weights are rounded by output error; None where no plan says it.
    """

    float_nodes: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    rounded: bool | None = None


NO_CHOICES = Choices()
