"""The TensorRT target (8.5 to 11): an engine if there is a GPU, and always the files to build it.

Files that are written on any machine::

    m.tensorrt.onnx      the cleaned float model         } together for 8.5 to 10.16 (DLA: to 10.7):
    m.tensorrt.cache     its calibration cache           } implicit quantization
    m.tensorrt.cache.json   the origin of the cache, for the C++ builder on a device
    m.tensorrt.qdq.onnx  the symmetric Q/DQ model          for 8.5 to 11: explicit quantization
    m.tensorrt.typed.onnx   the same, float16 elsewhere    for 10 and 11 (DLA: from 11.4.1, `--dla`)
    m.tensorrt.part.onnx the part of it that ONNX Runtime can run, if the model has plugins

The Q/DQ model is made from the cache, so both have the same scales. An engine is built from the
cache by TensorRT 8 and 9, from the typed model by 10 and 11. With `precision` fp8 there is only the
Q/DQ model, since TensorRT's calibrators and caches are for int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import BackendError, ConfigError, ExportError, ModelError, SdkMissingError
from deploy.targets.base import (
    TRTEXEC_SCRIPT,
    TRTEXEC_SCRIPT_WITH,
    BuildRequest,
    BuildResult,
    CacheText,
    Target,
)
from deploy.targets.tensorrt.trt_options import (
    CACHE_FILE,
    CACHE_NOTE,
    FLOAT_MODEL,
    FP8,
    FP16,
    FP32,
    INT8,
    QDQ_MODEL,
    RUNNABLE_PART,
    TYPED_MODEL,
    Files,
    TensorrtOptions,
)

if TYPE_CHECKING:
    import onnx

    from deploy.calibration import trt_cache
    from deploy.calibration.observation import CalibrationSubject, Observation
    from deploy.calibration.ranges import Ranges, RangeSet
    from deploy.graph.plan import FloatNodes, Plan
    from deploy.method import Method
    from deploy.targets.tensorrt.cache_match import CacheMatch
    from deploy.targets.tensorrt.engines import Baselines
    from deploy.targets.tensorrt.trtexec import TrtexecCommand, UnreadModel
    from deploy.tensors import Session


# flags that decide how a float model is quantized
_QUANTIZING_FLAGS = (
    "--precision fp8",
    "--calibrator",
    "--float-behind-concat",
    "--pair-behind-deconv",
)
_DLA_NOTE = (
    "the typed model is for DLA in TensorRT 11.4.1 or newer (JetPack 7.2.2 on Jetson AGX Orin): up"
    " to 10.7 DLA takes the cache, and 10.8 to 11.4.0 have no DLA"
)


@dataclass(frozen=True, slots=True)
class _CalibratedModel:
    """The calibration cache of a model.

    Attributes:
        cache: TensorRT's cache.
        matched_cache: the cache matched to the cleaned model, with the plan of the Q/DQ pairs.
        ranges: the ranges that both were made from.
        version: TensorRT that will read the cache, "X.Y.Z".
    """

    cache: trt_cache.CalibrationCache
    matched_cache: CacheMatch
    ranges: RangeSet
    version: str


@dataclass(frozen=True, kw_only=True)
class TensorRT(TensorrtOptions, Target):
    """The TensorRT target, with its options.

    Attributes:
        version: "X.Y.Z" of the TensorRT that will read the files; None for `trt_version` of the
            `CachePolicy`, or of the installed TensorRT, or of a stored cache, or 10.3.0.
        precision: quantized type: "int8", or "fp8" (E4M3, GPUs from Ada and Hopper on).
        form: what the engine is built from: "cache", "qdq" (the typed model from TensorRT 10 on),
            or "auto": the cache for TensorRT 8 and 9 or with `calibrator`, else "qdq".
        rest: type of the layers that are not quantized: "fp16", "bf16" or "fp32".
        workspace_mib: workspace limit in MiB; None for TensorRT's default.
        max_batch: largest batch of an engine with a dynamic batch.
        cuda_graph: run the engine from a captured CUDA graph.
        calibrator: "entropy2", "entropy", "minmax" or "legacy" to let TensorRT calibrate on the GPU
            with the same samples, in batches of `max_batch`; None to use calib8's ranges.
        float_behind_concat: keep the readers of a Concat of float tensors in float.
        pair_behind_deconv: put a pair also between a ConvTranspose and its activation.
        dla: quantize every tensor around the layers that DLA can run, and build for DLA core 0 with
            the GPU as fallback.
        baselines: float engines to build for the comparison of speed: "fp32,fp16", one of them, or
            "none".
        device: index of the GPU to build and run on.
        plugins: plugin libraries, loaded before a model is parsed or an engine is opened.
        timing_cache: file of TensorRT's tactic timings, to read and to add to; None for one in
            the folder of the build. A file that TensorRT refuses is not changed.
        trtexec_flags: further flags of trtexec, "--name=value", for its lines. The engine that
            is built here takes only those of `ENGINE_FLAGS`.
        name: "tensorrt", the target's name in files, reports and on the command line.
    """

    name: str = "tensorrt"
    engines: ClassVar[tuple[str, ...]] = (".engine", ".plan")
    writes: ClassVar[tuple[str, ...]] = (
        ".tensorrt.onnx", ".tensorrt.cache", ".tensorrt.cache.json", ".tensorrt.qdq.onnx",
        ".tensorrt.typed.onnx", ".tensorrt.part.onnx", "_trtexec.sh", ".engine", ".engine.json",
        ".fp32.engine", ".fp32.engine.json", ".tensorrt.fp32.onnx", ".tensorrt.fp16.onnx",
        ".fp16.engine", ".fp16.engine.json", ".gpu.cache", ".gpu.cache.json",
    )  # fmt: skip

    def scaled_tensors(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """List every float tensor: a TensorRT cache has all of them."""
        from deploy.targets.tensorrt.cache_contents import trt_tensors

        return tuple(trt_tensors(model))

    def plan(self, model: onnx.ModelProto, float_nodes: FloatNodes = ()) -> Plan:
        """Return the quantization plan of the Q/DQ model; with a cache TensorRT itself decides."""
        from deploy.graph.plan import analyse
        from deploy.targets.tensorrt.cache_qdq import share_scales

        return share_scales(model, analyse(model, self.placement, float_nodes=float_nodes))

    def demand(self, subject: CalibrationSubject) -> tuple[Observation, ...]:
        """Return the observations to make: the method's statistic of every float tensor.

        Raises:
            ConfigError: an option contradicts the model, the method or this machine.
            ModelError: nothing of the model can run in fp8.
            ExportError: a cache cannot hold a tensor's name.
        """
        from deploy.frontends.checks import refuse_optimized
        from deploy.targets.prequantized import refuse_options
        from deploy.targets.tensorrt import cache_contents, sdk

        sdk.plugin_digests(self.plugins)  # refuses a library that cannot be read
        if self.device:
            with suppress(SdkMissingError):  # without TensorRT the engine is built elsewhere
                sdk.find_sdk(self.device)  # refuses an index of a GPU that is not there
        refuse_optimized(subject.model, self.name)
        if subject.loaded.qdq is not None:  # the user gave a Q/DQ model
            refuse_options(subject.loaded.qdq, self, _QUANTIZING_FLAGS)
        cache_contents.refuse_names(subject.model)
        self._check_methods(subject.method)
        if self.precision == FP8:
            self._check_fp8_nodes(subject)
        # methods that imitate a calibrator of TensorRT observe the model as its parser reads it
        observations = cache_contents.tensorrt_observations(subject)
        if observations is None:
            observations = subject.histogram_observations(self.scaled_tensors(subject.model, ()))
        return observations

    def _check_fp8_nodes(self, subject: CalibrationSubject) -> None:
        """Refuse a model of which no node can run in fp8."""
        decisions = self.plan(subject.model, subject.float_nodes).decisions
        if not any(decision.quantized for decision in decisions):
            raise ModelError(
                f"at least one node of the model must be able to run in fp8, got none in"
                f" {subject.loaded.name}; `calib8 inspect --target tensorrt --precision fp8` says"
                " why; --precision int8 has fewer conditions"
            )

    def cache_version(self) -> str | None:
        """Return the installed TensorRT's version if it reads caches."""
        from deploy.targets.tensorrt.sdk import cache_reading_version

        return cache_reading_version()

    def cache_text(self, subject: CalibrationSubject, ranges: Ranges) -> CacheText:
        """Return the cache that TensorRT itself would write for the file, with notes."""
        from deploy.targets.tensorrt import cache_contents

        range_set = ranges.find(self.demand(subject))
        return CacheText(
            cache_contents.cache_bytes(subject, range_set),
            cache_contents.cache_notes(subject, range_set),
        )

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the Q/DQ model."""
        from deploy.targets.tensorrt.cache_qdq import to_qdq

        matched_cache = self.calibrate_scales(request).matched_cache
        return to_qdq(
            request.model,
            matched_cache.plan,
            matched_cache.scales,
            memoize=request.compute_once,
            float_weights=False,
        )

    def evaluated(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the typed model if TensorRT runs that one and a CPU can, else the Q/DQ model."""
        calibrated_model = self.calibrate_scales(request)
        models, _, _ = self.make_models(request, calibrated_model)
        return models[self._evaluated_role(models, calibrated_model.version)]

    def calibrate_scales(self, request: BuildRequest) -> _CalibratedModel:
        """Return TensorRT's cache, with the ranges by the methods that the request chose.

        The result also has the plan of the Q/DQ pairs for which the cache has a scale.

        Raises:
            ConfigError: a chosen method is not defined for fp8.
        """
        from deploy.targets.tensorrt import cache_contents
        from deploy.targets.tensorrt.cache_match import match_cache

        # the version of TensorRT that is to read the cache
        version = self.version or cache_contents.reading_version(request.subject)
        placement = self.placement
        # the methods that a search chose: for single tensors, and for all others. The latter is
        # None if these keep the method of the calibration
        choices = request.choices
        chosen_methods = (*choices.methods.values(), choices.method)
        self._check_methods(*filter(None, chosen_methods))
        fp8_grid = placement.grid if self.precision == FP8 else None  # None for int8
        ranges = request.ranges_of(self, symmetric_grid=fp8_grid)
        cache = cache_contents.cache_of(request.model, ranges, version)
        match = match_cache(
            cache,
            request.model,
            float_nodes=request.float_nodes,
            placement=placement,
            analysis=request.model_analysis,
        )
        # A tensor that is always 0 has scale 0, with which TensorRT cannot quantize. `match_cache`
        # has left its node in float; without an entry in the cache TensorRT does so too.
        entries = tuple(entry for entry in cache.entries if entry.scale != 0)
        return _CalibratedModel(replace(cache, entries=entries), match, ranges, version)

    def _check_methods(self, *methods: Method) -> None:
        """Refuse methods that are defined for integers only if the grid is fp8."""
        integer_methods = [method.name for method in methods if method.is_int8_only]
        if self.precision == FP8 and integer_methods:
            raise ConfigError(
                "--precision fp8 takes a method that is defined for its grid, got"
                f" {integer_methods[0]}, which is TensorRT's for int8; take mse, lp, minmax or"
                " percentile"
            )

    def build(self, request: BuildRequest) -> BuildResult:
        """Write models, cache and script; build the engine if TensorRT and a GPU are available."""
        from deploy.targets.tensorrt import cache_contents, engines, trtexec

        calibrated_model = self.calibrate_scales(request)  # the cache, and the plan of the pairs
        version = calibrated_model.version
        models, float32_nodes, model_notes = self.make_models(request, calibrated_model)

        # TensorRT reads the models with the plugin nodes, which ONNX Runtime does not know
        complete_models = {role: request.with_plugin_nodes(model) for role, model in models.items()}
        written_models, lowering_notes = engines.lower_models(self, complete_models, version)
        files = self._write_models(request, calibrated_model, written_models, float32_nodes)

        # the file that is run on the CPU to measure the accuracy
        evaluated_role = self._evaluated_role(models, version)
        if request.plugin_decisions:  # only the part without plugin nodes can run there
            runnable_part = models[evaluated_role]
            files[RUNNABLE_PART] = request.write(".tensorrt.part.onnx", runnable_part)
            evaluated_role = RUNNABLE_PART
        evaluated_file = files[evaluated_role]

        # role -> opset and operators that TensorRT's parser must know
        requirements = {
            role: trtexec.ParserRequirements.of(model) for role, model in written_models.items()
        }
        commands = trtexec.trtexec_commands(
            self, request, files, requirements, version, float32_nodes
        )
        default_command = trtexec.shipping_command(
            commands, version, reads_typed=engines.reads_typed(self, version)
        )
        unread_model = trtexec.find_unread_model(self, requirements, version)
        # the files that the script's default command reads
        shipped_files = _write_script(request, files, commands, default_command, unread_model)
        engine, baselines, engine_notes, failure = self._build_engines(
            request, calibrated_model, files, float32_nodes, commands
        )
        if engine is not None:
            files["TensorRT engine"] = engine
        dla_notes = [_DLA_NOTE] if self.dla else []
        # what `version` cannot do does not matter if it is a default, not the user's, and the
        # TensorRT of this machine has built an engine
        alerts: list[str] = []
        if engine is None or self.version is not None:
            alerts += trtexec.find_unsupported_option(self, version)
            if unread_model is not None:
                alerts.append(unread_model.alert)
        return BuildResult(
            target=self.name,
            engine=engine,
            # if TensorRT fails, the target has failed: no model is evaluated in place of the engine
            runnable=None if failure else evaluated_file,
            shipped=shipped_files,
            baselines=baselines.engines,
            files={**files, **baselines.files},
            decisions=(*calibrated_model.matched_cache.plan.decisions, *request.plugin_decisions),
            method=request.chosen_ranges.chosen_by,
            ranges=cache_contents.cache_ranges(request.model, calibrated_model.ranges, version),
            notes=(*model_notes, *lowering_notes, *dla_notes, *engine_notes),
            alerts=tuple(alerts),
            error=failure,
        )

    def make_models(
        self, request: BuildRequest, calibrated_model: _CalibratedModel
    ) -> tuple[dict[str, onnx.ModelProto], Mapping[str, str], tuple[str, ...]]:
        """Make the float model (not with fp8), the Q/DQ model, and the typed one if there is one.

        The typed model is the Q/DQ model with its float part in float16 or bfloat16.

        Returns:
            Role -> model, without the nodes that ONNX Runtime does not know; node that TensorRT
            must run in float32 -> its output tensor; notes for the user.
        """
        from deploy.targets.tensorrt.cache_contents import largest_magnitudes
        from deploy.targets.tensorrt.float_types import find_float32_layers

        # tensor -> largest |x| observed
        largest_values = largest_magnitudes(calibrated_model.ranges)
        models = {FLOAT_MODEL: request.model} if self.precision == INT8 else {}
        models[QDQ_MODEL], notes = self._quantize(request, calibrated_model.matched_cache)
        typed_model, type_notes = self._make_typed_model(
            request, calibrated_model.matched_cache, largest_values, models[QDQ_MODEL]
        )
        notes = (*notes, *type_notes)
        # nodes whose values are too large for float16 -> their output: the typed model states their
        # type, but where TensorRT chooses types, it must be told their names
        float32_nodes, reason_by_float32_node = find_float32_layers(
            request.model,
            largest_values,
            float_type=self.rest,
            quantized=set(calibrated_model.matched_cache.plan.int8_nodes),
        )
        if typed_model is None:
            notes = (*notes, *_float32_notes(reason_by_float32_node))
        else:
            models[TYPED_MODEL] = typed_model
        return models, float32_nodes, notes

    def _write_models(
        self,
        request: BuildRequest,
        calibrated_model: _CalibratedModel,
        models: Mapping[str, onnx.ModelProto],
        float32_nodes: Mapping[str, str],
    ) -> dict[str, Path]:
        """Write the models, and with the float model its cache; return role -> path.

        Args:
            request: the build request.
            calibrated_model: the cache.
            models: role -> model, as TensorRT reads it.
            float32_nodes: node that TensorRT must run in float32 -> its output tensor.
        """
        from deploy.calibration import trt_cache
        from deploy.targets.tensorrt import cache_tools

        files = {}
        if FLOAT_MODEL in models:
            files[FLOAT_MODEL] = request.write(".tensorrt.onnx", models[FLOAT_MODEL])
            text = trt_cache.dump(calibrated_model.cache)
            files[CACHE_FILE] = request.write(".tensorrt.cache", text)
            # the origin of the cache; None if it is the user's own
            note_path = cache_tools.write_cache_note(
                request, files[CACHE_FILE], text, models[FLOAT_MODEL], float32_nodes
            )
            if note_path is not None:
                files[CACHE_NOTE] = note_path
        files[QDQ_MODEL] = request.write(".tensorrt.qdq.onnx", models[QDQ_MODEL])
        if TYPED_MODEL in models:
            files[TYPED_MODEL] = request.write(".tensorrt.typed.onnx", models[TYPED_MODEL])
        return files

    def _build_engines(
        self,
        request: BuildRequest,
        calibrated_model: _CalibratedModel,
        files: Files,
        float32_nodes: Mapping[str, str],
        commands: Sequence[TrtexecCommand],
    ) -> tuple[Path | None, Baselines, tuple[str, ...], str]:
        """Build the quantized engine and the float ones, if TensorRT and a GPU are available.

        Args:
            request: the build request.
            calibrated_model: the cache and the ranges.
            files: role (what a file is for) -> file of the target.
            float32_nodes: node that must run in float32 if TensorRT chooses types -> its output.
            commands: commands of trtexec, which become notes if an engine cannot be built here.

        Returns:
            The quantized engine, None without TensorRT or after a failure; the float engines; notes
            for the user; why TensorRT failed, "" if it did not or is missing.
        """
        from deploy.targets.tensorrt import engines

        engine: Path | None = None  # once built, it is kept if a float engine fails
        command_notes = [command.sentence for command in commands]
        try:
            engine, engine_notes = engines.build_quantized_engine(
                self, request, files, calibrated_model.cache, float32_nodes
            )
            baselines = engines.build_float_engines(
                self, request, files, calibrated_model.ranges, calibrated_model.version
            )
        except SdkMissingError as error:
            notes = (f"no engine was built: {error}", *command_notes)
            if self.calibrator is not None and engine is None:
                # the scales that it would find are in none of the files
                calibrator_note = (
                    f"--calibrator {self.calibrator} needs TensorRT and a GPU, so these files have"
                    " calib8's own ranges"
                )
                notes = (calibrator_note, *notes)
            return engine, engines.Baselines(), notes, ""
        except BackendError as error:
            return engine, engines.Baselines(), tuple(command_notes), str(error)
        notes = tuple(dict.fromkeys((*engine_notes, *baselines.notes)))  # each once
        return engine, baselines, notes, ""

    def describe_sdk(self) -> str:
        """Name the installed TensorRT and its GPU."""
        from deploy.targets.tensorrt import sdk

        installed = sdk.find_sdk(self.device)
        return f"TensorRT {installed.version} on {installed.gpu}"

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load an engine on the GPU."""
        from deploy.targets.tensorrt.session import TensorrtSession

        return TensorrtSession.open(
            engine, cuda_graph=self.cuda_graph, device=self.device, plugins=self.plugins
        )

    def _evaluated_role(self, models: Mapping[str, onnx.ModelProto], version: str) -> str:
        """Return the role of the model to evaluate: the one TensorRT runs, if a CPU can run it."""
        from deploy.targets.tensorrt.trtexec import features_of

        # ONNX Runtime has no bfloat16 convolutions
        if self.rest != FP16 or TYPED_MODEL not in models:
            return QDQ_MODEL
        has_typed_engine = self.precision == FP8 or self.dla or features_of(version).typed
        return TYPED_MODEL if has_typed_engine else QDQ_MODEL

    def _quantize(
        self, request: BuildRequest, match: CacheMatch
    ) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return (Q/DQ model, notes): the user's own if TensorRT reads it, else a new one.

        `request.trained` is the user's Q/DQ model, if it was given in place of a float model.
        """
        from deploy.targets.prequantized import rewritten_notes, unchanged_note
        from deploy.targets.tensorrt import trained_pairs
        from deploy.targets.tensorrt.cache_qdq import to_qdq

        trained = request.trained
        if trained is None:
            model = to_qdq(request.model, match.plan, match.scales)
            missing_notes = [
                f"no Q/DQ pair on {coverage.tensor}: it {coverage.reason}"
                for coverage in match.tensors
                if not coverage.has_scale
            ]
            return model, tuple(missing_notes)
        if trained_pairs.has_tensorrt_pairs(trained):
            return trained_pairs.dequantize_biases(trained), (unchanged_note(trained),)
        model = to_qdq(
            request.model, match.plan, match.scales, trained_scales=trained.weight_scales
        )
        notes = rewritten_notes(
            trained, model, match.plan.decisions, self.name, trained_pairs.REQUANTIZED_NOTE
        )
        return model, tuple(notes)

    def _make_typed_model(
        self,
        request: BuildRequest,
        match: CacheMatch,
        largest_values: Mapping[str, float],
        qdq_model: onnx.ModelProto,
    ) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
        """Return the typed model, a Q/DQ model whose float part is float16 or bfloat16, and notes.

        The model is None if the user wants the float part in float32 (`rest`), or if it cannot be
        converted; then a note says why.

        Args:
            request: the build request.
            match: the planned pairs with their scales.
            largest_values: tensor of the float model -> largest |x| observed.
            qdq_model: the Q/DQ model. It is converted itself if it is the user's own, with pairs
                that TensorRT reads; else the float model is quantized once more. In both cases the
                scales are rounded to values of the narrow type.
        """
        from deploy.targets.tensorrt import trained_pairs
        from deploy.targets.tensorrt.cache_qdq import to_typed

        if self.rest == FP32:
            return None, ()
        trained = request.trained  # the user's own Q/DQ model; None for a float model
        try:
            if trained is not None and trained_pairs.has_tensorrt_pairs(trained):
                model, reason_by_float32_node = trained_pairs.narrow_trained_model(
                    qdq_model, self.rest, largest_values
                )
            else:
                model, reason_by_float32_node = to_typed(
                    request.model,
                    match.plan,
                    match.scales,
                    float_type=self.rest,
                    largest_values=largest_values,
                    trained_scales={} if trained is None else trained.weight_scales,
                )
            # raises ExportError if plugin nodes mean something else in the typed model's opset
            request.with_plugin_nodes(model)
        except ExportError as error:
            return None, (f"no typed model was written: {error}",)
        notes = _float32_notes(reason_by_float32_node)
        if trained is not None:
            notes.insert(0, trained_pairs.ROUNDED_SCALES_NOTE)
        return model, tuple(notes)


