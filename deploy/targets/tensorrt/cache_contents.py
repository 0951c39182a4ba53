"""Contents of a TensorRT calibration cache: tensors, their names, and their scales.

Entropy2 and MinMax calibrate before fusion, so a cache lists every float activation of the network
that the parser built, including the output of a Conv before its Relu or BatchNormalization. Tensors
have their ONNX names, except those that the parser creates inside one ONNX node::

    ONNX parser of 7.x to 8.3          Gemm = Shuffle -> Fully Connected -> Shuffle
        (Unnamed Layer* 5) [Shuffle]_output, (Unnamed Layer* 6) [Fully Connected]_output, fc1
    ONNX parser from 10                Gemm = MatrixMultiply -> + bias, Softmax = Softmax -> Shuffle
        <name of the node>_output, fc1
    Caffe parser (taken before 8)      no Flatten; a Relu in place takes the name of its layer
        (Unnamed Layer* 4) [Fully Connected]_output, ip1

The number is the layer's index in the network, so all preceding layers must be counted. If the
number of layers of a preceding operator is not known, the tensor is left out: TensorRT then prints
a harmless "missing scale" warning, since the tensor is inside one node. The output of a Pooling
layer has the scale of its input; its own values are not observed. A global pool of the ONNX parser
is a Reduce layer, which has its own.

Two methods reproduce TensorRT's own calibrators. They observe every tensor that TensorRT's parser
names, in ONNX Runtime on the CPU, with BatchNormalization not folded::

    entropy-tensorrt    the first calibration batch sets each tensor's range, which then only
                        doubles: the scales depend on the batch size and the order of the images
    legacy              the quantile of |x| that the legacy form's header states

The entropy search is reproduced exactly (its tables are equal index by index); the regression of
the legacy calibrator is not documented and left out. All other methods observe the cleaned model,
so they share observations with other targets.

Sources: onnx/onnx-tensorrt, builtin_op_importers.cpp at release/7.2.1 to 8.2 (Gemm) and
onnxOpImporters.cpp at 10.1; caches written by TensorRT 7.2.1 (VGG16, layer counts), 7.2.2 (LeNet
by the Caffe parser, pooling), 8.5.3 (a classifier with a global pool), 10.3.0 (global pool),
10.10.0 (Gemm and Softmax) and 10.14.1 (YOLOv8n: all of its backbone and neck, pooling).
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx

from calibrators.scales import Scales
from deploy.calibration import DEFAULT_TRT_VERSION, trt_cache
from deploy.calibration.observation import (
    CalibrationSubject,
    Observation,
    Variant,
    note_left_out,
)
from deploy.calibration.ranges import RangeSet
from deploy.calibration.trt_cache import version_label
from deploy.errors import ExportError, counted, list_first
from deploy.graph.edit import copy_message, make_node, replace_nodes
from deploy.graph.index import FLOAT, Graph, attributes, optional_input, runtime_inputs

POOLING_OPS = frozenset({"MaxPool", "AveragePool"})  # by the ONNX parser
_CAFFE_POOLING_OPS = POOLING_OPS | {"GlobalAveragePool", "GlobalMaxPool"}
_COPY_OPS = frozenset({"Identity", "Dropout"})
_FIRST_NAMED_AFTER_NODES = 100000  # from 10.0 on the parser names inner tensors after their node
# before 8.4 a Gemm is three layers, and the tensors between them are named by the layers' indices
_FIRST_WITHOUT_GEMM_INDICES = 8400
# ONNX operator -> TensorRT's name for the single layer that it becomes.
_LAYER_KIND_BY_OP = {
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


# (name in the cache, ONNX tensor with the same values); the product of a Gemm, before its bias is
# added, is no tensor in ONNX: both are its name in the cache then
_Entry = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One entry of a calibration cache.

    Attributes:
        name: name in the cache.
        tensor: ONNX tensor with the same values.
        owner: ONNX tensor whose scale it has: `tensor`, or the input of the pools that make that.
    """

    name: str
    tensor: str
    owner: str


