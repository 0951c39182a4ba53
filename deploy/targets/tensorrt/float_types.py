"""Float types of a TensorRT model: float16 or bfloat16 for the part that is not quantized.

A strongly typed network (the only kind from TensorRT 11 on) runs every layer in the type that the
model gives it. A Q/DQ model whose float part is float32 is slower there than a plain float16 model,
so `narrow_float_part` converts the float part::

    x (float32) -> Q -> DQ (float16) -> Conv -> Sigmoid -> Mul -> ... -> Cast -> Softmax -> y
                                        '------- float16 --------'      '---- float32 ----'

Operators in `_NARROW_OPS` compute in the narrow type, unless an input or output is too large or
small for it or an epsilon constant becomes 0 in it; all others stay in float32. QuantizeLinear
reads either type and DequantizeLinear outputs the type that its readers need, so neither needs a
Cast; a tensor is cast at most once for all its readers. Model inputs and outputs keep their type.
Scales are rounded to values of the narrow type before anything is quantized with them
(`round_scales`).

In a weakly typed network TensorRT with `--fp16` runs a layer in float16 wherever that is faster,
whatever its values; `find_float32_layers` lists the nodes that must be bound to float32 there.

Source: ONNX operators QuantizeLinear-19 and DequantizeLinear-19 (type of the scale); TensorRT
developer guide, "Strongly typed networks".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

from calibrators.grids import Float32Array
from deploy.errors import ExportError, ModelError, first_line
from deploy.frontends.lift import raise_opset
from deploy.graph.bounds import find_float16_overflows, float16_overflow, scales_fit_float16
from deploy.graph.edit import copy_message, infer_types, make_node, rebuild, unique_name
from deploy.graph.index import FLOAT, ONNX_DOMAINS, Graph, Nodes, by_name, opset_of
from deploy.graph.lowering import type_variables
from deploy.graph.placement import MOVES
from deploy.targets.tensorrt.trt_options import BF16, FP16, FP32

FIRST_OPSET_BY_TYPE = {
    FP16: 19,
    BF16: 22,
}  # first opset in which scales and convolutions may have that type
FP8_OPSET = 19  # first opset with fp8 pairs
_ELEMENT_TYPES = {FP16: onnx.TensorProto.FLOAT16, BF16: onnx.TensorProto.BFLOAT16}
# Operators that only move values: they take the type of their input.
_MOVE_OPS = MOVES | {"Gather", "Identity", "Slice", "Split", "Tile"}
# Operators with short sums or without any. Softmax, norms, exponentials, long reductions and all
# operators not listed stay in float32.
_NARROW_OPS = _MOVE_OPS | frozenset(
    (
        "Abs", "Add", "AveragePool", "Clip", "Concat", "Conv", "ConvTranspose", "DepthToSpace",
        "Div", "Elu", "Erf", "Expand", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
        "HardSigmoid", "HardSwish", "LeakyRelu", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg",
        "PRelu", "Pad", "Relu", "Resize", "Sigmoid", "SpaceToDepth", "Sub", "Tanh", "Where",
    )
)  # fmt: skip


def round_scales(scales: Float32Array, float_type: str) -> Float32Array:
    """Round positive scales up to values of the narrow type, so that nothing is clipped.

    Scales of a tensor that float16 cannot hold, which stays in float32, are returned as they are.
    """
    if float_type == FP32 or (float_type == FP16 and not scales_fit_float16(scales)):
        return scales
    float32_scales = np.ascontiguousarray(scales, np.float32)
    if float_type == BF16:  # the upper 16 bits of float32; the lower ones are rounded up
        bits = float32_scales.view(np.uint32) + np.uint32(0xFFFF)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    nearest = float32_scales.astype(np.float16)
    next_above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest < float32_scales, next_above, nearest).astype(np.float32)


def narrow_float_part(
    quantized: onnx.ModelProto, float_type: str, largest_values: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the Q/DQ model with its float part in a narrow type; `quantized` is not changed.

    Args:
        quantized: float32 Q/DQ model whose scales are values of the narrow type already (see
            `round_scales`).
        float_type: the narrow type, "fp16" or "bf16".
        largest_values: tensor of the float model -> largest |x| observed.

    Returns:
        The model, and node -> why it stays in float32, for nodes with an operator of `_NARROW_OPS`.

    Raises:
        ExportError: the model cannot be converted to the opset, or a tensor's type is unknown.
    """
    model = _with_known_types(quantized, FIRST_OPSET_BY_TYPE[float_type])
    converter = _TypeConverter(model, float_type, largest_values)
    rebuild(model.graph, converter.convert())
    # type inference may have changed the outputs' declared shapes
    declared_outputs = by_name(quantized.graph.output)
    for output in model.graph.output:
        output.CopyFrom(declared_outputs[output.name])
    return model, converter.float32_reasons


