"""Cross-layer equalization: bring the channels of a tensor to one range by scaling two layers.

One int8 scale holds all channels of a tensor, so a channel of small values gets few steps. Where
two layers have nothing, Relu, PRelu, LeakyRelu or pooling between them, each channel may be scaled
freely (see `calibrators.weights`). A depthwise convolution between two others belongs to two pairs;
the pairs are visited until no factor changes.

Two candidates are made: the range of a channel is that of the first layer's weights, as in the
paper, or that of its activations on a few samples.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.1.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.weights import equal_factors
from deploy.feed.parallel import Sample
from deploy.graph.index import Graph
from deploy.tuning.repairs.repair_layers import (
    LayerLink,
    find_layer_links,
    find_weighted_layers,
    with_biases,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import channel_maxima

_SWEEPS = 20
_CONVERGED = 1e-3  # log of a factor: smaller changes end the sweeps

Factors = dict[str, NDArray[np.float64]]  # first layer of a link -> [C]


def equalize(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """Yield the model equalized by weights, then by activations; nothing without a link."""
    links = find_layer_links(model)
    if not links:
        return
    yield _equalized(model, links, _factors(links, {}))
    axes = {link.first.output: link.first.out_axis for link in links}
    maxima = channel_maxima(model, axes, samples, threads=threads)
    yield _equalized(model, links, _factors(links, maxima))


def _factors(links: Sequence[LayerLink], maxima: Mapping[str, NDArray[np.float64]]) -> Factors:
    """Return each link's factors [C], by the maxima of its activations or else its weights."""
    factors = {link.first.name: np.ones(link.first.out_channels) for link in links}
    sizes = {
        layer.name: np.abs(layer.by_channel.astype(np.float64)).max(axis=3)
        for link in links
        for layer in (link.first, link.second)
    }  # [groups, C_out, C_in] of a group
    previous = {link.second.name: link.first.name for link in links}
    for _ in range(_SWEEPS):
        largest = 0.0
        for link in links:
            first, second = link.first.name, link.second.name
            if link.first.output in maxima:
                first_range = maxima[link.first.output] / factors[first]
            else:
                first_range = _scaled(sizes, factors, previous, first).max(axis=2).reshape(-1)
            second_range = _scaled(sizes, factors, previous, second).max(axis=1).reshape(-1)
            step = equal_factors(first_range, second_range)
            factors[first] = factors[first] * step
            largest = max(largest, float(np.abs(np.log(step)).max()))
        if largest < _CONVERGED:
            break
    return factors


def _scaled(
    sizes: Mapping[str, NDArray[np.float64]], factors: Factors, before: Mapping[str, str], name: str
) -> NDArray[np.float64]:
    """Return |weights| [groups, C_out, C_in] of a layer with the current factors applied."""
    size = sizes[name]
    groups, out, into = size.shape
    if name in factors:
        size = size / factors[name].reshape(groups, out, 1)
    if name in before:
        size = size * factors[before[name]].reshape(groups, 1, into)
    return size


def _equalized(
    model: onnx.ModelProto, links: Sequence[LayerLink], factors: Factors
) -> onnx.ModelProto:
    """Return the model with its constants scaled by the links' factors, computed in float64."""
    previous = {link.second.name: link.first.name for link in links}
    graph, one = Graph(model), np.ones(1)
    arrays, biases = {}, []
    for layer in find_weighted_layers(model):
        out, into = (factors.get(layer.name, one), factors.get(previous.get(layer.name, ""), one))
        if out is one and into is one:
            continue
        arrays[layer.weight] = layer.scaled(outputs=1 / out, inputs=into)
        if layer.bias and out is not one:
            biases.append((layer, layer.bias_values(graph) / out))
    return with_biases(with_constants(model, arrays), biases)
