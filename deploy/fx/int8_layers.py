"""Layers with quantized weights: fake-quantized, trained with their BatchNorm, and in int8.

Weights are symmetric: scale = max|w| / (2^(bits-1) - 1), per output channel or per tensor; in
training the scale may be learned (`deploy.fx.qat`). Scales may be limited so that no x86 CPU
saturates, as in `calibrators.weights`, but on torch tensors of any device.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from calibrators.weights import PAIR_LIMIT, PAIR_ROUNDING, is_depthwise, pair_stride
from deploy.errors import CalibrationError, ExportError
from deploy.fx.fakequant import DynamicQuant, ExportedModule, FixedQuant, lsq_round
from deploy.fx.fuse import CONVS, TRANSPOSED, scale_outputs
from deploy.fx.norms import trained_factors
from deploy.fx.source import tensor_of
from deploy.fx.trace import refuse_hooks


def minimum_scales(
    weight: torch.Tensor, *, transposed: bool = False, groups: int = 1
) -> torch.Tensor | None:
    """Return the lower limits of a weight's scales, float32 [C_out]; None if there are none.

    `weight`: of a Conv, ConvTranspose or Linear, in real units.
    """
    if is_depthwise(groups, *weight.shape[:2]) or (transposed and groups > 1):
        return None  # a grouped ConvTranspose stays in float
    rows = weight.transpose(0, 1) if transposed else weight
    step = pair_stride(rows.shape)
    flat = rows.detach().float().movedim(1, -1).flatten(1)
    wide = functional.pad(flat, (0, 2))
    left, right = wide[:, 0:-2:step], wide[:, 1:-1:step]
    one_sign = (left > 0) == (right > 0)
    left, right = left.abs(), right.abs()
    both = (left + right).clamp(max=torch.finfo(torch.float32).max)
    sums = torch.where(one_sign, both, torch.maximum(left, right))
    return sums.amax(1) / (PAIR_LIMIT - PAIR_ROUNDING)


_BIAS = 2**30  # largest bias integer: near 2^31, runtimes that divide in float32 overflow
WEIGHTED = (*CONVS, *TRANSPOSED, nn.Linear)


def find_weighted_layers(model: nn.Module) -> list[tuple[str, str]]:
    """List (qualified name, class name) of every layer whose weight can be quantized."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, WEIGHTED))
    return [(name, type(module).__name__) for name, module in layers]


