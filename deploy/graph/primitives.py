"""Operators as others that every opset has: norms and activations of opset 14 to 24.

They are written as PyTorch writes them for an older opset, which is what parsers look for when they
fuse a norm. The last node has the name and the output of the one that it stands for.

Source: the functions in the schemas of ONNX (docs/Operators.md of onnx).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.graph.index import attributes
from deploy.graph.oldforms import Cannot, Places, constant

if TYPE_CHECKING:
    import onnx

_FLOAT = 1  # onnx.TensorProto


class _Written:
    """The nodes that stand for one, while they are written.

    Attributes:
        node: the one.
        given: its attributes.
    """

    def __init__(self, node: onnx.NodeProto, places: Places) -> None:
        if len(node.output) != 1:
            raise Cannot("it has more than one output")
        self.node, self.places, self.given = node, places, attributes(node)
        self.nodes: list[onnx.NodeProto] = []

    @property
    def source(self) -> str:
        """What it reads first."""
        return str(self.node.input[0])

    def add(self, op_type: str, *inputs: str, given: Mapping[str, Any] | None = None) -> str:
        """One more node; gives its output."""
        from onnx import helper

        name = f"{self.node.output[0]}/{op_type}_{len(self.nodes)}"
        node = helper.make_node(op_type, inputs, [name], f"{self.node.name}/{name}", **given or {})
        self.nodes.append(node)
        return name

    def number(self, value: float) -> str:
        """A constant of the type that is computed in."""
        return self.floats(np.array(value))

    def floats(self, values: NDArray[np.float64]) -> str:
        """Constants of the type that is computed in."""
        from onnx import helper

        kind = helper.tensor_dtype_to_np_dtype(self.places.dtype(self.source))
        return self.held(values.astype(kind))

    def held(self, values: NDArray[np.generic]) -> str:
        """A constant."""
        name = f"{self.node.output[0]}/constant_{len(self.nodes)}"
        self.nodes.append(constant(name, values))
        return name

    def mean(self, name: str, axes: Sequence[int]) -> str:
        """The mean over axes, which stay with size 1."""
        if self.places.opset >= 18:
            return self.add("ReduceMean", name, self.held(np.array(axes, np.int64)))
        return self.add("ReduceMean", name, given={"axes": axes})

    def done(self) -> list[onnx.NodeProto]:
        """The nodes; the last one takes the place of the node."""
        self.nodes[-1].name = self.node.name
        self.nodes[-1].output[0] = self.node.output[0]
        return self.nodes


def _hard_swish(made: _Written) -> None:
    gate = made.add("HardSigmoid", made.source, given={"alpha": 1 / 6, "beta": 0.5})
    made.add("Mul", made.source, gate)


def _mish(made: _Written) -> None:
    made.add("Mul", made.source, made.add("Tanh", made.add("Softplus", made.source)))


def _swish(made: _Written) -> None:
    scaled, alpha = made.source, made.given.get("alpha", 1.0)
    if alpha != 1.0:
        scaled = made.add("Mul", made.source, made.number(alpha))
    made.add("Mul", made.source, made.add("Sigmoid", scaled))


def _gelu(made: _Written) -> None:
    x = made.source
    if made.given.get("approximate", b"none") == b"tanh":
        cube = made.add("Mul", made.add("Mul", made.add("Mul", x, x), x), made.number(0.044715))
        inner = made.add("Mul", made.add("Add", x, cube), made.number(math.sqrt(2 / math.pi)))
        curve = made.add("Tanh", inner)
    else:
        curve = made.add("Erf", made.add("Div", x, made.number(math.sqrt(2))))
    made.add("Mul", made.add("Mul", x, made.add("Add", curve, made.number(1))), made.number(0.5))


def _cast_like(made: _Written) -> None:
    if made.given.get("saturate", 1) != 1 or made.given.get("round_mode", b"up") != b"up":
        raise Cannot("it casts by a rule of its own")
    made.add("Cast", made.source, given={"to": made.places.dtype(made.node.input[1])})


def _layer_norm(made: _Written) -> None:
    axes = _last_axes(made)
    centred = made.add("Sub", made.source, made.mean(made.source, axes))
    _scaled(made, _over_deviation(made, centred, axes))


def _rms_norm(made: _Written) -> None:
    _scaled(made, _over_deviation(made, made.source, _last_axes(made)))


def _last_axes(made: _Written) -> list[int]:
    """The axes that a norm is of, counted from the last."""
    _refuse_sums(made)
    axis = made.given.get("axis", -1)
    if axis >= 0:
        axis -= len(made.places.shape(made.source))
    return list(range(axis, 0))


def _over_deviation(made: _Written, centred: str, axes: Sequence[int]) -> str:
    variance = made.mean(made.add("Pow", centred, made.number(2)), axes)
    safe = made.add("Add", variance, made.number(made.given.get("epsilon", 1e-5)))
    return made.add("Div", centred, made.add("Sqrt", safe))


def _scaled(made: _Written, name: str) -> None:
    """Times the scale, plus the bias where there is one."""
    scaled = made.add("Mul", name, made.node.input[1])
    if len(made.node.input) > 2 and made.node.input[2]:
        made.add("Add", scaled, made.node.input[2])


def _group_norm(made: _Written) -> None:
    """By an InstanceNormalization of the groups; before 21 scale and bias are of a group each."""
    _refuse_sums(made)
    groups, each = made.given["num_groups"], made.places.own >= 21
    scale, bias = made.node.input[1:3]
    if each:
        scale, bias = made.floats(np.ones(groups)), made.floats(np.zeros(groups))
    grouped = made.add("Reshape", made.source, made.held(np.array([0, groups, -1], np.int64)))
    epsilon = {"epsilon": made.given.get("epsilon", 1e-5)}
    normed = made.add("InstanceNormalization", grouped, scale, bias, given=epsilon)
    whole = made.add("Reshape", normed, made.add("Shape", made.source))
    if each:
        column = np.array([-1, *[1] * (len(made.places.shape(made.source)) - 2)], np.int64)
        shape = made.held(column)
        scaled = made.add("Mul", whole, made.add("Reshape", made.node.input[1], shape))
        made.add("Add", scaled, made.add("Reshape", made.node.input[2], shape))


def _refuse_sums(made: _Written) -> None:
    if made.places.dtype(made.source) != _FLOAT:
        raise Cannot("its sums are of another type than its input")


# Operator -> what writes it as others.
_WRITERS: dict[str, Callable[[_Written], None]] = {
    "CastLike": _cast_like,
    "Gelu": _gelu,
    "GroupNormalization": _group_norm,
    "HardSwish": _hard_swish,
    "LayerNormalization": _layer_norm,
    "Mish": _mish,
    "RMSNormalization": _rms_norm,
    "Swish": _swish,
}


def primitives(node: onnx.NodeProto, places: Places) -> list[onnx.NodeProto]:
    """The nodes that compute what a node computes, in every opset from 13 on.

    Raises:
        Cannot: none are known, or not for such a node.
    """
    if node.op_type not in _WRITERS:
        raise Cannot("no other operators are known that compute it")
    made = _Written(node, places)
    _WRITERS[node.op_type](made)
    return made.done()
