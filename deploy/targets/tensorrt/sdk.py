"""Is TensorRT here, which one, and what can it do: answered by features, never by version bits.

Which of the CUDA libraries that TensorRT 8 computes with are empty stand-ins.

TensorRT 8 takes tactics (kernels to choose from) out of cuBLAS, cuBLASLt and cuDNN too, 2 GB of
libraries that `scripts/trt_env.sh` puts empty ones in the place of. A call into one of those ends
the process, so a build leaves their tactics out. With the real libraries TensorRT's own choice
stands.

The GPUs of this machine, by the binding of CUDA that is installed and works.

cuda-python comes as wheels and is tried first; pycuda is built on the machine, and serves where it
is there already. Both work in the device's primary context, which TensorRT and torch use too.

TensorRT's shapes and types in plain words.

TensorRT's log: kept whole, and its "missing scale" warnings sorted by what they mean.

In an int8 build TensorRT warns of every tensor without a scale, most of which never had a use for
one (constants, shapes, indices). The few that matter sit on the layers that were to run in int8.

TensorRT's own plugins, and libraries of others: loaded into the process, they register.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import BackendError, ConfigError, SdkMissingError, first_line
from deploy.files.manifest import sha256
from deploy.files.reading import read_bytes
from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse
from deploy.targets.tensorrt.cuda import Cuda

if TYPE_CHECKING:
    import onnx
    import tensorrt as trt


MARK = "calib8_stand_in"  # exported by the stand-ins alone
_LIBRARIES = {
    "CUBLAS": "libcublas.so.11",
    "CUBLAS_LT": "libcublasLt.so.11",
    "CUDNN": "libcudnn.so.8",
}


def stand_ins() -> tuple[str, ...]:
    """Names in `trt.TacticSource` whose library, as this process has loaded it, is a stand-in."""
    return tuple(source for source, name in _LIBRARIES.items() if _is_stand_in(name))


def _is_stand_in(name: str) -> bool:
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows, for which no stand-ins are made
        return False
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return hasattr(library, MARK)


def gpu(number: int = 0) -> Cuda:
    """The GPU of this number, by the first binding that is there and works.

    Raises:
        SdkMissingError: neither binding can be loaded, or there is no GPU; says which and why.
        ConfigError: there is a GPU, but none of this number.
    """
    failed = []
    for name, names in (("cuda-python", _cuda_python), ("pycuda", _pycuda)):
        try:
            count, open_one = names()
        except (ImportError, OSError, SdkMissingError) as error:
            failed.append(f"{name}: {first_line(error)}")
            continue
        if number >= count:
            raise ConfigError(
                f"a device is one of the {count} GPUs of this machine, counted from 0, got {number}"
            )
        return open_one(number)
    raise SdkMissingError(
        f"an engine is built and run on an NVIDIA GPU by way of cuda-python or pycuda, and neither"
        f" works here ({'; '.join(failed)}); on a machine with a GPU and its driver: pip install"
        " cuda-python, or pycuda"
    )


def _cuda_python() -> tuple[int, Callable[[int], Cuda]]:
    from deploy.targets.tensorrt import with_cuda_python

    return with_cuda_python.count(), with_cuda_python.CudaPython


def _pycuda() -> tuple[int, Callable[[int], Cuda]]:
    from deploy.targets.tensorrt import with_pycuda

    return with_pycuda.count(), with_pycuda.Pycuda


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


# Where the name in lower case is not numpy's; the last two are those of `device_types`.
_WORDS = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8"}
_PLAIN = {"INT8", "INT32", "INT64", "UINT8", "BOOL"}


def dims(shape: trt.Dims) -> tuple[int, ...]:
    """TensorRT's shape as a tuple; -1 where it is dynamic."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def dtype_of(data_type: trt.DataType) -> str:
    """Name of a trt.DataType; `trt.nptype` of 8.5 fails with newer numpy, and knows no bfloat16.

    Raises:
        BackendError: values of this type do not fill whole bytes.
    """
    name = str(data_type).rpartition(".")[2]
    if name in _WORDS:
        return _WORDS[name]
    if name not in _PLAIN:
        raise BackendError(
            f"an input or output must be of a type of whole bytes, got {name}; cast it in the model"
        )
    return name.lower()


