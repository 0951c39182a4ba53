"""Refuse models that calib8 cannot calibrate; each message is one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from deploy.errors import ExportError, ModelError, QuantizedError, first_line
from deploy.graph.edit import copy_message
from deploy.graph.index import all_graphs, all_nodes, all_reads, describe_node, opset_of
from deploy.graph.placement import WEIGHTED

if TYPE_CHECKING:
    from google.protobuf.message import Message

OLDEST_OPSET = 7
_ASCEND_OPERATORS = ("AscendQuant", "AscendDequant", "AscendAntiQuant", "AscendWeightQuant")
_PAIR = ("QuantizeLinear", "DequantizeLinear")  # complete names: a plugin's may begin with these
_QUANTIZED_STARTS = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulNBits")
_QUANTIZED_DOMAINS = ("onnx.brevitas", "qonnx.custom_op.general", "finn.custom_op.general")
_OPTIMIZED_DOMAINS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
_OPTIMIZER_OPS = frozenset(("FusedConv", "FusedGemm", "FusedMatMul", "FusedMatMulActivation"))
_QUANTIZED_ENDS = ("Integer", "IntegerToFloat", "FloatBias")


_MAX_NAME = 1 << 17  # characters; names are copied into tables, files and messages


def check_fields(message: Message) -> None:
    """Refuse constants of negative size, and names that are too long or not UTF-8.

    Args:
        message: a model, or any part of one, whose parts are checked too.
    """
    # only tensors have `dims`; ONNX's shape inference ends the process at a negative size
    sizes = list(getattr(message, "dims", ()))
    if min(sizes, default=0) < 0:
        raise ModelError(
            f"sizes of a constant must be 0 or more, got {sizes} for"
            f" '{getattr(message, 'name', '')}'; export the model again"
        )
    for field, value in message.ListFields():
        # a repeated field of protobuf has several parts, any other field has one
        parts = value if isinstance(value, MutableSequence) else [value]
        if field.message_type:
            for part in parts:
                check_fields(part)
        elif field.type == field.TYPE_STRING and field.name != "doc_string":
            # documentation and metadata are free text, of any length
            is_metadata = isinstance(message, onnx.StringStringEntryProto)
            for name in parts:
                if isinstance(name, bytes):  # protobuf gives text that is not UTF-8 as bytes
                    raise ModelError(
                        f"names in the model must be UTF-8, got {name[:40]!r}; export it again"
                    )
                if len(name) > _MAX_NAME and not is_metadata:
                    raise ModelError(
                        f"names in the model must have at most {_MAX_NAME:,} characters, got"
                        f" {name[:40]!r}... with {len(name):,}; export it again"
                    )


def check_opset(model: onnx.ModelProto) -> None:
    """Refuse operator sets older than 7."""
    opset = opset_of(model)
    if opset < OLDEST_OPSET:
        raise ModelError(
            f"the model must use ONNX opset {OLDEST_OPSET} or newer, got {opset}; export it again"
        )


def check_float(model: onnx.ModelProto) -> None:
    """Refuse models that are quantized already; the message names the first such node."""
    for node in all_nodes(model.graph):
        if node.op_type in _ASCEND_OPERATORS:
            raise ModelError(
                "the model must be a float32 one, got one that only Ascend's atc reads"
                f" ({describe_node(node)}); give the model it was made from, or its"
                " fake-quant model"
            )
        if is_quantized_node(node):
            raise QuantizedError(
                "the model must be a float32 one, got one that is quantized already "
                f"({describe_node(node)}); give the model it was made from, or a Q/DQ model"
                " to calib8 build"
            )


def is_quantized_node(node: onnx.NodeProto) -> bool:
    """Return whether a node computes in integers, quantizes or dequantizes."""
    op_type = node.op_type
    return (
        node.domain in _QUANTIZED_DOMAINS
        or op_type in _PAIR
        or op_type.startswith(_QUANTIZED_STARTS)
        or op_type.endswith(_QUANTIZED_ENDS)
    )


def list_optimized_nodes(model: onnx.ModelProto) -> str:
    """Return the nodes that only ONNX Runtime's optimizer makes, as text; "" if there are none."""
    counts: Counter[str] = Counter()
    for node in all_nodes(model.graph):
        is_fused = node.domain == "com.microsoft" and node.op_type in _OPTIMIZER_OPS
        if is_fused or node.domain.startswith(_OPTIMIZED_DOMAINS):
            counts[node.op_type] += 1
    return list_counts(counts)


def list_counts(counts: Mapping[str, int]) -> str:
    """Return operators with their numbers as text: "2 Conv, 1 Relu"."""
    return ", ".join(f"{count} {op_type}" for op_type, count in sorted(counts.items()))


def check_optimized(model: onnx.ModelProto) -> str:
    """Refuse a model whose layers ONNX Runtime has all fused.

    Returns:
        A note for the user if some are; else "".
    """
    optimized = list_optimized_nodes(model)  # as text
    if not optimized:
        return ""
    nodes = all_nodes(model.graph)
    has_layers = any(node.op_type in WEIGHTED and not node.domain for node in nodes)
    if not has_layers:
        raise ModelError(
            f"the model must be as it was exported, got one that ONNX Runtime optimized"
            f" ({optimized}), which leaves no node that can be int8; give the model as exported"
        )
    return f"Optimized by ONNX Runtime: {optimized} stay in float; give the model as exported."


