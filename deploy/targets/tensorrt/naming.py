"""Which tensors a TensorRT calibration cache lists for a model, and under which names.

Entropy2 and MinMax calibrate before any fusion, so the cache lists every float activation of the
network that the parser built: also what a Conv gives before its Relu or BatchNormalization. A
tensor carries its ONNX name, but for those that the parser puts inside one ONNX node::

    ONNX parser of 7.x to 8.3          Gemm = Shuffle -> Fully Connected -> Shuffle
        (Unnamed Layer* 5) [Shuffle]_output, (Unnamed Layer* 6) [Fully Connected]_output, fc1
    ONNX parser from 10                Gemm = MatrixMultiply -> + bias, Softmax = Softmax -> Shuffle
        <name of the node>_output, fc1
    Caffe parser (taken before 8)      no Flatten; a Relu in place takes the name of its layer
        (Unnamed Layer* 4) [Fully Connected]_output, ip1

The number is the layer's index in the network, so every layer before it must be counted; where one
cannot be (an operator of which it is not established how many layers it becomes), the tensor is
left out, which TensorRT answers with a "missing scale" warning and no harm: it is inside one node.

Pooling outputs carry the scale of the pool's input; their own values are not looked at.

Sources: onnx/onnx-tensorrt, builtin_op_importers.cpp at release/7.2.1 to 8.2 (Gemm) and
onnxOpImporters.cpp at 10.1; caches written by TensorRT 7.2.1 (VGG16, layer counts), 7.2.2 (LeNet
by the Caffe parser, pooling), 10.3.0, 10.10.0 (Gemm and Softmax) and 10.14.1 (YOLOv8n: all of its
backbone and neck, pooling).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.calibration.trt_cache import version_label
from deploy.graph.index import Graph, attributes, fed_inputs

if TYPE_CHECKING:
    import onnx

ONNX, CAFFE = "onnx", "caffe"
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
_SAME = frozenset({"Identity", "Dropout"})
_FLOAT = 1
# ONNX operator -> TensorRT's word for the one layer that it becomes.
_LAYER_WORDS = {
    "Conv": "Convolution",
    "ConvTranspose": "Deconvolution",
    "MaxPool": "Pooling",
    "AveragePool": "Pooling",
    "Relu": "Activation",
    "LeakyRelu": "Activation",
    "Sigmoid": "Activation",
    "Tanh": "Activation",
    "Clip": "Activation",
    "BatchNormalization": "Scale",
    "Add": "ElementWise",
    "Sum": "ElementWise",
    "Concat": "Concatenation",
    "Flatten": "Shuffle",
    "GlobalAveragePool": "Reduce",
    "Softmax": "Softmax",
}


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One entry of the cache to be.

    Attributes:
        name: the key in the cache.
        source: the ONNX tensor whose values it has.
        shares: the ONNX tensor whose scale it copies (the input of a pool), or None.
    """

    name: str
    source: str
    shares: str | None = None


def trt_tensors(model: onnx.ModelProto) -> list[str]:
    """ONNX tensors that a TensorRT cache wants statistics of, in the network's order.

    `model` is cleaned but keeps its BatchNormalization nodes (`load(..., fold_batchnorm=False)`).
    Float graph inputs and every float node output, whatever feeds a shape or an index left out.
    """
    graph = Graph(model)
    # one whose type inference could not tell counts as float
    return [n for n in [*graph.inputs, *graph.producer] if graph.dtypes.get(n, 0) in (0, _FLOAT)]


def cache_tensors(
    model: onnx.ModelProto,
    *,
    version: str,
    parser: str | None = None,
    original: onnx.ModelProto | None = None,
) -> list[CacheTensor]:
    """The entries of the cache that TensorRT `version` would write for `model`, in order.

    Args:
        model: cleaned, with its BatchNormalization nodes.
        version: "X.Y.Z".
        parser: ONNX or CAFFE; None takes `likely_parser`.
        original: the model as TensorRT reads it, for the names of nodes and for the tensors of
            Identity, Dropout and idle Cast nodes, which cleaning removes; None takes `model`.
    """
    seen = original if original is not None else model
    if (parser or likely_parser(seen, version)) == CAFFE:
        return _caffe_tensors(model)
    return _onnx_tensors(model, seen, version_label(version))


def scale_owners(tensors: Iterable[CacheTensor]) -> dict[str, str]:
    """Name of each entry -> the ONNX tensor whose scale it has: its own, or a pool's input."""
    listed = list(tensors)
    pooled = {tensor.source: tensor.shares for tensor in listed if tensor.shares is not None}
    owners = {}
    for tensor in listed:
        owner = tensor.source
        while owner in pooled:
            owner = pooled[owner]
        owners[tensor.name] = owner
    return owners


