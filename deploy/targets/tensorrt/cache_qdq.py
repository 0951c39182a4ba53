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

A symmetric Q/DQ model -> the plain float model and the scales of its pairs, for DLA and 8.x.

::

    p -> t/float -> Q -> DQ -> t -> c       becomes      p -> t -> c        t: scale of the pair
    w ------------> Q -> DQ ------> c       becomes      w ------> c        (float weight as it was)
    int8 w -------------> DQ ------> c      becomes      float w -> c       (w * scale)

A cache can say one float scale a tensor and nothing else, so what it cannot say is refused: a
zero-point other than 0, a scale for each channel of an activation, two scales for one tensor,
integers at the ends of the model, operators that compute on integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import INT8, quantize
from calibrators.scales import Scale
from deploy.errors import ExportError
from deploy.frontends import checks
from deploy.frontends.plugins import check_part_valid
from deploy.graph.edit import copied, rebuild, replace_nodes
from deploy.graph.index import Graph, attributes, reads
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import Plan
from deploy.targets.onnxruntime.qdq import write_qdq
from deploy.targets.tensorrt.float_types import FP8_OPSET, OPSETS, at_opset, storable, typed
from deploy.targets.tensorrt.naming import POOLS

if TYPE_CHECKING:
    import onnx


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

    Args beyond those of `to_qdq`, and what is given back: see
    `deploy.targets.tensorrt.float_types.typed`.

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


_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "ConvInteger", "MatMulInteger")


@dataclass(frozen=True, slots=True)
class Plain:
    """What `from_qdq` gives.

    Attributes:
        model: the float model, without a Q or DQ.
        scales: activation tensor -> float32 scale of its pair, in the model's order.
        weights: weights that were stored as integers, and are now those integers times their scale.
    """

    model: onnx.ModelProto
    scales: dict[str, np.float32]
    weights: tuple[str, ...]


def from_qdq(quantized: onnx.ModelProto) -> Plain:
    """Take every Q/DQ pair out; `quantized` is left as it is.

    Raises:
        ModelError: it is no valid model.
        ExportError: nothing to take out, or something that a calibration cache cannot say.
    """
    checks.check_names(quantized)
    check_part_valid(quantized)
    return _Reader(copied(quantized)).run()


