"""The scales of a weight that is written for a node's kernel, and its channels as that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import channels_first
from calibrators.grids import Grid, weight_scales
from calibrators.weights import is_depthwise, pair_scales, pair_sums
from deploy.graph.index import attributes

if TYPE_CHECKING:
    import onnx


def scales_of(
    tensor: onnx.TensorProto, axis: int | None, grid: Grid, *, fits: onnx.NodeProto | None
) -> NDArray[np.float32]:
    """The scales of a weight, [C] along `axis` or [1].

    Args:
        tensor: the weight in real units.
        axis: of its output channels; None for one scale.
        grid: that stores it.
        fits: the node that multiplies by it, where no CPU is to saturate the products.

    Raises:
        CalibrationError: it is empty, or holds NaN or Inf.
    """
    weight = numpy_helper.to_array(tensor)
    scales = weight_scales(weight, axis, grid=grid)
    if fits is None or _depthwise(weight, fits):
        return scales
    return pair_scales(channel_rows(weight, fits), scales)


def largest_pairs(stored: NDArray[Any], node: onnx.NodeProto) -> NDArray[np.float64] | None:
    """Steps of each channel's largest pair, [C]; None where a node's kernels have none."""
    if stored.dtype != np.int8 or _depthwise(stored, node):
        return None
    sums = pair_sums(channel_rows(stored, node))
    return np.asarray(sums.max(axis=1, initial=0.0), np.float64)


def channel_rows(weight: NDArray[Any], node: onnx.NodeProto) -> NDArray[Any]:
    """A weight as it stands in a node -> output channels first, [C_out, C_in of a group, ...]."""
    given = attributes(node)
    if node.op_type == "ConvTranspose":
        return channels_first(weight, int(given.get("group", 1)))
    if weight.ndim == 1:  # a MatMul with a vector has one channel
        return weight[None]
    turned = node.op_type != "Conv" and not given.get("transB", 0)
    return np.moveaxis(weight, -1, 0) if turned else weight


def _depthwise(weight: NDArray[Any], node: onnx.NodeProto) -> bool:
    """Whether it is that of a depthwise Conv; of a vector or matrix there are no groups."""
    groups = int(attributes(node).get("group", 1))
    return weight.ndim > 2 and is_depthwise(groups, *weight.shape[:2])
