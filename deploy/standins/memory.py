"""Device memory in host memory: what was allocated is known, and every copy stays inside of it.

::

    host array --copy--> [ block at address A, n bytes ] <--at(A + 64)-- get_batch's pointer
                             what was copied, as what              room behind it, what is new there

Addresses are real ones, so that a script may look at pinned memory by ctypes. What a script frees
lives on until its batch was read: a real allocator leaves the bytes there too, and calibrators
that hand out the address of a local tensor have always worked.

What a copy comes from: an array, or bytes behind an address.

Names of a stood-in module that no calibrator needs.

A script often builds its engine in the same file: `trt.Builder` stands in a function that is not
called, `trt.ICudaEngine` in an annotation, `1 << int(trt.NetworkDefinitionCreationFlag.X)` at the
top. So every such name is there, and only calling it is refused, by a sentence.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_OWN_MEMORY = "/proc/self/mem"  # to read where nothing is there is an error and no crash


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes to be copied.

    Attributes:
        data: the bytes.
        dtype: name of the numpy dtype that they are of; None of bytes behind an address.
        shape: sizes of the array that they are; None likewise.
    """

    data: Bytes
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


def address_of(value: object) -> int | None:
    """The number that a pointer of numpy, ctypes, pycuda or cuda-python stands for; None of arrays.

    Of a ctypes array, which is memory itself and no pointer to it, there is none either.
    """
    value = getattr(value, "_as_parameter_", value)  # of `array.ctypes`
    if hasattr(value, "_obj"):  # of `byref`
        return ctypes.addressof(value._obj)
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value or 0
    if isinstance(value, ctypes._SimpleCData):
        return int(value.value or 0)
    if isinstance(value, np.ndarray | float | np.floating) or not hasattr(type(value), "__int__"):
        return None
    return int(value)  # type: ignore[call-overload, no-any-return]


def of_array(value: object, size: int | None) -> Source:
    """The bytes of an array, or its first ones.

    Raises:
        ValueError: it is no array, is not contiguous, or has fewer.
    """
    try:
        array: NDArray[Any] = np.asarray(memoryview(value))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a copy takes arrays and addresses, got {type(value).__name__}"
        ) from error
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ValueError(
            f"a copy takes contiguous arrays, got strides {array.strides} of shape {array.shape};"
            " use numpy.ascontiguousarray"
        )
    data: Bytes = array.reshape(-1, order="A").view(np.uint8)
    if size is not None and not 0 <= size <= data.size:
        raise ValueError(f"a copy must not read beyond its array, got {size} bytes of {data.size}")
    if isinstance(value, bytes | bytearray | memoryview):  # of whatever they were
        return Source(data[:size])
    whole = array.flags.c_contiguous and size in (None, data.size)
    return Source(data[:size], array.dtype.name, array.shape if whole else None)


def behind(address: int, size: int) -> Bytes:
    """A copy of bytes of this process, wherever they are.

    Raises:
        ValueError: some of them are not there.
    """
    try:
        return _peek(address, size)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"a copy must read memory that is there, got {size} bytes at {address:#x}, which are"
            " not all there"
        ) from error


def _peek(address: int, size: int) -> Bytes:
    found: Bytes = np.empty(size, np.uint8)
    try:
        handle = os.open(_OWN_MEMORY, os.O_RDONLY)
    except OSError:  # not Linux: then a wrong address is what it always was
        ctypes.memmove(found.ctypes.data, address, size)
        return found
    try:
        done = 0
        while done < size:
            count = os.preadv(handle, [found[done:].data], address + done)
            if not count:
                raise OSError("nothing is there")
            done += count
    finally:
        os.close(handle)
    return found


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


class _Named(type):
    """The type of names: each has every name below it, and is flag number 0."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __int__(cls) -> int:
        return 0

    __index__ = __int__

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if vars(cls).get("_is_absent"):
            raise NotImplementedError(
                f"{cls.__qualname__} is not to be had without a GPU; what is called here may make"
                " the calibrator and what feeds it, and no more"
            )
        return super().__call__(*given, **named)


def absent(name: str) -> Any:
    """A class of this dotted name that can be named and inherited from, but not called."""
    return _Named(name.rpartition(".")[2], (), {"__qualname__": name, "_is_absent": True})


def module(name: str, names: Mapping[str, Any]) -> ModuleType:
    """A module with these names, and every other one as an absent one."""
    made = ModuleType(name, "Stands in for the module of this name, on host memory.")
    made.__path__ = []  # so that `import a.b` looks for b and says what it did not find
    vars(made).update(names)

    def other(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return absent(f"{name}.{wanted}")

    vars(made)["__getattr__"] = other
    return made
