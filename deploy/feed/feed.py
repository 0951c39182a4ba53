"""What a model is fed: images or arrays, one sample at a time, decoded beside the inference.

Pictures are decoded in as many threads as there are cores, 4 at most: where the model takes longer,
they wait for it, and where decoding does, no core is idle.

Sources: a folder, a list file ("path" or "path label"), a pattern or a COCO json of images or of
files of arrays (already preprocessed), a `loader.py:function`, a TensorRT calibrator, or what
Python has: arrays, paths, loaders and datasets that give them.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.ahead import ahead
from deploy.feed.array_files import from_file, from_files, from_folder
from deploy.feed.arrays import ArraySource, fixed_batch, from_iterable
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.carried import Carried, Settled, settled
from deploy.feed.choice import Choice, Limit, choice_of
from deploy.feed.denormalise import picture_in
from deploy.feed.doubling import scattered
from deploy.feed.files import Files, files_of, labelled, listed
from deploy.feed.images import shown
from deploy.feed.loaders import called, items_of, pictured
from deploy.feed.manifest import UNREADABLE, Changed, Raw, Seen
from deploy.feed.pictures import ImageSource, check_dtype, check_present
from deploy.feed.posted import Posted, posted
from deploy.feed.preprocess import Asked, Preprocess, describe
from deploy.feed.raw import RawFiles, as_arrays, as_pictures, refuse_others
from deploy.feed.share import Share, names_digest, share_of
from deploy.feed.spool import Spool
from deploy.feed.stream import Stream
from deploy.feed.video import VideoSource, is_video
from deploy.feed.views import View, Views
from deploy.inputs import are_read, is_read
from deploy.machine import default_threads
from deploy.progress import phase
from deploy.tensors import Array, TensorSpec

Sample = dict[str, Array]
KEPT = 8  # samples that stay in memory: for shapes, latency runs, figures of inner tensors
_AS_THEY_ARE = (
    "files of arrays are fed as they are, got preprocessing for them; leave it away, or feed images"
    " (of raw files, --raw-dtype uint8 says that they are)"
)
FeedSource = (
    str | os.PathLike[str] | RawFiles | CalibratorScript | Iterable[Any] | Callable[[], Any]
)


class Source(Protocol):
    """Random access to samples of batch 1, and how they are called."""

    @property
    def labels(self) -> tuple[int, ...] | None: ...

    def __len__(self) -> int: ...

    def sample_name(self, index: int) -> str: ...

    def told(self, index: int) -> str: ...

    def load(self, index: int) -> Raw: ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A sample as a thread read it, or what kept it from that."""

    raw: Raw | None = None
    sample: Sample | None = None
    error: FeedError | None = None


def _fetched(source: Source, index: int) -> _Fetched:
    raw = None
    try:
        raw = source.load(index)
        return _Fetched(raw, raw.decode())
    except FeedError as error:
        return _Fetched(raw, error=error)


