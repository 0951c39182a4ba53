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
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean
from deploy.files.reading import read_text

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from deploy.tensors import Array


FLOAT = 1  # onnx.TensorProto.FLOAT
FLOAT16 = 10  # onnx.TensorProto.FLOAT16
_BODIES = (5, 10)  # onnx.AttributeProto.GRAPH and GRAPHS
# operators whose further inputs are weights, shapes or limits
_ONE_DATA_INPUT = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "Resize", "Clip", "Reshape"}
    | {"Squeeze", "Unsqueeze", "Split", "Slice", "Pad"}
)
# ONNX Runtime's optimizer moves a DequantizeLinear past these
_MOVING = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
TAILS = frozenset({"Relu", "Clip"})  # are fused into the node before them
ONNX_DOMAINS = ("", "ai.onnx")  # two names of the default operator set
GATE = "Gate"  # type of the node that replaces the nodes of a gate in a collapsed graph
PADDED_SUFFIX = "/wide"  # suffix of a tensor's copy with zero channels appended
Nodes = list["onnx.NodeProto"]
Shape = tuple[int | str | None, ...]  # sizes, names of symbolic ones, None for unknown ones
NamedNodes = Sequence[tuple[str, str]]  # (name, type) of every node or module
_TYPE_PREFIX, _FILE_PREFIX = "op:", "@"


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attribute name -> Python value, without references to attributes of a function's caller."""
    from onnx import helper

    return {
        attribute.name: helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if not attribute.ref_attr_name
    }


def standard_type(node: onnx.NodeProto) -> str:
    """Return a node's operator; of a domain beside ONNX's, which may compute anything, with it.

    So the text equals the name of an ONNX operator only if the node is that operator.
    """
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}.{node.op_type}"


def optional_input(node: onnx.NodeProto, index: int) -> str:
    """Return the tensor at one input of a node; "" if the node leaves it out."""
    return node.input[index] if index < len(node.input) else ""


def other_inputs(node: onnx.NodeProto, tensor: str) -> list[str]:
    """Return the inputs of a node without one tensor."""
    return [name for name in node.input if name != tensor]


def names_of(items: Iterable[Any]) -> set[str]:
    """Return the names of tensors, values or nodes."""
    return {item.name for item in items}


def float16_ends(model: onnx.ModelProto) -> dict[str, str]:
    """Return the float32 tensor of each float16 input and output of a cleaned model.

    The user's file has no such tensor: a cache made from it has the scale of the input or output.
    """
    values = (*model.graph.input, *model.graph.output)
    ends = names_of(value for value in values if value.type.tensor_type.elem_type == FLOAT16)
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    tensors = {node.input[0]: node.output[0] for node in casts if node.input[0] in ends}
    return tensors | {node.output[0]: node.input[0] for node in casts if node.output[0] in ends}


def by_name(items: Iterable[Any]) -> dict[str, Any]:
    """Name -> tensor, value or node."""
    return {item.name: item for item in items}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan, in attribute order."""
    for attribute in node.attribute:
        if attribute.type in _BODIES:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def has_subgraph(node: onnx.NodeProto) -> bool:
    """Whether a node has a subgraph, which may read more than the node's inputs."""
    return any(attribute.type in _BODIES for attribute in node.attribute)


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

    A sparse tensor counts as two: its values and its indices.
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
        yield tensor.values
        yield tensor.indices


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set; 0 if the model does not import it."""
    imports = [entry for entry in model.opset_import if entry.domain in ONNX_DOMAINS]
    return max((entry.version for entry in imports), default=0)


def iter_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield every tensor that a node reads, including those that its subgraphs capture."""
    yield from filter(None, node.input)
    for body in subgraphs(node):
        inner_names = all_outputs(body.node) | names_of((*body.input, *body.initializer))
        outputs = (value.name for value in body.output)
        for name in chain(all_reads(body.node), outputs):
            if name not in inner_names:
                yield name


