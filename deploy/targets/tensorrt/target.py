"""TensorRT, 8.5 to 11: an engine where there is a GPU, and everywhere what is needed to build it.

Written always, on any machine::

    m.tensorrt.onnx      the cleaned float model          } together for 8.5 to 10.16 (and DLA):
    m.tensorrt.cache     its calibration cache            } implicit quantization
    m.tensorrt.qdq.onnx  the symmetric Q/DQ model           for 8.5 to 11: explicit quantization
    m.tensorrt.part.onnx what of that ONNX Runtime runs, where it does not know all operators

The Q/DQ model is made from the cache, so both hold the same scales. An engine is built from the
cache where TensorRT still has calibrators, else from the Q/DQ model. With `precision` fp8 there is
the Q/DQ model alone, since TensorRT's calibrators and caches know int8 only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from deploy import atomic
from deploy.errors import ConfigError, ExportError, ModelError, SdkMissingError
from deploy.stamped import sha256
from deploy.targets.base import BuildRequest, Built, CacheText
from deploy.targets.options import check, option
from deploy.targets.script import write_script
from deploy.targets.tensorrt.words import (
    BF16,
    CACHE,
    FLOAT,
    FP8,
    FP16,
    FP32,
    INT8,
    PART,
    PLAIN,
    QDQ,
    TYPED,
)

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scale
    from calibrators.tensorrt import Callbacks
    from deploy.calibration import trt_cache
    from deploy.calibration.observation import Observation
    from deploy.calibration.ranges import Ranges
    from deploy.calibration.search import Method
    from deploy.calibration.store import Found
    from deploy.calibration.subject import Subject
    from deploy.graph.plan import Decision, Placement
    from deploy.targets.tensorrt.baselines import Baselines
    from deploy.targets.tensorrt.builder import Settings
    from deploy.targets.tensorrt.cuda import Cuda
    from deploy.targets.tensorrt.match import Match
    from deploy.targets.tensorrt.sdk import Sdk
    from deploy.tensors import Session

NO_BASELINES = "none"
_TIMING = "tensorrt.timing"
_MOST_VALUES = 64  # of an input that shapes may depend on: far more than one has dimensions


@dataclass(frozen=True, kw_only=True)
class TensorRT:
    """The TensorRT target.

    Attributes:
        version: TensorRT that is to read the cache, "X.Y.Z"; None takes that of the calibration
            cache (`--trt-version`), or of the TensorRT that builds here.
        precision: grid of what is quantized: "int8", or "fp8" (E4M3, GPUs from Ada and Hopper on).
        form: what the engine is built from: "cache", "qdq", or "auto".
        rest: type of what does not run in int8: "fp16", "bf16" or "fp32".
        workspace_mib: TensorRT's scratch memory; None leaves its own limit.
        max_batch: largest batch of an engine whose batch is dynamic.
        cuda_graph: run the engine from a captured CUDA graph.
        calibrator: "entropy2", "entropy", "minmax" or "legacy" lets TensorRT calibrate on the GPU
            with the same samples, in batches of `max_batch`; None gives it our cache.
        float_behind_concat: what reads a Concat of float tensors stays float.
        pair_behind_deconv: a ConvTranspose has a pair before its activation too.
        baselines: float engines that are built beside it where speed is measured: "fp32,fp16",
            one of them, or "none".
        device: GPU to build and run on, counted from 0.
        plugins: libraries of plugins, loaded before a model is read or an engine is opened.
        parser: "onnx" or "caffe": which of TensorRT's parsers names the tensors of the calibration
            cache; None judges from the model.
    """

    version: str | None = None
    precision: str = option(
        INT8,
        choices=(INT8, FP8),
        help="Grid of what is quantized; fp8 is for GPUs from Ada and Hopper on.",
        places=True,
    )
    form: str = option(
        "auto",
        flag="--engine-from",
        choices=("auto", "cache", "qdq"),
        help="What the engine is built from.",
    )
    rest: str = option(
        FP16, choices=(FP16, BF16, FP32), help="Type of what is not quantized, in the engine."
    )
    workspace_mib: int | None = option(
        None, flag="--workspace", metavar="MIB", least=1, help="Scratch memory of the builder."
    )
    max_batch: int = option(8, least=1, help="Largest batch of a dynamic engine.")
    cuda_graph: bool = option(False, help="Run the engine from a captured CUDA graph.", runs=True)
    calibrator: str | None = option(
        None,
        choices=("entropy2", "entropy", "minmax", "legacy"),
        help="Let TensorRT itself calibrate on the GPU, with the same images.",
    )
    float_behind_concat: bool = option(
        False,
        help="Leave in float what reads a Concat of float tensors: TensorRT would quantize each of"
        " them by itself.",
        places=True,
    )
    pair_behind_deconv: bool = option(
        False,
        help="Give a ConvTranspose a Q/DQ pair before its activation too, for a TensorRT that does"
        " not fuse the two in int8.",
        places=True,
    )
    baselines: str = option(
        f"{FP32},{FP16}",
        choices=(f"{FP32},{FP16}", FP32, FP16, NO_BASELINES),
        help="TensorRT's own float engines to build beside it and hold its speed against.",
    )
    device: int = option(
        0, least=0, metavar="N", help="GPU to build and run on, counted from 0.", runs=True
    )
    plugins: tuple[Path, ...] = option(
        (),
        flag="--plugin",
        metavar="LIBRARY",
        help="Library of TensorRT plugins to load.",
        runs=True,
    )
    parser: str | None = option(
        None,
        choices=("onnx", "caffe"),
        help="TensorRT's parser that names the tensors of its calibration cache; judged from the"
        " model by default.",
        observes=True,
    )
    name: str = "tensorrt"
    engines: ClassVar[tuple[str, ...]] = (".engine", ".plan")
    writes: ClassVar[tuple[str, ...]] = (
        ".tensorrt.onnx",
        ".tensorrt.cache",
        ".tensorrt.qdq.onnx",
        ".tensorrt.typed.onnx",
        ".tensorrt.part.onnx",
        "_trtexec.sh",
        ".engine",
        ".engine.json",
        ".fp32.engine",
        ".fp32.engine.json",
        ".tensorrt.fp32.onnx",
        ".tensorrt.fp16.onnx",
        ".fp16.engine",
        ".fp16.engine.json",
        ".gpu.cache",
        ".gpu.cache.json",
    )
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = ""
    alternatives: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check(self)
        if self.calibrator is not None and self.form == "qdq":
            raise ConfigError(
                f"an engine from the Q/DQ model has its scales in the model, got calibrator"
                f" {self.calibrator!r}; leave it away, or build from the cache"
            )
        if self.precision == FP8 and (self.calibrator is not None or self.form == "cache"):
            asked = "--engine-from cache" if self.form == "cache" else "--calibrator"
            raise ConfigError(
                f"TensorRT's calibrators and caches are for int8, got {asked} with --precision"
                " fp8; leave one of them away"
            )

        if self.form == "cache" and (self.float_behind_concat or self.pair_behind_deconv):
            raise ConfigError(
                "pairs are placed in the Q/DQ model, got engine form cache, where TensorRT itself"
                " decides; leave the placement's options away, or build from the Q/DQ model"
            )
        if self.precision == FP8 and self.pair_behind_deconv:
            raise ConfigError(
                "a ConvTranspose has no pair in fp8, got --pair-behind-deconv with --precision fp8;"
                " leave one of them away"
            )

    @property
    def placement(self) -> Placement:
        """Where the pairs stand."""
        from deploy.graph.plan import TENSORRT_ON

        parted = frozenset({"ConvTranspose"}) if self.pair_behind_deconv else frozenset()
        return replace(
            TENSORRT_ON[self.precision],
            float_behind_concat=self.float_behind_concat,
            parted=parted,
        )

    def wanted(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Every float tensor: TensorRT's cache lists them all."""
        from deploy.targets.tensorrt.naming import trt_tensors

        return tuple(trt_tensors(model))

    def decisions(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...] = ()
    ) -> tuple[Decision, ...]:
        """What the Q/DQ model would quantize; with a cache TensorRT itself decides."""
        from deploy.graph.plan import analyse

        return analyse(model, self.placement, float_nodes=float_nodes).decisions

    def demand(self, subject: Subject) -> tuple[Observation, ...]:
        """The method's statistic of every float tensor; TensorRT's own methods see the file."""
        from deploy.targets.tensorrt import as_parsed

        self._refuse_absent()
        as_parsed.refuse_names(subject.model)
        self._check_methods(subject.method)
        self._check_nodes(subject)
        return self._observed(subject)

    def _observed(self, subject: Subject) -> tuple[Observation, ...]:
        from deploy.targets.tensorrt import as_parsed

        own = as_parsed.observations(subject, self.parser)
        return subject.histograms(self.wanted(subject.model, ())) if own is None else own

    def _refuse_absent(self) -> None:
        """Refuse a library or a GPU that is not there, before anything is run."""
        from deploy.targets.tensorrt import plugins, sdk

        plugins.digests(self.plugins)
        if self.device:
            with suppress(SdkMissingError):  # then the engine is built elsewhere
                sdk.find(self.device)

    def cache_version(self) -> str | None:
        """This machine's TensorRT, where it builds engines and reads caches."""
        from deploy.targets.tensorrt.sdk import cache_reader

        return cache_reader()

    def cache_text(self, subject: Subject, ranges: Ranges) -> CacheText:
        """The cache that TensorRT itself would write for the file, as far as it was observed."""
        from deploy.targets.tensorrt import as_parsed

        found = ranges.of(self.demand(subject))
        return CacheText(
            as_parsed.text(subject, found, self.parser),
            as_parsed.notes(subject, found, self.parser),
        )

    def trial(self, request: BuildRequest) -> onnx.ModelProto:
        """The Q/DQ model."""
        from deploy.targets.tensorrt.to_qdq import to_qdq

        _, matched, _, _ = self._matched(request)
        return to_qdq(request.model, matched.plan, matched.scales)

    def _matched(
        self, request: BuildRequest
    ) -> tuple[trt_cache.CalibrationCache, Match, Found, str]:
        """(cache, what of it fits the model, the ranges, version of TensorRT)."""
        from deploy.targets.tensorrt import as_parsed
        from deploy.targets.tensorrt.match import match

        version = self.version or as_parsed.version_of(request.subject)
        choices, placement = request.choices, self.placement
        self._check_methods(*choices.methods.values(), *filter(None, [choices.method]))
        found = request.ranges_of(self, symmetric=placement.grid if self.precision == FP8 else None)
        cache = cache_of(request.model, found, version)
        matched = match(cache, request.model, float_nodes=request.float_nodes, placement=placement)
        return cache, matched, found, version

    def _check_methods(self, *methods: Method) -> None:
        """Refuse a search that has no meaning on the grid."""
        strange = [method.name for method in methods if method.integer]
        if self.precision == FP8 and strange:
            raise ConfigError(
                f"--precision fp8 takes a method that is defined for its grid, got {strange[0]},"
                " which is TensorRT's for int8; take mse, lp, minmax or percentile"
            )

    def _check_nodes(self, subject: Subject) -> None:
        """Refuse a model of which nothing would be in fp8, whose layers are small more often."""
        decisions = self.decisions(subject.model, subject.float_nodes)
        if self.precision == FP8 and not any(one.quantized for one in decisions):
            raise ModelError(
                f"at least one node of the model must be able to run in fp8, got none in"
                f" {subject.loaded.name}; `calib8 inspect --target tensorrt --precision fp8` says"
                " why, --precision int8 asks for less"
            )

    def build(self, request: BuildRequest) -> Built:
        """Write the files, and the engine where TensorRT and a GPU are at hand."""
        from deploy.calibration import trt_cache
        from deploy.targets.tensorrt.baselines import Baselines
        from deploy.targets.tensorrt.to_qdq import to_qdq
        from deploy.targets.tensorrt.trtexec import on_machine, script, ways
        from deploy.targets.tensorrt.versions import Needs

        cache, matched, found, version = self._matched(request)
        models = {FLOAT: request.model} if self.precision == INT8 else {}
        models[QDQ] = to_qdq(request.model, matched.plan, matched.scales)
        narrow, said = self._typed(request, matched, found)
        if narrow is not None:
            models[TYPED] = narrow
        judged = self._judged(models, version)
        part = models[judged] if request.kept else None
        whole = {role: request.whole(model) for role, model in models.items()}
        models, lowered = self._readable(whole, version)
        stem = request.folder / f"{request.name}.tensorrt"
        files = {}
        if self.precision == INT8:
            files[FLOAT] = _written(stem, ".onnx", _bytes(models[FLOAT]))
            files[CACHE] = _written(stem, ".cache", trt_cache.dump(cache))
        files[QDQ] = _written(stem, ".qdq.onnx", _bytes(models[QDQ]))
        if narrow is not None:
            files[TYPED] = _written(stem, ".typed.onnx", _bytes(models[TYPED]))
        if part is not None:  # all of it that ONNX Runtime runs
            files[PART] = _written(stem, ".part.onnx", _bytes(part))
        notes = (*_match_notes(matched), *said, *lowered)
        needs = {role: Needs.of(model) for role, model in models.items()}
        found_ways = on_machine(
            ways(request, files, needs, version, rest=self.rest, precision=self.precision),
            device=self.device,
            plugins=self.plugins,
        )
        path = request.folder / f"{request.name}_trtexec.sh"
        files["script of trtexec"] = write_script(path, script(found_ways))
        engine = None
        beside = Baselines()
        try:
            engine, said = self._engine(request, files, cache)
            files["TensorRT engine"] = engine
            beside = self._beside(request, files, found, version)
            notes += (*said, *beside.notes)
        except SdkMissingError as error:
            sentences = (way.sentence for way in found_ways)
            notes += (f"no engine was built: {error}", *sentences)
        return Built(
            target=self.name,
            engine=engine,
            runnable=files[judged if part is None else PART],
            baselines=beside.engines,
            files={**files, **beside.files},
            decisions=(*matched.plan.decisions, *request.kept),
            method=request.chosen.chosen_by,
            ranges=_held(request.model, found, version),
            notes=notes,
        )

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Load an engine on this machine's GPU."""
        from deploy.targets.tensorrt.session import TensorrtSession

        return TensorrtSession.open(
            engine, cuda_graph=self.cuda_graph, device=self.device, plugins=self.plugins
        )

    def _readable(
        self, models: Mapping[str, onnx.ModelProto], version: str
    ) -> tuple[dict[str, onnx.ModelProto], tuple[str, ...]]:
        """(role -> the model as its TensorRT reads it, sentences on what that took)."""
        from deploy.targets.tensorrt.readable import of_files, of_typed, readable

        oldest = of_files(version, self.cache_version())
        made, said = {}, []
        for role, model in models.items():
            fp8 = self.precision == FP8
            strong = role == TYPED or fp8
            wanted = of_typed(oldest, self.rest, fp8=fp8) if strong else oldest
            made[role], sentence = readable(model, wanted)
            said.append(sentence)
        return made, tuple(dict.fromkeys(filter(None, said)))

    def _judged(self, models: Mapping[str, onnx.ModelProto], version: str) -> str:
        """Role of the model whose accuracy is told: what the version runs, where a CPU can too."""
        from deploy.targets.tensorrt.versions import row

        strong = self.precision == FP8 or row(version).typed
        runs = self.rest == FP16 and TYPED in models and strong
        return TYPED if runs else QDQ  # ONNX Runtime has no bfloat16 convolutions

    def _typed(
        self, request: BuildRequest, matched: Match, found: Found
    ) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
        """(the Q/DQ model with its rest in the narrow type, notes); none where it cannot be."""
        from deploy.targets.tensorrt.to_qdq import to_typed

        if self.rest == FP32:
            return None, ()
        written = request.model, matched.plan, matched.scales
        try:
            model, kept = to_typed(*written, rest=self.rest, largest=_sizes(found))
            request.whole(model)  # must be of its opset
        except ExportError as error:
            return None, (f"no typed model was written: {error}",)
        said = (f"{name} stays in float32: {why}" for name, why in kept.items())
        return model, tuple(said)

    def _engine(
        self, request: BuildRequest, files: Mapping[str, Path], cache: trt_cache.CalibrationCache
    ) -> tuple[Path, tuple[str, ...]]:
        """(engine, notes): built here, or built before from the same files on the same GPU."""
        from deploy.calibration import trt_cache
        from deploy.targets.tensorrt import builder, sdk
        from deploy.targets.tensorrt.gpus import gpu
        from deploy.targets.tensorrt.trtexec import float_layers
        from deploy.targets.tensorrt.versions import row

        here = sdk.find(self.device)
        if self.precision == FP8 and not row(_plain(here.version)).fp8:
            raise SdkMissingError(
                f"an engine in fp8 needs TensorRT 10.2 or newer, got {here.version}; install one,"
                " or build with --precision int8"
            )
        implicit = self._implicit(here)
        if not implicit and (self.form == "cache" or self.calibrator):
            raise ConfigError(
                f"an engine from a cache needs a TensorRT with calibrators, got {here.version} and"
                f" form {self.form}; build from the Q/DQ model (form qdq)"
            )
        typed = self._by_type(here, files)
        source = files[FLOAT if implicit else TYPED if typed else QDQ]
        typed = typed or self.precision == FP8
        path = request.folder / f"{request.name}.engine"
        known = trt_cache.dump(trt_cache.relabel(cache, version=_plain(here.version)))
        from_data = self.calibrator is not None
        settings = replace(self._settings(request), typed=typed)
        if implicit:  # in the Q/DQ model they have no pair
            settings = replace(settings, float_layers=float_layers(request))
        key = builder.engine_key(
            here,
            settings,
            model_sha256=sha256(source.read_bytes()),
            cache_sha256=sha256(known) if implicit else None,
        ) | {"calibrator": self.calibrator}
        about = _origin_notes(here)
        if from_data:
            about = (*about, *self._left_out(request, settings))
        before = builder.cached_engine(request.built_before(path.name), key)
        if before is not None:
            again = "the engine was built before from the same files, on the same GPU"
            return builder.keep_engine(path, before, key), (again, *about)
        cuda, calibrator = gpu(self.device), None
        if from_data:
            known = self._calibrated(request, source, settings, here.version, cuda)
        if implicit:
            calibrator = self._from_cache(known)
        engine = builder.build_engine(source, settings, calibrator=calibrator, cuda=cuda)
        notes = (*about, *_log_notes(engine.log, request.model))
        return builder.keep_engine(path, engine.plan, key), notes

    def _implicit(self, here: Sdk) -> bool:
        """Whether the engine is built from the cache."""
        return here.calibrators and self.form != "qdq" and self.precision == INT8

    def _by_type(self, here: Sdk, files: Mapping[str, Path]) -> bool:
        """Whether the engine runs every layer in the type that the model gives it."""
        from deploy.targets.tensorrt.versions import row

        return not self._implicit(here) and TYPED in files and row(_plain(here.version)).typed

    def _beside(
        self, request: BuildRequest, files: Mapping[str, Path], found: Found, version: str
    ) -> Baselines:
        """Float engines to hold the engine against, where speed is measured."""
        from deploy.targets.tensorrt import baselines, sdk
        from deploy.targets.tensorrt.gpus import gpu

        if self.baselines == NO_BASELINES:
            return baselines.Baselines()
        if request.against is None:
            said = f"no {self.baselines} engine was built to compare with: no speed is measured"
            asked = self.baselines != TensorRT.baselines
            return baselines.Baselines(notes=(said,) if asked else ())
        here = sdk.find(self.device)
        own = {}
        if FLOAT not in files or request.against is not request.model:  # repairs spoil it
            stem = request.folder / f"{request.name}.tensorrt"
            models, _ = self._readable({PLAIN: request.whole(request.against)}, version)
            own[PLAIN] = _written(stem, f".{FP32}.onnx", _bytes(models[PLAIN]))
        made = baselines.build(
            self.baselines.split(","),
            request,
            here,
            gpu(self.device),
            self._settings(request),
            against=request.against,
            model=own[PLAIN] if own else files[FLOAT],
            by_type=self._by_type(here, files) or not here.calibrators,
            largest=_sizes(found),
        )
        return replace(made, files={**own, **made.files})

    def _calibrated(
        self, request: BuildRequest, source: Path, settings: Settings, version: str, cuda: Cuda
    ) -> bytes:
        """The cache that TensorRT makes on the GPU, or made before from the same data."""
        from deploy.targets.tensorrt import builder, gpu_cache

        name = f"{request.name}.gpu.cache"
        made_from = self._made_from(request, version)
        known = gpu_cache.fitting(request.built_before(name), made_from)
        if known is None:
            live = self._live(request, settings, cuda)
            known = builder.calibrate(source, settings, live, cuda=cuda)
        gpu_cache.keep(request.folder / name, known, made_from)
        return known

    def _made_from(self, request: BuildRequest, version: str) -> dict[str, Any]:
        """All that a calibration by TensorRT on the GPU depends on."""
        from deploy.targets.tensorrt.plugins import digests

        return {
            "model": request.digest,
            "images": dict(request.manifest),
            "calibrator": self.calibrator,
            "batch": self.max_batch,
            "tensorrt": version,
        } | ({"plugins": digests(self.plugins)} if self.plugins else {})

    def _from_cache(self, known: bytes) -> Callbacks:
        """A calibrator that has the cache and no data: should TensorRT refuse it, that is said."""
        from calibrators.tensorrt import HostMemory, calibrator

        name = self.calibrator or "entropy2"
        return calibrator(name, (), batches=1, shapes={}, memory=HostMemory(), known=known)

    def _live(self, request: BuildRequest, settings: Settings, cuda: Cuda) -> Callbacks:
        """A calibrator that feeds the request's samples to TensorRT on the GPU."""
        from calibrators.tensorrt import calibrator
        from deploy.calibration.batches import whole, whole_batches
        from deploy.targets.tensorrt.cuda import CudaMemory

        shapes = _calibrated_shapes(request, settings)
        together = _together(request, shapes)
        return calibrator(
            str(self.calibrator),
            whole_batches(request.feed.samples(), together),
            batches=whole(len(request.feed), together) // together,
            shapes=shapes,
            memory=CudaMemory(cuda),
        )

    def _left_out(self, request: BuildRequest, settings: Settings) -> tuple[str, ...]:
        """What TensorRT's calibration does not see of the samples."""
        from deploy.calibration.batches import left_out

        together = _together(request, _calibrated_shapes(request, settings))
        return left_out(len(request.feed), together)

    def _settings(self, request: BuildRequest) -> Settings:
        """Settings tuned for the fed batch, or for the largest where TensorRT calibrates in it."""
        from deploy.graph.index import dims, fed_inputs
        from deploy.targets.tensorrt.builder import Settings, profiles_for

        shapes = {i.name: dims(i) or () for i in fed_inputs(request.model.graph)}
        fed = {name: array.shape for name, array in _first_sample(request).items()}
        if self.calibrator is not None:
            fed = {
                n: s if isinstance(shapes[n][0], int) else (self.max_batch, *s[1:])
                for n, s in fed.items()
            }
        return Settings(
            fp16=self.rest == FP16,
            bf16=self.rest == BF16,
            workspace_mib=self.workspace_mib,
            profiles=profiles_for(shapes, fed, most_batch=self.max_batch),
            values=_values(_first_sample(request)),
            plugins=self.plugins,
            timing_cache=request.folder / _TIMING,
            known_timing=request.built_before(_TIMING),
        )


