"""AMCT's simplified configuration (.cfg, protobuf text) to a quant config.

As in AMCT, one section alone counts for a layer: its own in override_layer_configs, else that of
its type in override_layer_types, else common_config. AMCT's defaults fill in what that section
leaves out; only `asymmetric` then comes from common_config, between equal algorithms.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

from deploy.errors import ConfigError
from deploy.targets.ascend.config import no_layer_reason, resolve_config
from deploy.targets.ascend.config_keys import (
    ACTIVATION_RULES,
    LAYER_RULES,
    LAYERS_BY_WEIGHT_BITS,
    MODEL_RULES,
    WEIGHT_RULES,
    ActivationParams,
    LayerConfig,
    QuantConfig,
    WeightParams,
    activation_width_notes,
    add_place_to_errors,
    allows_activation_bits,
    allows_weight_bits,
    check_value,
    check_values,
    collect_tensors,
    make_activation_params,
    make_weight_params,
    refuse_repeats,
)
from deploy.targets.ascend.layers import LAYER_OPS, LAYERS_BY_TORCH_CLASS, Layer, LayerGraph
from deploy.targets.ascend.proto import parse_text, suggest_name

_BITS_BY_TYPE = {1: 8, 2: 16}  # DataType.INT8, INT16


def read_simple_config(text: str, graph: LayerGraph, file_name: str = "the config") -> QuantConfig:
    """Parse AMCT's simplified configuration; return the quant config that it means for a model.

    Args:
        text: text of the file.
        graph: the layers of the model.
        file_name: name of the file, for messages.

    Raises:
        ConfigError: text that does not parse, unknown or repeated names and types, values out of
            range, algorithms that a layer does not support.
    """
    message: Any = parse_text("AMCTConfig", text, file_name)
    if message.joint_quant:
        raise ConfigError(
            f"{file_name} must not set joint_quant to true, which only AMCT's binary packages have;"
            " remove the line"
        )
    # layer -> its settings, and the layers that cannot have the 16-bit activations of common_config
    layers, lowered_to_8_bits = _read_layers(message, graph)
    forces_fp16 = message.HasField("fakequant_precision_mode")
    common_section = message.common_config  # an empty one if the configuration has none
    config = QuantConfig(
        batch_num=check_value("batch_num", message.batch_num, MODEL_RULES["batch_num"]),
        activation_offset=message.activation_offset,
        do_fusion=message.do_fusion,
        skip_fusion_layers=tuple(refuse_repeats(message.skip_fusion_layers, "skip_fusion_layers")),
        fakequant_precision_mode="FORCE_FP16_QUANT" if forces_fp16 else None,
        tensors=collect_tensors(
            _read_tensor(entry, common_section) for entry in message.tensor_quantize
        ),
        layers=layers,
        notes=tuple(activation_width_notes(lowered_to_8_bits)),
    )
    return resolve_config(config, graph)


def _read_layers(message: Any, graph: LayerGraph) -> tuple[dict[str, LayerConfig], list[str]]:
    """Return layer -> its settings, and the layers that get 8-bit activations in place of 16-bit.

    For the latter, common_config asks for 16 bits, which layers of their type cannot have.

    Args:
        message: the configuration.
        graph: the layers of the model.
    """
    common_section = message.common_config  # an empty one if the configuration has none
    skipped_names = _read_skipped(message, graph)  # layers to keep in float
    section_by_type = _read_type_overrides(message)
    section_by_name = _read_layer_overrides(message, graph)
    # a layer that is float by default, such as a MatMul of two activations, must be named
    names = {*graph.layers, *(graph.optional_layers.keys() & section_by_name.keys())}
    layer_by_name = graph.layer_by_name  # has the optional layers too
    layers = {}
    lowered_to_8_bits = []
    for name in sorted(names):
        layer = layer_by_name[name]
        # one section alone counts for a layer: its own, that of its type, or common_config
        type_section = section_by_type.get((layer.kind, layer.spatial_rank), common_section)
        section = section_by_name.get(name, type_section)
        with add_place_to_errors(f"in layer {name!r}"):
            # `asymmetric` alone comes from common_config where the section leaves it open
            settings = _read_section(section, layer, common_section)
        # where another section asks for 16 bits, `resolve_config` refuses them
        is_common = section is common_section
        if is_common and not allows_activation_bits(layer, settings.activation.num_bits):
            settings = replace(settings, activation=replace(settings.activation, num_bits=8))
            if name not in skipped_names:
                lowered_to_8_bits.append(name)
        layers[name] = replace(settings, quant_enable=name not in skipped_names)
    return layers, lowered_to_8_bits


def _types_and_ranks(layer_type: str) -> tuple[tuple[str, int], ...]:
    """Return (op type, spatial rank) of all layers of a type in ONNX's or torch's vocabulary."""
    if layer_type in LAYER_OPS:
        # a type of ONNX stands for layers of any rank
        return tuple((layer_type, rank) for rank in range(4))
    if layer_type in LAYERS_BY_TORCH_CLASS:
        return LAYERS_BY_TORCH_CLASS[layer_type]
    raise ConfigError(
        f"layer type {layer_type!r} does not support quantization;"
        f" {suggest_name(layer_type, [*LAYER_OPS, *LAYERS_BY_TORCH_CLASS])}"
    )


def _read_skipped(message: Any, graph: LayerGraph) -> set[str]:
    """Return the names of the layers that stay float: skip_layers and those of skip_layer_types.

    Raises:
        ConfigError: a name that is no layer, a repeated one, or types that leave no layer.
    """
    skipped_names = set(refuse_repeats(message.skip_layers, "skip_layers"))
    for name in message.skip_layers:
        if name not in graph.layers and name not in graph.float_reasons:
            raise ConfigError(f"layer {name!r} of skip_layers {no_layer_reason(name, graph)}")

    layer_types = refuse_repeats(message.skip_layer_types, "skip_layer_types")
    # (op type, spatial rank) of the layers of each type
    skipped_types = set(chain.from_iterable(map(_types_and_ranks, layer_types)))
    layers_of_skipped_types = {
        name
        for name, layer in graph.layers.items()
        if (layer.kind, layer.spatial_rank) in skipped_types
    }
    has_layers = bool(graph.layers)  # a model without layers has an error of its own
    if has_layers and layers_of_skipped_types == set(graph.layers) and not message.tensor_quantize:
        raise ConfigError(
            f"skip_layer_types must leave a type to quantize, got {layer_types}; every layer of the"
            " model is of these types"
        )
    return skipped_names | layers_of_skipped_types


def _read_type_overrides(message: Any) -> dict[tuple[str, int], Any]:
    """Return (op type, spatial rank) -> the section (protobuf message) with its settings."""
    section_by_type: dict[tuple[str, int], Any] = {}
    for override in message.override_layer_types:
        _require_fields(override, "override_layer_types", "layer_type", "calibration_config")
        for type_and_rank in _types_and_ranks(override.layer_type):
            if type_and_rank in section_by_type:
                raise ConfigError(
                    "override_layer_types must name each type once, got"
                    f" {override.layer_type!r} again"
                )
            section_by_type[type_and_rank] = override.calibration_config
    return section_by_type


def _read_layer_overrides(message: Any, graph: LayerGraph) -> dict[str, Any]:
    """Return layer name -> the section (protobuf message) with its calibration settings."""
    overrides = message.override_layer_configs
    for override in overrides:
        _require_fields(override, "override_layer_configs", "layer_name", "calibration_config")
        name = override.layer_name
        if name not in graph.configurable_names:
            raise ConfigError(
                f"layer {name!r} of override_layer_configs {no_layer_reason(name, graph)}"
            )
    refuse_repeats((override.layer_name for override in overrides), "override_layer_configs")
    return {override.layer_name: override.calibration_config for override in overrides}


def _require_fields(message: Any, list_name: str, *fields: str) -> None:
    """Refuse an entry of the list `list_name` that lacks one of these fields."""
    for field in fields:
        if not message.HasField(field):
            raise ConfigError(f"each of {list_name} must hold {field}, got one without")


def _read_section(section: Any, layer: Layer, common_section: Any) -> LayerConfig:
    """Return the settings of a layer.

    common_config applies to layers of all types: what this layer's type cannot have is left out.
    Any other section names the layer or its type: all of it is taken, and `resolve_config` refuses
    what the layer cannot have.

    Args:
        section: the only section (protobuf message) that counts for the layer.
        layer: the layer.
        common_section: the section common_config, from which `asymmetric` comes if it is unset.
    """
    is_common = section is common_section
    has_no_balancer = is_common and not layer.weight
    return LayerConfig(
        activation=_read_layer_activation(section, layer, common_section),
        dmq_balancer_param=None if has_no_balancer else _read_balancer(section),
        weight=_read_layer_weight(section, layer, is_common=is_common),
    )


def _read_layer_activation(section: Any, layer: Layer, common_section: Any) -> ActivationParams:
    """Return the activation settings of a layer; the arguments are those of `_read_section`."""
    activation = _read_activation(section)
    if not layer.symmetric_only:
        # `asymmetric` alone comes from common_config where the section leaves it open
        return _inherit_asymmetric(activation, common_section)
    if section is common_section:  # it may ask for an offset, which this layer cannot have
        return replace(activation, asymmetric=False)
    return activation


def _read_balancer(section: Any) -> float | None:
    """Return how much DMQ moves from a layer's input into its weight, 0.2 to 0.8; None without DMQ.

    `section`: the section that counts for the layer.
    """
    if not section.HasField("dmq_balancer"):
        return None
    strength = _decimal(section.dmq_balancer.migration_strength)
    check_value("dmq_balancer_param", strength, LAYER_RULES["dmq_balancer_param"])
    return strength


def _read_layer_weight(section: Any, layer: Layer, *, is_common: bool) -> WeightParams:
    """Return the weight settings of a layer.

    common_config is for layers of all types: an AdaRound that this layer cannot have is left out.
    Another section names the layer or its type, so that 6 or 7 bits are refused if this layer
    cannot have them. All other widths that it cannot have become 8 in `resolve_config`, with a
    note.

    Args:
        section: the section (protobuf message) that counts for the layer.
        layer: the layer.
        is_common: whether it is the section common_config.

    Raises:
        ConfigError: another section asks for 6 or 7 bits, which the layer cannot have.
    """
    weight = _read_weight(section)
    bits = weight.num_bits
    if is_common:
        if weight.wts_algo == "ada_quantize" and not layer.can_use_adaround:
            return WeightParams()
    elif bits != 4 and not allows_weight_bits(layer, bits):
        raise ConfigError(
            f"quant_bits {bits} is for {LAYERS_BY_WEIGHT_BITS[bits]}, got {layer.kind}; leave it"
            " out"
        )
    return weight


def _read_tensor(entry: Any, common_section: Any) -> tuple[str, ActivationParams]:
    """Return ('<node>:<index>' of an input, its settings) of an entry of tensor_quantize.

    Its default algorithm is IFMR, as in AMCT.
    """
    _require_fields(entry, "tensor_quantize", "layer_name", "input_index")
    with add_place_to_errors(f"in tensor_quantize of {entry.layer_name!r}"):
        activation = _inherit_asymmetric(_read_activation(entry), common_section)
    return f"{entry.layer_name}:{entry.input_index}", activation


def _inherit_asymmetric(activation: ActivationParams, common_section: Any) -> ActivationParams:
    """Inherit `asymmetric` from common_config if unset and both have the same algorithm."""
    common_activation = _read_activation(common_section)
    if activation.asymmetric is not None or common_activation.act_algo != activation.act_algo:
        return activation
    return replace(activation, asymmetric=common_activation.asymmetric)


def _decimal(value: float) -> float:
    """Return a protobuf float32 as the decimal in the file: 0.999999, not 0.99999898."""
    return float(f"{value:.7g}")


def _read_fields(message: Any) -> dict[str, Any]:
    """Return the fields that are set."""
    fields = {}
    for descriptor, value in message.ListFields():
        fields[descriptor.name] = _decimal(value) if isinstance(value, float) else value
    return fields


def _join_range(fields: dict[str, Any], key: str, default: tuple[float, float]) -> None:
    """Replace the fields of a range's start and end by one; an end that is unset has a default."""
    start = fields.pop(f"{key}_start", None)
    end = fields.pop(f"{key}_end", None)
    if start is not None or end is not None:
        fields[key] = [
            default[0] if start is None else start,
            default[1] if end is None else end,
        ]


def _read_activation(section: Any) -> ActivationParams:
    """Return the activation search of a section, AMCT's default one if the section names none."""
    algorithm = section.WhichOneof("activations")
    if algorithm is None:
        return ActivationParams()
    fields = _read_fields(getattr(section, algorithm))
    fields["act_algo"] = "ifmr" if algorithm == "ifmr_quantize" else "hfmg"
    if "dst_type" in fields:
        fields["num_bits"] = _BITS_BY_TYPE[fields.pop("dst_type")]
    _join_range(fields, "search_range", ActivationParams().search_range)
    return make_activation_params(check_values(fields, ACTIVATION_RULES, algorithm))


def _read_weight(section: Any) -> WeightParams:
    """Return the weight algorithm of a section, AMCT's default one if the section names none."""
    algorithm = section.WhichOneof("weights")
    if algorithm is None:
        return WeightParams()
    fields = _read_fields(getattr(section, algorithm))
    fields["wts_algo"] = algorithm
    if "quant_bits" in fields:
        fields["num_bits"] = fields.pop("quant_bits")
    _join_range(fields, "beta_range", WeightParams().beta_range)
    return make_weight_params(check_values(fields, WEIGHT_RULES, algorithm))
