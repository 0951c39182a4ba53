"""Export a graph to ONNX with the names of its nodes, so that ONNX tensors map back to nodes.

Each float tensor is exported through a marker operator with the name of its node. Before the model
is optimized and cleaned, markers are removed and their inputs renamed::

    conv -> Named(conv) -> relu -> Named(relu)     becomes     Conv -> fx/conv -> Relu -> fx/relu

So the name of a tensor gives its node; a tensor without such a name is inside a node.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from deploy.errors import ModelError
from deploy.frontends.onnx_file import clean_model
from deploy.fx.capture import dynamic_shapes, repeat_single_sample
from deploy.fx.comparison import tensors_of
from deploy.fx.device import quiet
from deploy.fx.export import (
    OPSET,
    clean_exported,
    rename_values,
    run_exporter,
)
from deploy.fx.int8_layers import QatLayer, folded_layer
from deploy.fx.operations import add_module
from deploy.fx.plain_copy import replace_submodule
from deploy.fx.trace import explain_export_failure
from deploy.graph.index import Graph
from deploy.terminal import phase

NODE_PREFIX = "fx/"  # prefix of node names in the ONNX model
MARKER_DOMAIN, MARKER = "calib8", "Named"


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """The cleaned ONNX model of a graph, with its correspondence to the graph.

    Attributes:
        model: the cleaned float model.
        tensors: graph node -> its ONNX tensor, if the model has it.
        graph_nodes: name of an ONNX node -> the graph nodes that it implements, wholly or in part.
    """

    model: onnx.ModelProto
    tensors: Mapping[fx.Node, str]
    graph_nodes: Mapping[str, frozenset[fx.Node]] = field(repr=False)

    def nodes_of(self, tensor: str) -> list[fx.Node]:
        """Return the graph nodes of a tensor, in the graph's order; equal tensors have several."""
        return [node for node, name in self.tensors.items() if name == tensor]


@phase("placing")
def export_named(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_opaque: Callable[[fx.Node], bool],
) -> ExportedGraph:
    """Export a graph whose shapes are known (`propagate_shapes`) to a cleaned float ONNX model.

    Each float tensor of the graph goes through a marker node, which keeps its name in the export
    until the ONNX tensor is named after it.

    `is_opaque`: whether a call of a module is exported as a stand-in (`OpaqueStandIn`), in which
    nothing can be quantized.

    Raises:
        ModelError: torch.export cannot follow the graph.
    """
    marked_graph = _float_copy(graph_module)
    _replace_opaque_calls(marked_graph, is_opaque)
    _insert_markers(marked_graph)
    inputs_on_cpu = pytree.tree_map_only(torch.Tensor, _to_cpu, tuple(inputs))
    program = _run_exporter(marked_graph, inputs_on_cpu)

    namesake_by_node = _remove_markers(program.model)
    with quiet():
        program.optimize()
    model: onnx.ModelProto = program.model_proto
    _name_split_outputs(model, graph_module)
    cleaned_model = clean_model(clean_exported(model))
    onnx_graph = Graph(cleaned_model)
    return ExportedGraph(
        model=cleaned_model,
        tensors=_find_tensors(onnx_graph, graph_module, namesake_by_node),
        graph_nodes=_find_implemented_nodes(onnx_graph, graph_module),
    )


