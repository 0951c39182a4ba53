"""MatMuls whose activations get their scale from each input as it comes, not from calibration.

The activations of an attention model differ from token to token and from input to input, and one
range for all of them costs more accuracy than finding it anew costs time::

    x --> DynamicQuantizeLinear --> MatMulInteger (int8 weights per column) --> Cast --> Mul --> y
                    '------------ scale of x * scale of each column ---------------------'

ONNX Runtime makes one kernel of these (DynamicQuantizeMatMul, or MatMulIntegerToFloat where more
than one MatMul reads x).

Source: ONNX operators DynamicQuantizeLinear-11 and MatMulInteger-10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calibrators.grids import Grid, quantize_weight
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph
from deploy.targets.stored import StoredWeight, largest_pairs, scales_of, stored_weight

_FLOAT = onnx.TensorProto.FLOAT


def dynamic_matmuls(model: onnx.ModelProto, float_nodes: Iterable[str]) -> tuple[str, ...]:
    """Names of the MatMuls of a float32 tensor and constant float32 weights [K, N]."""
    graph, kept = Graph(model), frozenset(float_nodes)
    return tuple(
        node.name
        for node in graph.nodes
        if node.op_type == "MatMul" and node.name not in kept and _fits(graph, node)
    )


def _fits(graph: Graph, node: onnx.NodeProto) -> bool:
    weight = graph.initializers.get(node.input[1])
    if weight is None or weight.name in graph.outputs or node.input[0] in graph.initializers:
        return False
    return weight.data_type == _FLOAT and len(weight.dims) == 2 and graph.is_float(node.input[0])


def write_dynamic(
    model: onnx.ModelProto, names: Iterable[str], grid: Grid, *, fits_pairs: bool = True
) -> onnx.ModelProto:
    """Put integer MatMuls in place of those named; `model` is left as it is.

    Args:
        model: with pairs or without, opset 11 or later.
        names: of `dynamic_matmuls` for the model without pairs.
        grid: integers of the weights.
        fits_pairs: whether no CPU is to saturate their products.

    Raises:
        CalibrationError: a weight holds NaN or Inf.
    """
    out = copied(model)
    held = {tensor.name: tensor for tensor in out.graph.initializer}
    chosen = frozenset(names)
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()  # tensors quantized, weights stored
    for node in out.graph.node:
        if node.name not in chosen:
            nodes.append(node)
            continue
        source, weight = str(node.input[0]), str(node.input[1])
        if weight not in done:
            fits = node if fits_pairs else None
            out.graph.initializer.extend(_stored(held[weight], grid, fits))
        if source not in done:
            nodes.append(_quantized(source))
        done |= {source, weight}
        nodes += _multiplied(node, source, weight)
    rebuild(out.graph, nodes)
    return out


def dynamic_weights(model: onnx.ModelProto) -> Iterator[StoredWeight]:
    """The weights of the integer MatMuls that `write_dynamic` put into a model."""
    held = Graph(model).initializers
    for node in model.graph.node:
        scale = node.input[1].removesuffix("quantized") + "scale" if len(node.input) > 1 else ""
        if node.op_type == "MatMulInteger" and node.input[1] in held and scale in held:
            array, scales = (numpy_helper.to_array(held[name]) for name in (node.input[1], scale))
            name = node.name.removesuffix("/dynamic/Product")
            pairs = largest_pairs(array, node)
            yield stored_weight(name, "MatMul", array.T, scales, pairs=pairs)


def _stored(
    weight: onnx.TensorProto, grid: Grid, fits: onnx.NodeProto | None
) -> list[onnx.TensorProto]:
    """[K, N] float32 -> integers of that shape, and float32 scales [N]."""
    scales = scales_of(weight, 1, grid, fits=fits)
    integers = quantize_weight(numpy_helper.to_array(weight), scales, 1, grid=grid)
    return [
        numpy_helper.from_array(np.ascontiguousarray(values), f"{weight.name}/dynamic/{end}")
        for values, end in ((integers, "quantized"), (scales, "scale"))
    ]


def _quantized(source: str) -> onnx.NodeProto:
    outputs = [f"{source}/dynamic/{end}" for end in ("quantized", "scale", "zero_point")]
    return helper.make_node("DynamicQuantizeLinear", [source], outputs, name=f"{source}/dynamic/Q")


def _multiplied(node: onnx.NodeProto, source: str, weight: str) -> list[onnx.NodeProto]:
    """The integer product of a MatMul, in real units again."""
    a, b, name = f"{source}/dynamic", f"{weight}/dynamic", f"{node.name}/dynamic"
    integers = [f"{a}/quantized", f"{b}/quantized", f"{a}/zero_point"]
    both, total, real = (f"{name}/{end}" for end in ("scale", "sum", "real"))
    return [
        helper.make_node("Mul", [f"{a}/scale", f"{b}/scale"], [both], name=f"{name}/Scale"),
        helper.make_node("MatMulInteger", integers, [total], name=f"{name}/Product"),
        helper.make_node("Cast", [total], [real], name=f"{name}/Cast", to=_FLOAT),
        helper.make_node("Mul", [real, both], [node.output[0]], name=node.name),
    ]
