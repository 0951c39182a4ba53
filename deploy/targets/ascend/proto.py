"""Protobuf messages of Ascend's text files, as tables that become descriptors on first use.

The files are AMCT's simplified configuration (.cfg), its record (scale_offset_record), and ATC's
AIPP and compression options. The tables are complete, so that fields which calib8 never writes can
be read. Field names and numbers are AMCT's and GE's, whose own tools parse the files. Sources:
hicann/amct calibration_config and scale_offset_record; hicann/ge insert_op.proto; ATC's
--compression_optimize_conf page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from google.protobuf.message import Message

_PACKAGE = "calib8.ascend"


@dataclass(frozen=True, slots=True)
class ProtoField:
    """One field: `kind` is a scalar type, or the name of a message or enum in the table."""

    name: str
    number: int
    kind: str
    repeated: bool = False
    oneof: str = ""


def _one(kind: str, **numbers: int) -> tuple[ProtoField, ...]:
    return tuple(ProtoField(name, number, kind) for name, number in numbers.items())


def _many(kind: str, **numbers: int) -> tuple[ProtoField, ...]:
    return tuple(ProtoField(name, number, kind, repeated=True) for name, number in numbers.items())


def _choice(oneof: str, *fields: tuple[str, int, str]) -> tuple[ProtoField, ...]:
    return tuple(ProtoField(name, number, kind, oneof=oneof) for name, number, kind in fields)


_INPUT_FORMATS = (
    *("UNDEFINED", "YUV420SP_U8", "XRGB8888_U8", "RGB888_U8", "YUV400_U8", "NC1HWC0DI_FP16"),
    *("NC1HWC0DI_S8", "ARGB8888_U8", "YUYV_U8", "YUV422SP_U8", "AYUV444_U8", "RAW10", "RAW12"),
    *("RAW16", "RAW24", "RGB16", "RGB20", "RGB24", "RGB8_IR", "RGB16_IR", "RGB24_IR"),
)
ENUMS: dict[str, dict[str, int]] = {
    "FakequantPrecisionMode": {"FORCE_FP16_QUANT": 1},
    "DataType": {"INT8": 1, "INT16": 2},
    "AippMode": {"undefined": 0, "static": 1, "dynamic": 2},
    "InputFormat": {name: number for number, name in enumerate(_INPUT_FORMATS)},
    "MultiShapeMode": {"batch": 0, "resolution": 1},
    # without AMCT's UNDEFINED = 0, which it never writes: the name clashes with InputFormat's
    "AttrType": {"FLOAT": 1, "INT": 2, "STRING": 3, "FLOATS": 4, "INTS": 5, "STRINGS": 6},
}

_ACTIVATIONS = _choice(
    "activations", ("ifmr_quantize", 100, "FMRQuantize"), ("hfmg_quantize", 101, "HFMGQuantize")
)
_CALIBRATION: tuple[ProtoField, ...] = (
    *_choice("weights", ("arq_quantize", 13, "ARQuantize"), ("ada_quantize", 15, "ADAquantize")),
    *_ACTIVATIONS,
    *_choice("balancer", ("dmq_balancer", 200, "DMQBalancer")),
)

MESSAGES: dict[str, tuple[ProtoField, ...]] = {
    "AMCTConfig": (
        *_one("uint32", batch_num=1),
        *_one("bool", activation_offset=2, joint_quant=3, do_fusion=200),
        *_many("string", skip_layers=10, skip_layer_types=11, skip_fusion_layers=201),
        *_one("FakequantPrecisionMode", fakequant_precision_mode=21),
        *_one("CalibrationConfig", common_config=50),
        *_many("OverrideLayerType", override_layer_types=51),
        *_many("OverrideLayer", override_layer_configs=100),
        *_many("TensorQuantize", tensor_quantize=300),  # amct_onnx's; its number is not public
    ),
    "TensorQuantize": (
        *_one("string", layer_name=1),
        *_one("uint32", input_index=2),
        *_ACTIVATIONS,
    ),
    "OverrideLayerType": (
        *_one("string", layer_type=1),
        *_one("CalibrationConfig", calibration_config=2),
    ),
    "OverrideLayer": (
        *_one("string", layer_name=1),
        *_one("CalibrationConfig", calibration_config=2),
    ),
    "CalibrationConfig": _CALIBRATION,
    "ARQuantize": (*_one("bool", channel_wise=1), *_one("uint32", quant_bits=10)),
    "ADAquantize": (
        *_one("uint32", num_iteration=1),
        *_one("float", reg_param=2, beta_range_start=3, beta_range_end=4, warm_start=5),
        *_one("bool", channel_wise=10),
    ),
    "DMQBalancer": _one("float", migration_strength=1),
    "FMRQuantize": (
        *_one("float", search_range_start=1, search_range_end=2, search_step=3),
        *_one("float", max_percentile=4, min_percentile=5),
        *_one("bool", asymmetric=6),
        *_one("DataType", dst_type=10),
    ),
    "HFMGQuantize": (
        *_one("uint32", num_of_bins=1),
        *_one("bool", asymmetric=2),
        *_one("DataType", dst_type=10),
    ),
    "ScaleOffsetRecord": (*_many("MapFiledEntry", record=1), *_many("PruneRecord", prune_record=2)),
    "MapFiledEntry": (
        *_one("string", key=1),
        *_one("SingleLayerRecord", value=2),
        *_one("SingleLayerKVCacheRecord", kv_cache_value=3),
    ),
    "SingleLayerKVCacheRecord": (*_many("float", scale=1), *_many("int32", offset=2)),
    "PruneRecord": (
        *_many("PruneNode", producer=1, consumer=2),
        *_one("PruneNode", selective_prune=3),
    ),
    "PruneNode": (*_one("string", name=1), *_many("AttrProto", attr=2)),
    "AttrProto": (
        *_one("string", name=1),
        *_one("AttrType", type=2),
        *_one("float", f=3),
        *_one("int64", i=4),
        *_one("bytes", s=5),
        *_many("float", floats=6),
        *_many("int64", ints=7),
        *_many("bytes", strings=8),
    ),
    "SingleLayerRecord": (
        *_one("float", scale_d=1),
        *_one("int32", offset_d=2),
        *_many("float", scale_w=3),
        *_many("int32", offset_w=4),
        *_many("uint32", shift_bit=5),
        *_many("float", tensor_balance_factor=6),
        *_one("bool", skip_fusion=9, is_tensor_quantize=100),
        *_one("string", dst_type=10, act_type=11, wts_type=12, fakequant_precision_mode=13),
        *_one("float", scale_h=21),
        *_one("int32", offset_h=22),
        *_many("float", scale_r=23),
        *_many("int32", offset_r=24),
        *_one("string", op_data_type=101),
    ),
    "InsertNewOps": (
        *_many("AippOpParams", aipp_op=1),
        *_many("MultiShapeOpParams", multi_shape_op=2),
    ),
    "AippOpParams": (
        *_one("AippMode", aipp_mode=1),
        *_one("uint32", related_input_rank=2, max_src_image_size=4),
        *_many("uint32", input_edge_idx=3),
        *_one("bool", support_rotation=5),
        *_one("string", related_input_name=6),
        *_one("int32", mean_chn_0=10, mean_chn_1=11, mean_chn_2=12, mean_chn_3=19),
        *_one("float", min_chn_0=13, min_chn_1=14, min_chn_2=15, min_chn_3=20),
        *_many("float", var_reci_chn_0=16, var_reci_chn_1=17, var_reci_chn_2=18),
        *_many("float", var_reci_chn_3=21),
        *_many("int32", matrix_r0c0=30, matrix_r0c1=31, matrix_r0c2=32),
        *_many("int32", matrix_r1c0=33, matrix_r1c1=34, matrix_r1c2=35),
        *_many("int32", matrix_r2c0=36, matrix_r2c1=37, matrix_r2c2=38),
        *_many("int32", output_bias_0=39, output_bias_1=40, output_bias_2=41),
        *_many("int32", input_bias_0=42, input_bias_1=43, input_bias_2=44),
        *_one("uint32", raw_rgbir_to_f16_n=45),
        *_one("InputFormat", input_format=51),
        *_one("bool", csc_switch=52, rbuv_swap_switch=54, ax_swap_switch=55),
        *_one("float", cpadding_value=53),
        *_one("bool", single_line_mode=56),
        *_one("int32", src_image_size_w=57, src_image_size_h=58),
        *_one("bool", crop=59, resize=64, padding=67),
        *_one("int32", load_start_pos_w=60, load_start_pos_h=61),
        *_one("int32", crop_size_w=62, crop_size_h=63),
        *_one("int32", resize_output_w=65, resize_output_h=66),
        *_one("int32", left_padding_size=68, right_padding_size=69),
        *_one("int32", top_padding_size=70, bottom_padding_size=71),
        *_one("float", padding_value=72),
    ),
    "MultiShapeOpParams": (
        *_one("MultiShapeMode", mode=1),
        *_one("uint32", related_input_rank=2),
        *_many("uint32", batch_list=11),
    ),
    "CompressionOptions": (
        *_one("bool", enable_first_layer_quantization=1),
        *_one("AtcCalibration", calibration=2),
    ),
    "AtcCalibration": (
        *_one("string", input_data_dir=1, input_shape=2, config_file=3),
        *_one("string", infer_soc=4, infer_ip=7, log=9),
        *_one("uint32", infer_aicore_num=5, infer_device_id=6, infer_port=8),
    ),
}

# keys that are not in the simplified configuration -> the place they belong to
FOREIGN_KEYS = {
    "nuq_config": "a key of AMCT's binary packages",
    "version": "a key of the quant config JSON",
    "conv_calibration_config": "an old key; write override_layer_types for Conv",
    "fc_calibration_config": "an old key; write override_layer_types for Gemm and MatMul",
}


def message_class(name: str) -> Any:
    """Return the protobuf class of a message in `MESSAGES` (proto2, so unset fields are known)."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(
        name="calib8/ascend.proto", package=_PACKAGE, syntax="proto2"
    )
    for enum, values in ENUMS.items():
        entry = file.enum_type.add(name=enum)
        for value, number in values.items():
            entry.value.add(name=value, number=number)
    for message, fields in MESSAGES.items():
        _describe(file.message_type.add(name=message), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _describe(message: Any, fields: tuple[ProtoField, ...]) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto

    groups = sorted({f.oneof for f in fields if f.oneof})
    for group in groups:
        message.oneof_decl.add(name=group)
    for spec in fields:
        label = Proto.LABEL_REPEATED if spec.repeated else Proto.LABEL_OPTIONAL
        entry = message.field.add(name=spec.name, number=spec.number, label=label)
        if spec.kind in MESSAGES or spec.kind in ENUMS:
            kind = Proto.TYPE_MESSAGE if spec.kind in MESSAGES else Proto.TYPE_ENUM
            entry.type, entry.type_name = kind, f".{_PACKAGE}.{spec.kind}"
        else:
            entry.type = getattr(Proto, f"TYPE_{spec.kind.upper()}")
        if spec.oneof:
            entry.oneof_index = groups.index(spec.oneof)


def parse_text(name: str, text: str, what: str) -> Message:
    """Parse the text of file `what` as message `name`; of a field set twice the last one counts."""
    from google.protobuf import text_format

    message: Message = message_class(name)()
    try:
        return text_format.Merge(text, message)
    except (text_format.ParseError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{what} must be protobuf text of {name}, got: {_hint(error)}") from None


def print_text(message: Message) -> str:
    """Return a message as protobuf text, fields ordered by number."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message))


def suggest_name(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return "did you mean ...?" with the nearest known name, or the list of known names."""
    return did_you_mean(word, known, f"known: {', '.join(sorted(known)[:24])}")


def _hint(error: Exception) -> str:
    """Return the parser's error, with the nearest known name if a field is unknown."""
    text = " ".join(str(error).split())[:300]
    if 'has no field named "' not in text:
        return text
    message = text.split('type "')[1].split('"')[0].rsplit(".", 1)[-1]
    word = text.split('field named "')[1].split('"')[0]
    if word in FOREIGN_KEYS:
        return f"{word!r} in {message}, which is {FOREIGN_KEYS[word]}"
    place = text.split(" : ")[0] if " : " in text else ""
    known = [f.name for f in MESSAGES.get(message, ())]
    return (
        f"{place + ': ' if place else ''}no key {word!r} in {message}; {suggest_name(word, known)}"
    )
