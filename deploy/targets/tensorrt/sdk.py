"""The TensorRT and CUDA installation of this machine: versions, GPUs, log, plugins.

- `gpu`: cuda-python is tried first, since it has wheels. Like pycuda it uses the device's primary
  context, as TensorRT and torch do.
- `stand_ins`: TensorRT 8 also has tactics (kernels) from cuBLAS, cuBLASLt and cuDNN, 2 GB of
  libraries that `scripts/trt_env.sh` replaces by empty stand-ins. A call into one of those ends the
  process, so a build disables their tactics.
- `sort_missing`: an int8 build warns of every tensor without a scale. Most do not need one
  (constants, shapes, indices); the ones that matter are on layers that should run in int8.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from deploy.errors import BackendError, ConfigError, SdkMissingError, first_line
from deploy.files.manifest import sha256
from deploy.files.reading import read_bytes
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse
from deploy.targets.tensorrt.cuda import BINDINGS, Cuda

if TYPE_CHECKING:
    import tensorrt as trt


MARK = "calib8_stand_in"  # symbol that only the stand-ins export
_LIBRARIES = {
    "CUBLAS": "libcublas.so.11",
    "CUBLAS_LT": "libcublasLt.so.11",
    "CUDNN": "libcudnn.so.8",
}


def stand_ins() -> tuple[str, ...]:
    """Return the `trt.TacticSource` names whose library loaded in this process is a stand-in."""
    return tuple(source for source, name in _LIBRARIES.items() if _is_stand_in(name))


def _is_stand_in(name: str) -> bool:
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows has no stand-ins
        return False
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return hasattr(library, MARK)


def gpu(number: int = 0) -> Cuda:
    """Return the GPU with this index, through the first binding that works."""
    failed = []
    for name, (count_gpus, open_gpu) in BINDINGS.items():
        try:
            count = count_gpus()
            if count == 0:
                raise SdkMissingError("no GPU")
        except (ImportError, OSError, SdkMissingError) as error:
            failed.append(f"{name}: {first_line(error)}")
            continue
        if number >= count:
            raise ConfigError(
                f"a device is one of the {count} GPUs of this machine, counted from 0, got {number}"
            )
        return open_gpu(number)
    raise SdkMissingError(
        f"an engine is built and run on an NVIDIA GPU by way of cuda-python or pycuda, and neither"
        f" works here ({'; '.join(failed)}); on a machine with a GPU and its driver: pip install"
        " cuda-python, or pycuda"
    )


_INSTALL = "pip install 'tensorrt>=10,<11' cuda-python"


@dataclass(frozen=True, slots=True)
class Sdk:
    """The installed TensorRT and a GPU."""

    version: str  # "X.Y.Z" or "X.Y.Z.B"
    calibrators: bool  # whether it has int8 calibrators (8.x to 10.16)
    gpu: str
    # tactic sources to disable because their libraries are empty stand-ins
    stand_ins: tuple[str, ...] = ()

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
        gpu=gpu(device).name,
        stand_ins=stand_ins(),
    )


def cache_reader() -> str | None:
    """Return the version X.Y.Z of the installed TensorRT if it reads calibration caches."""
    try:
        here = find_sdk()
    except SdkMissingError:
        return None
    return here.release if here.calibrators else None


def import_tensorrt() -> Any:
    """Import and return the module `tensorrt`."""
    try:
        import tensorrt as trt
    except (ImportError, OSError) as error:
        raise SdkMissingError(
            f"an engine is built by TensorRT, which is not on this machine ({error}); on a GPU"
            f" machine: {_INSTALL}"
        ) from error
    if not hasattr(trt, "Builder"):  # a folder of type stubs can be imported too
        raise SdkMissingError(
            "an engine is built by TensorRT, and `tensorrt` is an empty package on this machine;"
            f" on a GPU machine: {_INSTALL}"
        )
    return trt


# trt.DataType -> numpy's name, or that of `device_types`; other names are numpy's in upper case.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8"}
_NUMPY_DTYPES = {"INT8", "INT32", "INT64", "UINT8", "BOOL"}


def shape_of(shape: trt.Dims) -> tuple[int, ...]:
    """Return TensorRT's shape as a tuple, dynamic dimensions as -1."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def dtype_of(data_type: trt.DataType) -> str:
    """Return the dtype name of a trt.DataType.

    `trt.nptype` is not used: that of 8.5 fails with newer numpy, and none supports bfloat16.
    """
    name = str(data_type).rpartition(".")[2]
    if name in _DTYPES:
        return _DTYPES[name]
    if name not in _NUMPY_DTYPES:
        raise BackendError(
            f"an input or output must be of a type of whole bytes, got {name}; cast it in the model"
        )
    return name.lower()


