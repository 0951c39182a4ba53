"""Read samples in threads, check their digests, cache some of them, and group them in batches.

::

    source --read ahead--> bytes, sample --digest--> sample --> cached, on disk, or previewed
                                                '-- differs from the first read: error

If the model fixes its batch, the last batch is filled up with the first samples (batch of 3)::

    a b c | d e f | g + a b
"""

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import concatenate_samples
from deploy.feed.file_list import UNREADABLE, RawSample, SampleChangedError, SampleDigests
from deploy.feed.images import printable_name
from deploy.feed.parallel import prefetch
from deploy.feed.pixels import Previews
from deploy.feed.sampling import ChosenSamples
from deploy.feed.sources import ImageSource, Sample, SampleSource
from deploy.feed.temporary_arrays import ItemStore, Shape
from deploy.machine import worker_threads
from deploy.tensors import Array
from deploy.terminal import phase


class SampleCache:
    """Samples by index in a temporary file without a name: written once, read any number of times.

    A full disk stops the caching, not the run: cached samples stay, the others are decoded again.
    """

    def __init__(self, indices: Collection[int], *, max_bytes: float = math.inf) -> None:
        """Args: indices: samples to cache; max_bytes: of all of them together."""
        self._accepted_indices = indices
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._positions: dict[int, int] = {}  # index -> position of the sample in the store
        self._store: ItemStore | None = None
        self._lock = threading.Lock()

    def __contains__(self, index: object) -> bool:
        return index in self._positions

    def add(self, index: int, sample: Mapping[str, Array]) -> None:
        """Cache a sample if it is one of those to cache and there is room."""
        with self._lock:
            if index not in self._accepted_indices or index in self._positions:
                return
            sample_bytes = sum(np.asarray(array).nbytes for array in sample.values())
            if self._used_bytes + sample_bytes > self._max_bytes:
                return
            try:
                if self._store is None:
                    self._store = ItemStore()
                self._store.append(sample)
            except (OSError, FeedError, ValueError):  # disk full, or not a plain array
                self._accepted_indices = ()
                return
            self._used_bytes += sample_bytes
            self._positions[index] = len(self._store) - 1

    def get(self, index: int) -> dict[str, Array] | None:
        """Return a cached sample; None for any other."""
        position = self._positions.get(index)
        store = self._store
        if position is None or store is None:
            return None
        return store[position]


_ReadResult = tuple[RawSample | None, Sample | FeedError]
"""(The undecoded sample, None if it cannot be read; the decoded one, or why there is none)."""