def at_opset(model: onnx.ModelProto, min_opset: int) -> onnx.ModelProto:
    """Return the model if its opset is `min_opset` or newer, else a copy converted to it.

    Raises:
        ExportError: the model cannot be converted.
    """
    if opset_of(model) >= min_opset:
        return model
    raised = copy_message(model)
    try:
        raise_opset(raised, min_opset)
    except ModelError as error:
        raise ExportError(str(error)) from error
    return raised


def _with_known_types(quantized: onnx.ModelProto, min_opset: int) -> onnx.ModelProto:
    """Return a copy at opset `min_opset` or newer, with inferred types.

    Raises:
        ExportError: the model cannot be converted, or the types contradict each other.
    """
    model = copy_message(at_opset(quantized, min_opset))
    for output in model.graph.output:  # a wrong shape in the file does not matter to runtimes
        output.type.tensor_type.ClearField("shape")
    try:
        typed_model = infer_types(model, strict_mode=True)
    except Exception as error:  # onnx's C++ code has no error class of its own
        raise ExportError(
            f"a typed model must be of opset {min_opset} with all types known, got opset"
            f" {opset_of(model)} that cannot be brought there (onnx says:"
            f" {first_line(error)}); export the model with opset {min_opset} or newer"
        ) from error
    min_ir_version = 9 if min_opset < 21 else 10  # the first version of ONNX files with that opset
    typed_model.ir_version = max(typed_model.ir_version, min_ir_version)
    return typed_model