def _write_script(
    request: BuildRequest,
    files: dict[str, Path],
    commands: Sequence[TrtexecCommand],
    default: TrtexecCommand | None,
    unread_model: UnreadModel | None,
) -> tuple[Path, ...]:
    """Write the script of the trtexec commands and add it to `files`, which are role -> path.

    The script's argument is the name of the command to run; without one it runs `default`, the
    command for the TensorRT that is built for. If that is not the first command, the script's role
    names it too. If that TensorRT cannot read the model (`unread_model`), the role says which can.

    Returns:
        The files that the default command reads, which are to be shipped; none without one.
    """
    from deploy.targets.tensorrt.trtexec import trtexec_script

    role = TRTEXEC_SCRIPT
    shipped_files = []
    if default is not None:
        # such as m.onnx of --onnx=m.onnx
        argument_values = {argument.rpartition("=")[2] for argument in default.arguments}
        shipped_files = [path for path in files.values() if path.name in argument_values]
        if default != commands[0]:
            role = TRTEXEC_SCRIPT_WITH.format(default.name)
    if unread_model is not None:
        role = unread_model.script_role
    files[role] = request.write_script("_trtexec.sh", trtexec_script(commands, default))
    return tuple(shipped_files)


def _float32_notes(reasons: Mapping[str, str]) -> list[str]:
    """Return a note for each node that stays in float32."""
    return [f"{name} stays in float32: {reason}" for name, reason in reasons.items()]
