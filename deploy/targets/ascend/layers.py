"""The layers of a model that AMCT quantizes, and the reasons why other nodes stay float.

Rules of hicann/amct's capacity table and checks, restricted to what ATC reads from ONNX:

=============  ============  =============================================  ==================
ONNX op        weight scale  conditions                                     bias
=============  ============  =============================================  ==================
Conv           per channel   1-D, 2-D, 3-D kernel, constant weight          input 2
ConvTranspose  per channel   2-D kernel, constant weight                    input 2
Gemm           per tensor    transA 0, alpha 1, beta 1, constant 2-D weight input 2
MatMul         per tensor    second input a constant of 2 or 3 dimensions   a following Add
AveragePool    none          2-D kernel                                     none
=============  ============  =============================================  ==================

Two more are quantized only if a configuration or record names them: a MatMul of two activations, by
its name, and an input of an Add or MaxPool (tensor_quantize), by '<node>:<index>'::

    x -> AscendQuant -> int8 -> AscendAntiQuant -> Add, MaxPool      less to move; the node is float
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx

from deploy.errors import ModelError
from deploy.graph.index import ONNX_DOMAINS, Graph, attributes, optional_input
from deploy.graph.placement import ASCEND
from deploy.graph.plan import WeightTarget

LAYER_OPS = tuple(sorted(ASCEND.heavy))
# AMCT's torch package names layer types after torch.nn classes; both vocabularies are accepted.
# torch class -> (op type, spatial rank of the kernel)
LAYERS_BY_TORCH_CLASS = {
    "Conv1d": (("Conv", 1),),
    "Conv2d": (("Conv", 2),),
    "Conv3d": (("Conv", 3),),
    "ConvTranspose1d": (("ConvTranspose", 1),),
    "ConvTranspose2d": (("ConvTranspose", 2),),
    "Linear": (("Gemm", 0), ("MatMul", 0)),
    "AvgPool2d": (("AveragePool", 2),),
}
TENSOR_QUANTIZE_OPS = {"Add": 2, "MaxPool": 1}  # op type of tensor_quantize -> number of its inputs
_WEIGHT_RANKS = {  # op type -> dimensions of its weight, as numbers and as text
    "Conv": ((3, 4, 5), "3-D to 5-D"),
    "ConvTranspose": ((4,), "4-D"),
    "Gemm": ((2,), "2-D"),
    "MatMul": ((2, 3), "2-D or 3-D"),
}
_FAKE_QUANT_SUFFIX = ".quant.fakequant.round"  # of the name of a node in AMCT's fake-quant models
SHARED_WEIGHT = "its weight is shared with another node"
_TWO_ACTIVATIONS = "neither factor is a constant: int8 only where a configuration names it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node that can run in int8 on Ascend, or a node input that can be moved in int8.

    Attributes:
        name: node name, or '<node>:<index>' of an input; the key in configurations and records.
        kind: op type, one of `LAYER_OPS`; for an input one of `TENSOR_QUANTIZE_OPS`.
        input: tensor that is quantized, the first input of a node.
        output: tensor that AscendDequant writes: the node's output, or the bias Add's.
        weight: initializer name, '' for AveragePool.
        bias: initializer name, '' without bias.
        bias_add: name of the Add that holds a MatMul's bias, '' if there is none.
        group: groups of a convolution.
        spatial_rank: of a convolution's or pool's kernel, 2 for a window of rows and columns; 0
            elsewhere.
        trans_b: the Gemm's weight is stored [C_out, C_in].
        channels_in: input channels, over all groups; 0 without weight.
        other_inputs: further activations that the node reads: the second factor of a MatMul without
            weight, the other input of an Add.
        input_index: index of an input; None for a node.
        stacked: a MatMul's weight has three dimensions.
    """

    name: str
    kind: str
    input: str
    output: str
    weight: str = ""
    bias: str = ""
    bias_add: str = ""
    group: int = 1
    spatial_rank: int = 0
    trans_b: bool = False
    channels_in: int = 0
    other_inputs: tuple[str, ...] = ()
    input_index: int | None = None
    stacked: bool = False

    @property
    def node(self) -> str:
        """The name of its node."""
        return self.name if self.input_index is None else self.name.rpartition(":")[0]

    @property
    def quant_node_prefix(self) -> str:
        """Prefix of the names of the nodes that quantize its input."""
        return self.name if self.input_index is None else f"{self.node}.{self.input_index}"

    @property
    def activations(self) -> tuple[str, ...]:
        """The tensors that it reads, without constants."""
        return (self.input, *self.other_inputs)

    @property
    def two_activations(self) -> bool:
        """Whether it is a MatMul of two computed factors."""
        return self.kind == "MatMul" and not self.weight

    @property
    def channel_wise(self) -> bool:
        """Whether this layer's weight may have one scale per output channel."""
        return bool(self.weight) and self.kind not in ASCEND.per_tensor

    @property
    def channels_last(self) -> bool:
        """Whether the output channels are the last axis of its weight."""
        return self.kind == "MatMul" or (self.kind == "Gemm" and not self.trans_b)

    @property
    def weight_target(self) -> WeightTarget:
        """Its weight as a plan's target; a grouped ConvTranspose has no channel axis."""
        axis = None
        if self.channel_wise and self.kind == "Conv":
            axis = 0
        elif self.channel_wise and self.group == 1:
            axis = 1
        return WeightTarget(self.weight, self.node, axis, self.bias or None)

    @property
    def can_use_adaround(self) -> bool:
        """Whether AMCT's AdaRound supports it: 2-D convolutions and matrices."""
        matrix = self.kind in ("Gemm", "MatMul") and not self.stacked
        return bool(self.weight) and (matrix or self.spatial_rank == 2)

    @property
    def symmetric_only(self) -> bool:
        """Whether it takes no activation offset: 3-D Conv, and MatMul of two activations."""
        return (self.kind == "Conv" and self.spatial_rank == 3) or self.two_activations


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The layers of a model in execution order, and why other nodes of these types are float.

    Attributes:
        layers: name -> layer that is quantized by default.
        float_reasons: node of a type that AMCT quantizes -> why it stays float.
        ops: name of every node -> its op type.
        optional_layers: name -> layer or input that is quantized only if named.
        unfit_inputs: input of Add or MaxPool -> reason why it cannot be quantized.
        shared_weights: copied weight of a layer -> the shared weight that it copies.
    """

    layers: dict[str, Layer]
    float_reasons: dict[str, str]
    ops: dict[str, str]
    optional_layers: dict[str, Layer]
    unfit_inputs: dict[str, str]
    shared_weights: dict[str, str]

    @property
    def layer_by_name(self) -> dict[str, Layer]:
        """All that can be quantized, inputs too: `layers`, then `optional_layers`."""
        return {**self.layers, **self.optional_layers}

    @property
    def configurable_names(self) -> list[str]:
        """Names of the layers that a configuration may contain."""
        return [name for name, layer in self.layer_by_name.items() if layer.input_index is None]

    def select(self, names: Collection[str]) -> dict[str, Layer]:
        """Return the layers and inputs of these names, in the order of `layer_by_name`."""
        return {name: layer for name, layer in self.layer_by_name.items() if name in names}


def find_layers(model: onnx.ModelProto) -> LayerGraph:
    """Find the layers of a float model that AMCT quantizes, and why other nodes stay in float.

    `model`: with unique node names.

    Raises:
        ModelError: the model is quantized already.
    """
    ops = {node.name: node.op_type for node in model.graph.node}
    _refuse_quantized(ops)
    index = Graph(model)  # lookups of tensors: their readers, types and ranks; constants
    layer_graph = LayerGraph(
        layers={},
        float_reasons={},
        ops=ops,
        optional_layers={},
        unfit_inputs={},
        shared_weights={},  # `prepare_model` adds the weights that it copies
    )
    for node in model.graph.node:
        if node.op_type in TENSOR_QUANTIZE_OPS:  # adds to optional_layers and unfit_inputs
            _add_optional_inputs(node, index, layer_graph)
        if node.op_type not in LAYER_OPS or node.domain not in ONNX_DOMAINS:
            continue
        layer_or_reason = _layer_or_float_reason(node, index)
        if isinstance(layer_or_reason, Layer):
            layer_graph.layers[node.name] = layer_or_reason
        else:  # it stays in float
            layer_graph.float_reasons[node.name] = layer_or_reason
        # float by default, as said above, but a configuration may name it to have it in int8
        if layer_or_reason == _TWO_ACTIVATIONS:
            layer_graph.optional_layers[node.name] = Layer(
                name=node.name,
                kind=node.op_type,
                input=node.input[0],
                output=node.output[0],
                other_inputs=(node.input[1],),
            )
    return layer_graph


def _refuse_quantized(ops: Mapping[str, str]) -> None:
    """Refuse a model with Q/DQ pairs or AMCT's fake quantization; `ops`: node -> its op type."""
    quantization_nodes = sorted({"QuantizeLinear", "DequantizeLinear"}.intersection(ops.values()))
    quantization_nodes += [name for name in ops if name.endswith(_FAKE_QUANT_SUFFIX)][:1]
    if quantization_nodes:
        raise ModelError(
            f"a model to be quantized must have no quantization nodes, got {quantization_nodes};"
            " start from the float model"
        )


