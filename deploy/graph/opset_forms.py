"""Forms of single ONNX operators in older opsets (`DOWNGRADES`) and in newer ones (`UPGRADES`).

Newer forms take as an input what was an attribute (the axes of a Reduce), allow unequal slices
(Split), take pads or scales of some axes only (Pad, Resize) or renamed values (GridSample).

Each row of the two tables is a rewrite rule (`deploy.graph.rewrite`) for one opset that changed an
operator. A node whose check fails has no form on the other side of that opset.

`COMPLETIONS` write operators of some axes over all axes, in any opset.

`UPGRADES` covers every operator whose form or meaning changed between opset 7 and 22. ONNX's own
converter (1.23) leaves out where an Upsample or a Resize of opset 10 takes its values (onnx#8480),
computes another Hardmax, and refuses operators that ONNX lacks, such as TensorRT's plugins.

Source: the schemas of ONNX, and their changelog (docs/Changelog.md of onnx).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from deploy.graph.edit import claim_name, drop_attribute, make_node, replace_nodes
from deploy.graph.index import (
    FLOAT,
    Nodes,
    Shape,
    attributes,
    by_name,
    constant_nodes,
    declared_values,
    dims,
    optional_input,
    subgraphs,
)
from deploy.graph.rewrite import (
    CannotRewrite,
    RewriteRule,
    check_nothing,
    is_op,
    keep_node,
)


@dataclass(frozen=True, slots=True)
class OpsetScope:
    """Opsets and the tensors in scope of a graph: its own and those of the enclosing graphs.

    Attributes:
        source_opset: opset of the nodes.
        target_opset: opset to convert them to.
        tensor_names: names of tensors that exist, and those of new ones.
        constants: name -> tensor.
        dtypes: tensor -> ONNX element type.
        shapes: tensor -> its sizes; None for unknown rank.
    """

    source_opset: int
    target_opset: int
    tensor_names: set[str] = field(default_factory=set)
    constants: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Shape | None] = field(default_factory=dict)

    def enter(self, graph: onnx.GraphProto) -> OpsetScope:
        """Return the scope inside a graph: this one and the graph's own tensors."""
        constants = by_name(graph.initializer) | constant_nodes(graph.node)
        dtypes = dict(self.dtypes)
        shapes = dict(self.shapes)
        for value in declared_values(graph):
            dtypes[value.name] = value.type.tensor_type.elem_type
            shapes[value.name] = dims(value)
        for name, tensor in constants.items():
            dtypes[name] = tensor.data_type
            shapes[name] = tuple(tensor.dims)
        return replace(
            self, constants={**self.constants, **constants}, dtypes=dtypes, shapes=shapes
        )

    def new_name(self, preferred: str) -> str:
        """Return a name for a new tensor that no other tensor has."""
        return claim_name(preferred, self.tensor_names)

    def values(self, name: str, plural: str) -> NDArray[Any]:
        """Return the values of a constant, which the message calls `plural`.

        Raises:
            CannotRewrite: the tensor is not constant.
        """
        if name not in self.constants:
            raise CannotRewrite(f"its {plural} are not constant")
        return numpy_helper.to_array(self.constants[name])

    def dtype(self, name: str) -> int:
        """Return the element type of a tensor.

        Raises:
            CannotRewrite: the type is unknown.
        """
        dtype = self.dtypes.get(name, 0)
        if not dtype:
            raise CannotRewrite(f"the type of {name} is not known")
        return dtype

    def shape(self, name: str) -> Shape:
        """Return the sizes of a tensor.

        Raises:
            CannotRewrite: the rank is unknown.
        """
        shape = self.shapes.get(name)
        if shape is None:
            raise CannotRewrite(f"the shape of {name} is not known")
        return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsetChange(RewriteRule[OpsetScope]):
    """A rule for nodes that cross an opset which changed their operator.

    Attributes:
        opset: the first opset with the newer form.
    """

    opset: int


Check = Callable[[onnx.NodeProto, OpsetScope], str]
Rewrite = Callable[[onnx.NodeProto, OpsetScope], Nodes]


def rewrite_nodes(graph: onnx.GraphProto, outer_scope: OpsetScope, rewrite: Rewrite) -> None:
    """Replace each node of a graph and of its subgraphs by the nodes that `rewrite` returns."""
    scope = outer_scope.enter(graph)
    nodes: Nodes = []
    for node in graph.node:
        for body in subgraphs(node):
            rewrite_nodes(body, scope, rewrite)
        nodes += rewrite(node, scope)
    replace_nodes(graph, nodes)


