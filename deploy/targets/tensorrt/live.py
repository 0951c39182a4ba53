"""Calibrations by TensorRT itself, on the GPU, with the samples of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from calibrators.tensorrt import ALGORITHMS, Callbacks, HostMemory, calibrator
from deploy.calibration.batches import left_out, whole, whole_batches
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.reuse import fingerprint_of
from deploy.frontends.digest import model_digest
from deploy.frontends.reader import read_stamped
from deploy.targets.base import BuildRequest
from deploy.targets.tensorrt import builder, gpu_cache
from deploy.targets.tensorrt.builder import Settings
from deploy.targets.tensorrt.cuda import Cuda, CudaMemory
from deploy.targets.tensorrt.plugins import digests
from deploy.targets.tensorrt.settings import first_sample
from deploy.targets.tensorrt.trt_options import Asked
from deploy.version import __version__


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
    known = gpu_cache.fitting(request.built_before(name), origin)
    if known is not None:
        gpu_cache.keep(request.folder / name, known, origin)
        return known

    def keep(text: bytes) -> None:  # at once: a build that fails behind it has lost nothing
        gpu_cache.keep(request.folder / name, text, origin)

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