def _multiplies_activations(node: onnx.NodeProto, index: Graph) -> bool:
    """Whether a node is a MatMul of float tensors, none of which is known to be a vector."""
    if node.op_type != "MatMul" or not all(map(index.is_float, node.input)):
        return False
    return all(index.rank(tensor) != 1 for tensor in node.input)


def _add_optional_inputs(node: onnx.NodeProto, index: Graph, layer_graph: LayerGraph) -> None:
    """Add the inputs of an Add or MaxPool to `layer_graph`, each as a layer of its own.

    They are quantized if the setting tensor_quantize names them. An input goes to
    `optional_layers`, or to `unfit_inputs` with the reason why it cannot be int8.
    """
    # Add of a bias -> the MatMul whose layer it is part of
    matmul_by_bias_add = {
        layer.bias_add: name for name, layer in layer_graph.layers.items() if layer.bias_add
    }
    for position, tensor in enumerate(node.input):
        input_name = f"{node.name}:{position}"  # the name that tensor_quantize gives it
        if tensor in index.constants:
            layer_graph.unfit_inputs[input_name] = "it is a constant"
        elif not index.is_float(tensor):
            layer_graph.unfit_inputs[input_name] = "it is not float32"
        elif node.name in matmul_by_bias_add:
            matmul = matmul_by_bias_add[node.name]
            layer_graph.unfit_inputs[input_name] = f"this Add is the bias of {matmul!r}"
        else:
            other_inputs = [*node.input[:position], *node.input[position + 1 :]]
            other_activations = [name for name in other_inputs if name not in index.constants]
            layer_graph.optional_layers[input_name] = Layer(
                name=input_name,
                kind=node.op_type,
                input=tensor,
                output=node.output[0],
                other_inputs=tuple(other_activations),
                input_index=position,
            )


