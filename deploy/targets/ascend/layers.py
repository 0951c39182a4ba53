"""Which nodes of a model AMCT would quantize, and why it leaves the others alone.

Rules of hicann/amct's capacity table and checks, narrowed to what ATC takes from ONNX:

=============  ============  =============================================  ==================
ONNX op        weight scale  conditions                                     bias
=============  ============  =============================================  ==================
Conv           per channel   1-D, 2-D, 3-D kernel, constant weight          input 2
ConvTranspose  per channel   2-D kernel, constant weight                    input 2
Gemm           per tensor    transA 0, alpha 1, beta 1, constant 2-D weight input 2
MatMul         per tensor    second input a constant 2-D weight             a following Add
AveragePool    none          2-D kernel                                     none
=============  ============  =============================================  ==================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deploy.errors import ModelError
from deploy.graph.edit import copied, name_nodes_by_place
from deploy.graph.index import Graph, attributes
from deploy.graph.plan import ASCEND

if TYPE_CHECKING:
    import onnx

TYPES = tuple(sorted(ASCEND.heavy))
# AMCT's torch package names layer types after torch.nn classes; both vocabularies are taken.
ALIASES = {
    "Conv1d": ("Conv",),
    "Conv2d": ("Conv",),
    "Conv3d": ("Conv",),
    "ConvTranspose1d": ("ConvTranspose",),
    "ConvTranspose2d": ("ConvTranspose",),
    "Linear": ("Gemm", "MatMul"),
    "AvgPool2d": ("AveragePool",),
}
AMCT_OPS = ("AscendQuant", "AscendDequant", "AscendAntiQuant", "AscendWeightQuant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node that can run in int8 on Ascend.

    Attributes:
        name: node name, the key in configurations and records.
        kind: one of `TYPES`.
        input: tensor that AscendQuant reads.
        output: tensor that AscendDequant reads: the node's, or the following Add's for a MatMul.
        weight: initializer name, '' for AveragePool.
        bias: initializer name, '' where there is none.
        bias_add: name of the Add that holds a MatMul's bias, '' where there is none.
        group: groups of a convolution.
        rank: spatial rank of a convolution's or pool's kernel, 0 elsewhere.
        trans_b: the Gemm's weight is stored [C_out, C_in].
    """

    name: str
    kind: str
    input: str
    output: str
    weight: str = ""
    bias: str = ""
    bias_add: str = ""
    group: int = 1
    rank: int = 0
    trans_b: bool = False

    @property
    def channel_wise(self) -> bool:
        """Whether this layer's weight may have one scale per output channel."""
        return self.kind != "AveragePool" and self.kind not in ASCEND.per_tensor

    @property
    def holds_bias(self) -> bool:
        """Whether it has a place for a bias: a MatMul only in the Add behind it."""
        return bool(self.weight) and (self.kind != "MatMul" or bool(self.bias_add))

    @property
    def symmetric_only(self) -> bool:
        """3-D convolutions take no activation offset."""
        return self.kind == "Conv" and self.rank == 3


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The layers of a model in the order they run, and why other nodes of these types are not.

    Attributes:
        layers: name -> layer.
        refused: name -> reason.
        types: op types present in the model.
    """

    layers: dict[str, Layer]
    refused: dict[str, str] = field(default_factory=dict)
    types: frozenset[str] = frozenset()


def name_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node has a name of its own: '<op>_<index>' where it had none."""
    named = copied(model)
    name_nodes_by_place(named.graph)
    return named


def find_layers(model: onnx.ModelProto) -> LayerGraph:
    """Layers of a float model whose nodes have names of their own.

    Raises:
        ModelError: the model already holds quantization nodes.
    """
    ops = Counter(node.op_type for node in model.graph.node)
    present = sorted({*AMCT_OPS, "QuantizeLinear", "DequantizeLinear", "FakeQuant"} & set(ops))
    if present:
        raise ModelError(
            f"a model to be quantized must hold no quantization nodes, got {present};"
            " start from the float model"
        )
    index = Graph(model)
    layers: dict[str, Layer] = {}
    refused: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in TYPES:
            continue
        found = _layer(node, index)
        if isinstance(found, Layer):
            layers[found.name] = found
        else:
            refused[node.name] = found
    return LayerGraph(layers, refused, frozenset(ops))


