"""Cluster client: distribute a calibration to dask workers and merge their shards.

::

    shares left --submit, two a thread--> running --done--> Gathering
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

from calibrators.histogram import Histogram
from deploy.calibration import cluster_jobs, shards
from deploy.calibration.cluster_jobs import Cluster, ClusterJob, collect_versions, make_job
from deploy.calibration.observation import CalibrationSubject, Key, Observation, ObservedStatistics
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import shard_fingerprint
from deploy.errors import BackendError, FeedError, SdkMissingError, first_line
from deploy.feed.feed import FeedSource
from deploy.feed.file_list import SampleChangedError
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit, Share
from deploy.terminal import phase, say_progress

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_S = 10.0  # timeout of the connection
ANSWER_S = 30.0  # timeout of later calls, when the scheduler may be busy
_CLOSE_S = 2.0  # timeout of closing
_LOUD = ("distributed", "tornado", "asyncio")
# the same class since Python 3.11
TIMEOUT_ERRORS = (TimeoutError, asyncio.TimeoutError, FutureTimeout)
T = TypeVar("T")
WORKERS_S = 60.0  # how long a run waits for a first worker
TICK_S = 1.0  # interval of polling the workers
_STOP_S = 5.0  # timeout of stopping the workers
_AHEAD = 2  # submitted pieces per worker thread
_EACH = 8  # pieces per worker thread, so that all end at about the same time
_MOST_SAMPLES = 1024  # per piece, which bounds the loss with a worker and the progress step
_MOST_BYTES = 32 << 20  # per piece that is sent


@contextmanager
def connect_client(address: str) -> Iterator[Client]:
    """Connect a client for the duration of the context.

    Raises:
        SdkMissingError: dask.distributed is not installed.
        BackendError: no scheduler answers at this address, or the connection breaks.
    """
    with _quiet():
        client = _opened(address)
        try:
            with client.as_current():
                yield client
        except (OSError, *TIMEOUT_ERRORS) as error:  # dask raises these when the connection breaks
            raise BackendError(
                f"the scheduler {address} must answer until the end, got: {first_line(error)}; see"
                " to it and run again"
            ) from error
        finally:
            with suppress(Exception):
                call_with_timeout(_CLOSE_S, client.close)


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, or abandon it after a timeout.

    Dask itself waits forever for a frozen scheduler, or for another program at the address.

    Raises:
        TimeoutError: the call takes longer.
        Exception: any error of the call.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="calib8 scheduler", daemon=True).start()
    try:
        return done.result(seconds)
    except TIMEOUT_ERRORS as error:
        if done.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _import() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise SdkMissingError(
            "--scheduler needs dask.distributed, which is not installed; pip install 'calib8[dask]'"
        ) from error
    return distributed


def _opened(address: str) -> Client:
    def client() -> Client:
        kind = _import().Client
        made: Client = kind.__new__(kind)
        try:
            kind.__init__(made, address, timeout=CONNECT_S, set_as_default=False)
        except BaseException:
            made.status = "closed"  # or its __del__ would wait for the address once more
            raise
        return made

    try:
        with phase("scheduler"):
            return call_with_timeout(CONNECT_S, client)
    except Exception as error:
        raise BackendError(
            f"a dask scheduler must answer at {address} within {CONNECT_S:.0f} s, got:"
            f" {first_line(error)}; start `dask scheduler` there, or correct the address, such as"
            " tcp://host:8786"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dask's logs of errors that calib8 reports itself, and its large-object warnings."""
    _import()  # sets the levels of dask's loggers, before they are changed here
    known = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOUD]
    loggers = [logging.getLogger(name) for name in known]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


class ShardMerger:
    """Merges the shards of a feed's pieces, and registers their samples with the feed."""

    def __init__(
        self, wanted: Iterable[Observation], feed: Feed, identities: Mapping[str, str]
    ) -> None:
        self._wanted = tuple(wanted)
        self._feed = feed
        self._identities = identities
        self._merged: dict[Key, Histogram] = {}
        self._peaks = Peaks()  # numbers samples by place, bad ones included
        self._count = 0

    def add(self, share: Share, worker: str, data: bytes) -> None:
        """Merge the shard of a share.

        Raises:
            CacheError: it is broken.
            BackendError: it belongs to another calibration.
            FeedError: the worker's images differ from those here.
        """
        shard = shards.parse_shard(data, Path(f"piece {share}"))
        origin = shard_fingerprint(self._identities, self._feed.settings, share)
        changes = origin.changes_since(shard.made_from)
        if shard.share != share or changes:
            what = "; ".join(changes.values()) or f"it is piece {shard.share} of others"
            raise BackendError(
                f"the worker {worker} must observe what it was asked for, got another piece than"
                f" {share}: {what}; install the same calib8 there"
            )
        self._count = share.count
        try:
            self._feed.merge_remote_pass(share, shard.digests, shard.skipped)
        except SampleChangedError as error:
            raise FeedError(
                f"the worker {worker} must see the same images as this machine, got another file"
                f" ({error}); give a path that all machines share, or send them (--send images)"
            ) from error
        self._peaks.add_rows(shard.peaks, {place: place + 1 for place in share.positions})
        shards.merge_histograms(self._merged, shard.observed(self._wanted))

    def end(self, peaks: Peaks) -> ObservedStatistics:
        """Return the merged statistics of all pieces."""
        if not self._feed.count:
            raise FeedError(
                f"at least one sample must be good, all {self._count} were skipped:"
                f" {self._feed.skipped[0]}"
            )
        numbers = {place: number for number, place in enumerate(self._feed.positions, 1)}
        peaks.add_rows(self._peaks.rows(range(self._count)), numbers)
        return ObservedStatistics({o.key: self._merged[o.key] for o in self._wanted})


