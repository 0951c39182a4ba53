"""The ranges of a calibration as TensorRT's cache of a model has them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.calibration import trt_cache
from deploy.targets.tensorrt.naming import ONNX, cache_tensors, scale_owners

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scale
    from deploy.calibration.found import Found


def cache_of(model: onnx.ModelProto, found: Found, version: str) -> trt_cache.CalibrationCache:
    """The ranges as TensorRT's cache of the cleaned model, its pools with the scale of their input.

    The header names EntropyCalibration2 whatever the search was: it is the only one that
    `trtexec --calib` reads, and scales mean the same under any.
    """
    scales = found.symmetric
    owners = _owners(model, version)
    entries = {name: scales[owner] for name, owner in owners.items() if owner in scales}
    return trt_cache.from_scales(entries, version=version, algorithm=trt_cache.ENTROPY2)


def _owners(model: onnx.ModelProto, version: str) -> dict[str, str]:
    """Entry of the cache that goes with the cleaned model -> the tensor whose scale it has."""
    return scale_owners(cache_tensors(model, version=version, parser=ONNX))


def held(model: onnx.ModelProto, found: Found, version: str) -> dict[str, Scale]:
    """Entry of the cache -> its range, which is as wide on either side of 0."""
    owners = _owners(model, version)
    both = {n: replace(one, lo=-one.amax, hi=one.amax) for n, one in found.scales.items()}
    return {name: both[owner] for name, owner in owners.items() if owner in both}


def sizes(found: Found) -> dict[str, float]:
    """Tensor -> largest |x| that was seen."""
    seen = {n: max(-one.observed_min, one.observed_max) for n, one in found.scales.items()}
    return seen | {n: math.inf for n, trouble in found.troubles.items() if trouble.infinite}
