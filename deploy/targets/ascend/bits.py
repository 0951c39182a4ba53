"""How wide the integers of a layer may be, and what becomes of other wishes.

==============  ===================================================  ======================
width           layers                                               elsewhere
==============  ===================================================  ======================
weights 4       an even number of input channels, one group          8, told
weights 6, 7    Conv with a 2-D kernel                               8, told
activations 16  Conv and ConvTranspose with a 1-D or 2-D kernel,     8, told, where
                Gemm                                                 common_config asks for
                                                                     it; else refused
==============  ===================================================  ======================

8 bits, and activations of 4, are for all of them. Source: hicann/amct, its capacity table and the
checks of its configurations (INT16_QUANTIZABLE_ONNX_TYPES, check_int4_cin_pack_supported).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.targets.ascend.config_types import LayerConfig
    from deploy.targets.ascend.layers import Layer

INT16_LAYERS = "Conv and ConvTranspose with a 1-D or 2-D kernel, and Gemm"
INT4_WEIGHTS = "layers with an even number of input channels and one group"
_SHOWN = 3  # names in a sentence


def takes_activations(layer: Layer, bits: int) -> bool:
    """Whether a layer may read integers of this width."""
    return bits != 16 or (layer.kind in ("Conv", "ConvTranspose", "Gemm") and layer.rank < 3)


def takes_weights(layer: Layer, bits: int) -> bool:
    """Whether a layer may hold weights of this width; one without weights takes any."""
    if not layer.weight or bits == 8:
        return True
    if bits == 4:
        return layer.group == 1 and layer.channels_in % 2 == 0
    return layer.kind == "Conv" and layer.rank == 2


def told_of_weights(asked: Mapping[str, LayerConfig], kept: Mapping[str, LayerConfig]) -> list[str]:
    """Sentences on enabled layers whose weights are of 8 bits where other widths were asked for."""
    found: dict[int, list[str]] = {}
    for name, entry in asked.items():
        bits = entry.weight.num_bits
        if entry.quant_enable and bits != kept[name].weight.num_bits:
            found.setdefault(bits, []).append(name)
    return [
        f"The weights of {named(names)} are of 8 bits, not {bits}:"
        f" that is for {INT4_WEIGHTS if bits == 4 else 'Conv with a 2-D kernel'}."
        for bits, names in sorted(found.items())
    ]


def told_of_activations(names: Collection[str]) -> list[str]:
    """A sentence on layers that get 8-bit activations where the common_config has 16."""
    if not names:
        return []
    return [f"The activations of {named(names)} are of 8 bits, not 16: that is for {INT16_LAYERS}."]


def named(names: Collection[str]) -> str:
    """How many layers, and the first of their names."""
    shown = ", ".join(list(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} layer{'s' * (len(names) != 1)} ({shown})"
