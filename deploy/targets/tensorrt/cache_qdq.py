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
requantize each of them.

With the fp8 grid the model is converted to opset 19 and weights are stored as fp8, since TensorRT
does not quantize weights to fp8 itself. There is no way back: caches are for int8 only.

`from_qdq` turns a symmetric Q/DQ model into the plain float model and its scales, for DLA and 8.x::

    p -> t/float -> Q -> DQ -> t -> c       becomes      p -> t -> c        t: scale of the pair
    w ------------> Q -> DQ ------> c       becomes      w ------> c        (float weight as it was)
    int8 w -------------> DQ ------> c      becomes      float w -> c       (w * scale)

A cache holds one float scale per tensor, so anything else is refused: a zero-point other than 0,
per-channel activation scales, two scales for one tensor, operators that compute on integers.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import onnx

from calibrators.grids import INT8, Float32Array
from calibrators.scales import Scale, Scales
from deploy.errors import ExportError
from deploy.frontends.pair_removal import prepare_qdq_model, remove_pairs
from deploy.frontends.pairs import DQ, PairGrid, Q, refuse_integer_operators
from deploy.frontends.qdq_model import check_pairs
from deploy.graph.edit import bypass, drop_unread
from deploy.graph.index import Graph
from deploy.graph.plan import Plan
from deploy.targets.onnxruntime.qdq import Memoize, compute_each_time, write_qdq
from deploy.targets.tensorrt.cache_contents import POOLING_OPS, pool_owners
from deploy.targets.tensorrt.float_types import (
    FIRST_OPSET_BY_TYPE,
    FP8_OPSET,
    at_opset,
    narrow_float_part,
    round_scales,
)

_FP8_IR = 9  # first IR version of ONNX with float8 types
Weights = Mapping[str, Float32Array]
NO_WEIGHTS: Weights = MappingProxyType({})


def to_qdq(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Mapping[str, np.float32],
    *,
    trained_scales: Weights = NO_WEIGHTS,
    memoize: Memoize = compute_each_time,
    float_weights: bool = True,
) -> onnx.ModelProto:
    """Return the model with Q/DQ pairs where TensorRT expects them; `model` is not changed.

    Weights stay float and get a pair, but are stored as fp8 if that is the grid.

    Args:
        model: cleaned float model.
        plan: positions of the pairs, for a placement in `deploy.graph.placement.TENSORRT_BY_GRID`.
        scales: tensor -> its scale for int8, largest |x| / 127, for each of `plan.activations`;
            also if the grid is fp8.
        trained_scales: node -> scales of its weight, if it was trained with them; only for int8.
        memoize: stores results that all trials of a search share, see `write_qdq`; only for int8.
        float_weights: whether weights stay float on an int8 grid. As int8 they give the same
            numbers in a smaller model, for a trial.

    Raises:
        ExportError: a tensor of the plan has no positive scale; or the grid is fp8 and the model
            cannot be converted to opset 19.
    """
    ranges = _symmetric_ranges(model, plan, scales)
    if _is_fp8(plan):  # weights are stored as fp8, to which TensorRT does not quantize itself
        quantized = write_qdq(at_opset(model, FP8_OPSET), plan, ranges)
        quantized.ir_version = max(quantized.ir_version, _FP8_IR)
        return quantized
    return write_qdq(
        model,
        plan,
        ranges,
        trained_scales=trained_scales,
        memoize=memoize,
        float_weights=float_weights,
    )


