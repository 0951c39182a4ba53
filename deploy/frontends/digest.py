"""The identity of a model: one sha256 over what it computes, whatever way the file stores it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deploy.frontends.checks import to_array
from deploy.graph.index import fed_inputs

if TYPE_CHECKING:
    import onnx


def model_digest(model: onnx.ModelProto) -> str:
    """Sha256 (hex) of operator sets, graph, functions and weights.

    External data must have been read. Names of nodes, documentation, metadata, producer,
    inferred shapes, the order of initializers and raw or typed tensor fields do not count.

    Raises:
        ModelError: a tensor whose bytes do not fit its shape and type.
    """
    parts = [f"{o.domain}={o.version}".encode() for o in model.opset_import]
    tree: list[object] = [sorted(parts), _graph(model.graph)]
    for function in model.functions:
        tree.append([function.domain, function.name, list(function.input), list(function.output)])
        tree.append([_node(node) for node in function.node])
    state = hashlib.sha256()
    _feed(state, tree)
    return state.hexdigest()


def _feed(state: hashlib._Hash, item: object) -> None:
    """Hash a tree of lists, strings and bytes so that no two trees give the same stream."""
    if isinstance(item, list):
        state.update(b"[%d]" % len(item))
        for part in item:
            _feed(state, part)
        return
    data = item if isinstance(item, bytes) else str(item).encode()
    state.update(b"<%d>" % len(data))
    state.update(data)


def _graph(graph: onnx.GraphProto) -> list[object]:
    weights = sorted(graph.initializer, key=lambda tensor: tensor.name)
    return [
        [_value(v) for v in fed_inputs(graph)],
        [_value(v) for v in graph.output],
        [_node(node) for node in graph.node],
        [_tensor(tensor) for tensor in weights],
        [t.SerializeToString(deterministic=True) for t in graph.sparse_initializer],
    ]


def _value(value: onnx.ValueInfoProto) -> list[object]:
    return [value.name, value.type.SerializeToString(deterministic=True)]


def _node(node: onnx.NodeProto) -> list[object]:
    attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
    return [
        node.op_type,
        "" if node.domain == "ai.onnx" else node.domain,
        list(node.input),
        list(node.output),
        [part for attribute in attributes for part in _attribute(attribute)],
    ]


def _attribute(attribute: onnx.AttributeProto) -> Iterable[object]:
    yield attribute.name
    if attribute.HasField("t"):
        yield _tensor(attribute.t)
    elif attribute.tensors:
        yield [_tensor(tensor) for tensor in attribute.tensors]
    elif attribute.HasField("g"):
        yield _graph(attribute.g)
    elif attribute.graphs:
        yield [_graph(graph) for graph in attribute.graphs]
    else:
        plain = type(attribute).FromString(attribute.SerializeToString())
        plain.doc_string = ""
        yield plain.SerializeToString(deterministic=True)


def _tensor(tensor: onnx.TensorProto) -> list[object]:
    array = to_array(tensor)
    data = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return [tensor.name, tensor.data_type, list(tensor.dims), data]
