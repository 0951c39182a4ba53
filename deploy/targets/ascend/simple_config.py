"""AMCT's simplified configuration (.cfg, protobuf text) to and from a quant config.

Precedence: override_layer_configs, override_layer_types, common_config, defaults. As in AMCT, an
algorithm is taken with all its parameters: a layer whose override names hfmg_quantize takes nothing
from a common ifmr_quantize. Only `asymmetric` is inherited, between equal algorithms.
"""

from dataclasses import replace
from typing import Any

from deploy.errors import ConfigError
from deploy.targets.ascend.config import no_layer_reason, resolve_config
from deploy.targets.ascend.config_keys import (
    ActivationParams,
    LayerConfig,
    QuantConfig,
    TensorConfig,
    WeightParams,
    activation_from,
    activation_width_notes,
    check_simple_keys,
    refuse_repeats,
    takes_activations,
    weight_from,
)
from deploy.targets.ascend.layers import ALIASES, TYPES, Layer, LayerGraph
from deploy.targets.ascend.proto import message_class, parse_text, print_text, suggest_name

_BITS = {1: 8, 2: 16}  # DataType.INT8, INT16


def read_simple_config(text: str, graph: LayerGraph, what: str = "the config") -> QuantConfig:
    """Parse the simplified configuration of file `what` and resolve it for the model's layers.

    Raises:
        ConfigError: text that does not parse, unknown or repeated names and types, values out of
            range, algorithms that a layer does not support.
    """
    message = parse_text("AMCTConfig", text, what)
    if message.joint_quant:
        raise ConfigError(
            f"{what} must not set joint_quant to true, which only AMCT's binary packages have;"
            " remove the line"
        )
    skipped = _skipped(message, graph)
    by_type = _by_type(message)
    by_name = _by_name(message, graph)
    common = message.common_config if message.HasField("common_config") else None
    layers, lowered = {}, []
    named = {n: one for n, one in graph.optional_layers.items() if n in by_name}
    for name, layer in sorted({**graph.layers, **named}.items()):
        given = (by_name.get(name), by_type.get(layer.kind), common)
        parts = [part for part in given if part is not None]
        try:
            entry = _merged(parts, layer, common)
        except ConfigError as error:
            raise ConfigError(f"{error} (in layer {name!r})") from None
        deciding = next((part for part in parts if part.WhichOneof("activations")), None)
        if deciding is common and not takes_activations(layer, entry.activation.num_bits):
            entry = replace(entry, activation=replace(entry.activation, num_bits=8))
            lowered += [name] if name not in skipped else []
        layers[name] = replace(entry, quant_enable=name not in skipped)
    batch_num = message.batch_num if message.HasField("batch_num") else 1
    if not 0 < batch_num < 2**31:
        raise ConfigError(f"batch_num must be > 0 and below 2^31, got {batch_num}")
    config = QuantConfig(
        batch_num=batch_num,
        activation_offset=_true_unless_set(message, "activation_offset"),
        do_fusion=_true_unless_set(message, "do_fusion"),
        skip_fusion_layers=tuple(refuse_repeats(message.skip_fusion_layers, "skip_fusion_layers")),
        fakequant_precision_mode=(
            "FORCE_FP16_QUANT" if message.HasField("fakequant_precision_mode") else None
        ),
        tensors=tuple(_tensor(one, common) for one in message.tensor_quantize),
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
    for one in config.tensors:
        given = message.tensor_quantize.add(layer_name=one.layer_name, input_index=one.input_index)
        _write_activation(given, one.activation)
    for name, layer in sorted(config.layers.items()):
        if not layer.quant_enable:
            message.skip_layers.append(name)
        entry = message.override_layer_configs.add(layer_name=name).calibration_config
        _write_weight(entry, layer.weight)
        _write_activation(entry, layer.activation)
        if layer.dmq_balancer_param is not None:
            entry.dmq_balancer.migration_strength = layer.dmq_balancer_param
    return print_text(message)


def _true_unless_set(message: Any, name: str) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else True


def _kinds(word: str) -> tuple[str, ...]:
    """Return the ONNX op types of a layer type in ONNX's or torch's vocabulary."""
    if word in TYPES:
        return (word,)
    if word in ALIASES:
        return ALIASES[word]
    known = [*TYPES, *ALIASES]
    raise ConfigError(
        f"layer type {word!r} does not support quantization; {suggest_name(word, known)}"
    )


def _skipped(message: Any, graph: LayerGraph) -> set[str]:
    skipped = set()
    for name in refuse_repeats(message.skip_layers, "skip_layers"):
        if name not in graph.layers and name not in graph.float_reasons:
            raise ConfigError(
                f"layer {name!r} of skip_layers does not exist in the model;"
                f" {suggest_name(name, list(graph.layers))}"
            )
        skipped.add(name)
    words = refuse_repeats(message.skip_layer_types, "skip_layer_types")
    kinds = {kind for word in words for kind in _kinds(word)}
    left = {layer.kind for layer in graph.layers.values()} - kinds
    if kinds and graph.layers and not (left or message.tensor_quantize):
        raise ConfigError(
            f"skip_layer_types must leave a type to quantize, got {words}; every layer of the"
            " model is of these types"
        )
    return skipped | {n for n, layer in graph.layers.items() if layer.kind in kinds}


def _by_type(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for override in message.override_layer_types:
        _complete(override, "layer_type", "override_layer_types")
        for kind in _kinds(override.layer_type):
            if kind in found:
                raise ConfigError(
                    "override_layer_types must name each type once, got"
                    f" {override.layer_type!r} again"
                )
            found[kind] = override.calibration_config
    return found


def _by_name(message: Any, graph: LayerGraph) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for override in message.override_layer_configs:
        _complete(override, "layer_name", "override_layer_configs")
        name = override.layer_name
        if name not in graph.configurable_names:
            raise ConfigError(
                f"layer {name!r} of override_layer_configs {no_layer_reason(name, graph)}"
            )
        if name in found:
            raise ConfigError(
                f"override_layer_configs must name each layer once, got {name!r} again"
            )
        found[name] = override.calibration_config
    return found


def _complete(override: Any, key: str, where: str, other: str = "calibration_config") -> None:
    for needed in (key, other):
        if not override.HasField(needed):
            raise ConfigError(f"each of {where} must hold {needed}, got one without")


def _merged(parts: list[Any], layer: Layer, common: Any) -> LayerConfig:
    """Merge messages, strongest first: the first with an algorithm of a group decides the group."""
    weights = next((part for part in parts if part.WhichOneof("weights")), None)
    acts = next((part for part in parts if part.WhichOneof("activations")), None)
    balancer = next((part for part in parts if part.WhichOneof("balancer")), None)
    act = _activation(acts) if acts is not None else ActivationParams()
    if not layer.symmetric_only:
        act = _like_common(act, common) if acts is not None else act
    elif acts is common:
        act = replace(act, asymmetric=False)
    strength = None
    if balancer is not None and not (balancer is common and not layer.weight):
        dmq = balancer.dmq_balancer
        given = _decimal(dmq.migration_strength) if dmq.HasField("migration_strength") else 0.5
        strength = check_simple_keys({"dmq_balancer_param": given}, weight=False)[
            "dmq_balancer_param"
        ]
    weight = _weight(weights) if weights is not None else WeightParams()
    if weights is common and weight.wts_algo == "ada_quantize" and not layer.can_use_adaround:
        weight = WeightParams()
    return LayerConfig(activation=act, weight=weight, dmq_balancer_param=strength)


def _tensor(part: Any, common: Any) -> TensorConfig:
    """Return one tensor_quantize entry; its default algorithm is IFMR, as in AMCT."""
    _complete(part, "layer_name", "tensor_quantize", "input_index")
    try:
        chosen = _activation(part) if part.WhichOneof("activations") else ActivationParams()
    except ConfigError as error:
        raise ConfigError(f"{error} (in tensor_quantize of {part.layer_name!r})") from None
    return TensorConfig(
        layer_name=part.layer_name,
        input_index=part.input_index,
        activation=_like_common(chosen, common),
    )


def _like_common(act: ActivationParams, common: Any) -> ActivationParams:
    """Inherit `asymmetric` from common_config if unset and both have the same algorithm."""
    if act.asymmetric is not None or common is None or not common.WhichOneof("activations"):
        return act
    shared = _activation(common)
    same = shared.act_algo == act.act_algo
    return replace(act, asymmetric=shared.asymmetric) if same else act


def _decimal(value: float) -> float:
    """Return a protobuf float32 as the decimal in the file: 0.999999, not 0.99999898."""
    return float(f"{value:.7g}")


def _set_fields(message: Any) -> dict[str, Any]:
    found = {}
    for descriptor, value in message.ListFields():
        found[descriptor.name] = _decimal(value) if isinstance(value, float) else value
    return found


def _range(given: dict[str, Any], key: str, default: tuple[float, float]) -> dict[str, list[float]]:
    """Return the key of a range whose ends are keys of their own here; {} without an end."""
    ends = [given.pop(f"{key}_{end}", None) for end in ("start", "end")]
    if ends == [None, None]:
        return {}
    return {key: [one if end is None else end for end, one in zip(ends, default, strict=True)]}


def _activation(part: Any) -> ActivationParams:
    algo = part.WhichOneof("activations")
    given = _set_fields(getattr(part, algo))
    keys: dict[str, Any] = {"act_algo": "ifmr" if algo == "ifmr_quantize" else "hfmg"}
    if "dst_type" in given:
        keys["num_bits"] = _BITS[given.pop("dst_type")]
    keys |= _range(given, "search_range", ActivationParams().search_range)
    return activation_from(check_simple_keys({**given, **keys}, weight=False))


def _weight(part: Any) -> WeightParams:
    algo = part.WhichOneof("weights")
    given = _set_fields(getattr(part, algo))
    keys: dict[str, Any] = {"wts_algo": algo}
    if "quant_bits" in given:
        keys["num_bits"] = given.pop("quant_bits")
    keys |= _range(given, "beta_range", WeightParams().beta_range)
    return weight_from(check_simple_keys({**given, **keys}, weight=True))


def _write_weight(entry: Any, weight: WeightParams) -> None:
    if weight.wts_algo == "arq_quantize":
        entry.arq_quantize.SetInParent()
        if weight.num_bits != 8:
            entry.arq_quantize.quant_bits = weight.num_bits
        if weight.channel_wise is not None:
            entry.arq_quantize.channel_wise = weight.channel_wise
        return
    ada = entry.ada_quantize
    ada.num_iteration, ada.reg_param = weight.num_iteration, weight.reg_param
    ada.beta_range_start, ada.beta_range_end = weight.beta_range
    ada.warm_start = weight.warm_start
    if weight.channel_wise is not None:
        ada.channel_wise = weight.channel_wise


def _write_activation(entry: Any, act: ActivationParams) -> None:
    if act.act_algo == "ifmr":
        target = entry.ifmr_quantize
        target.search_range_start, target.search_range_end = act.search_range
        for name in ("search_step", "max_percentile", "min_percentile"):
            setattr(target, name, getattr(act, name))
    else:
        target = entry.hfmg_quantize
        target.num_of_bins = act.num_of_bins
    if act.asymmetric is not None:
        target.asymmetric = act.asymmetric
    numbers = {bits: number for number, bits in _BITS.items()}
    if act.num_bits not in numbers:
        raise ConfigError(
            f"a simplified configuration has 8 or 16-bit activations, got {act.num_bits} bits;"
            " write JSON"
        )
    if act.num_bits != 8:
        target.dst_type = numbers[act.num_bits]
