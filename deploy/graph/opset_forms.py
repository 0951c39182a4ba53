"""Forms of single ONNX operators in older opsets (`DOWNGRADES`) and in newer ones (`UPGRADES`).

Newer forms take as an input what was an attribute (the axes of a Reduce), allow unequal slices
(Split), take pads or scales of some axes only (Pad, Resize) or renamed values (GridSample).

`UPGRADES` covers every operator whose form or meaning changed between opset 7 and 22. ONNX's own
converter leaves out how a Resize of opset 10 rounds (onnx#8480), has no form of an Upsample, and
handles neither subgraphs nor models with custom domains.

Source: the schemas of ONNX, and their changelog (docs/Changelog.md of onnx).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import defs, helper, numpy_helper

from deploy.graph.edit import claim_name, replace_nodes
from deploy.graph.index import attributes, constant_nodes, dims, subgraphs

_FLOAT = 1  # onnx.TensorProto
_REDUCED = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]


Form = Callable[["onnx.NodeProto", "OpsetScope"], list["onnx.NodeProto"]]  # may change the node


class CannotLower(Exception):
    """A node has no form in the other opset; the message says why."""


@dataclass(frozen=True, slots=True)
class OpsetScope:
    """Opsets and the tensors in scope of a graph: its own and those of the enclosing graphs.

    Attributes:
        source_opset: opset of the nodes.
        target_opset: opset to convert them to.
        tensor_names: names of tensors that exist, and those of new ones.
        constants: name -> tensor.
        dtypes: tensor -> ONNX element type.
        shapes: tensor -> sizes as in `deploy.graph.index.dims`.
    """

    source_opset: int
    target_opset: int
    tensor_names: set[str] = field(default_factory=set)
    constants: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int | str | None, ...] | None] = field(default_factory=dict)

    def subgraph_scope(self, graph: onnx.GraphProto) -> OpsetScope:
        """Return the scope of a subgraph: this one plus the subgraph's own tensors."""
        known = [*graph.input, *graph.value_info, *graph.output]
        held = {tensor.name: tensor for tensor in graph.initializer}
        held |= constant_nodes(graph.node)
        dtypes = {value.name: value.type.tensor_type.elem_type for value in known}
        shapes = {value.name: dims(value) for value in known}
        dtypes |= {name: tensor.data_type for name, tensor in held.items()}
        shapes |= {name: tuple(tensor.dims) for name, tensor in held.items()}
        return replace(
            self,
            constants={**self.constants, **held},
            dtypes={**self.dtypes, **dtypes},
            shapes={**self.shapes, **shapes},
        )

    def new_name(self, wanted: str) -> str:
        """Return a name for a new tensor that no other one has."""
        return claim_name(wanted, self.tensor_names)

    def values(self, name: str, what: str) -> NDArray[Any]:
        """Return the values of a constant.

        Raises:
            CannotLower: the tensor is not constant.
        """
        if name not in self.constants:
            raise CannotLower(f"its {what} are not constant")
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def dtype(self, name: str) -> int:
        """Return the element type of a tensor.

        Raises:
            CannotLower: the type is unknown.
        """
        known = self.dtypes.get(name, 0)
        if not known:
            raise CannotLower(f"the type of {name} is not known")
        return known

    def shape(self, name: str) -> tuple[int | str | None, ...]:
        """Return the sizes of a tensor.

        Raises:
            CannotLower: the rank is unknown.
        """
        known = self.shapes.get(name)
        if known is None:
            raise CannotLower(f"the shape of {name} is not known")
        return known