@dataclass
class _TypeConverter:
    """Converts the float part of one model to a narrow type, in the order of its nodes.

    Attributes:
        model: model to convert; its initializers are extended.
        float_type: name of the narrow type.
        largest_values: tensor of the float model -> largest |x| observed.
        float32_reasons: node with an operator of `_NARROW_OPS` -> why it stays in float32.
    """

    model: onnx.ModelProto
    float_type: str
    largest_values: Mapping[str, float]
    float32_reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = Graph(self.model)
        self.narrow_type = _ELEMENT_TYPES[self.float_type]
        self.type_by_tensor = dict(self.index.dtypes)  # as converted so far
        for tensor in self.model.graph.initializer:
            self.type_by_tensor[tensor.name] = tensor.data_type
        self.converted: dict[tuple[str, int], str] = {}  # (tensor, type) -> its copy in that type
        self.nodes: Nodes = []

    def convert(self) -> Nodes:
        """Return the converted nodes: the graph's own, edited in place, and the Casts they need.

        A node computes in the narrow type (float16 or bfloat16) where it can, else in float32. Its
        inputs of the other type get a Cast. A Q/DQ pair needs none: the scale of a QuantizeLinear
        has the type of its input, and that of a DequantizeLinear the type that its readers need.

        Raises:
            ExportError: the type of a tensor is unknown.
        """
        untyped_tensors = [
            name for name in self.index.producer if not self.type_by_tensor.get(name)
        ]
        if untyped_tensors:
            raise ExportError(
                "a typed model must know the types of its tensors, got none of"
                f" {untyped_tensors[0]!r}; build with --rest fp32"
            )
        for node in self.index.nodes:
            if node.op_type == "QuantizeLinear":
                self._append_with_scale(node, self.type_by_tensor[node.input[0]])
            elif node.op_type == "DequantizeLinear":
                output = node.output[0]
                output_type = self.narrow_type if self._has_narrow_reader(output) else FLOAT
                self._append_with_scale(node, output_type)
                self.type_by_tensor[output] = output_type
            else:
                self._append_with_casts(node)
        return self.nodes

    def _append_with_scale(self, node: onnx.NodeProto, scale_type: int) -> None:
        """Append a QuantizeLinear or DequantizeLinear to `nodes`, with its scale in this type."""
        node.input[1] = self._as_type(node.input[1], scale_type)
        self.nodes.append(node)

    def _append_with_casts(self, node: onnx.NodeProto) -> None:
        """Append a node to `nodes`, with its float inputs in the type in which it computes.

        Inputs of another float type are read through a Cast, which is appended before.
        """
        stays_float32 = self._stays_float32(node)
        compute_type = FLOAT if stays_float32 else self.narrow_type
        for index in _typed_inputs(node):
            name = node.input[index]
            is_float = self.type_by_tensor.get(name) in (FLOAT, self.narrow_type)
            if is_float:
                node.input[index] = self._as_type(name, compute_type)
        self.nodes.append(node)
        if stays_float32:
            return
        # the outputs that have, by the operator's schema, the type in which it computes
        for index in _indices_of_compute_type(node, node.output, _schema(node).outputs):
            if self.type_by_tensor[node.output[index]] == FLOAT:
                self._narrow_output(node, index)

    def _narrow_output(self, node: onnx.NodeProto, index: int) -> None:
        """Record that an output is narrow; a model output is cast back under its name."""
        name = node.output[index]
        if name not in self.index.outputs:
            self.type_by_tensor[name] = self.narrow_type
            return
        narrow_name = unique_name(f"{name}/{self.float_type}", self.type_by_tensor)
        node.output[index] = narrow_name
        self.type_by_tensor[narrow_name] = self.narrow_type
        self.converted[name, self.narrow_type] = narrow_name
        self._add_cast(narrow_name, name, FLOAT)

    def _stays_float32(self, node: onnx.NodeProto) -> bool:
        """Return whether a node stays in float32, and record why if its operator could be narrow.

        A node of integers counts as float32 too.
        """
        if not _can_be_narrow(node):
            return True
        data_input = node.input[_data_position(node)]
        if self.type_by_tensor.get(data_input) not in (FLOAT, self.narrow_type):
            return True  # integers
        if self.index.captured.intersection(node.output):  # tensors that subgraphs read
            self.float32_reasons[node.name] = "a subgraph reads it"
            return True
        if node.op_type in _MOVE_OPS and data_input not in self.index.initializers:
            # It copies values, and so has the type of its input. A constant could have either type:
            # it is narrow if its values allow it, as for other operators.
            return self.type_by_tensor[data_input] == FLOAT
        reason = self._overflow_reason(node)
        if reason:
            self.float32_reasons[node.name] = reason
        return bool(reason)

    def _has_narrow_reader(self, name: str) -> bool:
        """Whether a node that computes in the narrow type reads a tensor.

        False for tensors that the model's outputs or subgraphs read too: these stay float32.
        """
        if self.index.is_read_outside(name):
            return False
        readers = self.index.readers.get(name, [])
        return any(_can_be_narrow(node) and not self._overflow_reason(node) for node in readers)

    def _overflow_reason(self, node: onnx.NodeProto) -> str:
        """Return why float16 is too narrow for a node, or ""; bfloat16 never is."""
        if self.float_type != FP16:
            return ""
        return float16_overflow(self.index, node, self.largest_values)

    def _as_type(self, name: str, element_type: int) -> str:
        """Return the tensor in a type: a converted constant, or one Cast for all readers."""
        if not name or self.type_by_tensor.get(name) == element_type:
            return name
        if (name, element_type) not in self.converted:
            suffix = self.float_type if element_type == self.narrow_type else FP32
            copy_name = unique_name(f"{name}/{suffix}", self.type_by_tensor)
            if name in self.index.initializers:
                self._add_constant(name, copy_name)
            else:
                self._add_cast(name, copy_name, element_type)
            self.converted[name, element_type] = copy_name
        return self.converted[name, element_type]

    def _add_cast(self, source: str, output: str, element_type: int) -> None:
        """Append a Cast of a tensor to a type; its output is a new tensor."""
        cast = make_node("Cast", [source], output, f"{output}/Cast", to=element_type)
        self.nodes.append(cast)
        self.type_by_tensor[output] = element_type

    def _add_constant(self, source: str, narrow_name: str) -> None:
        """Add a copy of a constant in the narrow type."""
        dtype = helper.tensor_dtype_to_np_dtype(self.narrow_type)
        values = numpy_helper.to_array(self.index.initializers[source]).astype(dtype)
        self.model.graph.initializer.append(numpy_helper.from_array(values, narrow_name))
        self.type_by_tensor[narrow_name] = self.narrow_type


