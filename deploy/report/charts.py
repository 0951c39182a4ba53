r"""Charts as inline SVG that takes its colours from the page.

Range of a tensor::

    observed   |------------------0-----------------------------|
    kept             [############0##########]

Distribution of latency, one curve per engine on a shared axis. Positions are percentages of the
width, so that letters keep their size however narrow the page is::

    A onnxruntime p50 0.0746 ms   B FP32 p50 0.0791 ms      a legend in HTML, which wraps

        A :  B                      lines at p50, their letters on top
       /\ :  :
      /  \:/\:____                 curves: an inner SVG that is stretched
    --0.07--0.08--0.09--

Front of a search, time across and SQNR of the worst output slice up::

    exact                    FP32    the float model, at time 1
    40 dB          4  5              a number is a split that --split builds
    20 dB  1  (3)                    larger: the split that was built
         ---0.7---0.8---0.9---1-

Also the table of a batch sweep: p50 and throughput of engines by batch.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.errors import counted
from deploy.report import figures
from deploy.report.parts import EngineRow, TensorRow
from deploy.tuning.plan_file import SplitRow


class _Axis(NamedTuple):
    """A scale: values from `lo` to `hi` lie at `start` to `start + length` px.

    With the default length, positions are percentages of the width.
    """

    lo: float
    hi: float
    start: float = 0
    length: float = 100

    def position(self, value: float) -> float:
        """Return a value's position in px."""
        return self.start + self.length * (value - self.lo) / (self.hi - self.lo)

    def percent(self, value: float) -> str:
        """Return a value's position as a percentage for SVG; values beyond the axis at its end."""
        return f"{self.position(min(value, self.hi)):.2f}%"


def _vertical_line(kind: str, x: str, top: int, floor: int) -> str:
    """Return an SVG line from `top` down to `floor`; `kind`: its class in the page's style."""
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{floor}"/>'


def _floor_line(floor: int) -> str:
    """Return the horizontal line at the bottom of a chart."""
    return f'<line class="axis" x1="0" x2="100%" y1="{floor}" y2="{floor}"/>'


def _text(kind: str, x: str, y: str, text: str) -> str:
    """Return an SVG text; `kind`: its class in the page's style."""
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


_BAR_WIDTH, _BAR_HEIGHT = 190, 16  # in px


def range_bar(row: TensorRow) -> str:
    """Return a drawing (SVG) of a tensor's observed values and clip range, for a row of a table.

    "" if the range has no width, or an end is not finite.
    """
    axis_lo = min(row.observed_min, row.lo, 0.0)
    axis_hi = max(row.observed_max, row.hi, 0.0)
    is_finite = math.isfinite(axis_lo) and math.isfinite(axis_hi)
    if not is_finite or axis_hi <= axis_lo:
        return ""

    axis = _Axis(axis_lo, axis_hi, start=1, length=_BAR_WIDTH - 2)
    observed_start = axis.position(row.observed_min)
    observed_end = axis.position(row.observed_max)
    clip_start = axis.position(row.lo)
    clip_end = axis.position(row.hi)
    middle = _BAR_HEIGHT / 2
    body = (
        f'<line class="seen" x1="{observed_start:.1f}" x2="{observed_end:.1f}"'
        f' y1="{middle}" y2="{middle}"/>'
        f'<rect class="kept" x="{clip_start:.1f}" width="{max(clip_end - clip_start, 1):.1f}"'
        f' y="4" height="{_BAR_HEIGHT - 8}" rx="2"/>'
        + _vertical_line("zero", f"{axis.position(0):.1f}", 1, _BAR_HEIGHT - 1)
    )
    title = (
        f"{row.name}: values {figures.real(row.observed_min)} to {figures.real(row.observed_max)},"
        f" kept {figures.real(row.lo)} to {figures.real(row.hi)}"
    )
    return (
        f'<svg class="bar" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" width="{_BAR_WIDTH}"'
        f' height="{_BAR_HEIGHT}" role="img"><title>{escape(title)}</title>{body}</svg>'
    )


Float64Array = NDArray[np.float64]

