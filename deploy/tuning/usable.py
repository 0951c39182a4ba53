"""Whether what is chosen would be usable, by the verdict's own limits; if not, a quieter split is.

The search weighs noise in dB, the verdict counts boxes, classes and neighbours. So what was chosen
is judged as its engine will be, on the samples that judge::

    least cost -> unusable? no  -> built
                            yes -> the fastest of the quieter splits that is usable, timed -> built
                                   none is, or it is slower than float             -> float

Most choices are good on the first few of these samples, and no others are asked then. Where the
search has cost as many calibrations as it may, the fastest usable split so far is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.errors import BackendError
from deploy.feed.parallel import in_order
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import GOOD, UNUSABLE, of_accuracy
from deploy.ort import OrtSession
from deploy.progress import phase
from deploy.tuning.samples import CANDIDATES

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.outputs import Judges
    from deploy.feed.parallel import Sample
    from deploy.tensors import Array
    from deploy.tuning.search import Search, Trial

_TIMED = 3  # splits that are timed
Told = list[dict[str, str | float]]


def settled(
    search: Search,
    choose: Callable[[Sequence[Trial]], tuple[Trial, Told]],
    why: Callable[[Trial], str],
    can_go_on: Callable[[], bool],
    *,
    or_float: bool,
) -> tuple[Trial, Told, str]:
    """What is to be built, what was timed, and what was unusable before, in words; "" for nothing.

    Args:
        search: that ended.
        choose: one of some trials, the likeliest first, and what was timed for that.
        why: a trial would be unusable; "" where it would not be.
        can_go_on: whether another may be judged.
        or_float: whether the float model is built where no split is usable.
    """
    likely = search.likely(_TIMED)
    if search.best_without_float not in likely:
        likely.append(search.best_without_float)
    first, told = choose(likely)
    said = why(first)
    if not said:
        return first, told, ""
    found = search.quieter(first, lambda trial: not why(trial), can_go_on)
    if found is None:
        return (search.all_in_float if or_float else first), told, said
    best, more = choose([found])
    return best, [*told, *more], said


class Judging:
    """Judges models by the verdict's limits, and counts what that costs."""

    def __init__(
        self,
        judges: Judges,
        *,
        kernels: bool,
        threads: int,
        max_loss: float | None,
        ran: Callable[[int], None],
    ) -> None:
        """How models are judged.

        Args:
            judges: on whom.
            kernels: whether ONNX Runtime's int8 kernels run the models.
            threads: samples that run beside each other.
            max_loss: what the user allows to be lost.
            ran: called with the number of samples that were run.
        """
        self._judges, self._kernels, self._threads = judges, kernels, threads
        self._max_loss, self._ran = max_loss, ran

    def unusable(self, model: onnx.ModelProto) -> str:
        """Why the engine of a model, as it would be built, is unusable; "" where it is not."""
        levels: dict[str, str] = {}
        try:
            for found in self._judged(model):
                if any(output.not_finite[0] for output in found.outputs):
                    return ""  # FP32's own: no split helps
                levels = dict(reversed([*of_accuracy(found, self._max_loss)]))
                if UNUSABLE in levels or set(levels) <= {GOOD}:
                    break
        except BackendError:  # it is told when it is built
            return ""
        return levels.get(UNUSABLE, "")

    def _judged(self, model: onnx.ModelProto) -> Iterator[Accuracy]:
        """Figures on a few of the samples, then on all; each is run once."""
        found = Judged(model, self._judges, kernels=self._kernels)
        count = len(self._judges.part)
        for most in dict.fromkeys((min(CANDIDATES, count), count)):
            before = len(found.keys)
            try:
                yield found.on(most, threads=self._threads)
            finally:
                self._ran(len(found.keys) - before)


class Judged:
    """A model beside the float one, on ever more of the samples that judge.

    Attributes:
        keys: of the samples that were run.
    """

    def __init__(self, model: onnx.ModelProto, judges: Judges, *, kernels: bool) -> None:
        """Load it.

        Raises:
            BackendError: ONNX Runtime refused the model.
        """
        self._session = OrtSession.open(
            model, threads=1, spin=False, keep=True, int8_kernels=kernels
        )
        self._judges = judges
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
            self._comparison = Comparison(self._judges.outputs, self._session)
        self._comparison.add(*ran, count=self._judges.part.count)
