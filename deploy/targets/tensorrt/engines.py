"""Engines that a build makes if TensorRT and a GPU are available.

Float baselines have the inputs, profiles and workspace of the quantized engine. Where builder flags
choose the types (8.x, and 10.x without strong typing) both are built from the float model, like
`trtexec` with and without `--fp16`; else FP16 is built from a strongly typed float16 model.

The cache of a calibration by TensorRT itself is stored with a fingerprint of what it was made from,
in the format of the C++ `calib8-build`: TensorRT checks only version and calibrator in the header,
so a retrained model or other images would go unnoticed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from calibrators.tensorrt import ALGORITHMS, Callbacks, HostMemory, calibrator_class
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
from deploy.frontends.onnx_reader import read_model_and_digests
from deploy.graph.index import Graph, opset_of
from deploy.graph.lowering import lower_opset
from deploy.graph.placement import TENSORRT as PLACEMENT
from deploy.graph.plan import analyse
from deploy.targets.base import BuildRequest
from deploy.targets.shape_ranges import Shape, is_static
from deploy.targets.tensorrt import builder, sdk
from deploy.targets.tensorrt.builder import BuilderSettings
from deploy.targets.tensorrt.cache_contents import largest_magnitudes
from deploy.targets.tensorrt.cuda import Cuda, CudaMemory, open_gpu
from deploy.targets.tensorrt.float_types import FIRST_OPSET_BY_TYPE, narrow_float_part
from deploy.targets.tensorrt.profiles import model_input_shapes, sample_profiles
from deploy.targets.tensorrt.sdk import Sdk, plugin_digests
from deploy.targets.tensorrt.trt_options import (
    ALL_BASELINES,
    BF16,
    FLOAT16_MODEL,
    FLOAT_MODEL,
    FP8,
    FP16,
    FP32,
    INT8,
    NO_BASELINES,
    QDQ_MODEL,
    TYPED_MODEL,
    UNREPAIRED_MODEL,
    Files,
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
    """The float engines to compare with.

    Attributes:
        engines: label -> engine.
        files: role -> every file written for them.
        notes: why an engine could not be built, for the user.
    """

    engines: Mapping[str, Path] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_gpu_cache(path: Path, fingerprint: Fingerprint) -> bytes | None:
    """Return the bytes of the cache at `path` if it has this fingerprint, else None.

    The cache that a build stored before it failed (`find_saved_calibration`) is tried too.
    """
    for candidate in (path, staging.find_saved_calibration(path)):
        if candidate is not None:
            with suppress(CacheError):
                text, origin = store.read_cache_text(candidate)
                if origin == fingerprint:
                    return text
    return None


def store_gpu_cache(path: Path, data: bytes, fingerprint: Fingerprint) -> None:
    """Write the cache, then its fingerprint."""
    atomic.write_bytes(path, data)
    store.write_note_without_statistics(path, data, fingerprint, float32_layers={})


_TIMING_CACHE = "tensorrt.timing"
_MAX_SHAPE_VALUES = 64  # of an input that shapes depend on: far more than a tensor has dimensions


def builder_settings(options: TensorrtOptions, request: BuildRequest) -> BuilderSettings:
    """Return the builder settings for the target's options and the samples.

    Dynamic inputs accept every size of the samples.
    """
    sample = first_sample(request)
    timing_cache = options.timing_cache  # the user's file, or None
    earlier_timing_cache = None
    if timing_cache is None:  # the build writes one of its own, and reads that of the build before
        timing_cache = request.folder / _TIMING_CACHE
        earlier_timing_cache = request.earlier_file(_TIMING_CACHE)
    # `options.rest`: type of the layers that are not quantized
    return BuilderSettings(
        fp16=options.rest == FP16,
        bf16=options.rest == BF16,
        workspace_mib=options.workspace_mib,
        profiles=sample_profiles(
            request,
            max_batch=options.max_batch,
            fixed=options.dla,
            tuned_shapes=_calibration_shapes(options, request, sample),
        ),
        values=_shape_values(sample),  # of inputs that shapes may depend on
        plugins=options.plugins,
        flags=options.trtexec_flags,
        timing_cache=timing_cache,
        earlier_timing_cache=earlier_timing_cache,
    )


def _calibration_shapes(
    options: TensorrtOptions, request: BuildRequest, sample: Mapping[str, Any]
) -> dict[str, Shape]:
    """Return input -> shape of a calibration batch, if TensorRT itself calibrates; else {}.

    The engine is tuned for these shapes; without them, for the sample of median size.
    """
    if options.calibrator is None:
        return {}
    input_shapes = model_input_shapes(request)
    shapes = {}
    for name, array in sample.items():
        shapes[name] = array.shape
        has_batch = name in request.batch_inputs
        if has_batch and not is_static(input_shapes[name][0]):  # a dynamic batch
            shapes[name] = (options.max_batch, *array.shape[1:])
    return shapes


def _shape_values(sample: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the values of inputs that shapes may depend on: short integer vectors and scalars."""
    values = {}
    for name, array in sample.items():
        is_integer = array.dtype.kind in "iu"
        if is_integer and array.ndim <= 1 and array.size <= _MAX_SHAPE_VALUES:
            values[name] = tuple(array.reshape(-1).tolist())
    return values


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
    """Let TensorRT calibrate on the GPU, or reuse its cache of the same data; return the cache.

    Args:
        options: options of the target, among them the calibrator.
        request: the build request, with the samples.
        source: ONNX file of the float model.
        settings: builder settings; their profiles give the shape of a batch.
        version: the installed TensorRT.
        cuda: the GPU.
    """
    cache_path = request.file(".gpu.cache")
    # input -> shape of a batch, and the number of samples in a batch
    shapes, batch_size = _calibration_batch(request, settings)
    fingerprint = _tensorrt_fingerprint(options, request, source, version, batch_size)
    stored_cache = load_gpu_cache(request.earlier_file(cache_path.name), fingerprint)
    if stored_cache is not None:  # it becomes a file of this build too
        store_gpu_cache(cache_path, stored_cache, fingerprint)
        return stored_cache

    # `padded_sample_count` samples repeat images, to fill the fixed batch of the model
    sample_count = count_in_full_batches(
        len(request.feed), batch_size, padded_sample_count=request.subject.padded_sample_count
    )
    with request.feed.samples() as samples:
        callbacks = calibrator_class(str(options.calibrator))(
            full_batches(samples, batch_size),
            batches=sample_count // batch_size,
            shapes=shapes,
            memory=CudaMemory(cuda),
            # at once, so that a build can reuse the cache if this one fails later
            store=partial(store_gpu_cache, cache_path, fingerprint=fingerprint),
        )
        return builder.calibrate(source, settings, callbacks, cuda=cuda)


