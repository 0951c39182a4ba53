"""AMCT's quant config as dataclasses, with the type and range of each key and the bit widths.

Source of the keys: hicann/amct, common/config/field.py and the quant config reference pages.

Layers support these bit widths besides 8; activations of 4 bits are supported by all:

==============  ===================================================  ======================
width           layers                                               other layers
==============  ===================================================  ======================
weights 4       an even number of input channels, one group          8, with a note
weights 6, 7    Conv with a 2-D kernel                               8, with a note, if set by
                                                                     common_config or JSON;
                                                                     else refused
activations 16  Conv and ConvTranspose with a 1-D or 2-D kernel,     8, with a note, if set by
                Gemm                                                 common_config; else
                                                                     refused
==============  ===================================================  ======================

Source: hicann/amct, its capacity table and the checks of its configurations
(INT16_QUANTIZABLE_ONNX_TYPES, check_int4_cin_pack_supported).

tensor_quantize quantizes inputs of Add and MaxPool. AMCT's open source shows its form (a list in
the quant config JSON, before the layers), AMCT's documentation the two node types. The messages
are calib8's.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from calibrators.amct.adaround import AdaParams
from calibrators.amct.hfmg import NBINS
from calibrators.amct.ifmr import count_steps
from deploy.errors import ConfigError, counted
from deploy.targets.ascend.layers import TENSOR_QUANTIZE_OPS, Layer, LayerGraph
from deploy.targets.ascend.proto import suggest_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationParams:
    """activation_quant_params of one layer; `asymmetric` None means activation_offset decides."""

    num_bits: int = 8
    act_algo: str = "ifmr"
    asymmetric: bool | None = None
    max_percentile: float = 0.999999
    min_percentile: float = 0.999999
    search_range: tuple[float, float] = (0.7, 1.3)
    search_step: float = 0.01
    num_of_bins: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParams(AdaParams):
    """weight_quant_params of one layer; those of `AdaParams` belong to ada_quantize."""

    num_bits: int = 8
    wts_algo: str = "arq_quantize"
    channel_wise: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The entry of one layer."""

    quant_enable: bool = True
    dmq_balancer_param: float | None = None
    activation: ActivationParams = field(default_factory=ActivationParams)
    weight: WeightParams = field(default_factory=WeightParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """A complete quant config.

    Attributes:
        version: version of the format.
        batch_num: number of AMCT batches to calibrate with.
        activation_offset: default of `asymmetric`.
        do_fusion: fold BatchNormalizations.
        skip_fusion_layers: Convs whose BatchNormalization is not folded.
        fakequant_precision_mode: "FORCE_FP16_QUANT" or None.
        tensors: '<node>:<index>' of an input of tensor_quantize -> its activation settings.
        layers: layer -> its entry.
        notes: sentences on settings that a layer does not support; never written to the file.
    """

    version: int = 1
    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    fakequant_precision_mode: str | None = None
    tensors: Mapping[str, ActivationParams] = field(default_factory=dict)
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def enabled_layers(self) -> dict[str, LayerConfig]:
        """Return the enabled layers."""
        return {name: layer for name, layer in self.layers.items() if layer.quant_enable}

    def enabled_entries(self) -> dict[str, LayerConfig]:
        """Return the enabled layers and the tensor_quantize inputs, by their name in a record."""
        inputs = {
            name: LayerConfig(activation=activation) for name, activation in self.tensors.items()
        }
        return {**self.enabled_layers(), **inputs}


@dataclass(frozen=True, slots=True)
class _Rule:
    """Type and range of one key; `range` continues the sentence "<key> must be ..."."""

    type: type
    range: str = ""
    fits: Callable[[Any], bool] = lambda value: True


def _is_number(value: object) -> bool:
    """Whether a JSON value is a finite number, and no bool."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # an int may be larger than a float


def _is_pair(value: Any) -> bool:
    """Whether a list holds two numbers."""
    return len(value) == 2 and all(map(_is_number, value))


_ANY_BOOL = _Rule(bool)
_ANY_OBJECT = _Rule(dict)
_PERCENTILE = _Rule(float, "(0.5, 1]", lambda v: 0.5 < v <= 1)
_SHARE = _Rule(float, "(0, 1)", lambda v: 0 < v < 1)
MODEL_RULES = {
    "version": _Rule(int, "1", lambda v: v == 1),
    "batch_num": _Rule(int, "> 0 and below 2^31", lambda v: 0 < v < 2**31),
    "activation_offset": _ANY_BOOL,
    "joint_quant": _Rule(bool, "false (only AMCT's binary packages have it)", lambda v: not v),
    "weight_offset": _Rule(bool, "false (the hardware takes offset_w 0)", lambda v: not v),
    "do_fusion": _ANY_BOOL,
    "skip_fusion_layers": _Rule(list, "names", lambda v: all(isinstance(name, str) for name in v)),
    "fakequant_precision_mode": _Rule(
        str, "FORCE_FP16_QUANT or DEFAULT", lambda v: v in ("FORCE_FP16_QUANT", "DEFAULT")
    ),
    "tensor_quantize": _Rule(
        list, "a list of objects", lambda v: all(isinstance(entry, dict) for entry in v)
    ),
}
TENSOR_RULES = {
    "layer_name": _Rule(str),
    "input_index": _Rule(int, ">= 0", lambda v: 0 <= v < 2**31),
    "activation_quant_params": _ANY_OBJECT,
}
LAYER_RULES = {
    "quant_enable": _ANY_BOOL,
    "dmq_balancer_param": _Rule(float, "[0.2, 0.8]", lambda v: 0.2 <= v <= 0.8),
    "activation_quant_params": _ANY_OBJECT,
    "weight_quant_params": _ANY_OBJECT,
}
IFMR_RULES = {
    "max_percentile": _PERCENTILE,
    "min_percentile": _PERCENTILE,
    "search_range": _Rule(
        list, "[start, end], 0 < start < end", lambda v: _is_pair(v) and 0 < v[0] < v[1]
    ),
    "search_step": _Rule(float, "> 0", lambda v: v > 0),
}
HFMG_RULES = {"num_of_bins": _Rule(int, f"one of {list(NBINS)}", lambda v: v in NBINS)}
ACTIVATION_RULES = {
    "num_bits": _Rule(int, "4, 8 or 16", lambda v: v in (4, 8, 16)),
    "act_algo": _Rule(str, "'ifmr' or 'hfmg'", lambda v: v in ("ifmr", "hfmg")),
    "asymmetric": _ANY_BOOL,
    **IFMR_RULES,
    **HFMG_RULES,
}
MAX_ITERATIONS = 1_000_000  # AMCT's default is 10000, which takes minutes a layer
ADA_RULES = {
    "num_iteration": _Rule(
        int, f">= 0 and at most {MAX_ITERATIONS}", lambda v: 0 <= v <= MAX_ITERATIONS
    ),
    "reg_param": _SHARE,
    "beta_range": _Rule(
        list, "[start, end], start > end > 0", lambda v: _is_pair(v) and v[0] > v[1] > 0
    ),
    "warm_start": _SHARE,
}
WEIGHT_RULES = {
    "num_bits": _Rule(int, "4, 6, 7 or 8", lambda v: v in (4, 6, 7, 8)),
    "wts_algo": _Rule(
        str, "'arq_quantize' or 'ada_quantize'", lambda v: v in ("arq_quantize", "ada_quantize")
    ),
    "channel_wise": _ANY_BOOL,
    **ADA_RULES,
}

_MAX_SCALES = 10_000  # scales tried in one search; AMCT's default is 60


def make_activation_params(values: Mapping[str, Any]) -> ActivationParams:
    """Return the `ActivationParams` of activation_quant_params, whose values are checked already.

    If act_algo is not set, the keys of one of the two algorithms decide; without such keys it is
    "ifmr".

    `values`: key -> value, for the keys that are set.

    Raises:
        ConfigError: a key of the other algorithm, or a search_step that leaves no or too many
            scales to try.
    """
    ifmr_keys = sorted(values.keys() & IFMR_RULES)
    hfmg_keys = sorted(values.keys() & HFMG_RULES)
    algorithm = values.get("act_algo", "hfmg" if hfmg_keys else "ifmr")
    keys_of_other = hfmg_keys if algorithm == "ifmr" else ifmr_keys
    if keys_of_other:
        raise ConfigError(
            f"act_algo {algorithm!r} does not take keys of the other algorithm, got"
            f" {ifmr_keys + hfmg_keys}; IFMR has {sorted(IFMR_RULES)}, HFMG has"
            f" {sorted(HFMG_RULES)}"
        )
    params = ActivationParams(**{**values, "act_algo": algorithm})
    if algorithm == "hfmg":
        return params

    step_count = count_steps(params.search_range, params.search_step)
    if not 1 <= step_count <= _MAX_SCALES:
        raise ConfigError(
            f"search_step must leave 1 to {_MAX_SCALES} scales to try in search_range, got"
            f" {step_count:.3g} with {params.search_step} for {list(params.search_range)}; AMCT's"
            " default is 0.01"
        )
    return params


def make_weight_params(values: Mapping[str, Any]) -> WeightParams:
    """Return the `WeightParams` of checked weight_quant_params keys."""
    params = WeightParams(**values)
    ada_keys = sorted(values.keys() & ADA_RULES)
    if ada_keys and params.wts_algo == "arq_quantize":
        raise ConfigError(f"arq_quantize does not take {ada_keys}; they belong to ada_quantize")
    return params


def check_values(
    values: Mapping[str, Any], rule_by_key: Mapping[str, _Rule], object_name: str
) -> dict[str, Any]:
    """Return the values of an object's keys, after checking keys, types and ranges.

    Args:
        values: key -> value.
        rule_by_key: key -> its rule, for all keys that are known.
        object_name: name of the object, for the message.

    Raises:
        ConfigError: an unknown key, a value of another type, or out of range.
    """
    checked = {}
    for key, value in values.items():
        if key not in rule_by_key:
            raise ConfigError(
                f"unknown key {key!r} in {object_name}; {suggest_name(key, list(rule_by_key))}"
            )
        checked[key] = check_value(key, value, rule_by_key[key])
    return checked


def _has_type(value: Any, expected: type) -> bool:
    """Whether a JSON value has a type; an int is a float too, and a bool is no number."""
    if expected is float:
        return _is_number(value)
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, expected)


def check_value(key: str, value: Any, rule: _Rule) -> Any:
    """Return the value, a list as a tuple, if it has the type and range of its rule."""
    if not _has_type(value, rule.type):
        raise ConfigError(
            f"{key} must be of type {rule.type.__name__}, got {json.dumps(value)[:80]}"
        )
    if not rule.fits(value):
        raise ConfigError(f"{key} must be {rule.range}, got {json.dumps(value)[:80]}")
    return tuple(value) if isinstance(value, list) else value


def refuse_repeats(names: Iterable[str], list_name: str) -> list[str]:
    """Return the names of a list; refuse repeated ones."""
    counts = Counter(names)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ConfigError(f"{list_name} must name each once, got {repeated[:3]} repeated")
    return list(counts)


@contextmanager
def add_place_to_errors(place: str) -> Iterator[None]:
    """Add a place, such as "in layer 'conv1'", to the message of a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} ({place})") from None


