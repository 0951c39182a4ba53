"""Constant folding: nodes whose values do not depend on the inputs become initializers.

::

    Constant ----.                                          value of Constant
    Shape(x) -- Slice -- Concat -- Cast -- Pad      ==>     and of Cast  ---- Pad
    x --------------------------------------'               x ---------------'

ONNX Runtime computes the values, so they equal those of the model bit for bit. A node stays if its
result is large and larger than what it reads (tables of sines, an expanded number).

The optimizers of others do not do the same: onnxscript 0.7 computes with ONNX's reference
implementation, whose Exp, MatMul and cubic Resize differ in the last bits, and onnxslim 0.1 folds
random numbers and large Expands, renames weights, and holds a model four times in memory.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from deploy.errors import first_line
from deploy.graph.edit import bypass, copy_message, copy_tensor
from deploy.graph.index import (
    ONNX_DOMAINS,
    RANDOM,
    Nodes,
    attributes,
    by_name,
    count_reads,
    declared_values,
    dims,
    has_subgraph,
    iter_reads,
    names_of,
    optional_input,
)
from deploy.graph.rewrite import CannotRewrite, RewriteRule, apply_rule
from deploy.runtimes.ort import OrtSession

# Folding must not make the file much larger: large results, such as of Expand or Tile, stay nodes.
_MAX_RESULT = 1 << 20  # elements: 4 MB; a product of two small matrices may be a large weight


@dataclass(frozen=True, slots=True)
class _FoldingScope:
    """A model, and what is known of its tensors.

    Attributes:
        constants: name -> tensor, also of folded nodes.
        shapes: of the tensors whose shape is completely known.
        outputs: names of the graph's outputs.
    """

    model: onnx.ModelProto
    constants: dict[str, onnx.TensorProto]
    shapes: Mapping[str, tuple[int, ...]]
    outputs: set[str]


def fold_constants(
    model: onnx.ModelProto,
    *,
    chosen: Callable[[onnx.NodeProto], bool] = lambda node: True,
) -> int:
    """Turn constant nodes of the main graph into initializers, in place; return their number.

    Nodes stay if they are random, have subgraphs, are of a custom domain, produce a graph output,
    or produce more than 2**20 elements (and more than they read).

    Args:
        model: changed in place.
        chosen: node -> whether it may become an initializer.
    """
    graph = model.graph
    scope = _FoldingScope(
        model=model,
        constants=by_name(graph.initializer),
        shapes=static_shapes(graph),
        outputs=names_of(graph.output),
    )
    rule = RewriteRule(
        pattern=lambda node: chosen(node) and _can_be_constant(node),
        check=_check_constant,
        rewrite=_fold_node,
    )
    return apply_rule(graph, rule, scope)


def _can_be_constant(node: onnx.NodeProto) -> bool:
    """Whether equal inputs always give a node equal results."""
    is_random = node.op_type in RANDOM
    return node.domain in ONNX_DOMAINS and not is_random and not has_subgraph(node)


def _check_constant(node: onnx.NodeProto, scope: _FoldingScope) -> str:
    """Return why a node does not become a constant; "" if it may."""
    if scope.outputs.intersection(node.output):
        return "it produces a graph output"
    if node.op_type == "Constant":
        return ""
    if node.op_type == "Shape":
        # some exporters write 0 for an unknown size
        return "" if all(scope.shapes.get(node.input[0], (0,))) else "a size is not known"
    if not node.input or any(name not in scope.constants for name in iter_reads(node)):
        return "its inputs are not all constant"
    return ""


def _fold_node(node: onnx.NodeProto, scope: _FoldingScope) -> Nodes:
    """Add a node's outputs to the initializers; no node stands in its place."""
    if node.op_type == "Constant":
        tensors = [_read_constant(node)]
    elif node.op_type == "Shape":
        tensors = [_read_shape(node, scope.shapes[node.input[0]])]
    else:
        inputs = [scope.constants[name] for name in dict.fromkeys(iter_reads(node))]
        tensors = _evaluate(scope.model, node, inputs)
    scope.constants.update(by_name(tensors))
    scope.model.graph.initializer.extend(tensors)
    return []


