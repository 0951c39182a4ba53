"""Whether a kept calibration still fits: taken as it stands, searched again, or made anew, and why.

::

    cache --> fingerprint the same? --- yes --> has every tensor? -- yes --> taken as it stands
                 | only the method                   | no
                 v                                   v
          searched again from the           made anew, with the old tensors too, so that
          kept statistics, no run           targets built in turn do not undo each other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.calibration import store as store
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.search import Method
from deploy.calibration.store import Calibration
from deploy.calibration.versions import of_observation
from deploy.errors import CacheError
from deploy.feed.feed import Feed
from deploy.frontends import LoadedModel
from deploy.graph.plan import never_negative
from deploy.graph.saturation import bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Where the calibration is kept, and when it may be used again.

    Attributes:
        path: the cache file; its fingerprint and statistics stand beside it.
        require: fail instead of calibrating where the cache does not fit.
        trust: use a cache that has no fingerprint, as it is.
        refresh: calibrate even where the cache fits.
        trt_version: version label of the cache's first line.
    """

    path: Path | None = None
    require: bool = False
    trust: bool = False
    refresh: bool = False
    trt_version: str = store.DEFAULT_TRT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the cache gives.

    Attributes:
        reason: why the cache is used, or why not, in one sentence.
        calibration: what to go on with; None where the model must be run.
        as_it_stands: whether the files hold just that already.
        also: tensors to observe beside the wanted ones, since the cache held them.
    """

    reason: str
    calibration: Calibration | None = None
    as_it_stands: bool = False
    also: tuple[str, ...] = ()


def judge(
    policy: CachePolicy,
    fingerprint: Fingerprint,
    wanted: tuple[str, ...],
    loaded: LoadedModel,
    method: Method,
) -> Verdict:
    """Look at the cache of `policy` for a calibration of this fingerprint.

    Raises:
        CacheError: the cache must fit and does not, or must be trusted and is not the model's.
    """
    path = policy.path
    if path is None:
        return Verdict(reason="no cache was asked for")
    if policy.refresh:
        return Verdict(reason=f"{path} is to be made anew, as asked")
    if policy.trust:
        return Verdict(
            reason=f"{path} is trusted as it is, without a fingerprint",
            calibration=store.trusted(path, wanted, never_negative(loaded.model)),
            as_it_stands=True,
        )
    if path.exists():
        verdict = _fitting(path, fingerprint, wanted, loaded, method)
    else:
        verdict = Verdict(reason=f"{path} does not exist yet")
    if verdict.calibration is None and policy.require:
        raise CacheError(
            f"the cache must fit (--require-cache), but {verdict.reason}; leave --require-cache"
            " away to calibrate anew"
        )
    return verdict


def fingerprint_of(
    loaded: LoadedModel,
    feed: Feed,
    *,
    rule: str,
    method: str,
    versions: Mapping[str, str | int] | None = None,
) -> Fingerprint:
    """The fingerprint of calibrating this model on this feed.

    Args:
        loaded: the model.
        feed: the calibration samples.
        rule: range rule of the statistics.
        method: search and its parameters.
        versions: what the result depends on beside the versions of every observation.
    """
    manifest = feed.manifest()
    preprocess = manifest.pop("preprocess") or {}
    return Fingerprint(
        model=loaded.digest,
        images=manifest,
        preprocess=preprocess,
        rule=rule,
        versions={**of_observation(), **(versions or {})},
        method=method,
    )


def _fitting(
    path: Path,
    fingerprint: Fingerprint,
    wanted: tuple[str, ...],
    loaded: LoadedModel,
    method: Method,
) -> Verdict:
    if not store.sidecars(path)[0].exists():
        return Verdict(
            reason=f"{path} has no fingerprint beside it, so nothing tells what it was made from"
            " (--trust-cache uses it as it is)"
        )
    try:
        old = store.load(path, with_statistics=False)
        assert old.fingerprint is not None
        changes = fingerprint.changes_since(old.fingerprint)
        if set(changes) - {"method"}:
            return Verdict(reason="; ".join(changes.values()))
        missing = [name for name in wanted if not old.covers((name,))]
        if missing:
            return Verdict(
                reason=f"{path.name} lacks {len(missing)} tensors that these targets need",
                also=(*old.scales, *old.troubles),
            )
        if not changes:
            reason = "model, images, preprocessing, method and versions are the same"
            return Verdict(reason=reason, calibration=old, as_it_stands=True)
        statistics = store.load(path).statistics
        assert statistics is not None
    except CacheError as error:
        return Verdict(reason=str(error))
    again = Calibration(
        scales=statistics.scales(method.search, bounds(loaded.model)),
        troubles=statistics.troubles(),
        fingerprint=fingerprint,
        statistics=statistics,
    )
    reason = f"only {changes['method']}: searched again, the model was not run"
    return Verdict(reason=reason, calibration=again)
