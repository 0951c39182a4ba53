"""What a deploy model computes, on a CPU: integer operands and sums, one float multiplication.

AscendQuant and AscendDequant run nowhere but on the NPU, so the deploy model is rewritten into
ONNX's integer operators, which ONNX Runtime has, and which are exact::

    AscendQuant      q = clip(rne(x * scale + offset)), kept as uint8 q + 128
    Conv             ConvInteger, zero points offset + 128 and 128, plus the int32 bias
    Gemm, MatMul     MatMulInteger, likewise; of two activations with both their zero points
    ConvTranspose    weight = 16 h + l, |h| <= 8, 0 <= l < 16: two float convolutions whose sums
                     stay below 2^24 and so are exact, added as int32
    AveragePool      float pool of q - offset
    AscendAntiQuant  (q - offset) * scale in float
    16-bit q         q + 32768 = 256 high + low, each as uint8 by itself; sums added as int64
    4-bit weights    out of their bytes
    AscendDequant    float(y) * float32(low half of the parameter)

Against the fake-quant model three things may differ: a code at an exact half where offset is odd
(AscendQuant adds offset before rounding, the fake-quant model after), a code beside a half where
x * scale + offset rounds in float32, and sums beyond 2^24, which floats round and integers do not.
Weights go in as uint8 too: int8 ones saturate in ONNX Runtime on x86 CPUs without VNNI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from calibrators.amct.grid import ascend_range
from deploy.errors import ModelError
from deploy.graph.edit import copied, rebuild
from deploy.graph.index import Graph, attributes
from deploy.targets.ascend.layers import TYPES
from deploy.targets.ascend.sums import SHIFT, Constants, Layers, Part, chain, make_node

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Session

_TYPES = {b"INT4": 4, b"INT8": 8, b"INT16": 16}


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


def open_deploy(
    model: onnx.ModelProto, *, threads: int | None = None, shown: Collection[str] = ()
) -> Session:
    """A deploy model ready to run on the CPU, its inputs and outputs as they are on the NPU.

    Args:
        model: the deploy model.
        threads: threads inside one operator.
        shown: sums of layers with 16-bit activations, int64, to give beside its outputs.

    Raises:
        ModelError: the model cannot be rewritten.
        BackendError: ONNX Runtime refuses it.
    """
    from onnx import helper

    from deploy.runtimes.ort import OrtSession

    model = executable(model)
    model.graph.output.extend(helper.make_tensor_value_info(name, 7, None) for name in shown)
    return OrtSession.open(model, threads=threads, optimize=False)


class _Rewriter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.index = model.graph, Graph(model)
        self.constants = Constants(self.index)
        self.layers = Layers(model, self.index, self.constants)
        ends = [n for n in model.graph.node if n.op_type in ("AscendDequant", "AscendAntiQuant")]
        self.half = any(attributes(n).get("dtype", 0) == 1 for n in ends)

    def rewrite(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that stand for one node."""
        if node.op_type == "AscendQuant":
            return self.quant(node)
        if node.op_type == "AscendDequant":
            return self.dequant(node)
        if node.op_type == "AscendAntiQuant":
            return self.antiquant(node)
        if self.layers.is_bias(node):
            return [make_node("Identity", [node.input[0]], node.output[0], node.name)]
        if node.op_type in TYPES and node.input[0] in self.layers.codes:
            return self.layers.write(node)
        return [node]

    def quant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        given = attributes(node)
        bits = _TYPES.get(given.get("dst_type", b"INT8"))
        if bits is None or "scale" not in given:
            raise ModelError(
                f"{node.name!r} must have a scale and dst_type INT4, INT8 or INT16, got {given}"
            )
        zero, low_high = int(given.get("offset", 0.0)), ascend_range(bits)
        name, end = node.name, node.output[0]
        scale = self.constants.put(f"{name}.exec.scale", np.float32(given["scale"]))
        offset = self.constants.put(f"{name}.exec.offset", np.float32(zero))
        ends = [self.constants.put(f"{name}.exec.{v}", np.float32(v)) for v in low_high]
        lift = max(SHIFT, -low_high[0])
        shift = self.constants.put(f"{name}.exec.shift", np.float32(lift))
        steps = [("Mul", [scale]), ("Add", [offset]), ("Round", []), ("Clip", ends)]
        steps.append(("Add", [shift]))
        start, before = f"{name}.exec.float32", []
        if self.half:
            before = chain(f"{name}.exec", node.input[0], start, [], cast=1)
        else:
            start = node.input[0]
        if bits < 16:
            self.layers.codes[end] = (Part(end, 1, zero + lift),)
            return [*before, *chain(name, start, end, steps, cast=2)]
        high, low = divmod(zero + lift, 256)
        self.layers.codes[end] = (Part(f"{end}.high", 256, high), Part(f"{end}.low", 1, low))
        whole = chain(name, start, f"{end}.lifted", steps, cast=6)
        return [*before, *whole, *self.bytes_of(end)]

    def bytes_of(self, name: str) -> list[onnx.NodeProto]:
        """From '<name>.lifted', int32 below 65536, to its bytes '.high' and '.low', uint8."""
        by = self.constants.put(f"{name}.exec.256", np.int32(256))
        lifted, over, part = f"{name}.lifted", f"{name}.over", f"{name}.part"
        return [
            make_node("Div", [lifted, by], over, f"{name}.high"),
            make_node("Mod", [lifted, by], part, f"{name}.low"),
            *chain(f"{name}.high", over, f"{name}.high", [], cast=2),
            *chain(f"{name}.low", part, f"{name}.low", [], cast=2),
        ]

    def dequant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        packed = self.constants.value(node.input[1])
        low = (packed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        producer = self.index.producer.get(node.input[0])
        rank = self.rank(producer)
        scale = self.constants.put(f"{node.name}.exec.scale", low.reshape(1, -1, *[1] * rank))
        return [
            *chain(f"{node.name}.float", node.input[0], f"{node.name}.exec.f", [], cast=1),
            *self.scaled_float(node, f"{node.name}.exec.f", scale),
        ]

    def scaled_float(self, node: onnx.NodeProto, start: str, scale: str) -> list[onnx.NodeProto]:
        """Times a scale: float32, or float16 where the node's dtype is 1."""
        if attributes(node).get("dtype", 0) != 1:
            return [make_node("Mul", [start, scale], node.output[0], node.name)]
        return chain(node.name, start, node.output[0], [("Mul", [scale])], cast=10)

    def antiquant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        given = attributes(node)
        parts = self.layers.codes.get(node.input[0], ())
        if len(parts) != 1 or "scale" not in given:
            raise ModelError(
                f"{node.name!r} must have a scale and read an int8 AscendQuant's output"
            )
        scale = self.constants.put(f"{node.name}.exec.scale", np.float32(given["scale"]))
        centred = f"{node.name}.exec.centred"
        part = replace(parts[0], zero=int(given.get("offset", 0.0)) + SHIFT)
        return [*self.layers.centre(node, part, centred), *self.scaled_float(node, centred, scale)]

    def rank(self, producer: onnx.NodeProto | None) -> int:
        """Spatial rank of what an AscendDequant reads; its scale is per channel on axis 1."""
        if producer is None or producer.op_type not in ("Conv", "ConvTranspose"):
            return 0
        return self.constants.value(producer.input[1]).ndim - 2

    def finish(self, nodes: list[onnx.NodeProto]) -> None:
        """Put the nodes in place, and drop the constants that nothing reads any more."""
        from onnx import numpy_helper

        self.graph.initializer.extend(
            numpy_helper.from_array(v, k) for k, v in self.constants.new.items()
        )
        rebuild(self.graph, nodes)
