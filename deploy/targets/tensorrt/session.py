"""A TensorRT engine behind the `Session` protocol, timed by CUDA events as trtexec times it.

One inference on one stream::

    events   0 ---- H2D ---- 1 ---- compute ---- 2 ---- D2H ---- 3
    host     |-- enqueue --| (of the compute part alone)

Inputs that shapes depend on lie in host memory, where TensorRT reads them when it is enqueued.
Outputs whose shape depends on values get their memory while it runs.

Source: NVIDIA/TensorRT samples/common/sampleInference.cpp and sampleReporting.cpp.

Memory for outputs whose shape depends on values: TensorRT asks for it while it runs.

Source: NVIDIA/TensorRT include/NvInferRuntime.h (IOutputAllocator): the shape is told before
`execute_async_v3` returns. From 10 on the call with a stream is asked first.

One captured inference, by the driver API: it takes the streams of either binding.

What an engine runs on, for a report's head: the GPU, NVIDIA's driver, CUDA and TensorRT.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from calibrators.tensorrt import BITS, host_type, loaded, stored
from deploy.errors import BackendError, SdkMissingError
from deploy.files.reading import read_bytes
from deploy.machine import Device
from deploy.targets.tensorrt.cuda import Buffer, Cuda
from deploy.targets.tensorrt.inspector import layers_of, listener
from deploy.targets.tensorrt.sdk import (
    KeepingLogger,
    Sdk,
    dims,
    dtype_of,
    find,
    gpu,
    listening,
    load_plugins,
    process_logger,
)
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt

    from deploy.metrics.kernels import RanLayer
    from deploy.metrics.latency import DeviceTimes


class Growing:
    """What an allocator of one output does when TensorRT calls.

    Attributes:
        buffer: the memory in force; None before the first run.
        shape: of the last run.
        error: what went wrong in a call, which TensorRT swallows.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.buffer: Buffer | None = None
        self.shape: tuple[int, ...] = ()
        self.error: BaseException | None = None

    def reallocate_output(
        self, tensor_name: str, memory: int | None, size: int, alignment: int
    ) -> int:
        """Address of at least `size` bytes; 0 where there are none."""
        try:
            if self.buffer is None or self.buffer.size < size:
                self.buffer = Buffer(self._cuda, size)
            return self.buffer.address
        except BaseException as error:
            self.error = error
            return 0

    def reallocate_output_async(
        self, tensor_name: str, memory: int | None, size: int, alignment: int, stream: int
    ) -> int:
        """The same: CUDA's own allocation waits for what uses the old memory."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: trt.Dims) -> None:
        """Keep the shape of this run."""
        self.shape = dims(shape)


def growing(cuda: Cuda) -> Growing:
    """An allocator for `IExecutionContext.set_output_allocator`; to be kept as long as that."""
    import tensorrt as trt

    class Allocator(Growing, trt.IOutputAllocator):
        def __init__(self, cuda: Cuda) -> None:
            trt.IOutputAllocator.__init__(self)
            Growing.__init__(self, cuda)

    return Allocator(cuda)


class CudaGraph:
    """What was recorded on a stream, to be launched again."""

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

    def capture(self, enqueue: Callable[[], bool]) -> None:
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


_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 20


def device_of(here: Sdk, cuda: Cuda) -> Device:
    """The GPU, and what drives it."""
    return Device(
        name=here.gpu,
        runtime=f"TensorRT {here.version}",
        driver=driver_version(),
        cuda=cuda.newest,
    )


@cache
def driver_version() -> str:
    """Version of NVIDIA's driver, by its own tool; "" where that is missing, as on a Jetson."""
    try:
        said = subprocess.run(
            _DRIVER, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.stdout.split()), "")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input or output of an engine.

    Attributes:
        spec: as numpy sees it.
        dtype: as TensorRT has it.
        fed: whether it is an input.
        hosted: whether TensorRT reads or writes it in host memory.
    """

    spec: TensorSpec
    dtype: str
    fed: bool
    hosted: bool

    @property
    def name(self) -> str:
        return self.spec.name


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
        cuda: Cuda,
        *,
        device: Device,
        cuda_graph: bool,
    ) -> None:
        self.device = device
        self._cuda = cuda
        self._engine = engine
        self._context = context
        self._stream = cuda.stream()
        self._events = [cuda.event() for _ in range(4)]
        self._host: dict[str, Array] = {}
        self._device: dict[str, Buffer] = {}
        self._growing: dict[str, Growing] = {}
        self._graph = CudaGraph(self._stream.handle) if cuda_graph else None
        self._placed: dict[str, tuple[tuple[int, ...], bytes]] | None = None
        self._enqueue_ms = 0.0
        self._kept: KeepingLogger
        self._profiler: trt.IProfiler
        tensors = [_tensor(engine, index) for index in range(engine.num_io_tensors)]
        self._fed = [tensor for tensor in tensors if tensor.fed]
        self._made = [tensor for tensor in tensors if not tensor.fed]

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        cuda_graph: bool = False,
        device: int = 0,
        plugins: Sequence[Path] = (),
    ) -> TensorrtSession:
        """Load an engine file on a GPU, with the plugins of these libraries.

        Raises:
            SdkMissingError: TensorRT, the driver or the GPU is missing.
            BackendError: the engine is of another TensorRT or GPU, or broken.
            ConfigError: no such GPU, or a library that cannot be loaded.
        """
        sdk = find(device)
        cuda = gpu(device)
        data = read_bytes(path, what="a TensorRT engine", error=BackendError)
        with cuda.current(), listening() as kept:
            load_plugins(plugins)
            engine = _runtime(kept).deserialize_cuda_engine(data)
            if engine is None:
                raise BackendError(
                    f"{path.name} must be an engine that TensorRT {sdk.version} built on {sdk.gpu}:"
                    f" {kept.words()}; build it again on this machine"
                )
            context = engine.create_execution_context()
            if context is None:
                raise BackendError(f"TensorRT could not load {path.name}: {kept.words()}")
            about = device_of(sdk, cuda)
            return cls(engine, context, cuda, device=about, cuda_graph=cuda_graph)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the engine's order; bfloat16 and float8 are float32 here."""
        return [tensor.spec for tensor in self._fed]

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the engine's order."""
        return [tensor.spec for tensor in self._made]

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """One inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: a missing input, one that its type cannot hold, a shape outside the
                profile, a failing kernel.
        """
        with self._cuda.current(), listening() as self._kept:
            return self._run(feed)

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        self._place({tensor.name: _stored(tensor, feed) for tensor in self._fed})
        start, copied, computed, end = self._events
        self._cuda.record(start, self._stream)
        for name in (tensor.name for tensor in self._fed if not tensor.hosted):
            address = self._device[name].address
            self._cuda.copy_in_later(address, self._host[name], self._stream)
        self._cuda.record(copied, self._stream)
        begin = time.perf_counter()
        self._enqueue()
        self._enqueue_ms = (time.perf_counter() - begin) * 1e3
        self._cuda.record(computed, self._stream)
        for tensor in self._made:
            self._fetch(tensor)
        self._cuda.record(end, self._stream)
        self._cuda.wait(self._stream)
        return {tensor.name: loaded(self._host[tensor.name], tensor.dtype) for tensor in self._made}

    def device_times(self) -> DeviceTimes:
        """Times of the last `run`, by the GPU's clock (enqueue by the host's)."""
        from deploy.metrics.latency import DeviceTimes

        with self._cuda.current():
            spans = [self._cuda.between_ms(a, b) for a, b in pairwise(self._events)]
        h2d, compute, d2h = spans
        return DeviceTimes(h2d_ms=h2d, compute_ms=compute, d2h_ms=d2h, enqueue_ms=self._enqueue_ms)

    def layer_times(
        self, feeds: Sequence[Mapping[str, Array]], runs: int
    ) -> list[tuple[str, str, float]]:
        """(layer, its kind, ms) of every time that a layer ran; the session is slower from then on.

        TensorRT takes no CUDA graph meanwhile. The kind is "" where the engine was built without a
        word on its layers.

        Raises:
            BackendError: as `run`.
        """
        kinds = {layer.name: layer.kind for layer in self.layers()}
        self._graph = None
        self._profiler, times = listener()
        self._context.profiler = self._profiler
        for index in range(runs):
            self.run(feeds[index % len(feeds)])
        return [(name, kinds.get(name, ""), taken) for name, taken in times]

    def layers(self) -> tuple[RanLayer, ...]:
        """What the engine is made of; nothing where it was built without a word on it."""
        with self._cuda.current(), listening():
            return layers_of(self._engine, self._context)

    def _place(self, arrays: Mapping[str, Array]) -> None:
        """Put the inputs into pinned memory; with new shapes, make every buffer anew."""
        hosted = {tensor.name for tensor in self._fed if tensor.hosted}
        wanted = {n: (a.shape, a.tobytes() if n in hosted else b"") for n, a in arrays.items()}
        if wanted != self._placed:
            self._placed = None  # until all of it is done
            self._allocate(arrays)
            self._placed = wanted
        for name, array in arrays.items():
            self._host[name][...] = array

    def _allocate(self, arrays: Mapping[str, Array]) -> None:
        """Tell TensorRT shapes and addresses; those of the outputs follow from the inputs'."""
        import tensorrt as trt

        if self._graph is not None:
            self._graph.forget()
        for tensor in self._fed:
            array = arrays[tensor.name]
            if not self._context.set_input_shape(tensor.name, trt.Dims(list(array.shape))):
                raise BackendError(
                    f"an input must be within the engine's profile, got {list(array.shape)} for"
                    f" {tensor.name!r}: {self._kept.words()}"
                )
            self._reserve(tensor, array.shape)
            self._host[tensor.name][...] = array
        for tensor in self._made:
            shape = dims(self._context.get_tensor_shape(tensor.name))
            if -1 in shape:
                self._let_grow(tensor)
            else:
                self._reserve(tensor, shape)

    def _reserve(self, tensor: _Tensor, shape: tuple[int, ...]) -> None:
        """Memory of a known size on the host and, but for what is hosted, on the device."""
        host = self._cuda.pinned(shape, BITS.get(tensor.dtype, tensor.dtype))
        self._host[tensor.name] = host
        address = int(host.ctypes.data)
        if not tensor.hosted:
            self._device[tensor.name] = Buffer(self._cuda, host.nbytes)
            address = self._device[tensor.name].address
        self._context.set_tensor_address(tensor.name, address)

    def _let_grow(self, tensor: _Tensor) -> None:
        """Memory that TensorRT asks for when it knows how much."""
        if self._graph is not None:
            raise BackendError(
                "a CUDA graph must know every shape beforehand, and that of output"
                f" {tensor.name!r} depends on values; run without the graph"
            )
        if tensor.name not in self._growing:
            self._growing[tensor.name] = made = growing(self._cuda)
            self._context.set_output_allocator(tensor.name, cast("trt.IOutputAllocator", made))

    def _fetch(self, tensor: _Tensor) -> None:
        """Have an output copied to the host."""
        buffer: Buffer | None
        if (grown := self._growing.get(tensor.name)) is not None:
            dtype = BITS.get(tensor.dtype, tensor.dtype)
            self._host[tensor.name] = self._cuda.pinned(grown.shape, dtype)
            buffer = grown.buffer
        else:
            buffer = self._device.get(tensor.name)
        host = self._host[tensor.name]
        if buffer is not None and host.size:
            self._cuda.copy_out_later(host, buffer.address, self._stream)

    def _enqueue(self) -> None:
        if self._graph is not None and self._graph.ready:
            self._graph.launch()
        elif not self._context.execute_async_v3(self._stream.handle):
            for grown in self._growing.values():
                if grown.error is not None:
                    raise grown.error
            raise BackendError(f"TensorRT could not run the engine: {self._kept.words()}")
        elif self._graph is not None:  # the first run with new shapes may allocate: capture next
            self._cuda.wait(self._stream)
            self._graph.capture(lambda: self._context.execute_async_v3(self._stream.handle))


