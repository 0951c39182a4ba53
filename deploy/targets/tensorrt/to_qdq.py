"""A float model and a TensorRT cache -> the Q/DQ model for TensorRT 8 to 11 and the CPU.

Pairs stand where TensorRT wants them (`deploy.graph.placement.TENSORRT`): on the inputs of Conv,
Gemm and MatMul and on the skip branch of a residual Add, with zero-point 0, never between a Conv
and its Relu. Weights keep their float values and get a pair of their own, per channel, as TensorRT
quantizes them itself; so the way back (`from_qdq`) loses nothing::

    x -> Q -> DQ --.
                    Conv -> Relu
    w -> Q -> DQ --'            (w: the float initializer, unchanged)

On the fp8 grid weights are stored as fp8 in either model: no cache is for fp8, so there is no way
back, and TensorRT quantizes no weight to fp8 itself. The model is brought to opset 19 for it.

Tensors that meet in a Concat get one scale, the largest of the group: TensorRT would otherwise
requantize each of them. `own_concat_scales` keeps them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from calibrators.grids import INT8, quantize
from calibrators.scales import Scale
from deploy.graph.edit import replace_nodes
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import Plan
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.targets.tensorrt.float_types import FP8_OPSET, OPSETS, at_opset, storable, typed
from deploy.targets.tensorrt.naming import POOLS

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_FP8_IR = 9
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
    """Write the Q/DQ model; `model` is left as it is.

    Args:
        model: cleaned float model.
        plan: where the pairs stand, of a placement of `deploy.graph.placement.TENSORRT_ON`.
        scales: tensor -> float32 scale of int8 (amax / 127), for `plan.activations`, whatever the
            grid of the placement.
        own_concat_scales: leave the tensors of a Concat their own scales.
        known: scales of weights that were trained, see `deploy.targets.onnxruntime.qdq.write_qdq`.

    Raises:
        ExportError: a tensor of the plan has no scale, or one that is not positive; fp8, and the
            model cannot be lifted.
    """
    ranges = _ranges(model, plan, scales, own_concat_scales)
    if _fp8(plan):
        return _of_fp8(write_qdq(at_opset(model, FP8_OPSET), plan, ranges))
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
    """The same with weights stored on the grid and what is not on it in a narrow type.

    Args beyond those of `to_qdq`, and what is given back: see `deploy.targets.tensorrt.float_types.typed`.

    Raises:
        ExportError: as `to_qdq` and `typed`.
    """
    ranges = _ranges(model, plan, scales, own_concat_scales)
    if _fp8(plan):  # before there is any fp8 in it, which onnx's converter need not know
        model = at_opset(model, max(FP8_OPSET, OPSETS[rest]))
    quantized = write_qdq(model, plan, ranges, storable=partial(storable, rest=rest), known=known)
    return typed(_of_fp8(quantized) if _fp8(plan) else quantized, rest, largest)


def _fp8(plan: Plan) -> bool:
    return plan.placement.grid.kind == "float"


def _of_fp8(quantized: onnx.ModelProto) -> onnx.ModelProto:
    """The same, under the first version of ONNX's format that has the type."""
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
    """The scales with those of each Concat group (its quantized inputs and output) made equal."""
    shared = dict(scales)
    for group in concat_groups(model, plan, scales):
        shared |= dict.fromkeys(group, max((scales[n] for n in group), default=np.float32(0)))
    return shared