def observe_on(
    cluster: Cluster,
    wanted: tuple[Observation, ...],
    feed: Feed,
    *,
    subject: CalibrationSubject,
    images: FeedSource,
    limit: Limit,
    peaks: Peaks,
    runs: Counter[str],
) -> tuple[ObservedStatistics, tuple[str, ...]]:
    """Observe on the workers of a scheduler, with the result of one pass on this machine.

    `wanted`: the observations, all order-free.
    `peaks`: receives the largest |x| of every tensor.
    `runs`: variant key -> number of inferences, incremented.

    Returns:
        (the wanted statistics, notes on where they were observed).

    Raises:
        ConfigError, FeedError: the images cannot be split among workers.
        BackendError: no scheduler, no worker, other versions there, or all workers were lost.
        Calib8Error: an error on a worker, which is named.
    """
    everything = feed.get_share((1, 1))
    job = make_job(cluster, wanted, feed, subject=subject, images=images, limit=limit)
    gathering = ShardMerger(wanted, feed, job.identities)
    with connect_client(cluster.address) as client:
        run = ClusterRun(client, job, cluster, feed)
        of = _pieces(cluster, feed, everything, sum(run.muster().values()))
        first = feed.get_share((1, of))
        try:
            with phase("observing", everything.count, "samples") as step:
                for share, worker, data in run.pieces(
                    replace(first, number=n + 1) for n in range(of)
                ):
                    gathering.add(share, worker, data)
                    for _ in share.positions:
                        step()
        finally:
            run.end()
    found = gathering.end(peaks)
    runs.update({key: feed.count for key in dict.fromkeys(o.variant.key for o in wanted)})
    return found, run.told(of)


