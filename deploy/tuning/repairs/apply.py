"""Trying repairs one after the other, each on what the ones before it left, keeping what helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.calibration.observation import each_once
from deploy.calibration.one_pass import observe
from deploy.calibration.ranges import Ranges
from deploy.errors import Calib8Error, ConfigError
from deploy.feed.parallel import Sample
from deploy.metrics.accuracy import Accuracy
from deploy.targets.base import BuildRequest
from deploy.targets.onnxruntime.target import OnnxRuntime
from deploy.terminal import phase
from deploy.tuning.repairs import REPAIRS, ROUNDING
from deploy.tuning.repairs.base import ByLayers, Making, Tried, settled
from deploy.tuning.repairs.output_rounding import trials_rounded
from deploy.tuning.repairs.repair_layers import layers_of
from deploy.tuning.repairs.sample_runs import Judge, harms, helps, worst

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from deploy.calibration.observation import Subject
    from deploy.calibration.reference import Judges
    from deploy.feed.samples import Feed
    from deploy.targets.base import Target
    from deploy.tensors import Array

_SAMPLES = 16  # images of which half make the after-repairs and half judge them
_ENOUGH = 4  # samples from which on they are shared out
_VALUES = 5_000_000  # of the samples that make a repair together; a large one gives many patches
Heard = tuple[Sample, Mapping[str, "Array"]]
_SAME_DB = 60.0  # SQNR that a repaired float model must have against the plain one
_CLEARLY_DB = 0.5  # what a before-repair must gain: it is judged with the ranges of few samples
STAND_IN = OnnxRuntime()  # where no target can be tried on a few samples


def few(judges: Judges | None) -> list[Heard]:
    """A few of the samples that judge, from all over them, with what the float model says."""
    if judges is None:
        return []
    part = judges.part
    return list(judges.heard(max(2, _SAMPLES * len(part) // max(part.count, 1))))


def trials(
    target: Target, request: BuildRequest, names: Sequence[str]
) -> Callable[[BuildRequest], onnx.ModelProto]:
    """What makes a target's trial models: with rounded weights, where that repair is tried.

    Args:
        target: the target.
        request: what it would be built from, other choices apart.
        names: of `REPAIRS`.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    if ROUNDING not in names:
        return target.trial
    samples = [sample for sample, _ in few(request.judges)]
    with _making(target, request, samples) as making:
        return trials_rounded(request, making)


