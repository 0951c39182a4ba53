"""The index of a graph: who makes a tensor, who reads it, what it is."""

from __future__ import annotations

import onnx
from onnx import numpy_helper

from deploy.frontends.graphs import reads

_FLOAT = onnx.TensorProto.FLOAT
_DATA_INPUTS = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "Resize": 1, "Clip": 1, "Reshape": 1}
_TAILS = frozenset({"Relu", "Clip"})


class Graph:
    """Indexes over a ModelProto: who makes a tensor, who reads it, what it is."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self.initializers = {t.name: t for t in graph.initializer}
        self.inputs = [i.name for i in graph.input if i.name not in self.initializers]
        self.outputs = {o.name for o in graph.output}
        self.producer = {name: n for n in self.nodes for name in n.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.captured: set[str] = set()
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)
            self.captured |= set(reads(node)) - set(node.input)
        declared = [*graph.input, *graph.value_info, *graph.output]
        self.dtypes = {v.name: v.type.tensor_type.elem_type for v in declared}
        self.shapes = {v.name: _shape(v) for v in declared}

    def is_float(self, tensor: str) -> bool:
        """Whether a tensor is float32, as far as shape inference could tell."""
        if tensor in self.initializers:
            return bool(self.initializers[tensor].data_type == _FLOAT)
        return bool(self.dtypes.get(tensor, _FLOAT) == _FLOAT)

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """Inputs of a node that are activations, constants and shape arguments left out."""
        names = list(node.input)[: _DATA_INPUTS.get(node.op_type, len(node.input))]
        if node.op_type in {"Squeeze", "Unsqueeze", "Split"}:
            names = names[:1]
        return [name for name in names if name and name not in self.initializers]

    def tail(self, node: onnx.NodeProto) -> str:
        """Name of the tensor that leaves a node and the Relu, Clip or bias Add fused into it."""
        out = str(node.output[0])
        readers = self.readers.get(out, [])
        if len(readers) != 1 or out in self.outputs or out in self.captured:
            return out
        after = readers[0]
        if after.op_type in _TAILS and after.input[0] == out and self.holds_zero(after):
            return str(after.output[0])
        if node.op_type == "MatMul" and after.op_type == "Add" and self._adds_bias(after, out):
            return self.tail(after)
        return out

    def holds_zero(self, node: onnx.NodeProto) -> bool:
        """Relu, or a Clip with constant bounds of which the lower is 0."""
        if node.op_type == "Relu":
            return True
        low = self.initializers.get(node.input[1]) if len(node.input) > 1 else None
        return low is not None and float(numpy_helper.to_array(low).reshape(-1)[0]) == 0.0

    def _adds_bias(self, node: onnx.NodeProto, tensor: str) -> bool:
        others = [name for name in node.input if name != tensor]
        return len(others) == 1 and others[0] in self.initializers


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )
