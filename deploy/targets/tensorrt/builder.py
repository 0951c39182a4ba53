"""Build a TensorRT engine from an ONNX file, with one code path for TensorRT 8.5 to 11.

Version differences are detected with `hasattr`: calibrators, precision flags and the explicit-batch
flag end with 10; memory pools and the tensor-name API begin with 8.5. Flags are used by name only,
because 11 renumbered them.

Sources: NVIDIA/TensorRT python/src/infer at 8.5.3, 10.16 and 11.0; migration guide 10.x to 11.x.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calibrators.errors import CalibrationError
from calibrators.tensorrt import Callbacks
from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.files import atomic
from deploy.files.reading import read_bytes
from deploy.targets.shape_ranges import Shape, ShapeRange
from deploy.targets.tensorrt.cuda import Cuda
from deploy.targets.tensorrt.sdk import (
    LogRecorder,
    Sdk,
    dtype_of,
    import_tensorrt,
    load_plugins,
    plugin_digests,
    process_logger,
    record_log,
    shape_of,
    stand_ins,
    start,
)
from deploy.terminal import phase

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True, slots=True)
class InputShapeRange:
    """Min, opt and max shape of one dynamic input; the engine is tuned and calibrated for opt."""

    least: Shape
    best: Shape
    most: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderSettings:
    """Builder settings of one engine."""

    int8: bool = True  # set the INT8 builder flag, where the version has one
    # allow FP16 for layers that do not run in int8 (until 10.16; 11 follows the model)
    fp16: bool = True
    bf16: bool = False  # allow BF16 likewise, from 9.0
    # strongly typed network: every layer runs in the type the model gives it (from 10.0)
    typed: bool = False
    tf32: bool = True  # allow TF32, which rounds the operands of float products to 10 mantissa bits
    # node that must not run in int8 -> its output tensor. Both are needed because TensorRT does not
    # name every layer after its node
    float_layers: Mapping[str, str] = field(default_factory=dict)
    # node that must compute and output float32 -> its output tensor; nodes without a layer in the
    # network are ignored
    wide_layers: Mapping[str, str] = field(default_factory=dict)
    workspace_mib: int | None = None  # workspace limit in MiB; None for TensorRT's default
    # dynamic input -> its shapes
    profiles: Mapping[str, InputShapeRange] = field(default_factory=dict)
    # integer input -> its values, for inputs that shapes may depend on
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()
    # timing cache file to write, which makes the next build faster; left as it is if TensorRT
    # refuses it as a timing cache
    timing_cache: Path | None = None
    known_timing: Path | None = None  # timing cache file to read; None to read `timing_cache`
    flags: tuple[str, ...] = ()  # of trtexec, see `ENGINE_FLAGS`
    dla: bool = False  # run layers on DLA core 0, those that it cannot run on the GPU


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A serialized engine, TensorRT's log lines, the calibration cache used, if any, and notes."""

    plan: bytes
    log: tuple[str, ...]
    cache: bytes | None
    notes: tuple[str, ...] = ()


@phase("TensorRT builds")
def build_engine(
    model: Path,
    settings: BuilderSettings,
    *,
    calibrator: Callbacks | None = None,
    cuda: Cuda | None = None,
) -> BuiltEngine:
    """Parse an ONNX file and build its engine.

    Args:
        model: ONNX file, float (with a calibrator) or Q/DQ.
        settings: builder settings.
        calibrator: from `calibrators.tensorrt.calibrator`; None for a Q/DQ model.
        cuda: the GPU to build on; None for CUDA's default device.

    Raises:
        BackendError: TensorRT cannot parse or build the model; the message quotes its log.
        ConfigError: a dynamic input has no profile, a profile does not fit, or a plugin library
            cannot be loaded.
        CalibrationError: a calibrator callback failed, which TensorRT does not report.
    """
    import_tensorrt()
    on_device = nullcontext() if cuda is None else cuda.current()
    with on_device, record_log() as log:
        load_plugins(settings.plugins)
        builder: trt.Builder = start("Builder", log, "make a builder")
        network = builder.create_network(_network_flags(typed=settings.typed))
        _parse(network, model, log)
        config = _create_config(builder, network, settings, calibrator)
        refused = _set_timing_cache(config, settings)
        plan = cast("trt.IHostMemory | None", builder.build_serialized_network(network, config))
    # an exception from a callback comes first: TensorRT swallows it and then fails for lack of
    # data; its own messages come next, also where it failed before requesting a batch
    if calibrator is not None and calibrator.error is not None:
        raise calibrator.error
    begun = calibrator is not None and (plan is not None or calibrator.asked > 0)
    trouble = calibrator.trouble() if calibrator is not None and begun else ""
    if plan is None:
        more = f"; {trouble}" if trouble else ""
        raise BackendError(f"TensorRT could not build {model.name}: {log.words()}{more}")
    if trouble:
        raise CalibrationError(f"{trouble}; TensorRT said: {log.words()}")
    cache = calibrator.check() if calibrator is not None else None
    if settings.timing_cache is not None and not refused:
        atomic.write_bytes(settings.timing_cache, bytes(config.get_timing_cache().serialize()))
    return BuiltEngine(bytes(plan), tuple(log.lines), cache, (refused,) if refused else ())


