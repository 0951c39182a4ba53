"""Opset lowering: convert a model to an older opset, for old parsers, with the same results.

A node whose operator is the same in both opsets stays. An operator that differs takes its old form
(`deploy.graph.opset_forms`); an operator that the old opset lacks is decomposed into others::

    ReduceMean(x, axes) -> y            ==>   ReduceMean(x), axes as an attribute -> y
    LayerNormalization(x, s, b) -> y    ==>   ReduceMean, Sub, Pow, ... Mul, Add -> y

An operator that ONNX defines as a function (Attention) becomes that function's nodes.

Norms and activations of opset 14 to 24 are decomposed as PyTorch writes them for older opsets,
since parsers match that form when they fuse a norm. The last node keeps the name and the output.

This covers every operator change between opset 13 and 25. Changes not handled here concern types,
which shape inference checks at the end, or attributes, which are dropped if they hold the default.

onnx's version converter does not suffice: downwards it refuses any Split or Pad, handles no
operator without an older version, and leaves a Mish of opset 18 in a model of 17 (onnx 1.23).

Source: the schemas of ONNX, their functions and changelog (docs/Operators.md and Changelog.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import defs, helper, inliner, shape_inference

from deploy.errors import ExportError, first_line
from deploy.graph.edit import (
    copy_message,
    drop_dead,
    infer_types,
    name_nodes,
    replace_nodes,
    set_opset,
)
from deploy.graph.index import all_nodes, attributes, opset_of
from deploy.graph.opset_forms import (
    DOWNGRADES,
    CannotLower,
    OpsetScope,
    drop_new_attributes,
    make_constant_node,
    rewrite_nodes,
)

_FLOAT = 1  # onnx.TensorProto
OLDEST, NEWEST = 13, 25  # opsets whose operator changes are handled here
_DEFAULT = ("", "ai.onnx")
# Operator -> opset that changed the meaning of the same node.
_OTHER_MEANING = {"DFT": 20, "GroupNormalization": 21, "RoiAlign": 16}


class _Decomposition:
    """Builder of the nodes that replace one node, with the opsets and tensors in scope."""

    def __init__(self, node: onnx.NodeProto, places: OpsetScope) -> None:
        if len(node.output) != 1:
            raise CannotLower("it has more than one output")
        self.node, self.places, self.given = node, places, attributes(node)
        self.nodes: list[onnx.NodeProto] = []

    @property
    def source(self) -> str:
        return str(self.node.input[0])

    def add(self, op_type: str, *inputs: str, given: Mapping[str, Any] | None = None) -> str:
        """Append a node; return the name of its output."""
        name = f"{self.node.output[0]}/{op_type}_{len(self.nodes)}"
        node = helper.make_node(op_type, inputs, [name], f"{self.node.name}/{name}", **given or {})
        self.nodes.append(node)
        return name

    def number(self, value: float) -> str:
        """Append a scalar constant of the first input's type; return its name."""
        return self.floats(np.array(value))

    def floats(self, values: NDArray[np.float64]) -> str:
        """Append a constant of the first input's type; return its name."""
        kind = helper.tensor_dtype_to_np_dtype(self.places.dtype(self.source))
        return self.held(values.astype(kind))

    def held(self, values: NDArray[np.generic]) -> str:
        """Append a constant; return its name."""
        name = f"{self.node.output[0]}/constant_{len(self.nodes)}"
        self.nodes.append(make_constant_node(name, values))
        return name

    def mean(self, name: str, axes: Sequence[int]) -> str:
        """Append a mean over axes, which stay with size 1; return its name."""
        if self.places.target_opset >= 18:
            return self.add("ReduceMean", name, self.held(np.array(axes, np.int64)))
        return self.add("ReduceMean", name, given={"axes": axes})

    def done(self) -> list[onnx.NodeProto]:
        """Return the nodes; the last one gets the name and output of the replaced node."""
        self.nodes[-1].name = self.node.name
        self.nodes[-1].output[0] = self.node.output[0]
        return self.nodes


def _hard_swish(made: _Decomposition) -> None:
    gate = made.add("HardSigmoid", made.source, given={"alpha": 1 / 6, "beta": 0.5})
    made.add("Mul", made.source, gate)


def _mish(made: _Decomposition) -> None:
    made.add("Mul", made.source, made.add("Tanh", made.add("Softplus", made.source)))


def _swish(made: _Decomposition) -> None:
    scaled, alpha = made.source, made.given.get("alpha", 1.0)
    if alpha != 1.0:
        scaled = made.add("Mul", made.source, made.number(alpha))
    made.add("Mul", made.source, made.add("Sigmoid", scaled))


