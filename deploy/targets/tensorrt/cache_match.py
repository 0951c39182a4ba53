"""Match the entries of a TensorRT cache to the tensors of a model.

::

    cache entry --> tensor of the model    by name; by the naming rules of TensorRT's parser for
                                           tensors inside a node; by position, between two
                                           entries that match by name
    tensor      --> Q/DQ pair              where `deploy.graph.plan` puts one for TensorRT

Every unused entry and every tensor to be quantized that is left without a scale gets a reason.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx

from deploy.calibration.trt_cache import CalibrationCache
from deploy.graph.placement import TENSORRT, Placement
from deploy.graph.plan import Plan, analyse, reasons_by_node
from deploy.targets.tensorrt.cache_contents import CacheTensor, cache_tensors, scale_owners

_LEGACY_VERSION = "6.0.1"  # version assumed for the legacy form, whose header has none


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


@dataclass(frozen=True, slots=True)
class _EntryTensor:
    """The model's tensor that an entry belongs to, and how it was matched."""

    tensor: str
    how_matched: str


def match_cache(
    cache: CalibrationCache,
    model: onnx.ModelProto,
    *,
    original: onnx.ModelProto | None = None,
    parser: str | None = None,
    float_nodes: Mapping[str, str] | Iterable[str] = (),
    placement: Placement = TENSORRT,
) -> CacheMatch:
    """Match a cache to a cleaned model.

    Args:
        cache: written by TensorRT or calib8.
        model: cleaned float model, BatchNormalization folded or not.
        original: the model as TensorRT reads it, for the names that its parser gives.
        parser: see `deploy.targets.tensorrt.cache_contents.cache_tensors`.
        float_nodes: nodes to keep in float, as for `analyse`.
        placement: positions of the pairs: from `deploy.graph.placement.TENSORRT_BY_GRID`, possibly
            changed by the target's options.

    Raises:
        CacheError: the cache has two scales for one tensor.
    """
    scale_by_entry, flaw_by_entry = cache.scales(), cache.flaws()
    expected = cache_tensors(
        model,
        version=cache.header.version or _LEGACY_VERSION,
        parser=parser,
        original=original,
    )
    file_tensors: set[str] = set()
    if original is not None:
        for node in original.graph.node:
            file_tensors.update(node.input, node.output)
    matches = _match_entries(expected, scale_by_entry, file_tensors)

    usable_scales = {}
    flaw_reasons = {}
    for name, match in matches.items():
        if name in flaw_by_entry:
            flaw_reasons[match.tensor] = f"has a {flaw_by_entry[name]} scale"
        else:
            usable_scales[match.tensor] = scale_by_entry[name]
    plan, owner_by_tensor = _plan_covered(
        model, placement, usable_scales, flaw_reasons, expected, reasons_by_node(float_nodes)
    )

    scales = {tensor: usable_scales[owner_by_tensor[tensor]] for tensor in plan.activations}
    used_tensors = {owner_by_tensor[tensor] for tensor in scales}
    entries = []
    for name in scale_by_entry:
        if name in matches:
            flaw = flaw_by_entry.get(name)
            entries.append(
                _entry_use(name, matches[name], flaw, used_tensors, placement.precision_name)
            )
        else:
            entries.append(EntryUse(name, None, False, _why_unmatched(name, model, original)))
    tensors = [
        _coverage(tensor, owner, tensor in scales, flaw_reasons)
        for tensor, owner in owner_by_tensor.items()
    ]
    return CacheMatch(tuple(entries), tuple(tensors), plan, scales)


def _plan_covered(
    model: onnx.ModelProto,
    placement: Placement,
    usable_scales: Mapping[str, np.float32],
    flaw_reasons: Mapping[str, str],
    expected: Sequence[CacheTensor],
    float_nodes: Mapping[str, str],
) -> tuple[Plan, dict[str, str]]:
    """Return (plan of the tensors with a scale, tensor -> the tensor whose scale it takes).

    A pool output takes the scale of the pool's input, as in every TensorRT cache. Another moved
    copy of a tensor (Flatten) has its own entry; if that is missing, it takes the tensor's scale.
    """
    owner_by_entry = scale_owners(expected)
    cache_owners = {entry.source: owner_by_entry[entry.name] for entry in expected}
    complete_plan = analyse(model, placement, float_nodes=float_nodes)
    owner_by_tensor = {}
    missing = {}
    for pair in complete_plan.pairs:
        tensor = pair.tensor
        moved_from = complete_plan.scale_owners.get(tensor, tensor)
        owner = tensor
        for candidate in (cache_owners.get(tensor, tensor), tensor, moved_from):
            if candidate in usable_scales:
                owner = candidate
                break
        owner_by_tensor[tensor] = owner
        if owner not in usable_scales:
            missing[tensor] = flaw_reasons.get(tensor, "has no entry in the cache")
    for tensor, reason in tuple(missing.items()):
        missing[complete_plan.scale_owners.get(tensor, tensor)] = reason
    plan = analyse(model, placement, float_nodes=float_nodes, float_tensors=missing)
    return replace(plan, scale_owners={}), owner_by_tensor


