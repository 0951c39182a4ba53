"""Checkpoints: a calibration that was ended at any moment goes on where it stood.

::

    calibrate -o m.cache     now and then, at Ctrl-C and at SIGTERM --> m.cache.checkpoint
                                                                             |
    calibrate -o m.cache --resume   reads on from the next sample <----------'
                                    and removes it when the cache is written

A checkpoint is the file of a shard (`deploy.calibration.shards`) of the first samples: digests
of what they came of, every statistic so far and the largest values. It is written while nobody
counts, so that it holds just these samples. What is known of the first samples before the pass
(TensorRT's first batch, AMCT's DMQ and AdaRound) is found again: from the same samples, the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration import shards
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.shards import Shard, origin_of
from deploy.errors import CacheError, ExportError
from deploy.files import atomic
from deploy.files.reading import refuse
from deploy.terminal import tell
from deploy.version import __version__

if TYPE_CHECKING:
    from deploy.calibration.observation import Subject
    from deploy.calibration.sample_checks import Peaks
    from deploy.feed.samples import Feed
    from deploy.feed.sampling import Share

ENDING = ".checkpoint"
EVERY_S = 10.0  # between two of them
_SHARE = 30  # of a run's time one takes at most such a part, waiting for all workers too
_WHAT = "a checkpoint of a calibration"


def beside(path: Path) -> Path:
    """Where the checkpoint stands of a run that is to write a cache, or a shard."""
    return Path(f"{path}{ENDING}")


def clear(path: Path) -> None:
    """Remove the checkpoint of a run whose cache is whole, where it was ended just before that."""
    with suppress(CacheError):
        if shards.load(path, what=_WHAT).counted is not None:
            path.unlink(missing_ok=True)


class Checkpoint:
    """The checkpoint of a run: what an earlier one left, and what this one keeps.

    Attributes:
        path: of the file.
        counted: samples that the earlier run counted and this one does not read again.
        notes: what is to be known of it, in sentences.
    """

    def __init__(
        self,
        path: Path,
        subject: Subject,
        feed: Feed,
        wanted: Sequence[Observation],
        peaks: Peaks,
        *,
        resume: bool,
        force: bool,
    ) -> None:
        """Look for one, and take it up.

        Args:
            path: of the file.
            subject: the model, and what repaired it.
            feed: hashes the samples that were counted, and need not read them otherwise.
            wanted: what is observed in the pass.
            peaks: of the pass; is told those of the samples that were counted.
            resume: go on from it; else a new run begins, which replaces it as soon as it has
                counted as many samples.
            force: replace what is no checkpoint.

        Raises:
            CacheError: it is none, it is broken, or, where the run is to go on, that of another.
            FeedError: a sample that was counted is another one now.
            ExportError: an input, a folder or a device stands there.
        """
        self.path = path
        self.counted = 0
        self.notes: list[str] = []
        self._subject, self._feed, self._wanted, self._peaks = subject, feed, wanted, peaks
        self._kept = 0  # samples of what this run wrote, or took up
        self._began = time.monotonic()
        self._next = self._began + EVERY_S
        self._unkept = next((o for o in wanted if not o.statistic.recorder(None).to_arrays()), None)
        found = self._found(force=force)
        self._standing = 0 if found is None or found.counted is None else found.counted
        self._earlier: Shard | None = None
        if found is not None and resume:
            self._take_up(found)
        elif found is not None:
            self._say(
                f"{path} holds {self._standing:,} samples of a run that did not end: --resume goes"
                " on from it; this run begins anew and replaces it as soon as it has counted as"
                " many"
            )
        elif resume:
            self._say(f"{path} is not there to go on from, so the run begins anew")

    def known(self, wanted: Iterable[Observation]) -> Observed:
        """What the samples gave that were counted before.

        Raises:
            CacheError: the arrays of a statistic are broken.
        """
        return Observed({}) if self._earlier is None else self._earlier.observed(wanted)

    def due(self) -> bool:
        """Whether it is time to keep; from now on nobody works until that is done."""
        self._began = time.monotonic()
        return self._unkept is None and self._began >= self._next

    def keep(self, number: int, observed: Observed) -> None:
        """Write what the first so many samples gave; a disk that takes none ends no run."""
        if self._unkept is None and self._kept < number >= self._standing:
            self._write(number, observed)
        now = time.monotonic()
        self._next = now + max(EVERY_S, _SHARE * (now - self._began))

    def _write(self, number: int, observed: Observed) -> None:
        digests, skipped = self._feed.so_far(number)
        data = shards.to_bytes(
            share=self._share,
            made_from=self._made_from,
            digests=digests,
            skipped=skipped,
            peaks=self._peaks.rows(self._feed.places[:: self._feed.batch]),
            observed=observed,
            counted=number,
        )
        try:
            atomic.write_bytes(self.path, data)
            self._kept = number
        except ExportError as error:
            self.notes[:] = dict.fromkeys((*self.notes, f"no checkpoint could be kept: {error}"))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An interrupt of the user that comes through says how to go on."""
        try:
            yield
        except Exception:
            raise
        except BaseException as ended:
            if left := self._left():
                ended.args = (left,)
            raise

    @cached_property
    def _share(self) -> Share:
        return self._feed.whole

    @cached_property
    def _made_from(self) -> Fingerprint:
        """What a run must have in common with the one that it goes on with."""
        found = origin_of(self._subject.identities, self._feed.form, self._share)
        return replace(found, numbers={**found.numbers, "calib8": __version__})

    def _left(self) -> str:
        """What is left for the next run."""
        if self._unkept is not None:
            return (
                "the next run begins anew, since no checkpoint holds"
                f" {self._unkept.statistic.key!r}"
            )
        if not self._kept:
            return ""
        return f"{self._of(self._kept)} are kept in {self.path}: --resume goes on from there"

    def _of(self, number: int) -> str:
        return f"{number:,} of {len(self._feed):,} samples"

    def _say(self, sentence: str) -> None:
        """Now, and at the end."""
        self.notes.append(sentence)
        tell(f"note: {sentence}")

    def _found(self, *, force: bool) -> Shard | None:
        refuse(self.path)
        if not self.path.exists() or not self.path.stat().st_size:
            return None
        try:
            found = shards.load(self.path, what=_WHAT)
            if found.counted is None:
                raise CacheError(f"{self.path} must be {_WHAT}, got a whole shard")
        except CacheError as error:
            if force:
                return None
            raise CacheError(f"{error} (remove it, or replace it with --force)") from None
        return found

    def _take_up(self, found: Shard) -> None:
        """Go on from a checkpoint.

        Raises:
            CacheError: it is that of another run.
            FeedError: as `Feed.take_up`.
        """
        if other := self._differs(found):
            raise CacheError(
                f"a run goes on from its own checkpoint, got {self.path} of another one: {other};"
                " take the model, images and options of that run, or leave --resume away to begin"
                " anew"
            )
        feed = self._feed
        feed.take_up(found.digests, found.skipped)
        good = len(found.digests) - len(found.skipped)
        places = feed.places[: self._standing * feed.batch : feed.batch]
        numbers = {place: number for number, place in enumerate(places, 1)}
        seen = {place for *_, listed in found.peaks for _, place in listed}
        if good != min(self._standing * feed.batch, feed.count) or not seen <= numbers.keys():
            raise CacheError(f"{self.path} must hold the samples that it names; remove it")
        self._peaks.add_rows(found.peaks, numbers)
        self._earlier, self.counted, self._kept = found, self._standing, self._standing
        self.notes.append(f"went on from {self.path}, with {self._of(self.counted)} counted")

    def _differs(self, found: Shard) -> str:
        """In what the run that wrote it is another; empty where it is the same."""
        changes = list(self._made_from.changes_since(found.made_from).values())
        if str(found.share) != str(self._share):
            changes.append(f"the shard changed ({found.share} -> {self._share})")
        elif found.share != self._share and not changes:
            changes.append("the images changed")
        held, wanted = set(found.keys), {o.key for o in self._wanted}
        strange = [f"{key[2]} of {key[1]!r}" for key in found.keys if key not in wanted]
        lacking = [f"{o.key[2]} of {o.tensor!r}" for o in self._wanted if o.key not in held]
        if strange or lacking:
            words = f"it lacks {lacking[0]}" if lacking else f"it is of {strange[0]} too"
            changes.append(f"the targets or the method changed ({words})")
        return "; ".join(changes)
