"""`Recipe`, the input of an Ascend deployment's files, and its conversion from a Q/DQ model.

::

    calibration (`deploy.targets.ascend.target`) ---.
    record or cache (`...recorded`) ----------------+--> Recipe --> Ascend.files --> Built
    Q/DQ model (`recipe_from_qdq`) ------------------------'

`recipe_from_qdq` does what AMCT's `convert_qat_model` does, for models trained or calibrated by any
tool::

    Q/DQ model --> scales and offsets of each layer's pairs ---.
         '-------> float model without pairs --> layers -------+--> records --> Recipe

Ascend's offset equals an int8 zero point, or a uint8 zero point - 128. The integers of weights do
not change: the float weight is integer * scale, and the record has the scale. Hence their zero
point must be 0 (128 in uint8), and a BatchNormalization downstream of a layer is not folded. Layers
whose pairs do not fit stay float, with a reason.

The last functions write notes on layers that are not entirely int8, and the chips that accept them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.amct.arq import arq
from calibrators.scales import Scale
from deploy.errors import ExportError
from deploy.frontends import LoadedModel, load
from deploy.frontends.metadata import read_metadata_preprocess
from deploy.frontends.pair_removal import prepare_qdq_model, remove_pairs
from deploy.frontends.pairs import PairGrid, UnfitError, input_grid, weight_grid
from deploy.graph.bounds import find_float16_overflows
from deploy.graph.index import Graph
from deploy.targets.ascend.config_keys import QuantConfig, summarize_layers
from deploy.targets.ascend.layers import TYPES, LayerGraph
from deploy.targets.ascend.preparation import prepare_model
from deploy.targets.ascend.quant_layer import (
    Float32Array,
    QuantLayer,
    quantize_fitting,
    read_constant,
    to_rows,
)
from deploy.targets.ascend.record import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A float model and the scales of its int8 layers.

    Attributes:
        config: the quant config of the calibration; None if AMCT's searches did not run.
        float_reasons: layer -> why it is float, if the user did not ask for it.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    records: Mapping[str, LayerRecord]
    layers: Mapping[str, QuantLayer]
    config: QuantConfig | None = None
    method: str = ""
    ranges: Mapping[str, Scale] = field(default_factory=dict)
    float_reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QdqLayerParams:
    """Quantization parameters of a layer, read from its Q/DQ pairs.

    Attributes:
        scale_d, offset_d: scale and offset of its input.
        scale_w: scales of its weight, float32 [C_out] or [1]; [1.0] for a pool.
    """

    scale_d: np.float32
    offset_d: int
    scale_w: NDArray[np.float32]


def read_qdq_layers(index: Graph) -> tuple[dict[str, QdqLayerParams], dict[str, str]]:
    """Return layer -> parameters, and layer -> why Ascend cannot use its pairs."""
    taken, why = {}, {}
    for node in index.nodes:
        if node.op_type not in TYPES:
            continue
        try:
            grid = _in_int8(input_grid(node, index))
            weighted = node.op_type != "AveragePool"
            taken[node.name] = QdqLayerParams(
                scale_d=np.float32(grid.scale.reshape(-1)[0]),
                offset_d=int(grid.int8_zero.reshape(-1)[0]),
                scale_w=_weight(node, index) if weighted else np.ones(1, np.float32),
            )
        except UnfitError as error:
            why[node.name] = str(error)
    return taken, why


def _weight(node: onnx.NodeProto, index: Graph) -> NDArray[np.float32]:
    """Return the scales of a layer's weight, [C_out] or [1]."""
    grid, scales = weight_grid(node, index)
    if _in_int8(grid).int8_zero.any():
        raise UnfitError("its weight has a zero point, and Ascend's have none")
    return scales


def _in_int8(grid: PairGrid) -> PairGrid:
    """Return the grid if it has 8 bits, else raise UnfitError."""
    if not grid.is_8_bit:
        raise UnfitError(f"it is quantized to {grid.dtype}, and Ascend's layers to int8")
    return grid


_HALF_INT32 = 2**30
_SHOWN = 3  # names in a sentence
_MATRIX = (
    "Ascend has one scale per matrix; layers whose weight had one scale per channel and was rounded"
    " again:"
)
_ROOM = (
    "A bias at the limit of int32 leaves no room for the sums of products; layers with such a"
    " channel, whose weights were rounded again:"
)


