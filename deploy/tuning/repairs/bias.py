"""Bias correction: the mean that int8 adds to a channel is subtracted from its bias.

Rounded weights and clipped inputs shift the mean of a channel, and the shifts add up over the
layers. The bias gets the mean over a few samples of float minus int8. It is that of every layer by
itself, of its float input x and of x' = x on its grid::

    b + mean(W x) - mean(W' x')

so that it holds for all layers at once, since the layers upstream are corrected too. Measured in
the int8 model for many layers at once, each would correct what the layers upstream already correct;
one after the other it would cost one int8 model per layer. A mean on which the samples disagree is
shrunk by m^2 / (m^2 + variance / n).

It is kept if the worst output slice of the int8 model gains, and no other slice loses much.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2 (equation 16 and 17), and appendix D for correction on data.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.weights import shrunk_mean
from deploy.feed.parallel import Sample, run_in_order
from deploy.metrics.accuracy import Comparison
from deploy.metrics.output_form import derive_form
from deploy.runtimes.ort import OrtSession
from deploy.targets.base import BuildRequest
from deploy.tasks import Metric
from deploy.tasks.rows import Outputs
from deploy.tuning.repairs.base import RepairInput, with_model
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    FloatArray,
    WeightedLayer,
    find_weighted_layers,
    read_all_quantizations,
    with_biases,
)
from deploy.tuning.repairs.sample_runs import layer_patches

_PATCHES = 1024  # input patches of a layer, over all samples
_MIN_GAIN_DB = 0.1  # of the worst output slice
_MAX_LOSS_DB = 0.5  # of any output slice


def correct_biases(
    request: BuildRequest, repair_input: RepairInput
) -> tuple[BuildRequest, str] | None:
    """Return the request, with corrected biases if they help, and a text for the report.

    A corrected bias makes the mean output of an int8 layer that of the float layer. None without
    an int8 layer that can have a bias.
    """
    original_model = repair_input.target.trial(request)
    biases = list(_corrected_biases(original_model, request, repair_input))
    if not biases:
        return None

    corrected_request = with_model(request, with_biases(request.model, biases))
    original_db = _measure_sqnr(original_model, request, repair_input)
    corrected_model = repair_input.target.trial(corrected_request)
    corrected_db = _measure_sqnr(corrected_model, request, repair_input)
    worst_db = min(original_db.values(), default=-math.inf)
    corrected_worst_db = min(corrected_db.values(), default=-math.inf)
    has_gain = corrected_worst_db >= worst_db + _MIN_GAIN_DB
    has_loss = any(corrected_db[name] < db - _MAX_LOSS_DB for name, db in original_db.items())
    text = f"worst part {worst_db:.1f} -> {corrected_worst_db:.1f} dB"
    return (corrected_request if has_gain and not has_loss else request), text


def _corrected_biases(
    int8_model: onnx.ModelProto, request: BuildRequest, repair_input: RepairInput
) -> Iterator[tuple[WeightedLayer, Float64Array]]:
    """Yield (layer, its corrected bias [C_out]).

    To the bias of each output channel it adds the mean error of the int8 layer: the float layer's
    output less the int8 layer's, both on the float model's inputs, shrunk towards 0 as far as the
    samples disagree. A patch is the input window of one output position; `rows` is the weight as a
    matrix, a row for each output channel.

    `int8_model`: the target's model, from which the quantization of the layers is read.
    """
    layers = [layer for layer in find_weighted_layers(request.model) if layer.can_have_bias]
    # an earlier repair may have changed the weights in `request`; the goal is the float model
    float_layer_by_name = {
        layer.name: layer for layer in find_weighted_layers(repair_input.reference)
    }
    quantization_by_name = {}
    nearest_layers = []
    for layer, quantization in read_all_quantizations(int8_model, layers).values():
        # weights of AMCT's AdaRound do not follow from the float weights, so they are left out
        if quantization.is_nearest:
            quantization_by_name[layer.name] = quantization
            nearest_layers.append(layer)

    patches_by_layer = layer_patches(
        repair_input.reference,
        nearest_layers,
        repair_input.samples,
        max_patches=_PATCHES,
        threads=repair_input.threads,
    )
    for layer, patches in patches_by_layer:
        quantization = quantization_by_name[layer.name]
        rounded_weight = np.asarray(quantization.quantize_weight(layer), np.float32)
        rounded_patches = [quantization.quantize_inputs(values) for values in patches]
        float_means = _mean_outputs(float_layer_by_name[layer.name].rows, patches)
        int8_means = _mean_outputs(layer.to_rows(rounded_weight), rounded_patches)
        yield layer, layer.bias_values + shrunk_mean(float_means - int8_means)


def _mean_outputs(rows: NDArray[Any], patches: Sequence[FloatArray]) -> Float64Array:
    """Return mean outputs of rows [G, C, K] on each sample's patches [G, K, P]: [samples, G C]."""
    means = [values.mean(axis=2, dtype=np.float64) for values in patches if values.shape[2]]
    outputs = (np.asarray(rows, np.float64) * np.stack(means)[:, :, None, :]).sum(axis=3)
    return np.asarray(outputs.reshape(len(means), -1), np.float64)


def _measure_sqnr(
    model: onnx.ModelProto, request: BuildRequest, repair_input: RepairInput
) -> dict[str, float]:
    """Return output slice -> SQNR of an int8 model in dB, on the samples that evaluate repairs.

    One that is NaN is -inf here, so that it counts as the worst.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    inputs, outputs = zip(*repair_input.evaluation, strict=True)  # those of the float model
    subject = request.subject
    metric = Metric(None, task=subject.task, declared=subject.loaded.declaration)
    form = derive_form(outputs, inputs=inputs, metric=metric)
    session = OrtSession.open(
        model,
        threads=1,
        spin=False,
        reuse_memory=True,
        int8_kernels=repair_input.target.runs_here,
    )
    comparison = Comparison(form=form, metric=metric)

    def run(_worker: int, _number: int, sample: Sample) -> Outputs:
        return session.run(sample)

    def compare(number: int, int8_outputs: Outputs) -> None:  # samples are numbered from 1
        comparison.add(inputs[number - 1], outputs[number - 1], int8_outputs)

    run_in_order(inputs, run, compare, threads=repair_input.threads)
    sqnr_by_slice = {}
    for part in comparison.result().parts:
        sqnr_by_slice[part.label] = -math.inf if math.isnan(part.sqnr_db) else part.sqnr_db
    return sqnr_by_slice
