"""Fold nodes that scale and shift each channel into the layer before them, in float64.

These are BatchNormalization, and Mul, Div, Add and Sub with one constant per channel or a single
one, as Paddle exports have after Conv, ConvTranspose and Gemm:

    (conv(x, W) + b) * s + t  =  conv(x, W s) + (b s + t)     for each output channel
    BatchNormalization: s = gamma / sqrt(var + epsilon), t = beta - mean s

The layer then produces the folded node's output, under its name. Between the two there may be nodes
that only move values, or a Concat of several layers, each of which takes its own channels::

    Conv [N, C, 1, T] -- Squeeze(2) [N, C, T] -- Add [C, 1]             Conv1D of Keras
    Conv [N, C, H, W] -- Transpose(0, 2, 3, 1) [N, H, W, C] -- Add [C]  an NHWC model
    Conv, Conv -- Concat [N, C + D, H, W] -- BatchNormalization         YOLOv5's CSP, MixNet

The last of these nodes then produces the folded output; tensors before it, whose values changed,
get new names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from deploy.frontends.checks import to_array
from deploy.graph.edit import claim_name, set_input, unique_name
from deploy.graph.index import (
    ONNX_DOMAINS,
    Nodes,
    attributes,
    by_name,
    channel_axis,
    count_reads,
    group_count,
    map_producers,
    optional_input,
)
from deploy.graph.rewrite import CannotRewrite, RewriteRule, apply_rule

MOVES = frozenset({"Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class MovedLayer:
    """A layer, and the moves between it and a tensor.

    Attributes:
        layer: produces the input of the first move.
    """

    layer: onnx.NodeProto
    moves: tuple[onnx.NodeProto, ...] = ()

    def channel_layout(
        self, rank: int, constants: Mapping[str, onnx.TensorProto]
    ) -> tuple[int, int]:
        """Return (axis of the channels, number of dimensions) of the tensor after the moves.

        Args:
            rank: number of dimensions of the layer's output, whose channels are on axis 1.
            constants: hold the axes of Squeeze and Unsqueeze.

        Raises:
            CannotRewrite: the axis is unknown.
        """
        # for each axis after the moves, the axis of the layer's output that it comes from
        layer_axes: list[int | None] = list(range(rank))
        for node in self.moves:
            layer_axes = _follow_axes(node, layer_axes, constants)
        if 1 not in layer_axes:
            raise CannotRewrite("a Squeeze removes the axis of the channels")
        return layer_axes.index(1), len(layer_axes)


@dataclass(frozen=True, slots=True)
class JoinedLayers:
    """One layer, or several whose channels a Concat joins, with their moves.

    Attributes:
        parts: in the order of their channels.
        concat: None for one layer.
    """

    parts: tuple[MovedLayer, ...]
    concat: onnx.NodeProto | None = None

    @property
    def nodes(self) -> Nodes:
        """All nodes; the last one produces the tensor."""
        nodes: Nodes = []
        for part in self.parts:
            nodes += (part.layer, *part.moves)
        if self.concat is not None:
            nodes.append(self.concat)
        return nodes

    def links(self) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto, int]]:
        """Yield (node, the node that reads it, at which input) for all nodes but the last."""
        for index, part in enumerate(self.parts):
            node = part.layer
            for move in part.moves:
                yield node, move, 0
                node = move
            if self.concat is not None:
                yield node, self.concat, index

    def channel_layout(
        self, ranks: Sequence[int], constants: Mapping[str, onnx.TensorProto]
    ) -> tuple[int, int]:
        """Return (axis of the channels, number of dimensions) of the joined tensor.

        Args:
            ranks: number of dimensions of each layer's output, in the order of the parts.
            constants: hold the axes of Squeeze and Unsqueeze.

        Raises:
            CannotRewrite: the axis of a part is unknown, or the Concat is along another axis.
        """
        layouts = set()
        for part, layer_rank in zip(self.parts, ranks, strict=True):
            layouts.add(part.channel_layout(layer_rank, constants))
        axis, rank = next(iter(layouts))  # of one of the parts: all must be equal
        concat_axis = axis if self.concat is None else attributes(self.concat).get("axis", axis)
        is_along_channels = concat_axis in (axis, axis - rank)  # it may count from the end
        if len(layouts) > 1 or not is_along_channels:
            raise CannotRewrite("the Concat is not along the channels")
        return axis, rank


def _follow_axes(
    node: onnx.NodeProto, layer_axes: list[int | None], constants: Mapping[str, onnx.TensorProto]
) -> list[int | None]:
    """Follow the axes of a layer's output through a Transpose, Squeeze or Unsqueeze.

    Args:
        node: one of these.
        layer_axes: an entry for each axis of the node's input: the axis of the layer's output that
            it comes from; None if it was inserted.
        constants: hold the axes of Squeeze and Unsqueeze.

    Returns:
        An entry for each axis of the node's output, likewise.
    """
    rank = len(layer_axes)
    if node.op_type == "Transpose":
        order = attributes(node).get("perm", range(rank)[::-1])  # without a perm, it reverses them
        if sorted(order) != list(range(rank)):
            raise CannotRewrite("its permutation does not fit")
        return [layer_axes[position] for position in order]

    changed_axes = _read_axes(node, constants)
    if node.op_type == "Unsqueeze":  # its axes are numbered as in its output
        rank += len(changed_axes)
    if not all(-rank <= axis < rank for axis in changed_axes):
        raise CannotRewrite("its axes do not fit")
    changed_positions = {axis % rank for axis in changed_axes}

    output_axes = list(layer_axes)
    if node.op_type == "Squeeze":
        for position in sorted(changed_positions, reverse=True):
            del output_axes[position]
    else:
        for position in sorted(changed_positions):
            output_axes.insert(position, None)
    return output_axes


def _read_axes(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Sequence[int]:
    """Return the axes of a Squeeze or Unsqueeze, an attribute before opset 13."""
    if len(node.input) == 2 and node.input[1] in constants:
        return list(map(int, to_array(constants[node.input[1]]).reshape(-1)))
    axes: Sequence[int] | None = attributes(node).get("axes")
    if axes is None:
        raise CannotRewrite("its axes are not constant")
    return axes


Affine = tuple[NDArray[np.float64], NDArray[np.float64]]  # [C] scale, [C] shift

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
NORM = "BatchNormalization"


def fold_affine(graph: onnx.GraphProto, *, excluded: Collection[str] = ()) -> Counter[str]:
    """Fold BatchNormalization, Mul, Div, Add and Sub nodes into the layers before them, in place.

    A node is folded if it scales and shifts each channel by constants. It stays if its input is not
    the output of a layer (or several joined layers) with constant weights, or if that input has
    other readers.

    Args:
        graph: with unique node names if `excluded` is given.
        excluded: names of nodes that are not folded.

    Returns:
        Operator -> number of nodes that were folded.
    """
    affine_fold = _AffineFold(graph)
    rule: RewriteRule[None] = RewriteRule(
        pattern=lambda node: node.name not in excluded,
        rewrite=lambda node, _: affine_fold.fold(node),
    )
    apply_rule(graph, rule, scope=None)  # `affine_fold` knows the graph
    return affine_fold.fold_counts


class _AffineFold:
    """Folds nodes into the layers of one graph, which change in place.

    Attributes:
        initializers: name -> initializer.
        read_counts: tensor -> number of reads.
        producers: tensor -> the node that makes it.
        names: names of all tensors.
        new_names: names given here to tensors whose values changed.
        fold_counts: type -> number of nodes that were folded.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.initializers: dict[str, onnx.TensorProto] = by_name(graph.initializer)
        self.read_counts = count_reads(graph)
        self.producers = map_producers(graph.node)
        self.names = {*self.initializers, *self.read_counts, *self.producers}
        self.new_names: set[str] = set()
        self.fold_counts: Counter[str] = Counter()

    def fold(self, node: onnx.NodeProto) -> Nodes:
        """Fold a node into the layers that make its input; return []: no node takes its place.

        Raises:
            CannotRewrite: the folded layers would not compute exactly the same.
        """
        joined = self._find_layers(self._varying_input(node))
        # a negative variance or a huge gamma gives NaN or Inf, which `_fold_layers` refuses
        with np.errstate(all="ignore"):
            weights_and_biases = self._fold_layers(joined, node)

        for part, (weight, bias) in zip(joined.parts, weights_and_biases, strict=True):
            self._store(part.layer, weight, bias, f"{node.output[0]}_bias")
        self._rename_tensors(joined, node.output[0])
        for renamed_node in joined.nodes:  # index the new names for the next node to fold
            self.producers[renamed_node.output[0]] = renamed_node
        self.fold_counts[node.op_type] += 1
        return []

    def _varying_input(self, node: onnx.NodeProto) -> str:
        """Return the tensor that an affine node scales and shifts; "" for any other node."""
        if node.domain not in ONNX_DOMAINS:
            return ""
        if node.op_type == NORM:
            return str(node.input[0])
        if node.op_type not in _ARITHMETIC or len(node.input) != 2:
            return ""
        left, right = node.input
        if right in self.initializers:
            return str(left)
        is_commutative = node.op_type in ("Mul", "Add")
        return str(right) if is_commutative and left in self.initializers else ""

    def _find_layers(self, tensor: str) -> JoinedLayers:
        """Return the layers that produce a tensor: one, or all inputs of a Concat."""
        concat = self.producers.get(tensor)
        if concat is None or concat.op_type != "Concat":
            return JoinedLayers((self._find_layer(tensor),))
        if self.read_counts[tensor] != 1:
            raise CannotRewrite("the joined tensor has other readers")
        return JoinedLayers(tuple(map(self._find_layer, concat.input)), concat)

    def _find_layer(self, tensor: str) -> MovedLayer:
        """Return the layer that makes a tensor, with the moves after it; each has one reader."""
        moves: Nodes = []
        node = self.producers.get(tensor)
        while node is not None and self.read_counts[node.output[0]] == 1:
            if node.op_type in _LAYERS:
                return MovedLayer(node, tuple(moves))
            if node.op_type not in MOVES:
                break
            moves.insert(0, node)
            node = self.producers.get(node.input[0])
        raise CannotRewrite("no layer without other readers makes its input")

    def _fold_layers(
        self, joined: JoinedLayers, node: onnx.NodeProto
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return (new weight, new bias) of each layer, after an affine node is folded into them.

        Args:
            joined: the layers.
            node: the BatchNormalization, Mul, Div, Add or Sub.

        Raises:
            CannotRewrite: the folded layers would not compute exactly the same.
        """
        layers = [part.layer for part in joined.parts]
        weights = []
        biases = []
        channel_counts = []
        for layer in layers:
            weight = _float_constant(self.initializers, layer.input[1])
            bias_name = optional_input(layer, 2)
            bias = _float_constant(self.initializers, bias_name) if bias_name else None
            weights.append(weight)
            biases.append(bias)
            channel_counts.append(_count_channels(layer, weight))

        ranks = [weight.ndim for weight in weights]  # a layer's output has the rank of its weight
        axis, rank = joined.channel_layout(ranks, self.initializers)
        scale, shift = _read_affine(node, self.initializers, sum(channel_counts), axis, rank)
        # each layer gets the scales and shifts of its own channels
        boundaries = np.cumsum(channel_counts)[:-1]
        scales = np.split(scale, boundaries)
        shifts = np.split(shift, boundaries)
        return list(map(_fold_layer, layers, weights, biases, scales, shifts))

    def _store(
        self, layer: onnx.NodeProto, weight: NDArray[Any], bias: NDArray[Any], new_bias_name: str
    ) -> None:
        """Give a layer its weight and bias.

        `new_bias_name`: for a layer that had no bias; numbered if the name is taken, as by another
        of the joined layers.
        """
        self._set_constant(layer, 1, weight, layer.input[1])
        bias_name = optional_input(layer, 2) or unique_name(new_bias_name, self.initializers)
        self._set_constant(layer, 2, bias, bias_name)
        for attribute in layer.attribute:
            if attribute.name == "beta":  # of a Gemm: the new bias includes it
                attribute.f = 1.0

    def _set_constant(
        self, layer: onnx.NodeProto, index: int, array: NDArray[Any], name: str
    ) -> None:
        """Set an input of a layer to `array`; a tensor with other readers keeps its values."""
        # an initializer is added for a new bias, or if another node reads the old one too
        if self.read_counts[name] != 1 or name not in self.initializers:
            name = claim_name(name, self.names)
            self.initializers[name] = self.graph.initializer.add()
        self.initializers[name].CopyFrom(numpy_helper.from_array(array, name))
        self.read_counts[name] = 1
        set_input(layer, index, name)

    def _rename_tensors(self, joined: JoinedLayers, last_output: str) -> None:
        """Give the last node's output the folded node's name, and tensors before it new names.

        These hold other values than the tensors of the same name in the user's model.
        """
        for node, reader, index in joined.links():
            if node.output[0] not in self.new_names:  # else from an earlier call
                name = claim_name(f"{node.output[0]}_folded", self.names)
                self.read_counts[name] = 1
                self.new_names.add(name)
                node.output[0] = reader.input[index] = name
        joined.nodes[-1].output[0] = last_output


def _fold_layer(
    layer: onnx.NodeProto,
    weight: NDArray[Any],
    bias: NDArray[Any] | None,
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the layer's new weight and bias, which must be finite."""
    new_bias = _scale_bias(layer, bias, scale, shift).astype(weight.dtype)
    new_weight = _scale_weight(layer, weight, scale).astype(weight.dtype)
    if not (np.isfinite(new_weight).all() and np.isfinite(new_bias).all()):
        raise CannotRewrite("the folded values are not finite")
    return new_weight, new_bias


def _read_affine(
    node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], channels: int, axis: int, rank: int
) -> Affine:
    """Return (scale, shift), both [channels], by which a node computes x * scale + shift.

    Args:
        node: a BatchNormalization, Mul, Div, Add or Sub, whose other input is a constant; that of a
            Div or Sub is the second one (`_AffineFold._varying_input`).
        weights: name -> initializer.
        channels: number of the channels of x.
        axis: of the channels in x.
        rank: number of dimensions of x.

    Raises:
        CannotRewrite: the node has not one constant value per channel.
    """
    if node.op_type == NORM:
        if axis != 1:  # a BatchNormalization always has its channels on axis 1
            raise CannotRewrite("its channels are not those of the layer")
        return _read_norm(node, weights, channels)
    constant_name = next(name for name in node.input if name in weights)
    array = _float_constant(weights, constant_name).astype(np.float64)
    values = _broadcast_to_channels(array, channels, axis, rank)
    ones = np.ones(channels)
    zeros = np.zeros(channels)
    if node.op_type == "Mul":
        return values, zeros
    if node.op_type == "Div":
        return 1 / values, zeros
    if node.op_type == "Add":
        return ones, values
    return ones, -values  # a Sub


