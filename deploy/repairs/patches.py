"""What a layer's weights are multiplied with, on a few samples: patches of its input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from calibrators.patches import patches as drawn_patches
from deploy.feed.parallel import Sample
from deploy.graph.windows import window_of
from deploy.tensors import Array
from deploy.tuning.repairs.repair_layers import FloatArray, Layer
from deploy.tuning.repairs.sample_runs import tapped

if TYPE_CHECKING:
    import onnx

_PADS_GIVEN = b"NOTSET"
_HELD = 1 << 25  # values in memory at a time; more layers are another run of the model


def inputs_of(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    samples: Sequence[Sample],
    *,
    most: int,
    threads: int,
) -> Iterator[tuple[Layer, list[FloatArray]]]:
    """Each layer with patches of its input: of each sample [groups, K, P], `most` or so together.

    A ConvTranspose whose pads are not given, but found from its output's size, is left out.
    """
    able = [one for one in layers if not (one.transposed and _fitted(one))]
    each = -(-most // len(samples))
    for some in _portions(able, most):
        wanted = {layer.name: layer for layer in some}

        def take(number: int, name: str, value: Array, some: Sequence[Layer] = some) -> list[Array]:
            return [patches(one, value, number, each) for one in some if one.input == name]

        runs = tapped(model, [one.input for one in some], samples, take, threads=threads)
        by_input: dict[str, list[Layer]] = {}
        for layer in wanted.values():
            by_input.setdefault(layer.input, []).append(layer)
        for tensor, own in by_input.items():
            for place, layer in enumerate(own):
                yield layer, [run[tensor][place] for run in runs]


def _fitted(layer: Layer) -> bool:
    """Whether the pads of a ConvTranspose follow from the size of its output."""
    return "output_shape" in layer.given or layer.given.get("auto_pad", _PADS_GIVEN) != _PADS_GIVEN


def _portions(layers: Sequence[Layer], most: int) -> Iterator[list[Layer]]:
    """The layers in portions whose patches fit into memory, in their order."""
    some: list[Layer] = []
    held = 0
    for layer in layers:
        size = most * math.prod(layer.by_channel.shape) // max(layer.by_channel.shape[1], 1)
        if some and held + size > _HELD:
            yield some
            some, held = [], 0
        some.append(layer)
        held += size
    if some:
        yield some


def patches(layer: Layer, value: Array, number: int, most: int) -> FloatArray:
    """At most `most` patches of one input of a layer (`calibrators.patches`)."""
    window = None
    if layer.kind in ("Conv", "ConvTranspose"):
        window = window_of(layer.given, layer.array.shape[2:], transposed=layer.transposed)
    return drawn_patches(value, window, number, most)
