"""Place quantizers in a PyTorch graph: the target's plan of the exported ONNX model, mapped back.

`place_quantizers` exports the graph in float, asks the target for its plan of the cleaned ONNX
model, as `calib8 build` does, and maps the plan to the graph, so that both quantize the same
tensors and weights. A *site* is a quantized tensor, for all or some of its readers; sites of one
*group* share a scale::

    plan    Pair(fx/relu, [Conv_7])     WeightTarget(conv2.weight, axis 0)
               |        |                      |
    graph     relu --> quant --> conv2        conv2: a weight with a scale per channel

For the mapping, each float tensor is exported through a marker operator with the name of its node.
Before the model is optimized and cleaned, markers are removed and their inputs renamed::

    conv -> Named(conv) -> relu -> Named(relu)     becomes     Conv -> fx/conv -> Relu -> fx/relu

So the name of a tensor gives its node; a tensor without such a name is inside a node.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from calibrators.grids import Grid
from deploy.errors import ConfigError, ModelError
from deploy.frontends.onnx_file import clean_model
from deploy.fx.capture import has_batch, repeat_single_sample
from deploy.fx.convert import Sources
from deploy.fx.device import quiet
from deploy.fx.export import (
    OPSET,
    clean_exported,
    explain_export_failure,
    rename_values,
    run_exporter,
)
from deploy.fx.fuse import called_module
from deploy.fx.int8_layers import WEIGHTED, QatLayer, folded_layer
from deploy.fx.source import replace_submodule
from deploy.graph.bounds import find_range_limits
from deploy.graph.index import Graph
from deploy.graph.plan import FLOAT_BY_USER, Plan
from deploy.targets import Target
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


SHARED_SCALE_OPS = {
    "add": frozenset({"Add"}),
    "concat": frozenset({"Concat"}),
    "pool": frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"}),
    "keep": frozenset({"MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}),
}
INSIDE_CALL = "a tensor inside it would be quantized, but it is a single call in PyTorch"
NO_LAYER = "its weight does not belong to a layer: write it as a Conv or Linear of torch.nn"
_ROUNDS = 16  # each round keeps more nodes in float


@dataclass(slots=True)
class QuantizationSite:
    """A quantized tensor."""

    tensor: fx.Node
    readers: set[fx.Node] | None  # nodes that read it quantized; None for all
    group: str  # sites of the same group share a scale


@dataclass(frozen=True, slots=True)
class GraphPlacement:
    """A target's quantization plan for a graph."""

    grid: Grid
    sites: tuple[QuantizationSite, ...]  # quantized tensors, in the graph's order
    # group -> the tensors whose ranges determine its scale, each with its reach
    sources: Mapping[str, Sources]
    # qualified name of a layer -> whether its weight has a scale per channel
    weights: Mapping[str, bool]
    # qualified name of a layer in float -> why
    reasons: Mapping[str, str] = field(default_factory=dict)
    fits_pairs: bool = False  # whether weight scales are limited so that no CPU saturates


def place_quantizers(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    target: Target,
    *,
    skip: Sequence[str] = (),
    share: Sequence[str] = (),
    is_opaque: Callable[[fx.Node], bool] = lambda node: False,
) -> GraphPlacement:
    """Return a target's quantization plan for a graph with known shapes (`propagate_shapes`).

    `graph_module`: the graph, with norms folded or merged with their layers. `share`: kinds of
    operators whose inputs and output share a scale, in addition to those of the target: add,
    concat, pool, keep. `is_opaque`: tells whether a call of a module is opaque and stays in float.

    Raises:
        ConfigError: `share` has an unknown kind.
        ModelError: torch.export cannot follow the graph.
    """
    if unknown := sorted(set(share) - set(SHARED_SCALE_OPS)):
        raise ConfigError(
            f"scales can be shared around {', '.join(SHARED_SCALE_OPS)}, got {unknown}"
        )
    exported = export_named(graph_module, inputs, is_opaque=is_opaque)
    kept = {
        node: FLOAT_BY_USER
        for node, homes in exported.homes.items()
        if any(name in skip for name in _layers(graph_module, exported, homes))
    }
    for _ in range(_ROUNDS):  # until every node in int8 has a tensor or layer in the graph
        plan = target.plan(exported.model, kept)
        unmapped = dict(_unmapped(graph_module, exported, plan))
        if not unmapped.keys() - kept.keys():
            break
        kept |= unmapped
    groups = _groups(exported.model, plan, share)

    def layers(node: str) -> Iterator[str]:
        return _layers(graph_module, exported, exported.homes[node])

    heavy = [d for d in plan.decisions if d.reason and d.op_type in plan.placement.heavy]
    return GraphPlacement(
        grid=plan.placement.grid,
        sites=_sites(graph_module, exported, plan, groups),
        sources=_sources(exported, plan, groups),
        weights={name: w.axis is not None for w in plan.weights for name in layers(w.node)},
        reasons={n: d.reason.replace(NODE_PREFIX, "") for d in heavy for n in layers(d.node)},
        fits_pairs=plan.placement.fits_pairs,
    )


