"""TensorRT's own plugins, and libraries of others: loaded into the process, they register."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from deploy.errors import ConfigError
from deploy.files.reading import read_bytes
from deploy.stamped import sha256
from deploy.targets.tensorrt.log import process_logger


def load_plugins(libraries: Iterable[Path]) -> None:
    """Make TensorRT's plugins known, and those of each library, as trtexec loads them.

    Raises:
        ConfigError: a library that cannot be loaded.
    """
    import tensorrt as trt

    trt.init_libnvinfer_plugins(process_logger(), "")
    for path in libraries:
        try:
            ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ConfigError(
                f"a plugin library must load beside TensorRT {trt.__version__}, got {error}; build"
                " it for this version"
            ) from error


def digests(libraries: Iterable[Path]) -> dict[str, str]:
    """Name of each library -> sha256 of its bytes.

    Raises:
        ConfigError: one cannot be read.
    """
    what = "a plugin library"
    return {p.name: sha256(read_bytes(p, what=what, error=ConfigError)) for p in libraries}
