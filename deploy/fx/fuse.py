"""Fold BatchNorm into the layer before it, and fuse ReLU with the layer before it.

::

    Conv -> BN -> ReLU     becomes     Conv' -> ReLU     becomes     [Conv' ReLU]
             fold_batch_norms                        join_relus

    w' = w * gamma / sqrt(var + eps)      b' = (b - mean) * gamma / sqrt(var + eps) + beta

Parallel branches that are added become one layer (`deploy.fx.branches`). Dropout and views may lie
between norm and layer (`deploy.fx.norms`).

Not folded, with the reason in the report: a layer whose output has another reader (which would get
the normalized value), a layer with several calls that do not all feed the same norm, a norm without
running statistics. ONNX Runtime and torch.onnx fold BatchNorm too; it is done here because the
scales of weights must be those of the folded weights.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from deploy.errors import ModelError, list_first
from deploy.fx.branches import merge_branches
from deploy.fx.capture import graph_of
from deploy.fx.functional_layers import functions_to_modules
from deploy.fx.norms import (
    has_factors,
    has_view,
    is_frozen_norm,
    is_norm,
    keeps_channels,
    norm_factors,
    path_to_layer,
    readers_of,
)
from deploy.fx.operations import (
    bias_of,
    called_module,
    calls_of_module,
    delete_unused_modules,
    input_of,
    is_op,
    is_plain,
    module_calls,
    replace_layer,
    replace_node,
    with_parameters,
)
from deploy.fx.plain_copy import plain_copy
from deploy.fx.trace import Leaves
from deploy.terminal import PrintedResult, join_visible

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (*CONVS, *TRANSPOSED, nn.Linear)
UNFOLDED_NORMS = "why norms stay"  # key in GraphModule.meta: norm -> why it was not folded


@dataclass(slots=True, repr=False)
class FuseReport(PrintedResult):
    """Report of `fuse`.

    Attributes:
        fused: (pattern, module names) of each fusion.
        skipped: (module, reason) of each norm or ReLU that was not fused.
        norms_left: number of norms left in the graph.
    """

    fused: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    norms_left: int = 0

    def counts(self) -> dict[str, int]:
        """Return pattern -> how often it was fused."""
        return dict(Counter(pattern for pattern, _ in self.fused))

    def to_screen(self) -> str:
        """Return the number of fusions of each pattern, and what was left alone."""
        lines = [f"{pattern}: {count} fused" for pattern, count in sorted(self.counts().items())]
        lines += [f"left alone: {name}: {reason}" for name, reason in self.skipped]
        return join_visible([*lines, f"BatchNorm left: {self.norms_left}"])


class LayerWithRelu(nn.Module):
    """A layer and the ReLU after it, applied in place."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> torch.Tensor:
        """Return relu(layer(x)); a ConvTranspose has a second input, `output_size`."""
        return torch.relu_(self.layer(*inputs))


def fuse(
    model: nn.Module, inputs: Sequence[Any] | None = None
) -> tuple[fx.GraphModule, FuseReport]:
    """Return a graph of a copy of `model` with norms folded and ReLUs fused, and a report.

    Args:
        model: any mode, not changed; the copy is in eval mode.
        inputs: example inputs, or a loader, to capture the model with; None to trace it
            symbolically.

    Raises:
        ModelError: the model cannot be captured.
    """
    graph_module, report = fold_batch_norms(model, inputs)
    # a layer that is called several times has a ReLU after each call: all are fused at once
    fused_relus: set[fx.Node] = set()
    for node in list(graph_module.graph.nodes):
        if node not in fused_relus and is_relu(graph_module, node):
            fused_relus |= _fuse_relu(graph_module, node, report)
    delete_unused_modules(graph_module)
    return graph_module, report


def fold_batch_norms(
    model: nn.Module, inputs: Sequence[Any] | None = None, *, leaves: Leaves = ()
) -> tuple[fx.GraphModule, FuseReport]:
    """Return a graph of a copy of `model` with BatchNorms folded into layers, and a report.

    The copy is in eval mode: running statistics are folded. Why a norm was not folded is also
    stored in the graph's `meta`, for later reports.

    Args:
        model: any mode, not changed.
        inputs: example inputs to capture the model with; None to trace it symbolically.
        leaves: modules to keep as one node, as for `graph_of`.

    Raises:
        ConfigError: a leaf matches nothing.
        ModelError: the model cannot be captured.
    """
    graph_module = graph_of(plain_copy(model).eval(), inputs, leaves=leaves)
    functions_to_modules(graph_module)
    report = FuseReport()
    fold_into_previous(graph_module, _norm_calls(graph_module), report)
    # branches such as RepVGG's are convolutions only once their norms are folded
    merged_names = merge_branches(graph_module)
    report.fused += [("Branches", names) for names in merged_names]
    # a norm after the sum of branches is right after a layer now
    fold_into_previous(graph_module, _norm_calls(graph_module), report)
    delete_unused_modules(graph_module)

    reason_by_norm: dict[str, str] = {}
    for norm_call in _norm_calls(graph_module):
        # never None: each norm that can fold was folded above
        reason_by_norm[str(norm_call.target)] = str(reason_not_foldable(graph_module, norm_call))
    report.norms_left = len(reason_by_norm)
    report.skipped += reason_by_norm.items()
    graph_module.meta[UNFOLDED_NORMS] = reason_by_norm
    return graph_module, report


