"""Sessions of ONNX Runtime on the CPU, with the `Session` protocol."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from deploy.errors import BackendError
from deploy.files.reading import is_utf8_path, read_bytes, refuse_irregular
from deploy.machine import large_blocks_returned, usable_cores
from deploy.runtimes.mapped_model import mapped_tensors, write_mapped
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import onnxruntime
    from onnx import ModelProto

# ONNX Runtime's element types with another name in numpy.
_NUMPY_NAMES = {"float": "float32", "double": "float64", "string": "str"}

# start of the protobuf entry with the path of external weights
_EXTERNAL_ENTRY = b"\x0a\x08location"

# Where a Q/DQ model is computed as it is written, these must not run. The first two drop a Relu or
# Clip before a QuantizeLinear with the same lower bound: for fp8 the first takes that bound for 0,
# and the second fails. The third drops an Identity, such as one that keeps two casts apart.
_PAIR_BREAKING_OPTIMIZERS = ("ReluQuantRewrite", "ClipQuantRewrite", "EliminateIdentity")

# This fuses two Convs and the Add of their outputs even if one of these is a model output: the
# model then does not load (ONNX Runtime 1.32; grouped Convs with several channels per group).
_OUTPUT_LOSING_OPTIMIZER = "ConvAddActivationFusion"
_LOST_OUTPUT_MESSAGE = "Failed to find node output"

_KERNEL_SUFFIX = "_kernel_time"  # suffix of a kernel's event in a profile


_CACHE_LINE = 64  # bytes of a cache line, and of the widest vector

Model: TypeAlias = "Path | str | bytes | ModelProto"
ArrayForm = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype

_LOG_FATAL = 4  # errors arrive as exceptions; everything else would clutter the user's screen

# under "", once there are any: the options that all runs share, so that all can be stopped
_RUN_OPTIONS: dict[str, onnxruntime.RunOptions] = {}
_LOADING_OPTIONS: set[onnxruntime.SessionOptions] = set()
_last_continue = -math.inf


def _run_options() -> onnxruntime.RunOptions:
    """Return the options that all runs share, by which `stop_runs` stops them."""
    import onnxruntime

    return _RUN_OPTIONS.setdefault("", onnxruntime.RunOptions())


def stop_runs(since: float) -> bool:
    """Stop every run, also later ones, and every session that loads; each raises KeyboardInterrupt.

    Args:
        since: time (`time.monotonic`) of a signal. If `continue_runs` was called later, nothing is
            stopped, and False is returned.
    """
    if _last_continue > since:
        return False
    _end_runs(_run_options())
    return True


def abandon_runs() -> None:
    """Stop every run of the sessions opened so far, in threads that a signal left behind."""
    if (options := _RUN_OPTIONS.pop("", None)) is not None:
        _end_runs(options)


def _end_runs(run_options: onnxruntime.RunOptions) -> None:
    """Stop the runs with these options, and the sessions that load."""
    run_options.terminate = True
    for session_options in list(_LOADING_OPTIONS):
        if hasattr(session_options, "set_load_cancellation_flag"):  # not in older versions
            session_options.set_load_cancellation_flag(True)


def continue_runs() -> None:
    """Allow runs again after an interrupt that did not end the command."""
    global _last_continue
    _last_continue = time.monotonic()
    _run_options().terminate = False


def runtime_version() -> str:
    """Return "ONNX Runtime" and its version."""
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


_SUM_MODEL = """<ir_version: 8, opset_import: ["" : 13]>
kind (uint8[1, 64] x, int8[64, 16] w) => (int32[1, 16] y) { y = MatMulInteger(x, w) }"""


@cache
def cpu_kind() -> str:
    """Return the kind of CPU whose kernels ONNX Runtime runs here: "vnni", "avx2" or "arm".

    The kernels tell, not the CPU's flags: without VNNI they add two products in 16 bits, which
    saturate here.
    """
    from onnx import parser

    if platform.machine().lower() in ("aarch64", "arm64"):
        return "arm"
    feeds = {"x": np.full((1, 64), 255, np.uint8), "w": np.full((64, 16), 127, np.int8)}
    sums = OrtSession.open(parser.parse_model(_SUM_MODEL), threads=1, spin=False).run(feeds)["y"]
    return "vnni" if (sums == 255 * 127 * 64).all() else "avx2"


_PAIR_MODEL = """<ir_version: 8, opset_import: ["" : {opset}]>
pair (float[1] x) => (float[1] y) <float s = {{1}}, uint8 z = {{0}}>
{{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }}"""


@cache
def runs_pairs(opset: int) -> bool:
    """Return whether ONNX Runtime has kernels for the Q/DQ pairs of an opset."""
    from onnx import parser

    try:
        OrtSession.open(parser.parse_model(_PAIR_MODEL.format(opset=opset)), threads=1, spin=False)
    except BackendError:
        return False
    return True


_LARGE_MODEL_BYTES = 64 << 20
_LARGE_MODEL_VALUES = 4 << 20  # in large tensors: 16 MiB in float32
_FOLDER_PREFIX = "calib8-"  # of the temporary folder with a large model
# messages do not name this file: it is another one every time, and not the user's
_TEMPORARY_FILE = re.compile(rf"Load model from \S*{_FOLDER_PREFIX}\w+\W\w+\.onnx failed: ?")


def _make_options(
    threads: int, *, optimize: bool, spin: bool, reuse_memory: bool
) -> onnxruntime.SessionOptions:
    """Return the options of a session.

    Args:
        threads: threads inside one operator.
        optimize: whether ONNX Runtime optimizes the graph.
        spin: whether idle threads spin within a run instead of sleeping.
        reuse_memory: whether memory is kept between runs, in an arena.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL
    options.enable_cpu_mem_arena = reuse_memory
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if spin:  # only until the run ends: after it, other sessions need the cores
        options.add_session_config_entry("session.force_spinning_stop", "1")
    else:
        # a plan of the memory gains nothing in a few runs, and the second run, which is the first
        # to follow it, allocates all memory anew
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _create_session(
    source: str | bytes, options: onnxruntime.SessionOptions, disabled_optimizers: Sequence[str]
) -> onnxruntime.InferenceSession:
    """Create a session; if a faulty optimizer of ONNX Runtime prevents that, without the optimizer.

    Args:
        source: path or bytes of the model.
        options: options of the session.
        disabled_optimizers: names of optimizers that must not run on this model.
    """
    import onnxruntime

    create = partial(
        onnxruntime.InferenceSession,
        source,
        options,
        providers=["CPUExecutionProvider"],
        enable_fallback=0,  # there is no other provider, and ONNX Runtime would print a note
    )
    try:
        session = create(disabled_optimizers=[*disabled_optimizers])
    except RuntimeError as error:
        if _LOST_OUTPUT_MESSAGE not in str(error):
            raise
        session = create(disabled_optimizers=[*disabled_optimizers, _OUTPUT_LOSING_OPTIMIZER])
    # the session keeps the model's bytes, to change providers later, which is never done here
    vars(session)["_model_bytes"] = None
    return session


