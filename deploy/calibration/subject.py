"""What a target looks at before anything is observed: the model, its forms, the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.statistics import HistogramOf
from deploy.calibration.batches import whole
from deploy.calibration.observation import Observation, Observed, Variant
from deploy.errors import ConfigError
from deploy.graph.reach import Reach, reaches
from deploy.method import Method

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel

FOLDED = "folded"  # key of the cleaned model, BatchNormalizations folded into their Convs


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model about to be calibrated.

    Attributes:
        loaded: the cleaned model.
        samples: how many the feed gives.
        batch: images in each of them.
        filled: how many of them, at the end, hold images again to fill that batch.
        method: the search that the user chose.
        float_nodes: names of the nodes that the user keeps in float.
        trt_version: TensorRT that is to read the calibration cache, "X.Y.Z"; None for no wish.
        given: the model as the user gave it: a path, or a model in memory; None where only the
            cleaned one is at hand.
        repairs: what changed the cleaned model's weights since it was read.
    """

    loaded: LoadedModel
    samples: int
    batch: int = 1
    filled: int = 0
    method: Method = field(default_factory=Method.of)
    float_nodes: tuple[str, ...] = ()
    trt_version: str | None = None
    given: str | Path | onnx.ModelProto | None = field(default=None, repr=False)
    repairs: tuple[str, ...] = ()

    @property
    def model(self) -> onnx.ModelProto:
        """The cleaned model."""
        return self.loaded.model

    @property
    def identities(self) -> Mapping[str, str]:
        """What the model is known by, as in a fingerprint; no file is a repaired one."""
        known = self.loaded.identities
        return {"graph": known["graph"]} if self.repairs else known

    @property
    def source(self) -> Path | None:
        """The file it came from."""
        return self.loaded.source

    @cached_property
    def unfolded(self) -> LoadedModel:
        """The model with its BatchNormalizations as they stand in the file.

        Raises:
            ConfigError: it was given in memory, already cleaned; or repaired since.
            ModelError: its file changed since it was loaded.
        """
        if self.repairs:
            raise ConfigError(
                "what reads the model as its file has it sees no repair of its weights, got repair"
                f" {', '.join(self.repairs)}; leave it away, or take another method or"
                " configuration"
            )
        from deploy.frontends import load
        from deploy.frontends.again import refuse_other

        if self.given is None:
            raise ConfigError(
                "the model must be an ONNX file to be read as its exporter wrote it, got one that"
                " was traced or cleaned in memory; write it with calib8 export first"
            )
        found = load(self.given, fold_batchnorm=False)
        refuse_other(self.loaded, found.stamp == self.loaded.stamp)
        return found

    @cached_property
    def original(self) -> onnx.ModelProto | None:
        """The graph as the file has it, external data left there; None where no file is at hand.

        Raises:
            ModelError: the file changed since it was loaded.
        """
        from deploy.frontends.again import graph_of

        if not isinstance(self.given, str | Path):
            return self.given
        path = Path(self.given)
        return graph_of(path, self.loaded) if path.suffix.lower() == ".onnx" else None

    @property
    def statistic(self) -> HistogramOf:
        """What the method searches, a first batch and whole batches counted in samples.

        Raises:
            ConfigError: the samples fill no batch.
        """
        wanted = self.method.statistic
        if not wanted.first:
            return wanted
        first = -(-wanted.first // self.batch)
        seen = whole(self.samples, first, filled=self.filled)
        return replace(wanted, first=first, most=seen if seen < self.samples else 0)

    @cached_property
    def reaches(self) -> dict[str, Reach]:
        """Tensor -> how far its readers tell its values apart."""
        return reaches(self.model)

    def histograms(self, tensors: Iterable[str]) -> tuple[Observation, ...]:
        """The method's statistic of tensors of the cleaned model."""
        variant = Variant(FOLDED, self._folded)
        return tuple(Observation(variant, name, self.statistic) for name in tensors)

    def _folded(self, _: Observed) -> onnx.ModelProto:
        return self.model
