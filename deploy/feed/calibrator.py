"""A user's TensorRT calibrator as a feed: what it hands to TensorRT, without TensorRT and a GPU.

::

    old.py:make --> calibrator --get_batch(names)--> [address, ...] --read--> {input: array}
                        ^ on the modules of deploy.standins                    some samples each

TensorRT reads as many bytes behind each address as its input has, whatever lies there. Here they
must be the script's own, and of a last batch that holds fewer samples than `get_batch_size` only
those are read that were copied, where TensorRT reads old ones behind them once more.

All of it runs once, as the feed is opened; the arrays wait in a temporary file.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.arrays import ArraySource, Item, from_iterable
from deploy.feed.handed import Handed
from deploy.files import usercode
from deploy.standins.installed import StandIns
from deploy.standins.modules import CalibrationAlgoType
from deploy.tensors import TensorSpec

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
