"""What is not int8 in float16 or bfloat16: the Q/DQ model as TensorRT 10 and 11 want it, typed.

A strongly typed TensorRT (the only kind from 11 on) runs every layer in the type that the model
gives it, so that a Q/DQ model whose rest is float32 is slower than one without int8 in float16::

    x (float32) -> Q -> DQ (float16) -> Conv -> Sigmoid -> Mul -> ... -> Cast -> Softmax -> y
                                        '------- float16 --------'      '---- float32 ----'

The operators in `_NARROW` compute in the narrow type, unless what they read or make grows too
large for it, or a constant that keeps values above 0 is 0 in it; all others stay in float32. A
Quantize reads the type that it finds, a Dequantize gives the one that is wanted, so that no Cast
stands beside them; a tensor is cast at most once for all its readers. Inputs and outputs of the
model keep their type. The scales are rounded to what the narrow type holds, before anything is
quantized with them (`storable`).

Source: ONNX operators, QuantizeLinear-19 and DequantizeLinear-19 (type of the scale); TensorRT
developer guide, "Strongly typed networks".

Nodes that must compute in float32 where TensorRT chooses types itself.

With `--fp16` TensorRT runs a layer in float16 wherever that is faster, whatever its values are.
What `deploy.targets.tensorrt.float_types` keeps out of the typed model for what they are, and other
operators for the same reason, are bound to float32 with all that they give.

Models written beside each other, named after the model that they are of.

A Q/DQ model whose pairs are TensorRT's own: int8, zero point 0, kept as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ExportError, first_line
from deploy.files import atomic
from deploy.frontends.checks import opset_of, to_array
from deploy.frontends.lift import why_not_converted
from deploy.frontends.pairs import DQ, Q
from deploy.graph.bounds import too_wide, wide_nodes
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import MOVES
from deploy.targets.tensorrt.trt_options import BF16, FP16, FP32

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.base import Trained


OPSETS = {FP16: 19, BF16: 22}  # the first in which scales, and convolutions, may be of that type
FP8_OPSET = 19  # the first whose pairs may be of fp8
_FLOAT = 1  # onnx.TensorProto
_TYPES = {FP16: 10, BF16: 16}  # onnx.TensorProto
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
# They move values: they compute in the type that they find.
_MOVES = MOVES | {"Gather", "Identity", "Slice", "Split", "Tile"}
# What keeps its sums short, or only moves values. Softmax, norms, exponentials, long reductions and
# all that is not known here stay in float32.
_NARROW = _MOVES | frozenset(
    (
        "Abs", "Add", "AveragePool", "Clip", "Concat", "Conv", "ConvTranspose", "DepthToSpace",
        "Div", "Elu", "Erf", "Expand", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
        "HardSigmoid", "HardSwish", "LeakyRelu", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg",
        "PRelu", "Pad", "Relu", "Resize", "Sigmoid", "SpaceToDepth", "Sub", "Tanh", "Where",
    )
)  # fmt: skip


def storable(scales: NDArray[np.float32], rest: str) -> NDArray[np.float32]:
    """Positive scales rounded up to what the narrow type holds: no value is clipped for it."""
    if rest == FP32:
        return scales
    wide = np.ascontiguousarray(scales, np.float32)
    if rest == BF16:  # the upper half of float32
        bits = wide.view(np.uint32) + np.uint32(0xFFFF)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):  # past the end of float16 it is inf
        near = wide.astype(np.float16)
    above = np.nextafter(near, np.float16(np.inf))
    return np.where(near < wide, above, near).astype(np.float32)


def typed(
    quantized: onnx.ModelProto, rest: str, largest: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The Q/DQ model with its rest in a narrow type; the one that is given stays as it is.

    Args:
        quantized: float32 Q/DQ model whose scales are `storable`.
        rest: "fp16" or "bf16".
        largest: tensor of the float model -> largest |x| that was seen.

    Returns:
        The model, and node -> why it stays in float32, of those that could be narrow.

    Raises:
        ExportError: it cannot be lifted to the opset, or the types of its tensors are not known.
    """
    lifted = _lifted(quantized, OPSETS[rest])
    work = _Typing(lifted, rest, largest)
    rebuild(lifted.graph, work.run())
    for value in lifted.graph.output:  # those of the model, whatever was inferred meanwhile
        value.CopyFrom(next(v for v in quantized.graph.output if v.name == value.name))
    return lifted, work.kept


