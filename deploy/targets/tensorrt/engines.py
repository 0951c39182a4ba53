"""Engines where TensorRT and a GPU are at hand: the quantized one, and float ones beside it.

TensorRT's own float engines of the same model, which the int8 engine's speed is held against.

Where types are chosen by flags (8.x, and 10.x without strong typing) they are built from the float
model, as `trtexec` builds it with `--fp16` or without; else FP16 from a model that is typed as the
Q/DQ model is, without its pairs. Inputs, profiles and scratch memory are those of the int8 engine.

The cache that TensorRT wrote on this GPU, kept with what it was made from.

TensorRT itself checks nothing but the version and the calibrator in the first line; a retrained
model or other images go unnoticed. Here the fingerprint stands beside the cache, in the form that
`calib8-build` of C++ reads and writes too.

The builder's settings that follow from a target's options and the fed samples.

Calibrations by TensorRT itself, on the GPU, with the samples of a request.

The models of a build in the operator set that the TensorRT in question reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators.tensorrt import ALGORITHMS, Callbacks, HostMemory, calibrator
from deploy.calibration import store, trt_cache
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.observation import left_out, whole, whole_batches
from deploy.calibration.reuse import fingerprint_of
from deploy.calibration.trt_cache import version_label
from deploy.errors import BackendError, CacheError, ConfigError, ExportError, SdkMissingError
from deploy.files import atomic, staging
from deploy.files.manifest import sha256
from deploy.frontends.base import model_digest
from deploy.frontends.checks import opset_of
from deploy.frontends.reader import read_stamped
from deploy.graph.index import dims, fed_inputs
from deploy.graph.lowering import lowered
from deploy.targets.base import BuildRequest
from deploy.targets.spans import span_of
from deploy.targets.tensorrt import builder, sdk
from deploy.targets.tensorrt.builder import Settings, profiles_for
from deploy.targets.tensorrt.cuda import Cuda, CudaMemory
from deploy.targets.tensorrt.float_types import OPSETS, typed, written
from deploy.targets.tensorrt.naming import sizes
from deploy.targets.tensorrt.sdk import Sdk, digests, gpu, missing_tensors, sort_missing
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
    Asked,
)
from deploy.targets.tensorrt.trtexec import Needs, float_layers, row, unread
from deploy.version import __version__

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.ranges import Found


LABELS = {FP32: "TensorRT FP32", FP16: "TensorRT FP16"}  # in the order of a report's columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The engines by label, every file by its role, and why one could not be built."""

    engines: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def build(
    names: Iterable[str],
    request: BuildRequest,
    here: Sdk,
    cuda: Cuda,
    settings: Settings,
    *,
    against: onnx.ModelProto,
    model: Path,
    by_type: bool,
    largest: Mapping[str, float],
) -> Baselines:
    """Build what is asked, each once for the same model, settings, TensorRT and GPU.

    Args:
        names: of `LABELS`.
        request: of the build.
        here: TensorRT and GPU.
        cuda: the GPU, to build on.
        settings: of the int8 engine.
        against: the float model.
        model: its file.
        by_type: whether types are those of the model, and no flag chooses them.
        largest: tensor -> largest |x| that was seen, for what stays in float32.
    """
    engines: dict[str, Path] = {}
    files: dict[str, Path] = {}
    notes: list[str] = []
    plain = replace(settings, int8=False, fp16=False, bf16=False, typed=False, float_layers={})
    for name in (one for one in LABELS if one in set(names)):
        try:
            source, own = model, replace(plain, fp16=name == FP16)
            if by_type and name == FP16:
                source, own = _typed(request, against, largest), replace(plain, typed=True)
                files[FLOAT_TYPED] = source
            engines[LABELS[name]] = _engine(request, here, cuda, own, source, name)
            files[f"{LABELS[name]} engine, to compare with"] = engines[LABELS[name]]
        except (BackendError, ExportError) as error:
            notes.append(f"nothing is held against {LABELS[name]}, which was not built: {error}")
    return Baselines(engines=engines, files=files, notes=tuple(notes))


def _typed(request: BuildRequest, against: onnx.ModelProto, largest: Mapping[str, float]) -> Path:
    """The float model in float16, but for what is too large for it."""
    narrow, _ = typed(against, FP16, largest)
    stem = request.folder / f"{request.name}.tensorrt"
    return written(stem, f".{FP16}.onnx", request.whole(narrow))


