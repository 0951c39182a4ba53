"""Cluster client: distribute a calibration to dask workers and merge their shards.

::

    remaining shares --submit, two a thread--> running --done--> ShardMerger
                ^                                  |
                '---- dask: worker lost; calib8: system error ----'

Only few pieces are submitted ahead, so that a cancelled run leaves few on the scheduler. Shards are
merged as they arrive, in constant memory, to the statistics that one run would observe. Every call
to the scheduler has a timeout.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from calibrators.statistics import Recorder
from deploy.calibration import cluster_jobs, shards
from deploy.calibration.cluster_jobs import (
    Cluster,
    ClusterJob,
    Versions,
    collect_versions,
    make_job,
    refuse_other_versions,
)
from deploy.calibration.observation import CalibrationSubject, Key, Observation, ObservedStatistics
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import shard_fingerprint
from deploy.errors import BackendError, FeedError, SdkMissingError, counted, extra_hint, first_line
from deploy.feed.feed import FeedSource
from deploy.feed.file_list import SampleChangedError
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit, Share
from deploy.files.usercode import refuse_foreign_code
from deploy.terminal import phase, say_progress

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_S = 10.0  # timeout of the connection
ANSWER_S = 30.0  # timeout of later calls, when the scheduler may be busy
WORKERS_S = 60.0  # how long a run waits for a first worker
TICK_S = 1.0  # interval of polling the workers
STOP_S = 5.0  # timeout of stopping the workers
_CLOSE_S = 2.0  # timeout of closing
_PIECES_AHEAD = 2  # submitted pieces per worker thread
_PIECES_PER_THREAD = 8  # so that all threads end at about the same time
_MAX_PIECE_SAMPLES = 1024  # which bounds the loss with a worker and the progress step
_MAX_PIECE_BYTES = 32 << 20  # of a piece that is sent
_DASK_LOGGERS = ("distributed", "tornado", "asyncio")
# the same class since Python 3.11
TIMEOUT_ERRORS = (TimeoutError, asyncio.TimeoutError, FutureTimeout)
T = TypeVar("T")


@contextmanager
def connect_client(address: str) -> Iterator[Client]:
    """Connect a client for the duration of the context.

    Raises:
        SdkMissingError: dask.distributed is not installed.
        BackendError: no scheduler answers at this address, or the connection breaks.
        ConfigError: another user may have set the address. dask runs the code that a scheduler
            sends.
    """
    refuse_foreign_code(address)
    with _silence_dask():
        client = _open_client(address)
        try:
            with client.as_current():
                yield client
        except (OSError, *TIMEOUT_ERRORS) as error:  # dask raises these when the connection breaks
            raise BackendError(
                f"the scheduler {address} must answer until the end, got: {first_line(error)}; see"
                " to it and run again"
            ) from error
        finally:
            with suppress(Exception):  # the result, or the error, does not depend on it
                call_with_timeout(_CLOSE_S, client.close)


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, or abandon it after a timeout.

    Dask itself waits forever for a frozen scheduler, or for another program at the address.

    Raises:
        TimeoutError: the call takes longer.
        Exception: any error of the call.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run_call() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run_call, name="calib8 scheduler", daemon=True).start()
    try:
        return answer.result(seconds)
    except TIMEOUT_ERRORS as error:
        if answer.done():  # not this timeout: the call itself raised the error
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _import_distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise SdkMissingError(
            f"--scheduler needs dask.distributed, which is not installed; {extra_hint('dask')}"
        ) from error
    return distributed


def _open_client(address: str) -> Client:
    try:
        with phase("scheduler"):
            return call_with_timeout(CONNECT_S, lambda: _create_client(address))
    except Exception as error:
        raise BackendError(
            f"a dask scheduler must answer at {address} within {CONNECT_S:.0f} s, got:"
            f" {first_line(error)}; start `dask scheduler` there, or correct the address, such as"
            " tcp://host:8786"
        ) from error


def _create_client(address: str) -> Client:
    client_class = _import_distributed().Client
    client: Client = client_class.__new__(client_class)
    try:
        client_class.__init__(client, address, timeout=CONNECT_S, set_as_default=False)
    except BaseException:
        client.status = "closed"  # or its __del__ would wait for the address once more
        raise
    return client


@contextmanager
def _silence_dask() -> Iterator[None]:
    """Silence dask's logs of errors that calib8 reports itself, and its large-object warnings."""
    _import_distributed()  # the import sets the levels of dask's loggers, which are changed below
    level_by_logger = {}
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in _DASK_LOGGERS:
            logger = logging.getLogger(name)
            level_by_logger[logger] = logger.level
    try:
        for logger in level_by_logger:
            logger.setLevel(logging.CRITICAL + 1)  # above every level: nothing is logged
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in level_by_logger.items():
            logger.setLevel(level)


