"""Explains a build (`explain`): from its files, and by running images through its models.

With images, the float model and a model with the target's numerics each run every image once.
Channel figures are sums over all images, so memory does not grow with their number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from deploy.analysis.build_reader import by_sqnr, path_in_build, path_near_report, read_explanation
from deploy.analysis.explanation import (
    ChannelLoss,
    Explanation,
    ImageLoss,
    ImageResults,
    TargetExplanation,
)
from deploy.errors import CacheError, ConfigError, did_you_mean
from deploy.feed.feed import Dataset, FeedSource, to_dataset
from deploy.feed.parallel import Sample, run_in_order
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Preprocess, PreprocessRequest, apply_user_options
from deploy.feed.samples import Feed
from deploy.files import manifest
from deploy.frontends import LoadedModel, load_float_or_qdq
from deploy.frontends.onnx_reader import read_model
from deploy.graph.edit import copy_with_outputs
from deploy.graph.index import strip_padded_channels
from deploy.machine import worker_threads
from deploy.metrics.layerwise import shared_tensors
from deploy.metrics.output_errors import RunningError, sqnr_db
from deploy.metrics.output_form import OutputForm, derive_form
from deploy.pipeline.build_options import open_torch_module
from deploy.runtimes.ort import OrtSession
from deploy.tasks.rows import Outputs, batch_length, split_batch
from deploy.tasks.slices import form_samples
from deploy.terminal import phase, with_progress
from deploy.tuning.repairs import REPAIRS

if TYPE_CHECKING:
    from torch import nn

IMAGES, TENSORS, CHANNELS = 5, 5, 3  # shown: images, tensors, channels per tensor
_SILENT = 1e-6  # share of a tensor's signal: a channel with less has nothing to lose
_ARRAYS = {".npy", ".npz"}


def run_images(
    loaded: LoadedModel,
    runnable: Path,
    layers: Sequence[str],
    feed: Feed,
    *,
    native: bool,
    threads: int,
    task: str = "",
) -> ImageResults:
    """Run images on one target; return the worst images and channels.

    `layers`: inner tensors, the worst first; channels are measured in the first few. `native`:
    whether ONNX Runtime is the target, so that its int8 kernels are used. `threads`: samples that
    run in parallel; the result does not depend on it. `task`: name of the task that the user set.

    Raises:
        ConfigError: the file belongs to another model.
        ModelError: it is not an ONNX model.
        FeedError: an image that cannot be read.
        BackendError: ONNX Runtime refused one of the models.
    """
    candidate = read_model(runnable)
    shared = shared_tensors(loaded.model, candidate)
    pairs = {name: shared[name] for name in layers[:TENSORS] if name in shared}
    left = _session(copy_with_outputs(loaded.model, pairs), native=True)
    right = _session(copy_with_outputs(candidate, pairs.values()), native=native)
    names = [spec.name for spec in loaded.outputs if spec.dtype != "str"]
    _check_outputs(names, candidate, runnable)
    (one,) = feed.first_samples(1)
    first = feed.first_samples(form_samples(one, _only(left.run(one), names)))
    outputs = [_only(left.run(sample), names) for sample in first]
    images = _Images(derive_form(outputs, inputs=first, task=task))
    channels = {name: ChannelSums() for name in pairs}

    def work(_: int, __: int, sample: Sample) -> tuple[Sample, Outputs, Outputs]:
        return sample, left.run(sample), right.run(sample)

    def take(_: int, ran: tuple[Sample, Outputs, Outputs]) -> None:
        batch = batch_length(ran[0])
        fed, own, others = (split_batch(arrays, batch) for arrays in ran)
        for sample, one, other in zip(fed, own, others, strict=True):
            if images.seen < feed.count:  # the last fixed batch is filled up with the first image
                images.add(sample, _only(one, names), _only(other, names))
                for name, sums in channels.items():
                    if name in one and pairs[name] in other:
                        values = strip_padded_channels(pairs[name], other[pairs[name]], one[name])
                        sums.add(one[name], values)
        step()

    with phase("running images", len(feed), "samples") as step, feed.samples() as samples:
        run_in_order(samples, work, take, threads=threads)
    return ImageResults(
        samples=images.seen,
        images=tuple(images.worst(feed.names)),
        channels=tuple(c for name, sums in channels.items() for c in sums.worst(name)),
        notes=tuple(_notes(layers, pairs)),
    )


def _check_outputs(names: Sequence[str], candidate: ModelProto, path: Path) -> None:
    others = {value.name for value in candidate.graph.output}
    if not set(names) <= others:
        raise ConfigError(
            f"a target's model must have the same outputs as the float model, got {path} with"
            f" {sorted(others)} for {names}; name the model it was built from with --model"
        )


def _notes(layers: Sequence[str], pairs: Mapping[str, str]) -> Iterator[str]:
    if not pairs:
        why = "the two models share no inner tensor" if layers else "the report has no inner tensor"
        yield f"channels are not shown: {why}"


def _session(model: ModelProto, *, native: bool) -> OrtSession:
    return OrtSession.open(model, threads=1, spin=False, int8_kernels=native)


def _only(arrays: Outputs, names: Sequence[str]) -> Outputs:
    return {name: arrays[name] for name in names if name in arrays}


@dataclass(slots=True)
class _Images:
    """The images of lowest SQNR so far, by their index in the feed."""

    form: OutputForm
    seen: int = 0
    _worst: list[tuple[float, int, ImageLoss]] = field(default_factory=list)

    def add(self, fed: Outputs, left: Outputs, right: Outputs) -> None:
        """Add one image."""
        rank, loss = self._loss(fed, left, right)
        self._worst = sorted([*self._worst, (rank, self.seen, loss)], key=lambda one: one[:2])
        del self._worst[IMAGES:]
        self.seen += 1

    def worst(self, names: Sequence[str]) -> Iterator[ImageLoss]:
        """Yield the images with their names, the worst first."""
        for _, place, loss in self._worst:
            yield ImageLoss(name=names[place], part=loss.part, sqnr_db=loss.sqnr_db, task=loss.task)

    def _loss(self, fed: Outputs, left: Outputs, right: Outputs) -> tuple[float, ImageLoss]:
        parts: dict[str, float] = {}
        own, others = (self.form.told(one, fed, left) for one in (left, right))
        for part in self.form.parts:
            if part.output in left and part.output in right:
                error = RunningError(part.label)
                error.add(part.of(own[part.output]), part.of(others[part.output]), 1)
                parts[part.label] = error.result().sqnr_db
        label = min(parts, key=lambda name: by_sqnr(parts[name]), default="")
        decibels = parts.get(label, math.nan)
        task, share = "", math.nan
        if self.form.task is not None:
            tally = self.form.task.tally()
            tally.add(fed, left, right)
            figure = tally.result()
            if figure is not None:
                task, share = figure.count, figure.value
        rank = by_sqnr(decibels) if parts else share if not math.isnan(share) else math.inf
        return rank, ImageLoss(name="", part=label, sqnr_db=decibels, task=task)


@dataclass(slots=True)
class ChannelSums:
    """Signal and noise of each channel (axis 1) of one tensor, float64 [C]."""

    signal: NDArray[np.float64] | None = None
    noise: NDArray[np.float64] | None = None

    def add(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Add one sample of shape [1, C, ...]; other shapes are ignored."""
        if reference.shape != candidate.shape or reference.ndim < 2 or reference.shape[0] != 1:
            return
        one = reference[0].reshape(reference.shape[1], -1).astype(np.float64)
        other = candidate[0].reshape(one.shape).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            signal, noise = (one**2).sum(axis=1), ((one - other) ** 2).sum(axis=1)
        if self.signal is None or self.noise is None:
            self.signal, self.noise = signal, noise
        elif len(signal) == len(self.signal):
            self.signal, self.noise = self.signal + signal, self.noise + noise

    def worst(self, tensor: str) -> Iterator[ChannelLoss]:
        """Yield the channels of lowest SQNR, without silent ones."""
        if self.signal is None or self.noise is None:
            return
        total, lost = float(self.signal.sum()), float(self.noise.sum())
        ratios = {
            channel: sqnr_db(signal, noise)
            for channel, (signal, noise) in enumerate(
                zip(self.signal.tolist(), self.noise.tolist(), strict=True)
            )
            if not signal <= _SILENT * total
        }
        for channel in sorted(ratios, key=lambda c: by_sqnr(ratios[c]))[:CHANNELS]:
            share = float(self.noise[channel]) / lost if lost else 0.0
            yield ChannelLoss(tensor=tensor, channel=channel, sqnr_db=ratios[channel], noise=share)


