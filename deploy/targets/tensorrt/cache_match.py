"""Match the entries of a TensorRT cache to the tensors of a model.

::

    cache entry --> tensor of the model    by name; by the naming rules of TensorRT's parser for
                                           tensors inside a node
    tensor      --> Q/DQ pair              where `deploy.graph.plan` puts one for TensorRT

Every unused entry and every tensor to be quantized that is left without a scale gets a reason.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx

from deploy.calibration.trt_cache import CalibrationCache
from deploy.graph.index import float16_ends, names_of
from deploy.graph.placement import TENSORRT, Placement
from deploy.graph.plan import FloatNodes, ModelAnalysis, Plan, analyse
from deploy.targets.tensorrt.cache_contents import CacheTensor, cache_tensors

_LEGACY_VERSION = "6.0.1"  # version assumed for the legacy form, whose header has none
_FOREIGN = "no tensor of the model has this name"  # reason of an entry of another model, perhaps


@dataclass(frozen=True, slots=True)
class EntryUse:
    """One entry of the cache.

    Attributes:
        name: its name in the cache.
        tensor: the model's tensor that it belongs to, or None.
        is_used: whether a Q/DQ pair uses its scale.
        reason: how it was matched; if unused, why.
    """

    name: str
    tensor: str | None
    is_used: bool
    reason: str

    @property
    def is_foreign(self) -> bool:
        """Whether it is of a tensor that the model does not have."""
        return self.reason == _FOREIGN


@dataclass(frozen=True, slots=True)
class TensorCoverage:
    """One tensor to be quantized.

    Attributes:
        tensor: its name in the model.
        has_scale: whether the cache has a scale for it.
        reason: whose scale it takes, if not its own; without a scale, why there is none.
    """

    tensor: str
    has_scale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """A cache matched to a model, with the plan and scales for the Q/DQ writer.

    Attributes:
        entries: the entries of the cache.
        tensors: every tensor that TensorRT's placement would quantize, in the model's order.
        plan: the placement, restricted to tensors with a scale.
        scales: tensor of a pair -> its scale.
    """

    entries: tuple[EntryUse, ...]
    tensors: tuple[TensorCoverage, ...]
    plan: Plan
    scales: Mapping[str, np.float32]

    @property
    def used_entry_count(self) -> int:
        """Number of used entries."""
        return sum(entry.is_used for entry in self.entries)

    @property
    def covered_tensor_count(self) -> int:
        """Number of tensors with a scale."""
        return sum(tensor.has_scale for tensor in self.tensors)


def match_cache(
    cache: CalibrationCache,
    model: onnx.ModelProto,
    *,
    original: onnx.ModelProto | None = None,
    float_nodes: FloatNodes = (),
    placement: Placement = TENSORRT,
    analysis: ModelAnalysis | None = None,
) -> CacheMatch:
    """Return which tensor each entry of a cache belongs to, and the plan of the pairs it allows.

    A cache lists a scale for each tensor by the name that TensorRT's parser gives it.

    Args:
        cache: written by TensorRT or calib8.
        model: cleaned float model, BatchNormalization folded or not.
        original: the model as TensorRT reads it, for the names that its parser gives.
        float_nodes: nodes to keep in float, optionally with reasons.
        placement: where TensorRT wants Q/DQ pairs: from `placement.TENSORRT_BY_GRID`, possibly
            changed by the target's options.
        analysis: analysis of the model, if an earlier call has made it.

    Raises:
        CacheError: the cache has two scales for one tensor.
    """
    version = cache.header.version or _LEGACY_VERSION
    # the entries that TensorRT would write, each with the tensor of the model that it is for
    expected_entries = cache_tensors(model, version=version, original=original)
    scale_by_entry = cache.scales()
    tensor_by_entry = _find_tensors(scale_by_entry, expected_entries, model)
    flaw_by_entry = cache.flaws()  # name -> "zero", "inf", "NaN" or "negative", of its scale
    scale_by_tensor = {}
    flaw_by_tensor = {}
    for name, tensor in tensor_by_entry.items():
        if name in flaw_by_entry:
            flaw_by_tensor[tensor] = f"has a {flaw_by_entry[name]} scale"
        else:
            scale_by_tensor[tensor] = scale_by_entry[name]

    # the tensors that get a pair: those that have a usable scale, and an int8 or fp8 reader
    plan, scale_source_by_tensor = _plan_with_scales(
        model,
        placement,
        scale_by_tensor,
        flaw_by_tensor,
        expected_entries,
        float_nodes,
        analysis or ModelAnalysis(model),
    )

    # a tensor may take the scale of another one: a pool's output that of its input
    scales = {}
    used_tensors = set()  # those whose scale in the cache is taken
    for tensor in plan.activations:
        scale_source = scale_source_by_tensor[tensor]
        scales[tensor] = scale_by_tensor[scale_source]
        used_tensors.add(scale_source)

    # how each entry is used, or why it is not
    entries = []
    for name in scale_by_entry:
        entry_tensor = tensor_by_entry.get(name)
        is_used = False
        if entry_tensor is None:  # the model has no tensor for this entry
            reason = _why_unmatched(name, model, original)
        elif name in flaw_by_entry:
            reason = f"its scale is {flaw_by_entry[name]}"
        elif entry_tensor not in used_tensors:
            reason = f"no pair of its own: no {placement.precision_name} node reads it directly"
        else:
            is_used = True
            reason = "by name" if name == entry_tensor else "as TensorRT's parser names it"
        entries.append(EntryUse(name, entry_tensor, is_used=is_used, reason=reason))
    coverages = [
        _describe_coverage(tensor, scale_source, tensor in scales, flaw_by_tensor)
        for tensor, scale_source in scale_source_by_tensor.items()
    ]
    return CacheMatch(tuple(entries), tuple(coverages), plan, scales)


def _find_tensors(
    names: Collection[str], expected_entries: Sequence[CacheTensor], model: onnx.ModelProto
) -> dict[str, str]:
    """Return name of an entry -> its tensor, for the entries that belong to one.

    Args:
        names: the names of all entries of the cache.
        expected_entries: the entries that TensorRT would write.
        model: the cleaned float model.
    """
    tensor_by_name = {entry.name: entry.tensor for entry in expected_entries}
    # a tensor's own name comes first, even if the parser gives it to another tensor
    tensor_by_name |= {entry.tensor: entry.tensor for entry in expected_entries}
    for name, float32_tensor in float16_ends(model).items():
        if float32_tensor not in names:  # TensorRT read the user's file, without this cast
            tensor_by_name.setdefault(name, float32_tensor)
    return {name: tensor_by_name[name] for name in names if name in tensor_by_name}


def _plan_with_scales(
    model: onnx.ModelProto,
    placement: Placement,
    scale_by_tensor: Mapping[str, np.float32],
    flaw_by_tensor: Mapping[str, str],
    expected_entries: Sequence[CacheTensor],
    float_nodes: FloatNodes,
    analysis: ModelAnalysis,
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of the Q/DQ pairs for which the cache has a scale.

    Tensors without a scale stay in float. The output of a pool, or of an operator that only moves
    values, may take the scale of the operator's input.

    Args:
        model: the cleaned float model.
        placement: where pairs stand.
        scale_by_tensor: tensor -> its scale in the cache, if that can be used.
        flaw_by_tensor: tensor -> why its scale in the cache cannot be used.
        expected_entries: the entries that TensorRT would write.
        float_nodes: nodes to keep in float, optionally with reasons.
        analysis: analysis of the model.

    Returns:
        The plan, without `scale_owners`, and the source of each scale: tensor -> the tensor whose
        scale in the cache it takes. It has each tensor that would be quantized if the cache had all
        scales; one that gets no scale is its own source.
    """
    # the output of a pool -> the pool's input (its `owner`); any other tensor -> itself
    pool_input_by_tensor = {entry.tensor: entry.owner for entry in expected_entries}
    plan_pairs = partial(analyse, model, placement, float_nodes=float_nodes, analysis=analysis)
    complete_plan = plan_pairs()
    scale_source_by_tensor = {}
    float_reasons = {}  # tensor that stays in float -> why
    for pair in complete_plan.pairs:
        tensor = pair.tensor
        pool_input = pool_input_by_tensor.get(tensor, tensor)
        # where an operator only moves values, the tensor that it moves: a Flatten's input
        moved_tensor = complete_plan.scale_owners.get(tensor, tensor)
        # TensorRT's own cache has a scale for the first of these; the cache of another tool may
        # have one only for another of them
        candidates = (pool_input, tensor, moved_tensor)
        scale_source = next((name for name in candidates if name in scale_by_tensor), None)
        scale_source_by_tensor[tensor] = scale_source or tensor
        if scale_source is None:
            reason = flaw_by_tensor.get(tensor, "has no entry in the cache")
            float_reasons[tensor] = reason
            # its readers are float too: `analyse` looks for the reason of a reader of `tensor`
            # under the tensor whose scale it would share, `moved_tensor`
            float_reasons[moved_tensor] = reason

    plan = complete_plan
    if float_reasons:
        plan = plan_pairs(float_tensors=float_reasons)
    # by `scale_owners` a tensor would have the scale of the tensor that is moved, whatever the
    # cache has for itself: the caller takes the scales that are chosen here
    return replace(plan, scale_owners={}), scale_source_by_tensor