class _Reader:
    """One model being freed of its pairs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        index = Graph(model)
        self.constants = {name: checks.to_array(t) for name, t in index.constants.items()}
        self.makers, self.outputs = index.producer, index.outputs
        self.scales: dict[str, np.float32] = {}
        self.weights: list[str] = []
        self.same: dict[str, str] = {}  # output of a DQ -> the float tensor it stands for
        self.renamed: dict[str, str] = {}  # what a node makes -> the name it had before

    def run(self) -> Plain:
        """Read every pair, then rewire."""
        self._refuse_integers()
        for node in self.graph.node:
            if node.op_type == _DQ:
                self._dequantize(node)
        if not self.same:
            raise ExportError(
                "a Q/DQ model holds QuantizeLinear and DequantizeLinear nodes, got none; this model"
                " is plain already"
            )
        self._rewire()
        order = [v.name for v in self.graph.input] + [o for n in self.graph.node for o in n.output]
        scales = {name: self.scales[name] for name in order if name in self.scales}
        return Plain(self.model, scales, tuple(self.weights))

    def _refuse_integers(self) -> None:
        for node in self.graph.node:
            if node.op_type.startswith(_INTEGER_OPS):
                raise ExportError(
                    f"only QuantizeLinear and DequantizeLinear can be taken out of a model, got the"
                    f" integer operator {node.op_type}; export it in the Q/DQ form"
                )
        ends = [*self.graph.input, *self.graph.output]
        ints = [v.name for v in ends if v.type.tensor_type.elem_type in (2, 3)]
        if ints:
            raise ExportError(
                "a model that a cache is for has float inputs and outputs, got int8 at"
                f" {ints[0]!r}; export it with float ends"
            )

    def _dequantize(self, node: onnx.NodeProto) -> None:
        source, out = node.input[0], node.output[0]
        quantizer = self.makers.get(source)
        if source in self.constants:
            if self.constants[source].dtype.kind not in "iu":
                raise ExportError(
                    f"a cache is for int8, got a weight stored as {self.constants[source].dtype}"
                    f" for {out!r}; there is no cache of an fp8 model"
                )
            self.same[out] = self._constant(out, self._times(node, self.constants[source]))
            self.weights.append(source)
        elif quantizer is None or quantizer.op_type != _Q:
            maker = quantizer.op_type if quantizer is not None else "an input of the model"
            raise ExportError(
                f"each DequantizeLinear follows its QuantizeLinear, got {maker} before {out!r}"
            )
        elif quantizer.input[0] in self.constants:  # a float weight
            self.same[out] = quantizer.input[0]
        else:
            self._activation(quantizer, node)

    def _activation(self, quantizer: onnx.NodeProto, node: onnx.NodeProto) -> None:
        source, out = quantizer.input[0], node.output[0]
        source = self.same.get(source, source)
        scale = self._scale(quantizer, source)
        if self._scale(node, source) != scale:
            raise ExportError(f"the two scales of the pair on {source!r} must be equal")
        name = source
        if out in self.outputs or source == f"{out}/float":  # the tensor's name went to the DQ
            name = out
            self.renamed[source] = out
        self.same[out] = name
        if self.scales.setdefault(name, scale) != scale:
            raise ExportError(
                f"a cache has one scale a tensor, got {self.scales[name]} and {scale} for {name!r};"
                " give its pairs one scale"
            )

    def _scale(self, node: onnx.NodeProto, tensor: str) -> np.float32:
        """The one scale of an activation's Q or DQ."""
        scale = self._known(node.input[1], tensor).astype(np.float32)
        zero = self._known(node.input[2], tensor) if len(node.input) > 2 and node.input[2] else None
        if scale.size != 1:
            raise ExportError(
                f"a cache has one scale a tensor, got {scale.size} (one a channel) for {tensor!r}"
            )
        if zero is None or zero.dtype != np.int8 or zero.any():
            kind = "uint8" if zero is None else str(zero.dtype)
            point = 0 if zero is None else int(zero.reshape(-1)[0])
            raise ExportError(
                f"a cache is for symmetric int8 (zero-point 0), got {kind} with zero-point"
                f" {point} for {tensor!r}; quantize the model symmetrically"
            )
        value = np.float32(scale.reshape(-1)[0])
        if not (np.isfinite(value) and value > 0):
            raise ExportError(f"a scale is positive and finite, got {value} for {tensor!r}")
        return value

    def _times(self, node: onnx.NodeProto, integers: NDArray[Any]) -> NDArray[np.float32]:
        """What a DequantizeLinear makes of constant integers."""
        scale: NDArray[Any] = self._known(node.input[1], node.output[0]).astype(np.float32)
        zero: NDArray[Any] = np.zeros(1, np.int32)
        if len(node.input) > 2 and node.input[2]:
            zero = self._known(node.input[2], node.output[0]).astype(np.int32)
        axis = attributes(node).get("axis", 1)
        channels = [-1 if a in (axis, axis + integers.ndim) else 1 for a in range(integers.ndim)]
        try:
            scale, zero = (v.reshape(channels if v.size > 1 else ()) for v in (scale, zero))
            steps = (integers.astype(np.int32) - zero).astype(np.float32)
            return np.asarray(steps * scale, np.float32)
        except ValueError as error:
            raise ExportError(
                f"the scales of a weight must fit its axis, got {scale.size} on axis {axis} of"
                f" {list(integers.shape)} for {node.output[0]!r}"
            ) from error

    def _known(self, name: str, tensor: str) -> NDArray[Any]:
        if name not in self.constants:
            raise ExportError(
                f"scales and zero-points must be constants, got a computed one for {tensor!r};"
                " fold the model's constants first"
            )
        return self.constants[name]

    def _constant(self, name: str, array: NDArray[np.float32]) -> str:
        from onnx import numpy_helper

        if name in self.outputs:
            raise ExportError(f"an output of the model cannot be a constant, got {name!r}")
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _rewire(self) -> None:
        """Drop the pairs, let their readers read the float tensors, drop what nobody reads."""
        kept = [node for node in self.graph.node if node.op_type not in (_Q, _DQ)]
        stray = [n for n in self.graph.node if n.op_type == _Q and n.input[0] not in self.constants]
        read = {name for node in self.graph.node if node.op_type == _DQ for name in node.input}
        for node in stray:
            if node.output[0] not in read:
                raise ExportError(
                    f"a DequantizeLinear follows each QuantizeLinear, got none after {node.name!r}"
                )
        for node in kept:
            for place, name in enumerate(node.input):
                node.input[place] = self._final(name)
            for place, name in enumerate(node.output):
                node.output[place] = self.renamed.get(name, name)
        used = {name for node in kept for name in reads(node)} | self.outputs
        rebuild(self.graph, (n for n in kept if n.op_type != "Constant" or n.output[0] in used))

    def _final(self, name: str) -> str:
        name = self.same.get(name, name)
        return self.renamed.get(name, name)
