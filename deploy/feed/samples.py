"""The samples of one model: an ordered choice of a source's, read as often as needed.

::

    source --Chosen: which, in what order--> Reader: read, digested, kept --> batches --> samples()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from deploy.errors import FeedError
from deploy.feed.parallel import Stream
from deploy.feed.pixels import picture_in
from deploy.feed.preprocess import Preprocess, Size
from deploy.feed.preview import View, Views
from deploy.feed.reader import Reader, batches, filled, refuse_batches
from deploy.feed.sampling import Chosen, Share, names_digest, share_of, some
from deploy.feed.sources import ImageSource, Posted, Sample, Source, VideoSource, posted
from deploy.tensors import Array
from deploy.terminal import phase

KEPT = 8  # samples that stay in memory: for shapes, latency runs, figures of inner tensors


class Feed:
    """The samples of one model; iterate `samples()` as often as needed.

    Attributes:
        preprocess: the complete preprocessing, None for arrays.
        origin: what said so, where it was the model; else empty.
        batch: size of the first dimension of every sample: 1, or what the model fixes.
    """

    def __init__(
        self,
        source: Source,
        chosen: Sequence[int],
        *,
        kind: str,
        batch: int,
        preprocess: Preprocess | None,
        skip_bad: bool,
        notes: Sequence[str],
        origin: str = "",
        share: Share | None = None,
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        self._source = source
        self._chosen = Chosen(chosen, share, skipped or {})
        self._reader = Reader(source, skip_bad=skip_bad, kept=KEPT * batch, preprocess=preprocess)
        self._names = ""  # digest of them
        self._kind = kind
        self._good: tuple[int, tuple[int, ...]] = (-1, ())  # bad ones known, labels without them
        self._given: Mapping[int, int] | None = None  # labels from elsewhere than the source
        self.batch = batch
        self.preprocess = preprocess
        self.origin = origin
        self._notes = tuple(notes)

    def __len__(self) -> int:
        """How many samples `samples()` gives; known bad ones are not counted."""
        return -(-self.count // self.batch)

    @property
    def count(self) -> int:
        """How many images or rows are fed; known bad ones are not counted."""
        return self._chosen.count

    @property
    def opened(self) -> int:
        """How many images or rows there are, skipped ones too."""
        return len(self._chosen)

    @property
    def filled(self) -> int:
        """How many samples, at the end, hold images again to fill the model's batch."""
        return 1 if self.count % self.batch else 0

    @property
    def decodes(self) -> int:
        """How many images or rows were read to be run, so far."""
        return self._reader.decodes

    @property
    def one_size(self) -> bool:
        """Whether all samples have one shape, as is known before they are read: pictures'."""
        sides = None if self.preprocess is None else self.preprocess.size
        return sides is not None and None not in sides

    @property
    def share(self) -> Share | None:
        """What part of a whole it is; None for all of it."""
        return self._chosen.share

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One class number per image or row, without the skipped ones; None where not given."""
        labels, bad = self._given or self._source.labels, len(self._chosen.skipped)
        if labels is None:
            return None
        if self._good[0] != bad:
            self._good = bad, tuple(labels[i] for i in self._chosen.good())
        return self._good[1]

    def label(self, labels: Sequence[int]) -> None:
        """Give each image or row its class number; those that turn out bad have one too.

        Raises:
            FeedError: there are more or fewer of them.
        """
        if len(labels) != self.opened:
            raise FeedError(
                f"there must be one label an image, those that are left out too, got {len(labels)}"
                f" labels for {self.opened}"
            )
        self._given = dict(zip(self._chosen.indices, labels, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """One name per image or row, without the skipped ones."""
        return tuple(map(self._source.sample_name, self._chosen.good()))

    def sizes(self) -> Iterator[tuple[str, Size | None]]:
        """Name and (height, width) of each picture in a file; None of one that cannot be read."""
        if isinstance(self._source, ImageSource):
            for index in self._chosen.good():
                yield self._source.sample_name(index), self._source.size(index)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Why each bad image or row was left out; complete after one pass over `samples()`."""
        skipped = self._chosen.skipped
        return tuple(skipped[i] for i in sorted(skipped))

    @property
    def places(self) -> Sequence[int]:
        """Of the good samples, in the whole of which the feed is a share; complete after a pass."""
        return self._chosen.places

    @property
    def skipped_places(self) -> dict[int, str]:
        """Place in the whole -> why the sample there was left out; complete after a pass."""
        return self._chosen.skipped_places

    @property
    def seen(self) -> tuple[str, ...]:
        """sha256 (hex) of every image or row, skipped ones too; complete after a pass."""
        return tuple(self._reader.seen.hex(self._chosen.indices))

    def shared(self, other: Feed) -> int:
        """How many images or rows were read here and of another feed too, by their bytes."""
        ours, theirs = (
            [feed._reader.seen.of(i) for i in feed._chosen.indices if i in feed._reader.seen]
            for feed in (self, other)
        )
        known = set(theirs)
        return sum(one in known for one in ours)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the feed was read, in sentences; complete after one pass."""
        extra = (_left_out(list(self.skipped)), self._repeated(), filled(self.count, self.batch))
        return (*self._notes, *filter(None, extra))

    def _repeated(self) -> str:
        """That pictures are there more than once; of rows and frames some often are."""
        pictures = isinstance(self._source, ImageSource)
        copies = self._reader.seen.copies(self._chosen.good()) if pictures else 0
        are = "is a copy of another and counts" if copies == 1 else "are copies of others and count"
        return f"{copies} of the {self.count} images {are} once more" if copies else ""

    @property
    def by_turns(self) -> bool:
        """Whether a sample can only be read after those before it, as a video's frames."""
        return isinstance(self._source, VideoSource)

    def share_of(self, shard: tuple[int, int]) -> Share:
        """What a shard (its number from 1, of how many) has of this feed.

        Raises:
            ConfigError: the model fixes a batch.
            FeedError: there are more shards than samples.
        """
        refuse_batches(self.batch)
        return share_of(shard, self.opened, self._names_digest())

    def _names_digest(self) -> str:
        """Of all names: made once, since a piece of a calibration asks for it."""
        names = map(self._source.sample_name, self._chosen.indices)
        self._names = self._names or names_digest(names)
        return self._names

    def part(self, share: Share) -> Feed:
        """A share of this feed, as a feed of its own."""
        return Feed(
            self._source,
            self._chosen.of(share),
            kind=self._kind,
            batch=self.batch,
            preprocess=self.preprocess,
            skip_bad=self._reader.skip_bad,
            notes=(),
            share=share,
        )

    def posted(self, share: Share) -> list[Posted]:
        """The samples of a share, read to be sent to another machine."""
        return posted(self._source, self._chosen.of(share))

    def glance(self, place: int) -> None:
        """Read one sample for its digest.

        Raises:
            FeedError: it cannot be read, unless `skip_bad`.
        """
        self._reader.hash(self._chosen.indices[place])

    def seen_elsewhere(
        self, share: Share, digests: Iterable[str], skipped: Mapping[int, str]
    ) -> None:
        """Take what a pass over a share found on another machine.

        Args:
            share: of this feed.
            digests: sha256 (hex) of its samples in their order.
            skipped: place in the whole -> why the sample there was left out.

        Raises:
            Changed: a sample was another one here.
        """
        for index, digest in zip(self._chosen.of(share), digests, strict=True):
            self._reader.seen.note(index, bytes.fromhex(digest), self._source.told(index))
        indices = self._chosen.indices
        self._chosen.skipped |= {indices[place]: why for place, why in skipped.items()}
        self._reader.decodes += len(share.places) - len(skipped)

    @property
    def whole(self) -> Share:
        """Of which samples it is which part; of all the only one."""
        if self.share is not None:
            return self.share
        return share_of((1, 1), self.opened, self._names_digest())

    def so_far(self, samples: int) -> tuple[tuple[str, ...], dict[int, str]]:
        """What the first so many samples came of, while others may be read already.

        Returns:
            sha256 (hex) of each image or row, skipped ones too; and place in the whole -> why the
            one there was left out.
        """
        most = samples * self.batch
        read = self._chosen.reached(most) if most < self.count else self.opened
        digests = tuple(self._reader.seen.hex(self._chosen.indices[:read]))
        return digests, self._chosen.skipped_before(read)

    def take_up(self, digests: Sequence[str], skipped: Mapping[int, str]) -> None:
        """Be where an earlier run's `so_far` was: hash what it read, and skip what it skipped.

        Raises:
            FeedError: one of them is another now, or cannot be read, unless `skip_bad`.
        """
        seen = self._reader.seen
        with phase("hashing", len(digests), "samples") as step:
            for index, known in zip(self._chosen.indices, digests, strict=False):
                if index not in seen:
                    self._reader.hash(index)
                if seen.of(index).hex() != known:
                    raise FeedError(
                        "a run goes on with the samples that it has counted, got another"
                        f" {self._source.told(index)}; put back the one that was there, or leave"
                        " --resume away to begin anew"
                    )
                step()
        self._chosen.skip_places(skipped)

    def samples(self, without: range = range(0)) -> Stream[Sample]:
        """A stream of input name -> array, first dimension `batch`, in the feed's order.

        A background thread reads a few samples ahead, and has pictures decoded by up to 4 others.
        The stream may be pulled by several threads at once; leaving it early: `close()` it or use
        it in a `with`.

        Args:
            without: places, from 0, of samples that an earlier run read; they are not read.

        Raises:
            FeedError: (while iterating) a bad sample, unless `skip_bad`; or nothing but bad ones.
        """
        return Stream(lambda: self._batches(without))

    def _batches(self, without: range = range(0)) -> Iterator[Sample]:
        return batches(self._reader, self._chosen, self.batch, without)

    def remember(self, first: int, spread: int = 0, shown: int = 0) -> None:
        """Keep samples on disk as they are read: the first ones, and those that `spread` gives.

        Args:
            first: how many at the beginning.
            spread: how many all over the feed.
            shown: how many more all over the feed, with small pictures of them for `views`.
        """
        if self.batch > 1:  # `spread` gives the first of them
            first, spread = max(first, spread), 0
        indices = self._chosen.indices
        early, seen = indices[: first * self.batch], some(indices, shown)
        on_disk = (*early, *some(indices, spread), *seen)
        self._reader.remember(on_disk, Views(self.preprocess, seen))

    def scatter(self) -> None:
        """Give the samples so that the first so many are from all over the feed."""
        self._chosen.scatter()
        self._names = ""

    def reached(self, number: int) -> int:
        """How many images or rows lie up to the sample of this number, skipped ones too."""
        return self._chosen.reached(number)

    def keep(self, count: int) -> None:
        """Be the feed of the first so many images or rows alone, in the order of their source."""
        if count < self.opened:
            said = f"{count} of {self.opened} samples are used, spread evenly over all"
            self._notes = (*self._notes, said)
        self._chosen.keep(count)
        self._names = ""
        self._good = (-1, ())

    def views(self) -> list[View]:
        """Pictures of the samples to be shown; those that nobody has read are read now.

        Raises:
            FeedError: as `samples`.
        """
        views = self._reader.views
        for _ in self._reader.walk(self._chosen, only=views.missing):
            pass
        return views.found()

    def picture(self, sample: Mapping[str, Array]) -> Array | None:
        """What the model sees of one sample, uint8 [H, W, 3]; None where it is no picture.

        Args:
            sample: arrays with a batch of 1.
        """
        return picture_in(sample, self.preprocess)

    def first(self, most: int) -> list[Sample]:
        """The first samples, at most `most` and `KEPT`; read once, whoever else reads them.

        Raises:
            FeedError: as `samples`.
        """
        return list(islice(self._batches(), min(most, KEPT)))

    def spread(self, most: int) -> Iterator[Sample]:
        """Samples from all over the feed, at most `most`, one at a time.

        A feed that is sorted, by class or by time, shows little of itself at its beginning. Of a
        model with a fixed batch these are the first ones all the same.

        Raises:
            FeedError: as `samples`.
        """
        yield from (sample for _, sample in self.keyed(self.spread_keys(most)))

    @property
    def form(self) -> dict[str, Any]:
        """What is known before a sample is read, as plain JSON."""
        return {
            "kind": self._kind,
            "batch": self.batch,
            "skip_bad": self._reader.skip_bad,
            "preprocess": self.preprocess.to_json() if self.preprocess else None,
        }

    def spread_keys(self, most: int) -> tuple[int, ...]:
        """Keys of the samples that `spread` gives, as far as it is known which are bad."""
        if self.batch > 1:
            return tuple(range(min(most, len(self))))
        return tuple(some(list(self._chosen.good()), most))

    def keyed(self, keys: Collection[int]) -> Iterator[tuple[int, Sample]]:
        """(key, sample) of those that are named, in the feed's order, without bad ones.

        A key names a sample of this feed whichever others turn out to be bad.

        Raises:
            FeedError: as `samples`.
        """
        if self.batch == 1:
            yield from self._reader.walk(self._chosen, only=frozenset(keys))
        elif keys:
            numbered = enumerate(islice(self._batches(), max(keys) + 1))
            yield from ((key, sample) for key, sample in numbered if key in keys)

    def key(self, number: int) -> int:
        """Key of sample `number`, from 1, of a pass over `samples`, once it was given."""
        return number - 1 if self.batch > 1 else self._chosen.numbered(number)

    def manifest(self, first: int | None = None) -> dict[str, Any]:
        """What was fed, as plain JSON.

        Args:
            first: of so many images or rows alone, as if `keep` had left no others; None for all.

        Made of the files' bytes (or the arrays'), not of decoded pixels; what no pass has read yet
        is read now. `sha256` is the same for the same samples under other names, in a folder or in
        a list, and in any order (but of a model with a fixed batch, where the order tells which
        stand together); `ordered_sha256` is the same for the same order alone. A sample that is
        skipped counts by its bytes.

        Raises:
            FeedError: a file cannot be read, unless `skip_bad`.
        """
        indices = self._chosen.indices
        chosen = indices if first is None else sorted(indices[:first])
        self._reader.hash_unread(chosen)
        seen = self._reader.seen
        ordered = seen.combined(chosen)
        return {
            **self.form,
            "count": len(chosen),
            "sha256": seen.combined(chosen, by_size=True) if self.batch == 1 else ordered,
            "ordered_sha256": ordered,
        }

    def digests(self, number: int) -> tuple[str, ...]:
        """sha256 (hex) of each image or row of a sample, counted from 1 as a pass gave it."""
        own = self._chosen.as_given((number - 1) * self.batch, number * self.batch)
        return tuple(self._reader.seen.hex(own))

    def called(self) -> dict[str, str]:
        """sha256 (hex) -> name of every image or row, known after a pass or a manifest."""
        names = map(self._source.told, self._chosen.indices)
        return dict(zip(self.seen, names, strict=True))


def _left_out(bad: Sequence[str]) -> str:
    """Why samples were skipped, of the first three in words; empty where none was."""
    more = f" (and {len(bad) - 3} more)" if len(bad) > 3 else ""
    return f"{len(bad)} skipped: {'; '.join(bad[:3])}{more}" if bad else ""


__all__ = ["KEPT", "Feed", "Sample"]
