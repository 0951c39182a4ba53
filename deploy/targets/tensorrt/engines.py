"""Engines that a build makes if TensorRT and a GPU are available.

Float baselines have the inputs, profiles and workspace of the quantized engine. Where builder flags
choose the types (8.x, and 10.x without strong typing) both are built from the float model, like
`trtexec` with and without `--fp16`; else FP16 is built from a strongly typed float16 model.

The cache of a calibration by TensorRT itself is stored with a fingerprint of what it was made from,
in the format of the C++ `calib8-build`: TensorRT checks only version and calibrator in the header,
so a retrained model or other images would go unnoticed.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from calibrators.tensorrt import ALGORITHMS, Callbacks, HostMemory, calibrator
from deploy.calibration import store, trt_cache
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.observation import count_in_full_batches, full_batches, note_left_out
from deploy.calibration.ranges import RangeSet
from deploy.calibration.reuse import make_fingerprint
from deploy.calibration.trt_cache import version_label
from deploy.errors import BackendError, CacheError, ConfigError, ExportError, SdkMissingError
from deploy.files import atomic, manifest, staging
from deploy.files.manifest import sha256
from deploy.frontends.base import model_digest
from deploy.frontends.onnx_reader import read_model_and_stamp
from deploy.graph.index import dims, opset_of, runtime_inputs
from deploy.graph.lowering import lower_opset
from deploy.targets.base import BuildRequest
from deploy.targets.shape_ranges import sample_shape_range
from deploy.targets.tensorrt import builder, sdk
from deploy.targets.tensorrt.builder import BuilderSettings, profiles_for
from deploy.targets.tensorrt.cache_contents import largest_magnitudes
from deploy.targets.tensorrt.cuda import Cuda, CudaMemory
from deploy.targets.tensorrt.float_types import OPSETS, narrow_float_part, write_model
from deploy.targets.tensorrt.sdk import Sdk, gpu, missing_tensors, plugin_digests, sort_missing
from deploy.targets.tensorrt.trt_options import (
    ALL_BASELINES,
    BF16,
    FLOAT,
    FLOAT_TYPED,
    FP8,
    FP16,
    FP32,
    INT8,
    NO_BASELINES,
    PLAIN,
    QDQ,
    TYPED,
    TensorrtOptions,
)
from deploy.targets.tensorrt.trtexec import (
    ParserRequirements,
    features_of,
    float_layers,
    unsupported_operators,
)
from deploy.version import __version__

LABELS = {FP32: "TensorRT FP32", FP16: "TensorRT FP16"}  # in the order of a report's columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Float engines by label, all files by role, and notes on engines that could not be built."""

    engines: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _build_baseline(
    request: BuildRequest,
    installed: Sdk,
    cuda: Cuda,
    settings: BuilderSettings,
    source: Path,
    name: str,
) -> tuple[Path, tuple[str, ...]]:
    path = request.folder / f"{request.name}.{name}.engine"
    key = builder.engine_key(
        installed, settings, model_sha256=sha256(source.read_bytes()), cache_sha256=None
    )
    reused = manifest.read_if_made_from(request.earlier_file(path.name), key)
    if reused is not None:
        return manifest.write_with_note(path, reused, key), ()
    current = settings.timing_cache
    timing = current if current is not None and current.exists() else settings.known_timing
    engine = builder.build_engine(source, replace(settings, known_timing=timing), cuda=cuda)
    return manifest.write_with_note(path, engine.plan, key), engine.notes


def load_gpu_cache(path: Path, fingerprint: Fingerprint) -> bytes | None:
    """Return the bytes of the cache at `path` if its fingerprint matches, else None.

    If there is none, the cache of a build that failed after its calibration is tried.
    """
    for place in filter(None, (path, staging.find_saved_calibration(path))):
        with suppress(CacheError):
            text, origin = store.read_cache_text(place)
            if origin == fingerprint:
                return text
    return None


def store_gpu_cache(path: Path, data: bytes, fingerprint: Fingerprint) -> Path:
    """Write the cache, then its fingerprint."""
    atomic.write_bytes(path, data)
    atomic.write_bytes(store.sidecars(path)[0], store.make_text_only_json(data, fingerprint))
    return path


_TIMING = "tensorrt.timing"
_MOST_VALUES = 64  # of a shape input: far more than a tensor has dimensions


