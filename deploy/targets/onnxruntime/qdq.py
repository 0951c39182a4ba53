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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from calibrators.grids import (
    FP8,
    Float32Array,
    Grid,
    RealArray,
    broadcast_parameter,
    fp8_codes,
    quantize,
    quantize_weight,
)
from calibrators.scales import Scales
from deploy.errors import ExportError, list_first
from deploy.graph.edit import drop_dead, make_node, rebuild, set_input
from deploy.graph.gates import Gate
from deploy.graph.index import Nodes, by_name, count_reads, map_producers, names_of
from deploy.graph.plan import Plan, QdqPair, WeightTarget
from deploy.runtimes.mapped_model import copy_without_initializers
from deploy.targets.onnxruntime.uint8_gates import (
    GateWriter,
    ShiftedParams,
    fit_input_shift,
    fit_output_offset,
    make_pair,
)
from deploy.targets.stored_weights import compute_weight_scales, fit_trained_scales
from deploy.tensors import Array

_INT32_MAX = 2**31 - 1
_WeightKey = tuple[str, int | None, bool, bytes]  # weight, axis, whether trained, its scales
Memoize = Callable[[Hashable, Callable[[], Any]], Any]


def compute_each_time(_: Hashable, compute: Callable[[], Any]) -> Any:
    """Return `compute()`: the `Memoize` that remembers nothing."""
    return compute()


def write_qdq(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Scales,
    *,
    round_scales: Callable[[Float32Array], Float32Array] = lambda scales: scales,
    trained_scales: Mapping[str, Float32Array] = MappingProxyType({}),
    memoize: Memoize = compute_each_time,
    float_weights: bool = False,
) -> onnx.ModelProto:
    """Return a copy of a float model with the Q/DQ pairs, int8 weights and int32 biases of a plan.

    Args:
        model: cleaned float model, opset 13 or later, or 19 on an fp8 grid.
        plan: result of `deploy.graph.plan.analyse` for the same model.
        scales: a `Scale` for each of `plan.activations`.
        round_scales: rounds scales to the ones a format can store, before quantization.
        trained_scales: node -> scales that its weight was trained with, [C_out] or [1]; the weight
            is a multiple of them already.
        memoize: called with (key, function), returns the function's result. A search, which calls
            `write_qdq` many times for one model, gives one that computes it once for each key.
        float_weights: leave the weights float; a QuantizeLinear of each makes its integers.

    Raises:
        ExportError: a tensor of the plan has no scale, or a scale is not positive.
        CalibrationError: a weight holds NaN or Inf.
    """
    unscaled_tensors = [name for name in plan.activations if name not in scales]
    if unscaled_tensors:
        verb = "has" if len(unscaled_tensors) == 1 else "have"
        raise ExportError(
            f"every quantized tensor needs a scale, {len(unscaled_tensors)} {verb} none"
            f" ({list_first(unscaled_tensors, 3)}); calibrate again for this target"
        )
    read_counts = memoize("reads", lambda: count_reads(model.graph))
    quantized = copy_without_initializers(model, _replaced_constants(plan, read_counts))
    writer = _QdqWriter(
        quantized.graph,
        model,
        plan,
        scales,
        round_scales,
        trained_scales,
        memoize,
        float_weights,
    )
    for weight in plan.weights:
        writer.fuse_gemm(weight)
        # a bias also adds the number that a gate such as Hard-Swish adds to the layer's output
        weight_and_bias = writer.add_gate_shift(weight)
        writer.write_weight(weight_and_bias)
    for pair in plan.pairs:
        writer.write_pair(pair)
    # these come after the pairs, whose integers they read and write
    for gate in plan.gates:
        writer.write_gate(gate)
    for name in plan.int8_scalars:
        writer.write_scalar_operand(name)
    for name in plan.int8_pads:
        writer.write_pad(name)
    writer.finish()
    return quantized


