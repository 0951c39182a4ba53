"""Layers with constant weights, and their quantization in a target's int8 model.

The layers are Conv, ConvTranspose, Gemm, and MatMul with a bias Add. A link is two layers in a row
with only operators between them that commute with a positive factor per channel.

The quantization grid of a layer's weight and input is read from the target's int8 model::

    Q/DQ          x -> Q -> DQ -.
                                 Conv                 integers and scales stand in the pairs
                  w -> [Q] -> DQ'
    fake quant    x -> [Mul] -> Mul -> Round -> Add -> Clip -> Sub -> Conv -> [Add] -> Mul
                    1/factors 1/scale_d                                       scale_d scale_w

so a repair works for any target that writes one of these two forms.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from calibrators.grids import FP8, INT8, Grid, round_to_grid
from deploy.graph.edit import claim_name, copy_message, update_tensors
from deploy.graph.index import Graph, attributes, count_reads

FloatArray = NDArray[np.float32]

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FLOAT = 1  # onnx.TensorProto.FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLayer:
    """A layer with constant weights."""

    name: str
    kind: str  # operator type, one of `HEAVY`
    input: str
    output: str  # tensor that it makes, after the bias Add of a MatMul
    weight: str
    array: FloatArray  # the weight, float32 in ONNX layout
    bias: str  # initializer of the bias, "" for none
    add: str  # name of the bias Add of a MatMul, "" for none
    group: int
    attributes: Mapping[str, Any]
    is_only_reader: bool  # whether no other node reads the weight

    @property
    def out_axis(self) -> int:
        """Axis of the output channels in the output tensor."""
        return -1 if self.kind == "MatMul" else 1

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        if self.is_transposed_conv:
            return int(self.array.shape[1]) * self.group
        if self.kind == "Conv" or self.is_transposed_gemm:
            return int(self.array.shape[0])
        return int(self.array.shape[1])

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return int(self.by_channel.shape[0] * self.by_channel.shape[2])

    @property
    def is_transposed_conv(self) -> bool:
        """Whether it is a ConvTranspose."""
        return self.kind == "ConvTranspose"

    @property
    def is_transposed_gemm(self) -> bool:
        """Whether it is a Gemm whose weight is stored as [C_out, C_in]."""
        return self.kind == "Gemm" and bool(self.attributes.get("transB", 0))

    @property
    def by_channel(self) -> FloatArray:
        """The weight as [groups, C_out per group, C_in per group, taps]; a view or a copy."""
        array, group = self.array, self.group
        if self.kind == "Conv":
            return array.reshape(group, array.shape[0] // group, array.shape[1], -1)
        if self.is_transposed_conv:
            split = array.reshape(group, array.shape[0] // group, array.shape[1], -1)
            return split.swapaxes(1, 2)
        matrix = array if self.is_transposed_gemm else array.T
        return matrix[None, :, :, None]

    @property
    def rows(self) -> NDArray[Any]:
        """The weight as [groups, C_out per group, values of an input patch]."""
        groups, out = self.by_channel.shape[:2]
        return self.by_channel.reshape(groups, out, -1)

    def from_channels(self, channels: NDArray[Any]) -> FloatArray:
        """Inverse of `by_channel`, for a weight of the same shape."""
        if self.is_transposed_conv:
            channels = channels.swapaxes(1, 2)
        if self.kind in ("Conv", "ConvTranspose"):
            return np.ascontiguousarray(channels.reshape(self.array.shape), np.float32)
        matrix = channels[0, :, :, 0]
        return np.ascontiguousarray(matrix if self.is_transposed_gemm else matrix.T, np.float32)

    def scaled(self, *, outputs: NDArray[Any], inputs: NDArray[Any]) -> FloatArray:
        """Return the weight times factors per output channel, [C_out] or [1], and input channel."""
        wide = self.by_channel.astype(np.float64)
        groups, out, into, _ = wide.shape
        rows = np.broadcast_to(outputs, groups * out).reshape(groups, out, 1, 1)
        columns = np.broadcast_to(inputs, groups * into).reshape(groups, 1, into, 1)
        return self.from_channels(wide * rows * columns)

    def bias_values(self, graph: Graph) -> NDArray[np.float64]:
        """Return the bias per output channel, [C_out]; zeros where there is none."""
        if not self.bias:
            return np.zeros(self.out_channels)
        array = numpy_helper.to_array(graph.initializers[self.bias]).astype(np.float64)
        return np.broadcast_to(array.reshape(-1), (self.out_channels,)).copy()


def find_weighted_layers(model: onnx.ModelProto) -> tuple[WeightedLayer, ...]:
    """Return the layers of the main graph, in its order."""
    graph, read_counts = Graph(model), count_reads(model.graph)
    layers = (_layer(graph, read_counts, node) for node in graph.nodes if node.op_type in HEAVY)
    return tuple(layer for layer in layers if layer is not None)


def _layer(
    graph: Graph, read_counts: Mapping[str, int], node: onnx.NodeProto
) -> WeightedLayer | None:
    weight = graph.initializers.get(node.input[1]) if len(node.input) > 1 else None
    if weight is None or weight.data_type != _FLOAT or node.domain not in ("", "ai.onnx"):
        return None
    given = attributes(node)
    least_rank = 2 if node.op_type in ("Gemm", "MatMul") else 3
    plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
    if len(weight.dims) < least_rank or (least_rank == 2 and len(weight.dims) > 2) or not plain:
        return None
    array = np.asarray(numpy_helper.to_array(weight), np.float32)
    output, bias, add = str(node.output[0]), "", None
    if node.op_type == "MatMul":
        add = graph.bias_add(node, int(array.shape[1]))
        if add is not None:
            bias = next(str(name) for name in add.input if name != output)
            output = str(add.output[0])
    elif len(node.input) > 2 and node.input[2]:
        bias = str(node.input[2])
        if bias not in graph.initializers:
            return None
    return WeightedLayer(
        name=node.name,
        kind=node.op_type,
        input=str(node.input[0]),
        output=output,
        weight=str(node.input[1]),
        array=array,
        bias=bias,
        add="" if add is None else add.name,
        group=int(given.get("group", 1)),
        attributes=given,
        is_only_reader=read_counts[node.input[1]] == 1,
    )


def with_constants(model: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """Return a copy in which the named initializers hold these arrays, as float32."""
    changed = copy_message(model)
    tensors = {
        name: numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name)
        for name, array in arrays.items()
    }
    update_tensors(changed.graph.initializer, tensors)
    return changed


def with_biases(
    model: onnx.ModelProto, biases: Iterable[tuple[WeightedLayer, NDArray[np.float64]]]
) -> onnx.ModelProto:
    """Return a copy with these biases [C_out], each in an initializer that no other layer reads.

    A MatMul without a bias Add is left as it is.
    """
    read_counts = count_reads(model.graph)
    used_names = {*read_counts, *(tensor.name for tensor in model.graph.initializer)}
    arrays: dict[str, NDArray[Any]] = {}
    new_biases: dict[str, tuple[WeightedLayer, str]] = {}
    for layer, values in biases:
        if layer.kind == "MatMul" and not layer.add:
            continue
        name = layer.bias
        if not name or read_counts[name] > 1:
            name = claim_name(f"{layer.output}_bias", used_names)
        arrays[name] = values
        new_biases[layer.add or layer.name] = layer, name
    changed = with_constants(model, arrays)
    for node in changed.graph.node:
        if node.name in new_biases:
            _set_bias(node, *new_biases[node.name])
    return changed


def original_constants(
    model: onnx.ModelProto, repaired: onnx.ModelProto
) -> dict[str, dict[str, onnx.TensorProto]]:
    """Return layer -> its weight and bias before the repairs, under their names after them."""
    graph, before = Graph(model), {layer.name: layer for layer in find_weighted_layers(model)}
    result = {}
    for layer in find_weighted_layers(repaired):
        own = before[layer.name]
        result[layer.name] = {layer.weight: graph.initializers[own.weight]}
        if layer.bias == own.bias and layer.bias:
            result[layer.name][layer.bias] = graph.initializers[own.bias]
        elif layer.bias:
            bias = np.asarray(own.bias_values(graph), np.float32)
            result[layer.name][layer.bias] = numpy_helper.from_array(bias, layer.bias)
    return result


def restore_constants(
    model: onnx.ModelProto,
    originals: Mapping[str, Mapping[str, onnx.TensorProto]],
    layers: Iterable[str],
) -> None:
    """Give layers of a model their `original_constants` back, in place."""
    present = {tensor.name for tensor in model.graph.initializer}
    own = [originals[name] for name in layers if name in originals]
    restored = {n: tensor for one in own for n, tensor in one.items() if n in present}
    update_tensors(model.graph.initializer, restored)


def _set_bias(node: onnx.NodeProto, layer: WeightedLayer, name: str) -> None:
    """Make a node read its bias under this name."""
    if layer.add:
        node.input[list(node.input).index(layer.bias)] = name
        return
    while len(node.input) < 3:
        node.input.append("")
    node.input[2] = name


_COMMUTES = frozenset({"Relu", "PRelu", "LeakyRelu", "Identity", "MaxPool", "AveragePool"})
_CONVS = ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class LayerLink:
    """Two layers in a row: only `second` reads the output of `first`."""

    first: WeightedLayer
    second: WeightedLayer


def find_layer_links(model: onnx.ModelProto) -> tuple[LayerLink, ...]:
    """Return every link, in graph order; a layer may belong to two."""
    graph = Graph(model)
    layers = find_weighted_layers(model)
    by_name = {layer.name: layer for layer in layers}
    links = (_link(graph, by_name, layer) for layer in layers)
    return tuple(link for link in links if link is not None)


def _link(graph: Graph, layers: dict[str, WeightedLayer], first: WeightedLayer) -> LayerLink | None:
    path = list(_path(graph, first.output))
    last = path[-1] if path else None
    second = layers.get(last.name) if last is not None else None
    if last is None or second is None or second.input not in last.input[:1]:
        return None
    convs = first.kind in _CONVS, second.kind in _CONVS
    fits = convs in ((True, True), (False, False)) and first.out_channels == second.in_channels
    pools = any(node.op_type in ("MaxPool", "AveragePool") for node in path[:-1])
    exclusive = first.is_only_reader and second.is_only_reader and not (pools and not all(convs))
    return LayerLink(first, second) if fits and exclusive else None


def _path(graph: Graph, tensor: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes downstream of a tensor, each its only reader, up to the next layer."""
    while (node := graph.only_reader(tensor)) is not None and node.input[0] == tensor:
        yield node
        if (
            node.op_type not in _COMMUTES
            or len(node.output) != 1
            or any(name not in graph.constants for name in node.input[1:])
        ):
            return
        tensor = str(node.output[0])