class SampleReader:
    """Reads samples and keeps the first few in memory.

    Attributes:
        digests: of the samples read.
        previews: of the samples read, as far as they were requested.
        decode_count: number of images or rows read for a run so far, not counting cached ones.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        skip_bad: bool,
        max_in_memory: int,
    ) -> None:
        """Read nothing yet.

        Args:
            source: all samples.
            skip_bad: skip samples that cannot be read, instead of raising.
            max_in_memory: number of samples that stay in memory, the first that are read.
        """
        self.skip_bad = skip_bad
        self.digests = SampleDigests(len(source))
        self.previews = Previews(None)  # of no samples, until `cache_samples`
        self.decode_count = 0
        self._source = source
        self._max_in_memory = max_in_memory
        self._memory_cache: dict[int, Sample] = {}
        self._disk_cache = SampleCache(frozenset())  # caches nothing, until `cache_samples`

    def cache_samples(self, indices: Iterable[int], previews: Previews) -> None:
        """Cache some samples on disk, and previews of some, as they are read from now on."""
        self._disk_cache = SampleCache(frozenset(indices))
        self.previews = previews

    def store_digest(self, index: int) -> None:
        """Read a sample only to store its digest; `UNREADABLE` if it cannot be read.

        Raises:
            SampleChangedError: the digest differs from the first read.
            FeedError: it cannot be read, unless `skip_bad`. The digest is stored even so.
        """
        name = printable_name(self._source.sample_name(index))
        try:
            raw_sample = self._source.load(index)
        except FeedError:
            self.digests.store_or_compare(index, UNREADABLE, name)
            if not self.skip_bad:
                raise
        else:
            self.digests.store_or_compare(index, raw_sample.digest, name)

    def hash_unread(self, indices: Sequence[int]) -> None:
        """Call `store_digest` for the samples that were not read yet."""
        unread = [index for index in indices if index not in self.digests]
        with phase("hashing", len(unread), "samples") as step:
            for index in unread:
                self.store_digest(index)
                step()

    def walk(
        self, chosen_samples: ChosenSamples, *, selected_indices: Collection[int] | None = None
    ) -> Iterator[tuple[int, Sample]]:
        """Yield (index, sample of batch 1) for every good sample, in the order of `chosen_samples`.

        A sample is bad if it cannot be read or decoded. Then `chosen_samples` skips it from now on.

        Args:
            chosen_samples: indices of samples in the source.
            selected_indices: yield these only; None for all.

        Raises:
            FeedError: (while iterating) a bad sample, unless `skip_bad`; or no good sample.
        """
        indices = chosen_samples.good_indices()
        if selected_indices is not None:
            indices = (index for index in indices if index in selected_indices)
        # images are decoded in parallel; other sources are read one sample after the other
        threads = worker_threads() if isinstance(self._source, ImageSource) else 1
        # `result`: what a thread read of the sample, or the error; None if the sample is cached
        for index, result in prefetch(indices, self._read_uncached, threads=threads):
            try:
                yield index, self.read(index, result)
            except SampleChangedError:  # not even with `skip_bad`: results would mix two files
                raise
            except FeedError as error:
                if not self.skip_bad:
                    raise FeedError(
                        f"{error}; {len(chosen_samples)} were to be fed: correct or remove it, or"
                        " skip bad ones (--skip-bad)"
                    ) from error
                chosen_samples.skip(index, str(error))
        chosen_samples.refuse_all_bad()

    def _read_uncached(self, index: int) -> _ReadResult | None:
        """Read and decode a sample, in any thread; None if it is cached."""
        if index in self._memory_cache or index in self._disk_cache:
            return None
        return _read_sample(self._source, index)

    def read(self, index: int, result: _ReadResult | None = None) -> Sample:
        """Return one sample, from the cache in memory or on disk if it is there.

        Args:
            index: of the sample in the source.
            result: what a thread has read of it; None to read it now, if it is not cached.

        Raises:
            SampleChangedError: its digest, of the bytes as read, differs from that of an earlier
                reading; `store_or_compare` raises it.
            FeedError: reading or decoding failed.
        """
        if index in self._memory_cache:
            return dict(self._memory_cache[index])
        cached = self._disk_cache.get(index)
        if cached is not None:
            return cached

        raw_sample, sample = result or _read_sample(self._source, index)
        name = self._source.sample_name(index)
        digest = UNREADABLE if raw_sample is None else raw_sample.digest
        self.digests.store_or_compare(index, digest, printable_name(name))
        if isinstance(sample, FeedError):
            raise sample
        assert raw_sample is not None  # it was decoded

        self.decode_count += 1
        self._disk_cache.add(index, sample)
        self.previews.add(index, name, raw_sample, sample)
        if len(self._memory_cache) < self._max_in_memory:
            self._memory_cache[index] = sample
        return dict(sample)


def _read_sample(source: SampleSource, index: int) -> _ReadResult:
    raw_sample = None
    try:
        raw_sample = source.load(index)
        return raw_sample, raw_sample.decode()
    except FeedError as error:
        return raw_sample, error


def iterate_batches(
    reader: SampleReader, chosen_samples: ChosenSamples, batch: int, already_read: range
) -> Iterator[Sample]:
    """Yield samples for a model that takes `batch` images or rows in each run.

    Args:
        reader: reads the images or rows.
        chosen_samples: which images or rows, in which order.
        batch: images or rows concatenated to one sample, along the first dimension.
        already_read: numbers of the samples, from 0, to leave out: an earlier run has read them.
            Bad images have no number.
    """
    selected_indices = None  # all
    if already_read:
        good_indices = list(chosen_samples.good_indices())
        read_indices = good_indices[already_read.start * batch : already_read.stop * batch]
        selected_indices = frozenset(chosen_samples.indices).difference(read_indices)

    group: list[Sample] = []
    for _, sample in reader.walk(chosen_samples, selected_indices=selected_indices):
        group.append(sample)
        if len(group) == batch:
            yield concatenate_samples(group, _explain_shapes)
            group = []

    if group:  # fill up the last batch with the first samples, again and again if there are few
        fillers = islice(cycle(chosen_samples.good_indices()), batch - len(group))
        yield concatenate_samples([*group, *map(reader.read, fillers)], _explain_shapes)


def last_batch_note(count: int, batch: int) -> str:
    """Return a note on how the last batch was filled; empty if it was full."""
    filler_count = -count % batch
    if not filler_count:
        return ""
    if count == 1:
        fillers = "only sample again and again"
    elif filler_count > count:
        fillers = f"{count} samples that there are again and again"
    elif filler_count == 1:
        fillers = "first sample again"
    else:
        fillers = f"first {filler_count} samples again"
    return f"the model's batch is {batch}: the last one was filled with the {fillers}"


def refuse_batches(batch: int, what: str = "shards are of single samples") -> None:
    """Refuse shards, or what else needs single samples, if the model fixes its batch.

    Raises:
        ConfigError: the batch is larger than 1.
    """
    if batch > 1:
        raise ConfigError(
            f"{what}, got a model with a fixed batch of {batch}; export it with a batch that is"
            " open"
        )


def _explain_shapes(name: str, shapes: Sequence[Shape]) -> FeedError:
    return FeedError(
        f"samples of one batch must have one shape, got {shapes} for {name!r};"
        " export the model with an open batch, or give all one size"
    )
