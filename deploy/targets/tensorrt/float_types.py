"""Float types of a TensorRT model: float16 or bfloat16 for the part that is not quantized.

A strongly typed network (the only kind from TensorRT 11 on) runs every layer in the type that the
model gives it. A Q/DQ model whose float part is float32 is slower there than a plain float16 model,
so `narrow_float_part` converts the float part::

    x (float32) -> Q -> DQ (float16) -> Conv -> Sigmoid -> Mul -> ... -> Cast -> Softmax -> y
                                        '------- float16 --------'      '---- float32 ----'

Operators in `_NARROW` compute in the narrow type, unless an input or output overflows it or an
epsilon constant becomes 0 in it; all others stay in float32. QuantizeLinear reads either type and
DequantizeLinear outputs the type that its readers need, so neither needs a Cast; a tensor is cast
at most once for all its readers. Model inputs and outputs keep their type. Scales are rounded to
values of the narrow type before anything is quantized with them (`round_scales`).

In a weakly typed network TensorRT with `--fp16` runs a layer in float16 wherever that is faster,
whatever its values; `wide_layers` lists the nodes that must be bound to float32 there.

Source: ONNX operators QuantizeLinear-19 and DequantizeLinear-19 (type of the scale); TensorRT
developer guide, "Strongly typed networks".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import defs, helper, numpy_helper

from deploy.errors import ExportError, ModelError, first_line
from deploy.files import atomic
from deploy.frontends.base import QdqCalibration
from deploy.frontends.checks import to_array
from deploy.frontends.lift import raise_opset
from deploy.frontends.pairs import DQ, Q
from deploy.graph.bounds import find_float16_overflows, float16_overflow
from deploy.graph.edit import copy_message, infer_types, rebuild, unique_name
from deploy.graph.index import Graph, attributes, opset_of
from deploy.graph.placement import MOVES
from deploy.targets.tensorrt.trt_options import BF16, FP16, FP32

OPSETS = {FP16: 19, BF16: 22}  # first opset in which scales and convolutions may have that type
FP8_OPSET = 19  # first opset with fp8 pairs
_FLOAT = 1  # onnx.TensorProto
_TYPES = {FP16: 10, BF16: 16}  # onnx.TensorProto
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Operators that only move values: they take the type of their input.
_MOVES = MOVES | {"Gather", "Identity", "Slice", "Split", "Tile"}
# Operators with short sums or without any. Softmax, norms, exponentials, long reductions and all
# operators not listed stay in float32.
_NARROW = _MOVES | frozenset(
    (
        "Abs", "Add", "AveragePool", "Clip", "Concat", "Conv", "ConvTranspose", "DepthToSpace",
        "Div", "Elu", "Erf", "Expand", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
        "HardSigmoid", "HardSwish", "LeakyRelu", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg",
        "PRelu", "Pad", "Relu", "Resize", "Sigmoid", "SpaceToDepth", "Sub", "Tanh", "Where",
    )
)  # fmt: skip


def round_scales(scales: NDArray[np.float32], rest: str) -> NDArray[np.float32]:
    """Round positive scales up to values of the narrow type, so that nothing is clipped."""
    if rest == FP32:
        return scales
    wide = np.ascontiguousarray(scales, np.float32)
    if rest == BF16:  # the upper half of float32
        bits = wide.view(np.uint32) + np.uint32(0xFFFF)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):  # overflows to inf
        nearest = wide.astype(np.float16)
    above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest < wide, above, nearest).astype(np.float32)


def narrow_float_part(
    quantized: onnx.ModelProto, rest: str, largest: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the Q/DQ model with its float part in a narrow type; `quantized` is not changed.

    Args:
        quantized: float32 Q/DQ model whose scales are `round_scales`.
        rest: "fp16" or "bf16".
        largest: tensor of the float model -> largest |x| observed.

    Returns:
        The model, and node -> why it stays in float32, for nodes whose operator could be narrow.

    Raises:
        ExportError: the model cannot be converted to the opset, or a tensor's type is unknown.
    """
    lifted = _lifted(quantized, OPSETS[rest])
    converter = _TypeConverter(lifted, rest, largest)
    rebuild(lifted.graph, converter.run())
    for value in lifted.graph.output:  # type inference may have changed them
        value.CopyFrom(next(v for v in quantized.graph.output if v.name == value.name))
    return lifted, converter.kept


