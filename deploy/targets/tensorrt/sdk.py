"""The TensorRT installation of this machine: its version, its GPU, its types and plugins."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.files.manifest import sha256
from deploy.files.reading import read_bytes
from deploy.files.usercode import refuse_foreign_code
from deploy.targets.tensorrt.cuda import open_gpu
from deploy.targets.tensorrt.log import process_logger

if TYPE_CHECKING:
    import tensorrt as trt

    from deploy.targets.shape_ranges import Shape

_INSTALL = "pip install 'tensorrt>=10,<11' cuda-python"


@dataclass(frozen=True, slots=True)
class Sdk:
    """The installed TensorRT and a GPU.

    Attributes:
        version: "X.Y.Z" or "X.Y.Z.B".
        calibrators: whether it has int8 calibrators (8.x to 10.16).
        gpu: name and compute capability of the GPU.
    """

    version: str
    calibrators: bool
    gpu: str

    @property
    def release(self) -> str:
        """The version as X.Y.Z, without its build."""
        return ".".join(self.version.split(".")[:3])


def find_sdk(device: int = 0) -> Sdk:
    """Return the installed TensorRT and the GPU with this index.

    Raises:
        SdkMissingError: TensorRT, the driver, the GPU or a CUDA binding is missing.
        ConfigError: no GPU has this index.
    """
    trt = import_tensorrt()
    return Sdk(
        version=str(trt.__version__),
        calibrators=hasattr(trt, "IInt8EntropyCalibrator2"),
        gpu=open_gpu(device).name,
    )


def cache_reading_version() -> str | None:
    """Return the version X.Y.Z of the installed TensorRT if it reads calibration caches."""
    try:
        installed = find_sdk()
    except SdkMissingError:
        return None
    return installed.release if installed.calibrators else None


def import_tensorrt() -> Any:
    """Import and return the module `tensorrt`.

    Raises:
        SdkMissingError: it is not installed, or an empty package.
    """
    try:
        import tensorrt as trt
    except (ImportError, OSError) as error:
        reason = str(error)
    else:
        if hasattr(trt, "Builder"):
            return trt
        reason = "`tensorrt` is an empty package"  # a folder of type stubs can be imported too
    raise SdkMissingError(
        f"an engine is built by TensorRT, which is not on this machine ({reason}); on a GPU"
        f" machine: {_INSTALL}"
    )


# name of a trt.DataType -> its name in numpy, or in `calibrators.tensorrt` where numpy has none
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}


def shape_of(shape: trt.Dims) -> Shape:
    """Return TensorRT's shape as a tuple, dynamic dimensions as -1."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def dtype_of(data_type: trt.DataType) -> str:
    """Return the name of a trt.DataType as in numpy, or "bfloat16" or "float8", which numpy lacks.

    `trt.nptype` is not used: that of 8.5 fails with newer numpy, and none supports bfloat16.

    Raises:
        BackendError: the type has elements of less than a byte.
    """
    name = str(data_type).rpartition(".")[2]  # "HALF" of "DataType.HALF"
    if name not in _DTYPES:
        raise BackendError(
            f"an input or output must be of a type of whole bytes, got {name}; cast it in the model"
        )
    return _DTYPES[name]


def load_plugins(libraries: Iterable[Path]) -> None:
    """Load the plugin libraries, and register TensorRT's own plugins, as trtexec does.

    Raises:
        ConfigError: a library cannot be loaded, or is named by a configuration file that another
            user can write.
    """
    import tensorrt as trt

    trt.init_libnvinfer_plugins(process_logger(trt), "")
    for path in libraries:
        refuse_foreign_code(path)
        try:
            ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ConfigError(
                f"a plugin library must load with TensorRT {trt.__version__}, got {error}; build"
                " it for this version"
            ) from error


def plugin_digests(libraries: Iterable[Path]) -> dict[str, str]:
    """Return file name -> sha256 of each plugin library, which trtexec and TensorRT then load.

    Raises:
        ConfigError: a library cannot be read, or is named by a configuration file that another user
            can write.
    """
    digests = {}
    for path in libraries:
        refuse_foreign_code(path)
        content = read_bytes(path, what="a plugin library", error=ConfigError)
        digests[path.name] = sha256(content)
    return digests
