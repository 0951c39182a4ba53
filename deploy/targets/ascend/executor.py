"""What a deploy model computes, on a CPU: int8 operands, int32 sums, one float multiplication.

AscendQuant and AscendDequant run nowhere but on the NPU, so the deploy model is rewritten into
ONNX's integer operators, which ONNX Runtime has, and which are exact::

    AscendQuant      q = clip(rne(x * scale + offset)), kept as uint8 q + 128
    Conv             ConvInteger, zero points offset + 128 and 128, plus the int32 bias
    Gemm, MatMul     MatMulInteger, likewise; of two activations with both their zero points
    ConvTranspose    weight = 16 h + l, |h| <= 8, 0 <= l < 16: two float convolutions whose sums
                     stay below 2^24 and so are exact, added as int32
    AveragePool      float pool of q - offset
    AscendAntiQuant  (q - offset) * scale in float
    AscendDequant    float(y) * float32(low half of the parameter)

Against the fake-quant model three things may differ: a code at an exact half where offset is odd
(AscendQuant adds offset before rounding, the fake-quant model after), a code beside a half where
x * scale + offset rounds in float32, and sums beyond 2^24, which floats round and integers do not.
Weights go in as uint8 too: int8 ones saturate in ONNX Runtime on x86 CPUs without VNNI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ModelError
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph, attributes
from deploy.targets.ascend.layers import TYPES

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Session

_SHIFT = 128
_EXACT = 2**24  # integers that float32 adds without rounding


def executable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Deploy model -> model that ONNX Runtime runs with the NPU's arithmetic.

    Raises:
        ModelError: a node that is not as `deploy.targets.ascend.deploy_model` writes it.
    """
    out = copied(model)
    with malformed():
        work = _Rewriter(out)
        nodes = [new for node in out.graph.node for new in work.rewrite(node)]
        work.finish(nodes)
    return out


@contextmanager
def malformed() -> Iterator[None]:
    """Turn what reading a node with missing or mistyped parts raises into one sentence.

    Raises:
        ModelError: in place of those errors.
    """
    try:
        yield
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"a deploy model must be as its writer left it, got {type(error).__name__}: {said}"
        ) from error


def open_deploy(model: onnx.ModelProto, *, threads: int | None = None) -> Session:
    """A deploy model ready to run on the CPU, its inputs and outputs as they are on the NPU.

    Raises:
        ModelError: the model cannot be rewritten.
        BackendError: ONNX Runtime refuses it.
    """
    from deploy.ort import OrtSession

    model = executable(model)
    return OrtSession.open(model, threads=threads, optimize=False)


