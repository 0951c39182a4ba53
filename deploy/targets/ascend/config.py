"""AMCT's quant config JSON: read, written, and resolved for a model; and the default config.

Value ranges and defaults are AMCT's. Settings that AMCT refuses are refused here, before any file
is written. The text of `write_config` equals AMCT's byte for byte.
"""

import json
from dataclasses import replace
from typing import Any

from deploy.errors import ConfigError
from deploy.files.reading import from_json
from deploy.targets.ascend.config_keys import (
    ACTIVATION_RULES,
    ADA_RULES,
    HFMG_RULES,
    IFMR_RULES,
    INT16_LAYERS,
    LAYER_RULES,
    MODEL_RULES,
    TENSOR_RULES,
    WEIGHT_RULES,
    ActivationParams,
    LayerConfig,
    QuantConfig,
    add_place_to_errors,
    allows_activation_bits,
    allows_weight_bits,
    check_values,
    collect_tensors,
    make_activation_params,
    make_weight_params,
    refuse_repeats,
    resolve_tensor,
    weight_width_notes,
)
from deploy.targets.ascend.layers import TENSOR_QUANTIZE_OPS, Layer, LayerGraph
from deploy.targets.ascend.proto import suggest_name

_CONFIG_KEYS = (
    *("version", "batch_num", "activation_offset", "do_fusion", "fakequant_precision_mode"),
    "skip_fusion_layers",
)
_ACTIVATION_KEY, _WEIGHT_KEY = "activation_quant_params", "weight_quant_params"


def default_config(
    graph: LayerGraph, *, batch_num: int = 1, activation_offset: bool = True
) -> QuantConfig:
    """Return AMCT's create_quant_config result for a model, without a simplified configuration."""
    if not graph.layers:
        raise ConfigError(_no_layers_message(graph))
    config = QuantConfig(
        batch_num=batch_num,
        activation_offset=activation_offset,
        layers={name: LayerConfig() for name in sorted(graph.layers)},
    )
    return resolve_config(config, graph)


def resolve_config(config: QuantConfig, graph: LayerGraph) -> QuantConfig:
    """Return the config with AMCT's defaults filled in, checked against the model.

    Raises:
        ConfigError: a layer that the model lacks, or a setting that a layer does not support.
    """
    if config.enabled_layers() and not graph.layer_by_name:
        raise ConfigError(_no_layers_message(graph))
    _refuse_names(config, graph)
    layers = {
        name: _resolve_layer(name, entry, config, graph) for name, entry in config.layers.items()
    }
    tensors = {
        name: resolve_tensor(name, activation, config, graph)
        for name, activation in config.tensors.items()
    }
    settings_with_weight = {
        name: config.layers[name] for name in layers if graph.layer_by_name[name].weight
    }
    return replace(
        config,
        layers=layers,
        tensors=tensors,
        notes=(*config.notes, *weight_width_notes(settings_with_weight, layers)),
    )


def _refuse_names(config: QuantConfig, graph: LayerGraph) -> None:
    """Refuse layers named like a key, and names in skip_fusion_layers that are no Conv."""
    names_of_keys = sorted(config.layers.keys() & MODEL_RULES)
    if names_of_keys:
        raise ConfigError(
            f"a layer must not be named like a key of the quant config, got {names_of_keys};"
            " rename the node"
        )
    for name in config.skip_fusion_layers:
        if name not in graph.layers and name not in graph.float_reasons:
            raise ConfigError(_unknown_layer_message(name, graph))
        layer = graph.layers.get(name)
        if layer is not None and layer.kind != "Conv":
            raise ConfigError(
                f"skip_fusion_layers takes Conv layers, got {name!r} of type {layer.kind}"
            )


def _resolve_layer(
    name: str, entry: LayerConfig, config: QuantConfig, graph: LayerGraph
) -> LayerConfig:
    """Return the settings of a layer (`entry`) with `asymmetric` and `channel_wise` set.

    If they are unset, they follow from the layer's type and from the config's activation_offset. A
    weight width that the layer cannot have becomes 8 bits; `weight_width_notes` tells the user.

    Raises:
        ConfigError: the model has no such layer, or a setting is not for its type.
    """
    if name not in graph.configurable_names:
        raise ConfigError(_unknown_layer_message(name, graph))
    layer = graph.layer_by_name[name]
    _refuse_combination(entry, layer)
    activation = entry.activation
    weight = entry.weight
    if activation.asymmetric is None:
        asymmetric = config.activation_offset and not layer.symmetric_only
        activation = replace(activation, asymmetric=asymmetric)
    if weight.channel_wise is None:
        weight = replace(weight, channel_wise=layer.channel_wise)
    if not allows_weight_bits(layer, weight.num_bits):
        weight = replace(weight, num_bits=8)
    return replace(entry, activation=activation, weight=weight)


