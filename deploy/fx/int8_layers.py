"""Layers with quantized weights: while training (fake), with their BatchNorm, and in integers.

Weights are symmetric: scale = max|w| / (2^(bits-1) - 1) for each output channel, or one for all;
trained with the weights where that is asked for (`deploy.fx.learned`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deploy.errors import CalibrationError
from deploy.fx.fuse import CONVS, TRANSPOSED, scale_outputs
from deploy.fx.hooks import refuse_hooks
from deploy.fx.lsq import rounded
from deploy.fx.pair_sums import least_scales

_BIAS = 2**30  # codes of a bias at most: near 2^31 runtimes that divide in float32 run over
WEIGHTED = (*CONVS, *TRANSPOSED, nn.Linear)


def weighted(model: nn.Module) -> list[tuple[str, str]]:
    """(qualified name, class name) of every layer with weights that are quantized."""
    found = ((name, m) for name, m in model.named_modules() if isinstance(m, WEIGHTED))
    return [(name, type(module).__name__) for name, module in found]


def apply_layer(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What `layer` computes of x, with another weight and bias of the same shape."""
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
    return layer._conv_forward(x, weight, bias)  # it knows padding_mode and string padding


def channel_axis(layer: nn.Module, per_channel: bool = True) -> int | None:
    """Axis of the weight's output channels; None for one scale (grouped ConvTranspose too)."""
    if not per_channel or (isinstance(layer, TRANSPOSED) and layer.groups > 1):
        return None
    return 1 if isinstance(layer, TRANSPOSED) else 0


class WeightQuant(nn.Module):
    """Fake quantization of a weight, its scale that of the present values, or trained (`learn`).

    Args:
        axis: channel axis, or None for one scale.
        bits: 2 to 8; integers are +-(2^(bits-1) - 1).
        least: weight -> scales [C_out] that its own are not to fall below, or None.
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
        """Let the scales be trained from now on; they start as those of the weight."""
        if self.scale is None:
            self.scale = nn.Parameter(self.scales(weight).clone())
        return self.scale

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """[C] or [1] float32; 1 where all of a channel is zero."""
        if self.scale is not None:
            return self._raised(self.scale, weight).detach().clone()
        kept = () if self.axis is None else (self.axis,)
        others = [i for i in range(weight.dim()) if i not in kept]
        amax = weight.detach().double().abs().amax(others).reshape(-1) / self.limit
        return self._raised(torch.where(amax > 0, amax, 1.0).float(), weight)

    def _raised(self, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Scales of the weight that are at least what they must be."""
        least = None if self.least is None else self.least(weight)
        if least is None:
            return scales
        return torch.maximum(scales, least if self.axis is not None else least.amax(0, True))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, or its rounding once enabled."""
        if not self.enabled:
            return weight
        if self.scale is not None:
            return self._learned(weight, self._raised(self.scale, weight))
        scales = self.scales(weight)
        zeros = torch.zeros_like(scales, dtype=torch.int32)
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(
                weight, scales[0], zeros[0], -self.limit, self.limit
            )
        return torch.fake_quantize_per_channel_affine(
            weight, scales, zeros, self.axis, -self.limit, self.limit
        )

    def _learned(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Each step shared by the weights of its channel."""
        shape = [-1 if i == self.axis else 1 for i in range(weight.dim())]
        zero = torch.zeros((), dtype=torch.int32, device=weight.device)
        shared = weight.numel() // scale.numel()
        ends = -self.limit, self.limit
        return rounded(weight, scale.reshape(shape), zero, ends, shared=shared)


