"""Constant folding: nodes whose values do not depend on the inputs become initializers.

::

    Constant ----.                                          value of Constant
    Shape(x) -- Slice -- Concat -- Cast -- Pad      ==>     and of Cast  ---- Pad
    x --------------------------------------'               x ---------------'

ONNX Runtime computes the values, so they equal those of the model bit for bit. Nodes are put back
where the file would be larger without them (tables of sines, an expanded number).
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from deploy.errors import ModelError, first_line
from deploy.frontends.checks import to_array
from deploy.graph.edit import bypass, copy_message, copy_tensor, drop_initializers, replace_nodes
from deploy.graph.index import RANDOM, all_graphs, attributes, count_reads, iter_reads, subgraphs
from deploy.graph.placement import WEIGHTED
from deploy.runtimes.ort import OrtSession

_DEFAULT = ("", "ai.onnx")
_NEVER = (*RANDOM, "Constant", "Shape")
# Folding must not make the file much larger: large results, such as of Expand or Tile, stay nodes.
_LARGEST = 1 << 20  # elements
_DENSEST = 1 << 22  # elements of a sparse constant of few values
_SPARSEST = 1000  # elements for each value of any other
_LITTLE = 1 << 12  # bytes that a folded constant may add to the file: 1024 channels
_INT8 = 4  # times as small as float32


def fold_constants(model: onnx.ModelProto, folded: dict[str, onnx.NodeProto]) -> int:
    """Turn constant nodes of the main graph into initializers, in place; return their number.

    Nodes stay if they are random, have subgraphs, are of a custom domain, produce a graph output,
    or produce more than 2**20 elements (and more than they read). `folded` gets the others, by
    their outputs.
    """
    graph = model.graph
    shapes = static_shapes(graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    remaining = []
    for node in graph.node:
        values = None
        if node.domain in _DEFAULT and not outputs.intersection(node.output):
            values = _values(model, node, constants, shapes)
        if values is None:
            remaining.append(node)
        else:
            constants.update({tensor.name: tensor for tensor in values})
            graph.initializer.extend(values)
            folded |= dict.fromkeys(node.output, copy_message(node))
    count = len(graph.node) - len(remaining)
    if count:
        replace_nodes(graph, remaining)
    return count


def unfold_large(graph: onnx.GraphProto, folded: Mapping[str, onnx.NodeProto]) -> int:
    """Put folded nodes back whose result makes the file larger; return their number.

    A weight counts as int8, beside all that it is computed from. The constants that folded nodes
    read must still be there.
    """
    sizes = {tensor.name: tensor.ByteSize() for tensor in graph.initializer}
    reads = count_reads(graph)
    stored = {*reads}
    weights = Counter(node.input[1] for node in graph.node if node.op_type in WEIGHTED)
    back: set[str] = set()
    for name in [name for name in folded if name in stored and sizes[name] > _LITTLE]:
        is_weight = weights[name] == reads[name]
        whole, size = (set(), sizes[name] // _INT8) if is_weight else (stored, sizes[name])
        nodes, leaves = _recipe(name, folded, whole - {name})
        freed = sum(folded[node].ByteSize() for node in nodes) + sum(sizes[leaf] for leaf in leaves)
        if nodes and size > freed + _LITTLE:
            back |= nodes
            stored = (stored | leaves | nodes) - {name}
    if back:
        replace_nodes(graph, [*(folded[name] for name in folded if name in back), *graph.node])
        drop_initializers(graph, back)
    return len(back)


def _recipe(
    name: str, folded: Mapping[str, onnx.NodeProto], stored: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return what computes a constant: (results of folded nodes, constants), without the stored."""
    made, leaves, waiting = set[str](), set[str](), [name]
    for tensor in waiting:
        node = folded.get(tensor)
        if tensor in stored or tensor in made:
            continue
        if node is None or node.op_type in ("Constant", "Shape") or len(node.output) > 1:
            leaves.add(tensor)
        else:
            made.add(tensor)
            waiting += iter_reads(node)
    return made, leaves


