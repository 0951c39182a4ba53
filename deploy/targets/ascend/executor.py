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

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from calibrators.amct.arq import ascend_range
from calibrators.grids import Int32Array
from deploy.errors import ModelError
from deploy.graph.edit import copy_message, make_node, rebuild
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
_FLOAT32_EXACT = 2**24  # float32 adds integers below this without rounding
_INT32_END = 2**31
_BITS_BY_TYPE = {b"INT4": 4, b"INT8": 8, b"INT16": 16}  # dst_type of AscendQuant
_MAX_DIFFERENCE = 1e-2  # relative; above it the note asks for a closer look
_CHECKED_SAMPLES = 2  # a build runs the deploy model on them


@dataclass(frozen=True, slots=True)
class Uint8Part:
    """A uint8 tensor; a quantized tensor is the sum of (tensor - zero) * factor of its parts."""

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
    model: onnx.ModelProto, *, threads: int | None = None, extra_outputs: Collection[str] = ()
) -> Session:
    """Open a deploy model on the CPU, with the inputs and outputs that it has on the NPU.

    `extra_outputs`: int64 sums of layers with 16-bit activations, added to the outputs.

    Raises:
        ModelError: the model cannot be rewritten.
        BackendError: ONNX Runtime refuses it.
    """
    model = to_integer_model(model)
    for name in extra_outputs:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, None))
    return OrtSession.open(model, threads=threads, optimize=False)