def at_opset(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    """The model where it is of this opset or a newer one, else a copy that is.

    Raises:
        ExportError: it cannot be brought there.
    """
    from onnx import version_converter

    opset = opset_of(model)
    if opset >= wanted:
        return model
    reason = why_not_converted(model)
    if reason:
        raise _unliftable(opset, wanted, reason)
    try:
        lifted: onnx.ModelProto = version_converter.convert_version(model, wanted)
    except Exception as error:  # C++ behind a binding: no error class of its own
        raise _unliftable(opset, wanted, f"onnx says: {first_line(error)}") from error
    return lifted


def _lifted(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    """A copy at this opset or a newer one, the types of its tensors in it."""
    model = at_opset(model, wanted)
    try:
        lifted = _inferred(model)
    except Exception:  # C++ behind a binding: no error class of its own
        try:  # runtimes go by the nodes, whatever shape the file says an output has
            lifted = _inferred(_without_output_shapes(model))
        except Exception as error:
            said = f"onnx says: {first_line(error)}"
            raise _unliftable(opset_of(model), wanted, said) from error
    lifted.ir_version = max(lifted.ir_version, 9 if wanted < 21 else 10)
    return lifted


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnx import shape_inference

    return shape_inference.infer_shapes(model, strict_mode=True)


def _without_output_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    bare = copied(model)
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    return bare


def _unliftable(opset: int, wanted: int, reason: str) -> ExportError:
    return ExportError(
        f"a typed model must be of opset {wanted} with all types known, got opset {opset} that"
        f" cannot be brought there ({reason}); export the model with opset {wanted} or newer"
    )


@dataclass
class _Typing:
    """The model being typed, its nodes in their order."""

    model: onnx.ModelProto
    rest: str
    largest: Mapping[str, float]
    kept: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = Graph(self.model)
        self.narrow = _TYPES[self.rest]
        self.types = dict(self.index.dtypes)  # tensor -> element type that it has now
        self.types |= {t.name: t.data_type for t in self.model.graph.initializer}
        self.casts: dict[tuple[str, int], str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def run(self) -> list[onnx.NodeProto]:
        """The nodes, with the casts between them."""
        unknown = next((n for n in self.index.producer if not self.types.get(n)), None)
        if unknown is not None:
            raise ExportError(
                f"a typed model must know the types of its tensors, got none of {unknown!r};"
                " build with --rest fp32"
            )
        for node in self.index.nodes:
            self._type(node)
        return self.nodes

    def _type(self, node: onnx.NodeProto) -> None:
        if node.op_type in _PAIR:
            self._pair(node)
            return
        wide = self._stays(node)
        for position in _typed_inputs(node):
            name = node.input[position]
            if self.types.get(name) in (_FLOAT, self.narrow):
                node.input[position] = self._as(name, _FLOAT if wide else self.narrow)
        made = [node.output[at] for at in _typed_outputs(node)] if not wide else []
        self.nodes.append(node)
        for name in made:
            if self.types[name] == _FLOAT:
                self._made_narrow(node, name)

    def _made_narrow(self, node: onnx.NodeProto, name: str) -> None:
        """Note that a tensor is narrow; an output of the model is cast back under its name."""
        if name not in self.index.outputs:
            self.types[name] = self.narrow
            return
        inner = f"{name}/{self.rest}"
        node.output[list(node.output).index(name)] = inner
        self.types[inner] = self.narrow
        self.casts[name, self.narrow] = inner
        self._cast(inner, name, _FLOAT)

    def _stays(self, node: onnx.NodeProto) -> bool:
        """Whether a node computes in float32; of those that could do otherwise it is said why."""
        if node.domain not in ("", "ai.onnx") or node.op_type not in _NARROW:
            return True
        main = node.input[0] if node.op_type != "Where" else node.input[1]
        if self.types.get(main) not in (_FLOAT, self.narrow):
            return True  # whole numbers
        if any(name in self.index.captured for name in node.output):
            self.kept[node.name] = "a subgraph reads it"
            return True
        if node.op_type in _MOVES and main not in self.index.initializers:
            return bool(self.types[main] == _FLOAT)
        large = self._too_wide(node)
        if large:
            self.kept[node.name] = large
        return bool(large)

    def _pair(self, node: onnx.NodeProto) -> None:
        """Give the scale the type of what is read, or of what is wanted."""
        reads = node.op_type == "QuantizeLinear"
        narrow = not reads and self._wanted_narrow(node.output[0])
        wish = self.types[node.input[0]] if reads else (self.narrow if narrow else _FLOAT)
        node.input[1] = self._as(node.input[1], wish)
        self.nodes.append(node)
        if not reads:
            self.types[node.output[0]] = wish

    def _wanted_narrow(self, name: str) -> bool:
        """Whether some reader may compute on it in the narrow type."""
        if name in self.index.outputs or name in self.index.captured:
            return False
        narrow = (node for node in self.index.readers.get(name, []) if node.op_type in _NARROW)
        return any(not self._too_wide(node) for node in narrow)

    def _too_wide(self, node: onnx.NodeProto) -> str:
        """Why float16 is too narrow for a node; bfloat16 is for none."""
        return too_wide(self.index, node, self.largest) if self.rest == FP16 else ""

    def _as(self, name: str, wanted: int) -> str:
        """The tensor in the type that is wanted: a constant of its own, or one Cast for all."""
        if not name or self.types.get(name) == wanted:
            return name
        if (name, wanted) not in self.casts:
            other = f"{name}/{self.rest if wanted == self.narrow else FP32}"
            if name in self.index.initializers:
                self._constant(name, other)
            else:
                self._cast(name, other, wanted)
            self.casts[name, wanted] = other
        return self.casts[name, wanted]

    def _cast(self, name: str, other: str, wanted: int) -> None:
        from onnx import helper

        self.nodes.append(helper.make_node("Cast", [name], [other], f"{other}/Cast", to=wanted))
        self.types[other] = wanted

    def _constant(self, name: str, other: str) -> None:
        from onnx import helper, numpy_helper

        kind = helper.tensor_dtype_to_np_dtype(self.narrow)
        values = _array(self.index.initializers[name]).astype(kind)
        self.model.graph.initializer.append(numpy_helper.from_array(values, other))
        self.types[other] = self.narrow


def _typed_inputs(node: onnx.NodeProto) -> list[int]:
    """Positions of the inputs whose type is the one that the node computes in."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in _NARROW:
        return [at for at, name in enumerate(node.input) if name]
    formal = _formal(node)
    return _of_type(node.input, [each.type_str for each in formal.inputs], _main(node))


def _typed_outputs(node: onnx.NodeProto) -> list[int]:
    """The same of the outputs."""
    return _of_type(node.output, [each.type_str for each in _formal(node).outputs], _main(node))


def _of_type(names: Sequence[str], kinds: Sequence[str], main: str) -> list[int]:
    last = len(kinds) - 1  # which may be repeated
    return [at for at, name in enumerate(names) if name and kinds[min(at, last)] == main]


def _main(node: onnx.NodeProto) -> str:
    """The type variable of what is computed; the first input of a Where is its condition."""
    return _formal(node).inputs[1 if node.op_type == "Where" else 0].type_str


def _formal(node: onnx.NodeProto) -> onnx.defs.OpSchema:
    from onnx import defs

    return defs.get_schema(node.op_type, OPSETS[BF16])


def _array(tensor: onnx.TensorProto) -> NDArray[np.generic]:
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor)


def wide_layers(
    model: onnx.ModelProto, largest: Mapping[str, float], *, rest: str, but: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(node -> the tensor that it gives, node -> why it must compute in float32).

    Args:
        model: cleaned float model.
        largest: tensor -> largest |x| that was seen.
        rest: type of what is not int8; only float16 holds too little.
        but: nodes that run in int8.
    """
    if rest != FP16:
        return {}, {}
    graph = Graph(model)
    why = wide_nodes(graph, largest, but=but)
    nodes = (node for node in graph.nodes if node.name in why and len(node.output) == 1)
    bound = {n.name: str(n.output[0]) for n in nodes if graph.is_float(n.output[0])}
    return bound, {name: why[name] for name in bound}


def written(stem: Path, suffix: str, model: onnx.ModelProto | bytes) -> Path:
    """Write a model, or a text, as `stem` + `suffix`; a model always as the same bytes."""
    whole = model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)
    return atomic.write_bytes(stem.with_name(stem.name + suffix), whole)


ANEW = (
    "TensorRT's are int8 with zero point 0: each range is as wide on either side of 0 as its"
    " farther end, and pairs stand where TensorRT wants them"
)
NARROW = "In the typed model scales are rounded up to what its narrow type holds."


def fits(trained: Trained) -> bool:
    """Whether TensorRT reads all pairs as they are, biases in int32 apart."""
    kinds = {grid.dtype for grid in trained.stored}
    plain = not any(grid.zero.any() for grid in trained.stored)
    return trained.only("int8", symmetric=True) and kinds <= {"int8", "int32"} and plain


def own_model(trained: Trained) -> onnx.ModelProto:
    """The Q/DQ model with its biases in float, of which TensorRT reads no integers."""
    model = copied(trained.model)
    index = Graph(model)
    biases = {
        node.output[0]: _product(node, index)
        for node in index.nodes
        if node.op_type == DQ and _int32(node, index)
    }
    from onnx import numpy_helper

    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in biases.items()
    )
    rebuild(model.graph, [node for node in index.nodes if node.output[0] not in biases])
    return model


def own_typed(
    model: onnx.ModelProto, rest: str, largest: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The same model with everything that is not quantized in a narrow type, as `typed` does.

    Raises:
        ExportError: as there.
    """
    from onnx import numpy_helper

    rounded = copied(model)
    index = Graph(rounded)
    pairs = [node for node in index.nodes if node.op_type in (Q, DQ)]
    held = {n.input[1]: index.constants[n.input[1]] for n in pairs}
    for tensor in (one for one in held.values() if one.data_type == _FLOAT):
        scales = storable(np.asarray(to_array(tensor), np.float32), rest)
        tensor.CopyFrom(numpy_helper.from_array(scales.reshape(tuple(tensor.dims)), tensor.name))
    return typed(rounded, rest, largest)


def _int32(node: onnx.NodeProto, index: Graph) -> bool:
    stored = index.constants.get(node.input[0])
    return stored is not None and to_array(stored).dtype == np.int32


def _product(node: onnx.NodeProto, index: Graph) -> NDArray[np.float32]:
    """What a DequantizeLinear gives of constant integers with zero point 0."""
    integers = to_array(index.constants[node.input[0]])
    scale = to_array(index.constants[node.input[1]]).astype(np.float32)
    axis = int(attributes(node).get("axis", 1)) % max(integers.ndim, 1)
    shape = [-1 if place == axis and scale.size > 1 else 1 for place in range(integers.ndim)]
    return np.asarray(integers.astype(np.float32) * scale.reshape(shape), np.float32)
