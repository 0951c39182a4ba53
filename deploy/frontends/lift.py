"""Lift a model to opset 13, to float32, and to float weights.

`lift_opset`: opset 7 to 12 becomes 13, the first in which DequantizeLinear has a scale per channel.
`raise_opset` goes on from there. Operators whose form changed: `deploy.graph.opset_forms`.

`widen_to_float32`: a float16 model becomes float32, in which int8 scales are measured and from
which engines are built. Every float16 number is a float32 number, so weights and constants keep
their values. A Cast to float16 becomes one to float32, and is removed if its input is float32.
Inner results are no longer rounded to float16. Inputs and outputs keep the type that the user feeds
and reads::

    float16 x --> Conv --> y float16
    float16 x --> Cast --> x_float32 --> Conv --> y_float32 --> Cast --> y float16

Source: IEEE 754-2019, table 3.5 (binary16 within binary32); ONNX operator Cast-13.

`restore_float_weights`: weights stored as integers in a model that computes in float become float
weights::

    int8 w --> DequantizeLinear --> Conv     becomes     float32 w --> Conv

They have one scale, one per channel, or one per block of values along an axis. A model that also
quantizes activations carries its own ranges (`deploy.frontends.qdq_model`).

Source: ONNX operator DequantizeLinear-21.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.errors import ModelError
from deploy.frontends.checks import is_quantized_node, to_array
from deploy.frontends.onnx_reader import MESSAGE_LIMIT
from deploy.frontends.plugins import CutOffNodes
from deploy.graph.edit import (
    bypass,
    copy_message,
    drop_initializer_inputs,
    rebuild,
    rename_tensors,
    replace_field,
    replace_nodes,
    set_opset,
    tensor_names,
    unique_name,
)
from deploy.graph.index import (
    Graph,
    all_graphs,
    all_nodes,
    all_tensors,
    attributes,
    find_read_tensors,
    opset_of,
)
from deploy.graph.opset_forms import (
    CannotLower,
    OpsetScope,
    changed_forms,
    complete_resize,
    rewrite_nodes,
)

TARGET_OPSET = 13
_TRAINED = ("BatchNormalization", "Dropout")  # outputs from the second on count in training alone

_INVALID = (ArithmeticError, LookupError, TypeError, ValueError)  # of attributes that do not fit


def lift_opset(
    model: onnx.ModelProto, behind: CutOffNodes | None = None
) -> tuple[CutOffNodes | None, str | None]:
    """Bring a model of opset 7 to 12 to opset 13, in place, and the nodes cut off from it.

    Nodes and tensors keep their names; what becomes an input is a Constant node.

    Args:
        model: valid, with inferred types.
        behind: the nodes that were cut off.

    Returns:
        `behind`, lifted, and a note; the note is None if there was nothing to lift.

    Raises:
        ModelError: a node has no form in opset 13 that computes the same.
    """
    opset = opset_of(model)
    if opset >= TARGET_OPSET:
        return behind, None
    rest = onnx.ModelProto()
    if behind is not None:
        rest.graph.node.extend(behind.nodes)
        rest.graph.initializer.extend(behind.constants)
        rest.graph.output.extend(behind.outputs)
        rest.opset_import.extend(behind.opsets)
    _lift((model, rest), TARGET_OPSET)
    if behind is not None:
        behind = replace(behind, nodes=tuple(rest.graph.node), opsets=tuple(rest.opset_import))
    return behind, f"Lifted from opset {opset} to {TARGET_OPSET}, which per-channel scales need."


def raise_opset(model: onnx.ModelProto, opset: int) -> None:
    """Bring a model of opset 13 or newer to `opset`, 22 at most, subgraphs too, in place.

    Raises:
        ModelError: a node has no form there that computes the same.
    """
    _lift((model,), opset)


def _lift(parts: Sequence[onnx.ModelProto], opset: int) -> None:
    """Bring the parts of one model to `opset`; no new tensor has a name that one of them holds."""
    graphs = [graph for part in parts for graph in all_graphs(part.graph)]
    taken = {name for graph in graphs for name in tensor_names(graph)}
    read = {name for graph in graphs for name in find_read_tensors(graph)}

    def lifted(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
        rules = (
            []
            if node.domain
            else changed_forms(node.op_type, places.source_opset, places.target_opset)
        )
        if not rules:
            return [node]
        made = [copy_message(node)]
        if node.op_type in _TRAINED and read.isdisjoint(node.output[1:]):
            del made[0].output[1:]
        try:
            for rule in rules:
                made = [*made[:-1], *rule(made[-1], places)]
        except (CannotLower, *_INVALID) as error:
            why = str(error) if isinstance(error, CannotLower) else "it is no valid node"
            raise ModelError(
                f"a model of opset {places.source_opset} is brought to {places.target_opset}, got"
                f" {node.op_type} '{node.name}', which has no form there: {why};"
                f" export the model with opset {places.target_opset} or later"
            ) from error
        return made

    for part in parts:
        rewrite_nodes(part.graph, OpsetScope(opset_of(part), opset, taken), lifted)
        set_opset(part, opset)


def complete_resizes(model: onnx.ModelProto) -> str | None:
    """Write each Resize of some axes over all axes, in place; return a note.

    ONNX Runtime 1.32 transposes the input of such a node beside int8 layers, and not its sizes
    (onnxruntime#28788). A Resize whose sizes cannot be computed stays.
    """
    done: list[str] = []

    def completed(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
        if node.op_type == "Resize" and not node.domain:
            with suppress(CannotLower, *_INVALID):  # ONNX Runtime says what is wrong with it
                made = complete_resize(copy_message(node), places)
                if len(made) > 1:
                    done.append(node.name)
                    return made
        return [node]

    if any(node.op_type == "Resize" for node in all_nodes(model.graph)):
        taken = {name for body in all_graphs(model.graph) for name in tensor_names(body)}
        rewrite_nodes(model.graph, OpsetScope(opset_of(model), opset_of(model), taken), completed)
    return f"Wrote {len(done)} Resize of some axes over all axes." if done else None


_FLOAT, _HALF = 1, 10  # onnx.TensorProto
_TYPED = {"to", "dtype"}  # attributes that hold an element type


def widen_to_float32(model: onnx.ModelProto) -> str | None:
    """Convert a model's float16 computation to float32, in place; return a note.

    Raises:
        ModelError: the weights would not fit into one protobuf message any more.
    """
    graph = model.graph
    ends = [v.name for v in (*graph.input, *graph.output) if _is_half(v)]
    typed = (a for node in all_nodes(graph) for a in node.attribute if a.name in _TYPED)
    if not (ends or any(a.i == _HALF for a in typed) or any(True for _ in _halves(graph))):
        return None
    size = model.ByteSize() + sum(2 * math.prod(tensor.dims) for tensor in _halves(graph))
    if size > MESSAGE_LIMIT:
        raise ModelError(
            "a float16 model must be below 2 GB in float32, in which calib8 calibrates it, got"
            f" {size / 2**30:.1f} GB; calib8 writes a model as one protobuf message, which holds no"
            " more: build parts of the model"
        )
    _insert_casts(graph)
    for tensor in _halves(graph):
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(to_array(tensor).astype(np.float32), name))
    for node in all_nodes(graph):
        is_end_cast = node.op_type == "Cast" and node.doc_string == _END
        for attribute in node.attribute:
            if attribute.name in _TYPED and attribute.i == _HALF and not is_end_cast:
                attribute.i = _FLOAT
    for body in all_graphs(graph):
        declared = [*body.value_info, *(() if body is graph else (*body.input, *body.output))]
        for value in filter(_is_half, declared):
            value.type.tensor_type.elem_type = _FLOAT
    kept = f"; {', '.join(ends)} {'is' if len(ends) == 1 else 'are'} float16 as before" * bool(ends)
    return (
        "Computes in float32 what the file computes in float16; the float32 model is the"
        f" reference{kept}."
    )


def drop_casts(graph: onnx.GraphProto, types: dict[str, int]) -> int:
    """Remove casts to the type that a tensor already has, in place; return their number.

    Exporters of mixed precision leave them behind. ONNX Runtime drops them too, but here they
    would separate a Conv from its bias. A cast that produces a graph output stays.

    Args:
        graph: with sorted nodes.
        types: tensor -> its element type.
    """

    def idle(node: onnx.NodeProto) -> bool:
        present = types.get(node.input[0]) if node.op_type == "Cast" else None
        return bool(present) and attributes(node).get("to") == present

    return bypass(graph, idle)


_END = "float16 end"  # doc_string of the casts at the ends, while they are inserted


def _insert_casts(graph: onnx.GraphProto) -> None:
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {value.name for value in graph.input}
    made = {name for node in graph.node for name in node.output}
    new_name: dict[str, str] = {}
    first, last = [], []
    for value in filter(_is_half, graph.input):
        inner = new_name[value.name] = unique_name(f"{value.name}_float32", taken)
        first.append(helper.make_node("Cast", [value.name], [inner], inner, to=_FLOAT))
    for value in filter(_is_half, graph.output):
        if value.name in made:
            inner = new_name[value.name] = unique_name(f"{value.name}_float32", taken)
            last.append(helper.make_node("Cast", [inner], [value.name], value.name, _END, to=_HALF))
    nodes = list(graph.node)
    rename_tensors(nodes, new_name)
    replace_nodes(graph, [*first, *nodes, *last])


def _is_half(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == _HALF)


def _halves(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every float16 constant, also in subgraphs and attributes."""
    return (tensor for tensor in all_tensors(graph) if tensor.data_type == _HALF)


_DEQUANTIZE = "DequantizeLinear"


def restore_float_weights(model: onnx.ModelProto) -> str | None:
    """Make weights float if nothing else in the model is quantized, in place; return a note.

    Raises:
        ModelError: a constant's bytes do not fit its shape and type.
    """
    quantized = [node for node in all_nodes(model.graph) if is_quantized_node(node)]
    if not quantized or any(node.op_type != _DEQUANTIZE for node in quantized):
        return None
    drop_initializer_inputs(model.graph)
    graph = Graph(model)
    main_nodes = {id(node) for node in graph.nodes}
    weights = []
    for node in quantized:
        values = dequantize_constant(node, graph) if id(node) in main_nodes else None
        if values is None or node.output[0] in graph.outputs:
            return None
        weights.append(numpy_helper.from_array(values, node.output[0]))
    model.graph.initializer.extend(weights)
    rebuild(model.graph, [node for node in graph.nodes if node.op_type != _DEQUANTIZE])
    read = find_read_tensors(model.graph)  # a weight may still be listed as an input
    replace_field(model.graph.input, [value for value in model.graph.input if value.name in read])
    count = f"{len(weights)} weight{'s' * (len(weights) > 1)}"
    return f"Converted {count} from stored integers to float."


def dequantize_constant(node: onnx.NodeProto, graph: Graph) -> NDArray[Any] | None:
    """Return the values of a DequantizeLinear on constant integers; None for any other."""
    names = [name for name in node.input if name]
    if not 2 <= len(names) <= 3 or any(name not in graph.constants for name in names):
        return None
    arrays = [to_array(graph.constants[name]) for name in names]
    codes, scale = arrays[0], arrays[1]
    if "int" not in codes.dtype.name or not np.issubdtype(scale.dtype, np.floating):
        return None
    attrs = attributes(node)
    axis, block = int(attrs.get("axis", 1)), int(attrs.get("block_size", 0))
    broadcasts = (_broadcast(one, codes.shape, axis, block) for one in arrays[1:])
    grid = [one for one in broadcasts if one is not None]
    if len(grid) < len(arrays) - 1:
        return None
    zero = grid[1].astype(np.int64) if len(grid) > 1 else 0
    offsets = (codes.astype(np.int64) - zero).astype(np.float32)
    return np.asarray(offsets * grid[0].astype(np.float32), scale.dtype)


def _broadcast(
    values: NDArray[Any], shape: tuple[int, ...], axis: int, block: int
) -> NDArray[Any] | None:
    """Broadcast scales or zero points to the shape of the weights; None if they do not fit."""
    if values.size == 1:
        return values.reshape(())
    if not -len(shape) <= axis < len(shape):
        return None
    if block and values.ndim == len(shape):
        values = np.repeat(values, block, axis=axis)
        values = np.take(values, range(min(shape[axis], values.shape[axis])), axis=axis)
        return values if values.shape == shape else None
    if values.ndim != 1 or values.size != shape[axis]:
        return None
    return values.reshape([-1 if at == axis % len(shape) else 1 for at in range(len(shape))])
