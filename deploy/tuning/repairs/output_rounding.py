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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.grids import INT8, Grid, round_to_grid
from calibrators.rounding import block_products, gram, round_by_output
from calibrators.weights import is_depthwise, tight_pair_mask
from deploy.errors import Calib8Error, counted
from deploy.graph.edit import update_tensors
from deploy.graph.index import pad_with_zeros, padded_name
from deploy.method import NO_CHOICES
from deploy.targets.base import BuildRequest, Target
from deploy.tuning.repairs.base import RepairInput, with_model
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    FloatArray,
    LayerQuantization,
    WeightedLayer,
    find_weighted_layers,
    read_all_quantizations,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import layer_patches

_PATCHES = 1024  # input patches of a layer, over all samples
_SWEEPS = 2  # a third one changes one weight in a hundred
_MAX_GRAM_SIZE = 1200  # values of a patch in one Gram matrix; larger ones are split


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A layer's weight after rounding.

    Attributes:
        weight: float32 in ONNX layout; changed values lie on their integers.
        error_ratio: squared output error on held-out samples, relative to rounding to nearest; 1
            where nothing changed, NaN without held-out samples.
    """

    weight: FloatArray
    error_ratio: float


def round_weights(
    request: BuildRequest, repair_input: RepairInput
) -> tuple[BuildRequest, str] | None:
    """Return the request with weights rounded by output error, and a text for the report.

    None where no weight of an int8 layer changes.
    """
    rounded_by_weight = round_all_weights(request, repair_input)
    arrays, error_ratios = {}, []
    int8_model = repair_input.target.trial(request)
    quantized = read_all_quantizations(int8_model, _find_exclusive_layers(request.model))
    for layer, quantization in quantized.values():
        rounded = rounded_by_weight.get(layer.weight)
        if rounded is None or quantization.factors is not None or rounded.error_ratio == 1:
            continue
        arrays[layer.weight] = rounded.weight
        error_ratios.append(rounded.error_ratio)
    if not arrays:
        return None
    repaired = with_model(request, with_constants(request.model, arrays))
    return repaired, _report_text(error_ratios)


def _report_text(error_ratios: Sequence[float]) -> str:
    layers = counted(len(error_ratios), "layer")
    if not np.isfinite(error_ratios).all():
        return f"{layers}, less error on the samples that round them"
    mean = float(np.exp(np.log(np.maximum(error_ratios, 1e-12)).mean()))
    return f"{layers}, squared error on other samples {100 * (mean - 1):+.0f} %"


def rounded_trial_builder(
    request: BuildRequest, repair_input: RepairInput
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of trial models with rounded weights, unless `choices.rounded` is False."""
    target = repair_input.target
    rounded_by_weight = round_all_weights(request, repair_input)
    arrays = {name: rounded.weight for name, rounded in rounded_by_weight.items()}
    loaded = with_model(request, with_constants(request.model, arrays)).subject.loaded
    initializers = request.model.graph.initializer
    originals = {tensor.name: tensor for tensor in initializers if tensor.name in arrays}
    layers = [layer for layer in _find_exclusive_layers(request.model) if layer.weight in arrays]

    def build_trial(trial_request: BuildRequest) -> onnx.ModelProto:
        if trial_request.choices.rounded is False:
            return target.trial(trial_request)
        subject = replace(trial_request.subject, loaded=loaded)
        model = target.trial(replace(trial_request, subject=subject))
        _restore_float_weights(model, layers, originals)
        return model

    return build_trial


def _restore_float_weights(
    model: onnx.ModelProto,
    layers: Sequence[WeightedLayer],
    originals: Mapping[str, onnx.TensorProto],
) -> None:
    """Give layers that stay float their original weights back, in place."""
    sizes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    layer_by_weight = {}  # name of the weight in this model -> layer
    for layer in layers:
        for name in (layer.weight, padded_name(layer.weight, layer.name)):
            if name in sizes:
                layer_by_weight[name] = layer
                break
    if not layer_by_weight:
        return

    quantized = read_all_quantizations(model, tuple(layer_by_weight.values()))
    restored = {}
    for name, layer in layer_by_weight.items():
        if layer.name in quantized:
            continue
        tensor = originals[layer.weight]
        if name != tensor.name:
            padded = pad_with_zeros(numpy_helper.to_array(tensor), sizes[name])
            tensor = numpy_helper.from_array(padded, name)
        restored[name] = tensor
    update_tensors(model.graph.initializer, restored)


