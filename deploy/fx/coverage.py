"""Report which layers of a converted model have int8 weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from deploy.errors import ExportError
from deploy.fx.fakequant import DynamicQuant, FixedQuant
from deploy.fx.int8_layers import IntLayer
from deploy.fx.plain_copy import tensor_of

FLOAT_REASONS = "why in float"  # key in GraphModule.meta: layer -> why it stays in float


_MAX_NAMED = 8  # layers in a message


# substrings of the names of functions whose operands are weights
_PRODUCTS = ("linear", "matmul", "mm", "conv", "einsum", "embedding", "attention", "bilinear")


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Quantized and float layers of a converted model."""

    quantized: tuple[str, ...]  # qualified names of layers with int8 weights
    # (qualified name, class) of layers with float weights of two or more dimensions, and of
    # parameters that a product reads without a layer. Parameters that are only added or scaled by,
    # such as position embeddings, do not count as weights
    float_layers: tuple[tuple[str, str], ...]
    activations: int
    # qualified name of a layer in float -> why, as in a build
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.quantized) + len(self.float_layers)
        text = (
            f"int8: {len(self.quantized)} of {total} layers with weights,"
            f" {self.activations} activations"
        )
        return f"{text}; in float: {self.list_float_layers()}" if self.float_layers else text

    def list_float_layers(self) -> str:
        """List the first layers in float, with their reasons."""
        first = ", ".join(
            self._describe(name, kind) for name, kind in self.float_layers[:_MAX_NAMED]
        )
        more = len(self.float_layers) - _MAX_NAMED
        return f"{first} and {more} more" if more > 0 else first

    def _describe(self, name: str, kind: str) -> str:
        reason = self.reasons.get(name)
        return f"{name} ({kind})" if reason is None else f"{name} ({kind}: {reason})"


def measure_coverage(
    converted: nn.Module, model: nn.Module, own: Sequence[type[nn.Module]] = ()
) -> LayerCoverage:
    """Return which layers of a converted model have int8 weights.

    `converted`: result of `deploy.fx.convert.convert`. `model`: the user's model, for class names
    that the graph has lost.
    """
    kinds = {name: type(module) for name, module in model.named_modules()}
    quantized, left, inside = list[str](), list[tuple[str, str]](), tuple[str, ...]()
    activations, reasons = 0, dict[str, str]()
    factors = dict[int, bool]()  # id of a tensor that a graph reads directly -> is it a weight
    for part in converted.modules():
        if isinstance(part, fx.GraphModule):
            constants = _constants(part.graph)
            for node in part.graph.nodes:
                if node.op == "get_attr":
                    tensor = id(tensor_of(part, node.target))
                    factors[tensor] = factors.get(tensor, False) or _is_factor(node, constants)
    for name, module in converted.named_modules():
        if isinstance(module, fx.GraphModule):
            part_reasons = module.meta.get(FLOAT_REASONS, {})
            reasons |= {f"{name}.{k}" if name else k: why for k, why in part_reasons.items()}
        activations += isinstance(module, FixedQuant | DynamicQuant)
        if inside and name.startswith(inside):
            continue
        if isinstance(module, (IntLayer, *own)):
            quantized.append(name)
            inside = (*inside, f"{name}.")
        else:
            left += _in_float(name, kinds.get(name, type(module)), module, factors)
    return LayerCoverage(tuple(quantized), tuple(left), activations, reasons)


def _in_float(
    name: str, kind: type[nn.Module], module: nn.Module, factors: Mapping[int, bool]
) -> list[tuple[str, str]]:
    """List a layer with float weights; or its parameters, if the graph reads them directly."""
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


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are computed from parameters and buffers only."""
    constants = set[fx.Node]()
    for node in graph.nodes:
        calls = node.op in ("call_function", "call_method") and node.all_input_nodes
        if node.op == "get_attr" or (calls and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _is_factor(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Return whether a parameter, or something computed from parameters only, is multiplied."""
    calls = [user for user in node.users if user.op in ("call_function", "call_method")]
    names = [str(getattr(user.target, "__name__", user.target)) for user in calls]
    if any(product in name for product in _PRODUCTS for name in names):
        return True
    return any(_is_factor(user, constants) for user in calls if user in constants)


def refuse_unquantized(coverage: LayerCoverage) -> None:
    """Raise `ExportError` if no layer was quantized."""
    if not coverage.quantized:
        raise ExportError(
            "a quantized model must have layers in int8, and none of"
            f" {len(coverage.float_layers)} layers with weights is:"
            f" {coverage.list_float_layers() or 'there are no weights'}; choose another --mode"
            " or fewer --keep-float, or export it in float"
        )