def _refuse_combination(entry: LayerConfig, layer: Layer) -> None:
    """Refuse values that are valid by themselves, but not for this type of layer."""
    activation = entry.activation
    weight = entry.weight
    if weight.channel_wise and not layer.channel_wise:
        raise ConfigError(
            f"channel_wise must be false for layer type {layer.kind}, got true in layer"
            f" {layer.name!r}; leave channel_wise out of common_config and each type gets its own"
        )
    if activation.asymmetric and layer.symmetric_only:
        raise ConfigError(
            f"{_describe_kind(layer)} takes symmetric activations only, got asymmetric true in"
            f" layer {layer.name!r}; set it to false"
        )
    if layer.two_activations and activation.num_bits != 8:
        raise ConfigError(
            f"{_describe_kind(layer)} takes 8-bit activations, got {activation.num_bits} bits in"
            f" layer {layer.name!r}"
        )
    if not allows_activation_bits(layer, activation.num_bits):
        raise ConfigError(
            f"16-bit activations are for {INT16_LAYERS}, got {layer.kind} in layer {layer.name!r};"
            " give it 8"
        )
    if entry.dmq_balancer_param is not None and not layer.weight:
        raise ConfigError(
            f"dmq_balancer_param does not apply to {_describe_kind(layer)}, got it in layer"
            f" {layer.name!r}; leave it out"
        )
    if weight.wts_algo != "ada_quantize":
        return
    if not layer.can_use_adaround:
        raise ConfigError(
            "ada_quantize is for 2-D convolutions, transposed ones, Gemms, and MatMuls with a 2-D"
            f" weight, got it in layer {layer.name!r}, {_describe_kind(layer)}; give that layer"
            " arq_quantize"
        )
    if weight.num_bits != 8:
        raise ConfigError(
            f"ada_quantize rounds weights to 8 bits, got num_bits {weight.num_bits} in layer"
            f" {layer.name!r}; take num_bits out, or give it arq_quantize"
        )


def _describe_kind(layer: Layer) -> str:
    """Describe the layer's type."""
    if layer.two_activations:
        return "a MatMul of two activations"
    if layer.stacked:
        return "a MatMul with a 3-D weight"
    return f"a {layer.spatial_rank}-D convolution" if layer.kind == "Conv" else layer.kind


def _no_layers_message(graph: LayerGraph) -> str:
    """Return the error for a model without a layer to quantize, with reasons of some nodes."""
    reasons = [f"{name}: {reason}" for name, reason in graph.float_reasons.items()]
    examples = f": {'; '.join(reasons[:3])}" if reasons else ""
    return (
        "a model needs a layer that Ascend can quantize (Conv, ConvTranspose, Gemm, MatMul,"
        f" AveragePool), got none{examples}"
    )


def _unknown_layer_message(name: str, graph: LayerGraph) -> str:
    """Return the error for a name that is no layer of the model."""
    return f"layer {name!r} {no_layer_reason(name, graph)}"


def no_layer_reason(name: str, graph: LayerGraph) -> str:
    """Say why this name is no layer; the text continues the sentence "layer <name> ..."."""
    if name in graph.float_reasons:
        return f"cannot be quantized: {graph.float_reasons[name]}; take it out"
    if name in graph.ops:
        op = graph.ops[name]
        inputs = ", but for its inputs, by tensor_quantize" if op in TENSOR_QUANTIZE_OPS else ""
        return f"of type {op} cannot be quantized{inputs}; take it out"
    return (
        "does not exist in the model once its BatchNormalization is folded;"
        f" {suggest_name(name, graph.configurable_names)}"
    )


def read_config(text: str, file_name: str = "the quant config") -> QuantConfig:
    """Parse the quant config JSON; check types and ranges, but not the names of layers.

    `file_name`: for messages.

    Raises:
        ConfigError: not JSON, an unknown key (the message suggests the nearest one), a wrong type,
            a value out of range, a repeated key, or keys of both searches of an activation's range
            (IFMR and HFMG) in one layer.
    """
    json_object = _parse_json(text, file_name)
    layers = {}
    settings = {}
    for key, value in json_object.items():
        if key in MODEL_RULES:  # a setting of the entire model
            settings[key] = value
        elif isinstance(value, dict):  # any other key is the name of a layer
            layers[key] = _read_layer(key, value)
        else:
            raise ConfigError(
                f"{key!r} is neither a key of the quant config nor a layer;"
                f" {suggest_name(key, list(MODEL_RULES))}"
            )
    settings = check_values(settings, MODEL_RULES, "the quant config")
    refuse_repeats(settings.get("skip_fusion_layers", ()), "skip_fusion_layers")
    if settings.get("fakequant_precision_mode") == "DEFAULT":
        del settings["fakequant_precision_mode"]  # as if it were unset
    # inputs of nodes that are quantized by themselves: '<node>:<index>' -> activation settings
    tensors = collect_tensors(map(_read_tensor, settings.get("tensor_quantize", ())))
    # weight_offset and joint_quant are left out: they have only one allowed value, checked above
    fields = {key: settings[key] for key in _CONFIG_KEYS if key in settings}
    return QuantConfig(**fields, tensors=tensors, layers=layers)