def _raise_if_stopped(error: Exception) -> None:
    """Raise KeyboardInterrupt for an error after `stop_runs`; the main thread raises its signal."""
    if (options := _RUN_OPTIONS.get("")) is not None and options.terminate:
        raise KeyboardInterrupt from error


class CpuSession(ABC):
    """An ONNX model loaded in a runtime on the CPU; created by a subclass's `open`.

    Attributes:
        inputs: specs of the inputs, in the model's order.
        outputs: specs of the outputs that are tensors, not sequences or maps, in the model's order.
        threads: threads of one inference.
    """

    _runtime: ClassVar[str]

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    threads: int
    _infer: Callable[[dict[str, Array]], Iterable[Array]]

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run one inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: a missing or unknown input, a wrong dtype or shape, or a failing operator.
        """
        try:
            values = self._infer(dict(feed))
        except Exception as error:  # the runtimes' exceptions share no base but Exception
            raise self.run_error(error) from error
        return dict(zip([spec.name for spec in self.outputs], values, strict=True))

    @staticmethod
    @abstractmethod
    def _clean_message(error: Exception) -> str: ...

    @classmethod
    def run_error(cls, error: Exception) -> BackendError:
        """Return the error of a run that fails.

        Raises:
            KeyboardInterrupt: `stop_runs` ended it.
        """
        _raise_if_stopped(error)
        return BackendError(f"{cls._runtime} could not run the model: {cls._clean_message(error)}")

    @classmethod
    def _open_error(cls, model: Model, version: str, error: Exception) -> BackendError:
        """Return the error for a model that cannot be loaded.

        Raises:
            KeyboardInterrupt: `stop_runs` ended the loading.
        """
        _raise_if_stopped(error)
        name = str(model) if isinstance(model, Path | str) else "the model"
        return BackendError(
            f"{name} must be a model that {cls._runtime} {version} can load,"
            f" got: {cls._clean_message(error)}"
        )


class OrtSession(CpuSession):
    """An ONNX model loaded in ONNX Runtime."""

    _runtime = "ONNX Runtime"

    def __init__(self, session: onnxruntime.InferenceSession, *, threads: int) -> None:
        self.threads = threads
        self.inputs = [_spec(node) for node in session.get_inputs()]
        self.outputs = [_spec(node) for node in session.get_outputs() if _is_tensor(node)]
        self._session = session
        names = [spec.name for spec in self.outputs]
        self._infer = partial(session.run, names, run_options=_run_options())

    @classmethod
    def open(
        cls,
        model: Model,
        *,
        threads: int | None = None,
        optimize: bool = True,
        spin: bool = True,
        reuse_memory: bool = False,
        int8_kernels: bool = True,
        trace: Path | None = None,
    ) -> OrtSession:
        """Load a model from a file or from memory.

        Args:
            model: path of an ONNX file (with its external data next to it), its bytes, or a proto.
            threads: threads inside one operator; None uses every core available to this process.
            optimize: False disables graph optimization, so that every tensor of the file exists.
            spin: idle threads spin within a run instead of sleeping, which saves microseconds and
                occupies the cores; worth it only for timing.
            reuse_memory: keep memory between runs, in an arena. It is always kept if threads spin,
                in a session for timing; other sessions of only a few runs need none.
            int8_kernels: False computes a Q/DQ model as it is written, with float operators between
                its pairs; this is for a model that another runtime is to run. A `ModelProto` with
                fp8 pairs or float16 scales, on which the int8 kernels fail, always runs so.
            trace: prefix of the path of a profile to record; None to record none.

        Raises:
            BackendError: ONNX Runtime cannot load the model; the message quotes ONNX Runtime.
        """
        import onnxruntime

        threads = usable_cores() if threads is None else threads
        if threads < 1:
            raise BackendError(f"threads must be 1 or more, got {threads}")
        options = _make_options(
            threads, optimize=optimize, spin=spin, reuse_memory=reuse_memory or spin
        )
        if trace is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(trace)
        disabled_optimizers: Sequence[str] = ()
        if not int8_kernels or breaks_int8_kernels(model):
            options.add_session_config_entry("session.disable_quant_qdq", "1")
            disabled_optimizers = _PAIR_BREAKING_OPTIMIZERS

        _LOADING_OPTIONS.add(options)  # so that a signal can cancel the loading
        try:
            with _loadable_source(model) as source:
                session = _create_session(source, options, disabled_optimizers)
        except BackendError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
            raise cls._open_error(model, onnxruntime.__version__, error) from error
        finally:
            _LOADING_OPTIONS.discard(options)
        return cls(session, threads=threads)

    @property
    def runs_in_calling_thread(self) -> bool:
        """Whether `run` computes in the thread that calls it: with one thread there is no pool."""
        return self.threads == 1

    @staticmethod
    def _clean_message(error: Exception) -> str:
        """Return the message on one line, without its "[ONNXRuntimeError] : 7 : ..." prefix."""
        text = " ".join(str(error).split()) or type(error).__name__
        message = text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
        message = _TEMPORARY_FILE.sub("", message)
        if "No Op registered for Ascend" in message:
            return f"{message}; only Ascend's atc reads it, so give its fake-quant model"
        return message


class BoundSession:
    """Runs that write their outputs to the same memory each time; for one thread at a time.

    They are runs of one session, on samples of one shape.

    Attributes:
        outputs: name -> array of the last run.
    """

    def __init__(self, session: OrtSession, output_forms: Mapping[str, ArrayForm]) -> None:
        """Allocate memory for the outputs, and bind it, so that runs of the session write there.

        Args:
            session: the loaded model.
            output_forms: output -> its (shape, dtype).

        Raises:
            BackendError: a dtype that cannot be bound.
        """
        if any(dtype.hasobject for _, dtype in output_forms.values()):
            raise BackendError("outputs of text cannot be bound")
        self._session = session._session
        self._options = _run_options()
        self._binding = self._session.io_binding()
        # all outputs lie in one block of memory. Each starts at a cache line, so that no vector
        # that a kernel loads crosses a line
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in output_forms.values()]
        block = np.empty(sum(sizes) + _CACHE_LINE * (len(sizes) + 1), np.uint8)
        start = -block.ctypes.data % _CACHE_LINE  # the first aligned byte
        self.outputs: dict[str, Array] = {}
        for (name, (shape, dtype)), size in zip(output_forms.items(), sizes, strict=True):
            self.outputs[name] = block[start : start + size].view(dtype).reshape(shape)
            start += size + -size % _CACHE_LINE  # rounded up to the next cache line
        try:
            for name, array in self.outputs.items():
                self._binding.bind_output(
                    name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
                )
        except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
            raise BackendError(
                f"outputs cannot be bound: {OrtSession._clean_message(error)}"
            ) from error

    def run(self, feed: Mapping[str, Array]) -> None:
        """Run one inference, whose results are in `outputs` until the next one.

        Raises:
            BackendError: see `OrtSession.run`; or an output has another shape than was bound.
        """
        try:
            for name, array in feed.items():
                self._binding.bind_cpu_input(name, array)
            self._session.run_with_iobinding(self._binding, self._options)
            # ONNX Runtime does not write an output that is an input of the model too
            for name in self.outputs.keys() & feed.keys():
                self.outputs[name][...] = feed[name]
        except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
            raise OrtSession.run_error(error) from error
        finally:
            # else an input that is missing in the next run would silently be the one of this run
            self._binding.clear_binding_inputs()


def profile_kernels(
    model: Path | ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    runs: int,
    threads: int = 1,
) -> list[tuple[str, str, float]]:
    """Run a model in ONNX Runtime's profiler; return (kernel, its operator, microseconds) of each.

    A kernel is listed once for each run of the model.

    Args:
        model: the model as it would be deployed.
        feeds: inputs of a run, input -> array; used in turn.
        runs: number of runs.
        threads: threads inside one operator.
    """
    with tempfile.TemporaryDirectory(prefix="calib8-") as folder:
        session = OrtSession.open(model, threads=threads, trace=Path(folder) / "trace")
        for number in range(runs):
            session.run(feeds[number % len(feeds)])
        profile = Path(session._session.end_profiling())
        events = json.loads(profile.read_text(encoding="utf-8"))
    # a profile has events of other kinds too, such as the loading of the model
    return [
        (event["name"].removesuffix(_KERNEL_SUFFIX), event["args"]["op_name"], float(event["dur"]))
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL_SUFFIX)
    ]


def model_source(model: Model) -> str | bytes:
    """Return a model in a form for runtimes in C++: a path in UTF-8, or bytes.

    Raises:
        BackendError: no regular file, or external weights with a path that is not UTF-8.
    """
    if isinstance(model, Path | str):
        refuse_irregular(model, what="a model", error=BackendError)
        return str(model) if is_utf8_path(model) else _read_bytes(model)
    return model if isinstance(model, bytes) else bytes(model.SerializeToString())


@contextmanager
def _loadable_source(model: Model) -> Iterator[str | bytes]:
    """Yield a model in a form that ONNX Runtime loads, the path of a file or bytes.

    A large `ModelProto` is written to a temporary folder, with its weights in a separate file.
    ONNX Runtime maps that file into memory, whereas it would copy bytes two more times.
    """
    with ExitStack() as stack:
        mapped_path = ""
        if not isinstance(model, Path | str | bytes):
            with suppress(OSError):  # the disk is full or read-only: the bytes are loaded instead
                mapped_path = _write_if_large(model, stack)
        source = mapped_path or model_source(model)
        size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
        if mapped_path or size >= _LARGE_MODEL_BYTES:
            # loading copies the weights two to four times; the copies' memory is given back
            stack.enter_context(large_blocks_returned())
        yield source


def _write_if_large(model: ModelProto, stack: ExitStack) -> str:
    """Write a large model into a folder that lasts as long as `stack`; return its path.

    Return "", and write nothing, for a small model.
    """
    sizes = mapped_tensors(model)
    if sum(sizes.values()) < _LARGE_MODEL_VALUES:
        return ""
    temporary = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True)
    return str(write_mapped(model, sizes, Path(stack.enter_context(temporary))))


def breaks_int8_kernels(model: Model) -> bool:
    """Return whether ONNX Runtime's int8 kernels would fail on a model, or compute it wrongly.

    They do if a Q/DQ pair is fp8, or has a float16 scale: the kernel then computes the scale of the
    bias, a product of two scales, in float16, where it may round to 0. For a file or bytes, which
    are not looked into, False is returned.
    """
    if isinstance(model, Path | str | bytes):
        return False
    from onnx import TensorProto

    scale_names = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT8E4M3FN:
            return True
        if tensor.data_type == TensorProto.FLOAT16 and tensor.name in scale_names:
            return True
    return False


def warn_of_int8_kernels(model: ModelProto, name: str) -> str:
    """Return a sentence on a model's file that `breaks_int8_kernels`; "" for any other model."""
    if not breaks_int8_kernels(model):
        return ""
    return (
        f"{name} has fp8 pairs or float16 scales, which ONNX Runtime's int8 kernels may compute"
        " wrongly; the accuracy on TensorRT is that of `calib8 compare`, or of `calib8 check` with"
        " the folder of the build"
    )


def _read_bytes(path: Path | str) -> bytes:
    """Read a model whose path is not UTF-8; external weights cannot be located then."""
    data = read_bytes(path, what="a model", error=BackendError)
    if _EXTERNAL_ENTRY in data:
        raise BackendError(
            f"a model with weights in a separate file must have a path in UTF-8, got {path};"
            " move both files to such a path"
        )
    return data


def _is_tensor(node: onnxruntime.NodeArg) -> bool:
    """Whether an input or output is a tensor, not a sequence or map."""
    return str(node.type).startswith("tensor(")


def _spec(node: onnxruntime.NodeArg) -> TensorSpec:
    """Convert a node argument: "tensor(float)" becomes "float32"; other types stay unchanged."""
    type_name = str(node.type)
    if _is_tensor(node):
        type_name = type_name[len("tensor(") : -1]
    return TensorSpec(node.name, _NUMPY_NAMES.get(type_name, type_name), tuple(node.shape))
