"""The first layer that reads an input, cut out, and what it tells of what the model learned from.

::

    input -> [Sub, Div, Transpose, ...] -> Conv -> BatchNormalization
                                            bias    mean and variance of each channel in training

A BatchNormalization remembers what went through it in training; where one reads the input itself,
or the first Conv, it says what that input was like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.graph.edit import copied, name_nodes
from deploy.graph.index import Graph

if TYPE_CHECKING:
    import onnx

Floats = NDArray[np.float64]
_PASSED = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Pad", "Sub", "Transpose"})
_MOVING = frozenset({"Reshape", "Slice", "SpaceToDepth"})  # every second row: YOLOX's first nodes
_JOINING = frozenset({"Concat"})
_LAYERS = frozenset({"BatchNormalization", "Conv"})
_MOST = 16  # nodes before the layer
_EXTERNAL = 1  # TensorProto.DataLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """What reads the input.

    Attributes:
        model: a model of these nodes alone: the input in, `tensor` out.
        tensor: what the layer gives, or the input as the BatchNormalization gets it.
        node: name of the BatchNormalization or else of the Conv.
        mean, variance: of each channel in training; None without a BatchNormalization.
        bias: of each channel of a Conv without BatchNormalization; None where it has none.
    """

    model: onnx.ModelProto
    tensor: str
    node: str
    mean: Floats | None = None
    variance: Floats | None = None
    bias: Floats | None = None


def first_layer(model: onnx.ModelProto, name: str) -> FirstLayer | None:
    """The layer that reads the input of this name, as the file has it; None where it is no Conv.

    Weights that stand outside the file are not looked for.
    """
    graph = Graph(model)
    way: list[onnx.NodeProto] = []
    reached = {name}
    for node in graph.nodes:
        own = [tensor for tensor in dict.fromkeys(node.input) if tensor in reached]
        if not own:
            continue
        if node.op_type in _LAYERS and node.input[0] in reached:
            whole = all(_goes_on(graph, tensor, [*way, node]) for tensor in reached)
            return _layer(graph, model, way, name, node) if whole and len(way) <= _MOST else None
        if not _passes(graph, node, own):
            return None
        way.append(node)
        reached |= set(filter(None, node.output))
    return None


def _passes(graph: Graph, node: onnx.NodeProto, own: list[str]) -> bool:
    """Whether what it gives is what it gets, scaled, shifted, or at other places."""
    if node.op_type in _JOINING:
        return all(tensor in own for tensor in node.input)
    others = [tensor for tensor in node.input if tensor and tensor not in own]
    known = len(own) == 1 and all(tensor in graph.constants for tensor in others)
    moved = node.op_type in _MOVING and node.input[0] in own
    return known and (moved or node.op_type in _PASSED)


def _goes_on(graph: Graph, tensor: str, nodes: list[onnx.NodeProto]) -> bool:
    """Whether nothing but these nodes reads a tensor."""
    readers = graph.readers.get(tensor, [])
    outside = tensor in graph.outputs or tensor in graph.captured
    return not outside and all(any(one is node for node in nodes) for one in readers)


def _layer(
    graph: Graph, model: onnx.ModelProto, way: list[onnx.NodeProto], name: str, node: onnx.NodeProto
) -> FirstLayer | None:
    """The layer at the end of the way."""
    if node.op_type == "BatchNormalization":
        return _normalised(graph, model, way, name, node.input[0], node)
    return _convolved(graph, model, [*way, node], name)


def _convolved(
    graph: Graph, model: onnx.ModelProto, way: list[onnx.NodeProto], name: str
) -> FirstLayer | None:
    """Of a Conv: the BatchNormalization behind it, or its bias."""
    conv = way[-1]
    after = graph.only_reader(conv.output[0])
    if after is not None and after.op_type == "BatchNormalization":
        return _normalised(graph, model, way, name, conv.output[0], after)
    bias = _values(graph, conv.input[2]) if len(conv.input) > 2 and conv.input[2] else None
    part = _part(graph, model, way, name, conv.output[0])
    if part is None or bias is None:
        return None
    return FirstLayer(model=part, tensor=conv.output[0], node=conv.name, bias=bias)


def _normalised(
    graph: Graph,
    model: onnx.ModelProto,
    way: list[onnx.NodeProto],
    name: str,
    tensor: str,
    norm: onnx.NodeProto,
) -> FirstLayer | None:
    mean, variance = (_values(graph, one) for one in norm.input[3:5])
    part = _part(graph, model, way, name, tensor)
    if part is None or mean is None or variance is None or mean.shape != variance.shape:
        return None
    return FirstLayer(model=part, tensor=tensor, node=norm.name, mean=mean, variance=variance)


def _part(
    graph: Graph, model: onnx.ModelProto, way: list[onnx.NodeProto], name: str, tensor: str
) -> onnx.ModelProto | None:
    """The model of some nodes; None where a constant of theirs is not at hand."""
    from onnx import ValueInfoProto, helper

    read = dict.fromkeys(one for node in way for one in node.input if one in graph.constants)
    constants = [_named(graph.constants[one], one) for one in read]
    if any(one.data_location == _EXTERNAL for one in constants):
        return None
    given = [value for value in model.graph.input if value.name == name]
    body = helper.make_graph(way, "first", given, [ValueInfoProto(name=tensor)], constants)
    name_nodes(body)  # two of one name are not loaded
    return helper.make_model(
        body, opset_imports=model.opset_import, ir_version=max(model.ir_version, 7)
    )


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    own = copied(tensor)
    own.name = name
    return own


def _values(graph: Graph, name: str) -> Floats | None:
    from onnx import numpy_helper

    tensor = graph.constants.get(name)
    if tensor is None or tensor.data_location == _EXTERNAL:
        return None
    return np.asarray(numpy_helper.to_array(tensor), np.float64).reshape(-1)
