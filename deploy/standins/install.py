"""Stand-ins for `tensorrt` (calibrator base classes, logger, types), and the swap of all of them.

`StandIns.installed` replaces the modules while a user's code runs, whether the real ones are
installed or not: the same script gives the same bytes on every machine, and no GPU is used.
Afterwards the real modules are restored, and the engine is built by the real TensorRT.

A calibrator's base class determines the calibration algorithm. Source: NVIDIA/TensorRT
python/src/infer/pyInt8.cpp and python/packaging/bindings_wheel/__init__.py at 8.6.
"""

import ctypes
import enum
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from deploy.standins import cuda_modules
from deploy.standins.cuda_modules import make_cdll
from deploy.standins.memory import Memory, make_module

VERSION = "10.3.0"  # a version that has calibrators


class CalibrationAlgoType(enum.IntEnum):
    """Calibration algorithms, as TensorRT numbers them."""

    LEGACY_CALIBRATION = 0
    ENTROPY_CALIBRATION = 1
    ENTROPY_CALIBRATION_2 = 2
    MINMAX_CALIBRATION = 3


class DataType(enum.Enum):
    """Tensor types, with numpy's names."""

    FLOAT = "float32"
    HALF = "float16"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return np.dtype(self.value).itemsize


class Severity(enum.IntEnum):
    """Severity of a log message."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """Base class of loggers."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity


class Logger(ILogger):
    """A logger that discards all messages."""

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        self.min_severity = min_severity

    def log(self, severity: Severity, msg: str) -> None:
        """Do nothing."""


class IInt8Calibrator:
    """Base class of all calibrators, without a cache."""

    def read_calibration_cache(self) -> Any:
        """Return None: there is no cache."""
        return None

    def write_calibration_cache(self, cache: Any) -> None:
        """Do nothing."""


def _calibrator_class(name: str, algorithm: CalibrationAlgoType) -> type[IInt8Calibrator]:
    """Return a calibrator's base class of this name, which determines its algorithm."""
    return type(name, (IInt8Calibrator,), {"get_algorithm": lambda self: algorithm})


def nptype(kind: DataType) -> type:
    """Return the numpy type."""
    return np.dtype(kind.value).type


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    """Do nothing: no network is built."""
    return True


def tensorrt_modules() -> dict[str, ModuleType]:
    """Return name -> module, of a stand-in for `tensorrt` with what calibrator scripts use."""
    definitions = (
        CalibrationAlgoType, DataType, ILogger, Logger, IInt8Calibrator,
        _calibrator_class("IInt8LegacyCalibrator", CalibrationAlgoType.LEGACY_CALIBRATION),
        _calibrator_class("IInt8EntropyCalibrator", CalibrationAlgoType.ENTROPY_CALIBRATION),
        _calibrator_class("IInt8EntropyCalibrator2", CalibrationAlgoType.ENTROPY_CALIBRATION_2),
        _calibrator_class("IInt8MinMaxCalibrator", CalibrationAlgoType.MINMAX_CALIBRATION),
        nptype, init_libnvinfer_plugins,
    )  # fmt: skip
    names: dict[str, Any] = {definition.__name__: definition for definition in definitions}
    names["volume"] = prod  # number of values of a shape
    for dtype in (DataType.FLOAT, DataType.HALF, DataType.INT8, DataType.INT32, DataType.BOOL):
        names[dtype.value] = dtype
    module = make_module("tensorrt", {**names, "__version__": VERSION})
    vars(module)["tensorrt"] = module  # the extension module inside the package, with all names
    return {"tensorrt": module}


_REPLACED_PACKAGES = ("tensorrt", "pycuda", "cuda")


class StandIns:
    """The stand-in modules, all on one memory."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.lock = threading.RLock()  # one script at a time replaces the modules, or is read
        self._modules = {
            **tensorrt_modules(),
            **cuda_modules.pycuda_modules(self.memory),
            **cuda_modules.cudart_modules(self.memory),
        }
        self._library = make_cdll(self.memory)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the real modules, which other threads see too, while the context is active."""
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            self.memory.fault = None  # that of another script
            stack.enter_context(_replace_modules(self._modules))
            # `ctypes.cdll` keeps the class that it loads libraries with, so it is replaced too
            names = {"CDLL": self._library, "cdll": ctypes.LibraryLoader(self._library)}
            stack.enter_context(_replace_attributes(ctypes, **names))
            if "torch" in sys.modules:
                self._enter_torch(stack)
            else:
                stack.enter_context(_import_hook("torch", partial(self._enter_torch, stack)))
            yield

    def _enter_torch(self, stack: ExitStack) -> None:
        """Put PyTorch on the CPU until the stack ends."""
        from deploy.standins.torch_on_cpu import CudaOnCpu

        stack.enter_context(CudaOnCpu(self.memory))
        no_operations = dict.fromkeys(
            ("init", "set_device", "synchronize"), lambda *arguments: None
        )
        stack.enter_context(_replace_attributes(sys.modules["torch.cuda"], **no_operations))


@cache
def shared_stand_ins() -> StandIns:
    """Return the stand-ins of all scripts: modules that a script imported keep those they saw."""
    return StandIns()


@contextmanager
def _import_hook(name: str, on_import: Callable[[], None]) -> Iterator[None]:
    """Call a function as soon as a module has been imported, while the context is active.

    Args:
        name: name of the module, which is not imported yet.
        on_import: the function; it is called once the module's code has run.
    """

    class Finder(MetaPathFinder):
        """Finds the module as usual, and makes its loader call `on_import` in the end."""

        def find_spec(self, fullname: str, *arguments: Any) -> ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)  # only the usual finders are asked in the next line
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                exec_module = spec.loader.exec_module

                def exec_and_call(module: ModuleType) -> None:
                    exec_module(module)
                    on_import()

                spec.loader.exec_module = exec_and_call  # type: ignore[method-assign]
            return spec

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):  # it is not there any more if the module was imported
            sys.meta_path.remove(finder)


@contextmanager
def _replace_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Replace the imported modules of TensorRT, pycuda and CUDA while the context is active.

    `modules`: dotted name -> stand-in. A module of these packages without one is absent.
    """
    originals = _pop_replaced_modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        _pop_replaced_modules()
        sys.modules.update(originals)


def _pop_replaced_modules() -> dict[str, ModuleType]:
    """Remove all modules of `_REPLACED_PACKAGES` from `sys.modules`; return them by their names."""
    names = [name for name in sys.modules if name.split(".")[0] in _REPLACED_PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def _replace_attributes(module: ModuleType, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a module."""
    originals = {name: vars(module)[name] for name in replacements}
    vars(module).update(replacements)
    try:
        yield
    finally:
        vars(module).update(originals)
