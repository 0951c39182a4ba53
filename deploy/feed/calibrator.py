"""A user's TensorRT calibrator as a feed: what it hands to TensorRT, without TensorRT and a GPU.

::

    old.py:make --> calibrator --get_batch(names)--> [address, ...] --read--> {input: array}
                        ^ on the modules of deploy.standins                    some samples each

TensorRT reads as many bytes behind each address as its input has, whatever lies there. Here they
must be the script's own, and of a last batch that holds fewer samples than `get_batch_size` only
those are read that were copied, where TensorRT reads old ones behind them once more.

All of it runs once, as the feed is opened; the arrays wait in a temporary file.

What a calibrator's `get_batch` hands over: addresses -> the arrays that lie there.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import ArraySource, Item, fixed_batch, from_iterable, is_batch
from deploy.feed.preprocess import describe
from deploy.files import usercode
from deploy.standins.memory import Memory, Window, address_of
from deploy.standins.modules import CalibrationAlgoType, StandIns
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


T = TypeVar("T")
MOST_SAMPLES = 1 << 16  # of a script that was given no limit
_WORDS = {
    CalibrationAlgoType.ENTROPY_CALIBRATION_2: "entropy2",
    CalibrationAlgoType.ENTROPY_CALIBRATION: "entropy",
    CalibrationAlgoType.MINMAX_CALIBRATION: "minmax",
    CalibrationAlgoType.LEGACY_CALIBRATION: "legacy",
}


class CalibratorScript:
    """The calibrator that `file.py:function` makes.

    Attributes:
        spec: how it was given.
        algorithm: "entropy2", "entropy", "minmax" or "legacy", as its base class says; else None.
        quantile: what a legacy calibrator's `get_quantile` says; else None.
        known: the bytes that its `read_calibration_cache` gives; None without.
        batch: samples a batch, as its `get_batch_size` says.
        notes: what the user should know beside what is found while it is asked.
    """

    def __init__(self, spec: str, *, notes: tuple[str, ...] = ()) -> None:
        """Import the file and make the calibrator; its batches are not asked for yet.

        Args:
            spec: `file.py:function`; the function takes nothing and gives the calibrator.
            notes: as the attribute.

        Raises:
            ConfigError: no such file or function, or one that takes arguments.
            FeedError: the user's code failed, or gave no calibrator.
        """
        self.spec = spec
        self.notes = notes
        self._stand_ins = StandIns()
        with self._stand_ins.installed():
            self._make = usercode.load_function(
                spec, what="a calibrator", form="file.py:function", error=FeedError
            )
        _refuse_arguments(self._make, spec)
        self._made = self._ask(self._make)
        self._asked = False
        for method in ("get_batch_size", "get_batch"):
            if not callable(self._own(method)):
                raise FeedError(
                    f"{self} must have get_batch_size and get_batch, got a"
                    f" {type(self._made).__name__} without {method}; return the calibrator"
                )
        self.batch = self._batch_size()
        self.algorithm = self._algorithm()
        self.quantile = self._quantile() if self.algorithm == "legacy" else None
        self.known = self._known()

    def __str__(self) -> str:
        return f"the calibrator {self.spec}"

    def source(self, specs: tuple[TensorSpec, ...], limit: int | None) -> ArraySource:
        """All samples that it gives, or the first so many; a second time it is made anew.

        Raises:
            FeedError: the user's code failed, or gave what does not fit the inputs; or it does not
                end, where there is no limit.
        """
        if self._asked:
            self._made = self._ask(self._make)
        self._asked = True
        notes = list(self.notes)
        found = from_iterable(self._batches(specs, limit, notes), specs, name=str(self))
        return replace(found, notes=(*notes, *found.notes))

    def _ask(self, function: Callable[..., T], *given: object) -> T:
        """Run some of the user's code; a wrong copy in it is told even where it was caught."""
        what = usercode.users_errors(str(self), error=FeedError)
        with what, self._stand_ins.installed():
            found = function(*given)
            if self._stand_ins.memory.fault is not None:
                raise self._stand_ins.memory.fault
        return found

    def _own(self, name: str) -> Any:
        """What it has of this name, or None."""
        return self._ask(getattr, self._made, name, None)

    def _batch_size(self) -> int:
        size = self._ask(self._made.get_batch_size)
        try:
            count = operator.index(size)
        except TypeError:
            count = 0
        if count < 1:
            raise FeedError(f"get_batch_size of {self} must give 1 or more, got {size!r:.60}")
        return count

    def _algorithm(self) -> str | None:
        if (method := self._own("get_algorithm")) is None:
            return None
        said = self._ask(method)
        return _WORDS.get(said) if isinstance(said, CalibrationAlgoType) else None

    def _quantile(self) -> float | None:
        if (method := self._own("get_quantile")) is None:
            return None
        said = self._ask(method)
        if not isinstance(said, float | int) or not 0.5 < said <= 1:
            raise FeedError(
                f"get_quantile of {self} must give a share over 0.5 and up to 1, got {said!r:.60}"
            )
        return float(said)

    def _known(self) -> bytes | None:
        if (method := self._own("read_calibration_cache")) is None:
            return None
        said = self._ask(method)
        return bytes(said) if isinstance(said, bytes | bytearray | memoryview) else None

    def _batches(
        self, specs: tuple[TensorSpec, ...], limit: int | None, notes: list[str]
    ) -> Iterator[Item]:
        """Batch by batch; `notes` are added to."""
        handed = Handed(str(self), self._stand_ins.memory, specs, self.batch)
        while (item := self._next(handed, specs)) is not None:
            beyond = handed.samples - (MOST_SAMPLES if limit is None else limit)
            if beyond >= 0 and limit is None:
                raise FeedError(
                    f"{self} must end with None or an empty list, got {handed.samples:,} samples"
                    " and no end; use the first so many of them (--limit)"
                )
            yield handed.without(item, max(beyond, 0))
            if beyond >= 0:
                notes.append(f"the first {limit} samples of {self} are used (--limit)")
                break
        notes += handed.notes

    def _next(self, handed: Handed, specs: tuple[TensorSpec, ...]) -> Item | None:
        """One batch; None at the end."""
        self._stand_ins.memory.settle()
        given = self._ask(self._pointers, [spec.name for spec in specs])
        several = isinstance(given, list | tuple | np.ndarray)
        if given is None or (several and not len(given)):
            return None
        if not several or len(given) != len(specs):
            got = len(given) if several else type(given).__name__
            raise FeedError(
                f"get_batch of {self} must give one address for each of"
                f" {[spec.name for spec in specs]}, got {got} in {handed.where}"
            )
        return handed.item(list(given))

    def _pointers(self, names: list[str]) -> Any:
        try:
            return self._made.get_batch(names)
        except StopIteration:  # TensorRT takes any exception for the end; this one means it
            return None


def _refuse_arguments(make: Any, spec: str) -> None:
    """Refuse a function that cannot be called without arguments."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"what makes a calibrator is called without arguments, got {spec}, where {error}; write"
            " a function that gives the calibrator its arguments"
        ) from None
    except ValueError:  # a signature that cannot be read
        return