class _IntegerWriter:
    """Writer of the nodes that compute a deploy model, in the order of its nodes.

    Attributes:
        nodes, constants: written so far.
        parts_by_tensor: quantized tensor -> its uint8 parts.
        packed_outputs: outputs of layers with two 4-bit weights in a byte.
        has_float16: whether the model's activations are float16.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.index = Graph(model)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.parts_by_tensor: dict[str, tuple[Uint8Part, ...]] = {}
        self.packed_outputs = _find_packed_outputs(self.index)
        self.has_float16 = any(
            node.op_type in ("AscendDequant", "AscendAntiQuant") and _writes_float16(node)
            for node in self.index.nodes
        )

    def emit(
        self,
        op: str,
        *inputs: str,
        output: str = "",
        template: onnx.NodeProto | None = None,
        **options: Any,
    ) -> str:
        """Append a node; return its output, a new tensor unless `output` names one.

        `template`: node whose attributes it gets.
        """
        name = f"exec.{len(self.nodes)}"
        output = output or name
        node = make_node(op, inputs, output, name, **options)
        if template is not None:
            node.attribute.extend(template.attribute)
        self.nodes.append(node)
        return output

    def add_constant(self, value: Any) -> str:
        """Add a constant; return its name."""
        name = f"exec.constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def read_constant(self, name: str) -> NDArray[Any]:
        """Return the value of a constant of the deploy model.

        Raises:
            ModelError: the model has no such constant.
        """
        if name not in self.index.constants:
            raise ModelError(f"the deploy model must have {name!r} as a constant, got none")
        return numpy_helper.to_array(self.index.constants[name])

    def rewrite(self, node: onnx.NodeProto) -> None:
        """Write the nodes that compute one node of the deploy model."""
        if node.op_type == "AscendQuant":
            self.write_quant(node)
        elif node.op_type == "AscendDequant":
            self.write_dequant(node)
        elif node.op_type == "AscendAntiQuant":
            self.write_anti_quant(node)
        elif self.is_bias_cast(node):
            self.emit("Identity", node.input[0], output=node.output[0])
        elif node.op_type in TYPES and node.input[0] in self.parts_by_tensor:
            self.write_layer(node, self.parts_by_tensor[node.input[0]])
        else:
            self.nodes.append(node)

    def write_quant(self, node: onnx.NodeProto) -> None:
        """Write an AscendQuant, which rounds a float tensor to codes (integers of 4 to 16 bits).

        The codes are computed in float, and shifted so that they start at 0. With up to 8 bits
        they are one uint8 tensor, with 16 bits two: code = 256 * high byte + low byte.
        """
        node_attributes = attributes(node)
        bits = _BITS_BY_TYPE.get(node_attributes.get("dst_type", b"INT8"))
        if bits is None or "scale" not in node_attributes:
            raise ModelError(
                f"{node.name!r} must have a scale and dst_type INT4, INT8 or INT16, got"
                f" {node_attributes}"
            )
        offset = int(node_attributes.get("offset", 0.0))
        low, high = ascend_range(bits)

        codes = node.input[0]
        if self.has_float16:
            codes = self.emit("Cast", codes, to=TensorProto.FLOAT)
        codes = self.emit("Mul", codes, self.add_constant(np.float32(node_attributes["scale"])))
        codes = self.emit("Add", codes, self.add_constant(np.float32(offset)))
        codes = self.emit("Round", codes)
        limits = [self.add_constant(np.float32(limit)) for limit in (low, high)]
        codes = self.emit("Clip", codes, *limits)

        unsigned_shift = max(SHIFT, -low)  # 128, or 32768 with 16 bits
        unsigned_codes = self.emit("Add", codes, self.add_constant(np.float32(unsigned_shift)))
        output = node.output[0]  # a layer looks its parts up by this name
        if bits < 16:
            self.emit("Cast", unsigned_codes, output=output, to=TensorProto.UINT8)
            self.parts_by_tensor[output] = (Uint8Part(output, 1, offset + unsigned_shift),)
            return

        int32_codes = self.emit("Cast", unsigned_codes, to=TensorProto.INT32)
        base = self.add_constant(np.int32(256))
        high_byte = self.emit("Cast", self.emit("Div", int32_codes, base), to=TensorProto.UINT8)
        low_byte = self.emit("Cast", self.emit("Mod", int32_codes, base), to=TensorProto.UINT8)
        high_zero, low_zero = divmod(offset + unsigned_shift, 256)
        self.parts_by_tensor[output] = (
            Uint8Part(high_byte, 256, high_zero),
            Uint8Part(low_byte, 1, low_zero),
        )

    def write_dequant(self, node: onnx.NodeProto) -> None:
        """Write an AscendDequant: the integer sums times the scales in its packed parameter."""
        scales = unpack_dequant_scales(self.read_constant(node.input[1]))
        producer = self.index.producer.get(node.input[0])
        rank = 0
        if producer is not None and producer.op_type in ("Conv", "ConvTranspose"):
            rank = self.read_constant(producer.input[1]).ndim - 2
        integers = self.emit("Cast", node.input[0], to=TensorProto.FLOAT)
        self.multiply_by_scale(node, integers, scales.reshape(1, -1, *[1] * rank))

    def write_anti_quant(self, node: onnx.NodeProto) -> None:
        """Write an AscendAntiQuant, which restores an activation from its codes."""
        node_attributes = attributes(node)
        parts = self.parts_by_tensor.get(node.input[0], ())
        if len(parts) != 1 or "scale" not in node_attributes:
            raise ModelError(
                f"{node.name!r} must have a scale and read an int8 AscendQuant's output"
            )
        part = replace(parts[0], zero=int(node_attributes.get("offset", 0.0)) + SHIFT)
        self.multiply_by_scale(node, self.subtract_zero(part), np.float32(node_attributes["scale"]))

    def multiply_by_scale(self, node: onnx.NodeProto, values: str, scale: Any) -> None:
        """Write the output of a dequantization: the product in float32, or rounded to float16."""
        inputs = values, self.add_constant(scale)
        if _writes_float16(node):
            product = self.emit("Mul", *inputs)
            self.emit("Cast", product, output=node.output[0], to=TensorProto.FLOAT16)
        else:
            self.emit("Mul", *inputs, output=node.output[0])

    def subtract_zero(self, part: Uint8Part) -> str:
        """Return q - offset of a uint8 part, in float32."""
        values = self.emit("Cast", part.tensor, to=TensorProto.FLOAT)
        return self.emit("Sub", values, self.add_constant(np.float32(part.zero)))

    def write_layer(self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...]) -> None:
        """Write the nodes that compute a quantized layer in integers.

        Args:
            node: the layer, one of `TYPES`.
            parts: the uint8 parts of its input, whose values are summed: one, or two with 16 bits.
        """
        if node.op_type == "AveragePool":  # the mean of integers is no integer: it is a float pool
            (part,) = parts
            node.input[0] = self.subtract_zero(part)
            self.nodes.append(node)
        elif node.op_type in ("Gemm", "MatMul") and node.input[1] in self.parts_by_tensor:
            # both factors are activations, of 8 bits: one part each
            (part,) = parts
            (second_part,) = self.parts_by_tensor[node.input[1]]
            zeros = [self.add_constant(np.uint8(zero)) for zero in (part.zero, second_part.zero)]
            tensors = part.tensor, second_part.tensor
            self.emit("MatMulInteger", *tensors, *zeros, output=node.output[0])
        else:
            self.write_weighted_layer(node, parts)

    def write_weighted_layer(self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...]) -> None:
        """Write a layer with a weight: the products of each part, times its factor, plus bias.

        Args:
            node: the layer.
            parts: uint8 tensors; the input is the sum of (tensor - zero) * factor.
        """
        weight = self.read_weight(node)
        # 16-bit activations are two parts, whose sums may exceed int32
        sum_type = np.int64 if len(parts) > 1 else np.int32
        onnx_type = helper.np_dtype_to_tensor_dtype(np.dtype(sum_type))
        multiply = self.multiply_uint8
        if node.op_type == "ConvTranspose":  # ONNX has no integer operator for it
            multiply = self.multiply_exact
        summands = []
        for products, factor in multiply(node, parts, weight):
            summand = self.emit("Cast", products, to=onnx_type)
            if factor != 1:
                summand = self.emit("Mul", summand, self.add_constant(sum_type(factor)))
            summands.append(summand)
        if len(node.input) > 2 and node.input[2]:
            bias = self.read_bias(node).reshape(-1, *[1] * (weight.ndim - 2))
            summands.append(self.add_constant(bias.astype(sum_type)))

        total = summands[0]
        for summand in summands[1:]:
            total = self.emit("Add", total, summand)
        self.emit("Identity", total, output=node.output[0])

    def multiply_uint8(
        self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...], weight: NDArray[Any]
    ) -> Iterator[tuple[str, int]]:
        """Yield (sums of products, int32; their factor) of each part with a uint8 weight."""
        if attributes(node).get("transB", 0):
            weight = weight.T
        kernel = self.add_constant((weight.astype(np.int16) + SHIFT).astype(np.uint8))
        kernel_zero = self.add_constant(np.uint8(SHIFT))
        for part in parts:
            inputs = part.tensor, kernel, self.add_constant(np.uint8(part.zero)), kernel_zero
            if node.op_type == "Conv":
                products = self.emit("ConvInteger", *inputs, template=node)
            else:
                products = self.emit("MatMulInteger", *inputs)
            yield products, part.factor

    def multiply_exact(
        self, node: onnx.NodeProto, parts: tuple[Uint8Part, ...], weight: NDArray[Any]
    ) -> Iterator[tuple[str, int]]:
        """Yield (name of a tensor with sums of products, its factor), whose total is the result.

        There is one tensor for each part of the input and half of the weight. A weight is
        16 high + low, with 0 <= low < 16, so that the sums of either half stay below 2^24, up to
        which float32 holds every integer.
        """
        weight = weight.astype(np.int32)
        max_product = 255 * 15  # an input less its zero point is at most 255, half a weight 15
        product_count = weight.shape[0] * int(np.prod(weight.shape[2:]))  # at most, of one output
        if max_product * product_count >= _FLOAT32_EXACT:
            raise ModelError(
                f"{node.name!r} sums too many products to be exact here, weight {weight.shape};"
                " compare the fake-quant model instead"
            )
        low = weight & 15
        high = (weight - low) // 16
        for part in parts:
            values = self.subtract_zero(part)
            for half, factor in ((low, 1), (high, 16)):
                half_name = self.add_constant(half.astype(np.float32))
                products = self.emit(node.op_type, values, half_name, template=node)
                yield products, factor * part.factor

    def read_bias(self, node: onnx.NodeProto) -> Int32Array:
        """Return a layer's bias."""
        name = node.input[2]
        producer = self.index.producer.get(name)
        if producer is not None and self.is_bias_cast(producer):
            name = producer.input[0]
        values = self.read_constant(name)
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {node.name!r} must be int32, got {values.dtype}")
        return values

    def is_bias_cast(self, node: onnx.NodeProto) -> bool:
        """Whether a node is the Cast of an int32 bias in a layer with 4-bit activations."""
        if node.op_type != "Cast" or not node.name.endswith(".bias_quant"):
            return False
        bias = self.index.constants.get(node.input[0])
        return bias is not None and bias.data_type == TensorProto.INT32

    def read_weight(self, node: onnx.NodeProto) -> NDArray[Any]:
        """Return a layer's integer weight, unpacked if it has 4 bits."""
        values = self.read_constant(node.input[1])
        if node.output[0] in self.packed_outputs:
            return unpack_int4(values.astype(np.int8), packed_axis(node.op_type))
        return values


