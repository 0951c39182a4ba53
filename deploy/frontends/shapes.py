"""Shapes and types of a model's tensors: inferred by ONNX, and read as `TensorSpec`.

Exporters store wrong and stale shapes, so those that can be inferred replace those of the file::

    shape of the file     [1, 8, 0, -1]
    inferred              [1, 8, "h", 12]     kept from the file only where nothing is inferred

Large weights are left out while ONNX infers: no shape depends on their values.
"""

import math

import onnx

from deploy.frontends import checks
from deploy.graph.edit import (
    copy_message,
    infer_types,
    replace_field,
)
from deploy.graph.index import (
    FLOAT,
    all_graphs,
    all_outputs,
    by_name,
    constant_nodes,
    declared_values,
    has_subgraph,
    names_of,
)
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.tensors import TensorSpec

_MAX_JOINED = 1 << 16  # elements of a Concat of constants whose values are propagated
_MAX_SMALL_WEIGHT = 1 << 12  # elements of a weight that shape inference may copy


def clear_negative_sizes(graph: onnx.GraphProto) -> None:
    """Make sizes of -1 unknown: old Paddle exports write them, and inference would multiply them.

    A size of 0 is valid.
    """
    for body in all_graphs(graph):
        for value in declared_values(body):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.ClearField("dim_value")


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with all shapes and types inferred anew; use it in place of `model`.

    A tensor for which inference finds none keeps those that the model declared. `model` changes,
    and is itself returned if it has large weights.

    Raises:
        ModelError: the shapes contradict each other.
    """
    file_values = list(map(copy_message, model.graph.value_info))
    del model.graph.value_info[:]
    light_model = without_values(model)  # None if there are no large weights to leave out
    with checks.refuse_errors("shapes of the model must fit together"):
        # With data_prop, inference also computes constants. A chain of Concats that each double a
        # constant could take any amount of memory.
        propagates_values = _largest_joined(model.graph) <= _MAX_JOINED
        inferred = infer_types(light_model or model, data_prop=propagates_values)
    if light_model is not None:  # it has no weights: return `model`, with what was inferred
        replace_field(model.graph.output, inferred.graph.output)
        model.graph.value_info.extend(inferred.graph.value_info)
        inferred = model

    graph = inferred.graph
    untyped_names = all_outputs(graph.node) - names_of((*graph.output, *graph.value_info))
    graph.value_info.extend(value for value in file_values if value.name in untyped_names)
    return inferred


def infer_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `infer_shapes`, which keeps the file's shapes of outputs, with these inferred too.

    They may be wrong in the file. A shape in it stays if it contradicts no inferred size.
    """
    file_types = [copy_message(value.type.tensor_type) for value in model.graph.output]
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    model = infer_shapes(model)
    for value, file_type in zip(model.graph.output, file_types, strict=True):
        inferred = value.type.tensor_type
        if file_type.HasField("shape") and _sizes_agree(file_type.shape, inferred):
            inferred.shape.CopyFrom(file_type.shape)
    return model


def _sizes_agree(shape: onnx.TensorShapeProto, inferred: onnx.TypeProto.Tensor) -> bool:
    """Whether a shape of the file contradicts no inferred size; 0 is an unknown size."""
    if not inferred.HasField("shape"):
        return True
    sizes = [dim.dim_value for dim in shape.dim]
    inferred_sizes = [dim.dim_value for dim in inferred.shape.dim]
    if len(sizes) != len(inferred_sizes):
        return False
    pairs = zip(sizes, inferred_sizes, strict=True)
    return all(size == inferred_size or 0 in (size, inferred_size) for size, inferred_size in pairs)


def _largest_joined(graph: onnx.GraphProto) -> int:
    """Return the size of the largest Concat of constants; each may double the one before."""
    constants = by_name(graph.initializer) | constant_nodes(graph.node)
    sizes = {name: math.prod(tensor.dims) for name, tensor in constants.items()}
    largest = 0
    for node in graph.node:
        if node.op_type == "Concat" and sizes.keys() >= set(node.input):
            size = sum(sizes[name] for name in node.input)
            sizes[node.output[0]] = size
            largest = max(largest, size)
    return largest


def without_values(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy whose large weights have only a shape; None if it would not help.

    No shape depends on the values of a float weight, and inference would copy them three times.
    Inference also fills in subgraphs, so a model with subgraphs is used as it is.
    """
    graph = model.graph
    large_tensors = list(filter(_is_large_weight, graph.initializer))
    if not large_tensors or any(map(has_subgraph, graph.node)):
        return None
    return copy_without_initializers(model, names_of(large_tensors), placeholders=True)


def _is_large_weight(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == FLOAT and math.prod(tensor.dims) > _MAX_SMALL_WEIGHT


def make_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Return an input or output; its dtype is "sequence" or such if it is no tensor."""
    tensor_type = value.type.tensor_type
    kind = value.type.WhichOneof("value") or "tensor_type"
    dtype = kind.removesuffix("_type")
    if dtype == "tensor":
        dtype = checks.type_name(tensor_type.elem_type)
    return TensorSpec(value.name, dtype, tuple(map(_read_dimension, tensor_type.shape.dim)))


def _read_dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """Return a size, the name of a symbolic one, or None for an unknown one."""
    if dim.HasField("dim_param"):
        # Paddle writes "?" for any unknown dimension
        return dim.dim_param if dim.dim_param not in ("", "?") else None
    return dim.dim_value if dim.dim_value > 0 else None
