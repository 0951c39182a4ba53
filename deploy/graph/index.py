"""The index of a graph: who makes a tensor, who reads it, what it is; and what a node says.

Channels that are all zero behind a tensor's own: what it is called then, and how to lose them.

`deploy.targets.onnxruntime.conv_rewrites` adds them. Whoever holds such a model against another one
asks here.

Which nodes a user means: names, shell patterns, types of operators, files of these.

::

    /model.22/dfl/conv/Conv     the node of this name
    /model.22/*                 every node whose name fits, as a shell matches (* crosses a slash)
    op:Sigmoid  op:Reduce*      every node of this type
    @float.txt                  one of the above a line; blank lines and # comments are passed over

A name that is a node's is that node, whatever else it could be read as: `conv[0]` is the node
`conv[0]` where there is one, and the pattern for `conv0` where there is none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean
from deploy.files.reading import read_text

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from deploy.tensors import Array


_FLOAT = 1  # onnx.TensorProto.FLOAT
_BODIES = (5, 10)  # onnx.AttributeProto.GRAPH and GRAPHS
_DATA_INPUTS = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "Resize": 1, "Clip": 1, "Reshape": 1}
# what ONNX Runtime's optimizer takes a DequantizeLinear past
_MOVING = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_TAILS = frozenset({"Relu", "Clip"})


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attribute name -> Python value; what a function's caller has to fill in is left out."""
    from onnx import helper

    given = (a for a in node.attribute if not a.ref_attr_name)
    return {a.name: helper.get_attribute_value(a) for a in given}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Bodies of an If, Loop or Scan, in the order of the attributes."""
    for attribute in node.attribute:
        if attribute.type in _BODIES:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def holds_no_graph(node: onnx.NodeProto) -> bool:
    """Whether a node reads its inputs alone, as nearly all do."""
    held = node.attribute
    return not held or all(attribute.type not in _BODIES for attribute in held)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes of the graph and of every subgraph in it."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Every tensor that a node reads, those that its subgraphs capture included."""
    yield from filter(None, node.input)
    for body in subgraphs(node):
        own = {o for inner in body.node for o in inner.output}
        own |= {i.name for i in body.input} | {t.name for t in body.initializer}
        yield from (n for inner in body.node for n in reads(inner) if n not in own)
        yield from (o.name for o in body.output if o.name not in own)


def users(graph: onnx.GraphProto) -> Counter[str]:
    """Tensor name -> how often it is read; being a graph output counts as once."""
    count = Counter(name for node in graph.node for name in reads(node))
    count.update(value.name for value in graph.output)
    return count


def all_read(graph: onnx.GraphProto) -> set[str]:
    """Every tensor that is read or that is an output; what `users` counts, without counting."""
    found = {value.name for value in graph.output}
    for node in graph.node:
        found.update(node.input if holds_no_graph(node) else reads(node))
    return found


def fed_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are to be fed: those that are no initializers."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def dims(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Sizes of a tensor, names for the open ones that have one; None where the rank is open."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


