"""A client of dask's scheduler: opened, asked and closed without a hang; one sentence if not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.errors import BackendError, SdkMissingError, first_line
from deploy.progress import phase

if TYPE_CHECKING:
    from distributed import Client

CONNECT_S = 10.0  # until the scheduler must have answered
ANSWER_S = 30.0  # until a busy one must have, later
_CLOSE_S = 2.0  # for taking leave
_LOUD = ("distributed", "tornado", "asyncio")
LATE = (TimeoutError, asyncio.TimeoutError, FutureTimeout)  # one and the same from Python 3.11 on
T = TypeVar("T")


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client, for as long as this lasts.

    Raises:
        SdkMissingError: dask.distributed is not installed.
        BackendError: no scheduler answers at this address, or it ends meanwhile.
    """
    with _quiet():
        client = _opened(address)
        try:
            with client.as_current():
                yield client
        except (OSError, *LATE) as error:  # dask's own, of a connection that is gone
            raise BackendError(
                f"the scheduler {address} must answer until the end, got: {first_line(error)}; see"
                " to it and run again"
            ) from error
        finally:
            with suppress(Exception):
                within(_CLOSE_S, client.close)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call gives, which is left to itself where it takes longer.

    Dask waits for the first words of whatever listens at an address, and for the answer of a
    scheduler that is frozen, without an end.

    Raises:
        TimeoutError: it takes longer.
        Exception: what the call raised.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="calib8 scheduler", daemon=True).start()
    try:
        return done.result(seconds)
    except LATE as error:
        if done.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _import() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise SdkMissingError(
            "a scheduler is spoken to by dask.distributed, which is not installed; pip install"
            " 'calib8[dask]'"
        ) from error
    return distributed


def _opened(address: str) -> Client:
    def client() -> Client:
        return _import().Client(address, timeout=CONNECT_S, set_as_default=False)

    try:
        with phase("scheduler"):
            return within(CONNECT_S, client)
    except Exception as error:
        raise BackendError(
            f"a dask scheduler must answer at {address} within {CONNECT_S:.0f} s, got:"
            f" {first_line(error)}; start `dask scheduler` there, or correct the address, such as"
            " tcp://host:8786"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own words of what becomes a sentence here, and of large models, are not shown."""
    _import()  # which sets the levels of its loggers
    known = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOUD]
    loggers = [logging.getLogger(name) for name in known]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
