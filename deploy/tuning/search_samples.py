"""Judges trial models by the verdict's own limits, as their engines will be.

Most are good on the first few of the samples that judge, and no others are run then. All are where
twice the loss would not be good, or half of what is unusable would be usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.errors import BackendError
from deploy.feed.parallel import in_order
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE, Lost, lost_of, of_accuracy
from deploy.progress import phase
from deploy.runtimes.ort import OrtSession
from deploy.tuning.samples import CANDIDATES

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.reference import Judges
    from deploy.metrics.tasks import Metric
    from deploy.tensors import Array
    from deploy.tuning.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the verdict would say of an engine.

    Attributes:
        unusable: why it is; "" where it is not.
        lost: of the task; None where nothing tells.
    """

    unusable: str = ""
    lost: Lost | None = None

    @property
    def doubtful(self) -> str:
        """Why too much of the task is lost for a good engine; "" where that is not so."""
        return self.lost.words if self.lost is not None and self.lost.level == DOUBTFUL else ""


class Judging:
    """Judges models by the verdict's limits, and counts what that costs."""

    def __init__(
        self,
        judges: Judges,
        *,
        kernels: bool,
        threads: int,
        max_loss: float | None,
        metric: Metric | None,
        ran: Callable[[int], None],
    ) -> None:
        """How models are judged.

        Args:
            judges: on whom.
            kernels: whether ONNX Runtime's int8 kernels run the models.
            threads: samples that run beside each other.
            max_loss: what the user allows to be lost.
            metric: the user's figure, in the task's place.
            ran: called with the number of samples that were run.
        """
        self._judges, self._kernels, self._threads = judges, kernels, threads
        self._max_loss, self._metric, self._ran = max_loss, metric, ran

    def of(self, model: onnx.ModelProto) -> Judgement:
        """What the verdict would say of the engine of a model, as it would be built."""
        levels: dict[str, str] = {}
        lost = None
        try:
            for found in self._judged(model):
                if any(output.not_finite[0] for output in found.outputs):
                    return Judgement()  # FP32's own: no split helps
                levels = dict(reversed([*of_accuracy(found, self._max_loss)]))
                lost = lost_of(found, self._max_loss)
                if _settled(levels, found, lost):
                    break
        except BackendError:  # it is told when it is built
            return Judgement()
        return Judgement(unusable=levels.get(UNUSABLE, ""), lost=lost)

    def _judged(self, model: onnx.ModelProto) -> Iterator[Accuracy]:
        """Figures on a few of the samples, then on all; each is run once."""
        found = Judged(model, self._judges, self._metric, kernels=self._kernels)
        count = len(self._judges.part)
        for most in dict.fromkeys((min(CANDIDATES, count), count)):
            before = len(found.keys)
            try:
                yield found.on(most, threads=self._threads)
            finally:
                self._ran(len(found.keys) - before)


def _settled(levels: Mapping[str, str], found: Accuracy, lost: Lost | None) -> bool:
    """Whether more samples would hardly say anything else."""
    if found.problems:
        return True
    return (UNUSABLE in levels or set(levels) <= {GOOD}) and (lost is None or lost.sure)


class Judged:
    """A model beside the float one, on ever more of the samples that judge.

    Attributes:
        keys: of the samples that were run.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        judges: Judges,
        metric: Metric | None = None,
        *,
        kernels: bool,
    ) -> None:
        """Load it; the metric as in `Judging`.

        Raises:
            BackendError: ONNX Runtime refused the model.
        """
        self._session = OrtSession.open(
            model, threads=1, spin=False, keep=True, int8_kernels=kernels
        )
        self._judges, self._metric = judges, metric
        self._comparison: Comparison | None = None
        self.keys: list[int] = []

    @phase("judging")
    def on(self, most: int, *, threads: int) -> Accuracy:
        """Figures on at most so many samples; those that were run before are not run again.

        Raises:
            BackendError: ONNX Runtime refused a sample.
        """
        in_order(self._new(most), self._work, self._take, threads=threads, after=len(self.keys))
        assert self._comparison is not None
        return self._comparison.result()

    def _new(self, most: int) -> Iterator[Sample]:
        for key, sample in self._judges.part.spread_with_keys(most, without=frozenset(self.keys)):
            self.keys.append(key)
            yield sample

    def _work(self, _: int, number: int, sample: Sample) -> Sequence[Mapping[str, Array]]:
        wanted = self._judges.outputs.of(self.keys[number - 1], sample)
        return sample, wanted, self._session.run(sample)

    def _take(self, _: int, ran: Sequence[Mapping[str, Array]]) -> None:
        if self._comparison is None:
            self._comparison = Comparison(self._judges.outputs, self._session, metric=self._metric)
        self._comparison.add(*ran, count=self._judges.part.count)