def trt_tensors(model: onnx.ModelProto) -> list[str]:
    """List the float inputs and float node outputs of a model: what a TensorRT cache lists.

    `model` is cleaned but keeps its BatchNormalization nodes (`load(..., fold_batchnorm=False)`).
    """
    graph = Graph(model)
    names = [*graph.inputs, *graph.producer]
    # a tensor whose type could not be inferred, 0, counts as float
    return [name for name in names if graph.dtypes.get(name, 0) in (0, FLOAT)]


def cache_tensors(
    model: onnx.ModelProto,
    *,
    version: str,
    original: onnx.ModelProto | None = None,
) -> list[CacheTensor]:
    """List the entries of the cache that TensorRT `version` would write for `model`.

    Args:
        model: cleaned, with its BatchNormalization nodes.
        version: "X.Y.Z".
        original: the model as TensorRT reads it, for node names and for the tensors of Identity,
            Dropout and no-op Cast nodes, which cleaning removes; None for `model`.
    """
    parsed = original if original is not None else model  # what TensorRT's parser reads
    if has_caffe_names(parsed, version):
        entries = _caffe_entries(model)
        pooling_operators = _CAFFE_POOLING_OPS
    else:
        entries = _onnx_entries(model, parsed, version_label(version))
        pooling_operators = POOLING_OPS
    # a pool's output has the scale of its owner, the pool's input; any other tensor has its own
    owners = pool_owners(model, pooling_operators)
    # an entry: its name in the cache, and the tensor of `model` that has its values
    return [CacheTensor(name, tensor, owners.get(tensor, tensor)) for name, tensor in entries]


def pool_owners(model: onnx.ModelProto, pooling_operators: Collection[str]) -> dict[str, str]:
    """Map the output of each pool to the tensor whose scale it has: the pool's input.

    In a row of pools it is the input of the first one.
    """
    owners: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in pooling_operators:
            owners[node.output[0]] = owners.get(node.input[0], node.input[0])
    return owners


def has_caffe_names(model: onnx.ModelProto, version: str) -> bool:
    """Whether TensorRT's cache of a model probably has the names that its Caffe parser gives.

    So it is for a network converted from Caffe and a TensorRT before 8. A model counts as converted
    from Caffe if it has no producer name, no node names, and a single input called "data", Caffe's
    usual name.
    """
    has_names = model.producer_name or any(node.name for node in model.graph.node)
    inputs = [value.name for value in runtime_inputs(model.graph)]
    return version_label(version) < 8000 and not has_names and inputs == ["data"]


def unnamed_layer_output(index: int, kind: str) -> str:
    """Return TensorRT's name for the first output of its layer `index`, up to version 9."""
    return f"(Unnamed Layer* {index}) [{kind}]_output"


def _onnx_entries(
    model: onnx.ModelProto, parsed: onnx.ModelProto, version_number: int
) -> list[_Entry]:
    """List the entries of the cache, in its order, as TensorRT's ONNX parser names its tensors.

    An entry is (name in the cache, tensor of the model with the same values).

    Args:
        model: the cleaned model, whose tensors are observed.
        parsed: the uncleaned model, which the parser reads.
        version_number: TensorRT's version label, such as 8503 or 100300.
    """
    graph = Graph(model)
    float_tensors = trt_tensors(model)
    float_names = set(float_tensors)
    # by a node's first output: its name in the uncleaned model, after which TensorRT names tensors,
    # and the index of the first layer that TensorRT makes of it
    parsed_names = {node.output[0]: node.name for node in parsed.graph.node if node.output}
    layer_indices = _layer_indices(parsed, version_number)
    entries = _input_entries(graph, float_tensors)
    for node in graph.nodes:
        output = node.output[0]
        # the parser makes several layers of these, and the tensors between them have entries too
        if node.op_type in ("Gemm", "Softmax") and {node.input[0], output} <= float_names:
            first_layer_index = layer_indices.get(output)
            parsed_name = parsed_names.get(output, "")
            entries += _inner_entries(node, first_layer_index, version_number, parsed_name)
        entries += [(name, name) for name in node.output if name in float_names]

    # the output of an Identity or Dropout, which cleaning removed, follows the last entry of the
    # tensor that it copies
    for copy_name, source in _removed_copies(parsed, float_names).items():
        last_index = max(index for index, (_, name) in enumerate(entries) if name == source)
        entries.insert(last_index + 1, (copy_name, source))
    return entries