def _why_unmatched(name: str, model: onnx.ModelProto, original: onnx.ModelProto | None) -> str:
    """Return why an entry of the cache belongs to no activation of the model.

    `original`: the model before it was cleaned, if it is known.
    """
    if original is not None and any(name in node.output for node in original.graph.node):
        return (
            "in the file, but not after folding (BatchNormalization, constants), or behind a plugin"
        )
    # TensorRT's parser may name the output of a constant's layer NAME_output
    constants = names_of(model.graph.initializer)
    if name in constants or name.removesuffix("_output") in constants:
        return "a constant of the model; TensorRT reads its range from its values"
    if name.startswith(("(Unnamed Layer* ", "(Unnamed ITensor* ", "ONNXTRT_")):
        return "made inside a node by TensorRT's parser; it is no tensor of the model"
    return _FOREIGN


def _describe_coverage(
    tensor: str, scale_source: str, has_scale: bool, flaw_by_tensor: Mapping[str, str]
) -> TensorCoverage:
    """Return whether a tensor has a scale, that of `scale_source` in the cache, or why not."""
    if has_scale:
        origin = "" if scale_source == tensor else f"with the scale of {scale_source}"
        return TensorCoverage(tensor, True, origin)
    reason = flaw_by_tensor.get(tensor, "has no entry in the cache, or its node stays float")
    return TensorCoverage(tensor, False, reason)
