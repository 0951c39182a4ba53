"""Quantizes values from the command line: scale and zero point, the integers, the rounding error.

::

    values --search--> range --grid--> scale, zero point --affine--> integers, error

With a given scale and zero point there is no search.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibrators.grids import (
    INT8,
    UINT8,
    Grid,
    QuantizedTensor,
    broadcast_parameter,
    checked_axis,
    quantize_per_channel,
    quantize_per_tensor,
)
from deploy.errors import ConfigError, FeedError, counted
from deploy.files.archives import read_array
from deploy.files.reading import from_json, open_regular_file
from deploy.method import Method
from deploy.metrics.output_errors import sqnr_db
from deploy.report.figures import decibels
from deploy.report.model import to_plain_object
from deploy.report.screen import align_columns
from deploy.terminal import PrintedResult, join_visible

SCHEMA = "calib8-quantize/1"
GRIDS: dict[str, Grid] = {"quint8": UINT8, "qint8": INT8}
MAX_ROWS = 32  # values in the table, and channels above it, on one screen
_MAX_BYTES = 1 << 30
_RULE = "values are a JSON array of numbers, such as [[-1, 0], [1, 2]], or an .npy file"
_BARE_NUMBERS = re.compile(r"[-+]?[.\d][-+.,\deE\s]*")
_HEADS = ("value", "int_repr", "dequantized", "error")

Real = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Experiment(PrintedResult):
    """Values and their quantized form; `repr` is a table of the first ones.

    Attributes:
        values: the values, float32 of any shape.
        quantized: integers, scales and zero points.
        dtype: torch's name of the integer type.
        scale_source: "given", or the method that searched the scale.
    """

    values: Real
    quantized: QuantizedTensor
    dtype: str
    scale_source: str

    @property
    def error(self) -> NDArray[np.float64]:
        """Dequantized minus original values, float64 of their shape."""
        dequantized = self.quantized.dequantize().astype(np.float64)
        return np.asarray(dequantized - self.values.astype(np.float64))

    @property
    def clipped(self) -> int:
        """Number of values outside the representable range."""
        low, high = self.quantized.representable()
        rank = self.values.ndim
        axis = self.quantized.axis
        is_too_low = self.values < broadcast_parameter(low, rank, axis)
        outside = is_too_low | (self.values > broadcast_parameter(high, rank, axis))
        return int(outside.sum())

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types; infinite and NaN numbers become "inf", "-inf" or "nan"."""
        return to_plain_object(
            {
                "schema": SCHEMA,
                "dtype": self.dtype,
                "found": self.scale_source,
                "axis": self.quantized.axis,
                "scale": self.quantized.scale.tolist(),
                "zero_point": self.quantized.zero_point.tolist(),
                "values": self.values.tolist(),
                "int_repr": self.quantized.stored.tolist(),
                "dequantized": self.quantized.dequantize().tolist(),
                "error": self.error.tolist(),
                "clipped": self.clipped,
                **self._error_figures(),
            }
        )

    def to_screen(self) -> str:
        """Return scales, a table of the first values, and the errors."""
        figures = self._error_figures()
        summary = (
            f"largest error {figures['largest_error']:.6g}, root mean square {figures['rms']:.6g},"
            f" SQNR {decibels(figures['sqnr_db'])}, {self.clipped} of"
            f" {counted(self.values.size, 'value')} clipped"
        )
        return join_visible([*self._scales(), "", *self._table(), "", summary]) + "\n"

    def _error_figures(self) -> dict[str, float]:
        """Return the largest error, its root mean square, and the SQNR, by their keys in JSON."""
        error = self.error
        values = self.values.astype(np.float64)
        return {
            "largest_error": float(np.abs(error).max()),
            "rms": float(np.sqrt(np.square(error).mean())),
            "sqnr_db": sqnr_db(float(np.square(values).sum()), float(np.square(error).sum())),
        }

    def _scales(self) -> Iterator[str]:
        """Yield scale, zero point and range of each channel, or of all values together."""
        low, high = self.quantized.representable()
        rows = zip(self.quantized.scale, self.quantized.zero_point, low, high, strict=True)
        for channel, (scale, zero_point, lowest, highest) in enumerate(rows):
            if channel == MAX_ROWS:
                yield f"and {counted(len(low) - MAX_ROWS, 'channel')} more"
                return
            text = (
                f"scale {scale:.9g}, zero point {zero_point}, {self.dtype}"
                f" ({self.scale_source}): stores {lowest:.6g} to {highest:.6g}"
            )
            if self.quantized.axis is not None:
                text = f"channel {channel}: {text}"
            yield text

    def _table(self) -> Iterator[str]:
        """Yield a line for each of the first values: value, integer, dequantized value, error."""
        arrays = (self.values, self.quantized.stored, self.quantized.dequantize(), self.error)
        columns = [array.reshape(-1)[:MAX_ROWS] for array in arrays]
        rows = [_HEADS]
        for value, integer, dequantized, error in zip(*columns, strict=True):
            rows.append((f"{value:.6g}", str(integer), f"{dequantized:.6g}", f"{error:.3g}"))
        yield from align_columns(rows, ())
        if self.values.size > MAX_ROWS:
            yield f"and {counted(self.values.size - MAX_ROWS, 'value')} more"


