"""The layers of a TensorRT engine, out of the JSON of its engine inspector.

An engine that was built with detailed profiling verbosity tells of each layer its name, its kind,
the format and type of what it reads and, since 8.6, the nodes of the ONNX model that it runs::

    {"Layers": [{"Name": "/a/Conv + /a/Relu", "LayerType": "CaskConvolution",
                 "Inputs": [{"Name": "x", "Format/Datatype": "Row major Int8 format"}], ...,
                 "Metadata": "[ONNX Layer: /a/Conv][ONNX Layer: /a/Relu]"}, ...]}

Any other engine tells names alone, of which nothing is made here. What a layer computes in is taken
from what it reads first, as NVIDIA's Engine Explorer takes it.

Sources: IEngineInspector in NvInferRuntime.h of 8.5 to 11.1; trex/layer.py and trex/activations.py
of NVIDIA/TensorRT's trt-engine-explorer, for the words of formats and types.

How long each layer of an engine takes, by TensorRT's own profiler.

Source: IProfiler and IExecutionContext.setProfiler in NvInferRuntime.h of 8.5 to 11.1: while one is
set, a context that is enqueued waits for itself and reports every layer, in milliseconds.

Throughput of several sessions at once, each on its own stream, as trtexec's --infStreams.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError
from deploy.metrics.kernels import RanLayer
from deploy.tensors import Array, Session

if TYPE_CHECKING:
    import tensorrt as trt


_NODE = re.compile(r"\[ONNX Layer: (.+?)\](?=\[|[\x1e\x1f]|\s*$)")
_FUSED = re.compile(r" \+ | \|\| |, |\bPWN\(|[()]")
_IDLE = frozenset({"Constant", "NoOp"})  # kinds that compute nothing
_REFORMAT = "Reformat"
# Words of a type, in lower case, in what TensorRT says of a tensor.
_TYPES = {
    "int8": "int8",
    "fp8": "fp8",
    "e4m3": "fp8",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "bool": "bool",
}


def layers_of(engine: trt.ICudaEngine, context: trt.IExecutionContext) -> tuple[RanLayer, ...]:
    """The layers of a loaded engine; none where it tells no more than their names."""
    import tensorrt as trt

    inspector = engine.create_engine_inspector()
    inspector.execution_context = context
    return read(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def read(text: str) -> tuple[RanLayer, ...]:
    """The layers in the inspector's JSON; those that compute nothing are left out."""
    try:
        document = json.loads(text)
    except ValueError:  # an engine without a word on its layers
        return ()
    listed = document.get("Layers", []) if isinstance(document, dict) else []
    told = [layer for layer in listed if isinstance(layer, dict)]
    return tuple(_layer(layer) for layer in told if layer.get("LayerType") not in _IDLE)


def _layer(layer: Mapping[str, Any]) -> RanLayer:
    name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    return RanLayer(
        name=name,
        kind=kind,
        precision=_precision(layer),
        nodes=_nodes(name, str(layer.get("Metadata", ""))),
        reformat=kind == _REFORMAT,
    )


def _precision(layer: Mapping[str, Any]) -> str:
    """Type of the first input, or of the first output of a layer that reads nothing."""
    tensors = [*(layer.get("Inputs") or []), *(layer.get("Outputs") or [])]
    said = str(tensors[0].get("Format/Datatype", "")) if tensors else ""
    words = re.findall(r"[a-z0-9]+", said.lower())
    return next((_TYPES[word] for word in words if word in _TYPES), "")


def _nodes(name: str, metadata: str) -> tuple[str, ...]:
    """Nodes by what the parser noted of them, or else by what the layer's name is joined from."""
    found = _NODE.findall(metadata) or filter(None, map(str.strip, _FUSED.split(name)))
    return tuple(dict.fromkeys(found))


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


def throughput(
    sessions: Sequence[Session],
    feeds: Sequence[Mapping[str, Array]],
    *,
    warmup_ms: float = 200,
    duration_s: float = 3,
) -> float:
    """Inferences a second of all sessions together.

    Latencies are not given: those of streams that share a device say nothing of one inference.
    Each run is waited for before the next is queued, so trtexec, which queues one ahead, may show
    more.

    Raises:
        ConfigError: no session or no feed.
        BackendError: a session refused a feed.
    """
    if not sessions or not feeds:
        raise ConfigError(f"got {len(sessions)} sessions and {len(feeds)} inputs, both must be > 0")
    _together(sessions, feeds, seconds=warmup_ms / 1e3)
    counted, seconds = _together(sessions, feeds, seconds=duration_s)
    return counted / seconds


def _together(
    sessions: Sequence[Session], feeds: Sequence[Mapping[str, Array]], *, seconds: float
) -> tuple[int, float]:
    """(inferences, seconds) of one thread a session, each running at least once."""
    counts = [0] * len(sessions)
    errors: list[BaseException] = []
    start = time.perf_counter()

    def work(index: int) -> None:
        try:
            while counts[index] == 0 or time.perf_counter() - start < seconds:
                sessions[index].run(feeds[counts[index] % len(feeds)])
                counts[index] += 1
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts), time.perf_counter() - start
