"""SmoothQuant: channels of great activations made smaller before a MatMul, its weights in turn.

Attention models have a few channels a hundred times the others behind a LayerNormalization. Its
scale and shift are constants, into which the factors of `calibrators.equalization` go; every layer
that reads the result gets them on its input channels::

    LayerNormalization (or Mul, Add with constants) -> t -> MatMul, MatMul, MatMul (q, k, v)
      scale / s, shift / s                             s * weights

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (ICML 2023), with its strength of 0.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.equalization import smooth_factors
from deploy.feed.parallel import Sample
from deploy.graph.index import Graph, users
from deploy.tuning.repairs.repair_layers import Layer, layers_of, with_constants
from deploy.tuning.repairs.sample_runs import channel_maxima

if TYPE_CHECKING:
    import onnx


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
