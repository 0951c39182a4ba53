"""A float model, a `Plan` and `Scales` -> the same model with QuantizeLinear/DequantizeLinear.

Activations get a pair; weights become int8 initializers behind a DequantizeLinear, per channel;
biases, where the target wants them so, int32 initializers with scale_x * scale_w. Tensor names
stay those of the model: of a pair on `t` for all readers, the DequantizeLinear's output is `t`
itself and what the node makes is renamed::

    Conv -> t            becomes      Conv -> t/float -> Q -> t/quantized -> DQ -> t
    input t -> Conv      becomes      t -> Q -> t/quantized -> DQ -> t/dequantized -> Conv

A gate's nodes are replaced by those of its int8 form (see `deploy.graph.placement`).

On a grid of fp8 the stored values are FLOAT8E4M3FN, which the operators know from opset 19 on.

Source: ONNX operators QuantizeLinear and DequantizeLinear, 13 and 19.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.grids import FP8, Grid, codes, quantize, quantize_weight, signed
from calibrators.scales import Scale, Scales
from deploy.errors import ExportError
from deploy.frontends.checks import opset_of
from deploy.frontends.lift import TARGET_OPSET
from deploy.graph.edit import copied_without, drop_dead, rebuild
from deploy.graph.index import users
from deploy.graph.placement import Gate
from deploy.graph.plan import Pair, Plan, WeightTarget
from deploy.targets.onnxruntime.uint8_forms import Forms, Shifted, with_offset, with_shift
from deploy.targets.stored import scales_of

_INT32 = 2**31 - 1
# numpy's little-endian types -> ONNX's, of which a tensor's bytes are the array's
_KINDS = {
    "<f4": onnx.TensorProto.FLOAT,
    "|u1": onnx.TensorProto.UINT8,
    "|i1": onnx.TensorProto.INT8,
    "<i4": onnx.TensorProto.INT32,
}
Scales32 = NDArray[np.float32]
Made = TypeVar("Made")


class Stored:
    """Scales and integers of the weights of one model, made once however often it is written."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def of(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What was made under this key, or is now; from any thread."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


def write_qdq(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Mapping[str, Scale] | Scales,
    *,
    weight_bits: int = 8,
    storable: Callable[[Scales32], Scales32] = lambda scales: scales,
    known: Mapping[str, Scales32] = MappingProxyType({}),
    stored: Stored | None = None,
) -> onnx.ModelProto:
    """Insert the plan's pairs; `model` is left as it is.

    Args:
        model: cleaned float model, opset 19 or later on a grid of fp8; before opset 13 weights get
            one scale each.
        plan: of `deploy.graph.plan.analyse` for the same model.
        scales: a `Scale` for each of `plan.activations`.
        weight_bits: 8 as the placement has them, or 7 for CPUs whose int8 kernels saturate 16-bit
            sums (x86 without VNNI).
        storable: rounds scales to those that can be stored, before anything is quantized.
        known: node -> scales of its weight that it was trained with, [C_out] or [1], where the
            weight is a multiple of them already.
        stored: integers of the model's weights that were made before, kept for the next call.

    Raises:
        ExportError: a tensor of the plan has no scale, or a scale that is not positive.
        CalibrationError: a weight holds NaN or Inf.
    """
    missing = [name for name in plan.activations if name not in scales]
    if missing:
        raise ExportError(
            f"every quantized tensor needs a scale, {len(missing)} have none"
            f" ({', '.join(missing[:3])}); calibrate again for this target"
        )
    kept = Stored() if stored is None else stored
    read = kept.of("read", lambda: users(model.graph))
    out = copied_without(model, _replaced(model, plan, read))
    writer = _Writer(out, model, plan, scales, weight_bits, storable, known, kept)
    per_channel = opset_of(model) >= TARGET_OPSET
    for weight in plan.weights:
        writer.gemm(weight)
        own = writer.shifted(weight)
        writer.weight(own if per_channel else replace(own, axis=None))
    for pair in plan.pairs:
        writer.pair(pair)
    for gate in plan.gates:
        writer.gate(gate)
    for name in plan.numbers:
        writer.number_in(name)
    for name in plan.pads:
        writer.pad(name)
    writer.finish()
    return out


def _replaced(model: onnx.ModelProto, plan: Plan, read: Mapping[str, int]) -> set[str]:
    """Constants that nobody reads once the plan's weights are integers, and its biases.

    Args:
        model: the float model.
        plan: of it.
        read: how often each of its tensors is read.
    """
    names = [weight.name for weight in plan.weights]
    if plan.placement.bias:
        names += [weight.bias for weight in plan.weights if weight.bias is not None]
    return {name for name, times in Counter(names).items() if times == read[name]}