def find_downgrades(node: onnx.NodeProto, source_opset: int, opset: int) -> list[OpsetChange]:
    """Return the rules that bring a node from one opset to an older one, in order."""
    return [row for row in DOWNGRADES if opset < row.opset <= source_opset and row.pattern(node)]


def find_upgrades(node: onnx.NodeProto, source_opset: int, opset: int) -> list[OpsetChange]:
    """Return the rules that bring a node from one opset to a newer one, in order."""
    return [row for row in UPGRADES if source_opset < row.opset <= opset and row.pattern(node)]


def change_form(node: onnx.NodeProto, changes: Sequence[OpsetChange], scope: OpsetScope) -> Nodes:
    """Return the nodes that compute a node after some changes of opset; the node may change.

    Raises:
        CannotRewrite: it has no such form.
    """
    nodes = [node]
    for change in changes:
        last_node = nodes.pop()  # the node itself, after those that make its inputs
        nodes += change.replace(last_node, scope)
    return nodes


def make_constant_node(name: str, values: NDArray[Any]) -> onnx.NodeProto:
    """Return a Constant node whose output `name` holds `values`."""
    tensor = numpy_helper.from_array(values, name)
    return make_node("Constant", [], name, f"{name}_Constant", value=tensor)


def _drop_attribute(node: onnx.NodeProto, _: OpsetScope, *, name: str) -> Nodes:
    drop_attribute(node, name)
    return [node]


def _set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    node.attribute.append(helper.make_attribute(name, value))


def _rename_modes(node: onnx.NodeProto, _: OpsetScope, *, names: Mapping[bytes, bytes]) -> Nodes:
    """GridSample: before opset 20 its modes had other names."""
    for attribute in node.attribute:
        if attribute.name == "mode":
            attribute.s = names.get(attribute.s, attribute.s)
    return [node]


def _refuse(reason: str) -> Check:
    """Return a check that fails for every node."""
    return lambda node, scope: reason


def _refuse_values(name: str, *values: object, reason: str) -> Check:
    """Return a check that fails for nodes whose attribute has one of these values."""
    return lambda node, scope: reason if attributes(node).get(name) in values else ""


# Older forms


