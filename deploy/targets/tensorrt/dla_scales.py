"""Scales of the tensors that have no Q/DQ pair, from those that have: what DLA's cache must list.

TensorRT runs a layer in int8 on DLA only where all that it reads and makes has a scale. A Q/DQ
model says the scales of its pairs, which stand before a Conv and not behind it; the others follow
from what the operators do, by the table of `deploy.targets.tensorrt.dla`::

    pair on x   x -> Conv -> c -> Relu -> r   pair on r:  c as r (equal), what Relu cuts is cut
    pair on s   c -> Add(s) -> a -> Relu -> r pair on r:  a as r (equal), c = a + s (bound)

The surest rule that applies is taken first, and all that follows from it before the next. What a
Conv or Gemm makes for the end of the model, or for an operator that is not in the table, has none.

NVIDIA's qdq-translator gives a Conv before an Add the scale 1.0, which DLA from 3.13 on reads as
none; the sum here is a range, and means the same to every version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deploy.graph.edit import copied
from deploy.targets.tensorrt.dla import BOUND, EQUAL, GUESS, Known, Range, before, behind
from deploy.targets.tensorrt.naming import trt_tensors

if TYPE_CHECKING:
    import onnx

SURE = {EQUAL: "equal", BOUND: "bound", GUESS: "guess"}
_QMAX = 127


@dataclass(frozen=True, slots=True)
class Inferred:
    """Scales of a model's tensors.

    Attributes:
        scales: tensor -> float32 scale, the pairs' own among them, in the model's order.
        sure: tensor whose scale was inferred -> "equal", "bound" or "guess".
        missing: tensors that nothing gives a scale.
    """

    scales: dict[str, np.float32]
    sure: dict[str, str]
    missing: tuple[str, ...]


def inferred(
    model: onnx.ModelProto, scales: Mapping[str, np.float32], *, guesses: bool = True
) -> Inferred:
    """The scales of all tensors that TensorRT's cache lists, as far as they follow from others.

    Args:
        model: plain float model.
        scales: tensor -> float32 scale of its pair; these stay as they are to the bit.
        guesses: infer scales too that may cut values off.

    Raises:
        ModelError: shapes in the model contradict each other.
    """
    from deploy.frontends.onnx_file import with_shapes

    typed = with_shapes(copied(model))
    known = Known(typed, {name: _QMAX * float(scale) for name, scale in scales.items()})
    _complete(known, (EQUAL, BOUND, GUESS) if guesses else (EQUAL, BOUND))
    wanted = [name for name in trt_tensors(typed) if name not in known.constants]
    found = {n: np.float32(known.at[n][0] / _QMAX) for n in wanted if n in known.at}
    sure = {name: SURE[known.at[name][1]] for name in found if name not in scales}
    missing = tuple(name for name in wanted if name not in found)
    return Inferred({**found, **scales}, sure, missing)


def _complete(known: Known, levels: Iterable[int]) -> None:
    """Apply the rules of each level in turn, until none applies."""
    made = [name for node in known.graph.nodes for name in node.output if name]
    back = [*known.graph.inputs, *made][::-1]
    for level in levels:  # what follows from a bound is one: none goes back a level
        some = True
        while some:
            some = _sweep(known, made, behind, level)
            if not some or level < GUESS:  # of two guesses the second may follow from the first
                some = _sweep(known, back, before, level) or some


def _sweep(
    known: Known,
    names: Iterable[str],
    rule: Callable[[Known, str], Range | None],
    level: int,
) -> bool:
    """Find the ranges that a rule gives at this level, of guesses the first; whether it has."""
    some = False
    for name in names:
        found = None if name in known.at or not known.graph.is_float(name) else rule(known, name)
        if found is not None and found[1] <= level and 0 < found[0] < math.inf:
            known.at[name] = found
            some = True
            if level == GUESS:
                break
    return some