def _engine(
    request: BuildRequest, here: Sdk, cuda: Cuda, settings: Settings, source: Path, name: str
) -> Path:
    path = request.folder / f"{request.name}.{name}.engine"
    key = builder.engine_key(
        here, settings, model_sha256=sha256(source.read_bytes()), cache_sha256=None
    )
    plan = builder.cached_engine(request.built_before(path.name), key)
    if plan is None:
        plan = builder.build_engine(source, _timing(settings), cuda=cuda).plan
    return builder.keep_engine(path, plan, key)


def _timing(settings: Settings) -> Settings:
    """With the tactic timings of an engine that this build made before."""
    fresh = settings.timing_cache
    known = fresh if fresh is not None and fresh.exists() else settings.known_timing
    return replace(settings, known_timing=known)


def fitting(path: Path, fingerprint: Fingerprint) -> bytes | None:
    """The cache's bytes where it was made from exactly this, and nothing was changed since.

    Where it is not there, that of a build which failed behind its calibration.
    """
    found = (_known(place, fingerprint) for place in (path, staging.kept(path)))
    return next((text for text in found if text is not None), None)


def _known(path: Path, fingerprint: Fingerprint) -> bytes | None:
    try:
        text, known = store.text_of(path)
    except CacheError:
        return None
    return text if known == fingerprint else None


def store_gpu_cache(path: Path, data: bytes, fingerprint: Fingerprint) -> Path:
    """Write the cache, then its fingerprint.

    Raises:
        ExportError: the folder is not writable.
    """
    atomic.write_bytes(path, data)
    atomic.write_bytes(store.sidecars(path)[0], store.without_statistics(data, fingerprint))
    return path


_TIMING = "tensorrt.timing"
_MOST_VALUES = 64  # of an input that shapes may depend on: far more than one has dimensions


def settings_of(asked: Asked, request: BuildRequest) -> Settings:
    """Settings tuned for the fed batch, or for the largest where TensorRT calibrates in it.

    An engine takes every size that samples had; it is tuned for the usual one, or for that which
    TensorRT calibrates with.
    """
    shapes = {i.name: dims(i) or () for i in fed_inputs(request.model.graph)}
    span = span_of(request)
    fed = span.usual
    if asked.calibrator is not None:
        fed = {name: array.shape for name, array in first_sample(request).items()}
        fed = {
            n: s if isinstance(shapes[n][0], int) else (asked.max_batch, *s[1:])
            for n, s in fed.items()
        }
    return Settings(
        fp16=asked.rest == FP16,
        bf16=asked.rest == BF16,
        workspace_mib=asked.workspace_mib,
        profiles=profiles_for(shapes, fed, most_batch=asked.max_batch, span=span),
        values=_values(first_sample(request)),
        plugins=asked.plugins,
        timing_cache=request.folder / _TIMING,
        known_timing=request.built_before(_TIMING),
    )


