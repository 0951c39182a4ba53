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
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT, Placement
from deploy.graph.plan import Plan, analyse, reasons_by_node
from deploy.targets.tensorrt.cache_contents import CacheTensor, cache_tensors, scale_owners

_OLDEST = "6.0.1"  # version assumed for the legacy form, whose header has none


@dataclass(frozen=True, slots=True)
class EntryUse:
    """One entry of the cache."""

    name: str
    tensor: str | None  # the model's tensor that it belongs to, or None
    used: bool  # whether a Q/DQ pair uses its scale
    reason: str  # how it was matched; if unused, why


@dataclass(frozen=True, slots=True)
class TensorCoverage:
    """One tensor to be quantized: whether the cache has a scale for it, and if not, why."""

    tensor: str
    covered: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """A cache matched to a model, with the plan and scales for the Q/DQ writer."""

    entries: tuple[EntryUse, ...]
    # every tensor that TensorRT's placement would quantize, in the model's order
    tensors: tuple[TensorCoverage, ...]
    plan: Plan  # the placement, restricted to covered tensors
    scales: Mapping[str, np.float32]

    @property
    def used(self) -> int:
        """Number of used entries."""
        return sum(entry.used for entry in self.entries)

    @property
    def covered(self) -> int:
        """Number of covered tensors."""
        return sum(tensor.covered for tensor in self.tensors)


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
    scales, flaws = cache.scales(), cache.flaws()
    version = cache.header.version or _OLDEST
    listed = cache_tensors(model, version=version, parser=parser, original=original)
    nodes = original.graph.node if original is not None else ()
    file_tensors = {name for node in nodes for name in (*node.input, *node.output)}
    matches = _match_entries(list(scales), listed, scales, file_tensors)
    usable = {tensor: scales[name] for name, (tensor, _) in matches.items() if name not in flaws}
    why = {tensor: f"has a {flaws[n]} scale" for n, (tensor, _) in matches.items() if n in flaws}
    pools = {
        t.source: owner for t, owner in zip(listed, scale_owners(listed).values(), strict=True)
    }
    plan, owners, chosen = _plan(model, placement, usable, why, pools, reasons_by_node(float_nodes))
    used = {owners[tensor] for tensor in chosen}
    word = placement.precision_name
    entries = tuple(_entry(name, matches.get(name), flaws.get(name), used, word) for name in scales)
    entries = tuple(
        e if e.tensor else replace(e, reason=_why_unmatched(e.name, model, original))
        for e in entries
    )
    tensors = tuple(_cover(tensor, owners, chosen, why) for tensor in owners)
    return CacheMatch(entries, tensors, plan, chosen)


def _plan(
    model: onnx.ModelProto,
    placement: Placement,
    usable: Mapping[str, np.float32],
    why: Mapping[str, str],
    pools: Mapping[str, str],
    float_nodes: Mapping[str, str],
) -> tuple[Plan, dict[str, str], dict[str, np.float32]]:
    """Return (plan of the covered tensors, tensor -> whose scale it takes, scale of each pair).

    A pool output takes the scale of the pool's input, as in every TensorRT cache. Another moved
    copy of a tensor (Flatten) has its own entry; if that is missing, it takes the tensor's scale.
    """
    full = analyse(model, placement, float_nodes=float_nodes)
    moved_from = {
        pair.tensor: full.scale_owners.get(pair.tensor, pair.tensor) for pair in full.pairs
    }

    def scale_owner(tensor: str) -> str:
        choices = (pools.get(tensor, tensor), tensor, moved_from[tensor])
        return next((name for name in choices if name in usable), tensor)

    owners = {tensor: scale_owner(tensor) for tensor in moved_from}
    missing = {
        tensor: why.get(tensor, "has no entry in the cache")
        for tensor, owner in owners.items()
        if owner not in usable
    }
    missing |= {moved_from[tensor]: why for tensor, why in missing.items()}
    plan = analyse(model, placement, float_nodes=float_nodes, float_tensors=missing)
    plan = replace(plan, scale_owners={})
    return plan, owners, {name: usable[owners[name]] for name in plan.activations}