def quant_of(layer: nn.Module, axis: int | None, bits: int, *, fits_pairs: bool) -> WeightQuant:
    """Fake quantization of a layer's weight.

    Args:
        layer: Conv, ConvTranspose or Linear.
        axis: channel axis, or None for one scale.
        bits: 2 to 8.
        fits_pairs: whether no CPU is to saturate what is multiplied by it; of fewer bits none does.
    """
    turned, groups = isinstance(layer, TRANSPOSED), int(getattr(layer, "groups", 1))
    least = (
        partial(least_scales, transposed=turned, groups=groups)
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
        """The float weight and bias that a runtime will see."""
        layer: Any = self.layer
        return layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, same shape as without quantization."""
        weight, bias = self.folded()
        return apply_layer(self.layer, x, self.weight_quant(weight), bias)


class QatConvBn(QatLayer):
    """A layer trained together with the BatchNorm after it, on the weight that folding gives.

    While the norm follows the batch, the layer runs with the folded and rounded weight, the factor
    is taken out again and the norm applied::

        y = BN(conv(x, round(w * g)) / g + bias)        g = gamma / sqrt(running_var + eps)

    Once frozen, and in eval mode, norm and layer are one: y = conv(x, round(w * g)) + b'. Source:
    R. Krishnamoorthi, 2018, "Quantizing deep convolutional networks", section 3.2.2.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, weight_quant: WeightQuant):
        super().__init__(layer, weight_quant)
        self.norm = norm
        self.frozen = False

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias with the running statistics folded in."""
        layer: Any = self.layer
        factor, shift = self._factors()
        bias = shift if layer.bias is None else layer.bias * factor + shift
        return scale_outputs(layer, layer.weight, factor), bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm's output."""
        if self.frozen or not self.training:
            return super().forward(x)
        layer: Any = self.layer
        factor, _ = self._factors()
        factor = torch.where(factor.abs() > 1e-12, factor, 1e-12).detach()
        weight = self.weight_quant(scale_outputs(layer, layer.weight, factor))
        channels = (1, -1, *[1] * (weight.dim() - 2))
        y = apply_layer(layer, x, weight, None) / factor.reshape(channels)
        if layer.bias is not None:
            y = y + layer.bias.reshape(channels)
        return self.norm(y)

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        norm: Any = self.norm
        gamma = norm.weight if norm.weight is not None else torch.ones_like(norm.running_mean)
        beta = norm.bias if norm.bias is not None else torch.zeros_like(norm.running_mean)
        factor = gamma / torch.sqrt(norm.running_var + norm.eps)
        return factor, beta - norm.running_mean * factor


def folded_layer(trained: QatLayer) -> nn.Module:
    """The layer in float, with the weight and bias that a runtime will see."""
    layer = copy.copy(trained.layer)
    weight, bias = (None if t is None else t.detach() for t in trained.folded())
    own = {"weight": weight, "bias": bias}
    layer._parameters = {k: None if t is None else nn.Parameter(t) for k, t in own.items()}
    return layer


class IntLayer(nn.Module):
    """A layer whose weight is kept in int8: a quarter of the size, exported as integers.

    Attributes:
        weight_int: int8, the shape of the layer's weight.
        weight_scale: float32 [C] or [1].
    """

    weight_int: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, trained: QatLayer, name: str):
        super().__init__()
        weight, bias = trained.folded()
        weight = weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise CalibrationError(f"a weight must be finite, got NaN or Inf in {name}")
        quant = trained.weight_quant
        self.axis = quant.axis
        self.exporting = False
        self.layer = _without_weight(trained.layer)
        self.register_buffer("weight_scale", quant.scales(weight))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("weight_int", self._integers(quant, weight))

    def _integers(self, quant: WeightQuant, weight: torch.Tensor) -> torch.Tensor:
        """The codes that the fake-quantized layer was computing with."""
        enabled, quant.enabled = quant.enabled, True
        rounded = quant(weight)
        quant.enabled = enabled
        return torch.round(rounded / self._along(self.weight_scale, weight.dim())).to(torch.int8)

    def round_bias(self, input_scale: torch.Tensor) -> None:
        """Put the bias on the grid of input scale times weight scale, where runtimes keep it.

        That is int32: where it would not fit, after an input of next to nothing, the scale of the
        weight is widened. Runtimes would take the largest int32 for the bias, and say nothing.
        """
        if self.bias is None:
            return
        scale, dims = self.weight_scale, self.weight_int.dim()
        needed = self.bias.abs().double() / (input_scale * _BIAS)  # a scale may serve several
        wide = torch.maximum(scale.double(), needed.reshape(-1, scale.numel()).amax(0)).to(scale)
        ratio = self._along(scale.double() / wide.double(), dims)
        self.weight_int.copy_(torch.round(self.weight_int * ratio))
        self.weight_scale.copy_(wide)
        step = input_scale * wide.repeat(len(self.bias) // wide.numel())
        self.bias.copy_(torch.round(self.bias / step) * step)

    def weight(self) -> torch.Tensor:
        """The weight in real units, float32."""
        if self.exporting:
            return self.symbolic()
        scale = self._along(self.weight_scale, self.weight_int.dim())
        return self.weight_int.to(scale.dtype) * scale

    def start_export(self) -> None:
        """From now on `forward` writes ONNX operators; not to be undone."""
        self.exporting = True

    def symbolic(self) -> torch.Tensor:
        """The ONNX form: an int8 constant and DequantizeLinear; only inside an export."""
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
        """The layer's output, computed in float from the integers."""
        return apply_layer(self.layer, x, self.weight(), self.bias)

    def _along(self, scale: torch.Tensor, dims: int) -> torch.Tensor:
        shape = [-1 if i == self.axis else 1 for i in range(dims)]
        return scale.reshape(shape if self.axis is not None else [1] * dims)


def _without_weight(layer: nn.Module) -> nn.Module:
    """A copy of `layer` that keeps its options and no parameter."""
    bare = copy.copy(layer)
    bare._parameters = dict.fromkeys(layer._parameters)
    return bare
