"""The best splits of a greedy search that is judged on the held-back samples themselves.

No search of a build may do so: its result is an upper bound for what a choice of layers can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
from task_scores import worst_part_db
from trial import Trial

from calib8 import calibrate
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.method import Choices, Method
from deploy.runtimes.ort import OrtSession, cpu_kind
from deploy.targets.base import BuildRequest
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.tuning.plan_file import read_plan
from deploy.tuning.prices import CPUS, count_prices, group_units
from deploy.tuning.repairs.apply import trial_builder

_SENSITIVE = 20  # layers that may become float
_JUDGED = 100

Figure = tuple[float, float]  # score of the task, SQNR in dB of the worst part


def best_splits(
    trial: Trial, samples: list[dict[str, object]], plan: Path, most: int
) -> Iterator[tuple[str, Path, float]]:
    """Yield (layers in float, model file, score), with one more of the sensitive layers each time.

    Each layer is the one whose score on the held-back samples is best, and then the SQNR. Nodes
    between float layers are float too where that costs less.

    Args:
        trial: the model, its held-back samples and their float outputs.
        samples: those that calibrate.
        plan: a build's own plan, whose range method is used.
        most: layers to choose, at most.
    """
    method = read_plan(plan).targets["onnxruntime"].choices.method or Method.of()
    target = OnnxRuntime()
    found = calibrate(trial.model, samples, targets=(target,))
    request = BuildRequest(
        folder=trial.folder,
        manifest={},
        subject=found.subject,
        ranges=found.ranges,
        feed=found.feed,
        evaluation_set=make_evaluation_set(found.feed, found.subject.model, _JUDGED),
    )
    units = group_units(request.model, target.plan(request.model, ()).decisions)
    rounded = trial_builder(target, request, rounds_weights=True)

    def built(floats: frozenset[str], make: Callable[[BuildRequest], onnx.ModelProto]):  # type: ignore[no-untyped-def]
        nodes = dict.fromkeys(units.node_names(floats), "float")
        return make(
            request.with_added_choices(Choices(float_nodes=nodes, method=method, rounded=True))
        )

    every = frozenset(units.members)
    prices = count_prices(request.model, units, trial.held[0], CPUS.get(cpu_kind()))
    assert trial.case.score is not None
    score = trial.case.score(trial.folder)

    def split(pinned: frozenset[str]) -> frozenset[str]:
        return prices.cheapest_float_units(pinned=pinned)

    def figure(floats: frozenset[str]) -> Figure:
        session = OrtSession.open(built(floats, rounded), threads=trial.threads)
        own = [session.run(sample) for sample in trial.held]
        return score(own, trial.reference), worst_part_db(own, trial.reference)[0]

    alone = {layer: figure(every - {layer})[1] for layer in units.layers}
    left = sorted(units.layers, key=lambda layer: alone[layer])[:_SENSITIVE]
    pinned: frozenset[str] = frozenset()
    best = figure(split(pinned))
    for number in range(most + 1):
        floats = split(pinned)
        file = trial.folder / f"{trial.name}-best-{number}.onnx"
        onnx.save(built(floats, rounded), file)
        layers = sum(layer in floats for layer in units.layers)
        yield f"best {number} of {_SENSITIVE} layers in float, {layers} in all", file, best[0]
        if number == most or not left:
            return
        figures = {layer: figure(split(pinned | {layer})) for layer in left}
        chosen = max(left, key=lambda layer: figures[layer])
        best, pinned = figures[chosen], pinned | {chosen}
        left.remove(chosen)
