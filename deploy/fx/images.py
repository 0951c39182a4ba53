"""The package's own feed as torch batches: the same bytes as every other path calibrates with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deploy.feed.choice import Limit
from deploy.feed.feed import open_feed
from deploy.feed.opening import FeedSource
from deploy.feed.preprocess import Asked
from deploy.tensors import TensorSpec


def batches_of(
    images: FeedSource,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    preprocess: Asked = None,
    limit: Limit = None,
) -> list[tuple[torch.Tensor, ...]]:
    """Batches of the size of the example inputs, from a folder, list, image, .npy or .npz file.

    All are held in memory, as a comparison and a calibration both read them.

    Args:
        images: a folder, list, image, .npy or .npz file.
        inputs: examples, whose shapes and dtypes are taken.
        names: of the inputs, as an .npz file has them.
        preprocess: of images.
        limit: how many to take.

    Raises:
        FeedError, ConfigError: as `open_feed`.
    """
    specs = [
        TensorSpec(name, str(x.dtype).removeprefix("torch."), (None, *x.shape[1:]))
        for name, x in zip(names, inputs, strict=True)
    ]
    feed = open_feed(images, specs, preprocess=preprocess, limit=limit)
    samples = [
        tuple(torch.from_numpy(np.array(s[spec.name])) for spec in specs) for s in feed.samples()
    ]
    size = len(inputs[0])
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [tuple(torch.cat(parts) for parts in zip(*group, strict=True)) for group in groups]