def recipe_from_qdq(
    quantized: onnx.ModelProto, path: Path, *, keep_rounding: bool = True
) -> tuple[LoadedModel, Recipe]:
    """Return the cleaned float model of a Q/DQ model, without a file, and its recipe.

    `keep_rounding`: keep the rounding of tensors that float operators read through a pair.

    Raises:
        ModelError: the model is invalid, uses integer operators, or has pairs that cannot be
            removed.
        ExportError: Ascend cannot use the pairs of any layer.
    """
    carried = read_metadata_preprocess(quantized, path)
    model = prepare_qdq_model(quantized)
    taken, why = read_qdq_layers(Graph(model))
    while True:
        plain = remove_pairs(model, taken, keep_rounding=keep_rounding)
        loaded = load(plain.model, fold_batchnorm=False)
        float_model, graph = prepare_model(loaded.model)
        loaded = replace(loaded, model=float_model, name=path.stem, metadata_preprocess=carried)
        layers, changed, unfit = _quantized(float_model, graph, taken)
        if len(layers) == len(taken):
            break
        why |= {n: unfit[n] for n in taken if n in unfit}
        taken = {name: taken[name] for name in layers}  # the other layers become float operators
        if not taken:
            break
    if not layers:
        examples = "; ".join(f"{name}: {reason}" for name, reason in list(why.items())[:_SHOWN])
        raise ExportError(
            f"a Q/DQ model must have a layer whose pairs Ascend can use, got none in {path}"
            f" ({examples or 'no layer of a type that Ascend has'}); give the float model to"
            " calib8 build"
        )
    recipe = Recipe(
        model=loaded.model,
        graph=graph,
        records={name: one.record for name, one in layers.items()},
        layers=layers,
        method="the Q/DQ model's own scales",
        float_reasons={name: why.get(name, "its pairs are gone") for name in graph.layers},
        notes=(
            *_notes(path, graph, layers, changed),
            *_float_pair_notes(plain.float_read_pairs, keep_rounding=keep_rounding),
        ),
    )
    return loaded, recipe


def _quantized(
    model: onnx.ModelProto, graph: LayerGraph, taken: Mapping[str, QdqLayerParams]
) -> tuple[dict[str, QuantLayer], dict[str, str], dict[str, str]]:
    """Quantize the layers of `taken`.

    Returns:
        layer -> integers; layer -> `_MATRIX`, `_ROOM` or "", why its weight was rounded again;
        layer -> why it does not fit the hardware.
    """
    index = Graph(model)
    records, changed, unfit = {}, {}, {}
    for name, layer in graph.layers.items():
        params = taken.get(name)
        if params is None:
            continue
        if layer.symmetric_only and params.offset_d:
            unfit[name] = f"a 3-D convolution takes no activation offset, got {params.offset_d}"
            continue
        records[name], changed[name] = _record(params, layer.name, graph, index)
    layers, outside = quantize_fitting(model, graph, records)
    return layers, {name: changed[name] for name in layers}, unfit | outside


def _record(
    params: QdqLayerParams, name: str, graph: LayerGraph, index: Graph
) -> tuple[LayerRecord, str]:
    """Return a layer's record, and why its weight is rounded again: `_MATRIX`, `_ROOM` or ""."""
    layer, scales = graph.layers[name], params.scale_w
    if not layer.channel_wise and np.all(scales == scales[0]):
        scales = scales[:1]
    changed = ""
    if not layer.channel_wise and scales.size > 1:
        scales = arq(to_rows(read_constant(index, layer.weight), layer), channel_wise=False)
        changed = _MATRIX
    elif layer.bias and scales.size > 1:
        larger = _with_room(scales, read_constant(index, layer.bias).reshape(-1), params.scale_d)
        changed = _ROOM if (larger != scales).any() else ""
        scales = larger
    record = LayerRecord(
        scale_d=params.scale_d,
        offset_d=params.offset_d,
        scale_w=scales,
        has_weight=bool(layer.weight),
    )
    return record, changed


def _with_room(scales: Float32Array, bias: Float32Array, scale_d: np.float32) -> Float32Array:
    """Enlarge weight scales, float32 [C_out], until the bias takes at most half of int32.

    For a channel of nearly zero weights, quantizers let the integer bias reach the limit of int32.
    Ascend adds the products to it, which would then overflow.
    """
    least = np.abs(bias.astype(np.float64)) / (float(scale_d) * _HALF_INT32)
    return np.maximum(scales, least.astype(np.float32)) if least.size == scales.size else scales


