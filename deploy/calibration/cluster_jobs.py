"""Cluster jobs: options of a dask scheduler, the job sent to workers, and the task they run.

A worker turns a piece of the images into the bytes of a shard::

    observe_piece --> model, from its path or sent --.
                  --> this piece of the images ------+--> observe, as on one machine --> bytes

An error of calib8 would recur on every worker. An error of the system (a network share that does
not answer, no memory) may not, so that the client retries.
"""

import logging
import os
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import onnx

from deploy.calibration import fingerprint
from deploy.calibration.observation import (
    FOLDED,
    CalibrationSubject,
    Observation,
    ObservedStatistics,
    Variant,
    group_by_variant,
)
from deploy.calibration.one_pass import observe
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import make_shard, observe_unless_all_skipped
from deploy.errors import (
    BackendError,
    Calib8Error,
    ConfigError,
    FeedError,
    ModelError,
    did_you_mean,
    first_line,
)
from deploy.feed.feed import Dataset, FeedSource
from deploy.feed.loaders import is_loader_spec
from deploy.feed.paths import RawFiles
from deploy.feed.samples import Feed
from deploy.feed.sampling import Limit, Share, to_choice
from deploy.feed.sources import RemoteSample, RemoteSource, Sample
from deploy.frontends import load
from deploy.tensors import TensorSpec

_ADDRESS = re.compile(r"((tcp|tls|ws|wss)://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):[0-9]{1,5}")
SENDS = ("nothing", "model", "images", "all")
RETRIES = 2
Paths = str | RawFiles | tuple[str, ...]
Versions = Mapping[str, str | int]
_LOG = logging.getLogger("distributed.worker")
_cancelled_keys: set[str] = set()  # of jobs whose pieces stop on this worker
_last_feed = threading.local()  # `job_key` and `feed` of the last job of this worker's thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A scheduler of dask.distributed and its options.

    Attributes:
        address: host:port of the scheduler, or tcp://host:port.
        send: what is sent to the workers as bytes: "nothing" if they see the same paths as this
            machine, "model", "images" or "all". A model without an ONNX file is always sent.
        pieces: number of pieces to split the images into; None for several per worker thread.
        retries: how often a piece is retried after a system error.
        threads: threads of a worker's pass over a piece.

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
            remedy = did_you_mean(self.send, SENDS, f"give one of {', '.join(SENDS)}")
            raise ConfigError(
                f"--send takes what the workers are sent, got {self.send!r}; {remedy}"
            )
        for name, value, minimum in (
            ("pieces", self.pieces, 1),
            ("retries", self.retries, 0),
            ("threads", self.threads, 1),
        ):
            if value is not None and value < minimum:
                raise ConfigError(f"{name} must be {minimum} or more, got {value}")

    @property
    def sends_images(self) -> bool:
        """Whether the images are sent."""
        return self.send in ("images", "all")