@with_progress
def explain(
    folder: Path | str,
    *,
    target: str | None = None,
    images: FeedSource | Dataset | None = None,
    model: Path | str | ModelProto | nn.Module | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Explanation:
    """Explain a build.

    Args:
        folder: output folder of the build, or its report.json.
        target: name of one target; None explains all.
        images: run the float model and the int8 models on these, and report the worst images and
            channels.
        model: the float model, a file or in memory, or the PyTorch module that was built; None
            uses the one in the report.
        threads: samples that run in parallel; the result does not depend on it.
        progress: report progress on stderr, where it takes over two seconds.

    Raises:
        ConfigError: no build, a broken report or plan, a target that the build does not have.
        ModelError, FeedError, BackendError: from running images.
    """
    explanation = read_explanation(Path(folder))
    chosen = _select_targets(explanation, target)
    if images is None:
        return replace(explanation, targets=chosen)
    dataset = to_dataset(images)
    if model is not None:
        model, source = open_torch_module(model, dataset.source)
        dataset = replace(dataset, source=source)
    loaded = _load_float_model(explanation, model)
    preprocess = _merged(dataset.preprocess, _preprocess(explanation, dataset.source))
    feed = replace(dataset, preprocess=preprocess).open(
        loaded.inputs, metadata_preprocess=loaded.metadata_preprocess
    )
    explained = []
    for one in chosen:
        if one.runnable is None:
            note = "no file of it can be run in ONNX Runtime"
            explained.append(replace(one, held=ImageResults(samples=0, notes=(note,))))
            continue
        with phase(one.name):
            held = run_images(
                loaded,
                path_in_build(one.runnable, Path(explanation.report)),
                [] if _is_rescaled(one) else [layer.name for layer in one.layers],
                feed,
                native=one.native,
                threads=worker_threads(threads),
                task=one.set_task,
            )
        explained.append(
            replace(one, held=replace(held, notes=(*held.notes, *_model_note(explanation, loaded))))
        )
    return replace(explanation, targets=tuple(explained))


def _select_targets(explanation: Explanation, target: str | None) -> tuple[TargetExplanation, ...]:
    if target is None:
        return explanation.targets
    names = [one.name for one in explanation.targets]
    if target not in names:
        way = did_you_mean(target, names, f"it has {', '.join(names) or 'none'}")
        raise ConfigError(
            f"a target to explain must be one of the build, got {target!r} for"
            f" {explanation.report}; {way}"
        )
    return tuple(one for one in explanation.targets if one.name == target)


def _load_float_model(
    explanation: Explanation, named: Path | str | ModelProto | LoadedModel | None
) -> LoadedModel:
    """Load the float model."""
    if isinstance(named, LoadedModel):
        return named
    if named is not None:
        return load_float_or_qdq(named)
    path = path_near_report(explanation.model, Path(explanation.report))
    if not os.path.isfile(path) or path.suffix.lower() != ".onnx":
        raise ConfigError(
            f"images are run through the ONNX model of the build, got {explanation.model!r} in"
            f" {explanation.report}, which is none here; name it with --model"
        )
    return load_float_or_qdq(path)


def _model_note(explanation: Explanation, loaded: LoadedModel) -> Iterator[str]:
    """Yield a note if the float model is not the one the build was made from."""
    try:
        made_from = manifest.read_manifest(Path(explanation.report).parent).made_from.get("model")
    except CacheError:  # reported by `verify`
        return
    if isinstance(made_from, dict) and made_from.get("sha256") != loaded.digest:
        yield (
            f"{loaded.source or loaded.name} is not the model that was built from, or was changed"
            " since: the figures of images and channels include that difference"
        )


def _merged(preprocess: PreprocessRequest, known: Preprocess | None) -> PreprocessRequest:
    """Return the preprocessing options of the user on top of those of the build."""
    if known is None or not isinstance(preprocess, Mapping | None):
        return preprocess
    return apply_user_options(known, preprocess or {})


def _preprocess(explanation: Explanation, images: FeedSource) -> Preprocess | None:
    """Return the preprocessing of the images; None for arrays, or if the report has none."""
    if isinstance(images, RawFiles):
        arrays = images.dtype != "uint8"
    else:
        arrays = not isinstance(images, str | Path) or Path(images).suffix.lower() in _ARRAYS
    if arrays or not explanation.preprocess:
        return None
    try:
        return Preprocess.from_json(explanation.preprocess)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the preprocessing of a report must be one that calib8 wrote, got {error} in"
            f" {explanation.report}; set it with options such as --mean"
        ) from error


def _is_rescaled(target: TargetExplanation) -> bool:
    """Whether a repair scaled channels, so that inner tensors differ from the float model's."""
    words = [repair.words for repair in REPAIRS.values() if repair.before is not None]
    return any(
        word in said and said.endswith(", kept") for said in target.repairs for word in words
    )