def _replaced_constants(plan: Plan, read_counts: Mapping[str, int]) -> set[str]:
    """Return the float weights and biases that have no reader once they are integers.

    `read_counts`: tensor -> how often the nodes of the float model read it.
    """
    counts: Counter[str] = Counter()  # reads of the layers that store the constant as integers
    for weight in plan.weights:
        counts[weight.name] += 1
        if weight.bias is not None and plan.placement.runs_on_onnxruntime:
            counts[weight.bias] += 1
    return {name for name, count in counts.items() if count == read_counts[name]}


def _add_constant(
    graph: onnx.GraphProto,
    initializers: dict[str, onnx.TensorProto],
    name: str,
    array: Array,
    grid: Grid | None = None,
) -> str:
    """Add an initializer to a graph unless there is one of this name; return the name.

    Args:
        graph: gets the initializer.
        initializers: name -> initializer of the graph, which is added here too.
        name: name of the initializer.
        array: its values.
        grid: `FP8` to store the values as fp8, which numpy does not have; with any other grid or
            None they keep the dtype of the array.
    """
    if name not in initializers:
        tensor = _make_float8(name, array) if grid == FP8 else numpy_helper.from_array(array, name)
        initializers[name] = tensor
        graph.initializer.append(tensor)
    return name


@dataclass
class _QdqWriter:
    """The model being rewritten, and the nodes and initializers to add.

    Attributes:
        graph: graph of the model that gets the pairs, a copy of the float model.
        float_model: the model with all its constants.
        node_by_name: name -> node of `graph`.
        initializers: name -> constant of both models.
        producer: tensor -> the node that makes it.
        constant_nodes: nodes that read only constants.
        weight_quantizers: the QuantizeLinear nodes of float weights.
        nodes_after: tensor -> the Q/DQ pair that reads it.
        replacements: name of a replaced node -> new nodes.
        gate_offsets: output of a gate -> the offset that it adds.
        clip_shifts: source of a gate whose integers may be clipped -> the shift that it gets.
        dequantized_weights: weight and its scales -> its dequantized tensor.
    """

    graph: onnx.GraphProto
    float_model: onnx.ModelProto
    plan: Plan
    scales: Scales
    round_scales: Callable[[Float32Array], Float32Array]
    trained_scales: Mapping[str, Float32Array]
    memoize: Memoize
    float_weights: bool

    def __post_init__(self) -> None:
        """Set the attributes that follow from the fields, as the class describes them."""
        plan = self.plan
        self.weight_grid = plan.placement.weights  # integers or fp8
        self.node_by_name = by_name(self.graph.node)
        # from the float model, since `graph` lacks the weights that become integers
        self.initializers = by_name(self.float_model.graph.initializer)
        self.producer = map_producers(self.graph.node)
        self.constant_nodes: Nodes = []  # they read only constants
        self.weight_quantizers: Nodes = []
        self.nodes_after: dict[str, Nodes] = {}  # tensor -> the pair that reads it
        self.replacements: dict[str, Nodes] = {}  # name of a node -> the nodes in its place
        # a partial, not a method: the method would refer to this writer, and the gate writer, which
        # this writer refers to, to the method; such a cycle holds both models in memory until
        # Python's garbage collector runs
        self.add_constant = partial(_add_constant, self.graph, self.initializers)
        self.gate_writer = GateWriter(self.add_constant, self.constant_nodes)
        self.gate_offsets = {gate.output: gate.offset for gate in plan.gates if gate.offset}
        self.clip_shifts = _clip_shifts(plan)  # source of a gate -> the shift that it may get
        self.dequantized_weights: dict[_WeightKey, str] = {}

    def quantization_params(self, tensor: str) -> ShiftedParams:
        """Return the scale and zero point with which a tensor is quantized.

        A tensor may share them with another one, its owner in the plan, whose clip range and gate
        then decide. In a gate (Hard-Swish or squeeze-excite) a number may be added: a shift, if the
        owner is the gate's source, or an offset, if the owner is its output. If the scale can be
        chosen so that the number is an integer number of steps, the addition only moves the zero
        point, by the result's `steps`. Otherwise these are 0.

        Raises:
            ExportError: the scale is not positive.
        """
        owner = self.plan.scale_owners.get(tensor, tensor)
        clip_range = self.scales[owner]
        exact_scale, zero_point = clip_range.on(self.plan.placement.grid)
        scale = self.round_scales(np.array([exact_scale], np.float32))[0]
        if not (np.isfinite(scale) and scale > 0):
            raise ExportError(f"a scale must be positive, got {scale} for {tensor}")
        if owner in self.gate_offsets:  # the owner is the output of a gate that adds an offset
            return fit_output_offset(scale, zero_point, self.gate_offsets[owner])
        shift = self.clip_shifts.get(owner, 0.0)  # with 0 the parameters stay as they are
        return fit_input_shift(scale, zero_point, shift)

    def write_pair(self, pair: QdqPair) -> None:
        """Insert one Q/DQ pair, for all readers of its tensor or only for those that it names.

        The pair itself goes into `nodes_after`, from which `finish` inserts it.
        """
        tensor = pair.tensor
        producer = self.producer.get(tensor)
        if pair.consumers is None and producer is not None:
            # all readers read the pair: its DequantizeLinear gets the tensor's name, so that the
            # readers do not change, and the producer makes a tensor of another name
            float_name = f"{tensor}/float"
            dequantized_name = tensor
            producer.output[list(producer.output).index(tensor)] = float_name
        else:  # a pair for some readers, or of a graph input, whose name stays: the readers change
            float_name = tensor
            dequantized_name = f"{tensor}/dequantized"
            for node in self.graph.node:
                if pair.consumers is None or node.name in pair.consumers:
                    _redirect_reads(node, tensor, dequantized_name)

        scale_and_zero = self.quantization_params(tensor)
        grid = self.plan.placement.grid
        params = [
            self.add_constant(f"{tensor}/scale", np.array(scale_and_zero.scale, np.float32)),
            self.add_constant(
                f"{tensor}/zero_point", np.array(scale_and_zero.zero, grid.dtype), grid
            ),
        ]
        self.nodes_after[float_name] = make_pair(
            float_name, dequantized_name, tensor, params, params
        )

    def fuse_gemm(self, target: WeightTarget) -> None:
        """Turn a MatMul and the Add of its bias into a Gemm, if the plan says so.

        `target`: the MatMul's weight, with the names of the MatMul and of its bias.
        """
        if target.node not in self.plan.gemm_bias_adds:  # MatMul -> the Add of its bias
            return
        node = self.node_by_name[target.node]
        add = self.node_by_name[self.plan.gemm_bias_adds[target.node]]
        node.op_type = "Gemm"
        node.input.append(str(target.bias))
        node.output[0] = add.output[0]
        self.producer[node.output[0]] = node
        self.replacements[add.name] = []

    def add_gate_shift(self, target: WeightTarget) -> WeightTarget:
        """Add a gate's shift to the bias of the layer upstream; return the target with that bias.

        The shift is the number that a gate adds to its source, such as 3 in a Hard-Swish.

        `target`: weight and bias of a layer; returned unchanged if no gate shifts its output.
        """
        gate = self.plan.bias_shift_gates.get(target.node)
        if gate is None:
            return target
        weight = self.initializers[target.name]
        bias = np.zeros(weight.dims[0], np.float32)  # one number for each output channel
        if target.bias is not None:
            bias = numpy_helper.to_array(self.initializers[target.bias])
        name = self.add_constant(f"{gate.name}/shifted", bias + np.float32(gate.shift))
        set_input(self.node_by_name[target.node], 2, name)
        return replace(target, bias=name)

    def write_weight(self, target: WeightTarget) -> None:
        """Store one weight and its bias as integers, each read through a DequantizeLinear."""
        node = self.node_by_name[target.node]
        scales = self._weight_scales(node, target)
        node.input[1] = self._store_weight(node, target, scales)
        bias_name = self._integer_bias(target)
        if bias_name:
            node.input[2] = self._store_bias(node, bias_name, scales)

    def _integer_bias(self, target: WeightTarget) -> str:
        """Return the name of a layer's bias if it is stored as int32, else ""."""
        bias_name = target.bias or ""
        is_stored = self.plan.placement.runs_on_onnxruntime and bias_name in self.initializers
        return bias_name if is_stored else ""

    def _weight_scales(self, node: onnx.NodeProto, target: WeightTarget) -> Float32Array:
        """Return the scales of a weight, [C_out], or [1] for one scale of all channels.

        They are those with which the weight was trained, if these fit, or else follow from its
        values.
        """
        tensor = self.initializers[target.name]
        grid = self.weight_grid
        trained_scales = self.trained_scales.get(target.node)
        scales = matching_scales(trained_scales, tensor.dims, target.axis)  # None if none fit
        # whether the sum of two products must fit 16 bits, in which older CPUs add them
        limits_pair_sums = self.plan.placement.limits_pair_sums
        if scales is not None and limits_pair_sums:
            scales = fit_trained_scales(tensor, scales, node)
        if scales is None:
            scales = self.memoize(
                (target.name, target.axis, grid, limits_pair_sums),
                lambda: compute_weight_scales(
                    tensor, target.axis, grid, node, limits_pair_sums=limits_pair_sums
                ),
            )
        scales = self.round_scales(scales)
        bias_name = self._integer_bias(target)
        if bias_name:  # in too small steps it exceeds int32
            bias_values = numpy_helper.to_array(self.initializers[bias_name])
            scales = _widen_for_bias(scales, bias_values, self._input_scale(node))
        return scales

    def _store_weight(
        self, node: onnx.NodeProto, target: WeightTarget, scales: Float32Array
    ) -> str:
        """Add a weight as integers with a DequantizeLinear; return the name of its output.

        Nodes that read the same weight with equal scales share them. A weight of a Q/DQ model that
        the user has trained for int8 may use the lowest integer, -128, which is left out of others.
        """
        tensor = self.initializers[target.name]
        grid = self.weight_grid
        is_trained = target.node in self.trained_scales
        key = (target.name, target.axis, is_trained, scales.tobytes())
        if key in self.dequantized_weights:
            return self.dequantized_weights[key]

        if is_trained:
            weight = numpy_helper.to_array(tensor)
            scale_by_value = broadcast_parameter(scales, weight.ndim, target.axis)
            integers = quantize(weight, scale_by_value, 0, grid)
        else:
            # a search writes many models with the same integers, and gives all writers a `memoize`
            # that computes them once; `dequantized_weights` are those of this model alone
            integers = self.memoize(
                (target.name, target.axis, grid, scales.tobytes()),
                lambda: quantize_weight(
                    numpy_helper.to_array(tensor), scales, target.axis, grid=grid
                ),
            )

        stored_name = target.name
        stored_weights = {weight for weight, *_ in self.dequantized_weights}
        if target.name in stored_weights:  # with other scales, for another node
            stored_name = f"{target.name}/{node.name}"
        # with `float_weights` a QuantizeLinear of the float weight takes the place of the integers
        float_weight = target.name if self.float_weights else ""
        dequantized = self._add_dequantized_constant(
            stored_name, integers, scales, target.axis, grid, float_weight
        )
        self.dequantized_weights[key] = dequantized
        return dequantized

    def _store_bias(self, node: onnx.NodeProto, bias_name: str, weight_scales: Float32Array) -> str:
        """Return the dequantized tensor of a bias, in steps of input scale * weight scale."""
        values = numpy_helper.to_array(self.initializers[bias_name]).reshape(-1)
        scales = (weight_scales * self._input_scale(node)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.rint(values.astype(np.float64) / scales)
        steps = np.nan_to_num(steps).clip(-_INT32_MAX, _INT32_MAX)
        integers = steps.astype(np.int32)
        axis = 0 if scales.size > 1 else None
        return self._add_dequantized_constant(f"{bias_name}/{node.name}", integers, scales, axis)

    def _input_scale(self, node: onnx.NodeProto) -> np.float32:
        """Return the scale of a layer's input."""
        return self.quantization_params(node.input[0].removesuffix("/dequantized")).scale

    def _add_dequantized_constant(
        self,
        name: str,
        integers: Array,
        scales: Float32Array,
        axis: int | None,
        grid: Grid | None = None,
        float_weight: str = "",
    ) -> str:
        """Add constant integers and their DequantizeLinear; return the float tensor's name.

        Args:
            name: start of the names of the new tensors and nodes.
            integers: the quantized constant. With a `float_weight` only their type is used.
            scales: its scales, one a channel of `axis`, or one in all.
            axis: axis of the channels; None for one scale.
            grid: grid of the integers, if numpy has no type for it, such as int4.
            float_weight: name of the float constant from which a QuantizeLinear is to compute the
                integers when the model runs; "" to store the integers.
        """
        integers_name = f"{name}/quantized"
        if not float_weight:
            self.add_constant(integers_name, integers, grid)
        # of scale and zero point: [C], or a scalar for one scale, which comes as [1]
        shape = () if axis is None else scales.shape
        params = [
            self.add_constant(f"{name}/scale", scales.astype(np.float32).reshape(shape)),
            self.add_constant(f"{name}/zero_point", np.zeros(shape, integers.dtype), grid),
        ]
        if float_weight:
            quantize_node = make_node(
                "QuantizeLinear",
                [float_weight, *params],
                integers_name,
                f"{integers_name}/Q",
                axis=axis,
            )
            self.weight_quantizers.append(quantize_node)
        output = f"{name}/dequantized"
        dequantize_node = make_node(
            "DequantizeLinear", [integers_name, *params], output, f"{name}/DQ", axis=axis
        )
        self.constant_nodes.append(dequantize_node)
        return output

    def write_gate(self, gate: Gate) -> None:
        """Let int8 nodes take the place of a gate's nodes, by `replacements`.

        A gate multiplies by clip(source + shift, 0, top), as Hard-Swish does with a shift of 3. Its
        source gets the shift in one of three ways: in the bias of the layer upstream, by another
        zero point of its integers, or by an Add.
        """
        gate_nodes = [self.node_by_name[name] for name in gate.nodes]
        output = gate_nodes[-1].output[0]
        quantize_node, _ = self.nodes_after[output]  # Q and DQ of the gate's output
        shifted_source = ""  # the source plus the shift, if the layer upstream adds it
        clip_params = None  # parameters of the source, if its integers get the shift
        if gate in self.plan.bias_shift_gates.values():
            shifted_source = self._rename_shifted_source(gate)
        else:
            clip_params = self._find_clip_params(gate)  # None: an Add adds the shift
        self.replacements |= {name: [] for name in gate.nodes}
        self.replacements[gate.name] = self.gate_writer.write_gate(
            gate,
            gate_nodes,
            quantize_node,
            self.scales[gate.output],
            shifted_source=shifted_source,
            clip_params=clip_params,
        )

    def _find_clip_params(self, gate: Gate) -> ShiftedParams | None:
        """Return the parameters of a gate's source if its integers are clipped directly."""
        owner = self.plan.scale_owners.get(gate.source, gate.source)
        if owner in self.gate_offsets or self.clip_shifts.get(owner) != gate.shift:
            return None
        params = self.quantization_params(gate.source)
        return params if params.steps else None

    def _rename_shifted_source(self, gate: Gate) -> str:
        """Rename a gate's source, which now includes the shift, and drop its pair."""
        producer = self.producer[gate.source]
        name = f"{gate.source}/shifted"
        del self.nodes_after[producer.output[0]]
        producer.output[0] = name
        return name

    def write_pad(self, node_name: str) -> None:
        """Let a Pad run on the integers and pad with the zero point.

        ONNX Runtime does not fuse a Pad between pairs into an integer kernel.
        """
        node = self.node_by_name[node_name]
        quantize_node, dequantize_node = self.nodes_after.pop(node.output[0])  # of its output
        # the Pad reads the integers of its input, and makes those of its output in place of the Q
        tensor = node.input[0].removesuffix("/dequantized")
        node.input[0] = f"{tensor}/quantized"
        node.output[0] = quantize_node.output[0]
        set_input(node, 2, quantize_node.input[2])
        self.nodes_after[node.output[0]] = [dequantize_node]

    def write_scalar_operand(self, node_name: str) -> None:
        """Let an Add or Mul of a tensor and a constant number read the number dequantized."""
        node = self.node_by_name[node_name]
        for position, source in enumerate(node.input):
            if source in self.initializers:
                value = numpy_helper.to_array(self.initializers[source]).item()
                node.input[position] = self.gate_writer.add_number(value)

    def finish(self) -> None:
        """Put all nodes into the graph, in an order in which each tensor is made before it is read.

        The pairs of `nodes_after` follow the tensor that they read; `replacements` take the place
        of their node.
        """
        ordered_nodes = [*self.weight_quantizers, *self.constant_nodes]
        # `graph` was copied without the float weights; the QuantizeLinears of some read them
        copied_constants = names_of(self.graph.initializer)
        for name in dict.fromkeys(node.input[0] for node in self.weight_quantizers):
            if name not in copied_constants:
                self.graph.initializer.append(self.initializers[name])
        for value in self.graph.input:
            ordered_nodes += self.nodes_after.pop(value.name, [])
        for node in self.graph.node:
            ordered_nodes += self.replacements.get(node.name, [node])
            for name in node.output:
                ordered_nodes += self.nodes_after.pop(name, [])
        rebuild(self.graph, ordered_nodes)
        if self.plan.int8_pads:  # the DequantizeLinear that only a Pad read has no reader now
            drop_dead(self.graph)


def _clip_shifts(plan: Plan) -> dict[str, float]:
    """Return tensor -> shift, for the sources of gates that may clip their integers."""
    shifted_in_bias = tuple(plan.bias_shift_gates.values())
    shifts = {}
    for gate in plan.gates:
        if gate.is_centred and gate not in shifted_in_bias:
            shifts[plan.scale_owners.get(gate.source, gate.source)] = gate.shift
    return shifts


def _widen_for_bias(scales: Float32Array, bias: RealArray, input_scale: np.float32) -> Float32Array:
    """Return weight scales large enough for the bias, in steps of both scales, to fit int32.

    Only channels of nearly zero weights have smaller scales.
    """
    # largest bias that int32 holds with a weight scale of 1; 128 is a margin for rounding
    max_bias = float(input_scale) * (_INT32_MAX - 128)
    min_scales = np.abs(bias.astype(np.float64).reshape(-1)) / max_bias
    if scales.size == 1:
        min_scales = min_scales.max(keepdims=True)
    return np.maximum(scales, min_scales.astype(np.float32))


def matching_scales(
    trained_scales: Float32Array | None, shape: Sequence[int], axis: int | None
) -> Float32Array | None:
    """Return the scales a weight was trained with, [C] along `axis`; None if they do not fit.

    Args:
        trained_scales: one for each channel, or one; None if the weight was not trained for int8.
        shape: shape of the weight.
        axis: axis of its channels; None for one scale.
    """
    if trained_scales is None:
        return None
    if axis is None:
        return trained_scales if trained_scales.size == 1 else None
    if trained_scales.size not in (1, shape[axis]):
        return None
    return np.broadcast_to(trained_scales, (shape[axis],)).copy()


def _make_float8(name: str, array: Array) -> onnx.TensorProto:
    """Return an fp8 tensor, made of raw bytes since numpy has no such type."""
    codes = fp8_codes(array)
    data_type = onnx.TensorProto.FLOAT8E4M3FN
    return helper.make_tensor(name, data_type, array.shape, codes.tobytes(), raw=True)


def _redirect_reads(node: onnx.NodeProto, name: str, target: str) -> None:
    """Let a node itself, not its subgraphs, read `target` in place of a tensor."""
    for position, source in enumerate(node.input):
        if source == name:
            node.input[position] = target
