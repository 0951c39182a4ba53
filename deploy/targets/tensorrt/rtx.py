"""The TensorRT for RTX target: engines that are compiled here, without a GPU.

::

    typed model  --NVIDIA's compiler, this machine-->  X.sm86-sm89-sm120-1.7.1.116.rtx.engine
                                                         |
                     the runtime of the same version, which finishes it for the GPU it runs on

Source: TensorRT-RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines"; the support matrix.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from deploy.errors import BackendError, ConfigError, SdkMissingError, extra_hint
from deploy.files import manifest
from deploy.files.manifest import sha256
from deploy.targets.base import RTX_SCRIPT, BuildRequest, BuildResult, Target
from deploy.targets.options import check_options, option
from deploy.targets.tensorrt.log import process_logger, record_log
from deploy.targets.tensorrt.target import TensorRT
from deploy.targets.tensorrt.trt_options import FP8, INT8, TYPED_MODEL

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.graph.plan import FloatNodes, Plan
    from deploy.targets.tensorrt.profiles import InputShapeRange
    from deploy.tensors import Session

_PACKAGE = "tensorrt_rtx"
_INSTALL = extra_hint("rtx")
# generation of GPUs -> its compute capability, a member of `ComputeCapability`
_CAPABILITIES = {"turing": "SM75", "ampere": "SM86", "ada": "SM89", "blackwell": "SM120"}
_FP8_GENERATIONS = ("ada", "blackwell")
_PARSER = "11.0.0"  # TensorRT whose ONNX parser reads the same operators
_TYPED_ENDING = ".rtx.onnx"
_ENGINE_ENDING = ".rtx.engine"
_SCRIPT_ENDING = "_rtx.sh"  # measures the engine on its GPU


@dataclass(frozen=True, kw_only=True)
class TensorRTForRTX(Target):
    """The TensorRT for RTX target, with its options.

    Attributes:
        gpus: generations of GPUs that the engine is compiled for: "turing", "ampere", "ada" or
            "blackwell"; empty for all from Ampere on, in fp8 from Ada on.
        precision: quantized type: "int8" or "fp8" (E4M3).
        max_batch: largest batch of an engine with a dynamic batch.
        name: "tensorrt-rtx", the target's name in files, reports and on the command line.
    """

    gpus: tuple[str, ...] = option(
        (),
        flag="--rtx-gpu",
        choices=tuple(_CAPABILITIES),
        help="Generation of GPUs to compile for; by default all from Ampere on, in fp8 from Ada"
        " on.",
    )
    precision: str = option(
        INT8,
        flag="--rtx-precision",
        choices=(INT8, FP8),
        help="Type of quantized tensors; fp8 is for GPUs from Ada on.",
        changes_placement=True,
    )
    max_batch: int = option(
        8, flag="--rtx-max-batch", minimum=1, help="Largest batch of a dynamic engine."
    )
    name: str = "tensorrt-rtx"
    engines: ClassVar[tuple[str, ...]] = (_ENGINE_ENDING,)

    def __post_init__(self) -> None:
        check_options(self)
        if self.precision != FP8:
            return
        for generation in self.gpus:
            if generation not in _FP8_GENERATIONS:
                raise ConfigError(
                    f"fp8 is for GPUs of {' and '.join(_FP8_GENERATIONS)}, got --rtx-gpu"
                    f" {generation} with --rtx-precision fp8; leave one of them out"
                )

    @property
    def writes(self) -> tuple[str, ...]:
        """Endings of the files that `build` writes with the installed compiler."""
        ending = self._engine_ending
        if not ending:
            return (_TYPED_ENDING,)
        return _TYPED_ENDING, ending, f"{ending}.json", _SCRIPT_ENDING

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities that the engine is compiled for, such as "SM89"."""
        if self.gpus:
            generations: Sequence[str] = self.gpus
        elif self.precision == FP8:
            generations = _FP8_GENERATIONS
        else:
            generations = ("ampere", "ada", "blackwell")
        return tuple(_CAPABILITIES[generation] for generation in dict.fromkeys(generations))

    @property
    def _engine_ending(self) -> str:
        """Ending of the engine's file; "" without the compiler."""
        version = _installed_version()
        capabilities = "-".join(self.capabilities).lower()
        return f".{capabilities}-{version}{_ENGINE_ENDING}" if version else ""

    @property
    def _typed_target(self) -> TensorRT:
        """The TensorRT target, whose typed model is compiled."""
        return TensorRT(precision=self.precision, version=_PARSER)

    def scaled_tensors(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """List every float tensor, as TensorRT's target does."""
        return self._typed_target.scaled_tensors(model, float_nodes)

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Return the quantization plan of the typed model."""
        return self._typed_target.plan(model, float_nodes)

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations to make: those of TensorRT's target.

        Raises:
            ConfigError, ModelError, ExportError: as `TensorRT.demand`.
        """
        return self._typed_target.demand(subject)

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the Q/DQ model."""
        return self._typed_target.trial(request)

    def evaluated(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the typed model."""
        return self._typed_target.evaluated(request)

    def build(self, request: BuildRequest) -> BuildResult:
        """Write the typed model, and compile it if TensorRT for RTX is installed."""
        from deploy.targets.tensorrt import cache_contents, engines

        typed_target = self._typed_target  # TensorRT's target with these options
        calibrated = typed_target.calibrate_scales(request)
        models, _, model_notes = typed_target.make_models(request, calibrated)
        # plugin nodes, which ONNX Runtime does not know, have decisions of their own
        decisions = (*calibrated.matched_cache.plan.decisions, *request.plugin_decisions)
        if TYPED_MODEL not in models:  # the notes say why there is none
            return BuildResult(target=self.name, decisions=decisions, error="; ".join(model_notes))
        complete_model = request.with_plugin_nodes(models[TYPED_MODEL])
        typed_model, lowering_note = engines.lower_for_tensorrt(complete_model, _PARSER)
        typed_bytes = typed_model.SerializeToString(deterministic=True)
        typed_path = request.write(_TYPED_ENDING, typed_bytes)

        files = {"typed model for TensorRT for RTX": typed_path}
        engine: Path | None = None
        error = ""
        notes = [*model_notes, lowering_note]
        try:
            engine = self._compile(request, typed_path, sha256(typed_bytes))
            files["TensorRT for RTX engine"] = engine
            # NVIDIA's program measures the engine; the script passes its own arguments on
            command = f'exec tensorrt_rtx --loadEngine={shlex.quote(engine.name)} "$@"'
            files[RTX_SCRIPT] = request.write_script(_SCRIPT_ENDING, command)
        except SdkMissingError as missing:
            notes.append(f"no engine was compiled: {missing}")
        except BackendError as failure:
            error = str(failure)
        return BuildResult(
            target=self.name,
            engine=engine,
            # ONNX Runtime runs it for the accuracy, unless it has plugin nodes
            runnable=None if request.plugin_decisions else typed_path,
            files=files,
            decisions=decisions,
            method=request.chosen_ranges.chosen_by,
            ranges=cache_contents.cache_ranges(request.model, calibrated.ranges, _PARSER),
            notes=tuple(filter(None, notes)),
            error=error,
        )

    def _compile(self, request: BuildRequest, typed_path: Path, digest: str) -> Path:
        """Write the engine of the typed model; return its path.

        It is compiled, or copied from an earlier build of the same model, compiler and profiles.

        `digest`: sha256 of the typed model's file.

        Raises:
            SdkMissingError: TensorRT for RTX is not installed.
            BackendError: the compiler refuses the model.
        """
        from deploy.targets.tensorrt.profiles import sample_profiles

        library = _import_library()
        profiles = sample_profiles(request, max_batch=self.max_batch, fixed=False, tuned_shapes={})
        engine_path = request.file(self._engine_ending)
        made_from = {  # an engine with an equal note is reused
            "tensorrt_rtx": library.__version__,
            "compute_capabilities": self.capabilities,
            "model_sha256": digest,
            "profiles": profiles,
        }
        engine_bytes = manifest.read_if_made_from(request.earlier_file(engine_path.name), made_from)
        if engine_bytes is None:
            engine_bytes = compile_engine(typed_path, self.capabilities, profiles)
        return manifest.write_made_from(engine_path, engine_bytes, made_from)

    def describe_sdk(self) -> str:
        """Name the installed compiler.

        Raises:
            SdkMissingError: it is not installed.
        """
        return f"TensorRT for RTX {_import_library().__version__}, which compiles without a GPU"

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Refuse: an engine runs in NVIDIA's own runtime.

        Raises:
            SdkMissingError: always.
        """
        raise SdkMissingError(
            f"{engine.name} runs in the runtime of TensorRT for RTX, on an RTX GPU, and not here:"
            f" tensorrt_rtx --loadEngine={engine.name}"
        )


def compile_engine(
    model: Path, capabilities: Sequence[str], profiles: Mapping[str, InputShapeRange]
) -> bytes:
    """Return the engine of a strongly typed model, compiled without a GPU.

    Args:
        model: ONNX file.
        capabilities: compute capabilities to compile for, names of `ComputeCapability`.
        profiles: dynamic input -> the smallest, the usual and the largest shape.

    Raises:
        SdkMissingError: TensorRT for RTX is not installed.
        BackendError: it refuses the model; the message quotes its log.
    """
    library = _import_library()
    logger = process_logger(library)
    refusal = f"TensorRT for RTX cannot compile {model.name}"
    with record_log() as log:
        builder = library.Builder(logger)
        network = builder.create_network(0)
        parser = library.OnnxParser(network, logger)
        if not parser.parse_from_file(str(model)):
            errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
            raise BackendError(f"{refusal}: {' | '.join(errors) or log.summary()}")

        config = builder.create_builder_config()
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(library.ComputeCapability, capability), index)
        if profiles:
            profile = builder.create_optimization_profile()
            for name, shapes in profiles.items():
                profile.set_shape(name, *shapes)
            config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BackendError(f"{refusal}: {log.summary()}")
    return bytes(engine)


def _installed_version() -> str:
    """Return the version of the installed TensorRT for RTX; "" without."""
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def _import_library() -> Any:
    """Import and return the module `tensorrt_rtx`.

    Raises:
        SdkMissingError: it is not installed, or its library cannot be loaded.
    """
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        raise SdkMissingError(
            f"an engine is compiled by TensorRT for RTX, which is not on this machine ({error}):"
            f" {_INSTALL}"
        ) from error
    return tensorrt_rtx
