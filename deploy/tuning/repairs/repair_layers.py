"""The layers whose constants a repair may change, and how: weights, biases, channels.

A repair is a change of the float model's constants, so that every target obeys it by itself. These
are the layers with constant weights: Conv, ConvTranspose, Gemm, and MatMul with the Add behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
    def in_axis(self) -> int:
        """Axis of the input channels in what the layer reads."""
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
