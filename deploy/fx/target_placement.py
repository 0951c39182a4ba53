"""Where a target wants its pairs, in a graph of PyTorch: its plan of the ONNX model, mapped back.

`calib8 build` asks the target for a plan of the cleaned ONNX model; here the same question is put
for the model that the graph exports (`deploy.fx.target_placement`), so that both quantize the same
tensors and weights. A *site* is a tensor that is quantized, for all its readers or for some; sites
of one *group* share their scale::

    plan    Pair(fx/relu, [Conv_7])     WeightTarget(conv2.weight, axis 0)
               |        |                      |
    graph     relu --> quant --> conv2        conv2: a weight with a scale a channel

The ONNX model of a graph in float, cleaned as a target sees it, its tensors named by nodes.

Each float tensor goes through a marker that holds its node's name. Markers are taken out before
anything is optimized or cleaned, and what they read gets that name::

    conv -> Named(conv) -> relu -> Named(relu)     becomes     Conv -> fx/conv -> Relu -> fx/relu

so that a tensor of the cleaned model says which node makes it, and one without such a name stands
inside of a node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from calibrators.grids import Grid
from deploy.errors import ConfigError, ModelError
from deploy.frontends.onnx_file import cleaned
from deploy.fx.convert import Sources
from deploy.fx.device import quiet
from deploy.fx.export import OPSET, explained, plain
from deploy.fx.fuse import called_module
from deploy.fx.int8_layers import WEIGHTED, QatLayer, folded_layer
from deploy.fx.trace import replace_submodule
from deploy.graph.bounds import reaches
from deploy.graph.index import Graph
from deploy.graph.plan import AS_ASKED
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.graph.plan import Plan
    from deploy.targets import Target


BEFORE = "fx/"  # what the names of nodes begin with in the model
DOMAIN, MARKER = "calib8", "Named"


@dataclass(frozen=True, slots=True)
class Named:
    """A cleaned model whose tensors are named by nodes of a graph.

    Attributes:
        model: ready for a target's plan.
        tensors: node -> tensor, of the nodes whose tensor is in the model.
        homes: ONNX node -> the nodes of the graph that it is the whole or a part of.
    """

    model: onnx.ModelProto
    tensors: Mapping[fx.Node, str]
    homes: Mapping[str, frozenset[fx.Node]] = field(repr=False)

    def nodes_of(self, tensor: str) -> list[fx.Node]:
        """The nodes that make a tensor; of several that are equal, in the graph's order."""
        return [node for node, name in self.tensors.items() if name == tensor]


@phase("placing")
def named(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    whole: Callable[[fx.Node], bool] = lambda node: False,
) -> Named:
    """The cleaned ONNX model of a graph whose shapes are known (`propagate_shapes`).

    Args:
        graph_module: norms folded, or layers with their norms.
        inputs: example inputs.
        whole: says of a call of a module that nothing is to look inside of it.

    Raises:
        ModelError: torch.export cannot follow the graph.
    """
    own = _in_float(graph_module)
    _stand_in(own, whole)
    _mark(own)
    program = _exported(own, pytree.tree_map(_on_cpu, tuple(inputs)))
    same = _take_out_markers(program.model)
    with quiet():
        program.optimize()
    model: onnx.ModelProto = program.model_proto
    _name_parts(model, graph_module)
    model = cleaned(plain(model))
    return _indexed(model, graph_module, same)


