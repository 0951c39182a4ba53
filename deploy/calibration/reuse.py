"""Cache reuse: decide per observation whether a stored calibration still fits; update the cache.

::

    cache --> made from the same model, images, preprocessing, decoder? -- no --> recompute all
                 | yes
                 v
          each observation: is it stored? -- yes --> does it depend on the order of the images,
                 | no                                and did that change? -- no --> reuse; another
                 v                                      | yes                method only searches
          observe now, and store with the others <------'
          so that targets built in turn share one cache

Images are read for their digests beforehand only if there is a cache to check.

The text of the cache is the target's if it has its own form (TensorRT), else it lists every tensor
of the cleaned model that was searched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
from deploy.errors import CacheError, ConfigError, counted, list_first
from deploy.files import staging
from deploy.files.staging import Stage, stage_files

# parts of the fingerprint whose change leaves statistics valid: those of the search all of them,
# the order of the images those that do not depend on it
_CHANGEABLE_PARTS = {"method", "rule", "order"}
NO_CACHE = "does not exist yet"  # end of the reason for a first calibration
_MAX_LISTED = 5  # kinds of observations that a message lists
_MAX_VARIANTS = 4  # variants retained from older runs, besides the cleaned model


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Where the calibration is stored, and when it may be reused.

    Attributes:
        path: the cache file; its fingerprint and statistics lie next to it. None stores nothing.
        source: cache of another build, which is read in place of `path` and never written.
        require: fail instead of calibrating if the cache does not fit.
        trust: use a cache that has no fingerprint as it is.
        refresh: calibrate even if the cache fits.
        trt_version: TensorRT version that will read the cache; None for the default.
        force: replace files that calib8 did not write.

    Raises:
        CacheError: `trt_version` is not of the form X.Y.Z.
        ConfigError: the cache is both to be used and to be made again.
    """

    path: Path | None = None
    source: Path | None = None
    require: bool = False
    trust: bool = False
    refresh: bool = False
    trt_version: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.path is not None:  # may be text
            object.__setattr__(self, "path", Path(self.path))
        if self.trt_version is not None:  # now, not when a calibration is to be written
            trt_cache.version_label(self.trt_version)
        if self.refresh and self.reuse_flag:
            raise ConfigError(
                f"--refresh calibrates again and {self.reuse_flag} uses the cache; leave one of"
                " them out"
            )

    @property
    def read_path(self) -> Path | None:
        """The cache file that is read."""
        return self.source or self.path

    @property
    def reuse_flag(self) -> str:
        """The option by which the cache is only read; "" if it may be written."""
        if self.require:
            return "--require-cache"
        return "--trust-cache" if self.trust else ""