def round_all_weights(
    request: BuildRequest, repair_input: RepairInput
) -> Mapping[str, RoundedWeight]:
    """Return the rounded weight of every layer that can be int8, by initializer.

    It is computed once, in one pass over the layers for all targets of the build.
    """
    weights_by_target: dict[str, dict[str, RoundedWeight]] = request.ranges.compute_once(
        "rounded weights", dict, of=request.model
    )
    target = repair_input.target
    if target.name not in weights_by_target:
        finished = {target.name, *weights_by_target}
        companions = [other for other in request.companions if other.name not in finished]
        new_weights = _round_all(request.with_choices(NO_CHOICES), repair_input, companions)
        weights_by_target.update(new_weights)
    return weights_by_target[target.name]


def _round_all(
    request: BuildRequest, repair_input: RepairInput, companions: Sequence[Target]
) -> dict[str, dict[str, RoundedWeight]]:
    """Return target -> initializer -> rounded weight; without companions that cannot be built."""
    layers, target = _find_exclusive_layers(request.model), repair_input.target
    grids_by_target = {target: _read_grids(request, layers, target)}
    for companion in companions:
        with suppress(Calib8Error):  # its own search reports it
            grids_by_target[companion] = _read_grids(request, layers, companion)
    fits_pairs = {
        target: target.plan(request.model).placement.fits_pairs for target in grids_by_target
    }

    quantized = set().union(*grids_by_target.values())
    count = len(repair_input.samples)
    samples = [*repair_input.samples, *repair_input.held_out]
    weights: dict[str, dict[str, RoundedWeight]] = {target.name: {} for target in grids_by_target}
    for layer, patches in layer_patches(
        repair_input.reference,
        [layer for layer in layers if layer.name in quantized],
        samples,
        max_patches=_PATCHES * len(samples) // count,
        threads=repair_input.threads,
    ):
        held_out = np.concatenate(patches[count:], axis=2) if repair_input.held_out else None
        inputs = LayerInputs(np.concatenate(patches[:count], axis=2), held_out)
        rounded_by_grid: dict[object, RoundedWeight] = {}
        for target, grids in grids_by_target.items():
            if layer.name not in grids:
                continue
            grid, scale = grids[layer.name].grid, grids[layer.name].weight_scale
            channel_scales = _to_rows(layer, np.broadcast_to(scale, layer.array.shape))[..., 0]
            has_pairs = fits_pairs[target] and not _is_depthwise(layer)
            key = grid, scale.size == 1, channel_scales.tobytes(), has_pairs
            if key not in rounded_by_grid:
                rounded_by_grid[key] = round_weight(
                    layer, scale, inputs, grid, fits_pairs=has_pairs
                )
            weights[target.name][layer.weight] = rounded_by_grid[key]
        repair_input.progress()
    return weights


def _read_grids(
    request: BuildRequest, layers: tuple[WeightedLayer, ...], target: Target
) -> dict[str, LayerQuantization]:
    """Return layer -> its quantization for a target, without layers that keep their weights."""
    quantized = read_all_quantizations(target.trial(request), layers)
    grids = {}
    for layer, quantization in quantized.values():
        if quantization.is_nearest and quantization.factors is None:
            grids[layer.name] = quantization
    return grids


def _find_exclusive_layers(model: onnx.ModelProto) -> tuple[WeightedLayer, ...]:
    """Return the layers whose weight no other node reads."""
    return tuple(layer for layer in find_weighted_layers(model) if layer.is_only_reader)


class LayerInputs:
    """Input patches of a layer, from which the weights of several targets are rounded.

    Attributes:
        grams: Gram matrices of the patches, of `_MAX_GRAM_SIZE` of their values each.
        held_out: held-out patches; None where there are too few samples.
    """

    def __init__(self, patches: FloatArray, held_out: FloatArray | None = None) -> None:
        """`patches`: [groups, K, P]."""
        starts = range(0, patches.shape[1], _MAX_GRAM_SIZE)
        self.grams = [gram(patches[:, start : start + _MAX_GRAM_SIZE]) for start in starts]
        self.held_out = held_out


