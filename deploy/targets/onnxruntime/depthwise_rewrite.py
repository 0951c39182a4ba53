"""Depthwise int8 Convs get a multiple of 16 channels, which ONNX Runtime's kernel takes at a time.

With any other number the layer takes up to three times as long (5x5 over 28x28: 240 channels 77 us,
232 of them 240; without VNNI 162 and 238). Channels of zeros are appended from the layers that make
them to those that read them, whose weights for them are 0, so that all other values keep every
bit::

    Conv [88, 24, 1, 1] -> Relu -> depthwise Conv [88, 1, 3, 3] -> Relu -> Conv [24, 88, 1, 1]
    Conv [96, 24, 1, 1] -> Relu -> depthwise Conv [96, 1, 3, 3] -> Relu -> Conv [24, 96, 1, 1]

Operators that treat each channel alone may stand between, and a squeeze-and-excite too. It is done
where the depthwise layers gain half as much again as all layers lose, counted in products.

Source: ONNX operators Conv-11, QuantizeLinear-13 and DequantizeLinear-13.
"""

import math
from dataclasses import dataclass, field

import onnx

from deploy.graph.edit import drop_unread, rename_tensors
from deploy.graph.index import (
    PADDED_SUFFIX,
    Graph,
    Shape,
    attributes,
    by_name,
    group_count,
)
from deploy.graph.placement import reduced_axes
from deploy.targets.onnxruntime.rewrite_base import (
    BIAS,
    WEIGHT,
    RewriteContext,
    append_zero_channels,
    find_unshared_integers,
    weight_and_bias_positions,
)

CHANNELS_AT_ONCE = 16  # of ONNX Runtime's depthwise kernel
_MIN_GAIN = 1.5  # times the cost
# operators on each channel alone, finite at 0
_CHANNELWISE = frozenset(
    {
        *("Relu", "Clip", "LeakyRelu", "Elu", "Selu", "HardSwish", "HardSigmoid", "Sigmoid"),
        *("Tanh", "Softplus", "Softsign", "Erf", "Gelu", "Abs", "Neg", "Identity"),
        *("GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool"),
        *("QuantizeLinear", "DequantizeLinear"),
        *("Add", "Sub", "Mul", "Sum", "Min", "Max"),
    }
)


@dataclass(slots=True)
class _RegionConv:
    """A Conv that gets more channels.

    Attributes:
        node: the Conv.
        weight: its weight, float or integers.
        is_depthwise: whether it has the region's channels as groups.
        widened_weight_axes: axes of its weight that get longer: 0 for its output, 1 for its input.
    """

    node: onnx.NodeProto
    weight: onnx.TensorProto
    is_depthwise: bool = False
    widened_weight_axes: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Region:
    """Tensors and Convs that get more channels together, around a depthwise Conv.

    Attributes:
        channels: number of channels so far.
        tensors: tensors with these channels.
        convs: name -> Conv that reads or makes one of them.
    """

    channels: int
    tensors: set[str] = field(default_factory=set)
    convs: dict[str, _RegionConv] = field(default_factory=dict)

    @property
    def added_channels(self) -> int:
        """Number of channels up to the next multiple of 16."""
        return -self.channels % CHANNELS_AT_ONCE


def widen_depthwise(model: onnx.ModelProto, context: RewriteContext) -> None:
    """Give depthwise int8 Convs a multiple of 16 channels where that saves time, in place.

    The tensors and Convs around such a Conv that have the same channels get as many. Together they
    are its region.
    """
    candidates = list(filter(_has_uneven_groups, model.graph.node))
    if not candidates:
        return
    graph = Graph(model)
    visited_convs: set[str] = set()  # Convs of the regions so far
    for node in candidates:
        weight = find_unshared_integers(graph, node)
        if weight is None or node.name in visited_convs:
            continue
        is_depthwise = weight.dims[:2] == [group_count(node), 1]
        if not is_depthwise:  # it has groups of several channels
            continue
        region = _find_region(graph, node)
        if region is None:
            continue
        visited_convs |= set(region.convs)
        if _is_worthwhile(graph, context, region):
            _widen_region(model, graph, region)
    drop_unread(model.graph)


