"""The files of a dataset, and the sha256 of every sample.

`SampleDigests` stores one digest per sample, so that every read returns the bytes of the first
read::

    file --read once--> bytes --sha256--> equal to the first digest? -- no --> SampleChangedError
                          '--decode--> sample                        '-- yes --> used

A pass collects the digests of all it decodes. A file is read for its digest alone only if the
digest is needed before the pass.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploy.errors import FeedError
from deploy.tensors import Array

Labels = tuple[int, ...] | None
"""One class number per sample; None without labels."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file, its name in messages and digests, and its label if the list has one."""

    path: Path
    name: str
    label: int | None = None


class FileList:
    """The files of one folder; of any folder if the names are complete paths.

    A dataset may have 100,000 files: a path is made when it is asked for.

    Attributes:
        names: of the files, relative to the folder.
    """

    def __init__(
        self, folder: Path | str, names: Iterable[str] = (), labels: Iterable[int] = ()
    ) -> None:
        """Args: labels: one class number per name, or none at all."""
        self.names = list(names)
        self._folder = Path(folder)
        self._labels: list[int | None] = list(labels) or [None] * len(self.names)

    def add(self, name: str, label: int | None = None) -> None:
        """Append a file."""
        self.names.append(name)
        self._labels.append(label)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> ImageFile:
        return ImageFile(self.path(index), self.names[index], self._labels[index])

    def __iter__(self) -> Iterator[ImageFile]:
        return map(self.__getitem__, range(len(self)))

    def path(self, index: int) -> Path:
        """Return the path of a file."""
        return self._folder / self.names[index]

    @property
    def labels(self) -> Labels:
        """One class number per file; None if a file has none."""
        labels = tuple(label for label in self._labels if label is not None)
        return labels if len(labels) == len(self) else None


_DIGEST_BYTES = 32  # length of a sha256

UNREADABLE = hashlib.sha256().digest()  # stands for a file that cannot be read: no bytes


class SampleChangedError(FeedError):
    """A sample differs from its first read; never skipped as a bad sample."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """An undecoded sample.

    Attributes:
        digest: sha256 of the file's or the arrays' bytes; 32 bytes.
        decode: returns the sample, {input: array}, decoded from these bytes.
        decode_source: returns the image before preprocessing, uint8 [H, W, 3] BGR; None for arrays.
    """

    digest: bytes
    decode: Callable[[], dict[str, Array]]
    decode_source: Callable[[], Array] | None = None


class SampleDigests:
    """The digest of every sample at its first read: 33 bytes per sample in one buffer."""

    def __init__(self, count: int) -> None:
        """Args: count: samples; a buffer page that is never written takes no memory."""
        self._is_known = bytearray(count)
        self._digests = bytearray(count * _DIGEST_BYTES)

    def __contains__(self, index: int) -> bool:
        return bool(self._is_known[index])

    def store_or_compare(self, index: int, digest: bytes, name: str) -> None:
        """Store a digest, or compare it with the stored one.

        Raises:
            SampleChangedError: the sample has another digest than before.
        """
        digest_slice = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
        if not self._is_known[index]:
            self._digests[digest_slice] = digest
            self._is_known[index] = 1
        elif self._digests[digest_slice] != digest:
            raise SampleChangedError(
                f"{name} changed while calib8 ran, so not all of the run used the same data; do not"
                " change the data during a run, and run again"
            )

    def digest(self, index: int) -> bytes:
        """Return the digest of a sample that was read."""
        return bytes(self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES])

    def known(self, indices: Iterable[int]) -> list[bytes]:
        """Return the digests of those of these samples that were read so far."""
        return [self.digest(index) for index in indices if index in self]

    def hex(self, indices: Iterable[int]) -> tuple[str, ...]:
        """Return the digests of several samples in hexadecimal."""
        return tuple(self.digest(index).hex() for index in indices)

    def combined(self, indices: Sequence[int], *, in_digest_order: bool = False) -> str:
        """Return the sha256 (hex) over the digests of samples that were read.

        Args:
            indices: of the samples.
            in_digest_order: hash the digests in their own order, not in the order of `indices`.
        """
        all_rows = np.frombuffer(self._digests, f"S{_DIGEST_BYTES}")
        rows = all_rows[np.fromiter(indices, np.intp)]
        if in_digest_order:
            rows = np.sort(rows)
        return hashlib.sha256(rows.data).hexdigest()


def sample_digest(sample: Mapping[str, Array]) -> bytes:
    """Return the sha256 over (input name, dtype, shape, C-order bytes) of every array."""
    digest = hashlib.sha256()
    for name, values in sample.items():
        digest.update(f"{name}\0{values.dtype.str}\0{list(values.shape)}\0".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