def refuse_optimized(model: onnx.ModelProto, target: str) -> None:
    """Refuse a model that only ONNX Runtime reads.

    Raises:
        ExportError: it has nodes that ONNX Runtime's optimizer made.
    """
    if optimized := list_optimized_nodes(model):
        raise ExportError(
            f"{target} must know every operator, got a model that ONNX Runtime optimized"
            f" ({optimized}); give the model as exported"
        )


def check_ends(model: onnx.ModelProto) -> None:
    """Refuse a graph that cannot be run on tensors.

    It must have inputs, nodes and outputs; all inputs and one output must be tensors; and each
    attribute must have a value: outside of functions it cannot refer to an attribute of a caller.
    Sparse constants, which exporters do not write, are refused too.

    Raises:
        ModelError: names what is missing.
    """
    graph = model.graph
    for node in all_nodes(graph):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise ModelError(
                    f"attributes outside of functions must have a value, got '{attribute.name}' of"
                    f" '{node.name or node.op_type}', which refers to another; export it again"
                )
            if attribute.HasField("sparse_tensor"):
                raise _sparse_error(attribute.sparse_tensor.values.name)
    for body in all_graphs(graph):
        for sparse in body.sparse_initializer:  # the first one is refused
            raise _sparse_error(sparse.values.name)
    for noun, items in (("input", graph.input), ("output", graph.output), ("node", graph.node)):
        if not items:
            raise ModelError(f"the model must have at least one {noun}, got none; export it again")
    for value in graph.input:
        if not value.type.HasField("tensor_type"):
            raise ModelError(
                f"every input must be a tensor, got a sequence or map for '{value.name}'; "
                "export the part of the model that takes tensors"
            )
    if not any(map(_may_be_numbers, graph.output)):
        names = ", ".join(value.name for value in graph.output)
        raise ModelError(
            "at least one output must be a tensor of numbers, got text, sequences or maps alone"
            f" ({names}); export the model with the tensor that they are made of as an output too"
        )


def _sparse_error(name: str) -> ModelError:
    return ModelError(f"constants must be dense, got the sparse '{name}'; export it densely")


def _may_be_numbers(value: onnx.ValueInfoProto) -> bool:
    """Whether a value is a tensor of numbers, or of unknown type."""
    kind = value.type.WhichOneof("value")
    is_text = value.type.tensor_type.elem_type == TensorProto.STRING
    return kind in (None, "tensor_type") and not is_text


def _refuse_bfloat16(tensor_text: str, elem_type: int) -> None:
    """Refuse a type that is bfloat16; `tensor_text` is such as "input 'x'"."""
    if elem_type == TensorProto.BFLOAT16:
        raise ModelError(
            f"the model must be a float32 or float16 one, got bfloat16 for {tensor_text};"
            " export it in float32"
        )


def type_name(elem_type: int) -> str:
    """Return the numpy dtype name of an ONNX element type; 'unknown' if numpy has none."""
    if elem_type == TensorProto.STRING:
        return "str"
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(elem_type)).name)
    except KeyError:
        return "unknown"


def check_values(model: onnx.ModelProto) -> None:
    """Refuse bfloat16, NaN and infinity.

    bfloat16 is refused in inputs and in the weights of layers (Conv, ConvTranspose, Gemm, MatMul),
    since ONNX Runtime does not run it on the CPU; NaN in any constant; infinity in the weights of
    layers. The biases of layers count as weights.
    """
    for value in model.graph.input:
        _refuse_bfloat16(f"input '{value.name}'", value.type.tensor_type.elem_type)
    layers = [node for node in model.graph.node if node.op_type in WEIGHTED]
    layer_inputs = set(all_reads(layers))  # names; weights and biases are among them
    for tensor in model.graph.initializer:
        if tensor.name in layer_inputs:
            _refuse_bfloat16(f"weight '{tensor.name}'", tensor.data_type)
        array = to_array(tensor)
        if array.dtype.kind != "f":
            continue
        _refuse_invalid(tensor.name, "NaN", np.isnan(array))
        if tensor.name in layer_inputs:
            _refuse_invalid(tensor.name, "infinity", np.isinf(array))


def _refuse_invalid(name: str, kind: str, is_invalid: NDArray[np.bool_]) -> None:
    """Refuse a tensor of which some values are invalid; `kind` says what they are."""
    if is_invalid.any():
        raise ModelError(
            f"weights must be finite, got {kind} in '{name}' ({is_invalid.sum()} of"
            f" {is_invalid.size} elements); the training diverged or the file is damaged: export a"
            " valid checkpoint"
        )


def to_array(tensor: onnx.TensorProto) -> NDArray[Any]:
    """Return the values of a tensor as a numpy array.

    Raises:
        ModelError: the stored bytes do not fit the tensor's shape and type.
    """
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, NotImplementedError) as e:
        raise ModelError(
            f"constant '{tensor.name}' must hold as many values as its shape "
            f"{tuple(tensor.dims)} says, got: {first_line(e)}; export or copy the model again"
        ) from e


def check_valid(model: onnx.ModelProto) -> None:
    """Run ONNX's checker; a graph without a name and unknown ranks, which it refuses, are valid."""
    checked = copy_message(model)
    checked.graph.name = "graph"
    for value in (*checked.graph.input, *checked.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    with refuse_errors("the model must be valid ONNX"):
        onnx.checker.check_model(checked)


@contextmanager
def refuse_errors(rule: str) -> Iterator[None]:
    """Turn any error of ONNX into a `ModelError` that the model breaks a rule.

    ONNX is C++ behind a binding: the class of an error depends on what is broken.
    """
    try:
        yield
    except Exception as error:
        raise ModelError(f"{rule}, got: {first_line(error)}; export it again") from error