def _layer_or_float_reason(node: onnx.NodeProto, index: Graph) -> Layer | str:
    """Return the `Layer` of a node that AMCT quantizes, or the reason why it stays in float."""
    if node.input[0] in index.constants:
        return "its input is a constant"
    node_attributes = attributes(node)
    layer = Layer(name=node.name, kind=node.op_type, input=node.input[0], output=node.output[0])
    if node.op_type == "AveragePool":
        rank = len(node_attributes.get("kernel_shape", ()))
        if rank != 2:
            return f"a pool must have a 2-D kernel, got {rank}-D"
        return replace(layer, spatial_rank=rank)

    weight = index.constants.get(optional_input(node, 1))
    if weight is None:
        if _multiplies_activations(node, index):
            return _TWO_ACTIVATIONS
        return "its weight must be a constant"
    bias = optional_input(node, 2)
    weight_reason = _float_reason_of_weight(node, weight, node_attributes, index)
    float_reason = weight_reason or _float_reason_of_bias(
        bias, weight, node_attributes, node, index.constants
    )
    if float_reason:
        return float_reason

    layer = replace(layer, weight=node.input[1], bias=bias)
    if node.op_type == "MatMul":
        return _with_bias_add(layer, node, weight, index)
    group = int(node_attributes.get("group", 1))
    trans_b = bool(node_attributes.get("transB", 0))
    # the weight of a ConvTranspose or a Gemm has the input channels in its first axis
    channels_in = weight.dims[0]
    if node.op_type == "Conv" or trans_b:
        channels_in = weight.dims[1] * group
    spatial_rank = len(weight.dims) - 2  # 0 for a Gemm
    return replace(
        layer, group=group, spatial_rank=spatial_rank, trans_b=trans_b, channels_in=channels_in
    )


