"""Calibration shards: observe slices of the images on several machines and merge the results.

::

    calibrate --shard 1/3 --> a.shard --.
    calibrate --shard 2/3 --> b.shard --+--> merge --> model.cache, byte for byte as one run
    calibrate --shard 3/3 --> c.shard --'              over all images would have written it

Histograms merge exactly, so the split does not matter. Order-dependent statistics cannot be merged
and are refused before anything is run.

A shard file holds the statistics of its samples, and which slice of which feed they are::

    photos.2-of-3.shard         one archive, written at once
        shard.json              fingerprint, digests and peaks of its samples, sha256
        statistics.npz          every observation, as in a cache

A checkpoint (`deploy.calibration.checkpoint`) is the file of an incomplete shard or run, with the
number of samples counted.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from calibrators.histogram import Histogram
from calibrators.statistics import Recorder
from deploy.calibration.calibration_result import CalibrationResult
from deploy.calibration.fingerprint import (
    CALIB8,
    EPOCH,
    Fingerprint,
    feed_versions,
    open_archive,
    pack_arrays,
)
from deploy.calibration.observation import (
    Key,
    Observation,
    ObservedStatistics,
    order_dependent_keys,
)
from deploy.calibration.sample_checks import PeakRow, Peaks
from deploy.calibration.store import BROKEN, StoredStatistics
from deploy.errors import CacheError, ConfigError, FeedError, counted
from deploy.feed.file_list import RawSample
from deploy.feed.samples import Feed
from deploy.feed.sampling import Share
from deploy.files import atomic
from deploy.files.manifest import sha256
from deploy.files.reading import from_json, read_bytes
from deploy.frontends import LoadedModel

SCHEMA = "calib8-shard/1"
_KIND = "a shard of a calibration, as calib8 calibrate --shard writes it"
_DOCUMENT, _STATISTICS = "shard.json", "statistics.npz"
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_T = TypeVar("_T")
_MAX_LISTED = 9  # missing shards that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(StoredStatistics):
    """A shard as stored in its file.

    Attributes:
        share: which slice of the feed it is.
        made_from: its fingerprint; the images are those of the entire feed, without digests.
        digests: sha256 (hex) of its images, or rows of arrays, in order, skipped ones included; for
            a checkpoint, of those counted so far.
        skipped: position in the feed -> why the sample was skipped.
        peaks: of every tensor, the samples with the largest |x|.
        counted: number of samples in a checkpoint; None for a complete shard.
    """

    share: Share
    made_from: Fingerprint
    digests: tuple[str, ...]
    skipped: Mapping[int, str]
    peaks: list[PeakRow]
    counted: int | None

    @property
    def peak_positions(self) -> set[int]:
        """Positions in the feed of the samples with peaks."""
        positions = set()
        for *_, largest in self.peaks:
            positions |= {position for _, position in largest}
        return positions


def serialize_shard(
    *,
    share: Share,
    made_from: Fingerprint,
    digests: Iterable[str],
    skipped: Mapping[int, str],
    peaks: list[PeakRow],
    observed: ObservedStatistics,
    counted: int | None = None,
) -> bytes:
    """Return the bytes of the file of a shard or a checkpoint.

    Args:
        share: which slice of the images it is.
        made_from: fingerprint of the calibration.
        digests: sha256 (hex) of its images, or rows of arrays, in order, skipped ones included.
        skipped: position in the feed -> why the sample was skipped.
        peaks: of every tensor, the samples with the largest |x|.
        observed: its statistics.
        counted: number of samples in a checkpoint; None for a complete shard.
    """
    packed = pack_arrays([recorder.to_arrays() for recorder in observed.values()])
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "share": asdict(share),
        "made_from": made_from.to_json(),
        "digests": list(digests),
        "skipped": {str(position): reason for position, reason in skipped.items()},
        "peaks": peaks,
        "observations": list(observed),
        "statistics": sha256(packed),
    }
    if counted is not None:
        document["counted"] = counted
    document["sha256"] = _digest(document)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_DOCUMENT, EPOCH), text.encode())
        archive.writestr(zipfile.ZipInfo(_STATISTICS, EPOCH), packed)
    return buffer.getvalue()


def load_shard(path: Path, *, what: str = _KIND) -> Shard:
    """Read a shard; `what` names the kind of file in errors.

    Raises:
        CacheError: the file is not a shard, is broken, or was changed after it was written.
    """
    is_checkpoint = what != _KIND  # it is written again
    data = read_bytes(path, what=what, error=CacheError, rewritable=is_checkpoint)
    return parse_shard(data, path, what=what)


def parse_shard(data: bytes, path: Path, *, what: str = _KIND) -> Shard:
    """Parse the bytes of a shard file: the statistics of a part of the samples, and their origin.

    The file is an archive of two: a JSON document, and the statistics, which are unpacked later.

    Args:
        data: the bytes.
        path: names the file in errors; it is not read.
        what: names the kind of file in errors.

    Raises:
        CacheError: the bytes are not a shard, are broken, or were changed.
    """
    rule = f"{path} must be {what}"
    try:
        with open_archive(data, path) as archive:
            text = archive.read(_DOCUMENT)
            packed = archive.read(_STATISTICS)
    except BROKEN as error:
        raise CacheError(f"{rule}, got no such archive: {error}") from error
    document = from_json(text, rule=rule, error=CacheError)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise CacheError(f"{rule}, got another form; make it again with this version of calib8")
    if document.get("sha256") != _digest(document) or document.get("statistics") != sha256(packed):
        raise CacheError(f"{path} was changed after it was written; make it again")
    try:
        return _convert_shard(document, path, packed)
    except BROKEN as error:
        raise CacheError(f"{rule}, got parts that do not fit: {error}") from error


def _convert_shard(document: dict[str, Any], path: Path, packed: bytes) -> Shard:
    """Return the shard of a JSON document.

    Args:
        document: the document, whose digests were checked.
        path: names the file in later errors.
        packed: bytes of its statistics, which are unpacked later.

    Raises:
        ValueError, KeyError: its parts are missing, of other types, or contradict each other.
    """
    shard = Shard(
        share=msgspec.convert(document["share"], Share),
        made_from=Fingerprint.from_json(document["made_from"]),
        digests=msgspec.convert(document["digests"], tuple[_Sha256, ...]),
        skipped=msgspec.convert(document["skipped"], dict[int, str], str_keys=True),
        peaks=msgspec.convert(document["peaks"], list[PeakRow]),
        keys=msgspec.convert(document["observations"], tuple[Key, ...]),
        archive=path,
        counted=msgspec.convert(document.get("counted"), int | None),
        packed=packed,
    )
    # the fields that `shard_fingerprint` writes
    if not {"kind", "batch", "skip_bad", "count", "names"} <= set(shard.made_from.images):
        raise ValueError("it does not tell what images it is of")
    _check_positions(shard)
    return shard


def _check_positions(shard: Shard) -> None:
    """Raise ValueError if the positions and numbers of samples contradict each other.

    A checkpoint, the file of an interrupted run, has the number of its samples in `counted`, and
    may lack the last images. A complete shard has None there.
    """
    share = shard.share
    if not 1 <= share.number <= share.of <= share.count:  # `create_share` makes no other
        raise ValueError(f"the number {share} of {share.count} samples")
    positions = share.positions
    read_count = len(shard.digests)  # each image that was read has a digest
    is_incomplete = read_count < len(positions)
    if read_count > len(positions) or (is_incomplete and shard.counted is None):
        raise ValueError(f"{counted(read_count, 'digest')} of {counted(len(positions), 'sample')}")

    read_positions = set(positions[:read_count])
    skipped_positions = set(shard.skipped)
    good_positions = read_positions - skipped_positions
    # each sample that was counted is a good one; the last one may be filled up with earlier images
    has_valid_count = shard.counted is None or 0 < shard.counted <= len(good_positions)
    if not skipped_positions <= read_positions or not has_valid_count:
        raise ValueError(f"{shard.counted} samples of {len(good_positions)} good ones")
    if not shard.peak_positions <= good_positions:
        raise ValueError("peaks of samples that are not its own")


def _digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 of the JSON without this digest."""
    content = {name: value for name, value in document.items() if name != "sha256"}
    return sha256(json.dumps(content, sort_keys=True).encode())


