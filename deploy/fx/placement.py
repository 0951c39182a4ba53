"""Where a target wants its activations quantized: pure analysis of a traced graph.

A *site* is a tensor that is quantized, for all its readers or for some; sites of one *group* share
their scale::

    onnxruntime   x -Q-> Conv -> ReLU -Q-> MaxPool -Q-> Conv -Q-> Add -> ReLU -Q-> ...
                                       '--- one ---'              / Q
    tensorrt      x -Q-> Conv -> ReLU -> MaxPool -Q-> Conv -> Add -> ReLU -> ...
                                                             / Q (the branch that is no Conv's)
    ascend        x -Q-> Conv -> ReLU -> MaxPool -Q-> Conv -> Add -> ReLU -> ...
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from deploy.errors import ConfigError
from deploy.fx.fuse import called_module
from deploy.fx.grids import Target
from deploy.fx.layers import WEIGHTED, QatLayer
from deploy.fx.rewrite import is_op

Kind = str
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
PADDING = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # ZeroPad is a ConstantPad
MODULES: tuple[tuple[Kind, tuple[type[nn.Module], ...]], ...] = (
    ("weighted", (*WEIGHTED, QatLayer)),
    ("clip", (nn.ReLU, nn.ReLU6, nn.Hardtanh)),
    ("pool", (*AVERAGE, *ADAPTIVE)),
    ("keep", (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Flatten, nn.Unflatten)),
    ("keep", (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)),
    ("keep", (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)),
)
FUNCTIONS: dict[Any, Kind] = {
    torch.matmul: "matmul",
    torch.bmm: "matmul",
    operator.matmul: "matmul",
    torch.cat: "concat",
    torch.concat: "concat",
    functional.relu6: "clip",
    functional.hardtanh: "clip",
    functional.avg_pool2d: "pool",
    functional.adaptive_avg_pool2d: "pool",
    functional.max_pool2d: "keep",
    functional.dropout: "keep",
    torch.flatten: "keep",
    torch.reshape: "keep",
    torch.squeeze: "keep",
    torch.unsqueeze: "keep",
    torch.transpose: "keep",
    torch.permute: "keep",
}
METHODS: dict[str, Kind] = {
    name: "keep"
    for name in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute")
} | {"contiguous": "keep", "matmul": "matmul", "bmm": "matmul"}
SHARED = ("concat", "keep")


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
    group: int


def kind_of(graph_module: fx.GraphModule, node: fx.Node) -> Kind:
    """What a node is to quantization: weighted, matmul, add, concat, clip, pool, keep or other.

    "keep" gives values out that went in: max pooling, reshaping, dropout.
    """
    if node.op == "call_module":
        module = called_module(graph_module, node)
        return next((kind for kind, types in MODULES if isinstance(module, types)), "other")
    if is_op(node, "add") and len(tensor_inputs(node)) == 2:
        return "add"
    if is_op(node, "relu"):
        return "clip"
    if node.op == "call_function":
        return FUNCTIONS.get(node.target, "other")
    return METHODS.get(str(node.target), "other") if node.op == "call_method" else "other"


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that give `node` floating-point tensors, but for its parameters."""
    return [n for n in node.all_input_nodes if n.op != "get_attr" and _is_float(n)]


def place(
    graph_module: fx.GraphModule,
    target: Target,
    *,
    skip: Sequence[str] = (),
    share: Sequence[str] = SHARED,
) -> list[Site]:
    """The sites of a graph whose shapes are known (`propagate_shapes`), in the graph's order.

    Args:
        graph_module: the graph, norms folded.
        target: whose rules to follow.
        skip: modules to leave in float, by name.
        share: kinds whose inputs and output share a scale, of add, concat, pool and keep.

    Raises:
        ConfigError: `share` names no kind.
    """
    unknown = sorted(set(share) - {"add", "concat", "pool", "keep"})
    if unknown:
        raise ConfigError(f"scales can be shared around add, concat, pool and keep, got {unknown}")
    sites: dict[fx.Node, Site] = {}
    order = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and str(node.target) in skip:
            continue
        for tensor in _wanted_inputs(graph_module, node, target, order):
            tensor, reader = before_padding(graph_module, tensor, node)
            _add(sites, order, tensor, None if target.outputs else reader)
        if target.outputs and _wants_output(graph_module, node):
            _add(sites, order, output_of(graph_module, node), None)
    _share(graph_module, sites, share)
    return sorted(sites.values(), key=lambda site: order[site.tensor])


def output_of(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The ReLU or Clip that alone reads `node`, which runtimes fuse with it; else `node`."""
    readers = list(node.users)
    if len(readers) == 1 and kind_of(graph_module, readers[0]) == "clip":
        return readers[0]
    return node


def before_padding(
    graph_module: fx.GraphModule, tensor: fx.Node, reader: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """The tensor before any padding with zeros, and who reads it there.

    A real 0 is exact on every grid, so padding and quantizing commute; padding after it joins the
    convolution.
    """
    while is_zero_pad(graph_module, tensor):
        tensor, reader = tensor.all_input_nodes[0], tensor
    return tensor, reader


def is_zero_pad(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` pads with zeros."""
    if node.target is functional.pad:
        options = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False))
        options |= node.kwargs
        return options.get("mode", "constant") == "constant" and not options.get("value")
    module: Any = called_module(graph_module, node)
    return isinstance(module, PADDING) and not module.value


def _wanted_inputs(
    graph_module: fx.GraphModule, node: fx.Node, target: Target, order: dict[fx.Node, int]
) -> Iterator[fx.Node]:
    kind = kind_of(graph_module, node)
    inputs = tensor_inputs(node)
    if kind in ("weighted", "matmul") or (target.outputs and kind in ("add", "concat", "pool")):
        yield from inputs
    elif kind == "add" and target.add:
        fusing = [n for n in inputs if kind_of(graph_module, n) == "weighted" and len(n.users) == 1]
        if fusing:
            last = max(fusing, key=order.__getitem__)
            yield from (n for n in inputs if n is not last)


def _wants_output(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """A Linear's output may stay in float: the last one gives the logits."""
    kind = kind_of(graph_module, node)
    linear = isinstance(called_module(graph_module, node), nn.Linear)
    return kind in ("weighted", "add", "concat", "matmul") and not linear


def _add(
    sites: dict[fx.Node, Site], order: dict[fx.Node, int], tensor: fx.Node, reader: fx.Node | None
) -> None:
    site = sites.setdefault(tensor, Site(tensor, set(), order[tensor]))
    if reader is None:
        site.readers = None
    elif site.readers is not None:
        site.readers.add(reader)


def _share(graph_module: fx.GraphModule, sites: dict[fx.Node, Site], share: Sequence[str]) -> None:
    """Join the groups of each sharing node's inputs and output, where they are quantized."""
    for node in graph_module.graph.nodes:
        if kind_of(graph_module, node) not in share:
            continue
        around = [*tensor_inputs(node), output_of(graph_module, node), node]
        groups = {sites[n].group for n in around if n in sites}
        if len(groups) > 1:
            for site in sites.values():
                site.group = min(groups) if site.group in groups else site.group


def _is_float(node: fx.Node) -> bool:
    meta: Any = node.meta.get("tensor_meta")
    return hasattr(meta, "dtype") and bool(meta.dtype.is_floating_point)
