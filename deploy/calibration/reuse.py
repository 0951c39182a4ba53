"""Cache reuse: decide per observation whether a stored calibration still fits; update the cache.

::

    cache --> made from the same model, images, preprocessing, decoder? -- no --> recompute all
                 | yes
                 v
          each wanted observation: stored? -- yes --> does it depend on the order of the images,
                 | no                                 and did that change? -- no --> reuse; another
                 v                                      | yes                method only searches
          observe now, and store with the others <------'
          so that targets built in turn share one cache

Images are read for their digests beforehand only if there is a cache to check.

The text of the cache is the target's if it has its own form (TensorRT), else it lists every tensor
of the cleaned model that was searched.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrators.grids import symmetric_scale
from calibrators.statistics import Arrays, HasExtremes, HistogramOf
from deploy.calibration import DEFAULT_TRT_VERSION, store, trt_cache
from deploy.calibration import fingerprint as versions
from deploy.calibration.fingerprint import CALIB8, Fingerprint
from deploy.calibration.observation import (
    FOLDED,
    CalibrationSubject,
    Key,
    Observation,
    ObservedStatistics,
    with_needs,
)
from deploy.calibration.ranges import Ranges
from deploy.calibration.sample_checks import Outlier, StabilityRule
from deploy.calibration.store import Calibration
from deploy.errors import CacheError
from deploy.files import staging
from deploy.files.staging import Stage, stage_files

_SEARCH = {"method", "rule"}  # parts that affect the search only, not the statistics
_SOME = {"order"}  # parts that affect some observations only
_SHOWN = 5  # kinds of observations that a message lists
_MOST_VARIANTS = 4  # variants retained from older runs, besides the cleaned model


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Where the calibration is stored, and when it may be reused.

    Attributes:
        path: the cache file; its fingerprint and statistics lie next to it.
        require: fail instead of calibrating if the cache does not fit.
        trust: use a cache that has no fingerprint as it is.
        trt_version: TensorRT version that will read the cache; None for the default.
    """

    path: Path | None = None
    require: bool = False
    trust: bool = False
    refresh: bool = False
    trt_version: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.path is not None:  # may be text
            object.__setattr__(self, "path", Path(self.path))