@contextmanager
def _making(target: Target, request: BuildRequest, samples: Sequence[Sample]) -> Iterator[Making]:
    """What repairs are made from: of enough samples every other one, and few of those between."""
    layers, enough = len(layers_of(request.model)), len(samples) >= _ENOUGH
    made = samples[0::2][: _as_many(samples)] if enough else samples
    with phase("weights", layers, "layers", about=True) as step:
        yield Making(
            target=target,
            reference=request.model,
            samples=made,
            apart=samples[1::2][: -(-len(made) // 2)] if enough else (),
            threads=request.threads,
            progress=step,
        )


def _as_many(samples: Sequence[Sample]) -> int:
    """Samples that give patches enough for their size."""
    return max(2, _VALUES // max(sum(value.size for value in samples[0].values()), 1))


def repaired(
    target: Target,
    request: BuildRequest,
    names: Sequence[str],
    heard: Sequence[Heard],
) -> tuple[BuildRequest, list[Tried]]:
    """Try the after-repairs of these names for one target.

    Args:
        target: the target.
        request: what it would be built from.
        names: of `REPAIRS`; those that come before observing are passed over.
        heard: a few samples with their float outputs; half make the repairs, half judge them.

    Raises:
        Calib8Error: what the target raises for the unrepaired model.
    """
    after = [name for name in names if REPAIRS[name].before is None]
    if not after:
        return request, []
    with _making(target, request, [sample for sample, _ in heard]) as making:
        return _tried_out(request, making, after, heard)


def _tried_out(
    request: BuildRequest, making: Making, names: Sequence[str], heard: Sequence[Heard]
) -> tuple[BuildRequest, list[Tried]]:
    """What is left of a request after its repairs."""
    target, bench, tried = making.target, _Bench(request, making, heard), []
    for name in names:
        try:
            if name == ROUNDING and request.choices.rounded is False:
                one = _idle(name, target.name, "not kept, the plan has none")
            elif (repair := REPAIRS[name].by_layers) is not None:
                request, one = _by_layers(request, making, name, repair)
            else:
                request, one = bench.tried(request, name)
        except Calib8Error as error:
            one = _idle(name, target.name, f"not kept, {error}")
        tried.append(one)
    return _settled(request, making.reference), tried


def _by_layers(
    request: BuildRequest, making: Making, name: str, repair: ByLayers
) -> tuple[BuildRequest, Tried]:
    """What a repair makes of a request that judges itself, layer by layer."""
    target, made = making.target.name, repair(request, making)
    if made is None:
        return request, _idle(name, target)
    sentence = f"{REPAIRS[name].words}: {made[1]}, kept"
    return made[0], Tried(name=name, target=target, kept=True, sentence=sentence)


class _Bench:
    """Tries repairs for one target, each judged by the outputs on the samples of no repair."""

    def __init__(self, request: BuildRequest, making: Making, heard: Sequence[Heard]) -> None:
        judging, said = zip(*(heard[1::2] if len(heard) >= _ENOUGH else heard), strict=True)
        self._judge = Judge(request.model, judging, threads=request.threads, said=said)
        self._making = making
        self._known: tuple[BuildRequest, Accuracy] | None = None

    def tried(self, request: BuildRequest, name: str) -> tuple[BuildRequest, Tried]:
        """The best form of a request if it helps, else the request itself."""
        repair, target = REPAIRS[name].after, self._making.target
        assert repair is not None
        now = self._figures(request)
        forms = [(form, self._figures(form)) for form in repair(request, self._making)]
        if not forms:
            return request, _idle(name, target.name)
        form, after = max(forms, key=lambda one: worst(one[1]))
        kept = helps(now, after)
        self._known = (form, after) if kept else (request, now)
        return self._known[0], _told(name, target.name, now, after, kept=kept)

    def _figures(self, request: BuildRequest) -> Accuracy:
        if self._known is not None and self._known[0] is request:
            return self._known[1]
        target = self._making.target
        return self._judge.of(target.trial(request), kernels=".onnx" in target.engines)


def _settled(request: BuildRequest, reference: onnx.ModelProto) -> BuildRequest:
    """The request with its model's digest, where its constants were changed."""
    if request.model is reference:
        return request
    subject = replace(request.subject, loaded=settled(request.subject.loaded))
    return replace(request, subject=subject)


def refuse_trusted(names: Sequence[str]) -> None:
    """Refuse to change a model whose ranges are a foreign cache's.

    Raises:
        ConfigError: one of the repairs would change them.
    """
    asked = [name for name in names if REPAIRS[name].before is not None]
    if asked:
        raise ConfigError(
            f"a trusted cache holds the ranges of the model as it is, got repair"
            f" {', '.join(asked)}, which changes them; leave one of them away"
        )


@phase("repairs")
def prepared(
    targets: Sequence[Target],
    subject: Subject,
    names: Sequence[str],
    feed: Feed,
    *,
    folder: Path,
    threads: int,
) -> tuple[Subject, list[Tried]]:
    """Try the repairs of these names that change a model before it is observed.

    Each form is calibrated for each target on a few samples and its int8 model compared with the
    float outputs; of a repair's forms the best is kept, if some target gains and none loses.

    Args:
        targets: the targets; one that cannot be built for has no say.
        subject: the plain model.
        names: of `REPAIRS`; those that come after observing are passed over.
        feed: the calibration samples.
        folder: where the targets would write.
        threads: samples that run beside each other.

    Raises:
        ConfigError: a target observes the model as its file has it.
        FeedError: as the feed's samples.
    """
    before = {name: one for name in names if (one := REPAIRS[name]).before is not None}
    if not before:
        return subject, []
    asked = replace(subject, repairs=tuple(before))
    able = [target for target in targets if _demanded(target, subject)]
    for target in able:
        target.demand(asked)  # refuses here what it could not do with the repaired model
    field = _Field(able or [STAND_IN], subject, feed, folder, threads)
    now, tried = field.figures(subject), []
    for name, repair in before.items():
        assert repair.before is not None
        forms = [
            (_with_model(subject, name, model), field.figures(_with_model(subject, name, model)))
            for model in repair.before(subject.model, field.samples, threads)
            if field.float_db(model) >= _SAME_DB
        ]
        if not forms:
            tried.append(_idle(name))
            continue
        form, after = max(forms, key=lambda one: _gain(now, one[1]))
        kept = set(now) <= set(after) and _all_help(now, after)
        tried += [_told(name, t, now[t], after[t], kept=kept) for t in now if t in after]
        if kept:
            subject, now = form, after
    if subject.repairs:
        subject = replace(subject, loaded=settled(subject.loaded))
    return subject, tried


def _demanded(target: Target, subject: Subject) -> bool:
    """Whether a target can be built for at all; why not is told when it is its turn."""
    try:
        target.demand(subject)
    except Calib8Error:
        return False
    return True


def _with_model(subject: Subject, name: str, model: onnx.ModelProto) -> Subject:
    loaded = replace(subject.loaded, model=model)
    return replace(subject, loaded=loaded, repairs=(*subject.repairs, name))


def told(tried: Iterable[Tried]) -> list[str]:
    """What was tried, in sentences; the target is named where it is one of several."""
    listed = list(tried)
    several = len({one.target for one in listed if one.target}) > 1
    said = [f"{t.target}: {t.sentence}" if several and t.target else t.sentence for t in listed]
    if any(t.kept and REPAIRS[t.name].before is not None for t in listed):
        said.append("a calibration cache goes with the float model as it was repaired")
    return said


class _Field:
    """Trial builds of forms of one model on a few samples, for several targets."""

    def __init__(
        self,
        targets: Sequence[Target],
        subject: Subject,
        feed: Feed,
        folder: Path,
        threads: int,
    ) -> None:
        self.samples = feed.first(max(2, _SAMPLES // 2 * len(feed) // max(feed.count, 1)))
        self._targets = list(targets)
        self._feed, self._folder, self._threads = feed, folder, threads
        self._judge = Judge(subject.model, self.samples, threads=threads)

    def float_db(self, model: onnx.ModelProto) -> float:
        """SQNR of a float model's worst output against the plain one's."""
        return worst(self._judge.of(model, kernels=True))

    def figures(self, subject: Subject) -> dict[str, Accuracy]:
        """Target -> figures of its int8 model; a target that fails on so few samples is left out.

        Where all do, ONNX Runtime stands in for them.

        Raises:
            Calib8Error: so does ONNX Runtime.
        """
        found, errors = {}, []
        short = replace(subject, samples=len(self.samples))
        for target in self._targets:
            try:
                model = target.trial(self._request(target, short))
                found[target.name] = self._judge.of(model, kernels=".onnx" in target.engines)
            except Calib8Error as error:
                errors.append(error)
        if found:
            return found
        if self._targets == [STAND_IN]:
            raise errors[0]
        self._targets = [STAND_IN]
        return self.figures(subject)

    def _request(self, target: Target, subject: Subject) -> BuildRequest:
        observed = observe(
            each_once({target.name: target.demand(subject)}), self.samples, threads=self._threads
        )
        return BuildRequest(
            subject=subject,
            folder=self._folder,
            ranges=Ranges(observed, subject.method, subject.reaches),
            feed=self._feed,
            manifest={},
            threads=self._threads,
        )


def _gain(now: Mapping[str, Accuracy], after: Mapping[str, Accuracy]) -> float:
    """Mean over the targets of what the worst output gains, in dB."""
    gains = [worst(after[t]) - worst(now[t]) for t in now if t in after]
    return -math.inf if any(math.isnan(gain) for gain in gains) else sum(gains) / len(gains)


def _all_help(now: Mapping[str, Accuracy], after: Mapping[str, Accuracy]) -> bool:
    """Whether some target is helped, and none harmed."""
    return any(helps(now[t], after[t], least=_CLEARLY_DB) for t in now) and not any(
        harms(now[t], after[t]) for t in now
    )


def _told(name: str, target: str, now: Accuracy, after: Accuracy, *, kept: bool) -> Tried:
    old, new = worst(now), worst(after)
    word = "kept" if kept else "not kept"
    return Tried(
        name=name,
        target=target,
        before_db=old,
        after_db=new,
        kept=kept,
        sentence=f"{REPAIRS[name].words}: worst part {old:.1f} -> {new:.1f} dB, {word}",
    )


def _idle(name: str, target: str = "", why: str = "nothing to repair") -> Tried:
    return Tried(
        name=name,
        target=target,
        kept=False,
        sentence=f"{REPAIRS[name].words}: {why}",
    )
