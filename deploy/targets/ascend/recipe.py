"""What the files of an Ascend deployment are written from, wherever the scales came from.

::

    calibration (`deploy.targets.ascend.target`) ---.
    record or cache (`...recorded`) ----------------+--> Recipe --> Ascend.files --> Built
    Q/DQ model (`...from_qdq`) ---------------------'

What the Q/DQ pairs of a model say of its layers, as Ascend can take it over.

Ascend adds its offset where ONNX adds the zero point: an int8 zero point is the offset, of a uint8
one 128 is taken away. Weights keep the integers that they have, so that their zero point must be 0
(or 128 in uint8). What does not fit is told by its reason, and the layer stays float.

A Q/DQ model, trained or calibrated by any tool, as a recipe: AMCT's `convert_qat_model`.

::

    Q/DQ model --> what its pairs say of each layer (`pairs`) --------.
         '-------> float model without them (`unpaired`) --> layers --+--> records --> Recipe

Integers of weights stay what they are: the float weight is integer times scale, and its scale is in
the record. BatchNormalization behind a layer stays, since folding it would change these.

What is told of layers that are not int8 throughout, and which chips take them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploy.errors import ExportError
from deploy.frontends.pairs import Grid, UnfitError, input_grid, weight_grid
from deploy.frontends.unpaired import named, without_pairs
from deploy.graph.bounds import wide_nodes
from deploy.graph.index import Graph
from deploy.targets.ascend.config_keys import quoted_layers
from deploy.targets.ascend.layers import TYPES

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from calibrators.scales import Scale
    from deploy.frontends import LoadedModel
    from deploy.targets.ascend.config_keys import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import Float32Array, QuantLayer
    from deploy.targets.ascend.record import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A float model and the scales of its int8 layers.

    Attributes:
        model: float model, nodes named.
        graph: its layers.
        records: scales of those in int8, by layer.
        layers: their integers.
        config: quant config that says so; None where the scales are not from AMCT's searches.
        method: what gave the scales, in words.
        ranges: tensor -> the clip range behind them, where it is known.
        why: layer -> why it is float, where that is not as asked.
        notes: sentences for the user.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    records: Mapping[str, LayerRecord]
    layers: Mapping[str, QuantLayer]
    config: QuantConfig | None = None
    method: str = ""
    ranges: Mapping[str, Scale] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the pairs say of a layer.

    Attributes:
        scale_d, offset_d: of its input.
        scale_w: of its weight, float32 [C_out] or [1]; [1] of 1 for a pool.
    """

    scale_d: np.float32
    offset_d: int
    scale_w: NDArray[np.float32]


def taken_over(index: Graph) -> tuple[dict[str, Taken], dict[str, str]]:
    """Layers by name whose pairs Ascend can take over, and why it cannot those of others.

    Args:
        index: of a Q/DQ model, each node with a name of its own.
    """
    taken, why = {}, {}
    for node in index.nodes:
        if node.op_type not in TYPES:
            continue
        try:
            taken[node.name] = _taken(node, index)
        except UnfitError as error:
            why[node.name] = str(error)
    return taken, why


def _taken(node: onnx.NodeProto, index: Graph) -> Taken:
    grid = _in_int8(input_grid(node, index))
    return Taken(
        scale_d=np.float32(grid.scale.reshape(-1)[0]),
        offset_d=int(grid.offset.reshape(-1)[0]),
        scale_w=np.ones(1, np.float32) if node.op_type == "AveragePool" else _weight(node, index),
    )


def _weight(node: onnx.NodeProto, index: Graph) -> NDArray[np.float32]:
    """Scales of a layer's weight, by output channel where there are several."""
    grid, scales = weight_grid(node, index)
    if _in_int8(grid).offset.any():
        raise UnfitError("its weight has a zero point, and Ascend's have none")
    return scales


def _in_int8(grid: Grid) -> Grid:
    """The grid, if it is one of 8 bits."""
    if not grid.bits8:
        raise UnfitError(f"it is quantized to {grid.dtype}, and Ascend's layers to int8")
    return grid


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


# hicann/ge: SetM1OfQuant packs DT_INT16 for Ascend035 alone; its page on quantizable layers speaks
# of INT16 for IPV350 alone. hicann/ops-nn: AscendQuant makes int8 and int4, of fixed shapes.
_NANO = "which atc takes for Nano chips (Ascend035) alone"
_FOUR = "for which chips without AscendQuant to int4 have no .om (Ascend910B has it)"
# hicann/amct, PackInt4WeightPass; hicann/ge has nothing that unpacks it
_PACKED = (
    "two to a byte along the input channels: AMCT's own layout, which the open parts of atc do not"
    " read"
)
_TYPING = (
    *("--precision_mode", "--precision_mode_v2", "--keep_dtype", "--modify_mixlist"),
    "--customize_dtypes",
)
_FORCED = (
    "scale_d is held in float16, and scale_w * scale_d is cut to the 10 bits of mantissa that Nano"
    " chips (Ascend035) read"
)


def widths(records: Mapping[str, LayerRecord]) -> Iterator[str]:
    """Sentences on layers that are not int8 throughout, and who takes that."""
    for bits, whose in ((16, _NANO), (4, _FOUR)):
        names = [name for name, one in records.items() if one.act_bits == bits]
        if names:
            yield f"Activations of {quoted_layers(names)} are of {bits} bits, {whose}."
    if any(one.act_bits != 8 for one in records.values()):
        yield "The Q/DQ model has those layers in float: AMCT's convert takes int8 alone."
    names = [name for name, one in records.items() if one.weighted and one.weight_bits == 4]
    if names:
        yield f"Weights of {quoted_layers(names)} are of 4 bits, {_PACKED}."
    if any(one.force_fp16 for one in records.values()):
        yield f"FORCE_FP16_QUANT: {_FORCED}."


def narrow(recipe: Recipe, flags: Collection[str]) -> Iterator[str]:
    """A sentence on nodes that the .om computes in float16, which is too narrow for them.

    Args:
        recipe: what is built.
        flags: of atc; one that says in what it computes settles it.
    """
    if any(flag.partition("=")[0] in _TYPING for flag in flags):
        return
    known = {n: max(-one.observed_min, one.observed_max) for n, one in recipe.ranges.items()}
    why = wide_nodes(Graph(recipe.model), known, but=recipe.layers.keys())
    if why:
        yield (
            "atc computes in float16 what is not int8, which is too narrow for"
            f" {', '.join(why)}: {next(iter(why.values()))}; write these names to a file, a line"
            " each, and give --atc-flag=--keep_dtype=FILE"
        )


def shared(names: Collection[str], model: str) -> Iterator[str]:
    """A sentence on layers that share weights, and what AMCT is to be given.

    Args:
        names: of the layers.
        model: name of the files.
    """
    if names:
        yield (
            f"{quoted_layers(names)} share weights with other nodes, and have their own in the"
            " files. AMCT itself refuses such layers: with this config or record give it"
            f" {model}_modified_model.onnx."
        )


def halves(layers: Mapping[str, QuantLayer], names: Collection[str]) -> Iterator[str]:
    """A sentence on layers between float16 tensors, whose names are given."""
    found = [name for name, one in layers.items() if one.layer.output in names]
    if found:
        yield (
            f"{quoted_layers(found)} read and give float16, as in the file; measured and judged in"
            " float32."
        )
