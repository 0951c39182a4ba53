"""Drive calib8's calibrators as TensorRT does: through the C++ virtual functions, without a GPU.

Run by `test_trt_real.py` with the Python that has tensorrt 8.5.3.1; prints one JSON object. What
libnvinfer's builder would do on a GPU is done here by ctypes on the object's own table of virtual
functions, so that the real bindings stand in between, with all they swallow. The order of the table
is that of NvInfer.h 8.5: getBatchSize, getBatch, readCalibrationCache, writeCalibrationCache,
getAlgorithm, two destructors, then the four of the legacy calibrator.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt

from calibrators.errors import CalibrationError
from calibrators.tensorrt import CLASSES, Callbacks, HostMemory, calibrator
from tests.models import make_node, make_value

SHAPE = (2, 3, 4, 4)


class Builder:
    """The part of TensorRT's builder that talks to a calibrator."""

    def __init__(self, calib: Callbacks) -> None:
        # CPython object head (16 bytes), then pybind11's pointer to the C++ object.
        self.this = ctypes.c_void_p.from_address(id(calib) + 16).value
        table = ctypes.c_void_p.from_address(self.this or 0).value
        self.functions = (ctypes.c_void_p * 11).from_address(table or 0)

    def _call(self, index: int, result: Any, *types: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *types)(self.functions[index] or 0)

    def batch_size(self) -> int:
        return int(self._call(0, ctypes.c_int)(self.this))

    def batch(self, *names: str) -> list[int] | None:
        bindings = (ctypes.c_void_p * len(names))()
        c_names = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        more = self._call(1, ctypes.c_bool, *types)(self.this, bindings, c_names, len(names))
        return [int(address or 0) for address in bindings] if more else None

    def read(self) -> bytes | None:
        length = ctypes.c_size_t(0)
        get = self._call(2, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
        address = get(self.this, ctypes.byref(length))
        return ctypes.string_at(address, length.value) if address else None

    def write(self, data: bytes) -> None:
        memory = ctypes.create_string_buffer(data, len(data))
        put = self._call(3, None, ctypes.c_void_p, ctypes.c_size_t)
        put(self.this, memory, len(data))
        ctypes.memset(memory, 0, len(data))  # TensorRT's memory does not outlive the call

    def algorithm(self) -> int:
        return int(self._call(4, ctypes.c_int)(self.this))

    def legacy(self) -> tuple[float, float]:
        return tuple(float(self._call(i, ctypes.c_double)(self.this)) for i in (7, 8))  # type: ignore

    def histogram_cache(self) -> int | None:
        length = ctypes.c_size_t(0)
        get = self._call(9, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
        address: int | None = get(self.this, ctypes.byref(length))
        return address


def batches(count: int, shape: tuple[int, ...] = SHAPE) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [
        {"data": rng.standard_normal(shape).astype(np.float32), "ids": np.full(3, i, np.int32)}
        for i in range(count)
    ]


def make(feed: Any, promised: int, algorithm: str = "entropy2", **options: Any) -> Callbacks:
    return calibrator(
        algorithm, feed, batches=promised, shapes={"data": SHAPE, "ids": (3,)}, memory=HostMemory(),
        **options,
    )  # fmt: skip


def outcome(calib: Callbacks) -> str:
    try:
        return "ok " + calib.check().decode()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def run_all(calib: Callbacks, *names: str, refuses: bool = False) -> str:
    """What the builder does: ask for the cache, take batches until there are none, write."""
    builder = Builder(calib)
    if builder.read() is None or refuses:
        while builder.batch(*(names or ("data", "ids"))) is not None:
            pass
    builder.write(b"TRT-8503-EntropyCalibration2\ndata: 3c008912\n")
    return outcome(calib)


def bytes_seen() -> bool:
    """The bytes at the addresses that TensorRT is given are those of the feed, in names' order."""
    feed = batches(3)
    calib = make(feed, 3)
    builder = Builder(calib)
    for batch in feed:
        ids, data = builder.batch("ids", "data") or (0, 0)
        if ctypes.string_at(data, batch["data"].nbytes) != batch["data"].tobytes():
            return False
        if ctypes.string_at(ids, batch["ids"].nbytes) != batch["ids"].tobytes():
            return False
    return builder.batch("ids", "data") is None and calib.taken == 3


def raising() -> Iterator[dict[str, np.ndarray]]:
    yield from batches(2)
    raise OSError("the disk with the images went away")


def with_flaw(**arrays: np.ndarray) -> list[dict[str, np.ndarray]]:
    feed = batches(3)
    feed[1].update(arrays)
    return feed


def algorithms() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, base in CLASSES.items():
        calib = make(batches(1), 1, name, quantile=0.99, cutoff=0.5)
        builder = Builder(calib)
        found[name] = {
            "is_trt": isinstance(calib, getattr(trt, base)),
            "python": str(calib.get_algorithm()),  # type: ignore[attr-defined]
            "cpp": builder.algorithm(),
            "batch_size": builder.batch_size(),
            "run": run_all(calib),
        }
        if name == "legacy":
            found[name]["legacy"] = builder.legacy()
            found[name]["histogram"] = builder.histogram_cache()
    return found


def unknown_algorithm() -> str:
    try:
        make(batches(1), 1, "kl")
    except CalibrationError as error:
        return str(error)
    return "accepted"


# What `deploy.targets.tensorrt` calls on TensorRT's objects; none can be made without a GPU.
USED = {
    "Builder": "create_network create_builder_config create_optimization_profile"
    " build_serialized_network",
    "INetworkDefinition": "get_input num_inputs get_layer num_layers",
    "IBuilderConfig": "set_flag clear_flag get_tactic_sources set_tactic_sources"
    " add_optimization_profile set_calibration_profile int8_calibrator"
    " set_memory_pool_limit create_timing_cache set_timing_cache get_timing_cache",
    "IOptimizationProfile": "set_shape set_shape_input",
    "ITimingCache": "serialize",
    "OnnxParser": "parse_from_file num_errors get_error",
    "Runtime": "deserialize_cuda_engine",
    "ICudaEngine": "num_io_tensors get_tensor_name get_tensor_shape get_tensor_mode"
    " get_tensor_dtype get_tensor_location create_execution_context",
    "IExecutionContext": "set_input_shape get_tensor_shape set_tensor_address execute_async_v3"
    " set_output_allocator",
    "IOutputAllocator": "reallocate_output notify_shape",
    "BuilderFlag": "INT8 FP16 TF32",
    "TacticSource": "CUBLAS CUBLAS_LT CUDNN",
    "NetworkDefinitionCreationFlag": "EXPLICIT_BATCH",
    "MemoryPoolType": "WORKSPACE",
    "TensorIOMode": "INPUT",
    "TensorLocation": "HOST",
    "ITensor": "name shape dtype is_shape_tensor",
}


def lacking() -> list[str]:
    """Of `USED`, what this TensorRT does not have."""
    return [
        f"{owner}.{name}"
        for owner, names in USED.items()
        for name in names.split()
        if not hasattr(getattr(trt, owner), name)
    ]


def without_gpu() -> str:
    """What the builder says where there is no driver; "built" where there is one."""
    from onnx import helper, save

    from deploy.errors import BackendError
    from deploy.targets.tensorrt.builder import BuilderSettings, build_engine

    ends = [make_value(name, [1, 2]) for name in "xy"]
    graph = helper.make_graph([make_node("Relu", "x", "y")], "g", ends[:1], ends[1:])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m.onnx"
        save(helper.make_model(graph, ir_version=8), model)
        try:
            build_engine(model, BuilderSettings())
        except BackendError as error:
            return str(error)
    return "built"


def small_parts() -> dict[str, Any]:
    """The pieces of the session and the log that need no GPU."""
    from deploy.targets.tensorrt.sdk import (
        dtype_of,
        process_logger,
        record_log,
        shape_of,
        stand_ins,
    )

    logger = process_logger()
    with record_log() as kept:
        logger.log(trt.ILogger.Severity.ERROR, "wrong")
        logger.log(trt.ILogger.Severity.INFO, "said")
        logger.log(trt.ILogger.Severity.VERBOSE, "whispered")
        trt.init_libnvinfer_plugins(logger, "")
    types = [trt.float32, trt.float16, trt.int8, trt.int32, trt.bool]
    return {
        "dims": shape_of(trt.Dims([1, -1, 3])),
        "dtypes": [dtype_of(data_type) for data_type in types],
        "log": [kept.errors, kept.lines], "one_logger": process_logger() is logger,
        "stand_ins": stand_ins(),
    }  # fmt: skip


def silenced() -> list[Any]:
    """OpenCV's version in this environment, and the log level that the feed leaves it at."""
    from deploy.feed.images import opencv

    return [opencv().__version__, opencv().getLogLevel()]


def main() -> None:
    nan = np.full(SHAPE, np.nan, np.float32)
    known = b"TRT-8503-EntropyCalibration2\nknown: 3c008912\n"
    reused = make(raising(), 2, known=known)
    json.dump(
        {
            "version": trt.__version__, "algorithms": algorithms(), "bytes_seen": bytes_seen(),
            "whole": run_all(make(batches(3), 3)), "longer_feed": run_all(make(batches(5), 3)),
            "short": run_all(make(batches(2), 3)), "empty": run_all(make([], 3)),
            "raises": run_all(make(raising(), 4)),
            "wrong_shape": run_all(make(with_flaw(data=np.zeros((1, 3, 4, 4), np.float32)), 3)),
            "wrong_dtype": run_all(make(with_flaw(data=np.zeros(SHAPE, np.float64)), 3)),
            "nan": run_all(make(with_flaw(data=nan), 3)),
            "missing_name": run_all(make(batches(3), 3), "data", "mask"),
            "no_cache_written": outcome(_taken(make(batches(1), 1))), "reused": run_all(reused),
            "reused_taken": reused.taken,
            "refused": run_all(make([], 1, known=known), refuses=True),
            "refused_but_fed": run_all(make(batches(2), 2, known=known), refuses=True),
            "unknown": unknown_algorithm(), "lacking": lacking(), "without_gpu": without_gpu(),
            "small_parts": small_parts(), "opencv": silenced(),
        },
        sys.stdout,
    )  # fmt: skip


def _taken(calib: Callbacks) -> Callbacks:
    Builder(calib).batch("data", "ids")
    return calib


if __name__ == "__main__":
    main()
