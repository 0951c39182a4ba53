"""Bias correction: what int8 adds to a channel on average is taken out of its bias.

Rounded weights and clipped inputs move the mean of a channel, and the next layers add up such
moves. The mean over a few samples of float minus int8 goes into the bias, in two steps::

    1. every layer by itself: its float input x, and what is left of it on its grid,
           b + mean(W x) - mean(W' x')
       which holds for all layers at once, since the layers before it are corrected too
    2. the last layers, behind which there is no other, by what the int8 model itself gives there

Measured in the int8 model for many layers at once, each would correct what the layers before it
are correcting already; one after the other it would cost an int8 model a layer. Where the samples
do not agree on a mean it is not trusted: it is shrunk by m^2 / (m^2 + variance / n).

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2 (equation 16 and 17), and appendix D for correction on data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.correction import trusted_mean
from deploy.graph.index import Graph
from deploy.repairs.patches import inputs_of
from deploy.repairs.written import all_written
from deploy.targets.tiles import TILES
from deploy.tensors import Array
from deploy.tuning.repairs.base import Making, with_model
from deploy.tuning.repairs.repair_layers import Layer, layers_of, with_biases
from deploy.tuning.repairs.sample_runs import tapped

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest


_PATCHES = 1024  # of a layer's input, over all samples

Means = dict[str, NDArray[np.float64]]  # layer -> [samples, C_out]


def correct_biases(request: BuildRequest, making: Making) -> Iterator[BuildRequest]:
    """The request after the first step, and after both; none where no int8 layer takes a bias."""
    alone = _each_alone(request, making)
    if alone is not None:
        yield alone
        yield _last_ones(alone, making)


def _each_alone(request: BuildRequest, making: Making) -> BuildRequest | None:
    """Every int8 layer corrected for what its own rounding and its input's do."""
    held = tuple(one for one in layers_of(request.model) if one.kind != "MatMul" or one.add)
    plain = {layer.name: layer for layer in layers_of(making.reference)}
    written = all_written(making.target.trial(request), held)
    layers = [layer for layer, how in written.values() if how.nearest]
    graph, biases = Graph(request.model), []
    for layer, parts in inputs_of(
        making.reference, layers, making.samples, most=_PATCHES, threads=making.threads
    ):
        how = written[layer.name][1]
        wanted = _made(plain[layer.name].rows, parts)
        found = _made(_rows(layer, how.weights(layer)), [how.inputs(part) for part in parts])
        change = trusted_mean(wanted - found)
        biases.append((layer, layer.bias_of(graph) + change))
    return with_model(request, with_biases(request.model, biases)) if biases else None


def _rows(layer: Layer, weight: NDArray[np.float64]) -> NDArray[Any]:
    return replace(layer, array=np.asarray(weight, np.float32)).rows


def _made(rows: NDArray[Any], parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """What rows [G, C, K] make on average of patches [G, K, P] of each sample: [samples, G C]."""
    some = [part for part in parts if part.shape[2]]
    means = np.stack([part.mean(axis=2, dtype=np.float64) for part in some])
    made = (np.asarray(rows, np.float64) * means[:, :, None, :]).sum(axis=3)
    return np.asarray(made.reshape(len(some), -1), np.float64)


def _last_ones(request: BuildRequest, making: Making) -> BuildRequest:
    """The layers behind which there is no other, corrected by what the int8 model gives."""
    layers = _ends(request.model)
    if not layers:
        return request
    wanted = _means(making.reference, layers, making)
    found = _means(making.target.trial(request), layers, making)
    graph, biases = Graph(request.model), []
    for layer in layers:
        change = trusted_mean(wanted[layer.name] - found[layer.name])
        biases.append((layer, layer.bias_of(graph) + change))
    return with_model(request, with_biases(request.model, biases))


def _ends(model: onnx.ModelProto) -> list[Layer]:
    """The layers with a place for a bias from which no other layer is reached."""
    layers = {layer.name: layer for layer in layers_of(model)}
    graph = Graph(model)
    leads: set[str] = set()  # tensors that a layer reads, or that lead to one
    for node in reversed(graph.nodes):
        if node.name in layers or leads.intersection(node.output):
            leads.update(node.input)
    return [
        layer
        for layer in layers.values()
        if layer.output not in leads and (layer.kind != "MatMul" or layer.add)
    ]


def _means(model: onnx.ModelProto, layers: Sequence[Layer], making: Making) -> Means:
    """The mean of each sample's channels, of what each layer makes before it is quantized."""
    made = {name for node in model.graph.node for name in node.output}
    tensors = {layer.name: _before_it_is_quantized(layer.output, made) for layer in layers}
    known = {tensors[layer.name]: layer for layer in layers}

    def take(_: int, name: str, value: Array) -> NDArray[np.float64]:
        means = _channel_means(value, known[name].out_axis)
        pixels = means.reshape(len(means), -1, known[name].outputs)  # of a tile, where it has some
        return np.asarray(pixels.mean(axis=1), np.float64)

    runs = tapped(model, tensors.values(), making.samples, take, threads=making.threads)
    return {
        layer: np.concatenate([run[tensor] for run in runs]) for layer, tensor in tensors.items()
    }


def _before_it_is_quantized(output: str, made: Collection[str]) -> str:
    """What a float or int8 model calls what a layer makes."""
    names = (f"{output}{behind}" for behind in (f"/float{TILES}", TILES, "/float"))
    return next((name for name in names if name in made), output)


def _channel_means(value: Array, axis: int) -> NDArray[np.float64]:
    """[N, C, ...] (or channels on the last axis) -> [N, C]; one row without a batch axis."""
    by_channel = np.moveaxis(value, axis, -1) if value.ndim > 1 else value.reshape(1, -1)
    rows = by_channel.reshape(len(by_channel), -1, by_channel.shape[-1])
    return np.asarray(rows.mean(axis=1, dtype=np.float64))
