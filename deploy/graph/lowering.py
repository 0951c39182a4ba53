"""Opset lowering: convert a model to an older opset, for old parsers, with the same results.

A node whose operator is the same in both opsets stays. An operator that differs takes its old form
(`deploy.graph.opset_forms`); an operator that the old opset lacks is decomposed into others::

    ReduceMean(x, axes) -> y            ==>   ReduceMean(x), axes as an attribute -> y
    LayerNormalization(x, s, b) -> y    ==>   ReduceMean, Sub, Pow, ... Mul, Add -> y

An operator that ONNX defines as a function (Attention) becomes that function's nodes.

Norms and activations of opset 14 to 24 are decomposed as PyTorch writes them for older opsets,
since parsers match that form when they fuse a norm. The last node keeps the name and the output.

This covers every operator change between opset 13 and 28. Changes not handled here concern types,
which shape inference checks at the end, or attributes, which are dropped if they hold the default.
An operator that a later opset changed is refused, since its meaning may be another.

onnx's version converter does not suffice: downwards it refuses any Split or Pad, handles no
operator without an older version, and leaves a Mish of opset 18 in a model of 17 (onnx 1.23).

Source: the schemas of ONNX, their functions and changelog (docs/Operators.md and Changelog.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    make_node,
    name_nodes,
    replace_field,
    replace_nodes,
    set_opset,
)
from deploy.graph.index import (
    FLOAT,
    ONNX_DOMAINS,
    Nodes,
    all_nodes,
    attributes,
    describe_node,
    opset_of,
    optional_input,
)
from deploy.graph.opset_forms import (
    OpsetScope,
    change_form,
    find_downgrades,
    make_constant_node,
    rewrite_nodes,
)
from deploy.graph.rewrite import CannotRewrite

OLDEST, NEWEST = 13, 28  # opsets whose operator changes are handled here
# operator -> opset in which the same node computes something else than before
_OPSET_OF_NEW_MEANING = {"DFT": 20, "GroupNormalization": 21, "RoiAlign": 16}


class _NodeBuilder:
    """Builds the nodes that replace one node; knows the opsets and tensors in scope."""

    def __init__(self, node: onnx.NodeProto, scope: OpsetScope) -> None:
        if len(node.output) != 1:
            raise CannotRewrite("it has more than one output")
        self.node = node
        self.scope = scope
        self.attrs = attributes(node)
        self.source = node.input[0]
        self.nodes: Nodes = []

    def add(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """Append a node; return the name of its output."""
        name = f"{self.node.output[0]}/{op_type}_{len(self.nodes)}"
        node = make_node(op_type, inputs, name, f"{self.node.name}/{name}", **attrs)
        self.nodes.append(node)
        return name

    def scalar(self, value: float) -> str:
        """Append a scalar constant of the first input's type; return its name."""
        return self.floats(np.array(value))

    def floats(self, values: NDArray[np.float64]) -> str:
        """Append a constant of the first input's type; return its name."""
        dtype = helper.tensor_dtype_to_np_dtype(self.scope.dtype(self.source))
        return self.constant(values.astype(dtype))

    def integers(self, values: Sequence[int]) -> str:
        """Append a constant of int64, such as a shape; return its name."""
        return self.constant(np.array(values, np.int64))

    def constant(self, values: NDArray[np.generic]) -> str:
        """Append a constant; return its name."""
        name = f"{self.node.output[0]}/constant_{len(self.nodes)}"
        self.nodes.append(make_constant_node(name, values))
        return name

    def mean(self, name: str, axes: Sequence[int]) -> str:
        """Append a mean over axes, which stay with size 1; return its name."""
        if self.scope.target_opset >= 18:
            return self.add("ReduceMean", name, self.integers(axes))
        return self.add("ReduceMean", name, axes=axes)

    def finish(self) -> Nodes:
        """Return the nodes; the last one gets the name and output of the replaced node."""
        self.nodes[-1].name = self.node.name
        self.nodes[-1].output[0] = self.node.output[0]
        return self.nodes


def _write_hard_swish(builder: _NodeBuilder) -> None:
    gate = builder.add("HardSigmoid", builder.source, alpha=1 / 6, beta=0.5)
    builder.add("Mul", builder.source, gate)


def _write_mish(builder: _NodeBuilder) -> None:
    softplus = builder.add("Softplus", builder.source)
    builder.add("Mul", builder.source, builder.add("Tanh", softplus))


def _write_swish(builder: _NodeBuilder) -> None:
    scaled = builder.source
    alpha = builder.attrs.get("alpha", 1.0)
    if alpha != 1.0:
        scaled = builder.add("Mul", builder.source, builder.scalar(alpha))
    builder.add("Mul", builder.source, builder.add("Sigmoid", scaled))


