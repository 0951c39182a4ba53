"""Simulated device memory on the host, for stand-in CUDA modules; checks the bounds of every copy.

::

    host array --copy--> [ block at address A, n bytes ] <--find_window-- get_batch's pointer
                             with dtype and shape         bytes up to its end, bytes copied for
                                                          this batch

Addresses are real, so that scripts may read pinned memory by ctypes. Freed blocks are kept until
the batch was read: a real allocator leaves their bytes in place too, and calibrators that return
the address of a local tensor have always worked.

`make_absent_class` and `make_module` make names of stand-in modules that no calibrator needs.
Scripts often build their engine in the same file: `trt.Builder` in a function that is not called,
`trt.ICudaEngine` in an annotation, `1 << int(trt.NetworkDefinitionCreationFlag.X)` at the top. So
every name exists, and only calling it raises an error.
"""

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
_PROCESS_MEMORY = "/proc/self/mem"  # reading an unmapped address raises instead of crashing


@dataclass(frozen=True, slots=True)
class CopySource:
    """Bytes to copy.

    Attributes:
        data: the bytes.
        dtype: name of their numpy dtype; None if read from an address.
        shape: shape of their array; None if read from an address, or only a part.
    """

    data: Bytes
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


def address_of(value: object) -> int | None:
    """Return the address in a pointer of numpy, ctypes, pycuda or cuda-python, or in an integer.

    None for anything else, such as an array. A ctypes array is memory, not a pointer: None too.
    """
    value = getattr(value, "_as_parameter_", value)  # of `array.ctypes` of numpy
    if hasattr(value, "_obj"):  # made by `ctypes.byref`
        return ctypes.addressof(value._obj)
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value or 0
    if isinstance(value, ctypes._SimpleCData):
        return int(value.value or 0)
    # arrays and floats have `__int__` too, but are no addresses
    if isinstance(value, np.ndarray | float | np.floating) or not hasattr(type(value), "__int__"):
        return None
    return int(value)  # type: ignore[call-overload, no-any-return]


def array_bytes(value: object, size: int | None) -> CopySource:
    """Return the bytes of an array with its dtype, and with its shape if they are all in C order.

    Args:
        value: a numpy array, or another object with a buffer.
        size: number of bytes to take, from the first; None for all.

    Raises:
        ValueError: it is no array, is not contiguous, or has fewer bytes.
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
    if isinstance(value, bytes | bytearray | memoryview):  # they may hold values of any dtype
        return CopySource(data[:size])
    is_complete = array.flags.c_contiguous and size in (None, data.size)
    shape = array.shape if is_complete else None
    return CopySource(data[:size], dtype=array.dtype.name, shape=shape)


def read_process_memory(address: int, size: int) -> Bytes:
    """Copy bytes from any address of this process.

    Raises:
        ValueError: they are not mapped.
    """
    try:
        return _read_own_memory(address, size)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"a copy must read mapped memory, got {size} bytes at {address:#x}, which are not all"
            " mapped"
        ) from error


def _read_own_memory(address: int, size: int) -> Bytes:
    """Return a copy of bytes of this process's memory.

    On Linux the kernel reads them, and refuses an address that is not mapped. On other systems such
    an address may crash the process.

    Raises:
        OSError: they are not mapped (Linux alone).
        OverflowError: the address is negative, or larger than any can be.
    """
    data: Bytes = np.empty(size, np.uint8)
    try:
        handle = os.open(_PROCESS_MEMORY, os.O_RDONLY)
    except OSError:  # this is not Linux
        ctypes.memmove(data.ctypes.data, address, size)
        return data
    try:
        read_count = 0
        while read_count < size:
            count = os.preadv(handle, [data[read_count:].data], address + read_count)
            if not count:
                raise OSError("nothing is there")
            read_count += count
    finally:
        os.close(handle)
    return data


_MAX_ALLOCATION = 1 << 46  # limit of an allocation in bytes, more than any machine has


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One copy to a block in this batch.

    Attributes:
        offset: position in the block, in bytes.
        size: number of bytes.
        dtype, shape: as in `CopySource`.
    """

    offset: int
    size: int
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class AddressWindow:
    """Memory behind an address.

    Attributes:
        room: bytes up to the end of the allocation.
        copied: bytes copied for this batch, contiguous from the address on; None without copies,
            when the intended size is unknown.
        dtype: numpy dtype of the copies; None if unknown or mixed.
        shape: shape of the only array copied; None without one.
    """

    room: int
    copied: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def readable_bytes(self) -> int:
        """Bytes copied; without copies, all up to the end of the allocation."""
        return self.room if self.copied is None else self.copied


