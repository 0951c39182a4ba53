"""What runs on a worker: a piece of the images to the bytes of a shard.

::

    observe_piece --> the versions of the client? --> model, from the path or the bytes
                  --> this piece of the images -----> observe, as one machine does --> bytes

An error of calib8 would come again on every other worker; one of the system (a share that does not
answer, no memory) may not, so that the client tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from deploy.calibration.observation import Observation, Observed, Variant
from deploy.calibration.observe import observe
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import shard_of
from deploy.calibration.subject import FOLDED
from deploy.cluster.job import Job, Versions, versions_here
from deploy.errors import BackendError, Calib8Error, FeedError, ModelError, first_line
from deploy.feed.feed import open_feed
from deploy.feed.posted import Posted, PostedSource
from deploy.feed.samples import Feed
from deploy.feed.share import Share
from deploy.feed.source import Sample
from deploy.frontends import load

if TYPE_CHECKING:
    import onnx

_LOG = logging.getLogger("distributed.worker")
_stopped: set[str] = set()  # keys of jobs whose pieces are to end
_opened = threading.local()  # the feed that this thread of the worker opened last


class Stopped(Exception):
    """The client wants no more of this job."""


def hold(job: Job) -> Job:
    """The job itself: a task of its own, so that the workers pass it on among themselves."""
    return job


def stop(key: str) -> None:
    """End the pieces of a job that run here, each at its next sample."""
    _stopped.add(key)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no shard.

    Attributes:
        error: with the worker named.
        may_pass: whether the system is behind it, so that another try may succeed.
    """

    error: Calib8Error
    may_pass: bool


def observe_piece(
    job: Job, share: Share, samples: Sequence[Posted] | None
) -> tuple[str, bytes | Failure]:
    """Observe a share of the images.

    Args:
        job: the calibration.
        share: of its images.
        samples: these, where they are sent.

    Returns:
        Name of the worker; and the bytes of a shard, or why there are none. An error is a value,
        since dask waits for ever for one whose traceback does not pickle.
    """
    worker = _name()
    try:
        return worker, _observed(job, share, samples)
    except Calib8Error as error:
        named = type(error)(f"the worker {worker}: {error}")
        return worker, Failure(named, _may_pass(error))
    except Exception as error:
        _LOG.exception("calib8: piece %s", share)
        said = f"the worker {worker}: {type(error).__name__}: {first_line(error)}; see its log"
        return worker, Failure(BackendError(said), may_pass=True)


def differing(client: Versions, here: Versions) -> str:
    """Which programs are others than the client's, and where to go from there; "" for none."""
    words = [f"{name} {here.get(name)} ({old} at the client)" for name, old in client.items()
             if here.get(name) != old]  # fmt: skip
    return f"has {', '.join(words)}; install the client's versions there" if words else ""


def _observed(job: Job, share: Share, samples: Sequence[Posted] | None) -> bytes:
    if others := differing(job.versions, versions_here(job.kind)):
        raise BackendError(f"all machines must have the same versions, this one {others}")
    models = _models(job)
    variants = {key: Variant(key, partial(_given, model)) for key, model in models.items()}
    wanted = [Observation(variants[t.variant], t.tensor, t.statistic, t.whose) for t in job.taps]
    feed = _shared(job, share) if samples is None else _sent(job, share, samples)
    peaks = Peaks()
    found = Observed({})
    try:
        with feed.samples() as stream:
            given = _until_stopped(stream, job.key)
            found = observe(wanted, given, threads=job.threads, peaks=peaks)
    except FeedError:
        if feed.count:
            raise
        peaks = Peaks()  # all of these were skipped, which is for the whole to judge
    return shard_of(feed, job.identities, peaks, found)


def _given(model: onnx.ModelProto, known: Observed) -> onnx.ModelProto:
    """A variant that the client made, or that is the model itself."""
    return model


def _models(job: Job) -> Mapping[str, onnx.ModelProto]:
    """Variant -> model."""
    if job.model:
        return {FOLDED: _model_at(job.model, job.digest)}
    import onnx

    return {key: onnx.load_model_from_string(data) for key, data in job.held.items()}


@lru_cache(maxsize=1)
def _model_at(path: str, digest: str) -> onnx.ModelProto:
    way_out = "give a path that all machines share, or send it (--send model)"
    try:
        loaded = load(path)
    except ModelError as error:
        raise ModelError(f"{error}; {way_out}") from error
    if loaded.digest != digest:
        raise ModelError(f"{path} must be the client's model, got another one; {way_out}")
    return loaded.model


def _shared(job: Job, share: Share) -> Feed:
    """The share, of images that are read here."""
    way_out = "give a path that all machines share, or send them (--send images)"
    known: tuple[str, Feed] | None = getattr(_opened, "known", None)
    if known is None or known[0] != job.key:
        assert job.images is not None
        images = list(job.images) if isinstance(job.images, tuple) else job.images
        try:
            feed = open_feed(
                images, job.specs, preprocess=job.how, skip_bad=job.skip_bad, limit=job.choice
            )
        except FeedError as error:
            raise FeedError(f"{error}; {way_out}") from error
        known = _opened.known = job.key, feed
    here = known[1].share_of((share.number, share.of))
    if here != share:
        raise FeedError(
            f"all machines must see the same images, got {here.count} here and {share.count} at the"
            f" client, or other names; {way_out}"
        )
    return known[1].part(share)


def _sent(job: Job, share: Share, samples: Sequence[Posted]) -> Feed:
    """The share, of images that came with the task."""
    return Feed(
        PostedSource(samples, job.specs, job.how),
        range(len(samples)),
        kind=job.kind,
        batch=1,
        preprocess=job.how,
        skip_bad=job.skip_bad,
        notes=(),
        share=share,
    )


def _until_stopped(samples: Iterator[Sample], key: str) -> Iterator[Sample]:
    for sample in samples:
        if key in _stopped:
            raise Stopped
        yield sample


def _may_pass(error: BaseException) -> bool:
    """Whether the system is behind an error, and not what is missing for good."""
    seen: BaseException | None = error
    while seen is not None:
        lasting = isinstance(seen, FileNotFoundError | NotADirectoryError | PermissionError)
        if isinstance(seen, OSError | MemoryError) and not lasting:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _name() -> str:
    """How the worker is called: by its own name, where it was given one, else by its address."""
    from distributed import get_worker

    worker = get_worker()
    return worker.name if isinstance(worker.name, str) else str(worker.address)