def _inputs_to_axes(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Write the axes of a Reduce, which are an input from opset 18 on, as an attribute.

    A Reduce without axes reduces all of them; with `noop_with_empty_axes` it becomes an Identity.
    """
    axes = []
    if optional_input(node, 1):
        axes = scope.values(node.input[1], "axes").tolist()
    if not axes and attributes(node).get("noop_with_empty_axes", 0):
        return [helper.make_node("Identity", node.input[:1], node.output, node.name)]
    del node.input[1:]
    drop_attribute(node, "noop_with_empty_axes")
    if axes:
        _set_attribute(node, "axes", axes)
    return [node]


def _add_split_sizes(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Rewrite a Split of opset 18, with `num_outputs`, for opset 17: give the sizes of its slices.

    Equal slices need no sizes: they are the default of opset 17.
    """
    attrs = attributes(node)
    slice_count = attrs.get("num_outputs")
    if slice_count is None:  # it has sizes already
        return [node]
    size = scope.shape(node.input[0])[attrs.get("axis", 0)]
    if not isinstance(size, int):
        raise CannotRewrite(f"the size of {node.input[0]} along its axis is not known")
    drop_attribute(node, "num_outputs")
    if size % slice_count == 0:
        return [node]
    slice_size = -(-size // slice_count)  # rounded up; the last slice has what remains
    last_size = size - slice_size * (slice_count - 1)
    sizes = [slice_size] * (slice_count - 1) + [last_size]
    sizes_name = f"{node.output[0]}/split"
    node.input.append(sizes_name)
    return [make_constant_node(sizes_name, np.array(sizes, np.int64)), node]


def _complete_pad(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Write a Pad with an input of axes, from opset 18 on, with pads of all axes instead."""
    if not optional_input(node, 3):
        return [node]
    # pads before all axes, then those after them
    no_pads = np.zeros(2 * len(scope.shape(node.input[0])), np.int64)
    axes = scope.values(node.input[3], "axes").tolist()
    nodes = _complete_input(node, 1, axes, scope, no_pads)
    del node.input[3:]
    return [*nodes, node]


def _complete_crop(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """CenterCropPad: sizes of all axes in place of those of some."""
    axes = attributes(node).get("axes")
    if axes is None:
        return [node]
    nodes = _complete_input(node, 1, axes, scope)
    drop_attribute(node, "axes")
    return [*nodes, node]


def _complete_resize(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Write a Resize without its attributes `axes` and `keep_aspect_ratio_policy`.

    `axes` names the axes for which the node has scales, sizes and a region; then these are extended
    to all axes. The policy may keep the ratio of the sides: then the sizes are only limits of the
    output's sizes, and the node gets scales in place of sizes. A node that has no `axes` and keeps
    no ratio stays as it is.

    Raises:
        CannotRewrite: the rank is unknown; a region is computed; or the policy needs a size of the
            input that is unknown, or sizes that no scale gives.
    """
    attrs = attributes(node)
    has_axes = "axes" in attrs
    has_sizes = optional_input(node, 3) != ""
    keeps_ratio = has_sizes and attrs.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
    if not has_axes and not keeps_ratio:
        return [node]

    shape = scope.shape(node.input[0])
    rank = len(shape)
    axes = attrs.get("axes", range(rank))
    nodes: Nodes = []
    # the inputs of a Resize: 0 the data, 1 the region, and either 2 the scales or 3 the sizes
    if keeps_ratio:
        scales_name = scope.new_name(f"{node.output[0]}_ratio")
        scales = _ratio_scales(node, scope, [shape[axis % rank] for axis in axes])
        nodes.append(make_constant_node(scales_name, scales))
        del node.input[2:]
        node.input.append(scales_name)

    # the axes that are not among `axes` keep their size, by a scale of 1 if scales are given
    if len(node.input) > 3:
        nodes += _complete_input(node, 3, axes, scope)
    else:
        nodes += _complete_input(node, 2, axes, scope, np.ones(rank, np.float32))
    if node.input[1]:
        scope.values(node.input[1], "region")  # raises CannotRewrite if the region is computed
        # a region is the starts of all axes, then their ends; another axis goes from 0 to 1
        full_region = np.repeat([0, 1], rank).astype(np.float32)
        nodes += _complete_input(node, 1, axes, scope, full_region)
    drop_attribute(node, "axes")
    drop_attribute(node, "keep_aspect_ratio_policy")
    return [*nodes, node]


def _ratio_scales(
    node: onnx.NodeProto, scope: OpsetScope, shape: list[int | str | None]
) -> NDArray[np.float32]:
    """Return the scales of a Resize by sizes that keeps the ratio of the sides."""
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise CannotRewrite(f"the sizes of {node.input[0]} are not known")
    sides = np.array(shape, np.float32)
    requested_sizes = scope.values(node.input[3], "sizes")
    scales = requested_sizes.astype(np.float32) / sides
    covers_sizes = attributes(node)["keep_aspect_ratio_policy"] == b"not_smaller"
    scale = scales.max() if covers_sizes else scales.min()
    # the sizes of the output are rounded if sizes are given, and cut off if scales are
    if (np.floor(sides * scale) != np.round(sides * scale)).any():
        raise CannotRewrite("no scale gives the sizes that keep the ratio of its sides")
    return np.full(len(shape), scale)


def _complete_input(
    node: onnx.NodeProto,
    index: int,
    axes: Sequence[int],
    scope: OpsetScope,
    defaults: NDArray[Any] | None = None,
) -> Nodes:
    """Extend an input, such as the scales of a Resize, from the values of some axes to all axes.

    If all values are known, the new input is one constant. Else nodes compute it: for a tensor of
    rank 4 with sizes of the axes 2 and 3, [*Shape(x), *sizes] gathered at [0, 1, 4, 5].

    Args:
        node: its input is replaced in place.
        index: index of the input, which has a value for each of `axes`.
        axes: the axes; negative ones count from the end.
        scope: the constants, shapes and names around the node.
        defaults: the complete input, with the values that other axes get: one for each axis, or
            two, all starts before all ends. None for the sizes of the node's first input.

    Returns:
        The nodes that make the new input, to stand before `node`.

    Raises:
        CannotRewrite: the rank is unknown.
        IndexError: the node's first input lacks one of the axes.
    """
    source = node.input[0]
    sizes = scope.shape(source)
    partial_name = node.input[index]
    complete_name = scope.new_name(f"{node.output[0]}_axes")
    node.input[index] = complete_name

    complete_values = list(sizes) if defaults is None else defaults.tolist()
    value_count = len(complete_values)
    rank = len(sizes)
    # where the values of the partial input go in the complete one, which has one run of values for
    # all axes, or two runs (all starts, all ends). In each run an axis has the position of its
    # number, counted from 0
    run_starts = range(0, value_count, rank or 1)
    axis_numbers = [range(rank)[axis] for axis in axes]
    positions = [run_start + number for run_start in run_starts for number in axis_numbers]
    if partial_name in scope.constants:  # its values replace the defaults at these positions
        partial_values = scope.values(partial_name, "values")
        for position, value in zip(positions, partial_values.tolist(), strict=True):
            complete_values[position] = value
        if all(isinstance(value, int | float) for value in complete_values):  # no symbolic size
            constant = np.array(complete_values, partial_values.dtype)
            return [make_constant_node(complete_name, constant)]

    # not all values are known: nodes join the defaults and the partial values, and gather the
    # complete values from both
    defaults_name = scope.new_name(f"{complete_name}_whole")
    joined_name = scope.new_name(f"{complete_name}_both")
    order_name = scope.new_name(f"{complete_name}_order")
    order = np.arange(value_count)
    # in the joined tensor the partial values follow the defaults
    order[positions] = value_count + np.arange(len(positions))
    if defaults is None:
        defaults_node = make_node("Shape", [source], defaults_name, f"{defaults_name}_Shape")
    else:
        defaults_node = make_constant_node(defaults_name, defaults)
    operands = [defaults_name, partial_name]
    return [
        defaults_node,
        make_node("Concat", operands, joined_name, f"{joined_name}_Concat", axis=0),
        make_constant_node(order_name, order),
        make_node("Gather", [joined_name, order_name], complete_name, f"{complete_name}_Gather"),
    ]


def _check_empty_sizes(node: onnx.NodeProto, scope: OpsetScope) -> str:
    """Reshape: a 0 always copies the input's size, so allowzero must not matter."""
    allows_zero = attributes(node).get("allowzero", 0)
    if allows_zero and not scope.values(node.input[1], "sizes").all():
        return "it makes a size of 0"
    return ""


def _check_image(node: onnx.NodeProto, scope: OpsetScope) -> str:
    """GridSample: before opset 20 of images only."""
    is_image = len(scope.shape(node.input[0])) == 4
    return "" if is_image else f"{node.input[0]} is not an image"


def _check_remainder(node: onnx.NodeProto, scope: OpsetScope) -> str:
    """Mod: before opset 28 the remainder of floats has the sign of the dividend."""
    is_integer = np.issubdtype(
        helper.tensor_dtype_to_np_dtype(scope.dtype(node.input[0])), np.integer
    )
    return "" if is_integer or attributes(node).get("fmod", 0) else "it divides floats by fmod=0"


# Operator of some axes -> what writes a node over all axes, and returns it last. They raise
# `CannotRewrite` without the rank, or without constant axes.
COMPLETIONS: Mapping[str, Rewrite] = {
    "CenterCropPad": _complete_crop,
    "Pad": _complete_pad,
    "Resize": _complete_resize,
}


def _change(
    opset: int, *op_types: str, check: Check = check_nothing, rewrite: Rewrite = keep_node
) -> OpsetChange:
    """Return the rule for operators that an opset changed."""
    return OpsetChange(pattern=is_op(*op_types), opset=opset, check=check, rewrite=rewrite)


_REDUCE_WITH_AXES = (  # ReduceSum changed in opset 13 already
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSumSquare"),
)
_OLD_MODES = {b"linear": b"bilinear", b"cubic": b"bicubic"}
_NEW_MODES = {b"bilinear": b"linear", b"bicubic": b"cubic"}

# By operator, the newest opset first; a rewrite returns the node itself last
DOWNGRADES = (
    _change(28, "Mod", check=_check_remainder),
    _change(20, "GridSample", check=_check_image, rewrite=partial(_rename_modes, names=_OLD_MODES)),
    _change(19, "Pad", check=_refuse_values("mode", b"wrap", reason="it wraps around")),
    _change(18, "Pad", rewrite=_complete_pad),
    _change(18, *_REDUCE_WITH_AXES, rewrite=_inputs_to_axes),
    _change(
        14,
        "Reshape",
        check=_check_empty_sizes,
        rewrite=partial(_drop_attribute, name="allowzero"),
    ),
    _change(
        19,
        "Resize",
        check=_refuse_values(
            "coordinate_transformation_mode",
            b"half_pixel_symmetric",
            reason="it resizes by half_pixel_symmetric",
        ),
    ),
    _change(18, "Resize", rewrite=_complete_resize),
    _change(
        18,
        "ScatterElements",
        "ScatterND",
        check=_refuse_values("reduction", b"max", b"min", reason="its reduction is max or min"),
    ),
    _change(18, "Split", rewrite=_add_split_sizes),
)


# Newer forms


def _attributes_to_inputs(
    node: onnx.NodeProto, scope: OpsetScope, *, names: Sequence[str]
) -> Nodes:
    """Move the attributes `names` to constant inputs: the second input, the third, and so on.

    For an attribute that the node does not have, the input is left out (its name is "").
    """
    attrs = attributes(node)
    nodes: Nodes = []
    del node.input[1:]  # the data stays
    for name in names:
        drop_attribute(node, name)
        if name not in attrs:
            node.input.append("")
            continue
        values = np.array(attrs[name])
        if name == "k":  # TopK reads its number as a list of one element
            values = values.reshape(1)
        if values.dtype.kind == "f":  # limits have the type of the data
            dtype = scope.dtypes.get(node.input[0]) or FLOAT
            values = values.astype(helper.tensor_dtype_to_np_dtype(dtype))
        node.input.append(scope.new_name(f"{node.output[0]}_{name}"))
        nodes.append(make_constant_node(node.input[-1], values))
    while not node.input[-1]:  # inputs left out at the end are not listed
        del node.input[-1]
    return [*nodes, node]


def _upsample_to_resize(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Write an Upsample, or a Resize of opset 10, as a Resize with an attribute for the rounding.

    The rounding decides which input position an output position is read from. The older operators
    do not state it: ONNX's tests of opset 10 and ONNX Runtime round up along an axis that shrinks,
    and down along an axis that grows. The newer one has one rounding for all axes, so a node that
    needs both is refused (`_find_rounding`).
    """
    attrs = attributes(node)
    nodes: Nodes = []
    if "scales" in attrs:  # Upsample-7
        node.input.append(scope.new_name(f"{node.output[0]}_scales"))
        nodes.append(make_constant_node(node.input[1], np.array(attrs["scales"], np.float32)))
        drop_attribute(node, "scales")

    # an Upsample only enlarges; a Resize whose scales are computed is taken to do so too
    rounding = "floor"
    if node.op_type == "Resize" and node.input[1] in scope.constants:
        scales = scope.values(node.input[1], "scales").astype(np.float64)
        rounding = _find_rounding(scales, attrs.get("mode", b"nearest"))
    node.op_type = "Resize"
    node.input.insert(1, "")  # the region, which is left out
    _set_attribute(node, "coordinate_transformation_mode", "asymmetric")
    _set_attribute(node, "nearest_mode", rounding)
    return [*nodes, node]


def _find_rounding(scales: NDArray[np.float64], mode: bytes) -> str:
    """Return the `nearest_mode` of a Resize-10 with these scales."""
    if not (scales > 0).all():
        raise CannotRewrite("a scale is not above 0")
    steps = 1 / scales  # from one output position to the next, in pixels of the input
    shrinking_steps = steps[steps > 1]
    enlarges = (steps < 1).any()
    # positions at whole pixels are the same with both ways to round
    needs_ceil = (shrinking_steps != np.round(shrinking_steps)).any()
    if mode == b"nearest" and enlarges and needs_ceil:
        raise CannotRewrite("it shrinks one axis and enlarges another")
    return "ceil" if shrinking_steps.size and not enlarges else "floor"


def _softmax_over_axis(node: onnx.NodeProto, scope: OpsetScope) -> Nodes:
    """Write a Softmax (LogSoftmax, Hardmax) of before opset 13 in its newer form, over one axis.

    The older form is over `axis` and all later axes, taken as one. If these have size 1, the newer
    form computes the same. Else the input is flattened to a matrix, the newer form runs over its
    rows, and the output gets the shape of the input again.
    """
    axis = attributes(node).get("axis", 1)
    source = node.input[0]
    output = node.output[0]
    shape = scope.shapes.get(source)
    if shape is None and axis < -1:  # counted from an end that is not known
        raise CannotRewrite(f"the shape of {source} is not known")
    is_one_axis = axis == -1  # no axis comes after the last one, whatever the shape
    if shape is not None and -len(shape) <= axis < len(shape):
        is_one_axis = all(size == 1 for size in shape[axis % len(shape) + 1 :])
    drop_attribute(node, "axis")
    if is_one_axis:
        _set_attribute(node, "axis", axis)
        return [node]

    # names of the matrix that Flatten makes, of the shape of the input, and of the result
    matrix = scope.new_name(f"{output}_rows")
    original_shape = scope.new_name(f"{output}_dims")
    matrix_softmax = scope.new_name(f"{output}_softmax")
    _set_attribute(node, "axis", -1)  # along the rows of the matrix
    node.input[0] = matrix
    node.output[0] = matrix_softmax
    return [
        make_node("Shape", [source], original_shape, f"{node.name}_Shape"),
        make_node("Flatten", [source], matrix, f"{node.name}_Flatten", axis=axis),
        node,
        make_node("Reshape", [matrix_softmax, original_shape], output, f"{node.name}_Reshape"),
    ]


def _check_statistics(node: onnx.NodeProto, _: OpsetScope) -> str:
    """BatchNormalization: before opset 14 with outputs of training."""
    return "its statistics are read" if len(node.output) > 1 else ""


def _check_mask(node: onnx.NodeProto, scope: OpsetScope) -> str:
    """Dropout: before opset 10 its mask was of another type."""
    return "its mask is read" if scope.source_opset < 10 and len(node.output) > 1 else ""


def _rename_scatter(node: onnx.NodeProto, _: OpsetScope) -> Nodes:
    node.op_type = "ScatterElements"
    return [node]


def _add_split_count(node: onnx.NodeProto, _: OpsetScope) -> Nodes:
    """Split: from opset 18 on it counts its outputs if it has no sizes."""
    if len(node.input) < 2:
        _set_attribute(node, "num_outputs", len(node.output))
    return [node]


def _set_old_positions(node: onnx.NodeProto, _: OpsetScope) -> Nodes:
    """RoiAlign: from opset 16 on the positions of pixels have another default."""
    _set_attribute(node, "coordinate_transformation_mode", "output_half_pixel")
    return [node]


def _to_inputs(*names: str) -> Rewrite:
    """Return the rewrite that makes these attributes constant inputs."""
    return partial(_attributes_to_inputs, names=names)


# Every new form or meaning up to opset 22; of one operator the oldest opset first
UPGRADES = (
    _change(  # before, it could have a mean for each position
        9,
        "BatchNormalization",
        check=_refuse_values("spatial", 0, reason="it has spatial=0"),
        rewrite=partial(_drop_attribute, name="spatial"),
    ),
    _change(14, "BatchNormalization", check=_check_statistics),
    _change(11, "Clip", rewrite=_to_inputs("min", "max")),
    _change(20, "DFT", check=_refuse("its axis is an input there")),
    # the ratio of Dropout counts in training alone
    _change(12, "Dropout", check=_check_mask, rewrite=partial(_drop_attribute, name="ratio")),
    _change(20, "GridSample", rewrite=partial(_rename_modes, names=_NEW_MODES)),
    _change(21, "GroupNormalization", check=_refuse("its scale is one a group")),
    _change(13, "Hardmax", "LogSoftmax", "Softmax", rewrite=_softmax_over_axis),
    _change(11, "Pad", rewrite=_to_inputs("pads", "value")),
    _change(13, "ReduceSum", "Squeeze", "Unsqueeze", rewrite=_to_inputs("axes")),
    _change(18, *_REDUCE_WITH_AXES, rewrite=_to_inputs("axes")),
    _change(11, "Resize", rewrite=_upsample_to_resize),
    _change(16, "RoiAlign", rewrite=_set_old_positions),
    _change(9, "Scan", check=_refuse("it scans a batch of sequences")),
    _change(11, "Scatter", rewrite=_rename_scatter),
    _change(10, "Slice", rewrite=_to_inputs("starts", "ends", "axes")),
    _change(13, "Split", rewrite=_to_inputs("split")),
    _change(18, "Split", rewrite=_add_split_count),
    _change(10, "TopK", rewrite=_to_inputs("k")),
    _change(10, "Upsample", rewrite=_upsample_to_resize),
)