def write_config(config: QuantConfig) -> str:
    """Return the config as JSON text in AMCT's layout and order."""
    document = _without_unset_fields(config, *_CONFIG_KEYS)
    if config.tensors:
        document["tensor_quantize"] = [
            _tensor_json(name, activation) for name, activation in config.tensors.items()
        ]
    for name in sorted(config.layers):
        layer = config.layers[name]
        # the keys of AdaRound's parameters, for a layer that it rounds
        ada_keys = ADA_RULES if layer.weight.wts_algo == "ada_quantize" else ()
        document[name] = {
            **_without_unset_fields(layer, "quant_enable", "dmq_balancer_param"),
            _ACTIVATION_KEY: _activation_json(layer.activation),
            _WEIGHT_KEY: _without_unset_fields(
                layer.weight, "num_bits", "channel_wise", "wts_algo", *ada_keys
            ),
        }
    return json.dumps(document, indent=4, separators=(",", ":"), ensure_ascii=False)


def _without_unset_fields(values: object, *keys: str) -> dict[str, Any]:
    """Return the fields of these names, in their order, without those that are None."""
    fields = {key: getattr(values, key) for key in keys}
    return {key: value for key, value in fields.items() if value is not None}


def _tensor_json(name: str, activation: ActivationParams) -> dict[str, Any]:
    """Return the entry of an input, '<node>:<index>', in the list tensor_quantize."""
    node, _, index = name.rpartition(":")
    return {
        "layer_name": node,
        "input_index": int(index),
        _ACTIVATION_KEY: _activation_json(activation),
    }


def _activation_json(activation: ActivationParams) -> dict[str, Any]:
    """Return activation_quant_params in AMCT's order, which differs between the two algorithms."""
    if activation.act_algo == "ifmr":
        return _without_unset_fields(activation, "num_bits", *IFMR_RULES, "act_algo", "asymmetric")
    return _without_unset_fields(activation, "num_bits", "act_algo", "asymmetric", *HFMG_RULES)


def _read_tensor(value: dict[str, Any]) -> tuple[str, ActivationParams]:
    """Return ('<node>:<index>' of an input, its settings) of an entry of tensor_quantize."""
    fields = check_values(value, TENSOR_RULES, "tensor_quantize")
    for key in ("layer_name", "input_index"):
        if key not in fields:
            raise ConfigError(f"each tensor_quantize must hold {key}, got one without")
    node = fields["layer_name"]
    with add_place_to_errors(f"in tensor_quantize of {node!r}"):
        activation = _read_activation(fields.get(_ACTIVATION_KEY, {}))
    return f"{node}:{fields['input_index']}", activation


def _read_layer(name: str, value: dict[str, Any]) -> LayerConfig:
    """Return the entry of a layer; errors name the layer."""
    with add_place_to_errors(f"in layer {name!r}"):
        # as in AMCT, an entry without quant_enable leaves its layer in float
        fields = {"quant_enable": False, **check_values(value, LAYER_RULES, "a layer")}
        activation_values = fields.pop(_ACTIVATION_KEY, {})
        weight_values = fields.pop(_WEIGHT_KEY, {})
        return LayerConfig(
            **fields,
            activation=_read_activation(activation_values),
            weight=make_weight_params(check_values(weight_values, WEIGHT_RULES, _WEIGHT_KEY)),
        )


def _read_activation(value: dict[str, Any]) -> ActivationParams:
    """Return the activation settings of a JSON object, checked."""
    return make_activation_params(check_values(value, ACTIVATION_RULES, _ACTIVATION_KEY))


def _parse_json(text: str, file_name: str) -> dict[str, Any]:
    """Return the JSON object of a file; refuse repeated keys, NaN and Infinity.

    Python's parser alone takes the last of repeated keys, and reads NaN, which is no JSON.
    """

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the dict of an object's (key, value) pairs; refuse repeated keys."""
        refuse_repeats([key for key, _ in pairs], "an object")
        return dict(pairs)

    def refuse_constant(name: str) -> Any:  # the parser calls it for NaN and Infinity
        raise ConfigError(f"{file_name} must hold finite numbers, got {name}")

    document = from_json(
        text,
        rule=f"{file_name} must be JSON",
        error=ConfigError,
        pairs=make_object,
        constant=refuse_constant,
    )
    if not isinstance(document, dict):
        raise ConfigError(f"{file_name} must be a JSON object, got {type(document).__name__}")
    return document