class Graph:
    """Indexes over the main graph of a model, as it was when this was made.

    Attributes:
        nodes: in their order.
        initializers: name -> tensor.
        constants: the initializers, and the tensors of Constant nodes by their output's name.
        inputs: names of the inputs to be fed.
        outputs: names of the outputs.
        producer: tensor -> the node that makes it.
        readers: tensor -> the nodes that have it as an input, each once.
        captured: tensors that a node reads inside a subgraph.
    """

    def __init__(
        self, model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None
    ) -> None:
        """Index a model; with `nodes`, as if it had these in place of its own."""
        graph = model.graph
        self.nodes = list(graph.node if nodes is None else nodes)
        self.initializers = {t.name: t for t in graph.initializer}
        self.constants = {**self.initializers, **constant_nodes(self.nodes)}
        self.inputs = [value.name for value in fed_inputs(graph)]
        self.outputs = {o.name for o in graph.output}
        self.producer = {name: n for n in self.nodes for name in n.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.captured: set[str] = set()
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.input)):
                self.readers.setdefault(name, []).append(node)
            if not holds_no_graph(node):
                self.captured |= set(reads(node)) - set(node.input)
        declared = [*graph.input, *graph.value_info, *graph.output]
        self._declared = {v.name: v for v in declared}

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """Tensor -> ONNX element type, where the model says so."""
        return {name: v.type.tensor_type.elem_type for name, v in self._declared.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int | str | None, ...] | None]:
        """Tensor -> sizes as in `dims`, where the model says so."""
        return {name: dims(v) for name, v in self._declared.items()}

    @cached_property
    def pushed(self) -> frozenset[str]:
        """Tensors that only nodes of `_MOVING` part from where a subgraph captures them.

        An If whose condition is constant is none of its own: its branch stands in its place.
        """
        found: set[str] = set()
        ends = set(self.captured)
        for node in reversed(self.nodes if ends else []):
            inside = [inner for body in subgraphs(node) for inner in all_nodes(body)]
            nested = any(not holds_no_graph(inner) for inner in inside)
            if node.op_type in _MOVING and ends.intersection(node.output):
                found.add(str(node.input[0]))
            elif nested or (inside and (ends | found).intersection(node.output)):
                found |= set(reads(node)) - set(node.input)
            ends |= found
        return frozenset(found)

    def is_float(self, tensor: str) -> bool:
        """Whether a tensor is float32, as far as shape inference could tell."""
        if tensor in self.initializers:
            return bool(self.initializers[tensor].data_type == _FLOAT)
        return bool(self.dtypes.get(tensor, _FLOAT) == _FLOAT)

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """Inputs of a node that are activations, constants and shape arguments left out."""
        names = list(node.input)[: _DATA_INPUTS.get(node.op_type, len(node.input))]
        if node.op_type in {"Squeeze", "Unsqueeze", "Split", "Slice", "Pad"}:
            names = names[:1]
        return [name for name in names if name and name not in self.initializers]

    def only_reader(self, tensor: str) -> onnx.NodeProto | None:
        """The one node that reads a tensor; None where others, a subgraph or the user do too."""
        readers = self.readers.get(tensor, [])
        kept = tensor in self.outputs or tensor in self.captured
        return readers[0] if len(readers) == 1 and not kept else None

    def number(self, tensor: str) -> float | None:
        """The value of an initializer that holds one; None of anything else."""
        from onnx import numpy_helper

        constant = self.initializers.get(tensor)
        if constant is None or math.prod(constant.dims) != 1:
            return None
        return float(numpy_helper.to_array(constant).reshape(-1)[0])

    def number_beside(self, tensor: str, node: onnx.NodeProto) -> float | None:
        """The one number that a node of two operands has beside a tensor, whose rank stays."""
        others = [name for name in node.input if name != tensor]
        if len(node.input) != 2 or len(others) != 1 or (value := self.number(others[0])) is None:
            return None
        rank = len(self.initializers[others[0]].dims)
        return value if rank <= max(1, len(self.shapes.get(tensor) or ())) else None

    def tail(self, node: onnx.NodeProto) -> str:
        """Name of the tensor that leaves a node and the Relu, Clip or bias Add fused into it."""
        out = str(node.output[0])
        after = self.only_reader(out)
        if after is None:
            return out
        if after.op_type in _TAILS and after.input[0] == out and self.holds_zero(after):
            return str(after.output[0])
        if node.op_type == "MatMul" and after.op_type == "Add" and self._adds_bias(after, out):
            return self.tail(after)
        return out

    def holds_zero(self, node: onnx.NodeProto) -> bool:
        """Relu, or a Clip with constant bounds of which the lower is 0."""
        if node.op_type == "Relu":
            return True
        return len(node.input) > 1 and self.number(node.input[1]) == 0.0

    def _adds_bias(self, node: onnx.NodeProto, tensor: str) -> bool:
        others = [name for name in node.input if name != tensor]
        return len(others) == 1 and others[0] in self.initializers