def write_dense(graph: onnx.GraphProto) -> int:
    """Turn sparse constants of the graph and its subgraphs into dense ones; return their number.

    Raises:
        ModelError: one has invalid indices, or far more elements than values.
    """
    count = 0
    for body in all_graphs(graph):
        body.initializer.extend(_dense(sparse) for sparse in body.sparse_initializer)
        count += len(body.sparse_initializer)
        body.ClearField("sparse_initializer")
        for node in body.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "sparse_value":
                    dense = _dense(attribute.sparse_tensor)
                    attribute.CopyFrom(helper.make_attribute("value", dense))
                    count += 1
    return count


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    shape, values, indices = tuple(sparse.dims), to_array(sparse.values), to_array(sparse.indices)
    size = math.prod(shape) if min(shape, default=1) >= 0 else -1
    most = max(_DENSEST, _SPARSEST * values.size)
    try:
        flat = np.ravel_multi_index(tuple(indices.T), shape) if indices.ndim == 2 else indices
        fit = flat.shape == values.shape and bool(np.all((flat >= 0) & (flat < size)))
        if not (fit and size <= most):
            raise IndexError(f"{flat.size} indices in {shape}")
        dense = np.full(size, b"" if values.dtype.hasobject else 0, values.dtype)
        dense[flat] = values
    except (IndexError, ValueError, TypeError) as error:
        raise ModelError(
            f"sparse constant '{sparse.values.name}' must have indices within its shape, and at"
            f" most {most:,} elements, got: {first_line(error)}; export it densely"
        ) from error
    return numpy_helper.from_array(dense.reshape(shape), sparse.values.name)


def _values(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    constants: dict[str, onnx.TensorProto],
    shapes: dict[str, tuple[int, ...]],
) -> list[onnx.TensorProto] | None:
    """Return a node's outputs if they do not depend on the model's inputs; else None."""
    if node.op_type == "Constant":
        return _constant(node)
    # Some exporters write 0 for an unknown size.
    if node.op_type == "Shape" and all(shapes.get(node.input[0], (0,))):
        shape, attrs = shapes[node.input[0]], attributes(node)
        sizes = shape[attrs.get("start", 0) : attrs.get("end", len(shape))]
        return [numpy_helper.from_array(np.array(sizes, np.int64), node.output[0])]
    if node.op_type in _NEVER or not node.input or any(True for _ in subgraphs(node)):
        return None
    if any(name not in constants for name in iter_reads(node)):
        return None
    return _evaluate(model, node, [constants[name] for name in dict.fromkeys(iter_reads(node))])


def _constant(node: onnx.NodeProto) -> list[onnx.TensorProto] | None:
    """Return the tensor of a Constant node; None for text."""
    if len(node.attribute) != 1 or len(node.output) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return [copy_tensor(attribute.t, node.output[0])]
    value = helper.get_attribute_value(attribute)
    dtype = {"value_float": np.float32, "value_int": np.int64}.get(attribute.name.rstrip("s"))
    if dtype is None:
        return None
    return [numpy_helper.from_array(np.asarray(value, dtype), node.output[0])]


def _evaluate(
    model: onnx.ModelProto, node: onnx.NodeProto, inputs: list[onnx.TensorProto]
) -> list[onnx.TensorProto] | None:
    """Run one node on constant inputs in ONNX Runtime; None if that fails."""
    names = [name for name in node.output if name]
    tiny = helper.make_model(
        helper.make_graph([copy_message(node)], "constant", [], [], inputs),
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
    )
    try:
        shapes = static_shapes(shape_inference.infer_shapes(tiny, data_prop=True).graph)
        # products of Python integers: a malicious shape must not overflow
        room = max(_LARGEST, *(math.prod(t.dims) for t in inputs))
        if any(name not in shapes or math.prod(shapes[name]) > room for name in names):
            return None
        tiny.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
        arrays = OrtSession.open(tiny, threads=1, optimize=False).run({})
    # Both libraries raise many kinds of errors; the node stays whatever the error is.
    except Exception:
        return None
    return [numpy_helper.from_array(arrays[name], name) for name in names]


def static_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the main graph whose shape is completely known."""
    shapes: dict[str, tuple[int, ...]] = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            shape = tuple(d.dim_value for d in dims)
            if all(size >= 0 for size in shape):
                shapes[value.name] = shape
    return shapes


def remove_identity(graph: onnx.GraphProto) -> int:
    """Remove Identity and inference-mode Dropout nodes, in place; return their number."""
    counts = count_reads(graph)
    return bypass(graph, lambda node: _is_identity(node, counts))


def _is_identity(node: onnx.NodeProto, counts: dict[str, int]) -> bool:
    if node.domain not in _DEFAULT or not node.input or not node.output[0]:
        return False
    if node.op_type == "Identity":
        return True
    # Inputs of Dropout: data, ratio, training_mode; with the third it may be in training mode.
    training = len(node.input) > 2 and node.input[2]
    return (
        node.op_type == "Dropout" and not training and not any(counts[o] for o in node.output[1:])
    )
