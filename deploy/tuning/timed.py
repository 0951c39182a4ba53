"""The likely splits, timed beside the float model; of them the one of least cost.

Float is the model as it would be written, which may be faster than it was given; a speed-up that is
asked for is meant beside the latter. On a machine that others use, float may never have had it
alone, and then int8 seems to win more than all its kernels do: so much is not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.metrics.latency import OVERHEAD_MS
from deploy.tuning.clock import quickest_of
from deploy.tuning.plan_file import TIMED
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial
from deploy.tuning.usable import Told
from deploy.tuning.wish import Tuning

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

TELLING_US = 250.0  # of the float model: kernels of a smaller one are the runtime's own overhead
_DEARER = 1.5  # noise beside time that was measured whole: what it buys is sure
_BELIEVED = 0.8  # of the time that the kernels tell: a clock that says less was disturbed in float
_SLOWER = 1.02  # times float's time: int8 that is slower than this gains nothing


def by_the_clock(
    search: Search,
    likely: Sequence[Trial],
    samples: Sequence[Mapping[str, Array]],
    *,
    written: Callable[[Trial], onnx.ModelProto],
    given: onnx.ModelProto,
    wish: Tuning,
    threads: int,
) -> tuple[Trial, Told]:
    """The split to be built, or the float model, and what was timed.

    Args:
        search: that ended.
        likely: splits, the likeliest first.
        samples: that are run in turn.
        written: the model of a split as it would be deployed.
        given: the float model as the user gave it.
        wish: how fast it is to be, and how near.
        threads: threads inside one operator.
    """
    every = [written(trial) for trial in (*likely, search.all_in_float)]
    asked = [given] if wish.min_speedup > 1 else []
    found = quickest_of([*every, *asked], samples, threads=threads)
    times, whole = found[: len(likely)], found[len(likely)]
    real = _believed(search, likely, [own / whole for own in times])
    held = [trial for trial in real if wish.max_loss is None or trial.loss <= wish.max_loss]
    chosen = min(held or real[:1], key=lambda trial: trial.cost(_DEARER * search.weight))
    most = max(_SLOWER, 1 + OVERHEAD_MS / max(whole, TELLING_US / 1e3))
    if asked:
        most = min(most, found[-1] / whole / wish.min_speedup)
    return (search.all_in_float if chosen.time > most else chosen), _told(real)


def _believed(search: Search, likely: Sequence[Trial], shares: Sequence[float]) -> list[Trial]:
    """The splits with the time that they took, as shares of float's, as far as it is believed."""
    least = _BELIEVED * search.prices.too_dear(search.units)
    return [
        replace(trial, time=max(share, least * trial.time))
        for trial, share in zip(likely, shares, strict=True)
    ]


def _told(real: Sequence[Trial]) -> Told:
    return [
        {"what": f"{TIMED}{trial.what}", "sqnr_db": trial.noise.db, "time": trial.time}
        for trial in real
    ]
