"""Weights that are stored as integers, in a model that computes in float: they become float ones.

::

    int8 w --> DequantizeLinear --> Conv     becomes     float32 w --> Conv

There is one scale, one a channel, or one a block of values along an axis. A model that quantizes
what it computes as well says its ranges itself (`deploy.frontends.from_pairs`).

Source: ONNX operator DequantizeLinear-21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.frontends.checks import is_quantized_node, to_array
from deploy.graph.edit import free_inputs, rebuild, replace
from deploy.graph.index import Graph, all_nodes, all_read, attributes

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_DEQUANTIZE = "DequantizeLinear"


def restore(model: onnx.ModelProto) -> str | None:
    """Let weights be float where all that is quantized are these, in place; says what was done.

    Raises:
        ModelError: the stored bytes do not fit the shape and type of a constant.
    """
    from onnx import numpy_helper

    quantized = [node for node in all_nodes(model.graph) if is_quantized_node(node)]
    if not quantized or any(node.op_type != _DEQUANTIZE for node in quantized):
        return None
    free_inputs(model.graph)
    graph = Graph(model)
    own = {id(node) for node in graph.nodes}
    made = []
    for node in quantized:
        values = _values(node, graph) if id(node) in own else None
        if values is None or node.output[0] in graph.outputs:
            return None
        made.append(numpy_helper.from_array(values, node.output[0]))
    model.graph.initializer.extend(made)
    rebuild(model.graph, [node for node in graph.nodes if node.op_type != _DEQUANTIZE])
    read = all_read(model.graph)  # a weight may still be an input, of which nothing was left
    replace(model.graph.input, [value for value in model.graph.input if value.name in read])
    count = f"{len(made)} weight{'s' * (len(made) > 1)}"
    return f"Took {count} that {'are' if len(made) > 1 else 'is'} stored as integers as float ones."


def _values(node: onnx.NodeProto, graph: Graph) -> NDArray[Any] | None:
    """What a DequantizeLinear of constants gives; None of others, and of no integers."""
    names = [name for name in node.input if name]
    if not 2 <= len(names) <= 3 or any(name not in graph.constants for name in names):
        return None
    held = [to_array(graph.constants[name]) for name in names]
    codes, scale = held[0], held[1]
    if "int" not in codes.dtype.name or not np.issubdtype(scale.dtype, np.floating):
        return None
    given = attributes(node)
    axis, block = int(given.get("axis", 1)), int(given.get("block_size", 0))
    spread = (_spread(one, codes.shape, axis, block) for one in held[1:])
    grid = [one for one in spread if one is not None]
    if len(grid) < len(held) - 1:
        return None
    zero = grid[1].astype(np.int64) if len(grid) > 1 else 0
    own = (codes.astype(np.int64) - zero).astype(np.float32)
    return np.asarray(own * grid[0].astype(np.float32), scale.dtype)


def _spread(
    values: NDArray[Any], shape: tuple[int, ...], axis: int, block: int
) -> NDArray[Any] | None:
    """Scales or zero points as they lie over weights of a shape; None where they do not fit."""
    if values.size == 1:
        return values.reshape(())
    if not -len(shape) <= axis < len(shape):
        return None
    if block and values.ndim == len(shape):
        values = np.repeat(values, block, axis=axis)
        values = np.take(values, range(min(shape[axis], values.shape[axis])), axis=axis)
        return values if values.shape == shape else None
    if values.ndim != 1 or values.size != shape[axis]:
        return None
    return values.reshape([-1 if at == axis % len(shape) else 1 for at in range(len(shape))])