def _gelu(made: _Decomposition) -> None:
    x = made.source
    if made.given.get("approximate", b"none") == b"tanh":
        cube = made.add("Mul", made.add("Mul", made.add("Mul", x, x), x), made.number(0.044715))
        inner = made.add("Mul", made.add("Add", x, cube), made.number(math.sqrt(2 / math.pi)))
        curve = made.add("Tanh", inner)
    else:
        curve = made.add("Erf", made.add("Div", x, made.number(math.sqrt(2))))
    made.add("Mul", made.add("Mul", x, made.add("Add", curve, made.number(1))), made.number(0.5))


def _cast_like(made: _Decomposition) -> None:
    if made.given.get("saturate", 1) != 1 or made.given.get("round_mode", b"up") != b"up":
        raise CannotLower("it has saturate or round_mode other than the default")
    made.add("Cast", made.source, given={"to": made.places.dtype(made.node.input[1])})


def _layer_norm(made: _Decomposition) -> None:
    axes = _last_axes(made)
    centred = made.add("Sub", made.source, made.mean(made.source, axes))
    _scaled(made, _over_deviation(made, centred, axes))


def _rms_norm(made: _Decomposition) -> None:
    _scaled(made, _over_deviation(made, made.source, _last_axes(made)))


def _last_axes(made: _Decomposition) -> list[int]:
    """Return the axes that a norm reduces, as negative numbers."""
    _refuse_sums(made)
    axis = made.given.get("axis", -1)
    if axis >= 0:
        axis -= len(made.places.shape(made.source))
    return list(range(axis, 0))


def _over_deviation(made: _Decomposition, centred: str, axes: Sequence[int]) -> str:
    variance = made.mean(made.add("Pow", centred, made.number(2)), axes)
    safe = made.add("Add", variance, made.number(made.given.get("epsilon", 1e-5)))
    return made.add("Div", centred, made.add("Sqrt", safe))


def _scaled(made: _Decomposition, name: str) -> None:
    """Multiply by the scale and add the bias, if there is one."""
    scaled = made.add("Mul", name, made.node.input[1])
    if len(made.node.input) > 2 and made.node.input[2]:
        made.add("Add", scaled, made.node.input[2])


def _group_norm(made: _Decomposition) -> None:
    """Normalize the groups as instances; before opset 21, scale and bias are per group."""
    _refuse_sums(made)
    groups, per_channel = made.given["num_groups"], made.places.source_opset >= 21
    scale, bias = made.node.input[1:3]
    if per_channel:
        scale, bias = made.floats(np.ones(groups)), made.floats(np.zeros(groups))
    grouped = made.add("Reshape", made.source, made.held(np.array([0, groups, -1], np.int64)))
    epsilon = {"epsilon": made.given.get("epsilon", 1e-5)}
    normed = made.add("InstanceNormalization", grouped, scale, bias, given=epsilon)
    ungrouped = made.add("Reshape", normed, made.add("Shape", made.source))
    if per_channel:
        column = np.array([-1, *[1] * (len(made.places.shape(made.source)) - 2)], np.int64)
        shape = made.held(column)
        scaled = made.add("Mul", ungrouped, made.add("Reshape", made.node.input[1], shape))
        made.add("Add", scaled, made.add("Reshape", made.node.input[2], shape))


def _refuse_sums(made: _Decomposition) -> None:
    if made.places.dtype(made.source) != _FLOAT:
        raise CannotLower("its sums are of another type than its input")


# Operator -> function that decomposes it.
_WRITERS: dict[str, Callable[[_Decomposition], None]] = {
    "CastLike": _cast_like,
    "Gelu": _gelu,
    "GroupNormalization": _group_norm,
    "HardSwish": _hard_swish,
    "LayerNormalization": _layer_norm,
    "Mish": _mish,
    "RMSNormalization": _rms_norm,
    "Swish": _swish,
}


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """A model lowered to an older opset.

    Attributes:
        rewritten: operator -> number of its nodes that were changed.
    """

    model: onnx.ModelProto
    rewritten: Mapping[str, int]


def lower_opset(
    model: onnx.ModelProto, *, opset: int, decomposed: Collection[str] = frozenset()
) -> LoweredModel:
    """Convert a model to `opset` or older; returns `model` itself if nothing is to do.

    Tensors keep their names, and the last node of a decomposition keeps the node's name. Nodes of
    custom operators stay as they are.

    Args:
        model: opset 13 to 25.
        opset: 13 or newer.
        decomposed: operators to decompose although the opset has them.

    Raises:
        ExportError: a node cannot be converted; names it and says why.
    """
    own = opset_of(model)
    standard = (node for node in all_nodes(model.graph) if node.domain in _DEFAULT)
    if own <= opset and not any(node.op_type in decomposed for node in standard):
        return LoweredModel(model, {})
    target = min(own, opset)
    if not OLDEST <= target <= own <= NEWEST:
        raise ExportError(
            f"a model is lowered between opset {OLDEST} and {NEWEST}, got {own} for {opset};"
            f" export it with opset {opset}"
        )
    made = infer_types(_write_functions(model, target, decomposed), data_prop=True)
    work = _Lowering(decomposed)
    rewrite_nodes(made.graph, OpsetScope(own, target), work.node)
    del made.graph.value_info[:]
    set_opset(made, target)
    made.ir_version = min(made.ir_version, _ir_version(made))
    _check(made)
    return LoweredModel(made, dict(sorted(work.rewritten.items())))


