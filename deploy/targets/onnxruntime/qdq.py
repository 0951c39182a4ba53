"""The Q/DQ writer: float model, `Plan` and `Scales` -> model with QuantizeLinear/DequantizeLinear.

Activations get a pair. Weights become int8 initializers with a DequantizeLinear, per channel.
Biases become int32 initializers with scale_x * scale_w, if the target wants that. Tensors keep
their names: if all readers of `t` read a pair, its DequantizeLinear writes `t`, and the output of
the node that made `t` is renamed::

    Conv -> t            becomes      Conv -> t/float -> Q -> t/quantized -> DQ -> t
    input t -> Conv      becomes      t -> Q -> t/quantized -> DQ -> t/dequantized -> Conv

The nodes of a gate are replaced by int8 ones (`deploy.targets.onnxruntime.uint8_gates`). On an fp8
grid the stored values are FLOAT8E4M3FN, which the operators take from opset 19 on.

Source: ONNX operators QuantizeLinear and DequantizeLinear, 13 and 19.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.grids import FP8, Grid, fp8_codes, quantize, quantize_weight, signed_grid
from calibrators.scales import Scale, Scales
from deploy.errors import ExportError
from deploy.graph.edit import copy_without_initializers, drop_dead, rebuild
from deploy.graph.gates import Gate
from deploy.graph.index import count_reads
from deploy.graph.plan import Plan, QdqPair, WeightTarget
from deploy.targets.onnxruntime.uint8_gates import (
    GateWriter,
    ShiftedParams,
    fit_input_shift,
    fit_output_offset,
)
from deploy.targets.stored_weights import compute_weight_scales

_INT32 = 2**31 - 1
# little-endian numpy types whose bytes are those of the ONNX tensor
_KINDS = {
    "<f4": onnx.TensorProto.FLOAT,
    "|u1": onnx.TensorProto.UINT8,
    "|i1": onnx.TensorProto.INT8,
    "<i4": onnx.TensorProto.INT32,
}
Scales32 = NDArray[np.float32]
Once = Callable[[Hashable, Callable[[], Any]], Any]


def _each_time(_: Hashable, make: Callable[[], Any]) -> Any:
    return make()


def write_qdq(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Scales,
    *,
    weight_bits: int = 8,
    storable: Callable[[Scales32], Scales32] = lambda scales: scales,
    known: Mapping[str, Scales32] = MappingProxyType({}),
    once: Once = _each_time,
) -> onnx.ModelProto:
    """Return a copy of the model with the plan's pairs.

    Args:
        model: cleaned float model, opset 13 or later, or 19 on an fp8 grid.
        plan: result of `deploy.graph.plan.analyse` for the same model.
        scales: a `Scale` for each of `plan.activations`.
        weight_bits: 8 for the placement's grid, or 7 for CPUs whose int8 kernels saturate 16-bit
            sums (x86 without VNNI).
        storable: rounds scales to the ones a format can store, before quantization.
        known: node -> scales that its weight was trained with, [C_out] or [1]; the weight is a
            multiple of them already.
        once: (key, function) -> what it returns, the same for later calls of the same model.

    Raises:
        ExportError: a tensor of the plan has no scale, or a scale is not positive.
        CalibrationError: a weight holds NaN or Inf.
    """
    missing = [name for name in plan.activations if name not in scales]
    if missing:
        raise ExportError(
            f"every quantized tensor needs a scale, {len(missing)} have none"
            f" ({', '.join(missing[:3])}); calibrate again for this target"
        )
    read_counts = once("reads", lambda: count_reads(model.graph))
    out = copy_without_initializers(model, _replaced(plan, read_counts))
    writer = _QdqWriter(out, model, plan, scales, weight_bits, storable, known, once)
    for weight in plan.weights:
        writer.gemm(weight)
        writer.weight(writer.shifted(weight))
    for pair in plan.pairs:
        writer.pair(pair)
    for gate in plan.gates:
        writer.gate(gate)
    for name in plan.int8_scalars:
        writer.number_in(name)
    for name in plan.int8_pads:
        writer.pad(name)
    writer.finish()
    return out


def _replaced(plan: Plan, read_counts: Mapping[str, int]) -> set[str]:
    """Return the float weights and biases that have no reader once they are integers."""
    names = [weight.name for weight in plan.weights]
    if plan.placement.quantizes_bias:
        names += [weight.bias for weight in plan.weights if weight.bias is not None]
    return {name for name, times in Counter(names).items() if times == read_counts[name]}


class _QdqWriter:
    """The model being rewritten, and the nodes and initializers to add."""

    def __init__(
        self,
        model: onnx.ModelProto,
        plain: onnx.ModelProto,
        plan: Plan,
        scales: Mapping[str, Scale],
        weight_bits: int,
        storable: Callable[[Scales32], Scales32],
        known: Mapping[str, Scales32],
        once: Once,
    ) -> None:
        self.known = known
        self.once = once
        self.graph = model.graph
        self.plan = plan
        self.scales = scales
        self.storable = storable
        default = plan.placement.weights
        self.weight_grid = default if weight_bits == default.bits else signed_grid(weight_bits)
        self.nodes = {node.name: node for node in self.graph.node}
        self.initializers = {tensor.name: tensor for tensor in plain.graph.initializer}
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.before: list[onnx.NodeProto] = []  # nodes that read only constants
        self.after: dict[str, list[onnx.NodeProto]] = {}  # tensor -> nodes that follow it
        self.instead: dict[str, list[onnx.NodeProto]] = {}  # replaced node -> new nodes
        self.forms = GateWriter(self.constant, self.before)
        self.offsets = {gate.output: gate.offset for gate in plan.gates if gate.offset}
        self.clipped = _clipped(plan)
        self.weights: dict[tuple[str, int | None, bool, bytes], str] = {}

    def params(self, tensor: str) -> tuple[np.float32, int]:
        """Return (scale, zero_point) of a tensor, or of the owner whose scale it shares."""
        shifted = self.shifted_params(tensor)
        return shifted.scale, shifted.zero

    def shifted_params(self, tensor: str) -> ShiftedParams:
        """Return the same parameters, and the steps by which a gate writes or reads it shifted."""
        owner = self.plan.scale_owners.get(tensor, tensor)
        scale, zero = self.scales[owner].on(self.plan.placement.grid)
        scale = self.storable(np.asarray(scale, np.float32).reshape(1))[0]
        if not (np.isfinite(scale) and scale > 0):
            raise ExportError(f"a scale must be positive, got {scale} for {tensor}")
        if owner in self.offsets:
            return fit_output_offset(scale, zero, self.offsets[owner])
        return fit_input_shift(scale, zero, self.clipped.get(owner, 0.0))

    def constant(self, name: str, array: NDArray[np.generic], grid: Grid | None = None) -> str:
        """Add an initializer unless it exists; return its name. `grid` tells fp8 from integers."""
        if name not in self.initializers:
            tensor = _float8(name, array) if grid == FP8 else _plain(name, array)
            self.initializers[name] = tensor
            self.graph.initializer.append(tensor)
        return name

    def pair(self, pair: QdqPair) -> None:
        """Insert one Q/DQ pair, for all readers or for those that it names."""
        name = pair.tensor
        source, target = name, f"{name}/dequantized"
        maker = self.makers.get(name)
        if pair.consumers is None and maker is not None:
            source, target = f"{name}/float", name
            maker.output[list(maker.output).index(name)] = source
        else:
            chosen = set(pair.consumers) if pair.consumers is not None else None
            for node in self.graph.node:
                if chosen is None or node.name in chosen:
                    _redirect(node, name, target)
        scale, zero = self.params(name)
        grid = self.plan.placement.grid
        constants = [
            self.constant(f"{name}/scale", np.array(scale, np.float32)),
            self.constant(f"{name}/zero_point", np.array(zero, grid.dtype), grid),
        ]
        quantized = f"{name}/quantized"
        self.after[source] = [
            _node("QuantizeLinear", [source, *constants], quantized, f"{name}/Q"),
            _node("DequantizeLinear", [quantized, *constants], target, f"{name}/DQ"),
        ]

    def gemm(self, target: WeightTarget) -> None:
        """Turn a MatMul and the Add of its bias into a Gemm, if the plan says so."""
        if target.node not in self.plan.gemm_bias_adds:
            return
        node, add = self.nodes[target.node], self.nodes[self.plan.gemm_bias_adds[target.node]]
        node.op_type = "Gemm"
        node.input.append(str(target.bias))
        node.output[0] = add.output[0]
        self.makers[node.output[0]] = node
        self.instead[add.name] = []

    def shifted(self, target: WeightTarget) -> WeightTarget:
        """Add a gate's shift to the bias of the layer that makes its source; return its target."""
        gate = self.plan.bias_shifts.get(target.node)
        if gate is None:
            return target
        node, channels = self.nodes[target.node], self.initializers[target.name].dims[0]
        old = np.zeros(channels, np.float32)
        if target.bias is not None:
            old = numpy_helper.to_array(self.initializers[target.bias])
        name = self.constant(f"{gate.name}/shifted", old + np.float32(gate.shift))
        node.input[:] = [*node.input[:2], name]
        return replace(target, bias=name)

    def weight(self, target: WeightTarget) -> None:
        """Store one weight and its bias as integers, each read through a DequantizeLinear."""
        node = self.nodes[target.node]
        node.input[1], scales = self._weight(node, target)
        if self.plan.placement.quantizes_bias and target.bias in self.initializers:
            node.input[2] = self._bias(node, str(target.bias), scales)

    def _weight(
        self, node: onnx.NodeProto, target: WeightTarget
    ) -> tuple[str, NDArray[np.float32]]:
        tensor, grid = self.initializers[target.name], self.weight_grid
        exact = matching_scales(self.known.get(target.node), tuple(tensor.dims), target.axis)
        if exact is None:
            fits = self.plan.placement.fits_pairs
            exact = self.once(
                (target.name, target.axis, grid, fits),
                lambda: compute_weight_scales(
                    tensor, target.axis, grid, fits=node if fits else None
                ),
            )
        scales = self.storable(exact)
        if self.plan.placement.quantizes_bias and target.bias in self.initializers:
            bias = numpy_helper.to_array(self.initializers[str(target.bias)])
            scales = _room_for_bias(scales, bias, self._input_scale(node))
        key = (target.name, target.axis, target.node in self.known, scales.tobytes())
        if key in self.weights:
            return self.weights[key], scales
        if target.node in self.known:  # a trained weight may use the lowest integer, -128
            array = numpy_helper.to_array(tensor)
            shape = [-1 if place == target.axis else 1 for place in range(array.ndim)]
            integers = quantize(array, scales.reshape(shape), 0, grid)
        else:
            integers = self.once(
                (target.name, target.axis, grid, scales.tobytes()),
                lambda: quantize_weight(
                    numpy_helper.to_array(tensor), scales, target.axis, grid=grid
                ),
            )
        suffix = "" if not any(key[0] == target.name for key in self.weights) else f"/{node.name}"
        name = f"{target.name}{suffix}"
        self.weights[key] = self._dequantized(name, integers, scales, target.axis, grid)
        return self.weights[key], scales

    def _bias(self, node: onnx.NodeProto, bias: str, weight: NDArray[np.float32]) -> str:
        array = numpy_helper.to_array(self.initializers[bias]).reshape(-1)
        scales = (weight * self._input_scale(node)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.rint(array.astype(np.float64) / scales)
        integers = np.clip(np.nan_to_num(steps), -_INT32, _INT32).astype(np.int32)
        axis = 0 if scales.size > 1 else None
        return self._dequantized(f"{bias}/{node.name}", integers, scales, axis)

    def _input_scale(self, node: onnx.NodeProto) -> np.float32:
        return self.params(str(node.input[0]).removesuffix("/dequantized"))[0]

    def _dequantized(
        self,
        name: str,
        integers: NDArray[np.generic],
        scales: NDArray[np.float32],
        axis: int | None,
        grid: Grid | None = None,
    ) -> str:
        """Add constant integers and their DequantizeLinear; return the float tensor's name."""
        zeros = np.zeros(scales.shape, integers.dtype)
        scale, zero = (scales, zeros) if axis is not None else (scales[0], zeros[0])
        inputs = [
            self.constant(f"{name}/quantized", integers, grid),
            self.constant(f"{name}/scale", np.array(scale, np.float32)),
            self.constant(f"{name}/zero_point", np.array(zero, integers.dtype), grid),
        ]
        out = f"{name}/dequantized"
        node = _node("DequantizeLinear", inputs, out, f"{name}/DQ")
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.before.append(node)
        return out

    def gate(self, gate: Gate) -> None:
        """Replace the nodes of a gate by int8 ones."""
        nodes = [self.nodes[name] for name in gate.nodes]
        quantize = self.after[nodes[-1].output[0]][0]
        output_range = self.scales[gate.output]
        self.instead |= {name: [] for name in gate.nodes}
        shifted = self._made_shifted(gate) if gate in self.plan.bias_shifts.values() else ""
        source = None if shifted else self._clipped_source(gate)
        self.instead[gate.name] = self.forms.gate(
            gate, nodes, quantize, output_range, shifted=shifted, source=source
        )

    def _clipped_source(self, gate: Gate) -> ShiftedParams | None:
        """Return the parameters of a gate's source if its integers are clipped directly."""
        owner = self.plan.scale_owners.get(gate.source, gate.source)
        if owner in self.offsets or self.clipped.get(owner) != gate.shift:
            return None
        shifted = self.shifted_params(gate.source)
        return shifted if shifted.steps else None

    def _made_shifted(self, gate: Gate) -> str:
        """Rename a gate's source, which now includes the shift, and drop its pair."""
        maker, name = self.makers[gate.source], f"{gate.source}/shifted"
        del self.after[maker.output[0]]
        maker.output[0] = name
        return name

    def pad(self, name: str) -> None:
        """Let a Pad run on the integers and pad with the zero point.

        ONNX Runtime does not fuse a Pad between pairs into an integer kernel.
        """
        node = self.nodes[name]
        quantize, dequantize = self.after.pop(node.output[0])
        tensor = str(node.input[0]).removesuffix("/dequantized")
        node.input[0], node.output[0] = f"{tensor}/quantized", quantize.output[0]
        while len(node.input) < 3:
            node.input.append("")
        node.input[2] = quantize.input[2]
        self.after[node.output[0]] = [dequantize]

    def number_in(self, name: str) -> None:
        """Let an Add or Mul of a tensor and a number read the number from int8."""
        node = self.nodes[name]
        for position, source in enumerate(node.input):
            if source in self.initializers:
                value = numpy_helper.to_array(self.initializers[source]).reshape(-1)[0]
                node.input[position] = self.forms.number(float(value))

    def finish(self) -> None:
        """Insert all nodes in an order in which each tensor is made before it is read."""
        ordered = list(self.before)
        for value in self.graph.input:
            ordered += self.after.pop(value.name, [])
        for node in self.graph.node:
            ordered += self.instead.get(node.name, [node])
            for name in node.output:
                ordered += self.after.pop(name, [])
        rebuild(self.graph, ordered)
        if self.plan.int8_pads:  # the DequantizeLinear that only a Pad read has no reader now
            drop_dead(self.graph)


def _clipped(plan: Plan) -> dict[str, float]:
    """Return source's owner -> shift, for the gates that may clip the source's integers."""
    in_bias = tuple(plan.bias_shifts.values())
    gates = [gate for gate in plan.gates if gate not in in_bias and gate.is_centred]
    return {plan.scale_owners.get(gate.source, gate.source): gate.shift for gate in gates}


def _room_for_bias(
    scales: NDArray[np.float32], bias: NDArray[np.floating], input_scale: np.float32
) -> NDArray[np.float32]:
    """Widen weight scales until the bias fits int32 (for channels of nearly zero weights)."""
    least = np.abs(bias.astype(np.float64).reshape(-1)) / (float(input_scale) * (_INT32 - 128))
    if scales.size == 1:
        least = least.max(keepdims=True)
    return np.maximum(scales, least.astype(np.float32)).astype(np.float32)


def matching_scales(
    known: Scales32 | None, shape: tuple[int, ...], axis: int | None
) -> Scales32 | None:
    """Return the scales a weight was trained with, [C] along `axis`; None if they do not fit."""
    if known is None or (axis is None and known.size != 1):
        return None
    if axis is None or known.size == shape[axis]:
        return known
    return np.broadcast_to(known, shape[axis : axis + 1]).copy() if known.size == 1 else None


def _plain(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    kind = _KINDS.get(array.dtype.str)
    if kind is not None:  # the result of `from_array` in a tenth of the time
        return onnx.TensorProto(
            dims=array.shape, data_type=kind, name=name, raw_data=array.tobytes()
        )
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _float8(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    """Return an fp8 tensor, made of raw bytes since numpy has no such type."""
    kind, raw = onnx.TensorProto.FLOAT8E4M3FN, fp8_codes(array, FP8)
    return helper.make_tensor(name, kind, array.shape, raw.tobytes(), raw=True)


def _redirect(node: onnx.NodeProto, name: str, target: str) -> None:
    for position, source in enumerate(node.input):
        if source == name:
            node.input[position] = target


def _node(op_type: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=op_type, input=inputs, output=[output], name=name)