def calibrate(
    model: Path, settings: BuilderSettings, calibrator: Callbacks, *, cuda: Cuda | None = None
) -> bytes:
    """Let TensorRT calibrate in pure float32; return its cache and discard the engine.

    TF32, on by default from Ampere on, is off: it would round the operands of every product and
    shift the scales accordingly.

    Raises:
        As `build_engine`.
    """
    float32 = replace(settings, fp16=False, bf16=False, tf32=False, float_layers={}, wide_layers={})
    build_engine(model, float32, calibrator=calibrator, cuda=cuda)
    return calibrator.check()


def engine_key(
    sdk: Sdk, settings: BuilderSettings, *, model_sha256: str, cache_sha256: str | None
) -> dict[str, Any]:
    """Return everything that an engine depends on, as plain JSON: the key of the engine cache.

    Raises:
        ConfigError: a plugin library cannot be read.
    """
    options = asdict(settings)
    for name in ("plugins", "timing_cache", "known_timing"):
        options.pop(name)
    return {
        "tensorrt": sdk.version,
        "gpu": sdk.gpu,
        "stand_ins": list(sdk.stand_ins),
        "model_sha256": model_sha256,
        "cache_sha256": cache_sha256,
        "layers": "detailed",
        "plugins": plugin_digests(settings.plugins),
        "settings": json.loads(json.dumps(options)),
    }


def profiles_for(
    shapes: Mapping[str, Sequence[int | str | None]],
    fed: Mapping[str, Shape],
    *,
    most_batch: int,
    span: ShapeRange | None = None,
    fixed: bool = False,
) -> dict[str, InputShapeRange]:
    """Return a profile for each dynamic input.

    Dynamic dimensions cover every size of the samples; a dynamic batch (dimension 0) covers 1 to
    `most_batch`.

    `fed`: input shapes that the engine is tuned for. `span`: smallest and largest shapes of all
    samples; None if all are as `fed`. `fixed`: accept the shapes of `fed` only, as DLA does.
    """
    profiles = {}
    for name, shape in shapes.items():
        opt = fed[name]
        known = [isinstance(dim, int) and dim > 0 for dim in shape]
        if len(opt) != len(shape) or any(
            f and dim != size for f, dim, size in zip(known, shape, opt, strict=True)
        ):
            raise ConfigError(
                f"data must fit the model's input, got {list(opt)} for {name!r} {list(shape)}"
            )
        if all(known):
            continue
        least, most = (
            (opt, opt) if span is None or fixed else (span.min_sizes[name], span.max_sizes[name])
        )
        if not known[0] and not fixed:
            least, most = (1, *least[1:]), (max(most_batch, opt[0], most[0]), *most[1:])
        profiles[name] = InputShapeRange(least, opt, most)
    return profiles


def _network_flags(*, typed: bool) -> int:
    """Return the creation flags: explicit batch (a no-op in 10, gone in 11) and strong typing.

    TensorRT 11 has neither flag: all of its networks are explicit-batch and strongly typed.
    """
    import tensorrt as trt

    flags = trt.NetworkDefinitionCreationFlag
    names = ("EXPLICIT_BATCH", "STRONGLY_TYPED") if typed else ("EXPLICIT_BATCH",)
    return sum(1 << int(getattr(flags, name)) for name in names if hasattr(flags, name))


