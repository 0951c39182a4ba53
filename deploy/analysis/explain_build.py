"""Explains a build (`explain`): from its files, and by running images through its models.

With images, the float model and a model with the target's numerics each run every image once.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from deploy.analysis.build_reader import (
    load_float_model,
    model_notes,
    path_in_build,
    read_explanation,
    with_stored_preprocess,
)
from deploy.analysis.explanation import (
    Explanation,
    ImageLoss,
    ImageResults,
    TargetExplanation,
)
from deploy.calibration.reference_outputs import open_single_thread
from deploy.errors import ConfigError, did_you_mean
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.preprocess import PreprocessRequest
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit
from deploy.feed.states import OwnStates
from deploy.frontends import LoadedModel
from deploy.frontends.onnx_reader import read_model
from deploy.machine import worker_threads
from deploy.metrics.output_errors import RunningError, sqnr_sort_key
from deploy.metrics.output_form import OutputForm, derive_from_first
from deploy.pipeline.build_options import check_arguments, open_torch_module
from deploy.tasks import Metric
from deploy.tasks.rows import Outputs, batch_length, split_batches
from deploy.terminal import phase, with_progress

if TYPE_CHECKING:
    from torch import nn

_MAX_IMAGES = 5  # images shown, the worst ones


def _run_images(
    loaded: LoadedModel,
    runnable: Path,
    feed: Feed,
    *,
    is_native: bool,
    threads: int,
    task: str,
) -> ImageResults:
    """Run images through the float model and a target's int8 model; return the worst images.

    Args:
        loaded: the float model.
        runnable: file of an ONNX model with the target's numerics.
        feed: the images.
        is_native: whether ONNX Runtime is the target, so that its int8 kernels are used.
        threads: samples that run in parallel; the result does not depend on it.
        task: name of the task that the user set.

    Raises:
        ConfigError: `runnable` was not made from the float model.
        ModelError: `runnable` is not an ONNX model.
        FeedError: an image that cannot be read.
        BackendError: ONNX Runtime refused one of the models.
    """
    int8_model = read_model(runnable)
    float_session = open_single_thread(loaded.model)
    # for a target with a runtime of its own, the model stands in for the engine
    int8_session = open_single_thread(int8_model, stand_in=not is_native)
    output_names = [spec.name for spec in loaded.outputs if spec.dtype != "str"]
    _check_outputs(output_names, int8_model, runnable)

    def run_float_model(sample: Sample) -> Outputs:
        return _select(float_session.run(sample), output_names)

    # what the outputs mean (slices, task) follows from the float model's outputs for a few images
    metric = Metric(function=None, task=task, declared=loaded.declaration)
    with feed.samples() as samples:
        samples_with_outputs = ((sample, run_float_model(sample)) for sample in samples)
        output_form, _ = derive_from_first(samples_with_outputs, metric)
    worst_images = _WorstImages(output_form, feed.names)
    # a recurrent model is fed the states of its step before, so that one step runs after the other
    own_states = OwnStates(feed.states, drops_ended=True)
    if feed.states:
        threads = 1

    def run_models(_worker: int, number: int, sample: Sample) -> tuple[Outputs, Outputs, Outputs]:
        """Return (inputs, float outputs, int8 outputs) of a sample."""
        sequence = feed.sequence_of(feed.sample_key(number)) if feed.states else 0
        int8_outputs = _select(own_states.run(int8_session, sample, sequence), output_names)
        return sample, run_float_model(sample), int8_outputs

    with phase("running images", len(feed), "samples") as show_progress, feed.samples() as samples:

        def add_sample(_number: int, run_arrays: tuple[Outputs, Outputs, Outputs]) -> None:
            """Add the images of a sample, a batch of one or more.

            `run_arrays`: (inputs, float outputs, int8 outputs), as `run_models` returns them.
            """
            image_count = batch_length(run_arrays[0], loaded.declaration.batch_inputs)
            for image, float_outputs, int8_outputs in split_batches(image_count, *run_arrays):
                if worst_images.count >= feed.count:
                    break  # the last batch is filled up with images that were added before
                worst_images.add(image, float_outputs, int8_outputs)
            show_progress()

        # several samples run at a time, but they are added one after the other, in order
        run_in_order(samples, run_models, add_sample, threads=threads)

    return ImageResults(samples=worst_images.count, images=worst_images.images)


def _check_outputs(names: Sequence[str], candidate: ModelProto, path: Path) -> None:
    """Refuse a target's model without one of the float model's outputs; `path`: its file."""
    candidate_names = {value.name for value in candidate.graph.output}
    if not candidate_names.issuperset(names):
        raise ConfigError(
            f"a target's model must have the same outputs as the float model, got {path} with"
            f" {sorted(candidate_names)} for {names}; name the model it was built from with --model"
        )


def _select(arrays: Outputs, names: Sequence[str]) -> Outputs:
    """Return the arrays of these names, as far as there are any."""
    return {name: arrays[name] for name in names if name in arrays}


class _WorstImages:
    """The images of lowest SQNR so far.

    Attributes:
        count: number of images so far.
    """

    def __init__(self, output_form: OutputForm, names: Sequence[str]) -> None:
        """Start without images.

        Args:
            output_form: slices and task of the outputs, by which images are measured.
            names: of all images, in the order in which they are added.
        """
        self._output_form = output_form
        self._names = names
        self._worst: list[tuple[float, ImageLoss]] = []  # (rank, loss), the lowest rank first
        self.count = 0

    @property
    def images(self) -> tuple[ImageLoss, ...]:
        """The images, the worst first."""
        return tuple(loss for _, loss in self._worst)

    def add(self, inputs: Outputs, reference: Outputs, candidate: Outputs) -> None:
        """Add one image."""
        rank_and_loss = self._measure(inputs, reference, candidate)
        insort(self._worst, rank_and_loss, key=itemgetter(0))  # equal ones in the order of images
        del self._worst[_MAX_IMAGES:]
        self.count += 1

    def _measure(
        self, inputs: Outputs, reference: Outputs, candidate: Outputs
    ) -> tuple[float, ImageLoss]:
        """Return (rank, loss) of an image; the worst image has the lowest rank.

        Images are ranked by the SQNR of their worst output slice. If the outputs have no slices,
        they are ranked by the task's figure, a share that is 1 if both models predict the same.

        Args:
            inputs: inputs of one image, by name.
            reference: the float model's outputs for it.
            candidate: the int8 model's outputs for it.
        """
        worst_label, worst_db = self._find_worst_slice(inputs, reference, candidate)
        rank = sqnr_sort_key(worst_db) if worst_label else math.inf
        task_text = ""
        if self._output_form.task is not None:
            tally = self._output_form.task.tally()
            tally.add(inputs, reference, candidate)
            figure = tally.result()
            if figure is not None:
                task_text = figure.count  # a text, such as "84 of 88"
                if not worst_label and not math.isnan(figure.value):
                    rank = figure.value
        name = self._names[self.count]  # as many images were added before this one
        return rank, ImageLoss(name=name, part=worst_label, sqnr_db=worst_db, task=task_text)

    def _find_worst_slice(
        self, inputs: Outputs, reference: Outputs, candidate: Outputs
    ) -> tuple[str, float]:
        """Return (label, SQNR in dB) of the output slice of lowest SQNR; ("", NaN) without slices.

        Args:
            inputs: inputs of one image, by name.
            reference: the float model's outputs for it.
            candidate: the int8 model's outputs for it.
        """
        worst_label = ""
        worst_db = math.nan
        for output_slice in self._output_form.parts:
            error = RunningError(output_slice.label)
            # the values of both models are weighted by the scores of the float model (`reference`)
            error.add(
                self._output_form.slice_values(output_slice, reference, inputs, reference),
                self._output_form.slice_values(output_slice, candidate, inputs, reference),
            )
            slice_db = error.result().sqnr_db
            if not worst_label or sqnr_sort_key(slice_db) < sqnr_sort_key(worst_db):
                worst_label = output_slice.label
                worst_db = slice_db
        return worst_label, worst_db


@check_arguments
@with_progress
def explain(
    folder: Path | str,
    *,
    targets: str | Sequence[str] | None = None,
    images: FeedSource | Dataset | None = None,
    model: Path | str | ModelProto | nn.Module | None = None,
    preprocess: PreprocessRequest = None,
    limit: Limit = None,
    skip_bad: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Explanation:
    """Explain which layers of a build lose accuracy, which stay in float, and why.

    Args:
        folder: output folder of the build, or its report.json.
        targets: names of some targets, or one name; None explains all.
        images: run the float model and the int8 models on these, and report the worst images.
        model: the float model, a file or in memory, or the PyTorch module that was built; None
            uses the one in the report.
        preprocess: preprocessing of images, or some of its options; None uses the build's.
        limit: largest number of images, or a `Choice` of them.
        skip_bad: skip unreadable images.
        threads: samples that run in parallel; the result does not depend on it.
        progress: report steps that take over two seconds on stderr.

    Raises:
        ConfigError: no build, a broken report or plan, a target that the build does not have.
        ModelError, FeedError, BackendError: from running images.
    """
    explanation = read_explanation(Path(folder))
    explained_targets = _select_targets(explanation, targets)
    if images is None:
        return replace(explanation, targets=explained_targets)

    # the float model, and the images prepared as in the build
    dataset = to_dataset(images, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    if model is not None:
        model, source = open_torch_module(model, dataset.source)
        dataset = replace(dataset, source=source)
    report_path = Path(explanation.report)
    loaded = load_float_model(
        explanation.model, report_path, model, shapes=explanation.shapes, flag="--model"
    )
    dataset = with_stored_preprocess(dataset, explanation.preprocess, report_path)
    feed = loaded.open_samples(dataset)
    loaded = loaded.with_inputs(feed.specs)

    # run the images through the models of each target
    targets_with_results = []
    for target in explained_targets:
        if target.runnable is None:
            note = "no file of it can be run in ONNX Runtime"
            results = ImageResults(samples=0, notes=(note,))
        else:
            with phase(target.name):
                results = _run_images(
                    loaded,
                    path_in_build(target.runnable, report_path),
                    feed,
                    is_native=target.native,
                    threads=worker_threads(threads),
                    task=target.set_task,
                )
            notes = (*model_notes(report_path, loaded), *feed.notes)
            results = replace(results, notes=notes)
        # `held` are the results of the user's images
        targets_with_results.append(replace(target, held=results))
    return replace(explanation, targets=tuple(targets_with_results))


def _select_targets(
    explanation: Explanation, chosen_names: str | Sequence[str] | None
) -> tuple[TargetExplanation, ...]:
    """Return the targets to explain.

    Args:
        explanation: the build with all its targets.
        chosen_names: names of targets, or one name; None for all.

    Raises:
        ConfigError: the build has no such target.
    """
    if chosen_names is None:
        return explanation.targets
    if isinstance(chosen_names, str):
        chosen_names = [chosen_names]
    built_names = [target.name for target in explanation.targets]
    for name in chosen_names:
        if name in built_names:
            continue
        hint = did_you_mean(name, built_names, f"it has {', '.join(built_names) or 'none'}")
        raise ConfigError(
            f"a target to explain must be one of the build, got {name!r} for"
            f" {explanation.report}; {hint}"
        )
    return tuple(target for target in explanation.targets if target.name in chosen_names)
