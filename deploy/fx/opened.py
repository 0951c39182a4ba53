"""Calls that are several operators to a runtime, written out: each tensor between is a node.

::

    SiLU                            x -> sigmoid -> mul
    scaled_dot_product_attention    query, key -> matmul -> softmax -> matmul <- value
    a Conv that pads by copies      x -> pad -> Conv without padding

A pair may stand on any tensor that a runtime sees, and fake quantization wants a node for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional

from deploy.fx.fuse import CONVS, called_module
from deploy.fx.int8_layers import QatLayer
from deploy.fx.trace import replace_submodule

SILUS = (functional.silu, torch.ops.aten.silu.default, torch.ops.aten.silu_.default)
ATTENTION = functional.scaled_dot_product_attention


def open_calls(graph_module: fx.GraphModule) -> None:
    """Write out, in place, the calls inside of which a runtime may run something in int8."""
    for node in list(graph_module.graph.nodes):
        _pad_before(graph_module, node)
        written = _written(graph_module, node)
        if written is not None:
            _replace(node, written)
    graph_module.graph.lint()
    graph_module.recompile()


def _written(graph_module: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    """What to write for a node; None where it stays."""
    if node.target in SILUS or isinstance(called_module(graph_module, node), nn.SiLU):
        return _silu
    return _attention if node.target is ATTENTION and _is_plain(node) else None


def _pad_before(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Let a convolution that pads by reflection or the like read what is padded already."""
    module = called_module(graph_module, node)
    layer: Any = module.layer if isinstance(module, QatLayer) else module
    if not isinstance(layer, CONVS) or layer.padding_mode == "zeros":
        return
    widths, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    for call in graph_module.graph.nodes:
        if called_module(graph_module, call) is module:
            with graph_module.graph.inserting_before(call):
                options = {"mode": mode}
                padded = graph_module.graph.call_function(
                    functional.pad, (call.args[0], widths), options
                )
            call.replace_input_with(call.args[0], padded)
    bare = copy.copy(layer)
    bare.padding, bare.padding_mode = (0,) * len(layer.kernel_size), "zeros"
    if isinstance(module, QatLayer):
        module.layer = bare
    else:
        replace_submodule(graph_module, str(node.target), bare)


def _replace(node: fx.Node, written: Callable[..., Any]) -> None:
    tracer = GraphAppendingTracer(node.graph)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    with node.graph.inserting_before(node):
        args, kwargs = fx.node.map_arg((node.args, kwargs), lambda one: fx.Proxy(one, tracer))
        made = written(*args, **kwargs)
    made.node.meta |= {key: node.meta[key] for key in ("rank",) if key in node.meta}
    node.replace_all_uses_with(made.node)
    node.graph.erase_node(node)


def _silu(x: Any, inplace: bool = False) -> Any:
    return x * torch.sigmoid(x)


def _is_plain(node: fx.Node) -> bool:
    """Whether an attention drops nothing and has a key for each query's head."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    rest = (given.get("dropout_p"), given.get("enable_gqa"))
    known = all(isinstance(_meta(given[name]), torch.Size) for name in ("query", "key"))
    return known and not any(rest)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As torch's exporter writes it: query and key are scaled before they are multiplied."""
    shape, mask = _meta(query.node), None if attn_mask is None else attn_mask.node
    factor = math.sqrt(1 / math.sqrt(shape[-1]) if scale is None else scale)
    products = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if mask is not None:
        boolean = mask.meta["tensor_meta"].dtype is torch.bool
        away = torch.where(attn_mask, 0.0, -math.inf) if boolean else attn_mask
        products = products + away
    if is_causal:
        sizes = shape[-2], _meta(key.node)[-2]
        products = products + query.new_full(sizes, -math.inf).triu(1)
    return torch.matmul(torch.softmax(products, -1), value)


def _meta(node: Any) -> Any:
    return getattr(node.meta.get("tensor_meta"), "shape", None) if node is not None else None
