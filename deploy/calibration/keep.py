"""Keeping a calibration: what is written beside what was there, and in which text.

The text of the cache is the target's own where one has a form of its own (TensorRT), else that of
every tensor of the cleaned model that was searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from calibrators.grids import symmetric_scale
from calibrators.statistics import Arrays, HistogramOf, Ranged
from deploy.calibration import DEFAULT_TRT_VERSION, store, trt_cache
from deploy.calibration.observation import Key, Observed
from deploy.calibration.ranges import Ranges
from deploy.calibration.reuse import CachePolicy, Verdict
from deploy.calibration.store import Calibration
from deploy.calibration.subject import FOLDED, Subject
from deploy.errors import CacheError
from deploy.files.staging import Stage, staged

if TYPE_CHECKING:
    import numpy as np

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
