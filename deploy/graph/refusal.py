"""Reasons why a node itself cannot run in int8 under a placement, whatever its neighbours are.

A ConvTranspose can if its windows do not overlap, so that each pixel becomes a tile of k x l
pixels. It is then a Conv 1x1 that makes the pixels of the tile as channels, and a move::

    x [n, c, h, w] -> ConvTranspose, window = stride -> [n, m, h k, w l]
                   -> Conv 1x1 -> [n, k l m, h, w]   -> moved
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import onnx

from deploy.graph.index import (
    FLOAT,
    GATE,
    ONNX_DOMAINS,
    Graph,
    attributes,
    group_count,
    optional_input,
    standard_type,
)
from deploy.graph.placement import (
    MOVES,
    Placement,
    averages_beyond_padding,
    has_constant_operand,
    is_global_mean,
    keeps_range,
    pads_nonzero,
    resize_mode,
)

Tile = tuple[int, int]
_ACTIVATIONS = frozenset({GATE, "Sigmoid", "Mul", "LeakyRelu"})
_MIN_CHANNELS = 24  # output channels with which a first Conv is faster in int8
# over one input channel, as in a grey picture: output channels, or products per output value, with
# which a first Conv is faster in int8. With fewer of both the int8 kernel, which gathers every
# window, takes longer (float over int8, windows of 3 to 7: 16 channels 0.51 to 0.84, 32 channels
# 0.66 to 1.02, 64 channels 0.88 to 1.40 with AVX512-VNNI; 0.70 to 0.84, 0.87 to 0.93 and 1.03 to
# 1.09 with AVX2)
_MIN_GREY_COUNT = 64
_MIN_PRODUCTS = 27  # products per output value of a 3x3 window over three colours
# ONNX Runtime moves the DequantizeLinear past data movement and then looks for the body's tensor
# among the inputs of the If (1.31, 1.32): an assertion that no caller can catch.
_CRASH_TEXT = "which ends ONNX Runtime's process where it is dequantized"


def tile_shape(node: onnx.NodeProto, weight_shape: Sequence[int]) -> Tile | None:
    """Return (rows, columns) of the tile of output pixels that a ConvTranspose makes of each pixel.

    Args:
        node: any node.
        weight_shape: of its weight, [c, m / groups, k, l].

    Returns:
        None if it is not a 2-D ConvTranspose without groups, or if its windows overlap, have gaps
        or are cropped.
    """
    if node.op_type != "ConvTranspose" or len(weight_shape) != 4:
        return None
    attrs = attributes(node)
    rows, columns = weight_shape[2:]
    if rows == columns == 1:  # a plain 1x1 Conv: each pixel stays one pixel
        return None
    if attrs.get("strides", [1, 1]) != [rows, columns] or _has_groups_or_gaps(attrs):
        return None
    # attributes that crop or extend the output
    if any(attrs.get("pads", ())) or any(attrs.get("output_padding", ())):
        return None
    if "output_shape" in attrs or attrs.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    return rows, columns


def _has_groups_or_gaps(attrs: Mapping[str, Any]) -> bool:
    """Whether a ConvTranspose has groups or dilations, by its attributes."""
    return attrs.get("group", 1) != 1 or any(step != 1 for step in attrs.get("dilations", ()))


def find_refusal(
    graph: Graph,
    node: onnx.NodeProto,
    placement: Placement,
    requested_reasons: Mapping[str, str],
) -> str:
    """Return why a node cannot run in int8, whatever its neighbours do; "" if it can.

    Missing scales are not considered, see `find_unscaled_tensor`.

    Args:
        graph: index of the model's nodes and tensors.
        node: the node.
        placement: the target's rules.
        requested_reasons: nodes to keep in float -> why.
    """
    if node.domain not in ONNX_DOMAINS:
        return f"custom domain {node.domain}"
    if node.op_type not in placement.runnable_op_types:
        return f"{node.op_type} is not run in {placement.precision_name} on {placement.name}"
    if node.name in requested_reasons:
        return requested_reasons[node.name]
    # neither a stored weight nor an activation that is observed, so they have no scale
    computed_operands = graph.computed_constants.intersection(node.input)
    if any(map(graph.is_float, computed_operands)):
        return "one of its operands is computed from constants"
    return (
        _find_layer_refusal(graph, node, placement)
        or _find_glue_refusal(graph, node, placement)
        or _find_tensor_refusal(graph, node, placement)
    )


def _find_layer_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why its weight, or its place at the model's input, keeps a layer in float; else ""."""
    if node.op_type in placement.heavy and optional_input(node, 1):  # a pool has no weight
        weight_refusal = _find_weight_refusal(graph, node, placement)
        if weight_refusal:
            return weight_refusal
    is_first_conv = node.op_type == "Conv" and _reads_model_input(graph, node)
    return _find_first_conv_refusal(graph, node, placement) if is_first_conv else ""