def refuse_ordered(observations: Iterable[Observation], what: str) -> None:
    """Refuse order-dependent statistics, which cannot be merged from shards."""
    ordered = order_dependent_keys(observations)
    if ordered:
        raise ConfigError(
            f"{what} needs statistics that do not depend on the order of the images,"
            f" and {', '.join(ordered)} depends on it; calibrate these in one run, or take a"
            " target and a method without it"
        )


def write_shard(calibration: CalibrationResult, path: Path) -> None:
    """Write the result of a run over a shard."""
    observed = calibration.ranges.observed
    identities = calibration.loaded.identities
    atomic.write_bytes(path, make_shard(calibration.feed, identities, calibration.peaks, observed))
    if calibration.checkpoint is not None:
        calibration.checkpoint.unlink(missing_ok=True)


def make_shard(
    feed: Feed, identities: Mapping[str, str], peaks: Peaks, observed: ObservedStatistics
) -> bytes:
    """Return the bytes of the shard file: what a pass over a share of the samples observed.

    Args:
        feed: the samples of a share.
        identities: kind of digest, such as "graph" -> digest of the model (`Fingerprint.model`).
        peaks: the samples with the largest |x| of each tensor.
        observed: the statistics.
    """
    assert feed.share is not None
    return serialize_shard(
        share=feed.share,
        made_from=shard_fingerprint(identities, feed.settings, feed.share),
        digests=feed.entry_digests,
        skipped=feed.skipped_by_position,
        peaks=peaks.rows(feed.positions),
        observed=observed,
    )