def _parse(network: trt.INetworkDefinition, model: Path, log: LogRecorder) -> None:
    import tensorrt as trt

    parser = trt.OnnxParser(network, process_logger())
    if parser.parse_from_file(str(model)):
        return
    errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
    raise BackendError(f"TensorRT cannot read {model.name}: {' | '.join(errors) or log.words()}")


def _create_config(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    settings: BuilderSettings,
    calibrator: Callbacks | None,
) -> trt.IBuilderConfig:
    import tensorrt as trt

    config = builder.create_builder_config()
    _set_flags(config, settings)
    if settings.dla:
        if not getattr(builder, "num_DLA_cores", 0):
            raise SdkMissingError("an engine for DLA needs a DLA core, and this machine has none")
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = 0
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    if settings.float_layers:
        _bind_to_float(config, network, settings)
    if settings.wide_layers:  # float32 overrides an earlier float precision
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        for layer, _ in _find_layers(network, settings.wide_layers):
            layer.precision = trt.float32
            for index in range(layer.num_outputs):
                layer.set_output_type(index, trt.float32)
    _disable_tactics(config, stand_ins())
    profile = _create_profile(builder, network, settings)
    if profile is not None:
        config.add_optimization_profile(profile)
    if calibrator is not None:
        config.int8_calibrator = cast("trt.IInt8Calibrator", calibrator)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        calibrator.expect({tensor.name: dtype_of(tensor.dtype) for tensor in inputs})
        if profile is not None:
            config.set_calibration_profile(profile)
    return config


def _set_flags(config: trt.IBuilderConfig, settings: BuilderSettings) -> None:
    import tensorrt as trt

    types = ((settings.int8, "INT8"), (settings.fp16, "FP16"), (settings.bf16, "BF16"))
    for allowed, name in () if settings.typed else types:
        if allowed and hasattr(trt.BuilderFlag, name):
            config.set_flag(getattr(trt.BuilderFlag, name))
    if not settings.tf32:  # on by default
        config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the engine inspector
    for flag in settings.flags:
        try:
            _set_flag(config, flag)
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"TensorRT {trt.__version__} must know what {flag} sets, got: {error}; leave the"
                " flag out"
            ) from error
    if settings.workspace_mib is not None:
        pool = trt.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, settings.workspace_mib << 20)


# Flags of trtexec that the engine built here obeys, as sampleOptions.cpp and sampleEngines.cpp set
# them -> the builder flag, or the attribute of the config.
ENGINE_FLAGS = {
    "--refit": "REFIT",
    "--stripWeights": "STRIP_PLAN",
    "--versionCompatible": "VERSION_COMPATIBLE",
    "--sparsity": "SPARSE_WEIGHTS",
    "--builderOptimizationLevel": "builder_optimization_level",
    "--maxAuxStreams": "max_aux_streams",
    "--hardwareCompatibilityLevel": "hardware_compatibility_level",
}
_LEVELS = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "sameComputeCapability": "SAME_COMPUTE_CAPABILITY",
}


def _set_flag(config: trt.IBuilderConfig, flag: str) -> None:
    """Set what a flag of trtexec means.

    Raises:
        AttributeError: this TensorRT does not have it.
        ValueError: the value is not one of it.
    """
    import tensorrt as trt

    name, _, value = flag.partition("=")
    known = ENGINE_FLAGS.get(name)
    if known is None:
        raise ValueError("it is none of " + ", ".join(ENGINE_FLAGS))
    if known.isupper():
        if (name == "--sparsity" and value != "enable") or (name != "--sparsity" and value):
            raise ValueError(f"the value {value!r}")
        config.set_flag(getattr(trt.BuilderFlag, known))
        return
    getattr(config, known)  # refuses a setting of a newer TensorRT
    if name == "--hardwareCompatibilityLevel":
        if value not in _LEVELS:
            raise ValueError(f"the value {value!r}, none of {', '.join(_LEVELS)}")
        setattr(config, known, getattr(trt.HardwareCompatibilityLevel, _LEVELS[value]))
    else:
        setattr(config, known, int(value))


