"""Method names of the command line -> a search over statistics, and the range rule it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deploy.errors import ConfigError

if TYPE_CHECKING:
    from calibrators.histogram import Histogram
    from calibrators.scales import Scale
    from calibrators.statistics import Statistic

# The names of `calibrators.ACTIVATION` and TensorRT's own range rule; written out, since the
# command line lists them without importing a search.
METHODS = ("minmax", "entropy", "percentile", "mse", "entropy-tensorrt")
DEFAULT_METHOD = "mse"
DEFAULT_PERCENT = 99.99
ORDER_INDEPENDENT = "order-independent"


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
    def statistic(self) -> Statistic:
        """What it searches."""
        from calibrators.statistics import HistogramOf

        return HistogramOf(first=self.batch_size if self.name == "entropy-tensorrt" else 0)

    @property
    def search(self) -> Callable[[Histogram], Scale]:
        """Statistics of one tensor -> its scale."""
        from calibrators import ACTIVATION
        from calibrators.percentile import percentile

        if self.name == "percentile":
            return partial(percentile, percent=self.percent)
        return ACTIVATION["entropy" if self.name == "entropy-tensorrt" else self.name]
