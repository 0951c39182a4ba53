"""AMCT's simplified configuration (.cfg, protobuf text) to and from a quant config.

Precedence: override_layer_configs, override_layer_types, common_config, defaults. As in AMCT, an
algorithm is taken with all its parameters: a layer whose override names hfmg_quantize takes nothing
from a common ifmr_quantize. Only `asymmetric` is inherited, between equal algorithms.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deploy.errors import ConfigError
from deploy.targets.ascend.config import no_layer_reason, resolve_config
from deploy.targets.ascend.config_keys import (
    ACTIVATION,
    GLOBAL,
    LAYER,
    WEIGHT,
    ActivationParams,
    LayerConfig,
    QuantConfig,
    TensorConfig,
    WeightParams,
    activation_from,
    activation_width_notes,
    check_value,
    check_values,
    refuse_repeats,
    takes_activations,
    weight_from,
)
from deploy.targets.ascend.layers import ALIASES, TYPES, Layer, LayerGraph
from deploy.targets.ascend.proto import message_class, parse_text, print_text, suggest_name

_BITS_BY_TYPE = {1: 8, 2: 16}  # DataType.INT8, INT16
_TYPE_INT16 = 2


def read_simple_config(text: str, graph: LayerGraph, what: str = "the config") -> QuantConfig:
    """Parse the simplified configuration of file `what` and resolve it for the model's layers.

    Raises:
        ConfigError: text that does not parse, unknown or repeated names and types, values out of
            range, algorithms that a layer does not support.
    """
    message: Any = parse_text("AMCTConfig", text, what)
    if message.joint_quant:
        raise ConfigError(
            f"{what} must not set joint_quant to true, which only AMCT's binary packages have;"
            " remove the line"
        )
    skipped = _read_skipped(message, graph)
    override_by_type = _read_type_overrides(message)
    override_by_name = _read_layer_overrides(message, graph)
    common = message.common_config if message.HasField("common_config") else None

    names = {*graph.layers, *(graph.optional_layers.keys() & override_by_name.keys())}
    layer_by_name = graph.layer_by_name
    layers, lowered = {}, []
    for name in sorted(names):
        layer = layer_by_name[name]
        sources = (override_by_name.get(name), override_by_type.get(layer.kind), common)
        parts = [part for part in sources if part is not None]
        try:
            entry = _merge_parts(parts, layer, common)
        except ConfigError as error:
            raise ConfigError(f"{error} (in layer {name!r})") from None
        is_common = _first_with(parts, "activations") is common
        if is_common and not takes_activations(layer, entry.activation.num_bits):
            entry = replace(entry, activation=replace(entry.activation, num_bits=8))
            if name not in skipped:
                lowered.append(name)
        layers[name] = replace(entry, quant_enable=name not in skipped)

    batch_num = message.batch_num if message.HasField("batch_num") else 1
    forces_fp16 = message.HasField("fakequant_precision_mode")
    config = QuantConfig(
        batch_num=check_value("batch_num", batch_num, GLOBAL["batch_num"]),
        activation_offset=_is_true_or_unset(message, "activation_offset"),
        do_fusion=_is_true_or_unset(message, "do_fusion"),
        skip_fusion_layers=tuple(refuse_repeats(message.skip_fusion_layers, "skip_fusion_layers")),
        fakequant_precision_mode="FORCE_FP16_QUANT" if forces_fp16 else None,
        tensors=tuple(_read_tensor(part, common) for part in message.tensor_quantize),
        layers=layers,
        notes=tuple(activation_width_notes(lowered)),
    )
    return resolve_config(config, graph)


def write_simple_config(config: QuantConfig) -> str:
    """Return a simplified configuration that resolves to this config: one override per layer.

    Raises:
        ConfigError: 4-bit activations, which this format cannot express.
    """
    message = message_class("AMCTConfig")()
    message.batch_num = config.batch_num
    message.activation_offset = config.activation_offset
    message.do_fusion = config.do_fusion
    message.skip_fusion_layers.extend(config.skip_fusion_layers)
    if config.fakequant_precision_mode:
        message.fakequant_precision_mode = 1
    for tensor in config.tensors:
        entry = message.tensor_quantize.add(
            layer_name=tensor.layer_name, input_index=tensor.input_index
        )
        _write_activation(entry, tensor.activation)
    for name, layer in sorted(config.layers.items()):
        if not layer.quant_enable:
            message.skip_layers.append(name)
        entry = message.override_layer_configs.add(layer_name=name).calibration_config
        _write_weight(entry, layer.weight)
        _write_activation(entry, layer.activation)
        if layer.dmq_balancer_param is not None:
            entry.dmq_balancer.migration_strength = layer.dmq_balancer_param
    return print_text(message)


def _is_true_or_unset(message: Any, field: str) -> bool:
    """Return the value of a bool field whose default in AMCT is true."""
    return not message.HasField(field) or bool(getattr(message, field))


def _op_types(layer_type: str) -> tuple[str, ...]:
    """Return the ONNX op types of a layer type in ONNX's or torch's vocabulary."""
    if layer_type in TYPES:
        return (layer_type,)
    if layer_type in ALIASES:
        return ALIASES[layer_type]
    raise ConfigError(
        f"layer type {layer_type!r} does not support quantization;"
        f" {suggest_name(layer_type, [*TYPES, *ALIASES])}"
    )


def _read_skipped(message: Any, graph: LayerGraph) -> set[str]:
    """Return the names of skip_layers, and of the layers of skip_layer_types."""
    skipped = set(refuse_repeats(message.skip_layers, "skip_layers"))
    for name in message.skip_layers:
        if name not in graph.layers and name not in graph.float_reasons:
            raise ConfigError(
                f"layer {name!r} of skip_layers does not exist in the model;"
                f" {suggest_name(name, list(graph.layers))}"
            )

    layer_types = refuse_repeats(message.skip_layer_types, "skip_layer_types")
    kinds = {kind for layer_type in layer_types for kind in _op_types(layer_type)}
    of_kinds = {name for name, layer in graph.layers.items() if layer.kind in kinds}
    is_all_skipped = kinds and graph.layers and len(of_kinds) == len(graph.layers)
    if is_all_skipped and not message.tensor_quantize:
        raise ConfigError(
            f"skip_layer_types must leave a type to quantize, got {layer_types}; every layer of the"
            " model is of these types"
        )
    return skipped | of_kinds


def _read_type_overrides(message: Any) -> dict[str, Any]:
    """Return op type -> its part of the configuration."""
    part_by_type: dict[str, Any] = {}
    for override in message.override_layer_types:
        _require_fields(override, "override_layer_types", "layer_type", "calibration_config")
        for kind in _op_types(override.layer_type):
            if kind in part_by_type:
                raise ConfigError(
                    "override_layer_types must name each type once, got"
                    f" {override.layer_type!r} again"
                )
            part_by_type[kind] = override.calibration_config
    return part_by_type


def _read_layer_overrides(message: Any, graph: LayerGraph) -> dict[str, Any]:
    """Return layer -> its part of the configuration."""
    part_by_name: dict[str, Any] = {}
    for override in message.override_layer_configs:
        _require_fields(override, "override_layer_configs", "layer_name", "calibration_config")
        name = override.layer_name
        if name not in graph.configurable_names:
            raise ConfigError(
                f"layer {name!r} of override_layer_configs {no_layer_reason(name, graph)}"
            )
        if name in part_by_name:
            raise ConfigError(
                f"override_layer_configs must name each layer once, got {name!r} again"
            )
        part_by_name[name] = override.calibration_config
    return part_by_name


def _require_fields(message: Any, where: str, *fields: str) -> None:
    """Refuse an entry of the list `where` that lacks one of these fields."""
    for field in fields:
        if not message.HasField(field):
            raise ConfigError(f"each of {where} must hold {field}, got one without")


def _first_with(parts: Sequence[Any], group: str) -> Any:
    """Return the first part that names an algorithm of a group, or None.

    Args:
        parts: sections of the configuration that apply to a layer, the strongest first.
        group: a oneof of the protobuf message: "activations", "weights" or "balancer".
    """
    return next((part for part in parts if part.WhichOneof(group)), None)


def _merge_parts(parts: Sequence[Any], layer: Layer, common: Any) -> LayerConfig:
    """Return the entry of a layer from all sections that apply to it.

    The first section that names an algorithm of a group (activations, weights, balancer) decides
    that group. What only common_config asks for, and this type of layer cannot have, is left out;
    a section for the layer or its type is obeyed, and refused later.

    Args:
        parts: the sections, the strongest first; the last one may be `common`.
        layer: the layer.
        common: the section common_config, or None.
    """
    activation_part = _first_with(parts, "activations")
    activation = ActivationParams()
    if activation_part is not None:
        activation = _read_activation(activation_part)
        if not layer.symmetric_only:
            activation = _inherit_asymmetric(activation, common)
        elif activation_part is common:
            activation = replace(activation, asymmetric=False)

    balancer_part = _first_with(parts, "balancer")
    strength = None
    if balancer_part is not None and (layer.weight or balancer_part is not common):
        balancer = balancer_part.dmq_balancer
        strength = 0.5
        if balancer.HasField("migration_strength"):
            strength = _decimal(balancer.migration_strength)
        check_value("dmq_balancer_param", strength, LAYER["dmq_balancer_param"])

    weight_part = _first_with(parts, "weights")
    weight = WeightParams() if weight_part is None else _read_weight(weight_part)
    is_adaround = weight.wts_algo == "ada_quantize"
    if weight_part is common and is_adaround and not layer.can_use_adaround:
        weight = WeightParams()
    return LayerConfig(activation=activation, weight=weight, dmq_balancer_param=strength)


def _read_tensor(part: Any, common: Any) -> TensorConfig:
    """Return one tensor_quantize entry; its default algorithm is IFMR, as in AMCT."""
    _require_fields(part, "tensor_quantize", "layer_name", "input_index")
    activation = ActivationParams()
    if part.WhichOneof("activations"):
        try:
            activation = _read_activation(part)
        except ConfigError as error:
            raise ConfigError(f"{error} (in tensor_quantize of {part.layer_name!r})") from None
    return TensorConfig(
        layer_name=part.layer_name,
        input_index=part.input_index,
        activation=_inherit_asymmetric(activation, common),
    )


def _inherit_asymmetric(activation: ActivationParams, common: Any) -> ActivationParams:
    """Inherit `asymmetric` from common_config if unset and both have the same algorithm."""
    has_common = common is not None and common.WhichOneof("activations")
    if activation.asymmetric is not None or not has_common:
        return activation
    common_activation = _read_activation(common)
    if common_activation.act_algo != activation.act_algo:
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
    start, end = fields.pop(f"{key}_start", None), fields.pop(f"{key}_end", None)
    if start is not None or end is not None:
        fields[key] = [
            default[0] if start is None else start,
            default[1] if end is None else end,
        ]


def _read_activation(part: Any) -> ActivationParams:
    """Return the activation search of a section that names one, with the keys of the JSON form."""
    algorithm = part.WhichOneof("activations")
    fields = _read_fields(getattr(part, algorithm))
    fields["act_algo"] = "ifmr" if algorithm == "ifmr_quantize" else "hfmg"
    if "dst_type" in fields:
        fields["num_bits"] = _BITS_BY_TYPE[fields.pop("dst_type")]
    _join_range(fields, "search_range", ActivationParams().search_range)
    return activation_from(check_values(fields, ACTIVATION))


def _read_weight(part: Any) -> WeightParams:
    """Return the weight algorithm of a section that names one, with the keys of the JSON form."""
    algorithm = part.WhichOneof("weights")
    fields = _read_fields(getattr(part, algorithm))
    fields["wts_algo"] = algorithm
    if "quant_bits" in fields:
        fields["num_bits"] = fields.pop("quant_bits")
    _join_range(fields, "beta_range", WeightParams().beta_range)
    return weight_from(check_values(fields, WEIGHT))


def _write_weight(entry: Any, weight: WeightParams) -> None:
    """Write a weight algorithm into a section; SetInParent keeps one without parameters."""
    if weight.wts_algo == "arq_quantize":
        algorithm = entry.arq_quantize
        algorithm.SetInParent()
        if weight.num_bits != 8:
            algorithm.quant_bits = weight.num_bits
    else:
        algorithm = entry.ada_quantize
        algorithm.num_iteration, algorithm.reg_param = weight.num_iteration, weight.reg_param
        algorithm.beta_range_start, algorithm.beta_range_end = weight.beta_range
        algorithm.warm_start = weight.warm_start
    if weight.channel_wise is not None:
        algorithm.channel_wise = weight.channel_wise


def _write_activation(entry: Any, activation: ActivationParams) -> None:
    """Write an activation search into a section, or into an entry of tensor_quantize."""
    if activation.num_bits not in _BITS_BY_TYPE.values():
        raise ConfigError(
            "a simplified configuration has 8 or 16-bit activations, got"
            f" {activation.num_bits} bits; write JSON"
        )
    if activation.act_algo == "ifmr":
        algorithm = entry.ifmr_quantize
        algorithm.search_range_start, algorithm.search_range_end = activation.search_range
        algorithm.search_step = activation.search_step
        algorithm.max_percentile = activation.max_percentile
        algorithm.min_percentile = activation.min_percentile
    else:
        algorithm = entry.hfmg_quantize
        algorithm.num_of_bins = activation.num_of_bins
    if activation.asymmetric is not None:
        algorithm.asymmetric = activation.asymmetric
    if activation.num_bits == 16:  # a type that is unset is INT8
        algorithm.dst_type = _TYPE_INT16