def at_opset(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    """Return the model if its opset is `wanted` or newer, else a copy converted to `wanted`.

    Raises:
        ExportError: the model cannot be converted.
    """
    opset = opset_of(model)
    if opset >= wanted:
        return model
    lifted = copy_message(model)
    try:
        raise_opset(lifted, wanted)
    except ModelError as error:
        raise ExportError(str(error)) from error
    return lifted


def _lifted(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    """Return a copy at opset `wanted` or newer, with inferred types."""
    model = at_opset(model, wanted)
    try:
        lifted = infer_types(model, strict_mode=True)
    except Exception:  # onnx's C++ code has no error class of its own
        try:  # a wrong output shape in the file does not matter to runtimes
            open_outputs = copy_message(model)
            for value in open_outputs.graph.output:
                value.type.tensor_type.ClearField("shape")
            lifted = infer_types(open_outputs, strict_mode=True)
        except Exception as error:
            raise ExportError(
                f"a typed model must be of opset {wanted} with all types known, got opset"
                f" {opset_of(model)} that cannot be brought there (onnx says:"
                f" {first_line(error)}); export the model with opset {wanted} or newer"
            ) from error
    lifted.ir_version = max(lifted.ir_version, 9 if wanted < 21 else 10)
    return lifted


@dataclass
class _TypeConverter:
    """Converts the float part of one model to a narrow type, in the order of its nodes."""

    model: onnx.ModelProto
    rest: str
    largest: Mapping[str, float]
    kept: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = Graph(self.model)
        self.narrow = _TYPES[self.rest]
        self.types = dict(self.index.dtypes)  # tensor -> its present element type
        self.types |= {t.name: t.data_type for t in self.model.graph.initializer}
        self.casts: dict[tuple[str, int], str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def run(self) -> list[onnx.NodeProto]:
        unknown = next((n for n in self.index.producer if not self.types.get(n)), None)
        if unknown is not None:
            raise ExportError(
                f"a typed model must know the types of its tensors, got none of {unknown!r};"
                " build with --rest fp32"
            )
        for node in self.index.nodes:
            self._add_node(node)
        return self.nodes

    def _add_node(self, node: onnx.NodeProto) -> None:
        if node.op_type in _PAIR:
            # the scale's type: of Q that of its input, of DQ that which its readers need
            quantizes = node.op_type == "QuantizeLinear"
            narrow = not quantizes and self._has_narrow_reader(node.output[0])
            kind = self.types[node.input[0]] if quantizes else (self.narrow if narrow else _FLOAT)
            node.input[1] = self._as_type(node.input[1], kind)
            self.nodes.append(node)
            if not quantizes:
                self.types[node.output[0]] = kind
            return
        wide = self._stays_wide(node)
        for index in _typed_inputs(node):
            name = node.input[index]
            if self.types.get(name) in (_FLOAT, self.narrow):
                node.input[index] = self._as_type(name, _FLOAT if wide else self.narrow)
        narrowed = [node.output[index] for index in _typed_outputs(node)] if not wide else []
        self.nodes.append(node)
        for name in narrowed:
            if self.types[name] == _FLOAT:
                self._set_narrow(node, name)

    def _set_narrow(self, node: onnx.NodeProto, name: str) -> None:
        """Record that a tensor is narrow; a model output is cast back under its name."""
        if name not in self.index.outputs:
            self.types[name] = self.narrow
            return
        inner = unique_name(f"{name}/{self.rest}", self.types)
        node.output[list(node.output).index(name)] = inner
        self.types[inner] = self.narrow
        self.casts[name, self.narrow] = inner
        self._cast(inner, name, _FLOAT)

    def _stays_wide(self, node: onnx.NodeProto) -> bool:
        """Return whether a node stays in float32; if it could be narrow, `kept` gets the reason."""
        if node.domain not in ("", "ai.onnx") or node.op_type not in _NARROW:
            return True
        main = node.input[0] if node.op_type != "Where" else node.input[1]
        if self.types.get(main) not in (_FLOAT, self.narrow):
            return True  # integers
        if any(name in self.index.captured for name in node.output):
            self.kept[node.name] = "a subgraph reads it"
            return True
        if node.op_type in _MOVES and main not in self.index.initializers:
            return bool(self.types[main] == _FLOAT)
        reason = self._too_wide(node)
        if reason:
            self.kept[node.name] = reason
        return bool(reason)

    def _has_narrow_reader(self, name: str) -> bool:
        if name in self.index.outputs or name in self.index.captured:
            return False
        narrow = (node for node in self.index.readers.get(name, []) if node.op_type in _NARROW)
        return any(not self._too_wide(node) for node in narrow)

    def _too_wide(self, node: onnx.NodeProto) -> str:
        """Return why float16 is too narrow for a node, or ""; bfloat16 never is."""
        return float16_overflow(self.index, node, self.largest) if self.rest == FP16 else ""

    def _as_type(self, name: str, wanted: int) -> str:
        """Return the tensor in type `wanted`: a converted constant, or one Cast for all readers."""
        if not name or self.types.get(name) == wanted:
            return name
        if (name, wanted) not in self.casts:
            added = f"{name}/{self.rest if wanted == self.narrow else FP32}"
            other = unique_name(added, self.types)
            if name in self.index.initializers:
                self._add_constant(name, other)
            else:
                self._cast(name, other, wanted)
            self.casts[name, wanted] = other
        return self.casts[name, wanted]

    def _cast(self, name: str, other: str, wanted: int) -> None:
        self.nodes.append(helper.make_node("Cast", [name], [other], f"{other}/Cast", to=wanted))
        self.types[other] = wanted

    def _add_constant(self, name: str, other: str) -> None:
        kind = helper.tensor_dtype_to_np_dtype(self.narrow)
        values = numpy_helper.to_array(self.index.initializers[name]).astype(kind)
        self.model.graph.initializer.append(numpy_helper.from_array(values, other))
        self.types[other] = self.narrow


def _typed_inputs(node: onnx.NodeProto) -> list[int]:
    """Return the indices of the inputs that have the type in which the node computes."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in _NARROW:
        return [index for index, name in enumerate(node.input) if name]
    kinds = [each.type_str for each in _schema(node).inputs]
    return _of_type(node.input, kinds, _compute_type(node))


def _typed_outputs(node: onnx.NodeProto) -> list[int]:
    kinds = [each.type_str for each in _schema(node).outputs]
    return _of_type(node.output, kinds, _compute_type(node))


def _of_type(names: Sequence[str], kinds: Sequence[str], wanted: str) -> list[int]:
    last = len(kinds) - 1  # the last one may be variadic
    return [i for i, name in enumerate(names) if name and kinds[min(i, last)] == wanted]


def _compute_type(node: onnx.NodeProto) -> str:
    """Return the schema's type variable of the data; input 0 of a Where is its condition."""
    return _schema(node).inputs[1 if node.op_type == "Where" else 0].type_str


def _schema(node: onnx.NodeProto) -> onnx.defs.OpSchema:
    return defs.get_schema(node.op_type, OPSETS[BF16])


def wide_layers(
    model: onnx.ModelProto, largest: Mapping[str, float], *, rest: str, but: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (node -> its output tensor, node -> reason) for nodes that must run in float32.

    Args:
        model: cleaned float model.
        largest: tensor -> largest |x| observed.
        rest: type of the float part; only "fp16" can be too narrow.
        but: nodes that run in int8.
    """
    if rest != FP16:
        return {}, {}
    graph = Graph(model)
    why = find_float16_overflows(graph, largest, int8_nodes=but)
    nodes = (node for node in graph.nodes if node.name in why and len(node.output) == 1)
    bound = {n.name: str(n.output[0]) for n in nodes if graph.is_float(n.output[0])}
    return bound, {name: why[name] for name in bound}


def write_model(stem: Path, suffix: str, model: onnx.ModelProto | bytes) -> Path:
    """Write a model (deterministically) or bytes to `stem` + `suffix`; return the path."""
    data = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
    return atomic.write_bytes(stem.with_name(stem.name + suffix), data)


REQUANTIZED_NOTE = (
    "TensorRT's are int8 with zero point 0, so ranges are made symmetric around 0, and pairs stand"
    " where TensorRT wants them"
)
ROUNDED_SCALES_NOTE = "In the typed model scales are rounded up to what its narrow type holds."


def has_tensorrt_pairs(trained: QdqCalibration) -> bool:
    """Return whether TensorRT reads all pairs unchanged, except int32 biases."""
    kinds = {grid.dtype for grid in trained.constant_grids}
    symmetric = not any(grid.zero.any() for grid in trained.constant_grids)
    return (
        trained.all_pairs_are("int8", symmetric=True) and kinds <= {"int8", "int32"} and symmetric
    )


def trained_model(trained: QdqCalibration) -> onnx.ModelProto:
    """Return the user's Q/DQ model with int32 biases dequantized; TensorRT needs float biases."""
    model = copy_message(trained.model)
    index = Graph(model)
    biases = {
        node.output[0]: _dequantized(node, index)
        for node in index.nodes
        if node.op_type == DQ and _is_int32(node, index)
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in biases.items()
    )
    rebuild(model.graph, [node for node in index.nodes if node.output[0] not in biases])
    return model


def narrow_trained_model(
    model: onnx.ModelProto, rest: str, largest: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Apply `round_scales` to the user's Q/DQ model, then `narrow_float_part`."""
    rounded = copy_message(model)
    index = Graph(rounded)
    pairs = [node for node in index.nodes if node.op_type in (Q, DQ)]
    scale_tensors = {n.input[1]: index.constants[n.input[1]] for n in pairs}
    for tensor in (one for one in scale_tensors.values() if one.data_type == _FLOAT):
        scales = round_scales(np.asarray(to_array(tensor), np.float32), rest)
        tensor.CopyFrom(numpy_helper.from_array(scales.reshape(tuple(tensor.dims)), tensor.name))
    return narrow_float_part(rounded, rest, largest)


def _is_int32(node: onnx.NodeProto, index: Graph) -> bool:
    stored = index.constants.get(node.input[0])
    return stored is not None and to_array(stored).dtype == np.int32


def _dequantized(node: onnx.NodeProto, index: Graph) -> NDArray[np.float32]:
    """Return the output of a DequantizeLinear of a constant with zero point 0."""
    integers = to_array(index.constants[node.input[0]])
    scale = to_array(index.constants[node.input[1]]).astype(np.float32)
    axis = int(attributes(node).get("axis", 1)) % max(integers.ndim, 1)
    shape = [-1 if dim == axis and scale.size > 1 else 1 for dim in range(integers.ndim)]
    return np.asarray(integers.astype(np.float32) * scale.reshape(shape), np.float32)
