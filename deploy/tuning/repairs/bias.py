"""Bias correction: what int8 adds to a channel on average is taken out of its bias.

Rounded weights and clipped inputs move the mean of a channel, and the next layers add up such
moves. The mean over a few samples of float minus int8 goes into the bias, in two steps::

    1. every layer by itself: its float input x, and what is left of it on its grid,
           b + mean(W x) - mean(W' x')
       which holds for all layers at once, since the layers before it are corrected too
    2. the last layers, behind which there is no other, by what the int8 model itself gives there

Measured in the int8 model for many layers at once, each would correct what the layers before it
are correcting already; one after the other it would cost an int8 model a layer. Where the samples
do not agree on a mean it is not trusted: it is shrunk by m^2 / (m^2 + variance / n).

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2 (equation 16 and 17), and appendix D for correction on data.

A search for each tensor by output error instead of the tensor's own.

Of the ranges that the searches find in one histogram, the one with which its readers err least. A
range that loses little of a tensor may lose what its reader weighs most: the reader's output is
compared for patches of its input on a few samples, |W (x - x')|^2 with x' being x on the grid. The
searches cost no inference, since all of them read what was observed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrators.grids import FP8, GRIDS, Grid, fake_quantize
from calibrators.rounding import products_of
from calibrators.scales import Scale
from calibrators.weights import trusted_mean
from deploy.graph.index import Graph
from deploy.graph.placement import keeps_range
from deploy.method import Choices, Method, comparable
from deploy.targets.onnxruntime.conv_rewrites import TILES
from deploy.tensors import Array
from deploy.tuning.repairs.base import Making, with_model
from deploy.tuning.repairs.repair_layers import Layer, all_written, layers_of, with_biases
from deploy.tuning.repairs.sample_runs import inputs_of, tapped

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest


_PATCHES = 1024  # of a layer's input, over all samples

Means = dict[str, NDArray[np.float64]]  # layer -> [samples, C_out]


def correct_biases(request: BuildRequest, making: Making) -> Iterator[BuildRequest]:
    """The request after the first step, and after both; none where no int8 layer takes a bias."""
    alone = _each_alone(request, making)
    if alone is not None:
        yield alone
        yield _last_ones(alone, making)


def _each_alone(request: BuildRequest, making: Making) -> BuildRequest | None:
    """Every int8 layer corrected for what its own rounding and its input's do."""
    held = tuple(one for one in layers_of(request.model) if one.kind != "MatMul" or one.add)
    plain = {layer.name: layer for layer in layers_of(making.reference)}
    written = all_written(making.target.trial(request), held)
    layers = [layer for layer, how in written.values() if how.nearest]
    graph, biases = Graph(request.model), []
    for layer, parts in inputs_of(
        making.reference, layers, making.samples, most=_PATCHES, threads=making.threads
    ):
        how = written[layer.name][1]
        wanted = _made(plain[layer.name].rows, parts)
        found = _made(_rows(layer, how.weights(layer)), [how.inputs(part) for part in parts])
        change = trusted_mean(wanted - found)
        biases.append((layer, layer.bias_of(graph) + change))
    return with_model(request, with_biases(request.model, biases)) if biases else None


def _rows(layer: Layer, weight: NDArray[np.float64]) -> NDArray[Any]:
    return replace(layer, array=np.asarray(weight, np.float32)).rows


def _made(rows: NDArray[Any], parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """What rows [G, C, K] make on average of patches [G, K, P] of each sample: [samples, G C]."""
    some = [part for part in parts if part.shape[2]]
    means = np.stack([part.mean(axis=2, dtype=np.float64) for part in some])
    made = (np.asarray(rows, np.float64) * means[:, :, None, :]).sum(axis=3)
    return np.asarray(made.reshape(len(some), -1), np.float64)


def _last_ones(request: BuildRequest, making: Making) -> BuildRequest:
    """The layers behind which there is no other, corrected by what the int8 model gives."""
    layers = _ends(request.model)
    if not layers:
        return request
    wanted = _means(making.reference, layers, making)
    found = _means(making.target.trial(request), layers, making)
    graph, biases = Graph(request.model), []
    for layer in layers:
        change = trusted_mean(wanted[layer.name] - found[layer.name])
        biases.append((layer, layer.bias_of(graph) + change))
    return with_model(request, with_biases(request.model, biases))


def _ends(model: onnx.ModelProto) -> list[Layer]:
    """The layers with a place for a bias from which no other layer is reached."""
    layers = {layer.name: layer for layer in layers_of(model)}
    graph = Graph(model)
    leads: set[str] = set()  # tensors that a layer reads, or that lead to one
    for node in reversed(graph.nodes):
        if node.name in layers or leads.intersection(node.output):
            leads.update(node.input)
    return [
        layer
        for layer in layers.values()
        if layer.output not in leads and (layer.kind != "MatMul" or layer.add)
    ]


def _means(model: onnx.ModelProto, layers: Sequence[Layer], making: Making) -> Means:
    """The mean of each sample's channels, of what each layer makes before it is quantized."""
    made = {name for node in model.graph.node for name in node.output}
    tensors = {layer.name: _before_it_is_quantized(layer.output, made) for layer in layers}
    known = {tensors[layer.name]: layer for layer in layers}

    def take(_: int, name: str, value: Array) -> NDArray[np.float64]:
        means = _channel_means(value, known[name].out_axis)
        pixels = means.reshape(len(means), -1, known[name].outputs)  # of a tile, where it has some
        return np.asarray(pixels.mean(axis=1), np.float64)

    runs = tapped(model, tensors.values(), making.samples, take, threads=making.threads)
    return {
        layer: np.concatenate([run[tensor] for run in runs]) for layer, tensor in tensors.items()
    }


def _before_it_is_quantized(output: str, made: Collection[str]) -> str:
    """What a float or int8 model calls what a layer makes."""
    names = (f"{output}{behind}" for behind in (f"/float{TILES}", TILES, "/float"))
    return next((name for name in names if name in made), output)


def _channel_means(value: Array, axis: int) -> NDArray[np.float64]:
    """[N, C, ...] (or channels on the last axis) -> [N, C]; one row without a batch axis."""
    by_channel = np.moveaxis(value, axis, -1) if value.ndim > 1 else value.reshape(1, -1)
    rows = by_channel.reshape(len(by_channel), -1, by_channel.shape[-1])
    return np.asarray(rows.mean(axis=1, dtype=np.float64))


_CLIPS = "entropy"  # seldom the best of a whole model, but of a tensor whose extremes are not read
_MOVES = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool", "Resize", "Split"}
)
_LESS = 0.95  # of the error with the search that is there: below it another one takes its place
_RANGE_PATCHES = 512  # of a layer's input, on which the searches are compared


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
        making.reference, layers, making.samples, most=_RANGE_PATCHES, threads=making.threads
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
