"""Dynamic quantization of MatMuls: the activation scale is computed at run time for each input.

The activations of an attention model differ from token to token and from input to input; a fixed
range for all of them can cost more accuracy than computing it at run time costs time::

    x --> DynamicQuantizeLinear --> MatMulInteger (int8 weights per column) --> Cast --> Mul --> y
                    '------------ scale of x * scale of each column ---------------------'

ONNX Runtime fuses these into one kernel (DynamicQuantizeMatMul, or MatMulIntegerToFloat if several
MatMuls read x).

Source: ONNX operators DynamicQuantizeLinear-11 and MatMulInteger-10.
"""

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calibrators.grids import Grid, quantize_weight
from deploy.graph.edit import copy_message, make_node, rebuild
from deploy.graph.index import FLOAT, Graph, Nodes, by_name
from deploy.targets.stored_weights import compute_weight_scales, may_saturate


def find_dynamic_matmuls(model: onnx.ModelProto, float_nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the MatMuls of a float32 tensor and a constant float32 weight [K, N], by name."""
    graph = Graph(model)
    excluded = frozenset(float_nodes)
    names = []
    for node in graph.nodes:
        if node.name not in excluded and _has_constant_weight(graph, node):
            names.append(node.name)
    return tuple(names)


def _has_constant_weight(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node is a MatMul of a float32 tensor and a constant float32 weight [K, N]."""
    if node.op_type != "MatMul":
        return False
    source = node.input[0]
    weight = graph.initializers.get(node.input[1])
    if weight is None or weight.name in graph.outputs or source in graph.initializers:
        return False
    return weight.data_type == FLOAT and len(weight.dims) == 2 and graph.is_float(source)


def write_dynamic(
    model: onnx.ModelProto, names: Iterable[str], grid: Grid, *, fits_pairs: bool
) -> onnx.ModelProto:
    """Return a copy whose MatMuls of these names are dynamically quantized.

    Args:
        model: with or without Q/DQ pairs, opset 11 or later.
        names: of the MatMuls, from `find_dynamic_matmuls` for the model without pairs.
        grid: integer grid of the weights.
        fits_pairs: choose weight scales at which no x86 CPU saturates sums of two products.

    Raises:
        CalibrationError: a weight holds NaN or Inf.
    """
    quantized = copy_message(model)
    initializers = by_name(quantized.graph.initializer)
    dynamic_names = frozenset(names)
    nodes: Nodes = []
    quantized_tensors: set[str] = set()  # activations and weights, which several nodes may read
    for node in quantized.graph.node:
        if node.name not in dynamic_names:
            nodes.append(node)
            continue
        source, weight = node.input
        if weight not in quantized_tensors:
            fits_pairs_of = node if fits_pairs else None
            integers_and_scales = _store_weight(initializers[weight], grid, fits_pairs_of)
            quantized.graph.initializer.extend(integers_and_scales)
        if source not in quantized_tensors:
            nodes.append(_quantize_node(source))
        quantized_tensors |= {source, weight}
        nodes += _product_nodes(node, source, weight)
    rebuild(quantized.graph, nodes)
    return quantized


def find_saturating_products(model: onnx.ModelProto) -> list[str]:
    """Return the names of the integer MatMuls of `write_dynamic` whose weights `may_saturate`."""
    constants = Graph(model).initializers
    products = []
    for node in model.graph.node:
        if node.op_type != "MatMulInteger" or node.input[1] not in constants:
            continue
        if may_saturate(numpy_helper.to_array(constants[node.input[1]]), node):
            products.append(node.name)
    return products


def _store_weight(
    weight: onnx.TensorProto, grid: Grid, fits_pairs_of: onnx.NodeProto | None
) -> list[onnx.TensorProto]:
    """Return the integers [K, N] and the float32 scales [N] of a float32 weight [K, N]."""
    scales = compute_weight_scales(weight, 1, grid, fits_pairs_of=fits_pairs_of)
    integers = quantize_weight(numpy_helper.to_array(weight), scales, 1, grid=grid)
    return [
        numpy_helper.from_array(np.ascontiguousarray(integers), f"{weight.name}/dynamic/quantized"),
        numpy_helper.from_array(np.ascontiguousarray(scales), f"{weight.name}/dynamic/scale"),
    ]


def _quantize_node(source: str) -> onnx.NodeProto:
    outputs = [f"{source}/dynamic/{suffix}" for suffix in ("quantized", "scale", "zero_point")]
    return helper.make_node("DynamicQuantizeLinear", [source], outputs, name=f"{source}/dynamic/Q")


def _product_nodes(node: onnx.NodeProto, source: str, weight: str) -> Nodes:
    """Return the integer product of a MatMul and its dequantization."""
    activation = f"{source}/dynamic"
    stored = f"{weight}/dynamic"
    name = f"{node.name}/dynamic"
    integers = [f"{activation}/quantized", f"{stored}/quantized", f"{activation}/zero_point"]
    scales = [f"{activation}/scale", f"{stored}/scale"]
    scale, total, real = (f"{name}/{suffix}" for suffix in ("scale", "sum", "real"))
    return [
        make_node("Mul", scales, scale, f"{name}/Scale"),
        make_node("MatMulInteger", integers, total, f"{name}/Product"),
        make_node("Cast", [total], real, f"{name}/Cast", to=FLOAT),
        make_node("Mul", [real, scale], node.output[0], node.name),
    ]