def _runtime(kept: KeepingLogger) -> trt.Runtime:
    import tensorrt as trt

    try:
        return trt.Runtime(process_logger())
    except (TypeError, RuntimeError) as error:  # a null runtime, from a driver that does not fit
        said = kept.words() if kept.lines else error
        raise BackendError(f"TensorRT could not start on this machine: {said}") from error


def _tensor(engine: trt.ICudaEngine, index: int) -> _Tensor:
    """One of the engine's tensors."""
    import tensorrt as trt

    name = engine.get_tensor_name(index)
    shape = tuple(None if dim < 0 else dim for dim in dims(engine.get_tensor_shape(name)))
    dtype = dtype_of(engine.get_tensor_dtype(name))
    return _Tensor(
        spec=TensorSpec(name, host_type(dtype), shape),
        dtype=dtype,
        fed=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
        hosted=engine.get_tensor_location(name) == trt.TensorLocation.HOST,
    )


def _stored(tensor: _Tensor, feed: Mapping[str, Array]) -> Array:
    if tensor.name not in feed:
        raise BackendError(f"every input must be fed, got none for {tensor.name!r}")
    try:
        return stored(feed[tensor.name], tensor.dtype)
    except ValueError as error:
        raise BackendError(f"TensorRT reads {tensor.name!r} as {error}") from None