def _layer(node: onnx.NodeProto, index: Graph) -> Layer | str:
    """The layer, or the reason why this node stays in float."""
    given = attributes(node)
    rank = len(given.get("kernel_shape", ()))
    base = {"name": node.name, "kind": node.op_type, "input": node.input[0]}
    if node.input[0] in index.constants:
        return "its input is a constant"
    if node.op_type == "AveragePool":
        if rank != 2:
            return f"a pool must have a 2-D kernel, got {rank}-D"
        return Layer(**base, output=node.output[0], rank=rank)
    weight = index.constants.get(node.input[1]) if len(node.input) > 1 else None
    if weight is None:
        return "its weight must be a constant"
    reason = _refuse_weight(node, weight, given, index)
    if reason:
        return reason
    bias = node.input[2] if len(node.input) > 2 else ""
    reason = _refuse_bias(bias, weight, given, node, index)
    if reason:
        return reason
    if node.op_type == "MatMul":
        add, bias, output = _bias_add(node, weight, index)
        return Layer(**base, output=output, weight=node.input[1], bias=bias, bias_add=add)
    return Layer(
        **base,
        output=node.output[0],
        weight=node.input[1],
        bias=bias,
        group=int(given.get("group", 1)),
        rank=len(weight.dims) - 2,
        trans_b=bool(given.get("transB", 0)),
    )


def _refuse_weight(
    node: onnx.NodeProto, weight: onnx.TensorProto, given: dict[str, Any], index: Graph
) -> str:
    """Why a node with this constant weight stays in float; '' where it need not."""
    rank = len(weight.dims)
    if weight.data_type != 1:
        return "its weight must be float32"
    if len(index.readers[node.input[1]]) > 1:
        return "its weight is shared with another node"
    if node.op_type == "Conv" and rank not in (3, 4, 5):
        return f"a Conv weight must be 3-D to 5-D, got {rank}-D"
    if node.op_type == "ConvTranspose" and rank != 4:
        return f"a ConvTranspose weight must be 4-D, got {rank}-D"
    if node.op_type in ("Gemm", "MatMul") and rank != 2:
        return f"a {node.op_type} weight must be 2-D, got {rank}-D"
    if node.op_type == "Gemm":
        factors = (given.get("transA", 0), given.get("alpha", 1.0), given.get("beta", 1.0))
        if factors != (0, 1.0, 1.0):
            return f"a Gemm must have transA 0, alpha 1, beta 1, got {factors}"
    return ""


def _refuse_bias(
    bias: str,
    weight: onnx.TensorProto,
    given: dict[str, Any],
    node: onnx.NodeProto,
    index: Graph,
) -> str:
    """Why a bias keeps its node in float: it must be constant, one value a channel."""
    if not bias:
        return ""
    if bias not in index.constants:
        return "its bias must be a constant"
    if node.op_type != "Gemm":
        return ""
    columns = weight.dims[0 if given.get("transB", 0) else 1]
    dims = list(index.constants[bias].dims)
    if dims in ([columns], [1, columns]):
        return ""
    return f"its bias must have {columns} values, one a channel, got shape {dims}"


def _bias_add(node: onnx.NodeProto, weight: onnx.TensorProto, index: Graph) -> tuple[str, str, str]:
    """(Add's name, bias initializer, tensor to dequantize) behind a MatMul."""
    output = node.output[0]
    users = index.readers.get(output, [])
    alone = output not in index.outputs and len(users) == 1
    if alone and users[0].op_type == "Add":
        others = [name for name in users[0].input if name != output]
        bias = index.constants.get(others[0]) if len(others) == 1 else None
        if bias is not None and list(bias.dims) == [weight.dims[1]] and bias.data_type == 1:
            return users[0].name, others[0], users[0].output[0]
    return "", "", output
