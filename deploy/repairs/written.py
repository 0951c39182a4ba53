"""What a target's int8 model does to a layer's weight and input, read from the model itself.

::

    Q/DQ          x -> Q -> DQ -.
                                 Conv                 integers and scales stand in the pairs
                  w -> [Q] -> DQ'
    fake quant    x -> Mul -> Round -> Add -> Clip -> Sub -> Conv -> [Add] -> Mul
                    1/scale_d                                         scale_d scale_w

So a repair sees the grids of any target that gives one of these two forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import FP8, INT8, Grid, rounded
from deploy.graph.index import Graph, attributes
from deploy.tuning.repairs.repair_layers import Layer

if TYPE_CHECKING:
    import onnx

FloatArray = NDArray[np.float64]

_HALF = 0.5001  # of a step, and what float32 scales leave
_QUANT = ("Sub", "Clip", "Add", "Round", "Mul")  # from a fake-quantized layer's input backwards


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A layer of the int8 model.

    Attributes:
        weight: scales to divide its weight by, shaped to broadcast over the float form.
        input: scale of its input, and the integer of a real 0.
        low, high: least and greatest stored value of the input.
        grid: whose rule rounds both.
        nearest: whether its weight is rounded to nearest; AMCT's AdaRound does not, and what it
            found is left as it is.
    """

    weight: FloatArray
    input: float
    zero: int
    low: float
    high: float
    grid: Grid = INT8
    nearest: bool = True

    def weights(self, layer: Layer) -> FloatArray:
        """What is left of a layer's weight, in ONNX layout."""
        steps = rounded(layer.array / self.weight, self.grid)
        return np.asarray(steps * self.weight, np.float64)

    def inputs(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """What is left of input values."""
        steps = np.asarray(values, np.float32) / np.float32(self.input)
        steps = rounded(steps, self.grid) + np.float32(self.zero)
        clipped = np.clip(steps, self.low, self.high) - self.zero
        return np.asarray(clipped * np.float32(self.input), np.float32)


def written_in(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    """How an int8 model has a layer.

    Args:
        graph: of the int8 model.
        node: the layer's in it.
        layer: in the float model.

    Returns:
        None where the node does not run in integers, or in a form that is not known.
    """
    weight, source = graph.producer.get(node.input[1]), graph.producer.get(node.input[0])
    if source is None:
        return None
    if weight is None:
        return _of_fake_quant(graph, node, layer)
    if weight.op_type == source.op_type == "DequantizeLinear":
        return _of_pairs(graph, node, layer)
    return None


def _of_pairs(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    from onnx import TensorProto

    source, weight = (graph.producer[name] for name in node.input[:2])
    scales = _array(graph, weight.input[1]).astype(np.float64)
    rank = layer.array.ndim
    axis = int(attributes(weight).get("axis", 1)) if scales.size > 1 else -1
    if (node.op_type, layer.kind) == ("Conv", "ConvTranspose"):  # once for each pixel of a tile
        axis = 1
    if scales.size > 1:
        scales = scales[: layer.outputs]  # without channels that are zero
    zero = _array(graph, source.input[2])
    step = _array(graph, source.input[1])
    if step.size != 1:
        return None
    fp8 = graph.constants[source.input[2]].data_type == TensorProto.FLOAT8E4M3FN
    low, high = (
        (FP8.qmin, FP8.qmax) if fp8 else (np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max)
    )
    return Written(
        weight=scales.reshape([-1 if a == axis else 1 for a in range(rank)]),
        input=float(step.reshape(-1)[0]),
        zero=int(zero.reshape(-1)[0]),
        low=float(low),
        high=float(high),
        grid=FP8 if fp8 else INT8,
    )


def _of_fake_quant(graph: Graph, node: onnx.NodeProto, layer: Layer) -> Written | None:
    chain = _back(graph, node)
    after = _only_reader(graph, node.output[0])
    if after is not None and after.op_type == "Add":
        after = _only_reader(graph, after.output[0])
    if chain is None or after is None or after.op_type != "Mul":
        return None
    _, clip, add, _, mul = chain
    if mul.input[0].endswith(".mul.output0"):  # balanced by DMQ: other weights are rounded
        return None
    inverse = float(_array(graph, mul.input[1]))
    scales = _array(graph, after.input[1]).astype(np.float64).reshape(-1) * inverse
    if scales.size not in (1, layer.outputs):
        return None
    groups = layer.by_channel.shape[0]
    columns = np.broadcast_to(scales, layer.outputs).reshape(groups, -1, 1, 1)
    wide = layer.from_channels(np.ones(layer.by_channel.shape) * columns).astype(np.float64)
    return Written(
        weight=wide,
        input=1 / inverse,
        zero=int(_array(graph, add.input[1])),
        low=int(_array(graph, clip.input[1])),
        high=int(_array(graph, clip.input[2])),
        nearest=_to_nearest(_array(graph, node.input[1]), layer, wide),
    )


def _to_nearest(codes: NDArray[Any], layer: Layer, scales: FloatArray) -> bool:
    """Whether each weight of this layer has its nearest code."""
    stored = codes.T if layer.turned else codes
    steps = np.clip(layer.array / scales, INT8.qmin, INT8.qmax)
    return bool(np.abs(steps - stored).max() < _HALF)


def _back(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that fake-quantize a layer's input, the last first; None for another form."""
    found: list[onnx.NodeProto] = []
    for op_type in _QUANT:
        maker = graph.producer.get((found[-1] if found else node).input[0])
        if maker is None or maker.op_type != op_type:
            return None
        found.append(maker)
    return found


def _only_reader(graph: Graph, tensor: str) -> onnx.NodeProto | None:
    readers = graph.readers.get(tensor, [])
    return readers[0] if len(readers) == 1 else None


def _array(graph: Graph, name: str) -> NDArray[Any]:
    from onnx import numpy_helper

    return np.asarray(numpy_helper.to_array(graph.constants[name]))


def all_written(
    int8: onnx.ModelProto, layers: tuple[Layer, ...]
) -> dict[str, tuple[Layer, Written]]:
    """The layers that an int8 model runs in integers, by name."""
    graph = Graph(int8)
    nodes = {node.name: node for node in graph.nodes}
    found = {
        layer.name: (layer, how)
        for layer in layers
        if layer.name in nodes and (how := written_in(graph, nodes[layer.name], layer)) is not None
    }
    return found
