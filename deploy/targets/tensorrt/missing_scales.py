"""TensorRT's warnings of tensors without a scale: which of them cost int8.

An int8 build warns of every tensor without a scale. Most do not need one (constants, shapes,
indices); the ones that matter are on layers that should run in int8.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx

from deploy.graph.index import Graph
from deploy.graph.placement import TENSORRT
from deploy.graph.plan import analyse

_WARNING = re.compile(r"Missing scale and zero-point for tensor (.+?), expect fall ?back")
_PARSER_PREFIXES = ("(Unnamed Layer* ", "(Unnamed ITensor* ", "ONNXTRT_")


@dataclass(frozen=True, slots=True)
class MissingScale:
    """A tensor that TensorRT found without a scale.

    Attributes:
        tensor: its name in TensorRT's network.
        harmful: whether a layer loses int8 by it.
        reason: why it is harmful or not.
    """

    tensor: str
    harmful: bool
    reason: str


def missing_tensors(lines: Iterable[str]) -> list[str]:
    """List the tensors of "Missing scale and zero-point for tensor ..." lines, each once."""
    names = []
    for line in lines:
        if match := _WARNING.search(line):
            names.append(match[1])
    return list(dict.fromkeys(names))


def sort_missing(names: Iterable[str], model: onnx.ModelProto) -> list[MissingScale]:
    """Classify tensors without a scale by their place in the model, harmful ones first.

    `names`: from `missing_tensors`. `model`: cleaned float model that was built.
    """
    graph = Graph(model)
    plan = analyse(model, TENSORRT)
    quantized_inputs = {pair.tensor for pair in plan.pairs}
    int8_nodes = set(plan.int8_nodes)
    int8_producer = {
        tensor: node for tensor, node in graph.producer.items() if node.name in int8_nodes
    }
    missing = [_classify(name, graph, quantized_inputs, int8_producer) for name in names]
    return sorted(missing, key=lambda scale: not scale.harmful)


def _classify(
    name: str,
    graph: Graph,
    quantized_inputs: Collection[str],
    int8_producer: Mapping[str, onnx.NodeProto],
) -> MissingScale:
    """Classify one tensor.

    `quantized_inputs`: tensors that int8 nodes read. `int8_producer`: output of an int8 node ->
    the node.
    """
    constant = name.removesuffix("_output")
    if name in graph.initializers or constant in graph.initializers or "[Constant]" in name:
        return MissingScale(name, False, "a constant: TensorRT reads its range from its values")
    if name in quantized_inputs:
        return MissingScale(name, True, "an int8 layer reads it: that layer falls back to float")

    node = int8_producer.get(name)
    if node is not None:
        if name in graph.outputs:
            return MissingScale(name, False, "an output of the model, which stays float")
        if graph.tail(node) == name:
            return MissingScale(name, True, f"{node.op_type} {node.name} cannot write int8")
        return MissingScale(name, False, "inside a fused layer, where no int8 value exists")

    if name in graph.dtypes and not graph.is_float(name):
        return MissingScale(name, False, "a shape or an index, which is no float at all")
    in_model = name in graph.producer or name in graph.inputs
    if name.startswith(_PARSER_PREFIXES) or not in_model:
        return MissingScale(name, False, "made by TensorRT's parser inside a node")
    return MissingScale(name, False, "no layer that gains from int8 reads or writes it")