def as_policy(cache: Path | str | CachePolicy | None) -> CachePolicy:
    """Return the policy of a cache path; for None, one that stores nothing."""
    if isinstance(cache, CachePolicy):
        return cache
    return CachePolicy(path=None if cache is None else Path(cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDecision:
    """Result of the cache check.

    Attributes:
        reason: why the cache is used or not, as a clause.
        observed: the statistics that are reused.
        missing: the observations to make.
        stored: the files if they fit, else None.
    """

    reason: str
    observed: ObservedStatistics
    missing: tuple[Observation, ...]
    stored: store.StoredCalibration | None = None

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """Outliers from the cache, of tensors that are not observed again."""
        if self.stored is None:
            return ()
        missing_tensors = {
            (observation.variant.key, observation.tensor) for observation in self.missing
        }
        return tuple(
            outlier
            for outlier in self.stored.outliers
            if (outlier.variant, outlier.tensor) not in missing_tensors
        )

    def combined_fingerprint(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the cache's and the new observations.

        The order of images is the cache's unless an order-dependent observation was made, and the
        programs are the cache's unless any observation was made.
        """
        if self.stored is None:
            return fingerprint
        stored = self.stored.fingerprint
        if not any(observation.is_order_dependent for observation in self.missing):
            fingerprint = replace(fingerprint, order=stored.order)
        if not self.missing:
            fingerprint = replace(fingerprint, versions=stored.versions, decoder=stored.decoder)
        return fingerprint


def check_cache(
    policy: CachePolicy,
    make_fingerprint: Callable[[int | None], Fingerprint],
    observations: Iterable[Observation],
    *,
    stop_rule: StabilityRule | None = None,
) -> CacheDecision:
    """Decide which observations are reused from the cache, and which are missing.

    The first cache is `policy.source`, that of another build; if that is None, `policy.path`, the
    one that the run writes. If it lacks some, other caches are tried, and the one that lacks least
    is used.

    Args:
        policy: where the cache is, and when it may be reused.
        make_fingerprint: number of images -> fingerprint of the first so many; None -> that of all.
            Called only if there is a cache, since it reads the images.
        observations: what the targets need.
        stop_rule: rule that ends the observation early; a cache then fits only if it was ended by
            the same rule and holds all observations. None to observe all images.

    Raises:
        FeedError: an image cannot be read.
        CacheError: the cache must fit and does not.
    """
    observations = tuple(observations)
    decision = _check_one_cache(policy, make_fingerprint, observations, stop_rule)
    if decision.missing and policy.path is not None and not policy.refresh:
        for other_path, origin in _list_other_caches(policy.path, policy.source):
            other_policy = replace(policy, path=other_path, source=None)
            other_decision = _check_one_cache(
                other_policy, make_fingerprint, observations, stop_rule
            )
            if len(other_decision.missing) < len(decision.missing):
                decision = replace(other_decision, reason=f"{origin}{other_decision.reason}")
    if decision.missing and policy.require:
        raise CacheError(
            f"the cache must fit (--require-cache), but {decision.reason}; leave --require-cache"
            " out to calibrate again"
        )
    return decision


def _list_other_caches(path: Path, source: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield (path, text on its origin) of other caches to try if that of a run lacks something.

    Args:
        path: the cache that the run writes.
        source: cache of another build, which was read in place of `path`; None if `path` was read.
    """
    if source is not None:
        yield path, ""
    # a build that failed after its calibration saved it elsewhere
    if saved_path := staging.find_saved_calibration(path):
        yield saved_path, "of a run that did not end: "


def make_fingerprint(subject: CalibrationSubject, manifest: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a calibration: the model, its method, and the images.

    `manifest`: description of the images by `Feed.manifest`, with their digests and preprocessing.
    """
    images = dict(manifest)
    preprocess = images.pop("preprocess") or {}
    order = images.pop("ordered_sha256")
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


def _check_one_cache(
    policy: CachePolicy,
    make_fingerprint: Callable[[int | None], Fingerprint],
    observations: tuple[Observation, ...],
    stop_rule: StabilityRule | None,
) -> CacheDecision:
    """Decide which observations one cache holds; if it cannot be used, all are missing.

    Args:
        policy: where the cache is, and when it may be reused.
        make_fingerprint: number of images -> fingerprint of the first so many; None -> that of all.
        observations: what the targets need.
        stop_rule: rule that ends the observation early; None to observe all images.
    """
    try:
        stored = _load_cache(policy, stop_rule)
        # with a stop rule, the cache was made of the first images only: the same are compared
        image_count = None if stop_rule is None else stored.count
        fingerprint = make_fingerprint(image_count)
        return _match_cache(stored, fingerprint, observations, stop_rule)
    except CacheError as error:  # says why the cache cannot be used
        missing = with_needs(observations)
        return CacheDecision(reason=str(error), observed=ObservedStatistics(), missing=missing)


def _load_cache(policy: CachePolicy, stop_rule: StabilityRule | None) -> store.StoredCalibration:
    """Return the stored calibration; raise CacheError if there is none that can be used.

    `stop_rule`: the rule by which this run ends the observation early; None to observe all images.
    """
    path = policy.read_path
    if path is None:
        raise CacheError("no cache was asked for")
    if policy.refresh:
        raise CacheError(f"{policy.path} is rebuilt, as requested")
    if not path.exists():
        raise CacheError(f"{path} {NO_CACHE}")
    json_path, _ = store.sidecars(path)
    if not json_path.exists():
        raise CacheError(
            f"{path} has no fingerprint beside it, so nothing tells what it was made from"
            " (--trust-cache uses it as it is)"
        )
    stored = store.load_calibration(path)
    # without a rule nothing is checked here: the caller compares the fingerprint of all images,
    # which that of a cache of fewer images does not equal
    if stop_rule is not None and stored.stop_rule != stop_rule:
        rule = stored.stop_rule or "of samples that were chosen beforehand"
        raise CacheError(f"{path.name} was observed {rule}, not {stop_rule}")
    return stored


def _match_cache(
    stored: store.StoredCalibration,
    fingerprint: Fingerprint,
    observations: tuple[Observation, ...],
    stop_rule: StabilityRule | None,
) -> CacheDecision:
    """Return which observations the stored cache holds for this run, which it lacks, and why.

    An observation is a statistic of a tensor in a variant, a form of the model. A variant may be
    built from other observations, its needs.

    Args:
        stored: the cache.
        fingerprint: model, images, options and versions of this run.
        observations: what the targets need.
        stop_rule: rule that ends the observation early; None to observe all samples.

    Raises:
        CacheError: it was made from another model or other images; or, with a stop rule, it lacks
            an observation.
    """
    changes = fingerprint.changes_since(stored.fingerprint)  # part -> how it changed, as a clause
    invalidating_changes = [
        clause for part, clause in changes.items() if part not in _CHANGEABLE_PARTS
    ]
    if invalidating_changes:
        raise CacheError("; ".join(invalidating_changes))

    # look up the observations, and the needs of their variants, in the cache
    usable_observations: Iterable[Observation] = with_needs(observations)
    if "order" in changes:  # the images have another order
        usable_observations = [
            observation for observation in usable_observations if not observation.is_order_dependent
        ]
    observed = stored.observed(usable_observations)
    # now without the needs of variants of which all observations are stored: they are not run
    missing = observed.missing(with_needs(observations, observed))
    reason = _describe_match(stored, changes, missing)
    reason += _describe_other_versions(stored.fingerprint, fingerprint)
    if stop_rule is not None:
        # the rule may end the observation of what is missing at another number of samples than that
        # of the cache, so all is observed again
        if missing:
            reason += "; what is observed until it is stable is observed at once"
            raise CacheError(reason)
        reason += f"; it was observed {stop_rule}"
    return CacheDecision(reason=reason, observed=observed, missing=missing, stored=stored)


def _describe_match(
    stored: store.StoredCalibration,
    changes: Mapping[str, str],
    missing: tuple[Observation, ...],
) -> str:
    """Return what is reused of a cache that fits, and what is not, as a clause for the user.

    Args:
        stored: the cache.
        changes: part of the fingerprint -> how it changed, as a clause.
        missing: observations to make.
    """
    # an observation is stored and yet missing only if it depends on the order of the images, and
    # that changed: then `changes` has the part "order" (`_match_cache`)
    order_dependent_count = sum(observation.key in stored.keys for observation in missing)
    if order_dependent_count:
        verb = "goes" if order_dependent_count == 1 else "go"
        return (
            f"{changes['order']}, and {counted(order_dependent_count, 'observation')} {verb} by it"
        )
    if missing:
        kinds = dict.fromkeys(
            f"{observation.variant.key}: {observation.statistic.key}" for observation in missing
        )
        return (
            f"{stored.path.name} lacks {counted(len(missing), 'observation')} that these targets"
            f" and this method need ({list_first(list(kinds), _MAX_LISTED)})"
        )
    if "method" in changes:
        return f"only {changes['method']}: searched again, the model was not run"
    return "model, images and preprocessing are the same"


def _describe_other_versions(stored: Fingerprint, current: Fingerprint) -> str:
    """Return which programs made the cache, as a clause, if they are other versions; else ""."""
    # program -> its version; None for the decoder of arrays, which are not decoded
    stored_versions = {**stored.versions, "decoder": stored.decoder.get("library")}
    current_versions = {**current.versions, "decoder": current.decoder.get("library")}
    other_programs = []
    for name, version in stored_versions.items():
        if version not in (None, current_versions.get(name)):
            other_programs.append(f"{name} {version}")
    if not other_programs:
        return ""
    return f"; it was made with {', '.join(other_programs)}"


def update_cache(
    policy: CachePolicy,
    subject: CalibrationSubject,
    decision: CacheDecision,
    calibration: Calibration,
    ranges: Ranges,
    *,
    cache_text: bytes | None,
    stage: Stage | None,
) -> None:
    """Write the cache, unless its files are already up to date.

    Observations of earlier runs that still hold stay in it, so that targets which are built one
    after the other share a cache.

    Args:
        policy: where the cache is; nothing is written if it has no path.
        subject: the model to calibrate.
        decision: what the cache held before this run.
        calibration: all observations that this run uses, stored or new.
        ranges: the ranges in them.
        cache_text: the text file of the cache, if a target prescribes it (TensorRT); None for a
            text with the scale of every tensor.
        stage: the files of a build, which appear together at its end. A cache in the same folder is
            one of them. None outside a build.
    """
    path = policy.path
    if path is None:
        return
    # where a build stages the cache; None if the build does not publish it, or outside a build
    staged_path = None if stage is None else stage.staged_path(path)
    stored = decision.stored
    if stored is not None and _is_up_to_date(
        decision, stored, calibration, subject.trt_version, cache_text
    ):
        # even so it is copied in two cases: into the stage of a build, whose manifest lists it; and
        # from where an earlier build that failed saved it
        if staged_path is not None or stored.path != path:
            _write_cache_files(path, staged_path, partial(store.copy_stored, stored))
        return

    retained: dict[Key, Arrays] = {}  # stored observations that are copied as they are
    if stored is not None:
        calibration, retained = _add_stored(subject, stored, calibration)
        # the text has the ranges of stored histograms too
        ranges = Ranges(calibration.observed, ranges.method, ranges.range_limits)
    if cache_text is None:
        cache_text = _make_cache_text(subject, ranges)
    save = partial(store.save_calibration, calibration, cache_text=cache_text, retained=retained)
    _write_cache_files(path, staged_path, save)


def _add_stored(
    subject: CalibrationSubject, stored: store.StoredCalibration, calibration: Calibration
) -> tuple[Calibration, dict[Key, Arrays]]:
    """Add to a calibration what the stored cache holds and this run did not observe.

    A key of an observation is (variant of the model, tensor, statistic).

    Returns:
        The calibration, with the stored histograms that the method searches for ranges, since the
        text of the cache has the ranges of their tensors too. And key -> arrays of the stored
        observations that are not in this calibration but stay in the cache (`_select_retained`);
        they are copied without being parsed.
    """
    keys = list(stored.keys)
    if stored.fingerprint.order != calibration.fingerprint.order:
        # the images have another order: only histograms of all samples do not depend on it
        histogram_of_all = HistogramOf().key
        keys = [key for key in keys if key[2] == histogram_of_all]  # key[2]: its statistic

    searched_statistic = subject.statistic.key
    tensors = []  # of the cleaned model, whose variant is FOLDED
    for variant, tensor, statistic in keys:
        if variant == FOLDED and statistic == searched_statistic:
            tensors.append(tensor)
    stored_histograms = stored.observed(subject.histogram_observations(tensors))
    observed = stored_histograms.merged_with(calibration.observed)  # new ones take precedence
    retained = stored.read_arrays(_select_retained(keys, observed))
    return replace(calibration, observed=observed), retained


def _is_up_to_date(
    decision: CacheDecision,
    stored: store.StoredCalibration,
    calibration: Calibration,
    trt_version: str | None,
    cache_text: bytes | None,
) -> bool:
    """Whether the files of a cache hold this calibration.

    `trt_version`, `cache_text`: the version of TensorRT and the text that the files must have; None
    if any will do.
    """
    if decision.missing or stored.fingerprint != calibration.fingerprint:
        return False
    header = trt_cache.parse(stored.cache_text, origin="the cache").header
    return trt_version in (None, header.version) and cache_text in (None, stored.cache_text)


def _write_cache_files(path: Path, staged_path: Path | None, write: Callable[[Path], None]) -> None:
    """Write the three files of a cache by `write`, which takes the path of the first.

    They are staged with the files of a build if there is a `staged_path`, else published at once.
    """
    if staged_path is not None:
        write(staged_path)
        return
    with stage_files(path.parent) as new_stage:
        write(new_stage.temporary_folder / path.name)
        new_stage.publish()


def _select_retained(keys: Iterable[Key], observed: ObservedStatistics) -> list[Key]:
    """Return the keys of older runs to retain: of the cleaned model, and of some other variants.

    These are the variants of this run and the newest few. Each Ascend configuration is its own
    variant, so a cache would only grow while a user tries configurations.
    """
    unobserved = [key for key in keys if key not in observed]
    variants = dict.fromkeys(variant for variant, _, _ in unobserved)
    variants.pop(FOLDED, None)
    retained_variants = {FOLDED, *list(variants)[-_MAX_VARIANTS:]}  # the newest are the last
    retained_variants.update(variant for variant, _, _ in observed)
    return [key for key in unobserved if key[0] in retained_variants]


def _make_cache_text(subject: CalibrationSubject, ranges: Ranges) -> bytes:
    """Return TensorRT's cache text: a scale for each tensor of the model that has a histogram.

    It is that of the range which the method finds in the histogram. If no target of this run needs
    such histograms, the scales are those of the largest observed values. Names that the format
    cannot hold are left out.
    """
    graph = subject.model.graph
    tensors = [value.name for value in graph.input]
    for node in graph.node:
        tensors += node.output
    observations = subject.histogram_observations(tensors)  # of all tensors, observed or not
    range_set = ranges.find(
        observation for observation in observations if observation.key in ranges.observed
    )
    scales = range_set.symmetric  # tensor -> scale of its range on TensorRT's int8 grid
    if not scales:  # no histogram was observed
        scales = _observed_scales(ranges.observed)
    # the header names a calibrator of TensorRT: MINMAX if the scales are of the largest values, all
    # of them; else the usual one. Without ranges they are: those of `_observed_scales`
    methods = {clip_range.method for clip_range in range_set.scales.values()}
    algorithm = trt_cache.MINMAX if methods <= {"minmax"} else trt_cache.ENTROPY2
    writable_scales = {
        name: scale for name, scale in scales.items() if trt_cache.can_hold_name(name)
    }
    cache = trt_cache.from_scales(
        writable_scales,
        version=subject.trt_version or DEFAULT_TRT_VERSION,
        algorithm=algorithm,
    )
    return trt_cache.dump(cache)


def _observed_scales(observed: ObservedStatistics) -> dict[str, np.float32]:
    """Return tensor -> symmetric scale of its largest observed value."""
    scales = {}
    for (_, tensor, _), recorder in observed.items():
        if isinstance(recorder, HasExtremes):
            low, high = recorder.extremes
            if low <= high:  # else it never got a value
                scales[tensor] = symmetric_scale(max(-low, high))
    return scales


def cached_trt_version(policy: CachePolicy) -> str | None:
    """Return the TensorRT version in an existing cache's first line, or None."""
    path = policy.read_path
    if path is None or policy.refresh or not path.is_file():
        return None
    try:
        return trt_cache.parse(store.read_cache_file(path), origin=str(path)).header.version
    except CacheError:
        return None  # `check_cache` reports later why it cannot be used
