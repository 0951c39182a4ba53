"""Layers and layer times of a TensorRT engine.

With detailed profiling verbosity, the engine inspector's JSON gives for each layer its name, kind,
the format and type of its inputs and, since 8.6, the ONNX nodes that it runs::

    {"Layers": [{"Name": "/a/Conv + /a/Relu", "LayerType": "CaskConvolution",
                 "Inputs": [{"Name": "x", "Format/Datatype": "Row major Int8 format"}], ...,
                 "Metadata": "[ONNX Layer: /a/Conv][ONNX Layer: /a/Relu]"}, ...]}

TensorRT 11 has two keys, "Datatype" and "Format", in place of "Format/Datatype". Other engines give
names only, which are not used here. A layer's precision is the type of its first input, as in
NVIDIA's Engine Explorer. What DLA or Myelin compiled is one layer, "{ForeignNode[first...last]}",
and its inputs say nothing of the types inside.

Sources: IEngineInspector, IProfiler and IExecutionContext.setProfiler in NvInferRuntime.h of 8.5 to
11.4 (with a profiler set, each enqueue is synchronous and reports every layer in milliseconds);
trex/layer.py and trex/activations.py of NVIDIA/TensorRT's trt-engine-explorer, for the spelling of
formats and types; polygraphy/backend/trt/util.py of 0.53.6 for the keys of TensorRT 11.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from deploy.metrics.kernels import EngineLayer

if TYPE_CHECKING:
    import tensorrt as trt


_NODE_IN_METADATA = re.compile(r"\[ONNX Layer: (.+?)\](?=\[|[\x1e\x1f]|\s*$)")
# between the nodes of a fused layer's name, such as "/a/Conv + PWN(/a/Sigmoid, /a/Mul)"
_NODE_SEPARATOR = re.compile(r" \+ | \|\| |, |\bPWN\(|[()]")
_FOREIGN_NODE = re.compile(r"\{ForeignNode\[(.+)\]\}")  # of one node, or "first...last"
_IDLE_KINDS = frozenset({"Constant", "NoOp"})  # of layers that compute nothing
# Spellings of a type, in lower case, in the inspector's "Format/Datatype" -> its name.
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


def layers_of(engine: trt.ICudaEngine, context: trt.IExecutionContext) -> tuple[EngineLayer, ...]:
    """Return the layers of a loaded engine; none if it was built without layer details."""
    import tensorrt as trt

    inspector = engine.create_engine_inspector()
    inspector.execution_context = context
    return parse_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def parse_layers(text: str) -> tuple[EngineLayer, ...]:
    """Parse the inspector's JSON; layers that compute nothing are left out."""
    try:
        document = json.loads(text)
    except ValueError:  # an engine without layer information
        return ()
    json_layers = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(json_layers, list):
        return ()
    detailed_layers = []
    for json_layer in json_layers:
        with suppress(ValueError):  # a name only, or a form of another version
            detailed_layers.append(msgspec.convert(json_layer, _InspectedLayer))
    return tuple(
        _describe_layer(layer) for layer in detailed_layers if layer.kind not in _IDLE_KINDS
    )


class _InspectedLayer(msgspec.Struct):
    name: str = msgspec.field(name="Name", default="")
    kind: str = msgspec.field(name="LayerType", default="")
    metadata: str | None = msgspec.field(name="Metadata", default=None)
    inputs: list[dict[str, Any]] | None = msgspec.field(name="Inputs", default=None)
    outputs: list[dict[str, Any]] | None = msgspec.field(name="Outputs", default=None)


def _describe_layer(layer: _InspectedLayer) -> EngineLayer:
    """Return a layer of an engine with its ONNX nodes and its precision.

    A block that Myelin or DLA compiled is one layer, named "{ForeignNode[first...last]}". It has no
    precision: its inputs do not show the types inside. Its nodes are known if its metadata lists
    them, or if it has a single one; else only the first and the last one are known.
    """
    name = layer.name
    kind = layer.kind
    metadata = layer.metadata or ""
    block_match = _FOREIGN_NODE.fullmatch(name)
    if block_match is None:
        return EngineLayer(
            name=name,
            kind=kind,
            precision=_precision(layer),
            nodes=_find_nodes(name, metadata),
            reformat=kind == "Reformat",
        )
    block_name = block_match[1]
    first_node, dots, last_node = block_name.partition("...")
    lists_nodes = _NODE_IN_METADATA.search(metadata) is not None
    if lists_nodes or not dots:  # all nodes are known
        return EngineLayer(
            name=name, kind=kind, nodes=_find_nodes(block_name, metadata), block=kind
        )
    # either end may itself be the name of several fused nodes
    end_nodes = _find_nodes(first_node, "")[0], _find_nodes(last_node, "")[-1]
    return EngineLayer(name=name, kind=kind, block=kind, end_nodes=end_nodes)


def _precision(layer: _InspectedLayer) -> str:
    """Return the type of the first input, or of the first output if there are no inputs."""
    tensors = [*(layer.inputs or ()), *(layer.outputs or ())]
    if not tensors:
        return ""
    text = str(tensors[0].get("Datatype", tensors[0].get("Format/Datatype", "")))
    for token in re.findall(r"[a-z0-9]+", text.lower()):
        if token in _TYPES:
            return _TYPES[token]
    return ""


def _find_nodes(name: str, metadata: str) -> tuple[str, ...]:
    """Return the ONNX nodes that a layer's metadata names, or else its fused name."""
    nodes: list[str] = _NODE_IN_METADATA.findall(metadata)
    if not nodes:
        nodes = [*filter(None, map(str.strip, _NODE_SEPARATOR.split(name)))]
    return tuple(dict.fromkeys(nodes))


def layer_profiler() -> tuple[trt.IProfiler, list[tuple[str, float]]]:
    """Return a profiler to be set in a context, and the list to which each run adds layer times.

    A layer time is (layer, milliseconds). Keep a reference to the profiler as long as the context
    lives.
    """
    import tensorrt as trt

    times: list[tuple[str, float]] = []

    class Listener(trt.IProfiler):
        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times.append((layer_name, float(ms)))

    return Listener(), times