def _writes_float16(node: onnx.NodeProto) -> bool:
    return bool(attributes(node).get("dtype", 0) == 1)


def _find_packed_outputs(index: Graph) -> set[str]:
    """Return the outputs of layers whose AscendDequant marks their weights as packed."""
    outputs = set()
    for node in index.nodes:
        if node.op_type == "AscendDequant" and attributes(node).get(PACKED) == b"INT4":
            outputs.add(node.input[0])
            producer = index.producer.get(node.input[0])
            if producer is not None and producer.op_type == "Add":  # the bias of a MatMul
                outputs.update(producer.input)
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployComparison:
    """Differences between the outputs of the deploy model and of two fake-quant models.

    Attributes:
        samples: number of samples that were run.
        max_npu_difference: largest difference from the model that rounds as AscendQuant, relative
            to the largest value of that output.
        min_amct_cosine: lowest cosine of an output with that of AMCT's fake-quant model.
        sum_share_by_layer: layer with 16-bit activations -> its largest sum, relative to 2^31.
    """

    samples: int
    max_npu_difference: float
    min_amct_cosine: float
    sum_share_by_layer: Mapping[str, float]

    def sentence(self) -> str:
        """Return the note for the report."""
        text = (
            f"The deploy model was run in integers on {self.samples} samples: within"
            f" {self.max_npu_difference:.1g} of the fake-quant model with AscendQuant's rounding,"
            f" cosine {self.min_amct_cosine:.5f} with AMCT's rounding"
        )
        if not self.max_npu_difference <= _MAX_DIFFERENCE:  # also for NaN
            text += "; look into this before deploying"
        # layers with 16-bit activations: AMCT does not check whether their sums fit int32
        if self.sum_share_by_layer:
            layer = max(self.sum_share_by_layer, key=self.sum_share_by_layer.__getitem__)
            sum_share = self.sum_share_by_layer[layer]
            text += (
                f". Sums of 16-bit activations reached {sum_share:.3g} of int32's end, in {layer}"
            )
            if sum_share >= 1:
                text += ", and are wrong wherever they are stored in int32; give it 8 bits"
        return f"{text}."


