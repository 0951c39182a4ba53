"""Digests that say whether two feeds are the same, without decoding anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

import numpy as np

from deploy.tensors import Array


def names_digest(names: Iterable[str]) -> str:
    """sha256 over the names in their order, each ended by a zero byte."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(os.fsencode(name) + b"\0")
    return digest.hexdigest()


def files_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """sha256 over (name, length, content) of every file in its order."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(os.fsencode(name) + b"\0" + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def arrays_digest(samples: Iterable[Mapping[str, Array]]) -> str:
    """sha256 over (input name, dtype, shape, C-order bytes) of every sample in its order."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, array in sample.items():
            digest.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
