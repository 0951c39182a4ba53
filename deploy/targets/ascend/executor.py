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
from deploy.targets.ascend.deploy_model import (
    PACKED,
    deploy_model,
    packed_axis,
    unpack_dequant_scales,
    unpack_int4,
)
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


class DeployConstants:
    """Constants of a deploy model, and new ones to add."""

    def __init__(self, index: Graph) -> None:
        self._existing = index.constants
        self.new: dict[str, NDArray[Any]] = {}

    def put(self, name: str, value: Any) -> str:
        """Add a constant; return its name."""
        self.new[name] = np.asarray(value)
        return name

    def value(self, name: str) -> NDArray[Any]:
        """Return the value of a constant of the deploy model.

        Raises:
            ModelError: the model has no such constant.
        """
        if name not in self._existing:
            raise ModelError(f"the deploy model must have {name!r} as a constant, got none")
        return numpy_helper.to_array(self._existing[name])


class IntegerLayerWriter:
    """Writer of the nodes that compute a layer on uint8 parts.

    Attributes:
        codes: quantized tensor -> its parts; the writer of its AscendQuant fills it in.
    """

    def __init__(self, model: onnx.ModelProto, index: Graph, constants: DeployConstants) -> None:
        self.index, self.constants = index, constants
        self.codes: dict[str, tuple[Uint8Part, ...]] = {}
        self.packed = {name for node in model.graph.node for name in self.packed_by(node)}

    def write(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes of a layer, one of `TYPES`, whose input is quantized."""
        heavy = {
            "Conv": self.conv,
            "ConvTranspose": self.convtranspose,
            "Gemm": self.gemm,
            "MatMul": self.gemm,
            "AveragePool": self.averagepool,
        }[node.op_type]
        return heavy(node, self.codes[node.input[0]])

    def conv(self, node: onnx.NodeProto, codes: tuple[Uint8Part, ...]) -> list[onnx.NodeProto]:
        """Return the nodes of a Conv: ConvInteger."""
        return self.summed(node, "ConvInteger", codes, self.weight(node))

    def gemm(self, node: onnx.NodeProto, codes: tuple[Uint8Part, ...]) -> list[onnx.NodeProto]:
        """Return the nodes of a Gemm or MatMul: MatMulInteger."""
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

    def averagepool(
        self, node: onnx.NodeProto, codes: tuple[Uint8Part, ...]
    ) -> list[onnx.NodeProto]:
        """Return a float pool on integer values."""
        (part,) = codes
        centred = f"{node.name}.exec.centred"
        before = self.centre(part, centred)
        node.input[0] = centred
        return [*before, node]

    def convtranspose(
        self, node: onnx.NodeProto, codes: tuple[Uint8Part, ...]
    ) -> list[onnx.NodeProto]:
        """Return float convolutions of the weight's two halves, whose sums are exact."""
        weight = self.weight(node).astype(np.int32)
        if 255 * 15 * int(np.prod(weight.shape[2:])) * weight.shape[0] >= _EXACT:
            raise ModelError(
                f"{node.name!r} sums too many products to be exact here, weight {weight.shape};"
                " compare the fake-quant model instead"
            )
        low = weight & 15
        name, int64 = node.name, len(codes) > 1
        nodes: list[onnx.NodeProto] = []
        sums: list[str] = []
        for place, part in enumerate(codes):
            centred = f"{name}.exec.centred{place}"
            nodes += self.centre(part, centred)
            for word, values, factor in (("low", low, 1), ("high", (weight - low) // 16, 16)):
                word = f"{word}{place}"
                kernel = self.constants.put(f"{name}.exec.{word}", values.astype(np.float32))
                half = copy_message(node)
                half.name, half.output[0] = f"{name}.{word}", f"{name}.exec.{word}.f"
                del half.input[:]
                half.input.extend([centred, kernel])
                nodes.append(half)
                nodes += self.scaled(half, factor * part.factor, sums, int64=int64)
        return [*nodes, *self.added(node, sums, weight.ndim - 2, int64=int64)]

    def summed(
        self, node: onnx.NodeProto, op: str, codes: tuple[Uint8Part, ...], weight: NDArray[Any]
    ) -> list[onnx.NodeProto]:
        """Return one integer operator per part of the input, and their sum with the bias."""
        name, int64 = node.name, len(codes) > 1
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
            nodes += self.scaled(heavy, part.factor, sums, int64=int64)
        return [*nodes, *self.added(node, sums, weight.ndim - 2, int64=int64)]

    def scaled(
        self, node: onnx.NodeProto, factor: int, sums: list[str], *, int64: bool
    ) -> list[onnx.NodeProto]:
        """Return nodes that multiply a node's output by a factor; append the result to `sums`."""
        nodes, end = [], node.output[0]
        if int64 or node.op_type == "ConvTranspose":  # the other operators write int32
            nodes, end = (
                make_chain(node.name, end, f"{end}.i", [], cast=7 if int64 else 6),
                f"{end}.i",
            )
        if factor != 1:
            by = self.constants.put(f"{end}.factor", (np.int64 if int64 else np.int32)(factor))
            nodes.append(make_node("Mul", [end, by], f"{end}.scaled", f"{node.name}.scaled"))
            end = f"{end}.scaled"
        sums.append(end)
        return nodes

    def added(
        self, node: onnx.NodeProto, sums: list[str], rank: int, *, int64: bool
    ) -> list[onnx.NodeProto]:
        """Return nodes that add `sums` and the bias, if there is one."""
        bias = node.input[2] if len(node.input) > 2 else ""
        terms = [*sums, *([self.bias(node, bias, rank, int64=int64)] if bias else [])]
        if len(terms) == 1:
            return [make_node("Identity", terms, node.output[0], f"{node.name}.sum")]
        nodes, total = [], terms[0]
        for place, term in enumerate(terms[1:], start=1):
            end = node.output[0] if place == len(terms) - 1 else f"{node.name}.exec.sum{place}"
            nodes.append(make_node("Add", [total, term], end, f"{node.name}.sum{place}"))
            total = end
        return nodes

    def bias(self, node: onnx.NodeProto, name: str, rank: int, *, int64: bool) -> str:
        """Add the bias in the shape and type of the sums; return its name."""
        maker = self.index.producer.get(name)
        cast = maker if self.is_bias(maker) else None
        values = self.constants.value(name if cast is None else cast.input[0])
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {node.name!r} must be int32, got {values.dtype}")
        shaped = values.reshape(-1, *[1] * rank)
        return self.constants.put(
            f"{node.name}.exec.bias", shaped.astype(np.int64) if int64 else shaped
        )

    def is_bias(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node is the Cast of an int32 bias in a layer with 4-bit activations."""
        if node is None or node.op_type != "Cast" or not node.name.endswith(".bias_quant"):
            return False
        bias = self.index.constants.get(node.input[0])
        return bias is not None and bias.data_type == 6

    def weight(self, node: onnx.NodeProto) -> NDArray[Any]:
        """Return a layer's integer weight, unpacked if it has 4 bits."""
        values = self.constants.value(node.input[1])
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

    def centre(self, part: Uint8Part, end: str) -> list[onnx.NodeProto]:
        """Return nodes that compute q - offset in float from a uint8 part."""
        cast = make_chain(f"{end}.in", part.tensor, f"{end}.u8", [], cast=1)
        shift = self.constants.put(f"{end}.shift", np.float32(part.zero))
        return [*cast, make_node("Sub", [f"{end}.u8", shift], end, f"{end}.centre")]


def make_chain(
    name: str, start: str, end: str, steps: list[tuple[str, list[str]]], *, cast: int
) -> list[onnx.NodeProto]:
    """Return nodes of these (op, further inputs) from `start`, and a Cast to `cast`: `end`."""
    nodes, tensor = [], start
    for place, (op, others) in enumerate(steps):
        output = f"{name}.exec.{place}.out"
        nodes.append(make_node(op, [tensor, *others], output, f"{name}.{place}"))
        tensor = output
    closing = make_node("Cast", [tensor], end, f"{name}.cast")
    closing.attribute.add(name="to", type=2, i=cast)
    return [*nodes, closing]


def make_node(op: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    """Return a node with one output."""
    return helper.make_node(op, inputs, [output], name=name)


def to_integer_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes a deploy model in ONNX Runtime with the NPU's arithmetic.

    Raises:
        ModelError: a node differs from what `deploy.targets.ascend.deploy_model` writes.
    """
    out = copy_message(model)
    with malformed_as_model_error():
        rewriter = _Rewriter(out)
        nodes = [new for node in out.graph.node for new in rewriter.rewrite(node)]
        rewriter.finish(nodes)
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
    from deploy.runtimes.ort import OrtSession

    model = to_integer_model(model)
    model.graph.output.extend(helper.make_tensor_value_info(name, 7, None) for name in shown)
    return OrtSession.open(model, threads=threads, optimize=False)


class _Rewriter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.index = model.graph, Graph(model)
        self.constants = DeployConstants(self.index)
        self.layers = IntegerLayerWriter(model, self.index, self.constants)
        ends = [n for n in model.graph.node if n.op_type in ("AscendDequant", "AscendAntiQuant")]
        self.half = any(attributes(n).get("dtype", 0) == 1 for n in ends)

    def rewrite(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that compute one node of the deploy model."""
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
            before = make_chain(f"{name}.exec", node.input[0], start, [], cast=1)
        else:
            start = node.input[0]
        if bits < 16:
            self.layers.codes[end] = (Uint8Part(end, 1, zero + lift),)
            return [*before, *make_chain(name, start, end, steps, cast=2)]
        high, low = divmod(zero + lift, 256)
        self.layers.codes[end] = (
            Uint8Part(f"{end}.high", 256, high),
            Uint8Part(f"{end}.low", 1, low),
        )
        lifted = make_chain(name, start, f"{end}.lifted", steps, cast=6)
        return [*before, *lifted, *self.bytes_of(end)]

    def bytes_of(self, name: str) -> list[onnx.NodeProto]:
        """Return nodes that split '<name>.lifted', int32 below 65536, into uint8 high and low."""
        by = self.constants.put(f"{name}.exec.256", np.int32(256))
        lifted, over, part = f"{name}.lifted", f"{name}.over", f"{name}.part"
        return [
            make_node("Div", [lifted, by], over, f"{name}.high"),
            make_node("Mod", [lifted, by], part, f"{name}.low"),
            *make_chain(f"{name}.high", over, f"{name}.high", [], cast=2),
            *make_chain(f"{name}.low", part, f"{name}.low", [], cast=2),
        ]

    def dequant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        scales = unpack_dequant_scales(self.constants.value(node.input[1]))
        rank = self.rank(self.index.producer.get(node.input[0]))
        scale = self.constants.put(f"{node.name}.exec.scale", scales.reshape(1, -1, *[1] * rank))
        return [
            *make_chain(f"{node.name}.float", node.input[0], f"{node.name}.exec.f", [], cast=1),
            *self.scaled_float(node, f"{node.name}.exec.f", scale),
        ]

    def scaled_float(self, node: onnx.NodeProto, start: str, scale: str) -> list[onnx.NodeProto]:
        """Return a multiplication by a scale in float32, or float16 if the node's dtype is 1."""
        if attributes(node).get("dtype", 0) != 1:
            return [make_node("Mul", [start, scale], node.output[0], node.name)]
        return make_chain(node.name, start, node.output[0], [("Mul", [scale])], cast=10)

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
        return [*self.layers.centre(part, centred), *self.scaled_float(node, centred, scale)]

    def rank(self, producer: onnx.NodeProto | None) -> int:
        """Return the spatial rank of AscendDequant's input; its scale is per channel on axis 1."""
        if producer is None or producer.op_type not in ("Conv", "ConvTranspose"):
            return 0
        return self.constants.value(producer.input[1]).ndim - 2

    def finish(self, nodes: list[onnx.NodeProto]) -> None:
        """Write nodes and new constants into the graph, and drop unused constants."""
        self.graph.initializer.extend(
            numpy_helper.from_array(v, k) for k, v in self.constants.new.items()
        )
        rebuild(self.graph, nodes)


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
    from deploy.runtimes.ort import OrtSession
    from deploy.targets.ascend.fake_quant import fake_quant_model

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
