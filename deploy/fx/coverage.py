"""Report which layers of a converted model have int8 weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from deploy.errors import ExportError, list_first
from deploy.fx.fakequant import DynamicQuant, FixedQuant
from deploy.fx.int8_layers import IntLayer
from deploy.fx.operations import is_call
from deploy.fx.plain_copy import tensor_of

FLOAT_REASONS = "why in float"  # key in GraphModule.meta: layer -> why it stays in float
_MAX_LISTED_LAYERS = 8  # in a message
# substrings of the names of functions whose operands are weights
_PRODUCTS = ("linear", "matmul", "mm", "conv", "einsum", "embedding", "attention", "bilinear")


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Quantized and float layers of a converted model.

    Attributes:
        quantized: qualified names of layers with int8 weights.
        float_layers: (qualified name, class) of layers with float weights of two or more
            dimensions, and of parameters that a product reads without a layer. Parameters that are
            only added or scaled by, such as position embeddings, do not count as weights.
        activations: number of quantized activations.
        reasons: qualified name of a layer in float -> why, as in a build.
    """

    quantized: tuple[str, ...]
    float_layers: tuple[tuple[str, str], ...]
    activations: int
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        total = len(self.quantized) + len(self.float_layers)
        text = (
            f"int8: {len(self.quantized)} of {total} layers with weights,"
            f" {self.activations} activations"
        )
        if self.float_layers:
            text += f"; in float: {self.list_float_layers()}"
        return text

    def list_float_layers(self) -> str:
        """List the first layers in float, with their reasons."""
        descriptions = []
        for name, kind in self.float_layers:
            if name in self.reasons:
                kind += f": {self.reasons[name]}"
            descriptions.append(f"{name} ({kind})")
        return list_first(descriptions, _MAX_LISTED_LAYERS)


def measure_coverage(
    converted: nn.Module, model: nn.Module, quantized_classes: Sequence[type[nn.Module]] = ()
) -> LayerCoverage:
    """Return which layers of a converted model have int8 weights.

    Args:
        converted: result of `deploy.fx.convert.convert`.
        model: the user's model, for class names that the graph has lost.
        quantized_classes: the user's classes with int8 weights.
    """
    class_by_name = {name: type(module) for name, module in model.named_modules()}
    # id of each tensor that a graph reads without a layer -> whether it is used as a weight
    used_as_weight_by_id = _find_tensors_read_by_graphs(converted)
    int8_layers: list[str] = []
    float_layers: list[tuple[str, str]] = []  # (name, class)
    for name, module in converted.named_modules():
        if any(name.startswith(f"{layer}.") for layer in int8_layers):
            continue  # it is inside an int8 layer, which is counted
        if isinstance(module, (IntLayer, *quantized_classes)):
            int8_layers.append(name)
        else:
            layer_class = class_by_name.get(name, type(module))
            float_layers += _find_float_weights(name, layer_class, module, used_as_weight_by_id)

    quantizer_count = sum(
        isinstance(module, FixedQuant | DynamicQuant) for module in converted.modules()
    )
    reasons = _float_reasons(converted)
    return LayerCoverage(tuple(int8_layers), tuple(float_layers), quantizer_count, reasons)


def _float_reasons(converted: nn.Module) -> dict[str, str]:
    """Return qualified name of a layer in float -> why, as `prepare` has stored it."""
    reasons: dict[str, str] = {}
    for name, module in converted.named_modules():
        if isinstance(module, fx.GraphModule):  # the model, or a submodule quantized alone
            prefix = f"{name}." if name else ""
            for layer, reason in module.meta.get(FLOAT_REASONS, {}).items():
                reasons[prefix + layer] = reason
    return reasons


def _find_tensors_read_by_graphs(converted: nn.Module) -> dict[int, bool]:
    """Return id of each tensor that a graph reads without a layer -> whether it is used as weight.

    It is if an operator of `_PRODUCTS`, such as a matrix product, reads it, or reads what is
    computed from it and other constants. Any other is added to activations, as position embeddings
    are, or scales them.
    """
    used_as_weight_by_id: dict[int, bool] = {}
    for module in converted.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        constants = _find_constants(module.graph)
        for node in module.graph.find_nodes(op="get_attr"):
            key = id(tensor_of(module, node.target))
            used_as_weight_by_id[key] = used_as_weight_by_id.get(key) or _feeds_product(
                node, constants
            )
    return used_as_weight_by_id


def _find_float_weights(
    name: str,
    layer_class: type[nn.Module],
    module: nn.Module,
    used_as_weight_by_id: Mapping[int, bool],
) -> list[tuple[str, str]]:
    """List a layer with float weights; or its parameters, if the graph reads them directly.

    Returns (qualified name, class of the layer or "Parameter") of each; nothing without weights.

    Args:
        name: qualified name of the module.
        layer_class: class of the user's module of that name.
        module: module of the converted model.
        used_as_weight_by_id: id of each tensor that a graph reads without a layer -> whether it is
            used as a weight, rather than added to activations or the like.
    """
    weight_names = []
    module_reads_weight = False  # as a layer does; else only the graph reads its weights
    for parameter_name, parameter in module.named_parameters(recurse=False):
        # no graph reads some of the parameters: the module reads these, as weights
        used_as_weight = used_as_weight_by_id.get(id(parameter), True)
        if used_as_weight and parameter.dim() >= 2:
            weight_names.append(parameter_name)
            module_reads_weight |= id(parameter) not in used_as_weight_by_id
    if not weight_names:
        return []
    # users know a layer of torch.nn by its name, even if it became a function of the graph
    is_torch_layer = layer_class.__module__.startswith("torch.nn.")
    if module_reads_weight or is_torch_layer:
        return [(name or "the model itself", layer_class.__name__)]
    return [(f"{name}.{weight}".lstrip("."), "Parameter") for weight in weight_names]


def _find_constants(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are computed from parameters and buffers only."""
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_computed = is_call(node) and sources and constants.issuperset(sources)
        if node.op == "get_attr" or is_computed:
            constants.add(node)
    return constants


def _feeds_product(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Return whether a matrix product or the like reads a constant, or one computed from it.

    Args:
        node: its output is a parameter, a buffer, or something computed from these only.
        constants: all nodes of this kind.
    """
    for user in filter(is_call, node.users):
        name = str(getattr(user.target, "__name__", user.target))
        if any(product in name for product in _PRODUCTS):
            return True
        if user in constants and _feeds_product(user, constants):
            return True
    return False


def refuse_unquantized(coverage: LayerCoverage) -> None:
    """Raise `ExportError` if no layer was quantized."""
    if not coverage.quantized:
        raise ExportError(
            "a quantized model must have layers in int8, and none of"
            f" {len(coverage.float_layers)} layers with weights is:"
            f" {coverage.list_float_layers() or 'there are no weights'}; choose another --mode"
            " or fewer --keep-float, or export it in float"
        )