Float64Array = NDArray[np.float64]

_HALF = 0.5001  # half a step, plus the error of float32 scales
_FAKE_QUANT = ("Sub", "Clip", "Add", "Round", "Mul")  # upstream from a layer's input


@dataclass(frozen=True, slots=True, eq=False)
class LayerQuantization:
    """Quantization of a layer in the int8 model."""

    weight_scale: Float64Array  # weight scales, shaped to broadcast over the float weight
    input_scale: float
    zero_point: int
    # low, high: smallest and largest stored value of the input
    low: float
    high: float
    grid: Grid = INT8  # integer or FP8 grid whose rounding rule applies to both
    # whether the weight is rounded to nearest; False for weights rounded by AMCT's AdaRound, which
    # stay as they are
    is_nearest: bool = True
    # what AMCT's DMQ divides the input by, [groups, K, 1], and multiplies the weight by before both
    # are rounded; None without DMQ
    factors: FloatArray | None = None

    def quantize_weight(self, layer: WeightedLayer) -> Float64Array:
        """Return a layer's weight after quantization, in ONNX layout."""
        steps = round_to_grid(layer.array / self.weight_scale, self.grid)
        return np.asarray(steps * self.weight_scale, np.float64)

    def quantize_inputs(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return input values after quantization."""
        balanced = values if self.factors is None else values / self.factors
        steps = np.asarray(balanced, np.float32) / np.float32(self.input_scale)
        steps = round_to_grid(steps, self.grid) + np.float32(self.zero_point)
        clipped = np.clip(steps, self.low, self.high) - self.zero_point
        result = np.asarray(clipped * np.float32(self.input_scale), np.float32)
        return result if self.factors is None else result * self.factors


def read_quantization(
    graph: Graph, node: onnx.NodeProto, layer: WeightedLayer
) -> LayerQuantization | None:
    """Read a layer's quantization from an int8 model; None if it runs in float or another form."""
    weight, source = graph.producer.get(node.input[1]), graph.producer.get(node.input[0])
    if source is None:
        return None
    if weight is None:
        return _from_fake_quant(graph, node, layer)
    if weight.op_type == source.op_type == "DequantizeLinear":
        return _from_pairs(graph, node, layer)
    return None


def _from_pairs(
    graph: Graph, node: onnx.NodeProto, layer: WeightedLayer
) -> LayerQuantization | None:
    input_dq, weight_dq = (graph.producer[name] for name in node.input[:2])
    scales = _array(graph, weight_dq.input[1]).astype(np.float64)
    rank = layer.array.ndim
    axis = int(attributes(weight_dq).get("axis", 1)) if scales.size > 1 else -1
    if (node.op_type, layer.kind) == ("Conv", "ConvTranspose"):  # repeated for each pixel of a tile
        axis = 1
    if scales.size > 1:
        scales = scales[: layer.out_channels]  # without padding channels
    zero = _array(graph, input_dq.input[2])
    step = _array(graph, input_dq.input[1])
    if step.size != 1:
        return None
    fp8 = graph.constants[input_dq.input[2]].data_type == TensorProto.FLOAT8E4M3FN
    low, high = (
        (FP8.qmin, FP8.qmax) if fp8 else (np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max)
    )
    return LayerQuantization(
        weight_scale=scales.reshape([-1 if a == axis else 1 for a in range(rank)]),
        input_scale=float(step.reshape(-1)[0]),
        zero_point=int(zero.reshape(-1)[0]),
        low=float(low),
        high=float(high),
        grid=FP8 if fp8 else INT8,
    )


def _from_fake_quant(
    graph: Graph, node: onnx.NodeProto, layer: WeightedLayer
) -> LayerQuantization | None:
    chain = _fake_quant_chain(graph, node)
    after = graph.only_reader(node.output[0])
    if after is not None and after.op_type == "Add":
        after = graph.only_reader(after.output[0])
    if chain is None or after is None or after.op_type != "Mul":
        return None
    _, clip, add, _, mul = chain
    inverse = float(_array(graph, mul.input[1]))
    scales = _array(graph, after.input[1]).astype(np.float64).reshape(-1) * inverse
    if scales.size not in (1, layer.out_channels):
        return None
    groups = layer.by_channel.shape[0]
    columns = np.broadcast_to(scales, layer.out_channels).reshape(groups, -1, 1, 1)
    inverse_factors = _inverse_factors(graph, node, mul)
    if inverse_factors is not None:
        columns = columns * inverse_factors.reshape(groups, 1, -1, 1)
    wide = layer.from_channels(np.ones(layer.by_channel.shape) * columns).astype(np.float64)
    return LayerQuantization(
        weight_scale=wide,
        input_scale=1 / inverse,
        zero_point=int(_array(graph, add.input[1])),
        low=int(_array(graph, clip.input[1])),
        high=int(_array(graph, clip.input[2])),
        is_nearest=_is_nearest(_array(graph, node.input[1]), layer, wide),
        factors=None if inverse_factors is None else _factors(inverse_factors, layer),
    )


def _inverse_factors(
    graph: Graph, node: onnx.NodeProto, first: onnx.NodeProto
) -> FloatArray | None:
    """Return 1 / DMQ's factors of a node's input channels, [C_in]; None without DMQ."""
    if first.input[0] != f"{node.name}.mul.output0":
        return None
    balancing = graph.producer[first.input[0]]
    return np.asarray(_array(graph, balancing.input[1]), np.float32).reshape(-1)


def _factors(inverse: FloatArray, layer: WeightedLayer) -> FloatArray:
    """Return DMQ's factors as [groups, K, 1], for patches of the input."""
    groups, places = layer.by_channel.shape[0], layer.by_channel.shape[3]
    return np.asarray(np.float32(1) / inverse, np.float32).repeat(places).reshape(groups, -1, 1)


def _is_nearest(codes: NDArray[Any], layer: WeightedLayer, scales: Float64Array) -> bool:
    stored = codes.T if layer.is_transposed_gemm else codes
    steps = np.clip(layer.array / scales, INT8.qmin, INT8.qmax)
    return bool(np.abs(steps - stored).max() < _HALF)


def _fake_quant_chain(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Return the nodes that fake-quantize a layer's input, last first; None for another form."""
    chain: list[onnx.NodeProto] = []
    for op_type in _FAKE_QUANT:
        maker = graph.producer.get((chain[-1] if chain else node).input[0])
        if maker is None or maker.op_type != op_type:
            return None
        chain.append(maker)
    return chain


def _array(graph: Graph, name: str) -> NDArray[Any]:
    return np.asarray(numpy_helper.to_array(graph.constants[name]))


def read_all_quantizations(
    int8: onnx.ModelProto, layers: tuple[WeightedLayer, ...]
) -> dict[str, tuple[WeightedLayer, LayerQuantization]]:
    """Return the layers that an int8 model runs in integers, by name."""
    graph = Graph(int8)
    nodes = {node.name: node for node in graph.nodes}
    return {
        layer.name: (layer, how)
        for layer in layers
        if layer.name in nodes
        and (how := read_quantization(graph, nodes[layer.name], layer)) is not None
    }
