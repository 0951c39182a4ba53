"""The GPU of this machine, for a report's head: its name, driver, CUDA and TensorRT."""

from __future__ import annotations

import subprocess
from functools import cache

from deploy.machine import Device
from deploy.targets.tensorrt.sdk import Sdk

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 20


def device(here: Sdk) -> Device:
    """What TensorRT runs on here."""
    return Device(name=here.gpu, runtime=f"TensorRT {here.version}", driver=driver(), cuda=_cuda())


@cache
def driver() -> str:
    """Version of NVIDIA's driver, by its own tool; "" where that is missing, as on a Jetson."""
    try:
        said = subprocess.run(
            _DRIVER, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.stdout.split()), "")


def _cuda() -> str:
    """The newest CUDA that the driver has: 12040 is 12.4."""
    import pycuda.driver as cuda

    major, rest = divmod(cuda.get_driver_version(), 1000)
    return f"{major}.{rest // 10}"