def _in_float(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy in eval mode on the CPU, in float32, each layer with the weights that it runs by."""
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
    leaf = leaf.float() if leaf.is_floating_point() else leaf
    # a batch of one would be taken for a constant 1
    return torch.cat([leaf, leaf]) if leaf.dim() and len(leaf) == 1 else leaf


class StandIn(nn.Module):
    """What no target runs in int8, in the place of a module: as many inputs, the same outputs.

    Args:
        outputs: shapes and types of what the module gives.
        batch: first dimension of its first input, which outputs of the same one follow.
    """

    def __init__(self, outputs: Any, batch: int | None):
        super().__init__()
        self.outputs = outputs
        self.batch = batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Sums of the inputs; a first dimension that is the inputs' stays open."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        total = torch.stack([torch.cumsum(x.float().flatten(), 0).sum() for x in tensors]).sum()

        def one(meta: Any) -> Any:
            if not isinstance(meta, TensorMetadata) or not meta.shape:
                return total
            first = tensors[0].shape[0] if meta.shape[0] == self.batch else meta.shape[0]
            return torch.cumsum(total.expand(first, *meta.shape[1:]), -1).to(meta.dtype)

        return pytree.tree_map(one, self.outputs, is_leaf=lambda m: isinstance(m, TensorMetadata))


def _stand_in(own: fx.GraphModule, whole: Callable[[fx.Node], bool]) -> None:
    for node in own.graph.nodes:
        if node.op == "call_module" and whole(node):
            name = f"stand_in_{node.name}"
            own.add_submodule(name, StandIn(node.meta.get("tensor_meta"), _batch(node)))
            node.target = name
    own.delete_all_unused_submodules()


def _batch(node: fx.Node) -> int | None:
    metas = [source.meta.get("tensor_meta") for source in node.all_input_nodes]
    shapes = [meta.shape for meta in metas if isinstance(meta, TensorMetadata)]
    return shapes[0][0] if shapes and shapes[0] else None


def mark(x: torch.Tensor, name: str) -> torch.Tensor:
    """X under the name of a node; only inside an export."""
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{MARKER}", (x,), {"name": name}, dtype=x.dtype, shape=x.shape, version=1
    )


def _mark(own: fx.GraphModule) -> None:
    inputs = [node for node in own.graph.nodes if node.op == "placeholder"]
    for node in list(own.graph.nodes):
        if node.op in ("output", "get_attr") or not is_float(node):
            continue
        with own.graph.inserting_after(inputs[-1] if node.op == "placeholder" else node):
            marked = own.graph.call_function(mark, (node, node.name))
        node.replace_all_uses_with(marked, delete_user_cb=lambda user, own=marked: user is not own)
    own.recompile()


def is_float(node: fx.Node) -> bool:
    """Whether a node whose shape is known gives one floating-point tensor."""
    meta: Any = node.meta.get("tensor_meta")
    return isinstance(meta, TensorMetadata) and bool(meta.dtype.is_floating_point)


def _exported(own: fx.GraphModule, inputs: tuple[Any, ...]) -> Any:
    """The exporter's program before it is optimized: with the batch open where that can be."""
    batch = torch.export.Dim.AUTO
    shapes = pytree.tree_map(lambda leaf: {0: batch} if _has_batch(leaf) else None, inputs)
    first: Exception | None = None
    for dynamic in (shapes, None):
        try:
            with quiet():
                return torch.onnx.export(
                    own,
                    inputs,
                    None,
                    dynamo=True,
                    verbose=False,
                    opset_version=OPSET,
                    dynamic_shapes=dynamic,
                    optimize=False,
                )
        except Exception as error:  # torch.export and the exporter share no error class
            first = first or error
    assert first is not None
    raise ModelError(explained(first, dynamic_batch=False)) from first


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _take_out_markers(model: Any) -> dict[str, str]:
    """Name each marked tensor by its first node; node -> the node that names its tensor."""
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
        value.name = f"{BEFORE}{name}"
    model.opset_imports.pop(DOMAIN, None)
    return same


def _name_parts(model: onnx.ModelProto, graph_module: fx.GraphModule) -> None:
    """Name the outputs of each Split by the nodes that take its parts: it replaces a sequence."""
    graph = Graph(model)
    renamed = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target not in (torch.chunk, torch.split):
            continue
        source = f"{BEFORE}{node.args[0].name}"
        splits = [n for n in graph.readers.get(source, []) if n.op_type == "Split"]
        parts = {user.args[1]: user for user in node.users}
        for split in splits:
            for place, name in enumerate(split.output):
                if place in parts and not name.startswith(BEFORE) and name not in renamed:
                    renamed[name] = f"{BEFORE}{parts[place].name}"
    for made in model.graph.node:
        for names in (made.input, made.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    for value in (*model.graph.value_info, *model.graph.output):
        value.name = renamed.get(value.name, value.name)


def _indexed(
    model: onnx.ModelProto, graph_module: fx.GraphModule, same: Mapping[str, str]
) -> Named:
    graph = Graph(model)
    present = {*graph.inputs, *graph.producer}
    by_name = {node.name: node for node in graph_module.graph.nodes}
    tensors = {}
    for name, node in by_name.items():
        for tensor in (f"{BEFORE}{name}", f"{BEFORE}{same.get(name, name)}"):
            if tensor in present:
                tensors[node] = tensor
                break
    homes: dict[str, frozenset[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found: set[fx.Node] = set()
        for name in node.output:
            own = by_name.get(name.removeprefix(BEFORE)) if name.startswith(BEFORE) else None
            if own is not None:
                found.add(own)
            else:  # inside of a node; or a tensor that is an output twice, under a name of its own
                found |= _union(homes[reader.name] for reader in graph.readers.get(name, []))
        homes[node.name] = frozenset(found)
    return Named(model, tensors, homes)


def _union(sets: Iterable[frozenset[fx.Node]]) -> set[fx.Node]:
    return {node for one in sets for node in one}


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