def _broadcast_to_channels(
    values: NDArray[np.float64], channels: int, axis: int, rank: int
) -> NDArray[np.float64]:
    """Return [C] of a constant that broadcasts along `axis` only."""
    channel_shape = [1] * rank
    channel_shape[axis] = channels
    try:
        return np.broadcast_to(values, channel_shape).reshape(-1)
    except ValueError as error:
        raise CannotRewrite("a constant has not one value per channel") from error


def _read_norm(norm: onnx.NodeProto, weights: dict[str, onnx.TensorProto], channels: int) -> Affine:
    """Return scale and shift of an inference BatchNormalization with constant parameters."""
    attrs = attributes(norm)
    if attrs.get("training_mode", 0) or any(norm.output[1:]) or len(norm.input) != 5:
        raise CannotRewrite("it is in training mode")
    parameters = [_float_constant(weights, name).astype(np.float64) for name in norm.input[1:]]
    if any(parameter.shape != (channels,) for parameter in parameters):
        raise CannotRewrite("its parameters have not one value per channel")
    gamma, beta, mean, variance = parameters
    scale = gamma / np.sqrt(variance + attrs.get("epsilon", 1e-5))
    return scale, beta - mean * scale


def _count_channels(layer: onnx.NodeProto, weight: NDArray[Any]) -> int:
    """Return a layer's number of output channels."""
    group = weight_groups(layer)
    if weight.ndim < 2 or group < 1 or len(weight) % group:
        raise CannotRewrite("its weight has an impossible shape")
    return int(weight.shape[channel_axis(layer, weight.ndim)]) * group


