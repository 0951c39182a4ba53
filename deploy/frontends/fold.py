"""Constant folding: nodes whose values do not depend on the inputs become initializers.

::

    Constant ----.                                          value of Constant
    Shape(x) -- Slice -- Concat -- Cast -- Pad      ==>     and of Cast  ---- Pad
    x --------------------------------------'               x ---------------'

ONNX Runtime computes the values, so they equal those of the model bit for bit. Nodes are put back
where the file would be larger without them (tables of sines, an expanded number).

The optimizers of others do not do the same: onnxscript 0.7 computes with ONNX's reference
implementation, whose Exp, MatMul and cubic Resize differ in the last bits, and onnxslim 0.1 folds
random numbers and large Expands, renames weights, and holds a model four times in memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from deploy.errors import first_line
from deploy.graph.edit import bypass, copy_message, copy_tensor, drop_initializers, replace_nodes
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
from deploy.graph.placement import WEIGHTED
from deploy.graph.rewrite import CannotRewrite, RewriteRule, apply_rule
from deploy.runtimes.ort import OrtSession

# Folding must not make the file much larger: large results, such as of Expand or Tile, stay nodes.
_MAX_RESULT = 1 << 20  # elements
_MAX_GROWTH = 1 << 12  # bytes that a folded constant may add to the file: 1024 channels
_INT8_RATIO = 4  # float32 is as many times as large as int8


@dataclass(frozen=True, slots=True)
class _FoldingScope:
    """A model, and what is known of its tensors.

    Attributes:
        constants: name -> tensor, also of folded nodes.
        shapes: of the tensors whose shape is completely known.
        outputs: names of the graph's outputs.
        folded_by_output: tensor -> the folded node that made it.
    """

    model: onnx.ModelProto
    constants: dict[str, onnx.TensorProto]
    shapes: Mapping[str, tuple[int, ...]]
    outputs: set[str]
    folded_by_output: dict[str, onnx.NodeProto]


def fold_constants(
    model: onnx.ModelProto, *, is_chosen: Callable[[onnx.NodeProto], bool] = lambda node: True
) -> dict[str, onnx.NodeProto]:
    """Turn constant nodes of the main graph into initializers, in place.

    Nodes stay if they are random, have subgraphs, are of a custom domain, produce a graph output,
    or produce more than 2**20 elements (and more than they read).

    Args:
        model: changed in place.
        is_chosen: node -> whether it may become an initializer.

    Returns:
        Tensor -> the folded node that made it, which is the same object for all of its outputs.
    """
    graph = model.graph
    scope = _FoldingScope(
        model=model,
        constants=by_name(graph.initializer),
        shapes=static_shapes(graph),
        outputs=names_of(graph.output),
        folded_by_output={},
    )
    rule = RewriteRule(
        pattern=lambda node: is_chosen(node) and _can_be_constant(node),
        check=_check_constant,
        rewrite=_fold_node,
    )
    apply_rule(graph, rule, scope)
    return scope.folded_by_output


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
        shape = scope.shapes.get(node.input[0])
        # some exporters write 0 for an unknown size
        return "a size is not known" if shape is None or 0 in shape else ""
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
    scope.folded_by_output.update(dict.fromkeys(node.output, copy_message(node)))
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
        raise CannotRewrite("its value is text or sparse")
    value = helper.get_attribute_value(attribute)
    return numpy_helper.from_array(np.asarray(value, dtype), node.output[0])


def _evaluate(
    model: onnx.ModelProto, node: onnx.NodeProto, inputs: list[onnx.TensorProto]
) -> list[onnx.TensorProto]:
    """Return the outputs of a node on constant inputs, as ONNX Runtime computes them.

    Raises:
        CannotRewrite: a result would be large, or the node cannot be run.
    """
    names = list(filter(None, node.output))  # the name of an output that is left out is ""
    # the constants are initializers: the graph has no inputs, and gets its outputs below
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
    # `CannotRewrite` of above, or any other class, of which ONNX and ONNX Runtime raise many: the
    # node stays whatever the error is
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


def unfold_large(graph: onnx.GraphProto, folded_by_output: Mapping[str, onnx.NodeProto]) -> int:
    """Put folded nodes back whose stored result makes the file larger; return their number.

    The size of a result is compared with that of its recipe: the nodes that compute it, and the
    constants that these read. Constants that the file stores anyway cost nothing.

    A layer's weight is compared by its size in int8, since only a folded weight can be stored in
    int8. All constants of its recipe count, since they would be stored in float besides.

    Args:
        graph: the graph after folding, which changes; no constant has been dropped from it yet.
        folded_by_output: tensor -> the folded node that made it.
    """
    sizes = {tensor.name: tensor.ByteSize() for tensor in graph.initializer}  # in bytes
    read_counts = count_reads(graph)
    weight_read_counts = Counter(node.input[1] for node in graph.node if node.op_type in WEIGHTED)
    large_results = [
        name for name in folded_by_output if name in read_counts and sizes[name] > _MAX_GROWTH
    ]

    # tensors that the file has anyway, stored or computed; a recipe may read them at no cost
    available_tensors = set(read_counts)
    restored_outputs: set[str] = set()  # outputs of the nodes that are put back
    for name in large_results:
        if weight_read_counts[name] == read_counts[name]:  # only layers read it, as their weight
            result_size = sizes[name] // _INT8_RATIO
            free_tensors = set[str]()  # none is free, see above
        else:
            result_size = sizes[name]
            free_tensors = available_tensors - {name}  # all but the result that is looked at
        recipe_outputs, recipe_constants = _find_recipe(
            name, folded_by_output, free_tensors=free_tensors
        )
        recipe_size = sum(folded_by_output[output].ByteSize() for output in recipe_outputs)
        recipe_size += sum(sizes[constant] for constant in recipe_constants)
        # without outputs there is no recipe: the node of this result cannot be put back
        if recipe_outputs and result_size > recipe_size + _MAX_GROWTH:
            restored_outputs |= recipe_outputs
            available_tensors |= recipe_outputs | recipe_constants
            available_tensors.remove(name)  # not stored any more: other recipes count its node

    if restored_outputs:
        nodes = [node for name, node in folded_by_output.items() if name in restored_outputs]
        replace_nodes(graph, [*nodes, *graph.node])
        drop_initializers(graph, restored_outputs)
    return len(restored_outputs)


def _find_recipe(
    name: str, folded_by_output: Mapping[str, onnx.NodeProto], *, free_tensors: Collection[str]
) -> tuple[set[str], set[str]]:
    """Find the recipe of a constant: the folded nodes that compute it, and the constants they read.

    A folded node was removed from the graph, and its outputs are stored as constants. With the
    nodes of the recipe put back, the file need not store this constant.

    Args:
        name: of the constant.
        folded_by_output: tensor -> the folded node that made it.
        free_tensors: tensors that the file has anyway; they are not part of the recipe.

    Returns:
        (outputs of the nodes to put back, constants that these nodes read and the file must store).
    """
    node_outputs = set[str]()
    constants = set[str]()
    pending_tensors = [name]
    for tensor in pending_tensors:  # grows during the loop
        if tensor in free_tensors or tensor in node_outputs:
            continue
        node = folded_by_output.get(tensor)
        # These nodes are not put back: a Constant is as large as its tensor, a Shape would read an
        # activation, and of a node with several outputs the file may store the others.
        if node is None or node.op_type in ("Constant", "Shape") or len(node.output) > 1:
            constants.add(tensor)
        else:
            node_outputs.add(tensor)
            pending_tensors += iter_reads(node)
    return node_outputs, constants


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
    read_counts = count_reads(graph)
    return bypass(graph, lambda node: _is_identity(node, read_counts))


def _is_identity(node: onnx.NodeProto, read_counts: Mapping[str, int]) -> bool:
    """Whether a node is an Identity, or a Dropout in inference mode whose mask is not read."""
    if node.domain not in ONNX_DOMAINS or not node.input or not node.output[0]:
        return False
    if node.op_type != "Dropout":
        return node.op_type == "Identity"
    # with its third input, training_mode, it may be in training mode
    masks_are_read = any(read_counts[mask] for mask in node.output[1:])
    return not masks_are_read and not optional_input(node, 2)
