"""Cluster jobs: options of a dask scheduler, the job sent to workers, and the task they run.

A worker turns a piece of the images into the bytes of a shard::

    observe_piece --> same versions as the client? --> model, from its path or bytes
                  --> this piece of the images ------> observe, as on one machine --> bytes

An error of calib8 would recur on every worker. An error of the system (a network share that does
not answer, no memory) may not, so that the client retries.
"""

import logging
import os
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import onnx

from calibrators.statistics import Statistic
from deploy.calibration import fingerprint
from deploy.calibration.observation import (
    FOLDED,
    CalibrationSubject,
    Observation,
    ObservedStatistics,
    Variant,
)
from deploy.calibration.one_pass import observe
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import make_shard
from deploy.errors import (
    BackendError,
    Calib8Error,
    ConfigError,
    FeedError,
    ModelError,
    did_you_mean,
    first_line,
)
from deploy.feed.feed import FeedSource, open_feed
from deploy.feed.loaders import is_loader_spec
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Preprocess
from deploy.feed.samples import Feed
from deploy.feed.sampling import Choice, Limit, Share, to_choice
from deploy.feed.sources import RemoteSample, RemoteSource, Sample
from deploy.frontends import load
from deploy.tensors import TensorSpec

_ADDRESS = re.compile(r"((tcp|tls|ws|wss)://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):[0-9]{1,5}")
SENDS = ("nothing", "model", "images", "all")
RETRIES = 2
Paths = str | RawFiles | tuple[str, ...]
Versions = Mapping[str, str | int]
_LOG = logging.getLogger("distributed.worker")
_stopped: set[str] = set()  # keys of cancelled jobs
_opened = threading.local()  # last feed opened by this thread of the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A scheduler of dask.distributed and its options.

    Attributes:
        send: what is sent to the workers as bytes: "nothing" if they see the same paths as this
            machine, "model", "images" or "all". A model without an ONNX file is always sent.
        pieces: number of pieces to split the images into; None for several per worker thread.
        retries: how often a piece is retried after a system error.

    Raises:
        ConfigError: an invalid address, number or value of `send`.
    """

    address: str
    send: str = "nothing"
    pieces: int | None = None
    retries: int = RETRIES
    threads: int = 1

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address):
            raise ConfigError(
                "a scheduler's address is host:port, or tcp://host:port (tls, ws, wss), got"
                f" {self.address!r}; `dask scheduler` says its own when it starts"
            )
        if self.send not in SENDS:
            way_out = did_you_mean(self.send, SENDS, f"give one of {', '.join(SENDS)}")
            raise ConfigError(
                f"--send takes what the workers are sent, got {self.send!r}; {way_out}"
            )
        for name, value, least in (
            ("pieces", self.pieces, 1),
            ("retries", self.retries, 0),
            ("threads", self.threads, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be {least} or more, got {value}")

    @property
    def sends_images(self) -> bool:
        """Whether the images are sent."""
        return self.send in ("images", "all")


def as_cluster(scheduler: str | Cluster | None) -> Cluster | None:
    """Return a cluster from the address of a scheduler, or the cluster itself."""
    return Cluster(address=scheduler) if isinstance(scheduler, str) else scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSpec:
    """An observation in sendable form, with the key of its variant; `layer` is for errors."""

    variant: str
    tensor: str
    statistic: Statistic
    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A calibration, as sent to every task.

    Attributes:
        model: path of the model's file; "" if the model is sent.
        digest: digest of the model (`LoadedModel.digest`).
        held: variant -> bytes of its ONNX model, if it is sent.
        images: paths of all images; None if they are sent.
        how: the complete preprocessing; None for arrays.
    """

    key: str
    versions: Versions
    model: str
    digest: str
    held: Mapping[str, bytes]
    identities: Mapping[str, str]
    taps: tuple[ObservationSpec, ...]
    specs: tuple[TensorSpec, ...]
    images: Paths | None
    kind: str
    choice: Choice
    how: Preprocess | None
    skip_bad: bool
    threads: int


def make_job(
    cluster: Cluster,
    wanted: Iterable[Observation],
    feed: Feed,
    *,
    subject: CalibrationSubject,
    images: FeedSource,
    limit: Limit,
) -> ClusterJob:
    """Return the job that makes these observations on the images of a feed."""
    listed = tuple(wanted)
    if feed.is_sequential:
        raise ConfigError(
            "a video's frames are read one after the other by one machine, got one for"
            " --scheduler; give the frames as images, or leave it out"
        )
    model = "" if cluster.send in ("model", "all") else _path_of(subject, listed)
    form = feed.settings
    forms = {} if model else {o.variant.key: o.variant for o in listed}
    return ClusterJob(
        key=f"calib8-{uuid.uuid4().hex}",
        versions=collect_versions(str(form["kind"])),
        model=model,
        digest=subject.loaded.digest,
        held={
            key: bytes(one.make(ObservedStatistics()).SerializeToString(deterministic=True))
            for key, one in forms.items()
        },
        identities=subject.loaded.identities,
        taps=tuple(
            ObservationSpec(
                variant=o.variant.key, tensor=o.tensor, statistic=o.statistic, layer=o.layer
            )
            for o in listed
        ),
        specs=subject.loaded.inputs,
        images=None if cluster.sends_images else shared_paths(images),
        kind=str(form["kind"]),
        choice=replace(to_choice(limit), shard=None),
        how=feed.preprocess,
        skip_bad=bool(form["skip_bad"]),
        threads=cluster.threads,
    )