def quantize(
    values: ArrayLike,
    *,
    method: str | Method | None = None,
    scales: float | Sequence[float] | None = None,
    zero_points: int | Sequence[int] | None = None,
    axis: int | None = None,
    dtype: str = "quint8",
) -> Experiment:
    """Quantize values, with a range that a search finds in them or with given scales.

    Args:
        values: finite real numbers of any shape.
        method: the search; None for the default one.
        scales: scales to use in place of a search: one, or one for each channel of `axis`.
        zero_points: one for each scale; None for 0.
        axis: axis of the channels, each with its own scale; None for one scale for all values.
        dtype: "quint8", "qint8" or, with scales, "qint32".

    Raises:
        ConfigError: both a method and scales, zero points without scales, or a dtype that does not
            fit.
        CalibrationError: values without a range, or as in `calibrators.grids`.
    """
    if isinstance(method, str):
        method = Method.of(method)
    if scales is not None and method is not None:
        raise ConfigError(
            f"a scale is given or searched, got --scale and --method {method.label}; leave one out"
        )
    if scales is None and zero_points is not None:
        raise ConfigError(
            f"--zero-point goes with --scale, got {np.ravel(zero_points).tolist()} alone; give"
            " --scale too"
        )
    try:
        real_values = _to_real(np.asarray(values))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"values are an array of finite real numbers, got: {error}") from error
    if scales is None:
        return _quantize_by_search(real_values, method or Method.of(), axis=axis, dtype=dtype)
    scales = np.ravel(scales).tolist()  # a single number becomes a list of one
    if zero_points is None:
        zero_points = [0] * len(scales)
    zero_points = np.ravel(zero_points).tolist()
    quantized = _quantize_by_scales(real_values, scales, zero_points, axis=axis, dtype=dtype)
    return Experiment(real_values, quantized, dtype, "given")


def _quantize_by_scales(
    values: Real,
    scales: Sequence[float],
    zero_points: Sequence[int],
    *,
    axis: int | None,
    dtype: str,
) -> QuantizedTensor:
    """Quantize values by given scales.

    Args:
        values: real numbers of any shape.
        scales: one, or one for each channel of `axis`.
        zero_points: one for each scale.
        axis: axis of the channels; None for one scale.
        dtype: "quint8", "qint8" or "qint32".
    """
    if axis is not None:
        return quantize_per_channel(values, scales, zero_points, axis, dtype)
    if len(scales) == len(zero_points) == 1:
        return quantize_per_tensor(values, scales[0], zero_points[0], dtype)
    raise ConfigError(
        "several scales need the --axis of their channels, got"
        f" {counted(len(scales), 'scale')} and {counted(len(zero_points), 'zero point')};"
        " give --axis, or one of each"
    )


