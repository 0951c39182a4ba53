"""A search for each tensor by output error instead of the tensor's own.

Of the ranges that the searches find in one histogram, the one with which its readers err least. A
range that loses little of a tensor may lose what its reader weighs most: the reader's output is
compared for patches of its input on a few samples, |W (x - x')|^2 with x' being x on the grid. The
searches cost no inference, since all of them read what was observed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import FP8, GRIDS, Grid, fake_quantize
from calibrators.rounding import products_of
from calibrators.scales import Scale
from deploy.calibration.choices import Choices
from deploy.graph.flow import keeps_range
from deploy.graph.index import Graph
from deploy.method import Method, comparable
from deploy.repairs.patches import inputs_of
from deploy.tuning.repairs.base import Making
from deploy.tuning.repairs.repair_layers import Layer, layers_of

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest

_CLIPS = "entropy"  # seldom the best of a whole model, but of a tensor whose extremes are not read
_MOVES = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool", "Resize", "Split"}
)
_LESS = 0.95  # of the error with the search that is there: below it another one takes its place
_PATCHES = 512  # of a layer's input, on which the searches are compared


def choose_ranges(request: BuildRequest, making: Making) -> Iterator[BuildRequest]:
    """The request with a search of its own for some tensors.

    None where the target does not search by the method, or nothing would change.
    """
    subject, now = request.subject, request.choices
    usual = now.method or subject.method
    others = [*comparable(Method.of()), Method.of(_CLIPS)]
    known = {method.label: method for method in (*others, usual)}
    if usual.name not in {other.name for other in others} or request.ranges.trusted is not None:
        return
    observations = {
        o.tensor: o for o in making.target.demand(subject) if o.statistic == subject.statistic
    }
    readers = _readers(request, making, observations)
    read = [observations[tensor] for tensor in dict.fromkeys(one for _, one, _ in readers)]
    fp8 = any(grid == FP8 for _, _, grid in readers)
    grid = FP8 if fp8 else None
    ranges = {
        name: request.ranges.choosing(Choices(method=method)).of(read, symmetric=grid).scales
        for name, method in known.items()
        if not (fp8 and method.integer)
    }
    errors = _errors(making, readers, ranges)
    chosen = {}
    for tensor, by_name in errors.items():
        there = now.methods.get(tensor, usual)
        best = min(by_name, key=by_name.__getitem__)
        if by_name[best] < _LESS * by_name.get(there.label, np.inf):
            chosen[tensor] = known[best]
    if chosen:
        yield request.choosing(replace(now, methods={**now.methods, **chosen}))


def _readers(
    request: BuildRequest, making: Making, observed: Collection[str]
) -> list[tuple[Layer, str, Grid]]:
    """The int8 layers with the tensor whose range their input has, and its grid."""
    graph = Graph(request.model)
    decisions = making.target.plan(request.model, request.float_nodes).decisions
    grids = {d.node: GRIDS[d.precision] for d in decisions if d.quantized}
    return [
        (layer, root, grids[layer.name])
        for layer in layers_of(request.model)
        if layer.name in grids and (root := _root(graph, layer.input)) in observed
    ]


def _errors(
    making: Making,
    readers: Sequence[tuple[Layer, str, Grid]],
    ranges: Mapping[str, Mapping[str, Scale]],
) -> dict[str, dict[str, float]]:
    """Tensor -> search -> error of what its readers make."""
    known = {layer.name: (root, grid) for layer, root, grid in readers}
    layers = [layer for layer, _, _ in readers]
    errors: dict[str, dict[str, float]] = {}
    for layer, parts in inputs_of(
        making.reference, layers, making.samples, most=_PATCHES, threads=making.threads
    ):
        root, grid = known[layer.name]
        x = np.concatenate(parts, axis=2)
        own = errors.setdefault(root, {})
        for name, scales in ranges.items():
            if root in scales:
                own[name] = own.get(name, 0.0) + output_error(layer, x, scales[root], grid)
    return {root: own for root, own in errors.items() if own}


def _root(graph: Graph, tensor: str) -> str:
    """The tensor whose range a layer's input has, behind nodes that only move values."""
    while (maker := graph.producer.get(tensor)) is not None and (
        maker.op_type in _MOVES and keeps_range(graph, maker)
    ):
        tensor = str(maker.input[0])
    return tensor


def output_error(layer: Layer, inputs: NDArray[np.float32], scale: Scale, grid: Grid) -> float:
    """Mean square of what a layer gives wrong, of its mean square: inputs [groups, K, P].

    The inputs lie on the range's grid, the weights are float.
    """
    step, zero = scale.on(grid)
    if not step > 0:
        return float("inf")
    rows = np.asarray(layer.rows, np.float32)
    wrong = products_of(rows, fake_quantize(inputs, step, zero, grid) - inputs)
    right = products_of(rows, inputs)
    power = float((right * right).sum())
    return float((wrong * wrong).sum()) / power if power > 0 else 0.0
