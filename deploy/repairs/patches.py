"""What a layer's weights are multiplied with: patches of its input, some of them.

::

    Conv input [N, C, H, W]  -->  P places of the output  -->  [groups, C of a group * taps, P]
    Gemm, MatMul  [..., K]   -->  P rows                  -->  [1, K, P]

The places are drawn evenly over a sample by its number, so that they are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.feed.parallel import Sample
from deploy.repairs.layers import FloatArray, Layer
from deploy.repairs.runs import tapped
from deploy.tensors import Array

if TYPE_CHECKING:
    import onnx

_HELD = 1 << 25  # values in memory at a time; more layers are another run of the model


def inputs_of(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    samples: Sequence[Sample],
    *,
    most: int,
    threads: int,
) -> Iterator[tuple[Layer, FloatArray]]:
    """Each layer with patches of its input, [groups, K, P] with P up to `most` or so.

    ConvTranspose is left out: its weights meet no patches.
    """
    able = [one for one in layers if one.kind != "ConvTranspose"]
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
                parts = [run[tensor][place] for run in runs]
                yield layer, np.concatenate(parts, axis=2)


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
    """At most `most` patches of one input of a layer, float32 [groups, K, P].

    Args:
        layer: Conv, Gemm or MatMul.
        value: its input.
        number: of the sample, which draws the places.
        most: patches.
    """
    rng = np.random.default_rng(number)
    if layer.kind != "Conv":
        rows = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
        chosen = _places(rng, len(rows), most)
        return np.ascontiguousarray(rows[chosen].T)[None]
    kernel = layer.array.shape[2:]
    rank = len(kernel)
    strides = [int(s) for s in layer.given.get("strides", [1] * rank)]
    dilations = [int(d) for d in layer.given.get("dilations", [1] * rank)]
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    pads = _pads(layer, value.shape[2:], spans, strides)
    sizes = [
        max((n + sum(pad) - span) // s + 1, 0)
        for n, pad, span, s in zip(value.shape[2:], pads, spans, strides, strict=True)
    ]
    shape = (len(value), *sizes)
    chosen = _places(rng, math.prod(shape), most)
    batch, *places = np.unravel_index(chosen, shape)
    starts = [p * s - pad[0] for p, s, pad in zip(places, strides, pads, strict=True)]
    taps = []
    for offsets in product(*(range(k) for k in kernel)):
        at = [p + o * d for p, o, d in zip(starts, offsets, dilations, strict=True)]
        taps.append(_values(value, batch, at))
    rows = np.stack(taps, axis=2)  # [P, C, taps]
    return np.ascontiguousarray(rows.reshape(len(chosen), layer.group, -1).transpose(1, 2, 0))


def _values(value: Array, batch: NDArray[np.int64], at: Sequence[NDArray[np.int64]]) -> FloatArray:
    """Values of all channels at these places, [P, C] in float32; zeros outside the input."""
    ends = value.shape[2:]
    inside = np.ones(len(batch), bool)
    for place, end in zip(at, ends, strict=True):
        inside &= (place >= 0) & (place < end)
    near = [np.clip(place, 0, end - 1) for place, end in zip(at, ends, strict=True)]
    found = np.asarray(np.moveaxis(value, 1, -1)[(batch, *near)], np.float32)
    found[~inside] = 0
    return found


def _places(rng: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.sort(rng.choice(count, most, replace=False)).astype(np.int64)


def _pads(
    layer: Layer, sizes: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """(before, behind) of each spatial axis."""
    rank = len(spans)
    how = layer.given.get("auto_pad", b"NOTSET")
    if how in (b"SAME_UPPER", b"SAME_LOWER"):
        found = []
        for size, span, stride in zip(sizes, spans, strides, strict=True):
            whole = max((-(-size // stride) - 1) * stride + span - size, 0)
            less = whole // 2
            found.append((less, whole - less) if how == b"SAME_UPPER" else (whole - less, less))
        return found
    given = [0] * (2 * rank) if how == b"VALID" else list(layer.given.get("pads", [0] * 2 * rank))
    return [(int(given[axis]), int(given[rank + axis])) for axis in range(rank)]
