"""AMCT's quant config: the JSON that says how each layer is quantized, read, checked, written.

Keys, ranges and defaults are AMCT's; what AMCT would refuse is refused here, before anything is
written. Source: hicann/amct, common/config/field.py and the quant config reference pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calibrators.hfmg import NBINS
from deploy.ascend.layers import Layer, LayerGraph
from deploy.ascend.proto import ELSEWHERE, near
from deploy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """activation_quant_params of one layer; `asymmetric` None follows activation_offset."""

    num_bits: int = 8
    act_algo: str = "ifmr"
    asymmetric: bool | None = None
    max_percentile: float = 0.999999
    min_percentile: float = 0.999999
    search_range: tuple[float, float] = (0.7, 1.3)
    search_step: float = 0.01
    num_of_bins: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """weight_quant_params of one layer; the last four belong to ada_quantize."""

    num_bits: int = 8
    wts_algo: str = "arq_quantize"
    channel_wise: bool | None = None
    num_iteration: int = 10000
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """How one layer is quantized."""

    quant_enable: bool = True
    dmq_balancer_param: float | None = None
    activation: Activation = field(default_factory=Activation)
    weight: Weight = field(default_factory=Weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """A whole quant config; `layers` is layer name -> how it is quantized."""

    version: int = 1
    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    fakequant_precision_mode: str | None = None
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)

    def enabled(self) -> dict[str, LayerConfig]:
        """The layers to quantize."""
        return {name: layer for name, layer in self.layers.items() if layer.quant_enable}


@dataclass(frozen=True, slots=True)
class _Rule:
    """Type and range of one key."""

    type_: str
    fits: Callable[[Any], bool]
    range_: str


def _pair(value: Any) -> bool:
    return len(value) == 2 and all(_number(v) for v in value)


def _number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)


_PERCENTILE = _Rule("float", lambda v: 0.5 < v <= 1, "(0.5, 1]")
_ANY = _Rule("bool", lambda v: True, "true or false")
_GLOBAL = {
    "version": _Rule("int", lambda v: v == 1, "1"),
    "batch_num": _Rule("int", lambda v: v > 0, "> 0"),
    "activation_offset": _ANY,
    "joint_quant": _Rule("bool", lambda v: not v, "false (only AMCT's binary packages have it)"),
    "weight_offset": _Rule("bool", lambda v: not v, "false (the hardware takes offset_w 0)"),
    "do_fusion": _ANY,
    "skip_fusion_layers": _Rule("list", lambda v: all(isinstance(n, str) for n in v), "names"),
    "fakequant_precision_mode": _Rule(
        "str", lambda v: v in ("FORCE_FP16_QUANT", "DEFAULT"), "FORCE_FP16_QUANT or DEFAULT"
    ),
}
_LAYER = {
    "quant_enable": _ANY,
    "dmq_balancer_param": _Rule("float", lambda v: 0.2 <= v <= 0.8, "[0.2, 0.8]"),
    "activation_quant_params": _Rule("dict", lambda v: True, "an object"),
    "weight_quant_params": _Rule("dict", lambda v: True, "an object"),
}
_IFMR = {
    "max_percentile": _PERCENTILE,
    "min_percentile": _PERCENTILE,
    "search_range": _Rule(
        "list", lambda v: _pair(v) and 0 < v[0] < v[1], "[start, end], 0 < start < end"
    ),
    "search_step": _Rule("float", lambda v: v > 0, "> 0"),
}
_HFMG = {"num_of_bins": _Rule("int", lambda v: v in NBINS, f"one of {list(NBINS)}")}
_ACTIVATION = {
    "num_bits": _Rule("int", lambda v: v in (4, 8, 16), "4, 8 or 16"),
    "act_algo": _Rule("str", lambda v: v in ("ifmr", "hfmg"), "'ifmr' or 'hfmg'"),
    "asymmetric": _ANY,
    **_IFMR,
    **_HFMG,
}
_ADA = {
    "num_iteration": _Rule("int", lambda v: v >= 0, ">= 0"),
    "reg_param": _Rule("float", lambda v: 0 < v < 1, "(0, 1)"),
    "beta_range": _Rule(
        "list", lambda v: _pair(v) and v[0] > v[1] > 0, "[start, end], start > end > 0"
    ),
    "warm_start": _Rule("float", lambda v: 0 < v < 1, "(0, 1)"),
}
_WEIGHT = {
    "num_bits": _Rule("int", lambda v: v in (4, 6, 7, 8), "4, 6, 7 or 8"),
    "wts_algo": _Rule(
        "str", lambda v: v in ("arq_quantize", "ada_quantize"), "'arq_quantize' or 'ada_quantize'"
    ),
    "channel_wise": _ANY,
    **_ADA,
}


def default_config(
    graph: LayerGraph, *, batch_num: int = 1, activation_offset: bool = True
) -> QuantConfig:
    """What AMCT's create_quant_config gives for a model without a simplified configuration.

    Raises:
        ConfigError: the model has no layer that can be quantized.
    """
    if not graph.layers:
        raise ConfigError(_no_layers(graph))
    config = QuantConfig(
        batch_num=batch_num,
        activation_offset=activation_offset,
        layers={name: LayerConfig() for name in sorted(graph.layers)},
    )
    return settled(config, graph)


def settled(config: QuantConfig, graph: LayerGraph) -> QuantConfig:
    """The config with every open choice made as AMCT makes it, and checked against the model.

    Raises:
        ConfigError: a layer that the model lacks or that does not take what is asked of it.
    """
    if config.enabled() and not graph.layers:
        raise ConfigError(_no_layers(graph))
    clashes = sorted(set(config.layers) & set(_GLOBAL))
    if clashes:
        raise ConfigError(
            f"a layer must not be named like a key of the quant config, got {clashes};"
            " rename the node"
        )
    for name in config.skip_fusion_layers:
        if name not in graph.layers and name not in graph.refused:
            raise ConfigError(_unknown_layer(name, graph))
        layer = graph.layers.get(name)
        if layer is not None and layer.kind != "Conv":
            raise ConfigError(
                f"skip_fusion_layers takes Conv layers, got {name!r} of type {layer.kind}"
            )
    layers = {name: _settled(name, entry, config, graph) for name, entry in config.layers.items()}
    return replace(config, layers=layers)


def _settled(name: str, entry: LayerConfig, config: QuantConfig, graph: LayerGraph) -> LayerConfig:
    if name not in graph.layers:
        raise ConfigError(_unknown_layer(name, graph))
    layer = graph.layers[name]
    _refuse_combination(entry, layer)
    asymmetric, channel_wise = entry.activation.asymmetric, entry.weight.channel_wise
    if asymmetric is None:
        asymmetric = config.activation_offset and not layer.symmetric_only
    bits = entry.weight.num_bits
    if bits in (6, 7) and not (layer.kind == "Conv" and layer.rank == 2):
        bits = 8  # as AMCT does, without a word
    return replace(
        entry,
        activation=replace(entry.activation, asymmetric=asymmetric),
        weight=replace(
            entry.weight,
            num_bits=bits,
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
            f"a 3-D convolution takes symmetric activations only, got asymmetric true in layer"
            f" {layer.name!r}; set it to false"
        )
    if entry.dmq_balancer_param is not None and layer.kind == "AveragePool":
        raise ConfigError(
            f"dmq_balancer_param does not apply to AveragePool, got it in layer {layer.name!r};"
            " leave it out"
        )
    if entry.weight.wts_algo == "ada_quantize" and layer.kind == "AveragePool":
        raise ConfigError(
            f"ada_quantize needs a weight, got it in layer {layer.name!r} of type AveragePool"
        )


def _no_layers(graph: LayerGraph) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in list(graph.refused.items())[:3])
    return "a model needs a layer that Ascend can quantize (Conv, ConvTranspose, Gemm, MatMul," + (
        f" AveragePool), got none{': ' + why if why else ''}"
    )


def _unknown_layer(name: str, graph: LayerGraph) -> str:
    if name in graph.refused:
        return f"layer {name!r} cannot be quantized: {graph.refused[name]}; take it out"
    return f"layer {name!r} does not exist in the model; {near(name, list(graph.layers))}"


# -- JSON -------------------------------------------------------------------------------------


def read_config(text: str, what: str = "the quant config") -> QuantConfig:
    """Quant config JSON -> `QuantConfig`, ranges and types checked, the model not needed.

    Raises:
        ConfigError: not JSON, an unknown key (the nearest known one is named), a wrong type or a
            value out of range, keys of IFMR and HFMG in one layer, a repeated key.
    """
    data = _json(text, what)
    layers = {}
    for key, value in data.items():
        if key in _GLOBAL:
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key!r} is neither a key of the quant config nor a layer;"
                f" {near(key, list(_GLOBAL))}"
            )
        layers[key] = _in_layer(key, value)
    if "version" not in data:
        raise ConfigError(f'{what} must hold "version": 1, got none')
    given = {k: _value(k, v, _GLOBAL[k]) for k, v in data.items() if k in _GLOBAL}
    names = given.get("skip_fusion_layers", [])
    _refuse_repeats(names, "skip_fusion_layers")
    mode = given.get("fakequant_precision_mode")
    return QuantConfig(
        version=given["version"],
        batch_num=given.get("batch_num", 1),
        activation_offset=given.get("activation_offset", True),
        do_fusion=given.get("do_fusion", True),
        skip_fusion_layers=tuple(names),
        fakequant_precision_mode=None if mode == "DEFAULT" else mode,
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
    for name in sorted(config.layers):
        data[name] = _layer_json(config.layers[name])
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False)


def _layer_json(layer: LayerConfig) -> dict[str, Any]:
    act, wts = layer.activation, layer.weight
    out: dict[str, Any] = {"quant_enable": layer.quant_enable}
    if layer.dmq_balancer_param is not None:
        out["dmq_balancer_param"] = layer.dmq_balancer_param
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


def _in_layer(name: str, value: dict[str, Any]) -> LayerConfig:
    try:
        given = _values(value, _LAYER, "a layer")
        act = _values(
            given.pop("activation_quant_params", {}), _ACTIVATION, "activation_quant_params"
        )
        wts = _values(given.pop("weight_quant_params", {}), _WEIGHT, "weight_quant_params")
        return LayerConfig(**given, activation=activation_from(act), weight=weight_from(wts))
    except ConfigError as error:
        raise ConfigError(f"{error} (in layer {name!r})") from None


def activation_from(given: Mapping[str, Any]) -> Activation:
    """Checked keys of activation_quant_params -> `Activation`.

    Raises:
        ConfigError: keys of IFMR and HFMG together, or a step longer than the range.
    """
    ifmr, hfmg = sorted(set(given) & set(_IFMR)), sorted(set(given) & set(_HFMG))
    algo = given.get("act_algo", "hfmg" if hfmg else "ifmr")
    if (ifmr and hfmg) or (ifmr and algo == "hfmg") or (hfmg and algo == "ifmr"):
        raise ConfigError(
            f"act_algo {algo!r} does not take keys of the other algorithm, got {ifmr + hfmg};"
            f" IFMR has {sorted(_IFMR)}, HFMG has {sorted(_HFMG)}"
        )
    made = replace(Activation(), **(_tuples(given) | {"act_algo": algo}))
    start, end = made.search_range
    if algo == "ifmr" and made.search_step > end - start:
        raise ConfigError(
            f"search_step must be at most end - start of search_range, got {made.search_step}"
            f" for [{start}, {end}]"
        )
    return made


def weight_from(given: Mapping[str, Any]) -> Weight:
    """Checked keys of weight_quant_params -> `Weight`.

    Raises:
        ConfigError: keys of AdaRound without ada_quantize.
    """
    ada = sorted(set(given) & set(_ADA))
    if ada and given.get("wts_algo", "arq_quantize") == "arq_quantize":
        raise ConfigError(f"arq_quantize does not take {ada}; they belong to ada_quantize")
    return replace(Weight(), **_tuples(given))


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}


def checked_keys(given: Mapping[str, Any], *, weight: bool) -> dict[str, Any]:
    """Type and range of keys from elsewhere (the simplified configuration), by the same rules.

    Raises:
        ConfigError: a value out of range.
    """
    table = {**_WEIGHT} if weight else {**_ACTIVATION, **_LAYER}
    return {key: _value(key, value, table[key]) for key, value in given.items()}


def _values(value: Any, table: dict[str, _Rule], where: str) -> dict[str, Any]:
    out = {}
    for key, entry in value.items():
        if key not in table:
            note = f", which is {ELSEWHERE[key]}" if key in ELSEWHERE else ""
            raise ConfigError(f"unknown key {key!r}{note} in {where}; {near(key, list(table))}")
        out[key] = _value(key, entry, table[key])
    return out


_TYPES: dict[str, Callable[[Any], bool]] = {
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": _number,
    "str": lambda v: isinstance(v, str),
    "list": lambda v: isinstance(v, list | tuple),
    "dict": lambda v: isinstance(v, dict),
}


def _value(key: str, value: Any, rule: _Rule) -> Any:
    if not _TYPES[rule.type_](value):
        raise ConfigError(f"{key} must be of type {rule.type_}, got {json.dumps(value)[:80]}")
    if not rule.fits(value):
        raise ConfigError(f"{key} must be {rule.range_}, got {json.dumps(value)[:80]}")
    return value


def _refuse_repeats(names: Any, where: str) -> None:
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ConfigError(f"{where} must name each layer once, got {repeated[:3]} repeated")


def _json(text: str, what: str) -> dict[str, Any]:
    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeats([key for key, _ in entries], "an object")
        return dict(entries)

    def constant(word: str) -> Any:
        raise ConfigError(f"{what} must hold finite numbers, got {word}")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError):
            raise ConfigError(
                f"{what} must be JSON, got {error.msg} at line {error.lineno}"
            ) from None
        raise ConfigError(f"{what} must be JSON of a sane size, got {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be a JSON object, got {type(data).__name__}")
    return data