INT16_LAYERS = "Conv and ConvTranspose with a 1-D or 2-D kernel, and Gemm"
# bits of weights, fewer than 8 -> the layers that support them
LAYERS_BY_WEIGHT_BITS = {
    4: "layers with an even number of input channels and one group",
    6: "Conv with a 2-D kernel",
    7: "Conv with a 2-D kernel",
}
_SHOWN_NAMES = 3  # in a sentence


def allows_activation_bits(layer: Layer, bits: int) -> bool:
    """Whether a layer supports activations of this bit width."""
    return bits != 16 or (
        layer.kind in ("Conv", "ConvTranspose", "Gemm") and layer.spatial_rank < 3
    )


def allows_weight_bits(layer: Layer, bits: int) -> bool:
    """Whether a layer supports weights of this bit width; as in AMCT, a pool has 4 or 8."""
    if bits == 4:
        return layer.group == 1 and layer.channels_in % 2 == 0
    return bits == 8 or (layer.kind == "Conv" and layer.spatial_rank == 2)


def weight_width_notes(
    requested: Mapping[str, LayerConfig], actual: Mapping[str, LayerConfig]
) -> list[str]:
    """Return notes on enabled layers that get 8-bit weights instead of the requested width.

    `requested`, `actual`: layer -> its settings, as configured and as resolved.
    """
    names_by_bits: dict[int, list[str]] = {}  # requested width -> layers
    for name, entry in requested.items():
        bits = entry.weight.num_bits
        if entry.quant_enable and bits != actual[name].weight.num_bits:
            names_by_bits.setdefault(bits, []).append(name)
    notes = []
    for bits, names in sorted(names_by_bits.items()):
        notes.append(
            f"The weights of {summarize_layers(names)} have 8 bits, not {bits}: only"
            f" {LAYERS_BY_WEIGHT_BITS[bits]} can have {bits}."
        )
    return notes


