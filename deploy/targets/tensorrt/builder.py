"""An ONNX file -> a TensorRT engine, by one code path for 8.5 to 11.

What a version has is asked of it (`hasattr`): calibrators, builder flags and the explicit-batch
flag end with 10, the memory pools and the tensor-name API begin with 8.5. Numbers of flags are
never written down, since 11 gave them new ones.

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
from deploy.errors import BackendError, ConfigError
from deploy.files import atomic, manifest
from deploy.files.reading import read_bytes
from deploy.targets.spans import Shape, Span
from deploy.targets.tensorrt.cuda import Cuda
from deploy.targets.tensorrt.sdk import (
    KeepingLogger,
    Sdk,
    digests,
    dims,
    dtype_of,
    listening,
    load,
    load_plugins,
    process_logger,
    stand_ins,
)
from deploy.terminal import phase

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True, slots=True)
class Profile:
    """Shapes of one dynamic input: the least, the one to tune and calibrate for, the largest."""

    least: Shape
    best: Shape
    most: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is built.

    Attributes:
        int8: allow int8 (where TensorRT asks for a flag).
        fp16: allow fp16 for what does not run in int8 (until 10.16; 11 takes the model's types).
        bf16: the same of bf16, from 9.0.
        typed: run every layer in the type that the model gives it (from 10.0).
        tf32: allow TensorFloat-32, which rounds the factors of float products to 10 bits.
        float_layers: layers that must not run in int8, each with a tensor that it gives: TensorRT
            calls most layers as their node and some otherwise.
        wide_layers: likewise those that must compute in float32 and give it; one that TensorRT has
            not is passed over.
        workspace_mib: scratch memory in MiB; None leaves TensorRT's own limit.
        profiles: dynamic input -> its shapes.
        values: input of whole numbers -> those it has, should shapes depend on them.
        plugins: libraries of plugins that the model needs.
        timing_cache: file of tactic timings to write; makes the next build faster.
        known_timing: the file that an earlier build wrote; None where it is the same.
        verbose: keep TensorRT's verbose log too.
    """

    int8: bool = True
    fp16: bool = True
    bf16: bool = False
    typed: bool = False
    tf32: bool = True
    float_layers: Mapping[str, str] = field(default_factory=dict)
    wide_layers: Mapping[str, str] = field(default_factory=dict)
    workspace_mib: int | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()
    timing_cache: Path | None = None
    known_timing: Path | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """A serialized engine, TensorRT's log, and the calibration cache in force, if there was one."""

    plan: bytes
    log: tuple[str, ...]
    cache: bytes | None


@phase("TensorRT builds")
def build_engine(
    model: Path,
    settings: Settings,
    *,
    calibrator: Callbacks | None = None,
    cuda: Cuda | None = None,
) -> Engine:
    """Parse and build.

    Args:
        model: ONNX file, float (with a calibrator) or Q/DQ.
        settings: as above.
        calibrator: of `calibrators.tensorrt.calibrator`; None for a Q/DQ model.
        cuda: the GPU to build on; None leaves it to CUDA, which takes the first.

    Raises:
        BackendError: TensorRT cannot parse or build the model; its own words are in the message.
        ConfigError: a dynamic input without a profile, a profile that does not fit, or a library
            of plugins that cannot be loaded.
        CalibrationError: what went wrong while calibrating, which TensorRT itself swallows.
    """
    load()
    on_device = nullcontext() if cuda is None else cuda.current()
    with on_device, listening(verbose=settings.verbose) as kept:
        load_plugins(settings.plugins)
        builder = _builder(kept)
        network = builder.create_network(_network_flags(typed=settings.typed))
        _parse(network, model, kept)
        config = _config(builder, network, settings, calibrator)
        timing = _timing_cache(config, settings.known_timing or settings.timing_cache)
        plan = builder.build_serialized_network(network, config)
    cache = _cache_in_force(calibrator, kept, model, built=plan is not None)
    if timing is not None and settings.timing_cache is not None:
        atomic.write_bytes(settings.timing_cache, bytes(config.get_timing_cache().serialize()))
    return Engine(bytes(plan), tuple(kept.lines), cache)


def calibrate(
    model: Path, settings: Settings, calibrator: Callbacks, *, cuda: Cuda | None = None
) -> bytes:
    """Let TensorRT calibrate, in float32 alone; gives its cache, and throws the engine away.

    TensorRT runs the float network to see its values. TF32, which it allows by default on Ampere
    and later, would round the factors of every product, and move the scales by as much.

    Raises:
        As `build_engine`.
    """
    exact = replace(settings, fp16=False, bf16=False, tf32=False, float_layers={}, wide_layers={})
    build_engine(model, exact, calibrator=calibrator, cuda=cuda)
    return calibrator.check()


