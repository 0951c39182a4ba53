"""What an engine runs on, for a report's head: the GPU, NVIDIA's driver, CUDA and TensorRT."""

from __future__ import annotations

import subprocess
from functools import cache

from deploy.machine import Device
from deploy.targets.tensorrt.cuda import Cuda
from deploy.targets.tensorrt.sdk import Sdk

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 20


def device_of(here: Sdk, cuda: Cuda) -> Device:
    """The GPU, and what drives it."""
    return Device(
        name=here.gpu,
        runtime=f"TensorRT {here.version}",
        driver=driver_version(),
        cuda=cuda.newest,
    )


@cache
def driver_version() -> str:
    """Version of NVIDIA's driver, by its own tool; "" where that is missing, as on a Jetson."""
    try:
        said = subprocess.run(
            _DRIVER, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.stdout.split()), "")
