"""The layers whose constants a repair may change, and how: weights, biases, channels.

A repair is a change of the float model's constants, so that every target obeys it by itself. These
are the layers with constant weights: Conv, ConvTranspose, Gemm, and MatMul with the Add behind it.

Two layers in a row, and between them only what lets a positive factor a channel through.

What a target's int8 model does to a layer's weight and input, read from the model itself.

::

    Q/DQ          x -> Q -> DQ -.
                                 Conv                 integers and scales stand in the pairs
                  w -> [Q] -> DQ'
    fake quant    x -> Mul -> Round -> Add -> Clip -> Sub -> Conv -> [Add] -> Mul
                    1/scale_d                                         scale_d scale_w

So a repair sees the grids of any target that gives one of these two forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import FP8, INT8, Grid, rounded
from deploy.graph.edit import copied, unused, update
from deploy.graph.index import Graph, attributes, users

if TYPE_CHECKING:
    import onnx


FloatArray = NDArray[np.float32]

HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FLOAT = 1  # onnx.TensorProto.FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer with constant weights.

    Attributes:
        name: of the node.
        kind: one of `HEAVY`.
        input: the tensor that it reads.
        output: the tensor that it makes, after the Add that holds a MatMul's bias.
        weight: its initializer.
        array: the weight, float32 in ONNX layout.
        bias: its initializer, "" where there is none.
        add: name of the Add that holds a MatMul's bias, "" where there is none.
        group: groups of a convolution.
        given: the node's attributes.
        alone: whether no other node reads the weight.
    """

    name: str
    kind: str
    input: str
    output: str
    weight: str
    array: FloatArray
    bias: str
    add: str
    group: int
    given: Mapping[str, Any]
    alone: bool

    @property
    def out_axis(self) -> int:
        """Axis of the output channels in what the layer makes."""
        return -1 if self.kind == "MatMul" else 1

    @property
    def outputs(self) -> int:
        """Output channels."""
        if self.transposed:
            return int(self.array.shape[1]) * self.group
        if self.kind == "Conv" or self.turned:
            return int(self.array.shape[0])
        return int(self.array.shape[1])

    @property
    def inputs(self) -> int:
        """Input channels."""
        return int(self.by_channel.shape[0] * self.by_channel.shape[2])

    @property
    def transposed(self) -> bool:
        """A transposed convolution."""
        return self.kind == "ConvTranspose"

    @property
    def turned(self) -> bool:
        """A Gemm whose weight is stored [C_out, C_in]."""
        return self.kind == "Gemm" and bool(self.given.get("transB", 0))

    @property
    def by_channel(self) -> FloatArray:
        """The weight as [groups, C_out of a group, C_in of a group, taps]; a view or a copy."""
        array, group = self.array, self.group
        if self.kind == "Conv":
            return array.reshape(group, array.shape[0] // group, array.shape[1], -1)
        if self.transposed:
            split = array.reshape(group, array.shape[0] // group, array.shape[1], -1)
            return split.swapaxes(1, 2)
        matrix = array if self.turned else array.T
        return matrix[None, :, :, None]

    @property
    def rows(self) -> NDArray[Any]:
        """The weight as [groups, C_out of a group, values of an input patch]."""
        groups, out = self.by_channel.shape[:2]
        return self.by_channel.reshape(groups, out, -1)

    def from_channels(self, channels: NDArray[Any]) -> FloatArray:
        """Inverse of `by_channel`, for a weight of the same sizes."""
        if self.transposed:
            channels = channels.swapaxes(1, 2)
        if self.kind in ("Conv", "ConvTranspose"):
            return np.ascontiguousarray(channels.reshape(self.array.shape), np.float32)
        matrix = channels[0, :, :, 0]
        return np.ascontiguousarray(matrix if self.turned else matrix.T, np.float32)

    def scaled(self, *, outputs: NDArray[Any], inputs: NDArray[Any]) -> FloatArray:
        """The weight times factors of its channels: [C_out] or [1], [C_in] or [1]."""
        wide = self.by_channel.astype(np.float64)
        groups, out, into, _ = wide.shape
        rows = np.broadcast_to(outputs, groups * out).reshape(groups, out, 1, 1)
        columns = np.broadcast_to(inputs, groups * into).reshape(groups, 1, into, 1)
        return self.from_channels(wide * rows * columns)

    def bias_of(self, graph: Graph) -> NDArray[np.float64]:
        """The bias of every output channel, [C_out]; zeros where there is none."""
        from onnx import numpy_helper

        if not self.bias:
            return np.zeros(self.outputs)
        array = numpy_helper.to_array(graph.initializers[self.bias]).astype(np.float64)
        return np.broadcast_to(array.reshape(-1), (self.outputs,)).copy()


def layers_of(model: onnx.ModelProto) -> tuple[Layer, ...]:
    """The layers of the main graph, in its order."""
    graph, read = Graph(model), users(model.graph)
    found = (_layer(graph, read, node) for node in graph.nodes if node.op_type in HEAVY)
    return tuple(layer for layer in found if layer is not None)


def _layer(graph: Graph, read: Mapping[str, int], node: onnx.NodeProto) -> Layer | None:
    from onnx import numpy_helper

    weight = graph.initializers.get(node.input[1]) if len(node.input) > 1 else None
    if weight is None or weight.data_type != _FLOAT or node.domain not in ("", "ai.onnx"):
        return None
    given = attributes(node)
    wants = 2 if node.op_type in ("Gemm", "MatMul") else 3
    plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
    if len(weight.dims) < wants or (wants == 2 and len(weight.dims) > 2) or not plain:
        return None
    array = np.asarray(numpy_helper.to_array(weight), np.float32)
    output, bias, add = str(node.output[0]), "", ""
    if node.op_type == "MatMul":
        bias, add, output = _added(graph, node, int(array.shape[1]))
    elif len(node.input) > 2 and node.input[2]:
        bias = str(node.input[2])
        if bias not in graph.initializers:
            return None
    return Layer(
        name=node.name,
        kind=node.op_type,
        input=str(node.input[0]),
        output=output,
        weight=str(node.input[1]),
        array=array,
        bias=bias,
        add=add,
        group=int(given.get("group", 1)),
        given=given,
        alone=read[node.input[1]] == 1,
    )


def _added(graph: Graph, node: onnx.NodeProto, columns: int) -> tuple[str, str, str]:
    """(bias, name of its Add, what it makes) behind a MatMul; ("", "", its output) without."""
    out = str(node.output[0])
    readers = graph.readers.get(out, [])
    if len(readers) == 1 and readers[0].op_type == "Add" and out not in graph.outputs:
        after = readers[0]
        others = [name for name in after.input if name != out]
        bias = graph.initializers.get(others[0]) if len(others) == 1 else None
        if bias is not None and list(bias.dims) == [columns] and bias.data_type == _FLOAT:
            return str(others[0]), after.name, str(after.output[0])
    return "", "", out


def with_constants(model: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """A copy whose initializers of these names hold these arrays, as float32."""
    from onnx import numpy_helper

    changed = copied(model)
    tensors = {
        name: numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name)
        for name, array in arrays.items()
    }
    update(changed.graph.initializer, tensors)
    return changed


def with_biases(
    model: onnx.ModelProto, biases: Iterable[tuple[Layer, NDArray[np.float64]]]
) -> onnx.ModelProto:
    """A copy with these biases [C_out], each layer with one of its own.

    A MatMul without an Add behind it has no place for one and stays as it is.
    """
    read = users(model.graph)
    taken = {*read, *(tensor.name for tensor in model.graph.initializer)}
    arrays: dict[str, NDArray[Any]] = {}
    places: dict[str, tuple[Layer, str]] = {}
    for layer, values in biases:
        if layer.kind == "MatMul" and not layer.add:
            continue
        name = layer.bias
        if not name or read[name] > 1:
            name = unused(f"{layer.output}_bias", taken)
            taken.add(name)
        arrays[name] = values
        places[layer.add or layer.name] = layer, name
    changed = with_constants(model, arrays)
    for node in changed.graph.node:
        if node.name in places:
            _put(node, *places[node.name])
    return changed


def _put(node: onnx.NodeProto, layer: Layer, name: str) -> None:
    """Let a node read its bias under this name."""
    if layer.add:
        node.input[list(node.input).index(layer.bias)] = name
        return
    while len(node.input) < 3:
        node.input.append("")
    node.input[2] = name


_PASSES = frozenset({"Relu", "PRelu", "LeakyRelu", "Identity", "MaxPool", "AveragePool"})
_CONVS = ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class Link:
    """Two layers in a row: only `second` reads what `first` makes."""

    first: Layer
    second: Layer


def links_of(model: onnx.ModelProto) -> tuple[Link, ...]:
    """Every such pair, in the order of the graph; a layer may be in two of them."""
    graph = Graph(model)
    layers = layers_of(model)
    by_name = {layer.name: layer for layer in layers}
    found = (_link(graph, by_name, layer) for layer in layers)
    return tuple(link for link in found if link is not None)


def _link(graph: Graph, layers: dict[str, Layer], first: Layer) -> Link | None:
    path = list(_path(graph, first.output))
    end = path[-1] if path else None
    second = layers.get(end.name) if end is not None else None
    if end is None or second is None or second.input not in end.input[:1]:
        return None
    convs = first.kind in _CONVS, second.kind in _CONVS
    fits = convs in ((True, True), (False, False)) and first.outputs == second.inputs
    pools = any(node.op_type in ("MaxPool", "AveragePool") for node in path[:-1])
    owned = first.alone and second.alone and not (pools and not all(convs))
    return Link(first, second) if fits and owned else None


def _path(graph: Graph, tensor: str) -> Iterator[onnx.NodeProto]:
    """The nodes behind a tensor, one reader each, up to the first that does not pass factors."""
    while True:
        readers = graph.readers.get(tensor, [])
        shared = tensor in graph.outputs or tensor in graph.captured
        if len(readers) != 1 or shared or readers[0].input[0] != tensor:
            return
        node = readers[0]
        yield node
        if node.op_type not in _PASSES or len(node.output) != 1 or not _constant(graph, node):
            return
        tensor = str(node.output[0])


def _constant(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether all but the first input of a node are constants."""
    return all(name in graph.constants for name in node.input[1:])


Float64Array = NDArray[np.float64]

_HALF = 0.5001  # of a step, and what float32 scales leave
_QUANT = ("Sub", "Clip", "Add", "Round", "Mul")  # from a fake-quantized layer's input backwards


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A layer of the int8 model.

    Attributes:
        weight: scales to divide its weight by, shaped to broadcast over the float form.
        input: scale of its input, and the integer of a real 0.
        low, high: least and greatest stored value of the input.
        grid: whose rule rounds both.
        nearest: whether its weight is rounded to nearest; AMCT's AdaRound does not, and what it
            found is left as it is.
    """

    weight: Float64Array
    input: float
    zero: int
    low: float
    high: float
    grid: Grid = INT8
    nearest: bool = True

    def weights(self, layer: Layer) -> Float64Array:
        """What is left of a layer's weight, in ONNX layout."""
        steps = rounded(layer.array / self.weight, self.grid)
        return np.asarray(steps * self.weight, np.float64)

    def inputs(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """What is left of input values."""
        steps = np.asarray(values, np.float32) / np.float32(self.input)
        steps = rounded(steps, self.grid) + np.float32(self.zero)
        clipped = np.clip(steps, self.low, self.high) - self.zero
        return np.asarray(clipped * np.float32(self.input), np.float32)


def written_in(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    """How an int8 model has a layer.

    Args:
        graph: of the int8 model.
        node: the layer's in it.
        layer: in the float model.

    Returns:
        None where the node does not run in integers, or in a form that is not known.
    """
    weight, source = graph.producer.get(node.input[1]), graph.producer.get(node.input[0])
    if source is None:
        return None
    if weight is None:
        return _of_fake_quant(graph, node, layer)
    if weight.op_type == source.op_type == "DequantizeLinear":
        return _of_pairs(graph, node, layer)
    return None


def _of_pairs(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    from onnx import TensorProto

    source, weight = (graph.producer[name] for name in node.input[:2])
    scales = _array(graph, weight.input[1]).astype(np.float64)
    rank = layer.array.ndim
    axis = int(attributes(weight).get("axis", 1)) if scales.size > 1 else -1
    if (node.op_type, layer.kind) == ("Conv", "ConvTranspose"):  # once for each pixel of a tile
        axis = 1
    if scales.size > 1:
        scales = scales[: layer.outputs]  # without channels that are zero
    zero = _array(graph, source.input[2])
    step = _array(graph, source.input[1])
    if step.size != 1:
        return None
    fp8 = graph.constants[source.input[2]].data_type == TensorProto.FLOAT8E4M3FN
    low, high = (
        (FP8.qmin, FP8.qmax) if fp8 else (np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max)
    )
    return Written(
        weight=scales.reshape([-1 if a == axis else 1 for a in range(rank)]),
        input=float(step.reshape(-1)[0]),
        zero=int(zero.reshape(-1)[0]),
        low=float(low),
        high=float(high),
        grid=FP8 if fp8 else INT8,
    )


def _of_fake_quant(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    chain = _back(graph, node)
    after = _only_reader(graph, node.output[0])
    if after is not None and after.op_type == "Add":
        after = _only_reader(graph, after.output[0])
    if chain is None or after is None or after.op_type != "Mul":
        return None
    _, clip, add, _, mul = chain
    if mul.input[0].endswith(".mul.output0"):  # balanced by DMQ: other weights are rounded
        return None
    inverse = float(_array(graph, mul.input[1]))
    scales = _array(graph, after.input[1]).astype(np.float64).reshape(-1) * inverse
    if scales.size not in (1, layer.outputs):
        return None
    groups = layer.by_channel.shape[0]
    columns = np.broadcast_to(scales, layer.outputs).reshape(groups, -1, 1, 1)
    wide = layer.from_channels(np.ones(layer.by_channel.shape) * columns).astype(np.float64)
    return Written(
        weight=wide,
        input=1 / inverse,
        zero=int(_array(graph, add.input[1])),
        low=int(_array(graph, clip.input[1])),
        high=int(_array(graph, clip.input[2])),
        nearest=_to_nearest(_array(graph, node.input[1]), layer, wide),
    )


def _to_nearest(codes: NDArray[Any], layer: Layer, scales: Float64Array) -> bool:
    """Whether each weight of this layer has its nearest code."""
    stored = codes.T if layer.turned else codes
    steps = np.clip(layer.array / scales, INT8.qmin, INT8.qmax)
    return bool(np.abs(steps - stored).max() < _HALF)


def _back(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that fake-quantize a layer's input, the last first; None for another form."""
    found: list[onnx.NodeProto] = []
    for op_type in _QUANT:
        maker = graph.producer.get((found[-1] if found else node).input[0])
        if maker is None or maker.op_type != op_type:
            return None
        found.append(maker)
    return found


def _only_reader(graph: Graph, tensor: str) -> onnx.NodeProto | None:
    readers = graph.readers.get(tensor, [])
    return readers[0] if len(readers) == 1 else None


def _array(graph: Graph, name: str) -> NDArray[Any]:
    from onnx import numpy_helper

    return np.asarray(numpy_helper.to_array(graph.constants[name]))


def all_written(
    int8: onnx.ModelProto, layers: tuple[Layer, ...]
) -> dict[str, tuple[Layer, Written]]:
    """The layers that an int8 model runs in integers, by name."""
    graph = Graph(int8)
    nodes = {node.name: node for node in graph.nodes}
    found = {
        layer.name: (layer, how)
        for layer in layers
        if layer.name in nodes and (how := written_in(graph, nodes[layer.name], layer)) is not None
    }
    return found
