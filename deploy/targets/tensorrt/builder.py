"""Build a TensorRT engine from an ONNX file, with one code path for TensorRT 8.5 to 11.

Version differences are detected with `hasattr`: calibrators, precision flags and the explicit-batch
flag end with 10; memory pools and the tensor-name API begin with 8.5. Flags are used by name only,
because 11 renumbered them.

Sources: NVIDIA/TensorRT python/src/infer at 8.5.3, 10.16 and 11.0; migration guide 10.x to 11.x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calibrators.errors import CalibrationError
from calibrators.tensorrt import Callbacks
from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.files import atomic
from deploy.files.reading import read_bytes
from deploy.targets.tensorrt.cuda import Cuda
from deploy.targets.tensorrt.log import (
    LogRecorder,
    create_with_logger,
    process_logger,
    record_log,
)
from deploy.targets.tensorrt.profiles import InputShapeRange
from deploy.targets.tensorrt.sdk import (
    Sdk,
    dtype_of,
    import_tensorrt,
    load_plugins,
    plugin_digests,
    shape_of,
)
from deploy.terminal import phase

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderSettings:
    """Builder settings of one engine.

    Attributes:
        int8: set the INT8 builder flag, where the version has one.
        fp16: allow FP16 for layers that do not run in int8 (until 10.16; 11 follows the model).
        bf16: allow BF16 likewise, from 9.0.
        typed: strongly typed network: every layer runs in the type that the model gives it (from
            10.0).
        tf32: allow TF32, which rounds the operands of float products to 10 mantissa bits.
        float_layers: node that must not run in int8 -> its output tensor. Both are needed because
            TensorRT does not name every layer after its node.
        float32_layers: node that must compute and output float32 -> its output tensor; nodes
            without a layer in the network are ignored.
        workspace_mib: workspace limit in MiB; None for TensorRT's default.
        profiles: dynamic input -> its shapes.
        values: integer input -> its values, for inputs that shapes may depend on.
        plugins: plugin libraries to load before the model is parsed.
        timing_cache: timing cache file to write, which makes the next build faster; left as it is
            if TensorRT refuses it as a timing cache.
        earlier_timing_cache: timing cache file to read; None to read `timing_cache`.
        flags: flags of trtexec, see `ENGINE_FLAGS`.
        dla: run layers on DLA core 0, and those that it cannot run on the GPU.
    """

    int8: bool = True
    fp16: bool = True
    bf16: bool = False
    typed: bool = False
    tf32: bool = True
    float_layers: Mapping[str, str] = field(default_factory=dict)
    float32_layers: Mapping[str, str] = field(default_factory=dict)
    workspace_mib: int | None = None
    profiles: Mapping[str, InputShapeRange] = field(default_factory=dict)
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()
    timing_cache: Path | None = None
    earlier_timing_cache: Path | None = None
    flags: tuple[str, ...] = ()
    dla: bool = False


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A serialized engine.

    Attributes:
        plan: the bytes of the engine.
        log: TensorRT's log lines.
        notes: sentences for the user.
    """

    plan: bytes
    log: tuple[str, ...]
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
        calibrator: made by `calibrators.tensorrt.calibrator`; None for a Q/DQ model.
        cuda: the GPU to build on; None for CUDA's default device.

    Raises:
        BackendError: TensorRT cannot parse or build the model; the message quotes its log.
        ConfigError: a dynamic input has no profile, a profile does not fit, or a plugin library
            cannot be loaded.
        CalibrationError: a calibrator callback failed, which TensorRT does not report.
    """
    import_tensorrt()  # raises SdkMissingError without TensorRT
    on_device = nullcontext() if cuda is None else cuda.current()
    with on_device, record_log() as log:
        load_plugins(settings.plugins)
        builder: trt.Builder = create_with_logger("Builder", log, purpose="make a builder")
        network = builder.create_network(_network_flags(typed=settings.typed))
        _parse(network, model, log, dla=settings.dla)
        config = _create_config(builder, network, settings, calibrator)
        timing_note = _set_timing_cache(config, settings)
        # the bytes of the engine; None if TensorRT failed
        plan = cast("trt.IHostMemory | None", builder.build_serialized_network(network, config))

    calibration_trouble = _calibration_trouble(calibrator, is_built=plan is not None)
    if plan is None:
        ending = f"; {calibration_trouble}" if calibration_trouble else ""
        raise BackendError(f"TensorRT could not build {model.name}: {log.summary()}{ending}")
    if calibration_trouble:
        raise CalibrationError(f"{calibration_trouble}; TensorRT said: {log.summary()}")

    if settings.timing_cache is not None and not timing_note:
        atomic.write_bytes(settings.timing_cache, bytes(config.get_timing_cache().serialize()))
    notes = (timing_note,) if timing_note else ()
    return BuiltEngine(bytes(plan), tuple(log.lines), notes)


def _calibration_trouble(calibrator: Callbacks | None, *, is_built: bool) -> str:
    """Return what went wrong in a calibration by TensorRT, as a sentence; "" if nothing did.

    Raises:
        Exception: the first one of a callback; TensorRT swallows it, and then lacks data.
    """
    if calibrator is None:
        return ""
    if calibrator.error is not None:
        raise calibrator.error
    # TensorRT failed before it asked for a batch, so that the calibration is not the cause
    if not is_built and calibrator.requests == 0:
        return ""
    return calibrator.trouble()


def calibrate(
    model: Path, settings: BuilderSettings, calibrator: Callbacks, *, cuda: Cuda | None = None
) -> bytes:
    """Let TensorRT calibrate in pure float32; return its cache and discard the engine.

    TF32, which GPUs from Ampere on use by default, is off: it would round the operands of every
    product, which would change the scales.

    Args:
        model: ONNX file of the float model.
        settings: builder settings; their float types are not used.
        calibrator: made by `calibrators.tensorrt.calibrator`, with the batches.
        cuda: the GPU; None for CUDA's default device.

    Raises:
        As `build_engine`.
    """
    float32_settings = replace(
        settings, fp16=False, bf16=False, tf32=False, float_layers={}, float32_layers={}
    )
    build_engine(model, float32_settings, calibrator=calibrator, cuda=cuda)
    # `check` raises what went wrong in the calibrator; if nothing did, it returns the cache
    return calibrator.check()


def engine_key(
    sdk: Sdk, settings: BuilderSettings, *, model_sha256: str, cache_sha256: str | None
) -> dict[str, Any]:
    """Return everything that an engine depends on, for JSON; one with an equal key is reused.

    Args:
        sdk: the installed TensorRT, and the GPU.
        settings: builder settings.
        model_sha256: digest of the ONNX file.
        cache_sha256: digest of the calibration cache; None for an engine that is built without one.

    Raises:
        ConfigError: a plugin library cannot be read.
    """
    options = asdict(settings)
    # paths do not count: "plugins" below has the contents of the libraries, and a timing cache only
    # makes the build faster
    for name in ("plugins", "timing_cache", "earlier_timing_cache"):
        options.pop(name)
    return {
        "tensorrt": sdk.version,
        "gpu": sdk.gpu,
        "model_sha256": model_sha256,
        "cache_sha256": cache_sha256,
        "layers": "detailed",  # profiling verbosity, as `_set_flags` sets it
        "plugins": plugin_digests(settings.plugins),
        "settings": options,
    }


def _network_flags(*, typed: bool) -> int:
    """Return the creation flags: explicit batch (a no-op in 10, gone in 11) and strong typing.

    TensorRT 11 has neither flag: all of its networks are explicit-batch and strongly typed.
    """
    import tensorrt as trt

    flags = trt.NetworkDefinitionCreationFlag
    names = ("EXPLICIT_BATCH", "STRONGLY_TYPED") if typed else ("EXPLICIT_BATCH",)
    return sum(1 << int(getattr(flags, name)) for name in names if hasattr(flags, name))


def _parse(network: trt.INetworkDefinition, model: Path, log: LogRecorder, *, dla: bool) -> None:
    """Read an ONNX file into TensorRT's network.

    Args:
        network: an empty network, which gets the layers.
        model: the ONNX file.
        log: recorder of TensorRT's messages.
        dla: whether the engine is to run on DLA.

    Raises:
        BackendError: TensorRT cannot read it; the message quotes its errors.
    """
    import tensorrt as trt

    parser = trt.OnnxParser(network, process_logger(trt))
    # the flags exist since 8.6, and ADJUST_FOR_DLA among them since 10.16
    flags = getattr(trt, "OnnxParserFlag", None)
    adjust_for_dla = getattr(flags, "ADJUST_FOR_DLA", None)
    if dla and adjust_for_dla is not None:
        parser.set_flag(adjust_for_dla)
    if parser.parse_from_file(str(model)):
        return
    errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
    raise BackendError(f"TensorRT cannot read {model.name}: {' | '.join(errors) or log.summary()}")


def _create_config(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    settings: BuilderSettings,
    calibrator: Callbacks | None,
) -> trt.IBuilderConfig:
    """Return TensorRT's builder configuration for these settings.

    Raises:
        SdkMissingError: the engine is for DLA, and this machine has none.
        BackendError: a node of `float_layers` is no layer of the network.
        ConfigError: a flag of trtexec is not one of this version, or an input has no profile.
    """
    import tensorrt as trt

    config = builder.create_builder_config()
    _set_flags(config, settings)
    if settings.dla:
        if not getattr(builder, "num_DLA_cores", 0):
            raise SdkMissingError("an engine for DLA needs a DLA core, and this machine has none")
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = 0
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)

    if settings.float_layers or settings.float32_layers:
        _bind_to_float(config, network, settings)

    profile = _create_profile(builder, network, settings)  # None if all inputs have fixed shapes
    if profile is not None:
        config.add_optimization_profile(profile)
    if calibrator is not None:
        config.int8_calibrator = cast("trt.IInt8Calibrator", calibrator)
        # the types in which TensorRT reads the batches
        calibrator.expect({tensor.name: dtype_of(tensor.dtype) for tensor in _inputs_of(network)})
        if profile is not None:
            config.set_calibration_profile(profile)
    return config


def _inputs_of(network: trt.INetworkDefinition) -> list[trt.ITensor]:
    """Return the inputs of a network."""
    return [network.get_input(index) for index in range(network.num_inputs)]


def _set_flags(config: trt.IBuilderConfig, settings: BuilderSettings) -> None:
    """Set the allowed types, the user's flags of trtexec and the workspace limit.

    Raises:
        ConfigError: this TensorRT does not know a flag, or the flag's value is wrong.
    """
    import tensorrt as trt

    allowed_types = {"INT8": settings.int8, "FP16": settings.fp16, "BF16": settings.bf16}
    if not settings.typed:  # a strongly typed network has no such flags
        for name, is_allowed in allowed_types.items():
            if is_allowed and hasattr(trt.BuilderFlag, name):
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


# Flags of trtexec that the engine built here obeys -> what they set, by sampleOptions.cpp and
# sampleEngines.cpp: a flag of the builder (upper case), or an attribute of its configuration.
ENGINE_FLAGS = {
    "--refit": "REFIT",
    "--stripWeights": "STRIP_PLAN",
    "--versionCompatible": "VERSION_COMPATIBLE",
    "--sparsity": "SPARSE_WEIGHTS",
    "--builderOptimizationLevel": "builder_optimization_level",
    "--maxAuxStreams": "max_aux_streams",
    "--hardwareCompatibilityLevel": "hardware_compatibility_level",
}
_COMPATIBILITY_LEVELS = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "sameComputeCapability": "SAME_COMPUTE_CAPABILITY",
}


def _set_flag(config: trt.IBuilderConfig, flag: str) -> None:
    """Set what a flag of trtexec, such as "--sparsity=enable", sets in TensorRT's configuration.

    Raises:
        AttributeError: this TensorRT does not have it.
        ValueError: the flag is unknown or its value is wrong; the caller writes its text after
            "got: ".
    """
    import tensorrt as trt

    name, _, value = flag.partition("=")
    # a builder flag such as "REFIT", or an attribute of the configuration: "max_aux_streams"
    setting = ENGINE_FLAGS.get(name)
    if setting is None:
        raise ValueError("it is none of " + ", ".join(ENGINE_FLAGS))
    is_builder_flag = setting.isupper()
    if is_builder_flag:
        expected_value = "enable" if name == "--sparsity" else ""  # other flags have no value
        if value != expected_value:
            raise ValueError(f"the value {value!r}")
        config.set_flag(getattr(trt.BuilderFlag, setting))
        return

    # else an attribute of the configuration: reading it raises AttributeError if this TensorRT is
    # too old to have it, which setting it would not
    getattr(config, setting)
    if name == "--hardwareCompatibilityLevel":
        if value not in _COMPATIBILITY_LEVELS:
            levels = ", ".join(_COMPATIBILITY_LEVELS)
            raise ValueError(f"the value {value!r}, none of {levels}")
        level = getattr(trt.HardwareCompatibilityLevel, _COMPATIBILITY_LEVELS[value])
        setattr(config, setting, level)
    else:
        setattr(config, setting, int(value))


def _bind_to_float(
    config: trt.IBuilderConfig, network: trt.INetworkDefinition, settings: BuilderSettings
) -> None:
    """Bind layers to float types: those of `float_layers` and of `float32_layers` in the settings.

    The former compute in the float type of the settings, the latter compute and output float32.

    Raises:
        BackendError: a node of `float_layers` is no layer of the network.
    """
    import tensorrt as trt

    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if settings.fp16:
        precision = trt.float16
    elif settings.bf16:
        precision = trt.bfloat16
    else:
        precision = trt.float32
    bound_nodes: set[str] = set()
    for layer, node_names in _find_layers(network, settings.float_layers):
        layer.precision = precision
        bound_nodes |= node_names
    unbound_nodes = sorted(set(settings.float_layers) - bound_nodes)
    if unbound_nodes:
        raise BackendError(
            "a node to keep in float must be a layer of TensorRT's network,"
            f" {unbound_nodes[0]!r} is none; build from the Q/DQ model (--engine-from qdq), or"
            " leave it out"
        )
    # a node of both kinds keeps the precision that is set last
    for layer, _ in _find_layers(network, settings.float32_layers):
        layer.precision = trt.float32
        for index in range(layer.num_outputs):
            layer.set_output_type(index, trt.float32)


def _find_layers(
    network: trt.INetworkDefinition, nodes: Mapping[str, str]
) -> Iterator[tuple[trt.ILayer, set[str]]]:
    """Yield each layer of some nodes, with the names of those nodes.

    `nodes`: node -> its output tensor. A layer has the node's name, or makes that tensor.
    """
    node_by_tensor = {tensor: node for node, tensor in nodes.items()}
    for layer_index in range(network.num_layers):
        layer = network.get_layer(layer_index)
        outputs = {layer.get_output(index).name for index in range(layer.num_outputs)}
        names = {node_by_tensor[tensor] for tensor in outputs & node_by_tensor.keys()}
        names |= {layer.name} & nodes.keys()
        if names:
            yield layer, names


def _create_profile(
    builder: trt.Builder, network: trt.INetworkDefinition, settings: BuilderSettings
) -> trt.IOptimizationProfile | None:
    """Return the profile of the dynamic inputs and shape tensors; None if there are none.

    A profile has the smallest, the usual and the largest shape of an input. A shape tensor is an
    input from whose values shapes are computed.

    Raises:
        ConfigError: the settings have no shapes of such an input, or no values of a shape tensor.
    """
    import tensorrt as trt

    profile = builder.create_optimization_profile()
    is_needed = False
    for tensor in _inputs_of(network):
        name = tensor.name
        input_shape = shape_of(tensor.shape)
        if -1 in input_shape:
            if name not in settings.profiles:
                raise ConfigError(
                    f"a dynamic input needs a profile, got none for {name!r} {list(input_shape)};"
                    " give its shapes"
                )
            shapes = settings.profiles[name]  # the smallest, those to tune for, the largest
            profile.set_shape(name, *[trt.Dims(list(shape)) for shape in shapes])
            is_needed = True
        if tensor.is_shape_tensor:
            if name not in settings.values:
                raise ConfigError(
                    f"an input that shapes depend on needs values, got none for {name!r}; feed it"
                    " whole numbers, in one dimension at most"
                )
            values = list(settings.values[name])
            profile.set_shape_input(name, values, values, values)
            is_needed = True
    return profile if is_needed else None


def _set_timing_cache(config: trt.IBuilderConfig, settings: BuilderSettings) -> str:
    """Give TensorRT the timings of earlier builds, so that it need not measure its kernels again.

    Return a note if it refuses the user's file (`settings.timing_cache`), which is not changed
    then; else "".
    """
    import tensorrt as trt

    # the file to read: that of an earlier build, or the user's, which is also written
    path = settings.earlier_timing_cache or settings.timing_cache
    if path is None:
        return ""
    stored_timings = b""  # of an empty timing cache
    if path.exists():
        stored_timings = read_bytes(
            path, what="a timing cache", error=BackendError, rewritable=True
        )
    cache = config.create_timing_cache(stored_timings)
    if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
        return ""
    # TensorRT refuses the file, and starts with an empty timing cache
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    if settings.earlier_timing_cache is not None:  # not the user's file: a new one is written
        return ""
    return (
        f"{path} is not a timing cache of TensorRT {trt.__version__} on this GPU: it was neither"
        " used nor changed; give another file"
    )
