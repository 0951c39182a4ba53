"""Whether what is chosen would be usable, by the verdict's own limits; if not, a quieter split is.

The search weighs noise in dB, the verdict counts boxes, classes and neighbours. So what was chosen
is judged as its engine will be, on the samples that judge::

    least cost -> unusable? no  -> built
                            yes -> the fastest of the quieter splits that is usable, timed -> built
                                   none is, or it is slower than float             -> float

Most choices are good on the first few of these samples, and no others are asked then.
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
    *,
    or_float: bool,
) -> tuple[Trial, Told, str]:
    """What is to be built, what was timed, and what was unusable before, in words; "" for nothing.

    Args:
        search: that ended.
        choose: one of some trials, the likeliest first, and what was timed for that.
        why: a trial would be unusable; "" where it would not be.
        or_float: whether the float model is built where no split is usable.
    """
    likely = search.likely(_TIMED)
    if search.best_without_float not in likely:
        likely.append(search.best_without_float)
    first, told = choose(likely)
    said = why(first)
    if not said:
        return first, told, ""
    found = search.quieter(first, lambda trial: not why(trial))
    if found is None:
        return (search.all_in_float if or_float else first), told, said
    best, more = choose([found])
    return best, [*told, *more], said


def unusable(
    model: onnx.ModelProto,
    judges: Judges,
    *,
    kernels: bool,
    threads: int,
    max_loss: float | None = None,
) -> str:
    """Why the engine of a model would be unusable, in words; "" where it would not be.

    Args:
        model: as it would be built.
        judges: on whom it is judged.
        kernels: whether ONNX Runtime's int8 kernels run it.
        threads: samples that run beside each other.
        max_loss: what the user allows to be lost.
    """
    for most in dict.fromkeys((min(CANDIDATES, len(judges.part)), len(judges.part))):
        try:
            found = judged(model, judges, most, kernels=kernels, threads=threads)
        except BackendError:  # it is told when it is built
            return ""
        if any(output.not_finite[0] for output in found.outputs):  # FP32's own: no split helps
            return ""
        levels = dict(reversed([*of_accuracy(found, max_loss)]))
        if UNUSABLE in levels or set(levels) <= {GOOD}:
            break
    return levels.get(UNUSABLE, "")


@phase("judging")
def judged(
    model: onnx.ModelProto, judges: Judges, most: int, *, kernels: bool, threads: int
) -> Accuracy:
    """Figures of a model on at most so many of the samples that judge.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    session = OrtSession.open(model, threads=1, spin=False, keep=True, int8_kernels=kernels)
    keys: list[int] = []

    def drawn() -> Iterator[Sample]:
        for key, sample in judges.part.spread_with_keys(most):
            keys.append(key)
            yield sample

    def work(_: int, number: int, sample: Sample) -> Sequence[Mapping[str, Array]]:
        return sample, judges.outputs.of(keys[number - 1], sample), session.run(sample)

    comparison: list[Comparison] = []

    def take(_: int, ran: Sequence[Mapping[str, Array]]) -> None:
        if not comparison:
            comparison.append(Comparison(judges.outputs, session))
        comparison[0].add(*ran, count=judges.part.count)

    in_order(drawn(), work, take, threads=threads)
    return comparison[0].result()