def _unmapped(
    graph_module: fx.GraphModule, exported: ExportedGraph, plan: Plan
) -> Iterator[tuple[str, str]]:
    """Yield (ONNX node, reason) for quantized nodes that the graph cannot express."""
    graph = Graph(exported.model)
    mapped = set(exported.tensors.values())
    int8 = set(plan.int8_nodes)
    for pair in plan.pairs:
        if pair.tensor not in mapped:
            producer = graph.producer.get(pair.tensor)
            producers = [] if producer is None else [producer]
            nodes = [*graph.readers.get(pair.tensor, []), *producers]
            yield from ((node.name, INSIDE_CALL) for node in nodes if node.name in int8)
    for weight in plan.weights:
        if not any(True for _ in _layers(graph_module, exported, exported.homes[weight.node])):
            yield weight.node, NO_LAYER


def _layers(
    graph_module: fx.GraphModule, exported: ExportedGraph, homes: Iterable[fx.Node]
) -> Iterator[str]:
    """Yield the names of the layers whose weights an ONNX node uses.

    The ONNX model may have a factor after a layer folded into the weights; then the layer's own
    output tensor is missing.
    """
    for home in homes:
        if isinstance(called_module(graph_module, home), (*WEIGHTED, QatLayer)):
            yield str(home.target)
            continue
        missing = [n for n in home.all_input_nodes if is_float(n) and n not in exported.tensors]
        yield from _layers(graph_module, exported, missing)


def _groups(model: onnx.ModelProto, plan: Plan, share: Sequence[str]) -> dict[str, str]:
    """Return quantized tensor -> name of its group."""
    groups = {pair.tensor: plan.scale_owners.get(pair.tensor, pair.tensor) for pair in plan.pairs}
    sharing = {op_type for kind in share for op_type in SHARED_SCALE_OPS[kind]}
    graph = Graph(model)
    for node in graph.nodes:
        if node.op_type in sharing:
            tensors = [*node.input, node.output[0], graph.tail(node)]
            merged = [groups[tensor] for tensor in tensors if tensor in groups]
            groups = {t: merged[0] if own in merged else own for t, own in groups.items()}
    return groups


def _sources(exported: ExportedGraph, plan: Plan, groups: Mapping[str, str]) -> dict[str, Sources]:
    """Return group -> (node, reach) of the tensors that determine its range, as in `build`."""
    known = find_range_limits(exported.model)
    names_of: dict[str, dict[str, None]] = {}
    for tensor, group in groups.items():
        owner = plan.scale_owners.get(tensor, tensor)
        names_of.setdefault(group, {}).update(dict.fromkeys(plan.range_sources.get(owner, (owner,))))
    return {
        group: [(node, known.get(name)) for name in names for node in exported.nodes_of(name)[:1]]
        for group, names in names_of.items()
    }


def _sites(
    graph_module: fx.GraphModule, exported: ExportedGraph, plan: Plan, groups: Mapping[str, str]
) -> tuple[QuantizationSite, ...]:
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    sites: dict[fx.Node, QuantizationSite] = {}
    for pair in plan.pairs:
        group = groups[pair.tensor]
        if pair.consumers is None:
            node = exported.nodes_of(pair.tensor)[0]
            sites[node] = QuantizationSite(node, None, group)
            continue
        for node, reader in _edges(exported, pair.tensor, pair.consumers):
            site = sites.setdefault(node, QuantizationSite(node, set(), group))
            if site.readers is not None:
                site.readers.add(reader)
    return tuple(sorted(sites.values(), key=lambda site: order[site.tensor]))


def _edges(
    exported: ExportedGraph, tensor: str, consumers: Iterable[str]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (node, reader) where the consumers of an ONNX tensor read it in the graph."""
    for consumer in consumers:
        for home in exported.homes[consumer]:
            yield from _edges_to(exported, tensor, home)


def _edges_to(
    exported: ExportedGraph, tensor: str, reader: fx.Node
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """As `_edges`, for one reader, through graph nodes that the ONNX model does not have.

    A node that only the reader reads, such as padding that became part of its convolution, is
    quantized before it.
    """
    for source in reader.all_input_nodes:
        if not is_float(source) and not isinstance(source.meta.get("tensor_meta"), tuple | list):
            continue  # a size
        source_tensor = exported.tensors.get(source)
        if source_tensor is None:
            upstream = list(_edges_to(exported, tensor, source))
            shared = is_float(source) and len(source.users) > 1
            yield from [(source, reader)] if upstream and shared else upstream
        elif source_tensor == tensor:
            first = [n for n in source.all_input_nodes if exported.tensors.get(n) == tensor]
            yield (first[0], source) if first and len(source.users) == 1 else (source, reader)
