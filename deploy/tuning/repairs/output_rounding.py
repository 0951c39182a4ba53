"""Weight rounding by output error, layer by layer (see `calibrators.rounding`).

The inputs are those of the float model on a few samples. A weight that goes the other way than to
its nearest becomes the float value of that integer, so that every target's own rounding gives it;
the others stay as they are, the extremes that give the scale among them, so the scales do too.

Other samples judge it, each channel of each layer by what it gives wrong there::

    samples      o   o   o   o      round the weights
    apart          x       x        |(q - w) x|^2 < |(nearest - w) x|^2 ?  keep q, else nearest

The whole model's outputs on as few samples would judge by chance: a quarter less noise of all
weights is less than what they differ by from one handful of samples to the next.

No layer's rounding depends on what else is in int8. So the search for what stays float knows all
of them beforehand: it tries models of rounded weights, in which a layer in float has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.grids import INT8, Grid, rounded
from calibrators.rounding import gram, products_of, rounded_by_output
from calibrators.weights import in_tight_pairs, is_depthwise
from deploy.graph.edit import update
from deploy.graph.index import wide_for, with_zeros
from deploy.method import NO_CHOICES
from deploy.tuning.repairs.base import Making, with_model
from deploy.tuning.repairs.repair_layers import (
    FloatArray,
    Layer,
    all_written,
    layers_of,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import inputs_of

if TYPE_CHECKING:
    import onnx

    from deploy.targets.base import BuildRequest

_PATCHES = 1024  # of a layer's input, over all samples
_SWEEPS = 2  # further ones move a weight in a hundred
_WIDEST = 1200  # values of a patch whose products are taken together; more in portions


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A layer's weight, rounded.

    Attributes:
        weight: float32 in ONNX layout, what moved lying on its integers.
        left: squared error of the layer's output, of that with the weight rounded to nearest, on
            samples that did not round it; 1 where nothing moved, NaN where there are none.
    """

    weight: FloatArray
    left: float


def round_weights(request: BuildRequest, making: Making) -> tuple[BuildRequest, str] | None:
    """The request with weights that round to what the outputs want, and what that gives, in words.

    None where nothing moves in a layer that is in int8.
    """
    every = rounded_weights(request, making)
    written = all_written(making.target.trial(request), _owned(request.model))
    names = [one.weight for one, _ in written.values() if one.weight in every]
    kept = {name: every[name] for name in names if every[name].left != 1}
    if not kept:
        return None
    model = with_constants(request.model, {name: one.weight for name, one in kept.items()})
    return with_model(request, model), _told([one.left for one in kept.values()])


def _told(left: Sequence[float]) -> str:
    """What is left of the layers' squared errors, in words."""
    layers = "1 layer gives" if len(left) == 1 else f"{len(left)} layers give"
    if not np.isfinite(left).all():
        return f"{layers} less error on the samples that round them"
    mean = float(np.exp(np.log(np.maximum(left, 1e-12)).mean()))
    return f"{layers} {mean:.2f} times the squared error on other samples"


