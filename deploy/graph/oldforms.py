"""Operators that an older opset has in another form.

What was an attribute once is an input now (the axes of a Reduce), parts need not be equal any more
(Split), pads and scales may be of some axes only (Pad, Resize), and words changed (GridSample).

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


class Cannot(Exception):
    """Why a node has no older form."""


@dataclass(frozen=True, slots=True)
class Places:
    """What is known around the nodes of a graph.

    Attributes:
        own: opset that the nodes are of.
        opset: opset that they are brought to.
        constants: name -> tensor, of the graph and of those around it.
        dtypes: tensor -> ONNX element type, of the same.
        shapes: tensor -> sizes as `deploy.graph.index.dims` gives them, of the same.
    """

    own: int
    opset: int
    constants: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int | str | None, ...] | None] = field(default_factory=dict)

    def inside(self, graph: onnx.GraphProto) -> Places:
        """The same, and what is known in a graph among these nodes."""
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
        """A constant.

        Raises:
            Cannot: it is none.
        """
        from onnx import numpy_helper

        if name not in self.constants:
            raise Cannot(f"its {what} are not constant")
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def dtype(self, name: str) -> int:
        """Element type of a tensor.

        Raises:
            Cannot: it is not known.
        """
        known = self.dtypes.get(name, 0)
        if not known:
            raise Cannot(f"the type of {name} is not known")
        return known

    def shape(self, name: str) -> tuple[int | str | None, ...]:
        """Sizes of a tensor.

        Raises:
            Cannot: not even their number is known.
        """
        known = self.shapes.get(name)
        if known is None:
            raise Cannot(f"the shape of {name} is not known")
        return known


def same_attributes(node: onnx.NodeProto, own: defs.OpSchema, old: defs.OpSchema) -> None:
    """Take from a node the attributes that its old form does not have.

    Raises:
        Cannot: one of them, or an input, changes what is computed.
    """
    if len(node.input) > old.max_input or len(node.output) > old.max_output:
        raise Cannot("it has an input or output more")
    for given in list(node.attribute):
        if given.name in old.attributes:
            continue
        if not _is_default(given, own):
            raise Cannot(f"it has the attribute {given.name}")
        node.attribute.remove(given)


def _is_default(given: onnx.AttributeProto, own: defs.OpSchema) -> bool:
    from onnx import helper

    value = helper.get_attribute_value(given)
    if given.name == "dilations":
        return set(value) <= {1}
    default = own.attributes[given.name].default_value
    return bool(default.type == given.type and value == helper.get_attribute_value(default))


def constant(name: str, values: NDArray[Any]) -> onnx.NodeProto:
    """A node that gives `values` under this name: it may stand in any graph."""
    from onnx import helper, numpy_helper

    tensor = numpy_helper.from_array(np.asarray(values), name)
    return helper.make_node("Constant", [], [name], f"{name}/Constant", value=tensor)


def _axes(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """Reduce: the axes in an attribute, as before 18."""
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


def _split(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """Split: parts that are not equal have their sizes in an input, as before 18."""
    count = attributes(node).get("num_outputs")
    _drop(node, "num_outputs")
    if count is None:
        return [node]
    size = places.shape(node.input[0])[attributes(node).get("axis", 0)]
    if not isinstance(size, int):
        raise Cannot(f"the size of {node.input[0]} along its axis is not known")
    if size % count == 0:
        return [node]
    part = -(-size // count)
    sizes = np.array([*[part] * (count - 1), size - part * (count - 1)], np.int64)
    name = f"{node.output[0]}/split"
    node.input.extend([name])
    return [constant(name, sizes), node]


def _pad(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """Pad: pads of all axes, as before 18, and no wrapping, as before 19."""
    if attributes(node).get("mode") == b"wrap" and places.opset < 19:
        raise Cannot("it wraps around")
    if places.opset >= 18 or len(node.input) < 4 or not node.input[3]:
        return [node]
    rank = len(places.shape(node.input[0]))
    given, axes = places.values(node.input[1], "pads"), places.values(node.input[3], "axes")
    pads = np.zeros((2, rank), np.int64)
    pads[:, axes] = given.reshape(2, -1)
    name = f"{node.output[0]}/pads"
    node.input[1] = name
    del node.input[3:]
    return [constant(name, pads.ravel()), node]


def _resize(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """Resize: scales or sizes of all axes, as before 18."""
    said = attributes(node)
    if said.get("coordinate_transformation_mode") == b"half_pixel_symmetric" and places.opset < 19:
        raise Cannot("it resizes by half_pixel_symmetric")
    if places.opset >= 18 or "axes" not in said:
        return [node]
    if len(node.input) > 1 and node.input[1]:
        raise Cannot("it resizes a region, by some axes only")
    shape, axes = places.shape(node.input[0]), said["axes"]
    at = 3 if len(node.input) > 3 else 2
    given = places.values(node.input[at], "sizes" if at == 3 else "scales")
    whole = list(shape) if at == 3 else [1.0] * len(shape)
    for axis, value in zip(axes, given.tolist(), strict=True):
        whole[axis] = value
    if not all(isinstance(value, int | float) for value in whole):
        raise Cannot(f"the sizes of {node.input[0]} are not known")
    name = f"{node.output[0]}/{'sizes' if at == 3 else 'scales'}"
    node.input[at] = name
    _drop(node, "axes")
    return [constant(name, np.array(whole, given.dtype)), node]


def _reshape(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """Reshape: a 0 always copies a size before 14."""
    if attributes(node).get("allowzero", 0) and places.opset < 14:
        if not places.values(node.input[1], "sizes").all():
            raise Cannot("it makes a size of 0")
        _drop(node, "allowzero")
    return [node]


def _scatter(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """ScatterND and ScatterElements: no largest or smallest before 18."""
    if attributes(node).get("reduction") in (b"max", b"min") and places.opset < 18:
        raise Cannot("its reduction is the largest or smallest")
    return [node]


def _grid_sample(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """GridSample: other words before 20, and of images only."""
    if places.opset >= 20:
        return [node]
    if len(places.shape(node.input[0])) != 4:
        raise Cannot(f"{node.input[0]} is no image")
    words = {b"linear": b"bilinear", b"cubic": b"bicubic"}
    for given in node.attribute:
        if given.name == "mode":
            given.s = words.get(given.s, given.s)
    return [node]


def _drop(node: onnx.NodeProto, name: str) -> None:
    for given in list(node.attribute):
        if given.name == name:
            node.attribute.remove(given)


_REDUCED = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
# Operator -> its older form, the node itself last; the one that is given may be changed for it.
OLD_FORMS: dict[str, Callable[[onnx.NodeProto, Places], list[onnx.NodeProto]]] = {
    **{f"Reduce{kind}": _axes for kind in _REDUCED},
    "GridSample": _grid_sample,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Split": _split,
}