def _write_gelu(builder: _NodeBuilder) -> None:
    """Write x * 0.5 * (1 + erf(x / sqrt 2)), or the approximation by tanh."""
    x = builder.source
    if builder.attrs.get("approximate", b"none") == b"tanh":
        cube = builder.add("Mul", builder.add("Mul", x, x), x)
        cubic_term = builder.add("Mul", cube, builder.scalar(0.044715))
        polynomial = builder.add("Add", x, cubic_term)
        factor = builder.scalar(math.sqrt(2 / math.pi))
        curve = builder.add("Tanh", builder.add("Mul", polynomial, factor))
    else:
        curve = builder.add("Erf", builder.add("Div", x, builder.scalar(math.sqrt(2))))
    gate = builder.add("Add", curve, builder.scalar(1))
    product = builder.add("Mul", x, gate)
    builder.add("Mul", product, builder.scalar(0.5))


def _write_cast_like(builder: _NodeBuilder) -> None:
    attrs = builder.attrs
    if attrs.get("saturate", 1) != 1 or attrs.get("round_mode", b"up") != b"up":
        raise CannotRewrite("it has saturate or round_mode other than the default")
    builder.add("Cast", builder.source, to=builder.scope.dtype(builder.node.input[1]))


def _write_layer_norm(builder: _NodeBuilder) -> None:
    axes = _find_norm_axes(builder)
    centred = builder.add("Sub", builder.source, builder.mean(builder.source, axes))
    _write_scale_and_bias(builder, _divide_by_deviation(builder, centred, axes))


def _write_rms_norm(builder: _NodeBuilder) -> None:
    axes = _find_norm_axes(builder)
    _write_scale_and_bias(builder, _divide_by_deviation(builder, builder.source, axes))


def _find_norm_axes(builder: _NodeBuilder) -> list[int]:
    """Return the axes that a norm reduces, as negative numbers."""
    _refuse_float16_sums(builder)
    axis = builder.attrs.get("axis", -1)
    if axis >= 0:
        axis -= len(builder.scope.shape(builder.source))
    return list(range(axis, 0))


def _divide_by_deviation(builder: _NodeBuilder, centred: str, axes: Sequence[int]) -> str:
    """Divide a tensor by the root of its mean square and epsilon; return the result's name."""
    squares = builder.add("Pow", centred, builder.scalar(2))
    variance = builder.mean(squares, axes)
    epsilon = builder.scalar(builder.attrs.get("epsilon", 1e-5))
    positive_variance = builder.add("Add", variance, epsilon)
    return builder.add("Div", centred, builder.add("Sqrt", positive_variance))


def _write_scale_and_bias(builder: _NodeBuilder, name: str) -> None:
    """Multiply by the scale and add the bias, if there is one."""
    scaled = builder.add("Mul", name, builder.node.input[1])
    bias = optional_input(builder.node, 2)
    if bias:
        builder.add("Add", scaled, bias)


def _write_group_norm(builder: _NodeBuilder) -> None:
    """Write a GroupNormalization as an InstanceNormalization of [N, groups, rest of the values].

    Before opset 21 its scale and bias have a value for each group, and so become those of the
    InstanceNormalization. From opset 21 on they have one for each channel, and are applied
    afterwards, in the shape of the input. The node that is added last makes the output.
    """
    _refuse_float16_sums(builder)
    groups = builder.attrs["num_groups"]
    scale, bias = builder.node.input[1:3]
    group_scale = scale
    group_bias = bias
    has_channel_scales = builder.scope.source_opset >= 21
    if has_channel_scales:
        group_scale = builder.floats(np.ones(groups))
        group_bias = builder.floats(np.zeros(groups))

    grouped = builder.add("Reshape", builder.source, builder.integers([0, groups, -1]))
    epsilon = builder.attrs.get("epsilon", 1e-5)
    normed = builder.add("InstanceNormalization", grouped, group_scale, group_bias, epsilon=epsilon)
    ungrouped = builder.add("Reshape", normed, builder.add("Shape", builder.source))
    if has_channel_scales:
        rank = len(builder.scope.shape(builder.source))
        channel_shape = builder.integers([-1] + [1] * (rank - 2))  # [C, 1, 1]
        scaled = builder.add("Mul", ungrouped, builder.add("Reshape", scale, channel_shape))
        builder.add("Add", scaled, builder.add("Reshape", bias, channel_shape))


def _refuse_float16_sums(builder: _NodeBuilder) -> None:
    """Refuse a norm that is not float32: it sums in float32, older operators in their own type."""
    if builder.scope.dtype(builder.source) != FLOAT:
        raise CannotRewrite("its sums are of another type than its input")