def trials_rounded(
    request: BuildRequest, making: Making
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """What makes the trial models of choices, with rounded weights unless they say no."""
    target = making.target
    arrays = {name: one.weight for name, one in rounded_weights(request, making).items()}
    layers = tuple(one for one in _owned(request.model) if one.weight in arrays)
    rounded = with_model(request, with_constants(request.model, arrays))
    own = {t.name: t for t in request.model.graph.initializer if t.name in arrays}

    def trial(chosen: BuildRequest) -> onnx.ModelProto:
        if chosen.choices.rounded is False:
            return target.trial(chosen)
        subject = replace(chosen.subject, loaded=rounded.subject.loaded)
        made = target.trial(replace(chosen, subject=subject))
        _give_back(made, layers, own)
        return made

    return trial


def _give_back(
    made: onnx.ModelProto, layers: Sequence[Layer], own: Mapping[str, onnx.TensorProto]
) -> None:
    """Their own weights to layers that are in float, in place."""
    there = {tensor.name: tensor.dims for tensor in made.graph.initializer}
    kept = [(one, name) for one in layers if (name := _held_as(one, there)) is not None]
    written = all_written(made, tuple(one for one, _ in kept)) if kept else {}
    back = {name: own[one.weight] for one, name in kept if one.name not in written}
    for name, tensor in back.items():
        if name != tensor.name:
            wide = with_zeros(numpy_helper.to_array(tensor), there[name])
            back[name] = numpy_helper.from_array(wide, name)
    update(made.graph.initializer, back)


def _held_as(layer: Layer, there: Collection[str]) -> str | None:
    """What a layer's float weight is called in a model that has some constants."""
    names = (layer.weight, wide_for(layer.weight, layer.name))
    return next((name for name in names if name in there), None)


def rounded_weights(request: BuildRequest, making: Making) -> Mapping[str, Rounded]:
    """Weights of every layer that could be in int8, by initializer; found once for all choices."""

    def made() -> tuple[onnx.ModelProto, Mapping[str, Rounded]]:
        return request.model, _rounded(request.choosing(NO_CHOICES), making)

    key = "rounded", making.target.name, id(request.model)  # kept with the model of this id
    return request.ranges.once(key, made)[1]


def _rounded(request: BuildRequest, making: Making) -> dict[str, Rounded]:
    written = all_written(making.target.trial(request), _owned(request.model))
    count, fits = len(making.samples), making.target.plan(request.model).placement.fits_pairs
    found = {}
    for layer, parts in inputs_of(
        making.reference,
        [layer for layer, how in written.values() if how.nearest],
        [*making.samples, *making.apart],
        most=_PATCHES * (count + len(making.apart)) // count,
        threads=making.threads,
    ):
        how, own = written[layer.name][1], np.concatenate(parts[:count], axis=2)
        apart = np.concatenate(parts[count:], axis=2) if parts[count:] else None
        found[layer.weight] = rounded_weight(
            layer, how.weight, own, how.grid, apart=apart, fits_pairs=fits
        )
        making.progress()
    return found


def _owned(model: onnx.ModelProto) -> tuple[Layer, ...]:
    """The layers whose weight no other node reads."""
    return tuple(layer for layer in layers_of(model) if layer.alone)


def rounded_weight(
    layer: Layer,
    scales: NDArray[np.float64],
    inputs: FloatArray,
    grid: Grid = INT8,
    *,
    apart: FloatArray | None = None,
    fits_pairs: bool = False,
) -> Rounded:
    """The layer's weight with some values moved onto the stored value on their other side.

    Args:
        layer: in the float model.
        scales: of its weight, that broadcast over it.
        inputs: patches [groups, K, P].
        grid: that stores the weight.
        apart: other patches, by which a channel that errs no less on them stays as it was.
        fits_pairs: whether pairs of the stored weight fit 16 bits, and are to go on fitting.
    """
    weight = layer.array.astype(np.float64)
    own = _rows(layer, np.broadcast_to(scales, weight.shape))
    steps = _rows(layer, weight / scales)
    fixed = np.abs(steps) >= np.abs(steps).max(axis=2, keepdims=True)
    if scales.size == 1:
        fixed = np.abs(steps) >= np.abs(steps).max()
    if fits_pairs:
        fixed |= _tight(layer, steps)
    nearest = rounded(steps, grid)
    integers = nearest.copy()
    for start in range(0, steps.shape[2], _WIDEST):
        part = slice(start, start + _WIDEST)
        products = gram(inputs[:, part])
        if not np.isfinite(products).all():  # float32 cannot square such inputs: to nearest
            continue
        integers[:, :, part] = rounded_by_output(
            steps[:, :, part],
            products,
            fixed=fixed[:, :, part],
            sweeps=_SWEEPS,
            grid=grid,
        )
    left = math.nan if (integers != nearest).any() else 1.0
    if apart is not None:
        left = _judged(steps, nearest, integers, own, apart)
    plain = _rows(layer, weight)
    moved = np.where(integers != nearest, np.clip(integers * own, *_ends(plain)), plain)
    return Rounded(layer.from_channels(moved.reshape(layer.by_channel.shape)), left)


def _tight(layer: Layer, steps: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Weights that keep their nearest, so that pairs fit and the scale stays: as `steps`."""
    groups, out, into, places = layer.by_channel.shape
    if is_depthwise(groups, groups * out, into):
        return np.zeros(steps.shape, np.bool_)
    return in_tight_pairs(steps.reshape(groups * out, into, places)).reshape(steps.shape)


def _judged(
    steps: NDArray[np.floating],
    nearest: NDArray[np.floating],
    integers: NDArray[np.floating],
    scales: NDArray[np.floating],
    apart: FloatArray,
) -> float:
    """Take back, in place, the rows that err no less than to nearest; the error that is left."""
    before, after = (
        np.square(products_of((q - steps) * scales, apart)).sum(axis=2) for q in (nearest, integers)
    )
    worse = after >= before
    integers[worse] = nearest[worse]
    whole = float(before.sum())
    return float(np.where(worse, before, after).sum()) / whole if whole > 0 else 1.0


def _ends(plain: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest that a value of each channel may become, [..., 1].

    None may pass the one that gives the scale, nor reach it on the other side, since the sign of
    the extreme decides AMCT's scale too.
    """
    end = np.abs(plain).max(axis=2, keepdims=True)
    below = np.nextafter(end.astype(np.float32), np.float32(0)).astype(np.float64)
    low = np.where(plain.min(axis=2, keepdims=True) == -end, end, below)
    return -low, np.where(plain.max(axis=2, keepdims=True) == end, end, below)


def _rows(layer: Layer, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """A weight in ONNX layout -> [groups, C_out of a group, K], as the patches have it."""
    return np.asarray(replace(layer, array=np.asarray(weight)).rows, np.float64)
