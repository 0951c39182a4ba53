"""Adaptive rounding: of weights by output error, layer by layer (see `calibrators.rounding`).

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

from calibrators.grids import INT8, Grid, round_to_grid
from calibrators.rounding import block_products, gram, round_by_output
from calibrators.weights import is_depthwise, tight_pair_mask
from deploy.errors import Calib8Error, counted
from deploy.method import NO_CHOICES
from deploy.targets.base import BuildRequest, Target
from deploy.tuning.repairs.base import RepairInput
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    FloatArray,
    LayerQuantization,
    WeightedLayer,
    find_weighted_layers,
    original_weights,
    read_all_quantizations,
    restore_weights,
    with_constants,
)
from deploy.tuning.repairs.sample_runs import layer_patches

_PATCHES = 1024  # input patches of a layer, over all samples
_MAX_GRAM_SIZE = 1200  # values of a patch in one Gram matrix; larger ones are split
_MIN_ERROR_RATIO = 1e-12  # whose logarithm is finite


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A layer's weight after rounding.

    Attributes:
        weight: float32 in ONNX layout; changed values lie on their integers.
        error_ratio: squared output error of the layer on held-out samples, as a ratio to that of
            rounding all its weights to nearest; 1 if nothing changed, NaN without held-out samples.
    """

    weight: FloatArray
    error_ratio: float


# weight's initializer -> the weight after rounding
RoundedWeights = dict[str, RoundedWeight]


def round_weights(
    request: BuildRequest, repair_input: RepairInput
) -> tuple[onnx.ModelProto, str] | None:
    """Return the float model with rounded weights, and a text for the report.

    Each weight is rounded up or down so that the output of its layer has the least error. None
    where no weight of an int8 layer changes.
    """
    rounded_by_weight = _round_all_weights(request, repair_input)
    arrays = {}
    error_ratios = []
    int8_model = repair_input.target.trial(request)
    int8_layers = read_all_quantizations(int8_model, find_exclusive_layers(request.model))
    for layer, quantization in int8_layers.values():
        rounded_weight = rounded_by_weight.get(layer.weight)
        if rounded_weight is None or rounded_weight.error_ratio == 1:  # 1: nothing has changed
            continue
        if not quantization.is_nearest:  # with this request's choices AMCT rounds it in its own way
            continue
        arrays[layer.weight] = rounded_weight.weight
        error_ratios.append(rounded_weight.error_ratio)
    if not arrays:
        return None

    effect = "less error on the samples that round them"
    if np.isfinite(error_ratios).all():  # NaN without held-out samples
        mean_log = float(np.log(np.maximum(error_ratios, _MIN_ERROR_RATIO)).mean())
        mean_ratio = math.exp(mean_log)  # the geometric mean, as suits ratios
        effect = f"squared error on other samples {100 * (mean_ratio - 1):+.0f} %"
    text = f"{counted(len(arrays), 'layer')}, {effect}"
    return with_constants(request.model, arrays), text