def _has_uneven_groups(node: onnx.NodeProto) -> bool:
    """Whether a node may be a depthwise Conv with channels beyond a multiple of 16."""
    if node.op_type != "Conv":
        return False
    groups = group_count(node)
    return groups > 1 and groups % CHANNELS_AT_ONCE > 0


def _find_constant(graph: Graph, node: onnx.NodeProto, position: int) -> onnx.TensorProto | None:
    """Return a Conv's weight or bias, dequantized or float."""
    if node.input[position] in graph.initializers:
        return graph.initializers[node.input[position]]
    return find_unshared_integers(graph, node, position)


def _find_region(graph: Graph, depthwise: onnx.NodeProto) -> _Region | None:
    """Return the tensors and Convs that need more channels if a depthwise Conv gets more.

    The search starts at its input, and goes up and down the graph through all nodes that treat each
    channel alone. It ends at the Convs that make or read the channels.

    None if the search reaches an input or output of the model, a tensor of a subgraph, a node that
    mixes channels and is no Conv, or a Conv that cannot get more channels.
    """
    region = _Region(group_count(depthwise))
    pending_tensors = [depthwise.input[0]]  # tensors of the region that are not visited yet
    while pending_tensors:
        tensor = pending_tensors.pop()
        if tensor in region.tensors:
            continue
        region.tensors.add(tensor)
        producer = graph.producer.get(tensor)
        if producer is None or graph.is_read_outside(tensor):
            return None
        for node in (producer, *graph.readers.get(tensor, [])):
            # tensors of the node that must have as many channels; None if that is not possible
            if node.op_type == "Conv":
                equally_wide = _add_conv(graph, region, node, tensor)
            else:
                equally_wide = _equally_wide_tensors(graph, node)
            if equally_wide is None:
                return None
            pending_tensors += equally_wide
    return region


def _add_conv(
    graph: Graph, region: _Region, node: onnx.NodeProto, region_tensor: str
) -> list[str] | None:
    """Add a Conv to a region, whose tensors and Convs all get more channels or none does.

    `region_tensor` is the tensor of the region that the Conv reads or makes.

    Returns:
        The tensors that must get more channels if the Conv does: input and output of a depthwise
        one; [] for any other, where the region ends. None if the Conv cannot get more channels: its
        constants are computed or shared, or its groups or channels are not as many as the region's.
    """
    constants = [
        _find_constant(graph, node, position) for position in weight_and_bias_positions(node)
    ]
    weight = constants[0]
    if weight is None or None in constants:  # None stands for one that is computed or shared
        return None
    # a Conv that is refused below stays in the region, which the caller then drops
    conv = region.convs.setdefault(node.name, _RegionConv(node, weight))
    out_channels, in_channels = weight.dims[:2]
    if group_count(node) == out_channels == region.channels and in_channels == 1:
        conv.is_depthwise = True
        conv.widened_weight_axes.add(0)  # its weight is [channels, 1, ...]
        return [node.input[0], node.output[0]]

    if group_count(node) != 1:
        return None
    # the axis of the weight whose channels are those of the tensor: input channels if the Conv
    # reads it, output channels if the Conv makes it
    axis = 1 if region_tensor == node.input[0] else 0
    # the region may hold tensors of another number of channels, such as [N, 1, H, W], which an
    # operator broadcasts
    if weight.dims[axis] != region.channels:
        return None
    conv.widened_weight_axes.add(axis)
    return []


