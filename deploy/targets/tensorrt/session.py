"""Run a TensorRT engine as a `Session`, timed with CUDA events as trtexec does.

One inference on one stream::

    events   0 ---- H2D ---- 1 ---- compute ---- 2 ---- D2H ---- 3
    host     |-- enqueue --| (of the compute part alone)

Shape tensors are in host memory, where TensorRT reads them at enqueue. Outputs with data-dependent
shapes are allocated by a callback while the engine runs (`OutputAllocator`). A CUDA graph is
captured through the driver API, which accepts the streams of both bindings.

Sources: NVIDIA/TensorRT samples/common/sampleInference.cpp and sampleReporting.cpp;
include/NvInferRuntime.h (IOutputAllocator: the shape is reported before `execute_async_v3` returns;
from 10 on the callback with a stream is preferred).
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from calibrators.tensorrt import BITS, from_device, host_type, to_device
from deploy.errors import BackendError, SdkMissingError
from deploy.feed.parallel import Sample
from deploy.files.reading import read_bytes
from deploy.machine import AcceleratorInfo
from deploy.metrics.kernels import EngineLayer
from deploy.metrics.latency import DeviceTimes
from deploy.targets.shape_ranges import Shape
from deploy.targets.tensorrt.cuda import Cuda, DeviceBuffer, open_gpu
from deploy.targets.tensorrt.inspector import layer_profiler, layers_of
from deploy.targets.tensorrt.log import LogRecorder, create_with_logger, record_log
from deploy.targets.tensorrt.sdk import Sdk, dtype_of, find_sdk, load_plugins, shape_of
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt


class OutputAllocator:
    """Callbacks of an output allocator for one output.

    Attributes:
        buffer: current device memory; None before the first run.
        error: exception of a callback, which TensorRT does not report.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.buffer: DeviceBuffer | None = None
        self.shape: Shape = ()
        self.error: BaseException | None = None

    def reallocate_output(
        self, tensor_name: str, memory: int | None, size: int, alignment: int
    ) -> int:
        """Return the address of at least `size` bytes, or 0 on failure."""
        try:
            if self.buffer is None or self.buffer.size < size:
                self.buffer = DeviceBuffer(self._cuda, size)
            return self.buffer.address
        except BaseException as error:
            self.error = error
            return 0

    def reallocate_output_async(
        self, tensor_name: str, memory: int | None, size: int, alignment: int, stream: int
    ) -> int:
        """As `reallocate_output`: freeing device memory waits for pending work."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: trt.Dims) -> None:
        """Record the output shape of this run."""
        self.shape = shape_of(shape)


def output_allocator(cuda: Cuda) -> OutputAllocator:
    """Return an allocator for `set_output_allocator`; keep it as long as the context lives."""
    import tensorrt as trt

    class Allocator(OutputAllocator, trt.IOutputAllocator):
        def __init__(self, cuda: Cuda) -> None:
            trt.IOutputAllocator.__init__(self)
            OutputAllocator.__init__(self, cuda)

    return Allocator(cuda)


class CudaGraph:
    """One captured inference that can be launched repeatedly on its stream."""

    def __init__(self, stream: int) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SdkMissingError(f"a CUDA graph needs the driver: {error}") from error
        self._stream = ctypes.c_void_p(stream)
        self._executable: ctypes.c_void_p | None = None

    @property
    def ready(self) -> bool:
        """Whether a graph is captured for the current shapes."""
        return self._executable is not None

    def forget(self) -> None:
        """Drop the captured graph."""
        if self._executable is not None:
            self._driver.cuGraphExecDestroy(self._executable)
        self._executable = None

    def capture(self, enqueue: Callable[[], bool]) -> None:
        """Capture the work that `enqueue` puts on the stream; it returns whether it succeeded.

        Raises:
            BackendError: the work cannot be captured, or the driver refuses a call.
        """
        graph = ctypes.c_void_p()
        executable = ctypes.c_void_p()
        relaxed_mode = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, as in trtexec
        self._check(self._driver.cuStreamBeginCapture_v2(self._stream, relaxed_mode))
        has_enqueued = enqueue()
        self._check(self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph)))
        if not has_enqueued:
            raise BackendError("TensorRT could not run the engine in a CUDA graph; try without")
        instantiate = self._driver.cuGraphInstantiateWithFlags
        self._check(instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
        self._driver.cuGraphDestroy(graph)
        self._executable = executable

    def launch(self) -> None:
        """Launch the captured inference on the stream."""
        self._check(self._driver.cuGraphLaunch(self._executable, self._stream))

    def _check(self, code: int) -> None:
        if code != 0:
            raise BackendError(f"a CUDA graph call failed with driver error {code}; try without")


_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_TIMEOUT_S = 20


def describe_device(installed: Sdk, cuda: Cuda) -> AcceleratorInfo:
    """Describe the GPU, driver, CUDA and TensorRT for the head of a report."""
    return AcceleratorInfo(
        name=installed.gpu,
        runtime=f"TensorRT {installed.version}",
        driver=driver_version(),
        cuda=cuda.newest,
    )


@cache
def driver_version() -> str:
    """Return the NVIDIA driver's version from nvidia-smi, or "" without it, as on a Jetson."""
    try:
        result = subprocess.run(
            _DRIVER_QUERY, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(result.stdout.split()), "")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input or output of an engine.

    Attributes:
        spec: name, shape and numpy's dtype.
        dtype: TensorRT's dtype.
        is_input: whether it is an input.
        on_host: whether TensorRT reads or writes it in host memory.
    """

    spec: TensorSpec
    dtype: str
    is_input: bool
    on_host: bool

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def buffer_dtype(self) -> str:
        """The dtype of its host buffer: integers of the same size where numpy has no such type."""
        return BITS.get(self.dtype, self.dtype)


class TensorrtSession:
    """An engine loaded on a GPU, made by `open`."""

    threads = 1

    def __init__(
        self,
        engine: trt.ICudaEngine,
        context: trt.IExecutionContext,
        cuda: Cuda,
        *,
        device: AcceleratorInfo,
        cuda_graph: bool,
    ) -> None:
        """Take over a loaded engine; buffers are allocated at the first run.

        Args:
            engine: the engine.
            context: its execution context.
            cuda: the GPU.
            device: description of the GPU, for a report.
            cuda_graph: capture an inference and launch it from then on.
        """
        self.device = device
        self._cuda = cuda
        self._engine = engine
        self._context = context
        self._stream = cuda.stream()
        self._events = [cuda.event() for _ in range(4)]  # around copies in, compute, copies out
        self._host_arrays: dict[str, Array] = {}
        self._device_buffers: dict[str, DeviceBuffer] = {}
        self._output_allocators: dict[str, OutputAllocator] = {}
        self._graph = CudaGraph(self._stream.handle) if cuda_graph else None
        # what buffers were allocated for: input -> its shape, and the bytes of its values if it
        # is a shape tensor in host memory, else b""; None before the first allocation
        self._allocated_for: dict[str, tuple[Shape, bytes]] | None = None
        self._enqueue_ms = 0.0  # host time of the last launch
        # a run sets these two: its messages, and a profiler that lives while the context uses it
        self._log: LogRecorder
        self._profiler: trt.IProfiler
        tensors = [_describe_tensor(engine, index) for index in range(engine.num_io_tensors)]
        self._inputs = [tensor for tensor in tensors if tensor.is_input]
        self._outputs = [tensor for tensor in tensors if not tensor.is_input]
        self.inputs: Sequence[TensorSpec] = [tensor.spec for tensor in self._inputs]
        self.outputs: Sequence[TensorSpec] = [tensor.spec for tensor in self._outputs]

    @classmethod
    def open(
        cls, path: Path, *, cuda_graph: bool = False, device: int = 0, plugins: Sequence[Path] = ()
    ) -> TensorrtSession:
        """Load an engine file on a GPU.

        Args:
            path: the engine.
            cuda_graph: run it from a captured CUDA graph.
            device: index of the GPU.
            plugins: plugin libraries to load before the engine.

        Raises:
            SdkMissingError: TensorRT, the driver or the GPU is missing.
            BackendError: the engine was built by another TensorRT or GPU, or is broken.
            ConfigError: there is no such GPU, or a library cannot be loaded.
        """
        installed = find_sdk(device)
        cuda = open_gpu(device)
        data = read_bytes(path, what="a TensorRT engine", error=BackendError)
        with cuda.current(), record_log() as log:
            load_plugins(plugins)
            runtime: trt.Runtime = create_with_logger("Runtime", log, purpose="start")
            if getattr(runtime, "num_DLA_cores", 0):  # for an engine that runs on DLA
                runtime.DLA_core = 0
            engine = runtime.deserialize_cuda_engine(data)
            if engine is None:
                raise BackendError(
                    f"{path.name} must be an engine that TensorRT {installed.version} built on"
                    f" {installed.gpu}: {log.summary()}; build it again on this machine"
                )
            context = engine.create_execution_context()
            if context is None:
                raise BackendError(f"TensorRT could not load {path.name}: {log.summary()}")
            device_info = describe_device(installed, cuda)
            return cls(engine, context, cuda, device=device_info, cuda_graph=cuda_graph)

    def run(self, feed: Sample) -> dict[str, Array]:
        """Run one inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: an input is missing or out of the range of its type, a shape is outside
                the profile, or a kernel failed.
        """
        with self._cuda.current(), record_log() as self._log:
            return self._run(feed)

    def _run(self, feed: Sample) -> dict[str, Array]:
        """Queue copies in, inference and copies out on the stream, then wait; return the outputs.

        Four events, before and after each of the three, measure their times (see `device_times`).
        """
        self._set_inputs({tensor.name: _stored_input(tensor, feed) for tensor in self._inputs})
        start, inputs_copied, computed, end = self._events

        self._cuda.record(start, self._stream)
        for tensor in self._inputs:
            if not tensor.on_host:  # TensorRT reads the others in host memory
                address = self._device_buffers[tensor.name].address
                self._cuda.copy_in_later(address, self._host_arrays[tensor.name], self._stream)

        self._cuda.record(inputs_copied, self._stream)
        enqueue_start = time.perf_counter()
        self._enqueue()
        self._enqueue_ms = (time.perf_counter() - enqueue_start) * 1e3

        self._cuda.record(computed, self._stream)
        for tensor in self._outputs:
            self._copy_out(tensor)
        self._cuda.record(end, self._stream)
        self._cuda.wait(self._stream)
        return {
            tensor.name: from_device(self._host_arrays[tensor.name], tensor.dtype)
            for tensor in self._outputs
        }

    def device_times(self) -> DeviceTimes:
        """Return the times of the last `run`, on the GPU's clock (enqueue on the host's)."""
        with self._cuda.current():
            h2d_ms, compute_ms, d2h_ms = (
                self._cuda.between_ms(start, end) for start, end in pairwise(self._events)
            )
        return DeviceTimes(
            h2d_ms=h2d_ms, compute_ms=compute_ms, d2h_ms=d2h_ms, enqueue_ms=self._enqueue_ms
        )

    def layer_times(self, feeds: Sequence[Sample], runs: int) -> list[tuple[str, str, float]]:
        """Profile `runs` inferences; return (layer, kind, ms) for each time that a layer ran.

        The profiler stays set and CUDA graphs stay off, so the session is slower afterwards. The
        kind is "" if the engine was built without layer details.
        """
        kind_by_layer = {layer.name: layer.kind for layer in self.layers()}
        self._graph = None
        self._profiler, times = layer_profiler()  # each run adds (layer, ms) to `times`
        self._context.profiler = self._profiler
        for index in range(runs):
            self.run(feeds[index % len(feeds)])
        return [(name, kind_by_layer.get(name, ""), time_ms) for name, time_ms in times]

    def layers(self) -> tuple[EngineLayer, ...]:
        """Return the engine's layers; none if it was built without layer details."""
        with self._cuda.current(), record_log():
            return layers_of(self._engine, self._context)

    def _set_inputs(self, arrays: Sample) -> None:
        """Copy the inputs to pinned memory; if their shapes are new, allocate all buffers first."""
        shapes_and_values = {}
        for tensor in self._inputs:
            array = arrays[tensor.name]
            # output shapes may depend on the values of an input in host memory
            values = array.tobytes() if tensor.on_host else b""
            shapes_and_values[tensor.name] = array.shape, values
        if shapes_and_values != self._allocated_for:
            self._allocated_for = None  # in case the allocation fails halfway
            self._allocate(arrays)
            self._allocated_for = shapes_and_values
        for name, array in arrays.items():
            self._host_arrays[name][...] = array

    def _allocate(self, arrays: Sample) -> None:
        """Allocate the memory of all inputs and outputs, and give TensorRT the addresses.

        Raises:
            BackendError: an input's shape is outside the engine's profile, or an output's shape is
                not known before the run, and a CUDA graph was asked for.
        """
        import tensorrt as trt

        if self._graph is not None:
            self._graph.forget()  # it was captured with the old shapes and addresses
        for tensor in self._inputs:
            array = arrays[tensor.name]
            if not self._context.set_input_shape(tensor.name, trt.Dims(list(array.shape))):
                raise BackendError(
                    f"an input must be within the engine's profile, got {list(array.shape)} for"
                    f" {tensor.name!r}: {self._log.summary()}"
                )
            self._allocate_static(tensor, array.shape)
            # the values too: output shapes may depend on those of an input that holds a shape
            self._host_arrays[tensor.name][...] = array
        for tensor in self._outputs:
            shape = shape_of(self._context.get_tensor_shape(tensor.name))
            if -1 in shape:  # it depends on values that the engine computes
                self._allocate_dynamic(tensor)
            else:
                self._allocate_static(tensor, shape)

    def _allocate_static(self, tensor: _Tensor, shape: Shape) -> None:
        """Allocate pinned host memory and, unless the tensor is on the host, device memory."""
        host_array = self._cuda.pinned(shape, tensor.buffer_dtype)
        self._host_arrays[tensor.name] = host_array
        if tensor.on_host:
            address = int(host_array.ctypes.data)
        else:
            buffer = DeviceBuffer(self._cuda, host_array.nbytes)
            self._device_buffers[tensor.name] = buffer
            address = buffer.address
        self._context.set_tensor_address(tensor.name, address)

    def _allocate_dynamic(self, tensor: _Tensor) -> None:
        """Let TensorRT allocate an output while it runs, when its shape is known."""
        if self._graph is not None:
            raise BackendError(
                "a CUDA graph must know every shape beforehand, and that of output"
                f" {tensor.name!r} depends on values; run without the graph"
            )
        if tensor.name not in self._output_allocators:
            allocator = output_allocator(self._cuda)
            self._output_allocators[tensor.name] = allocator
            self._context.set_output_allocator(tensor.name, cast("trt.IOutputAllocator", allocator))

    def _copy_out(self, tensor: _Tensor) -> None:
        """Queue the copy of an output to the host."""
        allocator = self._output_allocators.get(tensor.name)
        if allocator is not None:
            buffer = allocator.buffer
            self._host_arrays[tensor.name] = self._cuda.pinned(allocator.shape, tensor.buffer_dtype)
        else:
            buffer = self._device_buffers.get(tensor.name)
        host_array = self._host_arrays[tensor.name]
        if buffer is not None and host_array.size:
            self._cuda.copy_out_later(host_array, buffer.address, self._stream)

    def _enqueue(self) -> None:
        """Queue one inference on the stream, from the captured CUDA graph if there is one."""
        if self._graph is not None and self._graph.ready:
            self._graph.launch()
            return
        if not self._context.execute_async_v3(self._stream.handle):
            for allocator in self._output_allocators.values():
                if allocator.error is not None:
                    raise allocator.error
            raise BackendError(f"TensorRT could not run the engine: {self._log.summary()}")
        # captured after the first run with these shapes, in which TensorRT may allocate memory
        if self._graph is not None:
            self._cuda.wait(self._stream)
            self._graph.capture(lambda: self._context.execute_async_v3(self._stream.handle))


def _describe_tensor(engine: trt.ICudaEngine, index: int) -> _Tensor:
    """Return the name, shape, types and place of an engine's input or output."""
    import tensorrt as trt

    name = engine.get_tensor_name(index)
    shape = tuple(None if dim < 0 else dim for dim in shape_of(engine.get_tensor_shape(name)))
    dtype = dtype_of(engine.get_tensor_dtype(name))
    return _Tensor(
        spec=TensorSpec(name, host_type(dtype), shape),
        dtype=dtype,
        is_input=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        on_host=engine.get_tensor_location(name) == trt.TensorLocation.HOST,
    )


def _stored_input(tensor: _Tensor, feed: Sample) -> Array:
    """Return an input of the feed in the type that TensorRT reads."""
    if tensor.name not in feed:
        raise BackendError(f"every input must be fed, got none for {tensor.name!r}")
    try:
        return to_device(feed[tensor.name], tensor.dtype)
    except ValueError as error:
        raise BackendError(f"TensorRT reads {tensor.name!r} as {error}") from None