def _with_bias_add(
    layer: Layer, node: onnx.NodeProto, weight: onnx.TensorProto, index: Graph
) -> Layer:
    """Return a MatMul's layer with the Add of its bias, if only that Add reads the product.

    AMCT leaves an Add in float whose first input is the bias, as PyTorch exports it.
    """
    layer = replace(layer, channels_in=weight.dims[-2], stacked=len(weight.dims) == 3)
    add = index.bias_add(node, [weight.dims[-1]])
    if add is None or add.input[0] != layer.output:
        return layer
    return replace(layer, output=add.output[0], bias=add.input[1], bias_add=add.name)


def _float_reason_of_weight(
    node: onnx.NodeProto, weight: onnx.TensorProto, node_attributes: dict[str, Any], index: Graph
) -> str:
    """Return why a node with this constant weight stays in float; '' if AMCT quantizes it.

    Args:
        node: the node.
        weight: its weight.
        node_attributes: name of an attribute -> its value.
        index: the model's tensors: who reads them, their shapes, which ones subgraphs read.
    """
    if weight.data_type != onnx.TensorProto.FLOAT:
        return "its weight must be float32"
    weight_name = node.input[1]
    op = node.op_type
    rank = len(weight.dims)
    if len(index.readers[weight_name]) > 1 or index.is_read_outside(weight_name):
        return SHARED_WEIGHT  # as integers it has the scales of one layer, wrong for other readers
    supported_ranks, ranks_text = _WEIGHT_RANKS[op]
    if rank not in supported_ranks:
        return f"a {op} weight must be {ranks_text}, got {rank}-D"
    if op == "MatMul" and index.rank(node.input[0]) == 1:  # an unknown input counts as a matrix
        return "a MatMul's input must be 2-D or more, got 1-D"
    if op == "Gemm":
        factors = (
            node_attributes.get("transA", 0),
            node_attributes.get("alpha", 1.0),
            node_attributes.get("beta", 1.0),
        )
        if factors != (0, 1.0, 1.0):
            return f"a Gemm must have transA 0, alpha 1, beta 1, got {factors}"
    return ""


def _float_reason_of_bias(
    bias: str,
    weight: onnx.TensorProto,
    node_attributes: dict[str, Any],
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
) -> str:
    """Return why a bias keeps its node in float; '' if it is a constant with a value per channel.

    Args:
        bias: name of the bias; '' if the node has none, which keeps no node in float.
        weight: the node's weight.
        node_attributes: name of an attribute -> its value.
        node: the node.
        constants: name -> constant of the model.
    """
    if not bias:
        return ""
    if bias not in constants:
        return "its bias must be a constant"
    if node.op_type == "Conv" or node_attributes.get("transB", 0):
        channels = weight.dims[0]
    else:  # the weight of a ConvTranspose or a Gemm has the output channels in its second axis
        channels = weight.dims[1] * node_attributes.get("group", 1)
    bias_shape = list(constants[bias].dims)
    if bias_shape in ([channels], [1, channels]):
        return ""
    return f"its bias must have {channels} values, one a channel, got shape {bias_shape}"
