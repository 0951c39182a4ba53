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

from calibrators.amct.arq import arq
from calibrators.grids import Float32Array
from calibrators.scales import Scales
from deploy.errors import ExportError, counted
from deploy.frontends import LoadedModel, load
from deploy.frontends.metadata import read_metadata_preprocess
from deploy.frontends.pair_removal import prepare_qdq_model, remove_pairs
from deploy.frontends.pairs import PairGrid, UnfitError, input_grid, weight_grid
from deploy.graph.bounds import find_float16_overflows
from deploy.graph.index import Graph
from deploy.targets.ascend.config_keys import QuantConfig, summarize_layers
from deploy.targets.ascend.layers import LAYER_OPS, Layer, LayerGraph
from deploy.targets.ascend.preparation import prepare_model
from deploy.targets.ascend.quant_layer import (
    QuantLayers,
    quantize_fitting_layers,
    read_constant,
    read_weight_rows,
)
from deploy.targets.ascend.record import LayerRecord, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A float model and the scales of its int8 layers.

    Attributes:
        model: the float model, in which each layer has a weight of its own.
        graph: its layers.
        records: int8 layer -> its scales.
        layers: int8 layer -> its integers.
        config: the quant config of the calibration; None if AMCT's searches did not run.
        method: text: the algorithms that chose the scales.
        ranges: tensor -> clip range of its scale.
        float_reasons: layer -> why it is float, if the user did not ask for it.
        notes: sentences for the user.
        alerts: sentences on what is probably wrong.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    records: Records
    layers: QuantLayers
    config: QuantConfig | None = None
    method: str = ""
    ranges: Scales = field(default_factory=dict)
    float_reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()


_HALF_OF_INT32 = 2**30  # largest integer bias: the other half is left to the sums of products
_SHOWN_NAMES = 3  # in a sentence
_ONE_MATRIX_SCALE = (
    "Ascend has one scale per matrix; layers whose weight had one scale per channel and was rounded"
    " again:"
)
_NO_ROOM_FOR_SUMS = (
    "A bias at the limit of int32 leaves no room for the sums of products; layers with such a"
    " channel, whose weights were rounded again:"
)


def recipe_from_qdq(
    quantized: onnx.ModelProto, path: Path, *, keep_rounding: bool = True
) -> tuple[LoadedModel, Recipe]:
    """Return the float model of a Q/DQ model, and the recipe with the scales of its pairs.

    Args:
        quantized: the Q/DQ model.
        path: its file, for names and messages.
        keep_rounding: keep the rounding of tensors that float operators read through a pair.

    Raises:
        ModelError: the model is invalid, uses integer operators, or has pairs that cannot be
            removed.
        ExportError: Ascend cannot use the pairs of any layer.
    """
    preprocess = read_metadata_preprocess(quantized, path)
    model = prepare_qdq_model(quantized)
    # layer -> scales of its pairs; other layer -> why Ascend cannot use its pairs
    qdq_records, float_reasons = _read_qdq_layers(Graph(model))
    # Only the float model shows which layers fit the hardware. A layer that does not fit becomes a
    # float operator, whose input may keep its rounding. So the pairs are removed again, without the
    # record of that layer, until all layers with a record fit.
    while True:
        unpaired = remove_pairs(model, qdq_records, keep_rounding=keep_rounding)
        loaded = load(unpaired.model, fold_batchnorm=False)
        float_model, graph = prepare_model(loaded.model)
        layers, rounding_reasons, refusals = _quantize_layers(float_model, graph, qdq_records)
        float_reasons |= refusals
        if not layers:
            raise _no_layers_error(path, float_reasons | graph.float_reasons)
        if len(layers) == len(qdq_records):
            break
        qdq_records = {name: qdq_records[name] for name in layers}

    recipe = Recipe(
        model=float_model,
        graph=graph,
        records={name: quant_layer.record for name, quant_layer in layers.items()},
        layers=layers,
        method=f"the scales of {path}",
        # for int8 layers too, whose entries are not used
        float_reasons={
            name: float_reasons.get(name, "its pairs are gone") for name in graph.layers
        },
        notes=(
            *_conversion_notes(path, graph, layers, rounding_reasons),
            *_float_pair_notes(unpaired.pairs_read_in_float, keep_rounding=keep_rounding),
        ),
    )
    loaded = replace(loaded, model=float_model, name=path.stem, metadata_preprocess=preprocess)
    return loaded, recipe


def _no_layers_error(path: Path, float_reasons: Mapping[str, str]) -> ExportError:
    """Return the error for a Q/DQ model of which no layer can be int8, with reasons of some nodes.

    `float_reasons`: node -> why it stays in float.
    """
    reasons = [f"{name}: {reason}" for name, reason in float_reasons.items()]
    examples = "; ".join(reasons[:_SHOWN_NAMES]) or "no layer of a type that Ascend has"
    return ExportError(
        f"a Q/DQ model must have a layer whose pairs Ascend can use, got none in {path}"
        f" ({examples}); give the float model to calib8 build"
    )


