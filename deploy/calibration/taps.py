"""Models whose inner tensors can be read, and who reads them.

::

    sample --> tap of a variant --> tensor --> recorder, recorder
                               |--> tensor --> recorder
                               '--> tensor --> waits for its turn: the order shows in it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.errors import CalibrationError
from calibrators.histogram import Histogram
from calibrators.statistics import Recorder
from deploy.calibration.blocked import tapped
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.peaks import Peaks, largest
from deploy.calibration.subject import FOLDED
from deploy.errors import BackendError
from deploy.feed.parallel import Sample

Keep = Callable[[int, Sample], None]
Waiting = tuple[Observation, NDArray[np.float32]]
Held = Mapping[str, Sequence[tuple[Observation, Recorder | None]]]
"""Tensor -> who reads it, with the recorder of a worker; None where values wait for their turn."""


class Tap:
    """A model whose inner tensors can be read: a session with them as outputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        tensors: list[str],
        *,
        threads: int | None = 1,
        in_any_order: Collection[str] = (),
    ) -> None:
        self._inputs = {i.name for i in model.graph.input}
        self._fed = [name for name in tensors if name in self._inputs]
        self._made = [name for name in tensors if name not in self._inputs]
        self._open = tapped(model, self._made, threads=threads, in_any_order=in_any_order)

    def run(
        self, sample: Sample, keep: Callable[[Sample], None] | None = None
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Run one sample; gives each watched tensor's name and value, or its values in any order.

        `keep` gets the model's own outputs, and may get more.
        """
        try:
            values = self._open.session.run(sample)
        except BackendError as error:
            raise BackendError(f"could not run a sample: {error}") from error
        if keep is not None:
            keep(values)
        for name in self._fed:
            yield name, np.asarray(sample[name], np.float32)
        for name in self._made:  # let go of each tensor once it is counted
            blocked = self._open.blocked.get(name)
            if blocked is None:
                yield name, values.pop(name)
            else:
                yield name, blocked.values(values.pop(blocked.output))


@dataclass(frozen=True, slots=True)
class Line:
    """A variant in the pass: its session, who reads which tensor, how many samples it is run on."""

    key: str
    tap: Tap
    readers: Mapping[str, Sequence[Observation]]
    limit: int | None

    def held_by(self, part: Mapping[Observation, Recorder]) -> Held:
        """The readers with their recorders, looked up once and not for every sample."""
        return {name: [(o, part.get(o)) for o in read] for name, read in self.readers.items()}

    def run(
        self,
        held: Held,
        peaks: Peaks | None,
        number: int,
        sample: Sample,
        keep: Keep | None,
    ) -> Iterator[Waiting]:
        """Run one sample, record what has no order, and give what has."""
        kept = None if keep is None or self.key != FOLDED else partial(keep, number)
        for name, value in self.tap.run(sample, kept):
            amax: float | None = None
            for observation, recorder in held[name]:
                if not reaches(observation.statistic.samples, number):
                    continue
                if recorder is None:
                    yield observation, value
                    continue
                record(recorder, observation, number, value)
                if isinstance(recorder, Histogram):  # which had to find it anyway
                    amax = recorder.latest
            if peaks is not None:
                peaks.add((self.key, name), number, largest(value) if amax is None else amax)


def lines_of(observations: Sequence[Observation], known: Observed) -> list[Line]:
    """One line for each variant, in the order in which they are first wanted."""
    lines = []
    for variant in dict.fromkeys(o.variant for o in observations):
        own = [o for o in observations if o.variant == variant]
        readers: dict[str, list[Observation]] = {}
        for observation in own:
            readers.setdefault(observation.tensor, []).append(observation)
        loose = [t for t, read in readers.items() if not any(o.statistic.ordered for o in read)]
        tap = Tap(variant.make(known), list(readers), in_any_order=loose)
        lines.append(Line(variant.key, tap, readers, limit_of(own)))
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
        what = f"tensor {observation.tensor} of sample {number}"
        raise told(error, observation, what) from error


def told(error: CalibrationError, observation: Observation, what: str) -> CalibrationError:
    """The error with what it is of, and the way out."""
    if observation.whose:
        return CalibrationError(
            f"layer {observation.whose!r}: {what}: {error} (to leave it in float, use --keep-float)"
        )
    return CalibrationError(f"{what}: {error}; check the model's weights and the preprocessing")
