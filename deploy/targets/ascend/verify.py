"""Whether the deploy model computes what the fake-quant model promises, checked on a CPU.

The deploy model runs in integers (`deploy.targets.ascend.executor`), beside two fake-quant models:
one that rounds as AscendQuant does, which must agree but for sums beyond 2^24, and AMCT's own,
which differs by one code wherever a value lies at a half and the offset is odd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import ModelError
from deploy.metrics.output_errors import cosine

if TYPE_CHECKING:
    import onnx

    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.base import BuildRequest

_TOLERANCE = 1e-2
_TRIED = 2  # samples on which a build runs the deploy model
_END = 2**31  # of int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How far the deploy model's outputs are from the fake-quant models'.

    Attributes:
        samples: samples compared.
        same_rounding: largest difference to the model that rounds as AscendQuant, over the
            largest value of that output.
        amct_cosine: lowest cosine of an output with AMCT's fake-quant model's.
        sums: layer with 16-bit activations -> its largest sum, over the end of int32.
    """

    samples: int
    same_rounding: float
    amct_cosine: float
    sums: Mapping[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """For the report."""
        return (
            f"The deploy model was run in integers on {self.samples} samples: within"
            f" {self.same_rounding:.1g} of the fake-quant model with AscendQuant's rounding,"
            f" cosine {self.amct_cosine:.5f} with AMCT's rounding"
            + ("." if self.same_rounding <= _TOLERANCE else "; look into this before deploying.")
            + self._of_sums()
        )

    def _of_sums(self) -> str:
        """A sentence on sums of 16-bit activations, of which AMCT says nothing."""
        if not self.sums:
            return ""
        worst = max(self.sums, key=lambda name: self.sums[name])
        return (
            f" Sums of 16-bit activations reached {self.sums[worst]:.3g} of int32's end, in {worst}"
            + (
                "."
                if self.sums[worst] < 1
                else ", and are wrong wherever they are kept in int32; give it 8 bits."
            )
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
    from deploy.runtimes.ort import OrtSession
    from deploy.targets.ascend.deploy_model import deploy_model
    from deploy.targets.ascend.executor import open_deploy
    from deploy.targets.ascend.fake_quant import fake_quant_model

    wide = {f"{n}_output0": n for n, q in layers.items() if q.record.act_bits == 16}
    deployed = open_deploy(deploy_model(model, layers), threads=threads, shown=tuple(wide))
    # Optimized, ONNX Runtime folds the dequantization into the weights: no integers any more.
    twins = [
        OrtSession.open(made, threads=threads, optimize=False)
        for npu in (True, False)
        for made in [fake_quant_model(model, layers, npu_rounding=npu)]
    ]
    same, lowest, count = 0.0, 1.0, 0
    sums = dict.fromkeys(wide.values(), 0.0)
    for sample in samples:
        got = deployed.run(sample)
        like_npu, like_amct = (twin.run(sample) for twin in twins)
        count += 1
        for tensor, name in wide.items():
            sums[name] = max(sums[name], float(np.abs(got.pop(tensor)).max()) / _END)
        for name in _comparable(got, like_amct):
            same = max(same, _distance(got[name], like_npu[name]))
            lowest = min(lowest, cosine(got[name], like_amct[name]))
    return Verified(samples=count, same_rounding=same, amct_cosine=lowest, sums=sums)


def _comparable(got: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> list[str]:
    """Float outputs of one shape."""
    return [
        name
        for name, value in got.items()
        if value.dtype.kind == "f" and value.size and other[name].shape == value.shape
    ]


def _distance(got: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.abs(got - other).max()) / (float(np.abs(got).max()) or 1.0)


def tried(model: onnx.ModelProto, layers: Mapping[str, QuantLayer], request: BuildRequest) -> str:
    """A sentence on how a build's deploy model compares with its fake-quant model."""
    try:
        found = verify(model, layers, request.feed.first(_TRIED), threads=request.threads)
    except ModelError as error:
        return f"The deploy model was not run in integers: {error}."
    return found.sentence()
