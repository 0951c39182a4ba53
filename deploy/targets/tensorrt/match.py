"""Which entries of a TensorRT cache fit a model, which of its tensors they cover, and why not.

::

    cache entry --> tensor of the model    by name; by the rule of TensorRT's parser for the
                                           tensors that it names itself; by position, between two
                                           entries that match by name
    tensor      --> Q/DQ pair              where `deploy.graph.plan` puts one for TensorRT

Nothing is dropped silently: each entry is used, or unused with a reason, and each tensor that wants
a pair is covered, or not with a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from deploy.calibration.trt_cache import CalibrationCache
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT, Placement
from deploy.graph.plan import Plan, analyse, reasons
from deploy.targets.tensorrt.naming import CacheTensor, cache_tensors, scale_owners

if TYPE_CHECKING:
    import onnx

_OLDEST = "6.0.1"  # taken for the legacy form, which has no version


@dataclass(frozen=True, slots=True)
class EntryUse:
    """One entry of the cache.

    Attributes:
        name: its key.
        tensor: the model's tensor that it belongs to, or None.
        used: whether a Q/DQ pair takes its scale.
        reason: how it was matched, and why it is not used.
    """

    name: str
    tensor: str | None
    used: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Cover:
    """One tensor that wants a Q/DQ pair: covered, or why not."""

    tensor: str
    covered: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Match:
    """The report, and what the Q/DQ writer needs.

    Attributes:
        entries: every entry of the cache, in its order.
        tensors: every tensor that TensorRT's placement would quantize, in the model's order.
        plan: the placement with what is covered.
        scales: tensor -> scale, for `plan.activations`.
    """

    entries: tuple[EntryUse, ...]
    tensors: tuple[Cover, ...]
    plan: Plan
    scales: Mapping[str, np.float32]

    @property
    def used(self) -> int:
        """How many entries are used."""
        return sum(entry.used for entry in self.entries)

    @property
    def covered(self) -> int:
        """How many tensors are covered."""
        return sum(tensor.covered for tensor in self.tensors)


def match(
    cache: CalibrationCache,
    model: onnx.ModelProto,
    *,
    original: onnx.ModelProto | None = None,
    parser: str | None = None,
    float_nodes: Mapping[str, str] | Iterable[str] = (),
    placement: Placement = TENSORRT,
) -> Match:
    """Hold a cache against a cleaned model.

    Args:
        cache: as TensorRT or calib8 wrote it.
        model: cleaned float model, BatchNormalization folded or not.
        original: the model as TensorRT reads it, for the names its parser gives.
        parser: see `deploy.targets.tensorrt.naming.cache_tensors`.
        float_nodes: nodes to keep in float, as `analyse` takes them.
        placement: where the pairs are to stand: of `deploy.graph.placement.TENSORRT_ON`, or as the
            target's options change it.

    Raises:
        CacheError: one tensor stands in the cache with two scales.
    """
    scales, flaws = cache.scales(), cache.flaws()
    version = cache.header.version or _OLDEST
    listed = cache_tensors(model, version=version, parser=parser, original=original)
    known = _all_tensors(original) if original is not None else set()
    found = _resolve(list(scales), listed, scales, known)
    sound = {tensor: scales[name] for name, (tensor, _) in found.items() if name not in flaws}
    why = {tensor: f"has a {flaws[n]} scale" for n, (tensor, _) in found.items() if n in flaws}
    pools = {
        t.source: owner for t, owner in zip(listed, scale_owners(listed).values(), strict=True)
    }
    plan, wanted, chosen = _plan(model, placement, sound, why, pools, reasons(float_nodes))
    serving = {wanted[tensor] for tensor in chosen}
    word = placement.word
    entries = tuple(
        _entry(name, found.get(name), flaws.get(name), serving, word) for name in scales
    )
    entries = tuple(
        e if e.tensor else replace(e, reason=_stranger(e.name, model, original)) for e in entries
    )
    tensors = tuple(_cover(tensor, wanted, chosen, why) for tensor in wanted)
    return Match(entries, tensors, plan, chosen)


def _plan(
    model: onnx.ModelProto,
    placement: Placement,
    sound: Mapping[str, np.float32],
    why: Mapping[str, str],
    pools: Mapping[str, str],
    float_nodes: Mapping[str, str],
) -> tuple[Plan, dict[str, str], dict[str, np.float32]]:
    """(plan with what is covered, tensor that wants a pair -> whose scale, scale of each pair).

    A pool has the scale of its input, as in every cache of TensorRT. Another moved copy of a tensor
    (Flatten) has an entry of its own; where that is missing, the tensor's serves.
    """
    full = analyse(model, placement, float_nodes=float_nodes)
    owners = {pair.tensor: full.owners.get(pair.tensor, pair.tensor) for pair in full.pairs}

    def source(tensor: str) -> str:
        choices = (pools.get(tensor, tensor), tensor, owners[tensor])
        return next((name for name in choices if name in sound), tensor)

    wanted = {tensor: source(tensor) for tensor in owners}
    missing = {
        tensor: why.get(tensor, "has no entry in the cache")
        for tensor, owner in wanted.items()
        if owner not in sound
    }
    missing |= {owners[tensor]: why for tensor, why in missing.items()}
    plan = analyse(model, placement, float_nodes=float_nodes, float_tensors=missing)
    plan = replace(plan, owners={})
    return plan, wanted, {name: sound[wanted[name]] for name in plan.activations}


def _resolve(
    names: Sequence[str],
    listed: Sequence[CacheTensor],
    scales: Mapping[str, np.float32],
    known: Collection[str],
) -> dict[str, tuple[str, str]]:
    """Entry -> (tensor, how it was matched); `known` are the tensors of the user's file."""
    own = {t.name: t.source for t in listed}
    found: dict[str, tuple[str, str]] = {}
    tensors = {t.source for t in listed}
    for name in names:
        if name in tensors:
            found[name] = (name, "by name")
        elif name in own:
            found[name] = (own[name], "as TensorRT's parser names it")
    taken = {tensor for tensor, _ in found.values()}
    for name, tensor in _by_position(names, [t.name for t in listed], known).items():
        source = own[tensor]
        if name not in found and source not in taken and _pools_agree(name, tensor, listed, scales):
            found[name] = (source, "renamed; by its position")
            taken.add(source)
    return found


