"""Bias correction: the mean that int8 adds to a channel is subtracted from its bias.

Rounded weights and clipped inputs shift the mean of a channel, and the shifts add up over the
layers. The bias gets the mean over a few samples of float minus int8, in two steps::

    1. every layer by itself: its float input x, and x' = x on its grid,
           b + mean(W x) - mean(W' x')
       which holds for all layers at once, since the layers upstream are corrected too
    2. the last layers, with no other downstream, by what the int8 model itself gives there

Measured in the int8 model for many layers at once, each would correct what the layers upstream
already correct; one after the other it would cost one int8 model per layer. A mean on which the
samples disagree is shrunk by m^2 / (m^2 + variance / n).

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2 (equation 16 and 17), and appendix D for correction on data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.weights import shrunk_mean
from deploy.graph.index import Graph
from deploy.targets.base import BuildRequest
from deploy.targets.onnxruntime.tile_rewrite import TILES
from deploy.tensors import Array
from deploy.tuning.repairs.base import RepairInput, with_model
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    FloatArray,
    WeightedLayer,
    find_weighted_layers,
    read_all_quantizations,
    with_biases,
)
from deploy.tuning.repairs.sample_runs import layer_patches, run_with_taps

_PATCHES = 1024  # input patches of a layer, over all samples


def correct_biases(request: BuildRequest, repair_input: RepairInput) -> Iterator[BuildRequest]:
    """Yield the request after step 1, then after step 2; nothing without int8 layers with bias."""
    corrected = _correct_all(request, repair_input)
    if corrected is not None:
        yield corrected
        yield _correct_last(corrected, repair_input)


def _correct_all(request: BuildRequest, repair_input: RepairInput) -> BuildRequest | None:
    """Correct every int8 layer for the rounding of its own weight and input."""
    layers = tuple(layer for layer in find_weighted_layers(request.model) if layer.can_have_bias)
    float_layers = {layer.name: layer for layer in find_weighted_layers(repair_input.reference)}
    quantized = read_all_quantizations(repair_input.target.trial(request), layers)
    nearest = [layer for layer, quantization in quantized.values() if quantization.is_nearest]
    biases = []
    for layer, patches in layer_patches(
        repair_input.reference,
        nearest,
        repair_input.samples,
        max_patches=_PATCHES,
        threads=repair_input.threads,
    ):
        _, quantization = quantized[layer.name]
        expected = _mean_outputs(float_layers[layer.name].rows, patches)
        weight = np.asarray(quantization.quantize_weight(layer), np.float32)
        int8_patches = [quantization.quantize_inputs(values) for values in patches]
        actual = _mean_outputs(replace(layer, array=weight).rows, int8_patches)
        biases.append((layer, layer.bias_values + shrunk_mean(expected - actual)))
    return with_model(request, with_biases(request.model, biases)) if biases else None


def _mean_outputs(rows: NDArray[Any], patches: Sequence[FloatArray]) -> Float64Array:
    """Return mean outputs of rows [G, C, K] on each sample's patches [G, K, P]: [samples, G C]."""
    means = [values.mean(axis=2, dtype=np.float64) for values in patches if values.shape[2]]
    outputs = (np.asarray(rows, np.float64) * np.stack(means)[:, :, None, :]).sum(axis=3)
    return np.asarray(outputs.reshape(len(means), -1), np.float64)


def _correct_last(request: BuildRequest, repair_input: RepairInput) -> BuildRequest:
    """Correct the layers with no other downstream, by the outputs of the int8 model there."""
    layers = _find_last_layers(request.model)
    if not layers:
        return request
    expected = _mean_by_layer(repair_input.reference, layers, repair_input)
    actual = _mean_by_layer(repair_input.target.trial(request), layers, repair_input)
    biases = []
    for layer in layers:
        difference = expected[layer.name] - actual[layer.name]
        biases.append((layer, layer.bias_values + shrunk_mean(difference)))
    return with_model(request, with_biases(request.model, biases))


def _find_last_layers(model: onnx.ModelProto) -> list[WeightedLayer]:
    """Return the layers that can have a bias and that no other layer is downstream of."""
    layers = {layer.name: layer for layer in find_weighted_layers(model)}
    upstream: set[str] = set()  # tensors that a layer reads, directly or not
    for node in reversed(Graph(model).nodes):
        if node.name in layers or upstream.intersection(node.output):
            upstream.update(node.input)
    candidates = [layer for layer in layers.values() if layer.can_have_bias]
    return [layer for layer in candidates if layer.output not in upstream]


def _mean_by_layer(
    model: onnx.ModelProto, layers: Sequence[WeightedLayer], repair_input: RepairInput
) -> dict[str, Float64Array]:
    """Return layer -> mean of its float output, [samples, C_out]."""
    tensors = {name for node in model.graph.node for name in node.output}
    layer_by_tensor = {}
    for layer in layers:
        # before quantization, if the model has that
        names = [f"{layer.output}{suffix}" for suffix in (f"/float{TILES}", TILES, "/float")]
        layer_by_tensor[next((name for name in names if name in tensors), layer.output)] = layer

    def average(_: int, tensor: str, value: Array) -> Float64Array:
        layer = layer_by_tensor[tensor]
        values = np.moveaxis(np.atleast_2d(value), layer.out_axis, -1)
        means = values.reshape(len(values), -1, values.shape[-1]).mean(axis=1, dtype=np.float64)
        pixels = means.reshape(len(means), -1, layer.out_channels)  # of a tile, if any
        return np.asarray(pixels.mean(axis=1), np.float64)

    samples, threads = repair_input.samples, repair_input.threads
    runs = run_with_taps(model, layer_by_tensor, samples, average, threads=threads)
    return {
        layer.name: np.concatenate([run[tensor] for run in runs])
        for tensor, layer in layer_by_tensor.items()
    }
