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

Histograms of the worst tensors and their clip ranges::

             : |  '  '          : : clip range    ' ranges by other searches
       .:|:. : |.               bars: counts on a logarithmic scale
    ___|||||||:||:|:|__.__
      0       lo        hi

Trials of a search, side by side::

    |##############------|   bar: SQNR of the worst output slice, relative to the best
    |____________        |   line: time, relative to the longest

Weights by channel::

    |  | |      || |         largest |w| of each channel, logarithmic, relative to the
    |||| |||..|||||||..|     largest of the weight

Batch sweep: p50 and throughput of engines by batch, as a table and a chart.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from string import ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from deploy.report import figures
from deploy.report.blocks import breakable
from deploy.report.parts import BatchRow, EngineRow, HistogramPart, TensorRow, TrialRow, WeightRow

_BAR_WIDTH, _BAR_HEIGHT = 190, 16


def range_bar(row: TensorRow) -> str:
    """Draw a tensor's observed values and the range that the calibration keeps."""
    lo, hi = min(row.observed_min, row.lo, 0.0), max(row.observed_max, row.hi, 0.0)
    if not (math.isfinite(lo) and math.isfinite(hi)) or hi <= lo:
        return ""

    def x(value: float) -> float:
        return 1 + (_BAR_WIDTH - 2) * (value - lo) / (hi - lo)

    middle = _BAR_HEIGHT / 2
    body = (
        f'<line class="seen" x1="{x(row.observed_min):.1f}" x2="{x(row.observed_max):.1f}"'
        f' y1="{middle}" y2="{middle}"/>'
        f'<rect class="kept" x="{x(row.lo):.1f}" width="{max(x(row.hi) - x(row.lo), 1):.1f}"'
        f' y="4" height="{_BAR_HEIGHT - 8}" rx="2"/>'
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="1" y2="{_BAR_HEIGHT - 1}"/>'
    )
    label = (
        f"{row.name}: values {figures.real(row.observed_min)} to {figures.real(row.observed_max)},"
        f" kept {figures.real(row.lo)} to {figures.real(row.hi)}"
    )
    return drawing(_BAR_WIDTH, _BAR_HEIGHT, label, body, "bar")


def drawing(width: int, height: int, label: str, body: str, kind: str, *, desc: str = "") -> str:
    """Return an SVG of fixed size, with texts for screen readers."""
    description = f"<desc>{escape(desc)}</desc>" if desc else ""
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"><title>{escape(label)}</title>{description}{body}</svg>'
    )


_TRIAL_WIDTH, _TRIAL_HEIGHT = 120, 16


def trial_bar(trial: TrialRow, best: float, longest: float) -> str:
    """Draw SQNR and time of one trial; exact has full length, below 0 dB or NaN none."""
    label = f"{trial.what}: {figures.decibels(trial.sqnr_db)}, time {trial.time:.2f} of FP32"
    body = "".join(
        f'<rect class="{kind}" width="{_TRIAL_WIDTH * _trial_share(value, most):.1f}" y="{y}"'
        f' height="{high}"/>'
        for kind, value, most, y, high in (
            ("kept" if trial.taken else "tried", trial.sqnr_db, best, 2, 8),
            ("time", trial.time, longest, 12, 2),
        )
    )
    return drawing(_TRIAL_WIDTH, _TRIAL_HEIGHT, label, body, "bar")


def _trial_share(value: float, most: float) -> float:
    if value == math.inf:
        return 1.0
    return max(value / most, 0.0) if most > 0 and not math.isnan(value) else 0.0


_STRIP_WIDTH, _STRIP_HEIGHT = 120, 26
_DECADES = 4  # range of a strip's logarithmic scale, below the largest


