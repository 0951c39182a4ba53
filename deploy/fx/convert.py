"""A calibrated, perhaps trained, model -> fixed scales and int8 weights, fit for export."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.nn import functional

from deploy.fx.fakequant import FakeQuant, FixedQuant
from deploy.fx.fuse import called_module, called_once
from deploy.fx.int8_layers import IntLayer, QatLayer, WeightQuant, folded_layer
from deploy.fx.trace import replace_submodule
from deploy.fx.watched import unwatch

_PADDING = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # ZeroPad is a ConstantPad
CustomClasses = Mapping[type[nn.Module], type[nn.Module]]


def scale_table(model: nn.Module) -> list[tuple[str, float, int]]:
    """(tensor, scale, zero_point) of each quantized activation, prepared or converted."""
    quants = [m for m in model.modules() if isinstance(m, FakeQuant | FixedQuant)]
    return [(q.name, float(q.scale), int(q.zero_point)) for q in quants]


def convert(prepared: nn.Module, custom: CustomClasses | None = None) -> nn.Module:
    """A copy with fixed scales and int8 weights, in eval mode; fit for `deploy.fx.export`.

    Args:
        prepared: calibrated, perhaps trained.
        custom: observed class (static) or float class (dynamic, weight-only) -> quantized class
            with `from_observed`, or `from_float` where it has none.

    Raises:
        CalibrationError: a tensor that saw no data, or weights that are not finite.
    """
    converted = copy.deepcopy(prepared).eval()
    fixed: dict[nn.Module, nn.Module] = {}
    for name, module in list(converted.named_modules(remove_duplicate=False)):
        new = fixed.get(module) or _converted(module, name, custom or {})
        if new is not None and name:
            fixed[module] = new
            if not _inside_replaced(name, converted, module):
                replace_submodule(converted, name, new)
    for part in converted.modules():
        if isinstance(part, fx.GraphModule):
            unwatch(part)
            _round_biases(part)
    return converted


def _converted(module: nn.Module, name: str, custom: CustomClasses) -> nn.Module | None:
    for kind, quantized in custom.items():
        if type(module) is kind:
            made: Any = quantized
            build = getattr(made, "from_observed", None) or made.from_float
            return build(module).eval()
    if isinstance(module, FakeQuant):
        scale, zero = module.parameters_of_grid()
        return FixedQuant(module.grid, module.name, scale, zero)
    if not isinstance(module, QatLayer):
        return None
    int8 = isinstance(module.weight_quant, WeightQuant)
    return IntLayer(module, name) if int8 else folded_layer(module)


def _round_biases(graph_module: fx.GraphModule) -> None:
    """Put each layer's bias on the grid of its products, where runtimes keep it in int32.

    Onnxruntime rounds a bias to multiples of input scale times weight scale; with the same
    multiples here both compute the same codes.
    """
    for node in graph_module.graph.nodes:
        layer = called_module(graph_module, node)
        if not isinstance(layer, IntLayer) or not called_once(graph_module, node):
            continue
        source = _before_padding(graph_module, node.args[0])
        quant = called_module(graph_module, source)
        if isinstance(quant, FixedQuant):
            layer.round_bias(quant.scale)


def _before_padding(graph_module: fx.GraphModule, tensor: Any) -> Any:
    """The tensor before any padding with zeros: a real 0 is exact on every grid."""
    while isinstance(tensor, fx.Node) and _is_zero_pad(graph_module, tensor):
        tensor = tensor.all_input_nodes[0]
    return tensor


def _is_zero_pad(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.target is functional.pad:
        options = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False))
        options |= node.kwargs
        return options.get("mode", "constant") == "constant" and not options.get("value")
    module: Any = called_module(graph_module, node)
    return isinstance(module, _PADDING) and not module.value


def _inside_replaced(name: str, model: nn.Module, module: nn.Module) -> bool:
    """Whether a parent has been replaced already, so that the name leads elsewhere."""
    try:
        return model.get_submodule(name) is not module
    except AttributeError:
        return True
