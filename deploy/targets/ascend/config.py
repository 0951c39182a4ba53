"""AMCT's quant config JSON: read, written, and resolved for a model; and the default config.

Value ranges and defaults are AMCT's. What AMCT refuses is refused here, before any file is written.
The writer's output equals AMCT's byte for byte.
"""

import json
from dataclasses import replace
from typing import Any

from deploy.errors import ConfigError
from deploy.files.reading import from_json
from deploy.targets.ascend.config_keys import (
    ACTIVATION,
    ADA,
    GLOBAL,
    HFMG,
    IFMR,
    INT16_LAYERS,
    LAYER,
    TENSOR,
    WEIGHT,
    ActivationParams,
    LayerConfig,
    QuantConfig,
    TensorConfig,
    activation_from,
    check_json_object,
    check_value,
    refuse_repeats,
    resolve_tensors,
    takes_activations,
    takes_weights,
    weight_from,
    weight_width_notes,
)
from deploy.targets.ascend.layers import TENSOR_QUANTIZE_OPS, Layer, LayerGraph
from deploy.targets.ascend.proto import suggest_name

_OF_CONFIG = (
    *("version", "batch_num", "activation_offset", "do_fusion", "skip_fusion_layers"),
    "fakequant_precision_mode",
)


def default_config(
    graph: LayerGraph, *, batch_num: int = 1, activation_offset: bool = True
) -> QuantConfig:
    """Return AMCT's create_quant_config result for a model, without a simplified configuration."""
    if not graph.layers:
        raise ConfigError(_no_layers(graph))
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
    if config.enabled() and not graph.layer_by_name:
        raise ConfigError(_no_layers(graph))
    clashes = sorted(set(config.layers) & set(GLOBAL))
    if clashes:
        raise ConfigError(
            f"a layer must not be named like a key of the quant config, got {clashes};"
            " rename the node"
        )
    for name in config.skip_fusion_layers:
        if name not in graph.layers and name not in graph.float_reasons:
            raise ConfigError(_unknown_layer(name, graph))
        layer = graph.layers.get(name)
        if layer is not None and layer.kind != "Conv":
            raise ConfigError(
                f"skip_fusion_layers takes Conv layers, got {name!r} of type {layer.kind}"
            )
    layers = {name: _settled(name, entry, config, graph) for name, entry in config.layers.items()}
    return replace(
        config,
        layers=layers,
        tensors=resolve_tensors(config, graph),
        notes=(*config.notes, *weight_width_notes(config.layers, layers)),
    )


def _settled(name: str, entry: LayerConfig, config: QuantConfig, graph: LayerGraph) -> LayerConfig:
    if name not in graph.configurable_names:
        raise ConfigError(_unknown_layer(name, graph))
    layer = graph.layer_by_name[name]
    _refuse_combination(entry, layer)
    asymmetric, channel_wise = entry.activation.asymmetric, entry.weight.channel_wise
    if asymmetric is None:
        asymmetric = config.activation_offset and not layer.symmetric_only
    bits = entry.weight.num_bits
    return replace(
        entry,
        activation=replace(entry.activation, asymmetric=asymmetric),
        weight=replace(
            entry.weight,
            num_bits=bits if takes_weights(layer, bits) else 8,
            channel_wise=layer.channel_wise if channel_wise is None else channel_wise,
        ),
    )


def _refuse_combination(entry: LayerConfig, layer: Layer) -> None:
    if entry.weight.channel_wise and not layer.channel_wise:
        raise ConfigError(
            f"channel_wise must be false for layer type {layer.kind}, got true in layer"
            f" {layer.name!r}; leave channel_wise out of common_config and each type gets its own"
        )
    if entry.activation.asymmetric and layer.symmetric_only:
        raise ConfigError(
            f"{_what(layer)} takes symmetric activations only, got asymmetric true in layer"
            f" {layer.name!r}; set it to false"
        )
    if layer.two_activations and entry.activation.num_bits != 8:
        raise ConfigError(
            f"{_what(layer)} takes 8-bit activations, got {entry.activation.num_bits} bits in layer"
            f" {layer.name!r}"
        )
    if not takes_activations(layer, entry.activation.num_bits):
        raise ConfigError(
            f"16-bit activations are for {INT16_LAYERS}, got {layer.kind} in layer {layer.name!r};"
            " give it 8"
        )
    if entry.dmq_balancer_param is not None and not layer.weight:
        raise ConfigError(
            f"dmq_balancer_param does not apply to {_what(layer)}, got it in layer {layer.name!r};"
            " leave it out"
        )
    if entry.weight.wts_algo == "ada_quantize" and not layer.can_use_adaround:
        raise ConfigError(
            "ada_quantize is for 2-D convolutions, transposed ones, Gemms, and MatMuls with a 2-D"
            f" weight, got it in layer {layer.name!r}, {_what(layer)}; give that layer arq_quantize"
        )
    if entry.weight.wts_algo == "ada_quantize" and entry.weight.num_bits != 8:
        raise ConfigError(
            f"ada_quantize rounds weights to 8 bits, got num_bits {entry.weight.num_bits} in layer"
            f" {layer.name!r}; take num_bits out, or give it arq_quantize"
        )


