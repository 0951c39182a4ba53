"""Stored weights and biases of int8 Convs: finding them, and appending channels of zeros."""

import math
from collections.abc import Collection
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from deploy.graph.index import Graph, optional_input, padded_name

WEIGHT, BIAS = 1, 2  # input positions of a Conv


def constant_positions(node: onnx.NodeProto) -> list[int]:
    """Return the input positions of a Conv's weight and, if there is one, its bias."""
    return [position for position, name in enumerate(node.input) if position and name]


def stored_integers(graph: Graph, node: onnx.NodeProto, position: int) -> onnx.TensorProto | None:
    """Return the integers that a node reads through a DequantizeLinear, or None."""
    dequantize = graph.find_producer(optional_input(node, position), "DequantizeLinear")
    return None if dequantize is None else graph.initializers.get(dequantize.input[0])


def unshared_integers(
    graph: Graph, node: onnx.NodeProto, position: int = WEIGHT
) -> onnx.TensorProto | None:
    """Return the integers of a Conv's weight or bias, if no other node reads them."""
    integers = stored_integers(graph, node, position)
    return integers if graph.only_reader(node.input[position]) is not None else None


def append_zero_channels(
    model: onnx.ModelProto,
    graph: Graph,
    node: onnx.NodeProto,
    position: int,
    axes: Collection[int],
    count: int,
) -> None:
    """Append zeros to a Conv's weight or bias; their scales are those of the last channel.

    Args:
        model: gets the new constants.
        graph: its index, which learns them too.
        node: the Conv.
        position: `WEIGHT` or `BIAS`.
        axes: axes of the constant that get longer.
        count: number of zeros appended to each axis.
    """

    def pad(name: str, axes: Collection[int], mode: Literal["constant", "edge"]) -> str:
        """Add a padded copy of a constant; return its name."""
        values: NDArray[Any] = numpy_helper.to_array(graph.initializers[name])
        widths = np.zeros((values.ndim, 2), np.int64)  # of what stands before and after each axis
        widths[list(axes), 1] = count
        tensor = numpy_helper.from_array(np.pad(values, widths, mode), padded_name(name, node.name))
        model.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = tensor
        return tensor.name

    if node.input[position] in graph.initializers:
        node.input[position] = pad(node.input[position], axes, "constant")
        return
    dequantize = graph.producer[node.input[position]]
    integers, *params = dequantize.input
    dequantize.input[0] = pad(integers, axes, "constant")
    if 0 in axes:
        for index, name in enumerate(params, start=1):
            if math.prod(graph.initializers[name].dims) > 1:  # one for each channel
                dequantize.input[index] = pad(name, [0], "edge")
