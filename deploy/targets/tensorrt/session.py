"""A TensorRT engine behind the `Session` protocol, timed by CUDA events as trtexec times it.

One inference on one stream::

    events   0 ---- H2D ---- 1 ---- compute ---- 2 ---- D2H ---- 3
    host     |-- enqueue --| (of the compute part alone)

Source: NVIDIA/TensorRT samples/common/sampleInference.cpp and sampleReporting.cpp.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError
from deploy.reading import read_bytes
from deploy.targets.tensorrt.gpu import device as device_of
from deploy.targets.tensorrt.inspector import layers_of
from deploy.targets.tensorrt.log import KeepingLogger, listening, process_logger
from deploy.targets.tensorrt.sdk import find
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt

    from deploy.machine import Device
    from deploy.metrics.latency import DeviceTimes
    from deploy.metrics.ran import RanLayer


class TensorrtSession:
    """An engine that is loaded on the GPU; made by `open`.

    Attributes:
        threads: host threads that an inference takes.
        device: the GPU, its driver and TensorRT.
    """

    threads = 1

    def __init__(
        self,
        engine: trt.ICudaEngine,
        context: trt.IExecutionContext,
        primary: Any,
        *,
        device: Device,
        cuda_graph: bool,
    ) -> None:
        import pycuda.driver as cuda

        self.device = device
        self._cuda = cuda
        self._primary = primary
        self._engine = engine
        self._context = context
        self._stream = cuda.Stream()
        self._events = [cuda.Event() for _ in range(4)]
        self._host: dict[str, Array] = {}
        self._device: dict[str, Any] = {}
        self._graph = _Graph(self._stream.handle) if cuda_graph else None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._enqueue_ms = 0.0
        self._kept: KeepingLogger
        specs = [_spec(engine, index) for index in range(engine.num_io_tensors)]
        self._inputs = [spec for is_input, spec in specs if is_input]
        self._outputs = [spec for is_input, spec in specs if not is_input]

    @classmethod
    def open(cls, path: Path, *, cuda_graph: bool = False) -> TensorrtSession:
        """Load an engine file.

        Raises:
            SdkMissingError: TensorRT, the driver or the GPU is missing.
            BackendError: the engine is of another TensorRT or GPU, or broken.
        """
        sdk = find()
        import pycuda.driver as cuda
        import tensorrt as trt

        data = read_bytes(path, what="a TensorRT engine", error=BackendError)
        primary = cuda.Device(0).retain_primary_context()
        with _current(primary), listening() as kept:
            trt.init_libnvinfer_plugins(process_logger(), "")
            engine = _runtime(kept).deserialize_cuda_engine(data)
            if engine is None:
                raise BackendError(
                    f"{path.name} must be an engine that TensorRT {sdk.version} built on {sdk.gpu}:"
                    f" {kept.words()}; build it again on this machine"
                )
            context = engine.create_execution_context()
            if context is None:
                raise BackendError(f"TensorRT could not load {path.name}: {kept.words()}")
            return cls(engine, context, primary, device=device_of(sdk), cuda_graph=cuda_graph)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the engine's order."""
        return self._inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the engine's order."""
        return self._outputs

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """One inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: a missing input, a shape outside the profile, a failing kernel.
        """
        with _current(self._primary), listening() as self._kept:
            return self._run(feed)

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        self._place(feed)
        start, copied, computed, end = self._events
        start.record(self._stream)
        for spec in self._inputs:
            source = self._host[spec.name]
            self._cuda.memcpy_htod_async(self._device[spec.name], source, self._stream)
        copied.record(self._stream)
        begin = time.perf_counter()
        self._enqueue()
        self._enqueue_ms = (time.perf_counter() - begin) * 1e3
        computed.record(self._stream)
        for spec in self._outputs:
            target = self._host[spec.name]
            self._cuda.memcpy_dtoh_async(target, self._device[spec.name], self._stream)
        end.record(self._stream)
        self._stream.synchronize()
        return {spec.name: self._host[spec.name].copy() for spec in self._outputs}

    def device_times(self) -> DeviceTimes:
        """Times of the last `run`, by the GPU's clock (enqueue by the host's)."""
        from deploy.metrics.latency import DeviceTimes

        marks = self._events
        with _current(self._primary):
            spans = [float(a.time_till(b)) for a, b in pairwise(marks)]
        h2d, compute, d2h = spans
        return DeviceTimes(h2d_ms=h2d, compute_ms=compute, d2h_ms=d2h, enqueue_ms=self._enqueue_ms)

    def layers(self) -> tuple[RanLayer, ...]:
        """What the engine is made of; nothing where it was built without a word on it."""
        with _current(self._primary), listening():
            return layers_of(self._engine, self._context)

    def _place(self, feed: Mapping[str, Array]) -> None:
        """Put the inputs into pinned memory; with new shapes, make every buffer anew."""
        arrays = {}
        for spec in self._inputs:
            if spec.name not in feed:
                raise BackendError(f"every input must be fed, got none for {spec.name!r}")
            arrays[spec.name] = np.ascontiguousarray(feed[spec.name], np.dtype(spec.dtype))
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != self._shapes:
            self._allocate(shapes)
        for name, array in arrays.items():
            self._host[name][...] = array

    def _allocate(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        import tensorrt as trt

        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, trt.Dims(list(shape))):
                raise BackendError(
                    f"an input must be within the engine's profile, got {list(shape)} for {name!r}:"
                    f" {self._kept.words()}"
                )
        for spec in [*self._inputs, *self._outputs]:
            shape = dims(self._context.get_tensor_shape(spec.name))
            if any(dim < 0 for dim in shape):
                raise BackendError(
                    f"the shape of output {spec.name!r} depends on its values, which is not"
                    " supported here"
                )
            host = self._cuda.pagelocked_empty(shape, np.dtype(spec.dtype))
            self._host[spec.name] = host
            self._device[spec.name] = self._cuda.mem_alloc(max(host.nbytes, 1))
            self._context.set_tensor_address(spec.name, int(self._device[spec.name]))
        self._shapes = dict(shapes)
        if self._graph is not None:
            self._graph.forget()

    def _enqueue(self) -> None:
        if self._graph is not None and self._graph.ready:
            self._graph.launch()
        elif not self._context.execute_async_v3(self._stream.handle):
            raise BackendError(f"TensorRT could not run the engine: {self._kept.words()}")
        elif self._graph is not None:  # the first run with new shapes may allocate: capture next
            self._stream.synchronize()
            self._graph.capture(lambda: self._context.execute_async_v3(self._stream.handle))