def _inner_entries(
    node: onnx.NodeProto, first_layer_index: int | None, version_number: int, parsed_name: str
) -> list[_Entry]:
    """List the tensors that the parser creates inside a Gemm or Softmax, if their name is known.

    From TensorRT 10.0 on they are named after their node. Before 8.4 those of a Gemm are named by
    the indices of its layers. Between the two no names are known.

    An entry is (name in the cache, tensor of the model with the same values).

    Args:
        node: the Gemm or Softmax.
        first_layer_index: index of its first layer in TensorRT's network; None if it is not known,
            or if this version does not name tensors by it.
        version_number: TensorRT's version as in the first line of its cache, such as 100300.
        parsed_name: its name in the uncleaned model, "" without one.
    """
    if version_number >= _FIRST_NAMED_AFTER_NODES:
        node_name = parsed_name or f"node_of_{node.output[0]}"
        inner_name = f"{node_name}_output"
        if node.op_type == "Softmax":  # its result before it is reshaped
            return [(inner_name, node.output[0])]
        if optional_input(node, 2):  # a Gemm's product before the bias is added
            return [(inner_name, inner_name)]
        return []
    if node.op_type != "Gemm" or first_layer_index is None:
        return []
    return [
        (unnamed_layer_output(first_layer_index, "Shuffle"), node.input[0]),
        (unnamed_layer_output(first_layer_index + 1, "Fully Connected"), node.output[0]),
    ]


def _layer_indices(model: onnx.ModelProto, version_number: int) -> dict[str, int]:
    """Map the first output of each node to the index of its first layer in TensorRT's network.

    Only versions that name the tensors inside a Gemm by this index need it; for others it is empty.
    The last entry is that of the first node that may become any number of layers: the indices after
    it are not known.
    """
    indices: dict[str, int] = {}
    if version_number >= _FIRST_WITHOUT_GEMM_INDICES:
        return indices
    layer_count = 0
    for node in model.graph.node:
        if node.op_type == "Constant":  # is no layer
            continue
        indices[node.output[0]] = layer_count
        if node.op_type == "Gemm":  # Shuffle, Fully Connected, Shuffle
            layer_count += 3
        elif node.op_type == "Softmax":  # one layer or several, by its axis
            break
        elif node.op_type in _LAYER_KIND_BY_OP or node.op_type in _COPY_OPS:
            layer_count += 1
        else:
            break
    return indices


def _caffe_entries(model: onnx.ModelProto) -> list[_Entry]:
    """List the entries of the cache, in its order, as TensorRT's Caffe parser names its tensors.

    An entry is (name in the cache, tensor of the model with the same values).

    The parser flattens the input of an inner product itself, so a Flatten before a Gemm has no
    entry. A Relu works in place and takes the name of the layer before it, whose own output is then
    named by the layer's index. Where that index is unknown, the output has no entry here.
    """
    graph = Graph(model)
    float_tensors = trt_tensors(model)
    entries = _input_entries(graph, float_tensors)
    layer_index = 0  # of the node's layer in TensorRT's network
    is_index_known = True  # False once a node may be several layers
    for node in graph.nodes:
        output = node.output[0]
        reader_types = [reader.op_type for reader in graph.readers.get(output, [])]
        if node.op_type in {"Flatten", "Reshape"} and set(reader_types) == {"Gemm"}:
            continue
        # TensorRT's name for this type of layer; "" if the node may become several layers
        kind = _LAYER_KIND_BY_OP.get(node.op_type, "")
        if node.op_type == "Gemm":
            kind = "Fully Connected"
        is_index_known = is_index_known and bool(kind)

        if output in float_tensors:
            if reader_types != ["Relu"]:
                entries.append((output, output))
            elif is_index_known:  # the Relu takes the name of this output
                entries.append((unnamed_layer_output(layer_index, kind), output))
        layer_index += 1
    return entries


