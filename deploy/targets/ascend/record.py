"""AMCT's record file (scale_offset_record, protobuf text): the scales of each quantized layer.

Also here: the IFMR or HFMG search of a layer's activation scale, and the clip range of that scale.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibrators.amct.arq import FLT_EPSILON, ascend_clip_range, ascend_range
from calibrators.amct.hfmg import HfmgHistogram, hfmg
from calibrators.amct.ifmr import AscendScale, IfmrHistogram, IfmrParams, ifmr_streaming
from calibrators.grids import Float32Array, Int8Array
from calibrators.scales import Scale
from calibrators.statistics import Recorder
from deploy.errors import ConfigError
from deploy.targets.ascend.config import no_layer_reason
from deploy.targets.ascend.config_keys import (
    IFMR_RULES,
    INT16_LAYERS,
    LAYERS_BY_WEIGHT_BITS,
    ActivationParams,
    LayerConfig,
    add_place_to_errors,
    allows_activation_bits,
    allows_weight_bits,
    check_tensor_input,
)
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.proto import message_class, parse_text, print_text

_MIN_SCALE = 2.0**-52  # 2.22e-16; AMCT: scales within [DBL_EPSILON, 1 / DBL_EPSILON]
# field of a bit width -> the widths that AMCT reads there; a missing or "UNSET" field is 8
_WIDTHS_BY_FIELD = {"dst_type": (4, 8), "act_type": (4, 8, 16), "wts_type": (4, 6, 7, 8)}
_FORCE_FP16 = "FORCE_FP16_QUANT"

InputRecorder = HfmgHistogram | IfmrHistogram

NO_DMQ_FACTORS = np.zeros(0, np.float32)  # DMQ factors of a layer that DMQ does not balance


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """Scales of one layer; q = clip(rne(x / scale + offset)).

    For a MatMul of two activations, scale_d is the first factor's and scale_w the second's.

    Attributes:
        scale_d: activation scale.
        scale_w: weight scales, float32 [C_out] or [1]; empty if the record has none.
        dmq_factors: DMQ factors by input channel, float32 [C_in]; empty without DMQ.
        has_weight: the layer has a weight (AveragePool has none, but records scale_w 1).
        skip_fusion: the scales are for a Conv whose BatchNormalization is not folded.
        is_node_input: the record is for an input of an Add or MaxPool (tensor_quantize); it has no
            scale_w.
        rounded_weight: AdaRound's integers, int8, output channels first; None for rounding to
            nearest. AMCT stores them in its modified float model, not in the record.
        force_fp16: the dequantization scales are truncated for Nano chips; AMCT takes this from a
            record, but does not write it there.
    """

    scale_d: np.float32
    offset_d: int = 0
    scale_w: Float32Array
    dmq_factors: Float32Array = field(default_factory=lambda: NO_DMQ_FACTORS)
    has_weight: bool = True
    skip_fusion: bool = False
    rounded_weight: Int8Array | None = None
    is_node_input: bool = False
    act_bits: int = 8
    weight_bits: int = 8
    force_fp16: bool = False


# layer name, or '<node>:<index>' of a tensor_quantize input -> its record
Records = Mapping[str, LayerRecord]


def write_record(records: Records, float16_layers: Collection[str] = ()) -> str:
    """Return the text of layer name -> record, in the model's order, as AMCT writes it.

    `float16_layers`: names of the layers whose input and output are float16.
    """
    message = message_class("ScaleOffsetRecord")()
    for name, record in records.items():
        value = message.record.add(key=name).value
        value.scale_d = float(record.scale_d)
        value.offset_d = record.offset_d
        value.act_type = f"INT{record.act_bits}"
        value.scale_w.extend(record.scale_w.tolist())
        value.offset_w.extend([0] * record.scale_w.size)
        value.tensor_balance_factor.extend(record.dmq_factors.tolist())
        if record.skip_fusion:
            value.skip_fusion = True
        if record.is_node_input:
            value.is_tensor_quantize = True
        if record.has_weight and record.scale_w.size:
            value.wts_type = f"INT{record.weight_bits}"
        if name in float16_layers:
            value.op_data_type = "FLOAT16"
        if record.force_fp16:
            value.fakequant_precision_mode = _FORCE_FP16
    return print_text(message)


def read_record(text: str, file_name: str = "the record") -> Records:
    """Parse AMCT's record file; return layer name -> its scales and offsets, checked as by AMCT.

    Entries without scales of a layer, as those of a language model's cache, are left out.

    `file_name`: for messages.

    Raises:
        ConfigError: text that does not parse, an unknown or missing field, an invalid value.
    """
    message: Any = parse_text("ScaleOffsetRecord", text, file_name)
    # a record of pruning alone is valid; it has no scales
    if not message.record and not message.prune_record:
        raise ConfigError(f"{file_name} must hold at least one layer, got none; calibrate first")
    records: dict[str, LayerRecord] = {}
    for entry in message.record:
        if not entry.key:
            raise ConfigError(
                f"each record must hold a key (a layer's name), got one without in {file_name}"
            )
        if entry.key in records:
            raise ConfigError(f"{file_name} must hold each layer once, got {entry.key!r} again")
        if entry.HasField("kv_cache_value") and not entry.HasField("value"):
            continue  # scales of a language model's cache belong to no layer
        with add_place_to_errors(f"layer {entry.key!r} of {file_name}"):
            records[entry.key] = _read_layer(entry.value)
    return records


def describe_ignored_entries(text: str, file_name: str) -> tuple[str, ...]:
    """Describe the record's entries that calib8 does not deploy, such as "2 x KV cache"."""
    message: Any = parse_text("ScaleOffsetRecord", text, file_name)
    count_by_kind = {
        "KV cache": sum(entry.HasField("kv_cache_value") for entry in message.record),
        "recurrent layer": sum(entry.value.HasField("scale_h") for entry in message.record),
        "pruning": len(message.prune_record),
    }
    return tuple(f"{count} x {kind}" for kind, count in count_by_kind.items() if count)


