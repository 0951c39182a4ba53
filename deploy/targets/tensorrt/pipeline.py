"""`calib8 calibrate --target tensorrt`: model and images to TensorRT's own cache, kept and reused.

The cache has the same two companions as every other of `deploy.calibration.store`: the fingerprint
that decides whether it still fits, and the statistics.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from calibrators.searches import DEFAULT_PERCENT
from deploy.calibration import store as store
from deploy.calibration import trt_cache
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.reuse import fingerprint_of
from deploy.calibration.search import Method
from deploy.calibration.store import Calibration
from deploy.errors import CacheError
from deploy.feed.feed import Feed, FeedSource, open_feed
from deploy.feed.preprocess import Preprocess
from deploy.frontends import load
from deploy.progress import bar
from deploy.targets.tensorrt.cache_tools import original_of, read_cache
from deploy.targets.tensorrt.calibrate import calibrate
from deploy.targets.tensorrt.naming import likely_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A cache for TensorRT, and how it came about.

    Attributes:
        cache: what stands in the file.
        feed: the calibration images.
        reused: whether the file was taken as it is.
        reason: why, or why not, in one sentence.
        seconds: of the whole.
        notes: what the user should know.
    """

    cache: trt_cache.CalibrationCache
    feed: Feed
    reused: bool
    reason: str
    seconds: float
    notes: tuple[str, ...]


def calibrate_to(
    path: Path,
    model: str | Path,
    images: FeedSource,
    *,
    version: str = store.DEFAULT_TRT_VERSION,
    method: str = "entropy",
    batch_size: int | None = 1,
    parser: str | None = None,
    percent: float = DEFAULT_PERCENT,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    threads: int = 2,
    require: bool = False,
    refresh: bool = False,
    progress: bool = False,
) -> Outcome:
    """Write the cache that TensorRT `version` would write, unless the one there still fits.

    Args:
        path: cache file.
        model: ONNX file.
        images: as `deploy.feed.feed.open_feed`.
        version: of TensorRT, "X.Y.Z".
        method: one of `deploy.targets.tensorrt.calibrate.ALGORITHMS`.
        batch_size: images in TensorRT's calibration batch; None for the order-independent range.
        parser: as `deploy.targets.tensorrt.calibrate.calibrate`.
        percent: of the method "percentile".
        preprocess: how images become inputs; None takes it from the model's input.
        skip_bad: go on without unreadable images.
        limit: use at most so many images.
        threads: worker threads of the order-independent pass.
        progress: draw a bar on stderr where this takes over two seconds.
        require: fail instead of calibrating where the file does not fit.
        refresh: calibrate even where it fits.

    Raises:
        ModelError, FeedError, ConfigError, CacheError, CalibrationError, BackendError: each says
            in one sentence what was wrong and what to do.
    """
    started = time.perf_counter()
    loaded = load(model, fold_batchnorm=False)
    original = original_of(model) or loaded.model
    parser = parser or likely_parser(original, version)
    feed = open_feed(images, loaded.inputs, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    label = f"percentile {percent:g}" if method == "percentile" else method
    rule = "order-independent" if batch_size is None else f"first batch of {batch_size}"
    fingerprint = fingerprint_of(
        loaded,
        feed,
        rule=f"tensorrt, {rule}",
        method=label,
        versions={"tensorrt": version, "parser": parser},
    )
    reason = f"{path} is to be made anew, as asked" if refresh else _unfit(path, fingerprint)
    if reason is None:
        seconds = time.perf_counter() - started
        reason = "model, images, preprocessing, method and versions are the same"
        known = read_cache(path)
        return Outcome(
            cache=known, feed=feed, reused=True, reason=reason, seconds=seconds, notes=()
        )
    if require:
        raise CacheError(
            f"the cache must fit (--require-cache), but {reason}; leave --require-cache away to"
            " calibrate anew"
        )
    with bar("calibrating", len(feed), shown=progress) as step:
        found = calibrate(
            loaded.model,
            feed.samples,
            version=version,
            method=method,
            batch_size=None if batch_size is None else -(-batch_size // feed.batch),
            original=original,
            parser=parser,
            percent=percent,
            threads=threads,
            progress=step,
        )
    search = Method.of(method, {"percent": percent} if method == "percentile" else {}).search
    kept = Calibration(
        scales=found.statistics.scales(search),
        troubles=found.statistics.troubles(),
        fingerprint=fingerprint,
        statistics=found.statistics,
    )
    store.save(kept, path, text=trt_cache.dump(found.cache))
    return Outcome(
        cache=found.cache,
        feed=feed,
        reused=False,
        reason=reason,
        seconds=time.perf_counter() - started,
        notes=found.notes,
    )


def _unfit(path: Path, fingerprint: Fingerprint) -> str | None:
    """Why the file there cannot be used again; None where it can."""
    if not path.exists():
        return f"{path} does not exist yet"
    if not store.sidecars(path)[0].exists():
        return f"{path} has no fingerprint beside it, so nothing tells what it was made from"
    try:
        old = store.load(path, with_statistics=False)
    except CacheError as error:
        return str(error)
    assert old.fingerprint is not None
    return "; ".join(fingerprint.changes_since(old.fingerprint).values()) or None
