"""Index of an ONNX graph: producers, readers, types and shapes; and node selection by pattern.

Node patterns that a user may give::

    /model.22/dfl/conv/Conv     the node of this name
    /model.22/*                 every node whose name matches, as in a shell (* crosses a slash)
    op:Sigmoid  op:Reduce*      every node of this operator type
    @float.txt                  a file with one of the above per line; blank lines and # comments
                                are skipped

An exact node name takes precedence: `conv[0]` is the node `conv[0]` if there is one, else the
pattern that matches `conv0`.

`deploy.targets.onnxruntime.depthwise_rewrite` pads tensors with zero channels. Code that compares
such a model with another one finds the naming rule here (`PADDED_SUFFIX`).
"""

from __future__ import annotations

import math
import threading
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
# ONNX Runtime's optimizer moves a DequantizeLinear past these
_MOVING = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_TAILS = frozenset({"Relu", "Clip"})
GATE = "Gate"  # type of the node that replaces the nodes of a gate in a collapsed graph
PADDED_SUFFIX = "/wide"  # suffix of a tensor's copy with zero channels appended
NamedNodes = Sequence[tuple[str, str]]  # (name, type) of every node or module
TYPE, FILE = "op:", "@"


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attribute name -> Python value, without references to attributes of a function's caller."""
    from onnx import helper

    given = (a for a in node.attribute if not a.ref_attr_name)
    return {a.name: helper.get_attribute_value(a) for a in given}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan, in attribute order."""
    for attribute in node.attribute:
        if attribute.type in _BODIES:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def has_no_subgraph(node: onnx.NodeProto) -> bool:
    """Whether a node has no subgraph, so that it reads only its inputs."""
    held = node.attribute
    return not held or all(attribute.type not in _BODIES for attribute in held)


def nested_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a node and all nodes of its subgraphs."""
    yield node
    for body in subgraphs(node):
        yield from all_nodes(body)


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of the graph or function and of all its subgraphs."""
    for node in graph.node:
        yield from nested_nodes(node)


def all_graphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[Any]:
    """Yield the graph or function and all its subgraphs."""
    yield graph
    for node in all_nodes(graph):
        yield from subgraphs(node)


def all_tensors(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Yield every initializer and every tensor in an attribute, of all subgraphs too.

    Of a sparse tensor these are its values and its indices.
    """
    sparse: list[onnx.SparseTensorProto] = []
    for body in all_graphs(graph):
        yield from getattr(body, "initializer", ())  # a function has none
        sparse += getattr(body, "sparse_initializer", ())
    for node in all_nodes(graph):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            sparse += attribute.sparse_tensors
            if attribute.HasField("sparse_tensor"):
                sparse.append(attribute.sparse_tensor)
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set; 0 if the model does not import it."""
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    return max(versions, default=0)


def iter_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield every tensor that a node reads, including those that its subgraphs capture."""
    yield from filter(None, node.input)
    for body in subgraphs(node):
        own = {o for inner in body.node for o in inner.output}
        own |= {i.name for i in body.input} | {t.name for t in body.initializer}
        yield from (n for inner in body.node for n in iter_reads(inner) if n not in own)
        yield from (o.name for o in body.output if o.name not in own)


def count_reads(graph: onnx.GraphProto) -> Counter[str]:
    """Tensor name -> number of reads; being a graph output counts as one."""
    count = Counter(name for node in graph.node for name in iter_reads(node))
    count.update(value.name for value in graph.output)
    return count


def find_read_tensors(graph: onnx.GraphProto) -> set[str]:
    """Return every tensor that is read or is a graph output: the keys of `count_reads`."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input if has_no_subgraph(node) else iter_reads(node))
    return names


def runtime_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the graph inputs that are not initializers."""
    constants = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in constants]