def fold_into_previous(
    graph_module: fx.GraphModule, norm_calls: list[fx.Node], report: FuseReport
) -> None:
    """Fold the norms at these calls into the layers before them where possible; in place."""
    folded_calls: set[fx.Node] = set()
    for norm_call in norm_calls:
        if norm_call not in folded_calls and _reason_at_call(graph_module, norm_call) is None:
            foldable_calls = _foldable_calls(graph_module, norm_call)
            if foldable_calls:
                _fold_into_layer(graph_module, foldable_calls, report)
                folded_calls.update(foldable_calls)


def fold_frozen(graph_module: fx.GraphModule) -> None:
    """Fold frozen norms, which training does not change, into the layers before them; in place."""
    frozen = [node for node, module in module_calls(graph_module) if is_frozen_norm(module)]
    fold_into_previous(graph_module, frozen, FuseReport())


_MAX_LISTED_NORMS = 3  # in a message


def norms_in_float(model: nn.Module) -> str:
    """Return one sentence on the norms left in a prepared or converted model, or ""."""
    norms = list(dict.fromkeys(_norms_with_reasons(model)))
    if not norms:
        return ""
    return f"BatchNorm left in float: {len(norms)}: {list_first(norms, _MAX_LISTED_NORMS)}"


def _norms_with_reasons(model: nn.Module) -> Iterator[str]:
    """Yield "name (why it was not folded)" of each norm in the graphs of a model."""
    for module in model.modules():
        if isinstance(module, fx.GraphModule):
            reasons = module.meta.get(UNFOLDED_NORMS, {})  # from before quantizers were inserted
            for node in _norm_calls(module):
                reason = reasons.get(str(node.target)) or reason_not_foldable(module, node)
                yield f"{node.target} ({reason or 'its layer stays in float'})"


def fuse_for_export(model: nn.Module, inputs: Sequence[Any]) -> nn.Module:
    """Return `model` with the fusions that runtimes do not do themselves; unchanged if none apply.

    Runtimes fold a norm right after a convolution, but neither merge parallel convolutions nor fold
    a norm after a Linear, possibly with a view between.
    """
    try:
        folded_model, report = fold_batch_norms(model, inputs)
    except ModelError:  # the export reports why the model cannot be followed
        return model
    if report.counts().keys() <= {"Conv+BN", "ConvTranspose+BN"}:
        return model
    return folded_model


