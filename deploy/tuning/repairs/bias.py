"""Bias correction: the mean that int8 adds to a channel is subtracted from its bias.

Rounded weights and clipped inputs shift the mean of a channel, and the shifts add up over the
layers. The bias gets the mean over a few samples of float minus int8. It is that of every layer by
itself, of its float input x and of x' = x on its grid::

    b + mean(W x) - mean(W' x')

so that it holds for all layers at once, since the layers upstream are corrected too. Measured in
the int8 model for many layers at once, each would correct what the layers upstream already correct;
one after the other it would cost one int8 model per layer. A mean on which the samples disagree is
shrunk by m^2 / (m^2 + variance / n).

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2 (equation 16 and 17), and appendix D for correction on data.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrators.weights import shrunk_mean
from deploy.targets.base import BuildRequest
from deploy.tuning.repairs.base import RepairInput, with_model
from deploy.tuning.repairs.repair_layers import (
    Float64Array,
    FloatArray,
    find_weighted_layers,
    read_all_quantizations,
    with_biases,
)
from deploy.tuning.repairs.sample_runs import layer_patches

_PATCHES = 1024  # input patches of a layer, over all samples


def correct_biases(request: BuildRequest, repair_input: RepairInput) -> BuildRequest | None:
    """Return the request with other biases; None without an int8 layer that can have one."""
    layers = tuple(layer for layer in find_weighted_layers(request.model) if layer.can_have_bias)
    float_layers = {layer.name: layer for layer in find_weighted_layers(repair_input.reference)}
    quantized = read_all_quantizations(repair_input.target.trial(request), layers)
    biases = []
    for layer, patches in layer_patches(
        repair_input.reference,
        [layer for layer, quantization in quantized.values() if quantization.is_nearest],
        repair_input.samples,
        max_patches=_PATCHES,
        threads=repair_input.threads,
    ):
        _, quantization = quantized[layer.name]
        weight = np.asarray(quantization.quantize_weight(layer), np.float32)
        int8_patches = [quantization.quantize_inputs(values) for values in patches]
        expected = _mean_outputs(float_layers[layer.name].rows, patches)
        actual = _mean_outputs(replace(layer, array=weight).rows, int8_patches)
        biases.append((layer, layer.bias_values + shrunk_mean(expected - actual)))
    return with_model(request, with_biases(request.model, biases)) if biases else None


def _mean_outputs(rows: NDArray[Any], patches: Sequence[FloatArray]) -> Float64Array:
    """Return mean outputs of rows [G, C, K] on each sample's patches [G, K, P]: [samples, G C]."""
    means = [values.mean(axis=2, dtype=np.float64) for values in patches if values.shape[2]]
    outputs = (np.asarray(rows, np.float64) * np.stack(means)[:, :, None, :]).sum(axis=3)
    return np.asarray(outputs.reshape(len(means), -1), np.float64)