class _Writer:
    """The model being rewritten, with the nodes and initializers that are to be added."""

    def __init__(
        self,
        model: onnx.ModelProto,
        plain: onnx.ModelProto,
        plan: Plan,
        scales: Mapping[str, Scale],
        weight_bits: int,
        storable: Callable[[Scales32], Scales32],
        known: Mapping[str, Scales32],
        stored: Stored,
    ) -> None:
        self.known = known
        self.stored = stored
        self.graph = model.graph
        self.plan = plan
        self.scales = scales
        self.storable = storable
        held = plan.placement.weights
        self.weight_grid = held if weight_bits == held.bits else signed(weight_bits)
        self.nodes = {node.name: node for node in self.graph.node}
        self.initializers = {tensor.name: tensor for tensor in plain.graph.initializer}
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.before: list[onnx.NodeProto] = []  # reads constants only
        self.after: dict[str, list[onnx.NodeProto]] = {}  # by the tensor that feeds it
        self.instead: dict[str, list[onnx.NodeProto]] = {}  # by the node whose place they take
        self.forms = Forms(self.constant, self.before)
        self.offsets = {gate.output: gate.offset for gate in plan.gates if gate.offset}
        self.clipped = _clipped(plan) if opset_of(model) >= TARGET_OPSET else {}
        self.weights: dict[tuple[str, int | None, str | None], tuple[str, NDArray[np.float32]]] = {}

    def params(self, tensor: str) -> tuple[np.float32, int]:
        """(scale, zero_point) of a tensor, that of its owner where it shares one."""
        own = self.shifted_params(tensor)
        return own.scale, own.zero

    def shifted_params(self, tensor: str) -> Shifted:
        """The same, and the steps to where a gate writes or reads it shifted."""
        owner = self.plan.owners.get(tensor, tensor)
        scale, zero = self.scales[owner].on(self.plan.placement.grid)
        scale = self.storable(np.asarray(scale, np.float32).reshape(1))[0]
        if not (np.isfinite(scale) and scale > 0):
            raise ExportError(f"a scale must be positive, got {scale} for {tensor}")
        if owner in self.offsets:
            return with_offset(scale, zero, self.offsets[owner])
        return with_shift(scale, zero, self.clipped.get(owner, 0.0))

    def constant(self, name: str, array: NDArray[np.generic], grid: Grid | None = None) -> str:
        """Add an initializer once, and give its name; stored values come with their grid."""
        if name not in self.initializers:
            tensor = _float8(name, array) if grid == FP8 else _plain(name, array)
            self.initializers[name] = tensor
            self.graph.initializer.append(tensor)
        return name

    def pair(self, pair: Pair) -> None:
        """Insert one Q/DQ pair, for all readers or for the named ones."""
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
        """Let a MatMul add its bias itself, where the plan says so."""
        if target.node not in self.plan.gemms:
            return
        node, add = self.nodes[target.node], self.nodes[self.plan.gemms[target.node]]
        node.op_type = "Gemm"
        node.input.append(str(target.bias))
        node.output[0] = add.output[0]
        self.makers[node.output[0]] = node
        self.instead[add.name] = []

    def shifted(self, target: WeightTarget) -> WeightTarget:
        """The layer of a gate's source, with the gate's shift in its bias; others as they are."""
        gate = self.plan.shifts.get(target.node)
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
        """Store one weight, and its bias, as integers behind a DequantizeLinear."""
        node = self.nodes[target.node]
        share = (target.name, target.axis, target.bias if self.plan.placement.bias else None)
        if share not in self.weights:
            self.weights[share] = self._weight(node, target)
        name, scales = self.weights[share]
        node.input[1] = name
        if self.plan.placement.bias and target.bias in self.initializers:
            node.input[2] = self._bias(node, str(target.bias), scales)

    def _weight(
        self, node: onnx.NodeProto, target: WeightTarget
    ) -> tuple[str, NDArray[np.float32]]:
        tensor, grid = self.initializers[target.name], self.weight_grid
        own = known_scales(self.known.get(target.node), tuple(tensor.dims), target.axis)
        if own is None:
            fits = self.plan.placement.fits_pairs
            own = self.stored.of(
                (target.name, target.axis, grid, fits),
                lambda: scales_of(tensor, target.axis, grid, fits=node if fits else None),
            )
        scales = self.storable(own)
        if self.plan.placement.bias and target.bias in self.initializers:
            bias = numpy_helper.to_array(self.initializers[str(target.bias)])
            scales = _room_for_bias(scales, bias, self._input_scale(node))
        if target.node in self.known:  # whose lowest integer may be in use
            array = numpy_helper.to_array(tensor)
            integers = quantize(array, along(scales, array.ndim, target.axis), 0, grid)
        else:
            integers = self.stored.of(
                (target.name, target.axis, grid, scales.tobytes()),
                lambda: quantize_weight(
                    numpy_helper.to_array(tensor), scales, target.axis, grid=grid
                ),
            )
        suffix = "" if not any(key[0] == target.name for key in self.weights) else f"/{node.name}"
        name = f"{target.name}{suffix}"
        return self._dequantized(name, integers, scales, target.axis, grid), scales

    def _bias(self, node: onnx.NodeProto, bias: str, weight: NDArray[np.float32]) -> str:
        array = numpy_helper.to_array(self.initializers[bias]).reshape(-1)
        scales = (weight * self._input_scale(node)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.rint(array.astype(np.float64) / scales)
        integers = np.clip(np.nan_to_num(steps), -_INT32, _INT32).astype(np.int32)
        axis = 0 if scales.size > 1 else None
        return self._dequantized(f"{bias}/{node.name}", integers, scales, axis)

    def _input_scale(self, node: onnx.NodeProto) -> np.float32:
        name = str(node.input[0]).removesuffix("/dequantized")
        return self.params(name)[0]

    def _dequantized(
        self,
        name: str,
        integers: NDArray[np.generic],
        scales: NDArray[np.float32],
        axis: int | None,
        grid: Grid | None = None,
    ) -> str:
        """Constant integers and a DequantizeLinear on them; gives the float tensor's name."""
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
        """Put int8 arithmetic in place of the nodes of a gate."""
        nodes = [self.nodes[name] for name in gate.nodes]
        pair = self.after[nodes[-1].output[0]]
        found = self.scales[gate.output]
        self.instead |= {name: [] for name in gate.nodes}
        made = self._made_shifted(gate) if gate in self.plan.shifts.values() else ""
        own = None if made else self._clipped_source(gate)
        new = self.forms.gate(gate, nodes, pair[0], found, shifted=made, own=own)
        self.instead[gate.name] = new

    def _clipped_source(self, gate: Gate) -> Shifted | None:
        """Parameters of a gate's source, where its integers are to be clipped themselves."""
        owner = self.plan.owners.get(gate.source, gate.source)
        if owner in self.offsets or self.clipped.get(owner) != gate.shift:
            return None
        own = self.shifted_params(gate.source)
        return own if own.steps else None

    def _made_shifted(self, gate: Gate) -> str:
        """The name of a gate's source with its shift, without the pair of the source alone."""
        maker, name = self.makers[gate.source], f"{gate.source}/shifted"
        del self.after[maker.output[0]]
        maker.output[0] = name
        return name

    def pad(self, name: str) -> None:
        """Let a Pad run on the integers, of which the zero point is its 0.

        ONNX Runtime makes no integer kernel of a Pad between pairs.
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
        """Let an Add or Mul of a tensor and a number read that from int8."""
        node = self.nodes[name]
        for position, source in enumerate(node.input):
            if source in self.initializers:
                value = numpy_helper.to_array(self.initializers[source]).reshape(-1)[0]
                node.input[position] = self.forms.number(float(value))

    def finish(self) -> None:
        """Put the nodes in an order in which every tensor is made before it is read."""
        ordered = list(self.before)
        for value in self.graph.input:
            ordered += self.after.pop(value.name, [])
        for node in self.graph.node:
            ordered += self.instead.get(node.name, [node])
            for name in node.output:
                ordered += self.after.pop(name, [])
        rebuild(self.graph, ordered)
        if self.plan.pads:  # what only a Pad read is not read in float any more
            drop_dead(self.graph)


def _clipped(plan: Plan) -> dict[str, float]:
    """Owner of a source whose integers a gate may clip themselves -> the gate's shift."""
    alone = tuple(plan.shifts.values())
    gates = [gate for gate in plan.gates if gate not in alone and gate.centred]
    return {plan.owners.get(gate.source, gate.source): gate.shift for gate in gates}


def _room_for_bias(
    scales: NDArray[np.float32], bias: NDArray[np.floating], input_scale: np.float32
) -> NDArray[np.float32]:
    """Widen weight scales where the bias would not fit int32 (a channel of next to no weight)."""
    need = np.abs(bias.astype(np.float64).reshape(-1)) / (float(input_scale) * (_INT32 - 128))
    if scales.size == 1:
        need = need.max(keepdims=True)
    return np.maximum(scales, need.astype(np.float32)).astype(np.float32)


def known_scales(
    known: Scales32 | None, shape: tuple[int, ...], axis: int | None
) -> Scales32 | None:
    """Scales that a weight was trained with, [C] along `axis`; None where they do not fit it."""
    if known is None or (axis is None and known.size != 1):
        return None
    if axis is None or known.size == shape[axis]:
        return known
    return np.broadcast_to(known, shape[axis : axis + 1]).copy() if known.size == 1 else None


def along(scales: Scales32, rank: int, axis: int | None) -> Scales32:
    """Scales [C] as they multiply a weight of this rank."""
    return scales.reshape([-1 if place == axis else 1 for place in range(rank)])


def _plain(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    kind = _KINDS.get(array.dtype.str)
    if kind is not None:  # as `from_array` has it, in a tenth of the time
        return onnx.TensorProto(
            dims=array.shape, data_type=kind, name=name, raw_data=array.tobytes()
        )
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _float8(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    """A tensor of fp8; of its bytes, since numpy has no such type."""
    kind, held = onnx.TensorProto.FLOAT8E4M3FN, codes(array, FP8)
    return helper.make_tensor(name, kind, array.shape, held.tobytes(), raw=True)


def _redirect(node: onnx.NodeProto, name: str, target: str) -> None:
    for position, source in enumerate(node.input):
        if source == name:
            node.input[position] = target


def _node(op_type: str, inputs: list[str], output: str, name: str) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=op_type, input=inputs, output=[output], name=name)
