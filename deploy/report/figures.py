"""Numbers as people read them; "-" where there is none, "failed" where a target failed.

What an engine really runs, beside what was planned of it.

::

    plan      /a/Conv int8     /a/Relu int8    /b/Add int8     /c/MaxPool float32
    engine    [ /a/Conv + /a/Relu: int8 ]      [ float16 ]     [ int8 ]
                      as planned                  lost           gained
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.metrics.kernels import RanLayer

if TYPE_CHECKING:
    from deploy.graph.plan import Decision


NONE = "-"
FAILED = "failed"


def milliseconds(value: float | None) -> str:
    """Three significant digits at least: 0.123 ms, 12.3 ms, 1234 ms."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g} ms"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f} ms"


def size(value: int | None) -> str:
    """Bytes in binary units: 223 KiB."""
    if value is None:
        return NONE
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def decibels(value: float | None) -> str:
    """One decimal; "exact" for no noise at all, "NaN" where it could not be told."""
    if value is None:
        return NONE
    if value == math.inf:
        return "exact"
    return "NaN" if math.isnan(value) else f"{value:.1f} dB"


def cosine(value: float | None) -> str:
    """Five decimals, since good engines differ in the fourth."""
    if value is None:
        return NONE
    return "NaN" if math.isnan(value) else f"{value:.5f}"


def percent(value: float | None) -> str:
    """A share of 0 to 1 as percent, two decimals."""
    return NONE if value is None else f"{100 * value:.2f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.2f} points"


def rate(value: float | None) -> str:
    """Inferences a second."""
    return NONE if value is None else f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"


def real(value: float) -> str:
    """A value of a tensor, four significant digits."""
    return f"{value:.4g}"


def ratio(value: float) -> str:
    """A factor: 2.13x."""
    return f"{value:.2f}x"


def sized(smaller: float) -> tuple[str, str]:
    """2.00x, "smaller"; or where a file grew, by how much it is larger; nothing for the same."""
    if ratio(smaller) == ratio(1):
        return "", ""
    return (ratio(smaller), "smaller") if smaller > 1 else (ratio(1 / smaller), "larger")


def count(number: int, noun: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def encodable(text: str) -> str:
    """Text that UTF-8 can hold: a file name of other bytes reaches Python as lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def least(values: Iterable[float]) -> float:
    """The least of several, NaN where any is NaN (which `min` would lose by its order)."""
    found = tuple(values)
    return math.nan if any(map(math.isnan, found)) else min(found, default=math.nan)


RAN_HEADS = ("node", "operator", "planned in", "runs in")
_GRIDS = ("int8", "uint8", "fp8")  # types of a layer that count as quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRan:
    """A node that runs otherwise than planned: its operator and both types."""

    node: str
    op: str
    planned: str
    ran: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanPart:
    """What an engine runs, as its runtime tells.

    Attributes:
        layers: how many compute something, of several nodes each.
        precisions: type -> how many of them compute in it.
        reformats: how many more only change type or layout.
        planned: nodes that were planned on a grid; None where there is no plan.
        grid: what they were to run in.
        unnamed: those of them that no layer names, being fused into another or gone.
        lost: those of them that run in float.
        gained: nodes that were to stay float and do not.
    """

    layers: int
    precisions: Mapping[str, int] = field(default_factory=dict)
    reformats: int = 0
    planned: int | None = None
    grid: str | None = None
    unnamed: tuple[str, ...] = ()
    lost: tuple[NodeRan, ...] = ()
    gained: tuple[NodeRan, ...] = ()

    @property
    def otherwise(self) -> list[list[str]]:
        """Every node that runs otherwise than planned, under `RAN_HEADS`."""
        return [[r.node, r.op, r.planned, r.ran] for r in (*self.lost, *self.gained)]

    @property
    def as_planned(self) -> int:
        """Planned nodes that run on a grid."""
        return (self.planned or 0) - len(self.unnamed) - len(self.lost)


def ran_part(layers: Sequence[RanLayer], plan: Iterable[Decision] = ()) -> RanPart | None:
    """An engine's layers beside the plan of the model it was built from; None of no layers."""
    if not layers:
        return None
    work = [layer for layer in layers if not layer.reformat]
    found = _by_node(work)
    decided = list(plan)
    meant = [d for d in decided if d.quantized]
    rows = [NodeRan(node=d.node, op=d.op_type, planned=d.precision, ran=found[d.node])
            for d in decided if d.node in found]  # fmt: skip
    on_grid = {d.node for d in meant}
    return RanPart(
        layers=len(work),
        precisions=dict(Counter(layer.precision for layer in work if layer.precision)),
        reformats=len(layers) - len(work),
        planned=len(meant) if decided else None,
        grid=" or ".join(sorted({d.precision for d in meant})) or None,
        unnamed=tuple(d.node for d in meant if d.node not in found),
        lost=tuple(r for r in rows if r.node in on_grid and r.ran not in _GRIDS),
        gained=tuple(r for r in rows if r.node not in on_grid and r.ran in _GRIDS),
    )


def _by_node(layers: Iterable[RanLayer]) -> dict[str, str]:
    """Node -> the type it runs in; one that several layers share is quantized where one is."""
    found: dict[str, str] = {}
    for layer in layers:
        for node in layer.nodes if layer.precision else ():
            if found.get(node) not in _GRIDS:
                found[node] = layer.precision
    return found


def quantized_layers(part: RanPart) -> str:
    """How many layers run on a grid: "12 of 31"."""
    return f"{sum(part.precisions.get(grid, 0) for grid in _GRIDS)} of {part.layers}"


def ran_words(part: RanPart) -> str:
    """The plan beside the engine, in one line; "" where there is no plan."""
    if not part.planned:
        return ""
    said = [f"{part.as_planned} of {count(part.planned, 'planned node')} in {part.grid}"]
    if part.unnamed:
        said.append(f"{len(part.unnamed)} that no layer names")
    if part.gained:
        said.append(f"{len(part.gained)} more that the plan left in float")
    return f"{', '.join(said)}; {count(part.reformats, 'reformat')}"


def lost_groups(part: RanPart) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(type, operator, nodes) of what was planned on a grid and runs in float."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in part.lost:
        groups.setdefault((row.ran, row.op), []).append(row.node)
    for (ran, op), nodes in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        yield ran, op, tuple(nodes)