def engine_key(
    sdk: Sdk, settings: Settings, *, model_sha256: str, cache_sha256: str | None
) -> dict[str, Any]:
    """All that an engine depends on, as plain JSON; a change in any part means another engine.

    Raises:
        ConfigError: a library of plugins cannot be read.
    """
    chosen = asdict(settings)
    for name in ("plugins", "timing_cache", "known_timing", "verbose"):
        chosen.pop(name)
    return {
        "tensorrt": sdk.version,
        "gpu": sdk.gpu,
        "stand_ins": list(sdk.stand_ins),
        "model_sha256": model_sha256,
        "cache_sha256": cache_sha256,
        "layers": "detailed",
        "plugins": digests(settings.plugins),
        "settings": json.loads(json.dumps(chosen)),
    }


def cached_engine(path: Path, key: Mapping[str, Any]) -> bytes | None:
    """The engine at `path` where it was built under `key` and is whole."""
    return manifest.fitting(path, key, digest="engine_sha256")


def keep_engine(path: Path, plan: bytes, key: Mapping[str, Any]) -> Path:
    """Write the engine and, after it, the note that says what it was built under."""
    return manifest.keep(path, plan, key, digest="engine_sha256")


def profiles_for(
    shapes: Mapping[str, Sequence[int | str | None]],
    fed: Mapping[str, Shape],
    *,
    most_batch: int,
    span: Span | None = None,
) -> dict[str, Profile]:
    """Input shapes of a model and of what is fed -> a profile for each dynamic input.

    Open dimensions take every size of the samples; an open first one (the batch) goes from 1 to
    `most_batch`.

    Args:
        shapes: the model's own.
        fed: what the engine is tuned for.
        most_batch: as above.
        span: of all samples; None where all are as `fed`.

    Raises:
        ConfigError: what is fed does not fit a fixed dimension.
    """
    profiles = {}
    for name, shape in shapes.items():
        got = fed[name]
        fixed = [isinstance(dim, int) and dim > 0 for dim in shape]
        if len(got) != len(shape) or any(
            f and dim != g for f, dim, g in zip(fixed, shape, got, strict=True)
        ):
            raise ConfigError(
                f"data must fit the model's input, got {list(got)} for {name!r} {list(shape)}"
            )
        if all(fixed):
            continue
        least, most = (got, got) if span is None else (span.least[name], span.most[name])
        if not fixed[0]:
            least, most = (1, *least[1:]), (max(most_batch, got[0], most[0]), *most[1:])
        profiles[name] = Profile(least, got, most)
    return profiles


def _cache_in_force(
    calibrator: Callbacks | None, kept: KeepingLogger, model: Path, *, built: bool
) -> bytes | None:
    """The calibrator's cache, once nothing went wrong.

    What a callback raised comes first, since TensorRT swallowed it and only stumbled over it; then
    TensorRT's own words, also where it gave up before it asked for a batch.
    """
    if calibrator is not None and calibrator.error is not None:
        raise calibrator.error
    begun = calibrator is not None and calibrator.asked > 0
    wrong = calibrator.trouble() if calibrator is not None and (built or begun) else ""
    if not built:
        more = f"; {wrong}" if wrong else ""
        raise BackendError(f"TensorRT could not build {model.name}: {kept.words()}{more}")
    if wrong:
        raise CalibrationError(f"{wrong}; TensorRT said: {kept.words()}")
    return calibrator.check() if calibrator is not None else None


def _builder(kept: KeepingLogger) -> trt.Builder:
    import tensorrt as trt

    try:
        return trt.Builder(process_logger())
    except (TypeError, RuntimeError) as error:  # a null builder, from a driver that does not fit
        said = kept.words() if kept.lines else error
        raise BackendError(f"TensorRT could not make a builder on this machine: {said}") from error


def _network_flags(*, typed: bool) -> int:
    """Explicit batch where it still has to be asked for (8.x; a no-op in 10, gone in 11).

    So has strong typing, but in 11, which knows no other.
    """
    import tensorrt as trt

    flags = trt.NetworkDefinitionCreationFlag
    wanted = ("EXPLICIT_BATCH", "STRONGLY_TYPED") if typed else ("EXPLICIT_BATCH",)
    return sum(1 << int(getattr(flags, name)) for name in wanted if hasattr(flags, name))


def _parse(network: trt.INetworkDefinition, model: Path, kept: KeepingLogger) -> None:
    import tensorrt as trt

    parser = trt.OnnxParser(network, process_logger())
    if parser.parse_from_file(str(model)):
        return
    errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
    raise BackendError(f"TensorRT cannot read {model.name}: {' | '.join(errors) or kept.words()}")


def _config(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    settings: Settings,
    calibrator: Callbacks | None,
) -> trt.IBuilderConfig:
    config = builder.create_builder_config()
    _configure(config, settings)
    if settings.float_layers:
        _keep_float(config, network, settings)
    if settings.wide_layers:
        _keep_wide(config, network, settings.wide_layers)
    _leave_out(config, stand_ins())
    profile = _profile(builder, network, settings)
    if profile is not None:
        config.add_optimization_profile(profile)
    if calibrator is not None:
        config.int8_calibrator = cast("trt.IInt8Calibrator", calibrator)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        calibrator.expect({tensor.name: dtype_of(tensor.dtype) for tensor in inputs})
        if profile is not None:
            config.set_calibration_profile(profile)
    return config