def _equally_wide_tensors(graph: Graph, node: onnx.NodeProto) -> list[str] | None:
    """Return the tensors of a node that have the same channels; None if it mixes channels."""
    if node.op_type == "ReduceMean" and _reduces_pixels(graph, node):
        names = [node.input[0], node.output[0]]
    elif node.op_type in _CHANNELWISE and len(node.output) == 1:
        names = [*filter(None, node.input), *node.output]
    else:
        return None
    tensors = [name for name in names if not _is_scalar(graph, name)]
    if any(name in graph.constants for name in tensors):  # a value for each channel
        return None
    return tensors


def _is_scalar(graph: Graph, name: str) -> bool:
    """Whether a tensor is one constant value, dequantized or as it is."""
    dequantize = graph.find_producer(name, "DequantizeLinear")
    stored_name = name if dequantize is None else dequantize.input[0]
    return graph.scalar(stored_name) is not None


def _reduces_pixels(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean leaves every channel, and as many axes."""
    axes = reduced_axes(graph, node)
    keeps_channels = bool(axes) and (min(axes) > 1 or axes == [-1])
    return keeps_channels and bool(attributes(node).get("keepdims", 1))


def _is_worthwhile(graph: Graph, context: RewriteContext, region: _Region) -> bool:
    """Whether a region's depthwise Convs gain enough time by a multiple of 16 channels.

    A region is the tensors and Convs that get more channels together.

    Gain: each product of the depthwise int8 Convs becomes faster by `extra_time`. Cost: all Convs
    of the region, the dense ones too, compute products with the added channels. The unit of time is
    one product in a depthwise int8 Conv of a multiple of 16 channels; `context.kernels` has the
    times of other products, measured for the CPU.
    """
    kernels = context.kernels
    float_graph = context.float_graph
    # 8 channels beyond a multiple of 16 cost less than any other number beyond
    if region.channels % CHANNELS_AT_ONCE == 8:
        extra_time = kernels.eight_extra
    else:
        extra_time = kernels.uneven_extra
    output_by_name = {node.name: node.output[0] for node in float_graph.nodes}
    gain = cost = 0.0
    for name, conv in region.convs.items():
        is_int8 = find_unshared_integers(graph, conv.node) is not None
        output_shape = float_graph.shapes.get(output_by_name.get(name, ""))
        products = math.prod(conv.weight.dims) * _pixel_count(output_shape)
        added_products = products / region.channels * region.added_channels
        if conv.is_depthwise:
            cost += added_products  # each takes one unit of time, in float32 too, roughly
            if is_int8:
                gain += products * extra_time
        else:
            product_time = kernels.int8 if is_int8 else kernels.float32
            # the weight gets longer on one axis, input or output channels, or on both
            cost += len(conv.widened_weight_axes) * added_products * product_time
    return gain > _MIN_GAIN * cost


def _pixel_count(shape: Shape | None) -> int:
    """Return the pixels of a map of known size, else 1."""
    if shape is None:
        return 1
    known_sizes = [size for size in shape[2:] if isinstance(size, int)]
    return math.prod(known_sizes) if len(known_sizes) == len(shape) - 2 else 1


def _widen_region(model: onnx.ModelProto, graph: Graph, region: _Region) -> None:
    """Append channels of zeros to the weights and biases of a region's Convs, and mark its tensors.

    The tensors and Convs of a region get more channels together. The tensors' new names end in
    `PADDED_SUFFIX`.
    """
    added = region.added_channels
    for conv in region.convs.values():
        node = conv.node
        append_zero_channels(model, graph, node, WEIGHT, conv.widened_weight_axes, added)
        if BIAS in weight_and_bias_positions(node) and 0 in conv.widened_weight_axes:
            append_zero_channels(model, graph, node, BIAS, [0], added)
        if conv.is_depthwise:
            by_name(node.attribute)["group"].i = region.channels + added
    new_names = {tensor: f"{tensor}{PADDED_SUFFIX}" for tensor in region.tensors}
    rename_tensors(graph.nodes, new_names)
    # declared shapes with the old number of channels
    outdated_shapes = [value for value in model.graph.value_info if value.name in new_names]
    for value in outdated_shapes:
        model.graph.value_info.remove(value)
