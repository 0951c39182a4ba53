"""The TensorRT target (8.5 to 11): an engine if there is a GPU, and always the files to build it.

Files that are written on any machine::

    m.tensorrt.onnx      the cleaned float model         } together for 8.5 to 10.16 (DLA: to 10.7):
    m.tensorrt.cache     its calibration cache           } implicit quantization
    m.tensorrt.cache.json   the origin of the cache, for the C++ builder on a device
    m.tensorrt.qdq.onnx  the symmetric Q/DQ model          for 8.5 to 11: explicit quantization
    m.tensorrt.typed.onnx   the same, float16 elsewhere    for 10 and 11 (DLA: from 11.4.1, `--dla`)
    m.tensorrt.part.onnx the part of it that ONNX Runtime can run, if the model has plugins

The Q/DQ model is made from the cache, so both have the same scales. An engine is built from the
cache if TensorRT still has calibrators, else from the Q/DQ model. With `precision` fp8 there is
only the Q/DQ model, since TensorRT's calibrators and caches are for int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploy.errors import BackendError, ConfigError, ExportError, ModelError, SdkMissingError
from deploy.targets.base import BuildRequest, BuildResult, CacheText, write_script
from deploy.targets.tensorrt.trt_options import (
    CACHE,
    FLOAT,
    FP8,
    FP16,
    FP32,
    INT8,
    NOTE,
    PART,
    QDQ,
    TYPED,
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
    from deploy.tensors import Session


_DLA_NOTE = (
    "the typed model is for DLA in TensorRT 11.4.1 or newer (JetPack 7.2.2 on Jetson AGX Orin): up"
    " to 10.7 DLA takes the cache, and 10.8 to 11.4.0 have no DLA"
)


@dataclass(frozen=True, kw_only=True)
class TensorRT(TensorrtOptions):
    """The TensorRT target; for its options see `TensorrtOptions`."""

    name: str = "tensorrt"
    engines: ClassVar[tuple[str, ...]] = (".engine", ".plan")
    writes: ClassVar[tuple[str, ...]] = (
        ".tensorrt.onnx", ".tensorrt.cache", ".tensorrt.cache.json", ".tensorrt.qdq.onnx",
        ".tensorrt.typed.onnx", ".tensorrt.part.onnx", "_trtexec.sh", ".engine", ".engine.json",
        ".fp32.engine", ".fp32.engine.json", ".tensorrt.fp32.onnx", ".tensorrt.fp16.onnx",
        ".fp16.engine", ".fp16.engine.json", ".gpu.cache", ".gpu.cache.json",
    )  # fmt: skip
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = ""
    alternatives: ClassVar[tuple[str, ...]] = ()
    configured: ClassVar[bool] = False

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
        """Return the observations to make: the method's statistic of every float tensor."""
        from deploy.frontends.checks import refuse_optimized
        from deploy.targets.tensorrt import cache_contents, sdk

        sdk.plugin_digests(self.plugins)
        if self.device:
            with suppress(SdkMissingError):  # without TensorRT the engine is built elsewhere
                sdk.find_sdk(self.device)
        refuse_optimized(subject.model, self.name)
        if subject.loaded.qdq is not None:
            from deploy.targets.prequantized import refuse_options

            options = {
                "--precision fp8": self.precision == FP8,
                "--calibrator": self.calibrator is not None,
                "--float-behind-concat": self.float_behind_concat,
                "--pair-behind-deconv": self.pair_behind_deconv,
            }
            refuse_options(subject.loaded.qdq, self.name, options)
        cache_contents.refuse_names(subject.model)
        self._check_methods(subject.method)
        decisions = self.plan(subject.model, subject.float_nodes).decisions
        if self.precision == FP8 and not any(one.quantized for one in decisions):
            raise ModelError(
                f"at least one node of the model must be able to run in fp8, got none in"
                f" {subject.loaded.name}; `calib8 inspect --target tensorrt --precision fp8` says"
                " why; --precision int8 has fewer conditions"
            )
        own = cache_contents.tensorrt_observations(subject, self.parser)
        return (
            subject.histogram_observations(self.scaled_tensors(subject.model, ()))
            if own is None
            else own
        )

    def cache_version(self) -> str | None:
        """Return the installed TensorRT's version if it reads caches."""
        from deploy.targets.tensorrt.sdk import cache_reader

        return cache_reader()

    def cache_text(self, subject: CalibrationSubject, ranges: Ranges) -> CacheText:
        """Return the cache that TensorRT itself would write for the file, with notes."""
        from deploy.targets.tensorrt import cache_contents

        own = ranges.find(self.demand(subject))
        return CacheText(
            cache_contents.cache_bytes(subject, own, self.parser),
            cache_contents.cache_notes(subject, own, self.parser),
        )

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """Return the Q/DQ model."""
        from deploy.targets.tensorrt.cache_qdq import to_qdq

        _, matched, _, _ = self._matched(request)
        return to_qdq(request.model, matched.plan, matched.scales)

    def _matched(
        self, request: BuildRequest
    ) -> tuple[trt_cache.CalibrationCache, CacheMatch, RangeSet, str]:
        """Return (cache, its match with the model, ranges, TensorRT version)."""
        from deploy.targets.tensorrt import cache_contents
        from deploy.targets.tensorrt.cache_match import match_cache

        version = self.version or cache_contents.reading_version(request.subject)
        choices, placement = request.choices, self.placement
        self._check_methods(*choices.methods.values(), *filter(None, [choices.method]))
        grid = placement.grid if self.precision == FP8 else None
        ranges = request.ranges_of(self, symmetric=grid)
        cache = cache_contents.cache_of(request.model, ranges, version)
        matched = match_cache(
            cache, request.model, float_nodes=request.float_nodes, placement=placement
        )
        return cache, matched, ranges, version

    def _check_methods(self, *methods: Method) -> None:
        """Refuse methods that are defined for integers only if the grid is fp8."""
        integer = [method.name for method in methods if method.integer]
        if self.precision == FP8 and integer:
            raise ConfigError(
                f"--precision fp8 takes a method that is defined for its grid, got {integer[0]},"
                " which is TensorRT's for int8; take mse, lp, minmax or percentile"
            )

    def build(self, request: BuildRequest) -> BuildResult:
        """Write the files, and the engine if TensorRT and a GPU are available."""
        from deploy.calibration import trt_cache
        from deploy.targets.stored_weights import read_stored_weights
        from deploy.targets.tensorrt import cache_contents, cache_tools, engines, trtexec
        from deploy.targets.tensorrt.float_types import write_model

        cache, matched, ranges, version = self._matched(request)
        models = {FLOAT: request.model} if self.precision == INT8 else {}
        models[QDQ], qdq_notes = self._quantized(request, matched)
        weights = read_stored_weights(models[QDQ])  # from the cache TensorRT computes the same ones
        narrow, type_notes = self._typed(request, matched, ranges, models[QDQ])
        wide, wide_notes = self._wide(request, matched, ranges)
        if narrow is not None:
            models[TYPED] = narrow
        else:
            type_notes = (*type_notes, *wide_notes)
        evaluated = self._evaluated(models, version)
        part = models[evaluated] if request.plugin_decisions else None
        complete = {role: request.with_plugin_nodes(model) for role, model in models.items()}
        models, lowered = engines.lower_models(self, complete, version)
        stem = request.folder / f"{request.name}.tensorrt"
        files = {}
        if self.precision == INT8:
            files[FLOAT] = write_model(stem, ".onnx", models[FLOAT])
            text = trt_cache.dump(cache)
            files[CACHE] = write_model(stem, ".cache", text)
            note_path = cache_tools.write_cache_note(
                request, files[CACHE], text, models[FLOAT], wide
            )
            files |= {} if note_path is None else {NOTE: note_path}
        files[QDQ] = write_model(stem, ".qdq.onnx", models[QDQ])
        if narrow is not None:
            files[TYPED] = write_model(stem, ".typed.onnx", models[TYPED])
        if part is not None:
            files[PART] = write_model(stem, ".part.onnx", part)
        notes = (*qdq_notes, *type_notes, *lowered, *((_DLA_NOTE,) if self.dla else ()))
        commands = trtexec.trtexec_commands(self, request, files, models, version, wide)
        path = request.folder / f"{request.name}_trtexec.sh"
        files["script of trtexec"] = write_script(path, trtexec.trtexec_script(commands))
        engine, baselines, failure = None, engines.Baselines(), ""
        try:
            engine, engine_notes = engines.build_quantized_engine(self, request, files, cache, wide)
            files["TensorRT engine"] = engine
            baselines = engines.build_float_engines(self, request, files, ranges, version)
            notes += tuple(dict.fromkeys((*engine_notes, *baselines.notes)))
        except BackendError as error:
            missing = isinstance(error, SdkMissingError)
            failure = "" if missing else str(error)
            notes += (f"no engine was built: {error}",) if missing else ()
            notes += tuple(command.sentence for command in commands)
        return BuildResult(
            target=self.name,
            engine=engine,
            runnable=None if failure else files[evaluated if part is None else PART],
            baselines=baselines.engines,
            files={**files, **baselines.files},
            decisions=(*matched.plan.decisions, *request.plugin_decisions),
            method=request.chosen_ranges.chosen_by,
            ranges=cache_contents.cache_ranges(request.model, ranges, version),
            weights=weights,
            notes=notes,
            error=failure,
        )

    def describe_sdk(self) -> str:
        """Name the installed TensorRT and its GPU."""
        from deploy.targets.tensorrt import sdk

        here = sdk.find_sdk(self.device)
        return f"TensorRT {here.version} on {here.gpu}"

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load an engine on the GPU."""
        from deploy.targets.tensorrt.session import TensorrtSession

        return TensorrtSession.open(
            engine, cuda_graph=self.cuda_graph, device=self.device, plugins=self.plugins
        )

    def _evaluated(self, models: Mapping[str, onnx.ModelProto], version: str) -> str:
        """Return the role of the model to evaluate: the one TensorRT runs, if a CPU can run it."""
        from deploy.targets.tensorrt.trtexec import features_of

        strong = self.precision == FP8 or self.dla or features_of(version).typed
        typed = self.rest == FP16 and TYPED in models and strong
        return TYPED if typed else QDQ  # ONNX Runtime has no bfloat16 convolutions

    def _quantized(
        self, request: BuildRequest, matched: CacheMatch
    ) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """Return (Q/DQ model, notes): the user's own if TensorRT reads it, else a new one."""
        from deploy.targets.prequantized import rewritten_notes, unchanged_note
        from deploy.targets.tensorrt import float_types
        from deploy.targets.tensorrt.cache_qdq import to_qdq

        trained = request.trained
        if trained is None:
            model = to_qdq(request.model, matched.plan, matched.scales)
            missing = (t for t in matched.tensors if not t.covered)
            return model, tuple(f"no Q/DQ pair on {t.tensor}: it {t.reason}" for t in missing)
        if float_types.has_tensorrt_pairs(trained):
            return float_types.trained_model(trained), (unchanged_note(trained),)
        model = to_qdq(request.model, matched.plan, matched.scales, known=trained.weight_scales)
        notes = rewritten_notes(
            trained, model, matched.plan.decisions, self.name, float_types.REQUANTIZED_NOTE
        )
        return model, tuple(notes)

    def _typed(
        self,
        request: BuildRequest,
        matched: CacheMatch,
        ranges: RangeSet,
        quantized: onnx.ModelProto,
    ) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
        """Return (Q/DQ model with its float part in the narrow type, or None; notes)."""
        from deploy.targets.tensorrt import float_types
        from deploy.targets.tensorrt.cache_contents import largest_magnitudes
        from deploy.targets.tensorrt.cache_qdq import to_typed

        if self.rest == FP32:
            return None, ()
        trained, largest = request.trained, largest_magnitudes(ranges)
        parts = request.model, matched.plan, matched.scales
        try:
            if trained is not None and float_types.has_tensorrt_pairs(trained):
                model, kept = float_types.narrow_trained_model(quantized, self.rest, largest)
            else:
                known = {} if trained is None else trained.weight_scales
                model, kept = to_typed(*parts, rest=self.rest, largest=largest, known=known)
            request.with_plugin_nodes(model)  # raises if plugin nodes would change meaning
        except ExportError as error:
            return None, (f"no typed model was written: {error}",)
        notes = [] if trained is None else [float_types.ROUNDED_SCALES_NOTE]
        notes += [f"{name} stays in float32: {why}" for name, why in kept.items()]
        return model, tuple(notes)

    def _wide(
        self, request: BuildRequest, matched: CacheMatch, ranges: RangeSet
    ) -> tuple[dict[str, str], list[str]]:
        """Return (node that TensorRT must run in float32 -> its output tensor, notes)."""
        from deploy.targets.tensorrt.cache_contents import largest_magnitudes
        from deploy.targets.tensorrt.float_types import wide_layers

        int8 = {one.node for one in matched.plan.decisions if one.quantized}
        layers, why = wide_layers(
            request.model, largest_magnitudes(ranges), rest=self.rest, but=int8
        )
        return layers, [f"{name} stays in float32: {reason}" for name, reason in why.items()]
