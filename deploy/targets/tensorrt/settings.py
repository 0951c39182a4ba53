"""The builder's settings that follow from a target's options and the fed samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.graph.index import dims, fed_inputs
from deploy.targets.base import BuildRequest
from deploy.targets.spans import span_of
from deploy.targets.tensorrt.builder import Settings, profiles_for
from deploy.targets.tensorrt.trt_options import Asked
from deploy.targets.tensorrt.words import BF16, FP16

_TIMING = "tensorrt.timing"
_MOST_VALUES = 64  # of an input that shapes may depend on: far more than one has dimensions


def settings_of(asked: Asked, request: BuildRequest) -> Settings:
    """Settings tuned for the fed batch, or for the largest where TensorRT calibrates in it.

    An engine takes every size that samples had; it is tuned for the usual one, or for that which
    TensorRT calibrates with.
    """
    shapes = {i.name: dims(i) or () for i in fed_inputs(request.model.graph)}
    span = span_of(request)
    fed = span.usual
    if asked.calibrator is not None:
        fed = {name: array.shape for name, array in first_sample(request).items()}
        fed = {
            n: s if isinstance(shapes[n][0], int) else (asked.max_batch, *s[1:])
            for n, s in fed.items()
        }
    return Settings(
        fp16=asked.rest == FP16,
        bf16=asked.rest == BF16,
        workspace_mib=asked.workspace_mib,
        profiles=profiles_for(shapes, fed, most_batch=asked.max_batch, span=span),
        values=_values(first_sample(request)),
        plugins=asked.plugins,
        timing_cache=request.folder / _TIMING,
        known_timing=request.built_before(_TIMING),
    )


def _values(sample: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What shapes may depend on: a few whole numbers in one dimension, those of one sample."""
    few = {
        name: array
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= _MOST_VALUES
    }
    return {name: tuple(int(value) for value in array.reshape(-1)) for name, array in few.items()}


def first_sample(request: BuildRequest) -> Mapping[str, Any]:
    """The inputs of the first sample, by name."""
    (sample,) = request.feed.first(1)
    return sample