def likely_parser(model: onnx.ModelProto, version: str) -> str:
    """CAFFE for a network that came from Caffe and a TensorRT before 8, else ONNX.

    Taken as from Caffe: an ONNX file that no exporter signed (no producer, no node names) whose
    only input is called "data", as Caffe's models call it.
    """
    unsigned = not model.producer_name and not any(node.name for node in model.graph.node)
    inputs = [value.name for value in fed_inputs(model.graph)]
    caffe = unsigned and inputs == ["data"] and version_label(version) < 8000
    return CAFFE if caffe else ONNX


def unnamed(index: int, word: str) -> str:
    """TensorRT's own name for the first output of its layer `index`, until 9."""
    return f"(Unnamed Layer* {index}) [{word}]_output"


def inner_name(name: str, output: str) -> str:
    """TensorRT's name, from 10, for what the first layer of the node `name` gives.

    Of a Gemm that is the product before the bias, of a Softmax the result before its reshape.
    """
    return f"{name or f'node_of_{output}'}_output"


def _onnx_tensors(model: onnx.ModelProto, seen: onnx.ModelProto, label: int) -> list[CacheTensor]:
    graph, listed = Graph(model), trt_tensors(model)
    known, pooled = set(listed), _pooled(graph)
    names = {node.output[0]: node.name for node in seen.graph.node if node.output}
    layers = _layer_indices(seen, label)
    tensors = [CacheTensor(n, n) for n in listed if n not in graph.producer]
    for node in graph.nodes:
        first = node.output[0]
        if node.op_type in ("Gemm", "Softmax") and {node.input[0], first} <= known:
            tensors += _inside(node, layers.get(first), label, names.get(first, ""))
        tensors += [CacheTensor(n, n, pooled.get(n)) for n in node.output if n in known]
    for copy, source in _removed(seen, known).items():
        place = max(i for i, tensor in enumerate(tensors) if tensor.source == source)
        tensors.insert(place + 1, CacheTensor(copy, source))
    return tensors


def _inside(node: onnx.NodeProto, layer: int | None, label: int, name: str) -> list[CacheTensor]:
    """The tensors that the parser makes inside a Gemm or Softmax, as far as they can be named."""
    if label >= 100000:
        made = inner_name(name, node.output[0])
        if node.op_type == "Softmax":
            return [CacheTensor(made, node.output[0])]
        return [CacheTensor(made, made)] if len(node.input) > 2 and node.input[2] else []
    if label >= 8400 or layer is None or node.op_type == "Softmax":
        return []
    return [
        CacheTensor(unnamed(layer, "Shuffle"), node.input[0]),
        CacheTensor(unnamed(layer + 1, "Fully Connected"), node.output[0]),
    ]


def _layer_indices(model: onnx.ModelProto, label: int) -> dict[str, int]:
    """First output of a node -> index of its first layer, up to the first node not established."""
    found: dict[str, int] = {}
    layers = 0
    for node in model.graph.node if label < 8400 else []:
        if node.op_type == "Constant":
            continue
        found[node.output[0]] = layers
        if node.op_type == "Gemm":
            layers += 3
        elif (node.op_type in _LAYER_WORDS or node.op_type in _SAME) and node.op_type != "Softmax":
            layers += 1
        else:
            break
    return found


def _caffe_tensors(model: onnx.ModelProto) -> list[CacheTensor]:
    """Caffe: inner products flatten by themselves, and a Relu works in place.

    The layer before such a Relu loses its name to it and shows under its index.
    """
    graph, listed = Graph(model), trt_tensors(model)
    known, pooled = set(listed), _pooled(graph)
    tensors = [CacheTensor(n, n) for n in listed if n not in graph.producer]
    layers: int | None = 0
    for node in graph.nodes:
        out = node.output[0]
        ops = [n.op_type for n in graph.readers.get(out, [])]
        if node.op_type in {"Flatten", "Reshape"} and set(ops) == {"Gemm"}:
            continue
        word = "Fully Connected" if node.op_type == "Gemm" else _LAYER_WORDS.get(node.op_type)
        name: str | None = out
        if ops == ["Relu"]:
            name = unnamed(layers, word) if layers is not None and word else None
        if name is not None and out in known:
            tensors.append(CacheTensor(name, out, pooled.get(out)))
        layers = layers + 1 if layers is not None and word else None
    return tensors


def _pooled(graph: Graph) -> dict[str, str]:
    """Output of a pool -> its input."""
    return {n.output[0]: n.input[0] for n in graph.nodes if n.op_type in POOLS}


def _removed(original: onnx.ModelProto, known: Collection[str]) -> dict[str, str]:
    """Outputs of nodes that cleaning removed, which change nothing -> what they are equal to."""
    same: dict[str, str] = {}
    for node in original.graph.node:
        if _changes_nothing(node) and node.output[0] not in known:
            source = same.get(node.input[0], node.input[0])
            if source in known:
                same[node.output[0]] = source
    return same


def _changes_nothing(node: onnx.NodeProto) -> bool:
    """Of a float tensor, which is all that a cache knows."""
    return node.op_type in _SAME or (
        node.op_type == "Cast" and attributes(node).get("to") == _FLOAT
    )
