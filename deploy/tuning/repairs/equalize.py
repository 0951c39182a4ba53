"""Cross-layer equalization: channels of one tensor brought to one size, the next weights in turn.

One int8 scale holds all channels of a tensor, so a channel of small values gets few steps. Between
two layers with nothing, Relu, PRelu, LeakyRelu or pooling between them each channel may be scaled
freely (see `calibrators.weights`). A depthwise convolution between two others takes part in
two pairs, and the pairs are gone through until nothing moves.

The sizes of the channels are those of the first layer's weights, as in the source, or those that
its activations have on a few samples: both forms are given.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.1.

Absorption of high biases: what a Relu never cuts off moves into the next layer's bias.

A channel whose values all lie far above zero spends the int8 steps of its whole tensor on nothing::

    relu(x) = relu(x - c) + c   for x >= c       b1 - c;  b2 + W2 c

with c = max(0, mean - 3 deviations) of the channel on a few samples, so that a value in several
hundred is cut off. Where the next convolution pads with zeros its border would change: such pairs
stay as they are.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.1.3.

SmoothQuant: channels of great activations made smaller before a MatMul, its weights in turn.

Attention models have a few channels a hundred times the others behind a LayerNormalization. Its
scale and shift are constants, into which the factors of `calibrators.weights` go; every layer
that reads the result gets them on its input channels::

    LayerNormalization (or Mul, Add with constants) -> t -> MatMul, MatMul, MatMul (q, k, v)
      scale / s, shift / s                             s * weights

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (ICML 2023), with its strength of 0.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.weights import absorbable, equal_factors, smooth_factors
from deploy.feed.parallel import Sample
from deploy.graph.index import Graph, users
from deploy.tuning.repairs.repair_layers import (
    Layer,
    Link,
    layers_of,
    links_of,
    with_biases,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import channel_maxima, channel_moments

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


def absorb(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """The model with high biases absorbed; none where no channel has one."""
    links = [link for link in links_of(model) if _takes_link(link)]
    axes = {link.first.output: link.first.out_axis for link in links}
    if not axes:
        return
    moments = channel_moments(model, axes, samples, threads=threads)
    graph, found = Graph(model), dict[str, "tuple[Layer, NDArray[np.float64]]"]()
    for link in links:
        part = absorbable(*moments[link.first.output])
        if part.any():
            _move(found, graph, link, part)
    if found:
        yield with_biases(model, found.values())


def _move(
    found: dict[str, tuple[Layer, NDArray[np.float64]]],
    graph: Graph,
    link: Link,
    part: NDArray[np.float64],
) -> None:
    """Take [C] off the first layer's bias and put what it made into the second's."""
    first, second = link.first, link.second
    _, bias = found.get(first.name, (first, first.bias_of(graph)))
    found[first.name] = first, bias - part
    weight = second.by_channel.sum(axis=3, dtype="float64")  # [groups, C_out, C_in]
    groups, _, into = weight.shape
    made = (weight * part.reshape(groups, 1, into)).sum(axis=2).reshape(-1)
    _, bias = found.get(second.name, (second, second.bias_of(graph)))
    found[second.name] = second, bias + made


def _takes_link(link: Link) -> bool:
    """Relu alone between two layers that can hold a bias, the second without padding."""
    given = link.second.given
    padded = any(given.get("pads", ())) or given.get("auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    )
    held = all(layer.kind != "MatMul" or layer.add for layer in (link.first, link.second))
    turned = link.second.kind == "ConvTranspose"  # its border sums fewer taps
    return link.between == ("Relu",) and held and not padded and not turned


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor with the constants [C] that scale and shift it, and the layers that read it."""

    tensor: str
    constants: tuple[str, ...]
    layers: tuple[Layer, ...]


def smooth(
    model: onnx.ModelProto, samples: Sequence[Sample], threads: int
) -> Iterator[onnx.ModelProto]:
    """The smoothed model; none where no constants stand before a MatMul or Gemm."""
    from onnx import numpy_helper

    places = list(_places(model))
    if not places:
        return
    graph, arrays = Graph(model), dict[str, NDArray[Any]]()
    maxima = channel_maxima(model, {place.tensor: -1 for place in places}, samples, threads=threads)
    for place in places:
        weights = [np.abs(one.by_channel).max(axis=(0, 1, 3)) for one in place.layers]
        factors = smooth_factors(maxima[place.tensor], np.max(weights, axis=0))
        for name in place.constants:
            constant = numpy_helper.to_array(graph.initializers[name]).astype(np.float64)
            arrays[name] = (constant.reshape(-1) / factors).reshape(constant.shape)
        for layer in place.layers:
            arrays[layer.weight] = layer.scaled(outputs=np.ones(1), inputs=factors)
    yield with_constants(model, arrays)


def _places(model: onnx.ModelProto) -> Iterator[_Place]:
    graph, read = Graph(model), users(model.graph)
    by_name = {layer.name: layer for layer in layers_of(model)}
    for tensor, node in graph.producer.items():
        readers = [by_name.get(one.name) for one in graph.readers.get(tensor, [])]
        layers = tuple(one for one in readers if one is not None and _takes(one, tensor))
        if not layers or len(layers) != read[tensor] or tensor in graph.outputs:
            continue
        constants = _constants(graph, read, node, layers[0].inputs)
        if constants:
            yield _Place(tensor, constants, layers)


def _takes(layer: Layer, tensor: str) -> bool:
    return layer.kind in ("MatMul", "Gemm") and layer.alone and layer.input == tensor


def _constants(
    graph: Graph, read: Counter[str], node: onnx.NodeProto, channels: int
) -> tuple[str, ...]:
    """The constants [C] that scale (and shift) what a node makes; none where there is no scale."""

    def own(name: str) -> bool:
        held = graph.initializers.get(name)
        last = list(held.dims)[-1:] if held is not None else []
        whole = held is not None and int(np.prod(held.dims)) == channels
        return whole and last == [channels] and read[name] == 1 and graph.is_float(name)

    if node.op_type == "LayerNormalization":
        names = tuple(str(name) for name in node.input[1:3] if name)
        last = next((a.i for a in node.attribute if a.name == "axis"), -1) == -1
        return names if last and all(own(name) for name in names) else ()
    shift = _constant_of(node, own) if node.op_type == "Add" else None
    if shift is not None:
        source = next(name for name in node.input if name != shift)
        maker = graph.producer.get(source)
        if maker is None or read[source] != 1:
            return ()
        node = maker
    scale = _constant_of(node, own) if node.op_type == "Mul" else None
    if scale is None:
        return ()
    return (scale,) if shift is None else (scale, shift)


def _constant_of(node: onnx.NodeProto, own: Callable[[str], bool]) -> str | None:
    """The constant among a node's two operands."""
    found = [str(name) for name in node.input if own(name)]
    return found[0] if len(found) == 1 and len(node.input) == 2 else None
