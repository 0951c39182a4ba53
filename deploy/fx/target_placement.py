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
from dataclasses import dataclass
from typing import Any

from torch import fx

from calibrators.grids import Grid
from deploy.fx.convert import Sources
from deploy.fx.fuse import WEIGHTED
from deploy.fx.int8_layers import QatLayer
from deploy.fx.marked_export import NODE_PREFIX, ExportedGraph, export_named, is_float
from deploy.fx.operations import called_module
from deploy.graph.bounds import RangeLimits, find_range_limits
from deploy.graph.index import Graph
from deploy.graph.plan import FLOAT_BY_USER, Plan
from deploy.targets import Target

INSIDE_CALL = "a tensor inside it would be quantized, but it is a single call in PyTorch"
NO_LAYER = "its weight does not belong to a layer: write it as a Conv or Linear of torch.nn"


@dataclass(slots=True)
class QuantizationSite:
    """A quantized tensor.

    Attributes:
        tensor: the node that outputs it.
        readers: nodes that read it quantized; None for all.
        group: sites of the same group share a scale.
    """

    tensor: fx.Node
    readers: set[fx.Node] | None
    group: str


@dataclass(frozen=True, slots=True)
class GraphPlacement:
    """A target's quantization plan for a graph.

    Attributes:
        grid: grid of the activations.
        sites: quantized tensors, in the graph's order.
        sources: group -> the tensors whose ranges determine its scale, each with the
            limits beyond which its readers saturate.
        per_channel_by_layer: qualified name of each layer in int8 -> whether its weight has a scale
            per channel, not one.
        reasons: qualified name of a layer in float -> why.
        limits_pair_sums: whether weights stay so small that no CPU saturates where it adds a pair
            of products in 16 bits.
    """

    grid: Grid
    sites: tuple[QuantizationSite, ...]
    sources: Mapping[str, Sources]
    per_channel_by_layer: Mapping[str, bool]
    reasons: Mapping[str, str]
    limits_pair_sums: bool


def place_quantizers(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    target: Target,
    *,
    skip: Sequence[str],
    is_opaque: Callable[[fx.Node], bool],
) -> GraphPlacement:
    """Return which tensors and weights of a graph a target quantizes.

    The target plans on ONNX nodes: the graph is exported, the target makes its plan of the ONNX
    model, and the plan is mapped back to the graph's nodes and layers.

    Args:
        graph_module: the graph, with norms folded or merged with their layers, after a run of
            `propagate_shapes`.
        inputs: example inputs.
        target: the target whose plan is used.
        skip: qualified names of layers to leave in float.
        is_opaque: tells whether a call of a module stays one node; then nothing inside the module
            is quantized.

    Raises:
        ModelError: torch.export cannot follow the graph.
    """
    exported = export_named(graph_module, inputs, is_opaque=is_opaque)
    mapper = _PlanMapper(graph_module, exported)
    # name of an ONNX node that stays in float -> why
    float_reasons = {
        onnx_node: FLOAT_BY_USER
        for onnx_node in exported.graph_nodes
        if any(layer in skip for layer in mapper.find_layers(onnx_node))
    }
    # Where the graph has no place for a quantizer, the node stays in float. The next plan then may
    # quantize other tensors without a place, so plan until there is none: each plan has more nodes
    # in float.
    while True:
        plan = target.plan(exported.model, float_reasons)
        unmapped_reasons = dict(mapper.find_unmapped(plan))
        if unmapped_reasons.keys() <= float_reasons.keys():
            break
        float_reasons |= unmapped_reasons

    return GraphPlacement(
        grid=plan.placement.grid,
        sites=mapper.map_sites(plan),
        sources=_find_sources(exported, plan),
        per_channel_by_layer=mapper.map_weights(plan),
        reasons=mapper.map_reasons(plan),
        limits_pair_sums=plan.placement.limits_pair_sums,
    )