def _what(layer: Layer) -> str:
    """Describe the layer's type."""
    if layer.two_activations:
        return "a MatMul of two activations"
    if layer.stacked:
        return "a MatMul with a 3-D weight"
    return f"a {layer.rank}-D convolution" if layer.kind == "Conv" else layer.kind


def _no_layers(graph: LayerGraph) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in list(graph.float_reasons.items())[:3])
    return "a model needs a layer that Ascend can quantize (Conv, ConvTranspose, Gemm, MatMul," + (
        f" AveragePool), got none{': ' + why if why else ''}"
    )


def _unknown_layer(name: str, graph: LayerGraph) -> str:
    return f"layer {name!r} {no_layer_reason(name, graph)}"


def no_layer_reason(name: str, graph: LayerGraph) -> str:
    """Say why this name is no layer; the text continues the sentence "layer <name> ..."."""
    if name in graph.float_reasons:
        return f"cannot be quantized: {graph.float_reasons[name]}; take it out"
    if name in graph.ops:
        op = graph.ops[name]
        inputs = ", but for its inputs, by tensor_quantize" if op in TENSOR_QUANTIZE_OPS else ""
        return f"of type {op} cannot be quantized{inputs}; take it out"
    return f"does not exist in the model; {suggest_name(name, graph.configurable_names)}"


def read_config(text: str, what: str = "the quant config") -> QuantConfig:
    """Parse the quant config JSON of file `what`; check types and ranges, but not layer names.

    Raises:
        ConfigError: not JSON, an unknown key (the message suggests the nearest one), a wrong type,
            a value out of range, keys of IFMR and HFMG in one layer, or a repeated key.
    """
    data = _json(text, what)
    layers = {}
    for key, value in data.items():
        if key in GLOBAL:
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key!r} is neither a key of the quant config nor a layer;"
                f" {suggest_name(key, list(GLOBAL))}"
            )
        layers[key] = _in_layer(key, value)
    if "version" not in data:
        raise ConfigError(f'{what} must hold "version": 1, got none')
    given = {k: check_value(k, v, GLOBAL[k]) for k, v in data.items() if k in GLOBAL}
    refuse_repeats(given.get("skip_fusion_layers", []), "skip_fusion_layers")
    if given.get("fakequant_precision_mode") == "DEFAULT":
        del given["fakequant_precision_mode"]
    tensors = tuple(map(_in_tensor, given.get("tensor_quantize", [])))
    fields = {key: value for key, value in given.items() if key in _OF_CONFIG}
    return QuantConfig(**fields, tensors=tensors, layers=layers)


def write_config(config: QuantConfig) -> str:
    """Return the config as JSON text in AMCT's layout and order."""
    data = _stated(config, *_OF_CONFIG)
    if config.tensors:
        data["tensor_quantize"] = [
            {
                **_stated(one, "layer_name", "input_index"),
                "activation_quant_params": _activation_json(one.activation),
            }
            for one in config.tensors
        ]
    for name in sorted(config.layers):
        layer = config.layers[name]
        adaptive = ADA if layer.weight.wts_algo == "ada_quantize" else ()
        weight = _stated(layer.weight, "num_bits", "channel_wise", "wts_algo", *adaptive)
        data[name] = {
            **_stated(layer, "quant_enable", "dmq_balancer_param"),
            "activation_quant_params": _activation_json(layer.activation),
            "weight_quant_params": weight,
        }
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False)


def _stated(values: object, *keys: str) -> dict[str, Any]:
    """Return the fields of these names, in their order, without those that are None."""
    return {key: value for key in keys if (value := getattr(values, key)) is not None}


def _activation_json(act: ActivationParams) -> dict[str, Any]:
    before, after = (IFMR, ()) if act.act_algo == "ifmr" else ((), HFMG)
    return _stated(act, "num_bits", *before, "act_algo", "asymmetric", *after)


def _in_tensor(value: dict[str, Any]) -> TensorConfig:
    given = check_json_object(value, TENSOR, "tensor_quantize")
    for needed in ("layer_name", "input_index"):
        if needed not in given:
            raise ConfigError(f"each tensor_quantize must hold {needed}, got one without")
    where = "activation_quant_params"
    try:
        act = activation_from(check_json_object(given.pop(where, {}), ACTIVATION, where))
    except ConfigError as error:
        raise ConfigError(f"{error} (in tensor_quantize of {given['layer_name']!r})") from None
    return TensorConfig(**given, activation=act)


def _in_layer(name: str, value: dict[str, Any]) -> LayerConfig:
    try:
        given = check_json_object(value, LAYER, "a layer")
        act = check_json_object(
            given.pop("activation_quant_params", {}), ACTIVATION, "activation_quant_params"
        )
        wts = check_json_object(given.pop("weight_quant_params", {}), WEIGHT, "weight_quant_params")
        return LayerConfig(**given, activation=activation_from(act), weight=weight_from(wts))
    except ConfigError as error:
        raise ConfigError(f"{error} (in layer {name!r})") from None


def _json(text: str, what: str) -> dict[str, Any]:
    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        refuse_repeats([key for key, _ in entries], "an object")
        return dict(entries)

    def constant(word: str) -> Any:
        raise ConfigError(f"{what} must hold finite numbers, got {word}")

    rule = f"{what} must be JSON"
    data = from_json(text, rule=rule, error=ConfigError, pairs=pairs, constant=constant)
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be a JSON object, got {type(data).__name__}")
    return data