def rounded_trial_builder(
    request: BuildRequest, repair_input: RepairInput
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """Return a builder of trial models in which int8 layers have rounded weights.

    Float layers have their own weights, and so have all layers where `choices.rounded` is False.
    """
    target = repair_input.target
    rounded_by_weight = _round_all_weights(request, repair_input)
    arrays = {name: rounded.weight for name, rounded in rounded_by_weight.items()}
    rounded_model = with_constants(request.model, arrays)
    rounded_loaded = replace(request.subject.loaded, model=rounded_model)
    layers = [layer for layer in find_exclusive_layers(request.model) if layer.weight in arrays]
    original_by_layer = original_weights(request.model, layers)

    def build_trial(trial_request: BuildRequest) -> onnx.ModelProto:
        if trial_request.choices.rounded is False:
            return target.trial(trial_request)
        # which layers are int8 is known once the trial is built, so all get rounded weights first
        subject = replace(trial_request.subject, loaded=rounded_loaded)
        model = target.trial(replace(trial_request, subject=subject))
        int8_layers = read_all_quantizations(model, layers)
        restore_weights(model, original_by_layer, original_by_layer.keys() - int8_layers.keys())
        return model

    return build_trial


def _round_all_weights(request: BuildRequest, repair_input: RepairInput) -> RoundedWeights:
    """Return the rounded weight of every layer that can be int8 on the target.

    The weights for all targets of the build are computed once, in one pass over the layers.
    """
    weights_by_target: dict[str, RoundedWeights] = request.compute_once("rounded weights", dict)
    target = repair_input.target
    if target.name not in weights_by_target:
        finished_targets = {target.name, *weights_by_target}
        companions = [other for other in request.companions if other.name not in finished_targets]
        unsearched_request = request.with_choices(NO_CHOICES)
        weights_by_target |= _round_for_targets(unsearched_request, repair_input, companions)
    return weights_by_target[target.name]


@dataclass(frozen=True, slots=True)
class _TargetQuantization:
    """How a target quantizes the weights of layers.

    Attributes:
        quantization_by_layer: of the layers whose weights the target rounds to nearest.
        limits_pair_sums: whether the target's weights must stay so small that a CPU can add the
            products of two neighbouring weights in 16 bits (see `calibrators.weights`).
    """

    quantization_by_layer: dict[str, LayerQuantization]
    limits_pair_sums: bool


def _round_for_targets(
    request: BuildRequest, repair_input: RepairInput, companions: Sequence[Target]
) -> dict[str, RoundedWeights]:
    """Return target -> its rounded weights by name, all computed in one pass over the layers.

    For each layer the pass gives the input patches of every sample. Those of the first samples
    round the weights; those of the last ones are held out, to accept or reject the rounding.

    `companions`: the other targets of the build; those that cannot be built are left out.
    """
    target = repair_input.target
    layers = find_exclusive_layers(request.model)
    quantization_by_target = {target.name: _read_target_quantization(request, layers, target)}
    for companion in companions:
        with suppress(Calib8Error):  # its own search reports it
            quantization_by_target[companion.name] = _read_target_quantization(
                request, layers, companion
            )

    rounded_layers: set[str] = set()
    for target_quantization in quantization_by_target.values():
        rounded_layers |= target_quantization.quantization_by_layer.keys()
    rounding_count = len(repair_input.samples)  # samples that round, the first of all
    samples = [*repair_input.samples, *repair_input.held_out]
    # the patches are spread evenly over all samples; those that round get `_PATCHES` of them
    patch_count = _PATCHES * len(samples) // rounding_count
    weights_by_target: dict[str, RoundedWeights] = {name: {} for name in quantization_by_target}
    layers_with_patches = layer_patches(
        request.model,
        [layer for layer in layers if layer.name in rounded_layers],
        samples,
        max_patches=patch_count,
        threads=request.threads,
    )
    for layer, patches_by_sample in layers_with_patches:
        # patches are [groups, K, P]; the P of several samples are joined
        held_out_patches = None
        if repair_input.held_out:
            held_out_patches = np.concatenate(patches_by_sample[rounding_count:], axis=2)
        rounding_patches = np.concatenate(patches_by_sample[:rounding_count], axis=2)
        inputs = LayerInputs(rounding_patches, held_out_patches)
        for name, rounded_weight in _round_layer(layer, inputs, quantization_by_target).items():
            weights_by_target[name][layer.weight] = rounded_weight
        repair_input.progress()
    return weights_by_target


def _round_layer(
    layer: WeightedLayer,
    inputs: "LayerInputs",
    quantization_by_target: Mapping[str, _TargetQuantization],
) -> dict[str, RoundedWeight]:
    """Return target -> the weight of one layer, rounded for the target's grid.

    Targets whose grids and scales are equal share the result. A target that runs the layer in
    float, or that does not round its weight to nearest, is left out.
    """
    in_channels = layer.channel_shape[2]  # per group
    is_depthwise_layer = is_depthwise(layer.groups, layer.out_channels, in_channels)
    rounded_by_grid = {}
    rounded_by_target = {}
    for target_name, target_quantization in quantization_by_target.items():
        quantization = target_quantization.quantization_by_layer.get(layer.name)
        if quantization is None:
            continue
        scale = quantization.weight_scale
        # kernels of a depthwise layer add in 32 bits, others a pair of products in 16
        limits_pair_sums = target_quantization.limits_pair_sums and not is_depthwise_layer
        # [groups, C_out per group]: all weights of a channel have one scale
        channel_scales = layer.to_rows(np.broadcast_to(scale, layer.array.shape))[..., 0]
        # `round_weight` never changes a weight that sets a scale: with one scale of the tensor that
        # is its largest weight, with a scale per channel the largest of each channel. So the
        # results differ even if all scales are equal
        is_per_tensor = scale.size == 1
        grid_key = quantization.grid, is_per_tensor, channel_scales.tobytes(), limits_pair_sums
        if grid_key not in rounded_by_grid:
            rounded_by_grid[grid_key] = round_weight(
                layer, scale, inputs, quantization.grid, limits_pair_sums=limits_pair_sums
            )
        rounded_by_target[target_name] = rounded_by_grid[grid_key]
    return rounded_by_target


def _read_target_quantization(
    request: BuildRequest, layers: Sequence[WeightedLayer], target: Target
) -> _TargetQuantization:
    """Return how a target quantizes weights, without layers that AMCT rounds in its own way.

    These have weights of AdaRound, or weights that DMQ multiplies by factors first.
    """
    quantization_by_layer = {}
    for layer, quantization in read_all_quantizations(target.trial(request), layers).values():
        if quantization.is_nearest:
            quantization_by_layer[layer.name] = quantization
    placement = target.plan(request.model).placement
    return _TargetQuantization(quantization_by_layer, placement.limits_pair_sums)


def find_exclusive_layers(model: onnx.ModelProto) -> list[WeightedLayer]:
    """Return the layers whose weight no other node reads, so that rounding changes no other."""
    return [layer for layer in find_weighted_layers(model) if layer.is_only_reader]


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
    limits_pair_sums: bool = False,
) -> RoundedWeight:
    """Round every weight of a layer up or down, for the least error of the layer's output.

    Args:
        layer: in the float model.
        scales: weight scales, which broadcast over the weight.
        inputs: of the layer; an output channel with no less error on the held-out ones is rounded
            to nearest.
        grid: grid of the stored weight.
        limits_pair_sums: whether pairs of stored weights must stay so small that kernels of x86
            CPUs can add their products in 16 bits.
    """
    # arrays named rows or steps are [groups, C_out per group, K], K values of an input patch
    weight = layer.array.astype(np.float64)
    weight_rows = layer.to_rows(weight)
    scale_rows = layer.to_rows(np.broadcast_to(scales, weight.shape))
    steps = layer.to_rows(weight / scales)
    is_fixed = _find_fixed(
        layer, steps, is_per_tensor=scales.size == 1, limits_pair_sums=limits_pair_sums
    )

    nearest_integers = round_to_grid(steps, grid)
    integers = nearest_integers.copy()
    for index, gram_matrix in enumerate(inputs.grams):  # X X^T of the patches, block by block
        columns = slice(index * _MAX_GRAM_SIZE, (index + 1) * _MAX_GRAM_SIZE)
        # where squares overflowed float32 the weights stay rounded to nearest
        if np.isfinite(gram_matrix).all():
            integers[:, :, columns] = round_by_output(
                steps[:, :, columns],
                gram_matrix,
                fixed=is_fixed[:, :, columns],
                grid=grid,
            )

    # squared output error on held-out samples, relative to that of the nearest integers
    if inputs.held_out is not None:
        # this changes `integers`
        error_ratio = _undo_worse_rows(
            steps, nearest_integers, integers, scale_rows, inputs.held_out
        )
    elif (integers != nearest_integers).any():
        error_ratio = math.nan  # unknown without these samples
    else:
        error_ratio = 1.0  # nothing has changed
    # float values of the integers, none beyond the channel's extremes, which set the scale
    changed_rows = np.clip(integers * scale_rows, *_weight_limits(weight_rows))
    # a weight rounded to nearest keeps its own float value: the target rounds it to that integer
    rounded_rows = np.where(integers != nearest_integers, changed_rows, weight_rows)
    return RoundedWeight(layer.from_rows(rounded_rows), error_ratio)