class _PlanMapper:
    """Maps plans of the exported ONNX model to the graph."""

    def __init__(self, graph_module: fx.GraphModule, exported: ExportedGraph):
        self.graph_module = graph_module
        self.exported = exported

    def find_layers(self, onnx_node: str) -> Iterator[str]:
        """Yield the names of the layers whose weights an ONNX node uses."""
        return self._layers_of(self.exported.graph_nodes[onnx_node])

    def _layers_of(self, nodes: Iterable[fx.Node]) -> Iterator[str]:
        """Yield the layers of graph nodes, upstream of nodes that are no layer.

        The ONNX model may have a factor after a layer folded into the weights; then the layer's own
        output tensor is missing.
        """
        tensors = self.exported.tensors
        for node in nodes:
            if isinstance(called_module(self.graph_module, node), (*WEIGHTED, QatLayer)):
                yield str(node.target)
                continue
            sources = filter(is_float, node.all_input_nodes)
            yield from self._layers_of([source for source in sources if source not in tensors])

    def find_unmapped(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield (ONNX node, reason) for nodes in int8 whose quantizers have no place in the graph.

        For a pair (QuantizeLinear and DequantizeLinear on a tensor), the place is behind the graph
        node that computes the tensor; for a weight, it is in a layer.
        """
        onnx_graph = Graph(self.exported.model)
        mapped_tensors = set(self.exported.tensors.values())
        int8_nodes = set(plan.int8_nodes)
        for pair in plan.pairs:
            if pair.tensor in mapped_tensors:
                continue
            # the nodes that need the pair: the readers of the tensor, and the node that computes it
            onnx_nodes = list(onnx_graph.readers.get(pair.tensor, []))
            if pair.tensor in onnx_graph.producer:
                onnx_nodes.append(onnx_graph.producer[pair.tensor])
            for onnx_node in onnx_nodes:
                if onnx_node.name in int8_nodes:  # a node in float does not need the pair
                    yield onnx_node.name, INSIDE_CALL

        for weight in plan.weights:
            if next(self.find_layers(weight.node), None) is None:
                yield weight.node, NO_LAYER

    def map_weights(self, plan: Plan) -> dict[str, bool]:
        """Return name of each layer in int8 -> whether its weight has a scale per channel."""
        per_channel_by_layer: dict[str, bool] = {}
        for weight in plan.weights:
            layers = self.find_layers(weight.node)
            per_channel_by_layer |= dict.fromkeys(layers, weight.axis is not None)
        return per_channel_by_layer

    def map_reasons(self, plan: Plan) -> dict[str, str]:
        """Return name of a layer in float -> why."""
        reasons: dict[str, str] = {}
        for decision in plan.decisions:
            if decision.reason and decision.op_type in plan.placement.heavy:
                reason = decision.reason.replace(NODE_PREFIX, "")
                reasons |= dict.fromkeys(self.find_layers(decision.node), reason)
        return reasons

    def map_sites(self, plan: Plan) -> tuple[QuantizationSite, ...]:
        """Return the quantized tensors of the graph, in its order."""
        sites: dict[fx.Node, QuantizationSite] = {}
        for pair in plan.pairs:
            group = _group_of(pair.tensor, plan)
            if pair.consumers is None:  # all readers of the tensor
                node = self.exported.nodes_of(pair.tensor)[0]
                sites[node] = QuantizationSite(node, None, group)
                continue
            for node, reader in self._edges_to_consumers(pair.tensor, pair.consumers):
                site = sites.setdefault(node, QuantizationSite(node, set(), group))
                if site.readers is not None:
                    site.readers.add(reader)
        return tuple(sites[node] for node in self.graph_module.graph.nodes if node in sites)

    def _edges_to_consumers(
        self, tensor: str, consumers: Iterable[str]
    ) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (node, reader) where the graph nodes of ONNX nodes read an ONNX tensor."""
        for consumer in consumers:
            for graph_node in self.exported.graph_nodes[consumer]:
                yield from self._find_edges(tensor, graph_node)

    def _find_edges(self, tensor: str, reader: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield the edges of the graph, (node, its reader), on which a tensor is to be quantized.

        Here x is the tensor, and conv the reader::

            graph                   ONNX                  edge
            x -> conv               x -> Conv             (x, conv)
            x -> pad -> conv        x -> Conv that pads   (x, pad)
            x -> dropout -> conv    x -> Conv             (x, dropout)

        Other readers of the pad or dropout need its float values: if there are any, the edge is
        (pad, conv) or (dropout, conv).

        Args:
            tensor: tensor of the ONNX model.
            reader: graph node that may read the tensor, itself or, as the conv, through nodes that
                its ONNX node includes or leaves out.
        """
        for source in reader.all_input_nodes:
            # a chunk returns a tuple of tensors: it is no float tensor, but it may read x
            if not is_float(source) and not _returns_tensors(source):
                continue  # integers, such as a size, have no scale
            edges_before_source = self._edges_before(tensor, source)
            if not edges_before_source:
                if self.exported.tensors.get(source) == tensor:  # the source is x
                    yield source, reader
            elif is_float(source) and len(source.users) > 1:  # a pad or dropout with other readers
                yield source, reader
            else:  # also before a chunk, whose tuple cannot be quantized itself
                yield from edges_before_source

    def _edges_before(self, tensor: str, source: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Return the edges (x, pad) or (x, dropout) of `_find_edges`; [] if the source is neither.

        Args:
            tensor: tensor of the ONNX model: x.
            source: any graph node.
        """
        tensor_by_node = self.exported.tensors
        if source not in tensor_by_node:  # as the pad, which is a part of the ONNX node
            return list(self._find_edges(tensor, source))
        if tensor_by_node[source] != tensor:
            return []
        # ONNX leaves out a dropout: x is its input and its output
        inputs = source.all_input_nodes
        return [(node, source) for node in inputs if tensor_by_node.get(node) == tensor]


def _returns_tensors(node: fx.Node) -> bool:
    """Return whether a node whose shapes are known returns a tuple or list of tensors."""
    return isinstance(node.meta.get("tensor_meta"), tuple | list)


def _group_of(tensor: str, plan: Plan) -> str:
    """Return the tensor after which the group of a quantized tensor is named."""
    return plan.scale_owners.get(tensor, tensor)


def _find_sources(exported: ExportedGraph, plan: Plan) -> Mapping[str, Sources]:
    """Return group -> (node, saturation limits) of the tensors whose ranges determine its scale.

    A group is named after one of its tensors, the owner of the scale. The plan may name other
    tensors whose ranges the scale covers; if it names none, the scale covers the owner's range.

    The limits are the values beyond which all readers of a tensor saturate; None if some reader
    does not.
    """
    limits_by_tensor = find_range_limits(exported.model)
    sources: dict[str, list[tuple[fx.Node, RangeLimits | None]]] = {}
    for group in dict.fromkeys(_group_of(pair.tensor, plan) for pair in plan.pairs):
        sources[group] = []
        for source_tensor in plan.range_sources.get(group, (group,)):
            # a tensor inside a single call in PyTorch has no node: its range is not observed
            nodes = exported.nodes_of(source_tensor)
            if nodes:  # several have equal values: the first one will do
                sources[group].append((nodes[0], limits_by_tensor.get(source_tensor)))
    return sources