def builder_settings(options: TensorrtOptions, request: BuildRequest) -> BuilderSettings:
    """Return the builder settings for the target's options and the samples.

    Dynamic inputs cover every size of the samples. The engine is tuned for the most frequent size,
    or for the batch with which TensorRT calibrates.
    """
    shapes = {i.name: dims(i) or () for i in runtime_inputs(request.model.graph)}
    span = sample_shape_range(request)
    fed = span.median_sample
    if options.calibrator is not None:
        fed = {name: array.shape for name, array in first_sample(request).items()}
        fed = {
            n: s if isinstance(shapes[n][0], int) else (options.max_batch, *s[1:])
            for n, s in fed.items()
        }
    return BuilderSettings(
        fp16=options.rest == FP16,
        bf16=options.rest == BF16,
        workspace_mib=options.workspace_mib,
        profiles=profiles_for(
            shapes, fed, most_batch=options.max_batch, span=span, fixed=options.dla
        ),
        values=_values(first_sample(request)),
        plugins=options.plugins,
        flags=options.trtexec_flags,
        timing_cache=options.timing_cache or request.folder / _TIMING,
        known_timing=None if options.timing_cache else request.earlier_file(_TIMING),
    )


def _values(sample: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the values of inputs that shapes may depend on: short integer vectors and scalars."""
    vectors = {
        name: array
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= _MOST_VALUES
    }
    return {n: tuple(int(value) for value in array.reshape(-1)) for n, array in vectors.items()}


def first_sample(request: BuildRequest) -> Mapping[str, Any]:
    """Return the inputs of the first sample, by name."""
    (sample,) = request.feed.first_samples(1)
    return sample


def calibrate_on_gpu(
    options: TensorrtOptions,
    request: BuildRequest,
    source: Path,
    settings: BuilderSettings,
    version: str,
    cuda: Cuda,
) -> bytes:
    """Calibrate with TensorRT on the GPU, or reuse its cache of the same data."""
    name = f"{request.name}.gpu.cache"
    shapes = _calibration_shapes(request, settings)
    batch = _batch_size(request, shapes)
    # names the ONNX file that TensorRT reads, so that on a device model and cache are enough
    model, stamp = read_model_and_stamp(source)
    weights = {"weights": stamp.weights} if stamp.weights else {}
    origin = replace(
        make_fingerprint(request.subject, request.manifest),
        model={"graph": model_digest(model), "file": stamp.file, **weights},
        program=TENSORRT,
        rule=f"whole batches of {batch}",
        method=ALGORITHMS[str(options.calibrator)],
        numbers={},
        versions={"tensorrt": version, "calib8": __version__}
        | ({"plugins": plugin_digests(options.plugins)} if options.plugins else {}),
    )
    stored = load_gpu_cache(request.earlier_file(name), origin)
    if stored is not None:
        store_gpu_cache(request.folder / name, stored, origin)
        return stored

    def keep(text: bytes) -> None:  # at once, so that a build which fails later can reuse it
        store_gpu_cache(request.folder / name, text, origin)

    used = count_in_full_batches(len(request.feed), batch, filled=request.subject.filled)
    with request.feed.samples() as samples:
        callbacks = calibrator(
            str(options.calibrator),
            full_batches(samples, batch),
            batches=used // batch,
            shapes=shapes,
            memory=CudaMemory(cuda),
            keep=keep,
        )
        return builder.calibrate(source, settings, callbacks, cuda=cuda)


def calibrator_from_cache(options: TensorrtOptions, known: bytes) -> Callbacks:
    """Return a calibrator with a cache and no data; it reports if TensorRT refuses the cache."""
    name = options.calibrator or "entropy2"
    return calibrator(name, (), batches=1, shapes={}, memory=HostMemory(), known=known)


def _calibration_shapes(
    request: BuildRequest, settings: BuilderSettings
) -> dict[str, tuple[int, ...]]:
    """Return input -> shape of a calibration batch."""
    shapes = {name: array.shape for name, array in first_sample(request).items()}
    return shapes | {name: profile.best for name, profile in settings.profiles.items()}


def _batch_size(request: BuildRequest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of samples in a batch of these shapes."""
    single = {name: array.shape for name, array in first_sample(request).items() if array.ndim}
    return max(shapes[name][0] // int(shape[0]) for name, shape in single.items())


def lower_for_tensorrt(model: onnx.ModelProto, version: str) -> tuple[onnx.ModelProto, str]:
    """Lower a model to what TensorRT X.Y.Z reads; return it with a note, "" if unchanged.

    A model that cannot be lowered is returned as it is, with a note that says why.
    """
    opset = opset_of(model)
    try:
        result = lower_opset(
            model, opset=features_of(version).opset, decomposed=unsupported_operators(version)
        )
    except ExportError as error:
        return model, f"TensorRT {version} does not read a model of opset {opset}: {error}"
    if result.model is model:
        return model, ""
    forms = ", ".join(f"{count} {name}" for name, count in result.rewritten.items())
    if opset_of(result.model) == opset:
        return result.model, f"for TensorRT {version} {forms} is written in operators that it reads"
    return result.model, (
        f"for TensorRT {version} the model is written in opset {opset_of(result.model)}, got"
        f" {opset}{f': {forms} in another form' if forms else ''}"
    )


def typed_version(version: str, rest: str, features: Iterable[str]) -> str:
    """Return the first TensorRT version, from `version` on, with `rest` networks and `features`."""
    first = ParserRequirements(OPSETS.get(rest, 0)).first_reading(*features)
    return version if first is None else max(version, first, key=version_label)


def lower_models(
    options: TensorrtOptions, models: Mapping[str, onnx.ModelProto], version: str
) -> tuple[dict[str, onnx.ModelProto], tuple[str, ...]]:
    """Lower each model to the oldest TensorRT that will read it; return (role -> model, notes)."""
    own = sdk.cache_reader()
    oldest = version if own is None else min(version, own, key=version_label)
    result, notes = {}, []
    for role, model in models.items():
        strong = role == TYPED or options.precision == FP8
        reader = typed_version(oldest, options.rest, options.features) if strong else oldest
        result[role], note = lower_for_tensorrt(model, reader)
        notes.append(note)
    return result, tuple(dict.fromkeys(filter(None, notes)))


def build_quantized_engine(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Mapping[str, Path],
    cache: trt_cache.CalibrationCache,
    wide: Mapping[str, str],
) -> tuple[Path, tuple[str, ...]]:
    """Build the quantized engine, or reuse that of the same files and GPU; return (path, notes).

    `wide` is node -> output tensor of nodes that must run in float32 if TensorRT chooses types.
    """
    installed = sdk.find_sdk(options.device)
    if options.precision == FP8 and not features_of(installed.release).fp8:
        raise SdkMissingError(
            f"an engine in fp8 needs TensorRT 10.2 or newer, got {installed.version}; install one,"
            " or build with --precision int8"
        )
    if options.dla and not features_of(installed.release).dla:
        raise SdkMissingError(
            f"a typed engine for DLA needs TensorRT 11.4.1 or newer, got {installed.version}"
        )
    implicit = _is_implicit(options, installed, request)
    if not implicit and (options.form == "cache" or options.calibrator):
        raise ConfigError(
            f"an engine from a cache needs a TensorRT with calibrators, got {installed.version} and"
            f" form {options.form}; build from the Q/DQ model (form qdq)"
        )
    typed = _is_typed(options, installed, files, request)
    source = files[FLOAT if implicit else TYPED if typed else QDQ]
    typed = typed or options.precision == FP8
    path = request.folder / f"{request.name}.engine"
    cache_bytes = trt_cache.dump(trt_cache.relabel(cache, version=installed.release))
    from_data = options.calibrator is not None
    settings = replace(builder_settings(options, request), typed=typed, dla=options.dla)
    if not typed and installed.calibrators:  # 11 takes every type from the model
        settings = replace(settings, wide_layers=wide)
    if implicit:  # in a Q/DQ model float nodes have no pair, so no binding is needed
        settings = replace(settings, float_layers=float_layers(request))
    key = builder.engine_key(
        installed,
        settings,
        model_sha256=sha256(source.read_bytes()),
        cache_sha256=sha256(cache_bytes) if implicit else None,
    ) | {"calibrator": options.calibrator}
    notes = _origin_notes(installed)
    if from_data:
        # on the samples of a partial batch, which TensorRT's calibration leaves out
        batch = _batch_size(request, _calibration_shapes(request, settings))
        filled = request.subject.filled
        notes = (*notes, *note_left_out(len(request.feed), batch, filled=filled))
    reused = manifest.read_if_made_from(request.earlier_file(path.name), key)
    if reused is not None:
        note = "the engine was built before from the same files, on the same GPU"
        return manifest.write_with_note(path, reused, key), (note, *notes)
    cuda, calibrator = gpu(options.device), None
    if from_data:
        cache_bytes = calibrate_on_gpu(options, request, source, settings, installed.version, cuda)
    if implicit:
        calibrator = calibrator_from_cache(options, cache_bytes)
    engine = builder.build_engine(source, settings, calibrator=calibrator, cuda=cuda)
    notes = (*notes, *engine.notes, *_log_notes(engine.log, request.model))
    return manifest.write_with_note(path, engine.plan, key), notes


def _is_implicit(options: TensorrtOptions, installed: Sdk, request: BuildRequest) -> bool:
    """Return whether the engine is built from the cache (implicit quantization).

    A trained model is built from its own pairs, which are more exact than a cache.
    """
    forms = ("auto", "cache") if request.trained is None else ("cache",)
    return installed.calibrators and options.form in forms and options.precision == INT8


def _is_typed(
    options: TensorrtOptions, installed: Sdk, files: Mapping[str, Path], request: BuildRequest
) -> bool:
    """Return whether the engine is built as a strongly typed network."""
    return (
        not _is_implicit(options, installed, request)
        and TYPED in files
        and features_of(installed.release).typed
    )


def build_float_engines(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Mapping[str, Path],
    ranges: RangeSet,
    version: str,
) -> Baselines:
    """Build the float engines to compare with, if speed is measured; reuse unchanged ones."""
    if options.baselines == NO_BASELINES:
        return Baselines()
    if request.unrepaired_model is None:
        note = f"no {options.baselines} engine was built to compare with: no speed is measured"
        chosen = options.baselines != ALL_BASELINES
        return Baselines(notes=(note,) if chosen else ())
    installed, against = sdk.find_sdk(options.device), request.unrepaired_model
    stem = request.folder / f"{request.name}.tensorrt"
    made: dict[str, Path] = {}
    if FLOAT not in files or against is not request.model:  # repairs changed the model
        models, _ = lower_models(options, {PLAIN: request.with_plugin_nodes(against)}, version)
        made[PLAIN] = write_model(stem, f".{FP32}.onnx", models[PLAIN])
    model = made[PLAIN] if made else files[FLOAT]
    # whether an engine takes its types from the model, not from builder flags
    by_type = _is_typed(options, installed, files, request) or not installed.calibrators
    cuda = gpu(options.device)
    settings = replace(builder_settings(options, request), int8=False, fp16=False, bf16=False)
    engines: dict[str, Path] = {}
    notes: list[str] = []
    for name, label in LABELS.items():
        if name not in options.baselines.split(","):
            continue
        try:
            source, own = model, replace(settings, fp16=name == FP16)
            if by_type and name == FP16:  # nodes that overflow float16 stay float32
                narrow, _ = narrow_float_part(against, FP16, largest_magnitudes(ranges))
                source = write_model(stem, f".{FP16}.onnx", request.with_plugin_nodes(narrow))
                own = replace(settings, typed=True)
                made[FLOAT_TYPED] = source
            engines[label], told = _build_baseline(request, installed, cuda, own, source, name)
            notes += told
            made[f"{label} engine, to compare with"] = engines[label]
        except (BackendError, ExportError) as error:
            notes.append(f"no {label} engine was built to compare with: {error}")
    return Baselines(engines=engines, files=made, notes=tuple(notes))


def _origin_notes(installed: Sdk) -> tuple[str, ...]:
    """Name the TensorRT and GPU of the engine, and tactic sources that were disabled."""
    built = f"the engine belongs to TensorRT {installed.version} on {installed.gpu}"
    if not installed.stand_ins:
        return (built,)
    return (
        built,
        f"it has no tactics from {', '.join(installed.stand_ins)}, whose libraries are empty"
        " stand-ins on this machine; with the real ones it may be faster",
    )


def _log_notes(log: Sequence[str], model: onnx.ModelProto) -> tuple[str, ...]:
    """Summarize TensorRT's missing-scale warnings: list the harmful ones, count the others."""
    missing = sort_missing(missing_tensors(log), model)
    notes = [f"TensorRT has no scale for {m.tensor}: {m.reason}" for m in missing if m.harmful]
    harmless = len(missing) - len(notes)
    if harmless:
        notes.append(
            f"TensorRT warned of {harmless} more tensors without a scale; none of them costs int8"
        )
    return tuple(notes)