def _read_qdq_layers(index: Graph) -> tuple[Records, dict[str, str]]:
    """Read scales and offsets of all layers from their Q/DQ pairs.

    Returns:
        Layer name -> its record; name of each other layer -> why Ascend cannot use its pairs.
    """
    records = {}
    float_reasons = {}
    for node in index.nodes:
        if node.op_type not in LAYER_OPS:
            continue
        try:
            input_pair = input_grid(node, index)  # scale and zero point of the pair on its input
            _refuse_unless_8_bit(input_pair)
            weight_scales = np.ones(1, np.float32)
            if node.op_type != "AveragePool":  # a pool has no weight
                weight_scales = _read_weight_scales(node, index)
        except UnfitError as error:
            float_reasons[node.name] = str(error)
            continue
        records[node.name] = LayerRecord(
            scale_d=np.float32(input_pair.scale.flat[0]),
            offset_d=int(input_pair.int8_zero.flat[0]),
            scale_w=weight_scales,
        )
    return records, float_reasons


def _read_weight_scales(node: onnx.NodeProto, index: Graph) -> Float32Array:
    """Return the scales of a layer's weight, [C_out] or [1]."""
    weight_pair, scales = weight_grid(node, index)
    _refuse_unless_8_bit(weight_pair)
    if weight_pair.int8_zero.any():
        raise UnfitError("its weight has a zero point, and Ascend's have none")
    return scales


def _refuse_unless_8_bit(grid: PairGrid) -> None:
    """Raise UnfitError for a pair whose integers have other than 8 bits."""
    if not grid.is_8_bit:
        raise UnfitError(f"it is quantized to {grid.dtype}, and Ascend's layers to int8")


def _quantize_layers(
    model: onnx.ModelProto, graph: LayerGraph, qdq_records: Records
) -> tuple[QuantLayers, dict[str, str], dict[str, str]]:
    """Quantize the layers that have a record, as far as they fit the hardware.

    Args:
        model: the float model of the Q/DQ model.
        graph: its layers.
        qdq_records: layer -> scales and offset of its pairs.

    Returns:
        Layer name -> its integers and scales; layer name -> why its weight was rounded again,
        `_ONE_MATRIX_SCALE` or `_NO_ROOM_FOR_SUMS`, "" if its integers are the model's own; name of
        each refused layer -> why it does not fit the hardware.
    """
    index = Graph(model)
    records = {}
    rounding_reasons = {}
    refusals = {}
    for name, layer in graph.select(qdq_records).items():
        record = qdq_records[name]
        if layer.symmetric_only and record.offset_d:
            reason = f"a 3-D convolution takes no activation offset, got {record.offset_d}"
            refusals[name] = reason
            continue
        weight_scales, rounding_reasons[name] = _fit_weight_scales(layer, record, index)
        records[name] = replace(record, scale_w=weight_scales, has_weight=bool(layer.weight))
    quant_layers, hardware_refusals = quantize_fitting_layers(model, graph, records)
    return quant_layers, rounding_reasons, refusals | hardware_refusals


def _fit_weight_scales(layer: Layer, record: LayerRecord, index: Graph) -> tuple[Float32Array, str]:
    """Return the weight scales of a Q/DQ layer in a form that Ascend takes.

    They are the model's own if Ascend takes them. Else they are new ones, with which the weight is
    rounded again.

    Args:
        layer: the layer.
        record: has the model's own scales of its weight, and that of its input.
        index: has the values of weight and bias.

    Returns:
        (scales, reason for new ones): `_ONE_MATRIX_SCALE` or `_NO_ROOM_FOR_SUMS`; "" if they are
        the model's own.
    """
    channel_scales = record.scale_w
    if not layer.channel_wise:  # such as a MatMul
        if np.all(channel_scales == channel_scales[0]):
            return channel_scales[:1], ""
        rows = read_weight_rows(index, layer)
        return arq(rows, channel_wise=False), _ONE_MATRIX_SCALE  # AMCT's search on the weights
    if not layer.bias or channel_scales.size == 1:
        return channel_scales, ""

    # For a channel of nearly zero weights, quantizers let the integer bias reach the limit of
    # int32. Ascend adds the products to it, which would then overflow: the scale is enlarged
    # until the bias takes at most half of int32.
    bias = read_constant(index, layer.bias).reshape(-1)
    min_scales = np.abs(bias.astype(np.float64)) / (float(record.scale_d) * _HALF_OF_INT32)
    enlarged_scales = np.maximum(channel_scales, min_scales.astype(np.float32))
    if (enlarged_scales == channel_scales).all():
        return channel_scales, ""
    return enlarged_scales, _NO_ROOM_FOR_SUMS


