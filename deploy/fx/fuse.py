"""Folding BatchNorm into the layer before it, and joining ReLU to the layer before that.

::

    Conv -> BN -> ReLU     becomes     Conv' -> ReLU     becomes     [Conv' ReLU]
             fold_batch_norms                        join_relus

    w' = w * gamma / sqrt(var + eps)      b' = (b - mean) * gamma / sqrt(var + eps) + beta

A norm before a layer, with nothing between, folds into that one instead::

    w' = w * factor of its input channel      b' = b + sum of w * shift

and branches that are added become one layer (`deploy.fx.branches`).

Left alone, each with its reason in the report: a layer whose output has another user (it would see
the normalized value), a layer called at several places (one weight cannot serve two norms), a norm
without running statistics. Onnxruntime and torch.onnx fold BatchNorm too, so this is not for the
speed of an FP32 export: scales must be those of the folded weights, so training for int8 needs it
first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from deploy.errors import ModelError
from deploy.fx.branches import merge_branches
from deploy.fx.capture import graph_of
from deploy.fx.modules import functions_to_modules
from deploy.fx.norms import FrozenNorm, freeze_affines, is_norm, norm_factors
from deploy.fx.rewrite import is_op
from deploy.fx.trace import replace_submodule

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FOLDABLE = (*CONVS, *TRANSPOSED, nn.Linear)


@dataclass(slots=True)
class FuseReport:
    """What was fused, as (pattern, module names), what was left alone and why; norms left."""

    fused: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    norms_left: int = 0

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


def fuse(
    model: nn.Module, inputs: Sequence[Any] | None = None
) -> tuple[fx.GraphModule, FuseReport]:
    """A graph of a copy of `model` with norms folded and ReLUs joined; the model is not changed.

    Args:
        model: in eval mode.
        inputs: example inputs to capture it with; without, it is traced symbolically.

    Raises:
        ModelError: the model cannot be captured, or is in train mode.
    """
    graph_module, report = fold_batch_norms(model, inputs)
    join_relus(graph_module, report)
    return graph_module, report


def fold_batch_norms(
    model: nn.Module, inputs: Sequence[Any] | None = None
) -> tuple[fx.GraphModule, FuseReport]:
    """A graph of a copy of `model` with each BatchNorm folded into a Conv or Linear beside it.

    Args:
        model: in eval mode.
        inputs: as `fuse`.

    Raises:
        ModelError: the model cannot be captured, or is in train mode, where a norm follows the
            batch and has no fixed factor to fold.
    """
    graph_module = graph_of(model, inputs)
    layers_to_modules(graph_module)
    refuse_train_mode(graph_module)
    report = FuseReport()
    for node in _norms(graph_module):
        if foldable(graph_module, node) is None:
            _fold(graph_module, node, report)
    for merged in merge_branches(graph_module):
        report.fused.append(("Branches", (merged.layer, merged.taken)))
    for node in _norms(graph_module):
        _fold_ahead(graph_module, node, report)
    _clean(graph_module)
    report.norms_left = len(_norms(graph_module))
    return graph_module, report


def layers_to_modules(graph_module: fx.GraphModule) -> None:
    """Give every convolution, linear and norm the form of a module, whatever it is written as."""
    freeze_affines(graph_module)
    functions_to_modules(graph_module)


def fold_frozen(graph_module: fx.GraphModule) -> None:
    """Fold the norms whose factors are constants, which no training would move; in place."""
    for node in _norms(graph_module):
        frozen = isinstance(called_module(graph_module, node), FrozenNorm)
        if frozen and foldable(graph_module, node) is None:
            _fold(graph_module, node, FuseReport())


def norms_in_float(model: nn.Module) -> str:
    """One sentence on the norms that the graphs of `model`, prepared or converted, keep; or ""."""
    left = [
        f"{node.target} ({foldable(part, node) or 'its layer stays in float'})"
        for part in model.modules()
        if isinstance(part, fx.GraphModule)
        for node in _norms(part)
    ]
    if not left:
        return ""
    more = f", and {len(left) - 3} more" if len(left) > 3 else ""
    return f"BatchNorm left in float: {len(left)}: {', '.join(left[:3])}{more}"


def without_branches(
    model: nn.Module, inputs: Sequence[Any] | None = None
) -> tuple[nn.Module, int]:
    """`model` with its parallel branches merged, and how many; itself where it has none.

    A runtime folds norms by itself; three convolutions that are one, it computes.
    """
    try:
        folded, report = fold_batch_norms(model, inputs)
    except ModelError:  # exporting says why it cannot be followed
        return model, 0
    merged = report.counts().get("Branches", 0)
    return (folded, merged) if merged else (model, 0)


def join_relus(graph_module: fx.GraphModule, report: FuseReport) -> None:
    """Join each ReLU to the Conv, Linear or BatchNorm that feeds only it; in place."""
    for node in list(graph_module.graph.nodes):
        if is_relu(graph_module, node):
            _join(graph_module, node, report)
    _clean(graph_module)


def refuse_train_mode(model: nn.Module) -> None:
    """Raise `ModelError` where a BatchNorm of the model is in train mode."""
    for name, module in model.named_modules():
        if is_norm(module) and module.training and not isinstance(module, FrozenNorm):
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
    """Why the BatchNorm at `norm` cannot be folded into the layer before it, or None if it can."""
    layer, module = norm.args[0], called_module(graph_module, norm)
    before = called_module(graph_module, layer)
    if not isinstance(before, FOLDABLE) or not isinstance(layer, fx.Node):
        return "no Conv or Linear before it"
    if len(layer.users) > 1:
        return f"the output of {layer.target} has {len(layer.users)} users"
    if not called_once(graph_module, layer):
        return f"{layer.target} is called at several places"
    if not _has_factors(module):
        return "it keeps no running statistics"
    if isinstance(before, nn.Linear) and not _is_flat(layer, module):
        return "only BatchNorm1d folds into Linear"
    return None


def _norms(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph_module.graph.nodes if is_norm(called_module(graph_module, n))]


def _has_factors(norm: nn.Module | None) -> bool:
    return isinstance(norm, FrozenNorm) or getattr(norm, "running_var", None) is not None


def _is_flat(layer: fx.Node, norm: nn.Module | None) -> bool:
    """Whether the norm's channels are the Linear's: [N, C], as far as is known."""
    rank = layer.meta.get("rank")
    return rank == 2 if rank is not None else isinstance(norm, nn.BatchNorm1d)


def _fold(graph_module: fx.GraphModule, norm: fx.Node, report: FuseReport) -> None:
    layer = norm.args[0]
    assert isinstance(layer, fx.Node)
    before, module = called_module(graph_module, layer), called_module(graph_module, norm)
    assert before is not None and module is not None
    replace_submodule(graph_module, str(layer.target), _folded(before, module))
    report.fused.append((f"{_kind(before)}+BN", (str(layer.target), str(norm.target))))
    norm.replace_all_uses_with(layer)
    graph_module.graph.erase_node(norm)


def _fold_ahead(graph_module: fx.GraphModule, norm: fx.Node, report: FuseReport) -> None:
    """Fold a norm into the layer that alone reads it, or say why it stays."""
    reason = foldable(graph_module, norm)
    layer = next(iter(norm.users), None)
    after, module = called_module(graph_module, layer), called_module(graph_module, norm)
    if layer is None or len(norm.users) > 1 or not _takes_ahead(graph_module, layer, module):
        report.skipped.append((str(norm.target), str(reason)))
        return
    assert after is not None
    replace_submodule(graph_module, str(layer.target), _folded_ahead(after, module))
    report.fused.append((f"BN+{_kind(after)}", (str(layer.target), str(norm.target))))
    norm.replace_all_uses_with(norm.args[0])  # type: ignore[arg-type]
    graph_module.graph.erase_node(norm)


def _takes_ahead(graph_module: fx.GraphModule, layer: fx.Node, norm: nn.Module | None) -> bool:
    """Whether what `layer` computes of the norm's output is its own form with other weights.

    Zeros that it pads with would have to be the norm's zeros.
    """
    after: Any = called_module(graph_module, layer)
    if not _has_factors(norm) or not called_once(graph_module, layer):
        return False
    if isinstance(after, nn.Linear):
        return _is_flat(layer, norm)
    return isinstance(after, CONVS) and not _pads(after)


def _pads(conv: Any) -> bool:
    return conv.padding != "valid" and (isinstance(conv.padding, str) or any(conv.padding))


def _folded_ahead(layer: Any, norm: Any) -> Any:
    """A copy of `layer` that computes layer(norm(x))."""
    layer = copy.deepcopy(layer)
    factor, shift = norm_factors(norm)
    weight = layer.weight.detach()
    groups = getattr(layer, "groups", 1)
    by_group = [values.reshape(groups, 1, -1) for values in (factor, shift)]
    rows = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    added = (rows.sum(3) * by_group[1]).sum(2).reshape(-1)
    bias = layer.bias.detach() if layer.bias is not None else torch.zeros_like(added)
    scaled = (rows * by_group[0].unsqueeze(-1)).reshape(weight.shape)
    layer.register_parameter("weight", nn.Parameter(scaled))
    layer.register_parameter("bias", nn.Parameter(bias + added))
    return layer


def _folded(layer: Any, norm: nn.Module) -> Any:
    """A copy of `layer` that computes norm(layer(x))."""
    layer = copy.deepcopy(layer)
    factor, shift = norm_factors(norm)
    bias = layer.bias.detach() if layer.bias is not None else torch.zeros_like(shift)
    weight = scale_outputs(layer, layer.weight.detach(), factor)
    layer.register_parameter("weight", nn.Parameter(weight))
    layer.register_parameter("bias", nn.Parameter(bias * factor + shift))
    return layer


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
    if (
        before is None
        or not (isinstance(before, FOLDABLE) or is_norm(before))
        or not isinstance(layer, fx.Node)
    ):
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
    if is_norm(module):
        return "BN"
    if isinstance(module, TRANSPOSED):
        return "ConvTranspose"
    return "Linear" if isinstance(module, nn.Linear) else "Conv"


def _clean(graph_module: fx.GraphModule) -> None:
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