def as_policy(cache: Path | str | CachePolicy | None) -> CachePolicy:
    """Return the policy of a cache path; of None, one that stores nothing."""
    if isinstance(cache, CachePolicy):
        return cache
    return CachePolicy(path=None if cache is None else Path(cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDecision:
    """Result of the cache check.

    Attributes:
        stored: the files if they fit, else None.
    """

    reason: str
    observed: ObservedStatistics
    missing: tuple[Observation, ...]
    stored: store.StoredCalibration | None = None

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """Outliers from the cache, of tensors that are not observed again."""
        again = {(o.variant.key, o.tensor) for o in self.missing}
        known = () if self.stored is None else self.stored.outliers
        return tuple(one for one in known if (one.variant, one.tensor) not in again)

    def combined_fingerprint(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the cache's and the new observations together.

        The order of images is the cache's unless an order-dependent observation was made, and the
        programs are the cache's unless any observation was made.
        """
        if self.stored is None:
            return fingerprint
        known = self.stored.fingerprint
        if not any(o.is_order_dependent for o in self.missing):
            fingerprint = replace(fingerprint, order=known.order)
        if not self.missing:
            fingerprint = replace(fingerprint, versions=known.versions, decoder=known.decoder)
        return fingerprint


def check_cache(
    policy: CachePolicy,
    fingerprint: Callable[[int | None], Fingerprint],
    wanted: Iterable[Observation],
    *,
    until: StabilityRule | None = None,
) -> CacheDecision:
    """Check the cache of `policy` for these observations with this fingerprint.

    `fingerprint`: computes the fingerprint of the first N images, or of all (None); called only if
    there is a cache, since it reads the images.
    `until`: stop rule of the observation; a cache fits if it stopped by the same rule and holds all
    observations.

    Raises:
        FeedError: an image cannot be read.
        CacheError: the cache must fit and does not.
    """
    listed = tuple(wanted)
    verdict = _judged(policy, fingerprint, listed, until)
    if verdict.missing and policy.path is not None and not policy.refresh:
        path = staging.find_saved_calibration(policy.path)
        kept = _judged(replace(policy, path=path), fingerprint, listed, until) if path else verdict
        if len(kept.missing) < len(verdict.missing):
            verdict = replace(kept, reason=f"of a run that did not end: {kept.reason}")
    if verdict.missing and policy.require:
        raise CacheError(
            f"the cache must fit (--require-cache), but {verdict.reason}; leave --require-cache"
            " out to calibrate anew"
        )
    return verdict


def make_fingerprint(subject: CalibrationSubject, manifest: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of calibrating a model by its method on the feed of a manifest."""
    images = dict(manifest)
    preprocess, order = images.pop("preprocess") or {}, images.pop("ordered_sha256")
    return Fingerprint(
        model=subject.identities,
        images=images,
        order=order,
        preprocess=preprocess,
        decoder=versions.decoder_identity(images["kind"]),
        program=CALIB8,
        rule=subject.statistic.key,
        method=subject.method.label,
        numbers=versions.arithmetic_versions(),
        versions=versions.program_versions(),
    )


def _judged(
    policy: CachePolicy,
    fingerprint: Callable[[int | None], Fingerprint],
    wanted: tuple[Observation, ...],
    until: StabilityRule | None,
) -> CacheDecision:
    def recompute(reason: str) -> CacheDecision:
        return CacheDecision(
            reason=reason, observed=ObservedStatistics({}), missing=with_needs(wanted)
        )

    path = policy.path
    if path is None:
        return recompute("no cache was asked for")
    if policy.refresh:
        return recompute(f"{path} is rebuilt, as requested")
    if not path.exists():
        return recompute(f"{path} does not exist yet")
    if not store.sidecars(path)[0].exists():
        return recompute(
            f"{path} has no fingerprint beside it, so nothing tells what it was made from"
            " (--trust-cache uses it as it is)"
        )
    try:
        stored = store.load_calibration(path)
    except CacheError as error:
        return recompute(str(error))
    if until is not None and stored.until != until:
        how = "of samples that were chosen beforehand" if stored.until is None else stored.until
        return recompute(f"{path.name} was observed {how}, not {until}")
    now = fingerprint(None if until is None else stored.count)
    changes = now.changes_since(stored.fingerprint)
    if all_of := [text for part, text in changes.items() if part not in _SEARCH | _SOME]:
        return recompute("; ".join(all_of))
    try:
        able = (o for o in with_needs(wanted) if not ("order" in changes and o.is_order_dependent))
        observed = stored.observed(able)
    except CacheError as error:
        return recompute(str(error))
    missing = observed.missing(with_needs(wanted, observed))
    others = {**stored.fingerprint.versions, "decoder": stored.fingerprint.decoder.get("library")}
    here = {**now.versions, "decoder": now.decoder.get("library")}
    words = [f"{name} {old}" for name, old in others.items() if old not in (None, here.get(name))]
    reason = _reason(path, stored, changes, missing) + (
        f"; it was made with {', '.join(words)}" if words else ""
    )
    if missing and until is not None:
        return recompute(f"{reason}; what is observed until it is stable is observed at once")
    how = "" if until is None else f"; it was observed {until}"
    return CacheDecision(reason=reason + how, observed=observed, missing=missing, stored=stored)


def _reason(
    path: Path,
    stored: store.StoredCalibration,
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


def update_cache(
    policy: CachePolicy,
    subject: CalibrationSubject,
    verdict: CacheDecision,
    calibration: Calibration,
    ranges: Ranges,
    *,
    text: bytes | None,
    stage: Stage | None = None,
) -> None:
    """Write the cache, unless the files are already up to date.

    `text`: TensorRT's text if a target has its own form; None for the text of every tensor.
    `stage`: staged files of a build, with which a cache in the same folder appears.
    """
    if policy.path is None:
        return
    path, stored = policy.path, verdict.stored
    carried: dict[Key, Arrays] = {}
    if stored is not None:
        header = trt_cache.parse(stored.text, origin="the cache").header
        if (
            not verdict.missing
            and stored.fingerprint == calibration.fingerprint
            and subject.trt_version in (None, header.version)
            and text in (None, stored.text)
        ):  # the files are up to date
            if (stage is not None and stage.staged_path(path)) or stored.path != path:
                _written(path, stage, lambda place: store.copy_stored(stored, place))
            return
        statistic = subject.statistic.key
        names = (k[1] for k in stored.keys if (k[0], k[2]) == (FOLDED, statistic))
        moved = stored.fingerprint.order != calibration.fingerprint.order
        # observations of targets that were built before
        older = [
            o for o in subject.histogram_observations(names) if not (moved and o.is_order_dependent)
        ]
        known = stored.observed(older).merged_with(calibration.observed)
        others = [k for k in stored.keys if not moved or k[2] == HistogramOf().key]
        carried = stored.read_arrays(_carried(others, known))
        calibration = replace(calibration, observed=known)
        ranges = Ranges(known, ranges.method, ranges.range_limits)
    words = text if text is not None else _plain_text(subject, ranges)
    _written(
        path,
        stage,
        lambda place: store.save_calibration(calibration, place, text=words, retained=carried),
    )


def _written(path: Path, stage: Stage | None, write: Callable[[Path], None]) -> None:
    """Stage the three files with the build's files, or publish them together."""
    if stage is not None and (staged := stage.staged_path(path)) is not None:
        write(staged)
        return
    with stage_files(path.parent) as own:
        write(own.temporary_folder / path.name)
        own.publish()


def _carried(keys: Iterable[Key], known: ObservedStatistics) -> list[Key]:
    """Return which keys of older runs to retain: of the cleaned model and the newest few variants.

    Each Ascend configuration is its own variant, so a cache would only grow while a user tries
    configurations.
    """
    others = [key for key in keys if key not in known]
    variants = [v for v in dict.fromkeys(key[0] for key in others) if v != FOLDED]
    retained = {FOLDED, *variants[-_MOST_VARIANTS:], *(key[0] for key in known)}
    return [key for key in others if key[0] in retained]


def _plain_text(subject: CalibrationSubject, ranges: Ranges) -> bytes:
    """Return TensorRT's text of every tensor of the cleaned model that was searched.

    If no target searches, the text holds the largest observed values. Names that the format cannot
    hold are left out; a target with its own text refuses them.
    """
    graph = subject.model.graph
    names = [value.name for value in graph.input] + [n for node in graph.node for n in node.output]
    found = ranges.find(
        o for o in subject.histogram_observations(names) if o.key in ranges.observed
    )
    minmax = all(scale.method == "minmax" for scale in found.scales.values())
    scales = found.symmetric or {
        tensor: symmetric_scale(max(-low, high))
        for (_, tensor, _), recorder in ranges.observed.items()
        if isinstance(recorder, HasExtremes)
        for low, high in [recorder.extremes]
        if low <= high  # else it never got a value
    }
    cache = trt_cache.from_scales(
        {name: scale for name, scale in scales.items() if trt_cache.can_hold_name(name)},
        version=subject.trt_version or DEFAULT_TRT_VERSION,
        algorithm=trt_cache.MINMAX if minmax else trt_cache.ENTROPY2,
    )
    return trt_cache.dump(cache)


def cached_trt_version(policy: CachePolicy) -> str | None:
    """Return the TensorRT version in an existing cache's first line, or None."""
    if policy.path is None or policy.refresh or not policy.path.is_file():
        return None
    try:
        return trt_cache.parse(
            store.read_cache_file(policy.path), origin=str(policy.path)
        ).header.version
    except CacheError:
        return None  # `check_cache` reports later why it cannot be used
