"""How long each layer of an engine takes, by TensorRT's own profiler.

Source: IProfiler and IExecutionContext.setProfiler in NvInferRuntime.h of 8.5 to 11.1: while one is
set, a context that is enqueued waits for itself and reports every layer, in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorrt as trt


def listener() -> tuple[trt.IProfiler, list[tuple[str, float]]]:
    """A profiler for a context, and (layer, ms) of all that it is told, which grows with each run.

    It is to be kept as long as the context.
    """
    import tensorrt as trt

    found: list[tuple[str, float]] = []

    class Listener(trt.IProfiler):
        """Keeps what is reported."""

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            found.append((layer_name, float(ms)))

    return Listener(), found
