"""Method names of the command line -> a search over statistics, and the range rule it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError

if TYPE_CHECKING:
    from calibrators.histogram import Histogram
    from calibrators.scales import Scale

# The names of `calibrators.ACTIVATION` and TensorRT's own range rule; written out, since the
# command line lists them without importing a search.
METHODS = ("minmax", "entropy", "percentile", "mse", "entropy-tensorrt")
DEFAULT_METHOD = "mse"
DEFAULT_PERCENT = 99.99
ORDER_INDEPENDENT = "order-independent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of a search; none here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileParams(Params):
    """Parameters of the percentile search."""

    percent: float = field(
        default=DEFAULT_PERCENT, metadata={"help": "Share of the values to keep, in percent."}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyTensorrtParams(Params):
    """Parameters of the entropy search on TensorRT's own histogram."""

    batch_size: int = field(
        default=1, metadata={"help": "Images in the first batch, whose maximum starts the range."}
    )


@dataclass(frozen=True, slots=True)
class Search:
    """A row of the table: what a search does, as the end of a sentence, and its parameters."""

    help: str
    params: type[Params] = Params


SEARCHES: dict[str, Search] = {
    "minmax": Search("keeps all of the range"),
    "entropy": Search("keeps the range of least KL divergence"),
    "percentile": Search("leaves out a share of the values", PercentileParams),
    "mse": Search("keeps the range of least squared error"),
    "entropy-tensorrt": Search(
        "is entropy on TensorRT's own histogram, whose range starts with the first batch",
        EntropyTensorrtParams,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A search with its parameters.

    Attributes:
        name: one of METHODS.
        percent: of the percentile method, 50 < percent <= 100.
        batch_size: of entropy-tensorrt: how many samples set the first range.
    """

    name: str = DEFAULT_METHOD
    percent: float = DEFAULT_PERCENT
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(f"a method is one of {', '.join(METHODS)}, got {self.name!r}")
        if not 50 < self.percent <= 100:
            raise ConfigError(f"a percentile must be over 50 and at most 100, got {self.percent}")
        if self.batch_size < 1:
            raise ConfigError(f"a batch size must be 1 or more, got {self.batch_size}")

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> Method:
        """The method of a name with the parameters that were given.

        Raises:
            ConfigError: an unknown name, or a parameter of another search.
        """
        own = [f.name for f in fields(SEARCHES[name].params)] if name in SEARCHES else given
        for parameter in given:
            if parameter not in own:
                takers = [n for n, s in SEARCHES.items() if parameter in _names(s)]
                raise ConfigError(
                    f"{parameter} is a parameter of {' and '.join(takers)}, got method {name}"
                )
        return cls(name=name, **given)

    @property
    def rule(self) -> str:
        """The range rule of the statistics that this search needs, as the fingerprint names it."""
        if self.name == "entropy-tensorrt":
            return f"tensorrt, first batch of {self.batch_size}"
        return ORDER_INDEPENDENT

    @property
    def label(self) -> str:
        """Name and parameters, as the fingerprint and the report show them."""
        return f"percentile {self.percent:g}" if self.name == "percentile" else self.name

    @property
    def search(self) -> Callable[[Histogram], Scale]:
        """Statistics of one tensor -> its scale."""
        from calibrators import ACTIVATION
        from calibrators.percentile import percentile

        if self.name == "percentile":
            return partial(percentile, percent=self.percent)
        return ACTIVATION["entropy" if self.name == "entropy-tensorrt" else self.name]


def _names(search: Search) -> list[str]:
    return [f.name for f in fields(search.params)]
