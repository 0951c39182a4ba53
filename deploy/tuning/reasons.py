"""The reason why each node stays float, in a sentence for the report and the plan.

A plan stores the sentence alone, so its kind and its figure are read back from it.
"""

import math
import re

from deploy.tuning.search import Search
from deploy.tuning.search_options import Trial

# kinds of reasons
NOISE, TIME, CONSEQUENCE, RULE = "noise", "time", "consequence", "rule"
BETWEEN = "converting to float and back would cost more than int8 saves"
NOISE_NOTE = "dB: on the few samples of the search, not of the built file"
_NOISY, _SLOWER = "alone in ", "slower in int8"  # how reasons of the kinds NOISE and TIME begin
_DECIBEL = re.compile(r"leaves (-?(?:[0-9]+\.?[0-9]*|inf)) dB of")
_MIN_NOISE_SHARE = 0.02  # of all noise: a layer with less is not float for its noise
_NO_NOISE_DB = 60.0  # nor is one that leaves more, whatever its share


def float_reasons(search: Search, built_trial: Trial) -> dict[str, str]:
    """Return node in float -> the reason, in the model's order, for the trial that is built."""
    reasons = {}
    for unit, node_names in search.units.members.items():
        if unit not in built_trial.in_float:
            continue
        if unit in search.refused:
            reason = f"it cannot be run in {search.precision}"
        elif unit in search.float_adds:
            reason = search.float_adds[unit]
        else:
            # neither noisy nor slow in int8: it is float for the units next to it
            reason = _noise_reason(search, unit) or _time_reason(search, unit) or BETWEEN
        reasons.update(dict.fromkeys(node_names, reason))
    return reasons


def _noise_reason(search: Search, unit: str) -> str:
    """Return the reason by the noise of a unit, or of its group; "" where it is small."""
    if search.sensitivity is None:
        return ""
    groups = search.sensitivity.groups
    total_loss = sum(noise.worst for noise in groups.values())
    for group, noise in groups.items():
        is_noisy = noise.worst > _MIN_NOISE_SHARE * total_loss and noise.db < _NO_NOISE_DB
        if unit in group and is_noisy:
            subject = "it" if len(group) == 1 else f"its group of {len(group)} layers"
            sqnr_db = round(noise.db, 1) + 0.0  # never -0.0
            worst_slice = noise.worst_slice_label
            return f"{_NOISY}{search.precision} {subject} leaves {sqnr_db:.1f} dB of {worst_slice}"
    return ""


def _time_reason(search: Search, unit: str) -> str:
    """Return the reason by the price of a unit; "" where int8 is no slower."""
    int8_price, float_price = search.prices.unit_prices[unit]
    return f"{_SLOWER} on this kind of CPU" if int8_price > float_price else ""


def reason_kind(reason: str) -> str:
    """Return the kind of a reason: NOISE, TIME or CONSEQUENCE by the search, else RULE."""
    if reason.startswith(_NOISY):
        return NOISE
    if reason.startswith(_SLOWER):
        return TIME
    return CONSEQUENCE if reason == BETWEEN else RULE


def reason_sqnr_db(reason: str) -> float:
    """Return the SQNR in dB in a reason of kind NOISE; inf where there is none."""
    match = _DECIBEL.search(reason)
    return float(match[1]) if match else math.inf