def _can_be_narrow(node: onnx.NodeProto) -> bool:
    """Whether the operator of a node may compute in the narrow type."""
    return node.domain in ONNX_DOMAINS and node.op_type in _NARROW_OPS


def _typed_inputs(node: onnx.NodeProto) -> list[int]:
    """Return the indices of the inputs that have the type in which the node computes."""
    if not _can_be_narrow(node):
        return [index for index, name in enumerate(node.input) if name]
    return _indices_of_compute_type(node, node.input, _schema(node).inputs)


def _indices_of_compute_type(
    node: onnx.NodeProto,
    names: Sequence[str],
    parameters: Sequence[defs.OpSchema.FormalParameter],
) -> list[int]:
    """Return the indices of a node's tensors that have, by its schema, the type of its data.

    Args:
        node: the node.
        names: its inputs, or its outputs.
        parameters: inputs or outputs of the schema; their type is a variable such as "T".
    """
    compute_type = _schema(node).inputs[_data_position(node)].type_str
    variables = type_variables(parameters, len(names))
    return [index for index, name in enumerate(names) if name and variables[index] == compute_type]


def _data_position(node: onnx.NodeProto) -> int:
    """Return the index of a node's first data input; input 0 of a Where is its condition."""
    return 1 if node.op_type == "Where" else 0


def _schema(node: onnx.NodeProto) -> defs.OpSchema:
    """Return the ONNX schema of an operator in an opset that has all narrow types."""
    return defs.get_schema(node.op_type, FIRST_OPSET_BY_TYPE[BF16])


def find_float32_layers(
    model: onnx.ModelProto,
    largest_values: Mapping[str, float],
    *,
    float_type: str,
    quantized: Collection[str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (node -> its output tensor, node -> reason) for nodes that must run in float32.

    Args:
        model: cleaned float model.
        largest_values: tensor -> largest |x| observed.
        float_type: type of the float part; only "fp16" can be too narrow.
        quantized: nodes that run in int8.
    """
    if float_type != FP16:
        return {}, {}
    graph = Graph(model)
    overflows = find_float16_overflows(graph, largest_values, int8_nodes=quantized)
    output_by_node = {}
    reason_by_node = {}
    for node in graph.nodes:
        # TensorRT's layer is found by the node's name, or by its only output
        has_one_float_output = len(node.output) == 1 and graph.is_float(node.output[0])
        if node.name in overflows and has_one_float_output:
            output_by_node[node.name] = node.output[0]
            reason_by_node[node.name] = overflows[node.name]
    return output_by_node, reason_by_node
