"""Folding BatchNorm into the layer before it, and joining ReLU to the layer before that.

::

    Conv -> BN -> ReLU     becomes     Conv' -> ReLU     becomes     [Conv' ReLU]
             fold_batch_norms                        join_relus

    w' = w * gamma / sqrt(var + eps)      b' = (b - mean) * gamma / sqrt(var + eps) + beta

Left alone, each with its reason in the report: a layer whose output has another user (it would see
the normalized value), a layer called at several places (one weight cannot serve two norms), a norm
without running statistics. Onnxruntime and torch.onnx fold BatchNorm too, so this is not for the
speed of an FP32 export: scales must be those of the folded weights, so training for int8 needs it
first.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from deploy.errors import ModelError
from deploy.fx.copied import plain_copy
from deploy.fx.modules import functions_to_modules
from deploy.fx.rewrite import is_op
from deploy.fx.trace import replace_submodule, trace

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FOLDABLE = (*CONVS, *TRANSPOSED, nn.Linear)


@dataclass(slots=True)
class FuseReport:
    """What was fused, as (pattern, module names), and what was left alone and why."""

    fused: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Pattern -> how many times it was fused."""
        return dict(Counter(pattern for pattern, _ in self.fused))


class Joined(nn.Module):
    """A layer and the ReLU after it, which writes over the layer's output."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(layer(x)) with one buffer less."""
        return torch.relu_(self.layer(x))


def fuse(model: nn.Module) -> tuple[fx.GraphModule, FuseReport]:
    """A traced copy of `model` with norms folded and ReLUs joined; the model is not changed.

    Raises:
        ModelError: the model cannot be traced, or is in train mode.
    """
    graph_module, report = fold_batch_norms(model)
    join_relus(graph_module, report)
    return graph_module, report


def fold_batch_norms(model: nn.Module) -> tuple[fx.GraphModule, FuseReport]:
    """A traced copy of `model` with each BatchNorm folded into the Conv or Linear before it.

    Raises:
        ModelError: the model cannot be traced, or is in train mode, where a norm follows the
            batch and has no fixed factor to fold.
    """
    graph_module = as_graph(plain_copy(model))
    refuse_train_mode(graph_module)
    functions_to_modules(graph_module)
    report = FuseReport()
    for node in list(graph_module.graph.nodes):
        if isinstance(called_module(graph_module, node), NORMS):
            _fold(graph_module, node, report)
    _clean(graph_module)
    return graph_module, report


def join_relus(graph_module: fx.GraphModule, report: FuseReport) -> None:
    """Join each ReLU to the Conv, Linear or BatchNorm that feeds only it; in place."""
    for node in list(graph_module.graph.nodes):
        if is_relu(graph_module, node):
            _join(graph_module, node, report)
    _clean(graph_module)


def as_graph(model: nn.Module) -> fx.GraphModule:
    """`model` itself where it is traced already, else its trace."""
    return model if isinstance(model, fx.GraphModule) else trace(model)


def refuse_train_mode(model: nn.Module) -> None:
    """Raise `ModelError` where a BatchNorm of the model is in train mode."""
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and module.training:
            raise ModelError(
                f"folding needs eval mode, got {name} in train mode; call model.eval() first"
            )


def called_module(graph_module: fx.GraphModule, node: object) -> nn.Module | None:
    """The module that `node` calls, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return graph_module.get_submodule(str(node.target))


def called_once(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether no other node calls the module of `node`."""
    module = called_module(graph_module, node)
    return sum(called_module(graph_module, n) is module for n in graph_module.graph.nodes) == 1


