"""How long a whole model takes, timed alone: the quickest of a few runs.

Sessions that are open beside each other disturb one another, since the idle threads of one wait for
work without sleeping; and of several runs the quickest is the one that nothing else disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.ort import OrtSession

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

_WARM = 2
_RUNS = 12  # at least
_SECONDS = 0.25  # at least


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