def _find_first_conv_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why a Conv at the model's input is faster in float; "" if it is not.

    Such a Conv sums few products for each output value (3 channels times its window), so that
    quantizing its input costs more than int8 saves.
    """
    if not placement.min_products:  # the target runs every such Conv in int8
        return ""
    output_channels, input_channels, *window_sizes = graph.initializers[node.input[1]].dims
    products = math.prod(window_sizes) * input_channels  # for each output value
    # a Conv that makes many values is faster in int8 even with few products for each of them
    saves_little = products < placement.min_products and not _makes_many_values(graph, node)
    # over one channel, the int8 kernel gathers every window, which costs more than it saves unless
    # there are many products or output channels
    reads_grey_picture = input_channels == 1 and len(window_sizes) > 1
    is_slow_on_grey = reads_grey_picture and max(products, output_channels) < _MIN_GREY_COUNT
    # before a MaxPool that int8 nodes read, a float Conv would make the pool slower
    is_slower = saves_little or is_slow_on_grey
    if is_slower and not _feeds_int8_through_pool(graph, placement, node):
        count_text = f"only {products} multiplications per output value"
        return f"the first Conv has {count_text}, and is faster in float"
    return ""


def _find_glue_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why glue, an operator without weights such as Add or a pool, has no int8 kernel.

    Its attributes and constant operands decide. "" if it has a kernel.
    """
    # DLA takes constant operands, ONNX Runtime only scalars, any other target none
    takes_operands = placement.runs_on_dla or not has_constant_operand(graph, node)
    if not takes_operands and not is_scalar_glue(graph, placement, node):
        return "one of its operands is constant"
    dla_refusal = _find_dla_refusal(graph, node) if placement.runs_on_dla else ""
    if dla_refusal:
        return dla_refusal

    if node.op_type == "Pad":
        return _find_pad_refusal(graph, node)
    if node.op_type == "ReduceMean" and not is_global_mean(graph, node):
        return "it is the mean over other axes than a picture's"
    if placement.runs_on_onnxruntime:
        kernel_refusal = _find_kernel_refusal(node)
        if kernel_refusal:
            return f"{kernel_refusal} on {placement.name}"
    return ""


