"""Place quantizers in a PyTorch graph: the target's plan of the exported ONNX model, mapped back.

`place_quantizers` exports the graph in float (`deploy.fx.marked_export`), asks the target for its
plan of the cleaned ONNX model, as `calib8 build` does, and maps the plan to the graph, so that both
quantize the same tensors and weights. A *site* is a quantized tensor, for all or some of its
readers; sites of one *group* share a scale::

    plan    Pair(fx/relu, [Conv_7])     WeightTarget(conv2.weight, axis 0)
               |        |                      |
    graph     relu --> quant --> conv2        conv2: a weight with a scale per channel
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from torch import fx

from calibrators.grids import Grid
from deploy.errors import ConfigError
from deploy.fx.convert import Sources
from deploy.fx.fuse import called_module
from deploy.fx.int8_layers import WEIGHTED, QatLayer
from deploy.fx.marked_export import NODE_PREFIX, ExportedGraph, export_named, is_float
from deploy.graph.bounds import find_range_limits
from deploy.graph.index import Graph
from deploy.graph.plan import FLOAT_BY_USER, Plan
from deploy.targets import Target

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
        names_of.setdefault(group, {}).update(
            dict.fromkeys(plan.range_sources.get(owner, (owner,)))
        )
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
