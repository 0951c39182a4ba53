"""Executor of deploy models on a CPU, and their comparison with the fake-quant model.

AscendQuant and AscendDequant run only on the NPU, so the deploy model is rewritten to ONNX's
standard operators, which compute with its integers in float32. That is exact while sums stay below
2^24::

    AscendQuant      q = clip(rne(x * scale + offset))
    layer            its operator on q - offset, with the integers of its weight and bias
    4-bit weights    unpacked from their bytes
    AscendDequant    sums * float32(low half of the parameter)
    AscendAntiQuant  (q - offset) * scale

`compare_deploy_model` compares with two fake-quant models. The one that rounds as AscendQuant does
must agree, except where float32 adds large sums in another order. AMCT's own adds the offset after
rounding, so it differs by one code for values exactly between two codes if the offset is odd.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from calibrators.amct.arq import ascend_range
from deploy.errors import ModelError, counted
from deploy.feed.parallel import Sample
from deploy.graph.edit import copy_message, make_node, rebuild
from deploy.graph.index import Graph, Nodes, attributes, describe_node
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
from deploy.targets.ascend.layers import LAYER_OPS
from deploy.targets.ascend.quant_layer import QuantLayers
from deploy.tensors import Array, Session

Runs = list[dict[str, Array]]  # for each sample: output name -> value

_INT32_END = 2**31
_BITS_BY_TYPE = {b"INT4": 4, b"INT8": 8, b"INT16": 16}  # dst_type of AscendQuant
_MAX_DIFFERENCE = 1e-2  # relative; above it the note asks for a closer look
CHECKED_SAMPLES = 2  # a build runs the deploy model on them


def to_standard_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of standard operators that computes a deploy model as the NPU does.

    Raises:
        ModelError: a node differs from what `deploy.targets.ascend.deploy_model` writes.
    """
    out = copy_message(model)
    with malformed_as_model_error():
        writer = _StandardWriter(out)
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

    Args:
        model: the deploy model.
        threads: threads of ONNX Runtime; None for its default.
        extra_outputs: inner tensors, added to the outputs.

    Raises:
        ModelError: the model cannot be rewritten.
        BackendError: ONNX Runtime refuses it.
    """
    standard_model = to_standard_model(model)
    for name in extra_outputs:
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        standard_model.graph.output.append(output)
    return OrtSession.open(standard_model, threads=threads, optimize=False)


class _StandardWriter:
    """Writer of the nodes that compute a deploy model, in the order of its nodes.

    Attributes:
        nodes, constants: written so far.
        offset_by_quant_output: output of an AscendQuant -> the offset of its integers.
        kernel_rank_by_layer_output: output of an int8 layer, sums of integer products -> spatial
            rank of the layer's kernel, 0 without one.
        packed_outputs: outputs of layers with two 4-bit weights in a byte.
        has_float16: whether the model's activations are float16.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.index = Graph(model)
        self.nodes: Nodes = []
        self.constants: list[onnx.TensorProto] = []
        self.offset_by_quant_output: dict[str, int] = {}
        self.kernel_rank_by_layer_output: dict[str, int] = {}
        self.packed_outputs = _find_packed_outputs(self.index)
        self.has_float16 = any(
            node.op_type in ("AscendDequant", "AscendAntiQuant") and _writes_float16(node)
            for node in self.index.nodes
        )

    def emit(self, op: str, *inputs: str, output: str = "", **options: Any) -> str:
        """Append a node; return its output, a new tensor unless `output` names one."""
        name = f"exec.{len(self.nodes)}"
        output = output or name
        self.nodes.append(make_node(op, inputs, output, name, **options))
        return output

    def add_constant(self, value: Any) -> str:
        """Add a constant in float32; return its name."""
        name = f"exec.constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def read_constant(self, name: str) -> Array:
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
        else:
            if node.op_type in LAYER_OPS and node.input[0] in self.offset_by_quant_output:
                self.convert_layer(node)
            elif node.op_type == "Add" and self.kernel_rank_by_layer_output.keys() & node.input:
                # the Add of a bias to the output of an int8 MatMul
                for index, tensor in enumerate(node.input):
                    if tensor not in self.kernel_rank_by_layer_output:
                        node.input[index] = self.convert_bias(node, tensor)
            self.nodes.append(node)

    def write_quant(self, node: onnx.NodeProto) -> None:
        """Write the standard nodes of an AscendQuant, which rounds a float tensor to codes.

        Codes are integers of 4 to 16 bits: clip(round(x * scale + offset)).
        """
        node_attributes = attributes(node)
        bits = _BITS_BY_TYPE.get(node_attributes.get("dst_type", b"INT8"))
        if bits is None or "scale" not in node_attributes:
            raise ModelError(
                f"{describe_node(node)} must have a scale and dst_type INT4, INT8 or INT16, got"
                f" {node_attributes}"
            )
        offset = int(node_attributes.get("offset", 0.0))
        lowest_code, highest_code = map(self.add_constant, ascend_range(bits))
        values = node.input[0]
        if self.has_float16:
            values = self.emit("Cast", values, to=TensorProto.FLOAT)
        scaled = self.emit("Mul", values, self.add_constant(node_attributes["scale"]))
        shifted = self.emit("Add", scaled, self.add_constant(offset))
        rounded = self.emit("Round", shifted)
        self.emit("Clip", rounded, lowest_code, highest_code, output=node.output[0])
        self.offset_by_quant_output[node.output[0]] = offset

    def write_dequant(self, node: onnx.NodeProto) -> None:
        """Write an AscendDequant: a layer's output times the scales in its packed parameter."""
        layer_output = node.input[0]
        scales = unpack_dequant_scales(self.read_constant(node.input[1]))
        kernel_rank = self.kernel_rank_by_layer_output.get(layer_output, 0)
        self.multiply_by_scale(node, layer_output, scales.reshape(1, -1, *[1] * kernel_rank))

    def write_anti_quant(self, node: onnx.NodeProto) -> None:
        """Write an AscendAntiQuant, which restores an activation from its codes."""
        node_attributes = attributes(node)
        if node.input[0] not in self.offset_by_quant_output or "scale" not in node_attributes:
            raise ModelError(
                f"{describe_node(node)} must have a scale and read an AscendQuant's output"
            )
        offset = node_attributes.get("offset", 0.0)
        values = self.emit("Sub", node.input[0], self.add_constant(offset))
        self.multiply_by_scale(node, values, node_attributes["scale"])

    def multiply_by_scale(self, node: onnx.NodeProto, values: str, scale: Any) -> None:
        """Write the output of a dequantization: the product in float32, or rounded to float16."""
        inputs = values, self.add_constant(scale)
        if _writes_float16(node):
            product = self.emit("Mul", *inputs)
            self.emit("Cast", product, output=node.output[0], to=TensorProto.FLOAT16)
        else:
            self.emit("Mul", *inputs, output=node.output[0])

    def convert_layer(self, node: onnx.NodeProto) -> None:
        """Change a layer's inputs in place, so that it computes on integers stored as float32.

        It reads its activations as codes less their offset, and its weight and bias in float32.
        """
        kernel_rank = 0  # stays 0 for a layer without a kernel
        # a pool has no second input, and that of a MatMul may be an activation
        if len(node.input) > 1 and node.input[1] not in self.offset_by_quant_output:
            weight = self.read_weight(node)
            if node.op_type in ("Conv", "ConvTranspose"):
                kernel_rank = weight.ndim - 2
            node.input[1] = self.add_constant(weight)
        if len(node.input) > 2 and node.input[2]:
            node.input[2] = self.convert_bias(node, node.input[2])
        for index, tensor in enumerate(node.input):  # a MatMul may have two activations
            if tensor in self.offset_by_quant_output:  # codes of an AscendQuant
                offset = self.add_constant(self.offset_by_quant_output[tensor])
                node.input[index] = self.emit("Sub", tensor, offset)
        self.kernel_rank_by_layer_output[node.output[0]] = kernel_rank

    def convert_bias(self, node: onnx.NodeProto, name: str) -> str:
        """Return the float32 form of a layer's int32 bias; with 4-bit activations a Cast makes it.

        Raises:
            ModelError: the bias of `node` is no constant, or of another type.
        """
        if name in self.index.producer:
            return name
        values = self.read_constant(name)
        if values.dtype != np.int32:
            raise ModelError(f"the bias of {describe_node(node)} must be int32, got {values.dtype}")
        return self.add_constant(values)

    def read_weight(self, node: onnx.NodeProto) -> Array:
        """Return a layer's integer weight, unpacked if it has 4 bits."""
        values = self.read_constant(node.input[1])
        if node.output[0] in self.packed_outputs:
            return unpack_int4(values.astype(np.int8), packed_axis(node.op_type))
        return values