# Operator -> function that writes it with older operators. Each first raises `CannotRewrite` where
# the result would differ.
_WRITERS: dict[str, Callable[[_NodeBuilder], None]] = {
    "CastLike": _write_cast_like,
    "Gelu": _write_gelu,
    "GroupNormalization": _write_group_norm,
    "HardSwish": _write_hard_swish,
    "LayerNormalization": _write_layer_norm,
    "Mish": _write_mish,
    "RMSNormalization": _write_rms_norm,
    "Swish": _write_swish,
}


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """A model lowered to an older opset.

    Attributes:
        model: the lowered model, or the original if there was nothing to do.
        rewritten: operator -> number of its nodes that were changed.
    """

    model: onnx.ModelProto
    rewritten: Mapping[str, int]


def lower_opset(
    model: onnx.ModelProto, *, opset: int, to_decompose: Collection[str] = frozenset()
) -> LoweredModel:
    """Convert a model to `opset` or older; returns `model` itself if nothing is to do.

    Tensors keep their names, and the last node of a decomposition keeps the node's name. Nodes of
    custom operators stay as they are.

    Args:
        model: opset 13 or newer.
        opset: 13 or newer.
        to_decompose: operators to decompose although the opset has them.

    Raises:
        ExportError: a node cannot be converted; names it and says why.
    """
    source_opset = opset_of(model)
    op_types = {node.op_type for node in all_nodes(model.graph) if node.domain in ONNX_DOMAINS}
    if source_opset <= opset and op_types.isdisjoint(to_decompose):
        return LoweredModel(model, {})
    target_opset = min(source_opset, opset)
    if target_opset < OLDEST:
        raise ExportError(
            f"a model is lowered to opset {OLDEST} or newer, got {target_opset}; export it with"
            f" opset {OLDEST}"
        )

    lowered = infer_types(_expand_functions(model, target_opset, to_decompose), data_prop=True)
    rewritten: Counter[str] = Counter()
    lower_node = partial(_lower_node, to_decompose=to_decompose, rewritten=rewritten)
    rewrite_nodes(lowered.graph, OpsetScope(source_opset, target_opset), lower_node)
    del lowered.graph.value_info[:]  # the types that were needed to rewrite the nodes
    set_opset(lowered, target_opset)
    lowest_ir_version = helper.find_min_ir_version_for(lowered.opset_import, ignore_unknown=True)
    lowered.ir_version = min(lowered.ir_version, lowest_ir_version)
    _check_types(lowered)
    return LoweredModel(lowered, dict(sorted(rewritten.items())))


def _expand_functions(
    model: onnx.ModelProto, opset: int, to_decompose: Collection[str]
) -> onnx.ModelProto:
    """Return the model with ONNX's own definitions in place of operators that `opset` lacks.

    ONNX defines some operators, such as Attention, as a function: nodes of older operators.
    Operators in `_WRITERS` stay: they are written later, node by node.

    Args:
        model: the model; it stays as it is.
        opset: the opset to lower it to.
        to_decompose: operators to expand although the opset has them.
    """
    op_types = {node.op_type for node in all_nodes(model.graph) if is_standard(node)}
    unwanted_operators = []  # (domain, operator)
    for op_type in sorted(op_types.difference(_WRITERS)):
        is_unwanted = op_type in to_decompose or find_schema(op_type, opset) is None
        is_known = find_schema(op_type, opset_of(model)) is not None
        if is_unwanted and is_known:
            unwanted_operators.append(("", op_type))
    if not unwanted_operators:
        return model

    typed = infer_types(model, data_prop=True)
    for tensor in typed.graph.initializer:  # the inliner looks up the types of constants here
        value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        typed.graph.value_info.append(value)
    try:
        inlined = inliner.inline_selected_functions(
            typed, unwanted_operators, exclude=False, inline_schema_functions=True
        )
    except Exception:  # onnx before 1.20, or a type that is not known
        return model  # then `_lower_node` refuses these operators
    drop_dead(inlined.graph)
    name_nodes(inlined.graph)
    return inlined


def _lower_node(
    node: onnx.NodeProto,
    scope: OpsetScope,
    *,
    to_decompose: Collection[str],
    rewritten: Counter[str],
) -> Nodes:
    """Return the nodes that compute a node with operators of the older opset.

    Args:
        node: the node; it stays as it is.
        scope: the opsets, and the tensors around the node.
        to_decompose: operators to decompose although the opset has them.
        rewritten: operator -> number of its nodes that need others, or another form; counted here.

    Raises:
        ExportError: it has no form there, so that a reader of the file, such as TensorRT's
            parser, would refuse it.
    """
    if not is_standard(node):
        return [node]
    opset = scope.target_opset
    try:
        nodes = _write_older_form(node, scope, to_decompose)
    except CannotRewrite as error:
        raise ExportError(
            f"every node must have a form in opset {opset} that the parser reads, got"
            f" {describe_node(node)}, which has none here: {error}; export the model"
            f" with opset {opset} or with other operators"
        ) from error
    if len(nodes) > 1 or nodes[0] != node:
        rewritten[node.op_type] += 1
    return nodes


