"""Type and range of every key of AMCT's configurations, and which keys go together.

Source: hicann/amct, common/config/field.py and the quant config reference pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from calibrators.amct.hfmg import NBINS
from deploy.errors import ConfigError
from deploy.targets.ascend.config_types import Activation, Weight
from deploy.targets.ascend.proto import ELSEWHERE, near


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
    return -sys.float_info.max <= value <= sys.float_info.max  # a whole number may have more digits


_PERCENTILE = _Rule("float", lambda v: 0.5 < v <= 1, "(0.5, 1]")
_ANY = _Rule("bool", lambda v: True, "true or false")
GLOBAL = {
    "version": _Rule("int", lambda v: v == 1, "1"),
    "batch_num": _Rule("int", lambda v: 0 < v < 2**31, "> 0 and below 2^31"),
    "activation_offset": _ANY,
    "joint_quant": _Rule("bool", lambda v: not v, "false (only AMCT's binary packages have it)"),
    "weight_offset": _Rule("bool", lambda v: not v, "false (the hardware takes offset_w 0)"),
    "do_fusion": _ANY,
    "skip_fusion_layers": _Rule("list", lambda v: all(isinstance(n, str) for n in v), "names"),
    "fakequant_precision_mode": _Rule(
        "str", lambda v: v in ("FORCE_FP16_QUANT", "DEFAULT"), "FORCE_FP16_QUANT or DEFAULT"
    ),
    "tensor_quantize": _Rule(
        "list", lambda v: all(isinstance(one, dict) for one in v), "a list of objects"
    ),
}
TENSOR = {
    "layer_name": _Rule("str", lambda v: True, "the name of an Add or MaxPool"),
    "input_index": _Rule("int", lambda v: 0 <= v < 2**31, ">= 0"),
    "activation_quant_params": _Rule("dict", lambda v: True, "an object"),
}
LAYER = {
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
ACTIVATION = {
    "num_bits": _Rule("int", lambda v: v in (4, 8, 16), "4, 8 or 16"),
    "act_algo": _Rule("str", lambda v: v in ("ifmr", "hfmg"), "'ifmr' or 'hfmg'"),
    "asymmetric": _ANY,
    **_IFMR,
    **_HFMG,
}
MOST_ITERATIONS = 1_000_000  # AMCT's default is 10000, which takes minutes a layer
_ADA = {
    "num_iteration": _Rule(
        "int", lambda v: 0 <= v <= MOST_ITERATIONS, f">= 0 and at most {MOST_ITERATIONS}"
    ),
    "reg_param": _Rule("float", lambda v: 0 < v < 1, "(0, 1)"),
    "beta_range": _Rule(
        "list", lambda v: _pair(v) and v[0] > v[1] > 0, "[start, end], start > end > 0"
    ),
    "warm_start": _Rule("float", lambda v: 0 < v < 1, "(0, 1)"),
}
WEIGHT = {
    "num_bits": _Rule("int", lambda v: v in (4, 6, 7, 8), "4, 6, 7 or 8"),
    "wts_algo": _Rule(
        "str", lambda v: v in ("arq_quantize", "ada_quantize"), "'arq_quantize' or 'ada_quantize'"
    ),
    "channel_wise": _ANY,
    **_ADA,
}


_MOST_STEPS = 10_000  # of one search; AMCT's default is 60


def activation_from(given: Mapping[str, Any]) -> Activation:
    """Checked keys of activation_quant_params -> `Activation`.

    Raises:
        ConfigError: keys of IFMR and HFMG together, a step longer than the range, or so short that
            a search would not end.
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
    if algo == "ifmr" and (end - start) / made.search_step > _MOST_STEPS:
        raise ConfigError(
            f"search_step must leave at most {_MOST_STEPS} scales to try a layer, got"
            f" {(end - start) / made.search_step:.3g} with {made.search_step} for [{start}, {end}];"
            " 0.01 is AMCT's"
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
    table = {**WEIGHT} if weight else {**ACTIVATION, **LAYER}
    return {key: checked_value(key, value, table[key]) for key, value in given.items()}


def checked_values(value: Any, table: dict[str, _Rule], where: str) -> dict[str, Any]:
    """An object of the JSON, every key known and every value in its range.

    Raises:
        ConfigError: an unknown key, with the nearest known one; a wrong type or value.
    """
    out = {}
    for key, entry in value.items():
        if key not in table:
            note = f", which is {ELSEWHERE[key]}" if key in ELSEWHERE else ""
            raise ConfigError(f"unknown key {key!r}{note} in {where}; {near(key, list(table))}")
        out[key] = checked_value(key, entry, table[key])
    return out


_TYPES: dict[str, Callable[[Any], bool]] = {
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": _number,
    "str": lambda v: isinstance(v, str),
    "list": lambda v: isinstance(v, list | tuple),
    "dict": lambda v: isinstance(v, dict),
}


def checked_value(key: str, value: Any, rule: _Rule) -> Any:
    """The value, if it has the type and range of its rule.

    Raises:
        ConfigError: it has not.
    """
    if not _TYPES[rule.type_](value):
        raise ConfigError(f"{key} must be of type {rule.type_}, got {json.dumps(value)[:80]}")
    if not rule.fits(value):
        raise ConfigError(f"{key} must be {rule.range_}, got {json.dumps(value)[:80]}")
    return value


def refuse_repeats(names: Any, where: str) -> None:
    """Refuse a name that is given twice.

    Raises:
        ConfigError: there is one.
    """
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ConfigError(f"{where} must name each layer once, got {repeated[:3]} repeated")