class Feed:
    """The samples of one model; iterate `samples()` as often as needed.

    Attributes:
        notes: what the user should know about how the feed was read.
        preprocess: the complete preprocessing, None for arrays.
        origin: what said so, where it was the model; else empty.
        batch: size of the first dimension of every sample: 1, or what the model fixes.
        share: what part of a whole it is; None for all of it.
        decodes: how many images or rows were read to be run, so far.
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
        self._chosen = self._given = _held(chosen)  # in their order, and as samples() gave them
        self._names = ""  # digest of them
        self._kind = kind
        self._skip_bad = skip_bad
        self._skipped = dict(skipped or {})
        self._seen = Seen(len(source))
        self._kept: dict[int, Sample] = {}  # the first few, so that nobody reads them again
        self._spool = Spool(frozenset())
        self._views = Views(preprocess)
        self._good: tuple[int, tuple[int, ...]] = (-1, ())  # bad ones known, labels without them
        self.decodes = 0
        self.batch = batch
        self.preprocess = preprocess
        self.origin = origin
        self.share = share
        self._notes = tuple(notes)

    def __len__(self) -> int:
        """How many samples `samples()` gives; known bad ones are not counted."""
        return -(-self.count // self.batch)

    @property
    def count(self) -> int:
        """How many images or rows are fed; known bad ones are not counted."""
        return len(self._chosen) - len(self._skipped)

    @property
    def opened(self) -> int:
        """How many images or rows there are, skipped ones too."""
        return len(self._chosen)

    @property
    def filled(self) -> int:
        """How many samples, at the end, hold images again to fill the model's batch."""
        return 1 if self.count % self.batch else 0

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One class number per image or row, without the skipped ones; None where not given."""
        labels, bad = self._source.labels, len(self._skipped)
        if labels is None:
            return None
        if self._good[0] != bad:
            self._good = bad, tuple(labels[i] for i in self._chosen if i not in self._skipped)
        return self._good[1]

    @property
    def names(self) -> tuple[str, ...]:
        """One name per image or row, without the skipped ones."""
        return tuple(self._source.sample_name(i) for i in self._chosen if i not in self._skipped)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Why each bad image or row was left out; complete after one pass over `samples()`."""
        return tuple(self._skipped[i] for i in sorted(self._skipped))

    @property
    def places(self) -> Sequence[int]:
        """Of the good samples, in the whole of which the feed is a share; complete after a pass."""
        if not self._skipped:
            return self._whole_places()
        return _held(place for place, index in self._placed() if index not in self._skipped)

    @property
    def skipped_places(self) -> dict[int, str]:
        """Place in the whole -> why the sample there was left out; complete after a pass."""
        bad = ((place, index) for place, index in self._placed() if index in self._skipped)
        return {place: self._skipped[index] for place, index in bad}

    @property
    def seen(self) -> tuple[str, ...]:
        """sha256 (hex) of every image or row, skipped ones too; complete after a pass."""
        return tuple(self._seen.hex(self._chosen))

    @property
    def notes(self) -> tuple[str, ...]:
        """How the feed was read, in sentences; complete after one pass."""
        extra: list[str] = []
        if self._skipped:
            bad = list(self._skipped.values())
            more = f" (and {len(bad) - 3} more)" if len(bad) > 3 else ""
            extra.append(f"{len(bad)} skipped: {'; '.join(bad[:3])}{more}")
        filler = -self.count % self.batch
        if filler:
            extra.append(
                f"the model's batch is {self.batch}: the last one was filled with the first"
                f" {filler} sample{'s' if filler > 1 else ''} again"
            )
        return (*self._notes, *extra)

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
        _refuse_batches(self.batch)
        return share_of(shard, len(self._chosen), self._names_digest())

    def _names_digest(self) -> str:
        """Of all names: made once, since a piece of a calibration asks for it."""
        self._names = self._names or names_digest(map(self._source.sample_name, self._chosen))
        return self._names

    def part(self, share: Share) -> Feed:
        """A share of this feed, as a feed of its own."""
        return Feed(
            self._source,
            self._of(share),
            kind=self._kind,
            batch=self.batch,
            preprocess=self.preprocess,
            skip_bad=self._skip_bad,
            notes=(),
            share=share,
        )

    def posted(self, share: Share) -> list[Posted]:
        """The samples of a share, read to be sent to another machine."""
        return posted(self._source, self._of(share))

    def glance(self, place: int) -> None:
        """Read one sample for its digest.

        Raises:
            FeedError: it cannot be read, unless `skip_bad`.
        """
        self._hash(self._chosen[place])

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
        for index, digest in zip(self._of(share), digests, strict=True):
            self._seen.note(index, bytes.fromhex(digest), self._source.told(index))
        self._skipped |= {self._chosen[place]: why for place, why in skipped.items()}
        self.decodes += len(share.places) - len(skipped)

    def _of(self, share: Share) -> Sequence[int]:
        return self._chosen[share.places.start : share.places.stop : share.places.step]

    @property
    def whole(self) -> Share:
        """Of which samples it is which part; of all the only one."""
        if self.share is not None:
            return self.share
        return share_of((1, 1), len(self._chosen), self._names_digest())

    def so_far(self, samples: int) -> tuple[tuple[str, ...], dict[int, str]]:
        """What the first so many samples came of, while others may be read already.

        Returns:
            sha256 (hex) of each image or row, skipped ones too; and place in the whole -> why the
            one there was left out.
        """
        most, read = samples * self.batch, len(self._chosen)
        if most < self.count:
            good = (n for n, index in enumerate(self._chosen, 1) if index not in self._skipped)
            read = next(islice(good, most - 1, None))
        placed = islice(self._placed(), read)
        skipped = {p: why for p, index in placed if (why := self._skipped.get(index)) is not None}
        return tuple(self._seen.hex(self._chosen[:read])), skipped

    def take_up(self, digests: Sequence[str], skipped: Mapping[int, str]) -> None:
        """Be where an earlier run's `so_far` was: hash what it read, and skip what it skipped.

        Raises:
            FeedError: one of them is another now, or cannot be read, unless `skip_bad`.
        """
        with phase("hashing", len(digests), "samples") as step:
            for index, known in zip(self._chosen, digests, strict=False):
                if index not in self._seen:
                    self._hash(index)
                if self._seen.of(index).hex() != known:
                    raise FeedError(
                        "a run goes on with the samples that it has counted, got another"
                        f" {self._source.told(index)}; put back the one that was there, or leave"
                        " --resume away to begin anew"
                    )
                step()
        at = dict(self._placed())
        self._skipped |= {at[place]: why for place, why in skipped.items()}

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

    def remember(self, first: int, spread: int = 0, shown: int = 0) -> None:
        """Keep samples on disk as they are read: the first ones, and those that `spread` gives.

        Args:
            first: how many at the beginning.
            spread: how many all over the feed.
            shown: how many more all over the feed, with small pictures of them for `views`.
        """
        if self.batch > 1:  # `spread` gives the first of them
            first, spread = max(first, spread), 0
        early = self._chosen[: first * self.batch]
        seen = _evenly(self._chosen, shown)
        self._spool = Spool(frozenset((*early, *_evenly(self._chosen, spread), *seen)))
        self._views = Views(self.preprocess, seen)

    def scatter(self) -> None:
        """Give the samples so that the first 8, 16, 32 ... are each spread evenly over all."""
        self._chosen = self._given = _held(scattered(self._chosen))
        self._names = ""

    def reached(self, number: int) -> int:
        """How many images or rows lie up to the sample of this number, skipped ones too."""
        good = (place for place, index in enumerate(self._chosen, 1) if index not in self._skipped)
        return next(islice(good, number - 1, None))

    def keep(self, count: int) -> None:
        """Be the feed of the first so many images or rows alone, in the order of their source."""
        if count < len(self._chosen):
            said = f"{count} of {len(self._chosen)} samples are used, spread evenly over all"
            self._notes = (*self._notes, said)
        self._chosen = _held(sorted(self._chosen[:count]))
        self._names = ""
        left = set(self._chosen)
        self._skipped = {index: why for index, why in self._skipped.items() if index in left}
        self._good = (-1, ())

    def views(self) -> list[View]:
        """Pictures of the samples to be shown; those that nobody has read are read now.

        Raises:
            FeedError: as `samples`.
        """
        for _ in self._singles(only=self._views.missing):
            pass
        return self._views.found()

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
            "skip_bad": self._skip_bad,
            "preprocess": self.preprocess.to_json() if self.preprocess else None,
        }

    def spread_keys(self, most: int) -> tuple[int, ...]:
        """Keys of the samples that `spread` gives, as far as it is known which are bad."""
        if self.batch > 1:
            return tuple(range(min(most, len(self))))
        good = [index for index in self._chosen if index not in self._skipped]
        return tuple(_evenly(good, most))

    def keyed(self, keys: Collection[int]) -> Iterator[tuple[int, Sample]]:
        """(key, sample) of those that are named, in the feed's order, without bad ones.

        A key names a sample of this feed whichever others turn out to be bad.

        Raises:
            FeedError: as `samples`.
        """
        if self.batch == 1:
            yield from self._singles(only=frozenset(keys))
        elif keys:
            numbered = enumerate(islice(self._batches(), max(keys) + 1))
            yield from ((key, sample) for key, sample in numbered if key in keys)

    def key(self, number: int) -> int:
        """Key of sample `number`, from 1, of a pass over `samples`, once it was given."""
        if self.batch > 1 or not self._skipped:
            return number - 1 if self.batch > 1 else self._chosen[number - 1]
        good = (index for index in self._chosen if index not in self._skipped)
        return next(islice(good, number - 1, None))

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
        chosen = self._chosen if first is None else sorted(self._chosen[:first])
        unread = sum(index not in self._seen for index in chosen)
        with phase("hashing", unread, "samples") as step:
            for index in chosen:
                if index not in self._seen:
                    self._hash(index)
                    step()
        ordered = self._seen.combined(chosen)
        return {
            **self.form,
            "count": len(chosen),
            "sha256": self._seen.combined(chosen, by_size=True) if self.batch == 1 else ordered,
            "ordered_sha256": ordered,
        }

    def digests(self, number: int) -> tuple[str, ...]:
        """sha256 (hex) of each image or row of a sample, counted from 1 as a pass gave it."""
        good = (index for index in self._given if index not in self._skipped)
        own = islice(good, (number - 1) * self.batch, number * self.batch)
        return tuple(self._seen.hex(own))

    def called(self) -> dict[str, str]:
        """sha256 (hex) -> name of every image or row, known after a pass or a manifest."""
        names = map(self._source.told, self._chosen)
        return dict(zip(self._seen.hex(self._chosen), names, strict=True))

    def _placed(self) -> Iterator[tuple[int, int]]:
        """(place in the whole, index in the source) of every sample."""
        return zip(self._whole_places(), self._chosen, strict=True)

    def _whole_places(self) -> range:
        return range(len(self._chosen)) if self.share is None else self.share.places

    def _hash(self, index: int) -> None:
        try:
            self._load(index)
        except FeedError:
            if not self._skip_bad:
                raise

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
            self._seen.note(index, UNREADABLE, name)
            raise
        self._seen.note(index, raw.digest, name)
        return raw

    def _singles(self, *, only: Collection[int] | None = None) -> Iterator[tuple[int, Sample]]:
        """(index, sample of batch 1) of every good one, or of those that are named."""
        wanted = (index for index in self._chosen if only is None or index in only)
        good = (index for index in wanted if index not in self._skipped)
        several = default_threads() if isinstance(self._source, ImageSource) else 1
        for index, fetched in ahead(good, self._fetch, threads=several):
            try:
                yield index, self._read(index, fetched)
            except Changed:
                raise
            except FeedError as error:
                if not self._skip_bad:
                    raise FeedError(
                        f"{error}; {len(self._chosen)} were to be fed: correct or remove it, or"
                        " skip bad ones (--skip-bad)"
                    ) from error
                self._skipped[index] = str(error)
        if not self.count:
            raise FeedError(
                f"at least one sample must be good, all {len(self._chosen)} were skipped:"
                f" {next(iter(self._skipped.values()))}"
            )

    def _fetch(self, index: int) -> _Fetched | None:
        """Read and decode a sample, in any thread; None of one that is kept."""
        if index in self._kept or index in self._spool:
            return None
        return _fetched(self._source, index)

    def _read(self, index: int, fetched: _Fetched | None = None) -> Sample:
        """One sample, from memory or disk where it is among the first ones."""
        if index in self._kept:
            return dict(self._kept[index])
        if (known := self._spool.get(index)) is not None:
            return known
        raw, sample = self._noted(index, fetched or _fetched(self._source, index))
        self.decodes += 1
        self._spool.add(index, sample)
        self._views.add(index, self._source.sample_name(index), raw, sample)
        if len(self._kept) < KEPT * self.batch:
            self._kept[index] = sample
        return dict(sample)

    def _noted(self, index: int, fetched: _Fetched) -> tuple[Raw, Sample]:
        """A sample that was read just now, whose bytes are those that were first seen.

        Raises:
            Changed: they are not.
            FeedError: what reading or decoding raised.
        """
        digest = UNREADABLE if fetched.raw is None else fetched.raw.digest
        self._seen.note(index, digest, self._source.told(index))
        if fetched.error is not None:
            raise fetched.error
        assert fetched.raw is not None and fetched.sample is not None
        return fetched.raw, fetched.sample

    def _batches(self, without: range = range(0)) -> Iterator[Sample]:
        only = self._but(without) if without else None
        if self.batch == 1:
            yield from (sample for _, sample in self._singles(only=only))
            return
        group: list[Sample] = []
        for _, sample in self._singles(only=only):
            group.append(sample)
            if len(group) == self.batch:
                yield _join(group)
                group = []
        if group:
            good = [index for index in self._chosen if index not in self._skipped]
            missing = self.batch - len(group)
            yield _join(group + [self._read(good[i % len(good)], None) for i in range(missing)])

    def _but(self, without: range) -> frozenset[int]:
        """All but the images or rows of some samples."""
        good = [index for index in self._chosen if index not in self._skipped]
        left_out = good[without.start * self.batch : without.stop * self.batch]
        return frozenset(self._chosen).difference(left_out)