def weight_strip(row: WeightRow) -> str:
    """Draw a weight's channels as bars on a logarithmic scale; "" if not in the row."""
    if not row.strip or not row.largest > 0:
        return ""
    step = _STRIP_WIDTH / len(row.strip)
    path = "".join(
        f"M{place * step:.1f},{_STRIP_HEIGHT}v-{_STRIP_HEIGHT * _height(value, row.largest):.1f}"
        f"h{max(step - 0.4, 0.6):.1f}V{_STRIP_HEIGHT}z"
        for place, value in enumerate(row.strip)
    )
    ends = f"{figures.real(row.least)} to {figures.real(row.largest)}"
    runs = "" if len(row.strip) == row.channels else "; each bar is the least of a run of channels"
    label = f"{row.node}: largest |w| of {row.channels} channels, {ends}{runs}"
    return drawing(_STRIP_WIDTH, _STRIP_HEIGHT, label, f'<path class="kept" d="{path}"/>', "bar")


def _height(value: float, largest: float) -> float:
    """Return a value's height, 0 to 1, on the logarithmic scale."""
    return max(1 + math.log10(value / largest) / _DECADES, 0.02) if value > 0 else 0.0


Float64Array = NDArray[np.float64]

LATENCY_CAPTION = (
    "Latency of every measured iteration; engines ran in turn, so noise of the machine falls on all"
    " of them. Each curve is scaled to its own peak; the dashed line is the p50."
)
_HEIGHT, _TOP, _BOTTOM = 230, 34, 34  # in px
_FLOOR = _HEIGHT - _BOTTOM
_ACROSS = 1000  # units of the inner drawing's width
_BINS = 90
_WIDEST = 2.5  # times the p50, so that a long tail does not squeeze the rest
_COLOURS = 4  # classes c0..c3 of the page's style
_ROOM = 5  # number of tick labels that fit on a narrow screen
_LEVELS = 2  # heights of the letters, for lines near each other


def latency_figure(engines: Sequence[EngineRow], *, on_device: bool = False) -> str:
    """Draw the distribution of all measured iterations of the engines on the CPU or on a device.

    Each p50 is marked; "" without samples. The axis ends a little over the slowest engine's 99th
    percentile, or at `_WIDEST` times its p50 if that is less; iterations beyond are counted.
    """
    drawn = [
        (f"c{index % _COLOURS}", engine, np.asarray(engine.latency.samples_ms, np.float64))
        for index, engine in enumerate(engines)
        if engine.on_device == on_device and engine.latency and engine.latency.samples_ms
    ]
    if not drawn:
        return ""
    lo, hi = _axis_ends([(engine.p50_ms, values) for _, engine, values in drawn])
    beyond = sum(int((values > hi).sum()) for _, _, values in drawn)
    curves = "".join(_curve(values, lo, hi, colour) for colour, _, values in drawn)
    marks, legend = [], []
    for place, (colour, engine, _) in enumerate(drawn):
        over, at = divmod(place, len(ascii_uppercase))
        letter = ascii_uppercase[at] * (over + 1)  # A to Z, then AA to ZZ
        x = f"{100 * _share(engine.p50_ms, lo, hi):.2f}%"
        y = 12 + 14 * (place % _LEVELS)
        marks.append(
            f'<line class="median {colour}" x1="{x}" x2="{x}" y1="{y + 3}" y2="{_FLOOR}"/>'
            f'<text class="tick name {colour}" x="{x}" y="{y}">{letter}</text>'
        )
        label = f"{escape(engine.label)} <b>p50 {figures.milliseconds(engine.p50_ms)}</b>"
        legend.append(f'<li><i class="{colour}">{letter}</i> {label}</li>')
    return (
        f'<ul class="legend">{"".join(legend)}</ul>'
        f'<svg class="wide" width="100%" height="{_HEIGHT}" role="img">'
        f"<title>Distribution of latency</title>{_axis(lo, hi)}"
        f'<svg y="{_TOP}" width="100%" height="{_FLOOR - _TOP}" preserveAspectRatio="none"'
        f' viewBox="0 0 {_ACROSS} {_FLOOR - _TOP}">{curves}</svg>'
        f"{''.join(marks)}{_unit(beyond)}</svg>"
    )


