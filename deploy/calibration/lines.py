"""Who reads a variant's tensors, and how a sample goes through it.

::

    sample --> tap of a variant --> tensor --> histogram --.
                               |--> tensor --> histogram --+-- counted together
                               |--> tensor --> another recorder
                               '--> tensor --> waits for its turn: the order shows in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.statistics import HistogramOf, Recorder
from calibrators.together import Located, Refused, Together
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.sample_checks import Peaks, largest
from deploy.calibration.subject import FOLDED
from deploy.calibration.taps import Reading, Tap
from deploy.feed.parallel import Sample
from deploy.tensors import Array

Keep = Callable[[int, Sample], None]
Waiting = tuple[Observation, NDArray[np.float32]]


class Held:
    """The recorders of a variant's tensors, of a part of the pass."""

    def __init__(self, line: Line, part: Mapping[Observation, Recorder]) -> None:
        self._counted = line.counted
        self._others = [(o, part.get(o)) for o in line.others]
        found = [part[o] for o in line.counted]
        self._together = Together([one for one in found if isinstance(one, Histogram)])

    def count(self, number: int, located: Located) -> None:
        """Record what histograms of all samples see.

        Raises:
            CalibrationError: as `record`.
        """
        try:
            self._together.observe(located)
        except Refused as error:
            raise told_of(error, self._counted[error.place], number) from error

    def others(self, number: int, values: Mapping[str, Array]) -> list[Waiting]:
        """Record what else has no order, and give what has.

        Raises:
            CalibrationError: as `record`.
        """
        waiting = []
        for observation, recorder in self._others:
            if not reaches(observation.statistic.samples, number):
                continue
            value = values[observation.tensor]
            if recorder is None:
                waiting.append((observation, value))
            else:
                record(recorder, observation, number, value)
        return waiting

    def latest(self) -> Iterable[float]:
        """Largest |x| that each histogram saw in the last sample: it had to find it anyway."""
        return [one.latest for one in self._together.histograms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A variant in the pass.

    Attributes:
        key: the variant's.
        tap: its session.
        counted: who reads its tensors by a histogram of all samples in any order.
        others: who else reads them.
        limit: how many samples it is run on.
    """

    key: str
    tap: Tap
    counted: Sequence[Observation]
    others: Sequence[Observation]
    limit: int | None

    def reading(self) -> Reading:
        """What a worker runs its samples by."""
        return self.tap.reading([o.tensor for o in self.counted])

    def run(
        self,
        reading: Reading,
        held: Held,
        peaks: Peaks | None,
        number: int,
        sample: Sample,
        keep: Keep | None,
    ) -> list[Waiting]:
        """Run one sample, record what has no order, and give what has."""
        kept = None if keep is None or self.key != FOLDED else partial(keep, number)
        if not self.others:
            held.count(number, reading.run(sample, kept))
            values: Mapping[str, Array] = {}
        else:  # which may hold on to an array
            values = dict(self.tap.run(sample, kept))
            held.count(number, Located(values[o.tensor] for o in self.counted))
        waiting = held.others(number, values)
        if peaks is not None:
            self._tell(peaks, number, held, values)
        return waiting

    def _tell(self, peaks: Peaks, number: int, held: Held, values: Mapping[str, Array]) -> None:
        seen = {o.tensor: amax for o, amax in zip(self.counted, held.latest(), strict=True)}
        seen |= {name: largest(value) for name, value in values.items() if name not in seen}
        for name, amax in seen.items():
            peaks.add((self.key, name), number, amax)


def lines_of(observations: Sequence[Observation], known: Observed) -> list[Line]:
    """One line for each variant, in the order in which they are first wanted."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        ordered = {o.tensor for o in own if o.statistic.ordered}
        tensors = list(dict.fromkeys(o.tensor for o in own))
        loose = [name for name in tensors if name not in ordered]
        counted = [o for o in own if o.statistic == HistogramOf()]
        line = Line(
            key=variant.key,
            tap=Tap(variant.make(known), tensors, in_any_order=loose),
            counted=counted,
            others=[o for o in own if o not in counted],
            limit=limit_of(own),
        )
        lines.append(line)
    return lines


def limit_of(observations: Iterable[Observation]) -> int | None:
    """How many samples the observations look at; None for all."""
    most = [o.statistic.samples for o in observations]
    return None if None in most else max((n for n in most if n is not None), default=None)


def reaches(limit: int | None, number: int) -> bool:
    """Whether the sample of this number, from 1, is looked at."""
    return limit is None or number <= limit


def record(
    recorder: Recorder, observation: Observation, number: int, value: NDArray[np.float32]
) -> None:
    """Record a tensor's values of one sample.

    Raises:
        CalibrationError: the recorder refuses them, such as for NaN; tensor and sample are named.
    """
    try:
        recorder.observe(value)
    except CalibrationError as error:
        raise told_of(error, observation, number) from error


def told_of(error: CalibrationError, observation: Observation, number: int) -> CalibrationError:
    """The error with the tensor and the sample that it is of."""
    return told(error, observation, f"tensor {observation.tensor} of sample {number}")


def told(error: CalibrationError, observation: Observation, what: str) -> CalibrationError:
    """The error with what it is of, and the way out."""
    if observation.whose:
        return CalibrationError(
            f"layer {observation.whose!r}: {what}: {error} (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{what}: {error}; check the model's weights and the preprocessing")
