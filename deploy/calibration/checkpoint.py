"""Checkpoints: resume an interrupted calibration from the last stored state.

::

    calibrate -o m.cache     periodically, at Ctrl-C and at SIGTERM --> m.cache.checkpoint
                                                                             |
    calibrate -o m.cache --resume   continues with the next sample <---------'
                                    and removes it once the cache is written

A checkpoint is a shard file (`deploy.calibration.shards`) of the first samples: their digests,
every statistic so far and the largest values. It is written while all workers pause, so that it
holds exactly these samples. What the pass needs of the first samples before it starts (TensorRT's
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
from deploy.files import atomic
from deploy.files.guard import refuse_output
from deploy.terminal import say_progress
from deploy.version import __version__

CHECKPOINT_SUFFIX = ".checkpoint"
MIN_INTERVAL_S = 10.0  # seconds between checkpoints
INTERVAL_RATIO = 30  # an interval lasts this many times as long as the checkpoint before it
_KIND = "a checkpoint of a calibration"


def checkpoint_path(path: Path) -> Path:
    """Return the checkpoint path of a run that writes a cache or a shard."""
    return Path(f"{path}{CHECKPOINT_SUFFIX}")


def remove_finished_checkpoint(path: Path) -> None:
    """Remove the checkpoint of a run that was interrupted after it wrote its cache."""
    with suppress(CacheError):
        if shards.load_shard(path, what=_KIND).counted is not None:
            path.unlink(missing_ok=True)


class Checkpoint:
    """The checkpoint of a run: reads that of an earlier run, writes its own.

    Attributes:
        path: the file.
        counted: number of samples that the earlier run counted; they are not run again.
        notes: notes for the report.
    """

    def __init__(
        self,
        path: Path,
        subject: CalibrationSubject,
        feed: Feed,
        observations: Sequence[Observation],
        peaks: Peaks,
        *,
        resume: bool,
        force: bool,
    ) -> None:
        """Look for a checkpoint, and resume from it if requested.

        Args:
            path: the file.
            subject: the model to calibrate.
            feed: the samples. If the run resumes, those counted before are hashed, not run.
            observations: what the pass records.
            peaks: largest |x| of every tensor. If the run resumes, those of the samples counted
                before are added.
            resume: whether to resume from the checkpoint, if there is one. Else the run starts
                over, and replaces the checkpoint once it has counted as many samples.
            force: whether a file that is broken, or no checkpoint, is replaced and not refused.

        Raises:
            CacheError: the file is not a checkpoint, is broken, or (to resume) of another run.
            FeedError: a counted sample has changed.
            ExportError: the path is an input, a folder or a device.
        """
        self.path = path
        self.counted = 0
        self.notes: list[str] = []
        self._subject = subject
        self._feed = feed
        self._observations = observations
        self._peaks = peaks
        self._saved_sample_count = 0  # samples in the file that this run wrote or resumed from
        # workers pause when `is_due` is called, so the cost of a save counts from the last call
        self._pause_start = time.monotonic()
        self._next_save = self._pause_start + MIN_INTERVAL_S  # time from which one is due
        self._unsavable_statistic = _find_unsavable(observations)  # if not None, nothing is saved
        self._resumed_checkpoint: Shard | None = None  # of the earlier run, if this one resumes
        self._existing_sample_count = 0  # samples in the earlier run's file

        existing = self._load_existing(force=force)
        if existing is not None and existing.counted is not None:  # a checkpoint has a number
            self._existing_sample_count = existing.counted
        if resume and existing is not None:
            self._resume(existing)
        elif resume:
            self._say(f"{path} is not there to go on from, so the run starts over")
        elif existing is not None:
            self._say(
                f"{path} holds {self._existing_sample_count:,} samples of a run that did not end:"
                " --resume goes on from it; this run starts over and replaces it as soon as it has"
                " counted as many"
            )

    def load_observed(self, observations: Iterable[Observation]) -> ObservedStatistics:
        """Return the statistics of the samples that were counted before.

        Raises:
            CacheError: the arrays of a statistic are broken.
        """
        assert self._resumed_checkpoint is not None, "no samples were counted before"
        return self._resumed_checkpoint.observed(observations)

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint; starts the clock of its cost, as workers pause."""
        self._pause_start = time.monotonic()
        return self._unsavable_statistic is None and self._pause_start >= self._next_save

    def save(self, sample_count: int, observed: ObservedStatistics) -> None:
        """Write the statistics of the first samples; a full disk does not end the run."""
        has_new_samples = (
            sample_count > self._saved_sample_count and sample_count >= self._existing_sample_count
        )
        if self._unsavable_statistic is None and has_new_samples:
            self._write(sample_count, observed)
        now = time.monotonic()
        self._next_save = now + max(MIN_INTERVAL_S, INTERVAL_RATIO * (now - self._pause_start))

    def _write(self, sample_count: int, observed: ObservedStatistics) -> None:
        """Replace the checkpoint's file by the statistics of the first samples, or note why not.

        Args:
            sample_count: how many samples the statistics hold.
            observed: the statistics.
        """
        # a sample is `batch` images; its position in the list of images is that of the first. These
        # are of all samples: `rows` takes those of the samples with the largest values
        sample_positions = self._feed.positions[:: self._feed.batch]
        # of the images of the first `sample_count` samples: the sha256 of each, and position -> why
        # it was skipped
        digests, skipped = self._feed.progress_after(sample_count)
        data = shards.serialize_shard(
            share=self._feed.share_or_all,  # the shard that this run makes, if any, else 1/1
            made_from=self._fingerprint,
            digests=digests,
            skipped=skipped,
            peaks=self._peaks.rows(sample_positions),
            observed=observed,
            counted=sample_count,
        )
        try:
            atomic.write_bytes(self.path, data)
            self._saved_sample_count = sample_count
        except ExportError as error:  # such as a full disk: the run itself goes on
            note = f"no checkpoint could be kept: {error}"
            if note not in self.notes:
                self.notes.append(note)

    @contextmanager
    def add_resume_hint(self) -> Iterator[None]:
        """Add to a KeyboardInterrupt, or similar, how to resume."""
        try:
            yield
        except Exception:
            raise
        except BaseException as interrupt:
            if hint := self._resume_hint():
                interrupt.args = (hint,)
            raise

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        """The fingerprint that a run must share with the one that it resumes."""
        feed = self._feed
        origin = shard_fingerprint(self._subject.identities, feed.settings, feed.share_or_all)
        return replace(origin, numbers={**origin.numbers, "calib8": __version__})

    def _resume_hint(self) -> str:
        """Return what the next run can resume from, as a sentence."""
        if self._unsavable_statistic is not None:
            return (
                f"the next run starts over, since no checkpoint holds {self._unsavable_statistic!r}"
            )
        if not self._saved_sample_count:
            return ""
        progress = self._describe_progress(self._saved_sample_count)
        return f"{progress} are kept in {self.path}: --resume goes on from there"

    def _describe_progress(self, number: int) -> str:
        return f"{number:,} of {len(self._feed):,} samples"

    def _say(self, sentence: str) -> None:
        """Print a note now, and store it for the end."""
        self.notes.append(sentence)
        say_progress(f"note: {sentence}")

    def _load_existing(self, *, force: bool) -> Shard | None:
        """Return the checkpoint in the file; None if it has none, or a broken one (with `force`).

        Raises:
            CacheError: the file is broken, or no checkpoint, and not to be replaced.
            ExportError: the path is an input, a folder or a device.
        """
        refuse_output(self.path)
        if not self.path.exists() or not self.path.stat().st_size:
            return None
        try:
            existing = shards.load_shard(self.path, what=_KIND)
            if existing.counted is None:
                raise CacheError(f"{self.path} must be {_KIND}, got a whole shard")
        except CacheError as error:
            if force:
                return None
            raise CacheError(f"{error} (remove it, or replace it with --force)") from None
        return existing

    def _resume(self, existing: Shard) -> None:
        """Go on from a checkpoint: take over its statistics, and skip the samples that it counted.

        Raises:
            CacheError: it is of another run, or does not hold the samples that it names.
            FeedError: a counted sample has changed.
        """
        differences = self._find_differences(existing)  # clauses, such as "the images changed"
        if differences:
            raise CacheError(
                f"a run goes on from its own checkpoint, got {self.path} of another one:"
                f" {'; '.join(differences)}; take the model, images and options of that run, or"
                " leave --resume out to begin again"
            )
        feed = self._feed
        feed.resume(existing.digests, existing.skipped)  # hashes these images again

        # the checkpoint must hold exactly the images of the samples that it says it has counted;
        # a sample is `batch` images, and the last one may be filled up with earlier images.
        # Skipped images are in no sample, and not in `feed.count`
        counted = self._existing_sample_count
        good_image_count = len(existing.digests) - len(existing.skipped)
        has_all_images = good_image_count == min(counted * feed.batch, feed.count)
        # and the samples that it stores as those with the largest values must be among these; the
        # position of a sample is that of its first image
        sample_positions = feed.positions[: counted * feed.batch : feed.batch]
        are_peaks_counted = existing.peak_positions <= set(sample_positions)
        if not has_all_images or not are_peaks_counted:
            raise CacheError(f"{self.path} must hold the samples that it names; remove it")

        self._peaks.add_rows(existing.peaks, sample_positions)
        self._resumed_checkpoint = existing
        self._saved_sample_count = self.counted = counted
        self.notes.append(
            f"went on from {self.path}, with {self._describe_progress(counted)} counted"
        )

    def _find_differences(self, existing: Shard) -> list[str]:
        """Return how the run of a checkpoint differs from this one, as clauses; [] if nowhere."""
        differences = list(self._fingerprint.changes_since(existing.made_from).values())
        share = self._feed.share_or_all
        # as text, "2/4": their samples are compared by the fingerprint
        if str(existing.share) != str(share):
            differences.append(f"the shard changed ({existing.share} -> {share})")

        # each observation, such as the histogram of a tensor, must be in both
        own_keys = {observation.key for observation in self._observations}
        unshared_keys = own_keys.symmetric_difference(existing.keys)
        if unshared_keys:
            _, tensor, statistic = min(unshared_keys)  # (variant, tensor, statistic)
            differences.append(
                f"the targets or the method changed (not both have {statistic} of {tensor!r})"
            )
        return differences


def _find_unsavable(observations: Iterable[Observation]) -> str | None:
    """Return the key of the first statistic that no file can hold; None if all can be saved."""
    for observation in observations:
        if not observation.statistic.recorder(None).to_arrays():  # such a recorder gives no arrays
            return observation.statistic.key
    return None
