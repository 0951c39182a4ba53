"""One captured inference, by the driver API: it takes the streams of either binding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from deploy.errors import BackendError, SdkMissingError


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