def _notes(
    path: Path, graph: LayerGraph, layers: Collection[str], changed: Mapping[str, str]
) -> list[str]:
    total = len(graph.layers) + len(graph.float_reasons)
    notes = [
        f"Scales: those of {path}, for {len(layers)} of {total} layers that Ascend could run in"
        " int8; nothing was calibrated."
    ]
    for reason in (_MATRIX, _ROOM):
        names = [name for name, why in changed.items() if why == reason]
        if names:
            notes.append(f"{reason} {len(names)}: {', '.join(names[:_SHOWN])}.")
    if any(changed.values()):
        notes.append("All other weights keep their integers.")
    return notes


def _float_pair_notes(count: int, *, keep_rounding: bool) -> list[str]:
    """Return a note on the pairs that float operators read."""
    if not count:
        return []
    note = f"Tensors that float operators read through a pair: {count}."
    if keep_rounding:
        return [
            f"{note} They are rounded as in the model, by four operators each;"
            " calib8 ascend convert --no-keep-rounding omits these operators."
        ]
    return [f"{note} Their rounding was removed, as requested."]


# hicann/ge: SetM1OfQuant packs DT_INT16 for Ascend035 only; its page on quantizable layers lists
# INT16 for IPV350 only. hicann/ops-nn: AscendQuant writes int8 and int4, of fixed shapes.
_NANO = "which atc takes for Nano chips (Ascend035) alone"
_FOUR = "for which atc makes no .om on chips without AscendQuant to int4 (Ascend910B has it)"
# hicann/amct, PackInt4WeightPass; no code in hicann/ge unpacks it
_PACKED = (
    "two per byte along the input channels: AMCT's own layout, which the open-source parts of atc"
    " do not read"
)
_TYPE_FLAGS = (
    *("--precision_mode", "--precision_mode_v2", "--keep_dtype", "--modify_mixlist"),
    "--customize_dtypes",
)
_FORCED = (
    "scale_d is stored in float16, and scale_w * scale_d is truncated to the 10 mantissa bits that"
    " Nano chips (Ascend035) read"
)


def bit_width_notes(records: Mapping[str, LayerRecord]) -> Iterator[str]:
    """Yield notes on layers that are not entirely int8, and the chips that accept them."""
    for bits, chips in ((16, _NANO), (4, _FOUR)):
        names = [name for name, one in records.items() if one.act_bits == bits]
        if names:
            yield f"Activations of {summarize_layers(names)} are of {bits} bits, {chips}."
    if any(one.act_bits != 8 for one in records.values()):
        yield "The Q/DQ model has those layers in float: AMCT's convert takes only int8."
    names = [name for name, one in records.items() if one.has_weight and one.weight_bits == 4]
    if names:
        yield f"Weights of {summarize_layers(names)} are of 4 bits, {_PACKED}."
    if any(one.force_fp16 for one in records.values()):
        yield f"FORCE_FP16_QUANT: {_FORCED}."


def precision_notes(
    recipe: Recipe, float16: Collection[str], atc_flags: Collection[str]
) -> Iterator[str]:
    """Yield notes on the types of layers, and the chips that accept them or gain from them.

    `float16`: tensors that are float16 in the model's file. `atc_flags`: flags of atc; with one
    that sets the precision there is no note on nodes that overflow float16.
    """
    count = sum(one.layer.two_activations for one in recipe.layers.values())
    if count:
        yield (
            f"MatMuls of two activations in int8: {count}. Huawei says that this gains on Atlas A2,"
            " A3 and 200I/500 A2 alone, and loses accuracy on other chips."
        )
    yield from bit_width_notes(recipe.records)
    half_layers = [name for name, one in recipe.layers.items() if one.layer.output in float16]
    if half_layers:
        yield (
            f"{summarize_layers(half_layers)} read and give float16, as in the file; calibration"
            " and evaluation ran in float32."
        )
    if any(flag.partition("=")[0] in _TYPE_FLAGS for flag in atc_flags):
        return
    known = {n: max(-one.observed_min, one.observed_max) for n, one in recipe.ranges.items()}
    why = find_float16_overflows(Graph(recipe.model), known, int8_nodes=recipe.layers.keys())
    if why:
        yield (
            "atc computes in float16 what is not int8, which is too narrow for"
            f" {', '.join(why)}: {next(iter(why.values()))}; write these names to a file, one per"
            " line, and give --atc-flag=--keep_dtype=FILE"
        )


def shared_weight_notes(names: Collection[str], model: str) -> Iterator[str]:
    """Yield a note on layers with shared weights, and the model that AMCT needs for them."""
    if names:
        yield (
            f"{summarize_layers(names)} share weights with other nodes, and have copies of them"
            " in the"
            " written models. AMCT itself refuses shared weights: with this config or record give"
            f" it {model}_modified_model.onnx."
        )
