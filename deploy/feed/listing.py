"""Names of the files of a feed, in as few bytes as they have.

A path and a name as Python's objects take half a kilobyte an image, and a feed may have 100,000::

    names    a.jpgb.jpgsub/c.jpg      one piece of memory
    ends     5 10 19                  where each name ends
    labels   -1 -1 -1                 class numbers; -1 for none

Digests of samples: what was hashed is what is decoded, now and whenever it is read again.

::

    file --read once--> bytes --sha256--> Seen: as it was first seen? -- no --> Changed
                          '--decode--> sample                        '-- yes --> taken

So a pass over a feed gathers the digests of all that it decodes, and nothing is read for its digest
alone unless somebody asks before the pass.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from deploy.errors import FeedError
from deploy.tensors import Array

_NONE = -1  # no label
_ERRORS = "surrogatepass"  # names may hold bytes that are no text


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, the name it goes by in messages and digests, and its label if the list has one."""

    path: Path
    name: str
    label: int | None = None


class Listing(Sequence[Picture]):
    """Files in a folder, or anywhere where their names are whole paths."""

    def __init__(
        self, folder: Path | str, names: Iterable[str] = (), labels: Iterable[int] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._names = bytearray()
        self._ends = array("Q")
        self._labels = array("i")
        if labels is None:
            for name in names:
                self.add(name)
        else:
            for name, label in zip(names, labels, strict=True):
                self.add(name, label)

    def add(self, name: str, label: int | None = None) -> None:
        """One more, behind the others."""
        self._names += name.encode(errors=_ERRORS)
        self._ends.append(len(self._names))
        self._labels.append(_NONE if label is None else label)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Picture: ...
    @overload
    def __getitem__(self, index: slice) -> list[Picture]: ...
    def __getitem__(self, index: int | slice) -> Picture | list[Picture]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        name, label = self.name(index), self._labels[index]
        return Picture(self._folder / name, name, None if label == _NONE else label)

    def path(self, index: int) -> Path:
        """The path alone."""
        return self._folder / self.name(index)

    def name(self, index: int) -> str:
        """The name alone, which is a third of the work."""
        place = range(len(self))[index]
        begin = self._ends[place - 1] if place else 0
        return self._names[begin : self._ends[place]].decode(errors=_ERRORS)

    @property
    def labels(self) -> tuple[int, ...] | None:
        """One of each file; None where one has none."""
        return None if _NONE in self._labels else tuple(self._labels)


_BYTES = 32  # of a sha256

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
    """The digest of every sample, as it was first read: 33 bytes of each, all in one piece."""

    def __init__(self, count: int) -> None:
        """Of so many samples; what is not seen takes no memory, since nobody writes to it."""
        self._known = bytearray(count)
        self._digests = bytearray(count * _BYTES)

    def __contains__(self, index: int) -> bool:
        return bool(self._known[index])

    def note(self, index: int, digest: bytes, name: str) -> None:
        """Remember a digest.

        Raises:
            Changed: the sample was another one before.
        """
        place = slice(index * _BYTES, (index + 1) * _BYTES)
        if not self._known[index]:
            self._digests[place] = digest
            self._known[index] = 1
        elif self._digests[place] != digest:
            raise Changed(
                f"{name} changed while calib8 ran, so that not all of the run saw the same; leave"
                " the data alone meanwhile and run again"
            )

    def of(self, index: int) -> bytes:
        """Digest of a sample that was read."""
        assert self._known[index]
        return bytes(self._digests[index * _BYTES : (index + 1) * _BYTES])

    def copies(self, indices: Iterable[int]) -> int:
        """How many of the samples that were read are others once more, byte for byte."""
        known = [self.of(index) for index in indices if index in self]
        return len(known) - len(set(known))

    def hex(self, indices: Iterable[int]) -> Iterator[str]:
        """The same of several, in letters, one at a time."""
        return (self.of(index).hex() for index in indices)

    def combined(self, indices: Sequence[int], *, by_size: bool = False) -> str:
        """sha256 (hex) over the digests of samples that were read.

        Args:
            indices: of the samples.
            by_size: in the order of the digests themselves, not of the indices.
        """
        assert all(map(self.__contains__, indices))
        rows = np.frombuffer(self._digests, f"S{_BYTES}")[np.fromiter(indices, np.intp)]
        return hashlib.sha256((np.sort(rows) if by_size else rows).data).hexdigest()


def bytes_digest(data: bytes) -> bytes:
    """sha256 of a file's bytes."""
    return hashlib.sha256(data).digest()


def sample_digest(sample: Mapping[str, Array]) -> bytes:
    """sha256 over (input name, dtype, shape, C-order bytes) of every array."""
    digest = hashlib.sha256()
    for name, values in sample.items():
        digest.update(f"{name}\0{values.dtype.str}\0{list(values.shape)}\0".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