LATENCY_CAPTION = (
    "{} of every measured iteration; engines ran in turn, so noise of the machine falls on all"
    " of them. A curve is scaled to its own peak; few iterations have none. The dashed line is the"
    " p50."
)
_HEIGHT, _TOP, _BOTTOM = 230, 34, 34  # in px
_FLOOR = _HEIGHT - _BOTTOM
_CURVE_WIDTH, _CURVE_HEIGHT = 1000, _FLOOR - _TOP  # of the inner drawing, in its own units
_CURVE_STEPS = 90  # steps of a curve
_MIN_CURVE_ITERATIONS = 20  # iterations that a curve needs
_MAX_P50_RATIO = 2.5  # times the p50, so that a long tail does not squeeze the rest
_COLOURS = 4  # classes c0..c3 of the page's style
_MAX_NARROW_TICKS = 5  # number of tick labels that fit on a narrow screen
_LETTER_ROWS = 2  # heights in turn, so that the letters of lines near each other stay apart
_FIRST_LETTER_Y, _LETTER_ROW_HEIGHT = 12, 14  # in px


class _MeasuredEngine(NamedTuple):
    """An engine with the latency of each iteration in ms, and the class of its colour."""

    label: str
    p50_ms: float
    samples_ms: Float64Array
    colour: str


def latency_figure(engines: Sequence[EngineRow], *, on_device: bool = False) -> str:
    """Draw the distribution of all measured iterations, one curve per engine, with its p50.

    "" without measured iterations. Iterations beyond the end of the axis are only counted. An
    engine with few iterations has no curve: it would look like a distribution.

    Args:
        engines: all engines of the report.
        on_device: whether to draw those timed by an accelerator's clock, or those timed on the CPU.
    """
    measured_engines = list(_measured_engines(engines, on_device))
    if not measured_engines:
        return ""

    axis = _latency_scale(measured_engines)
    curves = ""
    marks = ""
    legend = ""
    slower_count = 0  # iterations beyond the axis
    for index, engine in enumerate(measured_engines):
        if len(engine.samples_ms) >= _MIN_CURVE_ITERATIONS:
            curves += _curve(engine.samples_ms, axis, engine.colour)
        slower_count += int((engine.samples_ms > axis.hi).sum())

        # a line at the p50, with the letter of the engine on its top
        letter = ascii_uppercase[index % len(ascii_uppercase)]
        p50_x = axis.percent(engine.p50_ms)
        letter_y = _FIRST_LETTER_Y + _LETTER_ROW_HEIGHT * (index % _LETTER_ROWS)
        marks += _vertical_line(f"median {engine.colour}", p50_x, letter_y + 3, _FLOOR)
        marks += _text(f"tick name {engine.colour}", p50_x, str(letter_y), letter)
        legend += (
            f'<li><i class="{engine.colour}">{letter}</i> {escape(engine.label)}'
            f" <b>p50 {figures.milliseconds(engine.p50_ms)}</b></li>"
        )
    unit = "ms per inference"
    if slower_count:
        unit += f"; {counted(slower_count, 'slower iteration')} not drawn"
    # the curves are a drawing inside the drawing: they are stretched to the page, texts are not
    return (
        f'<ul class="legend">{legend}</ul>'
        f'<svg class="wide" width="100%" height="{_HEIGHT}" role="img">'
        f"<title>Distribution of the measured times</title>{_latency_axis(axis)}"
        f'<svg y="{_TOP}" width="100%" height="{_CURVE_HEIGHT}" preserveAspectRatio="none"'
        f' viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}">{curves}</svg>'
        f"{marks}{_text('end', '100%', str(_HEIGHT - 3), unit)}</svg>"
    )


def _measured_engines(engines: Sequence[EngineRow], on_device: bool) -> Iterator[_MeasuredEngine]:
    """Yield the engines that were timed by one clock; an engine's colour is that of its place."""
    for index, engine in enumerate(engines):
        if engine.on_device == on_device and engine.latency and engine.latency.samples_ms:
            samples_ms = np.asarray(engine.latency.samples_ms, np.float64)
            yield _MeasuredEngine(engine.label, engine.p50_ms, samples_ms, f"c{index % _COLOURS}")


