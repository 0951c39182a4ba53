"""What of a model runs in int8 after all, and what stays float: said with every quantized model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from deploy.errors import ExportError
from deploy.fx.fakequant import DynamicQuant, FixedQuant
from deploy.fx.layers import IntLayer

_FEW = 8  # layers that are named


@dataclass(frozen=True, slots=True)
class Coverage:
    """The layers with weights of a converted model.

    Attributes:
        quantized: qualified names of those with int8 weights.
        left: (qualified name, class) of those that keep weights of two or more dimensions in float.
        activations: how many tensors are quantized.
    """

    quantized: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    activations: int

    def __str__(self) -> str:
        whole = len(self.quantized) + len(self.left)
        said = (
            f"int8: {len(self.quantized)} of {whole} layers with weights,"
            f" {self.activations} activations"
        )
        return f"{said}; in float: {self.named()}" if self.left else said

    def named(self) -> str:
        """The layers in float, the first of many."""
        few = ", ".join(f"{name} ({kind})" for name, kind in self.left[:_FEW])
        more = len(self.left) - _FEW
        return f"{few} and {more} more" if more > 0 else few


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
    activations = 0
    for name, module in converted.named_modules():
        activations += isinstance(module, FixedQuant | DynamicQuant)
        if inside and name.startswith(inside):
            continue
        if isinstance(module, (IntLayer, *own)):
            quantized.append(name)
            inside = (*inside, f"{name}.")
        elif any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            kind = kinds.get(name, type(module).__name__)
            left.append((name or "the model itself", kind))
    return Coverage(tuple(quantized), tuple(left), activations)


def refuse_float(found: Coverage) -> None:
    """Raise `ExportError` where nothing at all was quantized."""
    if not found.quantized:
        raise ExportError(
            "a quantized model must have layers in int8, and none of"
            f" {len(found.left)} layers with weights is: {found.named() or 'there are no weights'};"
            " choose another --mode or fewer --keep-float, or export it in float"
        )
