"""Drive calib8's calibrators as TensorRT does: through the C++ virtual functions, without a GPU.

Run by `test_trt_real.py` with a Python that has TensorRT's real bindings; prints one JSON object.
What libnvinfer's builder would do on a GPU is done here by ctypes on the object's own table of
virtual functions, so that the real bindings stand in between, with all they swallow. The order of
the table is that of NvInfer.h 8.5: getBatchSize, getBatch, readCalibrationCache,
writeCalibrationCache, getAlgorithm, two destructors, then the four of the legacy calibrator. 10 has
getAPILanguage, getInterfaceInfo and the destructors first.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorrt as trt

from calibrators.errors import CalibrationError
from calibrators.tensorrt import CLASSES, HostMemory, calibrator_class
from deploy.errors import BackendError
from deploy.feed.decoding import opencv
from deploy.targets.tensorrt.builder import BuilderSettings, build_engine
from deploy.targets.tensorrt.builder import _network_flags as network_flags
from deploy.targets.tensorrt.inspector import layer_profiler
from deploy.targets.tensorrt.log import process_logger, record_log
from deploy.targets.tensorrt.sdk import dtype_of, shape_of
from deploy.targets.tensorrt.session import output_allocator
from tests.models import make_model, save_net

SHAPE = (2, 3, 4, 4)
SHAPES = {"data": SHAPE, "ids": (3,)}
EIGHT = trt.__version__.startswith("8.")


class Builder:
    """The part of TensorRT's builder that talks to a calibrator."""

    def __init__(self, calib):
        # CPython object head (16 bytes), then pybind11's pointer to the C++ object.
        self.this = ctypes.c_void_p.from_address(id(calib) + 16).value
        table = ctypes.c_void_p.from_address(self.this).value
        self.functions = (ctypes.c_void_p * 13).from_address(table)

    def _call(self, index, result, *types):
        slot = index
        if not EIGHT:
            slot += 4 if index < 5 else 2
        return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *types)(self.functions[slot])

    def number(self, index, kind=ctypes.c_int):
        return self._call(index, kind)(self.this)

    def batch(self, *names):
        bindings = (ctypes.c_void_p * len(names))()
        c_names = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        has_batch = self._call(1, ctypes.c_bool, *types)(self.this, bindings, c_names, len(names))
        return [int(address or 0) for address in bindings] if has_batch else None

    def read(self, index=2):
        """The calibration cache; 9 is the histogram cache of the legacy calibrator."""
        length = ctypes.c_size_t(0)
        get = self._call(index, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
        address = get(self.this, ctypes.byref(length))
        return ctypes.string_at(address, length.value).decode() if address else None

    def write(self, data):
        memory = ctypes.create_string_buffer(data, len(data))
        self._call(3, None, ctypes.c_void_p, ctypes.c_size_t)(self.this, memory, len(data))
        ctypes.memset(memory, 0, len(data))  # TensorRT's memory does not outlive the call


def batches(count, flaw=None):
    """Batches, the second of them with a flaw."""
    rng = np.random.default_rng(7)
    feed = [
        {"data": rng.standard_normal(SHAPE).astype(np.float32), "ids": np.full(3, i, np.int32)}
        for i in range(count)
    ]
    if flaw is not None:
        feed[1]["data"] = flaw
    return feed


def make(feed, promised, algorithm="entropy2", **options):
    feed_options = {"batches": promised, "shapes": SHAPES, "memory": HostMemory(), **options}
    callbacks = calibrator_class(algorithm)(feed, **feed_options)
    callbacks.expect({"data": "float32", "ids": "int32"})
    return callbacks


def outcome(calib):
    try:
        return "ok " + calib.check().decode()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def run_all(calib, *, refuses=False):
    """Do what the builder does: ask for the cache, take batches until none are left, write."""
    builder = Builder(calib)
    if builder.read() is None or refuses:
        while builder.batch("data", "ids") is not None:
            pass
    builder.write(b"TRT-8503-EntropyCalibration2\ndata: 3c008912\n")
    return outcome(calib)


def bytes_seen():
    """The bytes at the addresses that TensorRT is given are those of the feed, in names' order."""
    feed = batches(3)
    calib = make(feed, 3)
    builder = Builder(calib)
    for batch in feed:
        for name, address in zip(("ids", "data"), builder.batch("ids", "data"), strict=True):
            if ctypes.string_at(address, batch[name].nbytes) != batch[name].tobytes():
                return False
    return builder.batch("ids", "data") is None and calib.batches_taken == 3


def raising():
    yield from batches(2)
    raise OSError("the disk with the images went away")


def algorithms():
    results = {}
    for name, base in CLASSES.items():
        calib = make(batches(1), 1, name)
        builder = Builder(calib)
        results[name] = {
            "is_trt": isinstance(calib, getattr(trt, base)),
            "cpp": builder.number(4),
            "batch_size": builder.number(0),
            "run": run_all(calib),
        }
        if name == "legacy":
            results[name]["legacy"] = [builder.number(index, ctypes.c_double) for index in (7, 8)]
            results[name]["histogram"] = builder.read(9)
    return results


def unknown_algorithm():
    try:
        make(batches(1), 1, "kl")
    except CalibrationError as error:
        return str(error)
    return "accepted"


def without_gpu():
    """Return the builder's error where there is no driver; "built" where there is one."""
    model = make_model([("Relu", "x", "y")], {"x": [1, 2]}, {"y": [1, 2]})
    with tempfile.TemporaryDirectory() as folder:
        try:
            build_engine(save_net(model, Path(folder) / "m.onnx"), BuilderSettings())
        except BackendError as error:
            return str(error)
    return "built"


def small_parts():
    """The pieces of the session and the log that need no GPU."""
    logger, levels = process_logger(trt), trt.ILogger.Severity
    with record_log() as recorder:
        for level, text in ((levels.ERROR, "wrong"), (levels.INFO, "said"), (levels.VERBOSE, "-")):
            logger.log(level, text)
        trt.init_libnvinfer_plugins(logger, "")
    profiler, times = layer_profiler()
    profiler.report_layer_time("a", 1.0)
    allocator = output_allocator(None)
    allocator.notify_shape("x", trt.Dims([1, 2]))
    typed_flags, flags = network_flags(typed=True), trt.NetworkDefinitionCreationFlag.__members__
    return {
        "dims": shape_of(trt.Dims([1, -1, 3])),
        "times": times,
        "shape": allocator.shape,
        "dtypes": {name: dtype(data_type) for name, data_type in trt.DataType.__members__.items()},
        "log": [recorder.errors, recorder.lines],
        "one_logger": process_logger(trt) is logger,
        "typed": [name for name, flag in flags.items() if typed_flags >> int(flag) & 1],
    }


def dtype(data_type):
    try:
        return dtype_of(data_type)
    except BackendError:  # not of whole bytes
        return None


def calibrations():
    """The outcome of each calibration, that of the feeds and builders that go wrong among them."""
    known_cache = b"TRT-8503-EntropyCalibration2\nknown: 3c008912\n"
    reused, unwritten = make(raising(), 2, cache=known_cache), make(batches(1), 1)
    Builder(unwritten).batch("data", "ids")
    return {
        "whole": run_all(make(batches(3), 3)),
        "longer_feed": run_all(make(batches(5), 3)),
        "short": run_all(make(batches(2), 3)),
        "empty": run_all(make([], 3)),
        "raises": run_all(make(raising(), 4)),
        "wrong_shape": run_all(make(batches(3, np.zeros((1, 3, 4, 4), np.float32)), 3)),
        "nan": run_all(make(batches(3, np.full(SHAPE, np.nan, np.float32)), 3)),
        "no_cache_written": outcome(unwritten),
        "reused": run_all(reused),
        "reused_taken": reused.batches_taken,
        "refused": run_all(make([], 1, cache=known_cache), refuses=True),
        "refused_but_fed": run_all(make(batches(2), 2, cache=known_cache), refuses=True),
        "unknown": unknown_algorithm(),
    }


if __name__ == "__main__":
    report = {
        "version": trt.__version__,
        "without_gpu": without_gpu(),
        "small_parts": small_parts(),
    }
    if EIGHT:  # OpenCV's version in that environment, and the log level that the feed leaves it at
        report["opencv"] = [opencv().__version__, opencv().getLogLevel()]
    if hasattr(trt, "IInt8Calibrator"):
        report |= {"algorithms": algorithms(), "bytes_seen": bytes_seen(), **calibrations()}
    json.dump(report, sys.stdout)