def rewrite_nodes(graph: onnx.GraphProto, around: OpsetScope, form: Form) -> None:
    """Replace each node of a graph and of its subgraphs by the nodes that `form` returns."""
    places = around.subgraph_scope(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for body in subgraphs(node):
            rewrite_nodes(body, places, form)
        nodes += form(node, places)
    replace_nodes(graph, nodes)


def drop_new_attributes(node: onnx.NodeProto, own: defs.OpSchema, old: defs.OpSchema) -> None:
    """Remove the attributes that a node's old form does not have.

    Raises:
        CannotLower: one of them is not the default, or the node has more inputs or outputs.
    """
    if len(node.input) > old.max_input or len(node.output) > old.max_output:
        raise CannotLower("it has more inputs or outputs than its older form")
    for given in list(node.attribute):
        if given.name in old.attributes:
            continue
        if not _is_default(given, own):
            raise CannotLower(f"it has the attribute {given.name}")
        node.attribute.remove(given)


def _is_default(given: onnx.AttributeProto, own: defs.OpSchema) -> bool:
    value = helper.get_attribute_value(given)
    if given.name == "dilations":
        return set(value) <= {1}
    default = own.attributes[given.name].default_value
    return bool(default.type == given.type and value == helper.get_attribute_value(default))


def make_constant_node(name: str, values: NDArray[Any]) -> onnx.NodeProto:
    """Return a Constant node whose output `name` holds `values`."""
    tensor = numpy_helper.from_array(np.asarray(values), name)
    return helper.make_node("Constant", [], [name], f"{name}_Constant", value=tensor)


def _axes(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Reduce: axes as an attribute, as before opset 18."""
    if places.target_opset >= 18:
        return [node]
    named = len(node.input) > 1 and node.input[1]
    axes = places.values(node.input[1], "axes").tolist() if named else []
    if not axes and attributes(node).get("noop_with_empty_axes", 0):
        return [helper.make_node("Identity", node.input[:1], node.output, node.name)]
    del node.input[1:]
    _drop(node, "noop_with_empty_axes")
    if axes:
        node.attribute.append(helper.make_attribute("axes", axes))
    return [node]


def _split(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Split: sizes of unequal slices as an input, as before opset 18."""
    count = attributes(node).get("num_outputs")
    _drop(node, "num_outputs")
    if count is None:
        return [node]
    size = places.shape(node.input[0])[attributes(node).get("axis", 0)]
    if not isinstance(size, int):
        raise CannotLower(f"the size of {node.input[0]} along its axis is not known")
    if size % count == 0:
        return [node]
    step = -(-size // count)
    sizes = np.array([*[step] * (count - 1), size - step * (count - 1)], np.int64)
    name = f"{node.output[0]}/split"
    node.input.extend([name])
    return [make_constant_node(name, sizes), node]


def _pad(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Pad: pads of all axes, as before opset 18; no mode "wrap" before opset 19."""
    if attributes(node).get("mode") == b"wrap" and places.target_opset < 19:
        raise CannotLower("it wraps around")
    if places.target_opset >= 18 or len(node.input) < 4 or not node.input[3]:
        return [node]
    rank = len(places.shape(node.input[0]))
    given, axes = places.values(node.input[1], "pads"), places.values(node.input[3], "axes")
    pads = np.zeros((2, rank), np.int64)
    pads[:, axes] = given.reshape(2, -1)
    name = f"{node.output[0]}/pads"
    node.input[1] = name
    del node.input[3:]
    return [make_constant_node(name, pads.ravel()), node]


def _resize(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Resize: scales or sizes of all axes, as before opset 18."""
    mode = attributes(node).get("coordinate_transformation_mode")
    if mode == b"half_pixel_symmetric" and places.target_opset < 19:
        raise CannotLower("it resizes by half_pixel_symmetric")
    return [node] if places.target_opset >= 18 else complete_resize(node, places)


def complete_resize(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Return the nodes of a Resize over all axes in place of one of some axes; it may change.

    Raises:
        CannotLower: sizes that keep the ratio of the sides need known shapes; the rank is unknown.
    """
    attrs, by_size = attributes(node), len(node.input) > 3 and node.input[3] != ""
    keeps = by_size and attrs.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
    if "axes" not in attrs and not keeps:
        return [node]
    shape = places.shape(node.input[0])
    made: list[onnx.NodeProto] = []
    axes = [axis % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    if keeps:
        name = places.new_name(f"{node.output[0]}_ratio")
        scales = _kept_ratio(node, places, [shape[axis] for axis in axes])
        made.append(make_constant_node(name, scales))
        del node.input[2:]
        node.input.append(name)
    at = len(node.input) - 1
    source = str(node.input[0]) if at == 3 else np.ones(len(shape), np.float32)
    made += _spread(node, at, axes, source, places)
    if node.input[1]:  # from 0 to 1 along the other axes
        places.values(node.input[1], "region")
        ends = np.repeat([0, 1], len(shape))
        both = [axis + end for end in (0, len(shape)) for axis in axes]
        made += _spread(node, 1, both, ends.astype(np.float32), places)
    _drop(node, "axes")
    _drop(node, "keep_aspect_ratio_policy")
    return [*made, node]


def _kept_ratio(
    node: onnx.NodeProto, places: OpsetScope, shape: list[int | str | None]
) -> NDArray[np.float32]:
    """Return the scales of a Resize by sizes that keeps the ratio of the sides."""
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise CannotLower(f"the sizes of {node.input[0]} are not known")
    sides = np.array(shape, np.float32)
    scales = places.values(node.input[3], "sizes").astype(np.float32) / sides
    larger = attributes(node)["keep_aspect_ratio_policy"] == b"not_smaller"
    scale = scales.max() if larger else scales.min()
    if (np.floor(sides * scale) != np.round(sides * scale)).any():
        raise CannotLower("no scale gives the sizes that keep the ratio of its sides")
    return np.full(len(shape), scale)


def _spread(
    node: onnx.NodeProto, at: int, axes: list[int], default: str | NDArray[Any], places: OpsetScope
) -> list[onnx.NodeProto]:
    """Make a node's input `at`, of some `axes`, one of all axes; return the nodes that do it.

    `default`: values of all axes, or a tensor of which they are the sizes.
    """
    name, given = places.new_name(f"{node.output[0]}_axes"), str(node.input[at])
    known = places.shapes.get(default) if isinstance(default, str) else default.tolist()
    node.input[at] = name
    if given in places.constants and known is not None:
        values = list(known)
        for axis, value in zip(axes, places.values(given, "values").tolist(), strict=True):
            values[axis] = value
        if all(isinstance(value, int | float) for value in values):
            dtype = places.values(given, "values").dtype
            return [make_constant_node(name, np.array(values, dtype))]
    whole, both, order = (places.new_name(f"{name}_{word}") for word in ("whole", "both", "order"))
    size = len(known or ())
    places_of = [size + axes.index(axis) if axis in axes else axis for axis in range(size)]
    return [
        helper.make_node("Shape", [default], [whole], f"{whole}_Shape")
        if isinstance(default, str)
        else make_constant_node(whole, default),
        helper.make_node("Concat", [whole, given], [both], f"{both}_Concat", axis=0),
        make_constant_node(order, np.array(places_of, np.int64)),
        helper.make_node("Gather", [both, order], [name], f"{name}_Gather"),
    ]


def _reshape(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Reshape: before opset 14, a 0 always copies the input's size."""
    if attributes(node).get("allowzero", 0) and places.target_opset < 14:
        if not places.values(node.input[1], "sizes").all():
            raise CannotLower("it makes a size of 0")
        _drop(node, "allowzero")
    return [node]


def _scatter(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """ScatterND and ScatterElements: no reduction "max" or "min" before opset 18."""
    if attributes(node).get("reduction") in (b"max", b"min") and places.target_opset < 18:
        raise CannotLower("its reduction is max or min")
    return [node]


def _grid_sample(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """GridSample: before opset 20, other mode names and images only."""
    if places.target_opset >= 20:
        return [node]
    if len(places.shape(node.input[0])) != 4:
        raise CannotLower(f"{node.input[0]} is not an image")
    return _rename_modes({b"linear": b"bilinear", b"cubic": b"bicubic"})(node, places)


def _rename_modes(new: Mapping[bytes, bytes]) -> Form:
    def rename(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
        for given in node.attribute:
            if given.name == "mode":
                given.s = new.get(given.s, given.s)
        return [node]

    return rename


def _drop(node: onnx.NodeProto, name: str) -> None:
    for given in list(node.attribute):
        if given.name == name:
            node.attribute.remove(given)


# Operator -> function that returns its older form, the node itself last
DOWNGRADES: dict[str, Form] = {
    **{f"Reduce{kind}": _axes for kind in _REDUCED},
    "GridSample": _grid_sample,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Split": _split,
}


def _move_to_inputs(*names: str) -> Form:
    """Return a rule that moves these attributes to constant inputs, from the second input on."""

    def move(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
        given, made = attributes(node), []
        del node.input[1:]
        for name in names:
            _drop(node, name)
            if name not in given:
                node.input.append("")
                continue
            values = np.array([given[name]] if name == "k" else given[name])
            if values.dtype.kind == "f":
                kind = places.dtypes.get(node.input[0]) or _FLOAT
                values = values.astype(helper.tensor_dtype_to_np_dtype(kind))
            node.input.append(places.new_name(f"{node.output[0]}_{name}"))
            made.append(make_constant_node(node.input[-1], values))
        while not node.input[-1]:
            del node.input[-1]
        return [*made, node]

    return move


def _new_resize(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Resize-10 and Upsample: the same places and rounding as attributes.

    A Resize rounds up along an axis that it shrinks, and down along one that it enlarges, as ONNX's
    tests of opset 10 and ONNX Runtime do.
    """
    given, made = attributes(node), []
    if "scales" in given:  # Upsample-7
        node.input.append(places.new_name(f"{node.output[0]}_scales"))
        made.append(make_constant_node(node.input[1], np.array(given["scales"], np.float32)))
        _drop(node, "scales")
    rounding = "floor"
    if node.op_type == "Resize" and node.input[1] in places.constants:
        scales = places.values(node.input[1], "scales").astype(np.float64)
        if not (scales > 0).all():
            raise CannotLower("a scale is not above 0")
        steps = 1 / scales
        shrunk, enlarged = steps[steps > 1], (steps < 1).any()
        rounding = "ceil" if shrunk.size and not enlarged else "floor"
        nearest = given.get("mode", b"nearest") == b"nearest"
        if nearest and enlarged and (shrunk != np.round(shrunk)).any():
            raise CannotLower("it shrinks one axis and enlarges another")
    node.op_type = "Resize"
    node.input.insert(1, "")
    words = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": rounding}
    node.attribute.extend(helper.make_attribute(name, word) for name, word in words.items())
    return [*made, node]


def _new_softmax(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Softmax and its like: before opset 13 over all axes from `axis` on, as one."""
    axis = attributes(node).get("axis", 1)
    shape = places.shapes.get(node.input[0])
    if shape is not None and -len(shape) <= axis < len(shape):
        alone = all(size == 1 for size in shape[axis % len(shape) + 1 :])
    else:
        alone = axis == -1
    _drop(node, "axis")
    node.attribute.append(helper.make_attribute("axis", axis if alone else -1))
    if alone:
        return [node]
    if axis < 0 and shape is None:
        raise CannotLower(f"the shape of {node.input[0]} is not known")
    source, out = str(node.input[0]), str(node.output[0])
    flat, sizes, done = (places.new_name(f"{out}_{word}") for word in ("rows", "dims", "softmax"))
    node.input[0], node.output[0] = flat, done
    return [
        helper.make_node("Shape", [source], [sizes], f"{node.name}_Shape"),
        helper.make_node("Flatten", [source], [flat], f"{node.name}_Flatten", axis=axis),
        node,
        helper.make_node("Reshape", [done, sizes], [out], f"{node.name}_Reshape"),
    ]


def _new_norm(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
    """BatchNormalization: before opset 9 it could have a mean for each place."""
    if not attributes(node).get("spatial", 1):
        raise CannotLower("it has spatial=0")
    _drop(node, "spatial")
    return [node]


def _new_dropout(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Dropout: its ratio counts in training alone."""
    if places.source_opset < 10 and len(node.output) > 1:
        raise CannotLower("its mask is read")
    _drop(node, "ratio")
    return [node]


def _rename(op_type: str) -> Form:
    def rename(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
        node.op_type = op_type
        return [node]

    return rename


def _refuse(reason: str) -> Form:
    def refuse(_: onnx.NodeProto, __: OpsetScope) -> list[onnx.NodeProto]:
        raise CannotLower(reason)

    return refuse


def _trained_norm(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
    """BatchNormalization: before opset 14 with outputs of training."""
    if len(node.output) > 1:
        raise CannotLower("its statistics are read")
    return [node]


def _counted_split(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
    """Split: from opset 18 on it counts its outputs where it is given no sizes."""
    if len(node.input) < 2:
        node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    return [node]


def _placed_roi_align(node: onnx.NodeProto, _: OpsetScope) -> list[onnx.NodeProto]:
    """RoiAlign: from opset 16 on with another default of the places of pixels."""
    word = helper.make_attribute("coordinate_transformation_mode", "output_half_pixel")
    node.attribute.append(word)
    return [node]


# Operator -> opset of each new form or meaning up to 22, and the function that returns it, as in
# `DOWNGRADES`.
UPGRADES: dict[str, tuple[tuple[int, Form], ...]] = {
    "BatchNormalization": ((9, _new_norm), (14, _trained_norm)),
    "Clip": ((11, _move_to_inputs("min", "max")),),
    "DFT": ((20, _refuse("its axis is an input there")),),
    "Dropout": ((12, _new_dropout),),
    "GridSample": ((20, _rename_modes({b"bilinear": b"linear", b"bicubic": b"cubic"})),),
    "GroupNormalization": ((21, _refuse("its scale is one a group")),),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), ((13, _new_softmax),)),
    "Pad": ((11, _move_to_inputs("pads", "value")),),
    **{f"Reduce{kind}": ((18, _move_to_inputs("axes")),) for kind in _REDUCED},
    "ReduceSum": ((13, _move_to_inputs("axes")),),
    "Resize": ((11, _new_resize),),
    "RoiAlign": ((16, _placed_roi_align),),
    "Scan": ((9, _refuse("it scans a batch of sequences")),),
    "Scatter": ((11, _rename("ScatterElements")),),
    "Slice": ((10, _move_to_inputs("starts", "ends", "axes")),),
    "Split": ((13, _move_to_inputs("split")), (18, _counted_split)),
    "Squeeze": ((13, _move_to_inputs("axes")),),
    "TopK": ((10, _move_to_inputs("k")),),
    "Unsqueeze": ((13, _move_to_inputs("axes")),),
    "Upsample": ((10, _new_resize),),
}


def changed_forms(op_type: str, own: int, opset: int) -> list[Form]:
    """Return the functions that bring an operator from opset `own` to a newer one, in order."""
    return [rule for since, rule in UPGRADES.get(op_type, ()) if own < since <= opset]
