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

from collections.abc import Collection, Iterator, Sequence
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
    WeightedLayer,
    find_weighted_layers,
    read_all_quantizations,
    with_biases,
)
from deploy.tuning.repairs.sample_runs import layer_patches, run_with_taps

_PATCHES = 1024  # input patches of a layer, over all samples

Means = dict[str, NDArray[np.float64]]  # layer -> [samples, C_out]


def correct_biases(request: BuildRequest, making: RepairInput) -> Iterator[BuildRequest]:
    """Yield the request after step 1, then after step 2; nothing without int8 layers with bias."""
    alone = _correct_each(request, making)
    if alone is not None:
        yield alone
        yield _correct_last(alone, making)


def _correct_each(request: BuildRequest, making: RepairInput) -> BuildRequest | None:
    """Correct every int8 layer for the rounding of its own weight and input."""
    with_bias = tuple(
        one for one in find_weighted_layers(request.model) if one.kind != "MatMul" or one.add
    )
    plain = {layer.name: layer for layer in find_weighted_layers(making.reference)}
    quantized = read_all_quantizations(making.target.trial(request), with_bias)
    layers = [layer for layer, how in quantized.values() if how.is_nearest]
    graph, biases = Graph(request.model), []
    for layer, patches in layer_patches(
        making.reference, layers, making.samples, max_patches=_PATCHES, threads=making.threads
    ):
        how = quantized[layer.name][1]
        expected = _mean_out(plain[layer.name].rows, patches)
        stored = replace(layer, array=np.asarray(how.quantize_weight(layer), np.float32))
        actual = _mean_out(stored.rows, [how.quantize_inputs(one) for one in patches])
        biases.append((layer, layer.bias_values(graph) + shrunk_mean(expected - actual)))
    return with_model(request, with_biases(request.model, biases)) if biases else None


def _mean_out(rows: NDArray[Any], patches: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return mean outputs of rows [G, C, K] on each sample's patches [G, K, P]: [samples, G C]."""
    used = [one for one in patches if one.shape[2]]
    means = np.stack([one.mean(axis=2, dtype=np.float64) for one in used])
    made = (np.asarray(rows, np.float64) * means[:, :, None, :]).sum(axis=3)
    return np.asarray(made.reshape(len(used), -1), np.float64)


def _correct_last(request: BuildRequest, making: RepairInput) -> BuildRequest:
    """Correct the layers with no other downstream, by the outputs of the int8 model there."""
    layers = _last_layers(request.model)
    if not layers:
        return request
    expected = _means(making.reference, layers, making)
    actual = _means(making.target.trial(request), layers, making)
    graph, biases = Graph(request.model), []
    for layer in layers:
        change = shrunk_mean(expected[layer.name] - actual[layer.name])
        biases.append((layer, layer.bias_values(graph) + change))
    return with_model(request, with_biases(request.model, biases))


def _last_layers(model: onnx.ModelProto) -> list[WeightedLayer]:
    """Return the layers with a bias that no other layer is downstream of."""
    layers = {layer.name: layer for layer in find_weighted_layers(model)}
    graph = Graph(model)
    upstream: set[str] = set()  # tensors that a layer reads, directly or not
    for node in reversed(graph.nodes):
        if node.name in layers or upstream.intersection(node.output):
            upstream.update(node.input)
    return [
        layer
        for layer in layers.values()
        if layer.output not in upstream and (layer.kind != "MatMul" or layer.add)
    ]


def _means(model: onnx.ModelProto, layers: Sequence[WeightedLayer], making: RepairInput) -> Means:
    """Return the mean of each layer's float output, per sample and channel."""
    names = {name for node in model.graph.node for name in node.output}
    tensors = {layer.name: _float_name(layer.output, names) for layer in layers}
    by_tensor = {tensors[layer.name]: layer for layer in layers}

    def take(_: int, name: str, value: Array) -> NDArray[np.float64]:
        means = _channel_means(value, by_tensor[name].out_axis)
        pixels = means.reshape(len(means), -1, by_tensor[name].out_channels)
        return np.asarray(pixels.mean(axis=1), np.float64)

    runs = run_with_taps(model, tensors.values(), making.samples, take, threads=making.threads)
    return {
        layer: np.concatenate([run[tensor] for run in runs]) for layer, tensor in tensors.items()
    }


def _float_name(output: str, existing: Collection[str]) -> str:
    """Return the name of a layer's output before quantization, in a float or int8 model."""
    names = (f"{output}{suffix}" for suffix in (f"/float{TILES}", TILES, "/float"))
    return next((name for name in names if name in existing), output)


def _channel_means(value: Array, axis: int) -> NDArray[np.float64]:
    """Average [N, C, ...] (or channels last) over all but N and C; N is 1 without a batch."""
    by_channel = np.moveaxis(value, axis, -1) if value.ndim > 1 else value.reshape(1, -1)
    rows = by_channel.reshape(len(by_channel), -1, by_channel.shape[-1])
    return np.asarray(rows.mean(axis=1, dtype=np.float64))