def is_relu(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether `node` is a ReLU, as module, function or method."""
    return is_plain(called_module(graph_module, node), (nn.ReLU,)) or is_op(node, "relu")


def reason_not_foldable(graph_module: fx.GraphModule, norm: fx.Node) -> str | None:
    """Return why the BatchNorm at `norm` cannot fold into the layer before it; None if it can."""
    reason = _reason_at_call(graph_module, norm)
    if reason is None and not _foldable_calls(graph_module, norm):
        layer = path_to_layer(graph_module, norm)[-1]
        return f"{layer.target} is called at several places"
    return reason


def _reason_at_call(graph_module: fx.GraphModule, norm: fx.Node) -> str | None:
    """Return why one call of a BatchNorm cannot fold into the layer before it; None if it can.

    `reason_not_foldable` also looks at the other calls of the layer.
    """
    # what the norm reads, upstream through views and dropout to the layer, which is the last node
    path = path_to_layer(graph_module, norm)
    layer_call = path[-1]
    layer = called_module(graph_module, layer_call)
    if not isinstance(layer, WEIGHTED):
        return "no Conv or Linear before it"
    if not is_plain(layer, WEIGHTED):
        return f"{layer_call.target} has a forward hook, or a class that overrides forward"
    for node in reversed(path):  # a second reader of a node would get normalized values
        reader_count = len(readers_of(node))
        if reader_count > 1:
            shown_name = layer_call.target if node is layer_call else node.name
            return f"the output of {shown_name} has {reader_count} users"

    norm_module = called_module(graph_module, norm)
    if not has_factors(norm_module):
        return "it keeps no running statistics"
    if has_view(graph_module, path):
        factor, _shift = norm_factors(norm_module)
        if keeps_channels(layer, path, factor.numel()):
            return None
        return f"a view after {layer_call.target} moves its channels"
    if isinstance(layer, nn.Linear) and not _outputs_matrix(layer_call, norm_module):
        return "only BatchNorm1d folds into Linear"
    return None


def _foldable_calls(graph_module: fx.GraphModule, norm_call: fx.Node) -> list[fx.Node]:
    """Return the calls of a norm that follow one layer, if it can fold into the layer, else [].

    All calls of a layer have the same weight. So a norm folds into the layer only if it follows
    every call of it, and each time in a way that can fold.

    `norm_call`: one of these calls; alone it could fold, as `_reason_at_call` is None.
    """
    layer_call = path_to_layer(graph_module, norm_call)[-1]
    layer_calls = calls_of_module(graph_module, layer_call)
    if len(layer_calls) == 1:  # its output has one reader, the path to this call
        return [norm_call]

    norm_calls = []  # those of any norm that follow a call of the layer
    for call in _norm_calls(graph_module):
        if path_to_layer(graph_module, call)[-1] in layer_calls:
            if _reason_at_call(graph_module, call) is not None:
                return []
            norm_calls.append(call)
    if len(norm_calls) < len(layer_calls):  # a call of the layer has no norm after it
        return []
    # The same norm must follow all calls. And neither norm nor layer may be a shared module with
    # several names, since folding would replace it under one name only.
    norm_names = {call.target for call in norm_calls}
    layer_names = {call.target for call in layer_calls}
    if len(norm_names) > 1 or len(layer_names) > 1:
        return []
    return norm_calls


def _norm_calls(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node, module in module_calls(graph_module) if is_norm(module)]


def _outputs_matrix(linear_call: fx.Node, norm: nn.Module | None) -> bool:
    """Return whether a Linear's output is [N, C]; if its rank is unknown, guess by the norm."""
    rank = linear_call.meta.get("rank")
    if rank is None:
        return isinstance(norm, nn.BatchNorm1d)
    return bool(rank == 2)


def _fold_into_layer(
    graph_module: fx.GraphModule, norm_calls: list[fx.Node], report: FuseReport
) -> None:
    """Fold a norm into the layer before it, and remove these calls of the norm."""
    norm_name = str(norm_calls[0].target)
    layer_name = str(path_to_layer(graph_module, norm_calls[0])[-1].target)
    layer = graph_module.get_submodule(layer_name)
    norm = graph_module.get_submodule(norm_name)
    replace_layer(graph_module, layer_name, _with_norm_after(layer, norm))
    report.fused.append((f"{_kind(layer)}+BN", (layer_name, norm_name)))
    for norm_call in norm_calls:
        _bypass(norm_call)


def _bypass(node: Any) -> None:
    """Let the readers of a call read its input."""
    replace_node(node, input_of(node))


def _with_norm_after(layer: Any, norm: nn.Module) -> Any:
    """Return a copy of `layer` that computes norm(layer(x))."""
    factor, shift = norm_factors(norm)
    scaled_weight = scale_outputs(layer, layer.weight.detach(), factor)
    return with_parameters(layer, scaled_weight, bias_of(layer, shift) * factor + shift)


def scale_outputs(layer: Any, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the layer's weight with output channel c multiplied by factor[c]."""
    if not isinstance(layer, TRANSPOSED):
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    # [C_in, C_out / groups, ...]: the rows of each group have their own slice of the outputs
    weight_by_group = weight.reshape(layer.groups, -1, *weight.shape[1:])
    factor_by_group = factor.reshape(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
    return (weight_by_group * factor_by_group).reshape(weight.shape)


def _fuse_relu(graph_module: fx.GraphModule, relu: fx.Node, report: FuseReport) -> set[fx.Node]:
    """Fuse a ReLU with the layer before it, in place; return the removed ReLU nodes.

    Every call of the layer must have a ReLU as its only reader; all these ReLUs are removed. If one
    has not, none is removed, and `report` gets the reason. A ReLU after something else than a layer
    stays, without a reason.
    """
    layer_call = input_of(relu)
    layer = called_module(graph_module, layer_call)
    if layer is None or not (isinstance(layer, WEIGHTED) or is_norm(layer)):
        return set()

    layer_name = str(layer_call.target)
    relus: set[fx.Node] = set()
    for call in calls_of_module(graph_module, layer_call):
        readers = list(call.users)
        has_only_relu = len(readers) == 1 and is_relu(graph_module, readers[0])
        # a module that is called by two names would be replaced under one of them only
        is_other_name = str(call.target) != layer_name
        if is_other_name or not has_only_relu:
            reason = f"{layer_name} has another user or call"
            report.skipped.append((relu.name, reason))
            return set()
        relus.update(readers)

    replace_layer(graph_module, layer_name, LayerWithRelu(layer))
    _report_relu(report, layer_name, layer, relu)
    for node in relus:
        _bypass(node)
    return relus


def _report_relu(report: FuseReport, layer_name: str, layer: nn.Module, relu: fx.Node) -> None:
    """Add a ReLU to the fusion that the layer is part of already, or report a new one."""
    for index, (pattern, names) in enumerate(report.fused):
        if names[0] == layer_name:
            report.fused[index] = (f"{pattern}+ReLU", (*names, relu.name))
            return
    report.fused.append((f"{_kind(layer)}+ReLU", (layer_name, relu.name)))


def _kind(module: nn.Module) -> str:
    if is_norm(module):
        return "BN"
    if isinstance(module, TRANSPOSED):
        return "ConvTranspose"
    return "Linear" if isinstance(module, nn.Linear) else "Conv"