def _pieces(cluster: Cluster, feed: Feed, everything: Share, threads: int) -> int:
    """Return how many pieces the images are split into."""
    if cluster.pieces is not None:
        return cluster.pieces
    least = max(_EACH * threads, -(-everything.count // _MOST_SAMPLES))
    if cluster.sends_images:
        (one,) = feed.read_share(replace(everything, of=everything.count))
        least = max(least, -(-everything.count * one.byte_count // _MOST_BYTES))
    return min(everything.count, least)


class ClusterRun:
    """A job running on a scheduler's workers."""

    def __init__(self, client: Client, job: ClusterJob, cluster: Cluster, feed: Feed) -> None:
        self._client = client
        self._job = job
        self._cluster = cluster
        self._feed = feed
        self._held: Future | None = None
        self._running: dict[Future, Share] = {}
        self._tries: Counter[Share] = Counter()
        self._there: Mapping[str, int] = {}
        self._looked = self._alone = time.monotonic()
        self._all: set[str] = set()
        self.lost: list[str] = []

    def muster(self) -> Mapping[str, int]:
        """Wait for workers and check their versions; return address -> number of threads.

        Raises:
            BackendError: there are none, or one has no calib8 or another version.
        """
        with phase("workers"):
            while not self._look():
                time.sleep(TICK_S / 4)
            for machine, found in self._versions().items():
                self._refuse_other(machine, found)
        return self._there

    def _versions(self) -> Mapping[str, object]:
        """Return the versions on each worker and on the scheduler, or the error of the call."""
        kind = self._job.kind
        versions: dict[str, object] = {}
        try:
            here = call_with_timeout(
                ANSWER_S, lambda: self._client.run_on_scheduler(collect_versions, kind)
            )
            versions["the scheduler"] = {"calib8": here["calib8"]}  # the rest concerns workers only
        except (ImportError, AttributeError) as error:
            versions["the scheduler"] = error
        workers = call_with_timeout(
            ANSWER_S, lambda: self._client.run(collect_versions, kind, on_error="return")
        )
        return versions | {f"the worker {address}": one for address, one in workers.items()}

    def _refuse_other(self, machine: str, found: object) -> None:
        ours = self._job.versions
        if isinstance(found, Exception):
            raise BackendError(
                f"{machine} must have calib8 {ours['calib8']}, got: {first_line(found)}; pip"
                " install it there"
            )
        assert isinstance(found, dict)
        if others := cluster_jobs.describe_version_differences(
            {name: ours[name] for name in found}, found
        ):
            raise BackendError(f"all machines must have the same versions, {machine} {others}")

    def pieces(self, shares: Iterator[Share]) -> Iterator[tuple[Share, str, bytes]]:
        """Run all shares; yield (share, its worker, bytes of its shard) as they finish.

        Raises:
            BackendError: the scheduler or all workers are gone, or a piece failed too often.
            Calib8Error: an error on a worker.
        """
        left = deque(shares)
        while left or self._running:
            self._look()
            while left and len(self._running) < _AHEAD * max(1, sum(self._there.values())):
                self._submit(left.popleft())
            yield from self._done()
        self._look(anew=True)

    def end(self) -> None:
        """Cancel all that is left of the job on the workers."""
        futures = [*self._running, *([] if self._held is None else [self._held])]
        if self._running:
            key, client = self._job.key, self._client
            with suppress(Exception):
                call_with_timeout(_STOP_S, lambda: client.cancel(futures, force=True))
                call_with_timeout(
                    _STOP_S, lambda: client.run(cluster_jobs.stop_job, key, on_error="ignore")
                )
        self._running = {}
        self._held = None

    def told(self, of: int) -> tuple[str, ...]:
        """Return notes on where the samples were observed."""
        number = len(self._all)
        by = f"observed in {of} pieces by {number} worker{'s' * (number > 1)}"
        lost = f"lost on the way, what they did was done elsewhere: {', '.join(self.lost)}"
        return (f"{by} of {self._cluster.address}", *((lost,) if self.lost else ()))

    def _look(self, *, anew: bool = False) -> bool:
        """Poll the workers if the last poll is old or `anew`; return whether there are any."""
        now = time.monotonic()
        if not anew and self._there and now - self._looked < TICK_S:
            return True
        self._looked = now
        there = call_with_timeout(ANSWER_S, self._client.nthreads)
        for address in set(self._there) - set(there):
            self.lost.append(address)
            say_progress(f"the worker {address} is lost; what it did is done elsewhere")
        self._there = there
        self._all |= set(there)
        if there:
            self._alone = now
        elif now - self._alone > WORKERS_S:
            raise BackendError(
                f"the scheduler {self._cluster.address} must have a worker, got none for"
                f" {WORKERS_S:.0f} s; start `dask worker {self._cluster.address}`, and run again"
            )
        return bool(there)

    def _submit(self, share: Share) -> None:
        if self._held is None:
            self._held = self._client.submit(
                cluster_jobs.return_job, self._job, key=self._job.key, pure=False
            )
        samples = self._feed.read_share(share) if self._cluster.sends_images else None
        if samples is None:
            self._feed.hash_entry(share.number - 1)  # to detect that the worker sees another file
        future = self._client.submit(
            cluster_jobs.observe_piece,
            self._held,
            share,
            samples,
            key=f"{self._job.key}-{share.number}-{self._tries[share]}",
            pure=False,
        )
        self._running[future] = share

    def _done(self) -> Iterator[tuple[Share, str, bytes]]:
        from distributed import wait

        try:
            wait(list(self._running), timeout=TICK_S, return_when="FIRST_COMPLETED")
        except TIMEOUT_ERRORS:
            pass
        except Exception as error:  # all futures were cancelled
            raise self._taken(first_line(error)) from error
        for future in [one for one in self._running if one.status != "pending"]:
            try:
                worker, found = self._result(future)
            except (
                TIMEOUT_ERRORS
            ):  # its worker was lost before the fetch: dask recomputes the piece
                continue
            share = self._running.pop(future)
            if isinstance(found, cluster_jobs.PieceFailure):
                if not found.may_pass or self._tries[share] >= self._cluster.retries:
                    raise found.error
                self._tries[share] += 1
                self._submit(share)
            else:
                yield share, worker, found

    def _result(self, future: Future) -> tuple[str, bytes | cluster_jobs.PieceFailure]:
        share = self._running[future]
        if future.status in ("cancelled", "lost"):
            raise self._taken(f"piece {share} taken away")
        try:
            found: tuple[str, bytes | cluster_jobs.PieceFailure] = future.result(
                timeout=10 * TICK_S
            )
        except TIMEOUT_ERRORS:
            raise
        except Exception as error:  # dask: it killed several workers, or cannot be unpickled there
            raise BackendError(
                f"the workers must survive their pieces, got {type(error).__name__} of piece"
                f" {share}: {first_line(error)}; see the workers' logs, use more --pieces, or give"
                " the workers more memory"
            ) from error
        return found

    def _taken(self, what: str) -> BackendError:
        return BackendError(
            f"the scheduler {self._cluster.address} must keep what it was given, got: {what}; it"
            " was restarted, or lost: run again"
        )