def shard_fingerprint(
    identities: Mapping[str, str], settings: Mapping[str, Any], share: Share
) -> Fingerprint:
    """Return the fingerprint of a shard of a feed with these `Feed.settings`."""
    images = {name: settings[name] for name in ("kind", "batch", "skip_bad")}
    images |= {"count": share.count, "names": share.names}
    return _common_fingerprint(identities, images, settings["preprocess"] or {})


def observe_unless_all_skipped(
    feed: Feed, observe: Callable[[], ObservedStatistics]
) -> ObservedStatistics:
    """Return what `observe` returns; no statistics for a shard whose samples were all skipped.

    Other shards may have good samples, so that only a merge of all finds that there are none.
    """
    try:
        return observe()
    except FeedError:
        if feed.share is None or feed.count:
            raise
        return ObservedStatistics()


def merge_histograms(total: dict[_T, Recorder], part: Mapping[_T, Recorder]) -> None:
    """Merge the histograms of a part of the samples, such as a shard, into those of others.

    A histogram whose key is not in `total` is added as it is. The callers let no other statistic
    pass (`refuse_ordered`, or because it is recorded by one thread).
    """
    for key, recorder in part.items():
        merged = total.setdefault(key, recorder)
        assert isinstance(merged, Histogram) and isinstance(recorder, Histogram), key
        if merged is not recorder:
            merged.merge(recorder)


class ShardSet:
    """All shards of one calibration, to be merged without running the model.

    Attributes:
        feed: the entire feed; its samples cannot be read here.
    """

    def __init__(self, paths: Sequence[Path], loaded: LoadedModel) -> None:
        """Read the shards."""
        shards = [load_shard(path) for path in paths]
        if not shards:
            raise CacheError("shards are to be merged, got none; name their files")
        for shard in shards:
            if shard.counted is not None:
                raise CacheError(
                    f"a shard that is merged must be whole, got {shard.archive}, the checkpoint of"
                    " a run that did not end; go on with that run by --resume"
                )
        _refuse_foreign(shards, loaded)
        self._shards = _sort_by_number(shards)
        self.feed = _merge_feeds(self._shards)

    def __str__(self) -> str:
        """Return their number as text."""
        return counted(len(self._shards), "shard")

    def observed(self, observations: Iterable[Observation], peaks: Peaks) -> ObservedStatistics:
        """Return the merged statistics, as one run over all samples would give them.

        Args:
            observations: what the targets need; each shard must have them.
            peaks: receives the largest |x| of every tensor.

        Raises:
            CacheError: a shard lacks an observation.
        """
        self.feed.refuse_all_bad()
        observations = tuple(observations)
        for shard in self._shards:
            missing = [
                observation for observation in observations if observation.key not in shard.keys
            ]
            if missing and shard.keys:  # a shard whose samples were all skipped has none
                raise CacheError(
                    f"{shard.archive} lacks {counted(len(missing), 'observation')} that these"
                    f" targets need, such as {missing[0].statistic.key} of {missing[0].tensor!r};"
                    " merge for the targets and options that the shards were made for"
                )
        positions = self.feed.positions  # of its samples in the list of images, bad ones left out
        merged: dict[Key, Recorder] = {}
        for shard in self._shards:
            peaks.add_rows(shard.peaks, positions)
            merge_histograms(merged, shard.observed(observations))
        return ObservedStatistics(merged)


