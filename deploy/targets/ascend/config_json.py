"""AMCT's quant config JSON, read and written; the writer's bytes are AMCT's own."""

from __future__ import annotations

import json
from typing import Any

from deploy.errors import ConfigError
from deploy.files.reading import from_json
from deploy.targets.ascend.config_keys import (
    ACTIVATION,
    GLOBAL,
    LAYER,
    TENSOR,
    WEIGHT,
    activation_from,
    checked_value,
    checked_values,
    refuse_repeats,
    weight_from,
)
from deploy.targets.ascend.config_types import Activation, LayerConfig, QuantConfig, TensorConfig
from deploy.targets.ascend.proto import near


def read_config(text: str, what: str = "the quant config") -> QuantConfig:
    """Quant config JSON -> `QuantConfig`, ranges and types checked, the model not needed.

    Raises:
        ConfigError: not JSON, an unknown key (the nearest known one is named), a wrong type or a
            value out of range, keys of IFMR and HFMG in one layer, a repeated key.
    """
    data = _json(text, what)
    layers = {}
    for key, value in data.items():
        if key in GLOBAL:
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key!r} is neither a key of the quant config nor a layer;"
                f" {near(key, list(GLOBAL))}"
            )
        layers[key] = _in_layer(key, value)
    if "version" not in data:
        raise ConfigError(f'{what} must hold "version": 1, got none')
    given = {k: checked_value(k, v, GLOBAL[k]) for k, v in data.items() if k in GLOBAL}
    names = given.get("skip_fusion_layers", [])
    refuse_repeats(names, "skip_fusion_layers")
    mode = given.get("fakequant_precision_mode")
    return QuantConfig(
        version=given["version"],
        batch_num=given.get("batch_num", 1),
        activation_offset=given.get("activation_offset", True),
        do_fusion=given.get("do_fusion", True),
        skip_fusion_layers=tuple(names),
        fakequant_precision_mode=None if mode == "DEFAULT" else mode,
        tensors=tuple(_in_tensor(one) for one in given.get("tensor_quantize", [])),
        layers=layers,
    )


def write_config(config: QuantConfig) -> str:
    """`QuantConfig` -> JSON text in AMCT's own layout and order."""
    data: dict[str, Any] = {
        "version": config.version,
        "batch_num": config.batch_num,
        "activation_offset": config.activation_offset,
        "do_fusion": config.do_fusion,
        "skip_fusion_layers": list(config.skip_fusion_layers),
    }
    if config.fakequant_precision_mode:
        data["fakequant_precision_mode"] = config.fakequant_precision_mode
    if config.tensors:
        data["tensor_quantize"] = [
            {
                "layer_name": one.layer_name,
                "input_index": one.input_index,
                "activation_quant_params": _activation_json(one.activation),
            }
            for one in config.tensors
        ]
    for name in sorted(config.layers):
        data[name] = _layer_json(config.layers[name])
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False)


def _layer_json(layer: LayerConfig) -> dict[str, Any]:
    wts = layer.weight
    out: dict[str, Any] = {"quant_enable": layer.quant_enable}
    if layer.dmq_balancer_param is not None:
        out["dmq_balancer_param"] = layer.dmq_balancer_param
    params = _activation_json(layer.activation)
    weight: dict[str, Any] = {"num_bits": wts.num_bits}
    if wts.channel_wise is not None:
        weight["channel_wise"] = wts.channel_wise
    weight["wts_algo"] = wts.wts_algo
    if wts.wts_algo == "ada_quantize":
        weight["num_iteration"] = wts.num_iteration
        weight["reg_param"] = wts.reg_param
        weight["beta_range"] = list(wts.beta_range)
        weight["warm_start"] = wts.warm_start
    return {**out, "activation_quant_params": params, "weight_quant_params": weight}


def _activation_json(act: Activation) -> dict[str, Any]:
    params: dict[str, Any] = {"num_bits": act.num_bits}
    if act.act_algo == "ifmr":
        params["max_percentile"] = act.max_percentile
        params["min_percentile"] = act.min_percentile
        params["search_range"] = list(act.search_range)
        params["search_step"] = act.search_step
    params["act_algo"] = act.act_algo
    if act.asymmetric is not None:
        params["asymmetric"] = act.asymmetric
    if act.act_algo == "hfmg":
        params["num_of_bins"] = act.num_of_bins
    return params


def _in_tensor(value: dict[str, Any]) -> TensorConfig:
    given = checked_values(value, TENSOR, "tensor_quantize")
    for needed in ("layer_name", "input_index"):
        if needed not in given:
            raise ConfigError(f"each tensor_quantize must hold {needed}, got one without")
    where = "activation_quant_params"
    try:
        act = activation_from(checked_values(given.pop(where, {}), ACTIVATION, where))
    except ConfigError as error:
        raise ConfigError(f"{error} (in tensor_quantize of {given['layer_name']!r})") from None
    return TensorConfig(**given, activation=act)


def _in_layer(name: str, value: dict[str, Any]) -> LayerConfig:
    try:
        given = checked_values(value, LAYER, "a layer")
        act = checked_values(
            given.pop("activation_quant_params", {}), ACTIVATION, "activation_quant_params"
        )
        wts = checked_values(given.pop("weight_quant_params", {}), WEIGHT, "weight_quant_params")
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
