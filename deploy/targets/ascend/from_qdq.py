"""A Q/DQ model, trained or calibrated by any tool, as a recipe: AMCT's `convert_qat_model`.

::

    Q/DQ model --> what its pairs say of each layer (`pairs`) --------.
         '-------> float model without them (`unpaired`) --> layers --+--> records --> Recipe

Integers of weights stay what they are: the float weight is integer times scale, and its scale is in
the record. BatchNormalization behind a layer stays, since folding it would change these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ExportError
from deploy.frontends.unpaired import named, without_pairs
from deploy.graph.index import Graph
from deploy.targets.ascend.pairs import Taken, taken_over
from deploy.targets.ascend.recipe import Recipe

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import Float32Array, QuantLayer
    from deploy.targets.ascend.record import LayerRecord

_HALF_INT32 = 2**30
_TOLD = 3  # names in a sentence
_MATRIX = (
    "Ascend has one scale for a whole matrix; layers whose weight had one a channel and was rounded"
    " again:"
)
_ROOM = (
    "Beside a bias at the end of int32 there is no room for sums; layers with such a channel, whose"
    " weights were rounded again:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What `from_qdq` gives.

    Attributes:
        loaded: the float model, cleaned; it came from no file.
        recipe: its layers and their scales.
    """

    loaded: LoadedModel
    recipe: Recipe


def from_qdq(quantized: onnx.ModelProto, path: Path, *, keep_rounding: bool = True) -> Converted:
    """Take the pairs out, and what they say into records; `quantized` is left as it is.

    Args:
        quantized: a model with QuantizeLinear and DequantizeLinear nodes.
        path: where it came from.
        keep_rounding: round what float operators read as the pairs do.

    Raises:
        ModelError: it is no valid model, or in integer operators, or in pairs that cannot be taken
            out of it.
        ExportError: Ascend can take over none of its layers.
    """
    from deploy.frontends import load
    from deploy.frontends.metadata import carried_of
    from deploy.targets.ascend.settled import prepared

    carried = carried_of(quantized, path)
    model = named(quantized)
    taken, why = taken_over(Graph(model))
    while True:
        plain = without_pairs(model, taken, keep_rounding=keep_rounding)
        loaded = load(plain.model, fold_batchnorm=False)
        own, graph = prepared(loaded.model)
        loaded = replace(loaded, model=own, name=path.stem, carried=carried)
        layers, changed, unfit = _quantized(own, graph, taken)
        if len(layers) == len(taken):
            break
        why |= {n: unfit[n] for n in taken if n in unfit}
        taken = {name: taken[name] for name in layers}  # the others read as float what they read
        if not taken:
            break
    if not layers:
        said = "; ".join(f"{name}: {reason}" for name, reason in list(why.items())[:_TOLD])
        raise ExportError(
            f"a Q/DQ model must have a layer whose pairs Ascend can take over, got none in {path}"
            f" ({said or 'no layer of a type that it has'}); give the float model to calib8 build"
        )
    recipe = Recipe(
        model=loaded.model,
        graph=graph,
        records={name: one.record for name, one in layers.items()},
        layers=layers,
        method="the Q/DQ model's own scales",
        why={name: why.get(name, "its pairs are gone") for name in graph.layers},
        notes=(
            *_notes(path, graph, layers, changed),
            *_of_loose(plain.loose, keep_rounding=keep_rounding),
        ),
    )
    return Converted(loaded=loaded, recipe=recipe)


def _quantized(
    model: onnx.ModelProto, graph: LayerGraph, taken: Mapping[str, Taken]
) -> tuple[dict[str, QuantLayer], dict[str, str], dict[str, str]]:
    """Integers of those taken that fit, what became of these, why others do not fit."""
    from deploy.targets.ascend.quant_layer import quantize_fitting

    index = Graph(model)
    records, changed, unfit = {}, {}, {}
    for name, layer in graph.layers.items():
        one = taken.get(name)
        if one is None:
            continue
        if layer.symmetric_only and one.offset_d:
            unfit[name] = f"a 3-D convolution takes no activation offset, got {one.offset_d}"
            continue
        records[name], changed[name] = _record(one, layer.name, graph, index)
    layers, outside = quantize_fitting(model, graph, records)
    return layers, {name: changed[name] for name in layers}, unfit | outside


def _record(one: Taken, name: str, graph: LayerGraph, index: Graph) -> tuple[LayerRecord, str]:
    """The record of a layer, and why its weight is rounded anew, `_MATRIX` or `_ROOM`, or not."""
    from calibrators.amct.arq import arq
    from deploy.targets.ascend.quant_layer import array_of, rows_of
    from deploy.targets.ascend.record import LayerRecord

    layer, scales = graph.layers[name], one.scale_w
    if not layer.channel_wise and np.all(scales == scales[0]):
        scales = scales[:1]
    changed = ""
    if not layer.channel_wise and scales.size > 1:
        scales, _ = arq(rows_of(array_of(index, layer.weight), layer), channel_wise=False)
        changed = _MATRIX
    elif layer.bias and scales.size > 1:
        larger = _with_room(scales, array_of(index, layer.bias).reshape(-1), one.scale_d)
        changed = _ROOM if (larger != scales).any() else ""
        scales = larger
    record = LayerRecord(
        scale_d=one.scale_d, offset_d=one.offset_d, scale_w=scales, weighted=bool(layer.weight)
    )
    return record, changed


def _with_room(scales: Float32Array, bias: Float32Array, scale_d: np.float32) -> Float32Array:
    """Scales of weights, float32 [C_out], larger where the bias would fill int32.

    Quantizers let the bias of a channel whose weights are next to nothing go up to the end of
    int32; Ascend adds the products to it, which then would leave int32. Half of it is left to them.
    """
    least = np.abs(bias.astype(np.float64)) / (float(scale_d) * _HALF_INT32)
    return np.maximum(scales, least.astype(np.float32)) if least.size == scales.size else scales


def _notes(
    path: Path, graph: LayerGraph, layers: Collection[str], changed: Mapping[str, str]
) -> list[str]:
    total = len(graph.layers) + len(graph.refused)
    notes = [
        f"Scales: those of {path}, for {len(layers)} of {total} layers that Ascend could run in"
        " int8; nothing was calibrated."
    ]
    for reason in (_MATRIX, _ROOM):
        names = [name for name, why in changed.items() if why == reason]
        if names:
            notes.append(f"{reason} {len(names)}: {', '.join(names[:_TOLD])}.")
    if any(changed.values()):
        notes.append("All other weights keep their integers.")
    return notes


def _of_loose(loose: int, *, keep_rounding: bool) -> list[str]:
    """What became of the pairs that float operators read."""
    if not loose:
        return []
    what = f"Tensors that float operators read through a pair: {loose}."
    if keep_rounding:
        return [
            f"{what} They are rounded there as in the model, by four operators each;"
            " calib8 ascend convert --no-keep-rounding leaves these away."
        ]
    return [f"{what} They are rounded no more, as was asked for."]