class _Rewriter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.index = model.graph, Graph(model)
        self.zero: dict[str, int] = {}  # quantized tensor -> offset
        self.new: dict[str, NDArray[Any]] = {}

    def rewrite(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that stand for one node."""
        if node.op_type == "AscendQuant":
            return self.quant(node)
        if node.op_type == "AscendDequant":
            return self.dequant(node)
        if node.op_type == "AscendAntiQuant":
            return self.antiquant(node)
        if node.op_type in TYPES and node.input[0] in self.zero:
            heavy = {
                "Conv": self.conv,
                "ConvTranspose": self.convtranspose,
                "Gemm": self.gemm,
                "MatMul": self.gemm,
                "AveragePool": self.averagepool,
            }[node.op_type]
            return heavy(node, self.zero[node.input[0]])
        return [node]

    def quant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        given = attributes(node)
        if given.get("dst_type", b"INT8") != b"INT8" or "scale" not in given:
            raise ModelError(f"{node.name!r} must have a scale and dst_type INT8, got {given}")
        self.zero[node.output[0]] = int(given.get("offset", 0.0))
        name, end = node.name, node.output[0]
        scale = self.put(f"{name}.exec.scale", np.float32(given["scale"]))
        offset = self.put(f"{name}.exec.offset", np.float32(given.get("offset", 0.0)))
        ends = [self.put(f"{name}.exec.{v}", np.float32(v)) for v in (-_SHIFT, _SHIFT - 1)]
        shift = self.put(f"{name}.exec.shift", np.float32(_SHIFT))
        return self.chain(
            name,
            node.input[0],
            end,
            [("Mul", [scale]), ("Add", [offset]), ("Round", []), ("Clip", ends), ("Add", [shift])],
            cast=2,
        )

    def dequant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        packed = self.constant(node.input[1])
        low = (packed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        producer = self.index.producer.get(node.input[0])
        rank = self.rank(producer)
        scale = self.put(f"{node.name}.exec.scale", low.reshape(1, -1, *[1] * rank))
        return [
            *self.chain(f"{node.name}.float", node.input[0], f"{node.name}.exec.f", [], cast=1),
            _node("Mul", [f"{node.name}.exec.f", scale], node.output[0], node.name),
        ]

    def antiquant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        given = attributes(node)
        if node.input[0] not in self.zero or "scale" not in given:
            raise ModelError(f"{node.name!r} must have a scale and read an AscendQuant's output")
        scale = self.put(f"{node.name}.exec.scale", np.float32(given["scale"]))
        centred = f"{node.name}.exec.centred"
        nodes = self.centre(node, int(given.get("offset", 0.0)), centred)
        return [*nodes, _node("Mul", [centred, scale], node.output[0], node.name)]

    def conv(self, node: onnx.NodeProto, zero: int) -> list[onnx.NodeProto]:
        weight = self.constant(node.input[1])
        inputs = self.shifted(node, weight, zero)
        return self.biased(node, "ConvInteger", inputs, weight.ndim - 2)

    def gemm(self, node: onnx.NodeProto, zero: int) -> list[onnx.NodeProto]:
        given = attributes(node)
        if node.input[1] in self.zero:
            ends = [
                self.put(f"{node.name}.exec.zero{k}", np.uint8(z + _SHIFT))
                for k, z in enumerate((zero, self.zero[node.input[1]]))
            ]
            return self.biased(node, "MatMulInteger", [*node.input[:2], *ends], 0)
        weight = self.constant(node.input[1])
        weight = weight.T if given.get("transB", 0) else weight
        del node.attribute[:]
        return self.biased(node, "MatMulInteger", self.shifted(node, weight, zero), 0)

    def averagepool(self, node: onnx.NodeProto, zero: int) -> list[onnx.NodeProto]:
        centred = f"{node.name}.exec.centred"
        before = self.centre(node, zero, centred)
        node.input[0] = centred
        return [*before, node]

    def convtranspose(self, node: onnx.NodeProto, zero: int) -> list[onnx.NodeProto]:
        weight = self.constant(node.input[1]).astype(np.int32)
        if 255 * 15 * int(np.prod(weight.shape[2:])) * weight.shape[0] >= _EXACT:
            raise ModelError(
                f"{node.name!r} sums too many products to be exact here, weight {weight.shape};"
                " compare the fake-quant model instead"
            )
        low = weight & 15
        name, centred = node.name, f"{node.name}.exec.centred"
        nodes, halves = self.centre(node, zero, centred), []
        for word, part in (("low", low), ("high", (weight - low) // 16)):
            kernel = self.put(f"{name}.exec.{word}", part.astype(np.float32))
            half = copied(node)
            half.name, half.output[0] = f"{name}.{word}", f"{name}.exec.{word}.f"
            del half.input[:]
            half.input.extend([centred, kernel])
            halves.append(f"{name}.exec.{word}.i")
            nodes += [half, *self.chain(half.name, half.output[0], halves[-1], [], cast=6)]
        sixteen = self.put(f"{name}.exec.16", np.int32(16))
        scaled, total = f"{name}.exec.scaled", f"{name}.exec.sum"
        nodes.append(_node("Mul", [halves[1], sixteen], scaled, f"{name}.scaled"))
        bias = node.input[2] if len(node.input) > 2 else ""
        end = total if bias else node.output[0]
        nodes.append(_node("Add", [halves[0], scaled], end, f"{name}.sum"))
        if bias:
            shaped = self.bias(node, bias, weight.ndim - 2)
            nodes.append(_node("Add", [total, shaped], node.output[0], f"{name}.bias"))
        return nodes

    def shifted(self, node: onnx.NodeProto, weight: NDArray[Any], zero: int) -> list[str]:
        """Inputs of an integer operator: x, weight and both zero points as uint8."""
        name = node.name
        moved = (weight.astype(np.int16) + _SHIFT).astype(np.uint8)
        return [
            node.input[0],
            self.put(f"{name}.exec.weight", np.ascontiguousarray(moved)),
            self.put(f"{name}.exec.zero", np.uint8(zero + _SHIFT)),
            self.put(f"{name}.exec.wzero", np.uint8(_SHIFT)),
        ]

    def biased(
        self, node: onnx.NodeProto, op: str, inputs: list[str], rank: int
    ) -> list[onnx.NodeProto]:
        """The integer operator and, if there is one, the bias added to its int32 output."""
        bias = node.input[2] if len(node.input) > 2 else ""
        end = f"{node.name}.exec.sum" if bias else node.output[0]
        heavy = _node(op, inputs, end, node.name)
        heavy.attribute.extend(node.attribute)
        if not bias:
            return [heavy]
        shaped = self.bias(node, bias, rank)
        return [heavy, _node("Add", [end, shaped], node.output[0], f"{node.name}.bias")]

    def bias(self, node: onnx.NodeProto, name: str, rank: int) -> str:
        values = self.constant(name)
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {node.name!r} must be int32, got {values.dtype}")
        return self.put(f"{node.name}.exec.bias", values.reshape(-1, *[1] * rank))

    def centre(self, node: onnx.NodeProto, zero: int, end: str) -> list[onnx.NodeProto]:
        """Float integers q - offset from the uint8 tensor."""
        cast = self.chain(f"{node.name}.in", node.input[0], f"{end}.u8", [], cast=1)
        shift = self.put(f"{node.name}.exec.shift", np.float32(zero + _SHIFT))
        return [*cast, _node("Sub", [f"{end}.u8", shift], end, f"{node.name}.centre")]

    def rank(self, producer: onnx.NodeProto | None) -> int:
        """Spatial rank of what an AscendDequant reads; its scale is per channel on axis 1."""
        if producer is None or producer.op_type not in ("Conv", "ConvTranspose"):
            return 0
        return self.constant(producer.input[1]).ndim - 2

    def chain(
        self, name: str, start: str, end: str, steps: list[tuple[str, list[str]]], *, cast: int
    ) -> list[onnx.NodeProto]:
        """A row of nodes from `start`, closed by a Cast to `cast` that gives `end`."""
        nodes, tensor = [], start
        for place, (op, others) in enumerate(steps):
            output = f"{name}.exec.{place}.out"
            nodes.append(_node(op, [tensor, *others], output, f"{name}.{place}"))
            tensor = output
        closing = _node("Cast", [tensor], end, f"{name}.cast")
        closing.attribute.add(name="to", type=2, i=cast)
        return [*nodes, closing]

    def put(self, name: str, value: Any) -> str:
        self.new[name] = np.asarray(value)
        return name

    def constant(self, name: str) -> NDArray[Any]:
        from onnx import numpy_helper

        if name not in self.index.constants:
            raise ModelError(f"the deploy model must hold {name!r} as a constant, got none")
        return numpy_helper.to_array(self.index.constants[name])

    def finish(self, nodes: list[onnx.NodeProto]) -> None:
        """Put the nodes in place, and drop the constants that nothing reads any more."""
        from onnx import numpy_helper

        self.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in self.new.items())
        rebuild(self.graph, nodes)


def _node(op: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node(op, inputs, [output], name=name)