def _writes_float16(node: onnx.NodeProto) -> bool:
    """Whether an AscendDequant or AscendAntiQuant has the output type float16."""
    return bool(attributes(node).get("dtype", 0) == 1)


def _find_packed_outputs(index: Graph) -> set[str]:
    """Return the outputs of layers whose AscendDequant marks their weights as packed."""
    outputs = set()
    for node in index.nodes:
        if node.op_type == "AscendDequant" and attributes(node).get(PACKED) == b"INT4":
            outputs.add(node.input[0])
            bias_add = index.find_producer(node.input[0], "Add")  # of a MatMul
            if bias_add is not None:
                outputs.update(bias_add.input)
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployComparison:
    """Differences between the outputs of the deploy model and of two fake-quant models.

    Attributes:
        samples: number of samples that were run.
        max_npu_difference: largest difference from the model that rounds as AscendQuant, relative
            to the largest value of that output.
        min_amct_cosine: lowest cosine of an output with that of AMCT's fake-quant model.
        int32_share_by_layer: layer with 16-bit activations -> its largest sum of integer products,
            relative to 2^31.
    """

    samples: int
    max_npu_difference: float
    min_amct_cosine: float
    int32_share_by_layer: Mapping[str, float]

    def sentence(self) -> str:
        """Return the note for the report."""
        text = (
            f"The deploy model was run on {counted(self.samples, 'sample')}: within"
            f" {self.max_npu_difference:.1g} of the fake-quant model with AscendQuant's rounding,"
            f" cosine {self.min_amct_cosine:.5f} with AMCT's rounding"
        )
        if not self.max_npu_difference <= _MAX_DIFFERENCE:  # also for NaN
            text += "; look into this before deploying"
        # AMCT does not check whether the sums of 16-bit layers fit int32
        if self.int32_share_by_layer:
            layer = max(self.int32_share_by_layer, key=self.int32_share_by_layer.__getitem__)
            int32_share = self.int32_share_by_layer[layer]
            text += (
                f". Sums of 16-bit activations reached {int32_share:.3g} of int32's end, in {layer}"
            )
            if int32_share >= 1:
                text += ", and are wrong wherever they are stored in int32; give it 8 bits"
        return f"{text}."


