"""Trial models of one target, run on a few samples beside the float model.

The noise of a part of the outputs in one sample is its relative power, sum of squared errors over
sum of squares: 10 dB of SQNR are 0.1 and, as long as it is small, that of two layers adds up. What
a sample loses is its amplitude, 1 at most, so that the one in which the model says most does not
speak for all. A sample in which it says less than on average is measured by the average: where a
detector sees nothing, a score of 0.02 for 0.01 is no loss, but where it sees something, one of 0.2
for 0.3 is. What a part loses is the sum over the samples by what they say::

    says    1.0  0.1  0.9  0.1    2.2 samples' worth: two photos hold something
    loses   0.1  0    0.1  0      0.09, not 0.05: there is nothing to keep in the others

Lists of detections whose length varies have no part that could be compared value by value. Of these
the figure of the task tells what is lost, as one sample: the amplitude that loses as much.

What a model says before it ranks: the scores that ArgMax or TopK reads at its end.

Numbers of classes hardly change with noise, until they do: of a few samples they tell no layers
apart. So a search hears the scores, of the float model and of every trial, in their place::

    ... -> Gemm -> logits -> ArgMax -> Cast -> class        heard: logits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deploy.errors import Calib8Error, ConfigError
from deploy.graph.edit import with_outputs
from deploy.method import Choices
from deploy.metrics.accuracy import Accuracy, Comparison, Said
from deploy.metrics.truth import form_of
from deploy.runtimes.ort import OrtSession
from deploy.tuning.downstream import Kept, behind
from deploy.tuning.search_samples import energies, energy, square

if TYPE_CHECKING:
    import onnx

    from deploy.metrics.tasks import Metric
    from deploy.metrics.truth import Form
    from deploy.targets.base import BuildRequest
    from deploy.tensors import Array


Powers = NDArray[np.float64]
Heard = tuple[Mapping[str, "Array"], Mapping[str, "Array"]]  # a sample, what the float model says
_HALF = 0.25  # of the usual power: half its amplitude, from which on a sample counts whole
_SILENT = 1e-12  # 120 dB: what is nearer than that is equal
LISTED = "what is found"
_MOST = 0.99  # lost of it: what is lost for sure would tell no layers apart
_LOUD = 1e6  # -60 dB, all lost: NaN, another shape


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative noise power of every part of the outputs in every sample.

    Attributes:
        parts: part -> [samples] noise power over signal power.
        said: part -> how many of the samples the float model says something in, as a share; 1 where
            that is not told.
        accuracy: figures of the same samples; None for a sum, or where nobody asks for them.
    """

    parts: Mapping[str, Powers]
    said: Mapping[str, float] = field(default_factory=dict)
    accuracy: Accuracy | None = None

    @property
    def lost(self) -> Mapping[str, float]:
        """What each part loses: 0 for nothing, 1 for all."""
        return {
            name: min(_lost(p) / self.said.get(name, 1.0), 1.0) for name, p in self.parts.items()
        }

    @property
    def part(self) -> str:
        """The part that suffers most."""
        found = self.lost
        return max(found, key=lambda name: found[name], default="")

    @property
    def worst(self) -> float:
        """What the part that suffers most loses: 0 for nothing, 1 for all."""
        return max(self.lost.values(), default=0.0)

    @property
    def mean(self) -> float:
        """What the parts lose in the mean: tells apart what is all lost in the worst of them."""
        found = self.lost.values()
        return sum(found) / len(found) if found else 0.0

    @property
    def db(self) -> float:
        """The same as the SQNR that loses as much in every sample."""
        return -20 * math.log10(max(-math.log1p(-min(self.worst, 1 - _SILENT)), 1e-6))

    def plus(self, other: Noise) -> Noise:
        """Two sources that know nothing of each other."""
        names = {**self.parts, **other.parts}
        nothing = np.zeros(1)
        parts = {n: self.parts.get(n, nothing) + other.parts.get(n, nothing) for n in names}
        return Noise(parts, {**self.said, **other.said})

    def times(self, share: float) -> Noise:
        """A share of the power."""
        return Noise({name: share * powers for name, powers in self.parts.items()}, self.said)

    def weighed(self, at: Noise) -> float:
        """What this little power would lose of the worst part, on top of `at`."""
        found = (
            float((_slope(at.parts[name]) * powers).mean()) / self.said.get(name, 1.0)
            for name, powers in self.parts.items()
        )
        return max(found, default=0.0)


