"""Layers of a deploy model in ONNX's integer operators, and the constants that these read.

::

    q            uint8 part 0 [, part 1]      q - offset = sum of (part - zero) * factor
    layer        an operator a part           int32, or int64 where there are two
    bias         added to their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ModelError
from deploy.graph.edit import copied
from deploy.graph.index import Graph, attributes
from deploy.targets.ascend.deploy_model import PACKED, packed_axis, unpack_fours
from deploy.targets.ascend.layers import TYPES

if TYPE_CHECKING:
    import onnx

SHIFT = 128  # from int8 to uint8
_EXACT = 2**24  # integers that float32 adds without rounding


@dataclass(frozen=True, slots=True)
class Part:
    """One uint8 tensor of a quantized one, the sum of (tensor - zero) * factor over its parts."""

    tensor: str
    factor: int
    zero: int


class Constants:
    """Constants of a deploy model, and new ones beside them.

    Attributes:
        new: name -> value.
    """

    def __init__(self, index: Graph) -> None:
        self._held = index.constants
        self.new: dict[str, NDArray[Any]] = {}

    def put(self, name: str, value: Any) -> str:
        """Add one; gives its name."""
        self.new[name] = np.asarray(value)
        return name

    def value(self, name: str) -> NDArray[Any]:
        """The value of one that the deploy model holds.

        Raises:
            ModelError: it does not.
        """
        from onnx import numpy_helper

        if name not in self._held:
            raise ModelError(f"the deploy model must hold {name!r} as a constant, got none")
        return numpy_helper.to_array(self._held[name])


class Layers:
    """Writes the nodes that stand for a layer on quantized tensors.

    Attributes:
        codes: quantized tensor -> what it is held as; whoever writes that puts it here.
    """

    def __init__(self, model: onnx.ModelProto, index: Graph, constants: Constants) -> None:
        self.index, self.constants = index, constants
        self.codes: dict[str, tuple[Part, ...]] = {}
        self.packed = {name for node in model.graph.node for name in self.packed_by(node)}

    def write(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that stand for one of `TYPES` whose input is quantized."""
        heavy = {
            "Conv": self.conv,
            "ConvTranspose": self.convtranspose,
            "Gemm": self.gemm,
            "MatMul": self.gemm,
            "AveragePool": self.averagepool,
        }[node.op_type]
        return heavy(node, self.codes[node.input[0]])

    def conv(self, node: onnx.NodeProto, codes: tuple[Part, ...]) -> list[onnx.NodeProto]:
        """ConvInteger."""
        return self.summed(node, "ConvInteger", codes, self.weight(node))

    def gemm(self, node: onnx.NodeProto, codes: tuple[Part, ...]) -> list[onnx.NodeProto]:
        """MatMulInteger; of two activations with both their zero points."""
        if node.input[1] in self.codes:
            (first,), (second,) = codes, self.codes[node.input[1]]
            ends = [
                self.constants.put(f"{node.name}.exec.zero{k}", np.uint8(part.zero))
                for k, part in enumerate((first, second))
            ]
            reads = [first.tensor, second.tensor, *ends]
            return [make_node("MatMulInteger", reads, node.output[0], node.name)]
        weight = self.weight(node)
        if attributes(node).get("transB", 0):
            weight = weight.T
        del node.attribute[:]
        return self.summed(node, "MatMulInteger", codes, weight)

    def averagepool(self, node: onnx.NodeProto, codes: tuple[Part, ...]) -> list[onnx.NodeProto]:
        """A pool of floats that are whole."""
        (part,) = codes
        centred = f"{node.name}.exec.centred"
        before = self.centre(node, part, centred)
        node.input[0] = centred
        return [*before, node]

    def convtranspose(self, node: onnx.NodeProto, codes: tuple[Part, ...]) -> list[onnx.NodeProto]:
        """Float convolutions of halves of the weight, small enough to be exact.

        Raises:
            ModelError: they are not.
        """
        weight = self.weight(node).astype(np.int32)
        if 255 * 15 * int(np.prod(weight.shape[2:])) * weight.shape[0] >= _EXACT:
            raise ModelError(
                f"{node.name!r} sums too many products to be exact here, weight {weight.shape};"
                " compare the fake-quant model instead"
            )
        low = weight & 15
        name, wide = node.name, len(codes) > 1
        nodes: list[onnx.NodeProto] = []
        sums: list[str] = []
        for place, part in enumerate(codes):
            centred = f"{name}.exec.centred{place}"
            nodes += self.centre(node, part, centred)
            for word, values, factor in (("low", low, 1), ("high", (weight - low) // 16, 16)):
                word = f"{word}{place}"
                kernel = self.constants.put(f"{name}.exec.{word}", values.astype(np.float32))
                half = copied(node)
                half.name, half.output[0] = f"{name}.{word}", f"{name}.exec.{word}.f"
                del half.input[:]
                half.input.extend([centred, kernel])
                nodes.append(half)
                nodes += self.scaled(half, factor * part.factor, sums, wide=wide)
        return [*nodes, *self.added(node, sums, weight.ndim - 2, wide=wide)]

    def summed(
        self, node: onnx.NodeProto, op: str, codes: tuple[Part, ...], weight: NDArray[Any]
    ) -> list[onnx.NodeProto]:
        """An integer operator for each part of the input, and their sum with the bias."""
        name, wide = node.name, len(codes) > 1
        moved = (weight.astype(np.int16) + SHIFT).astype(np.uint8)
        kernel = self.constants.put(f"{name}.exec.weight", np.ascontiguousarray(moved))
        level = self.constants.put(f"{name}.exec.wzero", np.uint8(SHIFT))
        nodes: list[onnx.NodeProto] = []
        sums: list[str] = []
        for place, part in enumerate(codes):
            zero = self.constants.put(f"{name}.exec.zero{place}", np.uint8(part.zero))
            end = f"{name}.exec.part{place}"
            heavy = make_node(op, [part.tensor, kernel, zero, level], end, f"{name}.{place}")
            heavy.attribute.extend(node.attribute)
            nodes.append(heavy)
            nodes += self.scaled(heavy, part.factor, sums, wide=wide)
        return [*nodes, *self.added(node, sums, weight.ndim - 2, wide=wide)]

    def scaled(
        self, node: onnx.NodeProto, factor: int, sums: list[str], *, wide: bool
    ) -> list[onnx.NodeProto]:
        """A node's output as integers, times a factor; named at the end of `sums`."""
        nodes, end = [], node.output[0]
        if wide or node.op_type == "ConvTranspose":  # the others give int32
            nodes, end = (
                chain(node.name, end, f"{end}.i", [], cast=7 if wide else 6),
                f"{end}.i",
            )
        if factor != 1:
            by = self.constants.put(f"{end}.factor", (np.int64 if wide else np.int32)(factor))
            nodes.append(make_node("Mul", [end, by], f"{end}.scaled", f"{node.name}.scaled"))
            end = f"{end}.scaled"
        sums.append(end)
        return nodes

    def added(
        self, node: onnx.NodeProto, sums: list[str], rank: int, *, wide: bool
    ) -> list[onnx.NodeProto]:
        """The sum of `sums` and, if there is one, the bias."""
        bias = node.input[2] if len(node.input) > 2 else ""
        terms = [*sums, *([self.bias(node, bias, rank, wide=wide)] if bias else [])]
        if len(terms) == 1:
            return [make_node("Identity", terms, node.output[0], f"{node.name}.sum")]
        nodes, total = [], terms[0]
        for place, term in enumerate(terms[1:], start=1):
            end = node.output[0] if place == len(terms) - 1 else f"{node.name}.exec.sum{place}"
            nodes.append(make_node("Add", [total, term], end, f"{node.name}.sum{place}"))
            total = end
        return nodes

    def bias(self, node: onnx.NodeProto, name: str, rank: int, *, wide: bool) -> str:
        """The bias in the shape and type of the sums.

        Raises:
            ModelError: it is not int32.
        """
        maker = self.index.producer.get(name)
        cast = maker if self.is_bias(maker) else None
        values = self.constants.value(name if cast is None else cast.input[0])
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {node.name!r} must be int32, got {values.dtype}")
        shaped = values.reshape(-1, *[1] * rank)
        return self.constants.put(
            f"{node.name}.exec.bias", shaped.astype(np.int64) if wide else shaped
        )

    def is_bias(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node is the Cast of an int32 bias, as there is one beside 4-bit activations."""
        if node is None or node.op_type != "Cast" or not node.name.endswith(".bias_quant"):
            return False
        found = self.index.constants.get(node.input[0])
        return found is not None and found.data_type == 6

    def weight(self, node: onnx.NodeProto) -> NDArray[Any]:
        """A layer's integers; out of their bytes where two are in one."""
        values = self.constants.value(node.input[1])
        if node.name not in self.packed:
            return values
        return unpack_fours(values.astype(np.int8), packed_axis(node.op_type))

    def packed_by(self, node: onnx.NodeProto) -> list[str]:
        """The layer before an AscendDequant that says that its weights are two to a byte."""
        if node.op_type != "AscendDequant" or attributes(node).get(PACKED) != b"INT4":
            return []
        maker = self.index.producer.get(node.input[0])
        if maker is not None and maker.op_type == "Add":
            makers = [self.index.producer.get(name) for name in maker.input]
            maker = next((m for m in makers if m is not None and m.op_type in TYPES), None)
        return [] if maker is None else [maker.name]

    def centre(self, node: onnx.NodeProto, part: Part, end: str) -> list[onnx.NodeProto]:
        """Float integers q - offset from a uint8 tensor."""
        cast = chain(f"{end}.in", part.tensor, f"{end}.u8", [], cast=1)
        shift = self.constants.put(f"{end}.shift", np.float32(part.zero))
        return [*cast, make_node("Sub", [f"{end}.u8", shift], end, f"{end}.centre")]


def chain(
    name: str, start: str, end: str, steps: list[tuple[str, list[str]]], *, cast: int
) -> list[onnx.NodeProto]:
    """A row of nodes from `start`, closed by a Cast to `cast` that gives `end`."""
    nodes, tensor = [], start
    for place, (op, others) in enumerate(steps):
        output = f"{name}.exec.{place}.out"
        nodes.append(make_node(op, [tensor, *others], output, f"{name}.{place}"))
        tensor = output
    closing = make_node("Cast", [tensor], end, f"{name}.cast")
    closing.attribute.add(name="to", type=2, i=cast)
    return [*nodes, closing]


def make_node(op: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    """A node of one output."""
    from onnx import helper

    return helper.make_node(op, inputs, [output], name=name)
