"""Where a layer's channels are behind nodes that only move values, or lay them side by side.

::

    Conv [N, C, 1, T] -- Squeeze(2) [N, C, T] -- Add [C, 1]             Conv1D of Keras
    Conv [N, C, H, W] -- Transpose(0, 2, 3, 1) [N, H, W, C] -- Add [C]  a model of NHWC
    Conv, Conv -- Concat [N, C + D, H, W] -- BatchNormalization         YOLOv5's CSP, MixNet
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.frontends.checks import to_array
from deploy.graph.index import attributes

if TYPE_CHECKING:
    import onnx

MOVES = frozenset({"Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class Moved:
    """A layer, and the moves between it and a tensor.

    Attributes:
        layer: it makes the first of these tensors.
        moves: in their order.
    """

    layer: onnx.NodeProto
    moves: tuple[onnx.NodeProto, ...] = ()

    def axis(self, rank: int, constants: Mapping[str, onnx.TensorProto]) -> tuple[int, int] | None:
        """(axis of the channels, rank) behind the moves; None where that is not known.

        Args:
            rank: of what the layer makes, whose channels are on axis 1.
            constants: that give Squeeze and Unsqueeze their axes.
        """
        axes: list[int | None] = list(range(rank))
        for node in self.moves:
            found = _after(node, axes, constants)
            if found is None:
                return None
            axes = found
        return (axes.index(1), len(axes)) if 1 in axes else None


@dataclass(frozen=True, slots=True)
class Joined:
    """A layer, or those whose channels a Concat lays side by side, and what moves them.

    Attributes:
        parts: in the order of their channels.
        concat: None behind one layer.
    """

    parts: tuple[Moved, ...]
    concat: onnx.NodeProto | None = None

    @property
    def nodes(self) -> tuple[onnx.NodeProto, ...]:
        """All of them; the last one makes the tensor behind."""
        own = (node for part in self.parts for node in (part.layer, *part.moves))
        return (*own, *(() if self.concat is None else (self.concat,)))

    def links(self) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto, int]]:
        """Each of them but the last, the one that reads it, and at which input."""
        for number, part in enumerate(self.parts):
            chain = (part.layer, *part.moves)
            yield from ((node, after, 0) for node, after in zip(chain, part.moves, strict=False))
            if self.concat is not None:
                yield chain[-1], self.concat, number

    def axis(
        self, ranks: Sequence[int], constants: Mapping[str, onnx.TensorProto]
    ) -> tuple[int, int] | None:
        """As `Moved.axis`; None too where the Concat is along another axis.

        Args:
            ranks: of what each layer makes.
            constants: that give Squeeze and Unsqueeze their axes.
        """
        places = {part.axis(rank, constants) for part, rank in zip(self.parts, ranks, strict=True)}
        place = places.pop()
        if places or place is None or self.concat is None:
            return None if places else place
        axis, rank = place
        return place if attributes(self.concat).get("axis") in (axis, axis - rank) else None


def layers_behind(
    tensor: str,
    makers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, int],
    layers: Sequence[str],
) -> Joined | None:
    """The layers of these types that make a tensor: one, or all that a Concat reads."""
    made = makers.get(tensor)
    concat = made if made is not None and made.op_type == "Concat" else None
    if concat is not None and readers[tensor] != 1:
        return None
    ends = (tensor,) if concat is None else concat.input
    found = [_layer_behind(end, makers, readers, layers) for end in ends]
    parts = tuple(part for part in found if part is not None)
    return Joined(parts, concat) if len(parts) == len(ends) > 0 else None


def _layer_behind(
    tensor: str,
    makers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, int],
    layers: Sequence[str],
) -> Moved | None:
    """The layer of one of these types that makes a tensor, alone or by moves read once each."""
    moves: list[onnx.NodeProto] = []
    node = makers.get(tensor)
    while node is not None and readers[node.output[0]] == 1 and node.op_type in MOVES:
        moves.insert(0, node)
        node = makers.get(node.input[0])
    if node is None or node.op_type not in layers or readers[node.output[0]] != 1:
        return None
    return Moved(node, tuple(moves))


def _after(
    node: onnx.NodeProto, axes: list[int | None], constants: Mapping[str, onnx.TensorProto]
) -> list[int | None] | None:
    """Which axis of the layer's each one is behind a move; None for one that it put in."""
    if node.op_type == "Transpose":
        order = attributes(node).get("perm", range(len(axes))[::-1])
        fits = sorted(order) == list(range(len(axes)))
        return [axes[place] for place in order] if fits else None
    given = _given(node, constants)
    if given is None:
        return None
    rank = len(axes) + (len(given) if node.op_type == "Unsqueeze" else 0)
    if not all(-rank <= place < rank for place in given):
        return None
    places = {place % rank for place in given}
    if node.op_type == "Squeeze":
        return [axis for place, axis in enumerate(axes) if place not in places]
    left = iter(axes)
    return [None if place in places else next(left, None) for place in range(rank)]


def _given(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> list[int] | None:
    """The axes of a Squeeze or Unsqueeze, an attribute before opset 13."""
    if len(node.input) < 2:
        given = attributes(node).get("axes")
        return None if given is None else list(given)
    array = to_array(constants[node.input[1]]) if node.input[1] in constants else None
    return None if array is None else [int(place) for place in array.reshape(-1)]
