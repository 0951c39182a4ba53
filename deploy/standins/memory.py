"""Device memory in host memory: what was allocated is known, and every copy stays inside of it.

::

    host array --copy--> [ block at address A, n bytes ] <--at(A + 64)-- get_batch's pointer
                             what was copied, as what              room behind it, what is new there

Addresses are real ones, so that a script may look at pinned memory by ctypes. What a script frees
lives on until its batch was read: a real allocator leaves the bytes there too, and calibrators
that hand out the address of a local tensor have always worked.
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deploy.standins.sources import Bytes, Source, address_of, behind, of_array

_MOST = 1 << 46  # bytes of an allocation: more than any machine has


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy to a block since the last batch was read: `size` bytes at `offset`."""

    offset: int
    size: int
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Window:
    """What lies behind an address.

    Attributes:
        room: bytes up to the end of the allocation.
        copied: how many of them, from the address on, were copied there for this batch; None where
            none were, so that it is not known how many are meant.
        dtype: numpy dtype of what was copied, None where it came from an address or of several.
        shape: sizes of the one array that was copied, None where there was not one.
    """

    room: int
    copied: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Block:
    """An allocation; without `data` where the memory is somebody else's."""

    size: int
    data: Bytes | None = None
    copies: list[Copied] = field(default_factory=list)


class Memory:
    """All allocations of one script.

    Attributes:
        fault: the first error that a copy or allocation raised, since scripts catch what they call.
    """

    def __init__(self) -> None:
        self.fault: ValueError | None = None
        self._blocks: dict[int, _Block] = {}
        self._starts: list[int] = []
        self._freed: list[int] = []
        self._lent: dict[int, Any] = {}  # address -> a tensor that must outlive its batch

    def alloc(self, size: object) -> int:
        """Address of so many bytes, which are zeros.

        Raises:
            ValueError: no size.
        """
        count = address_of(size)
        if count is None or not 0 <= count < _MOST:
            self.fault = ValueError(f"an allocation is a number of bytes, got {size!r:.60}")
            raise self.fault
        data: Bytes = np.zeros(max(count, 1), np.uint8)
        start = int(data.ctypes.data)
        self._add(start, _Block(count, data))
        return start

    def free(self, address: object) -> None:
        """Let an allocation go, once its batch was read; freeing nothing is no error."""
        start = address_of(address)
        if start in self._blocks:
            self._freed.append(start)

    def lend(self, address: int, size: int, owner: Any, holds: Copied | None = None) -> None:
        """Know memory of `owner` for as long as it lives, and at least until the batch was read.

        Args:
            address: where it begins.
            size: its bytes.
            owner: what goes with it.
            holds: what of it is meant, where that is known.
        """
        self._drop(address)
        block = _Block(size, copies=[] if holds is None else [holds])
        self._add(address, block)
        weakref.finalize(owner, self._ended, address, block)
        self._lent[address] = owner

    def settle(self) -> None:
        """A new batch begins: forget what was copied before, let go what was freed or lent."""
        for block in self._blocks.values():
            block.copies.clear()
        for start in self._freed:
            self._drop(start)
        self._freed.clear()
        self._lent.clear()

    def copy(self, to: object, source: object, size: int | None = None) -> None:
        """Copy an array, or `size` bytes behind an address, to an address or into an array.

        Raises:
            ValueError: one end has fewer bytes, is no memory that is known, or no contiguous array.
        """
        try:
            held = self._source(source, size)
            address = address_of(to)
            if address is None:
                _into_array(to, held)
            else:
                self._into_block(address, held)
        except ValueError as error:
            self.fault = self.fault or error
            raise

    def at(self, address: int) -> Window | None:
        """What is known of the memory behind an address; None where it is none of the script's."""
        place = self._place(address)
        if place is None:
            return None
        block, offset = place
        return _window(block.size - offset, offset, block.copies)

    def read(self, address: int, size: int) -> Bytes:
        """A copy of bytes behind any address of this process.

        Raises:
            ValueError: they are not there, or reach beyond their allocation.
        """
        place = self._place(address)
        if place is None:
            return behind(address, size)
        block, offset = place
        if size > block.size - offset:
            raise ValueError(
                f"a copy must not read beyond its allocation, got {size} bytes of"
                f" {block.size - offset}"
            )
        if block.data is None:
            return behind(address, size)
        return block.data[offset : offset + size].copy()

    def _source(self, source: object, size: int | None) -> Source:
        address = address_of(source)
        if address is None:
            return of_array(source, size)
        if size is None:
            raise ValueError("a copy from an address must say how many bytes, got no size")
        return Source(self.read(address, size))

    def _into_block(self, address: int, held: Source) -> None:
        place = self._place(address)
        if place is None or place[0].data is None:
            raise ValueError(
                f"a copy goes to memory that the script allocated, got address {address:#x}, which"
                " is none of it"
            )
        block, offset = place
        count = held.data.size
        if count > block.size - offset:
            raise ValueError(
                f"a copy must fit its allocation, got {count} bytes for {block.size - offset} that"
                f" are left of one of {block.size}"
            )
        assert block.data is not None
        block.data[offset : offset + count] = held.data
        block.copies.append(Copied(offset, count, held.dtype, held.shape))

    def _add(self, start: int, block: _Block) -> None:
        self._blocks[start] = block
        bisect.insort(self._starts, start)

    def _ended(self, start: int, block: _Block) -> None:
        """The owner of lent memory is gone; another one may have lent the same since."""
        if self._blocks.get(start) is block:
            self._drop(start)

    def _drop(self, start: int) -> None:
        if self._blocks.pop(start, None) is not None:
            self._starts.remove(start)

    def _place(self, address: int) -> tuple[_Block, int] | None:
        """The allocation that an address lies in, and how far inside."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        block, offset = self._blocks[self._starts[at]], address - self._starts[at]
        return (block, offset) if offset < max(block.size, 1) else None


def _window(room: int, offset: int, copies: list[Copied]) -> Window:
    """The copies that follow each other from an offset on, as one."""
    end, own = offset, []
    for one in sorted(copies, key=lambda copy: copy.offset):
        if one.offset <= end < one.offset + one.size:
            own.append(one)
            end = one.offset + one.size
    if not own:
        return Window(room)
    kinds = {one.dtype for one in own}
    shape = own[0].shape if len(own) == 1 and own[0].offset == offset else None
    return Window(room, end - offset, kinds.pop() if len(kinds) == 1 else None, shape)


def _into_array(to: object, held: Source) -> None:
    if not isinstance(to, np.ndarray) or not to.flags.c_contiguous or not to.flags.writeable:
        raise ValueError(f"a copy goes to an address or a plain array, got {type(to).__name__}")
    into: Bytes = to.reshape(-1).view(np.uint8)
    if held.data.size > into.size:
        raise ValueError(f"a copy must fit its array, got {held.data.size} bytes for {into.size}")
    into[: held.data.size] = held.data
