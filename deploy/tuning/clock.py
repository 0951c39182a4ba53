"""How long a whole model takes, timed alone: the quickest of a few runs.

Sessions that are open beside each other disturb one another, since the idle threads of one wait for
work without sleeping; and of several runs the quickest is the one that nothing else disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.progress import phase
from deploy.runtimes.ort import OrtSession

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

_WARM = 1
_RUNS = 4  # at least
_SECONDS = 0.15  # at least
_ROUNDS, _MOST_ROUNDS = 4, 12  # over all models: what disturbs the machine for a second
_CALM = 3  # rounds in which no model was quicker than before: the machine was at its best
_PATIENCE = 60.0  # seconds; runs that are so long outlast what disturbs the machine for a moment
_FEWEST = 2  # rounds of models that are slower than that
_QUICKER = 0.98  # of the time before; less is the clock's own noise


def quickest_of(
    models: Sequence[onnx.ModelProto], feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> list[float]:
    """`quickest_ms` of each model, in turn, for as long as another round is quicker.

    On a machine that others use too, a few rounds may all be disturbed, one model's more than
    another's; then a split would be chosen by its neighbours. Where a minute has passed, two rounds
    are enough: a machine that is never calm would take ten minutes for a model of a second.
    """
    best, calm, began = [math.inf] * len(models), 0, time.perf_counter()
    with phase("timing splits", _ROUNDS * len(models), "runs", about=True) as step:
        for done in range(_MOST_ROUNDS):
            late = time.perf_counter() - began > _PATIENCE
            if done >= (_FEWEST if late else _ROUNDS) and (late or calm >= _CALM):
                break
            taken = []
            for model in models:
                taken.append(quickest_ms(model, feeds, threads=threads))
                step()
            quicker = any(new < _QUICKER * old for new, old in zip(taken, best, strict=True))
            calm = 0 if quicker else calm + 1
            best = list(map(min, best, taken))
    return best


def quickest_ms(
    model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]], *, threads: int
) -> float:
    """Milliseconds of one inference, as it would be deployed.

    Args:
        model: float or int8.
        feeds: inputs, used in turn.
        threads: threads inside one operator.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    session = OrtSession.open(model, threads=threads)
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < _WARM + _RUNS or time.perf_counter() - began < _SECONDS:
        start = time.perf_counter()
        session.run(feeds[runs % len(feeds)])
        taken = time.perf_counter() - start
        if runs >= _WARM:
            best = min(best, taken)
        runs += 1
    return best * 1e3
