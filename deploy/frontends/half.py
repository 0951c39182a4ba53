"""float16 models in float32: on that int8 scales are measured, and from that engines are made.

Every float16 number is a float32 one, so weights and constants keep their values; a Cast to float16
becomes one to float32, and goes where it casts float32. Inner results are no longer rounded to
float16. Inputs and outputs keep the type that the user feeds and reads::

    float16 x --> Conv --> y float16
    float16 x --> Cast --> x_float32 --> Conv --> y_float32 --> Cast --> y float16

Source: IEEE 754-2019, table 3.5 (binary16 within binary32); ONNX operator Cast-13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ModelError
from deploy.frontends.checks import to_array
from deploy.graph.edit import rename_reads, replace_nodes, unused
from deploy.graph.index import all_nodes, attributes, subgraphs

if TYPE_CHECKING:
    import onnx

_FLOAT, _HALF = 1, 10  # onnx.TensorProto
_TYPED = {"to", "dtype"}  # attributes that hold an element type
_LIMIT = 2**31 - 1  # bytes of one protobuf message


def widen(model: onnx.ModelProto) -> str | None:
    """Let a model compute in float32 what it computes in float16, in place; says what was done.

    Raises:
        ModelError: its weights would not fit one protobuf message any more.
    """
    graph = model.graph
    ends = [v.name for v in (*graph.input, *graph.output) if _is_half(v)]
    count = _count(graph)
    if not count and not ends:
        return None
    if model.ByteSize() + sum(_bytes(t) for t in _tensors(graph)) > _LIMIT:
        raise ModelError(
            "weights must be below 2 GB in float32, the limit of one protobuf message, got"
            f" {model.ByteSize() / 2**30:.1f} GB of them in float16; use a smaller model"
        )
    _close(graph)
    for tensor in _tensors(graph):
        _widen_tensor(tensor)
    for node in all_nodes(graph):
        for attribute in node.attribute:
            if attribute.name in _TYPED and attribute.i == _HALF and not _is_end(node):
                attribute.i = _FLOAT
    for body in _bodies(graph):
        declared = [*body.value_info, *(() if body is graph else (*body.input, *body.output))]
        for value in filter(_is_half, declared):
            value.type.tensor_type.elem_type = _FLOAT
    kept = f"; {', '.join(ends)} {'is' if len(ends) == 1 else 'are'} float16 as before" * bool(ends)
    return f"Computes in float32 what the file computes in float16, and is judged by that{kept}."


def drop_casts(graph: onnx.GraphProto, types: dict[str, int]) -> int:
    """Remove casts to the type that is there, in place, but for those that give an output.

    Exporters leave them behind mixed precision. ONNX Runtime drops them too, but what stands on
    either side of one is no Conv with its bias here. Counts them.

    Args:
        graph: whose nodes run in their order.
        types: tensor -> its element type.
    """
    outputs = {value.name for value in graph.output}
    new_name: dict[str, str] = {}
    kept = []
    for node in graph.node:
        there = types.get(node.input[0]) if node.op_type == "Cast" else None
        if there and attributes(node).get("to") == there and node.output[0] not in outputs:
            new_name[node.output[0]] = new_name.get(node.input[0], node.input[0])
        else:
            kept.append(node)
    if new_name:
        rename_reads(kept, new_name)
        replace_nodes(graph, kept)
    return len(new_name)


_END = "float16 end"  # in the notes of the casts at the ends, while they are put in


def _close(graph: onnx.GraphProto) -> None:
    """Put casts behind the float16 inputs and before the float16 outputs."""
    from onnx import helper

    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {value.name for value in graph.input}
    made = {name for node in graph.node for name in node.output}
    new_name: dict[str, str] = {}
    first, last = [], []
    for value in filter(_is_half, graph.input):
        inner = new_name[value.name] = unused(f"{value.name}_float32", taken)
        first.append(helper.make_node("Cast", [value.name], [inner], inner, to=_FLOAT))
    for value in filter(_is_half, graph.output):
        if value.name in made:
            inner = new_name[value.name] = unused(f"{value.name}_float32", taken)
            last.append(helper.make_node("Cast", [inner], [value.name], value.name, _END, to=_HALF))
    nodes = list(graph.node)
    rename_reads(nodes, new_name)
    for node in nodes:
        for position, name in enumerate(node.output):
            node.output[position] = new_name.get(name, name)
    replace_nodes(graph, [*first, *nodes, *last])


def _is_end(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and node.doc_string == _END


def _is_half(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == _HALF)


def _bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in all_nodes(graph):
        yield from subgraphs(node)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every float16 constant, in subgraphs and attributes too."""
    for body in _bodies(graph):
        yield from (t for t in body.initializer if t.data_type == _HALF)
    for node in all_nodes(graph):
        for attribute in node.attribute:
            held = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
            yield from (t for t in held if t.data_type == _HALF)


def _count(graph: onnx.GraphProto) -> int:
    """How many float16 constants there are, and nodes that make float16."""
    typed = (a for node in all_nodes(graph) for a in node.attribute if a.name in _TYPED)
    return sum(1 for _ in _tensors(graph)) + sum(1 for a in typed if a.i == _HALF)


def _bytes(tensor: onnx.TensorProto) -> int:
    return 2 * int(math.prod(tensor.dims))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    from onnx import numpy_helper

    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(to_array(tensor).astype(np.float32), name))