class ShardMerger:
    """Merges the shards of a feed's pieces, and registers their samples with the feed."""

    def __init__(
        self, observations: Iterable[Observation], feed: Feed, identities: Mapping[str, str]
    ) -> None:
        self._observations = tuple(observations)
        self._feed = feed
        self._identities = identities
        self._merged: dict[Key, Recorder] = {}
        self._peaks = Peaks()  # numbers samples by position, bad ones included

    def add(self, piece: Share, worker: str, data: bytes) -> None:
        """Merge a worker's result for a piece of the images into the statistics and the feed.

        If the result is refused, the calibration ends, so a half-done merge does no harm.

        Args:
            piece: which of the images the worker observed.
            worker: address of the worker.
            data: the worker's result, the bytes of a shard file: statistics and their origin.

        Raises:
            CacheError: the shard file is broken.
            BackendError: it belongs to another calibration.
            FeedError: the worker's images differ from those here.
        """
        shard = shards.parse_shard(data, Path(f"piece {piece}"))
        expected_origin = shard_fingerprint(self._identities, self._feed.settings, piece)
        changes = expected_origin.changes_since(shard.made_from)
        if changes:
            raise BackendError(
                f"the worker {worker} must observe what it was asked for, got another piece than"
                f" {piece}: {'; '.join(changes.values())}; install the same calib8 there"
            )
        try:
            self._feed.merge_remote_pass(piece, shard.digests, shard.skipped)
        except SampleChangedError as error:
            raise FeedError(
                f"the worker {worker} must see the same images as this machine, got another file"
                f" ({error}); give a path that all machines share, or send them (--send images)"
            ) from error
        # here a sample's number is its position + 1, also of bad samples: those of other pieces are
        # not known yet. `end` numbers the good ones alone
        self._peaks.add_rows(shard.peaks, range(piece.count))
        shards.merge_histograms(self._merged, shard.observed(self._observations))

    def end(self, peaks: Peaks) -> ObservedStatistics:
        """Return the merged statistics of all pieces.

        `peaks`: receives the largest |x| of every tensor, by the numbers of the good samples.
        """
        self._feed.refuse_all_bad()
        rows = self._peaks.rows(range(self._feed.entry_count))
        peaks.add_rows(rows, self._feed.positions)
        return ObservedStatistics(self._merged).select(self._observations)


def observe_on(
    cluster: Cluster,
    observations: tuple[Observation, ...],
    feed: Feed,
    *,
    subject: CalibrationSubject,
    images: FeedSource,
    limit: Limit,
    peaks: Peaks,
    inference_counts: Counter[str],
) -> tuple[ObservedStatistics, tuple[str, ...]]:
    """Observe on the workers of a dask scheduler; the result equals that of this machine alone.

    Args:
        cluster: the scheduler and its options.
        observations: what to observe; none may depend on the order of the images.
        feed: the images, opened on this machine.
        subject: the model to calibrate.
        images: where the images are, for the workers.
        limit: which of the images are used.
        peaks: receives the largest |x| of every tensor.
        inference_counts: variant key -> number of inferences, incremented.

    Returns:
        (the statistics, notes on where they were observed).

    Raises:
        ConfigError, FeedError: the images cannot be split among workers.
        BackendError: no scheduler, no worker, other versions there, or all workers were lost.
        Calib8Error: an error on a worker, which is named.
    """
    # share 1 of 1, to split into pieces; refuses images that cannot be split
    all_images = feed.get_share((1, 1))
    job = make_job(cluster, observations, feed, subject=subject, images=images, limit=limit)
    merger = ShardMerger(observations, feed, job.identities)
    with connect_client(cluster.address) as client:
        cluster_run = ClusterRun(client, job, cluster, feed)
        thread_count = cluster_run.wait_for_workers()
        piece_count = _count_pieces(cluster, feed, all_images, thread_count)
        first_piece = feed.get_share((1, piece_count))
        # the other pieces differ in their number only, which decides their images
        pieces = (replace(first_piece, number=number) for number in range(1, piece_count + 1))
        try:
            with phase("observing", all_images.count, "samples") as show_progress:
                for piece, worker, shard_bytes in cluster_run.run_pieces(pieces):
                    merger.add(piece, worker, shard_bytes)
                    for _ in piece.positions:
                        show_progress()
        finally:
            cluster_run.end()
    observed = merger.end(peaks)
    for variant in dict.fromkeys(observation.variant.key for observation in observations):
        inference_counts[variant] += feed.count  # the workers ran each variant on every image
    return observed, cluster_run.notes(piece_count)