def all_reads(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield every tensor that nodes read, in their subgraphs too, once for each read."""
    return chain.from_iterable(map(iter_reads, nodes))


def all_outputs(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the tensors that nodes make."""
    return set(map_producers(nodes))


def count_reads(graph: onnx.GraphProto) -> Counter[str]:
    """Tensor name -> number of reads; being a graph output counts as one."""
    outputs = (value.name for value in graph.output)
    return Counter(chain(all_reads(graph.node), outputs))


def runtime_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the graph inputs that are not initializers."""
    constants = names_of(graph.initializer)
    return [value for value in graph.input if value.name not in constants]


def declared_values(graph: onnx.GraphProto) -> tuple[onnx.ValueInfoProto, ...]:
    """Return the inputs, the inner tensors with a declared type, and the outputs of a graph."""
    return (*graph.input, *graph.value_info, *graph.output)


def dims(value: onnx.ValueInfoProto) -> Shape | None:
    """Sizes of a tensor; None for unknown rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(map(_read_dimension, tensor.shape.dim))


def _read_dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """Return a size, the name of a symbolic one, or None for an unknown one."""
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None


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
        nodes: of the main graph, in graph order.
        inputs: names of the graph inputs that are not initializers.
        outputs: names of the graph outputs.
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
        self.initializers: dict[str, onnx.TensorProto] = by_name(graph.initializer)
        self.constants = {**self.initializers, **constant_nodes(self.nodes)}
        self.inputs = [value.name for value in runtime_inputs(graph)]
        self.outputs = names_of(graph.output)
        self.producer = map_producers(self.nodes)
        self.readers: dict[str, Nodes] = {}
        self.captured: set[str] = set()
        for node in self.nodes:
            input_names = dict.fromkeys(filter(None, node.input))  # "" is an input left out
            for name in input_names:
                self.readers.setdefault(name, []).append(node)
            self.captured |= _captured_by(node)
        self._declared = by_name(declared_values(graph))

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """Value -> ONNX element type, of those that the model declares; -1 if it is no tensor."""
        dtypes = {}
        for name, value in self._declared.items():
            dtypes[name] = value.type.tensor_type.elem_type
            if value.type.WhichOneof("value") in _NO_TENSORS:
                dtypes[name] = -1
        return dtypes

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        """Tensor -> sizes as in `dims`, of the tensors that the model declares."""
        return {name: dims(value) for name, value in self._declared.items()}

    @cached_property
    def captured_through_moves(self) -> frozenset[str]:
        """Tensors that are moved, such as by a Reshape, before a subgraph reads them.

        If the branch of an If reads y = Reshape(x), this set has x. With x in int8, ONNX Runtime
        ends the process (`deploy.graph.refusal`).
        """
        moved_tensors: set[str] = set()
        # tensors that a subgraph reads, as they are or moved; the loop goes upstream, so that it
        # meets all readers of a tensor before the node that makes it
        subgraph_reads = set(self.captured)
        for node in reversed(self.nodes):
            subgraph_reads_output = not subgraph_reads.isdisjoint(node.output)
            if node.op_type in _MOVING and subgraph_reads_output:
                moved_tensors.add(node.input[0])
            # a tensor that an If captures may be moved inside, and the result read by a subgraph
            elif _may_move_captures(node, subgraph_reads_output):
                moved_tensors |= _captured_by(node)
            subgraph_reads |= moved_tensors
        return frozenset(moved_tensors)

    @cached_property
    def computed_constants(self) -> frozenset[str]:
        """Tensors that nodes compute from constants alone."""
        constants = set(self.initializers)
        for node in self.nodes:
            if node.op_type not in RANDOM and constants.issuperset(iter_reads(node)):
                constants.update(node.output)
        return frozenset(constants.difference(self.initializers))

    @cached_property
    def depths(self) -> dict[str, int]:
        """Tensor -> number of nodes on the longest path to it."""
        depths: dict[str, int] = {}
        for node in self.nodes:
            depth = 1 + max((depths.get(name, 0) for name in node.input), default=0)
            depths |= dict.fromkeys(node.output, depth)
        return depths

    def rank(self, tensor: str) -> int:
        """Number of dimensions of a tensor; 0 if it is unknown."""
        return len(self.shapes.get(tensor) or ())

    def is_float(self, tensor: str) -> bool:
        """Whether a tensor is float32; True if its type is unknown."""
        if tensor in self.initializers:
            return self.initializers[tensor].data_type == FLOAT
        return self.dtypes.get(tensor, FLOAT) == FLOAT

    def data_inputs(self, node: onnx.NodeProto) -> list[str]:
        """Activation inputs of a node, without initializers and shape arguments."""
        names = node.input[:1] if node.op_type in _ONE_DATA_INPUT else node.input
        return [name for name in names if name and name not in self.initializers]

    def is_read_outside(self, tensor: str) -> bool:
        """Whether something beside the inputs of nodes reads a tensor: an output or a subgraph."""
        return tensor in self.outputs or tensor in self.captured

    def only_reader(self, tensor: str, *op_types: str) -> onnx.NodeProto | None:
        """Return the node that alone uses a tensor; None if an output or a subgraph uses it too.

        With `op_types`, None also for a node of another type.
        """
        if self.is_read_outside(tensor):
            return None
        readers = self.readers.get(tensor, [])
        if len(readers) != 1 or (op_types and standard_type(readers[0]) not in op_types):
            return None
        return readers[0]

    def find_producer(self, tensor: str, *op_types: str) -> onnx.NodeProto | None:
        """Return the node that makes a tensor, if it has one of these types."""
        node = self.producer.get(tensor)
        return node if node is not None and standard_type(node) in op_types else None

    def trace_back(self, tensor: str, op_types: Collection[str]) -> onnx.NodeProto | None:
        """Return the node that makes a tensor, upstream of nodes of these types; None if none does.

        The path leads through the first input of each node.
        """
        node = self.producer.get(tensor)
        while node is not None and standard_type(node) in op_types:
            node = self.producer.get(node.input[0])
        return node

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
        operands = other_inputs(node, tensor)
        if len(node.input) != 2 or len(operands) != 1:
            return None
        constant = self.initializers.get(operands[0])
        if constant is None or len(constant.dims) > max(1, self.rank(tensor)):
            return None
        return self.scalar(operands[0])

    def fused_output(self, node: onnx.NodeProto) -> str:
        """Return the output of a node, or of the Relu, Clip or bias Add fused into it."""
        output: str = node.output[0]
        reader = self.only_reader(output)
        if reader is None or node.op_type == GATE:  # nothing is fused into a gate
            return output
        if (
            standard_type(reader) in TAILS
            and reader.input[0] == output
            and self.clips_at_zero(reader)
        ):
            return str(reader.output[0])
        if standard_type(node) == "MatMul" and standard_type(reader) == "Add":
            operands = other_inputs(reader, output)
            if len(operands) == 1 and operands[0] in self.initializers:
                return self.fused_output(reader)
        return output

    def bias_add(self, node: onnx.NodeProto, *shapes: list[int]) -> onnx.NodeProto | None:
        """Return the Add that alone reads a MatMul and adds a constant float32 bias.

        None if there is no such Add, or if the bias has none of these shapes.
        """
        add = self.only_reader(node.output[0], "Add")
        operands = [] if add is None else other_inputs(add, node.output[0])
        bias = self.constants.get(operands[0]) if operands else None
        if bias is None or list(bias.dims) not in shapes or bias.data_type != FLOAT:
            return None
        return add

    def clips_at_zero(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a Relu, or a Clip with the constant lower bound 0."""
        return node.op_type == "Relu" or self.scalar(optional_input(node, 1)) == 0.0


def map_producers(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    """Tensor -> the node that makes it."""
    return {name: node for node in nodes for name in node.output if name}


def constant_nodes(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.TensorProto]:
    """Output of each Constant node -> its tensor, without those given as numbers or strings."""
    tensor_by_output = {}
    for node in nodes:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensor_by_output[node.output[0]] = attribute.t
    return tensor_by_output


def _may_move_captures(node: onnx.NodeProto, subgraph_reads_output: bool) -> bool:
    """Whether an If may move a tensor that it captures, and a subgraph may read the moved tensor.

    An If captures the tensors that its nodes read and that are made outside.

    If the condition is constant, ONNX Runtime replaces the If by the nodes of one branch. A Reshape
    in the branch is then a node of the main graph, and moves the captured tensor there. The
    subgraphs that may read the result are those of nodes in the branch, and those that read the
    output of the If.

    Args:
        node: an If, or another node; False for one without subgraphs.
        subgraph_reads_output: whether a subgraph of another node reads the node's output.
    """
    _, *inner_nodes = nested_nodes(node)  # the first is the node itself
    if any(map(has_subgraph, inner_nodes)):
        return True
    return subgraph_reads_output and bool(inner_nodes)


def _captured_by(node: onnx.NodeProto) -> set[str]:
    """Return the tensors that a node reads only inside its subgraphs."""
    return set(iter_reads(node)).difference(node.input) if has_subgraph(node) else set()


def group_count(node: onnx.NodeProto) -> int:
    """Return the groups of a Conv or ConvTranspose."""
    return int(attributes(node).get("group", 1))


def padded_name(name: str, node: str) -> str:
    """Name of the copy of a tensor that was padded with channels for one node."""
    return f"{name}/{node}{PADDED_SUFFIX}"


def pad_with_zeros(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """Return the array padded with zeros, at the end of each axis, to `sizes`."""
    import numpy as np

    pads = [(0, size - old_size) for size, old_size in zip(sizes, values.shape, strict=True)]
    return np.pad(values, pads)


def strip_padded_channels(name: str, values: Array, unpadded: Array) -> Array:
    """Drop padded channels of tensor `name`: values [N, C + k, ...] -> the C of `unpadded`."""
    if name.endswith(PADDED_SUFFIX) and values.ndim == unpadded.ndim > 1:
        return values[:, : unpadded.shape[1]]
    return values


def channel_axis(node: onnx.NodeProto, rank: int) -> int:
    """Return the axis of a weight, of `rank` dimensions, along which its output channels lie."""
    if node.op_type == "MatMul":
        return rank - 1
    if node.op_type == "Gemm":
        return 0 if attributes(node).get("transB", 0) else 1
    return 0 if node.op_type == "Conv" else 1


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple; a text is one name, not its letters.

    Raises:
        ConfigError: a name is no text.
    """
    all_names = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in all_names):
        raise ConfigError(f"names must be texts, got {all_names!r:.60}")
    return all_names


MODULE_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node, by torch's exporter
_MAX_SCOPES = 4096  # characters that are read of it
_SCOPE = re.compile(r"'([^']*)'")


def module_scopes(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the paths of the PyTorch modules around a node, outermost first.

    Such as ("r1", "r1.a", "r1.a.1"); () if the file does not say.
    """
    for entry in node.metadata_props:
        if entry.key == MODULE_SCOPES:
            scopes = _SCOPE.findall(entry.value[:_MAX_SCOPES])
            return tuple(filter(None, scopes[:-1]))  # the last one is the operation
    return ()


def module_paths(model: onnx.ModelProto) -> dict[str, str]:
    """Return node -> path of its PyTorch module, such as "r1.a.1", where the file says it."""
    path_by_node = {}
    for node in model.graph.node:
        scopes = module_scopes(node)
        if scopes:
            path_by_node[node.name] = scopes[-1]
    return path_by_node


def describe_node(node: onnx.NodeProto) -> str:
    """Return the operator and name of a node as text; without a name, its outputs stand there."""
    return f"{node.op_type} {node.name or ', '.join(node.output)!r}"


def match_nodes(model: onnx.ModelProto, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the main graph's nodes that match any pattern, in graph order.

    The path of a PyTorch module stands for all of its nodes.

    Raises:
        ConfigError: a pattern matches no node, or its file cannot be read.
    """
    nodes = [(node.name, node.op_type) for node in model.graph.node if node.name]
    scopes = {node.name: module_scopes(node) for node in model.graph.node}
    return match_patterns(nodes, patterns, scopes=scopes)


def match_patterns(
    nodes: NamedNodes,
    patterns: Iterable[str],
    *,
    scopes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the names of the nodes that match any pattern, in the order of the nodes.

    Args:
        nodes: (name, type) of each node.
        patterns: each is a node's name, the path of a PyTorch module, "op:TYPE" (all three may have
            wildcards as in a shell), or "@FILE", a file with one of these a line.
        scopes: name of a node -> paths of the PyTorch modules around it.

    Raises:
        ConfigError: a pattern matches nothing, or its file cannot be read.
    """
    names = dict.fromkeys(name for name, _ in nodes)  # each once and in order
    matching_names: set[str] = set()
    for pattern in patterns:
        single_patterns = [pattern]
        if pattern.startswith(_FILE_PREFIX) and pattern not in names:  # a name may begin with "@"
            single_patterns = _read_patterns(Path(pattern.removeprefix(_FILE_PREFIX)))
        for single_pattern in single_patterns:
            if single_pattern in names:  # a name with "*" or "[" is no pattern
                matching_names.add(single_pattern)
            else:
                matching_names |= _match_pattern(nodes, single_pattern, scopes)
    return tuple(name for name in names if name in matching_names)


def _match_pattern(
    nodes: NamedNodes, pattern: str, scopes: Mapping[str, Sequence[str]]
) -> set[str]:
    """Return the names of the nodes that match one pattern for names, modules or types.

    `scopes`: name of a node -> paths of the PyTorch modules around it.
    """
    is_for_types = pattern.startswith(_TYPE_PREFIX)
    matching_names = set()
    all_labels: dict[str, None] = {}  # what could have matched, each once and in order
    for name, op_type in nodes:
        labels = [_TYPE_PREFIX + op_type] if is_for_types else [name, *scopes.get(name, ())]
        all_labels.update(dict.fromkeys(labels))
        if any(fnmatchcase(label, pattern) for label in labels):
            matching_names.add(name)
    if not matching_names:
        help_text = "`calib8 inspect --all` lists names and types"
        hint = did_you_mean(pattern, list(all_labels), help_text)
        raise ConfigError(f"nodes to keep in float must be in the model, got {pattern!r}; {hint}")
    return matching_names


def _read_patterns(path: Path) -> list[str]:
    """Return the patterns in a file, without blank lines and comments."""
    text = read_text(path, what="a text file of nodes to keep in float", error=ConfigError)
    lines = [line.strip() for line in text.splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    if not patterns:
        raise ConfigError(f"{path} must name at least one node to keep in float, got none")
    return patterns