def _write_functions(
    model: onnx.ModelProto, opset: int, without: Collection[str]
) -> onnx.ModelProto:
    """Return the model with the functions that ONNX has for operators new since `opset`."""
    own = opset_of(model)
    wanted: set[tuple[str, str]] = set()
    for node in all_nodes(model.graph):
        schema = find_schema(node.op_type, own) if is_standard(node) else None
        missing = node.op_type in without or find_schema(node.op_type, opset) is None
        if schema is not None and missing and node.op_type not in _WRITERS:
            wanted.add(("", node.op_type))
    if not wanted:
        return model
    typed = infer_types(model, data_prop=True)
    for tensor in typed.graph.initializer:  # the inliner asks for types of constants too
        value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        typed.graph.value_info.append(value)
    try:
        made = inliner.inline_selected_functions(typed, sorted(wanted), False, True)
    except Exception:  # onnx before 1.20, or a type that is not known; then the node is refused
        return model
    drop_dead(made.graph)
    name_nodes(made.graph)
    return made


class _Lowering:
    """Lowers the nodes of one model and counts the changed ones by operator."""

    def __init__(self, without: Collection[str]) -> None:
        self.without = without
        self.rewritten: Counter[str] = Counter()

    def node(self, node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
        """Return the nodes of a node's older form."""
        if not is_standard(node):
            return [node]
        try:
            made = self._forms(node, places)
        except CannotLower as error:
            raise ExportError(
                f"every node must have a form in opset {places.target_opset} that the parser reads,"
                f" got {node.op_type} '{node.name}', which has none here: {error}; export the model"
                f" with opset {places.target_opset} or with other operators"
            ) from error
        if [one.op_type for one in made] != [node.op_type] or made[-1] != node:
            self.rewritten[node.op_type] += 1
        return made

    def _forms(self, node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
        own = find_schema(node.op_type, places.source_opset)
        old = find_schema(node.op_type, places.target_opset)
        changed = (
            places.target_opset < _OTHER_MEANING.get(node.op_type, OLDEST) <= places.source_opset
        )
        if old is None or node.op_type in self.without or changed:
            if node.op_type not in _WRITERS:
                raise CannotLower("no other operators are known that compute it")
            decomposition = _Decomposition(node, places)
            _WRITERS[node.op_type](decomposition)
            return decomposition.done()
        if own is None or own.since_version == old.since_version:
            return [node]
        form = DOWNGRADES.get(node.op_type)
        made = [copy_message(node)] if form is None else form(copy_message(node), places)
        if made[-1].op_type == node.op_type:
            drop_new_attributes(made[-1], own, old)
        return made


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether ONNX has the operator in any opset."""
    return node.domain in _DEFAULT and bool(defs.has(node.op_type))


def find_schema(op_type: str, opset: int) -> defs.OpSchema | None:
    """Return the schema of an operator in an opset; None if the opset lacks it."""
    try:
        return defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return None


def _ir_version(model: onnx.ModelProto) -> int:
    """Return the lowest IR version that allows the opsets of the model's standard domains."""
    known = [o for o in model.opset_import if (o.domain or "ai.onnx") in ("ai.onnx", "ai.onnx.ml")]
    return int(helper.find_min_ir_version_for(known))


def _check(model: onnx.ModelProto) -> None:
    """Check types and shapes with ONNX, of all nodes not downstream of a custom operator."""
    checked = copy_message(model)
    unknown: set[str] = set()
    known = []
    for node in checked.graph.node:
        if is_standard(node) and not unknown.intersection(node.input):
            known.append(node)
        else:
            unknown.update(node.output)
    replace_nodes(checked.graph, known)
    for at in reversed(range(len(checked.graph.output))):
        if checked.graph.output[at].name in unknown:
            del checked.graph.output[at]
    try:
        shape_inference.infer_shapes(checked, check_type=True, strict_mode=True)
    except Exception as error:  # the C++ binding raises no specific class
        raise ExportError(
            f"every node must have a form in opset {opset_of(model)}, got: {first_line(error)};"
            f" export the model with opset {opset_of(model)}"
        ) from error
