"""Conversion between a float model with a TensorRT cache and a Q/DQ model, in both directions.

`to_qdq` writes the Q/DQ model for TensorRT 8 to 11 and ONNX Runtime. Q/DQ pairs have zero-point 0
and stand where TensorRT expects them (`deploy.graph.placement.TENSORRT`): on the inputs of Conv,
Gemm and MatMul and on the skip branch of a residual Add, never between a Conv and its Relu. Weights
stay float and get a per-channel pair, as TensorRT quantizes them itself, so `from_qdq` recovers the
float model exactly::

    x -> Q -> DQ --.
                    Conv -> Relu
    w -> Q -> DQ --'            (w: the float initializer, unchanged)

Tensors that meet in a Concat share the largest scale of the group: TensorRT would otherwise
requantize each of them. `own_concat_scales` turns that off.

With the fp8 grid the model is converted to opset 19 and weights are stored as fp8, since TensorRT
does not quantize weights to fp8 itself. There is no way back: caches are for int8 only.

`from_qdq` turns a symmetric Q/DQ model into the plain float model and its scales, for DLA and 8.x::

    p -> t/float -> Q -> DQ -> t -> c       becomes      p -> t -> c        t: scale of the pair
    w ------------> Q -> DQ ------> c       becomes      w ------> c        (float weight as it was)
    int8 w -------------> DQ ------> c      becomes      float w -> c       (w * scale)

A cache holds one float scale per tensor, so anything else is refused: a zero-point other than 0,
per-channel activation scales, two scales for one tensor, integer model inputs or outputs, operators
that compute on integers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from calibrators.grids import INT8, quantize
from calibrators.scales import Scale
from deploy.errors import ExportError
from deploy.frontends import checks
from deploy.frontends.lift import dequantize_constant
from deploy.frontends.pairs import DQ, Q, UnfitError, read_pair_grid, refuse_integer_operators
from deploy.frontends.plugins import check_part_valid
from deploy.graph.edit import copy_message, rebuild, rename_reads, rename_tensors, replace_nodes
from deploy.graph.index import Graph, attributes, iter_reads
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import Plan
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.targets.tensorrt.cache_contents import POOLING_LAYERS
from deploy.targets.tensorrt.float_types import (
    FP8_OPSET,
    OPSETS,
    at_opset,
    narrow_float_part,
    round_scales,
)

_FP8_IR = 9  # first IR version of ONNX with float8 types
Weights = Mapping[str, "NDArray[np.float32]"]
NO_WEIGHTS: Weights = MappingProxyType({})


def to_qdq(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Mapping[str, np.float32],
    *,
    own_concat_scales: bool = False,
    known: Weights = NO_WEIGHTS,
) -> onnx.ModelProto:
    """Return the Q/DQ model; `model` is not changed.

    Args:
        model: cleaned float model.
        plan: positions of the pairs, for a placement in `deploy.graph.placement.TENSORRT_BY_GRID`.
        scales: tensor -> float32 int8 scale (amax / 127) for each of `plan.activations`, also when
            the grid is fp8.
        own_concat_scales: do not share scales between the tensors of a Concat.
        known: trained weight scales, see `deploy.targets.onnxruntime.qdq.write_qdq`.

    Raises:
        ExportError: a tensor of the plan has no positive scale; or the grid is fp8 and the model
            cannot be converted to opset 19.
    """
    ranges = _ranges(model, plan, scales, own_concat_scales)
    if _is_fp8(plan):
        return _with_fp8_ir(write_qdq(at_opset(model, FP8_OPSET), plan, ranges))
    quantized = write_qdq(model, plan, ranges, known=known)
    _keep_float_weights(quantized, model)
    return quantized


def to_typed(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Mapping[str, np.float32],
    *,
    rest: str,
    largest: Mapping[str, float],
    own_concat_scales: bool = False,
    known: Weights = NO_WEIGHTS,
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the Q/DQ model with quantized weights and its float part in a narrow type.

    For the other arguments and the result see `to_qdq` and
    `deploy.targets.tensorrt.float_types.narrow_float_part`.
    """
    ranges = _ranges(model, plan, scales, own_concat_scales)
    if _is_fp8(plan):
        model = at_opset(model, max(FP8_OPSET, OPSETS[rest]))
    quantized = write_qdq(
        model, plan, ranges, storable=partial(round_scales, rest=rest), known=known
    )
    return narrow_float_part(_with_fp8_ir(quantized) if _is_fp8(plan) else quantized, rest, largest)