def compare_deploy_model(
    model: onnx.ModelProto,
    layers: QuantLayers,
    samples: Sequence[Sample],
    *,
    threads: int | None = None,
) -> DeployComparison:
    """Run the deploy model and two fake-quant models on the same samples; compare their outputs.

    A fake-quant model computes the integers of the deploy model in float operators. One of the two
    rounds as the NPU does, the other as AMCT's own model does.

    Args:
        model: the float model.
        layers: layer name -> its integers and scales.
        samples: input name -> array, for each sample.
        threads: threads of ONNX Runtime; None for its default.

    Raises:
        BackendError: ONNX Runtime refuses a model or a sample.
    """
    deploy = deploy_model(model, layers)
    # the outputs of layers with 16-bit activations, before AscendDequant, may exceed int32
    layer_by_integer_output = _find_16_bit_layers(deploy, layers)
    deploy_session = open_deploy(
        deploy, threads=threads, extra_outputs=tuple(layer_by_integer_output)
    )
    deploy_runs = [deploy_session.run(sample) for sample in samples]
    del deploy_session  # each session has all weights, so one is open at a time

    def run_fake_quant(*, npu_rounding: bool) -> Runs:
        """Return the outputs of the fake-quant model on all samples."""
        fake_quant = fake_quant_model(model, layers, npu_rounding=npu_rounding)
        # ONNX Runtime's optimizer would fold the dequantization into the weights
        session = OrtSession.open(fake_quant, threads=threads, optimize=False)
        del fake_quant  # the session has the weights
        return [session.run(sample) for sample in samples]

    npu_runs = run_fake_quant(npu_rounding=True)
    amct_runs = run_fake_quant(npu_rounding=False)

    # removes the integer outputs from `deploy_runs`, since the fake-quant models do not have them
    int32_share_by_layer = _pop_int32_shares(deploy_runs, layer_by_integer_output)
    max_npu_difference, min_amct_cosine = _compare_runs(deploy_runs, npu_runs, amct_runs)
    return DeployComparison(
        samples=len(samples),
        max_npu_difference=max_npu_difference,
        min_amct_cosine=min_amct_cosine,
        int32_share_by_layer=int32_share_by_layer,
    )


