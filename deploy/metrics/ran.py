"""What an engine is made of once its runtime has built it, as that runtime tells.

A runtime that builds for a device fuses nodes into layers and chooses the type that each computes
in; what a Q/DQ model or a calibration cache asks for is only a wish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deploy.machine import Device
from deploy.tensors import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RanLayer:
    """One layer of an engine.

    Attributes:
        name: as the runtime calls it.
        kind: what it does, in the runtime's word.
        precision: type of what it reads first, which is what it computes in: "int8", "float16";
            "" where that is not told.
        nodes: the model's nodes that it runs, as far as they are told.
        reformat: whether it only changes type or layout of a tensor, for the next one to read.
    """

    name: str
    kind: str = ""
    precision: str = ""
    nodes: tuple[str, ...] = ()
    reformat: bool = False


@runtime_checkable
class OnDevice(Protocol):
    """A `Session` of an engine that was built for a device."""

    @property
    def device(self) -> Device:
        """What it runs on."""
        ...

    def layers(self) -> tuple[RanLayer, ...]:
        """The engine's layers in their order; none where the engine does not tell."""
        ...


def devices_of(sessions: Mapping[str, Session]) -> tuple[Device, ...]:
    """The accelerators that sessions run on, each once."""
    found = (one.device for one in sessions.values() if isinstance(one, OnDevice))
    return tuple(dict.fromkeys(found))


def layers_of(session: Session | None) -> tuple[RanLayer, ...]:
    """What an engine tells of its layers; nothing where ONNX Runtime runs it, or none does."""
    return session.layers() if isinstance(session, OnDevice) else ()
