"""`explain`: what was written of a build, and what images say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from deploy.analysis.explain_build import held_of
from deploy.analysis.written import beside, is_file, of_build, read_build
from deploy.errors import CacheError, ConfigError, did_you_mean
from deploy.explanation.values import Explanation, Held, TargetWhy
from deploy.feed.choice import Limit
from deploy.feed.feed import open_feed
from deploy.feed.opening import FeedSource
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Asked, Preprocess, asked_of
from deploy.files import manifest
from deploy.frontends import LoadedModel, load_either
from deploy.machine import default_threads
from deploy.progress import on_request, phase
from deploy.tuning.repairs import REPAIRS

_ARRAYS = {".npy", ".npz"}


@on_request
def explain(
    folder: Path | str,
    *,
    target: str | None = None,
    images: FeedSource | None = None,
    model: Path | str | None = None,
    preprocess: Asked = None,
    limit: Limit = None,
    skip_bad: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Explanation:
    """Explain a build.

    Args:
        folder: that was built into.
        target: this one alone; None tells of all.
        images: run the float model and the int8 models on these, and tell the images and the
            channels that lose most.
        model: the float model; None takes the one that the report names.
        preprocess: how images become inputs, or some options of it; the rest is the report's.
        limit: use at most so many images, or a `Choice` of them.
        skip_bad: go on without unreadable images.
        threads: samples that are run at a time; the result does not depend on it.
        progress: tell on stderr what is going on, where it takes over two seconds.

    Raises:
        ConfigError: no build, a report or plan that is broken, a target that it does not have.
        ModelError, FeedError, BackendError: of what is run on images.
    """
    found = read_build(Path(folder))
    chosen = _chosen(found, target)
    if images is None:
        return replace(found, targets=chosen)
    loaded = _model(found, model)
    feed = open_feed(
        images,
        loaded.inputs,
        preprocess=_asked(preprocess, _preprocess(found, images)),
        carried=loaded.carried,
        skip_bad=skip_bad,
        limit=limit,
    )
    told = []
    for one in chosen:
        if one.runnable is None:
            note = "no file of it can be run in ONNX Runtime"
            told.append(one.on(Held(samples=0, notes=(note,))))
            continue
        with phase(one.name):
            held = held_of(
                loaded,
                of_build(one.runnable, Path(found.report)),
                [] if _remade(one) else [layer.name for layer in one.layers],
                feed,
                native=one.native,
                threads=threads or default_threads(),
            )
        told.append(one.on(replace(held, notes=(*held.notes, *_other(found, loaded)))))
    return replace(found, targets=tuple(told))


def _chosen(found: Explanation, target: str | None) -> tuple[TargetWhy, ...]:
    if target is None:
        return found.targets
    names = [one.name for one in found.targets]
    if target not in names:
        way = did_you_mean(target, names, f"it has {', '.join(names) or 'none'}")
        raise ConfigError(
            f"a target to explain must be one of the build, got {target!r} for {found.report};"
            f" {way}"
        )
    return tuple(one for one in found.targets if one.name == target)


def _model(found: Explanation, named: Path | str | None) -> LoadedModel:
    """The float model.

    Raises:
        ConfigError: the report names one that is not there, or no ONNX file.
    """
    if named is not None:
        return load_either(Path(named))
    path = beside(found.model, Path(found.report))
    if not is_file(path) or path.suffix.lower() != ".onnx":
        raise ConfigError(
            f"images are run through the ONNX model of the build, got {found.model!r} in"
            f" {found.report}, which is none here; name it with --model"
        )
    return load_either(path)


def _other(found: Explanation, loaded: LoadedModel) -> Iterator[str]:
    """That the float model is not the one that was built from, as far as the build tells."""
    try:
        made_from = manifest.read(Path(found.report).parent).made_from.get("model")
    except CacheError:  # `verify` tells of it
        return
    if isinstance(made_from, dict) and made_from.get("sha256") != loaded.digest:
        yield (
            f"{loaded.source or loaded.name} is not the model that was built from, or was changed"
            " since: what is told of images and channels is of both changes"
        )


def _asked(preprocess: Asked, known: Preprocess | None) -> Asked:
    """What is asked, on what is known of the build."""
    if known is None or not isinstance(preprocess, Mapping | None):
        return preprocess
    return asked_of(known, preprocess or {})


def _preprocess(found: Explanation, images: FeedSource) -> Preprocess | None:
    """As the images of the build became inputs; None for arrays, and where the report has none.

    Raises:
        ConfigError: what the report has is no preprocessing.
    """
    if isinstance(images, RawFiles):
        arrays = images.dtype != "uint8"
    else:
        arrays = not isinstance(images, str | Path) or Path(images).suffix.lower() in _ARRAYS
    if arrays or not found.preprocess:
        return None
    try:
        return Preprocess.from_json(found.preprocess)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the preprocessing of a report must be one that calib8 wrote, got {error} in"
            f" {found.report}; say it with options such as --mean"
        ) from error


def _remade(target: TargetWhy) -> bool:
    """Whether a repair moved factors between layers, so that inner tensors have other sizes."""
    words = [repair.words for repair in REPAIRS.values() if repair.before is not None]
    return any(
        word in said and said.endswith(", kept") for said in target.repairs for word in words
    )