def apply_layer(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return layer(x) with another weight and bias of the same shape."""
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    if isinstance(layer, TRANSPOSED):
        dims = len(layer.kernel_size)
        function = getattr(functional, f"conv_transpose{dims}d")
        return function(
            x,
            weight,
            bias,
            layer.stride,
            layer.padding,
            layer.output_padding,
            layer.groups,
            layer.dilation,
        )
    return layer._conv_forward(x, weight, bias)  # handles padding_mode and string padding


def channel_axis(layer: nn.Module, per_channel: bool = True) -> int | None:
    """Return the axis of the weight's output channels; None for one scale per tensor.

    A grouped ConvTranspose always has one scale.
    """
    if not per_channel or (isinstance(layer, TRANSPOSED) and layer.groups > 1):
        return None
    return 1 if isinstance(layer, TRANSPOSED) else 0


class WeightQuant(nn.Module):
    """Fake quantizer of a weight; its scale follows the weight's values or is trained (`learn`).

    Args:
        axis: channel axis, or None for one scale.
        bits: 2 to 8; integers are +-(2^(bits-1) - 1).
        least: weight -> lower limits [C_out] of its scales, or None.
    """

    def __init__(
        self,
        axis: int | None,
        bits: int = 8,
        least: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ):
        super().__init__()
        self.least = least
        self.axis = axis
        self.limit = 2 ** (bits - 1) - 1
        self.enabled = False
        self.scale: nn.Parameter | None = None

    def learn(self, weight: torch.Tensor) -> nn.Parameter:
        """Make the scales a trainable parameter, starting from those of the weight."""
        if self.scale is None:
            self.scale = nn.Parameter(self.scales(weight).clone())
        return self.scale

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales, [C] or [1] float32; 1 for a channel of zeros."""
        if self.scale is not None:
            return self._apply_limits(self.scale, weight).detach().clone()
        reduced = [i for i in range(weight.dim()) if i != self.axis]
        steps = weight.detach().double().abs().amax(reduced).reshape(-1) / self.limit
        return self._apply_limits(torch.where(steps > 0, steps, 1.0).float(), weight)

    def _apply_limits(self, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        least = None if self.least is None else self.least(weight)
        if least is None:
            return scales
        return torch.maximum(scales, least if self.axis is not None else least.amax(0, True))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight, or if enabled the rounded weight."""
        if not self.enabled:
            return weight
        if self.scale is not None:
            return self._round_learned(weight, self._apply_limits(self.scale, weight))
        scales = self.scales(weight)
        zeros = torch.zeros_like(scales, dtype=torch.int32)
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(
                weight, scales[0], zeros[0], -self.limit, self.limit
            )
        return torch.fake_quantize_per_channel_affine(
            weight, scales, zeros, self.axis, -self.limit, self.limit
        )

    def _round_learned(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = [-1 if i == self.axis else 1 for i in range(weight.dim())]
        zero = torch.zeros((), dtype=torch.int32, device=weight.device)
        shared = weight.numel() // scale.numel()
        ends = -self.limit, self.limit
        return lsq_round(weight, scale.reshape(shape), zero, ends, shared=shared)


def weight_quantizer(
    layer: nn.Module, axis: int | None, bits: int, *, fits_pairs: bool
) -> WeightQuant:
    """Return the fake quantizer for a layer's weight.

    Args:
        layer: Conv, ConvTranspose or Linear.
        axis: channel axis, or None for one scale.
        bits: 2 to 8.
        fits_pairs: limit the scales so that no CPU saturates (possible with 8 bits only).
    """
    transposed, groups = isinstance(layer, TRANSPOSED), int(getattr(layer, "groups", 1))
    least = (
        partial(minimum_scales, transposed=transposed, groups=groups)
        if fits_pairs and bits == 8
        else None
    )
    return WeightQuant(axis, bits, least)


class QatLayer(nn.Module):
    """A Conv, ConvTranspose or Linear that computes with its fake-quantized weight."""

    def __init__(self, layer: nn.Module, weight_quant: WeightQuant):
        super().__init__()
        refuse_hooks(layer, f"a layer that is quantized ({type(layer).__name__})")
        self.layer = layer
        self.weight_quant = weight_quant

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the float weight and bias that will be exported."""
        layer: Any = self.layer
        return layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the same shape as without quantization."""
        weight, bias = self.folded()
        return apply_layer(self.layer, x, self.weight_quant(weight), bias)


class QatConvBn(QatLayer):
    """A layer trained with its BatchNorm: the folded weight is the one that is rounded.

    In train mode the layer runs with the folded and rounded weight, its output is divided by the
    folding factor, and the norm is applied with the statistics of the batch::

        y = BN(conv(x, round(w * g)) / g + bias)        g = gamma / sqrt(running_var + eps)

    When frozen, and in eval mode: y = conv(x, round(w * g)) + b'. Source: R. Krishnamoorthi, 2018,
    "Quantizing deep convolutional networks", section 3.2.2.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, weight_quant: WeightQuant):
        super().__init__(layer, weight_quant)
        self.norm = norm
        self.frozen = False

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias with the running statistics folded in."""
        layer: Any = self.layer
        factor, shift = trained_factors(self.norm)
        bias = shift if layer.bias is None else layer.bias * factor + shift
        return scale_outputs(layer, layer.weight, factor), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm's output."""
        if self.frozen or not self.training:
            return super().forward(x)
        layer: Any = self.layer
        factor, _ = trained_factors(self.norm)
        factor = torch.where(factor.abs() > 1e-12, factor, 1e-12).detach()
        weight = self.weight_quant(scale_outputs(layer, layer.weight, factor))
        channels = (1, -1, *[1] * (weight.dim() - 2))
        y = apply_layer(layer, x, weight, None) / factor.reshape(channels)
        if layer.bias is not None:
            y = y + layer.bias.reshape(channels)
        return self.norm(y)


def folded_layer(trained: QatLayer) -> nn.Module:
    """Return the float layer with the weight and bias that will be exported."""
    layer = copy.copy(trained.layer)
    weight, bias = (None if t is None else t.detach() for t in trained.folded())
    own = {"weight": weight, "bias": bias}
    layer._parameters = {k: None if t is None else nn.Parameter(t) for k, t in own.items()}
    return layer


class IntLayer(ExportedModule):
    """A layer with an int8 weight, exported as integers."""

    weight_int: torch.Tensor  # int8, the shape of the layer's weight
    weight_scale: torch.Tensor  # float32 [C] or [1]
    bias: torch.Tensor | None

    def __init__(self, trained: QatLayer, name: str):
        super().__init__()
        weight, bias = trained.folded()
        weight = weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise CalibrationError(f"a weight must be finite, got NaN or Inf in {name}")
        quant = trained.weight_quant
        self.axis = quant.axis
        self.layer = copy.copy(trained.layer)
        self.layer._parameters = dict.fromkeys(trained.layer._parameters)
        self.register_buffer("weight_scale", quant.scales(weight))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("weight_int", self._integers(quant, weight))

    def _integers(self, quant: WeightQuant, weight: torch.Tensor) -> torch.Tensor:
        """Return the integers with which the fake-quantized layer computed."""
        enabled, quant.enabled = quant.enabled, True
        fake = quant(weight)
        quant.enabled = enabled
        return torch.round(fake / self._broadcast(self.weight_scale, weight.dim())).to(torch.int8)

    def round_bias(self, input_scale: torch.Tensor) -> None:
        """Round the bias to multiples of input scale times weight scale, as runtimes store it.

        If it would overflow int32, because the input scale is tiny, the weight scale is widened:
        runtimes would silently clip the bias.
        """
        if self.bias is None:
            return
        scale, dims = self.weight_scale, self.weight_int.dim()
        needed = self.bias.abs().double() / (input_scale * _BIAS)  # channels may share a scale
        wide = torch.maximum(scale.double(), needed.reshape(-1, scale.numel()).amax(0)).to(scale)
        ratio = self._broadcast(scale.double() / wide.double(), dims)
        self.weight_int.copy_(torch.round(self.weight_int * ratio))
        self.weight_scale.copy_(wide)
        step = input_scale * wide.repeat(len(self.bias) // wide.numel())
        self.bias.copy_(torch.round(self.bias / step) * step)

    def weight(self) -> torch.Tensor:
        """Return the weight in real units, float32."""
        if self.exporting:
            return self.symbolic()
        scale = self._broadcast(self.weight_scale, self.weight_int.dim())
        return self.weight_int.to(scale.dtype) * scale

    def symbolic(self) -> torch.Tensor:
        """Emit the ONNX form: an int8 constant and DequantizeLinear; only inside an export."""
        if self.axis is None:
            scale = self.weight_scale.reshape(())
            zero = torch.zeros((), dtype=torch.int8, device=scale.device)
            attributes: dict[str, Any] = {}
        else:
            scale, attributes = self.weight_scale, {"axis": self.axis}
            zero = torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)
        return torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (self.weight_int, scale, zero),
            attributes,
            dtype=scale.dtype,
            shape=self.weight_int.shape,
            version=18,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, computed in float from the integers."""
        return apply_layer(self.layer, x, self.weight(), self.bias)

    def _broadcast(self, scale: torch.Tensor, dims: int) -> torch.Tensor:
        shape = [-1 if i == self.axis else 1 for i in range(dims)]
        return scale.reshape(shape if self.axis is not None else [1] * dims)


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
