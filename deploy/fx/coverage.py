"""What of a model runs in int8 after all, and what stays float: said with every quantized model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from deploy.errors import ExportError
from deploy.fx.fakequant import DynamicQuant, FixedQuant
from deploy.fx.layers import IntLayer
from deploy.fx.modules import CONVS, PRODUCTS

REASONS = "why in float"  # key in the meta of a prepared or converted graph
_PRODUCTS = frozenset({*CONVS, *PRODUCTS, torch.bmm, torch.mm, torch.einsum})
_METHODS = frozenset({"matmul", "bmm", "mm"})
_FEW = 8  # layers that are named


@dataclass(frozen=True, slots=True)
class Coverage:
    """The layers with weights of a converted model.

    Attributes:
        quantized: qualified names of those with int8 weights.
        left: (qualified name, class) of those that keep weights of two or more dimensions in float,
            and of parameters that a product reads without a layer; what is added or joined, as the
            positions of a ViT are, is no weight.
        activations: how many tensors are quantized.
        reasons: qualified name of a layer in float -> why, in the words of a build.
    """

    quantized: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    activations: int
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        whole = len(self.quantized) + len(self.left)
        said = (
            f"int8: {len(self.quantized)} of {whole} layers with weights,"
            f" {self.activations} activations"
        )
        return f"{said}; in float: {self.named()}" if self.left else said

    def named(self) -> str:
        """The layers in float, the first of many."""
        few = ", ".join(self._told(name, kind) for name, kind in self.left[:_FEW])
        more = len(self.left) - _FEW
        return f"{few} and {more} more" if more > 0 else few

    def _told(self, name: str, kind: str) -> str:
        reason = self.reasons.get(name)
        return f"{name} ({kind})" if reason is None else f"{name} ({kind}: {reason})"


def coverage(
    converted: nn.Module, model: nn.Module, own: Sequence[type[nn.Module]] = ()
) -> Coverage:
    """Which layers of a converted model have int8 weights.

    Args:
        converted: what `deploy.fx.convert.convert` gave.
        model: the user's, whose classes a graph may not keep.
        own: the user's classes of quantized modules.
    """
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    quantized, left, inside = list[str](), list[tuple[str, str]](), tuple[str, ...]()
    activations, reasons = 0, dict[str, str]()
    graphs = {n: m for n, m in converted.named_modules() if isinstance(m, fx.GraphModule)}
    for name, module in converted.named_modules():
        if isinstance(module, fx.GraphModule):
            left += [(f"{name}.{one}" if name else one, "Parameter") for one in _bare(module)]
            own_reasons = module.meta.get(REASONS, {})
            reasons |= {f"{name}.{k}" if name else k: why for k, why in own_reasons.items()}
        activations += isinstance(module, FixedQuant | DynamicQuant)
        if inside and name.startswith(inside):
            continue
        if isinstance(module, (IntLayer, *own)):
            quantized.append(name)
            inside = (*inside, f"{name}.")
        elif _has_weights(module) and _is_called(name, graphs):
            kind = kinds.get(name, type(module).__name__)
            left.append((name or "the model itself", kind))
    return Coverage(tuple(quantized), tuple(left), activations, reasons)


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _is_called(name: str, graphs: Mapping[str, fx.GraphModule]) -> bool:
    """Whether a module computes something itself; one of a graph may hold parameters for it."""
    inside = [one for one in graphs if not one or f"{name}.".startswith(f"{one}.")]
    if not inside:
        return True
    owner = max(inside, key=len)
    own = name[len(owner) :].removeprefix(".") + "."
    called = (n.target for n in graphs[owner].graph.nodes if n.op == "call_module")
    return any(own.startswith(f"{target}.") for target in called)


def _bare(graph_module: fx.GraphModule) -> list[str]:
    """Names of the parameters by which a product multiplies."""
    read = [node for node in graph_module.graph.nodes if node.op == "get_attr"]
    names = [str(n.target) for n in read if any(_is_product(user) for user in n.users)]
    known = dict(graph_module.named_parameters())
    return [name for name in dict.fromkeys(names) if name in known and known[name].dim() > 1]


def _is_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS or (node.op == "call_method" and node.target in _METHODS)


def refuse_float(found: Coverage) -> None:
    """Raise `ExportError` where nothing at all was quantized."""
    if not found.quantized:
        raise ExportError(
            "a quantized model must have layers in int8, and none of"
            f" {len(found.left)} layers with weights is: {found.named() or 'there are no weights'};"
            " choose another --mode or fewer --keep-float, or export it in float"
        )
