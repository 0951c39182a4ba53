"""Nodes that stay float, by operator and reason: what costs most first, sums of shapes last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.report.parts import TargetPart
from deploy.tuning.reasons import NOISE, TIME, kind, remaining

_ON_SHAPES = frozenset(("Shape", "Size", "Gather", "Unsqueeze", "Squeeze", "Cast", "Range",
                        "Expand", "Constant", "ConstantOfShape"))  # fmt: skip
_NO_FLOAT = " is not float32"  # of a tensor that the reason names
_ANY_NO_FLOAT = f"a tensor of it{_NO_FLOAT}"


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """Float nodes that share an operator and a reason, on one target or on several.

    Attributes:
        op: the operator.
        precision: which float.
        reason: why they are not quantized.
        nodes: target -> the names of its nodes.
    """

    op: str
    precision: str
    reason: str
    nodes: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes of all targets, each once."""
        return tuple(dict.fromkeys(name for names in self.nodes.values() for name in names))

    @property
    def places(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """(nodes, targets): targets that keep the same nodes float stand together."""
        found: dict[tuple[str, ...], list[str]] = {}
        for target, names in self.nodes.items():
            found.setdefault(names, []).append(target)
        return tuple((names, tuple(targets)) for names, targets in found.items())


def float_groups(targets: Sequence[TargetPart]) -> tuple[FloatGroup, ...]:
    """Float nodes of all targets by operator and reason.

    First those that would lose most in int8, then those that are slower in it, then the largest
    groups; what reckons with shapes comes last.
    """
    groups: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for target in targets:
        for node in target.nodes:
            if not node.quantized:
                reason = _ANY_NO_FLOAT if node.reason.endswith(_NO_FLOAT) else node.reason
                places = groups.setdefault((node.op, node.precision, reason), {})
                places.setdefault(target.name, []).append(node.name)
    found = [
        FloatGroup(*key, {target: tuple(names) for target, names in places.items()})
        for key, places in groups.items()
    ]
    return tuple(sorted(found, key=_rank))


def _rank(group: FloatGroup) -> tuple[int, float, bool, int]:
    why = kind(group.reason)
    trivial = group.op in _ON_SHAPES or group.reason == _ANY_NO_FLOAT
    order = 0 if why == NOISE else 1 if why == TIME else 2
    return order, remaining(group.reason), trivial, -len(group.names)
