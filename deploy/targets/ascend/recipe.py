"""What the files of an Ascend deployment are written from, wherever the scales came from.

::

    calibration (`deploy.targets.ascend.target`) ---.
    record or cache (`...recorded`) ----------------+--> Recipe --> Ascend.files --> Built
    Q/DQ model (`...from_qdq`) ---------------------'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from calibrators.scales import Scale
    from deploy.targets.ascend.config_types import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.record import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A float model and the scales of its int8 layers.

    Attributes:
        model: float model, nodes named.
        graph: its layers.
        records: scales of those in int8, by layer.
        layers: their integers.
        config: quant config that says so; None where the scales are not from AMCT's searches.
        method: what gave the scales, in words.
        ranges: tensor -> the clip range behind them, where it is known.
        why: layer -> why it is float, where that is not as asked.
        notes: sentences for the user.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    records: Mapping[str, LayerRecord]
    layers: Mapping[str, QuantLayer]
    config: QuantConfig | None = None
    method: str = ""
    ranges: Mapping[str, Scale] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