def _conversion_notes(
    path: Path, graph: LayerGraph, layers: Collection[str], rounding_reasons: Mapping[str, str]
) -> list[str]:
    """Return notes on the conversion of a Q/DQ model.

    Args:
        path: its file.
        graph: the layers that could be int8.
        layers: names of those that are.
        rounding_reasons: layer name -> why its weight was rounded again, `_ONE_MATRIX_SCALE` or
            `_NO_ROOM_FOR_SUMS`; "" if its integers are the model's own.
    """
    total = len(graph.layers) + len(graph.float_reasons)
    notes = [
        f"Scales: those of {path}, for {len(layers)} of {counted(total, 'layer')} that Ascend could"
        " run in int8; nothing was calibrated."
    ]
    for reason in (_ONE_MATRIX_SCALE, _NO_ROOM_FOR_SUMS):
        names = [name for name in layers if rounding_reasons[name] == reason]
        if names:
            # the reason ends in "layers ... rounded again:", so that their number follows
            notes.append(f"{reason} {len(names)}: {', '.join(names[:_SHOWN_NAMES])}.")
    if len(notes) > 1:
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
_NANO_CHIPS = "which atc takes for Nano chips (Ascend035) alone"
_INT4_CHIPS = "for which atc makes no .om on chips without AscendQuant to int4 (Ascend910B has it)"
# hicann/amct, PackInt4WeightPass; no code in hicann/ge unpacks it
_PACKED_INT4 = (
    "two per byte along the input channels: AMCT's own layout, which the open-source parts of atc"
    " do not read"
)
_PRECISION_FLAGS = (
    *("--precision_mode", "--precision_mode_v2", "--keep_dtype", "--modify_mixlist"),
    "--customize_dtypes",
)
_FORCED_FLOAT16 = (
    "scale_w * scale_d is truncated to the 10 mantissa bits that Nano chips (Ascend035) read"
)


def bit_width_notes(records: Records) -> Iterator[str]:
    """Yield notes on layers with other than 8 bits, and the chips that accept them.

    `records`: int8 layer -> its scales and bit widths.
    """
    for bits, chips in ((16, _NANO_CHIPS), (4, _INT4_CHIPS)):
        names = [name for name, record in records.items() if record.act_bits == bits]
        if names:
            yield f"Activations of {summarize_layers(names)} are of {bits} bits, {chips}."
    if any(record.act_bits != 8 for record in records.values()):
        yield "The Q/DQ model has those layers in float: AMCT's convert takes only int8."
    names = [
        name for name, record in records.items() if record.has_weight and record.weight_bits == 4
    ]
    if names:
        yield f"Weights of {summarize_layers(names)} are of 4 bits, {_PACKED_INT4}."
    if any(record.force_fp16 for record in records.values()):
        yield f"FORCE_FP16_QUANT: {_FORCED_FLOAT16}."


def precision_notes(recipe: Recipe, float16_tensors: Collection[str]) -> Iterator[str]:
    """Yield notes on the types of layers, and the chips that accept them or gain from them.

    Args:
        recipe: the model and its int8 layers.
        float16_tensors: tensors that are float16 in the model's file.
    """
    layers = [quant_layer.layer for quant_layer in recipe.layers.values()]
    product_count = sum(layer.two_activations for layer in layers)
    if product_count:
        yield (
            f"MatMuls of two activations in int8: {product_count}. Huawei says that this gains on"
            " Atlas A2, A3 and 200I/500 A2 alone, and loses accuracy on other chips."
        )
    yield from bit_width_notes(recipe.records)
    float16_layers = [layer.name for layer in layers if layer.output in float16_tensors]
    if float16_layers:
        yield (
            f"{summarize_layers(float16_layers)} read and give float16, as in the file; calibration"
            " and evaluation ran in float32."
        )


def float16_overflow_alerts(recipe: Recipe, atc_flags: Collection[str]) -> Iterator[str]:
    """Yield an alert on the float nodes whose values exceed float16, in which atc computes them.

    `atc_flags`: flags of atc; with one that sets the precision there is no alert.
    """
    if any(flag.partition("=")[0] in _PRECISION_FLAGS for flag in atc_flags):
        return
    largest_by_tensor = {
        tensor: max(-scale.observed_min, scale.observed_max)
        for tensor, scale in recipe.ranges.items()
    }
    # node -> why it must not compute in float16
    reason_by_node = find_float16_overflows(
        Graph(recipe.model), largest_by_tensor, int8_nodes=recipe.layers
    )
    if reason_by_node:
        first_reason = next(iter(reason_by_node.values()))  # one example suffices
        yield (
            "atc computes in float16 what is not int8, which is too narrow for"
            f" {', '.join(reason_by_node)}: {first_reason}; write these names to a file, one per"
            " line, and give --atc-flag=--keep_dtype=FILE"
        )


def shared_weight_notes(names: Collection[str], model: str) -> Iterator[str]:
    """Yield a note on layers with shared weights, and the model that AMCT needs for them."""
    if names:
        yield (
            f"{summarize_layers(names)} share weights with other nodes, and have copies of them"
            " in the written models. AMCT itself refuses shared weights: with this config or record"
            f" give it {model}_modified_model.onnx."
        )
