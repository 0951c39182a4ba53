"""Is TensorRT here, which one, and what can it do: answered by features, never by version bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.errors import SdkMissingError
from deploy.targets.tensorrt.gpus import gpu
from deploy.targets.tensorrt.libraries import stand_ins

_INSTALL = "pip install 'tensorrt>=10,<11' cuda-python"


@dataclass(frozen=True, slots=True)
class Sdk:
    """The TensorRT that is installed, and its GPU.

    Attributes:
        version: "X.Y.Z" or "X.Y.Z.B".
        calibrators: whether it has int8 calibrators (8.x to 10.16).
        gpu: name and compute capability of the device.
        stand_ins: tactic sources that a build leaves out, their libraries being empty ones.
    """

    version: str
    calibrators: bool
    gpu: str
    stand_ins: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        """The version as X.Y.Z, without its build."""
        return ".".join(self.version.split(".")[:3])


def find(device: int = 0) -> Sdk:
    """The TensorRT of this machine, and its GPU of this number.

    Raises:
        SdkMissingError: TensorRT, the driver, the GPU or CUDA's binding is missing; says which.
        ConfigError: there are GPUs, but none of this number.
    """
    trt = load()
    return Sdk(
        version=str(trt.__version__),
        calibrators=hasattr(trt, "IInt8EntropyCalibrator2"),
        gpu=gpu(device).name,
        stand_ins=stand_ins(),
    )


def cache_reader() -> str | None:
    """The version, as X.Y.Z, of the TensorRT of this machine where it reads calibration caches."""
    try:
        here = find()
    except SdkMissingError:
        return None
    return here.release if here.calibrators else None


def load() -> Any:
    """The module `tensorrt`.

    Raises:
        SdkMissingError: it is not installed, or cannot be loaded.
    """
    try:
        import tensorrt as trt
    except (ImportError, OSError) as error:
        raise SdkMissingError(
            f"an engine is built by TensorRT, which is not on this machine ({error}); on a GPU"
            f" machine: {_INSTALL}"
        ) from error
    if not hasattr(trt, "Builder"):  # a folder of type stubs answers to the name too
        raise SdkMissingError(
            "an engine is built by TensorRT, and `tensorrt` is an empty package on this machine;"
            f" on a GPU machine: {_INSTALL}"
        )
    return trt
