"""What a calibrator's `get_batch` hands over: addresses -> the arrays that lie there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from deploy.errors import FeedError
from deploy.feed.arrays import Item, fixed_batch, is_batch
from deploy.feed.preprocess import describe
from deploy.standins.memory import Memory, Window
from deploy.standins.sources import address_of
from deploy.tensors import Array, TensorSpec

_NUMBERS = frozenset(np.dtype(code).name for code in "?bhiqBHIQefd")


class Handed:
    """The batches of a script so far.

    Attributes:
        samples: how many were read, with those of this batch.
        where: name of this batch in messages.
    """

    def __init__(
        self, script: str, memory: Memory, specs: tuple[TensorSpec, ...], batch: int
    ) -> None:
        """Args: script: its name in messages; batch: of `get_batch_size`."""
        self._script, self._memory, self._specs = script, memory, specs
        self._batch = batch
        self._rows = fixed_batch(specs) if batch == 1 else batch
        self._number = 0
        self._doubtful = False
        self._short: list[int] = []
        self._more = 0
        self.samples = 0

    @property
    def where(self) -> str:
        """Name of this batch in messages."""
        return f"batch {self._number}"

    @property
    def notes(self) -> list[str]:
        """What was otherwise than `get_batch_size` says, in sentences."""
        found = []
        if self._short:
            found.append(
                f"{self._script} copied fewer than {self._rows} samples for {len(self._short)} of"
                f" its {self._number} batches ({self._short[0]} for the first of them): only those"
                " are used, where TensorRT reads old ones behind them once more"
            )
        if self._more:
            found.append(
                f"get_batch_size of {self._script} says 1, and up to {self._more} samples were"
                " copied for a batch: all of them are used"
            )
        return found

    def item(self, pointers: Sequence[object]) -> Item:
        """The arrays behind a batch's addresses.

        Raises:
            FeedError: an address is not the script's, or too little or too much lies behind it.
        """
        if self._doubtful:
            raise FeedError(
                f"only the last batch of {self._script} may hold fewer samples than"
                f" get_batch_size gives, {self._rows}, got {self.where} behind such a one;"
                f" copy whole batches, of the dtype of {describe(self._specs[0])}"
            )
        pairs = zip(self._specs, pointers, strict=True)
        item = {spec.name: self._array(spec, pointer) for spec, pointer in pairs}
        batched = [item[s.name].shape[0] for s in self._specs if is_batch(s, self._specs)]
        self.samples += batched[0] if batched else 1
        self._number += 1
        return item

    def without(self, item: Item, last: int) -> Item:
        """A batch without so many of its last samples."""
        able = {s.name for s in self._specs if is_batch(s, self._specs)}
        return {n: a[: len(a) - last] if n in able else a for n, a in item.items()}

    def _array(self, spec: TensorSpec, pointer: object) -> Array:
        address = _address(pointer)
        window = None if address is None else self._memory.at(address)
        if address is None or window is None:
            got = f"address {address:#x}" if address is not None else type(pointer).__name__
            raise FeedError(
                f"get_batch of {self._script} must give addresses of memory that was allocated by"
                f" pycuda, cuda-python, libcudart or torch and not freed, got {got} for the input"
                f" {spec.name!r} in {self.where}"
            )
        batched = is_batch(spec, self._specs)
        inner = self._inner(spec, window, batched=batched)
        rows = self._rows if batched else 1
        kind = np.dtype(self._kind(spec, window, rows * prod(inner)))
        unit = kind.itemsize * prod(inner)
        count = self._counted(spec, window, rows, unit, batched=batched)
        data = self._memory.read(address, count * unit).view(kind)
        return data.reshape((count, *inner) if batched else inner).astype(spec.dtype, copy=False)

    def _inner(self, spec: TensorSpec, window: Window, *, batched: bool) -> tuple[int, ...]:
        """Sizes of one sample; open ones as the array has them that was copied."""
        sizes = spec.shape[1:] if batched else spec.shape
        copied = window.shape if window.shape and len(window.shape) == len(spec.shape) else None
        known = copied[1:] if copied and batched else copied
        found = tuple(
            size if isinstance(size, int) else (known[at] if known else 0)
            for at, size in enumerate(sizes)
        )
        if not all(found):
            raise FeedError(
                f"a calibrator says the batch and no other size, so the input must leave open"
                f" nothing else, got {describe(spec)}; give a model of fixed sizes"
            )
        return found

    def _kind(self, spec: TensorSpec, window: Window, values: int) -> str:
        """The dtype that the bytes are of: the input's; for int64 also TensorRT's int32."""
        able = (spec.dtype, "int32") if spec.dtype == "int64" else (spec.dtype,)
        if spec.dtype not in _NUMBERS:
            raise FeedError(
                f"a calibrator hands over plain numbers, got the input {describe(spec)}; feed"
                " arrays by --images"
            )
        if window.dtype is not None and window.dtype not in able:
            raise FeedError(
                f"get_batch of {self._script} must copy the dtype of the input {describe(spec)},"
                f" got {window.dtype} in {self.where}; convert it with .astype('{spec.dtype}')"
            )
        if window.dtype is not None or len(able) == 1:
            return window.dtype or spec.dtype
        size = window.room if window.copied is None else window.copied
        return "int32" if size == 4 * values else spec.dtype

    def _counted(
        self, spec: TensorSpec, window: Window, rows: int, unit: int, *, batched: bool
    ) -> int:
        """How many samples of `unit` bytes lie there.

        Raises:
            FeedError: no whole number of them, too many, or too few.
        """
        got = window.room if window.copied is None else window.copied
        wanted = rows * unit
        if got == wanted or (window.copied is None and got > wanted):
            return rows
        typed = window.copied is not None and window.dtype is not None and batched
        if typed and got > wanted and self._batch == 1 and got % unit == 0:
            self._more = max(self._more, got // unit)
            return got // unit
        first = self._number == 0 and not typed  # a short one may as well be of another dtype
        if window.copied is None or got > wanted or got % unit or not batched or first:
            kind = "an allocation of" if window.copied is None else "copied"
            raise FeedError(
                f"{self.where} of {self._script} must hold {rows} samples (get_batch_size) of the"
                f" input {describe(spec)}, {wanted} bytes, got {kind} {got} bytes; let"
                " get_batch_size, the allocation, the dtype and what is copied agree"
            )
        self._doubtful = not typed
        self._short.append(got // unit)
        return got // unit


def _address(pointer: object) -> int | None:
    """The address that a pointer stands for; None of what stands for none."""
    try:
        return address_of(pointer)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several values
        return None
