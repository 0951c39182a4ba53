"""Dynamic quantization of MatMuls: the activation scale is computed at run time for each input.

The activations of an attention model differ from token to token and from input to input; a fixed
range for all of them can cost more accuracy than computing it at run time costs time::

    x --> DynamicQuantizeLinear --> MatMulInteger (int8 weights per column) --> Cast --> Mul --> y
                    '------------ scale of x * scale of each column ---------------------'

ONNX Runtime fuses these into one kernel (DynamicQuantizeMatMul, or MatMulIntegerToFloat if several
MatMuls read x).

Source: ONNX operators DynamicQuantizeLinear-11 and MatMulInteger-10.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calibrators.grids import Grid, quantize_weight
from deploy.graph.edit import copy_message, rebuild
from deploy.graph.index import Graph
from deploy.targets.stored_weights import (
    StoredWeight,
    compute_weight_scales,
    largest_pairs,
    make_stored_weight,
)

_FLOAT = onnx.TensorProto.FLOAT


def find_dynamic_matmuls(model: onnx.ModelProto, float_nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the MatMuls of a float32 tensor and a constant float32 weight [K, N], by name."""
    graph, excluded = Graph(model), frozenset(float_nodes)
    return tuple(
        node.name
        for node in graph.nodes
        if node.op_type == "MatMul" and node.name not in excluded and _fits(graph, node)
    )


def _fits(graph: Graph, node: onnx.NodeProto) -> bool:
    weight = graph.initializers.get(node.input[1])
    if weight is None or weight.name in graph.outputs or node.input[0] in graph.initializers:
        return False
    return weight.data_type == _FLOAT and len(weight.dims) == 2 and graph.is_float(node.input[0])


def write_dynamic(
    model: onnx.ModelProto, names: Iterable[str], grid: Grid, *, fits_pairs: bool = True
) -> onnx.ModelProto:
    """Return a copy whose MatMuls of these names are dynamically quantized.

    Args:
        model: with or without Q/DQ pairs, opset 11 or later.
        names: result of `find_dynamic_matmuls` for the model without pairs.
        grid: integer grid of the weights.
        fits_pairs: choose weight scales at which no x86 CPU saturates sums of two products.

    Raises:
        CalibrationError: a weight holds NaN or Inf.
    """
    out = copy_message(model)
    initializers = {tensor.name: tensor for tensor in out.graph.initializer}
    chosen = frozenset(names)
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()  # quantized activations and stored weights
    for node in out.graph.node:
        if node.name not in chosen:
            nodes.append(node)
            continue
        source, weight = str(node.input[0]), str(node.input[1])
        if weight not in done:
            fits = node if fits_pairs else None
            out.graph.initializer.extend(_stored(initializers[weight], grid, fits))
        if source not in done:
            nodes.append(_quantized(source))
        done |= {source, weight}
        nodes += _multiplied(node, source, weight)
    rebuild(out.graph, nodes)
    return out


def dynamic_weights(model: onnx.ModelProto) -> Iterator[StoredWeight]:
    """Yield the weights of the integer MatMuls that `write_dynamic` wrote."""
    constants = Graph(model).initializers
    for node in model.graph.node:
        scale = node.input[1].removesuffix("quantized") + "scale" if len(node.input) > 1 else ""
        if node.op_type != "MatMulInteger" or not {node.input[1], scale} <= constants.keys():
            continue
        array, scales = (numpy_helper.to_array(constants[name]) for name in (node.input[1], scale))
        name = node.name.removesuffix("/dynamic/Product")
        pairs = largest_pairs(array, node)
        yield make_stored_weight(name, "MatMul", array.T, scales, pairs=pairs)


def _stored(
    weight: onnx.TensorProto, grid: Grid, fits: onnx.NodeProto | None
) -> list[onnx.TensorProto]:
    """Return the integers [K, N] and the float32 scales [N] of a float32 weight [K, N]."""
    scales = compute_weight_scales(weight, 1, grid, fits=fits)
    integers = quantize_weight(numpy_helper.to_array(weight), scales, 1, grid=grid)
    return [
        numpy_helper.from_array(np.ascontiguousarray(values), f"{weight.name}/dynamic/{end}")
        for values, end in ((integers, "quantized"), (scales, "scale"))
    ]


def _quantized(source: str) -> onnx.NodeProto:
    outputs = [f"{source}/dynamic/{end}" for end in ("quantized", "scale", "zero_point")]
    return helper.make_node("DynamicQuantizeLinear", [source], outputs, name=f"{source}/dynamic/Q")


def _multiplied(node: onnx.NodeProto, source: str, weight: str) -> list[onnx.NodeProto]:
    """Return the integer product of a MatMul and its dequantization."""
    a, b, name = f"{source}/dynamic", f"{weight}/dynamic", f"{node.name}/dynamic"
    integers = [f"{a}/quantized", f"{b}/quantized", f"{a}/zero_point"]
    scale, total, real = (f"{name}/{end}" for end in ("scale", "sum", "real"))
    return [
        helper.make_node("Mul", [f"{a}/scale", f"{b}/scale"], [scale], name=f"{name}/Scale"),
        helper.make_node("MatMulInteger", integers, [total], name=f"{name}/Product"),
        helper.make_node("Cast", [total], [real], name=f"{name}/Cast", to=_FLOAT),
        helper.make_node("Mul", [real, scale], [node.output[0]], name=node.name),
    ]