@dataclass(slots=True)
class _Block:
    """An allocation; `data` is None for memory of another owner."""

    size: int
    data: Bytes | None = None
    copies: list[BlockCopy] = field(default_factory=list)


class Memory:
    """All allocations of one script.

    Attributes:
        fault: first error of a copy or allocation, since scripts may catch errors.
    """

    def __init__(self) -> None:
        self.fault: ValueError | None = None
        self._blocks: dict[int, _Block] = {}  # address -> allocation
        self._starts: list[int] = []  # the keys of `_blocks`, sorted
        self._freed: list[int] = []  # addresses of blocks to drop once the batch was read
        self._owners: dict[int, Any] = {}  # address -> a tensor that must outlive its batch

    def alloc(self, size: object) -> int:
        """Allocate `size` zeroed bytes and return their address.

        Raises:
            ValueError: `size` is no valid number of bytes.
        """
        count = address_of(size)
        if count is None or not 0 <= count < _MAX_ALLOCATION:
            self.fault = ValueError(f"an allocation is a number of bytes, got {size!r:.60}")
            raise self.fault
        data: Bytes = np.zeros(max(count, 1), np.uint8)
        start = int(data.ctypes.data)
        self._add(start, _Block(count, data))
        return start

    def free(self, address: object) -> None:
        """Free an allocation after the batch was read; unknown addresses are ignored."""
        start = address_of(address)
        if start in self._blocks:
            self._freed.append(start)

    def lend(self, address: int, size: int, owner: Any, content: BlockCopy | None) -> None:
        """Register memory of `owner` for its lifetime, and at least until the batch was read.

        Args:
            address: start of the memory.
            size: size in bytes.
            owner: object whose lifetime is that of the memory.
            content: the data in it; None if unknown.
        """
        self._drop(address)
        block = _Block(size, copies=[] if content is None else [content])
        self._add(address, block)
        weakref.finalize(owner, self._drop_of_owner, address, block)
        self._owners[address] = owner

    def start_batch(self) -> None:
        """Start a new batch: forget its copies, release what was freed or lent."""
        for block in self._blocks.values():
            block.copies.clear()
        for start in self._freed:
            self._drop(start)
        self._freed.clear()
        self._owners.clear()

    def copy(self, target: object, source: object, size: int | None = None) -> None:
        """Copy an array, or `size` bytes from an address, to an address of an allocation.

        Raises:
            ValueError: one end is too small or unknown memory, or an array is not contiguous.
        """
        try:
            copy_source = self._find_source(source, size)
            address = address_of(target)
            if address is None:
                raise ValueError(f"a copy goes to an address, got {type(target).__name__}")
            self._copy_to_block(address, copy_source)
        except ValueError as error:
            self.fault = self.fault or error  # the script may catch what is raised
            raise

    def find_window(self, address: int) -> AddressWindow | None:
        """Return the memory behind an address, and what was copied there for this batch.

        Only the copies that follow each other from this address on without a gap count. None if the
        script did not allocate the memory.
        """
        block, offset = self._find_block(address)
        if block is None:
            return None
        room = block.size - offset
        copied_end = offset  # end of the bytes from `offset` on that were copied without a gap
        adjacent_copies = []
        for copy in sorted(block.copies, key=lambda copy: copy.offset):
            if copy.offset <= copied_end < copy.offset + copy.size:  # it covers the next byte
                adjacent_copies.append(copy)
                copied_end = copy.offset + copy.size
        if not adjacent_copies:
            return AddressWindow(room)
        first_copy = adjacent_copies[0]
        has_one_dtype = all(copy.dtype == first_copy.dtype for copy in adjacent_copies)
        is_one_array = len(adjacent_copies) == 1 and first_copy.offset == offset
        return AddressWindow(
            room,
            copied=copied_end - offset,
            dtype=first_copy.dtype if has_one_dtype else None,
            shape=first_copy.shape if is_one_array else None,
        )

    def read(self, address: int, size: int) -> Bytes:
        """Return a copy of `size` bytes at any address of this process.

        Raises:
            ValueError: they are not mapped, or exceed their allocation.
        """
        block, offset = self._find_block(address)
        if block is not None and size > block.size - offset:
            raise ValueError(
                f"a copy must not read beyond its allocation, got {size} bytes of"
                f" {block.size - offset}"
            )
        # no allocation, or lent by another owner, such as a tensor of torch
        if block is None or block.data is None:
            return read_process_memory(address, size)
        return block.data[offset : offset + size].copy()

    def _find_source(self, source: object, size: int | None) -> CopySource:
        """Return the bytes to copy: of an array, or `size` bytes from an address."""
        address = address_of(source)
        if address is None:
            return array_bytes(source, size)
        if size is None:
            raise ValueError("a copy from an address must say how many bytes, got no size")
        return CopySource(self.read(address, size))

    def _copy_to_block(self, address: int, source: CopySource) -> None:
        """Copy bytes into an allocation, and record the copy as one of the current batch.

        Raises:
            ValueError: the address is in no allocation, or the rest of it is too small.
        """
        block, offset = self._find_block(address)
        if block is None or block.data is None:  # a block without data is that of a torch tensor
            raise ValueError(
                f"a copy must go to memory that the script allocated, got address {address:#x},"
                " which is not"
            )
        count = source.data.size
        if count > block.size - offset:
            raise ValueError(
                f"a copy must fit its allocation, got {count} bytes for the last"
                f" {block.size - offset} of {block.size}"
            )
        block.data[offset : offset + count] = source.data
        block.copies.append(BlockCopy(offset, count, source.dtype, source.shape))

    def _add(self, start: int, block: _Block) -> None:
        """Register an allocation at its address."""
        self._blocks[start] = block
        bisect.insort(self._starts, start)

    def _drop_of_owner(self, start: int, block: _Block) -> None:
        """Drop the memory of a deleted owner, unless another owner has registered it since."""
        if self._blocks.get(start) is block:
            self._drop(start)

    def _drop(self, start: int) -> None:
        """Forget an allocation; unknown addresses are ignored."""
        if self._blocks.pop(start, None) is not None:
            self._starts.remove(start)

    def _find_block(self, address: int) -> tuple[_Block | None, int]:
        """Return (the allocation that contains an address or None, the offset inside)."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None, 0
        start = self._starts[index]
        block = self._blocks[start]
        offset = address - start
        # an empty allocation has one byte, its address
        return (block if offset < max(block.size, 1) else None), offset


class _AbsentName(type):
    """Metaclass of absent names: has every attribute, and is 0 as an integer."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_absent_class(f"{cls.__qualname__}.{name}")

    def __int__(cls) -> int:
        return 0

    __index__ = __int__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if vars(cls).get("_is_absent"):
            raise NotImplementedError(
                f"{cls.__qualname__} is not available without a GPU; code that runs here may"
                " only make the calibrator and its inputs"
            )
        return super().__call__(*args, **kwargs)


def make_absent_class(name: str) -> Any:
    """Return a class of this dotted name that can be named and subclassed, but not called."""
    return _AbsentName(name.rpartition(".")[2], (), {"__qualname__": name, "_is_absent": True})


def make_module(name: str, names: Mapping[str, Any]) -> ModuleType:
    """Return a module with these names; every other name is an absent one."""
    stand_in = ModuleType(name, "Stands in for the module of this name, on host memory.")
    stand_in.__path__ = []  # so that `import a.b` looks for b and reports it missing
    vars(stand_in).update(names)

    def make_absent_name(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return make_absent_class(f"{name}.{attribute}")

    vars(stand_in)["__getattr__"] = make_absent_name
    return stand_in
