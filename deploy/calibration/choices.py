"""`Choices`: what was settled for one target beyond what the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Which nodes stay float and which search finds which range, for one target.

    They change no observation: any choice is built from the same calibration.

    Attributes:
        float_nodes: node of the cleaned model -> why it stays float.
        method: the search of every tensor; None is the calibration's own.
        methods: tensor -> a search of its own.
        rounded: whether weights are rounded by output error; None where no plan says it.
    """

    float_nodes: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    rounded: bool | None = None


NO_CHOICES = Choices()
