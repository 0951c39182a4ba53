"""The user's own Q/DQ model for TensorRT: whether its pairs fit, and its forms.

TensorRT reads symmetric int8 pairs as they are. It needs float biases, so int32 biases are
dequantized; in the typed model scales are rounded to what the narrow type holds.
"""

from collections.abc import Mapping

import onnx
from onnx import numpy_helper

from deploy.frontends.base import QdqCalibration
from deploy.frontends.checks import to_array
from deploy.frontends.lift import dequantize_constants
from deploy.frontends.pairs import DQ, Q
from deploy.graph.edit import copy_message
from deploy.graph.index import Graph
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


def dequantize_biases(trained: QdqCalibration) -> onnx.ModelProto:
    """Return the user's Q/DQ model with float biases, as TensorRT needs them, in place of int32."""
    model = copy_message(trained.model)
    dequantize_constants(model, onnx.TensorProto.INT32)  # weights are int8
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
            scales = round_scales(to_array(tensor), float_type)
            scales = scales.reshape(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(scales, tensor.name))
    return narrow_float_part(rounded, float_type, largest_values)
