"""The images that lose most, and of the inner tensors that lose most the channels that do.

The float model and what runs with the target's numerics run each image once. Figures of images are
of the worst part of the outputs; those of channels are summed over all images, so memory does not
grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.analysis.written import worse
from deploy.errors import ConfigError
from deploy.explanation.values import ChannelLoss, Held, ImageLoss
from deploy.feed.parallel import Sample, in_order
from deploy.frontends.reader import read_model
from deploy.graph.edit import with_outputs
from deploy.graph.width import of_own_channels
from deploy.metrics.form import Form, form_of
from deploy.metrics.layerwise import shared_tensors
from deploy.metrics.output_errors import RunningError, sqnr_db
from deploy.metrics.parts import SAMPLES
from deploy.metrics.rows import Outputs, batch_length, split
from deploy.progress import phase
from deploy.runtimes.ort import OrtSession

if TYPE_CHECKING:
    from onnx import ModelProto

    from deploy.feed.samples import Feed
    from deploy.frontends import LoadedModel

IMAGES, TENSORS, CHANNELS = 5, 5, 3  # told: images, tensors, channels a tensor
_SILENT = 1e-6  # of a tensor's signal: a channel with less says nothing that could be lost


def held_of(
    loaded: LoadedModel,
    runnable: Path,
    layers: Sequence[str],
    feed: Feed,
    *,
    native: bool,
    threads: int,
) -> Held:
    """What images tell of one target.

    Args:
        loaded: the float model.
        runnable: the file that ONNX Runtime runs with the target's numerics.
        layers: inner tensors, the worst first; of the first few, channels are told.
        feed: the images.
        native: whether ONNX Runtime is the target, so that its int8 kernels count.
        threads: samples that are run at a time; the result does not depend on it.

    Raises:
        ConfigError: the file is another model's.
        ModelError: it is no ONNX model.
        FeedError: an image that cannot be fed.
        BackendError: ONNX Runtime refused one of the two.
    """
    candidate = read_model(runnable)
    shared = shared_tensors(loaded.model, candidate)
    pairs = {name: shared[name] for name in layers[:TENSORS] if name in shared}
    left = _session(with_outputs(loaded.model, pairs), native=True)
    right = _session(with_outputs(candidate, pairs.values()), native=native)
    names = [spec.name for spec in loaded.outputs if spec.dtype != "str"]
    _check_outputs(names, candidate, runnable)
    first = feed.first(SAMPLES)
    form = form_of([_only(left.run(sample), names) for sample in first], inputs=first)
    images = _Images(form)
    channels = {name: ChannelSums() for name in pairs}

    def work(_: int, __: int, sample: Sample) -> tuple[Sample, Outputs, Outputs]:
        return sample, left.run(sample), right.run(sample)

    def take(_: int, ran: tuple[Sample, Outputs, Outputs]) -> None:
        batch = batch_length(ran[0])
        fed, own, others = (split(arrays, batch) for arrays in ran)
        for sample, one, other in zip(fed, own, others, strict=True):
            if images.seen < feed.count:  # behind them a fixed batch is filled with the first
                images.add(sample, _only(one, names), _only(other, names))
                for name, sums in channels.items():
                    if name in one and pairs[name] in other:
                        values = of_own_channels(pairs[name], other[pairs[name]], one[name])
                        sums.add(one[name], values)
        step()

    with phase("running images", len(feed), "samples") as step, feed.samples() as samples:
        in_order(samples, work, take, threads=threads)
    return Held(
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
        yield f"channels are not told: {why}"


def _session(model: ModelProto, *, native: bool) -> OrtSession:
    return OrtSession.open(model, threads=1, spin=False, int8_kernels=native)


def _only(arrays: Outputs, names: Sequence[str]) -> Outputs:
    return {name: arrays[name] for name in names if name in arrays}


@dataclass(slots=True)
class _Images:
    """Those that lose most of the images so far, by their place in the feed."""

    form: Form
    seen: int = 0
    _worst: list[tuple[float, int, ImageLoss]] = field(default_factory=list)

    def add(self, fed: Outputs, left: Outputs, right: Outputs) -> None:
        """Add one image."""
        rank, loss = self._loss(fed, left, right)
        self._worst = sorted([*self._worst, (rank, self.seen, loss)], key=lambda one: one[:2])
        del self._worst[IMAGES:]
        self.seen += 1

    def worst(self, names: Sequence[str]) -> Iterator[ImageLoss]:
        """The worst first, called by their names."""
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
        label = min(parts, key=lambda name: worse(parts[name]), default="")
        decibels = parts.get(label, math.nan)
        task, share = "", math.nan
        if self.form.task is not None:
            tally = self.form.task.tally()
            tally.add(fed, left, right)
            figure = tally.result()
            if figure is not None:
                task, share = figure.count, figure.value
        rank = worse(decibels) if parts else share if not math.isnan(share) else math.inf
        return rank, ImageLoss(name="", part=label, sqnr_db=decibels, task=task)


@dataclass(slots=True)
class ChannelSums:
    """Signal and noise of each channel, index of axis 1, of one tensor: float64 [C]."""

    signal: NDArray[np.float64] | None = None
    noise: NDArray[np.float64] | None = None

    def add(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Add one sample, [1, C, ...] twice; what has another shape or no channels is left out."""
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
        """The channels of least SQNR, without those that are silent."""
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
        for channel in sorted(ratios, key=lambda c: worse(ratios[c]))[:CHANNELS]:
            share = float(self.noise[channel]) / lost if lost else 0.0
            yield ChannelLoss(tensor=tensor, channel=channel, sqnr_db=ratios[channel], noise=share)