class Still(Graph):
    """The index of a model that nobody changes any more: what a node reads is found once.

    For what is asked the same of one model again and again, as a search does.
    """

    def __init__(
        self, model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None
    ) -> None:
        super().__init__(model, nodes)
        # with the nodes, so that no other one gets their ids
        self._read: dict[int, tuple[onnx.NodeProto, list[str]]] = {}
        self._tails: dict[int, tuple[onnx.NodeProto, str]] = {}

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """As of `Graph`; the list is everybody's."""
        if id(node) not in self._read:
            self._read[id(node)] = node, super().data_inputs(node)
        return self._read[id(node)][1]

    def tail(self, node: onnx.NodeProto) -> str:
        """As of `Graph`."""
        if id(node) not in self._tails:
            self._tails[id(node)] = node, super().tail(node)
        return self._tails[id(node)][1]


def constant_nodes(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.TensorProto]:
    """Output of each Constant node -> its tensor; those given as numbers or strings left out."""
    return {
        node.output[0]: attribute.t
        for node in nodes
        if node.op_type == "Constant" and node.output
        for attribute in node.attribute
        if attribute.name == "value"
    }


WIDE = "/wide"  # behind the name of a tensor: the same, with more channels, which are zero


def wide_for(name: str, node: str) -> str:
    """What a tensor is called that got wider for one node alone."""
    return f"{name}/{node}{WIDE}"


def with_zeros(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """An array as large as this along every axis."""
    ends = [(0, size - own) for size, own in zip(sizes, values.shape, strict=True)]
    import numpy as np

    return np.pad(values, ends)


def of_own_channels(name: str, values: Array, like: Array) -> Array:
    """Values [N, C + more, ...] of a tensor of that name, without what `like` [N, C, ...] lacks."""
    if name.endswith(WIDE) and values.ndim == like.ndim > 1:
        return values[:, : like.shape[1]]
    return values


Named = Sequence[tuple[str, str]]  # (name, type) of every node or module

TYPE, FILE = "op:", "@"


def matching(model: onnx.ModelProto, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the nodes of the main graph that any of the patterns means, in the model's order.

    Raises:
        ConfigError: a pattern that means no node, or a file that cannot be read.
    """
    return select([(node.name, node.op_type) for node in model.graph.node if node.name], patterns)


def select(known: Named, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names among `known` that any of the patterns means, in the order of `known`.

    Raises:
        ConfigError: a pattern that means nothing, or a file that cannot be read.
    """
    names = {name for name, _ in known}
    chosen: set[str] = set()
    for pattern in patterns:
        for one in [pattern] if pattern in names else _lines(pattern):
            chosen |= _chosen(known, names, one)
    return tuple(dict.fromkeys(name for name, _ in known if name in chosen))


def _chosen(known: Named, names: set[str], pattern: str) -> set[str]:
    """The names that one pattern, which is no file, means."""
    if pattern in names:
        return {pattern}
    if pattern.startswith(TYPE):
        wanted = pattern.removeprefix(TYPE)
        found = {name for name, kind in known if fnmatchcase(kind, wanted)}
        hint = _near(wanted, [kind for _, kind in known], TYPE)
    else:
        found = {name for name in names if fnmatchcase(name, pattern)}
        hint = _near(pattern, [name for name, _ in known], "")
    if not found:
        raise ConfigError(f"what to keep in float must be in the model, got {pattern!r}; {hint}")
    return found


def _near(wanted: str, known: Sequence[str], before: str) -> str:
    known = [before + name for name in dict.fromkeys(known)]
    return did_you_mean(before + wanted, known, "`calib8 inspect --all` lists names and types")


def _lines(pattern: str) -> list[str]:
    """The pattern itself, or those of the file that it names."""
    if not pattern.startswith(FILE):
        return [pattern]
    path = Path(pattern.removeprefix(FILE))
    text = read_text(path, what="a text file of nodes to keep in float", error=ConfigError)
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path} must name at least one node to keep in float, got none")
    return found
