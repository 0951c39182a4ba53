"""What of a model runs in int8 after all, and what stays float: said with every quantized model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from deploy.errors import ExportError
from deploy.fx.fakequant import DynamicQuant, FixedQuant
from deploy.fx.int8_layers import IntLayer

REASONS = "why in float"  # key in the meta of a prepared or converted graph
_FEW = 8  # layers that are named
# parts of names of functions whose operands are weights
_PRODUCTS = ("linear", "matmul", "mm", "conv", "einsum", "embedding", "attention", "bilinear")


@dataclass(frozen=True, slots=True)
class Coverage:
    """The layers with weights of a converted model.

    Attributes:
        quantized: qualified names of those with int8 weights.
        left: (qualified name, class) of those that keep weights of two or more dimensions in float,
            and of parameters that a product reads without a layer; what a graph only adds or
            scales by, such as places of tokens, is no weight.
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
    kinds = {name: type(module) for name, module in model.named_modules()}
    quantized, left, inside = list[str](), list[tuple[str, str]](), tuple[str, ...]()
    activations, reasons = 0, dict[str, str]()
    factors = _read_by_graphs(converted)
    for name, module in converted.named_modules():
        if isinstance(module, fx.GraphModule):
            own_reasons = module.meta.get(REASONS, {})
            reasons |= {f"{name}.{k}" if name else k: why for k, why in own_reasons.items()}
        activations += isinstance(module, FixedQuant | DynamicQuant)
        if inside and name.startswith(inside):
            continue
        if isinstance(module, (IntLayer, *own)):
            quantized.append(name)
            inside = (*inside, f"{name}.")
        else:
            left += _in_float(name, kinds.get(name, type(module)), module, factors)
    return Coverage(tuple(quantized), tuple(left), activations, reasons)


def _in_float(
    name: str, kind: type[nn.Module], module: nn.Module, factors: Mapping[int, bool]
) -> list[tuple[str, str]]:
    """A layer that keeps weights in float; or its parameters, where a graph reads them itself."""
    weights = [
        (own, parameter)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and factors.get(id(parameter), True)
    ]
    if not weights:
        return []
    if kind.__module__.startswith("torch.nn.") or any(id(p) not in factors for _, p in weights):
        return [(name or "the model itself", kind.__name__)]
    return [(f"{name}.{own}".lstrip("."), "Parameter") for own, _ in weights]


def _read_by_graphs(converted: nn.Module) -> dict[int, bool]:
    """Id of every tensor that a graph reads itself -> whether a product or a table of it does."""
    found = dict[int, bool]()
    for part in converted.modules():
        if isinstance(part, fx.GraphModule):
            constant = _constants(part.graph)
            for node in part.graph.nodes:
                if node.op == "get_attr":
                    tensor = id(_tensor(part, node))
                    found[tensor] = found.get(tensor, False) or _is_factor(node, constant)
    return found


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are computed of the model's own tensors alone."""
    found = set[fx.Node]()
    for node in graph.nodes:
        calls = node.op in ("call_function", "call_method") and node.all_input_nodes
        if node.op == "get_attr" or (calls and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is_factor(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Whether a tensor of the model, or what is computed of it alone, goes into a product."""
    calls = [user for user in node.users if user.op in ("call_function", "call_method")]
    names = [str(getattr(user.target, "__name__", user.target)) for user in calls]
    if any(product in name for product in _PRODUCTS for name in names):
        return True
    return any(_is_factor(user, constant) for user in calls if user in constant)


def _tensor(part: fx.GraphModule, node: fx.Node) -> object:
    owner, _, name = str(node.target).rpartition(".")
    return getattr(part.get_submodule(owner), name)


def refuse_float(found: Coverage) -> None:
    """Raise `ExportError` where nothing at all was quantized."""
    if not found.quantized:
        raise ExportError(
            "a quantized model must have layers in int8, and none of"
            f" {len(found.left)} layers with weights is: {found.named() or 'there are no weights'};"
            " choose another --mode or fewer --keep-float, or export it in float"
        )
