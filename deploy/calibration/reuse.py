"""Whether a kept calibration still fits, observation by observation, and why not.

::

    cache --> made from the same model, images, preprocessing, decoder? -- no --> all made anew
                 | yes
                 v
          each wanted observation: kept? -- yes --> its numbers show the order of the images, and
                 | no                               that changed? -- no --> taken; another method
                 v                                    | yes                 only searches again
          observed now, and kept beside the others <--'
          so that targets built in turn share one cache

Only where there is something to be judged are the images read for their digests beforehand.

Keeping a calibration: what is written beside what was there, and in which text.

The text of the cache is the target's own where one has a form of its own (TensorRT), else that of
every tensor of the cleaned model that was searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators.grids import symmetric_scale
from calibrators.statistics import Arrays, HistogramOf, Ranged
from deploy.calibration import DEFAULT_TRT_VERSION, store, trt_cache
from deploy.calibration import fingerprint as versions
from deploy.calibration.fingerprint import CALIB8, Fingerprint
from deploy.calibration.observation import FOLDED, Key, Observation, Observed, Subject, with_needs
from deploy.calibration.ranges import Ranges
from deploy.calibration.sample_checks import Outlier, Until
from deploy.calibration.store import Calibration
from deploy.errors import CacheError
from deploy.files import staging
from deploy.files.staging import Stage, staged

if TYPE_CHECKING:
    import numpy as np


_SEARCH = {"method", "rule"}  # parts that decide what is looked for, not what was seen
_SOME = {"order"}  # parts that decide for some observations alone
_SHOWN = 5  # kinds of observations that are told


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Where the calibration is kept, and when it may be used again.

    Attributes:
        path: the cache file; its fingerprint and statistics stand beside it.
        require: fail instead of calibrating where the cache does not fit.
        trust: use a cache that has no fingerprint, as it is.
        refresh: calibrate even where the cache fits.
        trt_version: TensorRT that is to read the cache; None for the default.
        force: write over a file that calib8 did not write.
    """

    path: Path | None = None
    require: bool = False
    trust: bool = False
    refresh: bool = False
    trt_version: str | None = None
    force: bool = False


