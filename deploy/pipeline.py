"""The whole line; read this first.

::

    model -> frontends -> graph (what needs a scale) -> feed -> observe (run + statistics)
          -> calibrators (search) -> Scales -> backends (write, build) -> bench, accuracy -> report

`calibrate` goes as far as the Scales and keeps them in a cache; `build` goes all the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import atomic
from deploy.calibration import store as store
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.observe import observe, observe_by_batches
from deploy.calibration.reuse import CachePolicy, fingerprint_of, judge
from deploy.calibration.search import DEFAULT_METHOD, Method
from deploy.calibration.store import Calibration
from deploy.errors import ConfigError, ModelError
from deploy.feed.feed import Feed, FeedSource, open_feed
from deploy.feed.preprocess import Preprocess
from deploy.frontends import LoadedModel, load
from deploy.graph.saturation import bounds
from deploy.graph.selection import matching
from deploy.machine import default_threads
from deploy.progress import bar
from deploy.targets import TARGETS, Target, named
from deploy.targets.base import BuildRequest

if TYPE_CHECKING:
    import onnx

    from deploy.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A calibration with the model and feed it is for, and how it came about.

    Attributes:
        loaded: the model.
        images: where the images came from, in words.
        feed: the calibration images.
        calibration: scales, statistics, fingerprint.
        reused: whether the cache was taken over without running the model.
        reason: why it was reused, or why not, in one sentence.
        seconds: of observing and searching.
    """

    loaded: LoadedModel
    images: str
    feed: Feed
    calibration: Calibration
    reused: bool
    reason: str
    seconds: float
    method: Method = field(default_factory=Method)
    cache: Path | None = None


