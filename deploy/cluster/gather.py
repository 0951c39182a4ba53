"""Shards merged as they come, in flat memory, to what one run would have observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from calibrators.histogram import Histogram
from deploy.calibration import shard_file
from deploy.calibration.observation import Key, Observation, Observed
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import origin_of
from deploy.errors import BackendError, FeedError
from deploy.feed.manifest import Changed
from deploy.feed.samples import Feed
from deploy.feed.share import Share


class Gathering:
    """What came of a feed's pieces so far; the feed learns of their samples."""

    def __init__(
        self, wanted: Iterable[Observation], feed: Feed, identities: Mapping[str, str]
    ) -> None:
        self._wanted = tuple(wanted)
        self._feed = feed
        self._identities = identities
        self._whole: dict[Key, Histogram] = {}
        self._peaks = Peaks()  # whose samples are numbered by their places, bad ones too
        self._count = 0

    def add(self, share: Share, worker: str, data: bytes) -> None:
        """Take the shard of a share.

        Raises:
            CacheError: it is broken.
            BackendError: it is of another calibration than this one.
            FeedError: the worker's images are others than those here.
        """
        shard = shard_file.of_bytes(data, Path(f"piece {share}"))
        origin = origin_of(self._identities, self._feed.form, share)
        changes = origin.changes_since(shard.made_from)
        if shard.share != share or changes:
            what = "; ".join(changes.values()) or f"it is piece {shard.share} of others"
            raise BackendError(
                f"the worker {worker} must observe what it was asked for, got another piece than"
                f" {share}: {what}; install the same calib8 there"
            )
        self._count = share.count
        try:
            self._feed.seen_elsewhere(share, shard.digests, shard.skipped)
        except Changed as error:
            raise FeedError(
                f"the worker {worker} must see the same images as this machine, got another file"
                f" ({error}); give a path that all machines share, or send them (--send images)"
            ) from error
        self._peaks.add_rows(shard.peaks, {place: place + 1 for place in share.places})
        for key, part in shard.observed(self._wanted).items():
            assert isinstance(part, Histogram)
            if key in self._whole:
                self._whole[key].merge(part)
            else:
                self._whole[key] = part

    def end(self, peaks: Peaks) -> Observed:
        """What all pieces saw.

        Args:
            peaks: is told the largest values of all samples.

        Raises:
            FeedError: all samples were skipped.
        """
        if not self._feed.count:
            raise FeedError(
                f"at least one sample must be good, all {self._count} were skipped:"
                f" {self._feed.skipped[0]}"
            )
        numbers = {place: number for number, place in enumerate(self._feed.places, 1)}
        peaks.add_rows(self._peaks.rows(range(self._count)), numbers)
        return Observed({o.key: self._whole[o.key] for o in self._wanted})