def to_typed(
    model: onnx.ModelProto,
    plan: Plan,
    scales: Mapping[str, np.float32],
    *,
    float_type: str,
    largest_values: Mapping[str, float],
    trained_scales: Weights = NO_WEIGHTS,
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the Q/DQ model with stored int8 or fp8 weights and its float part in a narrow type.

    Args:
        model: cleaned float model.
        plan: positions of the Q/DQ pairs.
        scales: tensor -> its scale for int8, largest |x| / 127, for each of `plan.activations`;
            also if the grid is fp8.
        float_type: the narrow type, "fp16" or "bf16".
        largest_values: tensor -> largest |x| observed.
        trained_scales: node -> scales of its weight, if it was trained with them.

    Returns:
        The model, and node -> why it stays in float32, for nodes whose operator could be narrow.
    """
    ranges = _symmetric_ranges(model, plan, scales)
    if _is_fp8(plan):  # before the pairs are written: their operators take fp8 from opset 19 on
        model = at_opset(model, FIRST_OPSET_BY_TYPE[float_type])
    quantized = write_qdq(
        model,
        plan,
        ranges,
        round_scales=partial(round_scales, float_type=float_type),
        trained_scales=trained_scales,
    )
    return narrow_float_part(quantized, float_type, largest_values)


def _is_fp8(plan: Plan) -> bool:
    """Whether the pairs of a plan are on the fp8 grid."""
    return plan.placement.grid.kind == "float"


def _symmetric_ranges(
    model: onnx.ModelProto, plan: Plan, scales: Mapping[str, np.float32]
) -> Scales:
    """Return tensor -> the symmetric range of its scale, which tensors of a Concat share."""
    ranges = {}
    for name, scale in concat_scales(model, plan, scales).items():
        amax = float(scale) * INT8.qmax  # in float64, so that amax / 127 is exactly the scale
        ranges[name] = Scale(
            lo=-amax, hi=amax, amax=amax, observed_min=-amax, observed_max=amax, method="cache"
        )
    return ranges


def concat_scales(
    model: onnx.ModelProto, plan: Plan, scales: Mapping[str, np.float32]
) -> dict[str, np.float32]:
    """Return the scales with those of each Concat group raised to the largest of the group."""
    shared_scales = dict(scales)
    for group in concat_groups(model, plan, scales):
        largest_scale = max(scales[name] for name in group)
        shared_scales |= dict.fromkeys(group, largest_scale)
    return shared_scales


def concat_groups(
    model: onnx.ModelProto, plan: Plan, tensors: Collection[str]
) -> list[frozenset[str]]:
    """Return the groups of two or more `tensors` that meet in a Concat and so share a scale.

    Concats with a common tensor form one group. A tensor that takes the scale of another one is
    replaced by that one (its owner, in the plan). For DLA the input and output of a pool form
    a group too.
    """
    joining_operators = {"Concat"}
    if plan.placement.runs_on_dla:  # the outputs of pools have pairs too
        joining_operators |= POOLING_OPS
    candidates = frozenset(tensors)
    groups: list[frozenset[str]] = []
    for node in model.graph.node:
        if node.op_type not in joining_operators:
            continue
        owners = [plan.scale_owners.get(name, name) for name in (*node.input, *node.output)]
        group = candidates.intersection(owners)
        overlapping_groups = [earlier for earlier in groups if earlier & group]
        for earlier in overlapping_groups:
            groups.remove(earlier)
            group |= earlier
        if len(group) > 1:
            groups.append(group)
    return groups


def share_scales(model: onnx.ModelProto, plan: Plan) -> Plan:
    """Return the plan with the tensors that share a scale in TensorRT's Q/DQ model.

    - the output of a pool has the scale of its input, as in a cache
    - tensors that meet in a Concat have the largest of their scales
    - the output of any other operator that moves values has a scale of its own

    Returns:
        The plan with `scale_owners`, tensor -> the tensor whose scale it has, and `range_sources`,
        owner -> the tensors whose ranges its scale covers, if not only its own.
    """
    plan_without_owners = replace(plan, scale_owners={})  # the owners are determined below
    # output of a pool -> the pool's input, whose scale it has in a cache
    pool_inputs = pool_owners(model, POOLING_OPS)
    paired_tensors = dict.fromkeys(pair.tensor for pair in plan.pairs)
    # tensor that meets others in a Concat -> all of them, itself included
    group_by_tensor: dict[str, frozenset[str]] = {}
    for group in concat_groups(model, plan_without_owners, paired_tensors):
        group_by_tensor.update(dict.fromkeys(group, group))

    scale_owners = {}
    range_sources = {}
    for tensor in paired_tensors:
        sharing_tensors = [tensor]  # tensors that have one scale
        pool_input = pool_inputs.get(tensor, tensor)  # the tensor itself, if no pool makes it
        owner = pool_input
        if tensor in group_by_tensor:
            sharing_tensors = sorted(group_by_tensor[tensor])
            owner = sharing_tensors[0]  # any one, but the same in every run
        elif pool_input in group_by_tensor:
            # The scale of the pool's input is the largest of those that meet in its Concat. The
            # pool's output, which meets none there, may have a smaller one of its own.
            owner = tensor

        if owner != tensor:
            scale_owners[tensor] = owner
        # tensors whose ranges the scale covers; a pool's output has its input's, as in a cache
        sources = tuple(dict.fromkeys(pool_inputs.get(name, name) for name in sharing_tensors))
        if sources != (owner,):
            range_sources[owner] = sources
    return replace(plan, scale_owners=scale_owners, range_sources=range_sources)


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A float model extracted from a Q/DQ model by `from_qdq`.

    Attributes:
        model: the float model.
        scales: activation tensor -> float32 scale of its pair, in the model's order.
    """

    model: onnx.ModelProto
    scales: dict[str, np.float32]


def from_qdq(quantized: onnx.ModelProto) -> PlainModel:
    """Return the float model and scales of a Q/DQ model; `quantized` is not changed.

    Raises:
        ModelError: the model is not valid, or has other quantized operators than pairs.
        ExportError: a pair has a grid that a cache cannot express.
    """
    model = prepare_qdq_model(quantized)
    refuse_integer_operators(model)
    check_pairs(model)
    _unpair_float_weights(model)
    # no layer rounds its input: the readers of a pair get the float tensor as it is
    unpaired = remove_pairs(model, int8_layers=(), keep_rounding=False)
    drop_unread(unpaired.model.graph)  # integers, scales and zero points of the pairs
    graph = Graph(unpaired.model)
    scales = {}
    for name in (*graph.inputs, *graph.producer):
        if name in unpaired.grids:  # tensor -> scales and zero points of its pairs
            scales[name] = _single_scale(name, unpaired.grids[name])
    return PlainModel(unpaired.model, scales)


def _unpair_float_weights(model: onnx.ModelProto) -> None:
    """Let the readers of a float weight's Q/DQ pair read the weight itself, in place.

    `remove_pairs` would round the weight as its pair does.
    """
    constants = Graph(model).constants
    weight_integers = {  # outputs of the QuantizeLinears of weights
        node.output[0]
        for node in model.graph.node
        if node.op_type == Q and node.input[0] in constants
    }

    def is_of_weight_pair(node: onnx.NodeProto) -> bool:
        is_dequantize = node.op_type == DQ and node.input[0] in weight_integers
        return is_dequantize or node.output[0] in weight_integers

    bypass(model.graph, is_of_weight_pair)


def _single_scale(tensor: str, grids: Iterable[PairGrid]) -> np.float32:
    """Return the scale that all pairs of a tensor have, which must be symmetric int8.

    Raises:
        ExportError: a pair is not symmetric int8, or two have different scales.
    """
    scales = set()
    for grid in grids:
        zero = grid.zero.item()  # a pair of an activation has one zero point and one scale
        if grid.dtype != "int8" or zero:
            raise ExportError(
                f"a cache is for symmetric int8 (zero-point 0), got {grid.dtype} with zero-point"
                f" {zero} for {tensor!r}; quantize the model symmetrically"
            )
        scales.add(np.float32(grid.scale.item()))
    first_scale, *other_scales = sorted(scales)
    if other_scales:
        raise ExportError(
            f"a cache has one scale a tensor, got {first_scale} and {other_scales[0]} for"
            f" {tensor!r}; give its pairs one scale"
        )
    return first_scale