def is_relu(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` is a ReLU, as module, function or method."""
    return isinstance(called_module(graph_module, node), nn.ReLU) or is_op(node, "relu")


def foldable(graph_module: fx.GraphModule, norm: fx.Node) -> str | None:
    """Why the BatchNorm at `norm` cannot be folded into its layer, or None where it can."""
    layer, module = norm.args[0], called_module(graph_module, norm)
    before = called_module(graph_module, layer)
    if not isinstance(before, FOLDABLE) or not isinstance(layer, fx.Node):
        return "no Conv or Linear before it"
    if len(layer.users) > 1:
        return f"the output of {layer.target} has {len(layer.users)} users"
    if not called_once(graph_module, layer):
        return f"{layer.target} is called at several places"
    if getattr(module, "running_var", None) is None:
        return "it keeps no running statistics"
    if isinstance(before, nn.Linear) and not isinstance(module, nn.BatchNorm1d):
        return "only BatchNorm1d folds into Linear"
    return None


def _fold(graph_module: fx.GraphModule, norm: fx.Node, report: FuseReport) -> None:
    reason = foldable(graph_module, norm)
    if reason is not None:
        report.skipped.append((str(norm.target), reason))
        return
    layer = norm.args[0]
    assert isinstance(layer, fx.Node)
    before, module = called_module(graph_module, layer), called_module(graph_module, norm)
    assert before is not None and module is not None
    replace_submodule(graph_module, str(layer.target), _folded(before, module))
    report.fused.append((f"{_kind(before)}+BN", (str(layer.target), str(norm.target))))
    norm.replace_all_uses_with(layer)
    graph_module.graph.erase_node(norm)


def _folded(layer: Any, norm: nn.Module) -> Any:
    """A copy of `layer` that computes norm(layer(x))."""
    layer = copy.deepcopy(layer)
    factor, shift = norm_factors(norm)
    bias = layer.bias.detach() if layer.bias is not None else torch.zeros_like(shift)
    weight = scale_outputs(layer, layer.weight.detach(), factor)
    layer.register_parameter("weight", nn.Parameter(weight))
    layer.register_parameter("bias", nn.Parameter(bias * factor + shift))
    return layer


def norm_factors(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A BatchNorm in eval mode as y = x * factor + shift: two [C] tensors."""
    mean, variance = norm.running_mean, norm.running_var
    gamma = norm.weight.detach() if norm.weight is not None else torch.ones_like(mean)
    beta = norm.bias.detach() if norm.bias is not None else torch.zeros_like(mean)
    factor = gamma / torch.sqrt(variance + norm.eps)
    return factor, beta - mean * factor


def scale_outputs(layer: Any, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The layer's weight with output channel c multiplied by factor[c]."""
    if not isinstance(layer, TRANSPOSED):
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    # [C_in, C_out / groups, ...]: the rows of group g go to its own slice of the outputs
    grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
    by_group = factor.reshape(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
    return (grouped * by_group).reshape(weight.shape)


def _join(graph_module: fx.GraphModule, relu: fx.Node, report: FuseReport) -> None:
    layer = relu.args[0]
    before = called_module(graph_module, layer)
    if not isinstance(before, (*FOLDABLE, *NORMS)) or not isinstance(layer, fx.Node):
        return
    if len(layer.users) > 1 or not called_once(graph_module, layer):
        report.skipped.append((relu.name, f"{layer.target} has another user or call"))
        return
    name = str(layer.target)
    replace_submodule(graph_module, name, Joined(before))
    folded = [i for i, (_, names) in enumerate(report.fused) if names[0] == name]
    if folded:
        pattern, names = report.fused[folded[0]]
        report.fused[folded[0]] = (f"{pattern}+ReLU", (*names, relu.name))
    else:
        report.fused.append((f"{_kind(before)}+ReLU", (name, relu.name)))
    relu.replace_all_uses_with(layer)
    graph_module.graph.erase_node(relu)


def _kind(module: nn.Module) -> str:
    if isinstance(module, NORMS):
        return "BN"
    if isinstance(module, TRANSPOSED):
        return "ConvTranspose"
    return "Linear" if isinstance(module, nn.Linear) else "Conv"


def _clean(graph_module: fx.GraphModule) -> None:
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