def _common_fingerprint(
    identities: Mapping[str, str], images: Mapping[str, Any], preprocess: Mapping[str, Any]
) -> Fingerprint:
    """Return the fingerprint that all shards of one calibration share.

    Other fields are empty: those that differ between shards, and those of the merged cache alone.

    Args:
        identities: kind of digest, such as "graph" -> digest of the model.
        images: description of all images, without their digests.
        preprocess: preprocessing of the images, by field.
    """
    return Fingerprint(
        model=identities,
        images=images,
        order="",
        preprocess=preprocess,
        decoder={},
        program=CALIB8,
        rule="",
        method="",
        # for a cache these are the versions of calib8's arithmetic; shards must also have the same
        # versions of ONNX Runtime and OpenCV, so that their numbers may be added
        numbers=feed_versions(str(images["kind"])),
        versions={},
    )


def _refuse_foreign(shards: Sequence[Shard], loaded: LoadedModel) -> None:
    """Refuse shards of another model, other images or versions, or another number of shards."""
    first_shard = shards[0]
    origin = first_shard.made_from
    # the images of the first shard, with the model and the versions of this machine
    expected = _common_fingerprint(loaded.identities, origin.images, origin.preprocess)
    for shard in shards:
        changes = expected.changes_since(shard.made_from)
        if changes:
            reference = str(first_shard.archive)
            if shard is first_shard:  # whose images are the expected ones
                reference = "the model and the versions here"
            raise CacheError(
                f"all shards must be of one calibration, {shard.archive} is not that of"
                f" {reference}: {'; '.join(changes.values())}"
            )
        share, first_share = shard.share, first_shard.share
        if (share.of, share.count) != (first_share.of, first_share.count):
            raise CacheError(
                f"all shards must be of one calibration, got {first_shard.archive}, {first_share}"
                f" of {counted(first_share.count, 'sample')}, and {shard.archive}, {share} of"
                f" {counted(share.count, 'sample')}"
            )


def _sort_by_number(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards sorted by number; raise CacheError for missing or duplicate ones."""
    shard_by_number: dict[int, Shard] = {}
    for shard in shards:
        first_of_number = shard_by_number.setdefault(shard.share.number, shard)
        if first_of_number is not shard:
            raise CacheError(
                f"every shard must be given once, got {shard.share} twice:"
                f" {first_of_number.archive} and {shard.archive}"
            )
    count = shards[0].share.of
    missing_numbers = (n for n in range(1, count + 1) if n not in shard_by_number)
    missing = [f"{number}/{count}" for number in islice(missing_numbers, _MAX_LISTED)]
    if missing:
        raise CacheError(
            f"all shards are needed, got {len(shard_by_number)} of {count}; missing:"
            f" {', '.join(missing)}"
        )
    return [shard_by_number[number] for number in sorted(shard_by_number)]


class _DigestSource:
    """Feed source of samples that only other machines can read, known by their digests."""

    labels = None

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def sample_name(self, index: int) -> str:
        return f"sample {index}"

    def load(self, index: int) -> RawSample:
        return RawSample(bytes.fromhex(self._digests[index]), self._refuse)

    def _refuse(self) -> NoReturn:
        raise FeedError("the samples of shards are where they were observed, not here")


class _MergedFeed(Feed):
    """The entire feed of some shards; it has the preprocessing only as JSON."""

    def __init__(
        self, source: _DigestSource, first_shard: Shard, skipped: Mapping[int, str]
    ) -> None:
        images = first_shard.made_from.images
        super().__init__(
            source,
            range(len(source)),
            kind=str(images["kind"]),
            skip_bad=bool(images["skip_bad"]),
            skipped=skipped,
        )
        self._preprocess_json = first_shard.made_from.preprocess

    def manifest(self, first: int | None = None) -> dict[str, Any]:
        """Return the manifest that one run over all samples would write."""
        return {**super().manifest(first), "preprocess": dict(self._preprocess_json) or None}


def _merge_feeds(shards: Sequence[Shard]) -> Feed:
    """Return the entire feed of all shards, which are sorted by their number."""
    digests = [""] * shards[0].share.count
    skipped: dict[int, str] = {}
    for shard in shards:
        positions = shard.share.positions
        digests[positions.start : positions.stop : positions.step] = shard.digests
        skipped |= shard.skipped
    return _MergedFeed(_DigestSource(digests), shards[0], dict(sorted(skipped.items())))
