"""AMCT's quant config as values: one `LayerConfig` a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """activation_quant_params of one layer; `asymmetric` None follows activation_offset."""

    num_bits: int = 8
    act_algo: str = "ifmr"
    asymmetric: bool | None = None
    max_percentile: float = 0.999999
    min_percentile: float = 0.999999
    search_range: tuple[float, float] = (0.7, 1.3)
    search_step: float = 0.01
    num_of_bins: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """weight_quant_params of one layer; the last four belong to ada_quantize."""

    num_bits: int = 8
    wts_algo: str = "arq_quantize"
    channel_wise: bool | None = None
    num_iteration: int = 10000
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """How one layer is quantized."""

    quant_enable: bool = True
    dmq_balancer_param: float | None = None
    activation: Activation = field(default_factory=Activation)
    weight: Weight = field(default_factory=Weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConfig:
    """One tensor_quantize: an input of an Add or MaxPool, and how its scale is found."""

    layer_name: str
    input_index: int
    activation: Activation = field(default_factory=Activation)

    @property
    def key(self) -> str:
        """Its name in a record."""
        return f"{self.layer_name}:{self.input_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """A whole quant config.

    Attributes:
        layers: layer name -> how it is quantized.
        told: sentences on what was asked for and is not so; never written.
    """

    version: int = 1
    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    fakequant_precision_mode: str | None = None
    tensors: tuple[TensorConfig, ...] = ()
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def enabled(self) -> dict[str, LayerConfig]:
        """The layers to quantize."""
        return {name: layer for name, layer in self.layers.items() if layer.quant_enable}

    def entries(self) -> dict[str, LayerConfig]:
        """The layers to quantize, and the inputs of tensor_quantize by their names in a record."""
        inputs = {one.key: LayerConfig(activation=one.activation) for one in self.tensors}
        return {**self.enabled(), **inputs}