@phase("opening the samples")
def open_feed(
    source: FeedSource,
    specs: Sequence[TensorSpec],
    *,
    preprocess: Asked = None,
    carried: Carried | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    labels_by_folder: bool = False,
) -> Feed:
    """Open images or arrays as the feed of a model with these inputs.

    Args:
        source: as the module says.
        specs: the model's inputs.
        preprocess: how images, of files or in memory, become inputs, or some options of it; the
            rest is what the model carries, else what its input tells, and said.
        carried: what the model carries of that, `LoadedModel.carried`.
        skip_bad: go on without unreadable images and arrays with NaN, telling them in `notes`.
        limit: use at most so many, spread evenly over all, of a calibrator the first ones; or a
            `Choice` of them.
        labels_by_folder: number the folders in the given folder, and label what is in them so.

    Raises:
        FeedError: nothing to feed, or it does not fit the inputs.
        ConfigError: options that contradict the source.
    """
    inputs = tuple(specs)
    if not inputs:
        raise FeedError("a model must have an input to be fed, got none; check the model")
    choice = choice_of(limit)
    if isinstance(source, str | os.PathLike) and (given := called(str(source))) is not None:
        source = cast("FeedSource", given)
    files = _files(source.path if isinstance(source, RawFiles) else source)
    if labels_by_folder:
        if files is None:
            raise ConfigError("labels by folder are of files in folders, got no path; give one")
        files = labelled(files)
    if isinstance(source, RawFiles) and files is not None:
        return _open_raw(source, files, inputs, preprocess, carried, skip_bad, choice)
    if files is not None and not files.arrays:
        return _open_images(files, inputs, preprocess, carried, skip_bad, choice)
    if isinstance(source, CalibratorScript):
        arrays = _handed_over(source, inputs, preprocess, choice)
        return _fed(arrays, choice, inputs, kind="arrays", skip_bad=skip_bad, notes=arrays.notes)
    if files is None and preprocess is not None:
        return _open_pictured(source, inputs, preprocess, carried, skip_bad, choice)
    if preprocess is not None:
        raise ConfigError(_AS_THEY_ARE)
    arrays = _arrays(source, files, inputs, skip_bad)
    return _fed(arrays, choice, inputs, kind="arrays", skip_bad=skip_bad, notes=arrays.notes)


