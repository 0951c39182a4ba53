"""Which few samples a search looks at: those in which the float model says most, and some others.

Of a detector's photos most hold nothing, and noise on nothing is what a search over them would
mend. So half of the samples are those with the greatest signal in the parts of the outputs; the
other half are spread over the feed. What a Softmax gives says most where it is least sure
(`deploy.tuning.search_samples`).

How much the float model says in each sample, part by part of its outputs.

The sum of squares; but of one class a sample, behind a Softmax, most is held by what is sure, and
there int8 may change what it likes before the Softmax and loses nothing: a search over such samples
took four layers of eight for 109 dB that left 22. Of these, and of one probability a sample where
nothing else is said, behind a Sigmoid, what is left open counts::

    sum p (1 - p)            0 where the class is sure

Of many steps or pixels in a sample some are unsure in any, and the sum of squares tells as much.

Judges trial models by the verdict's own limits, as their engines will be.

Most are good on the first few of the samples that judge, and no others are run then. All are where
twice the loss would not be good, or half of what is unusable would be usable.

Ranges that have not seen the samples which judge them.

What a range clips is rare in the images that calibrate, and a search that judges it by these very
images finds that clipping costs nothing. So where the images are few, the search tries ranges that
were found without its own samples::

    calibration images  o o x o o o x o ...      x: tell the noise of every trial
                        o o   o o o   o          what the trial's ranges were found in

What is built has the ranges of all of them. Among many images a few make no difference. A histogram
that no order decides is what was counted of all, less what the judges add to it, so that these few
alone are run again; any other statistic is made anew of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf, Recorder
from deploy.calibration.observation import Key, Observation, Observed, each_once
from deploy.calibration.one_pass import observe
from deploy.calibration.ranges import Ranges
from deploy.errors import BackendError, Calib8Error
from deploy.feed.listing import Changed
from deploy.feed.parallel import in_order
from deploy.feed.sampling import order
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.levels import DOUBTFUL, GOOD, UNUSABLE, Lost, lost_of, of_accuracy
from deploy.metrics.parts import SAMPLES
from deploy.metrics.rows import are_shares
from deploy.metrics.truth import Form, form_of
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array
from deploy.terminal import phase

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.reference import Judges
    from deploy.metrics.tasks import Metric
    from deploy.targets.base import BuildRequest, Target


def energies(form: Form, outputs: Iterable[Mapping[str, Array]]) -> NDArray[np.float64]:
    """[samples, parts]; 0 where a part is not finite."""
    least = 1 if len(form.parts) == 1 else 2  # one beside others says whether these mean anything
    found = np.array(
        [[_both(part.of(one[part.output]), least) for part in form.parts] for one in outputs]
    )
    if not found.size:
        return np.zeros(found.shape[:2])
    shares = np.isfinite(found[..., 1]).all(axis=0)
    return np.asarray(np.where(shares, found[..., 1], found[..., 0]))


def energy(values: Array) -> float:
    """Sum of squares; 0 where it is not finite."""
    total = square(values)
    return total if np.isfinite(total) else 0.0


def square(values: Array) -> float:
    """Sum of squares, whatever they are."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def _both(values: Array, least: int) -> tuple[float, float]:
    """The sum of squares, and what so many shares or more leave open; NaN of what are none."""
    own = energy(values)
    if values.size < least or not _is_row_of_shares(values):
        return own, np.nan
    return own, max(float(np.sum(values, dtype=np.float64)) - own, 0.0)


def _is_row_of_shares(values: Array) -> bool:
    """Whether a sample is one row of shares, [1, C], that sum to 1, or one share alone."""
    if not np.issubdtype(values.dtype, np.floating) or not np.isfinite(values).all():
        return False
    if values.size == 1:  # a wake word, the quality of a signal
        return bool(values.min() >= 0 and values.max() <= 1)
    if values.ndim < 2 or values.size != values.shape[1]:
        return False
    return are_shares(values.reshape(-1))


_EVERY = 2  # of the strongest samples every second one: the very first would speak for all
CANDIDATES = 48  # samples of those that judge, to choose from

_VALUES = 5_000_000  # of the samples together: a large one holds as much to err in as some small

Sample = Mapping[str, "Array"]
Outputs = Mapping[str, "Array"]


def as_many(judges: Judges) -> int:
    """Samples that are enough for their size."""
    first, _ = next(iter(judges.heard(CANDIDATES)))
    return _VALUES // max(_size(first), 1)


