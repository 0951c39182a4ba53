"""Engines where TensorRT and a GPU are at hand: the quantized one, and float ones beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration import trt_cache
from deploy.errors import ConfigError, SdkMissingError
from deploy.stamped import sha256
from deploy.targets.base import BuildRequest
from deploy.targets.tensorrt import baselines, builder, sdk
from deploy.targets.tensorrt.as_cache import sizes
from deploy.targets.tensorrt.baselines import Baselines
from deploy.targets.tensorrt.gpus import gpu
from deploy.targets.tensorrt.live import calibrated, from_cache, unseen
from deploy.targets.tensorrt.log import missing_tensors, sort_missing
from deploy.targets.tensorrt.readable import all_readable
from deploy.targets.tensorrt.sdk import Sdk
from deploy.targets.tensorrt.settings import settings_of
from deploy.targets.tensorrt.trt_options import Asked
from deploy.targets.tensorrt.trtexec import float_layers
from deploy.targets.tensorrt.versions import row
from deploy.targets.tensorrt.words import (
    ALL_BASELINES,
    FLOAT,
    FP8,
    FP32,
    INT8,
    NO_BASELINES,
    PLAIN,
    QDQ,
    TYPED,
)
from deploy.targets.tensorrt.written import written

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.found import Found


def engine_of(
    asked: Asked,
    request: BuildRequest,
    files: Mapping[str, Path],
    cache: trt_cache.CalibrationCache,
    wide: Mapping[str, str],
) -> tuple[Path, tuple[str, ...]]:
    """(engine, notes): built here, or built before from the same files on the same GPU.

    `wide` is node -> tensor, what must compute in float32 where TensorRT chooses the types.
    """
    here = sdk.find(asked.device)
    if asked.precision == FP8 and not row(here.release).fp8:
        raise SdkMissingError(
            f"an engine in fp8 needs TensorRT 10.2 or newer, got {here.version}; install one,"
            " or build with --precision int8"
        )
    implicit = _implicit(asked, here, request)
    if not implicit and (asked.form == "cache" or asked.calibrator):
        raise ConfigError(
            f"an engine from a cache needs a TensorRT with calibrators, got {here.version} and"
            f" form {asked.form}; build from the Q/DQ model (form qdq)"
        )
    typed = _by_type(asked, here, files, request)
    source = files[FLOAT if implicit else TYPED if typed else QDQ]
    typed = typed or asked.precision == FP8
    path = request.folder / f"{request.name}.engine"
    known = trt_cache.dump(trt_cache.relabel(cache, version=here.release))
    from_data = asked.calibrator is not None
    settings = replace(settings_of(asked, request), typed=typed)
    if not typed:
        settings = replace(settings, wide_layers=wide)
    if implicit:  # in the Q/DQ model they have no pair
        settings = replace(settings, float_layers=float_layers(request))
    key = builder.engine_key(
        here,
        settings,
        model_sha256=sha256(source.read_bytes()),
        cache_sha256=sha256(known) if implicit else None,
    ) | {"calibrator": asked.calibrator}
    about = _origin_notes(here)
    if from_data:
        about = (*about, *unseen(request, settings))
    before = builder.cached_engine(request.built_before(path.name), key)
    if before is not None:
        again = "the engine was built before from the same files, on the same GPU"
        return builder.keep_engine(path, before, key), (again, *about)
    cuda, calibrator = gpu(asked.device), None
    if from_data:
        known = calibrated(asked, request, source, settings, here.version, cuda)
    if implicit:
        calibrator = from_cache(asked, known)
    engine = builder.build_engine(source, settings, calibrator=calibrator, cuda=cuda)
    notes = (*about, *_log_notes(engine.log, request.model))
    return builder.keep_engine(path, engine.plan, key), notes


def _implicit(asked: Asked, here: Sdk, request: BuildRequest) -> bool:
    """Whether the engine is built from the cache, which says less than a model's own pairs."""
    forms = ("auto", "cache") if request.trained is None else ("cache",)
    return here.calibrators and asked.form in forms and asked.precision == INT8


def _by_type(asked: Asked, here: Sdk, files: Mapping[str, Path], request: BuildRequest) -> bool:
    """Whether the engine runs every layer in the type that the model gives it."""
    return not _implicit(asked, here, request) and TYPED in files and row(here.release).typed


def beside_it(
    asked: Asked, request: BuildRequest, files: Mapping[str, Path], found: Found, version: str
) -> Baselines:
    """Float engines to hold the engine against, where speed is measured."""
    if asked.baselines == NO_BASELINES:
        return Baselines()
    if request.against is None:
        said = f"no {asked.baselines} engine was built to compare with: no speed is measured"
        chosen = asked.baselines != ALL_BASELINES
        return Baselines(notes=(said,) if chosen else ())
    here = sdk.find(asked.device)
    own = {}
    if FLOAT not in files or request.against is not request.model:  # repairs spoil it
        stem = request.folder / f"{request.name}.tensorrt"
        models, _ = all_readable(asked, {PLAIN: request.whole(request.against)}, version)
        own[PLAIN] = written(stem, f".{FP32}.onnx", models[PLAIN])
    made = baselines.build(
        asked.baselines.split(","),
        request,
        here,
        gpu(asked.device),
        settings_of(asked, request),
        against=request.against,
        model=own[PLAIN] if own else files[FLOAT],
        by_type=_by_type(asked, here, files, request) or not here.calibrators,
        largest=sizes(found),
    )
    return replace(made, files={**own, **made.files})


def _origin_notes(here: Sdk) -> tuple[str, ...]:
    """Which TensorRT and GPU the engine belongs to, and what TensorRT had to do without."""
    built = f"the engine belongs to TensorRT {here.version} on {here.gpu}"
    if not here.stand_ins:
        return (built,)
    return (
        built,
        f"it has no tactics from {', '.join(here.stand_ins)}, whose libraries are empty stand-ins"
        " on this machine; with the real ones it may be faster",
    )


def _log_notes(log: Sequence[str], model: onnx.ModelProto) -> tuple[str, ...]:
    """TensorRT's missing-scale warnings: the harmful ones each, the others counted."""
    judged = sort_missing(missing_tensors(log), model)
    harmful = [f"TensorRT has no scale for {m.tensor}: {m.reason}" for m in judged if m.harmful]
    harmless = len(judged) - len(harmful)
    if harmless:
        harmful.append(
            f"TensorRT warned of {harmless} more tensors without a scale; none of them costs int8"
        )
    return tuple(harmful)
