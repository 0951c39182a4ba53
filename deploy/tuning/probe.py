"""Trial models of one target, run on a few samples beside the float model.

The noise of a part of the outputs is its relative power, sum of squared errors over sum of
squares, so that 10 dB of SQNR are 0.1 and, as long as it is small, that of two layers adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.calibration.choices import Choices
from deploy.errors import Calib8Error
from deploy.metrics.accuracy import Accuracy, Comparison
from deploy.metrics.form import form_of
from deploy.ort import OrtSession

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest, Target
    from deploy.tensors import Array

_SILENT = 1e-12  # 120 dB: what is nearer than that is equal


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative noise power of every part of the outputs.

    Attributes:
        parts: part -> noise power over signal power.
        accuracy: the figures it comes from; None for a sum.
    """

    parts: Mapping[str, float]
    accuracy: Accuracy | None = None

    @property
    def worst(self) -> float:
        """That of the part that suffers most."""
        return max(self.parts.values(), default=0.0)

    @property
    def part(self) -> str:
        """The part that suffers most."""
        return max(self.parts, key=self.parts.__getitem__, default="")

    @property
    def amplitude(self) -> float:
        """Error over signal, not squared."""
        return math.sqrt(self.worst)

    @property
    def blended(self) -> float:
        """Mean over the parts of the error's amplitude, 1 at most: tells apart what is all lost."""
        if not self.parts:
            return 0.0
        lost = [1 - math.exp(-math.sqrt(power)) for power in self.parts.values()]
        return sum(lost) / len(lost)

    @property
    def db(self) -> float:
        """SQNR of the worst part."""
        return decibel(self.worst)

    def plus(self, other: Noise) -> Noise:
        """Two sources that know nothing of each other."""
        names = {**self.parts, **other.parts}
        return Noise({n: self.parts.get(n, 0.0) + other.parts.get(n, 0.0) for n in names})


def decibel(power: float) -> float:
    """SQNR of a relative noise power."""
    return -10 * math.log10(max(power, _SILENT))


class Prober:
    """Tries choices for one target, each once.

    Attributes:
        tried: how many trial models were run.
    """

    def __init__(
        self,
        target: Target,
        request: BuildRequest,
        samples: Sequence[Mapping[str, Array]],
        *,
        runs_here: bool,
        threads: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._progress = progress
        self._target = target
        self._request = request
        self._samples = samples
        self._kernels = runs_here
        self._threads = threads
        self._known: dict[object, Noise] = {}
        self._reference = OrtSession.open(request.model, threads=1, spin=False)
        self._wanted = [self._reference.run(sample) for sample in samples]
        self._form = form_of(self._wanted, inputs=samples)
        self.tried = 0

    def noise(self, choices: Choices) -> Noise:
        """What one trial loses."""
        return self.noises([choices])[0]

    def noises(self, trials: Iterable[Choices]) -> list[Noise]:
        """What several trials lose, run beside each other."""
        listed = list(trials)
        new = {key: one for one in listed if (key := _key(one)) not in self._known}
        self.tried += len(new)
        with ThreadPoolExecutor(self._threads) as pool:
            self._known |= dict(zip(new, pool.map(self._tried, new.values()), strict=True))
        return [self._known[_key(one)] for one in listed]

    def _tried(self, choices: Choices) -> Noise:
        try:
            model = self._target.trial(self._request.choosing(choices))
            session = OrtSession.open(model, threads=1, spin=False, int8_kernels=self._kernels)
            figures = Comparison(self._reference, session, form=self._form)
            for sample, wanted in zip(self._samples, self._wanted, strict=True):
                figures.add(sample, wanted, session.run(sample))
        except Calib8Error:  # a trial that cannot be built is no choice
            return Noise({"": math.inf})
        finally:
            self._progress()
        return noise_of(figures.result())


def noise_of(accuracy: Accuracy) -> Noise:
    """The figures as relative noise; an output that is not finite is nothing but noise."""
    return Noise({part.label: _power(part.sqnr_db) for part in accuracy.parts}, accuracy=accuracy)


def _power(sqnr_db: float) -> float:
    if math.isnan(sqnr_db):
        return math.inf
    return 10 ** (-sqnr_db / 10) if math.isfinite(sqnr_db) else (0.0 if sqnr_db > 0 else math.inf)


def _key(choices: Choices) -> object:
    methods = tuple(sorted((tensor, m.label) for tensor, m in choices.methods.items()))
    method = choices.method.label if choices.method else ""
    return frozenset(choices.float_nodes), method, methods
