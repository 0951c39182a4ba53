"""Cross-layer equalization: channels of one tensor brought to one size, the next weights in turn.

One int8 scale holds all channels of a tensor, so a channel of small values gets few steps. Between
two layers with nothing, Relu, PRelu, LeakyRelu or pooling between them each channel may be scaled
freely (see `calibrators.weights`). A depthwise convolution between two others takes part in
two pairs, and the pairs are gone through until nothing moves.

The sizes of the channels are those of the first layer's weights, as in the source, or those that
its activations have on a few samples: both forms are given.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.weights import equal_factors
from deploy.feed.parallel import Sample
from deploy.graph.index import Graph
from deploy.tuning.repairs.repair_layers import (
    Link,
    layers_of,
    links_of,
    with_biases,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import channel_maxima

if TYPE_CHECKING:
    import onnx


_SWEEPS = 20
_STILL = 1e-3  # natural logarithm of a factor below which nothing moves

Factors = dict[str, NDArray[np.float64]]  # first layer of a link -> [C]


def equalize(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """The model equalized by weights, and by activations; none without two layers in a row."""
    links = links_of(model)
    if not links:
        return
    yield _equalized(model, links, _factors(links, {}))
    axes = {link.first.output: link.first.out_axis for link in links}
    maxima = channel_maxima(model, axes, samples, threads=threads)
    yield _equalized(model, links, _factors(links, maxima))


def _factors(links: Sequence[Link], maxima: Mapping[str, NDArray[np.float64]]) -> Factors:
    """Factors [C] of each link: of its activations' maxima where given, else of its weights."""
    factors = {link.first.name: np.ones(link.first.outputs) for link in links}
    sizes = {
        layer.name: np.abs(layer.by_channel.astype(np.float64)).max(axis=3)
        for link in links
        for layer in (link.first, link.second)
    }  # [groups, C_out, C_in] of a group
    before = {link.second.name: link.first.name for link in links}
    for _ in range(_SWEEPS):
        moved = 0.0
        for link in links:
            first, second = link.first.name, link.second.name
            if link.first.output in maxima:
                made = maxima[link.first.output] / factors[first]
            else:
                made = _scaled(sizes, factors, before, first).max(axis=2).reshape(-1)
            read = _scaled(sizes, factors, before, second).max(axis=1).reshape(-1)
            step = equal_factors(made, read)
            factors[first] = factors[first] * step
            moved = max(moved, float(np.abs(np.log(step)).max()))
        if moved < _STILL:
            break
    return factors


def _scaled(
    sizes: Mapping[str, NDArray[np.float64]], factors: Factors, before: Mapping[str, str], name: str
) -> NDArray[np.float64]:
    """Sizes [groups, C_out, C_in] of a layer's weights with the factors found so far."""
    size = sizes[name]
    groups, out, into = size.shape
    if name in factors:
        size = size / factors[name].reshape(groups, out, 1)
    if name in before:
        size = size * factors[before[name]].reshape(groups, 1, into)
    return size


def _equalized(model: onnx.ModelProto, links: Sequence[Link], factors: Factors) -> onnx.ModelProto:
    """The model with its constants scaled by the links' factors, in float64."""
    before = {link.second.name: link.first.name for link in links}
    graph, one = Graph(model), np.ones(1)
    arrays, biases = {}, []
    for layer in layers_of(model):
        out, into = factors.get(layer.name, one), factors.get(before.get(layer.name, ""), one)
        if out is one and into is one:
            continue
        arrays[layer.weight] = layer.scaled(outputs=1 / out, inputs=into)
        if layer.bias and out is not one:
            biases.append((layer, layer.bias_of(graph) / out))
    return with_biases(with_constants(model, arrays), biases)
