"""Read samples in threads, check their digests, cache some of them, and group them in batches.

::

    source --fetched, ahead--> bytes, sample --digest--> sample --> cached, on disk, or previewed
                                                    '-- differs from the first read: Changed

If the model fixes its batch, the last batch is filled up with the first samples (batch of 3)::

    a b c | d e f | g + a b
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import ArrayLocation, TemporaryArrays
from deploy.feed.file_list import UNREADABLE, RawSample, SampleChangedError, SampleDigests
from deploy.feed.parallel import prefetch
from deploy.feed.preprocess import Preprocess
from deploy.feed.preview import Previews
from deploy.feed.sampling import ChosenSamples
from deploy.feed.sources import ImageSource, Sample, SampleSource
from deploy.machine import worker_threads
from deploy.tensors import Array
from deploy.terminal import phase


class SampleCache:
    """Samples by index in a temporary file without a name: written once, read any number of times.

    A full disk stops the caching, not the run: cached samples stay, the others are decoded again.
    """

    def __init__(self, wanted: Collection[int], *, most_bytes: int | None = None) -> None:
        """Args: wanted: samples to cache; most_bytes: size limit, None for no limit."""
        self._wanted = wanted
        self._most_bytes = most_bytes
        self._places: dict[int, dict[str, ArrayLocation]] = {}
        self._scratch: TemporaryArrays | None = None
        self._bytes = 0
        self._using = threading.Lock()

    def __contains__(self, index: object) -> bool:
        return index in self._places

    def add(self, index: int, sample: Mapping[str, Array]) -> None:
        """Cache a sample if it is wanted and there is room."""
        with self._using:
            if index not in self._wanted or index in self._places:
                return
            size = sum(np.asarray(array).nbytes for array in sample.values())
            if self._most_bytes is not None and self._bytes + size > self._most_bytes:
                return
            try:
                if self._scratch is None:
                    self._scratch = TemporaryArrays("calib8-")
                places = {name: self._scratch.add(array) for name, array in sample.items()}
            except (OSError, ValueError):  # disk full, or not a plain array
                self._wanted = ()
                return
            self._bytes += size
            self._places[index] = places

    def get(self, index: int) -> dict[str, Array] | None:
        """Return a cached sample; None for any other."""
        with self._using:
            places, scratch = self._places.get(index), self._scratch
        if places is None or scratch is None:
            return None
        return {name: scratch.get(place) for name, place in places.items()}


@dataclass(frozen=True, slots=True)
class _ReadResult:
    """A sample that a thread read, or the error it met."""

    raw: RawSample | None = None
    sample: Sample | None = None
    error: FeedError | None = None


class SampleReader:
    """Reads samples and keeps the first few in memory.

    Attributes:
        digests: digests of the samples read.
        previews: previews of the samples read, as far as they are wanted.
        decodes: number of images or rows read for a run so far.
    """

    def __init__(
        self, source: SampleSource, *, skip_bad: bool, kept: int, preprocess: Preprocess | None
    ) -> None:
        self.skip_bad = skip_bad
        self.digests = SampleDigests(len(source))
        self.previews = Previews(preprocess)
        self.decodes = 0
        self._source = source
        self._most_kept = kept
        self._kept: dict[int, Sample] = {}
        self._spool = SampleCache(frozenset())

    def cache_samples(self, on_disk: Iterable[int], views: Previews) -> None:
        """Cache some samples on disk, and previews of some, as they are read from now on."""
        self._spool = SampleCache(frozenset(on_disk))
        self.previews = views

    def hash(self, index: int) -> None:
        """Read a sample only to store its digest.

        Raises:
            FeedError: it cannot be read, unless `skip_bad`.
        """
        try:
            self._load(index)
        except FeedError:
            if not self.skip_bad:
                raise

    def hash_unread(self, indices: Sequence[int]) -> None:
        """Call `hash` for the samples that were not read yet."""
        unread = sum(index not in self.digests for index in indices)
        with phase("hashing", unread, "samples") as step:
            for index in indices:
                if index not in self.digests:
                    self.hash(index)
                    step()

    def _load(self, index: int) -> RawSample:
        """Read a sample's bytes and check its digest.

        Raises:
            Changed: the digest differs from the first read.
            FeedError: the sample cannot be read.
        """
        name = self._source.title(index)
        try:
            raw = self._source.load(index)
        except FeedError:
            self.digests.record(index, UNREADABLE, name)
            raise
        self.digests.record(index, raw.digest, name)
        return raw

    def walk(
        self, chosen: ChosenSamples, *, only: Collection[int] | None = None
    ) -> Iterator[tuple[int, Sample]]:
        """Yield (index, sample of batch 1) for every good sample, or for those in `only`.

        Raises:
            FeedError: (while iterating) a bad sample, unless `skip_bad`; or no good sample.
        """
        wanted = (index for index in chosen.good_indices() if only is None or index in only)
        threads = worker_threads() if isinstance(self._source, ImageSource) else 1
        for index, fetched in prefetch(wanted, self._fetch, threads=threads):
            try:
                yield index, self.read(index, fetched)
            except SampleChangedError:
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

    def _fetch(self, index: int) -> _ReadResult | None:
        """Read and decode a sample, in any thread; None if it is cached."""
        if index in self._kept or index in self._spool:
            return None
        return _fetched(self._source, index)

    def read(self, index: int, fetched: _ReadResult | None = None) -> Sample:
        """Return one sample, from the cache in memory or on disk if it is there."""
        if index in self._kept:
            return dict(self._kept[index])
        if (cached := self._spool.get(index)) is not None:
            return cached
        raw, sample = self._checked(index, fetched or _fetched(self._source, index))
        self.decodes += 1
        self._spool.add(index, sample)
        self.previews.add(index, self._source.sample_name(index), raw, sample)
        if len(self._kept) < self._most_kept:
            self._kept[index] = sample
        return dict(sample)

    def _checked(self, index: int, fetched: _ReadResult) -> tuple[RawSample, Sample]:
        """Check the digest of a sample that was just read, and return it.

        Raises:
            Changed: the digest differs from the first read.
            FeedError: reading or decoding failed.
        """
        digest = UNREADABLE if fetched.raw is None else fetched.raw.digest
        self.digests.record(index, digest, self._source.title(index))
        if fetched.error is not None:
            raise fetched.error
        assert fetched.raw is not None and fetched.sample is not None
        return fetched.raw, fetched.sample


def _fetched(source: SampleSource, index: int) -> _ReadResult:
    raw = None
    try:
        raw = source.load(index)
        return _ReadResult(raw, raw.decode())
    except FeedError as error:
        return _ReadResult(raw, error=error)


def iterate_batches(
    reader: SampleReader, chosen: ChosenSamples, batch: int, without: range = range(0)
) -> Iterator[Sample]:
    """Yield samples whose first dimension is `batch`, except those at the places `without`."""
    only = None
    if without:
        left_out = list(chosen.good_indices())[without.start * batch : without.stop * batch]
        only = frozenset(chosen.indices).difference(left_out)
    if batch == 1:
        yield from (sample for _, sample in reader.walk(chosen, only=only))
        return
    group: list[Sample] = []
    for _, sample in reader.walk(chosen, only=only):
        group.append(sample)
        if len(group) == batch:
            yield _concatenate(group)
            group = []
    if group:
        good, missing = list(chosen.good_indices()), batch - len(group)
        yield _concatenate(group + [reader.read(good[i % len(good)]) for i in range(missing)])


def last_batch_note(count: int, batch: int) -> str:
    """Return a note on how the last batch was filled; empty if it was full."""
    if not (filler := -count % batch):
        return ""
    some = f"first {filler} samples" if filler > 1 else "first sample"
    if filler > count:
        some = f"{count} samples that there are" if count > 1 else "only sample"
    return (
        f"the model's batch is {batch}: the last one was filled with the {some} again"
        f"{' and again' if filler > count else ''}"
    )


def refuse_batches(batch: int) -> None:
    """Refuse shards if the model fixes its batch.

    Raises:
        ConfigError: the batch is larger than 1.
    """
    if batch > 1:
        raise ConfigError(
            "shards are of single samples, got a model with a fixed batch of"
            f" {batch}; export it with a batch that is open"
        )


def _concatenate(group: list[Sample]) -> Sample:
    batch_arrays: Sample = {}
    for name, first in group[0].items():
        shapes = {s[name].shape for s in group}
        if len(shapes) > 1:
            raise FeedError(
                f"samples of one batch must have one shape, got {sorted(shapes)} for {name!r};"
                " export the model with an open batch, or give all one size"
            )
        batch_arrays[name] = first if not first.shape else np.concatenate([s[name] for s in group])
    return batch_arrays