@contextmanager
def _current(context: Any) -> Iterator[None]:
    """Make a pycuda context the thread's own for a while; pycuda aborts on one left over."""
    context.push()
    try:
        yield
    finally:
        context.pop()


class _Graph:
    """One captured inference, by the driver API: pycuda has no binding for it."""

    def __init__(self, stream: int) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SdkMissingError(f"a CUDA graph needs the driver: {error}") from error
        self._stream = ctypes.c_void_p(stream)
        self._exec: ctypes.c_void_p | None = None

    @property
    def ready(self) -> bool:
        """Whether a graph was captured for the shapes in force."""
        return self._exec is not None

    def forget(self) -> None:
        """Drop the captured graph."""
        if self._exec is not None:
            self._driver.cuGraphExecDestroy(self._exec)
        self._exec = None

    def capture(self, enqueue: Any) -> None:
        """Record what `enqueue` puts on the stream."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, as trtexec captures
        self._must(self._driver.cuStreamBeginCapture_v2(self._stream, relaxed))
        fine = enqueue()
        self._must(self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph)))
        if not fine:
            raise BackendError("TensorRT could not run the engine in a CUDA graph; try without")
        instantiate = self._driver.cuGraphInstantiateWithFlags
        self._must(instantiate(ctypes.byref(made), graph, ctypes.c_ulonglong(0)))
        self._driver.cuGraphDestroy(graph)
        self._exec = made

    def launch(self) -> None:
        """Put the recorded inference on the stream."""
        self._must(self._driver.cuGraphLaunch(self._exec, self._stream))

    def _must(self, code: int) -> None:
        if code != 0:
            raise BackendError(f"a CUDA graph call failed with driver error {code}; try without")


def _runtime(kept: KeepingLogger) -> trt.Runtime:
    import tensorrt as trt

    try:
        return trt.Runtime(process_logger())
    except (TypeError, RuntimeError) as error:  # a null runtime, from a driver that does not fit
        said = kept.words() if kept.lines else error
        raise BackendError(f"TensorRT could not start on this machine: {said}") from error


def _spec(engine: trt.ICudaEngine, index: int) -> tuple[bool, TensorSpec]:
    """(whether it is an input, spec) of one of the engine's tensors."""
    import tensorrt as trt

    name = engine.get_tensor_name(index)
    shape = tuple(None if dim < 0 else dim for dim in dims(engine.get_tensor_shape(name)))
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    return is_input, TensorSpec(name, _dtype(engine.get_tensor_dtype(name)), shape)


def dims(shape: trt.Dims) -> tuple[int, ...]:
    """TensorRT's shape as a tuple; -1 where it is dynamic."""
    return tuple(int(shape[axis]) for axis in range(len(shape)))


def _dtype(data_type: trt.DataType) -> str:
    """Numpy name of a trt.DataType; `trt.nptype` of 8.5 fails with newer numpy."""
    words = {"FLOAT": "float32", "HALF": "float16", "BOOL": "bool"}
    name = str(data_type).rpartition(".")[2]
    return words.get(name, name.lower())