def _match_entries(
    expected: Sequence[CacheTensor],
    scale_by_entry: Mapping[str, np.float32],
    file_tensors: Collection[str],
) -> dict[str, _EntryTensor]:
    """Return entry -> its tensor; `expected` are the entries that TensorRT would write."""
    source_by_name = {tensor.name: tensor.source for tensor in expected}
    sources = set(source_by_name.values())
    matches = {}
    for name in scale_by_entry:
        if name in sources:
            matches[name] = _EntryTensor(name, "by name")
        elif name in source_by_name:
            matches[name] = _EntryTensor(source_by_name[name], "as TensorRT's parser names it")

    matched_tensors = {match.tensor for match in matches.values()}
    pool_input = {tensor.name: tensor.shares for tensor in expected}
    renamed = _match_by_position([*scale_by_entry], [*source_by_name], file_tensors)
    for name, expected_name in renamed.items():
        source = source_by_name[expected_name]
        if name in matches or source in matched_tensors:
            continue
        if _agrees_with_pool(name, pool_input[expected_name], scale_by_entry):
            matches[name] = _EntryTensor(source, "renamed; by its position")
            matched_tensors.add(source)
    return matches


def _agrees_with_pool(
    name: str, pool_input: str | None, scale_by_entry: Mapping[str, np.float32]
) -> bool:
    """Return False if a pool's scale is not that of its input: then the position is wrong."""
    if pool_input is None or pool_input not in scale_by_entry:
        return True
    return bool(scale_by_entry[pool_input] == scale_by_entry[name])


def _match_by_position(
    names: Sequence[str], expected_names: Sequence[str], file_tensors: Collection[str]
) -> dict[str, str]:
    """Match renamed entries: as many entries as tensors lie between two matches by name.

    Nothing is matched where the entries are not in network order (caches from TensorRT 8 on),
    before the first and after the last match, or where an entry has the name of another tensor of
    the file.
    """
    expected_index = {name: index for index, name in enumerate(expected_names)}
    anchors = [
        (index, expected_index[name]) for index, name in enumerate(names) if name in expected_index
    ]
    renamed: dict[str, str] = {}
    for (start, expected_start), (end, expected_end) in pairwise(anchors):
        if expected_end <= expected_start:
            return {}
        between = names[start + 1 : end]
        expected_between = expected_names[expected_start + 1 : expected_end]
        is_another_tensor = any(name in file_tensors for name in between)
        if len(between) == len(expected_between) and not is_another_tensor:
            renamed |= dict(zip(between, expected_between, strict=True))
    return renamed


def _entry_use(
    name: str, match: _EntryTensor, flaw: str | None, used_tensors: Collection[str], precision: str
) -> EntryUse:
    if flaw is not None:
        return EntryUse(name, match.tensor, False, f"its scale is {flaw}")
    if match.tensor not in used_tensors:
        reason = f"no pair of its own: no {precision} node reads it directly"
        return EntryUse(name, match.tensor, False, reason)
    return EntryUse(name, match.tensor, True, match.how_matched)


def _why_unmatched(name: str, model: onnx.ModelProto, original: onnx.ModelProto | None) -> str:
    """Return why an entry belongs to no activation of the model."""
    if original is not None and any(name in node.output for node in original.graph.node):
        return (
            "in the file, but not after folding (BatchNormalization, constants), or behind a plugin"
        )
    constants = {tensor.name for tensor in model.graph.initializer}
    if name in constants or name.removesuffix("_output") in constants:
        return "a constant of the model; TensorRT reads its range from its values"
    if name.startswith(("(Unnamed Layer* ", "(Unnamed ITensor* ")):
        if "[Constant]" in name:
            return "a constant that TensorRT's parser made; it is no tensor of the model"
        return "made inside a node by TensorRT's parser; its layer number is not established"
    if name.startswith("ONNXTRT_"):
        return "made inside a node by TensorRT's parser; it is no tensor of the model"
    return "no tensor of the model has this name"


def _coverage(
    tensor: str, owner: str, has_scale: bool, flaw_reasons: Mapping[str, str]
) -> TensorCoverage:
    if has_scale:
        return TensorCoverage(tensor, True, "" if owner == tensor else f"with the scale of {owner}")
    reason = flaw_reasons.get(tensor, "has no entry in the cache, or its node stays float")
    return TensorCoverage(tensor, False, reason)