def _latency_scale(engines: Sequence[_MeasuredEngine]) -> _Axis:
    """Return an axis from the fastest iteration to the highest 99th percentile of the engines.

    An engine's percentile counts as at most `_MAX_P50_RATIO` times its p50. Both ends have a
    margin.
    """
    lo = math.inf
    hi = 0.0
    for engine in engines:
        p99 = float(np.quantile(engine.samples_ms, 0.99))
        lo = min(lo, float(engine.samples_ms.min()))
        hi = max(hi, min(p99, _MAX_P50_RATIO * engine.p50_ms))
    margin = 0.06 * (hi - lo)
    if not margin:  # all iterations took the same time, and an axis needs a length
        margin = 0.05 * hi or 1.0
    return _Axis(max(0.0, lo - margin), hi + margin)


def _latency_axis(axis: _Axis) -> str:
    """Draw the floor and its ticks; if there are many, a narrow screen hides every second label."""
    body = _floor_line(_FLOOR)
    ticks = list(_ticks(axis.lo, axis.hi))
    for index, (value, label) in enumerate(ticks):
        x = axis.percent(value)
        is_hidden = index % 2 == 1 and len(ticks) > _MAX_NARROW_TICKS
        kind = "tick odd" if is_hidden else "tick"
        body += _vertical_line("grid", x, _TOP, _FLOOR)
        body += _text(kind, x, str(_FLOOR + 15), label)
    return body


def _ticks(lo: float, hi: float) -> Iterator[tuple[float, str]]:
    """Yield (value, label) of 3 to 8 round values between the ends of an axis.

    Their step is 1, 2 or 5 times a power of ten; labels have the decimals that it needs.
    """
    min_step = (hi - lo) / 8  # more than 8 labels would not fit
    power_of_ten = 10.0 ** math.floor(math.log10(min_step))  # at most `min_step`
    round_steps = (power_of_ten, 2 * power_of_ten, 5 * power_of_ten)
    step = next((step for step in round_steps if step >= min_step), 10 * power_of_ten)
    exponent = math.floor(math.log10(step) + 1e-9)  # the log of 0.001 may be a little below -3
    decimals = max(0, -exponent)

    margin = 0.03 * (hi - lo)  # a label nearer to an end would be cut off
    first_index = math.ceil((lo + margin) / step)
    last_index = math.floor((hi - margin) / step)
    for index in range(first_index, last_index + 1):
        value = index * step
        yield value, f"{value:.{decimals}f}"


def _curve(samples_ms: Float64Array, axis: _Axis, colour: str) -> str:
    """Draw the histogram of an engine's iterations as steps, scaled to its own peak."""
    counts, edges = np.histogram(samples_ms, bins=_CURVE_STEPS, range=(axis.lo, axis.hi))
    heights = _CURVE_HEIGHT * counts / max(int(counts.max()), 1)
    edges_x = _CURVE_WIDTH * (edges - axis.lo) / (axis.hi - axis.lo)
    path = f"M0,{_CURVE_HEIGHT}"
    for height, start, end in zip(heights, edges_x[:-1], edges_x[1:], strict=True):
        y = _CURVE_HEIGHT - float(height)  # SVG counts downwards from the top
        path += f"L{start:.1f},{y:.1f}L{end:.1f},{y:.1f}"
    return f'<path class="area {colour}" d="{path}L{_CURVE_WIDTH},{_CURVE_HEIGHT}Z"/>'


_FRONT_HEIGHT, _FRONT_FLOOR_Y = 180, 146  # in px
_EXACT_Y = 18  # of the float model, and of splits without any error
_BEST_SQNR_Y, _WORST_SQNR_Y = _EXACT_Y + 20, _FRONT_FLOOR_Y - 14  # of finite SQNR
_TIME_MARGIN = 0.05  # of FP32's time, beside the fastest and the slowest split