def _tensorrt_fingerprint(
    options: TensorrtOptions, request: BuildRequest, source: Path, version: str, batch: int
) -> Fingerprint:
    """Return what a calibration by TensorRT depends on: its cache is valid while that is equal.

    The digest of the ONNX file that TensorRT reads is part of it, so that the C++ program on a
    device can check, without the original model, that a model and a cache belong together.

    Args:
        options: options of the target, among them the calibrator.
        request: the build request, with the model, its calibration method and the samples.
        source: ONNX file of the float model.
        version: the installed TensorRT.
        batch: number of samples in a calibration batch.
    """
    model, file_digests = read_model_and_digests(source)
    digests = {"graph": model_digest(model), "file": file_digests.file}
    if file_digests.weights:  # weights in a file of their own
        digests["weights"] = file_digests.weights
    versions: dict[str, Any] = {"tensorrt": version, "calib8": __version__}
    if options.plugins:
        versions["plugins"] = plugin_digests(options.plugins)
    return replace(
        make_fingerprint(request.subject, request.manifest),
        model=digests,
        program=TENSORRT,
        rule=f"whole batches of {batch}",  # from which TensorRT finds the ranges
        method=ALGORITHMS[str(options.calibrator)],
        numbers={},  # of calib8's own observation, which did not run
        versions=versions,
    )


def calibrator_from_cache(options: TensorrtOptions, cache: bytes) -> Callbacks:
    """Return a calibrator with a cache and no data; it reports if TensorRT refuses the cache."""
    algorithm = options.calibrator or "entropy2"
    memory = HostMemory()
    return calibrator_class(algorithm)((), batches=1, shapes={}, memory=memory, cache=cache)


