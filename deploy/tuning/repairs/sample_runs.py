"""Runs a model on a few samples: inner tensors, error of the outputs, patches of layer inputs.

Samples run in parallel, one thread each, and results are stored in sample order: no result depends
on the number of threads.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.rounding import extract_patches as drawn_patches
from deploy.calibration.observation import CalibrationSubject
from deploy.feed.parallel import Sample, run_in_order
from deploy.graph.bounds import make_window
from deploy.graph.edit import copy_with_outputs
from deploy.metrics.accuracy import Accuracy, Comparison, StoredOutputs
from deploy.metrics.output_form import derive_form
from deploy.runtimes.ort import OrtSession
from deploy.tasks import Metric
from deploy.tensors import Array
from deploy.tuning.repairs.repair_layers import FloatArray, WeightedLayer

TapResult = TypeVar("TapResult")


def run_with_taps(
    model: onnx.ModelProto,
    tensors: Iterable[str],
    samples: Sequence[Sample],
    take: Callable[[int, str, Array], TapResult],
    *,
    threads: int,
) -> list[dict[str, TapResult]]:
    """Run the model and return {tensor: take(sample number, tensor, value)} for each sample.

    A Q/DQ model is computed as written, in float between its Q/DQ pairs.
    """
    inputs = {value.name for value in model.graph.input}
    names = list(dict.fromkeys(tensors))
    fed, outputs = [n for n in names if n in inputs], [n for n in names if n not in inputs]
    session = OrtSession.open(
        copy_with_outputs(model, outputs),
        threads=1,
        spin=False,
        reuse_memory=True,
        int8_kernels=False,
    )
    results: list[dict[str, TapResult]] = []

    def work(_: int, number: int, sample: Sample) -> dict[str, TapResult]:
        values = session.run(sample)
        return {
            **{name: take(number, name, sample[name]) for name in fed},
            **{name: take(number, name, values[name]) for name in outputs},
        }

    run_in_order(samples, work, lambda _, one: results.append(one), threads=threads)
    return results


def channel_maxima(
    model: onnx.ModelProto, axes: Mapping[str, int], samples: Sequence[Sample], *, threads: int
) -> dict[str, NDArray[np.float64]]:
    """Return max |x| of each channel, [C], over the samples; `axes`: tensor -> channel axis."""

    def take(_: int, name: str, value: Array) -> NDArray[np.float64]:
        axis = axes[name]
        rows = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
        return np.asarray(np.abs(rows).max(axis=0), np.float64)

    runs = run_with_taps(model, axes, samples, take, threads=threads)
    return {name: np.max([run[name] for run in runs], axis=0) for name in axes}


class SampleComparison:
    """Compares models with the float model on the same few samples; the float model runs once.

    `reference_outputs`: the float model's outputs on them, if they are available.
    """

    def __init__(
        self,
        subject: CalibrationSubject,
        samples: Sequence[Sample],
        *,
        threads: int,
        reference_outputs: Sequence[Mapping[str, Array]] | None = None,
    ) -> None:
        self._samples, self._threads = samples, threads
        if reference_outputs is None:
            session = OrtSession.open(subject.model, threads=1, spin=False, reuse_memory=True)
            reference_outputs = _ran(session, samples, threads)
        metric = Metric(None, task=subject.task, declared=subject.loaded.declaration)
        self._outputs = reference_outputs
        self._form = derive_form(reference_outputs, inputs=samples, metric=metric)

    def accuracy(self, model: onnx.ModelProto, *, int8_kernels: bool) -> Accuracy:
        """Return the accuracy of a model; `int8_kernels` allows ONNX Runtime's int8 kernels.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        session = OrtSession.open(
            model, threads=1, spin=False, reuse_memory=True, int8_kernels=int8_kernels
        )
        comparison = Comparison(StoredOutputs(self._outputs[0]), session, form=self._form)
        outputs = _ran(session, self._samples, self._threads)
        for sample, reference, candidate in zip(self._samples, self._outputs, outputs, strict=True):
            comparison.add(sample, reference, candidate)
        return comparison.result()