def _axis_ends(samples: Sequence[tuple[float, Float64Array]]) -> tuple[float, float]:
    lo = min(float(values.min()) for _, values in samples)
    hi = max(min(float(np.quantile(v, 0.99)), _WIDEST * p50) for p50, v in samples)
    margin = 0.06 * (hi - lo) or 0.05 * hi or 1.0
    return max(0.0, lo - margin), float(hi + margin)


def _share(value: float, lo: float, hi: float) -> float:
    """Return a value's position as a share of the width."""
    return (min(value, hi) - lo) / (hi - lo)


def _axis(lo: float, hi: float) -> str:
    """Draw the floor and its ticks; a narrow screen hides every second of many labels."""
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{_FLOOR}" y2="{_FLOOR}"/>']
    ticks = list(_ticks(lo, hi))
    for place, (value, text) in enumerate(ticks):
        x = f"{100 * _share(value, lo, hi):.2f}%"
        kind = "tick odd" if place % 2 and len(ticks) > _ROOM else "tick"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_FLOOR}"/>')
        parts.append(f'<text class="{kind}" x="{x}" y="{_FLOOR + 15}">{text}</text>')
    return "".join(parts)


def _unit(beyond: int) -> str:
    note = "ms per inference"
    if beyond:
        note += f"; {figures.count(beyond, 'slower iteration')} not drawn"
    return f'<text class="end" x="100%" y="{_HEIGHT - 3}">{note}</text>'


def _ticks(lo: float, hi: float) -> Iterator[tuple[float, str]]:
    """Yield 3 to 8 round values inside the axis, with the decimals their step needs."""
    raw = (hi - lo) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    edge = 0.03 * (hi - lo)  # a label nearer to an end would be cut off
    for index in range(math.ceil((lo + edge) / step), math.floor((hi - edge) / step) + 1):
        yield index * step, f"{index * step:.{decimals}f}"


def _curve(values: Float64Array, lo: float, hi: float, colour: str) -> str:
    """Draw a step outline of the shares of iterations, scaled to its own peak."""
    counts, edges = np.histogram(values, bins=_BINS, range=(lo, hi))
    floor = _FLOOR - _TOP
    heights = floor * counts / max(int(counts.max()), 1)
    across = _ACROSS * (edges - lo) / (hi - lo)
    points = [f"M0,{floor}"]
    for height, left, right in zip(heights, across[:-1], across[1:], strict=True):
        y = floor - float(height)
        points.append(f"L{left:.1f},{y:.1f}L{right:.1f},{y:.1f}")
    points.append(f"L{_ACROSS},{floor}Z")
    return f'<path class="area {colour}" d="{"".join(points)}"/>'


_HIST_WIDTH, _HIST_HEIGHT, _HIST_TOP, _HIST_FLOOR = 320, 104, 14, 86
_SIDE = 6  # margin beside the axis
_HIST_ROOM = 0.3  # a clip line further outside the observed range, relative to it, is not drawn


def histogram_figure(row: TensorRow, part: HistogramPart) -> str:
    """Return a tensor's name, its histogram, and its ranges as text."""
    caption = breakable("; ".join(_words(row, part)))
    name = f"<b>{breakable(row.name)}</b>"
    return f"<figure>{name}{histogram(row, part)}<figcaption>{caption}</figcaption></figure>"


def _words(row: TensorRow, part: HistogramPart) -> Iterator[str]:
    yield f"kept {_span(row.lo, row.hi)} by {row.method}"
    if row.clipped is not None:
        yield f"{figures.percent(row.clipped)} clipped"
    if row.sqnr_db is not None:
        yield figures.decibels(row.sqnr_db)
    if part.others:
        yield "others: " + ", ".join(f"{o.method} {_span(o.lo, o.hi)}" for o in part.others)


def _span(lo: float, hi: float) -> str:
    if lo == -hi:
        return f"\N{PLUS-MINUS SIGN}{figures.real(hi)}"
    return f"{figures.real(lo)} to {figures.real(hi)}"