def _by_position(
    names: Sequence[str], listed: Sequence[str], known: Collection[str]
) -> dict[str, str]:
    """Renamed entries: between two neighbours that match by name, both sides must be as many.

    Nothing is concluded where the entries are not in the network's order, as in caches from
    TensorRT 8 on; before the first and after the last match; or where one of the names is that of
    another tensor in the file.
    """
    place = {name: index for index, name in enumerate(listed)}
    anchors = [(i, place[name]) for i, name in enumerate(names) if name in place]
    if any(b[1] <= a[1] for a, b in pairwise(anchors)):
        return {}
    renamed: dict[str, str] = {}
    for (i, j), (k, m) in pairwise(anchors):
        between = names[i + 1 : k]
        if k - i == m - j and not any(name in known for name in between):
            renamed |= dict(zip(between, listed[j + 1 : m], strict=True))
    return renamed


def _all_tensors(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node for name in [*node.input, *node.output]}


def _pools_agree(
    name: str, tensor: str, listed: Sequence[CacheTensor], scales: Mapping[str, np.float32]
) -> bool:
    """A pool's entry must equal its input's; where it does not, the position is wrong."""
    shares = next((t.shares for t in listed if t.name == tensor), None)
    return shares is None or shares not in scales or scales[shares] == scales[name]


def _entry(
    name: str,
    found: tuple[str, str] | None,
    flaw: str | None,
    serving: Collection[str],
    word: str,
) -> EntryUse:
    if found is None:
        return EntryUse(name, None, False, "")
    tensor, how = found
    if flaw is not None:
        return EntryUse(name, tensor, False, f"its scale is {flaw}")
    if tensor not in serving:
        reason = f"no pair of its own: no {word} node reads it directly"
        return EntryUse(name, tensor, False, reason)
    return EntryUse(name, tensor, True, how)


def _stranger(name: str, model: onnx.ModelProto, original: onnx.ModelProto | None) -> str:
    """Why an entry belongs to no activation of the model."""
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
    tensor: str,
    wanted: Mapping[str, str],
    chosen: Mapping[str, np.float32],
    why: Mapping[str, str],
) -> Cover:
    if tensor in chosen:
        source = wanted[tensor]
        return Cover(tensor, True, "" if source == tensor else f"with the scale of {source}")
    return Cover(
        tensor, False, why.get(tensor, "has no entry in the cache, or its node stays float")
    )
