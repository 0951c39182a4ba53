"""Automatic calibration, from what was observed to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import atomic
from deploy.calibration.observation import Observed
from deploy.targets.ascend.auto import Judge, Searched, rank, search
from deploy.targets.ascend.calibrate import RecordPlan
from deploy.targets.ascend.layers import LayerGraph
from deploy.targets.ascend.models import write_models

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.subject import Subject
    from deploy.targets.ascend.record import LayerRecord

_RANKED = 8  # samples that the ranking looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much may be lost, and with how many threads it is measured.

    Attributes:
        max_loss: of top-1 accuracy where the images have labels, else of the outputs' mean cosine.
        threads: inside one inference.
    """

    max_loss: float = 0.01
    threads: int = 2


def auto_calibrate(
    plan: RecordPlan,
    observed: Observed,
    evaluation: Any,
    *,
    folder: Path,
    subject: Subject,
    budget: Budget | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[Searched, list[Path]]:
    """Search, rank, roll back, write.

    Args:
        plan: the layers and their settled configuration.
        observed: what was observed for it.
        evaluation: feed to judge on, with `labels` or without.
        folder: where the files go.
        subject: the model that the plan is of.
        budget: what may be lost.
        say: told how it goes, a sentence a trial.

    Raises:
        ConfigError, CalibrationError, FeedError, ExportError: as the Ascend target's `build`.
    """
    from deploy.targets.ascend.quant_layer import quantize_layers

    model, graph = plan.model, plan.graph
    found = plan.record(observed)
    layers = quantize_layers(model, graph, found.records)
    with evaluation.samples() as samples:
        ranking = rank(model, layers, islice(samples, _RANKED))
    judge = make_judge(model, graph, evaluation, budget or Budget(), say)
    result = search(found.records, ranking, plan.config, judge)
    return result, _write(result, model, graph, folder, subject)


def make_judge(
    model: onnx.ModelProto,
    graph: LayerGraph,
    evaluation: Any,
    budget: Budget,
    say: Callable[[str], None],
) -> Judge:
    """Judge of a set of int8 layers: accuracy of the fake-quant model against the float one."""
    from deploy.metrics.accuracy import compare
    from deploy.ort import OrtSession
    from deploy.targets.ascend.fake_quant import fake_quant_model
    from deploy.targets.ascend.quant_layer import quantize_layers

    reference = OrtSession.open(model, threads=budget.threads)

    def judge(records: Mapping[str, LayerRecord]) -> tuple[bool, float]:
        if not records:
            return True, 0.0
        made = fake_quant_model(model, quantize_layers(model, graph, records))
        candidate = OrtSession.open(made, threads=budget.threads)
        with evaluation.samples() as samples:
            figures = compare(reference, candidate, samples, labels=evaluation.labels)
        if figures.top1_reference is not None and figures.top1_candidate is not None:
            loss = figures.top1_reference - figures.top1_candidate
        else:
            loss = 1.0 - min(output.cosine_mean for output in figures.outputs)
        good = loss <= budget.max_loss
        say(f"{len(records)} layers in int8: loss {loss:.5f}, {'held' if good else 'too much'}")
        return good, loss

    return judge


def _write(
    result: Searched,
    model: onnx.ModelProto,
    graph: LayerGraph,
    folder: Path,
    subject: Subject,
) -> list[Path]:
    """Ranking, history and config; and models and record where some layer stays in int8."""
    written = [atomic.write_text(folder / file, text) for file, text in result.files().items()]
    if result.records is None:
        return written
    from deploy.targets.ascend.quant_layer import quantize_layers

    layers = quantize_layers(model, graph, result.records)
    models = write_models(model, layers, result.config, result.records, folder, subject)
    return [*written, *models.values()]
