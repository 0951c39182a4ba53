"""Executor of deploy models on a CPU in integers, and their comparison with the fake-quant model.

AscendQuant and AscendDequant run only on the NPU, so the deploy model is rewritten to ONNX's
integer operators, which ONNX Runtime computes exactly::

    AscendQuant      q = clip(rne(x * scale + offset)), stored as uint8 q + 128
    Conv             ConvInteger, zero points offset + 128 and 128, plus the int32 bias
    Gemm, MatMul     MatMulInteger, likewise; for two activations with both zero points
    ConvTranspose    weight = 16 h + l, |h| <= 8, 0 <= l < 16: two float convolutions, whose sums
                     stay below 2^24 and so are exact, added as int32
    AveragePool      float pool of q - offset
    AscendAntiQuant  (q - offset) * scale in float
    16-bit q         q + 32768 = 256 high + low, two uint8 tensors; sums added as int64
    4-bit weights    unpacked from their bytes
    AscendDequant    float(y) * float32(low half of the parameter)

Weights are uint8 too: ONNX Runtime saturates int8 ones on x86 CPUs without VNNI. A quantized tensor
is one or two uint8 parts::

    q            uint8 part 0 [, part 1]      q - offset = sum of (part - zero) * factor
    layer        one operator per part        int32, or int64 if there are two
    bias         added to their sum

`compare_deploy_model` compares with two fake-quant models. The one that rounds as AscendQuant does
must agree except for sums beyond 2^24, which floats round. AMCT's own adds the offset after
rounding, so it differs by one code for values exactly between two codes if the offset is odd. A
code may also differ where x * scale + offset rounds in float32.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.amct.arq import ascend_range
from deploy.errors import ModelError
from deploy.graph.edit import copy_message, rebuild
from deploy.graph.index import Graph, attributes
from deploy.metrics.output_errors import cosine
from deploy.runtimes.ort import OrtSession
from deploy.targets.ascend.deploy_model import (
    PACKED,
    deploy_model,
    packed_axis,
    unpack_dequant_scales,
    unpack_int4,
)
from deploy.targets.ascend.fake_quant import fake_quant_model
from deploy.targets.ascend.layers import TYPES
from deploy.targets.ascend.quant_layer import QuantLayer
from deploy.targets.base import BuildRequest
from deploy.tensors import Session

SHIFT = 128  # from int8 to uint8
_EXACT = 2**24  # float32 adds integers below this without rounding
_TYPES = {b"INT4": 4, b"INT8": 8, b"INT16": 16}
_TOLERANCE = 1e-2
_CHECKED = 2  # samples on which a build runs the deploy model
_END = 2**31  # limit of int32


@dataclass(frozen=True, slots=True)
class Uint8Part:
    """One uint8 part of a quantized tensor, which is the sum of (tensor - zero) * factor."""

    tensor: str
    factor: int
    zero: int


def to_integer_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes a deploy model in ONNX Runtime with the NPU's arithmetic.

    Raises:
        ModelError: a node differs from what `deploy.targets.ascend.deploy_model` writes.
    """
    out = copy_message(model)
    with malformed_as_model_error():
        writer = _IntegerWriter(out)
        for node in out.graph.node:
            writer.rewrite(node)
        out.graph.initializer.extend(writer.constants)
        rebuild(out.graph, writer.nodes)
    return out


@contextmanager
def malformed_as_model_error() -> Iterator[None]:
    """Raise ModelError for the errors that malformed nodes cause."""
    try:
        yield
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ModelError(
            "a deploy model must have the structure that calib8 writes, got"
            f" {type(error).__name__}: {detail}"
        ) from error


def open_deploy(
    model: onnx.ModelProto, *, threads: int | None = None, shown: Collection[str] = ()
) -> Session:
    """Open a deploy model on the CPU, with the inputs and outputs that it has on the NPU.

    `shown`: int64 sums of layers with 16-bit activations, added to the outputs.

    Raises:
        ModelError: the model cannot be rewritten.
        BackendError: ONNX Runtime refuses it.
    """
    model = to_integer_model(model)
    model.graph.output.extend(helper.make_tensor_value_info(name, 7, None) for name in shown)
    return OrtSession.open(model, threads=threads, optimize=False)