def front_figure(front: Sequence[SplitRow]) -> str:
    """Draw the splits of a search: time across, SQNR of the worst slice up, the built one larger.

    A split says which layers are int8 and which float; a slice is the part of an output that is
    compared by itself. The float model is drawn at time 1. "" for fewer than two splits with
    finite figures.
    """
    splits = [
        split for split in front if math.isfinite(split.time) and not math.isnan(split.sqnr_db)
    ]
    if len(splits) < 2:
        return ""

    # both axes with their ticks
    time_axis = _time_axis(splits)
    sqnr_axis = _sqnr_axis(splits)
    body = _floor_line(_FRONT_FLOOR_Y)
    for value, label in _ticks(time_axis.lo, time_axis.hi):
        body += _text("tick", time_axis.percent(value), str(_FRONT_FLOOR_Y + 15), label)
    for value, label in _ticks(sqnr_axis.lo, sqnr_axis.hi):
        y = f"{sqnr_axis.position(value):.1f}"
        body += f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        body += _text("", "0", y, f"{label} dB")
    body += _text("end", "100%", str(_FRONT_HEIGHT - 3), "time, FP32 = 1")

    # a point for the float model and each split, of a class in the page's style
    body += _front_point("time", time_axis.percent(1.0), _EXACT_Y, "FP32", is_left=True)
    for split in splits:
        y_position: float = _EXACT_Y  # of an infinite SQNR: the outputs equal the float model's
        if math.isfinite(split.sqnr_db):
            y_position = sqnr_axis.position(split.sqnr_db)
        kind = "kept" if split.taken else "tried"  # taken: it was built
        # names are left and right in turn, so that points above each other do not hide them
        is_left = split.number % 2 == 1
        x = time_axis.percent(split.time)
        body += _front_point(kind, x, y_position, str(split.number), is_left=is_left)
    return (
        f'<svg class="wide" width="100%" height="{_FRONT_HEIGHT}" role="img">'
        f"<title>Time and SQNR of the splits</title>{body}</svg>"
    )


def _time_axis(splits: Sequence[SplitRow]) -> _Axis:
    """Return the axis of time, which holds FP32's time, 1, and those of the splits."""
    times = [1.0, *(split.time for split in splits)]
    return _Axis(min(times) - _TIME_MARGIN, max(times) + _TIME_MARGIN)


def _sqnr_axis(splits: Sequence[SplitRow]) -> _Axis:
    """Return the axis of finite SQNR; its length is negative, since y grows downwards."""
    finite_db = [split.sqnr_db for split in splits if math.isfinite(split.sqnr_db)]
    worst_db = min(finite_db, default=0.0)
    best_db = max([*finite_db, worst_db + 1])  # an axis needs a length
    return _Axis(worst_db, best_db, start=_WORST_SQNR_Y, length=_BEST_SQNR_Y - _WORST_SQNR_Y)


def _front_point(kind: str, x: str, y: float, name: str, *, is_left: bool) -> str:
    """Draw a point with its name, on the left or the right of it.

    `kind`: its class in the page's style; "kept" is the split that was built.
    """
    radius = 7 if kind == "kept" else 4
    label = _text("end name", "-10", "4", name) if is_left else _text("name", "10", "4", name)
    circle = f'<circle class="{kind}" r="{radius}"/>'
    return f'<svg x="{x}" y="{y:.1f}" overflow="visible">{circle}{label}</svg>'


def sweep_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Return (heads, rows): p50 and items per second of every engine by batch.

    All engines are measured at the same batches. The batch with the most items per second is
    marked for each. There are no rows if no engine was measured at several batches.
    """
    heads = ["batch"]
    cells_by_batch = defaultdict[int, list[str]](list)
    for engine in engines:
        if not engine.sweep:
            continue
        heads.append(engine.label)
        best_row = max(engine.sweep, key=lambda row: row.items_qps)
        for row in engine.sweep:
            mark = "best: " if row is best_row else ""
            timing = row.latency.latency  # by the device's clock, as CPU time, or the host's clock
            p50 = figures.milliseconds(timing.p50)
            cells_by_batch[row.batch].append(f"{mark}{p50}, {figures.rate(row.items_qps)}")
    rows = [[str(batch), *cells] for batch, cells in cells_by_batch.items()]
    return heads, rows
