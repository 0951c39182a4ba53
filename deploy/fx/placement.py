"""Where a target wants its pairs, in a graph of PyTorch: its plan of the ONNX model, mapped back.

`calib8 build` asks the target for a plan of the cleaned ONNX model; here the same question is put
for the model that the graph exports (`deploy.fx.target_placement`), so that both quantize the same tensors and
weights. A *site* is a tensor that is quantized, for all its readers or for some; sites of one
*group* share their scale::

    plan    Pair(fx/relu, [Conv_7])     WeightTarget(conv2.weight, axis 0)
               |        |                      |
    graph     relu --> quant --> conv2        conv2: a weight with a scale a channel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from calibrators.grids import Grid
from deploy.errors import ConfigError
from deploy.fx.fuse import called_module
from deploy.fx.int8_layers import WEIGHTED, QatLayer
from deploy.fx.target_placement import BEFORE, Named, is_float, named
from deploy.fx.watched import Sources
from deploy.graph.index import Graph
from deploy.graph.plan import AS_ASKED
from deploy.graph.reach import reaches

if TYPE_CHECKING:
    import onnx

    from deploy.graph.plan import Plan
    from deploy.targets import Target

SHARES = {
    "add": frozenset({"Add"}),
    "concat": frozenset({"Concat"}),
    "pool": frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"}),
    "keep": frozenset({"MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}),
}
INSIDE = "a tensor inside of it wants a pair, and PyTorch has it as one call"
NO_LAYER = "its weight is no layer's: write it as a Conv or Linear of torch.nn"
_ROUNDS = 16  # each keeps something more in float


@dataclass(slots=True)
class Site:
    """A quantized tensor.

    Attributes:
        tensor: the node that makes it.
        readers: the nodes that read it quantized; None for all.
        group: sites of equal group share their scale.
    """

    tensor: fx.Node
    readers: set[fx.Node] | None
    group: str


@dataclass(frozen=True, slots=True)
class Placed:
    """What of a graph is quantized.

    Attributes:
        grid: of the activations.
        sites: its tensors, in the graph's order.
        sources: group -> the tensors whose ranges its scale holds, each with how far its readers
            tell values apart.
        weights: qualified name of a layer -> whether its weight has a scale a channel.
        reasons: qualified name of a layer in float -> why.
        fits_pairs: whether weights are stored so that no CPU saturates their products.
    """

    grid: Grid
    sites: tuple[Site, ...]
    sources: Mapping[str, Sources]
    weights: Mapping[str, bool]
    reasons: Mapping[str, str] = field(default_factory=dict)
    fits_pairs: bool = False


def place(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    target: Target,
    *,
    skip: Sequence[str] = (),
    share: Sequence[str] = (),
    whole: Callable[[fx.Node], bool] = lambda node: False,
) -> Placed:
    """What of a graph whose shapes are known (`propagate_shapes`) a target wants quantized.

    Args:
        graph_module: the graph, norms folded or joined with their layers.
        inputs: example inputs.
        target: whose plan to follow.
        skip: layers to leave in float, by name.
        share: kinds of operators whose inputs and output share a scale beyond what the target
            wants, of add, concat, pool and keep.
        whole: says of a call of a module that it stays whole and in float.

    Raises:
        ConfigError: `share` names no kind.
        ModelError: torch.export cannot follow the graph.
    """
    if unknown := sorted(set(share) - set(SHARES)):
        raise ConfigError(f"scales can be shared around {', '.join(SHARES)}, got {unknown}")
    found = named(graph_module, inputs, whole=whole)
    kept = {
        node: AS_ASKED
        for node, homes in found.homes.items()
        if any(name in skip for name in _layers(graph_module, found, homes))
    }
    plan = _expressible(graph_module, found, target, kept)
    groups = _groups(found.model, plan, share)
    return Placed(
        grid=plan.placement.grid,
        sites=_sites(graph_module, found, plan, groups),
        sources=_sources(found, plan, groups),
        weights=dict(_weights(graph_module, found, plan)),
        reasons=dict(_reasons(graph_module, found, plan)),
        fits_pairs=plan.placement.fits_pairs,
    )


def _expressible(
    graph_module: fx.GraphModule, found: Named, target: Target, kept: dict[str, str]
) -> Plan:
    """The target's plan, with what the graph has no tensor or layer for kept in float."""
    for _ in range(_ROUNDS):
        plan = target.plan(found.model, kept)
        strange = dict(_strange(graph_module, found, plan))
        if not strange.keys() - kept.keys():
            break
        kept |= strange
    return plan