def policy_of(cache: Path | str | CachePolicy | None) -> CachePolicy:
    """A policy, or that of a file alone; None keeps nothing."""
    if isinstance(cache, CachePolicy):
        return cache
    return CachePolicy(path=None if cache is None else Path(cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the cache gives.

    Attributes:
        reason: why the cache is used, or why not, in one sentence.
        observed: the wanted observations that it holds.
        missing: those that must be observed now.
        stored: the files that fit; None where none do.
    """

    reason: str
    observed: Observed
    missing: tuple[Observation, ...]
    stored: store.Stored | None = None

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """What the cache holds of samples that stand out, in what is not observed anew."""
        anew = {(o.variant.key, o.tensor) for o in self.missing}
        known = () if self.stored is None else self.stored.outliers
        return tuple(one for one in known if (one.variant, one.tensor) not in anew)

    def of_all(self, fingerprint: Fingerprint) -> Fingerprint:
        """The fingerprint of what the cache holds and what was observed beside it.

        Its order is that of the cache as long as nothing was observed that shows another one, and
        so are the programs that made it as long as nothing was observed at all.
        """
        if self.stored is None:
            return fingerprint
        known = self.stored.fingerprint
        if not any(o.by_order for o in self.missing):
            fingerprint = replace(fingerprint, order=known.order)
        if not self.missing:
            fingerprint = replace(fingerprint, versions=known.versions, decoder=known.decoder)
        return fingerprint


def judge(
    policy: CachePolicy,
    fingerprint: Callable[[int | None], Fingerprint],
    wanted: Iterable[Observation],
    *,
    until: Until | None = None,
) -> Verdict:
    """Look into the cache of `policy` for these observations of this fingerprint.

    Args:
        policy: where the cache is.
        fingerprint: of so many images in the feed's order, or of all; asked for only where there is
            a cache to be judged, since it reads them.
        wanted: the observations.
        until: where only so many samples are looked at as it takes, a cache fits that stopped by
            the same rule, and holds all.

    Raises:
        FeedError: an image cannot be read.
        CacheError: the cache must fit and does not.
    """
    listed = tuple(wanted)
    verdict = _judged(policy, fingerprint, listed, until)
    if verdict.missing and policy.path is not None and not policy.refresh:
        kept = _judged(replace(policy, path=staging.kept(policy.path)), fingerprint, listed, until)
        if len(kept.missing) < len(verdict.missing):
            verdict = replace(kept, reason=f"of a run that did not end: {kept.reason}")
    if verdict.missing and policy.require:
        raise CacheError(
            f"the cache must fit (--require-cache), but {verdict.reason}; leave --require-cache"
            " away to calibrate anew"
        )
    return verdict


def fingerprint_of(subject: Subject, manifest: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of calibrating this model by its method on the feed of this manifest."""
    images = dict(manifest)
    preprocess, order = images.pop("preprocess") or {}, images.pop("ordered_sha256")
    return Fingerprint(
        model=subject.identities,
        images=images,
        order=order,
        preprocess=preprocess,
        decoder=versions.decoder(images["kind"]),
        program=CALIB8,
        rule=subject.statistic.key,
        method=subject.method.label,
        numbers=versions.numbers(),
        versions=versions.programs(),
    )


def _judged(
    policy: CachePolicy,
    fingerprint: Callable[[int | None], Fingerprint],
    wanted: tuple[Observation, ...],
    until: Until | None,
) -> Verdict:
    def anew(reason: str) -> Verdict:
        return Verdict(reason=reason, observed=Observed({}), missing=with_needs(wanted))

    path = policy.path
    if path is None:
        return anew("no cache was asked for")
    if policy.refresh:
        return anew(f"{path} is to be made anew, as asked")
    if not path.exists():
        return anew(f"{path} does not exist yet")
    if not store.sidecars(path)[0].exists():
        return anew(
            f"{path} has no fingerprint beside it, so nothing tells what it was made from"
            " (--trust-cache uses it as it is)"
        )
    try:
        stored = store.load(path)
    except CacheError as error:
        return anew(str(error))
    if until is not None and stored.until != until:
        how = "of samples that were chosen beforehand" if stored.until is None else stored.until
        return anew(f"{path.name} was observed {how}, not {until}")
    now = fingerprint(None if until is None else stored.count)
    changes = now.changes_since(stored.fingerprint)
    if all_of := [text for part, text in changes.items() if part not in _SEARCH | _SOME]:
        return anew("; ".join(all_of))
    try:
        able = (o for o in with_needs(wanted) if not ("order" in changes and o.by_order))
        observed = stored.observed(able)
    except CacheError as error:
        return anew(str(error))
    missing = observed.missing(with_needs(wanted, observed))
    reason = _reason(path, stored, changes, missing) + _told(stored.fingerprint, now)
    if missing and until is not None:
        return anew(f"{reason}; what is observed until it is stable is observed at once")
    how = "" if until is None else f"; it was observed {until}"
    return Verdict(reason=reason + how, observed=observed, missing=missing, stored=stored)


def _reason(
    path: Path,
    stored: store.Stored,
    changes: Mapping[str, str],
    missing: tuple[Observation, ...],
) -> str:
    moved = sum(o.key in stored.keys for o in missing)
    if moved:
        return f"{changes['order']}, and {moved} observations go by it"
    if missing:
        kinds = list(dict.fromkeys(f"{o.variant.key}: {o.statistic.key}" for o in missing))
        more = f" and {len(kinds) - _SHOWN} more kinds" if len(kinds) > _SHOWN else ""
        return (
            f"{path.name} lacks {len(missing)} observations that these targets and this method"
            f" need ({'; '.join(kinds[:_SHOWN])}{more})"
        )
    if "method" in changes:
        return f"only {changes['method']}: searched again, the model was not run"
    return "model, images, preprocessing, method and versions are the same"


def _told(made: Fingerprint, now: Fingerprint) -> str:
    """Which other versions made what is kept, as a sentence's end."""
    others = {**made.versions, "decoder": made.decoder.get("library")}
    here = {**now.versions, "decoder": now.decoder.get("library")}
    words = [f"{name} {old}" for name, old in others.items() if old not in (None, here.get(name))]
    return f"; it was made with {', '.join(words)}" if words else ""


_MOST_VARIANTS = 4  # of older runs, beside the cleaned model


def keep(
    policy: CachePolicy,
    subject: Subject,
    verdict: Verdict,
    calibration: Calibration,
    ranges: Ranges,
    *,
    text: bytes | None,
    stage: Stage | None = None,
) -> None:
    """Write the cache, unless the files hold just that already.

    Args:
        policy: where it is kept.
        subject: the model.
        verdict: what the cache held.
        calibration: what is to be kept.
        ranges: what was found in it.
        text: TensorRT's, where a target has a form of its own; None for that of every tensor.
        stage: of a build, with whose files a cache in the same folder appears.
    """
    if policy.path is None:
        return
    path, stored = policy.path, verdict.stored
    if stage is not None and path.parent.resolve() != stage.folder.resolve():
        stage = None
    carried: dict[Key, Arrays] = {}
    if stored is not None:
        if _as_it_stands(stored, verdict, subject, calibration, text):
            if stage is not None or stored.path != path:
                _written(path, stage, lambda place: store.write(stored, place))
            return
        statistic = subject.statistic.key
        names = (k[1] for k in stored.keys if (k[0], k[2]) == (FOLDED, statistic))
        moved = stored.fingerprint.order != calibration.fingerprint.order
        # of targets that were built before
        older = [o for o in subject.histograms(names) if not (moved and o.by_order)]
        known = stored.observed(older).and_also(calibration.observed)
        others = [k for k in stored.keys if not moved or k[2] == HistogramOf().key]
        carried = stored.carried(_carried(others, known))
        calibration = replace(calibration, observed=known)
        ranges = Ranges(known, ranges.method, ranges.reaches)
    words = text if text is not None else _plain_text(subject, ranges)
    _written(path, stage, lambda place: store.save(calibration, place, text=words, carried=carried))


def _written(path: Path, stage: Stage | None, write: Callable[[Path], None]) -> None:
    """Let the three files appear with the build's, or together by themselves."""
    if stage is not None:
        write(stage.inside / path.name)
        return
    with staged(path.parent) as own:
        write(own.inside / path.name)
        own.publish()


def _carried(keys: Iterable[Key], known: Observed) -> list[Key]:
    """What to keep of older runs: all of the cleaned model, and of a few variants beside it.

    Each Ascend configuration is a variant of its own, so that a user who tries many would find a
    cache that only grows.
    """
    others = [key for key in keys if key not in known]
    beside = [v for v in dict.fromkeys(key[0] for key in others) if v != FOLDED]
    kept = {FOLDED, *beside[-_MOST_VARIANTS:], *(key[0] for key in known)}
    return [key for key in others if key[0] in kept]


def _as_it_stands(
    stored: store.Stored,
    verdict: Verdict,
    subject: Subject,
    calibration: Calibration,
    text: bytes | None,
) -> bool:
    """Whether there is nothing to write: the same observations, method, version and text."""
    header = trt_cache.parse(stored.text, origin="the cache").header
    return (
        not verdict.missing
        and stored.fingerprint == calibration.fingerprint
        and (subject.trt_version in (None, header.version))
        and (text is None or text == stored.text)
    )


def _plain_text(subject: Subject, ranges: Ranges) -> bytes:
    """TensorRT's text of every tensor of the cleaned model that was searched.

    Where no target searches by a method, of the largest values that were observed. What no line
    can hold is left out; a target whose text it is refuses it.
    """
    graph = subject.model.graph
    names = [value.name for value in graph.input] + [n for node in graph.node for n in node.output]
    found = ranges.of(o for o in subject.histograms(names) if o.key in ranges.observed)
    minmax = all(scale.method == "minmax" for scale in found.scales.values())
    scales = found.symmetric or _largest(ranges.observed)
    cache = trt_cache.from_scales(
        {name: scale for name, scale in scales.items() if trt_cache.holds(name)},
        version=subject.trt_version or DEFAULT_TRT_VERSION,
        algorithm=trt_cache.MINMAX if minmax else trt_cache.ENTROPY2,
    )
    return trt_cache.dump(cache)


def _largest(observed: Observed) -> dict[str, np.float32]:
    """Tensor -> largest |x| over 127, of whatever recorded its extremes."""
    return {
        tensor: symmetric_scale(max(-low, high))
        for (_, tensor, _), recorder in observed.items()
        if isinstance(recorder, Ranged)
        for low, high in [recorder.extremes]
    }


def version_in(policy: CachePolicy) -> str | None:
    """The version in the first line of the cache that is there."""
    if policy.path is None or policy.refresh or not policy.path.is_file():
        return None
    try:
        return trt_cache.parse(store.read(policy.path), origin=str(policy.path)).header.version
    except CacheError:
        return None  # whether it can be used is judged later, in words