def _fed(
    source: Source,
    choice: Choice,
    specs: tuple[TensorSpec, ...],
    *,
    kind: str,
    skip_bad: bool,
    notes: Sequence[str],
    settled: Settled | None = None,
    usual: int = 1,
) -> Feed:
    chosen, said = choice.of(len(source), usual=usual)
    batch, share = fixed_batch(specs), None
    if choice.shard is not None:
        _refuse_batches(batch)
        names = names_digest(map(source.sample_name, chosen))
        share = share_of(choice.shard, len(chosen), names)
        chosen = [chosen[place] for place in share.places]
        said = [*said, f"shard {share}: {len(chosen)} of {share.count} samples"]
    return Feed(
        source,
        chosen,
        kind=kind,
        batch=batch,
        preprocess=settled.how if settled else None,
        skip_bad=skip_bad,
        notes=(*notes, *(settled.notes if settled else ()), *said),
        origin=settled.origin if settled else "",
        share=share,
    )


def _held(indices: Iterable[int]) -> Sequence[int]:
    """Indices in as little memory as they take."""
    return indices if isinstance(indices, range) else array("q", indices)


def _refuse_batches(batch: int) -> None:
    if batch > 1:
        raise ConfigError(
            "shards are of single samples, got a model with a fixed batch of"
            f" {batch}; export it with a batch that is open"
        )