def as_cluster(scheduler: str | Cluster | None) -> Cluster | None:
    """Return a cluster from the address of a scheduler, or the cluster itself."""
    if isinstance(scheduler, str):
        return Cluster(address=scheduler)
    return scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A calibration, as sent to every task.

    Attributes:
        key: name of the job, unique.
        versions: versions at the client, see `collect_versions`.
        identities: identities of the model.
        observations: what to observe; their variants have the model's path, or the model itself.
        inputs: inputs of the model.
        dataset: all images, by their paths, with their complete preprocessing; if the images are
            sent, its source is empty.
        kind: kind of the feed.
        threads: threads of a pass.
    """

    key: str
    versions: Versions
    identities: Mapping[str, str]
    observations: tuple[Observation, ...]
    inputs: tuple[TensorSpec, ...]
    dataset: Dataset
    kind: str
    threads: int


def make_job(
    cluster: Cluster,
    observations: Sequence[Observation],
    feed: Feed,
    *,
    subject: CalibrationSubject,
    images: FeedSource,
    limit: Limit,
) -> ClusterJob:
    """Return the job to send to dask workers: which observations to make on which images.

    Args:
        cluster: the scheduler and its options.
        observations: what to observe; the caller has refused those that depend on the order of the
            images (`refuse_ordered`).
        feed: the images, opened on this machine.
        subject: the model to calibrate.
        images: where the images are, for the workers: a path, a list of paths, or raw files.
        limit: which of the images are used.

    Raises:
        ConfigError: the images must be read in order, or workers cannot open them by a path.
    """
    if feed.is_sequential:
        raise ConfigError(
            "a video's frames and a model's states are read one after the other by one machine, got"
            " some for --scheduler; give frames as images, or leave it out"
        )
    sendable_observations = _make_sendable(cluster, observations, subject)
    # a worker opens all images, without a shard, and then the share of its task (`_open_share`)
    dataset = Dataset(
        source=() if cluster.sends_images else shared_paths(images),
        preprocess=feed.preprocess,
        skip_bad=bool(feed.settings["skip_bad"]),
        limit=replace(to_choice(limit), shard=None),
        max_pixels=feed.max_pixels,
    )
    return ClusterJob(
        key=f"calib8-{uuid.uuid4().hex}",
        versions=collect_versions(feed.kind),
        identities=subject.loaded.identities,
        observations=sendable_observations,
        inputs=subject.loaded.inputs,
        dataset=dataset,
        kind=feed.kind,
        threads=cluster.threads,
    )


def _make_sendable(
    cluster: Cluster, observations: Sequence[Observation], subject: CalibrationSubject
) -> tuple[Observation, ...]:
    """Return the observations with variants, forms of the model, that can be sent to a worker.

    `variant.make`, which makes the form, may be a function that cannot be sent. It is replaced by
    one that opens the model's file on the worker, or by one that holds the form itself.
    """
    # the file of the model, if the workers can open it and get the same model. Else "": the forms
    # of the model are sent, as the user may demand by `send` ("all" is model and images)
    model_path = ""
    if cluster.send not in ("model", "all"):
        model_path = _shared_model_path(subject, observations)
    sendable_observations: list[Observation] = []
    for variant, variant_observations in group_by_variant(observations).items():
        if model_path:
            make_model = partial(_open_model, model_path, subject.loaded.digest)
        else:
            # no statistics are needed to make it: those that a variant is built from depend on the
            # order of the images, and the caller has refused such observations
            model = variant.make(ObservedStatistics())
            make_model = partial(_return_model, model)
        sendable_variant = Variant(variant.key, make_model)
        for observation in variant_observations:
            sendable_observations.append(replace(observation, variant=sendable_variant))
    return tuple(sendable_observations)


def collect_versions(kind: str) -> Versions:
    """Return the versions of all programs used to calibrate on "arrays" or any kind of images."""
    return {**fingerprint.program_versions(), **fingerprint.feed_versions(kind)}


def refuse_other_versions(
    machine: str, versions: Versions | Exception, client_versions: Versions
) -> None:
    """Refuse a machine of the cluster whose programs have other versions than the client's.

    Args:
        machine: name of the machine, for the message.
        versions: program -> its version there, or the error if the machine could not tell them.
        client_versions: program -> its version at the client.

    Raises:
        BackendError: a version differs (names each that does), or calib8 is missing there.
    """
    if isinstance(versions, Exception):
        raise BackendError(
            f"{machine} must have calib8 {client_versions['calib8']}, got: {first_line(versions)};"
            " pip install it there"
        )
    differences = []
    for program in {**versions, **client_versions}:  # a program may be missing in one of the two
        version = versions.get(program)
        client_version = client_versions.get(program)
        if version != client_version:
            differences.append(f"{program} {version} ({client_version} at the client)")
    if differences:
        raise BackendError(
            f"all machines must have the same versions, {machine} has {', '.join(differences)};"
            " install the client's versions there"
        )


def shared_paths(images: FeedSource) -> Paths:
    """Return the absolute paths of the images."""
    if isinstance(images, RawFiles):
        return replace(images, path=os.path.abspath(images.path))
    if isinstance(images, str | os.PathLike) and not is_loader_spec(images):
        return os.path.abspath(images)
    if isinstance(images, list | tuple):
        paths = tuple(os.path.abspath(p) for p in images if isinstance(p, str | os.PathLike))
        if paths and len(paths) == len(images):
            return paths
    raise ConfigError(
        "workers open the images by their path, got some that only this machine has (a loader, a"
        " calibrator or arrays in memory); send them (--send images)"
    )


def _shared_model_path(subject: CalibrationSubject, observations: Sequence[Observation]) -> str:
    """Return the path of the model's file; "" if a worker would not get the same model from it."""
    source = subject.loaded.source
    variants = {observation.variant.key for observation in observations}
    if source is None or variants != {FOLDED} or source.suffix.lower() != ".onnx":
        return ""
    return os.path.abspath(source)


class JobCancelled(Exception):
    """The client cancelled the job."""


def return_job(job: ClusterJob) -> ClusterJob:
    """Return the job: as a separate task, so that workers pass it on among themselves."""
    return job


def stop_job(key: str) -> None:
    """Stop the running pieces of a job on this worker, each at its next sample."""
    _cancelled_keys.add(key)


@dataclass(frozen=True, slots=True)
class PieceFailure:
    """Why a piece gave no shard.

    Attributes:
        error: the error, which names the worker.
        is_temporary: whether it is a system error, so that a retry may succeed.
    """

    error: Calib8Error
    is_temporary: bool


