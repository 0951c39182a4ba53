"""Libraries of TensorRT plugins: loading them, and their digests for the engine's key."""

import ctypes
from collections.abc import Iterable
from pathlib import Path

from deploy.errors import ConfigError
from deploy.files.manifest import sha256
from deploy.files.reading import read_bytes
from deploy.targets.tensorrt.log import process_logger


def load_plugins(libraries: Iterable[Path]) -> None:
    """Register TensorRT's plugins and those of each library, as trtexec does.

    Raises:
        ConfigError: a library cannot be loaded.
    """
    import tensorrt as trt

    trt.init_libnvinfer_plugins(process_logger(), "")
    for path in libraries:
        try:
            ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ConfigError(
                f"a plugin library must load with TensorRT {trt.__version__}, got {error}; build"
                " it for this version"
            ) from error


def plugin_digests(libraries: Iterable[Path]) -> dict[str, str]:
    """Return file name -> sha256 of each plugin library.

    Raises:
        ConfigError: a library cannot be read.
    """
    digests = {}
    for path in libraries:
        content = read_bytes(path, what="a plugin library", error=ConfigError)
        digests[path.name] = sha256(content)
    return digests
