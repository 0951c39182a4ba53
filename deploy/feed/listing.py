"""Names of the files of a feed, in as few bytes as they have.

A path and a name as Python's objects take half a kilobyte an image, and a feed may have 100,000::

    names    a.jpgb.jpgsub/c.jpg      one piece of memory
    ends     5 10 19                  where each name ends
    labels   -1 -1 -1                 class numbers; -1 for none
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

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
