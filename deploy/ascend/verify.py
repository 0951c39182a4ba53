"""Whether the deploy model computes what the fake-quant model promises, checked on a CPU.

The deploy model runs in integers (`deploy.ascend.executor`), beside two fake-quant models: one
that rounds as AscendQuant does, which must agree but for sums beyond 2^24, and AMCT's own, which
differs by one code wherever a value lies at a half and the offset is odd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

    from deploy.writers.ascend_graph import QuantLayer

_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How far the deploy model's outputs are from the fake-quant models'.

    Attributes:
        samples: samples compared.
        same_rounding: largest difference to the model that rounds as AscendQuant, over the
            largest output.
        amct_rounding: the same to AMCT's fake-quant model.
    """

    samples: int
    same_rounding: float
    amct_rounding: float

    def sentence(self) -> str:
        """For the report."""
        return (
            f"The deploy model was run in integers on {self.samples} samples: within"
            f" {self.same_rounding:.1g} of the fake-quant model with AscendQuant's rounding,"
            f" within {self.amct_rounding:.1g} of AMCT's, relative to the largest output"
            + ("." if self.same_rounding <= _TOLERANCE else "; look into this before deploying.")
        )


def verify(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    samples: Iterable[Mapping[str, NDArray[Any]]],
    *,
    threads: int | None = None,
) -> Verified:
    """Run deploy and fake-quant models side by side.

    Args:
        model: float model, nodes named.
        layers: integers by node name.
        samples: input name -> array.
        threads: threads inside one inference.

    Raises:
        BackendError: ONNX Runtime refuses a model or a sample.
        ModelError: a layer that the executor cannot add up exactly.
    """
    from deploy.ascend.executor import open_deploy
    from deploy.backends.ort_session import OrtSession
    from deploy.writers.ascend_deploy import deploy_model
    from deploy.writers.ascend_fake_quant import fake_quant_model

    deployed = open_deploy(deploy_model(model, layers), threads=threads)
    twins = [
        OrtSession.open(
            fake_quant_model(model, layers, npu_rounding=npu).SerializeToString(), threads=threads
        )
        for npu in (True, False)
    ]
    worst, count = [0.0, 0.0], 0
    for sample in samples:
        wanted = deployed.run(sample)
        count += 1
        for place, twin in enumerate(twins):
            worst[place] = max(worst[place], _distance(wanted, twin.run(sample)))
    return Verified(samples=count, same_rounding=worst[0], amct_rounding=worst[1])


def _distance(wanted: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]) -> float:
    """Largest difference over all outputs, relative to each output's largest value."""
    ratios = [0.0]
    for name, value in wanted.items():
        if value.dtype.kind == "f" and value.size and got[name].shape == value.shape:
            scale = float(np.abs(value).max()) or 1.0
            ratios.append(float(np.abs(value - got[name]).max()) / scale)
    return max(ratios)
