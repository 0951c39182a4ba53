"""How int8 gets through a graph whose pairs stand on inputs alone: Adds, pools, Concats (TensorRT).

A residual Add is computed inside a heavy node that makes one of its inputs for it alone, and reads
the other, the skip branch, in int8. Pointwise operators, moves and norms between int8 nodes stay
float without parting them::

    x --[Q DQ]--> Conv --> Sigmoid, Mul --> Add --> Concat --[Q DQ]--> Conv
      '----- the pair's second reader -------'

Sources: ModelOpt 0.47, `build_non_residual_input_map` and `find_quantizable_nodes`; TensorRT's
developer guide, "Q/DQ layer-placement recommendations"; NVIDIA/TensorRT issue 4366.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from deploy.graph.index import Graph, attributes

if TYPE_CHECKING:
    import onnx

MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
CUTS = frozenset({"Pad", "Slice"})
POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool"})
AVERAGES = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
POINTWISE = frozenset(
    {"Relu", "Clip", "Sigmoid", "Mul", "LeakyRelu", "PRelu", "HardSigmoid", "HardSwish", "Tanh"}
)
# a norm, or the nodes that it is written as
NORM = frozenset({"LayerNormalization", "ReduceMean", "Sub", "Pow", "Sqrt", "Div"})


def is_pool(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a ReduceMean is the GlobalAveragePool of a picture, as torch exports it."""
    from onnx import numpy_helper

    axes = attributes(node).get("axes")
    if axes is None and len(node.input) > 1 and node.input[1] in graph.initializers:
        axes = numpy_helper.to_array(graph.initializers[node.input[1]]).tolist()
    rank = len(graph.shapes.get(node.input[0]) or ())
    return rank > 3 and sorted(axis % rank for axis in axes or ()) == list(range(2, rank))


def has_number(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node adds a constant to a tensor, or multiplies it by one."""
    return node.op_type in {"Add", "Mul"} and any(n in graph.initializers for n in node.input)


def keeps_range(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether all that a node which moves values makes lies in the range of what it reads.

    Not what a cubic Resize overshoots, nor what a Pad puts around it but 0.
    """
    if node.op_type == "Pad":
        return not pads_with_more(graph, node)
    return node.op_type != "Resize" or resized_by(node) != "cubic"


def counts_beyond(node: onnx.NodeProto) -> bool:
    """Whether a node is an average whose windows may reach beyond the padding that it counts."""
    given = attributes(node) if node.op_type == "AveragePool" else {}
    return bool(given.get("ceil_mode") and given.get("count_include_pad"))


def resized_by(node: onnx.NodeProto) -> str:
    """The mode of a Resize."""
    mode: bytes = attributes(node).get("mode", b"nearest")
    return mode.decode()


def pads_with_more(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a Pad adds a constant that is not 0, or not known."""
    zeros = len(node.input) < 3 or not node.input[2] or graph.number(node.input[2]) == 0
    return attributes(node).get("mode", b"constant") == b"constant" and not zeros


def added_bias(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The Add behind a MatMul of rows that is a Gemm's bias: one constant a column."""
    after = graph.only_reader(node.output[0])
    if node.op_type != "MatMul" or after is None or after.op_type != "Add":
        return None
    weight = graph.initializers.get(node.input[1])
    bias = next((graph.initializers[n] for n in after.input if n in graph.initializers), None)
    rows = len(graph.shapes.get(node.output[0]) or ()) == 2
    if weight is None or bias is None or not rows or bias.data_type != weight.data_type:
        return None
    return after if [*bias.dims] in ([weight.dims[-1]], [1, weight.dims[-1]]) else None


def reads_int8(
    graph: Graph, node: onnx.NodeProto, made: Collection[str], heavy: Collection[str]
) -> bool:
    """Whether int8 comes in: every input is made in it; for a fused Add, what it is fused with.

    Such an Add is computed inside a heavy node, which reads the skip branch in int8 wherever that
    comes from.
    """
    names, read = graph.data_inputs(node), inputs_read(graph, node, heavy)
    fused = [name for name in names if name not in read]
    return all(name in made for name in fused or names)


def behind_float_concat(graph: Graph, node: onnx.NodeProto, made: Collection[str]) -> bool:
    """Whether a node reads a Concat, moved or not, with an input that no int8 node makes.

    TensorRT moves the Q that stands behind a Concat onto each of its inputs; where no int8 kernel
    writes them, that is a kernel more for each (NVIDIA/TensorRT issue 4366).
    """
    for name in graph.data_inputs(node):
        maker = graph.producer.get(name)
        while maker is not None and maker.op_type in MOVES | CUTS | {"MaxPool"}:
            maker = graph.producer.get(maker.input[0])
        if maker is not None and maker.op_type == "Concat":
            return not all(n in made for n in graph.data_inputs(maker))
    return False


def read_in_float(graph: Graph, node: onnx.NodeProto, why: Mapping[str, str]) -> bool:
    """Whether a mean would need an int8 copy of what a float node reads as it is (a gate's Mul)."""
    if node.op_type not in AVERAGES:
        return False
    beside = graph.readers[node.input[0]]
    return any(why[n.name] and n.op_type not in MOVES | POOLS | {"Concat"} for n in beside)


def with_concats(graph: Graph, readers: dict[str, list[str]]) -> None:
    """Let a Concat that only int8 nodes read take its inputs from the pairs that there are.

    TensorRT moves the Q behind it onto each input, where one of the same scale stands already.
    """
    for node in graph.nodes:
        out = node.output[0]
        after = {n.name for n in graph.readers.get(out, [])}
        if node.op_type == "Concat" and out in readers and out not in graph.outputs:
            for name in node.input if after == set(readers[out]) else []:
                if name in readers:
                    readers[name].append(node.name)


def inputs_read(graph: Graph, node: onnx.NodeProto, heavy: Collection[str]) -> list[str]:
    """Inputs that a node reads in int8: of a residual Add those of no heavy node fused with it."""
    names = graph.data_inputs(node)
    if node.op_type != "Add":
        return names
    fused = [
        name
        for name in names
        if len(graph.readers[name]) == 1 and made_by_heavy(graph, name, heavy)
    ]
    return [name for name in names if name not in fused[-1:]]


def made_by_heavy(graph: Graph, tensor: str, heavy: Collection[str]) -> bool:
    """Whether a heavy node makes a tensor, with pointwise operators behind it."""
    maker = graph.producer.get(tensor)
    while maker is not None and (maker.op_type in POINTWISE or has_number(graph, maker)):
        maker = graph.producer.get(graph.data_inputs(maker)[0])
    return maker is not None and maker.op_type in heavy
