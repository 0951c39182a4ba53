"""The stand-ins in their places, for as long as a user's code runs.

They are put there whether the real modules are installed or not: the same script gives the same
bytes on every machine, and a GPU that is at hand is left alone. Afterwards all is as it was, so
that an engine is built by the real TensorRT.

What stands in for `tensorrt`: the calibrators' base classes, the logger, types and sizes.

A calibrator that inherits from one of these says by it which search it wants. Source:
NVIDIA/TensorRT python/src/infer/pyInt8.cpp and python/packaging/bindings_wheel/__init__.py at 8.6.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from deploy.standins import cuda_modules
from deploy.standins.cuda_modules import libraries
from deploy.standins.memory import Memory, module

VERSION = "10.3.0"  # one that has calibrators


class CalibrationAlgoType(enum.IntEnum):
    """The searches, as TensorRT numbers them."""

    LEGACY_CALIBRATION = 0
    ENTROPY_CALIBRATION = 1
    ENTROPY_CALIBRATION_2 = 2
    MINMAX_CALIBRATION = 3


class DataType(enum.Enum):
    """Types of tensors, each of them numpy's."""

    FLOAT = "float32"
    HALF = "float16"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return np.dtype(self.value).itemsize


class Severity(enum.IntEnum):
    """How much a logger says."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """What loggers inherit from."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        pass


class Logger(ILogger):
    """A logger that says nothing."""

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        self.min_severity = min_severity

    def log(self, severity: Severity, msg: str) -> None:
        """Nothing."""


class IInt8Calibrator:
    """The base of all calibrators; what a script does not say reads as nothing known."""

    def __init__(self) -> None:
        pass

    def read_calibration_cache(self) -> Any:
        """No cache."""
        return None

    def write_calibration_cache(self, cache: Any) -> None:
        """Nothing is kept."""


class IInt8LegacyCalibrator(IInt8Calibrator):
    """Calibrates by a quantile."""

    def get_algorithm(self) -> CalibrationAlgoType:
        """Its search."""
        return CalibrationAlgoType.LEGACY_CALIBRATION


class IInt8EntropyCalibrator(IInt8Calibrator):
    """Calibrates by the first entropy search."""

    def get_algorithm(self) -> CalibrationAlgoType:
        """Its search."""
        return CalibrationAlgoType.ENTROPY_CALIBRATION


class IInt8EntropyCalibrator2(IInt8Calibrator):
    """Calibrates by the second entropy search."""

    def get_algorithm(self) -> CalibrationAlgoType:
        """Its search."""
        return CalibrationAlgoType.ENTROPY_CALIBRATION_2


class IInt8MinMaxCalibrator(IInt8Calibrator):
    """Calibrates by the largest |x|."""

    def get_algorithm(self) -> CalibrationAlgoType:
        """Its search."""
        return CalibrationAlgoType.MINMAX_CALIBRATION


def volume(shape: Any) -> int:
    """Values in a shape."""
    return prod(shape)


def nptype(kind: DataType) -> type:
    """The type of numpy."""
    return np.dtype(kind.value).type


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    """Nothing: no network is built."""
    return True


def tensorrt_modules() -> dict[str, ModuleType]:
    """The module `tensorrt`."""
    kinds = (
        CalibrationAlgoType, DataType, ILogger, Logger, IInt8Calibrator, IInt8LegacyCalibrator,
        IInt8EntropyCalibrator, IInt8EntropyCalibrator2, IInt8MinMaxCalibrator, volume, nptype,
        init_libnvinfer_plugins,
    )  # fmt: skip
    words = {"FLOAT": "float32", "HALF": "float16", "INT8": "int8", "INT32": "int32"}
    names: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    names |= {word: DataType[kind] for kind, word in words.items()} | {"bool": DataType.BOOL}
    return {"tensorrt": module("tensorrt", {**names, "__version__": VERSION})}


_NAMES = ("tensorrt", "pycuda", "cuda")


class StandIns:
    """The modules of one script, all on one memory."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._modules = {
            **tensorrt_modules(),
            **cuda_modules.pycuda_modules(self.memory),
            **cuda_modules.cudart_modules(self.memory),
        }
        self._library = libraries(self.memory)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put them in their places; not meant for several threads at once."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(self._modules))
            stack.enter_context(_libraries(self._library))
            if "torch" in sys.modules:
                from deploy.standins.torch_on_cpu import OnHost

                stack.enter_context(OnHost(self.memory))
            yield


@contextmanager
def _replaced(modules: dict[str, ModuleType]) -> Iterator[None]:
    """These in `sys.modules`, in place of all that has their names or stands below them."""
    own = {name: known for name, known in sys.modules.items() if name.split(".")[0] in _NAMES}
    for name in own:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in _NAMES]:
            del sys.modules[name]
        sys.modules.update(own)


@contextmanager
def _libraries(kind: type[ctypes.CDLL]) -> Iterator[None]:
    """This in the places of `ctypes.CDLL` and the loader that uses it."""
    own = ctypes.CDLL, ctypes.cdll
    ctypes.CDLL, ctypes.cdll = kind, ctypes.LibraryLoader(kind)  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL, ctypes.cdll = own  # type: ignore[misc]