def _values(sample: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What shapes may depend on: a few whole numbers in one dimension, those of one sample."""
    few = {
        name: array
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= _MOST_VALUES
    }
    return {name: tuple(int(value) for value in array.reshape(-1)) for name, array in few.items()}


def first_sample(request: BuildRequest) -> Mapping[str, Any]:
    """The inputs of the first sample, by name."""
    (sample,) = request.feed.first(1)
    return sample


def calibrated(
    asked: Asked,
    request: BuildRequest,
    source: Path,
    settings: Settings,
    version: str,
    cuda: Cuda,
) -> bytes:
    """The cache that TensorRT makes on the GPU, or made before from the same data."""
    name = f"{request.name}.gpu.cache"
    together = _together(request, _calibrated_shapes(request, settings))
    origin = _made_from(asked, request, source, version, together)
    known = fitting(request.built_before(name), origin)
    if known is not None:
        store_gpu_cache(request.folder / name, known, origin)
        return known

    def keep(text: bytes) -> None:  # at once: a build that fails behind it has lost nothing
        store_gpu_cache(request.folder / name, text, origin)

    return builder.calibrate(
        source, settings, _live(asked, request, settings, cuda, keep), cuda=cuda
    )


def _made_from(
    asked: Asked, request: BuildRequest, source: Path, version: str, together: int
) -> Fingerprint:
    """All that a calibration by TensorRT on the GPU depends on.

    The model is the one that is handed to TensorRT, so that on a device both files are enough.
    """
    model, stamp = read_stamped(source)
    weights = {"weights": stamp.weights} if stamp.weights else {}
    return replace(
        fingerprint_of(request.subject, request.manifest),
        model={"graph": model_digest(model), "file": stamp.file, **weights},
        program=TENSORRT,
        rule=f"whole batches of {together}",
        method=ALGORITHMS[str(asked.calibrator)],
        numbers={},
        versions={"tensorrt": version, "calib8": __version__}
        | ({"plugins": digests(asked.plugins)} if asked.plugins else {}),
    )


def from_cache(asked: Asked, known: bytes) -> Callbacks:
    """A calibrator that has the cache and no data: should TensorRT refuse it, that is said."""
    name = asked.calibrator or "entropy2"
    return calibrator(name, (), batches=1, shapes={}, memory=HostMemory(), known=known)


def _live(
    asked: Asked,
    request: BuildRequest,
    settings: Settings,
    cuda: Cuda,
    keep: Callable[[bytes], None],
) -> Callbacks:
    """A calibrator that feeds the request's samples to TensorRT on the GPU."""
    shapes = _calibrated_shapes(request, settings)
    together = _together(request, shapes)
    seen = whole(len(request.feed), together, filled=request.subject.filled)
    return calibrator(
        str(asked.calibrator),
        whole_batches(request.feed.samples(), together),
        batches=seen // together,
        shapes=shapes,
        memory=CudaMemory(cuda),
        keep=keep,
    )


def unseen(request: BuildRequest, settings: Settings) -> tuple[str, ...]:
    """What TensorRT's calibration does not see of the samples."""
    together = _together(request, _calibrated_shapes(request, settings))
    return left_out(len(request.feed), together, filled=request.subject.filled)


def _calibrated_shapes(request: BuildRequest, settings: Settings) -> dict[str, tuple[int, ...]]:
    """Input -> the shape that TensorRT calibrates with."""
    shapes = {name: array.shape for name, array in first_sample(request).items()}
    return shapes | {name: profile.best for name, profile in settings.profiles.items()}


def _together(request: BuildRequest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Samples in a batch of these shapes."""
    held = {name: array.shape for name, array in first_sample(request).items() if array.ndim}
    return max(shapes[name][0] // int(shape[0]) for name, shape in held.items())


def readable(model: onnx.ModelProto, version: str) -> tuple[onnx.ModelProto, str]:
    """The model as TensorRT X.Y.Z reads it, and a sentence on what that took; "" for nothing.

    One that cannot be brought there is given as it is, and the sentence says why.
    """
    opset = opset_of(model)
    try:
        got = lowered(model, opset=row(version).opset, without=unread(version))
    except ExportError as error:
        return model, f"TensorRT {version} does not read a model of opset {opset}: {error}"
    if got.model is model:
        return model, ""
    forms = ", ".join(f"{count} {name}" for name, count in got.rewritten.items())
    if opset_of(got.model) == opset:
        return got.model, f"for TensorRT {version} {forms} is written in operators that it reads"
    return got.model, (
        f"for TensorRT {version} the model is written in opset {opset_of(got.model)}, got {opset}"
        f"{f': {forms} in another form' if forms else ''}"
    )


def of_files(asked: str, here: str | None) -> str:
    """The older of the TensorRT that is asked for and the one that builds here."""
    return asked if here is None else min(asked, here, key=version_label)


def of_typed(version: str, rest: str, *, fp8: bool = False) -> str:
    """The first TensorRT from this one on that has networks of this type."""
    first = Needs(OPSETS.get(rest, 0)).first_reading(typed=True, fp8=fp8)
    return version if first is None else max(version, first, key=version_label)


def all_readable(
    asked: Asked, models: Mapping[str, onnx.ModelProto], version: str
) -> tuple[dict[str, onnx.ModelProto], tuple[str, ...]]:
    """(role -> the model as its TensorRT reads it, sentences on what that took)."""
    oldest = of_files(version, sdk.cache_reader())
    made, said = {}, []
    for role, model in models.items():
        fp8 = asked.precision == FP8
        strong = role == TYPED or fp8
        wanted = of_typed(oldest, asked.rest, fp8=fp8) if strong else oldest
        made[role], sentence = readable(model, wanted)
        said.append(sentence)
    return made, tuple(dict.fromkeys(filter(None, said)))


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
    made = build(
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
