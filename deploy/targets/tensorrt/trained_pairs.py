"""The user's own Q/DQ model for TensorRT: whether its pairs fit, and its forms.

TensorRT reads symmetric int8 pairs as they are. It needs float biases, so int32 biases are
dequantized; in the typed model scales are rounded to what the narrow type holds.
"""

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.grids import broadcast_parameter
from deploy.frontends.base import QdqCalibration
from deploy.frontends.checks import to_array
from deploy.frontends.pairs import DQ, Q
from deploy.graph.edit import copy_message, rebuild
from deploy.graph.index import Graph, attributes
from deploy.targets.tensorrt.float_types import narrow_float_part, round_scales

REQUANTIZED_NOTE = (
    "TensorRT's are int8 with zero point 0, so ranges are made symmetric around 0, and pairs stand"
    " where TensorRT wants them"
)
ROUNDED_SCALES_NOTE = "In the typed model scales are rounded up to what its narrow type holds."


def has_tensorrt_pairs(trained: QdqCalibration) -> bool:
    """Return whether TensorRT reads all pairs unchanged, except int32 biases."""
    stored_types = {grid.dtype for grid in trained.constant_grids}
    is_symmetric = not any(grid.zero.any() for grid in trained.constant_grids)
    reads_weights = is_symmetric and stored_types <= {"int8", "int32"}
    return reads_weights and trained.all_pairs_are("int8", symmetric=True)


def trained_model(trained: QdqCalibration) -> onnx.ModelProto:
    """Return the user's Q/DQ model with int32 biases dequantized; TensorRT needs float biases."""
    model = copy_message(trained.model)
    graph = Graph(model)
    nodes = []
    for node in graph.nodes:
        if node.op_type == DQ and _reads_int32(node, graph):
            bias = numpy_helper.from_array(_dequantized(node, graph), node.output[0])
            model.graph.initializer.append(bias)
        else:
            nodes.append(node)
    rebuild(model.graph, nodes)
    return model


def narrow_trained_model(
    model: onnx.ModelProto, float_type: str, largest_values: Mapping[str, float]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Apply `round_scales` to the user's Q/DQ model, then `narrow_float_part`."""
    rounded = copy_message(model)
    graph = Graph(rounded)
    scale_names = {node.input[1] for node in graph.nodes if node.op_type in (Q, DQ)}
    for name in scale_names:
        tensor = graph.constants[name]
        if tensor.data_type == onnx.TensorProto.FLOAT:
            scales = round_scales(np.asarray(to_array(tensor), np.float32), float_type)
            scales = scales.reshape(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(scales, tensor.name))
    return narrow_float_part(rounded, float_type, largest_values)


def _reads_int32(node: onnx.NodeProto, graph: Graph) -> bool:
    stored = graph.constants.get(node.input[0])
    return stored is not None and to_array(stored).dtype == np.int32


def _dequantized(node: onnx.NodeProto, graph: Graph) -> NDArray[np.float32]:
    """Return the output of a DequantizeLinear of a constant with zero point 0."""
    integers = to_array(graph.constants[node.input[0]])
    scale = to_array(graph.constants[node.input[1]]).astype(np.float32)
    axis = None
    if scale.size > 1:  # a scale for each channel
        # the default is 1, also for the vector of a bias
        axis = int(attributes(node).get("axis", 1)) % integers.ndim
    steps = broadcast_parameter(scale, integers.ndim, axis)
    return np.asarray(integers.astype(np.float32) * steps, np.float32)