def _strange(graph_module: fx.GraphModule, found: Named, plan: Plan) -> Iterator[tuple[str, str]]:
    """Nodes of the plan that the graph cannot follow, and why."""
    graph = Graph(found.model)
    known = set(found.tensors.values())
    int8 = set(plan.int8_nodes)
    for pair in plan.pairs:
        if pair.tensor not in known:
            maker = graph.producer.get(pair.tensor)
            around = [*graph.readers.get(pair.tensor, []), *([maker] if maker is not None else [])]
            yield from ((node.name, INSIDE) for node in around if node.name in int8)
    for weight in plan.weights:
        if not any(True for _ in _layers(graph_module, found, found.homes[weight.node])):
            yield weight.node, NO_LAYER


def _layers(graph_module: fx.GraphModule, found: Named, homes: Iterable[fx.Node]) -> Iterator[str]:
    """Names of the layers with weights that an ONNX node is of.

    A factor behind a layer is folded into its weights in the ONNX model, where the layer's own
    tensor is gone.
    """
    for home in homes:
        if isinstance(called_module(graph_module, home), (*WEIGHTED, QatLayer)):
            yield str(home.target)
            continue
        gone = [n for n in home.all_input_nodes if is_float(n) and n not in found.tensors]
        yield from _layers(graph_module, found, gone)


def _weights(graph_module: fx.GraphModule, found: Named, plan: Plan) -> Iterator[tuple[str, bool]]:
    for weight in plan.weights:
        for name in _layers(graph_module, found, found.homes[weight.node]):
            yield name, weight.axis is not None


def _reasons(graph_module: fx.GraphModule, found: Named, plan: Plan) -> Iterator[tuple[str, str]]:
    """Why layers are float, in the words of a build."""
    for decision in plan.decisions:
        if not decision.reason or decision.op_type not in plan.placement.heavy:
            continue
        for name in _layers(graph_module, found, found.homes[decision.node]):
            yield name, decision.reason.replace(BEFORE, "")


def _groups(model: onnx.ModelProto, plan: Plan, share: Sequence[str]) -> dict[str, str]:
    """Paired tensor -> the name of what it shares its scale with."""
    groups = {pair.tensor: plan.owners.get(pair.tensor, pair.tensor) for pair in plan.pairs}
    wanted = {op_type for kind in share for op_type in SHARES[kind]}
    graph = Graph(model)
    for node in graph.nodes:
        if node.op_type in wanted:
            around = [*node.input, node.output[0], graph.tail(node)]
            joined = [groups[tensor] for tensor in around if tensor in groups]
            groups = {t: joined[0] if own in joined else own for t, own in groups.items()}
    return groups


def _sources(found: Named, plan: Plan, groups: Mapping[str, str]) -> dict[str, Sources]:
    """Group -> the nodes that give it its range, and their reaches, as `build` has them."""
    known = reaches(found.model)
    names_of: dict[str, dict[str, None]] = {}
    for tensor, group in groups.items():
        owner = plan.owners.get(tensor, tensor)
        names_of.setdefault(group, {}).update(dict.fromkeys(plan.sources.get(owner, (owner,))))
    return {
        group: [(node, known.get(name)) for name in names for node in found.nodes_of(name)[:1]]
        for group, names in names_of.items()
    }


def _sites(
    graph_module: fx.GraphModule, found: Named, plan: Plan, groups: Mapping[str, str]
) -> tuple[Site, ...]:
    order = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    sites: dict[fx.Node, Site] = {}
    for pair in plan.pairs:
        group = groups[pair.tensor]
        if pair.consumers is None:
            node = found.nodes_of(pair.tensor)[0]
            sites[node] = Site(node, None, group)
            continue
        for node, reader in _edges(found, pair.tensor, pair.consumers):
            site = sites.setdefault(node, Site(node, set(), group))
            if site.readers is not None:
                site.readers.add(reader)
    return tuple(sorted(sites.values(), key=lambda site: order[site.tensor]))


def _edges(
    found: Named, tensor: str, consumers: Iterable[str]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node, reader): where consumers of a tensor get it in the graph."""
    for consumer in consumers:
        for home in found.homes[consumer]:
            yield from _reaching(found, tensor, home)


def _reaching(found: Named, tensor: str, reader: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """As `_edges`, of one reader: through nodes that are none in the ONNX model.

    What only it reads, such as padding that is part of its convolution, is quantized before.
    """
    for source in filter(_carries, reader.all_input_nodes):
        held = found.tensors.get(source)
        if held is None:
            behind = list(_reaching(found, tensor, source))
            apart = is_float(source) and len(source.users) > 1
            yield from [(source, reader)] if behind and apart else behind
        elif held == tensor:
            first = [node for node in source.all_input_nodes if found.tensors.get(node) == tensor]
            yield (first[0], source) if first and len(source.users) == 1 else (source, reader)


def _carries(node: fx.Node) -> bool:
    """Whether a node gives floats, or several tensors; not sizes."""
    return is_float(node) or isinstance(node.meta.get("tensor_meta"), tuple | list)
