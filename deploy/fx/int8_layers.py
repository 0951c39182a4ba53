"""Layers with quantized weights: fake-quantized, trained with their BatchNorm, and in int8.

Weights are symmetric: scale = max|w| / (2^(bits-1) - 1), per output channel or per tensor; in
training the scale may be learned (`deploy.fx.qat`). Scales may be limited so that no x86 CPU
saturates, as in `calibrators.weights`, but on torch tensors of any device.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from calibrators.weights import PAIR_LIMIT, PAIR_ROUNDING, is_depthwise, pair_stride
from deploy.errors import CalibrationError
from deploy.fx.fakequant import ExportedModule, lsq_round
from deploy.fx.fuse import TRANSPOSED, WEIGHTED, scale_outputs
from deploy.fx.norms import trained_factors
from deploy.fx.trace import refuse_hooks


def minimum_scales(weight: torch.Tensor, *, transposed: bool, groups: int) -> torch.Tensor | None:
    """Return the lower limits of a weight's scales, float32 [C_out]; None if there are none.

    x86 CPUs without VNNI add the products of two neighboring weights and their inputs in 16 bits,
    which saturate. A larger scale gives smaller integers. With a scale of at least the limit, the
    sum of any pair of an output channel fits into 16 bits.

    Args:
        weight: of a Conv, ConvTranspose or Linear, in real units.
        transposed: it is that of a ConvTranspose, [C_in, C_out, ...].
        groups: of the convolution.
    """
    # a depthwise kernel adds no pairs, and a grouped ConvTranspose stays in float
    if is_depthwise(groups, *weight.shape[:2]) or (transposed and groups > 1):
        return None
    rows = weight.transpose(0, 1) if transposed else weight  # [C_out, C_in, ...]
    # [C_out, n]: the weights of an output channel, input channels last, in the kernels' order
    weights_by_output = rows.detach().float().movedim(1, -1).flatten(1)
    padded_weights = functional.pad(weights_by_output, (0, 1))  # a neighbor for the last weight
    step = pair_stride(rows.shape)  # 2, or 1 where a weight may pair with either neighbor
    left_weights = padded_weights[:, :-1:step]
    right_weights = padded_weights[:, 1::step]

    # If the signs of a pair differ, its sum is no larger than the larger product. Sums of huge
    # weights must not become Inf.
    have_same_sign = (left_weights > 0) == (right_weights > 0)
    sums = (left_weights.abs() + right_weights.abs()).clamp(max=torch.finfo(torch.float32).max)
    larger = torch.maximum(left_weights.abs(), right_weights.abs())
    pair_sizes = torch.where(have_same_sign, sums, larger)
    # in integers, a pair may be as large as the limit, less what rounding adds
    return pair_sizes.amax(1) / (PAIR_LIMIT - PAIR_ROUNDING)


# of a ConvTranspose, whose output padding follows from it; None for its own padding
OutputSize = Sequence[int] | None
_MAX_BIAS = 2**30  # largest bias integer: near 2^31, runtimes that divide in float32 overflow


def find_weighted_layers(model: nn.Module) -> list[tuple[str, str]]:
    """List (qualified name, class name) of every layer whose weight can be quantized."""
    return [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, WEIGHTED)
    ]


def apply_layer(
    layer: Any,
    x: torch.Tensor,
    output_size: OutputSize,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return layer(x, output_size) with another weight and bias of the same shape."""
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    if isinstance(layer, TRANSPOSED):
        dims = len(layer.kernel_size)
        find_output_padding: Any = layer._output_padding
        output_padding = find_output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
        )
        conv_transpose = getattr(functional, f"conv_transpose{dims}d")
        return conv_transpose(
            x,
            weight,
            bias,
            layer.stride,
            layer.padding,
            output_padding,
            layer.groups,
            layer.dilation,
        )
    return layer._conv_forward(x, weight, bias)  # handles padding_mode and string padding


def channel_axis(layer: nn.Module, per_channel: bool) -> int | None:
    """Return the axis of the weight's output channels; None for one scale per tensor.

    A grouped ConvTranspose always has one scale.
    """
    if not per_channel:
        return None
    if not isinstance(layer, TRANSPOSED):
        return 0
    if layer.groups > 1:
        return None
    return 1


