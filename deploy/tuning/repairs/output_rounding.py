"""Weight rounding by output error, layer by layer (see `calibrators.rounding`).

The inputs are those of the float model on a few samples. A weight that is not rounded to nearest is
replaced by the float value of its integer, so that every target rounds it to that. The other
weights stay as they are, among them the extremes that set the scale, so the scales stay too.

Held-out samples accept or reject the rounding of each channel by its output error::

    samples      o   o   o   o      round the weights
    apart          x       x        |(q - w) x|^2 < |(nearest - w) x|^2 ?  keep q, else nearest

The model's own outputs on so few samples could not tell: all the weights together give a quarter
less noise, and the noise varies more than that from one handful of samples to the next.

The rounding of a layer does not depend on which other layers are in int8. So the search for float
layers rounds all of them once, and in its trial models a float layer gets its own weight back.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.grids import INT8, Grid, round_to_grid
from calibrators.rounding import block_products, gram, round_by_output
from calibrators.weights import is_depthwise, tight_pair_mask
from deploy.graph.edit import update_tensors
from deploy.graph.index import pad_with_zeros, padded_name
from deploy.method import NO_CHOICES
from deploy.targets.base import BuildRequest
from deploy.tuning.repairs.base import RepairInput, with_model
from deploy.tuning.repairs.repair_layers import (
    FloatArray,
    WeightedLayer,
    find_weighted_layers,
    read_all_quantizations,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import layer_patches

_PATCHES = 1024  # input patches of a layer, over all samples
_SWEEPS = 2  # a third one changes one weight in a hundred
_WIDEST = 1200  # values of a patch in one Gram matrix; wider ones are split


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A layer's weight after rounding."""

    weight: FloatArray  # float32 in ONNX layout; changed values lie on their integers
    # squared output error on held-out samples, relative to rounding to nearest; 1 where nothing
    # changed, NaN without held-out samples
    error_ratio: float


def round_weights(request: BuildRequest, making: RepairInput) -> tuple[BuildRequest, str] | None:
    """Return the request with weights rounded by output error, and a text for the report.

    None where no weight of an int8 layer changes.
    """
    all_rounded = round_all_weights(request, making)
    quantized = read_all_quantizations(making.target.trial(request), _exclusive(request.model))
    names = [
        one.weight
        for one, how in quantized.values()
        if one.weight in all_rounded and how.factors is None
    ]
    changed = {name: all_rounded[name] for name in names if all_rounded[name].error_ratio != 1}
    if not changed:
        return None
    model = with_constants(request.model, {name: one.weight for name, one in changed.items()})
    return with_model(request, model), _report_text([one.error_ratio for one in changed.values()])


def _report_text(left: Sequence[float]) -> str:
    layers = "1 layer gives" if len(left) == 1 else f"{len(left)} layers give"
    if not np.isfinite(left).all():
        return f"{layers} less error on the samples that round them"
    mean = float(np.exp(np.log(np.maximum(left, 1e-12)).mean()))
    return f"{layers} {mean:.2f} times the squared error on other samples"