_MISSING = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")
_LAST = 3  # warnings that an error message quotes if TensorRT logged no error
_PARSER_NAMES = ("(Unnamed Layer* ", "(Unnamed ITensor* ", "ONNXTRT_")


@dataclass(frozen=True, slots=True)
class MissingScale:
    """A tensor that TensorRT found without a scale; `harmful` if a layer loses int8 by it."""

    tensor: str
    harmful: bool
    reason: str


def missing_tensors(lines: Iterable[str]) -> list[str]:
    """List the tensors of "Missing scale and zero-point for tensor ..." lines, each once."""
    names = (match[1] for line in lines if (match := _MISSING.search(line)))
    return list(dict.fromkeys(names))


def sort_missing(names: Iterable[str], model: onnx.ModelProto) -> list[MissingScale]:
    """Classify tensors without a scale by their place in the model, harmful ones first.

    `names`: from `missing_tensors`. `model`: cleaned float model that was built.
    """
    graph = Graph(model)
    plan = analyse(model, TENSORRT)
    read = {pair.tensor for pair in plan.pairs}
    int8 = set(plan.int8_nodes)
    made = {out: n for n in graph.nodes for out in n.output if n.name in int8}
    missing = [_classify(name, graph, read, made) for name in names]
    return sorted(missing, key=lambda item: not item.harmful)


def _classify(
    name: str, graph: Graph, read: Collection[str], made: dict[str, onnx.NodeProto]
) -> MissingScale:
    """Classify one tensor; `read` and `made` are the inputs and outputs of int8 nodes."""
    constant = name.removesuffix("_output")
    if name in graph.initializers or constant in graph.initializers or "[Constant]" in name:
        return MissingScale(name, False, "a constant: TensorRT reads its range from its values")
    if name in read:
        return MissingScale(name, True, "an int8 layer reads it: that layer falls back to float")
    if name in made and name in graph.outputs:
        return MissingScale(name, False, "an output of the model, which stays float")
    if name in made and graph.tail(made[name]) == name:
        return MissingScale(name, True, f"{made[name].op_type} {made[name].name} cannot write int8")
    if name in made:
        return MissingScale(name, False, "inside a fused layer, where no int8 value exists")
    if name in graph.dtypes and not graph.is_float(name):
        return MissingScale(name, False, "a shape or an index, which is no float at all")
    if name.startswith(_PARSER_NAMES) or not (name in graph.producer or name in graph.inputs):
        return MissingScale(name, False, "made by TensorRT's parser inside a node")
    return MissingScale(name, False, "no layer that gains from int8 reads or writes it")


class LogRecorder:
    """Records TensorRT's messages up to a severity, and all errors and warnings separately."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def keep(self, severity: int, error: int, message: str) -> None:
        """Record a message; a larger severity number is less severe."""
        if severity <= error:
            self.errors.append(message)
        elif severity == error + 1:
            self.warnings.append(message)
        if severity <= self.least:
            self.lines.append(message)

    def words(self) -> str:
        """Return TensorRT's errors, or else its last messages, for an error message."""
        chosen = self.errors or self.warnings[-_LAST:] or self.lines[-1:]
        return " | ".join(chosen) or "its log says nothing"


_listeners: list[LogRecorder] = []


@cache
def process_logger() -> trt.ILogger:
    """Return the one logger of this process; it prints nothing and passes on to `record_log`.

    TensorRT keeps the first logger as long as any of its objects lives, and its plugins keep a raw
    pointer to the last. With one logger per build, messages would go to an earlier logger or to a
    deleted one.
    """
    import tensorrt as trt

    error = int(trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            for listener in tuple(_listeners):
                listener.keep(int(severity), error, msg)

    return Logger()


@contextmanager
def record_log() -> Iterator[LogRecorder]:
    """Record TensorRT's messages from all threads and objects inside the `with` block."""
    import tensorrt as trt

    log = LogRecorder(int(trt.ILogger.Severity.INFO))
    _listeners.append(log)
    try:
        yield log
    finally:
        _listeners.remove(log)


def load_plugins(libraries: Iterable[Path]) -> None:
    """Register TensorRT's plugins and those of each library, as trtexec does."""
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
    what = "a plugin library"
    return {p.name: sha256(read_bytes(p, what=what, error=ConfigError)) for p in libraries}


def start(kind: str, log: LogRecorder, what: str) -> Any:
    """Create TensorRT's Builder or Runtime; `what` fails on a machine whose driver does not fit."""
    import tensorrt as trt

    try:
        return getattr(trt, kind)(process_logger())
    except (TypeError, RuntimeError) as error:  # null object: the driver does not fit
        cause = log.words() if log.lines else error
        raise BackendError(f"TensorRT could not {what} on this machine: {cause}") from error
