"""A Q/DQ model whose pairs are TensorRT's own: int8, zero point 0, kept as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deploy.frontends.checks import to_array
from deploy.frontends.pairs import DQ, Q
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph, attributes
from deploy.targets.tensorrt.float_types import storable, typed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx
    from numpy.typing import NDArray

    from deploy.frontends.trained import Trained

_FLOAT = 1  # onnx.TensorProto
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
    """The same with what is not quantized in a narrow type, as `deploy.targets.tensorrt.float_types`.

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