def _find_tensor_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why a tensor that a node reads or makes cannot be quantized; "" if all can."""
    if not graph.data_inputs(node):
        return "all its inputs are constant"
    for tensor in _quantized_tensors(graph, node, placement):
        if not graph.is_float(tensor):
            return f"{tensor} is not float32"
        if placement.runs_on_onnxruntime and tensor in graph.captured_through_moves:
            return f"{tensor} is moved and then read inside an If or Loop, {_CRASH_TEXT}"
    return ""


def find_unscaled_tensor(
    graph: Graph, node: onnx.NodeProto, placement: Placement, unscaled_tensors: Container[str]
) -> str:
    """Return the first tensor without a scale that a node needs one for; "" if it needs none.

    A tensor that holds the values of another one shares its scale; then the other one is returned.

    `unscaled_tensors`: all tensors without a scale.
    """
    for tensor in _quantized_tensors(graph, node, placement):
        scale_owner = find_scale_owner(graph, placement, tensor)
        if scale_owner in unscaled_tensors:
            return scale_owner
    return ""


def _quantized_tensors(graph: Graph, node: onnx.NodeProto, placement: Placement) -> list[str]:
    """Return the tensors around a node that are quantized if it runs in int8."""
    tensors = graph.data_inputs(node)
    if placement.runs_on_onnxruntime:
        tensors.append(graph.fused_output(node))
    if placement.runs_on_dla:  # on DLA, also the tensor between the node and a fused Relu
        tensors.append(node.output[0])
    return tensors


def _find_dla_refusal(graph: Graph, node: onnx.NodeProto) -> str:
    """Return why DLA, NVIDIA's accelerator in Jetson chips, does not run a node; "" if it may.

    Sizes are not checked. Source: "DLA Supported Layers and Restrictions" of TensorRT's developer
    guide.
    """
    attrs = attributes(node)
    data_inputs = graph.data_inputs(node)
    if node.op_type == "MatMul" and len(data_inputs) > 1:
        return "DLA multiplies by constant matrices only"
    takes_any_rank = node.op_type in MOVES | {"Gemm", "MatMul"}
    if not takes_any_rank:
        shapes = [graph.shapes.get(name) for name in data_inputs]
        if any(shape is not None and len(shape) != 4 for shape in shapes):
            return "DLA runs it on tensors [N, C, H, W] only"
    if node.op_type == "Concat" and attrs.get("axis") not in (1, -3):
        return "DLA concatenates channels only"
    if node.op_type == "Resize" and resize_mode(node) == "cubic":
        return "DLA has no cubic Resize"
    is_restricted = _has_groups_or_gaps(attrs) or any(attrs.get("pads", ()))
    if node.op_type == "ConvTranspose" and is_restricted:
        return "DLA runs a ConvTranspose without groups, dilations and pads only"
    return ""


def _find_weight_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why a layer's weight cannot be stored in int8, or gains nothing; "" if it can."""
    # int8 kernels take the weights as the second factor
    if node.op_type == "MatMul" and node.input[0] in graph.initializers:
        return "its constant is the first factor"
    weight_name = node.input[1]
    weight = graph.initializers.get(weight_name)
    if weight is None:  # a MatMul may multiply two activations
        return "" if node.op_type == "MatMul" else "its weights are not constant"
    if weight.data_type != FLOAT:
        return "its weights are not float32"
    if weight_name in graph.outputs:
        return "its weights are an output of the model"
    if node.op_type == "Gemm":
        attrs = attributes(node)
        is_scaled = attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0
        if attrs.get("transA", 0) or is_scaled:
            return f"Gemm with transA, alpha or beta has no {placement.precision_name} kernel"
    return find_shape_refusal(graph, node, placement)


def find_shape_refusal(graph: Graph, node: onnx.NodeProto, placement: Placement) -> str:
    """Return why no fast integer kernel takes a layer's weight, by its shape; "" if one does.

    The limits are those of the target's `placement`. A weight that is not constant has no limit.
    """
    weight = graph.initializers.get(node.input[1])
    if weight is None:
        return ""
    weight_shape = weight.dims
    precision = placement.precision_name
    if placement.runs_on_onnxruntime and node.op_type == "ConvTranspose":
        if any(name and name not in graph.initializers for name in node.input[2:]):
            return "its bias is not constant"
        if tile_shape(node, weight_shape) is None:
            return f"it has no {precision} kernel: its windows overlap, have gaps or are cropped"

    if node.op_type == "Conv":
        if not placement.allows_groups and group_count(node) != 1:
            return f"a Conv with groups has no fast {precision} kernel"
        window_size = math.prod(weight_shape[2:])
        if placement.max_window and window_size > placement.max_window:
            return (
                f"a window of {window_size} places has no {precision} kernel, which takes"
                f" {placement.max_window} at most"
            )
    min_channels = placement.min_channels.get(node.op_type, 0)
    # output and input channels: the first axes of a Conv's weight, the last ones of a matrix (a
    # ConvTranspose has no minimum)
    channel_counts = weight_shape[:2] if node.op_type == "Conv" else weight_shape[-2:]
    if any(count < min_channels for count in channel_counts):
        return f"too few channels ({min(channel_counts)}) to be faster in {precision} than in float"
    return ""