def _ran(session: OrtSession, samples: Sequence[Sample], threads: int) -> list[Mapping[str, Array]]:
    outputs: list[Mapping[str, Array]] = []
    run_in_order(
        samples,
        lambda _, __, sample: session.run(sample),
        lambda _, ran: outputs.append(ran),
        threads=threads,
    )
    return outputs


def sqnr_by_slice(accuracy: Accuracy) -> dict[str, float]:
    """Return the SQNR in dB of each output slice; -inf where it is NaN."""
    sqnr = {part.label: part.sqnr_db for part in accuracy.parts}
    sqnr |= {one.name: one.sqnr_db for one in accuracy.outputs if math.isnan(one.sqnr_db)}
    return {name: -math.inf if math.isnan(db) else db for name, db in sqnr.items()}


def worst_sqnr_db(accuracy: Accuracy) -> float:
    """Return the SQNR in dB of the worst output slice."""
    return min(sqnr_by_slice(accuracy).values(), default=-math.inf)


GAIN_DB, _LOSS_DB = 0.1, 0.5


def helps(before: Accuracy, after: Accuracy, *, min_gain_db: float = GAIN_DB) -> bool:
    """Whether the worst output slice gains `min_gain_db` or more and no slice loses over 0.5 dB."""
    return worst_sqnr_db(after) >= worst_sqnr_db(before) + min_gain_db and not harms(before, after)


def harms(before: Accuracy, after: Accuracy) -> bool:
    """Whether an output slice loses more than 0.5 dB."""
    old, new = sqnr_by_slice(before), sqnr_by_slice(after)
    return any(new.get(name, -math.inf) < old[name] - _LOSS_DB for name in old)


_NOTSET = b"NOTSET"
_MOST_VALUES = 1 << 25  # in memory at a time; further layers need another run of the model


def layer_patches(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    samples: Sequence[Sample],
    *,
    max_patches: int,
    threads: int,
) -> Iterator[tuple[WeightedLayer, list[FloatArray]]]:
    """Yield each layer with its input patches, [groups, K, P] per sample, about `max_patches`.

    A ConvTranspose whose pads follow from its output's size is left out.
    """
    supported = [one for one in layers if not (one.is_transposed_conv and _fitted(one))]
    per_sample = -(-max_patches // len(samples))
    for batch in _portions(supported, max_patches):
        by_name = {layer.name: layer for layer in batch}

        def take(
            number: int, name: str, value: Array, batch: Sequence[WeightedLayer] = batch
        ) -> list[Array]:
            return [patches(one, value, number, per_sample) for one in batch if one.input == name]

        runs = run_with_taps(model, [one.input for one in batch], samples, take, threads=threads)
        by_input: dict[str, list[WeightedLayer]] = {}
        for layer in by_name.values():
            by_input.setdefault(layer.input, []).append(layer)
        for tensor, same_input in by_input.items():
            for place, layer in enumerate(same_input):
                yield layer, [run[tensor][place] for run in runs]


def _fitted(layer: WeightedLayer) -> bool:
    """Whether the pads of a ConvTranspose follow from the size of its output."""
    return (
        "output_shape" in layer.attributes or layer.attributes.get("auto_pad", _NOTSET) != _NOTSET
    )


def _portions(layers: Sequence[WeightedLayer], most: int) -> Iterator[list[WeightedLayer]]:
    """Split the layers, in order, so that the patches of each portion fit into memory."""
    portion: list[WeightedLayer] = []
    values = 0
    for layer in layers:
        size = most * math.prod(layer.by_channel.shape) // max(layer.by_channel.shape[1], 1)
        if portion and values + size > _MOST_VALUES:
            yield portion
            portion, values = [], 0
        portion.append(layer)
        values += size
    if portion:
        yield portion


def patches(layer: WeightedLayer, value: Array, number: int, most: int) -> FloatArray:
    """Return at most `most` patches of one input of a layer (`calibrators.rounding`)."""
    window = None
    if layer.kind in ("Conv", "ConvTranspose"):
        window = make_window(
            layer.attributes, layer.array.shape[2:], transposed=layer.is_transposed_conv
        )
    return drawn_patches(value, window, number, most)
