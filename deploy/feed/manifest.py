"""Digests of samples: what was hashed is what is decoded, now and whenever it is read again.

::

    file --read once--> bytes --sha256--> Seen: as it was first seen? -- no --> Changed
                          '--decode--> sample                        '-- yes --> taken

So a pass over a feed gathers the digests of all that it decodes, and nothing is read for its digest
alone unless somebody asks before the pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from deploy.errors import FeedError
from deploy.tensors import Array

UNREADABLE = hashlib.sha256().digest()  # of what cannot be read: no bytes


class Changed(FeedError):
    """A sample is no longer what it was when it was first read; never passed over as bad."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A sample as it was read.

    Attributes:
        digest: sha256 of the file's bytes, or of the arrays'; 32 bytes.
        decode: makes the sample, {input: array}, of these very bytes.
        picture: gives the picture in them before it is preprocessed, uint8 [H, W, 3], blue, green,
            red; None where there is none.
    """

    digest: bytes
    decode: Callable[[], dict[str, Array]]
    picture: Callable[[], Array] | None = None


class Seen:
    """The digest of every sample, as it was first read."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._digests

    def note(self, index: int, digest: bytes, name: str) -> None:
        """Remember a digest.

        Raises:
            Changed: the sample was another one before.
        """
        if self._digests.setdefault(index, digest) != digest:
            raise Changed(
                f"{name} changed while calib8 ran, so that not all of the run saw the same; leave"
                " the data alone meanwhile and run again"
            )

    def of(self, indices: Iterable[int]) -> tuple[bytes, ...]:
        """Digests of samples that were read."""
        return tuple(self._digests[index] for index in indices)


def combined(digests: Iterable[bytes]) -> str:
    """sha256 (hex) over digests in their order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def bytes_digest(data: bytes) -> bytes:
    """sha256 of a file's bytes."""
    return hashlib.sha256(data).digest()


def sample_digest(sample: Mapping[str, Array]) -> bytes:
    """sha256 over (input name, dtype, shape, C-order bytes) of every array."""
    digest = hashlib.sha256()
    for name, array in sample.items():
        digest.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