_MISSING = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")
_LAST = 3  # warnings that an error message quotes where TensorRT logged no error
_MADE_INSIDE = ("(Unnamed Layer* ", "(Unnamed ITensor* ", "ONNXTRT_")


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor that TensorRT found without a scale: whether int8 is lost there, and why (not)."""

    tensor: str
    harmful: bool
    reason: str


def missing_tensors(lines: Iterable[str]) -> list[str]:
    """Names in "Missing scale and zero-point for tensor ..." lines, each once, in order."""
    found = (match[1] for line in lines if (match := _MISSING.search(line)))
    return list(dict.fromkeys(found))


def sort_missing(names: Iterable[str], model: onnx.ModelProto) -> list[Missing]:
    """Judge each tensor by its place in the model; harmful ones first.

    Args:
        names: of `missing_tensors`.
        model: cleaned float model that was built.
    """
    graph = Graph(model)
    plan = analyse(model, TENSORRT)
    read = {pair.tensor for pair in plan.pairs}
    int8 = set(plan.int8_nodes)
    made = {out: n for n in graph.nodes for out in n.output if n.name in int8}
    judged = [_judge(name, graph, read, made) for name in names]
    return sorted(judged, key=lambda item: not item.harmful)


def _judge(
    name: str, graph: Graph, read: Collection[str], made: dict[str, onnx.NodeProto]
) -> Missing:
    constant = name.removesuffix("_output")
    if name in graph.initializers or constant in graph.initializers or "[Constant]" in name:
        return Missing(name, False, "a constant: TensorRT reads its range from its values")
    if name in read:
        return Missing(name, True, "an int8 layer reads it: that layer falls back to float")
    if name in made and name in graph.outputs:
        return Missing(name, False, "an output of the model, which stays float")
    if name in made and graph.tail(made[name]) == name:
        return Missing(name, True, f"{made[name].op_type} {made[name].name} cannot write int8")
    if name in made:
        return Missing(name, False, "inside a fused layer, where no int8 value exists")
    if name in graph.dtypes and not graph.is_float(name):
        return Missing(name, False, "a shape or an index, which is no float at all")
    if name.startswith(_MADE_INSIDE) or not (name in graph.producer or name in graph.inputs):
        return Missing(name, False, "made by TensorRT's parser inside a node")
    return Missing(name, False, "no layer that gains from int8 reads or writes it")


class KeepingLogger:
    """What TensorRT said: every message up to a severity, errors and warnings once more."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def keep(self, severity: int, error: int, message: str) -> None:
        """File one message; TensorRT's severities grow with harmlessness."""
        if severity <= error:
            self.errors.append(message)
        elif severity == error + 1:
            self.warnings.append(message)
        if severity <= self.least:
            self.lines.append(message)

    def words(self) -> str:
        """For an error message: TensorRT's errors, or else the last that it said."""
        chosen = self.errors or self.warnings[-_LAST:] or self.lines[-1:]
        return " | ".join(chosen) or "its log says nothing"


_listeners: list[KeepingLogger] = []


@cache
def process_logger() -> trt.ILogger:
    """The one logger of this process; prints nothing, and tells all who are `listening`.

    TensorRT keeps the first logger it gets for as long as any of its objects lives, and its plugins
    keep a bare pointer to the last. With a logger a build, messages would go to an earlier one, or
    to one that is gone.
    """
    import tensorrt as trt

    error = int(trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            for kept in tuple(_listeners):
                kept.keep(int(severity), error, msg)

    return Logger()


@contextmanager
def listening(*, verbose: bool = False) -> Iterator[KeepingLogger]:
    """Keep what TensorRT says meanwhile, whichever thread or object makes it speak."""
    import tensorrt as trt

    levels = trt.ILogger.Severity
    kept = KeepingLogger(int(levels.VERBOSE if verbose else levels.INFO))
    _listeners.append(kept)
    try:
        yield kept
    finally:
        _listeners.remove(kept)


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