def compare_deploy_model(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Mapping[str, NDArray[Any]]],
    *,
    threads: int | None = None,
) -> DeployComparison:
    """Run the deploy model and two fake-quant models on the same samples; compare their outputs.

    Args:
        model: the float model.
        layers: layer name -> its integers and scales.
        samples: input name -> array, for each sample.
        threads: threads of ONNX Runtime; None for its default.

    Raises:
        BackendError: ONNX Runtime refuses a model or a sample.
        ModelError: the sums of a layer are too large to be exact.
    """
    deploy = deploy_model(model, layers)
    layer_by_sums_tensor = {}  # tensor of a layer's integer sums -> layer name
    for node in deploy.graph.node:
        layer_name = node.name.removesuffix(".dequant")
        is_dequant = node.op_type == "AscendDequant"
        # with 16 bits the sums may exceed int32: they become outputs, to be measured
        if is_dequant and layers[layer_name].record.act_bits == 16:
            layer_by_sums_tensor[node.input[0]] = layer_name
    deploy_session = open_deploy(deploy, threads=threads, extra_outputs=tuple(layer_by_sums_tensor))
    deploy_runs = [deploy_session.run(sample) for sample in samples]
    del deploy_session  # each session has all weights, so one is open at a time

    def run_fake_quant(*, npu_rounding: bool) -> list[dict[str, NDArray[Any]]]:
        fake_quant = fake_quant_model(model, layers, npu_rounding=npu_rounding)
        # ONNX Runtime's optimizer would fold the dequantization into the weights
        session = OrtSession.open(fake_quant, threads=threads, optimize=False)
        del fake_quant  # the session has the weights
        return [session.run(sample) for sample in samples]

    npu_runs = run_fake_quant(npu_rounding=True)
    amct_runs = run_fake_quant(npu_rounding=False)

    sum_share_by_layer = {}
    for sums_tensor, layer_name in layer_by_sums_tensor.items():
        # the sums leave the outputs, since the fake-quant models have none
        largest_sums = [float(np.abs(outputs.pop(sums_tensor)).max()) for outputs in deploy_runs]
        sum_share_by_layer[layer_name] = max(largest_sums, default=0.0) / _INT32_END

    npu_differences = [0.0]
    amct_cosines = [1.0]
    runs = zip(deploy_runs, npu_runs, amct_runs, strict=True)
    for outputs, npu_outputs, amct_outputs in runs:
        for name, value in outputs.items():
            npu_value = npu_outputs[name]
            amct_value = amct_outputs[name]
            is_float = value.dtype.kind == "f" and value.size > 0
            # rounding may change a shape, such as the number of boxes after suppression
            if is_float and value.shape == npu_value.shape == amct_value.shape:
                npu_differences.append(_relative_difference(value, npu_value))
                amct_cosines.append(_cosine_of_numbers(value, amct_value))
    return DeployComparison(
        samples=len(samples),
        # NumPy's maximum and minimum, since Python's would lose a NaN
        max_npu_difference=float(np.max(npu_differences)),
        min_amct_cosine=float(np.min(amct_cosines)),
        sum_share_by_layer=sum_share_by_layer,
    )


def _cosine_of_numbers(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the cosine without the values that are NaN in both; NaN if only one has a NaN."""
    is_compared = ~(np.isnan(value) & np.isnan(reference))
    return cosine(value[is_compared], reference[is_compared])


def _relative_difference(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the largest difference, relative to the largest magnitude of `value`.

    It is NaN if only one of them has a NaN.
    """
    largest = float(np.nan_to_num(np.abs(value)).max()) or 1.0
    is_equal = (value == reference) | (np.isnan(value) & np.isnan(reference))
    with np.errstate(invalid="ignore"):  # both may overflow to the same infinity
        differences = np.where(is_equal, 0, np.abs(value - reference))
    return float(differences.max()) / largest


def deploy_model_note(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], request: BuildRequest
) -> str:
    """Return a note on how a build's deploy model compares with its fake-quant model."""
    samples = request.feed.first_samples(_CHECKED_SAMPLES)
    try:
        comparison = compare_deploy_model(model, layers, samples, threads=request.threads)
    except ModelError as error:
        return f"The deploy model was not run in integers: {error}."
    return comparison.sentence()
