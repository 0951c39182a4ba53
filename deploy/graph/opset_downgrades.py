"""Downgrades of single ONNX operators to the form that an older opset has.

Newer forms take as an input what was an attribute (the axes of a Reduce), allow unequal slices
(Split), take pads or scales of some axes only (Pad, Resize) or renamed values (GridSample).

Source: the schemas of ONNX, and their changelog (docs/Changelog.md of onnx).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.graph.index import attributes, constant_nodes, dims

if TYPE_CHECKING:
    import onnx
    from onnx import defs

_REDUCED = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]


class CannotLower(Exception):
    """A node has no older form; the message says why."""


@dataclass(frozen=True, slots=True)
class OpsetScope:
    """Opsets and the tensors in scope of a graph: its own and those of the enclosing graphs.

    Attributes:
        own: opset of the nodes.
        opset: opset to lower them to.
        constants: name -> tensor.
        dtypes: tensor -> ONNX element type.
        shapes: tensor -> sizes as in `deploy.graph.index.dims`.
    """

    own: int
    opset: int
    constants: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int | str | None, ...] | None] = field(default_factory=dict)

    def inside(self, graph: onnx.GraphProto) -> OpsetScope:
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

    def values(self, name: str, what: str) -> NDArray[Any]:
        """Return the values of a constant.

        Raises:
            Cannot: the tensor is not constant.
        """
        from onnx import numpy_helper

        if name not in self.constants:
            raise CannotLower(f"its {what} are not constant")
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def dtype(self, name: str) -> int:
        """Return the element type of a tensor.

        Raises:
            Cannot: the type is unknown.
        """
        known = self.dtypes.get(name, 0)
        if not known:
            raise CannotLower(f"the type of {name} is not known")
        return known

    def shape(self, name: str) -> tuple[int | str | None, ...]:
        """Return the sizes of a tensor.

        Raises:
            Cannot: the rank is unknown.
        """
        known = self.shapes.get(name)
        if known is None:
            raise CannotLower(f"the shape of {name} is not known")
        return known


def drop_new_attributes(node: onnx.NodeProto, own: defs.OpSchema, old: defs.OpSchema) -> None:
    """Remove the attributes that a node's old form does not have.

    Raises:
        Cannot: one of them is not the default, or the node has more inputs or outputs.
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
    from onnx import helper

    value = helper.get_attribute_value(given)
    if given.name == "dilations":
        return set(value) <= {1}
    default = own.attributes[given.name].default_value
    return bool(default.type == given.type and value == helper.get_attribute_value(default))


def make_constant_node(name: str, values: NDArray[Any]) -> onnx.NodeProto:
    """Return a Constant node whose output `name` holds `values`."""
    from onnx import helper, numpy_helper

    tensor = numpy_helper.from_array(np.asarray(values), name)
    return helper.make_node("Constant", [], [name], f"{name}/Constant", value=tensor)


def _axes(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Reduce: axes as an attribute, as before opset 18."""
    from onnx import helper

    if places.opset >= 18:
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
    if attributes(node).get("mode") == b"wrap" and places.opset < 19:
        raise CannotLower("it wraps around")
    if places.opset >= 18 or len(node.input) < 4 or not node.input[3]:
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
    attrs = attributes(node)
    if attrs.get("coordinate_transformation_mode") == b"half_pixel_symmetric" and places.opset < 19:
        raise CannotLower("it resizes by half_pixel_symmetric")
    if places.opset >= 18 or "axes" not in attrs:
        return [node]
    if len(node.input) > 1 and node.input[1]:
        raise CannotLower("it resizes a region, by some axes only")
    shape, axes = places.shape(node.input[0]), attrs["axes"]
    at = 3 if len(node.input) > 3 else 2
    given = places.values(node.input[at], "sizes" if at == 3 else "scales")
    values = list(shape) if at == 3 else [1.0] * len(shape)
    for axis, value in zip(axes, given.tolist(), strict=True):
        values[axis] = value
    if not all(isinstance(value, int | float) for value in values):
        raise CannotLower(f"the sizes of {node.input[0]} are not known")
    name = f"{node.output[0]}/{'sizes' if at == 3 else 'scales'}"
    node.input[at] = name
    _drop(node, "axes")
    return [make_constant_node(name, np.array(values, given.dtype)), node]


def _reshape(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """Reshape: before opset 14, a 0 always copies the input's size."""
    if attributes(node).get("allowzero", 0) and places.opset < 14:
        if not places.values(node.input[1], "sizes").all():
            raise CannotLower("it makes a size of 0")
        _drop(node, "allowzero")
    return [node]


def _scatter(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """ScatterND and ScatterElements: no reduction "max" or "min" before opset 18."""
    if attributes(node).get("reduction") in (b"max", b"min") and places.opset < 18:
        raise CannotLower("its reduction is max or min")
    return [node]


def _grid_sample(node: onnx.NodeProto, places: OpsetScope) -> list[onnx.NodeProto]:
    """GridSample: before opset 20, other mode names and images only."""
    if places.opset >= 20:
        return [node]
    if len(places.shape(node.input[0])) != 4:
        raise CannotLower(f"{node.input[0]} is not an image")
    words = {b"linear": b"bilinear", b"cubic": b"bicubic"}
    for given in node.attribute:
        if given.name == "mode":
            given.s = words.get(given.s, given.s)
    return [node]


def _drop(node: onnx.NodeProto, name: str) -> None:
    for given in list(node.attribute):
        if given.name == name:
            node.attribute.remove(given)


# Operator -> function that returns its older form, the node itself last; it may change its argument
DOWNGRADES: dict[str, Callable[[onnx.NodeProto, OpsetScope], list[onnx.NodeProto]]] = {
    **{f"Reduce{kind}": _axes for kind in _REDUCED},
    "GridSample": _grid_sample,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Split": _split,
}
