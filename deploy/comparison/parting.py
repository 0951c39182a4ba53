"""Where two models part, as a value, and its text and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.metrics.output_errors import OutputAccuracy
from deploy.terminal import page


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One tensor in both models.

    Attributes:
        node: name of the node of the first model that makes it; its operator beside it.
        figures: how far the second model's tensor is from the first one's.
    """

    tensor: str
    node: str
    operator: str
    figures: OutputAccuracy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Parting:
    """What `compare` found; `repr` is the text for a screen.

    Attributes:
        first, second: "file in runtime" of the two sides.
        samples: how many were run.
        min_sqnr_db: tensors below it have parted.
        layers: inner tensors that both have, in the first model's order.
        outputs: its outputs, likewise.
        cut: whether each tensor was computed by a model cut off behind it.
        looked: tensors that were compared, of how many that both have.
        notes: how the images were read, and what could not be compared, in sentences.
    """

    first: str
    second: str
    samples: int
    min_sqnr_db: float
    layers: tuple[Layer, ...]
    outputs: tuple[Layer, ...]
    cut: bool
    looked: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def parts_at(self) -> Layer | None:
        """The first tensor below the limit; NaN, Inf and another shape are below any."""
        every = (*self.layers, *self.outputs)
        return next((one for one in every if not one.figures.sqnr_db >= self.min_sqnr_db), None)

    def __repr__(self) -> str:
        return page(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.first} against {self.second}, {self.samples} samples"
        if self.cut:
            looked, of = self.looked
            yield f"each tensor by a model cut off behind it; {looked} of {of} were looked at"
        yield ""
        yield f"{'SQNR dB':>8}  {'cosine':>8}  tensor"
        for one in self.layers:
            yield _line(one)
        yield "outputs"
        for one in self.outputs:
            yield _line(one)
        yield ""
        yield self.says
        yield from self.notes

    @property
    def says(self) -> str:
        """Where they part, in one sentence."""
        found = self.parts_at
        if found is None:
            return f"They do not part: no tensor is below {self.min_sqnr_db:g} dB."
        return (
            f"They part at {found.tensor!r}, made by {found.operator} {found.node!r}:"
            f" {found.figures.sqnr_db:.1f} dB, the first below {self.min_sqnr_db:g} dB."
        )

    def to_json(self) -> dict[str, object]:
        """Plain JSON types; numbers JSON has no word for become "inf" or "nan"."""
        found = self.parts_at
        return {
            "first": self.first,
            "second": self.second,
            "samples": self.samples,
            "min_sqnr_db": self.min_sqnr_db,
            "cut": self.cut,
            "looked": list(self.looked),
            "parts_at": None if found is None else found.tensor,
            "layers": [_json(one) for one in self.layers],
            "outputs": [_json(one) for one in self.outputs],
            "notes": list(self.notes),
        }


def _line(one: Layer) -> str:
    figures = one.figures
    return (
        f"{figures.sqnr_db:8.1f}  {figures.cosine_mean:8.5f}  {one.tensor}"
        f"  ({one.operator} {one.node})"
    )


def _json(one: Layer) -> dict[str, object]:
    figures = one.figures
    return {
        "tensor": one.tensor,
        "node": one.node,
        "operator": one.operator,
        "sqnr_db": _number(figures.sqnr_db),
        "cosine_mean": _number(figures.cosine_mean),
        "cosine_min": _number(figures.cosine_min),
        "max_abs_error": _number(figures.max_abs_error),
        "not_finite": list(figures.not_finite),
        "other_shape": figures.other_shape,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