def histogram(row: TensorRow, part: HistogramPart) -> str:
    """Draw one tensor's bars with the ends of its range; "" if they are not finite."""
    # the axis holds the observed values, zero, and the ends of the range unless they are far
    left, right = min(row.observed_min, 0.0), max(row.observed_max, 0.0)
    far = _HIST_ROOM * (right - left)
    lo, hi = max(row.lo, left - far), min(row.hi, right + far)
    lo = min(left, lo) if lo == row.lo else left
    hi = max(right, hi) if hi == row.hi else right
    axis = (lo, hi) if hi > lo else (lo - 1.0, hi + 1.0)
    if not all(map(math.isfinite, axis)):
        return ""

    def x(value: float) -> float:
        return _SIDE + (_HIST_WIDTH - 2 * _SIDE) * (value - axis[0]) / (axis[1] - axis[0])

    body = (
        *_bars(row, part, x),
        f'<line class="axis" x1="0" x2="{_HIST_WIDTH}" y1="{_HIST_FLOOR}" y2="{_HIST_FLOOR}"/>',
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{_HIST_FLOOR}"'
        f' y2="{_HIST_FLOOR + 4}"/>',
        *(_bars_line("clip", x(end), 2, _HIST_FLOOR) for end in _inside((row.lo, row.hi), axis)),
        *(
            _bars_line("other", x(end), 0, _HIST_TOP - 4)
            for other in part.others
            for end in _inside((other.lo, other.hi), axis)
        ),
        f'<text x="0" y="{_HIST_HEIGHT - 3}">{figures.real(axis[0])}</text>',
        f'<text class="end" x="{_HIST_WIDTH}" y="{_HIST_HEIGHT - 3}">'
        f"{figures.real(axis[1])}</text>",
    )
    label = f"Histogram of {row.name}"
    return drawing(
        _HIST_WIDTH, _HIST_HEIGHT, label, "".join(body), "hist", desc=_description(row, part)
    )


def _inside(ends: tuple[float, float], axis: tuple[float, float]) -> Iterator[float]:
    """Return the distinct ends that lie on the axis."""
    return (end for end in dict.fromkeys(ends) if axis[0] <= end <= axis[1])


def _bars(row: TensorRow, part: HistogramPart, x: Callable[[float], float]) -> Iterator[str]:
    """Draw kept and clipped values; a bar that crosses a range's end is split there."""
    tallest = math.log1p(max(part.counts))
    paths: dict[str, list[str]] = {"kept": [], "cut": []}
    for place, count in enumerate(part.counts):
        if not count:
            continue
        top = f"{_HIST_FLOOR - (_HIST_FLOOR - _HIST_TOP) * math.log1p(count) / tallest:.1f}"
        left = part.start + place * part.width
        for kind, start, end in _pieces(row, left, left + part.width):
            width = max(x(end) - x(start), 1.0)
            paths[kind].append(f"M{x(start):.1f},{_HIST_FLOOR}V{top}h{width:.1f}V{_HIST_FLOOR}z")
    return (f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items() if path)


def _pieces(row: TensorRow, left: float, right: float) -> Iterator[tuple[str, float, float]]:
    """Split a bar into kept and clipped pieces, limited to observed values."""
    left, right = max(left, row.observed_min), min(right, row.observed_max)
    if left >= right:  # all its values are equal
        yield "kept" if row.lo <= right <= row.hi else "cut", right, right
        return
    ends = min(row.lo, 0.0), max(row.hi, 0.0)  # every quantization grid contains 0
    lo, hi = (min(max(end, left), right) for end in ends)
    pieces = (("cut", left, lo), ("kept", lo, hi), ("cut", hi, right))
    yield from (piece for piece in pieces if piece[1] < piece[2])


def _bars_line(kind: str, x: float, top: int, floor: int) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor}"/>'


def _description(row: TensorRow, part: HistogramPart) -> str:
    """Describe the histogram in a sentence."""
    peak = part.start + (part.counts.index(max(part.counts)) + 0.5) * part.width
    return (
        f"{sum(part.counts):,} values from {figures.real(row.observed_min)} to"
        f" {figures.real(row.observed_max)}, most of them near {figures.real(peak)};"
        f" {_span(row.lo, row.hi)} is kept"
    )