def check_record(records: Records, graph: LayerGraph) -> None:
    """Check a complete record (AMCT's file of scales and offsets) against its model.

    Args:
        records: layer name, or '<node>:<index>' of an input -> its entry in the file.
        graph: the layers of the model.

    Raises:
        ConfigError: a layer that the model lacks or cannot quantize; missing scales, or a wrong
            number of them.
    """
    layer_by_name = graph.layer_by_name  # has inputs too, by the name '<node>:<index>'
    for name, record in records.items():
        if record.is_node_input:
            node, _, index = name.rpartition(":")
            if not (node and index.isdecimal()):
                raise ConfigError(
                    "a record with is_tensor_quantize must be of an input, '<layer>:<index>', got"
                    f" {name!r}; take the key out of a layer's record"
                )
            check_tensor_input(name, graph)  # raises if `graph` does not have this input
        elif name not in layer_by_name:
            raise ConfigError(f"layer {name!r} of the record {no_layer_reason(name, graph)}")
        _check_weight_scales(name, record, layer_by_name[name])
        _check_bit_widths(name, record, layer_by_name[name])


def _check_bit_widths(name: str, record: LayerRecord, layer: Layer) -> None:
    """Refuse widths of activations or weights that a layer of this type cannot have."""
    if not allows_activation_bits(layer, record.act_bits):
        raise ConfigError(
            f"act_type INT16 is for {INT16_LAYERS}, got {layer.kind} in layer {name!r}"
        )
    if not allows_weight_bits(layer, record.weight_bits):
        bits = record.weight_bits
        raise ConfigError(
            f"wts_type INT{bits} is for {LAYERS_BY_WEIGHT_BITS[bits]}, got {layer.kind} with"
            f" {layer.channels_in} input channels and {layer.group} groups in layer {name!r}"
        )
    is_node_input = layer.input_index is not None  # of tensor_quantize
    is_int8_only = is_node_input or layer.two_activations
    if is_int8_only and (record.act_bits, record.weight_bits) != (8, 8):
        raise ConfigError(
            "inputs of tensor_quantize and MatMuls of two activations are INT8, got another type"
            f" in {name!r}"
        )


def _check_weight_scales(name: str, record: LayerRecord, layer: Layer) -> None:
    """Refuse weight scales, or an input's offset, that a layer of this type cannot have.

    A `Layer` may also be a single input of a node that computes in float, which tensor_quantize
    rounds to int8. It has no weight, and so no weight scales.
    """
    scale_count = record.scale_w.size
    if layer.input_index is not None:  # an input, whose record must say so
        if scale_count or not record.is_node_input:
            raise ConfigError(
                "the record of an input must hold is_tensor_quantize: true and no scale_w, got"
                f" is_tensor_quantize: {record.is_node_input} and {scale_count} scale_w in {name!r}"
            )
    elif layer.two_activations and record.offset_d:
        raise ConfigError(
            f"a MatMul of two activations takes offset_d 0, got {record.offset_d} in layer {name!r}"
        )
    elif layer.kind == "AveragePool":
        if record.scale_w.tolist() not in ([], [1.0]):
            raise ConfigError(
                f"layer {name!r} is an AveragePool and takes no scale_w, got {scale_count}"
            )
    elif not scale_count:
        raise ConfigError(f"layer {name!r} must hold scale_w and offset_w, got none")
    elif scale_count > 1 and not layer.channel_wise:
        raise ConfigError(f"a {layer.kind} takes one scale_w, got {scale_count} in layer {name!r}")