def cache_of(model: onnx.ModelProto, found: Found, version: str) -> trt_cache.CalibrationCache:
    """The ranges as TensorRT's cache of the cleaned model, its pools with the scale of their input.

    The header names EntropyCalibration2 whatever the search was: it is the only one that
    `trtexec --calib` reads, and scales mean the same under any.
    """
    from deploy.calibration import trt_cache

    scales = found.symmetric
    owners = _owners(model, version)
    entries = {name: scales[owner] for name, owner in owners.items() if owner in scales}
    return trt_cache.from_scales(entries, version=version, algorithm=trt_cache.ENTROPY2)


def _owners(model: onnx.ModelProto, version: str) -> dict[str, str]:
    """Entry of the cache that goes with the cleaned model -> the tensor whose scale it has."""
    from deploy.targets.tensorrt.naming import ONNX, cache_tensors, scale_owners

    return scale_owners(cache_tensors(model, version=version, parser=ONNX))


def _held(model: onnx.ModelProto, found: Found, version: str) -> dict[str, Scale]:
    """Entry of the cache -> its range."""
    owners = _owners(model, version)
    return {n: found.scales[owner] for n, owner in owners.items() if owner in found.scales}


def _sizes(found: Found) -> dict[str, float]:
    """Tensor -> largest |x| that was seen."""
    seen = {n: max(-one.observed_min, one.observed_max) for n, one in found.scales.items()}
    return seen | {n: math.inf for n, trouble in found.troubles.items() if trouble.infinite}


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
    from deploy.targets.tensorrt.log import missing_tensors, sort_missing

    judged = sort_missing(missing_tensors(log), model)
    harmful = [f"TensorRT has no scale for {m.tensor}: {m.reason}" for m in judged if m.harmful]
    harmless = len(judged) - len(harmful)
    if harmless:
        harmful.append(
            f"TensorRT warned of {harmless} more tensors without a scale; none of them costs int8"
        )
    return tuple(harmful)