class WeightQuant(nn.Module):
    """Fake quantizer of a weight; its scale follows the weight's values or is trained (`learn`).

    Args:
        axis: channel axis, or None for one scale.
        bits: 2 to 8; integers are +-(2^(bits-1) - 1).
        minimum_scales: weight -> lower limits [C_out] of its scales, or None.
    """

    def __init__(
        self,
        axis: int | None,
        bits: int = 8,
        minimum_scales: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ):
        super().__init__()
        self.minimum_scales = minimum_scales
        self.axis = axis
        self.limit = 2 ** (bits - 1) - 1
        self.enabled = False
        self.scale: nn.Parameter | None = None  # if trained: one value, or one per channel

    def learn(self, weight: torch.Tensor) -> nn.Parameter:
        """Make the scales a trainable parameter, starting from those of the weight."""
        if self.scale is None:
            self.scale = nn.Parameter(self.scales(weight).clone())
        return self.scale

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales, [C] or [1] float32; 1 for a channel of zeros."""
        if self.scale is not None:
            return self._apply_limits(self.scale, weight).detach().clone()
        reduced_axes = [axis for axis in range(weight.dim()) if axis != self.axis]
        steps = weight.detach().double().abs().amax(reduced_axes).reshape(-1) / self.limit
        return self._apply_limits(torch.where(steps > 0, steps, 1.0).float(), weight)

    def _apply_limits(self, scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales, each at least the `minimum_scales` of the weight, if there are any."""
        if self.minimum_scales is None:
            return scales
        minimum = self.minimum_scales(weight)
        if minimum is None:
            return scales
        if self.axis is None:
            minimum = minimum.amax(0, keepdim=True)
        return torch.maximum(scales, minimum)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight, or if enabled the rounded weight."""
        return self.rounded(weight) if self.enabled else weight

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Round the weight to the grid of its scales."""
        if self.scale is not None:  # it is trained
            scale = self._apply_limits(self.scale, weight)
            return lsq_round(
                weight,
                _align(scale, self.axis, weight.dim()),
                torch.zeros((), dtype=torch.int32, device=weight.device),
                (-self.limit, self.limit),
                shared=weight.numel() // scale.numel(),
            )
        scales = self.scales(weight)  # they follow the weight's values
        zeros = torch.zeros_like(scales, dtype=torch.int32)
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(
                weight, scales[0], zeros[0], -self.limit, self.limit
            )
        return torch.fake_quantize_per_channel_affine(
            weight, scales, zeros, self.axis, -self.limit, self.limit
        )


def _align(scale: torch.Tensor, axis: int | None, dims: int) -> torch.Tensor:
    """Reshape scales, [C] or [1], so that they broadcast to a weight of `dims` dimensions."""
    shape = [1] * dims
    shape[axis or 0] = -1
    return scale.reshape(shape)


def weight_quantizer(
    layer: nn.Module, axis: int | None, bits: int, *, limits_pair_sums: bool
) -> WeightQuant:
    """Return the fake quantizer for a layer's weight.

    Args:
        layer: Conv, ConvTranspose or Linear.
        axis: channel axis, or None for one scale.
        bits: 2 to 8.
        limits_pair_sums: limit the scales so that no x86 CPU saturates where it adds a pair of
            products in 16 bits, see `minimum_scales`.
    """
    if not limits_pair_sums or bits < 8:  # fewer bits never saturate
        return WeightQuant(axis, bits)
    transposed = isinstance(layer, TRANSPOSED)
    groups = int(getattr(layer, "groups", 1))
    find_minimum_scales = partial(minimum_scales, transposed=transposed, groups=groups)
    return WeightQuant(axis, bits, find_minimum_scales)


class QatLayer(nn.Module):
    """A Conv, ConvTranspose or Linear that computes with its fake-quantized weight.

    Attributes:
        layer: the float layer.
        weight_quant: fake quantizer of its weight; Identity if the layer stays in float.
    """

    def __init__(self, layer: nn.Module, weight_quant: nn.Module):
        super().__init__()
        refuse_hooks(layer, f"a layer that is quantized ({type(layer).__name__})")
        self.layer = layer
        self.weight_quant: Any = weight_quant

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the float weight and bias that will be exported."""
        layer: Any = self.layer
        return layer.weight, layer.bias

    def forward(self, x: torch.Tensor, output_size: OutputSize = None) -> torch.Tensor:
        """Return the layer's output, of the same shape as without quantization."""
        weight, bias = self.folded()
        return apply_layer(self.layer, x, output_size, self.weight_quant(weight), bias)