def _read_layer(message: Any) -> LayerRecord:
    """Return a layer's entry of AMCT's record file, its scales and offsets, after AMCT's checks.

    The suffix _d is that of the layer's input (data), _w that of its weight.

    `message`: the entry's protobuf message.
    """
    _check_scales_and_offsets(message)
    # Bits of a type, 0 if it is unset. All three are read, so that each is checked. dst_type is for
    # both activations and weights, and counts before the other two.
    dst_type_bits = _read_bits(message, "dst_type")
    act_type_bits = _read_bits(message, "act_type")
    wts_type_bits = _read_bits(message, "wts_type")
    act_bits = dst_type_bits or act_type_bits or 8
    weight_bits = dst_type_bits or wts_type_bits or 8
    low, high = ascend_range(act_bits)
    if not low <= message.offset_d <= high:
        raise ConfigError(
            f"offset_d must be in [{low}, {high}] with {act_bits} bits, got {message.offset_d}"
        )
    mode = message.fakequant_precision_mode
    if mode not in ("", "DEFAULT", "UNSET", _FORCE_FP16):  # the first three mean the default
        raise ConfigError(
            f"fakequant_precision_mode must be {_FORCE_FP16} or DEFAULT, got {mode!r}"
        )
    if message.op_data_type not in ("", "FLOAT32", "FLOAT16"):
        raise ConfigError(f"op_data_type must be FLOAT32 or FLOAT16, got {message.op_data_type!r}")
    scale_w = np.array(message.scale_w, np.float32)
    # AMCT writes scale 1 without a type for a pool, which has no weight
    is_pool = message.wts_type == "" and scale_w.tolist() == [1.0]
    return LayerRecord(
        scale_d=np.float32(message.scale_d),
        offset_d=message.offset_d,
        scale_w=scale_w,
        dmq_factors=_read_dmq_factors(message),
        has_weight=not is_pool,
        skip_fusion=message.skip_fusion,
        is_node_input=message.is_tensor_quantize,
        act_bits=act_bits,
        weight_bits=weight_bits,
        force_fp16=mode == _FORCE_FP16,
    )


def _check_scales_and_offsets(message: Any) -> None:
    """Refuse scales or offsets of a layer that are missing, too many, or out of range.

    The suffix _d is that of the layer's input (data), _w that of its weight.

    `message`: the layer's entry in AMCT's record file, as a protobuf message.
    """
    if len(message.offset_w) != len(message.scale_w):
        raise ConfigError(
            f"scale_w and offset_w must be as many, got {len(message.scale_w)} and"
            f" {len(message.offset_w)}"
        )
    for offset in message.offset_w:
        if offset:  # int8 weights are symmetric on Ascend
            raise ConfigError(f"offset_w must be 0, got {offset}")
    if not (message.HasField("scale_d") and message.HasField("offset_d")):
        raise ConfigError(
            "a layer must hold scale_d and offset_d, got one without; the calibration was not"
            " complete, run it again"
        )
    for scale in (*message.scale_w, message.scale_d):
        if not _MIN_SCALE <= scale <= 1 / _MIN_SCALE:
            raise ConfigError(f"a scale must be in [2.22e-16, 4.5e15], got {scale}")
    if message.shift_bit:
        raise ConfigError("shift_bit is not supported, got one; delete it")


def _read_dmq_factors(message: Any) -> Float32Array:
    """Return the DMQ factors of a layer, [C_in], or [] without DMQ."""
    dmq_factors = np.array(message.tensor_balance_factor, np.float32)
    if not ((dmq_factors > FLT_EPSILON) & (dmq_factors < 1 / FLT_EPSILON)).all():
        raise ConfigError("a tensor_balance_factor must be in (1.2e-7, 8.4e6), got one outside")
    return dmq_factors


def _read_bits(message: Any, field: str) -> int:
    """Return the bits of a type such as INT8; 0 if the type is unset."""
    type_name = getattr(message, field)
    if type_name in ("", "UNSET"):
        return 0
    bits_by_type = {f"INT{bits}": bits for bits in _WIDTHS_BY_FIELD[field]}
    if type_name not in bits_by_type:
        raise ConfigError(f"{field} must be one of {', '.join(bits_by_type)}, got {type_name!r}")
    return bits_by_type[type_name]


def ifmr_params(activation: ActivationParams) -> IfmrParams:
    """Return the parameters of IFMR for a layer's activation settings."""
    return IfmrParams(
        **{key: getattr(activation, key) for key in IFMR_RULES},
        bits=activation.num_bits,
        with_offset=bool(activation.asymmetric),
    )


def search_activation_scale(recorder: Recorder, activation: ActivationParams) -> AscendScale:
    """Run a layer's activation search on the recorded statistics; return scale and offset."""
    if isinstance(recorder, HfmgHistogram):
        with_offset = bool(activation.asymmetric)
        return hfmg(recorder, bits=activation.num_bits, with_offset=with_offset)
    assert isinstance(recorder, IfmrHistogram)
    return ifmr_streaming(recorder, ifmr_params(activation))


def clip_range(input_scale: AscendScale, recorder: InputRecorder, entry: LayerConfig) -> Scale:
    """Return the clip range of a layer's activation scale, with the range that was observed."""
    lo, hi = ascend_clip_range(input_scale.scale, input_scale.offset, entry.activation.num_bits)
    observed_min, observed_max = recorder.extremes
    return Scale(
        lo=lo,
        hi=hi,
        amax=max(-lo, hi),
        observed_min=observed_min,
        observed_max=observed_max,
        method=entry.activation.act_algo,
    )