def _input_entries(graph: Graph, float_tensors: Iterable[str]) -> list[_Entry]:
    """Return the entries of the model's inputs, with which every cache begins."""
    return [(name, name) for name in float_tensors if name not in graph.producer]


def _removed_copies(original: onnx.ModelProto, float_names: Collection[str]) -> dict[str, str]:
    """Return output of a removed node -> the equal tensor of the cleaned model.

    Cleaning removes nodes that copy their input: Identity, Dropout, and some Casts to float32.

    Args:
        original: the model before it was cleaned.
        float_names: float tensors of the cleaned model.
    """
    source_by_copy: dict[str, str] = {}
    for node in original.graph.node:
        is_cast_to_float = node.op_type == "Cast" and attributes(node).get("to") == FLOAT
        is_copy = node.op_type in _COPY_OPS or is_cast_to_float
        if is_copy and node.output[0] not in float_names:
            source = source_by_copy.get(node.input[0], node.input[0])  # a copy of a copy
            if source in float_names:
                source_by_copy[node.output[0]] = source
    return source_by_copy


def cache_of(model: onnx.ModelProto, ranges: RangeSet, version: str) -> trt_cache.CalibrationCache:
    """Return the cache of the cleaned model from calibrated ranges.

    The header names EntropyCalibration2 whatever the method was: `trtexec --calib` reads no other,
    and scales have the same meaning in all.
    """
    scales = _entry_scales(cache_tensors(model, version=version), ranges)
    return trt_cache.from_scales(scales, version=version)


def _entry_scales(entries: Iterable[CacheTensor], ranges: RangeSet) -> dict[str, np.float32]:
    """Return the scale of each entry whose owner has a range."""
    scales = ranges.symmetric
    return {entry.name: scales[entry.owner] for entry in entries if entry.owner in scales}


def cache_ranges(model: onnx.ModelProto, ranges: RangeSet, version: str) -> Scales:
    """Return the range of each cache entry, symmetric around 0."""
    symmetric = {}
    for entry in cache_tensors(model, version=version):
        if entry.owner in ranges.scales:
            scale = ranges.scales[entry.owner]
            symmetric[entry.name] = replace(scale, lo=-scale.amax, hi=scale.amax)
    return symmetric


def largest_magnitudes(ranges: RangeSet) -> dict[str, float]:
    """Return tensor -> largest |x| observed."""
    largest = {}
    for name, scale in ranges.scales.items():
        largest[name] = max(-scale.observed_min, scale.observed_max)
    for name, trouble in ranges.unusable.items():
        if trouble.is_infinite:
            largest[name] = math.inf
    return largest


# Method -> the calibrator in the cache's header. TensorRT has no percentile or MSE calibrator;
# their scales get the header of the one that `trtexec --calib` reads.
CALIBRATOR_BY_METHOD = {"minmax": trt_cache.MINMAX, "legacy": trt_cache.LEGACY}
UNFOLDED_METHODS = frozenset({"entropy-tensorrt", "legacy"})  # they observe the unfolded model


def reading_version(subject: CalibrationSubject) -> str:
    """Return the version of the TensorRT that will read the cache."""
    return subject.trt_version or DEFAULT_TRT_VERSION


def tensorrt_observations(subject: CalibrationSubject) -> tuple[Observation, ...] | None:
    """Return the observations of a method that imitates a TensorRT calibrator; None for others.

    Such a method (`UNFOLDED_METHODS`) observes the tensors that a cache lists, in the model as
    TensorRT reads it: no BatchNormalization is folded, and a Gemm is a product and an Add if the
    cache lists the product.

    Raises:
        ConfigError: the model was given in memory, already cleaned.
    """
    if subject.method.name not in UNFOLDED_METHODS:
        return None
    unfolded_model = subject.unfolded.model
    entries = list_cache_entries(subject)
    products = gemm_products(entries, unfolded_model)
    variant_name = "as TensorRT reads it"
    if products:
        variant_name += ", Gemm products apart"
    # the model that is observed in place of the cleaned one: its name, and the function to make it
    variant = Variant(variant_name, lambda _: split_gemms(unfolded_model, products))
    # a tensor that has the scale of another, such as a pool's output, is not observed itself
    tensors = dict.fromkeys(entry.owner for entry in entries)
    return tuple(Observation(variant, tensor, subject.statistic) for tensor in tensors)