def _is_fp8(plan: Plan) -> bool:
    return plan.placement.grid.kind == "float"


def _with_fp8_ir(quantized: onnx.ModelProto) -> onnx.ModelProto:
    quantized.ir_version = max(quantized.ir_version, _FP8_IR)
    return quantized


def _ranges(
    model: onnx.ModelProto, plan: Plan, scales: Mapping[str, np.float32], own_concat_scales: bool
) -> dict[str, Scale]:
    chosen = dict(scales) if own_concat_scales else concat_scales(model, plan, scales)
    return {name: _symmetric(scale) for name, scale in chosen.items()}


def concat_scales(
    model: onnx.ModelProto, plan: Plan, scales: Mapping[str, np.float32]
) -> dict[str, np.float32]:
    """Return the scales with those of each Concat group raised to the largest of the group."""
    shared = dict(scales)
    for group in concat_groups(model, plan, scales):
        shared |= dict.fromkeys(group, max((scales[n] for n in group), default=np.float32(0)))
    return shared


def concat_groups(
    model: onnx.ModelProto, plan: Plan, tensors: Collection[str]
) -> list[frozenset[str]]:
    """Group `tensors` by the Concat they meet in; Concats with a common tensor form one group.

    For DLA a Pooling layer joins its input and output too: both have the scale of the group.
    """
    joining = POOLING_LAYERS | {"Concat"} if plan.placement.pairs_everywhere else {"Concat"}
    groups: list[frozenset[str]] = []
    for node in model.graph.node:
        if node.op_type not in joining:
            continue
        group = frozenset(plan.scale_owners.get(n, n) for n in [*node.input, *node.output])
        group &= frozenset(tensors)
        for other in [g for g in groups if g & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    return groups


def share_scales(model: onnx.ModelProto, plan: Plan) -> Plan:
    """Return the plan with `owners` and `sources` set to the scale sharing of the Q/DQ model.

    A pool output has the scale of the pool's input, as in a cache; outputs of other operators that
    move values have their own scale; a Concat group has the largest of its scales.
    """
    graph, unshared = Graph(model), replace(plan, scale_owners={})
    paired = dict.fromkeys(pair.tensor for pair in plan.pairs)
    pool_inputs = {tensor: _before_pools(graph, tensor) for tensor in paired}
    shared = [group for group in concat_groups(model, unshared, paired) if len(group) > 1]
    groups = {tensor: group for group in shared for tensor in group}
    owners, sources = {}, {}
    for tensor in paired:
        group = groups.get(tensor, frozenset({tensor}))
        owner = min(group) if len(group) > 1 else pool_inputs[tensor]
        if len(group) == 1 and owner in groups:  # the owner's scale is that of a Concat group
            owner = tensor
        owners[tensor] = owner
        sources[owner] = tuple(dict.fromkeys(pool_inputs[member] for member in sorted(group)))
    return replace(
        plan,
        scale_owners={t: owner for t, owner in owners.items() if owner != t},
        range_sources={owner: tensors for owner, tensors in sources.items() if tensors != (owner,)},
    )


def _before_pools(graph: Graph, tensor: str) -> str:
    """Return the tensor upstream of any pools: the one whose scale `tensor` has in a cache."""
    while (maker := graph.producer.get(tensor)) is not None and maker.op_type in POOLING_LAYERS:
        tensor = str(maker.input[0])
    return tensor


def _symmetric(scale: np.float32) -> Scale:
    """Return a range whose symmetric scale is exactly `scale`: (s * 127) / 127 in float64."""
    amax = float(scale) * INT8.qmax
    return Scale(
        lo=-amax, hi=amax, amax=amax, observed_min=-amax, observed_max=amax, method="cache"
    )


def _keep_float_weights(quantized: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Replace int8 weights by the float weight and a QuantizeLinear, where it gives the same."""
    graph, index = quantized.graph, Graph(quantized)
    constants, floats = index.initializers, Graph(model).initializers
    quantizers = []
    for node in [n for n in index.nodes if n.op_type in TENSORRT.heavy]:
        pair = index.producer.get(node.input[1])
        if pair is None or pair.op_type != "DequantizeLinear" or pair.input[0] not in constants:
            continue
        name = pair.input[0].removesuffix("/quantized")  # <weight> or <weight>/<node>
        while name and name not in floats:
            name = name.rpartition("/")[0]
        if not name or not _quantizes_to_stored(pair, constants, floats[name]):
            continue
        stored = pair.input[0]
        quantizer = helper.make_node(
            "QuantizeLinear", [name, *pair.input[1:]], [stored], f"{stored}/Q", **attributes(pair)
        )
        quantizers.append(quantizer)
        graph.initializer.remove(constants.pop(stored))
        if name not in constants:
            graph.initializer.append(floats[name])
            constants[name] = floats[name]
    replace_nodes(graph, [*quantizers, *graph.node])


def _quantizes_to_stored(
    pair: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], weight: onnx.TensorProto
) -> bool:
    """Return whether QuantizeLinear of the float weight gives exactly the stored integers."""
    stored = numpy_helper.to_array(constants[pair.input[0]])
    scales = numpy_helper.to_array(constants[pair.input[1]])
    array = numpy_helper.to_array(weight)
    axis = attributes(pair).get("axis")
    if axis is not None:
        scales = scales.reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    return bool(np.array_equal(quantize(array, scales, 0, TENSORRT.weights), stored))


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A float model extracted from a Q/DQ model by `from_qdq`.

    Attributes:
        scales: activation tensor -> float32 scale of its pair, in the model's order.
        weights: names of weights that were stored as integers and have been dequantized.
    """

    model: onnx.ModelProto
    scales: dict[str, np.float32]
    weights: tuple[str, ...]


def from_qdq(quantized: onnx.ModelProto) -> PlainModel:
    """Return the float model and scales of a Q/DQ model; `quantized` is not changed.

    Raises:
        ModelError: the model is not valid, or has integer operators.
        ExportError: the model has no pairs, or a quantization that a cache cannot express.
    """
    checks.check_fields(quantized)
    check_part_valid(quantized)
    refuse_integer_operators(quantized)
    return _PairRemover(copy_message(quantized)).run()


class _PairRemover:
    """Removes the Q/DQ pairs of one model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph, self.index = model, model.graph, Graph(model)
        self.scales: dict[str, np.float32] = {}
        self.weights: list[str] = []
        self.replaced: dict[str, str] = {}  # output of a DQ -> the float tensor in its place
        self.renamed: dict[str, str] = {}  # output of a node -> its name before quantization

    def run(self) -> PlainModel:
        ends = [*self.graph.input, *self.graph.output]
        ints = [v.name for v in ends if v.type.tensor_type.elem_type in (2, 3)]
        if ints:
            raise ExportError(
                "a model that a cache is for has float inputs and outputs, got int8 at"
                f" {ints[0]!r}; export it with float ends"
            )
        for node in self.index.nodes:
            if node.op_type == DQ:
                self._read_dequantizer(node)
        if not self.replaced:
            raise ExportError(
                "a Q/DQ model holds QuantizeLinear and DequantizeLinear nodes, got none; this model"
                " is plain already"
            )
        read = {node.input[0] for node in self.index.nodes if node.op_type == DQ}
        for node in self.index.nodes:
            activation = node.op_type == Q and node.input[0] not in self.index.constants
            if activation and node.output[0] not in read:
                raise ExportError(
                    f"a DequantizeLinear follows each QuantizeLinear, got none after {node.name!r}"
                )
        kept = [node for node in self.index.nodes if node.op_type not in (Q, DQ)]
        rename_reads(kept, self.replaced)
        rename_tensors(kept, self.renamed)
        used = {name for node in kept for name in iter_reads(node)} | self.index.outputs
        rebuild(self.graph, (n for n in kept if n.op_type != "Constant" or n.output[0] in used))
        order = [v.name for v in self.graph.input] + [o for n in self.graph.node for o in n.output]
        scales = {name: self.scales[name] for name in order if name in self.scales}
        return PlainModel(self.model, scales, tuple(self.weights))

    def _read_dequantizer(self, node: onnx.NodeProto) -> None:
        source, out = node.input[0], node.output[0]
        quantizer = self.index.producer.get(source)
        if source in self.index.constants:
            self.replaced[out] = self._add_weight(node)
            self.weights.append(source)
        elif quantizer is None or quantizer.op_type != Q:
            producer = quantizer.op_type if quantizer is not None else "an input of the model"
            raise ExportError(
                f"each DequantizeLinear follows its QuantizeLinear, got {producer} before {out!r}"
            )
        elif quantizer.input[0] in self.index.constants:  # a float weight
            self.replaced[out] = quantizer.input[0]
        else:
            self._read_activation(quantizer, node)

    def _add_weight(self, node: onnx.NodeProto) -> str:
        """Add the float values of a weight that is stored as integers; return their name."""
        name = str(node.output[0])
        dtype = checks.type_name(self.index.constants[node.input[0]].data_type)
        if "int" not in dtype:
            raise ExportError(
                f"a cache is for int8, got a weight stored as {dtype} for {name!r}; there is no"
                " cache of an fp8 model"
            )
        if name in self.index.outputs:
            raise ExportError(f"an output of the model cannot be a constant, got {name!r}")
        values = dequantize_constant(node, self.index)
        if values is None:
            raise ExportError(
                "the scales and zero points of a weight must be constants that fit its axis, got"
                f" others for {name!r}; export the model again"
            )
        self.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def _read_activation(self, quantizer: onnx.NodeProto, node: onnx.NodeProto) -> None:
        source, out = quantizer.input[0], node.output[0]
        source = self.replaced.get(source, source)
        scale = self._scale(quantizer, source)
        if self._scale(node, source) != scale:
            raise ExportError(f"the two scales of the pair on {source!r} must be equal")
        name = source
        if out in self.index.outputs or source == f"{out}/float":  # the DQ got its name
            name = out
            self.renamed[source] = out
        self.replaced[out] = name
        if self.scales.setdefault(name, scale) != scale:
            raise ExportError(
                f"a cache has one scale a tensor, got {self.scales[name]} and {scale} for {name!r};"
                " give its pairs one scale"
            )

    def _scale(self, node: onnx.NodeProto, tensor: str) -> np.float32:
        """Return the scale of an activation's Q or DQ, which must be symmetric int8."""
        try:
            grid = read_pair_grid(node, self.index)
        except UnfitError as error:
            raise ExportError(f"a cache needs the scale of {tensor!r}, got: {error}") from error
        if not grid.is_per_tensor:
            raise ExportError(
                f"a cache has one scale a tensor, got {grid.scale.size} (one a channel) for"
                f" {tensor!r}"
            )
        zero = int(grid.zero.reshape(-1)[0])
        if grid.dtype != "int8" or zero:
            raise ExportError(
                f"a cache is for symmetric int8 (zero-point 0), got {grid.dtype} with zero-point"
                f" {zero} for {tensor!r}; quantize the model symmetrically"
            )
        return np.float32(grid.scale.reshape(-1)[0])