def _compare_runs(deploy_runs: Runs, npu_runs: Runs, amct_runs: Runs) -> tuple[float, float]:
    """Compare the float outputs of the deploy model and of two fake-quant models.

    Args:
        deploy_runs: for each sample, output name -> value of the deploy model.
        npu_runs: those of the fake-quant model that rounds as AscendQuant does.
        amct_runs: those of AMCT's fake-quant model.

    Returns:
        The largest relative difference from `npu_runs`; the lowest cosine with `amct_runs`. NaN if
        only one of two outputs has a NaN.
    """
    npu_differences = [0.0]
    amct_cosines = [1.0]
    for outputs, npu_outputs, amct_outputs in zip(deploy_runs, npu_runs, amct_runs, strict=True):
        for name, value in outputs.items():
            npu_value = npu_outputs[name]
            amct_value = amct_outputs[name]
            has_floats = value.dtype.kind == "f" and value.size > 0
            # rounding may change a shape, such as the number of boxes after suppression
            if has_floats and value.shape == npu_value.shape == amct_value.shape:
                npu_differences.append(_relative_difference(value, npu_value))
                amct_cosines.append(_cosine_of_numbers(value, amct_value))
    # NumPy's maximum and minimum, since Python's would lose a NaN
    return float(np.max(npu_differences)), float(np.min(amct_cosines))


def _find_16_bit_layers(deploy: onnx.ModelProto, layers: QuantLayers) -> dict[str, str]:
    """Return integer output -> its layer, for the layers with 16-bit activations.

    Args:
        deploy: the deploy model, in which an AscendDequant reads a layer's integer output.
        layers: layer name -> its integers and scales.
    """
    layer_by_integer_output = {}
    for node in deploy.graph.node:
        if node.op_type == "AscendDequant":
            layer_name = node.name.removesuffix(".dequant")
            if layers[layer_name].record.act_bits == 16:
                layer_by_integer_output[node.input[0]] = layer_name
    return layer_by_integer_output


def _pop_int32_shares(
    deploy_runs: Runs, layer_by_integer_output: Mapping[str, str]
) -> dict[str, float]:
    """Remove the integer outputs from all runs; return layer -> its largest |value| / 2^31.

    Args:
        deploy_runs: for each sample, output name -> value of the deploy model.
        layer_by_integer_output: integer output -> its layer.
    """
    int32_share_by_layer = {}
    for tensor, layer_name in layer_by_integer_output.items():
        largest_sums = [float(np.abs(outputs.pop(tensor)).max()) for outputs in deploy_runs]
        int32_share_by_layer[layer_name] = max(largest_sums, default=0.0) / _INT32_END
    return int32_share_by_layer


def _cosine_of_numbers(value: Array, reference: Array) -> float:
    """Return the cosine without the values that are NaN in both; NaN if only one has a NaN."""
    is_compared = ~(np.isnan(value) & np.isnan(reference))
    return cosine(value[is_compared], reference[is_compared])


def _relative_difference(value: Array, reference: Array) -> float:
    """Return the largest difference, relative to the largest magnitude of `value`.

    It is NaN if only one of them has a NaN.
    """
    largest = float(np.nan_to_num(np.abs(value)).max()) or 1.0
    is_equal = (value == reference) | (np.isnan(value) & np.isnan(reference))
    with np.errstate(invalid="ignore"):  # both may overflow to the same infinity
        differences = np.where(is_equal, 0, np.abs(value - reference))
    return float(differences.max()) / largest
