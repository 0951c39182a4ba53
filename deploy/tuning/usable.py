"""Whether what is chosen would be good, by the verdict's own limits; if not, a quieter split.

The search weighs noise in dB, the verdict counts boxes, classes and neighbours. So what was chosen
is judged as its engine will be, on the samples that judge::

    least cost -> good?     -> built
               -> unusable? -> the fastest of the quieter splits that is usable, timed -> built
                               none is, or it is slower than float              -> float
               -> doubtful? -> of the quieter splits that keep some of what int8 wins, the one whose
                               time and loss of the task cost least; if less than before -> built

Most choices are clearly good on the first few of these samples, and no others are asked then. Where
the search has cost as many calibrations as it may, the best split so far is taken.

The likely splits, timed beside the float model; of them the one of least cost.

Float is the model as it would be written, which may be faster than it was given; a speed-up that is
asked for is meant beside the latter. On a machine that others use, float may never have had it
alone, and then int8 seems to win more than all its kernels do: so much is not believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from deploy.metrics.latency import OVERHEAD_MS
from deploy.tuning.plan_file import TIMED
from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial, Tuning
from deploy.tuning.timing import quickest_of

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array
    from deploy.tuning.search_samples import Judgement


_TIMED = 3  # splits that are timed
_KEPT = 1 / 3  # of what int8 wins, as a logarithm, at least, where it is usable but doubtful
Told = list[dict[str, str | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How what is to be built is found.

    Attributes:
        choose: one of some trials, the likeliest first, and what was timed for that.
        judge: what the verdict would say of a trial.
        can_go_on: whether another may be judged.
    """

    choose: Callable[[Sequence[Trial]], tuple[Trial, Told]]
    judge: Callable[[Trial], Judgement]
    can_go_on: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What is to be built.

    Attributes:
        trial: of the search.
        told: what was timed.
        unusable: why what costs least is not built, in words; "" where it is.
        doubtful: likewise, where it would have been usable.
    """

    trial: Trial
    told: Told
    unusable: str = ""
    doubtful: str = ""


def settled(search: Search, way: Way, *, or_float: bool) -> Settled:
    """What is to be built, and why not what costs least.

    Args:
        search: that ended.
        way: how trials are timed and judged.
        or_float: whether the float model is built where no split is usable.
    """
    likely = search.likely(_TIMED)
    if search.best_without_float not in likely:
        likely.append(search.best_without_float)
    first, told = way.choose(likely)
    found = way.judge(first)
    likeliest = Settled(trial=first, told=told)
    if found.unusable:
        return _usable(search, way, likeliest, found, or_float=or_float)
    return _surer(search, way, likeliest, found) if found.doubtful else likeliest


def _usable(
    search: Search, way: Way, first: Settled, found: Judgement, *, or_float: bool
) -> Settled:
    """The fastest of the quieter splits that is usable; else the float model, or what there is."""
    why = found.unusable
    quiet = search.quieter(first.trial, lambda one: not way.judge(one).unusable, way.can_go_on)
    if quiet is None:
        return replace(first, trial=search.all_in_float if or_float else first.trial, unusable=why)
    best, told = way.choose([quiet])
    return Settled(trial=best, told=[*first.told, *told], unusable=why)


def _surer(search: Search, way: Way, first: Settled, found: Judgement) -> Settled:
    """A quieter split that costs less by time and by what is lost of the task, if one does."""
    promising = _promising(search, way, first.trial, found)
    if promising is None:
        return first
    trial, judged = promising
    best, told = way.choose([trial])
    told = [*first.told, *told]
    wins = _cost(search, best.time, judged) < _cost(search, first.trial.time, found)
    if not wins or best.time > _slowest(first.trial.time) or best.in_float != trial.in_float:
        return replace(first, told=told)
    return Settled(trial=best, told=told, doubtful=found.doubtful)


def _promising(
    search: Search, way: Way, first: Trial, found: Judgement
) -> tuple[Trial, Judgement] | None:
    """The quieter split that promises to cost least, as judged; None where the first one does."""
    judged: list[tuple[float, Trial, Judgement]] = []

    def good(trial: Trial) -> bool:
        one = way.judge(trial)
        judged.append((_cost(search, trial.time, one), trial, one))
        return not (one.unusable or one.doubtful)

    time = search.time_of(first.in_float)
    search.quieter(first, good, way.can_go_on, within=_slowest(time))
    promised = _cost(search, time, found)
    least, trial, one = min(judged, key=itemgetter(0), default=(promised, first, found))
    return (trial, one) if least < promised else None


def _slowest(time: float) -> float:
    """The time that keeps enough of what this one wins; an engine as slow as float wins nothing."""
    return float(min(time, 1.0) ** _KEPT)


def _cost(search: Search, time: float, found: Judgement) -> float:
    """As the search weighs it, with the task in the place of noise."""
    lost = found.lost.share if found.lost is not None else 1.0
    return math.log(max(time, 1e-6)) + search.weight * lost


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
