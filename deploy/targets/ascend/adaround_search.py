"""One layer's AdaRound, from what was observed of it to integers."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.ada_statistics import Rounded, RoundedOf, Targets
from calibrators.amct.adaround import AdaParams, AdaProblem, joined, nearest, output_error, searched
from calibrators.amct.kl_scale import kl_scale
from deploy.calibration.observation import Observed
from deploy.machine import default_threads
from deploy.progress import Step, phase
from deploy.targets.ascend.weight_rounding import AdaStep, Float32Array


def settle(step: AdaStep, weight: Float32Array, observed: Observed, *, place: str) -> Rounded:
    """What a layer is rounded to, searched now unless it is known.

    Args:
        step: the layer.
        weight: its weight, balanced, output channels first.
        observed: holds what the step wants.
        place: of the step among the others, in words.

    Raises:
        CalibrationError: weights or outputs that are too large.
    """
    found = observed.of(step.inputs)
    assert isinstance(found, Rounded)
    if found.integers is None:
        targets = observed.of(step.targets)
        assert isinstance(targets, Targets)
        statistic = step.inputs.statistic
        assert isinstance(statistic, RoundedOf)
        scale = kl_scale(weight, channel_wise=statistic.scales > 1)
        problem = _problem(step, weight.reshape(statistic.shape), scale, found, targets)
        with phase(f"AdaRound {place}", _steps(problem, step.params), "steps") as made:
            integers = joined(problem, _beside(problem, step.params, made))
        errors = output_error(problem, nearest(problem)), output_error(problem, integers)
        found.keep(integers, scale, errors)
    return found


def _problem(
    step: AdaStep, weight: Float32Array, scale: Float32Array, found: Rounded, targets: Targets
) -> AdaProblem:
    groups, rows, _ = weight.shape
    wide = np.broadcast_to(scale, groups * rows) if scale.size == 1 else scale
    outputs = targets.taken()
    return AdaProblem(
        weight=weight,
        scale=np.asarray(wide, np.float32).reshape(groups, rows, 1),
        inputs=found.taken(),
        targets=outputs.reshape(len(outputs), groups, rows),
        bias=step.bias,
        activation=step.activation,
        share=targets.share,
    )


def _steps(problem: AdaProblem, params: AdaParams) -> int:
    return len(problem.blocks()) * params.num_iteration


def _beside(problem: AdaProblem, params: AdaParams, made: Step) -> list[NDArray[np.int8]]:
    """The blocks of a problem, searched in threads that end where the run does."""
    over = Event()

    def step() -> None:
        if over.is_set():
            raise InterruptedError("the run has ended")
        made()

    with ThreadPoolExecutor(default_threads()) as pool:
        try:
            jobs = [pool.submit(searched, part, params, step=step) for part in problem.blocks()]
            ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for error in filter(None, (job.exception() for job in ended)):
                raise error
            return [job.result() for job in jobs]
        except BaseException:
            over.set()
            raise


def left(roundings: Iterable[Rounded]) -> tuple[float, float] | None:
    """(least, greatest) share of the nearest codes' error that AdaRound leaves to a layer."""
    shares = [after / before for before, after in (r.errors for r in roundings) if before > 0]
    return (min(shares), max(shares)) if shares else None