def activation_width_notes(names: Collection[str]) -> list[str]:
    """Return a note on layers that get 8-bit activations though common_config has 16."""
    if not names:
        return []
    return [
        f"The activations of {summarize_layers(names)} have 8 bits, not 16: only"
        f" {INT16_LAYERS} can have 16."
    ]


def summarize_layers(names: Collection[str]) -> str:
    """Return the number of layers and the first few names."""
    shown = list(names)[:_SHOWN_NAMES]
    if len(names) > _SHOWN_NAMES:
        shown.append("...")
    return f"{counted(len(names), 'layer')} ({', '.join(shown)})"


def collect_tensors(
    entries: Iterable[tuple[str, ActivationParams]],
) -> dict[str, ActivationParams]:
    """Return the entries of tensor_quantize, ('<node>:<index>', activation settings), as a dict.

    Raises:
        ConfigError: two entries are of one input.
    """
    inputs = list(entries)
    refuse_repeats((name for name, _ in inputs), "tensor_quantize")
    return dict(inputs)


def resolve_tensor(
    key: str, activation: ActivationParams, config: QuantConfig, graph: LayerGraph
) -> ActivationParams:
    """Return the settings of a tensor_quantize input, with `asymmetric` set.

    The key tensor_quantize of a configuration lists inputs of Add and MaxPool to be quantized. If
    `asymmetric` is unset, it is that of activation_offset.

    Args:
        key: '<node>:<index>' of the input.
        activation: its settings.
        config: has activation_offset.
        graph: the layers of the model.

    Raises:
        ConfigError: the input cannot be quantized by itself, or not with these settings.
    """
    check_tensor_input(key, graph)
    if activation.num_bits != 8:
        raise ConfigError(
            f"tensor_quantize is 8-bit, got {activation.num_bits} bits for {key!r};"
            " leave the type out"
        )
    if activation.asymmetric is None:
        return replace(activation, asymmetric=config.activation_offset)
    return activation


