"""BatchNormalization folded into the Conv, ConvTranspose or Gemm before it, in float64.

    y = (conv(x, W) + b - mean) / sqrt(var + epsilon) * gamma + beta  =  conv(x, W s) + b'
    with s = gamma / sqrt(var + epsilon) and b' = (b - mean) s + beta, for each output channel

The layer then gives the tensor that the BatchNormalization gave, under its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.frontends.checks import to_array
from deploy.frontends.graphs import replace_nodes, unused, users

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_INTO = ("Conv", "ConvTranspose", "Gemm")


def fold_batchnorm(graph: onnx.GraphProto) -> tuple[int, int]:
    """Fold what can be folded exactly, in place; counts (folded, left).

    A BatchNormalization stays where its input is not that of a layer with constant weights,
    or where something else needs that input too.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    counts = users(graph)
    makers = {name: node for node in graph.node for name in node.output if name}
    norms = [node for node in graph.node if node.op_type == "BatchNormalization"]
    folded = set()
    for norm in norms:
        layer = makers.get(norm.input[0])
        if layer is None or layer.op_type not in _INTO or counts[norm.input[0]] != 1:
            continue
        if _fold(graph, weights, counts, layer, norm):
            folded.add(norm.output[0])
            makers[norm.output[0]] = layer
    if folded:
        replace_nodes(graph, (node for node in graph.node if not _is_one_of(node, folded)))
    return len(folded), len(norms) - len(folded)


def _is_one_of(node: onnx.NodeProto, folded: set[str]) -> bool:
    return node.op_type == "BatchNormalization" and node.output[0] in folded


def _fold(
    graph: onnx.GraphProto,
    weights: dict[str, onnx.TensorProto],
    counts: dict[str, int],
    layer: onnx.NodeProto,
    norm: onnx.NodeProto,
) -> bool:
    """Fold one pair where that is exact; says whether it did."""
    names = (*layer.input[1:3], *norm.input[1:])
    arrays = [a for name in names if (a := _constant(weights, name)) is not None]
    if _trains(norm) or len(norm.input) != 5 or len(arrays) < len(names):
        return False
    if any(a.shape != arrays[-1].shape or a.ndim != 1 for a in arrays[-4:]):
        return False
    weight, bias = arrays[0], arrays[1] if _has_bias(layer) else None
    # A negative variance or a huge gamma gives NaN or Inf: then the layer is left as it was.
    with np.errstate(all="ignore"):
        scale, shift = _scale_and_shift(norm, *arrays[-4:])
        wide = (_scaled_weight(layer, weight, scale), _moved_bias(layer, bias, scale, shift))
        fresh = [a.astype(weight.dtype) for a in wide if a is not None]
    if len(fresh) < 2 or not all(np.isfinite(a).all() for a in fresh):
        return False
    _set(graph, weights, counts, layer, 1, fresh[0], layer.input[1])
    bias_name = layer.input[2] if _has_bias(layer) else f"{norm.output[0]}_bias"
    _set(graph, weights, counts, layer, 2, fresh[1], bias_name)
    for attribute in layer.attribute:
        if attribute.name == "beta":  # of a Gemm: it is in the new bias
            attribute.f = 1.0
    layer.output[0] = norm.output[0]
    return True


def _constant(weights: dict[str, onnx.TensorProto], name: str) -> NDArray[Any] | None:
    """The float32 array of that name; an empty one for an input that is not given."""
    if not name:
        return np.zeros(0, np.float32)
    array = to_array(weights[name]) if name in weights else None
    return array if array is not None and array.dtype in (np.float32, np.float64) else None


def _trains(norm: onnx.NodeProto) -> bool:
    mode = {a.name: a.i for a in norm.attribute}
    return bool(mode.get("training_mode", 0)) or len([o for o in norm.output if o]) > 1


def _has_bias(layer: onnx.NodeProto) -> bool:
    return len(layer.input) > 2 and bool(layer.input[2])


def _scale_and_shift(
    norm: onnx.NodeProto,
    gamma: NDArray[Any],
    beta: NDArray[Any],
    mean: NDArray[Any],
    variance: NDArray[Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[C] each: the normalization as y = x * scale + shift."""
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    return scale, beta - mean * scale


def _scaled_weight(
    layer: onnx.NodeProto, weight: NDArray[Any], scale: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The weight with each output channel times its scale; None where the shapes do not fit."""
    given = {a.name: a.i for a in layer.attribute}
    if layer.op_type == "Conv":  # [O, I/group, ...]
        fits = weight.ndim >= 2 and weight.shape[:1] == scale.shape
        return weight * scale.reshape(-1, *[1] * (weight.ndim - 1)) if fits else None
    if layer.op_type == "Gemm":  # [N, K] with transB, else [K, N]
        axis = 0 if given.get("transB", 0) else 1
        fits = weight.ndim == 2 and weight.shape[axis : axis + 1] == scale.shape
        return weight * (scale[:, None] if axis == 0 else scale) if fits else None
    group = given.get("group", 1)  # ConvTranspose: [I, O/group, ...], channel = group first
    if weight.ndim < 2 or group < 1 or weight.shape[0] % group:
        return None
    if scale.shape != (weight.shape[1] * group,):
        return None
    grouped = weight.reshape(group, -1, *weight.shape[1:])
    by_group = scale.reshape(group, 1, -1, *[1] * (weight.ndim - 2))
    return np.asarray(grouped * by_group, np.float64).reshape(weight.shape)


def _moved_bias(
    layer: onnx.NodeProto,
    bias: NDArray[Any] | None,
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> NDArray[np.float64] | None:
    """[C] bias of the folded layer; None where the old one is not one value per channel."""
    if bias is None:
        return shift
    if layer.op_type == "Gemm":
        beta = next((a.f for a in layer.attribute if a.name == "beta"), 1.0)
        bias = bias.astype(np.float64) * beta
        bias = np.broadcast_to(bias.reshape(-1), shift.shape) if bias.size == 1 else bias
        bias = bias.reshape(-1) if bias.ndim == 2 and bias.shape[0] == 1 else bias
    return bias * scale + shift if bias.shape == shift.shape else None


def _set(
    graph: onnx.GraphProto,
    weights: dict[str, onnx.TensorProto],
    counts: dict[str, int],
    layer: onnx.NodeProto,
    position: int,
    array: NDArray[Any],
    name: str,
) -> None:
    """Let an input of the layer be `array`; a tensor with other readers keeps its values."""
    from onnx import numpy_helper

    if counts[name] != 1 or name not in weights:
        name = unused(name, {*weights, *counts})
        weights[name] = graph.initializer.add()
    weights[name].CopyFrom(numpy_helper.from_array(array, name))
    counts[name] = 1
    while len(layer.input) <= position:
        layer.input.append("")
    layer.input[position] = name