def weight_groups(layer: onnx.NodeProto) -> int:
    """Return the groups in a ConvTranspose's weight, [I, O/group, ...]; 1 for any other layer."""
    return group_count(layer) if layer.op_type == "ConvTranspose" else 1


def _float_constant(weights: dict[str, onnx.TensorProto], name: str) -> NDArray[Any]:
    """Return the array of a float constant."""
    if name not in weights:
        raise CannotRewrite("a weight or parameter is not constant")
    array = to_array(weights[name])
    if array.dtype not in (np.float32, np.float64):
        raise CannotRewrite("a weight or parameter is not float")
    return array


def _scale_weight(
    layer: onnx.NodeProto, weight: NDArray[Any], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return a layer's weight with each output channel multiplied by its value of `scale`, [C]."""
    # Weight and scale get an axis of groups in front: each group of a ConvTranspose has channels of
    # its own. The other axes of the scale, except that of the output channels, are 1.
    group = weight_groups(layer)
    grouped_weight = weight.reshape(group, len(weight) // group, *weight.shape[1:])
    scale_shape = [group, *[1] * weight.ndim]
    scale_shape[1 + channel_axis(layer, weight.ndim)] = -1
    return (grouped_weight * scale.reshape(scale_shape)).reshape(weight.shape)


def _scale_bias(
    layer: onnx.NodeProto,
    bias: NDArray[Any] | None,
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the folded layer's bias, [C]: bias * scale + shift.

    Args:
        layer: the layer.
        bias: its bias before folding; None if it has none.
        scale: [C].
        shift: [C].

    Raises:
        CannotRewrite: the bias has not one value per channel.
    """
    if bias is None:
        return shift
    if layer.op_type == "Gemm":  # a Gemm multiplies its bias by beta, and broadcasts it
        bias = bias.astype(np.float64) * attributes(layer).get("beta", 1.0)
        bias = _broadcast_to_channels(bias, len(shift), axis=1, rank=2)
    if bias.shape != shift.shape:
        raise CannotRewrite("the bias has not one value per channel")
    return bias * scale + shift