def _match_entries(
    names: Sequence[str],
    listed: Sequence[CacheTensor],
    scales: Mapping[str, np.float32],
    file_tensors: Collection[str],
) -> dict[str, tuple[str, str]]:
    """Return entry -> (tensor, how it was matched)."""
    sources = {t.name: t.source for t in listed}
    matches: dict[str, tuple[str, str]] = {}
    tensors = {t.source for t in listed}
    for name in names:
        if name in tensors:
            matches[name] = (name, "by name")
        elif name in sources:
            matches[name] = (sources[name], "as TensorRT's parser names it")
    taken = {tensor for tensor, _ in matches.values()}
    for name, key in _match_by_position(names, [t.name for t in listed], file_tensors).items():
        source = sources[key]
        if name not in matches and source not in taken and _pools_agree(name, key, listed, scales):
            matches[name] = (source, "renamed; by its position")
            taken.add(source)
    return matches


def _match_by_position(
    names: Sequence[str], listed: Sequence[str], file_tensors: Collection[str]
) -> dict[str, str]:
    """Match renamed entries: as many entries as tensors lie between two matches by name.

    Nothing is matched where the entries are not in network order (caches from TensorRT 8 on),
    before the first and after the last match, or where an entry has the name of another tensor of
    the file.
    """
    place = {name: index for index, name in enumerate(listed)}
    anchors = [(i, place[name]) for i, name in enumerate(names) if name in place]
    if any(b[1] <= a[1] for a, b in pairwise(anchors)):
        return {}
    renamed: dict[str, str] = {}
    for (i, j), (k, m) in pairwise(anchors):
        between = names[i + 1 : k]
        if k - i == m - j and not any(name in file_tensors for name in between):
            renamed |= dict(zip(between, listed[j + 1 : m], strict=True))
    return renamed


def _pools_agree(
    name: str, tensor: str, listed: Sequence[CacheTensor], scales: Mapping[str, np.float32]
) -> bool:
    """Return False if a pool's scale is not that of its input: then the position is wrong."""
    shares = next((t.shares for t in listed if t.name == tensor), None)
    return shares is None or shares not in scales or scales[shares] == scales[name]


def _entry(
    name: str, matched: tuple[str, str] | None, flaw: str | None, used: Collection[str], word: str
) -> EntryUse:
    if matched is None:
        return EntryUse(name, None, False, "")
    tensor, how = matched
    if flaw is not None:
        return EntryUse(name, tensor, False, f"its scale is {flaw}")
    if tensor not in used:
        reason = f"no pair of its own: no {word} node reads it directly"
        return EntryUse(name, tensor, False, reason)
    return EntryUse(name, tensor, True, how)


def _why_unmatched(name: str, model: onnx.ModelProto, original: onnx.ModelProto | None) -> str:
    """Return why an entry belongs to no activation of the model."""
    if original is not None and any(name in node.output for node in original.graph.node):
        return (
            "in the file, but not after folding (BatchNormalization, constants), or behind a plugin"
        )
    constants = Graph(model).initializers
    if name in constants or name.removesuffix("_output") in constants:
        return "a constant of the model; TensorRT reads its range from its values"
    if name.startswith(("(Unnamed Layer* ", "(Unnamed ITensor* ")):
        if "[Constant]" in name:
            return "a constant that TensorRT's parser made; it is no tensor of the model"
        return "made inside a node by TensorRT's parser; its layer number is not established"
    if name.startswith("ONNXTRT_"):
        return "made inside a node by TensorRT's parser; it is no tensor of the model"
    return "no tensor of the model has this name"


def _cover(
    tensor: str, owners: Mapping[str, str], chosen: Mapping[str, np.float32], why: Mapping[str, str]
) -> TensorCoverage:
    if tensor in chosen:
        owner = owners[tensor]
        return TensorCoverage(tensor, True, "" if owner == tensor else f"with the scale of {owner}")
    return TensorCoverage(
        tensor, False, why.get(tensor, "has no entry in the cache, or its node stays float")
    )