def _find_fixed(
    layer: WeightedLayer, steps: Float64Array, *, is_per_tensor: bool, limits_pair_sums: bool
) -> NDArray[np.bool_]:
    """Return a mask of the weights to round to nearest, so that the target's scales stay.

    Args:
        layer: the layer.
        steps: weight / scale, [groups, C_out per group, K], as the mask.
        is_per_tensor: whether all channels have one scale.
        limits_pair_sums: as for `round_weight`.
    """
    magnitudes = np.abs(steps)
    scale_axis = None if is_per_tensor else 2  # of the weights that share a scale; None: all axes
    # the largest set the scale
    is_fixed: NDArray[np.bool_] = magnitudes >= magnitudes.max(axis=scale_axis, keepdims=True)
    if limits_pair_sums:
        _, _, in_channels, taps = layer.channel_shape
        channel_steps = steps.reshape(layer.out_channels, in_channels, taps)
        is_fixed |= tight_pair_mask(channel_steps).reshape(steps.shape)
    return is_fixed


def _undo_worse_rows(
    steps: Float64Array,
    nearest_integers: NDArray[np.floating],
    integers: NDArray[np.floating],
    scales: Float64Array,
    held_out: FloatArray,
) -> float:
    """Round output channels to nearest again, in place, where rounding by error gained nothing.

    An output channel is a row of K weights. Its errors are compared on held-out samples.

    Args:
        steps: weight / scale, [groups, C_out per group, K].
        nearest_integers: `steps` rounded to nearest.
        integers: `steps` rounded by output error; changed in place.
        scales: of the weight, of the shape of `steps`.
        held_out: patches, [groups, K, P].

    Returns:
        The squared error of the resulting weights, relative to that of rounding all to nearest.
    """

    def row_errors(rounded_steps: NDArray[np.floating]) -> Float64Array:
        """Return the squared output error of each output channel, [groups, C_out per group]."""
        weight_errors = ((rounded_steps - steps) * scales).astype(np.float32)
        output_errors = block_products(weight_errors, held_out)
        return np.asarray(np.square(output_errors).sum(axis=2), np.float64)

    nearest_errors = row_errors(nearest_integers)
    rounded_errors = row_errors(integers)
    is_worse = rounded_errors >= nearest_errors
    integers[is_worse] = nearest_integers[is_worse]
    nearest_error = float(nearest_errors.sum())
    remaining_error = float(np.where(is_worse, nearest_errors, rounded_errors).sum())
    return remaining_error / nearest_error if nearest_error > 0 else 1.0


def _weight_limits(weight: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the smallest and the largest value that weights of each channel may become, [..., 1].

    No weight may pass the extreme that sets the scale, nor reach it with the other sign, since the
    sign of the extreme decides AMCT's scale too.
    """
    extreme = np.abs(weight).max(axis=2, keepdims=True)
    below_extreme = np.nextafter(extreme.astype(np.float32), np.float32(0)).astype(np.float64)
    low_magnitude = np.where(weight.min(axis=2, keepdims=True) == -extreme, extreme, below_extreme)
    high_limit = np.where(weight.max(axis=2, keepdims=True) == extreme, extreme, below_extreme)
    return -low_magnitude, high_limit