def _write_older_form(
    node: onnx.NodeProto, scope: OpsetScope, to_decompose: Collection[str]
) -> Nodes:
    """Return the nodes that compute a node in the older opset; the node itself if it may stay.

    A function of `_WRITERS` writes it with other operators in three cases: the older opset lacks
    its operator, it is to be decomposed, or the operator computed something else there. In all
    other cases the node keeps its operator and takes the form of the older opset.

    Raises:
        CannotRewrite: it has no older form that is known here.
    """
    op_type = node.op_type
    schema = find_schema(op_type, scope.source_opset)
    old_schema = find_schema(op_type, scope.target_opset)
    changed_opset = _OPSET_OF_NEW_MEANING.get(op_type)
    has_other_meaning = (
        changed_opset is not None and scope.target_opset < changed_opset <= scope.source_opset
    )
    if old_schema is None or op_type in to_decompose or has_other_meaning:
        if op_type not in _WRITERS:
            raise CannotRewrite("no other operators are known that compute it")
        builder = _NodeBuilder(node, scope)
        _WRITERS[op_type](builder)
        return builder.finish()

    # an operator that the newer opset dropped, or one with the same form in both, stays
    if schema is None or schema.since_version == old_schema.since_version:
        return [node]
    if schema.since_version > NEWEST:  # this module does not know how that opset changed it
        raise CannotRewrite(f"opset {schema.since_version} changed it")
    rules = find_downgrades(node, scope.source_opset, scope.target_opset)
    nodes = change_form(copy_message(node), rules, scope)
    if nodes[-1].op_type == op_type:  # else `change_form` made an Identity of it
        _drop_new_attributes(nodes[-1], schema, old_schema)
    return nodes


def _drop_new_attributes(
    node: onnx.NodeProto, schema: defs.OpSchema, old_schema: defs.OpSchema
) -> None:
    """Remove the attributes of a node that an older opset does not have.

    Raises:
        CannotRewrite: one of them is not the default, or the node has more inputs or outputs.
    """
    if len(node.input) > old_schema.max_input or len(node.output) > old_schema.max_output:
        raise CannotRewrite("it has more inputs or outputs than its older form")
    for attribute in list(node.attribute):
        if attribute.name in old_schema.attributes:
            continue
        if not _is_default(attribute, schema):
            raise CannotRewrite(f"it has the attribute {attribute.name}")
        node.attribute.remove(attribute)


def _is_default(attribute: onnx.AttributeProto, schema: defs.OpSchema) -> bool:
    """Whether an attribute has the value that it has if a node leaves it out."""
    value = helper.get_attribute_value(attribute)
    if attribute.name == "dilations":  # ones, as many as there are axes; no schema states them
        return set(value) <= {1}
    default = schema.attributes[attribute.name].default_value
    return default.type == attribute.type and value == helper.get_attribute_value(default)


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether ONNX has the operator in any opset."""
    return node.domain in ONNX_DOMAINS and defs.has(node.op_type)


def find_schema(op_type: str, opset: int) -> defs.OpSchema | None:
    """Return the schema of an operator in an opset; None if the opset lacks it."""
    try:
        return defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return None


def type_variables(slots: Sequence[defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the schema's type (variable) of each of `count` tensors; the last slot may repeat."""
    variables = [slot.type_str for slot in slots]
    return [variables[min(position, len(variables) - 1)] for position in range(count)]


def _check_types(model: onnx.ModelProto) -> None:
    """Check with ONNX the types and shapes of all nodes that do not depend on a custom operator."""
    checked = copy_message(model)
    custom_results: set[str] = set()
    standard_nodes = []
    for node in checked.graph.node:
        if is_standard(node) and custom_results.isdisjoint(node.input):
            standard_nodes.append(node)
        else:
            custom_results.update(node.output)
    replace_nodes(checked.graph, standard_nodes)
    outputs = [value for value in checked.graph.output if value.name not in custom_results]
    replace_field(checked.graph.output, outputs)
    opset = opset_of(model)
    try:
        shape_inference.infer_shapes(checked, check_type=True, strict_mode=True)
    except Exception as error:  # the C++ binding raises no specific class
        raise ExportError(
            f"every node must have a form in opset {opset}, got: {first_line(error)};"
            f" export the model with opset {opset}"
        ) from error
