"""TensorRT's own float engines of the same model, which the int8 engine's speed is held against.

Where types are chosen by flags (8.x, and 10.x without strong typing) they are built from the float
model, as `trtexec` builds it with `--fp16` or without; else FP16 from a model that is typed as the
Q/DQ model is, without its pairs. Inputs, profiles and scratch memory are those of the int8 engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import BackendError, ExportError
from deploy.stamped import sha256
from deploy.targets.base import BuildRequest
from deploy.targets.tensorrt import builder
from deploy.targets.tensorrt.builder import Settings
from deploy.targets.tensorrt.cuda import Cuda
from deploy.targets.tensorrt.float_types import typed
from deploy.targets.tensorrt.sdk import Sdk
from deploy.targets.tensorrt.words import FLOAT_TYPED, FP16, FP32
from deploy.targets.tensorrt.written import written

if TYPE_CHECKING:
    import onnx

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