def round_weight(
    layer: WeightedLayer,
    scales: Float64Array,
    inputs: LayerInputs,
    grid: Grid = INT8,
    *,
    fits_pairs: bool = False,
) -> RoundedWeight:
    """Round a layer's weight by its output error.

    Args:
        layer: in the float model.
        scales: weight scales, which broadcast over the weight.
        inputs: of the layer; a channel with no less error on held-out ones keeps its weights.
        grid: grid of the stored weight.
        fits_pairs: whether pairs of stored weights fit 16 bits and must stay so.
    """
    weight = layer.array.astype(np.float64)
    steps = _to_rows(layer, weight / scales)
    sizes = np.abs(steps)
    channel_axis = None if scales.size == 1 else 2
    is_fixed = sizes >= sizes.max(axis=channel_axis, keepdims=True)  # they set the scale
    if fits_pairs:
        is_fixed |= _find_tight_pairs(layer, steps)

    nearest = round_to_grid(steps, grid)
    integers = nearest.copy()
    for index, products in enumerate(inputs.grams):
        part = slice(index * _MAX_GRAM_SIZE, (index + 1) * _MAX_GRAM_SIZE)
        if np.isfinite(products).all():  # else the squares overflow float32: round to nearest
            integers[:, :, part] = round_by_output(
                steps[:, :, part], products, fixed=is_fixed[:, :, part], sweeps=_SWEEPS, grid=grid
            )

    scale_rows = _to_rows(layer, np.broadcast_to(scales, weight.shape))
    if inputs.held_out is not None:
        error_ratio = _undo_worse(steps, nearest, integers, scale_rows, inputs.held_out)
    else:
        error_ratio = math.nan if (integers != nearest).any() else 1.0
    weight_rows = _to_rows(layer, weight)
    rounded = np.clip(integers * scale_rows, *_weight_limits(weight_rows))
    rounded = np.where(integers != nearest, rounded, weight_rows)
    return RoundedWeight(layer.from_channels(rounded.reshape(layer.by_channel.shape)), error_ratio)


def _is_depthwise(layer: WeightedLayer) -> bool:
    groups, out, into, _ = layer.by_channel.shape
    return is_depthwise(groups, groups * out, into)


def _find_tight_pairs(layer: WeightedLayer, steps: Float64Array) -> NDArray[np.bool_]:
    """Return a mask like `steps` of the weights to round to nearest, so that pairs fit 16 bits."""
    groups, out, into, taps = layer.by_channel.shape
    if _is_depthwise(layer):
        return np.zeros(steps.shape, np.bool_)
    return tight_pair_mask(steps.reshape(groups * out, into, taps)).reshape(steps.shape)


def _undo_worse(
    steps: Float64Array,
    nearest: NDArray[np.floating],
    integers: NDArray[np.floating],
    scales: Float64Array,
    held_out: FloatArray,
) -> float:
    """Round rows to nearest again, in place, where that has no more error.

    Returns:
        The squared error of what remains, relative to that of rounding all to nearest.
    """
    nearest_errors, rounded_errors = (
        np.square(block_products((codes - steps) * scales, held_out)).sum(axis=2)
        for codes in (nearest, integers)
    )
    is_worse = rounded_errors >= nearest_errors
    integers[is_worse] = nearest[is_worse]
    total = float(nearest_errors.sum())
    remaining = float(np.where(is_worse, nearest_errors, rounded_errors).sum())
    return remaining / total if total > 0 else 1.0


def _weight_limits(weight: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the smallest and the largest value that weights of each channel may become, [..., 1].

    No weight may pass the extreme that sets the scale, nor reach it with the other sign, since the
    sign of the extreme decides AMCT's scale too.
    """
    extreme = np.abs(weight).max(axis=2, keepdims=True)
    inside = np.nextafter(extreme.astype(np.float32), np.float32(0)).astype(np.float64)
    low = np.where(weight.min(axis=2, keepdims=True) == -extreme, extreme, inside)
    high = np.where(weight.max(axis=2, keepdims=True) == extreme, extreme, inside)
    return -low, high


def _to_rows(layer: WeightedLayer, weight: Float64Array) -> Float64Array:
    """Reshape a weight from ONNX layout to [groups, C_out per group, K], the layout of patches."""
    return np.asarray(replace(layer, array=np.asarray(weight)).rows, np.float64)
