"""Shards of a calibration: one machine observes a part of the images, another merges the parts.

::

    calibrate --shard 1/3 --> a.shard --.
    calibrate --shard 2/3 --> b.shard --+--> merge --> model.cache, as one run over all would
    calibrate --shard 3/3 --> c.shard --'              have written it, byte for byte

Histograms merge exactly, so it is all the same who saw what. A statistic that its samples' order
shows in cannot be put together from parts, and is refused before anything is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from calibrators.histogram import Histogram
from deploy.calibration import shard_file
from deploy.calibration.fingerprint import CALIB8, Fingerprint
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shard_file import Shard
from deploy.calibration.versions import of_feed
from deploy.errors import CacheError, ConfigError, FeedError
from deploy.feed.manifest import Raw
from deploy.feed.samples import Feed
from deploy.feed.share import Share
from deploy.files import atomic

if TYPE_CHECKING:
    from deploy.calibration.calibrated import Calibrated
    from deploy.frontends import LoadedModel


def refuse_ordered(wanted: Iterable[Observation], what: str) -> None:
    """Refuse statistics that cannot be put together from parts.

    Args:
        wanted: the observations.
        what: is to be made of parts, such as "a shard (got 1/2)".

    Raises:
        ConfigError: there are some.
    """
    ordered = dict.fromkeys(o.statistic.key for o in wanted if o.by_order)
    if ordered:
        raise ConfigError(
            f"{what} is of statistics that the order of the images does not show in,"
            f" and {', '.join(ordered)} is defined by it; calibrate these in one run, or take a"
            " target and a method without it"
        )


def keep_shard(found: Calibrated, path: Path) -> None:
    """Write what a shard's run observed.

    Args:
        found: of a feed that is a share.
        path: of the file.

    Raises:
        ExportError: the folder is not writable.
    """
    observed = found.ranges.observed
    data = shard_of(found.feed, found.loaded.identities, found.peaks, observed)
    atomic.write_bytes(path, data)
    if found.checkpoint is not None:
        found.checkpoint.unlink(missing_ok=True)


def shard_of(feed: Feed, model: Mapping[str, str], peaks: Peaks, observed: Observed) -> bytes:
    """The bytes of the shard of a pass over a feed that is a share.

    Args:
        feed: the share.
        model: identities of the model, as `LoadedModel.identities`.
        peaks: of the pass.
        observed: in the pass.
    """
    assert feed.share is not None
    return shard_file.to_bytes(
        share=feed.share,
        made_from=origin_of(model, feed.form, feed.share),
        digests=feed.seen,
        skipped=feed.skipped_places,
        peaks=peaks.rows(feed.places),
        observed=observed,
    )


def origin_of(model: Mapping[str, str], form: Mapping[str, Any], share: Share) -> Fingerprint:
    """What a shard of a feed of this `Feed.form` is made from; its samples are no part of that."""
    images = {name: form[name] for name in ("kind", "batch", "skip_bad")}
    whole = {**images, "count": share.count, "names": share.names}
    return _made_from(model, whole, form["preprocess"] or {})


class Shards:
    """All shards of one calibration, as the feed of a run that observes nothing.

    Attributes:
        feed: the whole, whose samples nobody can read here.
    """

    def __init__(self, paths: Sequence[Path], loaded: LoadedModel) -> None:
        """Read them.

        Args:
            paths: of their files, in any order.
            loaded: the model.

        Raises:
            CacheError: one is broken, missing, there twice, or of another whole or model.
        """
        found = [shard_file.load(path) for path in paths]
        if not found:
            raise CacheError("shards are to be merged, got none; name their files")
        _refuse_checkpoints(found)
        _refuse_foreign(found, loaded)
        self._shards = _each_once(found)
        self.feed = _whole(self._shards)

    def __str__(self) -> str:
        """In words."""
        return f"{len(self._shards)} shards"

    def observed(self, wanted: Iterable[Observation], peaks: Peaks) -> Observed:
        """What one run would have observed.

        Args:
            wanted: the observations.
            peaks: is told the largest values of all samples.

        Raises:
            CacheError: a shard lacks an observation.
        """
        listed = tuple(wanted)
        for shard in self._shards:
            lacking = [o for o in listed if o.key not in shard.keys]
            if lacking:
                raise CacheError(
                    f"{shard.path} lacks {len(lacking)} observations that these targets need, such"
                    f" as {lacking[0].statistic.key} of {lacking[0].tensor!r}; merge for the"
                    " targets and options that the shards were made for"
                )
        numbers = {place: number for number, place in enumerate(self.feed.places, 1)}
        whole: dict[Any, Histogram] = {}
        for shard in self._shards:
            peaks.add_rows(shard.peaks, numbers)
            for key, part in shard.observed(listed).items():
                assert isinstance(part, Histogram)
                if key in whole:
                    whole[key].merge(part)
                else:
                    whole[key] = part
        return Observed(whole)


def _made_from(
    model: Mapping[str, str], images: Mapping[str, Any], preprocess: Mapping[str, Any]
) -> Fingerprint:
    """What all shards of one calibration have in common."""
    return Fingerprint(
        model=model,
        images=images,
        order="",
        preprocess=preprocess,
        decoder={},
        program=CALIB8,
        rule="",
        method="",
        numbers=of_feed(str(images["kind"])),  # of all shards the same, programs too
        versions={},
    )


def _refuse_checkpoints(found: Sequence[Shard]) -> None:
    if begun := next((shard for shard in found if shard.counted is not None), None):
        raise CacheError(
            f"a shard that is merged must be whole, got {begun.path}, the checkpoint of a run that"
            " did not end; go on with that run by --resume"
        )


def _refuse_foreign(found: Sequence[Shard], loaded: LoadedModel) -> None:
    first = found[0]
    here = _made_from(loaded.identities, first.made_from.images, first.made_from.preprocess)
    for shard in found:
        if changes := here.changes_since(shard.made_from):
            beside = "the model and the versions here" if shard is first else str(first.path)
            raise CacheError(
                f"all shards must be of one calibration, {shard.path} is not that of {beside}:"
                f" {'; '.join(changes.values())}"
            )
        if shard.share.of != first.share.of:
            raise CacheError(
                f"all shards must be of one calibration, got {first.path}, {first.share}, and"
                f" {shard.path}, {shard.share}"
            )


def _each_once(found: Sequence[Shard]) -> list[Shard]:
    """The shards by their numbers."""
    known: dict[int, Shard] = {}
    for shard in found:
        if (other := known.setdefault(shard.share.number, shard)) is not shard:
            raise CacheError(
                f"every shard must be given once, got {shard.share} twice: {other.path} and"
                f" {shard.path}"
            )
    of = found[0].share.of
    missing = [f"{number}/{of}" for number in range(1, of + 1) if number not in known]
    if missing:
        raise CacheError(
            f"all shards are needed, got {len(known)} of {of}; missing: {', '.join(missing[:9])}"
        )
    return [known[number] for number in sorted(known)]


class _Elsewhere:
    """The samples of shards: known by their digests, read on other machines."""

    labels = None

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def sample_name(self, index: int) -> str:
        return f"sample {index}"

    def told(self, index: int) -> str:
        return self.sample_name(index)

    def load(self, index: int) -> Raw:
        return Raw(bytes.fromhex(self._digests[index]), self._refuse)

    def _refuse(self) -> NoReturn:
        raise FeedError("the samples of shards are where they were observed, not here")


class _Whole(Feed):
    """A feed that knows its preprocessing from the shards, in JSON alone."""

    def __init__(self, source: _Elsewhere, first: Shard, skipped: Mapping[int, str]) -> None:
        images = first.made_from.images
        super().__init__(
            source,
            range(len(source)),
            kind=str(images["kind"]),
            batch=1,
            preprocess=None,
            skip_bad=bool(images["skip_bad"]),
            notes=(),
            skipped=skipped,
        )
        self._in_json = first.made_from.preprocess

    def manifest(self, first: int | None = None) -> dict[str, Any]:
        """As one run would have written it."""
        return {**super().manifest(first), "preprocess": dict(self._in_json) or None}


def _whole(shards: Sequence[Shard]) -> Feed:
    digests = [""] * shards[0].share.count
    skipped: dict[int, str] = {}
    for shard in shards:
        for place, digest in zip(shard.share.places, shard.digests, strict=True):
            digests[place] = digest
        skipped |= shard.skipped
    return _Whole(_Elsewhere(digests), shards[0], dict(sorted(skipped.items())))