def telling(judges: Judges, most: int) -> list[tuple[Sample, Outputs]]:
    """At most so many samples with what the float model says of them, in the feed's order.

    The candidates are read twice, so that only the chosen ones are in memory.
    """
    chosen = _places(_energies(judges.heard(CANDIDATES)), most)
    return [heard for place, heard in enumerate(judges.heard(CANDIDATES)) if place in chosen]


def alike(samples: Sequence[Sample]) -> list[Sample]:
    """Those that are timed: all of one shape, that of the middle one by size.

    The least time over samples of several sizes would be that of the smallest, in which int8 wins
    least.
    """
    middle = sorted(samples, key=_size)[len(samples) // 2]
    shapes = {name: value.shape for name, value in middle.items()}
    return [one for one in samples if {name: value.shape for name, value in one.items()} == shapes]


def _size(sample: Sample) -> int:
    return sum(value.size for value in sample.values())


def _energies(heard: Iterable[tuple[Sample, Outputs]]) -> NDArray[np.float64]:
    """[samples, parts]: what every part says, by its own measure."""
    left = iter(heard)
    first = list(islice(left, SAMPLES))
    form = form_of([said for _, said in first], inputs=[sample for sample, _ in first])
    return energies(form, (form.told(said, sample, said) for sample, said in chain(first, left)))


def _places(energies: NDArray[np.float64], most: int) -> frozenset[int]:
    """Half of them where the parts, each by its own measure, hold most; the rest from all over."""
    count = len(energies)
    if count <= most:
        return frozenset(range(count))
    largest = energies.max(axis=0)
    signal = (energies / np.where(largest > 0, largest, 1.0)).sum(axis=1)
    strongest = np.argsort(-signal, kind="stable")
    chosen = {int(place) for place in strongest[: _EVERY * (most // 2) : _EVERY]}
    for place in map(int, order(count)):
        if len(chosen) < most:
            chosen.add(place)
    return frozenset(chosen)


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


MANY = 128  # samples from which on a few make no difference


def unseen(
    target: Target,
    request: BuildRequest,
    judges: Sequence[Sample],
    ran: Callable[[int], None] = lambda _: None,
) -> BuildRequest:
    """The request with ranges of all samples but these; as it is where that cannot be.

    Args:
        target: whose observations are made anew.
        request: what it would be built from.
        judges: samples of the request's feed.
        ran: called with the number of samples that are run for it.
    """
    count, ranges = len(request.feed), request.ranges
    left = count - len(judges)
    if ranges.trusted is not None or not 0 < left < MANY:
        return request
    subject = replace(request.subject, samples=left)
    seen = ranges.once("without the judges", lambda: [Observed({})])  # shared by the targets
    try:
        wanted = seen[0].missing(each_once({target.name: target.demand(subject)}))
        counted = [o for o in wanted if _counted(ranges.observed, o)]
        ran(len(judges) if counted else 0)
        seen[0] = seen[0].and_also(_less(request, counted, judges))
        ran(left if len(counted) < len(wanted) else 0)
        with phase("observing without the judges", left, "samples") as step:
            seen[0] = seen[0].and_also(
                observe(
                    wanted,
                    _others(request, judges),
                    known=seen[0],
                    threads=request.threads,
                    progress=step,
                )
            )
    except Changed:
        raise
    except Calib8Error:  # a configuration that wants all samples, a tensor of these alone
        return request
    found = Ranges(seen[0], ranges.method, ranges.reaches)
    return replace(request, subject=subject, ranges=found)


def _counted(observed: Observed, observation: Observation) -> bool:
    """Whether what was observed is a histogram that judges can be taken from."""
    known = observation.key in observed and not observation.variant.needs
    return known and observation.statistic == HistogramOf()


def _less(
    request: BuildRequest, counted: Sequence[Observation], judges: Sequence[Sample]
) -> dict[Key, Recorder]:
    """What was counted of all samples, less what these add to it."""
    if not counted:
        return {}
    own = observe(counted, judges, threads=request.threads)
    ranges = request.ranges
    return {o.key: ranges.histogram(o).without(_histogram(own, o)) for o in counted}


def _histogram(observed: Observed, observation: Observation) -> Histogram:
    found = observed.of(observation)
    assert isinstance(found, Histogram)
    return found


def _others(request: BuildRequest, judges: Sequence[Sample]) -> Iterator[Sample]:
    known = {_digest(sample) for sample in judges}
    with request.feed.samples() as samples:
        yield from (sample for sample in samples if _digest(sample) not in known)


def _digest(sample: Sample) -> bytes:
    total = hashlib.sha256()
    for name in sorted(sample):
        total.update(name.encode() + sample[name].tobytes())
    return total.digest()