def _float_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a float32 copy on the CPU in eval mode, without weight quantizers."""
    copied = copy.deepcopy(graph_module).eval()
    if any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers())):
        copied = copied.to_empty(device="cpu")
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.data.fill_(1)

    copied = copied.cpu().float()
    for name, module in list(copied.named_modules()):
        if isinstance(module, QatLayer):
            replace_submodule(copied, name, folded_layer(module))
    return copied


def _replace_opaque_calls(marked: fx.GraphModule, is_opaque: Callable[[fx.Node], bool]) -> None:
    for node in marked.graph.nodes:
        if node.op == "call_module" and is_opaque(node):
            stand_in = OpaqueStandIn(node.meta.get("tensor_meta"), _batch_size(node))
            node.target = add_module(marked, f"stand_in_{node.name}", stand_in)
    marked.delete_all_unused_submodules()


def _insert_markers(marked: fx.GraphModule) -> None:
    """Insert a marker after each float tensor; its readers read the marker's output."""
    placeholders = marked.graph.find_nodes(op="placeholder")
    for node in list(marked.graph.nodes):
        if node.op in ("output", "get_attr") or not is_float(node):
            continue
        # all placeholders must come first
        position = placeholders[-1] if node.op == "placeholder" else node
        with marked.graph.inserting_after(position):
            marker = marked.graph.call_function(emit_marker, (node, node.name))
        node.replace_all_uses_with(marker)
        marker.update_arg(0, node)  # the line above made the marker read itself
    marked.recompile()


def _to_cpu(tensor: torch.Tensor) -> Any:
    tensor = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()
    return repeat_single_sample(tensor)


class OpaqueStandIn(nn.Module):
    """Replaces an opaque module for the export: outputs of the same shapes, nothing to quantize.

    Args:
        outputs: `TensorMetadata` of its output, or containers of them as it returns.
        batch_size: first dimension of its first input; outputs with this first dimension follow it.
    """

    def __init__(self, outputs: Any, batch_size: int | None):
        super().__init__()
        self.outputs = outputs
        self.batch_size = batch_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return cumulative sums of the inputs, expanded to the output shapes.

        So every output depends on every input, as those of the module may, and nothing is
        quantized: no target computes a cumulative sum in int8.
        """
        tensors = tensors_of((args, kwargs))
        sums = [torch.cumsum(tensor.float().flatten(), 0).sum() for tensor in tensors]
        total = torch.stack(sums).sum()

        def expand_total(output: Any) -> Any:
            # No node reads a tensor from an output that is none, such as a size: it may have any
            # value. The total itself is a scalar.
            if not isinstance(output, TensorMetadata) or not output.shape:
                return total
            size, *sizes = output.shape
            if size == self.batch_size:  # the batch, which may be dynamic
                size = tensors[0].shape[0]
            return torch.cumsum(total.expand(size, *sizes), -1).to(output.dtype)

        # without is_leaf, pytree would enter the metadata, which is a tuple
        return pytree.tree_map(
            expand_total, self.outputs, is_leaf=lambda leaf: isinstance(leaf, TensorMetadata)
        )


def _batch_size(node: fx.Node) -> int | None:
    """Return the first dimension of the first tensor that a node reads, or None."""
    for source in node.all_input_nodes:
        meta = source.meta.get("tensor_meta")
        if isinstance(meta, TensorMetadata):
            return meta.shape[0] if meta.shape else None
    return None


def emit_marker(x: torch.Tensor, name: str) -> torch.Tensor:
    """Emit the marker operator with the name of a node; only inside an export."""
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::{MARKER}", (x,), {"name": name}, dtype=x.dtype, shape=x.shape, version=1
    )


def is_float(node: fx.Node) -> bool:
    """Return whether a node whose shape is known outputs one floating-point tensor."""
    meta: Any = node.meta.get("tensor_meta")
    return isinstance(meta, TensorMetadata) and bool(meta.dtype.is_floating_point)


def _run_exporter(marked: fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
    """Return the exporter's program, not optimized, with a dynamic batch if possible."""
    try:
        return run_exporter(marked, inputs, dynamic_shapes(marked, inputs), OPSET, optimize=False)
    except Exception as dynamic_error:  # torch.export and the exporter share no error class
        try:
            return run_exporter(marked, inputs, None, OPSET, optimize=False)
        except Exception:
            raise ModelError(explain_export_failure(dynamic_error, marked)) from dynamic_error


