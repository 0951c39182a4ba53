"""The samples of one model: an ordered choice among a source's samples, read as often as needed.

::

    source --ChosenSamples: which, in what order--> SampleReader: decode, hash, cache
           --> batches --> samples()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from deploy.errors import FeedError, counted
from deploy.feed.arrays import ArraySource
from deploy.feed.batch_axis import describe_samples
from deploy.feed.file_list import Labels
from deploy.feed.images import printable_name
from deploy.feed.parallel import SampleStream
from deploy.feed.pixels import Preview, Previews, find_image
from deploy.feed.preprocess import Preprocess, Size
from deploy.feed.sample_reader import SampleReader, iterate_batches, last_batch_note, refuse_batches
from deploy.feed.sampling import ChosenSamples, Share, create_share, digest_names, spread_evenly
from deploy.feed.sources import (
    DEFAULT_MAX_PIXELS,
    ImageSource,
    RemoteSample,
    Sample,
    SampleSource,
    VideoSource,
    decoded_size,
    read_remote_samples,
)
from deploy.feed.states import SequenceSource, spread_steps
from deploy.tensors import Array, TensorSpec
from deploy.terminal import phase

# samples cached in memory: for shapes, latency runs, statistics of inner tensors
SAMPLES_IN_MEMORY = 8
_MAX_SKIPS_IN_NOTE = 3


class Feed:
    """The samples of one model; iterate over `samples()` as often as needed.

    Attributes:
        preprocess: the complete preprocessing, None for arrays.
        origin: where the preprocessing comes from: the model or the default; else empty.
        batch: images, or rows of arrays, of every sample: 1, or as many as the model fixes.
        kind: of the samples, such as "images" or "arrays".
        specs: the model's inputs, with what their first dimension is for these samples.
    """

    def __init__(
        self,
        source: SampleSource,
        chosen: Sequence[int],
        *,
        kind: str,
        skip_bad: bool,
        batch: int = 1,
        specs: Sequence[TensorSpec] = (),
        preprocess: Preprocess | None = None,
        notes: Sequence[str] = (),
        origin: str = "",
        has_assumed_scale: bool = False,
        share: Share | None = None,
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        """Create the feed of some samples of a source.

        Args:
            source: all samples.
            chosen: indices of the samples in it, in their order.
            kind: of the samples, such as "images" or "arrays".
            skip_bad: skip bad samples instead of raising.
            batch: images or rows of every sample that the feed yields.
            specs: the model's inputs.
            preprocess: complete preprocessing of images.
            notes: for the user.
            origin: see `ResolvedPreprocess`.
            has_assumed_scale: see `ResolvedPreprocess`.
            share: the shard (--shard i/n) that the samples are; None if there are no shards.
            skipped: index in the source -> why the sample there is known to be bad.
        """
        self.specs = tuple(specs)
        self.kind = kind
        self.batch = batch
        self.preprocess = preprocess
        self.origin = origin
        self.has_assumed_scale = has_assumed_scale
        self._source = source
        self._notes = tuple(notes)
        self._chosen_samples = ChosenSamples(chosen, share, skipped or {})
        self._sample_reader = SampleReader(
            source,
            skip_bad=skip_bad,
            max_in_memory=SAMPLES_IN_MEMORY * batch,
        )
        self._cached_names_digest = ""  # until `_names_digest` computes it
        # index in the source -> class number by `set_labels`; None until it is called
        self._user_labels: Mapping[int, int] | None = None
        # cached `labels`, and the number of bad samples that were known when they were cached; None
        # until they are cached
        self._good_labels: Labels = None
        self._bad_count_when_cached: int | None = None

    def __len__(self) -> int:
        """Number of samples that `samples()` yields; known bad ones do not count."""
        return -(-self.count // self.batch)

    @property
    def count(self) -> int:
        """Number of images or rows that are fed; known bad ones do not count."""
        return self._chosen_samples.count

    @property
    def sample_text(self) -> str:
        """What one sample is, where that is not plain; else empty."""
        if isinstance(self._source, ArraySource) and self._source.has_uneven_items:
            return "every row of an array is one sample (--batch-axis none: all its rows are)"
        if isinstance(self._source, SequenceSource):
            sequences = set(map(self._source.sequence_of, self._chosen_samples.good_indices()))
            return self._source.recurrence.describe(len(sequences))
        if self.kind == "arrays":
            return describe_samples(self.specs)
        return ""

    @property
    def unpadded_count(self) -> int | None:
        """Number of images, if the last batch may repeat some to be full; else None."""
        return self.count if self.batch > 1 else None

    @property
    def entry_count(self) -> int:
        """Number of images or rows, skipped ones included."""
        return len(self._chosen_samples)

    @property
    def padded_sample_count(self) -> int:
        """Number of samples at the end that repeat images to fill the model's batch."""
        return int(self.count % self.batch > 0)

    @property
    def decodes(self) -> int:
        """Number of images or rows read for a run so far."""
        return self._sample_reader.decode_count

    @property
    def has_fixed_size(self) -> bool:
        """Whether all samples are known to have one shape before they are read, as images are."""
        if self.states or self.preprocess is None or self.preprocess.size is None:
            return False
        return None not in self.preprocess.size

    @property
    def is_sequential(self) -> bool:
        """Whether reading a sample needs all samples before it, as a video's frames do."""
        return isinstance(self._source, VideoSource | SequenceSource)

    @property
    def states(self) -> Mapping[str, str]:
        """State input -> the output that the next step gets there; empty without states."""
        return self._source.recurrence.states if isinstance(self._source, SequenceSource) else {}

    def sequence_of(self, key: int) -> int:
        """Return the number of the sequence that a sample with this key is in."""
        return self._source.sequence_of(key) if isinstance(self._source, SequenceSource) else 0

    def spread(self, keys: Sequence[int], max_samples: int) -> list[int]:
        """Return at most `max_samples` keys, spread evenly; of sequences, the first steps."""
        if self.states:
            return spread_steps(keys, self.sequence_of, max_samples)
        return spread_evenly(keys, max_samples)

    @property
    def labels(self) -> Labels:
        """One class number per image or row, without the skipped ones; None without labels."""
        bad_count = len(self._chosen_samples.skip_reasons)
        if self._bad_count_when_cached != bad_count:
            labels = self._user_labels or self._source.labels
            if labels is not None:
                good_indices = self._chosen_samples.good_indices()
                self._good_labels = tuple(labels[index] for index in good_indices)
            self._bad_count_when_cached = bad_count
        return self._good_labels

    def set_labels(self, labels: Sequence[int]) -> None:
        """Set the class numbers of images or rows, in place of those of the source.

        Args:
            labels: one per chosen image or row, or one per image or row of the source; in both
                cases also of those that were skipped as bad.

        Raises:
            FeedError: there are more or fewer labels than images.
        """
        indices: Sequence[int] = self._chosen_samples.indices
        if len(labels) == len(self._source):  # one per image or row of the source
            indices = range(len(labels))
        if len(labels) != len(indices):
            raise FeedError(
                f"there must be one label per image, skipped ones included, got"
                f" {counted(len(labels), 'label')} for {len(indices)}"
            )
        self._user_labels = dict(zip(indices, labels, strict=True))
        self._bad_count_when_cached = None  # `labels` is computed anew

    @property
    def names(self) -> tuple[str, ...]:
        """One name per image or row, without the skipped ones."""
        return tuple(map(self._source.sample_name, self._chosen_samples.good_indices()))

    def good_name(self, number: int) -> str:
        """Return the name of an image or row, by its number among the good ones, from 0."""
        return self._source.sample_name(self._good_index(number))

    def name_of_key(self, key: int) -> str:
        """Return the name of an image or row by its key (see `samples_by_key`).

        Not for a model that fixes its batch: there a key is the number of a batch.
        """
        return self._source.sample_name(key)

    def _good_index(self, number: int) -> int:
        entry_count = self._chosen_samples.count_entries(number + 1)
        return self._chosen_samples.indices[entry_count - 1]

    @property
    def entry_names(self) -> Iterable[str]:
        """Name of every image or row, skipped ones too."""
        return map(self._source.sample_name, self._chosen_samples.indices)

    @property
    def source_names(self) -> Iterable[str]:
        """Name of every image or row of the source, also of those that were not chosen."""
        return map(self._source.sample_name, range(len(self._source)))

    def name_by_digest(self) -> dict[str, str]:
        """Return sha256 (hex) -> name of every image or row; call after a pass or `manifest`."""
        names = map(printable_name, self.entry_names)
        return dict(zip(self.entry_digests, names, strict=True))

    def sizes(self) -> Iterator[tuple[str, Size | None]]:
        """Yield name and (height, width) of each image file; None for an unreadable image."""
        if isinstance(self._source, ImageSource):
            for index in self._chosen_samples.good_indices():
                yield self._source.sample_name(index), decoded_size(self._source.files[index])

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the good samples in the complete list (see `Share`), after a pass."""
        return self._chosen_samples.positions

    @property
    def skipped(self) -> tuple[str, ...]:
        """Why each bad image or row was skipped; complete after one pass over `samples()`."""
        return tuple(reason for _, reason in sorted(self._chosen_samples.skip_reasons.items()))

    @property
    def skipped_by_position(self) -> dict[int, str]:
        """Position in the complete list -> why the sample there was skipped, after a pass."""
        return self._chosen_samples.skipped_by_position()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the samples were read; complete after one pass."""
        notes = [*self._notes, self._skip_note()]
        if isinstance(self._source, ImageSource):  # rows and frames are often equal
            copy_count = self.duplicate_count
            if copy_count:
                predicate = "are copies of others and count"
                if copy_count == 1:
                    predicate = "is a copy of another and counts"
                notes.append(f"{copy_count} of the {self.count} images {predicate} once more")
            notes.append(self._source.note)
        notes.append(last_batch_note(self.count, self.batch))
        return tuple(filter(None, notes))

    def _skip_note(self) -> str:
        """Return a note on the skipped samples, with the first reasons; "" without any."""
        reasons = self.skipped
        if not reasons:
            return ""
        note = f"{len(reasons)} skipped: {'; '.join(reasons[:_MAX_SKIPS_IN_NOTE])}"
        if len(reasons) > _MAX_SKIPS_IN_NOTE:
            note += f" (and {len(reasons) - _MAX_SKIPS_IN_NOTE} more)"
        return note

    def refuse_all_bad(self) -> None:
        """Raise `FeedError` if all samples were skipped."""
        self._chosen_samples.refuse_all_bad()

    @property
    def duplicate_count(self) -> int:
        """Number of images or rows that equal another one; complete after a pass."""
        digests = self._sample_reader.digests.known(self._chosen_samples.good_indices())
        return len(digests) - len(set(digests))

    def count_shared(self, other: Feed) -> int:
        """Count the images or rows read here whose bytes were also read by another feed."""
        other_digests = set(other._known_digests())
        return sum(digest in other_digests for digest in self._known_digests())

    def _known_digests(self) -> list[bytes]:
        return self._sample_reader.digests.known(self._chosen_samples.indices)

    @property
    def entry_digests(self) -> tuple[str, ...]:
        """sha256 (hex) of every image or row, skipped ones too; complete after a pass."""
        return self._sample_reader.digests.hex(self._chosen_samples.indices)

    def sample_digests(self, number: int) -> tuple[str, ...]:
        """Return the sha256 (hex) of each image or row of the n-th sample, from 1, of a pass."""
        stop = number * self.batch
        indices = self._chosen_samples.last_pass_indices(stop - self.batch, stop)
        return self._sample_reader.digests.hex(indices)

    @property
    def max_pixels(self) -> int:
        """Pixels that an image may have."""
        if isinstance(self._source, ImageSource):
            return self._source.max_pixels
        return DEFAULT_MAX_PIXELS

    @property
    def settings(self) -> dict[str, Any]:
        """What is known before any sample is read, as plain JSON."""
        settings = {
            "kind": self.kind,
            "batch": self.batch,
            "skip_bad": self._sample_reader.skip_bad,
            "preprocess": self.preprocess.to_json() if self.preprocess else None,
        }
        if self.states:
            settings["states"] = dict(self.states)
        return settings

    def manifest(self, first: int | None = None) -> dict[str, Any]:
        """Return what was fed, as plain JSON: settings, number of samples, and digests of them all.

        The digests are over the bytes of files or arrays, not over decoded pixels. Samples that no
        pass has read are read now, and skipped samples count by their bytes. `sha256` does not
        depend on file names, folder or list, nor, unless the model fixes its batch, on the order.
        `ordered_sha256` depends on the order.

        Args:
            first: describe only so many first images or rows, as if `keep_first` had dropped the
                others; None for all.

        Raises:
            FeedError: a file cannot be read, unless `skip_bad`.
        """
        indices = self._chosen_samples.indices
        if first is not None:
            indices = sorted(indices[:first])  # `keep_first` restores the order of the source
        self._sample_reader.hash_unread(indices)

        digests = self._sample_reader.digests
        return {
            **self.settings,
            "count": len(indices),
            # single samples are fed independently, so their order does not matter; that of images
            # in batches does
            "sha256": digests.combined(indices, in_digest_order=self.batch == 1),
            "ordered_sha256": digests.combined(indices),
        }

    # --- Parts of the feed, for shards, clusters and interrupted runs

    @property
    def share(self) -> Share | None:
        """The shard that the feed is; None if there are no shards."""
        return self._chosen_samples.share

    @property
    def share_or_all(self) -> Share:
        """The feed's share; all of it, 1/1, if there are no shards."""
        return self.share or create_share((1, 1), self.entry_count, self._names_digest())

    def get_share(self, shard: tuple[int, int]) -> Share:
        """Return a shard's (its number from 1, number of shards) share of this feed.

        Raises:
            ConfigError: the model fixes a batch.
            FeedError: there are more shards than samples.
        """
        refuse_batches(self.batch)
        return create_share(shard, self.entry_count, self._names_digest())

    def _name(self, index: int) -> str:
        """Return a sample's name for messages."""
        return printable_name(self._source.sample_name(index))

    def _names_digest(self) -> str:
        """Digest of all names, cached: every piece of a calibration needs it."""
        if not self._cached_names_digest:
            self._cached_names_digest = digest_names(self.entry_names)
        return self._cached_names_digest

    def open_share(self, share: Share) -> Feed:
        """Return a share of this feed as a feed."""
        shard_size = len(share.positions)
        return Feed(
            self._source,
            self._chosen_samples.indices_of(share),
            specs=self.specs,
            kind=self.kind,
            batch=self.batch,
            preprocess=self.preprocess,
            skip_bad=self._sample_reader.skip_bad,
            notes=(*self._notes, f"shard {share}: {shard_size} of {share.count} samples"),
            origin=self.origin,
            has_assumed_scale=self.has_assumed_scale,
            share=share,
        )

    def read_share(self, share: Share) -> list[RemoteSample]:
        """Read the samples of a share, to be sent to another machine."""
        return read_remote_samples(self._source, self._chosen_samples.indices_of(share))

    def store_digest(self, position: int) -> None:
        """Read one image or row only to store its digest, with which later reads are compared.

        Raises:
            FeedError: it cannot be read, unless `skip_bad`.
        """
        self._sample_reader.store_digest(self._chosen_samples.indices[position])

    def merge_remote_pass(
        self, share: Share, digests: Iterable[str], skipped: Mapping[int, str]
    ) -> None:
        """Record that another machine has read a share, as if its samples had been read here.

        Args:
            share: a part of this feed's samples.
            digests: sha256 (hex) of the share's samples in order, also of skipped ones.
            skipped: position of a sample of the share in this feed -> why that machine skipped it.

        Raises:
            SampleChangedError: a sample has another digest on this machine.
        """
        source_indices = self._chosen_samples.indices_of(share)
        for source_index, digest in zip(source_indices, digests, strict=True):
            self._sample_reader.digests.store_or_compare(
                source_index, bytes.fromhex(digest), self._name(source_index)
            )
        self._chosen_samples.skip_entries(skipped)
        # the other machine decoded its good samples for this run
        self._sample_reader.decode_count += len(share.positions) - len(skipped)

    def progress_after(self, sample_count: int) -> tuple[tuple[str, ...], dict[int, str]]:
        """Return which images or rows a run has used so far, for `resume`: (digests, skipped).

        Args:
            sample_count: number of samples that were used; more may have been read already.

        Returns:
            sha256 (hex) of each image or row, skipped ones included; and position in the complete
            list -> why the sample there was skipped.
        """
        good_count = sample_count * self.batch  # images or rows of these samples, without bad ones
        if good_count < self.count:
            entry_count = self._chosen_samples.count_entries(good_count)
        else:  # all were used, also bad ones at the end; the last batch may repeat some to be full
            entry_count = self.entry_count
        digests = self._sample_reader.digests.hex(self._chosen_samples.indices[:entry_count])
        return digests, self._chosen_samples.skipped_by_position(entry_count)

    def resume(self, digests: Sequence[str], skipped: Mapping[int, str]) -> None:
        """Resume an interrupted run: check that its samples are unchanged, and skip its bad ones.

        Args:
            digests: sha256 (hex) of the first images or rows, which that run read.
            skipped: position in the complete list (see `Share`) -> why that run skipped the sample
                there.

        Raises:
            FeedError: a sample differs, or cannot be read (unless `skip_bad`).
        """
        known_digests = self._sample_reader.digests
        with phase("hashing", len(digests), "samples") as step:
            # not strict: there are more samples than that run read
            for index, expected_digest in zip(self._chosen_samples.indices, digests, strict=False):
                if index not in known_digests:
                    # of a bad sample it stores `UNREADABLE`, as that run did
                    self._sample_reader.store_digest(index)
                if known_digests.digest(index).hex() != expected_digest:
                    raise FeedError(
                        "--resume needs the samples that the interrupted run read, got another"
                        f" {self._name(index)}; restore that file, or leave --resume out to"
                        " begin again"
                    )
                step()
        self._chosen_samples.skip_positions(skipped)

    # --- The order of the samples

    def use_sampling_order(self) -> None:
        """Change to low-discrepancy order: the first n samples are spread over the feed."""
        self._chosen_samples.use_sampling_order()
        self._cached_names_digest = ""

    def count_entries(self, number: int) -> int:
        """Return the number of images or rows up to and including the n-th good one."""
        return self._chosen_samples.count_entries(number)

    def keep_first(self, count: int) -> None:
        """Drop all but the first `count` images or rows, and restore the order of the source."""
        if count < self.entry_count:
            note = f"{count} of {self.entry_count} samples are used, spread evenly over all"
            self._notes = (*self._notes, note)
        self._chosen_samples.keep_first(count)
        self._cached_names_digest = ""
        self._bad_count_when_cached = None

    # --- Reading

    def samples(self, already_read: range = range(0)) -> SampleStream[Sample]:
        """Return a stream of {input name: array} with first dimension `batch`, in feed order.

        A background thread reads a few samples ahead; up to 4 other threads decode images. Several
        threads may pull from the stream. To leave it early, `close()` it or use it in a `with`.

        Args:
            already_read: numbers, from 0, of samples to leave out, since an earlier run read them.

        Raises:
            FeedError: (while iterating) a bad sample, unless `skip_bad`; or no good sample.
        """
        return SampleStream(self._batches(already_read))

    def _batches(self, already_read: range = range(0)) -> Iterator[Sample]:
        return iterate_batches(self._sample_reader, self._chosen_samples, self.batch, already_read)

    def first_samples(self, max_samples: int) -> list[Sample]:
        """Return the first samples, at most `max_samples` or `SAMPLES_IN_MEMORY`; cached.

        Raises:
            FeedError: see `samples`.
        """
        return list(islice(self._batches(), min(max_samples, SAMPLES_IN_MEMORY)))

    def spread_samples(self, max_samples: int) -> Iterator[Sample]:
        """Yield at most `max_samples` samples spread evenly over the feed, one at a time.

        The first samples of a feed sorted by class or time do not represent it. If the model
        fixes its batch, these are the first samples nevertheless.

        Raises:
            FeedError: see `samples`.
        """
        for _, sample in self.samples_by_key(self.spread_keys(max_samples)):
            yield sample

    def spread_keys(self, max_samples: int) -> tuple[int, ...]:
        """Return the keys of the samples that `spread_samples` yields, without known bad ones."""
        if self.batch > 1:
            return tuple(range(min(max_samples, len(self))))
        return tuple(self.spread(list(self._chosen_samples.good_indices()), max_samples))

    def samples_by_key(self, keys: Collection[int]) -> Iterator[tuple[int, Sample]]:
        """Yield (key, sample) for these keys, in feed order, without bad ones.

        A key is the index of an image or row in the source, so it does not depend on which others
        turn out to be bad. If the model fixes its batch, a sample is a batch, and its key is the
        number of the batch, from 0.

        Raises:
            FeedError: see `samples`.
        """
        if self.batch == 1:
            yield from self._sample_reader.walk(
                self._chosen_samples, selected_indices=frozenset(keys)
            )
        elif keys:
            for key, sample in enumerate(islice(self._batches(), max(keys) + 1)):
                if key in keys:
                    yield key, sample

    def sample_key(self, number: int) -> int:
        """Return the key of the n-th sample, from 1, of a pass over `samples` that reached it."""
        if self.batch > 1:
            return number - 1
        return self._good_index(number - 1)

    def cache_samples(self, count: int, preview_count: int = 0) -> None:
        """Let samples be cached on disk when they are read from now on.

        Args:
            count: number of samples to cache, those that `spread_samples` yields.
            preview_count: number of samples, spread evenly, of which a `Preview` is stored too:
                two small images.
        """
        indices = self._chosen_samples.indices
        if self.batch > 1:  # `spread_samples` yields the first batches, of images in a row
            cached_indices = list(indices[: count * self.batch])
        else:
            cached_indices = self.spread(indices, count)
        preview_indices = self.spread(indices, preview_count)
        self._sample_reader.cache_samples(
            (*cached_indices, *preview_indices), Previews(self.preprocess, preview_indices)
        )

    def previews(self) -> list[Preview]:
        """Return previews of the samples to show; samples not read so far are read now.

        Raises:
            FeedError: see `samples`.
        """
        previews = self._sample_reader.previews
        for _ in self._sample_reader.walk(self._chosen_samples, selected_indices=previews.missing):
            pass
        return previews.in_order()

    def to_image(self, sample: Mapping[str, Array]) -> Array | None:
        """Return the model's view of one sample, uint8 [H, W, 3]; None if it is no image."""
        return find_image(sample, self.preprocess)
