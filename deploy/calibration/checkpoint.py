"""Checkpoints: resume an interrupted calibration from the last stored state.

::

    calibrate -o m.cache     periodically, at Ctrl-C and at SIGTERM --> m.cache.checkpoint
                                                                             |
    calibrate -o m.cache --resume   continues with the next sample <---------'
                                    and removes it once the cache is written

A checkpoint is a shard file (`deploy.calibration.shards`) of the first samples: their digests,
every statistic so far and the largest values. It is written while all workers pause, so that it
holds exactly these samples. What must be known of the first samples before the pass (TensorRT's
first batch, AMCT's DMQ and AdaRound) is recomputed, with the same result.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from deploy.calibration import shards
from deploy.calibration.fingerprint import Fingerprint
from deploy.calibration.observation import CalibrationSubject, Observation, ObservedStatistics
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import Shard, shard_fingerprint
from deploy.errors import CacheError, ExportError
from deploy.feed.samples import Feed
from deploy.feed.sampling import Share
from deploy.files import atomic
from deploy.files.guard import refuse_output
from deploy.terminal import say_progress
from deploy.version import __version__

CHECKPOINT_SUFFIX = ".checkpoint"
MIN_INTERVAL_S = 10.0  # seconds between checkpoints
_SHARE = 30  # they take at most 1/30 of a run's time, including the wait for the workers
_WHAT = "a checkpoint of a calibration"


def checkpoint_path(path: Path) -> Path:
    """Return the checkpoint path of a run that writes a cache or a shard."""
    return Path(f"{path}{CHECKPOINT_SUFFIX}")


def remove_finished_checkpoint(path: Path) -> None:
    """Remove the checkpoint of a run that was interrupted after it wrote its cache."""
    with suppress(CacheError):
        if shards.load_shard(path, what=_WHAT).counted is not None:
            path.unlink(missing_ok=True)


class Checkpoint:
    """The checkpoint of a run: reads that of an earlier run, writes its own.

    Attributes:
        counted: number of samples that the earlier run counted; they are not run again.
    """

    def __init__(
        self,
        path: Path,
        subject: CalibrationSubject,
        feed: Feed,
        wanted: Sequence[Observation],
        peaks: Peaks,
        *,
        resume: bool,
        force: bool,
    ) -> None:
        """Look for a checkpoint, and resume from it if wanted.

        `feed`: the samples; those that were counted are only hashed.
        `peaks`: peaks of the pass; those of the counted samples are added.
        `resume`: resume from the checkpoint; else a new run starts, which replaces it once it has
        counted as many samples.

        Raises:
            CacheError: the file is not a checkpoint, is broken, or (to resume) of another run.
            FeedError: a counted sample has changed.
            ExportError: the path is an input, a folder or a device.
        """
        self.path = path
        self.counted = 0
        self.notes: list[str] = []
        self._subject, self._feed, self._wanted, self._peaks = subject, feed, wanted, peaks
        self._kept = 0  # number of samples in the file that this run wrote or resumed from
        self._began = time.monotonic()
        self._next = self._began + MIN_INTERVAL_S
        self._unkept = next((o for o in wanted if not o.statistic.recorder(None).to_arrays()), None)
        found = self._found(force=force)
        self._standing = 0 if found is None or found.counted is None else found.counted
        self._earlier: Shard | None = None
        if found is not None and resume:
            self._take_up(found)
        elif found is not None:
            self._say(
                f"{path} holds {self._standing:,} samples of a run that did not end: --resume goes"
                " on from it; this run starts over and replaces it as soon as it has counted as"
                " many"
            )
        elif resume:
            self._say(f"{path} is not there to go on from, so the run starts over")

    def load_observed(self, wanted: Iterable[Observation]) -> ObservedStatistics:
        """Return the statistics of the samples that were counted before.

        Raises:
            CacheError: the arrays of a statistic are broken.
        """
        return ObservedStatistics({}) if self._earlier is None else self._earlier.observed(wanted)

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint; starts the clock of its cost, as workers pause."""
        self._began = time.monotonic()
        return self._unkept is None and self._began >= self._next

    def save(self, number: int, observed: ObservedStatistics) -> None:
        """Write the statistics of the first `number` samples; a full disk does not end the run."""
        if self._unkept is None and self._kept < number >= self._standing:
            self._write(number, observed)
        now = time.monotonic()
        self._next = now + max(MIN_INTERVAL_S, _SHARE * (now - self._began))

    def _write(self, number: int, observed: ObservedStatistics) -> None:
        digests, skipped = self._feed.progress_after(number)
        data = shards.serialize_shard(
            share=self._share,
            made_from=self._made_from,
            digests=digests,
            skipped=skipped,
            peaks=self._peaks.rows(self._feed.positions[:: self._feed.batch]),
            observed=observed,
            counted=number,
        )
        try:
            atomic.write_bytes(self.path, data)
            self._kept = number
        except ExportError as error:
            self.notes[:] = dict.fromkeys((*self.notes, f"no checkpoint could be kept: {error}"))

    @contextmanager
    def add_resume_hint(self) -> Iterator[None]:
        """Add to a KeyboardInterrupt, or similar, how to resume."""
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
        return self._feed.complete_share

    @cached_property
    def _made_from(self) -> Fingerprint:
        """The fingerprint that a run must share with the one that it resumes."""
        origin = shard_fingerprint(self._subject.identities, self._feed.settings, self._share)
        return replace(origin, numbers={**origin.numbers, "calib8": __version__})

    def _left(self) -> str:
        """Return what the next run can resume from, as a sentence."""
        if self._unkept is not None:
            return (
                "the next run starts over, since no checkpoint holds"
                f" {self._unkept.statistic.key!r}"
            )
        if not self._kept:
            return ""
        return f"{self._of(self._kept)} are kept in {self.path}: --resume goes on from there"

    def _of(self, number: int) -> str:
        return f"{number:,} of {len(self._feed):,} samples"

    def _say(self, sentence: str) -> None:
        """Print a note now, and store it for the end."""
        self.notes.append(sentence)
        say_progress(f"note: {sentence}")

    def _found(self, *, force: bool) -> Shard | None:
        refuse_output(self.path)
        if not self.path.exists() or not self.path.stat().st_size:
            return None
        try:
            found = shards.load_shard(self.path, what=_WHAT)
            if found.counted is None:
                raise CacheError(f"{self.path} must be {_WHAT}, got a whole shard")
        except CacheError as error:
            if force:
                return None
            raise CacheError(f"{error} (remove it, or replace it with --force)") from None
        return found

    def _take_up(self, found: Shard) -> None:
        """Resume from a checkpoint."""
        if other := self._differs(found):
            raise CacheError(
                f"a run goes on from its own checkpoint, got {self.path} of another one: {other};"
                " take the model, images and options of that run, or leave --resume out to begin"
                " anew"
            )
        feed = self._feed
        feed.resume(found.digests, found.skipped)
        good = len(found.digests) - len(found.skipped)
        places = feed.positions[: self._standing * feed.batch : feed.batch]
        numbers = {place: number for number, place in enumerate(places, 1)}
        seen = {place for *_, listed in found.peaks for _, place in listed}
        if good != min(self._standing * feed.batch, feed.count) or not seen <= numbers.keys():
            raise CacheError(f"{self.path} must hold the samples that it names; remove it")
        self._peaks.add_rows(found.peaks, numbers)
        self._earlier, self.counted, self._kept = found, self._standing, self._standing
        self.notes.append(f"went on from {self.path}, with {self._of(self.counted)} counted")

    def _differs(self, found: Shard) -> str:
        """Return how a checkpoint's run differs from this one; "" if it does not."""
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