def collect_versions(kind: str) -> Versions:
    """Return the versions of all programs used to calibrate on "arrays" or any kind of images."""
    return {**fingerprint.program_versions(), **fingerprint.feed_versions(kind)}


def shared_paths(images: FeedSource) -> Paths:
    """Return the absolute paths of the images."""
    if isinstance(images, RawFiles):
        return replace(images, path=os.path.abspath(images.path))
    if isinstance(images, str | os.PathLike) and not is_loader_spec(os.fspath(images)):
        return os.path.abspath(images)
    if isinstance(images, list | tuple):
        paths = tuple(os.path.abspath(o) for o in images if isinstance(o, str | os.PathLike))
        if paths and len(paths) == len(images):
            return paths
    raise ConfigError(
        "workers open the images by their path, got some that only this machine has (a loader, a"
        " calibrator or arrays in memory); send them (--send images)"
    )


def _path_of(subject: CalibrationSubject, wanted: Sequence[Observation]) -> str:
    """Return the path of the model's file; "" if a worker would not get the same model from it."""
    source = subject.source
    as_read = not subject.repairs and {o.variant.key for o in wanted} == {FOLDED}
    if source is None or not as_read or source.suffix.lower() != ".onnx":
        return ""
    return os.path.abspath(source)


class JobCancelled(Exception):
    """The client cancelled the job."""


def return_job(job: ClusterJob) -> ClusterJob:
    """Return the job: as a separate task, so that workers pass it on among themselves."""
    return job


def stop_job(key: str) -> None:
    """Stop the running pieces of a job on this worker, each at its next sample."""
    _stopped.add(key)


@dataclass(frozen=True, slots=True)
class PieceFailure:
    """Why a piece gave no shard.

    Attributes:
        may_pass: whether it is a system error, so that a retry may succeed.
    """

    error: Calib8Error
    may_pass: bool


def observe_piece(
    job: ClusterJob, share: Share, samples: Sequence[RemoteSample] | None
) -> tuple[str, bytes | PieceFailure]:
    """Observe a share of the images; the task that runs on a worker.

    Returns:
        (name of the worker, bytes of a shard or the failure). Errors are returned, since dask waits
        forever for one whose traceback does not pickle.
    """
    worker = _name()
    try:
        return worker, _observed(job, share, samples)
    except Calib8Error as error:
        named = type(error)(f"the worker {worker}: {error}")
        return worker, PieceFailure(named, _may_pass(error))
    except Exception as error:
        _LOG.exception("calib8: piece %s", share)
        message = f"the worker {worker}: {type(error).__name__}: {first_line(error)}; see its log"
        return worker, PieceFailure(BackendError(message), may_pass=True)


def describe_version_differences(client: Versions, here: Versions) -> str:
    """Return which programs differ from the client's, and what to do; "" for none."""
    words = [f"{name} {here.get(name)} ({old} at the client)" for name, old in client.items()
             if here.get(name) != old]  # fmt: skip
    return f"has {', '.join(words)}; install the client's versions there" if words else ""


def _observed(job: ClusterJob, share: Share, samples: Sequence[RemoteSample] | None) -> bytes:
    if others := describe_version_differences(job.versions, collect_versions(job.kind)):
        raise BackendError(f"all machines must have the same versions, this one {others}")
    models = _models(job)
    variants = {key: Variant(key, partial(_given, model)) for key, model in models.items()}
    wanted = [Observation(variants[t.variant], t.tensor, t.statistic, t.layer) for t in job.taps]
    if samples is None:
        feed = _shared(job, share)
    else:  # the images came with the task
        feed = Feed(
            RemoteSource(samples, job.specs, job.how),
            range(len(samples)),
            kind=job.kind,
            batch=1,
            preprocess=job.how,
            skip_bad=job.skip_bad,
            notes=(),
            share=share,
        )
    peaks = Peaks()
    observed = ObservedStatistics({})
    try:
        with feed.samples() as stream:
            samples_left = _until_stopped(stream, job.key)
            observed = observe(wanted, samples_left, threads=job.threads, peaks=peaks)
    except FeedError:
        if feed.count:
            raise
        peaks = Peaks()  # all samples were skipped; the client fails if no piece has a good one
    return make_shard(feed, job.identities, peaks, observed)


def _given(model: onnx.ModelProto, known: ObservedStatistics) -> onnx.ModelProto:
    """Return the model of a variant, which needs no observations here."""
    return model


def _models(job: ClusterJob) -> Mapping[str, onnx.ModelProto]:
    """Return variant key -> model."""
    if job.model:
        return {FOLDED: _model_at(job.model, job.digest)}
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


def _shared(job: ClusterJob, share: Share) -> Feed:
    """Return a share whose images this worker reads."""
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
    here = known[1].get_share((share.number, share.of))
    if here != share:
        raise FeedError(
            f"all machines must see the same images, got {here.count} here and {share.count} at the"
            f" client, or other names; {way_out}"
        )
    return known[1].open_share(share)


def _until_stopped(samples: Iterator[Sample], key: str) -> Iterator[Sample]:
    for sample in samples:
        if key in _stopped:
            raise JobCancelled
        yield sample


def _may_pass(error: BaseException) -> bool:
    """Whether a system error that may pass caused `error`, not a missing or forbidden file."""
    cause: BaseException | None = error
    while cause is not None:
        permanent = isinstance(cause, FileNotFoundError | NotADirectoryError | PermissionError)
        if isinstance(cause, OSError | MemoryError) and not permanent:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _name() -> str:
    """Return the name of this worker if it has one, else its address."""
    from distributed import get_worker

    worker = get_worker()
    return worker.name if isinstance(worker.name, str) else str(worker.address)
