"""What a worker must know to observe a piece of a calibration: the model, the taps, the images."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from calibrators.statistics import Statistic
from deploy.calibration import versions as versions_module
from deploy.calibration.observation import Observation, Observed
from deploy.calibration.subject import FOLDED, Subject
from deploy.cluster.options import Cluster
from deploy.errors import ConfigError
from deploy.feed.choice import Choice, Limit, choice_of
from deploy.feed.loaders import names_loader
from deploy.feed.opening import FeedSource
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Preprocess
from deploy.feed.samples import Feed
from deploy.tensors import TensorSpec

Paths = str | RawFiles | tuple[str, ...]
Versions = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """An observation as it is sent: its variant by the key; `whose` is for an error."""

    variant: str
    tensor: str
    statistic: Statistic
    whose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A calibration, as every task of it gets it.

    Attributes:
        key: of this run, as no other has it.
        versions: of the programs of this machine, which the worker's must be.
        model: path of the model's file; "" where it is sent.
        digest: of the model (`LoadedModel.digest`).
        held: variant -> the bytes of its ONNX model, where it is sent.
        identities: of the model, as `LoadedModel.identities`.
        taps: what is observed.
        specs: the model's inputs.
        images: paths of all of them; None where they are sent.
        kind: of the feed.
        choice: which of them are used.
        how: the complete preprocessing; None for arrays.
        skip_bad: whether to go on without unreadable ones.
        threads: of a piece.
    """

    key: str
    versions: Versions
    model: str
    digest: str
    held: Mapping[str, bytes]
    identities: Mapping[str, str]
    taps: tuple[Tapped, ...]
    specs: tuple[TensorSpec, ...]
    images: Paths | None
    kind: str
    choice: Choice
    how: Preprocess | None
    skip_bad: bool
    threads: int


def job_of(
    cluster: Cluster,
    wanted: Iterable[Observation],
    feed: Feed,
    *,
    subject: Subject,
    images: FeedSource,
    limit: Limit,
) -> Job:
    """The job of observing these on the images of this feed.

    Raises:
        ConfigError: images that no path leads to and that are not to be sent; a video.
    """
    listed = tuple(wanted)
    if feed.by_turns:
        raise ConfigError(
            "a video's frames are read one after the other by one machine, got one for"
            " --scheduler; give the frames as images, or leave it away"
        )
    model = "" if cluster.sends_model else _path_of(subject, listed)
    form = feed.form
    return Job(
        key=f"calib8-{uuid.uuid4().hex}",
        versions=versions_here(str(form["kind"])),
        model=model,
        digest=subject.loaded.digest,
        held={} if model else _held(listed),
        identities=subject.loaded.identities,
        taps=tuple(
            Tapped(variant=o.variant.key, tensor=o.tensor, statistic=o.statistic, whose=o.whose)
            for o in listed
        ),
        specs=subject.loaded.inputs,
        images=None if cluster.sends_images else shared(images),
        kind=str(form["kind"]),
        choice=replace(choice_of(limit), shard=None),
        how=feed.preprocess,
        skip_bad=bool(form["skip_bad"]),
        threads=cluster.threads,
    )


def versions_here(kind: str) -> Versions:
    """Of all programs that take part in a calibration on "arrays", or on pictures of any kind."""
    return {**versions_module.programs(), **versions_module.of_feed(kind)}


def shared(images: FeedSource) -> Paths:
    """The images by the same paths from any folder.

    Raises:
        ConfigError: no path leads to them.
    """
    if isinstance(images, RawFiles):
        return replace(images, path=os.path.abspath(images.path))
    if isinstance(images, str | os.PathLike) and not names_loader(os.fspath(images)):
        return os.path.abspath(images)
    if isinstance(images, list | tuple) and (paths := _paths(images)):
        return paths
    raise ConfigError(
        "workers open the images by their path, got some that only this machine has (a loader, a"
        " calibrator or arrays in memory); send them (--send images)"
    )


def _paths(images: Sequence[object]) -> tuple[str, ...]:
    """Absolute paths; none where not all of the list are paths."""
    named = tuple(os.path.abspath(one) for one in images if isinstance(one, str | os.PathLike))
    return named if len(named) == len(images) else ()


def _path_of(subject: Subject, wanted: Sequence[Observation]) -> str:
    """Path of the model's file; "" where what is run is not what a worker makes of it."""
    source = subject.source
    as_read = not subject.repairs and {o.variant.key for o in wanted} == {FOLDED}
    if source is None or not as_read or source.suffix.lower() != ".onnx":
        return ""
    return os.path.abspath(source)


def _held(wanted: Sequence[Observation]) -> dict[str, bytes]:
    """Every variant's model."""
    variants = {o.variant.key: o.variant for o in wanted}
    return {
        key: one.make(Observed({})).SerializeToString(deterministic=True)
        for key, one in variants.items()
    }