class _IntegerWriter:
    """Writer of the nodes that compute a deploy model, in the order of its nodes.

    Attributes:
        nodes, constants: what was written so far.
        codes: quantized tensor -> its parts.
        packed: layers with two 4-bit weights in a byte.
        half: whether the model's activations are float16.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.index = Graph(model)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.codes: dict[str, tuple[Uint8Part, ...]] = {}
        self.packed = {name for node in self.index.nodes for name in self.packed_by(node)}
        ends = [n for n in self.index.nodes if n.op_type in ("AscendDequant", "AscendAntiQuant")]
        self.half = any(attributes(n).get("dtype", 0) == 1 for n in ends)

    def emit(
        self,
        op: str,
        *inputs: str,
        output: str = "",
        like: onnx.NodeProto | None = None,
        **given: Any,
    ) -> str:
        """Append a node; return its output, a new tensor unless `output` names one.

        `like`: node whose attributes it gets.
        """
        name = f"exec.{len(self.nodes)}"
        output = output or name
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **given))
        if like is not None:
            self.nodes[-1].attribute.extend(like.attribute)
        return output

    def put(self, value: Any) -> str:
        """Add a constant; return its name."""
        name = f"exec.constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def value(self, name: str) -> NDArray[Any]:
        """Return the value of a constant of the deploy model.

        Raises:
            ModelError: the model has no such constant.
        """
        if name not in self.index.constants:
            raise ModelError(f"the deploy model must have {name!r} as a constant, got none")
        return numpy_helper.to_array(self.index.constants[name])

    def rewrite(self, node: onnx.NodeProto) -> None:
        """Write the nodes that compute one node of the deploy model."""
        own = {
            "AscendQuant": self.quant,
            "AscendDequant": self.dequant,
            "AscendAntiQuant": self.antiquant,
        }.get(node.op_type)
        if own is not None:
            own(node)
        elif self.is_bias(node):
            self.emit("Identity", node.input[0], output=node.output[0])
        elif node.op_type in TYPES and node.input[0] in self.codes:
            self.layer(node, self.codes[node.input[0]])
        else:
            self.nodes.append(node)

    def quant(self, node: onnx.NodeProto) -> None:
        given = attributes(node)
        bits = _TYPES.get(given.get("dst_type", b"INT8"))
        if bits is None or "scale" not in given:
            raise ModelError(
                f"{node.name!r} must have a scale and dst_type INT4, INT8 or INT16, got {given}"
            )
        zero, (low, high) = int(given.get("offset", 0.0)), ascend_range(bits)
        lift, end = max(SHIFT, -low), node.output[0]
        steps = self.emit("Cast", node.input[0], to=1) if self.half else node.input[0]
        steps = self.emit("Mul", steps, self.put(np.float32(given["scale"])))
        steps = self.emit("Round", self.emit("Add", steps, self.put(np.float32(zero))))
        steps = self.emit("Clip", steps, self.put(np.float32(low)), self.put(np.float32(high)))
        lifted = self.emit("Add", steps, self.put(np.float32(lift)))
        if bits < 16:
            self.emit("Cast", lifted, output=end, to=2)
            self.codes[end] = (Uint8Part(end, 1, zero + lift),)
            return
        integers, by = self.emit("Cast", lifted, to=6), self.put(np.int32(256))
        parts = [self.emit("Cast", self.emit(op, integers, by), to=2) for op in ("Div", "Mod")]
        self.codes[end] = tuple(map(Uint8Part, parts, (256, 1), divmod(zero + lift, 256)))

    def dequant(self, node: onnx.NodeProto) -> None:
        scales = unpack_dequant_scales(self.value(node.input[1]))
        maker, rank = self.index.producer.get(node.input[0]), 0
        if maker is not None and maker.op_type in ("Conv", "ConvTranspose"):
            rank = self.value(maker.input[1]).ndim - 2
        scale = self.put(scales.reshape(1, -1, *[1] * rank))
        self.scale(node, self.emit("Cast", node.input[0], to=1), scale)

    def antiquant(self, node: onnx.NodeProto) -> None:
        given = attributes(node)
        parts = self.codes.get(node.input[0], ())
        if len(parts) != 1 or "scale" not in given:
            raise ModelError(
                f"{node.name!r} must have a scale and read an int8 AscendQuant's output"
            )
        scale = self.put(np.float32(given["scale"]))
        part = replace(parts[0], zero=int(given.get("offset", 0.0)) + SHIFT)
        self.scale(node, self.centred(part), scale)

    def scale(self, node: onnx.NodeProto, start: str, scale: str) -> None:
        """Multiply by a scale in float32; the output is float16 if the node's dtype is 1."""
        if attributes(node).get("dtype", 0) != 1:
            self.emit("Mul", start, scale, output=node.output[0])
        else:
            self.emit("Cast", self.emit("Mul", start, scale), output=node.output[0], to=10)

    def centred(self, part: Uint8Part) -> str:
        """Return q - offset in float, of a uint8 part."""
        return self.emit(
            "Sub", self.emit("Cast", part.tensor, to=1), self.put(np.float32(part.zero))
        )

    def layer(self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...]) -> None:
        """Write a layer, one of `TYPES`, whose input is quantized."""
        if node.op_type == "AveragePool":
            (part,) = parts
            node.input[0] = self.centred(part)
            self.nodes.append(node)
            return
        if node.op_type in ("Gemm", "MatMul") and node.input[1] in self.codes:
            both = (*parts, *self.codes[node.input[1]])
            (first, second), zeros = both, [self.put(np.uint8(part.zero)) for part in both]
            tensors = first.tensor, second.tensor
            self.emit("MatMulInteger", *tensors, *zeros, output=node.output[0])
            return
        weight, dtype = self.weight(node), np.int64 if len(parts) > 1 else np.int32
        transposed = node.op_type == "ConvTranspose"
        terms = []
        for total, factor in (self.halves if transposed else self.products)(node, parts, weight):
            if transposed or dtype == np.int64:  # the other operators write int32
                total = self.emit("Cast", total, to=7 if dtype == np.int64 else 6)
            if factor != 1:
                total = self.emit("Mul", total, self.put(dtype(factor)))
            terms.append(total)
        if len(node.input) > 2 and node.input[2]:
            bias = self.bias(node).reshape(-1, *[1] * (weight.ndim - 2))
            terms.append(self.put(bias.astype(dtype)))
        for term in terms[1:]:
            terms[0] = self.emit("Add", terms[0], term)
        self.emit("Identity", terms[0], output=node.output[0])

    def products(
        self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...], weight: NDArray[Any]
    ) -> Iterator[tuple[str, int]]:
        """Yield (sums of products, int32; their factor) of each part with a uint8 weight."""
        conv = node.op_type == "Conv"
        if attributes(node).get("transB", 0):
            weight = weight.T
        kernel = self.put((weight.astype(np.int16) + SHIFT).astype(np.uint8))
        level = self.put(np.uint8(SHIFT))
        for part in parts:
            inputs = part.tensor, kernel, self.put(np.uint8(part.zero)), level
            op, like = ("ConvInteger", node) if conv else ("MatMulInteger", None)
            yield self.emit(op, *inputs, like=like), part.factor

    def halves(
        self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...], weight: NDArray[Any]
    ) -> Iterator[tuple[str, int]]:
        """Yield (sums of products, exact in float; their factor) of the weight's two halves."""
        weight = weight.astype(np.int32)
        if 255 * 15 * int(np.prod(weight.shape[2:])) * weight.shape[0] >= _EXACT:
            raise ModelError(
                f"{node.name!r} sums too many products to be exact here, weight {weight.shape};"
                " compare the fake-quant model instead"
            )
        low = weight & 15
        for part in parts:
            centred = self.centred(part)
            for values, factor in ((low, 1), ((weight - low) // 16, 16)):
                kernel = self.put(values.astype(np.float32))
                yield self.emit(node.op_type, centred, kernel, like=node), factor * part.factor

    def bias(self, node: onnx.NodeProto) -> NDArray[np.int32]:
        """Return a layer's bias."""
        name = node.input[2]
        maker = self.index.producer.get(name)
        if maker is not None and self.is_bias(maker):
            name = maker.input[0]
        values = self.value(name)
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {node.name!r} must be int32, got {values.dtype}")
        return values

    def is_bias(self, node: onnx.NodeProto) -> bool:
        """Whether a node is the Cast of an int32 bias in a layer with 4-bit activations."""
        if node.op_type != "Cast" or not node.name.endswith(".bias_quant"):
            return False
        bias = self.index.constants.get(node.input[0])
        return bias is not None and bias.data_type == 6

    def weight(self, node: onnx.NodeProto) -> NDArray[Any]:
        """Return a layer's integer weight, unpacked if it has 4 bits."""
        values = self.value(node.input[1])
        if node.name not in self.packed:
            return values
        return unpack_int4(values.astype(np.int8), packed_axis(node.op_type))

    def packed_by(self, node: onnx.NodeProto) -> list[str]:
        """Return the layer of an AscendDequant that marks its weights as packed, as a list."""
        if node.op_type != "AscendDequant" or attributes(node).get(PACKED) != b"INT4":
            return []
        maker = self.index.producer.get(node.input[0])
        if maker is not None and maker.op_type == "Add":
            makers = [self.index.producer.get(name) for name in maker.input]
            maker = next((m for m in makers if m is not None and m.op_type in TYPES), None)
        return [] if maker is None else [maker.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployComparison:
    """Differences between the outputs of the deploy model and of the fake-quant models.

    Attributes:
        same_rounding: largest difference from the model that rounds as AscendQuant, relative to the
            largest value of that output.
        amct_cosine: lowest cosine of an output with that of AMCT's fake-quant model.
        sums: layer with 16-bit activations -> its largest sum, relative to 2^31.
    """

    samples: int
    same_rounding: float
    amct_cosine: float
    sums: Mapping[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """Return the note for the report."""
        return (
            f"The deploy model was run in integers on {self.samples} samples: within"
            f" {self.same_rounding:.1g} of the fake-quant model with AscendQuant's rounding,"
            f" cosine {self.amct_cosine:.5f} with AMCT's rounding"
            + ("." if self.same_rounding <= _TOLERANCE else "; look into this before deploying.")
            + self._sums_sentence()
        )

    def _sums_sentence(self) -> str:
        """Return a sentence on the sums of 16-bit activations, which AMCT does not check."""
        if not self.sums:
            return ""
        worst = max(self.sums, key=lambda name: self.sums[name])
        return (
            f" Sums of 16-bit activations reached {self.sums[worst]:.3g} of int32's end, in {worst}"
            + (
                "."
                if self.sums[worst] < 1
                else ", and are wrong wherever they are stored in int32; give it 8 bits."
            )
        )


def compare_deploy_model(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Iterable[Mapping[str, NDArray[Any]]],
    *,
    threads: int | None = None,
) -> DeployComparison:
    """Run the deploy model and the fake-quant models on the same samples.

    Raises:
        BackendError: ONNX Runtime refuses a model or a sample.
        ModelError: the sums of a layer are too large to be exact.
    """
    wide = {f"{n}_output0": n for n, q in layers.items() if q.record.act_bits == 16}
    deployed = open_deploy(deploy_model(model, layers), threads=threads, shown=tuple(wide))
    # ONNX Runtime's optimizer would fold the dequantization into the weights.
    references = [
        OrtSession.open(
            fake_quant_model(model, layers, npu_rounding=npu), threads=threads, optimize=False
        )
        for npu in (True, False)
    ]
    same, lowest, count = 0.0, 1.0, 0
    sums = dict.fromkeys(wide.values(), 0.0)
    for sample in samples:
        got = deployed.run(sample)
        like_npu, like_amct = (reference.run(sample) for reference in references)
        count += 1
        for tensor, name in wide.items():
            sums[name] = max(sums[name], float(np.abs(got.pop(tensor)).max()) / _END)
        for name, value in got.items():
            if value.dtype.kind != "f" or not value.size or like_amct[name].shape != value.shape:
                continue
            largest = float(np.abs(value).max()) or 1.0
            with np.errstate(invalid="ignore"):  # both may overflow to the same infinity
                apart = np.where(value == like_npu[name], 0, np.abs(value - like_npu[name]))
            same = max(same, float(apart.max()) / largest)
            lowest = min(lowest, cosine(value, like_amct[name]))
    return DeployComparison(samples=count, same_rounding=same, amct_cosine=lowest, sums=sums)


def deploy_model_note(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], request: BuildRequest
) -> str:
    """Return a note on how a build's deploy model compares with its fake-quant model."""
    try:
        verified = compare_deploy_model(
            model, layers, request.feed.first(_CHECKED), threads=request.threads
        )
    except ModelError as error:
        return f"The deploy model was not run in integers: {error}."
    return verified.sentence()
