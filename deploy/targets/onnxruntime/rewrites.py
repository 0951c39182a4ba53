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
    with_tiles        ConvTranspose without overlap -> Conv of one pixel and copies

Each stays because a model gains at least 3 % of its time or 0.5 dB by it; `gain` in `REWRITES`
holds the figure (one thread, AVX512-VNNI; AVX2 for unfuse_biases and share_reads). On a CPU without
VNNI `pad_stems` and `widen_depthwise` gain less or lose, so they ask its kernels.

Source: onnxruntime 1.32, qdq_selector_action_transformer.cc and qdq_propagation.cc (which nodes
become integer kernels); ONNX operators AveragePool-11, GlobalAveragePool-1, ReduceMean-18,
Reshape-13 and Softmax-13.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploy.graph.edit import rebuild, replace_nodes
from deploy.graph.index import Graph, attributes
from deploy.graph.placement import averages_beyond_padding, is_global_mean
from deploy.targets.onnxruntime.conv_rewrites import (
    RewriteContext,
    pad_stems,
    widen_depthwise,
    with_tiles,
)
from deploy.targets.onnxruntime.map_rewrites import fuse_gates, write_upsampling

_MANY = 1 << 10  # values of a constant that float16 may store


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A row of the table.

    Attributes:
        apply: changes the model in place, or returns a changed copy.
        gain: the largest measured gain: time without it over time with it, or SQNR.
        of_kept: whether Q/DQ models that are kept as they are get it too.
    """

    apply: Callable[[onnx.ModelProto, RewriteContext], onnx.ModelProto | None]
    gain: str
    of_kept: bool = False


def apply_rewrites(model: onnx.ModelProto, context: RewriteContext) -> onnx.ModelProto:
    """Apply the rows of `REWRITES` in their order; a model with pairs is changed in place."""
    for row in REWRITES:
        if row.of_kept or not context.is_kept:
            model = row.apply(model, context) or model
    return model


def store_halves(graph: onnx.GraphProto) -> None:
    """Store the large float32 constants that float16 holds exactly as float16, in place.

    ONNX Runtime computes the Cast behind each once, when it loads the file.
    """
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) >= _MANY:
            values = numpy_helper.to_array(tensor)
            with np.errstate(over="ignore", invalid="ignore"):
                halves = values.astype(np.float16)
            if np.array_equal(halves, values):
                casts.append(helper.make_node("Cast", [f"{tensor.name}/half"], [tensor.name], to=1))
                tensor.CopyFrom(numpy_helper.from_array(halves, f"{tensor.name}/half"))
    replace_nodes(graph, [*casts, *graph.node])


_FLAT = "calib8/flat"  # shape [0, -1]: 0 keeps the first dimension


def write_means(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write each ReduceMean over all places of a picture as GlobalAveragePool.

    ONNX Runtime has an integer kernel of the pool alone, and a float one in the layout of its
    Convs. Without keepdims a Reshape follows, between two pairs of the mean's own scale, so that
    it moves integers.
    """
    like = context.like
    means = {n.name for n in like.nodes if n.op_type == "ReduceMean" and is_global_mean(like, n)}
    if not means:
        return
    pairs = {n.input[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes += _pool(node, pairs.get(node.output[0])) if node.name in means else [node]
    if any(_FLAT in node.input for node in nodes):
        flat = numpy_helper.from_array(np.array([0, -1], np.int64), _FLAT)
        model.graph.initializer.append(flat)
    rebuild(model.graph, nodes)


def _pool(mean: onnx.NodeProto, quantize: onnx.NodeProto | None) -> list[onnx.NodeProto]:
    """The nodes in place of one ReduceMean; the pool keeps its name."""
    source, output, name = mean.input[0], mean.output[0], mean.name
    if attributes(mean).get("keepdims", 1):
        return [helper.make_node("GlobalAveragePool", [source], [output], name=name)]
    made = f"{output}/pooled"
    nodes = [helper.make_node("GlobalAveragePool", [source], [made], name=name)]
    if quantize is not None:
        integers, parameters = f"{made}/quantized", quantize.input[1:]
        nodes += [
            helper.make_node("QuantizeLinear", [made, *parameters], [integers], name=f"{made}/Q"),
            helper.make_node(
                "DequantizeLinear", [integers, *parameters], [f"{made}/read"], name=f"{made}/DQ"
            ),
        ]
        made = f"{made}/read"
    return [*nodes, helper.make_node("Reshape", [made, _FLAT], [output], name=f"{name}/flat")]


def fix_averages(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Remove count_include_pad from each AveragePool without padding.

    With ceil_mode the last windows may reach beyond the input. ONNX Runtime's integer kernel then
    counts what is beyond, which count_include_pad does not ask for. Without padding the attribute
    has no other effect; with padding the average stays float.
    """
    for node in model.graph.node:
        if averages_beyond_padding(node) and not any(attributes(node).get("pads", [])):
            left = [one for one in node.attribute if one.name != "count_include_pad"]
            del node.attribute[:]
            node.attribute.extend(left)


_KINDS = frozenset({"Softmax", "LogSoftmax"})


def write_softmax(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Write each Softmax with several axes after its own over one axis of all their places.

    ONNX Runtime transposes the axis to the end and back: value by value in one thread where more
    than one axis follows it, in blocks where only one does. The Reshapes move nothing::

        x [n, c, h, w] -> Reshape [n, c, h w] -> Softmax -> Reshape [n, c, h, w]
    """
    like = context.like
    ranks = {
        node.name: len(like.shapes.get(node.output[0]) or ())
        for node in like.nodes
        if node.op_type in _KINDS
    }
    instead = {
        node.name: _in_a_row(model, node, axis)
        for node in model.graph.node
        if node.op_type in _KINDS and (axis := _axis(node, ranks.get(node.name, 0))) is not None
    }
    if instead:
        rebuild(model.graph, [n for old in model.graph.node for n in instead.get(old.name, [old])])


def _axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis, counted from the front; None if at most one axis follows."""
    axis = int(attributes(node).get("axis", -1))
    axis += rank if axis < 0 else 0
    return axis if 0 <= axis < rank - 2 else None


def _in_a_row(model: onnx.ModelProto, node: onnx.NodeProto, axis: int) -> list[onnx.NodeProto]:
    """The nodes in place of one Softmax; adds their constant to the model."""
    source, output, name = node.input[0], node.output[0], node.name
    row = f"{output}/shape_in_a_row"
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([0] * (axis + 1) + [-1], np.int64), row)
    )

    def made(op_type: str, inputs: Sequence[str], what: str) -> onnx.NodeProto:
        return helper.make_node(op_type, inputs, [f"{output}/{what}"], name=f"{name}/{what}")

    softmax = helper.make_node(
        node.op_type, [f"{output}/in_a_row"], [f"{output}/of_a_row"], name=name, axis=axis
    )
    back = helper.make_node(
        "Reshape", [f"{output}/of_a_row", f"{output}/sizes"], [output], name=f"{name}/as_it_was"
    )
    return [
        made("Shape", [source], "sizes"),
        made("Reshape", [source, row], "in_a_row"),
        softmax,
        back,
    ]


# Operators between pairs that ONNX Runtime replaces with an integer kernel
_FUSED = frozenset(
    {"Add", "Mul", "Concat", "Where", "Sigmoid", "LeakyRelu", "Softmax", "MatMul"}
    | {"AveragePool", "GlobalAveragePool"}
)
# Operators past which ONNX Runtime moves a pair
_PASSED = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "MaxPool"}
)


def keep_apart(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Put a Sum before every float node that ONNX Runtime would run as an integer kernel.

    It makes one integer kernel of an operator between pairs, whoever wanted it in float. A Sum of
    one tensor is a copy, past which it moves no pair::

        DQ -> Softmax -> Q              an integer kernel
        DQ -> Sum -> Softmax -> Q       a float kernel
    """
    float_nodes = context.float_nodes
    if not any(node.op_type in _FUSED and node.name in float_nodes for node in model.graph.node):
        return
    graph = Graph(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        if node.name in float_nodes and _fused(graph, node):
            nodes.append(_copy(node))
        nodes.append(node)
    if len(nodes) > len(graph.nodes):
        replace_nodes(model.graph, nodes)


def _fused(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime would run a node on integers."""
    if node.op_type not in _FUSED or not all(_read(graph, tensor) for tensor in _data(node)):
        return False
    return node.op_type == "MatMul" or _written(graph, node.output[0])


def _data(node: onnx.NodeProto) -> list[str]:
    """The tensors a node reads, without the condition of a Where."""
    return list(node.input)[node.op_type == "Where" :]


def _read(graph: Graph, tensor: str) -> bool:
    """Whether a tensor comes from a DequantizeLinear."""
    maker = graph.producer.get(tensor)
    while maker is not None and maker.op_type in _PASSED:
        maker = graph.producer.get(maker.input[0])
    return maker is not None and maker.op_type == "DequantizeLinear"


def _written(graph: Graph, tensor: str) -> bool:
    """Whether a tensor goes to a QuantizeLinear."""
    return any(
        node.op_type == "QuantizeLinear"
        or (node.op_type in _PASSED and _written(graph, node.output[0]))
        for node in graph.readers.get(tensor, ())
    )


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """Let a node read a copy of its first input, and return the Sum that makes the copy."""
    at = len(node.input) - len(_data(node))
    source, apart = node.input[at], f"{node.output[0]}/apart"
    node.input[at] = apart
    return helper.make_node("Sum", [source], [apart], name=f"{node.name}/apart")


def share_reads(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Put a Sum between a DequantizeLinear and the float nodes that read it, if there are several.

    ONNX Runtime gives each reader a DequantizeLinear of its own before it looks for operators that
    are written out, so that it finds no GELU and no LayerNormalization. A Sum stays one node.
    """
    graph = Graph(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        nodes.append(node)
        if node.op_type != "DequantizeLinear":
            continue
        source, copy = node.output[0], f"{node.output[0]}/apart"
        readers = [
            reader
            for reader in graph.readers.get(source, ())
            if reader.name in context.float_nodes and reader.op_type not in _PASSED
        ]
        if len(readers) > 1:
            nodes.append(helper.make_node("Sum", [source], [copy], name=copy))
            for reader in readers:
                reader.input[:] = [copy if name == source else name for name in reader.input]
    if len(nodes) > len(graph.nodes):
        replace_nodes(model.graph, nodes)


def unfuse_biases(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give the bias [n] after each int8 MatMul of more than two dimensions the shape [1, n].

    ONNX Runtime makes a Gemm between two Reshapes of such a MatMul and the Add of its bias [n]
    before it looks for pairs. The Reshapes hide the pairs, so that the Gemm runs in float.
    """
    if all(node.op_type != "MatMul" for node in model.graph.node):
        return
    graph = Graph(model)
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        add = graph.only_reader(node.output[0]) if node.op_type == "MatMul" else None
        rank = len(context.like.shapes.get(node.output[0]) or ())
        if add is None or add.op_type != "Add" or rank < 3:
            continue
        if all(_read(graph, name) for name in node.input):
            counts.update(name for name in add.input if name in graph.initializers)
    for name, count in counts.items():
        bias = graph.initializers[name]
        if len(bias.dims) == 1 and len(graph.readers[name]) == count:
            bias.dims.insert(0, 1)


REWRITES = (
    Rewrite(write_means, "MobileNetV3-small of timm 1.16"),
    Rewrite(keep_apart, "AveragePool with padding and ceil_mode 19.9 -> 33.1 dB"),
    Rewrite(unfuse_biases, "ConvNeXt 1.2", of_kept=True),
    Rewrite(fuse_gates, "PP-OCR cls 1.30"),
    Rewrite(share_reads, "Convs with GELU 1.15"),
    Rewrite(fix_averages, "AveragePool with ceil_mode 14.7 -> 35.3 dB"),
    Rewrite(write_softmax, "YOLOv8n 1.09"),
    Rewrite(write_upsampling, "ESPCN with Resize 1.18"),
    Rewrite(widen_depthwise, "PP-OCR cls 1.33"),
    Rewrite(pad_stems, "ShuffleNetV2 1.13"),
    Rewrite(with_tiles, "PP-OCR det 1.06", of_kept=True),
)