def _read_shape(node: onnx.NodeProto, shape: tuple[int, ...]) -> onnx.TensorProto:
    """Return the output of a Shape node whose input has this shape."""
    attrs = attributes(node)
    sizes = shape[attrs.get("start", 0) : attrs.get("end")]
    return numpy_helper.from_array(np.array(sizes, np.int64), node.output[0])


def _read_constant(node: onnx.NodeProto) -> onnx.TensorProto:
    """Return the tensor of a Constant node."""
    if len(node.attribute) != 1 or len(node.output) != 1:
        raise CannotRewrite("it has no single value")
    attribute = node.attribute[0]
    if attribute.name == "value":
        return copy_tensor(attribute.t, node.output[0])
    if attribute.name in ("value_float", "value_floats"):
        dtype: type[np.generic] = np.float32
    elif attribute.name in ("value_int", "value_ints"):
        dtype = np.int64
    else:
        raise CannotRewrite("its value is text")
    value = helper.get_attribute_value(attribute)
    return numpy_helper.from_array(np.asarray(value, dtype), node.output[0])


def _evaluate(
    model: onnx.ModelProto, node: onnx.NodeProto, inputs: list[onnx.TensorProto]
) -> list[onnx.TensorProto]:
    """Return the outputs of a node on constant inputs, as ONNX Runtime computes them.

    Raises:
        CannotRewrite: a result would be large, or the node cannot be run.
    """
    names = list(filter(None, node.output))
    single_node_model = helper.make_model(
        helper.make_graph([copy_message(node)], "constant", [], [], inputs),
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
    )
    try:
        inferred = shape_inference.infer_shapes(single_node_model, data_prop=True)
        if not _has_small_results(names, static_shapes(inferred.graph), inputs):
            raise CannotRewrite("its result is large, or of unknown size")
        outputs = [helper.make_empty_tensor_value_info(name) for name in names]
        single_node_model.graph.output.extend(outputs)
        arrays = OrtSession.open(single_node_model, threads=1, optimize=False).run({})
    # Both libraries raise many kinds of errors; the node stays whatever the error is.
    except Exception as error:
        raise CannotRewrite(first_line(error)) from error
    return [numpy_helper.from_array(arrays[name], name) for name in names]


def _has_small_results(
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Collection[onnx.TensorProto],
) -> bool:
    """Whether the tensors of these names have known shapes, and a size worth storing."""
    # products of Python integers: a malicious shape must not overflow
    max_size = max(_MAX_RESULT, sum(math.prod(tensor.dims) for tensor in inputs))
    return all(name in shapes and math.prod(shapes[name]) <= max_size for name in names)


def static_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the main graph's tensors whose shape is completely known."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in declared_values(graph):
        shape = dims(value)
        if shape is not None and all(isinstance(size, int) and size >= 0 for size in shape):
            shapes[value.name] = shape
    return shapes


def remove_identity(graph: onnx.GraphProto) -> int:
    """Remove Identity and inference-mode Dropout nodes, in place; return their number."""
    counts = count_reads(graph)
    return bypass(graph, lambda node: _is_identity(node, counts))


def _is_identity(node: onnx.NodeProto, counts: Mapping[str, int]) -> bool:
    """Whether a node is an Identity, or a Dropout in inference mode whose mask is not read."""
    if node.domain not in ONNX_DOMAINS or not node.input or not node.output[0]:
        return False
    if node.op_type != "Dropout":
        return node.op_type == "Identity"
    # with its third input, training_mode, it may be in training mode
    masks_are_read = any(counts[mask] for mask in node.output[1:])
    return not masks_are_read and not optional_input(node, 2)
