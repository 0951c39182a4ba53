"""Which integers a target stores, and where it wants them: chosen before training for int8.

==============  ======================  =========================  ==============================
target          activations             weights                    quantized tensors
==============  ======================  =========================  ==============================
onnxruntime     unsigned, zero point    signed, per channel        inputs and outputs of layers,
                                                                   after a ReLU or Clip
tensorrt        signed, zero point 0    signed, per channel        inputs of layers, and of Add
                                                                   all but the branch it fuses with
ascend          signed, zero point      signed, per channel        inputs of layers
                                        (Linear: per tensor)
==============  ======================  =========================  ==============================

onnxruntime runs Conv+ReLU in int8 on x86 only for unsigned activations: there a ReLU is the same as
the lower end of the grid, and vanishes. TensorRT accepts no zero point but 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.errors import ConfigError
from deploy.graph.plan import ASCEND, ONNXRUNTIME, TENSORRT, Placement

BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class ActivationGrid:
    """Integers qmin..qmax of `bits` bits, stored in `dtype` (uint8 or int8)."""

    bits: int
    signed: bool
    symmetric: bool

    @property
    def qmin(self) -> int:
        """Lowest integer."""
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        """Highest integer."""
        return self.qmin + 2**self.bits - 1

    @property
    def dtype(self) -> str:
        """Type that stores it, whatever the bits."""
        return "int8" if self.signed else "uint8"


@dataclass(frozen=True, slots=True)
class Target:
    """What a runtime wants of a quantized PyTorch model.

    Attributes:
        signed, symmetric: the grid of activations.
        outputs: whether outputs of layers are quantized, besides inputs.
        add: whether the inputs of Add are quantized.
        linear_per_channel: whether Linear's weight has one scale a channel.
    """

    name: str
    signed: bool
    symmetric: bool
    outputs: bool
    add: bool
    linear_per_channel: bool

    @classmethod
    def of(cls, placement: Placement) -> Target:
        """What a placement of `deploy.graph.plan` says of layers in PyTorch."""
        return cls(
            placement.name,
            signed=placement.grid.qmin < 0,
            symmetric=placement.grid.symmetric,
            outputs=placement.outputs,
            add="Add" in placement.glue,
            linear_per_channel="Gemm" not in placement.per_tensor,
        )

    def activations(self, bits: int = 8) -> ActivationGrid:
        """The grid of activations at that many bits."""
        if bits not in BITS:
            raise ConfigError(f"bits are {BITS[0]} to {BITS[-1]}, got {bits}")
        return ActivationGrid(bits, self.signed, self.symmetric)


TARGETS: dict[str, Target] = {
    placement.name: Target.of(placement) for placement in (ONNXRUNTIME, TENSORRT, ASCEND)
}


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TARGETS:
        raise ConfigError(f"a target is one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]
