"""An old calibrator's search as a method of calib8's, and its own cache beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibrators.legacy import QUANTILE
from calibrators.tensorrt import CLASSES
from deploy.calibration import trt_cache
from deploy.errors import CacheError
from deploy.method import Method
from deploy.targets.tensorrt.cache_tools import diff

if TYPE_CHECKING:
    from deploy.feed.calibrator import CalibratorScript

_METHODS = {"entropy2": "entropy", "entropy": "entropy", "minmax": "minmax", "legacy": "legacy"}


def method_of(script: CalibratorScript) -> tuple[Method, str] | None:
    """The method that stands for the calibrator's base class, and why; None where it has none.

    ==========================  ==================================================================
    IInt8EntropyCalibrator2     entropy
    IInt8EntropyCalibrator      entropy: how the first one searched is not known
    IInt8MinMaxCalibrator       minmax
    IInt8LegacyCalibrator       legacy, or percentile where `get_quantile` is not TensorRT's own;
                                what it does with `get_regression_cutoff` is not known
    ==========================  ==================================================================
    """
    if script.algorithm is None:
        return None
    method = Method.of(_METHODS[script.algorithm])
    if script.quantile is not None and script.quantile != QUANTILE:
        method = Method.of("percentile", {"percent": 100 * script.quantile})
    why = {
        "entropy": ", whose own search is not known, so that of the second one stands for it",
        "legacy": ", without its regression, which is not known",
    }.get(script.algorithm, "")
    base = CLASSES[script.algorithm]
    return method, f"ranges are found by {method.label}, since {script} is an {base}{why}"


def agreement(known: bytes, made: trt_cache.CalibrationCache) -> str:
    """How far the cache that a script reads agrees with the one that was made, as a sentence."""
    try:
        old = trt_cache.parse(known, origin="the cache that the script reads")
        found = diff(old, made)
    except CacheError as error:
        return f"the script's own cache was not compared: {error}"
    changed = [d for d in found if d.first is not None and d.second is not None]
    alone = sum(d.second is None for d in found)
    count = len(old.scales())
    words = [f"{count - len(changed) - alone} of its {count} scales are equal to the bit"]
    if changed:
        words.append(f"{len(changed)} differ{_most([d.ratio for d in changed], changed[0].name)}")
    if alone:
        words.append(f"{alone} are of tensors that are not in the new one")
    return (
        f"the cache that the script reads ({old.header.text}) was compared and not used:"
        f" {', '.join(words)}"
    )


def _most(ratios: list[float | None], first: str) -> str:
    """By how much two caches differ; the largest change is the first."""
    known = [abs(float(np.log2(ratio))) for ratio in ratios if ratio]
    if not known or not ratios[0]:
        return ""
    median = 2 ** float(np.median(known)) - 1
    return f", by {100 * median:.2g} % in the median, most {first} ({ratios[0]:.4g} times)"
