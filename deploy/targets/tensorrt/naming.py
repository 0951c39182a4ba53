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

The ranges of a calibration as TensorRT's cache of a model has them.

What TensorRT's own calibrators see: the model as its parser reads it, by its range rule.

The model is run by ONNX Runtime on the CPU with its BatchNormalization nodes left alone, since
TensorRT calibrates before fusion, and every tensor that TensorRT's parser names is observed. Two
methods do as it does::

    entropy-tensorrt    the first calibration batch sets each tensor's range, which then only
                        doubles: the scales depend on the batch size and the order of the images
    legacy              the quantile of |x| that the legacy form's header states

What TensorRT does is established for entropy (tables reproduced index by index); for the legacy
calibrator only its format is, so its regression is left out. Every other method looks at the
cleaned model, whose tensors keep their names, and so shares its observations with other targets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from calibrators.percentile import QUANTILE
from deploy.calibration import DEFAULT_TRT_VERSION, trt_cache
from deploy.calibration.observation import Observation, Observed, Subject, Variant, left_out
from deploy.calibration.trt_cache import version_label
from deploy.errors import ExportError
from deploy.graph.edit import copied, replace_nodes
from deploy.graph.index import Graph, attributes, fed_inputs

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scale
    from deploy.calibration.ranges import Found


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


def cache_of(model: onnx.ModelProto, found: Found, version: str) -> trt_cache.CalibrationCache:
    """The ranges as TensorRT's cache of the cleaned model, its pools with the scale of their input.

    The header names EntropyCalibration2 whatever the search was: it is the only one that
    `trtexec --calib` reads, and scales mean the same under any.
    """
    scales = found.symmetric
    owners = _owners(model, version)
    entries = {name: scales[owner] for name, owner in owners.items() if owner in scales}
    return trt_cache.from_scales(entries, version=version, algorithm=trt_cache.ENTROPY2)


def _owners(model: onnx.ModelProto, version: str) -> dict[str, str]:
    """Entry of the cache that goes with the cleaned model -> the tensor whose scale it has."""
    return scale_owners(cache_tensors(model, version=version, parser=ONNX))


def held(model: onnx.ModelProto, found: Found, version: str) -> dict[str, Scale]:
    """Entry of the cache -> its range, which is as wide on either side of 0."""
    owners = _owners(model, version)
    both = {n: replace(one, lo=-one.amax, hi=one.amax) for n, one in found.scales.items()}
    return {name: both[owner] for name, owner in owners.items() if owner in both}


def sizes(found: Found) -> dict[str, float]:
    """Tensor -> largest |x| that was seen."""
    seen = {n: max(-one.observed_min, one.observed_max) for n, one in found.scales.items()}
    return seen | {n: math.inf for n, trouble in found.troubles.items() if trouble.infinite}


# Method -> the calibrator in the cache's header. TensorRT has no percentile or MSE calibrator; it
# takes their scales under the name of the one that `trtexec --calib` reads.
ALGORITHMS = {"minmax": trt_cache.MINMAX, "legacy": trt_cache.LEGACY}
AS_PARSED = frozenset({"entropy-tensorrt", "legacy"})


def version_of(subject: Subject) -> str:
    """TensorRT that is to read the cache."""
    return subject.trt_version or DEFAULT_TRT_VERSION


def observations(subject: Subject, parser: str | None) -> tuple[Observation, ...] | None:
    """What a method of TensorRT's own observes; None for every other method.

    Raises:
        ConfigError: the model was given in memory, already cleaned.
    """
    if subject.method.name not in AS_PARSED:
        return None
    wanted = entries(subject, parser)
    apart = products(wanted, subject.unfolded.model)
    key = "as TensorRT reads it" + (", Gemm products apart" if apart else "")

    def make(_: Observed) -> onnx.ModelProto:
        return split_gemms(subject.unfolded.model, apart)

    variant = Variant(key, make)
    sources = dict.fromkeys(t.source for t in wanted if t.shares is None)
    return tuple(Observation(variant, source, subject.statistic) for source in sources)


def entries(subject: Subject, parser: str | None) -> list[CacheTensor]:
    """The entries of the cache that TensorRT would write for the file, in order."""
    own = subject.method.name in AS_PARSED
    original = subject.original
    model = subject.unfolded.model if own else subject.model
    return cache_tensors(model, version=version_of(subject), parser=parser, original=original)


def refuse_names(model: onnx.ModelProto) -> None:
    """Refuse a model that TensorRT's cache cannot tell of, before anything is observed.

    Raises:
        ExportError: a tensor's name that no line can hold.
    """
    names = [name for node in model.graph.node for name in node.output if name]
    for name in (*(value.name for value in model.graph.input), *names):
        if not trt_cache.holds(name):
            raise ExportError(
                f"TensorRT's cache holds one line a tensor, so a name has no line break, got"
                f" {name!r}; rename the tensor in the model, or leave the target away"
            )


def text(subject: Subject, found: Found, parser: str | None) -> bytes:
    """TensorRT's cache for the file; the output of a pool gets the scale of its input."""
    scales = found.symmetric
    owners = scale_owners(entries(subject, parser))
    cache = trt_cache.from_scales(
        {name: scales[owner] for name, owner in owners.items() if owner in scales},
        version=version_of(subject),
        algorithm=ALGORITHMS.get(subject.method.name, trt_cache.ENTROPY2),
        quantile=QUANTILE,
    )
    return trt_cache.dump(cache)


def notes(subject: Subject, found: Found, parser: str | None) -> tuple[str, ...]:
    """What the reader of the cache should know."""
    said = []
    original = subject.original
    if (parser or likely_parser(original or subject.model, version_of(subject))) == CAFFE:
        said.append("Tensors are named as TensorRT's Caffe parser names them.")
    if subject.statistic.first:
        said.extend(left_out(subject.samples, subject.statistic.first, filled=subject.filled))
    infinite = [name for name, trouble in found.troubles.items() if trouble.infinite]
    if infinite:
        said.append(
            f"{len(infinite)} tensors held infinity ({', '.join(infinite[:3])}); TensorRT leaves"
            " such tensors in float."
        )
    if subject.method.name == "legacy":
        said.append(
            "Of the legacy calibrator the quantile is applied, its regression is not known."
        )
    return tuple(said)


def products(wanted: Iterable[CacheTensor], model: onnx.ModelProto) -> dict[str, str]:
    """Output of a Gemm -> the name of its product before the bias, where that is wanted.

    `cache_tensors` lists a product right before its Gemm's output, in the network's order.
    """
    tensors = list(wanted)
    made = {name for node in model.graph.node for name in node.output}
    missing = {t.source for t in tensors} - made - {value.name for value in model.graph.input}
    pairs = pairwise(tensors)
    return {after.source: tensor.source for tensor, after in pairs if tensor.source in missing}


def split_gemms(model: onnx.ModelProto, apart: Mapping[str, str]) -> onnx.ModelProto:
    """The model with each Gemm of `apart` (see `products`) as Gemm and Add; else the model."""
    from onnx import helper

    if not apart:
        return model
    split = copied(model)
    nodes = []
    for node in split.graph.node:
        nodes.append(node)
        product = apart.get(node.output[0])
        if product is not None:
            bias, out = node.input.pop(), node.output[0]
            node.output[0] = product
            nodes.append(helper.make_node("Add", [product, bias], [out], name=f"{node.name}/bias"))
    replace_nodes(split.graph, nodes)
    return split
