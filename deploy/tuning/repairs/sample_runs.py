"""Runs a model on a few samples: inner tensors, error of the outputs, patches of layer inputs.

Samples run in parallel, one thread each, and results are stored in sample order: no result depends
on the number of threads.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import onnx

from calibrators.rounding import extract_patches
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

Result = TypeVar("Result")


def _run_all(
    samples: Iterable[Sample], work: Callable[[int, Sample], Result], threads: int
) -> list[Result]:
    """Return work(number, sample) of every sample."""
    results: list[Result] = []
    run_in_order(
        samples,
        lambda _, number, sample: work(number, sample),
        lambda _, result: results.append(result),
        threads=threads,
    )
    return results


def run_with_taps(
    model: onnx.ModelProto,
    tensors: Iterable[str],
    samples: Sequence[Sample],
    take: Callable[[int, str, Array], Result],
    *,
    threads: int,
) -> list[dict[str, Result]]:
    """Run the model and return {tensor: take(sample number, tensor, value)} for each sample.

    A Q/DQ model is computed as written, in float between its Q/DQ pairs.
    """
    inputs = {value.name for value in model.graph.input}
    names = dict.fromkeys(tensors)
    session = OrtSession.open(
        copy_with_outputs(model, [name for name in names if name not in inputs]),
        threads=1,
        spin=False,
        reuse_memory=True,
        int8_kernels=False,
    )

    def work(number: int, sample: Sample) -> dict[str, Result]:
        values = {**sample, **session.run(sample)}
        return {name: take(number, name, values[name]) for name in names}

    return _run_all(samples, work, threads)


class SampleComparison:
    """Compares models with the float model on the same few samples."""

    def __init__(
        self,
        subject: CalibrationSubject,
        samples: Sequence[Sample],
        *,
        threads: int,
        reference_outputs: Sequence[Mapping[str, Array]],
    ) -> None:
        """`reference_outputs`: those of the float model on the samples."""
        self._samples = samples
        self._threads = threads
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

        def add(number: int, outputs: Mapping[str, Array]) -> None:
            comparison.add(self._samples[number - 1], self._outputs[number - 1], outputs)

        run_in_order(
            self._samples, lambda _, __, sample: session.run(sample), add, threads=self._threads
        )
        return comparison.result()


def _sqnr_by_slice(accuracy: Accuracy) -> dict[str, float]:
    """Return the SQNR in dB of each output slice; -inf where it is NaN."""
    sqnr = {part.label: part.sqnr_db for part in accuracy.parts}
    sqnr |= {one.name: one.sqnr_db for one in accuracy.outputs if math.isnan(one.sqnr_db)}
    return {name: -math.inf if math.isnan(db) else db for name, db in sqnr.items()}


def worst_sqnr_db(accuracy: Accuracy) -> float:
    """Return the SQNR in dB of the worst output slice."""
    return min(_sqnr_by_slice(accuracy).values(), default=-math.inf)


_MAX_LOSS_DB = 0.5  # of any slice


def gains(original: Accuracy, repaired: Accuracy, min_gain_db: float) -> bool:
    """Whether the worst output slice gains so much."""
    return worst_sqnr_db(repaired) >= worst_sqnr_db(original) + min_gain_db


def harms(original: Accuracy, repaired: Accuracy) -> bool:
    """Whether an output slice loses more than 0.5 dB."""
    original_db, repaired_db = _sqnr_by_slice(original), _sqnr_by_slice(repaired)
    return any(
        repaired_db.get(name, -math.inf) < original_db[name] - _MAX_LOSS_DB for name in original_db
    )


_MAX_VALUES = 1 << 25  # in memory at a time; further layers need another run of the model
_LARGE_PATCH = 64  # values of a patch from which a layer needs all patches
_MIN_PATCH_SHARE = 0.25  # of the patches, for smaller ones: a depthwise layer has few weights a row


def layer_patches(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    samples: Sequence[Sample],
    *,
    max_patches: int,
    threads: int,
) -> Iterator[tuple[WeightedLayer, list[FloatArray]]]:
    """Yield each layer with its input patches, [groups, K, P] per sample, about `max_patches`.

    A layer of small patches gets fewer of them. A ConvTranspose whose pads follow from its output's
    size is left out.
    """
    supported = [layer for layer in layers if not _has_derived_pads(layer)]
    for portion in _split_by_memory(supported, max_patches):
        layers_by_input: dict[str, list[WeightedLayer]] = {}
        for layer in portion:
            layers_by_input.setdefault(layer.input, []).append(layer)
        take = partial(_take_patches, layers_by_input, max_patches / len(samples))
        runs = run_with_taps(model, layers_by_input, samples, take, threads=threads)
        for tensor, readers in layers_by_input.items():
            for index, layer in enumerate(readers):
                yield layer, [run[tensor][index] for run in runs]


def _take_patches(
    layers_by_input: Mapping[str, Sequence[WeightedLayer]],
    max_patches: float,
    number: int,
    tensor: str,
    value: Array,
) -> list[FloatArray]:
    """Return the patches of each layer that reads a tensor, of one sample."""
    layer_patches = []
    for layer in layers_by_input[tensor]:
        count = math.ceil(_patch_share(layer) * max_patches)
        layer_patches.append(patches(layer, value, number, count))
    return layer_patches


def _patch_share(layer: WeightedLayer) -> float:
    """Return the share of the patches that a layer needs."""
    _, _, into, taps = layer.by_channel.shape
    return float(min(max(into * taps / _LARGE_PATCH, _MIN_PATCH_SHARE), 1.0))


def _has_derived_pads(layer: WeightedLayer) -> bool:
    """Whether it is a ConvTranspose whose pads follow from the size of its output."""
    has_auto_pad = layer.attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    return layer.is_transposed_conv and ("output_shape" in layer.attributes or has_auto_pad)


def _split_by_memory(
    layers: Sequence[WeightedLayer], max_patches: int
) -> Iterator[list[WeightedLayer]]:
    """Split the layers, in order, so that the patches of each portion fit into memory."""
    portion: list[WeightedLayer] = []
    portion_values = 0.0
    for layer in layers:
        groups, _, into, taps = layer.by_channel.shape
        values = _patch_share(layer) * max_patches * groups * into * taps
        if portion and portion_values + values > _MAX_VALUES:
            yield portion
            portion, portion_values = [], 0.0
        portion.append(layer)
        portion_values += values
    if portion:
        yield portion


def patches(layer: WeightedLayer, value: Array, number: int, max_patches: int) -> FloatArray:
    """Return at most `max_patches` patches of one input of a layer (`calibrators.rounding`)."""
    window = None
    if layer.kind in ("Conv", "ConvTranspose"):
        kernel = layer.array.shape[2:]
        window = make_window(layer.attributes, kernel, transposed=layer.is_transposed_conv)
    return extract_patches(value, window, number, max_patches)
