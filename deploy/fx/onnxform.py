"""What is changed in an ONNX model that torch's exporter wrote: names, notes, and one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx
from torch.utils import _pytree as pytree

from deploy.graph.edit import copied, drop_unread
from deploy.graph.index import attributes

if TYPE_CHECKING:
    import onnx
    from torch.export import ExportedProgram


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the exporter's notes, and with GlobalAveragePool by its name.

    The notes hold paths of this machine. The exporter writes the pool as ReduceMean, for which
    runtimes have no int8 kernel.
    """
    copy = copied(model)
    graph = copy.graph
    for holder in (copy, graph, *graph.node, *graph.initializer, *graph.value_info):
        del holder.metadata_props[:]
        holder.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    _name_global_pools(graph)
    return copy


def name_outputs(model: onnx.ModelProto, program: ExportedProgram | None) -> None:
    """Call what a forward returns in a dict by its key, `outer_inner` in several; in place.

    Outputs in tuples and lists keep the names that the exporter gave them.
    """
    if program is None or program.call_spec.out_spec is None:
        return
    returned = program.graph.output_node().args[0]
    leaves = zip(_paths(program.call_spec.out_spec), returned, strict=True)
    paths = [path for path, value in leaves if isinstance(value, fx.Node)]
    outputs = [value.name for value in model.graph.output]
    if len(paths) != len(outputs) or len({*outputs}) != len(outputs):
        return  # one tensor in two places has one name
    taken = {value.name for value in model.graph.input} | {*outputs}
    new: dict[str, str] = {}
    for name, path in zip(outputs, paths, strict=True):
        if any(isinstance(key, pytree.MappingKey | pytree.GetAttrKey) for key in path):
            new[name] = _free("_".join(map(_step, path)), taken)
    _rename(model.graph, new)


def _paths(spec: Any) -> list[Sequence[Any]]:
    """The way to each leaf of an output."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _step(key: Any) -> str:
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    return str(key.name if isinstance(key, pytree.GetAttrKey) else key.idx)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_out"
    taken.add(name)
    return name


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    """Give values other names, wherever they are made, read or described."""
    inner = {name for node in graph.node for name in node.output} - {*new}
    away = {name: f"{name}_inner" for name in inner & {*new.values()}}
    names = {**new, **away}
    for node in graph.node:
        for held in (node.input, node.output):
            held[:] = [names.get(name, name) for name in held]
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def _name_global_pools(graph: onnx.GraphProto) -> None:
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in _values(graph)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "ReduceMean" and _is_global_pool(node, ranks, constants):
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
    drop_unread(graph)


def _is_global_pool(
    node: onnx.NodeProto, ranks: dict[str, int], constants: dict[str, onnx.TensorProto]
) -> bool:
    """Whether it is the mean over H and W of [N, C, H, W], both kept as 1."""
    from onnx import numpy_helper

    kept = attributes(node).get("keepdims", 1)
    if len(node.input) != 2 or node.input[1] not in constants or not kept:
        return False
    axes = np.asarray(numpy_helper.to_array(constants[node.input[1]])).reshape(-1)
    return ranks.get(node.input[0]) == 4 and sorted(int(a) % 4 for a in axes) == [2, 3]


def _values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [*graph.input, *graph.value_info, *graph.output]
