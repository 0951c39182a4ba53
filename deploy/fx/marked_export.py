"""Export a graph to ONNX with the names of its nodes, so that ONNX tensors map back to nodes.

Each float tensor is exported through a marker operator with the name of its node. Before the model
is optimized and cleaned, markers are removed and their inputs renamed::

    conv -> Named(conv) -> relu -> Named(relu)     becomes     Conv -> fx/conv -> Relu -> fx/relu

So the name of a tensor gives its node; a tensor without such a name is inside a node.
"""

import copy
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
from deploy.fx.capture import has_batch, repeat_single_sample
from deploy.fx.device import quiet
from deploy.fx.export import (
    OPSET,
    clean_exported,
    explain_export_failure,
    rename_values,
    run_exporter,
)
from deploy.fx.int8_layers import QatLayer, folded_layer
from deploy.fx.plain_copy import replace_submodule
from deploy.graph.index import Graph
from deploy.terminal import phase

NODE_PREFIX = "fx/"  # prefix of node names in the ONNX model


DOMAIN, MARKER = "calib8", "Named"


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """The cleaned ONNX model of a graph, with its correspondence to the graph."""

    model: onnx.ModelProto
    tensors: Mapping[fx.Node, str]  # graph node -> ONNX tensor, if the model has it
    # ONNX node -> the graph nodes that it implements, wholly or in part
    homes: Mapping[str, frozenset[fx.Node]] = field(repr=False)

    def nodes_of(self, tensor: str) -> list[fx.Node]:
        """Return the graph nodes of a tensor, in the graph's order; equal tensors have several."""
        return [node for node, name in self.tensors.items() if name == tensor]


@phase("placing")
def export_named(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_opaque: Callable[[fx.Node], bool] = lambda node: False,
) -> ExportedGraph:
    """Export a graph whose shapes are known (`propagate_shapes`) to a cleaned float ONNX model.

    `is_opaque`: tells whether a call of a module is opaque: replaced by a `OpaqueStandIn`.

    Raises:
        ModelError: torch.export cannot follow the graph.
    """
    own = _in_float(graph_module)
    for node in own.graph.nodes:
        if node.op == "call_module" and is_opaque(node):
            name = f"stand_in_{node.name}"
            own.add_submodule(name, OpaqueStandIn(node.meta.get("tensor_meta"), _batch(node)))
            node.target = name
    own.delete_all_unused_submodules()
    placeholders = [node for node in own.graph.nodes if node.op == "placeholder"]
    for node in list(own.graph.nodes):
        if node.op in ("output", "get_attr") or not is_float(node):
            continue
        with own.graph.inserting_after(placeholders[-1] if node.op == "placeholder" else node):
            marker = own.graph.call_function(emit_marker, (node, node.name))
        node.replace_all_uses_with(marker, delete_user_cb=lambda user, one=marker: user is not one)
    own.recompile()
    program = _export(own, pytree.tree_map(_on_cpu, tuple(inputs)))
    same = _remove_markers(program.model)
    with quiet():
        program.optimize()
    model: onnx.ModelProto = program.model_proto
    _name_split_outputs(model, graph_module)
    model = clean_model(clean_exported(model))
    return _indexed(model, graph_module, same)