def rounded_trial_builder(
    request: BuildRequest, making: RepairInput
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of trial models with rounded weights, unless `choices.rounded` is False."""
    target = making.target
    arrays = {name: one.weight for name, one in round_all_weights(request, making).items()}
    layers = tuple(one for one in _exclusive(request.model) if one.weight in arrays)
    with_rounded = with_model(request, with_constants(request.model, arrays))
    originals = {t.name: t for t in request.model.graph.initializer if t.name in arrays}

    def trial(chosen: BuildRequest) -> onnx.ModelProto:
        if chosen.choices.rounded is False:
            return target.trial(chosen)
        subject = replace(chosen.subject, loaded=with_rounded.subject.loaded)
        model = target.trial(replace(chosen, subject=subject))
        _give_back(model, layers, originals)
        return model

    return trial


def _give_back(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    originals: Mapping[str, onnx.TensorProto],
) -> None:
    """Give layers that stay float their original weights back, in place."""
    dims = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    present = [(one, name) for one in layers if (name := _weight_name(one, dims)) is not None]
    quantized = read_all_quantizations(model, tuple(one for one, _ in present)) if present else {}
    restored = {name: originals[one.weight] for one, name in present if one.name not in quantized}
    for name, tensor in restored.items():
        if name != tensor.name:
            padded = pad_with_zeros(numpy_helper.to_array(tensor), dims[name])
            restored[name] = numpy_helper.from_array(padded, name)
    update_tensors(model.graph.initializer, restored)


def _weight_name(layer: WeightedLayer, constants: Collection[str]) -> str | None:
    """Return the name of a layer's float weight among a model's constants."""
    names = (layer.weight, padded_name(layer.weight, layer.name))
    return next((name for name in names if name in constants), None)


def round_all_weights(request: BuildRequest, making: RepairInput) -> Mapping[str, RoundedWeight]:
    """Return the rounded weight of every layer that can be int8, by initializer; computed once."""
    return request.ranges.compute_once(
        ("rounded", making.target.name),
        lambda: _rounded(request.with_choices(NO_CHOICES), making),
        of=request.model,
    )


def _rounded(request: BuildRequest, making: RepairInput) -> dict[str, RoundedWeight]:
    quantized = read_all_quantizations(making.target.trial(request), _exclusive(request.model))
    count, fits = len(making.samples), making.target.plan(request.model).placement.fits_pairs
    results = {}
    for layer, patches in layer_patches(
        making.reference,
        [layer for layer, how in quantized.values() if how.is_nearest and how.factors is None],
        [*making.samples, *making.held_out],
        max_patches=_PATCHES * (count + len(making.held_out)) // count,
        threads=making.threads,
    ):
        how, inputs = quantized[layer.name][1], np.concatenate(patches[:count], axis=2)
        held_out = np.concatenate(patches[count:], axis=2) if patches[count:] else None
        results[layer.weight] = round_weight(
            layer, how.weight_scale, inputs, how.grid, held_out=held_out, fits_pairs=fits
        )
        making.progress()
    return results


def _exclusive(model: onnx.ModelProto) -> tuple[WeightedLayer, ...]:
    """Return the layers whose weight no other node reads."""
    return tuple(layer for layer in find_weighted_layers(model) if layer.is_only_reader)


def round_weight(
    layer: WeightedLayer,
    scales: NDArray[np.float64],
    inputs: FloatArray,
    grid: Grid = INT8,
    *,
    held_out: FloatArray | None = None,
    fits_pairs: bool = False,
) -> RoundedWeight:
    """Round a layer's weight by its output error.

    Args:
        layer: in the float model.
        scales: weight scales, which broadcast over the weight.
        inputs: input patches [groups, K, P].
        grid: grid of the stored weight.
        held_out: held-out patches; a channel with no less error on them keeps its weights.
        fits_pairs: whether pairs of stored weights fit 16 bits and must stay so.
    """
    weight = layer.array.astype(np.float64)
    own = _rows(layer, np.broadcast_to(scales, weight.shape))
    steps = _rows(layer, weight / scales)
    fixed = np.abs(steps) >= np.abs(steps).max(axis=2, keepdims=True)
    if scales.size == 1:
        fixed = np.abs(steps) >= np.abs(steps).max()
    if fits_pairs:
        fixed |= _tight(layer, steps)
    nearest = round_to_grid(steps, grid)
    integers = nearest.copy()
    for start in range(0, steps.shape[2], _WIDEST):
        part = slice(start, start + _WIDEST)
        products = gram(inputs[:, part])
        if not np.isfinite(products).all():  # the squares overflow float32: round to nearest
            continue
        integers[:, :, part] = round_by_output(
            steps[:, :, part], products, fixed=fixed[:, :, part], sweeps=_SWEEPS, grid=grid
        )
    left = math.nan if (integers != nearest).any() else 1.0
    if held_out is not None:
        left = _undo_worse(steps, nearest, integers, own, held_out)
    plain = _rows(layer, weight)
    moved = np.where(integers != nearest, np.clip(integers * own, *_limits(plain)), plain)
    return RoundedWeight(layer.from_channels(moved.reshape(layer.by_channel.shape)), left)


def _tight(layer: WeightedLayer, steps: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask like `steps` of the weights to round to nearest, so that pairs fit 16 bits."""
    groups, out, into, places = layer.by_channel.shape
    if is_depthwise(groups, groups * out, into):
        return np.zeros(steps.shape, np.bool_)
    return tight_pair_mask(steps.reshape(groups * out, into, places)).reshape(steps.shape)


def _undo_worse(
    steps: NDArray[np.floating],
    nearest: NDArray[np.floating],
    integers: NDArray[np.floating],
    scales: NDArray[np.floating],
    held_out: FloatArray,
) -> float:
    """Round rows to nearest again, in place, where that has no more error; return what is left."""
    before, after = (
        np.square(block_products((q - steps) * scales, held_out)).sum(axis=2)
        for q in (nearest, integers)
    )
    worse = after >= before
    integers[worse] = nearest[worse]
    total = float(before.sum())
    return float(np.where(worse, before, after).sum()) / total if total > 0 else 1.0


def _limits(weight: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the smallest and the largest value that weights of each channel may become, [..., 1].

    No weight may pass the extreme that sets the scale, nor reach it with the other sign, since the
    sign of the extreme decides AMCT's scale too.
    """
    end = np.abs(weight).max(axis=2, keepdims=True)
    below = np.nextafter(end.astype(np.float32), np.float32(0)).astype(np.float64)
    low = np.where(weight.min(axis=2, keepdims=True) == -end, end, below)
    return -low, np.where(weight.max(axis=2, keepdims=True) == end, end, below)


def _rows(layer: WeightedLayer, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reshape a weight from ONNX layout to [groups, C_out per group, K], the layout of patches."""
    return np.asarray(replace(layer, array=np.asarray(weight)).rows, np.float64)