def _files(source: FeedSource) -> Files | None:
    """The files that a path or a list of paths stands for; None where it is no such thing."""
    if isinstance(source, str | os.PathLike):
        is_read(Path(source))
        return files_of(Path(source))
    return listed(source) if isinstance(source, list | tuple) else None


def _arrays(
    source: FeedSource, files: Files | None, specs: tuple[TensorSpec, ...], skip_bad: bool
) -> ArraySource:
    if files is None:
        return from_iterable(items_of(source), specs)
    if files.folder is not None:
        return from_folder(files.folder, files.files, specs, skip_bad=skip_bad)
    if len(files.files) == 1 and files.files[0].label is None:
        is_read(files.files[0].path)
        return from_file(files.files[0].path, specs)
    return from_files(files.files, specs, files.name, skip_bad=skip_bad)


def _open_raw(
    raw: RawFiles,
    files: Files,
    specs: tuple[TensorSpec, ...],
    preprocess: Asked,
    carried: Carried | None,
    skip_bad: bool,
    choice: Choice,
) -> Feed:
    """Files without a header, whose shape and dtype are said."""
    refuse_others(files)
    if len(specs) != 1:
        raise ConfigError(
            f"a raw shape and dtype are of one input, the model has {len(specs)}; write .npy files,"
            " which say theirs"
        )
    (spec,) = specs
    held = _arrays(raw.path, files, (raw.held(spec),), skip_bad)
    if not raw.pictures(spec, asked=preprocess is not None):
        if preprocess is not None:
            raise ConfigError(_AS_THEY_ARE)
        return _fed(
            as_arrays(held, spec), choice, specs, kind="arrays", skip_bad=skip_bad, notes=held.notes
        )
    found = _how(preprocess, carried, specs)
    return _fed(
        as_pictures(held, spec, found.how),
        choice,
        specs,
        kind="raw pictures",
        skip_bad=skip_bad,
        notes=held.notes,
        settled=found,
    )