def _lost(powers: Powers) -> float:
    """Mean over the samples of 1 - exp(-amplitude)."""
    return float((1 - np.exp(-np.sqrt(powers))).mean())


def _slope(powers: Powers) -> Powers:
    """How fast a sample's loss grows with its power."""
    amplitude = np.sqrt(np.maximum(powers, 1e-6))
    return np.asarray(np.exp(-amplitude) / (2 * amplitude))


class Prober:
    """Tries choices, each once, by what makes the trial model of a request.

    A trial that cannot be built or run is no choice: of it nothing is known, None, and why is kept.

    Attributes:
        tried: how many trial models were made.
        errors: of those that could not be run, in the order in which they were asked for.
        unjudged: how the metric failed, where it did.

    `heard` are the samples, each with what the float model says of it; `few` of them are enough
    for what is tried alone; `by_task` also compares the trials by the figures of the task, which a
    limit of loss needs, or by the user's `metric`; `ran` is called with the number of samples that
    are run.
    """

    def __init__(
        self,
        trial: Callable[[BuildRequest], onnx.ModelProto],
        request: BuildRequest,
        heard: Sequence[Heard],
        *,
        runs_here: bool,
        threads: int,
        few: int | None = None,
        by_task: bool = True,
        metric: Metric | None = None,
        progress: Callable[[], None] = lambda: None,
        ran: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._ran = ran
        self._progress = progress
        self._trial = trial
        self._request = request
        self._heard = list(heard)
        self._kernels = runs_here
        self._threads = threads
        self._few = len(self._heard) if few is None else few
        self._by_task = by_task
        self._metric = metric
        self._one_by_one = Lock()  # a user's function need not bear several threads
        self._known: dict[object, Noise | None] = {}
        wanted = [said for _, said in heard]
        self._form = form_of(wanted, inputs=[sample for sample, _ in heard])
        self._usual = usual_powers(self._form, self._told(self._heard))
        self._kept: Kept | Calib8Error | None = None
        self._stopped = False
        self.tried = 0
        self.errors: list[Calib8Error] = []
        self.unjudged: ConfigError | None = None

    def noises(self, trials: Iterable[Choices]) -> list[Noise | None]:
        """What several trials lose, run beside each other; None of one that could not be run."""
        return self._found([(one, _key(one)) for one in trials], self._tried, len(self._heard))

    def alone(self, trials: Sequence[Choices], int8: Sequence[Sequence[str]]) -> list[Noise | None]:
        """What few layers alone lose, on the few samples that say most.

        Only what is behind the int8 nodes is run; what comes in is kept from the float model.

        Args:
            trials: choices that keep all else in float.
            int8: nodes that each of them has in int8.
        """
        if self._kept is None:
            self._kept = self._kept_for(int8)
        work = partial(self._tried_alone, self._kept)
        return self._found([(one, ("alone", _key(one))) for one in trials], work, self._few)

    def _kept_for(self, int8: Sequence[Sequence[str]]) -> Kept | Calib8Error:
        """Values from which trials of few layers begin, or why there are none."""
        chosen = loudest(self._form, self._told(self._heard), self._few)
        self._ran(self._few)
        try:
            return Kept.of(self._request.model, int8, [self._heard[place] for place in chosen])
        except Calib8Error as error:
            return error

    def _found(
        self,
        trials: Sequence[tuple[Choices, object]],
        work: Callable[[Choices], Noise],
        samples: int,
    ) -> list[Noise | None]:
        new = {key: one for one, key in trials if key not in self._known}
        self.tried += len(new)
        self._ran(len(new) * samples)
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                made = [*pool.map(partial(self._of_one, work), new.values())]
            except BaseException:  # an interrupt of the user reaches this thread alone
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.errors += [one for one in made if isinstance(one, Calib8Error)]
        noises = [one if isinstance(one, Noise) else None for one in made]
        self._known |= dict(zip(new, noises, strict=True))
        return [self._known[key] for _, key in trials]

    def _tried(self, choices: Choices) -> Noise:
        return self._of(self._made(choices), self._heard, judged=self._by_task)

    def _tried_alone(self, kept: Kept | Calib8Error, choices: Choices) -> Noise:
        if isinstance(kept, Calib8Error):
            raise kept
        model = self._made(choices)
        same = kept.same(model)
        heard = [
            ({**sample, **values}, wanted)
            for (sample, wanted), values in zip(kept.heard, kept.values, strict=True)
        ]
        return self._of(behind(model, same, kept.values), heard, judged=False)

    def _of_one(self, work: Callable[[Choices], Noise], choices: Choices) -> Noise | Calib8Error:
        try:
            return work(choices)
        except Calib8Error as error:
            return error
        finally:
            self._progress()

    def _made(self, choices: Choices) -> onnx.ModelProto:
        return self._trial(self._request.adding(choices))

    def _of(self, model: onnx.ModelProto, heard: Sequence[Heard], *, judged: bool) -> Noise:
        """What a model loses on samples that may hold more than it reads."""
        session = OrtSession.open(
            model, threads=1, spin=False, keep=True, int8_kernels=self._kernels
        )
        read = [spec.name for spec in session.inputs]
        listed = not self._form.parts and self._form.task is not None
        figures = self._figures(session, heard[0][1]) if judged or listed else None
        powers, told = [], self._form.told
        for sample, wanted in heard:
            if self._stopped:
                break
            found = session.run({name: sample[name] for name in read})
            if figures is not None:
                figures = self._counted(figures, sample, wanted, found)
            both = told(wanted, sample, wanted), told(found, sample, wanted)
            powers.append(noise_powers(self._form, *both, self._usual))
        accuracy = figures.result() if figures is not None else None
        if listed:
            return Noise({LISTED: _as_power(accuracy)}, accuracy=accuracy)
        labels = [part.label for part in self._form.parts]
        said = said_of(self._form, self._told(heard), self._usual)
        return Noise(
            dict(zip(labels, np.array(powers).T, strict=True)),
            dict(zip(labels, said, strict=True)),
            accuracy=accuracy,
        )

    def _told(self, heard: Sequence[Heard]) -> list[Mapping[str, Array]]:
        """What the float model says in the samples, as parts are measured."""
        return [self._form.told(wanted, sample, wanted) for sample, wanted in heard]

    def _figures(self, session: OrtSession, wanted: Mapping[str, Array]) -> Comparison:
        return Comparison(Said(wanted), session, form=self._form, metric=self._metric)

    def _counted(
        self,
        figures: Comparison,
        sample: Mapping[str, Array],
        wanted: Mapping[str, Array],
        found: Mapping[str, Array],
    ) -> Comparison | None:
        """The figures with one more sample; None, all lost, where the metric fails on it."""
        if self._metric is None:
            figures.add(sample, wanted, found)
            return figures
        with self._one_by_one:
            try:
                figures.add(sample, wanted, found)
            except ConfigError as error:
                self.unjudged = self.unjudged or error
                return None
        return figures


def _as_power(accuracy: Accuracy | None) -> Powers:
    """The power that loses as much as is lost of the task; most of it where the metric failed."""
    lost = 1.0 if accuracy is None else 0.0
    if accuracy is not None and accuracy.task is not None:
        lost = max(accuracy.task.lost, 0.0)
    return np.array([math.log1p(-min(lost, _MOST)) ** 2])


def loudest(form: Form, outputs: Sequence[Mapping[str, Array]], most: int) -> list[int]:
    """Places of the samples with the greatest signal, each part by its own measure, in order."""
    found = energies(form, outputs)
    largest = found.max(axis=0)
    signal = (found / np.where(largest > 0, largest, 1.0)).sum(axis=1)
    return sorted(map(int, np.argsort(-signal, kind="stable")[:most]))


def usual_powers(form: Form, outputs: Sequence[Mapping[str, Array]]) -> list[float]:
    """Every part's power in a usual sample: of the mean amplitude; 0 where that is not finite."""
    found = []
    for part in form.parts:
        sizes = [math.sqrt(square(part.of(one[part.output]))) for one in outputs]
        mean = sum(sizes) / max(len(sizes), 1)
        found.append(mean * mean if math.isfinite(mean) else 0.0)
    return found


def said_of(
    form: Form, outputs: Sequence[Mapping[str, Array]], usual: Sequence[float]
) -> list[float]:
    """How much every part says in the samples, 1 where in each half as much as in a usual one.

    By power, so that samples that only vary all count, and those that hold next to nothing do not.
    A part that says nothing in any of them is measured by their number, 1.
    """
    found = []
    for part, power in zip(form.parts, usual, strict=True):
        sizes = [energy(part.of(one[part.output])) for one in outputs]
        shares = [min(size / (_HALF * power), 1.0) if power else 1.0 for size in sizes]
        found.append(sum(shares) / max(len(shares), 1) or 1.0)
    return found


def noise_powers(
    form: Form, wanted: Mapping[str, Array], found: Mapping[str, Array], usual: Sequence[float]
) -> list[float]:
    """Relative noise power of every part in one sample."""
    return [
        _power(part.of(wanted[part.output]), part.of(found[part.output]), least)
        for part, least in zip(form.parts, usual, strict=True)
    ]


def _power(wanted: Array, found: Array, usual: float) -> float:
    if wanted.shape != found.shape:
        return _LOUD
    signal = np.asarray(wanted, np.float64)
    power, noise = square(signal), square(signal - np.asarray(found, np.float64))
    if not (math.isfinite(power) and math.isfinite(noise)):
        return _LOUD
    if power == usual == 0:
        return 0.0 if noise == 0 else _LOUD
    return min(noise / max(power, usual), _LOUD)


def _key(choices: Choices) -> object:
    methods = tuple(sorted((tensor, m.label) for tensor, m in choices.methods.items()))
    method = choices.method.label if choices.method else ""
    return frozenset(choices.float_nodes), method, methods, choices.rounded


_RANKING = ("ArgMax", "TopK")
_BEHIND = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def ranked(model: onnx.ModelProto) -> dict[str, str]:
    """Output of numbers of classes or of the best scores -> the scores that it comes from.

    None where other outputs stand beside them: boxes are in the order of their scores.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for output in model.graph.output:
        node = makers.get(output.name)
        while node is not None and node.op_type in _BEHIND:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in _RANKING:
            found[output.name] = node.input[0]
    return found if len(found) == len(model.graph.output) else {}


def with_scores(
    model: onnx.ModelProto, heard: Sequence[Heard], *, every: bool, threads: int
) -> list[Heard]:
    """Samples with the scores that the float model ranks, in the place of what it makes of them.

    Args:
        model: the float model.
        heard: samples, each with the outputs of the model.
        every: whether these outputs are kept beside the scores.
        threads: of one inference.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    ends = ranked(model)
    scores = list(dict.fromkeys(ends.values()))
    session = OrtSession.open(with_outputs(model, scores), threads=threads, spin=False)
    found: list[Heard] = []
    for sample, said in heard:
        left = {name: value for name, value in said.items() if every or name not in ends}
        made = session.run(sample)
        found.append((sample, {**left, **{name: made[name] for name in scores}}))
    return found


def telling_scores(model: onnx.ModelProto, ends: Mapping[str, str]) -> onnx.ModelProto:
    """A trial model that gives the scores too, under the float model's names.

    Args:
        model: of a trial.
        ends: as `ranked` found them in the float model.
    """
    from onnx import helper

    told = with_outputs(model, ends.values())
    graph = told.graph
    made = {name for node in graph.node for name in node.output}
    for output, own in ranked(model).items():
        name = ends.get(output, own)
        if name not in made:  # the trial has it under another name
            graph.node.append(helper.make_node("Identity", [own], [name], name=f"{name}/told"))
            made.add(name)
    return told
