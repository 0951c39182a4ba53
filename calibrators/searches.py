"""Table of calibration methods: the searches that turn a tensor's statistics into a clip range.

A new search is a function from `Histogram` to `Scale` and one row here. Command lines and reports
read names, parameters and help; the implementation is imported on first call, so that reading the
table needs neither numpy nor OpenCV::

    SEARCHES["percentile"] --> params      PercentileParams(percent=99.99), validated; it names
                                           the statistic to record of every tensor
                           --> function    (Histogram, params) -> Scale
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from calibrators.errors import CalibrationError

if TYPE_CHECKING:
    from calibrators.grids import Grid
    from calibrators.histogram import Histogram
    from calibrators.scales import Scale
    from calibrators.statistics import HistogramOf

DEFAULT_METHOD = "mse"
DEFAULT_PERCENT = 99.99
DEFAULT_POWER = 3.0
# Searches of the same histogram, with their parameters, in the order in which they are compared.
# Entropy was never the best of them on a real model.
COMPARABLE: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("mse", {}),
    ("lp", {"power": 2.4}),
    ("lp", {}),
    ("minmax", {}),
    ("percentile", {}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of a search without parameters; base class of all others.

    A parameter is a field with a default of its type (float, int, str or bool), and a help sentence
    in `metadata["help"]`. The constructor refuses invalid values.
    """

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the parameters, in order."""
        return tuple(f.name for f in fields(cls))

    def label(self) -> str:
        """Return the parameters as text, for fingerprints and reports."""
        return " ".join(_short(getattr(self, name)) for name in self.names())

    def statistic(self) -> HistogramOf:
        """Return the statistic to record of every tensor: the order-independent histogram."""
        from calibrators.statistics import HistogramOf

        return HistogramOf()


def _short(value: object) -> str:
    """Format a value: 99.99 and 99 as usually written, 99.99999 with all its digits."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


@dataclass(frozen=True, slots=True)
class RangeSearch:
    """A method to choose a clip range.

    Attributes:
        function: (statistics of one tensor, parameters) -> its clip range; with `by_grid` also of
            two grids.
        params: class of the parameters.
        help: predicate of a sentence whose subject is the method's name.
        by_grid: whether the symmetric grid of the threshold and the affine grid of the range
            matter (None for int8 and uint8).
        integer: whether the method is defined for int8 only.
    """

    function: Callable[..., Scale]
    params: type[Params]
    help: str
    by_grid: bool = False
    integer: bool = False


def _import_search(module: str, name: str, *parameter_names: str) -> Callable[..., Scale]:
    """Return a search, (histogram, parameters) -> clip range as a `Scale`.

    The module of the search is imported when it is called. If the grids matter to it, it also takes
    the symmetric and the affine grid.

    Args:
        module: module of `calibrators` that has the function.
        name: name of the function there.
        parameter_names: fields of the parameters that the function takes as keyword arguments.
    """

    def search(
        histogram: Histogram,
        params: Params,
        symmetric: Grid | None = None,
        affine: Grid | None = None,
    ) -> Scale:
        """Import the module's function, and return the clip range that it finds.

        Raises:
            CalibrationError: the histogram is empty, or has infinite values.
        """
        if histogram.infinite or not histogram.total:
            raise CalibrationError(
                f"a search needs finite values, got {histogram.total} and"
                f" {histogram.infinite} infinite ones"
            )
        function = getattr(import_module(f"calibrators.{module}"), name)
        arguments = {parameter: getattr(params, parameter) for parameter in parameter_names}
        if symmetric is not None:  # else the function has its own default
            arguments["symmetric"] = symmetric
        if affine is not None:
            arguments["affine"] = affine
        scale: Scale = function(histogram, **arguments)
        return scale

    return search


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileParams(Params):
    """Parameters of the percentile search.

    Attributes:
        percent: share of the values to keep, 50 < percent <= 100.

    Raises:
        CalibrationError: percent is not a number or out of range.
    """

    percent: float = field(
        default=DEFAULT_PERCENT, metadata={"help": "Share of the values to keep, in percent."}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.percent, float | int) or not 50 < self.percent <= 100:
            raise CalibrationError(
                f"a percentile must be over 50 and at most 100, got {self.percent!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LpParams(Params):
    """Parameters of the Lp search.

    Attributes:
        power: p of |error|^p, 1 <= power <= 16.

    Raises:
        CalibrationError: power is not a number or out of range.
    """

    power: float = field(
        default=DEFAULT_POWER,
        metadata={"help": "Power of the error: the greater, the more a clipped value weighs."},
    )

    def __post_init__(self) -> None:
        if not isinstance(self.power, float | int) or not 1 <= self.power <= 16:
            raise CalibrationError(f"a power must be 1 to 16, got {self.power!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyTensorrtParams(Params):
    """Parameters of the entropy search on TensorRT's histogram.

    Attributes:
        batch_size: images in TensorRT's calibration batch, 1 or more.

    Raises:
        CalibrationError: batch_size is not an int or below 1.
    """

    batch_size: int = field(
        default=1, metadata={"help": "Images in the first batch, whose maximum starts the range."}
    )

    def __post_init__(self) -> None:
        is_int = isinstance(self.batch_size, int) and not isinstance(self.batch_size, bool)
        if not is_int or self.batch_size < 1:
            raise CalibrationError(f"a batch size must be 1 or more, got {self.batch_size!r}")

    def label(self) -> str:
        """Return "": the batch size is part of the statistic's key."""
        return ""

    def statistic(self) -> HistogramOf:
        """Return TensorRT's histogram, whose range starts with the first batch."""
        from calibrators.statistics import HistogramOf

        return HistogramOf(first_batch=self.batch_size)


SEARCHES: dict[str, RangeSearch] = {
    "minmax": RangeSearch(_import_search("percentile", "minmax"), Params, "keeps everything"),
    "entropy": RangeSearch(
        _import_search("entropy", "entropy"),
        Params,
        "takes the least KL divergence, as TensorRT does",
        integer=True,
    ),
    "percentile": RangeSearch(
        _import_search("percentile", "percentile", "percent"),
        PercentileParams,
        "leaves out a share of the values",
    ),
    "mse": RangeSearch(
        _import_search("mse", "mse"),
        Params,
        "takes the least squared error of the quantized values",
        by_grid=True,
    ),
    "lp": RangeSearch(
        _import_search("mse", "lp", "power"),
        LpParams,
        "takes the least error to a higher power: clips less than mse",
        by_grid=True,
    ),
    "entropy-tensorrt": RangeSearch(
        _import_search("entropy", "entropy"),
        EntropyTensorrtParams,
        "is entropy on TensorRT's own histogram, whose range starts with the first batch",
        integer=True,
    ),
    "legacy": RangeSearch(
        _import_search("percentile", "legacy"),
        Params,
        "is TensorRT's legacy calibrator without its regression",
        integer=True,
    ),
}


def parameters() -> dict[str, Field[Any]]:
    """Return parameter name -> field, over all searches."""
    field_by_name = {}
    for search in reversed(SEARCHES.values()):
        for parameter in fields(search.params):
            field_by_name[parameter.name] = parameter
    return field_by_name


def searches_with(parameter: str) -> tuple[str, ...]:
    """Return the names of the searches that have a parameter."""
    return tuple(name for name, row in SEARCHES.items() if parameter in row.params.names())
