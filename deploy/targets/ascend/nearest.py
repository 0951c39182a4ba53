"""Each layer by the search that leaves its own output nearest, before any layer is left in float.

::

    float input -+-> layer in float             what is left of the difference when the mean of
                 '-> layer in int8, a search    each channel is taken out, which its bias can hold

What a layer loses by itself has little noise, where what the model's outputs lose is decided by a
few values that tip over; so the first choice is made here, and the outputs judge it as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deploy.calibration.taps import Tap
from deploy.feed.parallel import Sample, in_order
from deploy.progress import phase
from deploy.targets.ascend.auto import isolated_model
from deploy.targets.ascend.quant_layer import QuantLayer, quantize_layers
from deploy.targets.ascend.variants import Records, is_balanced
from deploy.tensors import Array

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.layers import LayerGraph

_WORTH_A_MUL = 0.5  # DMQ is one operator more on the device: it must halve the error at least


def nearest(
    model: onnx.ModelProto,
    graph: LayerGraph,
    variants: Mapping[str, Records],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, str]:
    """Layer -> the search whose int8 layer is nearest to the float one, on a float input.

    Args:
        model: float model, nodes named.
        graph: its layers.
        variants: search -> records; the first holds all layers.
        samples: a few of the calibration's.
        threads: samples that run beside each other; the result does not depend on it.

    Raises:
        ExportError: a layer is outside what the hardware takes.
        BackendError: ONNX Runtime could not run the model.
    """
    errors: dict[str, dict[str, float]] = {}
    with phase("errors of layers by themselves", len(variants), "searches") as step:
        for search, records in variants.items():
            layers = quantize_layers(model, graph, records)
            for name, error in own_errors(model, layers, samples, threads=threads).items():
                errors.setdefault(name, {})[search] = error
            step()
    return {name: _best(errors[name]) for name in next(iter(variants.values()))}


def own_errors(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Sequence[Sample],
    *,
    threads: int,
) -> dict[str, float]:
    """Layer -> variance of what int8 adds to its output, summed over its channels.

    Of a layer without a place for a bias, which could hold a mean, the mean square.
    """
    ends = {name: (one.layer.output, f"{name}.isolated") for name, one in layers.items()}
    wanted = sorted({tensor for pair in ends.values() for tensor in pair})
    tap = Tap(isolated_model(model, layers), wanted)
    sums: dict[str, Array] = {}

    def work(_: int, __: int, sample: Sample) -> dict[str, Array]:
        values = dict(tap.run(sample))
        return {
            name: _moments(values[twin] - values[own], layers[name].layer.channel_axis)
            for name, (own, twin) in ends.items()
        }

    def take(_: int, found: dict[str, Array]) -> None:
        for name, moments in found.items():
            sums[name] = sums.get(name, 0) + moments / len(samples)

    in_order(samples, work, take, threads=threads)
    return {
        name: float((square - mean**2 * layers[name].layer.holds_bias).sum())
        for name, (mean, square) in sums.items()
    }


def _moments(difference: Array, axis: int) -> Array:
    """Mean and mean square of each channel, float64 [2, C]."""
    channels = difference if difference.ndim < 2 else np.moveaxis(difference, axis, -1)
    rows = channels.reshape(-1, channels.shape[-1]).astype(np.float64)
    return np.stack([rows.mean(axis=0), (rows * rows).mean(axis=0)])


def _best(errors: Mapping[str, float]) -> str:
    """The search of least error; a balanced one only where it is worth its operator."""
    plain = min((s for s in errors if not is_balanced(s)), key=errors.__getitem__)
    least = min(errors, key=errors.__getitem__)
    return least if errors[least] < _WORTH_A_MUL * errors[plain] else plain
