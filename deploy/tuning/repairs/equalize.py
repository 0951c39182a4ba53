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

from calibrators.weights import equal_factors
from deploy.feed.parallel import Sample
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    LayerLink,
    find_layer_links,
    find_weighted_layers,
    with_biases,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import channel_maxima

_MAX_SWEEPS = 20
_CONVERGED = 1e-3  # log of a factor: smaller changes end the sweeps

Factors = dict[str, Float64Array]  # first layer of a link -> [C]


def equalize(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """Yield the model equalized by weights, then by activations; nothing without a link."""
    links = find_layer_links(model)
    if not links:
        return
    yield _scale_layers(model, links, _find_factors(links, {}))
    axes = {link.first.output: link.first.out_axis for link in links}
    maxima = channel_maxima(model, axes, samples, threads=threads)
    yield _scale_layers(model, links, _find_factors(links, maxima))


def _find_factors(links: Sequence[LayerLink], maxima: Mapping[str, Float64Array]) -> Factors:
    """Return each link's factors [C], by the maxima of its activations or else its weights."""
    factors = {link.first.name: np.ones(link.first.out_channels) for link in links}
    previous = {link.second.name: link.first.name for link in links}
    weight_sizes: dict[str, Float64Array] = {}  # [groups, C_out, C_in] of a group
    for link in links:
        for layer in (link.first, link.second):
            weight_sizes[layer.name] = np.abs(layer.by_channel.astype(np.float64)).max(axis=3)

    def scaled_sizes(name: str) -> Float64Array:
        """Return |weights| of a layer with the current factors applied."""
        sizes = weight_sizes[name]
        groups, out, into = sizes.shape
        if name in factors:
            sizes = sizes / factors[name].reshape(groups, out, 1)
        if name in previous:
            sizes = sizes * factors[previous[name]].reshape(groups, 1, into)
        return sizes

    for _ in range(_MAX_SWEEPS):
        largest_change = 0.0
        for link in links:
            first = link.first.name
            if link.first.output in maxima:
                first_range = maxima[link.first.output] / factors[first]
            else:
                first_range = scaled_sizes(first).max(axis=2).reshape(-1)
            second_range = scaled_sizes(link.second.name).max(axis=1).reshape(-1)
            step = equal_factors(first_range, second_range)
            factors[first] = factors[first] * step
            largest_change = max(largest_change, float(np.abs(np.log(step)).max()))
        if largest_change < _CONVERGED:
            break
    return factors


def _scale_layers(
    model: onnx.ModelProto, links: Sequence[LayerLink], factors: Factors
) -> onnx.ModelProto:
    """Return the model with its constants scaled by the links' factors, computed in float64."""
    previous = {link.second.name: link.first.name for link in links}
    unscaled = np.ones(1)
    arrays, biases = {}, []
    for layer in find_weighted_layers(model):
        output_factors = factors.get(layer.name, unscaled)
        input_factors = factors.get(previous.get(layer.name, ""), unscaled)
        if layer.name in factors or layer.name in previous:
            scaled = layer.scaled(outputs=1 / output_factors, inputs=input_factors)
            arrays[layer.weight] = scaled
        if layer.name in factors and layer.bias:
            biases.append((layer, layer.bias_values / output_factors))
    return with_biases(with_constants(model, arrays), biases)
