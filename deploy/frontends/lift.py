"""Lift a model to opset 13, to float32, to float weights, and out of training mode.

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

`end_training_mode`: a BatchNormalization in training mode, which TensorRT refuses, uses its stored
statistics. If it stores none, it normalizes each sample by its own, as training does in a batch of
one::

    mean, variance stored             BatchNormalization, inference
    zeros and ones, or computed       InstanceNormalization (PyTorch: track_running_stats=False)

Source: ONNX operators BatchNormalization-9 to -15 and InstanceNormalization-6.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import chain

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.errors import ModelError, counted
from deploy.frontends.affine import NORM
from deploy.frontends.checks import is_quantized_node, to_array
from deploy.frontends.fold import fold_constants
from deploy.frontends.onnx_reader import MESSAGE_LIMIT
from deploy.frontends.pairs import DQ
from deploy.frontends.plugins import CutOffNodes
from deploy.graph.edit import (
    bypass,
    claim_name,
    copy_message,
    drop_initializer_inputs,
    drop_unread,
    make_node,
    rename_tensors,
    replace_nodes,
    retain_named,
    set_opset,
    tensor_names,
)
from deploy.graph.index import (
    FLOAT,
    FLOAT16,
    Graph,
    Nodes,
    Shape,
    all_graphs,
    all_nodes,
    all_outputs,
    all_reads,
    all_tensors,
    attributes,
    count_reads,
    declared_values,
    describe_node,
    opset_of,
)
from deploy.graph.opset_forms import (
    COMPLETIONS,
    OpsetScope,
    change_form,
    find_upgrades,
    rewrite_nodes,
)
from deploy.graph.rewrite import CannotRewrite

TARGET_OPSET = 13

# errors of changing a node's form: it has none there, or is no valid node
_FORM_ERRORS = (CannotRewrite, ArithmeticError, LookupError, TypeError, ValueError)


def lift_opset(model: onnx.ModelProto, cut_off: CutOffNodes | None) -> str:
    """Bring a model of opset 7 to 12 to opset 13, and the nodes cut off from it, in place.

    Nodes and tensors keep their names. An attribute that is an input in opset 13 becomes a Constant
    node.

    Args:
        model: valid, with inferred types.
        cut_off: the nodes that were cut off; None without any.

    Returns:
        A note for the user; "" if the opset is new enough.

    Raises:
        ModelError: a node has no form in opset 13 that computes the same.
    """
    opset = opset_of(model)
    if opset >= TARGET_OPSET:
        return ""
    parts = [model]
    if cut_off is not None:
        parts.append(cut_off.model)
    _lift(parts, TARGET_OPSET)
    return f"Lifted from opset {opset} to {TARGET_OPSET}, which per-channel scales need."


def raise_opset(model: onnx.ModelProto, opset: int) -> None:
    """Bring a model of opset 13 or newer to `opset`, 22 at most, subgraphs too, in place.

    Raises:
        ModelError: a node has no form there that computes the same.
    """
    _lift((model,), opset)


def _lift(parts: Sequence[onnx.ModelProto], opset: int) -> None:
    """Bring the parts of one model to `opset`; no new tensor has a name that one of them holds."""
    graphs = list(chain.from_iterable(all_graphs(part.graph) for part in parts))
    names = tensor_names(*graphs)
    # tensors that a node reads or a graph returns: those that `count_reads` counts
    read_tensors = set(chain.from_iterable(map(count_reads, graphs)))
    for part in parts:
        scope = OpsetScope(opset_of(part), opset, names)
        rewrite_nodes(part.graph, scope, partial(_lift_node, read_tensors=read_tensors))
        set_opset(part, opset)


def _lift_node(node: onnx.NodeProto, scope: OpsetScope, *, read_tensors: set[str]) -> Nodes:
    """Return a node in its form of the target opset, after the nodes that make its new inputs.

    An input is new if it is an attribute in the source opset.

    Args:
        node: of the source opset.
        scope: both opsets, and what is known of the graph.
        read_tensors: all tensors that any node reads, and the outputs.

    Raises:
        ModelError: the node has no form in the target opset.
    """
    changes = find_upgrades(node, scope.source_opset, scope.target_opset)
    if not changes:
        return [node]
    lifted = copy_message(node)
    if node.op_type == "Dropout" and read_tensors.isdisjoint(node.output[1:]):
        del lifted.output[1:]  # its mask: no node reads it, and its type changed in opset 10
    try:
        return change_form(lifted, changes, scope)
    except _FORM_ERRORS as error:
        reason = str(error) if isinstance(error, CannotRewrite) else "it is no valid node"
        raise ModelError(
            f"a model of opset {scope.source_opset} is brought to {scope.target_opset}, got"
            f" {describe_node(node)}, which has no form there: {reason};"
            f" export the model with opset {scope.target_opset} or later"
        ) from error


def complete_axes(model: onnx.ModelProto) -> Counter[str]:
    """Write each Resize, Pad and CenterCropPad that names some axes so that it names all, in place.

    Beside int8 layers, ONNX Runtime 1.32 transposes the input of such a node without reordering its
    sizes or pads, which makes wrong results (onnxruntime#28788, #17760). A node whose axes or sizes
    are not constant stays.

    Returns:
        Operator -> number of the nodes that were written over all axes.
    """
    counts: Counter[str] = Counter()
    opset = opset_of(model)
    names = tensor_names(*all_graphs(model.graph))
    same_opset = OpsetScope(source_opset=opset, target_opset=opset, tensor_names=names)
    rewrite_nodes(model.graph, same_opset, partial(_complete_node, counts=counts))
    return counts


def _complete_node(node: onnx.NodeProto, scope: OpsetScope, *, counts: Counter[str]) -> Nodes:
    """Return the nodes that name all axes in place of a node; the node itself if it names all.

    Args:
        node: any node of the model.
        scope: the opset, and what is known of the graph.
        counts: operator -> number of nodes that were written anew; the node is added here.
    """
    if node.op_type not in COMPLETIONS or node.domain:
        return [node]
    try:  # on a copy, since an error may come after a part of the changes
        nodes = COMPLETIONS[node.op_type](copy_message(node), scope)
    except _FORM_ERRORS:  # an invalid node stays: ONNX Runtime reports what is wrong with it
        return [node]
    # a node is rewritten by giving it new inputs, and the nodes that make these come with it
    if len(nodes) == 1:
        return [node]
    counts[node.op_type] += 1
    return nodes


# what becomes of BatchNormalization nodes in training mode -> the note for the user
TRAINING_NOTES = {
    "inference": (
        "The file is in training mode: {} set to the stored statistics, as by model.eval(), in FP32"
        " too."
    ),
    "instances": (
        "Wrote {} without stored statistics as InstanceNormalization, which training mode is for a"
        " batch of one."
    ),
    # they stay: their statistics are read, or the batch is not of one sample
    "training": (
        "Left {} in training mode, which TensorRT does not read; export the model for inference"
        " (model.eval())."
    ),
}


def end_training_mode(model: onnx.ModelProto) -> Counter[str]:
    """Write BatchNormalization nodes in training mode for inference, in place.

    A node with stored statistics uses these. A node without them becomes an InstanceNormalization
    if each sample runs alone, else it stays. `TRAINING_NOTES` has a note for each case.

    Args:
        model: opset 13 or newer, with folded constants and inferred shapes.

    Returns:
        Outcome ("inference", "instances" or, if it stays, "training") -> number of nodes.
    """
    node_counts: Counter[str] = Counter()
    opset = opset_of(model)
    # tensors that a node reads or a graph returns, which `count_reads` counts; a norm whose updated
    # statistics are among them cannot leave training mode
    read_tensors = set(chain.from_iterable(map(count_reads, all_graphs(model.graph))))
    same_opset = OpsetScope(source_opset=opset, target_opset=opset)
    write_node = partial(_write_for_inference, read_tensors=read_tensors, node_counts=node_counts)
    rewrite_nodes(model.graph, same_opset, write_node)
    return node_counts


def _write_for_inference(
    node: onnx.NodeProto, scope: OpsetScope, *, read_tensors: Set[str], node_counts: Counter[str]
) -> Nodes:
    """Return the form for inference of a BatchNormalization in training mode; other nodes stay.

    Args:
        node: any node of the model.
        scope: the opset, and what is known of the graph.
        read_tensors: all tensors that any node reads, and the outputs.
        node_counts: outcome, a key of `TRAINING_NOTES` -> number of norms; the norm is added.
    """
    if not _is_training(node, scope.source_opset):
        return [node]
    outcome = _training_outcome(node, scope, read_tensors)
    node_counts[outcome] += 1
    if outcome == "training":
        return [node]
    if outcome == "instances":
        op_type = "InstanceNormalization"
        inputs = node.input[:3]  # without mean and variance
    else:
        op_type = NORM
        inputs = node.input
    epsilon = attributes(node).get("epsilon", 1e-5)
    return [make_node(op_type, inputs, node.output[0], node.name, epsilon=epsilon)]


def _training_outcome(norm: onnx.NodeProto, scope: OpsetScope, read_tensors: Set[str]) -> str:
    """Return what becomes of a BatchNormalization in training mode: a key of `TRAINING_NOTES`.

    `read_tensors`: a norm whose updated statistics are read stays in training mode.
    """
    if not read_tensors.isdisjoint(norm.output[1:]):
        return "training"
    if _has_statistics(norm, scope):
        return "inference"
    is_single_sample = _is_single_sample(scope.shapes.get(norm.input[0]))
    return "instances" if is_single_sample else "training"


def _is_training(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a node is a BatchNormalization in training mode; before opset 14 by its outputs."""
    if node.op_type != NORM or node.domain:
        return False
    if opset < 14:
        return any(node.output[1:])
    return bool(attributes(node).get("training_mode", 0))


def _has_statistics(norm: onnx.NodeProto, scope: OpsetScope) -> bool:
    """Whether mean and variance are constant, and not the zeros and ones of an untrained norm."""
    names = norm.input[3:5]
    if not scope.constants.keys() >= set(names):
        return False
    mean, variance = (to_array(scope.constants[name]) for name in names)
    return bool(mean.any() or (variance != 1).any())


def _is_single_sample(shape: Shape | None) -> bool:
    """Whether a tensor [N, C, ...] has further dimensions, and N is 1 or open."""
    return shape is not None and len(shape) > 2 and (shape[0] == 1 or not isinstance(shape[0], int))


_TYPE_ATTRIBUTES = {"to", "dtype"}  # they hold an element type
# doc_string of the casts to float16 outputs, for readers of the written files
_OUTPUT_CAST_MARK = "float16 end"


def widen_to_float32(model: onnx.ModelProto) -> str:
    """Convert a model's float16 computation to float32, in place.

    Returns:
        A note for the user; "" if the model has no float16.

    Raises:
        ModelError: the weights would not fit into one protobuf message any more.
    """
    graph = model.graph
    half_ends = list(filter(_is_half, (*graph.input, *graph.output)))
    half_attributes = list(_half_type_attributes(graph))
    half_tensors = [tensor for tensor in all_tensors(graph) if tensor.data_type == FLOAT16]
    if not (half_ends or half_attributes or half_tensors):
        return ""

    added_bytes = sum(2 * math.prod(tensor.dims) for tensor in half_tensors)  # 2 for each value
    size = model.ByteSize() + added_bytes
    if size > MESSAGE_LIMIT:
        raise ModelError(
            "a float16 model must be below 2 GB in float32, in which calib8 calibrates it, got"
            f" {size / 2**30:.1f} GB; calib8 writes a model as one protobuf message, which holds no"
            " more: build parts of the model"
        )
    for attribute in half_attributes:
        attribute.i = FLOAT
    for tensor in half_tensors:
        values = to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    _widen_inner_values(graph)
    _insert_casts(graph)

    note = (
        "Computes in float32 what the file computes in float16; the float32 model is the reference"
    )
    if not half_ends:
        return f"{note}."
    names = ", ".join(value.name for value in half_ends)
    verb = "is" if len(half_ends) == 1 else "are"
    return f"{note}; {names} {verb} float16 as before."


def _widen_inner_values(graph: onnx.GraphProto) -> None:
    """Declare float16 tensors as float32, without the inputs and outputs of the main graph."""
    for body in all_graphs(graph):
        values = body.value_info if body is graph else declared_values(body)
        for value in filter(_is_half, values):
            value.type.tensor_type.elem_type = FLOAT


def _half_type_attributes(graph: onnx.GraphProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes that say float16, such as that of a Cast, in subgraphs too."""
    for node in all_nodes(graph):
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == FLOAT16:
                yield attribute


def drop_casts(model: onnx.ModelProto) -> int:
    """Remove casts to the type that a tensor already has, in place; return their number.

    Exporters of mixed precision leave such casts behind. ONNX Runtime drops them too, but only when
    it runs the model: before that they would separate a Conv from its bias. A cast that produces a
    graph output stays.

    `model`: with sorted nodes and inferred types.
    """
    dtypes = Graph(model).dtypes  # tensor -> its element type

    def keeps_type(node: onnx.NodeProto) -> bool:
        if node.op_type != "Cast":
            return False
        dtype = dtypes.get(node.input[0])  # None or 0 (UNDEFINED) if it is unknown
        return bool(dtype) and bool(attributes(node).get("to") == dtype)

    return bypass(model.graph, keeps_type)


def _insert_casts(graph: onnx.GraphProto) -> None:
    """Cast float16 inputs to float32, and the float32 results of float16 outputs back, in place.

    The casts to outputs are marked in their doc_string, for readers of the written files.
    """
    names = tensor_names(graph)
    produced = all_outputs(graph.node)
    inputs = [value.name for value in filter(_is_half, graph.input)]
    # an output that no node makes is an input too, which needs no second cast
    outputs = [value.name for value in filter(_is_half, graph.output) if value.name in produced]
    # input or output -> the tensor that the nodes use instead
    float32_names = {}
    # a float model that calib8 wrote casts its inputs already. The names of these casts stay, since
    # its cache has them
    nodes = []
    for node in graph.node:
        is_own_cast = (
            node.op_type == "Cast"
            and node.input[0] in inputs
            and node.output[0] == f"{node.input[0]}_float32"
            and node.output[0] not in outputs
            and attributes(node).get("to") == FLOAT
        )
        if is_own_cast:
            float32_names[node.input[0]] = node.output[0]
        else:
            nodes.append(node)
    for name in (*inputs, *outputs):
        if name not in float32_names:
            float32_names[name] = claim_name(f"{name}_float32", names)
    input_casts = [
        make_node("Cast", [name], float32_names[name], float32_names[name], to=FLOAT)
        for name in inputs
    ]
    output_casts = [
        make_node(
            "Cast", [float32_names[name]], name, name, doc_string=_OUTPUT_CAST_MARK, to=FLOAT16
        )
        for name in outputs
    ]
    rename_tensors(nodes, float32_names)
    replace_nodes(graph, [*input_casts, *nodes, *output_casts])


def _is_half(value: onnx.ValueInfoProto) -> bool:
    """Whether a value is a float16 tensor."""
    return bool(value.type.tensor_type.elem_type == FLOAT16)


def restore_float_weights(model: onnx.ModelProto) -> str:
    """Make integer weights float if nothing else is quantized, in place.

    A model stays quantized if a node quantizes, if an activation or a tensor of a subgraph is
    dequantized, or if a dequantized weight is an output.

    Returns:
        A note for the user; "" for a model without quantized weights, or that stays quantized: its
        weights may be float nevertheless, and `checks.check_float` refuses it.
    """
    quantized_nodes = list(filter(is_quantized_node, all_nodes(model.graph)))
    if not quantized_nodes or any(node.op_type != DQ for node in quantized_nodes):
        return ""
    drop_initializer_inputs(model.graph)
    dequantize_constants(model)
    if any(map(is_quantized_node, all_nodes(model.graph))):
        return ""
    # a file may also list the float weights, which it computed until now, as inputs
    retain_named(model.graph.input, count_reads(model.graph))
    return f"Converted {counted(len(quantized_nodes), 'weight')} from stored integers to float."


def dequantize_constants(model: onnx.ModelProto, dtype: int | None = None) -> None:
    """Turn the constants that DequantizeLinear nodes make into float initializers, in place.

    `dtype`: element type of the stored integers, such as INT32; None for any.
    """
    constants = Graph(model).constants
    dequantizers: Nodes = []
    for node in model.graph.node:
        if node.op_type != DQ or node.input[0] not in constants:
            continue
        if dtype in (None, constants[node.input[0]].data_type):
            dequantizers.append(node)
    float_constants = all_outputs(dequantizers)
    dequantizer_inputs = set(all_reads(dequantizers))

    def is_chosen(node: onnx.NodeProto) -> bool:
        """Whether a node is one of the dequantizers, or a Constant node that one of them reads.

        A node is folded only if it reads initializers, so these Constant nodes must become some.
        """
        is_read_constant = not dequantizer_inputs.isdisjoint(node.output)
        if node.op_type == "Constant" and is_read_constant:
            return True
        return not float_constants.isdisjoint(node.output)

    fold_constants(model, is_chosen=is_chosen)
    drop_unread(model.graph)