def list_cache_entries(subject: CalibrationSubject) -> list[CacheTensor]:
    """List the entries of the cache that TensorRT would write for the file."""
    is_unfolded = subject.method.name in UNFOLDED_METHODS
    return cache_tensors(
        subject.unfolded.model if is_unfolded else subject.model,
        version=reading_version(subject),
        original=subject.original,
    )


def refuse_names(model: onnx.ModelProto) -> None:
    """Refuse tensor names that a cache cannot hold, before anything is observed."""
    graph = Graph(model)
    for name in (*graph.inputs, *graph.producer):
        if not trt_cache.can_hold_name(name):
            raise ExportError(
                f"TensorRT's cache has one line per tensor, so a tensor name cannot have a line"
                f" break, got {name!r}; rename the tensor in the model, or leave the target out"
            )


def cache_bytes(subject: CalibrationSubject, ranges: RangeSet) -> bytes:
    """Return the bytes of TensorRT's cache for the file."""
    cache = trt_cache.from_scales(
        _entry_scales(list_cache_entries(subject), ranges),
        version=reading_version(subject),
        algorithm=CALIBRATOR_BY_METHOD.get(subject.method.name, trt_cache.ENTROPY2),
    )
    return trt_cache.dump(cache)


def cache_notes(subject: CalibrationSubject, ranges: RangeSet) -> tuple[str, ...]:
    """Return notes on the cache for the user."""
    notes = []
    # the model of the user's file, before cleaning; a model given in memory itself
    model_in_file = subject.original or subject.model
    if has_caffe_names(model_in_file, reading_version(subject)):
        notes.append("Tensors are named as TensorRT's Caffe parser names them.")
    # A method may read full batches only, and so leave out the last samples. This is the number of
    # samples in a batch; 0 for other methods.
    calibration_batch = subject.statistic.first_batch
    if calibration_batch:
        # `padded_sample_count` samples repeat images, to fill the fixed batch of the model
        notes += note_left_out(
            subject.sample_count, calibration_batch, padded_sample_count=subject.padded_sample_count
        )
    infinite_tensors = [name for name, trouble in ranges.unusable.items() if trouble.is_infinite]
    if infinite_tensors:
        notes.append(
            f"{counted(len(infinite_tensors), 'tensor')} held infinity"
            f" ({list_first(infinite_tensors, 3)}); TensorRT leaves such tensors in float."
        )
    if subject.method.name == "legacy":
        notes.append(
            "Only the quantile of the legacy calibrator is applied; its regression is not"
            " documented."
        )
    return tuple(notes)


def gemm_products(entries: Iterable[CacheTensor], model: onnx.ModelProto) -> dict[str, str]:
    """Return output of a Gemm -> name of its product before the bias, if the cache lists that.

    `entries`: those of the cache, in which a product stands right before the output of its Gemm.
    """
    graph = Graph(model)
    model_tensors = {*graph.inputs, *graph.producer}
    products = {}
    for entry, next_entry in pairwise(entries):
        if entry.tensor not in model_tensors:  # a product, which is no tensor in ONNX
            products[next_entry.tensor] = entry.tensor
    return products


def split_gemms(model: onnx.ModelProto, products: Mapping[str, str]) -> onnx.ModelProto:
    """Return the model with each Gemm in `products` written as a Gemm without bias and an Add.

    `products`: output of the Gemm -> name of the tensor before the bias is added.
    """
    if not products:
        return model
    result = copy_message(model)
    nodes = []
    for node in result.graph.node:
        nodes.append(node)
        product = products.get(node.output[0])
        if product is not None:
            bias = node.input.pop()
            output = node.output[0]
            node.output[0] = product
            nodes.append(make_node("Add", [product, bias], output, f"{node.name}/bias/Add"))
    replace_nodes(result.graph, nodes)
    return result