def concat_groups(
    model: onnx.ModelProto, plan: Plan, tensors: Collection[str]
) -> list[frozenset[str]]:
    """Those of `tensors` that meet in a Concat, over all Concats that have one in common."""
    groups: list[frozenset[str]] = []
    for node in model.graph.node:
        if node.op_type != "Concat":
            continue
        group = frozenset(plan.owners.get(n, n) for n in [*node.input, *node.output])
        group &= frozenset(tensors)
        for other in [g for g in groups if g & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    return groups


def with_groups(model: onnx.ModelProto, plan: Plan) -> Plan:
    """The plan, its owners those by which scales are shared in the Q/DQ model.

    A pool has the scale of its input, as in a cache, what is moved otherwise one of its own, and
    what meets in a Concat the largest of all.
    """
    graph, apart = Graph(model), replace(plan, owners={})
    paired = dict.fromkeys(pair.tensor for pair in plan.pairs)
    made = {tensor: _pooled(graph, tensor) for tensor in paired}
    several = [group for group in concat_groups(model, apart, paired) if len(group) > 1]
    groups = {tensor: group for group in several for tensor in group}
    owners, sources = {}, {}
    for tensor in paired:
        group = groups.get(tensor, frozenset({tensor}))
        owner = min(group) if len(group) > 1 else made[tensor]
        if len(group) == 1 and owner in groups:  # whose scale is that of a Concat
            owner = tensor
        owners[tensor] = owner
        sources[owner] = tuple(dict.fromkeys(made[member] for member in sorted(group)))
    return replace(
        plan,
        owners={t: owner for t, owner in owners.items() if owner != t},
        sources={owner: found for owner, found in sources.items() if found != (owner,)},
    )


def _pooled(graph: Graph, tensor: str) -> str:
    """The tensor whose scale one has in a cache: what a pool reads, or itself."""
    while (maker := graph.producer.get(tensor)) is not None and maker.op_type in POOLS:
        tensor = str(maker.input[0])
    return tensor


def scale_nodes(model: onnx.ModelProto) -> Iterable[tuple[str, np.float32]]:
    """(quantized tensor, scale) of every QuantizeLinear that `to_qdq` put on an activation."""
    from onnx import numpy_helper

    constants = Graph(model).initializers
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            value = numpy_helper.to_array(constants[node.input[1]])
            yield node.input[0].removesuffix("/float"), np.float32(value)


def _symmetric(scale: np.float32) -> Scale:
    """A clip range whose symmetric scale is `scale` to the bit: (s * 127) / 127 in float64."""
    amax = float(scale) * INT8.qmax
    return Scale(
        lo=-amax, hi=amax, amax=amax, observed_min=-amax, observed_max=amax, method="cache"
    )


def _keep_float_weights(quantized: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Replace each int8 initializer by its float one and a QuantizeLinear, where they agree."""
    from onnx import helper

    graph, index = quantized.graph, Graph(quantized)
    constants, floats = index.initializers, Graph(model).initializers
    made = []
    for node in [n for n in index.nodes if n.op_type in TENSORRT.heavy]:
        pair = index.producer.get(node.input[1])
        if pair is None or pair.op_type != "DequantizeLinear" or pair.input[0] not in constants:
            continue
        name = _weight_of(pair.input[0], floats)
        if name is None or not _agree(pair, constants, floats[name]):
            continue
        stored = pair.input[0]
        quantizer = helper.make_node(
            "QuantizeLinear", [name, *pair.input[1:]], [stored], f"{stored}/Q", **attributes(pair)
        )
        made.append(quantizer)
        graph.initializer.remove(constants.pop(stored))
        if name not in constants:
            graph.initializer.append(floats[name])
            constants[name] = floats[name]
    replace_nodes(graph, [*made, *graph.node])


def _weight_of(stored: str, floats: Mapping[str, onnx.TensorProto]) -> str | None:
    """The float initializer behind "<weight>/quantized" or "<weight>/<node>/quantized"."""
    name = stored.removesuffix("/quantized")
    while name and name not in floats:
        name = name.rpartition("/")[0]
    return name or None


def _agree(
    pair: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], weight: onnx.TensorProto
) -> bool:
    """Whether QuantizeLinear of the float weight gives exactly the stored integers."""
    from onnx import numpy_helper

    stored = numpy_helper.to_array(constants[pair.input[0]])
    scales = numpy_helper.to_array(constants[pair.input[1]])
    array = numpy_helper.to_array(weight)
    axis = attributes(pair).get("axis")
    if axis is not None:
        scales = scales.reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    return bool(np.array_equal(quantize(array, scales, 0, TENSORRT.weights), stored))