def observe_piece(
    job: ClusterJob, share: Share, samples: Sequence[RemoteSample] | None
) -> tuple[str, bytes | PieceFailure]:
    """Observe a piece, which is a share of the images; the task that runs on a worker.

    Errors are returned and not raised: dask waits forever for one whose traceback does not pickle.

    Args:
        job: the calibration.
        share: which of the images.
        samples: the images, if the client sent them; None to read them from their path.

    Returns:
        (name of the worker, result): bytes of a shard file with the statistics, or the failure.
    """
    worker = _worker_name()
    try:
        return worker, _observe_share(job, share, samples)
    except Calib8Error as error:
        named_error = type(error)(f"the worker {worker}: {error}")
        return worker, PieceFailure(named_error, _is_temporary(error))
    except Exception as error:
        _LOG.exception("calib8: piece %s", share)
        message = f"the worker {worker}: {type(error).__name__}: {first_line(error)}; see its log"
        return worker, PieceFailure(BackendError(message), is_temporary=True)


def _observe_share(job: ClusterJob, share: Share, samples: Sequence[RemoteSample] | None) -> bytes:
    """Observe a share of the images on this worker; return the bytes of its shard.

    Args:
        job: the calibration.
        share: which of the images.
        samples: the images, if the client sent them; None to read them from their path.

    Raises:
        Calib8Error: other versions, another model or other images than the client's.
    """
    # the client checks only the workers that are there when it begins
    refuse_other_versions("a worker that came late", collect_versions(job.kind), job.versions)
    feed = _open_share(job, share) if samples is None else _open_sent_images(job, share, samples)
    peaks = Peaks()

    def observe_samples() -> ObservedStatistics:
        with feed.samples() as stream:
            remaining_samples = _until_cancelled(stream, job.key)
            return observe(job.observations, remaining_samples, threads=job.threads, peaks=peaks)

    observed = observe_unless_all_skipped(feed, observe_samples)
    return make_shard(feed, job.identities, peaks, observed)


def _open_sent_images(job: ClusterJob, share: Share, samples: Sequence[RemoteSample]) -> Feed:
    """Return the feed of a share whose images the client sent."""
    dataset = job.dataset
    preprocess = dataset.preprocess
    assert not isinstance(preprocess, str | Mapping)  # `make_job` takes the feed's, never a name
    return Feed(
        RemoteSource(samples, job.inputs, preprocess, dataset.max_pixels),
        range(len(samples)),
        kind=job.kind,
        preprocess=preprocess,
        skip_bad=dataset.skip_bad,
        share=share,
    )


def _return_model(model: onnx.ModelProto, _: ObservedStatistics) -> onnx.ModelProto:
    return model


def _open_model(path: str, digest: str, _: ObservedStatistics) -> onnx.ModelProto:
    return _load_model(path, digest)


@lru_cache(maxsize=1)
def _load_model(path: str, digest: str) -> onnx.ModelProto:
    remedy = "give a path that all machines share, or send it (--send model)"
    try:
        loaded = load(path)
    except ModelError as error:
        raise ModelError(f"{error}; {remedy}") from error
    if loaded.digest != digest:
        raise ModelError(f"{path} must be the client's model, got another one; {remedy}")
    return loaded.model


def _open_share(job: ClusterJob, share: Share) -> Feed:
    """Return the feed of a share whose images this worker reads from their path.

    Each thread of a worker keeps the feed of its last job in `_last_feed`, so that a folder is
    listed once and not for each share.

    Raises:
        FeedError: the images cannot be opened here, or are not those of the client.
    """
    remedy = "give a path that all machines share, or send them (--send images)"
    if getattr(_last_feed, "job_key", None) != job.key:  # a new job, or the first of the thread
        try:
            feed = job.dataset.open(job.inputs)
        except FeedError as error:
            raise FeedError(f"{error}; {remedy}") from error
        _last_feed.job_key = job.key
        _last_feed.feed = feed
    complete_feed: Feed = _last_feed.feed
    # a share has the number of all images and the digest of their names: they must be equal here
    share_here = complete_feed.get_share((share.number, share.of))
    if share_here != share:
        raise FeedError(
            f"all machines must see the same images, got {share_here.count} here and {share.count}"
            f" at the client, or other names; {remedy}"
        )
    return complete_feed.open_share(share)


def _until_cancelled(samples: Iterator[Sample], key: str) -> Iterator[Sample]:
    for sample in samples:
        if key in _cancelled_keys:
            raise JobCancelled
        yield sample


def _is_temporary(error: BaseException) -> bool:
    """Whether a system error that may pass caused `error`, not a missing or forbidden file."""
    cause: BaseException | None = error
    while cause is not None:
        is_permanent = isinstance(cause, FileNotFoundError | NotADirectoryError | PermissionError)
        if isinstance(cause, OSError | MemoryError) and not is_permanent:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _worker_name() -> str:
    """Return the name of this worker if it has one, else its address."""
    from distributed import get_worker

    worker = get_worker()
    return worker.name if isinstance(worker.name, str) else str(worker.address)