def is_scalar_glue(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether an Add or Mul of a constant can run in int8: with a scalar other than 0."""
    data_inputs = graph.data_inputs(node)
    if not placement.runs_on_onnxruntime or not data_inputs:
        return False
    return bool(graph.scalar_operand(data_inputs[0], node))  # 0 has no scale


def _find_pad_refusal(graph: Graph, node: onnx.NodeProto) -> str:
    """Return why a Pad cannot run on integers: its value is not 0, or an activation follows."""
    if attributes(node).get("mode", b"constant") != b"constant" or pads_nonzero(graph, node):
        return "it pads with a value other than 0"
    return "" if graph.fused_output(node) == node.output[0] else "an activation follows it"


def _find_kernel_refusal(node: onnx.NodeProto) -> str:
    """Return why ONNX Runtime has no integer kernel of a node, or one with other results.

    An interpolating Resize is computed in float between its pairs; for the average, see
    `deploy.targets.onnxruntime.rewrites`.
    """
    if node.op_type == "Resize" and resize_mode(node) != "nearest":
        return f"a Resize by {resize_mode(node)} is not run in int8"
    if averages_beyond_padding(node) and any(attributes(node).get("pads", [])):
        return "an average with ceil_mode and count_include_pad gives other values in int8"
    return ""


def _reads_model_input(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node reads an input of the model, possibly through a Cast."""
    cast = graph.find_producer(node.input[0], "Cast")
    tensor = node.input[0] if cast is None else cast.input[0]
    return tensor in graph.inputs


def _makes_many_values(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a first Conv makes so many values per input value that int8 is faster.

    Float values have to be written, transposed and quantized, which costs more than the products
    (float and int8 in ms, 224x224: 3 to 32 channels 2.3 and 1.5, to 64 channels 6.0 and 3.3; with
    stride 2 and the next layer 0.49 and 0.42; 640x640 with a SiLU 7.2 and 5.5).
    """
    # the window: input channels, rows, columns
    output_channels, *window_shape = graph.initializers[node.input[1]].dims
    if output_channels < _MIN_CHANNELS:
        return False
    has_stride_1 = set(attributes(node).get("strides", [1])) == {1}
    return has_stride_1 or math.prod(window_shape) >= _MIN_PRODUCTS


def _feeds_int8_through_pool(graph: Graph, placement: Placement, node: onnx.NodeProto) -> bool:
    """Whether a MaxPool reads a node's activation and passes it to a node that can run in int8.

    The MaxPool must run in int8 too: then it is in `placement.glue`, the operators beside layers.

    Then a float Conv is slow: ONNX Runtime moves the QuantizeLinear from after the pool to before
    it, and pooling in uint8 costs more than the float Conv saves. An ImageNet stem, a pool and four
    Convs run 0.62x as fast as FP32 with the first Conv in float, and 1.7x with it in int8. With a
    Conv in place of the pool it is 2.8x (float) and 2.6x.
    """
    # the tensors that a MaxPool may read: the output of the node and of a Relu fused with it. The
    # loop appends the outputs of the activations that follow, such as a Sigmoid
    activations = [graph.fused_output(node)]
    for tensor in activations:
        for reader in graph.readers.get(tensor, []):
            if standard_type(reader) == "MaxPool" and "MaxPool" in placement.glue:
                pool_readers = graph.readers.get(reader.output[0], [])
                pool_reader_types = {pool_reader.op_type for pool_reader in pool_readers}
                return not placement.runnable_op_types.isdisjoint(pool_reader_types)
            activation = graph.fused_output(reader)
            if standard_type(reader) in _ACTIVATIONS and activation not in activations:
                activations.append(activation)
    return False


def find_scale_owner(graph: Graph, placement: Placement, tensor: str) -> str:
    """Return the tensor whose values `tensor` holds, traced back through data movement."""
    while (source := _find_moved_input(graph, placement, tensor)) is not None:
        tensor = source
    return tensor


def _find_moved_input(graph: Graph, placement: Placement, tensor: str) -> str | None:
    """Return the input of the scale-keeping node that makes `tensor`; None for other nodes."""
    node = graph.producer.get(tensor)
    if node is None or standard_type(node) not in placement.keeps_scale or not node.input:
        return None
    if not keeps_range(graph, node) or node.input[0] in graph.initializers:
        return None
    is_data_output = node.op_type == "Split" or tensor == node.output[0]
    return node.input[0] if is_data_output else None
