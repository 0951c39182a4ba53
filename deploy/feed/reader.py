"""Samples of a source as they are read: in any thread, once each, and as they were first seen.

::

    source --fetched, ahead--> bytes, sample --noted--> sample --> kept, on disk, or shown
                                                  '-- another one than before: Changed
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploy.errors import FeedError
from deploy.feed.ahead import ahead
from deploy.feed.manifest import UNREADABLE, Changed, Raw, Seen
from deploy.feed.pictures import ImageSource
from deploy.feed.preprocess import Preprocess
from deploy.feed.preview import Views
from deploy.feed.sampling import Chosen
from deploy.feed.source import Sample, Source
from deploy.feed.spool import Spool
from deploy.machine import default_threads
from deploy.progress import phase


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A sample as a thread read it, or what kept it from that."""

    raw: Raw | None = None
    sample: Sample | None = None
    error: FeedError | None = None


class Reader:
    """Reads samples, and keeps the first few, so that nobody reads them again.

    Attributes:
        skip_bad: go on without bad samples.
        seen: digests of what was read.
        views: pictures of what went by, as far as they are asked for.
        decodes: how many images or rows were read to be run, so far.
    """

    def __init__(
        self, source: Source, *, skip_bad: bool, kept: int, preprocess: Preprocess | None
    ) -> None:
        self.skip_bad = skip_bad
        self.seen = Seen(len(source))
        self.views = Views(preprocess)
        self.decodes = 0
        self._source = source
        self._most_kept = kept
        self._kept: dict[int, Sample] = {}
        self._spool = Spool(frozenset())

    def remember(self, on_disk: Iterable[int], views: Views) -> None:
        """Keep some samples on disk, and pictures of some, as they are read from now on."""
        self._spool = Spool(frozenset(on_disk))
        self.views = views

    def hash(self, index: int) -> None:
        """Read a sample for its digest.

        Raises:
            FeedError: it cannot be read, unless `skip_bad`.
        """
        try:
            self._load(index)
        except FeedError:
            if not self.skip_bad:
                raise

    def hash_unread(self, indices: Sequence[int]) -> None:
        """The same of those that were not read yet."""
        unread = sum(index not in self.seen for index in indices)
        with phase("hashing", unread, "samples") as step:
            for index in indices:
                if index not in self.seen:
                    self.hash(index)
                    step()

    def _load(self, index: int) -> Raw:
        """A sample's bytes, which are those that were first seen.

        Raises:
            Changed: they are not.
            FeedError: they cannot be read.
        """
        name = self._source.told(index)
        try:
            raw = self._source.load(index)
        except FeedError:
            self.seen.note(index, UNREADABLE, name)
            raise
        self.seen.note(index, raw.digest, name)
        return raw

    def walk(
        self, chosen: Chosen, *, only: Collection[int] | None = None
    ) -> Iterator[tuple[int, Sample]]:
        """(index, sample of batch 1) of every good one, or of those that are named.

        Raises:
            FeedError: (while iterating) a bad sample, unless `skip_bad`; or nothing but bad ones.
        """
        wanted = (index for index in chosen.good() if only is None or index in only)
        several = default_threads() if isinstance(self._source, ImageSource) else 1
        for index, fetched in ahead(wanted, self._fetch, threads=several):
            try:
                yield index, self.read(index, fetched)
            except Changed:
                raise
            except FeedError as error:
                if not self.skip_bad:
                    raise FeedError(
                        f"{error}; {len(chosen)} were to be fed: correct or remove it, or"
                        " skip bad ones (--skip-bad)"
                    ) from error
                chosen.skipped[index] = str(error)
        if not chosen.count:
            raise FeedError(
                f"at least one sample must be good, all {len(chosen)} were skipped:"
                f" {next(iter(chosen.skipped.values()))}"
            )

    def _fetch(self, index: int) -> _Fetched | None:
        """Read and decode a sample, in any thread; None of one that is kept."""
        if index in self._kept or index in self._spool:
            return None
        return _fetched(self._source, index)

    def read(self, index: int, fetched: _Fetched | None = None) -> Sample:
        """One sample, from memory or disk where it is kept there."""
        if index in self._kept:
            return dict(self._kept[index])
        if (known := self._spool.get(index)) is not None:
            return known
        raw, sample = self._noted(index, fetched or _fetched(self._source, index))
        self.decodes += 1
        self._spool.add(index, sample)
        self.views.add(index, self._source.sample_name(index), raw, sample)
        if len(self._kept) < self._most_kept:
            self._kept[index] = sample
        return dict(sample)

    def _noted(self, index: int, fetched: _Fetched) -> tuple[Raw, Sample]:
        """A sample that was read just now, whose bytes are those that were first seen.

        Raises:
            Changed: they are not.
            FeedError: what reading or decoding raised.
        """
        digest = UNREADABLE if fetched.raw is None else fetched.raw.digest
        self.seen.note(index, digest, self._source.told(index))
        if fetched.error is not None:
            raise fetched.error
        assert fetched.raw is not None and fetched.sample is not None
        return fetched.raw, fetched.sample


def _fetched(source: Source, index: int) -> _Fetched:
    raw = None
    try:
        raw = source.load(index)
        return _Fetched(raw, raw.decode())
    except FeedError as error:
        return _Fetched(raw, error=error)


__all__ = ["Reader"]