def _configure(config: trt.IBuilderConfig, settings: Settings) -> None:
    import tensorrt as trt

    types = ((settings.int8, "INT8"), (settings.fp16, "FP16"), (settings.bf16, "BF16"))
    for wanted, name in () if settings.typed else types:
        if wanted and hasattr(trt.BuilderFlag, name):
            config.set_flag(getattr(trt.BuilderFlag, name))
    if not settings.tf32:  # on by default
        config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the engine's inspector
    if settings.workspace_mib is not None:
        pool = trt.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, settings.workspace_mib << 20)


def _keep_float(
    config: trt.IBuilderConfig, network: trt.INetworkDefinition, settings: Settings
) -> None:
    """Bind layers to a float precision; TensorRT chooses every other layer's itself.

    Raises:
        BackendError: the network has no layer of this node.
    """
    import tensorrt as trt

    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    narrow = trt.bfloat16 if settings.bf16 else trt.float32
    precision = trt.float16 if settings.fp16 else narrow
    bound: set[str] = set()
    for layer, meant in _meant(network, settings.float_layers):
        layer.precision = precision
        bound |= meant
    lost = sorted(set(settings.float_layers) - bound)
    if lost:
        raise BackendError(
            f"a node to keep in float must be a layer of TensorRT's network, {lost[0]!r} is none;"
            " build from the Q/DQ model (--engine-from qdq), or leave it away"
        )


def _keep_wide(
    config: trt.IBuilderConfig, network: trt.INetworkDefinition, nodes: Mapping[str, str]
) -> None:
    """Bind layers and what they give to float32, also those bound to another float before."""
    import tensorrt as trt

    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    for layer, _ in _meant(network, nodes):
        layer.precision = trt.float32
        for place in range(layer.num_outputs):
            layer.set_output_type(place, trt.float32)


def _meant(
    network: trt.INetworkDefinition, nodes: Mapping[str, str]
) -> Iterator[tuple[trt.ILayer, set[str]]]:
    """The layers that nodes became, by their name or by the tensor that they give."""
    by_tensor = {tensor: node for node, tensor in nodes.items()}
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        made = {layer.get_output(place).name for place in range(layer.num_outputs)}
        meant = {by_tensor[tensor] for tensor in made & by_tensor.keys()}
        meant |= {layer.name} & nodes.keys()
        if meant:
            yield layer, meant


def _leave_out(config: trt.IBuilderConfig, sources: Sequence[str]) -> None:
    """Take no tactics from these sources; with none named, TensorRT's default stands."""
    import tensorrt as trt

    if not sources:
        return
    left = config.get_tactic_sources()
    for name in sources:
        left &= ~(1 << int(getattr(trt.TacticSource, name)))
    if not config.set_tactic_sources(left):
        raise BackendError(
            f"TensorRT must leave out {', '.join(sources)}, whose libraries are empty stand-ins"
            " here, but refused; install the real ones"
        )


def _profile(
    builder: trt.Builder, network: trt.INetworkDefinition, settings: Settings
) -> trt.IOptimizationProfile | None:
    import tensorrt as trt

    profiles, values = settings.profiles, settings.values
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    shapes = {tensor.name: dims(tensor.shape) for tensor in inputs}
    dynamic = {name: shape for name, shape in shapes.items() if -1 in shape}
    lacking = sorted(set(dynamic) - set(profiles))
    if lacking:
        raise ConfigError(
            f"a dynamic input needs a profile, got none for {lacking[0]!r}"
            f" {list(dynamic[lacking[0]])}; give its shapes"
        )
    shaping = [tensor.name for tensor in inputs if tensor.is_shape_tensor]
    unknown = sorted(set(shaping) - set(values))
    if unknown:
        raise ConfigError(
            f"an input that shapes depend on needs values, got none for {unknown[0]!r}; feed it"
            " whole numbers, in one dimension at most"
        )
    if not dynamic and not shaping:
        return None
    profile = builder.create_optimization_profile()
    for name in dynamic:
        given = profiles[name]
        least, best, most = (trt.Dims(list(s)) for s in (given.least, given.best, given.most))
        profile.set_shape(name, least, best, most)
    for name in shaping:
        one = list(values[name])
        profile.set_shape_input(name, one, one, one)
    return profile


def _timing_cache(config: trt.IBuilderConfig, path: Path | None) -> trt.ITimingCache | None:
    if path is None:
        return None
    known = b""
    if path.exists():
        known = read_bytes(path, what="a timing cache", error=BackendError, own=True)
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")  # of another GPU or version: begin anew
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache
