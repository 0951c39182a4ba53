"""The rewrites of a Q/DQ model for ONNX Runtime's kernels: their contract, their table, small ones.

A rewrite puts operators with a fast (or correct) kernel in place of others and keeps the values::

    write_means       ReduceMean [2, 3]           -> GlobalAveragePool (-> Reshape)
    keep_apart        DQ -> float op -> Q         -> DQ -> Sum -> op -> Q     no integer kernel
    unfuse_biases     int8 MatMul -> Add [n]      -> int8 MatMul -> Add [1, n]
    fuse_gates        Add, Clip, Mul, Div         -> HardSwish, or HardSigmoid and Mul
    share_reads       DQ -> several float ops     -> DQ -> Sum -> several float ops
    fix_averages      AveragePool, ceil_mode      -> the same without counted padding
    write_softmax     Softmax over [n, c, h, w]   -> over [n, c, h w]
    write_upsampling  nearest Resize              -> Tile of whole pixels
    widen_depthwise   depthwise Conv              -> the same with a multiple of 16 channels
    pad_stems         first Conv of 3 channels    -> the same with 4, by the CPU
    write_tiles       ConvTranspose without overlap -> Conv of one pixel and copies

Each stays because a model gains at least 3 % of its time or 0.5 dB by it; `REWRITES`
holds the figure (one thread, AVX512-VNNI; AVX2 for unfuse_biases and share_reads). On a CPU without
VNNI `pad_stems` and `widen_depthwise` gain less or lose, so they ask its kernels.

Source: onnxruntime 1.32, qdq_selector_action_transformer.cc and qdq_propagation.cc (which nodes
become integer kernels); ONNX operators AveragePool-11, GlobalAveragePool-1, ReduceMean-18,
Reshape-13 and Softmax-13.
"""

import math
from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper

from deploy.graph.edit import drop_attribute, make_node, rebuild, rename_reads, replace_nodes
from deploy.graph.index import FLOAT, Graph, Nodes, attributes
from deploy.graph.placement import averages_beyond_padding, is_global_mean
from deploy.graph.rewrite import RewriteRule, is_op
from deploy.targets.onnxruntime.depthwise_rewrite import widen_depthwise
from deploy.targets.onnxruntime.gate_rewrite import fuse_gates
from deploy.targets.onnxruntime.resize_rewrite import write_upsampling
from deploy.targets.onnxruntime.rewrite_base import (
    RewriteContext,
    RewriteScope,
    apply_to_model,
)
from deploy.targets.onnxruntime.stem_rewrite import pad_stems
from deploy.targets.onnxruntime.tile_rewrite import write_tiles
from deploy.targets.onnxruntime.uint8_gates import make_pair

_MIN_HALF_VALUES = 1 << 10  # values from which a constant is worth storing as float16


def apply_rewrites(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Apply `REWRITES` in their order to a model with Q/DQ pairs, in place.

    A Q/DQ model of the user gets only `_REWRITES_OF_GIVEN_PAIRS`.
    """
    for rewrite in REWRITES:
        if rewrite in _REWRITES_OF_GIVEN_PAIRS or not context.has_given_pairs:
            rewrite(model, context)


def store_halves(graph: onnx.GraphProto) -> None:
    """Store the large float32 constants that float16 holds exactly as float16, in place.

    The readers get the float32 values from a Cast, which ONNX Runtime computes once, as it loads
    the file.
    """
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != FLOAT or math.prod(tensor.dims) < _MIN_HALF_VALUES:
            continue
        values = numpy_helper.to_array(tensor)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = values.astype(np.float16)
        if np.array_equal(halves, values):
            half_name = f"{tensor.name}/half"
            casts.append(make_node("Cast", [half_name], tensor.name, to=FLOAT))
            tensor.CopyFrom(numpy_helper.from_array(halves, half_name))
    replace_nodes(graph, [*casts, *graph.node])


_FLAT_SHAPE_NAME = "calib8/flat"  # of a constant [0, -1]: 0 keeps the first dimension


def write_means(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write each ReduceMean over all pixels of a picture as GlobalAveragePool.

    For the pool ONNX Runtime has an integer kernel, and a float kernel in the layout of its Convs;
    for the mean it has neither. A mean without keepdims becomes a pool and a Reshape.
    """
    if apply_to_model(_MEAN_AS_POOL, model, context):
        # one shape for all means without keepdims
        if any(_FLAT_SHAPE_NAME in node.input for node in model.graph.node):
            shape = numpy_helper.from_array(np.array([0, -1], np.int64), _FLAT_SHAPE_NAME)
            model.graph.initializer.append(shape)
        rebuild(model.graph, model.graph.node)


def _why_no_pool(node: onnx.NodeProto, scope: RewriteScope) -> str:
    """Return why a ReduceMean is no GlobalAveragePool of an image."""
    float_mean = scope.float_node_by_name.get(node.name)
    if float_mean is None:
        return "it is no node of the float model"
    is_global = is_global_mean(scope.context.float_graph, float_mean)
    return "" if is_global else "it is no mean over all pixels of each channel"


def _write_pool(mean: onnx.NodeProto, scope: RewriteScope) -> Nodes:
    """Return the nodes in place of one ReduceMean; the pool gets the mean's name.

    A mean without keepdims becomes a pool and a Reshape that drops the axes of size 1. If its
    output is quantized, a pair of the same scale and zero point stands between the two as well, so
    that the pool has an int8 output and the Reshape moves integers.
    """
    source = mean.input[0]
    output = mean.output[0]
    name = mean.name
    if attributes(mean).get("keepdims", 1):
        return [make_node("GlobalAveragePool", [source], output, name)]
    pooled = f"{output}/pooled"
    nodes = [make_node("GlobalAveragePool", [source], pooled, name)]
    readers = scope.graph.readers.get(output, ())
    quantize = next((reader for reader in readers if reader.op_type == "QuantizeLinear"), None)
    reshape_source = pooled
    if quantize is not None:  # the output is quantized
        scale_and_zero = quantize.input[1:]
        reshape_source = f"{pooled}/read"
        nodes += make_pair(pooled, reshape_source, pooled, scale_and_zero, scale_and_zero)
    flatten = make_node("Reshape", [reshape_source, _FLAT_SHAPE_NAME], output, f"{name}/flat")
    return [*nodes, flatten]


_MEAN_AS_POOL = RewriteRule(pattern=is_op("ReduceMean"), check=_why_no_pool, rewrite=_write_pool)


def fix_averages(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Remove count_include_pad from each AveragePool without padding.

    With ceil_mode the last windows may reach beyond the input. ONNX Runtime's integer kernel then
    counts what is beyond, which count_include_pad does not ask for. Without padding the attribute
    has no other effect; with padding the average stays float.
    """
    for node in model.graph.node:
        if averages_beyond_padding(node) and not any(attributes(node).get("pads", [])):
            drop_attribute(node, "count_include_pad")


def write_softmax(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write each Softmax with several axes after its own over one axis of all their pixels.

    ONNX Runtime transposes the axis to the end and back: value by value in one thread where more
    than one axis follows it, in blocks where only one does. The Reshapes move nothing::

        x [n, c, h, w] -> Reshape [n, c, h w] -> Softmax -> Reshape [n, c, h, w]
    """
    if apply_to_model(_FLAT_SOFTMAX, model, context):
        rebuild(model.graph, model.graph.node)


def _softmax_axis(node: onnx.NodeProto, scope: RewriteScope) -> tuple[int, int]:
    """Return (axis of a Softmax, counted from the front; rank, 0 if it is unknown)."""
    float_softmax = scope.float_node_by_name.get(node.name)
    rank = 0
    if float_softmax is not None:
        rank = scope.context.float_graph.rank(float_softmax.output[0])
    axis = attributes(node).get("axis", -1)
    if axis < 0:
        axis += rank
    return axis, rank


def _why_not_flat(node: onnx.NodeProto, scope: RewriteScope) -> str:
    """Return why a Softmax stays as it is, or ""."""
    axis, rank = _softmax_axis(node, scope)
    return "" if 0 <= axis < rank - 2 else "at most one axis follows, or its rank is unknown"


def _write_flat_softmax(node: onnx.NodeProto, scope: RewriteScope) -> Nodes:
    """Return the nodes in place of one Softmax: it runs between two Reshapes.

    The first joins all axes after the Softmax's own into one, the second restores them.
    """
    source = node.input[0]
    output = node.output[0]
    name = node.name
    axis, _ = _softmax_axis(node, scope)  # counted from the front
    original_shape = f"{output}/sizes"
    flat_input = f"{output}/in_a_row"
    flat_output = f"{output}/of_a_row"
    # the shape of the first Reshape: 0 keeps a size, -1 is the product of all others
    flat_sizes = np.array([0] * (axis + 1) + [-1], np.int64)
    flat_shape = scope.add_constant(f"{output}/shape_in_a_row", flat_sizes)
    return [
        make_node("Shape", [source], original_shape, f"{name}/sizes"),
        make_node("Reshape", [source, flat_shape], flat_input, f"{name}/in_a_row"),
        make_node(node.op_type, [flat_input], flat_output, name, axis=axis),
        make_node("Reshape", [flat_output, original_shape], output, f"{name}/as_it_was"),
    ]


_FLAT_SOFTMAX = RewriteRule(
    pattern=is_op("Softmax", "LogSoftmax"), check=_why_not_flat, rewrite=_write_flat_softmax
)


# Layers between pairs whose float weight and bias ONNX Runtime rounds to integers, with one scale
_ROUNDED_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})
# Operators between pairs that ONNX Runtime replaces with an integer kernel
_INTEGER_OPERATORS = frozenset(
    {"Add", "Mul", "Concat", "Where", "Sigmoid", "LeakyRelu", "Softmax", "MatMul"}
    | {"AveragePool", "GlobalAveragePool"}
    | _ROUNDED_LAYERS
)
# Operators past which ONNX Runtime moves a pair
_MOVED_PAST = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "MaxPool"}
)
# Operators between an integer kernel and the QuantizeLinear of its output
_BEFORE_QUANTIZER = _MOVED_PAST | {"Relu", "Clip"}


def keep_apart(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Put a Sum before every float node that ONNX Runtime would run as an integer kernel.

    ONNX Runtime makes one integer kernel of an operator between Q/DQ pairs, even of one that is to
    stay float. A Sum of one tensor is a copy. ONNX Runtime moves no pair past it, so the operator
    behind the Sum reads float values::

        DQ -> Softmax -> Q              an integer kernel
        DQ -> Sum -> Softmax -> Q       a float kernel

    In a Q/DQ model of the user, only layers with a float weight are kept apart: around any other
    operator, the user's pairs ask for the integer kernel.
    """
    apply_to_model(_KEEP_APART, model, context)


def _why_no_sum(node: onnx.NodeProto, scope: RewriteScope) -> str:
    """Return why no Sum is put before a node; "" if only a Sum keeps it float.

    Without a Sum, ONNX Runtime makes an integer kernel of a float node whose inputs come from
    DequantizeLinears and whose output goes to a QuantizeLinear.
    """
    if node.name not in scope.context.float_nodes:
        return "it is int8"
    # a user's pairs ask for the integer kernel, but not around a layer whose weight the user left
    # float: the kernel would round the weight too
    has_float_weight = node.op_type in _ROUNDED_LAYERS and node.input[1] in scope.graph.constants
    if scope.context.has_given_pairs and not has_float_weight:
        return "the user put pairs around it"

    data_inputs = [node.input[position] for position in _data_positions(node)]
    if not all(_is_dequantized(scope.graph, tensor) for tensor in data_inputs):
        return "an input of it is float"
    # for a MatMul there is also an integer kernel with a float output, so only its inputs count
    if node.op_type != "MatMul" and not _is_quantized_later(scope.graph, node.output[0]):
        return "its output is float"
    return ""


def _copy_first_input(node: onnx.NodeProto, _: RewriteScope) -> Nodes:
    """Return the Sum that copies the first input, and the node that reads the copy."""
    position = _data_positions(node)[0]
    copy = f"{node.output[0]}/apart"
    sum_node = make_node("Sum", [node.input[position]], copy, f"{node.name}/apart")
    node.input[position] = copy
    return [sum_node, node]


_KEEP_APART = RewriteRule(
    pattern=lambda node: node.op_type in _INTEGER_OPERATORS,
    check=_why_no_sum,
    rewrite=_copy_first_input,
)


def _data_positions(node: onnx.NodeProto) -> range:
    """Return the positions of data: no condition of a Where, and no weight or bias of a layer."""
    if node.op_type in _ROUNDED_LAYERS:
        return range(1)
    return range(1 if node.op_type == "Where" else 0, len(node.input))


def _is_dequantized(graph: Graph, tensor: str) -> bool:
    """Whether a tensor comes from a DequantizeLinear."""
    producer = graph.trace_back(tensor, _MOVED_PAST)
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_quantized_later(graph: Graph, tensor: str) -> bool:
    """Whether a tensor goes to a QuantizeLinear, which may do the work of a Relu or Clip."""
    for node in graph.readers.get(tensor, ()):
        if node.op_type == "QuantizeLinear":
            return True
        if node.op_type in _BEFORE_QUANTIZER and _is_quantized_later(graph, node.output[0]):
            return True
    return False


def share_reads(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Put a Sum between a DequantizeLinear and the float nodes that read it, if there are several.

    ONNX Runtime recognises a GELU or LayerNormalization that is written as several nodes. Before,
    it gives each reader of a DequantizeLinear a copy of that node, so that it finds none of them.
    It does not copy a Sum.
    """
    apply_to_model(_SHARE_READS, model, context)


def _float_readers(node: onnx.NodeProto, scope: RewriteScope) -> Nodes:
    """Return the float nodes that read a DequantizeLinear, without those that only move values."""
    readers = []
    for reader in scope.graph.readers.get(node.output[0], ()):
        if reader.name in scope.context.float_nodes and reader.op_type not in _MOVED_PAST:
            readers.append(reader)
    return readers


def _why_not_shared(node: onnx.NodeProto, scope: RewriteScope) -> str:
    """Return why a DequantizeLinear needs no Sum for its readers, or ""."""
    has_several_readers = len(_float_readers(node, scope)) > 1
    return "" if has_several_readers else "at most one float node reads it"


def _copy_output(node: onnx.NodeProto, scope: RewriteScope) -> Nodes:
    """Return the DequantizeLinear and the Sum that its float readers read instead."""
    source = node.output[0]
    copy = f"{source}/apart"
    rename_reads(_float_readers(node, scope), {source: copy})
    return [node, make_node("Sum", [source], copy, copy)]


_SHARE_READS = RewriteRule(
    pattern=is_op("DequantizeLinear"), check=_why_not_shared, rewrite=_copy_output
)


def unfuse_biases(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give the bias [n] after each int8 MatMul of more than two dimensions the shape [1, n].

    Before it looks for pairs, ONNX Runtime replaces such a MatMul and the Add of its bias [n] by
    Reshape, Gemm and Reshape. The Reshapes hide the pairs, so that the Gemm runs in float. With a
    bias [1, n] it does not do so. A bias that other nodes read too stays as it is.
    """
    graph = Graph(model)
    # bias that an Add after such a MatMul adds -> number of these Adds that read it
    read_counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op_type != "MatMul":
            continue
        add = graph.only_reader(node.output[0], "Add")
        if add is None or context.float_graph.rank(node.output[0]) < 3:
            continue
        if all(_is_dequantized(graph, name) for name in node.input):
            read_counts.update(name for name in add.input if name in graph.initializers)
    for name, count in read_counts.items():
        bias = graph.initializers[name]
        has_other_readers = len(graph.readers[name]) > count
        if len(bias.dims) == 1 and not has_other_readers:
            bias.dims.insert(0, 1)


# largest measured gain: time without it over time with it, or SQNR
REWRITES = (
    write_means,  # MobileNetV3-small of timm 1.16
    keep_apart,  # AveragePool, padded, ceil_mode 19.9 -> 33.1 dB
    unfuse_biases,  # ConvNeXt 1.2
    fuse_gates,  # PP-OCR cls 1.30
    share_reads,  # Convs with GELU 1.15
    fix_averages,  # AveragePool with ceil_mode 14.7 -> 35.3 dB
    write_softmax,  # YOLOv8n 1.09
    write_upsampling,  # ESPCN with Resize 1.18
    widen_depthwise,  # PP-OCR cls 1.33
    pad_stems,  # ShuffleNetV2 1.13
    write_tiles,  # PP-OCR det 1.06
)
# of a Q/DQ model of the user, which keeps its pairs and weights
_REWRITES_OF_GIVEN_PAIRS = (keep_apart, unfuse_biases, write_tiles)