def _in_float(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a float32 copy on the CPU in eval mode, without weight quantizers."""
    own = copy.deepcopy(graph_module).eval()
    if any(p.device.type == "meta" for p in (*own.parameters(), *own.buffers())):
        own = own.to_empty(device="cpu")
        for tensor in (*own.parameters(), *own.buffers()):
            tensor.data.copy_(torch.ones_like(tensor))
    own = own.cpu().float()
    for name, module in list(own.named_modules()):
        if isinstance(module, QatLayer):
            replace_submodule(own, name, folded_layer(module))
    return own


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.cpu()
    return repeat_single_sample(leaf.float() if leaf.is_floating_point() else leaf)


class OpaqueStandIn(nn.Module):
    """Replaces an opaque module for the export: outputs of the same shapes, nothing to quantize.

    `batch`: first dimension of its first input; outputs with this first dimension follow it.
    """

    def __init__(self, outputs: Any, batch: int | None):
        super().__init__()
        self.outputs = outputs
        self.batch = batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return cumulative sums of the inputs, expanded to the output shapes."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        total = torch.stack([torch.cumsum(x.float().flatten(), 0).sum() for x in tensors]).sum()

        def one(meta: Any) -> Any:
            if not isinstance(meta, TensorMetadata) or not meta.shape:
                return total
            first = tensors[0].shape[0] if meta.shape[0] == self.batch else meta.shape[0]
            return torch.cumsum(total.expand(first, *meta.shape[1:]), -1).to(meta.dtype)

        return pytree.tree_map(one, self.outputs, is_leaf=lambda m: isinstance(m, TensorMetadata))


def _batch(node: fx.Node) -> int | None:
    metas = [source.meta.get("tensor_meta") for source in node.all_input_nodes]
    shapes = [meta.shape for meta in metas if isinstance(meta, TensorMetadata)]
    return shapes[0][0] if shapes and shapes[0] else None


def emit_marker(x: torch.Tensor, name: str) -> torch.Tensor:
    """Emit the marker operator with the name of a node; only inside an export."""
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{MARKER}", (x,), {"name": name}, dtype=x.dtype, shape=x.shape, version=1
    )


def is_float(node: fx.Node) -> bool:
    """Return whether a node whose shape is known outputs one floating-point tensor."""
    meta: Any = node.meta.get("tensor_meta")
    return isinstance(meta, TensorMetadata) and bool(meta.dtype.is_floating_point)


def _export(own: fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
    """Return the exporter's program, not optimized, with a dynamic batch if possible."""
    batch = torch.export.Dim.AUTO
    shapes = pytree.tree_map(lambda leaf: {0: batch} if has_batch(leaf) else None, inputs)
    first: Exception | None = None
    for dynamic in (shapes, None):
        try:
            return run_exporter(own, inputs, dynamic, OPSET, optimize=False)
        except Exception as error:  # torch.export and the exporter share no error class
            first = first or error
    assert first is not None
    raise ModelError(explain_export_failure(first, dynamic_batch=False)) from first


def _remove_markers(model: Any) -> dict[str, str]:
    """Name each marked tensor after its first node; return node -> the node with its name."""
    first: dict[int, tuple[Any, str]] = {}
    same = {}
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type != MARKER:
            continue
        (source,), (marked,) = node.inputs, node.outputs
        name = node.attributes["name"].as_string()
        _, same[name] = first.setdefault(id(source), (source, name))
        marked.replace_all_uses_with(source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    for value, name in first.values():
        value.name = f"{NODE_PREFIX}{name}"
    model.opset_imports.pop(DOMAIN, None)
    return same


def _name_split_outputs(model: onnx.ModelProto, graph_module: fx.GraphModule) -> None:
    """Name the outputs of each Split, into which `chunk` was optimized, after the getitem nodes."""
    graph = Graph(model)
    renamed = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target not in (torch.chunk, torch.split):
            continue
        source = f"{NODE_PREFIX}{node.args[0].name}"
        splits = [n for n in graph.readers.get(source, []) if n.op_type == "Split"]
        parts = {user.args[1]: user for user in node.users}
        for split in splits:
            for index, name in enumerate(split.output):
                if index in parts and not name.startswith(NODE_PREFIX) and name not in renamed:
                    renamed[name] = f"{NODE_PREFIX}{parts[index].name}"
    rename_values(model.graph, renamed)


def _indexed(
    model: onnx.ModelProto, graph_module: fx.GraphModule, same: Mapping[str, str]
) -> ExportedGraph:
    graph = Graph(model)
    present = {*graph.inputs, *graph.producer}
    by_name = {node.name: node for node in graph_module.graph.nodes}
    tensors = {}
    for name, node in by_name.items():
        for tensor in (f"{NODE_PREFIX}{name}", f"{NODE_PREFIX}{same.get(name, name)}"):
            if tensor in present:
                tensors[node] = tensor
                break
    homes: dict[str, frozenset[fx.Node]] = {}
    for node in reversed(graph.nodes):
        graph_nodes: set[fx.Node] = set()
        for name in node.output:
            own = (
                by_name.get(name.removeprefix(NODE_PREFIX))
                if name.startswith(NODE_PREFIX)
                else None
            )
            if own is not None:
                graph_nodes.add(own)
            else:  # inside a graph node, or the second name of a tensor that is an output twice
                graph_nodes.update(*(homes[reader.name] for reader in graph.readers.get(name, [])))
        homes[node.name] = frozenset(graph_nodes)
    return ExportedGraph(model, tensors, homes)