def _handed_over(
    script: CalibratorScript,
    specs: tuple[TensorSpec, ...],
    preprocess: Asked,
    choice: Choice,
) -> ArraySource:
    """What a calibrator gives; the first samples alone where nothing but a limit is asked for."""
    if preprocess is not None:
        raise ConfigError(
            f"a calibrator's batches are fed as they are, got preprocessing for {script}; leave it"
            " away"
        )
    return script.source(specs, None if choice.every else choice.most)


def _open_pictured(
    source: FeedSource,
    specs: tuple[TensorSpec, ...],
    preprocess: Asked,
    carried: Carried | None,
    skip_bad: bool,
    choice: Choice,
) -> Feed:
    """Pictures in memory, preprocessed as they are read once into a temporary file."""
    found = _how(preprocess, carried, specs)
    ready = (a.astype(specs[0].dtype, copy=False) for a in pictured(items_of(source), found.how))
    arrays = from_iterable(ready, specs)
    return _fed(
        arrays,
        choice,
        specs,
        kind="pictures in memory",
        skip_bad=skip_bad,
        notes=arrays.notes,
        settled=found,
    )


def _how(preprocess: Asked, carried: Carried | None, specs: tuple[TensorSpec, ...]) -> Settled:
    """What makes the only input of pictures, and what the user should know.

    Raises:
        FeedError: several inputs, or one that pictures do not become.
    """
    if len(specs) != 1:
        raise FeedError(
            f"images feed one input, the model has {len(specs)}:"
            f" {', '.join(describe(s) for s in specs)}; give a folder of .npz files with one array"
            " an input"
        )
    found = settled(preprocess, carried, specs[0])
    check_dtype(specs[0], found.how)
    return found


def _open_images(
    files: Files,
    specs: tuple[TensorSpec, ...],
    preprocess: Asked,
    carried: Carried | None,
    skip_bad: bool,
    choice: Choice,
) -> Feed:
    are_read(len(files.files), files.files.path)
    found = _how(preprocess, carried, specs)
    video = _video(files, specs[0], found.how)
    if video is None and not skip_bad:
        number, of = choice.shard or (1, 1)
        own = choice.of(len(files.files))[0][number - 1 :: of]
        check_present((files.files[i] for i in own), len(own), files.name)
    return _fed(
        video or ImageSource(files.files, specs[0], found.how),
        choice,
        specs,
        kind="images",
        skip_bad=skip_bad,
        notes=files.notes,
        settled=found,
        usual=video.a_second if video else 1,
    )


def _video(files: Files, spec: TensorSpec, how: Preprocess) -> VideoSource | None:
    """The only file, where it is a video.

    Raises:
        FeedError: one of several is, or it has a label.
    """
    films = [one for one in files.files if is_video(one.path)]
    if not films:
        return None
    if len(files.files) > 1 or films[0].label is not None:
        raise FeedError(
            f"a video is fed alone and without a label, got {shown(films[0].name)} in"
            f" {files.name}; give it by itself, or its frames as images"
        )
    return VideoSource(films[0].path, spec, how)


def _evenly(indices: Sequence[int], most: int) -> list[int]:
    """At most so many, spread evenly over all."""
    count = min(most, len(indices))
    return [indices[place * len(indices) // count] for place in range(count)]


def _join(group: list[Sample]) -> Sample:
    joined: Sample = {}
    for name, first in group[0].items():
        shapes = {s[name].shape for s in group}
        if len(shapes) > 1:
            raise FeedError(
                f"samples of one batch must have one shape, got {sorted(shapes)} for {name!r};"
                " export the model with an open batch, or give all one size"
            )
        joined[name] = first if not first.shape else np.concatenate([s[name] for s in group])
    return joined


__all__ = ["Feed", "FeedSource", "Sample", "open_feed"]