def _quantize_by_search(
    values: Real, method: Method, *, axis: int | None, dtype: str
) -> Experiment:
    """Quantize by the scales that `method` finds: one for all values, or one for each channel."""
    if dtype not in GRIDS:
        raise ConfigError(
            f"a search finds the scale of {' or '.join(GRIDS)}, got {dtype}; give its --scale and"
            " --zero-point"
        )
    channels = [values]  # one, unless each channel has its own scale
    if axis is not None:
        channels = list(np.moveaxis(values, checked_axis(axis, values.ndim), 0))
    found_scales = [_search_scale(channel, method, GRIDS[dtype]) for channel in channels]
    scales, zero_points = zip(*found_scales, strict=True)
    quantized = _quantize_by_scales(values, scales, zero_points, axis=axis, dtype=dtype)
    return Experiment(values, quantized, dtype, method.label)


def read_values(text: str) -> Real:
    """Read float32 values from a JSON array such as `[[-1, 0], [1, 2]]`, or from an .npy file.

    Raises:
        ConfigError: not a JSON array of finite numbers.
        FeedError: the file is missing or damaged, or holds other than finite real numbers.
    """
    if not text.lstrip().startswith("["):  # the name of a file
        _refuse_bare_numbers(text)
        return _read_file(Path(text))
    numbers = from_json(text, rule=_RULE, error=ConfigError)
    try:
        return _to_real(np.array(numbers, np.float64))
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{_RULE}, got {text[:60]!r}: {error}") from error


def _refuse_bare_numbers(text: str) -> None:
    """Raise `ConfigError` for numbers without brackets, unless a file has this name."""
    if _BARE_NUMBERS.fullmatch(text.strip()) and not Path(text).exists():
        raise ConfigError(f"{_RULE}, got {text!r}; write it as '[{text}]'")


def _search_scale(values: Real, method: Method, grid: Grid) -> tuple[float, int]:
    """Return (scale, zero point) that a method finds in values, which are its only batch.

    A statistic may have a lead, another statistic of the first batch that it starts from, as a
    histogram starts from the largest magnitude.
    """
    lead = None
    if method.statistic.lead is not None:
        lead = method.statistic.lead.recorder(None)
        lead.observe(values)
    recorder = method.statistic.recorder(lead)
    recorder.observe(values)
    # without arguments `search` finds a range that fits int8 and uint8: the grid is one of these
    clip_range = method.search()(recorder)
    scale, zero_point = clip_range.on(grid)
    return float(scale) or 1.0, zero_point  # values of zero only have no step of their own


def _read_file(path: Path) -> Real:
    """Read float32 values from an .npy file; errors are those of `read_values`."""
    with open_regular_file(
        path, what="an .npy file of values", error=FeedError, max_bytes=_MAX_BYTES
    ) as file:
        try:
            return _to_real(read_array(file, _MAX_BYTES))
        except (ValueError, EOFError) as error:
            raise FeedError(
                f"{path} must be a sound .npy file of real numbers, got: {error}"
            ) from error


def _to_real(array: NDArray[Any]) -> Real:
    """Return float32 values.

    Raises:
        ValueError: no values, other than real numbers, or some that are infinite in float32.
    """
    if array.dtype.kind not in "fiub" or not array.size:
        raise ValueError(f"{counted(array.size, 'value')} of {array.dtype}")
    with np.errstate(over="ignore"):  # an overflow is reported below
        values = array.astype(np.float32)
    infinite_count = int(np.isinf(values).sum())
    if infinite_count:
        raise ValueError(f"{infinite_count} of {counted(array.size, 'value')} infinite in float32")
    return values