def _count_pieces(cluster: Cluster, feed: Feed, all_images: Share, thread_count: int) -> int:
    """Return how many pieces the images are split into.

    Args:
        cluster: the scheduler and its options, which may set the number.
        feed: the images.
        all_images: the share 1 of 1, which is all images.
        thread_count: number of threads of all workers.
    """
    if cluster.pieces is not None:
        return cluster.pieces
    image_count = all_images.count
    min_count = math.ceil(image_count / _MAX_PIECE_SAMPLES)
    piece_count = max(_PIECES_PER_THREAD * thread_count, min_count)
    if cluster.sends_images:
        # the first image stands for all; it is share 1 of as many shares as there are images
        (first_sample,) = feed.read_share(replace(all_images, of=image_count))
        sent_bytes = image_count * first_sample.byte_count
        piece_count = max(piece_count, math.ceil(sent_bytes / _MAX_PIECE_BYTES))
    return min(image_count, piece_count)


class ClusterRun:
    """A job running on a scheduler's workers."""

    def __init__(self, client: Client, job: ClusterJob, cluster: Cluster, feed: Feed) -> None:
        self._client = client
        self._job = job
        self._cluster = cluster
        self._feed = feed
        self._job_future: Future | None = None  # the job on the scheduler
        self._piece_by_future: dict[Future, Share] = {}  # the pieces that are submitted
        self._failure_counts: Counter[Share] = Counter()  # of each piece, for its retries
        self._threads_by_worker: Mapping[str, int] = {}
        self._last_poll = time.monotonic()
        self._last_worker_time = self._last_poll  # when there was a worker
        self._all_workers: set[str] = set()
        self.lost_workers: list[str] = []

    def wait_for_workers(self) -> int:
        """Wait for workers and check their versions; return their number of threads.

        Raises:
            BackendError: there are none, or one has no calib8 or another version.
        """
        with phase("workers"):
            while not self._poll_workers():
                time.sleep(TICK_S / 4)
            for machine, versions in self._collect_versions().items():
                refuse_other_versions(machine, versions, self._job.versions)
        return sum(self._threads_by_worker.values())

    def _collect_versions(self) -> Mapping[str, Versions | Exception]:
        """Ask the scheduler and all workers for the versions of their programs.

        Returns:
            name of each machine -> its versions, or the error if it could not tell them.
        """
        kind = self._job.kind  # of the samples: OpenCV's version matters only for image files
        client = self._client
        versions_by_machine: dict[str, Versions | Exception] = {}
        try:
            scheduler_versions = call_with_timeout(
                ANSWER_S, lambda: client.run_on_scheduler(collect_versions, kind)
            )
            # the scheduler runs no model, so its other programs may have any version
            calib8_version = scheduler_versions["calib8"]
            versions_by_machine["the scheduler"] = {**self._job.versions, "calib8": calib8_version}
        except (ImportError, AttributeError) as error:  # no calib8 there, or an older one
            versions_by_machine["the scheduler"] = error
        worker_versions = call_with_timeout(
            ANSWER_S, lambda: client.run(collect_versions, kind, on_error="return")
        )
        for address, versions_or_error in worker_versions.items():
            versions_by_machine[f"the worker {address}"] = versions_or_error
        return versions_by_machine

    def run_pieces(self, pieces: Iterable[Share]) -> Iterator[tuple[Share, str, bytes]]:
        """Run pieces, which are shares of the images; yield the result of each as it ends.

        A result is (the piece, address of its worker, bytes of a shard file).

        Raises:
            BackendError: the scheduler or all workers are gone, or a piece failed too often.
            Calib8Error: an error on a worker.
        """
        remaining = deque(pieces)
        while remaining or self._piece_by_future:
            self._poll_workers()
            thread_count = max(1, sum(self._threads_by_worker.values()))
            while remaining and len(self._piece_by_future) < _PIECES_AHEAD * thread_count:
                self._submit(remaining.popleft())
            yield from self._finished_pieces()
        # at once, however recent the last answer: `notes` tells of workers lost since then too
        self._poll_workers(force=True)

    def end(self) -> None:
        """Cancel what remains of the job on the workers, and drop it."""
        if self._piece_by_future:  # pieces are left only if the run was interrupted
            futures = list(self._piece_by_future)
            if self._job_future is not None:
                futures.append(self._job_future)
            key = self._job.key
            client = self._client
            with suppress(Exception):  # the cluster may be gone, and then neither call helps
                call_with_timeout(STOP_S, lambda: client.cancel(futures, force=True))
                call_with_timeout(
                    STOP_S, lambda: client.run(cluster_jobs.stop_job, key, on_error="ignore")
                )
        # the cluster frees the job's data once no future refers to it
        self._piece_by_future = {}
        self._job_future = None

    def notes(self, piece_count: int) -> tuple[str, ...]:
        """Return notes on where the samples were observed."""
        workers = counted(len(self._all_workers), "worker")
        pieces = counted(piece_count, "piece")
        notes = [f"observed in {pieces} by {workers} of {self._cluster.address}"]
        if self.lost_workers:
            addresses = ", ".join(self.lost_workers)
            notes.append(f"lost on the way, what they did was done elsewhere: {addresses}")
        return tuple(notes)

    def _poll_workers(self, *, force: bool = False) -> bool:
        """Ask the scheduler for its workers, and note lost ones; return whether there are any.

        If the last answer is younger than `TICK_S` and had workers, it is used again, unless
        `force`.

        Raises:
            BackendError: there has been no worker for `WORKERS_S`.
        """
        now = time.monotonic()
        is_recent = now - self._last_poll < TICK_S
        if is_recent and self._threads_by_worker and not force:
            return True
        self._last_poll = now
        threads_by_worker = call_with_timeout(ANSWER_S, self._client.nthreads)
        for address in self._threads_by_worker.keys() - threads_by_worker:
            self.lost_workers.append(address)
            say_progress(f"the worker {address} is lost; what it did is done elsewhere")
        self._threads_by_worker = threads_by_worker
        self._all_workers |= set(threads_by_worker)
        if threads_by_worker:
            self._last_worker_time = now
        elif now - self._last_worker_time > WORKERS_S:
            raise BackendError(
                f"the scheduler {self._cluster.address} must have a worker, got none for"
                f" {WORKERS_S:.0f} s; start `dask worker {self._cluster.address}`, and run again"
            )
        return bool(threads_by_worker)

    def _submit(self, piece: Share) -> None:
        """Give the scheduler a piece; the first time also the job that all pieces share."""
        key = self._job.key
        if self._job_future is None:
            self._job_future = self._client.submit(
                cluster_jobs.return_job, self._job, key=key, pure=False
            )
        samples = None
        if self._cluster.sends_images:
            samples = self._feed.read_share(piece)
        else:
            # one image is read here too: if the worker's image has another digest, the merge fails
            self._feed.store_digest(piece.positions[0])
        future = self._client.submit(
            cluster_jobs.observe_piece,
            self._job_future,  # on the worker, dask replaces it by the job
            piece,
            samples,
            # each attempt has a new key: for the same key dask would return the earlier failure
            key=f"{key}-{piece.number}-{self._failure_counts[piece]}",
            pure=False,
        )
        self._piece_by_future[future] = piece

    def _finished_pieces(self) -> Iterator[tuple[Share, str, bytes]]:
        """Wait up to `TICK_S` for pieces; yield (piece, worker, bytes of its shard) of those done.

        A piece that failed by an error of the system, which may pass, is submitted again.

        Raises:
            BackendError: the scheduler lost the job.
            Calib8Error: a piece failed for good; the error is that of its worker.
        """
        from distributed import wait

        try:
            wait(list(self._piece_by_future), timeout=TICK_S, return_when="FIRST_COMPLETED")
        except TIMEOUT_ERRORS:
            pass
        except Exception as error:  # all futures were cancelled
            raise self._lost_job_error(first_line(error)) from error
        ended_futures = [future for future in self._piece_by_future if future.status != "pending"]
        for future in ended_futures:
            try:
                worker, result = self._fetch_result(future)
            except TIMEOUT_ERRORS:  # its worker was lost: dask recomputes the piece
                continue
            piece = self._piece_by_future.pop(future)
            if not isinstance(result, cluster_jobs.PieceFailure):
                yield piece, worker, result
                continue
            has_retries_left = self._failure_counts[piece] < self._cluster.retries
            if not (result.is_temporary and has_retries_left):
                raise result.error
            self._failure_counts[piece] += 1
            self._submit(piece)

    def _fetch_result(self, future: Future) -> tuple[str, bytes | cluster_jobs.PieceFailure]:
        """Return what a piece returned: (name of the worker, shard bytes, or why there are none).

        Raises:
            TimeoutError: the worker was lost before it sent the result. dask runs the piece again,
                so the caller waits for the same future.
            BackendError: the scheduler dropped the piece, or the piece killed several workers.
        """
        piece = self._piece_by_future[future]
        if future.status in ("cancelled", "lost"):
            raise self._lost_job_error(f"piece {piece} taken away")
        try:
            result: tuple[str, bytes | cluster_jobs.PieceFailure] = future.result(
                timeout=10 * TICK_S
            )
        except TIMEOUT_ERRORS:
            raise
        except Exception as error:  # it killed several workers, or none can unpickle it
            raise BackendError(
                f"the workers must survive their pieces, got {type(error).__name__} of piece"
                f" {piece}: {first_line(error)}; see the workers' logs, use more --pieces, or give"
                " the workers more memory"
            ) from error
        return result

    def _lost_job_error(self, event: str) -> BackendError:
        return BackendError(
            f"the scheduler {self._cluster.address} must keep what it was given, got: {event}; it"
            " was restarted, or lost: run again"
        )