def _calibration_batch(
    request: BuildRequest, settings: BuilderSettings
) -> tuple[dict[str, Shape], int]:
    """Return (input -> shape of a calibration batch, number of samples in such a batch).

    TensorRT calibrates with the shapes for which the engine is tuned.
    """
    sample = first_sample(request)
    shapes: dict[str, Shape] = {name: array.shape for name, array in sample.items()}
    for name, profile in settings.profiles.items():
        shapes[name] = profile.opt_shape
    # how many samples lie along the first axis of each input: 1 for an input without a batch
    sample_counts = [1]
    for name, array in sample.items():
        if array.ndim:  # a single number has no axis
            sample_length = len(array)  # of the first axis
            sample_counts.append(shapes[name][0] // sample_length)
    return shapes, max(sample_counts)


def lower_for_tensorrt(model: onnx.ModelProto, version: str) -> tuple[onnx.ModelProto, str]:
    """Return (model in an opset and operators that TensorRT X.Y.Z reads, note).

    The note is "" if the model does not change. A model that cannot be lowered is returned
    unchanged, with a note that says why.
    """
    opset = opset_of(model)
    try:
        lowered = lower_opset(
            model, opset=features_of(version).opset, to_decompose=unsupported_operators(version)
        )
    except ExportError as error:
        return model, f"TensorRT {version} does not read a model of opset {opset}: {error}"
    if lowered.model is model:
        return model, ""
    # operators that were written in another form, such as "2 Gelu"
    rewritten = ", ".join(f"{count} {name}" for name, count in lowered.rewritten.items())
    new_opset = opset_of(lowered.model)
    note = f"for TensorRT {version} the model is written in opset {new_opset}, got {opset}"
    if new_opset == opset:
        note = f"for TensorRT {version} {rewritten} is written in operators that it reads"
    elif rewritten:
        note += f": {rewritten} in another form"
    return lowered.model, note


def typed_version(options: TensorrtOptions, version: str) -> str:
    """Return the first TensorRT, X.Y.Z or newer, that reads the typed model of these options."""
    requirements = ParserRequirements(FIRST_OPSET_BY_TYPE.get(options.rest, 0))
    first = requirements.first_version(*options.features)
    return version if first is None else max(version, first, key=version_label)


def reads_typed(options: TensorrtOptions, version: str) -> bool:
    """Return whether TensorRT X.Y.Z reads the typed model of these options."""
    return typed_version(options, version) == version


def lower_models(
    options: TensorrtOptions, models: Mapping[str, onnx.ModelProto], version: str
) -> tuple[dict[str, onnx.ModelProto], tuple[str, ...]]:
    """Return each model in an opset and operators that the oldest TensorRT to read it knows.

    The oldest is the TensorRT that the files are for, or the one on this machine if that is older.
    For a typed model it is the first version from there on that reads typed models.

    Args:
        options: options of the target.
        models: role (what a model is for) -> model.
        version: TensorRT that the files are for, "X.Y.Z".

    Returns:
        Role -> lowered model, and notes on what changed.
    """
    installed_version = sdk.cache_reading_version()  # None without TensorRT, or with 11 or newer
    oldest_version = version
    if installed_version is not None:
        # `version_label`: "X.Y.Z" as a number
        oldest_version = min(version, installed_version, key=version_label)
    lowered: dict[str, onnx.ModelProto] = {}
    notes: dict[str, None] = {}  # each once
    for role, model in models.items():
        oldest_reader = oldest_version
        if role == TYPED_MODEL or options.precision == FP8:  # a typed model
            oldest_reader = typed_version(options, oldest_version)
        lowered[role], note = lower_for_tensorrt(model, oldest_reader)
        if note:
            notes[note] = None
    return lowered, tuple(notes)


def build_quantized_engine(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Files,
    cache: trt_cache.CalibrationCache,
    float32_nodes: Mapping[str, str],
) -> tuple[Path, tuple[str, ...]]:
    """Build the quantized engine, or reuse that of the same files and GPU; return (path, notes).

    It is built from the float model and the cache, from the typed model, or from the Q/DQ model.

    Args:
        options: options of the target.
        request: the build request.
        files: role (what a file is for) -> file of the target.
        cache: the calibration cache in those files.
        float32_nodes: node that must run in float32 if TensorRT chooses types -> its output tensor.

    Raises:
        SdkMissingError: TensorRT is missing, or too old for fp8 or DLA.
        ConfigError: an engine from a cache is requested of a TensorRT without calibrators.
        BackendError: TensorRT cannot build the engine.
    """
    installed = sdk.find_sdk(options.device)
    _check_versions(options, installed, request)
    source_role = _source_role(options, installed, files, request)
    source = files[source_role]  # the model that the engine is built from
    uses_cache = source_role == FLOAT_MODEL  # else the model has Q/DQ pairs
    settings = _quantized_settings(
        options,
        request,
        installed,
        float32_nodes,
        uses_cache=uses_cache,
        is_typed=source_role == TYPED_MODEL or options.precision == FP8,
    )

    # all that the engine depends on; an engine of an earlier build is reused if that is equal
    cache_bytes = trt_cache.dump(trt_cache.relabel(cache, version=installed.release))
    made_from = builder.engine_key(
        installed,
        settings,
        model_sha256=sha256(source.read_bytes()),
        cache_sha256=sha256(cache_bytes) if uses_cache else None,
    )
    made_from["calibrator"] = options.calibrator

    notes = [f"the engine belongs to TensorRT {installed.version} on {installed.gpu}"]
    if options.calibrator is not None:  # TensorRT's calibration leaves out a partial batch
        _, batch_size = _calibration_batch(request, settings)
        notes += note_left_out(
            len(request.feed),
            batch_size,
            padded_sample_count=request.subject.padded_sample_count,
        )

    path = request.file(".engine")
    reused_bytes = manifest.read_if_made_from(request.earlier_file(path.name), made_from)
    if reused_bytes is not None:
        note = "the engine was built before from the same files, on the same GPU"
        return manifest.write_made_from(path, reused_bytes, made_from), (note, *notes)

    cuda = open_gpu(options.device)
    callbacks = None  # of a calibrator of TensorRT that has no data and returns a cache
    if uses_cache:
        if options.calibrator is not None:  # a cache of TensorRT itself in place of calib8's
            cache_bytes = calibrate_on_gpu(
                options, request, source, settings, installed.version, cuda
            )
        callbacks = calibrator_from_cache(options, cache_bytes)
    engine = builder.build_engine(source, settings, calibrator=callbacks, cuda=cuda)
    notes += (*engine.notes, *_log_notes(engine.log, request.model))
    return manifest.write_made_from(path, engine.plan, made_from), tuple(notes)


def _quantized_settings(
    options: TensorrtOptions,
    request: BuildRequest,
    installed: Sdk,
    float32_nodes: Mapping[str, str],
    *,
    uses_cache: bool,
    is_typed: bool,
) -> BuilderSettings:
    """Return the builder settings of the quantized engine.

    They are those of `builder_settings`, and the nodes that this engine runs in float.

    Args:
        options: options of the target.
        request: the build request.
        installed: the installed TensorRT.
        float32_nodes: node that must run in float32 if TensorRT chooses types -> its output tensor.
        uses_cache: whether the engine is built from the float model and the cache.
        is_typed: whether each node has the type that the model gives it.
    """
    # TensorRT up to 10, which has calibrators, chooses the types of a network that is not typed;
    # TensorRT 11 never does
    chooses_types = installed.calibrators and not is_typed
    return replace(
        builder_settings(options, request),
        typed=is_typed,
        dla=options.dla,
        # without the cache the engine is built from a model with Q/DQ pairs. It has none at a float
        # node, which so runs in float without being named here
        float_layers=float_layers(request) if uses_cache else {},
        float32_layers=float32_nodes if chooses_types else {},
    )


def _check_versions(options: TensorrtOptions, installed: Sdk, request: BuildRequest) -> None:
    """Refuse options that the installed TensorRT cannot follow."""
    features = features_of(installed.release)
    if options.precision == FP8 and not features.fp8:
        raise SdkMissingError(
            f"an engine in fp8 needs TensorRT 10.2 or newer, got {installed.version}; install one,"
            " or build with --precision int8"
        )
    # here only typed engines are built for DLA; the user builds others, by `trtexec_commands`
    if options.dla and not features.dla:
        raise SdkMissingError(
            f"a typed engine for DLA needs TensorRT 11.4.1 or newer, got {installed.version}"
        )
    is_cache_requested = options.form == "cache" or options.calibrator
    if is_cache_requested and not _builds_from_cache(options, installed, request):
        raise ConfigError(
            f"an engine from a cache needs a TensorRT with calibrators, got {installed.version} and"
            f" form {options.form}; build from the Q/DQ model (form qdq)"
        )


def _builds_from_cache(options: TensorrtOptions, installed: Sdk, request: BuildRequest) -> bool:
    """Return whether the engine is built from the float model and the cache.

    By default it is, with TensorRT 8 and 9, and with a calibrator of TensorRT. TensorRT 10 reads
    caches too, but they are deprecated since 10.1, and the accuracy in the report and the layers
    that the search chose are those of the typed model. A user's Q/DQ model is built from its own
    pairs, which are more exact than a cache.
    """
    if not installed.calibrators or options.precision != INT8:
        return False
    if options.form == "auto" and options.calibrator is None:
        is_float_model = request.trained is None  # else it is the user's Q/DQ model
        return is_float_model and not reads_typed(options, installed.release)
    return options.form != "qdq"


def _source_role(
    options: TensorrtOptions, installed: Sdk, files: Files, request: BuildRequest
) -> str:
    """Return the role, in `files`, of the model that the quantized engine is built from."""
    if _builds_from_cache(options, installed, request):
        return FLOAT_MODEL
    if TYPED_MODEL in files and reads_typed(options, installed.release):
        return TYPED_MODEL
    return QDQ_MODEL


def build_float_engines(
    options: TensorrtOptions,
    request: BuildRequest,
    files: Files,
    ranges: RangeSet,
    version: str,
) -> Baselines:
    """Build the float engines to compare with, if speed is measured; reuse unchanged ones.

    Args:
        options: options of the target, among them which engines.
        request: the build request.
        files: role (what a file is for) -> file of the target.
        ranges: observed ranges, which tell what overflows float16.
        version: TensorRT that the files are for, "X.Y.Z".
    """
    if options.baselines == NO_BASELINES:
        return Baselines()
    float_model = request.unrepaired_model  # None where no speed is measured
    if float_model is None:
        if options.baselines == ALL_BASELINES:  # the option's default: the user did not ask
            return Baselines()
        note = f"no {options.baselines} engine was built to compare with: no speed is measured"
        return Baselines(notes=(note,))

    installed = sdk.find_sdk(options.device)
    written: dict[str, Path] = {}  # role -> file that is written for these engines
    if FLOAT_MODEL in files and float_model is request.model:
        float_file = files[FLOAT_MODEL]
    else:  # a repair changed the weights in that file, or only Q/DQ models were written
        float_file = _write_float_model(options, request, float_model, version)
        written[UNREPAIRED_MODEL] = float_file

    # The FP16 engine is made as the quantized one is, so that the two compare: with a flag of the
    # builder, with which TensorRT chooses each layer's type, or from a model with float16 types.
    is_typed = _source_role(options, installed, files, request) == TYPED_MODEL
    uses_fp16_flag = installed.calibrators and not is_typed  # TensorRT 11 has no such flag
    cuda = open_gpu(options.device)
    base_settings = builder_settings(options, request)
    engines: dict[str, Path] = {}  # label -> engine
    notes: list[str] = []
    for precision, label in LABELS.items():
        if precision not in options.baselines.split(","):
            continue
        settings = replace(base_settings, int8=False, fp16=precision == FP16, bf16=False)
        source = float_file
        try:
            if precision == FP16 and not uses_fp16_flag:  # the model itself must be float16
                source = _write_float16_model(request, float_model, ranges)
                settings = replace(settings, typed=True)
                written[FLOAT16_MODEL] = source
            engine, engine_notes = _build_baseline(
                request, installed, cuda, settings, source, precision
            )
        except (BackendError, ExportError) as error:
            notes.append(f"no {label} engine was built to compare with: {error}")
            continue
        notes += engine_notes
        engines[label] = engine
        written[f"{label} engine, to compare with"] = engine
    return Baselines(engines=engines, files=written, notes=tuple(notes))


def _write_float_model(
    options: TensorrtOptions, request: BuildRequest, float_model: onnx.ModelProto, version: str
) -> Path:
    """Write the float32 model to compare with, as TensorRT `version` reads it."""
    complete_model = request.with_plugin_nodes(float_model)
    lowered, _ = lower_models(options, {UNREPAIRED_MODEL: complete_model}, version)
    return request.write(f".tensorrt.{FP32}.onnx", lowered[UNREPAIRED_MODEL])


def _write_float16_model(
    request: BuildRequest, float_model: onnx.ModelProto, ranges: RangeSet
) -> Path:
    """Write the float16 model to compare with; nodes that overflow float16 stay float32."""
    narrow_model, _ = narrow_float_part(float_model, FP16, largest_magnitudes(ranges))
    return request.write(f".tensorrt.{FP16}.onnx", request.with_plugin_nodes(narrow_model))


def _build_baseline(
    request: BuildRequest,
    installed: Sdk,
    cuda: Cuda,
    settings: BuilderSettings,
    source: Path,
    precision: str,
) -> tuple[Path, tuple[str, ...]]:
    """Build the float engine of a precision, or reuse it; return (path, notes).

    Args:
        request: the build request.
        installed: the installed TensorRT.
        cuda: the GPU.
        settings: builder settings of this precision.
        source: the ONNX file to build it from.
        precision: "fp32" or "fp16".
    """
    path = request.file(f".{precision}.engine")
    key = builder.engine_key(
        installed, settings, model_sha256=sha256(source.read_bytes()), cache_sha256=None
    )
    reused_bytes = manifest.read_if_made_from(request.earlier_file(path.name), key)
    if reused_bytes is not None:
        return manifest.write_made_from(path, reused_bytes, key), ()

    # A timing cache of the build's own is a new file, and starts with the timings of the build
    # before (`earlier_timing_cache`; None for a user's file, which is read and written in place).
    # If an engine of this build has written its timings by now, start with those.
    timing_cache = settings.timing_cache
    is_users_file = settings.earlier_timing_cache is None
    if timing_cache is not None and timing_cache.exists() and not is_users_file:
        settings = replace(settings, earlier_timing_cache=timing_cache)
    engine = builder.build_engine(source, settings, cuda=cuda)
    return manifest.write_made_from(path, engine.plan, key), engine.notes


_MISSING_SCALE = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")


def _log_notes(log: Sequence[str], model: onnx.ModelProto) -> tuple[str, ...]:
    """Return notes on tensors without a scale, of which TensorRT's log warns.

    Tensors whose missing scale costs no layer its int8 are left out.

    Args:
        log: lines of TensorRT's log.
        model: the cleaned float model that was built.
    """
    # the tensors in the warnings, each once, in order
    tensors = dict.fromkeys(_MISSING_SCALE.findall("\n".join(log)))
    reasons = _reasons_of_lost_int8(tensors, model)
    return tuple(
        f"TensorRT has no scale for {tensor}: {reason}" for tensor, reason in reasons.items()
    )


def _reasons_of_lost_int8(tensors: Iterable[str], model: onnx.ModelProto) -> dict[str, str]:
    """Return tensor -> why a layer loses int8 without its scale; harmless tensors are left out.

    Most tensors need no scale: TensorRT reads the range of a constant from its values, outputs of
    the model stay float, shapes and indices are integers, and no int8 value exists inside a fused
    layer, or inside a node of which TensorRT's parser made several layers.

    Args:
        tensors: those without a scale, by TensorRT's log.
        model: the cleaned float model that was built.
    """
    graph = Graph(model)
    plan = analyse(model, PLACEMENT)
    int8_nodes = set(plan.int8_nodes)
    int8_inputs = {pair.tensor for pair in plan.pairs}
    reasons = {}
    for tensor in tensors:
        if tensor in int8_inputs:
            reasons[tensor] = "an int8 layer reads it: that layer falls back to float"
            continue
        node = graph.producer.get(tensor)
        if node is None or node.name not in int8_nodes or tensor in graph.outputs:
            # no node makes it, as a tensor inside a node that the parser made several layers of; no
            # int8 layer makes it; or it stays float as an output of the model
            continue
        # of a fused layer, such as Conv and Relu, TensorRT writes the last tensor only
        if graph.fused_output(node) == tensor:
            reasons[tensor] = f"{node.op_type} {node.name} cannot write int8"
    return reasons