def _remove_markers(model: Any) -> dict[str, str]:
    """Remove the marker nodes from an ONNX model (of onnx_ir), and name tensors after them.

    A marker follows each tensor, and has the name of the graph node that computes it. Several graph
    nodes may have the same ONNX tensor, which then has several markers; it is named after the first
    of these nodes.

    Returns:
        Name of each graph node -> its namesake, the node after which its ONNX tensor is named: the
        node itself, or the first one with the same tensor.
    """
    node_name_by_tensor: dict[Any, str] = {}  # tensor -> the first node that it stands for
    namesake_by_node = {}
    for node in list(model.graph):
        if node.domain != MARKER_DOMAIN or node.op_type != MARKER:
            continue
        (tensor,) = node.inputs
        (marker_output,) = node.outputs
        name = node.attributes["name"].as_string()
        node_name_by_tensor.setdefault(tensor, name)
        namesake_by_node[name] = node_name_by_tensor[tensor]
        marker_output.replace_all_uses_with(tensor, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)

    for tensor, name in node_name_by_tensor.items():
        tensor.name = f"{NODE_PREFIX}{name}"
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return namesake_by_node


def _name_split_outputs(model: onnx.ModelProto, graph_module: fx.GraphModule) -> None:
    """Name the outputs of each ONNX Split after the graph nodes of these tensors, in place.

    In the graph, `chunk` and `split` return a tuple, from which getitem nodes take the tensors. The
    exporter's optimizer makes one Split of all these nodes, and may drop their names.
    """
    onnx_graph = Graph(model)
    new_name_by_output: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target not in (torch.chunk, torch.split):
            continue
        # index in the tuple -> its getitem node; other readers take the entire tuple, such as a cat
        item_by_index: dict[Any, fx.Node] = {
            user.args[1]: user for user in node.users if user.target is operator.getitem
        }
        split_input = f"{NODE_PREFIX}{node.all_input_nodes[0].name}"
        for onnx_node in onnx_graph.readers.get(split_input, []):
            if onnx_node.op_type != "Split":
                continue
            for index, output in enumerate(onnx_node.output):
                has_name = output.startswith(NODE_PREFIX) or output in new_name_by_output
                if index in item_by_index and not has_name:
                    new_name_by_output[output] = f"{NODE_PREFIX}{item_by_index[index].name}"
    rename_values(model.graph, new_name_by_output)


def _find_tensors(
    onnx_graph: Graph, graph_module: fx.GraphModule, namesake_by_node: Mapping[str, str]
) -> dict[fx.Node, str]:
    """Return graph node -> the ONNX tensor of its output, if the ONNX model has it.

    `namesake_by_node`: name of a graph node -> name of the node after which its ONNX tensor is
    named, another one if several nodes have the same tensor.
    """
    onnx_tensors = {*onnx_graph.inputs, *onnx_graph.producer}
    tensor_by_node: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        # its own name comes first, since `_name_split_outputs` may have named a tensor after it
        namesake = namesake_by_node.get(node.name, node.name)
        for name in (node.name, namesake):
            tensor = f"{NODE_PREFIX}{name}"
            if tensor in onnx_tensors:
                tensor_by_node[node] = tensor
                break
    return tensor_by_node


def _find_implemented_nodes(
    onnx_graph: Graph, graph_module: fx.GraphModule
) -> dict[str, frozenset[fx.Node]]:
    """Return name of an ONNX node -> the graph nodes that it computes, alone or as one step of it.

    An ONNX node whose output is named after a graph node computes that node. If an output has no
    such name, the ONNX node is a step in computing what its readers compute.
    """
    node_by_tensor = {f"{NODE_PREFIX}{node.name}": node for node in graph_module.graph.nodes}
    implemented_nodes: dict[str, frozenset[fx.Node]] = {}
    for onnx_node in reversed(onnx_graph.nodes):  # readers before the nodes that they read
        graph_nodes: set[fx.Node] = set()
        for output in onnx_node.output:
            if output in node_by_tensor:
                graph_nodes.add(node_by_tensor[output])
                continue
            for reader in onnx_graph.readers.get(output, []):
                graph_nodes |= implemented_nodes[reader.name]
        implemented_nodes[onnx_node.name] = frozenset(graph_nodes)
    return implemented_nodes