def _match_notes(matched: Match) -> tuple[str, ...]:
    missing = [t for t in matched.tensors if not t.covered]
    return tuple(f"no Q/DQ pair on {t.tensor}: it {t.reason}" for t in missing)


def _plain(version: str) -> str:
    return ".".join(version.split(".")[:3])


def _calibrated_shapes(request: BuildRequest, settings: Settings) -> dict[str, tuple[int, ...]]:
    """Input -> the shape that TensorRT calibrates with."""
    shapes = {name: array.shape for name, array in _first_sample(request).items()}
    return shapes | {name: profile.best for name, profile in settings.profiles.items()}


def _together(request: BuildRequest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Samples in a batch of these shapes."""
    held = {name: array.shape for name, array in _first_sample(request).items() if array.ndim}
    return max(shapes[name][0] // int(shape[0]) for name, shape in held.items())


def _values(sample: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What shapes may depend on: a few whole numbers in one dimension, those of one sample."""
    few = {
        name: array
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= _MOST_VALUES
    }
    return {name: tuple(int(value) for value in array.reshape(-1)) for name, array in few.items()}


def _first_sample(request: BuildRequest) -> Mapping[str, Any]:
    (sample,) = request.feed.first(1)
    return sample


def _bytes(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def _written(stem: Path, suffix: str, data: bytes) -> Path:
    return atomic.write_bytes(stem.with_name(stem.name + suffix), data)
