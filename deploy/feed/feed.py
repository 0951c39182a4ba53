"""What a model is fed: images or arrays, one sample at a time, decoded beside the inference.

Pictures are decoded in as many threads as there are cores, 4 at most: where the model takes longer,
they wait for it, and where decoding does, no core is idle.

Sources: a folder, a list file ("path" or "path label"), a pattern or a COCO json of images or of
files of arrays (already preprocessed), a `loader.py:function`, a TensorRT calibrator, or what
Python has: arrays, paths, loaders and datasets that give them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import fixed_batch
from deploy.feed.batches import refuse_batches
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.choice import Limit, choice_of
from deploy.feed.files import Files, files_of, labelled, listed
from deploy.feed.loaders import called, names_loader
from deploy.feed.model_preprocess import Carried
from deploy.feed.opening import FeedSource, Opened, Opening
from deploy.feed.paths import RawFiles
from deploy.feed.preprocess import Asked
from deploy.feed.samples import KEPT, Feed
from deploy.feed.share import names_digest, share_of
from deploy.feed.source import Sample
from deploy.inputs import is_read
from deploy.progress import phase
from deploy.tensors import TensorSpec


@phase("opening the samples")
def open_feed(
    source: FeedSource,
    specs: Sequence[TensorSpec],
    *,
    preprocess: Asked = None,
    carried: Carried | None = None,
    skip_bad: bool = False,
    limit: Limit = None,
    labels_by_folder: bool = False,
) -> Feed:
    """Open images or arrays as the feed of a model with these inputs.

    Args:
        source: as the module says.
        specs: the model's inputs.
        preprocess: how images, of files or in memory, become inputs, or some options of it; the
            rest is what the model carries, else what its input tells, and said.
        carried: what the model carries of that, `LoadedModel.carried`.
        skip_bad: go on without unreadable images and arrays with NaN, telling them in `notes`.
        limit: use at most so many, spread evenly over all, of a calibrator the first ones; or a
            `Choice` of them.
        labels_by_folder: number the folders in the given folder, and label what is in them so.

    Raises:
        FeedError: nothing to feed, or it does not fit the inputs.
        ConfigError: options that contradict the source.
    """
    if not specs:
        raise FeedError("a model must have an input to be fed, got none; check the model")
    asked = Opening(
        specs=tuple(specs),
        preprocess=preprocess,
        carried=carried,
        skip_bad=skip_bad,
        choice=choice_of(limit),
    )
    if isinstance(source, str | os.PathLike) and (given := called(str(source))) is not None:
        source = cast("FeedSource", given)
    files = _files(source)
    if labels_by_folder:
        if files is None:
            raise ConfigError("labels by folder are of files in folders, got no path; give one")
        files = labelled(files)
    return _fed(asked.of(source, files), asked)


def holds_arrays(source: FeedSource, specs: Sequence[TensorSpec]) -> bool:
    """Whether a source is of arrays in files or of a calibrator, which no preprocessing is for.

    Raises:
        FeedError: nothing is there, or it is of both kinds.
    """
    if isinstance(source, str | os.PathLike) and names_loader(str(source)):
        return False  # what it gives may be pictures
    files = _files(source)
    if isinstance(source, RawFiles):
        return not any(source.pictures(spec, asked=True) for spec in specs)
    return isinstance(source, CalibratorScript) or (files is not None and files.arrays)


def _files(source: FeedSource) -> Files | None:
    """The files that a path or a list of paths stands for; None where it is no such thing."""
    if isinstance(source, RawFiles):
        source = source.path
    if isinstance(source, str | os.PathLike):
        is_read(Path(source))
        return files_of(Path(source))
    return listed(source) if isinstance(source, list | tuple) else None


def _fed(opened: Opened, asked: Opening) -> Feed:
    """What was chosen of a source; of a shard its share."""
    source, settled, share = opened.source, opened.settled, None
    chosen, said = asked.choice.of(len(source), usual=opened.usual)
    batch = fixed_batch(asked.specs)
    if asked.choice.shard is not None:
        refuse_batches(batch)
        names = names_digest(map(source.sample_name, chosen))
        share = share_of(asked.choice.shard, len(chosen), names)
        chosen = [chosen[place] for place in share.places]
        said = [*said, f"shard {share}: {len(chosen)} of {share.count} samples"]
    return Feed(
        source,
        chosen,
        kind=opened.kind,
        batch=batch,
        preprocess=settled.how if settled else None,
        skip_bad=asked.skip_bad,
        notes=(*opened.notes, *(settled.notes if settled else ()), *said),
        origin=settled.origin if settled else "",
        share=share,
    )


__all__ = ["KEPT", "Feed", "FeedSource", "Sample", "holds_arrays", "open_feed"]
