"""Weight rounding by output error, layer by layer (see `calibrators.rounding`).

The inputs are those of the float model on a few samples. A weight that goes the other way than to
its nearest becomes the float value of that integer, so that every target's own rounding gives it;
the others stay as they are, the extremes that give the scale among them, so the scales do too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.rounding import gram, rounded_by_output
from deploy.repairs.base import Making, with_model
from deploy.repairs.layers import FloatArray, Layer, layers_of, with_constants
from deploy.repairs.patches import inputs_of
from deploy.repairs.written import all_written

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest

_PATCHES = 2048  # of a layer's input, over all samples
_WIDEST = 1200  # values of a patch whose products are taken together; more in portions


def round_weights(request: BuildRequest, making: Making) -> Iterator[BuildRequest]:
    """The request with weights that round to what the outputs want; none without int8 layers."""
    owned = tuple(layer for layer in layers_of(request.model) if layer.alone)
    written = all_written(making.target.trial(request), owned)
    layers = [layer for layer, _ in written.values()]
    arrays = {
        layer.weight: rounded_weight(layer, written[layer.name][1].weight, x)
        for layer, x in inputs_of(
            making.reference, layers, making.samples, most=_PATCHES, threads=making.threads
        )
    }
    if arrays:
        yield with_model(request, with_constants(request.model, arrays))


def rounded_weight(layer: Layer, scales: NDArray[np.float64], inputs: FloatArray) -> FloatArray:
    """The layer's weight with some values moved onto the integer on their other side.

    Args:
        layer: in the float model.
        scales: of its weight, that broadcast over it.
        inputs: patches [groups, K, P].
    """
    weight = layer.array.astype(np.float64)
    wide = np.broadcast_to(scales, weight.shape)
    steps = _rows(layer, weight / wide)
    fixed = np.abs(steps) >= np.abs(steps).max(axis=2, keepdims=True)
    if scales.size == 1:
        fixed = np.abs(steps) >= np.abs(steps).max()
    integers = np.rint(steps)
    for start in range(0, steps.shape[2], _WIDEST):
        part = slice(start, start + _WIDEST)
        integers[:, :, part] = rounded_by_output(
            steps[:, :, part], gram(inputs[:, part]), fixed=fixed[:, :, part]
        )
    other = integers != np.rint(steps)
    plain = _rows(layer, weight)
    end = np.abs(plain).max(axis=2, keepdims=True)  # no value may pass the one that gives the scale
    moved = np.where(other, np.clip(integers * _rows(layer, wide), -end, end), plain)
    return layer.from_channels(moved.reshape(layer.by_channel.shape))


def _rows(layer: Layer, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """A weight in ONNX layout -> [groups, C_out of a group, K], as the patches have it."""
    return np.asarray(replace(layer, array=np.asarray(weight)).rows, np.float64)