def _bind_to_float(
    config: trt.IBuilderConfig, network: trt.INetworkDefinition, settings: BuilderSettings
) -> None:
    """Bind `float_layers` to a float precision; TensorRT chooses that of the other layers."""
    import tensorrt as trt

    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    fallback = trt.bfloat16 if settings.bf16 else trt.float32
    precision = trt.float16 if settings.fp16 else fallback
    bound: set[str] = set()
    for layer, names in _find_layers(network, settings.float_layers):
        layer.precision = precision
        bound |= names
    missing = sorted(set(settings.float_layers) - bound)
    if missing:
        raise BackendError(
            f"a node to keep in float must be a layer of TensorRT's network, {missing[0]!r} is"
            " none; build from the Q/DQ model (--engine-from qdq), or leave it out"
        )


def _find_layers(
    network: trt.INetworkDefinition, nodes: Mapping[str, str]
) -> Iterator[tuple[trt.ILayer, set[str]]]:
    """Yield (layer, its node names) for `nodes`, found by layer name or by output tensor."""
    by_tensor = {tensor: node for node, tensor in nodes.items()}
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        outputs = {layer.get_output(index).name for index in range(layer.num_outputs)}
        names = {by_tensor[tensor] for tensor in outputs & by_tensor.keys()}
        names |= {layer.name} & nodes.keys()
        if names:
            yield layer, names


def _disable_tactics(config: trt.IBuilderConfig, sources: Sequence[str]) -> None:
    """Remove tactic sources; with none given, TensorRT's default stays."""
    import tensorrt as trt

    if not sources:
        return
    enabled = config.get_tactic_sources()
    for name in sources:
        enabled &= ~(1 << int(getattr(trt.TacticSource, name)))
    if not config.set_tactic_sources(enabled):
        raise BackendError(
            f"TensorRT must leave out {', '.join(sources)}, whose libraries are empty stand-ins"
            " here, but refused; install the real ones"
        )


def _create_profile(
    builder: trt.Builder, network: trt.INetworkDefinition, settings: BuilderSettings
) -> trt.IOptimizationProfile | None:
    import tensorrt as trt

    profiles, values = settings.profiles, settings.values
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    shapes = {tensor.name: shape_of(tensor.shape) for tensor in inputs}
    dynamic = {name: shape for name, shape in shapes.items() if -1 in shape}
    missing = sorted(set(dynamic) - set(profiles))
    if missing:
        raise ConfigError(
            f"a dynamic input needs a profile, got none for {missing[0]!r}"
            f" {list(dynamic[missing[0]])}; give its shapes"
        )
    shape_tensors = [tensor.name for tensor in inputs if tensor.is_shape_tensor]
    unknown = sorted(set(shape_tensors) - set(values))
    if unknown:
        raise ConfigError(
            f"an input that shapes depend on needs values, got none for {unknown[0]!r}; feed it"
            " whole numbers, in one dimension at most"
        )
    if not dynamic and not shape_tensors:
        return None
    profile = builder.create_optimization_profile()
    for name in dynamic:
        shape = profiles[name]
        least, best, most = (trt.Dims(list(s)) for s in (shape.least, shape.best, shape.most))
        profile.set_shape(name, least, best, most)
    for name in shape_tensors:
        fixed = list(values[name])
        profile.set_shape_input(name, fixed, fixed, fixed)
    return profile


def _set_timing_cache(config: trt.IBuilderConfig, settings: BuilderSettings) -> str:
    """Give TensorRT the timings of earlier builds.

    Return a note if it refuses the file that the new ones would replace, else "".
    """
    import tensorrt as trt

    path = settings.known_timing or settings.timing_cache
    if path is None:
        return ""
    stored = b""
    if path.exists():
        stored = read_bytes(path, what="a timing cache", error=BackendError, rewritable=True)
    cache = config.create_timing_cache(stored)
    if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
        return ""
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    if path != settings.timing_cache:
        return ""
    return (
        f"{path} is not a timing cache of TensorRT {trt.__version__} on this GPU: it was neither"
        " used nor changed; give another file"
    )