class QatConvBn(QatLayer):
    """A layer trained with its BatchNorm: the folded weight is the one that is rounded.

    In train mode the layer runs with the folded and rounded weight, its output is divided by the
    folding factor, and the norm is applied with the statistics of the batch::

        y = BN(conv(x, round(w * g)) / g + bias)        g = gamma / sqrt(running_var + eps)

    When frozen, and in eval mode: y = conv(x, round(w * g)) + b'. Source: R. Krishnamoorthi, 2018,
    "Quantizing deep convolutional networks", section 3.2.2.

    Attributes:
        norm: its BatchNorm.
        frozen: whether the statistics of the norm are fixed.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, weight_quant: nn.Module):
        super().__init__(layer, weight_quant)
        self.norm = norm
        self.frozen = False

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias with the running statistics folded in."""
        layer: Any = self.layer
        factor, shift = trained_factors(self.norm)
        bias = shift if layer.bias is None else layer.bias * factor + shift
        return scale_outputs(layer, layer.weight, factor), bias

    def forward(self, x: torch.Tensor, output_size: OutputSize = None) -> torch.Tensor:
        """Return the norm's output."""
        if self.frozen or not self.training:
            return super().forward(x, output_size)
        layer: Any = self.layer
        factor, _shift = trained_factors(self.norm)
        factor = torch.where(factor.abs() > 1e-12, factor, 1e-12).detach()  # it is divided by
        weight = self.weight_quant(scale_outputs(layer, layer.weight, factor))
        channels = (1, -1, *[1] * (weight.dim() - 2))
        y = apply_layer(layer, x, output_size, weight, None) / factor.reshape(channels)
        if layer.bias is not None:
            y = y + layer.bias.reshape(channels)
        return self.norm(y)


def folded_layer(trained: QatLayer) -> nn.Module:
    """Return the float layer with the weight and bias that will be exported."""
    layer = copy.copy(trained.layer)
    weight, bias = trained.folded()
    layer._parameters = {
        "weight": nn.Parameter(weight.detach()),
        "bias": None if bias is None else nn.Parameter(bias.detach()),
    }
    return layer


class IntLayer(ExportedModule):
    """A layer with an int8 weight, exported as integers.

    Attributes:
        weight_int: int8, the shape of the layer's weight.
        weight_scale: float32 [C] or [1].
        bias: float32 [C_out], or None.
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
        self.weight_dims = weight.dim()
        self.layer = copy.copy(trained.layer)
        # no weight and bias in float: `forward` passes those of this module
        self.layer._parameters = dict.fromkeys(trained.layer._parameters)
        self.register_buffer("weight_scale", quant.scales(weight))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        # the integers with which the fake-quantized layer computed
        integers = torch.round(quant.rounded(weight) / self._along_axis(self.weight_scale))
        self.register_buffer("weight_int", integers.to(torch.int8))

    def round_bias(self, input_scale: torch.Tensor) -> None:
        """Round the bias to multiples of input scale times weight scale, in place.

        Runtimes store it as int32 in these steps, and silently clip it. If it would not fit, since
        the input scale is tiny, the weight scale is widened.

        `input_scale`: scale of the layer's input, a scalar.
        """
        if self.bias is None:
            return
        scale = self.weight_scale  # [C_out], or [1] for all channels
        minimum_by_channel = self.bias.abs().double() / (input_scale * _MAX_BIAS)  # [C_out]
        # like `scale`; a single scale must be wide enough for the largest bias of all channels
        minimum_scale = minimum_by_channel.reshape(-1, scale.numel()).amax(0)
        widened_scale = torch.maximum(scale.double(), minimum_scale).to(scale)
        # a weight is integer times scale: where the scale gets wider, the integer gets smaller
        ratio = self._along_axis(scale.double() / widened_scale.double())
        self.weight_int.copy_(torch.round(self.weight_int * ratio))
        self.weight_scale.copy_(widened_scale)

        bias_step = input_scale * widened_scale
        self.bias.copy_(torch.round(self.bias / bias_step) * bias_step)

    def weight(self) -> torch.Tensor:
        """Return the weight in real units, float32."""
        if self.exporting:
            return self.symbolic()
        scale = self._along_axis(self.weight_scale)
        return self.weight_int.to(scale.dtype) * scale

    def symbolic(self) -> torch.Tensor:
        """Emit the ONNX form: an int8 constant and DequantizeLinear; only inside an export."""
        scale = self.weight_scale
        attributes: dict[str, Any] = {}
        if self.axis is None:
            scale = scale.reshape(())
        else:
            attributes["axis"] = self.axis
        zero_point = torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)
        return torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (self.weight_int, scale, zero_point),
            attributes,
            dtype=scale.dtype,
            shape=self.weight_int.shape,
            version=18,
        )

    def forward(self, x: torch.Tensor, output_size: OutputSize = None) -> torch.Tensor:
        """Return the layer's output, computed in float from the integers."""
        return apply_layer(self.layer, x, output_size, self.weight(), self.bias)

    def _along_axis(self, scale: torch.Tensor) -> torch.Tensor:
        return _align(scale, self.axis, self.weight_dims)
