"""The weights of a written model: which scales they are stored on, and what each channel uses.

Read from what was written, so that it is what the files hold::

    one scale a channel    |#######|  |#######|  |#######|      every channel uses its whole grid
    one scale for all      |#######|  |###    |  |#      |      a small channel has few steps left

The scales of a weight that is written for a node's kernel, and its channels as that has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import channels_first
from calibrators.grids import Grid, weight_scales
from calibrators.weights import FIT, ROUNDED, is_depthwise, pair_scales, pair_sums
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import WEIGHTED

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


Float64Array = NDArray[np.float64]

_WHOLE = 0.99  # of the grid: where there is a -128, 127 steps are all as well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeight:
    """One weight as a target's files hold it.

    Attributes:
        node: the node that reads it.
        op: its operator.
        amax: largest |w| of each output channel, float64 [C], in real units; 0 where a channel is
            stored as zeros.
        scales: float64 [C], or [1] for all channels: the real value of a stored 1.
        pairs: steps of each channel's largest pair, float64 [C], where kernels of CPUs add these in
            16 bits (`calibrators.weights`); None elsewhere.
    """

    node: str
    op: str
    amax: Float64Array
    scales: Float64Array
    pairs: Float64Array | None = None

    @property
    def used(self) -> Float64Array:
        """Share of the grid that each channel uses, by its largest weight or pair: 0 to 1, [C]."""
        steps = self.amax / self.scales
        share = steps / max(float(steps.max(initial=0.0)), np.finfo(np.float64).tiny)
        if self.pairs is not None:
            share = np.maximum(share, self.pairs / (FIT - ROUNDED))
        return np.where(share > _WHOLE, 1.0, share)

    @property
    def saturates(self) -> bool:
        """Whether an x86 CPU without VNNI may lose what is multiplied by it."""
        return self.pairs is not None and bool((self.pairs > FIT).any())


def stored_weight(
    node: str,
    op: str,
    rows: NDArray[Any],
    scales: NDArray[Any],
    *,
    real: bool = False,
    pairs: Float64Array | None = None,
) -> StoredWeight:
    """A weight from what is stored of it.

    Args:
        node: the node that reads it.
        op: its operator.
        rows: [C, ...] stored values, output channels first.
        scales: [C], or [1].
        real: the values are not stored but real ones, on their way to the grid.
        pairs: as `StoredWeight` has them.
    """
    if rows.dtype.kind not in "iuf":  # fp8, which numpy itself cannot compare
        rows = rows.astype(np.float32)
    inside = tuple(range(1, rows.ndim))
    largest = rows.max(axis=inside).astype(np.float64)
    least = rows.min(axis=inside).astype(np.float64)
    held = np.asarray(scales, np.float64).reshape(-1)
    amax = np.maximum(largest, -least) * (1.0 if real else held)
    return StoredWeight(node=node, op=op, amax=amax, scales=held, pairs=pairs)


def stored_in(model: onnx.ModelProto, *, on_cpus: bool = False) -> tuple[StoredWeight, ...]:
    """The weights of a Q/DQ model that stand behind a DequantizeLinear, in its order.

    Args:
        model: with pairs.
        on_cpus: whether kernels of CPUs compute it.
    """
    return tuple(_read(Graph(model), on_cpus))


def _read(graph: Graph, on_cpus: bool) -> Iterator[StoredWeight]:
    for node in graph.nodes:
        pair = graph.producer.get(node.input[1]) if node.op_type in WEIGHTED else None
        if pair is None or pair.op_type != "DequantizeLinear":
            continue
        before = graph.producer.get(pair.input[0])  # of weights that are quantized on their way
        name = pair.input[0] if before is None else before.input[0]
        if name in graph.constants:
            array = numpy_helper.to_array(graph.constants[name])
            rows, real = channel_rows(array, node), before is not None
            scales = numpy_helper.to_array(graph.constants[pair.input[1]])
            pairs = largest_pairs(array, node) if on_cpus and not real else None
            yield stored_weight(node.name, node.op_type, rows, scales, real=real, pairs=pairs)