_SW_WIDTH, _SW_HEIGHT = 480, 240
_SW_LEFT, _SW_RIGHT, _SW_TOP, _SW_BOTTOM = 16, 170, 24, 34
_ROW, _LETTERS = 15, 22  # px between names; letters of a name


def sweep_table(engines: Sequence[EngineRow]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: p50 and items per second of every engine by batch, best marked."""
    swept = [engine for engine in engines if engine.sweep]
    rows = [
        [str(row.batch), *(_cell(engine, engine.sweep[place]) for engine in swept)]
        for place, row in enumerate(swept[0].sweep if swept else ())
    ]
    return ["batch", *(engine.label for engine in swept)], rows


def sweep_figure(engines: Sequence[EngineRow]) -> str:
    """Draw throughput over batch, one line per engine; "" for fewer than two batches."""
    swept = [(index, engine) for index, engine in enumerate(engines) if len(engine.sweep) > 1]
    if not swept:
        return ""
    most = max(row.items_qps for _, engine in swept for row in engine.sweep)
    body = [*_sweep_axis([row.batch for row in swept[0][1].sweep])]
    lowest = -math.inf
    for index, engine in sorted(swept, key=lambda one: -one[1].sweep[-1].items_qps):
        colour = f"c{index % _COLOURS}"
        body += _sweep_line(engine, colour, most)
        lowest = max(_y(engine.sweep[-1], most) + 4, lowest + _ROW)
        body.append(
            f'<text class="name {colour}" x="{_SW_WIDTH - _SW_RIGHT + 10}" y="{lowest:.1f}">'
            f"{escape(engine.label[:_LETTERS])}</text>"
        )
    return (
        f'<svg class="wide" viewBox="0 0 {_SW_WIDTH} {_SW_HEIGHT}" width="{_SW_WIDTH}"'
        f' height="{_SW_HEIGHT}" role="img"><title>Throughput by batch</title>{"".join(body)}</svg>'
    )


def _cell(engine: EngineRow, row: BatchRow) -> str:
    mark = "best: " if row is _best(engine) else ""
    p50 = figures.milliseconds(row.latency.latency.p50)
    return f"{mark}{p50}, {figures.rate(row.items_qps)}"


def _best(engine: EngineRow) -> BatchRow:
    return max(engine.sweep, key=lambda row: row.items_qps)


def _x(batch: int, batches: Sequence[int]) -> float:
    """Return the x of a batch on a logarithmic axis."""
    low, high = math.log2(batches[0]), math.log2(batches[-1])
    return _SW_LEFT + (_SW_WIDTH - _SW_LEFT - _SW_RIGHT) * (math.log2(batch) - low) / (high - low)


def _y(row: BatchRow, most: float) -> float:
    floor = _SW_HEIGHT - _SW_BOTTOM
    return floor - (floor - _SW_TOP) * row.items_qps / most


def _sweep_axis(batches: Sequence[int]) -> Iterator[str]:
    floor = _SW_HEIGHT - _SW_BOTTOM
    right = _SW_WIDTH - _SW_RIGHT
    yield f'<line class="axis" x1="{_SW_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    for batch in batches:
        x = _x(batch, batches)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_SW_TOP}" y2="{floor}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{floor + 16}">{batch}</text>'
    yield f'<text class="end" x="{_SW_WIDTH - _SW_RIGHT}" y="{_SW_HEIGHT - 3}">batch</text>'


def _sweep_line(engine: EngineRow, colour: str, most: float) -> Iterator[str]:
    """Draw the engine's points joined by a line, the best one larger."""
    batches = [row.batch for row in engine.sweep]
    points = [(_x(row.batch, batches), _y(row, most)) for row in engine.sweep]
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<path class="{colour}" d="M{path}" fill="none" stroke-width="2"/>'
    best = _best(engine)
    for row, (x, y) in zip(engine.sweep, points, strict=True):
        title = f"{engine.label}, batch {row.batch}: {figures.rate(row.items_qps)}"
        radius = 6 if row is best else 3
        yield (
            f'<circle class="area {colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(title)}</title></circle>"
        )