def calibrate(
    model: str | Path | onnx.ModelProto | LoadedModel,
    images: FeedSource,
    *,
    targets: Sequence[str | Target] = ("onnxruntime",),
    method: str | Method = DEFAULT_METHOD,
    preprocess: Preprocess | None = None,
    cache: Path | str | CachePolicy | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    threads: int | None = None,
    float_nodes: Iterable[str] = (),
    progress: bool = False,
    verbose: bool = False,
) -> Calibrated:
    """Find the clip range of every tensor that the targets need, or take it from a fitting cache.

    Args:
        model: path of an ONNX file, or a model in memory, loaded or not.
        images: folder, list file, image, .npy, .npz, or an iterable of arrays or
            {input: array} dicts.
        targets: names of `TARGETS`, or backends with options of their own.
        method: name of a search, or a `Method` with parameters.
        preprocess: how images become inputs; None takes it from the model's input.
        cache: file to keep the calibration in, or a policy; None keeps nothing.
        skip_bad: go on without unreadable images.
        limit: use at most so many images.
        threads: worker threads, None for up to 4 cores; the result does not depend on it.
        float_nodes: nodes to keep in float, as `deploy.graph.selection.matching` reads them.
        progress: draw a bar on stderr where this takes over two seconds.
        verbose: print what was counted.

    Raises:
        ModelError, FeedError, ConfigError, CacheError, CalibrationError, BackendError: each says
            in one sentence what was wrong and what to do.
    """
    policy = cache if isinstance(cache, CachePolicy) else CachePolicy(path=_path(cache))
    chosen = method if isinstance(method, Method) else Method(name=method)
    loaded = model if isinstance(model, LoadedModel) else load(model)
    kept = matching(loaded.model, float_nodes)
    feed = open_feed(images, loaded.inputs, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    wanted = tuple(
        dict.fromkeys(t for b in backends(targets) for t in b.wanted(loaded.model, kept))
    )
    if not wanted:
        raise ModelError(
            f"at least one node of the model must be able to run in int8, got none in {loaded.name}"
            " (only the main graph counts, not If and Loop bodies); `calib8 inspect` says why"
        )
    fingerprint = fingerprint_of(loaded, feed, rule=chosen.rule, method=chosen.label)
    started = time.perf_counter()
    verdict = judge(policy, fingerprint, wanted, loaded, chosen)
    found = verdict.calibration
    if found is None:
        tensors = tuple(dict.fromkeys((*wanted, *verdict.also)))
        found = _observed(
            loaded, feed, tensors, chosen, fingerprint, threads or default_threads(), progress
        )
    if policy.path is not None and not verdict.as_it_stands:
        store.save(found, policy.path, trt_version=policy.trt_version)
    return Calibrated(
        loaded=loaded,
        images=str(images) if isinstance(images, str | Path) else "arrays in memory",
        feed=feed,
        calibration=found,
        reused=verdict.as_it_stands,
        reason=verdict.reason,
        seconds=time.perf_counter() - started,
        method=chosen,
        cache=policy.path,
    )


def build(
    model: str | Path | onnx.ModelProto | LoadedModel,
    images: FeedSource,
    *,
    out: Path | str = "build",
    targets: Sequence[str | Target] = ("onnxruntime",),
    method: str | Method = DEFAULT_METHOD,
    preprocess: Preprocess | None = None,
    cache: Path | str | CachePolicy | None = None,
    eval_images: FeedSource | None = None,
    labels: Sequence[int] | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    threads: int | None = None,
    float_nodes: Iterable[str] = (),
    duration_s: float = 3.0,
    progress: bool = False,
    verbose: bool = False,
) -> Report:
    """Calibrate (or reuse a calibration), build every target, measure, and write the report.

    Args beyond those of `calibrate`:
        out: folder of everything that is written; the cache too, where `cache` names none.
        eval_images: images for the accuracy figures; None takes the calibration images.
        labels: class of every evaluation image, where its list does not give it.
        duration_s: seconds of measuring a model; 0 leaves latency out.

    Raises:
        As `calibrate`; ExportError where a file cannot be written.
    """
    from deploy.measure import measured
    from deploy.results import write_report

    folder = Path(out)
    atomic.remove_leftovers(folder)
    built_for = backends(targets)
    loaded = model if isinstance(model, LoadedModel) else load(model)
    kept = matching(loaded.model, float_nodes)
    policy = cache if isinstance(cache, CachePolicy) else CachePolicy(path=_path(cache))
    if policy.path is None:
        policy = replace(policy, path=folder / f"{loaded.name}.cache")
    calibrated = calibrate(
        loaded,
        images,
        targets=built_for,
        method=method,
        preprocess=preprocess,
        cache=policy,
        skip_bad=skip_bad,
        limit=limit,
        threads=threads,
        float_nodes=kept,
        progress=progress,
        verbose=verbose,
    )
    results = [backend.build(_request(calibrated, folder, kept)) for backend in built_for]
    evaluation = None
    if eval_images is not None:
        evaluation = open_feed(
            eval_images, calibrated.loaded.inputs, preprocess=preprocess, skip_bad=skip_bad
        )
        if skip_bad:  # which images are bad, and so whose labels count, shows only in a pass
            for _ in evaluation.samples():
                pass
    figures = measured(
        loaded,
        built_for,
        results,
        calibration=calibrated.feed,
        evaluation=evaluation,
        labels=labels,
        duration_s=duration_s,
        threads=threads or default_threads(),
        progress=progress,
    )
    return write_report(calibrated, results, figures, folder)


def backends(targets: Sequence[str | Target]) -> list[Target]:
    """Targets by name or with options of their own, as backends.

    Raises:
        ConfigError: a name that is not in the table.
    """
    found: list[Target] = []
    for target in targets:
        found.append(named(target)() if isinstance(target, str) else target)
    if not found:
        raise ConfigError(f"at least one target is needed, of {', '.join(TARGETS)}")
    return found


def _request(calibrated: Calibrated, folder: Path, kept: tuple[str, ...]) -> BuildRequest:
    loaded, calibration = calibrated.loaded, calibrated.calibration
    return BuildRequest(
        name=loaded.name,
        folder=folder,
        model=loaded.model,
        source=loaded.source,
        digest=loaded.digest,
        scales=calibration.scales,
        troubles=calibration.troubles,
        feed=calibrated.feed,
        manifest=calibrated.feed.manifest(),
        float_nodes=kept,
        cache=calibrated.cache,
    )


def _observed(
    loaded: LoadedModel,
    feed: Feed,
    tensors: tuple[str, ...],
    method: Method,
    fingerprint: Fingerprint,
    threads: int,
    progress: bool,
) -> Calibration:
    """Run the model over the feed and search every tensor's range."""
    with bar("calibrating", len(feed), shown=progress) as step:
        if method.name == "entropy-tensorrt":
            first = -(-method.batch_size // feed.batch)  # a sample holds the model's fixed batch
            statistics = observe_by_batches(
                loaded.model, tensors, feed.samples, batch_size=first, progress=step
            )
        else:
            with feed.samples() as samples:
                statistics = observe(loaded.model, tensors, samples, threads=threads, progress=step)
    return Calibration(
        scales=statistics.scales(method.search, bounds(loaded.model)),
        troubles=statistics.troubles(),
        fingerprint=fingerprint,
        statistics=statistics,
    )


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


__all__ = ["CachePolicy", "Calibrated", "build", "calibrate"]
