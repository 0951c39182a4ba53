"""A model loaded in ONNX Runtime on the CPU, behind the `Session` protocol."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.errors import BackendError
from deploy.files.reading import is_text, read_bytes, refuse_irregular
from deploy.machine import usable_cores
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import onnxruntime
    from onnx import ModelProto

# ONNX Runtime's element types whose numpy name is not the same word.
_NUMPY_NAMES = {"float": "float32", "double": "float64", "string": "str"}

_BESIDE = b"\x0a\x08location"  # begins the entry of a tensor that tells where its values are

# They drop a Relu or Clip before a Quantize whose least value is the same: of fp8 the first takes 0
# for that, and the second fails.
_DROP_A_CLIP = ("ReluQuantRewrite", "ClipQuantRewrite")

# It joins two Convs by the Add of what they make, though one of these is an output as well: such a
# model does not load (ONNX Runtime 1.32; Convs of which each group makes several channels).
_LOSES_OUTPUTS = "ConvAddActivationFusion"
_OUTPUT_LOST = "Failed to find node output"

_KERNEL = "_kernel_time"  # ends the name of a kernel's event in a profile
_MOST_TRACED = 64  # runs of a profile that goes on for a time

_LARGE = 1 << 12  # bytes of weights that stand in a file beside a model that is saved

_LINE = 64  # bytes of a line of a cache, and of the widest vector

_LOG_FATAL = 4  # what matters arrives as an exception; the rest is noise on a user's screen


def runtime() -> str:
    """The ONNX Runtime of this environment, in words."""
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def _loaded(
    source: str | bytes, options: onnxruntime.SessionOptions, without: Sequence[str]
) -> onnxruntime.InferenceSession:
    """A session without these optimizers, nor the one that loses outputs where it did."""
    import onnxruntime

    def session(disabled: Sequence[str]) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(
            source,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=[*disabled],
            enable_fallback=0,  # there is nothing to fall back to, and it prints that it does
        )

    try:
        return session(without)
    except RuntimeError as error:
        if _OUTPUT_LOST not in str(error):
            raise
        return session([*without, _LOSES_OUTPUTS])


class OrtSession:
    """An ONNX model ready to run; made by `open`."""

    def __init__(self, session: onnxruntime.InferenceSession, *, threads: int) -> None:
        self._session = session
        self.threads = threads
        self._inputs = [_spec(node) for node in session.get_inputs()]
        self._outputs = [_spec(node) for node in session.get_outputs() if _is_tensor(node)]

    @classmethod
    def open(
        cls,
        model: Path | str | bytes | ModelProto,
        *,
        threads: int | None = None,
        optimize: bool = True,
        spin: bool = True,
        keep: bool | None = None,
        int8_kernels: bool = True,
        trace: Path | None = None,
        saved: Path | None = None,
    ) -> OrtSession:
        """Load a model from a file or from memory.

        Args:
            model: path of an ONNX file (with its external data beside it), its bytes, or itself.
            threads: threads inside one operator; None takes every core this process may use.
            optimize: False switches graph optimization off, so that every tensor exists as written.
            spin: let idle threads wait for work within a run without sleeping, which saves
                microseconds of it and costs a core; only what is timed is worth it.
            keep: the memory of one run for the next; None where threads spin. A session of a few
                runs asks for no new pages then, and gives them all back in the end.
            int8_kernels: False computes a Q/DQ model as it is written, in float between its pairs,
                with its weights quantized once: for a model that has another runtime's form. A
                `ModelProto` with pairs of fp8, which has no kernels, always is.
            trace: beginning of the path that the profile is written to.
            saved: where the model is written as it is run on this CPU, with its larger weights in
                a file beside it.

        Raises:
            BackendError: ONNX Runtime cannot load the model; its own words are in the message.
        """
        import onnxruntime

        threads = usable_cores() if threads is None else threads
        what = str(model) if isinstance(model, Path | str) else "the model"
        source = source_of(model)
        int8_kernels = int8_kernels and not _of_fp8(model)
        options = _options(
            threads, optimize, spin, spin if keep is None else keep, int8_kernels, trace, saved
        )
        try:
            session = _loaded(source, options, () if int8_kernels else _DROP_A_CLIP)
        except Exception as error:  # its exception classes share no base but Exception
            raise BackendError(
                f"{what} must be a model that ONNX Runtime {onnxruntime.__version__} can load,"
                f" got: {_sentence(error)}"
            ) from error
        return cls(session, threads=threads)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the model's order."""
        return self._inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs that are tensors (not sequences or maps), in the model's order."""
        return self._outputs

    def end_trace(self) -> str:
        """Stop profiling; the path of the trace."""
        return str(self._session.end_profiling())

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """One inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: a missing or unknown input, a wrong dtype or shape, a failing operator.
        """
        names = [spec.name for spec in self._outputs]
        try:
            values = self._session.run(names, dict(feed))
        except Exception as error:  # its exception classes share no base but Exception
            raise BackendError(f"ONNX Runtime could not run the model: {_sentence(error)}") from (
                error
            )
        return dict(zip(names, values, strict=True))

    def bound(self, like: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Bound:
        """Runs of samples of one shape, whose outputs lie in the same memory each time.

        Args:
            like: output -> its shape and type.

        Raises:
            BackendError: a type that cannot be had so.
        """
        return Bound(self._session, like)


class Bound:
    """Runs whose outputs lie where those of the run before lay; for one thread at once.

    Attributes:
        outputs: name -> array, as the last run left it.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        like: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self.outputs = _side_by_side(like)
        try:
            for name, x in self.outputs.items():
                self._binding.bind_output(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        except Exception as error:  # its exception classes share no base but Exception
            raise BackendError(f"outputs cannot be bound: {_sentence(error)}") from error

    def run(self, feed: Mapping[str, Array]) -> None:
        """One inference.

        Raises:
            BackendError: as `OrtSession.run`; or an output has another shape.
        """
        try:
            for name, array in feed.items():
                self._binding.bind_cpu_input(name, array)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # as above
            raise BackendError(f"ONNX Runtime could not run the model: {_sentence(error)}") from (
                error
            )
        finally:
            self._binding.clear_binding_inputs()  # none of them is taken for one that lacks


def _side_by_side(
    like: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
) -> dict[str, Array]:
    """Arrays in one piece of memory, each from a line of the cache on."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in like.items()}
    whole = np.empty(sum(size + _LINE for size in sizes.values()) + _LINE, np.uint8)
    at = -whole.ctypes.data % _LINE
    found = {}
    for name, (shape, dtype) in like.items():
        found[name] = whole[at : at + sizes[name]].view(dtype).reshape(shape)
        at += sizes[name] + -sizes[name] % _LINE
    return found


def profiled(
    model: Path | ModelProto,
    feeds: Sequence[Mapping[str, Array]],
    *,
    runs: int,
    folder: Path,
    threads: int = 1,
    seconds: float = 0.0,
) -> Path:
    """Run a model under ONNX Runtime's profiler; gives the trace, a JSON file in `folder`.

    Args:
        model: as it would be deployed.
        feeds: inputs, used in turn.
        runs: how often it is run, at least.
        folder: where the trace is written.
        threads: threads inside one operator.
        seconds: it is run again until so many are over, 64 times at most.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    session = OrtSession.open(model, threads=threads, trace=folder / "trace")
    began, run = time.perf_counter(), 0
    while run < runs or (run < _MOST_TRACED and time.perf_counter() - began < seconds):
        session.run(feeds[run % len(feeds)])
        run += 1
    return Path(session.end_trace())


def kernel_events(trace: Path) -> Iterator[tuple[str, str, float]]:
    """(kernel, its operator, microseconds) of every time that a kernel ran, of a `profiled` run."""
    for event in json.loads(trace.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            kind = event.get("args", {}).get("op_name", "")
            yield name.removesuffix(_KERNEL), str(kind), float(event["dur"])


def source_of(model: Path | str | bytes | ModelProto) -> str | bytes:
    """What a runtime in C++ takes: a path in UTF-8, or bytes.

    Raises:
        BackendError: no regular file, or weights beside a path that is no UTF-8.
    """
    if isinstance(model, Path | str):
        refuse_irregular(model, what="a model", error=BackendError)
        return str(model) if is_text(model) else _whole(model)
    return model if isinstance(model, bytes) else bytes(model.SerializeToString())


def _of_fp8(model: Path | str | bytes | ModelProto) -> bool:
    """Whether a model that is at hand, not in a file, holds values of fp8."""
    if isinstance(model, Path | str | bytes):
        return False
    from onnx import TensorProto

    fp8 = TensorProto.FLOAT8E4M3FN
    return any(tensor.data_type == fp8 for tensor in model.graph.initializer)


def _whole(path: Path | str) -> bytes:
    """A file whose path cannot be said; its weights would be looked for in the working folder."""
    data = read_bytes(path, what="a model", error=BackendError)
    if _BESIDE in data:
        raise BackendError(
            f"a model with weights in a file beside it must have a path in UTF-8, got {path};"
            " move both to one"
        )
    return data


def _options(
    threads: int,
    optimize: bool,
    spin: bool,
    keep: bool,
    int8_kernels: bool,
    trace: Path | None,
    saved: Path | None,
) -> onnxruntime.SessionOptions:
    import onnxruntime

    if threads < 1:
        raise BackendError(f"threads must be 1 or more, got {threads}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL
    if spin:  # but not beside another session's run
        options.add_session_config_entry("session.force_spinning_stop", "1")
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = keep
    if not int8_kernels:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if trace is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(trace)
    if saved is not None:
        options.optimized_model_filepath = str(saved)
        entry = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{entry}file_name", f"{saved.name}.data")
        options.add_session_config_entry(f"{entry}min_size_in_bytes", str(_LARGE))
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    return options


def _is_tensor(node: onnxruntime.NodeArg) -> bool:
    return str(node.type).startswith("tensor(")


def _spec(node: onnxruntime.NodeArg) -> TensorSpec:
    """The runtime's "tensor(float)" -> "float32"; a type that is no tensor stays as it is."""
    element = str(node.type)
    if _is_tensor(node):
        element = element[len("tensor(") : -1]
    return TensorSpec(node.name, _NUMPY_NAMES.get(element, element), tuple(node.shape))


def _sentence(error: Exception) -> str:
    """The runtime's message without its "[ONNXRuntimeError] : 7 : ..." prefix, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    said = text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
    if "No Op registered for Ascend" in said:
        return f"{said}; Ascend's atc alone reads it, so give its fake-quant model"
    return said