def check_tensor_input(key: str, graph: LayerGraph) -> None:
    """Refuse an input of a node, '<node>:<index>', that tensor_quantize cannot have.

    The key tensor_quantize of a configuration lists inputs of Add and MaxPool to be quantized.

    Raises:
        ConfigError: there is no such input, it is one of another type of node, it cannot be int8,
            or a node has its name.
    """
    name, _, index = key.rpartition(":")
    op = graph.ops.get(name)
    if op is None:
        candidates = [node for node, node_op in graph.ops.items() if node_op in TENSOR_QUANTIZE_OPS]
        raise ConfigError(
            f"node {name!r} of tensor_quantize does not exist in the model;"
            f" {suggest_name(name, candidates)}"
        )
    if op not in TENSOR_QUANTIZE_OPS:
        raise ConfigError(
            f"tensor_quantize takes inputs of {' and '.join(TENSOR_QUANTIZE_OPS)}, got {name!r}"
            f" of type {op}"
        )
    if key in graph.unfit_inputs:
        raise ConfigError(
            f"input {index} of {name!r} cannot be quantized: {graph.unfit_inputs[key]}; take it out"
            " of tensor_quantize"
        )
    if key not in graph.optional_layers:  # which has all inputs of Add and MaxPool that can be int8
        raise ConfigError(
            f"input_index of {name!r}, of type {op}, must be below {TENSOR_QUANTIZE_OPS[op]}, got"
            f" {index}"
        )
    if key in graph.ops:
        raise ConfigError(
            f"a record cannot tell input {index} of {name!r} from the node {key!r}; rename one"
        )