def dims(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Sizes of a tensor: ints, names of symbolic ones, None if unknown; None for unknown rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


RANDOM = (  # operators that draw random numbers, Dropout in training alone
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"),
    *("Bernoulli", "Multinomial", "Dropout"),
)
PROTOBUF = threading.RLock()  # a worker thread holds it while it touches a protobuf message
_NO_TENSORS = ("sequence_type", "map_type", "optional_type", "sparse_tensor_type", "opaque_type")


class Graph:
    """Index of the main graph of a model, as it was at construction.

    Attributes:
        initializers: name -> tensor.
        constants: initializers and the tensors of Constant nodes, by name.
        inputs: names of the graph inputs that are not initializers.
        producer: tensor -> the node that makes it.
        readers: tensor -> the nodes that have it as an input, each once.
        captured: tensors that a node reads inside a subgraph.
    """

    def __init__(
        self, model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None
    ) -> None:
        """Index a model, with `nodes` in place of its own if given."""
        graph = model.graph
        self.nodes = list(graph.node if nodes is None else nodes)
        self.initializers = {t.name: t for t in graph.initializer}
        self.constants = {**self.initializers, **constant_nodes(self.nodes)}
        self.inputs = [value.name for value in runtime_inputs(graph)]
        self.outputs = {o.name for o in graph.output}
        self.producer = {name: n for n in self.nodes for name in n.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.captured: set[str] = set()
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.input)):
                self.readers.setdefault(name, []).append(node)
            if not has_no_subgraph(node):
                self.captured |= set(iter_reads(node)) - set(node.input)
        declared = [*graph.input, *graph.value_info, *graph.output]
        self._declared = {v.name: v for v in declared}

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """Value -> ONNX element type, of those that the model declares; -1 if it is no tensor."""
        return {
            name: -1 if v.type.WhichOneof("value") in _NO_TENSORS else v.type.tensor_type.elem_type
            for name, v in self._declared.items()
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int | str | None, ...] | None]:
        """Tensor -> sizes as in `dims`, of the tensors that the model declares."""
        return {name: dims(v) for name, v in self._declared.items()}

    @cached_property
    def captured_through_moves(self) -> frozenset[str]:
        """Tensors captured by a subgraph, traced back through nodes that only move data.

        The optimizer inlines the branch of an If with a constant condition, so tensors captured
        by nested subgraphs, and by an If whose output is itself captured, count too.
        """
        found: set[str] = set()
        ends = set(self.captured)
        for node in reversed(self.nodes if ends else []):
            inside = [inner for body in subgraphs(node) for inner in all_nodes(body)]
            nested = any(not has_no_subgraph(inner) for inner in inside)
            if node.op_type in _MOVING and ends.intersection(node.output):
                found.add(str(node.input[0]))
            elif nested or (inside and (ends | found).intersection(node.output)):
                found |= set(iter_reads(node)) - set(node.input)
            ends |= found
        return frozenset(found)

    @cached_property
    def computed_constants(self) -> frozenset[str]:
        """Tensors that nodes compute from constants alone."""
        found: set[str] = set()
        for node in self.nodes:
            fixed = (name in self.initializers or name in found for name in iter_reads(node))
            if node.op_type not in RANDOM and all(fixed):
                found.update(node.output)
        return frozenset(found)

    @cached_property
    def depths(self) -> dict[str, int]:
        """Tensor -> number of nodes on the longest path to it."""
        found: dict[str, int] = {}
        for node in self.nodes:
            depth = 1 + max((found.get(name, 0) for name in node.input), default=0)
            found |= dict.fromkeys(node.output, depth)
        return found

    def is_float(self, tensor: str) -> bool:
        """Whether a tensor is float32; True if its type is unknown."""
        if tensor in self.initializers:
            return bool(self.initializers[tensor].data_type == _FLOAT)
        return bool(self.dtypes.get(tensor, _FLOAT) == _FLOAT)

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """Activation inputs of a node, without initializers and shape arguments."""
        names = list(node.input)[: _DATA_INPUTS.get(node.op_type, len(node.input))]
        if node.op_type in {"Squeeze", "Unsqueeze", "Split", "Slice", "Pad"}:
            names = names[:1]
        return [name for name in names if name and name not in self.initializers]

    def only_reader(self, tensor: str) -> onnx.NodeProto | None:
        """Return the only reader of a tensor; None if others, a subgraph or an output use it."""
        readers = self.readers.get(tensor, [])
        used_elsewhere = tensor in self.outputs or tensor in self.captured
        return readers[0] if len(readers) == 1 and not used_elsewhere else None

    def scalar(self, tensor: str) -> float | None:
        """Return the value of a one-element initializer; None for any other tensor."""
        from onnx import numpy_helper

        constant = self.initializers.get(tensor)
        if constant is None or math.prod(constant.dims) != 1:
            return None
        return float(numpy_helper.to_array(constant).reshape(-1)[0])

    def scalar_operand(self, tensor: str, node: onnx.NodeProto) -> float | None:
        """Return the scalar operand of a binary node on `tensor`; None if there is none.

        A constant that would raise the rank of the result does not count.
        """
        others = [name for name in node.input if name != tensor]
        if len(node.input) != 2 or len(others) != 1 or (value := self.scalar(others[0])) is None:
            return None
        rank = len(self.initializers[others[0]].dims)
        return value if rank <= max(1, len(self.shapes.get(tensor) or ())) else None

    def tail(self, node: onnx.NodeProto) -> str:
        """Return the output of a node, or of the Relu, Clip or bias Add fused into it."""
        out = str(node.output[0])
        after = self.only_reader(out)
        if after is None or node.op_type == GATE:
            return out
        if after.op_type in _TAILS and after.input[0] == out and self.clips_at_zero(after):
            return str(after.output[0])
        if node.op_type == "MatMul" and after.op_type == "Add" and self._adds_bias(after, out):
            return self.tail(after)
        return out

    def bias_add(self, node: onnx.NodeProto, columns: int) -> onnx.NodeProto | None:
        """Return the Add after a MatMul that adds a constant float32 bias, [columns], or None."""
        out = str(node.output[0])
        readers = self.readers.get(out, [])
        if len(readers) != 1 or readers[0].op_type != "Add" or out in self.outputs:
            return None
        bias = self.constants.get(next((name for name in readers[0].input if name != out), ""))
        fits = bias is not None and list(bias.dims) == [columns] and bias.data_type == _FLOAT
        return readers[0] if fits else None

    def clips_at_zero(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a Relu, or a Clip with the constant lower bound 0."""
        if node.op_type == "Relu":
            return True
        return len(node.input) > 1 and self.scalar(node.input[1]) == 0.0

    def _adds_bias(self, node: onnx.NodeProto, tensor: str) -> bool:
        others = [name for name in node.input if name != tensor]
        return len(others) == 1 and others[0] in self.initializers


class CachedGraph(Graph):
    """Index of a model that no longer changes: caches `data_inputs` and `tail` for searches."""

    def __init__(
        self, model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None
    ) -> None:
        super().__init__(model, nodes)
        # holds the nodes too, so that no other node gets their ids
        self._read: dict[int, tuple[onnx.NodeProto, list[str]]] = {}
        self._tails: dict[int, tuple[onnx.NodeProto, str]] = {}

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """As in `Graph`; callers share the list and must not change it."""
        if id(node) not in self._read:
            self._read[id(node)] = node, super().data_inputs(node)
        return self._read[id(node)][1]

    def tail(self, node: onnx.NodeProto) -> str:
        """As in `Graph`."""
        if id(node) not in self._tails:
            self._tails[id(node)] = node, super().tail(node)
        return self._tails[id(node)][1]


def constant_nodes(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.TensorProto]:
    """Output of each Constant node -> its tensor, without those given as numbers or strings."""
    return {
        node.output[0]: attribute.t
        for node in nodes
        if node.op_type == "Constant" and node.output
        for attribute in node.attribute
        if attribute.name == "value"
    }


def padded_name(name: str, node: str) -> str:
    """Name of the copy of a tensor that was padded with channels for one node."""
    return f"{name}/{node}{PADDED_SUFFIX}"


def pad_with_zeros(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """Return the array padded with zeros, at the end of each axis, to `sizes`."""
    import numpy as np

    ends = [(0, size - own) for size, own in zip(sizes, values.shape, strict=True)]
    return np.pad(values, ends)


def strip_padded_channels(name: str, values: Array, like: Array) -> Array:
    """Drop padded channels of tensor `name`: values [N, C + k, ...] -> the C channels of `like`."""
    if name.endswith(PADDED_SUFFIX) and values.ndim == like.ndim > 1:
        return values[:, : like.shape[1]]
    return values


def channel_axis(node: onnx.NodeProto, rank: int) -> int:
    """Return the axis of a weight, of `rank` dimensions, along which its output channels lie."""
    if node.op_type == "MatMul":
        return rank - 1
    if node.op_type == "Gemm":
        return 0 if attributes(node).get("transB", 0) else 1
    return 0 if node.op_type == "Conv" else 1


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple; a text is one name, not its letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def match_nodes(model: onnx.ModelProto, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the main graph's nodes that match any pattern, in graph order.

    Raises:
        ConfigError: a pattern matches no node, or its file cannot be read.
    """
    return match_patterns(
        [(node.name, node.op_type) for node in model.graph.node if node.name], patterns
    )


def match_patterns(known: NamedNodes, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `known` that match any pattern, in the order of `known`.

    Raises:
        ConfigError: a pattern matches nothing, or its file cannot be read.
    """
    names = {name for name, _ in known}
    chosen: set[str] = set()
    for pattern in patterns:
        for one in [pattern] if pattern in names else _lines(pattern):
            chosen |= _match(known, names, one)
    return tuple(dict.fromkeys(name for name, _ in known if name in chosen))


def _match(known: NamedNodes, names: set[str], pattern: str) -> set[str]:
    """Return the names that match one pattern that is not a file."""
    if pattern in names:
        return {pattern}
    if pattern.startswith(TYPE):
        wanted = pattern.removeprefix(TYPE)
        found = {name for name, kind in known if fnmatchcase(kind, wanted)}
        hint = _hint(wanted, [kind for _, kind in known], TYPE)
    else:
        found = {name for name in names if fnmatchcase(name, pattern)}
        hint = _hint(pattern, [name for name, _ in known], "")
    if not found:
        raise ConfigError(f"nodes to keep in float must be in the model, got {pattern!r}; {hint}")
    return found


def _hint(wanted: str, known: Sequence[str], before: str) -> str:
    known = [before + name for name in dict.fromkeys(known)]
    return did_you_mean(before + wanted, known, "`calib8 inspect --all` lists names and types")


def _lines(pattern: str) -> list[str]:
    """Return the pattern itself, or the patterns in the file that it names."""
    if not pattern.startswith(FILE):
        return [pattern]
    path = Path(pattern.removeprefix(FILE))
    text = read_text(path, what="a text file of nodes to keep in float", error=ConfigError)
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{path} must name at least one node to keep in float, got none")
    return found
